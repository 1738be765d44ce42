"""Attention over a split sequence, as autograd sees it: the ring of `_ring_attention`, or one call
for all rows, between the all-to-alls over heads of `_messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from . import _ring
from ._arrays import check_readable
from ._layout import Lengths, Rows
from ._messages import Lot, ToHeads, ToRows, heads_of, with_rows_last, with_rows_second
from ._operators import refuse_double_backward, rows_contiguous
from ._rank_call import Call
from ._ring_attention import gradients_of, ring_backward, ring_forward
from ._ring_cost import Sizes, lots_of_heads
from .functional import attention

Tensor: TypeAlias = torch.Tensor


# ---------------------------------------------------------------------------- one call for all rows


@lru_cache(maxsize=256)
def _of_sequences(lengths: Lengths, device: torch.device) -> dict[str, Any]:
    """Options of one call for whole sequences, packed."""
    begins = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return _ring.packed_options(begins, lengths)


def _whole_options(call: Call, lot: Lot, q: Tensor, sinks: Tensor | None) -> dict[str, Any]:
    """Options of the one call for all rows and a lot of this rank's heads."""
    options = call.masked() | {"alibi_slopes": lot.of_rank(call.slopes), "sinks": sinks}
    options["attention_chunk"] = call.mask.attention_chunk or 0
    count = call.inside * lot.of * q.shape[2]
    heads = lot.heads(call, count)
    if call.dropout:
        options |= call.dropout | {"dropout_first_head": heads.begin, "dropout_heads": count}
    if call.used is not None:
        numbers = torch.tensor(call.used, dtype=torch.int32, device=q.device)
        options |= {"seqused_q": numbers, "seqused_k": numbers}
    if call.data is not None:
        begins = call.layout.starts
        sequences = tuple(zip(begins, begins, strict=True)) if call.packed else None
        rows = Rows(0, begins[-1]), call.held(None)
        options["mask"] = call.data.of(rows, rows, sequences, heads, q.device)
    return options | _of_sequences(call.layout.lengths, q.device) if call.packed else options


