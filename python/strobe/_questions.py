"""Questions about a call, which compute no attention: how it would be done, which kernels take it,
and which weights dropout keeps.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

import numpy as np

from . import _core
from ._arrays import TORCH, AnyArray, ArraySpec, spec_of
from ._errors import Error, InvalidArgument, OutOfMemory
from ._options import documented, split
from ._plans import longest, plan_of, why_text
from ._problem import Shapes, make_problem
from ._values import flag, integer, pair, real, seed

# .text: what became of this thread's latest call of PyTorch's attention, for `why`. Set by
# `strobe.torch`.
latest_answer: Final = threading.local()

_NO_CALL: Final = (
    "no call seen: Strobe sees calls of scaled_dot_product_attention inside `with "
    "strobe.torch.sdpa_kernel():`, and in its place as PyTorch's flash kernel after "
    "strobe.torch.register(); none was made in this thread"
)


def _described(function: str, given: dict[str, Any]) -> Shapes:
    """The problem of a call that will not be made; its results are taken to be contiguous.

    given: the arguments of `plan` and `why`, by name.
    """
    left, right = pair("window", given["window"])
    scalars, more = split(function, given["more"])
    names = ("q", "k", "v", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k")
    for name in "qkv":
        if given[name] is None:
            raise InvalidArgument(f"{name} = None, expected an array")
    objects = {name: given[name] for name in names if given[name] is not None} | more
    arrays = {name: spec_of(name, array) for name, array in objects.items()}
    options = given | {"window_left": left, "window_right": right, "scalars": scalars}
    for name in "qk":
        offsets = objects.get(f"cu_seqlens_{name}")
        if offsets is not None and options[f"max_seqlen_{name}"] is None:
            options[f"max_seqlen_{name}"] = longest(
                f"cu_seqlens_{name}", f"max_seqlen_{name}", offsets
            )
    backward = flag("backward", given["backward"])
    shapes = make_problem(backward, arrays, options)
    if not shapes.problem["threads"] and shapes.q.kind is TORCH:
        shapes.problem["threads"] = sys.modules["torch"].get_num_threads()
    shapes.problem["has_dlse"] = int(flag("dlse", given["dlse"]) and backward)
    return shapes


@documented
def plan(
    q: AnyArray | ArraySpec,
    k: AnyArray | ArraySpec,
    v: AnyArray | ArraySpec,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: AnyArray | ArraySpec | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: AnyArray | ArraySpec | None = None,
    cu_seqlens_k: AnyArray | ArraySpec | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    threads: int = 0,
    deterministic: bool = False,
    batch_invariant: bool = False,
    dlse: bool = False,
    backward: bool = False,
    **more: Any,  # _options.ROWS
) -> str:
    """How `attention` (with backward=True: `attention_backward`) would do this, in words.

    Kernel, tile, threads or grid, workspace bytes, and why the kernels before it declined. Computes
    nothing and reads no tensor.

    Args: as `attention_backward`, except that dlse says whether there will be one. Instead of
        arrays, `ArraySpec(shape, dtype, device)` will do, also for devices that this machine lacks.

    Raises:
        InvalidArgument, Unsupported: as the call itself would.
    """
    return _core.plan_text(plan_of(_described("plan", locals())))


@documented
def why(
    q: AnyArray | ArraySpec | None = None,
    k: AnyArray | ArraySpec | None = None,
    v: AnyArray | ArraySpec | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: AnyArray | ArraySpec | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: AnyArray | ArraySpec | None = None,
    cu_seqlens_k: AnyArray | ArraySpec | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    threads: int = 0,
    deterministic: bool = False,
    batch_invariant: bool = False,
    dlse: bool = False,
    backward: bool = False,
    **more: Any,  # _options.ROWS
) -> str:
    """Which kernels take this call: a line each, with the reasons of those that decline.

    A bad request raises nothing: the answer is the text of what is wrong with it.

    Without q, k and v: what became of this thread's latest scaled_dot_product_attention that
    `strobe.torch` saw. The answer begins with "served" (by which kernel), "declined" (for which
    reason PyTorch computed it) or "no call seen".

    Args: as `plan`.
    """
    given = locals()
    if q is None and k is None and v is None:
        return str(getattr(latest_answer, "text", _NO_CALL))
    try:
        return why_text(_described("why", given))
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
    """
    names = ("batch", "heads", "seqlen_q", "seqlen_k")
    sizes = [
        integer(name, value)
        for name, value in zip(names, (batch, heads, seqlen_q, seqlen_k), strict=True)
    ]
    for name, size in zip(names, sizes, strict=True):
        if size < 0:
            raise InvalidArgument(f"{name} = {size}, expected at least 0")
    probability = real("dropout_p", dropout_p)
    numbers = seed("dropout_seed", dropout_seed), seed("dropout_offset", dropout_offset)
    try:
        mask = np.empty(sizes, np.bool_)
    except (MemoryError, ValueError):
        listed = ", ".join(f"{name} = {size}" for name, size in zip(names, sizes, strict=True))
        raise OutOfMemory(f"a mask with {listed} cannot be allocated") from None
    arguments: Any = (*sizes, probability, *numbers, mask.ctypes.data)
    _core.dropout_mask(*arguments)
    return mask
