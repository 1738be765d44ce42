"""Checks of arrays' dtypes, shapes, places and strides. A message names the argument, what was got
and what was wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ._arrays import Spec
from ._errors import InvalidArgument, Unsupported

# strobe_dtype, but for the float8 ones, which no kernel takes
DTYPE_CODES: Final[dict[str, int]] = {"float32": 0, "bfloat16": 1, "float16": 2}

_HEADS_AND_ROWS: Final = ({"heads", "seqlen"}, {"heads", "total"})


def check_dtype(name: str, spec: Spec, like: str, wanted: str) -> None:
    if spec.dtype != wanted:
        raise InvalidArgument(f"{name}.dtype = {spec.dtype:.60}, expected {wanted} ({like})")


def check_float(name: str, spec: Spec) -> None:
    if "float8" in spec.dtype:
        raise Unsupported(
            f"{name}.dtype = {spec.dtype:.60}: no kernel takes float8, "
            "expected float32, bfloat16 or float16"
        )
    if spec.dtype not in DTYPE_CODES:
        raise InvalidArgument(
            f"{name}.dtype = {spec.dtype:.60}, expected float32, bfloat16 or float16"
        )


def check_shape(
    name: str, spec: Spec, wanted: Sequence[int], axes: Sequence[str], like: str
) -> None:
    """Refuses a shape other than `wanted`, whose axes are called `axes`."""
    check_ndim(name, spec, axes)
    for axis, (got, want) in enumerate(zip(spec.shape, wanted, strict=True)):
        if got != want:
            raise InvalidArgument(
                f"{name}.shape[{axis}] = {got}, expected {want} ({axes[axis]} of {like})"
                + _swapped(name, spec, wanted, axes)
            )


def _swapped(name: str, spec: Spec, wanted: Sequence[int], axes: Sequence[str]) -> str:
    """A guess, where heads and rows in the other order would have been right."""
    for axis in range(len(axes) - 1):
        if {axes[axis].partition("_")[0], axes[axis + 1].partition("_")[0]} in _HEADS_AND_ROWS:
            other = list(spec.shape)
            other[axis], other[axis + 1] = other[axis + 1], other[axis]
            if tuple(other) == tuple(wanted):
                there = list(axes)
                there[axis], there[axis + 1] = there[axis + 1], there[axis]
                return in_other_layout([(name, spec)], there, (axis, axis + 1))
    return ""


def in_other_layout(
    named: Sequence[tuple[str, Spec]], axes: Sequence[str], swapped: tuple[int, int]
) -> str:
    """What to pass if these arrays are laid out as `axes`."""
    names = [name for name, _ in named]
    listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    passed = ", ".join(spec.kind.swapped_hint.format(name, *swapped) for name, spec in named)
    return f"; if {listed} {'is' if len(names) == 1 else 'are'} ({', '.join(axes)}), pass {passed}"


def check_ndim(name: str, spec: Spec, axes: Sequence[str]) -> None:
    if len(spec.shape) != len(axes):
        raise InvalidArgument(
            f"{name}.ndim = {len(spec.shape)}, expected {len(axes)}: ({', '.join(axes)})"
        )


def check_place(name: str, spec: Spec, like_name: str, like: Spec) -> None:
    if spec.place != like.place:
        raise InvalidArgument(f"{name} is on {spec.place}, expected {like.place} as {like_name}")


def check_last_contiguous(name: str, spec: Spec) -> None:
    axis = len(spec.shape) - 1
    if spec.shape[axis] > 1 and spec.strides[axis] != 1 and 0 not in spec.shape:
        raise InvalidArgument(
            f"{spec.kind.stride_hint.format(name, axis)} = {spec.strides[axis]} elements, "
            f"expected 1 (last dimension contiguous): pass {spec.kind.contiguous_hint.format(name)}"
        )


def check_contiguous(name: str, spec: Spec) -> None:
    """Refuses what is not contiguous in C order; axes of one element may have any stride."""
    step = 1
    if 0 in spec.shape:
        return
    for axis in range(len(spec.shape) - 1, -1, -1):
        if spec.shape[axis] > 1 and spec.strides[axis] != step:
            raise InvalidArgument(
                f"{spec.kind.stride_hint.format(name, axis)} = {spec.strides[axis]} elements, "
                f"expected {step} (contiguous): pass {spec.kind.contiguous_hint.format(name)}"
            )
        step *= spec.shape[axis]
