"""From padded batches to sequences packed end to end, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from . import _absent

__all__ = [
    "IndexFirstAxis",
    "IndexFirstAxisResidual",
    "IndexPutFirstAxis",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]

Tensor: TypeAlias = torch.Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:  # noqa: A002 - the official name
    """Rows of a tensor.

    Args:
        input: (rows, ...).
        indices: int64 or int32, (count,).

    Returns:
        (count, ...); differentiable.

    Example:
        >>> import torch
        >>> from flash_attn.bert_padding import index_first_axis
        >>> index_first_axis(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0]))
        tensor([[3.],
                [1.]])
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of `index_first_axis`: zeros, but for the rows `indices`.

    Args:
        values: (count, ...).
        indices: int64 or int32, (count,), each at most once.
        first_axis_dim: rows of the result.

    Returns:
        (first_axis_dim, ...); differentiable.

    Example:
        >>> import torch
        >>> from flash_attn.bert_padding import index_put_first_axis
        >>> index_put_first_axis(torch.tensor([[3.0], [1.0]]), torch.tensor([2, 0]), 4).flatten()
        tensor([1., 0., 3., 0.])
    """
    rows = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return rows.index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
    """`index_first_axis`, and its input for a residual connection around what follows.

    Example:
        >>> import torch
        >>> from flash_attn.bert_padding import index_first_axis_residual
        >>> rows, everything = index_first_axis_residual(torch.ones(3, 8), torch.tensor([2, 0]))
        >>> tuple(rows.shape), tuple(everything.shape)
        ((2, 8), (3, 8))
    """
    return index_first_axis(input, indices), input.view_as(input)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that are no padding, one sequence after the other.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: bool or int, (batch, seqlen): nonzero where there is a token.
        unused_mask: the same for places that are kept, but hold no token yet.

    Returns:
        (rows, indices, cu_seqlens, max_seqlen, seqused): the rows, (total, ...); where each stood
        in the batch of batch * seqlen rows, int64 (total,); where sequences begin and the last one
        ends, int32 (batch + 1,); the longest; and the tokens of each without the unused places,
        int32 (batch,).

    Example:
        >>> import torch
        >>> from flash_attn.bert_padding import unpad_input
        >>> mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0]])
        >>> rows, indices, cu_seqlens, max_seqlen, used = unpad_input(torch.randn(2, 4, 8), mask)
        >>> tuple(rows.shape), indices.tolist(), cu_seqlens.tolist(), max_seqlen, used.tolist()
        ((4, 8), [0, 1, 2, 5], [0, 3, 4], 3, [3, 1])
    """
    used = attention_mask.bool()
    kept = used if unused_mask is None else used | unused_mask.bool()
    packed = _packed(hidden_states, kept, kept.sum(1, dtype=torch.int32))
    return (*packed, used.sum(1, dtype=torch.int32))


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` of rows that hold several sequences, one after the other, and then padding.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: int, (batch, seqlen): the lengths of a row's sequences, in their
            order, and zeros.

    Returns:
        (rows, indices, cu_seqlens, max_seqlen), where each of those sequences is one.

    Example:
        >>> import torch
        >>> from flash_attn.bert_padding import unpad_input_for_concatenated_sequences
        >>> lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
        >>> found = unpad_input_for_concatenated_sequences(torch.randn(2, 4, 8), lengths)
        >>> tuple(found[0].shape), found[2].tolist(), found[3]
        ((6, 8), [0, 2, 3, 6], 3)
    """
    lengths = attention_mask_in_length
    position = torch.arange(lengths.shape[1], device=lengths.device)
    kept = position < lengths.sum(1, keepdim=True)
    return _packed(hidden_states, kept, lengths[lengths != 0].int())


def _packed(
    hidden_states: Tensor, kept: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if len(lengths) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`, with zeros where there was padding.

    Args:
        hidden_states: (total, ...).
        indices: what `unpad_input` gave, int64 or int32 (total,).
        batch, seqlen: of the result.

    Returns:
        (batch, seqlen, ...); differentiable.

    Example:
        >>> import torch
        >>> from flash_attn.bert_padding import pad_input
        >>> pad_input(torch.ones(2, 1), torch.tensor([0, 3]), 2, 2).flatten(1)
        tensor([[1., 0.],
                [0., 1.]])
    """
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.unflatten(0, (batch, seqlen))


# ------------------------------------------------------------------------------- autograd functions
# For code that says `.apply`, or calls forward and backward in an autograd function of its own.


class IndexFirstAxis(torch.autograd.Function):  # type: ignore[misc]
    """`index_first_axis`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, indices: Tensor) -> Tensor:  # noqa: A002
        """(count, ...)."""
        ctx.save_for_backward(indices)
        ctx.first_axis_dim = input.shape[0]
        return index_first_axis(input, indices)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Of the rows, each time that they were taken."""
        (indices,) = ctx.saved_tensors
        rows = grad_output.new_zeros((ctx.first_axis_dim, *grad_output.shape[1:]))
        return rows.index_add(0, indices, grad_output), None


class IndexPutFirstAxis(torch.autograd.Function):  # type: ignore[misc]
    """`index_put_first_axis`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
        """(first_axis_dim, ...)."""
        ctx.save_for_backward(indices)
        return index_put_first_axis(values, indices, first_axis_dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """Of the rows that were put there."""
        (indices,) = ctx.saved_tensors
        return index_first_axis(grad_output, indices), None, None


class IndexFirstAxisResidual(torch.autograd.Function):  # type: ignore[misc]
    """`index_first_axis_residual`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
        """((count, ...), input)."""
        ctx.save_for_backward(indices)
        return index_first_axis(input, indices), input.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_residual: Tensor) -> tuple[Tensor, None]:
        """The sum of both."""
        (indices,) = ctx.saved_tensors
        return grad_residual.index_add(0, indices, grad_output), None


if not TYPE_CHECKING:
    __getattr__ = _absent.attribute(__name__, __all__)
