"""Masks as data on one GPU: Strobe beside its own causal rule and no mask at all, and beside what PyTorch and cuDNN have for
any mask, forward and backward.

    make gpu-bench ARGS="--sections masks"                    8k tokens, batch 2, 16 heads, head_dim 64 and 128
    make gpu-bench ARGS="--sections masks --alone"            without FlexAttention and cuDNN, which compile a kernel a mask

Everybody is timed as in gpu_bench.py: GPU time in CUDA graphs, L2 overwritten; and all masks of a head_dim in turns, so that
one clock holds for all. TFLOP/s are of the pairs that a mask allows. "visits" are the blocks of 128 x 128 that hold some of
them, and "per_visit" is the time of one over that of the causal rule's: what a mask costs where it has something to do.
"first_ms": from a mask that has been said and nothing else to the first out, host and compilers included: its tables, and one launch.
"causal, with sinks" is the causal rule and a sink a head, with the gradient of these: by "per_visit", what sinks cost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gpu_timing import Calls, captured, capturing_stream, interleaved

LENGTH, BATCH, HEADS, BLOCK = 8192, 2, 16, 128
WINDOW, PREFIX, TOKENS, BESIDE = 1024, 2048, 64, 256

class Made(NamedTuple):
    """What a contender does under one mask."""

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    first_ms: float


class Masked(NamedTuple):
    """A mask: each query sees the keys before `first`, and those from `begin` to `end`; or whole blocks."""

    label: str
    first: Any = 0
    begin: Any = 0
    end: Any = 0
    mask: Callable[[], Any] | None = None  # makes what Strobe is given; None: a rule alone
    causal: bool = False
    blocks: Any = None  # bool [blocks of queries, blocks of keys], in place of the three ends
    sinks: bool = False

    @property
    def ends(self) -> Any:
        """An odd number of ends of keys by turns: of those that are seen, and of those that are not."""
        if self.blocks is not None:
            steps = np.diff(np.pad(self.blocks.astype(np.int8), ((0, 0), (1, 1))), axis=1)
            runs = [np.flatnonzero(row) * BLOCK for row in steps]  # begins and ends by turns
            most = max(map(len, runs))
            found = np.stack([np.pad(row, (1, most - len(row)), constant_values=(0, row[-1])) for row in runs], 1)
            return found.repeat(BLOCK, 1)
        first = np.zeros(LENGTH, np.int64) + self.first
        begin = np.maximum(first, self.begin)
        return np.stack([first, begin, np.clip(self.end, begin, LENGTH)])

    @property
    def pairs(self) -> int:
        first, *others = self.ends
        return int(first.sum() + sum((end - begin).sum() for begin, end in zip(others[::2], others[1::2], strict=True)))

    @property
    def visits(self) -> int:
        if self.blocks is not None:
            return int(self.blocks.sum())
        first, begin, end = (x.reshape(-1, BLOCK) for x in self.ends)
        found = 0
        for n in range(LENGTH // BLOCK):
            low, high = n * BLOCK, (n + 1) * BLOCK
            found += int(((first > low) | ((begin < np.minimum(end, high)) & (end > low))).any(1).sum())
        return found


def masks() -> list[Masked]:
    import strobe
    import torch

    i = np.arange(LENGTH)
    source, lengths = random.Random(7), []
    while sum(lengths) < LENGTH:
        lengths.append(min(source.randint(500, 2000), LENGTH - sum(lengths)))
    ids = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.cumsum([0, *lengths])
    first = np.where(i < TOKENS, LENGTH, TOKENS)

    def some_blocks(percent: int) -> Masked:
        """Drawn, and those of the diagonal."""
        blocks = LENGTH // BLOCK
        drawn = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(percent)) < percent / 100
        visited = drawn.numpy() | np.eye(blocks, dtype=bool)
        return Masked(f"blocks {percent} %", mask=lambda: strobe.masks.blocks(visited, LENGTH, block=BLOCK), blocks=visited)

    return [
        Masked("causal", 0, 0, i + 1, causal=True),
        Masked("causal, with sinks", 0, 0, i + 1, causal=True, sinks=True),
        Masked("full", 0, 0, LENGTH),
        Masked("causal as data", 0, 0, i + 1, lambda: strobe.masks.sliding(LENGTH, left=LENGTH)),
        Masked("all, as data", 0, 0, LENGTH, lambda: strobe.masks.prefix(LENGTH, LENGTH)),
        Masked("documents, causal", 0, begins[ids], i + 1, lambda: strobe.masks.documents(ids), causal=True),
        Masked("documents", 0, begins[ids], begins[ids + 1], lambda: strobe.masks.documents(ids)),
        Masked(f"window {WINDOW}", 0, i - WINDOW + 1, i + 1, lambda: strobe.masks.sliding(LENGTH, left=WINDOW - 1)),
        Masked(f"prefix {PREFIX}", 0, 0, np.maximum(i + 1, PREFIX), lambda: strobe.masks.prefix(PREFIX, LENGTH)),
        Masked(
            f"window {BESIDE} and {TOKENS} global", first, i - BESIDE, i + BESIDE + 1,
            lambda: strobe.masks.global_window(LENGTH, left=BESIDE, right=BESIDE, tokens=TOKENS),
        ),
        some_blocks(10),
        some_blocks(50),
    ]  # fmt: skip


def milliseconds_since(begin: float) -> float:
    """Of time.perf_counter, with what the GPU has to do."""
    import torch

    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def strobe_calls(m: Masked, t: dict[str, Any]) -> tuple[Made, dict[str, str]]:
    """And which kernels they take."""
    import strobe

    q, k, v, dout = t["q"], t["k"], t["v"], t["dout"]
    options: dict[str, Any] = {"causal": m.causal, "sinks": t["sinks"] if m.sinks else None}
    begin = time.perf_counter()
    if m.mask is not None:
        options["mask"] = m.mask().to("cuda")
    out, lse = strobe.attention(q, k, v, return_lse=True, **options)
    first_ms = milliseconds_since(begin)
    kernels = {"fwd": strobe.why().splitlines()[0]}
    strobe.attention_backward(dout, q, k, v, out, lse, return_dsinks=m.sinks, **options)
    kernels["bwd"] = strobe.why().splitlines()[0]
    return Made(
        lambda: strobe.attention(q, k, v, out=out, return_lse=True, **options),
        lambda: strobe.attention_backward(dout, q, k, v, out, lse, return_dsinks=m.sinks, **options),
        first_ms,
    ), kernels


def flex_calls(m: Masked, t: dict[str, Any]) -> Made:
    """PyTorch's FlexAttention, compiled."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if m.blocks is not None:
        visited = torch.from_numpy(m.blocks).to("cuda")

        def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return visited[query // BLOCK, key // BLOCK]
    else:
        first, begin, end = (torch.from_numpy(x).to("cuda", torch.int32) for x in m.ends)

        def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return (key < first[query]) | ((key >= begin[query]) & (key < end[query]))

    torch._dynamo.reset()
    start = time.perf_counter()
    block_mask = create_block_mask(sees, None, None, LENGTH, LENGTH, device="cuda")
    call = torch.compile(flex_attention, dynamic=False)
    leaves = [t[n].transpose(1, 2).detach().requires_grad_() for n in "qkv"]

    def forward() -> Any:
        with torch.no_grad():
            return call(*(leaf.detach() for leaf in leaves), block_mask=block_mask)

    out = call(*leaves, block_mask=block_mask)
    first_ms = milliseconds_since(start)
    grad = t["dout"].transpose(1, 2)
    return Made(forward, lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), first_ms)


