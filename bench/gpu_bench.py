"""Strobe and its peers on one GPU: same tensors, same process, in turns, L2 flushed, median.

    make gpu-bench                                                      every section: about 20 minutes
    make gpu-bench ARGS="--sections grid --head-dims 128"               a slice of the grid
    make gpu-bench ARGS="--sections gqa,varlen,host --seconds 540"      some sections; stops in time
    python bench/gpu_bench.py --peers ../shared/peers/h200_bf16.csv     also the best known peer

Peers of the grid are PyTorch's scaled_dot_product_attention back ends (FlashAttention-2, cuDNN,
memory-efficient; math up to 2k tokens) and the package flash_attn, versions 2, 3 and 4, where it can
be imported. gpu_features.py has the other sections, gpu_decode.py that of KV caches, gpu_quantised.py that of quantised ones, gpu_random.py that of random shapes,
gpu_masks.py that of masks, gpu_bias.py that of biases, gpu_float8.py that of float8.
Everybody is timed alike. "fwd" and "bwd" are GPU time alone: each call is captured in a CUDA graph, and replays are
timed. "bwd_called" is torch.autograd.grad as a program calls it, for everybody, host included. "both" is forward and
backward one after the other, from the two GPU times; of "best", the best forward with the best backward.
The grid is the FlashAttention papers': 16k tokens, hidden size 2048. With --peers, "best" is the fastest of
this run's peers and of this run's cuDNN times the ratio of the best known kernel to cuDNN at that point. FLOP: forward
4 * seqlen^2 * head_dim * heads * batch, halved when causal; backward 2.5 times that.
The section "lengths" has the same for sequences as models have them: a tile or a few, batch 32, 16 heads.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gpu_bias
import gpu_decode
import gpu_features as features
import gpu_float8
import gpu_masks
import gpu_quantised
import gpu_random
from gpu_problems import HIDDEN, TOKENS, Problem
from gpu_timing import Calls, captured, capturing_stream, interleaved

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (77, 128, 197, 257, 384, 577, 1025, 1500)


class Shape(NamedTuple):
    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int


def grid_shapes(args: argparse.Namespace) -> list[Shape]:
    return [
        Shape(head_dim, causal, seqlen, max(1, TOKENS // seqlen), HIDDEN // head_dim)
        for head_dim, causal, seqlen in itertools.product(
            args.head_dims, (False, True), args.seqlens
        )
    ]


def length_shapes() -> list[Shape]:
    return [
        Shape(*point, batch=32, heads=16)
        for point in itertools.product((64, 80, 128), (False, True), LENGTHS)
    ]


def commit() -> str:
    try:
        words = ("git", "describe", "--always", "--dirty", "--abbrev=12")
        return subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def nvidia_smi(field: str) -> str:
    words = ("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "--id=0")
    try:
        return subprocess.run(
            words, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def measure(
    shape: Shape, args: argparse.Namespace, flush: Any, *, slow_peers: bool
) -> dict[str, Any]:
    import strobe
    import torch
    from strobe.flash_attn import flash_attn_func
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    head_dim, causal, seqlen, batch, heads = shape
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    torch.manual_seed(seqlen + head_dim)
    q, k, v, dout = (
        torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=kind)
        for _ in range(4)
    )
    peers = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if slow_peers:
        peers["efficient"] = SDPBackend.EFFICIENT_ATTENTION
        if seqlen <= 2048:
            peers["math"] = SDPBackend.MATH
    packages: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    problem = Problem("", head_dim, seqlen, causal, heads, heads, batch=batch)
    for version in (2, 3, 4):
        with contextlib.suppress(
            Exception
        ):  # not installed, or it cannot: gpu_features says why
            made = {"q": q, "k": k, "v": v, "dout": dout}
            calls_of = features.flash_attn_calls(problem, made, version)
            calls_of[0](), calls_of[1]()
            packages[f"flash_attn{version}"] = calls_of
    leaves = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
    grad = dout.transpose(1, 2)

    def forward(backend: Any) -> Any:
        with torch.no_grad(), sdpa_kernel(backend):
            return sdpa(*(t.detach() for t in leaves), is_causal=causal)

    out, _ = strobe.attention(q, k, v, causal=causal, return_lse=True)
    reference = forward(peers["fa2"]).transpose(1, 2)
    flop = 4.0 * batch * heads * seqlen * seqlen * head_dim * (0.5 if causal else 1.0)
    point: dict[str, Any] = {
        **shape._asdict(),
        "difference_to_fa2": (out.float() - reference.float()).abs().max().item(),
        "not_captured": {},
    }

    def record(key: str, calls: Calls, work: float) -> None:
        times = interleaved(calls, args.rounds, flush)
        point[key] = {name: work / t * 1e-12 for name, t in times.items()}

    calls: Calls = {
        "strobe": lambda: strobe.attention(
            q, k, v, causal=causal, out=out, return_lse=True
        )
    }
    for name, backend in peers.items():
        calls[name] = lambda b=backend: forward(b)
    calls |= {name: pair[0] for name, pair in packages.items()}
    record("fwd", captured(calls, point["not_captured"]), flop)
    if args.forward_only:
        return point
    mine = [t.detach().requires_grad_() for t in (q, k, v)]
    my_out = flash_attn_func(*mine, causal=causal)
    calls = {
        "strobe": lambda: torch.autograd.grad(my_out, mine, dout, retain_graph=True)
    }
    for name, backend in peers.items():
        with sdpa_kernel(backend):
            peer_out = sdpa(*leaves, is_causal=causal)
        calls[name] = lambda o=peer_out: torch.autograd.grad(
            o, leaves, grad, retain_graph=True
        )
    calls |= {name: pair[1] for name, pair in packages.items()}
    record("bwd", captured(calls, point["not_captured"]), 2.5 * flop)
    record("bwd_called", calls, 2.5 * flop)
    return point


def summarise(points: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    directions = ("fwd", "bwd", "bwd_called", "both")
    for direction, peer in itertools.product(
        directions, ("fa2", "cudnn", "flash_attn4", "best")
    ):
        ratios = [
            p[direction]["strobe"] / p[direction][peer]
            for p in points
            if direction in p and peer in p[direction]
        ]
        if ratios:
            mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
            result[f"{direction}_over_{peer}"] = {
                "geometric_mean": mean,
                "worst": min(ratios),
            }
            print(
                f"{direction} / {peer}: geometric mean {mean:.3f}, worst {min(ratios):.3f}"
            )
    return result


def both_of(point: dict[str, Any]) -> dict[str, float]:
    """TFLOP/s of forward and backward together, of everybody who has both."""
    forward, backward = point["fwd"], point["bwd"]
    return {
        n: (1 + 2.5) / (1 / forward[n] + 2.5 / backward[n])
        for n in forward
        if n in backward
    }


def run_shapes(
    shapes: list[Shape],
    args: argparse.Namespace,
    known: dict[tuple[int, int, int], dict[str, str]] | None,
    flush: Any,
    end: float,
) -> list[dict[str, Any]]:
    """known: best_over_cudnn of a shape; None: this run's peers alone make "best", the fast ones of PyTorch."""
    points = []
    for shape in shapes:
        if time.monotonic() > end:
            print(
                f"out of time before head_dim {shape.head_dim}, seqlen {shape.seqlen}"
            )
            break
        with capturing_stream():
            point = measure(shape, args, flush, slow_peers=known is not None)
        row = (known or {}).get((shape.head_dim, int(shape.causal), shape.seqlen))
        cells = []
        for direction in ("fwd", "bwd", "bwd_called", "both"):
            if direction == "both" and "bwd" in point:
                point["both"] = both_of(point)
            if direction not in point:
                continue
            speed = point[direction]
            peers = [x for name, x in speed.items() if name not in ("strobe", "best")]
            if row and direction in ("fwd", "bwd"):  # the table has GPU time alone
                peers.append(
                    speed["cudnn"] * float(row[f"best_over_cudnn_{direction}"])
                )
            if direction != "both" and (
                known is None or (row and direction != "bwd_called")
            ):
                speed["best"] = max(peers)
            cells.append(
                f"{direction} {speed['strobe']:4.0f}"
                + "".join(
                    f"  {name} {speed[name]:4.0f} ({speed['strobe'] / speed[name]:.2f})"
                    for name in ("fa2", "cudnn", "flash_attn3", "flash_attn4", "best")
                    if name in speed
                )
            )
        points.append(point)
        name = "causal" if shape.causal else "full"
        print(
            f"{shape.head_dim:3} {name:6} {shape.seqlen:5}  " + "  |  ".join(cells),
            flush=True,
        )
    return points


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument(
        "--seqlens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384]
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument(
        "--alone",
        action="store_true",
        help="no peers, in the sections of gpu_features.py",
    )
    parser.add_argument(
        "--sections",
        default=",".join(features.SECTIONS),
        help="of " + ", ".join(features.SECTIONS),
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="begin nothing new after so long",
    )
    parser.add_argument(
        "--peers", type=Path, help="CSV with best_over_cudnn_fwd and _bwd"
    )
    parser.add_argument(
        "--decode-peers",
        type=Path,
        help="CSV with FlashAttention-3's times on KV caches: gpu_decode.py",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the section random: which shapes"
    )
    parser.add_argument(
        "--count", type=int, default=400, help="of the section random: how many shapes"
    )
    parser.add_argument(
        "--kinds",
        default=",".join(gpu_random.KINDS),
        help="of the section random: some of them",
    )
    parser.add_argument("--commit", help="of the library, where there is no git to ask")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "bench" / "results" / "gpu.json"
    )
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("gpu bench: skipped (no PyTorch, which brings the peers)")
        return 0
    if not torch.cuda.is_available():
        print("gpu bench: skipped (no GPU)")
        return 0

    best: dict[tuple[int, int, int], dict[str, str]] = {}
    if args.peers and args.peers.exists():
        with args.peers.open() as file:
            for row in csv.DictReader(file):
                best[int(row["head_dim"]), int(row["causal"]), int(row["seqlen"])] = row
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "driver": nvidia_smi("driver_version"),
        "clocks": nvidia_smi("clocks.sm,clocks.mem,power.draw"),
        "torch": torch.__version__,
        "commit": args.commit or commit(),
        "cuda_arch": os.environ.get("STROBE_CUDA_ARCH", ""),  # what was forced
        "dtype": args.dtype,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(
            timespec="seconds"
        ),
    }
    flush = torch.empty(
        256 << 20, dtype=torch.uint8, device="cuda"
    )  # several times the L2
    end, sections = time.monotonic() + args.seconds, args.sections.split(",")
    if "grid" in sections:
        result["grid"] = run_shapes(grid_shapes(args), args, best, flush, end)
        result["summary"] = summarise(result["grid"])
    if "lengths" in sections:
        result["lengths"] = run_shapes(length_shapes(), args, None, flush, end)
        result["lengths_summary"] = summarise(result["lengths"])
    for section in sections:
        if section in ("grid", "lengths"):
            continue
        if time.monotonic() > end:
            print(f"out of time before section {section}")
            break
        try:
            if section in ("decode", "prefill"):
                result[section] = gpu_decode.run(
                    section, args, flush, end, time.monotonic
                )
            elif section == "quantised":
                result[section] = gpu_quantised.run(args, flush, end, time.monotonic)
            elif section == "random":
                result[section] = gpu_random.run(args, flush, end)
            elif section == "float8":
                result[section] = gpu_float8.run(args, flush, end, time.monotonic)
            elif section == "bias":
                result[section] = gpu_bias.run(args, flush, end, time.monotonic)
            elif section == "masks":
                result[section] = gpu_masks.run(args, flush)
            else:
                result[section] = features.run(section, args, flush)
        except Exception as e:  # noqa: BLE001 - the other sections are to run too
            result[section] = {"error": f"{type(e).__name__}: {e}"}
            print(f"{section}: FAILED: {type(e).__name__}: {e}", flush=True)
    result["clocks_after"] = nvidia_smi("clocks.sm,clocks.mem,power.draw")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
