"""The interface of flash_attn 2.8.3, computed by Strobe.

What is not here (`flash_attn.ops`, `flash_attn.modules`...) raises an ImportError that says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "2.8.3"

try:
    import strobe
except ImportError as error:
    raise ImportError(
        f"this flash_attn is Strobe's, and Strobe cannot be imported ({error}): "
        "pip install . at the root of Strobe's repository"
    ) from error

from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


class _AbsentModules:
    """Last of the finders: knows no module, but why one of flash_attn's is not there."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith(f"{__name__}."):
            raise ModuleNotFoundError(
                f"No module named {name!r}: this flash_attn is Strobe's "
                f"{strobe.__version__}, which has flash_attn_interface, bert_padding and "
                "layers.rotary only",
                name=name,
            )
        return None


sys.meta_path.append(_AbsentModules)
