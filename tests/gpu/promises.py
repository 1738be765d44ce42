"""What is promised besides right numbers on ordinary problems: sizes, repeatability, errors, CUDA graphs, threads, PTX.
Tests of run_gpu_tests.py."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import strobe_torch as st  # first: with it strobe is found

# isort: split
import strobe
import torch
from device import DEV
from guarded import (
    POISON,
    check_close,
    make_inputs,
    out_of_time,
    run_case,
    seconds_left,
)
from strobe_torch import Backward, Case, Forward, lib


def test_shapes(_: argparse.Namespace) -> str:
    """Grid limits, and more than 2^31 elements by sampled rows, forward and backward."""
    for heads_kv in (1, 100):  # 70,000 heads: of a group in few tiles, and one tile each
        run_case(Case(batch=700, seqlen_q=3, seqlen_k=5, heads=100, heads_kv=heads_kv, head_dim=64), 1, backward=True)
    n, heads, dim = 140_000, 128, 128  # 2.3e9 values: batch 1, one long sequence with broadcast heads
    case = Case(batch=1, seqlen_q=n, seqlen_k=128, heads=heads, heads_kv=1, head_dim=dim)
    q = torch.empty(case.shape("q"), dtype=torch.bfloat16, device=DEV).normal_()
    k, v = (torch.randn(case.shape(s), device=DEV).bfloat16() for s in "kv")
    out = torch.full_like(q, POISON)
    lse = torch.full(case.lse_shape(), POISON, device=DEV)
    Forward(case, q, k, v, out, lse).run()
    rows = torch.tensor([0, 1, 65_535, 131_071, 131_072, n - 1], device=DEV)
    small = Case(batch=1, seqlen_q=len(rows), seqlen_k=128, heads=heads, heads_kv=1, head_dim=dim)
    ref, _lse = st.full_reference(small, q[:, rows], k, v)
    other, _lse = st.full_reference(small, q[:, rows], k, v, dtype=torch.bfloat16)
    check_close("out of 2.3e9 values", out[:, rows], ref, other)
    assert not bool((out == POISON).any())
    dout = torch.empty_like(q).normal_()
    dq, dk, dv = torch.full_like(q, POISON), torch.full_like(k, POISON), torch.full_like(v, POISON)
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    Backward(case, tensors, lse).run()
    ref_dq = st.full_reference_backward(small, q[:, rows], k, v, dout[:, rows])[0]
    other_dq = st.full_reference_backward(small, q[:, rows], k, v, dout[:, rows], dtype=torch.bfloat16)[0]
    check_close("dq of 2.3e9 values", dq[:, rows], ref_dq, other_dq, 3.0)
    for name, tensor in (("dq", dq), ("dk", dk), ("dv", dv)):
        assert not bool((tensor == POISON).any()), f"{name}: not all written"
    return "70,000 heads; 2.3e9 values forward and backward"


def test_long(_: argparse.Namespace) -> str:
    """A million tokens, by sampled rows; peak memory beside the tensors."""
    n, dim = 1 << 20, 64
    case = Case(batch=1, seqlen_q=n, seqlen_k=n, heads=1, head_dim=dim, causal=True)
    x = make_inputs(case, 1)
    out, dout = (torch.randn(case.shape("out"), device=DEV).bfloat16() for _ in range(2))
    lse = torch.empty(case.lse_shape(), device=DEV)
    forward = Forward(case, **x, out=out, lse=lse)
    forward.run()
    rows = torch.tensor([0, 1, 12_345, 524_287, 524_288, n - 1], device=DEV)
    q, k, v = (x[name][0, :, 0].double() for name in "qkv")
    s = q[rows] @ k.T * case.real_scale
    s = s.masked_fill(torch.arange(n, device=DEV)[None] > rows[:, None], -math.inf)
    p = torch.softmax(s, -1)
    got, want = out[0, rows, 0].double(), p @ v
    error = float((got - want).abs().max())
    # Rounding of bf16 weights and result: weights average out, the result's own rounding stays.
    assert error < 2e-2, f"out of a million tokens: error {error:.3g}"
    error = float((lse[0, 0, rows].double() - torch.logsumexp(s, -1)).abs().max())
    assert error < 1e-3, f"lse of a million tokens: error {error:.3g}"
    grads = {name: torch.full(case.shape(name), POISON, dtype=case.dtype, device=DEV) for name in ("dq", "dk", "dv")}
    backward = Backward(case, {**x, "out": out, "dout": dout, **grads}, lse)
    backward.run()
    do = dout[0, :, 0].double()
    dp = do[rows] @ v.T
    ds = p * (dp - (do[rows] * want).sum(-1, keepdim=True)) * case.real_scale
    error = float((grads["dq"][0, rows, 0].double() - ds @ k).abs().max())
    assert error < 2e-2, f"dq of a million tokens: error {error:.3g}"
    for name, tensor in grads.items():
        assert bool(torch.isfinite(tensor).all()) and not bool((tensor == POISON).any()), f"{name}: not all written"
    tensor_bytes = x["q"].numel() * 2
    for what, plan in (("forward", forward.plan), ("backward", backward.plan)):
        assert plan.workspace_bytes < 8 * tensor_bytes, f"{what}: workspace of {plan.workspace_bytes} bytes"
    return f"workspace forward {forward.plan.workspace_bytes >> 10} KB, backward {backward.plan.workspace_bytes >> 20} MB"


def test_repeats(options: argparse.Namespace) -> str:
    """1,000 forward runs, and deterministic backward ones, give the same bits, with a bias, sinks and a mask as data too; and so
    does any place in the batch. How far 100 runs of the default backward pass are from the first of them."""
    done, spreads = [], []
    for dim, causal in ((64, True), (128, False), (256, True)):
        case = Case(batch=3, seqlen_q=777, seqlen_k=777, heads=8, heads_kv=2, head_dim=dim, causal=causal, deterministic=True)
        x = make_inputs(case, 0)
        out, dout = (torch.randn(case.shape("out"), device=DEV).to(case.dtype) for _ in range(2))
        lse = torch.empty(case.lse_shape(), device=DEV)
        forward = Forward(case, **x, out=out, lse=lse)
        grads = {name: torch.empty(case.shape(name), dtype=case.dtype, device=DEV) for name in ("dq", "dk", "dv")}
        backward = Backward(case, {**x, "out": out, "dout": dout, **grads}, lse)
        first: list[torch.Tensor] = []
        for n in range(options.repeats):
            forward.run()
            backward.run()
            results = [out, lse, *(grads.values())]
            if n == 0:
                first = [t.clone() for t in results]
            for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), results, first, strict=True):
                assert torch.equal(a, b), f"{name}: run {n} has other bits (head_dim {dim})"
            if out_of_time():
                break
        done.append(n + 1)
        spreads.append(f"head_dim {dim} {spread_of_default(case, {**x, 'out': out, 'dout': dout}, lse, min(100, options.repeats))}")
        alone = Case(**{**case.__dict__, "batch": 1})
        one = torch.empty(alone.shape("out"), dtype=case.dtype, device=DEV)
        for b in range(case.batch):
            Forward(alone, **{name: t[b : b + 1].contiguous() for name, t in x.items()}, out=one).run()
            assert torch.equal(one[0], out[b]), f"sequence {b} alone has other bits (head_dim {dim})"
    with_options = ", ".join(runs_with(what, options.repeats) for what in ("bias", "sinks", "mask"))
    return f"{done} runs; {with_options}; default backward: {', '.join(spreads)}"


def runs_with(what: str, runs: int) -> str:
    """How many runs with a bias, sinks or a mask as data gave the bits of the first, forward and backward, by which kernel. Through Python:
    `Forward` and `Backward` have no such arrays."""
    case = Case(batch=3, seqlen_q=777, seqlen_k=777, heads=8, heads_kv=2, head_dim=128, causal=what != "mask", has_dlse=True)
    g = torch.Generator().manual_seed(1)
    leaves = {name: tensor.requires_grad_() for name, tensor in make_inputs(case, 1).items()}
    more: dict[str, Any] = {"causal": case.causal}
    if what == "bias":  # one for all sequences, so that its gradient is a sum over them
        leaves["bias"] = torch.randn(1, 8, 777, 777, generator=g).to(DEV).requires_grad_()
    elif what == "sinks":
        leaves["sinks"] = torch.randn(8, generator=g).to(DEV).requires_grad_()
    else:  # blocks that are hidden, seen in part and seen whole
        density = (torch.randint(0, 3, (3, 1, 13, 13), generator=g) / 2).repeat_interleave(60, 2).repeat_interleave(60, 3)
        keep = torch.rand(3, 1, 777, 777, generator=g) < density[:, :, :777, :777]
        more["mask"] = strobe.masks.from_bool(keep, block=(128, 64)).to(DEV)
    upstream = [torch.randn(shape, generator=g).to(DEV) for shape in (case.shape("out"), case.lse_shape())]
    upstream[0] = upstream[0].to(case.dtype)
    names = ("out", "lse", *(f"d{name}" for name in leaves))
    first: list[torch.Tensor] = []
    for n in range(runs):
        found = strobe.torch.attention(**leaves, **more, deterministic=True, return_lse=True)
        results = [*found, *torch.autograd.grad(found, list(leaves.values()), upstream)]
        first = first or [tensor.clone() for tensor in results]
        for name, a, b in zip(names, results, first, strict=True):
            assert torch.equal(a, b), f"{name} with {what}: run {n} has other bits"
        if out_of_time():
            break
    return f"{what} {n + 1} ({strobe.why().splitlines()[0].split()[-1]})"


def spread_of_default(case: Case, tensors: dict[str, torch.Tensor], lse: torch.Tensor, runs: int) -> str:
    """The largest difference of a gradient to that of the first run, over the largest gradient."""
    case = Case(**{**case.__dict__, "deterministic": False})
    grads = {name: torch.empty(case.shape(name), dtype=case.dtype, device=DEV) for name in ("dq", "dk", "dv")}
    backward = Backward(case, {**tensors, **grads}, lse)
    first: dict[str, torch.Tensor] = {}
    spread = dict.fromkeys(grads, 0.0)
    for _ in range(runs):
        for tensor in grads.values():
            tensor.fill_(POISON)
        backward.run()
        first = first or {name: tensor.clone() for name, tensor in grads.items()}
        for name, tensor in grads.items():
            off = float((tensor.double() - first[name].double()).abs().max())
            assert math.isfinite(off), f"{name}: not finite (head_dim {case.head_dim})"
            spread[name] = max(spread[name], off / float(first[name].abs().max()))
    return f"({runs} runs): " + " ".join(f"{n} {x:.2g}" if x else f"{n} same bits" for n, x in spread.items())


def test_cpu(_: argparse.Namespace) -> str:
    """The same problem on the CPU and on the GPU: both within the rule, hence of each other; dropout bit by bit."""
    worst_ratio = 0.0
    for seed, extra in enumerate(({}, {"causal": True}, {"softcap": 9.0, "alibi": 1}, {"dropout_p": 0.3}, {"window": (50, 10)})):
        case = Case(batch=2, seqlen_q=190, seqlen_k=230, heads=4, heads_kv=2, head_dim=72, **extra)
        x = make_inputs(case, seed)
        slopes = torch.rand(case.heads) * 0.3 if case.alibi else None
        results = []
        for device in ("cpu", DEV):
            here = {name: t.to(device) for name, t in x.items()}
            out = torch.empty(case.shape("out"), dtype=case.dtype, device=device)
            Forward(case, **here, out=out, alibi_slopes=None if slopes is None else slopes.to(device), seed=seed, offset=5).run()
            results.append(out.to(DEV))
        keep = st.host_dropout_mask(case, seed, 5) if case.dropout_p > 0 else None
        there = None if slopes is None else slopes.to(DEV)
        ref, _ = st.full_reference(case, **x, slopes=there, keep=keep)
        other, _ = st.full_reference(case, **x, slopes=there, keep=keep, dtype=case.dtype)
        worst_ratio = max(worst_ratio, check_close("GPU against CPU", results[1], results[0].double(), other, 4.0))
        check_close("CPU", results[0], ref, other)
    return f"worst difference {worst_ratio:.2f} of what is allowed"


def test_errors(_: argparse.Namespace) -> str:
    """Bad input is refused with a text, nothing is launched, and the next call works."""
    case = Case(batch=1, seqlen_q=128, seqlen_k=128, heads=2)
    x = make_inputs(case, 0)
    out = torch.full(case.shape("out"), POISON, dtype=case.dtype, device=DEV)

    def refused(what: str, wanted: str, run: Callable[[], object]) -> None:
        try:
            run()
        except Exception as e:  # noqa: BLE001
            assert wanted in str(e), f"{what}: text is {e}, expected {wanted!r} in it"
            torch.cuda.synchronize()
            return
        raise AssertionError(f"{what}: was accepted")

    host = torch.zeros(case.shape("q"), dtype=case.dtype)
    refused("host pointer", "host memory", lambda: Forward(case, host, x["k"], x["v"], out).run())
    refused("host output", "host memory", lambda: Forward(case, **x, out=host).run())
    refused("odd address", "alignment", lambda: Forward(case, q=_off_by_one_byte(x["q"]), k=x["k"], v=x["v"], out=out).run())
    f = Case(**{**case.__dict__, "dtype": torch.float32})
    refused("float32", "fp32", lambda: Forward(f, **{n: t.float() for n, t in x.items()}, out=out.float()))
    refused("device", "device_index", lambda: lib.make_plan(st.problem_of(case, False, device_index=77, **x)))
    if torch.cuda.device_count() > 1:
        other = x["q"].to("cuda:1")
        refused("wrong device", "memory of device 1", lambda: Forward(case, other, x["k"], x["v"], out).run())
    launch = Forward(case, **x, out=out)
    if launch.workspace.size > 0:
        pieces = lib.pack_forward(
            lib.FORWARD_ARGS_SIZE, *(st.pointer(x[n]) for n in "qkv"), st.pointer(out), 0, 0, 0, 0, 0, 0,
            launch.workspace.address, launch.workspace.size - 1, 0,
        )  # fmt: skip
        refused("workspace too small", "workspace", lambda: lib.check(lib.forward(launch.address, pieces)))
    refused("head_dim", "head_dim", lambda: lib.make_plan(st.problem_of(Case(head_dim=264), False)))
    assert bool((out == POISON).all()), "a refused call wrote"
    run_case(case, 0)
    return "each refused with its text, nothing written, the next call works"


class _off_by_one_byte:
    def __init__(self, like: torch.Tensor) -> None:
        self.like = like

    def __getattr__(self, name: str) -> object:
        return getattr(self.like, name)

    def data_ptr(self) -> int:
        return self.like.data_ptr() + 1


def test_graph(_: argparse.Namespace) -> str:
    """Captured once, replayed on new data, the same bits as a launch."""
    case = Case(batch=2, seqlen_q=500, seqlen_k=500, heads=4, causal=True, deterministic=True)
    x = make_inputs(case, 0)
    out = torch.empty(case.shape("out"), dtype=case.dtype, device=DEV)
    lse = torch.empty(case.lse_shape(), device=DEV)
    dout = torch.randn(case.shape("out"), device=DEV).to(case.dtype)
    grads = {name: torch.empty(case.shape(name), dtype=case.dtype, device=DEV) for name in ("dq", "dk", "dv")}
    tensors = {**x, "out": out, "dout": dout, **grads}

    def both() -> tuple[Forward, Backward]:
        """Both directions on the current stream; what they keep alive."""
        forward, backward = Forward(case, **x, out=out, lse=lse), Backward(case, tensors, lse)
        forward.run()
        backward.run()
        return forward, backward

    both()  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = both()
    for seed in range(3):
        for name, tensor in make_inputs(case, seed).items():
            x[name].copy_(tensor)
        out.fill_(POISON)
        graph.replay()
        replayed = [t.clone() for t in (out, *grads.values())]
        out.fill_(POISON)
        both()
        for name, a, b in zip(("out", "dq", "dk", "dv"), replayed, (out, *grads.values()), strict=True):
            assert torch.equal(a, b), f"{name}: replay differs from launch"
    del kept
    return "forward and backward replayed on three sets of tensors"


def test_graph_lengths(_: argparse.Namespace) -> str:
    """Few queries on many keys, packed: captured once, replayed with other lengths, the same bits as a launch. Where a second kernel merges what
    thread blocks leave to it, it must find nothing of the replay before."""
    case = Case(lengths_q=[40, 40, 40], lengths_k=[3000, 3000, 3000], heads=2)
    x = make_inputs(case, 0)
    out = torch.empty(case.shape("out"), dtype=case.dtype, device=DEV)
    lse = torch.empty(case.lse_shape(), device=DEV)
    forward = Forward(case, **x, out=out, lse=lse)
    forward.run()  # loads the kernels
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured = Forward(case, **x, out=out, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured.run()
    for lengths_q, lengths_k in (
        ([40, 40, 40], [3000, 3000, 3000]), ([40, 0, 9], [3000, 3000, 100]), ([3, 40, 40], [20, 900, 5000]),
        ([0, 0, 0], [3000, 3000, 3000]), ([40, 40, 40], [3000, 3000, 3000]),
    ):  # fmt: skip
        for launch in (forward, captured):
            for cu, lengths in zip(launch.keep[-2:], (lengths_q, lengths_k), strict=True):
                cu.copy_(st.offsets(lengths, DEV))
        results = []
        for run in (graph.replay, forward.run):
            for tensor in (out, lse):
                tensor.fill_(POISON)
            run()
            results.append((out.clone(), lse.clone()))
        for name, a, b in zip(("out", "lse"), *results, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"{name}: replay differs from launch, queries {lengths_q}, keys {lengths_k}"
    return f"{captured.kernel}: five sets of lengths replayed"


def test_threads(_: argparse.Namespace) -> str:
    """Several host threads, each on its own stream; repeats give the same bits."""
    case = Case(batch=2, seqlen_q=700, seqlen_k=700, heads=4, head_dim=128, causal=True)
    x = make_inputs(case, 0)
    expected = torch.empty(case.shape("out"), dtype=case.dtype, device=DEV)
    Forward(case, **x, out=expected).run()
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                out = torch.empty_like(expected)
                forward = Forward(case, **x, out=out)
                for _ in range(100):
                    out.fill_(POISON)
                    forward.run()
                    if not torch.equal(out, expected):
                        wrong.append("different bits")
                        return
        except Exception:  # noqa: BLE001
            wrong.append(traceback.format_exc())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[0]
    return "6 threads, each on its stream, 100 launches"


def test_ptx(_: argparse.Namespace) -> str:
    """What a GPU newer than the machine code runs: the driver compiles the PTX. By the tool, since PyTorch has no PTX of
    its kernels; minutes."""
    tool = Path(lib.LIBRARY_PATH).resolve().parent / "bin/strobe"
    assert tool.exists(), f"{tool}: not built (target strobe_cli)"

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        env = {n: x for n, x in os.environ.items() if n != "STROBE_CUDA_ARCH"} | {"CUDA_FORCE_PTX_JIT": "1"} | more
        seconds = min(1800, max(1.0, seconds_left()))
        command = [str(tool), "check", "--device", "cuda", "--cases", "1"]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=seconds)

    if torch.cuda.get_device_capability()[0] == 9:  # the Hopper forward has none, which shows that it is asked for
        assert run().returncode > 0, "strobe check passed, or crashed, on kernels that have no PTX"
    found = run(STROBE_CUDA_ARCH="80")
    assert found.returncode == 0, (found.stdout + found.stderr)[-2000:]
    return found.stdout.strip().splitlines()[-1]
