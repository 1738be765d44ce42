"""DLPack by ctypes: a tensor of any framework as an address, a shape and strides, with no copy.

NumPy cannot hold bfloat16 that comes through DLPack, so the capsule is read here directly. Struct
layouts: dlpack.h 0.8 (`dltensor`) and 1.x (`dltensor_versioned`),
https://dmlc.github.io/dlpack/latest/.

Ownership, as the Python specification asks: the capsule is renamed to `used_...` the moment its
tensor is taken over, and from then on `ImportedTensor.close` calls the deleter, once.
"""

from __future__ import annotations

import ctypes
import operator
from typing import Any, Final

from ._errors import InvalidArgument, Unsupported, shown
from ._tensors import first_line

_MAX_VERSION: Final = (1, 0)  # the newest DLPack that this file reads; minor versions only add

_MAX_NDIM: Final = 64  # as NumPy; an ndim of more is no tensor, and its shape is not read

CPU: Final = 1  # kDLCPU
CUDA: Final = 2  # kDLCUDA
CUDA_HOST: Final = 3  # kDLCUDAHost: pinned memory, which the CPU reads as its own
_DEVICE_NAMES: Final = {CPU: "cpu", CUDA: "cuda", CUDA_HOST: "cpu"}

# (DLDataTypeCode, bits) -> name
_DTYPE_NAMES: Final = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    # DLPack 1.1; no kernel takes any of them.
    (8, 8): "float8_e4m3",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (5, 64): "complex64",
    (5, 128): "complex128",
    (6, 8): "bool",
}

