"""The schedule of C++ (include/strobe/ring_schedule.hpp) is that of Python (`strobe._ring`): both
print what they make of the same problems.
"""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from strobe import _ring, _ring_cost
from strobe._layout import DOCUMENTS, Rows, layout_of

ROOT = Path(__file__).resolve().parents[2]
SPLIT = DOCUMENTS.index("split")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    built = tmp_path_factory.mktemp("ring") / "ring_schedule"
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers"]
    source = ROOT / "tests" / "ring_schedule.cpp"
    command: list[str | Path] = [compiler, "-std=c++20", *warnings]
    command += [f"-I{ROOT / 'include'}", source, "-o", built]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    return built


def told_rows(rows: Any) -> str:
    return "".join(f" {x.begin}-{x.end}" for x in rows)


def told_block(x: Any) -> str:
    masked = "m" if x.masked else ""
    return f" {x.q.begin}-{x.q.end}x{x.k.begin}-{x.k.end}@{x.position}{masked}"


def told_blocks(name: str, blocks: Any, packed: bool) -> str:
    calls = _ring.batched(tuple(blocks), packed)
    return (
        name
        + "".join(map(told_block, blocks))
        + " |"
        + "".join("".join(map(told_block, call.blocks)) + " ;" for call in calls)
    )


def told_chunks(chunks: Any) -> str:
    return "".join(f" {row}:{begin}-{end}#{sequence}" for row, begin, end, sequence in chunks)


def told(problem: tuple[Any, ...]) -> str:
    """What tests/ring_schedule.cpp prints."""
    (ranks, rank, zigzag, kind, left, right, by_distance, chunk, packed, inside, *lengths) = problem
    documents: Any = DOCUMENTS[kind]
    layout = layout_of(
        tuple(lengths), ranks * inside, "zigzag" if zigzag else "plain", documents
    )
    limits = [None if x < 0 else x for x in (left, right)]
    mask = _ring.Mask(limits[0], limits[1], by_distance, chunk or None)
    if rank < 0:
        return "holds" + "".join(told_chunks(layout.chunks(n, inside)) for n in range(ranks))
    plan = _ring.schedule(layout, rank, mask, inside)
    text = "holds" + told_chunks(layout.chunks(rank, inside))
    for place in range(inside):
        pieces = layout.within(rank, inside, place)
        text += f" of {place}" + "".join(map(told_rows, pieces))
    text += f" rows {plan.rows}"
    for blocks in plan.of_own_keys:
        text += told_blocks(" own", blocks, packed)
    text += f" sums{told_rows(plan.summed_q)} and{told_rows(plan.summed_k)}"
    for step in plan.steps:
        text += f" step {step.distance} {step.source} {step.target} gets{told_rows(step.receives)}"
        text += f" gives{told_rows(step.sends)}"
        text += told_blocks(" computes", step.blocks, packed)
    some = [step.sends[-1] for step in plan.steps if step.sends]
    text += " others" + told_rows(_ring.without(Rows(0, plan.rows), some))
    sizes, of_all = _ring_cost.Sizes(2, 24, 12, 64, 32, 2), ranks * inside
    for n in range(1, of_all + 1) if rank == 0 else ():
        if of_all % n == 0 and 12 % n == 0:
            lost = _ring_cost.lost(layout, mask, sizes, n)
            text += f" {n} lose {lost}"
    if rank == 0:
        text += " so {} as {}".format(*_ring_cost.chosen(layout, mask, sizes))
    return text


