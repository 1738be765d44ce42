"""`strobe check --kv`: its table against attention in float64 over codes that NumPy makes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tool import Tensors, needs_cli, oracle, refused, save, strobe

pytestmark = needs_cli
HEADS, HEADS_KV, DIM, DIM_V = 4, 2, 64, 32
ROOT = Path(__file__).resolve().parents[2]
Arrays = dict[str, np.ndarray]


def drawn(*, batch: int = 2, queries: int = 5, keys: int = 40, seed: int = 3) -> Arrays:
    """Heads of unequal sizes, so that scales of rows, of heads and of the tensor differ."""
    rng = np.random.default_rng(seed)
    sizes = {
        "q": (queries, HEADS, DIM),
        "k": (keys, HEADS_KV, DIM),
        "v": (keys, HEADS_KV, DIM_V),
    }
    made = {n: rng.standard_normal((batch, *s)).astype(np.float32) for n, s in sizes.items()}
    made["k"][:, :, 0] *= 3
    made["v"][:, :, 1] *= 5
    return made


def tensors(arrays: Arrays) -> Tensors:
    names = {"float32": "F32", "int32": "I32", "bfloat16": "BF16"}
    return {n: (names[x.dtype.name], list(x.shape), x.ravel().tolist()) for n, x in arrays.items()}


def report(path: Path | None, *args: str) -> dict[str, Any]:
    """The one input of --json."""
    files = [] if path is None else [path]
    result = strobe("check", *args, "--json", *files)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert list(found) == ["machine", "device", "seed", "kv_scale", "inputs"]
    (of_file,) = found["inputs"]
    assert list(of_file) == [
        *("file", "dtype", "sequences", "queries", "queries_compared", "keys", "heads", "heads_kv"),
        *("head_dim", "head_dim_v", "caches"),
    ]
    for cache in of_file["caches"]:
        heads = cache["attention"]["heads"]
        assert heads[cache["worst_head"]] == max(heads)
    return of_file


def fp16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def held(x: np.ndarray, kv: str, scale: str = "row") -> np.ndarray:
    """What codes of x stand for, in float64. x: [batch, rows, heads, dim], float32."""
    axes = {"row": (3,), "head": (0, 1, 3), "tensor": (0, 1, 2, 3)}[scale]
    if kv == "q4_0":
        blocks = x.reshape(*x.shape[:-1], -1, 32)
        at = np.abs(blocks).argmax(-1, keepdims=True)
        by = fp16(np.take_along_axis(blocks, at, -1) / np.float32(-8))
        codes = np.clip(np.rint(blocks / by), -8, 7)
        return (codes.astype(np.float64) * by).reshape(x.shape)
    if kv == "q8_0":
        blocks = x.reshape(*x.shape[:-1], -1, 32)
        by = fp16(np.abs(blocks).max(-1, keepdims=True) / np.float32(127))
        return (np.rint(blocks / by).astype(np.float64) * by).reshape(x.shape)
    largest = np.abs(x).max(axes, keepdims=True)
    if kv == "int8":
        by = fp16(largest / np.float32(127))
        return np.clip(np.rint(x / by), -127, 127).astype(np.float64) * by
    kind = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[kv]
    most = float(ml_dtypes.finfo(kind).max)
    by = fp16(largest / np.float32(most))
    return np.clip(x / by, -most, most).astype(kind).astype(np.float64) * by


def rms(got: np.ndarray, wanted: np.ndarray) -> float:
    return math.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2))


def check_error(found: dict[str, Any], got: np.ndarray, wanted: np.ndarray, **near: float) -> None:
    """That an error is that of got. Both [..., heads, dim]."""
    near = near or {"rel": 1e-6}
    assert found["rms"] == pytest.approx(rms(got, wanted), **near)
    worst = np.abs(got - wanted).max() / math.sqrt(np.mean(wanted**2))
    assert found["worst"] == pytest.approx(worst, **near)
    heads = [rms(got[..., h, :], wanted[..., h, :]) for h in range(got.shape[-2])]
    assert found["heads"] == pytest.approx(heads, **near)


@pytest.mark.parametrize("scale", ["row", "head", "tensor"])
def test_errors(scale: str, tmp_path: Path) -> None:
    """Codes, and floats of each dtype, with scales of each kind."""
    arrays = drawn()
    q, k, v = arrays.values()
    forms = ["int8", "e4m3", "e5m2", "q8_0", "q4_0"]
    path = save(tmp_path / "in.safetensors", tensors(arrays))
    found = report(path, "--kv", ",".join(forms), "--kv-scale", scale)
    assert (found["sequences"], found["queries"], found["queries_compared"]) == (2, 10, 10)
    assert (found["keys"], found["heads"], found["heads_kv"]) == (80, HEADS, HEADS_KV)
    wanted = oracle.attention(q, k, v).out
    names = ["fp32", "bf16", "fp16", *forms]
    caches = dict(zip(names, found["caches"], strict=True))
    for form in forms:
        cache = caches[form]
        out = oracle.attention(q, held(k, form, scale), held(v, form, scale)).out
        check_error(cache["k_and_v_alone"], out, wanted)
        # The library's own arithmetic is float32: nothing beside the codes' errors.
        check_error(cache["attention"], out, wanted, rel=1e-3, abs=1e-5)
    values = DIM + DIM_V
    of_rows = 4 if scale == "row" else 0
    assert caches["int8"]["bytes"] == caches["e5m2"]["bytes"] == values + of_rows
    assert (caches["q8_0"]["bytes"], caches["q4_0"]["bytes"]) == (
        values // 32 * 34,
        values // 32 * 18,
    )
    assert [caches[n]["bytes"] for n in ("fp32", "bf16")] == [4 * values, 2 * values]
    assert caches["fp32"]["k_and_v_alone"]["rms"] == 0
    assert caches["fp32"]["attention"]["rms"] < 1e-6
    for name, kind in (("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)):
        cache = caches[name]
        assert cache["kv"] == "same"
        rounded = [x.astype(kind).astype(np.float64) for x in (k, v)]
        check_error(cache["k_and_v_alone"], oracle.attention(q, *rounded).out, wanted)
        assert cache["attention"]["rms"] > cache["k_and_v_alone"]["rms"]


def test_queries_are_of_the_dtype_and_codes_too(tmp_path: Path) -> None:
    """--dtype rounds q, and k and v before they are quantised; the reference stays the file's."""
    arrays = drawn()
    q, k, v = arrays.values()
    path = save(tmp_path / "in.safetensors", tensors(arrays))
    found = report(path, "--kv", "q8_0", "--dtype", "bf16")["caches"][-1]
    assert found["dtype"] == "bfloat16"
    k, v = (x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (k, v))
    wanted = oracle.attention(*arrays.values()).out
    check_error(
        found["k_and_v_alone"], oracle.attention(q, held(k, "q8_0"), held(v, "q8_0")).out, wanted
    )
    assert found["attention"]["rms"] > found["k_and_v_alone"]["rms"] * 1.005


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [False, True])
def test_what_a_file_may_have_besides(packed: bool, window: bool, tmp_path: Path) -> None:
    """Masks, ALiBi, sinks, lengths in use, positions: attention in float32 is that of float64."""
    arrays = drawn(keys=45)
    rng = np.random.default_rng(5)
    numbers: Arrays = {
        "seqused_q": np.array([4, 5], np.int32),
        "seqused_k": np.array([45, 30], np.int32),
        "q_position": np.array([41, 3], np.int32),
    }
    if not window:  # no kernel takes both
        numbers["prefix"] = np.array([2, 40], np.int32)
    floats: Arrays = {
        "alibi_slopes": rng.uniform(0, 0.5, (2, HEADS)).astype(np.float32),
        "sinks": rng.standard_normal(HEADS).astype(np.float32),
    }
    # Rows that are not in use may be anything.
    arrays["q"][0, 4:], arrays["k"][1, 30:], arrays["v"][1, 30:] = np.nan, np.inf, np.nan
    lengths: Arrays = {}
    if packed:
        arrays = {name: x.reshape(-1, *x.shape[2:]) for name, x in arrays.items()}
        lengths = {
            "cu_seqlens_q": np.array([0, 5, 10], np.int32),
            "cu_seqlens_k": np.array([0, 45, 90], np.int32),
        }
    path = save(tmp_path / "in.safetensors", tensors({**arrays, **lengths, **numbers, **floats}))
    flags = ["--causal", "--softcap", "4", "--scale", "0.2"]
    if window:
        flags += ["--window", "20", "3"]
    found = report(path, "--kv", "int8", *flags)
    assert (found["queries"], found["keys"], found["sequences"]) == (9, 75, 2)
    whole, _, _, codes = found["caches"]
    assert whole["attention"]["worst"] < 1e-5  # which has all of the options on both sides
    # And on a third one.
    options: dict[str, Any] = {"causal": True, "softcap": 4, "scale": 0.2}
    if window:
        options["window"] = (20, 3)
    options |= {**lengths, **numbers, **floats}
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    finite = [np.where(np.isfinite(x), x, 0).astype(np.float32) for x in (k, v)]
    with np.errstate(invalid="ignore"):
        over = [
            np.nan_to_num(held(x.reshape(1, *x.shape[-3:]) if packed else x, "int8"))
            for x in finite
        ]
    over = [x.reshape(y.shape) for x, y in zip(over, finite, strict=True)]
    outs = [oracle.attention(q, *kv, **options).out for kv in (finite, over)]
    rows = np.concatenate([x.reshape(10, HEADS, DIM_V)[None] for x in outs])
    rows = np.delete(rows, 4, axis=1)  # of q, the one that is not in use
    check_error(codes["k_and_v_alone"], rows[1], rows[0])


