"""Float8 attention: q, k and v of float8 with scales, through `attention`, `attention_with_kvcache`
and FlashAttention-3's functions, against NumPy in float64 over what the codes stand for.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import strobe
from strobe import flash_attn_3

from cases import Array

BATCH, ROWS_Q, ROWS_K, HEADS, HEADS_KV, DIM = 2, 9, 37, 6, 2, 32
KINDS = ["numpy", "torch"]


def as_torch(array: Array) -> Any:
    """A tensor of the same bits."""
    if array.dtype.itemsize > 1 or array.dtype.kind in "iub":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, array.dtype.name))


def given(kind: str, *arrays: Any) -> Any:
    return arrays if kind == "numpy" else tuple(as_torch(x) for x in arrays)


def as_floats(x: Any) -> Array:
    array: Array = x.double().numpy() if isinstance(x, torch.Tensor) else x.astype(np.float64)
    return array


def bytes_of(codes: Any) -> Array:
    """The memory of codes."""
    array: Array = (
        codes.view(torch.uint8).numpy() if isinstance(codes, torch.Tensor) else codes.view(np.uint8)
    )
    return array


def plain(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """One sequence in float64: (rows, heads, dim)."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[2])
    if causal:
        i, j = np.indices(scores.shape[1:])
        scores = np.where(j <= i + k.shape[0] - q.shape[0], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out: Array = np.einsum("hij,jhd->ihd", weights, v)
    return out


class Drawn:
    """q, k and v of a batch in float8, their scales, and what they stand for."""

    def __init__(self, rng: np.random.Generator, kv: str = "float8_e4m3fn") -> None:
        self.floats = []
        for rows, heads in ((ROWS_Q, HEADS), (ROWS_K, HEADS_KV), (ROWS_K, HEADS_KV)):
            self.floats.append(rng.standard_normal((BATCH, rows, heads, DIM)).astype(np.float32))
        forms: tuple[Any, ...] = ("float8_e4m3fn", kv, kv)
        made = [
            strobe.quantize(x, form, scale="batch_head", heads_kv=HEADS_KV)
            for x, form in zip(self.floats, forms, strict=True)
        ]
        self.codes, self.scales = [x for x, _ in made], [x for _, x in made]
        self.values = [
            as_floats(x)
            * np.repeat(s.astype(np.float64), x.shape[2] // HEADS_KV, 1)[:, None, :, None]
            for x, s in zip(self.codes, self.scales, strict=True)
        ]

    def wanted(self, causal: bool = False) -> Array:
        q, k, v = self.values
        return np.stack([plain(q[b], k[b], v[b], causal) for b in range(BATCH)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv", ["float8_e4m3fn", "float8_e5m2"])
def test_attention(kind: str, kv: str, rng: np.random.Generator) -> None:
    x = Drawn(rng, kv)
    q, k, v = given(kind, *x.codes)
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), given(kind, *x.scales), strict=True))
    out, lse = strobe.attention(q, k, v, causal=True, return_lse=True, **scales)
    assert str(out.dtype).removeprefix("torch.") == "bfloat16"
    assert lse.shape == (BATCH, HEADS, ROWS_Q)
    np.testing.assert_allclose(as_floats(out), x.wanted(True), atol=0.02)
    for dtype, near in (("float32", 2e-6), ("float16", 2e-3)):
        own = (
            np.empty(out.shape, dtype)
            if kind == "numpy"
            else torch.empty(out.shape, dtype=getattr(torch, dtype))
        )
        assert strobe.attention(q, k, v, causal=True, out=own, **scales) is own
        np.testing.assert_allclose(as_floats(own), x.wanted(True), atol=near)
    # One scale for all, by strides of 0; and none, which is 1.
    one = np.broadcast_to(np.float32(0.5), (BATCH, HEADS_KV))
    shared = given(kind, one)[0] if kind == "numpy" else torch.tensor(0.5).expand(BATCH, HEADS_KV)
    plain_scales = {"q_scale": shared, "k_scale": shared, "v_scale": shared}
    own = np.empty(out.shape, np.float32)
    halves = strobe.attention(*x.codes, out=own.copy(), q_scale=one, k_scale=one, v_scale=one)
    again = strobe.attention(q, k, v, **plain_scales)
    np.testing.assert_allclose(as_floats(again), halves, rtol=0.01, atol=1e-3)
    units = strobe.attention(*x.codes, out=own, scale=DIM**-0.5 / 4)
    np.testing.assert_allclose(halves, units / 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_packed(kind: str, rng: np.random.Generator) -> None:
    x = Drawn(rng)
    used_q, used_k = (4, ROWS_Q), (ROWS_K, 11)
    packed = [
        np.concatenate([each[b, :n] for b, n in enumerate(rows)])
        for each, rows in zip(x.codes, (used_q, used_k, used_k), strict=True)
    ]
    starts = [np.cumsum([0, *rows]).astype(np.int32) for rows in (used_q, used_k)]
    q, k, v, *offsets = given(kind, *packed, *starts)
    options = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True))
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), given(kind, *x.scales), strict=True))
    out = as_floats(strobe.attention(q, k, v, **options, **scales))
    for b in range(BATCH):
        rows = slice(starts[0][b], starts[0][b + 1])
        parts = [t[b, :n] for t, n in zip(x.values, (used_q[b], used_k[b], used_k[b]), strict=True)]
        np.testing.assert_allclose(out[rows], plain(*parts), atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_cache_with_pages(kind: str, rng: np.random.Generator) -> None:
    x = Drawn(rng, "float8_e5m2")
    size, pages = 8, 12
    table = np.array([[3, 7, 1, 0, 9], [2, 11, 4, 5, 6]], np.int32)
    used = np.array([ROWS_K, 20], np.int32)
    pools = []
    for codes in x.codes[1:]:
        pool = np.zeros((pages, size, HEADS_KV, DIM), codes.dtype)
        for b in range(BATCH):
            for n in range(ROWS_K):
                pool[table[b, n // size], n % size] = codes[b, n]
        pools.append(pool)
    q, k, v, block_table, seqused_k = given(kind, x.codes[0], *pools, table, used)
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), given(kind, *x.scales), strict=True))
    options = {"block_table": block_table, "seqused_k": seqused_k, **scales}
    out = as_floats(strobe.attention_with_kvcache(q, k, v, out_dtype="float32", **options))
    for b in range(BATCH):
        parts = [x.values[0][b], *(t[b, : used[b]] for t in x.values[1:])]
        np.testing.assert_allclose(out[b], plain(*parts), atol=2e-6)
    if kind == "torch":
        same = flash_attn_3.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=seqused_k, page_table=block_table,
            q_descale=scales["q_scale"], k_descale=scales["k_scale"], v_descale=scales["v_scale"],
        )  # fmt: skip
        assert torch.equal(same, strobe.attention_with_kvcache(q, k, v, **options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [0, 1, 4])  # of a page; 0: none
def test_append(kind: str, kv: str, packed: bool, size: int, rng: np.random.Generator) -> None:
    """New codes lie in the cache bit by bit, nothing else of it changes, and queries see them."""
    x = Drawn(rng, kv)
    bits = [codes.view(np.uint8) for codes in x.codes]
    used = np.array([8, 15], np.int32)  # up to a page's end, and one row less
    added = (5, 2) if packed else (3, 3)
    columns = -(-ROWS_K // size) if size else 0
    table = rng.permutation(BATCH * columns).astype(np.int32).reshape(BATCH, columns)
    caches, wanted, new = [], [], []
    for codes in bits[1:]:
        rows = [codes[b, used[b] : used[b] + n] for b, n in enumerate(added)]
        whole = np.full((BATCH, columns * size or ROWS_K, *codes.shape[2:]), 0x7F, np.uint8)
        for b in range(BATCH):
            whole[b, : used[b]] = codes[b, : used[b]]
        caches.append(whole)
        after = whole.copy()
        for b, row in enumerate(rows):
            after[b, used[b] : used[b] + len(row)] = row
        wanted.append(after)
        new.append((np.concatenate if packed else np.stack)(rows))

    def in_pages(whole: Array) -> Array:
        if not size:
            return whole.copy()
        pool = np.empty((BATCH * columns, size, *whole.shape[2:]), np.uint8)
        pool[table.ravel()] = whole.reshape(pool.shape)
        return pool

    dtype = x.codes[1].dtype
    pools, fresh = [[y.view(dtype) for y in z] for z in (map(in_pages, caches), new)]
    q, k, v, k_new, v_new, *numbers = given(
        kind, x.codes[0], *pools, *fresh, used, table, np.cumsum([0, *added]).astype(np.int32)
    )
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), given(kind, *x.scales), strict=True))
    options: dict[str, Any] = {"seqused_k": numbers[0], **scales}
    if size:
        options["block_table"] = numbers[1]
    if packed:
        options["cu_seqlens_k_new"] = numbers[2]
    before = [bytes_of(y).copy() for y in (k, v)]
    appends = {"k_new": k_new, "v_new": v_new, "causal": True, "out_dtype": "float32"}
    out = as_floats(strobe.attention_with_kvcache(q, k, v, **options, **appends))
    for cache, after in zip((k, v), wanted, strict=True):
        assert np.array_equal(bytes_of(cache), in_pages(after))
    for b in range(BATCH):
        keys, values = (t[b, : used[b] + added[b]] for t in x.values[1:])
        np.testing.assert_allclose(out[b], plain(x.values[0][b], keys, values, True), atol=2e-6)
    if kind == "torch":
        for cache, old in zip((k, v), before, strict=True):
            bytes_of(cache)[:] = old
        same = flash_attn_3.flash_attn_with_kvcache(
            q, k, v, k_new, v_new, cache_seqlens=numbers[0], page_table=options.get("block_table"),
            cu_seqlens_k_new=options.get("cu_seqlens_k_new"), causal=True,
            **{name.replace("scale", "descale"): s for name, s in scales.items()},
        )  # fmt: skip
        np.testing.assert_allclose(as_floats(same), out, rtol=0.01, atol=1e-3)
        assert np.array_equal(bytes_of(k), in_pages(wanted[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_append_with_shared_scales(kind: str, rng: np.random.Generator) -> None:
    """An append reads the scales, which may be one number, with strides of 0."""
    x = Drawn(rng)
    one = np.array([[0.5]], np.float32)
    found = []
    for whole in (False, True):
        q, k, v, scale, used = given(kind, *x.codes, one, np.array([3, 4], np.int32))
        shape = (BATCH, HEADS_KV)
        if kind == "numpy":
            k, v, scale = k.copy(), v.copy(), np.broadcast_to(scale, shape)
        else:
            k, v, scale = k.clone(), v.clone(), scale.expand(shape)
        if whole:
            scale = scale.copy() if kind == "numpy" else scale.contiguous()
        new = {"k_new": x.codes[1][:, 9:11], "v_new": x.codes[2][:, 9:11]}
        new = dict(zip(new, given(kind, *new.values()), strict=True))
        out = strobe.attention_with_kvcache(
            q, k, v, seqused_k=used, q_scale=scale, k_scale=scale, v_scale=scale, **new
        )
        found.append(as_floats(out))
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv", ["float8_e4m3fn", "float8_e5m2"])
def test_parts_are_merged(kind: str, kv: str, rng: np.random.Generator) -> None:
    """The first keys and the others, each with its lse, give what one call over all gives."""
    x = Drawn(rng, kv)
    q, k, v, *scales = given(kind, *x.codes, *x.scales)
    every = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    used = given(kind, np.array([ROWS_K, 20], np.int32))[0]
    first = given(kind, np.array([12, 12], np.int32))[0]

    def attend(begin: int, end: int, seqused_k: Any) -> Any:
        return strobe.attention_with_kvcache(
            *(q, k[:, begin:end], v[:, begin:end]), seqused_k=seqused_k, out_dtype="float32",
            return_lse=True, **every,
        )  # fmt: skip

    parts = attend(0, 12, first), attend(12, ROWS_K, used - first)
    outs, lses = zip(*parts, strict=True)
    wanted = attend(0, ROWS_K, used)
    for got, whole in zip(strobe.merge(outs, lses), wanted, strict=True):
        np.testing.assert_allclose(as_floats(got), as_floats(whole), atol=3e-6)
    np.testing.assert_allclose(as_floats(wanted[0])[0], x.wanted()[0], atol=2e-6)


def test_what_is_not_appended(rng: np.random.Generator) -> None:
    x = Drawn(rng)
    q, k, v = x.codes
    k_new, v_new = k[:, :1].copy(), v[:, :1].copy()
    new = {"k_new": k_new, "v_new": v_new, "seqused_k": np.array([3, 4], np.int32)}
    floats, e5m2 = np.ones((BATCH, 1, HEADS_KV, DIM), np.float32), ml_dtypes.float8_e5m2
    angles = np.ones((ROWS_K, 4), ml_dtypes.float8_e4m3fn)
    rows = np.ones((BATCH, ROWS_K, HEADS_KV), np.float32)
    kept = k.copy()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (strobe.InvalidArgument, {"k_new": floats},
         r"k_new\.dtype = float32, expected float8_e4m3fn \(that of k\)"),
        (strobe.InvalidArgument, {"v_new": floats.astype(e5m2)},
         r"v_new\.dtype = float8_e5m2, expected float8_e4m3fn \(that of k\)"),
        (strobe.Unsupported, {"rotary_cos": angles, "rotary_sin": angles},
         r"rotary_cos is given with q\.dtype = float8_e4m3fn, expected None: codes that are"),
        (strobe.InvalidArgument, {"k_scale": rows, "v_scale": rows},
         r"k_scale\.ndim = 3, expected 2: \(batch, heads_kv\)"),
        (strobe.InvalidArgument, {"seqused_k": np.array([3, ROWS_K], np.int32)},
         r"seqused_k\[1\] = 37, expected 0 to 36"),
    ]  # fmt: skip
    for kind, change, words in cases:
        with pytest.raises(kind, match="^" + words):
            strobe.attention_with_kvcache(q, k, v, **{**new, **change})
    assert np.array_equal(k.view(np.uint8), kept.view(np.uint8))
    # Floats for a cache of codes with queries of floats are quantised, and codes are refused.
    cache = {"k": k, "v": v, "k_scale": rows, "v_scale": rows}
    with pytest.raises(strobe.InvalidArgument, match=r"^k_new\.dtype = float8_e4m3fn, expected"):
        strobe.attention_with_kvcache(x.floats[0], **cache, **new)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_sequences_share(kind: str, rng: np.random.Generator) -> None:
    """Of shape (1, heads_kv): the same as written out for each sequence, wherever there are any."""
    x = Drawn(rng)
    shared = [s[:1] for s in x.scales]
    names = ("q_scale", "k_scale", "v_scale")
    starts = [np.array([0, n, 2 * n], np.int32) for n in (ROWS_Q, ROWS_K)]
    flat = [t.reshape(-1, *t.shape[2:]) for t in x.codes]

    dense: Any = strobe.attention
    cached: Any = strobe.attention_with_kvcache

    def results(scales: Any, compiled: bool = False) -> list[Any]:
        q, k, v, *more = given(kind, *x.codes, *flat, *starts, *scales)
        every = dict(zip(names, more[5:], strict=True))
        lengths = {"cu_seqlens_q": more[3], "cu_seqlens_k": more[4]}
        own = (k.copy(), v.copy()) if kind == "numpy" else (k.clone(), v.clone())
        used, new = given(kind, np.array([3, 4], np.int32), x.codes[1][:, 9:11])
        found = [
            dense(q, k, v, **every),
            dense(*more[:3], **lengths, **every),
            cached(q, k, v, **every),
            cached(q, *own, seqused_k=used, k_new=new, v_new=new, **every),
        ]
        if kind == "torch":
            theirs = dict(zip(("q_descale", "k_descale", "v_descale"), more[5:], strict=True))
            for function in (flash_attn_3.flash_attn_func, flash_attn_3.flash_attn_with_kvcache):
                call: Any = function
                if compiled:
                    call = torch.compile(function, fullgraph=True, backend="aot_eager")
                found.append(call(q, k, v, **theirs))
        return [as_floats(y) for y in found]

    written_out = [np.repeat(s, BATCH, 0) for s in shared]
    every = [shared, [shared[0], *written_out[1:]], [written_out[0], *shared[1:]]]
    wanted = results(written_out)
    for n, scales in enumerate(every):
        for got, expected in zip(results(scales, n == 0), wanted, strict=True):
            assert np.array_equal(got, expected)
    # One number for all heads and sequences, and of one head; and what strobe.quantize takes.
    one = np.full((1, 1), 0.5, np.float32)
    q, k, v = (t[:, :, :1].copy() for t in x.codes)
    of_one = strobe.attention(q, k, v, q_scale=one, k_scale=one, v_scale=one)
    whole = np.full((BATCH, 1), 0.5, np.float32)
    assert np.array_equal(
        as_floats(of_one),
        as_floats(strobe.attention(q, k, v, q_scale=whole, k_scale=whole, v_scale=whole)),
    )
    (floats,) = given(kind, x.floats[1])
    for shapes in (
        (shared[1], written_out[1]),
        (shared[1][:, :1], np.repeat(shared[1][:, :1], 2, 0)),
    ):
        heads_kv = shapes[0].shape[1]
        a, b = (
            strobe.quantize(floats, "float8_e4m3fn", scale=s, heads_kv=heads_kv)[0]
            for s in given(kind, *shapes)
        )
        assert np.array_equal(bytes_of(a), bytes_of(b))
        a, b = (strobe.dequantize(a, s) for s in given(kind, *shapes))
        assert np.array_equal(as_floats(a), as_floats(b))
    for bad, words in (
        (np.ones((3, HEADS_KV), np.float32), r"q_scale\.shape\[0\] = 3, expected 2 or 1 \(batch"),
        (np.ones((1, 3), np.float32), r"q_scale\.shape\[1\] = 3, expected 2 \(heads_kv"),
    ):
        with pytest.raises(strobe.InvalidArgument, match="^" + words):
            strobe.attention(*x.codes, q_scale=bad)
    words = r"^scale\.shape = \(1, 3\) with x\.shape = .*, expected \(1, 2\)"
    with pytest.raises(strobe.InvalidArgument, match=words):
        strobe.quantize(x.floats[1], scale=np.ones((1, 3), np.float32))


def test_flash_attn_3(rng: np.random.Generator) -> None:
    x = Drawn(rng)
    q, k, v = given("torch", *x.codes)
    q_descale, k_descale, v_descale = given("torch", *x.scales)
    every = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    out, lse = flash_attn_3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **every)
    assert out.dtype == torch.bfloat16
    assert lse.shape == (BATCH, HEADS, ROWS_Q)
    np.testing.assert_allclose(as_floats(out), x.wanted(True), atol=0.02)
    # A descale that is left out is 1.
    some = flash_attn_3.flash_attn_func(q, k, v, k_descale=k_descale)
    ones = torch.ones(BATCH, HEADS_KV)
    assert torch.equal(some, strobe.attention(q, k, v, k_scale=k_descale, v_scale=ones))
    starts = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (ROWS_Q, ROWS_K)]
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    varlen: Any = flash_attn_3.flash_attn_varlen_func
    packed = varlen(*flat, *starts, ROWS_Q, ROWS_K, causal=True, **every)
    assert torch.equal(packed, out.flatten(0, 1))
    assert "flash_attn_varlen_func" in strobe.why()
    with pytest.raises(strobe.InvalidArgument, match=r"^q_descale\.shape\[1\] = 3, expected 2"):
        flash_attn_3.flash_attn_func(q, k, v, q_descale=torch.ones(BATCH, 3))
    x = torch.ones(1, 2, 2, 8)
    with pytest.raises(
        strobe.InvalidArgument, match=r"^k_descale is given with q\.dtype = .*float32"
    ):
        flash_attn_3.flash_attn_func(x, x, x, k_descale=ones)
    angles = torch.ones(ROWS_K, 4)
    with pytest.raises(strobe.Unsupported, match=r"^rotary_cos is given .* quantised anew"):
        flash_attn_3.flash_attn_with_kvcache(
            q, k, v, k[:, :1], v[:, :1], rotary_cos=angles, rotary_sin=angles, cache_seqlens=3
        )


