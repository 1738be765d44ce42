"""From the arguments of a call to a problem and a plan, and what a launch needs besides addresses.

Nothing here runs on a call whose plan is already known: `_core` asks for a plan that it has not,
and for the words of what the library refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from . import _arrays, _checks, _core
from ._arrays import Spec, allocator, spec_of
from ._checks import DTYPE_CODES
from ._errors import Error, InvalidArgument, error_for_status, renamed, shown
from ._options import ARRAYS
from ._tensors import check_readable
from ._values import flag, integer, real

DENSE_Q: Final = ("batch", "seqlen_q", "heads", "head_dim")
DENSE_K: Final = ("batch", "seqlen_k", "heads_kv", "head_dim")
DENSE_V: Final = ("batch", "seqlen_k", "heads_kv", "head_dim_v")
VARLEN_Q: Final = ("total_q", "heads", "head_dim")
VARLEN_K: Final = ("total_k", "heads_kv", "head_dim")
VARLEN_V: Final = ("total_k", "heads_kv", "head_dim_v")

# strobe_alibi of include/strobe/strobe.h
_ALIBI_PER_HEAD: Final = 1
_ALIBI_PER_BATCH_HEAD: Final = 2


# --------------------------------------------------------------------------------- problem and plan


def _strides(spec: Spec) -> tuple[int, ...]:
    """Of one tensor. An empty one keeps zeros: contiguous."""
    if 0 in spec.shape:
        return (0, 0, 0, 0)
    last = 1 if spec.shape[-1] == 1 else spec.strides[-1]  # an axis of one element has no step
    return (*(0,) * (4 - len(spec.strides)), *spec.strides[:-1], last)


@dataclass(slots=True)
class Shapes:
    """What `make_problem` found, for the checks of the tensors that come after q, k and v."""

    problem: dict[str, Any]  # the fields of strobe_problem
    q: Spec
    out_shape: tuple[int, ...]
    out_axes: tuple[str, ...]
    lse_shape: tuple[int, ...]
    lse_axes: tuple[str, ...]
    tensors: dict[str, Spec]  # those that have strides in the problem


def make_problem(backward: bool, arrays: dict[str, Any], options: dict[str, Any]) -> Shapes:
    """Arrays and options, by the names that messages use, as a strobe_problem.

    Raises InvalidArgument for what only Python can see: that shapes, dtypes or devices of several
    tensors contradict each other. The library checks the rest.
    """
    q, k, v = (spec_of(name, arrays[name]) for name in "qkv")
    cu_seqlens_q, cu_seqlens_k, alibi_slopes = (
        spec_of(name, arrays[name]) if arrays.get(name) is not None else None
        for name in ("cu_seqlens_q", "cu_seqlens_k", "alibi_slopes")
    )
    problem: dict[str, Any] = {"direction": int(backward)}
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    q_axes, k_axes, v_axes = (
        (VARLEN_Q, VARLEN_K, VARLEN_V) if varlen else (DENSE_Q, DENSE_K, DENSE_V)
    )
    for name, spec, axes in (("q", q, q_axes), ("k", k, k_axes), ("v", v, v_axes)):
        _checks.check_ndim(name, spec, axes)
    _checks.check_float("q", q)
    for name, spec in (("k", k), ("v", v)):
        _checks.check_dtype(name, spec, "that of q", q.dtype)
        _checks.check_place(name, spec, "q", q)
    problem["dtype"] = DTYPE_CODES[q.dtype]
    problem["device"] = int(q.device == "cuda")
    problem["device_index"] = q.device_index

    heads, head_dim = q.shape[-2:]
    lse_shape: tuple[int, ...]
    lse_axes: tuple[str, ...]
    heads_kv, head_dim_v = v.shape[-2:]
    if varlen:
        batch = _batch_of(q, cu_seqlens_q, cu_seqlens_k)
        _checks.check_shape("k", k, (k.shape[0], k.shape[1], head_dim), k_axes, "q")
        _checks.check_shape("v", v, (*k.shape[:2], head_dim_v), v_axes, "k")
        problem |= {"varlen": 1, "total_q": q.shape[0], "total_k": k.shape[0]}
        seqlen_q = integer("max_seqlen_q", options["max_seqlen_q"])
        seqlen_k = integer("max_seqlen_k", options["max_seqlen_k"])
        lse_shape, lse_axes = (heads, q.shape[0]), ("heads", "total_q")
    else:
        for name in ("max_seqlen_q", "max_seqlen_k"):
            if options[name] is not None:
                raise InvalidArgument(
                    f"{name} = {shown(options[name])}, expected None: "
                    "it belongs to cu_seqlens_q and cu_seqlens_k"
                )
        batch = q.shape[0]
        _checks.check_shape("k", k, (batch, k.shape[1], k.shape[2], head_dim), k_axes, "q")
        _checks.check_shape("v", v, (*k.shape[:3], head_dim_v), v_axes, "k")
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        lse_shape, lse_axes = (batch, heads, q.shape[1]), ("batch", "heads", "seqlen_q")
    # The library reads 0 in these two as "not given"; here they are given.
    if heads_kv == 0 and heads != 0:
        raise InvalidArgument(f"k.shape[{len(k.shape) - 2}] = 0, expected at least 1 (heads_kv)")
    if head_dim_v == 0 and head_dim != 0:
        raise InvalidArgument(f"v.shape[{len(v.shape) - 1}] = 0, expected 1 to 256 (head_dim_v)")
    problem |= {
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "heads": heads,
        "heads_kv": heads_kv,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "causal": flag("causal", options["causal"]),
        "window_left": integer("window[0]", options["window_left"]),
        "window_right": integer("window[1]", options["window_right"]),
        "softcap": real("softcap", options["softcap"]),
        "dropout_p": real("dropout_p", options["dropout_p"]),
        "deterministic": flag("deterministic", options["deterministic"]),
        "batch_invariant": flag("batch_invariant", options["batch_invariant"]),
        "threads": integer("threads", options["threads"], 32),
        **dict(options["scalars"] or ()),
    }
    if options["scale"] is not None:
        problem["scale"] = real("scale", options["scale"])
    if alibi_slopes is not None:
        problem["alibi"] = _alibi(alibi_slopes, q, batch, heads)
    for name in ARRAYS:
        if arrays.get(name) is not None:
            _check_numbers(name, spec_of(name, arrays[name]), q, batch)
            problem[f"has_{name}"] = 1
    for name, spec in (("q", q), ("k", k), ("v", v)):
        _checks.check_last_contiguous(name, spec)
        problem[name] = _strides(spec)
    out_shape = (*q.shape[:-1], head_dim_v)
    return Shapes(
        problem,
        q,
        out_shape,
        (*q_axes[:-1], "head_dim_v"),
        lse_shape,
        lse_axes,
        {"q": q, "k": k, "v": v},
    )


def _check_cu_seqlens(name: str, spec: Spec) -> None:
    _checks.check_ndim(name, spec, ("batch + 1",))
    _checks.check_dtype(name, spec, "cumulative lengths", "int32")
    _checks.check_contiguous(name, spec)
    if spec.shape[0] < 2:
        raise InvalidArgument(f"{name}.shape[0] = {spec.shape[0]}, expected at least 2 (batch + 1)")


def _batch_of(q: Spec, cu_seqlens_q: Spec | None, cu_seqlens_k: Spec | None) -> int:
    """The batch size that both arrays of cumulative lengths agree on."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing, given = ("q", "k") if cu_seqlens_q is None else ("k", "q")
        raise InvalidArgument(
            f"cu_seqlens_{missing} = None, expected an array, as cu_seqlens_{given} is given"
        )
    for name, spec in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_cu_seqlens(name, spec)
        _checks.check_place(name, spec, "q", q)
    _checks.check_shape(
        "cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, ("batch + 1",), "cu_seqlens_q"
    )
    return cu_seqlens_q.shape[0] - 1


