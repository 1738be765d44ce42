"""Microseconds of a call from Python: tensors in, tensors out, on a problem too small to take time.

    python bench/torch_overhead.py [--device cuda]

Prints, of each function, the least mean over many short rounds: what the call costs on a quiet
machine. On a GPU a call ends when its kernel is enqueued. The library's own part ("C function") is
the same launch with arguments that are ready; the goals are at most 2 us beyond it without a
gradient and 8 with one, and less than PyTorch's scaled_dot_product_attention on a GPU's host.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import strobe
import strobe.torch
import torch
import torch.nn.attention
from strobe.flash_attn import flash_attn_func, flash_attn_with_kvcache

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/python"))
import capi


def microseconds(
    functions: dict[str, Callable[[], Any]], rounds: int = 100, calls: int = 200
) -> dict[str, float]:
    """The least mean of `rounds` times `calls` calls of each, the functions in turns: a host's clock
    drifts. No queue of a GPU gets full meanwhile.
    """
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            best[name] = min(best[name], time.perf_counter() - start)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    return {name: seconds / calls * 1e6 for name, seconds in best.items()}


def c_function(q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """strobe_forward with its plan and arguments at hand, and a C function that does nothing: ctypes
    takes as long for either.
    """
    problem = capi.new_problem()
    problem.dtype, problem.device = (1, capi.CUDA) if q.is_cuda else (0, capi.CPU)
    problem.batch, problem.seqlen_q, problem.heads, problem.head_dim = q.shape
    problem.seqlen_k = k.shape[1]
    problem.causal = 1
    problem.threads = torch.get_num_threads()
    plan = capi.make_plan(problem)
    tensors = (q, k, v, torch.empty_like(q))
    workspace, stream = None, 0
    if q.is_cuda:
        workspace = torch.empty(
            plan.workspace_bytes, dtype=torch.uint8, device=q.device
        )
        stream = torch.cuda.current_stream().cuda_stream
    arguments = capi.pack_forward(
        capi.FORWARD_ARGS_SIZE,
        *(x.data_ptr() for x in tensors),
        *[0] * 6,
        0 if workspace is None else workspace.data_ptr(),
        0 if workspace is None else workspace.numel(),
        stream,
    )
    forward, nothing = capi.forward, capi.LIBRARY.strobe_version
    nothing.argtypes = forward.argtypes
    address = ctypes.addressof(plan)
    capi.check(forward(address, arguments))
    return {
        # The tensors must live as long as the arguments that point to them.
        "C function": lambda _keep=(tensors, workspace, plan): forward(
            address, arguments
        ),
        "ctypes": lambda: nothing(address, arguments),
    }


def cached(device: str) -> dict[str, Callable[[], Any]]:
    """flash_attn_with_kvcache, of one query and a cache in pages, and the C function beneath it."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = torch.randn(1, 1, 1, 64, dtype=dtype, device=device)
    k, v = torch.randn(2, 4, 16, 1, 64, dtype=dtype, device=device)
    numbers = {"dtype": torch.int32, "device": device}
    used, table = torch.tensor([1], **numbers), torch.tensor([[3, 1]], **numbers)
    p = capi.new_problem()
    p.dtype, p.device = (0, capi.CPU) if device == "cpu" else (1, capi.CUDA)
    p.batch = p.heads = p.has_seqused_k = p.seqlen_q = 1
    p.head_dim, p.seqlen_k, p.threads = 64, 32, torch.get_num_threads()
    p.cache, p.pages, p.page_size, p.pages_per_sequence = 2, 4, 16, 2
    plan, arguments = capi.make_plan(p), capi.ForwardArgs()
    arguments.struct_size = ctypes.sizeof(arguments)
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    out, lse = torch.empty_like(q), torch.empty(1, dtype=torch.float32, device=device)
    given = {
        "q": q,
        "k": k,
        "v": v,
        "seqused_k": used,
        "block_table": table,
        "out": out,
    }
    for name, x in {**given, "lse": lse, "workspace": workspace}.items():
        setattr(arguments, name, x.data_ptr())
    arguments.workspace_bytes = workspace.numel()
    if device != "cpu":
        arguments.stream = torch.cuda.current_stream().cuda_stream
    address, data, forward = ctypes.addressof(plan), bytes(arguments), capi.forward
    capi.check(forward(address, data))
    return {
        "C function, cache": lambda _keep=(given, lse, workspace, plan): forward(
            address, data
        ),
        "flash_attn_with_kvcache": lambda: flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, block_table=table
        ),
    }


