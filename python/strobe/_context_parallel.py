"""Attention over a split sequence, as autograd sees it: the ring of `_ring_attention`, or one call
for all rows, between the all-to-alls over heads of `_messages`.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from . import _ring
from ._arrays import check_readable
from ._layout import Lengths, Rows
from ._messages import heads_of, lse_to_heads, lse_to_rows, to_heads, to_rows
from ._operators import refuse_double_backward, rows_contiguous
from ._rank_call import Call
from ._ring_attention import gradients_of, ring_backward, ring_forward
from .functional import attention

Tensor: TypeAlias = torch.Tensor


# ---------------------------------------------------------------------------- one call for all rows


@lru_cache(maxsize=256)
def _of_sequences(lengths: Lengths, device: torch.device) -> dict[str, Any]:
    """Options of one call for whole sequences, packed."""
    begins = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
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
        begins = call.layout.starts
        sequences = tuple(zip(begins, begins, strict=True)) if call.packed else None
        rows = Rows(0, begins[-1]), call.held(None)
        options["mask"] = call.data.of(rows, rows, sequences, call.heads(q), q.device)
    return options | _of_sequences(call.layout.lengths, q.device) if call.packed else options


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
    found = gradients_of(call, (dout, q, k, v), out, lse, **options)
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
        q, k, v = (to_heads(call, rows_contiguous(x)) for x in (q, k, v))
        sinks = heads_of(sinks, call.inside, call.place)
        forward = whole_forward if call.groups == 1 else ring_forward
        out, lse = forward(call, q, k, v, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return to_rows(call, out), lse_to_rows(call, lse)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """Every rank has to come here, as to the forward pass: the others wait for its messages."""
        if torch.is_grad_enabled():
            refuse_double_backward(ctx)
        call, saved = ctx.call, ctx.saved_tensors
        for name, x in zip("qkv", saved, strict=False):
            check_readable(name, x)  # its storage may have been freed since the forward pass
        if dout is None:  # of lse alone; the others may have one all the same
            batch, _, heads, dim = saved[4].shape
            rows = call.layout.rows_of(call.rank)
            dout = saved[4].new_zeros((batch, rows, call.inside * heads, dim))
        if dlse is None and call.with_lse and call.inside > 1:
            # The others of the group may have one, and their messages want an answer.
            batch, rows, heads, _ = dout.shape
            dlse = saved[5].new_zeros((batch, heads, rows))
        dout = to_heads(call, rows_contiguous(dout))
        if dlse is not None:
            dlse = lse_to_heads(call, dlse)
        backward = whole_backward if call.groups == 1 else ring_backward
        *gradients, dsinks = backward(call, dout, dlse, *saved)
        if dsinks is not None and call.inside > 1:
            of_heads, dsinks = dsinks, dsinks.new_zeros(call.inside * len(dsinks))
            heads = len(of_heads)
            dsinks[call.place * heads : (call.place + 1) * heads] = of_heads
        return (*(to_rows(call, x) for x in gradients), dsinks, None)
