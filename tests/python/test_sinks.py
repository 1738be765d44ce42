"""Attention sinks: what takes them besides strobe.attention (test_options.py), and odd numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import strobe
from strobe import flash_attn, flash_attn_3

import oracle
from cases import Case, normal

INF = np.inf
SINKS = np.array([0.5, -30, 8, -INF], np.float32)


def inputs(seed: int = 5, **options: Any) -> Any:
    return Case(options=options, with_dlse=True).make(np.random.default_rng(seed))


# ------------------------------------------------------------------------------------- odd numbers


@pytest.mark.parametrize("outside", [False, True])
def test_no_sink_is_minus_infinity_bit_for_bit(outside: bool) -> None:
    x = inputs(causal=True)
    none = np.full(4, -INF, np.float32)
    plain = strobe.attention(x.q, x.k, x.v, causal=True, return_lse=True)
    options: dict[str, Any] = {"causal": True, "sinks": none, "sinks_outside_lse": outside}
    found = strobe.attention(x.q, x.k, x.v, return_lse=True, **options)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(plain, found, strict=True))
    dsinks = strobe.attention_backward(x.dout, x.q, x.k, x.v, *found, return_dsinks=True, **options)
    assert not dsinks[3].any()


@pytest.mark.parametrize("seqlen_q", [3, 37])  # decoded, and not
def test_sinks_of_infinity_and_nan(seqlen_q: int) -> None:
    sinks = np.array([INF, np.nan, 500, -500], np.float32)
    x = Case(seqlen_q=seqlen_q, options={"sinks": sinks}).make(np.random.default_rng(6))
    out, lse = strobe.attention(x.q, x.k, x.v, sinks=sinks, return_lse=True)
    plain, alone = strobe.attention(x.q, x.k, x.v, return_lse=True)
    assert not out[:, :, 0].any()
    assert (lse[:, 0] == INF).all()
    assert np.isnan(out[:, :, 1]).all()
    assert np.isnan(lse[:, 1]).all()
    assert not out[:, :, 2].any()
    assert (lse[:, 2] == 500).all()
    assert np.allclose(out[:, :, 3], plain[:, :, 3])
    assert np.allclose(lse[:, 3], alone[:, 3])
    more: dict[str, Any] = {"sinks": sinks, "return_dsinks": True}
    dq, _, _, dsinks = strobe.attention_backward(x.dout, x.q, x.k, x.v, out, lse, **more)
    assert not dq[:, :, 0].any()
    assert np.isnan(dq[:, :, 1]).all()
    assert not dq[:, :, 2].any()
    assert list(np.isnan(dsinks)) == [False, True, False, False]
    assert dsinks[0] == dsinks[2] == 0


def test_rows_without_keys_have_the_sink_alone() -> None:
    used = np.array([0, 53], np.int32)
    x = inputs(seqused_k=used, sinks=SINKS)
    x.poison_unused()
    x.check()
    x.dout[0] = np.nan  # of rows whose out is 0 whatever it is
    out, lse = strobe.attention(x.q, x.k, x.v, return_lse=True, **x.options)
    assert not out[0].any()
    assert (lse[0] == SINKS[:, None]).all()
    more: dict[str, Any] = {"dlse": x.dlse, "return_dsinks": True, **x.options}
    *_, dsinks = strobe.attention_backward(x.dout, x.q, x.k, x.v, out, lse, **more)
    assert np.isfinite(dsinks).all()


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("value", [1.0, np.nan, np.inf])
def test_a_row_that_a_bias_hides_has_no_key(value: float, outside: bool) -> None:
    """As one that a mask hides, whatever its dout holds."""
    x = inputs(sinks=SINKS, sinks_outside_lse=outside)
    x.dout[:, 5, :, 3] = value
    bias = np.zeros((1, 1, x.q.shape[1], x.k.shape[1]), np.float32)
    keep = np.ones(bias.shape, np.bool_)
    keep[:, :, 5] = False
    hiding = np.where(keep, bias, -np.inf).astype(np.float32)
    found = []
    for more in ({"bias": hiding}, {"bias": bias, "mask": strobe.masks.from_bool(keep)}):
        options: dict[str, Any] = {**x.options, **more}
        out, lse = strobe.attention(x.q, x.k, x.v, return_lse=True, **options)
        assert not out[:, 5].any()
        options |= {"dlse": x.dlse, "return_dsinks": True, "dbias": True}
        grads = strobe.attention_backward(x.dout, x.q, x.k, x.v, out, lse, **options)
        assert not grads[0][:, 5].any()
        assert not grads[4][:, :, 5].any()
        found.append((out, lse, *grads))
    for a, b in zip(*found, strict=True):
        assert np.isfinite(a[a != -np.inf]).all()
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("size", [40.0, 3000.0])  # from 1024 on, lse alone does not tell weights
def test_large_scores_and_sinks(size: float, outside: bool) -> None:
    rng = np.random.default_rng(7)
    x = Case(heads_kv=4, with_dlse=True).make(rng)
    x.q[...] = 0
    x.q[..., 0] = size * np.sqrt(32)
    x.k[..., 0] = 1 + np.arange(53)[:, None] / 53 * 2 / size  # scores from size to size + 2
    x.options = {"sinks": (size + np.array([-1, 0, 1, 3])).astype(np.float32)}
    x.options["sinks_outside_lse"] = outside
    wanted = x.reference()
    out, lse = strobe.attention(x.q, x.k, x.v, return_lse=True, **x.options)
    assert np.allclose(out, wanted.out, atol=2e-3)
    more: dict[str, Any] = {"dlse": x.dlse, "return_dsinks": True, **x.options}
    found = strobe.attention_backward(x.dout, x.q, x.k, x.v, out, lse, **more)
    for name, got in zip(("dq", "dk", "dv", "dsinks"), found, strict=True):
        right = getattr(wanted, name)
        assert np.allclose(got, right, atol=2e-3 * abs(right).max()), name


def test_the_gradient_of_lse_where_the_sink_has_all_weight() -> None:
    """Outside of lse, the sink does not make the gradient of lse smaller."""
    x = inputs(sinks=np.array([30, 70, 100, 1000], np.float32), sinks_outside_lse=True)
    wanted = x.reference()
    out, lse = strobe.attention(x.q, x.k, x.v, return_lse=True, **x.options)
    dq, dk, *_ = strobe.attention_backward(
        x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, **x.options
    )
    assert abs(dq).max() > 0.1
    assert np.allclose(dq, wanted.dq, atol=1e-4)
    assert np.allclose(dk, wanted.dk, atol=1e-4)


def test_the_same_bits_on_every_number_of_threads() -> None:
    x = Case(batch=3, seqlen_q=300, seqlen_k=400).make(np.random.default_rng(8))
    found = set()
    for threads in (1, 2, 3):
        out, lse = strobe.attention(x.q, x.k, x.v, sinks=SINKS, return_lse=True, threads=threads)
        more: dict[str, Any] = {"sinks": SINKS, "threads": threads, "deterministic": True}
        grads = strobe.attention_backward(
            x.dout, x.q, x.k, x.v, out, lse, return_dsinks=True, **more
        )
        found.add(b"".join(g.tobytes() for g in grads))
    assert len(found) == 1


# ------------------------------------------------------------------------------- caches and merging


@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_a_cache(seqlen_q: int) -> None:
    x = Case(seqlen_q=seqlen_q, seqlen_k=700).make(np.random.default_rng(9))
    x.options = {"causal": True, "sinks": SINKS}
    out, lse = strobe.attention_with_kvcache(x.q, x.k, x.v, return_lse=True, **x.options)
    x.check_forward(out, lse)


def test_merge() -> None:
    x = inputs(sinks=SINKS)
    parts = [slice(0, 10), slice(10, 53)]
    found = [strobe.attention(x.q, x.k[:, s], x.v[:, s], return_lse=True) for s in parts]
    outs, lses = (list(each) for each in zip(*found, strict=True))
    out, lse = strobe.merge(outs, lses, sinks=SINKS)
    x.check_forward(out, lse)
    wanted = oracle.merge(np.stack(outs), np.stack(lses), SINKS)
    assert np.allclose(out, wanted[0], atol=1e-6)
    assert np.allclose(lse, wanted[1], atol=1e-5)
    empty = np.full_like(np.stack(lses), -INF)
    out, lse = strobe.merge(np.stack(outs), empty, sinks=SINKS)
    assert not out.any()
    assert (lse == SINKS[None, :, None]).all()
    with pytest.raises(strobe.InvalidArgument, match=r"sinks.shape\[0\] = 3, expected 4"):
        strobe.merge(outs, lses, sinks=SINKS[:3])


# -------------------------------------------------------------------------------------------- torch


def eager(q: Any, k: Any, v: Any, sinks: Any, outside: bool = False) -> Any:
    """As models compute them: one more column of scores, which is dropped after the softmax."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
    every = torch.cat([scores, column], -1)
    out = torch.einsum("bhij,bjhd->bihd", every.softmax(-1)[..., :-1], v)
    return out, (scores if outside else every).logsumexp(-1)


