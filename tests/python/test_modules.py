"""`strobe.torch` and its like as attributes of a package that imports neither PyTorch nor JAX."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from strobe import _modules

HIDDEN = """
import sys
class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("torch", "jax"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden)
import strobe
"""


def run(program: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_importing_strobe_imports_no_framework() -> None:
    program = """
import sys, strobe
names = dir(strobe)
for name in ("distributed", "flash_attn", "flash_attn_3", "jax", "torch", "transformers"):
    assert name in names, name
    assert f"strobe.{name}" not in sys.modules, name
assert set(strobe.__all__) < set(names)
assert "TYPE_CHECKING" not in names
for name in ("torch", "jax", "transformers", "numpy.ma"):
    assert name not in sys.modules, name
assert not hasattr(strobe, "tensorflow")
"""
    run(program)


@pytest.mark.parametrize("name", _modules.MODULES)
def test_modules_are_there_when_asked_for(name: str) -> None:
    package, _ = _modules.MODULES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    run(f"import strobe; assert strobe.{name}.__name__ == 'strobe.{name}'")


@pytest.mark.parametrize("name", _modules.MODULES)
def test_a_missing_package_is_named(name: str) -> None:
    package, wanted = _modules.MODULES[name]
    program = f"""{HIDDEN}
try:
    strobe.{name}
except ImportError as error:
    assert error.name == {package!r}
    print(error)
try:
    from strobe import {name}
except ImportError as error:
    print(error)
"""
    assert wanted.endswith(f": pip install {package}")
    said = f"strobe.{name} needs {wanted}\n"
    assert run(program) == said + said


def test_other_names_and_other_failures_are_as_ever() -> None:
    program = """
import strobe, sys
try:
    strobe.tensorflow
except AttributeError as error:
    assert str(error) == "module 'strobe' has no attribute 'tensorflow'", error
sys.modules["strobe._flash_attn"] = None  # a fault of the package's own
try:
    strobe.flash_attn
except ModuleNotFoundError as error:
    print(error.name)
"""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    assert run(program) == "strobe._flash_attn\n"