def whole_forward(
    call: Call, lot: Lot, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of all rows, by one call."""
    inputs = [call.given(x) for x in (q, k, v)]
    found = attention(*inputs, return_lse=True, **_whole_options(call, lot, q, sinks))
    out, lse = (call.kept(x) for x in found)
    return out, lse


def whole_backward(
    call: Call,
    lot: Lot,
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
    options = _whole_options(call, lot, q, sinks) | {"deterministic": call.deterministic}
    options |= {"dlse": None if dlse is None else call.given(dlse)}
    options |= {"return_dsinks": sinks is not None}
    found = gradients_of(call, (dout, q, k, v), out, lse, **options)
    dq, dk, dv = (call.kept(x) for x in found[:3])
    return dq, dk, dv, None if sinks is None else found[3]


# ------------------------------------------------------------------------------------ lots of heads


def _lots(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Lot, ...]:
    """q, k and v: this rank's rows. The same on every rank."""
    batch, _, heads, head_dim = q.shape
    sizes = Sizes(batch, heads, k.shape[2], head_dim, v.shape[3], q.element_size())
    count = lots_of_heads(call.layout.rows, call.layout.ranks, sizes, call.inside)
    return _IN_TWO if count == 2 else _IN_ONE


_IN_ONE, _IN_TWO = (Lot(0, 1),), (Lot(0, 2), Lot(1, 2))


def _lot_by_lot(
    call: Call,
    lots: Sequence[Lot],
    given: Sequence[Tensor],
    compute: Callable[[Lot, list[Tensor]], Sequence[Tensor]],
    results: Sequence[Tensor],
) -> Sequence[Tensor]:
    """`results`, this rank's rows of what `compute` makes of all rows and a lot of its heads of
    what is given. While a lot is computed the next one comes, and the results of the one before
    go. Without an all-to-all: what it makes.
    """
    if call.inside == 1:
        return compute(lots[0], list(given))
    coming, going = ToHeads(call, given, lots[0]), None
    for lot in lots:
        after = None if lot is lots[-1] else ToHeads(call, given, lots[lot.number + 1])
        computed = compute(lot, coming.arrived())
        if going is not None:
            going.arrived()
        going = ToRows(call, computed, results, lot)
        if after is not None:
            coming = after
    if going is not None:
        going.arrived()
    return results


# ----------------------------------------------------------------------------------------- autograd


class SplitAttention(torch.autograd.Function):  # type: ignore[misc]
    """(out, lse) of q, k, v, sinks and a Call, differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor | None]:
        """q, k and v: this rank's rows. lse is None after an all-to-all if nobody wants it."""
        ctx.call = call
        ctx.set_materialize_grads(False)  # no zeros for an lse that nobody used
        q, k, v = (rows_contiguous(x) for x in (q, k, v))
        lots, saved = _lots(call, q, k, v), []
        ctx.lots = lots
        of_rank = heads_of(sinks, call.inside, call.place)

        def compute(lot: Lot, wholes: list[Tensor]) -> list[Tensor]:
            q, k, v = wholes
            some = lot.of_rank(of_rank)
            if call.groups == 1:
                out, lse = whole_forward(call, lot, q, k, v, some)
            else:
                out, lse = ring_forward(call, q, k, v, some)
            saved.extend([q, k, v, some, out, lse])
            if call.inside == 1:
                return [out, lse]
            return [out, with_rows_second(lse)] if call.with_lse else [out]

        results = []
        if call.inside > 1:
            results.append(q.new_empty((*q.shape[:3], v.shape[-1])))
            if call.with_lse:
                results.append(q.new_empty((*q.shape[:3], 1), dtype=torch.float32))
        out, *lse = _lot_by_lot(call, lots, (q, k, v), compute, results)
        ctx.save_for_backward(*saved)
        if call.inside == 1:
            return out, lse[0]
        return out, with_rows_last(lse[0]) if lse else None

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """Every rank has to come here, as to the forward pass: the others wait for its messages."""
        if torch.is_grad_enabled():
            refuse_double_backward(ctx)
        call, lots, tensors = ctx.call, ctx.lots, ctx.saved_tensors
        count = len(tensors) // len(lots)
        saved = [tensors[n * count : (n + 1) * count] for n in range(len(lots))]
        for of_lot in saved:
            for name, x in zip("qkv", of_lot, strict=False):
                check_readable(name, x)  # its storage may have been freed since the forward pass
        q, k, v, sinks, out, lse = saved[0]
        heads = call.inside * len(lots)
        batch, rows = len(q), call.layout.rows_of(call.rank)

        def of_rows(x: Tensor) -> Tensor:
            return x.new_empty((batch, rows, heads * x.shape[2], x.shape[3]))

        if dout is None:  # of lse alone; the others may have one all the same
            dout = of_rows(out).zero_()
        if dlse is None and call.with_lse and call.inside > 1:
            # The others of the group may have one, and their messages want an answer.
            dlse = lse.new_zeros((batch, heads * lse.shape[1], rows))
        dsinks = None if sinks is None else sinks.new_zeros(heads * len(sinks))

        def compute(lot: Lot, wholes: list[Tensor]) -> Sequence[Tensor]:
            dout, *of_lse = wholes
            dlse = None
            if of_lse:
                dlse = of_lse[0] if call.inside == 1 else with_rows_last(of_lse[0])
            inputs = dout, dlse, *saved[lot.number]
            if call.groups == 1:
                *found, of_sinks = whole_backward(call, lot, *inputs)
            else:
                *found, of_sinks = ring_backward(call, *inputs)
            if dsinks is not None:
                some = lot.heads(call, len(dsinks))
                dsinks[some.begin : some.end] = of_sinks
            return found

        given = [rows_contiguous(dout)]
        if dlse is not None:
            given.append(dlse.contiguous() if call.inside == 1 else with_rows_second(dlse))
        results = [of_rows(x) for x in (q, k, v)] if call.inside > 1 else []
        return (*_lot_by_lot(call, lots, given, compute, results), dsinks, None)
