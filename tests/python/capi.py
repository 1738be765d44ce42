"""The C ABI by ctypes, its structs read from include/strobe/strobe.h: for tests and benchmarks that
call the C functions themselves. The package has its structs from the compiler, and nothing of this.
"""

from __future__ import annotations

import ctypes
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HEADER = (ROOT / "include/strobe/strobe.h").read_text()

_TYPES: dict[str, Any] = {
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "char": ctypes.c_char,
}


def fields(name: str) -> list[tuple[str, Any]]:
    """Names and types of a struct's fields."""
    body = re.search(rf"typedef struct {name} \{{(.*?)\n\}} {name};", HEADER, re.DOTALL)
    assert body is not None
    code = re.sub(r"/\*.*?\*/", " ", body[1], flags=re.DOTALL)
    found: list[tuple[str, Any]] = []
    for declaration in filter(None, (part.strip() for part in code.split(";"))):
        if "(*" in declaration:
            found.append((declaration.split("(*")[1].split(")")[0], ctypes.c_void_p))
            continue
        declaration = re.sub(r"\bconst\b", "", declaration).strip()
        kind, names = declaration.split(None, 1)
        for each in names.split(","):
            parts = re.fullmatch(r"(\**)\s*(\w+)(?:\[(\d+)\])?", each.strip())
            assert parts is not None, declaration
            pointer, field, count = parts.groups()
            c_type: Any = _TYPES.get(kind)
            if pointer or kind.endswith("*"):
                c_type = ctypes.c_char_p if kind.startswith("char") else ctypes.c_void_p
            found.append((field, c_type * int(count) if count else c_type))
    return found


def struct(name: str) -> Any:
    """A struct, by its C name."""
    if name not in _TYPES:
        _TYPES[name] = type(name, (ctypes.Structure,), {"_fields_": fields(name)})
    return _TYPES[name]


# In an order in which each knows those that it holds.
Strides = struct("strobe_strides")
struct("strobe_mask")
Problem = struct("strobe_problem")
Plan = struct("strobe_plan")
ForwardArgs = struct("strobe_forward_args")
BackwardArgs = struct("strobe_backward_args")

CPU, CUDA = 0, 1
# A struct may end before these two fields, which most launches leave out.
FORWARD_ARGS_SIZE: int = ForwardArgs.interrupt.offset
BACKWARD_ARGS_SIZE: int = BackwardArgs.interrupt.offset


class Error(Exception):
    """A status other than STROBE_OK."""


class Unsupported(Error):
    """STROBE_UNSUPPORTED: no kernel takes the problem."""


def _pack(kind: Any, size: int, values: tuple[int, ...]) -> bytes:
    arguments = kind()
    arguments.struct_size = size
    for (name, _), value in zip(kind._fields_[1:], values, strict=False):
        setattr(arguments, name, value)
    return bytes(arguments)[:size]


def pack_forward(size: int, *values: int) -> bytes:
    """strobe_forward_args of so many bytes; values: its fields after struct_size."""
    return _pack(ForwardArgs, size, values)


def pack_backward(size: int, *values: int) -> bytes:
    """strobe_backward_args, likewise."""
    return _pack(BackwardArgs, size, values)


def text(value: bytes | None) -> str:
    """A C string as str; "" for NULL."""
    return value.decode("utf-8", "replace") if value else ""


def __getattr__(name: str) -> Any:
    """What needs the library, which is loaded then: STROBE_LIBRARY's, or the package's."""
    if name == "LIBRARY_PATH":
        return _load()[1]
    if name == "LIBRARY":
        return _load()[0]
    if name == "VERSION":
        return text(_load()[0].strobe_version())
    if name in ("forward", "backward"):
        return getattr(_load()[0], f"strobe_{name}")
    raise AttributeError(name)


@lru_cache(1)
def _load() -> tuple[ctypes.CDLL, Path]:
    path = os.environ.get("STROBE_LIBRARY")
    if not path:
        import strobe

        path = strobe.info().library
    library = ctypes.CDLL(path)
    for name in ("last_error", "version", "kernel_name", "kernel_unavailable"):
        getattr(library, f"strobe_{name}").restype = ctypes.c_char_p
    for name in ("forward", "backward"):
        # ctypes converts neither an address nor a bytes object, whose own buffer it passes.
        getattr(library, f"strobe_{name}").argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    library.strobe_problem_init.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.strobe_plan_make.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.strobe_kernel_declines.restype = ctypes.c_size_t
    library.strobe_kernel_declines.argtypes = (
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
    )
    library.strobe_dropout_mask.argtypes = (
        *(ctypes.c_int64,) * 4,
        ctypes.c_float,
        *(ctypes.c_uint64,) * 2,
        ctypes.c_void_p,
    )
    return library, Path(path)


def check(status: int) -> None:
    """Raises Error, with the library's text, for a status other than STROBE_OK."""
    if status:
        kind = Unsupported if status == 2 else Error
        raise kind(text(_load()[0].strobe_last_error()))


def new_problem() -> Any:
    """A problem with the library's defaults."""
    problem = Problem()
    address, size = ctypes.addressof(problem), ctypes.sizeof(problem)
    check(_load()[0].strobe_problem_init(address, size))
    return problem


def make_plan(problem: Any) -> Any:
    """The plan of a problem."""
    plan = Plan()
    plan.struct_size = ctypes.sizeof(plan)
    check(_load()[0].strobe_plan_make(ctypes.addressof(problem), ctypes.addressof(plan)))
    return plan
