"""Random problems over a KV cache on torch tensors, and float64 attention over the gathered cache.

Rows and pages that are not in use hold NaN; the pool, out and lse lie between red zones. Nothing of the reference comes
from the library.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import strobe_torch as st
import torch
from device import CACHED, narrowed
from spacing import Spacing, place
from spacing import draw as draw_spacing

NONE, DENSE, PACKED = 0, 1, 2  # append
TMA_READS = ("q", "k", "v", "out")  # and writes
ROWS_FIRST, HEADS_FIRST, INTERLEAVED = range(3)  # layouts of the cache


@dataclass
class Sequence:
    """One sequence. Rows of the cache are counted as seqused_k and leftpad count them."""

    queries: int
    used_queries: int
    used: int = 0
    added: int = 0
    leftpad: int = 0
    q_position: int = 0
    prefix: int = 0
    rotary_position: int = 0
    entry: int = 0  # contiguous
    pages: list[int] = field(default_factory=list)  # paged: its row of the table
    is_bad: bool = False  # a number of it is out of range: NaN, and nothing is written

    @property
    def keys(self) -> int:
        return self.used - self.leftpad + self.added


@dataclass
class CacheCase:
    """A problem, as strobe_problem has it."""

    seed: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    paged: bool
    layout: int
    entries: int  # or pages
    rows: int  # of each
    columns: int
    most_rows: int  # seqlen_k
    sequences: list[Sequence]
    append: int = NONE
    varlen: bool = False
    given: set[str] = field(default_factory=set)  # arrays: seqused_q, leftpad, ...
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    window_signed: bool = False
    chunk: int = 0
    softcap: float = 0.0
    alibi: int = 0
    rotary_dim: int = 0
    rotary_rows: int = 0
    interleaved: bool = False
    batch_invariant: bool = False
    prompts: bool = False
    past: int = 0  # packed queries: rows past the end of the last sequence
    past_new: int = 0  # packed new keys: likewise

    @property
    def batch(self) -> int:
        return len(self.sequences)

    @property
    def queries_move(self) -> bool:
        return self.causal or self.chunk > 0 or self.window_signed or max(self.window) >= 0 or st.HIDDEN_KEYS > 0

    @property
    def total(self) -> int:
        return self.past + sum(s.queries for s in self.sequences)

    @property
    def total_new(self) -> int:
        return self.past_new + sum(s.added for s in self.sequences)

    @property
    def longest(self) -> int:
        return max(s.queries for s in self.sequences)

    @property
    def longest_new(self) -> int:
        return max(s.added for s in self.sequences)

    def spacing(self, of: str) -> Spacing:
        """Of q, k, v, k_new, v_new, out, lse, cos or sin."""
        units = self.prompts and of in TMA_READS
        spacing = draw_spacing(f"{self.seed} {of}", units)
        if of in ("k", "v"):  # the layout says
            spacing = replace(spacing, heads_first=False)
        if units and self.batch_invariant:
            return replace(spacing, odd_stride=0)  # a batch of one goes where a larger one goes
        return spacing


def length(r: random.Random, most: int) -> int:
    return r.choice((0, min(1, most), most, *(r.randint(0, most) for _ in range(5))))


def draw(seed: int, dtypes: list[torch.dtype], longest: int = 0, prompts: bool = False) -> CacheCase:
    """longest: rows that a sequence may have; 0: drawn too. prompts: what TMA can read, with many queries, or in packed
    sequences some with many and some with few."""
    r = random.Random(seed)
    heads_kv = r.choice((1, 1, 2, 3, 8))
    dim = narrowed(r.choice((64, 128, 128, 96, 256, 80, 8 * r.randint(1, 32) if prompts and r.random() < 0.5 else r.randint(1, 256))), CACHED)
    dtype = r.choice(dtypes)
    queries = r.choice((70, 130, 300, 300) if prompts else (1, 1, 1, 4, 16, 70, 300))
    varlen = r.random() < 0.5
    sequences = []
    for _ in range(r.choice((1, 2, 5, 9))):
        n = length(r, r.choice((queries, 3)) if prompts else queries) if varlen else queries
        sequences.append(Sequence(n, n))
    paged = r.random() < 0.65
    longest = longest or r.choice((40, 40, 300, 300, 1500))
    sizes = (8, 16, 16, 24, 32, 40, 48, 64, 80, 128, 256) if prompts else (*range(1, 18), 16, 64, 64, 128, 256)
    rows = r.choice(sizes) if paged else r.randint(0, longest)
    columns = r.randint(0, max(longest // max(rows, 1), 2)) if paged else 0
    most_rows = columns * rows if paged else rows
    if paged and r.random() < 0.3:
        most_rows = r.randint(0, most_rows)
    c = CacheCase(
        seed, dtype, torch.float32 if r.random() < (0 if prompts else 0.25) else dtype, heads_kv * r.choice((1, 2, 4, 5, 8)), heads_kv, dim,
        dim if r.random() < 0.8 else 8 * r.randint(1, 32) if prompts else r.randint(1, 256), paged, r.randint(0, 2), 0, rows, columns, most_rows, sequences,
        varlen=varlen, causal=r.random() < 0.5, softcap=r.choice((0.0, 0.0, 0.0, 15.0)), alibi=r.choice((0, 0, 0, 1, 2)),
        batch_invariant=r.random() < 0.3, prompts=prompts,
    )  # fmt: skip
    c.past = r.randint(1, 200) if varlen and r.random() < 0.2 else 0
    c.past_new = r.randint(1, 40) if r.random() < 0.2 else 0
    if prompts:  # TMA writes whole units of out
        c.head_dim_v = (c.head_dim_v + 7) // 8 * 8
    c.head_dim_v = narrowed(c.head_dim_v, CACHED)
    if c.head_dim != c.head_dim_v and c.layout == INTERLEAVED:
        c.layout = HEADS_FIRST
    for name, chance in (("seqused_q", 0.2), ("seqused_k", 0.9), ("leftpad", 0.25), ("q_position", 0.15)):
        if r.random() < chance and not (name == "leftpad" and prompts and paged):
            c.given.add(name)
    if r.random() < 0.15:
        c.given.add("prefix")
    else:
        c.window = (r.choice((-1, -1, -1, 0, r.randint(0, 200))), r.choice((-1, -1, -1, -1, r.randint(0, 40))))
        c.chunk = r.choice((0, 0, 0, 0, r.randint(1, 300)))
        if r.random() < 0.12:
            c.window, c.window_signed, c.chunk = st.draw_signed_window(r, c.causal), True, 0
    _draw_lengths(c, r)
    _draw_places(c, r)
    if dim >= 2 and r.random() < 0.5:
        c.rotary_dim = dim // 2 * 2 if r.random() < 0.5 else 2 * r.randint(1, dim // 2)
        c.interleaved = r.random() < 0.5
        if r.random() < 0.3:
            c.given.add("rotary_position")
        for s in sequences:
            s.rotary_position = r.randint(0, 60) if "rotary_position" in c.given else s.used - s.leftpad
        c.rotary_rows = max(s.rotary_position + max(s.used_queries, s.added, 1) for s in sequences)
    return c


def _draw_lengths(c: CacheCase, r: random.Random) -> None:
    if "seqused_k" in c.given and r.random() < 0.5:
        c.append = r.choice((DENSE, PACKED))
    most_new = min(c.most_rows, r.choice((1, 1, 5, 60)))
    for s in c.sequences:
        if "seqused_q" in c.given:
            s.used_queries = length(r, s.queries)
        if c.append:
            s.added = most_new if c.append == DENSE else length(r, most_new)
        s.used = length(r, c.most_rows - s.added) if "seqused_k" in c.given else c.most_rows
        if c.paged and "seqused_k" in c.given and r.random() < 0.4:  # the border of a page, or one before it
            s.used = max(s.used // c.rows * c.rows - r.choice((0, 1)), 0)
        if "leftpad" in c.given:
            s.leftpad = length(r, s.used)
        s.q_position = r.randint(-s.used_queries - 10, s.keys + 10)
        s.prefix = r.randint(0, s.keys)


def _draw_places(c: CacheCase, r: random.Random) -> None:
    """Whom each row of the cache belongs to. Rows that somebody writes are that sequence's alone."""
    if not c.paged:
        c.entries = c.batch + r.randint(0, 3)
        order = list(range(c.entries))
        if r.random() < 0.5:
            c.given.add("cache_batch_idx")
            r.shuffle(order)
        for s, entry in zip(c.sequences, order, strict=False):
            s.entry = entry
        return
    count = r.randint(1, 4)  # pages that nobody has
    for b, s in enumerate(c.sequences):
        for n in range(c.columns):
            begin, end = n * c.rows, (n + 1) * c.rows
            if s.keys == 0 or end <= s.leftpad or begin >= s.used + s.added:
                s.pages.append(r.choice((-1, -(2**31), 2**31 - 1, 10**6, 0)))
                continue
            other = c.sequences[r.randint(0, b)]
            written = s.added > 0 and end > s.used
            if other is not s and not written and other.leftpad <= begin and end <= other.used and r.random() < 0.3:
                s.pages.append(other.pages[n])  # a prefix that two sequences share
            elif not written and begin - c.rows >= s.leftpad and end <= s.used and r.random() < 0.1:
                s.pages.append(s.pages[n - 1])
            else:
                s.pages.append(count)
                count += 1
    c.entries = count
    order = list(range(count))
    r.shuffle(order)
    for s in c.sequences:
        for n in range(c.columns):
            if s.keys and (n + 1) * c.rows > s.leftpad and n * c.rows < s.used + s.added:
                s.pages[n] = order[s.pages[n]]