def cudnn_calls(m: Masked, t: dict[str, Any]) -> Made:
    """flex_attention of cuDNN's frontend, whose masks are intervals of keys."""
    import torch
    from cudnn import flex_attention

    ends = torch.from_numpy(m.ends).to("cuda", torch.int32).repeat(1, BATCH)[None].contiguous()
    leaves = [t[n].detach().requires_grad_() for n in "qkv"]
    start = time.perf_counter()
    plan = flex_attention.create_mask_plan(ends, *leaves, build_backward=True)

    def forward() -> Any:
        with torch.no_grad():
            return flex_attention.flex_attn_func(*(leaf.detach() for leaf in leaves), mask_plan=plan)

    out = flex_attention.flex_attn_func(*leaves, mask_plan=plan)
    first_ms = milliseconds_since(start)
    out = out[0] if isinstance(out, tuple) else out
    return Made(forward, lambda: torch.autograd.grad(out, leaves, t["dout"], retain_graph=True), first_ms)


def of_head_dim(head_dim: int, args: Any, flush: Any) -> list[dict[str, Any]]:
    import torch

    torch.manual_seed(1)
    shape = (BATCH, LENGTH, HEADS, head_dim)
    t = {n: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for n in ("q", "k", "v", "dout")}
    t["sinks"] = torch.randn(HEADS, device="cuda") + 2
    points, calls = [], {"fwd": Calls(), "bwd": Calls()}
    all_masks = masks()
    for m in all_masks:
        point: dict[str, Any] = {"label": m.label, "head_dim": head_dim, "pairs": m.pairs, "visits": m.visits}
        ours, point["kernels"] = strobe_calls(m, t)
        made, point["missing"] = {"strobe": ours}, {}
        for name, make in () if args.alone or m.sinks else (("flex", flex_calls), ("cudnn_flex", cudnn_calls)):
            try:
                made[name] = make(m, t)
                made[name].forward(), made[name].backward()
            except Exception as e:  # noqa: BLE001 - a peer that is missing, or cannot
                made.pop(name, None)
                point["missing"][name] = f"{type(e).__name__}: {e}".splitlines()[0][:120]
        for name, one in made.items():
            calls["fwd"][f"{m.label}/{name}"], calls["bwd"][f"{m.label}/{name}"] = one.forward, one.backward
        point["first_ms"] = {name: one.first_ms for name, one in made.items()}
        points.append(point)
    for direction, work in (("fwd", 4.0), ("bwd", 10.0)):
        if direction == "bwd" and args.forward_only:
            continue
        refused: dict[str, str] = {}
        times = interleaved(captured(calls[direction], refused), args.rounds, flush)
        rule = times["causal/strobe"] / points[0]["visits"]
        for point in points:
            mine = {n.rpartition("/")[2]: s for n, s in times.items() if n.rpartition("/")[0] == point["label"]}
            point["missing"] |= {n.rpartition("/")[2]: why for n, why in refused.items() if n.rpartition("/")[0] == point["label"]}
            flop = work * point["pairs"] * head_dim * HEADS * BATCH
            point[direction] = {name: flop / s * 1e-12 for name, s in mine.items()}
            point[f"{direction}_ms"] = {name: s * 1e3 for name, s in mine.items()}
            point[f"{direction}_per_visit"] = mine["strobe"] / point["visits"] / rule
    return points


