"""Two GPUs in one process: a call works where its tensors are, whatever device is current."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import strobe  # noqa: E402
from strobe.flash_attn import flash_attn_func  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.device_count() < 2
    or len(strobe.info().cuda_devices) < 2,
    reason="needs two GPUs",
)


def tensors(device: str, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(2, 130, 4, 64, generator=generator) for _ in range(3)]
    return [x.to(device, torch.bfloat16).requires_grad_() for x in drawn]


def run(device: str, seed: int = 0) -> list[Any]:
    """Output and gradients of a sum, on the CPU."""
    q, k, v = tensors(device, seed)
    out = flash_attn_func(q, k, v, causal=True)
    out.float().square().sum().backward()
    assert str(out.device) == device
    return [x.detach().cpu().float() for x in (out, q.grad, k.grad, v.grad)]


def same(found: list[Any], wanted: list[Any]) -> None:
    assert torch.equal(found[0], wanted[0])
    for a, b in zip(found[1:], wanted[1:], strict=True):  # dQ is summed in another order each time
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("current", [0, 1])
def test_device_of_the_tensors(current: int) -> None:
    with torch.cuda.device(current):
        first, second = run("cuda:0"), run("cuda:1")
        assert torch.cuda.current_device() == current
    same(second, first)


def test_mixed_devices_are_refused() -> None:
    q, k, v = tensors("cuda:0")
    with pytest.raises(strobe.InvalidArgument, match="cuda:1"):
        flash_attn_func(q, k.detach().to("cuda:1"), v)


def test_a_thread_and_a_stream_each() -> None:
    wanted = [run("cuda:0", seed) for seed in range(4)]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            device = f"cuda:{index}"
            with torch.cuda.stream(torch.cuda.Stream(device)):
                for _ in range(20):
                    for seed, want in enumerate(wanted):
                        same(run(device, seed), want)
        except BaseException as error:  # the test reports it
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
