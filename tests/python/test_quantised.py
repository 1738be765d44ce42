"""Quantised caches in Python: strobe.quantize and dequantize, and attention over what they give."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import strobe

import oracle
from cases import Array

FORMS = ("int8", "float8_e4m3fn", "float8_e5m2", "q8_0", "q4_0")
BLOCKS = ("q8_0", "q4_0")
# Of keys and of values; "float": those of q's dtype.
PAIRS = (
    *((form, form) for form in FORMS),
    *(("q8_0", "q4_0"), ("q4_0", "int8"), ("int8", "float8_e4m3fn"), ("float8_e5m2", "q8_0")),
    *(("float", "q4_0"), ("float8_e4m3fn", "float"), ("q8_0", "float"), ("float", "int8")),
)
BATCH, ROWS, HEADS_KV, DIM, DIM_V = 2, 41, 2, 64, 96


def values_of(codes: Any, scale: Any, form: str) -> Array:
    """What codes stand for, in float64, computed here."""
    codes = np.asarray(codes)
    if form == "float":
        return codes.astype(np.float64)  # type: ignore[no-any-return]
    if form not in BLOCKS:
        scale = np.asarray(scale).astype(np.float64)
        plain: Array = codes.astype(np.float64) * np.broadcast_to(scale, codes.shape[:3])[..., None]
        return plain
    size = {"q8_0": 34, "q4_0": 18}[form]
    blocks = codes.reshape(*codes.shape[:3], -1, size)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
    rest = blocks[..., 2:]
    if form == "q8_0":
        numbers = np.ascontiguousarray(rest).view(np.int8).astype(np.float64)
    else:
        numbers = np.concatenate([rest & 15, rest >> 4], -1).astype(np.float64) - 8
    found: Array = (numbers * scales).reshape(*codes.shape[:3], -1)
    return found


def drawn(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def cached(x: Array, form: Any, dtype: str = "float32") -> tuple[Any, Any]:
    """Rows of a cache and their scales, where they have any."""
    if form != "float":
        return strobe.quantize(x, form)
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype), None


def scales_of(k_scale: Any, v_scale: Any) -> dict[str, Any]:
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return {name: scale for name, scale in scales.items() if scale is not None}


def as_torch(array: Array | None) -> Any:
    if array is not None and array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    if array is None or array.dtype not in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        return None if array is None else torch.from_numpy(array)
    return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, array.dtype.name))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", ["row", "head", "tensor"])
@pytest.mark.parametrize("scale_dtype", ["float32", "float16"])
def test_there_and_back(form: Any, scale: Any, scale_dtype: str, rng: np.random.Generator) -> None:
    if form in BLOCKS and (scale, scale_dtype) != ("row", "float32"):
        return
    x = drawn(rng, BATCH, ROWS, HEADS_KV, DIM)
    options = {} if form in BLOCKS else {"scale": scale, "scale_dtype": scale_dtype}
    codes, scales = strobe.quantize(x, form, **options)
    wanted = values_of(codes, scales, form)
    back = strobe.dequantize(codes, scales, form=form if form in BLOCKS else None)
    np.testing.assert_allclose(back, wanted, rtol=1e-6, atol=0)
    # Half a step of the widest code is the most that a value may move.
    steps = {"int8": 0.02, "float8_e4m3fn": 0.16, "float8_e5m2": 0.4, "q8_0": 0.02, "q4_0": 0.5}
    most = steps[form]
    assert np.abs(wanted - x).max() < most * 1.3
    tensors = strobe.quantize(torch.from_numpy(x), form, **options)
    assert torch.equal(tensors[0].view(torch.uint8), as_torch(codes).view(torch.uint8))
    assert (tensors[1] is None) == (scales is None)
    if scales is not None:
        assert torch.equal(tensors[1], torch.from_numpy(scales))
        again, _ = strobe.quantize(x, form, scale=scales)
        assert np.array_equal(again.view(np.uint8), codes.view(np.uint8))


@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scale_rows", [1, 7, 16, ROWS, 1000])
def test_blocks_of_rows_share_a_scale(
    form: Any, scale_rows: int, rng: np.random.Generator
) -> None:
    """A block's scale is that of all its values; the last block is shorter."""
    x = drawn(rng, BATCH, ROWS, HEADS_KV, DIM)
    codes, scales = strobe.quantize(x, form, scale_rows=scale_rows)
    most = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}[form]
    wanted = np.empty_like(scales)
    for first in range(0, ROWS, scale_rows):
        block = slice(first, first + scale_rows)
        wanted[:, block] = (np.abs(x[:, block]).max((1, 3)) / np.float32(most))[:, None]
    assert np.array_equal(scales, wanted)
    again, _ = strobe.quantize(x, form, scale=scales)
    assert np.array_equal(again.view(np.uint8), codes.view(np.uint8))
    tensors = strobe.quantize(torch.from_numpy(x), form, scale_rows=scale_rows)
    assert torch.equal(tensors[1], torch.from_numpy(scales))


