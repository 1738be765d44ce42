"""Attention over a KV cache on the GPU against float64: pages, cache entries, left pads, append, rotary embedding.

    python tests/gpu/cache.py                             random problems, by the kernels that the planner chooses
    python tests/gpu/cache.py --count 5000 --first 1000   some of them
    python tests/gpu/cache.py --prompts                   problems that the Hopper kernels take, alone and beside few queries
    python tests/gpu/cache.py --hostile                   numbers out of range among them
    python tests/gpu/cache.py --graph 100                 captured launches with as many sets of lengths and tables each
    python tests/gpu/cache.py --device cpu                the CPU library
    python tests/gpu/cache.py --plain --device cpu        the test itself: tensor operations stand for the library

Rows and pages that are not in use hold NaN; pool, out and lse lie between red zones, and no byte of the pool may change
but the appended rows. A sequence whose numbers are out of range gets NaN in out and lse and appends nothing; queries
that see a key of a page that is out of range get NaN. The pass rule is run_gpu_tests.py's.
"""

from __future__ import annotations

import argparse
import collections
import copy
import ctypes
import functools
import itertools
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

try:
    import torch
except ImportError:
    print("gpu cache: skipped (no PyTorch, whose float64 is the reference)")
    sys.exit(0)

import strobe_torch as st
from cache_cases import (
    DENSE,
    NONE,
    PACKED,
    CacheCase,
    Tensors,
    draw,
    make_hostile,
)
from device import HALVES
from strobe_torch import lib


class Launch:
    """A plan and arguments over a case's tensors: `run()` is one launch."""

    def __init__(self, t: Tensors) -> None:
        c = t.c
        p = lib.new_problem()
        p.dtype, p.out_dtype = st.DTYPES[c.dtype], st.DTYPES[c.out_dtype]
        p.device = lib.CPU if t.device.type == "cpu" else lib.CUDA
        p.device_index = t.device.index or 0
        p.batch, p.seqlen_q, p.seqlen_k = c.batch, c.longest, c.most_rows
        p.heads, p.heads_kv, p.head_dim, p.head_dim_v = c.heads, c.heads_kv, c.head_dim, c.head_dim_v
        p.varlen, p.total_q, p.causal = int(c.varlen), c.total if c.varlen else 0, int(c.causal)
        p.window_left, p.window_right = c.window
        p.window_signed = int(c.window_signed)
        p.attention_chunk, p.softcap, p.alibi = c.chunk, c.softcap, c.alibi
        p.batch_invariant = int(c.batch_invariant)
        for name in c.given:
            setattr(p, f"has_{name}", 1)
        if c.paged:
            p.cache, p.pages, p.page_size, p.pages_per_sequence = 2, c.entries, c.rows, c.columns
        else:
            p.cache, p.cache_batch = 1, c.entries
        strided = {"q": t.q, "k": t.k, "v": t.v, "out": t.out}
        if c.append:
            p.append, p.seqlen_new = c.append, c.longest_new
            p.total_new = c.total_new if c.append == PACKED else 0
            strided |= {"k_new": t.k_new, "v_new": t.v_new}
        p.rotary_dim, p.rotary_rows, p.rotary_interleaved = c.rotary_dim, c.rotary_rows, int(c.interleaved)
        for name, tensor in strided.items():
            if tensor.numel():
                s, strides = getattr(p, name), tensor.stride()
                s.batch = strides[0] if len(strides) == 4 else 0
                s.seqlen, s.head, s.dim = (*strides[-3:-1], 1)
        self.plan = lib.make_plan(p)
        self.kernel = lib.text(self.plan.kernel)
        self.workspace = st.Workspace(int(self.plan.workspace_bytes), t.device)
        args = lib.ForwardArgs()
        args.struct_size = ctypes.sizeof(args)
        tables = {"rotary_cos": t.cos, "rotary_sin": t.sin} if c.rotary_dim else {}
        if c.append and c.append != PACKED and not c.longest_new:
            strided |= {"k_new": None, "v_new": None}  # nothing is appended, and a pointer to it would be refused
        self.keep = {**strided, **tables, **t.arrays, "lse": t.lse, "alibi_slopes": t.slopes}
        for name, tensor in self.keep.items():
            setattr(args, name, st.pointer(tensor))
        args.workspace, args.workspace_bytes = self.workspace.address, self.workspace.size
        args.stream = st.stream_of(t.device)
        self.args, self.address = bytes(args), ctypes.addressof(self.plan)

    def run(self) -> None:
        lib.check(lib.forward(self.address, self.args))


