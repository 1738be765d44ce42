"""compute-sanitizer's memcheck, racecheck, synccheck and initcheck over `strobe check --device cuda`, with each row
of kernels.def forced in turn.

    make gpu-sanitize                                          everything: hours
    make gpu-sanitize ARGS="--seconds 540"                     a slice: stops in time, says how to go on
    make gpu-sanitize ARGS="--tools racecheck --rows sm90"     one tool, rows with this in their name

The tool `strobe` has no PyTorch in it, so that whatever is reported is of these kernels. One line a run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from rows import ROOT, ROWS

TOOLS = {
    "memcheck": ["--leak-check", "no"],
    "racecheck": ["--racecheck-report", "all"],
    "synccheck": [],
    # Workspaces are not initialised on purpose (what they hold must not matter); padding is never read.
    "initcheck": [],
}


def main() -> int:
    parser = argparse.ArgumentParser(description="compute-sanitizer over every kernel instance.")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--rows", default="bf16", help="part of the rows' names; fp16's kernels are the same code")
    parser.add_argument("--cases", type=int, default=1, help="of each of strobe check's features")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--strobe", type=Path, default=ROOT / "build/cuda/bin/strobe")
    options = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer")
    if not sanitizer:
        print("sanitize: skipped (no compute-sanitizer on PATH)")
        return 0
    if subprocess.run([options.strobe, "check", "--device", "cuda", "--cases", "1"], capture_output=True, check=False).returncode == 2:
        print("sanitize: skipped (no GPU)")
        return 0
    runs = [(tool, row) for tool in options.tools.split(",") for row in ROWS if options.rows in row.name]
    end, dirty = time.monotonic() + options.seconds, []
    for number, (tool, row) in enumerate(runs):
        if number < options.first:
            continue
        if time.monotonic() > end:
            print(f"sanitize: out of time; go on with --first {number}")
            break
        start = time.monotonic()
        command = [sanitizer, "--tool", tool, *TOOLS[tool], "--error-exitcode", "3", "--target-processes", "all"]
        command += [str(options.strobe), "check", "--device", "cuda", "--cases", str(options.cases)]
        env = {**os.environ, "STROBE_CUDA_ROW": row.name}
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        said = (run.stdout + run.stderr).splitlines()
        summary = next((line for line in reversed(said) if "SUMMARY" in line), "no summary").strip("= ")
        clean = run.returncode == 0
        print(f"{number:>3} {tool:<9} {row.name:<40} {'clean' if clean else 'DIRTY'} {time.monotonic() - start:6.1f} s  {summary}", flush=True)
        if not clean:
            dirty.append((tool, row.name))
            print("\n".join("    " + line for line in said if "=========" in line or "FAILED" in line)[:4000], flush=True)
    print(f"sanitize: {len(dirty)} dirty runs" + "".join(f"\n  {tool} {name}" for tool, name in dirty))
    return 1 if dirty else 0


if __name__ == "__main__":
    sys.exit(main())
