"""A call of attention over a split sequence, as one of its ranks has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from . import _ring, _shares
from ._layout import Layout, Piece, Rows
from ._ring import Batch, Block, Mask, Schedule, Step

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
    layout: Layout
    given_packed: bool  # by the caller
    packed: bool
    mask: Mask
    options: dict[str, Any]  # scale and softcap
    slopes: Tensor | None  # of this rank's heads
    deterministic: bool
    with_lse: bool  # lse is returned, on every rank: a gradient of it may come on any
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
        what = self.layout, self.group_rank, self.mask, self.inside
        if self.data is not None and self.data.of_all_rows:
            return self.data.schedule(*what)
        return _ring.schedule(*what)

    def members(self) -> tuple[tuple[Piece, ...], ...]:
        """Of each rank of the group, which of the group's rows it has."""
        return self.layout.members(self.group_rank, self.inside)

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
        return self.layout, rank, pieces, self.inside

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
