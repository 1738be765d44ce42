"""A causal sequence split over GPUs: Strobe's ring, its all-to-all and both at once beside one GPU, PyTorch's
context_parallel and ring-flash-attn, in one run.

    torchrun --nproc-per-node 2 bench/ring.py                       under two minutes on two H100s
    torchrun --nproc-per-node 2 bench/ring.py --seqlens 16k,128k --window 4096
    torchrun --nproc-per-node 2 bench/ring.py --figures plain,window,packed           all three, windows and documents at 128k
    torchrun --nproc-per-node 2 bench/ring.py --device cpu --seqlens 1k --heads 4     a trial without GPUs, over gloo

ring-flash-attn (PyPI, 0.1.8) is a peer where it is installed, over whatever `flash_attn` is: flash-attn, or Strobe's shim
(python/flash_attn_shim). With the shim both rings run the same kernels, and differ in all else.

Figures: plain; window, of 4,096 keys; packed, 32 documents of unlike lengths end to end, whole where that is even, and beside it
"ring, split" with each of them over all ranks. Where a number of ranks between one and all divides ranks and heads, "groups of N"
share out the heads by all-to-all and a ring goes between them; a line says what the plan would choose, and why. Forward and
backward together, batch 1, bf16. "of ideal" is one GPU's time for the whole sequence, divided by the ranks, over the time that the
ranks take. First steps that are waited for, each with the host's time before its first kernel; then steps in a row, none of which is
waited for. All in turns, so that power and clocks are alike; medians of the slowest rank. Errors first: against float64 of a short
sequence, beside those of one GPU's call.

Memory is what PyTorch has allocated at most in a step beyond the inputs, on the rank with most: NCCL's own is not in it. The floor
beside it counts what has to be there at once: out, lse, dq, dk and dv of the rank's rows (of one GPU: of all); in a ring K and V of two
steps (one where there is one), which come while the one before is computed; by all-to-all q, k, v, out and lse of the rank's heads, which
backward reads again. What a rank receives in a step, on average, follows from the schedule: in a ring K and V forward and again
backward, and float32 dK and dV, of keys that others see; by all-to-all (n - 1) / n of everything. The mask needs, where queries stay,
each key that a rank's queries see and another one has, once, and its gradients once, all in the inputs' dtype.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import strobe
import torch
import torch.distributed as dist
from strobe import distributed
from strobe._layout import Documents, layout_of
from strobe._ring import Mask, Schedule, schedule
from strobe._ring_cost import Sizes, ring_traffic, ulysses_traffic
from strobe.torch import attention as one_attention
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

# A peer that cannot run must not end the bench; all ranks meet the same.
FAILURES = (RuntimeError, ImportError, AttributeError, TypeError, ValueError)

Step = Callable[[], list[Any]]
FIGURES = ("plain", "window", "packed")
WINDOW = 4096


def number(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def inputs(seqlen: int, args: argparse.Namespace, device: Any) -> list[Any]:
    """q, k, v and dout, (1, seqlen, heads, head_dim), the same on every rank."""
    generator = torch.Generator(device).manual_seed(seqlen)
    shape = (1, seqlen, args.heads, args.head_dim)
    return [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(4)]


def derived(given: list[Any], attend: Any) -> list[Any]:
    """out, dq, dk, dv."""
    leaves = [x.requires_grad_() for x in given[:3]]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]


def exact(given: list[Any], window: int) -> list[Any]:
    """In float64, of all scores at once."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        apart = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
        hidden = (apart < 0) | (apart > window) if window >= 0 else apart < 0
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)

    return derived([x.double() for x in given], attend)


def ring_flash_attn() -> Any:
    """The function of that package for zigzag order, in which each rank has the rows that `shard` gives it."""
    # What the package brings for transformers asks newer ones for names that they do not have, and is not needed here.
    adapters = types.ModuleType("ring_flash_attn.adapters")
    for name in ("substitute_hf_flash_attn", "update_ring_flash_attn_params"):
        setattr(adapters, name, None)
    sys.modules.setdefault(adapters.__name__, adapters)
    from ring_flash_attn import zigzag_ring_flash_attn_func

    return lambda *x: zigzag_ring_flash_attn_func(*x, causal=True)


def peers(args: argparse.Namespace) -> dict[str, Any]:
    """Other rings that can run here, by their names."""
    if args.window >= 0 or dist.get_world_size() == 1:
        return {}
    try:
        return {"ring-flash-attn": ring_flash_attn()}
    except FAILURES as e:
        say(f"left out   ring-flash-attn: {type(e).__name__}: {str(e).splitlines()[0]:.100}")
        return {}


