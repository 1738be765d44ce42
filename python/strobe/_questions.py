"""Questions about a call, which compute no attention: how it would be done, which kernels take it,
and which weights dropout keeps.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from . import _calls, _core
from ._arrays import TORCH, AnyArray, ArraySpec, read_once, spec_of
from ._errors import Error, InvalidArgument, OutOfMemory
from ._merge import is_float
from ._options import ROWS, DescribedOptions, documented_for_description, row_of
from ._packed_mask import Mask, check_made_for, check_made_for_packed
from ._plans import NoSequences, check_without_sequences, longest, plan_of, why_text
from ._problem import Problem, make_problem
from ._values import flag, integer, real, seed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._merge import DType

Array: TypeAlias = AnyArray | ArraySpec


def _described(
    function: str,
    tensors: tuple[Any, Any, Any],
    flags: dict[str, Any],
    options: DescribedOptions,
) -> Problem:
    """The problem of a call that will not be made; its results are taken to be contiguous.

    flags: the arguments of `plan` and `why` that `attention` has not.
    """
    arrays = dict(zip("qkv", tensors, strict=True))
    for name, array in arrays.items():
        if array is None:
            raise InvalidArgument(f"{name} = None, expected an array")
    given: dict[str, Any] = {row.name: row.default for row in ROWS if row.convert is not None}
    if isinstance(mask := options.get("mask"), Mask):
        words, layout, *_ = mask._strobe_mask
        options = {**options, "mask": words, "mask_layout": layout}
    for name, value in options.items():
        row = row_of(function, name)
        if row.convert is None:
            arrays |= {} if value is None else {name: value}
        elif value is not None or row.default is not None:
            given[name] = row.convert(name, value)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in arrays and given[f"max_seqlen_{name[-1]}"] is None:
            arrays[name] = read_once(name, arrays[name])
            with suppress(NoSequences):  # the library says that there is no plan for a batch of 0
                given[f"max_seqlen_{name[-1]}"] = 0
                given[f"max_seqlen_{name[-1]}"] = longest(name, arrays[name])
    specs = {name: spec_of(name, array) for name, array in arrays.items()}
    q, k = (specs[name].shape for name in "qk")
    # Where axes are missing, the planner says so.
    if isinstance(mask, Mask) and "cu_seqlens_q" not in specs and len(q) == len(k) == 4:
        check_made_for(mask._of_calls, (q[0], q[2], q[1], k[1]))
    elif isinstance(mask, Mask) and "cu_seqlens_q" in specs and "cu_seqlens_k" in specs:
        check_made_for_packed(mask._of_calls, -1)
    if not given["threads"] and specs["q"].kind is TORCH:
        given["threads"] = sys.modules["torch"].get_num_threads()
    del given["dropout_seed"], given["dropout_offset"]
    float_grads = is_float("grad_dtype", flags.pop("grad_dtype", None))
    found = {name: flag(name, value) for name, value in flags.items()}
    backward, dlse = found.pop("backward"), found.pop("dlse")
    delta, accumulate = found.pop("delta", False), found.pop("accumulate", False)
    dbias = found.pop("dbias", False)
    of_backward = {"float_grads": float_grads and specs["q"].dtype != "float32" and backward}
    of_backward |= {"accumulate": accumulate and backward, "wants_dbias": dbias and backward}
    of_backward["return_dsinks"] = found.pop("return_dsinks", False) and backward
    problem = make_problem(backward, specs, given | found | of_backward)
    problem.fields["has_dlse"] = int(dlse and backward)
    problem.fields["has_delta"] = int(delta and backward)
    return problem


@documented_for_description
def plan(
    q: Array,
    k: Array,
    v: Array,
    *,
    backward: bool = False,
    deterministic: bool = False,
    dlse: bool = False,
    delta: bool = False,
    grad_dtype: DType = None,
    accumulate: bool = False,
    return_dsinks: bool = False,
    dbias: bool = False,
    **options: Unpack[DescribedOptions],
) -> str:
    """How `attention` (with backward=True: `attention_backward`) would do this, in words.

    Kernel, tile, threads or grid, workspace bytes, and why the kernels before it declined. Computes
    nothing and reads no tensor.

    Args: as `attention_backward`, except that dlse, delta and dbias say whether there will be one.
        Instead of arrays, `ArraySpec(shape, dtype, device)` will do, also for devices that this
        machine lacks.

    Raises:
        InvalidArgument, Unsupported: as the call itself would.

    Example:
        >>> import strobe
        >>> x = strobe.ArraySpec((2, 4096, 16, 128), "float32", "cpu")
        >>> print(strobe.plan(x, x, x, causal=True).splitlines()[0])  # doctest: +ELLIPSIS
        problem    forward fp32, batch 2, heads 16, seqlen 4096, head_dim 128, ..., causal
    """
    flags: dict[str, Any] = {"backward": backward, "deterministic": deterministic, "dlse": dlse}
    flags |= {"delta": delta, "grad_dtype": grad_dtype, "accumulate": accumulate}
    flags |= {"return_dsinks": return_dsinks, "dbias": dbias}
    return _core.plan_text(plan_of(_described("plan", (q, k, v), flags, options)))


def check(q: ArraySpec, k: ArraySpec, v: ArraySpec, **options: Unpack[DescribedOptions]) -> None:
    """Raises what `attention` would raise of these, which may be a batch of no sequences."""
    problem = _described("attention", (q, k, v), {"backward": False, "dlse": False}, options)
    if problem.fields["batch"] == 0:
        check_without_sequences(problem)
    else:
        plan_of(problem)


@documented_for_description
def why(
    q: Array | None = None,
    k: Array | None = None,
    v: Array | None = None,
    *,
    backward: bool = False,
    deterministic: bool = False,
    dlse: bool = False,
    delta: bool = False,
    grad_dtype: DType = None,
    accumulate: bool = False,
    return_dsinks: bool = False,
    dbias: bool = False,
    **options: Unpack[DescribedOptions],
) -> str:
    """Which kernels take this call: a line each, with the reasons of those that decline.

    A bad request raises nothing: the answer is the text of what is wrong with it.

    Without q, k and v: what became of this thread's latest call, by whichever function it came:
    this module's, flash_attn's, scaled_dot_product_attention, a model of transformers, JAX, or a
    backward pass. The answer begins with "served" (by which kernel; the lines that follow are the
    problem, why the kernels before declined, and what this one says of the call, if anything),
    "declined" (for which reason PyTorch computed it) or "no call seen". A call that raises leaves
    it as it was. So do calls of scaled_dot_product_attention that Strobe does not see: outside the
    blocks of `strobe.torch`, and those that PyTorch keeps from its flash kernel after
    `strobe.torch.register()`. Calls in threads that Python did not start (in which PyTorch runs the
    backward pass on a GPU, and JAX all) are every thread's.

    Args: as `plan`.

    Example:
        >>> import strobe
        >>> x = strobe.ArraySpec((2, 4096, 16, 300), "float32", "cpu")
        >>> "head_dim" in strobe.why(x, x, x)
        True
    """
    if q is None and k is None and v is None:
        return _calls.latest()
    flags: dict[str, Any] = {"backward": backward, "deterministic": deterministic, "dlse": dlse}
    flags |= {"delta": delta, "grad_dtype": grad_dtype, "accumulate": accumulate}
    flags |= {"return_dsinks": return_dsinks, "dbias": dbias}
    try:
        return why_text(_described("why", (q, k, v), flags, options))
    except Error as error:
        return str(error)


def dropout_mask(
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    dropout_p: float,
    dropout_seed: int = 0,
    dropout_offset: int = 0,
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which weights dropout keeps in `attention` and `attention_backward`: to test and to display.

    Args:
        batch, heads, seqlen_q, seqlen_k: of the weights; with cu_seqlens, the longest lengths.
        dropout_p, dropout_seed, dropout_offset: as in `attention`.

    Returns:
        bool, (batch, heads, seqlen_q, seqlen_k): True where the weight is kept (and scaled by
        1 / (1 - dropout_p)), False where it is dropped. Memory grows with seqlen_q * seqlen_k.

    Raises:
        InvalidArgument: a negative size, dropout_p outside [0, 1), a seed outside 0 to 2**64 - 1.

    Example:
        >>> import strobe
        >>> keep = strobe.dropout_mask(2, 8, 300, 300, dropout_p=0.1, dropout_seed=5)
        >>> keep.shape, keep.dtype.name
        ((2, 8, 300, 300), 'bool')
    """
    given = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    sizes = {name: integer(name, value) for name, value in given.items()}
    for name, size in sizes.items():
        if size < 0:
            raise InvalidArgument(f"{name} = {size}, expected at least 0")
    probability = real("dropout_p", dropout_p)
    numbers = seed("dropout_seed", dropout_seed), seed("dropout_offset", dropout_offset)
    try:
        mask = np.empty(tuple(sizes.values()), np.bool_)
    except (MemoryError, ValueError):
        listed = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        raise OutOfMemory(f"a mask with {listed} cannot be allocated") from None
    extents = tuple(sizes.values()) if mask.size else (1, 1, 0, 0)  # it knows no batch of 0
    _core.dropout_mask(*extents, probability, *numbers, mask.ctypes.data)
    return mask
