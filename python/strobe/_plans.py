"""From a problem to its plan, what a launch needs besides addresses, and messages in the words of
the caller.

Nothing here runs on a call whose plan is already known: `_core` asks for a plan that it has not,
and for the words of what the library refused.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from . import _arrays, _checks, _core
from ._arrays import Spec, allocator, spec_of
from ._errors import Error, InvalidArgument, error_for_status, renamed
from ._options import ARRAYS
from ._problem import (
    DENSE_K,
    DENSE_Q,
    DENSE_V,
    VARLEN_K,
    VARLEN_Q,
    VARLEN_V,
    Shapes,
    check_cu_seqlens,
    check_like_lse,
    check_like_out,
    check_tensor,
    make_problem,
)
from ._tensors import check_readable

# ---------------------------------------------------------------------------- what a call is given

# Milliseconds on the fastest CPU, where to listen for signals costs microseconds; a second on a
# slow one.
_LONG: Final = 4e9
# FLOP, and elements that are written: a few microseconds on the slowest CPU that one would use.
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


def _written(problem: dict[str, Any]) -> float:
    """Elements of the results at most, and sequences to look at."""
    packed, backward = "varlen" in problem, problem["direction"]
    rows = float(problem["total_q"] if packed else problem["batch"] * problem["seqlen_q"])
    keys = float(problem["total_k"] if packed else problem["batch"] * problem["seqlen_k"])
    most = float(problem["heads"]) * (problem["head_dim"] + problem["head_dim_v"])
    written: float = float(problem["batch"]) + most * (rows + (keys if backward else 0.0))
    return written


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
    is_long = not on_cuda and flop > _LONG
    is_short = not on_cuda and flop + _written(shapes.problem) < _SHORT
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
    check_cu_seqlens(name, spec)
    raise InvalidArgument(
        f"{max_name} = None, expected an integer: {name} ({spec.place}) cannot be read from here"
    )


def longest(name: str, max_name: str, array: Any) -> int:
    """The longest sequence of an array of cumulative lengths, for `plan` and `why`."""
    spec = spec_of(name, array)
    if spec.device != "cpu" or spec.kind is _arrays.DESCRIBED:
        refuse_offsets(name, max_name, spec)
    check_cu_seqlens(name, spec)
    if spec.kind is _arrays.TORCH:
        array = array.detach().numpy()
    elif spec.kind is _arrays.SHARED:
        array = np.from_dlpack(array)
    return int(np.diff(array).max())
