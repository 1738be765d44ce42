"""Attention along the ring of `_ring`, forward and backward: a rank's rows with the keys of one
rank after the other, by calls for blocks whose partial results are merged.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, Final, TypeAlias

import torch

from . import _ring
from ._errors import Unsupported
from ._layout import Rows
from ._merge import merge
from ._messages import Exchange, select_rows, start_gradients, start_keys
from ._rank_call import Call
from ._ring import Batch, Block, Room, Step
from .functional import attention, attention_backward

Tensor: TypeAlias = torch.Tensor


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


def _rows_of_blocks(call: Call, batch: Batch, device: Any) -> dict[str, Any]:
    """Options of a call that gives the gradient of sinks: rows between blocks count elsewhere."""
    if call.used is not None or not call.packed:
        return {}
    blocks = _sequences(batch)[1]
    if all(block is not None for block in blocks):
        return {}
    counts = [0 if block is None else block.q.size for block in blocks]
    return {"seqused_q": torch.tensor(counts, dtype=torch.int32, device=device)}


def _dropout_place(call: Call, batch: Batch, heads: int) -> dict[str, Any]:
    """Where a call's one block lies in the whole, whose bits dropout draws."""
    (block,) = batch.blocks
    sequence, query = call.layout.place_of_row(call.group_rank, block.q.begin, call.inside)
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


def _of_lse(x: Tensor, rows: Rows) -> Tensor:
    """Of (batch, heads, rows)."""
    return x[..., rows.begin : rows.end]


