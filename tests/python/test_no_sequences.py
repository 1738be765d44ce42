"""A batch of no sequences: empty results, forward and backward, at every door, after the checks
that any other batch gets; and zeros where all sequences share a gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strobe

F = np.float32
Q, KV = np.empty((0, 5, 4, 16), F), np.empty((0, 7, 2, 16), F)
ROWS, KEYS, NO_OFFSETS = np.empty((0, 4, 16), F), np.empty((0, 2, 16), F), np.zeros(1, np.int32)
NONE = np.empty(0, np.int32)
PACKED = {"cu_seqlens_q": NO_OFFSETS, "cu_seqlens_k": NO_OFFSETS}


def shapes(results: Any) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in results]


# ------------------------------------------------------------------------------------------ arrays


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "window": (3, 2), "softcap": 2.0, "threads": 1},
        {"alibi_slopes": np.empty((0, 4), F), "dropout_p": 0.3},
        {"seqused_q": NONE, "seqused_k": NONE, "q_position": NONE, "attention_chunk": 4},
        {"prefix": NONE, "batch_invariant": True},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_attention_and_its_derivative(options: dict[str, Any], dtype: str) -> None:
    for tensors, more, wanted, lse_shape in (
        ((Q, KV, KV), {}, (0, 5, 4, 16), (0, 4, 5)),
        ((ROWS, KEYS, KEYS), PACKED, (0, 4, 16), (4, 0)),
        ((ROWS, KEYS, KEYS), {**PACKED, "max_seqlen_q": 9, "max_seqlen_k": 3}, (0, 4, 16), (4, 0)),
    ):
        q, k, v = (x.astype(dtype) for x in tensors)
        given: dict[str, Any] = {**options, **more}
        out, lse = strobe.attention(q, k, v, return_lse=True, **given)
        assert shapes((out, lse)) == [wanted, lse_shape]
        assert (out.dtype, lse.dtype) == (np.dtype(dtype), np.dtype(F))
        mine = np.empty_like(out)
        assert strobe.attention(q, k, v, out=mine, **given) is mine
        found = strobe.attention_backward(out, q, k, v, out, lse, dlse=lse, **given)
        assert shapes(found) == shapes((q, k, v))
        grads = (np.empty_like(q), np.empty_like(k), np.empty_like(v))
        found = strobe.attention_backward(out, q, k, v, out, lse, grads=grads, **given)
        assert all(a is b for a, b in zip(found, grads, strict=True))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(1, 4, 5, 7), (1, 1, 1, 7), (0, 4, 5, 7)])
def test_sums_over_no_sequences_are_zero(kind: str, shape: tuple[int, ...]) -> None:
    """The gradients of what all sequences share have elements, in new arrays and in given ones."""
    make = pytest.importorskip("torch").full if kind == "torch" else np.full
    q, kv, bias, sinks = (make(x, 7.0) for x in ((0, 5, 4, 16), (0, 7, 2, 16), shape, (4,)))
    lse = make((0, 4, 5), 7.0)
    if kind == "numpy":
        q, kv, bias, sinks, lse = (x.astype(F) for x in (q, kv, bias, sinks, lse))
    arguments, options = (q, q, kv, kv, q, lse), {"bias": bias, "sinks": sinks}
    for _ in range(3):  # memory that was given back may hold zeros by chance
        spoiled = make((1, 4, 5, 7), 3.0)
        del spoiled
        found = strobe.attention_backward(*arguments, dbias=True, return_dsinks=True, **options)
        assert shapes(found[3:]) == [(4,), shape]
        assert all(not np.any(np.asarray(x)) for x in found)
    for accumulate in (False, True):
        given = [x + 1 for x in (q, kv, kv, sinks, bias)]
        found = strobe.attention_backward(
            *arguments,
            grads=tuple(given[:4]),
            dbias=given[4],
            return_dsinks=True,
            accumulate=accumulate,
            **options,
        )
        assert all(x is y for x, y in zip(found, given, strict=True))
        assert np.all(np.asarray(given[3]) == 8 * accumulate)
        assert not np.any(np.asarray(given[4]))


@pytest.mark.parametrize("entries", [0, 3])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_caches(entries: int, paged: bool, packed: bool) -> None:
    k, v = np.zeros((entries, 9, 2, 16), F), np.zeros((entries, 9, 2, 8), F)
    options: dict[str, Any] = {"seqused_k": NONE, "causal": True, "leftpad": NONE}
    if paged:
        options["block_table"] = np.empty((0, 4), np.int32)
    q, new = (ROWS, KEYS) if packed else (Q, KV)
    if packed:
        options |= {"cu_seqlens_q": NO_OFFSETS, "cu_seqlens_k_new": NO_OFFSETS}
    options |= {"k_new": new, "v_new": new[..., :8], "rotary_cos": np.ones((9, 4), F)}
    options["rotary_sin"] = options["rotary_cos"]
    for out_dtype in (None, "float32"):
        found = strobe.attention_with_kvcache(
            *(q, k, v),
            out_dtype=out_dtype,
            return_lse=True,
            **options,
        )
        assert shapes(found) == [(*q.shape[:-1], 8), (4, 0) if packed else (0, 4, 5)]
    assert not k.any()


def test_merge_and_dropout_mask() -> None:
    for rows in ((0, 5), (3, 0), (0,)):
        outs = np.empty((2, *rows, 4, 16), F)
        lses = np.empty((2, *rows[:-1], 4, rows[-1]), F)
        for given in ((outs, lses), (list(outs), list(lses))):
            out, lse = strobe.merge(*given, out_dtype="float16")
            assert shapes((out, lse)) == [outs.shape[1:], lses.shape[1:]]
        with pytest.raises(strobe.InvalidArgument, match=r"threads = -1"):
            strobe.merge(outs, lses, threads=-1)
        with pytest.raises(strobe.InvalidArgument, match=r"\(head_dim_v\) = 6000, expected 1 to"):
            strobe.merge(np.empty((2, *rows, 4, 6000), F), lses)
    assert strobe.dropout_mask(0, 2, 3, 4, dropout_p=0.5).shape == (0, 2, 3, 4)
    with pytest.raises(strobe.InvalidArgument, match="dropout_p = 2, expected"):
        strobe.dropout_mask(0, 2, 3, 4, dropout_p=2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"k": np.empty((2, 7, 2, 16), F)}, "k.shape[0] = 2, expected 0 (batch of q)"),
        ({"k": np.empty((0, 7, 3, 16), F), "v": np.empty((0, 7, 3, 16), F)}, "(heads) = 4, expec"),
        ({n: np.empty((0, 7, 2, 300), F) for n in "qkv"}, "(head_dim) = 300, expected 1 to 256"),
        ({"q": Q.astype(float)}, "q.dtype = float64"),
        ({"softcap": -1.0}, "softcap = -1, expected"),
        ({"seqused_k": np.zeros(1, np.int32)}, "seqused_k.shape[0] = 1, expected 0 (batch of q)"),
        ({"alibi_slopes": np.empty((0, 3), F)}, "alibi_slopes.shape[1] = 3, expected 4"),
        ({"out": np.empty((1, 5, 4, 16), F)}, "out.shape[0] = 1, expected 0"),
    ],
)
def test_what_is_wrong_is_refused(changes: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"q": Q, "k": KV, "v": KV, **changes}
    with pytest.raises(strobe.InvalidArgument) as caught:
        strobe.attention(**given)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": np.empty((3, 4, 16), F)}, "q.shape[0] = 3, expected 0: there are no sequences"),
        ({"k": np.empty((3, 2, 16), F), "v": np.empty((3, 2, 16), F)}, "k.shape[0] = 3, expected"),
        ({"cu_seqlens_k": np.zeros(3, np.int32)}, "cu_seqlens_k.shape[0] = 3, expected 1"),
        ({"cu_seqlens_q": np.zeros(3, np.int32)}, "cu_seqlens_k.shape[0] = 1, expected 3"),
        ({"cu_seqlens_q": NONE}, "cu_seqlens_q.shape[0] = 0, expected at least 1 (batch + 1)"),
        ({"max_seqlen_q": -1}, "max_seqlen_q = -1, expected 0 to"),
    ],
)
def test_what_is_wrong_with_packed_sequences_is_refused(changes: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"q": ROWS, "k": KEYS, "v": KEYS, **PACKED, **changes}
    with pytest.raises(strobe.InvalidArgument) as caught:
        strobe.attention(**given)
    assert text in str(caught.value)


def test_there_is_no_plan_for_them() -> None:
    for given in ({}, PACKED):
        tensors = (ROWS, KEYS, KEYS) if given else (Q, KV, KV)
        options: dict[str, Any] = {**given}
        with pytest.raises(strobe.InvalidArgument, match=r"batch.* = 0, expected 1 to"):
            strobe.plan(*tensors, **options)
        assert "= 0, expected 1 to" in strobe.why(*tensors, **options)


# ----------------------------------------------------------------------------------------- PyTorch


def with_gradients(function: Any, *tensors: Any) -> None:
    """Calls function with tensors that require gradients, and goes back."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    found = function(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    assert all(x.numel() == 0 for x in found)
    sum(x.sum() for x in found if x.requires_grad).backward()
    assert [x.grad.shape for x in leaves] == [x.shape for x in tensors]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_flash_attn(dropout_p: float) -> None:
    torch = pytest.importorskip("torch")
    from strobe import flash_attn, flash_attn_3

    q, kv, rows, keys, no = map(torch.from_numpy, (Q, KV, ROWS, KEYS, NO_OFFSETS))
    options: Any = {"dropout_p": dropout_p, "causal": True, "return_attn_probs": True}
    three: Any = flash_attn_3
    lengths = (no, no, 3, 3)
    out, lse, weights = flash_attn.flash_attn_func(q, kv, kv, **options)
    assert shapes((out, lse)) == [(0, 5, 4, 16), (0, 4, 5)]
    assert weights.numel() == 0
    out, lse, _ = flash_attn.flash_attn_varlen_func(rows, keys, keys, *lengths, **options)
    assert shapes((out, lse)) == [(0, 4, 16), (4, 0)]
    for function, tensors, more in (
        (flash_attn.flash_attn_func, (q, kv, kv), ()),
        (flash_attn.flash_attn_qkvpacked_func, (torch.empty(0, 5, 3, 4, 16),), ()),
        (flash_attn.flash_attn_kvpacked_func, (q, torch.empty(0, 7, 2, 2, 16)), ()),
        (flash_attn.flash_attn_varlen_func, (rows, keys, keys), lengths),
        (flash_attn.flash_attn_varlen_qkvpacked_func, (torch.empty(0, 3, 4, 16),), (no, 3)),
        (flash_attn.flash_attn_varlen_kvpacked_func, (rows, torch.empty(0, 2, 2, 16)), lengths),
    ):
        kinds: tuple[dict[str, Any], ...] = ({}, options)
        for kind in kinds:
            with_gradients(lambda *x, f=function, m=more, k=kind: f(*x, *m, **k), *tensors)
    with_gradients(three.flash_attn_func, q, kv, kv)
    with_gradients(lambda *x: three.flash_attn_varlen_func(*x, *lengths), rows, keys, keys)
    with_gradients(
        lambda *x: three.flash_attn_varlen_func(*x, *lengths, seqused_q=no[:0]),
        *(rows, keys, keys),
    )
    cache = torch.zeros(3, 9, 2, 16)
    for call in (flash_attn.flash_attn_with_kvcache, flash_attn_3.flash_attn_with_kvcache):
        for length in (3, no[:0], None):
            found = call(q, cache, cache, cache_seqlens=length, return_softmax_lse=True)
            assert shapes(found) == [(0, 5, 4, 16), (0, 4, 5)]
    found = flash_attn_3.flash_attn_with_kvcache(
        rows, cache, cache, keys, keys, cu_seqlens_q=no, cu_seqlens_k_new=no, cache_seqlens=no[:0],
        page_table=torch.empty(0, 2).int(), return_softmax_lse=True,
    )  # fmt: skip
    assert shapes(found) == [(0, 4, 16), (4, 0)]
    out = flash_attn.flash_attn_varlen_func(
        rows.requires_grad_(), cache, cache, *lengths, block_table=torch.empty(0, 2).int()
    )
    assert tuple(out.shape) == (0, 4, 16)
    found = flash_attn_3.flash_attn_combine(torch.empty(3, 0, 5, 4, 16), torch.empty(3, 0, 5, 4))
    assert shapes(found) == [(0, 5, 4, 16), (0, 5, 4)]


