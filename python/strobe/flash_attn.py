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
  - Attention sinks, by the names that later versions have for them: s_aux or learnable_sink.

Gradients of gradients are refused. Under autocast, tensors are cast as PyTorch's own
scaled_dot_product_attention casts them. Under torch.compile, vmap and whatever else must see each
operator, these functions call those of `_operators`; eagerly they do the same without PyTorch's
dispatcher, which saves its time.

Algorithm: T. Dao, "FlashAttention-2", arXiv:2307.08691.
"""

from __future__ import annotations

from typing import Literal, overload

from . import _flash_cache
from ._errors import InvalidArgument
from ._flash_attn import (
    DENSE,
    NO_WINDOW,
    Result,
    Tensor,
    as_flag,
    as_number,
    call,
    check_tensor,
    check_unused,
    unbound,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> Tensor: ...


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True], s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ..., *,
    s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
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
            i + seqlen_k - seqlen_q + right; -1, as any negative number: no limit. causal makes
            right 0.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c), before ALiBi and masks; 0: off.
        alibi_slopes: float32, (heads,) or (batch, heads): adds
            -slope * |i + seqlen_k - seqlen_q - j| to the score of query i and key j. A constant:
            slopes that require a gradient are refused, unless no gradients are recorded.
        deterministic: in the backward pass, the same bits for every number of CPU threads.
        return_attn_probs: return (out, softmax_lse, S_dmask).
        s_aux, learnable_sink: (heads,): attention sinks, one logit for each query head, by either
            name (FlashAttention-3 as vLLM has it, FlashAttention-4): it takes part in the softmax
            of its head's rows as the score of one more key, whose value is 0, and is neither scaled
            nor capped. Of any floating-point dtype, computed in float32. May require a gradient,
            which has its dtype.

    Returns:
        out, (batch, seqlen_q, heads, head_dim_v), or (out, softmax_lse, S_dmask).
        softmax_lse: natural logarithm of each row's sum of exponentials, float32,
        (batch, heads, seqlen_q). A sink's own is in the sum: of a query that sees no key it is the
        sink. S_dmask, to test dropout with: empty if dropout_p = 0, else
        (batch, heads, seqlen_q, seqlen_k), both lengths rounded up to multiples of 128, and zeros
        there: the weights before dropout, with the sign bit set where dropped. They are relative
        to the maximum of the key's block and those behind it, as flash_attn's own are, and a sink
        has none: see `strobe._s_dmask`.
        out and softmax_lse are differentiable, once.

    Raises:
        strobe.InvalidArgument: arguments that contradict each other or break a rule above; a
            ValueError. The text names the argument, what was got and what was wanted.
        strobe.Unsupported: no kernel takes this, with each one's reason; or a gradient that there
            is not is asked for; a NotImplementedError. Both are RuntimeErrors too.

    Example:
        >>> import torch
        >>> from strobe.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(3, 2, 300, 8, 64).requires_grad_()
        >>> out = flash_attn_func(q, k, v, causal=True, window_size=(128, 0))
        >>> out.sum().backward()
        >>> tuple(out.shape)
        (2, 300, 8, 64)
    """
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return call(q, k, v, DENSE, options, return_attn_probs, sinks=(s_aux, learnable_sink))


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., *,
    s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
) -> Tensor: ...


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True], s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ...,
    deterministic: bool = ..., return_attn_probs: bool = ..., *, s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Result:
    """`flash_attn_func` of q, k and v in one tensor, whose gradient is one tensor too.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), read where it lies.
        dropout_p, softmax_scale, causal, window_size: as `flash_attn_func`.
        softcap, alibi_slopes, deterministic, return_attn_probs: as `flash_attn_func`.
        s_aux, learnable_sink: as `flash_attn_func`.

    Returns, Raises: as `flash_attn_func`.

    Example:
        >>> import torch
        >>> from strobe.flash_attn import flash_attn_qkvpacked_func
        >>> qkv = torch.randn(2, 300, 3, 8, 64, requires_grad=True)
        >>> flash_attn_qkvpacked_func(qkv, causal=True).sum().backward()
        >>> tuple(qkv.grad.shape)
        (2, 300, 3, 8, 64)
    """
    check_tensor("qkv", qkv, ("batch", "seqlen", "3", "heads", "head_dim"))
    # Its derivative is one torch.stack; that of three slices, three sums.
    q, k, v = unbound("qkv", qkv, 2, 3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return call(q, k, v, DENSE, options, return_attn_probs, "qkv", sinks=(s_aux, learnable_sink))


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> Tensor: ...


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True], s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ..., *,
    s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Result:
    """`flash_attn_func` of k and v in one tensor, whose gradient is one tensor too.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        kv: (batch, seqlen_k, 2, heads_kv, head_dim), read where it lies.
        dropout_p, softmax_scale, causal, window_size: as `flash_attn_func`.
        softcap, alibi_slopes, deterministic, return_attn_probs: as `flash_attn_func`.
        s_aux, learnable_sink: as `flash_attn_func`.

    Returns, Raises: as `flash_attn_func`.

    Example:
        >>> import torch
        >>> from strobe.flash_attn import flash_attn_kvpacked_func
        >>> q, kv = torch.randn(2, 20, 8, 64), torch.randn(2, 300, 2, 4, 64)
        >>> tuple(flash_attn_kvpacked_func(q, kv, causal=True).shape)
        (2, 20, 8, 64)
    """
    check_tensor("kv", kv, ("batch", "seqlen_k", "2", "heads_kv", "head_dim"))
    k, v = unbound("kv", kv, 2, 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return call(q, k, v, DENSE, options, return_attn_probs, "kv", sinks=(s_aux, learnable_sink))


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., block_table: Tensor | None = ..., *,
    s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
) -> Tensor: ...


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True], block_table: Tensor | None = ..., s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ...,
    block_table: Tensor | None = ..., *, s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...


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
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Result:
    """`flash_attn_func` of sequences of different lengths, packed end to end.

    Args:
        q: (total_q, heads, head_dim).
        k: (total_k, heads_kv, head_dim).
        v: (total_k, heads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: int32, (batch + 1,), from 0 to at most total: where sequences
            begin and the last one ends.
        max_seqlen_q, max_seqlen_k: the longest sequences, or upper bounds.
        dropout_p, softmax_scale, causal, window_size: as `flash_attn_func`, each sequence alone.
        softcap, deterministic, return_attn_probs: as `flash_attn_func`.
        alibi_slopes: float32, (heads,) or (batch, heads).
        block_table: int32, (batch, pages_per_sequence): k and v are pages
            (pages, page_size, heads_kv, head_dim) of a cache, and cu_seqlens_k says how many keys
            each sequence has there: see `flash_attn_with_kvcache`. Without dropout; where q, k, v
            or a sink requires a gradient, the backward pass is a strobe.Unsupported.
        s_aux, learnable_sink: as `flash_attn_func`.

    Returns:
        out, (total_q, heads, head_dim_v), or (out, softmax_lse, S_dmask): softmax_lse is
        (heads, total_q), S_dmask (batch, heads, max_seqlen_q, max_seqlen_k), rounded up.

    Raises: as `flash_attn_func`.

    Example:
        Sequences of 100, 400 and 100 rows, end to end:

        >>> import torch
        >>> from strobe.flash_attn import flash_attn_varlen_func
        >>> offsets = torch.tensor([0, 100, 500, 600], dtype=torch.int32)
        >>> x = torch.randn(600, 8, 64)
        >>> out = flash_attn_varlen_func(x, x, x, offsets, offsets, 400, 400, causal=True)
        >>> tuple(out.shape)
        (600, 8, 64)
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        check_tensor("cu_seqlens_q", cu_seqlens_q, ("batch + 1",))
        check_tensor("cu_seqlens_k", cu_seqlens_k, ("batch + 1",))
    if block_table is not None:
        check_unused(max_seqlen_k=max_seqlen_k, deterministic=deterministic)
        if as_number("dropout_p", dropout_p) != 0:
            raise InvalidArgument(f"dropout_p = {dropout_p!r} with block_table, expected 0")
        with_lse = as_flag("return_attn_probs", return_attn_probs)
        out, lse = _flash_cache.paged_varlen(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, block_table),
            *(softmax_scale, causal, window_size, softcap, alibi_slopes),
            sinks=(s_aux, learnable_sink),
        )
        return (out, lse, q.new_empty(0)) if with_lse else out
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return call(q, k, v, lengths, options, return_attn_probs, sinks=(s_aux, learnable_sink))


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> Tensor: ...


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True], s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ...,
    softcap: float = ..., alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: bool = ..., *, s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Result:
    """`flash_attn_varlen_func` of q, k and v in one tensor, whose gradient is one tensor too.

    Args:
        qkv: (total, 3, heads, head_dim), read where it lies.
        cu_seqlens: int32, (batch + 1,), from 0 to at most total.
        max_seqlen: the longest sequence, or an upper bound.
        dropout_p, softmax_scale, causal, window_size: as `flash_attn_func`, each sequence alone.
        softcap, alibi_slopes, deterministic, return_attn_probs: as `flash_attn_varlen_func`.
        s_aux, learnable_sink: as `flash_attn_func`.

    Returns, Raises: as `flash_attn_varlen_func`.

    Example:
        >>> import torch
        >>> from strobe.flash_attn import flash_attn_varlen_qkvpacked_func
        >>> offsets = torch.tensor([0, 100, 500, 600], dtype=torch.int32)
        >>> out = flash_attn_varlen_qkvpacked_func(torch.randn(600, 3, 8, 64), offsets, 400)
        >>> tuple(out.shape)
        (600, 8, 64)
    """
    check_tensor("qkv", qkv, ("total", "3", "heads", "head_dim"))
    check_tensor("cu_seqlens", cu_seqlens, ("batch + 1",))
    q, k, v = unbound("qkv", qkv, 1, 3)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return call(q, k, v, lengths, options, return_attn_probs, "qkv", sinks=(s_aux, learnable_sink))


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ...,
    return_attn_probs: Literal[False] = ..., *, s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> Tensor: ...


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., *,
    return_attn_probs: Literal[True], s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = ..., softmax_scale: float | None = ...,
    causal: bool = ..., window_size: tuple[int, int] = ..., softcap: float = ...,
    alibi_slopes: Tensor | None = ..., deterministic: bool = ..., return_attn_probs: bool = ..., *,
    s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...


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
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Result:
    """`flash_attn_varlen_func` of k and v in one tensor, whose gradient is one tensor too.

    Args:
        q: (total_q, heads, head_dim).
        kv: (total_k, 2, heads_kv, head_dim), read where it lies.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as `flash_attn_varlen_func`.
        dropout_p, softmax_scale, causal, window_size: as `flash_attn_func`, each sequence alone.
        softcap, alibi_slopes, deterministic, return_attn_probs: as `flash_attn_varlen_func`.
        s_aux, learnable_sink: as `flash_attn_func`.

    Returns, Raises: as `flash_attn_varlen_func`.

    Example:
        >>> import torch
        >>> from strobe.flash_attn import flash_attn_varlen_kvpacked_func
        >>> offsets = torch.tensor([0, 100, 500, 600], dtype=torch.int32)
        >>> q, kv = torch.randn(600, 8, 64), torch.randn(600, 2, 4, 64)
        >>> out = flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 400, 400, causal=True)
        >>> tuple(out.shape)
        (600, 8, 64)
    """
    check_tensor("kv", kv, ("total_k", "2", "heads_kv", "head_dim"))
    check_tensor("cu_seqlens_q", cu_seqlens_q, ("batch + 1",))
    check_tensor("cu_seqlens_k", cu_seqlens_k, ("batch + 1",))
    k, v = unbound("kv", kv, 1, 2)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return call(q, k, v, lengths, options, return_attn_probs, "kv", sinks=(s_aux, learnable_sink))


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ..., cache_batch_idx: Tensor | None = ...,
    cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ...,
    softcap: float = ..., rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ...,
    num_splits: int = ..., return_softmax_lse: Literal[False] = ..., *, s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> Tensor: ...


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ..., cache_batch_idx: Tensor | None = ...,
    cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ...,
    softcap: float = ..., rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ...,
    num_splits: int = ..., *, return_softmax_lse: Literal[True], s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ..., cache_batch_idx: Tensor | None = ...,
    cache_leftpad: Tensor | None = ..., block_table: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ...,
    softcap: float = ..., rotary_interleaved: bool = ..., alibi_slopes: Tensor | None = ...,
    num_splits: int = ..., return_softmax_lse: bool = ..., *, s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


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
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Result:
    """Attention over a key-value cache, which new keys and values are appended to in place.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache: (cache_batch, capacity, heads_kv, head_dim), or with block_table
            (pages, page_size, heads_kv, head_dim), any strides with a contiguous last dimension,
            any page_size from 1.
        v_cache: the same with head_dim_v.
        k, v: (batch, seqlen_new, heads_kv, head_dim or head_dim_v): written to the cache where each
            sequence ends, before attention is computed over all of its keys.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), q's dtype: the rotary embedding of the
            first rotary_dim elements of q and k, at the positions cache_seqlens, cache_seqlens + 1,
            ... ; of q so if causal or a window is given, else all queries are at cache_seqlens.
        cache_seqlens: int, or int32 (batch,): the rows that each sequence has in the cache. None:
            all of it.
        cache_batch_idx: int32, (batch,): each sequence's entry of the cache; None: its own number.
        cache_leftpad: int32, (batch,): rows at the begin of each sequence that are skipped.
        block_table: int32, (batch, pages_per_sequence): row n of a sequence is row n % page_size
            of page block_table[b, n // page_size].
        softmax_scale, causal, window_size, softcap, alibi_slopes: as `flash_attn_func`.
        rotary_interleaved: rotate elements 2n and 2n + 1 together; else n and n + rotary_dim / 2.
        num_splits: changes nothing: the kernels find themselves how to divide the keys.
        return_softmax_lse: return (out, softmax_lse).
        s_aux, learnable_sink: as `flash_attn_func`, without a gradient.

    Returns:
        out, (batch, seqlen_q, heads, head_dim_v), or (out, softmax_lse), float32
        (batch, heads, seqlen_q). Without a gradient, as in flash_attn.

    Raises:
        As `flash_attn_func`. On the CPU a length, index or page out of range is a
        strobe.InvalidArgument, and nothing is written. On a GPU the rows of such a sequence are
        NaN, and it appends nothing: to look at the numbers, a call has to wait for the device,
        which it does, and raises, only where the environment has STROBE_CHECK_VALUES=1 (and no CUDA
        graph is captured).

    Example:
        >>> import torch
        >>> from strobe.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 2, 100, 2, 64)
        >>> q, (k, v) = torch.randn(2, 1, 8, 64), torch.randn(2, 2, 1, 2, 64)
        >>> lengths = torch.tensor([7, 12], dtype=torch.int32)
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
        >>> tuple(out.shape), torch.equal(k_cache[1, 12], k[1, 0])
        ((2, 1, 8, 64), True)
    """
    options = {
        "seqused_k": _flash_cache.lengths(cache_seqlens, q),
        "block_table": block_table,
        "cache_batch_idx": cache_batch_idx,
        "leftpad": cache_leftpad,
        "k_new": k,
        "v_new": v,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "alibi_slopes": alibi_slopes,
        "scale": softmax_scale,
        "causal": causal,
        "window": window_size,
        "softcap": softcap,
        "rotary_interleaved": rotary_interleaved,
    }
    if type(num_splits) is not int:
        check_unused(num_splits=num_splits)
    _flash_cache.rotary_start(options, q, k_cache)
    sinks = (s_aux, learnable_sink)
    return _flash_cache.call(q, k_cache, v_cache, options, return_softmax_lse, sinks=sinks)
