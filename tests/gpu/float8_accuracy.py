"""Float8 attention on the GPU, through Python, against float64 over what the codes stand for: dense and packed sequences, masks,
head groups, scales of any sign, every dtype of out, rows that see nothing; bits repeat; and, every twentieth problem, the error of
rows of 8k keys to a million beside that of quantising alone, with outliers too, and one key that counts among 128k (160 problems have all of these).

    python tests/gpu/float8_accuracy.py [--count 200] [--first 0] [--device cpu]

With --device cpu the test itself is tested, on the CPU's kernels.
"""

from __future__ import annotations

import functools
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
# Of long rows.
QUERIES, PART = 256, 16384
LENGTHS = (8192, 131072, 1 << 20) if DEV == "cuda" else (1024, 4096, 16384)


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
        return LONG[seed // 20 % len(LONG)]()
    heads_kv, group = r.choice((1, 2, 3)), r.choice((1, 2, 4))
    heads, dim = (
        heads_kv * group,
        narrowed(r.choice((16, 40, 64, 80, 96, 112, 128, 160, 192, 256)), 64),
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


def exact_in_parts(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """out and lse of one sequence whose queries see all keys: q in float64, k and v times the scales of their heads. Parts of
    the keys come one after the other, so that a million of them take little memory."""
    heads, rows = q.shape[1], q.shape[0]
    largest = torch.full((heads, rows), -math.inf, dtype=torch.float64, device=DEV)
    total = torch.zeros_like(largest)
    out = torch.zeros(heads, rows, v.shape[2], dtype=torch.float64, device=DEV)
    for first in range(0, k.shape[0], PART):
        part_k, part_v = (
            x[first : first + PART].double() * scale.double()[:, None]
            for x, scale in ((k, k_scale), (v, v_scale))
        )
        scores = torch.einsum("ihd,jhd->hij", q, part_k) / math.sqrt(q.shape[2])
        grown = torch.maximum(largest, scores.amax(-1))
        weights, kept = (
            (scores - grown[..., None]).exp(),
            (largest - grown).exp(),
        )
        total = total * kept + weights.sum(-1)
        out = out * kept[..., None] + torch.einsum("hij,jhd->hid", weights, part_v)
        largest = grown
    return (out / total[..., None]).transpose(0, 1), largest + total.log()


def error_over_codes(
    dim: int, keys: int, heads: int = 2, outlier: float = 1.0
) -> tuple[float, float, str]:
    """RMS of out's error over that of exact attention to what the codes stand for, both against q, k and v before they were
    quantised; the largest error of lse against what the codes stand for; and the kernel. A value in a thousand is `outlier`
    times as large."""
    x = [torch.randn(1, n, heads, dim, device=DEV) for n in (QUERIES, keys, keys)]
    if outlier != 1.0:
        x = [torch.where(torch.rand_like(t) < 1e-3, outlier * t, t) for t in x]
    scales = [t.abs().amax((1, 3)) / 448 for t in x]
    codes = [
        (t / s[:, None, :, None]).clamp(-448, 448).to(E4M3)
        for t, s in zip(x, scales, strict=True)
    ]
    out = torch.empty_like(x[0], dtype=torch.bfloat16)
    _, lse = strobe.attention(
        *codes, **dict(zip(NAMES, scales, strict=True)), out=out, return_lse=True
    )
    kernel: str = strobe.why().splitlines()[0]
    ones = torch.ones(heads, device=DEV)
    wanted, _ = exact_in_parts(x[0][0].double(), x[1][0], x[2][0], ones, ones)
    coded_q = codes[0][0].double() * scales[0][0].double()[:, None]
    of_codes, lse_of_codes = exact_in_parts(
        coded_q, codes[1][0], codes[2][0], scales[1][0], scales[2][0]
    )
    ratio = (out[0].double() - wanted).norm() / (of_codes - wanted).norm()
    off = float((lse[0].double() - lse_of_codes).abs().max())
    return float(ratio), off, kernel


def long_rows(dim: int) -> str:
    """The error of long rows beside what quantising q, k and v costs alone: it does not grow with the keys."""
    found = []
    for keys in LENGTHS:
        ratio, off, kernel = error_over_codes(dim, keys)
        print(
            f"head_dim {dim}, {keys} keys: {ratio:.3f} of the error of codes alone, lse off by {off:.2g}: {kernel}",
            flush=True,
        )
        found.append(ratio)
        assert ratio < 1.16, (
            f"the error of {keys} keys of {dim} dimensions is {ratio:.3f} of that of the codes alone, expected at most 1.16"
        )
    assert all(abs(ratio / found[0] - 1) < 0.02 for ratio in found), (
        f"the errors of {LENGTHS} keys of {dim} dimensions are {found} of those of the codes alone, expected within 2 % of the first"
    )
    return kernel


def outliers(dim: int) -> str:
    """The same where a value in a thousand is ten times as large, which costs the codes more and the weights not: more heads,
    as each draws few of them."""
    ratio, off, kernel = error_over_codes(dim, LENGTHS[0], heads=16, outlier=10.0)
    print(
        f"head_dim {dim}, {LENGTHS[0]} keys with outliers: {ratio:.3f} of the error of codes alone, lse off by {off:.2g}: {kernel}",
        flush=True,
    )
    assert ratio < 1.03, (
        f"the error of {dim} dimensions with outliers is {ratio:.3f} of that of the codes alone, expected at most 1.03"
    )
    return kernel


def needle(dim: int) -> str:
    """One key among many that one query matches, so strongly that its value is out: as it comes back in bf16 from the same
    numbers, to bf16's own rounding."""
    keys, heads = LENGTHS[1], 2
    unit = 2.0**-4  # codes times it are bf16's numbers
    q, k, v = (torch.randn(1, n, heads, dim, device=DEV) for n in (QUERIES, keys, keys))
    row, key = QUERIES // 3, keys * 2 // 3 + 5
    # A score of about 40: the others' weights together are 1e-12.
    k[0, key] = (
        q[0, row] * 40 * math.sqrt(dim) / q[0, row].square().sum(-1, keepdim=True)
    )
    codes = [(x / unit).clamp(-448, 448).to(E4M3) for x in (q, k, v)]
    scale = torch.full((1, heads), unit, device=DEV)
    out = torch.empty_like(q, dtype=torch.bfloat16)
    strobe.attention(*codes, **dict.fromkeys(NAMES, scale), out=out)
    kernel: str = strobe.why().splitlines()[0]
    in_bf16 = strobe.attention(*(x.to(torch.bfloat16) * unit for x in codes))
    wanted, _ = exact_in_parts(
        codes[0][0, row : row + 1].double() * unit,
        codes[1][0], codes[2][0], scale[0], scale[0],
    )  # fmt: skip
    errors = [(x[0, row].double() - wanted[0]).abs() for x in (out, in_bf16)]
    print(
        f"head_dim {dim}, one key of {keys}: its value is off by {float(errors[0].max()):.2g}, in bf16 by {float(errors[1].max()):.2g}: {kernel}",
        flush=True,
    )
    value = codes[2][0, key].double() * unit
    assert torch.allclose(wanted[0], value, rtol=0, atol=1e-6), (
        "the key does not stand out"
    )
    wrong = ~(errors[0] <= 2.0**-8 * wanted[0].abs() + 1e-6)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} values of the one key that counts are off by more than bf16's rounding, up to {float(errors[0].max()):.3g}"
    )
    return kernel


# In place of every twentieth random problem, in turn.
LONG = [
    functools.partial(test, narrowed(dim, 64))
    for test, dims in (
        (needle, (64, 128)),
        (long_rows, (64, 128, 192, 256)),
        (outliers, (64, 128)),
    )
    for dim in dims
]


if __name__ == "__main__":
    sys.exit(run(__doc__, 200, one))
