"""Rotary position embeddings: J. Su et al., "RoFormer", arXiv:2104.09864, section 3.2.2.

In plain tensor operations, on any device, and differentiable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from ... import _absent

__all__ = ["apply_rotary"]

Tensor: TypeAlias = torch.Tensor


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotates pairs of the first rotary_dim entries of each head by angles of the row's position.

    (a, b) becomes (a cos - b sin, a sin + b cos), in float32, rounded once to x's dtype. Rows whose
    position is not in the table, and those behind the last sequence, stay as they are.

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens.
        cos, sin: (seqlen_rotary, rotary_dim / 2); rotary_dim is at most head_dim.
        seqlen_offsets: what to add to each position, one for all or int (batch,).
        cu_seqlens: int32, (batch + 1,): where packed sequences begin and the last one ends.
        max_seqlen: the longest of them; not needed here.
        interleaved: pairs are (0, 1), (2, 3)...; else the halves, (0, rotary_dim / 2)...
        inplace: write into x, and return it.
        conjugate: rotate back.

    Returns:
        x rotated, in x's shape and dtype.

    Raises:
        ValueError: shapes that do not fit together.
        IndexError: seqlen_offsets is an int, and leads past seqlen_rotary.

    Example:
        >>> import torch
        >>> from flash_attn.ops.triton.rotary import apply_rotary
        >>> angles = torch.outer(torch.arange(10.0), 10000 ** -(torch.arange(0, 64, 2) / 64))
        >>> x = torch.randn(2, 10, 4, 64)
        >>> turned = apply_rotary(x, angles.cos(), angles.sin())
        >>> back = apply_rotary(turned, angles.cos(), angles.sin(), conjugate=True)
        >>> torch.allclose(back, x, atol=1e-5)
        True
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
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if isinstance(seqlen_offsets, torch.Tensor):
        integers = not (seqlen_offsets.is_floating_point() or seqlen_offsets.is_complex())
        if not integers or seqlen_offsets.shape != (batch,):
            raise ValueError(
                f"seqlen_offsets is {seqlen_offsets.dtype} {tuple(seqlen_offsets.shape)}, expected "
                f"integers ({batch},): one for each sequence"
            )

    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    turned = _turned(
        rotary,
        cos,
        sin,
        *_positions(x, cos.shape[0], seqlen_offsets, cu_seqlens),
        interleaved,
        conjugate,
    )
    if inplace:
        rotary.copy_(turned)
        return x
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def _turned(
    rotary: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    inside: Tensor | None,
    interleaved: bool,
    conjugate: bool,
) -> Tensor:
    """All of `rotary` rotated. inside: which positions are there; None: all."""
    if inside is not None:
        if not len(cos):
            return rotary.clone()
        position = position.clamp(0, len(cos) - 1)
    # (batch, seqlen, 1, half) or (total, 1, half): the same for all heads
    c, s = (table[position].float().unsqueeze(-2) for table in (cos, sin))
    if conjugate:
        s = -s
    if interleaved:
        a, b = rotary.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = rotary.float().chunk(2, -1)
        turned = torch.cat((a * c - b * s, a * s + b * c), -1)
    turned = turned.to(rotary.dtype)
    return turned if inside is None else torch.where(inside[..., None, None], turned, rotary)


def _positions(
    x: Tensor, longest: int, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """int64, (1 or batch, seqlen), with cu_seqlens (total,), and which of them are in the table.

    None for the latter: all. The numbers of tensors are on the device, and stay there.
    """
    rows = x.shape[-3]
    index = torch.arange(rows, device=x.device)
    offsets = seqlen_offsets
    if isinstance(offsets, torch.Tensor):
        offsets = offsets.to(x.device).long()
    if cu_seqlens is None:
        if isinstance(offsets, torch.Tensor):
            position = index + offsets.unsqueeze(-1)
        else:
            if rows + offsets > longest:
                raise IndexError(
                    f"cos.shape[0] = {longest}, expected at least seqlen + seqlen_offsets "
                    f"= {rows + offsets}"
                )
            position = (index + offsets).unsqueeze(0)
            if offsets >= 0:
                return position, None
        return position, (position >= 0) & (position < longest)
    starts = cu_seqlens.to(x.device).long()
    if len(starts) < 2:  # no sequence
        return index, torch.zeros_like(index, dtype=torch.bool)
    sequence = torch.searchsorted(starts, index, right=True) - 1
    known = (sequence >= 0) & (sequence < len(starts) - 1)
    sequence = sequence.clamp(0, len(starts) - 2)
    if isinstance(offsets, torch.Tensor):
        offsets = offsets[sequence]
    position = index - starts[sequence] + offsets
    return position, known & (position >= 0) & (position < longest)


if not TYPE_CHECKING:
    __getattr__ = _absent.attribute(__name__, __all__)
