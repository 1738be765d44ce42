"""Where a tensor stands in memory."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

ZONE = 4096  # values before and after each tensor


@dataclass(frozen=True)
class Spacing:
    """Each tensor of a problem has its own: kernels choose by what the least aligned of those that they look at allows."""

    shift: int = 0  # elements off the allocator's alignment
    pads: tuple[int, int, int] = (0, 0, 0)  # unused elements after each entry of the three outer dimensions
    odd_stride: int = 0  # of dimensions with one entry, whose stride means nothing; 0: the true one
    heads_first: bool = False  # in memory
    shared_heads: bool = False  # all heads are one, by a stride of 0: inputs alone


def draw(name: str, units: bool = False, is_input: bool = False) -> Spacing:
    """That of a tensor's name and the problem's seed. units: of 16 bytes, which TMA reads."""
    r = random.Random(name)
    if r.random() < 0.45:
        return Spacing()
    unit = 8 if units or r.random() < 0.5 else 1
    shift = unit * r.randint(1, 9) if r.random() < 0.4 else 0
    pads = [unit * r.randint(1, 3) if r.random() < 0.3 else 0 for _ in range(3)]
    odd_stride = r.choice((1, 7, 12)) if r.random() < 0.3 else 0
    shared_heads = is_input and r.random() < 0.1
    return Spacing(shift, (pads[0], pads[1], pads[2]), odd_stride, r.random() < 0.3, shared_heads)


def place(
    shape: tuple[int, ...], dtype: torch.dtype, spacing: Spacing, fill: float, device: torch.device | str, units: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of `fill`, and between red zones in it a tensor [..., rows, heads, dim]. units: rows of a head begin at
    multiples of 16 bytes."""
    if spacing.shared_heads and shape[-2] > 1:
        alone = replace(spacing, shared_heads=False)
        storage, one = place((*shape[:-2], 1, shape[-1]), dtype, alone, fill, device, units)
        return storage, one.expand(shape)
    if spacing.heads_first:
        turned = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        alone = replace(spacing, heads_first=False, shared_heads=False)
        storage, view = place(turned, dtype, alone, fill, device, units)
        return storage, view.transpose(-3, -2)
    strides, span = [1], shape[-1]
    for size, pad in zip(reversed(shape[:-1]), [*reversed(spacing.pads), 0], strict=False):
        span += pad
        if units and len(strides) == 1:
            span = (span + 7) // 8 * 8
        strides.insert(0, spacing.odd_stride if size == 1 and spacing.odd_stride else span)
        span *= size
    storage = torch.full((2 * ZONE + spacing.shift + span,), fill, dtype=dtype, device=device)
    return storage, storage.as_strided(shape, strides, ZONE + spacing.shift)
