"""Who computes what and what travels, when sequences are split over ranks: the schedule of
`strobe.distributed`, in plain numbers and without PyTorch. Who holds what is said by `_layout`.

Attention chunks see themselves alone, as packed sequences do: where there are such, what a rank has
of each is a sequence of its own to the steps, and they ask no mask for it.

Queries stay where they are. A step is named by its distance d: rank r then attends to keys of rank
r - d, which sends them straight to r (modulo n), and later gets their gradients back in the same
way. Step 0 is the rank's own keys. Because keys come from their owner, rows that no query of the
receiver sees are not sent at all, where a chunk that is handed on from rank to rank has to pass
those that do not need it. The bytes of a step are the same, and every rank's link carries them.

Rows with nothing to do with other ranks need no step: one call gives what is theirs, as on one
device. Those are sequences that a rank has whole, and under a window most rows of a long chunk, but
for some at its ends.

All ranks compute this from the same few numbers, so that sender and receiver agree without a
message.

Groups. So many neighbouring ranks (`inside`) may be a group that has its ranks' rows together, each
of them with a share of the heads, by an all-to-all. The ring then goes from group to group: `rank`
is one of these in all that follows. With groups of one rank, which is what no `inside` means, they
are the ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, Final, Literal, NamedTuple, Protocol

from ._layout import Chunk, Layout, Lengths, Rows


class Mask(NamedTuple):
    """A query sees the keys from `left` positions before its own to `right` after it; None: no
    limit. Neither is negative, so that every query sees the key at its own position.

    by_distance: whether scores depend on the distance of query and key even where nothing is hidden
    (ALiBi), or dropout on where both stand: blocks must then keep their positions. attention_chunk:
    a query sees the keys of its own chunk of so many positions alone.
    """

    left: int | None = None
    right: int | None = None
    by_distance: bool = False
    attention_chunk: int | None = None

    @property
    def width(self) -> int | None:
        """How many keys a query sees at most; None: there is no such limit."""
        return None if self.left is None or self.right is None else self.left + self.right + 1

    @property
    def is_causal_alone(self) -> bool:
        """Whether all that it asks, within an attention chunk, is which of two rows is the later
        one.
        """
        return self[:3] == (None, 0, False)


class Block(NamedTuple):
    """One call of attention: queries of a rank against keys that it has at hand. Every other pair
    of the two intervals is hidden or belongs to another block.

    q: rows of the rank; k: rows of the rank itself, or of what it received in this step; position:
    that of the first query minus that of the first key; masked: whether the mask hides some pair.
    """

    q: Rows
    k: Rows
    position: int
    masked: bool

    @property
    def pairs(self) -> int:
        """How many scores a kernel computes, about: a masked block is half empty."""
        return self.q.size * self.k.size // (2 if self.masked else 1)

    @property
    def has_own(self) -> bool:
        """Of the rank's own keys: whether each query's own one is among them."""
        return self.k.begin <= self.q.begin and self.q.end <= self.k.end


class Batch(NamedTuple):
    """Blocks that one call computes, each a sequence of its own: ascending, and apart from each
    other, among the queries and among the keys.
    """

    blocks: tuple[Block, ...]

    @property
    def q(self) -> Rows:
        """From the first query to the last, with those between blocks."""
        return Rows(self.blocks[0].q.begin, self.blocks[-1].q.end)

    @property
    def k(self) -> Rows:
        """Likewise of the keys."""
        return Rows(self.blocks[0].k.begin, self.blocks[-1].k.end)


class Step(NamedTuple):
    """What a rank does at one distance. Either list of rows may be empty, and there is then no
    message; the blocks' keys are rows of what is received, piece after piece.

    receives: rows of the rank `source`; sends: the rank's own, to the rank `target`.
    """

    distance: int
    source: int
    target: int
    receives: tuple[Rows, ...]
    sends: tuple[Rows, ...]
    blocks: tuple[Block, ...]


class Schedule(NamedTuple):
    """All of a rank's work, forward and backward. Every rank has the steps 1 to n - 1, so that
    messages have one order for all of them, which is why none waits for ever.

    Forward, before the steps:
    final: blocks each of whose queries has no other block: out is theirs.
    own: the other queries against the rank's keys, while the first keys travel.

    Backward, of the same pairs, whose gradients are sums or final:
    edges: of the blocks of final_last, squares at their ends in which lie all pairs of the rows
        that others add to. They are computed twice, here for sums. Before the steps.
    own_first, own_last: what is a sum alone, before the steps and behind them.
    final_first: blocks whose rows have no other, before the steps (whole).
    final_last: behind the steps, blocks of whose gradients others add to some: to those of edges;
        and whole ones between those.
    While the first keys travel, a rank computes edges, own_first and final_first; and own_last and
    final_last while the last gradients do.
    """

    rows: int
    final: tuple[Block, ...] = ()
    own: tuple[Block, ...] = ()
    edges: tuple[Block, ...] = ()
    own_first: tuple[Block, ...] = ()
    own_last: tuple[Block, ...] = ()
    final_first: tuple[Block, ...] = ()
    final_last: tuple[Block, ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def of_own_keys(self) -> tuple[tuple[Block, ...], ...]:
        """All lists of blocks but those of the steps."""
        return self[1:-1]

    @property
    def summed_q(self) -> tuple[Rows, ...]:
        """Rows whose dq is a sum over blocks."""
        steps = (block for step in self.steps for block in step.blocks)
        return joined(block.q for block in (*self.own_first, *self.own_last, *steps))

    @property
    def summed_k(self) -> tuple[Rows, ...]:
        """Rows whose dk and dv are sums, over blocks or over ranks."""
        own = [block.k for block in (*self.own_first, *self.own_last)]
        return joined([*own, *(rows for step in self.steps for rows in step.sends)])


class Room(NamedTuple):
    """Memory for some rows of a rank, these intervals end to end."""

    rows: tuple[Rows, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.rows)

    def place(self, rows: Rows) -> Rows:
        """Where rows stand in it, which lie in one of the intervals."""
        before = 0
        for part in self.rows:
            if rows.end <= part.end:
                break
            before += part.size
        begin = before + rows.begin - part.begin
        return Rows(begin, begin + rows.size)


class Seen(Protocol):
    """What a mask as data leaves, as far as every rank knows it. Numbers are rows of all sequences,
    and q and k are of one sequence.
    """

    def part(self, q: Rows, k: Rows) -> tuple[Rows, Rows] | None:
        """Intervals of these that hold all pairs which may be seen, the smallest but for where keys
        begin (dropout); None: there is none.
        """


@lru_cache(maxsize=256)
def attended(layout: Layout, rank: int, mask: Mask, inside: int = 1) -> tuple[Chunk, ...]:
    """What a rank holds, cut where attention chunks end: each of these is a sequence of its own."""
    held, size = layout.chunks(rank, inside), mask.attention_chunk
    if size is None:
        return held
    starts = layout.starts
    before = [0, *accumulate(-(-length // size) for length in layout.lengths)]  # attention chunks
    found = []
    for row, begin, end, sequence in held:
        first = begin
        while first < end:
            number = (first - starts[sequence]) // size
            stop = min(end, starts[sequence] + (number + 1) * size)
            found.append(Chunk(row + first - begin, first, stop, before[sequence] + number))
            first = stop
    return tuple(found)


def packed_options(begins: Any, lengths: Lengths) -> dict[str, Any]:
    """Options of a call for packed sequences that attend to themselves. begins: their cu_seqlens,
    in whatever form the call takes it.
    """
    longest = max(lengths, default=0)
    return {
        "cu_seqlens_q": begins,
        "cu_seqlens_k": begins,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


@lru_cache(maxsize=256)
def schedule(layout: Layout, rank: int, mask: Mask, inside: int = 1) -> Schedule:
    """The work of one rank."""
    return schedule_of(layout, rank, mask, inside, None)


def schedule_of(layout: Layout, rank: int, mask: Mask, inside: int, seen: Seen | None) -> Schedule:
    """The same, of a mask as data too: what it hides whole is neither sent nor computed. A rank's
    own pairs do not ask it, since each row has its first result from them.
    """
    mine, ranks = attended(layout, rank, mask, inside), layout.ranks // inside
    steps = []
    for distance in range(1, ranks):
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        blocks, receives = _received(mine, attended(layout, source, mask, inside), mask, seen)
        sends = _received(attended(layout, target, mask, inside), mine, mask, seen)[1]
        steps.append(Step(distance, source, target, receives, sends, blocks))
    others = _Others(
        joined(block.q for step in steps for block in step.blocks),
        joined(rows for step in steps for rows in step.sends),
    )
    sequences = [tuple(x) for _, x in groupby(mine, key=lambda chunk: chunk.sequence)]
    found = [_divided(held, mask, others) for held in sequences]
    sums = (block.q for part in found for block in (*part.own, *part.edges, *part.own_last))
    if len(joined(sums)) > MOST_PARTS:
        # Final are those from the last one on that others have nothing of.
        behind = len(found)
        while behind and not _has_sums(found[behind - 1]):
            behind -= 1
        found[:behind] = [_divided(held, mask, None) for held in sequences[:behind]]
    lists = zip(*(x.of_own_keys for x in (Schedule(0), *found)), strict=True)
    of_own = (tuple(chain.from_iterable(blocks)) for blocks in lists)
    every = Schedule._make((layout.rows_of(rank, inside), *of_own, tuple(steps)))
    # A call of packed sequences writes zeros to rows between its blocks. Whole blocks that lie
    # between those of final_last are therefore of that call: it would write over what they have.
    before, last = every.final_first, every.final_last
    if last:
        span = Rows(last[0].q.begin, last[-1].q.end)
        between = [block for block in before if clipped([span], block.q)]
        before = tuple(block for block in before if not clipped([span], block.q))
        last = tuple(sorted([*last, *between]))
    # Blocks with each query's own key have all rows, and come first.
    own = tuple(sorted(every.own, key=lambda block: not block.has_own))
    return every._replace(own=own, final_first=before, final_last=last)


# Under a window rows and keys hang together all through a chunk, so that an edge, where others have
# a part of the sums, is computed twice. That is at most so large a part of the chunk's pairs, and
# so many pairs for each of its rows: the 10 operations of a pair's and an element's backward pass
# at 500 TFLOP/s take as long as the 28 to 64 bytes at 3.5 TB/s that a float32 sum of a row costs,
# where there are 400 to 900.
EDGES_WITHIN: Final = 8
EDGE_PAIRS: Final = 512
# Where float32 sums are, at most so many intervals of rows, each of which has passes of its own.
MOST_PARTS: Final = 32


class _Others(NamedTuple):
    """Rows of a rank that its steps have, joined: as queries, and as keys that are sent."""

    q: tuple[Rows, ...]
    k: tuple[Rows, ...]


def _divided(held: tuple[Chunk, ...], mask: Mask, others: _Others | None) -> Schedule:
    """A rank's own pairs of a sequence, as a schedule without steps. others: None: nothing is
    final.
    """
    apart = tuple(_blocks(held, held, mask))
    blocks, (first, diagonal) = _own(held, apart, mask), _halves(apart)
    rows = Rows(held[0].row, held[-1].row + held[-1].end - held[-1].begin)
    if others is None:
        return Schedule(rows.size, own=blocks, own_first=first, own_last=diagonal)
    beside = [block for block in blocks if block.q != block.k]
    if not beside and not any(clipped(x, rows) for x in others):
        return Schedule(rows.size, final=blocks, final_first=blocks)
    final: list[Block] = []
    own = list(beside)
    with_q = joined([*clipped(others.q, rows), *(block.q for block in beside)])
    for block in blocks:
        if block.q == block.k:
            inner, outer = _cut(block, clipped(with_q, block.q), mask)
            final += inner
            own += outer
    edges: list[Block] = []
    last: list[Block] = []
    whole: list[Block] = []
    with_edges: list[Block] = []
    with_q = joined([*clipped(others.q, rows), *(block.q for block in first)])
    with_k = joined([*clipped(others.k, rows), *(block.k for block in first)])
    for block in diagonal:
        of_block = None
        if block.q == block.k:
            of_block = _edges(block, clipped(with_q, block.q), clipped(with_k, block.k), mask)
        if of_block is None:
            last.append(block)
        else:
            (with_edges if of_block else whole).append(block)
            edges += of_block
    return Schedule(
        rows.size,
        final=tuple(final),
        own=tuple(own),
        edges=tuple(edges),
        own_first=first,
        own_last=tuple(last),
        final_first=tuple(whole),
        final_last=tuple(with_edges),
    )


def _has_sums(work: Schedule) -> bool:
    """Whether some result of a rank's own pairs is a sum."""
    return bool(work.own or work.edges or work.own_first or work.own_last)


