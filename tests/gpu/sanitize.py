"""compute-sanitizer's memcheck, racecheck, synccheck and initcheck over every row of kernels.def, forced in turn.

    make gpu-sanitize                                          everything
    make gpu-sanitize ARGS="--seconds 540"                     a slice: stops in time, says how to go on
    make gpu-sanitize ARGS="--tools racecheck --rows sm90"     one tool, rows with this in their name

What runs is the tool `strobe`, which has no PyTorch in it, so that whatever is reported is of these kernels: `strobe
check`, or, under racecheck, which slows a kernel down a thousandfold, `strobe run` of small problems. (Rows of float8
and of quantised caches are run by their tests, which need PyTorch: without initcheck. So are, under memcheck, masks
whose words are none.) racecheck follows an mbarrier's arrivals thread by thread: it needs a build with
STROBE_RACECHECK, where every lane of a warp arrives, and 7.5's kernels have mbarriers too (src/cuda/ptx/barrier.h,
instructions.h); with STROBE_CUDA_TURING_ON, or each process compiles these kernels anew. It also needs
compute-sanitizer 2026.4 (CUDA 13.5; pip's nvidia-cuda-sanitizer-api 13.5) on PATH: that of CUDA 13.0 loses track of
barriers once teams of several warps wait at named ones, and reports races where there are none. One line a run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rows import ROOT, ROWS, Row

TOOLS = {
    "memcheck": ["--leak-check", "no"],
    # Kernels of the library alone, where a run has PyTorch's too.
    "racecheck": ["--racecheck-report", "all", "--kernel-name", "kernel_substring=strobe"],
    "synccheck": [],
    # Workspaces are not initialised on purpose (what they hold must not matter); padding is never read.
    "initcheck": [],
}


def encoded(dtype: str, values: Any) -> bytes:
    """Values as a safetensors file has them."""
    array = np.asarray(values, {"BOOL": "?", "I32": "<i4", "F16": "<f2", "BF16": "<f4", "F32": "<f4"}[dtype])
    return (array.view("<u2")[1::2] if dtype == "BF16" else array).tobytes()  # BF16: the upper half of a float32


class Problem:
    """Tensors for a safetensors file."""

    def __init__(self, row: Row, seed: int) -> None:
        self.dtype, self.random = {"fp16": "F16", "bf16": "BF16"}[row.dtype], np.random.default_rng(seed)
        self.header: dict[str, Any] = {}
        self.data = b""

    def add(self, name: str, shape: list[int], values: list[int] | None = None, dtype: str = "") -> None:
        """values: None: random normal numbers in the row's dtype."""
        given = self.random.standard_normal(math.prod(shape), np.float32) if values is None else values
        more = encoded(dtype or self.dtype, given)
        offsets = [len(self.data), len(self.data) + len(more)]
        self.header[name] = {"dtype": dtype or self.dtype, "shape": shape, "data_offsets": offsets}
        self.data += more

    def integers(self, name: str, values: list[int], shape: list[int] | None = None) -> None:
        self.add(name, shape or [len(values)], values, "I32")

    def write(self, path: Path) -> Path:
        text = json.dumps(self.header).encode()
        own = path.with_name(f"{path.name}.{threading.get_ident()}")  # another tool may be reading the problem
        own.write_bytes(struct.pack("<Q", len(text)) + text + self.data)
        return own.replace(path)


