"""An installed Strobe against plain NumPy in float64, on each instruction set of the machine.

    python smoke.py VERSION

For scripts/wheel-test.sh: needs NumPy and the installed package, nothing of this source tree.
VERSION is the one that should be installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import numpy.typing as npt

import strobe

Array = npt.NDArray[np.float64]


def plain(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, Array, Array, Array]:
    """Causal attention of [seqlen, heads, head_dim], fewer heads of keys, and its gradients."""
    group = q.shape[1] // k.shape[1]
    keys, values = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, keys) / np.sqrt(q.shape[2])
    visible = np.arange(len(k))[None, :] <= np.arange(len(q))[:, None] + len(k) - len(q)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    out = np.einsum("hqk,khd->qhd", weights, values)
    dweights = np.einsum("qhd,khd->hqk", dout, values)
    delta = np.einsum("qhd,qhd->hq", dout, out)
    dscores = weights * (dweights - delta[:, :, None]) / np.sqrt(q.shape[2])
    dq = np.einsum("hqk,khd->qhd", dscores, keys)

    def of_key_heads(x: Array) -> Array:
        return x.reshape(len(k), k.shape[1], group, -1).sum(axis=2)

    dk = of_key_heads(np.einsum("hqk,qhd->khd", dscores, q))
    dv = of_key_heads(np.einsum("hqk,qhd->khd", weights, dout))
    return out, dq, dk, dv


def compare(name: str, got: npt.NDArray[np.float32], wanted: Array, most: float) -> float:
    error = float(np.max(np.abs(got[0].astype(np.float64) - wanted)))
    # A NaN compares as false.
    if not error <= most:
        sys.exit(f"smoke: {name} is off by {error}, expected at most {most}")
    return error


def check() -> None:
    """Forward and backward of a ragged problem."""
    draw = np.random.default_rng(7)
    q, dout = draw.standard_normal((2, 67, 4, 48)).astype(np.float32)
    k, v = draw.standard_normal((2, 131, 2, 48)).astype(np.float32)
    batched = [x[None] for x in (q, k, v, dout)]
    out, lse = strobe.attention(*batched[:3], causal=True, return_lse=True)
    gradients = strobe.attention_backward(batched[3], *batched[:3], out, lse, causal=True)
    wanted = plain(*(x.astype(np.float64) for x in (q, k, v, dout)))
    errors = [
        compare(name, got, want, 2e-5)
        for name, got, want in zip(
            ("out", "dq", "dk", "dv"), (out, *gradients), wanted, strict=True
        )
    ]
    print(f"smoke: {strobe.info().cpu_isa}: largest error {max(errors):.1e}")


def main() -> None:
    version = sys.argv[1]
    here = Path(strobe.__file__).resolve().parent
    if "site-packages" not in str(here):
        sys.exit(f"smoke: strobe is {here}, expected an installed one")
    if not strobe.__version__ == metadata.version("strobe-attention") == version:
        sys.exit(
            f"smoke: strobe is {strobe.__version__}, by its metadata "
            f"{metadata.version('strobe-attention')}, expected {version}"
        )
    libraries = Path("/proc/self/maps").read_text()
    if f"{here}/libgomp.so.1" not in libraries:
        sys.exit("smoke: the wheel's own libgomp is not in use")
    for isa in strobe.info().cpu_isas:
        command = [sys.executable, "-c", "import smoke; smoke.check()"]
        environment = {
            **os.environ,
            "STROBE_CPU_ISA": isa,
            "PYTHONPATH": str(Path(__file__).parent),
        }
        subprocess.run(command, check=True, env=environment)
    print(f"smoke: Python {sys.version.split()[0]}, NumPy {np.__version__}: passed")


if __name__ == "__main__":
    main()
