"""Attention, forward and backward, as functions of arrays.

Each call takes three steps, as the C library does: the arguments become a *problem*, the problem a
*plan*, and the plan is *launched*. `_core` keeps plans by shapes, strides, dtypes, devices and
options, so that a problem that was seen before skips the first two. Checks of shapes, strides and
options run when a plan is made (`_problem`); what a key cannot hold (addresses, the contents of
cu_seqlens) the library checks at each call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from . import _core, _plans
from ._arrays import AnyArray, NDArray, SupportsDLPack
from ._errors import InvalidArgument
from ._merge import is_float
from ._options import CallOptions, documented
from ._values import constant, flag, is_flag

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._arrays import Tensor
    from ._merge import DType

__all__ = ["attention", "attention_backward"]


@overload
def attention(
    q: NDArray,
    k: AnyArray,
    v: AnyArray,
    *,
    out: NDArray | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> NDArray: ...


@overload
def attention(
    q: NDArray,
    k: AnyArray,
    v: AnyArray,
    *,
    out: NDArray | None = ...,
    return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[NDArray, NDArray]: ...


@overload
def attention(
    q: Tensor,
    k: AnyArray,
    v: AnyArray,
    *,
    out: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: AnyArray,
    v: AnyArray,
    *,
    out: Tensor | None = ...,
    return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(  # type: ignore[overload-cannot-match] # where Tensor is Any
    q: SupportsDLPack,
    k: AnyArray,
    v: AnyArray,
    *,
    out: None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> NDArray: ...


@overload
def attention(  # type: ignore[overload-cannot-match] # where Tensor is Any
    q: SupportsDLPack,
    k: AnyArray,
    v: AnyArray,
    *,
    out: None = ...,
    return_lse: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[NDArray, NDArray]: ...


@overload
def attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    out: AnyArray | None = ...,
    return_lse: bool = ...,
    **options: Unpack[CallOptions],
) -> Any: ...


@documented
def attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    out: AnyArray | None = None,
    return_lse: bool = False,
    **options: Unpack[CallOptions],
) -> Any:
    """softmax(scale * q k^T + bias) v, exactly, in memory linear in the sequence length.

    Algorithm 1 of T. Dao, "FlashAttention-2", arXiv:2307.08691.

    Arrays are NumPy arrays, PyTorch tensors, or anything with DLPack. They are read where they lie,
    never copied: any strides with a contiguous last dimension will do. q, k, v and out have one
    dtype: float32, float16 or bfloat16 (a NumPy dtype of ml_dtypes, or a PyTorch tensor); sums are
    float32. Or q is float8_e4m3fn, k and v are float8_e4m3fn or both float8_e5m2, with scales
    (`quantize` with scale="batch_head" makes both), and out is bfloat16.

    Args:
        q: queries, (batch, seqlen_q, heads, head_dim).
        k: keys, (batch, seqlen_k, heads_kv, head_dim). heads_kv divides heads: query head i reads
            key head i // (heads // heads_kv).
        v: values, (batch, seqlen_k, heads_kv, head_dim_v). head_dim and head_dim_v: 1 to 256.
        causal: query i sees keys up to i + seqlen_k - seqlen_q (bottom-right aligned).
        window: (left, right): query i sees keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right; -1: no limit. causal makes right 0 at most. None is no
            limit either, and the other number is then one of either sign, as both are with
            window_signed: (None, -1) are the keys before a query's own position.
        scale: multiplies q k^T; None: 1 / sqrt(head_dim).
        softcap: c > 0 turns a scaled score s into c * tanh(s / c), before ALiBi and masks; 0: off.
        alibi_slopes: float32, (heads,) or (batch, heads): adds
            -slope * |i + seqlen_k - seqlen_q - j| to the score of query i and key j. As a tensor
            that requires a gradient it is refused, unless no gradients are recorded.
        bias: float32, bfloat16 or float16, (batch, heads, seqlen_q, seqlen_k), each of the first
            three 1 where all share it; any strides, 0 too. Added to the scores after softcap; -inf
            hides a pair as a mask does. Packed sequences count queries and keys from 0 each; the
            last two are then at least the longest lengths.
        dropout_p: probability in [0, 1) of dropping a weight; kept ones are scaled by
            1 / (1 - dropout_p).
        dropout_seed, dropout_offset: of the Philox generator, 0 to 2**64 - 1. The same pair drops
            the same weights, in forward and backward, whatever the number of threads: see
            `dropout_mask`.
        dropout_first_query, dropout_first_key, dropout_first_head, dropout_heads: where this call
            lies in a larger one, of whose weights dropout drops the same ones: the numbers there of
            each sequence's first query and first key (on GPUs a multiple of 8), of the first
            sequence's first head, counted through all sequences (sequence * dropout_heads + head),
            and how many heads there are; 0: as many as here. With dropout_p > 0 alone.
        cu_seqlens_q, cu_seqlens_k: int32, (batch + 1,), from 0 to at most total: sequences of
            different lengths packed end to end. q, k, v and out are then (total, heads, head_dim).
        max_seqlen_q, max_seqlen_k: the longest sequences with cu_seqlens, or upper bounds; None:
            found from cu_seqlens, if those are in the CPU's memory.
        batch_invariant: a row's bits depend neither on the other queries of the call, nor on other
            sequences, nor on where keys lie: by default kernels are chosen by the whole.
        threads: CPU threads at most; 0: for PyTorch tensors torch.get_num_threads(), else OpenMP's
            number (OMP_NUM_THREADS) as it was when a call of this kind was first made.
        attention_chunk: c > 0: a query sees keys of its own chunk only: the c key positions from a
            multiple of c on; combines with causal and window. 0: off.
        seqused_q, seqused_k: int32, (batch,): so many rows of each sequence are in use, the first
            ones. The rows that follow are never read; their out is 0, their lse -inf and their
            gradients are 0. Masks and ALiBi align the last query in use with the last key in use.
        q_position: int32, (batch,): the key position of each sequence's first query, in place of
            seqlen_k - seqlen_q; -2**30 to 2**30.
        prefix: int32, (batch,): so many keys at the begin of each sequence are seen by all of its
            queries, whatever causal says (prefix-LM). Not with attention_chunk or a left window.
        window_signed: -1 and other negative numbers of window are limits, on the other side of a
            query's own position: (8, -3) are the keys from 8 to 3 positions before it. Together
            they are at least 0. Not with attention_chunk.
        sinks: float32, (heads,): attention sinks. Each takes part in the softmax of its head's rows
            as the score of one more key, whose value is 0; it is neither scaled nor capped. -inf:
            none.
        sinks_outside_lse: lse is that of the keys alone.
        mask: a mask as data, of `strobe.masks`, for these lengths, batch and heads: a pair is seen
            if it and all other options allow it.
        mask_layout: of a mask that is given as its words, `Mask.packed`: its `Mask.layout`.
        q_scale, k_scale, v_scale: of float8: what the values of a sequence's key head (of q: of the
            query heads that share it) are multiplied by. float32, (batch or 1, heads_kv), any
            strides, 0 too; None: 1. k and v have both or neither.
        out: where to write the result, (batch, seqlen_q, heads, head_dim_v), any strides with a
            contiguous last dimension and no element in common with an input. Of a PyTorch tensor
            the write is counted, as by PyTorch's own operators. It has q's dtype, or is float32 and
            gets the result unrounded; of float8 any of the three floats. None: a new contiguous
            array of q's dtype, or bfloat16.
        return_lse: also return lse.

    Returns:
        out, or (out, lse). lse is the natural logarithm of the sum of exponentials of each row's
        scores, and of its sink: float32, (batch, heads, seqlen_q), or (heads, total_q) with
        cu_seqlens. A query that sees no key has out = 0 and lse = -inf, or its sink.

        New arrays are PyTorch tensors on q's device if q is one, else NumPy arrays. Results carry
        no gradient, even if q requires one: this is no autograd function. `attention_backward` is
        the derivative.

    Raises:
        InvalidArgument: arguments that contradict each other or break a rule above, or an array
            that changed during the call; a ValueError and a RuntimeError.
        Unsupported: no kernel takes this; `why` says more. A NotImplementedError.
        OutOfMemory, DeviceError, InternalError: as `strobe.Error` describes them.
        Where a result cannot be allocated, NumPy's error or PyTorch's comes through.

    Example:
        >>> import numpy as np, strobe
        >>> q, k, v = np.random.randn(3, 2, 300, 8, 64).astype(np.float32)
        >>> out, lse = strobe.attention(q, k, v, causal=True, window=(128, 0), return_lse=True)
        >>> out.shape, lse.shape
        ((2, 300, 8, 64), (2, 8, 300))

        Sequences of 3, 5 and 2 rows in one array, whose first 2, 1 and 0 keys all queries see:

        >>> q, k, v = np.random.randn(3, 10, 8, 64).astype(np.float32)
        >>> offsets, prefix = np.array([0, 3, 8, 10], np.int32), np.array([2, 1, 0], np.int32)
        >>> packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "prefix": prefix}
        >>> strobe.attention(q, k, v, causal=True, **packed).shape
        (10, 8, 64)
    """
    if "alibi_slopes" in options:
        constant("alibi_slopes", options["alibi_slopes"])
    try:
        return _core.forward(q, k, v, out, return_lse, options)
    except _plans.NoSequences as none:
        known = _plans.no_lengths(options)
        found = _plans.answer(none, lambda: _core.forward(q, k, v, out, return_lse, known))
        return _plans.chosen(found, out, return_lse)


@overload
def attention_backward(
    dout: AnyArray,
    q: NDArray,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray | None,
    lse: AnyArray,
    *,
    dlse: AnyArray | None = ...,
    delta: AnyArray | None = ...,
    deterministic: bool = ...,
    grads: tuple[NDArray, NDArray, NDArray] | None = ...,
    grad_dtype: DType = ...,
    accumulate: bool = ...,
    return_dsinks: Literal[False] = ...,
    dbias: Literal[False] | None = ...,
    **options: Unpack[CallOptions],
) -> tuple[NDArray, NDArray, NDArray]: ...


@overload
def attention_backward(
    dout: AnyArray,
    q: Tensor,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray | None,
    lse: AnyArray,
    *,
    dlse: AnyArray | None = ...,
    delta: AnyArray | None = ...,
    deterministic: bool = ...,
    grads: tuple[Tensor, Tensor, Tensor] | None = ...,
    grad_dtype: DType = ...,
    accumulate: bool = ...,
    return_dsinks: Literal[False] = ...,
    dbias: Literal[False] | None = ...,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def attention_backward(  # type: ignore[overload-cannot-match] # where Tensor is Any
    dout: AnyArray,
    q: SupportsDLPack,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray | None,
    lse: AnyArray,
    *,
    dlse: AnyArray | None = ...,
    delta: AnyArray | None = ...,
    deterministic: bool = ...,
    grads: None = ...,
    grad_dtype: DType = ...,
    accumulate: bool = ...,
    return_dsinks: Literal[False] = ...,
    dbias: Literal[False] | None = ...,
    **options: Unpack[CallOptions],
) -> tuple[NDArray, NDArray, NDArray]: ...


@overload
def attention_backward(
    dout: AnyArray,
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray | None,
    lse: AnyArray,
    *,
    dlse: AnyArray | None = ...,
    delta: AnyArray | None = ...,
    deterministic: bool = ...,
    grads: tuple[AnyArray, AnyArray, AnyArray] | None = ...,
    grad_dtype: DType = ...,
    accumulate: bool = ...,
    return_dsinks: Literal[False] = ...,
    dbias: Literal[False] | None = ...,
    **options: Unpack[CallOptions],
) -> tuple[Any, Any, Any]: ...


@overload
def attention_backward(
    dout: AnyArray,
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray | None,
    lse: AnyArray,
    *,
    dlse: AnyArray | None = ...,
    delta: AnyArray | None = ...,
    deterministic: bool = ...,
    grads: tuple[AnyArray, ...] | None = ...,
    grad_dtype: DType = ...,
    accumulate: bool = ...,
    return_dsinks: bool = ...,
    dbias: AnyArray | bool | None = ...,
    **options: Unpack[CallOptions],
) -> tuple[Any, ...]: ...


@documented
def attention_backward(
    dout: AnyArray,
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray | None,
    lse: AnyArray,
    *,
    dlse: AnyArray | None = None,
    delta: AnyArray | None = None,
    deterministic: bool = False,
    grads: tuple[AnyArray, ...] | None = None,
    grad_dtype: DType = None,
    accumulate: bool = False,
    return_dsinks: bool = False,
    dbias: AnyArray | bool | None = False,
    **options: Unpack[CallOptions],
) -> tuple[Any, ...]:
    """Gradients of `attention` with respect to q, k, v and, if asked for, sinks and bias,
    recomputing the scores tile by tile.

    Algorithm 2 of T. Dao, "FlashAttention-2", arXiv:2307.08691. Every option must have the value
    that it had in the forward call.

    Args:
        dout: gradient of out, in out's shape, any strides with a contiguous last dimension.
        q, k, v: as in `attention`.
        out, lse: what `attention` gave with return_lse=True, out in either dtype. lse must be
            contiguous. out: None will do where delta is given.
        causal, window, scale, softcap, alibi_slopes, bias: as in `attention`.
        dropout_p, dropout_seed, dropout_offset, dropout_first_query, dropout_first_key,
            dropout_first_head, dropout_heads: as in `attention`.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in `attention`.
        batch_invariant: as in `attention`, with deterministic set too.
        threads: as in `attention`.
        attention_chunk, seqused_q, seqused_k, q_position, prefix,
        window_signed, mask, mask_layout: as in `attention`.
        q_scale, k_scale, v_scale: None: no kernel computes gradients from float8.
        dlse: gradient of lse, float32, contiguous, in lse's shape; None: lse was not used further.
        delta: the sum over head_dim_v of dout * out, minus dlse where there is one: float32,
            contiguous, in lse's shape. For callers that have it already; out is not read then, and
            dlse not taken. With sinks_outside_lse, no dlse may be in it. None: it is computed.
        deterministic: the same bits for every number of threads; at a fixed number they repeat
            anyway.
        grads: where to write (dq, dk, dv), any strides with a contiguous last dimension and no
            element in common with each other or an input; of q's dtype, or all three float32. None:
            new contiguous arrays.
        grad_dtype: of new gradients: "float32", which is not rounded to a narrower q's dtype, or
            None for q's.
        accumulate: the gradients are added to what grads hold: in float32, and rounded once where
            grads are narrower.
        sinks, sinks_outside_lse: as in `attention`.
        return_dsinks: also return the gradient of sinks, float32; grads are then four arrays.
        dbias: True, or where to write it: the gradient of bias is wanted too. An array has bias's
            shape, its dtype or float32, and any strides; every element is written, whatever
            accumulate says. A new one is float32 where the other gradients are, of a narrower q.

    Returns:
        (dq, dk, dv), of the shapes of q, k and v, and of q's dtype unless grads or grad_dtype say
        otherwise; dk and dv are summed over the query heads that share a key head. With
        return_dsinks dsinks comes after them, and then, with dbias, dbias, which has bias's shape:
        along an axis of one element it is the sum, in float32 and in the order of the indices, with
        the same bits for every number of threads. Kinds of array as in `attention`.

    Raises:
        As `attention`.

    Example:
        >>> import numpy as np, strobe
        >>> q, k, v = np.random.randn(3, 2, 300, 8, 64).astype(np.float32)
        >>> out, lse = strobe.attention(q, k, v, causal=True, return_lse=True)
        >>> dout = np.ones_like(out)
        >>> dq, dk, dv = strobe.attention_backward(dout, q, k, v, out, lse, causal=True)
        >>> dq.shape, dk.shape, dv.shape
        ((2, 300, 8, 64), (2, 300, 8, 64), (2, 300, 8, 64))
    """
    if "alibi_slopes" in options:
        constant("alibi_slopes", options["alibi_slopes"])
    float_grads = is_float("grad_dtype", grad_dtype)
    if flag("accumulate", accumulate) and grads is None:
        raise InvalidArgument("accumulate = True with grads = None, expected arrays to add to")
    if is_flag(dbias):
        dbias = flag("dbias", dbias)
    more = (grads, deterministic, accumulate, float_grads, return_dsinks, dbias)
    arrays = (dout, q, k, v, out, lse, dlse, delta, *more)
    try:
        return _core.backward(*arrays, options)
    except _plans.NoSequences as none:
        known = _plans.no_lengths(options)
        found = _plans.answer(none, lambda: _core.backward(*arrays, known))
        given: list[Any] = [None] * (3 + return_dsinks) if grads is None else list(grads)
        given.append(None if isinstance(dbias, bool) else dbias)
        _plans.clear(*given[-1 if accumulate else 3 :])
        return tuple(x if y is None else y for x, y in zip(found, given, strict=False))