def attention_in_float32(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, **options: Any) -> Tensor:
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
    """Results of a rank's rows. What is final is written to `out`, in q's dtype, by its one call.
    Of other rows partial results are float32, in a room for these alone, and merged by the library
    as they come: the first result of a row is written to the first half of `outs`; what follows to
    the second, and merged into the first; and the last merge of a row writes `out`.
    """

    def __init__(
        self, call: Call, q: Tensor, head_dim_v: int, sinks: Tensor | None, batches: list[Batch]
    ) -> None:
        """batches: all that will be added, in this order; those of queries' own keys come first.
        sinks: they enter a row with its last result.
        """
        batch, rows, heads, _ = q.shape
        like = {"dtype": torch.float32, "device": q.device}
        self._call = call
        self._sinks = sinks
        self._room = Room(_ring.joined(x.q for x in batches))
        self._outs = torch.empty((2, batch, self._room.size, heads, head_dim_v), **like)
        self._lses = torch.empty((2, batch, heads, rows), **like)
        self._out = q.new_empty((batch, rows, heads, head_dim_v))
        self._closing = iter(_ring.closing(batches))
        self._final = _ring.joined(block.q for block in call.schedule.final)
        self._closed: list[Rows] = []  # rows whose last merge was

    def add(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, step: Step | None) -> None:
        """One call; k and v are the tensors that the blocks count rows of, as step says."""
        call, rows, options = self._call, batch.q, _batch_options(self._call, batch, q, step)
        tensors = (select_rows(q, rows), select_rows(k, batch.k), select_rows(v, batch.k))
        inputs = tuple(call.given(x) for x in tensors)
        closes = next(self._closing)
        # All of a call's blocks have their queries' own keys, or none: then there is a result.
        later = step is not None or not batch.blocks[0].has_own
        part = call.given(self._of_room(self._outs[int(later)], rows))
        lse = attention_in_float32(*inputs, out=part, **options)
        # Rows between blocks have an lse of -inf in it, which changes nothing but of final ones.
        for some in _ring.without(rows, self._final):
            in_call = Rows(some.begin - rows.begin, some.end - rows.begin)
            _of_lse(self._lses[int(later)], some).copy_(_of_lse(lse, in_call))
            if not later:
                continue
            outs, lses = self._of_room(self._outs, some), _of_lse(self._lses, some)
            if closes:
                out = select_rows(self._out, some)
                merge(outs, lses, sinks=self._sinks, out=out, lse=lses[0])
                self._closed.append(some)
            else:
                merge(outs, lses, out=outs[0], lse=lses[0])

    def add_final(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> None:
        """One call whose rows have no other. Before all others, as it writes to rows that are
        between its blocks.
        """
        call, rows = self._call, batch.q
        tensors = (select_rows(q, rows), select_rows(k, batch.k), select_rows(v, batch.k))
        _, lse = attention(
            *(call.given(x) for x in tensors),
            out=call.given(select_rows(self._out, rows)),
            return_lse=True,
            sinks=self._sinks,
            **_batch_options(call, batch, q, None),
        )
        _of_lse(self._lses[0], rows).copy_(lse)

    def results(self) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        rows = Rows(0, self._out.shape[1])
        for some in _ring.without(rows, [*self._closed, *self._final]):
            out = select_rows(self._out, some)
            outs = self._of_room(self._outs[:1], some)
            if self._sinks is None:
                out.copy_(outs[0])
                continue
            lses = _of_lse(self._lses[:1], some)
            merge(outs, lses, sinks=self._sinks, out=out, lse=lses[0])
        lse = self._lses[0].clone()
        if self._call.used is not None and self._sinks is not None:
            # A row that is not in use has no sink either, which a merge does not know.
            used = torch.tensor(self._call.in_use(None), device=lse.device)
            lse.masked_fill_(~used[:, None], float("-inf"))
        return self._out, lse

    def _of_room(self, x: Tensor, rows: Rows) -> Tensor:
        """Of (..., batch, the room's rows, heads, head_dim_v)."""
        begin, end = self._room.place(rows)
        return x[..., begin:end, :, :]


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
            self._exchange = start_keys(self._call, step, self._k, self._v)

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
    for batch in call.batched(plan.final):
        partials.add_final(q, k, v, batch)
    for batch in own:
        partials.add(q, k, v, batch, None)
    for step, batches in zip(plan.steps, later, strict=True):
        received = arriving.next()
        for batch in batches:
            keys, values = received
            partials.add(q, keys, values, batch, step)
    return partials.results()


def gradients_of(
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
    and over ranks, in the order of the steps, in a room for the rows that have such; what is final
    is no sum.
    """
    plan, found = call.schedule, [torch.empty_like(x) for x in (q, k, v)]
    deterministic = {"deterministic": call.deterministic}
    of_own = call.batched(plan.edges), call.batched(plan.own_first), call.batched(plan.own_last)
    of_steps = [call.batched(step.blocks) for step in plan.steps]
    spans = [rows for x in chain(*of_own) for rows in (x.q, x.k)]
    spans += (x.q for x in chain(*of_steps))
    room = Room(_ring.joined([*spans, *plan.summed_k]))

    def of_room(x: Tensor, rows: Rows) -> Tensor:
        return select_rows(x, room.place(rows))

    sums = [x.new_zeros((len(x), room.size, *x.shape[2:]), dtype=torch.float32) for x in (q, k, v)]
    delta = lse.new_empty((*lse.shape[:2], room.size))
    for rows in room.rows:
        some_dlse = None if dlse is None else _of_lse(dlse, rows)
        some = _delta(select_rows(dout, rows), select_rows(out, rows), some_dlse)
        _of_lse(delta, room.place(rows)).copy_(some)
    final = (*plan.final_first, *plan.final_last)
    dsinks = None
    if sinks is not None:
        dsinks = torch.zeros_like(sinks)
        for rows in _ring.without(Rows(0, plan.rows), (block.q for block in final)):
            some = _of_lse(delta, room.place(rows))
            dsinks += _sinks_gradient(sinks, _of_lse(lse, rows), some)

    def write(batch: Batch) -> None:
        """One call whose gradients are final, but for sums that are written later, and for rows
        between blocks, which are such.
        """
        of_q = batch.q
        options = _batch_options(call, batch, q, None) | deterministic
        if dlse is not None:
            options["dlse"] = call.given(_of_lse(dlse, of_q).contiguous())
        grads = [call.given(select_rows(x, of_q)) for x in found]
        if sinks is not None:
            grads.append(torch.empty_like(sinks))
            options |= {"sinks": sinks, "return_dsinks": True}
            options |= _rows_of_blocks(call, batch, q.device)
        tensors = tuple(select_rows(x, of_q) for x in (dout, q, k, v))
        some_lse = _of_lse(lse, of_q).contiguous()
        some_out = select_rows(out, of_q)
        gradients_of(call, tensors, some_out, some_lse, grads=tuple(grads), **options)
        if dsinks is not None:
            dsinks.add_(grads[3])

    def add(step: Step | None, batch: Batch, *keys: Tensor) -> None:
        """One call whose gradients are parts of sums. keys: k, v, and where dk and dv are added."""
        options = _batch_options(call, batch, q, step) | deterministic
        of_q, of_k = batch.q, batch.k
        of_dk = room.place(of_k) if step is None else of_k
        k, v, dk, dv = keys
        grads = of_room(sums[0], of_q), select_rows(dk, of_dk), select_rows(dv, of_dk)
        tensors = (
            select_rows(dout, of_q),
            select_rows(q, of_q),
            select_rows(k, of_k),
            select_rows(v, of_k),
        )
        gradients_of(
            call,
            tensors,
            None,
            _of_lse(lse, of_q).contiguous(),
            delta=call.given(_of_lse(delta, room.place(of_q)).contiguous()),
            grads=tuple(map(call.given, grads)),
            accumulate=True,
            **options,
        )

    def take(step: Step, exchange: Exchange) -> None:
        for gradient, received in zip(sums[1:], exchange.arrived(), strict=False):
            begin = 0
            for rows in step.sends:
                of_room(gradient, rows).add_(received[:, begin : begin + rows.size])
                begin += rows.size

    arriving = _Ahead(call, k, v)
    edges, own_first, own_last = of_own
    for batch in (*edges, *own_first):
        add(None, batch, k, v, *sums[1:])
    for batch in call.batched(plan.final_first):
        write(batch)
    returning: tuple[Step, Exchange] | None = None
    for step, batches in zip(plan.steps, of_steps, strict=True):
        received = arriving.next()
        computed = [torch.zeros_like(x, dtype=torch.float32) for x in received]
        for batch in batches:
            add(step, batch, *received, *computed)
        if returning is not None:
            take(*returning)
        returning = step, start_gradients(call, step, computed, sums[1:])
    for batch in own_last:
        add(None, batch, k, v, *sums[1:])
    for batch in call.batched(plan.final_last):
        write(batch)
    if returning is not None:
        take(*returning)
    of_k = plan.summed_k
    for x, of_sums, some in zip(found, sums, (plan.summed_q, of_k, of_k), strict=True):
        for rows in some:
            select_rows(x, rows).copy_(of_room(of_sums, rows))
    return found[0], found[1], found[2], dsinks


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