def compare(program: Path, problems: list[tuple[Any, ...]]) -> None:
    given = "\n".join(" ".join(str(int(x)) for x in problem) for problem in problems)
    result = subprocess.run(
        [program], input=given, capture_output=True, text=True, timeout=600, check=True
    )
    lines = result.stdout.splitlines()
    assert len(lines) == len(problems)
    for problem, line in zip(problems, lines, strict=True):
        assert line == told(problem), problem


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_one_sequence(program: Path, ranks: int, zigzag: bool) -> None:
    lengths = sorted({0, 1, ranks - 1, 2 * ranks + 1, 4 * ranks, 29, 64 * ranks})
    limits = itertools.product((-1, 0, 2, 9, 100), (-1, 0, 3), (False, True), (0, 1, 7, 20))
    compare(
        program,
        [
            (ranks, rank, zigzag, SPLIT, *limit, False, 1, length)
            for length, limit, rank in itertools.product(lengths, limits, range(ranks))
        ],
    )


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_packed_sequences(program: Path, ranks: int, zigzag: bool) -> None:
    draw = random.Random(ranks)
    problems = []
    limits = itertools.product((-1, 0, 2, 9, 100), (-1, 0, 3), (False, True), (0, 1, 7, 20))
    for limit in limits:
        for _ in range(2):
            lengths = [draw.choice([0, 1, 2, ranks, 5, 17, 40]) for _ in range(draw.randint(1, 9))]
            kind, packed = draw.randrange(3), draw.random() < 0.8
            same = (zigzag, kind, *limit, packed, 1, *lengths)
            problems += [(ranks, r, *same) for r in range(ranks)]
    compare(program, problems)


@pytest.mark.parametrize("zigzag", [False, True])
def test_many_sequences_with_sums(program: Path, zigzag: bool) -> None:
    """More than have intervals of their own, and some whole ones behind them."""
    draw = random.Random(3)
    problems = []
    for count, kind, left in itertools.product((20, 33, 60), range(3), (1, 3, 30)):
        ranks, right = draw.choice([2, 3, 4]), draw.choice([0, 2])
        lengths = [draw.choice([40, 64, 90]) for _ in range(count)] + [1] * draw.randrange(9)
        same = (zigzag, kind, left, right, draw.random() < 0.5, 0, True, 1, *lengths)
        problems += [(ranks, r, *same) for r in range(ranks)]
    compare(program, problems)


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize(("groups", "inside"), [(1, 4), (2, 2), (3, 2), (2, 4), (4, 3)])
def test_groups(program: Path, groups: int, inside: int, zigzag: bool) -> None:
    draw = random.Random(groups)
    problems = []
    limits = itertools.product((-1, 0, 9), (-1, 0, 3), (False, True), (0, 7))
    for limit in limits:
        lengths = [draw.choice([0, 1, 2, 5, 17, 40]) for _ in range(draw.randint(1, 6))]
        kind, packed = draw.randrange(3), draw.random() < 0.8
        same = (zigzag, kind, *limit, packed, inside, *lengths)
        problems += [(groups, g, *same) for g in range(groups)]
    compare(program, problems)


@pytest.mark.parametrize("seed", range(8))
def test_who_holds_what_of_many_documents(program: Path, seed: int) -> None:
    draw = random.Random(seed)
    problems: list[tuple[Any, ...]] = []
    for _ in range(40):
        count = draw.choice([1, 3, 10, 60, 300])
        lengths = drawn_lengths(draw, count)
        ranks, inside = draw.choice([2, 3, 5, 8, 64]), draw.choice([1, 1, 2])
        for zigzag, kind in itertools.product((False, True), range(3)):
            mask = -1, -1, False, 0
            problems.append((ranks, -1, zigzag, kind, *mask, True, inside, *lengths))
    # As long as they may be together: squares are up to 2^60.
    for lengths in ([1 << 30], [1 << 29] * 2, [1 << 20] * 1024, [(1 << 29) + 1, (1 << 29) - 1]):
        problems.append((5, -1, True, 0, -1, -1, False, 0, True, 1, *lengths))
    compare(program, problems)


def drawn_lengths(draw: random.Random, count: int) -> list[int]:
    """As documents are: of one length, of like lengths, of very unlike ones, a few long ones."""
    kind = draw.randrange(4)
    if kind == 0:
        return [draw.randint(1, 2000)] * count
    if kind == 1:
        return [draw.randint(0, 3000) for _ in range(count)]
    if kind == 2:
        return [int(64 * 2 ** (8 * draw.random())) for _ in range(count)]
    return [draw.choice([1, 7, 400, 400, 20000]) for _ in range(count)]
