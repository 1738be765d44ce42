"""`strobe.distributed`: the schedule by brute force, random problems over ranks that are threads,
and real processes on gloo, against float64 of the whole sequence and the call of one device.

Split over ranks, a result's error is at most 1.05 of the single call's (RMS), out and gradients. In
float32, where errors are single roundings, a merge adds some: MERGE_ROUNDINGS.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("a PyTorch without torch.distributed", allow_module_level=True)

import strobe  # noqa: E402
from programs import module_of  # noqa: E402
from strobe import (  # noqa: E402
    _ring,
    _ring_attention,
    _ring_cost,
    _shares,
    _split_calls,
    distributed,
)
from strobe._layout import DOCUMENTS, ORDERS, Layout, Rows, layout_of  # noqa: E402
from strobe._ring import Mask  # noqa: E402

import cases  # noqa: E402
import distributed_ranks  # noqa: E402
import oracle  # noqa: E402
import ranks as threads  # noqa: E402
from distributed_ranks import (  # noqa: E402
    by_one_device,
    dense,
    derived,
    drawn_problem,
    drawn_way,
)

ROOT = Path(__file__).resolve().parents[2]
Array = Any
MERGE_ROUNDINGS = 2e-7
SINKS_FACTOR = 8  # oracle/compare.h
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")

# ------------------------------------------------------------------------------------- the schedule


def places(layout: Layout, rank: int, inside: int = 1) -> Array:
    """Positions of a rank's rows, or of a group's."""
    found = layout.chunks(rank, inside)
    return np.concatenate([np.arange(0), *(np.arange(x.begin, x.end) for x in found)])


def count(seen: Array, mask: Mask, blocks: Any, q: Array, k: Array) -> None:
    """Adds 1 for each (query, key) that the blocks compute. q, k: positions of the rows."""
    for block in blocks:
        queries, keys = np.arange(*block.q), np.arange(*block.k)
        assert len(queries)
        assert len(keys)
        apart = queries[:, None] - block.q.begin + block.position - (keys - block.k.begin)
        allowed = np.ones(apart.shape, bool)
        if block.masked:
            allowed &= mask.left is None or apart <= mask.left
            allowed &= mask.right is None or -apart <= mask.right
        assert block.masked != allowed.all()
        # And no row at an edge that has nothing to do with the others.
        assert allowed[[0, -1]].any(1).all()
        assert allowed[:, [0, -1]].any(0).all()
        if mask.by_distance:
            assert (apart == q[queries][:, None] - k[keys]).all()
        seen[np.ix_(q[queries], k[keys])] += allowed


def check_every_pair(
    lengths: tuple[int, ...],
    ranks: int,
    order: Any,
    mask: Mask,
    inside: int = 1,
    documents: Any = "split",
) -> None:
    """Each pair that the mask allows, of each sequence, is computed once, forward and backward; and
    nothing travels that nobody sees.
    """
    total = sum(lengths)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    apart = np.arange(total)[:, None] - np.arange(total)
    allowed = sequence[:, None] == sequence
    if mask.attention_chunk:
        where = np.concatenate([np.arange(0), *map(np.arange, lengths)]) // mask.attention_chunk
        allowed &= where[:, None] == where
    allowed &= mask.left is None or apart <= mask.left
    allowed &= mask.right is None or -apart <= mask.right
    layout = layout_of(lengths, ranks * inside, order, documents)
    held = [places(layout, rank, inside) for rank in range(ranks)]
    assert sorted(np.concatenate(held)) == list(range(total))
    # How often a pair is in out, and in the gradients of its query and of its key.
    forward, of_query, of_key, of_steps = np.zeros((4, total, total), int)
    for rank, mine in enumerate(held):
        plan = _ring.schedule(layout, rank, mask, inside)
        assert plan.rows == len(mine)
        count(forward, mask, (*plan.final, *plan.own), mine, mine)
        sums, final = np.zeros((2, total, total), int)
        count(sums, mask, (*plan.edges, *plan.own_first, *plan.own_last), mine, mine)
        count(final, mask, (*plan.final_first, *plan.final_last), mine, mine)
        for some, rows, axis in ((of_query, plan.summed_q, 0), (of_key, plan.summed_k, 1)):
            of_sums = np.isin(np.arange(total), [mine[n] for x in rows for n in range(*x)])
            of_sums = np.expand_dims(of_sums, 1 - axis)
            some += np.where(of_sums, sums, final)
        check_final(plan)
        for n, step in enumerate(plan.steps):
            theirs = _ring.schedule(layout, step.source, mask, inside).steps[n]
            assert (step.distance, theirs.target) == (n + 1, rank)
            assert theirs.sends == step.receives
            keys = [held[step.source][rows.begin : rows.end] for rows in step.receives]
            received = np.concatenate([np.arange(0), *keys])
            # Nothing travels that nobody sees.
            assert allowed[np.ix_(mine, received)].any(0).all()
            count(of_steps, mask, step.blocks, mine, received)
            check_batches(step.blocks)
        check_batches(plan.own)
    for some in (forward, of_query, of_key):
        assert (some + of_steps == allowed).all(), (lengths, mask)


def check_final(plan: _ring.Schedule) -> None:
    """Results of rows in a final block are that block's alone; and all others have their first
    from the first call that is no final one, into which the others are merged.
    """
    # One call, of packed sequences, and it is the first: what it writes to rows between its blocks
    # is written over.
    for blocks in (plan.final, plan.final_first, plan.final_last):
        assert len(_ring.batched(blocks, True)) == min(1, len(blocks))
    # No result of final_first is in a row between blocks of the last call: it writes zeros there.
    if plan.final_last:
        span = [Rows(plan.final_last[0].q.begin, plan.final_last[-1].q.end)]
        assert not any(_ring.clipped(span, block.q) for block in plan.final_first)
    first = _ring.batched(plan.own, True)[:1]
    assert all(block.has_own for batch in first for block in batch.blocks)
    some = [*plan.final, *(block for batch in first for block in batch.blocks)]
    assert sum(block.q.size for block in some) == plan.rows
    assert _ring.joined(block.q for block in some) == _ring.joined([Rows(0, plan.rows)])
    others = [*plan.own, *(block for step in plan.steps for block in step.blocks)]
    final = _ring.joined(block.q for block in plan.final)
    assert not any(_ring.clipped(final, block.q) for block in others)
    # Squares, of which no two have a row in common.
    summed = [*plan.edges, *plan.own_last]
    for squares in ([*plan.final_first, *plan.final_last, *plan.own_last], summed):
        of_squares = [block.q for block in squares if block.has_own]
        assert sum(x.size for x in _ring.joined(of_squares)) == sum(x.size for x in of_squares)
    for block in (*plan.final_first, *plan.final_last, *plan.edges):
        assert block.q == block.k
    sums = [*plan.summed_q, *plan.summed_k]
    assert not any(_ring.clipped(sums, block.q) for block in plan.final_first)
    room = _ring.Room(_ring.joined(block.q for block in summed))
    assert room.size == sum(block.q.size for block in summed) or plan.own_first
    for rows in room.rows:
        assert room.place(rows).size == rows.size


def check_batches(blocks: Any) -> None:
    """Calls for packed sequences: all of the blocks, in each apart from one another and ascending,
    and no block alone that fits into an earlier call.
    """
    batches = _ring.batched(blocks, True)
    assert sorted(block for batch in batches for block in batch.blocks) == sorted(blocks)
    for batch in batches:
        for a, b in itertools.pairwise(batch.blocks):
            assert a.q.end <= b.q.begin
            assert a.k.end <= b.k.begin
    assert all(len(batch.blocks) == 1 for batch in _ring.batched(blocks, False))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_allowed_pair_is_computed_once(ranks: int, order: Any) -> None:
    lengths = sorted({0, 1, ranks - 1, 2 * ranks + 1, 4 * ranks, 29})
    limits = itertools.product((None, 0, 2, 9, 100), (None, 0, 3), (False, True), (None, 1, 7))
    for length, limit in itertools.product(lengths, limits):
        check_every_pair((length,), ranks, order, Mask(*limit))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_allowed_pair_of_packed_sequences_is_computed_once(ranks: int, order: Any) -> None:
    draw = random.Random(ranks)
    limits = itertools.product((None, 0, 2, 9, 100), (None, 0, 3), (False, True), (None, 1, 7))
    for limit in limits:
        lengths = tuple(draw.choice([0, 1, 2, ranks, 5, 17, 40]) for _ in range(draw.randint(0, 6)))
        for documents in DOCUMENTS:
            check_every_pair(lengths, ranks, order, Mask(*limit), documents=documents)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_pair_of_long_chunks_under_a_window_is_computed_once(ranks: int, order: Any) -> None:
    """Of most of whose rows results are final."""
    limits = itertools.product((0, 1, 2, 5, 17), (0, 1, 3), (False, True))
    edges = 0
    for limit in limits:
        for lengths in ((60 * ranks,), (71 * ranks + 1,), (9, 40 * ranks + 3, 5, 40 * ranks)):
            check_every_pair(lengths, ranks, order, Mask(*limit))
            check_every_pair(lengths, ranks, order, Mask(*limit), documents="auto")
            check_every_pair(lengths, ranks, order, Mask(*limit, attention_chunk=37 * ranks))
            plan = _ring.schedule(layout_of(lengths, ranks, order), 0, Mask(*limit))
            edges += bool(plan.edges)
    assert edges > 20


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("groups", "inside"), [(1, 3), (2, 2), (3, 2), (2, 4)])
def test_groups_have_the_rows_of_their_ranks(groups: int, inside: int, order: Any) -> None:
    draw = random.Random(groups)
    limits = itertools.product((None, 0, 9), (None, 0, 3), (False, True), (None, 7))
    for limit in limits:
        lengths = tuple(draw.choice([0, 1, 2, 5, 17, 40]) for _ in range(draw.randint(1, 6)))
        documents: Any = draw.choice(DOCUMENTS)
        check_every_pair(lengths, groups, order, Mask(*limit), inside, documents)
        layout = layout_of(lengths, groups * inside, order, documents)
        for group in range(groups):
            whole = places(layout, group, inside)
            found = np.zeros(len(whole), int)
            for place in range(inside):
                mine = places(layout, group * inside + place)
                for of_rank, of_group in layout.within(group, inside, place):
                    assert (mine[slice(*of_rank)] == whole[slice(*of_group)]).all()
                    found[slice(*of_group)] += 1
            assert (found == 1).all()


def test_ranks_have_as_much_of_many_short_sequences() -> None:
    draw = random.Random(3)
    orders: list[Any] = list(ORDERS)
    for order, ranks in itertools.product(orders, (2, 3, 8)):
        lengths = tuple(draw.randint(0, 5) for _ in range(2000))
        rows = list(map(layout_of(lengths, ranks, order).rows_of, range(ranks)))
        assert max(rows) - min(rows) < 0.15 * sum(rows) / ranks, (order, rows)


def drawn_documents(draw: random.Random, count: int) -> tuple[int, ...]:
    """Log-uniform, as documents are."""
    return tuple(int(2 ** draw.uniform(6, 14)) for _ in range(count))


def pairs_of(layout: Layout, rank: int) -> int:
    """Twice the pairs of a rank's queries and the keys that they see: in zigzag order under a
    causal mask, in plain order without one.
    """
    found = 0
    for _, begin, end, sequence in layout.chunks(rank):
        first, last = begin - layout.starts[sequence], end - layout.starts[sequence]
        if layout.order == "zigzag":
            found += last * (last + 1) - first * (first + 1)
        else:
            found += 2 * (last - first) * layout.lengths[sequence]
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(20))
def test_documents_are_dealt_out_evenly(seed: int, order: Any) -> None:
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 4, 8, 16, 64])
    lengths = drawn_documents(draw, draw.choice([5, 20, 100, 1000]))
    layout, split = (layout_of(lengths, ranks, order, x) for x in ("auto", "split"))
    rows = list(map(layout.rows_of, range(ranks)))
    if layout._split == split._split:  # all are
        assert [layout.chunks(r) for r in range(ranks)] == [split.chunks(r) for r in range(ranks)]
    else:
        edges = [r * sum(lengths) // ranks for r in range(ranks + 1)]
        assert rows == [b - a for a, b in itertools.pairwise(edges)]
    pairs = [pairs_of(layout, rank) for rank in range(ranks)]
    # (Rows that cuts round to are pairs, too.)
    most = max(1.02 * sum(pairs) / ranks, max(pairs_of(split, rank) for rank in range(ranks)))
    assert max(pairs) <= most + 4 * ranks * max(lengths)
    found = sorted((x.begin, x.end) for r in range(ranks) for x in layout.chunks(r))
    assert [a for a, _ in found] == [0, *(b for _, b in found)][:-1]
    for rank in range(ranks):
        whole = [x.end - x.begin == lengths[x.sequence] for x in layout.chunks(rank)]
        assert whole == sorted(whole)


def test_how_many_documents_are_cut() -> None:
    # Whole where that is even: none is cut.
    for ranks in (2, 4, 8):
        for rank in range(ranks):
            layout = layout_of((1000,) * 3 * ranks, ranks, "zigzag", "auto")
            assert all(x.end - x.begin == 1000 for x in layout.chunks(rank))
            plan = _ring.schedule(layout, rank, Mask(right=0))
            assert not any(step.sends or step.receives for step in plan.steps)
            assert (plan.own, plan.own_first, plan.own_last) == ((), (), ())
            assert sum(block.q.size for block in plan.final) == plan.rows
    # A document that is longer than a share is split; and a few fill up what is left.
    draw = random.Random(1)
    lengths = (50000, *drawn_documents(draw, 400))
    layout = layout_of(lengths, 8, "zigzag", "auto")
    cut = {x.sequence for r in range(8) for x in layout.chunks(r)
           if x.end - x.begin < lengths[x.sequence]}
    assert 0 in cut
    assert len(cut) <= 8
    # Those are between neighbours, so that steps beyond the next rank have the split ones alone.
    others = sum(len(layout.chunks(r)) for r in range(8)) - 8 * 2 * len(layout._split)
    assert others < len(lengths) + 3 * 8
    # One document more than ranks have evenly is cut between two or more of them, or over all.
    lengths = (1000,) * 5
    layout = layout_of(lengths, 4, "zigzag", "auto")
    assert [layout.rows_of(r) for r in range(4)] == [1250] * 4
    assert sum(x.end - x.begin == 1000 for r in range(4) for x in layout.chunks(r)) == 4
    # Each on one rank, as it is asked for: the longest ones are dealt out first.
    layout = layout_of((10, 700, 20, 0, 690), 3, "plain", "whole")
    assert [[x.sequence for x in layout.chunks(r)] for r in range(3)] == [[1], [4], [0, 2]]
    # Fewer documents than ranks.
    layout = layout_of((7,), 3, "plain", "whole")
    assert list(map(layout.rows_of, range(3))) == [7, 0, 0]


@pytest.mark.parametrize("order", ORDERS)
def test_documents_of_multiples_of_8_a_chunk_are_cut_at_such(order: Any) -> None:
    """As dropout on GPUs needs it, and tells otherwise."""
    draw, placed = random.Random(1), Mask(by_distance=True)
    for _ in range(50):
        ranks = draw.choice([2, 3, 4, 8])
        side = 8 * ranks * (2 if order == "zigzag" else 1)
        lengths = tuple(side * draw.randint(0, 40) for _ in range(draw.randint(1, 30)))
        _split_calls._check_eights(layout_of(lengths, ranks, order, "auto"), placed, 1)
    lengths = (301, 77, 500, 3, 12)
    with pytest.raises(strobe.Unsupported, match='"whole" without attention chunks do not'):
        _split_calls._check_eights(layout_of(lengths, 3, order, "split"), placed, 1)
    _split_calls._check_eights(layout_of(lengths, 3, order, "whole"), placed, 1)
    # Whole ones have calls of their chunks.
    chunks, whole = Mask(None, 0, True, 100), layout_of((1000,) * 4, 2, order, "whole")
    with pytest.raises(strobe.Unsupported, match="keys from 100 on"):
        _split_calls._check_eights(whole, chunks, 1)


def test_many_documents_are_dealt_out_in_no_time() -> None:
    draw = random.Random(5)
    lengths = drawn_documents(draw, 10000)
    begin = time.perf_counter()
    layout = Layout(lengths, 512, "zigzag", "auto")
    taken = time.perf_counter() - begin
    assert taken < 3  # some 0.1 s where nothing else runs
    assert {layout.rows_of(r) for r in range(512)} <= {layout.rows // 512, layout.rows // 512 + 1}


def test_rows_have_their_first_result_from_the_diagonal() -> None:
    for ranks, order, left, right in itertools.product(
        (1, 2, 3, 5), ORDERS, (None, 0, 7, 40), (None, 0, 5)
    ):
        for rank in range(ranks):
            plan = _ring.schedule(layout_of((64,), ranks, order), rank, Mask(left, right))
            covered: tuple[Rows, ...] = ()
            for block in (*plan.own, *plan.final):
                joined = _ring.joined([*covered, block.q])
                new = sum(x.size for x in joined) - sum(x.size for x in covered)
                assert new in (0, block.q.size)
                covered = joined
            assert covered == (Rows(0, plan.rows),)


def test_what_a_long_chunk_under_a_window_has_of_others() -> None:
    layout, mask = layout_of((131072,), 2, "zigzag"), Mask(4095, 0)
    for rank, end in ((0, 32768), (1, 65536)):
        plan = _ring.schedule(layout, rank, mask)
        first = end % 65536  # the first row that a step has
        (block,) = plan.steps[0].blocks
        # One call more, and no pair: rows that a step has, and the others, whose keys are theirs.
        assert [x.q for x in plan.own] == [Rows(first, first + 4095)] == [block.q]
        assert plan.final[-1][:2] == (Rows(first + 4095, 65536), Rows(first, 65536))
        assert sum(x.q.size for x in (*plan.final, *plan.own)) == 65536
        # Backward nothing is cut, and a square at either end is computed twice.
        assert (plan.own_first, plan.own_last, plan.final_first) == ((), (), ())
        assert sum(x.q.size for x in plan.final_last) == 65536
        squares = {Rows(first, first + 4095), Rows(end - 4096, end)}
        assert {x.q for x in plan.edges} == squares
        assert plan.summed_q == (Rows(first, first + 4095),)
        assert plan.summed_k == (Rows(end - 4095, end),)
        twice = sum(x.pairs for x in plan.edges)
        assert twice * 16 < 65536 * 4096 * 1.01
    # A window as wide as a fifth of a chunk has too much at its ends: sums of all rows.
    plan = _ring.schedule(layout_of((131072,), 8, "zigzag"), 3, Mask(1639, 0))
    assert (plan.edges, plan.final_first, plan.final_last) == ((), (), ())
    assert sum(x.q.size for x in plan.own_last) == plan.rows
    # Without a window no row of a chunk is apart from the others.
    plan = _ring.schedule(layout, 1, Mask(None, 0))
    assert (plan.final, plan.edges, plan.final_last) == ((), (), ())


def test_many_sequences_with_sums_have_few_intervals_of_rows() -> None:
    """Each of which has merges and passes of its own."""
    for count in (4, 200):
        layout = layout_of((800,) * count, 4, "plain", "split")
        plan = _ring.schedule(layout, 1, Mask(3, 0))
        intervals = [_ring.joined(block.q for block in plan.own), plan.summed_q, plan.summed_k]
        found = [len(rows) for rows in intervals]
        assert (found == [1, 1, 1]) == (count == 200), found
    # Those behind the others that are whole stay final.
    layout = layout_of((800,) * 200 + (1,) * 16, 4, "plain", "split")
    plan = _ring.schedule(layout, 1, Mask(3, 0))
    assert [block.q.size for block in plan.final] == [1] * 4 == [x.q.size for x in plan.final_first]


def test_zigzag_order_shares_causal_work_evenly() -> None:
    for ranks in (2, 4, 8):
        plans = [
            _ring.schedule(layout_of((256 * ranks,), ranks, "zigzag"), rank, Mask(right=0))
            for rank in range(ranks)
        ]
        work = [[sum(b.pairs for b in step.blocks) for step in plan.steps] for plan in plans]
        assert {x for steps in work for x in steps} == {256 * 256 // 2}
        # Rank 0's second chunk is the last of the sequence, which no other rank sees.
        assert all(step.sends == (Rows(0, 128),) for step in plans[0].steps)
        # And in plain order the last rank computes 2n - 1 times as much as the first.
        plain = [
            sum(b.pairs for x in (plan.final, plan.own, *(s.blocks for s in plan.steps)) for b in x)
            for plan in (
                _ring.schedule(layout_of((256 * ranks,), ranks, "plain"), rank, Mask(right=0))
                for rank in (0, ranks - 1)
            )
        ]
        assert plain[1] == (2 * ranks - 1) * plain[0]


def test_a_window_takes_as_many_hops_as_it_reaches() -> None:
    steps = _ring.schedule(layout_of((800,), 8, "plain"), 5, Mask(150, 0)).steps
    assert [step.receives for step in steps[:3]] == [(Rows(0, 100),), (Rows(50, 100),), ()]
    assert all(not step.receives and not step.sends for step in steps[2:])


# --------------------------------------------------------------------------- ranks that are threads


def as_array(x: Any) -> Array:
    return x.detach().double().numpy()


class Exact(list[Array]):
    """NAMES by the oracle; dsinks where there are sinks. draws: of the comparator, for those."""

    draws: oracle.Draws


def exact(given: list[Any], dlse: Any, options: dict[str, Any]) -> Exact:
    """Of a whole problem."""
    q, k, v, dout = map(as_array, given)
    names = "causal", "window", "attention_chunk", "softcap", "scale"
    more: dict[str, Any] = {name: options[name] for name in names if name in options}
    if options.get("mask") is not None:
        seen = dense(options, given[0].shape[-3])
        if q.ndim == 3:  # each sequence's queries
            begins = options["cu_seqlens"]
            whole = torch.zeros(len(begins) - 1, seen.shape[1], seen.shape[3], seen.shape[3])
            for n, (begin, end) in enumerate(itertools.pairwise(begins)):
                whole[n, :, : end - begin] = seen[0, :, begin:end]
            seen = whole.bool()
        more["bias"] = np.where(seen, 0.0, -np.inf)
    if options.get("dropout_p"):
        begins = options.get("cu_seqlens", [0, q.shape[1]])
        count, longest = (len(begins) - 1 if q.ndim == 3 else len(q)), int(np.diff(begins).max())
        p, seed, offset = (options[f"dropout_{name}"] for name in ("p", "seed", "offset"))
        shape = count, q.shape[-2], longest, longest
        more["keep"] = oracle.dropout_mask(*shape, dropout_p=p, seed=seed, offset=offset)
        more["dropout_p"] = options["dropout_p"]
    if options.get("seqused") is not None:
        more["seqused_q"] = more["seqused_k"] = np.array(options["seqused"], np.int32)
    for name in ("alibi_slopes", "sinks"):
        if options.get(name) is not None:
            more[name] = as_array(options[name])
    if "cu_seqlens" in options:
        begins = np.array(options["cu_seqlens"], np.int32)
        more |= {"cu_seqlens_q": begins, "cu_seqlens_k": begins}
    dlse = None if dlse is None else as_array(dlse)
    more |= {"dout": dout, "dlse": dlse}
    result = oracle.attention(q, k, v, **more)
    wanted = (name for name in NAMES if name != "dsinks" or "sinks" in more)
    found = Exact(getattr(result, name) for name in wanted)
    dtype = str(given[0].dtype).removeprefix("torch.")
    rounded = cases.DTYPES[dtype]
    found.draws = oracle.Draws(
        lambda n: oracle.attention(q, k, v, round_to=rounded, noise_seed=n, **more)
    )
    return found


def check_errors(got: list[Any], single: list[Any], wanted: Exact, what: object) -> None:
    """The rule of this file's docstring; dsinks, sums over all rows that may cancel, where the
    single call's error is luck, by the rule of all other tests.
    """
    names = NAMES[: len(wanted)]
    for name, x, y, z in zip(names, got, single, wanted, strict=True):
        assert x.shape == y.shape, (name, what)
        assert x.dtype == y.dtype
        if name == "dsinks":
            oracle.check(name, as_array(x), z, wanted.draws, SINKS_FACTOR)
            continue
        # (Without a difference of infinities: lse of rows that see nothing.)
        apart = (
            np.subtract(a, z, out=np.zeros_like(z), where=a != z) for a in map(as_array, (x, y))
        )
        error, of_single = (np.sqrt(np.mean(a**2)) for a in apart)
        assert error <= 1.05 * of_single + MERGE_ROUNDINGS, (name, error, of_single, what)


def check_drawn(
    got: list[Any],
    single: list[Any],
    given: list[Any],
    dlse: Any,
    options: dict[str, Any],
    what: object,
) -> None:
    """Of `drawn_problem`, whose sequences may have no rows."""
    if given[0].shape[1]:
        check_errors(got, single, exact(given, dlse, options), what)
        return
    assert all(x.numel() == 0 for x in got[:5])
    assert not any(x.any() for x in got[5:])


def with_sinks(options: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Options whose sinks, if there are any, are a leaf, and the leaf."""
    if options.get("sinks") is None:
        return dict(options), []  # each rank's own
    leaf = options["sinks"].clone().requires_grad_()
    return {**options, "sinks": leaf}, [leaf]


