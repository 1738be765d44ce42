"""`strobe run` on a KV cache: contiguous and paged, left pads, append, rotary, packed queries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tool import Tensors, load, needs_cli, oracle, refused, run, save, strobe

Array = np.ndarray[Any, Any]

pytestmark = needs_cli

HEADS, HEADS_KV = 4, 2
DIMS = DIM, DIM_V = 8, 6
BATCH, QUERIES, NEW = 3, 2, 3
USED, PADS = [5, 0, 13], [2, 0, 1]
CAPACITY, PAGE = 18, 5


@dataclass
class Case:
    """A cache, what `strobe run` is given, and what it should give."""

    paged: bool = False
    append: bool = False
    rotary: bool = False
    interleaved: bool = False
    packed: bool = False
    heads_first: bool = False
    causal: bool = False
    leftpad: bool = False

    def __post_init__(self) -> None:
        draw = np.random.default_rng(1).standard_normal
        used, pads = USED, PADS if self.leftpad else [0] * BATCH
        table = np.array([[7, 0, 9, 2], [4, 8, 1, 3], [5, 6, 10, 11]])
        index = np.array([3, 0, 2])
        self.entries, self.rows = (12, PAGE) if self.paged else (4, CAPACITY)
        angles = 0.1 * np.arange(40 * 3).reshape(40, 3)
        self.q = draw((BATCH, QUERIES, HEADS, DIM), np.float32)
        self.k_new, self.v_new = (draw((BATCH, NEW, HEADS_KV, d), np.float32) for d in DIMS)
        # Rows that no sequence has hold NaN.
        shape = (self.entries * self.rows, HEADS_KV)
        self.k, self.v = (np.full((*shape, d), np.nan, np.float32) for d in DIMS)
        sequences = []
        for b in range(BATCH):
            n = np.arange(used[b] + NEW * self.append)
            at = table[b, n // PAGE] * PAGE + n % PAGE if self.paged else index[b] * CAPACITY + n
            start = used[b] - pads[b]
            one = oracle.CachedSequence(pads[b], used[b], NEW * self.append, NEW * b, start, at)
            sequences.append(one)
            held = at[pads[b] : used[b]]
            self.k[held] = draw((len(held), HEADS_KV, DIM), np.float32)
            self.v[held] = draw((len(held), HEADS_KV, DIM_V), np.float32)
        new = [x.reshape(-1, *x.shape[2:]) for x in (self.k_new, self.v_new)]
        self.cache = oracle.Cache(sequences, self.k.copy(), self.v.copy(), new[0], new[1])
        self.tensors: Tensors = {}
        self.add("q", self.q, "cu_seqlens_q" if self.packed else "")
        for name, pool in (("k", self.k), ("v", self.v)):
            self.add(name, pool.reshape(self.entries, self.rows, *pool.shape[1:]))
        numbers = {"seqused_k": used}
        if self.leftpad:
            numbers["leftpad"] = pads
        numbers |= {"block_table": table} if self.paged else {"cache_batch_idx": index}
        if self.append:
            for name, x in (("k_new", self.k_new), ("v_new", self.v_new)):
                self.add(name, x, "cu_seqlens_k_new" if self.packed else "")
        if self.rotary:
            self.cache.cosines, self.cache.sines = tables = [
                f(angles).astype(np.float32) for f in (np.cos, np.sin)
            ]
            self.cache.interleaved = self.interleaved
            for name, x in zip(("rotary_cos", "rotary_sin"), tables, strict=True):
                self.tensors[name] = ("F32", [40, 3], x.ravel().tolist())
        for name, values in numbers.items():
            self.tensors[name] = ("I32", list(np.shape(values)), np.ravel(values).tolist())

    def add(self, name: str, x: Array, offsets: str = "") -> None:
        """x [entries, rows, heads, dim] in the file's order; offsets: packed, with this tensor."""
        if offsets:
            shape = [x.shape[0] * x.shape[1], *x.shape[2:]]
            at = [float(x.shape[1] * b) for b in range(BATCH + 1)]
            self.tensors[offsets] = ("I32", [BATCH + 1], at)
        else:
            x = x.swapaxes(1, 2) if self.heads_first else x
            shape = list(x.shape)
        self.tensors[name] = ("F32", shape, x.ravel().tolist())

    def read(self, found: tuple[str, list[int], list[float]]) -> Array:
        """A tensor of the result as [all rows, heads, dim]."""
        x = np.reshape(found[2], found[1])
        if self.heads_first and not self.packed:
            x = x.swapaxes(1, 2)
        return x.reshape(-1, *x.shape[-2:])

    def after(self) -> tuple[Array, Array]:
        """k and v [all rows, heads_kv, dim] with the new rows."""
        at = np.concatenate([s.rows[s.used :] for s in self.cache.sequences])
        pools = self.k.astype(np.float64), self.v.astype(np.float64)
        for pool, rows in zip(pools, self.cache.appended(), strict=True):
            pool[at] = rows
        return pools

    def out(self) -> tuple[Array, Array]:
        """out [all queries, heads, dim] and lse [all queries, heads]."""
        problem = oracle.masked(causal=self.causal)
        places = oracle.sequences_of([QUERIES] * BATCH, [0] * BATCH)
        self.cache.k, self.cache.v = self.after()
        turned, k, v, places = self.cache.gathered(self.q.reshape(-1, HEADS, DIM), places, problem)
        found = oracle.attend(turned, k, v, places, problem)
        return found.out, found.lse


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
    np.testing.assert_allclose(case.read(result["out"]), out, atol=2e-6)
    found = np.reshape(result["lse"][2], (HEADS, -1) if case.packed else (BATCH, HEADS, QUERIES))
    found = found.T if case.packed else found.swapaxes(1, 2).reshape(-1, HEADS)
    np.testing.assert_allclose(found, lse, atol=5e-6)
    assert set(result) == ({"out", "lse", "k", "v"} if case.append else {"out", "lse"})
    if not case.append:
        return
    # The cache as it was, but for the new rows.
    new = np.concatenate([s.rows[s.used :] for s in case.cache.sequences])
    for name, before, after in zip("kv", (case.k, case.v), case.after(), strict=True):
        assert result[name][1] == case.tensors[name][1]
        x = result[name]
        pool = np.reshape(x[2], x[1]).swapaxes(1, 2) if case.heads_first else np.array(x[2])
        pool = pool.reshape(before.shape)
        np.testing.assert_allclose(pool[new], after[new], atol=1e-6)
        old = np.delete(np.arange(len(pool)), new)
        assert np.array_equal(pool[old].astype(np.float32), before[old], equal_nan=True)


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
    unlike = [(0, 0)] * 3 + [(0, DIM - DIM_V)]
    k, v = (x.reshape(case.entries, case.rows, HEADS_KV, -1) for x in (case.k, case.v))
    both = np.stack([k, np.pad(v, unlike)], 2)
    v_new = np.pad(case.v_new, unlike)
    tensors = {name: x for name, x in case.tensors.items() if name not in ("k", "v")}
    tensors |= {
        "kv": ("F32", list(both.shape), both.ravel().tolist()),
        "v_new": ("F32", list(v_new.shape), v_new.ravel().tolist()),
    }
    result = run(save(tmp_path / "in.safetensors", tensors))
    assert set(result) == {"out", "lse", "kv"}
    assert result["kv"][1] == list(both.shape)
    np.testing.assert_allclose(case.read(result["out"])[..., :DIM_V], case.out()[0], atol=2e-6)
    new = np.concatenate([s.rows[s.used :] for s in case.cache.sequences])
    values = np.reshape(result["kv"][2], (-1, 2, HEADS_KV, DIM))[new, 1, :, :DIM_V]
    assert np.array_equal(values, case.v_new.reshape(-1, HEADS_KV, DIM_V))


