"""Additive bias on the GPU, through Python, against float64: out, lse and all gradients, that of bias in every shape; with
sinks too; and over caches, of floats and of codes.

    python tests/gpu/bias.py [--count 300] [--first 0] [--device cpu]

`strobe check --device cuda` draws biases with every option of the C ABI; here is what a model does with them. With --device cpu the
test itself is tested, on the CPU's kernels.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "python")]

from device import (  # first: ends the script where there is no GPU
    BIASED,
    CACHED,
    DEV,
    HALVES,
    narrowed,
)

# isort: split
import strobe
import torch
from seeds import Tensor, check, rounding_of_dsinks, run, twice


def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """In the tensors' own dtype, the softmax in float32 at least, as models do it."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1]) + bias.to(q.dtype)
    if causal:
        shape = scores.shape[-2:]
        seen = torch.ones(shape, device=q.device, dtype=torch.bool).tril(shape[1] - shape[0])
        scores = scores.masked_fill(~seen, -math.inf)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    if sinks is not None:
        wide = torch.cat([wide, sinks.to(wide.dtype)[None, :, None, None].expand(*wide.shape[:3], 1)], -1)
    weights = wide.softmax(-1)[..., : scores.shape[-1]]
    return torch.einsum("bhij,bjhd->bihd", weights.to(q.dtype), v), wide.double().logsumexp(-1)