def over_threads(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    given: list[Any],
    dlse: Any,
    options: dict[str, Any],
    derived: Callable[..., list[Any]] = derived,
) -> tuple[list[Any], threads.Threads]:
    """NAMES of the whole, computed by so many ranks; dsinks where there are sinks. Half of the
    problems have their heads in two lots where they can, as large ones do.
    """
    threads.use_threads(monkeypatch)
    drawn = zlib.crc32(repr((ranks, [x.shape for x in given], *options)).encode()) % 2
    monkeypatch.setattr(_ring_cost, "TWO_LOTS_FROM", 0 if drawn else 1 << 60)
    monkeypatch.setattr(
        distributed, "place_in", lambda group: _split_calls.Place(group, ranks, group.rank)
    )
    group, seqlen = threads.Threads(ranks), given[0].shape[1]
    order: Any = options.get("order") or ("zigzag" if options.get("causal") else "plain")
    packed = options.get("cu_seqlens")
    documents = options.get("documents", "auto")
    dims = (1, 2, 1, 1, 1) if packed is None else (0, 1, 0, 0, 0)
    length: dict[str, Any] = {"seqlen": seqlen} if packed is None else {}

    def work(rank: int) -> list[Any]:
        place: dict[str, Any] = {"rank": rank, "ranks": ranks, "order": order, "cu_seqlens": packed}
        place["documents"] = documents
        leaves = [distributed.shard(x, **place).requires_grad_() for x in given[:3]]
        more, sinks = with_sinks(options)
        if more.pop("own rows", False):
            more["mask"] = distributed.shard(more["mask"], dim=-2, **place)
        leaves += sinks
        member = threads.Member(group, rank)
        results = distributed.attention(
            *leaves[:3], group=member, return_lse=True, **(length | more)
        )
        mine = None if dlse is None else distributed.shard(dlse, dim=dims[1], **place)
        return derived(leaves, results, distributed.shard(given[3], **place), mine)

    found = group.run(work)
    lengths = (seqlen,) if packed is None else tuple(np.diff(packed).tolist())
    layout = layout_of(lengths, ranks, order, "split" if packed is None else documents)
    rows = [torch.from_numpy(places(layout, r)) for r in range(ranks)]
    back = torch.argsort(torch.cat(rows))
    whole = [
        torch.cat([x[n] for x in found], dim).index_select(dim, back) for n, dim in enumerate(dims)
    ]
    if len(found[0]) > len(dims):
        whole.append(sum(x[-1] for x in found))
    return whole, group


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(40))
def test_random_problems_over_one_to_eight_ranks(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    ranks = random.Random(seed).randint(1, 8)
    given, dlse, options, how = drawn_problem(seed, ranks)
    single = by_one_device(given, dlse, options)
    got, _ = over_threads(monkeypatch, ranks, given, dlse, {**options, **how})
    what = (ranks, how, [x.shape for x in given], given[0].dtype, options)
    check_drawn(got, single, given, dlse, options, what)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(30))
