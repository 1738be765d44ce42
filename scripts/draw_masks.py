#!/usr/bin/env python3
"""The figures of docs/masks.md, by strobe.draw: docs/figures/mask_<name>.svg, and what each mask costs.

PYTHONPATH=python STROBE_LIBRARY=... scripts/draw_masks.py [--check]    --check: exit 1 where a figure is another
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import strobe

FIGURES = Path(__file__).resolve().parents[1] / "docs/figures"
LENGTH = 4096


def selected() -> np.ndarray:
    """Blocks as a selection gives them: the query's own, the first, and a few others before."""
    rng = np.random.default_rng(0)
    blocks = LENGTH // 128
    visited = np.eye(blocks, dtype=bool)
    visited[:, 0] = True
    for row in range(blocks):
        visited[row, rng.integers(0, row + 1, 4)] = True
    return visited


def dilated_by_rest() -> strobe.masks.Mask:
    """The dilated window among keys that are sorted by their rest modulo 4."""
    token = np.arange(LENGTH).reshape(-1, 4).T.ravel()
    distance = np.abs(token[:, None] - token)
    return strobe.masks.from_bool((distance % 4 == 0) & (distance <= 512))


def moba(queries: int) -> strobe.masks.Mask:
    """Four blocks of keys, its own among them, for each so many queries, as random tensors choose."""
    blocks, rows = LENGTH // 128, LENGTH // queries
    own = np.arange(rows) * queries // 128
    gate = np.random.default_rng(0).standard_normal((rows, blocks))
    gate[np.arange(blocks) >= own[:, None]] = -np.inf
    least = np.sort(gate)[:, -3:][:, :1]
    seen = (gate >= least) & (gate > -np.inf)
    seen[np.arange(rows), own] = True
    if queries == 128:
        return strobe.masks.blocks(seen, LENGTH)
    return strobe.masks.from_bool(np.tril(seen.repeat(128, 1)))


def masks() -> dict[str, strobe.masks.Mask]:
    """Those of the page, by name."""
    documents = np.repeat(np.arange(6), [900, 300, 1300, 128, 700, 768])
    return {
        "documents": strobe.masks.documents(documents),
        "prefix": strobe.masks.prefix(1000, LENGTH),
        "sliding": strobe.masks.sliding(LENGTH, left=512, first=4),
        "global": strobe.masks.global_window(LENGTH, left=256, right=256, tokens=64),
        "dilated": strobe.masks.dilated(LENGTH, step=4, window=128),
        "dilated_sorted": dilated_by_rest(),
        "blocks": strobe.masks.blocks(selected(), LENGTH),
        "moba_block": moba(128),
        "moba_query": moba(1),
        "tree": strobe.masks.tree((np.arange(127) - 1) // 2, context=900),
    }


def main() -> int:
    """Writes the figures, or compares them."""
    wrong = 0
    for name, mask in masks().items():
        path = FIGURES / f"mask_{name}.svg"
        picture = strobe.draw(mask)
        if "--check" in sys.argv:
            if path.read_text() != picture:
                print(
                    f"{path.name} is not what strobe.draw makes: run scripts/draw_masks.py"
                )
                wrong = 1
            continue
        path.write_text(picture)
        tiles = mask.tiles()
        print(
            f"{name:14} {np.mean(tiles > 0):6.1%} visited, {np.mean(tiles == 1):6.1%} in part, "
            f"capacity {mask.capacity}/{mask.partial_capacity}, {mask.packed.nbytes / 1024:.0f} KiB"
        )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
