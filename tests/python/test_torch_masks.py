"""Masks as data of PyTorch's tensors: calls with gradients, operators, BlockMask."""

from __future__ import annotations

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


def test_compiled_and_by_vmap() -> None:
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
    with pytest.raises(strobe.InvalidArgument, match="block = "):
        masks.from_block_mask(
            flex.create_block_mask(documents, None, None, 300, 300, device="cpu", BLOCK_SIZE=32)
        )


def test_what_is_wrong_is_said() -> None:
    x = tensors(10, 10)
    attention: Any = strobe.torch.attention
    with pytest.raises(strobe.InvalidArgument, match=r"strobe\.masks\.from_bool\(keep\)"):
        attention(*x, mask=torch.ones(10, 10, dtype=torch.bool))
    with pytest.raises(strobe.Unsupported, match="masks as data are for the CPU as yet"):
        masks.from_bool(torch.ones(10, 10, dtype=torch.bool, device="meta"))
