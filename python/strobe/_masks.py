"""Masks of scaled_dot_product_attention that hide whole keys, whole queries, the future or all
beyond a window: read, and told as what Strobe computes.

A padded batch under a causal mask shows, for each sequence, a rectangle of queries and keys that is
causal inside and hidden outside. So does padding alone, a sliding window, a cache that is partly
filled. `blocks` finds these rectangles or says that a mask is not made of them; nothing is guessed,
each row of the mask is looked at. A mask that is not becomes one as data (`strobe.masks`), and so
does one that cannot be looked at: while a CUDA graph is captured, or where heads would have to be
compared on a GPU. That is packed on the GPU, and nothing waits for it.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from . import masks
from ._mask_arrays import current_stream
from ._packed_mask import MOST_UNSEEN, bytes_for, room_of_all

Tensor: TypeAlias = torch.Tensor
_Rows: TypeAlias = "np.ndarray[Any, Any]"


class Block(NamedTuple):
    """Queries and keys of neighbours in a batch that one call computes; bottom-right aligned."""

    batch: slice
    queries: slice
    keys: slice
    causal: bool
    window: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A mask as blocks, or why it is none of that kind."""

    blocks: tuple[Block, ...] = ()
    refusal: str = ""
    hides_queries: bool = False  # some see nothing: PyTorch gives 0, Strobe too
    hides_keys: bool = False  # some are seen by nobody
    mask: masks.Mask | None = None  # of the one block, which is everything


# A mask of floating-point numbers that is not made of blocks: added to the scores as it is.
BIAS: Final = Blocks(refusal="it is a bias")
NOT_PADDING: Final = "attn_mask is no padding, no window and not causal"
CAPTURED: Final = "attn_mask cannot be read while a CUDA graph is captured"
_TOO_LARGE: Final = (
    "attn_mask as data may take more memory than it does itself, and more than "
    f"{MOST_UNSEEN >> 20} MiB, while a CUDA graph is captured: pass mask=strobe.masks.from_bool("
    "keep, capacity=...) to strobe.torch.attention"
)
_NOT_COMPARED: Final = (
    "attn_mask has rows for each head, and to compare them would wait for the device: pass one for "
    "all heads, (batch, 1, seqlen_q, seqlen_k)"
)
# Of masks that are served as data or not at all.
DATA_ALONE: Final = (NOT_PADDING, CAPTURED, _NOT_COMPARED)
_NOT_ZERO: Final = "attn_mask adds other numbers than 0 and -inf"
ALL_HIDDEN: Final = "attn_mask hides all keys of a query with a finite number"
NAN: Final = "attn_mask hides all keys of a query, which is NaN in PyTorch before 2.5"
# What PyTorch gives queries that see nothing; before, NaN.
EMPTY_ROWS_ARE_ZERO: Final = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)


def _fit(first: _Rows, end: _Rows, seqlen_q: int) -> tuple[slice, slice, tuple[int, int]] | None:
    """(queries, keys, window) of one sequence; None if it is no block.

    first, end: of the keys that each row sees, end <= first where none; one row stands for all.
    """
    one_for_all = len(first) != seqlen_q
    seen = np.flatnonzero(end > first)
    if seen.size == 0:
        return slice(0, 0), slice(0, 0), (-1, -1)
    begin, stop = int(seen[0]), int(seen[-1]) + 1
    if stop - begin != seen.size:
        return None
    first, end = first[begin:stop], end[begin:stop]
    key, key_end = int(first[0]), int(end[-1])
    left = right = -1
    if one_for_all:
        stop = seqlen_q
    else:
        row = np.arange(begin, stop)
        shift = (key_end - key) - (stop - begin)  # of the diagonal within the block
        if (end != key_end).any():
            right = int(end[0]) - 1 - key - shift
            if not np.array_equal(end, np.minimum(key_end, row + (int(end[0]) - begin))):
                return None
        if (first != key).any():
            left = shift - (int(first[-1]) - (stop - 1) + begin - key)
            if not np.array_equal(first, np.maximum(key, row + (int(first[-1]) - stop + 1))):
                return None
    return slice(begin, stop), slice(key, key_end), (left, right)


class _Read(NamedTuple):
    """Of each row of a mask the first key that it sees, one past the last, and how many it sees."""

    first: _Rows
    end: _Rows
    seen: _Rows
    infinite: bool  # whether what hides is -inf, or False


