"""The functions of FlashAttention-3 (its module `flash_attn_interface`), for PyTorch tensors on
CPUs and NVIDIA GPUs: for serving code that is written for their arguments.

    from strobe.flash_attn_3 import flash_attn_with_kvcache

Names, order, defaults and results are those of FlashAttention-3; what an argument means is said in
`strobe.flash_attn` and below. num_splits, pack_gqa, sm_margin tune the original's kernels and
change no result: Strobe's kernels decide for themselves. What this module cannot do is refused with
the reason: qv. Attention sinks are taken by keyword: s_aux, as vLLM's FlashAttention-3 calls them,
or learnable_sink, FlashAttention-4's name. There is no flash_attn_qkvpacked_func:
`strobe.flash_attn` has one, and qkv.unbind(-3) gives q, k and v.

Of float8 q is torch.float8_e4m3fn, k and v are that or torch.float8_e5m2, and out is bfloat16, as
there; nothing is rotated. Tensors may require a gradient, as there, and the backward pass is a
strobe.Unsupported. What is appended to a cache is of its dtype, and its codes are copied: k_descale
and v_descale are theirs too.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from . import _core, _flash_cache, _flash_float8
from ._errors import Error, InvalidArgument, Unsupported, renamed
from ._flash_attn import (
    DENSE,
    NO_WINDOW,
    Lengths,
    Options,
    Result,
    Sinks,
    Tensor,
    as_flag,
    as_integer,
    call,
    check_tensor,
    check_unused,
    limited,
    named_sinks,
    taken,
)
from ._kvcache import attention_with_kvcache
from ._merge import merge
from .functional import attention

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_DESCALES = ("q_descale", "k_descale", "v_descale")
_NAMES = {**_flash_cache.NAMES, "block_table": "page_table", "rotary_position": "rotary_seqlens"}


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = ..., causal: bool = ...,
    qv: Tensor | None = ..., q_descale: Tensor | None = ..., k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ..., window_size: tuple[int, int] = ..., attention_chunk: int = ...,
    softcap: float = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    deterministic: bool = ..., sm_margin: int = ..., return_attn_probs: Literal[False] = ..., *,
    s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
) -> Tensor: ...


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = ..., causal: bool = ...,
    qv: Tensor | None = ..., q_descale: Tensor | None = ..., k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ..., window_size: tuple[int, int] = ..., attention_chunk: int = ...,
    softcap: float = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    deterministic: bool = ..., sm_margin: int = ..., *, return_attn_probs: Literal[True],
    s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = ..., causal: bool = ...,
    qv: Tensor | None = ..., q_descale: Tensor | None = ..., k_descale: Tensor | None = ...,
    v_descale: Tensor | None = ..., window_size: tuple[int, int] = ..., attention_chunk: int = ...,
    softcap: float = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    deterministic: bool = ..., sm_margin: int = ..., return_attn_probs: bool = ..., *,
    s_aux: Tensor | None = ..., learnable_sink: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Result:
    """`strobe.flash_attn.flash_attn_func` without dropout and ALiBi, with attention_chunk.

    Args:
        q, k, v, softmax_scale, causal, window_size, softcap, deterministic: as there.
        attention_chunk: c > 0: a query sees only keys of its own chunk, the c key positions from a
            multiple of c on; 0: off.
        qv: refused, expected None.
        q_descale, k_descale, v_descale: float32, (batch or 1, heads_kv), any strides: what q, k and
            v of float8 are multiplied by; None: 1. See the module.
        num_splits, pack_gqa, sm_margin: change nothing.
        return_attn_probs: return (out, softmax_lse).
        s_aux, learnable_sink: attention sinks, as there. softmax_lse has them in it.

    Returns:
        out, or (out, softmax_lse); both are differentiable.

    Raises: as there.

    Example:
        >>> import torch
        >>> from strobe.flash_attn_3 import flash_attn_func
        >>> q, k, v = torch.randn(3, 2, 300, 8, 64)
        >>> out, softmax_lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        >>> tuple(out.shape), tuple(softmax_lse.shape)
        ((2, 300, 8, 64), (2, 8, 300))
    """
    _refuse(qv=qv)
    sinks = (s_aux, learnable_sink)
    if type(num_splits) is not int or type(sm_margin) is not int or pack_gqa is not None:
        check_unused(num_splits=num_splits, sm_margin=sm_margin, pack_gqa=pack_gqa)
    if _is_float8(q, q_descale, k_descale, v_descale):
        more = {"scale": softmax_scale, "causal": causal, "window": window_size}
        more |= {"softcap": softcap, "attention_chunk": attention_chunk}
        descales = (q_descale, k_descale, v_descale)
        return _float8(q, k, v, descales, more, return_attn_probs, sinks)
    options = (0.0, softmax_scale, causal, window_size, softcap, None, deterministic)
    return _attend(q, k, v, DENSE, options, attention_chunk, return_attn_probs, sinks)


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, seqused_q: Tensor | None = ..., seqused_k: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., qv: Tensor | None = ...,
    q_descale: Tensor | None = ..., k_descale: Tensor | None = ..., v_descale: Tensor | None = ...,
    window_size: tuple[int, int] = ..., attention_chunk: int = ..., softcap: float = ...,
    num_splits: int = ..., pack_gqa: bool | None = ..., deterministic: bool = ...,
    sm_margin: int = ..., return_attn_probs: Literal[False] = ..., *, s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> Tensor: ...


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, seqused_q: Tensor | None = ..., seqused_k: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., qv: Tensor | None = ...,
    q_descale: Tensor | None = ..., k_descale: Tensor | None = ..., v_descale: Tensor | None = ...,
    window_size: tuple[int, int] = ..., attention_chunk: int = ..., softcap: float = ...,
    num_splits: int = ..., pack_gqa: bool | None = ..., deterministic: bool = ...,
    sm_margin: int = ..., *, return_attn_probs: Literal[True], s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, seqused_q: Tensor | None = ..., seqused_k: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., qv: Tensor | None = ...,
    q_descale: Tensor | None = ..., k_descale: Tensor | None = ..., v_descale: Tensor | None = ...,
    window_size: tuple[int, int] = ..., attention_chunk: int = ..., softcap: float = ...,
    num_splits: int = ..., pack_gqa: bool | None = ..., deterministic: bool = ...,
    sm_margin: int = ..., return_attn_probs: bool = ..., *, s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Result:
    """`flash_attn_func` of sequences of different lengths, packed end to end.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in
            `strobe.flash_attn.flash_attn_varlen_func`.
        seqused_q, seqused_k: int32, (batch,): so many rows of each sequence are in use, the first.
        softmax_scale, causal, window_size, attention_chunk, softcap, deterministic: as
            `flash_attn_func`.
        qv: refused, expected None.
        q_descale, k_descale, v_descale: float32, (batch or 1, heads_kv), any strides: what q, k and
            v of float8 are multiplied by; None: 1. See the module.
        num_splits, pack_gqa, sm_margin: change nothing.
        return_attn_probs: return (out, softmax_lse).
        s_aux, learnable_sink: as `flash_attn_func`.

    Returns:
        out, (total_q, heads, head_dim_v), or (out, softmax_lse), (heads, total_q).

    Raises: as `flash_attn_func`.

    Example:
        >>> import torch
        >>> from strobe.flash_attn_3 import flash_attn_varlen_func
        >>> offsets = torch.tensor([0, 100, 500, 600], dtype=torch.int32)
        >>> used = torch.tensor([90, 400, 0], dtype=torch.int32)
        >>> x = torch.randn(600, 8, 64)
        >>> out = flash_attn_varlen_func(x, x, x, offsets, offsets, 400, 400, seqused_k=used)
        >>> tuple(out.shape)
        (600, 8, 64)
    """
    _refuse(qv=qv)
    sinks = (s_aux, learnable_sink)
    if type(num_splits) is not int or type(sm_margin) is not int or pack_gqa is not None:
        check_unused(num_splits=num_splits, sm_margin=sm_margin, pack_gqa=pack_gqa)
    check_tensor("cu_seqlens_q", cu_seqlens_q, ("batch + 1",))
    check_tensor("cu_seqlens_k", cu_seqlens_k, ("batch + 1",))
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (0.0, softmax_scale, causal, window_size, softcap, None, deterministic)
    used = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    if _is_float8(q, q_descale, k_descale, v_descale):
        more = {"scale": softmax_scale, "causal": causal, "window": window_size, **used}
        more |= {"softcap": softcap, "attention_chunk": attention_chunk}
        more |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        more |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        descales = (q_descale, k_descale, v_descale)
        return _float8(q, k, v, descales, more, return_attn_probs, sinks)
    return _attend(q, k, v, lengths, options, attention_chunk, return_attn_probs, sinks, **used)


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    qv: Tensor | None = ..., rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ..., cache_batch_idx: Tensor | None = ...,
    cache_leftpad: Tensor | None = ..., page_table: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k_new: Tensor | None = ...,
    max_seqlen_q: int | None = ..., rotary_seqlens: Tensor | None = ...,
    q_descale: Tensor | None = ..., k_descale: Tensor | None = ..., v_descale: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ...,
    attention_chunk: int = ..., softcap: float = ..., rotary_interleaved: bool = ...,
    scheduler_metadata: Tensor | None = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    sm_margin: int = ..., return_softmax_lse: Literal[False] = ..., *, s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> Tensor: ...


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    qv: Tensor | None = ..., rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ..., cache_batch_idx: Tensor | None = ...,
    cache_leftpad: Tensor | None = ..., page_table: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k_new: Tensor | None = ...,
    max_seqlen_q: int | None = ..., rotary_seqlens: Tensor | None = ...,
    q_descale: Tensor | None = ..., k_descale: Tensor | None = ..., v_descale: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ...,
    attention_chunk: int = ..., softcap: float = ..., rotary_interleaved: bool = ...,
    scheduler_metadata: Tensor | None = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    sm_margin: int = ..., *, return_softmax_lse: Literal[True], s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = ..., v: Tensor | None = ...,
    qv: Tensor | None = ..., rotary_cos: Tensor | None = ..., rotary_sin: Tensor | None = ...,
    cache_seqlens: int | Tensor | None = ..., cache_batch_idx: Tensor | None = ...,
    cache_leftpad: Tensor | None = ..., page_table: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k_new: Tensor | None = ...,
    max_seqlen_q: int | None = ..., rotary_seqlens: Tensor | None = ...,
    q_descale: Tensor | None = ..., k_descale: Tensor | None = ..., v_descale: Tensor | None = ...,
    softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ...,
    attention_chunk: int = ..., softcap: float = ..., rotary_interleaved: bool = ...,
    scheduler_metadata: Tensor | None = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    sm_margin: int = ..., return_softmax_lse: bool = ..., *, s_aux: Tensor | None = ...,
    learnable_sink: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Result:
    """`strobe.flash_attn.flash_attn_with_kvcache`, also of packed queries and packed new keys.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or with cu_seqlens_q (total_q, heads, head_dim).
        k_cache, v_cache, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad: as
            there.
        k, v: as there, or with cu_seqlens_k_new (total_new, heads_kv, ...).
        page_table: block_table there. With cache_batch_idx, sequence b has the pages of the table's
            row cache_batch_idx[b], so that the table may have other rows than q has sequences.
        cu_seqlens_q, cu_seqlens_k_new: int32, (batch + 1,), from 0 to at most total.
        max_seqlen_q: the longest sequence of queries with cu_seqlens_q, or an upper bound; None:
            found from cu_seqlens_q, if that is in the CPU's memory.
        rotary_seqlens: int32, (batch,): the position of each sequence's first query and new key;
            None: cache_seqlens. Without rotary_cos nothing is rotated, and it changes nothing.
        softmax_scale, causal, window_size, softcap, rotary_interleaved: as there.
        attention_chunk: as `flash_attn_func`.
        qv: refused, expected None.
        q_descale, k_descale, v_descale: float32, (batch or 1, heads_kv), any strides: what q, k and
            v of float8 are multiplied by; None: 1. See the module.
        scheduler_metadata: what `get_scheduler_metadata` gives, which is None.
        num_splits, pack_gqa, sm_margin: change nothing.
        return_softmax_lse: return (out, softmax_lse).
        s_aux, learnable_sink: as `flash_attn_func`, without a gradient.

    Returns, Raises: as there; softmax_lse of packed queries is (heads, total_q).

    Example:
        A sequence whose 20 rows lie in pages 3 and 1 of a pool of pages of 16 rows:

        >>> import torch
        >>> from strobe.flash_attn_3 import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.randn(2, 4, 16, 2, 64)
        >>> table = torch.tensor([[3, 1]], dtype=torch.int32)
        >>> q = torch.randn(1, 1, 8, 64)
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=20, page_table=table)
        >>> tuple(out.shape)
        (1, 1, 8, 64)
    """
    _refuse(qv=qv)
    sinks = (s_aux, learnable_sink)
    if type(num_splits) is not int or type(sm_margin) is not int or pack_gqa is not None:
        check_unused(num_splits=num_splits, sm_margin=sm_margin, pack_gqa=pack_gqa)
    _refuse(scheduler_metadata=scheduler_metadata)
    if cache_batch_idx is not None and page_table is not None:
        page_table = _flash_cache.chosen_pages("page_table", page_table, cache_batch_idx)
        cache_batch_idx = None
    if rotary_seqlens is not None and rotary_cos is None and rotary_sin is None:
        check_tensor("rotary_seqlens", rotary_seqlens, ("batch",))
        rotary_seqlens = None
    options = {
        "seqused_k": _flash_cache.lengths(cache_seqlens, q, cu_seqlens_q),
        "block_table": page_table,
        "cache_batch_idx": cache_batch_idx,
        "leftpad": cache_leftpad,
        "k_new": k,
        "v_new": v,
        "cu_seqlens_k_new": cu_seqlens_k_new,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_position": rotary_seqlens,
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q if cu_seqlens_q is not None else None,
        "scale": softmax_scale,
        "causal": causal,
        "window": window_size,
        "softcap": softcap,
        "rotary_interleaved": rotary_interleaved,
        "attention_chunk": attention_chunk,
    }
    if rotary_seqlens is None:
        _flash_cache.rotary_start(options, q, k_cache)
    if _is_float8(q, q_descale, k_descale, v_descale):
        descales = (q_descale, k_descale, v_descale)
        tensors = (q, k_cache, v_cache)
        return _float8(*tensors, descales, options, return_softmax_lse, sinks, cached=True)
    return _flash_cache.call(
        q, k_cache, v_cache, options, return_softmax_lse, _NAMES, sinks=sinks
    )


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Joins partial results: `strobe.merge` with FlashAttention-3's shapes.

    Args:
        out_partial: float32, (parts, batch, seqlen_q, heads, head_dim_v), or without batch.
        lse_partial: float32, (parts, batch, seqlen_q, heads), or without batch.
        out: where to write the result.
        out_dtype: of a new out; None: float32.

    Returns:
        (out, softmax_lse), softmax_lse (batch, seqlen_q, heads) as lse_partial has it.

    Example:
        >>> import torch
        >>> from strobe.flash_attn_3 import flash_attn_combine
        >>> parts, lses = torch.randn(3, 2, 10, 8, 64), torch.randn(3, 2, 10, 8)
        >>> out, softmax_lse = flash_attn_combine(parts, lses)
        >>> tuple(out.shape), tuple(softmax_lse.shape)
        ((2, 10, 8, 64), (2, 10, 8))
    """
    check_tensor("out_partial", out_partial, None)
    if out_partial.ndim not in (4, 5):
        raise InvalidArgument(
            f"out_partial.ndim = {out_partial.ndim}, expected 5: (parts, batch, seqlen_q, heads, "
            "head_dim_v) or 4: (parts, seqlen_q, heads, head_dim_v)"
        )
    check_tensor("lse_partial", lse_partial, None)
    got, wanted = taken("lse_partial", lse_partial, lambda x: x.shape), out_partial.shape[:-1]
    if got != wanted:
        raise InvalidArgument(
            f"lse_partial.shape = {tuple(got)}, expected {tuple(wanted)} (out_partial.shape[:-1])"
        )
    turned = taken("lse_partial", lse_partial, lambda x: x.transpose(-1, -2))
    try:
        merged, lse = merge(out_partial, turned, out=out, out_dtype=out_dtype)
    except Error as error:
        names = {"outs": "out_partial", "lses": "lse_partial"}
        raise type(error)(renamed(str(error), names)) from None
    _core.came_by("flash_attn_combine")
    return merged, lse.transpose(-1, -2)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """FlashAttention-3 plans a launch ahead here; Strobe's kernels do it in the launch.

    Returns:
        None, which `flash_attn_with_kvcache` takes.

    Example:
        >>> import torch
        >>> from strobe.flash_attn_3 import get_scheduler_metadata
        >>> get_scheduler_metadata(2, 1, 100, 8, 2, 64, torch.tensor([7, 12], dtype=torch.int32))
    """


