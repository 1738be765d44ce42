"""Programs of this repository as modules, for tests of their parts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_of(path: Path) -> ModuleType:
    """A program as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module
