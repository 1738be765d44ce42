"""Masks as data from arrays that say who sees what: bools, intervals, lists of blocks, a BlockMask.
`strobe.masks` is where users have these from, beside the patterns that are made by them.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Final

from ._errors import Error, InvalidArgument, shown
from ._mask_arrays import Arrays, arrays_of, check_may_wait
from ._packed_mask import (
    Mask,
    Room,
    at_least,
    given_starts,
    lengths_of,
    pack,
    pack_intervals,
    packed_fields,
    sides_of,
    starts_of,
)


def from_bool(
    keep: Any,
    *,
    block: int | tuple[int, int] = 128,
    capacity: int | tuple[int, int] | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    total_k: int | None = None,
) -> Mask:
    """A mask from bools: True attends.

    Args:
        keep: bool, (batch or 1, heads or 1, seqlen_q, seqlen_k), where axes before seqlen_q may be
            missing, of any strides; it is read and not kept. Packed: (heads or 1, total_q, longest
            sequence's keys), or without heads: row i has its own sequence's keys. Over a cache keys
            are the rows that a sequence has room for.
        block: queries and keys of a block: 64, 128 or 256, or two of these.
        capacity: how many pairs of blocks that are seen there is room for, or a pair: of them, in
            part. The rows of the last blocks of queries are NaN if that is too few. None: as many
            as there are; on a GPU room for all that there may be where that takes at most 64 MiB,
            else the GPU is waited for once, to see what is needed.
        cu_seqlens_q, cu_seqlens_k: int32, (batch + 1,), of packed sequences, as in the call; over a
            cache cu_seqlens_q alone.
        max_seqlen_q, total_k: of packed sequences: the most queries of one (or more), and the rows
            of k, which may be more than the sequences have. None: they are read from cu_seqlens,
            for which a GPU is waited for.

    Example:
        >>> import numpy as np, strobe
        >>> q, k, v = np.random.randn(3, 1, 300, 2, 64).astype(np.float32)
        >>> mask = strobe.masks.from_bool(np.random.rand(300, 300) < 0.1)
        >>> strobe.attention(q, k, v, mask=mask).shape
        (1, 300, 2, 64)
    """
    arrays = arrays_of("keep", keep)
    found = arrays.take("keep", keep)
    starts = starts_of(
        arrays, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, total_k=total_k
    )
    axes = ("heads", "total_q", "keys") if starts else ("batch", "heads", "seqlen_q", "seqlen_k")
    if not arrays.is_bool(found) or not 2 <= found.ndim <= len(axes):
        raise InvalidArgument(
            f"keep is {found.dtype} {tuple(found.shape)}, expected bool ({', '.join(axes)})"
        )
    found = found[(None,) * (len(axes) - found.ndim)]
    # What is expanded is one mask for all.
    for axis in range(found.ndim - 2):
        if 0 not in found.shape and arrays.strides(found)[axis] == 0 and found.shape[axis] > 1:
            found = found[(slice(None),) * axis + (slice(0, 1),)]
    given = {"keep": found}
    fields: dict[str, Any] = {"heads": found.shape[-3]}
    steps = arrays.strides(found)
    if starts is None:
        fields |= {"batch": found.shape[0], "seqlen_q": found.shape[2], "seqlen_k": found.shape[3]}
        strides = tuple(steps[axis] for axis in (0, 2, 1, 3))
    else:
        rows, keys = found.shape[1:]
        longest = (max_seqlen_q, keys if arrays.on_device or starts[1] is None else None)
        total = (rows if arrays.on_device else None, total_k)
        fields |= packed_fields(arrays, starts, longest, total)
        if rows < fields["total_q"] or keys < fields["seqlen_k"]:
            raise InvalidArgument(
                f"keep has {rows} rows of {keys} keys, expected at least {fields['total_q']} of "
                f"{fields['seqlen_k']}"
            )
        fields["total_q"] = rows
        strides = (0, *(steps[axis] for axis in (1, 0, 2)))
        given |= given_starts(starts)
    if 0 in found.shape or strides == (0, 0, 0, 0):
        # Nothing is there, or all is one element, which no strides can say.
        given["keep"] = arrays.contiguous(found)
        strides = (0, 0, 0, 0)
    more = {"keep_strides": strides}
    return pack(arrays, fields, given, sides_of(block), capacity, more=more, starts=starts)


def from_intervals(
    intervals: Any,
    seqlen_k: int | None = None,
    *,
    block: int | tuple[int, int] = 128,
    capacity: int | tuple[int, int] | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    total_k: int | None = None,
) -> Mask:
    """A mask from intervals: each query sees the keys of one, or of two.

    Args:
        intervals: integers, (batch or 1, heads or 1, seqlen_q, 2 or 4), where axes before seqlen_q
            may be missing: begin and end of an interval, or of two. They may overlap, be empty and
            lie outside of the keys. Packed: (heads or 1, total_q, 2 or 4), or without heads, of
            keys of a row's own sequence.
        seqlen_k: keys of the call; None: as many as queries. Packed: not used, but over a cache the
            rows that a sequence has room for.
        block, capacity, cu_seqlens_q, cu_seqlens_k: as in `from_bool`.
        max_seqlen_q, max_seqlen_k, total_k: of packed sequences, as in `from_bool`.

    Example:
        >>> import numpy as np, strobe
        >>> position = np.arange(256)
        >>> window = np.stack([position - 64, position + 1], axis=-1)
        >>> strobe.masks.from_intervals(window, block=64).tiles()
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 1, 1, 0],
               [0, 0, 1, 1]], dtype=int8)
    """
    arrays = arrays_of("intervals", intervals)
    found = arrays.take("intervals", intervals)
    sizes = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "total_k": total_k}
    starts = starts_of(arrays, cu_seqlens_q, cu_seqlens_k, **sizes)
    axes = ("heads", "total_q") if starts else ("batch", "heads", "seqlen_q")
    fits = 2 <= found.ndim <= len(axes) + 1 and found.shape[-1] in (2, 4)
    if not fits or not arrays.is_integer(found):
        raise InvalidArgument(
            f"intervals is {found.dtype} {tuple(found.shape)}, expected integers "
            f"({', '.join(axes)}, 2 or 4)"
        )
    found = found.reshape((1,) * (4 - found.ndim) + tuple(found.shape))
    if found.shape[-1] == 2:
        found = with_another(arrays, arrays.int32(found))
    if starts is None:
        keys = found.shape[2] if seqlen_k is None else at_least("seqlen_k", seqlen_k, 0)
        return pack_intervals(arrays, found, keys, block, capacity)
    rows = found.shape[2]
    total = (rows if arrays.on_device else None, total_k)
    if starts[1] is None:
        if seqlen_k is None:
            raise InvalidArgument(
                "cu_seqlens_k and seqlen_k = None, expected one of them: keys are packed, or in a "
                "cache that has room for seqlen_k of a sequence"
            )
        max_seqlen_k = at_least("seqlen_k", seqlen_k, 0)
    fields = packed_fields(arrays, starts, (max_seqlen_q, max_seqlen_k), total)
    if rows < fields["total_q"]:
        raise InvalidArgument(
            f"intervals has {rows} rows, expected at least {fields['total_q']} as cu_seqlens_q has "
            "them"
        )
    fields["total_q"] = rows
    return pack_intervals(arrays, found, 0, block, capacity, starts, fields)


def with_another(arrays: Arrays, intervals: Any) -> Any:
    """Beside each interval an empty one."""
    begin, end = intervals[..., 0], intervals[..., 1]
    nothing = arrays.zeros(tuple(begin.shape), arrays.int32_type)
    return arrays.stack([begin, end, nothing, nothing])


def from_lists(
    full_blocks: Any,
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    full_counts: Any = None,
    partial_blocks: Any = None,
    partial_counts: Any = None,
    partial_bits: Any = None,
    block: int | tuple[int, int] = 128,
    capacity: int | tuple[int, int] | None = None,
) -> Mask:
    """A mask from lists: of each block of queries the blocks of keys that it sees, as top-k gives
    them; FlexAttention's kv_indices and kv_num_blocks. Nothing of the size of all pairs of blocks
    is made, and, without partial_blocks, nothing waits for a GPU.

    Args:
        full_blocks: integers, (batch or 1, heads or 1, blocks of queries, columns), where axes
            before the blocks may be missing: numbers of blocks of which all pairs are seen, in any
            order. One that does not exist stands for none; one that comes twice counts once. None:
            there are none.
        seqlen_q, seqlen_k: lengths; None: as many keys as queries.
        full_counts: integers, full_blocks's shape without columns: how many of a list count, from
            the first one on. None: all.
        partial_blocks, partial_counts: the same of blocks that are seen in part.
        partial_bits: int32 (or uint32), (..., columns, block_q, block_k / 32): their pairs; bit j
            of word w of a row is key 32 * w + j of the block. None: all of them.
        block: as in `from_bool`.
        capacity: as in `from_bool`; None: on a GPU as many as the lists have room for, if nothing
            is seen in part.

    Example:
        >>> import numpy as np, strobe
        >>> own_and_first = np.array([[0, 0], [1, 0], [2, 0]])
        >>> strobe.masks.from_lists(own_and_first, 384).tiles()
        array([[2, 0, 0],
               [2, 2, 0],
               [2, 0, 2]], dtype=int8)
    """
    lists = full_blocks, full_counts, partial_blocks, partial_counts, partial_bits
    return pack_lists(lists, seqlen_q, seqlen_k, block, capacity, partial_bits is None)


def pack_lists(
    given_lists: tuple[Any, Any, Any, Any, Any],
    seqlen_q: int,
    seqlen_k: int | None,
    block: int | tuple[int, int],
    capacity: int | tuple[int, int] | None,
    room: Room | bool,
) -> Mask:
    """`from_lists`. room: what suffices; or whether about as many blocks are seen as the lists have
    room for.
    """
    full_blocks, full_counts, partial_blocks, partial_counts, partial_bits = given_lists
    if full_blocks is None and partial_blocks is None:
        raise InvalidArgument("full_blocks = None and partial_blocks = None, expected at least one")
    lists = (("full", full_blocks, full_counts), ("partial", partial_blocks, partial_counts))
    name, first = next((f"{name}_blocks", x) for name, x, _ in lists if x is not None)
    arrays = arrays_of(name, first)
    queries, keys, _ = lengths_of(seqlen_q, seqlen_k)
    sides = sides_of(block)
    rows = -(-queries // sides[0])
    given: dict[str, Any] = {}
    more: dict[str, Any] = {}
    shape: tuple[int, ...] = ()
    for name, listed, counts in lists:
        if listed is None:
            if counts is not None:
                raise InvalidArgument(f"{name}_counts is given with {name}_blocks = None")
            continue
        found = arrays.take(f"{name}_blocks", listed)
        if not arrays.is_integer(found) or not 2 <= found.ndim <= 4 or found.shape[-2] != rows:
            raise InvalidArgument(
                f"{name}_blocks is {found.dtype} {tuple(found.shape)}, expected integers (batch, "
                f"heads, {rows} blocks of queries, columns)"
            )
        of_counts = tuple(found.shape[:-1])
        found = arrays.int32(found.reshape((1,) * (4 - found.ndim) + tuple(found.shape)))
        if shape and found.shape[:3] != shape:
            raise InvalidArgument(
                f"{name}_blocks.shape = {tuple(found.shape)}, expected {(*shape, 'columns')} as of "
                "full_blocks"
            )
        shape, columns = tuple(found.shape[:3]), found.shape[3]
        if counts is None:
            number = arrays.zeros(shape, arrays.int32_type) + columns
        else:
            number = arrays.take(f"{name}_counts", counts)
            if not arrays.is_integer(number) or tuple(number.shape) != of_counts:
                raise InvalidArgument(
                    f"{name}_counts is {number.dtype} {tuple(number.shape)}, expected integers "
                    f"{of_counts}"
                )
            number = number.reshape(shape)
        if columns:
            given |= {f"{name}_counts": arrays.int32(number), f"{name}_blocks": found}
            more[f"{name}_columns"] = columns
    if partial_bits is not None:
        if partial_blocks is None:
            raise InvalidArgument("partial_bits is given with partial_blocks = None")
        columns = more.get("partial_columns", 0)
        bits = _bits(arrays, partial_bits, (*shape, columns, sides[0], sides[1] // 32))
        given |= {"partial_bits": bits} if columns else {}
    if not given:  # lists without columns, which are those of a call that sees nothing
        given["full_counts"] = arrays.zeros(shape, arrays.int32_type)
        given["full_blocks"] = arrays.zeros((*shape, 1), arrays.int32_type)
        more["full_columns"] = 1
    fields = {"batch": shape[0], "heads": shape[1], "seqlen_q": queries, "seqlen_k": keys}
    if isinstance(room, bool):
        # As many entries as the lists have; without bits all of them are seen whole.
        lists_there, across = math.prod(shape), -(-keys // sides[1])
        in_part = 0 if partial_bits is None else min(more.get("partial_columns", 0), across)
        entries = min(sum(more.values()), across)
        room = Room(lists_there * entries, lists_there * in_part, close=room)
    return pack(arrays, fields, given, sides, capacity, room, more)


def _bits(arrays: Arrays, bits: Any, wanted: tuple[int, ...]) -> Any:
    """Pairs of the entries of partial_blocks."""
    found = arrays.take("partial_bits", bits)
    missing = (1,) * (len(wanted) - found.ndim)
    if not arrays.is_words(found) or missing + tuple(found.shape) != wanted:
        raise InvalidArgument(
            f"partial_bits is {found.dtype} {tuple(found.shape)}, expected int32 {wanted}"
        )
    return arrays.contiguous(found)


def from_block_mask(block_mask: Any, *, capacity: int | tuple[int, int] | None = None) -> Mask:
    """A mask from torch.nn.attention.flex_attention's BlockMask.

    Its mask_mod is asked for the blocks alone that it says are seen in part, on the BlockMask's
    device.

    Args:
        block_mask: a BlockMask whose BLOCK_SIZE is 64, 128 or 256 on either side.
        capacity: as in `from_bool`. On a GPU, None waits for the device, to see how many blocks
            there are. With a number nothing waits, and mask_mod is asked for each block that the
            lists have room for: for all pairs, if kv_indices has a column for each block of keys.

    Example:
        >>> import torch, strobe
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> made = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, "cpu")
        >>> strobe.masks.from_block_mask(made).tiles()
        array([[1, 0],
               [2, 1]], dtype=int8)
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(block_mask, "kv_num_blocks"):
        raise InvalidArgument(f"block_mask is {shown(block_mask)}, expected PyTorch's BlockMask")
    size_q, size_k = block_mask.BLOCK_SIZE
    sides = sides_of((int(size_q), int(size_k)), "block_mask.BLOCK_SIZE")
    arrays = arrays_of("block_mask", block_mask.kv_num_blocks)
    lengths = getattr(block_mask, "seq_lengths", None) or block_mask.shape[-2:]
    queries, keys = (int(x) for x in lengths)
    looks = not arrays.on_device or capacity is None
    if looks:
        check_may_wait(arrays, "capacity = None, expected an integer: to count blocks")
    lists: list[Any] = []
    counted: list[Any] = []
    for number, index in (
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
        (block_mask.kv_num_blocks, block_mask.kv_indices),
    ):
        if number is None:
            lists += [None, None]
            continue
        counts = arrays.int32(arrays.take("block_mask", number))
        listed = arrays.take("block_mask", index)
        lists += [listed, counts]
        count = arrays.clip(counts, 0, listed.shape[-1])
        counted += [count.sum(), count.max() if 0 not in count.shape else count.sum()]
    most: Room | bool = False
    if looks:
        numbers = torch.stack([x.long() for x in counted]).tolist()
        for place, columns in zip((0, 2)[2 - len(numbers) // 2 :], numbers[1::2], strict=True):
            lists[place] = lists[place][..., : max(1, columns)]
        most = Room(sum(numbers[::2]), numbers[-2], close=True)
    lists[2] = arrays.int32(lists[2])
    bits = _evaluated(torch, block_mask.mask_mod, lists[3], lists[2], sides, (queries, keys), looks)
    return pack_lists((*lists, bits), queries, keys, sides, capacity, most)


def _evaluated(
    torch: Any,
    mask_mod: Any,
    counts: Any,
    listed: Any,
    sides: tuple[int, int],
    lengths: tuple[int, int],
    looks: bool,
) -> Any:
    """What mask_mod says of the pairs of these entries, in bits. looks: at the counts, to leave out
    what does not count.
    """
    (side_q, side_k), device = sides, listed.device
    columns = listed.shape[3]
    bits = torch.zeros((listed.numel(), side_q, side_k // 32), dtype=torch.int32, device=device)
    entries = torch.arange(listed.numel(), device=device)
    if looks:
        there = torch.arange(columns, device=device) < counts[..., None]
        there &= (listed >= 0) & (listed < -(-lengths[1] // side_k))
        entries = there.flatten().nonzero()[:, 0]
    function = mask_mod
    for axes in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        function = torch.vmap(function, axes)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    in_row, in_column = (torch.arange(side, device=device) for side in sides)
    some = max(1, (1 << 22) // (side_q * side_k))  # at a time
    for first in range(0, len(entries), some):
        part = entries[first : first + some]
        plane = part // (columns * listed.shape[2])
        b, h = plane // listed.shape[1], plane % listed.shape[1]
        # What is past the end is asked like the last one: mask_mod may look it up in a tensor.
        q = (part // columns % listed.shape[2])[:, None] * side_q + in_row
        k = listed.flatten()[part].long()[:, None] * side_k + in_column
        try:
            found = function(b, h, q.clamp(0, lengths[0] - 1), k.clamp(0, lengths[1] - 1))
        except Error:
            raise
        except Exception as error:
            raise InvalidArgument(
                f"block_mask.mask_mod cannot be evaluated: {type(error).__name__}: {error}"
            ) from error
        found = found.expand(len(part), side_q, side_k).to(torch.bool)
        octets = found.reshape(len(part), side_q, side_k // 8, 8).to(torch.uint8) * weights
        bits[part] = octets.sum(-1, dtype=torch.uint8).view(torch.int32)
    return bits.view(*listed.shape, side_q, side_k // 32)


_PUBLIC: Final = (from_bool, from_intervals, from_lists, from_block_mask)
for _function in _PUBLIC:
    _function.__module__ = "strobe.masks"  # where it is imported from
