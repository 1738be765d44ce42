"""What each call of the library gets, over ranks, of what is said of every row of the whole:
lengths in use, and masks as data.

A call has some of a rank's rows as queries, and as keys rows of the rank itself or of what it
received. In every sequence both ascend, row by row, though not without gaps. So of the rows in use,
which are the first ones of a sequence, a call has its first ones; and an interval of a sequence's
keys is an interval of the call's.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from . import _ring, masks
from ._arrays import NDArray, check_readable
from ._errors import InvalidArgument, Unsupported, shown
from ._flash_attn import as_integer
from ._layout import Layout, Lengths, Rows
from ._ring import Mask, Schedule

Tensor: TypeAlias = torch.Tensor
Used: TypeAlias = tuple[int, ...]  # of each sequence of a batch, or of packed ones


@lru_cache(maxsize=64)
def rows_held(
    layout: Layout, rank: int, pieces: tuple[Rows, ...] | None, inside: int = 1
) -> NDArray:
    """Which rows of all sequences a rank's are, or of these pieces those in them."""
    found = layout.chunks(rank, inside)
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
    rows, lengths = rows_held(*held), held[0].lengths
    if packed:
        ends = np.cumsum(lengths)
        bounds = ends - lengths + np.array(used, np.int64)  # of the rows of all that are in use
        found = (rows < bounds[np.searchsorted(ends, rows, side="right")])[None]
    else:
        found = rows[None, :] < np.array(used)[:, None]
    found.flags.writeable = False
    return np.asarray(found)


# ---------------------------------------------------------------------------------- masks as data

# Which rows there are of one: none, a rank's own, or all, of which blocks always are.
Held: TypeAlias = Literal["no", "own", "all", "blocks"]
# Rows of a call, among those that `rows_held` has of the rest.
Some: TypeAlias = tuple[Rows, tuple[Any, ...]]
# Where packed sequences of a call begin among its queries and keys, and where the last one ends.
Sequences: TypeAlias = tuple[tuple[int, int], ...]

_KEPT: Any = WeakTensorKeyDictionary()  # of tensors: how often they were written to, and Cuts


