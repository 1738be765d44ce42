"""From the arguments of a call to a problem, a plan, and what a launch needs besides addresses.

Nothing here runs on a call whose plan is already known.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np

from . import _arrays, _checks, _library
from ._arrays import KINDS, AnyArray, Spec, unreadable
from ._errors import Error, InvalidArgument, renamed, shown
from ._library import Plan, Problem
from ._options import ARRAYS, NO_ARRAYS, NO_SCALARS, Arrays, MoreOptions, Scalars
from ._tensors import check_readable
from ._values import flag, integer, real


class CallOptions(MoreOptions, total=False):
    """Options that `attention` and `attention_backward` share."""

    causal: bool
    window: tuple[int, int]
    scale: float | None
    softcap: float
    alibi_slopes: AnyArray | None
    dropout_p: float
    dropout_seed: int
    dropout_offset: int
    cu_seqlens_q: AnyArray | None
    cu_seqlens_k: AnyArray | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    batch_invariant: bool
    threads: int


_INT32: Final = np.dtype(np.int32)

DENSE_Q: Final = ("batch", "seqlen_q", "heads", "head_dim")
DENSE_K: Final = ("batch", "seqlen_k", "heads_kv", "head_dim")
DENSE_V: Final = ("batch", "seqlen_k", "heads_kv", "head_dim_v")
VARLEN_Q: Final = ("total_q", "heads", "head_dim")
VARLEN_K: Final = ("total_k", "heads_kv", "head_dim")
VARLEN_V: Final = ("total_k", "heads_kv", "head_dim_v")


# --------------------------------------------------------------------------------- problem and plan


def _set_strides(target: Any, spec: Spec) -> None:
    """Strides of one tensor. An empty tensor keeps zeros: contiguous."""
    if 0 in spec.shape:
        return
    strides = spec.strides
    if len(strides) == 4:
        target.batch = strides[0]
    target.seqlen, target.head, target.dim = strides[-3:]
    if spec.shape[-1] == 1:
        target.dim = 1  # an axis of one element has no step


@dataclass(slots=True)
class Options:
    """The options of a call, by the names that its messages use."""

    causal: Any
    window_left: Any
    window_right: Any
    scale: Any
    softcap: Any
    dropout_p: Any
    max_seqlen_q: Any
    max_seqlen_k: Any
    threads: Any
    deterministic: Any = False
    batch_invariant: Any = False
    scalars: Scalars = NO_SCALARS
    arrays: Arrays = field(default_factory=lambda: NO_ARRAYS)


@dataclass(slots=True)
class Shapes:
    """What `make_problem` found, for the checks of the tensors that come after q, k and v."""

    problem: Problem
    q: Spec
    out_shape: tuple[int, ...]
    out_axes: tuple[str, ...]
    lse_shape: tuple[int, ...]
    lse_axes: tuple[str, ...]
    tensors: dict[str, Spec]  # those that have strides in the problem


def make_problem(
    direction: int,
    q: Spec,
    k: Spec,
    v: Spec,
    cu_seqlens_q: Spec | None,
    cu_seqlens_k: Spec | None,
    alibi_slopes: Spec | None,
    options: Options,
) -> Shapes:
    """Specs and options as a strobe_problem.

    Raises InvalidArgument for what only Python can see: that shapes, dtypes or devices of several
    tensors contradict each other. The library checks the rest.
    """
    problem = _library.new_problem()
    problem.direction = direction
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
    problem.dtype = _library.DTYPE_CODES[q.dtype]
    problem.device = _library.CUDA if q.device == "cuda" else _library.CPU
    problem.device_index = q.device_index

    heads, head_dim = q.shape[-2:]
    lse_shape: tuple[int, ...]
    lse_axes: tuple[str, ...]
    heads_kv, head_dim_v = v.shape[-2:]
    if varlen:
        batch = _batch_of(q, cu_seqlens_q, cu_seqlens_k)
        _checks.check_shape("k", k, (k.shape[0], k.shape[1], head_dim), k_axes, "q")
        _checks.check_shape("v", v, (*k.shape[:2], head_dim_v), v_axes, "k")
        problem.varlen = 1
        problem.total_q, problem.total_k = q.shape[0], k.shape[0]
        problem.seqlen_q = integer("max_seqlen_q", options.max_seqlen_q)
        problem.seqlen_k = integer("max_seqlen_k", options.max_seqlen_k)
        lse_shape, lse_axes = (heads, q.shape[0]), ("heads", "total_q")
    else:
        for name in ("max_seqlen_q", "max_seqlen_k"):
            if getattr(options, name) is not None:
                raise InvalidArgument(
                    f"{name} = {shown(getattr(options, name))}, expected None: "
                    "it belongs to cu_seqlens_q and cu_seqlens_k"
                )
        batch = q.shape[0]
        _checks.check_shape("k", k, (batch, k.shape[1], k.shape[2], head_dim), k_axes, "q")
        _checks.check_shape("v", v, (*k.shape[:3], head_dim_v), v_axes, "k")
        problem.seqlen_q, problem.seqlen_k = q.shape[1], k.shape[1]
        lse_shape, lse_axes = (batch, heads, q.shape[1]), ("batch", "heads", "seqlen_q")
    # The library reads 0 in these two as "not given"; here they are given.
    if heads_kv == 0 and heads != 0:
        raise InvalidArgument(f"k.shape[{len(k.shape) - 2}] = 0, expected at least 1 (heads_kv)")
    if head_dim_v == 0 and head_dim != 0:
        raise InvalidArgument(f"v.shape[{len(v.shape) - 1}] = 0, expected 1 to 256 (head_dim_v)")
    problem.batch, problem.heads, problem.heads_kv = batch, heads, heads_kv
    problem.head_dim, problem.head_dim_v = head_dim, head_dim_v

    problem.causal = flag("causal", options.causal)
    problem.window_left = integer("window[0]", options.window_left)
    problem.window_right = integer("window[1]", options.window_right)
    if options.scale is not None:
        problem.scale = real("scale", options.scale)
    problem.softcap = real("softcap", options.softcap)
    problem.dropout_p = real("dropout_p", options.dropout_p)
    problem.deterministic = flag("deterministic", options.deterministic)
    problem.batch_invariant = flag("batch_invariant", options.batch_invariant)
    problem.threads = integer("threads", options.threads, 32)
    if alibi_slopes is not None:
        problem.alibi = _alibi(alibi_slopes, q, batch, heads)
    for name, value in options.scalars:
        setattr(problem, name, value)
    for name, array in options.arrays.items():
        _check_numbers(name, spec_of(name, array), q, batch)
        setattr(problem, f"has_{name}", 1)
    for name, spec in (("q", q), ("k", k), ("v", v)):
        _checks.check_last_contiguous(name, spec)
        _set_strides(getattr(problem, name), spec)
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
        kind = _library.ALIBI_PER_HEAD
    elif len(spec.shape) == 2:
        _checks.check_shape(name, spec, (batch, heads), ("batch", "heads"), "q")
        kind = _library.ALIBI_PER_BATCH_HEAD
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
    _set_strides(getattr(shapes.problem, name), spec)
    shapes.tensors[name] = spec


def check_like_lse(name: str, spec: Spec, shapes: Shapes) -> None:
    _checks.check_shape(name, spec, shapes.lse_shape, shapes.lse_axes, "q")
    _checks.check_dtype(name, spec, "whatever the dtype of q", "float32")
    _checks.check_place(name, spec, "q", shapes.q)
    _checks.check_contiguous(name, spec)


def spec_of(name: str, array: Any) -> Spec:
    try:
        return KINDS[type(array)].spec(name, array)
    except Error:
        raise
    except Exception as error:
        raise _arrays.cannot_be_read(name, array, error) from None


def views(scalars: Scalars, arrays: Arrays) -> tuple[list[int] | None, Any]:
    """Addresses of `_options.ARRAYS`, 0 for those that are not given, or None where none is; and
    what a key holds of these options.
    """
    if not arrays:
        return None, scalars or None
    pointers, signatures = [], []
    try:
        for name in ARRAYS:
            array = arrays.get(name)
            pointer, signature = (0, None) if array is None else KINDS[type(array)].view(array)
            pointers.append(pointer)
            signatures.append(signature)
    except Exception as error:
        raise unreadable(tuple(arrays.items()), error) from None
    return pointers, (scalars, tuple(signatures))


def optional_spec(name: str, array: Any) -> Spec | None:
    return None if array is None else spec_of(name, array)


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


def plan_of(shapes: Shapes) -> Plan:
    """The plan, or an error in the caller's words."""
    try:
        return _library.make_plan(shapes.problem)
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
    return renamed(_library.why_text(shapes.problem), _names(shapes))


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


