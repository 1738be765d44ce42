"""Arguments that are plain values: whatever a caller hands over becomes an int, a float or a bool,
or is refused by name. None of this runs where the argument has the right type already.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable
from typing import Any, Final

from ._errors import InvalidArgument, shown

# A caller's __index__, __float__ or __bool__ may raise anything.


def integer(name: str, value: Any, bits: int = 64) -> int:
    """`value` as an int that fits a C integer of so many bits."""
    try:
        number = operator.index(value)
    except Exception:
        raise InvalidArgument(f"{name} = {shown(value)}, expected an integer") from None
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise InvalidArgument(f"{name} = {shown(number)}, expected an integer of {bits} bits")
    return number


def flag(name: str, value: Any) -> bool:
    """`value` as a bool; an array or a tensor of several values is none."""
    try:
        return bool(value)
    except Exception:
        raise InvalidArgument(f"{name} = {shown(value)}, expected a bool") from None


def real(name: str, value: Any) -> float:
    """`value` as a float. Plans are kept by value: an array of one element would be kept by its
    identity, whatever it holds the next time.
    """
    try:
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except Exception:
        raise InvalidArgument(f"{name} = {shown(value)}, expected a number") from None
    if math.isnan(number):
        raise InvalidArgument(f"{name} = {shown(value)}, expected a number")
    return number


def pair(name: str, value: Any, convert: Callable[[str, Any], Any] = integer) -> tuple[Any, Any]:
    """Both entries of a window."""
    try:
        left, right = value
    except Exception:
        raise InvalidArgument(
            f"{name} = {shown(value)}, expected a pair (left, right) of integers, -1 for no limit"
        ) from None
    return convert(f"{name}[0]", left), convert(f"{name}[1]", right)


# A limit of a window that is none: STROBE_NO_LIMIT of include/strobe/strobe.h.
NO_LIMIT: Final = 2**63 - 1


def window(name: str, value: Any) -> tuple[Any, Any]:
    """Both limits of a window; None stays None, which is no limit."""
    return pair(name, value, lambda name, x: x if x is None else integer(name, x))


def seed(name: str, value: Any) -> int:
    """`value` as an unsigned integer of 64 bits."""
    try:
        number = operator.index(value)
    except Exception:
        number = -1
    if not 0 <= number < 2**64:
        raise InvalidArgument(f"{name} = {shown(value)}, expected an integer from 0 to 2**64 - 1")
    return number


def on_main_thread() -> bool:
    """Whether handlers of signals run in this thread."""
    return threading.get_ident() == threading.main_thread().ident
