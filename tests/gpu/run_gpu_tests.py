"""Correctness on the GPU against float64: forward and backward, and what else is promised.

    make gpu-test                                                  everything, about half an hour
    make gpu-test ARGS="--seconds 540 --random 20000"              a slice: stops in time, says how to go on
    make gpu-test ARGS="--only random --first 5000 --random 5000"  some random problems
    make gpu-test ARGS="--only special,errors,graph"               some tests
    make gpu-test ARGS="--only rows"                               every row of kernels.def, forced in turn
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
import functools
import itertools
import math
import os
import random
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

try:
    import torch
except ImportError:
    print("gpu tests: skipped (no PyTorch, whose float64 is the reference)")
    sys.exit(0)
DEV = "cpu" if "--device=cpu" in sys.argv or ("--device" in sys.argv and "cpu" in sys.argv) else "cuda"
if DEV == "cuda" and not torch.cuda.is_available():
    print("gpu tests: skipped (no GPU)")
    sys.exit(0)

import extremes
import strobe_torch as st
from rows import ROWS, Row
from strobe_torch import Backward, Case, Forward, lib

END = math.inf  # time.monotonic() when tests have to stop; set by --seconds


def out_of_time() -> bool:
    return time.monotonic() > END


def synchronize() -> None:
    if DEV == "cuda":
        torch.cuda.synchronize()


POISON = -6.0e4  # representable, after rounding, in all three types
ZONE = 4096  # values before and after each output


class Guarded:
    """A tensor between red zones, all poisoned. `strides`: of a larger layout that it is cut from."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, pad: int = 0, shift: int = 0):
        self.shape, self.pad = shape, pad
        inner = (*shape[:-1], shape[-1] + pad)
        count = math.prod(inner)
        self.storage = torch.full((ZONE + shift + count + ZONE,), POISON, dtype=dtype, device=DEV)
        at = self.storage[ZONE + shift : ZONE + shift + count].view(inner)
        self.tensor = at[..., : shape[-1]]

    def touched_outside(self) -> bool:
        copy = self.storage.clone()
        poison = torch.full((), POISON, dtype=copy.dtype, device=DEV)
        at = self.tensor
        torch.as_strided(copy, at.shape, at.stride(), at.storage_offset()).fill_(poison)
        return not bool((copy == poison).all())


def make_inputs(
    case: Case, seed: int, pad: int = 0, shift: int = 0, sigma: float = 1.0
) -> dict[str, torch.Tensor]:
    g = torch.Generator(device=DEV).manual_seed(seed)

    def one(name: str) -> torch.Tensor:
        shape = case.shape(name)
        inner = (*shape[:-1], shape[-1] + pad)
        flat = torch.randn(math.prod(inner) + shift, generator=g, device=DEV) * sigma
        return flat.to(case.dtype)[shift:].view(inner)[..., : shape[-1]]

    return {name: one(name) for name in ("q", "k", "v")}


def worst(x: torch.Tensor, ref: torch.Tensor) -> float:
    """Largest |x - ref| where ref is finite; inf where the special values differ."""
    x, ref = x.double(), ref.double()
    special = ~torch.isfinite(ref)
    same = (torch.isnan(ref) & torch.isnan(x)) | (x == ref)
    if bool((special & ~same).any()):
        return math.inf
    if x.numel() == 0:
        return 0.0
    difference = torch.where(special, 0, (x - ref).abs())
    return math.inf if bool(torch.isnan(difference).any()) else float(difference.max())


def check_close(
    name: str, x: torch.Tensor, ref: torch.Tensor, comparator: torch.Tensor, factor: float = 2.0,
    draws: Callable[[], list[torch.Tensor]] = list,
) -> float:  # fmt: skip
    """`draws`: more comparators, made where the one does not do."""
    got, allowed = worst(x, ref), worst(comparator, ref)
    if not got <= factor * allowed + 1e-5:
        allowed = max(allowed, *(worst(draw, ref) for draw in draws()), 0.0)
    if not math.isfinite(allowed):  # the comparator has no rule for NaN in V: be as strict as for finite data
        allowed = 0.02
    limit = factor * allowed + 1e-5
    if not got <= limit:
        d = (x.double() - ref.double()).abs()
        d = torch.where(torch.isnan(d), math.inf, d)
        at = int(d.flatten().argmax())
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), x.shape))
        raise AssertionError(
            f"{name}: error {got:.3g}, allowed {limit:.3g}; at {place} got "
            f"{float(x.flatten()[at]):.6g}, reference {float(ref.flatten()[at]):.6g}"
        )
    return got / limit if limit else 0.0