_FLAG_READ_ONLY: Final = 1
_FLAG_IS_COPIED: Final = 2


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.c_void_p),  # int64[ndim]
        ("strides", ctypes.c_void_p),  # int64[ndim] in elements; NULL: contiguous
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [
        ("dl_tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    ]


# Prototypes of our own: the attributes of ctypes.pythonapi are shared with every other user of it.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)
# The GIL is kept while a deleter runs: those written in C take it themselves, which may nest, and
# those that forget to are then right too.
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)

# A capsule keeps the address of its name, not a copy: these buffers live as long as the process.
_USED_NAMES: Final = {
    b"dltensor": ctypes.create_string_buffer(b"used_dltensor"),
    b"dltensor_versioned": ctypes.create_string_buffer(b"used_dltensor_versioned"),
}


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements, in C order."""
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


class ImportedTensor:
    """A tensor taken over from a DLPack capsule; `close` gives it back.

    Attributes: `pointer` (address of element [0, ..., 0]), `shape`, `strides` (in elements),
        `dtype` (name
    as in NumPy, and "bfloat16"), `device` ("cpu" or "cuda"), `device_index`, `read_only`.
    """

    __slots__ = (
        "_address",
        "_deleter",
        "device",
        "device_index",
        "dtype",
        "pointer",
        "read_only",
        "shape",
        "strides",
    )

    def __init__(self, name: str, source: Any) -> None:
        """Imports `source`, which the messages call `name`.

        Raises:
            InvalidArgument: it cannot be shared without a copy.
            Unsupported: its device or its version of DLPack is unknown here.
        """
        self._deleter: int | None = None
        self._address = 0
        _check_device(name, _device_type(name, source))
        capsule = _export(name, source)
        try:
            if _is_valid(capsule, b"dltensor_versioned"):
                self._take_versioned(name, capsule)
            elif _is_valid(capsule, b"dltensor"):
                self._take(name, capsule)
            else:
                raise InvalidArgument(
                    f"{name}.__dlpack__() gave {shown(capsule)}, "
                    "expected a capsule named dltensor or dltensor_versioned"
                )
        except Exception:
            self.close()  # at once: the traceback may hold this object for long
            raise

    def _take(self, name: str, capsule: Any) -> None:
        self._address = int(_get_pointer(capsule, b"dltensor") or 0)
        managed = _DLManagedTensor.from_address(self._address)
        _set_name(capsule, ctypes.addressof(_USED_NAMES[b"dltensor"]))
        self._deleter = managed.deleter
        self.read_only = (
            False  # this version of DLPack cannot say so; exporters refuse read-only memory
        )
        self._read(name, managed.dl_tensor)

    def _take_versioned(self, name: str, capsule: Any) -> None:
        self._address = int(_get_pointer(capsule, b"dltensor_versioned") or 0)
        managed = _DLManagedTensorVersioned.from_address(self._address)
        _set_name(capsule, ctypes.addressof(_USED_NAMES[b"dltensor_versioned"]))
        self._deleter = managed.deleter
        if managed.major != _MAX_VERSION[0]:
            got = f"{managed.major}.{managed.minor}"
            # To give it back is all that may be done with a tensor of another major version.
            raise Unsupported(f"{name} comes as DLPack {got}, expected {_MAX_VERSION[0]}.x")
        if managed.flags & _FLAG_IS_COPIED:
            raise InvalidArgument(
                f"{name}.__dlpack__() made a copy, expected memory shared with {name}: "
                "make the copy yourself"
            )
        self.read_only = bool(managed.flags & _FLAG_READ_ONLY)
        self._read(name, managed.dl_tensor)

    def _read(self, name: str, tensor: _DLTensor) -> None:
        ndim = tensor.ndim
        if not 0 <= ndim <= _MAX_NDIM:
            raise InvalidArgument(f"{name}.ndim = {ndim}, expected 0 to {_MAX_NDIM}")
        self.shape: tuple[int, ...] = ()
        self.strides: tuple[int, ...] = ()
        if ndim > 0:
            if not tensor.shape:
                raise InvalidArgument(f"{name} comes through DLPack without a shape")
            self.shape = tuple((ctypes.c_int64 * ndim).from_address(tensor.shape))
            if min(self.shape) < 0:
                raise InvalidArgument(f"{name}.shape = {self.shape}, expected no negative sizes")
            if tensor.strides:
                self.strides = tuple((ctypes.c_int64 * ndim).from_address(tensor.strides))
            else:
                self.strides = contiguous_strides(self.shape)
                if max(self.strides) >= 2**63:
                    raise InvalidArgument(
                        f"{name}.shape = {self.shape}: as many elements as no memory has"
                    )
        self.pointer: int = (tensor.data or 0) + tensor.byte_offset
        if self.pointer >= 2**64:
            raise InvalidArgument(
                f"{name} comes through DLPack with byte_offset = {tensor.byte_offset}, which "
                "passes the end of memory"
            )
        dtype = tensor.dtype
        self.dtype = _DTYPE_NAMES.get(
            (dtype.code, dtype.bits), f"DLPack({dtype.code}, {dtype.bits} bits)"
        )
        if dtype.lanes != 1:
            self.dtype += f"x{dtype.lanes}"
        device_type = tensor.device.device_type
        _check_device(name, device_type)
        self.device = _DEVICE_NAMES[device_type]
        self.device_index = int(tensor.device.device_id) if device_type == CUDA else 0

    def close(self) -> None:
        """Gives the tensor back to its producer. Further calls do nothing."""
        deleter, self._deleter = self._deleter, None
        if deleter:
            _Deleter(deleter)(self._address)

    def __del__(self) -> None:
        self.close()


def _device_type(name: str, source: Any) -> int:
    try:
        device_type, _ = source.__dlpack_device__()
        return operator.index(device_type)
    except Exception as error:
        raise InvalidArgument(
            f"{name}.__dlpack_device__() does not give (device type, index): {first_line(error)}"
        ) from None


def _check_device(name: str, device_type: int) -> None:
    if device_type not in _DEVICE_NAMES:
        raise Unsupported(
            f"{name} is on DLPack device type {shown(device_type)}, expected 1 (CPU) or 2 (CUDA)"
        )


def _export(name: str, source: Any) -> Any:
    """The capsule of `source`: versioned and without a copy where the producer can say so."""
    try:
        try:
            return source.__dlpack__(max_version=_MAX_VERSION, copy=False)
        except TypeError:  # a producer older than DLPack 1.0 takes neither argument
            return source.__dlpack__()
    except Exception as error:
        raise InvalidArgument(
            f"{name} ({type(source).__name__:.60}) cannot be shared through DLPack: "
            f"{first_line(error)}"
        ) from error
