"""From padded batches to sequences packed end to end, and back."""

from __future__ import annotations

from typing import TypeAlias

import torch

__all__ = ["index_first_axis", "pad_input", "unpad_input"]

Tensor: TypeAlias = torch.Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:  # noqa: A002 - the official name
    """Rows of a tensor.

    Args:
        input: (rows, ...).
        indices: int64 or int32, (count,).

    Returns:
        (count, ...); differentiable.
    """
    return input.index_select(0, indices)


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
    """
    used = attention_mask.bool()
    kept = used if unused_mask is None else used | unused_mask.bool()
    lengths = kept.sum(1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if len(lengths) else 0
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, max_seqlen, used.sum(1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`, with zeros where there was padding.

    Args:
        hidden_states: (total, ...).
        indices: what `unpad_input` gave, int64 or int32 (total,).
        batch, seqlen: of the result.

    Returns:
        (batch, seqlen, ...); differentiable.
    """
    rows = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return rows.index_copy(0, indices.long(), hidden_states).unflatten(0, (batch, seqlen))