_REASONS = {
    "qv": "a second product of queries with values is not supported",
    "scheduler_metadata": "kernels find their schedule in the launch: get_scheduler_metadata() "
    "gives None",
}


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: Options,
    attention_chunk: Any,
    return_attn_probs: Any,
    sinks: Sinks,
    **used: Tensor | None,
) -> Result:
    """What both functions without a cache do. used: seqused_q and seqused_k, if there are any."""
    attention_chunk = as_integer("attention_chunk", attention_chunk)
    given = {name: x for name, x in used.items() if x is not None}
    for name, x in given.items():
        check_tensor(name, x, ("batch",))
    more: dict[str, Any] = given
    if torch.compiler.is_dynamo_compiling() or attention_chunk != 0:
        more = {"attention_chunk": attention_chunk, **given}
    found = call(q, k, v, lengths, options, return_attn_probs, sinks=sinks, more=more)
    return found[:2] if isinstance(found, tuple) else found


def _is_float8(q: Any, *descales: Any) -> bool:
    """Whether a call is one of float8 attention."""
    if str(getattr(q, "dtype", "")).startswith("torch.float8"):
        return True
    for name, x in zip(_DESCALES, descales, strict=True):
        if x is not None:
            raise InvalidArgument(
                f"{name} is given with q.dtype = {getattr(q, 'dtype', None)}, expected None: it "
                "belongs to float8 tensors"
            )
    return False


