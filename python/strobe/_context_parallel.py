"""Attention over a split sequence, as autograd sees it: the ring of `_ring` and the all-to-all over
heads, forward and backward, on torch.distributed.

Nothing here waits for another rank but by a `wait` of PyTorch's, so a rank that is gone ends in
PyTorch's own error, at once or by the group's time-out, which nothing here catches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

from . import _ring, _shares
from ._errors import Unsupported
from ._merge import merge
from ._operators import refuse_double_backward, rows_contiguous
from ._ring import Batch, Block, Mask, Rows, Schedule, Step
from .functional import attention, attention_backward

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True)
class Call:
    """What does not change between the ranks of a call, and where this rank stands among them.

    So many neighbouring ranks, inside, are a group: they share out the heads by an all-to-all, and
    the ring goes between groups, between those of their ranks that have the same heads. With groups
    of one rank there is no all-to-all, and with one group no ring. What is computed is of the
    group's rows and this rank's heads: `schedule`, `held` and the blocks count in these.

    Packed sequences are a batch of one here; `given` and `kept` are between that and the library.
    So are the attention chunks of one sequence, each of which a call of the ring has as a sequence
    of its own.
    """

    group: Any
    ranks: int
    rank: int
    lengths: _ring.Lengths
    given_packed: bool  # by the caller
    packed: bool
    order: _ring.Order
    mask: Mask
    options: dict[str, Any]  # scale and softcap
    slopes: Tensor | None  # of this rank's heads
    deterministic: bool
    inside: int
    used: _shares.Used | None  # rows in use of each sequence
    data: _shares.Cut | None  # a mask as data
    dropout: dict[str, Any]  # options of dropout; none: no weight is dropped

    @property
    def groups(self) -> int:
        """How many the ring goes through."""
        return self.ranks // self.inside

    @property
    def group_rank(self) -> int:
        """Which of them this rank's is."""
        return self.rank // self.inside

    @property
    def place(self) -> int:
        """Which rank of its group this is, and so which heads it has."""
        return self.rank % self.inside

    def peer(self, group_rank: int) -> int:
        """The rank of another group that has the same heads."""
        return group_rank * self.inside + self.place

    @property
    def schedule(self) -> Schedule:
        what = self.lengths, self.groups, self.group_rank, self.order, self.mask, self.inside
        if self.data is not None and self.data.of_all_rows:
            return self.data.schedule(*what)
        return _ring.schedule(*what)

    def members(self) -> list[tuple[_ring.Piece, ...]]:
        """Of each rank of the group, which of the group's rows it has."""
        group = self.lengths, self.groups, self.group_rank, self.order, self.inside
        return [_ring.within(*group, place) for place in range(self.inside)]

    def heads(self, q: Tensor) -> Rows:
        """Which of all heads those of q are, whose tensor has this rank's."""
        count = q.shape[2]
        return Rows(self.place * count, (self.place + 1) * count)

    def given(self, x: Tensor) -> Tensor:
        """As the library takes it."""
        return x[0] if self.packed else x

    def kept(self, x: Tensor) -> Tensor:
        """As it is kept here."""
        return x[None] if self.packed else x

    def batched(self, blocks: tuple[Block, ...]) -> tuple[Batch, ...]:
        # Dropout's place is a whole call's.
        return _ring.batched(blocks, self.packed and not self.dropout)

    def held(self, step: Step | None) -> tuple[Any, ...]:
        """What `_shares.rows_held` asks of the keys of a step, or of the group's own rows."""
        rank, pieces = (self.group_rank, None) if step is None else (step.source, step.receives)
        return self.lengths, self.groups, rank, self.order, pieces, self.inside

    def in_use(self, step: Step | None) -> Any:
        """Bools (batch, rows): which rows of a step's keys are in use, or of the group's own."""
        assert self.used is not None
        return _shares.in_use(self.held(step), self.used, self.given_packed)

    def masked(self, masked: bool = True) -> dict[str, Any]:
        """Options of a call of attention, under the mask or, where it hides nothing, without."""
        if not masked:
            return self.options
        left, right = self.mask.left, self.mask.right
        window = (-1 if left is None else left, -1 if right is None else right)
        return {**self.options, "window": window, "causal": right == 0}


