"""PyTorch's context parallelism on Strobe: a sequence split over two GPUs, in PyTorch's ring.

The test needs two GPUs. Started by torchrun, this file is what each of the two processes does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs wanted")
def test_a_sequence_over_two_gpus_cuda() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", __file__], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "context parallelism: ok" in done.stdout


def worker() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention, context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import strobe.torch

    def attend(qkv: list[Any], causal: bool) -> Any:
        # By its full name, since the context puts another function into the module.
        return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=causal)

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    mesh = init_device_mesh("cuda", (world,))
    served = strobe.torch.register()
    torch.nn.attention.activate_flash_attention_impl("STROBE")
    for causal in (False, True):
        # PyTorch balances the load of causal attention alone, and refuses to do so otherwise.
        _attention._cp_options.enable_load_balance = causal
        torch.manual_seed(0)  # the same numbers in both processes
        shape = (4, 1, 8, 512, 64)
        q, k, v, dout = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.MATH):
            out = attend(exact, causal)
        wanted = [out, *torch.autograd.grad(out, exact, dout.double())]
        before = served.calls
        # The context cuts each of these to this process's share, in place.
        local = [x.clone() for x in (q, k, v, dout)]
        split = context_parallel(mesh, buffers=local, buffer_seq_dims=[2] * 4)
        with split, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            leaves = [x.clone().requires_grad_() for x in local[:3]]
            out = attend(leaves, causal)
            grads = torch.autograd.grad(out, leaves, local[3].clone())
        found = _attention.context_parallel_unshard(mesh, [out.detach(), *grads], [2] * 4)
        errors = [(a.double() - b).abs().max().item() for a, b in zip(found, wanted, strict=True)]
        calls = served.calls - before
        if rank == 0:
            print("causal", causal, "errors", errors, "calls", calls, served.fallbacks, flush=True)
        assert max(errors) < 0.05, errors
        # Each process has two steps forward; those backward are not counted.
        assert calls >= 2, (calls, served.fallbacks)
    torch.nn.attention.restore_flash_attention_impl()
    dist.destroy_process_group()
    if rank == 0:
        print("context parallelism: ok", flush=True)


if __name__ == "__main__":
    worker()