def test_layouts_and_packed_tensors(tmp_path: Path) -> None:
    arrays = drawn()
    arrays["v"] = arrays["k"] / 2
    one = report(save(tmp_path / "a", tensors(arrays)), "--kv", "e4m3")
    turned = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in arrays.items()}
    two = report(save(tmp_path / "b", tensors(turned)), "--kv", "e4m3", "--layout", "bhsd")
    kv = np.stack([arrays["k"], arrays["v"]], axis=2)
    three = report(save(tmp_path / "c", tensors({"q": arrays["q"], "kv": kv})), "--kv", "e4m3")
    assert one["caches"] == two["caches"] == three["caches"]


def test_many_queries_are_compared_at_equal_distances(tmp_path: Path) -> None:
    """Where float64 takes long. The last query is one of them."""
    arrays = drawn(batch=1, queries=3000, keys=1500)
    path = save(tmp_path / "in.safetensors", tensors(arrays))
    found = report(path, "--kv", "int8", "--causal", "--window", "16", "0")
    compared = found["queries_compared"]
    assert found["queries"] == 3000
    assert 100 < compared < 3000
    rows = [r for r in range(3000) if (r + 1) * compared // 3000 > r * compared // 3000]
    assert len(rows) == compared
    assert rows[-1] == 2999
    q, k, v = arrays.values()
    places = {"q_position": np.array([r - 1500 for r in rows], np.int32)}
    # Each row is a sequence of its own with all the keys.
    q_rows = q[0, rows][:, None]
    over = (
        np.broadcast_to(k, (compared, *k.shape[1:])),
        np.broadcast_to(v, (compared, *v.shape[1:])),
    )
    codes = [np.broadcast_to(held(x, "int8"), (compared, *x.shape[1:])) for x in (k, v)]
    wanted, got = (
        oracle.attention(q_rows, *kv, causal=True, window=(16, 0), **places).out
        for kv in (over, codes)
    )
    check_error(found["caches"][-1]["k_and_v_alone"], got, wanted)


def test_without_a_file() -> None:
    """Normal numbers with outliers, from the seed."""
    found = report(None, "--kv", "int8", "--kv-scale", "tensor")
    assert found["file"] is None
    assert found["queries"] == found["queries_compared"]
    by_tensor = found["caches"][-1]["k_and_v_alone"]["rms"]
    assert 0.04 < by_tensor < 0.2
    table = strobe("check", "--kv", "int8", "--seed", "2")
    assert table.returncode == 0, table.stderr
    assert "one in a thousand ten times as large, seed 2" in table.stdout
    by_rows = float(table.stdout.splitlines()[-2].split()[2]) / 100
    assert 0.005 < by_rows < by_tensor / 2


def test_table(tmp_path: Path) -> None:
    """A line for each cache, of each file; what JSON has, in per cent."""
    other = tmp_path / "other.safetensors"
    header = ["cache", "bytes", "rms", "worst", "worst", "head", "rms"]
    args = ["check", "--kv", "int8,q4_0", "--dtype", "bf16"]
    save(other, {**tensors(drawn()), "more": ("F32", [1], [0.0])})
    result = strobe(*args, other)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    (at,) = (n for n, words in enumerate(lines) if words == header)
    caches = report(other, *args[1:])["caches"]
    for name, words, cache in zip(
        ["fp32", "bf16", "fp16", "int8", "q4_0"], lines[at + 1 : at + 6], caches, strict=True
    ):
        assert words[:2] == [name, str(cache["bytes"])]
        assert words[3:8:2] == ["%", "%", "%"]
        assert words[8] == f"({cache['worst_head']})"
        assert float(words[2]) == pytest.approx(100 * cache["attention"]["rms"], rel=0.06)
        assert float(words[9]) == pytest.approx(100 * cache["k_and_v_alone"]["rms"], rel=0.06)
    both = strobe(*args, other, other)
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("q4_0 ") == 2
    assert "not used: more" in both.stdout


def test_document() -> None:
    """The table of docs/quantised.md is what the command gives, whatever kernel computes it."""
    text = (ROOT / "docs" / "quantised.md").read_text()
    (command,) = re.findall(r"\$ strobe (check --kv .*)\n", text)
    (table,) = re.findall(r"\n +cache +bytes +rms .*\n((?: +\S.*\n)+)", text)
    *args, file = command.split()
    caches = report(ROOT / file, *args[1:])["caches"]
    for line, cache in zip(table.splitlines(), caches, strict=True):
        shown = re.findall(r"[\d.e-]+(?= %)", line)
        rms, worst, worst_head, alone = (float(x) / 100 for x in shown)
        assert f" {cache['bytes']} " in line
        # What fp32's kernels round differs from one instruction set to another.
        near = {"rel": 1 if cache["dtype"] == "float32" else 0.1}
        assert cache["attention"]["rms"] == pytest.approx(rms, **near)
        assert cache["attention"]["worst"] == pytest.approx(worst, **near)
        assert max(cache["attention"]["heads"]) == pytest.approx(worst_head, **near)
        assert cache["k_and_v_alone"]["rms"] == pytest.approx(alone, rel=0.06)


def test_what_is_refused(tmp_path: Path) -> None:
    arrays = drawn()
    path = save(tmp_path / "in.safetensors", tensors(arrays))

    def run(*args: str, **changes: tuple[str, list[int], list[float]]) -> Any:
        file = save(tmp_path / "other.safetensors", {**tensors(arrays), **changes})
        return strobe("check", *args, file)

    refused(strobe("check", path), "FILE requires --kv")
    refused(strobe("check", "--causal"), "--causal requires --kv")
    refused(strobe("check", "--kv-scale", "row"), "--kv-scale requires --kv")
    refused(strobe("check", "--kv", "int8", "--cases", "2"), "--cases excludes --kv")
    refused(run("--kv", "int4"), "--kv = int4, expected one of int8, e4m3, e5m2, q8_0, q4_0")
    refused(run("--kv", "same"), "--kv = same, expected one of int8")
    refused(run("--kv", "int8", "--kv-scale", "batch"), "--kv-scale = batch, expected one of row")
    refused(run("--kv", "int8", "--dropout", "0.5"), "--dropout = 0.5 with --kv, expected 0")
    refused(strobe("check", "--kv", "int8", tmp_path / "none"), "cannot open", "none")
    bias = ("F32", [1, 1, 5, 40], [0.0] * 200)
    refused(run("--kv", "int8", bias=bias), "other.safetensors has a bias, expected q, k and v")
    scale = ("F32", [1], [1.0])
    codes = ("I8", [2, 40, HEADS_KV, DIM], [0.0] * 80 * HEADS_KV * DIM)
    got = run("--kv", "int8", k=codes, v=codes, k_scale=scale, v_scale=scale)
    refused(got, "has k_scale, which makes k and v a cache, expected q, k and v of floats")
    mask = ("BOOL", [1, 1, 5, 40], [1.0] * 200)
    refused(run("--kv", "int8", mask=mask), "has a mask as data, expected")
    k = arrays["k"].copy()
    k[1, 3, 0, 7] = np.inf
    got = run("--kv", "int8", k=tensors({"k": k})["k"])
    refused(got, "k has inf (entry 1, row 3, head 0, dim 7), expected finite numbers")
    odd = ("F32", [2, 40, HEADS_KV, 20], [1.0] * 80 * HEADS_KV * 20)
    refused(
        run("--kv", "int8,q4_0", v=odd),
        "v has head_dim = 20 with --kv q4_0, expected a multiple of 32",
    )
    assert run("--kv", "int8", v=odd).returncode == 0
    none = ("F32", [2, 0, HEADS_KV, DIM], [])
    refused(run("--kv", "int8", k=none, v=none), "has no sequence with both queries and keys")
