"""What tells the sequences of a batch apart, on the GPU against float64: lengths in use, positions, prefixes; and chunks.

    python tests/gpu/sequences.py                        random problems, by the kernels that the planner chooses
    python tests/gpu/sequences.py --rows                 the same by every forward row of kernels.def, each forced
    STROBE_TEST_HIDDEN_KEYS=1 python tests/gpu/sequences.py   for a library built with STROBE_BREAK_KERNEL=MASK_MEMBER,
                                                         whose mask has one member more: no query sees key 0

Rows that are not in use hold NaN, and outputs lie between red zones. The pass rule is run_gpu_tests.py's.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from device import DEV, HALVES, TURING  # first: ends the script where there is no GPU

# isort: split
import strobe_torch as st
import torch
from rows import ROWS, Row
from strobe_torch import Case, lib

ZONE, POISON = 4096, -6.0e4


@dataclass
class Sequences:
    """The arrays of the C ABI, one entry a sequence; empty: not given."""

    used_q: list[int] = field(default_factory=list)
    used_k: list[int] = field(default_factory=list)
    q_position: list[int] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    chunk: int = 0


def rule(case: Case, s: Sequences, b: int) -> st.Rule:
    """Of sequence b."""
    return st.Rule.of(
        case, chunk=s.chunk, prefix=s.prefix[b] if s.prefix else 0, q_position=s.q_position[b] if s.q_position else None
    )


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    storage = torch.full((2 * ZONE + math.prod(shape),), POISON, dtype=dtype, device=DEV)
    return storage, storage[ZONE : ZONE + math.prod(shape)].view(shape)


def check_close(name: str, x: torch.Tensor, ref: torch.Tensor, comparators: list[torch.Tensor], factor: float) -> None:
    """Against the largest error of any of the comparators."""
    x, ref = x.double(), ref.double()
    if x.numel() == 0:
        return
    finite = torch.isfinite(ref)
    assert bool(((x == ref) | finite).all()), f"{name}: special values differ"
    error = torch.where(finite, (x - ref).abs(), 0)
    got = math.inf if bool(torch.isnan(error).any()) else float(error.max())
    limit = factor * max(float(torch.where(finite, (c.double() - ref).abs(), 0).max()) for c in comparators) + 1e-5
    assert got <= limit, f"{name}: error {got:.3g}, allowed {limit:.3g}"


def run(case: Case, s: Sequences, seed: int) -> str:
    """One problem; returns the kernel's name."""
    g = torch.Generator(device=DEV).manual_seed(seed)
    x = {
        n: torch.randn(case.shape(n), generator=g, device=DEV).to(case.dtype) for n in ("q", "k", "v")
    }
    slopes = torch.rand(case.heads, generator=g, device=DEV) * 0.3 if case.alibi else None
    lengths_q = case.lengths_q or [case.seqlen_q] * case.batch
    lengths_k = case.lengths_k or [case.seqlen_k] * case.batch
    used_q, used_k = s.used_q or lengths_q, s.used_k or lengths_k

    def rows(name: str, b: int, t: torch.Tensor) -> torch.Tensor:
        """The rows of sequence b."""
        lengths = lengths_q if name in ("q", "out") else lengths_k
        if case.varlen:
            first = sum(lengths[:b])
            return t[first : first + lengths[b]]
        return t[b]

    for b in range(case.batch):
        for name, used in (("q", used_q), ("k", used_k), ("v", used_k)):
            rows(name, b, x[name])[used[b] :] = math.nan
    out_storage, out = guarded(case.shape("out"), case.dtype)
    lse_storage, lse = guarded(case.lse_shape(), torch.float32)
    p = st.problem_of(case, False, **x, out=out)
    p.attention_chunk = s.chunk
    arrays = {"seqused_q": s.used_q, "seqused_k": s.used_k, "q_position": s.q_position, "prefix": s.prefix}
    kept = {name: torch.tensor(a, dtype=torch.int32, device=DEV) for name, a in arrays.items() if a}
    for name in kept:
        setattr(p, f"has_{name}", 1)
    plan = lib.make_plan(p)
    workspace = st.Workspace(int(plan.workspace_bytes), x["q"].device)
    args = lib.ForwardArgs()
    args.struct_size = ctypes.sizeof(args)
    for name, t in (*x.items(), ("out", out), ("lse", lse), ("alibi_slopes", slopes), *kept.items()):
        setattr(args, name, st.pointer(t))
    cu_q, cu_k = (st.offsets(n, x["q"].device) if case.varlen else None for n in (case.lengths_q, case.lengths_k))
    args.cu_seqlens_q, args.cu_seqlens_k = st.pointer(cu_q), st.pointer(cu_k)
    args.workspace, args.workspace_bytes = workspace.address, workspace.size
    args.stream = st.stream_of(x["q"].device)
    lib.check(lib.forward(ctypes.addressof(plan), bytes(args)))
    for b in range(case.batch):
        nq, nk = used_q[b], used_k[b]
        q, k, v = rows("q", b, x["q"])[:nq], rows("k", b, x["k"])[:nk], rows("v", b, x["v"])[:nk]
        ref, ref_lse = st.attend(rule(case, s, b), q, k, v, slopes)
        # lse from scores in float32, as every kernel has them.
        near, _ = st.attend(rule(case, s, b), q, k, v, slopes, dtype=case.dtype)
        _, near_lse = st.attend(rule(case, s, b), q, k, v, slopes, dtype=case.dtype)
        got = rows("out", b, out)
        first = sum(lengths_q[:b])
        got_lse = lse[:, first : first + lengths_q[b]] if case.varlen else lse[b]
        check_close(f"out of sequence {b}", got[:nq], ref, [near], 2)
        check_close(f"lse of sequence {b}", got_lse[:, :nq], ref_lse, [near_lse], 2)
        assert bool((got[nq:] == 0).all()), f"out of sequence {b}: rows that are not in use, expected 0"
        assert bool((got_lse[:, nq:] == -math.inf).all()), f"lse of sequence {b}: rows that are not in use, expected -inf"
    for storage in (out_storage, lse_storage):
        assert bool((storage[:ZONE] == POISON).all() and (storage[-ZONE:] == POISON).all()), "a red zone was written"
    assert not workspace.touched_outside(), "the workspace's red zone was written"
    return lib.text(plan.kernel)