def test_attention_over_a_cache_with_a_scale_of_each_block(rng: np.random.Generator) -> None:
    """As it is made; and of a page each, with a stride of 0 along its rows."""
    k, v = drawn(rng, 2, 4, 16, HEADS_KV, DIM)  # pages of 16 rows
    q, table = drawn(rng, 2, 3, 4, DIM), np.array([[2, 0], [1, 3]], np.int32)
    (k_codes, k_scale), (v_codes, v_scale) = (strobe.quantize(x, scale_rows=16) for x in (k, v))
    used = np.array([30, 21], np.int32)
    kinds: dict[str, Any] = {"causal": True, "block_table": table, "seqused_k": used}
    values = strobe.dequantize(k_codes, k_scale), strobe.dequantize(v_codes, v_scale)
    wanted = strobe.attention_with_kvcache(q, *values, **kinds)
    out = strobe.attention_with_kvcache(
        q, k_codes, v_codes, k_scale=k_scale, v_scale=v_scale, **kinds
    )
    np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-6)
    of_pages = [np.broadcast_to(x[:, :1].copy(), x.shape) for x in (k_scale, v_scale)]
    assert of_pages[0].strides[1] == 0
    same = strobe.attention_with_kvcache(
        q, k_codes, v_codes, k_scale=of_pages[0], v_scale=of_pages[1], **kinds
    )
    assert np.array_equal(same, out)