# ----------------------------------------------------------------------------------------- messages


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


def _start_keys(call: Call, step: Step, k: Tensor, v: Tensor) -> Exchange:
    """K and V of a step: this rank's to those who need them, and those that it needs."""
    sends, receives = [], []
    for x in (k, v):
        if step.sends:
            sends.append((_pieces(x, step.sends), call.peer(step.target)))
        if step.receives:
            shape = (x.shape[0], _count(step.receives), *x.shape[2:])
            receives.append((x.new_empty(shape), call.peer(step.source)))
    return Exchange(call.group, sends, receives)


def _start_gradients(
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


# --------------------------------------------------------------------------------------- the blocks


def _sequences(batch: Batch) -> tuple[list[tuple[int, int]], list[Block | None]]:
    """A batch's blocks as packed sequences, of the rows from the first block's to the last one's:
    where each begins among queries and keys and the last one ends, and its block. Rows between
    blocks are sequences without keys or without queries, which are no block's.
    """
    begins = [(0, 0)]
    blocks: list[Block | None] = []
    for block in batch.blocks:
        q, k = begins[-1]
        next_q, next_k = block.q.begin - batch.q.begin, block.k.begin - batch.k.begin
        for gap, wanted in (((next_q, k), q < next_q), ((next_q, next_k), k < next_k)):
            if wanted:
                begins.append(gap)
                blocks.append(None)
        begins.append((next_q + block.q.size, next_k + block.k.size))
        blocks.append(block)
    return begins, blocks


@lru_cache(maxsize=1024)
def _packing(batch: Batch, device: torch.device) -> dict[str, Any]:
    """Options of a call for the blocks of a batch."""
    begins, blocks = _sequences(batch)
    positions = [0 if block is None else block.position for block in blocks]
    numbers = {"device": device, "dtype": torch.int32}
    return {
        "cu_seqlens_q": torch.tensor([q for q, _ in begins], **numbers),
        "cu_seqlens_k": torch.tensor([k for _, k in begins], **numbers),
        "max_seqlen_q": max(b[0] - a[0] for a, b in pairwise(begins)),
        "max_seqlen_k": max(b[1] - a[1] for a, b in pairwise(begins)),
        "q_position": torch.tensor(positions, **numbers),
    }


def _rows_in_use(call: Call, batch: Batch, step: Step | None, device: Any) -> dict[str, Any]:
    """Options of a call some of whose rows are not in use. Those in use are the first ones of each
    block's.
    """
    if call.used is None:
        return {}
    found = {}
    blocks: Iterable[Block | None] = _sequences(batch)[1] if call.packed else batch.blocks
    for side, whole in (("q", call.in_use(None)), ("k", call.in_use(step))):
        counts: list[int] = []
        for block in blocks:
            rows = Rows(0, 0) if block is None else getattr(block, side)
            counts += whole[:, rows.begin : rows.end].sum(1).tolist()
        found[f"seqused_{side}"] = torch.tensor(counts, dtype=torch.int32, device=device)
    return found


def _dropout_place(call: Call, batch: Batch, heads: int) -> dict[str, Any]:
    """Where a call's one block lies in the whole, whose bits dropout draws."""
    (block,) = batch.blocks
    place = call.lengths, call.groups, call.group_rank, call.order
    sequence, query = _ring.place_of_row(*place, block.q.begin, call.inside)
    return {
        "dropout_first_query": query,
        "dropout_first_key": query - block.position,
        "dropout_first_head": (sequence * call.inside + call.place) * heads,
        "dropout_heads": call.inside * heads,
    }


def _batch_options(call: Call, batch: Batch, q: Tensor, step: Step | None) -> dict[str, Any]:
    """Options of the library's call for some blocks. step: whose keys these are; None: the rank's
    own.
    """
    masked = any(block.masked for block in batch.blocks)
    options = call.masked(masked) | _rows_in_use(call, batch, step, q.device)
    if call.slopes is not None:
        options = {**options, "alibi_slopes": call.slopes}
    if call.dropout:
        options = options | call.dropout | _dropout_place(call, batch, q.shape[2])
    if call.data is not None:
        sequences = tuple(_sequences(batch)[0]) if call.packed else None
        queries, keys = (batch.q, call.held(None)), (batch.k, call.held(step))
        options["mask"] = call.data.of(queries, keys, sequences, call.heads(q), q.device)
    if call.packed:
        return options | _packing(batch, q.device)
    (block,) = batch.blocks
    # Where no position means as much.
    aligned = call.used is None and block.position == block.k.size - block.q.size
    if (masked or call.slopes is not None) and not aligned:
        numbers = torch.full((q.shape[0],), block.position, dtype=torch.int32, device=q.device)
        options = {**options, "q_position": numbers}
    return options


def _rows(x: Tensor, rows: Rows) -> Tensor:
    """Of (batch, rows, heads, dim)."""
    return x[:, rows.begin : rows.end]


def _of_lse(x: Tensor, rows: Rows) -> Tensor:
    """Of (batch, heads, rows)."""
    return x[..., rows.begin : rows.end]


def attention_in_float32(
    q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, **options: Any
) -> Tensor:
    """Attention that writes its float32 sums to `out`, unrounded; returns lse. Where no kernel
    does, the results have q's dtype, and what is merged is rounded once.
    """
    try:
        return attention(q, k, v, out=out, return_lse=True, **options)[1]
    except Unsupported:
        rounded, lse = attention(q, k, v, return_lse=True, **options)
        out.copy_(rounded)
        return lse


class Partials:
    """Partial results in float32, merged by the library as they come. The first result of a row is
    written to the first half of `outs`; what follows to the second, and merged into the first; and
    the last merge of a row writes `out`, in q's dtype.
    """

    def __init__(
        self, call: Call, q: Tensor, head_dim_v: int, sinks: Tensor | None, batches: list[Batch]
    ) -> None:
        """batches: all that will be added, in this order; those on the diagonal come first. sinks:
        they enter a row with its last result.
        """
        batch, rows, heads, _ = q.shape
        like = {"dtype": torch.float32, "device": q.device}
        self._call = call
        self._sinks = sinks
        self._alone = len(batches) == 1  # there is nothing to merge
        halves = 0 if self._alone else 2
        self._outs = torch.empty((halves, batch, rows, heads, head_dim_v), **like)
        self._lses = torch.empty((2, batch, heads, rows), **like)
        self._out = q.new_empty((batch, rows, heads, head_dim_v))
        self._closing = iter(_ring.closing(batches))
        self._written: list[Rows] = []  # rows of which `outs` holds a result, joined
        self._closed: list[Rows] = []  # and `out` does

    def add(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, step: Step | None) -> None:
        """One call; k and v are the tensors that the blocks count rows of, as step says."""
        call, rows, options = self._call, batch.q, _batch_options(self._call, batch, q, step)
        tensors = (_rows(q, rows), _rows(k, batch.k), _rows(v, batch.k))
        inputs = tuple(call.given(x) for x in tensors)
        closes = next(self._closing)
        if self._alone:
            out = call.given(_rows(self._out, rows))
            options = {**options, "sinks": self._sinks}
            _, lse = attention(*inputs, out=out, return_lse=True, **options)
            _of_lse(self._lses[0], rows).copy_(lse)
            self._closed.append(rows)
            return
        # Either all of these rows have a result, as their block on the diagonal came first, or this
        # is that block.
        later = any(x.begin <= rows.begin and rows.end <= x.end for x in self._written)
        part = call.given(_rows(self._outs[int(later)], rows))
        lse = attention_in_float32(*inputs, out=part, **options)
        _of_lse(self._lses[int(later)], rows).copy_(lse)
        if not later:
            self._written = list(_ring.joined([*self._written, rows]))
            return
        outs, lses = self._outs[:, :, rows.begin : rows.end], _of_lse(self._lses, rows)
        if closes:
            merge(outs, lses, sinks=self._sinks, out=_rows(self._out, rows), lse=lses[0])
            self._closed.append(rows)
        else:
            merge(outs, lses, out=outs[0], lse=lses[0])

    def results(self) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        for rows in _ring.without(self._out.shape[1], self._closed):
            out = _rows(self._out, rows)
            if self._sinks is None:
                out.copy_(_rows(self._outs[0], rows))
                continue
            outs, lses = self._outs[:1, :, rows.begin : rows.end], _of_lse(self._lses[:1], rows)
            merge(outs, lses, sinks=self._sinks, out=out, lse=lses[0])
        lse = self._lses[0].clone()
        if self._call.used is not None and self._sinks is not None and not self._alone:
            # A row that is not in use has no sink either, which a merge does not know.
            used = torch.tensor(self._call.in_use(None), device=lse.device)
            lse.masked_fill_(~used[:, None], float("-inf"))
        return self._out, lse


# ----------------------------------------------------------------------------------------- the ring


class _Ahead:
    """K and V of one step after the other, each asked for a step before it is needed."""

    def __init__(self, call: Call, k: Tensor, v: Tensor) -> None:
        self._call, self._k, self._v = call, k, v
        self._steps = iter(call.schedule.steps)
        self._exchange: Exchange | None = None
        self._ask()

    def _ask(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            self._exchange = _start_keys(self._call, step, self._k, self._v)

    def next(self) -> list[Tensor]:
        """Of the next step; nothing, where it needs no keys."""
        assert self._exchange is not None
        received = self._exchange.arrived()
        self._ask()
        return received


def ring_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of these queries. Keys of a step travel while the one before computes."""
    plan = call.schedule
    own, *later = (call.batched(x) for x in (plan.own, *(step.blocks for step in plan.steps)))
    partials = Partials(call, q, v.shape[-1], sinks, [*own, *chain.from_iterable(later)])
    arriving = _Ahead(call, k, v)
    for batch in own:
        partials.add(q, k, v, batch, None)
    for step, batches in zip(plan.steps, later, strict=True):
        received = arriving.next()
        for batch in batches:
            keys, values = received
            partials.add(q, keys, values, batch, step)
    return partials.results()


def _gradients(
    call: Call,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor | None,
    lse: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:
    """`attention_backward` of dout, q, k and v."""
    dout, q, k, v = (call.given(x) for x in tensors)
    of_out = None if out is None else call.given(out)
    found: tuple[Tensor, ...] = attention_backward(
        dout, q, k, v, of_out, call.given(lse), **options
    )
    return found


def ring_backward(
    call: Call,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsinks) of these rows, from the lse of all keys. Sums are float32, over blocks
    and over ranks, in the order of the steps.
    """
    delta = _delta(dout, out, dlse)
    dsinks = None if sinks is None else _sinks_gradient(sinks, lse, delta)
    deterministic = {"deterministic": call.deterministic}
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))

    def add(step: Step | None, blocks: tuple[Block, ...], *keys: Tensor) -> None:
        k, v, dk, dv = keys
        for batch in call.batched(blocks):
            options = _batch_options(call, batch, q, step) | deterministic
            of_q, of_k = batch.q, batch.k
            grads = (_rows(dq, of_q), _rows(dk, of_k), _rows(dv, of_k))
            tensors = (_rows(dout, of_q), _rows(q, of_q), _rows(k, of_k), _rows(v, of_k))
            _gradients(
                call,
                tensors,
                None,
                _of_lse(lse, of_q).contiguous(),
                delta=call.given(_of_lse(delta, of_q).contiguous()),
                grads=tuple(map(call.given, grads)),
                accumulate=True,
                **options,
            )

    def take(step: Step, exchange: Exchange) -> None:
        for gradient, received in zip((dk, dv), exchange.arrived(), strict=False):
            begin = 0
            for rows in step.sends:
                _rows(gradient, rows).add_(received[:, begin : begin + rows.size])
                begin += rows.size

    plan = call.schedule
    arriving = _Ahead(call, k, v)
    add(None, plan.own_first, k, v, dk, dv)
    returning: tuple[Step, Exchange] | None = None
    for step in plan.steps:
        received = arriving.next()
        computed = [torch.zeros_like(x, dtype=torch.float32) for x in received]
        if step.blocks:
            add(step, step.blocks, *received, *computed)
        if returning is not None:
            take(*returning)
        returning = step, _start_gradients(call, step, computed, (dk, dv))
    add(None, plan.own_last, k, v, dk, dv)
    if returning is not None:
        take(*returning)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink's weight in a row is exp(sink - lse), and its value is 0: so the sum over rows of
    weight * (0 - delta). No sink, -inf, has no gradient, nor has one of +inf, whose weight is 1
    whatever it is.
    """
    weight = torch.exp(sinks[:, None] - lse)
    # Rows that are not in use have an lse of -inf, and no sink.
    product = torch.where(lse == float("-inf"), 0.0, weight * delta)
    gradient = -product.sum((0, 2), dtype=torch.float64).float()
    return torch.where(sinks.isinf(), 0.0, gradient)


_DELTA_ELEMENTS: Final = 1 << 24  # of float32 products at a time


def _delta(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """What the backward pass needs of out: the sum over head_dim_v of dout * out, without dlse."""
    batch, rows, heads, head_dim_v = out.shape
    delta = out.new_empty((batch, heads, rows), dtype=torch.float32)
    at_once = max(1, _DELTA_ELEMENTS // max(1, batch * heads * head_dim_v))
    for begin in range(0, rows, at_once):
        part = slice(begin, begin + at_once)
        delta[..., part] = (dout[:, part].float() * out[:, part]).sum(-1).transpose(1, 2)
    return delta if dlse is None else delta - dlse


# ---------------------------------------------------------------------------- all-to-all over heads


def _all_to_all(call: Call, parts: list[Tensor], received: list[int]) -> list[Tensor]:
    """Sends the part of each rank of the group to it. received: elements that come from each."""

    def of_ranks(counts: list[int]) -> list[int]:
        """Of all ranks: the other groups' get nothing."""
        before = call.group_rank * call.inside
        return [0] * before + counts + [0] * (call.ranks - before - call.inside)

    sent = torch.cat([x.reshape(-1) for x in parts])
    found = sent.new_empty(sum(received))
    splits = of_ranks(received), of_ranks([x.numel() for x in parts])
    dist.all_to_all_single(found, sent, *splits, call.group)
    return list(found.split(received))


