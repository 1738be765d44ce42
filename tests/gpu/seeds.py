"""Problems by their seeds, one after the other: the part that tests/gpu/bias.py, masks.py and sinks.py have in common."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import strobe
import torch
from device import DEV

Tensor = torch.Tensor


def check(name: str, got: Tensor, wanted: Tensor, plain: Tensor, factor: float, rounding: float = 0.0) -> None:
    """The rule of docs/semantics.md, with one draw of the comparator and a little room for its luck.

    rounding: how far the rounding of an input takes the result, as a standard deviation.
    """
    assert got.shape == wanted.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    if wanted.numel() == 0:
        return
    error, other = ((x.double() - wanted).abs().max().item() for x in (got, plain))
    allowed = factor * (other + rounding) + 2e-3 * wanted.abs().max().item() + 1e-5
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def rounding_of_dsinks(sinks: Tensor, lse: Tensor, dout: Tensor, out: Tensor, dtype: torch.dtype) -> float:
    """dsinks is a sum of weight * dout * out over rows and columns, in which out is rounded; the comparator has no out in it.
    lse: with the sinks in it; it and out in float64."""
    weights = (sinks.double()[None, :, None] - lse).exp().transpose(1, 2)[..., None]
    steps = weights * dout.double() * out * torch.finfo(dtype).eps / 4
    return steps.square().sum((0, 1, 3)).max().sqrt().item()


def twice(call: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, str]:
    """out and lse of a call that has the same bits again, and the kernel that served it."""
    out, lse = call()
    kernel = strobe.why().splitlines()[0]
    again = call()
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1]), "bits do not repeat"
    return out, lse, kernel


def run(description: str | None, count: int, one: Callable[[int], str], hostile: Callable[[int], str] | None = None) -> int:
    """The script's main: `one` takes a seed, runs its problem, and returns the kernel that served it. hostile: what --hostile runs
    in its place."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop in time, and say how far it went")
    parser.add_argument("--device", default=DEV, choices=("cuda", "cpu"))
    if hostile is not None:
        parser.add_argument("--hostile", action="store_true", help="words that lead nowhere, and nothing else")
    options = parser.parse_args()
    if hostile is not None and options.hostile:
        one = hostile
    name = f"gpu {Path(sys.argv[0]).stem}"
    kernels: dict[str, int] = {}
    end = time.monotonic() + options.seconds
    for seed in range(options.first, options.first + options.count):
        if time.monotonic() >= end:
            break
        try:
            kernel = one(seed)
        except AssertionError as error:
            print(f"{name}: seed {seed}: {error}; alone: --first {seed} --count 1")
            return 1
        kernels[kernel] = kernels.get(kernel, 0) + 1
    print(f"{name}: {sum(kernels.values())} problems: {kernels}")
    return 0
