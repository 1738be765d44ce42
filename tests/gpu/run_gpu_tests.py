"""Correctness on the GPU against float64: forward and backward, and what else is promised.

    make gpu-test                                                  everything, about half an hour
    make gpu-test ARGS="--seconds 540 --random 20000"              a slice: stops in time, says how to go on
    make gpu-test ARGS="--only random --first 5000 --random 5000"  some random problems
    make gpu-test ARGS="--only special,errors,graph"               some tests
    make gpu-test ARGS="--only rows"                               every row of kernels.def, forced in turn
    make gpu-test ARGS="--only persistent,cache"                   many work items; keys in a cache
    make gpu-test ARGS="--only masks,bias,sinks"                   masks as data, biases and sinks, as models use them
    scripts/gpu.sh walks --walks 5000                              walks that are lists (a library built with STROBE_RANDOM_WALKS)
    STROBE_CUDA_ARCH=80 make gpu-test                              the mma.sync kernels on any GPU
    python tests/gpu/run_gpu_tests.py --device cpu --only random   the tests themselves, on the CPU library

Without a GPU it says that it skipped and exits with 0. Every output and the workspace lie between red zones in
poisoned memory; inputs must not change. Pass rule: |x - reference| <= f * |comparator - reference| + 1e-5 at the
worst place, f = 2 for out and lse, 3 for gradients (8 with ALiBi), the comparator being plain tensor operations
in the case's dtype; infinities and NaNs in the same places. The last lines are a summary of one line a test.
tests/gpu/sanitize.py has compute-sanitizer.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import math
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from device import (  # first: ends the script where there is no GPU
    DEV,
    HALVES,
    TURING,
    narrowed,
    synchronize,
    widths,
)

# isort: split
import extremes
import promises
import strobe_torch as st
import torch
from guarded import alike, make_inputs, out_of_time, run_case, stop_after
from rows import ROWS, Row
from spacing import Spacing, draw
from strobe_torch import Backward, Case, Forward, lib

# For scripts that are run as they are on a GPU: on a CPU a few problems show that the script works.
FEW = () if DEV == "cuda" else ("--count", "4")


def random_case(r: random.Random) -> Case:
    heads_kv = r.choice([1, 1, 2, 3])
    heads = heads_kv * r.choice([1, 1, 2, 4])
    dim = r.choice([8, 16, 40, 64, 64, 72, 80, 96, 112, 128, 128, 160, 192, 256, 256]) if r.random() < 0.85 else r.randint(1, 256)
    case = {
        "heads": heads,
        "heads_kv": heads_kv,
        "head_dim": dim,
        "head_dim_v": dim if r.random() < 0.85 else r.choice([8, 24, 64, 100, 128, 200, 256]),
        "causal": r.random() < 0.4,
        "dtype": r.choice([torch.bfloat16, torch.bfloat16, torch.float16]),
    }
    if TURING:
        case |= {"dtype": torch.float16} | {name: narrowed(case[name]) for name in ("head_dim", "head_dim_v")}

    many_keys = r.random() < 0.15  # and few queries: keys are divided among thread blocks

    def length(of_keys: bool = False) -> int:
        if many_keys:
            return r.randint(500, 6000) if of_keys else r.randint(1, 64)
        return r.choice([0, 1, 2, 63, 64, 65, 127, 128, 129, r.randint(1, 300), r.randint(1, 300), r.randint(300, 900)])

    if r.random() < 0.3:
        batch = r.randint(1, 5)
        case["lengths_q"] = [length() for _ in range(batch)]
        case["lengths_k"] = [length(of_keys=True) for _ in range(batch)]
        case["past"] = (r.choice([0, 0, 0, r.randint(1, 300)]), r.choice([0, 0, 0, r.randint(1, 300)]))
    else:
        case |= {"batch": r.randint(1, 3), "seqlen_q": max(length(), r.random() < 0.9), "seqlen_k": length(of_keys=True)}
    if r.random() < 0.3:
        case["window"] = (r.choice([-1, 0, 1, 17, 64, 200]), r.choice([-1, 0, 5, 64, 130]))
    if r.random() < 0.12:
        case |= {"window": st.draw_signed_window(r, bool(case["causal"])), "window_signed": True}
    if r.random() < 0.15:
        case["softcap"] = r.choice([0.5, 5.0, 30.0])
    if r.random() < 0.2:
        case["alibi"] = r.choice([1, 2])
    if r.random() < 0.2:
        case["dropout_p"] = r.choice([0.1, 0.5, 0.9])
    if r.random() < 0.15:
        case["scale"] = r.choice([0.0, -0.3, 1.0, 0.01])
    case["has_dlse"] = r.random() < 0.3
    case["deterministic"] = r.random() < 0.2
    case["batch_invariant"] = r.random() < 0.2
    return Case(**case)


def spacing_of(seed: int, units: bool, name: str) -> Spacing:
    return draw(f"{seed} {name}", units, name in ("q", "k", "v", "dout"))


def has_backward_yardstick(case: Case) -> bool:
    """With one visible key a weight is 1 and its gradient 0: dropout then leaves nothing but the rounding of
    out in the gradient, for which the comparator is no yardstick."""
    left, right = case.window
    one_key = case.seqlen_k <= 1 or (left == 0 and (right == 0 or case.causal))
    if case.window_signed and st.NO_LIMIT not in (left, right):
        one_key |= left + (min(right, 0) if case.causal else right) == 0
    if case.window_signed and right == st.NO_LIMIT and case.causal:
        one_key |= left == 0
    return not (case.dropout_p > 0 and one_key)


def test_random(options: argparse.Namespace) -> str:
    failures = done = 0
    start = time.monotonic()
    for seed in range(options.first, options.first + options.random):
        if out_of_time():
            break
        r = random.Random(seed)
        case = random_case(r)
        spaced, units = r.random() < 0.6, r.random() < 0.4
        sigma = r.choice([1.0, 1.0, 1.0, 0.1, 3.0])
        backward = r.random() < 0.6 and has_backward_yardstick(case)
        done += 1
        try:
            spacings = functools.partial(spacing_of, seed, units) if spaced else alike
            run_case(case, seed, spacings, sigma, backward=backward)
        except Exception as e:  # noqa: BLE001 - every failure is to be reported
            failures += 1
            print(f"  seed {seed} spaced {spaced} units {units} sigma {sigma} backward {backward}: {case}\n    {type(e).__name__}: {e}", flush=True)
            if failures >= 12 or isinstance(e, torch.AcceleratorError if hasattr(torch, "AcceleratorError") else ()):
                break
    assert failures == 0, f"{failures} of {done} random problems failed"
    left = f"; go on with --first {options.first + done}" if done < options.random else ""
    return f"{done} problems in {time.monotonic() - start:.0f} s{left}"


def with_lists(case: Case, r: random.Random) -> Case:
    """The case with lengths of several blocks, some of which are hidden: blocks are whole tiles of all kernels that it takes."""

    def length(few: float) -> int:
        return r.randint(1, 4) if r.random() < few else r.choice([0, 1, r.randint(100, 600), r.randint(300, 1500), r.randint(300, 1500)])

    few = 0.9 if r.random() < 0.15 else 0.05  # few queries are decoding's
    if case.varlen:
        lengths = {"lengths_q": [length(few) for _ in case.lengths_q], "lengths_k": [length(0.05) for _ in case.lengths_k]}
    else:
        lengths = {"seqlen_q": max(length(few), 1), "seqlen_k": length(0.05)}
    case = dataclasses.replace(case, **lengths, deterministic=r.random() < 0.4)
    queries, keys = (128, 192) if DEV == "cpu" else (128, 128)
    tensors = {n: torch.empty(case.shape(n), dtype=case.dtype, device=DEV) for n in ("q", "k", "v", "out")}
    for backward in (False, True):
        plan = lib.make_plan(st.problem_of(case, backward, **tensors))
        if lib.text(plan.instance_name).startswith("cached"):
            # A tile is all queries of a sequence times heads, and a unit of its keys is up to 256.
            queries, keys = math.lcm(queries, 128 * max(1, math.ceil(case.seqlen_q / 128))), math.lcm(keys, 256)
        else:
            queries, keys = math.lcm(queries, plan.tile_q or 1), math.lcm(keys, plan.tile_k or 1)
    blocks = st.RandomBlocks(r.getrandbits(64) | 4, queries, keys, r.random() < 0.75)
    return dataclasses.replace(case, random_blocks=blocks)


def test_walks(options: argparse.Namespace) -> str:
    """Kernels whose walks are lists: forward, backward and deterministic, with random blocks left out."""
    if not hasattr(lib.LIBRARY, "strobe_random_blocks"):
        return "skipped: the library was built without STROBE_RANDOM_WALKS (scripts/gpu.sh walks)"
    failures = done = backwards = 0
    kernels = collections.Counter[str]()
    start = time.monotonic()
    try:
        for seed in range(options.first, options.first + options.walks):
            if out_of_time():
                break
            r = random.Random(f"walks {seed}")
            case = with_lists(random_case(r), r)
            backward = r.random() < 0.7 and has_backward_yardstick(case)
            assert case.random_blocks is not None
            case.random_blocks.install()
            done, backwards = done + 1, backwards + backward
            shapes = {n: torch.empty(case.shape(n), dtype=case.dtype, device=DEV) for n in ("q", "k", "v", "out")}
            kernels[lib.text(lib.make_plan(st.problem_of(case, backward, **shapes)).kernel)] += 1
            try:
                run_case(case, seed, backward=backward)
            except Exception as e:  # noqa: BLE001 - every failure is to be reported
                failures += 1
                blocks = case.random_blocks
                print(f"  seed {seed} backward {backward} blocks {blocks.seed} {blocks.queries} x {blocks.keys} by head {blocks.by_head}: {case}\n    {e}", flush=True)
                if failures >= 12 or not isinstance(e, AssertionError):
                    break
    finally:
        st.RandomBlocks().install()
    assert failures == 0, f"{failures} of {done} random problems failed"
    left = f"; go on with --first {options.first + done}" if done < options.walks else ""
    by = ", ".join(f"{kernel} {count}" for kernel, count in sorted(kernels.items()))
    return f"{done} problems, {backwards} of them backward ({by}) in {time.monotonic() - start:.0f} s{left}"


def many_items(row: Row) -> list[Case]:
    """For kernels whose thread blocks take work item after work item, 128 keys of a key head each: more items than an
    H100 or H200 has multiprocessors, 132, so that blocks go on to a second one and further."""
    dtype = torch.bfloat16 if row.dtype == "bf16" else torch.float16
    base = {"head_dim": row.width, "dtype": dtype, "causal": True}
    dense = {"batch": 12, "seqlen_q": 150, "seqlen_k": 300, "heads": 16}  # 576 items
    packed = {"lengths_q": [65, 0, 1, 300, 7, 150], "lengths_k": [3, 70, 130, 0, 400, 257], "heads": 20}  # 200
    cases = [
        Case(**base, **dense),
        Case(**base, **packed),
        Case(**base, **{**dense, "heads_kv": 4}),  # 144
        Case(**{**base, "head_dim": row.width - 8}, **dense, window=(100, 30)),
        # By the general kernel.
        Case(**base, **dense, dropout_p=0.2),
        Case(**base, **packed, alibi=1),
        Case(**base, **{**dense, "heads_kv": 4}, softcap=20.0),
    ]
    # And by those that keep an order.
    cases += [Case(**base, **dense, deterministic=True), Case(**base, **packed, deterministic=True)]
    cases.append(Case(**base, **dense, softcap=100.0, dropout_p=0.2, deterministic=True))
    return cases


def small_cases(row: Row) -> list[tuple[Case, bool]]:
    """What reaches every part of a kernel instance: (case, pad and shift by one)."""
    dtype = torch.bfloat16 if row.dtype == "bf16" else torch.float16
    dim = row.width
    cases = [
        (Case(seqlen_q=140, seqlen_k=200, heads=2, heads_kv=1, head_dim=dim, causal=True, dtype=dtype), False),
        (Case(batch=2, seqlen_q=row.tile_q * 2, seqlen_k=row.tile_k * 4, heads=1, head_dim=dim, dtype=dtype), False),
        (Case(seqlen_q=300, seqlen_k=300, heads=1, head_dim=dim, window=(40, 20), dtype=dtype, deterministic=True), False),
        (Case(seqlen_q=200, seqlen_k=70, heads=2, head_dim=dim - 8, causal=True, dtype=dtype, has_dlse=True), False),
        (Case(lengths_q=[65, 0, 1], lengths_k=[3, 70, 130], heads=2, heads_kv=1, head_dim=dim, dtype=dtype), False),
    ]
    if "general" in row.variants:
        cases += [
            (Case(seqlen_q=70, seqlen_k=90, heads=1, head_dim=dim, dtype=dtype, alibi=1, softcap=20.0), False),
            (Case(seqlen_q=70, seqlen_k=90, heads=2, head_dim=dim - 8, dtype=dtype, alibi=2, scale=-0.1), False),
        ]
        if row.arch < 90 or row.direction == "backward":
            cases += [
                (Case(seqlen_q=130, seqlen_k=150, heads=2, head_dim=dim, dtype=dtype, dropout_p=0.3), False),
                (Case(seqlen_q=200, seqlen_k=150, heads=2, heads_kv=1, head_dim=dim, causal=True, dtype=dtype, dropout_p=0.1, softcap=100.0), False),
            ]
    if row.arch < 90:
        cases.append((Case(lengths_q=[65, 0, 1], lengths_k=[3, 70, 130], heads=1, head_dim=dim - 3, dtype=dtype, window=(30, 3)), True))
    if (row.arch, row.direction) == (90, "backward"):
        cases += [(case, False) for case in many_items(row)]
    if row.width_v < row.width:
        cases = [(dataclasses.replace(case, head_dim_v=row.width_v), odd) for case, odd in cases]
    return cases


def has_hopper_kernels() -> bool:
    return DEV == "cuda" and torch.cuda.get_device_capability()[0] == 9 and os.environ.get("STROBE_CUDA_ARCH") not in ("75", "80")


def test_row(options: argparse.Namespace) -> str:
    """The instance that STROBE_CUDA_ROW names, on small problems of every kind."""
    row = next((r for r in ROWS if r.name == os.environ.get("STROBE_CUDA_ROW")), None)
    if row is None:
        return "no row (STROBE_CUDA_ROW): see --only rows"
    instances = set()
    for number, (case, odd) in enumerate(small_cases(row)):
        shapes = {n: torch.empty(case.shape(n), dtype=case.dtype, device=DEV) for n in ("q", "k", "v", "out")}
        plan = lib.make_plan(st.problem_of(case, row.direction == "backward", **shapes))
        instance = lib.text(plan.instance_name)
        assert instance in row.instances, f"case {number} went to {instance}"
        assert (plan.tile_q, plan.tile_k, lib.text(plan.kernel)) == (row.tile_q, row.tile_k, f"cuda_sm{row.arch}")
        instances.add(instance)
        spacings = functools.partial(spacing_of, number, False) if odd else alike
        run_case(case, number, spacings, backward=row.direction == "backward")
    return f"{row.name}: {len(small_cases(row))} problems by {len(instances)} of {len(row.instances)} instances"


def test_rows(options: argparse.Namespace) -> str:
    """Every row of kernels.def that this GPU can run, each in a process of its own that forces it."""
    failed, done, more = [], 0, ""
    for number, row in enumerate(ROWS):
        if number < options.first_row:
            continue
        if out_of_time():
            more = f"; go on with --only rows --first-row {number}"
            break
        if (row.arch == 90 and not has_hopper_kernels()) or (TURING and row.arch != 75):
            continue
        env = {**os.environ, **row.environment}
        commands = [[__file__, "--only", "row"]]
        if row.form:
            commands = [["quantised.py", "--count", "100", "--form", row.form, "--dtype", row.dtype.partition("_")[0]]]
        elif row.is_float8:
            commands = [["float8.py", "--count", "100"]]
        elif row.wants:
            commands = [[f"{what}.py", "--count", "40"] for what in row.wants]
        elif row.direction == "cached":
            commands = [["cache.py", "--count", "500", *(["--prompts"] if row.arch == 90 else [])]]
        done += 1
        for script, *words in commands:
            command = [sys.executable, str(Path(__file__).with_name(script)), *words]
            run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if run.returncode:
                failed.append(row.name)
                print(f"  {row.name}: " + "\n    ".join((run.stdout + run.stderr).strip().splitlines()[-6:]), flush=True)
    assert not failed, f"{len(failed)} of {done} rows: {', '.join(failed)}{more}"
    return f"{done} rows{more}"


def test_special(_: argparse.Namespace) -> str:
    """Infs and NaNs, scores that outgrow the reference maximum, empty rows."""

    def poison_v(value: float, key: int) -> Callable[[dict[str, torch.Tensor]], None]:
        def change(x: dict[str, torch.Tensor]) -> None:
            x["v"][:, key, :, ::3] = value
        return change

    def poison_k(x: dict[str, torch.Tensor]) -> None:
        x["k"][:, 150, :, 3] = math.nan

    def growing(factor: float) -> Callable[[dict[str, torch.Tensor]], None]:
        def change(x: dict[str, torch.Tensor]) -> None:
            n = x["k"].shape[1]
            x["k"] *= torch.linspace(0, factor, n, device=DEV).to(x["k"].dtype)[None, :, None, None]
        return change

    for dim in widths(64, 128, 256):
        for dtype in HALVES:
            base = {
                "batch": 1,
                "seqlen_q": 300,
                "seqlen_k": 300,
                "heads": 2,
                "head_dim": dim,
                "dtype": dtype,
            }
            for causal in (False, True):
                case = Case(**base, causal=causal)
                for value in (math.inf, -math.inf, math.nan):
                    run_case(case, 1, change=poison_v(value, 170))
                run_case(Case(**base, causal=causal, window=(40, 20)), 1, change=poison_v(math.nan, 130))
                run_case(case, 2, change=poison_k)
                for factor in (4.0, 40.0, 400.0):
                    run_case(case, 3, change=growing(factor))
            run_case(Case(**base, causal=True, dropout_p=0.3), 4, change=poison_v(math.inf, 100))
    for dim in widths(64, 96, 128, 192, 256):  # rows, and whole tiles, that see nothing
        run_case(Case(batch=2, seqlen_q=200, seqlen_k=70, heads=2, head_dim=dim, causal=True), 5, backward=True)
        run_case(Case(batch=2, seqlen_q=700, seqlen_k=70, heads=2, head_dim=dim, causal=True), 5, backward=True)
        run_case(Case(batch=2, seqlen_q=700, seqlen_k=70, heads=2, head_dim=dim, causal=True, softcap=9.0), 5, backward=True)
        run_case(Case(batch=2, seqlen_q=70, seqlen_k=0, heads=2, head_dim=dim), 6, backward=True)
    return "infs, NaNs, growing scores, empty rows"


def gradients(case: Case, x: dict[str, torch.Tensor], dout: torch.Tensor) -> dict[str, torch.Tensor]:
    out = torch.empty(case.shape("out"), dtype=case.dtype, device=DEV)
    lse = torch.empty(case.lse_shape(), dtype=torch.float32, device=DEV)
    Forward(case, **x, out=out, lse=lse).run()
    grads = {n: torch.empty(case.shape(n), dtype=case.dtype, device=DEV) for n in ("dq", "dk", "dv")}
    Backward(case, {**x, "out": out, "dout": dout, **grads}, lse, None, None).run()
    synchronize()
    return grads


def test_hidden(_: argparse.Namespace) -> str:
    """Backward: a NaN or an infinity in a row of q, k, v or dout reaches all who see that row, and nobody else."""
    done = 0
    kinds = itertools.product((64, 96, 128, 192) if TURING else (64, 96, 128, 256), HALVES, (False, True))
    for (dim, dtype, causal), name, value in itertools.product(kinds, ("q", "k", "v", "dout"), (math.nan, math.inf)):
        case = Case(seqlen_q=300, seqlen_k=300, heads=2, heads_kv=1, head_dim=dim, causal=causal, window=(90, 40), dtype=dtype)
        x = make_inputs(case, dim)
        x["dout"] = make_inputs(case, dim + 1)["q"]
        clean = gradients(case, {n: x[n] for n in ("q", "k", "v")}, x["dout"])
        row = 150
        x[name][:, row, 0, 3] = value
        dirty = gradients(case, {n: x[n] for n in ("q", "k", "v")}, x["dout"])
        right = 0 if causal else 40
        # A key is off where the poisoned query, or a query that sees the poisoned key, sees it; a query alike.
        low, high = (row - 90, row + right) if name in ("q", "dout") else (row - right - 90, row + 90 + right)
        keys = [j for j in range(300) if not low <= j <= high]
        low, high = (row, row) if name in ("q", "dout") else (row - right, row + 90)
        queries = [i for i in range(300) if not low <= i <= high]
        for n, rows in (("dq", queries), ("dk", keys), ("dv", keys)):
            got, expected = dirty[n][:, rows].double(), clean[n][:, rows].double()
            # Rows of a tile that has met a NaN are summed in another order: a unit of bfloat16 is up to 0.8 % of a value.
            error = float(torch.nan_to_num((got - expected).abs() / expected.abs().clamp(min=1), nan=math.inf).max())
            assert error <= 0.03, f"{value} in {name} of {case}: {n} is off by {error} where it is not seen"
        # The other way: what is wrong must show in the rows that see it, each of them, in the poisoned head.
        keys, queries = [row], [row]
        if name in ("q", "dout"):
            keys = list(range(row - 90, row + right + 1))
        else:
            queries = list(range(row - right, row + 91))
        seen = {"dq": queries, "dk": keys} | ({"dv": keys} if name != "v" else {})  # dv has no v in it
        for n, rows in seen.items():
            wrong = dirty[n][0, rows, 0]
            wrong = wrong.isnan() if math.isnan(value) else ~wrong.isfinite()
            lost = [i for i, arrived in zip(rows, wrong.any(-1).tolist(), strict=True) if not arrived]
            assert not lost, f"{value} in {name} of {case}: not to be seen in rows {lost} of {n}"
        done += 1
    return f"{done} problems"


def test_persistent(_: argparse.Namespace) -> str:
    """The backward pass with more work items than a GPU has thread blocks at a time: each takes item after item."""
    lengths_q, lengths_k = [65, 0, 1, 300, 513, 7, 128, 129], [3, 70, 130, 0, 640, 257, 128, 1]
    shapes = [
        {"batch": 12, "seqlen_q": 150, "seqlen_k": 300, "heads": 16},  # 576 items of 128 keys
        {"batch": 3, "seqlen_q": 700, "seqlen_k": 900, "heads": 40, "heads_kv": 20},  # 480 long ones
        {"batch": 20, "seqlen_q": 130, "seqlen_k": 520, "heads": 8, "window": (100, 30)},  # 800, masked on both sides
        {"lengths_q": 3 * lengths_q, "lengths_k": 3 * lengths_k, "heads": 24, "heads_kv": 12},
        {"batch": 16, "seqlen_q": 400, "seqlen_k": 150, "heads": 16, "has_dlse": True},  # rows that see no key
        {"batch": 24, "seqlen_q": 300, "seqlen_k": 280, "heads": 32, "heads_kv": 16},  # sums of dQ larger than L2
        {"batch": 1, "seqlen_q": 1024, "seqlen_k": 1024, "heads": 160, "heads_kv": 2, "window": (100, 30)},  # and parts
    ]
    dims, dtypes = (56, 64, 88, 96, 128, 192) if TURING else (56, 64, 88, 96, 128, 192, 256), HALVES
    if DEV == "cpu":  # the test itself
        shapes = [{**s, "heads": 2, "heads_kv": 1, **({"batch": 1} if "batch" in s else {})} for s in shapes]
        dims, dtypes = (64,), (torch.bfloat16,)
    done = 0
    for dim, dtype, shape, causal, ordered in itertools.product(dims, dtypes, shapes, (False, True), (False, True)):
        if out_of_time():
            return f"{done} problems, out of time"
        case = Case(head_dim=dim, dtype=dtype, causal=causal, deterministic=ordered, **shape)
        tensors = {n: torch.empty(case.shape(n), dtype=dtype, device=DEV) for n in ("q", "k", "v", "out")}
        kernel = lib.text(lib.make_plan(st.problem_of(case, True, **tensors)).kernel)
        assert kernel == "cuda_sm90" or not has_hopper_kernels(), f"{case} went to {kernel}"
        try:
            run_case(case, done, backward=True)
        except AssertionError as e:
            raise AssertionError(f"{case}: {e}") from e
        done += 1
    return f"{done} problems"


def test_extremes(_: argparse.Namespace) -> str:
    """Caps, scores, values and bounds at the ends of their range."""
    return extremes.check(DEV)


def said_by(script: str, *words: str) -> list[str]:
    """What a script of this folder prints, which has to pass and not to skip."""
    command = [sys.executable, str(Path(__file__).with_name(script)), "--device", DEV, *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (run.stdout + run.stderr).strip()
    assert run.returncode == 0, f"{' '.join([script, *words])}: {said[-2000:]}"
    lines = said.splitlines()
    assert "skipped" not in lines[-1], lines[-1]
    return lines


def test_cache(_: argparse.Namespace) -> str:
    """Keys in a cache: cache.py as planned, captured, and with numbers out of range; kvcache.py; paged_accuracy.py."""
    runs = [("cache.py", "--count", "400"), ("cache.py", "--graph", "100"), ("kvcache.py", "--count", "100")]
    runs.append(("cache.py", "--hostile", "--count", "200", "--first", "400"))
    runs += [("cache.py", "--prompts", *words) for words in (("--count", "400"), ("--graph", "50"))]
    runs.append(("cache.py", "--prompts", "--hostile", "--count", "100", "--first", "400"))
    runs.append(("paged_accuracy.py",))
    if DEV == "cpu":  # the test itself; the CPU refuses numbers out of range
        runs = [("cache.py", "--count", "4"), ("cache.py", "--graph", "1"), ("kvcache.py", "--count", "2")]
        runs.append(("paged_accuracy.py", "--scale", "0.02", "--longest", "3", "--head-dims", "64"))
    last = []
    for script, *words in runs:
        if out_of_time():
            return "; ".join([*last, "out of time"])
        last.append(said_by(script, *words)[-1])
        if "--prompts" in words and has_hopper_kernels():
            assert "cuda_sm90" in last[-1], last[-1]
    return "; ".join(last)


def test_quantised(_: argparse.Namespace) -> str:
    """Quantised caches, appends to them, and quantising: quantised.py as planned, and captured."""
    runs = [["--count", "400"], ["--graph", "60", "--first", "5000"]] if DEV == "cuda" else [["--count", "4"]]
    last = []
    for words in runs:
        if out_of_time():
            return "; ".join([*last, "out of time"])
        last.append(said_by("quantised.py", *words)[-1])
    return "; ".join(last)


def test_float8(_: argparse.Namespace) -> str:
    """Float8 attention, and its quantising: float8.py as planned, and captured; and float8_accuracy.py."""
    accuracy = said_by("float8_accuracy.py", "--count", "160" if DEV == "cuda" else "4")
    print("\n".join(f"  {line}" for line in accuracy), flush=True)
    return said_by("float8.py", *(["--count", "300", "--graph", "20"] if DEV == "cuda" else ["--count", "4"]))[-1]


def test_masks(_: argparse.Namespace) -> str:
    """Masks as data, and words that are none: masks.py."""
    return said_by("masks.py", *FEW)[-1]


def test_bias(_: argparse.Namespace) -> str:
    """Biases and their gradients: bias.py."""
    return said_by("bias.py", *FEW)[-1]


def test_sinks(_: argparse.Namespace) -> str:
    """Attention sinks: sinks.py."""
    return said_by("sinks.py", *FEW)[-1]


TESTS = {
    name.removeprefix("test_"): function
    for name, function in [*globals().items(), *vars(promises).items()]
    if name.startswith("test_")
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Strobe on the GPU against float64.")
    parser.add_argument("--random", type=int, default=5000, help="random problems")
    parser.add_argument("--first", type=int, default=0, help="seed of the first random problem")
    parser.add_argument("--walks", type=int, default=5000, help="random problems of --only walks")
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--first-row", type=int, default=0, help="of --only rows")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long, and say how to go on")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: the tests themselves")
    parser.add_argument("--only", default="", help=f"some of {','.join(TESTS)}")
    options = parser.parse_args()
    stop_after(options.seconds)
    names = options.only.split(",") if options.only else [n for n in TESTS if n != "row"]
    gpu = torch.cuda.get_device_name() if DEV == "cuda" else "the CPU"
    print(f"gpu tests on {gpu}, strobe {lib.VERSION}, {lib.LIBRARY_PATH}")
    lines, failed = [], []
    for name in names:
        start = time.monotonic()
        if out_of_time():
            lines.append(f"{name:<8} not run: out of time")
            continue
        try:
            verdict = f"ok: {TESTS[name](options)}"
            synchronize()
        except Exception as e:  # noqa: BLE001 - the others are to run too
            failed.append(name)
            verdict = f"FAILED: {type(e).__name__}: {e}"
            if not isinstance(e, AssertionError):
                traceback.print_exc()
        lines.append(f"{name:<8} {verdict} ({time.monotonic() - start:.1f} s)")
        print(lines[-1], flush=True)
    print("\n--- summary\n" + "\n".join(lines))
    print("gpu tests: " + (f"FAILED: {', '.join(failed)}" if failed else "all passed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