def _float8(
    q: Any,
    k: Any,
    v: Any,
    descales: tuple[Any, ...],
    options: dict[str, Any],
    return_lse: Any,
    sinks: Sinks,
    *,
    cached: bool = False,
) -> Result:
    """The three functions of float8. Without a cache tensors may require a gradient, as there: the
    error is that of the backward pass. With one results have none, as of floats.
    """
    given = dict(zip(_DESCALES, descales, strict=True))
    name_of_sinks, logits = named_sinks(sinks)
    passed = {"q": q, "k": k, "v": v, **given, name_of_sinks: logits}
    tensors = {name: x for name, x in passed.items() if x is not None}
    for name, x in tensors.items():
        check_tensor(name, x, None)
    tracing = torch.compiler.is_dynamo_compiling()
    wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    # The library has scales of both or of neither.
    for one, other in (("k_descale", "v_descale"), ("v_descale", "k_descale")):
        if given[one] is None and given[other] is not None:
            given[one] = torch.ones_like(given[other])
    scales = {name.replace("descale", "scale"): x for name, x in given.items()}
    if options["window"] is not NO_WINDOW:
        options["window"] = limited(options["window"])
    names = dict(zip(scales, given, strict=True))
    names |= {"scale": "softmax_scale", "window": "window_size", "sinks": name_of_sinks}
    if cached:
        names |= _NAMES
    serve: Any = attention_with_kvcache if cached else attention
    try:
        more = {**options, **scales, "sinks": logits}
        if not cached and (tracing or wants_gradients or not _core.unwatched(q, k, v)):
            both = _flash_float8.call(q, k, v, more, names)
            found = both if as_flag("return_attn_probs", return_lse) else both[0]
        else:
            found = serve(q, k, v, return_lse=return_lse, **more)
    except Error as error:
        raise type(error)(renamed(str(error), names)) from None
    function = "flash_attn_with_kvcache" if cached else "flash_attn_func"
    if not tracing:
        _core.came_by("flash_attn_varlen_func" if "cu_seqlens_k" in options else function)
    result: Result = found
    return result


def _refuse(**arguments: Any) -> None:
    """Of arguments that have to be None."""
    for name, x in arguments.items():
        if x is not None:
            raise Unsupported(f"{name} is given, expected None: {_REASONS[name]}")