def draw(seed: int, dims: list[int], dtypes: list[torch.dtype]) -> tuple[Case, Sequences]:
    r = random.Random(seed)
    batch, heads_kv = r.choice((1, 2, 5)), r.choice((1, 2))
    lengths = lambda most: [r.choice((0, 1, r.randint(0, most), r.randint(0, most), most)) for _ in range(batch)]
    nq, nk = r.choice((1, 63, 200, 300, r.randint(1, 450))), r.choice((1, 128, 300, r.randint(1, 700)))
    if r.random() < 0.15:  # keys are divided among thread blocks
        nq, nk = r.randint(1, 64), r.randint(500, 6000)
    kind = r.random()
    prefix = kind < 0.3
    case = Case(
        batch=batch, seqlen_q=nq, seqlen_k=nk, heads=heads_kv * r.choice((1, 3)), heads_kv=heads_kv,
        head_dim=r.choice(dims), causal=r.random() < 0.6,
        window=(-1, -1) if prefix or r.random() < 0.7 else (r.choice((-1, 0, 5, 150)), r.choice((-1, 0, 5, 150))),
        alibi=int(r.random() < 0.2), softcap=r.choice((0.0, 0.0, 0.0, 20.0)), dtype=r.choice(dtypes),
    )  # fmt: skip
    if r.random() < 0.4:
        lengths_q, lengths_k = lengths(nq), lengths(nk)
        if sum(lengths_q) and sum(lengths_k):
            case.lengths_q, case.lengths_k = lengths_q, lengths_k
            case.__post_init__()
    rows_q = case.lengths_q or [case.seqlen_q] * batch
    rows_k = case.lengths_k or [case.seqlen_k] * batch
    s = Sequences()
    if r.random() < 0.5:
        s.used_q = [r.choice((0, n, r.randint(0, n), r.randint(0, n))) for n in rows_q]
    if r.random() < 0.6:
        s.used_k = [r.choice((0, n, r.randint(0, n), r.randint(0, n), r.randint(0, n))) for n in rows_k]
    if r.random() < 0.4:
        s.q_position = [r.choice((0, -7, r.randint(-400, 900), r.randint(0, 300))) for _ in rows_q]
        if not case.alibi and r.random() < 0.1:
            s.q_position[0] = r.choice((2**30, -(2**30)))
    if prefix:
        s.prefix = [r.randint(0, n) for n in s.used_k or rows_k]
    elif r.random() < 0.5:
        s.chunk = r.choice((1, 3, 64, 100, 128, 500, 2**31, 2**62, r.randint(190, 400)))
    return case, s


def problems(first: int, count: int, row: Row | None) -> str:
    dims, dtypes = [64, 40, 96, 128, 80, 192, *([] if TURING else [256])], HALVES
    if row:
        dims = [row.width, row.width - 8]
        dtypes = [torch.bfloat16 if row.dtype == "bf16" else torch.float16]
    kernels: dict[str, int] = {}
    for seed in range(first, first + count):
        case, s = draw(seed, dims, dtypes)
        try:
            kernel = run(case, s, seed)
        except (AssertionError, lib.Error) as e:
            raise AssertionError(f"seed {seed}: {e}\n  {case}\n  {s}") from e
        kernels[kernel] = kernels.get(kernel, 0) + 1
    return ", ".join(f"{n} by {kernel}" for kernel, n in sorted(kernels.items()))


def forced(row: Row, options: argparse.Namespace) -> tuple[str, int, str]:
    env = {**os.environ, **row.environment}
    command = [sys.executable, __file__, "--row", row.name, "--count", str(options.count), "--first", str(options.first)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return row.name, done.returncode, (done.stdout + done.stderr).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description="Lengths in use, positions, prefixes and chunks against float64.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--rows", nargs="?", const="", default=None, help="names of rows, part of them: all that have it")
    parser.add_argument("--row", default="", help="the one that STROBE_CUDA_ROW forces")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: the CPU library")
    options = parser.parse_args()
    if options.rows is None:
        row = next((r for r in ROWS if r.name == options.row), None)
        print(f"gpu sequences: {problems(options.first, options.count, row)}: all passed")
        return 0
    parts = options.rows.split(",")
    rows = [r for r in ROWS if r.direction == "forward" and not r.is_float8]
    rows = [r for r in rows if any(part in r.name for part in parts)]
    failed = []
    with ThreadPoolExecutor(4) as pool:
        for name, code, text in pool.map(lambda row: forced(row, options), rows):
            failed += [name] if code else []
            print(f"  {name}: " + ("\n    ".join(text.splitlines()[-4:])), flush=True)
    print("gpu sequences: " + (f"FAILED: {', '.join(failed)}" if failed else f"{len(rows)} rows, all passed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
