"""The packed mask of `strobe.masks`: the type, and how arrays of intervals, bools or blocks become
one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from . import _core
from ._arrays import NDArray, is_tensor
from ._errors import InvalidArgument, Unsupported, shown
from ._problem import MOST_CAPACITY, mask_fields, mask_layout
from ._values import integer

SKIPPED: Final = 0
PARTIAL: Final = 1
FULL: Final = 2

_HEADER: Final = 32
_ALIGNMENT: Final = 16  # bytes
_SIDES: Final = (64, 128, 256)


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """A packed mask, for calls of these lengths.

    Args:
        packed: int32, (words,): as include/strobe/strobe.h describes it.
        shape: (batch or 1, heads or 1, seqlen_q, seqlen_k); 1: one mask for all. Of packed
            sequences (batch, heads or 1, total_q, total_k).
        block: queries and keys of a block.
        capacity, partial_capacity: how many pairs of blocks there is room for that are seen, and
            how many of them in part. Rows that there is no room for are NaN in results.
        starts: of packed sequences: where they begin among the queries and among the keys.
    """

    __module__ = "strobe.masks"  # where it is imported from

    packed: Any
    shape: tuple[int, int, int, int]
    block: tuple[int, int]
    capacity: int
    partial_capacity: int
    starts: tuple[NDArray, NDArray] | None = None

    @property
    def layout(self) -> int:
        """Blocks and capacities in one number, as operators take it beside `packed`."""
        return mask_layout(
            self.block,
            self.starts is not None or self.shape[0] > 1,
            self.shape[1] > 1,
            self.capacity,
            self.partial_capacity,
        )

    @property
    def _lengths_of_calls(self) -> tuple[int, int]:
        """Queries and keys of the calls that it is for; -1: packed sequences."""
        return self.shape[2:] if self.starts is None else (-1, -1)

    @property
    def _strobe_mask(self) -> tuple[Any, int, int, int]:
        return self.packed, self.layout, *self._lengths_of_calls

    def to(self, device: Any) -> Mask:
        """The same mask, its words in a tensor of PyTorch's on a device.

        Args:
            device: as `torch.Tensor.to` has it.

        Returns:
            A mask for calls with tensors on that device.

        Example:
            >>> import numpy as np, strobe
            >>> strobe.masks.from_bool(np.eye(64, dtype=bool)).to("cpu")
            <strobe.masks.Mask 1x1x64x64, blocks 128x128, 4992 bytes>
        """
        import torch

        words = self.packed
        if not isinstance(words, torch.Tensor):
            words = torch.from_numpy(words)
        return replace(self, packed=words.to(device))

    def tiles(self, sequence: int = 0, head: int = 0) -> NDArray:
        """int8, (blocks of queries, blocks of keys) of one sequence and head: 0 skipped, 1 seen in
        part, 2 seen in full.
        """
        tiles, _ = self._read(sequence, head)
        return tiles

    def dense(self, sequence: int = 0, head: int = 0) -> NDArray:
        """bool, (seqlen_q, seqlen_k) of one sequence and head: what the mask allows."""
        tiles, places = self._read(sequence, head)
        (side_q, side_k), (rows, columns) = self.block, self._lengths(sequence)
        words = as_numpy(self.packed)
        queries, keys = (int(x) for x in words[3:5])
        count = side_q * side_k // 32
        bits_at = self._sections(queries, keys)[-1]
        found = np.repeat(np.repeat(tiles == FULL, side_q, axis=0), side_k, axis=1)
        for i, j in zip(*np.nonzero(tiles == PARTIAL), strict=True):
            at = bits_at + int(places[i, j]) * count
            block = np.ascontiguousarray(words[at : at + count]).view(np.uint8)
            bits = np.unpackbits(block, bitorder="little").reshape(side_q, side_k)
            found[i * side_q : (i + 1) * side_q, j * side_k : (j + 1) * side_k] = bits
        return found[:rows, :columns]

    def _lengths(self, sequence: int) -> tuple[int, int]:
        if self.starts is None:
            return self.shape[2:]
        q, k = (x[sequence : sequence + 2] for x in self.starts)
        return int(q[1] - q[0]), int(k[1] - k[0])

    def _sections(self, queries: int, keys: int) -> list[int]:
        """Where lists, entries, ..., bits begin."""
        count = self.capacity
        sizes = (2 * queries, 2 * count, queries, 2 * keys, 4 * count, keys)
        begins = [_HEADER]
        for size in sizes:
            begins.append(begins[-1] + -(-size // 32) * 32)
        return begins

    def _read(self, sequence: int, head: int) -> tuple[NDArray, NDArray]:
        """Kinds of blocks, and the places of bits."""
        words = as_numpy(self.packed)
        queries, keys = (int(x) for x in words[3:5])
        rows, columns = self._lengths(sequence)
        there, across = -(-rows // self.block[0]), -(-columns // self.block[1])
        head = head if self.shape[1] > 1 else 0
        if self.starts is None:
            plane = (sequence if self.shape[0] > 1 else 0) * self.shape[1] + head
            first = plane * there
        else:
            begin = int(self.starts[0][sequence])
            first = head * (queries // self.shape[1]) + begin // self.block[0] + sequence
        lists, entries = self._sections(queries, keys)[:2]
        tiles = np.zeros((there, across), np.int8)
        places = np.full((there, across), -1)
        for i in range(there):
            begin, count = words[lists + 2 * (first + i) : lists + 2 * (first + i) + 2].tolist()
            at = entries + 2 * begin
            block, place = words[at : at + 2 * max(count, 0)].reshape(-1, 2).T
            tiles[i, block] = np.where(place < 0, FULL, PARTIAL)
            places[i, block] = place
        return tiles, places

    def __repr__(self) -> str:
        """Shape, blocks and memory."""
        shape, block = ("x".join(map(str, x)) for x in (self.shape, self.block))
        return f"<strobe.masks.Mask {shape}, blocks {block}, {4 * self.packed.shape[0]} bytes>"


def check_lengths(made: tuple[int, int], wanted: tuple[int, int], cached: bool = False) -> None:
    """Refuses a mask that was made for other lengths than those of a call whose sequences are not
    packed. Words and layout alone do not tell: 97 keys and 100 have the same blocks.

    made: of the mask, `Mask._lengths_of_calls`; wanted: queries and keys of the call; cached:
    whether the keys are those that the cache has room for.
    """
    queries, keys = wanted
    if made == wanted:
        return
    if made[0] < 0:
        raise InvalidArgument(
            f"mask is of packed sequences, expected one for {queries} queries and {keys} keys: "
            "the call has no cu_seqlens_q"
        )
    if made[0] != queries:
        raise InvalidArgument(f"mask is for {made[0]} queries, and q has {queries}")
    if not cached:
        raise InvalidArgument(f"mask is for {made[1]} keys, and k has {keys}")
    raise InvalidArgument(
        f"mask is for {made[1]} keys, and the cache has room for {keys}: make it for {keys} "
        f"(strobe.masks.tree: keys={keys}), or pass block_table[:, :columns] that just holds them"
    )


# ------------------------------------------------------------------------------- arrays and packing


def as_numpy(array: Any, name: str = "mask") -> NDArray:
    """The array as one of NumPy's, without a copy where it lies in the CPU's memory."""
    if not is_tensor(array):
        return np.asarray(array)
    if array.device.type != "cpu":
        raise Unsupported(
            f"{name} is on {array.device}: masks are made and read on the CPU: pass {name}.cpu()"
        )
    found: NDArray = array.detach().numpy()
    return found


def integers(name: str, array: Any, axes: tuple[str, ...]) -> NDArray:
    """An array of integers with these axes, of which the first may be missing: it is 1 then."""
    found = as_numpy(array, name)
    if found.ndim not in (len(axes), len(axes) - 1) or found.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{name} is {found.dtype} {found.shape}, expected integers ({', '.join(axes)}) or "
            f"({', '.join(axes[1:])})"
        )
    return found.reshape((1,) * (len(axes) - found.ndim) + found.shape)


def sides_of(block: int | tuple[int, int]) -> tuple[int, int]:
    """Queries and keys of a block."""
    both = block if isinstance(block, tuple) else (block, block)
    if len(both) != 2 or any(side not in _SIDES for side in both):
        raise InvalidArgument(f"block = {shown(block)}, expected 64, 128 or 256, or two of these")
    return both


def _packed_words(words: int, tensor: bool) -> tuple[Any, NDArray]:
    """New aligned words, as the kind of array that the caller has, and as NumPy's."""
    spare = _ALIGNMENT // 4
    memory = np.empty(words + spare, np.int32)
    first = -(memory.ctypes.data // 4) % spare
    aligned = memory[first : first + words]
    return (sys.modules["torch"].from_numpy(aligned) if tensor else aligned), aligned


def pack(
    fields: dict[str, Any],
    arrays: dict[str, NDArray],
    block: tuple[int, int],
    capacity: int | tuple[int, int] | None,
    tensor: bool,
    more: dict[str, Any] | None = None,
    starts: tuple[NDArray, NDArray] | None = None,
) -> Mask:
    """A mask from arrays by their names in strobe_mask_args. fields: of the problem; batch and
    heads are the mask's.
    """
    heads, batch = fields["heads"], fields["batch"]
    numbers: dict[str, Any] = {name: array.ctypes.data for name, array in arrays.items()}
    numbers |= more or {}
    if capacity is None:
        room = (1, 1)  # the header then says how much there has to be
    else:
        given = capacity if isinstance(capacity, tuple) else (capacity, capacity)
        most = integer("capacity", given[0])
        room = (most, min(integer("capacity", given[1]), most))
    while True:
        if not 1 <= min(room) <= max(room) <= MOST_CAPACITY:
            got = capacity if capacity is not None else max(room)
            raise InvalidArgument(f"capacity = {shown(got)}, expected 1 to {MOST_CAPACITY}")
        layout = mask_layout(block, batch > 1, heads > 1, *room)
        problem = {"head_dim": 1, **fields}
        problem |= mask_fields(layout, batch, heads, starts is not None)
        size = _core.mask_bytes(problem)
        packed, words = _packed_words(size // 4, tensor)
        _core.pack_mask(problem, {**numbers, "packed": words.ctypes.data, "packed_bytes": size})
        needed = int(words[7]), int(words[8])
        if capacity is not None or (needed[0] <= room[0] and needed[1] <= room[1]):
            break
        room = max(1, needed[0]), max(1, needed[1])
    rows = fields["total_q"] if starts else fields["seqlen_q"]
    columns = fields["total_k"] if starts else fields["seqlen_k"]
    return Mask(packed, (batch, heads, rows, columns), block, *room, starts)


def packed_fields(starts: tuple[NDArray, NDArray]) -> dict[str, int]:
    """Of the problem, from where packed sequences begin among queries and keys."""
    longest = [int(np.diff(x).max(initial=0)) for x in starts]
    return {
        "varlen": 1,
        "batch": starts[0].shape[0] - 1,
        "seqlen_q": longest[0],
        "seqlen_k": longest[1],
        "total_q": int(starts[0][-1]),
        "total_k": int(starts[1][-1]),
    }


def lengths_of(seqlen_q: int, seqlen_k: int | None) -> tuple[int, int, NDArray]:
    """Both lengths, and the key positions of the queries: the last one stands at the last key."""
    queries = integer("seqlen_q", seqlen_q)
    keys = queries if seqlen_k is None else integer("seqlen_k", seqlen_k)
    if min(queries, keys) < 0:
        raise InvalidArgument(f"lengths are {queries} and {keys}, expected at least 0")
    return queries, keys, np.arange(queries, dtype=np.int64) + (keys - queries)


def from_intervals(
    intervals: NDArray,
    seqlen_k: int,
    block: int | tuple[int, int],
    capacity: int | tuple[int, int] | None,
    tensor: bool = False,
    starts: tuple[NDArray, NDArray] | None = None,
) -> Mask:
    """intervals: (batch, seqlen_q, 4): begin, end, begin, end; numbers of any size. Of packed
    sequences, which begin at `starts`, (1, total_q, 4), of keys of a row's own one.
    """
    lowest, highest = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    numbers = np.ascontiguousarray(np.clip(intervals, lowest, highest), np.int32)
    arrays, fields = {"intervals": numbers}, {"heads": 1}
    if starts is None:
        fields |= {"batch": numbers.shape[0], "seqlen_q": numbers.shape[1], "seqlen_k": seqlen_k}
    else:
        fields |= packed_fields(starts)
        arrays |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    return pack(fields, arrays, sides_of(block), capacity, tensor, starts=starts)


def at_least(name: str, value: Any, least: int) -> int:
    """An integer of that size."""
    number = integer(name, value)
    if number < least:
        raise InvalidArgument(f"{name} = {number}, expected at least {least}")
    return number
