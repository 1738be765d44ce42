"""What the ranks of a call send each other, on torch.distributed: keys, values and their gradients
along the ring, and rows for heads by an all-to-all.

Nothing here waits for another rank but by a `wait` of PyTorch's, so a rank that is gone ends in
PyTorch's own error, at once or by the group's time-out, which nothing here catches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from ._layout import Layout, Piece, Rows
from ._rank_call import Call
from ._ring import Step

Tensor: TypeAlias = torch.Tensor


def select_rows(x: Tensor, rows: Rows) -> Tensor:
    """Of (batch, rows, heads, dim)."""
    return x[:, rows.begin : rows.end]


# ----------------------------------------------------------------------------------------- the ring


class Exchange:
    """Messages of one step that are on their way. What is sent must not be written to until then.

    `arrived` waits for all of them, in the way of the group's backend: NCCL has the current stream
    wait, gloo the thread.
    """

    def __init__(
        self,
        group: Any,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
    ) -> None:
        """Pairs of a tensor, contiguous, and a rank of the group."""
        operations = []
        for transfer, tensors in ((dist.isend, sends), (dist.irecv, receives)):
            for x, rank in tensors:
                if x.numel():  # as the other side knows
                    peer = dist.get_global_rank(group, rank)
                    operations.append(dist.P2POp(transfer, x, peer, group))
        self._kept = [x for x, _ in sends]
        self._received = [x for x, _ in receives]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def arrived(self) -> list[Tensor]:
        """What was received."""
        for work in self._works:
            work.wait()
        self._kept.clear()
        return self._received


def _pieces(x: Tensor, rows: Sequence[Rows]) -> Tensor:
    """Rows of (batch, rows, heads, dim), one piece after the other, contiguous."""
    if len(rows) == 1:
        return x[:, rows[0].begin : rows[0].end].contiguous()
    return torch.cat([x[:, part.begin : part.end] for part in rows], dim=1)


def _count(rows: Iterable[Rows]) -> int:
    return sum(part.size for part in rows)


def start_keys(call: Call, step: Step, k: Tensor, v: Tensor) -> Exchange:
    """K and V of a step: this rank's to those who need them, and those that it needs."""
    sends, receives = [], []
    for x in (k, v):
        if step.sends:
            sends.append((_pieces(x, step.sends), call.peer(step.target)))
        if step.receives:
            shape = (x.shape[0], _count(step.receives), *x.shape[2:])
            receives.append((x.new_empty(shape), call.peer(step.source)))
    return Exchange(call.group, sends, receives)


def start_gradients(
    call: Call, step: Step, computed: Sequence[Tensor], own: Sequence[Tensor]
) -> Exchange:
    """Float32 dK and dV of a step, back to the owner of the keys. own: this rank's dK and dV, for
    their shapes.
    """
    sends = [(x, call.peer(step.source)) for x in computed]
    receives = []
    if step.sends:
        for x in own:
            shape = (x.shape[0], _count(step.sends), *x.shape[2:])
            receives.append((x.new_empty(shape), call.peer(step.target)))
    return Exchange(call.group, sends, receives)


# ---------------------------------------------------------------------------- all-to-all over heads


class Lot(NamedTuple):
    """Of the heads that a rank of a group has: the one of so many equal parts, in turn."""

    number: int
    of: int

    def heads(self, call: Call, heads: int) -> Rows:
        """Which of all heads these are."""
        size = heads // (call.inside * self.of)
        begin = (call.place * self.of + self.number) * size
        return Rows(begin, begin + size)

    def of_rank(self, x: Tensor | None) -> Tensor | None:
        """Of what has a number for each of this rank's heads, along its last axis."""
        return heads_of(x, self.of, self.number)


class AllToAll:
    """Bytes of a group's ranks for each other that are on their way, as `Exchange`'s are."""

    def __init__(self, call: Call, sent: Tensor, sizes: list[int], received: list[int]) -> None:
        """sent: one dimension, what goes to each rank of the group behind what goes to the one
        before; sizes: of these, and received: of what comes.
        """

        def of_ranks(sizes: list[int]) -> list[int]:
            """Of all ranks: the other groups' get nothing."""
            before = call.group_rank * call.inside
            return [0] * before + sizes + [0] * (call.ranks - before - call.inside)

        self._kept = [sent]
        self._found = sent.new_empty(sum(received))
        splits = of_ranks(received), of_ranks(sizes)
        self._work = dist.all_to_all_single(self._found, sent, *splits, call.group, async_op=True)

    def arrived(self) -> Tensor:
        """What was received, one dimension."""
        self._work.wait()
        self._kept.clear()
        return self._found


