"""What gpu_random.py and cpu_random.py share: a shape that nobody chose, and what is said of many of them."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

DOUBTFUL = 0.9  # of the best peer's speed; what has less is timed once more
DIRECTIONS = ("fwd", "bwd")


class Shape(NamedTuple):
    kind: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    causal: bool
    dtype: str

    @property
    def flop(self) -> float:
        """Of the forward pass, without regard to the mask."""
        return 4.0 * self.batch * self.heads * self.seqlen_q * self.seqlen_k * self.head_dim

    @property
    def values(self) -> int:
        """Of Q, K, V and O."""
        rows = self.seqlen_q * self.heads * 2 + self.seqlen_k * self.heads_kv * 2
        return self.batch * self.head_dim * rows

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return (
            f"{self.kind:6} {self.batch} x {self.seqlen_q} x {self.seqlen_k}, {self.heads}/{self.heads_kv} heads of "
            f"{self.head_dim}, {mask}, {self.dtype}"
        )


def length(source: random.Random, low: int, high: int) -> int:
    """As likely between 10 and 100 as between 100 and 1000."""
    return int(math.exp(source.uniform(math.log(low), math.log(high))))


def ratio(times: Mapping[str, float]) -> float | None:
    """The best peer's time over Strobe's; None without a peer."""
    peers = [t for name, t in times.items() if name != "strobe"]
    return min(peers) / times["strobe"] if peers else None


def say(shape: Shape, point: Mapping[str, Any]) -> None:
    """One line."""
    cells = [
        f"{direction} {point[f'{direction}_ratio'] or math.nan:.2f} ("
        + ", ".join(f"{name} {t:.1f}" for name, t in point[f"{direction}_us"].items()) + ")"
        for direction in DIRECTIONS if f"{direction}_us" in point
    ]  # fmt: skip
    print(f"{shape}: " + "; ".join(cells), flush=True)


def summarise(points: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> dict[str, Any]:
    """Of each kind and direction; printed too."""
    result: dict[str, Any] = {}
    for direction, kind in itertools.product(DIRECTIONS, kinds):
        found = [p[f"{direction}_ratio"] for p in points if p["kind"] == kind and p.get(f"{direction}_ratio")]
        if not found:
            continue
        mean = math.exp(statistics.fmean(math.log(r) for r in found))
        below = sum(r < DOUBTFUL for r in found)
        result[f"{direction}_{kind}"] = {
            "shapes": len(found), "geometric_mean": mean, "worst": min(found), "below_0.9": below
        }  # fmt: skip
        print(f"{direction} {kind:6} {len(found):3} shapes: geometric mean {mean:.3f}, worst {min(found):.3f}, {below} below 0.9")
    return result


def wanted_kinds(given: str, kinds: Sequence[str]) -> list[str]:
    """Of an option, with commas between."""
    wanted = given.split(",")
    if unknown := set(wanted) - set(kinds):
        raise ValueError(f"--kinds: {', '.join(sorted(unknown))}, expected some of {', '.join(kinds)}")
    return wanted