def tensors(dtype: Any = torch.float64) -> list[Any]:
    torch.manual_seed(11)
    q, k, v = torch.randn(2, 37, 4, 32), torch.randn(2, 53, 2, 32), torch.randn(2, 53, 2, 32)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, torch.randn(4))]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("lse", [False, True])
def test_gradients(outside: bool, lse: bool) -> None:
    given, mine = tensors(), tensors(torch.float32)
    wanted = eager(given[0], given[1], given[2], given[3], outside)
    found = strobe.torch.attention(
        *mine[:3], sinks=mine[3], sinks_outside_lse=outside, return_lse=True
    )
    upstream = [torch.randn_like(x) for x in wanted[: 1 + lse]]
    right = torch.autograd.grad(wanted[: 1 + lse], given, upstream)
    got = torch.autograd.grad(found[: 1 + lse], mine, [x.float() for x in upstream])
    for a, b in zip(right, got, strict=True):
        torch.testing.assert_close(b.double(), a, atol=1e-5, rtol=1e-5)


def test_bfloat16_sinks_get_bfloat16_gradients() -> None:
    q, k, v, _ = tensors(torch.float32)
    sinks = torch.randn(4).bfloat16().requires_grad_()
    strobe.torch.attention(q, k, v, sinks=sinks).sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.dtype == torch.bfloat16


