"""The C ABI through ctypes: the structs of `include/strobe/strobe.h`, finding and loading the
library.

Nothing here knows of arrays. `ctypes.CDLL` releases the GIL for the length of each call, so several
Python threads compute at the same time.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import sys
from pathlib import Path
from typing import Any, Final

from . import _options
from ._errors import Error, error_for_status

# The ABI that these structs describe; compared with strobe_version() when the library is loaded.
ABI_VERSION: Final = (0, 1)

FORWARD: Final = 0
BACKWARD: Final = 1
CPU: Final = 0
CUDA: Final = 1
ALIBI_NONE: Final = 0
ALIBI_PER_HEAD: Final = 1
ALIBI_PER_BATCH_HEAD: Final = 2

# strobe_dtype, but for the float8 ones, which no kernel takes
DTYPE_CODES: Final[dict[str, int]] = {"float32": 0, "bfloat16": 1, "float16": 2}


class Strides(ctypes.Structure):
    """strobe_strides: in elements."""

    _fields_ = [
        ("batch", ctypes.c_int64),
        ("seqlen", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("dim", ctypes.c_int64),
    ]


class Problem(ctypes.Structure):
    """strobe_problem: what the caller wants."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("direction", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("batch", ctypes.c_int64),
        ("seqlen_q", ctypes.c_int64),
        ("seqlen_k", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("heads_kv", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("head_dim_v", ctypes.c_int64),
        ("varlen", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("total_q", ctypes.c_int64),
        ("total_k", ctypes.c_int64),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("dropout_p", ctypes.c_float),
        ("alibi", ctypes.c_int32),
        ("deterministic", ctypes.c_int32),
        ("has_dlse", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("batch_invariant", ctypes.c_int32),
        ("q", Strides),
        ("k", Strides),
        ("v", Strides),
        ("out", Strides),
        ("dout", Strides),
        ("dq", Strides),
        ("dk", Strides),
        ("dv", Strides),
        *(row.field for row in _options.ROWS),
        ("kv_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("cache", ctypes.c_int32),
        ("append", ctypes.c_int32),
        ("cache_batch", ctypes.c_int64),
        ("pages", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("pages_per_sequence", ctypes.c_int64),
        ("block_table_stride", ctypes.c_int64),
        ("seqlen_new", ctypes.c_int64),
        ("total_new", ctypes.c_int64),
        ("k_new", Strides),
        ("v_new", Strides),
        ("rotary_dim", ctypes.c_int64),
        ("rotary_rows", ctypes.c_int64),
        ("rotary_interleaved", ctypes.c_int32),
        ("has_cache_batch_idx", ctypes.c_int32),
        ("has_leftpad", ctypes.c_int32),
        ("has_rotary_position", ctypes.c_int32),
    ]


class Plan(ctypes.Structure):
    """strobe_plan: how it will be done."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("problem", Problem),
        ("kernel", ctypes.c_char_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("kernel_index", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("tile_q", ctypes.c_int64),
        ("tile_k", ctypes.c_int64),
        ("block_q", ctypes.c_int64),
        ("block_k", ctypes.c_int64),
        ("work_items", ctypes.c_int64),
        ("grid", ctypes.c_int32 * 3),
        ("block_threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int64),
        ("reserved", ctypes.c_int64 * 6),
    ]


class ForwardArgs(ctypes.Structure):
    """strobe_forward_args: tensors of a forward launch."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("cu_seqlens_k", ctypes.c_void_p),
        ("alibi_slopes", ctypes.c_void_p),
        ("dropout_seed", ctypes.c_uint64),
        ("dropout_offset", ctypes.c_uint64),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("interrupt", ctypes.c_void_p),
        ("interrupt_data", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _options.ARRAYS),
        ("block_table", ctypes.c_void_p),
        ("cache_batch_idx", ctypes.c_void_p),
        ("leftpad", ctypes.c_void_p),
        ("k_new", ctypes.c_void_p),
        ("v_new", ctypes.c_void_p),
        ("cu_seqlens_k_new", ctypes.c_void_p),
        ("rotary_cos", ctypes.c_void_p),
        ("rotary_sin", ctypes.c_void_p),
        ("rotary_position", ctypes.c_void_p),
    ]


class BackwardArgs(ctypes.Structure):
    """strobe_backward_args: tensors of a backward launch."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("dout", ctypes.c_void_p),
        ("dlse", ctypes.c_void_p),
        ("dq", ctypes.c_void_p),
        ("dk", ctypes.c_void_p),
        ("dv", ctypes.c_void_p),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("cu_seqlens_k", ctypes.c_void_p),
        ("alibi_slopes", ctypes.c_void_p),
        ("dropout_seed", ctypes.c_uint64),
        ("dropout_offset", ctypes.c_uint64),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("interrupt", ctypes.c_void_p),
        ("interrupt_data", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _options.ARRAYS),
    ]


class Machine(ctypes.Structure):
    """strobe_machine: what the library found on this machine."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("cpu_name", ctypes.c_char * 64),
        ("cpu_isa", ctypes.c_char * 16),
        ("cpu_isas", ctypes.c_char * 64),
        ("cpu_threads", ctypes.c_int32),
        ("cuda_devices", ctypes.c_int32),
        ("cuda_reason", ctypes.c_char * 128),
        ("compiler", ctypes.c_char * 64),
    ]


class CudaDevice(ctypes.Structure):
    """strobe_cuda_device: one CUDA device."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char * 128),
        ("compute_capability", ctypes.c_int32),
        ("multiprocessors", ctypes.c_int32),
        ("memory_bytes", ctypes.c_int64),
    ]


def _packer(cls: type[ctypes.Structure]) -> struct.Struct:
    """A struct.Struct that lays out all fields of `cls` before `interrupt`.

    The library serves a struct that ends there as one without; `_interrupt` and `with_arrays` add
    the rest.
    A launch hands the C function a fresh bytes object packed by it: about 130 ns, against 30 ns for
    each field set on a ctypes struct, and no state that threads or signal handlers could share.
    """
    codes = {ctypes.c_size_t: "N", ctypes.c_void_p: "P", ctypes.c_uint64: "Q"}
    # c_size_t and c_uint64 are one class where they have one size; N and Q are then the same too.
    fields = itertools.takewhile(lambda field: field[0] != "interrupt", cls._fields_)
    packer = struct.Struct("@" + "".join(codes[field[1]] for field in fields))
    end = cls.interrupt.offset
    if packer.size != end:  # pragma: no cover - true by the C rules for these types
        raise ImportError(f"strobe: {cls.__name__} packs to {packer.size} bytes, expected {end}")
    return packer


_FORWARD: Final = _packer(ForwardArgs)
_BACKWARD: Final = _packer(BackwardArgs)
pack_forward: Final = _FORWARD.pack
pack_backward: Final = _BACKWARD.pack
FORWARD_ARGS_SIZE: Final = _FORWARD.size
BACKWARD_ARGS_SIZE: Final = _BACKWARD.size

_SIZE: Final = struct.Struct("@N")
_TAIL: Final = struct.Struct("@PP" + "P" * len(_options.ARRAYS))  # interrupt and its data first


def with_arrays(arguments: bytes, pointers: Any) -> bytes:
    """Packed arguments of a launch, with the addresses of the arrays of `_options.ARRAYS`."""
    size = _SIZE.pack(len(arguments) + _TAIL.size)
    return size + arguments[_SIZE.size :] + _TAIL.pack(0, 0, *pointers)


# A forward launch on CUDA that needs so little workspace does not allocate without one either.
OWN_WORKSPACE: Final = 256 << 10

_STATUS = ctypes.c_int
# name: (result, arguments). Structs travel as addresses (c_void_p takes an int at no cost),
# argument structs as bytes (c_char_p passes the address of the bytes object's own buffer).
_FUNCTIONS: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "strobe_problem_init": (_STATUS, (ctypes.c_void_p, ctypes.c_size_t)),
    "strobe_plan_make": (_STATUS, (ctypes.c_void_p, ctypes.c_void_p)),
    "strobe_plan_text": (ctypes.c_size_t, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)),
    "strobe_supports": (_STATUS, (ctypes.c_void_p,)),
    "strobe_why": (ctypes.c_size_t, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)),
    "strobe_forward": (_STATUS, (ctypes.c_void_p, ctypes.c_char_p)),
    "strobe_backward": (_STATUS, (ctypes.c_void_p, ctypes.c_char_p)),
    "strobe_dropout_mask": (
        _STATUS,
        (
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_float,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_void_p,
        ),
    ),
    "strobe_last_error": (ctypes.c_char_p, ()),
    "strobe_status_name": (ctypes.c_char_p, (ctypes.c_int,)),
    "strobe_version": (ctypes.c_char_p, ()),
    "strobe_kernel_name": (ctypes.c_char_p, (ctypes.c_int32,)),
    "strobe_kernel_unavailable": (ctypes.c_char_p, (ctypes.c_int32,)),
    "strobe_kernel_declines": (
        ctypes.c_size_t,
        (ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t),
    ),
    "strobe_machine_info": (_STATUS, (ctypes.c_void_p,)),
    "strobe_cuda_device_info": (_STATUS, (ctypes.c_int32, ctypes.c_void_p)),
}


def _candidates() -> list[Path]:
    """Where the library may be: STROBE_LIBRARY alone if it is set, else inside this package."""
    override = os.environ.get("STROBE_LIBRARY")
    if override:
        return [Path(override)]
    names = ["libstrobe.dylib", "libstrobe.so"] if sys.platform == "darwin" else ["libstrobe.so"]
    here = Path(__file__).resolve().parent
    return [folder / name for folder in (here, here / "lib") for name in names]


def _load() -> tuple[ctypes.CDLL, Path]:
    tried: list[str] = []
    for path in _candidates():
        if not path.is_file():
            tried.append(f"{path}: no such file")
            continue
        try:
            return ctypes.CDLL(os.fspath(path)), path
        except OSError as error:
            tried.append(f"{path}: {error}")
    if os.environ.get("STROBE_LIBRARY"):
        hint = "STROBE_LIBRARY is set, so nothing else was tried"
    else:
        hint = (
            "install the package with pip, or set STROBE_LIBRARY to a libstrobe.so that CMake built"
        )
    listed = "".join(f"\n  {line}" for line in tried)
    raise ImportError(f"strobe: the library was not found. Tried:{listed}\n{hint}.")


def _bind(library: ctypes.CDLL, path: Path) -> None:
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise ImportError(
                f"strobe: {path} has no function {name}: it is another library or another version"
            ) from None
        function.restype = result
        function.argtypes = arguments


def text(value: bytes | None) -> str:
    """A C string as str; "" for NULL."""
    return value.decode("utf-8", "replace") if value else ""


LIBRARY, LIBRARY_PATH = _load()
_bind(LIBRARY, LIBRARY_PATH)
VERSION: Final[str] = text(LIBRARY.strobe_version())

forward: Final = LIBRARY.strobe_forward
backward: Final = LIBRARY.strobe_backward


def last_error() -> str:
    """Text of the calling thread's latest failure."""
    return text(LIBRARY.strobe_last_error())


def error(status: int) -> Error:
    """The exception that belongs to a status other than STROBE_OK, of the latest failure."""
    return error_for_status(status, last_error())


def check(status: int) -> None:
    """Raises the exception of `strobe.Error`'s family that belongs to a status other than
    STROBE_OK.
    """
    if status:
        raise error(status)


def new_problem() -> Problem:
    """A problem with the library's defaults."""
    problem = Problem()
    check(LIBRARY.strobe_problem_init(ctypes.addressof(problem), ctypes.sizeof(Problem)))
    return problem


def make_plan(problem: Problem) -> Plan:
    """Validates `problem` and decides how to run it. Errors: those of `check`."""
    plan = Plan()
    plan.struct_size = ctypes.sizeof(Plan)
    check(LIBRARY.strobe_plan_make(ctypes.addressof(problem), ctypes.addressof(plan)))
    return plan


def _long_text(function: Any, address: int) -> str:
    """Text from a C function that returns its whole length and writes what fits."""
    capacity = 4096
    while True:
        buffer = ctypes.create_string_buffer(capacity)
        length = int(function(address, buffer, capacity))
        if length < capacity:
            return text(buffer.value)
        capacity = length + 1


def plan_text(plan: Plan) -> str:
    """A plan in words."""
    return _long_text(LIBRARY.strobe_plan_text, ctypes.addressof(plan))


def why_text(problem: Problem) -> str:
    """One line a kernel: takes the problem, or why it declines; or what is invalid."""
    return _long_text(LIBRARY.strobe_why, ctypes.addressof(problem))


def _check_abi() -> None:
    """Refuses a library whose version or struct sizes are not those above, before any use."""
    wanted = ".".join(map(str, ABI_VERSION))
    if VERSION.split(".")[:2] != wanted.split("."):
        raise ImportError(
            f"strobe: {LIBRARY_PATH} has version {VERSION or '(none)'}, expected {wanted}.x"
        )

    def fits(struct_name: str, size: int, status: int) -> None:
        if status:
            raise ImportError(
                f"strobe: {LIBRARY_PATH} refuses {struct_name} of {size} bytes "
                f"(version {VERSION}): {last_error()}"
            )

    problem = Problem()
    size = ctypes.sizeof(Problem)
    fits("strobe_problem", size, LIBRARY.strobe_problem_init(ctypes.addressof(problem), size))
    machine = Machine()
    machine.struct_size = ctypes.sizeof(Machine)
    fits(
        "strobe_machine",
        machine.struct_size,
        LIBRARY.strobe_machine_info(ctypes.addressof(machine)),
    )

    # A launch with no queries and no keys touches no memory, so it checks the other three structs.
    problem.batch = problem.heads = problem.threads = 1
    problem.head_dim = 16
    for direction, launch, pack, args_size, name in (
        (FORWARD, forward, pack_forward, FORWARD_ARGS_SIZE, "strobe_forward_args"),
        (BACKWARD, backward, pack_backward, BACKWARD_ARGS_SIZE, "strobe_backward_args"),
    ):
        problem.direction = direction
        plan = Plan()
        plan.struct_size = ctypes.sizeof(Plan)
        status = LIBRARY.strobe_plan_make(ctypes.addressof(problem), ctypes.addressof(plan))
        if (
            status == 2
        ):  # STROBE_UNSUPPORTED, as when STROBE_CPU_ISA forces what is not there: not about sizes
            continue
        fits("strobe_plan", plan.struct_size, status)
        fields = args_size // ctypes.sizeof(ctypes.c_void_p)
        fits(name, args_size, launch(ctypes.addressof(plan), pack(args_size, *[0] * (fields - 1))))


_check_abi()
