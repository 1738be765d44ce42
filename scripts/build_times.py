#!/usr/bin/env python3
"""How long each object of the CUDA build took to compile, from ninja's log.

    make build-times                       of build/cuda as it is
    scripts/build_times.py --clean         configures and builds the kernels in build/times first
    scripts/build_times.py BUILD -o FILE   another build tree; the table as Markdown into a file

Times are wall time of the compiler on a busy machine or not: ninja's log knows no other. A tree
that scripts/build.sh built with ccache shows what the cache took; --clean goes without.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read_log(path: Path) -> dict[str, float]:
    """Seconds by output. A rebuilt output's last entry counts."""
    seconds = {}
    for line in path.read_text().splitlines():
        fields = line.split("\t")
        if not line.startswith("#") and len(fields) >= 4:
            seconds[fields[3]] = (int(fields[1]) - int(fields[0])) / 1000
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile times of the CUDA build.")
    parser.add_argument("build", nargs="?", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="Markdown table; default BUILD/build-times.md")
    parser.add_argument("--clean", action="store_true", help="build from clean, in build/times")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    build = options.build or ROOT / ("build/times" if options.clean else "build/cuda")
    wall = None
    if options.clean:
        subprocess.run(["cmake", "-E", "rm", "-rf", str(build)], check=True)
        configure = ["cmake", "--preset", "cuda", "-B", str(build)]
        subprocess.run(configure, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        start = time.monotonic()
        subprocess.run(["ninja", "-C", str(build), f"-j{options.jobs}", "--quiet"], check=True)
        wall = time.monotonic() - start
    log = build / ".ninja_log"
    if not log.is_file():
        print(f"build_times: {log} is not there: build first, or --clean", file=sys.stderr)
        return 1
    seconds = read_log(log)
    kernels = {Path(o).name.removesuffix(".cu.o"): s for o, s in seconds.items() if o.endswith(".cu.o") and "/kernels/" in o}
    rest = sum(s for o, s in seconds.items() if "/kernels/" not in o)
    lines = ["| kernel | seconds |", "| --- | ---: |"]
    lines += [f"| {name} | {s:.1f} |" for name, s in sorted(kernels.items(), key=lambda item: -item[1])]
    lines += [f"| all {len(kernels)} kernels | {sum(kernels.values()):.0f} |", f"| everything else | {rest:.0f} |"]
    print("\n".join(lines))
    output = options.output or build / "build-times.md"
    output.write_text("\n".join(lines) + "\n")
    if wall is not None:
        print(f"\nfrom clean: {wall:.0f} s with {options.jobs} jobs")
    print(f"written to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
