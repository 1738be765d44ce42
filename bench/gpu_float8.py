"""Float8 attention beside bf16's, on one GPU.

    make gpu-bench ARGS="--sections float8"

GPU time alone, everybody in turns, L2 overwritten before each. Codes are made outside of the timed call. "error": RMS of out
less float64 over the unquantised q, k and v, over the RMS of that, of some rows of one head; "of codes": the same of exact attention over what the codes
stand for, which is what quantising alone costs. Peers that have float8 kernels are measured elsewhere, on the same shapes:
16k tokens, of 32k one sequence, 16 heads.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_timing import captured, capturing_stream, interleaved

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

TOKENS, HEADS = 16384, 16
LENGTHS, HEAD_DIMS = (512, 2048, 8192, 16384, 32768), (64, 128, 192, 256)
ROWS_CHECKED = 256


def quantised(x: Any) -> tuple[Any, Any]:
    """Codes, and the scale of each sequence's head."""
    import torch

    scale = x.float().abs().amax((1, 3)) / 448
    return (x.float() / scale[:, None, :, None]).clamp(-448, 448).to(
        torch.float8_e4m3fn
    ), scale


def exact(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Rows of one head at the end of the sequence, in float64: [rows, head_dim] against [keys, head_dim]."""
    import torch

    scores = q.double() @ k.double().T / math.sqrt(q.shape[1])
    if causal:
        ahead = (
            torch.arange(len(k), device=q.device)[None]
            > torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
        )
        scores = scores.masked_fill(ahead, -math.inf)
    return scores.softmax(-1) @ v.double()


def measure(
    seqlen: int, head_dim: int, causal: bool, args: Any, flush: Any
) -> dict[str, Any]:
    import strobe
    import torch

    batch = max(1, TOKENS // seqlen)
    shape = (batch, seqlen, HEADS, head_dim)
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    codes, scales = zip(*(quantised(x) for x in (q, k, v)), strict=True)
    given = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    out, out8 = torch.empty_like(q), torch.empty_like(q)
    calls = {
        "float8": lambda: strobe.attention(*codes, **given, causal=causal, out=out8),
        "bf16": lambda: strobe.attention(q, k, v, causal=causal, out=out),
    }
    point: dict[str, Any] = {
        "seqlen": seqlen,
        "head_dim": head_dim,
        "causal": causal,
        "batch": batch,
        "tflops": {},
        "not_captured": {},
    }
    calls["float8"]()
    point["kernel"] = strobe.why().splitlines()[0]
    rows = slice(seqlen - min(seqlen, ROWS_CHECKED), seqlen)
    heads = [x[-1, :, -1] for x in (q, k, v)]
    wanted = exact(heads[0][rows], *heads[1:], causal)
    coded = [
        c[-1, :, -1].double() * s[-1, -1].double()
        for c, s in zip(codes, scales, strict=True)
    ]

    def error(x: Any) -> float:
        return float(
            (x.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        )

    point["error"] = {
        "float8": error(out8[-1, rows, -1]),
        "of codes": error(exact(coded[0][rows], *coded[1:], causal)),
    }
    flops = (
        4
        * batch
        * HEADS
        * head_dim
        * (seqlen * (seqlen + 1) / 2 if causal else seqlen * seqlen)
    )
    for name, seconds in interleaved(
        captured(calls, point["not_captured"]), args.rounds, flush
    ).items():
        point["tflops"][name] = flops / seconds * 1e-12
    return point


def run(
    args: Any, flush: Any, end: float, clock: Callable[[], float]
) -> dict[str, Any]:
    """end: on the clock; no point begins after it."""
    points = []
    for head_dim in HEAD_DIMS:
        for seqlen in LENGTHS:
            for causal in (False, True):
                if clock() > end:
                    print(f"out of time before {seqlen} {head_dim}")
                    return {"points": points}
                with capturing_stream():
                    point = measure(seqlen, head_dim, causal, args, flush)
                points.append(point)
                cells = "  ".join(
                    f"{name} {rate:6.0f}" for name, rate in point["tflops"].items()
                )
                ratio = point["error"]["float8"] / point["error"]["of codes"]
                print(
                    f"{seqlen:6} {head_dim:3} {'causal' if causal else 'full  '}  {cells} TFLOP/s  error {point['error']['float8']:.4f} ({ratio:.3f} of codes')  {point['kernel']}",
                    flush=True,
                )
    return {"points": points}
