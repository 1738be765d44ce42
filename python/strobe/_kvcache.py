"""Attention over a key-value cache, for arrays of every kind.

`_core` has the call; `make` is what it asks for where a problem is new. Names are those of
include/strobe/strobe.h: k and v are the cache, k_new and v_new what is appended.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, overload

from . import _core, _plans, _quantised
from ._arrays import (
    AnyArray,
    NDArray,
    Spec,
    SupportsDLPack,
    is_compiling,
    is_traceable,
    spec_of,
)
from ._errors import Error, InvalidArgument, error_for_status, renamed
from ._merge import is_float
from ._options import CacheOptions, documented_with_cache
from ._problem import (
    DTYPE_CODES,
    Problem,
    axes_of,
    check_ndim,
    refuse_scales,
    take_float8,
    take_offsets,
)
from ._values import checked_on_gpus, constant

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._arrays import Tensor
    from ._merge import DType

__all__ = ["attention_with_kvcache"]


@overload
def attention_with_kvcache(
    q: NDArray,
    k: AnyArray,
    v: AnyArray,
    *,
    out: NDArray | None = ...,
    out_dtype: DType = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[CacheOptions],
) -> NDArray: ...


@overload
def attention_with_kvcache(
    q: NDArray,
    k: AnyArray,
    v: AnyArray,
    *,
    out: NDArray | None = ...,
    out_dtype: DType = ...,
    return_lse: Literal[True],
    **options: Unpack[CacheOptions],
) -> tuple[NDArray, NDArray]: ...


@overload
def attention_with_kvcache(
    q: Tensor,
    k: AnyArray,
    v: AnyArray,
    *,
    out: Tensor | None = ...,
    out_dtype: DType = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[CacheOptions],
) -> Tensor: ...


@overload
def attention_with_kvcache(
    q: Tensor,
    k: AnyArray,
    v: AnyArray,
    *,
    out: Tensor | None = ...,
    out_dtype: DType = ...,
    return_lse: Literal[True],
    **options: Unpack[CacheOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_with_kvcache(  # type: ignore[overload-cannot-match] # where Tensor is Any
    q: SupportsDLPack,
    k: AnyArray,
    v: AnyArray,
    *,
    out: None = ...,
    out_dtype: DType = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[CacheOptions],
) -> NDArray: ...


@overload
def attention_with_kvcache(  # type: ignore[overload-cannot-match] # where Tensor is Any
    q: SupportsDLPack,
    k: AnyArray,
    v: AnyArray,
    *,
    out: None = ...,
    out_dtype: DType = ...,
    return_lse: Literal[True],
    **options: Unpack[CacheOptions],
) -> tuple[NDArray, NDArray]: ...


@overload
def attention_with_kvcache(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    out: AnyArray | None = ...,
    out_dtype: DType = ...,
    return_lse: bool = ...,
    **options: Unpack[CacheOptions],
) -> Any: ...


@documented_with_cache
def attention_with_kvcache(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    out: AnyArray | None = None,
    out_dtype: DType = None,
    return_lse: bool = False,
    **options: Unpack[CacheOptions],
) -> Any:
    """`attention` with keys and values that lie in a cache, appended to in the same call.

    Arrays are of the kinds that `attention` takes and are read where they lie, whatever their
    strides, with a contiguous last dimension. A plan is kept by shapes and options and not by any
    length, index or page.

    Args:
        q: queries, (batch, seqlen_q, heads, head_dim), or with cu_seqlens_q
            (total_q, heads, head_dim).
        k: the cache: (cache_batch, capacity, heads_kv, head_dim), or with block_table
            (pages, page_size, heads_kv, head_dim), any page_size from 1.
        v: the same with head_dim_v.
        seqused_k: int32, (batch,): the rows that each sequence has in the cache, before anything
            is appended; None: all that the cache holds. Rows that follow are never read.
        block_table: int32, (batch, pages_per_sequence): row n of a sequence is row
            n % page_size of page block_table[b, n // page_size]. Pages may repeat, and columns
            where the sequence has no rows may hold anything. None: k and v are contiguous, so pages
            without their table are read as entries of page_size rows.
        cache_batch_idx: int32, (batch,): each sequence's entry of the cache; not with block_table.
            None: entry b, and cache_batch is at least batch.
        leftpad: int32, (batch,): rows at the begin of a sequence that are skipped. Keys are
            counted from the first row behind them.
        k_new, v_new: (batch, seqlen_new, heads_kv, head_dim or head_dim_v), or with
            cu_seqlens_k_new, int32 (batch + 1,), (total_new, heads_kv, ...): written to the cache
            from row seqused_k on, before attention is computed. Then k and v must be writable.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), contiguous, q's dtype: the rotary
            embedding of the first rotary_dim elements of queries and new keys.
        rotary_position: int32, (batch,): the position of the first query and of the first new key;
            None: the number of the sequence's keys before the append. Query i follows i positions
            later if causal, window or attention_chunk is given; else all have the first one.
        rotary_interleaved: rotate elements 2n and 2n + 1; else n and n + rotary_dim / 2.
        k_scale, v_scale: what a quantised cache's keys and values are multiplied by, float32 or
            float16. k and v are then int8 or float8, and a scale is (cache_batch, capacity,
            heads_kv), or (pages, page_size, heads_kv), (heads_kv,), or (1,). Those of rows are
            written with k_new. Without scales k and v may be uint8: blocks of q8_0 or q4_0, the
            last dimension head_dim / 32 * 34 or 18. k and v may be of two of these, or one of them
            of q's dtype: then whichever has none is given no scale. q, k_new and v_new stay floats
            (`quantize`).
        q_scale: of a float8 q, with k_scale and v_scale: float32, (batch or 1, heads_kv), as in
            `attention`. k and v are float8 then, k_new and v_new are codes of k's dtype, which are
            copied as they are, and there is no rotary_cos.
        mask: a mask as data, of `strobe.masks`, for these queries and all keys that the cache has
            room for, which are counted from each sequence's first one. On GPUs blocks of keys in no
            list are not read, nor their pages looked up (a quantised cache is unpacked first).
        cu_seqlens_q, max_seqlen_q, seqused_q, q_position, prefix, alibi_slopes, causal, window,
        scale, softcap, attention_chunk, window_signed, batch_invariant, threads: as in `attention`.
        out: where to write the result; None: a new contiguous array. It has no element in common
            with another array, nor have k and v where new keys are written to them.
        out_dtype: "float32", or None for q's dtype. Partial results for `merge` are float32.
        return_lse: also return lse.

    Returns:
        out, or (out, lse), as `attention`. Without a gradient, which a cache has not.

    Raises:
        As `attention`. On the CPU a length, index or page out of range is an InvalidArgument, and
        nothing is written. On a GPU the rows of such a sequence are NaN, and it appends nothing: to
        look at the numbers, a call has to wait for the device, which it does, and raises, only
        where the environment has STROBE_CHECK_VALUES=1 (and no CUDA graph is captured).

    Example:
        One query for each of two sequences that have 7 and 12 rows in the cache; k_new is appended:

        >>> import numpy as np, strobe
        >>> k, v = np.zeros((2, 2, 100, 2, 64), np.float32)
        >>> q = np.random.randn(2, 1, 8, 64).astype(np.float32)
        >>> k_new, v_new = np.random.randn(2, 2, 1, 2, 64).astype(np.float32)
        >>> used = np.array([7, 12], np.int32)
        >>> new = {"k_new": k_new, "v_new": v_new}
        >>> out = strobe.attention_with_kvcache(q, k, v, seqused_k=used, **new)
        >>> out.shape, bool((k[1, 12] == k_new[1, 0]).all())
        ((2, 1, 8, 64), True)
    """
    if is_compiling() and is_traceable(q, (k, v, out, *options.values())):
        from . import _flash_cache

        return _flash_cache.traced(q, k, v, out, out_dtype, return_lse, {**options})
    if "alibi_slopes" in options:
        constant("alibi_slopes", options["alibi_slopes"])
    # Of values on GPUs Python alone can say what is wrong.
    if getattr(q, "is_cuda", False) is True and checked_on_gpus():
        from . import _flash_cache

        _flash_cache.check_options(q, k, {**options})
    tail = (out, return_lse, is_float("out_dtype", out_dtype))
    try:
        return _core.kvcache(q, k, v, *tail, options)
    except _plans.NoSequences as none:
        known = _plans.no_lengths(options)
        found = _plans.answer(none, lambda: _core.kvcache(q, k, v, *tail, known))
        return _plans.chosen(found, out, return_lse)


# -------------------------------------------------------------------------------------------- plan


def make(backward: bool, arrays: dict[str, Any], options: dict[str, Any]) -> _plans.Launch:
    """What `_plans.make` gives, for a call with a cache."""
    specs = {name: spec_of(name, array) for name, array in arrays.items()}
    q, packed = specs["q"], "cu_seqlens_q" in specs
    if not packed and len(q.shape) == 3:
        raise InvalidArgument("q.ndim = 3, expected 4 without cu_seqlens_q")
    check_ndim("q", q, axes_of("q", packed))
    problem = Problem.begin(specs, packed, options)
    fields, sizes = problem.fields, problem.sizes
    float_out = fields.pop("float_out")
    out_dtype = problem.out_dtype(specs.get("out"), "float32" if float_out else "")
    longest, interleaved = fields.pop("max_seqlen_q"), fields.pop("rotary_interleaved")
    if packed:
        take_offsets(problem, "cu_seqlens_q", specs["cu_seqlens_q"])
        sizes["batch"] = sizes["batch + 1"] - 1
    elif longest is not None:
        raise InvalidArgument(
            f"max_seqlen_q = {longest}, expected None: it belongs to cu_seqlens_q"
        )
    problem.take("q", q, "cu_seqlens_q")
    fields |= {"direction": 0, "cache": 1}
    _take_cache(problem, specs)
    names = ("batch", "heads", "heads_kv", "head_dim", "head_dim_v")
    fields |= {name: sizes[name] for name in names}
    fields["seqlen_q"] = longest if packed else sizes["seqlen_q"]
    if packed:
        fields |= {"varlen": 1, "total_q": sizes["total_q"]}
    problem.take_more(specs)
    _take_new(problem, specs)
    _take_rotary(problem, specs, interleaved)
    fields["out_dtype"] = DTYPE_CODES[out_dtype]
    if "out" in specs:
        why = "out_dtype" if float_out else "that of q"
        problem.take("out", specs["out"], "q and v", dtype=out_dtype, why=why)
    # How long a launch takes is in the lengths, which a plan does not know: as if all were full.
    made = None if "out" in specs else out_dtype
    return _plans.launch_of(problem, {"out": made, "lse": "float32"})


def _take_cache(problem: Problem, specs: dict[str, Spec]) -> None:
    """The cache, k and v, and the table of its pages."""
    fields, sizes, table = problem.fields, problem.sizes, specs.get("block_table")
    extents = ("cache_batch", "rows") if table is None else ("pages", "page_size")
    if problem.is_float8:
        take_float8(problem, specs, extents)
    elif any(specs[name].dtype in _quantised.DTYPES for name in ("k", "v")):
        refuse_scales(problem, specs, ("q_scale",))
        _quantised.take_cache(problem, specs, extents)
    else:
        refuse_scales(problem, specs, ("q_scale",))
        problem.take("k", specs["k"], "q", (*extents, "heads_kv", "head_dim"))
        problem.take("v", specs["v"], "k", (*extents, "heads_kv", "head_dim_v"))
        _quantised.refuse_scales(specs)
    if table is None:
        entries = sizes["cache_batch"]
        if entries == 0 < sizes["batch"]:  # the library reads 0 as: batch says how many there are
            raise InvalidArgument("k.shape[0] = 0, expected at least 1 (cache_batch)")
        fields |= {"cache_batch": entries, "seqlen_k": sizes["rows"]}
        return
    if sizes["page_size"] == 0:
        raise InvalidArgument("k.shape[1] = 0, expected at least 1 (page_size)")
    name, axes = "block_table", ("batch", "pages_per_sequence")
    of = "cu_seqlens_q" if problem.packed else "q"
    problem.check(name, table, axes, of, "int32", "numbers of pages")
    rows, columns = table.shape
    hint = table.kind.contiguous_hint.format(name)
    for axis, least in ((1, 1), (0, columns)):
        step = table.strides[axis]
        # Rows may lie apart, but to the library 0 means that they do not.
        wrong = step != 1 if axis else step < least
        if 0 not in table.shape and table.shape[axis] > 1 and wrong:
            raise InvalidArgument(
                f"{table.kind.stride_hint.format(name, axis)} = {step} elements, expected "
                f"{'' if axis else 'at least '}{least}: pass {hint}"
            )
    if rows > 1 and columns > 0:
        fields["block_table_stride"] = table.strides[0]
    fields |= {name: sizes[name] for name in (*extents, "pages_per_sequence")}
    fields |= {"cache": 2, "seqlen_k": columns * sizes["page_size"]}


def _take_new(problem: Problem, specs: dict[str, Spec]) -> None:
    """k_new and v_new, and where their sequences begin."""
    fields, sizes, lengths = problem.fields, problem.sizes, specs.get("cu_seqlens_k_new")
    if "k_new" not in specs or "v_new" not in specs:
        for name in ("k_new", "v_new", "cu_seqlens_k_new"):
            if name in specs:
                raise InvalidArgument(f"{name} is given, expected k_new and v_new with it")
        return
    if "seqused_k" not in specs:
        raise InvalidArgument(
            "seqused_k is missing, expected the rows in use: k_new and v_new go behind them"
        )
    rows = ("batch", "seqlen_new") if lengths is None else ("total_new",)
    # Codes for a cache that float8 queries read: what it has of them is what comes.
    like = (specs["k"].dtype, "that of k") if problem.is_float8 else ()
    problem.take("k_new", specs["k_new"], "q and k", (*rows, "heads_kv", "head_dim"), *like)
    problem.take("v_new", specs["v_new"], "k_new and v", (*rows, "heads_kv", "head_dim_v"), *like)
    if lengths is not None:
        sizes["batch + 1"] = sizes["batch"] + 1
        take_offsets(problem, "cu_seqlens_k_new", lengths)
        # The longest is a value; all of them is the bound that shapes give.
        total = sizes["total_new"]
        fields |= {"append": 2, "total_new": total, "seqlen_new": total}
        return
    fields |= {"append": 1, "seqlen_new": sizes["seqlen_new"]}
    if sizes["seqlen_new"] > fields["seqlen_k"]:
        raise InvalidArgument(
            f"k_new.shape[1] = {sizes['seqlen_new']}, expected at most {fields['seqlen_k']} "
            f"({_plans.capacity('block_table' in specs)}{_maybe_pages(specs)})"
        )


def _take_rotary(problem: Problem, specs: dict[str, Spec], interleaved: bool) -> None:
    if "rotary_cos" not in specs or "rotary_sin" not in specs:
        for name in ("rotary_cos", "rotary_sin", "rotary_position"):
            if name in specs:
                raise InvalidArgument(
                    f"{name} is given, expected rotary_cos and rotary_sin with it"
                )
        return
    axes, dtype = ("positions", "rotary_dim / 2"), problem.q.dtype
    problem.take_packed("rotary_cos", specs["rotary_cos"], axes, "q", dtype, "that of q")
    problem.take_packed("rotary_sin", specs["rotary_sin"], axes, "rotary_cos", dtype, "that of q")
    positions, half = specs["rotary_cos"].shape
    most = problem.sizes["head_dim"] // 2
    if not 1 <= half <= most:
        raise InvalidArgument(f"rotary_cos.shape[1] = {half}, expected 1 to head_dim / 2 = {most}")
    problem.fields |= {"rotary_dim": 2 * half, "rotary_rows": positions}
    problem.fields["rotary_interleaved"] = int(interleaved)


# ---------------------------------------------------------------------------------------- messages


def _maybe_pages(specs: dict[str, Spec]) -> str:
    """`_plans.maybe_pages` of a call in which nothing says which entries of the cache are meant."""
    if "block_table" in specs or "cache_batch_idx" in specs:
        return ""
    packed = specs.get("cu_seqlens_q")
    batch = specs["q"].shape[0] if packed is None else packed.shape[0] - 1
    return _plans.maybe_pages(specs["k"].shape[0], batch)


def launch_error(status: int, text: str, specs: dict[str, Spec], tensors: dict[str, Any]) -> Error:
    """As `_plans.launch_error`."""
    capacity = _plans.capacity("block_table" in specs)
    names = {"seqlen_k": capacity, "rotary_rows": "rotary_cos.shape[0]"}
    names |= {"total_new": "k_new.shape[0]", "total_q": "q.shape[0]"}
    text = renamed(text, names)
    if re.fullmatch(r"seqused_k\[\d+\] = -?\d+, expected 0 to \d+", text):
        text += f" ({capacity})"
    if text.startswith("seqused_k["):
        text = f"{text.removesuffix(')')}{_maybe_pages(specs)})"
    error = error_for_status(status, text)
    if not isinstance(error, InvalidArgument):
        return error
    return _plans.launch_error(status, text, specs, tensors)