def _check_numbers(name: str, spec: Spec, q: Spec, batch: int) -> None:
    """An array of one number for each sequence."""
    _checks.check_ndim(name, spec, ("batch",))
    _checks.check_dtype(name, spec, "one number for each sequence", "int32")
    _checks.check_place(name, spec, "q", q)
    of = "q" if len(q.shape) == 4 else "cu_seqlens_q"
    _checks.check_shape(name, spec, (batch,), ("batch",), of)
    _checks.check_contiguous(name, spec)


def _alibi(spec: Spec, q: Spec, batch: int, heads: int) -> int:
    name = "alibi_slopes"
    _checks.check_dtype(name, spec, "whatever the dtype of q", "float32")
    _checks.check_place(name, spec, "q", q)
    if len(spec.shape) == 1:
        _checks.check_shape(name, spec, (heads,), ("heads",), "q")
        kind = _ALIBI_PER_HEAD
    elif len(spec.shape) == 2:
        _checks.check_shape(name, spec, (batch, heads), ("batch", "heads"), "q")
        kind = _ALIBI_PER_BATCH_HEAD
    else:
        raise InvalidArgument(
            f"{name}.ndim = {len(spec.shape)}, expected 1: (heads) or 2: (batch, heads)"
        )
    _checks.check_contiguous(name, spec)
    return kind


def check_like_out(name: str, spec: Spec, shapes: Shapes) -> None:
    """Checks out or dout and sets its strides."""
    _checks.check_shape(name, spec, shapes.out_shape, shapes.out_axes, "q and v")
    check_tensor(name, spec, shapes)


