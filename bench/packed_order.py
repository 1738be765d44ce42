"""Packed sequences of different lengths: what it is worth to hand out the longest of 32 first (STROBE_ORDER_BY_VISITS).

    python bench/packed_order.py                       simulated: tiles on 132 multiprocessors
    python bench/packed_order.py PLAIN.so VISITS.so    both builds of the library on a Hopper GPU, in turns: 40 seconds

    for visits in 0 1; do
      scripts/build.sh cuda -DSTROBE_CUDA_ARCHS=90 '-DSTROBE_CUDA_KERNELS=forward_sm90_bf16_(64|128)_' \\
          "-DCMAKE_CUDA_FLAGS=-DSTROBE_ORDER_BY_VISITS=$visits" "-DCMAKE_CXX_FLAGS=-DSTROBE_ORDER_BY_VISITS=$visits" -- strobe
      cp build/cuda/libstrobe.so build/order-$visits.so
    done

Printed is how much longer the plain order takes, median of a few draws of the lengths, which are lognormal. (The order changes
no bit of the results, which is looked at.)
"""

from __future__ import annotations

import heapq
import math
import os
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MULTIPROCESSORS, TILE, BLOCK, AT_ONCE = 132, 128, 128, 32
DRAWS = 5


def lognormal(count: int) -> Callable[[random.Random], list[int]]:
    return lambda rng: [int(min(8192, max(100, rng.lognormvariate(math.log(900), 1)))) for _ in range(count)]


# The last are short throughout: there is nothing to gain, and the search for a tile shows.
BATCHES = {
    "16 sequences": lognormal(16),
    "32 sequences": lognormal(32),
    "64 sequences": lognormal(64),
    "31 of 200, then one of 8192": lambda rng: [200] * 31 + [8192],
    "64 of 128 to 512": lambda rng: [rng.randint(128, 512) for _ in range(64)],
    "256 of 16 to 128": lambda rng: [rng.randint(16, 128) for _ in range(256)],
}


def makespan(lengths: list[int], heads: int, causal: bool, by_visits: bool) -> float:
    """In steps of a block of keys: each tile goes to the multiprocessor that is free first, and takes one step more
    than it has blocks."""
    order = []
    for first in range(0, len(lengths), AT_ONCE):
        some = lengths[first : first + AT_ONCE]
        order += sorted(some, key=lambda n: -math.ceil(n / BLOCK)) if by_visits else some
    free = [0.0] * MULTIPROCESSORS
    for n in order:
        for tile in reversed(range(math.ceil(n / TILE))):
            keys = min(n, (tile + 1) * TILE) if causal else n
            for _ in range(heads):
                heapq.heapreplace(free, free[0] + 1 + math.ceil(keys / BLOCK))
    return max(free)


def simulated(lengths: list[int], heads: int, causal: bool, _head_dim: int) -> float:
    return makespan(lengths, heads, causal, False) / makespan(lengths, heads, causal, True)


def on_gpu(libraries: list[str]) -> Callable[[list[int], int, bool, int], float]:
    """The same by the clock: median of 15 launches of each build, in turns, L2 overwritten before each."""
    sys.path[:0] = [str(ROOT / "tests/gpu")]
    import strobe_torch as st
    import torch
    from gpu_timing import captured, capturing_stream, interleaved

    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")

    def ratio(lengths: list[int], heads: int, causal: bool, head_dim: int) -> float:
        case = st.Case(heads=heads, head_dim=head_dim, causal=causal, lengths_q=lengths, lengths_k=lengths)
        q, k, v = (torch.randn(case.shape(x), device="cuda", dtype=case.dtype) for x in "qkv")
        outs = [torch.empty(case.shape("out"), device="cuda", dtype=case.dtype) for _ in libraries]
        with capturing_stream():
            calls: dict[str, Callable[[], Any]] = {}
            for path, out in zip(libraries, outs, strict=True):
                os.environ["STROBE_LIBRARY"] = path
                st.lib._load.cache_clear()
                launch, forward = st.Forward(case, q, k, v, out), st.lib.forward
                assert launch.kernel == "cuda_sm90", launch.kernel

                def call(launch: Any = launch, forward: Any = forward) -> None:
                    assert forward(launch.address, launch.args) == 0

                calls[path] = call
            seconds = interleaved(captured(calls, {}), 15, flush)
        assert torch.equal(*outs)
        return seconds[libraries[0]] / seconds[libraries[1]]

    return ratio


def main() -> int:
    libraries = sys.argv[1:]
    if len(libraries) not in (0, 2):
        print(__doc__)
        return 2
    ratio = on_gpu(libraries) if libraries else simulated
    print(f"{'sequences':<28} {'heads':>5} {'head_dim':>8}   causal     full")
    for name, draw in BATCHES.items():
        for heads in (8, 16, 32):
            for head_dim in (64, 128) if libraries else (128,):
                gains = [
                    statistics.median(ratio(draw(random.Random(seed)), heads, causal, head_dim) for seed in range(DRAWS)) - 1
                    for causal in (True, False)
                ]
                print(f"{name:<28} {heads:>5} {head_dim:>8} " + " ".join(f"{100 * x:6.1f} %" for x in gains), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
