"""From a problem to its plan, what a launch needs besides addresses, and messages in the words of
the caller.

Nothing here runs on a call whose plan is already known: `_core` asks for a plan that it has not,
and for the words of what the library refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, TypeAlias

import numpy as np

from . import _arrays, _core
from ._arrays import Spec, spec_of
from ._errors import (
    Error,
    InvalidArgument,
    Unsupported,
    error_for_status,
    first_line,
    renamed,
    shown,
)
from ._problem import (
    BIAS_STEPS,
    DTYPE_CODES,
    NUMBERS,
    Problem,
    in_other_layout,
    make_problem,
    take_offsets,
)

# Milliseconds on the fastest CPU, where to listen for signals costs microseconds; a second on a
# slow one.
LONG: Final = 4e9
# FLOP, and elements that are written: a few microseconds on the slowest CPU that one would use.
_SHORT: Final = 1e5
# A forward launch on CUDA that needs so little workspace finds it in the library's own, which keeps
# it for each stream: a quarter of what an allocation costs. Not in a graph, whose replays must not
# share it with launches.
OWN_WORKSPACE: Final = 256 << 10


def _work(problem: Problem) -> tuple[float, float]:
    """(FLOP of the matrix products, unmasked and as if all sequences were as long as the longest;
    elements of the results at most, and sequences to look at).
    """
    fields = {name: float(x) for name, x in problem.fields.items() if not isinstance(x, tuple)}
    batch, heads, backward = fields["batch"], fields["heads"], fields["direction"]
    rows = fields["total_q"] if problem.packed else batch * fields["seqlen_q"]
    width = fields["head_dim"] + fields["head_dim_v"]
    products, written = (5.0, rows) if backward else (2.0, rows)
    if backward:
        written += fields["total_k"] if problem.packed else batch * fields["seqlen_k"]
    return products * rows * heads * fields["seqlen_k"] * width, batch + heads * width * written


# (plan, allocators of results, allocator of a workspace or None, whether the library keeps so small
# a workspace, whether the launch is long, and whether it is short), for `_core`.
Launch: TypeAlias = tuple[Any, tuple[Any, ...], Any, bool, bool, bool]


def make(backward: bool, arrays: dict[str, Any], options: dict[str, Any]) -> Launch:
    """How to launch a call whose plan is not known yet."""
    problem = make_problem(backward, arrays, options)
    dtype = problem.q.dtype
    if backward:
        made = "float32" if "grad_dtype" in problem.fields else dtype
        results: dict[str, str | None] = {"q": made, "k": made, "v": made}
        if problem.fields["has_dsinks"]:
            results["sinks"] = "float32"
        if "has_dbias" in problem.fields:
            names = {code: name for name, code in DTYPE_CODES.items()}
            results["bias"] = names[problem.fields["dbias_dtype"]]
        return launch_of(problem, results)
    made_out = None if "out" in arrays else problem.out_dtype(None)
    return launch_of(problem, {"out": made_out, "lse": "float32"})


class NoSequences(Exception):
    """A batch of none. The library has no plan for it: whoever called answers in its place.

    results: what the call would have made, empty or sums of nothing, and None where the caller
    brought an array; () where the batch was seen to be none already while its longest sequence was
    looked for.
    """

    def __init__(self, results: tuple[Any, ...] = ()) -> None:
        """As Exception."""
        super().__init__("a batch of no sequences")
        self.results = results


def answer(none: NoSequences, again: Callable[[], Any]) -> tuple[Any, ...]:
    """The results of a call that raised `none`. again: makes it with `no_lengths`."""
    results = none.results
    if not results:
        try:
            again()
        except NoSequences as found:
            results = found.results
    _core.say("served: there was nothing to compute, as there are no sequences")
    return results


def no_lengths(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call of packed sequences, of which there are none: with the longest."""
    given = dict(options)
    for side in "qk":
        name = f"max_seqlen_{side}"
        if given.get(f"cu_seqlens_{side}") is not None and given.get(name) is None:
            given[name] = 0
    return given


def chosen(results: tuple[Any, ...], out: Any, return_lse: Any) -> Any:
    """out, or (out, lse). out: the caller's, if there is one."""
    first = results[0] if out is None else out
    return (first, results[1]) if return_lse else first


