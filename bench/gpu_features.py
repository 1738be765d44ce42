"""What the grid of gpu_bench.py does not show: fp16, GQA, variable lengths, a window, odd head dims, a head_dim_v of its
own ("mixed"), softcap, ALiBi and dropout ("scores"), the costs of determinism and of batch invariance, memory, host
cost, the Hopper kernels against the mma.sync ones ("paths"), kernel rows against each other, the paper's own story, and
JAX. Each section gives points: a label, TFLOP/s by name, and what a peer that is missing said.

    make gpu-bench ARGS="--sections gqa,varlen,window,odd,mixed,scores,deterministic,batch_invariant,paths"
    make gpu-bench ARGS="--sections memory,host,rows,story,jax"

A peer without a problem's softcap, ALiBi or dropout is not timed. "without" is Strobe without what the section is about.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_problems import Problem, problems, tensors, variants_of
from gpu_timing import captured, capturing_stream, interleaved

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "gpu"))


def strobe_calls(p: Problem, t: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import strobe

    options: dict[str, Any] = {"causal": p.causal, "batch_invariant": p.batch_invariant, "softcap": p.softcap}
    options["alibi_slopes"] = t.get("slopes")
    if p.dropout_p:
        options |= {"dropout_p": p.dropout_p, "dropout_seed": 1}
    if p.window >= 0:
        options["window"] = (p.window, 0)
    if p.lengths:
        longest = max(p.lengths)
        options |= {"cu_seqlens_q": t["cu"], "cu_seqlens_k": t["cu"], "max_seqlen_q": longest, "max_seqlen_k": longest}
    q, k, v, dout = t["q"], t["k"], t["v"], t["dout"]
    out, lse = strobe.attention(q, k, v, return_lse=True, **options)
    return (
        lambda: strobe.attention(q, k, v, out=out, return_lse=True, **options),
        lambda: strobe.attention_backward(dout, q, k, v, out, lse, deterministic=p.deterministic, **options),
    )


def fa2_calls(p: Problem, t: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """FlashAttention-2 in PyTorch, by its own operator, which knows windows and lengths."""
    import torch

    if p.softcap or p.alibi:
        raise NotImplementedError("softcap or ALiBi")
    longest = max(p.lengths, default=p.seqlen)
    left = p.window if p.window >= 0 else -1
    sides = {"window_size_left": left, "window_size_right": 0 if p.causal or left >= 0 else -1}
    if left < 0:
        sides = {}
    forward_op = torch.ops.aten._flash_attention_forward
    backward_op = torch.ops.aten._flash_attention_backward
    cu = t.get("cu")
    q, k, v, dout = t["q"], t["k"], t["v"], t["dout"]

    def forward() -> Any:
        return forward_op(q, k, v, cu, cu, longest, longest, p.dropout_p, p.causal, False, **sides)

    out, lse, rng, unused, _ = forward()

    def backward() -> Any:
        return backward_op(
            dout, q, k, v, out, lse, cu, cu, longest, longest, p.dropout_p, p.causal, rng, unused, **sides
        )

    return forward, backward


def cudnn_calls(p: Problem, t: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """cuDNN by scaled_dot_product_attention, which knows neither windows nor lengths."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    if p.lengths or p.window >= 0 or p.softcap or p.alibi or p.deterministic:
        raise NotImplementedError("lengths, a window, softcap, ALiBi or determinism")
    options = {"is_causal": p.causal, "dropout_p": p.dropout_p, "enable_gqa": p.heads != p.heads_kv}
    leaves = [t[n].transpose(1, 2).detach().requires_grad_() for n in "qkv"]

    def forward() -> Any:
        with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa(*(leaf.detach() for leaf in leaves), **options)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = sdpa(*leaves, **options)
    return forward, lambda: torch.autograd.grad(out, leaves, t["dout"].transpose(1, 2), retain_graph=True)


