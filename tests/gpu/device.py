"""Where a GPU test runs: DEV. Without PyTorch or a GPU the script that imports this says so and ends well."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def _skip(reason: str) -> None:
    print(f"{Path(sys.argv[0]).name}: skipped ({reason})")
    sys.exit(0)


try:
    import torch
except ImportError:
    _skip("no PyTorch, whose float64 is the reference")
DEV = "cpu" if "--device=cpu" in sys.argv or ("--device" in sys.argv and "cpu" in sys.argv) else "cuda"
if DEV == "cuda" and not torch.cuda.is_available():
    _skip("no GPU")

# What the kernels have that STROBE_CUDA_ARCH forces: those of compute capability 7.5 no bf16, and 256 columns in the forward, 192 in
# the backward, of which 128 with a bias, 128 for keys in a cache.
TURING = os.environ.get("STROBE_CUDA_ARCH") == "75"
HALVES = [torch.float16] if TURING else [torch.bfloat16, torch.float16]
BOTH_WAYS, BIASED, CACHED = 192, 128, 128  # columns of forward and backward, of both with a bias, and of a cache


def narrowed(dim: int, widest: int = BOTH_WAYS) -> int:
    """A head_dim as far as these kernels have it."""
    return (dim - 1) % widest + 1 if TURING else dim


def widths(*dims: int) -> list[int]:
    """These head_dims, each `narrowed`, once."""
    return list(dict.fromkeys(map(narrowed, dims)))


def synchronize() -> None:
    if DEV == "cuda":
        torch.cuda.synchronize()
