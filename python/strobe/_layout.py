"""Who holds what, when sequences are split over ranks: which rows of which sequence are whose, in
plain numbers and without PyTorch. `_ring` makes of it who computes what and what travels.

A sequence that is cut has chunks, and a rank has one or two of them:

    plain    rank r of n has chunk r of n.
    zigzag   rank r of n has chunks r and 2n - 1 - r of 2n. Under a causal mask a query sees the
             keys before it, so late chunks have much to compute and early ones little: each rank
             has one of either, and all compute the same.

Packed sequences, documents, are `split`, each over all ranks, or `whole`, each on one, or as it is
balanced (`auto`): then the longest ones are split, as few as need be, and of the others a rank has
whole ones. These are dealt out from the longest on, to the rank that has the fewest pairs of
queries and keys so far; where that one has no room left, to the one with most; and those for which
no rank has room fill up what is left, cut between neighbours. So all ranks have as many rows, give
or take one, and some 2 % more pairs than the mean at most; if too few documents are whole for that,
all are split, and ranks may differ by a few rows. All of this follows from lengths, ranks and
order, and not from a layer's window or its attention chunks, since the rows of a model's layers are
the same.

Of documents that are split the ranks take turns: r stands for r + s in the sequence s (modulo n),
so that the odd rows of short ones do not all fall to one rank.

A rank's rows lie end to end: first what it has of sequences of which others have a part too, and
behind them the sequences that it has whole, both in the order of the sequences.

Groups. So many neighbouring ranks (`inside`) may be a group that has its ranks' rows together. With
groups of one rank, which is what no `inside` means, groups are the ranks. Which rows a rank itself
has is the same for groups of any size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import Final, Literal, NamedTuple, TypeAlias

Order: TypeAlias = Literal["plain", "zigzag"]
ORDERS: Final = ("plain", "zigzag")
Documents: TypeAlias = Literal["auto", "whole", "split"]
DOCUMENTS: Final = ("auto", "whole", "split")
Lengths: TypeAlias = tuple[int, ...]  # of sequences

# A rank has at most one so-many-th more pairs than the mean, where documents are whole.
PAIRS_WITHIN: Final = 50


class Rows(NamedTuple):
    """Rows of a tensor, begin to end - 1."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """How many."""
        return self.end - self.begin


class Chunk(NamedTuple):
    """Rows of a rank that are neighbours in a sequence. row: the rank's first of them; begin and
    end: where they are among the rows of all sequences.
    """

    row: int
    begin: int
    end: int
    sequence: int


class Piece(NamedTuple):
    """Rows of a rank, and which rows of its group's they are."""

    of_rank: Rows
    of_group: Rows


class Part(NamedTuple):
    """Rows of a sequence, counted in it, that are a rank's."""

    sequence: int
    begin: int
    end: int