def test_dtype_and_out_in_float32(tmp_path: Path) -> None:
    case = Case(paged=True, append=True, rotary=True)
    result = run(
        save(tmp_path / "in.safetensors", case.tensors), "--dtype", "bf16", "--out-float32"
    )
    assert result["out"][0] == "F32"
    assert result["k"][0] == "BF16"
    np.testing.assert_allclose(case.read(result["out"]), case.out()[0], atol=0.1)


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


def test_a_mask_of_the_file_over_a_cache(tmp_path: Path) -> None:
    """It has all rows of the cache: out is that of the keys in use which it shows."""
    draw = np.random.default_rng(4).standard_normal
    dim, rows, used, shown = 16, 12, 7, [1, 2, 4, 6]
    q, (k, v) = draw((1, QUERIES, HEADS, dim)), draw((2, rows, HEADS_KV, dim))
    places = oracle.sequences_of([QUERIES], [len(shown)])
    wanted = oracle.attend(q[0], k[shown], v[shown], places, oracle.masked())
    keep = np.isin(np.arange(rows), [*shown, used + 1])
    tensors: Tensors = {
        "q": ("F32", list(q.shape), q.ravel().tolist()),
        "k": ("F32", [1, *k.shape], k.ravel().tolist()),
        "v": ("F32", [1, *v.shape], v.ravel().tolist()),
        "seqused_k": ("I32", [1], [used]),
        "mask": ("U8", [1, 1, QUERIES, rows], keep.astype(int).tolist() * QUERIES),
    }
    found = run(save(tmp_path / "in.safetensors", tensors))
    out = np.reshape(found["out"][2], (QUERIES, HEADS, dim))
    np.testing.assert_allclose(out, wanted.out, atol=1e-5)


