"""Arguments that are plain values: whatever a caller hands over becomes an int, a float or a bool,
or is refused by name. None of this runs where the argument has the right type already.
"""

from __future__ import annotations

import math
import operator
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ._errors import InvalidArgument, Unsupported, shown

# A caller's __index__, __float__ or __bool__ may raise anything.


def _is_bool(value: Any) -> bool:
    """Whether it is Python's or NumPy's, also in an array without axes."""
    numpys = isinstance(value, np.generic | np.ndarray)
    return isinstance(value, bool) or (numpys and value.shape == () and value.dtype == np.bool_)


def _index(value: Any) -> int:
    """`value` as an int; a bool in the place of a number is a mistake, say of the order."""
    if _is_bool(value):
        raise TypeError
    return operator.index(value)


def integer(name: str, value: Any, bits: int = 64) -> int:
    """`value` as an int that fits a C integer of so many bits."""
    try:
        number = _index(value)
    except Exception:
        raise InvalidArgument(f"{name} = {shown(value)}, expected an integer") from None
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise InvalidArgument(f"{name} = {shown(number)}, expected an integer of {bits} bits")
    return number


def flag(name: str, value: Any) -> bool:
    """`value` as a bool: one of Python's, NumPy's or a tensor's, or the integers 0 and 1. Whether
    anything else is true says nothing: the text "False" is.
    """
    try:
        if _is_bool(value):
            return bool(value)
        number = operator.index(value)
    except Exception:
        number = -1
    if number not in (0, 1):
        raise InvalidArgument(f"{name} = {shown(value)}, expected a bool")
    return number == 1


def is_flag(value: Any) -> bool:
    """Whether `flag` takes it as one, where arrays of more are something else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return bool(value.ndim == 0 and value.dtype == torch.bool)
    return isinstance(value, int | np.integer) or _is_bool(value)


def constant(name: str, value: Any) -> None:
    """Refuses a tensor of PyTorch's whose gradient would be expected, and never come: attention has
    one by q, k and v alone.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return
    try:
        expected = value.requires_grad and torch.is_grad_enabled()
    except Exception:  # a class of the user's own, of which the call says what is wrong
        return
    if expected:
        raise no_gradient_by(name)


def no_gradient_by(name: str) -> Unsupported:
    """The error for a tensor that has to be a constant."""
    return Unsupported(
        f"{name} requires a gradient, and attention has none by it: expected a tensor that "
        f"requires none, such as {name}.detach()"
    )


def real(name: str, value: Any) -> float:
    """`value` as a float. Plans are kept by value: an array of one element would be kept by its
    identity, whatever it holds the next time.
    """
    constant(name, value)
    try:
        wrong = _is_bool(value) or isinstance(value, str | bytes | bytearray)
        number = math.nan if wrong else float(value)
    except Exception:
        raise InvalidArgument(f"{name} = {shown(value)}, expected a number") from None
    if math.isnan(number):
        raise InvalidArgument(f"{name} = {shown(value)}, expected a number")
    return number


def pair(
    name: str, value: Any, convert: Callable[[str, Any], Any], unlimited: str = "-1"
) -> tuple[Any, Any]:
    """Both entries of a window. unlimited: what stands for no limit."""
    try:
        if isinstance(value, dict | set | frozenset):  # whose order says nothing
            raise TypeError
        left, right = value
    except Exception:
        raise InvalidArgument(
            f"{name} = {shown(value)}, expected a pair (left, right) of integers, {unlimited} for "
            "no limit"
        ) from None
    return convert(f"{name}[0]", left), convert(f"{name}[1]", right)


# A limit of a window that is none: STROBE_NO_LIMIT of include/strobe/strobe.h.
NO_LIMIT: Final = 2**63 - 1


def window(name: str, value: Any) -> tuple[Any, Any]:
    """Both limits of a window; None stays None, which is no limit."""
    return pair(name, value, lambda name, x: x if x is None else integer(name, x), "-1 or None")


def seed(name: str, value: Any) -> int:
    """`value` as an unsigned integer of 64 bits."""
    try:
        number = _index(value)
    except Exception:
        number = -1
    if not 0 <= number < 2**64:
        raise InvalidArgument(f"{name} = {shown(value)}, expected an integer from 0 to 2**64 - 1")
    return number


def checked_on_gpus() -> bool:
    """Whether the functions over a key-value cache look at lengths, indices and pages on GPUs, for
    which they wait for the device. The environment says it, which is read at each call.
    """
    return os.environ.get("STROBE_CHECK_VALUES", "0") not in ("", "0")


def on_main_thread() -> bool:
    """Whether handlers of signals run in this thread."""
    return threading.get_ident() == threading.main_thread().ident
