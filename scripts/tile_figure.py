"""Draws docs/figures/tiles.svg, which docs/learn.md shows: the blocks of keys that each tile of queries visits.

    python3 scripts/tile_figure.py            writes the figure
    python3 scripts/tile_figure.py --check    exit 1 if the file is another
"""

from __future__ import annotations

import sys
from pathlib import Path

FIGURE = Path(__file__).resolve().parent.parent / "docs" / "figures" / "tiles.svg"

TOKENS, TILE = 512, 64  # queries and keys of the drawing; tiles and blocks are as long as each other
COUNT = TOKENS // TILE
MARKED = 5  # the tile whose visits have arrows
CELL, LEFT, TOP, GAP = 34, 92, 92, 108
SIDE = COUNT * CELL
WIDTH, HEIGHT = 2 * (LEFT + SIDE) + GAP - 60, TOP + SIDE + 80

STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de; } text { fill: #1f2328; font-family: sans-serif; font-size: 13px; }
  .title { font-size: 15px; font-weight: bold; } .small { font-size: 12px; }
  .full { fill: #4c8dd6; } .masked { fill: #f2b84b; } .never { fill: #eef1f4; }
  .cell { stroke: #ffffff; stroke-width: 2; } .mark { fill: none; stroke: #c0392b; stroke-width: 2.5; }
  .arrow { stroke: #c0392b; stroke-width: 2.5; } .head { fill: #c0392b; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #16191d; stroke: #3d444d; } text { fill: #e6edf3; }
    .full { fill: #3f78b8; } .masked { fill: #c98f1e; } .never { fill: #262c34; }
    .cell { stroke: #16191d; } .mark, .arrow { stroke: #ff7b6b; } .head { fill: #ff7b6b; }
  }
"""


def kind(tile: int, block: int, left: int | None) -> str:
    """Of the pairs of a tile of queries and a block of keys: full, masked or never visited."""
    seen = sum(
        max(0, min(j_end, i + 1) - max(block * TILE, i - left if left is not None else 0))
        for i in range(tile * TILE, (tile + 1) * TILE)
        for j_end in ((block + 1) * TILE,)
    )
    return "never" if seen == 0 else "full" if seen == TILE * TILE else "masked"


def panel(x: int, title: str, left: int | None) -> list[str]:
    kinds = [[kind(tile, block, left) for block in range(COUNT)] for tile in range(COUNT)]
    computed, masked = (sum(k in which for row in kinds for k in row) for which in (("full", "masked"), ("masked",)))
    lines = [
        f'<text class="title" x="{x}" y="40">{title}</text>',
        f'<text class="small" x="{x}" y="60">{computed} of {COUNT * COUNT} pairs are computed, {masked} with a mask</text>',
        f'<text class="small" x="{x + SIDE / 2}" y="{TOP - 12}" text-anchor="middle">blocks of {TILE} keys &#8594;</text>',
    ]
    for tile, row in enumerate(kinds):
        y = TOP + tile * CELL
        for block, name in enumerate(row):
            lines.append(
                f'<rect class="cell {name}" x="{x + block * CELL}" y="{y}" width="{CELL}" height="{CELL}" rx="4"/>'
            )
    visited = [block for block, name in enumerate(kinds[MARKED]) if name != "never"]
    y = TOP + MARKED * CELL
    first, last = x + visited[0] * CELL, x + (visited[-1] + 1) * CELL
    lines.append(f'<rect class="mark" x="{first}" y="{y}" width="{last - first}" height="{CELL}" rx="4"/>')
    lines.append(f'<path class="arrow" d="M {first + 8} {y + CELL / 2} H {last - 14}"/>')
    lines.append(f'<path class="head" d="M {last - 6} {y + CELL / 2} l -10 -5 v 10 z"/>')
    return lines


def figure() -> str:
    second = LEFT + SIDE + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">',
        "<title>The blocks of keys that each tile of queries visits, with a causal mask and with a window</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        *panel(LEFT, "causal", None),
        *panel(second, "causal, window_size = (160, 0)", 160),
    ]
    for tile in range(COUNT):
        weight = ' font-weight="bold"' if tile == MARKED else ""
        y = TOP + tile * CELL + CELL / 2 + 4
        lines.append(f'<text class="small" x="{LEFT - 10}" y="{y}" text-anchor="end"{weight}>tile {tile}</text>')
    y = TOP + SIDE + 32
    legend = [
        ("full", "every query sees every key: no mask is applied"),
        ("masked", "some see some: the mask is applied"),
        ("never", "no query sees a key: never read"),
    ]
    for n, (name, text) in enumerate(legend):
        x, row = (LEFT, y + 24 * n) if n < 2 else (second, y)
        lines.append(f'<rect class="{name}" x="{x}" y="{row - 12}" width="16" height="16" rx="3"/>')
        lines.append(f'<text class="small" x="{x + 24}" y="{row + 1}">{text}</text>')
    lines.append(f'<path class="arrow" d="M {second} {y + 20} h 12"/>')
    lines.append(f'<path class="head" d="M {second + 18} {y + 20} l -8 -4 v 8 z"/>')
    lines.append(f'<text class="small" x="{second + 24}" y="{y + 25}">the visits of tile {MARKED}, in their order</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> int:
    drawn = figure()
    if sys.argv[1:] == ["--check"]:
        if FIGURE.read_text() != drawn:
            print(f"{FIGURE} is not what {__file__} draws")
            return 1
        return 0
    FIGURE.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