def run_case(case: Case, seed: int, pad: int = 0, shift: int = 0, sigma: float = 1.0,
             change: Callable[[dict[str, torch.Tensor]], None] | None = None, backward: bool = False) -> float:  # fmt: skip
    """One case against the reference: the worst error over what is allowed."""
    x = make_inputs(case, seed, pad, shift, sigma)
    if change:
        change(x)
    before = {name: tensor.clone() for name, tensor in x.items()}
    slopes = None
    if case.alibi:
        shape = (case.heads,) if case.alibi == 1 else (case.batch, case.heads)
        slopes = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEV) * 0.3
    keep = st.host_dropout_mask(case, seed, 5) if case.dropout_p > 0 else None
    out = Guarded(case.shape("out"), case.dtype, pad, shift)
    lse = Guarded(case.lse_shape(), torch.float32)
    forward = Forward(case, **x, out=out.tensor, lse=lse.tensor, alibi_slopes=slopes, seed=seed, offset=5)
    forward.run()
    ref, ref_lse = st.full_reference(case, **x, slopes=slopes, keep=keep)
    other, other_lse = st.full_reference(case, **x, slopes=slopes, keep=keep, dtype=case.dtype)
    check_guards({"out": out, "lse": lse}, forward.workspace)

    def draws() -> list[torch.Tensor]:
        # Where one key has all the weight the comparator is exact by luck: that weight is 1. Relative to a reference that
        # is not the maximum it has a rounding error.
        g = torch.Generator(device=DEV).manual_seed(seed)
        drawn = [st.full_reference(case, **x, slopes=slopes, keep=keep, stored_weights=g)[0] for _ in range(4)]
        return [st.rounded_at_random(d, case.dtype, g) for d in drawn]

    ratio = check_close("out", out.tensor, ref, other, draws=draws)
    # lse is float32 whatever the inputs are: hold it to the input dtype's rule.
    check_close("lse", lse.tensor, ref_lse, other_lse)
    if backward:
        ratio = max(ratio, run_backward(case, x, out.tensor, lse.tensor, seed, pad, shift, slopes, keep))
    for name, tensor in x.items():
        if not torch.equal(tensor.nan_to_num(), before[name].nan_to_num()):
            raise AssertionError(f"{name}: an input has changed")
    return ratio