def plan_of(t: Tensors) -> Launch | None:
    """None where no CPU kernel takes the problem. On a GPU all are to be taken: what CUDA declines, keys in a cache of
    2^36 rows of all heads, is never drawn."""
    try:
        return Launch(t)
    except lib.Unsupported:
        if t.device.type == "cuda":
            raise
        return None


def captured(launch: Launch, device: torch.device) -> Callable[[], None]:
    """What replays the launch, in a CUDA graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        args = lib.ForwardArgs.from_buffer_copy(launch.args)
        args.stream = st.stream_of(device)
        launch.args = bytes(args)
        launch.run()
    return graph.replay


def run_plain(t: Tensors) -> None:
    """What stands for the library: the same in tensor operations of float32."""
    c = t.c
    for b, s in enumerate(c.sequences):
        if s.added and not s.is_bad:
            entry, row = t.places(s, s.keys - s.added, s.keys)
            there = (0 <= entry) & (entry < c.entries)
            t.k[entry[there], row[there]] = t.turned_keys(b).to(c.dtype)[there]
            t.v[entry[there], row[there]] = t.new_rows(t.v_new, b)[there]
    if c.past:
        t.out[-c.past :], t.lse[:, -c.past :] = 0, -math.inf
    for b, s in enumerate(c.sequences):
        out, lse, n = t.queries(t.out, b), t.lse_of(b), s.used_queries
        out[n:], lse[:, n:] = 0, -math.inf
        if s.is_bad:
            out[:n], lse[:, :n] = math.nan, math.nan
            continue
        k, v = gathered(t, b)
        x, y = t.attention(b, t.turned_queries(b), k, v, torch.float32)
        out[:n], lse[:, :n] = x.to(c.out_dtype), y


def gathered(t: Tensors, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a sequence as the cache has them now; NaN in keys of pages that are not there."""
    s = t.c.sequences[b]
    entry, row = t.places(s, 0, s.keys)
    there = (0 <= entry) & (entry < t.c.entries)
    k, v = (x[torch.where(there, entry, 0), row] for x in (t.k, t.v))
    k, v = k.clone(), v.clone()
    k[~there], v[~there] = math.nan, 0
    return k, v


def check_close(
    name: str, x: torch.Tensor, ref: torch.Tensor, near: list[torch.Tensor], floor: float = 1e-5,
    draws: Callable[[], list[torch.Tensor]] = list,
) -> None:  # fmt: skip
    """Within twice the comparators' largest error; NaN and infinities in the same places. `draws`: more comparators, made
    where those do not do."""
    x, ref = x.double(), ref.double()
    if x.numel() == 0:
        return
    finite = torch.isfinite(ref)
    assert bool(((x == ref) | finite | (x.isnan() & ref.isnan())).all()), f"{name}: special values differ"

    def worst(of: torch.Tensor) -> float:
        return float(torch.where(finite, (of.double() - ref).abs(), 0).nan_to_num(0).max())

    error = torch.where(finite, (x - ref).abs(), 0)
    got = math.inf if bool(torch.isnan(error).any()) else float(error.max())
    limit = 2 * max(map(worst, near)) + floor
    if not got <= limit:
        limit = 2 * max(map(worst, [*near, *draws()])) + floor
    assert got <= limit, f"{name}: error {got:.3g}, allowed {limit:.3g}"


def drawn(t: Tensors, b: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """More comparators of a sequence's out. One way of rounding may be exact by luck: where one key has all the weight, or
    where there are few values."""
    outs = [t.attention(b, q, k, v, torch.float64, stored_weights=True)[0] for _ in range(4)]
    return [st.rounded_at_random(out, t.c.dtype, t.generator) for out in outs]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int32 if t.element_size() == 4 else torch.int16)