def test_random_packed_sequences_over_ranks(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(1000 + seed)
    ranks = draw.randint(1, 5)
    how, inside = drawn_way(draw, ranks)
    heads_kv = inside * draw.choice([1, 2])
    heads, head_dim = heads_kv * draw.choice([1, 2]), draw.choice([8, 32, 64, 128])
    count = draw.randint(1, 6)
    lengths = [draw.choice([0, 1, 2, 7, 64, draw.randint(1, 150)]) for _ in range(count)]
    begins = [0, *itertools.accumulate(lengths)]
    options: dict[str, Any] = {
        "causal": draw.random() < 0.7,
        "window": draw.choice([(-1, -1), (-1, -1), (5, 5), (50, 0), (40, None)]),
        "softcap": draw.choice([0.0, 0.0, 10.0]),
        "alibi_slopes": torch.rand(heads) if draw.random() < 0.3 else None,
        "sinks": torch.randn(heads) if draw.random() < 0.3 else None,
    }
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    torch.manual_seed(seed)
    given = [
        torch.randn(begins[-1], n, head_dim).to(dtype) for n in (heads, heads_kv, heads_kv, heads)
    ]
    dlse = torch.randn(heads, begins[-1]) if draw.random() < 0.4 else None
    more, sinks = with_sinks(options)
    leaves = [*(x.clone().requires_grad_() for x in given[:3]), *sinks]
    numbers = torch.tensor(begins, dtype=torch.int32)
    packed = {"cu_seqlens_q": numbers, "cu_seqlens_k": numbers}
    results = strobe.torch.attention(*leaves[:3], return_lse=True, **(more | packed))
    single = derived(leaves, results, given[3], dlse)
    options |= {"cu_seqlens": begins, "order": draw.choice([None, "plain", "zigzag"])}
    options["documents"] = draw.choice(DOCUMENTS)
    got, _ = over_threads(monkeypatch, ranks, given, dlse, {**options, **how})
    if begins[-1] == 0:
        assert all(x.numel() == 0 for x in got[:5])
        return
    what = (ranks, how, lengths, heads, heads_kv, head_dim, dtype, options)
    check_errors(got, single, exact(given, dlse, options), what)


@pytest.mark.usefixtures("one_thread")
def test_what_is_whole_between_parts_of_others_keeps_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank's whole attention chunk, between those at its ends: one call has them all."""
    torch.manual_seed(1)
    given = [torch.randn(1, 1200, 2, 16) for _ in range(4)]
    options: dict[str, Any] = {"causal": True, "window": (1, 0), "attention_chunk": 250}
    single = by_one_device(given, None, options)
    options |= {"method": "ring", "order": "plain"}
    got, _ = over_threads(monkeypatch, 3, given, None, options)
    check_errors(got, single, exact(given, None, options), options)
    plan = _ring.schedule(layout_of((1200,), 3, "plain"), 1, Mask(1, 0, attention_chunk=250))
    assert [block.q.size for block in plan.final_last] == [100, 250, 50]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(30))