def _to_heads(call: Call, x: Tensor) -> Tensor:
    """(batch, rows, heads, dim) of this rank's rows and all heads to (batch, rows, heads / inside,
    dim) of the group's rows, in the order of the sequences, and this rank's heads.
    """
    if call.inside == 1:
        return x
    batch, _, heads, dim = x.shape
    heads //= call.inside
    members = call.members()
    counts = [_count(piece.of_rank for piece in pieces) for pieces in members]
    parts = _all_to_all(
        call, list(x.split(heads, dim=2)), [batch * rows * heads * dim for rows in counts]
    )
    whole = x.new_empty((batch, sum(counts), heads, dim))
    for part, rows, pieces in zip(parts, counts, members, strict=True):
        received = part.view(batch, rows, heads, dim)
        for of_rank, of_group in pieces:
            _rows(whole, of_group).copy_(_rows(received, of_rank))
    return whole


def _to_rows(call: Call, x: Tensor) -> Tensor:
    """Back: (batch, rows, heads / inside, dim) of the group's rows to (batch, rows, heads, dim)."""
    if call.inside == 1:
        return x
    batch, _, heads, dim = x.shape
    parts = []
    for pieces in call.members():
        of_rank = [_rows(x, piece.of_group) for piece in pieces] or [x[:, :0]]
        parts.append(torch.cat(of_rank, dim=1))
    rows = parts[call.place].shape[1]
    found = _all_to_all(call, parts, [batch * rows * heads * dim] * call.inside)
    return torch.cat([part.view(batch, rows, heads, dim) for part in found], dim=2)


