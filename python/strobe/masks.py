"""Masks as data: any mask that can be computed, packed once and passed to calls as `mask`.

    mask = strobe.masks.documents(ids)                     # (batch, seqlen) numbers of documents
    out = strobe.attention(q, k, v, causal=True, mask=mask)

A mask says which blocks of queries and keys hold a pair that is seen, and which pairs of those that
are seen in part; blocks that hold none cost nothing. It adds to what causal, window,
attention_chunk, prefix and the lengths say: a pair is seen if all allow it. `strobe.draw` shows the
blocks, docs/masks.md what each mask costs.

Every function here takes and gives arrays of one kind: NumPy's or JAX's in, a NumPy array of words
in the mask; PyTorch's in, a tensor on the same device. Tensors on a GPU are packed there, on the
device's current stream. With a `capacity` nothing waits for the device and nothing but the words
depends on values, so that a CUDA graph can capture packing and replay it with other values. Values
are not checked on a GPU: what is wrong with them hides keys, as each function says. `Mask.to`
copies a mask to another device.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from ._arrays import NDArray
from ._errors import Error, InvalidArgument, shown
from ._mask_arrays import NUMPY_ARRAYS, Arrays, arrays_of, check_may_wait
from ._packed_mask import (
    Mask,
    Room,
    at_least,
    integers,
    lengths_of,
    pack,
    pack_intervals,
    packed_fields,
    sides_of,
    starts_of,
)
from ._values import integer

__all__ = [
    "Mask",
    "blocks",
    "dilated",
    "documents",
    "from_block_mask",
    "from_bool",
    "from_intervals",
    "from_lists",
    "global_window",
    "prefix",
    "sliding",
    "tree",
]


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
            sequence's keys), or without heads: row i has its own sequence's keys.
        block: queries and keys of a block: 64, 128 or 256, or two of these.
        capacity: how many pairs of blocks that are seen there is room for, or a pair: of them, in
            part. The rows of the last blocks of queries are NaN if that is too few. None: as many
            as there are; on a GPU room for all that there may be where that takes at most 64 MiB,
            else the GPU is waited for once, to see what is needed.
        cu_seqlens_q, cu_seqlens_k: int32, (batch + 1,), of packed sequences, as in the call.
        max_seqlen_q, total_k: of packed sequences on a GPU: the most queries of one (or more), and
            the rows of k. None: they are read from cu_seqlens, for which the GPU is waited for.

    Example:
        >>> import numpy as np, strobe
        >>> q, k, v = np.random.randn(3, 1, 300, 2, 64).astype(np.float32)
        >>> mask = strobe.masks.from_bool(np.random.rand(300, 300) < 0.1)
        >>> strobe.attention(q, k, v, mask=mask).shape
        (1, 300, 2, 64)
    """
    arrays = arrays_of("keep", keep)
    found = arrays.take("keep", keep)
    starts = starts_of(arrays, cu_seqlens_q, cu_seqlens_k)
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
        longest = (max_seqlen_q, keys if arrays.on_device else None)
        total = (rows if arrays.on_device else None, total_k)
        fields |= packed_fields(arrays, starts, longest, total)
        if rows < fields["total_q"] or keys < fields["seqlen_k"]:
            raise InvalidArgument(
                f"keep has {rows} rows of {keys} keys, expected at least {fields['total_q']} of "
                f"{fields['seqlen_k']}"
            )
        fields["total_q"] = rows
        strides = (0, *(steps[axis] for axis in (1, 0, 2)))
        given |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
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
        seqlen_k: keys of the call; None: as many as queries. Packed: not used.
        block, capacity, cu_seqlens_q, cu_seqlens_k: as in `from_bool`.
        max_seqlen_q, max_seqlen_k, total_k: of packed sequences on a GPU, as in `from_bool`.

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
    starts = starts_of(arrays, cu_seqlens_q, cu_seqlens_k)
    axes = ("heads", "total_q") if starts else ("batch", "heads", "seqlen_q")
    fits = 2 <= found.ndim <= len(axes) + 1 and found.shape[-1] in (2, 4)
    if not fits or not arrays.is_integer(found):
        raise InvalidArgument(
            f"intervals is {found.dtype} {tuple(found.shape)}, expected integers "
            f"({', '.join(axes)}, 2 or 4)"
        )
    found = found.reshape((1,) * (4 - found.ndim) + tuple(found.shape))
    if found.shape[-1] == 2:
        found = _with_another(arrays, arrays.int32(found))
    if starts is None:
        keys = found.shape[2] if seqlen_k is None else at_least("seqlen_k", seqlen_k, 0)
        return pack_intervals(arrays, found, keys, block, capacity)
    rows = found.shape[2]
    total = (rows if arrays.on_device else None, total_k)
    fields = packed_fields(arrays, starts, (max_seqlen_q, max_seqlen_k), total)
    if rows < fields["total_q"]:
        raise InvalidArgument(
            f"intervals has {rows} rows, expected at least {fields['total_q']} as cu_seqlens_q has "
            "them"
        )
    fields["total_q"] = rows
    return pack_intervals(arrays, found, 0, block, capacity, starts, fields)


