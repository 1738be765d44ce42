"""Exceptions: one class for each status of the C library, all of them `strobe.Error`; and what
their messages are made of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_LONGEST_MESSAGE: Final = 400  # bytes
_LONGEST_VALUE: Final = 100


def _shortened(text: str, size: int) -> str:
    """`text`, cut to so many bytes."""
    # Half of a surrogate pair, say of a file's name, is no UTF-8.
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= size:
        return text
    return data[: size - 3].decode("utf-8", "ignore") + "..."


def shown(value: Any) -> str:
    """repr(value), for a message: short, of arrays the shape alone, and it never fails.

    The values of a tensor may lie on a device, be many, or not be there.
    """
    try:
        return _shortened(_shown(value, 2), _LONGEST_VALUE)
    except Exception:  # somebody's own __repr__, or a str with a lone surrogate
        return f"<{_shortened(type(value).__name__, 60)}>"


def _shown(value: Any, depth: int) -> str:
    kind = type(value)
    if kind is int and value.bit_length() > 256:  # Python itself refuses to print the longest
        return f"<int of {value.bit_length()} bits>"
    if kind in (str, bytes):
        return repr(value[:_LONGEST_VALUE])
    if kind in (tuple, list):
        if depth == 0:
            return "..."
        listed = [_shown(x, depth - 1) for x in value[:6]] + ["..."] * (len(value) > 6)
        if kind is list:
            return f"[{', '.join(listed)}]"
        return f"({', '.join(listed)}{',' if len(value) == 1 else ''})"
    if kind in (dict, set, frozenset):
        return f"<{kind.__name__} of {len(value)}>"
    if hasattr(value, "shape") and hasattr(value, "__array__"):
        if value.shape == () and type(value).__module__ == "numpy" and kind.__name__ != "ndarray":
            return repr(value)  # NumPy's scalars
        return f"<{kind.__name__} of shape {tuple(value.shape)}>"
    return repr(value)


def first_line(error: BaseException) -> str:
    """Of somebody else's message."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:
        text = ""
    return text or type(error).__name__


class Error(Exception):
    """Base of every exception that Strobe raises itself. Its text has 400 bytes at most.

    Example:
        >>> import numpy as np, strobe
        >>> q = np.zeros((1, 8, 2, 300), np.float32)
        >>> try:
        ...     strobe.attention(q, q, q)
        ... except strobe.Error as error:
        ...     print(type(error).__name__)
        InvalidArgument
    """

    __module__ = "strobe"

    def __str__(self) -> str:
        return _shortened(super().__str__(), _LONGEST_MESSAGE)


class InvalidArgument(Error, ValueError, RuntimeError):
    """The request contradicts itself or breaks a documented rule; nothing was written.

    The text names the argument, what was got and what was wanted. A wrong dtype and an object that
    is no array are reported by this class too. It is a ValueError, as Python's own functions raise,
    and a RuntimeError, as PyTorch's operators and flash_attn do: code that catches either works.
    """

    __module__ = "strobe"


class Unsupported(Error, NotImplementedError):
    """The request is well-formed, but no kernel takes it: `strobe.why` lists each one's reason."""

    __module__ = "strobe"


class OutOfMemory(Error, MemoryError):
    """The library's own workspace could not be allocated."""

    __module__ = "strobe"


class DeviceError(Error, RuntimeError):
    """The device or its driver reported a failure."""

    __module__ = "strobe"


class InternalError(Error, RuntimeError):
    """A fault in Strobe: please report it."""

    __module__ = "strobe"


# strobe_status of include/strobe/strobe.h
_BY_STATUS: dict[int, type[Error]] = {
    1: InvalidArgument,
    2: Unsupported,
    3: OutOfMemory,
    4: DeviceError,
    5: InternalError,
}


def error_for_status(status: int, text: str) -> Error:
    """The exception for a C status other than 0, with the library's text."""
    text = text.replace(", or NaN for the default", ", or None for the default")
    return _BY_STATUS.get(status, InternalError)(text or f"strobe_status {status}")


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A message in the words of a caller further out, who calls things by other names.

    Each layer knows how the one beneath it calls things: `strobe.attention` the fields of the C
    structs, `flash_attn` the arguments of `strobe.attention`.
    """
    longest_first = sorted(names, key=len, reverse=True)
    pattern = r"(?<![\w.])(?:" + "|".join(map(re.escape, longest_first)) + r")(?!\w)"
    return re.sub(pattern, lambda found: names[found[0]], text)