NO_GRADIENT = r"^the gradient of attention with q\.dtype = torch\.float8_e4m3fn: no kernel computes"


@pytest.mark.parametrize(
    # q, v, and v's descale alone
    ("which", "compiled"),
    [(0, False), (2, False), (5, False), (5, True)],
)
def test_the_backward_pass_is_refused(compiled: bool, which: int, rng: np.random.Generator) -> None:
    """As FlashAttention-3's own test has it: a forward pass of tensors that require a gradient."""
    x = Drawn(rng)
    tensors = given("torch", *x.codes, *x.scales)
    learned = [t.detach().requires_grad_(n == which) for n, t in enumerate(tensors)]
    starts = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (ROWS_Q, ROWS_K)]

    def dense(q: Any, k: Any, v: Any, *scales: Any) -> Any:
        every = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
        return flash_attn_3.flash_attn_func(
            q, k, v, causal=True, window_size=(5, -7), return_attn_probs=True, **every
        )

    def packed(q: Any, k: Any, v: Any, *scales: Any) -> Any:
        every = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
        varlen: Any = flash_attn_3.flash_attn_varlen_func
        flat = [t.flatten(0, 1) for t in (q, k, v)]
        return varlen(*flat, *starts, ROWS_Q, ROWS_K, softcap=2.0, **every), None

    for function in (dense, packed):
        call: Any = (
            torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
        )
        wanted = function(*tensors)
        for own in (tensors, learned):
            out, lse = call(*own)
            assert torch.equal(out, wanted[0])
            assert lse is None or torch.equal(lse, wanted[1])
            assert out.requires_grad == (own is learned)
        assert "float8" in strobe.why()
        with pytest.raises(strobe.Unsupported, match=NO_GRADIENT):
            out.float().sum().backward()
        with torch.no_grad():
            assert not call(*learned)[0].requires_grad
    # Of results over a cache there is no gradient to ask for, as with floats.
    q, k, v, q_descale, k_descale, v_descale = learned
    cached = flash_attn_3.flash_attn_with_kvcache(
        q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
    )
    assert not cached.requires_grad


