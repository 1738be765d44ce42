"""The tables of docs/performance.md, from the JSON files in bench/results/.

    python bench/tables.py            rewrites what stands between the markers <!-- table: NAME --> and <!-- end -->
    python bench/tables.py --check    exit 1 if a table says something else than the results

Every table comes from one run on one machine, whose card or CPU stands in its caption with the file's name, so a
figure can be found and measured again (`make gpu-bench`, `make bench`).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/performance.md"
Row = dict[str, Any]
PEERS = {"cudnn": "cuDNN", "fa2": "FlashAttention-2"}
BEST = "best of four"


def load(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((ROOT / "bench/results" / f"{name}.json").read_text())
    return result


def table(head: list[str], rows: Iterable[list[str]], caption: str) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{caption}\n"


def source(name: str) -> str:
    """The caption: the machine and the file."""
    result = load(name)
    device = result.get("gpu") or result.get("device") or f"{result['cpu']}, {result['isa']}, {result['threads']} threads"
    return f"*{device}; PyTorch {result['torch']}; `bench/results/{name}.json`.*"


def mean(ratios: list[float]) -> str:
    """Geometric mean and, in brackets, the worst."""
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f} ({min(ratios):.2f})"


def over(points: list[Row], direction: str, peers: list[str]) -> list[float]:
    """Strobe's speed over that of the best of these peers, for each point that one of them serves."""
    found = []
    for point in points:
        best = max((point[direction].get(peer) or 0 for peer in peers), default=0)
        if best:
            found.append(point[direction]["strobe"] / best)
    return found


def grid_summary(name: str) -> str:
    points = load(name)["grid"]
    columns = {**PEERS, **({"best": BEST} if any("best" in p["fwd"] for p in points) else {})}
    lines = {str(dim): [p for p in points if p["head_dim"] == dim] for dim in sorted({p["head_dim"] for p in points})}
    rows = [
        [text, *(mean(over(some, d, [peer])) for d in ("fwd", "bwd") for peer in columns)]
        for text, some in {**lines, "all": points}.items()
    ]
    head = ["head_dim", *(f"{d}, over {peer}" for d in ("forward", "backward") for peer in columns.values())]
    caption = "Speed of Strobe over a peer's: geometric mean (worst point)."
    if BEST in columns.values():
        caption += (
            f" {BEST.capitalize()}: the fastest of cuDNN, FlashAttention-2, 3 and 4 at each point, of which the last two ran on an "
            "H200 and enter by their ratio to cuDNN there."
        )
    return table(head, rows, f"{caption} {source(name)}")


def grid(name: str) -> str:
    rows = []
    for p in load(name)["grid"]:
        speeds = [f"{p[d].get(c) or 0:.0f}" for d in ("fwd", "bwd") for c in ("strobe", *PEERS)]
        rows.append([str(p["head_dim"]), "causal" if p["causal"] else "full", str(p["seqlen"]), *speeds])
    head = ["head_dim", "mask", "tokens", *(f"{d}: {c}" for d in ("forward", "backward") for c in ("Strobe", *PEERS.values()))]
    return table(head, rows, f"TFLOP/s. {source(name)}")


def features(name: str) -> str:
    """One line for each kind of problem beside the grid."""
    result = load(name)
    kinds = {
        "gqa": "grouped heads",
        "varlen": "packed sequences",
        "window": "window of 1,024 keys",
        "odd": "other widths",
        "mixed": "head_dim 192, head_dim_v 128",
        "fp16": "fp16",
    }
    rows = []
    for key, text in kinds.items():
        points = result[key]
        both = ["-" if not (r := over(points, d, [peer])) else mean(r) for d in ("fwd", "bwd") for peer in PEERS]
        rows.append([text, *both])
    for point in result["scores"]:
        both = ["-" if not (r := over([point], d, [peer])) else f"{r[0]:.2f}" for d in ("fwd", "bwd") for peer in PEERS]
        rows.append([point["label"], *both])
    head = ["8k tokens, causal", *(f"{d}, over {peer}" for d in ("forward", "backward") for peer in PEERS.values())]
    caption = "Speed of Strobe over a peer's: geometric mean (worst point); a dash where the peer does not serve it."
    return table(head, rows, f"{caption} {source(name)}")


