"""The rows of src/cuda/kernels.def in each type, for tests that run every kernel instance and for scripts that look for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Row(NamedTuple):
    arch: int
    direction: str
    dtype: str
    width: int
    tile_q: int
    tile_k: int
    stages: int
    warps: int
    when: str

    @property
    def name(self) -> str:
        """As CMake names the instance, and STROBE_CUDA_ROW takes it."""
        return f"{self.direction}_sm{self.arch}_{self.dtype}_{self.width}_{self.tile_q}x{self.tile_k}x{self.stages}x{self.warps}"


def read_rows(path: Path = ROOT / "src/cuda/kernels.def") -> list[Row]:
    rows = []
    for columns in re.findall(r"^STROBE_KERNEL\((.*?)\)", path.read_text(), re.MULTILINE):
        arch, direction, *numbers, when = (c.strip() for c in columns.split(","))
        rows += [Row(int(arch), direction, dtype, *(int(n) for n in numbers), when) for dtype in ("bf16", "fp16")]
    return rows


ROWS = read_rows()
