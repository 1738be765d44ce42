"""Every option and dtype against the float64 oracle, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strobe

import cases
import oracle
from cases import DTYPES, Case

FEATURES: dict[str, Case] = {
    "plain": Case(),
    "square": Case(seqlen_q=64, seqlen_k=64),
    "long": Case(batch=1, seqlen_q=300, seqlen_k=517, heads=2, heads_kv=1),
    "more-queries-than-keys": Case(seqlen_q=70, seqlen_k=19),
    "causal": Case(options={"causal": True}),
    "causal-more-queries": Case(seqlen_q=53, seqlen_k=37, options={"causal": True}),
    "window": Case(options={"window": (9, 5)}),
    "window-left-only": Case(options={"window": (7, -1)}),
    "window-right-only": Case(options={"window": (-1, 3)}),
    "window-zero": Case(seqlen_q=33, seqlen_k=33, options={"window": (0, 0)}),
    "window-causal": Case(options={"window": (11, 4), "causal": True}),
    "window-off-the-keys": Case(seqlen_q=90, seqlen_k=20, options={"window": (3, 2)}),
    "scale": Case(options={"scale": 0.31}),
    "scale-zero": Case(options={"scale": 0.0}),
    "scale-negative": Case(options={"scale": -0.2}),
    "softcap": Case(options={"softcap": 1.5}),
    "softcap-causal": Case(options={"softcap": 3.0, "causal": True}),
    "alibi": Case(alibi=1),
    "alibi-batch": Case(alibi=2, options={"causal": True}),
    "dropout": Case(options={"dropout_p": 0.25, "dropout_seed": 7, "dropout_offset": 3}),
    "dropout-causal": Case(
        options={
            "dropout_p": 0.5,
            "dropout_seed": 2**63 + 5,
            "dropout_offset": 2**40,
            "causal": True,
        }
    ),
    "heads-equal": Case(heads=3, heads_kv=3),
    "one-key-head": Case(heads=6, heads_kv=1),
    "dlse": Case(with_dlse=True, options={"causal": True}),
    "one-query": Case(seqlen_q=1, seqlen_k=129),
    "one-key": Case(seqlen_q=5, seqlen_k=1),
    "head-dim-1": Case(head_dim=1, head_dim_v=1),
    "head-dim-odd": Case(head_dim=33, head_dim_v=33),
    "head-dim-v-less": Case(head_dim=40, head_dim_v=7),
    "head-dim-v-more": Case(head_dim=16, head_dim_v=72),
    "head-dim-256": Case(seqlen_q=20, seqlen_k=24, head_dim=256, head_dim_v=256),
    "varlen": Case(batch=4, cu_q=[0, 5, 5, 40, 47], cu_k=[0, 9, 20, 60, 61]),
    "varlen-no-keys": Case(batch=3, cu_q=[0, 5, 12, 20], cu_k=[0, 9, 9, 21]),
    "varlen-causal": Case(
        batch=3, cu_q=[0, 30, 41, 90], cu_k=[0, 20, 60, 109], options={"causal": True}
    ),
    "varlen-everything": Case(
        batch=3,
        alibi=2,
        with_dlse=True,
        head_dim=24,
        head_dim_v=40,
        cu_q=[0, 30, 41, 90],
        cu_k=[0, 20, 60, 109],
        options={
            "window": (25, 9),
            "softcap": 4.0,
            "scale": 0.2,
            "dropout_p": 0.1,
            "dropout_seed": 1,
        },
    ),
    "everything": Case(
        alibi=1,
        with_dlse=True,
        head_dim=48,
        head_dim_v=20,
        options={
            "causal": True,
            "window": (30, -1),
            "softcap": 5.0,
            "scale": 0.15,
            "dropout_p": 0.2,
            "dropout_seed": 11,
        },
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
def test_against_oracle(feature: str, dtype: str, rng: np.random.Generator) -> None:
    case = FEATURES[feature]
    case.dtype = dtype
    case.make(rng).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_defaults(dtype: str, rng: np.random.Generator) -> None:
    inputs = Case(batch=1, seqlen_q=257, seqlen_k=257, dtype=dtype).make(rng)
    inputs.check(threads=1)
    inputs.check(threads=2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_out_is_not_rounded(dtype: str, rng: np.random.Generator) -> None:
    inputs = Case(head_dim=16, head_dim_v=24, dtype=dtype).make(rng)
    narrow, lse = strobe.attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    wide = np.full(narrow.shape, np.nan, np.float32)
    assert strobe.attention(inputs.q, inputs.k, inputs.v, out=wide) is wide
    assert "out fp32" in strobe.why()
    error = np.abs(wide - narrow.astype(np.float32)).max()
    assert 0 < error < 0.01
    if "amx" not in strobe.why():  # which leaves float32 results to another kernel
        assert np.array_equal(wide.astype(narrow.dtype), narrow)
    # What the backward pass reads says itself which it is.
    gradients = [
        strobe.attention_backward(
            inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, grad_dtype="float32"
        )
        for out in (narrow, wide)
    ]
    assert "out fp32" in strobe.why()
    for narrow_grad, wide_grad in list(zip(*gradients, strict=True))[:2]:  # dv comes without out
        assert 0 < np.abs(narrow_grad - wide_grad).max() < 0.05


def test_result_is_new_and_contiguous(rng: np.random.Generator) -> None:
    inputs = Case(head_dim=16, head_dim_v=24, dtype="bfloat16").make(rng)
    out = strobe.attention(inputs.q, inputs.k, inputs.v)
    assert type(out) is np.ndarray
    assert out.dtype == inputs.q.dtype
    assert out.shape == (2, 37, 4, 24)
    assert out.flags.c_contiguous
    assert out.flags.owndata
    _, lse = strobe.attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    assert lse.dtype == np.float32
    assert lse.shape == (2, 4, 37)
    grads = strobe.attention_backward(inputs.dout, inputs.q, inputs.k, inputs.v, out, lse)
    assert [g.shape for g in grads] == [inputs.q.shape, inputs.k.shape, inputs.v.shape]
    assert all(g.dtype == inputs.q.dtype for g in grads)


@pytest.mark.parametrize("kind", [tuple, list])
def test_window_takes_any_pair(kind: Any, rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    wanted = strobe.attention(inputs.q, inputs.k, inputs.v, window=(5, 2))
    got = strobe.attention(inputs.q, inputs.k, inputs.v, window=kind([np.int64(5), 2]))
    assert np.array_equal(got, wanted)


def test_options_that_change_in_place(rng: np.random.Generator) -> None:
    q = rng.standard_normal((1, 20, 2, 8)).astype(np.float32)
    left, causal = np.array(2), np.array(False)
    options: dict[str, Any] = {"window": (left, np.array(-1)), "causal": causal}
    first = strobe.attention(q, q, q, **options)
    left[...], causal[...] = 9, True
    out, lse = strobe.attention(q, q, q, return_lse=True, **options)
    want = strobe.attention(q, q, q, window=(9, -1), causal=True)
    assert not np.array_equal(first, out)
    assert np.array_equal(out, want)
    grads = strobe.attention_backward(q, q, q, q, out, lse, **options)
    left[...], causal[...] = 2, False
    others = strobe.attention_backward(q, q, q, q, out, lse, **options)
    assert not np.array_equal(grads[0], others[0])


def test_lengths_that_change_in_place(rng: np.random.Generator) -> None:
    q = rng.standard_normal((6, 2, 8)).astype(np.float32)
    offsets, longest = np.array([0, 4, 6], np.int32), np.array(8)
    options: dict[str, Any] = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "threads": np.array(1),
    }
    out, lse = strobe.attention(q, q, q, return_lse=True, **options)
    strobe.attention_backward(q, q, q, q, out, lse, **options)
    longest[...] = 3
    with pytest.raises(strobe.InvalidArgument, match="at most max_seqlen_q = 3"):
        strobe.attention(q, q, q, **options)
    with pytest.raises(strobe.InvalidArgument, match="at most max_seqlen_q = 3"):
        strobe.attention_backward(q, q, q, q, out, lse, **options)


def test_no_option_is_taken_for_one_that_it_equals(rng: np.random.Generator) -> None:
    q = rng.standard_normal((1, 5, 2, 8)).astype(np.float32)
    strobe.attention(q, q, q, window=(3, -1))
    with pytest.raises(strobe.InvalidArgument, match=r"window\[0\] = 3.0, expected an integer"):
        strobe.attention(q, q, q, window=(3.0, -1))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["causal", "batch_invariant", "deterministic"])
def test_options_of_several_values(name: str, rng: np.random.Generator) -> None:
    q = rng.standard_normal((1, 5, 2, 8)).astype(np.float32)
    out, lse = strobe.attention(q, q, q, return_lse=True)
    options: Any = {name: np.array([True, False])}
    with pytest.raises(strobe.InvalidArgument, match=f"{name} = .*, expected a bool"):
        strobe.attention_backward(q, q, q, q, out, lse, **options)


def test_default_scale_is_one_over_root_head_dim(rng: np.random.Generator) -> None:
    inputs = Case(head_dim=25, head_dim_v=25).make(rng)
    assert np.array_equal(
        strobe.attention(inputs.q, inputs.k, inputs.v),
        strobe.attention(inputs.q, inputs.k, inputs.v, scale=0.2),
    )


def test_repeats_bitwise(rng: np.random.Generator) -> None:
    inputs = Case(batch=1, seqlen_q=700, seqlen_k=700).make(rng)
    out, lse = strobe.attention(inputs.q, inputs.k, inputs.v, return_lse=True, threads=2)
    first = strobe.attention_backward(
        inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, threads=2
    )
    for _ in range(5):
        again = strobe.attention(inputs.q, inputs.k, inputs.v, threads=2)
        assert np.array_equal(out, again)
        grads = strobe.attention_backward(
            inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, threads=2
        )
        assert all(np.array_equal(a, b) for a, b in zip(first, grads, strict=True))


def test_deterministic_over_thread_counts(rng: np.random.Generator) -> None:
    inputs = Case(batch=1, seqlen_q=700, seqlen_k=900, options={"causal": True}).make(rng)
    out, lse = strobe.attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True)
    runs = [
        strobe.attention_backward(
            inputs.dout,
            inputs.q,
            inputs.k,
            inputs.v,
            out,
            lse,
            causal=True,
            deterministic=True,
            threads=threads,
        )
        for threads in (1, 2, 3, 5)
    ]
    for run in runs[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_no_queries_and_no_keys() -> None:
    q = np.zeros((2, 0, 4, 8), np.float32)
    k = np.ones((2, 5, 2, 8), np.float32)
    out, lse = strobe.attention(q, k, k, return_lse=True)
    assert out.shape == (2, 0, 4, 8)
    assert lse.shape == (2, 4, 0)
    dq, dk, dv = strobe.attention_backward(out, q, k, k, out, lse)
    assert dq.shape == q.shape
    assert not dk.any()
    assert not dv.any()

    q = np.ones((2, 5, 4, 8), np.float32)
    k = np.zeros((2, 0, 2, 8), np.float32)
    out, lse = strobe.attention(q, k, k, return_lse=True, out=cases.poisoned(q.shape, np.float32))
    assert not out.any()
    assert np.all(lse == -np.inf)
    dq, dk, dv = strobe.attention_backward(q, q, k, k, out, lse)
    assert not dq.any()
    assert dk.shape == dv.shape == k.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing(dtype: str, rng: np.random.Generator) -> None:
    inputs = Case(seqlen_q=40, seqlen_k=8, dtype=dtype, options={"causal": True}).make(rng)
    out, lse = strobe.attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True)
    assert not out[:, :32].any()
    assert np.all(lse[:, :, :32] == -np.inf)
    assert np.all(np.isfinite(lse[:, :, 32:]))
    dq, _, _ = strobe.attention_backward(
        inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, causal=True
    )
    assert not dq[:, :32].any()
    inputs.check()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_stay_where_they_belong(
    where: str, value: float, dtype: str, rng: np.random.Generator
) -> None:
    inputs = Case(seqlen_q=70, seqlen_k=70, dtype=dtype, options={"causal": True}).make(rng)
    getattr(inputs, where)[1, 41, 1, 3] = value
    out, lse = strobe.attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True)
    inputs.check_forward(out, lse)
    assert np.isfinite(out[0].astype(np.float32)).all()
    assert np.isfinite(out[1, :41].astype(np.float32)).all()


@pytest.mark.parametrize("scale", [3.0, 10.0])
def test_large_scores(scale: float, rng: np.random.Generator) -> None:
    Case(options={"scale": scale}).make(rng).check()  # scores up to 130 and 430


@pytest.mark.parametrize("scale", [1e3, 1e5, -1e5])
def test_huge_scores(scale: float, rng: np.random.Generator) -> None:
    # Scores up to 4e4 and 4e6. Forward only: there the steps of a float32 lse are 0.004 and 0.5, so
    # that no backward that starts from it can do as well as one that kept the weights.
    inputs = Case(options={"scale": scale}).make(rng)
    out, lse = strobe.attention(inputs.q, inputs.k, inputs.v, scale=scale, return_lse=True)
    inputs.check_forward(out, lse)
    grads = strobe.attention_backward(
        inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, scale=scale
    )
    assert all(np.isfinite(g).all() for g in grads)


def test_dropout_mask_is_what_forward_uses() -> None:
    # With equal scores and v the identity, out shows each weight: 1 / seqlen_k / (1 - p) where it
    # is kept.
    n = 96
    q = np.zeros((2, 50, 3, 8), np.float32)
    k = np.ones((2, n, 3, 8), np.float32)
    v = np.broadcast_to(np.eye(n, dtype=np.float32)[None, :, None, :], (2, n, 3, n))
    options: dict[str, Any] = {"dropout_p": 0.3, "dropout_seed": 99, "dropout_offset": 4}
    keep = strobe.dropout_mask(2, 3, 50, n, **options)
    for threads in (1, 2):
        out = strobe.attention(q, k, v, threads=threads, **options)
        np.testing.assert_allclose(
            out, np.moveaxis(keep, 1, 2) / (n * 0.7), rtol=1e-5, atol=0, strict=False
        )


def test_dropout_mask_statistics() -> None:
    for p in (0.0, 0.1, 0.5, 0.9):
        keep = strobe.dropout_mask(2, 3, 60, 100, dropout_p=p, dropout_seed=5)
        assert keep.dtype == np.bool_
        assert keep.shape == (2, 3, 60, 100)
        # 36,000 draws: five standard deviations.
        assert abs(keep.mean() - (1 - p)) <= 5 * np.sqrt(p * (1 - p) / keep.size)
        for axis in range(4):  # no two slices alike
            if 0 < p:
                flat = np.moveaxis(keep, axis, 0).reshape(keep.shape[axis], -1)
                assert len(np.unique(flat, axis=0)) == keep.shape[axis]
    seeds = [(0, 0), (1, 0), (0, 1), (2**32, 0), (0, 2**32), (2**64 - 1, 2**64 - 1)]
    masks = [
        strobe.dropout_mask(1, 1, 64, 64, dropout_p=0.5, dropout_seed=s, dropout_offset=o)
        for s, o in seeds
    ]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert 0.4 < (a == b).mean() < 0.6


def test_dropout_mask_does_not_depend_on_the_shape() -> None:
    small = strobe.dropout_mask(1, 2, 10, 20, dropout_p=0.4, dropout_seed=3)
    large = strobe.dropout_mask(1, 2, 30, 50, dropout_p=0.4, dropout_seed=3)
    assert np.array_equal(small, large[:, :, :10, :20])


def test_varlen_max_lengths_may_be_bounds(rng: np.random.Generator) -> None:
    inputs = Case(batch=3, cu_q=[0, 9, 20, 33], cu_k=[0, 4, 30, 51]).make(rng)
    found, lse = strobe.attention(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.options)
    given, lse2 = strobe.attention(
        inputs.q,
        inputs.k,
        inputs.v,
        max_seqlen_q=100,
        max_seqlen_k=200,
        return_lse=True,
        **inputs.options,
    )
    inputs.check_forward(found, lse)
    inputs.check_forward(given, lse2)


def test_finite_differences(rng: np.random.Generator) -> None:
    # The oracle's own derivative, so that the tests above stand on something.
    inputs = Case(
        batch=1,
        seqlen_q=5,
        seqlen_k=7,
        heads=2,
        heads_kv=1,
        head_dim=4,
        head_dim_v=3,
        alibi=1,
        with_dlse=True,
        options={
            "softcap": 2.0,
            "window": (3, 2),
            "dropout_p": 0.3,
            "dropout_seed": 1,
            "scale": 0.7,
        },
    ).make(rng)
    wanted = inputs.reference()
    assert wanted.dq is not None
    step = 1e-5
    for name, gradient in (("q", wanted.dq), ("k", wanted.dk), ("v", wanted.dv)):
        assert gradient is not None
        x = getattr(inputs, name).astype(np.float64)
        setattr(inputs, name, x)
        for index in np.ndindex(x.shape):
            losses = []
            for sign in (1, -1):
                saved = x[index]
                x[index] = saved + sign * step
                result = inputs.reference(backward=False)
                losses.append(
                    (result.out * inputs.dout).sum()
                    + (np.where(np.isfinite(result.lse), result.lse, 0) * inputs.dlse).sum()
                )
                x[index] = saved
            assert abs((losses[0] - losses[1]) / (2 * step) - gradient[index]) < 1e-6


def test_oracle_rejects_wrong_results(rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    out, lse = strobe.attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    wrong = out.copy()
    wrong[1, 2, 3, 4] += 1e-3
    with pytest.raises(AssertionError, match=r"out\[1, 2, 3, 4\]"):
        inputs.check_forward(wrong, lse)
    wrong[1, 2, 3, 4] = np.nan
    with pytest.raises(AssertionError, match=r"out\[1, 2, 3, 4\] = nan"):
        inputs.check_forward(wrong, lse)
    assert oracle.visible(2, 3, causal=True).tolist() == [[True, True, False], [True] * 3]


def test_rows_past_the_end_of_the_last_sequence() -> None:
    """Nobody's: whatever they hold, out and gradients are 0 there, and lse -inf."""
    draw = np.random.default_rng(0).standard_normal
    q, k, v, dout = (draw((9, 2, 16)).astype(np.float32) for _ in range(4))
    ends = {"cu_seqlens_q": [0, 2, 6], "cu_seqlens_k": [0, 4, 7]}
    packed: dict[str, Any] = {name: np.array(x, np.int32) for name, x in ends.items()}
    packed |= {"max_seqlen_q": 4, "max_seqlen_k": 4}
    for array, rows in ((q, 6), (k, 7), (v, 7), (dout, 6)):
        array[rows:] = np.nan
    out, lse = strobe.attention(q, k, v, **packed, return_lse=True)
    wanted, wanted_lse = strobe.attention(q[:6], k[:7], v[:7], **packed, return_lse=True)
    assert np.array_equal(out[:6], wanted)
    assert not out[6:].any()
    assert np.array_equal(lse[:, :6], wanted_lse)
    assert (lse[:, 6:] == -np.inf).all()
    found = strobe.attention_backward(dout, q, k, v, out, lse, **packed)
    arrays = (dout[:6], q[:6], k[:7], v[:7], wanted, wanted_lse)
    right = strobe.attention_backward(*arrays, **packed)
    for x, y in zip(found, right, strict=True):
        assert np.array_equal(x[: y.shape[0]], y)
        assert not x[y.shape[0] :].any()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("queries", [1, 40])
def test_means_of_large_values(queries: int, batch_invariant: bool) -> None:
    """Sums over the first keys pass float32's largest number, and their weights turn out to be
    nothing: the mean is finite, however many queries there are.
    """
    k, v = np.zeros((1, 400, 1, 16), np.float32), np.full((1, 400, 1, 16), 3e38, np.float32)
    k[0, -1], v[0, -1] = 5, 1
    q = np.ones((1, queries, 1, 16), np.float32)
    out = strobe.attention(q, k, v, scale=1, batch_invariant=batch_invariant)
    weights = np.exp(np.float64(80) * (np.arange(400) == 399) - 80)
    mean = (weights * v[0, :, 0, 0]).sum() / weights.sum()
    np.testing.assert_allclose(out, np.full_like(out, mean), rtol=1e-4)
