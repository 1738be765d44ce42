"""A DLPack producer written from dlpack.h, which counts what consumers do with its tensors.

It stands for JAX, CuPy and others, old and new, well and badly behaved. The structs are its own, so
that it does not share a mistake with the extension.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

py_capsule_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
deleter_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)
_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_GetName", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", deleter_type)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", deleter_type),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


CODES = {
    "float32": (2, 32),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "int32": (0, 32),
    "float64": (2, 64),
}

# Everything that a tensor in flight needs, by the address of its managed struct.
ALIVE: dict[int, Any] = {}


def _on_destroy(capsule: int) -> None:
    """What the specification asks of a capsule's destructor: delete the tensor if nobody took it
    over.
    """
    name = _name(capsule)
    if name in (b"dltensor", b"dltensor_versioned"):
        address = _pointer(capsule, name)
        _, _, producer = ALIVE[address]
        producer.destroyed += 1
        producer.delete(address)


_destroy = py_capsule_destructor(_on_destroy)


class Producer:
    """`array` through DLPack.

    version: None for the old protocol, whose __dlpack__ takes no arguments but stream.
    exported: capsules made. deleted: calls of the deleter. destroyed: capsules that nobody took
        over.
    """

    def __init__(
        self,
        array: np.ndarray[Any, Any],
        version: tuple[int, int] | None = (1, 0),
        *,
        device: tuple[int, int] = (1, 0),
        flags: int = 0,
        offset: int = 0,
        null_strides: bool = False,
        lanes: int = 1,
        null_deleter: bool = False,
    ) -> None:
        self.array = array
        self.version = version
        self.device = device
        self.flags = flags
        self.offset = offset
        self.null_strides = null_strides
        self.lanes = lanes
        self.null_deleter = null_deleter
        self.exported = self.deleted = self.destroyed = 0
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **asked: Any) -> Any:
        if self.version is None and set(asked) - {"stream"}:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        self.asked.append(asked)
        return self.capsule()

    def delete(self, address: int) -> None:
        self.deleted += 1
        del ALIVE[address]  # fails, and is printed by ctypes, when a tensor is deleted twice

    def capsule(self) -> Any:
        array = self.array
        ndim = array.ndim
        shape = (ctypes.c_int64 * ndim)(*array.shape)
        strides = (ctypes.c_int64 * ndim)(*(s // array.itemsize for s in array.strides))
        managed = Managed() if self.version is None else ManagedVersioned()
        tensor = managed.tensor
        tensor.data = array.ctypes.data - self.offset
        tensor.byte_offset = self.offset
        tensor.device_type, tensor.device_id = self.device
        tensor.ndim = ndim
        tensor.code, tensor.bits = CODES[array.dtype.name]
        tensor.lanes = self.lanes
        tensor.shape = shape
        if not self.null_strides:
            tensor.strides = strides
        deleter = deleter_type(self.delete)
        if not self.null_deleter:
            managed.deleter = deleter
        name = b"dltensor"
        if self.version is not None:
            managed.major, managed.minor = self.version
            managed.flags = self.flags
            name = b"dltensor_versioned"
        address = ctypes.addressof(managed)
        # The name must outlive the capsule.
        keep = (managed, shape, strides, deleter, ctypes.c_char_p(name), name)
        ALIVE[address] = (keep, array, self)
        self.exported += 1
        return _new(address, _NAMES[name], ctypes.cast(_destroy, ctypes.c_void_p))


_NAMES = {b"dltensor": b"dltensor", b"dltensor_versioned": b"dltensor_versioned"}
