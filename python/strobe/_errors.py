"""Exceptions: one class for each status of the C library, all of them `strobe.Error`."""

from __future__ import annotations

__all__ = [
    "DeviceError",
    "Error",
    "InternalError",
    "InvalidArgument",
    "OutOfMemory",
    "Unsupported",
    "error_for_status",
]


class Error(Exception):
    """Base of every exception that Strobe raises itself."""

    __module__ = "strobe"


class InvalidArgument(Error, ValueError):
    """The request contradicts itself or breaks a documented rule; nothing was written.

    The text names the argument, what was got and what was wanted. A wrong dtype and an object that
    is no array are reported by this class too.
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
    return _BY_STATUS.get(status, InternalError)(text or f"strobe_status {status}")