def check_tensor(name: str, spec: Spec, shapes: Shapes) -> None:
    _checks.check_dtype(name, spec, "that of q", shapes.q.dtype)
    _checks.check_place(name, spec, "q", shapes.q)
    _checks.check_last_contiguous(name, spec)
    shapes.problem[name] = _strides(spec)
    shapes.tensors[name] = spec


def check_like_lse(name: str, spec: Spec, shapes: Shapes) -> None:
    _checks.check_shape(name, spec, shapes.lse_shape, shapes.lse_axes, "q")
    _checks.check_dtype(name, spec, "whatever the dtype of q", "float32")
    _checks.check_place(name, spec, "q", shapes.q)
    _checks.check_contiguous(name, spec)


# ---------------------------------------------------------------------------- what a call is given

# Milliseconds on the fastest CPU, where to listen for signals costs microseconds; a second on a
# slow one.
_LONG: Final = 4e9
# A few microseconds on the slowest CPU that one would use.
_SHORT: Final = 1e5
# A forward launch on CUDA that needs so little workspace finds it in the library's own, which keeps
# it for each stream: a quarter of what an allocation costs. Not in a graph, whose replays must not
# share it with launches.
_OWN_WORKSPACE: Final = 256 << 10


def _flop(problem: dict[str, Any]) -> float:
    """Of the matrix products, unmasked and as if all sequences were as long as the longest."""
    rows = problem["total_q"] if "varlen" in problem else problem["batch"] * problem["seqlen_q"]
    scores: float = float(rows) * problem["heads"] * problem["seqlen_k"]
    products = 5.0 if problem["direction"] else 2.0
    return float(scores * products * (problem["head_dim"] + problem["head_dim_v"]))


def make(
    backward: bool, arrays: dict[str, Any], options: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], Any, bool, bool, bool]:
    """(plan, allocators of results, allocator of a workspace or None, whether the library keeps so
    small a workspace, whether the launch is long, and whether it is short), for `_core`.
    """
    shapes = make_problem(backward, arrays, options)
    q = shapes.q
    results: tuple[Any, ...]
    if backward:
        results = _gradients(shapes, arrays)
    else:
        if "out" in arrays:
            check_like_out("out", spec_of("out", arrays["out"]), shapes)
        lse = allocator(shapes.lse_shape, "float32", q)
        out = lse if "out" in arrays else allocator(shapes.out_shape, q.dtype, q)
        results = (out, lse)
    plan = plan_of(shapes)
    size = _core.workspace_bytes(plan)
    on_cuda = q.device == "cuda"
    workspace = allocator((size,), "uint8", q) if on_cuda and size else None
    small = not backward and size <= _OWN_WORKSPACE
    flop = _flop(shapes.problem)
    is_long, is_short = not on_cuda and flop > _LONG, not on_cuda and flop < _SHORT
    return plan, results, workspace, small, is_long, is_short


def _gradients(shapes: Shapes, arrays: dict[str, Any]) -> tuple[Any, ...]:
    """Checks what a backward call has besides; allocators of dq, dk and dv."""
    for name in ("dout", "out"):
        check_like_out(name, spec_of(name, arrays[name]), shapes)
    for name in ("lse", "dlse"):
        if name in arrays:
            check_like_lse(name, spec_of(name, arrays[name]), shapes)
    shapes.problem["has_dlse"] = int("dlse" in arrays)
    inputs = [shapes.tensors[name] for name in "qkv"]
    varlen = len(shapes.q.shape) == 3
    axes = (VARLEN_Q, VARLEN_K, VARLEN_V) if varlen else (DENSE_Q, DENSE_K, DENSE_V)
    if "dq" not in arrays:
        return tuple(allocator(spec.shape, spec.dtype, spec) for spec in inputs)
    for name, like, axis_names in zip(("dq", "dk", "dv"), inputs, axes, strict=True):
        spec = spec_of(name, arrays[name])
        _checks.check_shape(name, spec, like.shape, axis_names, name[1:])
        check_tensor(name, spec, shapes)
    return ()


# ---------------------------------------------------------------------------------- their messages