def test_sinks_without_a_gradient() -> None:
    q, k, v, sinks = tensors(torch.float32)
    out = strobe.torch.attention(q, k, v, sinks=sinks.detach())
    want = strobe.torch.attention(q, k, v, sinks=sinks)
    first = torch.autograd.grad(out.sum(), (q, k, v))
    again = torch.autograd.grad(want.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_vmap() -> None:
    def loss(sinks: Any, x: Any) -> Any:
        return strobe.torch.attention(x, x, x, sinks=sinks).square().sum()

    torch.manual_seed(12)
    x, sinks = torch.randn(3, 2, 9, 4, 16), torch.randn(3, 4)
    gradient = torch.func.grad(loss)
    for dims, of in (((None, 0), sinks[:1].expand(3, 4)), ((0, 0), sinks)):
        given = sinks if dims[0] == 0 else sinks[0]
        found = torch.func.vmap(gradient, in_dims=dims)(given, x)
        wanted = torch.stack([gradient(s, y) for s, y in zip(of, x, strict=True)])
        torch.testing.assert_close(found, wanted)


def test_compiled() -> None:
    def loss(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return strobe.torch.attention(q, k, v, causal=True, sinks=sinks).square().sum()

    mine = tensors(torch.float32)
    wanted = torch.autograd.grad(loss(*mine), mine)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(*mine), mine), wanted, strict=True):
        torch.testing.assert_close(a, b)


# --------------------------------------------------------------------------- flash_attn's functions

OFFSETS = torch.tensor([0, 20, 40], dtype=torch.int32)


def packed(function: Any, axis: int, *parts: int) -> Any:
    """A call of three tensors by a function of packed ones; parts: how many of q, k and v each of
    its arguments holds.
    """

    def call(*qkv: Any, **options: Any) -> Any:
        x = list(qkv)
        taken = [[x.pop(0) for _ in range(n)] for n in parts]
        return function(*(torch.stack(y, axis) if len(y) > 1 else y[0] for y in taken), **options)

    return call