def run_backward(
    case: Case, x: dict[str, torch.Tensor], out: torch.Tensor, lse: torch.Tensor, seed: int, pad: int,
    shift: int, slopes: torch.Tensor | None, keep: torch.Tensor | None,
) -> float:  # fmt: skip
    g = torch.Generator(device=DEV).manual_seed(seed + 1)
    shape = case.shape("out")
    inner = (*shape[:-1], shape[-1] + pad)
    flat = torch.randn(math.prod(inner) + shift, generator=g, device=DEV).to(case.dtype)
    dout = flat[shift:].view(inner)[..., : shape[-1]]
    dlse = torch.randn(case.lse_shape(), generator=g, device=DEV) if case.has_dlse else None
    grads = {name: Guarded(case.shape(name), case.dtype, pad, shift) for name in ("dq", "dk", "dv")}
    tensors = {**x, "out": out, "dout": dout, **{name: guarded.tensor for name, guarded in grads.items()}}
    launch = Backward(case, tensors, lse, dlse, slopes, seed=seed, offset=5)
    launch.run()
    refs = st.full_reference_backward(case, **x, dout=dout, dlse=dlse, slopes=slopes, keep=keep)
    others = st.full_reference_backward(
        case, **x, dout=dout, dlse=dlse, slopes=slopes, keep=keep, dtype=case.dtype
    )
    check_guards(grads, launch.workspace)
    factor = 8.0 if case.alibi else 3.0
    drawn: list[list[torch.Tensor]] = []

    def draws(index: int) -> list[torch.Tensor]:
        # On few keys the comparator may be exact by luck: with one, its weight is 1 and dS is 0 to the last bit. What
        # the interface stores in between has rounding errors that no implementation can do without; so have dS and the
        # results, in their dtype.
        if not drawn:
            exact_out, exact_lse = st.full_reference(case, **x, slopes=slopes, keep=keep)
            for _ in range(4):
                stored = (
                    st.rounded_at_random(exact_out, case.dtype, g),
                    st.rounded_at_random(exact_lse, torch.float32, g),
                )
                gradients = st.full_reference_backward(
                    case, **x, dout=dout, dlse=dlse, slopes=slopes, keep=keep, stored=stored, rounding=g
                )
                drawn.append([st.rounded_at_random(t, case.dtype, g) for t in gradients])
        return [draw[index] for draw in drawn]

    ratios = [
        check_close(name, guarded.tensor, ref, other, factor, functools.partial(draws, index))
        for index, ((name, guarded), ref, other) in enumerate(zip(grads.items(), refs, others, strict=True))
    ]
    if case.deterministic:
        for guarded in grads.values():
            guarded.tensor.fill_(POISON)
        again = {name: guarded.tensor.clone() for name, guarded in grads.items()}
        Backward(case, {**tensors, **again}, lse, dlse, slopes, seed=seed, offset=5).run()
        launch.run()
        for name, tensor in again.items():
            assert torch.equal(tensor, grads[name].tensor), f"{name}: other bits in a second run"
    return max(ratios)


def check_guards(outputs: dict[str, Guarded], workspace: st.Workspace) -> None:
    synchronize()
    for name, guarded in outputs.items():
        if guarded.touched_outside():
            raise AssertionError(f"{name}: wrote outside of the tensor")
    if workspace.touched_outside():
        raise AssertionError("wrote outside of the workspace")


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

    def length() -> int:
        return r.choice([0, 1, 2, 63, 64, 65, 127, 128, 129, r.randint(1, 300), r.randint(1, 300), r.randint(300, 900)])

    if r.random() < 0.3:
        batch = r.randint(1, 5)
        case["lengths_q"] = [length() for _ in range(batch)]
        case["lengths_k"] = [length() for _ in range(batch)]
    else:
        case |= {"batch": r.randint(1, 3), "seqlen_q": max(length(), r.random() < 0.9), "seqlen_k": length()}
    if r.random() < 0.3:
        case["window"] = (r.choice([-1, 0, 1, 17, 64, 200]), r.choice([-1, 0, 5, 64, 130]))
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
    return Case(**case)


def has_backward_yardstick(case: Case) -> bool:
    """With one visible key a weight is 1 and its gradient 0: dropout then leaves nothing but the rounding of
    out in the gradient, for which the comparator is no yardstick."""
    one_key = (case.seqlen_k <= 1 or (case.window[0] == 0 and (case.window[1] == 0 or case.causal)))
    return not (case.dropout_p > 0 and one_key)


def test_random(options: argparse.Namespace) -> str:
    failures = done = 0
    start = time.monotonic()
    for seed in range(options.first, options.first + options.random):
        if out_of_time():
            break
        r = random.Random(seed)
        case = random_case(r)
        pad, shift = (0, 0) if r.random() < 0.6 else (r.choice([0, 8, 3]), r.choice([0, 8, 1]))
        sigma = r.choice([1.0, 1.0, 1.0, 0.1, 3.0])
        backward = r.random() < 0.6 and has_backward_yardstick(case)
        done += 1
        try:
            run_case(case, seed, pad, shift, sigma, backward=backward)
        except Exception as e:  # noqa: BLE001 - every failure is to be reported
            failures += 1
            print(f"  seed {seed} pad {pad} shift {shift} sigma {sigma} backward {backward}: {case}\n    {type(e).__name__}: {e}", flush=True)
            if failures >= 12 or isinstance(e, torch.AcceleratorError if hasattr(torch, "AcceleratorError") else ()):
                break
    assert failures == 0, f"{failures} of {done} random problems failed"
    left = f"; go on with --first {options.first + done}" if done < options.random else ""
    return f"{done} problems in {time.monotonic() - start:.0f} s{left}"


