"""Is a paged cache as exact as whole tensors on the GPU? Both against float64, for prompts, chunks of prompts and single queries.

    python tests/gpu/paged_accuracy.py [--scale 1.0] [--head-dims 64,128,256] [--verbose]

Pages and whole tensors take other kernels, or tiles of other sizes, so that weights are rounded against other maxima and sums
are taken in another order: a few results then fall to the other side of a rounding of out, and differ by one unit in the last
place. That is no loss of exactness. What this script holds both to: the RMS error against float64 of the one is at most 1.1
times that of the other over all lengths, and 1.25 times for any one of them. On an H100 pages are as exact (at head_dim 256) or
up to a tenth more exact (one query, or three): the kernel that divides keys subtracts a row's true maximum, so that its largest
weight is 1 and has no rounding error, where the kernels for many queries subtract a maximum of the first blocks.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from device import DEV  # first: ends the script where there is no GPU

# isort: split
import strobe_torch as st
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

import strobe
from strobe.flash_attn import flash_attn_func, flash_attn_with_kvcache

# Queries and keys: one query, prompts, chunks at the end of longer sequences, and lengths that no tile divides.
LENGTHS = [
    (1, 128), (1, 1024), (3, 799), (64, 128), (64, 256), (113, 203), (128, 128), (128, 217), (108, 256), (211, 256), (256, 256),
    (256, 512), (307, 256), (384, 256), (512, 256), (640, 128), (1024, 1024), (1023, 1024), (1024, 1023),
]  # fmt: skip
PAGE_SIZES = [16, 64, 256, 7]
HEADS = [(4, 4), (8, 2), (6, 1)]
# Rows (queries x heads x sequences) at least, so that an RMS says something.
ROWS = 2048
MOST, MOST_OF_ONE = 1.1, 1.25


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """out in float64, sequence after sequence."""
    rule = st.Rule(1 / math.sqrt(q.shape[-1]), causal=causal)
    return torch.stack([st.attend(rule, *sequence)[0] for sequence in zip(q, k, v, strict=True)])


def paged(k: torch.Tensor, page_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of k (batch, seqlen, heads, dim) in pages that lie anywhere in a pool, and their table."""
    batch, seqlen, heads, dim = k.shape
    columns = -(-seqlen // page_size)
    order = torch.randperm(batch * columns, generator=generator, device=k.device)
    table = order.to(torch.int32).view(batch, columns)
    rows = torch.full((batch, columns * page_size, heads, dim), math.nan, dtype=k.dtype, device=k.device)
    rows[:, :seqlen] = k
    pool = torch.empty(batch * columns, page_size, heads, dim, dtype=k.dtype, device=k.device)
    pool[order] = rows.view(batch * columns, page_size, heads, dim)
    return pool, table


def ordinal(x: torch.Tensor) -> torch.Tensor:
    """Numbers of 16 bits by their place in order: neighbours differ by 1."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -32768 - bits, bits)


class Errors:
    """Of one way to compute: sums of squares, and the largest."""

    def __init__(self) -> None:
        self.square, self.most, self.count = 0.0, 0.0, 0

    def add(self, out: torch.Tensor, exact: torch.Tensor) -> None:
        error = (out.double() - exact).abs()
        assert bool(error.isfinite().all()), "out is not finite"
        self.square += float(error.square().sum())
        self.most = max(self.most, float(error.max()))
        self.count += error.numel()

    @property
    def rms(self) -> float:
        return math.sqrt(self.square / self.count)


class Pair:
    """Whole tensors and pages."""

    def __init__(self) -> None:
        self.dense, self.paged = Errors(), Errors()
        self.apart = self.over = self.dense_worse = 0

    def add(self, dense: torch.Tensor, pages: torch.Tensor, exact: torch.Tensor) -> None:
        self.dense.add(dense, exact)
        self.paged.add(pages, exact)
        difference = (dense.double() - pages.double()).abs()
        self.over += int((difference > 1e-3 + 1e-3 * dense.double().abs()).sum())
        far = (ordinal(dense) - ordinal(pages)).abs() > 1
        # Near 0 units are small: only what shows beside the errors of both counts.
        far &= difference > 4 * max(self.dense.rms, self.paged.rms)
        self.apart += int(far.sum())
        worse = (dense.double() - exact).abs() > (pages.double() - exact).abs()
        self.dense_worse += int((far & worse).sum())

    @property
    def ratio(self) -> float:
        """Of the less exact to the more exact."""
        a, b = self.dense.rms, self.paged.rms
        return max(a, b) / min(a, b) if min(a, b) > 0 else (1.0 if a == b else math.inf)

    def text(self) -> str:
        return (
            f"rms {self.dense.rms:.3e} whole, {self.paged.rms:.3e} paged, {self.paged.rms / max(self.dense.rms, 1e-300):.3f} times; "
            f"most {self.dense.most:.2e}, {self.paged.most:.2e}; {self.over} of {self.dense.count} differ by more than 1e-3 + 1e-3 |out|, "
            f"{self.apart} by more than a unit (whole is further off in {self.dense_worse})"
        )


def compare(dtype: torch.dtype, head_dim: int, lengths: list[tuple[int, int]], scale: float, verbose: bool) -> list[str]:
    generator = torch.Generator(DEV).manual_seed(head_dim)
    faults = []
    for causal in (False, True):
        total = Pair()
        for index, (seqlen_q, seqlen_k) in enumerate(lengths):
            heads, heads_kv = HEADS[index % len(HEADS)]
            page_size = PAGE_SIZES[index % len(PAGE_SIZES)]
            batch = max(2, math.ceil(scale * ROWS / (seqlen_q * heads)))
            shapes = [(batch, seqlen_q, heads, head_dim)] + 2 * [(batch, seqlen_k, heads_kv, head_dim)]
            q, k, v = (torch.randn(s, generator=generator, device=DEV).to(dtype) for s in shapes)
            exact = reference(q, k, v, causal)
            dense = flash_attn_func(q, k, v, causal=causal)
            k_pool, table = paged(k, page_size, generator)
            v_pool = torch.empty_like(k_pool)
            v_pool[table.long().view(-1)] = torch.nn.functional.pad(
                v, (0, 0, 0, 0, 0, table.shape[1] * page_size - seqlen_k)
            ).view(v_pool.shape)
            used = torch.full((batch,), seqlen_k, dtype=torch.int32, device=DEV)
            pages = flash_attn_with_kvcache(q, k_pool, v_pool, cache_seqlens=used, block_table=table, causal=causal)
            one = Pair()
            for pair in (one, total):
                pair.add(dense, pages, exact)
            name = f"{dtype}, head_dim {head_dim}, {seqlen_q} x {seqlen_k}, heads {heads}/{heads_kv}, pages of {page_size}"
            name += ", causal" * causal
            if one.ratio > MOST_OF_ONE:
                faults.append(f"{name}: {one.text()}")
            if verbose or one.ratio > MOST_OF_ONE:
                print(f"  {name}: {one.text()}", flush=True)
        name = f"{dtype}, head_dim {head_dim}{', causal' * causal}"
        print(f"paged accuracy: {name}: {total.text()}", flush=True)
        if total.ratio > MOST:
            faults.append(f"{name}: {total.text()}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description="A paged cache and whole tensors against float64.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: the script itself")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of rows")
    parser.add_argument("--longest", type=int, default=1024, help="leave out more queries")
    parser.add_argument("--verbose", action="store_true", help="a line for each pair of lengths")
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name() if DEV == "cuda" else strobe.info().cpu_isa
    print(f"paged accuracy on {gpu}")
    lengths = [x for x in LENGTHS if x[0] <= options.longest]
    faults = []
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim in map(int, options.head_dims.split(",")):
            faults += compare(dtype, head_dim, lengths, options.scale, options.verbose)
    for fault in faults:
        print(f"paged accuracy: FAILED: {fault}")
    print(f"paged accuracy: {len(faults)} failed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
