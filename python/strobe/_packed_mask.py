"""The packed mask of `strobe.masks`: the type, and how arrays of intervals, bools or blocks become
one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from . import _core
from ._arrays import NDArray
from ._errors import InvalidArgument, shown
from ._mask_arrays import NUMPY_ARRAYS, Arrays, check_may_wait, host
from ._problem import MOST_CAPACITY, mask_fields, mask_layout
from ._values import integer

SKIPPED: Final = 0
PARTIAL: Final = 1
FULL: Final = 2

_HEADER: Final = 32
_SIDES: Final = (64, 128, 256)
_LONGEST: Final = 2**31 - 1

# What a mask on a GPU may take, in bytes, so that there is room for whatever it may hold and nobody
# has to wait for the device to know how much it does hold.
MOST_UNSEEN: Final = 64 << 20


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """A packed mask, for calls of these lengths.

    Args:
        packed: int32, (words,): as include/strobe/strobe.h describes it.
        shape: (batch or 1, heads or 1, seqlen_q, seqlen_k); 1: one mask for all. Of packed
            sequences (batch, heads or 1, total_q, total_k), of packed queries over a cache
            (batch, heads or 1, total_q, rows that a sequence has room for).
        block: queries and keys of a block.
        capacity, partial_capacity: how many pairs of blocks there is room for that are seen, and
            how many of them in part. Rows that there is no room for are NaN in results.
        starts: of packed sequences: where they begin among the queries and among the keys; None in
            place of the latter: keys in a cache.

    On a GPU `tiles` and `dense` copy the words to the CPU, for which they wait.
    """

    __module__ = "strobe.masks"  # where it is imported from

    packed: Any
    shape: tuple[int, int, int, int]
    block: tuple[int, int]
    capacity: int
    partial_capacity: int
    starts: tuple[Any, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple | list) or len(self.shape) != 4:
            raise InvalidArgument(
                f"shape of a Mask = {shown(self.shape)}, expected (batch or 1, heads or 1, "
                "seqlen_q, seqlen_k)"
            )
        if not isinstance(self.block, tuple | list) or len(self.block) != 2:
            raise InvalidArgument(
                f"block of a Mask = {shown(self.block)}, expected (queries, keys) of a block"
            )

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
    def _of_calls(self) -> tuple[int, int, int, int]:
        """Sequences, heads, queries and keys of the calls that it is for; 1: one for all
        sequences or heads; -1 queries or keys: they are packed.
        """
        batch, heads, queries, keys = self.shape
        if self.starts is None:
            return batch, heads, queries, keys
        return batch, heads, -1, keys if self.starts[1] is None else -1

    @property
    def _strobe_mask(self) -> tuple[Any, int, int, int, int, int]:
        return self.packed, self.layout, *self._of_calls

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
        words = host(self.packed, "mask")
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

    def _number(self, name: str, value: Any, axis: int) -> int:
        """A sequence or head of the mask. One that stands for all has the number 0."""
        number, count = at_least(name, value, 0), self.shape[axis]
        is_for_all = count == 1 and (axis == 1 or self.starts is None)
        if number >= count and not is_for_all:
            raise InvalidArgument(f"{name} = {number}, expected one of the mask's {count}")
        return 0 if is_for_all else number

    def _lengths(self, sequence: int) -> tuple[int, int]:
        if self.starts is None:
            return self.shape[2:]

        def length(begins: Any) -> int:
            begin, end = host(begins, "starts")[sequence : sequence + 2].tolist()
            return int(end - begin)

        q, k = self.starts
        return length(q), self.shape[3] if k is None else length(k)

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
        sequence = self._number("sequence", sequence, 0)
        head = self._number("head", head, 1)
        words = host(self.packed, "mask")
        queries, keys = (int(x) for x in words[3:5])
        rows, columns = self._lengths(sequence)
        there, across = -(-rows // self.block[0]), -(-columns // self.block[1])
        if self.starts is None:
            plane = sequence * self.shape[1] + head
            first = plane * there
        else:
            begin = int(host(self.starts[0], "starts")[sequence])
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


def check_made_for(
    made: tuple[int, int, int, int], wanted: tuple[int, int, int, int], cached: bool = False
) -> None:
    """Refuses a mask that was made for others than a call whose sequences are not packed. Words and
    layout alone do not tell: 97 keys and 100 have the same blocks, and so have 2 sequences of 4
    heads and 4 of 2.

    made: of the mask, `Mask._of_calls`; wanted: sequences, heads, queries and keys of the call;
    cached: whether the keys are those that the cache has room for.
    """
    batch, heads, queries, keys = wanted
    if made[2] < 0:
        raise InvalidArgument(
            f"mask is of packed sequences, expected one for {queries} queries and {keys} keys: "
            "the call has no cu_seqlens_q"
        )
    if made[2] != queries:
        raise InvalidArgument(f"mask is for {made[2]} queries, and q has {queries}")
    if made[0] not in (1, batch):
        raise InvalidArgument(f"mask is for {made[0]} sequences, and q has {batch}")
    if made[1] not in (1, heads):
        raise InvalidArgument(f"mask is for {made[1]} heads, and q has {heads}")
    if made[3] == keys:
        return
    if not cached:
        raise InvalidArgument(f"mask is for {made[3]} keys, and k has {keys}")
    raise _other_room(made[3], keys)


def _other_room(made: int, keys: int) -> InvalidArgument:
    return InvalidArgument(
        f"mask is for {made} keys, and the cache has room for {keys}: make it for {keys} "
        f"(strobe.masks.tree: keys={keys}), or pass block_table[:, :columns] that just holds them"
    )


def check_made_for_packed(made: tuple[int, int, int, int], keys: int) -> None:
    """As `check_made_for`, of a call whose queries are packed. keys: that a sequence has room for
    in the cache; -1: they are packed.
    """
    if made[2] >= 0:
        raise InvalidArgument(
            f"mask is for {made[2]} queries, expected one of packed queries: make it with "
            "cu_seqlens_q"
        )
    if made[3] == keys:
        return
    if keys < 0:
        raise InvalidArgument(
            "mask is for keys in a cache, expected one of packed keys: make it with cu_seqlens_k"
        )
    if made[3] < 0:
        raise InvalidArgument(
            "mask is of packed keys, expected one for keys in a cache: make it without cu_seqlens_k"
        )
    raise _other_room(made[3], keys)


def check_starts(mask: Mask, cu_seqlens_q: Any, cu_seqlens_k: Any, keys: int = -1) -> None:
    """Refuses a mask that was made for other calls than one whose queries are packed, and on the
    CPU one of sequences that begin elsewhere: as many rows may have as many blocks.

    cu_seqlens_k: None: keys that are not packed, in a cache that has room for `keys` of a sequence.
    """
    check_made_for_packed(mask._of_calls, keys)
    starts = mask.starts or (None, None)  # of packed queries: there are some
    for side, given, made in zip("qk", (cu_seqlens_q, cu_seqlens_k), starts, strict=True):
        if given is None or any(getattr(x, "is_cuda", False) for x in (given, made)):
            continue
        name = f"cu_seqlens_{side}"
        begins, wanted = host(given, name), host(made, name)
        if begins.shape == wanted.shape and (begins == wanted).all():
            continue
        if begins.ndim != 1:
            continue  # the planner says so
        if begins.shape != wanted.shape:
            raise InvalidArgument(
                f"mask is for {len(wanted) - 1} sequences, and {name} has {len(begins) - 1}"
            )
        at = int(np.flatnonzero(begins != wanted)[0])
        raise InvalidArgument(
            f"{name}[{at}] = {begins[at]}, expected {wanted[at]}: the mask was made for sequences "
            "that begin there"
        )


# ------------------------------------------------------------------------------- arrays and packing


def integers(arrays: Arrays, name: str, array: Any, axes: tuple[str, ...]) -> Any:
    """An array of integers with these axes, of which the first may be missing: it is 1 then."""
    found = arrays.take(name, array)
    if found.ndim not in (len(axes), len(axes) - 1) or not arrays.is_integer(found):
        raise InvalidArgument(
            f"{name} is {found.dtype} {tuple(found.shape)}, expected integers ({', '.join(axes)}) "
            f"or ({', '.join(axes[1:])})"
        )
    return arrays.wide(name, found.reshape((1,) * (len(axes) - found.ndim) + tuple(found.shape)))


def sides_of(block: int | tuple[int, int], name: str = "block") -> tuple[int, int]:
    """Queries and keys of a block. name: what the caller gave them in."""
    given = block if isinstance(block, (tuple, list)) else (block,)
    sides = tuple(integer(name, x) for x in given)
    both = sides * 2 if len(sides) == 1 else sides
    if len(both) != 2 or any(side not in _SIDES for side in both):
        raise InvalidArgument(f"{name} = {shown(block)}, expected 64, 128 or 256, or two of these")
    return both[0], both[1]


class Room(NamedTuple):
    """Entries that always suffice for what a mask is made of, and how many of them are in part."""

    entries: int
    partial: int
    # Whether the mask is known to need about as many.
    close: bool = False


def room_of_all(fields: dict[str, Any], block: tuple[int, int]) -> Room:
    """For all blocks that there may be."""
    if fields.get("varlen"):
        lists = fields["total_q"] // block[0] + fields["batch"]
    else:
        lists = fields["batch"] * -(-fields["seqlen_q"] // block[0])
    count = fields["heads"] * lists * -(-fields["seqlen_k"] // block[1])
    return Room(max(1, count), max(1, count))


def _problem_of(
    fields: dict[str, Any], block: tuple[int, int], room: tuple[int, int], packed: bool
) -> dict[str, Any]:
    heads, batch = fields["heads"], fields["batch"]
    layout = mask_layout(block, batch > 1, heads > 1, *room)
    return {"head_dim": 1, **fields, **mask_fields(layout, batch, heads, packed)}


def bytes_for(
    fields: dict[str, Any], block: tuple[int, int], room: tuple[int, int], packed: bool = False
) -> int | None:
    """What a mask with this room takes; None: there is none with so much."""
    if max(room) > MOST_CAPACITY:
        return None
    return _core.mask_bytes(_problem_of(fields, block, room, packed))


def _first_room(
    arrays: Arrays,
    fields: dict[str, Any],
    block: tuple[int, int],
    most: Room | None,
    packed: bool,
) -> tuple[tuple[int, int], bool]:
    """(entries, partial) where the caller names no capacity, and whether that always suffices. If
    it may not, the header of what was packed says how much there has to be.
    """
    if not arrays.on_device:
        return (1, 1), False
    most = most or room_of_all(fields, block)
    room = max(1, most.entries), max(1, min(most.partial, most.entries))
    size = bytes_for(fields, block, room, packed)
    if size is not None and (most.close or size <= MOST_UNSEEN):
        return room, True
    check_may_wait(
        arrays,
        f"capacity = None of a mask that may need more than {MOST_UNSEEN >> 20} MiB, expected an "
        "integer: to look at what it needs",
    )
    return (1, 1), False


def pack(
    arrays: Arrays,
    fields: dict[str, Any],
    given: dict[str, Any],
    block: tuple[int, int],
    capacity: int | tuple[int, int] | None,
    most: Room | None = None,
    more: dict[str, Any] | None = None,
    starts: tuple[Any, Any] | None = None,
) -> Mask:
    """A mask from arrays by their names in strobe_mask_args. fields: of the problem; batch and
    heads are the mask's. most: what always suffices; None: room for all blocks.
    """
    packed = starts is not None
    if capacity is None:
        room, suffices = _first_room(arrays, fields, block, most, packed)
    else:
        both = capacity if isinstance(capacity, (tuple, list)) else (capacity, capacity)
        if len(both) != 2:
            raise InvalidArgument(f"capacity = {shown(capacity)}, expected one number or two")
        entries = integer("capacity", both[0])
        room, suffices = (entries, min(integer("capacity", both[1]), entries)), True
    of_device, numbers = arrays.device_fields()
    while True:
        if not 1 <= min(room) <= max(room) <= MOST_CAPACITY:
            got = capacity if capacity is not None else max(room)
            raise InvalidArgument(f"capacity = {shown(got)}, expected 1 to {MOST_CAPACITY}")
        problem = _problem_of(fields, block, room, packed)
        size = _core.mask_bytes(problem)
        words = arrays.words(size // 4)
        place = arrays.address(words)
        # What has no values may have no address, and an argument that is given has one.
        addresses = {name: arrays.address(array) or place for name, array in given.items()}
        addresses |= {**numbers, **(more or {}), "packed": place, "packed_bytes": size}
        _core.pack_mask(problem | of_device, addresses)
        if suffices:
            break
        needed = words[7:9].tolist()  # a GPU is waited for
        if needed[0] <= room[0] and needed[1] <= room[1]:
            break
        room, suffices = (max(1, needed[0]), max(1, needed[1])), True
    rows = fields["total_q"] if packed else fields["seqlen_q"]
    columns = fields["total_k"] if packed and "cache" not in fields else fields["seqlen_k"]
    return Mask(words, (fields["batch"], fields["heads"], rows, columns), block, *room, starts)


def starts_of(
    arrays: Arrays, cu_seqlens_q: Any, cu_seqlens_k: Any, **sizes: int | None
) -> tuple[Any, Any] | None:
    """Both arrays of cumulative lengths as the mask keeps them, or None. The second one is None
    where keys lie in a cache. sizes: what else is said of packed sequences alone.
    """
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise InvalidArgument("cu_seqlens_q = None, expected an array: cu_seqlens_k is given")
    for name, size in sizes.items():
        of = f"cu_seqlens_{name[-1]}"
        if size is not None and (cu_seqlens_k if of == "cu_seqlens_k" else cu_seqlens_q) is None:
            raise InvalidArgument(f"{name} = {size}, expected None: it belongs to {of}")
    if cu_seqlens_q is None:
        return None

    def take(name: str, array: Any) -> Any:
        found = arrays.take(name, array)
        if found.ndim != 1 or found.shape[0] < 2 or not arrays.is_integer(found):
            raise InvalidArgument(
                f"{name} is {found.dtype} {tuple(found.shape)}, expected integers (batch + 1,)"
            )
        return arrays.copy(arrays.int32(found))

    q = take("cu_seqlens_q", cu_seqlens_q)
    if cu_seqlens_k is None:
        return q, None
    k = take("cu_seqlens_k", cu_seqlens_k)
    if q.shape != k.shape:
        raise InvalidArgument(
            f"cu_seqlens_k.shape = {tuple(k.shape)}, expected {tuple(q.shape)} as of cu_seqlens_q"
        )
    return q, k


def packed_fields(
    arrays: Arrays,
    starts: tuple[Any, Any],
    longest: tuple[Any, Any] = (None, None),
    total: tuple[Any, Any] = (None, None),
) -> dict[str, int]:
    """Of the problem, from where packed sequences begin among queries and keys. longest, total:
    numbers that the caller knows, so that they need not be looked up on a GPU; of keys in a cache,
    which begin nowhere, longest is the room that there is for a sequence.
    """
    fields = {"varlen": 1, "batch": starts[0].shape[0] - 1}
    for side, begins, most, rows in zip("qk", starts, longest, total, strict=True):
        if begins is None:
            fields |= {"cache": 1, "seqlen_k": most}
            continue
        known: dict[str, Any] = {f"max_seqlen_{side}": most, f"total_{side}": rows}
        missing = [name for name, x in known.items() if x is None]
        if missing or not arrays.on_device:
            said = " and ".join(f"{name} = None" for name in missing)
            check_may_wait(arrays, f"{said}, expected an integer: to read cu_seqlens_{side}")
            numbers = host(begins, f"cu_seqlens_{side}")
            actual = int(np.diff(numbers).max(initial=0)), int(numbers[-1])
            for (name, x), least in zip(known.items(), actual, strict=True):
                known[name] = least if x is None else at_least(name, x, least)
        fields[f"seqlen_{side}"], fields[f"total_{side}"] = (
            at_least(name, x, 0) for name, x in known.items()
        )
    return fields


def given_starts(starts: tuple[Any, Any]) -> dict[str, Any]:
    """Those of `starts_of` that there are, by their names in strobe_mask_args."""
    named = zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True)
    return {name: begins for name, begins in named if begins is not None}


def lengths_of(
    seqlen_q: int, seqlen_k: int | None, arrays: Arrays = NUMPY_ARRAYS
) -> tuple[int, int, Any]:
    """Both lengths, and the key positions of the queries: the last one stands at the last key."""
    queries = integer("seqlen_q", seqlen_q)
    keys = queries if seqlen_k is None else integer("seqlen_k", seqlen_k)
    if min(queries, keys) < 0 or max(queries, keys) > _LONGEST:
        raise InvalidArgument(f"lengths are {queries} and {keys}, expected 0 to {_LONGEST}")
    return queries, keys, arrays.arange(queries) + (keys - queries)


def pack_intervals(
    arrays: Arrays,
    intervals: Any,
    seqlen_k: int,
    block: int | tuple[int, int],
    capacity: int | tuple[int, int] | None,
    starts: tuple[Any, Any] | None = None,
    packed: dict[str, int] | None = None,
) -> Mask:
    """intervals: (batch, heads, seqlen_q, 4): begin, end, begin, end; numbers of any size. Of
    packed sequences, which begin at `starts` and have these fields, (1, heads, total_q, 4), of keys
    of a row's own one.
    """
    given = {"intervals": arrays.int32(intervals)}
    batch, heads, rows, _ = given["intervals"].shape
    fields = {"batch": batch, "heads": heads, "seqlen_q": rows, "seqlen_k": seqlen_k}
    if starts is not None:
        fields |= packed or packed_fields(arrays, starts)
        given |= given_starts(starts)
    return pack(arrays, fields, given, sides_of(block), capacity, starts=starts)


def at_least(name: str, value: Any, least: int) -> int:
    """An integer of that size."""
    number = integer(name, value)
    if number < least:
        raise InvalidArgument(f"{name} = {number}, expected at least {least}")
    return number