def small_cases(row: Row) -> list[tuple[Case, bool]]:
    """What reaches every part of a kernel instance: (case, pad and shift by one)."""
    dtype = torch.bfloat16 if row.dtype == "bf16" else torch.float16
    dim = row.width
    ordered = row.arch == 80 or dim <= 128  # else it has no deterministic backward
    cases = [
        (Case(seqlen_q=140, seqlen_k=200, heads=2, heads_kv=1, head_dim=dim, causal=True, dtype=dtype), False),
        (Case(batch=2, seqlen_q=row.tile_q * 2, seqlen_k=row.tile_k * 4, heads=1, head_dim=dim, dtype=dtype), False),
        (Case(seqlen_q=300, seqlen_k=300, heads=1, head_dim=dim, window=(40, 20), dtype=dtype, deterministic=ordered), False),
        (Case(seqlen_q=200, seqlen_k=70, heads=2, head_dim=dim - 8, causal=True, dtype=dtype, has_dlse=True), False),
        (Case(lengths_q=[65, 0, 1], lengths_k=[3, 70, 130], heads=2, heads_kv=1, head_dim=dim, dtype=dtype), False),
    ]
    if row.when != "plain":
        cases += [
            (Case(seqlen_q=70, seqlen_k=90, heads=1, head_dim=dim, dtype=dtype, alibi=1, softcap=20.0), False),
            (Case(seqlen_q=70, seqlen_k=90, heads=2, head_dim=dim - 8, dtype=dtype, alibi=2, scale=-0.1), False),
        ]
        if row.arch == 80:
            cases.append((Case(seqlen_q=130, seqlen_k=150, heads=2, head_dim=dim, dtype=dtype, dropout_p=0.3), False))
    if row.arch == 80:
        cases.append((Case(lengths_q=[65, 0, 1], lengths_k=[3, 70, 130], heads=1, head_dim=dim - 3, dtype=dtype, window=(30, 3)), True))
    return cases


def test_row(options: argparse.Namespace) -> str:
    """The instance that STROBE_CUDA_ROW names, on small problems of every kind."""
    row = next((r for r in ROWS if r.name == os.environ.get("STROBE_CUDA_ROW")), None)
    if row is None:
        return "no row (STROBE_CUDA_ROW): see --only rows"
    for number, (case, odd) in enumerate(small_cases(row)):
        shapes = {n: torch.empty(case.shape(n), dtype=case.dtype, device=DEV) for n in ("q", "k", "v", "out")}
        plan = lib.make_plan(st.problem_of(case, row.direction == "backward", **shapes))
        at_row = (plan.tile_q, plan.tile_k, lib.text(plan.kernel)) == (row.tile_q, row.tile_k, f"cuda_sm{row.arch}")
        assert at_row, f"case {number} went to {lib.text(plan.kernel)} {plan.tile_q}x{plan.tile_k}"
        run_case(case, number, pad=int(odd), shift=int(odd), backward=row.direction == "backward")
    return f"{row.name}: {len(small_cases(row))} problems"


