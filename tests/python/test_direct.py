"""Calls of flash_attn_func that nobody watches go without PyTorch's dispatcher: that they do, and
that a call which a mode, a transform or autocast must see does not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import strobe  # noqa: E402
from strobe import _core  # noqa: E402
from strobe.flash_attn import flash_attn_func  # noqa: E402

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def tensors(device: str, seqlen: int = 5, heads: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(seqlen)
    drawn = [torch.randn(1, seqlen, heads, 16, generator=generator) for _ in range(3)]
    return [x.to(device, DTYPES[device]) for x in drawn]


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many calls have gone that way."""
    count = 0
    inner = _core.flash

    def flash(*arguments: Any) -> Any:
        nonlocal count
        out = inner(*arguments)
        count += isinstance(out, torch.Tensor)
        return out

    monkeypatch.setattr(_core, "flash", flash)
    return lambda: count


def expected(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """By the other entry."""
    return strobe.attention(q, k, v, **{"causal": True} | options)


def test_plain_calls_go_directly(device: str, direct: Callable[[], int]) -> None:
    q, k, v = (x + 1 for x in tensors(device))  # other values, elsewhere
    assert torch.equal(flash_attn_func(q, k, v, causal=True), expected(q, k, v))
    assert direct() == 1
    out = flash_attn_func(q, k, v, causal=True)
    assert out.data_ptr() not in (q.data_ptr(), k.data_ptr(), v.data_ptr())


@pytest.mark.parametrize(
    "change",
    ["seqlen", "heads", "stride", "v alone", "dtype", "options", "window", "scale"],
)
def test_a_call_that_differs_from_the_one_before(
    change: str, device: str, direct: Callable[[], int]
) -> None:
    q, k, v = tensors(device)
    flash_attn_func(q, k, v, causal=True)
    options: dict[str, Any] = {}
    if change == "seqlen":
        q, k, v = tensors(device, seqlen=6)
    elif change == "heads":
        q = torch.cat([q, q], 2)
    elif change == "stride":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif change == "v alone":
        v = v[..., :8]
    elif change == "dtype":
        q, k, v = (x.half() for x in (q, k, v))
    elif change == "options":
        options = {"causal": False}
    elif change == "window":
        options = {"window": (1, 0)}
    else:
        options = {"scale": 0.5}
    names = {"window": "window_size", "scale": "softmax_scale"}
    call = {"causal": True} | {names.get(name, name): x for name, x in options.items()}
    found = flash_attn_func(q, k, v, **call)
    assert torch.equal(found, expected(q, k, v, **options))
    assert direct() == 2


def test_gradients_are_not_lost(device: str, direct: Callable[[], int]) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(device))
    flash_attn_func(q, k, v, causal=True).sum().backward()
    assert all(x.grad is not None for x in (q, k, v))
    assert direct() == 0
    with torch.no_grad():
        flash_attn_func(q, k, v, causal=True)
    assert direct() == 1
    assert flash_attn_func(q, k, v, causal=True).requires_grad


@pytest.mark.parametrize("mode", ["autocast", "flops", "vmap", "inference"])
def test_modes_see_the_call(mode: str, device: str, direct: Callable[[], int]) -> None:
    q, k, v = tensors(device)
    want = expected(q, k, v)
    if mode == "vmap":
        batched = torch.vmap(lambda x: flash_attn_func(x, k, v, causal=True))(q[None])
        assert torch.equal(batched[0], want)
    elif mode == "flops":
        with FlopCounterMode(display=False):
            flash_attn_func(q, k, v, causal=True)
    else:
        context = torch.autocast(device, torch.bfloat16) if mode == "autocast" else nullcontext()
        with context, torch.inference_mode(mode == "inference"):
            out = flash_attn_func(q, k, v, causal=True)
        assert out.dtype == (torch.bfloat16 if mode == "autocast" else want.dtype)
    assert direct() == (mode == "inference")


class Ignored(TorchDispatchMode):  # type: ignore[misc]
    """A mode that PyTorch's compiler does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_that_the_compiler_does_not_see(device: str, direct: Callable[[], int]) -> None:
    q, k, v = tensors(device)
    want = expected(q, k, v)
    with Ignored() as mode:
        flash_attn_func(q, k, v, causal=True)
    assert any("strobe" in name for name in mode.seen)
    for pre_dispatch in (False, True):
        traced = make_fx(
            lambda a, b, c: flash_attn_func(a, b, c, causal=True), pre_dispatch=pre_dispatch
        )(q, k, v)
        assert torch.equal(traced(q, k, v), want)
    assert direct() == 0


def test_options_that_change_in_place(device: str, direct: Callable[[], int]) -> None:
    q, k, v = tensors(device)
    left = torch.tensor(1)
    for _ in range(3):
        flash_attn_func(q, k, v, causal=True, window_size=(left, left))
    left.fill_(3)
    found = flash_attn_func(q, k, v, causal=True, window_size=(left, left))
    assert torch.equal(found, expected(q, k, v, window=(3, 3)))
    flash_attn_func(q, k, v, causal=torch.tensor(True))
    with pytest.raises(strobe.InvalidArgument, match="causal"):
        flash_attn_func(q, k, v, causal=torch.tensor([True, False]))
    assert direct() == 4  # a window's numbers are read at each call, before anything is kept


def test_other_addresses_and_other_shapes_in_turns(device: str) -> None:
    # What a launch keeps for the next one, TMA's tensor maps say, must not be taken for it.
    places = [
        tensors(device),
        [x + 1 for x in tensors(device)],
        tensors(device, 9),
        tensors(device, 5, 4),
    ]
    for i in (0, 1, 0, 2, 1, 2, 3, 0, 3, 1):
        q, k, v = places[i]
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(x.float().transpose(1, 2) for x in (q, k, v)), is_causal=True
        ).transpose(1, 2)
        for found in (flash_attn_func(q, k, v, causal=True), expected(q, k, v)):
            torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)


def test_a_thread_whose_first_call_of_cuda_this_is(device: str) -> None:
    q, k, v = tensors(device)
    wanted = expected(q, k, v)
    out = torch.zeros_like(q)
    if device == "cuda":
        torch.cuda.synchronize()

    def launch() -> None:
        strobe.attention(q, k, v, causal=True, out=out)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert torch.equal(out, wanted)


def test_one_tensor_for_all(device: str) -> None:
    q, _, _ = tensors(device)
    for _ in range(4):
        assert torch.equal(flash_attn_func(q, q, q, causal=True), expected(q, q, q))


def test_errors_are_the_usual_ones(device: str, direct: Callable[[], int]) -> None:
    q, k, v = tensors(device)
    with pytest.raises(strobe.InvalidArgument, match="window_size"):
        flash_attn_func(q, k, v, causal=True, window_size=3)  # type: ignore[call-overload]
    with pytest.raises(strobe.InvalidArgument, match="softcap"):
        flash_attn_func(q, k, v, causal=True, softcap=-1.0)
    assert direct() == 0


def test_two_shapes_in_turns(device: str) -> None:
    for _ in range(3):
        for seqlen in (3, 7):
            q, k, v = tensors(device, seqlen)
            assert torch.equal(flash_attn_func(q, k, v, causal=True), expected(q, k, v))
