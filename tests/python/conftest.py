"""Finds `strobe`: the installed package, or else the source tree (then STROBE_LIBRARY says which
library).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import hypothesis
import pytest

# Read when NumPy is first imported. Its small products are no work for several threads, and threads
# that wait for each other on a busy machine take 30 times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if importlib.util.find_spec("strobe") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
    # Tests that start another Python need it too.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [sys.path[0], os.environ.get("PYTHONPATH")])
    )

# Reproducible, and no deadline for one example: the machine may be busy with another build.
hypothesis.settings.register_profile(
    "strobe", deadline=None, derandomize=True, max_examples=25, database=None
)
hypothesis.settings.load_profile("strobe")


def pytest_report_header() -> str:
    import strobe

    found = strobe.info()
    return (
        f"strobe {found.version} at {found.library} ({found.cpu_isa}, {found.cpu_threads} threads)"
    )


def _devices() -> list[str]:
    """Where tests with an argument `device` run: the CPU, and a GPU if PyTorch and Strobe have
    one.
    """
    import strobe

    try:
        import torch
    except ImportError:
        return ["cpu"]
    return ["cpu", "cuda"] if torch.cuda.is_available() and strobe.info().cuda_devices else ["cpu"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", _devices())


@pytest.fixture
def rng() -> object:
    import numpy as np

    return np.random.default_rng(20230717)
