"""Masks as data: any mask that can be computed, packed once and passed to calls as `mask`.

    mask = strobe.masks.documents(ids)                     # (batch, seqlen) numbers of documents
    out = strobe.attention(q, k, v, causal=True, mask=mask)

A mask says which blocks of queries and keys hold a pair that is seen, and which pairs of those that
are seen in part; blocks that hold none cost nothing. It adds to what causal, window,
attention_chunk, prefix and the lengths say: a pair is seen if all allow it. `strobe.draw` shows the
blocks, docs/masks.md what each mask costs.

Every function here takes and gives arrays of one kind: NumPy's or JAX's in, a NumPy array of words
in the mask; PyTorch's in, a tensor. They pack on the CPU; `Mask.to` copies a mask to a GPU.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ._arrays import NDArray, is_tensor
from ._errors import Error, InvalidArgument, shown
from ._packed_mask import (
    Mask,
    as_numpy,
    at_least,
    from_intervals,
    integers,
    lengths_of,
    pack,
    packed_fields,
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
) -> Mask:
    """A mask from bools: True attends.

    Args:
        keep: bool, (batch or 1, heads or 1, seqlen_q, seqlen_k), where axes before seqlen_q may be
            missing, of any strides; it is read and not kept. Packed: (heads or 1, total_q, longest
            sequence's keys), or without heads: row i has its own sequence's keys.
        block: queries and keys of a block: 64, 128 or 256, or two of these.
        capacity: how many pairs of blocks that are seen there is room for, or a pair: of them, in
            part. The rows of the last blocks of queries are NaN if that is too few. None: as many
            as there are.
        cu_seqlens_q, cu_seqlens_k: int32, (batch + 1,), of packed sequences, as in the call.

    Example:
        >>> import numpy as np, strobe
        >>> q, k, v = np.random.randn(3, 1, 300, 2, 64).astype(np.float32)
        >>> mask = strobe.masks.from_bool(np.random.rand(300, 300) < 0.1)
        >>> strobe.attention(q, k, v, mask=mask).shape
        (1, 300, 2, 64)
    """
    found = as_numpy(keep, "keep")
    starts = _starts(cu_seqlens_q, cu_seqlens_k)
    axes = ("heads", "total_q", "keys") if starts else ("batch", "heads", "seqlen_q", "seqlen_k")
    if found.dtype != np.bool_ or not 2 <= found.ndim <= len(axes):
        raise InvalidArgument(
            f"keep is {found.dtype} {found.shape}, expected bool ({', '.join(axes)})"
        )
    found = found[(None,) * (len(axes) - found.ndim)]
    # What is expanded is one mask for all.
    for axis in range(found.ndim - 2):
        if found.strides[axis] == 0 and found.shape[axis] > 1:
            found = found[(slice(None),) * axis + (slice(0, 1),)]
    arrays = {"keep": found}
    fields: dict[str, Any] = {"heads": found.shape[-3]}
    if starts is None:
        fields |= {"batch": found.shape[0], "seqlen_q": found.shape[2], "seqlen_k": found.shape[3]}
        strides = tuple(found.strides[axis] for axis in (0, 2, 1, 3))
    else:
        fields |= packed_fields(starts)
        if found.shape[1] < fields["total_q"] or found.shape[2] < fields["seqlen_k"]:
            raise InvalidArgument(
                f"keep has {found.shape[1]} rows of {found.shape[2]} keys, expected at least "
                f"{fields['total_q']} of {fields['seqlen_k']}"
            )
        fields["total_q"] = found.shape[1]
        strides = (0, *(found.strides[axis] for axis in (1, 0, 2)))
        arrays |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    if 0 in found.shape or strides == (0, 0, 0, 0):
        # Nothing is there, or all is one element, which no strides can say.
        arrays["keep"] = np.ascontiguousarray(found)
        strides = (0, 0, 0, 0)
    more = {"keep_strides": strides}
    return pack(fields, arrays, sides_of(block), capacity, is_tensor(keep), more, starts)


def _starts(cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[NDArray, NDArray] | None:
    """Both arrays of cumulative lengths, or None."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return None
    both = []
    for name, array in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if array is None:
            raise InvalidArgument(f"{name} = None, expected an array: the other one is given")
        found = np.ascontiguousarray(as_numpy(array, name), np.int32).copy()
        if found.ndim != 1 or found.shape[0] < 2:
            raise InvalidArgument(f"{name}.shape = {found.shape}, expected (batch + 1,)")
        both.append(found)
    return both[0], both[1]


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
        ids_k: the document of each key; None: those of the queries. A document's keys lie together.
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
    queries = integers("ids", ids, ("batch", "seqlen_q"))
    keys = queries if ids_k is None else integers("ids_k", ids_k, ("batch", "seqlen_k"))
    if len(keys) != len(queries) and 1 not in (len(keys), len(queries)):
        raise InvalidArgument(f"ids_k.shape[0] = {len(keys)}, expected {len(queries)} as of ids")
    batch = max(len(keys), len(queries))
    intervals = np.zeros((batch, queries.shape[1], 4), np.int64)
    for b in range(batch):
        row, own = keys[b % len(keys)], queries[b % len(queries)]
        begin = np.flatnonzero(np.diff(row, prepend=row[:1] - 1))
        end = np.append(begin[1:], row.shape[0])[: len(begin)]
        names = row[begin]
        there = names >= 0
        begin, end, names = begin[there], end[there], names[there]
        order = np.argsort(names, kind="stable")
        begin, end, names = begin[order], end[order], names[order]
        twice = names[1:][names[1:] == names[:-1]]
        if len(twice):
            raise InvalidArgument(
                f"document {twice[0]} has keys at two places of sequence {b}, expected one run"
            )
        if not len(names):
            continue
        at = np.minimum(np.searchsorted(names, own), len(names) - 1)
        found = names[at] == own
        intervals[b, :, 0] = np.where(found, begin[at], 0)
        intervals[b, :, 1] = np.where(found, end[at], 0)
    return from_intervals(intervals, keys.shape[1], block, capacity, is_tensor(ids))


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
    queries, keys, position = lengths_of(seqlen_q, seqlen_k)
    lengths = np.atleast_1d(as_numpy(length, "length"))
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise InvalidArgument(
            f"length is {shown(length)}, expected an integer or integers (batch,)"
        )
    intervals = np.zeros((len(lengths), queries, 4), np.int64)
    intervals[:, :, 1] = np.maximum(lengths[:, None], position + 1)
    return from_intervals(intervals, keys, block, capacity, is_tensor(length))


def _windows(
    seqlen_q: int, seqlen_k: int | None, left: int, right: int
) -> tuple[NDArray, NDArray, int]:
    """Intervals of each query, of which the second is its window and the first is empty; the
    positions of queries; the number of keys.
    """
    queries, keys, position = lengths_of(seqlen_q, seqlen_k)
    intervals = np.zeros((1, queries, 4), np.int64)
    intervals[:, :, 2] = position - at_least("left", left, 0)
    intervals[:, :, 3] = position + at_least("right", right, 0) + 1
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
    intervals[:, :, 1] = np.minimum(at_least("first", first, 0), intervals[:, :, 3])
    return from_intervals(intervals, keys, block, capacity)


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
    intervals[:, :, 1] = np.where(is_global, keys, count)
    return from_intervals(intervals, keys, block, capacity)


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
    found = as_numpy(visited, "visited")
    wanted = (-(-queries // side_q), -(-keys // side_k))
    if found.dtype != np.bool_ or not 2 <= found.ndim <= 4 or found.shape[-2:] != wanted:
        raise InvalidArgument(
            f"visited is {found.dtype} {found.shape}, expected bool (batch, heads, *{wanted})"
        )
    found = found[(None,) * (4 - found.ndim)]
    counts = found.sum(axis=-1, dtype=np.int32)
    columns = max(1, int(counts.max(initial=0)))
    # Those that are visited first, in ascending order.
    listed = np.argsort(~found, axis=-1, kind="stable")[..., :columns].astype(np.int32)
    columns = listed.shape[-1]
    arrays = {"full_counts": np.ascontiguousarray(counts)}
    arrays["full_blocks"] = np.ascontiguousarray(listed)
    fields = {"batch": found.shape[0], "heads": found.shape[1]}
    fields |= {"seqlen_q": queries, "seqlen_k": keys}
    more = {"full_columns": columns}
    return pack(fields, arrays, sides, capacity, is_tensor(visited), more)


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
            comes before it; -1: the root's.
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
    found = integers("parents", parents, ("batch", "tokens"))
    before = at_least("context", context, 0)
    batch, tokens = found.shape
    wrong = np.argwhere((found >= np.arange(tokens)) | (found < -1))
    if len(wrong):
        b, token = wrong[0].tolist()
        place = token if batch == 1 else f"{b}, {token}"
        raise InvalidArgument(
            f"parents[{place}] = {found[b, token]}, expected -1 (a root) or an earlier token"
        )
    length = before + tokens if keys is None else integer("keys", keys)
    if length < before + tokens:
        raise InvalidArgument(
            f"keys = {length}, expected at least context + tokens = {before} + {tokens}"
        )
    keep = np.zeros((batch, 1, tokens, length), np.bool_)
    keep[..., :before] = True
    for i in range(tokens):
        for b in range(batch):
            if found[b, i] >= 0:
                keep[b, 0, i] = keep[b, 0, found[b, i]]
            keep[b, 0, i, before + i] = True
    mask = from_bool(keep, block=block, capacity=capacity)
    if not is_tensor(parents):
        return mask
    as_tensor = sys.modules["torch"].from_numpy(mask.packed)
    return Mask(as_tensor, mask.shape, mask.block, mask.capacity, mask.partial_capacity)


def from_block_mask(block_mask: Any, *, capacity: int | tuple[int, int] | None = None) -> Mask:
    """A mask from torch.nn.attention.flex_attention's BlockMask.

    Its mask_mod is asked for the blocks alone that it says are seen in part.

    Args:
        block_mask: a BlockMask on the CPU whose BLOCK_SIZE is 64, 128 or 256 on either side.
        capacity: as in `from_bool`.

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
    counts = as_numpy(block_mask.kv_num_blocks, "block_mask")
    batch, heads, _ = counts.shape
    lengths = getattr(block_mask, "seq_lengths", None) or block_mask.shape[-2:]
    queries, keys = (int(x) for x in lengths)
    arrays: dict[str, NDArray] = {}
    more: dict[str, int] = {}
    for name, number, index in (
        ("partial", block_mask.kv_num_blocks, block_mask.kv_indices),
        ("full", block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        if number is None:
            continue
        found = np.ascontiguousarray(as_numpy(number), np.int32)
        columns = max(1, int(found.max(initial=0)))
        listed = np.ascontiguousarray(as_numpy(index)[..., :columns], np.int32)
        arrays |= {f"{name}_counts": found, f"{name}_blocks": listed}
        more[f"{name}_columns"] = listed.shape[-1]
    arrays["partial_bits"] = _evaluated(
        torch,
        block_mask.mask_mod,
        arrays["partial_counts"],
        arrays["partial_blocks"],
        sides,
        (queries, keys),
    )
    fields = {"batch": batch, "heads": heads, "seqlen_q": queries, "seqlen_k": keys}
    return pack(fields, arrays, sides, capacity, True, more)


def _evaluated(
    torch: Any,
    mask_mod: Any,
    counts: NDArray,
    listed: NDArray,
    sides: tuple[int, int],
    lengths: tuple[int, int],
) -> NDArray:
    """What mask_mod says of the pairs of these entries, in bits."""
    side_q, side_k = sides
    bits = np.zeros((*listed.shape, side_q, side_k // 32), np.uint32)
    there = np.arange(listed.shape[-1]) < counts[..., None]
    there &= (listed >= 0) & (listed * side_k < lengths[1])
    entries = np.argwhere(there)
    function = mask_mod
    for axes in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        function = torch.vmap(function, axes)
    some = max(1, (1 << 22) // (side_q * side_k))  # at a time
    for first in range(0, len(entries), some):
        b, h, row, column = entries[first : first + some].T
        # What is past the end is asked like the last one: mask_mod may look it up in a tensor.
        q = np.minimum(row[:, None] * side_q + np.arange(side_q), lengths[0] - 1)
        k = listed[b, h, row, column][:, None].astype(np.int64) * side_k + np.arange(side_k)
        k = np.minimum(k, lengths[1] - 1)
        try:
            found = function(*(torch.from_numpy(np.ascontiguousarray(x)) for x in (b, h, q, k)))
        except Error:
            raise
        except Exception as error:
            raise InvalidArgument(f"block_mask.mask_mod cannot be evaluated: {error}") from error
        found = found.expand(len(b), side_q, side_k).to(torch.bool).contiguous().numpy()
        packed = np.packbits(found, axis=-1, bitorder="little")
        bits[b, h, row, column] = packed.view(np.uint32).reshape(len(b), side_q, side_k // 32)
    return bits
