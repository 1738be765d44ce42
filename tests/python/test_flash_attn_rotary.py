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


TABLE = 7


def table(rows: int, half: int = 4) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, half) + 1
    return angle.cos(), angle.sin()


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_rows_past_the_table_stay_as_they_are(interleaved: bool, inplace: bool) -> None:
    """As flash_attn does; negative positions and rows behind the last sequence too, and nothing
    looks past a table.
    """
    rotary = importlib.import_module("flash_attn.layers.rotary")
    torch.manual_seed(0)
    cos, sin = table(TABLE)
    x = torch.randn(3, 5, 2, 8)
    x[1, 4] = torch.inf
    offsets = torch.tensor([4, 1_000_000, -2])
    out = rotary.apply_rotary_emb(x.clone(), cos, sin, interleaved, inplace, offsets)
    whole = rotary.apply_rotary_emb(x, *table(9), interleaved)
    for b, inside in enumerate(([0, 1, 2], [], [2, 3, 4])):
        for row in range(5):
            assert torch.equal(out[b, row], x[b, row]) == (row not in inside)
    assert not torch.equal(whole[0], x[0])

    packed = torch.randn(12, 2, 8)
    starts = torch.tensor([1, 4, 9], dtype=torch.int32)  # row 0 and rows 9 to 11 are in none
    offsets = torch.tensor([5, 0], dtype=torch.int32)
    out = rotary.apply_rotary_emb(
        packed.clone(), cos, sin, interleaved, inplace, offsets, starts, 5
    )
    changed = [row for row in range(12) if not torch.equal(out[row], packed[row])]
    assert changed == [1, 2, *range(4, 9)]
    for rows in (x, packed):
        lengths = {"cu_seqlens": starts} if rows is packed else {}
        empty = (cos[:0], sin[:0])
        offsets = torch.zeros(2 if lengths else 3, dtype=torch.int64)
        out = rotary.apply_rotary_emb(rows, *empty, seqlen_offsets=offsets, **lengths)
        assert torch.equal(out, rows)


@pytest.mark.usefixtures("flash_attn")
def test_refusals_of_offsets() -> None:
    rotary = importlib.import_module("flash_attn.layers.rotary")
    x = torch.randn(3, 5, 2, 8)
    for offsets in (torch.zeros(2, dtype=torch.int32), torch.zeros(3), torch.tensor(1)):
        with pytest.raises(ValueError, match=r"^seqlen_offsets is torch"):
            rotary.apply_rotary_emb(x, *table(9), seqlen_offsets=offsets)
    with pytest.raises(IndexError, match="seqlen_offsets"):
        rotary.apply_rotary_emb(x, *table(9), seqlen_offsets=5)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_in_tensor_operations(interleaved: bool) -> None:
    rotary = importlib.import_module("flash_attn.layers.rotary")
    x = torch.randn(2, 5, 3, 16, dtype=torch.float64)
    cos, sin = table(5, 6)
    wanted = rotary.apply_rotary_emb(x.float(), cos, sin, interleaved).double()
    for tables in ((cos, sin), (cos.expand(2, -1, -1), sin.expand(2, -1, -1))):
        found = rotary.apply_rotary_emb_torch(x, *tables, interleaved)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"rotary_dim = 18"):
        rotary.apply_rotary_emb_torch(x, *table(5, 9))
    turned = rotary.rotate_half(torch.arange(4.0), interleaved)
    assert turned.tolist() == ([-1, 0, -3, 2] if interleaved else [-2, -3, 0, 1])


# What is rotated: all of x, the first two of three, the first of two, q and k of grouped heads.
SHAPES = {
    "x": (2, 5, 3, 8),
    "qkv": (2, 5, 3, 3, 8),
    "kv": (2, 5, 2, 3, 8),
    "grouped": (2, 5, 4 + 2 * 2, 8),
}


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("leaf", [False, True])
def test_in_place_and_its_gradient(kind: str, as_function: bool, leaf: bool) -> None:
    rotary = importlib.import_module("flash_attn.layers.rotary")
    torch.manual_seed(0)
    cos, sin = table(TABLE)
    other_cos, other_sin = table(TABLE)
    offsets = torch.tensor([1, 4])

    def wanted(x: Tensor) -> Tensor:
        def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            return rotary.apply_rotary_emb(x, cos, sin, True, False, offsets)

        if kind == "x":
            return turn(x, cos, sin)
        if kind == "kv":
            return torch.stack((turn(x[:, :, 0], cos, sin), x[:, :, 1]), 2)
        if kind == "qkv":
            q, k, v = x.unbind(2)
            return torch.stack((turn(q, cos, sin), turn(k, other_cos, other_sin), v), 2)
        q, k, v = x.split((4, 2, 2), 2)
        return torch.cat((turn(q, cos, sin), turn(k, other_cos, other_sin), v), 2)

    def found(x: Tensor) -> Any:
        if kind == "x":
            f = rotary.ApplyRotaryEmb.apply if as_function else rotary.apply_rotary_emb
            return f(x, cos, sin, True, True, offsets)
        if kind == "kv":
            f = rotary.ApplyRotaryEmbKV_.apply if as_function else rotary.apply_rotary_emb_kv_
            return f(x, cos, sin, True, offsets)
        f = rotary.ApplyRotaryEmbQKV_.apply if as_function else rotary.apply_rotary_emb_qkv_
        heads = (4,) if kind == "grouped" else ()
        return f(x, cos, sin, other_cos, other_sin, True, offsets, *heads)

    source = torch.randn(SHAPES[kind], requires_grad=True)
    copy = source.detach().clone().requires_grad_()
    x = source if leaf else source * 1
    before = source.detach().clone()
    y, z = found(x), wanted(copy)
    assert torch.equal(y, z)
    assert torch.equal(x, z)  # it is written, whatever autograd makes of it
    if not leaf:
        assert torch.equal(source, before)
        if not as_function:
            assert y is x
    dout = torch.randn_like(y)
    (dx,), (dcopy,) = torch.autograd.grad(y, source, dout), torch.autograd.grad(z, copy, dout)
    torch.testing.assert_close(dx, dcopy)
    with torch.no_grad():
        rows = before.clone()
        assert torch.equal(found(rows), z)
        assert torch.equal(rows, z)


