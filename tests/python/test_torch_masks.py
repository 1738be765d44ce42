"""Masks as data of PyTorch's tensors: calls with gradients, operators, BlockMask."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import strobe
from strobe import masks

torch = pytest.importorskip("torch")
if not hasattr(torch.library, "register_autograd"):
    pytest.skip("needs PyTorch 2.4", allow_module_level=True)


def plain(tensors: Sequence[Any], keep: Any) -> Any:
    """PyTorch's own attention, of tensors (batch, seqlen, heads, head_dim)."""
    x = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in tensors), attn_mask=keep
    )
    return x.transpose(1, 2)


def tensors(queries: int, keys: int) -> list[Any]:
    torch.manual_seed(3)
    shapes = [(2, n, 3, 16) for n in (queries, keys, keys)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def keep_of(queries: int, keys: int) -> Any:
    keep = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(1)) < 0.2
    keep[..., 0] = True
    return keep


def test_gradients() -> None:
    x = tensors(150, 200)
    keep = keep_of(150, 200)
    mask = masks.from_bool(keep, block=64)
    assert isinstance(mask.packed, torch.Tensor)
    attention: Any = strobe.torch.attention
    out = attention(*x, mask=mask)
    wanted = plain(x, keep)
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=1e-4)
    dout = torch.randn_like(out)
    for got, other in zip(
        torch.autograd.grad(out, x, dout), torch.autograd.grad(wanted, x, dout), strict=True
    ):
        torch.testing.assert_close(got, other, atol=2e-5, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(strobe.attention(*x, mask=mask), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("by_argument", [False, True])
def test_compiled(by_argument: bool) -> None:
    """In one graph, with gradients: the mask as an argument of the function, or found by it."""
    torch._dynamo.reset()
    x = tensors(150, 200)
    keep = keep_of(150, 200)
    mask = masks.from_bool(keep, block=64)
    attention: Any = strobe.torch.attention

    def found_there(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, mask=mask).sin()

    def given(q: Any, k: Any, v: Any, other: Any) -> Any:
        return attention(q, k, v, mask=other).sin()

    function = given if by_argument else found_there
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    out = compiled(*x, mask) if by_argument else compiled(*x)
    wanted = plain(x, keep).sin()
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=1e-4)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, x, dout)
    for got, other in zip(grads, torch.autograd.grad(wanted, x, dout), strict=True):
        torch.testing.assert_close(got, other, atol=2e-5, rtol=1e-4)
    if by_argument:  # another one, not the first one's values
        again = masks.from_bool(~keep | (torch.arange(200) == 3), block=64)
        wanted = plain(x, ~keep | (torch.arange(200) == 3)).sin()
        torch.testing.assert_close(compiled(*x, again), wanted, atol=2e-5, rtol=1e-4)


def test_by_vmap() -> None:
    x = [y.detach() for y in tensors(70, 90)]
    keep = keep_of(70, 90)[:1]
    mask = masks.from_bool(keep)
    attention: Any = strobe.torch.attention
    wanted = plain(x, keep)

    def call(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, mask=mask)

    stacked = [torch.stack([y, y.flip(0)]) for y in x]
    found = torch.vmap(call)(*stacked)
    torch.testing.assert_close(found[0], wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found[1], wanted.flip(0), atol=2e-5, rtol=1e-4)
    each = masks.from_bool(keep_of(70, 90))
    with pytest.raises(strobe.Unsupported, match="vmap with a mask of each sequence"):
        torch.vmap(lambda *y: attention(*y, mask=each))(*stacked)


def test_block_masks() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 90, 60, 50]))

    def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (ids[q] == ids[k])

    def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k).abs() <= 30 * (h + 1) + b

    for rule, batch, heads, size in ((documents, None, None, 128), (by_head, 2, 3, 64)):
        made = flex.create_block_mask(
            rule, batch, heads, len(ids), len(ids), device="cpu", BLOCK_SIZE=size
        )
        mask = masks.from_block_mask(made)
        whole = flex.create_mask(rule, batch, heads, len(ids), len(ids), device="cpu")
        for b in range(whole.shape[0]):
            for h in range(whole.shape[1]):
                assert np.array_equal(mask.dense(b, h), whole[b, h].numpy())
        x = tensors(len(ids), len(ids))
        out = strobe.torch.attention(*x, mask=mask)
        torch.testing.assert_close(out, plain(x, whole), atol=2e-5, rtol=1e-4)
    with pytest.raises(strobe.InvalidArgument, match=r"^block_mask\.BLOCK_SIZE = \(32, 32\)"):
        masks.from_block_mask(
            flex.create_block_mask(documents, None, None, 300, 300, device="cpu", BLOCK_SIZE=32)
        )


