"""Masks as data from Python: what each function of `strobe.masks` lets a query see against its
definition, pair by pair; calls with them, forward and backward, against attention in float64; and
their pictures.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
import xml.dom.minidom
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strobe
from strobe import masks

from cases import DTYPES

Array = np.ndarray[Any, Any]
Rule = Callable[[Any, Any], Any]  # of queries (rows) and keys (columns)


def dense(rule: Rule, queries: int, keys: int) -> Array:
    i, j = np.arange(queries)[:, None], np.arange(keys)[None]
    return np.broadcast_to(rule(i, j), (queries, keys))


IDS = np.repeat([4, 0, 7, -1, 2], [70, 1, 129, 40, 60])  # 300
BLOCKS = np.random.default_rng(2).random((5, 4)) < 0.4


def in_tree(i: Any, j: Any) -> Any:
    """Of a binary tree in an array, with 100 keys before it."""
    node, seen = i + 0 * j, j < 100
    for _ in range(9):
        seen = seen | (node >= 0) & (j == node + 100)
        node = np.where(node > 0, (node - 1) // 2, -1)
    return seen


INTERVALS = np.random.default_rng(3).integers(-50, 300, (150, 4))
LISTS = np.array(
    [[2, 0, 2], [7, -1, 1], [3, 3, 3], [1, 0, 2]]
)  # of 4 blocks, some of which are none
COUNTS = np.array([3, 3, 0, 2])
BITS = np.random.default_rng(6).integers(-(2**31), 2**31, (4, 3, 64, 2), dtype=np.int32)


def by_bits(i: Any, j: Any) -> Any:
    """The blocks of LISTS whose pairs are BITS: of one that comes twice in a list a pair may be in
    either.
    """
    seen = np.zeros((len(i), j.shape[1]), bool)
    words = BITS.view(np.uint32)
    for row, listed in enumerate(LISTS):
        for n, block in enumerate(listed[: COUNTS[row]]):
            if 0 <= block < 4:
                own, keys = i[row * 64 : row * 64 + 64], j[:, block * 64 : block * 64 + 64]
                word = words[row, n][own % 64, keys % 64 // 32]
                part = word >> (keys % 32).astype(np.uint32) & 1 == 1
                seen[row * 64 : row * 64 + 64, block * 64 : block * 64 + 64] |= part
    return seen


MASKS: dict[str, tuple[Callable[[], masks.Mask], Rule, int, int]] = {
    "documents": (
        lambda: masks.documents(IDS, block=64),
        lambda i, j: (IDS[i] == IDS[j]) & (IDS[i] >= 0),
        *(300, 300),
    ),
    "documents of other keys": (
        lambda: masks.documents(IDS[::3], IDS, block=(64, 128)),
        lambda i, j: (IDS[::3][i] == IDS[j]) & (IDS[j] >= 0),
        *(100, 300),
    ),
    "prefix": (
        lambda: masks.prefix(130, 200, 260, block=64),
        lambda i, j: (j < 130) | (j <= i + 60),
        *(200, 260),
    ),
    "sliding": (
        lambda: masks.sliding(300, left=70, first=5, block=(128, 64)),
        lambda i, j: (j <= i) & ((j >= i - 70) | (j < 5)),
        *(300, 300),
    ),
    "global": (
        lambda: masks.global_window(280, left=40, right=30, tokens=3, block=64),
        lambda i, j: (i < 3) | (j < 3) | ((j >= i - 40) & (j <= i + 30)),
        *(280, 280),
    ),
    "dilated": (
        lambda: masks.dilated(300, 270, step=7, window=11, block=64),
        lambda i, j: ((i - 30 - j) % 7 == 0) & (abs(i - 30 - j) <= 77),
        *(300, 270),
    ),
    "intervals": (
        lambda: masks.from_intervals(INTERVALS, 270, block=64),
        lambda i, j: (
            ((j >= INTERVALS[i, 0]) & (j < INTERVALS[i, 1]))
            | ((j >= INTERVALS[i, 2]) & (j < INTERVALS[i, 3]))
        ),
        *(150, 270),
    ),
    "one interval": (
        lambda: masks.from_intervals(INTERVALS[:, :2], block=64),
        lambda i, j: (j >= INTERVALS[i, 0]) & (j < INTERVALS[i, 1]),
        *(150, 150),
    ),
    "lists": (
        lambda: masks.from_lists(LISTS, 220, 250, full_counts=COUNTS, block=64),
        lambda i, j: [
            [any(b == x // 64 for b in LISTS[y // 64][: COUNTS[y // 64]]) for x in j[0]]
            for y in i[:, 0]
        ],
        *(220, 250),
    ),
    "lists with bits": (
        lambda: masks.from_lists(
            None, 220, 250, partial_blocks=LISTS, partial_counts=COUNTS, partial_bits=BITS, block=64
        ),
        by_bits,
        *(220, 250),
    ),
    "a tree that is a chain": (
        lambda: masks.tree(np.arange(90) - 1, context=7),
        lambda i, j: j <= i + 7,
        *(90, 97),
    ),
    "blocks": (
        lambda: masks.blocks(BLOCKS, 300, 240, block=64),
        lambda i, j: BLOCKS[i // 64, j // 64],
        *(300, 240),
    ),
    "tree": (
        lambda: masks.tree((np.arange(150) - 1) // 2 + 0 * np.arange(150), context=100),
        in_tree,
        *(150, 250),
    ),
    "bools": (
        lambda: masks.from_bool(dense(lambda i, j: (i * j) % 7 < 2, 130, 300)),
        lambda i, j: (i * j) % 7 < 2,
        *(130, 300),
    ),
}
# The tree's root has no parent: (0 - 1) // 2 is -1.


@pytest.mark.parametrize("name", MASKS)
def test_they_see_what_they_say(name: str) -> None:
    make, rule, queries, keys = MASKS[name]
    mask = make()
    assert mask.shape == (1, 1, queries, keys)
    wanted = dense(rule, queries, keys)
    assert np.array_equal(mask.dense(), wanted)
    tiles = mask.tiles()
    side_q, side_k = mask.block
    for a in range(tiles.shape[0]):
        for b in range(tiles.shape[1]):
            part = wanted[a * side_q : (a + 1) * side_q, b * side_k : (b + 1) * side_k]
            assert tiles[a, b] == (2 if part.all() else 1 if part.any() else 0)


def reference(
    tensors: Sequence[Array], seen: Array, sinks: Array | float = -np.inf
) -> tuple[Array, ...]:
    """(out, dq, dk, dv, dsinks) of one head of keys for each head of queries, in float64. seen:
    (batch, heads, seqlen_q, seqlen_k), or what broadcasts to it.
    """
    q, k, v, dout = (x.astype(np.float64) for x in tensors)
    scale = q.shape[-1] ** -0.5
    scores = np.where(seen, np.einsum("bihd,bjhd->bhij", q, k) * scale, -np.inf)
    of_sink = np.broadcast_to(np.reshape(sinks, (-1, 1, 1)), (*scores.shape[:3], 1))
    most = np.maximum(scores.max(axis=-1, keepdims=True), of_sink)
    most = np.where(np.isfinite(most), most, 0)
    weights, of_sink = np.exp(scores - most), np.exp(of_sink - most)
    total = weights.sum(axis=-1, keepdims=True) + of_sink
    of_sink = np.divide(of_sink, total, where=total > 0, out=np.zeros_like(of_sink))
    weights = np.divide(weights, total, where=total > 0, out=np.zeros_like(weights))
    out = np.einsum("bhij,bjhd->bihd", weights, v)
    dweights = np.einsum("bihd,bjhd->bhij", dout, v)
    mean = (weights * dweights).sum(axis=-1, keepdims=True)
    dscores = weights * (dweights - mean) * scale
    return (
        out,
        np.einsum("bhij,bjhd->bihd", dscores, k),
        np.einsum("bhij,bihd->bjhd", dscores, q),
        np.einsum("bhij,bihd->bjhd", weights, dout),
        -(of_sink * mean).sum(axis=(0, 2, 3)),
    )


def tensors(queries: int, keys: int, batch: int = 1, heads: int = 2) -> list[Array]:
    rng = np.random.default_rng(5)
    shapes = [(batch, n, heads, 16) for n in (queries, keys, keys, queries)]
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def check(q: Array, k: Array, v: Array, dout: Array, seen: Any, **options: Any) -> None:
    out, lse = strobe.attention(q, k, v, return_lse=True, **options)
    found = (out, *strobe.attention_backward(dout, q, k, v, out, lse, **options))
    for got, wanted in zip(found, reference((q, k, v, dout), seen)[:4], strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=1e-4)
    empty = np.broadcast_to(~np.asarray(seen).any(axis=-1), lse.shape)
    assert np.array_equal(np.isneginf(lse), empty)


@pytest.mark.parametrize("name", MASKS)
def test_calls_with_them(name: str) -> None:
    make, rule, queries, keys = MASKS[name]
    q, k, v, dout = tensors(queries, keys)
    seen = dense(rule, queries, keys)
    check(q, k, v, dout, seen, mask=make())
    behind = np.arange(keys)[None] <= np.arange(queries)[:, None] + keys - queries
    check(q, k, v, dout, seen & behind, mask=make(), causal=True)


def test_a_plan_takes_a_mask() -> None:
    mask = masks.documents(np.repeat([0, 1], [100, 60]), block=64)
    q = np.zeros((2, 160, 4, 8), np.float32)
    assert "mask of blocks 64 x 64" in strobe.plan(q, q, q, mask=mask)
    assert "takes it" in strobe.why(q, q, q, mask=mask)


def test_masks_of_each_sequence_and_head() -> None:
    rng = np.random.default_rng(7)
    keep = rng.random((2, 3, 150, 200)) < 0.2
    keep[1, 2, 64:128] = False
    q, k, v, dout = tensors(150, 200, batch=2, heads=3)
    check(q, k, v, dout, keep, mask=masks.from_bool(keep))
    check(q, k, v, dout, keep[:1], mask=masks.from_bool(keep[:1], block=(64, 256)))
    check(q, k, v, dout, keep[:, :1], mask=masks.from_bool(keep[:, :1], block=64))
    expanded = np.broadcast_to(keep[:1, :1], keep.shape)
    one = masks.from_bool(expanded)
    assert one.shape[:2] == (1, 1)
    check(q, k, v, dout, expanded, mask=one)
    turned = keep.swapaxes(2, 3).copy().swapaxes(2, 3)
    check(q, k, v, dout, keep, mask=masks.from_bool(turned))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_sinks(dtype: str) -> None:
    """Rows to which the mask leaves no key have the sink alone: out 0, lse the sink."""
    rng = np.random.default_rng(10)
    keep = rng.random((1, 1, 300, 200)) < 0.1
    keep[..., 40:50, :] = keep[..., 128:256, :] = False
    keep[..., :64, :64] = True
    q, k, v, dout = (x.astype(DTYPES[dtype]) for x in tensors(300, 200))
    sinks = np.array([0.7, -np.inf], np.float32)
    options: dict[str, Any] = {"sinks": sinks, "mask": masks.from_bool(keep, block=64)}
    out, lse = strobe.attention(q, k, v, return_lse=True, **options)
    empty = ~keep[0, 0].any(axis=-1)
    assert not out[:, empty].any()
    assert (lse[0][:, empty] == sinks[:, None]).all()
    grads = strobe.attention_backward(dout, q, k, v, out, lse, return_dsinks=True, **options)
    wanted = reference((q, k, v, dout), keep, sinks)
    atol = 5e-5 if dtype == "float32" else 3e-2
    for got, right in zip((out, *grads), wanted, strict=True):
        np.testing.assert_allclose(got.astype(np.float32), right, atol=atol, rtol=atol)
    assert not grads[0][:, empty].any()
    dout[:, empty] = np.nan  # of rows whose out is 0 whatever it is
    again = strobe.attention_backward(dout, q, k, v, out, lse, return_dsinks=True, **options)
    assert again[3].tobytes() == grads[3].tobytes()
    # The backward computes of an lse of the keys alone what it computes of one with the sink.
    options["sinks_outside_lse"] = True
    _, alone = strobe.attention(q, k, v, return_lse=True, **options)
    assert np.array_equal(np.isneginf(alone[0]), np.broadcast_to(empty, alone.shape[1:]))
    dout[:, empty] = 1
    outside = strobe.attention_backward(dout, q, k, v, out, alone, return_dsinks=True, **options)
    for got, right in zip(outside, wanted[1:], strict=True):
        np.testing.assert_allclose(got.astype(np.float32), right, atol=atol, rtol=atol)


def test_packed_sequences() -> None:
    rng = np.random.default_rng(8)
    cu_q, cu_k = np.array([0, 70, 70, 200], np.int32), np.array([0, 90, 130, 300], np.int32)
    keep = rng.random((1, 200, 170)) < 0.3
    mask = masks.from_bool(keep, block=64, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    q, k, v, dout = (x[0] for x in tensors(200, 300))
    options: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "mask": mask}
    out, lse = strobe.attention(q, k, v, return_lse=True, **options)
    found = strobe.attention_backward(dout, q, k, v, out, lse, **options)
    for b in range(3):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        seen = keep[0, rows, : keys.stop - keys.start]
        assert np.array_equal(mask.dense(b), seen)
        parts = (q[rows], k[keys], v[keys], dout[rows])
        wanted = reference([x[None] for x in parts], seen)[:4]
        got = (out[rows], found[0][rows], found[1][keys], found[2][keys])
        for x, y in zip(got, wanted, strict=True):
            np.testing.assert_allclose(x[None], y, atol=2e-5, rtol=1e-4)


def test_over_capacity_is_nan() -> None:
    keep = dense(lambda i, j: (i < 64) | (j < 64), 200, 200)
    q, k, v, dout = tensors(200, 200)
    few = masks.from_bool(keep, block=64, capacity=6)  # of 7, the last one of which is needed last
    out = strobe.attention(q, k, v, mask=few)
    assert np.isnan(out[:, 192:]).all()
    wanted = reference((q, k, v, dout), keep)[0]
    np.testing.assert_allclose(out[:, :192], wanted[:, :192], atol=2e-5)
    sinks = np.zeros(2, np.float32)
    out, lse = strobe.attention(q, k, v, mask=few, sinks=sinks, return_lse=True)
    more: dict[str, Any] = {"mask": few, "sinks": sinks, "return_dsinks": True}
    *_, dsinks = strobe.attention_backward(dout, q, k, v, out, lse, **more)
    assert np.isnan(dsinks).all()
    check(q, k, v, dout, keep, mask=masks.from_bool(keep, block=64, capacity=(7, 1)))


def test_with_a_cache() -> None:
    """Keys are counted from the first one that a sequence has."""
    rng = np.random.default_rng(9)
    q, k, v, _ = tensors(20, 200, batch=2)
    keep = rng.random((2, 1, 20, 200)) < 0.3
    pads, used = np.array([3, 0], np.int32), np.array([150, 200], np.int32)
    options: dict[str, Any] = {"leftpad": pads, "seqused_k": used, "mask": masks.from_bool(keep)}
    out = strobe.attention_with_kvcache(q, k, v, **options)
    for b in range(2):
        keys = slice(pads[b], used[b])
        seen = keep[b : b + 1, :, :, : used[b] - pads[b]]
        rows = slice(b, b + 1)
        wanted = reference((q[rows], k[rows, keys], v[rows, keys], q[:1]), seen)[0]
        np.testing.assert_allclose(out[b : b + 1], wanted, atol=2e-5)


def test_a_mask_over_a_cache_is_for_the_room_that_a_sequence_has() -> None:
    """Which neither the blocks of a mask nor its words tell: 97 keys have two, and so have 100."""
    parents = np.array([-1, 0, 0])
    q, k, v, _ = tensors(3, 16, batch=12)
    table = np.arange(12, dtype=np.int32).reshape(1, 12)
    used = np.array([97], np.int32)
    call: Any = strobe.attention_with_kvcache
    short, whole = masks.tree(parents, context=94), masks.tree(parents, context=94, keys=12 * 16)
    assert whole.shape == (1, 1, 3, 192)
    assert not whole.dense()[:, 97:].any()
    assert np.array_equal(whole.dense()[:, :97], short.dense())
    options = {"seqused_k": used, "block_table": table}
    with pytest.raises(strobe.InvalidArgument, match=r"mask is for 97 keys, and the cac.* 192"):
        call(q[:1], k, v, mask=short, **options)
    out = call(q[:1], k, v, mask=whole, **options)
    # A part of the table that just holds them: seven pages.
    few = {"seqused_k": used, "block_table": table[:, :7]}
    again = call(q[:1], k, v, mask=masks.tree(parents, context=94, keys=112), **few)
    np.testing.assert_allclose(again, out, atol=1e-6)
    rows = [x.reshape(1, -1, *x.shape[2:])[:, :97] for x in (k, v)]
    np.testing.assert_allclose(strobe.attention(q[:1], *rows, mask=short), out, atol=2e-5)
    entries = {"cache_batch_idx": np.array([2], np.int32), "mask": masks.tree(parents)}
    with pytest.raises(strobe.InvalidArgument, match="for 3 keys, and the cache has room for 16"):
        call(q[:1], k, v, **entries)


def test_a_tree_of_drafts_over_pages() -> None:
    """Speculative decoding: the tokens of a tree are appended, each sees the text before and the
    tokens that lead to it. Two heads share the keys; pages that are in no list are nobody's."""
    rng = np.random.default_rng(10)
    parents, page, columns, used = np.array([-1, 0, 0, 1, 1, 2]), 16, 20, 250
    tokens = len(parents)
    table = rng.permutation(40)[: 2 * columns].reshape(2, columns).astype(np.int32)
    k, v = rng.standard_normal((2, 40, page, 1, 32)).astype(np.float32)
    q = rng.standard_normal((2, tokens, 2, 32)).astype(np.float32)
    k_new, v_new = rng.standard_normal((2, 2, tokens, 1, 32)).astype(np.float32)
    seen = np.zeros((tokens, columns * page), bool)
    seen[:, :20] = seen[:, 200:used] = True
    for token in range(tokens):
        at = token
        while at >= 0:
            seen[token, used + at] = True
            at = parents[at]
    mask = masks.from_bool(seen, block=64)
    options = {"seqused_k": np.full(2, used, np.int32), "k_new": k_new, "v_new": v_new}
    out = strobe.attention_with_kvcache(q, k, v, block_table=table, mask=mask, **options)
    end = used + tokens
    for b in range(2):
        rows = slice(b, b + 1)
        keys, values = (x[table[b]].reshape(1, -1, 1, 32)[:, :end] for x in (k, v))
        assert np.array_equal(keys[0, used:], k_new[b])
        wanted = reference((q[rows], keys, values, q[rows]), seen[None, None, :, :end])[0]
        np.testing.assert_allclose(out[rows], wanted, atol=2e-5)


