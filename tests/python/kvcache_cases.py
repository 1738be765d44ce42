"""Random problems with a key-value cache, and their results held against the oracle.

Rows and pages that are not in use hold NaN, columns of the table without keys hold nonsense.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import strobe

import oracle
from cases import DTYPES, Array, normal

NONSENSE = (-7, 2**30, -(2**31))


@dataclass
class Sequence:
    """used: rows in the cache before the append, a left pad included; added: rows appended."""

    queries: int
    used: int
    added: int = 0
    leftpad: int = 0
    used_queries: int = -1
    places: Array = field(default_factory=lambda: np.zeros((0, 2), int))  # (entry or page, row)

    @property
    def keys(self) -> int:
        return self.used + self.added - self.leftpad

    @property
    def rows(self) -> Array:
        """Where its keys are, appended ones included."""
        return self.places[self.leftpad : self.used + self.added]

    @property
    def new_rows(self) -> Array:
        return self.places[self.used : self.used + self.added]


@dataclass
class CacheCase:
    """page_size 0: contiguous. layout of the pool: "rows", "heads" (before rows) or "interleaved"
    (K and V in one pool).
    """

    sequences: list[Sequence]
    page_size: int = 0
    capacity: int = 40
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int = 32
    dtype: str = "float32"
    layout: str = "rows"
    packed: bool = False  # queries
    packed_new: bool = False
    rotary_dim: int = 0
    rotary_given: bool = False  # positions
    indexed: bool = False  # cache_batch_idx
    alibi: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()  # of seqused_q, q_position, prefix

    def make(self, rng: np.random.Generator) -> Arrays:
        return Arrays(self, rng)


class Arrays:
    """The arrays of a case: `arguments` are those of strobe.attention_with_kvcache."""

    def __init__(self, case: CacheCase, rng: np.random.Generator) -> None:
        self.case, dtype = case, DTYPES[case.dtype]
        sequences, batch = case.sequences, len(case.sequences)
        if case.page_size:
            self._give_pages(rng)
        else:
            self.entries, self.extent = batch + 2, case.capacity
            chosen = rng.permutation(self.entries) if case.indexed else np.arange(self.entries)
            self.index = chosen[:batch].astype(np.int32)
            for s, entry in zip(sequences, self.index, strict=True):
                rows = np.arange(case.capacity)
                s.places = np.stack([np.full_like(rows, entry), rows], 1)
        self.k, self.v = self._pools(dtype)
        for s in sequences:
            page, row = s.places[s.leftpad : s.used].T
            self.k[page, row] = normal(rng, (len(row), case.heads_kv, case.head_dim), dtype)
            self.v[page, row] = normal(rng, (len(row), case.heads_kv, case.head_dim_v), dtype)
        self.before = [self.k.copy(), self.v.copy()]
        longest = max(s.queries for s in sequences)
        if not case.packed:
            for s in sequences:
                s.queries = longest
        for s in sequences:
            s.used_queries = (
                int(rng.integers(0, s.queries + 1)) if "seqused_q" in case.given else s.queries
            )
        added = max(s.added for s in sequences)
        total = sum(s.queries for s in sequences)
        rows_q = (total,) if case.packed else (batch, longest)
        self.q = normal(rng, (*rows_q, case.heads, case.head_dim), dtype)
        self.arguments: dict[str, Any] = dict(case.options)
        self._give("seqused_k", [s.used for s in sequences])
        if case.packed:
            self._give("cu_seqlens_q", np.cumsum([0, *(s.queries for s in sequences)]))
        if case.page_size:
            self.arguments["block_table"] = self.table
        elif case.indexed:
            self._give("cache_batch_idx", self.index)
        if any(s.leftpad for s in sequences):
            self._give("leftpad", [s.leftpad for s in sequences])
        if added:
            rows_new = (sum(s.added for s in sequences),) if case.packed_new else (batch, added)
            for name, dim in (("k_new", case.head_dim), ("v_new", case.head_dim_v)):
                self.arguments[name] = normal(rng, (*rows_new, case.heads_kv, dim), dtype)
            if case.packed_new:
                self._give("cu_seqlens_k_new", np.cumsum([0, *(s.added for s in sequences)]))
        self.starts = np.array([s.used - s.leftpad for s in sequences])
        if case.rotary_dim:
            if case.rotary_given:
                self.starts = rng.integers(0, 9, batch)
                self._give("rotary_position", self.starts)
            angles = rng.uniform(0, 7, (case.capacity + longest + 99, case.rotary_dim // 2))
            self.arguments["rotary_cos"] = np.cos(angles).astype(dtype)
            self.arguments["rotary_sin"] = np.sin(angles).astype(dtype)
        if "seqused_q" in case.given:
            self._give("seqused_q", [s.used_queries for s in sequences])
        for name in ("q_position", "prefix"):
            if name in case.given:
                self._give(name, [rng.integers(0, s.keys + 1) for s in sequences])
        if case.alibi:
            slopes = rng.uniform(0.01, 0.3, (batch, case.heads)).astype(np.float32)
            self.arguments["alibi_slopes"] = slopes

    def _give(self, name: str, numbers: Any) -> None:
        self.arguments[name] = np.array(numbers, np.int32)

    def _give_pages(self, rng: np.random.Generator) -> None:
        """Pages that are appended to belong to one sequence; others may repeat everywhere."""
        case, size = self.case, self.case.page_size
        columns = -(-case.capacity // size)
        case.capacity = columns * size
        held = [-(-(s.used + s.added) // size) for s in case.sequences]
        own = [
            h - s.used // size if s.added else 0 for h, s in zip(held, case.sequences, strict=True)
        ]
        shared = max(1, sum(held) // 2)
        self.entries, self.extent = shared + sum(own) + 2, size
        order = list(rng.permutation(self.entries))
        common = [order.pop() for _ in range(shared)]
        self.table = np.array(rng.choice(NONSENSE, (len(held), columns)), np.int32)
        for b, s in enumerate(case.sequences):
            row = [rng.choice(common) for _ in range(held[b] - own[b])]
            row += [order.pop() for _ in range(own[b])]
            self.table[b, : held[b]] = row
            at = np.arange(s.used + s.added)
            pages = self.table[b, at // size].astype(int)
            s.places = np.stack([pages, at % size], 1)

    def _pools(self, dtype: Any) -> tuple[Array, Array]:
        case, n = self.case, self.entries
        dims = (case.head_dim, case.head_dim_v)
        if case.layout == "interleaved" and dims[0] == dims[1]:
            both = np.full((n, 2, self.extent, case.heads_kv, dims[0]), np.nan, dtype)
            return both[:, 0], both[:, 1]
        if case.layout == "heads":
            pools = [np.full((n, case.heads_kv, self.extent, d), np.nan, dtype) for d in dims]
            return pools[0].swapaxes(1, 2), pools[1].swapaxes(1, 2)
        pools = [np.full((n, self.extent, case.heads_kv, d), np.nan, dtype) for d in dims]
        return pools[0], pools[1]

    # --------------------------------------------------------------------------------- expected

    def of_sequence(self, name: str, x: Array, b: int) -> Array:
        """Sequence b's rows of q, out, k_new or v_new."""
        count, packed = "queries", self.case.packed
        if name.endswith("_new"):
            count, packed = "added", self.case.packed_new
        lengths = [getattr(s, count) for s in self.case.sequences]
        rows: Array = x[sum(lengths[:b]) : sum(lengths[: b + 1])] if packed else x[b]
        return rows

    def cache(self) -> oracle.Cache:
        """The cache as it is now, for the oracle."""

        def flat(x: Array) -> Array:
            return x.reshape(-1, *x.shape[-2:])

        found, new_begin, given = [], 0, self.arguments
        longest = max(s.added for s in self.case.sequences)
        for b, s in enumerate(self.case.sequences):
            page, row = s.places[: s.used + s.added].T
            begin = new_begin if self.case.packed_new else b * longest
            found.append(
                oracle.CachedSequence(
                    s.leftpad, s.used, s.added, begin, int(self.starts[b]), page * self.extent + row
                )
            )
            new_begin += s.added
        cache = oracle.Cache(found, flat(self.k), flat(self.v))
        if "k_new" in given:
            cache.k_new, cache.v_new = flat(given["k_new"]), flat(given["v_new"])
        if "rotary_cos" in given:
            cache.cosines, cache.sines = given["rotary_cos"], given["rotary_sin"]
        cache.interleaved = bool(given.get("rotary_interleaved"))
        return cache

    def check_cache(self) -> None:
        """That appended rows are right, and no other byte of the pools changed."""
        eps = float(np.finfo(np.float32).eps) if self.case.dtype == "float32" else 2.0**-7
        eps = 2.0**-10 if self.case.dtype == "float16" else eps
        now = [self.k.copy(), self.v.copy()]
        all_k, all_v = self.cache().appended() if "k_new" in self.arguments else (None, None)
        first = 0
        for b, s in enumerate(self.case.sequences):
            if all_k is None or all_v is None or not s.added:
                continue
            page, row = s.new_rows.T
            wanted, v_new = (x[first : first + s.added] for x in (all_k, all_v))
            first += s.added
            room = 0.5 * eps * np.abs(wanted) + 1e-6
            room[..., self.case.rotary_dim :] = 0
            error = np.abs(self.k[page, row].astype(np.float64) - wanted)
            assert (error <= room).all(), f"appended k of sequence {b}: error {error.max()}"
            assert np.array_equal(self.v[page, row].astype(np.float64), v_new), (
                f"appended v of sequence {b}"
            )
            for x, y in zip(now, self.before, strict=True):
                x[page, row] = y[page, row]
        for x, y in zip(now, self.before, strict=True):
            kind = f"u{x.dtype.itemsize}"
            assert np.array_equal(x.view(kind), y.view(kind)), "the cache changed elsewhere"

    def check(self, out: Array, lse: Array) -> None:
        """Compares results with the keys that the cache holds after the call."""
        self.check_cache()
        case, options = self.case, self.arguments
        mask = ("causal", "window", "attention_chunk", "window_signed")
        problem = oracle.masked(**{name: options[name] for name in mask if name in options})
        more = {n: options[n] for n in ("scale", "softcap", "alibi_slopes") if n in options}
        sequences = oracle.sequences_of(
            [s.queries for s in case.sequences],
            [0] * len(case.sequences),
            [s.used_queries for s in case.sequences],
            None,
            options.get("q_position"),
            options.get("prefix"),
        )
        q = self.q.reshape(-1, *self.q.shape[-2:])
        turned, k, v, sequences = self.cache().gathered(q, sequences, problem)
        wanted = oracle.attend(turned, k, v, sequences, problem, **more)
        dtype = DTYPES[case.dtype]
        stored = turned.astype(dtype)
        near = oracle.Draws(
            lambda n: oracle.attend(
                stored, k, v, sequences, problem, round_to=dtype, noise_seed=n, **more
            )
        )
        got = out.reshape(wanted.out.shape)
        got_lse = lse.T if case.packed else lse.swapaxes(1, 2).reshape(wanted.lse.shape)
        oracle.check("out", got, wanted.out, near, oracle.OUT_FACTOR)
        oracle.check_lse("lse", got_lse, wanted.lse, wanted.size)
        first = 0
        for s in case.sequences:
            rest = slice(first + s.used_queries, first + s.queries)
            first += s.queries
            assert (got[rest] == 0).all(), "out of rows that are not in use"
            assert (got_lse[rest] == -np.inf).all(), "lse of rows that are not in use"

    def run(self) -> None:
        """Calls strobe.attention_with_kvcache and checks all that it gave and did."""
        out, lse = strobe.attention_with_kvcache(
            self.q, self.k, self.v, return_lse=True, **self.arguments
        )
        self.check(out, lse)