def costs(name: str) -> str:
    """What an option costs beside the same problem without it."""
    result = load(name)
    rows = []
    for point in [*result["scores"], *result["deterministic"]]:
        shares = [f"{point[d]['strobe'] / point[d]['without']:.2f}" for d in ("fwd", "bwd")]
        rows.append([point["label"].replace("deterministic ", "`deterministic`, head_dim "), *shares])
    return table(["option", "forward", "backward"], rows, f"Speed with the option over speed without it. {source(name)}")


def lengths(name: str) -> str:
    points = load(name)["lengths"]
    rows = []
    for dim in sorted({p["head_dim"] for p in points}):
        for causal in (False, True):
            some = [p for p in points if p["head_dim"] == dim and p["causal"] == causal]
            for d in ("fwd", "bwd"):
                ratios = [f"{over([p], d, list(PEERS))[0]:.2f}" for p in some]
                rows.append([str(dim), "causal" if causal else "full", "forward" if d == "fwd" else "backward", *ratios])
    tokens = sorted({p["seqlen"] for p in points})
    caption = "Speed of Strobe over the better of cuDNN's and FlashAttention-2's, batch 32, 16 heads."
    return table(["head_dim", "mask", "", *map(str, tokens)], rows, f"{caption} {source(name)}")


def decode(name: str) -> str:
    rows = []
    for p in load(name)["decode"]["points"]:
        us = p["us"]
        speed = p["mb"] / us["strobe"]
        peers = [f"{us[c]:.1f}" if us.get(c) else "-" for c in ("cudnn", "fa2", "fa3")]
        size = f"{p['batch']} x {p['seqlen_k']}{' at most' if p['ragged'] else ''}"
        shape = f"{p['heads']}/{p['heads_kv']}, {p['head_dim']}"
        rows.append([size, shape, str(p["seqlen_q"]), str(p["page"] or "-"), f"{us['strobe']:.1f}", f"{speed:.1f}", *peers])
    head = ["sequences x keys", "heads, head_dim", "queries", "page", "Strobe", "TB/s", "cuDNN", "FlashAttention-2", "FlashAttention-3"]
    caption = (
        "Microseconds. Heads are queries'/keys' and values'. \"At most\": lengths differ, a fifth of the longest on average. "
        "FlashAttention-3 ran on another card and enters by its ratio to cuDNN, or with pages to a copy of the same bytes."
    )
    return table(head, rows, f"{caption} {source(name)}")


def decode_summary(name: str) -> str:
    points = load(name)["decode"]["points"]
    rows = []
    kinds: dict[str, Callable[[Row], bool]] = {
        "one query, contiguous cache": lambda p: p["seqlen_q"] == 1 and not p["page"],
        "one query, pages": lambda p: p["seqlen_q"] == 1 and p["page"],
        "4 or 16 queries, contiguous cache": lambda p: p["seqlen_q"] > 1 and not p["page"],
        "4 or 16 queries, pages": lambda p: p["seqlen_q"] > 1 and p["page"],
    }
    for text, belongs in kinds.items():
        some = [p["us"] for p in points if belongs(p)]
        cells = []
        for peer in ("cudnn", "fa2", "fa3"):
            ratios = [us[peer] / us["strobe"] for us in some if us.get(peer)]
            cells.append(mean(ratios) if ratios else "-")
        rows.append([text, *cells])
    head = ["", "over cuDNN", "over FlashAttention-2", "over FlashAttention-3"]
    return table(head, rows, f"Speed of Strobe over a peer's: geometric mean (worst point). {source(name)}")


def cpu(name: str) -> str:
    points = load(name)["grid"]
    rows = []
    for dtype in ("fp32", "bf16"):
        for d, text in (("fwd", "forward"), ("bwd", "backward")):
            some = [p for p in points if p["dtype"] == dtype]
            gflops = [p[d]["strobe_gflops"] for p in some]
            span = f"{min(gflops):.0f} to {max(gflops):.0f}"
            rows.append([f"{dtype} {text}", span, mean([p[d]["ratio"] for p in some])])
    return table(["", "GFLOP/s", "over PyTorch"], rows, f"512 to 8,192 tokens, head_dim 64 and 128, full and causal. {source(name)}")