def packing(args: Any, flush: Any) -> None:
    """Prints what it takes to make masks of tensors on the GPU, all of it in a graph."""
    import strobe
    import torch

    made: Calls = {}
    for length in (LENGTH, 8 * LENGTH):
        blocks, name = length // BLOCK, f"{length // 1024}k"
        ids = torch.arange(length, device="cuda") // 1500
        visited = torch.rand(HEADS, blocks, blocks, device="cuda") < 0.1
        made[f"documents {name}"] = lambda ids=ids, n=blocks: strobe.masks.documents(ids, capacity=16 * n)
        made[f"blocks {name}, {HEADS} heads"] = lambda x=visited, n=length: strobe.masks.blocks(x, n, capacity=x.numel() // 4)
    keep = torch.rand(LENGTH, LENGTH, device="cuda") < 0.5
    made["bools 8k, all in part"] = lambda: strobe.masks.from_bool(keep, capacity=(LENGTH // BLOCK) ** 2)
    million = 128 * LENGTH
    top = torch.rand(HEADS, million // BLOCK, 64, device="cuda").mul_(million // BLOCK).long()
    made[f"lists of 64, 1024k, {HEADS} heads"] = lambda: strobe.masks.from_lists(top, million)
    refused: dict[str, str] = {}
    for name, seconds in interleaved(captured(made, refused), args.rounds, flush).items():
        print(f"packing {name:<34} {seconds * 1e3:8.3f} ms", flush=True)
    for name, why in refused.items():
        print(f"packing {name:<34} {why}", flush=True)


def run(args: Any, flush: Any) -> list[dict[str, Any]]:
    points = []
    with capturing_stream():
        packing(args, flush)
    for head_dim in (64, 128):
        with capturing_stream():
            points += of_head_dim(head_dim, args, flush)
        for point in points[-len(masks()) :]:
            cells = []
            for direction in ("fwd", "bwd"):
                if direction not in point:
                    continue
                speed = point[direction]
                others = "".join(f"  {n} {x:4.0f} ({speed['strobe'] / x:.3f})" for n, x in speed.items() if n != "strobe")
                ms, visit = point[f"{direction}_ms"]["strobe"], point[f"{direction}_per_visit"]
                cells.append(f"{direction} {ms:6.3f} ms {speed['strobe']:4.0f}, a visit {visit:4.2f} of causal's{others}")
            cells.append("first " + "  ".join(f"{name} {ms:.1f} ms" for name, ms in point["first_ms"].items()))
            print(f"{head_dim:3} {point['label']:<26} {point['visits']:5} visits  " + "  |  ".join(cells), flush=True)
    return points
