"""What each call of the library gets, over ranks, of what is said of every row of the whole:
lengths in use, and masks as data.

A call has some of a rank's rows as queries, and as keys rows of the rank itself or of what it
received. Both ascend in the whole, row by row, though not without gaps. So of the rows in use,
which are the first ones of a sequence, a call has its first ones; and an interval of the whole's
keys is an interval of the call's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from . import _ring, masks
from ._arrays import NDArray
from ._errors import InvalidArgument, Unsupported, shown
from ._flash_attn import as_integer
from ._packed_mask import from_intervals
from ._ring import Lengths, Order, Rows

Tensor: TypeAlias = torch.Tensor
Used: TypeAlias = tuple[int, ...]  # of each sequence of a batch, or of packed ones


@lru_cache(maxsize=64)
def rows_held(
    lengths: Lengths, ranks: int, rank: int, order: Order, pieces: tuple[Rows, ...] | None
) -> NDArray:
    """Which rows of all sequences a rank's are, or of these pieces those in them."""
    found = _ring.chunks(lengths, ranks, rank, order)
    held = np.concatenate([np.arange(0), *(np.arange(x.begin, x.end) for x in found)])
    if pieces is not None:
        held = np.concatenate([np.arange(0), *(held[x.begin : x.end] for x in pieces)])
    held.flags.writeable = False
    return held


# --------------------------------------------------------------------------------- lengths in use


def used_lengths(seqused: Any, lengths: Lengths, batch: int | None) -> Used | None:
    """Checked. batch: how many sequences of lengths[0] rows there are; None: they are packed."""
    if seqused is None:
        return None
    if isinstance(seqused, torch.Tensor):
        if seqused.device.type != "cpu":
            raise InvalidArgument(
                f"seqused is on {seqused.device}, expected it in the CPU's memory: what a rank has "
                "of each sequence follows from its numbers"
            )
        seqused = seqused.tolist()
    try:
        found = tuple(as_integer("seqused", x) for x in seqused)
    except TypeError:
        raise InvalidArgument(
            f"seqused = {shown(seqused)}, expected a sequence of integers"
        ) from None
    most = lengths if batch is None else lengths * batch
    if len(found) != len(most):
        raise InvalidArgument(
            f"seqused has {len(found)} numbers, expected {len(most)}: one of each sequence"
        )
    for number, length in zip(found, most, strict=True):
        if not 0 <= number <= length:
            raise InvalidArgument(f"seqused has {number}, expected 0 to {length}: the sequence's")
    return found


@lru_cache(maxsize=64)
def in_use(held: tuple[Any, ...], used: Used, packed: bool) -> NDArray:
    """Bools (batch, rows): which of the rows that `rows_held` has of `held` are in use. Packed
    sequences are a batch of one.
    """
    rows, lengths = rows_held(*held), held[0]
    if packed:
        ends = np.cumsum(lengths)
        bounds = ends - lengths + np.array(used, np.int64)  # of the rows of all that are in use
        found = (rows < bounds[np.searchsorted(ends, rows, side="right")])[None]
    else:
        found = rows[None, :] < np.array(used)[:, None]
    found.flags.writeable = False
    return np.asarray(found)


# ---------------------------------------------------------------------------------- masks as data

_KEPT: Any = WeakTensorKeyDictionary()  # of tensors: how often they were written to, and a Cut


class Cut:
    """A mask as data, of a rank's rows: what its calls have of it, packed when it is first asked
    for.
    """

    def __init__(self, rows: NDArray) -> None:
        """rows: bools (batch, heads, rows, keys), or integers (batch, rows, 4)."""
        self._rows = rows
        self.answered: set[Any] = set()  # problems of which kernels said that they take it
        self._packed: dict[Any, masks.Mask] = {}

    def of(
        self, queries: Rows, held: tuple[Any, ...], keys: Rows, device: torch.device
    ) -> masks.Mask:
        """Of these queries, and of some of the rows that `rows_held` has of `held`."""
        what = (queries, held, keys, device)
        if what not in self._packed:
            made = self._pack(queries, rows_held(*held)[keys.begin : keys.end])
            self._packed[what] = made if device.type == "cpu" else made.to(device)
        return self._packed[what]

    def _pack(self, queries: Rows, keys: NDArray) -> masks.Mask:
        part = self._rows[..., queries.begin : queries.end, :]
        if part.dtype == np.bool_:
            seen = part[..., keys]
            return masks.from_bool(torch.from_numpy(np.ascontiguousarray(seen)))
        return from_intervals(np.searchsorted(keys, part), len(keys), 128, None, tensor=True)


def cut_mask(mask: Any, batch: int, heads: int, rows: int, seqlen: int) -> Cut:
    """A mask as data that calls can have parts of, kept while the tensor lives and is not written
    to.
    """
    if isinstance(mask, masks.Mask):
        raise Unsupported(
            f"mask = {mask!r} over ranks, where each call has a part of the keys, and a packed "
            "mask is of all: pass this rank's rows of its bools, or of its intervals"
        )
    if not isinstance(mask, torch.Tensor):
        raise InvalidArgument(f"mask = {shown(mask)}, expected a tensor of bools or integers")
    if mask.device.type != "cpu":
        raise InvalidArgument(
            f"mask is on {mask.device}, expected it in the CPU's memory, where masks are packed"
        )
    bools = mask.dtype == torch.bool
    if not bools and (mask.is_floating_point() or mask.is_complex()):
        raise InvalidArgument(f"mask.dtype = {mask.dtype}, expected bool or integers")
    wanted = (batch, heads, rows, seqlen) if bools else (batch, rows, 4)
    axes = "batch, heads, rows, seqlen" if bools else "batch, rows, 4"
    fits = 2 <= mask.ndim <= len(wanted) and all(
        got == want or (got == 1 and free)
        for got, want, free in zip(
            reversed(mask.shape), reversed(wanted), (False, False, True, True), strict=False
        )
    )
    if not fits:
        raise InvalidArgument(
            f"mask.shape = {tuple(mask.shape)}, expected ({axes}) = {wanted}, where axes before "
            "rows may be 1 or missing"
        )
    version, cut = _KEPT.get(mask, (None, None))
    if version != mask._version:
        found = mask.detach().numpy()
        cut = Cut(found[(None,) * (len(wanted) - found.ndim)])
        _KEPT[mask] = mask._version, cut
    kept: Cut = cut
    return kept
