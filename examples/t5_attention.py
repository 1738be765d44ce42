"""T5's self-attention, whose relative position bias is learned, around `strobe.torch.attention`.

    python examples/t5_attention.py

T5 adds to each score a number of its head and of the bucket in which the distance of query and key
lies. The bias is a tensor that is passed to attention, and its gradient goes back to the table of
these numbers. The layer is trained beside transformers' T5Attention, from the same weights on the
same data; both print the same losses, and end with the same table.

Architecture: C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer", arXiv:1910.10683.
"""

from __future__ import annotations

import argparse
import math

import strobe
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

DIM, HEADS, HEAD_DIM = 64, 4, 16
BUCKETS, MOST_DISTANCE = 32, 128


def bucket(distance: Tensor, causal: bool) -> Tensor:
    """The bucket of each distance (a key's position minus the query's). Half of the buckets are for
    one distance each, and the others for ranges that grow to MOST_DISTANCE; what is farther is in
    the last one. Without `causal` keys behind the query have buckets of their own, as many as those
    before it.
    """
    buckets = BUCKETS if causal else BUCKETS // 2
    exact = buckets // 2
    far = (-distance).clamp(min=0) if causal else distance.abs()
    growth = (far.clamp(min=exact) / exact).log() / math.log(MOST_DISTANCE / exact)
    ranges = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    found = torch.where(far < exact, far, ranges)
    return found if causal else found + buckets * (distance > 0)


class T5SelfAttention(nn.Module):
    """With the parameters of transformers' T5Attention, and their names."""

    def __init__(self, causal: bool) -> None:
        """causal: as T5's decoder has it; else its encoder."""
        super().__init__()
        self.causal = causal
        for name in "qkv":
            self.add_module(name, nn.Linear(DIM, HEADS * HEAD_DIM, bias=False))
        self.o = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.relative_attention_bias = nn.Embedding(BUCKETS, HEADS)

    def bias(self, seqlen: int) -> Tensor:
        """(1, heads, seqlen, seqlen): one for the batch. Its gradient comes in this shape, summed
        over the batch, and the table's is the sum over all pairs of a bucket.
        """
        position = torch.arange(seqlen)
        values = self.relative_attention_bias(bucket(position - position[:, None], self.causal))
        return values.permute(2, 0, 1)[None]

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, dim) to the same."""
        q, k, v = (f(x).unflatten(-1, (HEADS, HEAD_DIM)) for f in (self.q, self.k, self.v))
        # T5 does not divide scores by the root of head_dim: its weights begin that much smaller.
        out = strobe.torch.attention(
            q, k, v, scale=1.0, bias=self.bias(x.shape[1]), causal=self.causal
        )
        return self.o(out.flatten(-2))


class TransformersLayer(nn.Module):
    """transformers' own layer, eager: bias and scores of all pairs are stored."""

    def __init__(self, causal: bool) -> None:
        """causal: as above."""
        super().__init__()
        from transformers import T5Config
        from transformers.models.t5.modeling_t5 import T5Attention

        config = T5Config(
            d_model=DIM,
            d_kv=HEAD_DIM,
            num_heads=HEADS,
            relative_attention_num_buckets=BUCKETS,
            relative_attention_max_distance=MOST_DISTANCE,
            dropout_rate=0.0,
            is_decoder=causal,
        )
        self.causal = causal
        self.layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seqlen, dim) to the same."""
        mask = None
        if self.causal:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(x.dtype).min)[None, None]
        out: Tensor = self.layer(x, mask=mask)[0]
        return out


def train(layer: nn.Module, table: Tensor, args: argparse.Namespace) -> dict[str, list[Tensor]]:
    """The first output, the losses, and after each step the gradient of the table and the table.

    What is to be learned is a matter of distance: a token's output is the sum of the tokens 1 and 7
    places before it.
    """
    random = torch.Generator().manual_seed(1)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.01)
    found: dict[str, list[Tensor]] = {"out": [], "loss": [], "gradient": [], "table": []}
    for _ in range(args.steps):
        x = torch.randn(args.batch, args.seqlen, DIM, generator=random)
        wanted = sum(
            nn.functional.pad(x, (0, 0, back, 0))[:, : args.seqlen] for back in (1, 7)
        )
        out = layer(x)
        loss = mse_loss(out, wanted)
        optimiser.zero_grad()
        loss.backward()
        found["gradient"].append(table.grad.clone())
        optimiser.step()
        found["out"] = found["out"] or [out.detach()]
        found["loss"].append(loss.detach())
        found["table"].append(table.detach().clone())
    return found


def main() -> None:
    """Trains both layers, and prints losses and how far they are apart."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    for causal in (False, True):
        torch.manual_seed(0)
        ours = T5SelfAttention(causal)
        theirs = TransformersLayer(causal)
        theirs.layer.load_state_dict(ours.state_dict())
        results = train(ours, ours.relative_attention_bias.weight, args)
        table = theirs.layer.relative_attention_bias.weight
        wanted = train(theirs, table, args)
        first, last = (float(results["loss"][step]) for step in (0, -1))
        print(f"{'decoder' if causal else 'encoder'}: loss {first:.4f}, after {args.steps} steps {last:.4f}")
        for name, values in results.items():
            apart = max(
                float((x - y).abs().max() / y.abs().max())
                for x, y in zip(values, wanted[name], strict=True)
            )
            print(f"  {name:<8} differs from transformers' by {apart:.1e} at most")


if __name__ == "__main__":
    main()
