"""Arrays of NumPy, PyTorch and DLPack in words: what the planner checks, and what messages say.

`_core` reads them on each call; of this, only what it asks for runs then: sorting a type that it
has not met, and explaining what it cannot read. PyTorch is never imported here: whoever passes a
torch tensor has imported it.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np

from . import _core, _profiler
from ._errors import Error, InvalidArgument, Unsupported, first_line, shown
from ._values import integer


class SupportsDLPack(Protocol):
    """What every array library's tensors have: NumPy, PyTorch, JAX, CuPy, TensorFlow..."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


class SupportsMask(Protocol):
    """A mask as data, of `strobe.masks`."""

    @property
    def _strobe_mask(self) -> tuple[Any, int, int, int, int, int]: ...


NDArray: TypeAlias = np.ndarray[Any, Any]
AnyArray: TypeAlias = NDArray | SupportsDLPack
if TYPE_CHECKING:  # whoever passes a tensor has imported PyTorch
    import torch

    Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True)
class ArraySpec:
    """An array without its data, for `strobe.plan` and `strobe.why`.

    shape: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with varlen.
    dtype: "float32", "bfloat16" or "float16" ("int32" for cu_seqlens).
    device: "cpu", "cuda" or "cuda:N".
    strides: in elements; None: contiguous.

    Example:
        >>> import strobe
        >>> x = strobe.ArraySpec((2, 4096, 16, 128), "bfloat16", "cpu")
        >>> "takes it" in strobe.why(x, x, x, causal=True)
        True
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    device: str = "cpu"
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Kind:
    """How users of an array library say things; {} stands for the argument, then axes follow."""

    contiguous_hint: str
    swapped_hint: str
    stride_hint: str = "{}.strides[{}]"


NUMPY: Final = Kind("numpy.ascontiguousarray({})", "{}.swapaxes({}, {})")
TORCH: Final = Kind("{}.contiguous()", "{}.transpose({}, {})", "{}.stride({})")
SHARED: Final = Kind("a contiguous copy of {}", "{} with axes {} and {} swapped")
DESCRIBED: Final = Kind("{} with strides=None", "{} with axes {} and {} swapped")


@dataclass(frozen=True)
class Spec:
    """An array in words: strides in elements, dtype by name, device "cpu" or "cuda"."""

    kind: Kind
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    device_index: int

    @property
    def place(self) -> str:
        return self.device if self.device == "cpu" else f"{self.device}:{self.device_index}"


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements, in C order."""
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


# ------------------------------------------------------------------------------------------- kinds


def _torch() -> Any:
    return sys.modules["torch"]


def is_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, getattr(torch, "Tensor", ()))


def is_compiling() -> bool:
    """Whether PyTorch's compiler traces the caller."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


def is_traceable(q: Any, others: Iterable[Any]) -> bool:
    """Whether all arrays of a call are tensors, which PyTorch's compiler knows. others: numbers and
    masks too, which it also does.
    """
    torch = _torch()
    known = (torch.Tensor, int, float, str, tuple, list, torch.SymInt, torch.dtype)
    return isinstance(q, torch.Tensor) and all(
        x is None or isinstance(x, known) or hasattr(x, "_strobe_mask") for x in others
    )


@lru_cache(1)
def introduce_torch() -> None:
    """Tells _core what it asks of PyTorch on each call."""
    torch = _torch()
    _core.set_torch(
        torch.Tensor,
        torch.get_num_threads,
        torch.Tensor.is_neg,
        torch.is_grad_enabled,
        torch.is_autocast_enabled,
        torch.autograd.graph.increment_version,
        (
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.int32,
            torch.int8,
            torch.uint8,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        ),
    )
    _profiler.introduce(torch)


def is_masked(array: NDArray) -> bool:
    """Whether it is a numpy.ma.MaskedArray. NumPy imports that module when it is first asked for,
    and a process that forks while a thread imports leaves its child with the import's lock.
    """
    return isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ()))


def how_to_make_mask(other: Any) -> str:
    """What makes a `strobe.masks.Mask` of what was given in place of one."""
    if type(other).__name__ == "BlockMask":
        return "strobe.masks.from_block_mask(block_mask) makes one of PyTorch's BlockMask"
    return "strobe.masks.from_bool(keep) makes one of bools"


def check_not_masked(name: str, array: Any) -> None:
    """Refuses a numpy.ma.MaskedArray."""
    if is_masked(array):
        raise InvalidArgument(
            f"{name} is a numpy.ma.MaskedArray, whose mask would be ignored: "
            f"pass {name}.data or {name}.filled(...)"
        )


def classify(name: str, array: Any) -> int:
    """The kind of an array of a new type, as _core numbers them. Refuses what is no array."""
    if isinstance(array, np.ndarray):
        check_not_masked(name, array)
        return 0 if type(array) is np.ndarray else 1
    if is_tensor(array):
        introduce_torch()
        return 2 if type(array) is _torch().Tensor else 3
    if isinstance(array, ArraySpec):
        return 5
    with suppress(Exception):  # a property may raise anything
        if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
            return 4
    kind = type(array).__name__
    if name == "mask":
        raise InvalidArgument(
            f"mask is of type {kind:.60}, expected a strobe.masks.Mask: {how_to_make_mask(array)}"
        )
    raise InvalidArgument(
        f"{name} is of type {kind:.60}, expected a NumPy array, a PyTorch tensor "
        f"or an object with __dlpack__ and __dlpack_device__"
    )


def plain_array(array: NDArray) -> NDArray:
    """An array of a subclass as the array that it is."""
    return np.ndarray.view(array, np.ndarray)


def cannot_be_read(name: str, array: Any, error: Exception) -> InvalidArgument:
    """For what somebody else's class raises."""
    return InvalidArgument(
        f"{name} ({type(array).__name__:.60}) cannot be read: {first_line(error)}"
    )


