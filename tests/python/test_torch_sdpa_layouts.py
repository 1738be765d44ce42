"""The results of scaled_dot_product_attention under sdpa_kernel lie in memory as PyTorch's own do,
eager and compiled, so that a `view` that is right without the block is right in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import strobe.torch  # noqa: E402
from strobe import _blocks  # noqa: E402

from tensors import Tensor  # noqa: E402

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
if VERSION < (2, 11):
    pytest.skip("other layouts in this PyTorch", allow_module_level=True)

BATCH, HEADS, HEAD_DIM = 2, 4, 16
# (batch, heads, seqlen, head_dim) of other orders and steps in memory.
LAYOUTS: dict[str, Callable[[int, int, int], Tensor]] = {
    "contiguous": lambda h, n, d: torch.randn(BATCH, h, n, d),
    "heads inner": lambda h, n, d: torch.randn(BATCH, n, h, d).transpose(1, 2),
    "seqlen first": lambda h, n, d: torch.randn(n, BATCH, h, d).permute(1, 2, 0, 3),
    "heads first": lambda h, n, d: torch.randn(h, BATCH, n, d).transpose(0, 1),
    "packed": lambda h, n, d: torch.randn(BATCH, n, 3, h, d)[:, :, 1].transpose(1, 2),
    "padded": lambda h, n, d: torch.randn(BATCH, h, n, d + 3)[..., :d],
    "one batch": lambda h, n, d: torch.randn(1, h, n, d).expand(BATCH, h, n, d),
    "one head": lambda h, n, d: torch.randn(BATCH, 1, n, d).expand(BATCH, h, n, d),
}
PADDING = torch.arange(7) < torch.tensor([7, 4])[:, None]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": PADDING[:, None, None]},
    "bias": {"attn_mask": torch.linspace(-1, 1, 63).reshape(9, 7)},
    "dropout": {"dropout_p": 0.3},
    "grouped": {"enable_gqa": True},
    "one query": {},
    "wider values": {},
}


def case(layout: str, kind: str, grad: bool) -> list[Tensor]:
    torch.manual_seed(0)
    heads = HEADS // 2 if kind == "grouped" else HEADS
    width = 24 if kind == "wider values" else HEAD_DIM
    make, other = LAYOUTS[layout], LAYOUTS["heads inner" if layout == "packed" else "contiguous"]
    tensors = [
        make(HEADS, 1 if kind == "one query" else 9, HEAD_DIM),
        other(heads, 7, HEAD_DIM),
        other(heads, 7, width),
    ]
    return [x.requires_grad_(grad) for x in tensors]


def strides(*tensors: Tensor) -> list[tuple[int, ...]]:
    """Those of axes of more than one element, as no code can rely on the others."""
    return [
        tuple(step for n, step in zip(x.shape, x.stride(), strict=True) if n > 1) for x in tensors
    ]


def results(function: Any, tensors: list[Tensor]) -> list[Tensor]:
    """The result and, if there are gradients, those."""
    out = function(*tensors)
    if not tensors[0].requires_grad:
        return [out]
    return [out, *torch.autograd.grad(out, tensors, torch.ones(out.shape))]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_pytorchs(layout: str, kind: str, grad: bool) -> None:
    tensors = case(layout, kind, grad)

    def call(*tensors: Tensor) -> Tensor:
        return scaled_dot_product_attention(*tensors, **KINDS[kind])

    options = KINDS[kind] if kind != "dropout" else {}  # with dropout its kernel is another one
    wanted = results(lambda *x: scaled_dot_product_attention(*x, **options), tensors)
    torch._dynamo.reset()
    with strobe.torch.sdpa_kernel() as served:
        found = results(call, tensors)
        compiled = results(torch.compile(call, backend="aot_eager", fullgraph=True), tensors)
    assert (served.calls, served.fallbacks) == (2, {})
    # The gradients of values that are wider come from PyTorch's matrix products.
    compared = 1 if kind == "wider values" else 4
    assert strides(*found[:compared]) == strides(*wanted[:compared])
    assert strides(*compiled) == strides(*found)
    if kind != "dropout":
        for x in (found, compiled):
            for a, b in zip(x, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "seqlen first", "packed"])
def test_strides_through_inductor(layout: str) -> None:
    """Which generates code for the strides that the fake kernels told."""
    tensors = case(layout, "plain", grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k * 1, v).sin()

    torch._dynamo.reset()
    with strobe.torch.sdpa_kernel():
        found = results(torch.compile(call, fullgraph=True), tensors)
    for a, b in zip(found, results(call, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "bias"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_view_that_is_right_without_the_block(grad: bool, kind: str) -> None:
    tensors = case("contiguous", kind, grad)
    with strobe.torch.sdpa_kernel() as served:
        out = scaled_dot_product_attention(*tensors, **KINDS[kind])
        assert out.view(BATCH * HEADS, 9, HEAD_DIM).shape == (BATCH * HEADS, 9, HEAD_DIM)
        out += 1  # no view of something else
    assert served.calls == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_for_other_devices_lie_as_their_tensors(layout: str) -> None:
    """As the meta functions of PyTorch's flash kernel for CUDA say."""
    x = LAYOUTS[layout](HEADS, 9, HEAD_DIM).to("meta")
    assert _blocks.gradient_like(x).stride() == torch.empty_like(x).stride()


def test_strides_with_a_mask_in_no_order() -> None:
    tensors = case("contiguous", "plain", grad=True)
    mask = torch.rand(9, 7) > 0.5
    mask[:, 0] = True

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask)

    wanted = results(call, tensors)
    torch._dynamo.reset()
    with strobe.torch.sdpa_kernel() as served:
        found = results(torch.compile(call, fullgraph=True), tensors)
    assert served.calls == 1
    assert strides(*found) == strides(*wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
