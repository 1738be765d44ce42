"""Float8 attention on the GPU, through Python, against float64 over what the codes stand for: dense and packed sequences, masks,
head groups, scales of any sign, every dtype of out, rows that see nothing; bits repeat; and the error of long rows.

    python tests/gpu/float8_accuracy.py [--count 200] [--first 0] [--device cpu]

With --device cpu the test itself is tested, on the CPU's kernels.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "python")]

from device import DEV, narrowed  # first: ends the script where there is no GPU

# isort: split
import strobe
import torch
from seeds import Tensor, run

E4M3 = torch.float8_e4m3fn
NAMES = ("q_scale", "k_scale", "v_scale")


def draw(
    shape: tuple[int, ...], heads_kv: int, r: random.Random
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of [batch, rows, heads, dim], scales of [batch, heads_kv], and what they stand for in float64."""
    batch, rows, heads, dim = shape
    # Room for rows of whole 16-byte units, which Hopper's kernels ask for, and sometimes for more.
    wide = -(-dim // 16) * 16 + r.choice((0, 0, 16))
    x = torch.randn(batch, rows, heads, wide, device=DEV)
    scale = torch.exp2(torch.rand(batch, heads_kv, device=DEV) * 2 - 7)
    if r.random() < 0.3:
        scale = torch.where(torch.rand_like(scale) < 0.3, -scale, scale)
    spread = scale.repeat_interleave(heads // heads_kv, 1)[:, None, :, None]
    codes = (x / spread).clamp(-448, 448).to(E4M3)[..., :dim]
    return codes, scale, codes.double() * spread.double()


def exact(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and the mean of |v| that out's error is measured by: [rows, heads, dim] of one sequence."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    out, size = (torch.einsum("hij,jhd->ihd", weights, x) for x in (v, v.abs()))
    return out, scores.logsumexp(-1), size


def one(seed: int) -> str:
    """A problem, twice. Returns its kernel."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    if seed % 20 == 19:
        return long_rows(r.choice((64, 128)))
    heads_kv, group = r.choice((1, 2, 3)), r.choice((1, 2, 4))
    heads, dim = (
        heads_kv * group,
        narrowed(r.choice((16, 40, 64, 80, 96, 112, 128, 160, 192)), 64),
    )
    dim_v = dim if r.random() < 0.7 else narrowed(r.choice((32, 64, 96, 128)), 64)
    causal, window = (
        r.random() < 0.5,
        r.choice(((-1, -1), (-1, -1), (100, 0), (300, 50))),
    )
    lengths = [
        r.choice(
            (
                (1, 300),
                (7, 500),
                (64, 64),
                (130, 130),
                (129, 1000),
                (300, 150),
                (700, 1100),
            )
        )
        for _ in range(r.choice((1, 2, 3)))
    ]
    packed = r.random() < 0.4
    if packed:  # without room between rows
        dim, dim_v = (-(-d // 16) * 16 for d in (dim, dim_v))
    else:
        lengths = lengths[:1] * len(lengths)
    dtype = r.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    batch = len(lengths)
    most_q, most_k = (max(n[i] for n in lengths) for i in (0, 1))
    (q, qs, qv), (k, ks, kv), (v, vs, vv) = (
        draw((batch, n, h, d), heads_kv, r)
        for n, h, d in (
            (most_q, heads, dim),
            (most_k, heads_kv, dim),
            (most_k, heads_kv, dim_v),
        )
    )
    options: dict[str, Any] = {
        **dict(zip(NAMES, (qs, ks, vs), strict=True)),
        "causal": causal,
    }
    if window != (-1, -1):
        options["window"] = window
    given = [q, k, v]
    if packed:
        starts = [
            torch.tensor(
                [sum(n[i] for n in lengths[:b]) for b in range(batch + 1)],
                dtype=torch.int32,
                device=DEV,
            )
            for i in (0, 1)
        ]
        options |= {
            "cu_seqlens_q": starts[0],
            "cu_seqlens_k": starts[1],
            "max_seqlen_q": most_q,
            "max_seqlen_k": most_k,
        }
        given = [
            torch.cat(
                [x.view(torch.uint8)[b, : lengths[b][i]] for b in range(batch)]
            ).view(E4M3)
            for x, i in ((q, 0), (k, 1), (v, 1))
        ]

    def ours() -> tuple[Tensor, Tensor, str]:
        out = torch.full(
            (*given[0].shape[:-1], dim_v), math.nan, device=DEV, dtype=dtype
        )
        _, lse = strobe.attention(*given, **options, out=out, return_lse=True)
        return out, lse, strobe.why().splitlines()[0]

    out, lse, kernel = ours()
    again = ours()
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1]), (
        "bits do not repeat"
    )
    rounding = {
        torch.bfloat16: 2.0**-8,
        torch.float16: 2.0**-10,
        torch.float32: 2.0**-20,
    }[dtype]
    row = 0
    for b, (n_q, n_k) in enumerate(lengths):
        i = torch.arange(n_q, device=DEV)[:, None] + n_k - n_q
        j = torch.arange(n_k, device=DEV)[None]
        seen = torch.ones(n_q, n_k, dtype=torch.bool, device=DEV)
        if causal:
            seen &= j <= i
        if window[0] >= 0:
            seen &= j >= i - window[0]
        if window[1] >= 0 and not causal:
            seen &= j <= i + window[1]
        wanted, wanted_lse, size = exact(
            qv[b, :n_q], kv[b, :n_k], vv[b, :n_k], seen, 1 / math.sqrt(dim)
        )
        got, got_lse = (
            (out[row : row + n_q], lse[:, row : row + n_q])
            if packed
            else (out[b], lse[b])
        )
        row += n_q
        # Weights in float8 are off by a 16th, or where they are tiny by 2^-18 of a row's largest. (Kernels that have them in
        # more bits are further inside.)
        allowed = (
            2.0**-4 * size
            + 2.0**-18 * n_k * vv[b].abs().max()
            + rounding * wanted.abs()
            + 1e-6
        )
        wrong = ~((got.double() - wanted).abs() <= allowed)
        assert not wrong.any(), (
            f"out: {int(wrong.sum())} values of {wrong.numel()}, the first at {wrong.nonzero()[0].tolist()}"
        )
        apart = torch.where(
            wanted_lse == got_lse, 0.0, (got_lse.double() - wanted_lse).abs()
        )
        # Sums of float8 products keep 13 bits after the first in Hopper's tensor cores.
        most = 1e-3
        if "cuda_sm90" in kernel:
            keys = kv[b, :n_k].abs().repeat_interleave(heads // heads_kv, 1)
            sizes = torch.einsum("ihd,jhd->hij", qv[b, :n_q].abs(), keys)
            most += 2.0**-12 / math.sqrt(dim) * float(sizes.max())
        assert float(apart.max()) < most, f"lse: {float(apart.max()):.3g} of {most:.3g}"
    return kernel


def long_rows(dim: int) -> str:
    """The error of 8192 keys beside what quantising q, k and v costs alone."""
    shape = (1, 8192 if DEV == "cuda" else 1024, 4, dim)
    x = [torch.randn(shape, device=DEV) for _ in range(3)]
    scales = [t.abs().amax((1, 3)) / 448 for t in x]
    codes = [
        (t / s[:, None, :, None]).clamp(-448, 448).to(E4M3)
        for t, s in zip(x, scales, strict=True)
    ]
    out = torch.empty(shape, device=DEV)
    strobe.attention(*codes, **dict(zip(NAMES, scales, strict=True)), out=out)
    kernel: str = strobe.why().splitlines()[0]
    rows, seen = slice(0, 512), torch.ones(1, 1, dtype=torch.bool, device=DEV)
    wide = [t[0].double() for t in x]
    coded = [
        c[0].double() * s[0, None, :, None].double()
        for c, s in zip(codes, scales, strict=True)
    ]
    wanted, of_codes = (
        exact(q[rows], k, v, seen, 1 / math.sqrt(dim))[0] for q, k, v in (wide, coded)
    )
    ratio = float((out[0, rows].double() - wanted).norm() / (of_codes - wanted).norm())
    assert ratio < 1.16, (
        f"the error of {dim} dimensions is {ratio:.3f} of that of the codes alone, expected at most 1.16"
    )
    return kernel


if __name__ == "__main__":
    sys.exit(run(__doc__, 200, one))
