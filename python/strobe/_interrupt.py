"""Ctrl-C in a long call on the CPU.

Python runs the handlers of signals between its own instructions, on its main thread: none of them
while that waits for the library. So the library asks now and then (`interrupt` in strobe.h)
whether to stop, and what it asks runs some Python.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any, Final

_INTERRUPT: Final = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
_SIZE: Final = struct.Struct("@N").pack
_POINTERS: Final = struct.Struct("@PP")
_CPYTHON: Final = sys.implementation.name == "cpython"


def _run_handlers(raised: list[BaseException | None]) -> Generator[int, Any, None]:
    """Answers each question: whether the handler of a signal raised something.

    A generator, as a handler that is due runs when the interpreter is entered: here that is within
    the `try`, where a function would be outside of it, and ctypes prints what a callback raises
    and goes on.
    """
    try:
        while True:
            yield 0
    except GeneratorExit:
        return
    except BaseException as error:
        raised[0] = error  # no call and no jump from here on: another signal could raise in it
        yield 1


def run(launch: Callable[[int, bytes], int], address: int, arguments: bytes, end: int) -> int:
    """launch(address, arguments), stopped when the handler of a signal raises. end: of the fields
    before `interrupt`.

    Raises what that raised; the outputs are incomplete then. Elsewhere than on the main thread no
    handler ever runs, and the call goes to its end.
    """
    if not _CPYTHON or threading.get_ident() != threading.main_thread().ident:
        return launch(address, arguments)
    raised: list[BaseException | None] = [None]
    handlers = _run_handlers(raised)
    next(handlers)
    interrupt = _INTERRUPT(handlers.send)
    pointer = ctypes.cast(interrupt, ctypes.c_void_p).value
    # The struct with those two fields, which short calls leave out, and what may follow them.
    after = end + _POINTERS.size
    size = _SIZE(max(len(arguments), after))
    fields = arguments[len(size) : end] + _POINTERS.pack(pointer, 0) + arguments[after:]
    status = launch(address, size + fields)
    handlers.close()
    error, raised[0] = raised[0], None
    try:
        if error is not None:
            raise error
    finally:
        del error  # its traceback holds this frame, and that the tensors
    return status
