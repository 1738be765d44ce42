"""The rows of src/cuda/kernels.def in each type, for tests that run every kernel instance and for scripts that look for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Row(NamedTuple):
    """The instances with the same tiles in one type: one for each variant."""

    arch: int
    direction: str
    dtype: str  # bf16_int8: of queries, and of a quantised cache; e4m3, e4m3_float8: of float8 attention
    width: int
    width_v: int
    tile_q: int
    tile_k: int
    stages: int
    warps: int
    when: str
    variants: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the names of the row's instances begin with: as STROBE_CUDA_ROW takes it, those that compute what is asked come first."""
        narrow_v = "" if self.width_v == self.width else f"_v{self.width_v}"
        tiles = f"{self.tile_q}x{self.tile_k}x{self.stages}x{self.warps}"
        return f"{self.direction}_sm{self.arch}_{self.dtype}_{self.width}_{tiles}{narrow_v}"

    @property
    def environment(self) -> dict[str, str]:
        """What makes a plan take it."""
        return {"STROBE_CUDA_ROW": self.name} | ({"STROBE_CUDA_ARCH": "75"} if self.arch == 75 else {})

    @property
    def form(self) -> str:
        """Of a quantised cache, as strobe.quantize names it; else ""."""
        forms = {"int8": "int8", "e4m3": "float8_e4m3fn", "q8": "q8_0", "q4": "q4_0"}
        return "" if self.is_float8 else forms.get(self.dtype.partition("_")[2], "")

    @property
    def is_float8(self) -> bool:
        """Of float8 attention: q is e4m3."""
        return self.dtype.partition("_")[0] == "e4m3"

    @property
    def instances(self) -> list[str]:
        """The names of the row's instances, as CMake gives them and a plan has them."""
        return [f"{self.name}_{variant}" for variant in self.variants]

    @property
    def wants(self) -> list[str]:
        """What a problem needs some of where none of the row's instances takes one without: "masks" as data, "bias"."""
        kinds = {"mask": "masks", "mask_general": "masks", "mask_alone": "masks", "bias": "bias"}
        return sorted({kinds[variant] for variant in self.variants}) if set(self.variants) <= set(kinds) else []


def read_rows(path: Path = ROOT / "src/cuda/kernels.def") -> list[Row]:
    rows = []
    for columns in re.findall(r"^STROBE_KERNEL\((.*?)\)", path.read_text(), re.MULTILINE):
        arch, direction, types, *numbers, when, variants = (c.strip() for c in columns.split(","))
        for dtype in types.split("|"):
            rows.append(Row(int(arch), direction, dtype, *(int(n) for n in numbers), when, tuple(variants.split("|"))))
    return rows


ROWS = read_rows()