def test_export_sees_the_operator(rng: np.random.Generator) -> None:
    x = Drawn(rng)
    q, k, v, q_descale, k_descale, v_descale = given("torch", *x.codes, *x.scales)

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return flash_attn_3.flash_attn_func(
                q, k, v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
            )

    program = torch.export.export(Layer(), (q, k, v), strict=False)
    assert "strobe.float8_attention" in str(program.graph)
    assert torch.equal(program.module()(q, k, v), Layer()(q, k, v))


@pytest.mark.parametrize("compiled", [False, True])
def test_operators_without_scales(compiled: bool, rng: np.random.Generator) -> None:
    """Functions that take no scales take float8 too, of which each scale is 1."""
    q, k, v = given("torch", *Drawn(rng).codes)
    wanted = strobe.attention(q, k, v, scale=0.001)
    learned = q.clone().requires_grad_()

    def attend(q: Any) -> Any:
        out = strobe.torch.attention(q, k, v, scale=0.001)
        return out, torch.zeros(1, dtype=out.dtype)  # as the compiler takes it for

    call: Any = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    for own in (q, learned):
        out, zeros = call(own)
        assert torch.equal(out, wanted)
        assert zeros.dtype == torch.bfloat16
    with pytest.raises(strobe.Unsupported, match=r"^q\.dtype = float8_e4m3fn: no kernel computes"):
        out.float().sum().backward()


