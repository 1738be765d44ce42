"""The functions of the package `flash_attn` (FlashAttention-2), for PyTorch tensors on CPUs and
NVIDIA GPUs.

    from strobe.flash_attn import flash_attn_func
    out = flash_attn_func(q, k, v, causal=True)         # (batch, seqlen, heads, head_dim)

Names, order, defaults and results of arguments are those of flash_attn 2.8. Differences, all of
them additions but the first:

  - A query that sees no key has softmax_lse = -inf (flash_attn: +inf): what merging partial
    results needs. Its out is 0 in both.
  - CPU tensors, and float32 on the CPU. Any head_dim to 256, and v may have another than q and k.
  - softmax_lse is differentiable.

Gradients of gradients are refused. Under autocast, tensors are cast as PyTorch's own
scaled_dot_product_attention casts them. Under torch.compile, vmap and whatever else must see each
operator, these functions call those of `_operators`; eagerly they do the same without PyTorch's
dispatcher, which saves its time.

Algorithm: T. Dao, "FlashAttention-2", arXiv:2307.08691.
"""

from __future__ import annotations

from ._errors import Unsupported
from ._flash_attn import DENSE, Result, Tensor, call, check_tensor, unbound

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Exact attention, softmax(softmax_scale * q k^T + bias) v, in memory linear in seqlen.

    Args:
        q: (batch, seqlen_q, heads, head_dim); float16 or bfloat16, on the CPU also float32.
        k: (batch, seqlen_k, heads_kv, head_dim), dtype and device of q. heads_kv divides heads:
            query head i reads key head i // (heads // heads_kv).
        v: (batch, seqlen_k, heads_kv, head_dim_v). head_dim and head_dim_v: 1 to 256.
        dropout_p: probability in [0, 1) of dropping a weight; kept ones are scaled by
            1 / (1 - dropout_p). Not together with softcap. Seed and offset come from PyTorch's
            default generator of q's device: torch.manual_seed repeats them.
        softmax_scale: multiplies q k^T; None: 1 / sqrt(head_dim).
        causal: query i sees keys up to i + seqlen_k - seqlen_q (bottom-right aligned).
        window_size: (left, right): query i sees keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right; -1: no limit. causal makes right 0.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c), before ALiBi and masks; 0: off.
        alibi_slopes: float32, (heads,) or (batch, heads): adds
            -slope * |i + seqlen_k - seqlen_q - j| to the score of query i and key j.
        deterministic: in the backward pass, the same bits for every number of CPU threads.
        return_attn_probs: return (out, softmax_lse, S_dmask).

    Returns:
        out, (batch, seqlen_q, heads, head_dim_v), or (out, softmax_lse, S_dmask).
        softmax_lse: natural logarithm of each row's sum of exponentials, float32,
        (batch, heads, seqlen_q). S_dmask, to test dropout with: empty if dropout_p = 0, else
        (batch, heads, seqlen_q, seqlen_k), both lengths rounded up to multiples of 128, and zeros
        there: the weights before dropout, with the sign bit set where dropped. They are relative
        to the maximum of the key's block and those behind it, as flash_attn's own are: see
        `strobe._s_dmask`.
        out and softmax_lse are differentiable, once.

    Raises:
        strobe.InvalidArgument: arguments that contradict each other or break a rule above; a
            ValueError. The text names the argument, what was got and what was wanted.
        strobe.Unsupported: no kernel takes this, with each one's reason; a NotImplementedError.
    """
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return call(q, k, v, DENSE, options, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q, k and v in one tensor, whose gradient is one tensor too.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), read where it lies.
        dropout_p, softmax_scale, causal, window_size: as `flash_attn_func`.
        softcap, alibi_slopes, deterministic, return_attn_probs: as `flash_attn_func`.

    Returns, Raises: as `flash_attn_func`.
    """
    check_tensor("qkv", qkv, ("batch", "seqlen", "3", "heads", "head_dim"))
    # Its derivative is one torch.stack; that of three slices, three sums.
    q, k, v = unbound("qkv", qkv, 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return call(q, k, v, DENSE, options, return_attn_probs, "qkv")


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of k and v in one tensor, whose gradient is one tensor too.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        kv: (batch, seqlen_k, 2, heads_kv, head_dim), read where it lies.
        dropout_p, softmax_scale, causal, window_size: as `flash_attn_func`.
        softcap, alibi_slopes, deterministic, return_attn_probs: as `flash_attn_func`.

    Returns, Raises: as `flash_attn_func`.
    """
    check_tensor("kv", kv, ("batch", "seqlen_k", "2", "heads_kv", "head_dim"))
    k, v = unbound("kv", kv, 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return call(q, k, v, DENSE, options, return_attn_probs, "kv")


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """`flash_attn_func` of sequences of different lengths, packed end to end.

    Args:
        q: (total_q, heads, head_dim).
        k: (total_k, heads_kv, head_dim).
        v: (total_k, heads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: int32, (batch + 1,), from 0 to total: where sequences begin and
            the last one ends.
        max_seqlen_q, max_seqlen_k: the longest sequences, or upper bounds.
        dropout_p, softmax_scale, causal, window_size: as `flash_attn_func`, each sequence alone.
        softcap, deterministic, return_attn_probs: as `flash_attn_func`.
        alibi_slopes: float32, (heads,) or (batch, heads).
        block_table: a paged key-value cache: not supported yet, expected None.

    Returns:
        out, (total_q, heads, head_dim_v), or (out, softmax_lse, S_dmask): softmax_lse is
        (heads, total_q), S_dmask (batch, heads, max_seqlen_q, max_seqlen_k), rounded up.

    Raises: as `flash_attn_func`.
    """
    if block_table is not None:
        raise Unsupported("block_table: a paged key-value cache is not supported yet")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        check_tensor("cu_seqlens_q", cu_seqlens_q, ("batch + 1",))
        check_tensor("cu_seqlens_k", cu_seqlens_k, ("batch + 1",))
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return call(q, k, v, lengths, options, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q, k and v in one tensor, whose gradient is one tensor too.

    Args:
        qkv: (total, 3, heads, head_dim), read where it lies.
        cu_seqlens: int32, (batch + 1,), from 0 to total.
        max_seqlen: the longest sequence, or an upper bound.
        dropout_p, softmax_scale, causal, window_size: as `flash_attn_func`, each sequence alone.
        softcap, alibi_slopes, deterministic, return_attn_probs: as `flash_attn_varlen_func`.

    Returns, Raises: as `flash_attn_varlen_func`.
    """
    check_tensor("qkv", qkv, ("total", "3", "heads", "head_dim"))
    check_tensor("cu_seqlens", cu_seqlens, ("batch + 1",))
    q, k, v = unbound("qkv", qkv, 1)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return call(q, k, v, lengths, options, return_attn_probs, "qkv")


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of k and v in one tensor, whose gradient is one tensor too.

    Args:
        q: (total_q, heads, head_dim).
        kv: (total_k, 2, heads_kv, head_dim), read where it lies.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as `flash_attn_varlen_func`.
        dropout_p, softmax_scale, causal, window_size: as `flash_attn_func`, each sequence alone.
        softcap, alibi_slopes, deterministic, return_attn_probs: as `flash_attn_varlen_func`.

    Returns, Raises: as `flash_attn_varlen_func`.
    """
    check_tensor("kv", kv, ("total_k", "2", "heads_kv", "head_dim"))
    check_tensor("cu_seqlens_q", cu_seqlens_q, ("batch + 1",))
    check_tensor("cu_seqlens_k", cu_seqlens_k, ("batch + 1",))
    k, v = unbound("kv", kv, 1)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return call(q, k, v, lengths, options, return_attn_probs, "kv")


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attention over a key-value cache that is appended to in place: not there yet.

    Raises:
        strobe.Unsupported: always; a NotImplementedError.
    """
    raise Unsupported(
        "flash_attn_with_kvcache is not in this version of Strobe: append to the cache yourself "
        "and call flash_attn_func(q, k_cache[:, :length], v_cache[:, :length], causal=causal), "
        "which aligns q with the end of the cache"
    )
