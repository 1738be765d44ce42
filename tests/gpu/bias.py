"""Additive bias on the GPU, through Python, against float64: out, lse and all gradients, that of bias in every shape; with
sinks too.

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

from device import DEV, HALVES  # first: ends the script where there is no GPU

# isort: split
import strobe
import torch
from seeds import Tensor, check, run


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


def one(seed: int) -> str:
    """A problem, forward and backward, twice. Returns the kernel of its backward."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    dtype = r.choice(HALVES)
    heads_kv, group, dim = r.choice((1, 2)), r.choice((1, 2, 4)), r.choice((32, 64, 80, 96, 112, 128))
    n_q, n_k = r.choice(((1, 300), (7, 500), (64, 64), (130, 130), (129, 300), (300, 450)))
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

    given = [x.detach().requires_grad_() for x in (q, k, v, bias, *([] if sinks is None else [sinks]))]

    def ours() -> tuple[Tensor, Tensor, tuple[Tensor, ...], str]:
        more: dict[str, Any] = {"bias": given[3], "sinks": given[4] if has_sinks else None}
        out, lse = strobe.torch.attention(*given[:3], causal=causal, deterministic=True, return_lse=True, **more)
        found = torch.autograd.grad([out, lse], given, [dout, dlse])
        return out, lse, found, strobe.why().splitlines()[0]

    dlse = torch.randn(batch, heads, n_q, device=DEV) * has_dlse
    out, lse, found, kernel = ours()
    assert all(torch.equal(a, b) for a, b in zip(found, ours()[2], strict=True)), "bits do not repeat"

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
        check(name, got, wanted, other, 8 if name == "dsinks" else 3)
    return kernel


if __name__ == "__main__":
    sys.exit(run(__doc__, 300, one))
