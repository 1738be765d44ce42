"""PyTorch's tensors that are none to read: nested, sparse, fake, negated, freed, ...

Their type is torch.Tensor like any other's, and what PyTorch says of them ranges from a wrong
address to an "Internal error". Here each kind has a message. Only on the way to an error does any
of this run.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from ._errors import InvalidArgument, Unsupported

# No memory of a 64-bit process need be looked into below this: a tensor without memory has its
# offset for an address. Where memory does begin lower (a Python that is not position-independent),
# `has_memory` looks closer.
LOW: Final = 1 << 32


class Unreadable(Exception):
    """Of a tensor whose name is not known where this is found; `check_readable` says it then."""


def has_memory(x: Any) -> bool:
    """Whether the address of `x`, a dense tensor, is more than an offset into no memory."""
    # A storage that was freed, a fake or a wrapper's: its address is NULL.
    return bool(x.numel() == 0 or x.data_ptr() != x.storage_offset() * x.element_size())


def check_dense(name: str, x: Any) -> None:
    """Refuses the layouts that have no strides."""
    torch = sys.modules["torch"]
    if x.is_nested:
        raise InvalidArgument(
            f"{name} is a nested tensor, expected a dense one: pack its sequences end to end and "
            "pass cu_seqlens_q and cu_seqlens_k (flash_attn_varlen_func), or pad them"
        )
    if x.layout is not torch.strided:
        raise InvalidArgument(
            f"{name}.layout = {x.layout}, expected torch.strided: pass {name}.to_dense()"
        )


def check_sign(name: str, x: Any) -> None:
    """Refuses a tensor whose memory holds its negative: `x.conj().imag`, say."""
    if x.is_neg():
        raise InvalidArgument(
            f"{name} has its negative bit set, so that its memory holds -{name}: pass "
            f"{name}.resolve_neg()"
        )


def check_device(name: str, x: Any) -> None:
    """Refuses devices without kernels, and those without memory (meta)."""
    if x.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"{name} is on {x.device}, expected a cpu or cuda tensor")


def check_readable(name: str, x: Any) -> None:
    """Refuses what has no elements in memory, or others there than it stands for."""
    check_dense(name, x)
    check_sign(name, x)
    check_device(name, x)
    try:
        readable = has_memory(x)
    except Exception:
        readable = False
    if not readable:
        raise InvalidArgument(f"{name} is a {_kind(x)}, expected one that has memory")


def _kind(x: Any) -> str:
    torch = sys.modules["torch"]
    if x._is_zerotensor():
        return "zero tensor of PyTorch's"
    if type(x).__name__ == "FakeTensor" or torch._is_functional_tensor(x):
        return "fake tensor (torch.compile, export)"
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return "tensor of torch.func (vmap, grad)"
    if type(x) in (torch.Tensor, torch.nn.Parameter):
        return "tensor whose storage was freed"
    return f"tensor of type {type(x).__name__}"


def first_line(error: BaseException) -> str:
    """Of somebody else's message."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:
        text = ""
    return text or type(error).__name__