def varlen(function: Any, longest: tuple[int, ...] = (20, 20)) -> Any:
    """A call of two sequences by a function of packed ones."""

    def call(*tensors: Any, **options: Any) -> Any:
        lengths = (*(OFFSETS,) * len(longest), *longest)
        found = function(*(x.flatten(0, 1) for x in tensors), *lengths, **options)
        out, lse = found[0].unflatten(0, (2, 20)), found[1].unflatten(1, (2, 20))
        return out, lse.transpose(0, 1)

    return call


FORMS: dict[str, Any] = {
    "dense": flash_attn.flash_attn_func,
    "qkvpacked": packed(flash_attn.flash_attn_qkvpacked_func, 2, 3),
    "kvpacked": packed(flash_attn.flash_attn_kvpacked_func, 2, 1, 2),
    "varlen": varlen(flash_attn.flash_attn_varlen_func),
    "varlen_qkvpacked": packed(varlen(flash_attn.flash_attn_varlen_qkvpacked_func, (20,)), 2, 3),
    "varlen_kvpacked": packed(varlen(flash_attn.flash_attn_varlen_kvpacked_func), 2, 1, 2),
    "3": flash_attn_3.flash_attn_func,
    "3 varlen": varlen(flash_attn_3.flash_attn_varlen_func),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_flash_attn(form: str, dtype: Any) -> None:
    """By either name: out, lse with the sink in it, and all gradients."""
    torch.manual_seed(13)
    mine = [torch.randn(2, 20, 4, 16, requires_grad=True) for _ in range(3)]
    mine.append(torch.randn(4).to(dtype).requires_grad_())
    wanted = eager(*(x.double() for x in mine))
    upstream = [torch.randn_like(x).float() for x in wanted]
    right = torch.autograd.grad(wanted, mine, [x.double() for x in upstream])
    for name in ("s_aux", "learnable_sink"):
        found = FORMS[form](*mine[:3], **{name: mine[3]}, return_attn_probs=True)[:2]
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
        got = torch.autograd.grad(found, mine, upstream)
        assert got[3].dtype == dtype
        for a, b in zip(got, right, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=max(1e-5, torch.finfo(a.dtype).eps))


def test_flash_attn_with_dropout() -> None:
    """S_dmask is of the keys, and the same with a sink."""
    q, k, v, sinks = (x.detach() for x in tensors(torch.float32))
    found = []
    for more in ({}, {"s_aux": sinks}):
        torch.manual_seed(14)
        found.append(
            flash_attn.flash_attn_func(q, k, v, dropout_p=0.4, return_attn_probs=True, **more)
        )
    (plain, alone, keys), (out, lse, weights) = found
    assert torch.equal(weights, keys)
    share = (alone - lse).exp().transpose(1, 2)[..., None]  # that the sink leaves to the keys
    torch.testing.assert_close(out, plain * share)


@pytest.mark.parametrize("name", ["s_aux", "learnable_sink"])
def test_flash_attn_over_a_cache(name: str) -> None:
    """Paged or not; a sink that requires a gradient gets none, as nothing else does."""
    q, k, v, sinks = tensors(torch.float32)
    sinks = sinks.detach().bfloat16().requires_grad_()
    used = torch.tensor([30, 53], dtype=torch.int32)
    options: dict[str, Any] = {"causal": True, "return_lse": True, "sinks": sinks.detach().float()}
    wanted = strobe.attention_with_kvcache(q, k, v, seqused_k=used, **options)
    caches = (q.detach(), k.detach(), v.detach())
    for function in (flash_attn.flash_attn_with_kvcache, flash_attn_3.flash_attn_with_kvcache):
        for given in (caches, (q, k, v)):
            found = function(
                *given, cache_seqlens=used, causal=True, return_softmax_lse=True, **{name: sinks}
            )
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a, b)
                assert not a.requires_grad


def test_flash_attn_varlen_over_pages() -> None:
    q, k, v, sinks = (x.detach() for x in tensors(torch.float32))
    pages = [q[:, :20].flatten(0, 1), *(x[:, :48].reshape(6, 16, 2, 32) for x in (k, v))]
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    lengths = (OFFSETS, torch.tensor([0, 48, 96], dtype=torch.int32), 20, 48)
    call: Any = flash_attn.flash_attn_varlen_func
    out = call(*pages, *lengths, block_table=table, learnable_sink=sinks.requires_grad_())
    wanted, _ = eager(*(x.double() for x in (q[:, :20], k[:, :48], v[:, :48], sinks)))
    torch.testing.assert_close(out.unflatten(0, (2, 20)), wanted.float(), atol=1e-5, rtol=1e-5)
    with pytest.raises(strobe.Unsupported, match="gradient of attention with block_table"):
        out.sum().backward()