def _names(shapes: Shapes) -> dict[str, str]:
    """What the library calls things, as the caller knows them."""
    varlen = len(shapes.q.shape) == 3
    heads = len(shapes.q.shape) - 2
    names = {
        "heads": f"q.shape[{heads}] (heads)",
        "heads_kv": f"k.shape[{heads}] (heads_kv)",
        "head_dim": f"q.shape[{heads + 1}] (head_dim)",
        "head_dim_v": f"v.shape[{heads + 1}] (head_dim_v)",
        "batch": "the batch of cu_seqlens_q" if varlen else "q.shape[0] (batch)",
        "batch * heads": "batch * heads",
        "seqlen_q": "max_seqlen_q" if varlen else "q.shape[1] (seqlen_q)",
        "seqlen_k": "max_seqlen_k" if varlen else "k.shape[1] (seqlen_k)",
        "total_q": "q.shape[0] (total_q)",
        "total_k": "k.shape[0] (total_k)",
        "window_left": "window[0]",
        "window_right": "window[1]",
        "device_index": "q.device.index",
    }
    fields = ("seqlen", "head", "dim") if varlen else ("batch", "seqlen", "head", "dim")
    for name, spec in shapes.tensors.items():
        for axis, step in enumerate(fields):
            names[f"{name}.{step}"] = spec.kind.stride_hint.format(name, axis)
    # In what else a message says, "heads" or "batch" are words.
    equal = {f"{name} =": f"{known} =" for name, known in names.items()}
    return equal | {f"has_{name} = 1": f"{name} given" for name in ARRAYS}


# Those of a launch whose plan was made: see `check_args` in src/core/validate.cpp.
_LAUNCH_NAMES: Final = {
    "seqlen_q =": "max_seqlen_q =",
    "seqlen_k =": "max_seqlen_k =",
    "total_q =": "q.shape[0] (total_q) =",
    "total_k =": "k.shape[0] (total_k) =",
}


def plan_of(shapes: Shapes) -> Any:
    """The plan, or an error in the caller's words."""
    try:
        return _core.make_plan(shapes.problem)
    except InvalidArgument as error:
        text = renamed(str(error), _names(shapes))
        raise InvalidArgument(text + _other_layout(shapes)) from None
    except Error as error:
        raise type(error)(renamed(str(error), _names(shapes))) from None


def why_text(shapes: Shapes) -> str:
    """What `strobe.why` says, in the caller's words."""
    try:
        plan_of(shapes)
    except InvalidArgument as error:
        return str(error)
    except Error:
        pass  # the lines say more
    return renamed(_core.why(shapes.problem), _names(shapes))


def _other_layout(shapes: Shapes) -> str:
    """A guess, where heads contradict each other and would not with heads before rows."""
    named = shapes.tensors
    sizes = {name: named[name].shape[-3:-1] for name in "qkv"}

    def divides(swapped: str) -> bool:
        heads, heads_kv = (sizes[name][name not in swapped] for name in "qk")
        return bool(heads_kv > 0 and heads % heads_kv == 0)

    if divides(""):
        return ""
    for swapped in ("qkv", "kv", "q"):
        if divides(swapped):
            first = len(shapes.q.shape) - 3
            rows = ("total",) if first == 0 else ("batch", "seqlen")
            axes = (*rows[:-1], "heads", rows[-1], "head_dim")
            arrays = [(name, named[name]) for name in swapped]
            return _checks.in_other_layout(arrays, axes, (first, first + 1))
    return ""


def launch_error(status: int, text: str, named: dict[str, Any]) -> Error:
    """For a launch that the library refused, with the arrays that it was given."""
    error = error_for_status(status, text)
    if not isinstance(error, InvalidArgument):
        return error
    try:
        for name, array in named.items():
            if not isinstance(array, Spec) and spec_of(name, array).kind is _arrays.TORCH:
                check_readable(name, array)
    except Error as unreadable:
        return unreadable
    text = renamed(text, _LAUNCH_NAMES)
    text = text.replace("= NULL, expected a pointer", "has no memory, expected an array with data")
    found = re.match(r"cu_seqlens_([qk])\[\d+\] = (\d+), expected [qk].shape", text)
    if found and spec_of(found[1], named[found[1]]).shape[1] == int(found[2]):
        spec = spec_of(found[1], named[found[1]])
        axes = ("heads", "total", "head_dim")
        text += _checks.in_other_layout([(found[1], spec)], axes, (0, 1))
    return InvalidArgument(text)


def refuse_offsets(name: str, max_name: str, array: Any) -> None:
    """For cumulative lengths whose longest sequence cannot be found from here."""
    spec = spec_of(name, array)
    _check_cu_seqlens(name, spec)
    raise InvalidArgument(
        f"{max_name} = None, expected an integer: {name} ({spec.place}) cannot be read from here"
    )


def longest(name: str, max_name: str, array: Any) -> int:
    """The longest sequence of an array of cumulative lengths, for `plan` and `why`."""
    spec = spec_of(name, array)
    if spec.device != "cpu" or spec.kind is _arrays.DESCRIBED:
        refuse_offsets(name, max_name, spec)
    _check_cu_seqlens(name, spec)
    if spec.kind is _arrays.TORCH:
        array = array.detach().numpy()
    elif spec.kind is _arrays.SHARED:
        array = np.from_dlpack(array)
    return int(np.diff(array).max())
