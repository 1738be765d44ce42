"""Nothing is read behind the last byte of an input: page_ends.py, by each instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("isa", ["", "avx512", "avx2", "portable"])
def test_inputs_end_where_memory_does(isa: str) -> None:
    script = Path(__file__).with_name("page_ends.py")
    env = dict(os.environ)
    env.pop("STROBE_CPU_ISA", None)
    if isa:
        env["STROBE_CPU_ISA"] = isa
    done = subprocess.run(
        [sys.executable, str(script)],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if "expected one that this CPU and build have" in done.stderr:
        pytest.skip(f"no {isa} here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cpu_" in done.stdout
