"""Arguments that attention has no gradient by, where PyTorch would expect one: refused by name at
every door, so that nothing is learned in silence by a parameter that stays as it was.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import strobe  # noqa: E402
import strobe.torch  # noqa: E402
from strobe import flash_attn  # noqa: E402

from tensors import Tensor  # noqa: E402

X = torch.randn(2, 9, 2, 16)
OFFSETS = torch.tensor([0, 9, 18], dtype=torch.int32)
LENGTHS = (OFFSETS, OFFSETS, 9, 9)
TABLE = torch.tensor([[0], [1]], dtype=torch.int32)
PACKED = X.flatten(0, 1)
OUT, LSE = strobe.attention(X, X, X, return_lse=True)
OPERATOR = (None, None, None, None)
PLAIN = (0.0, None, False, -1, -1, 0.0, False)


def operator(slopes: Tensor, q: Tensor = X) -> Any:
    before, after = (None, None), (None, None, None)
    return torch.ops.strobe.attention_forward(q, X, X, *before, slopes, *after, *PLAIN)


def cache_operator(slopes: Tensor) -> Any:
    arrays = (*[None] * 14, slopes)
    plain = (None, None, False, -1, -1, 0.0, 0, False)
    return torch.ops.strobe.attention_with_kvcache(X, X, X, *arrays, *plain)


DOORS: dict[str, Callable[[Tensor], Any]] = {
    "flash_attn_func": lambda s: flash_attn.flash_attn_func(X, X, X, alibi_slopes=s),
    "flash_attn_func with gradients": lambda s: flash_attn.flash_attn_func(
        X.clone().requires_grad_(), X, X, alibi_slopes=s
    ),
    "flash_attn_func with dropout": lambda s: flash_attn.flash_attn_func(
        X.clone().requires_grad_(), X, X, 0.5, alibi_slopes=s, return_attn_probs=True
    ),
    "qkvpacked": lambda s: flash_attn.flash_attn_qkvpacked_func(
        torch.stack((X, X, X), 2), alibi_slopes=s
    ),
    "kvpacked": lambda s: flash_attn.flash_attn_kvpacked_func(
        X, torch.stack((X, X), 2), alibi_slopes=s
    ),
    "varlen": lambda s: flash_attn.flash_attn_varlen_func(
        PACKED, PACKED, PACKED, *LENGTHS, alibi_slopes=s
    ),
    "varlen of pages": lambda s: flash_attn.flash_attn_varlen_func(
        PACKED, X, X, *LENGTHS, alibi_slopes=s, block_table=TABLE
    ),
    "with_kvcache": lambda s: flash_attn.flash_attn_with_kvcache(X, X, X, alibi_slopes=s),
    "operator": operator,
    "operator with gradients": lambda s: operator(s, X.clone().requires_grad_()),
    "operator of caches": cache_operator,
    "attention": lambda s: strobe.attention(X, X, X, alibi_slopes=s),
    "attention_backward": lambda s: strobe.attention_backward(
        OUT, X, X, X, OUT, LSE, alibi_slopes=s
    ),
    "attention_with_kvcache": lambda s: strobe.attention_with_kvcache(X, X, X, alibi_slopes=s),
}


def shim_doors(interface: Any) -> dict[str, Callable[[Tensor], Any]]:
    """What is beneath flash_attn's functions."""
    gpu, end = interface.flash_attn_gpu, (-1, -1, 0.0)
    tensors, rows = (X, X, X), (PACKED, PACKED, PACKED)
    gradients = (None, None, None)
    packed_lse = LSE.transpose(0, 1).flatten(1).contiguous()
    packed_out = OUT.flatten(0, 1)
    return {
        "_flash_attn_forward": lambda s: interface._flash_attn_forward(
            *tensors, 0.0, None, False, *end, s, False
        ),
        "_flash_attn_varlen_forward": lambda s: interface._flash_attn_varlen_forward(
            *rows, *LENGTHS, 0.0, None, False, alibi_slopes=s
        ),
        "_flash_attn_varlen_forward of pages": lambda s: interface._flash_attn_varlen_forward(
            PACKED, X, X, *LENGTHS, 0.0, None, False, alibi_slopes=s, block_table=TABLE
        ),
        "_flash_attn_backward": lambda s: interface._flash_attn_backward(
            OUT, *tensors, OUT, LSE, *gradients, 0.0, None, False, *end, s, False
        ),
        "_flash_attn_varlen_backward": lambda s: interface._flash_attn_varlen_backward(
            *(packed_out, *rows, packed_out, packed_lse, *gradients, *LENGTHS, 0.0, None, False),
            *(*end, s, False),
        ),
        "fwd_kvcache": lambda s: gpu.fwd_kvcache(
            *tensors, *[None] * 8, s, None, None, False, *end, True, 0
        ),
        "FlashAttnFunc": lambda s: interface.FlashAttnFunc.apply(
            *tensors, 0.0, None, False, (-1, -1), 0.0, s, False, False, torch.is_grad_enabled()
        ),
        "FlashAttnVarlenFunc": lambda s: interface.FlashAttnVarlenFunc.apply(
            *(*rows, *LENGTHS, 0.0, None, False, (-1, -1), 0.0, s, False, False, None),
            torch.is_grad_enabled(),
        ),
    }


