"""strobe.attention_with_kvcache against float64, and strobe.merge: see `kvcache_cases`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strobe
from strobe import _core

import kvcache_cases
import oracle
from cases import DTYPES, Array, normal
from kvcache_cases import CacheCase, Sequence

PAGE_SIZES = (*range(1, 18), 64, 128, 256)


@pytest.mark.parametrize("seed", range(0, 400, 20))
def test_random_problems(seed: int) -> None:
    for each in range(seed, seed + 20):
        rng = np.random.default_rng(each)
        case = kvcache_cases.draw(rng)
        try:
            case.make(rng).run()
        except Exception as error:
            raise AssertionError(f"seed {each}: {case}") from error


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_page_size(page_size: int, rng: np.random.Generator) -> None:
    """Lengths 0, 1 and capacity; none, one and several rows appended at borders of pages."""
    capacity = max(3 * page_size, 8)
    borders = [max(2 * page_size + d, 0) for d in (-1, 0, 1)]
    for added in (0, 1, 4):
        lengths = [0, 1, *borders, capacity]
        case = CacheCase(
            [Sequence(2, min(n, capacity - added), added) for n in lengths],
            page_size=page_size,
            capacity=capacity,
            options={"causal": True},
        )
        case.make(rng).run()


@pytest.mark.parametrize("layout", ["rows", "heads", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(
    dtype: str, layout: str, interleaved: bool, rng: np.random.Generator
) -> None:
    """Part of a head and all of it, with positions that lengths give and with given ones."""
    for rotary_dim, given, page_size in ((8, False, 5), (32, True, 0)):
        case = CacheCase(
            [Sequence(3, 17, 3, leftpad=4), Sequence(3, 30, 3), Sequence(3, 0, 3)],
            page_size=page_size,
            dtype=dtype,
            layout=layout,
            rotary_dim=rotary_dim,
            rotary_given=given,
            options={"causal": given, "rotary_interleaved": interleaved},
        )
        case.make(rng).run()


def test_strides_of_everything(rng: np.random.Generator) -> None:
    """Columns of larger arrays: tables, queries, new keys."""
    case = CacheCase([Sequence(2, 17, 2), Sequence(2, 30, 2)], page_size=4)
    arrays = case.make(rng)

    def within(x: Array) -> Array:
        wide = np.zeros((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 5), x.dtype)
        wide[..., 1:-2, :-5] = x
        return wide[..., 1:-2, :-5]

    arrays.q = within(arrays.q)
    for name in ("k_new", "v_new", "block_table"):
        arrays.arguments[name] = within(arrays.arguments[name])
    arrays.run()


def test_float32_results(rng: np.random.Generator) -> None:
    case = CacheCase([Sequence(1, 30), Sequence(1, 5)], dtype="bfloat16")
    arrays = case.make(rng)
    for dtype in ("float32", np.float32, np.dtype("float32")):
        out = strobe.attention_with_kvcache(
            arrays.q, arrays.k, arrays.v, out_dtype=dtype, **arrays.arguments
        )
        assert out.dtype == np.float32
        rounded = strobe.attention_with_kvcache(arrays.q, arrays.k, arrays.v, **arrays.arguments)
        assert np.array_equal(out.astype(rounded.dtype), rounded)
    into = np.empty_like(out)
    same = strobe.attention_with_kvcache(
        arrays.q, arrays.k, arrays.v, out_dtype="float32", out=into, **arrays.arguments
    )
    assert same is into
    assert np.array_equal(into, out)


def test_plans_know_no_values(rng: np.random.Generator) -> None:
    """Other lengths, pages and indices need no other plan."""
    case = CacheCase([Sequence(1, 5, 1), Sequence(1, 30, 1)], page_size=4)
    arrays = case.make(rng)
    arrays.run()
    before = _core.kept()
    q, k, v, given = arrays.q, arrays.k, arrays.v, arrays.arguments
    for used in ([0, 1], [7, 7], [39, 0]):
        given["seqused_k"] = np.array(used, np.int32)
        given["block_table"] = rng.permutation(20).astype(np.int32).reshape(2, 10) % len(k)
        strobe.attention_with_kvcache(q, k, v, return_lse=True, **given)
    assert _core.kept() == before


# --------------------------------------------------------------------------------------- refusals


def int32(*numbers: Any) -> Array:
    return np.array(numbers, np.int32)


Change = Callable[[dict[str, Any]], Any]
WRONG: list[tuple[str, str]] = [
    ("seqused_k=int32(5, 41)", r"seqused_k\[1\] = 41, expected 0 to 40 \(k.shape\[1\] \* block"),
    ("seqused_k=int32(-1, 4)", r"seqused_k\[0\] = -1, expected 0 to 40"),
    ("seqused_k=int32(5)", r"seqused_k.shape\[0\] = 1, expected 2 \(batch of q\)"),
    ("seqused_k=np.array([1, 2])", r"seqused_k.dtype = int64, expected int32"),
    ("seqused_k=int32(1, 0, 2)[::2]", r"seqused_k.strides\[0\] = 2 elements, expected 1"),
    ("block_table=np.full((2, 10), 9, np.int32)", r"block_table\[0\]\[0\] = 9, expected 0 to 8"),
    ("block_table=np.full((2, 10), -1, np.int32)", r"block_table\[0\]\[0\] = -1"),
    ("block_table=np.zeros((3, 10), np.int32)", r"block_table.shape\[0\] = 3, expected 2"),
    ("block_table=np.zeros(10, np.int32)", r"block_table.ndim = 1, expected 2"),
    ("block_table=np.zeros((2, 10))", r"block_table.dtype = float64, expected int32"),
    ("block_table=np.zeros((2, 20), np.int32)[:, ::2]", r"block_table.strides\[1\] = 2 elements"),
    (
        "block_table=np.broadcast_to(np.zeros(10, np.int32), (2, 10))",
        r"block_table.strides\[0\] = 0 elements, expected at least 10",
    ),
    ("cache_batch_idx=int32(0, 1)", "has_cache_batch_idx|cache_batch_idx"),
    (
        "block_table=None, seqused_k=int32(1, 1), cache_batch_idx=int32(0, 9)",
        r"cache_batch_idx\[1\] = 9, expected 0 to 8",
    ),
    ("leftpad=int32(0, 9)", r"leftpad\[1\] = 9, expected 0 to 4 \(the sequence's seqused_k\)"),
    ("leftpad=int32(0, -2)", r"leftpad\[1\] = -2"),
    ("k_new=new, v_new=new, seqused_k=int32(5, 39)", r"seqused_k\[1\] = 39, expected 0 to 38"),
    ("k_new=new, v_new=new, seqused_k=None", "seqused_k is missing, expected the rows in use"),
    # Pages without their table look like entries of a contiguous cache.
    (
        "block_table=None",
        r"expected 0 to 4 \(k.shape\[1\]; if k and v are pages, block_table is missing\)$",
    ),
    (
        "block_table=None, seqused_k=int32(3, 2), k_new=new, v_new=new",
        r"expected 0 to 2 \(k.shape\[1\] less the sequence's new keys; if k and v are pages, ",
    ),
    (
        "block_table=None, k_new=np.tile(new, (3, 1, 1)), v_new=np.tile(new, (3, 1, 1))",
        r"k_new.shape\[1\] = 6, expected at most 4 \(k.shape\[1\]; if k and v are pages, block_",
    ),
    (
        "block_table=None, cache_batch_idx=int32(0, 1)",
        r"seqused_k\[0\] = 5, expected 0 to 4 \(k.shape\[1\]\)$",
    ),
    ("block_table=None, k=k[:2].copy(), v=v[:2].copy()", r"expected 0 to 4 \(k.shape\[1\]\)$"),
    ("k_new=new", "k_new is given, expected k_new and v_new"),
    ("k_new=new, v_new=new[:1]", r"v_new.shape\[0\] = 1, expected 2"),
    ("k_new=new[..., :4], v_new=new", r"k_new.shape\[3\] = 4, expected 8"),
    ("k_new=new.astype(np.float16), v_new=new", "k_new.dtype = float16, expected float32"),
    ("cu_seqlens_k_new=int32(0, 1, 2)", "cu_seqlens_k_new is given, expected k_new and v_new"),
    (
        "k_new=new[0], v_new=new[0], cu_seqlens_k_new=int32(0, 2, 1)",
        r"cu_seqlens_k_new\[2\] = 1",
    ),
    ("rotary_cos=table", "rotary_cos is given, expected rotary_cos and rotary_sin"),
    ("rotary_position=int32(0, 0)", "rotary_position is given"),
    ("rotary_cos=table, rotary_sin=table[:5]", r"rotary_sin.shape\[0\] = 5, expected 50"),
    ("rotary_cos=wide, rotary_sin=wide", r"rotary_cos.shape\[1\] = 8, expected 1 to head_dim / 2"),
    ("rotary_cos=table[:3], rotary_sin=table[:3]", r"rotary_cos.shape\[0\] = 3, expected more"),
    (
        "rotary_cos=table, rotary_sin=table, rotary_position=int32(0, 50)",
        r"rotary_position\[1\] = 50",
    ),
    ("window=3", "window = 3, expected a pair"),
    ("attention_chunk=-1", "attention_chunk = -1, expected 0 to"),
    ("scale='x'", "scale = 'x', expected a number"),
    ("causal=np.zeros(2)", "causal = .*, expected a bool"),
    ("out_dtype='float64'", "out_dtype = 'float64', expected"),
    ("out_dtype='float16'", "out_dtype = 'float16', expected"),
    ("out=np.zeros((2, 1, 4, 9), np.float32)", r"out.shape\[3\] = 9, expected 8"),
    ("max_seqlen_q=3", "max_seqlen_q = 3, expected None"),
    ("cu_seqlens_q=int32(0, 1, 2)", "q.ndim = 4, expected 3"),
]


def right() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "q": normal(rng, (2, 1, 4, 8)),
        "k": normal(rng, (9, 4, 2, 8)),
        "v": normal(rng, (9, 4, 2, 8)),
        "seqused_k": int32(5, 4),
        "block_table": np.arange(20, dtype=np.int32).reshape(2, 10) % 9,
    }


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_is_named_and_nothing_written(change: str, message: str) -> None:
    given = right()
    rng = np.random.default_rng(1)
    more: dict[str, Any] = {"new": normal(rng, (2, 2, 2, 8)), "table": normal(rng, (50, 4))}
    more |= {"wide": normal(rng, (50, 8)), "int32": int32, "np": np, **given}
    given |= eval(f"dict({change})", more)
    before = given["k"].copy(), given["v"].copy()
    with pytest.raises(strobe.InvalidArgument, match=message):
        strobe.attention_with_kvcache(**given)
    assert np.array_equal(given["k"], before[0])
    assert np.array_equal(given["v"], before[1])


@pytest.mark.parametrize("name", [*right(), "k_new", "rotary_cos", "alibi_slopes", "leftpad"])
@pytest.mark.parametrize("value", [3, "x", [1, 2], object(), np.zeros((1,) * 6, np.float32)])
def test_wrong_objects(name: str, value: Any) -> None:
    with pytest.raises(strobe.InvalidArgument, match=f"^{name}"):
        strobe.attention_with_kvcache(**{**right(), name: value})


def test_a_cache_that_is_read_only_cannot_be_appended_to(rng: np.random.Generator) -> None:
    given = right()
    new = normal(rng, (2, 1, 2, 8))
    given["v"].flags.writeable = False
    strobe.attention_with_kvcache(**given)
    with pytest.raises(strobe.InvalidArgument, match=r"^v is read-only"):
        strobe.attention_with_kvcache(**given, k_new=new, v_new=new)


# ------------------------------------------------------------------------------------------ merge


def parts_of(
    rng: np.random.Generator, packed: bool, parts: int = 3
) -> tuple[dict[str, Any], Array, Array]:
    """Partial results over thirds of the keys, of which the last two rows of q see only some."""
    q, k, v = (normal(rng, (2, 6, 4, 16)) for _ in range(3))
    found = []
    for n in range(parts):
        rows = slice(2 * n, 2 * n + 2)
        position = np.array([-2 * n, -2 * n], np.int32)  # causal: query 0 stands at key 0
        found.append(
            strobe.attention(
                q, k[:, rows], v[:, rows], causal=True, q_position=position, return_lse=True
            )
        )
    out, lse = strobe.attention(q, k, v, causal=True, return_lse=True)
    outs, lses = np.stack([x for x, _ in found]), np.stack([x for _, x in found])
    for n in range(1, parts):
        assert (lses[n][:, :, : 2 * n] == -np.inf).all()
        outs[n][:, : 2 * n] = np.nan  # not read
    if packed:
        outs, out = outs.reshape(parts, 12, 4, 16), out.reshape(12, 4, 16)
        lses, lse = (np.moveaxis(x, -2, -3).reshape(*x.shape[:-3], 4, 12) for x in (lses, lse))
    return {"outs": outs, "lses": lses}, out, lse


@pytest.mark.parametrize("packed", [False, True])
def test_merge(packed: bool, rng: np.random.Generator) -> None:
    given, out, lse = parts_of(rng, packed)
    if not packed:
        for x, wanted in zip(oracle.merge(**given), (out, lse), strict=True):
            np.testing.assert_allclose(x, wanted, atol=2e-6)
    for form in (list, tuple, np.asarray):
        found = strobe.merge(form(given["outs"]), form(given["lses"]))
        np.testing.assert_allclose(found[0], out, atol=2e-6)
        np.testing.assert_allclose(found[1], lse, atol=2e-6)
    into = np.empty(out.shape, np.float16)
    half, _ = strobe.merge(**given, out=into)
    assert half is into
    for dtype in ("float16", np.float16):
        assert np.array_equal(strobe.merge(**given, out_dtype=dtype)[0], into)
    spread: dict[str, Any] = {name: np.stack([x, x], -3)[..., 0, :, :] for name, x in given.items()}
    assert np.array_equal(strobe.merge(**spread)[0], found[0])


@pytest.mark.parametrize("empty", [-np.inf, np.inf])  # ours, and what flash_attn 2 reports
@pytest.mark.parametrize("width", [8, 512])
def test_merge_of_rows_without_keys(empty: float, width: int) -> None:
    outs = np.full((2, 1, 3, 1, width), np.nan, np.float32)
    lses = np.zeros((2, 1, 1, 3), np.float32)
    lses[:, 0, 0, 0] = empty
    lses[0, 0, 0, 1] = np.nan
    lses[0, 0, 0, 2] = empty
    outs[1, 0, 2] = 5
    out, lse = strobe.merge(outs, lses)
    assert (out[0, 0] == 0).all()
    assert np.isnan(out[0, 1]).all()
    assert (out[0, 2] == 5).all()
    assert lse[0, 0, 0] == -np.inf
    assert np.isnan(lse[0, 0, 1])
    assert lse[0, 0, 2] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outs": np.zeros((2, 3), np.float32)}, r"outs.ndim = 2, expected 5"),
        ({"outs": []}, "outs is empty"),
        ({"outs": 3}, "outs is of type int"),
        ({"outs": np.zeros((3, 2, 6, 4, 16))}, r"outs.dtype = float64, expected float32 \(partial"),
        (
            {"outs": np.zeros((3, 2, 6, 4, 513), np.float32)},
            r"outs.shape\[4\] \(head_dim_v\) = 513",
        ),
        ({"lses": np.zeros((3, 2, 4, 5), np.float32)}, r"lses.shape\[3\] = 5, expected 6"),
        ({"lses": np.zeros((3, 2, 4, 6))}, r"lses.dtype = float64, expected float32 \(partial"),
        ({"out": np.zeros((2, 6, 4, 9), np.float32)}, r"out.shape\[3\] = 9, expected 16"),
        ({"out_dtype": "int32"}, "out_dtype = 'int32', expected"),
        ({"threads": "x"}, "threads = 'x', expected an integer"),
        (
            {"out": np.frombuffer(bytes(2 * 6 * 4 * 16 * 4), np.float32).reshape(2, 6, 4, 16)},
            "out is read-only, expected a writable array",
        ),
    ],
)
def test_what_merge_refuses(change: dict[str, Any], message: str) -> None:
    given, _, _ = parts_of(np.random.default_rng(0), packed=False)
    with pytest.raises(strobe.InvalidArgument, match=message):
        strobe.merge(**{**given, **change})


@pytest.mark.parametrize("shape", [(3, 1, 0, 2, 4), (3, 0, 5, 2, 4), (3, 1, 5, 0, 4), (3, 0, 2, 4)])
def test_merge_without_rows(shape: tuple[int, ...]) -> None:
    rows_last = (*shape[:-3], shape[-2], shape[-3])
    out, lse = strobe.merge(np.zeros(shape, np.float32), np.zeros(rows_last, np.float32))
    assert out.shape == shape[1:]
    assert lse.shape == rows_last[1:]


def test_merge_of_equal_parts_is_that_part() -> None:
    largest = np.finfo(np.float32).max
    for parts in range(1, 60):
        outs = np.full((parts, 1, 1, 1, 4), largest, np.float32)
        assert (strobe.merge(outs, np.zeros((parts, 1, 1, 1), np.float32))[0] == largest).all()


def test_merge_refuses_parts_of_two_kinds() -> None:
    torch = pytest.importorskip("torch")
    part = np.zeros((1, 3, 2, 8), np.float32)
    with pytest.raises(strobe.InvalidArgument, match=r"outs\[1\] is a numpy.ndarray, expected"):
        strobe.merge([torch.from_numpy(part), part], np.zeros((2, 1, 2, 3), np.float32))


def test_a_cache_without_entries() -> None:
    """Nothing before or behind an empty array is read or written."""
    pool = np.ones((64, 8, 2, 16), np.float32)
    q = np.zeros((2, 1, 2, 16), np.float32)
    more = {"k_new": q, "v_new": q, "seqused_k": np.array([0, 1], np.int32)}
    for options in ({}, {"cache_batch_idx": np.array([0, 1], np.int32)}, more):
        with pytest.raises(strobe.InvalidArgument, match=r"k.shape\[0\] = 0, expected at least 1"):
            strobe.attention_with_kvcache(q, pool[:0], pool[:0], **options)
    assert (pool == 1).all()


def test_a_prefix_that_sequences_share(rng: np.random.Generator) -> None:
    """Attended to once, by all queries as one sequence's, and merged with what each has alone."""
    q = normal(rng, (5, 1, 4, 16))
    prefix, own = normal(rng, (2, 1, 30, 2, 16)), normal(rng, (2, 5, 9, 2, 16))
    used = np.array([0, 1, 9, 4, 5], np.int32)
    parts = [
        strobe.attention_with_kvcache(
            np.moveaxis(q, 0, 1), *prefix, out_dtype="float32", return_lse=True
        ),
        strobe.attention_with_kvcache(
            q, *own, seqused_k=used, out_dtype="float32", return_lse=True
        ),
    ]
    out, lse = parts[0]
    outs = [np.moveaxis(out, 0, 1), parts[1][0]]
    lses = [lse.transpose(2, 1, 0), parts[1][1]]
    merged, merged_lse = strobe.merge(outs, lses)
    for b, n in enumerate(used):
        k, v = (np.concatenate([p, x[b : b + 1, :n]], 1) for p, x in zip(prefix, own, strict=True))
        wanted, wanted_lse = strobe.attention(q[b : b + 1], k, v, return_lse=True)
        np.testing.assert_allclose(merged[b : b + 1], wanted, atol=2e-6)
        np.testing.assert_allclose(merged_lse[b : b + 1], wanted_lse, atol=2e-6)


@pytest.mark.parametrize("paged", [False, True])
def test_new_keys_without_rows_append_nothing(paged: bool, rng: np.random.Generator) -> None:
    """Such an array has an address all the same, as a piece of a longer one does."""
    q = normal(rng, (2, 1, 4, 16), "float32")
    cache = [normal(rng, (2, 8, 2, 16), "float32") for _ in range(2)]
    new = [normal(rng, (2, 3, 2, 16), "float32")[:, 3:] for _ in range(2)]
    options: dict[str, Any] = {"seqused_k": np.array([5, 8], np.int32)}
    if paged:
        options["block_table"] = np.array([[1], [0]], np.int32)
    wanted = strobe.attention_with_kvcache(q, *cache, **options)
    before = [x.copy() for x in cache]
    got = strobe.attention_with_kvcache(q, *cache, k_new=new[0], v_new=new[1], **options)
    np.testing.assert_array_equal(got, wanted)
    for x, y in zip(cache, before, strict=True):
        np.testing.assert_array_equal(x, y)
