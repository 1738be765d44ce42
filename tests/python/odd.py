"""Odd tensors and odd values: what a caller may hand over by mistake, for `fuzz`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import strobe

from producer import Producer

Make = Callable[[random.Random, Any], Any]

# ------------------------------------------------------------------------------------ odd tensors


class Subclass(torch.Tensor):  # type: ignore[misc]
    """Ordinary."""


class Wrapper(torch.Tensor):  # type: ignore[misc]
    """No memory of its own, and no operators."""

    @staticmethod
    def __new__(cls: Any, x: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return NotImplemented


class Lies(np.ndarray[Any, Any]):
    """Says that it is larger than it is."""

    @property  # type: ignore[misc]
    def shape(self) -> Any:
        return tuple(1000 * n for n in super().shape)


class Broken:
    """Raises at whatever is asked."""

    def _raise(self, *arguments: Any, **named: Any) -> Any:
        raise RuntimeError("x" * 5000)

    __float__ = __index__ = __bool__ = __iter__ = __len__ = __dlpack__ = __dlpack_device__ = _raise
    __repr__ = _raise
    shape = property(_raise)


class LongName:
    """Its repr has a megabyte."""

    def __repr__(self) -> str:
        return "é" * 1_000_000


LongName.__name__ = "L" * 5000


def freed(x: Any) -> Any:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def freed_slice(x: Any) -> Any:
    """At an offset into no memory."""
    whole = torch.cat([x, x]) if x.ndim else x.expand(4).clone()
    part = whole[whole.shape[0] // 2 :]
    whole.untyped_storage().resize_(0)
    return part


def fake(x: Any) -> Any:
    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype)


def fake_slice(x: Any) -> Any:
    with FakeTensorMode():
        return torch.empty((2 * x.shape[0], *x.shape[1:]), dtype=x.dtype)[x.shape[0] :]


def with_axis(x: Any, axis: int, length: int) -> Any:
    shape = list(x.shape)
    shape[axis] = length
    return torch.zeros(shape, dtype=x.dtype)


def huge(x: Any, axis: int) -> Any:
    """More rows than any kernel counts, all of them the first."""
    return x.narrow(axis, 0, 1).expand([2**40 if a == axis else -1 for a in range(x.ndim)])


TENSORS: dict[str, Make] = {
    "nested": lambda r, x: torch.nested.nested_tensor(list(x.unbind(0))),
    "jagged": lambda r, x: torch.nested.nested_tensor(list(x.unbind(0)), layout=torch.jagged),
    "coo": lambda r, x: x.to_sparse(),
    "csr": lambda r, x: x.reshape(x.shape[0], -1).to_sparse_csr(),
    "mkldnn": lambda r, x: x.float().to_mkldnn(),
    "quantised": lambda r, x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "meta": lambda r, x: x.to("meta"),
    "fake": lambda r, x: fake(x),
    "fake slice": lambda r, x: fake_slice(x),
    "subclass": lambda r, x: x.as_subclass(Subclass),
    "wrapper": lambda r, x: Wrapper(x),
    "masked": lambda r, x: torch.masked.masked_tensor(x, torch.ones_like(x, dtype=torch.bool)),
    "negative bit": lambda r, x: torch._neg_view(x),
    "conjugate": lambda r, x: x.to(torch.complex64).conj(),
    "imaginary": lambda r, x: x.to(torch.complex64).conj().imag,
    "zero tensor": lambda r, x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "freed": lambda r, x: freed(x),
    "freed slice": lambda r, x: freed_slice(x),
    "batched": lambda r, x: torch._C._functorch._add_batch_dim(x[None], 0, 1),
    "functional": lambda r, x: torch._to_functional_tensor(x),
    "uninitialised": lambda r, x: torch.nn.UninitializedParameter(),
    "parameter": lambda r, x: torch.nn.Parameter(x, requires_grad=x.is_floating_point()),
    "gradient": lambda r, x: x.clone().float().requires_grad_(),
    "dtype": lambda r, x: x.to(
        r.choice([torch.float64, torch.int64, torch.bool, torch.float16, torch.float8_e5m2])
    ),
    "rank": lambda r, x: r.choice([x[0], x[None], x.reshape(-1), x.reshape(-1)[0]]),
    "empty axis": lambda r, x: with_axis(x, r.randrange(x.ndim), 0),
    "longer axis": lambda r, x: with_axis(x, r.randrange(x.ndim), r.choice([7, 300])),
    "swapped axes": lambda r, x: x.transpose(0, -1) if x.ndim < 3 else x.transpose(-2, -3),
    "huge axis": lambda r, x: huge(x, r.randrange(x.ndim)) if x.numel() else x,
    "broadcast": lambda r, x: torch.zeros((), dtype=x.dtype).expand(x.shape),
    "strided": lambda r, x: torch.stack([x, x], -1)[..., 0],
    "numpy": lambda r, x: x.numpy(),
    "reversed": lambda r, x: np.flip(x.numpy(), r.randrange(x.ndim)),
    "masked array": lambda r, x: np.ma.masked_array(x.numpy()),
    "lies": lambda r, x: x.numpy().view(Lies),
    "read-only": lambda r, x: np.broadcast_to(x.numpy()[:1], x.shape),
    "byte order": lambda r, x: x.numpy().astype(x.numpy().dtype.newbyteorder()),
    "objects": lambda r, x: x.numpy().astype(object),
    "fields": lambda r, x: np.zeros(x.shape, [("a", "f4"), ("b", "i4")]),
    "unaligned": lambda r, x: (
        np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.numpy().dtype).reshape(x.shape)
    ),
    "list": lambda r, x: x.tolist(),
    "spec": lambda r, x: odd_spec(r, tuple(x.shape)),
    "dlpack": lambda r, x: odd_producer(r, x.numpy()),
}


def odd_spec(r: random.Random, shape: tuple[int, ...]) -> Any:
    return r.choice(
        [
            strobe.ArraySpec(shape),
            strobe.ArraySpec((2**64 + 2, *shape[1:])),
            strobe.ArraySpec((*shape[:-1], -1)),
            strobe.ArraySpec(3),  # type: ignore[arg-type]
            strobe.ArraySpec(shape, strides=(2**64,) * len(shape)),
            strobe.ArraySpec(shape, strides=(0,) * len(shape)),
            strobe.ArraySpec(shape, strides=(1.5, None)),  # type: ignore[arg-type]
            strobe.ArraySpec(shape, device="cuda:" + "9" * 5000),
            strobe.ArraySpec(shape, device="cuda:1023"),
            strobe.ArraySpec(shape, device=7),  # type: ignore[arg-type]
            strobe.ArraySpec(shape, dtype=["float32"]),  # type: ignore[arg-type]
            strobe.ArraySpec(shape, dtype="f" * 10_000),
        ]
    )


def odd_producer(r: random.Random, array: Any) -> Any:
    if array.dtype.name not in ("float32", "int32"):
        array = array.astype(np.float32)
    producer = Producer(
        array,
        r.choice([None, (1, 0), (2, 0)]),
        flags=r.choice([0, 1, 2]),
        offset=r.choice([0, 4, 2**62]),
        null_strides=r.random() < 0.5,
        lanes=r.choice([1, 1, 4]),
    )
    odd = r.choice([(1, 0), (1, 0), (1, 2**31 - 1), (2, 0), (2**64 + 1, 0), None, 3, ("x", "y")])
    producer.__class__ = r.choice([Producer, OddDevice])
    producer.odd = odd  # type: ignore[attr-defined]
    return producer


class OddDevice(Producer):
    """With a __dlpack_device__ that says something else, or nothing."""

    def __dlpack_device__(self) -> Any:
        if self.odd is None:  # type: ignore[attr-defined]
            raise OSError("no device today")
        return self.odd  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------ layouts


def _padded(r: random.Random, x: Any) -> Any:
    """With other numbers behind each row, at an odd address."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + r.randint(1, 9)), 9, dtype=x.dtype)
    first = r.randint(0, wide.shape[-1] - x.shape[-1])
    return wide[..., first : first + x.shape[-1]].copy_(x)