def write_problem(
    path: Path, row: Row, heads: int, heads_kv: int, key_tiles: int = 3, *, bias: bool = False, mask: bool = False
) -> str:
    """Random q, k, v and dout: lengths that end inside a tile, two tiles at least, of keys four: blocks that are masked,
    unmasked and left out. Without key_tiles fewer keys than a tile. bias: a bias and sinks too, whose gradients are then
    computed. mask: a mask as data too, of each head, with blocks of all three kinds, and rows that see nothing."""
    # Of a bias TMA reads units of eight keys.
    seqlen_q, seqlen_k = row.tile_q + 20, key_tiles * row.tile_k + (24 if bias and row.arch == 90 else 20)
    problem = Problem(row, seqlen_q)
    for name, rows, number, dim in (
        ("q", seqlen_q, heads, row.width),
        ("k", seqlen_k, heads_kv, row.width),
        ("v", seqlen_k, heads_kv, row.width_v),
        ("dout", seqlen_q, heads, row.width_v),
    ):
        problem.add(name, [1, rows, number, dim])
    if bias:
        problem.add("bias", [1, heads, seqlen_q, seqlen_k])
        problem.add("sinks", [heads], dtype="F32")
    if mask:
        sides = problem.random.integers(0, 3, (1, heads, -(-seqlen_q // 64), -(-seqlen_k // 64))).repeat(64, 2).repeat(64, 3)
        sees = (sides == 2) | ((sides == 1) & (problem.random.random(sides.shape) < 0.5))
        sees[:, :, 70:75] = False
        problem.add("mask", [1, heads, seqlen_q, seqlen_k], sees[:, :, :seqlen_q, :seqlen_k], "BOOL")
    return str(problem.write(path))


def write_packed_problem(path: Path, row: Row) -> str:
    """Sequences of more than a tile, of none and of a few rows, and rows past the last offset, which a launch clears."""
    lengths, past = [row.tile_q + 20, 0, 7], 13
    problem = Problem(row, row.tile_k)
    for name, heads, dim in (("q", 2, row.width), ("k", 1, row.width), ("v", 1, row.width_v), ("dout", 2, row.width_v)):
        problem.add(name, [sum(lengths) + past, heads, dim])
    problem.integers("cu_seqlens", [sum(lengths[:b]) for b in range(len(lengths) + 1)])
    return str(problem.write(path))


def cached_problems(folder: Path, row: Row) -> list[list[str]]:
    """Arguments of `strobe run` for a row of kernels over KV caches: what is split over thread blocks and merged, read
    alone, appended to and turned, in pages and not, by the kernels for plain scores, for all, and for any alignment."""
    dim, key_heads, group, used = row.width, 2, 4, [700, 0, 333, 64]
    batch, page, most, added = len(used), 16, 720, 3

    def start(seed: int, queries: list[int], dim: int) -> Problem:
        problem = Problem(row, seed)
        problem.add("q", [*queries, group * key_heads, dim])
        problem.integers("seqused_k", used)
        return problem

    def rotary(problem: Problem, dim: int) -> None:
        for name in ("rotary_cos", "rotary_sin"):
            problem.add(name, [most + 150, dim // 2])

    paged = start(1, [batch, 5], dim)
    pages = list(range(batch * most // page))
    paged.random.shuffle(pages)
    for name in ("k", "v"):
        paged.add(name, [len(pages), page, key_heads, dim])
        paged.add(f"{name}_new", [batch, added, key_heads, dim])
    paged.integers("block_table", pages, [batch, most // page])
    rotary(paged, dim)
    # Packed queries and packed new keys, of which some sequences have none.
    # In a row for prompts also few queries beside many.
    ends = [0, 5, 5, 8, 9] if row.arch < 90 else [0, 150, 150, 153, 193]
    packed = start(2, [ends[-1]], dim)
    for name in ("k", "v"):
        packed.add(name, [batch, most, key_heads, dim])
        packed.add(f"{name}_new", [6, key_heads, dim])
    packed.integers("cu_seqlens_q", ends)
    packed.integers("cu_seqlens_k_new", [0, 1, 3, 3, 6])
    packed.integers("leftpad", [17, 0, 333, 2])
    rotary(packed, dim)
    odd = start(3, [batch, 1], dim - 3)
    for name in ("k", "v"):
        odd.add(name, [batch, most, key_heads, dim - 3])
        odd.add(f"{name}_new", [batch, 1, key_heads, dim - 3])
    rotary(odd, dim - 4)
    alone = start(4, [batch, 2], dim)
    for name in ("k", "v"):
        alone.add(name, [batch, most, key_heads, dim])
    alone.integers("cache_batch_idx", [3, 1, 0, 2])
    files = {"paged": paged, "packed": packed, "odd": odd, "alone": alone}
    if "mask" in row.variants:  # of a mask, of a bias, and of both
        for n, (name, words) in enumerate({"masked": "mask", "biased": "bias", "both": "mask bias"}.items()):
            of_pairs = start(5 + n, [batch, 5], dim)
            for each in ("k", "v"):
                of_pairs.add(each, [batch, most, key_heads, dim])
                of_pairs.add(f"{each}_new", [batch, added, key_heads, dim])
            shape = [1, group * key_heads, 5, most]
            if "mask" in words:
                of_pairs.add("mask", shape, of_pairs.random.random(shape) < 0.4, "BOOL")
            if "bias" in words:
                of_pairs.add("bias", shape)
            files[name] = of_pairs
    at = {name: str(problem.write(folder / f"{row.name}.{name}.safetensors")) for name, problem in files.items()}
    reads = [[at["alone"], "--window", "300", "0"], [at["alone"], "--batch-invariant"], [at["alone"], "--softcap", "20"]]
    reads += [[at[name], "--causal"] for name in ("masked", "biased", "both") if name in at]
    return [
        [at["paged"], "--causal"],
        [at["packed"], "--causal", "--softcap", "20", "--rotary-interleaved"],
        [at["odd"], "--alibi"],
        *reads,
    ]


def few_queries(folder: Path, row: Row) -> list[str]:
    """Of `strobe run`: few queries on keys without a cache, which a row of the decode kernels divides where it is asked for."""
    problem = Problem(row, 27)
    for name, rows, heads in (("q", 27, 6), ("k", 4096, 3), ("v", 4096, 3)):
        problem.add(name, [1, rows, heads, row.width])
    return [str(problem.write(folder / f"{row.name}.few.safetensors")), "--causal"]


def hostile_masks(row: Row) -> list[list[str]]:
    """Words that are no mask, for rows that read masks: of bf16, or of what 7.5 has, as the script draws them."""
    masked = any(variant.startswith("mask") for variant in row.variants)
    if row.direction == "forward" and row.arch < 90:
        masked = "bias" in row.variants  # which computes masks too
    if not masked or (row.dtype == "fp16" and row.arch > 75):
        return []
    return [[sys.executable, str(ROOT / "tests/gpu/masks.py"), "--hostile", "--count", "6"]]


def commands(tool: str, row: Row, options: argparse.Namespace, folder: Path) -> list[list[str]]:
    binary = str(options.strobe_racecheck if tool == "racecheck" else options.strobe)
    if row.form or row.is_float8:  # by PyTorch, whose own memory initcheck would have to follow
        script, words = "float8.py", ["--count", "2" if tool == "racecheck" else "12"]
        if row.form:
            script = "quantised.py"
            words += ["--form", row.form, "--dtype", row.dtype.partition("_")[0]]
        return [[sys.executable, str(ROOT / "tests/gpu" / script), *words]] if tool != "initcheck" else []
    if row.direction == "cached":
        run = [binary if row.arch == 90 else str(options.strobe), "run", "--device", "cuda", "--repeat", "1"]
        found = [[*run, *words] for words in cached_problems(folder, row)]
        if tool in ("memcheck", "synccheck"):  # hostile numbers; PyTorch's own kernels are not clean under the others
            hostile = ["--hostile", "--count", "16", *(["--prompts"] if row.arch == 90 else [])]
            found.append([sys.executable, str(ROOT / "tests/gpu/cache.py"), *hostile])
        if tool == "memcheck":
            if row.arch < 90 and row.width in (64, 256):
                found.append([*run, *few_queries(folder, row)])
            found += hostile_masks(row)
        return found

    def run_of(heads: int, heads_kv: int, key_tiles: int = 3, *, bias: bool = False, mask: bool = False) -> list[str]:
        file = folder / f"{row.name}.{heads_kv}.{key_tiles}.{bias}.{mask}.safetensors"
        return [binary, "run", write_problem(file, row, heads, heads_kv, key_tiles, bias=bias, mask=mask), *once]

    once = ["--device", "cuda", "--repeat", "1", f"--{row.direction}"]
    packed = [binary, "run", write_packed_problem(folder / f"{row.name}.packed.safetensors", row), *once, "--causal"]
    many = hostile_masks(row) if tool == "memcheck" else []
    if (row.arch, row.direction) == (90, "forward"):
        many.append(run_of(150, 150, 0))  # some thread blocks take a second item
        if "mask" in row.variants:
            few = run_of(4, 2, mask=True)
            many += [run_of(80, 40, mask=True), *([*few, "--causal", "--mask-block", block] for block in ("64", "128", "256"))]
    if (row.arch, row.direction) == (90, "backward"):
        # A block takes item after item, 128 keys of a key head each: more items than an H200 has multiprocessors, 132.
        run = run_of(36, 36)
        plain = [[*run, "--causal"], [*run, "--causal", "--deterministic"]]
        # And the kernels for any score, each copy of their weights.
        many += plain
        many += [[*command, *flags] for command in plain for flags in (["--dropout", "0.2"], ["--softcap", "20"])]
        many.append([*run, "--causal", "--alibi"])
        if row.width <= 128:  # kernels that write dQ themselves, plain and not
            few = run_of(150, 150, 0)
            many += [few, [*few, "--dropout", "0.2"]]
        if "mask" in row.variants:
            masked = run_of(36, 36, mask=True)
            many += [[*masked, "--causal"], [*masked, "--deterministic"], [*masked, "--softcap", "20"]]
        if "bias" in row.variants:
            many.append([*run_of(36, 36, bias=True), "--causal"])
    if row.arch == 75:  # `strobe check` draws bf16 too
        some = [run_of(4, 2), run_of(2, 1, bias="bias" in row.variants), run_of(2, 1, mask="mask" in row.variants)]
        ordered = [[*some[0], "--causal", "--deterministic"]] if row.direction == "backward" else []
        return [packed, *some, *([*run, "--causal"] for run in some), *ordered, *many]
    if tool != "racecheck":
        return [[binary, "check", "--device", "cuda", "--cases", str(options.cases)], packed, *many]
    run = run_of(2, 1)
    rule = ["--softcap", "20", "--alibi"] if "general" in row.variants else []
    if row.arch < 90:
        rule += ["--deterministic"]
    if "general" in row.variants and (row.arch < 90 or row.direction == "backward"):
        rule += ["--dropout", "0.2"]
    runs = [[*run, "--causal"], [*run, "--window", "100", "30", *rule]]
    if row.arch == 90 and row.direction == "backward":
        runs.append([*run, "--causal", "--deterministic"])
        if "mask" in row.variants:
            masked = run_of(2, 1, mask=True)
            runs += [[*masked, "--causal"], [*masked, "--deterministic"], [*masked, "--softcap", "20", "--dropout", "0.2"]]
    if "bias" in row.variants:
        biased = run_of(2, 1, bias=True)
        runs += [[*biased, "--causal"], [*biased, "--window", "100", "30", *(rule if row.arch < 90 else [])]]
    return [*runs, packed, *many]


def is_asked_for(row: Row, part: str) -> bool:
    """Without a part of a name: bf16, and fp16 where it is other code, as in the Hopper backward (dS in float32; at head
    dimension 128 a thread block takes one item)."""
    return part in row.name if part else row.dtype.startswith("bf16") or row.name.startswith("backward_sm90")


def main() -> int:
    parser = argparse.ArgumentParser(description="compute-sanitizer over every kernel instance.")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--rows", default="", help="part of the rows' names; else those of bf16 and all of backward_sm90")
    parser.add_argument("--cases", type=int, default=1, help="of each of strobe check's features")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="runs at a time")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--most", type=float, default=600, help="seconds of one run; longer ones count as dirty")
    parser.add_argument("--strobe", type=Path, default=ROOT / "build/cuda/bin/strobe")
    parser.add_argument("--strobe-racecheck", type=Path, default=ROOT / "build/racecheck/bin/strobe", help="for racecheck")
    options = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer")
    if not sanitizer:
        print("sanitize: skipped (no compute-sanitizer on PATH)")
        return 0
    if subprocess.run([options.strobe, "check", "--device", "cuda", "--cases", "1"], capture_output=True, check=False).returncode == 2:
        print("sanitize: skipped (no GPU)")
        return 0
    runs = [(tool, row) for tool in options.tools.split(",") for row in ROWS if is_asked_for(row, options.rows)]
    end, dirty, skipped = time.monotonic() + options.seconds, [], []
    folder = Path(tempfile.mkdtemp())

    def one(number: int, tool: str, row: Row) -> None:
        if time.monotonic() > end:
            skipped.append(number)
            return
        start = time.monotonic()
        env = {**os.environ, **row.environment}
        if tool == "racecheck" and row.arch == 90:
            env["STROBE_LIBRARY"] = str(options.strobe_racecheck.parents[1] / "libstrobe.so")  # of the same build
        clean, summaries, complaints = True, [], []
        for command in commands(tool, row, options, folder):
            words = [sanitizer, "--tool", tool, *TOOLS[tool], "--error-exitcode", "3", "--target-processes", "all", *command]
            try:
                run = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=options.most)
                code, said = run.returncode, (run.stdout + run.stderr).splitlines()
            except subprocess.TimeoutExpired:
                code, said = 124, [f"SUMMARY: not done after {options.most:.0f} s"]
            summaries.append(next((line for line in reversed(said) if "SUMMARY" in line), "no summary").strip("= "))
            clean &= code == 0 and summaries[-1] != "no summary"
            complaints += [line for line in said if "=========" in line or "FAILED" in line or line.startswith("strobe")]
        verdict, seconds = "clean" if clean else "DIRTY", time.monotonic() - start
        if not summaries:
            verdict = "left out"
        lines = [f"{number:>3} {tool:<9} {row.name:<40} {verdict} {seconds:6.1f} s  {'; '.join(dict.fromkeys(summaries))}"]
        if not clean:
            dirty.append((tool, row.name))
            lines.append("\n".join("    " + line for line in complaints)[:4000])
        print("\n".join(lines), flush=True)

    # A run keeps a core busier than the GPU: several beside each other.
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda run: one(run[0], *run[1]), list(enumerate(runs))[options.first :]))
    shutil.rmtree(folder)
    if skipped:
        print(f"sanitize: out of time; go on with --first {min(skipped)}")
    done = len(runs) - options.first - len(skipped)
    print(f"sanitize: {done} runs, {len(dirty)} dirty" + "".join(f"\n  {tool} {name}" for tool, name in dirty))
    return 1 if dirty else 0


if __name__ == "__main__":
    sys.exit(main())
