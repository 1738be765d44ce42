"""`make bench ARGS="--decode"`: one query a sequence against a long KV cache, beside a plain read of as many bytes by as
many threads (bench/streaming_read.cpp) and beside PyTorch's scaled_dot_product_attention, in turns, in one process.

PyTorch gets its best of enable_gqa and of keys that were repeated for all heads before the clock starts. The layouts
are "rows", [batch, seqlen, heads, head_dim] in memory, "heads", [batch, heads, seqlen, head_dim], and, for Strobe alone,
pages of 16 rows in a random order.

Two figures compare Strobe with the read. `of_read` is the least time of the read over the least time of Strobe. On a
shared machine one turn of the read in a moment that no turn of Strobe had can spoil it. `of_read_paired` is the median,
over all turns of Strobe, of the time of the read just before over the time of that turn. Where other work has the
CPUs, the read's threads wait for each other longer than Strobe's, and that median flatters Strobe: both have to hold.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decode_calls import Decode, paged

ROOT = Path(__file__).resolve().parent.parent
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
SHAPES = ((16, 4096), (1, 32768))  # batch, keys
PAIRS = 32  # turns of the read and of Strobe in a round
GOALS = {"of_read": 0.85, "of_read_paired": 0.85, "over_torch": 2.5}


def reader() -> Callable[[Any, int], None]:
    default = ROOT / "build" / "release" / "bin" / "libstreaming_read.so"
    library = ctypes.CDLL(os.environ.get("STROBE_STREAMING_READ", str(default)))
    library.streaming_read.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def read(tensor: Any, threads: int) -> None:
        library.streaming_read(tensor.data_ptr(), tensor.numel() * tensor.element_size(), threads)

    return read


def in_turns(calls: dict[str, Callable[[], Any]], budget: float) -> dict[str, list[float]]:
    """Seconds of each call, taken in turns: at least 4 rounds, more while `budget` lasts. In a round a peer has one
    turn, the read and Strobe PAIRS, each read just before a turn of Strobe: where others use the machine too, quiet
    moments are rare, and the peers' turns are what takes long."""
    for call in calls.values():
        call()
    few = [name for name in calls if not name.startswith("torch")]
    turns = [*few * PAIRS, *(name for name in calls if name not in few)]
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    while len(times[few[0]]) < 4 * PAIRS or time.perf_counter() - begin < budget:
        for name, call in ((name, calls[name]) for name in turns):
            time.sleep(0.01)  # the threads of the library before, which spin for a while, fall asleep
            t = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - t)
    return times


def measure(dtype: str, batch: int, seqlen: int, layout: str, threads: int, budget: float) -> dict[str, Any]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    generator = torch.Generator().manual_seed(batch + seqlen)
    shape = (batch, HEADS_KV, seqlen, HEAD_DIM) if layout == "heads" else (batch, seqlen, HEADS_KV, HEAD_DIM)
    k, v = (torch.randn(shape, generator=generator).to(kind) for _ in range(2))
    memory = (k, v)
    if layout == "heads":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    q = torch.randn(batch, 1, HEADS, HEAD_DIM, generator=generator).to(kind)
    out = torch.empty_like(q)
    used = torch.full((batch,), seqlen, dtype=torch.int32)
    read = reader()
    calls: dict[str, Callable[[], Any]] = {}
    if layout == "pages":
        (k_pool, table), (v_pool, _) = paged(k, 16), paged(v, 16)
        launch = Decode(q, k_pool, v_pool, used, out, table, threads=threads)
        memory = (k_pool, v_pool)
    else:
        launch = Decode(q, k, v, used, out, threads=threads)
    calls["read"] = lambda: [read(tensor, threads) for tensor in memory]
    calls["strobe"] = launch.run
    peers = [x.transpose(1, 2) for x in (q, k, v)]
    if layout != "pages":
        repeated = [peers[0], *(x.repeat_interleave(HEADS // HEADS_KV, dim=1) for x in peers[1:])]
        calls["torch_gqa"] = lambda: sdpa(*peers, enable_gqa=True)
        calls["torch_repeated"] = lambda: sdpa(*repeated)
    wanted = sdpa(*(x.float() for x in peers), enable_gqa=True).transpose(1, 2)
    launch.run()
    error = (out.float() - wanted).abs().max().item()
    if not error < (1e-4 if dtype == "fp32" else 0.02):
        sys.exit(f"Strobe and PyTorch differ by {error:g}: not worth timing")
    with torch.no_grad():
        times = in_turns(calls, budget)
    best = {name: min(t) for name, t in times.items()}
    size = sum(t.numel() * t.element_size() for t in memory)
    point: dict[str, Any] = {
        "dtype": dtype, "batch": batch, "seqlen_k": seqlen, "heads": HEADS, "heads_kv": HEADS_KV, "head_dim": HEAD_DIM,
        "layout": layout, "kernel": launch.kernel, "threads": threads, "bytes": size,
        "best_seconds": best, "median_seconds": {name: statistics.median(t) for name, t in times.items()},
        "runs": len(times["strobe"]), "read_gbytes_per_second": size / best["read"] * 1e-9,
        "of_read": best["read"] / best["strobe"],
        "of_read_paired": statistics.median(r / s for r, s in zip(times["read"], times["strobe"], strict=True)),
    }  # fmt: skip
    if layout != "pages":
        point["over_torch"] = min(best["torch_gqa"], best["torch_repeated"]) / best["strobe"]
    return point


def run(threads: int, budget: float) -> dict[str, Any]:
    points = []
    print(f"{'dtype':5} {'batch':>5} {'keys':>6} {'layout':6} {'MB':>5}   {'Strobe':>8} {'read':>8} {'gqa':>8} {'repeated':>8} us"
          f"   {'of read':>7} {'paired':>7} {'over PyTorch':>12}")  # fmt: skip
    for dtype, (batch, seqlen), layout in itertools.product(("bf16", "fp32"), SHAPES, ("rows", "heads", "pages")):
        p = measure(dtype, batch, seqlen, layout, threads, budget)
        points.append(p)
        best = [p["best_seconds"].get(n) for n in ("strobe", "read", "torch_gqa", "torch_repeated")]
        cells = " ".join(f"{1e6 * t:8.1f}" if t else f"{'-':>8}" for t in best)
        print(f"{dtype:5} {batch:5} {seqlen:6} {layout:6} {p['bytes'] / 1e6:5.0f}   {cells}      {p['of_read']:7.2f} "
              f"{p['of_read_paired']:7.2f} {p.get('over_torch', float('nan')):12.2f}", flush=True)  # fmt: skip
    worst = {name: min(p[name] for p in points if name in p and p["layout"] != "pages") for name in GOALS}
    for name, goal in GOALS.items():
        print(f"worst {name}: {worst[name]:.2f} (goal {goal})")
    return {"points": points, "worst": worst, "goals": GOALS}