def flash_attn_calls(p: Problem, t: dict[str, Any], version: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The package flash_attn, version 2, 3 (flash_attn_interface) or 4 (flash_attn.cute), through autograd."""
    import torch

    if version > 2 and (p.alibi or p.dropout_p):
        raise NotImplementedError("ALiBi or dropout")
    if version == 2:
        import flash_attn as package
    elif version == 3:
        import flash_attn_interface as package
    else:
        import flash_attn.cute as package
    left, right = (p.window, 0) if p.window >= 0 else (None, None) if version == 4 else (-1, -1)
    leaves = [t[n].detach().requires_grad_() for n in "qkv"]
    options: dict[str, Any] = {"causal": p.causal, "window_size": (left, right)}
    if version != 4:
        options["deterministic"] = p.deterministic
    if p.softcap:
        options["softcap"] = p.softcap
    if version == 2:
        options |= {"alibi_slopes": t.get("slopes"), "dropout_p": p.dropout_p}

    def call(*qkv: Any) -> Any:
        if p.lengths:
            longest = max(p.lengths)
            extra = {"cu_seqlens_q": t["cu"], "cu_seqlens_k": t["cu"]}
            if version != 4:
                extra |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
            result = package.flash_attn_varlen_func(*qkv, **extra, **options)
        else:
            result = package.flash_attn_func(*qkv, **options)
        return result[0] if isinstance(result, tuple) else result

    def forward() -> Any:
        with torch.no_grad():
            return call(*(leaf.detach() for leaf in leaves))

    out = call(*leaves)
    return forward, lambda: torch.autograd.grad(out, leaves, t["dout"], retain_graph=True)


def point_of(
    p: Problem, args: Any, flush: Any, variants: dict[str, Problem] | None = None
) -> dict[str, Any]:
    """Forward and backward of Strobe, of every peer that takes the problem, and of Strobe on variants of it, by name,
    that are as much work: GPU time alone, all in turns."""
    t = tensors(p)
    point: dict[str, Any] = {"label": p.label, **p._asdict(), "missing": {}}
    forwards, backwards = {}, {}
    makers = {
        "strobe": strobe_calls,
        "fa2": fa2_calls,
        "cudnn": cudnn_calls,
        "flash_attn2": lambda p, t: flash_attn_calls(p, t, 2),
        "flash_attn3": lambda p, t: flash_attn_calls(p, t, 3),
        "flash_attn4": lambda p, t: flash_attn_calls(p, t, 4),
    }
    for name, make in makers.items():
        if args.alone and name != "strobe":
            continue
        try:
            forwards[name], backwards[name] = make(p, t)
            forwards[name]()
            backwards[name]()
        except Exception as e:
            if name == "strobe":
                raise
            forwards.pop(name, None), backwards.pop(name, None)
            point["missing"][name] = f"{type(e).__name__}: {e}".splitlines()[0][:120]
    for name, variant in (variants or {}).items():
        forwards[name], backwards[name] = strobe_calls(variant, tensors(variant))
    for direction, calls, work in (("fwd", forwards, p.flop), ("bwd", backwards, p.backward_flop)):
        if direction == "bwd" and args.forward_only:
            continue
        times = interleaved(captured(calls, point["missing"]), args.rounds, flush)
        point[direction] = {name: work / s * 1e-12 for name, s in times.items()}
    return point


def extra_bytes(run: Callable[[], Any]) -> int:
    """Peak bytes that `run` takes: what PyTorch gave out, and what left the device beside it (the library's own)."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = run()
    torch.cuda.synchronize()
    outside = max(0, taken - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved())
    del kept
    return torch.cuda.max_memory_allocated() - before + outside


def memory_point(seqlen: int) -> dict[str, Any]:
    import strobe
    import strobe_torch as st
    import torch

    q, k, v, dout = (torch.randn(1, seqlen, 1, 64, device="cuda").bfloat16() for _ in range(4))

    def training() -> Any:
        out, lse = strobe.attention(q, k, v, causal=True, return_lse=True)
        return out, strobe.attention_backward(dout, q, k, v, out, lse, causal=True)

    def standard() -> Any:
        return torch.softmax(q[0, :, 0] @ k[0, :, 0].T / 8, -1) @ v[0, :, 0]

    case = st.Case(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, heads=1, head_dim=64, causal=True)
    point: dict[str, Any] = {"seqlen": seqlen, "strobe_bytes": extra_bytes(training)}
    for name, backward in (("plan_forward_bytes", False), ("plan_backward_bytes", True)):
        point[name] = int(st.lib.make_plan(st.problem_of(case, backward)).workspace_bytes)
    if seqlen <= 65536:
        _ = q[0, :64, 0] @ k[0, :64, 0].T  # cuBLAS takes its own workspace at the first product
        point["standard_bytes"] = extra_bytes(standard)
    return point


def memory() -> list[dict[str, Any]]:
    """Peak bytes beside the tensors, to a million tokens; standard attention's while it fits."""
    points = []
    for seqlen in (1024, 4096, 16384, 65536, 262144, 1 << 20):
        points.append(memory_point(seqlen))
        sizes = "  ".join(f"{n} {b / 2**20:.1f} MB" for n, b in points[-1].items() if n != "seqlen")
        print(f"memory {seqlen:8}  {sizes}", flush=True)
    return points


def program_of(name: str) -> Path | None:
    """An executable of bench/, where it is built."""
    program = ROOT / "build" / "cuda" / "bin" / name
    if program.exists():
        return program
    print(f"{name}: not built (cmake -DSTROBE_BUILD_BENCH=ON)")
    return None


def host() -> dict[str, Any]:
    """bench/host_cost.cu."""
    program = program_of("host_cost")
    if program is None:
        return {"missing": "host_cost"}
    text = subprocess.run([program], capture_output=True, text=True, check=False).stdout
    print(text, end="", flush=True)
    return {"text": text, "extra_us": next(iter(re.findall(r"([-\d.]+) more than an empty", text)), None)}


def story(args: Any) -> dict[str, Any]:
    """examples/paper: standard attention to FlashAttention-2, step by step. Its JSON, or what it said instead."""
    program = program_of("paper_story")
    if program is None:
        return {"missing": "paper_story"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "story.json"
        command = [str(program), "--rounds", str(args.rounds), "--json", str(output)]
        if math.isfinite(args.seconds):  # of the whole bench: no section alone is to take longer
            command += ["--seconds", str(args.seconds)]
        status = subprocess.run(command, check=False).returncode
        if status != 0:
            raise RuntimeError(f"paper_story ended with status {status}")
        return json.loads(output.read_text()) if output.exists() else {"missing": "paper_story skipped"}


def jax(args: Any) -> dict[str, Any]:
    """bench/jax_bench.py in a process of its own, as JAX and PyTorch would each keep memory from the other."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "jax.json"
        command = [sys.executable, str(ROOT / "bench" / "jax_bench.py"), "--rounds", str(args.rounds), "--output", str(output)]
        subprocess.run(command, check=True)
        return json.loads(output.read_text()) if output.exists() else {"missing": "jax"}


# Rows whose choice has not been measured, on the problems between which the choice is.
CHOICES = [
    (("forward_sm90_bf16_64_128x128x4x8", "forward_sm90_bf16_64_192x128x4x12"), 64, (512, 1024, 2048, 4096)),
    (("forward_sm90_bf16_256_128x64x2x8", "forward_sm90_bf16_256_128x80x2x8"), 256, (512, 1024, 2048, 8192)),
    (("forward_sm80_bf16_64_128x64x2x4", "forward_sm80_bf16_64_128x128x2x4"), 64, (512, 1024, 2048)),
    (("backward_sm80_bf16_128_64x128x2x8", "backward_sm80_bf16_128_64x64x2x8"), 128, (512, 2048, 8192)),
]


def rows(args: Any) -> list[dict[str, Any]]:
    """Rows of kernels.def against each other: each in a process of its own, beside cuDNN as the yardstick."""
    points = []
    for names, head_dim, seqlens in CHOICES:
        for name in names:
            output = ROOT / "build" / f"row-{name}.json"
            command = [sys.executable, str(ROOT / "bench" / "gpu_bench.py"), "--head-dims", str(head_dim), "--seqlens"]
            command += [*map(str, seqlens), "--rounds", str(args.rounds), "--output", str(output), "--sections", "grid"]
            if name.startswith("forward"):
                command.append("--forward-only")
            subprocess.run(command, env={**os.environ, "STROBE_CUDA_ROW": name}, stdout=subprocess.DEVNULL, check=True)
            direction = "fwd" if name.startswith("forward") else "bwd"
            for point in json.loads(output.read_text())["grid"]:
                speed = point[direction]
                points.append({"row": name, "seqlen": point["seqlen"], "causal": point["causal"], **speed})
                print(
                    f"{name:<38} {point['seqlen']:5} {'causal' if point['causal'] else 'full':6} "
                    f"{speed['strobe']:4.0f}  cudnn {speed['cudnn']:4.0f} ({speed['strobe'] / speed['cudnn']:.3f})",
                    flush=True,
                )
    return points


def add_mma_sync(section: str, points: list[dict[str, Any]], args: Any) -> None:
    """To each point, "sm80": Strobe by the mma.sync kernels, forced in a process of its own, and "over_sm80"."""
    output = ROOT / "build" / f"{section}-sm80.json"
    command = [sys.executable, str(ROOT / "bench" / "gpu_bench.py"), "--sections", section, "--rounds", str(args.rounds)]
    command += ["--alone", "--output", str(output)]
    if args.forward_only:
        command.append("--forward-only")
    subprocess.run(command, env={**os.environ, "STROBE_CUDA_ARCH": "80"}, stdout=subprocess.DEVNULL, check=True)
    for point, other in zip(points, json.loads(output.read_text())[section], strict=True):
        cells, point["over_sm80"] = [], {}
        for direction in ("fwd", "bwd"):
            if direction in point:
                mine, point[direction]["sm80"] = point[direction]["strobe"], other[direction]["strobe"]
                point["over_sm80"][direction] = mine / point[direction]["sm80"]
                cells.append(f"{direction} {mine:4.0f}  mma.sync {point[direction]['sm80']:4.0f} ({point['over_sm80'][direction]:.2f})")
        print(f"{point['label']:<28} " + "  |  ".join(cells), flush=True)


def run(section: str, args: Any, flush: Any) -> Any:
    if section == "memory":
        return memory()
    if section == "host":
        return host()
    if section == "rows":
        return rows(args)
    if section == "story":
        return story(args)
    if section == "jax":
        return jax(args)
    points = []
    for p in problems(section):
        with capturing_stream():
            if section == "paths":
                point = point_of(p, argparse.Namespace(**{**vars(args), "alone": True}), flush)
            else:
                point = point_of(p, args, flush, {} if args.alone else variants_of(p))
        points.append(point)
        cells = []
        for direction in ("fwd", "bwd"):
            speed = point.get(direction, {})
            if speed:
                cells.append(
                    f"{direction} {speed['strobe']:4.0f}"
                    + "".join(f"  {n} {x:4.0f} ({speed['strobe'] / x:.3f})" for n, x in speed.items() if n != "strobe")
                )
        print(f"{p.label:<28} " + "  |  ".join(cells), flush=True)
    if section in ("paths", "scores") and not os.environ.get("STROBE_CUDA_ARCH"):
        add_mma_sync(section, points, args)
    return points


SECTIONS = (
    "grid", "lengths", "fp16", "gqa", "varlen", "window", "odd", "mixed", "scores", "deterministic", "batch_invariant", "paths",
    "memory", "host", "rows", "story", "decode", "prefill", "quantised", "float8", "random", "masks", "bias", "jax",
)  # fmt: skip