@pytest.mark.parametrize("forms", PAIRS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("paged", [False, True])
def test_attention_is_that_over_the_values(
    forms: Any, dtype: str, queries: int, paged: bool, rng: np.random.Generator
) -> None:
    """Few queries go to the decode kernel, many to the tiles."""
    k, k_scale = cached(drawn(rng, BATCH, ROWS, HEADS_KV, DIM), forms[0], dtype)
    v, v_scale = cached(drawn(rng, BATCH, ROWS, HEADS_KV, DIM_V), forms[1], dtype)
    q = torch.from_numpy(drawn(rng, BATCH, queries, 4, DIM)).to(getattr(torch, dtype))
    used = [30, 41]
    arguments: dict[str, Any] = {"seqused_k": np.array(used, np.int32), "causal": True}
    arguments |= scales_of(k_scale, v_scale)
    caches = [k, v]
    if paged:  # pages of one row, in the same order
        arguments["block_table"] = np.arange(BATCH * ROWS, dtype=np.int32).reshape(BATCH, ROWS)
        caches = [x.reshape(BATCH * ROWS, 1, *x.shape[2:]) for x in caches]
        for name in ("k_scale", "v_scale"):
            if name in arguments:
                arguments[name] = arguments[name].reshape(BATCH * ROWS, 1, HEADS_KV)
    tensors = {
        name: as_torch(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()
    }
    out = strobe.attention_with_kvcache(q, *map(as_torch, caches), **tensors)
    problem = oracle.masked(causal=True)
    keys, values = values_of(k, k_scale, forms[0]), values_of(v, v_scale, forms[1])
    for b, length in enumerate(used):
        rows = q[b].double().numpy()
        places = oracle.sequences_of([queries], [length])
        wanted = oracle.attend(rows, keys[b, :length], values[b, :length], places, problem)
        room = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}[dtype]
        np.testing.assert_allclose(out[b].double().numpy(), wanted.out, atol=room)
    # The same through NumPy's arrays, to the bit.
    if dtype == "float32":
        same = strobe.attention_with_kvcache(q.numpy(), *caches, **arguments)
        assert np.array_equal(same, out.numpy())


@pytest.mark.parametrize("forms", PAIRS)
def test_append_quantises(forms: Any, rng: np.random.Generator) -> None:
    """What a call writes is what strobe.quantize gives; and scales of rows are written with it."""
    x = drawn(rng, BATCH, ROWS, HEADS_KV, DIM)
    k, k_scale = cached(x, forms[0])
    v, v_scale = cached(x, forms[1])
    new = drawn(rng, 2, BATCH, 3, HEADS_KV, DIM)
    used = np.array([5, 38], np.int32)
    scales = scales_of(k_scale, v_scale)
    q = drawn(rng, BATCH, 1, 4, DIM)
    out = strobe.attention_with_kvcache(
        q, k, v, k_new=new[0], v_new=new[1], seqused_k=used, **scales
    )
    pairs = ((k, k_scale, new[0], forms[0]), (v, v_scale, new[1], forms[1]))
    for cache, scale, rows, form in pairs:
        codes, made = cached(rows, form)
        for b, begin in enumerate(used):
            assert np.array_equal(
                cache[b, begin : begin + 3].view(np.uint8), codes[b].view(np.uint8)
            )
            if scale is not None:
                assert np.array_equal(scale[b, begin : begin + 3], made[b])
    again = strobe.attention_with_kvcache(q, k, v, seqused_k=used + 3, **scales)
    assert np.array_equal(again, out)
    for name, scale in scales.items():
        scale.flags.writeable = False
        with pytest.raises(strobe.InvalidArgument, match=f"{name} is read-only"):
            strobe.attention_with_kvcache(
                q, k, v, k_new=new[0], v_new=new[1], seqused_k=used, **scales
            )
        scale.flags.writeable = True


def of_rows(begin: int, end: int, *arrays: Array | None) -> list[Any]:
    return [None if x is None else x[:, begin:end] for x in arrays]


@pytest.mark.parametrize("forms", PAIRS)
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("prefix", [20, 1, 33])
def test_parts_are_merged(forms: Any, queries: int, prefix: int, rng: np.random.Generator) -> None:
    """The first rows of a cache of codes and the others, each with its lse, give what one call over
    all gives. Of the first sequence the second part may have no keys.
    """
    k, k_scale = cached(drawn(rng, BATCH, ROWS, HEADS_KV, DIM), forms[0])
    v, v_scale = cached(drawn(rng, BATCH, ROWS, HEADS_KV, DIM_V), forms[1])
    q = drawn(rng, BATCH, queries, 4, DIM)
    used = np.array([25, ROWS], np.int32)
    first = np.minimum(used, prefix).astype(np.int32)
    parts = [(0, prefix, first), (prefix, ROWS, used - first)]

    def attend(begin: int, end: int, seqused_k: Any) -> Any:
        own_k, own_v, *scales = of_rows(begin, end, k, v, k_scale, v_scale)
        return strobe.attention_with_kvcache(
            q, own_k, own_v, seqused_k=seqused_k, return_lse=True, **scales_of(*scales)
        )

    wanted = attend(0, ROWS, used)
    outs, lses = zip(*(attend(*part) for part in parts), strict=True)
    assert np.isneginf(lses[1][0]).all() == (prefix > 25)
    merged = strobe.merge(outs, lses)
    for got, whole in zip(merged, wanted, strict=True):
        np.testing.assert_allclose(got, whole, atol=3e-6)
    assert np.abs(outs[0] - wanted[0]).max() > 0.01


@pytest.mark.parametrize("forms", PAIRS)
def test_a_shared_prefix_of_codes(forms: Any, rng: np.random.Generator) -> None:
    """A prefix that all sequences share, attended to once by all queries, and merged with each
    one's own keys; against pages, where the tables of all sequences begin with the prefix's.
    """
    batch, size, shared, own = 3, 8, 4, 2  # pages of the prefix and of each sequence
    pages = shared + batch * own
    k, k_scale = cached(drawn(rng, pages, size, HEADS_KV, DIM), forms[0])
    v, v_scale = cached(drawn(rng, pages, size, HEADS_KV, DIM_V), forms[1])
    scales = scales_of(k_scale, v_scale)
    q = drawn(rng, batch, 4, DIM)  # packed: one query of each sequence
    table = np.arange(shared, pages, dtype=np.int32).reshape(batch, own)
    used = np.array([5, 16, 9], np.int32)

    def attend(starts: list[int], block_table: Array, seqused_k: Array) -> Any:
        offsets = np.array(starts, np.int32)
        return strobe.attention_with_kvcache(
            *(q, k, v), cu_seqlens_q=offsets, block_table=block_table, seqused_k=seqused_k,
            return_lse=True, **scales,
        )  # fmt: skip

    prefix = np.arange(shared, dtype=np.int32)[None]
    whole = np.concatenate([np.repeat(prefix, batch, 0), table], 1)
    rows = np.array([shared * size], np.int32)
    each = list(range(batch + 1))
    wanted = attend(each, whole, used + rows)
    outs, lses = zip(attend([0, batch], prefix, rows), attend(each, table, used), strict=True)
    for got, expected in zip(strobe.merge(outs, lses), wanted, strict=True):
        np.testing.assert_allclose(got, expected, atol=3e-6)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"k_scale": None}, r"k_scale = None with k\.dtype = int8, expected what codes are multiplied"),
    ({"v_scale": None}, r"v_scale = None with v\.dtype = int8"),
    ({"k_scale": np.ones((1,), np.int32)}, r"k_scale\.dtype = int32, expected float32 or float16"),
    ({"k_scale": np.ones((2, 2), np.float32)}, r"k_scale\.ndim = 2, expected 3"),
    ({"k_scale": np.ones((3,), np.float32)}, r"k_scale\.shape\[0\] = 3, expected 2 \(heads_kv"),
    ({"v_scale": np.ones((2,), np.float32)}, r"v_scale\.ndim = 1, expected 3"),
    (
        {"k_scale": np.broadcast_to(np.float32(1), (2, 41, 2))},
        r"the strides of k_scale are all 0, expected one that is not",
    ),
    (
        {"v": np.zeros((2, 41, 2, 64), np.float32)},
        r"v_scale is given with v\.dtype = float32, expected None",
    ),
    (
        {"v": np.zeros((2, 41, 2, 64), np.float64)},
        r"v\.dtype = float64, expected float32 \(that of q; or of a quantised cache int8",
    ),
    (
        dict.fromkeys("kv", np.zeros((2, 41, 2, 64), np.float32)),
        r"k_scale is given with k\.dtype = float32",
    ),
    ({"k": np.zeros((2, 41, 2, 50), np.uint8)}, r"k\.shape\[3\] = 50 bytes, expected head_dim"),
    (
        {"k": np.zeros((2, 41, 2, 68), np.uint8), "v": np.zeros((2, 41, 2, 50), np.uint8)},
        r"v\.shape\[3\] = 50 bytes, expected head_dim_v / 32 \* 34 \(q8_0\) or \* 18",
    ),
    (
        {"k": np.zeros((2, 41, 2, 68), np.uint8), "v": np.zeros((2, 41, 2, 68), np.uint8)},
        r"k_scale is given with k\.dtype = uint8",
    ),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[x[1][:30] for x in BAD])
