"""The modules of this package that need another package: `strobe.torch` and its like are attributes
of `strobe` that are imported when they are first asked for, so that `import strobe` imports neither
PyTorch nor JAX.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

_TORCH: Final = ("torch", "PyTorch 2.4 or newer: pip install torch")
_JAX: Final = ("jax", "JAX 0.6 or newer: pip install jax")
# What each needs: the package that it imports, and what to do where that is not there.
MODULES: Final = {
    "distributed": _TORCH,
    "flash_attn": _TORCH,
    "flash_attn_3": _TORCH,
    "jax": _JAX,
    "torch": _TORCH,
    "transformers": _TORCH,
}


def module_of(name: str) -> ModuleType:
    """The module strobe.<name>, imported.

    Raises:
        AttributeError: there is no module of that name.
        ImportError: the package that it needs is not installed, or too old.
    """
    if name not in MODULES:
        raise AttributeError(f"module 'strobe' has no attribute {name!r}")
    package, wanted = MODULES[name]
    try:
        return importlib.import_module(f"strobe.{name}")
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ImportError(f"strobe.{name} needs {wanted}", name=package) from error