def test_a_quantised_cache_is_attended_to_and_appended_to(tmp_path: Path) -> None:
    """int8 with a scale of each row, q8_0, and one of k, the other of v: out is that over what the
    codes stand for, and the changed cache, scales too, is a part of the result.
    """
    draw = np.random.default_rng(3).standard_normal
    dim, rows, used, new = 32, 12, 7, 2
    q, k, v = draw((1, QUERIES, HEADS, dim)), draw((rows, HEADS_KV, dim)), draw((rows, 2, dim))
    k_new, v_new = draw((2, 1, new, HEADS_KV, dim)).astype(np.float32)
    scales = {name: np.abs(x).max(-1) / 127 for name, x in (("k", k), ("v", v))}
    codes = {
        name: np.rint(x / scales[name].astype(np.float32)[..., None])
        for name, x in (("k", k), ("v", v))
    }
    after = {}
    for name, fresh in (("k", k_new[0]), ("v", v_new[0])):
        made = np.abs(fresh).max(-1).astype(np.float32) / np.float32(127)
        values = codes[name] * scales[name].astype(np.float32)[..., None].astype(np.float64)
        values[used : used + new] = np.rint(fresh / made[..., None]) * made[..., None]
        after[name] = values
    places = oracle.sequences_of([QUERIES], [used + new])
    wanted = oracle.attend(
        q[0], after["k"][: used + new], after["v"][: used + new], places, oracle.masked()
    )
    for blocks in ("", "kv", "k", "v"):
        tensors: Tensors = {"q": ("F32", list(q.shape), q.ravel().tolist())}
        for name, fresh in (("k", k_new), ("v", v_new)):
            tensors[f"{name}_new"] = ("F32", list(fresh.shape), fresh.ravel().tolist())
            whole = codes[name].astype(np.int8)
            if name in blocks:
                # Scales as fp16 has them: the result is near, and not that of float32 scales.
                half = scales[name].astype(np.float16)[..., None].view(np.uint8)
                packed = np.concatenate([half, whole.view(np.uint8)], -1)
                tensors[name] = ("U8", [1, rows, HEADS_KV, dim + 2], packed.ravel().tolist())
                continue
            tensors[name] = ("I8", [1, rows, HEADS_KV, dim], whole.ravel().tolist())
            flat = scales[name].astype(np.float32).ravel().tolist()
            tensors[f"{name}_scale"] = ("F32", [1, rows, HEADS_KV], flat)
        tensors["seqused_k"] = ("I32", [1], [used])
        found = run(save(tmp_path / "in.safetensors", tensors))
        out = np.reshape(found["out"][2], (QUERIES, HEADS, dim))
        np.testing.assert_allclose(out, wanted.out, atol=5e-3 if blocks else 1e-5)
        for name in ("k", "v"):
            assert found[name][0] == ("U8" if name in blocks else "I8")
            assert (f"{name}_scale" in found) == (name not in blocks)
        if "k" not in blocks:
            scale = np.reshape(found["k_scale"][2], (rows, HEADS_KV))
            cache = np.reshape(found["k"][2], (rows, HEADS_KV, dim)).astype(np.int8)
            np.testing.assert_allclose(cache * scale[..., None], after["k"], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k_scale": None}, "k without its scale, expected k_scale"),
        ({"v_scale": None}, "v without its scale, expected v_scale"),
        (
            {"v": ("F32", [1, 3, 2, 8], [0.0] * 48)},
            "v_scale with v of F32, expected I8 or F8_E4M3",
        ),
        (
            {"v": ("BF16", [1, 3, 2, 8], [0.0] * 48), "v_scale": None},
            "v is BF16, expected F32 like the others",
        ),
        (
            {"k_scale": ("F32", [3], [1.0] * 3)},
            "k_scale is F32 [3], expected F32 or F16 [1, 3, 2], [2] or [1], both alike",
        ),
        ({"k": ("U8", [1, 3, 2, 8], [0] * 48)}, "k is U8 with rows of 8 bytes, expected head_dim"),
        ({"v": ("U8", [1, 3, 2, 8], [0] * 48)}, "v is U8 with rows of 8 bytes, expected head_dim"),
    ],
)
def test_bad_codes_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    tensors: Tensors = {"q": ("F32", [1, 1, 2, 8], [0.0] * 16)}
    for name in ("k", "v"):
        tensors[name] = ("I8", [1, 3, 2, 8], [0] * 48)
        tensors[f"{name}_scale"] = ("F32", [1, 3, 2], [1.0] * 6)
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    refused(strobe("run", save(tmp_path / "in.safetensors", tensors)), words)
