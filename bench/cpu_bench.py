"""Strobe and PyTorch on the CPU: same tensors, same number of threads, same process, interleaved.

    make bench                                        the grid of the project's goals, about ten minutes
    python bench/cpu_bench.py --threads 2 --quick     one repeat of the short lengths
    python bench/cpu_bench.py --scaling 16            how one launch of 8 heads x 8192 tokens spreads
    make bench ARGS="--decode"                        one query on long KV caches alone (cpu_decode.py)
    make bench ARGS="--random --seed 3"               shapes that nobody chose (cpu_random.py)

The ratio is Strobe's speed over PyTorch's scaled_dot_product_attention. FLOP counts are the
algorithm's: forward 4 * seqlen^2 * head_dim * heads * batch, half of that when causal; backward 2.5
times the forward. Results go to bench/results/ as JSON, with what they depend on.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_decode
import cpu_random

ROOT = Path(__file__).resolve().parent.parent
HEADS = 8
TOKENS = 4096  # of a batch, at least: batch = max(1, TOKENS / seqlen)
GOALS = {  # geometric mean and worst point, by widest instruction set, dtype and direction
    "avx2": {
        ("fp32", "fwd"): (1.4, 1.15),
        ("fp32", "bwd"): (1.4, 1.15),
        ("bf16", "fwd"): (1.35, 1.1),
        ("bf16", "bwd"): (6.0, 5.0),
    },
    "avx512_bf16": {
        ("fp32", "fwd"): (1.3, 1.1),
        ("fp32", "bwd"): (1.3, 1.1),
        ("bf16", "fwd"): (1.7, 1.2),
        ("bf16", "bwd"): (1.5, 1.2),
    },
    "amx": {
        ("fp32", "fwd"): (1.3, 1.1),
        ("fp32", "bwd"): (1.5, 1.2),
        ("bf16", "fwd"): (2.0, 1.5),
        ("bf16", "bwd"): (2.5, 2.0),
    },
}


def command(*words: str) -> str:
    try:
        return subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def rest() -> None:
    """Lets the other library's threads, which spin for a while after their work, fall asleep."""
    time.sleep(0.01)