_WORD: Final = torch.complex128  # 16 bytes


class _Form(NamedTuple):
    """(batch, rows, heads, dim) of elements of so many bytes, but for the rows."""

    batch: int
    heads: int
    dim: int
    element: int

    @classmethod
    def of(cls, x: Tensor, divided: int = 1) -> _Form:
        """divided: so many times as few heads."""
        batch, _, heads, dim = x.shape
        return cls(batch, heads // divided, dim, x.element_size())


_Strided: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]  # as as_strided takes it


@lru_cache(maxsize=4096)
def _places(forms: tuple[_Form, ...], rows: int) -> tuple[tuple[int, ...], int]:
    """Of tensors that lie one behind the other, each from a multiple of 16 bytes on: where each
    begins, and the bytes of all.
    """
    begins, begin = [], 0
    for batch, heads, dim, element in forms:
        begins.append(begin)
        begin += -(-batch * rows * heads * dim * element // 16) * 16
    return tuple(begins), begin


@lru_cache(maxsize=4096)
def _of_parts(forms: tuple[_Form, ...], n: int, ranks: int, rows: int, element: int) -> _Strided:
    """The n-th of such tensors, for or of so many ranks with as many rows, in elements of so many
    bytes: (ranks, batch, rows, heads, dim).
    """
    batch, heads, dim, own = forms[n]
    begins, size = _places(forms, rows)
    dim = dim * own // element
    row = heads * dim
    strides = (size // element, rows * row, row, dim, 1)
    return (ranks, batch, rows, heads, dim), strides, begins[n] // element


@lru_cache(maxsize=64)  # of many documents each is long
def _slabs(
    forms: tuple[_Form, ...], n: int, element: int, layout: Layout, group_rank: int, inside: int
) -> tuple[_Strided, ...]:
    """Of the n-th of such tensors of the rows of every rank of a group, one rank behind the other,
    the pieces in the order of the group's rows: (batch, rows, heads, dim) each, in elements of so
    many bytes.
    """
    batch, heads, dim, own = forms[n]
    dim = dim * own // element
    row, first = heads * dim, 0
    found = []
    for pieces in layout.members(group_rank, inside):
        rows = _count_of(pieces)
        begins, size = _places(forms, rows)
        begin = (first + begins[n]) // element
        for of_rank, of_group in pieces:
            shape = (batch, of_rank.size, heads, dim)
            strides = (rows * row, row, dim, 1)
            found.append((of_group.begin, (shape, strides, begin + of_rank.begin * row)))
        first += size
    return tuple(strided for _, strided in sorted(found))


def _count_of(pieces: Iterable[Piece]) -> int:
    return _count(piece.of_rank for piece in pieces)


def _in_words(x: Tensor) -> Tensor:
    """In words of 16 bytes where it can be read so: copying then takes half the time."""
    ratio = _WORD.itemsize // x.element_size()
    *strides, last = x.stride()
    numbers = (x.shape[-1], x.storage_offset(), *strides)
    if last != 1 or x.data_ptr() % _WORD.itemsize or any(n % ratio for n in numbers):
        return x
    return x.view(_WORD)


def _of_ranks(x: Tensor, call: Call, lot: Lot) -> Tensor:
    """Of (batch, rows, heads, dim): (ranks, batch, rows, heads, dim), for each rank of the group
    the lot of its heads.
    """
    batch, rows, heads, dim = x.shape
    of_batch, of_row, of_head, of_dim = x.stride()
    share = heads // call.inside
    size = share // lot.of
    strides = (share * of_head, of_batch, of_row, of_head, of_dim)
    first = x.storage_offset() + lot.number * size * of_head
    return x.as_strided((call.inside, batch, rows, size, dim), strides, first)


class ToHeads:
    """On their way: of (batch, rows, heads, dim) of this rank's rows and all heads, a lot of its
    heads of all rows of its group, in their order.
    """

    def __init__(self, call: Call, tensors: Sequence[Tensor], lot: Lot) -> None:
        rows, ranks = tensors[0].shape[1], call.inside
        self._of_group = call.layout, call.group_rank, ranks
        self._dtypes = [x.dtype for x in tensors]
        self._forms = forms = tuple(_Form.of(x, ranks * lot.of) for x in tensors)
        sizes = [_places(forms, rows)[1]] * ranks
        sent = tensors[0].new_empty(sum(sizes), dtype=torch.uint8)
        for n, x in enumerate(map(_in_words, tensors)):
            place = _of_parts(forms, n, ranks, rows, x.element_size())
            sent.view(x.dtype).as_strided(*place).copy_(_of_ranks(x, call, lot))
        received = [_places(forms, _count_of(pieces))[1] for pieces in call.members()]
        self._exchange = AllToAll(call, sent, sizes, received)

    def arrived(self) -> list[Tensor]:
        """(batch, rows of the group, heads of the lot, dim)."""
        found, wholes = self._exchange.arrived(), []
        for n, (dtype, form) in enumerate(zip(self._dtypes, self._forms, strict=True)):
            word = dtype if form.dim * form.element % _WORD.itemsize else _WORD
            elements = found.view(word)
            places = _slabs(self._forms, n, word.itemsize, *self._of_group)
            slabs = [elements.as_strided(*place) for place in places]
            if not slabs:
                dim = form.dim * form.element // word.itemsize
                slabs.append(elements.new_empty((form.batch, 0, form.heads, dim)))
            wholes.append(torch.cat(slabs, dim=1).view(dtype))
        return wholes


class ToRows:
    """Back, on their way: of (batch, rows of the group, heads of the lot, dim) this rank's rows, to
    their heads of `results`, (batch, rows, heads, dim).
    """

    def __init__(
        self, call: Call, wholes: Sequence[Tensor], results: Sequence[Tensor], lot: Lot
    ) -> None:
        self._call, self._lot, self._results = call, lot, results
        self._forms = forms = tuple(map(_Form.of, wholes))
        self._rows, members = results[0].shape[1], call.members()
        rows_in_bytes = [heads * dim * element for _, heads, dim, element in forms]
        word = torch.uint8 if any(n % _WORD.itemsize for n in rows_in_bytes) else _WORD
        slabs = []
        given = [x.contiguous().view(-1).view(word) for x in wholes]
        for pieces in members:
            count = _count_of(pieces)
            for x, whole, in_bytes in zip(given, wholes, rows_in_bytes, strict=True):
                row = in_bytes // word.itemsize
                one = whole.shape[1] * row  # of the batch
                for begin in range(0, len(whole) * one, max(1, one)):
                    slabs += [x[begin + r.begin * row : begin + r.end * row] for _, r in pieces]
                over = len(whole) * count * in_bytes % _WORD.itemsize
                if over:
                    slabs.append(x.new_zeros(_WORD.itemsize - over))
        sent = (torch.cat(slabs) if slabs else given[0].new_empty(0)).view(torch.uint8)
        sizes = [_places(forms, _count_of(pieces))[1] for pieces in members]
        received = [_places(forms, self._rows)[1]] * call.inside
        self._exchange = AllToAll(call, sent, sizes, received)

    def arrived(self) -> None:
        found, ranks = self._exchange.arrived(), self._call.inside
        for n, result in enumerate(map(_in_words, self._results)):
            place = _of_parts(self._forms, n, ranks, self._rows, result.element_size())
            heads = _of_ranks(result, self._call, self._lot)
            heads.copy_(found.view(result.dtype).as_strided(*place))


def with_rows_second(lse: Tensor) -> Tensor:
    """(batch, heads, rows), as lse and its gradient are, to (batch, rows, heads, 1)."""
    return lse.transpose(1, 2).unsqueeze(-1)


def with_rows_last(x: Tensor) -> Tensor:
    """Back."""
    return x.squeeze(-1).transpose(1, 2).contiguous()


def heads_of(x: Tensor | None, parts: int, number: int) -> Tensor | None:
    """One of so many equal parts of what has a number for each head, along its last axis."""
    if x is None or parts == 1:
        return x
    heads = x.shape[-1] // parts
    return x[..., number * heads : (number + 1) * heads].contiguous()
