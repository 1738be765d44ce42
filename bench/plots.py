"""Draws the figures of README.md and docs/ from the JSON files in bench/results/.

    make plots                       docs/figures/overview.{svg,png}: README's, from OVERVIEW
                                     docs/figures/<result>_<direction>.{svg,png}
                                     docs/figures/<result>_paper_story.{svg,png}, where it was measured
                                     docs/figures/<result>_memory.{svg,png}, likewise
                                     docs/figures/<result>_random.{svg,png}, likewise
                                     docs/figures/gpt_training.{svg,png}
                                     docs/figures/quantised.{svg,png}: from QUANTISED and QUANTISED_ERRORS

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
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
INK = "#7d8590"
# One colour for each contender, the same in every figure.
COLORS = {
    "Strobe": "#e8590c",
    "PyTorch": "#12a594",
    "FlashAttention-2": "#4dabf7",
    "cuDNN": "#74b816",
    "best of FlashAttention-2, 3, 4 and cuDNN": "#ae7cd9",
    "standard attention": "#b08968",
    "FlashAttention-1 schedule": "#e8a200",
    "+ unscaled accumulator": "#d6336c",
    "+ parallel over the sequence": "#6b7a90",
}
# A contender that stands at the end of a story is drawn in its own colour there.
COLORS["+ queries split across warps: FlashAttention-2"] = COLORS["FlashAttention-2"]
# Names in the JSON, in the order in which they are drawn.
GPU_NAMES = {
    "fa2": "FlashAttention-2",
    "cudnn": "cuDNN",
    "best": "best of FlashAttention-2, 3, 4 and cuDNN",
    "strobe": "Strobe",
}
# README's picture: the result that its table of speeds is from (tests/python/test_documents.py), and what was timed in that run.
OVERVIEW = "gpu_h100_bf16"
OVERVIEW_NAMES = ("FlashAttention-2", "cuDNN", "Strobe")
# The picture of docs/quantised.md: times and bytes, and errors, which `strobe check --kv int8,e4m3,e5m2,q8_0,q4_0 --dtype bf16
# --json` wrote of the layer in examples/data (STROBE_CPU_ISA=avx512: bf16's own error depends on the kernel).
QUANTISED = "gpu_h200_quantised"
QUANTISED_ERRORS = "quantised_minilm"
# Forms of a cache: in the first, in the second, and in the picture.
FORMS = (
    ("bf16", "bfloat16", "bf16"),
    ("int8", "int8", "int8"),
    ("float8_e4m3fn", "float8 e4m3", "float8 e4m3"),
    ("q8_0", "q8_0", "q8_0"),
    ("q4_0", "q4_0", "q4_0"),
)
# Sequences and keys of the times, and their colours.
DECODED = {(64, 8192): "#e8590c", (16, 4096): "#f4a261", (1, 8192): "#adb5bd"}
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "both": "forward and backward"}
# Steps of examples/paper: name and marker. Some lie on one another: hence the markers.
STORY = {
    "standard": ("standard attention", "s"),
    "fa1": ("FlashAttention-1 schedule", "o"),
    "unscaled": ("+ unscaled accumulator", "x"),
    "sequence": ("+ parallel over the sequence", "^"),
    "fa2": ("+ queries split across warps: FlashAttention-2", "D"),
}

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


def draw_panel(axes: Axes, points: list[Point], direction: str, title: str, wanted: tuple[str, ...] = ()) -> None:
    """Grouped bars, one group for each sequence length; below each, Strobe's speed over the fastest other bar.
    `wanted`: the contenders to draw, if not all."""
    points = sorted(points, key=lambda p: p["seqlen"])
    names = [name for name in speeds(points[0], direction) if not wanted or name in wanted]
    width = 0.8 / len(names)
    for n, name in enumerate(names):
        heights = [speeds(p, direction).get(name, 0.0) for p in points]
        places = [i + (n - (len(names) - 1) / 2) * width for i in range(len(points))]
        axes.bar(places, heights, width * 0.92, label=name, color=COLORS[name])
    ticks = []
    for p in points:
        values = speeds(p, direction)
        others = [values[name] for name in names if name != "Strobe" and name in values]
        ratio = f"\n{values['Strobe'] / max(others):.2f}x" if others else ""
        ticks.append(length(p["seqlen"]) + ratio)
    axes.set_title(title, fontsize=9)
    axes.set_xticks(range(len(points)), ticks)


def shape(points: list[Point], head_dim: int) -> str:
    """Batch and heads of the points of a panel, in words."""
    heads = {p["heads"] for p in points if p["head_dim"] == head_dim}
    tokens = {p["batch"] * p["seqlen"] for p in points if p["head_dim"] == head_dim}
    batch = f"batch x length {length(min(tokens))}"
    if len(tokens) > 1:
        batch += f" to {length(max(tokens))}"
    return f"{'/'.join(map(str, sorted(heads)))} heads, {batch}"


def draw(result: dict[str, Any], direction: str, path: Path) -> None:
    """One figure: a row of panels for each dtype and mask, a column for each head dimension."""
    grid = result["grid"]
    dtypes = sorted({p.get("dtype", result.get("dtype")) for p in grid}, reverse=True)
    head_dims = sorted({p["head_dim"] for p in grid})
    rows = [(dtype, causal) for dtype in dtypes for causal in (False, True)]
    figure, panels = plt.subplots(
        len(rows),
        len(head_dims),
        figsize=(4.2 * len(head_dims), 2.3 * len(rows) + 0.9),
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
            title = f"{dtype}, head_dim {head_dim}, {mask}"
            draw_panel(axes, points, direction, f"{title}\n{shape(points, head_dim)}")
        row[0].set_ylabel("TFLOP/s")
    for axes in panels[-1]:
        axes.set_xlabel("sequence length, and Strobe's speed over the fastest other")
    machine = result.get("gpu") or f"{result['cpu']}, {result['threads']} threads"
    forced = ", mma.sync kernels forced" if result.get("cuda_arch") == "80" else ""
    figure.suptitle(f"Attention {DIRECTIONS[direction]}, {machine}{forced}", fontsize=11)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    save(figure, path)


def draw_overview(result: dict[str, Any], path: Path) -> None:
    """Forward and backward under a causal mask, a column for each head dimension, beside what was timed in the same run."""
    grid = [p for p in result["grid"] if p["causal"]]
    head_dims = sorted({p["head_dim"] for p in grid})
    figure, panels = plt.subplots(2, len(head_dims), figsize=(10.2, 4.6), sharey="row", layout="constrained")
    for row, direction in zip(panels, ("fwd", "bwd"), strict=True):
        for axes, head_dim in zip(row, head_dims, strict=True):
            points = [p for p in grid if p["head_dim"] == head_dim]
            draw_panel(axes, points, direction, f"{DIRECTIONS[direction]}, head_dim {head_dim}", OVERVIEW_NAMES)
        row[0].set_ylabel("TFLOP/s")
    panels[-1][len(head_dims) // 2].set_xlabel("sequence length, and Strobe's speed over the faster other")
    run = f"{result['gpu']}, PyTorch {result['torch']}, {result['date'][:10]}, commit {result['commit'][:7]}"
    figure.suptitle(f"Causal attention, {result['dtype']}, GPU time: {run}", fontsize=10)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    save(figure, path)


def draw_story(story: dict[str, Any], path: Path) -> None:
    """From standard attention to FlashAttention-2, head_dim 128: a line for each variant."""
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.4), sharey=True, layout="constrained")
    for axes, causal in zip(panels, (False, True), strict=True):
        points = [p for p in story["points"] if p["head_dim"] == 128 and p["causal"] == causal]
        points.sort(key=lambda p: p["seqlen"])
        for key, (name, marker) in STORY.items():
            measured = [(i, p["tflops"][key]) for i, p in enumerate(points) if key in p["tflops"]]
            x, y = [i for i, _ in measured], [speed for _, speed in measured]
            axes.plot(
                x,
                y,
                color=COLORS[name],
                marker=marker,
                markersize=4,
                linewidth=1.5,
                label=name,
            )
        axes.set_title(f"bf16, head_dim 128, {'causal' if causal else 'no mask'}", fontsize=9)
        axes.set_xticks(range(len(points)), [length(p["seqlen"]) for p in points])
        axes.set_xlabel("sequence length")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("TFLOP/s")
    figure.suptitle(f"The paper's own story, forward, {story['gpu']}", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    save(figure, path)


def draw_memory(result: dict[str, Any], path: Path) -> None:
    """Peak memory beside the inputs, one head of 64, against the sequence length."""
    points = sorted(result["memory"], key=lambda p: p["seqlen"])
    figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    for key, name, color, marker in (
        ("standard_bytes", "standard attention, forward alone", COLORS["standard attention"], "s"),
        ("strobe_bytes", "Strobe, forward and backward", COLORS["Strobe"], "o"),
        ("plan_backward_bytes", "of that, workspace", INK, "x"),
    ):
        measured = [(p["seqlen"], p[key] / 2**20) for p in points if p.get(key)]
        axes.plot(
            *zip(*measured, strict=True),
            color=color,
            marker=marker,
            markersize=4,
            linewidth=1.5,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([p["seqlen"] for p in points], [length(p["seqlen"]) for p in points])
    axes.set_xlabel("sequence length")
    axes.set_ylabel("MB beside the inputs")
    figure.suptitle(f"Peak memory, 1 head of 64, bf16, {result['gpu']}", fontsize=11)
    figure.legend(loc="outside lower center", ncols=1, frameon=False)
    save(figure, path)


def draw_training(result: dict[str, Any], path: Path) -> None:
    """Training of GPT models: grouped bars, one group for each model and context."""
    rows = [row for row in result["rows"] if row.get("tflops")]
    groups = list(dict.fromkeys((row["model"], row["context"]) for row in rows))
    names = list(dict.fromkeys(row["attention"] for row in rows))
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    width = 0.8 / len(names)
    for n, name in enumerate(names):
        speed = {(row["model"], row["context"]): row["tflops"] for row in rows if row["attention"] == name}
        places = [i + (n - (len(names) - 1) / 2) * width for i in range(len(groups))]
        heights = [speed.get(group, 0.0) for group in groups]
        color = COLORS["standard attention" if name == "standard" else name]
        axes.bar(places, heights, width * 0.92, label=name, color=color)
    axes.set_xticks(range(len(groups)), [f"{model}, {length(context)} tokens" for model, context in groups])
    axes.set_ylabel("TFLOP/s of the model")
    figure.suptitle(f"Training of GPT models, bf16, {result['device']}", fontsize=11)
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False)
    save(figure, path)


def draw_quantised(result: dict[str, Any], errors: dict[str, Any], path: Path) -> None:
    """What a form of a cache saves and costs: bytes, time of a decoding step, error of out on a trained layer."""
    points = {
        (p["batch"], p["seqlen_k"]): p
        for p in result["quantised"]["points"]
        if p["head_dim"] == 128 and p["page"] == 0 and p["dtype"] == "bfloat16"
    }
    caches = {x["dtype"] if x["kv"] == "same" else x["kv"]: x for x in errors["inputs"][0]["caches"]}
    longest = points[next(iter(DECODED))]
    tokens = longest["batch"] * longest["seqlen_k"]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10.2, 3.1), sharey=True, layout="constrained")
    for axes in (left, middle, right):
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x", alpha=0.3)
    width = 0.8 / len(DECODED)
    for place, (timed, checked, _) in enumerate(FORMS):
        # What was read in the time that it took.
        read = longest["tb_per_second"][timed] * longest["us"][timed] * 1e6 / tokens
        left.barh(place, read, 0.6, color=COLORS["Strobe"])
        left.annotate(f" {read:,.0f}", (read, place), va="center")
        for n, (which, color) in enumerate(DECODED.items()):
            us = points[which]["us"]
            at, ratio = place + (n - (len(DECODED) - 1) / 2) * width, us[timed] / us["bf16"]
            label = f"{which[0]} sequences x {which[1]:,} keys" if place == 0 else None
            middle.barh(at, ratio, width * 0.92, color=color, label=label)
            middle.annotate(f" {ratio:.2f}", (ratio, at), va="center", fontsize=7)
        error = 100 * caches[checked]["attention"]["rms"]
        right.barh(place, error, 0.6, color=COLORS["Strobe"])
        right.annotate(f" {error:.2g} %", (error, place), va="center")
    left.set_yticks(range(len(FORMS)), [name for _, _, name in FORMS])
    left.invert_yaxis()
    for axes in (left, middle, right):
        axes.margins(x=0.18)
    middle.axvline(1, color=INK, linewidth=0.8)
    right.set_xscale("log")
    right.set_xlim(0.1, 60)
    right.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
    left.set_title("bytes of a token: K and V, 8 heads of 128", fontsize=9)
    middle.set_title(f"time of a decoding step over bf16's, {result['gpu']}", fontsize=9)
    right.set_title("error of out in %, a layer of MiniLM", fontsize=9)
    figure.legend(loc="outside lower center", ncols=len(DECODED), frameon=False)
    save(figure, path)


# Kinds of random shapes (gpu_random.py, cpu_random.py).
KIND_COLORS = {"train": "#4dabf7", "cross": "#74b816", "few": "#e8590c", "many": "#ae7cd9", "decode": "#868e96"}


def draw_random(result: dict[str, Any], path: Path) -> None:
    """A point for each random shape: Strobe's speed over the best peer's, against the work of its forward pass."""
    points = result["random"]["points"]
    directions = [d for d in ("fwd", "bwd") if any(p.get(f"{d}_ratio") for p in points)]
    figure, panels = plt.subplots(
        1, len(directions), figsize=(4.6 * len(directions), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, direction in zip(panels[0], directions, strict=True):
        for kind, color in KIND_COLORS.items():
            if not any(p["kind"] == kind for p in points):
                continue
            chosen = [p for p in points if p["kind"] == kind and p.get(f"{direction}_ratio")]
            label = kind if axes is panels[0][0] else None
            ratios = [p[f"{direction}_ratio"] for p in chosen]
            axes.scatter([p["flop"] * 1e-9 for p in chosen], ratios, s=12, color=color, label=label)
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_yticks([0.25, 0.5, 0.9, 1, 2, 4], ["0.25", "0.5", "0.9", "1", "2", "4"])
        axes.minorticks_off()
        axes.set_title(DIRECTIONS[direction], fontsize=9)
        axes.set_xlabel("GFLOP of the forward pass")
    peers = "best of cuDNN and FlashAttention-2" if "gpu" in result else "PyTorch"
    panels[0][0].set_ylabel(f"{peers} over Strobe, time")
    figure.suptitle(f"Random shapes, {result.get('gpu') or result['cpu']}", fontsize=11)
    figure.legend(loc="outside lower center", ncols=len(KIND_COLORS), frameon=False)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".svg"), transparent=True, metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), transparent=True, dpi=110)
    plt.close(figure)
    print(path.with_suffix(".svg").relative_to(ROOT), "and .png")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="*", type=Path, help="default: all of bench/results")
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
        for direction in DIRECTIONS:
            if "grid" in result and all(direction in point for point in result["grid"]):
                draw(result, direction, args.output / f"{path.stem}_{direction}")
        if path.stem == OVERVIEW:
            draw_overview(result, args.output / "overview")
        if path.stem == QUANTISED:
            errors = json.loads((path.parent / f"{QUANTISED_ERRORS}.json").read_text())
            draw_quantised(result, errors, args.output / "quantised")
        if result.get("memory"):
            draw_memory(result, args.output / f"{path.stem}_memory")
        if result.get("random", {}).get("points"):
            draw_random(result, args.output / f"{path.stem.removesuffix('_random')}_random")
        if "attention" in result.get("rows", [{}])[0]:
            draw_training(result, args.output / path.stem)
        # A section of gpu_bench.py's result, or what paper_story --json wrote.
        story = result.get("story", result)
        if any(point["head_dim"] == 128 for point in story.get("points", [])):
            draw_story(story, args.output / f"{path.stem}_paper_story")


if __name__ == "__main__":
    main()
