"""Strobe: exact attention, forward and backward, in memory that grows with the sequence, not its
square.

    out = strobe.attention(q, k, v, causal=True)      # (batch, seqlen, heads, head_dim)

FlashAttention-2 (T. Dao, arXiv:2307.08691) for CPUs and NVIDIA GPUs, on NumPy arrays, PyTorch
tensors and anything with DLPack, without copies. `python -m strobe` shows what runs on this
machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._library import VERSION as __version__  # isort: skip - first: it opens the library
from . import _modules, masks, tuning
from ._arrays import ArraySpec
from ._draw import draw
from ._errors import DeviceError, Error, InternalError, InvalidArgument, OutOfMemory, Unsupported
from ._info import CudaDevice, Info, Kernel, info
from ._kvcache import attention_with_kvcache
from ._merge import merge
from ._quantised import dequantize, quantize
from ._questions import dropout_mask, plan, why
from .functional import attention, attention_backward

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import flash_attn as flash_attn
    from . import flash_attn_3 as flash_attn_3
    from . import jax as jax
    from . import torch as torch
    from . import transformers as transformers

__all__ = [
    "ArraySpec",
    "CudaDevice",
    "DeviceError",
    "Error",
    "Info",
    "InternalError",
    "InvalidArgument",
    "Kernel",
    "OutOfMemory",
    "Unsupported",
    "__version__",
    "attention",
    "attention_backward",
    "attention_with_kvcache",
    "dequantize",
    "draw",
    "dropout_mask",
    "info",
    "masks",
    "merge",
    "plan",
    "quantize",
    "tuning",
    "why",
]


if not TYPE_CHECKING:  # which knows them from above, and no other names
    # The modules that need another package are imported when they are first asked for.
    __getattr__ = _modules.module_of


def __dir__() -> list[str]:
    return sorted({*__all__, *_modules.MODULES, *(x for x in globals() if x.startswith("__"))})
