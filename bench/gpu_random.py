"""Shapes that nobody chose, on one GPU: Strobe's flash_attn_func over the faster of cuDNN and FlashAttention-2, both through
PyTorch, forward and backward.

    make gpu-bench ARGS="--sections random --seed 3"                  400 shapes in some minutes
    make gpu-bench ARGS="--sections random --kinds few --count 51"    of some kinds alone
    STROBE_CUDA_ROW=none ... --kinds few --output bench/results/whole.json    keys are never divided

A seed gives the same shapes on every machine. Their kinds: "train" (as many keys as queries), "cross" (as many as there
happen to be), "few" (1 to 64 queries, up to 60,000 keys; forward alone, as in decoding), "many" (short sequences, large batches).
Everybody is timed as in gpu_bench.py: GPU time in CUDA graphs, in turns, L2 overwritten. What has less than 0.9 of the best peer's speed is
timed once more, with more rounds, and the second figure counts; the first stands beside it.
`make plots` draws a result: the ratio against FLOP, a colour for each kind.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

from gpu_timing import Calls, captured, capturing_stream, interleaved
from random_shapes import (
    DIRECTIONS,
    DOUBTFUL,
    Shape,
    length,
    ratio,
    say,
    summarise,
    wanted_kinds,
)

KINDS = ("train", "cross", "few", "many")
HEAD_DIMS = (64, 64, 128, 128, 128, 96, 80, 256, 192, 32, 40, 48, 72, 112, 160)
HEADS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 64)
GROUPS = (1, 1, 2, 4, 8)
MOST_FLOP, MOST_VALUES = 4e12, 1.5e9  # of a forward pass
LEAST_FLOP, LEAST_VALUES = 2e8, 1e6  # less of both is a launch and nothing else
ROUNDS = 7
FORWARD_ONLY = ("few",)


def shapes(seed: int) -> Iterator[Shape]:
    """Without end. How many numbers each shape draws, and in which order, is part of what a seed means."""
    source = random.Random(seed)
    while True:
        head_dim = source.choice(HEAD_DIMS)
        kind = source.choice(("train", *KINDS))
        heads = source.choice(HEADS)
        heads_kv = heads // source.choice([g for g in GROUPS if heads % g == 0])
        if kind == "train":
            seqlen_q = seqlen_k = length(source, 64, 12000)
        elif kind == "cross":
            seqlen_q, seqlen_k = length(source, 32, 8000), length(source, 16, 8000)
        elif kind == "few":
            seqlen_q, seqlen_k = length(source, 1, 64), length(source, 128, 60000)
        else:
            seqlen_q = seqlen_k = length(source, 16, 300)
        batch = max(1, min(512, length(source, 32, 512) if kind == "many" else length(source, 1, 64)))
        shape = Shape(kind, batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, causal=False, dtype="")
        if shape.flop > MOST_FLOP or shape.values > MOST_VALUES:
            continue
        if shape.flop < LEAST_FLOP and shape.values < LEAST_VALUES:
            continue
        causal = seqlen_q == seqlen_k and source.random() < 0.5
        yield shape._replace(causal=causal, dtype=source.choice(("bf16", "bf16", "fp16")))


def contenders(shape: Shape) -> tuple[Calls, Calls]:
    """Forward and backward of everybody who takes the shape."""
    import torch
    from strobe.flash_attn import flash_attn_func
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[shape.dtype]

    def rows(n: int, heads: int) -> Any:
        return torch.randn(shape.batch, n, heads, shape.head_dim, device="cuda", dtype=kind)

    torch.manual_seed(1)
    q, dout = rows(shape.seqlen_q, shape.heads), rows(shape.seqlen_q, shape.heads)
    k, v = rows(shape.seqlen_k, shape.heads_kv), rows(shape.seqlen_k, shape.heads_kv)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def strobe_forward() -> Any:
        return flash_attn_func(q, k, v, causal=shape.causal)

    def peer_forward(backend: Any) -> Any:
        with sdpa_kernel(backend):
            turned = (x.transpose(1, 2) for x in leaves)
            out = sdpa(*turned, is_causal=shape.causal, enable_gqa=shape.heads != shape.heads_kv)
        return out.transpose(1, 2)

    makers = {
        "strobe": strobe_forward,
        "cudnn": lambda: peer_forward(SDPBackend.CUDNN_ATTENTION),
        "fa2": lambda: peer_forward(SDPBackend.FLASH_ATTENTION),
    }
    forward: Calls = {}
    backward: Calls = {}
    for name, make in makers.items():
        try:
            out = make()
            forward[name] = torch.no_grad()(make)
            if shape.kind in FORWARD_ONLY:
                continue
            torch.autograd.grad(out, leaves, dout, retain_graph=True)
            backward[name] = lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True)
        except RuntimeError:  # a peer that does not take the shape, or has no backward pass for it
            if name == "strobe":
                raise
    return forward, backward


def point_of(shape: Shape, flush: Any, *, forward_only: bool) -> dict[str, Any]:
    point: dict[str, Any] = {**shape._asdict(), "flop": shape.flop, "bytes": 2 * shape.values, "not_captured": {}}
    both = dict(zip(DIRECTIONS, contenders(shape), strict=True))
    for direction, calls in both.items():
        if direction == "bwd" and (forward_only or not calls):
            continue
        replays = captured(calls, point["not_captured"])
        times = interleaved(replays, ROUNDS, flush)
        found = ratio(times)
        if found is not None and found < DOUBTFUL:
            point[f"{direction}_ratio_first"] = found
            times = interleaved(replays, 3 * ROUNDS, flush)
            found = ratio(times)
        point[f"{direction}_us"] = {name: t * 1e6 for name, t in times.items()}
        point[f"{direction}_ratio"] = found
    return point


def run(args: Any, flush: Any, end: float) -> dict[str, Any]:
    import torch

    wanted = wanted_kinds(args.kinds, KINDS)
    points = []
    for shape in itertools.islice((s for s in shapes(args.seed) if s.kind in wanted), args.count):
        if time.monotonic() > end:
            print(f"out of time after {len(points)} shapes")
            break
        with capturing_stream():
            point = point_of(shape, flush, forward_only=args.forward_only)
        torch.cuda.empty_cache()
        points.append(point)
        say(shape, point)
    return {"seed": args.seed, "points": points, "summary": summarise(points, KINDS)}
