"""The Python functions over KV caches on the GPU, against float64: flash_attn_with_kvcache, attention_with_kvcache, merge.

    python tests/gpu/kvcache.py [--count 200] [--first 0]

Eager calls, calls captured in a CUDA graph and replayed with other lengths, numbers out of range, and partial results
merged. cache.py has the C ABI, with poison, red zones and every option.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import math
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2] / "python")]

try:
    import torch
except ImportError:
    print("gpu kvcache: skipped (no PyTorch, whose float64 is the reference)")
    sys.exit(0)

import strobe
import strobe_torch as st
from cache import check, check_close
from cache_cases import DENSE, PACKED, CacheCase, Sequence, Tensors, draw
from strobe import flash_attn, flash_attn_3

DTYPES = [torch.bfloat16, torch.float16]
DEVICE = "cuda"


def drawn(seed: int) -> CacheCase:
    """A case that a plan of the Python functions can have: they allocate out, in q's dtype or float32."""
    cases = (draw(1000 * seed + n, DTYPES) for n in range(1000))

    def suits(c: CacheCase) -> bool:
        # Python knows no bound of the lengths but the cache's own.
        capacity = c.columns * c.rows if c.paged else c.rows
        return 0 < c.most_rows == capacity

    return next(filter(suits, cases))