def check_cache(t: Tensors, before: list[torch.Tensor]) -> None:
    """The appended rows, and that nothing else of the pools changed."""
    c = t.c
    eps = torch.finfo(c.dtype).eps
    after = [pool.clone() for pool in t.pools]
    for b, s in enumerate(c.sequences):
        if s.is_bad or not s.added:
            continue
        entry, row = t.places(s, s.keys - s.added, s.keys)
        there = (0 <= entry) & (entry < c.entries)
        at = (entry[there], row[there])
        wanted = t.turned_keys(b)[there]
        error = (t.k[at].double() - wanted).abs()
        room = 0.5 * eps * wanted.abs() + 1e-6
        room[..., c.rotary_dim :] = 0
        assert bool((error <= room).all()), f"appended k of sequence {b}: error {float(error.max()):.3g}"
        assert torch.equal(t.v[at], t.new_rows(t.v_new, b)[there]), f"appended v of sequence {b} differs"
        for copies in (after, before):
            for tensor, of in ((t.k, 0), (t.v, len(copies) - 1)):
                # The same rows of the copies are put aside.
                torch.as_strided(copies[of], tensor.shape, tensor.stride(), tensor.storage_offset())[at] = 0
    for x, y in zip(before, after, strict=True):
        assert torch.equal(bits(x), bits(y)), "bytes of the cache changed outside of the appended rows"


def check(t: Tensors, before: list[torch.Tensor]) -> None:
    check_cache(t, before)
    if t.c.past:
        assert bool((t.out[-t.c.past :] == 0).all()), "out: rows past the end of the last sequence, expected 0"
        assert bool((t.lse[:, -t.c.past :] == -math.inf).all()), "lse: rows past the end of the last sequence, expected -inf"
    for b, s in enumerate(t.c.sequences):
        out, lse, n = t.queries(t.out, b), t.lse_of(b), s.used_queries
        assert bool((out[n:] == 0).all()), f"out of sequence {b}: rows that are not in use, expected 0"
        assert bool((lse[:, n:] == -math.inf).all()), f"lse of sequence {b}: rows not in use, expected -inf"
        if s.is_bad:
            assert bool(out[:n].isnan().all() and lse[:, :n].isnan().all()), f"sequence {b}: expected NaN"
            continue
        q, (k, v) = t.turned_queries(b), gathered(t, b)
        ref, ref_lse = t.attention(b, q, k, v, torch.float64)
        near = [t.attention(b, q.to(t.c.dtype), k, v, t.c.dtype)]
        if t.c.rotary_dim:  # turned queries are rounded: one way of rounding is too few where there are few rows
            rounded = [st.rounded_at_random(q, t.c.dtype, t.generator) for _ in range(4)]
            near += [t.attention(b, x, k, v, torch.float32) for x in rounded]
        check_close(f"out of sequence {b}", out[:n], ref, [x for x, _ in near], draws=functools.partial(drawn, t, b, q, k, v))
        check_close(f"lse of sequence {b}", lse[:, :n], ref_lse, [x for _, x in near])
    for name, storage, tensor in (("out", t.out_storage, t.out), ("lse", t.lse_storage, t.lse)):
        around = storage.clone()
        around.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(math.nan)
        assert bool(around.isnan().all()), f"{name}: memory around its rows was written"


def run(c: CacheCase, device: str, plain: bool, hostile: int | None = None) -> str:
    """One problem; returns the kernel's name, "none" where no kernel takes it. hostile: the seed of numbers that go
    out of range, after the tensors are made."""
    t = Tensors(c, device)
    if hostile is not None:
        make_hostile(c, hostile)
        t.arrays = t.make_arrays()
    before = [pool.clone() for pool in t.pools]
    if plain:
        run_plain(t)
        check(t, before)
        return "plain"
    launch = plan_of(t)
    if not launch:
        return "none"
    launch.run()
    check(t, before)
    assert not launch.workspace.touched_outside(), "the workspace's red zone was written"
    return launch.kernel


def run_graph(seed: int, sets: int, device: str, prompts: bool) -> str:
    """One captured launch, replayed with other lengths and tables: the plan knows none of them. Without new keys, with
    as many in each replay, and with packed ones of other numbers; turned and not; new ones also above head_dim 128,
    where they are another kernel's. On the CPU, which has no graphs, the plan is launched again."""
    kinds = [(append, turned, 0) for append, turned in itertools.product((NONE, DENSE, PACKED), (False, True))]
    kinds += [(DENSE, True, 129), (PACKED, True, 129)]
    ran = [run_captured(seed, sets, device, prompts, *kind) for kind in kinds]
    return " and ".join(sorted(set(ran)))


