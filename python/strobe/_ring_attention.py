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
from ._ring import Batch, Block, Step
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
    """Partial results in float32, merged by the library as they come. The first result of a row is
    written to the first half of `outs`; what follows to the second, and merged into the first; and
    the last merge of a row writes `out`, in q's dtype. What a rank has whole has one result, which
    is written there at once.
    """

    def __init__(
        self, call: Call, q: Tensor, head_dim_v: int, sinks: Tensor | None, batches: list[Batch]
    ) -> None:
        """batches: all that will be added, in this order, but for what the rank has whole; those on
        the diagonal come first. sinks: they enter a row with its last result.
        """
        batch, rows, heads, _ = q.shape
        like = {"dtype": torch.float32, "device": q.device}
        self._call = call
        self._sinks = sinks
        self._alone = len(batches) == 1  # there is nothing to merge
        halves, self._shared = 0 if self._alone else 2, call.schedule.shared_rows
        self._outs = torch.empty((halves, batch, self._shared, heads, head_dim_v), **like)
        self._lses = torch.empty((2, batch, heads, rows), **like)
        self._out = q.new_empty((batch, rows, heads, head_dim_v))
        self._closing = iter(_ring.closing(batches))
        self._written: list[Rows] = []  # rows of which `outs` holds a result, joined
        self._closed: list[Rows] = []  # and `out` does

    def add(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, step: Step | None) -> None:
        """One call; k and v are the tensors that the blocks count rows of, as step says."""
        if self._alone:
            self.add_whole(q, k, v, batch, step)
            return
        call, rows, options = self._call, batch.q, _batch_options(self._call, batch, q, step)
        tensors = (select_rows(q, rows), select_rows(k, batch.k), select_rows(v, batch.k))
        inputs = tuple(call.given(x) for x in tensors)
        closes = next(self._closing)
        # Either all of these rows have a result, as their block on the diagonal came first, or this
        # is that block.
        later = any(x.begin <= rows.begin and rows.end <= x.end for x in self._written)
        part = call.given(select_rows(self._outs[int(later)], rows))
        lse = attention_in_float32(*inputs, out=part, **options)
        _of_lse(self._lses[int(later)], rows).copy_(lse)
        if not later:
            self._written = list(_ring.joined([*self._written, rows]))
            return
        outs, lses = self._outs[:, :, rows.begin : rows.end], _of_lse(self._lses, rows)
        if closes:
            merge(outs, lses, sinks=self._sinks, out=select_rows(self._out, rows), lse=lses[0])
            self._closed.append(rows)
        else:
            merge(outs, lses, out=outs[0], lse=lses[0])

    def add_whole(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, step: Step | None) -> None:
        """One call whose rows have no other."""
        call, rows = self._call, batch.q
        tensors = (select_rows(q, rows), select_rows(k, batch.k), select_rows(v, batch.k))
        _, lse = attention(
            *(call.given(x) for x in tensors),
            out=call.given(select_rows(self._out, rows)),
            return_lse=True,
            sinks=self._sinks,
            **_batch_options(call, batch, q, step),
        )
        _of_lse(self._lses[0], rows).copy_(lse)
        self._closed.append(rows)

    def results(self) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        for rows in _ring.without(self._shared, self._closed):
            out = select_rows(self._out, rows)
            if self._sinks is None:
                out.copy_(select_rows(self._outs[0], rows))
                continue
            outs, lses = self._outs[:1, :, rows.begin : rows.end], _of_lse(self._lses[:1], rows)
            merge(outs, lses, sinks=self._sinks, out=out, lse=lses[0])
        lse = self._lses[0].clone()
        if self._call.used is not None and self._sinks is not None and not self._alone:
            # A row that is not in use has no sink either, which a merge does not know.
            used = torch.tensor(self._call.in_use(None), device=lse.device)[:, : self._shared]
            lse[..., : self._shared].masked_fill_(~used[:, None], float("-inf"))
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
    for batch in call.batched(plan.whole):
        partials.add_whole(q, k, v, batch, None)
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
    and over ranks, in the order of the steps; what the rank has whole is no sum.
    """
    plan, found = call.schedule, [torch.empty_like(x) for x in (q, k, v)]
    shared = Rows(0, plan.shared_rows)
    some_dlse = None if dlse is None else _of_lse(dlse, shared)
    delta = _delta(select_rows(dout, shared), select_rows(out, shared), some_dlse)
    dsinks = None
    if sinks is not None:
        dsinks = _sinks_gradient(sinks, _of_lse(lse, shared), delta)
    deterministic = {"deterministic": call.deterministic}
    like = [select_rows(x, shared) for x in (q, k, v)]
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in like)

    def add_whole(batch: Batch) -> None:
        rows = batch.q
        options = _batch_options(call, batch, q, None) | deterministic
        if dlse is not None:
            options["dlse"] = call.given(_of_lse(dlse, rows).contiguous())
        grads = [call.given(select_rows(x, rows)) for x in found]
        if sinks is not None:
            grads.append(torch.empty_like(sinks))
            options |= {"sinks": sinks, "return_dsinks": True}
        gradients_of(
            call,
            (
                select_rows(dout, rows),
                select_rows(q, rows),
                select_rows(k, rows),
                select_rows(v, rows),
            ),
            select_rows(out, rows),
            _of_lse(lse, rows).contiguous(),
            grads=tuple(grads),
            **options,
        )
        if dsinks is not None:
            dsinks.add_(grads[3])

    def add(step: Step | None, blocks: tuple[Block, ...], *keys: Tensor) -> None:
        k, v, dk, dv = keys
        for batch in call.batched(blocks):
            options = _batch_options(call, batch, q, step) | deterministic
            of_q, of_k = batch.q, batch.k
            grads = (select_rows(dq, of_q), select_rows(dk, of_k), select_rows(dv, of_k))
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
                delta=call.given(_of_lse(delta, of_q).contiguous()),
                grads=tuple(map(call.given, grads)),
                accumulate=True,
                **options,
            )

    def take(step: Step, exchange: Exchange) -> None:
        for gradient, received in zip((dk, dv), exchange.arrived(), strict=False):
            begin = 0
            for rows in step.sends:
                select_rows(gradient, rows).add_(received[:, begin : begin + rows.size])
                begin += rows.size

    arriving = _Ahead(call, k, v)
    for batch in call.batched(plan.whole):
        add_whole(batch)
    add(None, plan.own_first, k, v, dk, dv)
    returning: tuple[Step, Exchange] | None = None
    for step in plan.steps:
        received = arriving.next()
        computed = [torch.zeros_like(x, dtype=torch.float32) for x in received]
        if step.blocks:
            add(step, step.blocks, *received, *computed)
        if returning is not None:
            take(*returning)
        returning = step, start_gradients(call, step, computed, (dk, dv))
    add(None, plan.own_last, k, v, dk, dv)
    if returning is not None:
        take(*returning)
    for x, of_shared in zip(found, (dq, dk, dv), strict=True):
        select_rows(x, shared).copy_(of_shared)
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
