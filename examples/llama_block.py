"""A Llama-style transformer block, forward, in float32 on the CPU: RMSNorm, rotary embedding,
grouped-query attention by strobe.flash_attn, SwiGLU. examples/llama_block.cpp is the same block
without PyTorch, with the same weights; both print the same numbers.

    python examples/llama_block.py

Architecture: H. Touvron et al., "LLaMA", arXiv:2302.13971; grouped queries: J. Ainslie et al.,
"GQA", arXiv:2305.13245.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from strobe.flash_attn import flash_attn_func
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

BATCH, SEQLEN = 2, 256
HEADS, HEADS_KV, HEAD_DIM = 8, 2, 32  # four query heads share a key and value head
DIM, DIM_KV = HEADS * HEAD_DIM, HEADS_KV * HEAD_DIM
HIDDEN = 704  # of the feed-forward layer
NORM_EPSILON = 1e-5
ROTARY_BASE = 10000.0


def uniform(seed: int, *shape: int) -> Tensor:
    """Float32 in [-1, 1), the same as in C++: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    index = np.arange(1, math.prod(shape) + 1, dtype=np.uint64)
    z = np.uint64(seed << 32) + index * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    values = (z >> np.uint64(40)) * 2.0**-23 - 1  # 24 bits: exact
    return torch.from_numpy(values.astype(np.float32)).reshape(shape)


def linear_weight(seed: int, rows: int, cols: int) -> nn.Parameter:
    """(in, out). Keeps the variance of what goes through it."""
    return nn.Parameter(uniform(seed, rows, cols) * math.sqrt(3 / rows))


def rotate(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Turns elements j and j + head_dim / 2 of every head by an angle proportional to the position,
    so that q.k depends on the distance only (J. Su et al., "RoFormer", arXiv:2104.09864).

    Args:
        x: (batch, seqlen, heads, head_dim).
        positions: (seqlen,), of the rows; None: 0, 1, 2, ...
    """
    half = x.shape[-1] // 2
    frequency = ROTARY_BASE ** (-torch.arange(half, device=x.device) / half)
    if positions is None:
        positions = torch.arange(x.shape[1], device=x.device)
    angle = torch.outer(positions, frequency)[:, None, :]  # (seqlen, 1, half)
    cosine, sine = angle.cos(), angle.sin()
    a, b = x.split(half, dim=-1)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), dim=-1)


class Block(nn.Module):
    """One layer of a Llama-style transformer."""

    def __init__(self) -> None:
        """With the weights of the C++ example."""
        super().__init__()
        self.attention_norm = nn.Parameter(1 + 0.1 * uniform(1, DIM))
        self.query = linear_weight(2, DIM, DIM)
        self.key = linear_weight(3, DIM, DIM_KV)
        self.value = linear_weight(4, DIM, DIM_KV)
        self.output = linear_weight(5, DIM, DIM)
        self.feed_forward_norm = nn.Parameter(1 + 0.1 * uniform(6, DIM))
        self.gate = linear_weight(7, DIM, HIDDEN)
        self.up = linear_weight(8, DIM, HIDDEN)
        self.down = linear_weight(9, HIDDEN, DIM)

    def attention(self, x: Tensor) -> Tensor:
        """(batch, seqlen, dim) to the same."""
        q = (x @ self.query).unflatten(-1, (HEADS, HEAD_DIM))
        k = (x @ self.key).unflatten(-1, (HEADS_KV, HEAD_DIM))
        v = (x @ self.value).unflatten(-1, (HEADS_KV, HEAD_DIM))
        # Nothing is transposed, and no key is repeated.
        out = flash_attn_func(rotate(q), rotate(k), v, causal=True)
        return out.flatten(-2) @ self.output

    def feed_forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, dim) to the same."""
        return (silu(x @ self.gate) * (x @ self.up)) @ self.down

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, dim) to the same."""
        x = x + self.attention(rms_norm(x, (DIM,), self.attention_norm, NORM_EPSILON))
        return x + self.feed_forward(rms_norm(x, (DIM,), self.feed_forward_norm, NORM_EPSILON))


def show(name: str, *values: float) -> None:
    """A line as the C++ example prints it."""
    print(f"{name:<12}" + "".join(f" {value:10.6f}" for value in values))


@torch.no_grad()
def main() -> None:
    """Runs the block on made-up activations and prints a summary of what comes out."""
    x = uniform(10, BATCH, SEQLEN, DIM) * math.sqrt(3)
    y = Block()(x)
    print(f"{BATCH} sequences of {SEQLEN} tokens, attention by strobe.flash_attn")
    show("first token", *y[0, 0, :4].tolist())
    show("last token", *y[-1, -1, -4:].tolist())
    flat = y.double().flatten()
    show("rms", flat.square().mean().sqrt().item())
    # Every value counts, and each differently.
    show("checksum", (flat @ uniform(11, flat.numel()).double()).item() / math.sqrt(flat.numel()))


if __name__ == "__main__":
    main()
