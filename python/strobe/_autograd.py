"""Derivatives of operators, as autograd and torch.func's transforms ask for them, compiled or not.

torch.library.register_autograd does this for autograd alone: under torch.func.grad, vjp or jacrev
PyTorch refuses the function that it makes, as it takes it for one that a user called across all
levels of transforms. Here it is called by the dispatcher, of the tensors of one level.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from ._compiler import only_within
from ._errors import Unsupported

Tensor: TypeAlias = torch.Tensor


def is_transformed() -> bool:
    """Whether torch.func's transforms (vmap, grad) are at work."""
    return torch._C._functorch.maybe_current_level() is not None


def differentiates_forward() -> bool:
    """Whether forward-mode differentiation is at work."""
    return bool(forward_ad._current_level >= 0)


def refuse_tangents(*tensors: Tensor | None) -> None:
    """PyTorch itself would drop them without a word."""
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise Unsupported(
            "forward-mode differentiation of attention is not supported: use backward-mode, or "
            "plain tensor operations"
        )


def kernel(operator: Any, gradient: Any, keep: Any) -> Any:
    """The operator's kernel for the dispatch key Autograd, which is called with the dispatcher's
    keys. gradient: of the context and the results' gradients, gives those of all arguments; keep:
    of the context, the arguments without those at the end that were left to their defaults, and
    the results, saves what `gradient` needs; None: nothing.
    """

    def below(keys: Any, inputs: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keys & torch._C._after_autograd_keyset, *inputs)

    class Recorded(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, keys: Any, *inputs: Any) -> Any:
            # autograd computes without gradients; the level below is another one.
            with torch.set_grad_enabled(is_transformed()):
                output = below(keys, inputs)
            if keep is not None:
                keep(ctx, inputs, output)
            return output

        @staticmethod
        @only_within  # autograd calls it from what was compiled, too
        def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            return (None, *gradient(ctx, *gradients))

    # Without what torch.autograd.Function puts before it for transforms.
    record_level = super(torch.autograd.Function, Recorded).apply

    def autograd(keys: Any, *inputs: Any) -> Any:
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if differentiates_forward():
            refuse_tangents(*tensors)
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return below(keys, inputs)
        if not is_transformed():
            return Recorded.apply(keys, *inputs)
        with enable_single_level_autograd_function():
            return record_level(keys, *inputs)

    return autograd