def test_flash_attn_compiled() -> None:
    def loss(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        first = flash_attn.flash_attn_func(q, k, v, causal=True, learnable_sink=sinks)
        again = flash_attn_3.flash_attn_func(q, k, v, attention_chunk=8, s_aux=sinks)
        cached = flash_attn.flash_attn_with_kvcache(q.detach(), k.detach(), v.detach(), s_aux=sinks)
        return first.square().sum() + (again * cached).sum()

    mine = tensors(torch.float32)
    wanted = torch.autograd.grad(loss(*mine), mine)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(*mine), mine), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_flash_attn_of_float8() -> None:
    q, k, v, sinks = (x.detach() for x in tensors(torch.float32))
    codes = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    out = flash_attn_3.flash_attn_func(*codes, s_aux=sinks)
    wanted = strobe.attention(*codes, sinks=sinks)
    assert torch.equal(out, wanted)
    watched = flash_attn_3.flash_attn_func(*codes, s_aux=sinks.requires_grad_())
    assert torch.equal(watched, wanted)
    with pytest.raises(strobe.Unsupported, match="no kernel computes gradients from float8"):
        watched.sum().backward()


def test_flash_attn_refuses_by_the_name_that_was_given() -> None:
    q, k, v, sinks = (x.detach() for x in tensors(torch.float32))
    both = "s_aux and learnable_sink are both given, expected one of them"
    for function in (
        flash_attn.flash_attn_func,
        flash_attn.flash_attn_with_kvcache,
        flash_attn_3.flash_attn_func,
        flash_attn_3.flash_attn_with_kvcache,
    ):
        call: Any = function
        with pytest.raises(strobe.InvalidArgument, match=both):
            call(q, k, v, s_aux=sinks, learnable_sink=sinks)
        for name in ("s_aux", "learnable_sink"):
            for x, text in (
                (sinks[:3], r"\.shape\[0\] = 3, expected 4 \(heads of q\)"),
                (sinks.int(), r"\.dtype = int32, expected float32"),
                (sinks[None], r"\.ndim = 2, expected 1: \(heads\)"),
                ([0.0] * 4, r" is of type list, expected a torch\.Tensor"),
            ):
                with pytest.raises(strobe.InvalidArgument, match=f"^{name}{text}"):
                    call(q, k, v, **{name: x})


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sinks": SINKS[:3]}, r"sinks.shape\[0\] = 3, expected 4 \(heads of q\)"),
        ({"sinks": SINKS.astype(np.float64)}, "sinks.dtype = float64, expected float32"),
        ({"sinks": SINKS[None]}, r"sinks.ndim = 2, expected 1: \(heads\)"),
        ({"sinks_outside_lse": True}, "sinks_outside_lse = 1 .* expected sinks given"),
    ],
)
def test_refused(options: dict[str, Any], text: str) -> None:
    rng = np.random.default_rng(1)
    q, k = normal(rng, (2, 6, 4, 8)), normal(rng, (2, 10, 2, 8))
    with pytest.raises(strobe.InvalidArgument, match=text):
        strobe.attention(q, k, k, **options)


def test_refused_gradients() -> None:
    x = inputs()
    out, lse = strobe.attention(x.q, x.k, x.v, return_lse=True)
    tensors_ = (x.dout, x.q, x.k, x.v, out, lse)
    with pytest.raises(strobe.InvalidArgument, match=r"return_dsinks=True .* expected sinks given"):
        strobe.attention_backward(*tensors_, return_dsinks=True)
    three: Any = tuple(np.empty_like(y) for y in (x.q, x.k, x.v))
    with pytest.raises(strobe.InvalidArgument, match="grads is no tuple of four"):
        strobe.attention_backward(*tensors_, sinks=SINKS, return_dsinks=True, grads=three)