def cached(r: random.Random) -> str:
    """Keys in a cache, in pages or not, appended to or not, of floats or of int8. Returns its kernel."""
    dtype, causal = r.choice(HALVES), r.random() < 0.5
    heads_kv, group, dim = r.choice((1, 2, 8)), r.choice((1, 2, 4, 8)), narrowed(r.choice((64, 96, 128, 256)), CACHED)
    n_q, n_k, batch = r.choice(((1, 300, 20), (1, 2000, 3), (1, 9000, 1), (4, 2000, 3), (16, 600, 2), (100, 1000, 1), (200, 300, 2)))
    page, heads = r.choice((0, 16, 64, 256)), heads_kv * group
    columns = -(-n_k // page) if page else 1
    room = columns * page if page else n_k
    shape = (r.choice((1, batch)), r.choice((1, heads)), r.choice((1, n_q, n_q)), room)
    bias = torch.randn(shape, device=DEV, dtype=r.choice((torch.float32, *HALVES)))
    bias[torch.rand(shape, device=DEV) < r.choice((0.0, 0.0, 0.1, 0.6))] = -math.inf
    bias[..., 0] = 0.0
    if r.random() < 0.3:
        bias = bias.transpose(2, 3).contiguous().transpose(2, 3)
    used = torch.randint(n_q, n_k + 1, (batch,), dtype=torch.int32)
    entries = batch * columns
    k, v = (torch.randn(entries, page or room, heads_kv, dim, dtype=dtype, device=DEV) for _ in range(2))
    q, k_new, v_new = (torch.randn(batch, n_q, h, dim, dtype=dtype, device=DEV) for h in (heads, heads_kv, heads_kv))
    added = n_q if r.random() < 0.4 else 0
    options: dict[str, Any] = {"seqused_k": (used - added).to(DEV), "causal": causal, "bias": bias}
    if added:
        options |= {"k_new": k_new, "v_new": v_new}
    table = torch.randperm(entries).to(torch.int32).view(batch, columns)
    if page:
        options["block_table"] = table.to(DEV)
    codes = r.random() < 0.3
    cache = [k, v]
    if codes:
        (k, k_scale), (v, v_scale) = strobe.quantize(k), strobe.quantize(v)
        cache = [k, k_scale, v, v_scale]
        options |= {"k_scale": k_scale, "v_scale": v_scale}

    out, lse, kernel = twice(lambda: strobe.attention_with_kvcache(q, k, v, return_lse=True, **options))
    unpacked = "in the workspace first" in strobe.why()  # codes, to the dtype of q
    values = cache
    if codes:  # the new rows as the cache has them
        values = [strobe.dequantize(*cache[n : n + 2]).double() for n in (0, 2)]
    for b in range(batch):
        n, rows = int(used[b]), slice(b, b + 1)
        places = table[b].long().to(DEV) if page else torch.tensor([b], device=DEV)
        there = [x[places].reshape(1, room, heads_kv, dim)[:, :n] for x in values]
        own = bias[min(b, shape[0] - 1)][None, ..., :n].double()
        def result(t: Any, k: Tensor, v: Tensor, b: int = b, own: Tensor = own) -> tuple[Tensor, Tensor]:
            return eager(q[b : b + 1].to(t), k.to(t), v.to(t), own, None, causal)

        wanted, other = (result(t, *there) for t in (torch.float64, dtype))
        check("out", out[rows], wanted[0], other[0], 2)
        sums = result(torch.float64, there[0].to(dtype), there[1])[1] if unpacked else wanted[1]
        assert torch.allclose(lse[rows].double(), sums, atol=1e-3, rtol=1e-5), "lse"
    return kernel


def one(seed: int) -> str:
    """A problem, forward and backward, twice; every fourth over a cache. Returns its kernels."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    if seed % 4 == 3:
        return cached(r)
    dtype = r.choice(HALVES)
    heads_kv, group, dim = r.choice((1, 2)), r.choice((1, 2, 4)), narrowed(r.choice((32, 64, 80, 96, 112, 128, 160, 256)), BIASED)
    # (On Hopper TMA reads biases of whole units of eight keys.)
    n_q, n_k = r.choice(((1, 300), (7, 504), (64, 64), (130, 130), (129, 304), (300, 456), (300, 456)))
    causal, has_sinks, has_dlse = r.random() < 0.5, r.random() < 0.3, r.random() < 0.5
    batch, heads = r.choice((1, 3)), heads_kv * group
    shape = (r.choice((1, batch)), r.choice((1, heads)), r.choice((1, n_q, n_q)), n_k)
    q, k, v, dout = (
        torch.randn(batch, n, h, dim, device=DEV, dtype=dtype)
        for n, h in ((n_q, heads), (n_k, heads_kv), (n_k, heads_kv), (n_q, heads))
    )
    bias = torch.randn(shape, device=DEV, dtype=r.choice((torch.float32, dtype)))
    if r.random() < 0.4:  # hidden pairs, but not a whole row
        hidden = torch.rand(shape, device=DEV) < r.choice((0.1, 0.6))
        hidden[..., 0] = False
        bias[hidden] = -math.inf
    if r.random() < 0.3:
        bias = bias.transpose(2, 3).contiguous().transpose(2, 3)
    sinks = torch.randn(heads, device=DEV) if has_sinks else None
    deterministic = r.random() < 0.4  # Hopper's kernels with a bias keep no order

    given = [x.detach().requires_grad_() for x in (q, k, v, bias, *([] if sinks is None else [sinks]))]

    def ours() -> tuple[Tensor, Tensor, tuple[Tensor, ...], str]:
        """And the kernels of both passes."""
        more: dict[str, Any] = {"bias": given[3], "sinks": given[4] if has_sinks else None}
        out, lse = strobe.torch.attention(*given[:3], causal=causal, deterministic=deterministic, return_lse=True, **more)
        forward = strobe.why().splitlines()[0].rpartition(" ")[2]
        found = torch.autograd.grad([out, lse], given, [dout, dlse])
        return out, lse, found, f"{forward}, {strobe.why().splitlines()[0].rpartition(' ')[2]}"

    dlse = torch.randn(batch, heads, n_q, device=DEV) * has_dlse
    out, lse, found, kernel = ours()
    again = ours()[2]
    for n, (a, b) in enumerate(zip(found, again, strict=True)):  # else additions to dQ have no order
        assert torch.equal(a, b) or (n == 0 and not deterministic), "bits do not repeat"

    def reference(dtype: Any) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        own = [x.detach().to(dtype if n < 3 else wide).requires_grad_() for n, x in enumerate(given)]
        result = eager(*own[:4], own[4] if has_sinks else None, causal)
        return *result, torch.autograd.grad(result, own, [dout.to(dtype), dlse.double()])

    exact, plain = reference(torch.float64), reference(dtype)
    check("out", out, exact[0], plain[0], 2)
    assert torch.allclose(lse.double(), exact[1], atol=1e-3, rtol=1e-5), "lse"
    names = ("dq", "dk", "dv", "dbias", "dsinks")
    for name, got, wanted, other in zip(names, found, exact[2], plain[2], strict=False):
        assert got.shape == wanted.shape, name
        is_sinks = name == "dsinks"
        rounding = rounding_of_dsinks(sinks, exact[1], dout, exact[0], dtype) if is_sinks and sinks is not None else 0.0
        check(name, got, wanted, other, 8 if is_sinks else 3, rounding)
    return kernel


if __name__ == "__main__":
    sys.exit(run(__doc__, 300, one))
