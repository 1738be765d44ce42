"""`strobe.draw`: a picture of a mask's blocks."""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np

from ._arrays import NDArray
from ._errors import InvalidArgument, shown
from ._packed_mask import FULL, PARTIAL, SKIPPED, Mask

_MOST: Final = 128  # tiles on a side; more are drawn together
_SIZE: Final = 384  # of the picture's longer side, in pixels
_COLOURS: Final = {FULL: "#2563a8", PARTIAL: "#9cc3e6"}
_WORDS: Final = {FULL: "full", PARTIAL: "partial", SKIPPED: "skipped"}


class Drawing(str):
    """An SVG, which notebooks show."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def draw(mask: Mask, sequence: int = 0, head: int = 0) -> Drawing:
    """The blocks of a mask as an SVG: skipped, seen in full, seen in part. Queries go down, keys to
    the right. What the call's own options hide is not shown.

    Args:
        mask: of `strobe.masks`.
        sequence, head: whose, if they differ.

    Example:
        >>> import strobe
        >>> picture = strobe.draw(strobe.masks.sliding(1024, left=200))
        >>> picture.startswith("<svg")
        True
    """
    if not isinstance(mask, Mask):
        raise InvalidArgument(f"mask is {shown(mask)}, expected a strobe.masks.Mask")
    tiles = mask.tiles(sequence, head)
    share = {kind: float(np.mean(tiles == kind)) if tiles.size else 0.0 for kind in _WORDS}
    together = max(1, -(-max(tiles.shape, default=1) // _MOST))
    shapes = _merged(tiles, together)
    rows, columns = shapes.shape
    side = _SIZE / max(rows, columns, 1)
    width, height = round(columns * side, 2), round(rows * side, 2)
    side_q, side_k = mask.block
    words = f"{mask.shape[2]} x {mask.shape[3]}, blocks of {side_q} x {side_k}" + (
        f", {together} x {together} drawn as one" if together > 1 else ""
    )
    box = f"-8 -24 {width + 16} {height + 56}"
    head_of_file = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" width="{width + 16}" role="img" '
        'font-family="sans-serif" font-size="12">'
    )
    lines = [
        head_of_file,
        f"<title>Mask {words}</title>",
        f'<text x="0" y="-8" fill="#444">{words}</text>',
        f'<rect width="{width}" height="{height}" fill="#fff" stroke="#999"/>',
    ]
    for row, column, length, kind in _runs(shapes):
        lines.append(
            f'<rect x="{column * side:.2f}" y="{row * side:.2f}" width="{length * side:.2f}" '
            f'height="{side:.2f}" fill="{_COLOURS[kind]}"/>'
        )
    if max(rows, columns) <= 64:
        steps = [f"M{x * side:.2f} 0V{height}" for x in range(1, columns)]
        steps += [f"M0 {y * side:.2f}H{width}" for y in range(1, rows)]
        lines.append(f'<path d="{"".join(steps)}" stroke="#fff" stroke-opacity=".6" fill="none"/>')
    for n, (kind, word) in enumerate(_WORDS.items()):
        x, y = n * 112, height + 12
        lines.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" stroke="#999" '
            f'fill="{_COLOURS.get(kind, "#fff")}"/>'
            f'<text x="{x + 16}" y="{y + 10}" fill="#444">{word} {share[kind]:.1%}</text>'
        )
    return Drawing("\n".join([*lines, "</svg>", ""]))


def _merged(tiles: NDArray, together: int) -> NDArray:
    """Squares of tiles as one: full or skipped where all are."""
    if together == 1:
        return tiles
    rows, columns = (-(-n // together) for n in tiles.shape)
    merged = np.full((rows, columns), PARTIAL, np.int8)
    for i in range(rows):
        for j in range(columns):
            part = tiles[i * together : (i + 1) * together, j * together : (j + 1) * together]
            if np.all(part == part.flat[0]):
                merged[i, j] = part.flat[0]
    return merged


def _runs(tiles: NDArray) -> list[tuple[int, int, int, int]]:
    """(row, column, length, kind) of tiles side by side that are alike, but for skipped ones."""
    found = []
    for row, kinds in enumerate(tiles):
        edges = np.flatnonzero(np.diff(kinds, prepend=-1, append=-1))
        for begin, end in itertools.pairwise(edges):
            if kinds[begin] != SKIPPED:
                found.append((row, int(begin), int(end - begin), int(kinds[begin])))
    return found