def _untouched(rows: Rows, touched: Iterable[Rows]) -> Rows:
    """The longest interval of rows without those touched, the first of several."""
    nothing = Rows(rows.begin, rows.begin)
    return max(without(rows, touched), key=lambda x: x.size, default=nothing)


def _cut(
    block: Block, touched: list[Rows], mask: Mask
) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """A block on the diagonal, as queries that have no other block, and the rest. Both are in calls
    of packed sequences with those of other blocks, so that the rest's keys are apart.
    """
    if not touched:
        return (block,), ()
    left, right, (begin, end) = mask.left, mask.right, block.q
    if left is None or right is None:
        return (), (block,)
    first, last = _untouched(block.q, touched)
    # Keys begin at a multiple of 8 if the block's do: kernels draw dropout's bits for so many.
    if first - left > begin:
        first += -(first - left - begin) % 8
    if last < end and last - left > begin:
        last -= (last - left - begin) % 8
    if last - first < max(1, left + right, (end - begin) // 2):
        return (), (block,)
    keys = Chunk(begin, begin, end, 0)
    parts = [
        _block(Chunk(a, a, b, 0), keys, mask, None) if a < b else None
        for a, b in pairwise((begin, first, last, end))
    ]
    before, inner, behind = parts
    assert inner is not None
    return (inner,), tuple(x for x in (before, behind) if x is not None)


def _edges(block: Block, q: list[Rows], k: list[Rows], mask: Mask) -> list[Block] | None:
    """Squares on the diagonal at the ends of a block there, in which lie all of its pairs with the
    queries and the keys that others have a part of; None: that is too much to compute twice.
    """
    if not q and not k:
        return []
    left, right, (begin, end) = mask.left, mask.right, block.q
    if left is None or right is None:
        return None
    middle = _untouched(block.q, [*q, *k]).begin
    first, last = begin, end
    for rows, before, behind in ((q, left, right), (k, right, left)):
        for part in rows:
            if part.begin < middle:
                first = max(first, min(end, part.end + behind))
            else:
                last = min(last, max(begin, part.begin - before))
    last -= (last - begin) % 8  # as keys begin in `_cut`
    if first > last:
        return None
    squares = [Chunk(a, a, b, 0) for a, b in ((begin, first), (last, end)) if a < b]
    found = [x for square in squares for x in _blocks((square,), (square,), mask)]
    twice = pairs_in(found, mask)
    if twice * EDGES_WITHIN > pairs_in([block], mask) or twice > EDGE_PAIRS * block.q.size:
        return None
    return found


def pairs_in(blocks: Iterable[Block], mask: Mask | None) -> int:
    """Of blocks, where a query sees so many keys at most as a window has."""
    width = None if mask is None else mask.width
    return sum(
        block.pairs if width is None else min(block.pairs, block.q.size * width) for block in blocks
    )


def _own(held: tuple[Chunk, ...], apart: tuple[Block, ...], mask: Mask) -> tuple[Block, ...]:
    """The blocks of a rank's own rows of a sequence, by as few calls as can be. apart: one for each
    pair of chunks.
    """
    if len(held) > 1 and mask.is_causal_alone:
        # The order of the rank's rows is that of their positions.
        rows = Rows(held[0].row, held[-1].row + held[-1].end - held[-1].begin)
        return (Block(rows, rows, 0, True),)
    if not mask.by_distance:
        whole = tuple(_fused(_fused(apart, "q"), "k"))
        if len(whole) == 1:
            return whole
    return apart


def _blocks(
    queries: Iterable[Chunk], keys: Iterable[Chunk], mask: Mask, seen: Seen | None = None
) -> Iterator[Block]:
    """Every pair of chunks of which something is seen; keys are rows of their owner."""
    of_sequence: dict[int, list[Chunk]] = {}
    for k in keys:
        of_sequence.setdefault(k.sequence, []).append(k)
    for q in queries:
        for k in of_sequence.get(q.sequence, ()):
            block = _block(q, k, mask, seen)
            if block is not None:
                yield block


def _block(q: Chunk, k: Chunk, mask: Mask, seen: Seen | None) -> Block | None:
    """The smallest intervals of two chunks that hold all pairs which the mask leaves, and of those
    that which the mask as data leaves.
    """
    left, right = mask.left, mask.right
    first_k = k.begin if left is None else max(k.begin, q.begin - left)
    end_k = k.end if right is None else min(k.end, q.end + right)
    if first_k >= end_k:
        return None
    first_q = q.begin if right is None else max(q.begin, first_k - right)
    end_q = q.end if left is None else min(q.end, end_k + left)
    if seen is not None:
        found = seen.part(Rows(first_q, end_q), Rows(first_k, end_k))
        if found is None:
            return None
        (first_q, end_q), (first_k, end_k) = found
    # The pairs that lie furthest apart, on either side.
    hidden_left = left is not None and end_q - 1 - first_k > left
    hidden_right = right is not None and end_k - 1 - first_q > right
    return Block(
        Rows(q.row + first_q - q.begin, q.row + end_q - q.begin),
        Rows(k.row + first_k - k.begin, k.row + end_k - k.begin),
        first_q - first_k,
        hidden_left or hidden_right,
    )


def _received(
    mine: tuple[Chunk, ...], theirs: tuple[Chunk, ...], mask: Mask, seen: Seen | None
) -> tuple[tuple[Block, ...], tuple[Rows, ...]]:
    """The blocks of a step, and the rows of the owner that they need."""
    blocks = tuple(_blocks(mine, theirs, mask, seen))
    pieces = joined(block.k for block in blocks)
    begins = [piece.begin for piece in pieces]
    before = [0, *accumulate(piece.size for piece in pieces)]  # rows of the pieces before
    moved = []
    for block in blocks:
        piece = bisect_right(begins, block.k.begin) - 1  # which has the block's keys
        shift = before[piece] - begins[piece]
        moved.append(block._replace(k=Rows(block.k.begin + shift, block.k.end + shift)))
    if not mask.by_distance:
        moved = list(_fused(_fused(moved, "q"), "k"))
    return tuple(moved), pieces


def _fused(blocks: Iterable[Block], side: Literal["q", "k"]) -> Iterator[Block]:
    """Blocks without a mask that lie beside each other are one: a call of twice the size. side:
    along which rows.
    """
    last: Block | None = None
    for block in sorted(blocks, key=lambda x: (x.k, x.q) if side == "q" else (x.q, x.k)):
        if last is not None and not last.masked and not block.masked:
            if side == "q" and last.k == block.k and last.q.end == block.q.begin:
                last = last._replace(q=Rows(last.q.begin, block.q.end))
                continue
            if side == "k" and last.q == block.q and last.k.end == block.k.begin:
                last = last._replace(k=Rows(last.k.begin, block.k.end))
                continue
        if last is not None:
            yield last
        last = block
    if last is not None:
        yield last


def _halves(own: tuple[Block, ...]) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """A rank's own blocks in two parts of about one size: the ones beside the diagonal and those on
    it; a single block that is not masked in halves of its queries.
    """
    if len(own) == 1 and not own[0].masked and own[0].q.size > 1:
        (block,) = own
        middle = block.q.begin + block.q.size // 2
        behind = block.position + middle - block.q.begin
        return (block._replace(q=Rows(block.q.begin, middle)),), (
            block._replace(q=Rows(middle, block.q.end), position=behind),
        )
    first = tuple(block for block in own if block.q != block.k)
    return first, tuple(block for block in own if block.q == block.k)


@lru_cache(maxsize=256)
def batched(blocks: tuple[Block, ...], packed: bool) -> tuple[Batch, ...]:
    """The calls that compute blocks. Of packed sequences, one has as many as can be: the first to
    which a block may be added gets it. So blocks that have all rows, if they come first, are one.
    """
    found: list[list[Block]] = []
    for block in blocks:
        for batch in found if packed else ():
            if batch[-1].q.end <= block.q.begin and batch[-1].k.end <= block.k.begin:
                batch.append(block)
                break
        else:
            found.append([block])
    return tuple(Batch(tuple(batch)) for batch in found)


def joined(rows: Iterable[Rows]) -> tuple[Rows, ...]:
    """The union of intervals, as intervals that do not touch."""
    found: list[Rows] = []
    for part in sorted(x for x in rows if x.size):
        if found and part.begin <= found[-1].end:
            found[-1] = Rows(found[-1].begin, max(found[-1].end, part.end))
        else:
            found.append(part)
    return tuple(found)


def closing(batches: Sequence[Batch]) -> list[bool]:
    """Of calls in the order in which they are made: whether nothing comes to the call's queries
    after it.
    """
    spans = [batch.q for batch in batches]
    return [
        all(later.end <= span.begin or span.end <= later.begin for later in spans[n:])
        for n, span in enumerate(spans, 1)
    ]


def clipped(some: Sequence[Rows], rows: Rows) -> list[Rows]:
    """Of intervals that do not touch, ascending, what lies in these rows."""
    found = []
    for part in some[bisect_right(some, rows.begin, key=lambda x: x.end) :]:
        if part.begin >= rows.end:
            break
        found.append(Rows(max(part.begin, rows.begin), min(part.end, rows.end)))
    return found


def without(rows: Rows, taken: Iterable[Rows]) -> tuple[Rows, ...]:
    """These rows but for those taken."""
    begin, end = rows
    edges = [Rows(begin, begin), *clipped(joined(taken), rows), Rows(end, end)]
    return tuple(Rows(a.end, b.begin) for a, b in pairwise(edges) if a.end < b.begin)
