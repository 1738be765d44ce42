"""With batch_invariant a row's bits do not depend on how it came about: as part of a prompt, of one
of its chunks, verified among a few, or decoded alone; from whole tensors, packed ones, a contiguous
cache or pages; beside other sequences, and on any number of threads.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import strobe

torch = pytest.importorskip("torch")

# Lengths around the places where keys are cut, and one of several cuts.
LENGTHS = (1, 7, 63, 64, 65, 130, 255, 256, 257, 300, 513, 700, 1100)
LENGTHS_ON_GPUS = (2047, 2100, 4500)
PAGES = (1, 16, 48, 64, 256)


def draw_options(rng: Any, heads: int, device: str) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": bool(rng.random() < 0.8), "batch_invariant": True}
    if rng.random() < 0.3:
        options["window"] = (int(rng.integers(1, 400)), 0 if options["causal"] else 50)
    elif rng.random() < 0.2:
        options["attention_chunk"] = int(rng.integers(20, 300))
    if rng.random() < 0.25:
        options["softcap"] = float(rng.choice([5, 50]))
    if rng.random() < 0.25:
        slopes = torch.from_numpy(rng.random(heads).astype(np.float32) / 8)
        options["alibi_slopes"] = slopes.to(device)
    if rng.random() < 0.2:
        options["scale"] = float(rng.choice([-0.2, 0.0, 0.5]))
    if rng.random() < 0.2:
        sinks = torch.from_numpy(rng.standard_normal(heads).astype(np.float32) * 3)
        options["sinks"] = sinks.to(device)
    return options


@dataclass
class Sequence:
    """A sequence, its options and the rows of a prompt of all its queries."""

    q: Any
    k: Any
    v: Any
    options: dict[str, Any]
    rng: Any
    out: Any = None
    lse: Any = None

    @property
    def size(self) -> int:
        return len(self.q)

    def seen(self, end: int) -> int:
        """Keys that a call has whose last query is the one before `end`: under a causal mask those
        up to that query's own, or more.
        """
        n = self.size
        return int(self.rng.integers(end, n + 1)) if self.options["causal"] else n

    def numbers(self, **lists: list[int]) -> dict[str, Any]:
        return {
            name: torch.tensor(x, dtype=torch.int32, device=self.q.device)
            for name, x in lists.items()
        }

    def others(self, rows: int) -> list[Any]:
        """q, k and v of another sequence, with so many queries."""
        keys = int(self.rng.integers(1, 500))
        return [
            torch.from_numpy(self.rng.standard_normal((n, *x.shape[1:])).astype(np.float32)).to(x)
            for n, x in ((rows, self.q), (keys, self.k), (keys, self.v))
        ]

    def threads(self) -> int:
        return int(self.rng.choice([1, 2, 3, 8, 16]))


def dense(s: Sequence, rows: slice) -> tuple[Any, Any]:
    keys = s.seen(rows.stop)
    out, lse = strobe.attention(
        s.q[None, rows], s.k[None, :keys], s.v[None, :keys], return_lse=True, threads=s.threads(),
        **s.numbers(q_position=[rows.start]), **s.options,
    )  # fmt: skip
    return out[0], lse[0]


def packed(s: Sequence, rows: slice) -> tuple[Any, Any]:
    """Between two other sequences."""
    keys, n = s.seen(rows.stop), rows.stop - rows.start
    before, after = s.others(int(s.rng.integers(1, 200))), s.others(1)
    mine = [s.q[rows], s.k[:keys], s.v[:keys]]
    q, k, v = (torch.cat(x) for x in zip(before, mine, after, strict=True))
    lengths_q, lengths_k = ([len(x[i]) for x in (before, mine, after)] for i in (0, 1))
    out, lse = strobe.attention(
        q, k, v, return_lse=True, threads=s.threads(),
        **s.numbers(
            cu_seqlens_q=list(itertools.accumulate([0, *lengths_q])),
            cu_seqlens_k=list(itertools.accumulate([0, *lengths_k])),
            q_position=[0, rows.start, 5],
        ),
        max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k), **s.options,
    )  # fmt: skip
    first = lengths_q[0]
    return out[first : first + n], lse[:, first : first + n]


def cached(s: Sequence, rows: slice, page: int, many: bool) -> tuple[Any, Any]:
    """page: rows of a page, 0: a contiguous cache. many: beside other sequences."""
    keys, batch = s.seen(rows.stop), 3 if many else 1
    at = batch // 2
    capacity = s.size + int(s.rng.integers(0, 80))
    columns = -(-capacity // page) if page else 1
    entries = batch * columns
    order = torch.from_numpy(s.rng.permutation(entries)).view(batch, columns)
    k, v = (torch.randn(entries, page or capacity, *x.shape[1:]).to(x) for x in (s.k, s.v))
    rows_of = torch.arange(keys)
    entry = order[at, rows_of // page] if page else order[at, torch.zeros_like(rows_of)]
    row = rows_of % page if page else rows_of
    for to, values in ((k, s.k), (v, s.v)):
        to[entry, row] = values[:keys]
    q = torch.randn(batch, rows.stop - rows.start, *s.q.shape[1:]).to(s.q)
    q[at] = s.q[rows]
    # Some keys may come with the launch, after what the cache has.
    new = int(s.rng.integers(1, min(keys, 5) + 1)) if s.rng.random() < 0.3 else 0
    used = [int(s.rng.integers(0, capacity + 1 - new)) for _ in range(batch)]
    used[at] = keys - new
    appended = {}
    if new:
        appended = {
            name: torch.randn(batch, new, *values.shape[1:]).to(values)
            for name, values in (("k_new", s.k), ("v_new", s.v))
        }
        for name, to, values in (("k_new", k, s.k), ("v_new", v, s.v)):
            appended[name][at] = values[keys - new : keys]
            to[entry[keys - new :], row[keys - new :]] = 7
    positions = [int(s.rng.integers(0, 300)) for _ in range(batch)]
    positions[at] = rows.start
    where = {"block_table": order.tolist()} if page else {"cache_batch_idx": order[:, 0].tolist()}
    out, lse = strobe.attention_with_kvcache(
        q, k, v, return_lse=True, threads=s.threads(),
        **s.numbers(seqused_k=used, q_position=positions, **where), **appended, **s.options,
    )  # fmt: skip
    return out[at], lse[at]


def is_hopper(device: str) -> bool:
    return device == "cuda" and torch.cuda.get_device_capability()[0] == 9


def ways(rng: Any, device: str) -> list[Any]:
    # Packed rows have other kernels on GPUs before Hopper, and pages of a row on Hopper.
    pages = PAGES[1:] if is_hopper(device) else PAGES
    return [
        dense,
        *([packed] if device == "cpu" or is_hopper(device) else []),
        lambda s, rows: cached(s, rows, 0, many=bool(rng.random() < 0.5)),
        lambda s, rows: cached(s, rows, int(rng.choice(pages)), many=bool(rng.random() < 0.5)),
    ]


def pieces(rng: Any, size: int) -> list[slice]:
    """Some pieces of a sequence: single rows, a few, and chunks of a prompt."""
    found = [slice(size - 1, size)]
    for most in (1, 3, 8, 8, 30, 100, size):
        n = int(rng.integers(1, min(most, size) + 1))
        begin = int(rng.integers(0, size - n + 1))
        found.append(slice(begin, begin + n))
    return found


def draw(seed: int, dtype: Any, device: str) -> Sequence:
    rng = np.random.default_rng(seed)
    size = int(rng.choice(LENGTHS + (LENGTHS_ON_GPUS if device == "cuda" else ())))
    group, heads_kv = int(rng.choice([1, 1, 2, 4, 7])), int(rng.choice([1, 2, 3]))
    dim = int(rng.choice([8, 40, 64, 96, 128, 192, 256]))
    dim_v = dim if rng.random() < 0.7 else int(rng.choice([16, 72, 128]))
    heads = group * heads_kv
    q, k, v = (
        torch.from_numpy(rng.standard_normal((size, h, d)).astype(np.float32)).to(device, dtype)
        for h, d in ((heads, dim), (heads_kv, dim), (heads_kv, dim_v))
    )
    # Maxima that come late, and weights near nothing; some far beyond the first scores.
    q *= float(rng.choice([1, 4, 40]))
    if dtype == torch.bfloat16 and seed % 4 == 2:  # O leaves float32 before it is divided
        v = v.sign() * 2.5e38
    s = Sequence(q, k, v, draw_options(rng, heads, device), rng)
    out, lse = strobe.attention(q[None], k[None], v[None], return_lse=True, **s.options)
    s.out, s.lse = out[0], lse[0]
    return s


def same_bits(a: Any, b: Any) -> bool:
    """Also of zeros, whose signs `torch.equal` does not look at."""
    words = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(torch.equal(a.contiguous().view(words), b.contiguous().view(words)))


def dtypes_of(device: str) -> list[Any]:
    on_both = [torch.bfloat16, torch.float16]
    return on_both if device == "cuda" else [torch.float32, *on_both]


# Also run over emulated tiles of AMX (scripts/test.sh): draws of bfloat16 at some head dimensions.
OVER_AMX = {0, 6, 22}


@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=[pytest.mark.amx] if i in OVER_AMX else []) for i in range(24)]
)
def test_rows_have_the_same_bits_whatever_they_are_part_of(seed: int, device: str) -> None:
    for dtype in dtypes_of(device):
        s = draw(seed, dtype, device)
        # The emulated kernels are run for their own sake: others would pass as well.
        is_amx = os.environ.get("STROBE_CPU_ISA") == "amx" and dtype == torch.bfloat16
        if is_amx and not {"softcap", "alibi_slopes"} & s.options.keys():
            q, k, v = (x[None] for x in (s.q, s.k, s.v))
            assert re.search(r"^kernel +cpu_amx$", strobe.plan(q, k, v, **s.options), re.M)
        for rows in pieces(s.rng, s.size):
            for n, way in enumerate(ways(s.rng, device)):
                out, lse = way(s, rows)
                what = f"of rows {rows.start} to {rows.stop} of {s.size}, way {n}, {s.options}"
                assert same_bits(lse, s.lse[:, rows]), f"lse {what}"
                assert same_bits(out, s.out[rows]), f"out {what}"


@pytest.mark.parametrize(
    ("dim", "options"),
    [
        pytest.param(40, {}, marks=pytest.mark.amx),
        pytest.param(256, {}, marks=pytest.mark.amx),
        (128, {"softcap": 5.0}),
        (192, {"alibi_slopes": [0.01, 0.0]}),
        (256, {"softcap": 20.0, "scale": -0.1}),
    ],
    ids=str,
)
def test_rows_of_many_keys(dim: int, options: dict[str, Any], device: str) -> None:
    """Of chunks of keys on several levels of a tree, or of several pieces on a GPU."""
    rng = np.random.default_rng(5)
    size, end = 5300, 60
    options = {"causal": True, "batch_invariant": True, **options}
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.tensor(options["alibi_slopes"], device=device)
    # On CPUs dtypes differ in how they are read, and options in what is then computed.
    for dtype in dtypes_of(device) if dim == 40 or device == "cuda" else [torch.bfloat16]:
        q, k, v = (
            torch.from_numpy(rng.standard_normal((size, h, dim)).astype(np.float32)).to(
                device, dtype
            )
            for h in (2, 1, 1)
        )
        s = Sequence(q, k, v, options, rng)
        prompt = slice(size - end, size)
        out, lse = dense(s, prompt)
        for first, n in ((end - 1, 1), (13, 1), (30, 8), (2, 33)):
            rows = slice(prompt.start + first, prompt.start + first + n)
            for way in ways(rng, device):
                own_out, own_lse = way(s, rows)
                assert same_bits(own_lse, lse[:, first : first + n]), f"lse of {rows}"
                assert same_bits(own_out, out[first : first + n]), f"out of {rows}"
