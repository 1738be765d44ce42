"""Attention, forward and backward, as functions of arrays.

Each call takes three steps, as the C library does: the arguments become a *problem*, the problem a
*plan*, and the plan is *launched*. Problems that were seen before skip the first two: plans are
kept by a key of shapes, strides, dtypes, devices and options, so that a call costs a few
microseconds beyond the C function. Checks of shapes, strides and options run when a plan is made
(`_plans`); what a key cannot hold (addresses, the contents of cu_seqlens) the library checks at
each call.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, Literal, overload

from . import _arrays, _interrupt, _library
from ._arrays import (
    DIRECT,
    KINDS,
    TORCH,
    AnyArray,
    NDArray,
    Spec,
    SupportsDLPack,
    imported,
    unreadable,
)
from ._backward import attention_backward
from ._launches import FORWARD_LAUNCHES, Launch, make_launch
from ._library import FORWARD_ARGS_SIZE, pack_forward, with_arrays
from ._options import NO_ARRAYS, Scalars, documented, split
from ._plans import (
    CallOptions,
    Options,
    Shapes,
    check_like_out,
    launch_error,
    longest,
    make_problem,
    no_array,
    optional_spec,
    spec_of,
    views,
)
from ._tensors import LOW, check_readable
from ._values import bad_seed, flag, integer, pair, real

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention", "attention_backward", "latest_answer"]

_launch_forward: Final = _library.forward

# .text: what became of this thread's latest call of PyTorch's attention, for `why`. Set by
# `strobe.torch`.
latest_answer: Final = threading.local()


def _forward_launch(key: Any, shapes: Shapes, out: Spec | None) -> Launch:
    if out is not None:
        check_like_out("out", out, shapes)
    q = shapes.q
    kind = q.kind
    new_lse = kind.allocator(shapes.lse_shape, "float32", q)
    new_out = new_lse if out is not None else kind.allocator(shapes.out_shape, q.dtype, q)
    return make_launch(FORWARD_LAUNCHES, key, shapes, (new_out, new_lse))


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
    q: SupportsDLPack,
    k: AnyArray,
    v: AnyArray,
    *,
    out: AnyArray | None = ...,
    return_lse: bool = ...,
    **options: Unpack[CallOptions],
) -> Any: ...


@documented
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    dropout_offset: int = 0,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    batch_invariant: bool = False,
    threads: int = 0,
    out: Any = None,
    return_lse: bool = False,
    _with_launch: bool = False,  # returns (out, Launch): for _repeat.py
    **more: Any,  # _options.ROWS
) -> Any:
    """softmax(scale * q k^T + bias) v, exactly, in memory linear in the sequence length.

    Algorithm 1 of T. Dao, "FlashAttention-2", arXiv:2307.08691.

    Arrays are NumPy arrays, PyTorch tensors, or anything with DLPack. They are read where they lie,
    never copied: any strides with a contiguous last dimension will do. q, k, v and out have one
    dtype: float32, float16 or bfloat16 (a NumPy dtype of ml_dtypes, or a PyTorch tensor); sums are
    float32.

    Args:
        q: queries, (batch, seqlen_q, heads, head_dim).
        k: keys, (batch, seqlen_k, heads_kv, head_dim). heads_kv divides heads: query head i reads
            key head i // (heads // heads_kv).
        v: values, (batch, seqlen_k, heads_kv, head_dim_v). head_dim and head_dim_v: 1 to 256.
        causal: query i sees keys up to i + seqlen_k - seqlen_q (bottom-right aligned).
        window: (left, right): query i sees keys from i + seqlen_k - seqlen_q - left to
            i + seqlen_k - seqlen_q + right; -1: no limit. causal makes right 0 at most.
        scale: multiplies q k^T; None: 1 / sqrt(head_dim).
        softcap: c > 0 turns a scaled score s into c * tanh(s / c), before ALiBi and masks; 0: off.
        alibi_slopes: float32, (heads,) or (batch, heads): adds
            -slope * |i + seqlen_k - seqlen_q - j| to the score of query i and key j.
        dropout_p: probability in [0, 1) of dropping a weight; kept ones are scaled by
            1 / (1 - dropout_p).
        dropout_seed, dropout_offset: of the Philox generator, 0 to 2**64 - 1. The same pair drops
            the same weights, in forward and backward, whatever the number of threads: see
            `dropout_mask`.
        cu_seqlens_q, cu_seqlens_k: int32, (batch + 1,), from 0 to total: sequences of different
            lengths packed end to end. q, k, v and out are then (total, heads, head_dim).
        max_seqlen_q, max_seqlen_k: the longest sequences with cu_seqlens, or upper bounds; None:
            found from cu_seqlens, if those are in the CPU's memory.
        batch_invariant: a sequence's bits depend neither on the other sequences of the batch nor on
            how many they are: by default kernels are chosen by the size of the whole.
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
        out: where to write the result, (batch, seqlen_q, heads, head_dim_v), any strides with a
            contiguous last dimension; it must not overlap q, k or v. None: a new contiguous array.
        return_lse: also return lse.

    Returns:
        out, or (out, lse). lse is the natural logarithm of the sum of exponentials of each row's
        scores: float32, (batch, heads, seqlen_q), or (heads, total_q) with cu_seqlens. A query that
        sees no key has out = 0 and lse = -inf.

        New arrays are PyTorch tensors on q's device if q is one, else NumPy arrays. Results carry
        no gradient, even if q requires one: this is no autograd function. `attention_backward` is
        the derivative.

    Raises:
        InvalidArgument: arguments that contradict each other or break a rule above; a ValueError.
        Unsupported: no kernel takes this; `why` says more. A NotImplementedError.
        OutOfMemory, DeviceError, InternalError: as `strobe.Error` describes them.
        Where a result cannot be allocated, NumPy's error or PyTorch's comes through.
    """
    q_kind, k_kind, v_kind = KINDS.get(type(q)), KINDS.get(type(k)), KINDS.get(type(v))
    extra = alibi_slopes is not None or cu_seqlens_q is not None or cu_seqlens_k is not None
    scalars: Scalars = ()
    arrays, more_key, pointers = NO_ARRAYS, None, None
    if more:
        scalars, arrays = split("attention", more)
    if (
        q_kind is None
        or k_kind is None
        or v_kind is None
        or type(out) not in DIRECT
        or (extra and not DIRECT.issuperset(map(type, (alibi_slopes, cu_seqlens_q, cu_seqlens_k))))
        or (more and not DIRECT.issuperset(map(type, arrays.values())))
    ):
        if q is None or k is None or v is None:
            raise no_array(("q", "k", "v"), (q, k, v))
        names = ("q", "k", "v", "out", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", *arrays)
        given = (q, k, v, out, alibi_slopes, cu_seqlens_q, cu_seqlens_k, *arrays.values())
        again: Any = attention
        with imported(names, given) as taken:
            result = again(
                taken[0],
                taken[1],
                taken[2],
                causal=causal,
                window=window,
                scale=scale,
                softcap=softcap,
                alibi_slopes=taken[4],
                dropout_p=dropout_p,
                dropout_seed=dropout_seed,
                dropout_offset=dropout_offset,
                cu_seqlens_q=taken[5],
                cu_seqlens_k=taken[6],
                max_seqlen_q=max_seqlen_q,
                max_seqlen_k=max_seqlen_k,
                batch_invariant=batch_invariant,
                threads=threads,
                out=taken[3],
                return_lse=return_lse,
                _with_launch=_with_launch,
                **dict(scalars),
                **dict(zip(names[7:], taken[7:], strict=True)),
            )
        if out is None:
            return result
        # The caller's own object, not what it was imported as.
        return (out, result[1]) if return_lse else out

    if q_kind is TORCH and k_kind is TORCH and v_kind is TORCH:
        # The three views in one: each call and tuple less is a tenth of a microsecond.
        try:
            q_pointer, k_pointer, v_pointer = q.data_ptr(), k.data_ptr(), v.data_ptr()
            if (
                q_pointer < LOW
                or k_pointer < LOW
                or v_pointer < LOW
                or q.is_neg()
                or k.is_neg()
                or v.is_neg()
            ):
                for name, x in (("q", q), ("k", k), ("v", v)):
                    check_readable(name, x)
            k_signature = v_signature = None
            q_signature: Any = (
                q.shape,
                k.shape,
                v.shape,
                q.stride(),
                k.stride(),
                v.stride(),
                q.dtype,
                k.dtype,
                v.dtype,
                q.device,
                k.device,
                v.device,
            )
        except Exception as error:
            raise unreadable((("q", q), ("k", k), ("v", v)), error) from None
    else:
        try:
            q_pointer, q_signature = q_kind.view(q)
            k_pointer, k_signature = k_kind.view(k)
            v_pointer, v_signature = v_kind.view(v)
        except Exception as error:
            raise unreadable((("q", q), ("k", k), ("v", v)), error) from None
    if out is None:
        out_pointer, out_signature = 0, None
    else:
        out_kind = KINDS[type(out)]
        try:
            out_pointer, out_signature = out_kind.view(out)
        except Exception as error:
            raise unreadable((("out", out),), error) from None
        out_kind.check_writable("out", out)
    if max_seqlen_q is not None and type(max_seqlen_q) is not int:
        max_seqlen_q = integer("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None and type(max_seqlen_k) is not int:
        max_seqlen_k = integer("max_seqlen_k", max_seqlen_k)
    cu_q_pointer = cu_k_pointer = alibi_pointer = 0
    extras = None
    if extra:
        cu_q_signature = cu_k_signature = alibi_signature = None
        try:
            if cu_seqlens_q is not None:
                cu_q_pointer, cu_q_signature = KINDS[type(cu_seqlens_q)].view(cu_seqlens_q)
            if cu_seqlens_k is not None:
                cu_k_pointer, cu_k_signature = KINDS[type(cu_seqlens_k)].view(cu_seqlens_k)
            if alibi_slopes is not None:
                alibi_pointer, alibi_signature = KINDS[type(alibi_slopes)].view(alibi_slopes)
        except Exception as error:
            named = {
                "cu_seqlens_q": cu_seqlens_q,
                "cu_seqlens_k": cu_seqlens_k,
                "alibi_slopes": alibi_slopes,
            }
            raise unreadable(tuple(named.items()), error) from None
        if cu_seqlens_q is not None and max_seqlen_q is None:
            max_seqlen_q = longest("cu_seqlens_q", "max_seqlen_q", cu_seqlens_q)
        if cu_seqlens_k is not None and max_seqlen_k is None:
            max_seqlen_k = longest("cu_seqlens_k", "max_seqlen_k", cu_seqlens_k)
        extras = (cu_q_signature, cu_k_signature, alibi_signature, max_seqlen_q, max_seqlen_k)
    elif max_seqlen_q is not None or max_seqlen_k is not None:
        extras = (None, None, None, max_seqlen_q, max_seqlen_k)
    if more:
        pointers, more_key = views(scalars, arrays)
    try:
        left, right = window
    except Exception:
        left, right = pair("window", window)
    # Plans are kept by value: a tensor or an array would be kept by its identity.
    if type(left) is not int or type(right) is not int:
        left, right = integer("window[0]", left), integer("window[1]", right)
    if type(threads) is not int:
        threads = integer("threads", threads, 32)
    if threads == 0:
        threads = q_kind.threads()
    if type(causal) is not bool:
        causal = flag("causal", causal)
    if type(batch_invariant) is not bool:
        batch_invariant = flag("batch_invariant", batch_invariant)
    if type(scale) is not float and scale is not None:
        scale = real("scale", scale)
    if type(softcap) is not float:
        softcap = real("softcap", softcap)
    if type(dropout_p) is not float:
        dropout_p = real("dropout_p", dropout_p)
    if type(return_lse) is not bool:
        return_lse = flag("return_lse", return_lse)

    key = (
        q_signature,
        k_signature,
        v_signature,
        out_signature,
        extras,
        causal,
        left,
        right,
        scale,
        softcap,
        dropout_p,
        batch_invariant,
        threads,
        more_key,
    )
    launch = FORWARD_LAUNCHES.get(key)
    if launch is None:
        options = Options(
            causal,
            left,
            right,
            scale,
            softcap,
            dropout_p,
            max_seqlen_q,
            max_seqlen_k,
            threads,
            False,
            batch_invariant,
            scalars,
            arrays,
        )
        shapes = make_problem(
            _library.FORWARD,
            spec_of("q", q),
            spec_of("k", k),
            spec_of("v", v),
            optional_spec("cu_seqlens_q", cu_seqlens_q),
            optional_spec("cu_seqlens_k", cu_seqlens_k),
            optional_spec("alibi_slopes", alibi_slopes),
            options,
        )
        launch = _forward_launch(key, shapes, optional_spec("out", out))

    if out is None:
        out = launch.new[0](q)
        out_pointer = KINDS[type(out)].pointer(out)
    lse, lse_pointer = None, 0
    if return_lse:
        lse = launch.new[1](q)
        lse_pointer = KINDS[type(lse)].pointer(lse)
    workspace = None
    workspace_pointer = stream = 0
    if launch.on_cuda:
        stream = _arrays.torch_stream(launch.device_index)
        if launch.new_workspace is not None and (not launch.small or _arrays.torch_capturing()):
            workspace = launch.new_workspace(q)
            workspace_pointer = workspace.data_ptr()
    try:
        arguments = pack_forward(
            FORWARD_ARGS_SIZE,
            q_pointer,
            k_pointer,
            v_pointer,
            out_pointer,
            lse_pointer,
            cu_q_pointer,
            cu_k_pointer,
            alibi_pointer,
            dropout_seed,
            dropout_offset,
            workspace_pointer,
            launch.workspace_bytes,
            stream,
        )
    except Exception:  # struct.error, or what somebody's __index__ raises
        raise bad_seed(dropout_seed, dropout_offset) from None
    if pointers is not None:
        arguments = with_arrays(arguments, pointers)
    if launch.long:
        status = _interrupt.run(_launch_forward, launch.address, arguments, FORWARD_ARGS_SIZE)
    else:
        status = _launch_forward(launch.address, arguments)
    if status:
        named = {
            "q": q,
            "k": k,
            "v": v,
            "out": out,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "alibi_slopes": alibi_slopes,
            **arrays,
        }
        raise launch_error(status, named)
    if _with_launch:
        return out, launch
    return (out, lse) if return_lse else out