def say(*words: Any) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def ways(ranks: int, heads: int) -> dict[str, int]:
    """How many ranks share out the heads, by the name of the way."""
    found = {"ring": 1}
    found |= {f"groups of {n}": n for n in range(2, ranks) if ranks % n == 0 and heads % n == 0}
    return found | ({"ulysses": ranks} if ranks > 1 and heads % ranks == 0 else {})


class Work(NamedTuple):
    """Of a causal step over ranks in zigzag order, what decides about its messages and its memory."""

    lengths: tuple[int, ...]
    ranks: int
    window: int  # keys to the left; -1: all
    sizes: Sizes
    documents: Documents = "auto"

    @property
    def schedules(self) -> dict[int, list[Schedule]]:
        """Those of all groups, by how many ranks are one."""
        mask, layout = Mask(None if self.window < 0 else self.window, 0), self.layout
        return {n: [schedule(layout, g, mask, n) for g in range(self.ranks // n)] for n in ways(self.ranks, self.sizes.heads).values()}

    @property
    def layout(self) -> Any:
        return layout_of(self.lengths, self.ranks, "zigzag", self.documents if len(self.lengths) > 1 else "split")

    def share(self, inside: int) -> Sizes:
        """With the heads of a rank of such a group."""
        return self.sizes._replace(heads=self.sizes.heads // inside, heads_kv=self.sizes.heads_kv // inside)

    def received(self) -> dict[str, float]:
        """MB that a rank receives, forward and backward, on average, by the name of the way."""
        found, rows = {}, sum(self.lengths)
        for name, inside in ways(self.ranks, self.sizes.heads).items():
            of_ring = [ring_traffic(plan, self.share(inside)) for plan in self.schedules[inside]]
            some = sum(x.forward + x.backward for x in of_ring) / len(of_ring)
            if inside > 1:
                once = ulysses_traffic(rows, self.ranks, self.sizes, inside)
                some += once.forward + once.backward
            found[name] = some / 1e6
        return found

    def needed(self) -> float:
        """MB that the mask needs of a rank, on average."""
        layout, count = self.layout, 0
        for rank in range(self.ranks):
            seen: set[int] = set()
            mine: set[int] = set()
            for _, begin, end, sequence in layout.chunks(rank):
                first = layout.starts[sequence]
                seen.update(range(first if self.window < 0 else max(first, begin - self.window), end))
                mine.update(range(begin, end))
            count += len(seen - mine)
        return 2 * count * self.sizes.kv_row * self.sizes.element / self.ranks / 1e6

    def results(self, rows: int, sizes: Sizes) -> int:
        """Bytes of out, dq, dk and dv, and of lse."""
        return rows * ((sizes.q_row + sizes.kv_row) * sizes.element + 4 * sizes.batch * sizes.heads)

    def floor(self) -> dict[str, float]:
        """MB that have to be there at once, beyond the inputs, on the rank with most."""
        layout, rows = self.layout, sum(self.lengths)
        most = max(map(layout.rows_of, range(self.ranks)))
        found = {"one GPU": self.results(rows, self.sizes), "peers": self.results(most, self.sizes)}
        for name, inside in ways(self.ranks, self.sizes.heads).items():
            share, coming = self.share(inside), 0
            for plan in self.schedules[inside]:
                received = [sum(part.size for part in step.receives) for step in plan.steps]
                coming = max([coming, *received, *map(sum, itertools.pairwise(received))])
            found[name] = found["peers"] + coming * share.kv_row * share.element
            if inside > 1:
                found[name] += max(self.results(plan.rows, share) for plan in self.schedules[inside])
        return {name: size / 1e6 for name, size in found.items()}


def check(args: argparse.Namespace, device: Any) -> dict[str, list[float]]:
    """Root mean square errors of out, dq, dk and dv, of each way, and of one GPU."""
    seqlen, window = 2048, (args.window, 0) if args.window >= 0 else (-1, -1)
    given = inputs(seqlen, args, device)
    wanted = exact(given, args.window)
    mine = [distributed.shard(x, causal=True) for x in given]
    found = {"one GPU": derived(given, lambda *x: one_attention(*x, causal=True, window=window))}
    again = []
    for name, inside in ways(dist.get_world_size(), args.heads).items():

        def attend(*x: Any, inside: int = inside) -> Any:
            return distributed.attention(*x, causal=True, window=window, deterministic=True, ulysses=inside)

        runs = [derived([x.detach() for x in mine], attend) for _ in (0, 1)]
        again.append(all(map(torch.equal, *runs)))
        found[name] = [distributed.unshard(x, causal=True) for x in runs[0]]
    for name, attend in peers(args).items():
        run = derived([x.detach() for x in mine], attend)
        found[name] = [distributed.unshard(x, causal=True) for x in run]
    errors = {
        name: [float((a.double() - b).pow(2).mean().sqrt()) for a, b in zip(x, wanted, strict=True)]
        for name, x in found.items()
    }
    for name, row in errors.items():
        share = max(a / b for a, b in zip(row, errors["one GPU"], strict=True))
        say(f"error      {name:<16}", *(f"{x:.3e}" for x in row), f"at most {share:.3f} of one GPU's")
    say("bits       the same twice with deterministic:", all(again))
    return errors


def wait(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(steps: dict[str, Step], rounds: int, device: Any) -> dict[str, float]:
    """Medians over rounds in turns, of the rank that takes longest."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):  # the first warms up
        for name, step in steps.items():
            dist.barrier()
            wait(device)
            begin = time.perf_counter()
            step()
            wait(device)
            taken = torch.tensor([time.perf_counter() - begin], device=device)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if turn:
                times[name].append(1e3 * taken.item())
    return {name: statistics.median(x) for name, x in times.items()}


def in_a_row(steps: dict[str, Step], rounds: int, device: Any) -> dict[str, float]:
    """Milliseconds of a step behind others, none of which is waited for: what a training step has, whose host runs ahead."""
    found = {}
    for name, step in steps.items():
        dist.barrier()
        wait(device)
        begin = time.perf_counter()
        for _ in range(rounds):
            step()
        wait(device)
        taken = torch.tensor([time.perf_counter() - begin], device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        found[name] = 1e3 * taken.item() / rounds
    return found


def peaks(steps: dict[str, Step], device: Any) -> dict[str, float]:
    """MB that PyTorch has allocated at most in a step, beyond what was there before, on the rank with most."""
    found: dict[str, float] = {}
    for name, step in steps.items() if device.type == "cuda" else ():
        dist.barrier()
        wait(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        wait(device)
        most = torch.tensor([torch.cuda.max_memory_allocated() - before], device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found[name] = most.item() / 1e6
    return found


def context_parallel_step(given: list[Any], mesh: Any, backend: SDPBackend) -> tuple[Step, Callable[[], None]]:
    """PyTorch's own, within its context; and what ends that."""
    from torch.distributed.tensor.experimental import _attention, context_parallel

    _attention._cp_options.enable_load_balance = True
    local = [x.detach().transpose(1, 2).contiguous() for x in given]  # cut to this rank's share, in place
    split = context_parallel(mesh, buffers=local, buffer_seq_dims=[2] * 4)
    split.__enter__()
    mine = [x.clone() for x in local]

    def step() -> list[Any]:
        with sdpa_kernel(backend):
            # By its full name, since the context puts another function into the module.
            attend = torch.nn.functional.scaled_dot_product_attention
            return derived(mine, lambda *x: attend(*x, is_causal=True))

    return step, lambda: split.__exit__(None, None, None)


def documents(seqlen: int, count: int) -> list[int]:
    """Where so many documents of unlike lengths begin, the same at every run, and where the last one ends."""
    draw = random.Random(1)
    return [0, *sorted(draw.randrange(seqlen + 1) for _ in range(count - 1)), seqlen]


class Measured(NamedTuple):
    """By name: milliseconds of steps that are waited for, and of steps in a row, and MB at most."""

    waited: dict[str, float]
    row: dict[str, float]
    peak: dict[str, float]


def work_of(seqlen: int, args: argparse.Namespace, figure: str) -> Work:
    lengths = tuple(b - a for a, b in itertools.pairwise(documents(seqlen, args.documents))) if figure == "packed" else (seqlen,)
    window = args.window if args.window >= 0 or figure != "window" else WINDOW
    sizes = Sizes(1, args.heads, args.heads, args.head_dim, args.head_dim, 2)
    return Work(lengths, dist.get_world_size(), window, sizes)


def measure(work: Work, args: argparse.Namespace, device: Any, mesh: Any, figure: str) -> Measured:
    seqlen = sum(work.lengths)
    packed = [0, *itertools.accumulate(work.lengths)] if figure == "packed" else None
    options: dict[str, Any] = {"causal": True}
    if work.window >= 0:
        options["window"] = (work.window, 0)
    given = inputs(seqlen, args, device)
    if packed is not None:
        given = [x[0] for x in given]
    place: dict[str, Any] = {"causal": True, "cu_seqlens": packed}
    mine = [distributed.shard(x, **place) for x in given]
    whole = dict(options)
    if packed is not None:
        begins = torch.tensor(packed, dtype=torch.int32, device=device)
        longest = max(b - a for a, b in itertools.pairwise(packed))
        whole |= {"cu_seqlens_q": begins, "cu_seqlens_k": begins}
        whole |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        options["cu_seqlens"] = packed

    def split(how: dict[str, Any], mine: list[Any] = mine) -> Step:
        def attend(*x: Any) -> Any:
            return distributed.attention(*x, **options, **how)

        return lambda: derived(mine, attend)

    words = distributed.plan(*mine[:3], **options).splitlines()[1]
    say(f"{seqlen:8}  {figure}: {words}")
    steps: dict[str, Step] = {"one GPU": lambda: derived(given, lambda *x: one_attention(*x, **whole))}
    by_name = ways(work.ranks, args.heads)
    steps |= {name: split({"ulysses": inside}) for name, inside in by_name.items()}
    if packed is not None:
        cut = {"documents": "split"}
        steps["ring, split"] = split({"ulysses": 1} | cut, [distributed.shard(x, **place, **cut) for x in given])
        wanted = steps["one GPU"]()
        for name in by_name:
            found = [distributed.unshard(x, **place) for x in steps[name]()]
            apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
            say(f"{seqlen:8}  {figure}: {name} and one GPU differ by {apart:.1e} of the largest value at most")
        del wanted
    alone = figure == "plain" and args.window < 0  # what peers have, too
    if alone:
        steps |= {name: lambda attend=attend: derived(mine, attend) for name, attend in peers(args).items()}
    rounds = max(3, min(20, 2**20 // seqlen))
    found = Measured(milliseconds(steps, rounds, device), in_a_row(steps, rounds, device), peaks(steps, device))
    if device.type == "cpu" or not alone:
        return found
    for name, backend in (("PyTorch cuDNN", SDPBackend.CUDNN_ATTENTION), ("PyTorch flash", SDPBackend.FLASH_ATTENTION)):
        try:
            step, end = context_parallel_step(given, mesh, backend)
        except FAILURES as e:
            say(f"left out   {name}: {type(e).__name__}: {str(e).splitlines()[0]:.100}")
            continue
        try:
            # Beside the ring once more, for clocks.
            taken = milliseconds({"ring": steps["ring"], name: step}, rounds, device)[name]
            row, peak = in_a_row({name: step}, rounds, device), peaks({name: step}, device)
            found.waited[name] = taken
            found.row.update(row)
            found.peak.update(peak)
        except FAILURES as e:
            say(f"left out   {name}: {type(e).__name__}: {str(e).splitlines()[0]:.100}")
        finally:
            end()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seqlens", default="16k,64k,128k")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=-1, help="keys to the left; without PyTorch's then")
    parser.add_argument("--figures", default="plain", help="plain, window and packed; the latter two at the longest of seqlens")
    parser.add_argument("--documents", type=int, default=32, help="of a packed sequence")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        place = torch.cuda.get_device_name()
    else:
        device, place = torch.device("cpu"), "a CPU"
        dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh(args.device, (ranks,))
    say(f"machine    {ranks} x {place}, PyTorch {torch.__version__}, Strobe {strobe.__version__}")
    rows: list[dict[str, Any]] = []
    errors = check(args, device)
    seqlens, figures = list(map(number, args.seqlens.split(","))), args.figures.split(",")
    for name in figures:
        if name not in FIGURES:
            parser.error(f"--figures has {name!r}, expected {', '.join(FIGURES)}")
    say(f"{'seqlen':>8}  {'':<16}{'ms':>9}{'of ideal':>10}{'in a row':>9}{'of ideal':>10}{'peak MB':>9}{'floor MB':>10}")
    points = [(seqlen, name) for name in figures for seqlen in (seqlens if name == "plain" else [max(seqlens)])]
    for seqlen, figure in points:
        work = work_of(seqlen, args, figure)
        found = measure(work, args, device, mesh, figure)
        floor, received, needed = work.floor(), work.received(), work.needed()
        if figure == "packed":
            cut = work._replace(documents="split")
            floor["ring, split"], received["ring, split"] = cut.floor()["ring"], cut.received()["ring"]
        floor = {name: floor.get(name, floor["peers"]) for name in found.waited}
        for name in found.waited:
            words = [f"{seqlen:8}  {name:<16}"]
            for times in (found.waited, found.row):
                share = "" if name == "one GPU" else f"{100 * times['one GPU'] / ranks / times[name]:8.1f} %"
                words.append(f"{times[name]:9.2f}{share:>10}")
            peak = f"{found.peak[name]:.0f}" if name in found.peak else "-"
            say("".join(words) + f"{peak:>9}{floor[name]:10.0f}")
        told = ", ".join(f"{name} {size:.1f}" for name, size in received.items())
        say(f"{seqlen:8}  {figure}: MB that a rank receives in a step: {told}; where queries stay, the mask needs {needed:.1f}")
        rows.append(
            {
                "seqlen": seqlen,
                "figure": figure,
                "milliseconds": found.waited,
                "milliseconds in a row": found.row,
                "peak MB": found.peak,
                "floor MB": floor,
                "received MB": received | {"needed": needed},
            }
        )
    if args.output and dist.get_rank() == 0:
        args.output.write_text(json.dumps({"ranks": ranks, "errors": errors, "rows": rows}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
