"""Decoding over listed blocks of a cache on one GPU: what is read is what the lists have.

    python bench/gpu_masked_decode.py [--rounds 50] [--page 64]

GPU time in CUDA graphs, L2 overwritten, in turns: without a mask, under a mask that lists everything, and an eighth of the blocks
(of 64 keys; the last two of them always): the same for all heads, for each key head, for each query head; and without a mask over
an eighth of the keys. bf16, 32 query heads, 8 key heads of 128 dimensions, one query.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
from gpu_timing import captured, capturing_stream, interleaved

BLOCK, HEADS, HEADS_KV, DIM, PART = 64, 32, 8, 128, 8


def chosen(rng: np.random.Generator, lists: int, blocks: int) -> Any:
    """bool [lists, blocks]: an eighth of the blocks, at random, and the last two."""
    found = np.zeros((lists, blocks), bool)
    for row in found:
        row[rng.choice(blocks, max(0, blocks // PART - 2), replace=False)] = row[-2:] = True
    return found


def measure(batch: int, keys: int, page: int, rounds: int, flush: Any) -> None:
    import strobe
    import torch

    rng = np.random.default_rng(1)
    blocks, columns = keys // BLOCK, keys // page
    k, v = (torch.randn(batch * columns, page, HEADS_KV, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(batch * columns).to(torch.int32).view(batch, columns).cuda()
    visited = {
        "all listed": np.ones((1, 1, 1, blocks), bool),
        "an eighth, of all heads": chosen(rng, batch, blocks).reshape(batch, 1, 1, blocks),
        "of each key head": chosen(rng, batch * HEADS_KV, blocks).reshape(batch, HEADS_KV, 1, blocks).repeat(HEADS // HEADS_KV, 1),
        "of each query head": chosen(rng, batch * HEADS, blocks).reshape(batch, HEADS, 1, blocks),
    }
    options: dict[str, dict[str, Any]] = {"no mask": {}}
    for name, x in visited.items():
        options[name] = {"mask": strobe.masks.blocks(x, 1, keys, block=BLOCK).to("cuda")}
    options["no mask, an eighth of the keys"] = {"seqused_k": torch.full((batch,), keys // PART, dtype=torch.int32, device="cuda")}
    with capturing_stream():
        calls = {n: partial(strobe.attention_with_kvcache, q, k, v, block_table=table, **o) for n, o in options.items()}
        times = interleaved(captured(calls, {}), rounds, flush)
    for name, seconds in times.items():
        print(f"{batch:3} x {keys:6}  {name:<32} {seconds * 1e6:8.1f} us  {times['no mask'] / seconds:6.2f}", flush=True)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--page", type=int, default=64)
    args = parser.parse_args()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for batch, keys in ((1, 131072), (16, 32768), (64, 8192)):
        measure(batch, keys, args.page, args.rounds, flush)


if __name__ == "__main__":
    main()
