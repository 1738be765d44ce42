"""Arrays of NumPy, PyTorch and DLPack as addresses and specs. Nothing in this file copies a tensor.

Each framework is one `Kind`. Its `view` runs on every call and is kept small: it gives the address
and a hashable *signature* that holds everything a plan depends on. Its `spec` runs only when that
signature has not been seen before, and says the same in words of our own. PyTorch is never imported
here: whoever passes a torch tensor has imported it.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from ._dlpack import ImportedTensor, contiguous_strides
from ._errors import Error, InvalidArgument, Unsupported, shown
from ._tensors import (
    LOW,
    Unreadable,
    check_dense,
    check_device,
    check_readable,
    check_sign,
    first_line,
    has_memory,
)
from ._values import integer

# Makes a new array at each call; its argument is the input that the allocator was made for.
Allocator: TypeAlias = Callable[[Any], Any]


class SupportsDLPack(Protocol):
    """What every array library's tensors have: NumPy, PyTorch, JAX, CuPy, TensorFlow..."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


NDArray: TypeAlias = np.ndarray[Any, Any]
AnyArray: TypeAlias = NDArray | SupportsDLPack


@dataclass(frozen=True)
class ArraySpec:
    """An array without its data, for `strobe.plan` and `strobe.why`.

    shape: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with varlen.
    dtype: "float32", "bfloat16" or "float16" ("int32" for cu_seqlens).
    device: "cpu", "cuda" or "cuda:N".
    strides: in elements; None: contiguous.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Spec:
    """What `Kind.spec` says of an array: strides in elements, dtype by name."""

    kind: Kind
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str  # "cpu" or "cuda"
    device_index: int

    @property
    def place(self) -> str:
        return self.device if self.device == "cpu" else f"{self.device}:{self.device_index}"


class Kind(Protocol):
    """One array library."""

    name: str
    # How its users say it; {} stands for the argument, {1} and {2} for axes.
    contiguous_hint: str
    swapped_hint: str
    stride_hint: str

    def pointer(self, array: Any) -> int:
        """Address of the first element."""
        ...

    def view(self, array: Any) -> tuple[int, Hashable]:
        """(address, signature)."""
        ...

    def spec(self, name: str, array: Any) -> Spec: ...

    def check_writable(self, name: str, array: Any) -> None: ...

    def threads(self) -> int:
        """The library's own number of CPU threads; 0 if it has none."""
        ...

    def allocator(self, shape: Sequence[int], dtype: str, like: Spec) -> Allocator:
        """A function that makes uninitialised, contiguous arrays on the device of `like`."""
        ...


# -------------------------------------------------------------------------------------------- NumPy

# PyArrayInterface, which __array_struct__ points to: int two, int nd, char typekind, int itemsize,
# int flags, intptr *shape, intptr *strides, void *data.
# https://numpy.org/doc/stable/reference/arrays.interface.html
_ARRAY_STRUCT_DATA: Final = 40 if ctypes.sizeof(ctypes.c_void_p) == 8 else 28
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_pointer_at = ctypes.c_void_p.from_address


def numpy_pointer(array: np.ndarray[Any, Any]) -> int:
    """Address of the first element: half the time of array.ctypes.data (365 ns against 750)."""
    address: int = _capsule_pointer(array.__array_struct__, None)
    return _pointer_at(address + _ARRAY_STRUCT_DATA).value or 0


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name; bfloat16 is the one of ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise Unsupported(
            "a bfloat16 result as a NumPy array needs the package ml_dtypes "
            "(pip install ml_dtypes); or pass PyTorch tensors, or your own array as out"
        ) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


