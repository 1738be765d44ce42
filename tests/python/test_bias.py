"""Additive bias and its gradient: of every shape, dtype and layout, against the oracle and against
PyTorch; what hides, what spreads, what is refused.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import strobe

import cases
import oracle
from cases import Case

B, H, N, M = 2, 4, 37, 53
SHARED = list(itertools.product((1, B), (1, H), (1, N)))
INF = float("inf")


def bias_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """Random, with some pairs hidden."""
    x = cases.normal(rng, shape)
    x[rng.random(shape) < 0.1] = -INF
    return x.astype(cases.DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("extents", SHARED)
def test_every_shape(extents: tuple[int, int, int], dtype: str) -> None:
    rng = np.random.default_rng(1)
    options = {"bias": bias_of(rng, (*extents, M), "float16"), "causal": True, "softcap": 4.0}
    Case(dtype=dtype, with_dlse=True, options=options).make(rng).check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_and_alibi(dtype: str) -> None:
    rng = np.random.default_rng(2)
    options = {"bias": bias_of(rng, (1, H, N, M), dtype), "window": (20, 9)}
    Case(alibi=1, options=options).make(rng).check()


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: np.asfortranarray(x),
        lambda x: x[:, :, ::-1, ::-1],
        lambda x: np.repeat(x, 2, 3)[..., ::2],
        lambda x: np.broadcast_to(x[:, :, :1], x.shape),
        lambda x: np.broadcast_to(x[..., :1], x.shape),
    ],
)
def test_every_layout(layout: Any) -> None:
    rng = np.random.default_rng(3)
    options = {"bias": layout(bias_of(rng, (B, H, N, M)))}
    Case(options=options).make(rng).check()


def test_packed_sequences_count_from_their_own_beginnings() -> None:
    """And the bias may have room for longer ones: there its gradient is 0."""
    rng = np.random.default_rng(4)
    packed: dict[str, Any] = {"batch": 3, "cu_q": [0, 9, 9, 46], "cu_k": [0, 20, 31, 60]}
    for heads, queries in ((1, 40), (H, 37), (H, 1)):
        options = {"bias": bias_of(rng, (3, heads, queries, 33)), "causal": True}
        Case(options=options, **packed).make(rng).check()


def test_a_cache_counts_behind_the_left_pad() -> None:
    rng = np.random.default_rng(5)
    q, k, v = (cases.normal(rng, (B, n, 2, 32)) for n in (5, 30, 30))
    bias = bias_of(rng, (1, 2, 5, 30))
    pads, used = np.array([3, 0], np.int32), np.array([24, 30], np.int32)
    out = strobe.attention_with_kvcache(
        q, k, v, seqused_k=used, leftpad=pads, bias=bias, causal=True
    )
    for b in range(B):
        one = slice(b, b + 1)
        keys = slice(pads[b], used[b])
        count = int(used[b] - pads[b])
        part = {"bias": bias[..., :count], "causal": True}
        alone = strobe.attention(q[one], k[one, keys], v[one, keys], **part)
        assert np.abs(out[one] - alone).max() < 1e-5


@pytest.mark.parametrize("shape", [(1, 1, 1, M), (1, H, N, M), (B, H, N, M)])
def test_sums_do_not_depend_on_the_threads(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(6)
    inputs = Case(options={"bias": bias_of(rng, shape)}).make(rng)
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.options["bias"]
    out, lse = strobe.attention(q, k, v, bias=bias, return_lse=True)
    found = [
        strobe.attention_backward(
            inputs.dout, q, k, v, out, lse, bias=bias, dbias=True, threads=threads
        )[3]
        for threads in (1, 2, 5)
    ]
    assert all(np.array_equal(found[0], x) for x in found)
    assert found[0].shape == shape


def test_what_is_hidden_counts_for_nothing() -> None:
    """Keys with NaN behind -inf, rows all of whose pairs are hidden, NaN where the mask hides."""
    rng = np.random.default_rng(7)
    bias = cases.normal(rng, (1, 1, N, M))
    bias[..., 7] = -INF
    bias[:, :, 5] = -INF
    seen = oracle.visible(N, M, causal=True)
    bias[0, 0][~seen] = np.nan
    inputs = Case(options={"bias": bias, "causal": True}).make(rng)
    inputs.k[:, 7] = inputs.v[:, 7] = np.nan
    inputs.q[:, 5] = np.nan
    out, lse = strobe.attention(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.options)
    assert np.isfinite(out).all()
    assert (out[:, 5] == 0).all()
    assert (lse[:, :, 5] == -INF).all()
    inputs.check()


@pytest.mark.parametrize("value", [INF, np.nan])
def test_infinity_and_nan_make_their_rows_nan(value: float) -> None:
    rng = np.random.default_rng(8)
    bias = cases.normal(rng, (B, H, N, M))
    bias[1, 2, 3, 4] = value
    inputs = Case(options={"bias": bias}).make(rng)
    out = strobe.attention(inputs.q, inputs.k, inputs.v, bias=bias)
    assert np.isnan(out[1, 3, 2]).all()
    assert np.isnan(out).sum() == out.shape[-1]
    inputs.check()


def test_the_dtype_of_the_gradient() -> None:
    rng = np.random.default_rng(9)
    options = {"bias": bias_of(rng, (1, H, N, M), "float16")}
    inputs = Case(dtype="bfloat16", options=options).make(rng)
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.options["bias"]
    out, lse = strobe.attention(q, k, v, bias=bias, return_lse=True)
    arguments = (inputs.dout, q, k, v, out, lse)
    narrow = strobe.attention_backward(*arguments, bias=bias, dbias=True)
    wide = strobe.attention_backward(*arguments, bias=bias, dbias=True, grad_dtype="float32")
    assert narrow[3].dtype == np.float16
    assert wide[3].dtype == np.float32
    assert np.array_equal(wide[3].astype(np.float16), narrow[3])
    assert len(strobe.attention_backward(*arguments, bias=bias)) == 3


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((B, H, N), r"bias.ndim = 3, expected 4: \(batch, heads, seqlen_q, seqlen_k\)"),
        ((3, H, N, M), r"bias.shape\[0\] = 3, expected 1 or 2 \(batch\)"),
        ((B, 2, N, M), r"bias.shape\[1\] = 2, expected 1 or 4 \(heads\)"),
        ((B, H, N + 1, M), r"bias.shape\[2\] = 38, expected 1 or 37 \(seqlen_q\)"),
        ((B, H, N, 1), r"bias.shape\[3\] = 1, expected 53 \(seqlen_k\)"),
    ],
)
def test_another_shape_is_refused(shape: tuple[int, ...], words: str) -> None:
    inputs = Case().make(np.random.default_rng(10))
    with pytest.raises(strobe.InvalidArgument, match=words):
        strobe.attention(inputs.q, inputs.k, inputs.v, bias=np.zeros(shape, np.float32))


def test_what_else_is_refused() -> None:
    inputs = Case().make(np.random.default_rng(11))
    qkv = (inputs.q, inputs.k, inputs.v)
    good = np.zeros((1, 1, N, M), np.float32)
    with pytest.raises(strobe.InvalidArgument, match=r"bias.dtype = int32, expected float32 or"):
        strobe.attention(*qkv, bias=good.astype(np.int32))
    out, lse = strobe.attention(*qkv, bias=good, return_lse=True)

    def backward(**more: Any) -> Any:
        return strobe.attention_backward(inputs.dout, *qkv, out, lse, **more)

    with pytest.raises(strobe.InvalidArgument, match="dbias is asked for with bias = None"):
        backward(dbias=True)
    with pytest.raises(strobe.InvalidArgument, match=r"dbias.shape = .*that of bias"):
        backward(bias=good, dbias=np.zeros((1, 1, N, 1), np.float32))
    with pytest.raises(strobe.InvalidArgument, match=r"dbias.dtype = float16, expected float32"):
        backward(bias=good, dbias=good.astype(np.float16))
    with pytest.raises(strobe.InvalidArgument, match="dbias shares memory with bias"):
        backward(bias=good, dbias=good)
    with pytest.raises(strobe.InvalidArgument, match="strides of bias are all 0"):
        backward(bias=np.broadcast_to(np.float32(0), (B, H, N, M)), dbias=True)


def test_plan_and_why_say_it() -> None:
    x, bias = strobe.ArraySpec((B, N, H, 32)), strobe.ArraySpec((1, H, N, N), "bfloat16")
    text = strobe.plan(x, x, x, bias=bias, backward=True, dbias=True)
    assert ", bias bf16 of all sequences" in text
    assert ", dbias" in text


def test_dbias_is_a_flag_of_any_kind() -> None:
    """As other flags: Python's and NumPy's bools, a tensor's, 0 and 1."""
    rng = np.random.default_rng(5)
    q, k, v, dout = rng.standard_normal((4, 1, 9, 2, 16), np.float32)
    bias = rng.standard_normal((1, 2, 9, 9), np.float32)
    out, lse = strobe.attention(q, k, v, bias=bias, return_lse=True)

    def backward(dbias: Any) -> Any:
        return strobe.attention_backward(dout, q, k, v, out, lse, bias=bias, dbias=dbias)

    wanted = backward(True)
    for yes, no in ((np.True_, np.False_), (1, 0), (np.array(True), np.array(False))):
        assert all((x == y).all() for x, y in zip(backward(yes), wanted, strict=True))
        assert len(backward(no)) == 3
    with pytest.raises(strobe.InvalidArgument, match="dbias = 2, expected a bool"):
        backward(2)