def _with_another(arrays: Arrays, intervals: Any) -> Any:
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
    return _pack_lists(lists, seqlen_q, seqlen_k, block, capacity, partial_bits is None)


def _pack_lists(
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


def documents(
    ids: Any,
    ids_k: Any = None,
    *,
    block: int | tuple[int, int] = 128,
    capacity: int | tuple[int, int] | None = None,
) -> Mask:
    """Documents one after the other in a sequence: a query sees the keys of its own document.

    With causal=True of the call, each is causal by itself.

    Args:
        ids: integers, (batch, seqlen_q) or (seqlen_q,): the document of each query. Negative ones
            are padding: it sees nothing.
        ids_k: the document of each key; None: those of the queries. A document's keys lie together;
            on a GPU, where that is not checked, queries of one whose keys do not see nothing.
        block, capacity: as in `from_bool`.

    Example:
        >>> import numpy as np, strobe
        >>> mask = strobe.masks.documents(np.repeat([0, 1, 2], [100, 130, 70]), block=64)
        >>> mask.tiles()
        array([[2, 1, 0, 0, 0],
               [1, 1, 1, 1, 0],
               [0, 1, 2, 1, 0],
               [0, 1, 1, 1, 1],
               [0, 0, 0, 1, 2]], dtype=int8)
    """
    arrays = arrays_of("ids", ids)
    queries = integers(arrays, "ids", ids, ("batch", "seqlen_q"))
    keys = queries
    if ids_k is not None:
        keys = integers(arrays, "ids_k", ids_k, ("batch", "seqlen_k"))
    if len(keys) != len(queries) and 1 not in (len(keys), len(queries)):
        raise InvalidArgument(f"ids_k.shape[0] = {len(keys)}, expected {len(queries)} as of ids")
    batch, length = max(len(keys), len(queries)), keys.shape[1]
    if length == 0:
        nothing = arrays.zeros((batch, 1, queries.shape[1], 4), arrays.int32_type)
        return pack_intervals(arrays, nothing, 0, block, capacity)
    # The keys of a document come together when they are sorted, in their order.
    order = arrays.order(keys)
    rows = [arrays.broadcast(x, batch) for x in (arrays.pick(keys, order), order, queries)]
    ordered, order, queries = rows
    low, high = (arrays.search(ordered, queries, side) for side in ("left", "right"))
    begin = arrays.pick(order, arrays.clip(low, 0, length - 1))
    end = arrays.pick(order, arrays.clip(high - 1, 0, length - 1)) + 1
    sees = (low < high) & (queries >= 0)
    together = end - begin == high - low
    if not arrays.on_device and (sees & ~together).any():
        b, query = (int(x[0]) for x in np.nonzero(np.asarray(sees & ~together)))
        raise InvalidArgument(
            f"document {int(queries[b, query])} has keys at two places of sequence {b}, expected "
            "one run"
        )
    sees = sees & together
    intervals = arrays.stack([arrays.where(sees, begin, 0), arrays.where(sees, end, 0)])
    intervals = _with_another(arrays, arrays.int32(intervals))
    return pack_intervals(arrays, intervals[:, None], length, block, capacity)


def prefix(
    length: Any,
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    block: int | tuple[int, int] = 128,
    capacity: int | tuple[int, int] | None = None,
) -> Mask:
    """Prefix-LM: causal, and all queries see the first `length` keys.

    Args:
        length: an integer, or integers (batch,).
        seqlen_q, seqlen_k: lengths; None: as many keys as queries. The last query stands at the
            last key.
        block, capacity: as in `from_bool`.

    Example:
        >>> import strobe
        >>> strobe.masks.prefix(70, 256, block=64).tiles()
        array([[2, 1, 0, 0],
               [2, 1, 0, 0],
               [2, 2, 1, 0],
               [2, 2, 2, 1]], dtype=int8)
    """
    arrays = arrays_of("length", length)
    _, keys, position = lengths_of(seqlen_q, seqlen_k, arrays)
    lengths = arrays.take("length", length)
    if lengths.ndim > 1 or not arrays.is_integer(lengths):
        raise InvalidArgument(
            f"length is {shown(length)}, expected an integer or integers (batch,)"
        )
    end = arrays.maximum(arrays.wide(lengths.reshape(-1))[:, None], position + 1)
    intervals = arrays.stack([arrays.zeros(tuple(end.shape), arrays.int64_type), end])
    intervals = _with_another(arrays, arrays.int32(intervals))
    return pack_intervals(arrays, intervals[:, None], keys, block, capacity)


def _windows(
    seqlen_q: int, seqlen_k: int | None, left: int, right: int
) -> tuple[NDArray, NDArray, int]:
    """Intervals of each query, of which the second is its window and the first is empty; the
    positions of queries; the number of keys.
    """
    queries, keys, position = lengths_of(seqlen_q, seqlen_k)
    intervals = np.zeros((1, 1, queries, 4), np.int64)
    intervals[..., 2] = position - at_least("left", left, 0)
    intervals[..., 3] = position + at_least("right", right, 0) + 1
    return intervals, position, keys


def sliding(
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    left: int,
    right: int = 0,
    first: int = 0,
    block: int | tuple[int, int] = 128,
    capacity: int | tuple[int, int] | None = None,
) -> Mask:
    """A sliding window that keeps the first keys: what StreamingLLM's models see.

    Args:
        seqlen_q, seqlen_k: as in `prefix`.
        left, right: keys before and behind a query's own position.
        first: so many keys at the begin are seen too, as far as they are not behind the window.
        block, capacity: as in `from_bool`.

    Example:
        >>> import strobe
        >>> strobe.masks.sliding(256, left=32, first=4, block=64).tiles()
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 0, 1, 1]], dtype=int8)
    """
    intervals, _, keys = _windows(seqlen_q, seqlen_k, left, right)
    intervals[..., 1] = np.minimum(at_least("first", first, 0), intervals[..., 3])
    return pack_intervals(NUMPY_ARRAYS, intervals, keys, block, capacity)


def global_window(
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    left: int,
    right: int,
    tokens: int,
    block: int | tuple[int, int] = 128,
    capacity: int | tuple[int, int] | None = None,
) -> Mask:
    """Longformer's: a window, and the first tokens see all and are seen by all.

    Args:
        seqlen_q, seqlen_k: as in `prefix`.
        left, right: keys before and behind a query's own position.
        tokens: so many are global.
        block, capacity: as in `from_bool`.

    Example:
        >>> import strobe
        >>> strobe.masks.global_window(256, left=64, right=64, tokens=64, block=64).tiles()
        array([[2, 2, 2, 2],
               [2, 2, 1, 0],
               [2, 1, 2, 1],
               [2, 0, 1, 2]], dtype=int8)
    """
    intervals, position, keys = _windows(seqlen_q, seqlen_k, left, right)
    count = at_least("tokens", tokens, 0)
    is_global = (position >= 0) & (position < count)
    intervals[..., 1] = np.where(is_global, keys, count)
    return pack_intervals(NUMPY_ARRAYS, intervals, keys, block, capacity)


def dilated(
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    step: int,
    window: int,
    block: int | tuple[int, int] = 128,
    capacity: int | tuple[int, int] | None = None,
) -> Mask:
    """A dilated window: keys at distances that are multiples of `step`, `window` on either side.

    Args:
        seqlen_q, seqlen_k: as in `prefix`.
        step: distance of keys that are seen, at least 1.
        window: how many are seen on each side, besides the one at the query's position.
        block, capacity: as in `from_bool`.

    Example:
        >>> import strobe
        >>> mask = strobe.masks.dilated(256, step=3, window=20, block=64)
        >>> mask.dense()[100].nonzero()[0][:3], mask.dense()[100].sum()
        (array([40, 43, 46]), 41)
    """
    queries, keys, _ = lengths_of(seqlen_q, seqlen_k)
    step, window = at_least("step", step, 1), at_least("window", window, 0)
    # One number for each distance; rows of the mask are this line, shifted by one each.
    distance = np.arange(-(keys - 1), queries) if queries and keys else np.zeros(0, np.int64)
    distance = distance + (keys - queries)  # of a query's position from a key
    line = (distance % step == 0) & (np.abs(distance) <= step * window)
    reversed_ = np.ascontiguousarray(line[::-1])  # ascending keys
    view = np.lib.stride_tricks.as_strided(
        reversed_[max(queries - 1, 0) :], (queries, keys), (-1, 1), writeable=False
    )
    return from_bool(view, block=block, capacity=capacity)


def blocks(
    visited: Any,
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    block: int | tuple[int, int] = 128,
    capacity: int | None = None,
) -> Mask:
    """Whole blocks: which blocks of keys each block of queries sees, as selections give them.

    Args:
        visited: bool, (batch or 1, heads or 1, blocks of queries, blocks of keys), where axes
            before the blocks may be missing.
        seqlen_q, seqlen_k: lengths; None: as many keys as queries.
        block: as in `from_bool`.
        capacity: as in `from_bool`.

    Example:
        >>> import numpy as np, strobe
        >>> strobe.masks.blocks(np.eye(3, dtype=bool), 384).tiles()
        array([[2, 0, 0],
               [0, 2, 0],
               [0, 0, 2]], dtype=int8)
    """
    queries, keys, _ = lengths_of(seqlen_q, seqlen_k)
    side_q, side_k = sides = sides_of(block)
    arrays = arrays_of("visited", visited)
    found = arrays.take("visited", visited)
    wanted = (-(-queries // side_q), -(-keys // side_k))
    if not arrays.is_bool(found) or not 2 <= found.ndim <= 4 or found.shape[-2:] != wanted:
        raise InvalidArgument(
            f"visited is {found.dtype} {tuple(found.shape)}, expected bool (batch, heads, "
            f"*{wanted})"
        )
    # An entry of each block, which stands for none where it is not visited.
    listed = arrays.where(found, arrays.arange(wanted[1]), -1)
    lists = (listed, None, None, None, None)
    return _pack_lists(lists, queries, keys, sides, capacity, False)


def tree(
    parents: Any,
    *,
    context: int = 0,
    keys: int | None = None,
    block: int | tuple[int, int] = 64,
    capacity: int | tuple[int, int] | None = None,
) -> Mask:
    """A tree of tokens, as speculative decoding checks them: a token sees itself, its ancestors,
    and the context before the tree.

    Args:
        parents: integers, (batch, tokens) or (tokens,): the number of each token's parent, which
            comes before it; -1: the root's. On a GPU, where that is not checked, a token whose
            parent is none of those stands for a root.
        context: so many keys come before the tree, and all tokens see them.
        keys: of a call, at least context + tokens; those behind the tree are seen by none. Over a
            cache: the rows that a sequence has room for. None: context + tokens.
        block, capacity: as in `from_bool`.

    Example:
        >>> import numpy as np, strobe
        >>> strobe.masks.tree(np.array([-1, 0, 0, 1])).dense().astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 0, 1, 0],
               [1, 1, 0, 1]])
    """
    arrays = arrays_of("parents", parents)
    found = integers(arrays, "parents", parents, ("batch", "tokens"))
    before = at_least("context", context, 0)
    batch, tokens = found.shape
    number = arrays.arange(tokens)
    if not arrays.on_device and ((found >= number) | (found < -1)).any():
        b, token = (int(x[0]) for x in np.nonzero(np.asarray((found >= number) | (found < -1))))
        place = token if batch == 1 else f"{b}, {token}"
        raise InvalidArgument(
            f"parents[{place}] = {int(found[b, token])}, expected -1 (a root) or an earlier token"
        )
    length = before + tokens if keys is None else integer("keys", keys)
    if length < before + tokens:
        raise InvalidArgument(
            f"keys = {length}, expected at least context + tokens = {before} + {tokens}"
        )
    # Who is above whom, one step up; then two, four, ... Above a root is a row behind the last
    # token's, which is above itself and sees nothing.
    up = arrays.zeros((batch, tokens + 1), arrays.int64_type) + tokens
    up[:, :tokens] = arrays.where((found >= 0) & (found < number), found, tokens)
    seen = arrays.zeros((batch, tokens + 1, tokens), arrays.bool_type)
    seen[:, :tokens] = number[:, None] == number
    for _ in range(max(tokens - 1, 0).bit_length()):
        seen = seen | arrays.pick(seen, up[..., None], axis=1)
        up = arrays.pick(up, up)
    keep = arrays.zeros((batch, 1, tokens, length), arrays.bool_type)
    keep[..., :before] = True
    keep[:, 0, :, before : before + tokens] = seen[:, :tokens]
    return from_bool(keep, block=block, capacity=capacity)


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
    sides = sides_of((int(size_q), int(size_k)))
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
    return _pack_lists((*lists, bits), queries, keys, sides, capacity, most)


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
            raise InvalidArgument(f"block_mask.mask_mod cannot be evaluated: {error}") from error
        found = found.expand(len(part), side_q, side_k).to(torch.bool)
        octets = found.reshape(len(part), side_q, side_k // 8, 8).to(torch.uint8) * weights
        bits[part] = octets.sum(-1, dtype=torch.uint8).view(torch.int32)
    return bits.view(*listed.shape, side_q, side_k // 32)
