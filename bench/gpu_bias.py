"""A bias of every pair of a query and a key, in bf16 and shared by the batch, on one GPU: Strobe beside PyTorch's memory-efficient
kernel and cuDNN's through PyTorch, forward, and backward with the gradient of the bias; and one query over a cache, with a bias
of each head and without.

    make gpu-bench ARGS="--sections bias"

Everybody is timed as in gpu_bench.py: GPU time in CUDA graphs, in turns, L2 overwritten. TFLOP/s are those of attention
without a bias. "floor_ms" is what no kernel can go below: "compute", the products at the 989 TFLOP/s of an H100's data sheet, and
"bytes", every tensor read or written once at 3 TB/s; "of_floor" is the time over the larger of the two. "difference": of the
results to the memory-efficient kernel's, over the largest of these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_timing import Calls, captured, capturing_stream, interleaved

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

BATCH, HEADS = 2, 16
LENGTHS, HEAD_DIMS = (2048, 8192), (64, 128)
MOST_FLOPS, MOST_BYTES = 989e12, 3e12  # a second
WORK = {"fwd": 4.0, "bwd": 10.0}  # FLOP of a pair and a column

# The forward call, and the backward call, whose last result is the gradient of the bias.
Pair = tuple[Callable[[], Any], Callable[[], Any]]


def floors(seqlen: int, head_dim: int, direction: str) -> dict[str, float]:
    """Milliseconds."""
    rows = BATCH * seqlen * HEADS
    # q, k, v and out; and besides them dout, dq, dk and dv.
    tensors, pairs = (4, 1) if direction == "fwd" else (8, 2)
    size = 2 * (tensors * rows * head_dim + pairs * HEADS * seqlen * seqlen)
    size += 4 * rows  # lse
    flop = WORK[direction] * rows * seqlen * head_dim
    return {"compute": flop / MOST_FLOPS * 1e3, "bytes": size / MOST_BYTES * 1e3}


def strobe_calls(t: dict[str, Any]) -> tuple[Pair, dict[str, str]]:
    """And which kernels they take."""
    import strobe

    q, k, v, dout, bias = (t[n] for n in ("q", "k", "v", "dout", "bias"))
    out, lse = strobe.attention(q, k, v, bias=bias, return_lse=True)
    kernels = {"fwd": strobe.why().splitlines()[0]}
    strobe.attention_backward(dout, q, k, v, out, lse, bias=bias, dbias=True)
    kernels["bwd"] = strobe.why().splitlines()[0]
    return (
        lambda: strobe.attention(q, k, v, bias=bias, out=out, return_lse=True)[0],
        lambda: strobe.attention_backward(dout, q, k, v, out, lse, bias=bias, dbias=True),
    ), kernels


def torch_forward(t: dict[str, Any], backend: Any) -> Callable[[], Any]:
    import torch
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    q, k, v = (t[n].transpose(1, 2) for n in "qkv")
    mask = t["bias"].expand(BATCH, -1, -1, -1)

    def forward() -> Any:
        with torch.no_grad(), sdpa_kernel(backend):
            return sdpa(q, k, v, attn_mask=mask).transpose(1, 2)

    return forward


def torch_backward(t: dict[str, Any], backend: Any) -> Callable[[], Any]:
    import torch
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    leaves = [t[n].detach().requires_grad_() for n in ("q", "k", "v", "bias")]
    with sdpa_kernel(backend):
        turned = (x.transpose(1, 2) for x in leaves[:3])
        out = sdpa(*turned, attn_mask=leaves[3].expand(BATCH, -1, -1, -1))
    dout = t["dout"].transpose(1, 2)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def difference(ours: Any, theirs: Any) -> float:
    """Head by head, since a gradient of a bias is gigabytes: the largest one over the largest of theirs."""
    heads = 1 if ours.shape[1] == HEADS else 2
    apart, largest = 0.0, 0.0
    for head in range(HEADS):
        mine, other = (x.select(heads, head).float() for x in (ours, theirs))
        apart = max(apart, float((mine - other).abs().max()))
        largest = max(largest, float(other.abs().max()))
    return apart / largest


def measure(seqlen: int, head_dim: int, args: Any, flush: Any) -> dict[str, Any]:
    import torch
    from torch.nn.attention import SDPBackend

    torch.manual_seed(1)
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    t = {n: torch.randn(BATCH, seqlen, HEADS, head_dim, **kind) for n in ("q", "k", "v", "dout")}
    t["bias"] = torch.randn(1, HEADS, seqlen, seqlen, **kind)
    ours, kernels = strobe_calls(t)
    missing: dict[str, str] = {}
    point: dict[str, Any] = {
        "seqlen": seqlen, "head_dim": head_dim, "batch": BATCH, "heads": HEADS, "kernels": kernels, "missing": missing, "difference": {},
    }  # fmt: skip
    peers = {} if args.alone else {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    makers = {"fwd": torch_forward, "bwd": torch_backward}
    for number, (direction, make) in enumerate(makers.items()):
        if direction == "bwd" and args.forward_only:
            continue
        calls: Calls = {"strobe": ours[number]}
        for name, backend in peers.items():
            try:
                call = make(t, backend)
                call()
                calls[name] = call
            except Exception as e:  # noqa: BLE001 - a peer that takes no bias, or has no gradient for it
                missing[f"{name} {direction}"] = f"{type(e).__name__}: {e}".splitlines()[0][:120]
        if "efficient" in calls:
            mine, theirs = ours[number](), calls["efficient"]()
            if direction == "fwd":
                point["difference"]["out"] = difference(mine, theirs)
            else:
                point["difference"]["dbias"] = difference(mine[3], theirs[3])
            del mine, theirs
        refused: dict[str, str] = {}
        times = interleaved(captured(calls, refused), args.rounds, flush)
        missing |= {f"{name} {direction}": why for name, why in refused.items()}
        flop = WORK[direction] * BATCH * HEADS * seqlen * seqlen * head_dim
        floor = floors(seqlen, head_dim, direction)
        point[direction] = {name: flop / s * 1e-12 for name, s in times.items()}
        point[f"{direction}_ms"] = {name: s * 1e3 for name, s in times.items()}
        point[f"{direction}_floor_ms"] = floor
        point[f"{direction}_of_floor"] = {name: s * 1e3 / max(floor.values()) for name, s in times.items()}
    return point


def measure_cache(batch: int, keys: int, args: Any, flush: Any) -> dict[str, Any]:
    """One query over keys in pages of 64, 32 query heads and 8 key heads of 128: GPU time with a bias and without."""
    import strobe
    import torch

    torch.manual_seed(1)
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    pages = batch * keys // 64
    k, v = torch.randn(2, pages, 64, 8, 128, **kind)
    q = torch.randn(batch, 1, 32, 128, **kind)
    more = {
        "block_table": torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, -1),
        "seqused_k": torch.full((batch,), keys, dtype=torch.int32, device="cuda"),
    }
    bias = torch.randn(1, 32, 1, keys, **kind)
    calls: Calls = {
        "with": lambda: strobe.attention_with_kvcache(q, k, v, bias=bias, **more),
        "without": lambda: strobe.attention_with_kvcache(q, k, v, **more),
    }
    times = interleaved(captured(calls, {}), args.rounds, flush)
    return {"batch": batch, "keys": keys, "ms": {name: s * 1e3 for name, s in times.items()}}


def run(args: Any, flush: Any, end: float, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """end: on the clock; no point begins after it."""
    import torch

    points = []
    for batch, keys in ((64, 8192), (16, 4096), (1, 1024)):
        if clock() > end:
            break
        with capturing_stream():
            points.append({"cache": measure_cache(batch, keys, args, flush)})
        torch.cuda.empty_cache()
        ms = points[-1]["cache"]["ms"]
        print(f"bias over a cache {batch:3} x {keys:5}  {ms['with']:.4f} ms, {ms['with'] / ms['without']:.2f} of without", flush=True)
    for head_dim in HEAD_DIMS:
        for seqlen in LENGTHS:
            if clock() > end:
                print(f"out of time before {seqlen} {head_dim}")
                return points
            with capturing_stream():
                point = measure(seqlen, head_dim, args, flush)
            torch.cuda.empty_cache()
            points.append(point)
            cells = []
            for direction in (d for d in WORK if d in point):
                ms = point[f"{direction}_ms"]
                mine = f"{direction} {ms['strobe']:7.3f} ms {point[direction]['strobe']:4.0f}, {point[f'{direction}_of_floor']['strobe']:.1f} of the floor"
                cells.append(mine + "".join(f"  {n} {x:7.3f} ({x / ms['strobe']:.2f})" for n, x in ms.items() if n != "strobe"))
            said = "".join(f"  {name} differs by {x:.2g}" for name, x in point["difference"].items())
            declined = "".join(f"  {name}: {why}" for name, why in point["missing"].items())
            print(f"bias {seqlen:5} {head_dim:3}  " + "  |  ".join(cells) + said + declined, flush=True)
    return points
