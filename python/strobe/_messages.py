"""What the ranks of a call send each other, on torch.distributed: keys, values and their gradients
along the ring, and rows for heads by an all-to-all.

Nothing here waits for another rank but by a `wait` of PyTorch's, so a rank that is gone ends in
PyTorch's own error, at once or by the group's time-out, which nothing here catches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ._layout import Rows
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


def to_heads(call: Call, x: Tensor) -> Tensor:
    """(batch, rows, heads, dim) of this rank's rows and all heads to (batch, rows, heads / inside,
    dim) of the group's rows, in their order, and this rank's heads.
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
            select_rows(whole, of_group).copy_(select_rows(received, of_rank))
    return whole


def to_rows(call: Call, x: Tensor) -> Tensor:
    """Back: (batch, rows, heads / inside, dim) of the group's rows to (batch, rows, heads, dim)."""
    if call.inside == 1:
        return x
    batch, _, heads, dim = x.shape
    parts = []
    for pieces in call.members():
        of_rank = [select_rows(x, piece.of_group) for piece in pieces] or [x[:, :0]]
        parts.append(torch.cat(of_rank, dim=1))
    rows = parts[call.place].shape[1]
    found = _all_to_all(call, parts, [batch * rows * heads * dim] * call.inside)
    return torch.cat([part.view(batch, rows, heads, dim) for part in found], dim=2)


def lse_to_heads(call: Call, x: Tensor) -> Tensor:
    """The same of (batch, heads, rows), as lse and its gradient are."""
    if call.inside == 1:
        return x.contiguous()
    whole = to_heads(call, x.transpose(1, 2).unsqueeze(-1))
    return whole.squeeze(-1).transpose(1, 2).contiguous()


def lse_to_rows(call: Call, x: Tensor) -> Tensor:
    if call.inside == 1:
        return x
    rows = to_rows(call, x.transpose(1, 2).unsqueeze(-1))
    return rows.squeeze(-1).transpose(1, 2).contiguous()


def heads_of(x: Tensor | None, inside: int, place: int) -> Tensor | None:
    """A rank's heads of what has a number for each of all, along its last axis."""
    if x is None or inside == 1:
        return x
    heads = x.shape[-1] // inside
    return x[..., place * heads : (place + 1) * heads].contiguous()
