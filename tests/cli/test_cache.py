"""`strobe run` on a KV cache: contiguous and paged, left pads, append, rotary, packed queries."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tool import Tensors, close, load, needs_cli, normal, refused, run, save, strobe

pytestmark = needs_cli

HEADS, HEADS_KV, DIM, DIM_V = 4, 2, 8, 6
BATCH, QUERIES, NEW = 3, 2, 3
USED, PADS = [5, 0, 13], [2, 0, 1]
CAPACITY, PAGE = 18, 5
NAN = math.nan


def single(x: float) -> float:
    """The nearest number of float32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def rotated(
    row: list[float], position: int, cos: list[float], sin: list[float], interleaved: bool
) -> list[float]:
    half = 3  # of rotary_dim 6
    result = list(row)
    for n in range(half):
        a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + half)
        c, s = cos[position * half + n], sin[position * half + n]
        result[a], result[b] = row[a] * c - row[b] * s, row[a] * s + row[b] * c
    return result


@dataclass
class Case:
    """A cache, what `strobe run` is given, and what it should give."""

    paged: bool = False
    append: bool = False
    rotary: bool = False
    interleaved: bool = False
    packed: bool = False
    heads_first: bool = False
    kv: bool = False
    causal: bool = False
    leftpad: bool = False
    tensors: Tensors = field(default_factory=dict)
    changed: dict[str, dict[int, list[float]]] = field(
        default_factory=dict
    )  # rows that append writes

    def __post_init__(self) -> None:
        self.pads = PADS if self.leftpad else [0] * BATCH
        if self.paged:
            self.table = [7, 0, 9, 2, 4, 8, 1, 3, 5, 6, 10, 11]
            self.entries, self.rows = 12, PAGE
        else:
            self.index = [3, 0, 2]
            self.entries, self.rows = 4, CAPACITY
        self.cos, self.sin = (
            [single(f(0.1 * i)) for i in range(40 * 3)] for f in (math.cos, math.sin)
        )
        self.q = normal(BATCH * QUERIES * HEADS * DIM, 1)
        count = self.entries * self.rows * HEADS_KV
        # Rows that no sequence has hold NaN.
        self.k, self.v = [NAN] * (count * DIM), [NAN] * (count * DIM_V)
        k, v = (
            normal(BATCH * CAPACITY * HEADS_KV * DIM, 2),
            normal(BATCH * CAPACITY * HEADS_KV * DIM_V, 3),
        )
        self.k_new, self.v_new = (
            normal(BATCH * NEW * HEADS_KV * DIM, 4),
            normal(BATCH * NEW * HEADS_KV * DIM_V, 5),
        )
        self.keys: dict[tuple[int, int, int], tuple[list[float], list[float]]] = {}
        for b in range(BATCH):
            for n in range(self.pads[b], USED[b] + (NEW if self.append else 0)):
                for h in range(HEADS_KV):
                    self.place(b, n, h, k, v)
        self.fill()

    def at(self, b: int, n: int, h: int) -> int:
        """Number of a row of the cache, heads counted."""
        entry, row = self.index[b] if not self.paged else self.table[4 * b + n // PAGE], n
        if self.paged:
            row = n % PAGE
        if self.heads_first:
            return (entry * HEADS_KV + h) * self.rows + row
        return (entry * self.rows + row) * HEADS_KV + h

    def place(self, b: int, n: int, h: int, k: list[float], v: list[float]) -> None:
        at, new = self.at(b, n, h), n - USED[b]
        if new < 0:
            i = (b * CAPACITY + n) * HEADS_KV + h
            key, value = k[i * DIM :][:DIM], v[i * DIM_V :][:DIM_V]
            self.k[at * DIM : at * DIM + DIM] = key
            self.v[at * DIM_V : at * DIM_V + DIM_V] = value
        else:
            i = (b * NEW + new) * HEADS_KV + h
            key, value = self.k_new[i * DIM :][:DIM], self.v_new[i * DIM_V :][:DIM_V]
            if self.rotary:
                start = USED[b] - self.pads[b]
                key = rotated(key, start + new, self.cos, self.sin, self.interleaved)
            self.changed.setdefault("k", {})[at] = key
            self.changed.setdefault("v", {})[at] = value
        self.keys[b, n, h] = key, value

    def shape(self, rows: int, heads: int, dim: int, entries: int) -> list[int]:
        return [entries, heads, rows, dim] if self.heads_first else [entries, rows, heads, dim]

    def order(
        self, values: list[float], rows: int, heads: int, dim: int, entries: int
    ) -> list[float]:
        """From rows before heads to the order of the file."""
        if not self.heads_first:
            return values
        return [
            x
            for e in range(entries)
            for h in range(heads)
            for r in range(rows)
            for x in values[((e * rows + r) * heads + h) * dim :][:dim]
        ]

    def add(
        self, name: str, values: list[float], rows: int, heads: int, dim: int, entries: int
    ) -> None:
        self.tensors[name] = (
            "F32",
            self.shape(rows, heads, dim, entries),
            self.order(values, rows, heads, dim, entries),
        )

    def fill(self) -> None:
        if self.packed:
            self.tensors["q"] = ("F32", [BATCH * QUERIES, HEADS, DIM], self.q)
            self.tensors["cu_seqlens_q"] = (
                "I32",
                [BATCH + 1],
                [QUERIES * b for b in range(BATCH + 1)],
            )
        else:
            self.add("q", self.q, QUERIES, HEADS, DIM, BATCH)
        self.tensors["k"] = ("F32", self.shape(self.rows, HEADS_KV, DIM, self.entries), self.k)
        self.tensors["v"] = ("F32", self.shape(self.rows, HEADS_KV, DIM_V, self.entries), self.v)
        self.tensors["seqused_k"] = ("I32", [BATCH], list(map(float, USED)))
        if self.leftpad:
            self.tensors["leftpad"] = ("I32", [BATCH], list(map(float, self.pads)))
        if self.paged:
            self.tensors["block_table"] = ("I32", [BATCH, 4], list(map(float, self.table)))
        else:
            self.tensors["cache_batch_idx"] = ("I32", [BATCH], list(map(float, self.index)))
        if self.append and self.packed:
            self.tensors["k_new"] = ("F32", [BATCH * NEW, HEADS_KV, DIM], self.k_new)
            self.tensors["v_new"] = ("F32", [BATCH * NEW, HEADS_KV, DIM_V], self.v_new)
            self.tensors["cu_seqlens_k_new"] = (
                "I32",
                [BATCH + 1],
                [NEW * b for b in range(BATCH + 1)],
            )
        elif self.append:
            self.add("k_new", self.k_new, NEW, HEADS_KV, DIM, BATCH)
            self.add("v_new", self.v_new, NEW, HEADS_KV, DIM_V, BATCH)
        if self.rotary:
            self.tensors["rotary_cos"] = ("F32", [40, 3], self.cos)
            self.tensors["rotary_sin"] = ("F32", [40, 3], self.sin)

    def out(self) -> tuple[list[float], list[float]]:
        """out [batch, seqlen, heads, dim] and lse [batch, heads, seqlen]."""
        out, lse = [], [0.0] * (BATCH * HEADS * QUERIES)
        for b in range(BATCH):
            rows = range(self.pads[b], USED[b] + (NEW if self.append else 0))
            for i in range(QUERIES):
                for h in range(HEADS):
                    query = self.q[((b * QUERIES + i) * HEADS + h) * DIM :][:DIM]
                    if self.rotary:
                        position = USED[b] - self.pads[b] + (i if self.causal else 0)
                        query = rotated(query, position, self.cos, self.sin, self.interleaved)
                    seen = [
                        n
                        for j, n in enumerate(rows)
                        if not self.causal or j <= i + len(rows) - QUERIES
                    ]
                    found = [self.keys[b, n, h // (HEADS // HEADS_KV)] for n in seen]
                    scores = [
                        sum(x * y for x, y in zip(query, k, strict=True)) / math.sqrt(DIM)
                        for k, _ in found
                    ]
                    top = max(scores, default=0.0)
                    weights = [math.exp(s - top) for s in scores]
                    total = sum(weights)
                    lse[(b * HEADS + h) * QUERIES + i] = (
                        top + math.log(total) if total else -math.inf
                    )
                    out += [
                        sum(w * v[d] for w, (_, v) in zip(weights, found, strict=True))
                        / (total or 1.0)
                        for d in range(DIM_V)
                    ]
        return out, lse


def flags(case: Case) -> list[str]:
    chosen = {"--causal": case.causal, "--rotary-interleaved": case.interleaved}
    return [flag for flag, on in chosen.items() if on] + (
        ["--layout", "bhsd"] if case.heads_first else []
    )


CASES = [
    {},
    {"paged": True},
    {"leftpad": True, "causal": True},
    {"paged": True, "leftpad": True, "append": True},
    {"append": True, "rotary": True, "causal": True},
    {"paged": True, "append": True, "rotary": True, "interleaved": True},
    {"paged": True, "packed": True, "append": True, "causal": True},
    {"packed": True},
    {"heads_first": True, "append": True, "rotary": True},
    {"paged": True, "heads_first": True},
]


@pytest.mark.parametrize("what", CASES, ids=lambda what: "-".join(what) or "plain")
def test_cache(tmp_path: Path, what: dict[str, bool]) -> None:
    case = Case(**what)
    result = run(save(tmp_path / "in.safetensors", case.tensors), *flags(case))
    out, lse = case.out()
    close(result["out"][2], case.order(out, QUERIES, HEADS, DIM_V, BATCH), 2e-6)
    if not case.packed:
        assert [x == y for x, y in zip(result["lse"][2], lse, strict=True) if math.isinf(y)] == [
            True
        ] * sum(map(math.isinf, lse))
        close(
            *([x for x in values if math.isfinite(x)] for values in (result["lse"][2], lse)), 5e-6
        )
    assert set(result) == ({"out", "lse", "k", "v"} if case.append else {"out", "lse"})
    if not case.append:
        return
    # The cache as it was, but for the new rows.
    for name, dim, before in (("k", DIM, case.k), ("v", DIM_V, case.v)):
        assert result[name][1] == case.tensors[name][1]
        after = result[name][2]
        for row in range(len(before) // dim):
            part = slice(row * dim, row * dim + dim)
            if row in case.changed[name]:
                close(after[part], case.changed[name][row], 1e-6)
            else:
                assert [struct.pack("<f", x) for x in after[part]] == [
                    struct.pack("<f", x) for x in before[part]
                ]


def test_result_is_the_next_input(tmp_path: Path) -> None:
    """The changed cache has the names and shapes of the cache."""
    case = Case(append=True)
    first = run(save(tmp_path / "in.safetensors", case.tensors))
    again = {name: x for name, x in case.tensors.items() if name not in ("k_new", "v_new")}
    again |= {"k": first["k"], "v": first["v"]}
    again["seqused_k"] = ("I32", [BATCH], [float(n + NEW) for n in USED])
    assert run(save(tmp_path / "again.safetensors", again))["out"] == first["out"]


def test_kv_in_one_tensor(tmp_path: Path) -> None:
    """kv [pages, page_size, 2, heads_kv, head_dim]."""
    case = Case(paged=True, append=True)
    rows = case.entries * case.rows * HEADS_KV
    wide = [x for row in range(rows) for x in case.v[row * DIM_V :][:DIM_V] + [0.0] * (DIM - DIM_V)]
    new = [
        x
        for row in range(BATCH * NEW * HEADS_KV)
        for x in case.v_new[row * DIM_V :][:DIM_V] + [0.0] * (DIM - DIM_V)
    ]
    size = HEADS_KV * DIM
    both = [
        x
        for at in range(0, len(case.k), size)
        for part in (case.k, wide)
        for x in part[at : at + size]
    ]
    shape = [case.entries, case.rows, 2, HEADS_KV, DIM]
    tensors = {name: x for name, x in case.tensors.items() if name not in ("k", "v")}
    tensors |= {"kv": ("F32", shape, both), "v_new": ("F32", [BATCH, NEW, HEADS_KV, DIM], new)}
    result = run(save(tmp_path / "in.safetensors", tensors))
    assert set(result) == {"out", "lse", "kv"}
    assert result["kv"][1] == shape
    out, _ = case.out()
    close([x for i, x in enumerate(result["out"][2]) if i % DIM < DIM_V], out, 2e-6)
    # The values of the new keys lie behind them.
    row, value = next(iter(case.changed["v"].items()))
    at = row // HEADS_KV * 2 * size + size + row % HEADS_KV * DIM
    assert result["kv"][2][at : at + DIM_V] == value


def test_dtype_and_out_in_float32(tmp_path: Path) -> None:
    case = Case(paged=True, append=True, rotary=True)
    result = run(
        save(tmp_path / "in.safetensors", case.tensors), "--dtype", "bf16", "--out-float32"
    )
    assert result["out"][0] == "F32"
    assert result["k"][0] == "BF16"
    close(result["out"][2], case.out()[0], 0.1)


def test_what_it_prints(tmp_path: Path) -> None:
    path = save(tmp_path / "in.safetensors", Case(paged=True, append=True).tensors)
    result = strobe("run", path, "--why", "--repeat", "1")
    assert result.returncode == 0, result.stderr
    for word in ("block_table", "k_new", "k and v are a paged cache", "cache of 12 pages of 5"):
        assert word in result.stdout
    assert "not used" not in result.stdout


def without(case: Case, *names: str) -> Tensors:
    return {name: x for name, x in case.tensors.items() if name not in names}


def replaced(
    case: Case, name: str, shape: list[int], values: list[float], dtype: str = "I32"
) -> Tensors:
    return {**case.tensors, name: (dtype, shape, values)}


PAGED, PLAIN = Case(paged=True, append=True, rotary=True), Case(append=True)
WRONG: list[tuple[Tensors, list[str]]] = [
    (
        replaced(PAGED, "block_table", [12], [0.0] * 12),
        ["block_table is I32 [12]", "[batch, pages_per_sequence]"],
    ),
    (
        replaced(PAGED, "block_table", [2, 6], [0.0] * 12),
        ["block_table is I32 [2, 6]", "expected I32 [3, 6]"],
    ),
    (
        replaced(PAGED, "block_table", [3, 4], [0.0] * 12, "F32"),
        ["block_table is F32", "expected I32 [3, 4]"],
    ),
    (
        replaced(PAGED, "block_table", [3, 4], [0.0, 12.0] + [0.0] * 10),
        ["block_table[0][1] = 12, expected 0 to 11"],
    ),
    (
        replaced(PAGED, "block_table", [3, 4], [-1.0] * 12),
        ["block_table[0][0] = -1, expected 0 to 11"],
    ),
    (replaced(PAGED, "block_table", [3, 0], []), ["block_table is I32 [3, 0]"]),
    (replaced(PAGED, "cache_batch_idx", [3], [0.0] * 3), ["cache_batch_idx beside block_table"]),
    (
        replaced(PAGED, "seqused_k", [3], [5.0, 0.0, 18.0]),
        ["seqused_k[2] = 18, expected 0 to 17", "new keys"],
    ),
    (replaced(PAGED, "seqused_k", [3], [5.0, -1.0, 3.0]), ["seqused_k[1] = -1, expected 0 to"]),
    (replaced(PAGED, "leftpad", [3], [6.0, 0.0, 0.0]), ["leftpad[0] = 6, expected 0 to 5"]),
    (
        replaced(PAGED, "cu_seqlens_k", [4], [0.0] * 4),
        ["cu_seqlens_k beside block_table", "seqused_k"],
    ),
    (
        replaced(PAGED, "cu_seqlens", [4], [0.0] * 4),
        ["cu_seqlens beside block_table", "cu_seqlens_q alone"],
    ),
    (without(PAGED, "seqused_k"), ["k_new without seqused_k"]),
    (without(PAGED, "v_new"), ["has no v_new", "expected k_new and v_new"]),
    (without(PAGED, "rotary_sin"), ["rotary_cos or rotary_sin without the other"]),
    (
        replaced(PAGED, "rotary_sin", [40, 2], [0.0] * 80, "F32"),
        ["rotary_sin is F32 [40, 2]", "cos and sin alike"],
    ),
    (
        replaced(PAGED, "rotary_cos", [40, 5], [0.0] * 200, "F32"),
        ["rotary_cos is F32 [40, 5]", "at most 8"],
    ),
    (
        replaced(PAGED, "rotary_cos", [40, 3], [0.0] * 120, "F16"),
        ["rotary_cos is F16", "expected F32"],
    ),
    (
        replaced(PAGED, "rotary_position", [3], [0.0, 0.0, 38.0]),
        ["rotary_position[2] = 38", "rotary_rows - 1 = 39"],
    ),
    (replaced(PLAIN, "rotary_position", [3], [0.0] * 3), ["rotary_position without rotary_cos"]),
    (
        replaced(PLAIN, "cache_batch_idx", [3], [0.0, 4.0, 0.0]),
        ["cache_batch_idx[1] = 4, expected 0 to 3"],
    ),
    (
        replaced(PLAIN, "k_new", [3, 3, 2, 4], [0.0] * 72, "F32"),
        ["k_new: head_dim = 4, expected 8 like k's"],
    ),
    (
        replaced(PLAIN, "k_new", [2, 3, 2, 8], [0.0] * 96, "F32"),
        ["k_new: batch = 2, expected 3 like q's"],
    ),
    (
        replaced(PLAIN, "k_new", [3, 2, 2, 8], [0.0] * 96, "F32"),
        ["v_new: seqlen_new = 3, expected 2 like k_new's"],
    ),
    (
        replaced(PLAIN, "k_new", [18, 8], [0.0] * 144, "F32"),
        ["k_new has the shape [18, 8]", "[batch, seqlen_new, "],
    ),
    (
        replaced(PLAIN, "cu_seqlens_k_new", [4], [0.0, 3.0, 6.0, 9.0]),
        ["k_new has the shape", "[total, heads"],
    ),
    (
        replaced(Case(packed=True, append=True), "cu_seqlens_k_new", [4], [0.0, 3.0, 2.0, 9.0]),
        ["cu_seqlens_k_new[2] = 2 after 3"],
    ),
    (
        replaced(PLAIN, "v", [4, 17, 2, 6], [0.0] * 816, "F32"),
        ["v: seqlen = 17, expected 18 like k's"],
    ),
    (
        {
            **without(Case(), "cache_batch_idx", "q"),
            "q": ("F32", [5, 2, 4, 8], [0.0] * 320),
            "leftpad": ("I32", [5], [0.0] * 5),
            "seqused_k": ("I32", [5], [0.0] * 5),
        },
        ["k: cache_batch = 4, expected at least 5"],
    ),
    (
        {**PLAIN.tensors, "dout": ("F32", [3, 2, 4, 6], [0.0] * 144)},
        ["cache_batch_idx", "no backward pass", "dout"],
    ),
    (
        {"qkv": ("F32", [1, 2, 3, 1, 4], [0.0] * 24), "leftpad": ("I32", [1], [0.0])},
        ["qkv beside leftpad"],
    ),
]


@pytest.mark.parametrize(("tensors", "words"), WRONG)
def test_wrong_caches(tmp_path: Path, tensors: Tensors, words: list[str]) -> None:
    path = save(tmp_path / "in.safetensors", tensors)
    refused(strobe("run", path, "-o", tmp_path / "out"), *words)
    assert not (tmp_path / "out").exists()


def test_dropout_and_backward_with_a_cache(tmp_path: Path) -> None:
    path = save(tmp_path / "in.safetensors", Case().tensors)
    refused(strobe("run", path, "--dropout", "0.5"), "dropout_p", "cache")
    refused(strobe("run", path, "--backward"), "no backward pass")


def test_the_input_is_left_as_it_was(tmp_path: Path) -> None:
    path = save(tmp_path / "in.safetensors", Case(append=True).tensors)
    before = path.read_bytes()
    run(path)
    assert path.read_bytes() == before
    assert load(path)["k"][1] == [4, 18, 2, 8]