def call_all(t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """strobe.attention_with_kvcache, which takes every case."""
    c, arrays = t.c, dict(t.arrays)
    if c.varlen:
        arrays["max_seqlen_q"] = c.longest
    if c.append:
        arrays |= {"k_new": t.k_new, "v_new": t.v_new}
    if c.rotary_dim:
        arrays |= {"rotary_cos": t.cos, "rotary_sin": t.sin}
    return strobe.attention_with_kvcache(
        t.q, t.k, t.v, **arrays, alibi_slopes=t.slopes, causal=c.causal, window=tuple(None if x == st.NO_LIMIT else x for x in c.window),
        window_signed=c.window_signed, softcap=c.softcap,
        attention_chunk=c.chunk, rotary_interleaved=c.interleaved, batch_invariant=c.batch_invariant, return_lse=True,
        out_dtype="float32" if c.out_dtype == torch.float32 else None,
    )  # fmt: skip


def suits_flash_attn(c: CacheCase) -> bool:
    extra = {"seqused_q", "q_position", "prefix", "rotary_position"} & c.given
    return not (c.varlen or c.append == PACKED or extra or c.chunk or c.window_signed or c.batch_invariant or c.out_dtype != c.dtype)


def as_flash_attn(c: CacheCase) -> None:
    """flash_attn counts the positions of the rotary embedding from the cache's first row."""
    for s in c.sequences:
        s.rotary_position = s.used
    c.rotary_rows = max(s.rotary_position + max(s.used_queries, s.added, 1) for s in c.sequences)


def call_flash_attn(t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    c, get = t.c, t.arrays.get
    new = (t.k_new, t.v_new) if c.append else (None, None)
    tables = (t.cos, t.sin) if c.rotary_dim else (None, None)
    return flash_attn.flash_attn_with_kvcache(
        t.q, t.k, t.v, *new, *tables, get("seqused_k"), get("cache_batch_idx"), get("leftpad"), get("block_table"),
        causal=c.causal, window_size=c.window, softcap=c.softcap, rotary_interleaved=c.interleaved,
        alibi_slopes=t.slopes, return_softmax_lse=True,
    )  # fmt: skip


def eager(seed: int) -> str:
    c = drawn(seed)
    called = "attention_with_kvcache"
    if suits_flash_attn(c):
        called = "flash_attn_with_kvcache"
        as_flash_attn(c)
    t = Tensors(c, DEVICE)
    before = [pool.clone() for pool in t.pools]
    t.out, t.lse = call_flash_attn(t) if called == "flash_attn_with_kvcache" else call_all(t)
    check(t, before)
    return called


def captured(sets: int) -> str:
    """Decoding as an engine does it: append, turn and attend in one launch, replayed with other lengths and pages."""
    c = CacheCase(
        3, torch.bfloat16, torch.bfloat16, 32, 8, 128, 128, True, 0, 0, 16, 40, 640, [], append=DENSE,
        given={"seqused_k"}, causal=True, rotary_dim=128, rotary_rows=700, interleaved=False,
    )  # fmt: skip
    c.sequences = [Sequence(1, 1, 40 * b, 1, pages=list(range(40 * b, 40 * b + 40))) for b in range(8)]
    c.entries = 8 * 40
    as_flash_attn(c)
    c.rotary_rows = 700
    t = Tensors(c, DEVICE)
    call_flash_attn(t)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call_flash_attn(t)
    r = random.Random(5)
    for n in range(sets):
        pages = r.sample(range(c.entries), c.entries)
        for s in c.sequences:
            s.used = r.choice((0, 15, 16, 639, r.randint(0, 639)))
            s.pages = [pages.pop() for _ in range(40)]
        as_flash_attn(c)
        c.rotary_rows = 700
        for name, values in t.make_arrays().items():
            t.arrays[name].copy_(values)
        for s in c.sequences:
            at = t.places(s, 0, s.used)
            t.k[at], t.v[at] = (t.random(s.used, 8, 128).to(c.dtype) for _ in range(2))
        before = [pool.clone() for pool in t.pools]
        graph.replay()
        t.out, t.lse = found
        try:
            check(t, before)
        except AssertionError as e:
            raise AssertionError(f"set {n}: {e}") from e
    return f"captured, {sets} sets"


def packed_in_flash_attn_3() -> str:
    """Packed queries and packed new keys, FlashAttention-3's way, equal one sequence after the other."""
    torch.manual_seed(1)
    kind = {"dtype": torch.bfloat16, "device": DEVICE}
    k, v = (torch.randn(20, 64, 2, 128, **kind) for _ in range(2))
    alone = [k.clone(), v.clone()]
    queries, used = (5, 1, 0, 3), (100, 63, 10, 0)
    q = torch.randn(sum(queries), 8, 128, **kind)
    new = [torch.randn(sum(queries), 2, 128, **kind) for _ in range(2)]
    cos, sin = (torch.randn(300, 64, **kind) for _ in range(2))
    table = torch.randperm(20, device=DEVICE).to(torch.int32).view(4, 5)
    lengths = torch.tensor(used, dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, 5, 6, 6, 9], dtype=torch.int32, device=DEVICE)
    out = flash_attn_3.flash_attn_with_kvcache(
        q, k, v, *new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths, page_table=table, cu_seqlens_q=offsets,
        cu_seqlens_k_new=offsets, max_seqlen_q=5, causal=True,
    )  # fmt: skip
    for b, (begin, end) in enumerate(zip((0, 5, 6, 6), (5, 6, 6, 9), strict=True)):
        if begin == end:
            continue
        one = flash_attn.flash_attn_with_kvcache(
            q[None, begin:end], *alone, *(x[None, begin:end] for x in new), cos, sin, lengths[b : b + 1],
            block_table=table[b : b + 1], causal=True, rotary_interleaved=True,
        )  # fmt: skip
        assert float((out[begin:end].float() - one[0].float()).abs().max()) < 2e-2, f"sequence {b}"
    assert torch.equal(k, alone[0]) and torch.equal(v, alone[1]), "the caches differ"
    return "flash_attn_3"


@contextlib.contextmanager
def looking(yes: bool) -> Iterator[None]:
    """Numbers are looked at; else whatever of PyTorch's waits for the device is an error."""
    before = os.environ.pop("STROBE_CHECK_VALUES", None)
    try:
        if yes:
            os.environ["STROBE_CHECK_VALUES"] = "1"
        elif DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        os.environ.pop("STROBE_CHECK_VALUES", None)
        if before is not None:
            os.environ["STROBE_CHECK_VALUES"] = before


def out_of_range() -> str:
    """Numbers out of range raise with STROBE_CHECK_VALUES=1 (and on the CPU), name the argument, and nothing is written. Without
    it, the rows of that sequence are NaN on a GPU, those of the other are not, and the call does not wait for the device.
    """
    kind = {"dtype": torch.bfloat16, "device": DEVICE}
    k, v = (torch.randn(6, 16, 2, 64, **kind) for _ in range(2))
    before = k.clone()
    q, new = torch.randn(2, 1, 4, 64, **kind), torch.randn(2, 1, 2, 64, **kind)
    good_table, good_lengths = [[0, 1], [2, 3]], [16, 30]

    def call(table: list[list[int]], lengths: list[int], look: bool) -> torch.Tensor:
        numbers = {"cache_seqlens": lengths, "block_table": table}
        tensors = {n: torch.tensor(x, dtype=torch.int32, device=DEVICE) for n, x in numbers.items()}
        caches = (k, v) if look else (k.clone(), v.clone())
        with looking(look):
            return flash_attn.flash_attn_with_kvcache(q, *caches, new, new, **tensors)

    wanted = call(good_table, good_lengths, look=False)
    for name, table, lengths, bad in (
        ("block_table", [[0, 6], [2, 3]], good_lengths, 0),
        ("block_table", [[0, 1], [-1, 3]], good_lengths, 1),
        ("cache_seqlens", good_table, [16, 32], 1),
        ("cache_seqlens", good_table, [-1, 30], 0),
    ):
        try:
            call(table, lengths, look=True)
        except strobe.InvalidArgument as e:
            assert name in str(e), f"{name} is not named: {e}"
        else:
            raise AssertionError(f"{name} out of range was not refused")
        assert torch.equal(k, before), f"{name} out of range: the cache was written"
        if DEVICE == "cuda":
            out = call(table, lengths, look=False)
            assert bool(out[bad].isnan().all()), f"{name} out of range: expected NaN for sequence {bad}"
            assert torch.equal(out[1 - bad], wanted[1 - bad]), f"{name} out of range: the other sequence differs"
    call(good_table, good_lengths, look=True)
    return "out of range"


def merged(seed: int) -> str:
    """strobe.merge against float64: rows without keys in some parts or in all, NaN where nobody may look, strides."""
    r = random.Random(seed)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    parts, packed = r.choice((1, 2, 5, 33, 70)), r.random() < 0.5
    rows = [r.choice((1, 7, 100))] if packed else [r.choice((1, 3)), r.choice((1, 7, 40))]
    heads, dim = r.choice((1, 3, 8)), r.choice((1, 31, 64, 128, 200, 256))
    outs = torch.randn(parts, *rows, heads, dim, generator=generator, device=DEVICE)
    last = [heads, rows[-1]]
    lses = 20 * torch.randn(parts, *rows[:-1], *last, generator=generator, device=DEVICE)
    lses += r.choice((0.0, 0.0, 1e4, -1e4))
    gone = torch.rand(lses.shape, generator=generator, device=DEVICE) < r.choice((0.0, 0.3, 0.9))
    lses[gone] = -math.inf
    outs[gone.transpose(-1, -2)] = math.nan
    wanted_lse = lses.double().logsumexp(0)
    weights = (lses.double() - wanted_lse).exp().nan_to_num(0).transpose(-1, -2)[..., None]
    wanted = (weights * outs.double().nan_to_num(0)).sum(0)
    kind = r.choice((torch.float32, torch.bfloat16, torch.float16))
    if r.random() < 0.5:  # rows further apart than they need be, heads before rows
        wide = torch.full((*outs.shape[:-3], heads, rows[-1], dim + 5), math.nan, device=DEVICE)
        wide[..., :dim] = outs.transpose(-2, -3)
        outs = wide[..., :dim].transpose(-2, -3)
    storage = torch.full((2 * 4096 + wanted.numel(),), math.nan, dtype=kind, device=DEVICE)
    out = storage[4096 : 4096 + wanted.numel()].view(wanted.shape)
    _, lse = strobe.merge(list(outs) if r.random() < 0.3 else outs, lses, out=out)
    # Weights are exp of differences of float32 logarithms, which have errors of their own size.
    room = 4e-6 + 4e-7 * float(lses[~gone].abs().max() if bool((~gone).any()) else 0)
    empty = wanted_lse == -math.inf
    assert bool((lse[empty] == -math.inf).all()), "lse of rows without keys, expected -inf"
    check_close("lse", lse[~empty], wanted_lse[~empty], [wanted_lse[~empty].float()], room)
    check_close("out", out, wanted, [wanted.to(kind)], 8 * room)
    assert bool(storage[:4096].isnan().all() and storage[-4096:].isnan().all()), "a red zone was written"
    return "merge"


def main() -> int:
    parser = argparse.ArgumentParser(description="The Python functions over KV caches on the GPU.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: the test itself")
    options = parser.parse_args()
    global DEVICE
    DEVICE = options.device
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("gpu kvcache: skipped (no GPU)")
        return 0
    done: collections.Counter[str] = collections.Counter()
    failed = 0
    seeds = range(options.first, options.first + options.count)
    tests = [("flash_attn_3", packed_in_flash_attn_3), ("out of range", out_of_range)]
    if DEVICE == "cuda":
        tests.append(("captured", lambda: captured(20)))
    tests += [(f"eager {n}", lambda n=n: eager(n)) for n in seeds]
    tests += [(f"merged {n}", lambda n=n: merged(n)) for n in seeds]
    for name, test in tests:
        try:
            done[test()] += 1
        except (AssertionError, strobe.Error) as e:
            failed += 1
            if failed <= 8:
                print(f"gpu kvcache: {name} FAILED: {type(e).__name__}: {e}", flush=True)
    print("gpu kvcache: " + ", ".join(f"{n} {name}" for name, n in done.items()) + f"; {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