def _read(mask: Tensor) -> _Read | None:
    """None: it holds more than 0 and what hides. A GPU is waited for once, for all of it."""
    seqlen_k = mask.shape[-1]
    checks: tuple[Tensor, ...] = ()
    seen = mask
    if mask.dtype != torch.bool:
        seen = mask == 0
        hidden = mask <= torch.finfo(mask.dtype).min
        checks = (seen | hidden).all(), (~hidden | (mask == float("-inf"))).all()
    if mask.is_cpu:  # NumPy takes a tenth of the time
        if not all(checks[:1]):
            return None
        marks = seen.numpy()
        end = seqlen_k - marks[..., ::-1].argmax(-1)
        many = marks.view(np.uint8).sum(-1, dtype=np.int32)
        return _Read(marks.argmax(-1), end, many, all(checks))
    number = seen.view(torch.uint8)
    rows = (number.argmax(-1), seqlen_k - number.flip(-1).argmax(-1), number.sum(-1))
    found = torch.cat([x.flatten() for x in (*checks, *rows)]).cpu().numpy()
    said, (first, end, many) = found[: len(checks)], found[len(checks) :].reshape(3, *rows[0].shape)
    return _Read(first, end, many, bool(said.all())) if said[:1].all() else None


def _as_data(mask: Tensor, batch: int, seqlen_q: int) -> Blocks:
    """mask: (1 or batch, 1 or heads, 1 or seqlen_q, seqlen_k), in the CPU's memory."""
    read = _read(mask)
    if read is None:
        return Blocks(refusal=_NOT_ZERO)
    if not read.seen.all():
        if not read.infinite:
            return Blocks(refusal=ALL_HIDDEN)
        if not EMPTY_ROWS_ARE_ZERO:  # pragma: no cover - another PyTorch
            return Blocks(refusal=NAN)
    keep = mask if mask.dtype == torch.bool else mask == 0
    return _packed(keep, batch, seqlen_q, None)


def _packed(keep: Tensor, batch: int, seqlen_q: int, capacity: int | None) -> Blocks:
    """keep: bool, as `mask` of `_as_data`."""
    rows = keep.expand(-1, -1, seqlen_q, -1)
    found = masks.from_bool(rows, block=_block(seqlen_q), capacity=capacity)
    whole = Block(slice(0, batch), slice(0, seqlen_q), slice(0, keep.shape[-1]), False, (-1, -1))
    return Blocks((whole,), mask=found)


def _block(seqlen_q: int) -> tuple[int, int]:
    return 64 if seqlen_q <= 64 else 128, 128


def _unread(mask: Tensor, batch: int, seqlen_q: int) -> Blocks:
    """mask: bool, as that of `_as_data`, on a GPU, where a CUDA graph is captured: with room for
    whatever the graph will find there.
    """
    fields = {"batch": mask.shape[0], "heads": mask.shape[1]}
    fields |= {"seqlen_q": seqlen_q, "seqlen_k": mask.shape[3]}
    room = room_of_all(fields, _block(seqlen_q))
    size = bytes_for(fields, _block(seqlen_q), room[:2])
    if size is None or size > max(MOST_UNSEEN, mask.nbytes):
        return Blocks(refusal=_TOO_LARGE)
    return _packed(mask, batch, seqlen_q, room.entries)


def data_options(mask: Tensor, seqlen_q: int) -> tuple[tuple[int, int], bool, bool]:
    """Of a mask on a GPU as data: its blocks, and whether there is one of each sequence, and of
    each head.
    """
    batch, heads, _, _ = _narrow(mask, bool(_is_alike(mask))).shape
    return _block(seqlen_q), batch > 1, heads > 1


def _find(mask: Tensor, batch: int, seqlen_q: int) -> Blocks:
    """mask: (1 or batch, 1 or seqlen_q, seqlen_k), of few bytes for each pair."""
    seqlen_k = mask.shape[-1]
    read = _read(mask)
    if read is None:
        return Blocks(refusal=_NOT_ZERO)
    begin, end, held, infinite = read
    # A row is one interval if it holds as many keys as lie between its first and its last.
    if not np.array_equal(np.where(held > 0, end - begin, 0), held):
        return Blocks(refusal=NOT_PADDING)
    end = np.where(held > 0, end, begin)

    blocks: list[Block] = []
    for index in range(mask.shape[0]):
        found = _fit(begin[index], end[index], seqlen_q)
        if found is None:
            return Blocks(refusal=NOT_PADDING)
        queries, keys, (left, right) = found
        causal = right == 0
        window = (left, -1 if causal else right)
        sequences = slice(index, index + 1) if mask.shape[0] == batch else slice(0, batch)
        block = Block(sequences, queries, keys, causal, window)
        if blocks and blocks[-1][1:] == block[1:]:
            block = block._replace(batch=slice(blocks.pop().batch.start, sequences.stop))
        blocks.append(block)
    hides_queries = any(b.queries != slice(0, seqlen_q) for b in blocks)
    if hides_queries and not infinite:
        return Blocks(refusal=ALL_HIDDEN)
    if hides_queries and not EMPTY_ROWS_ARE_ZERO:  # pragma: no cover - another PyTorch
        return Blocks(refusal=NAN)
    return Blocks(
        tuple(b for b in blocks if b.queries.start < b.queries.stop),
        hides_queries=hides_queries,
        hides_keys=any(b.keys != slice(0, seqlen_k) for b in blocks),
    )


