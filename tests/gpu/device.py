"""Where a GPU test runs: DEV. Without PyTorch or a GPU the script that imports this says so and ends well."""

from __future__ import annotations

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


def synchronize() -> None:
    if DEV == "cuda":
        torch.cuda.synchronize()
