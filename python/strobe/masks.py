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

from typing import Any

import numpy as np

from ._arrays import NDArray
from ._errors import InvalidArgument, shown
from ._mask_arrays import NUMPY_ARRAYS, arrays_of
from ._mask_sources import (
    from_block_mask,
    from_bool,
    from_intervals,
    from_lists,
    pack_lists,
    with_another,
)
from ._packed_mask import (
    Mask,
    at_least,
    integers,
    lengths_of,
    pack_intervals,
    sides_of,
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
    intervals = with_another(arrays, arrays.int32(intervals))
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
    lengths = arrays.wide("length", lengths.reshape(-1))
    if arrays is NUMPY_ARRAYS and lengths.size > 0:
        at_least("length", lengths.min().item(), 0)
    end = arrays.maximum(lengths[:, None], position + 1)
    intervals = arrays.stack([arrays.zeros(tuple(end.shape), arrays.int64_type), end])
    intervals = with_another(arrays, arrays.int32(intervals))
    return pack_intervals(arrays, intervals[:, None], keys, block, capacity)


def _windows(
    seqlen_q: int, seqlen_k: int | None, left: int, right: int
) -> tuple[NDArray, NDArray, int]:
    """Intervals of each query, of which the second is its window and the first is empty; the
    positions of queries; the number of keys.
    """
    queries, keys, position = lengths_of(seqlen_q, seqlen_k)
    intervals = np.zeros((1, 1, queries, 4), np.int64)
    # (A limit beyond all lengths is none, and sums with it have room in 64 bits.)
    intervals[..., 2] = position - min(at_least("left", left, 0), 1 << 32)
    intervals[..., 3] = position + min(at_least("right", right, 0), 1 << 32) + 1
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
        tokens: so many are global, by position: with fewer keys than queries, the last query
            stands at the last key, and queries before the first key are none of them.
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
        >>> mask.dense()[100].nonzero()[0][:3], int(mask.dense()[100].sum())
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
            f"{wanted[0]}, {wanted[1]})"
        )
    # An entry of each block, which stands for none where it is not visited.
    listed = arrays.where(found, arrays.arange(wanted[1]), -1)
    lists = (listed, None, None, None, None)
    return pack_lists(lists, queries, keys, sides, capacity, False)


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
