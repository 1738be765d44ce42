"""README's table of what runs where, asked of the library itself.

    python scripts/support_table.py                                        rewrites the CPU's rows in README.md
    python scripts/support_table.py --cuda build/cuda/tests/gpu/cuda_support   the CUDA kernels' rows; no GPU needed
    ... --check                                                            exit 1 if README.md says something else

STROBE_LIBRARY names the libstrobe.so to ask for the CPU's. Rows of the other kind are kept as README.md has them.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "python")]

import capi

BEGIN, END = "<!-- support table: scripts/support_table.py -->", "<!-- end of support table -->"
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
# Column: fields that differ from a plain bf16 forward of head_dim 64.
FEATURES: dict[str, dict[str, object]] = {
    "fp32": {"dtype": FLOAT32},
    "bf16": {},
    "fp16": {"dtype": FLOAT16},
    "backward": {"direction": 1},
    "any head_dim to 256": {"head_dim": 253},
    "head_dim_v": {"head_dim_v": 128},
    "causal, window": {"causal": 1, "window_left": 100},
    "varlen": {"varlen": 1, "total_q": 256, "total_k": 256},
    "GQA": {"heads_kv": 2},
    "ALiBi": {"alibi": 1},
    "softcap": {"softcap": 30.0},
    "dropout": {"dropout_p": 0.1},
}


def takes(library: Any, index: int, fields: dict[str, object]) -> bool:
    problem = capi.new_problem()
    wanted = {"dtype": BFLOAT16, "batch": 2, "seqlen_q": 128, "seqlen_k": 128, "heads": 4, "head_dim": 64, **fields}
    for field, value in wanted.items():
        setattr(problem, field, value)
    text = ctypes.create_string_buffer(512)
    return library.strobe_kernel_declines(index, ctypes.byref(problem), text, len(text)) == 0


def line(name: str, answers: list[bool]) -> str:
    return f"| `{name}` | " + " | ".join("yes" if yes else "-" for yes in answers) + " |"


def cpu_rows() -> dict[str, str]:
    """A line of the table per CPU kernel of the library."""
    library = capi.LIBRARY
    lines = {}
    for index in itertools.count():
        raw = library.strobe_kernel_name(index)
        if raw is None:
            return lines
        name = raw.decode()
        if not name.startswith("cuda"):  # what those take depends on the device
            lines[name] = line(name, [takes(library, index, fields) for fields in FEATURES.values()])
    return lines


def cuda_rows(program: Path) -> dict[str, str]:
    """A line per CUDA kernel, on the oldest device that has it, by tests/gpu/support.cpp."""
    lines = {}
    for name, capability in (("cuda_sm90", 90), ("cuda_sm80", 80), ("cuda_sm75", 75)):
        usual = {"dtype": FLOAT16} if capability == 75 else {}
        questions = [
            " ".join([str(capability), *(f"{k}={v}" for k, v in {**(usual if column != "bf16" else {}), **f}.items())])
            for column, f in FEATURES.items()
        ]
        asked = subprocess.run([program], input="\n".join(questions) + "\n", capture_output=True, text=True, check=True)
        lines[name] = line(name, [answer == name for answer in asked.stdout.split()])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cuda", type=Path, metavar="PROGRAM", help="cuda_support of a build with CUDA")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    known = {row.split("`")[1]: row for row in old.splitlines() if row.startswith("| `")}
    asked = cuda_rows(args.cuda) if args.cuda else cpu_rows()
    known = asked | {name: line for name, line in known.items() if name not in asked}
    # CUDA last, each back end widest first: the order in which a plan asks.
    order = sorted(known, key=lambda name: (name.startswith("cuda"), list(known).index(name)))
    header = ["| kernel | " + " | ".join(FEATURES) + " |", "| --- " * (len(FEATURES) + 1) + "|"]
    new = before + BEGIN + "\n" + "\n".join(header + [known[n] for n in order]) + "\n" + END + after
    if args.check:
        if new != text:
            print(f"{readme}: the support table is not what the library says; run {__file__}")
        return int(new != text)
    readme.write_text(new)
    print(f"{readme}: support table of {', '.join(order)}, asked of {os.environ.get('STROBE_LIBRARY', 'strobe')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