def launch_error(status: int, named: dict[str, Any]) -> Error:
    """For a launch that the library refused, with the arrays that it was given."""
    error = _library.error(status)
    if not isinstance(error, InvalidArgument):
        return error
    try:
        for name, array in named.items():
            if array is not None and isinstance(KINDS[type(array)], _arrays.TorchKind):
                check_readable(name, array)
    except Error as unreadable:
        return unreadable
    text = renamed(str(error), _LAUNCH_NAMES)
    text = text.replace("= NULL, expected a pointer", "has no memory, expected an array with data")
    found = re.match(r"cu_seqlens_([qk])\[\d+\] = (\d+), expected [qk].shape", text)
    if found and named[found[1]].shape[1] == int(found[2]):
        spec = spec_of(found[1], named[found[1]])
        axes = ("heads", "total", "head_dim")
        text += _checks.in_other_layout([(found[1], spec)], axes, (0, 1))
    return InvalidArgument(text)


def longest(name: str, max_name: str, array: Any) -> int:
    """The longest sequence of an array of cumulative lengths in the CPU's memory."""
    if type(array) is np.ndarray and array.dtype is _INT32 and array.ndim == 1 and len(array) > 1:
        offsets = array  # the checks below cost 15 us
    else:
        offsets = _readable(name, max_name, array)
    if len(offsets) <= 64:
        listed: list[int] = offsets.tolist()
        return max(end - start for start, end in pairwise(listed))
    return int((offsets[1:] - offsets[:-1]).max())


def _readable(name: str, max_name: str, array: Any) -> np.ndarray[Any, Any]:
    """An array of cumulative lengths as a NumPy array, whatever it is."""
    spec = spec_of(name, array)
    _check_cu_seqlens(name, spec)
    if spec.device != "cpu" or spec.kind is _arrays.SPEC:
        raise InvalidArgument(
            f"{max_name} = None, expected an integer: "
            f"{name} ({spec.place}) cannot be read from here"
        )
    address = KINDS[type(array)].pointer(array)
    return np.ctypeslib.as_array((ctypes.c_int32 * spec.shape[0]).from_address(address))


def no_array(names: Sequence[str], arrays: Sequence[Any]) -> InvalidArgument:
    """For arguments that must not be None."""
    name = next(
        (name for name, array in zip(names, arrays, strict=True) if array is None), names[0]
    )
    return InvalidArgument(f"{name} = None, expected an array")
