"""The interface of flash_attn 2.8.3, computed by Strobe.

What is not here (`flash_attn.modules`, `flash_attn.losses`...) raises an ImportError that says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "2.8.3"

try:
    import strobe as _strobe  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"this flash_attn is Strobe's, and Strobe cannot be imported ({error}): "
        "install strobe-attention (pip install . at the root of Strobe's repository)"
    ) from error

from . import _absent
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

_absent.explain_modules()
if not TYPE_CHECKING:
    __getattr__ = _absent.attribute(__name__, (*__all__, *_absent.MODULES))
