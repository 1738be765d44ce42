"""Questions about a call, which compute no attention: how it would be done, which kernels take it,
and which weights dropout keeps.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from . import _arrays, _library
from ._arrays import KINDS, AnyArray, ArraySpec, imported
from ._errors import Error, InvalidArgument, OutOfMemory
from ._library import LIBRARY, check
from ._options import documented, split
from ._plans import (
    Options,
    Shapes,
    longest,
    make_problem,
    no_array,
    optional_spec,
    plan_of,
    spec_of,
    why_text,
)
from ._values import bad_seed, flag, integer, pair, real
from .functional import latest_answer

_NO_CALL: Final = (
    "no call seen: Strobe sees calls of scaled_dot_product_attention inside `with "
    "strobe.torch.sdpa_kernel():`, and in its place as PyTorch's flash kernel after "
    "strobe.torch.register(); none was made in this thread"
)


def _described(
    arrays: Sequence[Any],
    options: Options,
    backward: bool,
    dlse: bool,
) -> Shapes:
    """The problem of a call that will not be made; its results are taken to be contiguous."""
    names = ("q", "k", "v", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", *options.arrays)
    with imported(names, (*arrays, *options.arrays.values())) as taken:
        q, k, v, alibi_slopes, cu_seqlens_q, cu_seqlens_k = taken[:6]
        options.arrays = dict(zip(names[6:], taken[6:], strict=True))
        if q is None or k is None or v is None:
            raise no_array(names[:3], (q, k, v))
        if cu_seqlens_q is not None and options.max_seqlen_q is None:
            options.max_seqlen_q = longest("cu_seqlens_q", "max_seqlen_q", cu_seqlens_q)
        if cu_seqlens_k is not None and options.max_seqlen_k is None:
            options.max_seqlen_k = longest("cu_seqlens_k", "max_seqlen_k", cu_seqlens_k)
        options.threads = integer("threads", options.threads, 32)
        if options.threads == 0:
            options.threads = KINDS[type(q)].threads()
        backward = flag("backward", backward)
        shapes = make_problem(
            _library.BACKWARD if backward else _library.FORWARD,
            spec_of("q", q),
            spec_of("k", k),
            spec_of("v", v),
            optional_spec("cu_seqlens_q", cu_seqlens_q),
            optional_spec("cu_seqlens_k", cu_seqlens_k),
            optional_spec("alibi_slopes", alibi_slopes),
            options,
        )
        shapes.problem.has_dlse = flag("dlse", dlse) and backward
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
    left, right = pair("window", window)
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
        deterministic,
        batch_invariant,
        *split("plan", more),
    )
    arrays = (q, k, v, alibi_slopes, cu_seqlens_q, cu_seqlens_k)
    return _library.plan_text(plan_of(_described(arrays, options, backward, dlse)))


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
    if q is None and k is None and v is None:
        return str(getattr(latest_answer, "text", _NO_CALL))
    try:
        left, right = pair("window", window)
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
            deterministic,
            batch_invariant,
            *split("why", more),
        )
        arrays = (q, k, v, alibi_slopes, cu_seqlens_q, cu_seqlens_k)
        return why_text(_described(arrays, options, backward, dlse))
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
    try:
        struct.pack("QQ", dropout_seed, dropout_offset)
    except Exception:
        raise bad_seed(dropout_seed, dropout_offset) from None
    try:
        mask = np.empty(sizes, np.bool_)
    except (MemoryError, ValueError):
        listed = ", ".join(f"{name} = {size}" for name, size in zip(names, sizes, strict=True))
        raise OutOfMemory(f"a mask with {listed} cannot be allocated") from None
    check(
        LIBRARY.strobe_dropout_mask(
            *sizes,
            probability,
            operator.index(dropout_seed),
            operator.index(dropout_offset),
            _arrays.numpy_pointer(mask),
        )
    )
    return mask
