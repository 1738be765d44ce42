"""How often the Hopper forward's cold path would run on real activations.

    python bench/reference_maximum.py        all layers of MiniLM-L6 reading 512 tokens; needs what examples/data/README.md says

The kernel (src/cuda/hopper/forward_sm90_consumer.cuh) subtracts from scores a reference that is the maximum of the blocks that
are masked or come first, and leaves it there. A warp whose 16 rows have a thread's share of weights above kSumLimit
computes its rows of that block again, with their maximum (`redo`). This repeats those decisions in float64: which
blocks are fast, how many of those a warp computes again, and how near to the limit the others come.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "data"))
import capture_minilm as minilm

LIMITS = {"bf16": 60, "fp16": 15}  # log2 of kSumLimit
WARP_ROWS = 16


def shares(weights: np.ndarray) -> np.ndarray:
    """Sums of the four threads of a quad: of columns 0, 1, 8, 9, ..., of 2, 3, 10, 11, ..., and so on."""
    rows, columns = weights.shape
    return weights.reshape(rows, columns // 8, 4, 2).sum(axis=(1, 3))


def count(scores: np.ndarray, causal: bool, tile_k: int, limit: float) -> tuple[int, int, float]:
    """Fast blocks of a head's warps, those computed again, log2 of the largest share that was not.
    scores: (seqlen, seqlen), in units of log 2."""
    seqlen = scores.shape[0]
    fast = again = 0
    largest = -math.inf
    for begin in range(0, seqlen, WARP_ROWS):
        rows = np.arange(begin, begin + WARP_ROWS)
        ends = rows + 1 if causal else np.full(WARP_ROWS, seqlen)
        reference = np.full(WARP_ROWS, -np.inf)
        first = True
        for block in reversed(range(0, int(ends.max()), tile_k)):
            columns = np.arange(block, min(block + tile_k, seqlen))
            s = np.where(columns[None] < ends[:, None], scores[rows][:, columns], -np.inf)
            if first or block + tile_k > ends.min():  # masked, or the first
                reference = np.maximum(reference, s.max(axis=1))
                first = False
                continue
            fast += 1
            share = float(np.log2(shares(np.exp2(s - reference[:, None])).max()))
            if share > limit:
                again += 1
                reference = np.maximum(reference, s.max(axis=1))
            else:
                largest = max(largest, share)
    return fast, again, largest


def main() -> None:
    folder = minilm.model_dir()
    weights = minilm.load_weights(folder)
    ids = minilm.tokenise(folder, (ROOT / "examples" / "data" / "text.txt").read_text())
    shift = minilm.torch.zeros(
        minilm.SEQLEN, minilm.HEADS, minilm.HEAD_DIM, dtype=minilm.torch.float64
    )
    print(
        "layer mask   tile_k  fast blocks  computed again: bf16   fp16   log2 of the largest share left: bf16"
    )
    for layer in range(minilm.LAYERS):
        minilm.LAYER = layer
        trace = minilm.run(weights, ids, shift)
        scale = math.log2(math.e) / math.sqrt(minilm.HEAD_DIM)
        scores = minilm.torch.einsum("qhd,khd->hqk", trace.q, trace.k).numpy() * scale
        for causal in (False, True):
            for tile_k in (128, 64):
                found = {
                    dtype: [count(head, causal, tile_k, limit) for head in scores]
                    for dtype, limit in LIMITS.items()
                }
                fast = sum(n for n, _, _ in found["bf16"])
                bf16, fp16 = (sum(n for _, n, _ in found[dtype]) for dtype in LIMITS)
                largest = max(x for _, _, x in found["bf16"])
                print(
                    f"{layer:5} {'causal' if causal else 'full':6} {tile_k:6} {fast:12} {bf16:21} {fp16:6} {largest:26.1f}"
                )


if __name__ == "__main__":
    main()