def test_what_is_wrong_is_said() -> None:
    q, k, v, _ = tensors(100, 100)
    mask = masks.sliding(100, left=3)
    long, short = masks.sliding(5000, left=3), masks.sliding(97, left=3)  # short: as many blocks
    starts = np.array([0, 60, 100], np.int32)
    of_packed = masks.from_bool(
        np.ones((100, 60), bool), cu_seqlens_q=starts, cu_seqlens_k=starts
    )
    of_sequences = masks.from_bool(np.ones((2, 1, 100, 100), bool))
    call: Any = strobe.attention
    for options, words in (
        ({"mask": masks.sliding(101, left=3)}, "mask is for 101 queries, and q has 100"),
        ({"mask": masks.sliding(100, 101, left=3)}, "mask is for 101 keys, and k has 100"),
        ({"mask": of_packed}, "mask is of packed sequences, expected one for 100 queries"),
        # With as many words as a mask of two heads has.
        ({"mask": of_sequences}, "mask is for 2 sequences, and q has 1"),
        ({"mask": masks.from_bool(np.ones((1, 3, 100, 100), bool))}, "mask is for 3 heads, and q"),
        ({"mask": long.packed, "mask_layout": mask.layout}, "it was made for others"),
        ({"mask": np.ones((100, 100), bool)}, r"strobe\.masks\.from_bool\(keep\)"),
        ({"mask": mask.packed}, "mask is an array with mask_layout = 0, expected a strobe.masks.M"),
        ({"mask_layout": mask.layout}, "mask_layout is given with mask = None"),
        ({"mask": [1]}, r"mask is of type list, .* strobe\.masks\.Mask: .*from_bool\(keep\)"),
    ):
        for function in (call, strobe.plan):
            with pytest.raises(strobe.InvalidArgument, match=words):
                function(q, k, v, **options)
    with pytest.raises(TypeError, match=r"'bias' here, one of bools mask=strobe\.masks\.from_bool"):
        call(q, k, v, attn_mask=np.ones((100, 100), bool))
    with pytest.raises(strobe.InvalidArgument, match="mask: seqlen_q is 97, not 100: expected"):
        call(q, k, v, mask=short.packed, mask_layout=short.layout)
    other = mask.packed.copy()
    other[0] = 0
    with pytest.raises(strobe.InvalidArgument, match="mask: its first word is 0"):
        call(q, k, v, mask=other, mask_layout=mask.layout)
    out = call(q, k, v, mask=mask.packed, mask_layout=mask.layout)
    assert np.array_equal(out, call(q, k, v, mask=mask))
    # What stands for all stands for any of them.
    assert np.array_equal(mask.dense(7, 9), mask.dense())
    each = masks.from_bool(np.ones((2, 3, 7, 8), bool))
    of_one = masks.from_bool(
        np.ones((100, 100), bool), cu_seqlens_q=starts[::2], cu_seqlens_k=starts[::2]
    )
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: masks.from_bool(np.zeros((3, 3))), "keep is float64"),
        (lambda: masks.from_bool(np.zeros((3, 3), bool), block=32), "block = 32, expected 64, 128"),
        (lambda: masks.documents(np.array([0, 1, 0])), "document 0 has keys at two places"),
        (lambda: masks.tree(np.array([0, 1])), r"parents\[0\] = 0, expected -1 \(a root\) or"),
        (lambda: masks.tree(np.array([[-1], [-2]])), r"parents\[1, 0\] = -2, expected -1"),
        (lambda: masks.tree(np.array([-1, 0]), context=9, keys=10), "keys = 10, expected at least"),
        (lambda: masks.blocks(np.ones((2, 2), bool), 100), r"expected bool \(batch, heads, 1, 1\)"),
        (lambda: masks.prefix(-1, 10), "length = -1, expected at least 0"),
        (lambda: masks.prefix(np.array([3, -2]), 10), "length = -2, expected at least 0"),
        (lambda: masks.from_bool([[True], [True, False]]), "keep is no array: "),
        (lambda: masks.Mask(mask.packed, (1, 9, 9), (64, 64), 1, 1), "shape of a Mask = "),  # type: ignore[arg-type]
        (lambda: masks.Mask(mask.packed, (1, 1, 9, 9), 64, 1, 1), "block of a Mask = 64, exp"),  # type: ignore[arg-type]
        (lambda: masks.sliding(10, left=-1), "left = -1, expected at least 0"),
        (lambda: masks.sliding(10, left=1, capacity=0), "capacity = 0, expected 1 to 268435455"),
        (lambda: masks.from_block_mask(3), "expected PyTorch's BlockMask"),
        (lambda: masks.from_bool(np.ma.masked_array(np.ones((3, 3), bool))), "keep is a numpy.ma"),
        (lambda: masks.documents(np.ma.masked_array([0, 1])), "ids is a numpy.ma.MaskedArray"),
        (lambda: each.dense(2, 0), "sequence = 2, expected one of the mask's 2"),
        (lambda: each.tiles(0, 3), "head = 3, expected one of the mask's 3"),
        (lambda: each.tiles(-1, 0), "sequence = -1, expected at least 0"),
        (lambda: mask.dense(-1), "sequence = -1, expected at least 0"),
        (lambda: of_packed.tiles(2), "sequence = 2, expected one of the mask's 2"),
        (lambda: of_one.dense(1), "sequence = 1, expected one of the mask's 1"),
        (lambda: strobe.draw(each, 0, "a"), "head = 'a', expected an integer"),  # type: ignore[arg-type]
        (lambda: strobe.draw(3), "mask is 3, expected a strobe.masks.Mask"),  # type: ignore[arg-type]
    ]
    for function, words in wrong:
        with pytest.raises(strobe.InvalidArgument, match=words):
            function()