def make_hostile(c: CacheCase, seed: int) -> None:
    """Puts numbers out of range into some sequences: see the header of tests/gpu/cache.py for what has to follow."""
    r = random.Random(seed)
    ends = (-(2**31), -1, 2**31 - 1)
    for s in c.sequences:
        if r.random() < 0.4:
            continue
        kind = r.choice(("used", "leftpad", "entry", "rotary_position", "page", "page"))
        if kind == "used" and "seqused_k" in c.given:
            s.used = r.choice((*ends, c.most_rows - s.added + 1))
        elif kind == "leftpad" and "leftpad" in c.given:
            s.leftpad = r.choice((*ends, s.used + 1))
        elif kind == "entry" and "cache_batch_idx" in c.given:
            s.entry = r.choice((*ends, c.entries))
        elif kind == "rotary_position" and "rotary_position" in c.given and max(s.used_queries, s.added):
            s.rotary_position = r.choice((*ends, c.rotary_rows))
        elif kind == "page" and c.paged and s.keys:
            n = r.randint(s.leftpad // c.rows, (s.used + s.added - 1) // c.rows)
            s.pages[n] = r.choice((*ends, c.entries))
            continue
        else:
            continue
        s.is_bad = True


class Tensors:
    """The tensors of a case, on one device."""

    def __init__(self, c: CacheCase, device: torch.device | str) -> None:
        self.c, self.device = c, torch.device(device)
        self.generator = torch.Generator(device=device).manual_seed(c.seed)
        shape = (c.total, c.heads) if c.varlen else (c.batch, c.longest, c.heads)
        self.q = self.filled("q", (*shape, c.head_dim))
        self.out_storage, self.out = self.place("out", (*shape, c.head_dim_v), c.out_dtype)
        lse = (c.heads, c.total) if c.varlen else (c.batch, c.heads, c.longest)
        self.lse_storage, self.lse = self.place("lse", lse, torch.float32, contiguous=True)
        new = (c.total_new,) if c.append == PACKED else (c.batch, c.longest_new)
        self.k_new = self.filled("k_new", (*new, c.heads_kv, c.head_dim))
        self.v_new = self.filled("v_new", (*new, c.heads_kv, c.head_dim_v))
        self._place_cache()
        angles = 6.28 * torch.rand(c.rotary_rows, c.rotary_dim // 2, generator=self.generator, device=device)
        self.cos = self.place("cos", tuple(angles.shape), c.dtype, contiguous=True)[1].copy_(angles.cos())
        self.sin = self.place("sin", tuple(angles.shape), c.dtype, contiguous=True)[1].copy_(angles.sin())
        slopes = (c.heads,) if c.alibi == 1 else (c.batch, c.heads)
        self.slopes = 0.2 * torch.rand(slopes, generator=self.generator, device=device) if c.alibi else None
        for b, s in enumerate(c.sequences):
            self.queries(self.q, b)[s.used_queries :] = math.nan
        if c.past:
            self.q[-c.past :] = math.nan
        self.arrays = self.make_arrays()

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def place(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, contiguous: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory full of NaN, and in it a tensor where the case's spacing puts it."""
        spacing = self.c.spacing(name)
        if contiguous:
            spacing = Spacing(spacing.shift)
        return place(shape, dtype, spacing, math.nan, self.device, self.c.prompts and name in TMA_READS)

    def filled(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.place(name, shape, self.c.dtype)[1].copy_(self.random(*shape))

    def _place_cache(self) -> None:
        c = self.c
        if c.layout == INTERLEAVED:
            pool, both = self.place("k", (c.entries, 2, c.rows, c.heads_kv, c.head_dim), c.dtype)
            self.pools, (self.k, self.v) = [pool], both.unbind(1)
        else:
            inner = (c.heads_kv, c.rows) if c.layout == HEADS_FIRST else (c.rows, c.heads_kv)
            k_pool, self.k = self.place("k", (c.entries, *inner, c.head_dim), c.dtype)
            v_pool, self.v = self.place("v", (c.entries, *inner, c.head_dim_v), c.dtype)
            self.pools = [k_pool, v_pool]
        if c.layout == HEADS_FIRST:
            self.k, self.v = self.k.transpose(1, 2), self.v.transpose(1, 2)
        for s in c.sequences:
            at = self.places(s, 0, s.used - s.leftpad)
            if at[0].numel():
                self.k[at] = self.random(s.used - s.leftpad, c.heads_kv, c.head_dim).to(c.dtype)
                self.v[at] = self.random(s.used - s.leftpad, c.heads_kv, c.head_dim_v).to(c.dtype)

    def make_arrays(self) -> dict[str, torch.Tensor]:
        """Those that the case has given, as they are now."""
        c = self.c
        of = {
            "seqused_q": [s.used_queries for s in c.sequences],
            "seqused_k": [s.used for s in c.sequences],
            "leftpad": [s.leftpad for s in c.sequences],
            "q_position": [s.q_position for s in c.sequences],
            "prefix": [s.prefix for s in c.sequences],
            "cache_batch_idx": [s.entry for s in c.sequences],
            "rotary_position": [s.rotary_position for s in c.sequences],
        }
        lists = {name: values for name, values in of.items() if name in c.given}
        made = {n: torch.tensor(values, dtype=torch.int32, device=self.device) for n, values in lists.items()}
        if c.varlen:
            made["cu_seqlens_q"] = st.offsets([s.queries for s in c.sequences], self.device)
        if c.append == PACKED:
            made["cu_seqlens_k_new"] = st.offsets([s.added for s in c.sequences], self.device)
        if c.paged:
            table = torch.tensor([s.pages for s in c.sequences], dtype=torch.int64).view(c.batch, c.columns)
            made["block_table"] = table.to(torch.int32).to(self.device)
        return made

    def places(self, s: Sequence, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Entry (or page) and row of the keys begin to end - 1 of a sequence."""
        rows = torch.arange(s.leftpad + begin, s.leftpad + end, device=self.device)
        if not self.c.paged:
            return torch.full_like(rows, s.entry), rows
        pages = torch.tensor(s.pages, dtype=torch.int64, device=self.device)
        return pages[rows // self.c.rows], rows % self.c.rows

    def queries(self, tensor: torch.Tensor, b: int) -> torch.Tensor:
        """The rows of a sequence in q or out."""
        if not self.c.varlen:
            return tensor[b]
        first = sum(s.queries for s in self.c.sequences[:b])
        return tensor[first : first + self.c.sequences[b].queries]

    def lse_of(self, b: int) -> torch.Tensor:
        """[heads, queries]"""
        if not self.c.varlen:
            return self.lse[b]
        first = sum(s.queries for s in self.c.sequences[:b])
        return self.lse[:, first : first + self.c.sequences[b].queries]

    def new_rows(self, tensor: torch.Tensor, b: int) -> torch.Tensor:
        """The rows of a sequence in k_new or v_new."""
        s = self.c.sequences[b]
        if self.c.append == DENSE:
            return tensor[b]
        first = sum(each.added for each in self.c.sequences[:b])
        return tensor[first : first + s.added]

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [rows, heads, dim] in float64, turned by the angles of the rows' positions."""
        c, x = self.c, x.double()
        if c.rotary_dim == 0 or x.shape[0] == 0:
            return x
        cos, sin = (t.double()[positions][:, None, :] for t in (self.cos, self.sin))
        pairs = c.rotary_dim // 2
        first = slice(0, c.rotary_dim, 2) if c.interleaved else slice(0, pairs)
        second = slice(1, c.rotary_dim, 2) if c.interleaved else slice(pairs, c.rotary_dim)
        y = x.clone()
        y[..., first] = x[..., first] * cos - x[..., second] * sin
        y[..., second] = x[..., first] * sin + x[..., second] * cos
        return y

    def turned_queries(self, b: int) -> torch.Tensor:
        s = self.c.sequences[b]
        steps = torch.arange(s.used_queries, device=self.device)
        positions = s.rotary_position + (steps if self.c.queries_move else 0 * steps)
        return self.rotate(self.queries(self.q, b)[: s.used_queries], positions)

    def turned_keys(self, b: int) -> torch.Tensor:
        s = self.c.sequences[b]
        return self.rotate(self.new_rows(self.k_new, b), s.rotary_position + torch.arange(s.added, device=self.device))

    def rule(self, b: int) -> st.Rule:
        """Of sequence b."""
        c, s = self.c, self.c.sequences[b]
        return st.Rule(
            1 / math.sqrt(c.head_dim), c.softcap, c.causal, c.window, c.window_signed, c.chunk,
            s.prefix if "prefix" in c.given else 0, s.q_position if "q_position" in c.given else s.keys - s.used_queries,
        )  # fmt: skip

    def attention(
        self, b: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, stored_weights: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out [nq, heads, dim] and lse [heads, nq] of sequence b, in plain tensor operations of `dtype`; stored_weights:
        with weights rounded at random."""
        c = self.c
        slopes = None if self.slopes is None else self.slopes if c.alibi == 1 else self.slopes[b]
        stored = (c.dtype, self.generator) if stored_weights else None
        return st.attend(self.rule(b), q, k, v, slopes, dtype=dtype, stored_weights=stored)