def interleaved(calls: dict[str, Callable[[], Any]], budget: float) -> dict[str, float]:
    """Median seconds of each call, taken in turns: at least 3 rounds, more while `budget` lasts."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    while True:
        for name, call in calls.items():
            rest()
            t = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - t)
        rounds = len(times[next(iter(times))])
        spent = time.perf_counter() - start
        if rounds >= 3 and (spent + spent / rounds > budget or rounds >= 50):
            return {name: statistics.median(t) for name, t in times.items()}


def measure(
    dtype: str, head_dim: int, causal: bool, seqlen: int, threads: int, budget: float
) -> dict[str, Any]:
    import strobe
    import torch
    from torch.nn import functional

    batch = max(1, TOKENS // seqlen)
    generator = torch.Generator().manual_seed(seqlen + head_dim)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]

    def random() -> Any:
        values = torch.randn(batch, HEADS, seqlen, head_dim, generator=generator)
        return values.to(kind)

    q, k, v, dout = random(), random(), random(), random()
    # The same memory for both: PyTorch takes (batch, heads, seqlen, head_dim), Strobe the
    # transposed view of it.
    sq, sk, sv, sdout = (t.transpose(1, 2) for t in (q, k, v, dout))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    peer_out = functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    out, lse = strobe.attention(sq, sk, sv, causal=causal, threads=threads, return_lse=True)
    error = (out.transpose(1, 2).float() - peer_out.detach().float()).abs().max().item()
    if not error < (1e-4 if dtype == "fp32" else 0.05):
        sys.exit(f"Strobe and PyTorch differ by {error:g}: not worth timing")

    with torch.no_grad():
        forward = interleaved(
            {
                "strobe": lambda: strobe.attention(sq, sk, sv, causal=causal, threads=threads),
                "torch": lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
            },
            budget,
        )
    backward = interleaved(
        {
            "strobe": lambda: strobe.attention_backward(
                sdout, sq, sk, sv, out, lse, causal=causal, threads=threads
            ),
            "torch": lambda: torch.autograd.grad(peer_out, leaves, dout, retain_graph=True),
        },
        budget,
    )
    flop = 4.0 * batch * HEADS * seqlen * seqlen * head_dim * (0.5 if causal else 1.0)
    point: dict[str, Any] = {
        "dtype": dtype,
        "head_dim": head_dim,
        "causal": causal,
        "seqlen": seqlen,
        "batch": batch,
        "heads": HEADS,
    }
    for direction, times, work in (("fwd", forward, flop), ("bwd", backward, 2.5 * flop)):
        point[direction] = {
            "strobe_gflops": work / times["strobe"] * 1e-9,
            "torch_gflops": work / times["torch"] * 1e-9,
            "ratio": times["torch"] / times["strobe"],
        }
    return point


def grid(args: argparse.Namespace) -> list[dict[str, Any]]:
    seqlens = (512,) if args.quick else (512, 2048, 8192)
    points = []
    print(f"{'dtype':5} {'dim':>4} {'causal':6} {'seqlen':>6}   "
          f"{'fwd':>6} {'torch':>6} {'ratio':>6}   {'bwd':>6} {'torch':>6} {'ratio':>6}   GFLOP/s")
    for dtype, head_dim, causal, seqlen in itertools.product(
        ("fp32", "bf16"), (64, 128), (False, True), seqlens
    ):
        p = measure(dtype, head_dim, causal, seqlen, args.threads, args.budget)
        points.append(p)
        cells = "   ".join(
            f"{p[d]['strobe_gflops']:6.0f} {p[d]['torch_gflops']:6.0f} {p[d]['ratio']:6.2f}"
            for d in ("fwd", "bwd")
        )
        print(f"{dtype:5} {head_dim:4} {'yes' if causal else 'no':6} {seqlen:6}   {cells}",
              flush=True)
    return points


def summary(points: list[dict[str, Any]], isa: str) -> list[dict[str, Any]]:
    goals = GOALS.get(isa, {})
    lines = []
    print(f"\n{'':10} {'geometric mean':>14} {'goal':>6} {'worst':>7} {'goal':>6}")
    for dtype, direction in itertools.product(("fp32", "bf16"), ("fwd", "bwd")):
        ratios = [p[direction]["ratio"] for p in points if p["dtype"] == dtype]
        mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
        goal = goals.get((dtype, direction), (None, None))
        shown = ["" if g is None else f"{g:.2f}" for g in goal]
        print(f"{dtype} {direction:5} {mean:14.2f} {shown[0]:>6} {min(ratios):7.2f} {shown[1]:>6}")
        lines.append(
            {
                "dtype": dtype,
                "direction": direction,
                "geometric_mean": mean,
                "worst": min(ratios),
                "goal": goal,
            }
        )
    return lines


def peaks(most: int) -> dict[str, dict[int, float]]:
    """GFLOP/s of the arithmetic units alone by dtype and number of threads (bench/cpu_peak.cpp, where it is built):
    what the machine gives at most. The CPUs of a virtual machine may be two to a core."""
    program = Path(os.environ.get("STROBE_CPU_PEAK", ROOT / "build" / "release" / "bin" / "cpu_peak"))
    found: dict[str, dict[int, float]] = {}
    for line in command(str(program), str(most)).splitlines():
        words = line.split()
        found.setdefault(words[0], {})[int(words[-6])] = 1000 * float(words[-4])
    return found


def scaling(most: int, budget: float) -> list[dict[str, Any]]:
    """Speed of one launch (8192 tokens, 8 heads) on 1, 2, 4, ... threads, into arrays that are there: new ones would
    add the kernel's page faults, one after the other. Efficiency: of as many times one thread's speed; beside it, of
    as many times one thread's speed as the arithmetic units have of theirs."""
    import strobe
    import torch

    rows = []
    peak = peaks(most)
    print(f"\n{'dtype':8} {'direction':9} {'threads':>7} {'GFLOP/s':>8} {'efficiency':>10} {'units':>6} {'of theirs':>10}")
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, dout = (torch.randn(1, 8192, HEADS, 64).to(dtype) for _ in range(4))
        out, lse = strobe.attention(q, k, v, return_lse=True)
        grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        units = peak.get({torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype], {})
        flop = 4.0 * 8192 * 8192 * 64 * HEADS
        calls: dict[str, tuple[Callable[..., Any], float]] = {
            "fwd": (functools.partial(strobe.attention, q, k, v, out=out), flop),
            "bwd": (functools.partial(strobe.attention_backward, dout, q, k, v, out, lse, grads=grads), 2.5 * flop),
        }
        for direction, (call, work) in calls.items():
            base, threads = 0.0, 1
            while threads <= most:
                launch = functools.partial(call, threads=threads)
                speed = work / interleaved({"strobe": launch}, budget)["strobe"] * 1e-9
                base = base or speed
                row = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "direction": direction,
                    "threads": threads,
                    "gflops": speed,
                    "efficiency": speed / base / threads,
                }
                if threads in units:
                    row["units_gflops"] = units[threads]
                    row["units_efficiency"] = units[threads] / units[1] / threads
                    row["of_units"] = row["efficiency"] / row["units_efficiency"]
                rows.append(row)
                print(f"{row['dtype']:8} {direction:9} {threads:7} {speed:8.0f} {row['efficiency']:10.0%} "
                      f"{row.get('units_efficiency', math.nan):6.0%} {row.get('of_units', math.nan):10.0%}", flush=True)  # fmt: skip
                threads *= 2
    return rows


