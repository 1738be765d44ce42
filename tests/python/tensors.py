"""PyTorch tensors for the tests: inputs of cases.Case as arguments of strobe.flash_attn.

Imported by tests that need PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

import strobe
from strobe import _operators, flash_attn

import cases
from cases import Array, Case, Inputs

Tensor: TypeAlias = torch.Tensor


def tensor(array: Array, device: str = "cpu") -> Tensor:
    """A copy of an array; bfloat16 by way of its bits."""
    if array.dtype.name == "bfloat16":
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.tensor(array).to(device)


def array(x: Tensor) -> Array:
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        found: Array = x.view(torch.int16).numpy().view(cases.DTYPES["bfloat16"])
        return found
    numbers: Array = x.numpy()
    return numbers


class OnGpu(torch.Tensor):  # type: ignore[misc]
    """A tensor in the CPU's memory that says it is on a GPU. `asked` are the functions by which
    somebody has asked what such a tensor holds: for each of them a GPU would be waited for.
    """

    is_cuda = True
    is_cpu = False
    asked: ClassVar[list[str]] = []
    ASK: ClassVar = {
        "__bool__", "__contains__", "__float__", "__index__", "__int__", "cpu", "equal", "item",
        "is_nonzero", "masked_select", "nonzero", "numpy", "tolist", "unique",
    }  # fmt: skip

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in cls.ASK:
            cls.asked.append(name)
        return super().__torch_function__(function, types, args, kwargs or {})


def assert_same(a: Tensor, b: Tensor) -> None:
    """Bit for bit on the CPU; on a GPU gradients may be summed in another order each time."""
    if a.is_cuda:
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    else:
        assert torch.equal(a, b)


@dataclass(frozen=True)
class Function:
    """One function of strobe.flash_attn, called with q, k and v packed as it wants them."""

    call: Callable[..., Any]
    varlen: bool
    packed: str  # "", "qkv" or "kv"

    def pack(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        axis = 1 if self.varlen else 2
        if self.packed == "qkv":
            return [torch.stack((q, k, v), axis)]
        if self.packed == "kv":
            return [q, torch.stack((k, v), axis)]
        return [q, k, v]

    def unpack(self, tensors: list[Tensor]) -> list[Tensor]:
        axis = 1 if self.varlen else 2
        if self.packed == "qkv":
            return list(tensors[0].unbind(axis))
        if self.packed == "kv":
            return [tensors[0], *tensors[1].unbind(axis)]
        return tensors

    def case(self, **changes: Any) -> Case:
        """A small case that this function can take."""
        case = Case(**changes)
        if self.packed == "qkv":
            case.heads_kv, case.seqlen_k = case.heads, case.seqlen_q
        if self.packed:
            case.head_dim_v = case.head_dim
        if self.varlen:
            case.batch, case.cu_q, case.cu_k = 3, [0, 9, 9, 46], [0, 20, 31, 60]
            if self.packed == "qkv":
                case.cu_k = case.cu_q
        return case

    def arguments(self, inputs: Inputs, device: str) -> tuple[list[Tensor], dict[str, Any]]:
        """Tensors and options of a call."""
        tensors = self.pack(*(tensor(x, device) for x in (inputs.q, inputs.k, inputs.v)))
        names = {"window": "window_size", "scale": "softmax_scale"}
        skipped = ("cu_seqlens_q", "cu_seqlens_k", "dropout_seed", "dropout_offset")
        options = {
            names.get(name, name): tensor(value, device) if isinstance(value, np.ndarray) else value
            for name, value in inputs.options.items()
            if name not in skipped
        }
        if self.varlen:
            cu_q, cu_k = inputs.options["cu_seqlens_q"], inputs.options["cu_seqlens_k"]
            longest_q, longest_k = int(np.diff(cu_q).max()), int(np.diff(cu_k).max())
            if self.packed == "qkv":
                options |= {"cu_seqlens": tensor(cu_q, device), "max_seqlen": longest_q}
            else:
                options |= {
                    "cu_seqlens_q": tensor(cu_q, device),
                    "cu_seqlens_k": tensor(cu_k, device),
                    "max_seqlen_q": longest_q,
                    "max_seqlen_k": longest_k,
                }
        return tensors, options


FUNCTIONS: dict[str, Function] = {
    "dense": Function(flash_attn.flash_attn_func, False, ""),
    "qkvpacked": Function(flash_attn.flash_attn_qkvpacked_func, False, "qkv"),
    "kvpacked": Function(flash_attn.flash_attn_kvpacked_func, False, "kv"),
    "varlen": Function(flash_attn.flash_attn_varlen_func, True, ""),
    "varlen-qkvpacked": Function(flash_attn.flash_attn_varlen_qkvpacked_func, True, "qkv"),
    "varlen-kvpacked": Function(flash_attn.flash_attn_varlen_kvpacked_func, True, "kv"),
}


def seed_dropout(inputs: Inputs, device: str, seed: int = 11) -> None:
    """Seeds PyTorch, and tells `inputs` which seed and offset the next call will draw."""
    torch.manual_seed(seed)
    state = _operators.draw_dropout_state(device=torch.device(device))
    inputs.options["dropout_seed"], inputs.options["dropout_offset"] = _operators.seed_and_offset(
        state
    )
    torch.manual_seed(seed)


def takes(inputs: Inputs, device: str) -> bool:
    """Whether the device has kernels for this case (no fp32 and, so far, no dropout on GPUs)."""
    if device == "cpu":
        return True
    q, k, v = (
        strobe.ArraySpec(x.shape, x.dtype.name, device) for x in (inputs.q, inputs.k, inputs.v)
    )
    options: dict[str, Any] = {"dropout_p": inputs.options.get("dropout_p", 0.0)}
    if "cu_seqlens_q" in inputs.options:
        batch_plus_1 = (len(inputs.options["cu_seqlens_q"]),)
        for side in "qk":
            options[f"cu_seqlens_{side}"] = strobe.ArraySpec(batch_plus_1, "int32", device)
            options[f"max_seqlen_{side}"] = 64
    try:
        for backward in (False, True):
            strobe.plan(q, k, v, backward=backward, **options)
    except strobe.Unsupported:
        return False
    return True
