"""Masks as data on the GPU, through Python: packing against the CPU's, word by word, and out and lse against float64.

    python tests/gpu/masks.py [--count 300] [--first 0] [--device cpu]

With --device cpu the test itself is tested, on the CPU's kernels.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "python")]

try:
    import torch
except ImportError:
    print("gpu masks: skipped (no PyTorch, whose float64 is the reference)")
    sys.exit(0)

import numpy as np
import strobe
from strobe import _core
from strobe._problem import mask_fields, mask_layout

Tensor = torch.Tensor


def draw_pairs(r: random.Random, shape: tuple[int, int, int, int]) -> Tensor:
    """Bools in regions that are seen, hidden or mixed, so that blocks of all kinds come; some rows see nothing."""
    density = r.choice((0.05, 0.3, 0.6, 0.9))
    q, k = (-(-n // side) for n, side in zip(shape[2:], (48, 80), strict=True))
    u = torch.rand(*shape[:2], q, k).repeat_interleave(48, 2).repeat_interleave(80, 3)[:, :, : shape[2], : shape[3]]
    half = (1 - density) / 2
    keep = torch.where(u < half, False, torch.where(u > 1 - density / 2, True, torch.rand(shape) < 0.5))
    keep[torch.rand(shape[:3]) < 0.02] = False
    return keep


def packs_alike(r: random.Random, keep: Tensor, intervals: Tensor | None, block: tuple[int, int], device: str) -> None:
    """The words that a device packs are the CPU's, with room for all and with less."""
    batch, heads, n_q, n_k = keep.shape
    room = (r.randint(1, 40), 1) if r.random() < 0.5 else (10**6, 10**5)
    room = room[0], min(room)
    fields = {"batch": batch, "heads": heads, "seqlen_q": n_q, "seqlen_k": n_k, "head_dim": 8}
    fields |= mask_fields(mask_layout(block, batch > 1, heads > 1, *room), batch, heads, False)
    words = _core.mask_bytes(fields) // 4
    found = []
    for where in ("cpu", device):
        arrays = {"keep": keep.to(where)} | ({} if intervals is None else {"intervals": intervals.to(where)})
        packed = torch.full((words + 4,), 0x5A5A5A5A, dtype=torch.int32, device=where)
        first = -(packed.data_ptr() // 4) % 4
        numbers = {name: array.data_ptr() for name, array in arrays.items()}
        numbers |= {"packed": packed[first:].data_ptr(), "packed_bytes": 4 * words}
        _core.pack_mask(fields | ({"device": 1} if where != "cpu" else {}), numbers)
        found.append(packed[first : first + words].cpu())
    wrong = (found[0] != found[1]).nonzero().flatten()
    assert not len(wrong), f"word {wrong[0]} of {words} is {found[1][wrong[0]]}, expected {found[0][wrong[0]]}"


def exact(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | None, dtype: Any) -> tuple[Tensor, Tensor]:
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    wide = scores if dtype == torch.float64 else scores.float()
    if bias is not None:
        wide = wide + bias
    wide = wide.masked_fill(~seen, -math.inf)
    weights = wide.softmax(-1).nan_to_num(0.0).to(dtype)  # a row that sees nothing has none
    return torch.einsum("bhij,bjhd->bihd", weights, v), wide.double().logsumexp(-1)


def one(seed: int, device: str) -> str:
    """A problem, twice. Returns its kernel."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    dtype = r.choice((torch.bfloat16, torch.float16))
    heads_kv, group, dim = r.choice((1, 2)), r.choice((1, 2, 4)), r.choice((32, 64, 80, 96, 112, 128, 192, 256))
    n_q, n_k = r.choice(((1, 300), (7, 500), (64, 64), (130, 130), (129, 300), (300, 450), (700, 1100)))
    batch, heads = r.choice((1, 3)), heads_kv * group
    shape = (r.choice((1, batch)), r.choice((1, heads)), n_q, n_k)
    block = r.choice((64, 128, 256)), r.choice((64, 128, 256))
    keep = draw_pairs(r, shape)
    intervals = None
    if r.random() < 0.4:
        intervals = torch.randint(-50, n_k + 50, (*shape[:3], 4), dtype=torch.int32)
    packs_alike(r, keep, intervals, block, device)

    causal = r.random() < 0.4
    q, k, v = (
        torch.randn(batch, n, h, dim, device=device, dtype=dtype)
        for n, h in ((n_q, heads), (n_k, heads_kv), (n_k, heads_kv))
    )
    bias = torch.randn(1, heads, n_q, n_k, device=device) if r.random() < 0.3 else None
    seen = keep.to(device).expand(batch, heads, n_q, n_k)
    if causal:
        seen = seen & torch.ones(n_q, n_k, device=device, dtype=torch.bool).tril(n_k - n_q)
    if r.random() < 0.3:  # what nobody sees may hold anything
        unseen = ~seen.any(2).view(batch, heads_kv, group, n_k).any(2).transpose(1, 2)
        k[unseen], v[unseen] = math.nan, math.inf
    mask = strobe.masks.from_bool(keep, block=block).to(device)

    def ours() -> tuple[Tensor, Tensor, str]:
        out, lse = strobe.torch.attention(q, k, v, causal=causal, mask=mask, bias=bias, return_lse=True)
        return out, lse, strobe.why().splitlines()[0]

    out, lse, kernel = ours()
    again = ours()
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1]), "bits do not repeat"
    clean = k.nan_to_num(0.0), v.nan_to_num(0.0, 0.0, 0.0)
    wanted, other = (exact(q, *clean, seen, bias, t) for t in (torch.float64, dtype))
    error, allowed = ((x.double() - wanted[0]).abs().max().item() for x in (out, other[0]))
    assert error <= 2 * allowed + 2e-3 * wanted[0].abs().max().item() + 1e-5, f"out: error {error:.3g}, {allowed:.3g}"
    assert torch.allclose(lse.double(), wanted[1], atol=1e-3, rtol=1e-5), "lse"

    # With room for fewer, the last blocks of queries are NaN, and the others the same bits.
    sides = np.asarray(mask.tiles())
    if shape[:2] == (1, 1) and sides.any():
        less = strobe.masks.from_bool(keep, block=block, capacity=int(np.count_nonzero(sides)) // 2 + 1).to(device)
        words = less.packed.cpu().numpy()
        lists = words[32 : 32 + 2 * len(sides)].reshape(-1, 2)
        lost = torch.from_numpy(np.repeat(lists[:, 1] < 0, block[0])[:n_q]).to(device)
        part = strobe.torch.attention(q, k, v, causal=causal, mask=less, bias=bias)
        assert part[:, lost].isnan().all() and torch.equal(part[:, ~lost], out[:, ~lost]), "rows without room"
    return kernel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu masks: skipped (no GPU)")
        return 0
    kernels: dict[str, int] = {}
    for seed in range(options.first, options.first + options.count):
        try:
            kernel = one(seed, options.device)
        except AssertionError as error:
            print(f"gpu masks: seed {seed}: {error}; alone: --first {seed} --count 1")
            return 1
        kernels[kernel] = kernels.get(kernel, 0) + 1
    print(f"gpu masks: {options.count} problems: {kernels}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
