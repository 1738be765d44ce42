"""What a split call costs beside its attention: the bytes that travel, those that no computation
hides, and what computing in parts takes longer. `strobe.distributed` chooses by it how many ranks
share out the heads.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ._layout import Layout
from ._ring import Mask, Schedule, pairs_in, schedule

# How many FLOP a device does while its link brings a byte: 600 TFLOP/s beside 300 GB/s on Hopper
# with NVLink, 150 GFLOP/s beside some 0.1 GB/s of gloo on a CPU's few cores. Only the order of
# magnitude matters.
FLOP_PER_BYTE: Final = 2000
# Of the ring's computing, what it takes longer than that of whole sequences, one of so many parts,
# for messages beside the kernels; and how many bytes could travel while float32 parts and sums of
# an element of Q, K, V and O are cleared, written, read and rounded. All-to-all packs and unpacks
# its bytes, which takes as long as so many hundredths of them travel. Both as two GPUs had it
# (docs/distributed.md).
PARTS_TAKE: Final = 20
SUMS_TAKE: Final = 5
PACKING_TAKES: Final = 50
# From so many bytes of q, k and v on, those of all rows and a rank's heads, the heads come in two
# lots: the messages of one travel while the other one is computed. What is smaller waits for the
# host, which two lots keep busy twice as long.
TWO_LOTS_FROM = 1 << 28
# GPUs of a node, among which NVLink carries messages, and how many times as long a byte takes
# between nodes: 300 GB/s beside 50 (400 Gbit/s a GPU).
NODE: Final = 8
BETWEEN_NODES: Final = 6


class Sizes(NamedTuple):
    """Of a call, the whole sequence's. element: bytes of q's dtype."""

    batch: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    element: int

    @property
    def kv_row(self) -> int:
        """Elements of K and V in a row."""
        return self.batch * self.heads_kv * (self.head_dim + self.head_dim_v)

    @property
    def q_row(self) -> int:
        """Elements of Q and O in a row."""
        return self.batch * self.heads * (self.head_dim + self.head_dim_v)

    def flop(self, pairs: int) -> int:
        """Of so many scores, forward."""
        return 2 * pairs * self.batch * self.heads * (self.head_dim + self.head_dim_v)


class Traffic(NamedTuple):
    """Bytes that a rank receives in a training step: forward, backward, and of both those that no
    computation hides. parts: those that could travel in the time that computing in parts takes
    longer, or packing.
    """

    forward: int
    backward: int
    exposed: int
    parts: int = 0

    @property
    def lost(self) -> int:
        """A rank's time beside its attention, in bytes."""
        return self.exposed + self.parts