def draw(rng: np.random.Generator, **changes: Any) -> CacheCase:
    """Any problem."""

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    page_size = changes.pop("page_size", pick(0, 0, *range(1, 18), 64, 128, 256))
    capacity = int(pick(1, 7, 40, 150, 300))
    added = int(pick(0, 0, 1, 1, 5)) if capacity > 5 else 0
    packed_new = bool(added and pick(0, 1))
    longest = int(pick(1, 1, 2, 5, 40))
    sequences = []
    for _ in range(int(pick(1, 2, 5))):
        new = int(rng.integers(0, added + 1)) if packed_new else added
        used = int(
            pick(0, min(1, capacity - new), capacity - new, rng.integers(0, capacity - new + 1))
        )
        sequences.append(Sequence(int(rng.integers(0, longest + 1)), used, new))
    if pick(0, 0, 1):
        for s in sequences:
            s.leftpad = int(rng.integers(0, s.used + 1))
    if all(s.added == 0 for s in sequences):
        packed_new = False
    heads_kv, head_dim = int(pick(1, 2, 3)), int(pick(8, 16, 40, 64))
    options: dict[str, Any] = {"causal": bool(pick(0, 1)), "softcap": float(pick(0, 0, 3))}
    window = pick((-1, -1), (-1, -1), (9, -1), (-1, 4), (3, 2))
    options["window"], options["attention_chunk"] = window, int(pick(0, 0, 0, 16))
    given = tuple(name for name in ("seqused_q", "q_position") if pick(0, 0, 0, 1))
    if window[0] < 0 and not options["attention_chunk"] and pick(0, 0, 0, 1):
        given += ("prefix",)
    rotary_dim = 2 * int(rng.integers(1, head_dim // 2 + 1)) if pick(0, 0, 1) else 0
    if rotary_dim:
        options["rotary_interleaved"] = bool(pick(0, 1))
    fields: dict[str, Any] = {
        "page_size": page_size,
        "capacity": capacity,
        "heads": heads_kv * int(pick(1, 2, 4)),
        "heads_kv": heads_kv,
        "head_dim": head_dim,
        "head_dim_v": int(pick(head_dim, head_dim, 24)),
        "dtype": pick(*DTYPES),
        "layout": pick("rows", "heads", "interleaved"),
        "packed": bool(pick(0, 1)),
        "packed_new": packed_new,
        "rotary_dim": rotary_dim,
        "rotary_given": bool(pick(0, 1)),
        "indexed": bool(page_size == 0 and pick(0, 1)),
        "alibi": bool(pick(0, 0, 1)),
        "options": options,
        "given": given,
    }
    return CacheCase(sequences, **{**fields, **changes})