class Cut:
    """A mask as data: what calls have of it, packed when it is first asked for. It is a rank's own
    rows, or those of all; in the latter case `of_all_rows`, every rank knows what others see.

    rows: bools (batch, heads, rows, keys), integers (batch, rows, 4), or with a block bools (batch,
    heads, blocks of queries, blocks of keys). Of packed sequences batch is 1, and keys are numbered
    in a row's own sequence.
    """

    def __init__(self, rows: NDArray, lengths: Lengths, of_all_rows: bool, block: int) -> None:
        self._rows, self._block = rows, block
        self._starts = np.cumsum([0, *lengths])
        self.of_all_rows = of_all_rows
        self.answered: set[Any] = set()  # problems of which kernels said that they take it
        self._packed: dict[Any, masks.Mask] = {}
        self._schedules: dict[Any, Schedule] = {}

    @property
    def of_blocks(self) -> bool:
        """Whether it says of whole blocks whether they are seen."""
        return self._block > 0

    def schedule(self, layout: Layout, rank: int, mask: Mask, inside: int) -> Schedule:
        """That of `_ring.schedule`, without what the mask hides; of all rows."""
        what = layout, rank, mask, inside
        if what not in self._schedules:
            self._schedules[what] = _ring.schedule_of(*what, self)
        return self._schedules[what]

    def part(self, q: Rows, k: Rows) -> tuple[Rows, Rows] | None:
        """The smallest intervals of these, rows of all sequences, that hold all pairs which are
        seen; of blocks, which lie in blocks that are. Keys begin at a multiple of 8 of their
        sequence, if those given do: kernels draw dropout's bits for so many at a time.
        """
        start = int(self._starts[np.searchsorted(self._starts, q.begin, side="right") - 1])
        begin, end = k.begin - start, k.end - start
        if self._rows.dtype != np.bool_:
            rows = self._rows[:, q.begin : q.end]
            begins, ends = np.maximum(rows[..., ::2], begin), np.minimum(rows[..., 1::2], end)
            some = begins < ends
            queries = np.flatnonzero(some.any((0, 2)))
            if not queries.size:
                return None
            first, end = int(begins[some].min()) // 8 * 8, int(ends[some].max())
            return _span(q, queries, 1, 0), Rows(start + max(begin, first), start + end)
        side = self._block or 1
        first_q, first_k = q.begin // side, begin // side
        queries_to, keys_to = -(-q.end // side), -(-end // side)
        seen = self._rows[:, :, first_q:queries_to, first_k:keys_to].any((0, 1))
        if not seen.any():
            return None
        queries, keys = (np.flatnonzero(seen.any(axis)) for axis in (-1, 0))
        first, end = _span(Rows(begin, end), keys, side, begin % side)
        return (
            _span(q, queries, side, q.begin % side),
            Rows(start + max(begin, first // 8 * 8), start + end),
        )

    def of(
        self,
        queries: Some,
        keys: Some,
        sequences: Sequences | None,
        heads: Rows,
        device: torch.device,
    ) -> masks.Mask:
        """Of these queries, keys and heads; of packed ones if there are sequences."""
        if self._rows.dtype != np.bool_ or self._rows.shape[1] == 1:
            heads = Rows(0, 1)  # the same of all
        what = (queries, keys, sequences, heads, device)
        if what not in self._packed:
            found = [rows_held(*held)[rows.begin : rows.end] for rows, held in (queries, keys)]
            rows = found[0] if self.of_all_rows else np.arange(*queries[0])
            made = self._pack(rows, self._numbers(found[1]), sequences, heads)
            self._packed[what] = made if device.type == "cpu" else made.to(device)
        return self._packed[what]

    def _numbers(self, rows: NDArray) -> NDArray:
        """Which keys of their own sequences these rows of all are."""
        first = np.searchsorted(self._starts, rows, side="right") - 1
        numbers: NDArray = rows - self._starts[first]
        return numbers

    def _pack(
        self, queries: NDArray, keys: NDArray, sequences: Sequences | None, heads: Rows
    ) -> masks.Mask:
        """queries: rows of what there is; keys: numbers in their sequences."""
        starts = None
        if sequences is not None:
            begins = np.array(sequences, np.int32)
            starts = np.ascontiguousarray(begins[:, 0]), np.ascontiguousarray(begins[:, 1])
        if self._rows.dtype != np.bool_:
            part = self._rows[:, queries]
            if starts is None:
                numbers = np.searchsorted(keys, part)
            else:
                numbers = np.zeros(part.shape, np.int64)
                for (q, k), (end_q, end_k) in pairwise(sequences or ()):
                    numbers[:, q:end_q] = np.searchsorted(keys[k:end_k], part[:, q:end_q])
            return _of_intervals(numbers, len(keys), starts)
        rows = self._rows if self._rows.shape[1] == 1 else self._rows[:, heads.begin : heads.end]
        if self._block:
            sides = _side_of(queries, self._block), _side_of(keys, self._block)
            queries, keys = queries // self._block, keys // self._block
            if None not in sides and starts is None:
                visited = rows[:, :, queries[:: sides[0]]][..., keys[:: sides[1]]]
                lengths = len(queries), len(keys)
                return masks.blocks(_tensor(visited), *lengths, block=sides)  # type: ignore[arg-type]
        if starts is None:
            return masks.from_bool(_tensor(rows[:, :, queries][..., keys]))
        most = int(np.diff(starts[1]).max(initial=0))
        seen = np.zeros((rows.shape[1], len(queries), most), np.bool_)
        for (q, k), (end_q, end_k) in pairwise(sequences or ()):
            seen[:, q:end_q, : end_k - k] = rows[0][:, queries[q:end_q]][..., keys[k:end_k]]
        return masks.from_bool(_tensor(seen), cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])


def _of_intervals(
    numbers: NDArray, keys: int, starts: tuple[NDArray, NDArray] | None
) -> masks.Mask:
    """numbers: (batch, queries, 4)."""
    if starts is None:
        return masks.from_intervals(_tensor(numbers[:, None]), keys)
    return masks.from_intervals(_tensor(numbers), cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])


def _tensor(x: NDArray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def _span(rows: Rows, found: NDArray, side: int, before: int) -> Rows:
    """From the first to the last that was found, in blocks of so many rows, the first of which
    begins so many before `rows`.
    """
    first = rows.begin - before
    begin, end = first + int(found[0]) * side, first + (int(found[-1]) + 1) * side
    return Rows(max(rows.begin, begin), min(rows.end, end))


def _side_of(rows: NDArray, block: int) -> int | None:
    """The largest block of a packed mask such that none has rows of two of these; None: none is."""
    numbers = rows // block
    for side in (256, 128, 64):
        if (np.repeat(numbers[::side], side)[: len(numbers)] == numbers).all():
            return side
    return None


def nothing_seen(rows: int, packed: Lengths | None) -> masks.Mask:
    """Of so many queries and keys, to ask what takes masks as data."""
    intervals = np.zeros((1, rows, 4), np.int32)
    if packed is None:
        return _of_intervals(intervals, rows, None)
    begins = np.full(len(packed) + 1, rows, np.int32)
    begins[0] = 0
    return _of_intervals(intervals, rows, (begins, begins))


def held_of(mask: Any, block: int, length: int) -> Held:
    """Which rows a mask has, by its shape alone; what else is wrong with it `cut_mask` says."""
    if mask is None:
        return "no"
    shape: Any = getattr(mask, "shape", ())
    if block:
        return "blocks"
    return "all" if len(shape) > 1 and shape[-2] == length else "own"


def cut_mask(
    mask: Any, block: int, batch: int, heads: int, rows: int, lengths: Lengths, packed: bool
) -> Cut:
    """A mask as data that calls can have parts of, kept while the tensor lives and is not written
    to. rows: a rank's.
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
    check_readable("mask", mask)
    bools, length = mask.dtype == torch.bool, sum(lengths)
    if not bools and (mask.is_floating_point() or mask.is_complex()):
        raise InvalidArgument(f"mask.dtype = {mask.dtype}, expected bool or integers")
    if block and not bools:
        raise InvalidArgument(f"mask.dtype = {mask.dtype} with mask_block, expected bool")
    if block and packed:
        raise Unsupported(
            f"mask_block = {block} with cu_seqlens is not supported over ranks: blocks are those "
            "of one sequence"
        )
    of_all = held_of(mask, block, length) != "own"
    there, across = length if of_all else rows, max(lengths, default=0) if packed else length
    if block:
        there = across = -(-length // block)
    named = "blocks" if block else "rows"
    keys = "blocks" if block else "keys" if packed else "seqlen"
    wanted: tuple[int, ...] = (batch, heads, there, across) if bools else (batch, there, 4)
    axes = f"batch, heads, {named}, {keys}" if bools else "batch, rows, 4"
    if packed:
        wanted, axes = wanted[1:], axes.removeprefix("batch, ")
    fits = 2 <= mask.ndim <= len(wanted) and all(
        got == want or (got == 1 and n > 1)
        for n, (got, want) in enumerate(zip(reversed(mask.shape), reversed(wanted), strict=False))
    )
    if not fits:
        raise InvalidArgument(
            f"mask.shape = {tuple(mask.shape)}, expected ({axes}) = {wanted}, where axes before "
            f"{named} may be 1 or missing"
        )
    if mask.is_inference():  # which counts no writes
        cuts = {}
    else:
        version, cuts = _KEPT.get(mask, (None, None))
        if version != mask._version:
            cuts = {}
            _KEPT[mask] = mask._version, cuts
    if (lengths, of_all, block) not in cuts:
        found = mask.detach().numpy()
        found = found[(None,) * ((4 if bools else 3) - found.ndim)]
        cuts[lengths, of_all, block] = Cut(found, lengths, of_all, block)
    kept: Cut = cuts[lengths, of_all, block]
    return kept