def ring_traffic(
    plan: Schedule, sizes: Sizes, mask: Mask | None = None, slower: int = 1
) -> Traffic:
    """Of the ring. K and V of a step hide behind what is computed while they travel, the blocks
    before them; float32 dK and dV go home behind the blocks after them. slower: how many times as
    long a byte takes; what is exposed is counted in bytes of the fast link.
    """
    # Work in terms of pairs; a backward pass has 2.5 times a forward pass's FLOP.
    final, own, edges, own_first, own_last, final_first, final_last = (
        pairs_in(blocks, mask) for blocks in plan.of_own_keys
    )
    work = [pairs_in(step.blocks, mask) for step in plan.steps]
    forward = backward = exposed = 0
    for n, step in enumerate(plan.steps):
        kv = sum(x.size for x in step.receives) * sizes.kv_row
        gradients = 4 * sum(x.size for x in step.sends) * sizes.kv_row  # they come back
        kv *= sizes.element
        before = work[n - 1] if n else final + own
        before_backward = work[n - 1] if n else edges + own_first + final_first
        after = work[n + 1] if n + 1 < len(work) else own_last + final_last
        forward += kv
        backward += kv + gradients
        exposed += max(0, slower * kv - sizes.flop(before) // FLOP_PER_BYTE)
        # Both directions of a step's backward pass share the link with one another.
        hidden = sizes.flop(before_backward + after) * 5 // 4 // FLOP_PER_BYTE
        exposed += max(0, slower * (kv + gradients) - hidden)
    # What is final is not computed in parts; edges are computed twice.
    summed = 2 * (own + sum(work)) + 5 * (own_first + own_last + sum(work))
    parts = sizes.flop(summed) // 2 // PARTS_TAKE // FLOP_PER_BYTE
    parts += sizes.flop(edges) * 5 // 2 // FLOP_PER_BYTE
    in_parts = sum(block.q.size for block in plan.own)
    parts += SUMS_TAKE * in_parts * (sizes.q_row + sizes.kv_row)
    return Traffic(forward, backward, exposed, parts if work else 0)


def ulysses_traffic(length: int, ranks: int, sizes: Sizes, inside: int | None = None) -> Traffic:
    """Of the all-to-all of groups of so many ranks (None: of all): all but the own heads of the own
    rows, of Q, K, V and O, and of their gradients. It counts as exposed, the whole of it, also
    where it comes in two lots. sizes: with all heads.
    """
    inside = ranks if inside is None else inside
    rows = -(-length // ranks)
    row = rows * (sizes.q_row + sizes.kv_row) * sizes.element
    once = row * (inside - 1) // inside
    # Of its members a rank has those of its node beside it.
    away = row * (inside - min(inside, NODE)) // inside
    packed = 2 * once * PACKING_TAKES // 100
    return Traffic(once, once, 2 * (once + (BETWEEN_NODES - 1) * away), packed)


def lots_of_heads(length: int, ranks: int, sizes: Sizes, inside: int) -> int:
    """In how many lots the heads of a rank come by all-to-all, one or two."""
    row = sizes.heads * sizes.head_dim + sizes.heads_kv * (sizes.head_dim + sizes.head_dim_v)
    given = length * sizes.batch * row * sizes.element // inside
    divided = ranks == inside > 1 and sizes.heads_kv // inside % 2 == 0
    return 2 if divided and given >= TWO_LOTS_FROM else 1


def lost(layout: Layout, mask: Mask, sizes: Sizes, inside: int) -> int:
    """What a rank loses beside its attention, in bytes of the fast link, if the heads are shared
    out among so many ranks inside of groups, and a ring goes between these.
    """
    ranks, groups = layout.ranks, layout.ranks // inside
    found = ulysses_traffic(layout.rows, ranks, sizes, inside).lost if inside > 1 else 0
    if groups == 1:
        return found
    share = sizes._replace(heads=sizes.heads // inside, heads_kv=sizes.heads_kv // inside)
    slower = BETWEEN_NODES if ranks > NODE else 1
    # The heaviest of a few: the first has the most keys to get in zigzag order, the last in plain
    # order under a causal mask, one in the middle in a window.
    plans = [schedule(layout, group, mask, inside) for group in {0, groups // 2, groups - 1}]
    return found + max(ring_traffic(plan, share, mask, slower).lost for plan in plans)


def chosen(layout: Layout, mask: Mask, sizes: Sizes) -> tuple[int, str]:
    """How many ranks share out the heads where nothing but the costs says so, and why so many."""
    ranks = layout.ranks
    if ranks == 1:
        return 1, "one rank sends nothing"
    costs = {
        inside: lost(layout, mask, sizes, inside)
        for inside in range(1, ranks + 1)
        if ranks % inside == sizes.heads % inside == sizes.heads_kv % inside == 0
    }
    if len(costs) == 1:
        heads = ("heads", sizes.heads), ("heads_kv", sizes.heads_kv)
        name, count = next(x for x in heads if x[1] % ranks)
        return 1, f"{ranks} ranks do not divide {name} = {count}"
    best = min(costs, key=lambda inside: (costs[inside], inside))
    longer = 100 // PARTS_TAKE
    parts = f"parts take {longer} % longer and are summed"
    told = [f"{in_bytes(costs[1])} in a ring, whose {parts}"]
    between = {inside: cost for inside, cost in costs.items() if 1 < inside < ranks}
    if between:
        group = min(between, key=lambda inside: (between[inside], inside))
        told.append(f"of {in_bytes(between[group])} in a ring of groups of {group}")
    if ranks in costs:
        told.append(f"of {in_bytes(costs[ranks])} by all-to-all, packed and unpacked")
    listed = ", ".join(told[:-1]) + f", and {told[-1]}"
    rate = f"{FLOP_PER_BYTE} FLOP hide a byte"
    return best, f"a rank loses the time of {listed}, where {rate}"


def in_bytes(count: int) -> str:
    """With a unit, powers of ten as links have them."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