def memory() -> dict[str, Any]:
    """Extra memory of one head of 131,072 tokens, head_dim 64: the workspace that the plan asks for."""
    import strobe
    import torch

    q = torch.empty(1, 131072, 1, 64, dtype=torch.bfloat16)
    rows: dict[str, Any] = {}
    for direction in ("forward", "backward"):
        text = strobe.plan(q, q, q, backward=direction == "backward", threads=2)
        line = next(x for x in text.splitlines() if x.startswith("workspace"))
        rows[direction] = int(line.split()[1])
        print(f"131,072 tokens, {direction}: {rows[direction] / 1e6:.1f} MB of workspace")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=float, default=3.0, help="seconds per point and direction")
    parser.add_argument("--quick", action="store_true", help="short lengths only")
    parser.add_argument("--scaling", type=int, default=0, metavar="N", help="1 to N threads")
    parser.add_argument("--no-grid", action="store_true")
    parser.add_argument("--decode", action="store_true", help="one query on long KV caches, and nothing else")
    parser.add_argument("--random", action="store_true", help="random shapes, and nothing else")
    parser.add_argument("--seed", type=int, default=0, help="of --random: which shapes")
    parser.add_argument("--count", type=int, default=400, help="of --random: how many shapes")
    parser.add_argument("--kinds", default="", help=f"of --random: some of {','.join(cpu_random.KINDS)}")
    parser.add_argument("--commit", help="of the library, where there is no git to ask")
    parser.add_argument("--output", type=Path, help="JSON file; default: bench/results/cpu_<isa>.json")
    args = parser.parse_args()

    # Before either library starts its threads: both read it once.
    os.environ["OMP_NUM_THREADS"] = str(max(args.threads, args.scaling))
    import strobe
    import torch

    torch.set_num_threads(args.threads)
    info = strobe.info()
    isa = info.cpu_isa
    result: dict[str, Any] = {
        "cpu": info.cpu,
        "cores": os.cpu_count(),
        "isa": isa,
        "threads": args.threads,
        "compiler": info.compiler,
        "strobe": info.version,
        "commit": args.commit or command("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    print(", ".join(f"{k} {v}" for k, v in result.items()), "\n")
    part = "decode_" if args.decode else "random_" if args.random else ""
    if part:
        result["load_average"] = os.getloadavg()
    if args.decode:
        result["decode"] = cpu_decode.run(args.threads, args.budget)
    elif args.random:
        result["random"] = cpu_random.run(args)
    elif not args.no_grid:
        result["grid"] = grid(args)
        result["summary"] = summary(result["grid"], isa)
    if not part:
        result["workspace_131072"] = memory()
    if args.scaling:
        result["scaling"] = scaling(args.scaling, args.budget)
    path = args.output or ROOT / "bench" / "results" / f"cpu_{part}{isa}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
