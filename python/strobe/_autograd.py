"""Derivatives of operators, as autograd and torch.func's transforms ask for them, compiled or not.

torch.library.register_autograd does this for autograd alone: under torch.func.grad, vjp or jacrev
PyTorch refuses the function that it makes, as it takes it for one that a user called across all
levels of transforms. Here it is called by the dispatcher, of the tensors of one level.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from ._compiler import only_within
from ._errors import Unsupported

Tensor: TypeAlias = torch.Tensor


def is_transformed() -> bool:
    """Whether torch.func's transforms (vmap, grad) are at work."""
    return torch._C._functorch.maybe_current_level() is not None


# An older PyTorch does not tell.
_is_batched: Final = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: False)


def are_batched(dout: Tensor | None, dlse: Tensor | None = None) -> bool:
    """Whether these stand for many gradients, as torch.autograd.grad's is_grads_batched makes them,
    whose vmap is not torch.func's: for operators PyTorch takes one after the other.
    """
    if dout is not None and _is_batched(dout):
        return True
    return dlse is not None and bool(_is_batched(dlse))


def refuse_batched(dout: Tensor | None, dlse: Tensor | None = None) -> None:
    """Where a derivative is no operator that PyTorch could call so."""
    if are_batched(dout, dlse):
        raise Unsupported(
            "many gradients at once (is_grads_batched=True, vectorize=True) of "
            "scaled_dot_product_attention, or of attention with sinks or a bias that has a "
            "gradient, are not supported: ask for one after the other, or use torch.func"
        )


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
            # A list would pass for a value of its own, in which autograd looks for no tensors.
            return tuple(output) if isinstance(output, list) else output

        @staticmethod
        @only_within  # autograd calls it from what was compiled, too
        def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            return (None, *gradient(ctx, *gradients))

    gives_list = [x.type.kind() for x in operator._schema.returns] == ["ListType"]

    def as_schema(output: Any) -> Any:
        return list(output) if gives_list else output

    # Without what torch.autograd.Function puts before it for transforms.
    record_level = super(torch.autograd.Function, Recorded).apply

    def autograd(keys: Any, *inputs: Any) -> Any:
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if differentiates_forward():
            refuse_tangents(*tensors)
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return below(keys, inputs)
        if not is_transformed():
            return as_schema(Recorded.apply(keys, *inputs))
        with enable_single_level_autograd_function():
            return as_schema(record_level(keys, *inputs))

    return autograd
