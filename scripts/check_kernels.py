#!/usr/bin/env python3
"""What ptxas made of every kernel instance: registers, spills, products, widths of memory accesses.

    scripts/check_kernels.py [BUILD]            table of all instances, exit 1 where a rule is broken
    scripts/check_kernels.py BUILD --only 128   instances with this in their name

BUILD is a build tree with CUDA objects (build/cuda); of one with STROBE_CUDA_SAMPLE only what has machine code is looked
at. Needs cuobjdump: $CUOBJDUMP, on PATH, beside nvcc, or from PyPI in build/venv (nvidia-cuda-cuobjdump, triton). Without
one it exits with 77 (skipped), unless --require is given.

Rules, for the main kernels (forward_kernel, backward_kernel, decode_kernel) of each architecture:
  spills     none; nor of the kernel before a decode kernel (update_kernel)
  products   HGMMA on sm_90a (of float8 QGMMA), HMMA elsewhere, and none of wgmma's products waited for one by one, which is what
             ptxas does where it serialises them (notes C7510 and up, which nvcc does not show)
  copies     every copy from global to shared memory is 16 bytes wide, and tiles leave in 16 bytes
  additions  on sm_90 the backward adds four values of dQ at a time
  order      on sm_90a the warps that load come before those that multiply: what lies far behind a launch's first instruction is
             read a microsecond later, and only the latter can wait
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/gpu"))
from rows import ROWS

# Those of which a build for 9.0 alone has PTX and no machine code.
SMALL = {row.name for row in ROWS if row.when == "small"}


@dataclass
class Kernel:
    row: str
    name: str  # forward, backward, decode
    variant: str  # plain; general: any score; ordered: deterministic; stores dQ: without a sum; elements: decoding of unaligned rows
    arch: str
    registers: int = 0
    stack: int = 0
    opcodes: Counter[str] = field(default_factory=Counter)
    product_groups: list[int] = field(default_factory=list)  # wgmmas between two waits
    loads_first: bool = False  # TMA's first load comes before the first wgmma

    def count(self, pattern: str) -> int:
        return sum(n for op, n in self.opcodes.items() if re.match(pattern, op))


def find_cuobjdump() -> str | None:
    candidates = [os.environ.get("CUOBJDUMP"), shutil.which("cuobjdump")]
    if nvcc := shutil.which("nvcc"):
        candidates.append(str(Path(nvcc).resolve().parent / "cuobjdump"))
    candidates += [str(p / "bin/cuobjdump") for p in sorted(Path("/usr/local").glob("cuda*"))]
    spec = importlib.util.find_spec("triton")
    packages = [Path(spec.origin).parents[1]] if spec and spec.origin else []
    packages += (ROOT / "build/venv/lib").glob("python*/site-packages")
    for package in packages:  # of PyPI: nvidia-cuda-cuobjdump, triton
        candidates += map(str, package.glob("nvidia/cu*/bin/cuobjdump"))
        candidates.append(str(package / "triton/backends/nvidia/bin/cuobjdump"))
    return next((c for c in candidates if c and os.access(c, os.X_OK)), None)


def dump(tool: str, flag: str, path: Path) -> str:
    run = subprocess.run([tool, flag, str(path)], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"check_kernels: {tool} {flag} {path}: {run.stderr.strip()}")
    return run.stdout


TYPES = ("bf16", "fp16", "e4m3")  # 1 to 3 of strobe_dtype, which kernels have as a template argument


def rows_of(path: Path) -> list[str]:
    """The rows in an object file: it may have a row of kernels.def in both types."""
    name = path.name.removesuffix(".cu.o")
    # bf16_fp16, or of a quantised cache bf16_int8_fp16_int8.
    types = re.search(r"_((?:(?:bf16|fp16)(?:_(?:int8|e4m3|q8|q4))?_)+)", name)
    kinds = re.findall(r"(?:bf16|fp16)(?:_(?:int8|e4m3|q8|q4))?", types[1]) if types else []
    return [name.replace(types[1], f"{kind}_") for kind in kinds] if types else [name]


def parse(tool: str, path: Path) -> list[Kernel]:
    """The main kernels in an object file, and the one before a decode kernel."""
    rows = {t: row for t in TYPES for row in rows_of(path) if f"_{t}_" in row}
    kernels: dict[tuple[str, str], Kernel] = {}
    current: Kernel | None = None
    arch = ""

    def kernel_of(symbol: str) -> Kernel | None:
        main = re.search(r"\d(forward|backward|decode|update)_kernelI.*?((?:Lb[01]E)*)(?:NS\d*_\d+WithoutChunksI)?(NS\d*_\d+\w{0,12}ParamsE)?E*(?:NS\d*_\d+(Chunked)?DivisionE)?E*v", symbol)
        if not main:
            return None
        variants = {"": "plain", "Lb0E": "plain", "Lb0ELb0E": "plain", "Lb0ELb1E": "ordered"}
        if main[1] == "decode":
            variants |= {"Lb1ELb0E": "general", "Lb1ELb1E": "elements"}
        variant = variants.get(main[2], "general")
        if "BackwardTraits" in symbol:  # in the order of its parameters
            names = [name for bit, name in zip(re.findall(r"Lb([01])E", main[2]), ("ordered", "general", "stores dQ", "mask", "bias"), strict=True) if bit == "1"]
            variant = "+".join(names) or "plain"
        elif "BackwardShape" in symbol:  # mma.sync's; whether its kernels go through a mask's lists is its shape's
            names = [name for bit, name in zip(re.findall(r"Lb([01])E", main[2]), ("general", "ordered", "bias"), strict=True) if bit == "1"]
            names += ["mask"] if re.search(r"BackwardConfigE(?:Li\d+E)+EELb1E", symbol) else []
            variant = "+".join(names) or "plain"
        elif "ForwardShape" in symbol:  # mma.sync's: general, bias (or a mask as data)
            variant = "bias" if main[2].endswith("Lb1E") else "general" if main[2].startswith("Lb1E") else "plain"
        elif of_traits := re.search(r"\dTraitsI(?:Li\d+E)+Lb([01])ELb([01])ELb([01])E", symbol):  # Hopper's forward
            for is_it, name in zip(of_traits.groups(), ("mask", "bias", "invariant"), strict=True):
                variant = name if is_it == "1" else variant
        elif "WideTraits" in symbol:  # general, ordered
            names = [name for bit, name in zip(re.findall(r"Lb([01])E", main[2]), ("general", "ordered"), strict=True) if bit == "1"]
            variant = "+".join(sorted(names, reverse=True)) or "plain"
        if main[3] and "Update" in main[3]:
            variant = f"{variant}+new"
        if main[3] and "Masked" in main[3]:
            variant = "mask"
        if main[4]:
            variant = f"{variant}+chunks"
        dtype = TYPES[int(re.search(r"(?:ILi|Li(?:75|80|90)ELi)([123])ELi", symbol)[1]) - 1]
        row = rows.get(dtype, rows_of(path)[0])  # of float8 a file has one type, whose kernels may have fp16
        return kernels.setdefault((symbol, arch), Kernel(row, main[1], variant, arch))

    for line in dump(tool, "-sass", path).splitlines():
        if m := re.search(r"^arch = (sm_\w+)", line):
            arch = m[1]
        elif m := re.search(r"Function : (\S+)", line):
            current = kernel_of(m[1])
        elif current and (m := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line)):
            op = m[1]
            current.loads_first |= op.startswith("UTMALDG") and not current.product_groups
            current.opcodes[op] += 1
            if op.startswith(("HGMMA", "QGMMA")):
                if not current.product_groups:
                    current.product_groups.append(0)
                current.product_groups[-1] += 1
            elif op.startswith("WARPGROUP.DEPBAR") and current.product_groups and current.product_groups[-1]:
                current.product_groups.append(0)

    for line in dump(tool, "-res-usage", path).splitlines():
        if m := re.search(r"^arch = (sm_\w+)", line):
            arch = m[1]
        elif m := re.search(r"Function (\S+):", line):
            current = kernel_of(m[1])
        elif current and (m := re.search(r"REG:(\d+) STACK:(\d+)", line)):
            current.registers, current.stack = int(m[1]), int(m[2])
    return list(kernels.values())


def faults(k: Kernel) -> list[str]:
    found = []
    if k.stack > 0:
        found.append(f"{k.stack} bytes of stack, expected none: spills or arrays")
    if k.name == "update":  # which multiplies nothing and reads each row once
        return found
    groups = [n for n in k.product_groups if n]
    if k.arch == "sm_90a":
        if not groups:
            found.append("no HGMMA, nor QGMMA")
        elif min(groups) < (2 if "_e4m3_" in k.row else 4):  # 32 keys or columns each
            found.append(f"wgmma is serialised: {groups} products between waits")
        if not k.loads_first:
            found.append("warps that multiply come before those that load")
    elif not k.count("HMMA"):
        found.append("no HMMA")
    copies = k.count(r"LDGSTS")
    blocks = re.search(r"_q[84]_", k.row) is not None  # whose rows are not aligned to so many
    if not blocks and copies != k.count(r"LDGSTS.*\.128"):
        found.append(f"{copies - k.count(r'LDGSTS.*[.]128')} copies are narrower than 16 bytes")
    # The decode kernel that reads element by element is for rows that are not aligned to 16 bytes, and 7.5 copies through registers.
    if k.arch != "sm_90a" and "_sm75_" not in k.row and not copies and (k.name, k.variant.removesuffix("+chunks").removesuffix("+new")) != ("decode", "elements"):
        found.append("no asynchronous copies")
    if k.name == "forward" and not k.count(r"STG?\.E.*128|UTMASTG"):
        found.append("O is not stored in 16 bytes")
    if k.name == "backward":
        if k.arch in ("sm_90", "sm_90a") and k.count(r"REDG?\.E\.ADD\.F") != k.count(r"REDG?\.E\.ADD\.F32x4"):
            found.append("dQ is not added four values at a time")
        if "stores dQ" in k.variant and k.count(r"REDG?\..*"):
            found.append("dQ is added to a sum, expected that it is stored")
        if not k.count(r"STG?\.E.*128"):
            found.append("dK and dV are not stored in 16 bytes")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Registers, spills, products and access widths of every kernel.")
    parser.add_argument("build", nargs="?", type=Path, default=ROOT / "build/cuda")
    parser.add_argument("--only", default="", help="part of the rows' names")
    parser.add_argument("--require", action="store_true", help="fail where cuobjdump is missing")
    options = parser.parse_args()
    tool = find_cuobjdump()
    if not tool:
        print("check_kernels: skipped, no cuobjdump (set CUOBJDUMP)")
        return 1 if options.require else 77
    objects = sorted(options.build.glob("src/cuda/CMakeFiles/*/kernels/*.cu.o"))
    objects = [o for o in objects if any(options.only in row for row in rows_of(o))]
    if not objects:
        print(f"check_kernels: no objects in {options.build}: build the target strobe_cuda_objects", file=sys.stderr)
        return 1
    print(f"{'row':<38} {'kernel':<17} {'arch':<7} {'regs':>4} {'stack':>5} {'mma':>5} {'ldsm':>5} {'copies':>6} {'lds/sts<16':>10} {'ex2':>4}")
    broken = 0
    with ProcessPoolExecutor() as pool:
        parsed = [k for kernels in pool.map(partial(parse, tool), objects) for k in kernels]
    rows = [row for path in objects for row in rows_of(path) if options.only in row]
    spare = SMALL if all(k.arch.startswith(("sm_75", "sm_90")) for k in parsed) else set()
    left_out = 0
    for row in rows:
        kernels = [k for k in parsed if k.row == row]
        if not kernels and row in spare:
            left_out += 1
        elif not kernels:
            print(f"{row}: no main kernel", file=sys.stderr)
            broken += 1
        for k in sorted(kernels, key=lambda k: (k.arch, k.variant)):
            narrow = k.count(r"(LDS|STS)(?!M)") - k.count(r"(LDS|STS)\.128")
            print(
                f"{k.row:<38} {k.variant:<17} {k.arch:<7} {k.registers:>4} {k.stack:>5} {k.count('HMMA|[HQ]GMMA'):>5} "
                f"{k.count('LDSM'):>5} {k.count('LDGSTS|UTMALDG'):>6} {narrow:>10} {k.count('MUFU.EX2'):>4}"
            )
            for fault in faults(k):
                print(f"  FAULT: {fault}")
                broken += 1
    some = f" ({left_out} of them without machine code)" if left_out else ""
    print(f"check_kernels: {len(rows)} rows{some}, " + (f"{broken} faults" if broken else "no faults"))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