def run_captured(seed: int, sets: int, device: str, prompts: bool, append: int, turned: bool, least_dim: int) -> str:
    first = next(
        c for c in (draw(s, HALVES[:1], 1500, prompts) for s in range(seed, seed + 10000))
        if c.paged and c.columns > 2 and c.append == append and "seqused_k" in c.given and c.batch > 1
        and bool(c.rotary_dim) == turned and c.total and (c.longest_new or not c.append) and c.head_dim >= least_dim
        and (not prompts or "seqused_q" in c.given and c.longest > 64)
    )  # fmt: skip
    first.entries = first.batch * first.columns + 3  # pages for every set of lengths
    if turned:
        first.rotary_rows = first.most_rows + first.longest + first.longest_new
    new_rows = [s.added for s in first.sequences]
    t = Tensors(first, device)
    launch = plan_of(t)
    if not launch:
        return "none"
    launch.run()  # what is loaded at the first use
    replay = launch.run if t.device.type == "cpu" else captured(launch, t.device)
    r = random.Random(seed)
    for n in range(sets):
        if append == PACKED:
            r.shuffle(new_rows)  # as many in all, and no longer ones: the plan knows both numbers
        for s, s.added in zip(first.sequences, new_rows, strict=True):
            s.used = r.choice((0, r.randint(0, first.most_rows - s.added), first.most_rows - s.added))
            s.leftpad = r.randint(0, s.used) if "leftpad" in first.given else 0
            s.q_position, s.prefix = r.randint(0, s.keys), r.randint(0, s.keys)
            if "seqused_q" in first.given:  # sequences move between those with many queries and those with few
                s.used_queries = r.choice((0, min(s.queries, 1), min(s.queries, 3), s.queries, r.randint(0, s.queries)))
            own = "rotary_position" in first.given
            s.rotary_position = r.randint(0, first.most_rows) if own else s.used - s.leftpad
        pages = r.sample(range(first.entries), first.entries)
        for s in first.sequences:
            held = math.ceil((s.used + s.added) / first.rows)
            s.pages = [pages.pop() for _ in range(held)] + [-7] * (first.columns - held)
        for name, values in t.make_arrays().items():
            t.arrays[name].copy_(values)
        if "seqused_q" in first.given:
            t.q.copy_(t.random(*t.q.shape))
            for b, s in enumerate(first.sequences):
                t.queries(t.q, b)[s.used_queries :] = math.nan
        for s in first.sequences:
            at = t.places(s, 0, s.used - s.leftpad)
            t.k[at] = t.random(s.used - s.leftpad, first.heads_kv, first.head_dim).to(first.dtype)
            t.v[at] = t.random(s.used - s.leftpad, first.heads_kv, first.head_dim_v).to(first.dtype)
        before = [pool.clone() for pool in t.pools]
        replay()
        try:
            check(t, before)
        except AssertionError as e:
            raise AssertionError(f"set {n}: {e}") from e
    return launch.kernel


def main() -> int:
    parser = argparse.ArgumentParser(description="Attention over a KV cache against float64.")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop in time, and say how far it went")
    parser.add_argument("--prompts", action="store_true", help="many queries, and what TMA can read")
    parser.add_argument("--hostile", action="store_true", help="numbers out of range")
    parser.add_argument("--graph", type=int, default=0, metavar="SETS", help="replay a captured launch")
    parser.add_argument("--verbose", action="store_true", help="say which problem comes before it runs")
    parser.add_argument("--plain", action="store_true", help="tensor operations stand for the library")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu cache: skipped (no GPU)")
        return 0
    dtypes = HALVES + ([torch.float32] if options.device == "cpu" else [])
    kernels: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + options.seconds
    for seed in range(options.first, options.first + options.count):
        if time.monotonic() > end:
            print(f"gpu cache: out of time at seed {seed}: go on with --first {seed}")
            break
        c = draw(seed, dtypes, prompts=options.prompts)
        if options.verbose:
            print(f"seed {seed}: {c}", flush=True)
        try:
            if options.graph:
                kernels[run_graph(seed, options.graph, options.device, options.prompts)] += 1
                break
            hostile = seed if options.hostile else None
            kernels[run(c, options.device, options.plain, hostile)] += 1
        except (AssertionError, lib.Error) as e:
            print(f"gpu cache: FAILED, seed {seed}: {e}\n  {copy.copy(c)}")
            return 1
    print("gpu cache: " + ", ".join(f"{n} by {name}" for name, n in sorted(kernels.items())) + ": all passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