def test_operators_and_transforms() -> None:
    torch = pytest.importorskip("torch")
    from strobe.flash_attn import flash_attn_func, flash_attn_varlen_func

    q, kv, rows, keys, no = map(torch.from_numpy, (Q, KV, ROWS, KEYS, NO_OFFSETS))
    plain = (0.0, None, True, -1, -1, 0.0, False)
    operator = torch.ops.strobe.attention_forward
    with_gradients(lambda *x: operator(*x, *[None] * 6, *plain), q, kv, kv)
    for longest in (None, 3):  # of one offset the longest sequence is known
        lengths = (no, no, None, None, longest, longest)
        with_gradients(lambda *x, n=lengths: operator(*x, *n, *plain), rows, keys, keys)
    compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    with_gradients(compiled, q, kv, kv)
    compiled = torch.compile(flash_attn_varlen_func, backend="aot_eager", fullgraph=True)
    with_gradients(lambda *x: compiled(*x, no, no, 3, 3), rows, keys, keys)
    many = [x[None].expand(3, *x.shape) for x in (q, kv, kv)]
    assert tuple(torch.vmap(flash_attn_func)(*many).shape) == (3, 0, 5, 4, 16)
    gradient = torch.func.grad(lambda x: flash_attn_func(x, kv, kv).sum())
    assert gradient(q).shape == q.shape


# --------------------------------------------------------------------------------------------- JAX


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    import strobe.jax

    attention: Any = strobe.jax.attention
    x = (Q, KV, KV)
    options = {"is_causal": True, "key_value_seq_lengths": NONE, "q_position": NONE}
    for given in ({}, options, {"dropout_p": 0.5, "dropout_seed": 3}):
        out, lse = attention(*x, return_residual=True, **given)
        assert shapes((out, lse)) == [(0, 5, 4, 16), (0, 5, 4)]

        def loss(*x: Any, given: Any = given) -> Any:
            return sum(y.sum() for y in attention(*x, return_residual=True, **given))

        found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*x)
        assert shapes(found) == shapes(x)
    none = [np.empty((0, 2, 5, 4, 16), F)] * 3
    assert jax.vmap(attention)(*none).shape == (0, 2, 5, 4, 16)
    for wrong, text in (
        ((Q, np.empty((2, 7, 2, 16), F), KV), r"k.shape\[0\] = 2, expected 0"),
        ((Q, KV, np.empty((0, 7, 2, 300), F)), r"\(head_dim_v\) = 300"),
    ):
        with pytest.raises(strobe.InvalidArgument, match=text):
            attention(*wrong)