def test_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 90, 60, 50]))

    def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (ids[q] == ids[k]) & (q != 7)  # query 7 sees nothing

    made = flex.create_block_mask(documents, None, None, 300, 300, device="cpu")
    torch.manual_seed(0)
    x = [torch.randn(2, heads, 300, 16, requires_grad=True) for heads in (4, 2, 2)]
    options: dict[str, Any] = {"block_mask": made, "enable_gqa": True, "scale": 0.3}
    plain_x = [y.detach() for y in x]  # on the CPU PyTorch's function has no gradient
    wanted = flex.flex_attention(*plain_x, return_lse=True, **options)
    function: Any = strobe.torch.flex_attention
    found = function(*x, return_lse=True, **options)
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right, atol=2e-5, rtol=1e-4)
    assert torch.equal(function(*x, **options), found[0])
    dout = torch.randn_like(found[0])
    whole = flex.create_mask(documents, None, None, 300, 300, device="cpu")
    same = torch.nn.functional.scaled_dot_product_attention(
        *x, attn_mask=whole, enable_gqa=True, scale=0.3
    )
    for got, right in zip(
        torch.autograd.grad(found[0], x, dout), torch.autograd.grad(same, x, dout), strict=True
    ):
        torch.testing.assert_close(got, right, atol=2e-5, rtol=1e-4)
    # The mask is packed once; so it is where its lists are written to.
    packed: list[Any] = []
    module = sys.modules["strobe._flex"]
    make = masks.from_block_mask

    def watched(x: Any) -> masks.Mask:
        packed.append(x)
        return make(x)

    monkeypatch.setattr(module, "from_block_mask", watched)
    function(*x, **options)
    assert not packed
    made.kv_num_blocks[0, 0, 2] -= 1
    fewer = function(*x, **options)
    assert len(packed) == 1
    assert not torch.equal(fewer, found[0])
    assert torch.equal(fewer[:, :, :256], found[0][:, :, :256])
    # Without a mask, and with one of strobe.masks.
    plain_out = flex.flex_attention(*plain_x, enable_gqa=True)
    torch.testing.assert_close(function(*x, enable_gqa=True), plain_out, atol=2e-5, rtol=1e-4)
    again = function(*x, **options | {"block_mask": masks.from_block_mask(made)})
    assert torch.equal(again, fewer)
    if hasattr(flex, "AuxRequest"):
        out, aux = function(*x, return_aux=flex.AuxRequest(lse=True), **options)
        assert torch.equal(out, fewer)
        assert torch.equal(aux.lse, function(*x, return_lse=True, **options)[1])


