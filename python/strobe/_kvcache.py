"""Attention over a key-value cache, and the merging of partial results: for arrays of every kind.

`_core` has the call; `make` is what it asks for where a problem is new. Names are those of
include/strobe/strobe.h: k and v are the cache, k_new and v_new what is appended.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Final

import numpy as np

from . import _checks, _core, _plans
from ._arrays import Spec, allocator, spec_of
from ._checks import DTYPE_CODES
from ._errors import Error, InvalidArgument, error_for_status, renamed, shown
from ._problem import _alibi, _check_numbers, _strides, check_cu_seqlens

__all__ = ["attention_with_kvcache", "merge"]

_CONTIGUOUS: Final = ("cache_batch", "rows", "heads_kv", "head_dim")
_PAGED: Final = ("pages", "page_size", "heads_kv", "head_dim")
_NUMBERS: Final = (
    "seqused_q",
    "seqused_k",
    "q_position",
    "prefix",
    "cache_batch_idx",
    "leftpad",
    "rotary_position",
)


def attention_with_kvcache(
    q: Any,
    k: Any,
    v: Any,
    *,
    seqused_k: Any = None,
    block_table: Any = None,
    cache_batch_idx: Any = None,
    leftpad: Any = None,
    k_new: Any = None,
    v_new: Any = None,
    cu_seqlens_k_new: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_position: Any = None,
    rotary_interleaved: bool = False,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    seqused_q: Any = None,
    q_position: Any = None,
    prefix: Any = None,
    alibi_slopes: Any = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    attention_chunk: int = 0,
    batch_invariant: bool = False,
    threads: int = 0,
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
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
            where the sequence has no rows may hold anything.
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
        rotary_interleaved: turn elements 2n and 2n + 1; else n and n + rotary_dim / 2.
        cu_seqlens_q, max_seqlen_q, seqused_q, q_position, prefix, alibi_slopes, causal, window,
        scale, softcap, attention_chunk, batch_invariant, threads: as in `attention`.
        out: where to write the result; None: a new contiguous array.
        out_dtype: "float32", or None for q's dtype. Partial results for `merge` are float32.
        return_lse: also return lse.

    Returns:
        out, or (out, lse), as `attention`. Without a gradient, which a cache has not.

    Raises:
        As `attention`. On the CPU a length, index or page out of range is an InvalidArgument, and
        nothing is written. On a GPU it makes the rows of its sequence NaN.
    """
    return _core.kvcache(
        q,
        k,
        v,
        out,
        seqused_k,
        block_table,
        cache_batch_idx,
        leftpad,
        k_new,
        v_new,
        cu_seqlens_k_new,
        rotary_cos,
        rotary_sin,
        rotary_position,
        cu_seqlens_q,
        seqused_q,
        q_position,
        prefix,
        alibi_slopes,
        max_seqlen_q,
        causal,
        window,
        scale,
        softcap,
        attention_chunk,
        rotary_interleaved,
        _is_float(out_dtype),
        batch_invariant,
        threads,
        return_lse,
    )


def _is_float(out_dtype: Any) -> bool:
    if out_dtype is None:
        return False
    if _dtype_name(out_dtype) != "float32":
        raise InvalidArgument(f'out_dtype = {shown(out_dtype)}, expected None or "float32"')
    return True


def _dtype_name(dtype: Any) -> str:
    """Of a name, or of a dtype of NumPy's or PyTorch's."""
    name = dtype
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        name = dtype.__name__
    elif isinstance(dtype, np.dtype):
        name = dtype.name
    elif type(dtype).__module__ == "torch" and type(dtype).__name__ == "dtype":
        name = str(dtype).removeprefix("torch.")
    if not isinstance(name, str) or name not in DTYPE_CODES:
        raise InvalidArgument(
            f'out_dtype = {shown(dtype)}, expected "float32", "bfloat16" or "float16"'
        )
    return name


# -------------------------------------------------------------------------------------------- plan


