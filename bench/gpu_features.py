"""What the grid of gpu_bench.py does not show: fp16, GQA, variable lengths, a window, odd head dims, the costs of
determinism and of batch invariance, memory, host cost, the Hopper forward against the mma.sync one, kernel rows
against each other, the paper's own story, and JAX. Each section gives points: a label, TFLOP/s by name, and what a peer
that is missing said.

    make gpu-bench ARGS="--sections gqa,varlen,window,odd,deterministic,batch_invariant,paths,memory,host,rows,story,jax"
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gpu_timing import captured, capturing_stream, interleaved

ROOT = Path(__file__).resolve().parent.parent
TOKENS, HIDDEN = 16384, 2048
sys.path.insert(0, str(ROOT / "tests" / "gpu"))


class Problem(NamedTuple):
    label: str
    head_dim: int = 128
    seqlen: int = 8192
    causal: bool = True
    heads: int = 16
    heads_kv: int = 16
    window: int = -1  # keys to the left
    lengths: tuple[int, ...] = ()  # varlen
    dtype: str = "bf16"
    deterministic: bool = False
    batch_invariant: bool = False
    softcap: float = 0.0
    alibi: bool = False
    batch: int = 0  # 0: as many as make TOKENS

    @property
    def sequences(self) -> int:
        """Of one length."""
        return self.batch or max(1, TOKENS // self.seqlen)

    @property
    def pairs(self) -> float:
        """Query-key pairs of one head that are computed."""
        total = 0.0
        for n in self.lengths or (self.seqlen,) * self.sequences:
            if self.window >= 0:
                w = min(self.window, n)
                total += w * (w + 1) / 2 + (n - w) * (w + 1)
            else:
                total += n * n * (0.5 if self.causal else 1.0)
        return total

    @property
    def flop(self) -> float:
        return 4.0 * self.pairs * self.head_dim * self.heads


def tensors(p: Problem) -> dict[str, Any]:
    import torch

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[p.dtype]
    torch.manual_seed(1)
    rows = (sum(p.lengths),) if p.lengths else (p.sequences, p.seqlen)
    made = {
        name: torch.randn(*rows, heads, p.head_dim, device="cuda", dtype=kind)
        for name, heads in (("q", p.heads), ("k", p.heads_kv), ("v", p.heads_kv), ("dout", p.heads))
    }
    if p.lengths:
        ends = torch.tensor((0, *p.lengths)).cumsum(0)
        made["cu"] = ends.to("cuda", torch.int32)
    if p.alibi:
        made["slopes"] = 2.0 ** -torch.linspace(1, 8, p.heads, device="cuda")
    return made


def strobe_calls(p: Problem, t: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    import strobe

    options: dict[str, Any] = {"causal": p.causal, "batch_invariant": p.batch_invariant, "softcap": p.softcap}
    options["alibi_slopes"] = t.get("slopes")
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
        return forward_op(q, k, v, cu, cu, longest, longest, 0.0, p.causal, False, **sides)

    out, lse, rng, unused, _ = forward()

    def backward() -> Any:
        return backward_op(
            dout, q, k, v, out, lse, cu, cu, longest, longest, 0.0, p.causal, rng, unused, **sides
        )

    return forward, backward


def flash_attn_calls(p: Problem, t: dict[str, Any], version: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The package flash_attn, version 2, 3 (flash_attn_interface) or 4 (flash_attn.cute), through autograd."""
    import torch

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
        "flash_attn2": lambda p, t: flash_attn_calls(p, t, 2),
        "flash_attn3": lambda p, t: flash_attn_calls(p, t, 3),
        "flash_attn4": lambda p, t: flash_attn_calls(p, t, 4),
    }
    for name, make in makers.items():
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
    for direction, calls, factor in (("fwd", forwards, 1.0), ("bwd", backwards, 2.5)):
        if direction == "bwd" and args.forward_only:
            continue
        times = interleaved(captured(calls, point["missing"]), args.rounds, flush)
        point[direction] = {name: factor * p.flop / s * 1e-12 for name, s in times.items()}
    return point


def packed_lengths() -> tuple[int, ...]:
    """Log-uniform from 64 to 8k, as documents packed for training are."""
    r = random.Random(7)
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(min(int(64 * 128 ** r.random()), 8192))
    return tuple(lengths)