class NumpyKind:
    name = "numpy.ndarray"
    contiguous_hint = "numpy.ascontiguousarray({})"
    swapped_hint = "{}.swapaxes({}, {})"
    stride_hint = "{}.strides[{}]"

    @staticmethod
    def pointer(array: Any) -> int:
        return numpy_pointer(array)

    @staticmethod
    def view(array: Any) -> tuple[int, Hashable]:
        address = _capsule_pointer(array.__array_struct__, None) + _ARRAY_STRUCT_DATA
        return _pointer_at(address).value or 0, (array.shape, array.strides, array.dtype)

    def spec(self, name: str, array: Any) -> Spec:
        dtype: np.dtype[Any] = array.dtype
        itemsize = dtype.itemsize
        if not dtype.isnative:
            raise InvalidArgument(f"{name}.dtype = {dtype.str}, expected this machine's byte order")
        strides = []
        for axis, (length, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
            if length > 1 and (itemsize == 0 or stride % itemsize):
                raise InvalidArgument(
                    f"{name}.strides[{axis}] = {stride} bytes, expected a multiple of the item "
                    f"size {itemsize}: pass {self.contiguous_hint.format(name)}"
                )
            strides.append(stride // itemsize if itemsize else 0)
        return Spec(self, array.shape, tuple(strides), dtype.name, "cpu", 0)

    @staticmethod
    def check_writable(name: str, array: Any) -> None:
        if not array.flags.writeable:
            raise InvalidArgument(f"{name} is read-only, expected a writable array")

    @staticmethod
    def threads() -> int:
        return 0

    @staticmethod
    def allocator(shape: Sequence[int], dtype: str, like: Spec) -> Allocator:
        size, kind = tuple(shape), numpy_dtype(dtype)
        return lambda _: np.empty(size, kind)


class NumpySubclassKind(NumpyKind):
    """Subclasses of numpy.ndarray, as the array that they are, whatever they say of themselves."""

    @staticmethod
    def pointer(array: Any) -> int:
        return numpy_pointer(_plain(array))

    @staticmethod
    def view(array: Any) -> tuple[int, Hashable]:
        return NumpyKind.view(_plain(array))

    def spec(self, name: str, array: Any) -> Spec:
        return super().spec(name, _plain(array))

    @staticmethod
    def check_writable(name: str, array: Any) -> None:
        NumpyKind.check_writable(name, _plain(array))


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ndarray.view(array, np.ndarray)


# ------------------------------------------------------------------------------------------ PyTorch


def _torch() -> Any:
    return sys.modules["torch"]


class TorchKind:
    name = "torch.Tensor"
    contiguous_hint = "{}.contiguous()"
    swapped_hint = "{}.transpose({}, {})"
    stride_hint = "{}.stride({})"

    @staticmethod
    def pointer(array: Any) -> int:
        address: int = array.data_ptr()
        return address

    @staticmethod
    def view(array: Any) -> tuple[int, Hashable]:
        address = array.data_ptr()
        if (address < LOW and not has_memory(array)) or array.is_neg():
            raise Unreadable
        return address, (array.shape, array.stride(), array.dtype, array.device)

    def spec(self, name: str, array: Any) -> Spec:
        check_dense(name, array)
        check_sign(name, array)
        check_device(name, array)
        device = array.device
        dtype = str(array.dtype).removeprefix("torch.")
        index = device.index or 0
        return Spec(self, tuple(array.shape), tuple(array.stride()), dtype, device.type, index)

    @staticmethod
    def check_writable(name: str, array: Any) -> None:
        if array.requires_grad and _torch().is_grad_enabled():
            raise InvalidArgument(
                f"{name} requires grad, expected a tensor that autograd does not track: "
                f"pass {name}.detach() or use torch.no_grad()"
            )

    @staticmethod
    def threads() -> int:
        return int(_torch().get_num_threads())

    def allocator(self, shape: Sequence[int], dtype: str, like: Spec) -> Allocator:
        wanted = (self, tuple(shape), dtype, contiguous_strides(like.shape))
        if wanted == (like.kind, like.shape, like.dtype, like.strides):
            same: Allocator = _torch().empty_like  # 0.6 us; torch.empty of a shape and dtype: 1.2
            return same
        return _torch_empty(shape, dtype, like)


class TorchSubclassKind(TorchKind):
    """Subclasses of torch.Tensor, nn.Parameter among them: results are plain tensors."""

    @staticmethod
    def view(array: Any) -> tuple[int, Hashable]:
        if array.is_nested:  # jagged, with sizes that are no numbers
            raise Unreadable
        return TorchKind.view(array)[0], (
            array.shape,
            array.stride(),
            array.dtype,
            array.device,
            "subclass",
        )

    def allocator(self, shape: Sequence[int], dtype: str, like: Spec) -> Allocator:
        return _torch_empty(shape, dtype, like)


def _torch_empty(shape: Sequence[int], dtype: str, like: Spec) -> Allocator:
    torch = _torch()
    index = None if like.device == "cpu" else like.device_index
    device = torch.device(like.device, index)
    with torch.inference_mode(False):
        model = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
    if type(model) is not torch.Tensor:  # fake ones, while somebody traces
        return lambda _: torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
    # empty_like takes half the time of empty; of the model only its description is needed.
    model.untyped_storage().resize_(0)
    empty_like: Callable[[Any], Any] = torch.empty_like
    return lambda _: empty_like(model)


# Functions of PyTorch, by name, looked up once.
_torch_functions: Final[dict[str, Callable[..., Any]]] = {}


def torch_stream(device_index: int) -> int:
    """cudaStream_t of PyTorch's current stream on that device."""
    stream: Callable[[int], int] | None = _torch_functions.get("stream")
    if stream is None:
        torch = _torch()
        # What PyTorch's own compiled code calls: 0.2 us, where making a Stream takes 2.
        stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
            lambda index: int(torch.cuda.current_stream(index).cuda_stream)
        )
        _torch_functions["stream"] = stream
    return stream(device_index)


def torch_capturing() -> bool:
    """Whether PyTorch's current stream is being captured into a graph."""
    capturing: Callable[[], bool] | None = _torch_functions.get("capturing")
    if capturing is None:
        capturing = _torch_functions["capturing"] = _torch().cuda.is_current_stream_capturing
    return capturing()


# ------------------------------------------------------------------------------------------- DLPack


class DLPackKind:
    """Tensors of any other library, taken over from their capsules. Results are NumPy arrays."""

    name = "DLPack"
    contiguous_hint = "a contiguous copy of {}"
    swapped_hint = "{} with axes {} and {} swapped"
    stride_hint = "{}.strides[{}]"

    @staticmethod
    def pointer(array: Any) -> int:
        address: int = array.pointer
        return address

    @staticmethod
    def view(array: Any) -> tuple[int, Hashable]:
        return array.pointer, (
            array.shape,
            array.strides,
            array.dtype,
            array.device,
            array.device_index,
        )

    def spec(self, name: str, array: Any) -> Spec:
        if array.device != "cpu":
            # Whose stream to wait for, and who allocates results, is known for PyTorch only.
            raise Unsupported(
                f"{name} is on {array.device}:{array.device_index} and comes through DLPack, "
                f"expected a torch.Tensor: torch.from_dlpack makes one that shares its memory"
            )
        return Spec(self, array.shape, array.strides, array.dtype, array.device, array.device_index)

    @staticmethod
    def check_writable(name: str, array: Any) -> None:
        if array.read_only:
            raise InvalidArgument(f"{name} is read-only, expected a writable array")

    @staticmethod
    def threads() -> int:
        return 0

    allocator = staticmethod(NumpyKind.allocator)


class SpecKind:
    """Arrays without data."""

    name = "strobe.ArraySpec"
    contiguous_hint = "{} with strides=None"
    swapped_hint = "{} with axes {} and {} swapped"
    stride_hint = "{}.strides[{}]"

    def pointer(self, array: Any) -> int:
        return self.view(array)[0]

    @staticmethod
    def view(array: Any) -> tuple[int, Hashable]:
        raise Unreadable

    def spec(self, name: str, array: Any) -> Spec:
        device, _, index = str(array.device).partition(":")
        if device not in ("cpu", "cuda") or (index and not _device_index.fullmatch(index)):
            raise InvalidArgument(
                f'{name}.device = {shown(array.device)}, expected "cpu", "cuda" or "cuda:N"'
            )
        shape = self._integers(f"{name}.shape", array.shape)
        if min(shape, default=0) < 0:
            raise InvalidArgument(f"{name}.shape = {shown(shape)}, expected no negative sizes")
        strides = array.strides
        if strides is None:
            strides = contiguous_strides(shape)
        else:
            strides = self._integers(f"{name}.strides", strides)
            if len(strides) != len(shape):
                raise InvalidArgument(
                    f"{name}.strides has {len(strides)} entries, expected {len(shape)}"
                )
        return Spec(self, shape, strides, str(array.dtype), device, int(index or 0))

    @staticmethod
    def _integers(name: str, values: Any) -> tuple[int, ...]:
        """That each fits the C library."""
        try:
            listed = tuple(values)
        except Exception:
            raise InvalidArgument(
                f"{name} = {shown(values)}, expected a tuple of integers"
            ) from None
        return tuple(integer(f"{name}[{axis}]", value) for axis, value in enumerate(listed))

    @staticmethod
    def check_writable(name: str, array: Any) -> None:
        return

    @staticmethod
    def threads() -> int:
        return 0

    allocator = staticmethod(NumpyKind.allocator)


_device_index: Final = re.compile("[0-9]{1,4}")

NUMPY: Final = NumpyKind()
NUMPY_SUBCLASS: Final = NumpySubclassKind()
TORCH: Final = TorchKind()
TORCH_SUBCLASS: Final = TorchSubclassKind()
DLPACK: Final = DLPackKind()
SPEC: Final = SpecKind()

# Kinds by exact type, filled as types are met. Only types in DIRECT may be used without `imported`.
KINDS: Final[dict[type, Kind]] = {np.ndarray: NUMPY, ImportedTensor: DLPACK, ArraySpec: SPEC}
# With NoneType, so that one look-up also covers the optional arguments that are absent.
DIRECT: Final[set[type]] = {np.ndarray, ImportedTensor, ArraySpec, type(None)}


def cannot_be_read(name: str, array: Any, error: Exception) -> InvalidArgument:
    """For what somebody else's class raises."""
    return InvalidArgument(
        f"{name} ({type(array).__name__:.60}) cannot be read: {first_line(error)}"
    )


def unreadable(named: Sequence[tuple[str, Any]], error: Exception) -> Error:
    """Which of these arrays has no address or signature (`Kind.view`), and why."""
    for name, array in named:
        if array is None:
            continue
        kind = KINDS[type(array)]
        try:
            if kind is SPEC:
                return InvalidArgument(
                    f"{name} is an ArraySpec, which has no data: it is for strobe.plan and "
                    "strobe.why only"
                )
            if isinstance(kind, TorchKind):
                check_readable(name, array)
            kind.view(array)
        except Error as found:
            return found
        except Exception as found:
            return cannot_be_read(name, array, found)
    return InvalidArgument(f"an array cannot be read: {first_line(error)}")  # pragma: no cover


def _classify(name: str, array: Any) -> Kind | None:
    """The kind of an array of a new type; None: through DLPack. Refuses what is no array."""
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidArgument(
            f"{name} is a numpy.ma.MaskedArray, whose mask would be ignored: "
            f"pass {name}.data or {name}.filled(...)"
        )
    if isinstance(array, np.ndarray):
        return NUMPY if type(array) is np.ndarray else NUMPY_SUBCLASS
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, getattr(torch, "Tensor", ())):
        KINDS[torch.Tensor] = TORCH  # results are of this type, whatever subclass came in
        # Bound once: to look the function up costs more than it takes.
        TORCH.threads = torch.get_num_threads  # type: ignore[method-assign]
        TORCH_SUBCLASS.threads = torch.get_num_threads  # type: ignore[method-assign]
        return TORCH if type(array) is torch.Tensor else TORCH_SUBCLASS
    with suppress(Exception):  # a property may raise anything
        if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
            return None
    raise InvalidArgument(
        f"{name} is of type {type(array).__name__:.60}, expected a NumPy array, a PyTorch tensor "
        f"or an object with __dlpack__ and __dlpack_device__"
    )


@contextmanager
def imported(names: Sequence[str], arrays: Sequence[Any]) -> Iterator[list[Any]]:
    """`arrays`, those of foreign libraries taken over through DLPack, and given back at the end.

    New types of NumPy's and PyTorch's are sorted into KINDS and DIRECT on the way.
    """
    taken: list[ImportedTensor] = []
    try:
        result: list[Any] = []
        for name, array in zip(names, arrays, strict=True):
            if type(array) not in DIRECT:
                kind = _classify(name, array)
                if kind is None:
                    array = ImportedTensor(name, array)
                    taken.append(array)
                else:
                    KINDS[type(array)] = kind
                    DIRECT.add(type(array))
            result.append(array)
        yield result
    finally:
        for tensor in taken:
            tensor.close()
