"""Draws the figures of README.md and docs/ from the JSON files in bench/results/.

    make plots                       docs/figures/<result>_<direction>.{svg,png}

Speed against sequence length, one panel for each head dimension, mask and dtype, as the papers on
FlashAttention draw it. The background is left transparent and all ink is of middle brightness, so
that a figure reads on a light page and on a dark one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
INK = "#7d8590"
# Strobe first; peers by name, in the order in which they are drawn.
COLORS = {
    "Strobe": "#e8590c",
    "PyTorch": "#4dabf7",
    "FlashAttention-2": "#4dabf7",
    "cuDNN": "#74b816",
    "best of FlashAttention-2/3/4, cuDNN": "#ae7cd9",
}
GPU_NAMES = {
    "fa2": "FlashAttention-2",
    "cudnn": "cuDNN",
    "best": "best of FlashAttention-2/3/4, cuDNN",
    "strobe": "Strobe",
}
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}

Point = dict[str, Any]
Speeds = dict[str, float]


def speeds(point: Point, direction: str) -> Speeds:
    """TFLOP/s of each library at a grid point, by the name in the legend."""
    values = point[direction]
    if "torch_gflops" in values:
        return {
            "PyTorch": values["torch_gflops"] / 1000,
            "Strobe": values["strobe_gflops"] / 1000,
        }
    return {name: values[key] for key, name in GPU_NAMES.items() if values.get(key)}


def length(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen >= 1024 else str(seqlen)


def draw_panel(axes: Axes, points: list[Point], direction: str, title: str) -> None:
    """Grouped bars, one group for each sequence length."""
    points = sorted(points, key=lambda p: p["seqlen"])
    names = list(speeds(points[0], direction))
    width = 0.8 / len(names)
    for n, name in enumerate(names):
        heights = [speeds(p, direction).get(name, 0.0) for p in points]
        places = [i + (n - (len(names) - 1) / 2) * width for i in range(len(points))]
        axes.bar(places, heights, width * 0.92, label=name, color=COLORS[name])
        if name == "Strobe":
            for x, y in zip(places, heights, strict=True):
                text = f"{y:.2f}" if y < 10 else f"{y:.0f}"
                axes.annotate(text, (x, y), ha="center", va="bottom", fontsize=6, color=INK)
    axes.set_title(title, fontsize=9)
    axes.set_xticks(range(len(points)), [length(p["seqlen"]) for p in points])
    axes.margins(y=0.12)


def draw(result: dict[str, Any], direction: str, path: Path) -> None:
    """One figure: a row of panels for each dtype and mask, a column for each head dimension."""
    grid = result["grid"]
    dtypes = sorted({p.get("dtype", result.get("dtype")) for p in grid}, reverse=True)
    head_dims = sorted({p["head_dim"] for p in grid})
    rows = [(dtype, causal) for dtype in dtypes for causal in (False, True)]
    figure, panels = plt.subplots(
        len(rows),
        len(head_dims),
        figsize=(4.2 * len(head_dims), 1.9 * len(rows) + 0.8),
        squeeze=False,
        layout="constrained",
    )
    for row, (dtype, causal) in zip(panels, rows, strict=True):
        for axes, head_dim in zip(row, head_dims, strict=True):
            points = [
                p
                for p in grid
                if p["head_dim"] == head_dim
                and p["causal"] == causal
                and p.get("dtype", dtype) == dtype
            ]
            mask = "causal" if causal else "no mask"
            draw_panel(axes, points, direction, f"{dtype}, head_dim {head_dim}, {mask}")
        row[0].set_ylabel("TFLOP/s")
    for axes in panels[-1]:
        axes.set_xlabel("sequence length")
    machine = result.get("gpu") or f"{result['cpu']}, {result['threads']} threads"
    figure.suptitle(f"Attention {DIRECTIONS[direction]}, {machine}", fontsize=11)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".svg"), transparent=True, metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), transparent=True, dpi=110)
    plt.close(figure)
    print(path.with_suffix(".svg").relative_to(ROOT), "and .png")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="*", type=Path, help="default: all that have a grid")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures")
    args = parser.parse_args()
    style = {f"{part}.color": INK for part in ("text", "xtick", "ytick", "grid")}
    style |= {"axes.labelcolor": INK, "axes.edgecolor": INK, "axes.titlecolor": INK}
    mpl.rcParams.update(
        {
            **style,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "grid.alpha": 0.3,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "font.size": 8,
            "svg.fonttype": "none",
            "svg.hashsalt": "strobe",  # the same file from the same figures
        }
    )
    for path in args.results or sorted((ROOT / "bench" / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if "grid" not in result:
            continue
        for direction in DIRECTIONS:
            if all(direction in point for point in result["grid"]):
                draw(result, direction, args.output / f"{path.stem}_{direction}")


if __name__ == "__main__":
    main()
