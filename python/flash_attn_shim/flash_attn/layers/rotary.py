"""Rotary position embeddings: J. Su et al., "RoFormer", arXiv:2104.09864, section 3.2.2."""

from __future__ import annotations

from typing import TypeAlias

import torch

__all__ = ["apply_rotary_emb"]

Tensor: TypeAlias = torch.Tensor


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates pairs of the first rotary_dim entries of each head by angles of the row's position.

    (a, b) becomes (a cos - b sin, a sin + b cos), in float32, rounded once to x's dtype.

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens.
        cos, sin: (seqlen_rotary, rotary_dim / 2); rotary_dim is at most head_dim.
        interleaved: pairs are (0, 1), (2, 3)...; else the halves, (0, rotary_dim / 2)...
        inplace: write into x, and return it.
        seqlen_offsets: what to add to each position, one for all or int (batch,).
        cu_seqlens: int32, (batch + 1,): where packed sequences begin and the last one ends.
        max_seqlen: the longest of them; not needed here.

    Returns:
        x rotated, in x's shape and dtype; differentiable.

    Raises:
        ValueError: shapes that do not fit together.
        IndexError: a position past seqlen_rotary.
    """
    half = cos.shape[-1]
    if cos.shape != sin.shape or cos.ndim != 2:
        raise ValueError(
            f"cos.shape = {tuple(cos.shape)} and sin.shape = {tuple(sin.shape)}, expected both "
            "(seqlen_rotary, rotary_dim / 2)"
        )
    if x.ndim != (4 if cu_seqlens is None else 3):
        raise ValueError(
            f"x.ndim = {x.ndim}, expected 4: (batch, seqlen, heads, head_dim), "
            "or 3 with cu_seqlens: (total, heads, head_dim)"
        )
    if 2 * half > x.shape[-1]:
        raise ValueError(f"rotary_dim = {2 * half}, expected at most head_dim = {x.shape[-1]}")

    if cu_seqlens is None and isinstance(seqlen_offsets, int):
        longest = x.shape[1] + seqlen_offsets
        if longest > cos.shape[0]:
            raise IndexError(
                f"cos.shape[0] = {cos.shape[0]}, expected at least seqlen + seqlen_offsets "
                f"= {longest}"
            )
    position = _positions(x, seqlen_offsets, cu_seqlens)  # others are checked by the look-up
    # (batch, seqlen, 1, half) or (total, 1, half): the same for all heads
    c, s = (table[position].float().unsqueeze(-2) for table in (cos, sin))
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = rotary.float().unflatten(-1, (half, 2)).unbind(-1)
        turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = rotary.float().chunk(2, -1)
        turned = torch.cat((a * c - b * s, a * s + b * c), -1)
    turned = turned.to(x.dtype)
    if inplace:
        rotary.copy_(turned)
        return x
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def _positions(x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """int64, (1 or batch, seqlen), with cu_seqlens (total,)."""
    rows = x.shape[-3]
    index = torch.arange(rows, device=x.device)
    if cu_seqlens is None:
        if isinstance(seqlen_offsets, torch.Tensor):
            return index + seqlen_offsets.to(x.device).unsqueeze(-1)
        return (index + seqlen_offsets).unsqueeze(0)
    starts = cu_seqlens.long()
    sequence = torch.searchsorted(starts, index, right=True) - 1
    offsets = seqlen_offsets
    if isinstance(offsets, torch.Tensor):
        offsets = offsets.to(x.device)[sequence]
    return index - starts[sequence] + offsets
