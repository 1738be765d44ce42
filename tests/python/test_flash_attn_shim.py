"""The distribution flash-attn: what it is called, what it has, and what it says it has not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("flit_core") is None:
    pytest.skip("flit_core is not installed", allow_module_level=True)

import strobe.flash_attn  # noqa: E402

import shim  # noqa: E402
from tensors import Tensor  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shim.install(tmp_path_factory.mktemp("flash_attn"))


@pytest.fixture
def flash_attn(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    finders = list(sys.meta_path)
    monkeypatch.syspath_prepend(str(site))
    yield importlib.import_module("flash_attn")
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


def test_name_and_version(flash_attn: Any) -> None:
    assert flash_attn.__version__ == "2.8.3"
    assert importlib.metadata.version("flash-attn") == "2.8.3"
    assert importlib.metadata.requires("flash-attn") is None
    assert "flash-attn" in importlib.metadata.packages_distributions()["flash_attn"]


def test_functions_are_strobes(flash_attn: Any) -> None:
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    for name in strobe.flash_attn.__all__:
        assert getattr(flash_attn, name) is getattr(strobe.flash_attn, name)
        assert getattr(interface, name) is getattr(strobe.flash_attn, name)
    parameters = inspect.signature(flash_attn.flash_attn_varlen_func).parameters
    assert {"dropout_p", "window_size", "softcap", "deterministic"} <= parameters.keys()
    x = torch.randn(1, 1, 1, 16)
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache"):
        flash_attn.flash_attn_with_kvcache(x, x, x)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_functions_without_autograd(packed: bool, dropout_p: float) -> None:
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    torch.manual_seed(0)
    shape = (19, 2, 16) if packed else (2, 19, 2, 16)
    q, k, v, dout = (torch.randn(shape, requires_grad=True) for _ in range(4))
    offsets = torch.tensor([0, 7, 19], dtype=torch.int32)
    lengths = (offsets, offsets, 12, 12) if packed else ()
    options = (dropout_p, 0.2, True, 5, -1, 0.0, torch.rand(2))
    forward = interface._flash_attn_varlen_forward if packed else interface._flash_attn_forward
    backward = interface._flash_attn_varlen_backward if packed else interface._flash_attn_backward
    torch.manual_seed(1)
    out, lse, weights, rng_state = forward(q, k, v, *lengths, *options, True)
    assert not out.requires_grad
    assert (rng_state.shape, rng_state.dtype) == ((2,), torch.int64)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    backward(dout, q, k, v, out, lse, dq, dk, None, *lengths, *options, False, rng_state=rng_state)

    torch.manual_seed(1)
    function = interface.flash_attn_varlen_func if packed else interface.flash_attn_func
    p, scale, causal, left, right, softcap, slopes = options
    wanted = function(
        q, k, v, *lengths, p, scale, causal, (left, right), softcap, slopes, False, True
    )
    for a, b in zip((out, lse, weights), wanted, strict=True):
        assert torch.equal(a, b)
    for a, b in zip((dq, dk), torch.autograd.grad(wanted[0], (q, k), dout), strict=True):
        assert torch.equal(a, b)
    if packed:
        with pytest.raises(NotImplementedError, match="seqused_k"):
            forward(q, k, v, *lengths, *options, True, seqused_k=offsets[:2])


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize(
    "name", ["flash_attn.ops", "flash_attn.modules.mha", "flash_attn.layers.patch_embed"]
)
def test_absent_modules_say_so(name: str) -> None:
    with pytest.raises(ImportError, match="this flash_attn is Strobe's") as caught:
        importlib.import_module(name)
    assert name.startswith(str(caught.value.name))


@pytest.mark.usefixtures("flash_attn")
def test_absent_names_say_so() -> None:
    with pytest.raises(ImportError, match="RotaryEmbedding"):
        exec("from flash_attn.layers.rotary import RotaryEmbedding")
    assert importlib.util.find_spec("a_module_that_nobody_has") is None


def test_without_strobe(site: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "STROBE_LIBRARY": "/none"}
    result = subprocess.run(
        [sys.executable, "-c", "import flash_attn"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        "ImportError: this flash_attn is Strobe's, and Strobe cannot be imported" in result.stderr
    )


# ----------------------------------------------------------------------------------------- padding


def test_unpad_and_pad(flash_attn: Any) -> None:
    padding = importlib.import_module("flash_attn.bert_padding")
    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 0]])
    rows, indices, offsets, longest, used = padding.unpad_input(x, mask)
    assert rows.shape == (7, 2, 4)
    assert torch.equal(rows, x[mask.bool()])
    assert indices.tolist() == [0, 1, 2, 7, 8, 9, 10]
    assert (offsets.tolist(), offsets.dtype) == ([0, 3, 6, 7], torch.int32)
    assert (longest, type(longest), used.tolist()) == (3, int, [3, 3, 1])
    back = padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(back, x * mask[..., None, None])
    back.square().sum().backward()
    assert torch.equal(x.grad, 2 * x * mask[..., None, None])
    assert torch.equal(padding.pad_input(rows, indices.int(), 3, 5), back)
    assert torch.equal(padding.index_first_axis(x.flatten(0, 1), indices), rows)

    reserved = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]])
    rows, _, offsets, longest, used = padding.unpad_input(x, mask.bool(), reserved)
    assert (offsets.tolist(), longest, used.tolist()) == ([0, 4, 7, 9], 4, [3, 3, 1])
    assert len(rows) == 9


def test_nothing_to_unpad(flash_attn: Any) -> None:
    padding = importlib.import_module("flash_attn.bert_padding")
    rows, indices, offsets, longest, _ = padding.unpad_input(
        torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool)
    )
    assert (rows.shape, offsets.tolist(), longest) == ((0, 4), [0, 0, 0], 0)
    assert not padding.pad_input(rows, indices, 2, 3).any()


# ------------------------------------------------------------------------------------------ rotary


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