def make(backward: bool, arrays: dict[str, Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """What `_plans.make` gives, for a call with a cache."""
    specs = {name: spec_of(name, array) for name, array in arrays.items()}
    q, k, v = specs["q"], specs["k"], specs["v"]
    varlen, table = "cu_seqlens_q" in specs, specs.get("block_table")
    rows = ("total_q",) if varlen else ("batch", "seqlen_q")
    cache_axes = _CONTIGUOUS if table is None else _PAGED
    _checks.check_ndim("q", q, (*rows, "heads", "head_dim"))
    _checks.check_float("q", q)
    if varlen:
        check_cu_seqlens("cu_seqlens_q", specs["cu_seqlens_q"])
        batch = specs["cu_seqlens_q"].shape[0] - 1
    else:
        batch = q.shape[0]
        if options["max_seqlen_q"] is not None:
            raise InvalidArgument(
                f"max_seqlen_q = {shown(options['max_seqlen_q'])}, expected None: "
                "it belongs to cu_seqlens_q"
            )
    heads, head_dim = q.shape[-2:]
    for name in ("k", "v"):
        _checks.check_ndim(name, specs[name], (*cache_axes[:-1], f"head_dim{'_v' * (name == 'v')}"))
    _checks.check_shape("k", k, (*k.shape[:3], head_dim), cache_axes, "q")
    _checks.check_shape("v", v, (*k.shape[:3], v.shape[3]), cache_axes, "k")
    if k.shape[2] == 0 and heads != 0:
        raise InvalidArgument("k.shape[2] = 0, expected at least 1 (heads_kv)")
    if v.shape[3] == 0 and head_dim != 0:
        raise InvalidArgument("v.shape[3] = 0, expected 1 to 256 (head_dim_v)")
    problem: dict[str, Any] = {
        "direction": 0,
        "dtype": DTYPE_CODES[q.dtype],
        "device": int(q.device == "cuda"),
        "device_index": q.device_index,
        "batch": batch,
        "seqlen_q": options["max_seqlen_q"] if varlen else q.shape[1],
        "heads": heads,
        "heads_kv": k.shape[2],
        "head_dim": head_dim,
        "head_dim_v": v.shape[3],
        "rotary_interleaved": 0,
        **{
            name: options[name]
            for name in (
                "causal",
                "window_left",
                "window_right",
                "softcap",
                "attention_chunk",
                "batch_invariant",
                "threads",
            )
        },
    }
    if varlen:
        problem |= {"varlen": 1, "total_q": q.shape[0]}
    if options["scale"] is not None:
        problem["scale"] = options["scale"]
    if "alibi_slopes" in specs:
        problem["alibi"] = _alibi(specs["alibi_slopes"], q, batch, heads)
    problem |= _cache_fields(k, table, batch)
    for name in _NUMBERS:
        if name in specs:
            _check_numbers(name, specs[name], q, batch)
            problem[f"has_{name}"] = 1
    problem |= _append_fields(specs, batch, problem["seqlen_k"]) | _rotary_fields(specs, options)
    strided = {name: specs[name] for name in ("q", "k", "v", "k_new", "v_new") if name in specs}
    out_dtype = "float32" if options["float_out"] else q.dtype
    problem["out_dtype"] = DTYPE_CODES[out_dtype]
    out_shape = (*q.shape[:-1], v.shape[3])
    if "out" in specs:
        strided["out"] = specs["out"]
        _checks.check_shape(
            "out", specs["out"], out_shape, (*rows, "heads", "head_dim_v"), "q and v"
        )
        _checks.check_dtype("out", specs["out"], "out_dtype", out_dtype)
    for name, spec in specs.items():
        _checks.check_place(name, spec, "q", q)
        if name in strided:
            if name != "out":
                _checks.check_dtype(name, spec, "that of q", q.dtype)
            _checks.check_last_contiguous(name, spec)
            problem[name] = _strides(spec)
    plan = _plan_of(problem, strided, varlen, table is not None)
    lse_shape = (heads, q.shape[0]) if varlen else (batch, heads, q.shape[1])
    lse = allocator(lse_shape, "float32", q)
    result = lse if "out" in specs else allocator(out_shape, out_dtype, q)
    size = _core.workspace_bytes(plan)
    workspace = allocator((size,), "uint8", q) if q.device == "cuda" and size else None
    # How long a launch takes is in the lengths, which a plan does not know: as if all were full.
    rows_q = q.shape[0] if varlen else batch * q.shape[1]
    work = float(rows_q) * heads * problem["seqlen_k"] * 2.0 * (head_dim + v.shape[3])
    on_cpu = q.device == "cpu"
    return plan, (result, lse), workspace, size <= 256 << 10, on_cpu and work > 4e9, False


def _cache_fields(k: Spec, table: Spec | None, batch: int) -> dict[str, Any]:
    if table is None:
        return {"cache": 1, "cache_batch": k.shape[0], "seqlen_k": k.shape[1]}
    _checks.check_ndim("block_table", table, ("batch", "pages_per_sequence"))
    _checks.check_dtype("block_table", table, "pages of each sequence", "int32")
    columns = table.shape[1]
    _checks.check_shape(
        "block_table", table, (batch, columns), ("batch", "pages_per_sequence"), "q"
    )
    _checks.check_last_contiguous("block_table", table)
    if k.shape[1] == 0:
        raise InvalidArgument("k.shape[1] = 0, expected at least 1 (page_size)")
    fields = {
        "cache": 2,
        "pages": k.shape[0],
        "page_size": k.shape[1],
        "seqlen_k": columns * k.shape[1],
    }
    fields["pages_per_sequence"] = columns
    if batch > 1 and columns > 0:
        if table.strides[0] < columns:  # rows that overlap; to the library 0 means contiguous
            raise InvalidArgument(
                f"{table.kind.stride_hint.format('block_table', 0)} = {table.strides[0]} elements, "
                f"expected at least {columns}: pass {table.kind.contiguous_hint.format('block_table')}"
            )
        fields["block_table_stride"] = table.strides[0]
    return fields


def _append_fields(specs: dict[str, Spec], batch: int, capacity: int) -> dict[str, Any]:
    k, v, lengths = specs.get("k_new"), specs.get("v_new"), specs.get("cu_seqlens_k_new")
    if k is None or v is None:
        for name in ("k_new", "v_new", "cu_seqlens_k_new"):
            if name in specs:
                raise InvalidArgument(f"{name} is given, expected k_new and v_new with it")
        return {}
    if "seqused_k" not in specs:
        raise InvalidArgument(
            "seqused_k = None, expected an array: it says where k_new and v_new go"
        )
    rows = ("batch", "seqlen_new") if lengths is None else ("total_new",)
    for name, spec, cache in (("k_new", k, specs["k"]), ("v_new", v, specs["v"])):
        axes = (*rows, "heads_kv", "head_dim")
        _checks.check_ndim(name, spec, axes)
        like = (batch, k.shape[1]) if lengths is None else (k.shape[0],)
        of = "q and k" if name == "k_new" else "k_new and v"
        _checks.check_shape(name, spec, (*like, *cache.shape[2:]), axes, of)
    if lengths is None:
        if k.shape[1] > capacity:
            of = "k.shape[1]" + " * block_table.shape[1]" * ("block_table" in specs)
            raise InvalidArgument(
                f"k_new.shape[1] = {k.shape[1]}, expected at most {capacity} ({of})"
            )
        return {"append": 1, "seqlen_new": k.shape[1]}
    check_cu_seqlens("cu_seqlens_k_new", lengths)
    _checks.check_shape("cu_seqlens_k_new", lengths, (batch + 1,), ("batch + 1",), "q")
    return {"append": 2, "total_new": k.shape[0], "seqlen_new": k.shape[0]}


def _rotary_fields(specs: dict[str, Spec], options: dict[str, Any]) -> dict[str, Any]:
    cos, sin = specs.get("rotary_cos"), specs.get("rotary_sin")
    if cos is None or sin is None:
        for name in ("rotary_cos", "rotary_sin", "rotary_position"):
            if name in specs:
                raise InvalidArgument(
                    f"{name} is given, expected rotary_cos and rotary_sin with it"
                )
        return {}
    q, axes = specs["q"], ("positions", "rotary_dim / 2")
    _checks.check_ndim("rotary_cos", cos, axes)
    _checks.check_shape("rotary_sin", sin, cos.shape, axes, "rotary_cos")
    for name, spec in (("rotary_cos", cos), ("rotary_sin", sin)):
        _checks.check_dtype(name, spec, "that of q", q.dtype)
        _checks.check_contiguous(name, spec)
    if not 1 <= cos.shape[1] <= q.shape[-1] // 2:
        raise InvalidArgument(
            f"rotary_cos.shape[1] = {cos.shape[1]}, expected 1 to head_dim / 2 = {q.shape[-1] // 2}"
        )
    interleaved = int(options["rotary_interleaved"])
    return {
        "rotary_dim": 2 * cos.shape[1],
        "rotary_rows": cos.shape[0],
        "rotary_interleaved": interleaved,
    }


# ---------------------------------------------------------------------------------------- messages


def _plan_of(problem: dict[str, Any], strided: dict[str, Spec], varlen: bool, paged: bool) -> Any:
    """The plan, or an error in the caller's words."""
    heads = 1 if varlen else 2
    names = {
        "heads": f"q.shape[{heads}] (heads)",
        "heads_kv": "k.shape[2] (heads_kv)",
        "head_dim": f"q.shape[{heads + 1}] (head_dim)",
        "head_dim_v": "v.shape[3] (head_dim_v)",
        "batch": "the batch of cu_seqlens_q" if varlen else "q.shape[0] (batch)",
        "seqlen_q": "max_seqlen_q" if varlen else "q.shape[1] (seqlen_q)",
        "seqlen_k": "pages_per_sequence * page_size" if paged else "k.shape[1] (rows)",
        "total_q": "q.shape[0] (total_q)",
        "cache_batch": "k.shape[0] (cache_batch)",
        "pages": "k.shape[0] (pages)",
        "page_size": "k.shape[1] (page_size)",
        "pages_per_sequence": "block_table.shape[1] (pages_per_sequence)",
        "block_table_stride": "the first stride of block_table",
        "seqlen_new": "k_new.shape[1] (seqlen_new)",
        "total_new": "k_new.shape[0] (total_new)",
        "window_left": "window[0]",
        "window_right": "window[1]",
        "device_index": "q.device.index",
    }
    for name, spec in strided.items():
        steps = ("batch", "seqlen", "head", "dim")[4 - len(spec.shape) :]
        for axis, step in enumerate(steps):
            names[f"{name}.{step}"] = spec.kind.stride_hint.format(name, axis)
    names = {f"{name} =": f"{known} =" for name, known in names.items()}
    names |= {f"has_{name} = 1": f"{name} given" for name in _NUMBERS}
    names |= {"cache = 1 (contiguous)": "a contiguous cache", "cache = 2 (paged)": "block_table"}
    try:
        return _core.make_plan(problem)
    except Error as error:
        raise type(error)(renamed(str(error), names)) from None


def launch_error(status: int, text: str, named: dict[str, Any]) -> Error:
    """For a launch that the library refused, with the arrays that it was given."""
    capacity = "k.shape[1] * block_table.shape[1]" if "block_table" in named else "k.shape[1]"
    names = {"seqlen_k": capacity, "rotary_rows": "rotary_cos.shape[0]"}
    names |= {"total_new": "k_new.shape[0]", "total_q": "q.shape[0]"}
    text = renamed(text, names)
    if re.fullmatch(r"seqused_k\[\d+\] = -?\d+, expected 0 to \d+", text):
        text += f" ({capacity})"
    error = error_for_status(status, text)
    return _plans.launch_error(status, text, named) if isinstance(error, InvalidArgument) else error


# ------------------------------------------------------------------------------------------- merge


def merge(
    outs: Any, lses: Any, *, out: Any = None, out_dtype: Any = None, threads: int = 0
) -> tuple[Any, Any]:
    """Joins partial results of attention whose keys were divided into parts.

    With it, what sequences share is attended to once (`attention_with_kvcache` with out_dtype
    "float32" and return_lse=True gives such parts), and keys may lie on several machines.

    Args:
        outs: float32, (parts, batch, seqlen_q, heads, head_dim_v), or packed
            (parts, total_q, heads, head_dim_v); or a list or tuple of the parts.
        lses: float32, (parts, batch, heads, seqlen_q), or (parts, heads, total_q); or a list. A row
            without keys in a part has lse -inf there; what its outs hold is then not read.
        out: where to write the result; None: a new contiguous array.
        out_dtype: "float32" (None), "bfloat16" or "float16", of a new array.
        threads: CPU threads at most; 0: OpenMP's number.

    Returns:
        (out, lse): lse = log(sum of exp(lses)), out = sum of exp(lses - lse) * outs. A row without
        keys in all parts has out 0 and lse -inf.

    Raises:
        InvalidArgument: as `attention`.
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    x, y = spec_of("outs", outs), spec_of("lses", lses)
    if len(x.shape) not in (4, 5):
        raise InvalidArgument(
            f"outs.ndim = {len(x.shape)}, expected 5: (parts, batch, seqlen_q, heads, head_dim_v) "
            "or 4: (parts, total_q, heads, head_dim_v)"
        )
    rows = ("batch", "seqlen_q") if len(x.shape) == 5 else ("total_q",)
    axes = ("parts", *rows, "heads", "head_dim_v")
    wanted = (*x.shape[:-3], x.shape[-2], x.shape[-3])
    if len(y.shape) != len(wanted):
        raise InvalidArgument(f"lses.ndim = {len(y.shape)}, expected outs.ndim - 1 = {len(wanted)}")
    _checks.check_shape("lses", y, wanted, ("parts", *rows[:-1], "heads", rows[-1]), "outs")
    for name, spec in (("outs", x), ("lses", y)):
        _checks.check_dtype(name, spec, "partial results", "float32")
        _checks.check_place(name, spec, "outs", x)
        if spec.shape[0] > 1 and spec.strides[0] == 0:
            raise InvalidArgument(
                f"{spec.kind.stride_hint.format(name, 0)} = 0, expected another stride: parts that "
                "are one and the same"
            )
    _checks.check_last_contiguous("outs", x)
    if out is None:
        name = "float32" if out_dtype is None else _dtype_name(out_dtype)
        out = _made(allocator(x.shape[1:], name, x))
    else:
        z = spec_of("out", out)
        _checks.check_shape("out", z, x.shape[1:], axes[1:], "outs")
        _checks.check_float("out", z)
        _checks.check_place("out", z, "outs", x)
        _checks.check_last_contiguous("out", z)
    lse = _made(allocator(wanted[1:], "float32", x))
    _core.merge(outs, lses, out, lse, threads)
    return out, lse


def _made(allocation: Any) -> Any:
    function, arguments, *keywords = allocation
    return function(*arguments, **(keywords[0] if keywords else {}))


def _stacked(name: str, parts: Any) -> Any:
    """One array of a list of parts."""
    if not isinstance(parts, list | tuple):
        return parts
    if not parts:
        raise InvalidArgument(f"{name} is empty, expected at least one part")
    specs = [spec_of(f"{name}[{n}]", part) for n, part in enumerate(parts)]
    axes = tuple(f"axis {n}" for n in range(len(specs[0].shape)))
    for n, spec in enumerate(specs):
        _checks.check_shape(f"{name}[{n}]", spec, specs[0].shape, axes, f"{name}[0]")
        _checks.check_dtype(f"{name}[{n}]", spec, "partial results", "float32")
        _checks.check_place(f"{name}[{n}]", spec, f"{name}[0]", specs[0])
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(parts[0], torch.Tensor):
        return torch.stack(tuple(parts))
    return np.stack([np.asarray(part) for part in parts])