def _apart(r: random.Random, x: Any) -> Any:
    """With other rows between."""
    axis, step = r.randrange(x.ndim), r.randint(2, 3)
    shape = [n * step if a == axis else n for a, n in enumerate(x.shape)]
    rows = [slice(None)] * axis + [slice(0, None, step)]
    return torch.full(shape, 9, dtype=x.dtype)[tuple(rows)].copy_(x)


def _turned(r: random.Random, x: Any) -> Any:
    """With its axes in another order in memory."""
    order = r.sample(range(x.ndim), x.ndim)
    back = [order.index(a) for a in range(x.ndim)]
    return x.permute(order).contiguous().permute(back)


def _odd_steps(r: random.Random, x: Any) -> Any:
    """Axes of one element may have any stride."""
    both = zip(x.shape, x.stride(), strict=True)
    steps = [r.choice([0, 1, 3, 2**20]) if n == 1 else step for n, step in both]
    return x.as_strided(x.shape, steps)


# The same numbers, elsewhere.
LAYOUTS: dict[str, Make] = {
    "padded": _padded,
    "apart": _apart,
    "turned": _turned,
    "odd steps": _odd_steps,
}

# ------------------------------------------------------------------------------------- late changes

# What becomes of a tensor, in place, while a call reads another.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "longer": lambda x: x.resize_(x.shape[0], 4000, *x.shape[2:]),
    "freed": lambda x: x.untyped_storage().resize_(0),
    "moved": lambda x: x.set_(torch.zeros_like(x)),
    "turned": lambda x: x.t_() if x.ndim == 2 else x.transpose_(0, -2),
    "strided": lambda x: x.as_strided_(x.shape, (0,) * (x.ndim - 1) + (1,)),
}