def launch_of(problem: Problem, results: dict[str, str | None]) -> Launch:
    """results: their shapes' names, and dtypes; None: not to be made."""
    if problem.fields["batch"] == 0:
        check_without_sequences(problem)
        none = tuple(x and made(n, problem.shape(n), x, problem.q) for n, x in results.items())
        clear(*none)
        raise NoSequences(none)
    plan = plan_of(problem)
    q, size = problem.q, _core.workspace_bytes(plan)
    makers = tuple(x and allocator(problem.shape(name), x, q) for name, x in results.items())
    flop, written = _work(problem)
    if q.device == "cuda":
        # In words of 4 bytes: the extension checks it as it does other arrays.
        workspace = allocator((-(-size // 4),), "int32", q) if size else None
        small = problem.fields["direction"] == 0 and size <= OWN_WORKSPACE
        return plan, makers, workspace, small, False, False
    return plan, makers, None, False, flop > LONG, flop + written < _SHORT


# --------------------------------------------------------------------- what a launch makes and asks

# function(*arguments, **keywords) makes an uninitialised, contiguous array; its shape, and its
# dtype as the extension numbers it.
Allocator: TypeAlias = tuple[Any, tuple[Any, ...], dict[str, Any] | None, tuple[int, ...], int]

_DTYPE_NUMBERS: Final = {name: number for number, name in _arrays.DTYPES.items()}


def allocator(shape: Sequence[int], dtype: str, like: Spec) -> Allocator:
    """Of results on the device of `like`: PyTorch's for its tensors, else NumPy's."""
    shape = tuple(shape)
    if like.kind is _arrays.TORCH:
        maker = _torch_allocator(shape, dtype, like)
    else:
        maker = (np.empty, (shape, numpy_dtype(dtype)), None)
    return *maker, shape, _DTYPE_NUMBERS[dtype]


def made(name: str, shape: Sequence[int], dtype: str, like: Spec) -> Any:
    """A new array, looked at as the extension does: a mode of PyTorch's may change what is made."""
    function, arguments, keywords, wanted, number = allocator(shape, dtype, like)
    array = function(*arguments, **(keywords or {}))
    try:
        spec = spec_of(name, array)
        right = (spec.shape, spec.dtype, spec.place) == (wanted, dtype, like.place)
    except Error:
        right = False
    if right:
        return array
    on_cuda = int(like.device == "cuda")
    raise unlike_result(name, array, wanted, number, function, on_cuda, like.device_index)


def clear(*arrays: Any) -> None:
    """Zeros in arrays, whoever tracks them: sums over no sequences. None is none."""
    for array in arrays:
        tensor = _arrays.is_tensor(array)
        with sys.modules["torch"].inference_mode() if tensor else nullcontext():
            if array is not None:
                array[...] = 0


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name; bfloat16 is the one of ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    # Whoever has such arrays has imported it. Nothing is imported in a call: `_arrays.is_masked`.
    ml_dtypes: Any = sys.modules.get("ml_dtypes")
    if ml_dtypes is None:
        raise Unsupported(
            "a bfloat16 result as a NumPy array needs the package ml_dtypes (pip install "
            "ml_dtypes, and import it); or pass PyTorch tensors, or your own array as out"
        )
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _torch_allocator(
    shape: tuple[int, ...], dtype: str, like: Spec
) -> tuple[Any, tuple[Any, ...], dict[str, Any] | None]:
    torch = sys.modules["torch"]
    device = torch.device(like.device, None if like.device == "cpu" else like.device_index)
    made = {"dtype": getattr(torch, dtype), "device": device}
    with torch.inference_mode(False):
        model = torch.empty(shape, **made)
    # While somebody traces it is a fake one, and a mode may have made it another than was asked
    # for: the plan outlives the mode.
    if (
        type(model) is not torch.Tensor
        or (tuple(model.shape), model.dtype) != (shape, made["dtype"])
        or model.device.type != like.device
        or not model.is_contiguous()
        or model.is_neg()
    ):
        return torch.empty, (shape,), made
    # empty_like takes half the time of empty; of the model only its description is needed.
    model.untyped_storage().resize_(0)
    return torch.empty_like, (model,), None


def unlike_result(
    name: str,
    made: Any,
    shape: tuple[int, ...],
    dtype: int,
    function: Any,
    on_cuda: int,
    device_index: int,
) -> Error:
    """For a new array that is not what was asked for: a mode of PyTorch's changes what is made."""
    place = f"cuda:{device_index}" if on_cuda else "cpu"
    try:
        spec = spec_of(name, made)
        strides = tuple(
            step for n, step in zip(spec.shape, spec.strides, strict=True) if n > 1 or 0 in shape
        )
        got = f"{spec.dtype:.60} {shown(spec.shape)} on {spec.place}, strides {shown(strides)}"
        if spec.kind is _arrays.TORCH:
            _arrays.check_readable(name, made)
    except Exception as error:
        got = f"what cannot be written to ({first_line(error)})"
    # The names of functions differ between NumPy and PyTorch, and a mode sees this one.
    called = f"{getattr(function, '__module__', None) or 'torch'}.{function.__name__}"
    return InvalidArgument(
        f"{name}, a new array, came from {called} as {got}; expected {_arrays.DTYPES[dtype]} "
        f"{shown(shape)} on {place}, contiguous: a mode or a patch changes new arrays"
    )


def torch_stream(device_index: int) -> int:
    """cudaStream_t of PyTorch's current stream, where no exchange API (PyTorch 2.10) says it."""
    address: int = sys.modules["torch"].cuda.current_stream(device_index).cuda_stream
    return address


# ---------------------------------------------------------------------------------- their messages


def capacity(paged: bool) -> str:
    """How many rows a sequence may have in a cache, as the caller knows it."""
    return "k.shape[1] * block_table.shape[1]" if paged else "k.shape[1]"


def maybe_pages(entries: int, batch: int) -> str:
    """What a message adds about a length that a cache without a table has no room for: a pool of
    pages has more entries than there are sequences.
    """
    return "; if k and v are pages, block_table is missing" if entries > batch else ""


def _names(problem: Problem) -> dict[str, str]:
    """What the library calls things, as the caller knows them."""
    names = problem.found | {
        "batch * heads": "batch * heads",
        "window_left": "window[0]",
        "window_right": "window[1]",
        "device_index": "q.device.index",
        "block_table_stride": "the first stride of block_table",
    }
    if problem.packed:
        names["batch"] = "the batch of cu_seqlens_q"
        names |= {"seqlen_q": "max_seqlen_q", "seqlen_k": "max_seqlen_k"}
    if "cache" in problem.fields:
        names["seqlen_k"] = capacity(problem.fields["cache"] == 2)
    for name, spec in problem.tensors.items():
        steps = ("batch", "seqlen", "head", "dim")[4 - len(spec.shape) :]
        if name.endswith("bias"):
            steps = BIAS_STEPS
        for axis, step in enumerate(steps):
            names[f"{name}.{step}"] = spec.kind.stride_hint.format(name, axis)
    # In what else a message says, "heads" or "batch" are words.
    equal = {f"{name} =": f"{known} =" for name, known in names.items()}
    equal |= {"window_signed = 1": "window_signed=True", "STROBE_NO_LIMIT": "None"}
    equal |= {"cache = 1 (contiguous)": "a contiguous cache", "cache = 2 (paged)": "block_table"}
    equal |= {f"has_{name} = 1": f"return_{name}=True" for name in ("dsinks", "dbias")}
    given = (*NUMBERS, "dlse", "delta", "sinks", "bias")
    equal |= {f"has_{name} = 0": f"{name} not given" for name in given}
    return equal | {f"has_{name} = 1": f"{name} given" for name in given}


# Those of a launch whose plan was made: see `check_args` in src/core/validate.cpp.
_LAUNCH_NAMES: Final = {
    "seqlen_q =": "max_seqlen_q =",
    "seqlen_k =": "max_seqlen_k =",
    "total_q =": "q.shape[0] (total_q) =",
    "total_k =": "k.shape[0] (total_k) =",
    "= NULL, expected a pointer": "has no memory, expected an array with data",
}


def plan_of(problem: Problem) -> Any:
    """The plan, or an error in the caller's words."""
    try:
        return _core.make_plan(problem.fields)
    except Error as error:
        text = renamed(str(error), _names(problem))
        if isinstance(error, InvalidArgument):
            text += _other_layout(problem)
        raise type(error)(text) from None


def check_without_sequences(problem: Problem) -> None:
    """Raises what would be wrong if there were a sequence, and rows that belong to none."""
    for total, array in (("total_q", "q"), ("total_k", "k"), ("total_new", "k_new")):
        rows = problem.sizes.get(total, 0)
        if rows != 0:
            raise InvalidArgument(
                f"{array}.shape[0] = {rows}, expected 0: there are no sequences "
                f"(cu_seqlens_{'k_new' if array == 'k_new' else array}.shape[0] = 1)"
            )
    fields = problem.fields
    problem.fields = fields | {"batch": 1}
    try:
        plan_of(problem)
    finally:
        problem.fields = fields


def why_text(problem: Problem) -> str:
    """What `strobe.why` says, in the caller's words."""
    try:
        plan_of(problem)
    except InvalidArgument as error:
        return str(error)
    except Error:
        pass  # the lines say more
    return renamed(_core.why(problem.fields), _names(problem))


_HEADS_FIRST: Final = ["batch", "heads", "seqlen"]


def _other_layout(problem: Problem) -> str:
    """A guess, where heads contradict each other and would not with heads before rows."""
    named = problem.tensors
    sizes = {name: named[name].shape[-3:-1] for name in "qkv"}

    def divides(swapped: str) -> bool:
        heads, heads_kv = (sizes[name][name not in swapped] for name in "qk")
        return bool(heads_kv > 0 and heads % heads_kv == 0)

    pages = problem.fields.get("cache") == 2

    def hint(names: str) -> str:
        axes = ["pages", "heads", "page_size"] if pages and "k" in names else _HEADS_FIRST
        axes = [*(["heads", "total"] if len(named[names[0]].shape) == 3 else axes), "head_dim"]
        first = len(axes) - 3
        return in_other_layout([(x, named[x]) for x in names], axes, (first, first + 1))

    for swapped in ("qkv", "kv", "q") if not divides("") else ():
        if divides(swapped):
            apart = swapped == "qkv" and (pages or len(named["q"].shape) != len(named["k"].shape))
            return "".join(map(hint, ("q", "kv") if apart else (swapped,)))
    return ""


def launch_error(status: int, text: str, specs: dict[str, Spec], tensors: dict[str, Any]) -> Error:
    """For a launch that the library refused. specs: of its arrays; tensors: those of PyTorch's."""
    error = error_for_status(status, text)
    if not isinstance(error, InvalidArgument):
        return error
    try:
        for name, tensor in tensors.items():
            _arrays.check_readable(name, tensor)
    except Error as unreadable:
        return unreadable
    text = renamed(text, _LAUNCH_NAMES)
    if found := re.match(r"mask: total_q is (\d+), not (\d+):", text):
        text = f"mask is for {found[1]} rows of q, and q has {found[2]}"
    elif found := re.match(r"mask: total_k is (\d+), not (\d+):", text):
        made, rows = found.groups()
        text = f"mask is for {made} rows of k, and k has {rows}: make it with total_k={rows}"
    found = re.match(r"cu_seqlens_([qk])\[\d+\] = (\d+), expected at most [qk].shape", text)
    if found and specs[found[1]].shape[1] == int(found[2]):
        named = [(found[1], specs[found[1]])]
        text += in_other_layout(named, ("heads", "total", "head_dim"), (0, 1))
    return InvalidArgument(text)


def longest(name: str, array: Any) -> int:
    """The longest sequence of an array of cumulative lengths (that `_arrays.read_once` has seen),
    where the caller does not say it.
    """
    spec = spec_of(name, array)
    take_offsets(Problem({}, True, spec), name, spec)
    if spec.shape[0] == 1:
        raise NoSequences
    if spec.device != "cpu" or isinstance(array, Spec) or spec.kind is _arrays.DESCRIBED:
        raise InvalidArgument(
            f"max_seqlen_{name[-1]} = None, expected an integer: "
            f"{name} ({spec.place}) cannot be read from here"
        )
    if spec.kind is _arrays.TORCH:
        _arrays.check_readable(name, array)
        array = array.detach().numpy()
    return int(np.diff(array).max())