class Layout:
    """Which rows every rank has of sequences of these lengths. One that is not packed is one of
    one, and split. Made by `layout_of`, which gives the same object for the same numbers.
    """

    def __init__(self, lengths: Lengths, ranks: int, order: Order, documents: Documents) -> None:
        self.lengths, self.ranks, self.order, self.documents = lengths, ranks, order, documents
        self.starts = tuple(accumulate(lengths, initial=0))  # and at last how many rows there are
        longest = sorted((n for n, x in enumerate(lengths) if x), key=lambda n: -lengths[n])
        self._split = self._dealt(longest)

    @property
    def rows(self) -> int:
        """All ranks together."""
        return self.starts[-1]

    @lru_cache(maxsize=256)  # noqa: B019 - a layout lives as long as its own cache has it
    def chunks(self, rank: int, inside: int = 1) -> tuple[Chunk, ...]:
        """What a rank holds, or the ranks of a group together, without chunks of no rows;
        neighbours are one chunk.
        """
        members = range(rank * inside, (rank + 1) * inside)
        parts = [part for member in members for part in self._dealt_to[member]]
        parts += (part for n in self._split for part in self._parts_of_split(n, members))
        joined: list[Part] = []
        for part in sorted(parts):
            if joined and joined[-1][::2] == (part.sequence, part.begin):
                joined[-1] = joined[-1]._replace(end=part.end)
            else:
                joined.append(part)
        joined.sort(key=lambda part: part.end - part.begin == self.lengths[part.sequence])
        found, row = [], 0
        for sequence, begin, end in joined:
            start = self.starts[sequence]
            found.append(Chunk(row, start + begin, start + end, sequence))
            row += end - begin
        return tuple(found)

    def rows_of(self, rank: int, inside: int = 1) -> int:
        """How many rows a rank holds."""
        return sum(x.end - x.begin for x in self.chunks(rank, inside))

    @lru_cache(maxsize=256)  # noqa: B019
    def within(self, rank: int, inside: int, place: int) -> tuple[Piece, ...]:
        """Where the rows of the `place`-th rank of a group stand among those of the group."""
        of_group = sorted(self.chunks(rank, inside), key=lambda chunk: chunk.begin)
        begins = [chunk.begin for chunk in of_group]
        found = []
        for row, begin, end, _ in self.chunks(rank * inside + place):
            whole = of_group[bisect_right(begins, begin) - 1]
            first = whole.row + begin - whole.begin
            found.append(Piece(Rows(row, row + end - begin), Rows(first, first + end - begin)))
        return tuple(found)

    @lru_cache(maxsize=256)  # noqa: B019
    def members(self, rank: int, inside: int) -> tuple[tuple[Piece, ...], ...]:
        """The same of every rank of the group."""
        return tuple(self.within(rank, inside, place) for place in range(inside))

    def place_of_row(self, rank: int, row: int, inside: int = 1) -> tuple[int, int]:
        """Which sequence a row of a rank is of, and which row of it."""
        held = self.chunks(rank, inside)
        chunk = held[bisect_right(held, row, key=lambda x: x.row) - 1]
        return chunk.sequence, chunk.begin + row - chunk.row - self.starts[chunk.sequence]

    def _parts_of_split(self, sequence: int, members: Iterable[int]) -> Iterator[Part]:
        """What ranks have of a sequence that is cut over all."""
        length, ranks = self.lengths[sequence], self.ranks
        pieces = ranks if self.order == "plain" else 2 * ranks
        for member in members:
            place = (member + sequence) % ranks
            for n in (place,) if self.order == "plain" else (place, pieces - 1 - place):
                part = Part(sequence, n * length // pieces, (n + 1) * length // pieces)
                if part.begin < part.end:
                    yield part

    def _rows_of_split(self, sequence: int) -> list[int]:
        """How many rows every rank has of one."""
        length, ranks = self.lengths[sequence], self.ranks
        pieces = ranks if self.order == "plain" else 2 * ranks
        edges = [n * length // pieces for n in range(pieces + 1)]
        rows = [edges[n + 1] - edges[n] for n in range(ranks)]
        if pieces > ranks:
            for n in range(ranks):
                rows[n] += edges[pieces - n] - edges[pieces - 1 - n]
        turn = sequence % ranks
        return rows[turn:] + rows[:turn]

    def _parts_of_shared(
        self, sequence: int, shares: list[tuple[int, int]]
    ) -> Iterator[tuple[int, Part]]:
        """What ranks have of a sequence that is cut between a few. shares: ranks and their rows. In
        zigzag order half of a rank's rows are from the front and half from the back, so that its
        pairs go with its rows.
        """
        length, before, front = self.lengths[sequence], 0, 0
        for rank, rows in shares:
            behind = before + rows
            next_front = behind if self.order == "plain" else behind // 2
            edges = (front, next_front), (length - behind + next_front, length - before + front)
            for begin, end in edges[:1] if self.order == "plain" else edges:
                if begin < end:
                    yield rank, Part(sequence, begin, end)
            before, front = behind, next_front

    def _dealt(self, longest: list[int]) -> list[int]:
        """Deals out the documents that are not split over all ranks; gives those that are. longest:
        documents that have rows, from the longest on.
        """
        self._dealt_to: list[list[Part]] = [[] for _ in range(self.ranks)]
        if self.ranks == 1 or self.documents == "whole":
            self._deal(longest, None)
            return []
        if self.documents == "split":
            return longest
        ranks, lengths = self.ranks, self.lengths
        squares = sum(lengths[n] ** 2 for n in longest)
        most = (squares + squares // PAIRS_WITHIN) // ranks
        count = 0  # of those that are split
        while count < len(longest):
            length = lengths[longest[count]]
            if length <= self.rows // ranks and length**2 <= most:
                break
            count += 1
        rooms = [(r + 1) * self.rows // ranks - r * self.rows // ranks for r in range(ranks)]
        taken, tried = 0, 0
        while count < len(longest):
            for n in longest[taken:count]:
                rows = self._rows_of_split(n)
                rooms = [room - x for room, x in zip(rooms, rows, strict=True)]
            taken = count
            if min(rooms) >= 0 and self._deal(longest[count:], rooms, squares):
                return longest[:count]
            step = max(1, tried // 2)
            tried, count = tried + step, count + step
        return longest

    def _deal(self, documents: list[int], rooms: list[int] | None, squares: int = 0) -> bool:
        """Deals documents, the longest first, out to ranks that have room for so many rows, or for
        any number. Whether pairs are balanced; else nothing is dealt out. squares: of the lengths
        of all documents, those that are split too.
        """
        lengths, ranks = self.lengths, range(self.ranks)
        parts: list[list[Part]] = [[] for _ in ranks]
        left, pairs = list(rooms or ()), [0] * self.ranks
        most = sum(lengths[n] ** 2 for n in documents)  # pairs of a rank
        if rooms is not None:
            most = (most + squares // PAIRS_WITHIN) // self.ranks

        def give(n: int, rank: int) -> bool:
            if rooms is not None:
                left[rank] -= lengths[n]
            pairs[rank] += lengths[n] ** 2
            parts[rank].append(Part(n, 0, lengths[n]))
            return pairs[rank] <= most

        at = 0
        by_pairs = [(0, rank) for rank in ranks]
        for n in documents:
            rank = by_pairs[0][1]
            if rooms is not None and lengths[n] > left[rank]:
                break
            if not give(n, rank):
                return False
            heapreplace(by_pairs, (pairs[rank], rank))
            at += 1
        by_room = [(-room, rank) for rank, room in enumerate(left)]
        heapify(by_room)
        cut: list[int] = []
        for n in documents[at:]:
            rank = by_room[0][1]
            if lengths[n] > left[rank]:
                cut.append(n)
                continue
            if not give(n, rank):
                return False
            heapreplace(by_room, (-left[rank], rank))
        rank = 0
        for n in cut:
            length, rest = lengths[n], lengths[n]
            shares: list[tuple[int, int]] = []
            while rest:
                while not left[rank]:
                    rank += 1
                rows = min(rest, left[rank])
                shares.append((rank, rows))
                left[rank] -= rows
                pairs[rank] += rows * length
                rest -= rows
            for owner, part in self._parts_of_shared(n, shares):
                parts[owner].append(part)
        if max(pairs) > most:
            return False
        self._dealt_to = parts
        return True


@lru_cache(maxsize=256)
def layout_of(lengths: Lengths, ranks: int, order: Order, documents: Documents = "split") -> Layout:
    return Layout(lengths, ranks, order, documents)