def test_rows(options: argparse.Namespace) -> str:
    """Every row of kernels.def that this GPU can run, each in a process of its own that forces it."""
    failed, done = [], 0
    for number, row in enumerate(ROWS):
        if number < options.first_row:
            continue
        if out_of_time():
            return f"{done} rows; go on with --only rows --first-row {number}"
        if row.arch == 90 and (torch.cuda.get_device_capability()[0] != 9 or os.environ.get("STROBE_CUDA_ARCH") == "80"):
            continue
        env = {**os.environ, "STROBE_CUDA_ROW": row.name}
        command = [sys.executable, __file__, "--only", "row"]
        if row.direction == "decode":
            command = [sys.executable, str(Path(__file__).with_name("cache.py")), "--count", "500"]
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        done += 1
        if run.returncode:
            failed.append(row.name)
            print(f"  {row.name}: " + "\n    ".join((run.stdout + run.stderr).strip().splitlines()[-6:]), flush=True)
    assert not failed, f"{len(failed)} of {done} rows: {', '.join(failed)}"
    return f"{done} rows"


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

    for dim in (64, 128, 256):
        for dtype in (torch.bfloat16, torch.float16):
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
    for dim in (64, 96, 128, 192, 256):  # rows, and whole tiles, that see nothing
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
    """Backward: a NaN or an infinity in a row of q, k, v or dout reaches nobody who does not see that row."""
    done = 0
    for dim, causal, name, value in itertools.product((64, 128), (False, True), ("q", "k", "v", "dout"), (math.nan, math.inf)):
        case = Case(seqlen_q=300, seqlen_k=300, heads=2, heads_kv=1, head_dim=dim, causal=causal, window=(90, 40))
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
            error = float(torch.nan_to_num((got - expected).abs(), nan=math.inf).max())
            assert error <= 0.03, f"{value} in {name}, head_dim {dim}, causal {causal}: {n} is off by {error} where it is not seen"
        done += 1
    return f"{done} problems"


def test_extremes(_: argparse.Namespace) -> str:
    """Caps, scores, values and bounds at the ends of their range."""
    return extremes.check(DEV)


def test_shapes(_: argparse.Namespace) -> str:
    """Grid limits, and more than 2^31 elements by sampled rows, forward and backward."""
    run_case(Case(batch=700, seqlen_q=3, seqlen_k=5, heads=100, heads_kv=1, head_dim=64), 1, backward=True)  # 70,000
    n, heads, dim = 140_000, 128, 128  # 2.3e9 values: batch 1, one long sequence with broadcast heads
    case = Case(batch=1, seqlen_q=n, seqlen_k=128, heads=heads, heads_kv=1, head_dim=dim)
    q = torch.empty(case.shape("q"), dtype=torch.bfloat16, device=DEV).normal_()
    k, v = (torch.randn(case.shape(s), device=DEV).bfloat16() for s in "kv")
    out = torch.full_like(q, POISON)
    lse = torch.full(case.lse_shape(), POISON, device=DEV)
    Forward(case, q, k, v, out, lse).run()
    rows = torch.tensor([0, 1, 65_535, 131_071, 131_072, n - 1], device=DEV)
    small = Case(batch=1, seqlen_q=len(rows), seqlen_k=128, heads=heads, heads_kv=1, head_dim=dim)
    ref, _lse = st.full_reference(small, q[:, rows], k, v)
    other, _lse = st.full_reference(small, q[:, rows], k, v, dtype=torch.bfloat16)
    check_close("out of 2.3e9 values", out[:, rows], ref, other)
    assert not bool((out == POISON).any())
    dout = torch.empty_like(q).normal_()
    dq, dk, dv = torch.full_like(q, POISON), torch.full_like(k, POISON), torch.full_like(v, POISON)
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    Backward(case, tensors, lse).run()
    ref_dq = st.full_reference_backward(small, q[:, rows], k, v, dout[:, rows])[0]
    other_dq = st.full_reference_backward(small, q[:, rows], k, v, dout[:, rows], dtype=torch.bfloat16)[0]
    check_close("dq of 2.3e9 values", dq[:, rows], ref_dq, other_dq, 3.0)
    for name, tensor in (("dq", dq), ("dk", dk), ("dv", dv)):
        assert not bool((tensor == POISON).any()), f"{name}: not all written"
    return "70,000 heads; 2.3e9 values forward and backward"