def unreadable(name: str, array: Any, error: Exception) -> Error:
    """Why an array has no address, where its library said `error`."""
    if isinstance(array, ArraySpec):
        return InvalidArgument(
            f"{name} is an ArraySpec, which has no data: it is for strobe.plan and strobe.why only"
        )
    try:
        if is_tensor(array):
            check_readable(name, array)
            spec_of(name, array)
    except Error as found:
        return found
    except Exception as found:
        return cannot_be_read(name, array, found)
    return cannot_be_read(name, array, error)


def _is_of_jax(array: Any) -> bool:
    return isinstance(array, getattr(sys.modules.get("jax"), "Array", ()))


def _never_changes(array: Any) -> bool:
    """Whether it is of a library whose arrays nobody writes to, which their capsules need not say:
    others may share the memory of JAX's, and its compiler counts on what they hold.
    """
    return _is_of_jax(array) or type(array).__module__.startswith("tensorflow.")


def check_writable(name: str, array: Any, read_only: bool) -> None:
    """Refuses what must not be written to, as PyTorch's operators that write in place do.
    read_only: what is known of an array that is no tensor.
    """
    if not is_tensor(array):
        if read_only or _never_changes(array):
            raise InvalidArgument(f"{name} is read-only, expected a writable array")
        return
    if array.requires_grad and _torch().is_grad_enabled():
        raise InvalidArgument(
            f"{name} requires grad, expected a tensor that autograd does not track: "
            f"pass {name}.detach() or use torch.no_grad()"
        )
    if array.is_inference() and not _torch().is_inference_mode_enabled():
        raise InvalidArgument(
            f"{name} is an inference tensor, expected one that may be written to outside of "
            f"torch.inference_mode(): pass {name}.clone()"
        )


# --------------------------------------------------------------- PyTorch's that are none to read
# Nested, sparse, fake, negated, freed: their type is torch.Tensor like any other's, and what
# PyTorch says of them ranges from a wrong address to an "Internal error".


def check_dense(name: str, x: Any) -> None:
    """Refuses the layouts that have no strides."""
    torch = _torch()
    if x.is_nested:
        raise InvalidArgument(
            f"{name} is a nested tensor, expected a dense one: pack its sequences end to end and "
            "pass cu_seqlens_q and cu_seqlens_k (flash_attn_varlen_func), or pad them"
        )
    if x.layout is not torch.strided:
        raise InvalidArgument(
            f"{name}.layout = {x.layout}, expected torch.strided: pass {name}.to_dense()"
        )


def check_plain(name: str, x: Any) -> None:
    """Refuses what is not dense, whose memory holds its negative (`x.conj().imag`, say), and
    devices without kernels or without memory (meta).
    """
    check_dense(name, x)
    if x.is_neg():
        raise InvalidArgument(
            f"{name} has its negative bit set, so that its memory holds -{name}: pass "
            f"{name}.resolve_neg()"
        )
    if x.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"{name} is on {x.device}, expected a cpu or cuda tensor")


def check_readable(name: str, x: Any) -> None:
    """Refuses what has no elements in memory, or others there than it stands for."""
    check_plain(name, x)
    check_memory(name, x)


