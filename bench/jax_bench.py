"""strobe.jax beside JAX's own attention: compiled programs on the same arrays, in one process, in turns.

    python bench/jax_bench.py                        on a CPU: beside JAX's XLA implementation
    make gpu-bench ARGS="--sections jax"             on a GPU: beside its cuDNN implementation too

"fwd" is a compiled forward; "both" a compiled gradient by q, k and v, of which the forward is a part. A round is several
calls, one after the other, and a wait for the last; the fastest round counts. TFLOP/s by 4 * seqlen^2 * head_dim * heads
* batch for a forward, halved when causal, and 3.5 times that for both.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# (batch, seqlen, heads, head_dim, causal)
SHAPES = {
    "cpu": [(1, 512, 8, 64, False), (1, 2048, 8, 64, True), (8, 197, 12, 64, False), (1, 1024, 4, 128, True)],
    "gpu": [
        *((16384 // n, n, 2048 // dim, dim, causal) for dim in (64, 128) for n in (512, 2048, 8192) for causal in (False, True)),
        (32, 197, 16, 64, False),
        (16, 128, 12, 64, False),
    ],
}


def rounds_of(calls: dict[str, Callable[[], Any]], rounds: int, seconds: float) -> dict[str, float]:
    """Seconds of a call, by name, at best. A round takes about `seconds` each."""
    import jax

    counts, best = {}, dict.fromkeys(calls, float("inf"))
    for name, call in calls.items():
        jax.block_until_ready(call())
        begin = time.perf_counter()
        jax.block_until_ready(call())
        counts[name] = max(1, min(100, int(seconds / (time.perf_counter() - begin))))
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(counts[name]):
                last = call()
            jax.block_until_ready(last)
            best[name] = min(best[name], (time.perf_counter() - begin) / counts[name])
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=[], help="default: bfloat16, on a CPU float32 too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.02, help="of a round")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others may be on this GPU
    try:
        import jax
    except ImportError:
        print("jax bench: skipped (no JAX)")
        return 0
    import jax.numpy as jnp
    import strobe.jax

    device = "gpu" if jax.default_backend() == "gpu" else "cpu"
    functions: dict[str, Any] = {"strobe": strobe.jax.attention}
    for name in ("cudnn", "xla") if device == "gpu" else ("xla",):
        functions[name] = functools.partial(jax.nn.dot_product_attention, implementation=name)
    points = []
    for dtype in args.dtypes or (["bfloat16"] if device == "gpu" else ["float32", "bfloat16"]):
        for batch, seqlen, heads, head_dim, causal in SHAPES[device]:
            shape = (3, batch, seqlen, heads, head_dim)
            q, k, v = jax.random.normal(jax.random.key(0), shape).astype(dtype)
            point: dict[str, Any] = {"dtype": dtype, "batch": batch, "seqlen": seqlen, "heads": heads, "head_dim": head_dim, "causal": causal}
            flop = 4.0 * seqlen**2 * head_dim * heads * batch * (0.5 if causal else 1.0)
            for what, factor in (("fwd", 1.0), ("both", 3.5)):
                calls = {}
                for name, function in functions.items():
                    def forward(*x: Any, function: Any = function, causal: bool = causal) -> Any:
                        return function(*x, is_causal=causal)

                    def loss(*x: Any, forward: Any = forward) -> Any:
                        return forward(*x).astype(jnp.float32).sum()

                    compiled = jax.jit(forward if what == "fwd" else jax.grad(loss, argnums=(0, 1, 2)))
                    try:
                        jax.block_until_ready(compiled(q, k, v))
                    except Exception as e:  # a peer that declines, or has too little memory
                        if name == "strobe":
                            raise
                        point.setdefault("missing", {})[f"{what} {name}"] = f"{type(e).__name__}: {e}".splitlines()[0][:120]
                        continue
                    calls[name] = functools.partial(compiled, q, k, v)
                times = rounds_of(calls, args.rounds, args.seconds)
                point[what] = {name: factor * flop / t * 1e-12 for name, t in times.items()}
            points.append(point)
            cells = [
                f"{what} {point[what]['strobe']:8.3f}"
                + "".join(f"  {name} {x:8.3f} ({point[what]['strobe'] / x:.2f})" for name, x in point[what].items() if name != "strobe")
                for what in ("fwd", "both")
            ]
            label = f"{dtype} {batch} x {seqlen} x {heads} x {head_dim} {'causal' if causal else 'full'}"
            print(f"{label:<36} " + "  |  ".join(cells), flush=True)
    if args.output:
        args.output.write_text(json.dumps({"jax": jax.__version__, "device": str(jax.devices()[0].device_kind), "points": points}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
