"""The structs of include/strobe/strobe.h as ctypes, read from the header: for tests and benchmarks
that call the C functions themselves. The package has its structs from the compiler.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "include/strobe/strobe.h").read_text()

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
    body = re.search(rf"typedef struct {name} \{{(.*?)\n\}} {name};", TEXT, re.DOTALL)
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
Problem = struct("strobe_problem")
Plan = struct("strobe_plan")
ForwardArgs = struct("strobe_forward_args")
BackwardArgs = struct("strobe_backward_args")