def in_registry(device: str) -> dict[str, float]:
    """scaled_dot_product_attention by PyTorch's flash kernel and by Strobe in its place, and in the
    place of flash attention's operator for packed sequences, in turns; {} where PyTorch has no such
    kernel or no registry.
    """
    attention = torch.nn.attention
    if device == "cpu" or not hasattr(attention, "activate_flash_attention_impl"):
        return {}
    q, k, v = torch.randn(3, 1, 1, 1, 64, dtype=torch.bfloat16, device=device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    cum = torch.tensor([0, 1], dtype=torch.int32, device=device)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    packed = torch.ops.aten._flash_attention_forward

    def both() -> Any:
        return torch.autograd.grad(sdpa(*leaves, is_causal=True), leaves, dout)

    found: dict[str, float] = {}
    for _ in range(3):
        for who in ("PyTorch's flash attention", "STROBE in its place"):
            if who.startswith("STROBE"):
                attention.activate_flash_attention_impl("STROBE")
            try:
                with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
                    out = sdpa(*leaves, is_causal=True)
                    times = microseconds(
                        {
                            who: lambda: sdpa(q, k, v, is_causal=True),
                            f"{who}, packed": lambda: packed(
                                *rows, cum, cum, 1, 1, 0.0, True, False
                            ),
                            f"{who}, with gradient": lambda: sdpa(
                                *leaves, is_causal=True
                            ),
                            f"{who}, backward": lambda out=out: torch.autograd.grad(
                                out, leaves, dout, retain_graph=True
                            ),
                            f"{who}, forward and backward": both,
                        },
                        rounds=15,
                    )
            finally:
                if attention.current_flash_attention_impl() is not None:
                    attention.restore_flash_attention_impl()
            for name, time_us in times.items():
                found[name] = min(found.get(name, time_us), time_us)
    return found


def measure(device: str) -> dict[str, float]:
    """Microseconds by name."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(1, 1, 1, 64, dtype=dtype, device=device) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    arrays = [torch.randn(1, 1, 1, 64).numpy() for _ in range(3)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    dout = torch.randn_like(q)

    def backward(function: Callable[..., Any]) -> Callable[[], Any]:
        out = function(*leaves)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def ours(*x: Any) -> Any:
        return flash_attn_func(*x, causal=True)

    def torchs(*x: Any) -> Any:
        return sdpa(*(t.transpose(1, 2) for t in x), is_causal=True).transpose(1, 2)

    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    quick: dict[str, Callable[[], Any]] = {
        **c_function(q, k, v),
        **cached(device),
        "strobe.attention": lambda: strobe.attention(q, k, v, causal=True),
        "strobe.attention, NumPy": lambda: strobe.attention(
            *arrays, causal=True, threads=1
        ),
        "flash_attn_func": lambda: flash_attn_func(q, k, v, causal=True),
        "scaled_dot_product_attention": lambda: sdpa(*heads_first, is_causal=True),
    }
    slow: dict[str, Callable[[], Any]] = {
        "flash_attn_func, with gradient": lambda: ours(*leaves),
        "scaled_dot_product_attention, with gradient": lambda: torchs(*leaves),
        "backward of flash_attn_func": backward(ours),
        "backward of scaled_dot_product_attention": backward(torchs),
        "flash_attn_func, forward and backward": lambda: torch.autograd.grad(
            ours(*leaves), leaves, dout
        ),
        "scaled_dot_product_attention, forward and backward": lambda: (
            torch.autograd.grad(torchs(*leaves), leaves, dout)
        ),
    }
    found = microseconds(quick) | microseconds(slow, 20) | in_registry(device)
    ctypes_alone = found.pop("ctypes")
    found["C function"] -= ctypes_alone
    found["C function, cache"] -= ctypes_alone
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    device = parser.parse_args().device
    torch.set_num_threads(1)
    found = measure(device)
    print(f"PyTorch {torch.__version__}, Strobe {strobe.__version__}, {device}")
    for name, time_us in found.items():
        print(f"{time_us:8.1f} us  {name}")
    print(
        f"{found['flash_attn_func'] - found['C function']:8.1f} us  beyond the C function"
    )


if __name__ == "__main__":
    main()
