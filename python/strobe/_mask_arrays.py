"""Where a mask of `strobe.masks` is made: of NumPy's arrays in the CPU's memory, or of PyTorch's
tensors on the device that they are on.

What is computed of ids, lengths and trees is written once, with the operations of this file. None
of them makes a shape of values, so that on a GPU nothing waits for the device, and a CUDA graph can
capture all of it.
"""

from __future__ import annotations

import sys
from typing import Any, Final, TypeAlias

import numpy as np

from ._arrays import NDArray, check_not_masked, check_readable, is_tensor, new_tensor
from ._errors import InvalidArgument, Unsupported
from ._plans import torch_stream

_ALIGNMENT: Final = 16  # bytes, of packed words
_LOWEST, _HIGHEST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


class NumPyArrays:
    """NumPy's arrays, and what NumPy makes one of."""

    on_device = False  # whether to look at a value waits for a device
    bool_type, int32_type, int64_type = np.bool_, np.int32, np.int64

    def take(self, name: str, array: Any) -> NDArray:
        """An argument as an array of this kind."""
        if is_tensor(array) and array.device.type != "cpu":
            raise InvalidArgument(f"{name} is on {array.device}, expected cpu as the others")
        return host(array, name)

    def is_bool(self, x: NDArray) -> bool:
        return bool(x.dtype == np.bool_)

    def is_integer(self, x: NDArray) -> bool:
        return x.dtype.kind in "iu"

    def is_words(self, x: NDArray) -> bool:
        return x.dtype in (np.int32, np.uint32)

    def strides(self, x: NDArray) -> tuple[int, ...]:
        """In bytes."""
        return x.strides

    def contiguous(self, x: NDArray) -> NDArray:
        return np.ascontiguousarray(x)

    def copy(self, x: NDArray) -> NDArray:
        return x.copy()

    def wide(self, name: str, x: NDArray) -> NDArray:
        """In 64 bits, in which sums of two numbers have room."""
        most = np.iinfo(np.int64).max
        if x.dtype == np.uint64 and x.size and x.max() > most:
            raise InvalidArgument(f"{name} has {x.max()}, expected at most {most}")
        return x.astype(np.int64)

    def int32(self, x: NDArray) -> NDArray:
        """Contiguous; what is out of range as the nearest number there is."""
        if x.dtype != np.int32:
            x = np.clip(x, _LOWEST, _HIGHEST)
        found: NDArray = np.ascontiguousarray(x, np.int32)
        return found

    def arange(self, end: int) -> NDArray:
        return np.arange(end, dtype=np.int64)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> NDArray:
        return np.zeros(shape, dtype)

    def where(self, condition: NDArray, x: Any, y: Any) -> NDArray:
        found: NDArray = np.where(condition, x, y)
        return found

    def maximum(self, x: NDArray, y: NDArray) -> NDArray:
        return np.maximum(x, y)

    def clip(self, x: NDArray, low: int, high: int) -> NDArray:
        found: NDArray = np.clip(x, low, high)
        return found

    def stack(self, arrays: list[NDArray]) -> NDArray:
        """Along a new last axis."""
        return np.stack(arrays, axis=-1)

    def order(self, x: NDArray) -> NDArray:
        """Which sorts each row; of equal numbers the first one comes first."""
        return np.argsort(x, axis=-1, kind="stable")

    def pick(self, x: NDArray, index: NDArray, axis: int = -1) -> NDArray:
        return np.take_along_axis(x, index, axis)

    def search(self, rows: NDArray, values: NDArray, side: Any) -> NDArray:
        """Where in sorted rows values belong, row by row: both are (rows, ...)."""
        found = [np.searchsorted(x, y, side) for x, y in zip(rows, values, strict=True)]
        return np.stack(found) if found else np.zeros(values.shape, np.int64)

    def broadcast(self, x: NDArray, rows: int) -> NDArray:
        """One row as many."""
        return np.broadcast_to(x, (rows, *x.shape[1:]))

    def address(self, x: NDArray) -> int:
        return x.ctypes.data

    def words(self, count: int) -> NDArray:
        """New int32 words, aligned as those of a packed mask."""
        spare = _ALIGNMENT // 4
        memory = np.empty(count + spare, np.int32)
        first = -(memory.ctypes.data // 4) % spare
        return memory[first : first + count]

    def device_fields(self) -> tuple[dict[str, int], dict[str, int]]:
        """Of the problem, and of the arguments of strobe_mask_pack."""
        return {}, {}

    def captures(self) -> bool:
        """Whether a CUDA graph is captured, during which nothing can wait."""
        return False


class TorchTensors:
    """PyTorch's tensors on one device."""

    def __init__(self, name: str, device: Any) -> None:
        """name: of the argument that says which device."""
        self._torch = sys.modules["torch"]
        self._name, self.device = name, device
        self.on_device = device.type != "cpu"
        self.bool_type = self._torch.bool
        self.int32_type, self.int64_type = self._torch.int32, self._torch.int64

    def take(self, name: str, array: Any) -> Any:
        if not is_tensor(array):
            if self.on_device:
                raise InvalidArgument(
                    f"{name} is of type {type(array).__name__:.60}, expected a tensor on "
                    f"{self.device} as {self._name}"
                )
            array = self._torch.from_numpy(host(array, name).copy())
        check_readable(name, array)
        if array.device != self.device:
            raise InvalidArgument(
                f"{name} is on {array.device}, expected {self.device} as {self._name}"
            )
        return array.detach()

    def is_bool(self, x: Any) -> bool:
        return bool(x.dtype == self._torch.bool)

    def is_integer(self, x: Any) -> bool:
        return not (x.dtype.is_floating_point or x.dtype.is_complex or self.is_bool(x))

    def is_words(self, x: Any) -> bool:
        return str(x.dtype) in ("torch.int32", "torch.uint32")

    def strides(self, x: Any) -> tuple[int, ...]:
        return tuple(step * x.element_size() for step in x.stride())

    def contiguous(self, x: Any) -> Any:
        return x.contiguous()

    def copy(self, x: Any) -> Any:
        return x.clone()

    def wide(self, name: str, x: Any) -> Any:
        found = x.to(self._torch.int64)
        # (Numbers on a GPU are not waited for.)
        if x.dtype == self._torch.uint64 and not x.is_cuda and (found < 0).any():
            raise InvalidArgument(f"{name} has numbers from 2**63 on, expected at most 2**63 - 1")
        return found

    def int32(self, x: Any) -> Any:
        if x.dtype != self._torch.int32:
            wide = x.to(self._torch.int64)
            if x.dtype == self._torch.uint64:
                wide = wide.masked_fill(wide < 0, _HIGHEST)
            x = wide.clamp(_LOWEST, _HIGHEST).to(self._torch.int32)
        return x.contiguous()

    def arange(self, end: int) -> Any:
        return self._torch.arange(end, device=self.device)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._torch.zeros(shape, dtype=dtype, device=self.device)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return self._torch.where(condition, x, y)

    def maximum(self, x: Any, y: Any) -> Any:
        return self._torch.maximum(x, y)

    def clip(self, x: Any, low: int, high: int) -> Any:
        return x.clamp(low, high)

    def stack(self, arrays: list[Any]) -> Any:
        return self._torch.stack(arrays, dim=-1)

    def order(self, x: Any) -> Any:
        return self._torch.sort(x, dim=-1, stable=True).indices

    def pick(self, x: Any, index: Any, axis: int = -1) -> Any:
        return self._torch.take_along_dim(x, index, axis)

    def search(self, rows: Any, values: Any, side: Any) -> Any:
        return self._torch.searchsorted(rows.contiguous(), values.contiguous(), side=side)

    def broadcast(self, x: Any, rows: int) -> Any:
        return x.expand(rows, *x.shape[1:])

    def address(self, x: Any) -> int:
        return int(x.data_ptr())

    def words(self, count: int) -> Any:
        if not self.on_device:
            return self._torch.from_numpy(NUMPY_ARRAYS.words(count))
        return new_tensor((count,), self._torch.int32, self.device)

    def device_fields(self) -> tuple[dict[str, int], dict[str, int]]:
        """All that is computed here runs on the device's current stream, packing too: arrays that
        are let go of meanwhile are given to nobody before that stream has come past them.
        """
        if not self.on_device:
            return {}, {}
        fields = {"device": 1, "device_index": self.device.index}
        return fields, {"stream": current_stream(self.device)}

    def captures(self) -> bool:
        return is_capturing(self.device)


NUMPY_ARRAYS: Final = NumPyArrays()
Arrays: TypeAlias = NumPyArrays | TorchTensors


def arrays_of(name: str, array: Any) -> Arrays:
    """Where a mask of this argument is made."""
    if not is_tensor(array):
        return NUMPY_ARRAYS
    check_readable(name, array)
    return TorchTensors(name, array.device)


def host(array: Any, name: str) -> NDArray:
    """The array as one of NumPy's, without a copy where it lies in the CPU's memory; a GPU is
    waited for.
    """
    if not is_tensor(array):
        check_not_masked(name, array)
        try:
            values = np.asarray(array)
        except ValueError as error:  # lists of unequal lengths
            raise InvalidArgument(f"{name} is no array: {error}") from None
        # NumPy takes empty lists for floats.
        empty = isinstance(array, list | tuple) and values.size == 0
        return values.astype(np.int64) if empty else values
    check_readable(name, array)
    found: NDArray = array.detach().cpu().numpy()
    return found


def current_stream(device: Any) -> int:
    """Of PyTorch's device: what is packed on a GPU is there for what follows on this stream."""
    return torch_stream(device.index) if device.type == "cuda" else 0


def is_capturing(device: Any) -> bool:
    """Whether a CUDA graph is captured on PyTorch's current stream."""
    return device.type == "cuda" and bool(
        sys.modules["torch"].cuda.is_current_stream_capturing()
    )


def check_may_wait(arrays: Arrays, what: str) -> None:
    """Refuses to look at values of a GPU while a CUDA graph is captured."""
    if arrays.captures():
        raise Unsupported(f"{what} would wait for the device while a CUDA graph is captured")
