"""`strobe run` of float8 tensors, against the oracle over what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tool import Tensors, load, needs_cli, oracle, refused, save, strobe

pytestmark = needs_cli
HEADS, HEADS_KV, DIM, QUERIES, KEYS = 4, 2, 32, 5, 9
TYPES: dict[str, Any] = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}


def drawn(kv: str, batch: int = 2) -> tuple[Tensors, list[np.ndarray]]:
    """A file's tensors with scales, and what q, k and v stand for."""
    rng = np.random.default_rng(3)
    tensors: Tensors = {}
    values = []
    for name, rows, heads, form in (
        ("q", QUERIES, HEADS, "F8_E4M3"), ("k", KEYS, HEADS_KV, kv), ("v", KEYS, HEADS_KV, kv),
    ):  # fmt: skip
        codes = (16 * rng.standard_normal((batch, rows, heads, DIM))).astype(TYPES[form])
        scale = (rng.uniform(0.5, 2, (batch, HEADS_KV)) / 16).astype(np.float32)
        tensors[name] = (form, list(codes.shape), codes.view(np.uint8).ravel().tolist())
        tensors[f"{name}_scale"] = ("F32", [batch, HEADS_KV], scale.ravel().tolist())
        by = np.repeat(scale, heads // HEADS_KV, 1)[:, None, :, None]
        values.append(codes.astype(np.float64) * by)
    return tensors, values


def out_of(path: Path, tmp_path: Path, *options: str) -> tuple[str, np.ndarray]:
    result = strobe("run", path, "-o", tmp_path / "out.safetensors", *options)
    assert result.returncode == 0, result.stderr
    dtype, shape, numbers = load(tmp_path / "out.safetensors")["out"]
    return dtype, np.reshape(numbers, shape)


@pytest.mark.parametrize("kv", list(TYPES))
def test_run(kv: str, tmp_path: Path) -> None:
    tensors, (q, k, v) = drawn(kv)
    path = save(tmp_path / "in.safetensors", tensors)
    dtype, rounded = out_of(path, tmp_path)
    assert dtype == "BF16"
    dtype, out = out_of(path, tmp_path, "--out-float32")
    assert dtype == "F32"
    for b in range(2):
        places = oracle.sequences_of([QUERIES], [KEYS])
        wanted = oracle.attend(q[b], k[b], v[b], places, oracle.masked()).out
        np.testing.assert_allclose(out[b], wanted, atol=1e-5)
        np.testing.assert_allclose(rounded[b], wanted, rtol=0.01, atol=1e-3)
    # Scales of heads alone, which the sequences share.
    for names in (("q_scale",), ("k_scale", "v_scale")):
        first = {n: (tensors[n][0], [1, HEADS_KV], tensors[n][2][:HEADS_KV]) for n in names}
        twice = {n: (tensors[n][0], [2, HEADS_KV], 2 * tensors[n][2][:HEADS_KV]) for n in names}
        for extra in ({}, {"leftpad": ("I32", [2], [0, 0])}):
            found = [
                out_of(save(tmp_path / "shared.safetensors", {**tensors, **x, **extra}), tmp_path)[
                    1
                ]
                for x in (first, twice)
            ]
            assert np.array_equal(*found)
            assert not np.array_equal(found[0], rounded)
    # Without scales these are 1; of one sequence in a cache they are the sequence's.
    plain = {name: x for name, x in tensors.items() if "scale" not in name}
    _, units = out_of(save(tmp_path / "plain.safetensors", plain), tmp_path, "--scale", "0.001")
    assert np.isfinite(units).all()
    cached = {**tensors, "leftpad": ("I32", [2], [0, 0])}
    _, same = out_of(save(tmp_path / "cache.safetensors", cached), tmp_path, "--out-float32")
    np.testing.assert_allclose(same, out, atol=1e-5)


@pytest.mark.parametrize("kv", list(TYPES))
def test_append(kv: str, tmp_path: Path) -> None:
    tensors, (q, k, v) = drawn(kv)
    used, new = [4, KEYS - 2], 2
    codes = {name: np.reshape(tensors[name][2], (2, KEYS, HEADS_KV, DIM)) for name in "kv"}
    for name, x in codes.items():
        rows = np.stack([x[b, n : n + new] for b, n in enumerate(used)])
        tensors[f"{name}_new"] = (kv, list(rows.shape), rows.ravel().tolist())
        before = x.copy()
        for b, n in enumerate(used):
            before[b, n : n + new] = 1
        tensors[name] = (kv, list(x.shape), before.ravel().tolist())
    tensors["seqused_k"] = ("I32", [2], used)
    path = save(tmp_path / "in.safetensors", tensors)
    _, out = out_of(path, tmp_path, "--out-float32")
    for b, n in enumerate(used):
        places = oracle.sequences_of([QUERIES], [n + new])
        seen = [x[b, : n + new] for x in (k, v)]
        wanted = oracle.attend(q[b], *seen, places, oracle.masked()).out
        np.testing.assert_allclose(out[b], wanted, atol=1e-5)
    written = load(tmp_path / "out.safetensors")
    for name, x in codes.items():
        dtype, _, numbers = written[name]
        assert dtype == kv
        got = np.reshape(numbers, x.shape)
        for b, n in enumerate(used):
            assert np.array_equal(got[b, : n + new], x[b, : n + new])
    other = "F8_E5M2" if kv == "F8_E4M3" else "F8_E4M3"
    wrong = {**tensors, "v_new": (other, *tensors["v_new"][1:])}
    refused(strobe("run", save(path, wrong)), f"v_new is {other}, expected {kv} like v")


def test_what_is_refused(tmp_path: Path) -> None:
    good, _ = drawn("F8_E4M3")
    path = tmp_path / "in.safetensors"

    def run(change: Tensors, without: str = "", *options: str) -> Any:
        tensors = {name: x for name, x in {**good, **change}.items() if name != without}
        return strobe("run", save(path, tensors), *options)

    refused(run({"q": ("F8_E5M2", *good["q"][1:])}), "q is F8_E5M2 (of k and v alone")
    refused(run({"v": ("F8_E5M2", *good["v"][1:])}), "v is F8_E5M2, expected F8_E4M3 like k")
    floats = ("F32", good["k"][1], [0.0] * len(good["k"][2]))
    refused(run({"k": floats, "v": floats}), "k is F32, expected F8_E4M3 like the others")
    refused(run({}, "v_scale"), "k or v without its scale, expected k_scale and v_scale, or")
    words = "q_scale is F32 [2], expected F32 [2, 2]: [batch or 1, heads_kv]"
    refused(run({"q_scale": ("F32", [2], [1.0] * 2)}), words)
    refused(run({}, "", "--dtype", "bfloat16"), "--dtype with q of F8_E4M3, expected none")
    words = "q is F8_E4M3: no kernel computes gradients from float8, expected --forward"
    refused(run({}, "", "--backward"), words)
