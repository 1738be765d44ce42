"""Shapes that nobody chose, on this CPU: Strobe's flash_attn_func beside PyTorch's scaled_dot_product_attention, forward and
backward.

    make bench ARGS="--random --seed 3"                        400 shapes in a quarter of an hour
    make bench ARGS="--random --kinds few,decode --count 50"   of some kinds alone

A seed gives the same shapes on every machine. Their kinds: "train" (as many keys as queries), "cross" (as many as there
happen to be), "few" (2 to 64 queries, up to 16,000 keys), "many" (short sequences, large batches), "decode" (one query, up to
30,000 keys). Both are timed in turns, and the least time counts: on a machine that others use too, that is what comes
back. What has less than 0.9 of PyTorch's speed is timed once more, with more rounds, and the second figure counts; the first stands
beside it. `make plots` draws a result.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

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

KINDS = ("train", "cross", "few", "many", "decode")
HEAD_DIMS = (64, 64, 128, 128, 96, 80, 256, 32, 40, 48, 16)
HEADS = (1, 2, 4, 8, 12, 16, 32)
GROUPS = (1, 1, 4)
MOST_FLOP, MOST_VALUES = 3e10, 2.5e8  # of a forward pass
LONG_FLOP = 3e9
FORWARD_ONLY = ("few", "decode")

Calls = dict[str, Callable[[], Any]]


def shapes(seed: int) -> Iterator[Shape]:
    """Without end. How many numbers each shape draws, and in which order, is part of what a seed means."""
    source = random.Random(seed)
    while True:
        head_dim = source.choice(HEAD_DIMS)
        kind = source.choice(KINDS)
        heads = source.choice(HEADS)
        heads_kv = heads // source.choice([g for g in GROUPS if heads % g == 0])
        if kind == "train":
            seqlen_q = seqlen_k = length(source, 32, 3000)
        elif kind == "cross":
            seqlen_q, seqlen_k = length(source, 8, 2000), length(source, 8, 2000)
        elif kind == "few":
            seqlen_q, seqlen_k = length(source, 2, 64), length(source, 64, 16000)
        elif kind == "decode":
            seqlen_q, seqlen_k = 1, length(source, 16, 30000)
        else:
            seqlen_q = seqlen_k = length(source, 4, 128)
        batch = length(source, 16, 256) if kind == "many" else length(source, 1, 16)
        shape = Shape(kind, batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, causal=False, dtype="")
        if shape.flop > MOST_FLOP or shape.values > MOST_VALUES:
            continue
        dtype = source.choice(("fp32", "bf16"))
        yield shape._replace(causal=seqlen_q == seqlen_k and source.random() < 0.5, dtype=dtype)


def least(calls: Calls, rounds: int) -> dict[str, float]:
    """Microseconds of each call, taken in turns, after one that does not count."""
    times = dict.fromkeys(calls, float("inf"))
    for turn in range(rounds + 1):
        for name, call in calls.items():
            time.sleep(0.002)  # the other library's threads, which spin for a while, fall asleep
            begin = time.perf_counter()
            call()
            if turn:
                times[name] = min(times[name], 1e6 * (time.perf_counter() - begin))
    return times


def contenders(shape: Shape) -> dict[str, Calls]:
    """By direction, of both."""
    import torch
    from strobe.flash_attn import flash_attn_func
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[shape.dtype]

    def rows(n: int, heads: int) -> Any:
        return torch.randn(shape.batch, n, heads, shape.head_dim, dtype=kind)

    torch.manual_seed(1)
    q, dout = rows(shape.seqlen_q, shape.heads), rows(shape.seqlen_q, shape.heads)
    k, v = rows(shape.seqlen_k, shape.heads_kv), rows(shape.seqlen_k, shape.heads_kv)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def strobe_forward() -> Any:
        return flash_attn_func(q, k, v, causal=shape.causal)

    def torch_forward() -> Any:
        turned = (x.transpose(1, 2) for x in leaves)
        return sdpa(*turned, is_causal=shape.causal, enable_gqa=shape.heads != shape.heads_kv).transpose(1, 2)

    makers = {"strobe": strobe_forward, "torch": torch_forward}
    found: dict[str, Calls] = {"fwd": {name: torch.no_grad()(make) for name, make in makers.items()}}
    if shape.kind not in FORWARD_ONLY:
        outs = {name: make() for name, make in makers.items()}
        found["bwd"] = {
            name: lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True) for name, out in outs.items()
        }
    return found


def point_of(shape: Shape) -> dict[str, Any]:
    point: dict[str, Any] = {**shape._asdict(), "flop": shape.flop}
    rounds = 3 if shape.flop > LONG_FLOP else 9
    calls = contenders(shape)
    for direction in (d for d in DIRECTIONS if d in calls):
        times = least(calls[direction], rounds)
        found = ratio(times)
        if found is not None and found < DOUBTFUL:
            point[f"{direction}_ratio_first"] = found
            times = least(calls[direction], 3 * rounds)
            found = ratio(times)
        point[f"{direction}_us"], point[f"{direction}_ratio"] = times, found
    return point


def run(args: Any) -> dict[str, Any]:
    wanted = wanted_kinds(args.kinds or ",".join(KINDS), KINDS)
    points = []
    for shape in itertools.islice((s for s in shapes(args.seed) if s.kind in wanted), args.count):
        points.append(point_of(shape))
        say(shape, points[-1])
    return {"seed": args.seed, "points": points, "summary": summarise(points, KINDS)}