def test_long(_: argparse.Namespace) -> str:
    """A million tokens, by sampled rows; peak memory beside the tensors."""
    n, dim = 1 << 20, 64
    case = Case(batch=1, seqlen_q=n, seqlen_k=n, heads=1, head_dim=dim, causal=True)
    x = make_inputs(case, 1)
    out, dout = (torch.randn(case.shape("out"), device=DEV).bfloat16() for _ in range(2))
    lse = torch.empty(case.lse_shape(), device=DEV)
    forward = Forward(case, **x, out=out, lse=lse)
    forward.run()
    rows = torch.tensor([0, 1, 12_345, 524_287, 524_288, n - 1], device=DEV)
    q, k, v = (x[name][0, :, 0].double() for name in "qkv")
    s = q[rows] @ k.T * case.real_scale
    s = s.masked_fill(torch.arange(n, device=DEV)[None] > rows[:, None], -math.inf)
    p = torch.softmax(s, -1)
    got, want = out[0, rows, 0].double(), p @ v
    error = float((got - want).abs().max())
    # Rounding of bf16 weights and result: weights average out, the result's own rounding stays.
    assert error < 2e-2, f"out of a million tokens: error {error:.3g}"
    error = float((lse[0, 0, rows].double() - torch.logsumexp(s, -1)).abs().max())
    assert error < 1e-3, f"lse of a million tokens: error {error:.3g}"
    grads = {name: torch.full(case.shape(name), POISON, dtype=case.dtype, device=DEV) for name in ("dq", "dk", "dv")}
    backward = Backward(case, {**x, "out": out, "dout": dout, **grads}, lse)
    backward.run()
    do = dout[0, :, 0].double()
    dp = do[rows] @ v.T
    ds = p * (dp - (do[rows] * want).sum(-1, keepdim=True)) * case.real_scale
    error = float((grads["dq"][0, rows, 0].double() - ds @ k).abs().max())
    assert error < 2e-2, f"dq of a million tokens: error {error:.3g}"
    for name, tensor in grads.items():
        assert bool(torch.isfinite(tensor).all()) and not bool((tensor == POISON).any()), f"{name}: not all written"
    tensor_bytes = x["q"].numel() * 2
    for what, plan in (("forward", forward.plan), ("backward", backward.plan)):
        assert plan.workspace_bytes < 8 * tensor_bytes, f"{what}: workspace of {plan.workspace_bytes} bytes"
    return f"workspace forward {forward.plan.workspace_bytes >> 10} KB, backward {backward.plan.workspace_bytes >> 20} MB"


def test_repeats(options: argparse.Namespace) -> str:
    """1,000 forward runs, and deterministic backward ones, give the same bits; and so does any place in the batch."""
    done = []
    for dim, causal in ((64, True), (128, False), (256, True)):
        case = Case(batch=3, seqlen_q=777, seqlen_k=777, heads=8, heads_kv=2, head_dim=dim, causal=causal, deterministic=True)
        x = make_inputs(case, 0)
        out, dout = (torch.randn(case.shape("out"), device=DEV).to(case.dtype) for _ in range(2))
        lse = torch.empty(case.lse_shape(), device=DEV)
        forward = Forward(case, **x, out=out, lse=lse)
        grads = {name: torch.empty(case.shape(name), dtype=case.dtype, device=DEV) for name in ("dq", "dk", "dv")}
        backward = Backward(case, {**x, "out": out, "dout": dout, **grads}, lse)
        first: list[torch.Tensor] = []
        for n in range(options.repeats):
            forward.run()
            if n % 4 == 0:
                backward.run()
            results = [out, lse, *(grads.values())]
            if n == 0:
                first = [t.clone() for t in results]
            for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), results, first, strict=True):
                assert torch.equal(a, b), f"{name}: run {n} has other bits (head_dim {dim})"
            if out_of_time():
                break
        done.append(n + 1)
        alone = Case(**{**case.__dict__, "batch": 1})
        one = torch.empty(alone.shape("out"), dtype=case.dtype, device=DEV)
        for b in range(case.batch):
            Forward(alone, **{name: t[b : b + 1].contiguous() for name, t in x.items()}, out=one).run()
            assert torch.equal(one[0], out[b]), f"sequence {b} alone has other bits (head_dim {dim})"
    return f"{done} runs"


