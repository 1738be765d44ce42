"""Attention sinks on the GPU, through Python, against float64: gradients, lse with the sink and without, caches, merging.

    python tests/gpu/sinks.py [--count 200] [--first 0] [--device cpu]

`strobe check --device cuda` draws sinks with every option of the C ABI; here is what a model does with them. With --device cpu the
test itself is tested, on the CPU's kernels.
"""

from __future__ import annotations

import math
import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "python")]

from device import (  # first: ends the script where there is no GPU
    CACHED,
    DEV,
    HALVES,
    narrowed,
)

# isort: split
import strobe
import torch
from seeds import Tensor, check, rounding_of_dsinks, run


def eager(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, causal: bool, window: int, outside: bool) -> tuple[Tensor, Tensor]:
    """One more column of scores, which is dropped after the softmax; in the tensors' own dtype, as models do it."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    distance = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1], device=q.device)
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window >= 0:
        hidden = hidden | (distance > window)
    scores = scores.masked_fill(hidden, -math.inf)
    every = torch.cat([scores, sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = every.float().softmax(-1) if every.dtype != torch.float64 else every.softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", weights[..., :-1].to(q.dtype), v)
    return out, (scores if outside else every).double().logsumexp(-1)


def with_sink(lse: Tensor, sinks: Tensor, outside: bool) -> Tensor:
    """lse [batch, heads, queries] with the sink in it, whether it was `outside` or not."""
    return torch.logaddexp(lse, sinks.double()[None, :, None]) if outside else lse


def one(seed: int) -> str:
    """A problem, forward and backward, its keys in a cache and in two parts. Returns its kernel."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    dtype = r.choice(HALVES)
    heads_kv, group, dim = r.choice((1, 2)), r.choice((1, 2, 4, 8)), narrowed(r.choice((32, 64, 80, 96, 128, 192, 256)), CACHED)
    n_q, n_k = r.choice(((1, 300), (7, 900), (64, 64), (300, 300), (129, 700), (700, 1100)))
    causal, window, outside, has_dlse = r.random() < 0.6, r.choice((-1, -1, 40)), r.random() < 0.4, r.random() < 0.5
    batch, heads = r.choice((1, 3)), heads_kv * group
    q, k, v, dout = (
        torch.randn(batch, n, h, dim, device=DEV, dtype=dtype)
        for n, h in ((n_q, heads), (n_k, heads_kv), (n_k, heads_kv), (n_q, heads))
    )
    # (With a gradient of lse outside, how far a sink is above the keys has a bound: docs/semantics.md.)
    sinks = torch.randn(heads, device=DEV) * r.choice((1.0, 1.0, 8.0, 60.0) if not (outside and has_dlse) else (1.0, 3.0))
    if r.random() < 0.3:
        sinks[r.randrange(heads)] = -math.inf
    options: dict[str, Any] = {"causal": causal, "window": (window, -1)}

    given = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
    out, lse = strobe.torch.attention(
        *given[:3], sinks=given[3], sinks_outside_lse=outside, deterministic=True, return_lse=True, **options
    )
    kernel = strobe.why().splitlines()[0]
    dlse = torch.randn_like(lse) if has_dlse else torch.zeros_like(lse)
    found = torch.autograd.grad([out, lse], given, [dout, dlse])
    again = torch.autograd.grad(
        strobe.torch.attention(*given[:3], sinks=given[3], sinks_outside_lse=outside, deterministic=True, return_lse=True, **options),
        given, [dout, dlse],
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "bits do not repeat"

    def reference(dtype: Any) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        own = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, sinks)]
        result = eager(*own, causal, window, outside)
        return *result, torch.autograd.grad(result, own, [dout.to(dtype), dlse.double()])

    exact, plain = reference(torch.float64), reference(dtype)
    check("out", out, exact[0], plain[0], 2)
    assert torch.allclose(lse.double(), exact[1], atol=1e-3, rtol=1e-5), "lse"
    for name, got, wanted, other in zip(("dq", "dk", "dv"), found, exact[2], plain[2], strict=False):
        check(name, got, wanted, other, 3)
    rounding = rounding_of_dsinks(sinks, with_sink(exact[1], sinks, outside), dout, exact[0], dtype)
    check("dsinks", found[3], exact[2][3], plain[2][3], 8, rounding)

    cached = strobe.attention_with_kvcache(q, k, v, sinks=sinks, **options)
    inside = eager(q.double(), k.double(), v.double(), sinks.double(), causal, window, False)
    check("out of a cache", cached, inside[0], plain[0], 2)
    if not causal and window < 0:
        half = n_k // 2
        parts = [
            strobe.attention_with_kvcache(q, x, y, out_dtype="float32", return_lse=True)
            for x, y in ((k[:, :half], v[:, :half]), (k[:, half:], v[:, half:]))
        ]
        merged, merged_lse = strobe.merge(*map(list, zip(*parts, strict=True)), sinks=sinks)
        check("out of parts", merged, inside[0], plain[0], 2)
        assert torch.allclose(merged_lse.double(), inside[1], atol=1e-3, rtol=1e-5), "lse of parts"
    return kernel


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.exit(run(__doc__, 200, one))