def cpu_decode(name: str) -> str:
    layouts = {"rows": "rows before heads", "heads": "heads before rows", "pages": "pages"}
    rows = []
    for p in load(name)["decode"]["points"]:
        torch = f"{p['over_torch']:.1f}" if "over_torch" in p else "-"
        size = f"{p['batch']} x {p['seqlen_k']}"
        rows.append([size, layouts[p["layout"]], p["dtype"], f"{p['of_read_paired']:.2f}", torch])
    head = ["sequences x keys", "cache", "dtype", "over a plain read", "over PyTorch"]
    caption = (
        "One query, 32/8 heads of 128. The plain read passes once over the cache with as many threads and computes nothing; "
        "the ratio is the median of those of runs in pairs. PyTorch has no pages."
    )
    return table(head, rows, f"{caption} {source(name)}")


def random_shapes(name: str) -> str:
    """One line for each kind of random shape."""
    points = load(name)["random"]["points"]
    rows = []
    for kind in dict.fromkeys(p["kind"] for p in points):
        for d, text in (("fwd", "forward"), ("bwd", "backward")):
            ratios = [p[f"{d}_ratio"] for p in points if p["kind"] == kind and p.get(f"{d}_ratio")]
            if ratios:
                rows.append([f"{kind}, {text}", str(len(ratios)), mean(ratios), str(sum(r < 0.9 for r in ratios))])
    best = "the better of cuDNN's and FlashAttention-2's" if "gpu" in load(name) else "PyTorch's"
    caption = f"Speed of Strobe over {best}: geometric mean (worst point), and how many are under 0.9. {source(name)}"
    return table(["kind", "shapes", "ratio", "under 0.9"], sorted(rows), caption)


def biases(name: str) -> str:
    """A bias of all pairs, with its gradient: times, and those of others over them."""
    names = {"efficient": "PyTorch's memory-efficient", "cudnn": "cuDNN"}
    rows = []
    for p in load(name)["bias"]:
        if "cache" in p:
            continue
        for d, text in (("fwd", "forward"), ("bwd", "backward, with dbias")):
            ms = p[f"{d}_ms"]
            others = [f"{ms[n]:.2f} ({ms[n] / ms['strobe']:.2f})" if n in ms else "-" for n in names]
            rows.append([str(p["head_dim"]), str(p["seqlen"]), text, f"{ms['strobe']:.2f}", *others])
    caption = f"Milliseconds, and over Strobe's. Batch 2, 16 heads, a bf16 bias of each head that the batch shares. {source(name)}"
    return table(["head_dim", "tokens", "", "Strobe", *names.values()], rows, caption)


def training(name: str) -> str:
    rows: dict[tuple[str, int], dict[str, str]] = {}
    for r in load(name)["rows"]:
        if r["status"] == "ok":
            rows.setdefault((r["model"], r["context"]), {})[r["attention"]] = f"{r['tflops']:.0f}" + ("*" if r["checkpointing"] else "")
    names = ["standard", "FlashAttention-2", "cuDNN", "Strobe"]
    lines = [[model, str(context), *(cells.get(n, "-") for n in names)] for (model, context), cells in rows.items()]
    caption = "TFLOP/s of whole training steps (bf16, AdamW); a star where it only fits with activation checkpointing."
    return table(["model", "context", *names], lines, f"{caption} {source(name)}")


def memory(name: str) -> str:
    rows = []
    for r in load(name)["memory"]:
        mib = [f"{r[key] / 2**20:,.1f}" if key in r else "-" for key in ("strobe_bytes", "standard_bytes")]
        rows.append([str(r["seqlen"]), *mib])
    return table(["tokens", "Strobe, MiB", "standard attention, MiB"], rows, f"What a head's forward and backward take. {source(name)}")


TABLES: dict[str, Callable[[str], str]] = {
    f.__name__: f
    for f in (grid_summary, grid, features, costs, lengths, decode, decode_summary, cpu, cpu_decode, random_shapes, biases, training, memory)
}
MARKED = re.compile(r"(<!-- table: (\w+) (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description="The tables of docs/performance.md.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is not what the results say")
    options = parser.parse_args()
    before = PAGE.read_text()
    after = MARKED.sub(lambda m: f"{m[1]}\n{TABLES[m[2]](m[3])}\n{m[5]}", before)
    if before == after:
        return 0
    if options.check:
        print(f"{PAGE.relative_to(ROOT)} differs from bench/results: run python bench/tables.py")
        return 1
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