def test_cpu(_: argparse.Namespace) -> str:
    """The same problem on the CPU and on the GPU: both within the rule, hence of each other; dropout bit by bit."""
    worst_ratio = 0.0
    for seed, extra in enumerate(({}, {"causal": True}, {"softcap": 9.0, "alibi": 1}, {"dropout_p": 0.3}, {"window": (50, 10)})):
        case = Case(batch=2, seqlen_q=190, seqlen_k=230, heads=4, heads_kv=2, head_dim=72, **extra)
        x = make_inputs(case, seed)
        slopes = torch.rand(case.heads) * 0.3 if case.alibi else None
        results = []
        for device in ("cpu", DEV):
            here = {name: t.to(device) for name, t in x.items()}
            out = torch.empty(case.shape("out"), dtype=case.dtype, device=device)
            Forward(case, **here, out=out, alibi_slopes=None if slopes is None else slopes.to(device), seed=seed, offset=5).run()
            results.append(out.to(DEV))
        keep = st.host_dropout_mask(case, seed, 5) if case.dropout_p > 0 else None
        there = None if slopes is None else slopes.to(DEV)
        ref, _ = st.full_reference(case, **x, slopes=there, keep=keep)
        other, _ = st.full_reference(case, **x, slopes=there, keep=keep, dtype=case.dtype)
        worst_ratio = max(worst_ratio, check_close("GPU against CPU", results[1], results[0].double(), other, 4.0))
        check_close("CPU", results[0], ref, other)
    return f"worst difference {worst_ratio:.2f} of what is allowed"


def test_errors(_: argparse.Namespace) -> str:
    """Bad input is refused with a text, nothing is launched, and the next call works."""
    case = Case(batch=1, seqlen_q=128, seqlen_k=128, heads=2)
    x = make_inputs(case, 0)
    out = torch.full(case.shape("out"), POISON, dtype=case.dtype, device=DEV)

    def refused(what: str, wanted: str, run: Callable[[], object]) -> None:
        try:
            run()
        except Exception as e:  # noqa: BLE001
            assert wanted in str(e), f"{what}: text is {e}, expected {wanted!r} in it"
            torch.cuda.synchronize()
            return
        raise AssertionError(f"{what}: was accepted")

    host = torch.zeros(case.shape("q"), dtype=case.dtype)
    refused("host pointer", "host memory", lambda: Forward(case, host, x["k"], x["v"], out).run())
    refused("host output", "host memory", lambda: Forward(case, **x, out=host).run())
    refused("odd address", "alignment", lambda: Forward(case, q=_off_by_one_byte(x["q"]), k=x["k"], v=x["v"], out=out).run())
    f = Case(**{**case.__dict__, "dtype": torch.float32})
    refused("float32", "fp32", lambda: Forward(f, **{n: t.float() for n, t in x.items()}, out=out.float()))
    refused("device", "device_index", lambda: lib.make_plan(st.problem_of(case, False, device_index=77, **x)))
    if torch.cuda.device_count() > 1:
        other = x["q"].to("cuda:1")
        refused("wrong device", "memory of device 1", lambda: Forward(case, other, x["k"], x["v"], out).run())
    launch = Forward(case, **x, out=out)
    if launch.workspace.size > 0:
        pieces = lib.pack_forward(
            lib.FORWARD_ARGS_SIZE, *(st.pointer(x[n]) for n in "qkv"), st.pointer(out), 0, 0, 0, 0, 0, 0,
            launch.workspace.address, launch.workspace.size - 1, 0,
        )  # fmt: skip
        refused("workspace too small", "workspace", lambda: lib.check(lib.forward(launch.address, pieces)))
    refused("head_dim", "head_dim", lambda: lib.make_plan(st.problem_of(Case(head_dim=264), False)))
    assert bool((out == POISON).all()), "a refused call wrote"
    run_case(case, 0)
    return "each refused with its text, nothing written, the next call works"


class _off_by_one_byte:
    def __init__(self, like: torch.Tensor) -> None:
        self.like = like

    def __getattr__(self, name: str) -> object:
        return getattr(self.like, name)

    def data_ptr(self) -> int:
        return self.like.data_ptr() + 1


