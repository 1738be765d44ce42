"""Gradients in float32, gradients that are added up, and delta from the caller, by
`attention_backward` on the CPU: against the gradients that are written plainly, which
test_attention.py holds against the oracle.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import strobe

from cases import Case

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
NAMES = ("dq", "dk", "dv")


class Layer:
    """A forward call and its plain gradients."""

    def __init__(self, dtype: str, kind: str = "numpy") -> None:
        inputs = Case(dtype=dtype, heads=4, heads_kv=2).make(np.random.default_rng(7))
        self.q, self.k, self.v, self.dout = (
            to_kind(x, kind) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)
        )
        self.out, self.lse = strobe.attention(self.q, self.k, self.v, causal=True, return_lse=True)
        self.plain = self.gradients()

    def gradients(self, **changes: Any) -> Any:
        arrays: dict[str, Any] = {
            name: getattr(self, name) for name in ("dout", "q", "k", "v", "out", "lse")
        }
        arrays |= changes
        return strobe.attention_backward(**arrays, causal=True)

    def delta(self) -> np.ndarray[Any, Any]:
        product = numbers(self.out) * numbers(self.dout)
        return np.ascontiguousarray(product.sum(-1).transpose(0, 2, 1), np.float32)


def to_kind(array: Any, kind: str) -> Any:
    if kind == "numpy":
        return array
    torch = pytest.importorskip("torch")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(array)


def numbers(array: Any) -> Any:
    """As float64."""
    return np.asarray(array.double() if hasattr(array, "double") else array.astype(np.float64))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_gradients_are_the_unrounded_ones(dtype: str, kind: str) -> None:
    layer = Layer(dtype, kind)
    wide = layer.gradients(grad_dtype="float32")
    into = tuple(to_kind(np.empty(x.shape, np.float32), kind) for x in wide)
    given = layer.gradients(grads=into)
    assert all(a is b for a, b in zip(given, into, strict=True))
    for name, x, y, z in zip(NAMES, wide, into, layer.plain, strict=True):
        assert str(x.dtype).endswith("float32"), name
        assert np.array_equal(numbers(x), numbers(y)), name
        rounded = numbers(x).astype(np.float32).astype(DTYPES[dtype])
        assert np.array_equal(rounded.astype(np.float64), numbers(z)), name
        assert not np.array_equal(numbers(x), numbers(z)), name


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("wide", [False, True])
def test_gradients_are_added_to_what_is_there(dtype: str, wide: bool) -> None:
    layer = Layer(dtype)
    exact = layer.gradients(grad_dtype="float32")
    held = np.float32 if wide else DTYPES[dtype]
    rng = np.random.default_rng(3)
    before = [rng.normal(size=x.shape).astype(np.float32).astype(held) for x in exact]
    sums = tuple(x.copy() for x in before)
    layer.gradients(grads=sums, accumulate=True)
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[np.dtype(held).name]
    for name, old, more, found in zip(NAMES, before, exact, sums, strict=True):
        wanted = numbers(old) + numbers(more)
        allowed = unit * np.abs(wanted) + 2.0**-22 * (np.abs(numbers(old)) + np.abs(more)) + 1e-7
        assert np.all(np.abs(numbers(found) - wanted) <= allowed), name
        assert not np.array_equal(numbers(found), numbers(old)), name


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_delta_stands_for_out(dtype: str) -> None:
    layer = Layer(dtype)
    wide: dict[str, Any] = {"grad_dtype": "float32"}
    plain = layer.gradients(**wide)
    for out in (None, np.full_like(layer.out, np.nan)):
        given = layer.gradients(out=out, delta=layer.delta(), **wide)
        for name, x, y in zip(NAMES, given, plain, strict=True):
            assert np.allclose(x, y, rtol=1e-5, atol=1e-5), name
    other = layer.gradients(out=None, delta=layer.delta() + 1, **wide)
    assert not np.allclose(other[0], plain[0], atol=1e-3)
    dlse = np.ones_like(layer.lse)  # in delta as dlse is on its own
    with_dlse = layer.gradients(dlse=dlse, **wide)
    given = layer.gradients(out=None, delta=layer.delta() - dlse, **wide)
    for name, x, y in zip(NAMES, given, with_dlse, strict=True):
        assert np.allclose(x, y, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("size", [1.0, 3000.0, 60000.0])  # of scores, and so of lse
@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradients_of_parts_of_the_keys_add_up(dtype: str, size: float, with_sinks: bool) -> None:
    """Each part has lse and delta of all keys, and nothing else of the others: not even where lse
    is so large that the sums of weights are computed again.
    """
    rng = np.random.default_rng(11)
    q, k, v, dout = (
        rng.normal(size=(2, 70, heads, 32)).astype(np.float32) for heads in (4, 2, 2, 4)
    )
    q[..., 0], k[..., 0] = size / 64, 64 * 32**0.5  # the same in every score
    q, k, v, dout = (x.astype(DTYPES[dtype]) for x in (q, k, v, dout))
    sinks = np.array([size, -np.inf, size + 2, -size], np.float32) if with_sinks else None
    out, lse = strobe.attention(q, k, v, return_lse=True, sinks=sinks)
    delta = (numbers(dout) * numbers(out)).sum(-1).transpose(0, 2, 1)
    delta = np.ascontiguousarray(delta, np.float32)
    whole = strobe.attention_backward(dout, q, k, v, out, lse, sinks=sinks, grad_dtype="float32")
    sums = tuple(np.zeros(x.shape, np.float32) for x in whole)
    for part in (slice(0, 5), slice(5, 64), slice(64, 70)):
        grads = (sums[0], sums[1][:, part], sums[2][:, part])
        more: dict[str, Any] = {"delta": delta, "grads": grads, "accumulate": True}
        strobe.attention_backward(dout, q, k[:, part], v[:, part], None, lse, **more)
    # What float32 makes of lse, and of a score where parts are computed by other kernels.
    unit = 2.0**-22 * size + 1e-4 + {"float32": 0, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    for name, x, y in zip(NAMES, sums, whole, strict=True):
        largest = np.abs(np.delete(y, 0, axis=-1)).max()  # of the first dimension q and k are large
        found = np.abs(np.delete(x - y, 0, axis=-1)).max()
        assert found <= 4 * unit * largest, (name, found, largest)


def test_bad_arguments_are_named() -> None:
    layer = Layer("bfloat16")
    f32 = tuple(np.zeros(x.shape, np.float32) for x in layer.plain)
    mixed = (f32[0], layer.plain[1], f32[2])
    delta = layer.delta()
    for words, changes in (
        ("accumulate = True with grads = None", {"accumulate": True}),
        ("accumulate = 'x', expected", {"accumulate": "x", "grads": f32}),
        ("grad_dtype = 'float16', expected None or \"float32\"", {"grad_dtype": "float16"}),
        ("grad_dtype = 'int7', expected", {"grad_dtype": "int7"}),
        (r"dk.dtype = bfloat16, expected float32 \(grad_dtype\)", {"grads": mixed}),
        ("dq.dtype = bfloat16, expected float32", {"grads": layer.plain, "grad_dtype": "float32"}),
        ("out = None, expected an array", {"out": None}),
        ("delta.dtype = float64, expected float32", {"delta": delta.astype(np.float64)}),
        (r"delta.shape\[2\]", {"delta": np.ascontiguousarray(delta[:, :, 1:])}),
        ("delta.strides", {"delta": np.repeat(delta, 2, axis=2)[:, :, ::2]}),
        ("dlse given with delta given", {"delta": delta, "dlse": np.zeros_like(delta)}),
    ):
        with pytest.raises(strobe.InvalidArgument, match=words):
            layer.gradients(**changes)


def test_plans_say_it() -> None:
    x = strobe.ArraySpec((2, 64, 4, 32), "bfloat16")
    text = strobe.plan(x, x, x, backward=True, grad_dtype="float32", accumulate=True, delta=True)
    assert "gradients fp32" in text
    assert ", delta given, accumulated gradients" in text
    assert strobe.plan(x, x, x, grad_dtype="float32", accumulate=True, delta=True) == strobe.plan(
        x, x, x
    )
