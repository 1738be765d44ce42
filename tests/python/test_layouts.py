"""Strides, packed tensors and outputs of the caller's: read and written where they lie, never
copied.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strobe
from recorder import record
from strobe import _core

import cases
from cases import Array, Case, Inputs


def heads_first(x: Array) -> Array:
    """The same values in (batch, heads, seqlen, head_dim) order."""
    return np.ascontiguousarray(np.moveaxis(x, 2, 1)).swapaxes(1, 2)


def batch_inside(x: Array) -> Array:
    """(seqlen, batch, heads, head_dim) order."""
    return np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)


def padded(x: Array) -> Array:
    """Every row in a larger buffer, from an odd offset."""
    big = np.full((*x.shape[:-1], x.shape[-1] + 5), np.nan, x.dtype)
    view = big[..., 3 : 3 + x.shape[-1]]
    view[...] = x
    return view


def every_other(x: Array) -> Array:
    big = np.full((x.shape[0] * 2, x.shape[1] * 3, x.shape[2] * 2, x.shape[3]), np.nan, x.dtype)
    view = big[::2, 1::3, ::2]
    view[...] = x
    return view


def backwards(x: Array) -> Array:
    """Negative strides."""
    return np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]


LAYOUTS: list[Callable[[Array], Array]] = [
    heads_first,
    batch_inside,
    padded,
    every_other,
    backwards,
]


def run(inputs: Inputs, **more: Any) -> list[Array]:
    out, lse = strobe.attention(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.options)
    grads = strobe.attention_backward(
        inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, **more, **inputs.options
    )
    return [out, lse, *grads]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_give_the_same_bits(
    layout: Callable[[Array], Array], dtype: str, rng: np.random.Generator
) -> None:
    inputs = Case(dtype=dtype, options={"causal": True}).make(rng)
    wanted = run(inputs)
    for name in ("q", "k", "v", "dout"):
        setattr(inputs, name, layout(getattr(inputs, name)))
    assert all(np.array_equal(a, b) for a, b in zip(run(inputs), wanted, strict=True))
    # Outputs too.
    out = layout(cases.poisoned(inputs.dout.shape, inputs.q.dtype))
    grads = [layout(cases.poisoned(x.shape, x.dtype)) for x in (inputs.q, inputs.k, inputs.v)]
    result, lse = strobe.attention(
        inputs.q, inputs.k, inputs.v, out=out, return_lse=True, causal=True
    )
    assert result is out
    given = strobe.attention_backward(
        inputs.dout,
        inputs.q,
        inputs.k,
        inputs.v,
        out,
        lse,
        causal=True,
        grads=(grads[0], grads[1], grads[2]),
    )
    assert all(np.array_equal(a, b) for a, b in zip([out, lse, *given], wanted, strict=True))


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_heads_that_descend_in_memory(heads: int, dtype: str, rng: np.random.Generator) -> None:
    """One query and many keys; with two heads the run of a row has no bytes by its strides."""
    q, k, v = (cases.normal(rng, (1, n, heads, 64), cases.DTYPES[dtype]) for n in (1, 200, 200))
    wanted = strobe.attention(q, k, v)
    given = [np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1] for x in (k, v)]
    assert np.array_equal(strobe.attention(q, *given), wanted)


def test_qkv_packed(rng: np.random.Generator) -> None:
    qkv = cases.normal(rng, (2, 30, 3, 4, 16))
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    out, lse = strobe.attention(q, k, v, return_lse=True)
    q2, k2, v2 = (np.ascontiguousarray(x) for x in (q, k, v))
    assert np.array_equal(out, strobe.attention(q2, k2, v2))
    dqkv = cases.poisoned(qkv.shape, qkv.dtype)
    strobe.attention_backward(
        out, q, k, v, out, lse, grads=(dqkv[:, :, 0], dqkv[:, :, 1], dqkv[:, :, 2])
    )
    wanted = strobe.attention_backward(out, q2, k2, v2, out, lse)
    assert np.array_equal(dqkv, np.stack(wanted, axis=2))


def test_kv_packed_varlen(rng: np.random.Generator) -> None:
    inputs = Case(batch=2, cu_q=[0, 10, 33], cu_k=[0, 20, 41]).make(rng)
    kv = np.stack([inputs.k, inputs.v], axis=1)
    assert np.array_equal(
        strobe.attention(inputs.q, kv[:, 0], kv[:, 1], **inputs.options),
        strobe.attention(inputs.q, inputs.k, inputs.v, **inputs.options),
    )


def test_broadcast_inputs(rng: np.random.Generator) -> None:
    inputs = Case(heads=2, heads_kv=2).make(rng)
    one = inputs.k[:1, :, :1]
    k = np.broadcast_to(one, inputs.k.shape)
    dout = np.broadcast_to(inputs.dout[:, :1], inputs.dout.shape)
    wide = Inputs(inputs.q, k, inputs.v, dout, None, {})
    full = Inputs(inputs.q, k.copy(), inputs.v, dout.copy(), None, {})
    assert all(np.array_equal(a, b) for a, b in zip(run(wide), run(full), strict=True))


def test_axes_of_one_element_may_have_any_stride(rng: np.random.Generator) -> None:
    x = cases.normal(rng, (5, 16))
    wanted = strobe.attention(
        x[None, :, None].copy(), x[None, :, None].copy(), x[None, :, None].copy()
    )
    q = x[None, :, None]  # NumPy gives the new axes a stride of 0
    assert q.strides[0] == 0
    out = cases.poisoned((5, 16), np.float32)[None, :, None]
    assert np.array_equal(strobe.attention(q, q, q, out=out), wanted)
    strange = np.lib.stride_tricks.as_strided(x, (1, 5, 1, 16), (7, x.strides[0], 3, 4))
    assert np.array_equal(strobe.attention(strange, strange, strange), wanted)
    column = cases.normal(rng, (1, 9, 2, 6))[..., 2:3]  # head_dim 1, 6 elements apart
    assert np.array_equal(
        strobe.attention(column, column, column),
        strobe.attention(column.copy(), column.copy(), column.copy()),
    )


ADDRESSES = """
import json, numpy as np, strobe
from producer import Producer
qkv = np.random.default_rng(1).standard_normal((2, 30, 3, 4, 16)).astype(np.float16)
q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
out = np.full((2, 4, 30, 16), np.nan, np.float16).swapaxes(1, 2)
slopes = np.ones((2, 4), np.float32)
result, lse = strobe.attention(q, k, v, out=out, alibi_slopes=slopes, return_lse=True)
assert result is out
shared = Producer(q)
strobe.attention(shared, k, v, out=out, alibi_slopes=slopes)
assert shared.exported == shared.deleted == 1
named = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "alibi_slopes": slopes}
print(json.dumps({n: (x.ctypes.data, *(s // 2 for s in x.strides)) for n, x in named.items()}))
"""


def test_addresses_and_strides_pass_straight_through(tmp_path: Path) -> None:
    named, launches = record(ADDRESSES, tmp_path)
    assert len(launches) == 2
    for problem, arguments in launches:
        for name in ("q", "k", "v", "out", "alibi_slopes"):
            assert getattr(arguments, name) == named[name][0]
        assert arguments.cu_seqlens_q is None
        assert arguments.workspace is None
        for name in ("q", "k", "v", "out"):
            strides = getattr(problem, name)
            got = [strides.batch, strides.seqlen, strides.head, strides.dim]
            assert got == named[name][1:]
    assert launches[0][1].lse == named["lse"][0]
    assert launches[1][1].lse is None


def test_calls_allocate_only_their_results(rng: np.random.Generator) -> None:
    inputs = Case(batch=1, seqlen_q=256, seqlen_k=4096, heads=4, heads_kv=4).make(rng)
    out = np.empty_like(inputs.dout)
    strobe.attention(inputs.q, inputs.k, inputs.v, out=out)
    peaks = []
    for _ in range(5):  # another thread of this process may allocate meanwhile
        tracemalloc.start()
        strobe.attention(inputs.q, inputs.k, inputs.v, out=out)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert min(peaks) < 16_384  # k alone has 2 MiB; NumPy reports its arrays to tracemalloc


def test_memory_maps_and_read_only_inputs(tmp_path: Any, rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    np.save(tmp_path / "q.npy", inputs.q)
    mapped = np.load(tmp_path / "q.npy", mmap_mode="r")
    assert isinstance(mapped, np.memmap)
    out = strobe.attention(mapped, inputs.k, inputs.v)
    assert type(out) is np.ndarray
    assert np.array_equal(out, strobe.attention(inputs.q, inputs.k, inputs.v))


def test_inputs_are_left_alone(rng: np.random.Generator) -> None:
    inputs = Case(with_dlse=True, alibi=1).make(rng)
    arrays = [inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, *inputs.options.values()]
    before = [np.array(x, copy=True) for x in arrays if x is not None]
    run(inputs, dlse=inputs.dlse)
    assert all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True) if a is not None)


def test_plans_are_reused_and_bounded(rng: np.random.Generator) -> None:
    _core.forget()
    x = cases.normal(rng, (1, _core.CAPACITY + 40, 1, 8))
    for _ in range(3):
        strobe.attention(x[:, :64], x, x)
    assert _core.kept() == (1, 0)
    wanted = strobe.attention(x[:, :3], x[:, :9], x[:, :9])
    for n in range(1, _core.CAPACITY + 40):  # each one is a plan of its own
        strobe.attention(x[:, :n], x[:, :1], x[:, :1])
        assert _core.kept()[0] <= _core.CAPACITY
    assert _core.kept() == (_core.CAPACITY, 0)
    assert np.array_equal(strobe.attention(x[:, :3], x[:, :9], x[:, :9]), wanted)
