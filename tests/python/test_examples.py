"""The examples and bench/gpt_training.py run, in short, and show what they say they show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
# Where the examples in C++ are built, beside the tool.
PROGRAMS = Path(os.environ.get("STROBE_CLI", "")).parent


def run(*words: str | Path) -> str:
    """Standard output of a program, which must succeed."""
    result = subprocess.run(
        [str(word) for word in words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # tests run beside each other
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def numbers(output: str) -> dict[str, list[float]]:
    """What a Llama block printed: the name in the first 12 columns, then the values."""
    return {line[:12]: [float(x) for x in line[12:].split()] for line in output.splitlines()[1:]}


def test_llama_block_is_the_same_in_cpp_and_pytorch() -> None:
    program = PROGRAMS / "llama_block"
    if not os.access(program, os.X_OK):
        pytest.skip(f"no {program}: STROBE_CLI names the tool, with the examples beside it")
    cpp = numbers(run(program))
    python = numbers(run(sys.executable, ROOT / "examples" / "llama_block.py"))
    assert list(cpp) == ["first token ", "last token  ", "rms         ", "checksum    "]
    assert python.keys() == cpp.keys()
    for name, values in cpp.items():
        assert python[name] == pytest.approx(values, rel=1e-5, abs=1e-5), name