def test_empty_lists() -> None:
    """NumPy takes them for floats."""
    assert masks.tree([]).shape == (1, 1, 0, 0)
    assert not masks.from_lists([[], [], []], 384).dense().any()


def test_draw() -> None:
    mask = masks.documents(IDS, block=64)
    picture = strobe.draw(mask)
    assert picture._repr_svg_() == picture
    found = xml.dom.minidom.parseString(picture)
    assert found.documentElement is not None
    assert found.documentElement.tagName == "svg"
    tiles = mask.tiles()
    for kind, word in ((2, "full"), (1, "partial"), (0, "skipped")):
        assert f"{word} {np.mean(tiles == kind):.1%}" in picture
    many = strobe.draw(masks.sliding(64 * 300, left=100, block=64))
    assert "3 x 3 drawn as one" in many
    assert len(many) < 60000
    for queries, keys in ((0, 0), (0, 70), (70, 0)):
        assert strobe.draw(masks.sliding(queries, keys, left=1)).startswith("<svg")


def test_memory_is_as_little_as_it_may_be() -> None:
    """A window over 16,384 positions: some hundred blocks, of which each has its bits."""
    mask = masks.sliding(16384, left=200)
    assert (mask.capacity, mask.partial_capacity) == (3 * 128 - 3, 3 * 128 - 3)
    assert mask.packed.nbytes < 2 * 3 * 128 * 2048 + 65536
    # One row of blocks that sees all takes its own room alone.
    wide = masks.global_window(16384, left=200, right=0, tokens=64)
    assert wide.packed.nbytes < 2.1 * mask.packed.nbytes
    assert mask.packed.ctypes.data % 16 == 0