def _lse_to_heads(call: Call, x: Tensor) -> Tensor:
    """The same of (batch, heads, rows), as lse and its gradient are."""
    if call.inside == 1:
        return x.contiguous()
    whole = _to_heads(call, x.transpose(1, 2).unsqueeze(-1))
    return whole.squeeze(-1).transpose(1, 2).contiguous()


def _lse_to_rows(call: Call, x: Tensor) -> Tensor:
    if call.inside == 1:
        return x
    rows = _to_rows(call, x.transpose(1, 2).unsqueeze(-1))
    return rows.squeeze(-1).transpose(1, 2).contiguous()


def heads_of(x: Tensor | None, inside: int, place: int) -> Tensor | None:
    """A rank's heads of what has a number for each of all, along its last axis."""
    if x is None or inside == 1:
        return x
    heads = x.shape[-1] // inside
    return x[..., place * heads : (place + 1) * heads].contiguous()


@lru_cache(maxsize=256)
def _of_sequences(lengths: _ring.Lengths, device: torch.device) -> dict[str, Any]:
    """Options of one call for whole sequences, packed."""
    begins = torch.tensor(_ring.starts_of(lengths), dtype=torch.int32, device=device)
    return _ring.packed_options(begins, lengths)


def _whole_options(call: Call, q: Tensor, sinks: Tensor | None) -> dict[str, Any]:
    """Options of the one call for all rows and this rank's heads."""
    options = call.masked() | {"alibi_slopes": call.slopes, "sinks": sinks}
    options["attention_chunk"] = call.mask.attention_chunk or 0
    if call.dropout:
        heads = call.heads(q)
        of_all = {"dropout_first_head": heads.begin, "dropout_heads": call.inside * heads.size}
        options |= call.dropout | of_all
    if call.used is not None:
        numbers = torch.tensor(call.used, dtype=torch.int32, device=q.device)
        options |= {"seqused_q": numbers, "seqused_k": numbers}
    if call.data is not None:
        begins = _ring.starts_of(call.lengths)
        sequences = tuple(zip(begins, begins, strict=True)) if call.packed else None
        rows = Rows(0, begins[-1]), call.held(None)
        options["mask"] = call.data.of(rows, rows, sequences, call.heads(q), q.device)
    return options | _of_sequences(call.lengths, q.device) if call.packed else options


