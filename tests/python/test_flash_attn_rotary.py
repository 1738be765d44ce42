"""flash_attn.layers.rotary of the distribution flash-attn against turns of complex numbers."""

from __future__ import annotations

import importlib
import importlib.util
from itertools import chain
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("flit_core") is None:
    pytest.skip("flit_core is not installed", allow_module_level=True)

from tensors import Tensor  # noqa: E402


def rotated(x: Tensor, position: int, interleaved: bool, rotary_dim: int) -> Tensor:
    """One row (heads, head_dim) turned as complex numbers, in float64."""
    half = rotary_dim // 2
    angle = position / 100.0 ** (torch.arange(half).double() / half)
    turn = torch.polar(torch.ones(half).double(), angle)
    x = x.double().clone()
    part = x[..., :rotary_dim]
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    z = torch.complex(a.contiguous(), b.contiguous()) * turn
    if interleaved:
        x[..., :rotary_dim] = torch.view_as_real(z).flatten(-2)
    else:
        x[..., :rotary_dim] = torch.cat((z.real, z.imag), -1)
    return x


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved: bool, rotary_dim: int, inplace: bool, device: str) -> None:
    rotary = importlib.import_module("flash_attn.layers.rotary")
    half = rotary_dim // 2
    angle = torch.arange(40)[:, None] / 100.0 ** (torch.arange(half) / half)
    cos, sin = angle.cos().to(device), angle.sin().to(device)

    def check(x: Tensor, positions: list[list[int]], **options: Any) -> None:
        source = x.clone()
        out = rotary.apply_rotary_emb(x, cos, sin, interleaved, inplace, **options)
        assert (out is x) == inplace
        assert torch.equal(x, source) != inplace
        rows = source.flatten(0, -3).cpu()
        wanted = [
            rotated(row, p, interleaved, rotary_dim)
            for row, p in zip(rows, chain(*positions), strict=True)
        ]
        torch.testing.assert_close(
            out.flatten(0, -3).cpu().double(), torch.stack(wanted), rtol=1e-5, atol=1e-5
        )

    x = torch.randn(2, 5, 3, 16, device=device)
    check(x.clone(), [list(range(5))] * 2)
    check(x.clone(), [list(range(7, 12))] * 2, seqlen_offsets=7)
    offsets = torch.tensor([4, 30], dtype=torch.int32, device=device)
    check(x.clone(), [list(range(4, 9)), list(range(30, 35))], seqlen_offsets=offsets)
    packed = torch.randn(9, 3, 16, device=device)
    starts = torch.tensor([0, 2, 2, 9], dtype=torch.int32, device=device)
    check(packed.clone(), [[0, 1], list(range(7))], cu_seqlens=starts, max_seqlen=7)
    offsets = torch.tensor([3, 9, 20], device=device)
    check(packed.clone(), [[3, 4], list(range(20, 27))], cu_seqlens=starts, seqlen_offsets=offsets)


@pytest.mark.usefixtures("flash_attn")
def test_rotary_gradients_dtypes_and_refusals() -> None:
    rotary = importlib.import_module("flash_attn.layers.rotary")
    x = torch.randn(2, 5, 3, 16, requires_grad=True)
    angle = torch.rand(5, 8)
    out = rotary.apply_rotary_emb(x, angle.cos(), angle.sin())
    dout = torch.randn_like(out)
    out.backward(dout)
    back = rotary.apply_rotary_emb(dout, angle.cos(), -angle.sin())  # a rotation's transpose
    torch.testing.assert_close(x.grad, back)
    half = rotary.apply_rotary_emb(x.detach().bfloat16(), angle.cos(), angle.sin())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), out.detach(), rtol=2e-2, atol=2e-2)

    for arguments, text in (
        ((x, angle, angle[:4]), "cos.shape"),
        ((x[0], angle, angle), "x.ndim = 3"),
        ((x, torch.rand(5, 9), torch.rand(5, 9)), "rotary_dim = 18, expected at most"),
    ):
        with pytest.raises(ValueError, match=text):
            rotary.apply_rotary_emb(*arguments)
    with pytest.raises(IndexError, match="seqlen_offsets"):
        rotary.apply_rotary_emb(x, angle, angle, seqlen_offsets=1)