def problems(section: str) -> list[Problem]:
    if section == "fp16":
        return [Problem(f"fp16 {d} causal", d, heads=HIDDEN // d, heads_kv=HIDDEN // d, dtype="fp16") for d in (64, 128, 256)]
    if section == "gqa":
        return [Problem(f"GQA 4:1 {d}", d, heads=HIDDEN // d, heads_kv=HIDDEN // d // 4) for d in (64, 128)]
    if section == "window":
        return [Problem(f"window 1024 {d}", d, heads=HIDDEN // d, heads_kv=HIDDEN // d, window=1023) for d in (64, 128)]
    if section == "odd":
        return [Problem(f"head_dim {d}", d, seqlen=4096) for d in (40, 72, 80, 96, 112, 160, 192)]
    if section == "deterministic":
        return [Problem(f"deterministic {d}", d, heads=HIDDEN // d, heads_kv=HIDDEN // d, deterministic=True) for d in (64, 128)]
    if section == "batch_invariant":
        # Where the flag may choose another row or order: many tiles, few, and a group that is split.
        shapes = [Problem(f"{d}", d, heads=HIDDEN // d, heads_kv=HIDDEN // d) for d in (64, 128, 256)]
        shapes += [Problem("64, 1k", 64, seqlen=1024, heads=32, heads_kv=32)]
        shapes += [Problem("128, one short sequence", seqlen=512, batch=1)]
        shapes += [Problem("128, GQA 8:1, one sequence", seqlen=2048, batch=1, heads=32, heads_kv=4)]
        shapes += [Problem("128, packed", lengths=packed_lengths())]
        return [p._replace(label=f"batch invariant {p.label}", batch_invariant=True) for p in shapes]
    if section == "paths":
        plain = Problem("plain")
        return [
            plain,
            plain._replace(label="fp16", dtype="fp16"),
            plain._replace(label="GQA 4:1", heads_kv=4),
            plain._replace(label="packed", lengths=packed_lengths()),
            plain._replace(label="window 1024", window=1023),
            plain._replace(label="softcap", softcap=30.0),
            plain._replace(label="ALiBi", alibi=True),
            *(Problem(f"head_dim {d}", d, seqlen=4096) for d in (40, 64, 72, 80, 96, 112, 160, 192, 256)),
            *(Problem(f"softcap {d}", d, heads=HIDDEN // d, heads_kv=HIDDEN // d, softcap=30.0) for d in (64, 256)),
            *(Problem(f"ALiBi {d}", d, heads=HIDDEN // d, heads_kv=HIDDEN // d, alibi=True) for d in (64, 256)),
        ]
    if section == "varlen":
        lengths = packed_lengths()
        return [Problem(f"varlen {len(lengths)} sequences {d}", d, lengths=lengths, heads=HIDDEN // d, heads_kv=HIDDEN // d) for d in (64, 128)]
    raise ValueError(section)


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
    """bench/paper_story.cu: standard attention to FlashAttention-2, step by step. Its JSON, or what it said instead."""
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


def paths(args: Any, flush: Any) -> list[dict[str, Any]]:
    """The forward by the kernel that the plan takes, and by the mma.sync one: the latter in a process of its own."""
    speeds = []
    for p in problems("paths"):
        with capturing_stream():
            replay = captured({"strobe": strobe_calls(p, tensors(p))[0]}, {})
            speeds.append(p.flop / interleaved(replay, args.rounds, flush)["strobe"] * 1e-12)
    points = [{"label": p.label, **p._asdict(), "fwd": {"strobe": x}} for p, x in zip(problems("paths"), speeds, strict=True)]
    if os.environ.get("STROBE_CUDA_ARCH"):
        return points
    output = ROOT / "build" / "paths-sm80.json"
    command = [sys.executable, str(ROOT / "bench" / "gpu_bench.py"), "--sections", "paths", "--rounds", str(args.rounds)]
    command += ["--output", str(output)]
    subprocess.run(command, env={**os.environ, "STROBE_CUDA_ARCH": "80"}, stdout=subprocess.DEVNULL, check=True)
    for point, other in zip(points, json.loads(output.read_text())["paths"], strict=True):
        point["fwd"]["sm80"] = other["fwd"]["strobe"]
        point["over_sm80"] = point["fwd"]["strobe"] / point["fwd"]["sm80"]
        print(f"{point['label']:<28} fwd {point['fwd']['strobe']:4.0f}  mma.sync {point['fwd']['sm80']:4.0f} ({point['over_sm80']:.2f})", flush=True)
    return points


# Of a problem: the same without what its section is about, timed in the same rounds.
def variants_of(p: Problem) -> dict[str, Problem]:
    if p.dtype == "fp16":
        return {"bf16": p._replace(dtype="bf16")}
    if p.deterministic or p.batch_invariant:
        return {"without": p._replace(deterministic=False, batch_invariant=False)}
    return {}


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
    if section == "paths":
        return paths(args, flush)
    points = []
    for p in problems(section):
        with capturing_stream():
            point = point_of(p, args, flush, variants_of(p))
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
    return points


SECTIONS = (
    "grid", "lengths", "fp16", "gqa", "varlen", "window", "odd", "deterministic", "batch_invariant", "paths", "memory", "host", "rows", "story",
    "decode", "jax",
)  # fmt: skip