def test_windows_of_all_sizes_against_shares(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(3000 + seed)
    ranks, packed = draw.randint(2, 5), draw.random() < 0.4
    heads_kv = draw.choice([1, 2])
    heads, head_dim = heads_kv * draw.choice([1, 2]), draw.choice([8, 32, 64, 128])
    lengths = [draw.randint(40, 500)]
    if packed:
        more = range(draw.randint(1, 4))
        lengths += [draw.choice([0, 1, 40, draw.randint(1, 200)]) for _ in more]
        draw.shuffle(lengths)
    begins = [0, *itertools.accumulate(lengths)]
    share = max(1, begins[-1] // ranks)

    def width() -> int:
        return draw.randint(0, max(1, draw.choice([2, share // 8, share // 4, share, 3 * share])))

    causal = draw.random() < 0.6
    options: dict[str, Any] = {
        "causal": causal,
        "window": (width(), 0 if causal else width()),
        "softcap": draw.choice([0.0, 0.0, 10.0]),
        "alibi_slopes": torch.rand(heads) if draw.random() < 0.2 else None,
        "sinks": torch.randn(heads) if draw.random() < 0.4 else None,
        "attention_chunk": draw.choice([0, 0, 0, 30]),
    }
    torch.manual_seed(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    shape = (begins[-1],) if packed else (draw.choice([1, 2]), begins[-1])
    given = [torch.randn(*shape, n, head_dim).to(dtype) for n in (heads, heads_kv, heads_kv, heads)]
    dlse = None
    if draw.random() < 0.4:
        dlse = torch.randn(*shape, heads).transpose(-1, -2).contiguous()
    single_options = dict(options)
    if draw.random() < 0.3:
        most = lengths if packed else lengths * shape[0]
        options["seqused"] = [draw.choice([x, draw.randint(0, x)]) for x in most]
        numbers = torch.tensor(options["seqused"], dtype=torch.int32)
        single_options |= {"seqused_q": numbers, "seqused_k": numbers}
    if packed:
        numbers = torch.tensor(begins, dtype=torch.int32)
        single_options |= {"cu_seqlens_q": numbers, "cu_seqlens_k": numbers}
        options |= {"cu_seqlens": begins, "documents": draw.choice(DOCUMENTS)}
    single = by_one_device(given, dlse, single_options)
    options |= {"method": "ring", "order": draw.choice([None, "plain", "zigzag"])}
    got, _ = over_threads(monkeypatch, ranks, given, dlse, options)
    what = (ranks, lengths, heads, heads_kv, head_dim, dtype, options)
    check_errors(got, single, exact(given, dlse, options), what)


def drawn_mask(
    draw: random.Random, batch: int, heads: int, lengths: list[int] | int
) -> dict[str, Any]:
    """Bools, intervals or blocks of all rows, of every shape that is taken. lengths: of packed
    sequences, or one.
    """
    packed = isinstance(lengths, list)
    of_each = lengths if isinstance(lengths, list) else [lengths]
    rows, keys = sum(of_each), max(of_each)
    before = [draw.choice([1, heads])] if packed else [draw.choice([1, batch]), 1]
    if not packed and draw.random() < 0.5:
        before[1] = heads
    kind = draw.choice(["pairs", "intervals"] if packed else ["pairs", "intervals", "blocks"])
    if kind == "intervals":
        # Some of them narrow, so that there is what nobody sees.
        begin = torch.randint(-3, keys + 5, (rows, 2))
        ends = begin + torch.randint(-2, draw.choice([5, keys + 5]), (rows, 2))
        found = torch.stack([begin[:, 0], ends[:, 0], begin[:, 1], ends[:, 1]], 1)
        return {"mask": found if packed else found.expand(batch, -1, -1).contiguous()}
    block = draw.choice([1, 16, 64, 128]) if kind == "blocks" else 0
    rows, keys = (-(-x // block) if block else x for x in (rows, keys))
    mask = torch.rand(*before, rows, keys) < draw.choice([0.02, 0.5])
    found = mask[(0,) * len(before)] if draw.random() < 0.3 else mask
    return {"mask": found} | ({"mask_block": block} if block else {})


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(40))
def test_random_rows_in_use_chunks_and_masks_over_ranks(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(2000 + seed)
    ranks = draw.randint(1, 6)
    how, inside = drawn_way(draw, ranks)
    packed, heads_kv = draw.random() < 0.4, inside * draw.choice([1, 2])
    heads, head_dim = heads_kv * draw.choice([1, 2]), draw.choice([8, 32, 64, 128])
    count = draw.randint(1, 4)
    lengths = [draw.choice([1, 2, 9, 64, draw.randint(1, 150)]) for _ in range(count)]
    begins = [0, *itertools.accumulate(lengths)]
    batch, length = draw.choice([1, 1, 2]), draw.choice([1, 3, 64, draw.randint(1, 300)])
    shape = (begins[-1],) if packed else (batch, length)
    options: dict[str, Any] = {
        "causal": draw.random() < 0.6,
        "window": draw.choice([(-1, -1), (-1, -1), (5, 5), (50, 0), (40, None)]),
        "attention_chunk": draw.choice([0, 1, 7, 50, 1000]),
        "alibi_slopes": torch.rand(heads) if draw.random() < 0.3 else None,
        "sinks": torch.randn(heads) if draw.random() < 0.4 else None,
    }
    torch.manual_seed(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    given = [torch.randn(*shape, n, head_dim).to(dtype) for n in (heads, heads_kv, heads_kv, heads)]
    dlse = (
        torch.randn(*shape, heads).transpose(-1, -2).contiguous() if draw.random() < 0.4 else None
    )
    single_options = {k: x for k, x in options.items() if k != "seqused"}
    if draw.random() < 0.6:
        options |= drawn_mask(draw, batch, heads, lengths if packed else length)
        seen = dense(options | ({"cu_seqlens": begins} if packed else {}), given[0].shape[-3])
        numbers = torch.tensor(begins, dtype=torch.int32)
        cumulative: dict[str, Any] = {"cu_seqlens_q": numbers, "cu_seqlens_k": numbers}
        single_options["mask"] = (
            strobe.masks.from_bool(seen[0].contiguous(), **cumulative)
            if packed
            else strobe.masks.from_bool(seen)
        )
        # A rank's own rows, which only the ring takes.
        options["own rows"] = inside == 1 and "mask_block" not in options and draw.random() < 0.3
    if draw.random() < 0.6:
        most = lengths if packed else [length] * batch
        options["seqused"] = [draw.choice([x, draw.randint(0, x)]) for x in most]
        numbers = torch.tensor(options["seqused"], dtype=torch.int32)
        single_options |= {"seqused_q": numbers, "seqused_k": numbers}
        # What is not in use is never read.
        spans = zip(most, options["seqused"], strict=True)
        unused = np.concatenate([np.arange(n) >= u for n, u in spans])
        for x in given:
            x.view(len(unused), *x.shape[-2:])[torch.from_numpy(unused)] = float("nan")
    if packed:
        numbers = torch.tensor(begins, dtype=torch.int32)
        single_options |= {"cu_seqlens_q": numbers, "cu_seqlens_k": numbers}
        options |= {"cu_seqlens": begins, "documents": draw.choice(DOCUMENTS)}
    if draw.random() < 0.4:
        drawn = {"dropout_p": draw.choice([0.1, 0.5]), "dropout_seed": draw.getrandbits(64)}
        options |= drawn | {"dropout_offset": draw.randint(0, 9)}
        single_options |= {name: x for name, x in options.items() if name.startswith("dropout")}
    single = by_one_device(given, dlse, single_options)
    if options.get("own rows"):
        how = {"method": "ring"}
    options |= {**how, "order": draw.choice([None, "plain", "zigzag"])}
    got, _ = over_threads(monkeypatch, ranks, given, dlse, options)
    what = (ranks, batch, lengths if packed else length, heads, heads_kv, head_dim, dtype, options)
    wanted = exact([torch.nan_to_num(x) for x in given], dlse, options)
    check_errors(got, single, wanted, what)


@pytest.mark.usefixtures("one_thread")
def test_partial_results_in_the_input_s_dtype_where_no_kernel_has_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def narrow(q: Any, *args: Any, **options: Any) -> Any:
        if "out" in options and options["out"].dtype != q.dtype:
            raise strobe.Unsupported("no kernel takes this")
        return strobe.attention(q, *args, **options)

    monkeypatch.setattr(_ring_attention, "attention", narrow)
    torch.manual_seed(0)
    given = list(torch.randn(4, 1, 96, 2, 32).bfloat16())
    got, _ = over_threads(monkeypatch, 3, given, None, {"causal": True})
    for x, y in zip(got, exact(given, None, {"causal": True}), strict=True):
        assert np.abs(as_array(x) - y).max() < 0.03


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_bytes_are_those_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, method: Any, causal: bool
) -> None:
    ranks, given = 4, list(torch.randn(4, 1, 64, 4, 16))
    options = {"causal": causal, "method": method}
    _, group = over_threads(monkeypatch, ranks, given, None, options)
    order = "zigzag" if causal else "plain"
    sizes = _ring_cost.Sizes(1, 4, 4, 16, 16, 4)
    if method == "ring":
        mask = Mask(right=0 if causal else None)
        layout = layout_of((64,), ranks, order)
        plans = [_ring.schedule(layout, rank, mask) for rank in range(ranks)]
        traffic = [_ring_cost.ring_traffic(plan, sizes) for plan in plans]
        assert group.bytes == sum(x.forward + x.backward for x in traffic)
    else:
        one = _ring_cost.ulysses_traffic(64, ranks, sizes)
        of_lse = 2 * 64 * 4 * 4  # float32, and its gradient
        to_itself = ranks * (one.forward + one.backward) // (ranks - 1)
        assert group.bytes == ranks * (one.forward + one.backward) + to_itself + of_lse


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("inside", [1, 2])
def test_bytes_of_documents_are_those_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, inside: int
) -> None:
    ranks, lengths = 4, (90, 40, 150, 33, 80, 60, 7, 0, 25, 30, *range(10, 60, 3))
    torch.manual_seed(0)
    begins, found = [0, *itertools.accumulate(lengths)], {}
    given = [torch.randn(begins[-1], n, 16) for n in (4, 2, 2, 4)]
    options: dict[str, Any] = {"causal": True, "cu_seqlens": begins}
    numbers = torch.tensor(begins, dtype=torch.int32)
    packed = {"causal": True, "cu_seqlens_q": numbers, "cu_seqlens_k": numbers}
    single, wanted = by_one_device(given, None, packed), exact(given, None, options)
    sizes = _ring_cost.Sizes(1, 4 // inside, 2 // inside, 16, 16, 4)
    for documents in DOCUMENTS:
        more = {**options, "documents": documents, "ulysses": inside}
        got, group = over_threads(monkeypatch, ranks, given, None, more)
        check_errors(got, single, wanted, documents)
        layout = layout_of(lengths, ranks, "zigzag", documents)
        plans = [
            _ring.schedule(layout, g, Mask(right=0), inside) for g in range(ranks // inside)
        ]
        traffic = [_ring_cost.ring_traffic(plan, sizes) for plan in plans]
        found[documents] = inside * sum(x.forward + x.backward for x in traffic)
        all_to_all = begins[-1] * (2 * 4 * 16 * (4 + 2 + 2 + 4) + 2 * 4 * 4) if inside > 1 else 0
        padded = 10 * ranks * inside * 15 if inside > 1 else 0  # tensors begin at multiples of 16
        assert 0 <= group.bytes - found[documents] - all_to_all <= padded
    assert found["whole"] == 0
    assert 0 < found["auto"] < 0.6 * found["split"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("documents", ["auto", "split"])
@pytest.mark.parametrize("window", [-1, 40])
@pytest.mark.parametrize("lengths", [(256,), (96, 8, 160, 64, 24, 32)])
def test_the_bench_counts_what_ranks_send_and_what_the_mask_needs(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], window: int, documents: Any
) -> None:
    bench, ranks, total = module_of(ROOT / "bench" / "ring.py"), 4, sum(lengths)
    sizes = _ring_cost.Sizes(1, 4, 4, 16, 16, 4)
    work = bench.Work(lengths, ranks, window, sizes, documents)
    options: dict[str, Any] = {"causal": True, "window": (window, 0)}
    packed = len(lengths) > 1
    given = [torch.randn(*(() if packed else (1,)), total, 4, 16) for _ in range(4)]
    if packed:
        begins = [0, *itertools.accumulate(lengths)]
        options |= {"cu_seqlens": begins, "documents": documents}
    received = work.received()
    assert list(received) == ["ring", "groups of 2", "ulysses"]
    for name, inside in bench.ways(ranks, 4).items():
        _, group = over_threads(monkeypatch, ranks, given, None, {**options, "ulysses": inside})
        # All-to-all hands a rank its own rows too, and lse and its gradient, which are asked for.
        row = 4 * (2 * 4 * 4 * 16 // inside + 2 * 4)
        more = total * row if inside > 1 else 0
        assert abs(group.bytes - more - 1e6 * ranks * received[name]) < 1, name
    # The same bytes, had each key that is seen elsewhere been sent once, and its gradient home.
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    apart = np.arange(total)[:, None] - np.arange(total)
    allowed = (apart >= 0) & (sequence[:, None] == sequence)
    if window >= 0:
        allowed &= apart <= window
    held = [places(work.layout, rank) for rank in range(ranks)]
    count = sum(np.delete(allowed[rows].any(0), rows).sum() for rows in held)
    assert work.needed() == pytest.approx(2 * count * 2 * 4 * 16 * 4 / ranks / 1e6)
    assert work.needed() <= received["ring"]
    # Of the rank with most rows: out and dq to dv, and lse.
    floor, most = work.floor(), max(map(len, held))
    assert floor["peers"] == pytest.approx(most * (4 * 4 * 16 * 4 + 4 * 4) / 1e6)
    assert floor["one GPU"] == pytest.approx(floor["peers"] * total / most)
    whole = floor["peers"] + total * (4 * 16 * 4 + 4) / 1e6  # q, k, v, out and lse of a head
    assert floor["ulysses"] == pytest.approx(whole)
    if not packed and window < 0:  # steps bring two chunks, of the first steps of the last rank
        assert floor["ring"] - floor["peers"] == pytest.approx(4 * 32 * 2 * 4 * 16 * 4 / 1e6)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("groups", "inside", "length"), [(2, 2, 200), (3, 2, 131), (2, 4, 64), (4, 2, 7)]
)
def test_bytes_of_a_ring_of_groups_are_those_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, groups: int, inside: int, length: int, causal: bool
) -> None:
    ranks, order = groups * inside, "zigzag" if causal else "plain"
    torch.manual_seed(length)
    given = [torch.randn(2, length, n, 32).bfloat16() for n in (8, 4, 4, 8)]
    options = {"causal": causal}
    wanted = exact(given, None, options)
    got, group = over_threads(monkeypatch, ranks, given, None, {**options, "ulysses": inside})
    check_errors(got, by_one_device(given, None, options), wanted, (groups, inside))
    # The ring sends what is that of the groups, with a share of the heads each, for each share.
    sizes = _ring_cost.Sizes(2, 8 // inside, 4 // inside, 32, 32, 2)
    mask = Mask(right=0 if causal else None)
    layout = layout_of((length,), ranks, order)
    plans = [_ring.schedule(layout, g, mask, inside) for g in range(groups)]
    traffic = [_ring_cost.ring_traffic(plan, sizes) for plan in plans]
    ring = inside * sum(x.forward + x.backward for x in traffic)
    # Of each row its part of every rank's heads: q to out, dout to dv, and lse and its gradient.
    row = 2 * 2 * 32 * (8 + 4 + 4 + 8)
    sent = ring + length * (2 * row + 2 * 2 * 8 * 4)
    assert sent <= group.bytes <= sent + 10 * ranks * inside * 15  # from multiples of 16 on


@pytest.mark.parametrize("seed", range(60))
def test_parts_of_a_mask_hold_what_is_seen(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    packed = draw.random() < 0.5
    lengths = [draw.randint(1, 60) for _ in range(draw.randint(1, 4))]
    lengths = lengths if packed else lengths[:1]
    starts = [0, *itertools.accumulate(lengths)]
    options = drawn_mask(draw, 2, 3, lengths if packed else lengths[0])
    block = options.get("mask_block", 0)
    data = _shares.cut_mask(
        options["mask"], block, 1 if packed else 2, 3, 1, tuple(lengths), packed
    )
    seen = dense(options | ({"cu_seqlens": starts} if packed else {}), starts[-1]).any(0).any(0)
    for _ in range(50):
        sequence = draw.randrange(len(lengths))
        q, k = (
            Rows(starts[sequence] + min(ends), starts[sequence] + max(ends))
            for ends in (draw.sample(range(lengths[sequence] + 1), 2) for _ in "qk")
        )
        k = k._replace(begin=starts[sequence] + (k.begin - starts[sequence]) // 8 * 8)
        there = seen[q.begin : q.end, k.begin - starts[sequence] : k.end - starts[sequence]]
        found = data.part(q, k)
        if found is None:
            assert not there.any()
            continue
        queries, keys = (np.flatnonzero(there.any(axis)) for axis in (1, 0))
        assert found[0] == (q.begin + queries[0], q.begin + queries[-1] + 1)
        assert found[1] == (k.begin + keys[0] // 8 * 8, k.begin + keys[-1] + 1)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["pairs", "intervals", "blocks"])
def test_what_a_mask_of_all_rows_hides_is_neither_sent_nor_computed(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    ranks, length, side = 4, 1024, 128
    torch.manual_seed(0)
    given = list(torch.randn(4, 1, length, 2, 16))
    # Each block of queries sees itself, and the last one the first as well.
    visited = torch.eye(8).bool()
    visited[7, 0] = True
    options: dict[str, Any] = {"mask": visited, "mask_block": side, "method": "ring"}
    pairs = dense(options, length)
    if kind == "pairs":
        options |= {"mask": pairs, "mask_block": 0}
    if kind == "intervals":
        row = torch.arange(length)
        own = row // side * side
        first = torch.where(row < 7 * side, 0, side)
        options |= {"mask": torch.stack([own, own + side, 0 * row, first], 1), "mask_block": 0}
    calls: list[Any] = []
    monkeypatch.setattr(
        _ring_attention, "attention", counted(calls, strobe.attention)
    )
    got, group = over_threads(monkeypatch, ranks, given, None, options)
    single = by_one_device(given, None, {"mask": strobe.masks.from_bool(pairs)})
    check_errors(got, single, exact(given, None, options), kind)
    # K and V of 128 rows forward and backward, and their gradients home; own pairs in one call.
    assert group.bytes == 3 * 2 * side * 2 * 16 * 4
    assert len(calls) == ranks + 1
    x = strobe.ArraySpec((1, length // ranks, 2, 16), "float32")
    options |= {"rank": 3, "ranks": ranks}
    assert (
        "\nstep 3     receives 128 rows (32.8 kB) from rank 0; "
        "computes rows 128-255 x 128 keys\n"
    ) in distributed.plan(x, x, x, **options)


# ----------------------------------------------------------------------------------- real processes


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four processes has found."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(distributed_ranks.__file__)
    started = [
        subprocess.Popen(
            [sys.executable, script, folder, str(rank), "4"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    said = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 4, "\n".join(said)
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize("name", distributed_ranks.CASES)
def test_processes_compute_the_attention_of_the_whole(
    processes: list[dict[str, Any]], name: str
) -> None:
    options, seqlen = distributed_ranks.CASES[name]
    given = distributed_ranks.inputs(seqlen)
    if "cu_seqlens" in options:
        given = [x[0] for x in given]
    wanted = exact(given, None, options)
    single = distributed_ranks.single(name)
    for ranks in filter(lambda n: distributed_ranks.runs(name, n), distributed_ranks.RANKS):
        got = processes[0][f"{name} {ranks}"]
        check_errors(got, single, wanted, (name, ranks))
        for other in processes[1:ranks]:
            assert all(map(torch.equal, got, other[f"{name} {ranks}"]))


@pytest.mark.parametrize("seed", distributed_ranks.DRAWN)
def test_processes_compute_random_problems(processes: list[dict[str, Any]], seed: int) -> None:
    ranks = distributed_ranks.DRAWN[seed]
    given, dlse, options, how = drawn_problem(seed, ranks)
    single, got = by_one_device(given, dlse, options), processes[0][f"drawn {seed}"]
    what = (ranks, how, [x.shape for x in given], given[0].dtype, options)
    check_drawn(got, single, given, dlse, options, what)
    for other in processes[1:ranks]:
        assert all(map(torch.equal, got, other[f"drawn {seed}"]))


def test_the_same_bits_at_every_run(processes: list[dict[str, Any]]) -> None:
    for ranks in distributed_ranks.RANKS:
        found = processes[0]
        again = found[f"deterministic {ranks} again"]
        assert all(map(torch.equal, found[f"deterministic {ranks}"], again))


def test_the_example_s_gpt_has_the_loss_and_gradients_of_one_rank(
    processes: list[dict[str, Any]],
) -> None:
    wanted = processes[0]["model"]
    largest = max(float(x.abs().max()) for x in wanted[1:])
    for ranks in distributed_ranks.RANKS:
        got = processes[0][f"model {ranks}"]
        assert float(got[0]) == pytest.approx(float(wanted[0]), rel=1e-6)
        for x, y in zip(got[1:], wanted[1:], strict=True):
            assert float((x - y).abs().max()) < 1e-5 * largest


def test_fsdp_beside_it_changes_nothing(processes: list[dict[str, Any]]) -> None:
    """Over two ranks, which share out the weights as well as the sequences."""
    wanted = processes[0]["model"]
    largest = max(float(x.abs().max()) for x in wanted[1:])
    for found in processes[:2]:
        got = found["model with FSDP"]
        assert float(got[0]) == pytest.approx(float(wanted[0]), rel=1e-6)
        for x, y in zip(got[1:], wanted[1:], strict=True):
            assert float((x - y).abs().max()) < 1e-5 * largest


def test_ranks_that_differ_are_told(processes: list[dict[str, Any]]) -> None:
    for found in processes:
        assert found["differ"] == (
            "InvalidArgument: q.shape = (1, 5, 2, 32) on rank 2, expected (1, 4, 2, 32) as on rank "
            "0"
        )
        assert found["differ in results"] == (
            "InvalidArgument: return_lse = True on rank 2, expected False as on rank 0"
        )


def test_a_mask_that_one_rank_cannot_tell_apart_is_the_same_for_all(
    processes: list[dict[str, Any]],
) -> None:
    for found in processes:
        for compared in ("", ", compared"):
            assert found[f"own mask, ring{compared}"] == ""
            assert found[f"own mask, ulysses{compared}"].startswith(
                'Unsupported: method = "ulysses" with mask, expected it of all rows, and no rank '
                "that has them all"
            )
        assert found["blocks of one row"] == ""


def test_a_rank_that_is_late_or_gone_is_an_error(processes: list[dict[str, Any]]) -> None:
    late, seconds = processes[0]["late"], processes[0]["late seconds"]
    assert late.startswith("RuntimeError: ")
    assert "Timed out" in late
    assert distributed_ranks.LATE_SECONDS - 1 < seconds < distributed_ranks.LATE_SECONDS + 60
    for found in processes[:3]:
        assert found["gone"].startswith("RuntimeError: ")
        assert found["gone seconds"] < distributed_ranks.SECONDS + 60


def test_long_context_trains(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    text = root / "examples" / "data" / "text.txt"
    words = ["--seqlen", "256", "--steps", "3", "--device", "cpu", "--text", str(text)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", root / "examples" / "long_context.py", *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "256 characters in a step, 2 ranks on cpu" in done.stdout
    losses = [float(x.split()[3]) for x in done.stdout.splitlines() if x.startswith("step   ")][-3:]
    assert len(losses) == 3
    assert 3 < losses[-1] < losses[0] < 4.5


def test_long_context_leaves_no_thread_of_the_group_behind(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    words = ["--seqlen", "64", "--steps", "1", "--device", "cpu"]
    words += ["--text", str(root / "examples" / "data" / "text.txt")]
    lines = [
        "import pathlib, sys",
        f"sys.path.insert(0, {str(root / 'examples')!r})",
        "import long_context",
        f"sys.argv[1:] = {words!r}",
        "long_context.main()",
        "threads = pathlib.Path('/proc/self/task').glob('*/comm')",
        "print('left:', [x for x in (path.read_text() for path in threads) if 'gloo' in x])",
    ]
    place = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any port that is free
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert "left: []" in done.stdout, done.stdout + done.stderr


# -------------------------------------------------------------------------------- what is not taken


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist = torch.distributed
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


X = torch.zeros(1, 8, 4, 32)
WIDE = torch.zeros(1, 8, 4, 300)
NUMBERS = torch.zeros(1, dtype=torch.int32)
MASK = torch.ones(8, 8, dtype=torch.bool)
PACKED_MASK = strobe.masks.from_bool(MASK)


def test_no_process_group() -> None:
    with pytest.raises(strobe.InvalidArgument, match="expected a call of torch"):
        distributed.attention(X, X, X)
    with pytest.raises(strobe.InvalidArgument, match="expected a call of torch"):
        distributed.shard(X)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dropout_p": 0.1}, strobe.InvalidArgument, "dropout_seed = None with dropout_p = 0.1, "),
        ({"dropout_p": 1.5}, strobe.InvalidArgument, "dropout_p = 1.5, expected a number in ["),
        ({"dropout_p": 0.1, "dropout_seed": -1}, strobe.InvalidArgument, "dropout_seed = -1, exp"),
        ({"dropout_first_key": 8}, strobe.Unsupported, "dropout_first_key = 8 is not supported"),
        ({"attention_chunk": -4}, strobe.InvalidArgument, "attention_chunk = -4, expected"),
        ({"sinks": torch.zeros(3)}, strobe.InvalidArgument, "sinks.shape[0] = 3, expected 4"),
        ({"sinks": torch.zeros(4).int()}, strobe.InvalidArgument, "sinks.dtype = int32"),
        ({"sinks": [0.0]}, strobe.InvalidArgument, "sinks is of type list, expected"),
        ({"prefix": NUMBERS}, strobe.Unsupported, "prefix = <Tensor of shape (1,)> is not"),
        ({"cu_seqlens_q": NUMBERS}, strobe.Unsupported, "cu_seqlens_q = <Tensor of shape (1,)> is"),
        ({"window_signed": True}, strobe.Unsupported, "window_signed = True is not supported"),
        ({"softmax_scale": 1.0}, TypeError, "it is called 'scale' here"),
        ({"window": (-2, 0)}, strobe.InvalidArgument, "window[0] = -2, expected at least 0, or -1"),
        ({"window": 3}, strobe.InvalidArgument, "window = 3, expected a pair (left, right)"),
        ({"method": "star"}, strobe.InvalidArgument, "method = 'star', expected"),
        ({"order": "odd"}, strobe.InvalidArgument, "order = 'odd', expected"),
        ({"method": ["ring"]}, strobe.InvalidArgument, "method = ['ring'], expected"),
        ({"order": ["plain"]}, strobe.InvalidArgument, "order = ['plain'], expected"),
        ({"seqlen": [8]}, strobe.InvalidArgument, "seqlen = [8], expected an integer"),
        ({"seqlen": 9}, strobe.InvalidArgument, "q.shape[1] = 8, expected 9: the share of rank 0"),
        ({"seqlen": -1}, strobe.InvalidArgument, "seqlen = -1, expected at least 0"),
        ({"causal": "yes"}, strobe.InvalidArgument, "causal = 'yes', expected a bool"),
        ({"softcap": -1.0}, strobe.InvalidArgument, "softcap = -1, expected"),
        ({"group": 5}, strobe.InvalidArgument, "group = 5, expected a process group"),
        (
            {"alibi_slopes": torch.zeros(4, requires_grad=True)},
            strobe.Unsupported,
            "alibi_slopes requires a gradient",
        ),
        ({"alibi_slopes": torch.zeros(3)}, strobe.InvalidArgument, "alibi_slopes.shape[0] = 3"),
        (
            {"seqused": [9]},
            strobe.InvalidArgument,
            "seqused has 9, expected 0 to 8: the sequence's",
        ),
        ({"seqused": [8, 8]}, strobe.InvalidArgument, "seqused has 2 numbers, expected 1: one of"),
        ({"seqused": 8}, strobe.InvalidArgument, "seqused = 8, expected a sequence of integers"),
        (
            {"seqused": NUMBERS.to("meta")},
            strobe.InvalidArgument,
            "seqused is on meta, expected it",
        ),
        (
            {"mask": MASK.float()},
            strobe.InvalidArgument,
            "mask.dtype = torch.float32, expected bool",
        ),
        (
            {"mask": MASK[:7]},
            strobe.InvalidArgument,
            "mask.shape = (7, 8), expected (batch, heads, ",
        ),
        ({"mask": MASK.long()}, strobe.InvalidArgument, "expected (batch, rows, 4) = (1, 8, 4)"),
        ({"mask": MASK.to("meta")}, strobe.InvalidArgument, "mask is on meta, expected it in the"),
        ({"mask": MASK.numpy()}, strobe.InvalidArgument, "expected a tensor of bools or integers"),
        (
            {"mask": PACKED_MASK},
            strobe.Unsupported,
            "pass this rank's rows of its bools, or of its",
        ),
        ({"mask": MASK, "mask_block": -1}, strobe.InvalidArgument, "mask_block = -1, expected"),
        ({"mask_block": 64}, strobe.InvalidArgument, "mask_block = 64, expected 0, or with"),
        (
            {"mask": MASK, "mask_block": 4},
            strobe.InvalidArgument,
            "mask.shape = (8, 8), expected (batch, heads, blocks, blocks) = (1, 4, 2, 2), where",
        ),
        (
            {"mask": MASK.int(), "mask_block": 4},
            strobe.InvalidArgument,
            "mask.dtype = torch.int32 with mask_block, expected bool",
        ),
        ({"window": (None, -1)}, strobe.InvalidArgument, "window[1] = -1 beside None, expected"),
        ({"window": (-1, None)}, strobe.InvalidArgument, "window[0] = -1 beside None, expected"),
        ({"ulysses": 2}, strobe.InvalidArgument, "ulysses = 2, expected a divisor of 1"),
        ({"ulysses": 0}, strobe.InvalidArgument, "ulysses = 0, expected a divisor of 1"),
        ({"ulysses": "2"}, strobe.InvalidArgument, "ulysses = '2', expected an integer"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        distributed.attention(X, X, X, **options)
    assert text in str(caught.value)


@pytest.mark.usefixtures("alone")
def test_bad_tensors_are_refused_by_name() -> None:
    for tensors, text in (
        ((X[0], X, X), "q.ndim = 3, expected 4"),
        ((X, X[:, :7], X), "k.shape[1] = 7, expected 8: the rows of q"),
        ((X, X, X[:, :7]), "v.shape[1] = 7, expected 8: the rows of q"),
        ((X, X[:, :, :3], X[:, :, :3]), "expected a multiple of"),
        ((X, X.half(), X), "k.dtype = float16, expected float32"),
        ((X.double(), X.double(), X.double()), "q.dtype = float64, expected"),
        ((X.to(torch.float8_e4m3fn),) * 3, "q.dtype = float8_e4m3fn, expected float32, bfloat16"),
        ((WIDE, WIDE, WIDE), "q.shape[3] (head_dim) = 300, expected 1 to 256"),
    ):
        with pytest.raises(strobe.InvalidArgument) as caught:
            distributed.attention(*tensors)
        assert text in str(caught.value)


def freed(x: Any) -> Any:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def distributed_tensor(x: Any) -> Any:
    from torch.distributed._tensor import DTensor

    made: Any = DTensor
    return made.from_local(x, torch.distributed.init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (freed, "a tensor whose storage was freed, expected one that has memory"),
        (distributed_tensor, "a tensor of type DTensor, expected one that has memory"),
        (lambda x: torch.view_as_complex(torch.stack([x, x], -1)).conj().imag, "has its negative"),
    ],
)
def test_what_has_no_memory_of_its_own_is_refused_before_it_is_sent(kind: Any, text: str) -> None:
    numbers = torch.zeros(4)
    calls: dict[str, Callable[[], Any]] = {
        "q": lambda: distributed.attention(kind(X), X, X),
        "k": lambda: distributed.attention(X, kind(X), X),
        "v": lambda: distributed.attention(X, X, kind(X)),
        "sinks": lambda: distributed.attention(X, X, X, sinks=kind(numbers)),
        "alibi_slopes": lambda: distributed.attention(X, X, X, alibi_slopes=kind(numbers)),
        "x": lambda: distributed.unshard(kind(X)),
    }
    for name, call in calls.items():
        with pytest.raises(strobe.InvalidArgument) as caught:
            call()
        assert str(caught.value).startswith(f"{name} ")
        assert text in str(caught.value)
    with pytest.raises(strobe.InvalidArgument, match="mask is a tensor whose storage was freed"):
        distributed.attention(X, X, X, mask=freed(MASK))
    with pytest.raises(strobe.InvalidArgument, match=r"^q is a tensor of torch\.func"):
        torch.func.vmap(lambda x: distributed.attention(x, x, x))(X[None])


@pytest.mark.usefixtures("one_thread")
def test_what_was_freed_after_the_forward_pass_is_refused_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def after_k_is_gone(leaves: list[Any], *more: Any) -> list[Any]:
        leaves[1].untyped_storage().resize_(0)
        return derived(leaves, *more)

    given = [torch.randn(1, 64, 4, 16) for _ in range(4)]
    with pytest.raises(strobe.InvalidArgument, match="k is a tensor whose storage was freed"):
        over_threads(monkeypatch, 2, given, None, {"method": "ring"}, after_k_is_gone)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_ranks_that_use_unlike_results_have_their_gradients(
    monkeypatch: pytest.MonkeyPatch, ulysses: int
) -> None:
    # Rank 0 has a loss of lse alone, rank 1 of out alone, and so on.
    given = [torch.randn(1, 64, 4, 16) for _ in range(4)]
    dlse = torch.randn(1, 4, 64)
    of_lse = torch.arange(64) // 16 % 2 == 0  # in plain order
    given[3][:, of_lse] = 0
    dlse[..., ~of_lse] = 0
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    single = derived(leaves, strobe.torch.attention(*leaves, return_lse=True), given[3], dlse)

    def of_one(leaves: list[Any], results: Any, dout: Any, dlse: Any) -> list[Any]:
        index = 0 if dout.any() else 1
        return [*results, *torch.autograd.grad(results[index], leaves, (dout, dlse)[index])]

    got, _ = over_threads(monkeypatch, 4, given, dlse, {"ulysses": ulysses}, of_one)
    for x, wanted in zip(got, single, strict=True):
        torch.testing.assert_close(x, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("alone")
def test_defaults_of_refused_options_are_taken() -> None:
    distributed.attention(X, X, X, dropout_p=0.0, attention_chunk=0, prefix=None)


@pytest.mark.usefixtures("alone")
def test_a_mask_is_packed_once_and_again_when_it_was_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(strobe.masks, "from_bool", counted(made, strobe.masks.from_bool))
    x, mask = torch.randn(1, 8, 2, 16), torch.eye(8).bool()
    for _ in range(2):
        torch.testing.assert_close(distributed.attention(x, x, x, mask=mask), x)
    assert len(made) == 1
    mask[3] = False
    assert not distributed.attention(x, x, x, mask=mask)[0, 3].any()
    assert len(made) == 2
    text = distributed.plan(X, X, X, rank=0, ranks=2, mask=torch.ones(8, 16).bool())
    assert "ring, because a rank has its own rows of the mask alone" in text
    with pytest.raises(strobe.Unsupported, match="mask_block = 4 with cu_seqlens is not supported"):
        distributed.attention(X[0], X[0], X[0], mask=MASK, mask_block=4, cu_seqlens=[0, 8])
    for how in ({"method": "ulysses"}, {"ulysses": 2}):
        with pytest.raises(strobe.Unsupported, match="expected it of all rows, and no rank"):
            distributed.plan(X, X, X, rank=0, ranks=2, mask=torch.ones(8, 16).bool(), **how)
        distributed.plan(X, X, X, rank=0, ranks=2, mask=torch.ones(16, 16).bool(), **how)


@pytest.mark.usefixtures("alone")
def test_a_mask_of_inference_mode_is_read_each_time() -> None:
    """Nothing counts the writes to it."""
    x = torch.randn(1, 8, 2, 16)
    with torch.inference_mode():
        mask, rows = torch.eye(8).bool(), torch.arange(8)
        intervals = torch.stack([rows, rows + 1, 0 * rows, 0 * rows], 1)[None]
        for given in (mask, intervals):
            torch.testing.assert_close(distributed.attention(x, x, x, mask=given), x)
            given[..., 3, :] = 0
            assert not distributed.attention(x, x, x, mask=given)[0, 3].any()
    # Outside of it too.
    assert not distributed.attention(x, x, x, mask=mask)[0, 3].any()


@pytest.mark.parametrize("all_rows", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (1, {"seqlen": 1}),
        (7, {"cu_seqlens": (0, 7), "documents": "whole"}),
        (8, {"seqlen": 8}),  # where no rank has all of them
    ],
)
def test_all_ranks_find_the_same_of_a_mask(
    rows: int, options: dict[str, Any], ranks: int, all_rows: bool
) -> None:
    """Also where one of them has all rows, and cannot tell a mask of its own from one of all."""
    options = dict(options)
    whole = {name: value for name, value in options.items() if name != "seqlen"}
    packed = "cu_seqlens" in options
    q, mask = torch.empty(rows, 4, 8), torch.ones(rows, rows, dtype=torch.bool)
    taken = all_rows and rows == 8  # by all-to-all too
    how: dict[str, Any]
    for how in ({}, {"method": "ring"}, {"method": "ulysses"}, {"ulysses": 2}):
        found = set()
        for rank in range(ranks):
            place: dict[str, Any] = {"rank": rank, "ranks": ranks}
            own = distributed.shard(mask, dim=-2, **place, **whole)
            x = distributed.shard(q, dim=0, **place, **whole)
            given = spec(*(x if packed else x[None]).shape)
            options["mask"] = mask if all_rows else own
            try:
                text = distributed.plan(given, given, given, **place, **options, **how)
                found.add(re.findall(r"^method .*", text, re.M)[0])
            except strobe.Unsupported as error:
                found.add(str(error))
        (said,) = found
        if not how and not taken:
            assert said.endswith("ring, because a rank has its own rows of the mask alone")
        elif how and how != {"method": "ring"}:
            assert ("expected it of all rows" in said) != taken


def counted(calls: list[Any], function: Any) -> Any:
    """`function`, whose calls are kept."""

    def call(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return function(*args, **options)

    return call


@pytest.mark.usefixtures("alone")
def test_double_backward_is_refused() -> None:
    x = torch.randn(1, 8, 2, 16, requires_grad=True)
    out = distributed.attention(x, x, x)
    with pytest.raises(strobe.Unsupported, match="double backward"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.usefixtures("alone")
def test_lse_alone_has_a_gradient_and_autocast_casts() -> None:
    x = torch.randn(1, 8, 2, 16, requires_grad=True)
    _, lse = distributed.attention(x, x, x, return_lse=True, causal=True)
    (got,) = torch.autograd.grad(lse.sum(), x)
    _, wanted = strobe.torch.attention(x, x, x, return_lse=True, causal=True)
    torch.testing.assert_close(got, torch.autograd.grad(wanted.sum(), x)[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert distributed.attention(x, x, x).dtype == torch.bfloat16


@pytest.mark.usefixtures("alone")
def test_compiled_code_breaks_its_graph_once_and_calls_it() -> None:
    x = torch.randn(1, 8, 2, 16, requires_grad=True)
    graphs = []

    def layer(x: Any) -> Any:
        return (distributed.attention(x * 2, x, x, causal=True) + 1).sum()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    got = torch.compile(layer, backend=backend)(x)
    assert torch.equal(got, layer(x))
    assert torch.equal(*(torch.autograd.grad(y, x)[0] for y in (got, layer(x))))
    assert len(graphs) == 2  # before and after


@pytest.mark.usefixtures("alone")
def test_a_mesh_is_a_group() -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("context",))
    assert torch.equal(distributed.shard(X, group=mesh), X)
    square = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (1, 1), mesh_dim_names=("data", "context")
    )
    assert torch.equal(distributed.shard(X, group=square["context"]), X)
    with pytest.raises(strobe.InvalidArgument, match="a DeviceMesh of 2 dimensions, expected 1"):
        distributed.shard(X, group=square)


def test_shards_and_positions_of_ranks_that_are_not_there() -> None:
    with pytest.raises(strobe.InvalidArgument, match=r"x\.ndim = 0, expected at least 1: the axis"):
        distributed.shard(torch.tensor(1.0), rank=0, ranks=2)
    x = torch.arange(11)
    for ranks, order in itertools.product((1, 2, 3, 16), ORDERS):
        place: dict[str, Any] = {"ranks": ranks, "order": order}
        parts = [distributed.shard(x, dim=0, rank=r, **place) for r in range(ranks)]
        assert sorted(torch.cat(parts).tolist()) == x.tolist()
        rows = [distributed.positions(11, rank=r, **place) for r in range(ranks)]
        assert all(map(torch.equal, parts, rows))
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"rank": 2, "ranks": 2}, "rank = 2, expected 0 to 1"),
        ({"rank": 0, "ranks": 0}, "ranks = 0, expected at least 1"),
        ({"rank": 0}, "expected group alone, or rank and ranks"),
        ({"rank": 0, "ranks": 1, "dim": 1}, "dim = 1, expected -1 to 0"),
    )
    for options, text in refused:
        with pytest.raises(strobe.InvalidArgument) as caught:
            distributed.shard(x, **options)
        assert text in str(caught.value)


def spec(*shape: int) -> strobe.ArraySpec:
    return strobe.ArraySpec(shape, "bfloat16")


@pytest.mark.parametrize(
    ("rows", "options", "method"),
    [
        (65536, {"causal": True, "ranks": 2}, "ulysses, because a rank loses the time of 5.76 GB"),
        (8192, {"causal": True, "ranks": 2}, "ulysses, because a rank loses the time of 384 MB"),
        (
            65536,
            {"causal": True, "window": (4096, 0), "ranks": 2},
            "ring, because a rank loses the time of 347 MB",
        ),
        (256, {"causal": True, "ranks": 8}, "ulysses, because a rank loses the time of"),
        (256, {"causal": True, "ranks": 3}, "ring, because 3 ranks do not divide heads = 16"),
        (256, {"ranks": 1}, "ring, because one rank sends nothing"),
        (65536, {"ranks": 2, "method": "ulysses"}, "ulysses, because it was asked for"),
    ],
)
def test_the_plan_says_which_method_and_why(
    rows: int, options: dict[str, Any], method: str
) -> None:
    x = spec(1, rows, 16, 128)
    lines = distributed.plan(x, x, x, rank=0, **options).splitlines()
    assert lines[1].startswith(f"method     {method}")


def test_the_plan_in_words() -> None:
    x = spec(1, 65536, 16, 128)
    lines = distributed.plan(x, x, x, rank=1, ranks=2, causal=True).splitlines()
    assert lines[1] == (
        "method     ulysses, because a rank loses the time of 5.76 GB in a ring, whose parts take "
        "5 % longer and are summed, and of 1.61 GB by all-to-all, packed and unpacked, where 2000 "
        "FLOP hide a byte"
    )
    # 800 MB of q, k and v.
    assert "\n".join(lines[2:]) == (
        "computes   all 131072 rows of 8 heads (8 of keys), by a call for each of two lots\n"
        "messages   receives 537 MB forward (Q, K and V before, O after), 537 MB backward (dO "
        "before; dQ, dK and dV after); one of two lots of heads travels while attention computes "
        "the other"
    )
    assert distributed.plan(x, x, x, rank=1, ranks=2, causal=True, method="ring") == (
        "sequence   131072 rows over 2 ranks in zigzag order: rank 1 has rows 32768-98303\n"
        "method     ring, because it was asked for\n"
        "step 0     computes rows 0-65535 x 65536 keys (masked) with its own keys\n"
        "step 1     sends 65536 rows (537 MB) to rank 0; receives 32768 rows (268 MB) from rank 0; "
        "computes rows 0-65535 x 32768 keys\n"
        "messages   receives 268 MB forward (K and V), 1.34 GB backward (K and V again, float32 dK "
        "and dV home); no byte of it without work to hide behind"
    )
    with pytest.raises(strobe.InvalidArgument, match="expected a multiple of 3"):
        distributed.plan(x, x, x, rank=1, ranks=3, method="ulysses")


def test_the_plan_of_packed_sequences_in_words() -> None:
    begins = [0, *itertools.accumulate([4096, 1, 700, 12000, 5, 3000, 9000])]
    rows = len(distributed.positions(cu_seqlens=begins, rank=1, ranks=2, causal=True))
    x = strobe.ArraySpec((rows, 16, 128), "bfloat16")
    place: dict[str, Any] = {"rank": 1, "ranks": 2, "causal": True, "cu_seqlens": begins}
    lines = distributed.plan(x, x, x, method="ring", **place).splitlines()
    assert lines[0] == (
        "sequences  7 of 28802 rows over 2 ranks in zigzag order: rank 1 has 14401 rows: "
        "4 whole, and 10695 rows of 2 others"
    )
    assert rows == 14401
    assert lines[1].startswith("method     ring, because")
    assert "computes 6 blocks of" in lines[2]
    # Each sequence has rows for this rank, even that of one row: the ranks take turns.
    rows = len(distributed.positions(documents="split", **place))
    x = strobe.ArraySpec((rows, 16, 128), "bfloat16")
    split = distributed.plan(x, x, x, documents="split", method="ring", **place).splitlines()
    assert "computes 7 blocks of" in split[2]
    x = strobe.ArraySpec((14401, 16, 128), "bfloat16")
    lines = distributed.plan(x, x, x, method="ulysses", **place).splitlines()
    assert lines[2] == "computes   all 28802 rows of 8 heads (8 of keys), by one call"
    assert lines[3].endswith("; attention waits for all of it")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "cu_seqlens = [], expected integers from 0 on"),
        ([1, 4], "cu_seqlens = [1, 4], expected integers from 0 on"),
        ([0, 4, 3, 8], "expected integers from 0 on that do not decrease"),
        ([0, 4.5], "cu_seqlens = 4.5, expected an integer"),
        (8, "cu_seqlens = 8, expected a sequence of integers"),
        ("08", "cu_seqlens = '0', expected an integer"),
        ([0, 4], "x.shape[0] = 8, expected cu_seqlens[-1] = 4"),
    ],
)
def test_bad_beginnings_are_refused_by_name(given: Any, text: str) -> None:
    with pytest.raises(strobe.InvalidArgument) as caught:
        distributed.shard(torch.zeros(8), rank=0, ranks=2, cu_seqlens=given)
    assert text in str(caught.value)


def test_bad_packed_arguments_are_refused_by_name() -> None:
    x = strobe.ArraySpec((4, 2, 32), "float32")
    place: dict[str, Any] = {"rank": 0, "ranks": 2}
    with pytest.raises(strobe.InvalidArgument, match="seqlen = 8 with cu_seqlens"):
        distributed.plan(x, x, x, seqlen=8, cu_seqlens=[0, 8], **place)
    with pytest.raises(strobe.InvalidArgument, match=r"q.ndim = 3, expected 4"):
        distributed.plan(x, x, x, **place)
    with pytest.raises(strobe.InvalidArgument, match=r"q.shape\[0\] = 4, expected 5: the share of"):
        distributed.plan(x, x, x, cu_seqlens=[0, 10], **place)
    with pytest.raises(strobe.InvalidArgument, match="seqlen = None without cu_seqlens"):
        distributed.positions(rank=0, ranks=2)
    kinds: list[tuple[Any, str]] = [
        ("half", 'documents = \'half\', expected "auto", "whole" or "split"'),
        ([1], 'documents = [1], expected "auto", "whole" or "split"'),
    ]
    for documents, text in kinds:
        for call in (distributed.plan, distributed.positions):
            given = (x, x, x) if call is distributed.plan else ()
            with pytest.raises(strobe.InvalidArgument) as caught:
                call(*given, cu_seqlens=[0, 8], documents=documents, **place)
            assert text in str(caught.value)
    with pytest.raises(strobe.InvalidArgument, match="documents = 'whole' without cu_seqlens"):
        distributed.positions(8, documents="whole", **place)
    # Rows of another layout.
    begins = [0, 3, 8]
    with pytest.raises(strobe.InvalidArgument, match=r'expected 5: .*, documents = "whole"'):
        distributed.plan(x, x, x, cu_seqlens=begins, documents="whole", **place)
    meta = torch.zeros(2, dtype=torch.int32, device="meta")
    with pytest.raises(strobe.InvalidArgument, match="cu_seqlens is on meta"):
        distributed.positions(cu_seqlens=meta, rank=0, ranks=2)