# --------------------------------------------------------------------------------- kept for a while

# The layers of a model share a mask, a step of generation makes a new one: few are worth keeping,
# and none that takes much memory.
_KEPT: Final = 4
_MOST_KEPT: Final = 1 << 26  # bytes, in the CPU's memory


@dataclass(slots=True)
class _Kept:
    """A mask that was read. In the CPU's memory its contents are compared, wherever the next one
    lies and whoever wrote to it; on a GPU, where that would wait for the device, its identity and
    PyTorch's count of writes to it. What was packed on a GPU is for calls on the same stream, and
    let go of with the mask.
    """

    reference: Any  # the contents, or a weak reference
    version: int
    key: tuple[Any, ...]
    blocks: Blocks

    def is_of(self, mask: Tensor, key: tuple[Any, ...]) -> bool:
        if self.key != key:
            return False
        if mask.is_cpu:
            return bool(torch.equal(self.reference, mask))
        return self.reference() is mask and bool(self.version == mask._version)

    def watch(self, mask: Tensor) -> None:
        """A mask on a GPU."""
        self.reference = weakref.ref(mask, lambda _: self.forget())

    def forget(self) -> None:
        """Lets go of what is packed: the entry itself lives on, in a cycle with its reference."""
        self.blocks = Blocks(refusal="its mask is gone")


class _Memory(threading.local):
    """Of each thread its own: nothing to lock."""

    def __init__(self) -> None:
        self.kept: list[_Kept] = []


_memory: Final = _Memory()


def _is_alike(mask: Tensor) -> bool | None:
    """Whether it is one mask for all heads. In the CPU's memory heads are compared, as a mask is
    copied for each of them where views of it are reshaped; elsewhere None: they may differ.
    """
    if mask.ndim < 3 or mask.shape[-3] == 1 or mask.stride(-3) == 0:
        return True
    if not mask.is_cpu:
        return None
    first = mask.narrow(-3, 0, 1)
    return bool(torch.equal(first.expand_as(mask), mask))


def _narrow(mask: Tensor, alike: bool) -> Tensor:
    """(1 or batch, 1 or heads, 1 or seqlen_q, seqlen_k): one of what is repeated; alike: and of the
    heads the first one.
    """
    missing = (1,) * (4 - mask.ndim)
    (batch, heads, rows, keys), strides = missing + mask.shape, missing + mask.stride()
    shape = (
        1 if strides[0] == 0 else batch,
        1 if alike else heads,
        1 if strides[2] == 0 else rows,
        keys,
    )
    return mask.as_strided(shape, strides)


def blocks(mask: Tensor, batch: int, seqlen_q: int, as_data: bool = False) -> Blocks:
    """What a mask shows. mask: bool or floating, broadcastable to (batch, heads, seqlen_q,
    seqlen_k), its last dimension seqlen_k. On a GPU this waits for the device, unless the mask has
    been read before, or cannot be. as_data: whether a mask of bools on a GPU may become one.
    """
    captures = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    alike = _is_alike(mask)
    narrow = _narrow(mask, bool(alike))
    if captures:  # of the graph alone, which packs what it finds each time that it runs
        return _unread(narrow, batch, seqlen_q) if as_data else Blocks(refusal=CAPTURED)
    if alike is None and not as_data:
        return Blocks(refusal=_NOT_COMPARED)
    kept = _memory.kept
    stream = current_stream(mask.device) if as_data else 0
    key = (mask.device, mask.dtype, tuple(narrow.shape), batch, seqlen_q, as_data, stream)
    watched = narrow if mask.is_cpu else mask
    # Those of torch.inference_mode() count no writes.
    remembers = narrow.nbytes <= _MOST_KEPT if mask.is_cpu else not mask.is_inference()
    if remembers:
        for entry in kept:
            if entry.is_of(watched, key):
                return entry.blocks
    found = _find(narrow[:, 0], batch, seqlen_q) if alike else Blocks(refusal=NOT_PADDING)
    if found.refusal == NOT_PADDING and mask.is_cpu:
        found = _as_data(narrow, batch, seqlen_q)
    elif found.refusal == NOT_PADDING and as_data:
        found = _packed(narrow, batch, seqlen_q, None)
    if remembers:
        entry = _Kept(None, 0 if mask.is_cpu else mask._version, key, found)
        if mask.is_cpu:
            entry.reference = narrow.clone()
        else:
            entry.watch(mask)
            for old in [x for x in kept if x.key == key and x.reference() is mask]:  # written since
                old.forget()
                kept.remove(old)
        kept.insert(0, entry)
        for old in kept[_KEPT:]:
            old.forget()
        del kept[_KEPT:]
    return found