def test_what_is_refused(rng: np.random.Generator) -> None:
    x = Drawn(rng)
    q, k, v = x.codes
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), x.scales, strict=True))
    floats = [np.ones((1, 2, 2, 8), np.float32)] * 3
    lse, dout = np.zeros((BATCH, HEADS, ROWS_Q), np.float32), np.zeros(q.shape, np.float32)
    cases: list[tuple[Any, Any, str]] = [
        (strobe.Unsupported, lambda: strobe.attention(q.astype(ml_dtypes.float8_e5m2), k, v),
         r"q\.dtype = float8_e5m2: no kernel takes such queries, expected"),
        (strobe.InvalidArgument, lambda: strobe.attention(q, k.astype(np.float32), v),
         r"k\.dtype = float32, expected float8_e4m3fn or float8_e5m2 \(q is float8\)"),
        (strobe.InvalidArgument, lambda: strobe.attention(q, k, v.astype(ml_dtypes.float8_e5m2)),
         r"v\.dtype = float8_e5m2, expected float8_e4m3fn \(that of k\)"),
        (strobe.InvalidArgument, lambda: strobe.attention(q, k, v, k_scale=scales["k_scale"]),
         r"v_scale = None, expected an array, as k_scale is given"),
        (strobe.InvalidArgument, lambda: strobe.attention(q, k, v, q_scale=np.ones(2, np.float32)),
         r"q_scale\.ndim = 1, expected 2: \(batch, heads_kv\)"),
        (strobe.InvalidArgument, lambda: strobe.attention(q, k, v, q_scale=np.ones((2, 2))),
         r"q_scale\.dtype = float64, expected float32"),
        (strobe.InvalidArgument, lambda: strobe.attention(*floats, q_scale=scales["q_scale"]),
         r"q_scale is given with q\.dtype = float32, expected None: it belongs to a float8 q"),
        (strobe.InvalidArgument, lambda: strobe.attention(*floats, v_scale=scales["v_scale"]),
         r"v_scale is given with q\.dtype = float32, expected None"),
        (strobe.InvalidArgument, lambda: strobe.attention(q, k, v, out=np.empty(q.shape, np.int32)),
         r"out\.dtype = int32, expected float32 or bfloat16 or float16 \(q is float8\)"),
        (strobe.Unsupported,
         lambda: strobe.attention_backward(dout, q, k, v, dout, lse),
         r"q\.dtype = float8_e4m3fn: no kernel computes gradients from float8"),
        (strobe.InvalidArgument, lambda: strobe.quantize(floats[0], heads_kv=3, scale="head"),
         r"heads_kv = 3, expected a divisor of x\.shape\[2\] = 2"),
        (strobe.InvalidArgument, lambda: strobe.quantize(np.ones((1, 2, 2, 24)), hadamard=True),
         r"x\.dtype = float64"),
        (strobe.InvalidArgument,
         lambda: strobe.quantize(np.ones((1, 2, 2, 24), np.float32), hadamard=True),
         r"head_dim = 24 with hadamard = 1, expected a power of two or a multiple of 16"),
    ]  # fmt: skip
    for kind, call, words in cases:
        with pytest.raises(kind, match="^" + words):
            call()
    assert "float8" in strobe.plan(q, k, v, **scales)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 96, 192])  # in one block, in three of 32 and in three of 64
def test_hadamard(kind: str, dim: int, rng: np.random.Generator) -> None:
    """Rotated q and k have the scores that they had, and outliers cost less."""
    q, k = rng.standard_normal((2, 1, 64, 2, dim)).astype(np.float32)
    q[..., 3] *= 30
    k[..., 3] *= 30
    wanted = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k.astype(np.float64))
    errors = {}
    for rotated in (False, True):
        back = []
        for x in given(kind, q, k):
            codes, scale = strobe.quantize(x, scale="batch_head", hadamard=rotated)
            floats = strobe.dequantize(codes, scale)
            back.append(as_floats(floats))
            there = strobe.dequantize(codes, scale, hadamard=rotated)
            assert abs(as_floats(there) - as_floats(x)).max() < dim * float(scale.max())
        got = np.einsum("bihd,bjhd->bhij", *back)
        errors[rotated] = np.sqrt(np.mean((got - wanted) ** 2))
    assert errors[True] < errors[False] / 2