def test_the_figures_of_the_page_are_what_draw_makes() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts/draw_masks.py"
    done = subprocess.run([sys.executable, str(script), "--check"], check=False, text=True)
    assert done.returncode == 0


def test_a_mask_that_is_dropped_is_let_go_of_at_once() -> None:
    x = np.ones((1, 70, 2, 16), np.float32)
    gc.disable()
    try:
        mask = masks.from_bool(np.tri(70, dtype=bool))
        there = weakref.ref(mask.packed)
        out, lse = strobe.attention(x, x, x, mask=mask, return_lse=True)
        strobe.attention_backward(x, x, x, x, out, lse, mask=mask)
        assert there() is not None
        del mask
        assert there() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": (1, 2, 3)}, "expected one number or two"),
        ({"block": 64.0}, "block = 64.0, expected an integer"),
        ({"block": (64, 128, 64)}, "expected 64, 128 or 256, or two of these"),
    ],
)
def test_odd_room_and_blocks_are_refused(options: Any, message: str) -> None:
    with pytest.raises(strobe.InvalidArgument, match=message):
        masks.from_bool(np.ones((8, 8), bool), **options)


CU = ("cu_seqlens_q", "cu_seqlens_k")


@pytest.mark.parametrize("of_torch", [False, True])
def test_a_mask_of_other_packed_sequences_is_refused(of_torch: bool) -> None:
    """As many rows and blocks do not make it the same."""
    made, other, more = ([0, 30, 70], [0, 40, 70], [0, 10, 20, 30, 70])
    keep = np.ones((70, 40), bool)
    mask = masks.from_bool(keep, cu_seqlens_q=np.array(made), cu_seqlens_k=np.array(made))
    q = np.random.default_rng(0).standard_normal((70, 2, 32), np.float32)
    attention: Any = strobe.attention
    whole = attention(q, q, q, **dict.fromkeys(CU, np.array(made, np.int32)))
    if of_torch:
        torch = pytest.importorskip("torch")
        from strobe.torch import attention as attention_of_torch

        q, attention = torch.from_numpy(q), attention_of_torch

    def call(begins_q: Any, begins_k: Any) -> Any:
        begins: list[Any] = [np.array(x, np.int32) for x in (begins_q, begins_k)]
        if of_torch:
            begins = [torch.from_numpy(x) for x in begins]
        longest = {"max_seqlen_q": 60, "max_seqlen_k": 60}
        return attention(q, q, q, mask=mask, **dict(zip(CU, begins, strict=True)), **longest)

    np.testing.assert_allclose(np.asarray(call(made, made)), whole, atol=1e-6)
    wrong = "= 40, expected 30: the mask was made for sequences that begin there"
    for side, begins in (("q", (other, other)), ("k", (made, other))):
        with pytest.raises(strobe.InvalidArgument, match=rf"cu_seqlens_{side}\[1\] {wrong}"):
            call(*begins)
    with pytest.raises(strobe.InvalidArgument, match="for 2 sequences, and cu_seqlens_q has 4"):
        call(more, more)


