"""Finds `strobe`: the installed package, or else the source tree (then STROBE_LIBRARY says which
library).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Read when NumPy is first imported. Its small products are no work for several threads, and threads
# that wait for each other on a busy machine take 30 times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Read when JAX is. Its compiler would spend most of these tests on optimising what runs once.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

if importlib.util.find_spec("strobe") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
    # Tests that start another Python need it too.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [sys.path[0], os.environ.get("PYTHONPATH")])
    )

# Reproducible, and neither a deadline for one example nor a complaint that making it took long: the
# machine may be busy with another build.
hypothesis.settings.register_profile(
    "strobe",
    deadline=None,
    derandomize=True,
    max_examples=25,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
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


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    """A function that was compiled in many ways, or could not be, is not compiled again in a
    process: what a test sees of PyTorch's compiler must not hang on those before it.
    """
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None:
        compiler.reset()


@pytest.fixture
def rng() -> object:
    import numpy as np

    return np.random.default_rng(20230717)


@pytest.fixture(scope="session")
def shim_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distribution flash-attn (python/flash_attn_shim)."""
    import shim

    return shim.install(tmp_path_factory.mktemp("flash_attn"))


@pytest.fixture
def flash_attn(shim_site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package of that distribution, installed for one test."""
    finders = list(sys.meta_path)
    monkeypatch.syspath_prepend(str(shim_site))
    yield importlib.import_module("flash_attn")
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def transformers() -> Iterator[Any]:
    """The package, in which Strobe is registered, on one thread: the models are tiny."""
    package = importlib.import_module("transformers")
    if package.__version__.startswith("4."):
        pytest.skip("the models and caches of transformers 5")
    torch = importlib.import_module("torch")
    package.logging.set_verbosity_error()
    importlib.import_module("strobe.transformers").register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield package
    torch.set_num_threads(threads)