def check(door: Callable[[Tensor], Any]) -> None:
    slopes = torch.tensor([0.5, 0.25])
    wanted = door(slopes)
    learned = slopes.clone().requires_grad_()
    for given in (learned, torch.nn.Parameter(slopes), learned * 1):
        with pytest.raises(strobe.Unsupported, match=r"^alibi_slopes requires a gradient"):
            door(given)
    # Where no gradient is recorded, none is missed.
    with torch.no_grad():
        found = door(learned)
    door(learned.detach())
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", DOORS)
def test_learned_slopes_are_refused(name: str) -> None:
    check(DOORS[name])


@pytest.mark.skipif(importlib.util.find_spec("flit_core") is None, reason="no flit_core")
@pytest.mark.usefixtures("flash_attn")
def test_learned_slopes_are_refused_beneath_flash_attn() -> None:
    doors = shim_doors(importlib.import_module("flash_attn.flash_attn_interface"))
    for name, door in doors.items():
        try:
            check(door)
        except BaseException as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize(
    "name", ["flash_attn_func", "varlen", "operator", "operator of caches", "with_kvcache"]
)
def test_learned_slopes_are_refused_where_compiled(name: str) -> None:
    """With the words of the refusal somewhere in what PyTorch's compiler says."""
    torch._dynamo.reset()
    compiled = torch.compile(DOORS[name], backend="aot_eager")
    slopes = torch.tensor([0.5, 0.25])
    with pytest.raises(Exception, match="alibi_slopes requires a gradient"):
        compiled(slopes.clone().requires_grad_())
    with torch.no_grad():
        compiled(slopes.clone().requires_grad_())
    torch._dynamo.reset()


def test_learned_slopes_under_transforms() -> None:
    def loss(slopes: Tensor, q: Tensor) -> Tensor:
        return flash_attn.flash_attn_func(q, X, X, alibi_slopes=slopes).sum()

    slopes = torch.tensor([0.5, 0.25])
    with pytest.raises(strobe.Unsupported, match=r"^alibi_slopes requires a gradient"):
        torch.func.grad(loss)(slopes, X)
    wanted = torch.autograd.grad(loss(slopes, x := X.clone().requires_grad_()), x)[0]
    assert torch.equal(torch.func.grad(loss, argnums=1)(slopes, X), wanted)
    with pytest.raises(strobe.Unsupported, match="forward-mode"):
        torch.func.jvp(lambda s: loss(s, X), (slopes,), (slopes,))


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_learned_numbers_are_refused(name: str) -> None:
    """A scale that a model learns is read as a number: it would stay as it was."""
    value: Any = torch.tensor(0.5, requires_grad=True)
    for q in (X, X.clone().requires_grad_()):
        with pytest.raises(strobe.Unsupported, match=f"^{name} requires a gradient"):
            flash_attn.flash_attn_func(q, X, X, **{name: value})
    with pytest.raises(strobe.Unsupported, match=f"^{name} requires a gradient"):
        flash_attn.flash_attn_with_kvcache(X, X, X, **{name: value})
    with pytest.raises(strobe.Unsupported, match=f"^{name.replace('softmax_', '')} requires"):
        strobe.attention(X, X, X, **{name.replace("softmax_", ""): value})
    with torch.no_grad():
        found = flash_attn.flash_attn_func(X, X, X, **{name: value})
        half: Any = {name: 0.5}
        assert torch.equal(found, flash_attn.flash_attn_func(X, X, X, **half))