@pytest.mark.parametrize("shape", [(2, 4, 90, 90), (1, 4, 1, 90)])
def test_flex_attention_with_a_bias(shape: tuple[int, ...]) -> None:
    """What the function adds of a tensor, for which PyTorch's own has no gradient on the CPU."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    torch.manual_seed(0)
    x = [torch.randn(2, heads, 90, 16, requires_grad=True) for heads in (4, 2, 2)]
    bias = torch.randn(shape, requires_grad=True)
    mask = masks.sliding(90, left=20)
    every = bias.detach().expand(2, 4, 90, 90)
    made = flex.create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k <= 20), None, None, 90, 90, device="cpu"
    )
    wanted = flex.flex_attention(
        *(y.detach() for y in x), lambda score, b, h, q, k: score + every[b, h, q, k],
        block_mask=made, enable_gqa=True, return_lse=True,
    )  # fmt: skip
    function: Any = strobe.torch.flex_attention
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": True, "bias": bias}
    found = function(*x, return_lse=True, **options)
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right, atol=2e-5, rtol=1e-4)
    dout = torch.randn_like(found[0])
    seen = torch.tensor(mask.dense())
    same = torch.nn.functional.scaled_dot_product_attention(
        *x, attn_mask=bias.masked_fill(~seen, -torch.inf), enable_gqa=True
    )
    for got, right in zip(
        torch.autograd.grad(found[0], [*x, bias], dout),
        torch.autograd.grad(same, [*x, bias], dout),
        strict=True,
    ):
        torch.testing.assert_close(got, right, atol=2e-5, rtol=1e-4)
    with pytest.raises(strobe.InvalidArgument, match=r"bias\.ndim = 3, expected 4"):
        function(*x, bias=bias[0], enable_gqa=True)


@pytest.mark.parametrize("is_given", [True, False])
def test_flex_attention_compiled(is_given: bool) -> None:
    """A mask of strobe.masks breaks no graph; nor do flags."""
    torch.manual_seed(0)
    x = [torch.randn(2, heads, 90, 16, requires_grad=True) for heads in (4, 2, 2)]
    mask = masks.sliding(90, left=20) if is_given else None

    def call(q: Any, k: Any, v: Any) -> Any:
        out, lse = strobe.torch.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True, return_lse=True
        )
        return out.sum() + lse.sum()

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(*x), call(*x)
    assert torch.equal(found, wanted)
    for got, right in zip(
        torch.autograd.grad(found, x), torch.autograd.grad(wanted, x), strict=True
    ):
        torch.testing.assert_close(got, right)


def test_what_is_wrong_is_said_where_the_graph_must_not_break() -> None:
    """The compiler cannot go on then: its own error has Strobe's text."""
    x = tensors(90, 100)
    mask = masks.sliding(90, 97, left=20)
    cache = torch.randn(2, 100, 2, 16)
    packed = masks.from_bool(torch.ones(8, 97, dtype=torch.bool), cu_seqlens_q=torch.tensor([0, 8]))

    def of_a_cache() -> Any:
        return strobe.attention_with_kvcache(
            torch.zeros(8, 4, 16), cache[:1], cache[:1], cu_seqlens_q=torch.tensor([0, 8]).int(),
            max_seqlen_q=8, mask=packed,
        )

    calls: Any = (
        (lambda: strobe.torch.attention(*x, mask=mask), "mask is for 97 keys, and k has 100"),
        (lambda: strobe.torch.attention(*x, window=(3, -7)), r"window\[1\] = -7, expected"),
        (of_a_cache, "mask is for 97 keys, and the cache has room for 100"),
    )
    for call, words in calls:
        with pytest.raises(strobe.InvalidArgument, match=f"^{words}"):
            call()
        torch._dynamo.reset()
        with pytest.raises(Exception, match=words):
            torch.compile(call, fullgraph=True, backend="aot_eager")()


def test_flex_attention_says_what_it_does_not_compute() -> None:
    x = [y.transpose(1, 2) for y in tensors(10, 10)]
    function: Any = strobe.torch.flex_attention

    def tanh(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 20 * torch.tanh(score / 20)

    class Aux:
        lse, max_scores = False, True

    for options, words in (
        ({"score_mod": tanh}, "score_mod = tanh: Strobe computes no function .* are bias=, a tens"),
        ({"return_aux": Aux()}, "return_aux.max_scores = True: Strobe returns lse alone"),
    ):
        with pytest.raises(strobe.Unsupported, match=words):
            function(*x, **options)
    with pytest.raises(strobe.InvalidArgument, match="block_mask is 3, expected PyTorch's BlockMa"):
        function(*x, block_mask=3)
    with pytest.raises(strobe.InvalidArgument, match="key has 1 heads and query 3, expected as ma"):
        function(x[0], x[1][:, :1], x[2][:, :1])
    with pytest.raises(strobe.InvalidArgument, match=r"key\.ndim = 3, expected 4"):
        function(x[0], x[1][0], x[2])
    with pytest.raises(strobe.InvalidArgument, match="mask is for 5000 queries"):
        function(*x, block_mask=masks.sliding(5000, left=3))


def test_what_is_wrong_is_said() -> None:
    x = tensors(10, 10)
    attention: Any = strobe.torch.attention
    with pytest.raises(strobe.InvalidArgument, match=r"strobe\.masks\.from_bool\(keep\)"):
        attention(*x, mask=torch.ones(10, 10, dtype=torch.bool))
    with pytest.raises(strobe.Unsupported, match="keep is on meta, expected a cpu or cuda tensor"):
        masks.from_bool(torch.ones(10, 10, dtype=torch.bool, device="meta"))


def test_a_mask_goes_to_a_device() -> None:
    keep = np.random.default_rng(0).random((70, 90)) < 0.5
    mask = masks.from_bool(keep, block=64).to("cpu")
    assert isinstance(mask.packed, torch.Tensor)
    assert (mask.dense() == keep).all()


def test_a_block_mask_in_place_of_ours() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    other = flex.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 128, 128, device="cpu")
    q = torch.zeros(1, 128, 2, 16)
    call: Any = strobe.attention
    for function in (call, strobe.torch.attention, strobe.plan):
        with pytest.raises(strobe.InvalidArgument, match=r"BlockMask, .*\.masks\.from_block_mask"):
            function(q, q, q, mask=other)