def test_graph(_: argparse.Namespace) -> str:
    """Captured once, replayed on new data, the same bits as a launch."""
    case = Case(batch=2, seqlen_q=500, seqlen_k=500, heads=4, causal=True, deterministic=True)
    x = make_inputs(case, 0)
    out = torch.empty(case.shape("out"), dtype=case.dtype, device=DEV)
    lse = torch.empty(case.lse_shape(), device=DEV)
    dout = torch.randn(case.shape("out"), device=DEV).to(case.dtype)
    grads = {name: torch.empty(case.shape(name), dtype=case.dtype, device=DEV) for name in ("dq", "dk", "dv")}
    tensors = {**x, "out": out, "dout": dout, **grads}

    def both() -> tuple[Forward, Backward]:
        """Both directions on the current stream; what they keep alive."""
        forward, backward = Forward(case, **x, out=out, lse=lse), Backward(case, tensors, lse)
        forward.run()
        backward.run()
        return forward, backward

    both()  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = both()
    for seed in range(3):
        for name, tensor in make_inputs(case, seed).items():
            x[name].copy_(tensor)
        out.fill_(POISON)
        graph.replay()
        replayed = [t.clone() for t in (out, *grads.values())]
        out.fill_(POISON)
        both()
        for name, a, b in zip(("out", "dq", "dk", "dv"), replayed, (out, *grads.values()), strict=True):
            assert torch.equal(a, b), f"{name}: replay differs from launch"
    del kept
    return "forward and backward replayed on three sets of tensors"


def test_threads(_: argparse.Namespace) -> str:
    """Several host threads, each on its own stream; repeats give the same bits."""
    case = Case(batch=2, seqlen_q=700, seqlen_k=700, heads=4, head_dim=128, causal=True)
    x = make_inputs(case, 0)
    expected = torch.empty(case.shape("out"), dtype=case.dtype, device=DEV)
    Forward(case, **x, out=expected).run()
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                out = torch.empty_like(expected)
                forward = Forward(case, **x, out=out)
                for _ in range(100):
                    out.fill_(POISON)
                    forward.run()
                    if not torch.equal(out, expected):
                        wrong.append("different bits")
                        return
        except Exception:  # noqa: BLE001
            wrong.append(traceback.format_exc())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[0]
    return "6 threads, each on its stream, 100 launches"


def test_ptx(_: argparse.Namespace) -> str:
    """What a GPU newer than the machine code runs: the driver compiles the PTX. By the tool, since PyTorch has no PTX of
    its kernels; minutes."""
    tool = Path(lib.LIBRARY_PATH).resolve().parent / "bin/strobe"
    assert tool.exists(), f"{tool}: not built (target strobe_cli)"

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        env = {n: x for n, x in os.environ.items() if n != "STROBE_CUDA_ARCH"} | {"CUDA_FORCE_PTX_JIT": "1"} | more
        seconds = 1800 if END == math.inf else max(1.0, END - time.monotonic())
        command = [str(tool), "check", "--device", "cuda", "--cases", "1"]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=seconds)

    if torch.cuda.get_device_capability()[0] == 9:  # the Hopper forward has none, which shows that it is asked for
        assert run().returncode > 0, "strobe check passed, or crashed, on kernels that have no PTX"
    found = run(STROBE_CUDA_ARCH="80")
    assert found.returncode == 0, (found.stdout + found.stderr)[-2000:]
    return found.stdout.strip().splitlines()[-1]


TESTS = {
    name.removeprefix("test_"): function
    for name, function in list(globals().items())
    if name.startswith("test_")
}


def main() -> int:
    global END
    parser = argparse.ArgumentParser(description="Strobe on the GPU against float64.")
    parser.add_argument("--random", type=int, default=5000, help="random problems")
    parser.add_argument("--first", type=int, default=0, help="seed of the first random problem")
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--first-row", type=int, default=0, help="of --only rows")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long, and say how to go on")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: the tests themselves")
    parser.add_argument("--only", default="", help=f"some of {','.join(TESTS)}")
    options = parser.parse_args()
    END = time.monotonic() + options.seconds
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