def new_tensor(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """A tensor of PyTorch's to be written by its address: of what a mode that is on would make in
    its place, another dtype or shape say, nobody would know.
    """
    torch = _torch()
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return torch.empty(shape, dtype=dtype, device=device)


def check_memory(name: str, x: Any) -> None:
    """Refuses what has no elements in memory."""
    try:
        # A storage that was freed, a fake or a wrapper's: its address is NULL. (Without elements it
        # may be; but what has no address to ask for is none of ours then either.)
        there = x.data_ptr() != x.storage_offset() * x.element_size()
        readable = there or x.numel() == 0
    except Exception:
        readable = False
    if not readable:
        raise InvalidArgument(f"{name} is a {_kind(x)}, expected one that has memory")


def _kind(x: Any) -> str:
    torch = _torch()
    if torch.nn.parameter.is_lazy(x):
        return "parameter that was not initialised"
    if x._is_zerotensor():
        return "zero tensor of PyTorch's"
    if type(x).__name__ == "FakeTensor" or torch._is_functional_tensor(x):
        return "fake tensor (torch.compile, export)"
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "tensor of torch.func (vmap, grad)"
    if type(x) in (torch.Tensor, torch.nn.Parameter):
        return "tensor whose storage was freed"
    return f"tensor of type {type(x).__name__}"


# ------------------------------------------------------------------------------------------- specs

# By the numbers of the extension: kinds of arrays, and dtypes (strobe_dtype's, and two more).
_KINDS: Final = (NUMPY, NUMPY, TORCH, TORCH, SHARED, DESCRIBED)
DTYPES: Final = {
    0: "float32", 1: "bfloat16", 2: "float16", 3: "float8_e4m3fn", 4: "float8_e5m2",
    5: "int8", 8: "int32", 9: "uint8"
}  # fmt: skip


def read_spec(
    kind: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: int,
    on_cuda: int,
    device_index: int,
) -> Spec:
    """An array that _core has read and found to be one of those that kernels take."""
    device = "cuda" if on_cuda else "cpu"
    return Spec(_KINDS[kind], shape, strides, DTYPES[dtype], device, device_index)


def spec_of(name: str, array: Any) -> Spec:
    """An array in words. Refuses what is none, or none that can be read as it is."""
    if isinstance(array, Spec):
        return array
    try:
        kind = classify(name, array)
        if kind in (0, 1):
            return _numpy_spec(name, plain_array(array))
        if kind in (2, 3):
            return _torch_spec(name, array)
        if kind == 5:
            return _described_spec(name, array)
        found: Spec = _core.describe(name, array)
        return found
    except Error:
        raise
    except Exception as error:
        raise cannot_be_read(name, array, error) from None


def _numpy_spec(name: str, array: NDArray) -> Spec:
    itemsize = array.dtype.itemsize
    if not array.dtype.isnative:
        raise InvalidArgument(
            f"{name}.dtype = {array.dtype.str}, expected this machine's byte order"
        )
    strides = []
    for axis, (length, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        if length > 1 and (itemsize == 0 or stride % itemsize):
            raise InvalidArgument(
                f"{name}.strides[{axis}] = {stride} bytes, expected a multiple of the item "
                f"size {itemsize}: pass {NUMPY.contiguous_hint.format(name)}"
            )
        strides.append(stride // itemsize if itemsize else 0)
    return Spec(NUMPY, array.shape, tuple(strides), array.dtype.name, "cpu", 0)


def _torch_spec(name: str, array: Any) -> Spec:
    check_plain(name, array)
    device = array.device
    dtype = str(array.dtype).removeprefix("torch.")
    index = device.index or 0
    return Spec(TORCH, tuple(array.shape), tuple(array.stride()), dtype, device.type, index)


_device_index: Final = re.compile("[0-9]{1,4}")


def _described_spec(name: str, array: ArraySpec) -> Spec:
    device, _, index = str(array.device).partition(":")
    if device not in ("cpu", "cuda") or (index and not _device_index.fullmatch(index)):
        raise InvalidArgument(
            f'{name}.device = {shown(array.device)}, expected "cpu", "cuda" or "cuda:N"'
        )
    shape = _integers(f"{name}.shape", array.shape)
    if min(shape, default=0) < 0:
        raise InvalidArgument(f"{name}.shape = {shown(shape)}, expected no negative sizes")
    if array.strides is None:
        strides = contiguous_strides(shape)
    else:
        strides = _integers(f"{name}.strides", array.strides)
        if len(strides) != len(shape):
            raise InvalidArgument(
                f"{name}.strides has {len(strides)} entries, expected {len(shape)}"
            )
    return Spec(DESCRIBED, shape, strides, str(array.dtype), device, int(index or 0))


def _integers(name: str, values: Any) -> tuple[int, ...]:
    """That each fits the C library."""
    try:
        listed = tuple(values)
    except Exception:
        raise InvalidArgument(f"{name} = {shown(values)}, expected a tuple of integers") from None
    return tuple(integer(f"{name}[{axis}]", value) for axis, value in enumerate(listed))


# ------------------------------------------------------------------------------------------ DLPack

_DLPACK_DEVICES: Final = {1: "cpu", 2: "cuda", 3: "cpu"}  # 3: pinned memory, the CPU's as well

# (DLDataTypeCode, bits) -> name
_DLPACK_DTYPES: Final = {
    **{(code, bits): f"{name}{bits}" for code, name in ((0, "int"), (1, "uint"))
       for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    **{(5, bits): f"complex{bits}" for bits in (64, 128)},
    (4, 16): "bfloat16",
    (6, 8): "bool",
    (8, 8): "float8_e4m3",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
}  # fmt: skip


def capsule_of(name: str, source: Any) -> Any:
    """The capsule of `source`: versioned and without a copy where the producer can say so."""
    _dlpack_device(name, source)
    try:
        try:
            return source.__dlpack__(max_version=(1, 0), copy=False)
        except TypeError:  # a producer older than DLPack 1.0 takes neither argument
            return source.__dlpack__()
    except Exception as error:
        raise InvalidArgument(
            f"{name} ({type(source).__name__:.60}) cannot be shared through DLPack: "
            f"{first_line(error)}"
        ) from error


def _dlpack_device(name: str, source: Any) -> tuple[int, Any]:
    """Its device's type, one that kernels know, and the index that it gives."""
    try:
        device_type, index = source.__dlpack_device__()
        device_type = operator.index(device_type)
    except Exception as error:
        raise InvalidArgument(
            f"{name}.__dlpack_device__() does not give (device type, index): {first_line(error)}"
        ) from None
    _check_device_type(name, device_type)
    return device_type, index


def _check_device_type(name: str, device_type: int) -> None:
    if device_type not in _DLPACK_DEVICES:
        raise Unsupported(
            f"{name} is on DLPack device type {shown(device_type)}, expected 1 (CPU) or 2 (CUDA)"
        )


def read_once(name: str, array: Any) -> Any:
    """`array` itself; of an object that shares its memory through DLPack a NumPy array of it. Such
    an object may share something else each time that it is asked.
    """
    if isinstance(array, Spec) or classify(name, array) != 4:
        return array
    device_type, index = _dlpack_device(name, array)
    if _DLPACK_DEVICES[device_type] != "cpu":
        refuse_device(name, index)
    try:
        return np.from_dlpack(array)
    except Exception as error:
        # NumPy takes no bfloat16 and no float8 that way; JAX's arrays are ml_dtypes' to it.
        if _is_of_jax(array):
            with suppress(Exception):
                return np.asarray(array)
        raise cannot_be_read(name, array, error) from None


def refuse_device(name: str, index: Any) -> None:
    """For a GPU: whose stream to wait for, and who allocates results, is known for PyTorch only."""
    raise Unsupported(
        f"{name} is on cuda:{shown(index)} and comes through DLPack, "
        f"expected a torch.Tensor: torch.from_dlpack makes one that shares its memory"
    )


def refuse_capsule(name: str, capsule: Any) -> None:
    """For what __dlpack__ gave and is none."""
    raise InvalidArgument(
        f"{name}.__dlpack__() gave {shown(capsule)}, "
        "expected a capsule named dltensor or dltensor_versioned"
    )


def shared_spec(
    name: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    code: int,
    bits: int,
    lanes: int,
    device_type: int,
    device_index: int,
) -> Spec:
    """What _core found in a capsule, where it is not what kernels take."""
    _check_device_type(name, device_type)
    device = _DLPACK_DEVICES[device_type]
    if device != "cpu":
        refuse_device(name, device_index)
    dtype = _DLPACK_DTYPES.get((code, bits), f"DLPack({code}, {bits} bits)")
    if lanes != 1:
        dtype += f"x{lanes}"
    return Spec(SHARED, shape, strides, dtype, device, 0)