@pytest.mark.usefixtures("flash_attn")
def test_refusals_of_packed_heads() -> None:
    rotary = importlib.import_module("flash_attn.layers.rotary")
    x = torch.randn(2, 5, 8, 8)
    for heads in (None, 3, 9, -2):
        with pytest.raises(ValueError, match=f"^num_heads_q = {heads} with qkv"):
            rotary.apply_rotary_emb_qkv_(x, *table(5), num_heads_q=heads)
    with pytest.raises(ValueError, match=r"^qkv.shape = \(2, 5, 2, 4, 8\)"):
        rotary.apply_rotary_emb_qkv_(x.view(2, 5, 2, 4, 8), *table(5))
    with pytest.raises(ValueError, match=r"^kv.shape = \(2, 5, 8, 8\)"):
        rotary.apply_rotary_emb_kv_(x, *table(5))


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("scale_base", [None, 512])
@pytest.mark.parametrize("interleaved", [False, True])
def test_module(interleaved: bool, scale_base: float | None) -> None:
    rotary = importlib.import_module("flash_attn.layers.rotary")
    torch.manual_seed(0)
    module = rotary.RotaryEmbedding(8, 100.0, interleaved, scale_base, pos_idx_in_fp32=True)
    assert not module.state_dict()

    def turned(x: Tensor, first: int, sign: int = 0) -> Tensor:
        """(seqlen, heads, head_dim) by way of complex numbers; sign: 1 for q, -1 for k of XPos."""
        rows = []
        for row, values in enumerate(x):
            y = rotated(values, first + row, interleaved, 8)
            if scale_base is not None:
                power = (first + row - (len(x) + first) // 2) / scale_base
                zeta = (torch.arange(0, 8, 2).double() / 8 + 0.4) / 1.4
                growth = zeta ** (sign * power)
                pairs = growth.repeat_interleave(2) if interleaved else growth.repeat(2)
                y[..., :8] *= pairs
            rows.append(y)
        return torch.stack(rows)

    def check(found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)

    for offset in (0, 3):
        qkv = torch.randn(1, 6, 3, 2, 16)
        q, k, v = (x.clone() for x in qkv[0].unbind(1))
        out = module(qkv, seqlen_offset=offset)
        assert out is qkv
        check(out[0, :, 0], turned(q, offset, 1))
        check(out[0, :, 1], turned(k, offset, -1))
        assert torch.equal(out[0, :, 2], v)
        q, kv = torch.randn(1, 6, 4, 16), torch.randn(1, 6, 2, 2, 16)
        before, k, v = q[0].clone(), kv[0, :, 0].clone(), kv[0, :, 1].clone()
        found_q, found_kv = module(q, kv, seqlen_offset=offset)
        check(found_q[0], turned(before, offset, 1))
        check(found_kv[0, :, 0], turned(k, offset, -1))
        assert torch.equal(found_kv[0, :, 1], v)
    grouped = torch.randn(1, 6, 4 + 2 * 2, 16)
    q = grouped[0, :, :4].clone()
    out = module(grouped, max_seqlen=9, num_heads_q=4)
    if scale_base is None:  # else the table's length matters, here 9
        check(out[0, :, :4], turned(q, 0))


@pytest.mark.usefixtures("flash_attn")
def test_module_keeps_its_tables() -> None:
    rotary = importlib.import_module("flash_attn.layers.rotary")
    module = rotary.RotaryEmbedding(8)
    offsets = torch.tensor([0, 2])
    qkv = torch.randn(2, 6, 3, 2, 16)
    with pytest.raises(ValueError, match="max_seqlen = None with a tensor seqlen_offset"):
        module(qkv.clone(), seqlen_offset=offsets)
    module(qkv.clone(), seqlen_offset=offsets, max_seqlen=8)
    kept = module._cos_cached
    assert kept.shape == (8, 4)
    module(qkv.clone())
    assert module._cos_cached is kept
    module(qkv.clone(), seqlen_offset=3)
    assert module._cos_cached.shape == (9, 4)
    exact = module._cos_cached
    module.bfloat16()
    module(qkv.bfloat16())
    assert torch.equal(module._cos_cached, exact[:6].bfloat16())  # from frequencies in float32
    with torch.inference_mode():
        module(qkv.bfloat16().clone(), max_seqlen=30)
    rows = qkv.bfloat16().requires_grad_()
    module(rows * 1).sum().backward()
    assert rows.grad is not None
