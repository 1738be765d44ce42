"""How a call over ranks is done, in words: who computes what, what travels, and why so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from . import _ring, _ring_cost
from ._layout import Layout
from ._ring import Mask
from ._ring_cost import in_bytes
from ._shares import Cut
from ._split_calls import Settled


def plan_told(found: Settled, rank: int, packed: bool, mask: Mask, data: Cut | None) -> str:
    """`strobe.distributed.plan` of a rank. packed: whether there are packed sequences."""
    layout, what = found.layout, "sequence  "
    mine = layout.chunks(rank)
    if not packed:
        held = f"rows {', '.join(f'{x.begin}-{x.end - 1}' for x in mine)}" if mine else "no rows"
    else:
        held, what = _told_share(layout, rank), f"sequences  {len(layout.lengths)} of"
    sequence = (
        f"{what} {layout.rows} rows over {layout.ranks} ranks in {layout.order} order: "
        f"rank {rank} has {held}"
    )
    lines = [sequence, f"method     {found.method}, because {found.reason}"]
    if found.inside > 1:
        lines += _told_ulysses(found)
    if found.groups > 1 or found.inside == 1:
        lines += _told_ring(found, rank, mask, data)
    return "\n".join(lines)


def _told_share(layout: Layout, rank: int) -> str:
    """What a rank has of packed sequences."""
    chunks = layout.chunks(rank)
    parts = [x for x in chunks if x.end - x.begin < layout.lengths[x.sequence]]
    rows = sum(x.end - x.begin for x in parts)
    return (
        f"{layout.rows_of(rank)} rows: {len(chunks) - len(parts)} whole, and {rows} rows of "
        f"{len({x.sequence for x in parts})} others"
    )


def _told_ring(found: Settled, rank: int, mask: Mask, data: Cut | None) -> list[str]:
    """The steps of a rank, and what travels."""
    group, member = divmod(rank, found.inside)
    what = found.layout, group, mask, found.inside
    all_rows = data is not None and data.of_all_rows
    schedule = data.schedule(*what) if data is not None and all_rows else _ring.schedule(*what)
    sizes = found.sizes
    share = sizes._replace(
        heads=sizes.heads // found.inside, heads_kv=sizes.heads_kv // found.inside
    )
    row = share.kv_row * share.element
    own = (*schedule.final, *schedule.own)
    lines = [f"step 0     computes {_listed(own)} with its own keys"]
    for step in schedule.steps:
        said = []
        source, target = (x * found.inside + member for x in (step.source, step.target))
        if step.sends:
            count = sum(x.size for x in step.sends)
            said.append(f"sends {count} rows ({in_bytes(count * row)}) to rank {target}")
        if step.receives:
            count = sum(x.size for x in step.receives)
            said.append(f"receives {count} rows ({in_bytes(count * row)}) from rank {source}")
            said.append(f"computes {_listed(step.blocks)}")
        if said:
            lines.append(f"step {step.distance:<6}{'; '.join(said)}")
    slower = _ring_cost.BETWEEN_NODES if found.ranks > _ring_cost.NODE else 1
    traffic = _ring_cost.ring_traffic(schedule, share, mask, slower)
    waits = "no byte of it" if traffic.exposed == 0 else f"{in_bytes(traffic.exposed)} of it"
    lines.append(
        f"messages   receives {in_bytes(traffic.forward)} forward (K and V), "
        f"{in_bytes(traffic.backward)} backward (K and V again, float32 dK and dV home); "
        f"{waits} without work to hide behind"
    )
    return lines


def _told_ulysses(found: Settled) -> list[str]:
    """The all-to-all of a rank."""
    sizes = found.sizes
    heads, heads_kv = sizes.heads // found.inside, sizes.heads_kv // found.inside
    length = found.layout.rows
    once = _ring_cost.ulysses_traffic(length, found.ranks, sizes, found.inside).forward
    two = _ring_cost.lots_of_heads(length, found.ranks, sizes, found.inside) == 2
    waits = (
        "one of two lots of heads travels while attention computes the other"
        if two
        else "attention waits for all of it"
    )
    messages = (
        f"messages   receives {in_bytes(once)} forward (Q, K and V before, O after), "
        f"{in_bytes(once)} backward (dO before; dQ, dK and dV after); {waits}"
    )
    calls = ", by a call for each of two lots" if two else ", by one call"
    whose, how = ("all", calls) if found.groups == 1 else ("its group's", "")
    rows = length if found.groups == 1 else -(-length // found.groups)
    computes = f"computes   {whose} {rows} rows of {heads} heads ({heads_kv} of keys){how}"
    return [computes, messages]


_MOST_TOLD: Final = 4  # blocks, each by itself


def _listed(blocks: Sequence[_ring.Block]) -> str:
    """Blocks in words, queries x keys."""
    if not blocks:
        return "nothing"
    if len(blocks) > _MOST_TOLD:
        return f"{len(blocks)} blocks of {sum(block.pairs for block in blocks)} scores"
    return " and ".join(
        f"rows {block.q.begin}-{block.q.end - 1} x {block.k.size} keys"
        f"{' (masked)' if block.masked else ''}"
        for block in blocks
    )