def whole_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of all rows, by one call."""
    inputs = [call.given(x) for x in (q, k, v)]
    found = attention(*inputs, return_lse=True, **_whole_options(call, q, sinks))
    out, lse = (call.kept(x) for x in found)
    return out, lse


def whole_backward(
    call: Call,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsinks) of all rows, by one call."""
    options = _whole_options(call, q, sinks) | {"deterministic": call.deterministic}
    options |= {"dlse": None if dlse is None else call.given(dlse)}
    options |= {"return_dsinks": sinks is not None}
    found = _gradients(call, (dout, q, k, v), out, lse, **options)
    dq, dk, dv = (call.kept(x) for x in found[:3])
    return dq, dk, dv, None if sinks is None else found[3]


# ----------------------------------------------------------------------------------------- autograd


class SplitAttention(torch.autograd.Function):  # type: ignore[misc]
    """(out, lse) of q, k, v, sinks and a Call, differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor]:
        """q, k and v: this rank's rows."""
        ctx.call = call
        ctx.set_materialize_grads(False)  # no zeros for an lse that nobody used
        q, k, v = (_to_heads(call, rows_contiguous(x)) for x in (q, k, v))
        sinks = heads_of(sinks, call.inside, call.place)
        forward = whole_forward if call.groups == 1 else ring_forward
        out, lse = forward(call, q, k, v, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return _to_rows(call, out), _lse_to_rows(call, lse)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """Every rank has to come here, as to the forward pass: the others wait for its messages."""
        if torch.is_grad_enabled():
            refuse_double_backward(ctx)
        call, saved = ctx.call, ctx.saved_tensors
        if dout is None:  # of lse alone; the others may have one all the same
            batch, _, heads, dim = saved[4].shape
            rows = _ring.rows_of(call.lengths, call.ranks, call.rank, call.order)
            dout = saved[4].new_zeros((batch, rows, call.inside * heads, dim))
        dout = _to_heads(call, rows_contiguous(dout))
        if dlse is not None:
            dlse = _lse_to_heads(call, dlse)
        backward = whole_backward if call.groups == 1 else ring_backward
        *gradients, dsinks = backward(call, dout, dlse, *saved)
        if dsinks is not None and call.inside > 1:
            of_heads, dsinks = dsinks, dsinks.new_zeros(call.inside * len(dsinks))
            heads = len(of_heads)
            dsinks[call.place * heads : (call.place + 1) * heads] = of_heads
        return (*(_to_rows(call, x) for x in gradients), dsinks, None)