class LateTensor(torch.Tensor):  # type: ignore[misc]
    """Does something when it is asked anything, once."""

    change: Callable[[], Any] | None = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for x in args:
            change = x.__dict__.pop("change", None) if isinstance(x, LateTensor) else None
            if change is not None:
                change()
        return super().__torch_function__(function, types, args, kwargs or {})


class NewTensors(TorchFunctionMode):  # type: ignore[misc]
    """Gives `made(result)` in the place of each new tensor, as a mode for a dtype does."""

    def __init__(self, made: Callable[[Any], Any]) -> None:
        super().__init__()
        self.made = made

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        return self.made(found) if "empty" in getattr(function, "__name__", "") else found


class NewTensorsBelow(TorchDispatchMode):  # type: ignore[misc]
    """The same beneath PyTorch's dispatcher."""

    def __init__(self, made: Callable[[Any], Any]) -> None:
        super().__init__()
        self.made = made

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        return self.made(found) if "empty" in str(function) else found


# What such a mode makes of a new tensor.
MADE: dict[str, Callable[[Any], Any]] = {
    "half": lambda x: x.half(),
    "double": lambda x: x.double(),
    "small": lambda x: x[..., :1],
    "another shape": lambda x: x.flatten(),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x.flatten()[:1].expand(x.shape) if x.numel() > 1 else x,
    "meta": lambda x: x.to("meta"),
    "negative": torch._neg_view,
    "sparse": lambda x: x.to_sparse(),
    "freed": lambda x: (x.untyped_storage().resize_(0), x)[1],
}

# ------------------------------------------------------------------------------------- odd values

VALUES: list[Callable[[], Any]] = [
    lambda: None,
    lambda: True,
    lambda: -1,
    lambda: 0,
    lambda: 3,
    lambda: 2**31,
    lambda: 2**63,
    lambda: -(2**63) - 1,
    lambda: 2**64,
    lambda: 10**400,
    lambda: 10**5000,
    lambda: 0.5,
    lambda: -0.0,
    lambda: 1.5,
    lambda: 1e-320,
    lambda: 1e300,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: 1j,
    lambda: "1",
    lambda: "é\udc80" * 100_000,
    lambda: b"\0" * 1000,
    lambda: (),
    lambda: [1],
    lambda: (1, 2),
    lambda: (-2, 0),
    lambda: (2**64, 0),
    lambda: (0.5, "x"),
    lambda: (None, None),
    lambda: list(range(1_000_000)),
    lambda: {1: 2},
    lambda: {3, 4},
    lambda: object(),
    lambda: Broken(),
    lambda: (Broken(), Broken()),
    lambda: LongName(),
    lambda: LongName,
    lambda: np.float32(0.25),
    lambda: np.int64(-7),
    lambda: np.array(1),
    lambda: np.array([1.0, 2.0]),
    lambda: np.array("x"),
    lambda: torch.tensor(2),
    lambda: torch.tensor([1.0, 2.0]),
    lambda: torch.tensor(1.0, requires_grad=True),
    lambda: freed(torch.tensor(1.0)),
    lambda: freed_slice(torch.tensor(1)),
    lambda: torch.tensor(1.0, device="meta"),
    lambda: fake(torch.tensor(1)),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: np.float32,
]