def test_bad_calls(change: dict[str, Any], words: str) -> None:
    scale = np.ones((2, 41, 2), np.float32)
    cache = np.zeros((2, 41, 2, 64), np.int8)
    arguments: dict[str, Any] = {"k": cache, "v": cache, "k_scale": scale, "v_scale": scale}
    q = np.zeros((2, 1, 4, 64), np.float32)
    strobe.attention_with_kvcache(q, **arguments)
    with pytest.raises(strobe.InvalidArgument, match=words):
        strobe.attention_with_kvcache(q, **arguments | change)


def test_bad_quantising() -> None:
    x = np.zeros((1, 2, 2, 64), np.float32)
    codes, scale = strobe.quantize(x)
    bad: list[tuple[Any, str]] = [
        (lambda: strobe.quantize(x, "int4"), "form = 'int4', expected \"int8\""),  # type: ignore[arg-type]
        (lambda: strobe.quantize(x[0]), r"x\.ndim = 3, expected 4"),
        (lambda: strobe.quantize(codes), r"x\.dtype = int8, expected float32"),
        (lambda: strobe.quantize(x, scale="block"), "scale = 'block', expected \"row\""),  # type: ignore[arg-type]
        (lambda: strobe.quantize(x, scale=np.ones(5, np.float32)), r"scale\.shape = \(5,\)"),
        (lambda: strobe.quantize(x, scale=0.1), 'scale = 0.1, expected "row", "head"'),  # type: ignore[arg-type]
        (lambda: strobe.quantize(x, scale=None), 'scale = None, expected "row", "head"'),
        (lambda: strobe.quantize(x, scale_dtype="bfloat16"), "scale_dtype = bfloat16, expected"),
        (
            lambda: strobe.quantize(x, scale="batch_head", scale_dtype="float16"),
            'float16 with scale = "batch_head", expected float32',
        ),
        (lambda: strobe.quantize(x, heads_kv=1), 'heads_kv = 1 with scale = "row", expected None'),
        (lambda: strobe.quantize(x, scale_rows=0), "scale_rows = 0, expected at least 1"),
        (lambda: strobe.quantize(x, scale_rows=2.5), "scale_rows = 2.5"),  # type: ignore[arg-type]
        (
            lambda: strobe.quantize(x, scale="head", scale_rows=4),
            "scale_rows = 4 with form = 'int8' and scale = 'head', expected None, or scales of",
        ),
        (
            lambda: strobe.quantize(x, "q8_0", scale_rows=4),
            "scale_rows = 4 with form = 'q8_0' and scale = 'row', expected None, or scales of",
        ),
        (lambda: strobe.quantize(x, "q8_0", scale="head"), "with form = 'q8_0', expected None"),
        (
            lambda: strobe.quantize(x[..., :40], "q4_0"),
            r"x\.shape\[3\] \(head_dim\) = 40 with form = 'q4_0'",
        ),
        (lambda: strobe.quantize(np.ones((1, 2, 2, 300), np.float32)), r"\(head_dim\) = 300, expe"),
        (
            lambda: strobe.dequantize(np.ones((1, 2, 2, 340), np.uint8), form="q8_0"),
            r"codes\.shape\[3\] = 340 bytes, of head_dim = 320, expected 1 to 256",
        ),
        (
            lambda: strobe.dequantize(np.ones((1, 2, 2, 34), np.uint8), form=["q8_0"]),  # type: ignore[arg-type]
            r"form = \['q8_0'\] with codes\.dtype = uint8",
        ),
        (lambda: strobe.quantize(x[..., ::2]), r"x\.strides\[3\] = 2 elements, expected 1"),
        (lambda: strobe.dequantize(x, scale), r"codes\.dtype = float32, expected int8"),
        (lambda: strobe.dequantize(codes), r"scale = None with codes\.dtype = int8"),
        (lambda: strobe.dequantize(codes.view(np.uint8)), "form = None with codes.dtype = uint8"),
        (
            lambda: strobe.dequantize(codes.view(np.uint8), form="q8_0"),
            r"codes\.shape\[3\] = 64 bytes, expected a multiple of 34",
        ),
        (lambda: strobe.dequantize(codes, scale, form="q4_0"), "expected None"),
    ]
    for call, words in bad:
        with pytest.raises(strobe.Error, match=words):
            call()


def test_scales_that_are_expanded() -> None:
    """One number for all heads of all sequences, as float8 attention takes it."""
    x = np.random.default_rng(3).standard_normal((2, 5, 2, 64), np.float32)
    one = np.broadcast_to(np.float32(0.1), (2, 2))
    codes, scale = strobe.quantize(x, "float8_e4m3fn", scale=one)
    whole, _ = strobe.quantize(x, "float8_e4m3fn", scale=np.full((2, 2), 0.1, np.float32))
    assert np.array_equal(codes.view(np.uint8), whole.view(np.uint8))
    assert np.array_equal(scale, one)
    again = strobe.dequantize(codes, one)
    assert np.array_equal(again, strobe.dequantize(codes, np.ascontiguousarray(one)))
    assert strobe.quantize(x, "q8_0", scale=None)[1] is None