@pytest.mark.parametrize("of_torch", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("source", ["bools", "intervals"])
def test_packed_queries_over_a_cache(source: str, paged: bool, of_torch: bool) -> None:
    """Each row against dense attention over the keys that it sees; other heads have other masks."""
    rng = np.random.default_rng(31)
    begins, room = np.array([0, 3, 3, 8, 9], np.int32), 192
    used = np.array([150, 7, room, 1], np.int32)
    shapes = ((9, 4, 32), (4, room, 2, 32), (4, room, 2, 32))
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    ends = rng.integers(0, room + 9, (4, 9, 2, 2), np.int32)
    ends[..., 1, :] = 0
    keep = rng.random((4, 9, room)) < 0.3
    if source == "intervals":
        keys = np.arange(room)
        keep = (keys >= ends[..., 0, :1]) & (keys < ends[..., 0, 1:])
    kinds: Any = np.asarray
    call: Any = strobe.attention_with_kvcache
    if of_torch:
        torch = pytest.importorskip("torch")
        kinds = torch.from_numpy
    given = kinds(np.ascontiguousarray(keep) if source == "bools" else ends.reshape(4, 9, 4))
    make: Any = masks.from_bool if source == "bools" else masks.from_intervals
    sizes = {} if source == "bools" else {"seqlen_k": room}
    mask = make(given, block=64, cu_seqlens_q=kinds(begins), **sizes)
    assert mask.shape == (4, 4, 9, room)
    for b, head in ((0, 1), (2, 3), (3, 0)):
        assert np.array_equal(mask.dense(b, head), keep[head, begins[b] : begins[b + 1]])
    more: dict[str, Any] = {}
    k_cache, v_cache = k, v
    if paged:
        table = rng.permutation(4 * room // 16).astype(np.int32).reshape(4, -1)
        k_cache, v_cache = np.zeros((2, 4 * room // 16, 16, 2, 32), np.float32)
        for pages, rows in ((k_cache, k), (v_cache, v)):
            pages[table.ravel()] = rows.reshape(-1, 16, 2, 32)
        more["block_table"] = kinds(table)
    options = {"cu_seqlens_q": kinds(begins), "max_seqlen_q": 5, "seqused_k": kinds(used), **more}
    out = np.asarray(call(*(kinds(x) for x in (q, k_cache, v_cache)), mask=mask, **options))
    for row in range(9):
        b = int(np.searchsorted(begins, row, "right")) - 1
        for head in range(4):
            seen = np.flatnonzero(keep[head, row, : used[b]])
            wanted = np.zeros(32)
            if len(seen):
                scores = k[b, seen, head // 2].astype(np.float64) @ q[row, head] / 32**0.5
                weights = np.exp(scores - scores.max())
                wanted = weights @ v[b, seen, head // 2] / weights.sum()
            np.testing.assert_allclose(out[row, head], wanted, atol=2e-5, rtol=1e-4)


def test_masks_of_packed_queries_are_for_packed_keys_or_for_a_cache() -> None:
    rng = np.random.default_rng(0)
    shapes = ((2, 100, 2, 32), (2, 100, 2, 32), (8, 2, 32), (200, 2, 32))
    k, v, q, k_packed = (rng.standard_normal(shape, np.float32) for shape in shapes)
    begins, keep = np.array([0, 3, 8], np.int32), np.ones((8, 100), bool)
    packed: dict[str, Any] = {"cu_seqlens_q": begins, "max_seqlen_q": 5}

    def attend(mask: Any, cached: bool = True) -> Any:
        if cached:
            return strobe.attention_with_kvcache(q, k, v, mask=mask, **packed)
        starts = np.array([0, 100, 200], np.int32)
        packed_k: dict[str, Any] = {"cu_seqlens_k": starts, "max_seqlen_k": 100}
        return strobe.attention(q, k_packed, k_packed, mask=mask, **packed, **packed_k)

    def refused(match: str, mask: Any, cached: bool = True) -> None:
        with pytest.raises(strobe.InvalidArgument, match=match):
            attend(mask, cached)

    for keys in ([0, 100, 200], [0, 100, 100]):
        mask = masks.from_bool(keep, cu_seqlens_q=begins, cu_seqlens_k=np.array(keys))
        refused("^mask is of packed keys, expected one for keys in a cache: make it w", mask)
    cached = masks.from_bool(keep, cu_seqlens_q=begins)
    attend(cached)
    refused("^mask is for keys in a cache, expected one of packed keys: m", cached, cached=False)
    few = masks.from_bool(keep[:, :97], cu_seqlens_q=begins)  # as many blocks
    refused("^mask is for 97 keys, and the cache has room for 100: make it for 100", few)
    other = masks.from_bool(keep, cu_seqlens_q=np.array([0, 4, 8]))
    refused(r"^cu_seqlens_q\[1\] = 3, expected 4: the mask was made for", other)
    for of_each in (masks.from_bool(keep), masks.from_bool(keep[None].repeat(2, axis=0))):
        for is_cached in (True, False):
            refused("^mask is for 8 queries, expected one of packed que", of_each, is_cached)
    with pytest.raises(strobe.InvalidArgument, match=r"^mask is of packed sequences, expected"):
        strobe.attention_with_kvcache(q[None].repeat(2, axis=0), k, v, mask=cached)
    with pytest.raises(strobe.InvalidArgument, match=r"^total_k = 5, expected None: it belongs"):
        masks.from_bool(keep, cu_seqlens_q=begins, total_k=5)
    with pytest.raises(strobe.InvalidArgument, match=r"^cu_seqlens_q = None, expected an arr"):
        masks.from_bool(keep, cu_seqlens_k=begins)
    intervals = np.zeros((8, 2), np.int32)
    with pytest.raises(strobe.InvalidArgument, match=r"^cu_seqlens_k and seqlen_k = None, exp"):
        masks.from_intervals(intervals, cu_seqlens_q=begins)


def test_numbers_near_the_end_of_64_bits() -> None:
    high = 2**63 - 1
    assert masks.sliding(6, left=0, right=high).dense().sum() == 21
    assert masks.global_window(6, left=high, right=high, tokens=0).dense().all()
    ids = np.repeat(np.array([2**63 + 1, 5, high], np.uint64), 3)
    with pytest.raises(strobe.InvalidArgument, match=rf"^ids has {2**63 + 1}, expected at most"):
        masks.documents(ids)
    assert masks.documents(ids[3:]).dense()[3:, 3:].all()
    with pytest.raises(strobe.InvalidArgument, match=r"^length has \d+, expected at most"):
        masks.prefix(np.array([2**64 - 1], np.uint64), 6)
    with pytest.raises(strobe.InvalidArgument, match="expected 0 to 2147483647"):
        masks.prefix(3, 2**31)
    with pytest.raises(strobe.InvalidArgument, match="expected 0 to 2147483647"):
        masks.sliding(2**31, left=1)


def test_uint64_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    intervals = torch.zeros(1, 1, 6, 2, dtype=torch.int64)
    intervals[..., 1] = -1  # 2**64 - 1
    assert masks.from_intervals(intervals.view(torch.uint64), 6).dense().all()
    with pytest.raises(strobe.InvalidArgument, match=r"^ids has numbers from"):
        masks.documents(torch.tensor([-1, 5]).view(torch.uint64))


def test_packed_masks_say_which_rows_they_are_for() -> None:
    """Rows of k past the last sequence belong to the mask, and are said when it is made."""
    starts = np.array([0, 5, 12], np.int32)
    of_both: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    q, k = np.ones((12, 2, 16), np.float32), np.ones((20, 2, 16), np.float32)
    call: dict[str, Any] = {**of_both, "max_seqlen_q": 7, "max_seqlen_k": 7}
    keep = np.ones((12, 7), bool)
    wrong = "mask is for 12 rows of k, and k has 20: make it with total_k=20"
    with pytest.raises(strobe.InvalidArgument, match=wrong):
        strobe.attention(q, k, k, mask=masks.from_bool(keep, **of_both), **call)
    mask = masks.from_bool(keep, total_k=20, **of_both)
    assert strobe.attention(q, k, k, mask=mask, **call).shape == q.shape


@pytest.mark.parametrize("name", ["max_seqlen_q", "total_k"])
def test_sizes_of_packed_sequences_need_sequences(name: str) -> None:
    size: dict[str, Any] = {name: 7}
    wrong = f"{name} = 7, expected None: it belongs to cu_seqlens_{name[-1]}$"
    with pytest.raises(strobe.InvalidArgument, match=wrong):
        masks.from_bool(np.ones((4, 4), bool), **size)
    with pytest.raises(strobe.InvalidArgument, match=wrong):
        masks.from_intervals(np.zeros((4, 2), np.int32), **size)


def test_an_infinite_scale_is_refused_in_python_s_words() -> None:
    q = np.ones((1, 4, 2, 16), np.float32)
    with pytest.raises(strobe.InvalidArgument, match="finite number, or None for the default"):
        strobe.attention(q, q, q, scale=float("inf"))
