"""Strobe and PyTorch compute on the threads of one OpenMP run time, whichever is imported first."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROGRAM = """
import numpy as np
{imports}
x = np.ones((1, 64, 2, 16), "float32")
assert np.isfinite(strobe.attention(x, x, x)).all()
a = torch.ones(512, 512)
assert float((a @ a).sum()) == 512.0**3
maps = open("/proc/self/maps").read().splitlines()
print(*sorted({{line.split()[-1] for line in maps if "libgomp" in line}}))
"""


@pytest.mark.parametrize("imports", ["import torch, strobe", "import strobe, torch"])
def test_one_run_time(imports: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=imports)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == 1, result.stdout
