"""Properties that exact attention has for all inputs, drawn by hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

import strobe

import cases
import oracle
from cases import DTYPES, Array

lengths = st.integers(1, 140)
head_dims = st.sampled_from([1, 5, 8, 16, 31, 32, 64, 100])
groups = st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (6, 3)])
dtypes = st.sampled_from(sorted(DTYPES))
seeds = st.integers(0, 2**32 - 1)
windows = st.tuples(st.integers(-1, 60), st.integers(-1, 60))
threads = st.sampled_from([1, 2, 3])

# One rounding of each dtype, relative.
EPS = {"float32": 6e-8, "bfloat16": 2**-8, "float16": 2**-11}


class Draw:
    """Random tensors of drawn shapes."""

    def __init__(
        self,
        seed: int,
        seqlen_q: int,
        seqlen_k: int,
        heads: tuple[int, int],
        head_dim: int,
        dtype: str = "float32",
        batch: int = 2,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        kind = DTYPES[dtype]
        self.q = cases.normal(self.rng, (batch, seqlen_q, heads[0], head_dim), kind)
        self.k = cases.normal(self.rng, (batch, seqlen_k, heads[1], head_dim), kind)
        self.v = cases.normal(self.rng, (batch, seqlen_k, heads[1], head_dim), kind)
        self.dout = cases.normal(self.rng, self.q.shape, kind)

    def all(self, **options: Any) -> list[Array]:
        """out, lse, dq, dk, dv."""
        out, lse = strobe.attention(self.q, self.k, self.v, return_lse=True, **options)
        options.pop("out", None)
        return [
            out,
            lse,
            *strobe.attention_backward(self.dout, self.q, self.k, self.v, out, lse, **options),
        ]


def close(got: Array, wanted: Array, dtype: str, roundings: float = 8) -> None:
    """Equal but for a few roundings of values as large as the largest in the array."""
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    size = float(np.abs(b).max(initial=0, where=np.isfinite(b)))
    allowed = roundings * EPS[dtype] * max(size, 1) + 1e-5
    oracle.check_within("result", a, b, np.full(b.shape, allowed))


@given(seeds, lengths, lengths, groups, head_dims, dtypes, threads)
def test_permuting_keys_changes_nothing(
    seed: int, sq: int, sk: int, heads: tuple[int, int], d: int, dtype: str, n: int
) -> None:
    x = Draw(seed, sq, sk, heads, d, dtype)
    out, lse, dq, dk, dv = x.all(threads=n)
    order = x.rng.permutation(sk)
    x.k, x.v = np.ascontiguousarray(x.k[:, order]), np.ascontiguousarray(x.v[:, order])
    out2, lse2, dq2, dk2, dv2 = x.all(threads=n)
    close(out2, out, dtype)
    close(lse2, lse, "float32", 64)
    close(dq2, dq, dtype)
    close(dk2, dk[:, order], dtype)
    close(dv2, dv[:, order], dtype)


@given(seeds, lengths, st.integers(2, 200), groups, head_dims, st.booleans(), threads)
def test_two_halves_merge_by_lse(
    seed: int, sq: int, sk: int, heads: tuple[int, int], d: int, causal: bool, n: int
) -> None:
    x = Draw(seed, sq, sk, heads, d)
    cut = int(x.rng.integers(1, sk))
    whole, lse = strobe.attention(x.q, x.k, x.v, causal=causal, return_lse=True, threads=n)
    # With a causal mask the first part sees keys up to i + sk - sq as well: a window on the right
    # puts it there.
    first: dict[str, Any] = {"window": (-1, sk - cut)} if causal else {}
    a, lse_a = strobe.attention(
        x.q, x.k[:, :cut], x.v[:, :cut], return_lse=True, threads=n, **first
    )
    b, lse_b = strobe.attention(
        x.q, x.k[:, cut:], x.v[:, cut:], causal=causal, return_lse=True, threads=n
    )
    merged_lse = np.logaddexp(lse_a.astype(np.float64), lse_b.astype(np.float64))
    with np.errstate(invalid="ignore"):
        weight_a, weight_b = (
            np.nan_to_num(np.exp(part - merged_lse), nan=0.0).swapaxes(1, 2)[..., None]
            for part in (lse_a, lse_b)
        )
    close(a * weight_a + b * weight_b, whole, "float32", 64)
    close(merged_lse, lse, "float32", 64)


@given(seeds, lengths, lengths, groups, head_dims, dtypes, st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_scaling_q_is_undone_by_scale(
    seed: int, sq: int, sk: int, heads: tuple[int, int], d: int, dtype: str, c: float
) -> None:
    # c is a power of 2: every product is the same but for its exponent, so results agree closely in
    # all dtypes.
    x = Draw(seed, sq, sk, heads, d, dtype)
    scale = 1 / np.sqrt(d)
    out, lse, dq, dk, dv = x.all(scale=scale)
    x.q = (x.q.astype(np.float32) * c).astype(x.q.dtype)
    out2, lse2, dq2, dk2, dv2 = x.all(scale=scale / c)
    close(out2, out, dtype, 4)
    close(lse2, lse, "float32", 64)
    close(dq2.astype(np.float32) * c, dq, dtype, 4)
    close(dk2, dk, dtype, 4)
    close(dv2, dv, dtype, 4)


@given(seeds, lengths, lengths, groups, head_dims, dtypes, st.booleans(), threads)
def test_doubling_the_batch_repeats_results_bitwise(
    seed: int, sq: int, sk: int, heads: tuple[int, int], d: int, dtype: str, causal: bool, n: int
) -> None:
    x = Draw(seed, sq, sk, heads, d, dtype, batch=1)
    once = x.all(causal=causal, threads=n)
    for name in ("q", "k", "v", "dout"):
        setattr(x, name, np.concatenate([getattr(x, name)] * 2))
    twice = x.all(causal=causal, threads=n)
    for one, two in zip(once, twice, strict=True):
        assert np.array_equal(two[0], two[1])
        close(two[:1], one, dtype)
    # Forward, where no sum goes over work items, gives the very bits.
    assert np.array_equal(once[0], twice[0][:1])
    assert np.array_equal(once[1], twice[1][:1])


@given(seeds, lengths, lengths, groups, head_dims, windows, st.floats(-50, 50))
def test_translating_v_adds_a_constant(
    seed: int,
    sq: int,
    sk: int,
    heads: tuple[int, int],
    d: int,
    window: tuple[int, int],
    shift: float,
) -> None:
    x = Draw(seed, sq, sk, heads, d)
    out, lse = strobe.attention(x.q, x.k, x.v, window=window, return_lse=True)
    moved = strobe.attention(x.q, x.k, x.v + np.float32(shift), window=window)
    sees = (lse > -np.inf).swapaxes(1, 2)[..., None]
    close(moved, out + np.where(sees, np.float32(shift), 0), "float32", 32)


@given(seeds, lengths, lengths, groups, head_dims, dtypes, st.data())
def test_a_causal_row_ignores_later_keys(
    seed: int, sq: int, sk: int, heads: tuple[int, int], d: int, dtype: str, data: st.DataObject
) -> None:
    x = Draw(seed, sq, sk, heads, d, dtype)
    out, lse = strobe.attention(x.q, x.k, x.v, causal=True, return_lse=True)
    row = data.draw(st.integers(0, sq - 1))
    later = max(0, row + sk - sq + 1)
    for array in (x.k, x.v):
        array[:, later:] = data.draw(st.sampled_from([np.nan, np.inf, -300.0]))
    out2, lse2 = strobe.attention(x.q, x.k, x.v, causal=True, return_lse=True)
    assert np.array_equal(out2[:, : row + 1], out[:, : row + 1])
    assert np.array_equal(lse2[:, :, : row + 1], lse[:, :, : row + 1])


@given(seeds, lengths, lengths, groups, head_dims, dtypes, st.booleans())
def test_groups_equal_repeated_keys(
    seed: int, sq: int, sk: int, heads: tuple[int, int], d: int, dtype: str, causal: bool
) -> None:
    x = Draw(seed, sq, sk, heads, d, dtype)
    out, lse, dq, dk, dv = x.all(causal=causal)
    group = heads[0] // heads[1]
    x.k, x.v = np.repeat(x.k, group, axis=2), np.repeat(x.v, group, axis=2)
    out2, lse2, dq2, dk2, dv2 = x.all(causal=causal)
    assert np.array_equal(out, out2)
    assert np.array_equal(lse, lse2)
    close(dq, dq2, dtype)
    for grouped, repeated in ((dk, dk2), (dv, dv2)):
        parts = repeated.reshape(*grouped.shape[:3], group, d).astype(np.float64)
        # Each part was rounded once on its own.
        close(grouped, parts.sum(3), dtype, 8 * group)


@given(
    seeds,
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=5),
    groups,
    head_dims,
    dtypes,
    windows,
    st.booleans(),
    threads,
)
def test_varlen_equals_calls_for_each_sequence(
    seed: int,
    sizes: list[tuple[int, int]],
    heads: tuple[int, int],
    d: int,
    dtype: str,
    window: tuple[int, int],
    causal: bool,
    n: int,
) -> None:
    cu_q = np.cumsum([0, *(a for a, _ in sizes)], dtype=np.int32)
    cu_k = np.cumsum([0, *(b for _, b in sizes)], dtype=np.int32)
    x = Draw(seed, int(cu_q[-1]), int(cu_k[-1]), heads, d, dtype, batch=1)
    options: dict[str, Any] = {"window": window, "causal": causal, "threads": n}
    q, k, v, dout = x.q[0], x.k[0], x.v[0], x.dout[0]
    cu: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    out, lse = strobe.attention(q, k, v, return_lse=True, **cu, **options)
    grads = strobe.attention_backward(dout, q, k, v, out, lse, **cu, **options)
    for b in range(len(sizes)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        q2, k2, v2 = q[None, rows], k[None, keys], v[None, keys]
        out2, lse2 = strobe.attention(q2, k2, v2, return_lse=True, **options)
        grads2 = strobe.attention_backward(dout[None, rows], q2, k2, v2, out2, lse2, **options)
        close(out[rows], out2[0], dtype)
        close(lse[:, rows], lse2[0], "float32", 64)
        for got, wanted, place in zip(grads, grads2, (rows, keys, keys), strict=True):
            close(got[place], wanted[0], dtype)


@given(seeds, lengths, lengths, groups, head_dims, dtypes, st.data())
def test_windows_that_do_not_bind(
    seed: int, sq: int, sk: int, heads: tuple[int, int], d: int, dtype: str, data: st.DataObject
) -> None:
    x = Draw(seed, sq, sk, heads, d, dtype)
    wide: list[dict[str, Any]] = [
        {"window": w} for w in ((-1, -1), (sq + sk, -1), (-1, sq + sk), (2**62, 2**62))
    ]
    causal: list[dict[str, Any]] = [
        {"window": w, "causal": True} for w in ((-1, 0), (-1, 7), (sq + sk, 0))
    ]
    plain: dict[str, Any] = {}
    plain, same = data.draw(
        st.sampled_from(
            [(plain, o) for o in wide]
            + [({"causal": True}, o) for o in [*causal, {"window": (-1, 0)}]]
        )
    )
    for got, want in zip(x.all(**same), x.all(**plain), strict=True):
        close(got, want, dtype, 4)


@given(seeds, lengths, lengths, groups, head_dims, windows, st.floats(0, 0.9))
def test_outputs_are_means_of_values(
    seed: int, sq: int, sk: int, heads: tuple[int, int], d: int, window: tuple[int, int], p: float
) -> None:
    x = Draw(seed, sq, sk, heads, d)
    group = heads[0] // heads[1]
    out = strobe.attention(x.q, x.k, x.v, window=window, softcap=2.0)
    v = np.repeat(x.v, group, axis=2)
    low, high = v.min(1, keepdims=True), v.max(1, keepdims=True)
    seen = oracle.visible(sq, sk, window=window).any(1)
    assert np.all(out[:, seen] >= low - 1e-5)
    assert np.all(out[:, seen] <= high + 1e-5)
    assert not out[:, ~seen].any()
    # Gradients of a constant are zero: moving every key by the same vector moves no weight.
    shifted = x.k + x.rng.standard_normal((1, 1, 1, d)).astype(np.float32)
    assume(d > 1)
    moved = strobe.attention(x.q, shifted, x.v, window=window)
    close(moved, strobe.attention(x.q, x.k, x.v, window=window), "float32", 512)


@given(seeds, lengths, lengths, groups, st.floats(0.01, 0.95), threads, threads)
def test_dropout_is_the_same_for_every_thread_count(
    seed: int, sq: int, sk: int, heads: tuple[int, int], p: float, a: int, b: int
) -> None:
    x = Draw(seed, sq, sk, heads, 16)
    options: dict[str, Any] = {"dropout_p": p, "dropout_seed": seed, "deterministic": True}
    forward = {name: options[name] for name in ("dropout_p", "dropout_seed")}
    results = []
    for n in (a, b):
        out, lse = strobe.attention(x.q, x.k, x.v, return_lse=True, threads=n, **forward)
        grads = strobe.attention_backward(x.dout, x.q, x.k, x.v, out, lse, threads=n, **options)
        results.append([out, lse, *grads])
    for one, other in zip(*results, strict=True):
        close(one, other, "float32", 16)
