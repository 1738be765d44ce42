"""MoBA: each query attends to its own block of keys, causally, and to the few earlier blocks whose
mean key suits it best. Two ways of computing it without a kernel of its own, each with gradients:

    python examples/moba.py                                          small, and checked
    python examples/moba.py --device cuda --dtype bfloat16 --tokens 64k --block 1k --top 8

1. Every query chooses for itself. What a block of keys and the queries that chose it have to
   compute is a sequence of its own: queries are gathered block by block, all blocks go as packed
   sequences of one call, and `strobe.merge` joins what a query got from each of its blocks. The
   backward gives every part the merged lse, so that its weights are those of the whole softmax.
2. A block of queries shares its choice. That is a list of blocks, a mask as data: one call. The
   list is the choice's, which becomes the mask on the device that it is on.

Method: E. Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs", arXiv:2502.13189.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import strobe
import torch
from torch import Tensor

ROWS_AT_ONCE = 8192  # queries whose choice is made at once: it needs a number for each block
LONGEST_CHECKED = 4096  # the check stores all scores, in float64


# ------------------------------------------------------------------------------------- the choice


def means_of_blocks(x: Tensor, block: int) -> Tensor:
    """(tokens, heads, head_dim) to (blocks, heads, head_dim), float32; the last block may be short."""
    return torch.stack([part.float().mean(0) for part in x.split(block)])


def choose(q: Tensor, k: Tensor, block: int, top: int) -> Tensor:
    """The blocks before its own that each query sees: (top - 1, tokens, heads), best first, where
    the number of blocks stands for none, as early queries have fewer than that before them.
    """
    means = means_of_blocks(k, block)
    blocks, heads_kv = means.shape[:2]
    number = torch.arange(blocks, device=q.device)
    parts = []
    for first in range(0, len(q), ROWS_AT_ONCE):
        rows = q[first : first + ROWS_AT_ONCE].float().unflatten(1, (heads_kv, -1))
        gate = torch.einsum("thgd,bhd->thgb", rows, means).flatten(1, 2)
        own = torch.arange(first, first + len(rows), device=q.device) // block
        gate.masked_fill_((number >= own[:, None])[:, None], -torch.inf)
        best, index = gate.topk(min(top - 1, blocks), dim=-1)
        parts.append(index.masked_fill_(best == -torch.inf, blocks))
    return torch.cat(parts).permute(2, 0, 1)


def choose_together(q: Tensor, k: Tensor, block: int, top: int) -> Tensor:
    """The blocks of keys that each block of queries sees, which choose by their mean: (heads,
    blocks, top), its own last; none as in `choose`.
    """
    chosen = choose(means_of_blocks(q, block), means_of_blocks(k, block), 1, top)
    _, blocks, heads = chosen.shape
    own = torch.arange(blocks, device=q.device).expand(heads, 1, blocks)
    return torch.cat([chosen.permute(2, 0, 1), own], 1).transpose(1, 2).int()


# ------------------------------------------------------------- 1. every query chooses for itself


class Route(NamedTuple):
    """The choices of some heads as packed sequences, one for each (key head, block): its queries
    are the rows, of whichever query head of the group, that chose this block of this key head.
    Choices of no block stand behind the last sequence, where nothing is computed.
    """

    rows: Tensor  # (choices,): a packed row's row among the (tokens * heads) of q
    place: Tensor  # (choices,): where the packed row of a choice, in the order of `chosen`, is
    lengths: dict[str, Any]  # the sequences, in the library's words


def route(chosen: Tensor, heads_kv: int, tokens: int, block: int) -> Route:
    """chosen: (top - 1, tokens, heads)."""
    heads, device = chosen.shape[2], chosen.device
    blocks = -(-tokens // block)
    head = torch.arange(heads, device=device) // (heads // heads_kv)
    sequence = torch.where(chosen < blocks, chosen + head * blocks, heads_kv * blocks).flatten()
    order = torch.argsort(sequence, stable=True)
    counts = torch.bincount(sequence, minlength=heads_kv * blocks + 1)[:-1]
    starts_q = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    in_head = torch.arange(blocks, device=device) * block
    starts_k = (torch.arange(heads_kv, device=device)[:, None] * tokens + in_head).flatten()
    starts_k = torch.nn.functional.pad(starts_k, (0, 1), value=heads_kv * tokens)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=device)
    lengths = {
        "cu_seqlens_q": starts_q.int(),
        "cu_seqlens_k": starts_k.int(),
        "max_seqlen_q": int(counts.max()),
        "max_seqlen_k": min(block, tokens),
    }
    return Route(order % (tokens * heads), place, lengths)


def packed(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of (tokens, heads, dim), as packed sequences of one head."""
    return x.flatten(0, 1)[rows, None]


def end_to_end(x: Tensor) -> Tensor:
    """Keys (tokens, heads_kv, dim) as sequences of one head, head after head."""
    return x.transpose(0, 1).reshape(-1, 1, x.shape[2])


def some_heads(q: Tensor, k: Tensor, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Query heads and the key heads that they read, `at_once` key heads at a time."""
    heads_kv = k.shape[1]
    group = q.shape[1] // heads_kv
    for first in range(0, heads_kv, at_once):
        last = min(first + at_once, heads_kv)
        yield slice(first * group, last * group), slice(first, last)


class Moba(torch.autograd.Function):
    """(tokens, heads, head_dim) of q, (tokens, heads_kv, head_dim) of k and v, and the choice."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int, at_once: int
    ) -> Tensor:
        tokens, heads, parts = len(q), q.shape[1], len(chosen) + 1
        out = torch.empty_like(q)
        lse = torch.empty(heads, tokens, device=q.device)
        for some, some_kv in some_heads(q, k, at_once):
            queries, keys, values = q[:, some], k[:, some_kv], v[:, some_kv]
            way = route(chosen[..., some], keys.shape[1], tokens, block)
            # What each query gets from each of its blocks, in float32 and with its own lse.
            outs = torch.empty(parts, *queries.shape, device=q.device)
            lses = torch.empty(parts, queries.shape[1], tokens, device=q.device)
            _, lses[-1:] = strobe.attention(
                *(x[None] for x in (queries, keys, values)),
                causal=True,
                attention_chunk=block,
                out=outs[-1:],
                return_lse=True,
            )
            found, found_lse = strobe.attention(
                packed(queries, way.rows),
                end_to_end(keys),
                end_to_end(values),
                out=torch.empty(len(way.rows), 1, q.shape[2], device=q.device),
                return_lse=True,
                **way.lengths,
            )
            torch.index_select(found[:, 0], 0, way.place, out=outs[:-1].view(-1, q.shape[2]))
            lses[:-1] = found_lse[0, way.place].view(parts - 1, tokens, -1).transpose(1, 2)
            whole, lse[some] = strobe.merge(outs, lses)
            out[:, some] = whole
        ctx.save_for_backward(q, k, v, out, lse, chosen)
        ctx.block, ctx.at_once = block, at_once
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, chosen = ctx.saved_tensors
        tokens = len(q)
        dout = dout.contiguous()
        delta = (dout.float() * out).sum(-1).T.contiguous()
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for some, some_kv in some_heads(q, k, ctx.at_once):
            queries, keys, values = q[:, some], k[:, some_kv], v[:, some_kv]
            # The weights are exp(score - lse) with the lse of all blocks: what a part gives is its
            # share of the whole gradient, and shares are added up in float32.
            own = strobe.attention_backward(
                *(x[None] for x in (dout[:, some], queries, keys, values)),
                None,
                lse[None, some],
                delta=delta[None, some],
                causal=True,
                attention_chunk=ctx.block,
                grad_dtype="float32",
            )
            way = route(chosen[..., some], keys.shape[1], tokens, ctx.block)
            dqs, dks, dvs = strobe.attention_backward(
                packed(dout[:, some], way.rows),
                packed(queries, way.rows),
                end_to_end(keys),
                end_to_end(values),
                None,
                lse[some].T.flatten()[None, way.rows],
                delta=delta[some].T.flatten()[None, way.rows],
                grad_dtype="float32",
                **way.lengths,
            )
            # A query's shares stand where its packed rows are; those of keys, head after head.
            shares = dqs[way.place].view(len(chosen), *queries.shape).sum(0)
            dq[:, some] = own[0][0] + shares
            dk[:, some_kv] = own[1][0] + dks.view(-1, *keys.shape[::2]).transpose(0, 1)
            dv[:, some_kv] = own[2][0] + dvs.view(-1, *values.shape[::2]).transpose(0, 1)
        return dq, dk, dv, None, None, None


# --------------------------------------------------------------- 2. a block of queries shares its


def block_list(chosen: Tensor, tokens: int, block: int) -> strobe.masks.Mask:
    """The mask of such a choice, made where the choice is. Its own blocks are of 64, 128 or 256;
    MoBA's are as many of them, and the choice that is none leads behind the last one.
    """
    side = next(side for side in (256, 128, 64) if block % side == 0)
    parts = block // side
    part = torch.arange(parts, dtype=torch.int32, device=chosen.device)
    fine = (chosen[..., None] * parts + part).flatten(2).repeat_interleave(parts, 1)
    return strobe.masks.from_lists(fine[:, : -(-tokens // side)], tokens, block=side)


def attend_to_blocks(q: Tensor, k: Tensor, v: Tensor, mask: strobe.masks.Mask) -> Tensor:
    """The query's own block is in the list, and causal in it, as everywhere."""
    out = strobe.torch.attention(q[None], k[None], v[None], causal=True, mask=mask)
    return out[0]


# ------------------------------------------------------------------------ check, and measurement


def pairs_of_choice(chosen: Tensor, block: int) -> Tensor:
    """bool, (heads, tokens, tokens): what each query sees of the keys."""
    tokens, heads = chosen.shape[1:]
    blocks = -(-tokens // block)
    number = torch.arange(tokens) // block
    seen = torch.zeros(heads, tokens, blocks + 1, dtype=torch.bool)
    seen.scatter_(2, chosen.permute(2, 1, 0).cpu(), True)
    own = (number[:, None] == number) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return seen[..., :blocks].repeat_interleave(block, 2)[..., :tokens] | own


def pairs_of_list(chosen: Tensor, tokens: int, block: int) -> Tensor:
    """The same of a list of blocks, with the causal mask."""
    heads, blocks, _ = chosen.shape
    seen = torch.zeros(heads, blocks, blocks + 1, dtype=torch.bool)
    seen.scatter_(2, chosen.cpu().long(), True)
    fine = seen[..., :blocks].repeat_interleave(block, 1).repeat_interleave(block, 2)
    return fine[:, :tokens, :tokens].tril()


def dense(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Attention with this mask that computes every score."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def with_gradients(
    function: Callable[..., Tensor], tensors: list[Tensor], dout: Tensor
) -> list[Tensor]:
    """out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def show_check(name: str, got: list[Tensor], wanted: list[Tensor]) -> None:
    """Largest differences from dense attention in float64, relative to the largest value."""
    words = []
    for what, x, y in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        words.append(f"{what} {float((x.cpu().double() - y).abs().max() / y.abs().max()):.1e}")
    print(f"{name:<24} differs from dense by {', '.join(words)}")


class Cost(NamedTuple):
    """Of a run."""

    seconds: float  # the fastest of some, after one that is not measured
    bytes: int  # on a GPU: the most that was allocated beside what there was before; else 0

    def __str__(self) -> str:
        memory = f" {self.bytes / 2**20:9.1f} MiB" if torch.cuda.is_initialized() else ""
        return f"{self.seconds * 1e3:9.2f} ms{memory}"


def cost(run: Callable[[], object], device: str, repeat: int) -> Cost:
    """Runs it, and what is returned is let go of."""
    best, most = float("inf"), 0
    for n in range(repeat + 1):
        before = 0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
            most = max(most, torch.cuda.max_memory_allocated() - before)
        if n:
            best = min(best, time.perf_counter() - begin)
    return Cost(best, most)


def number(text: str) -> int:
    """4096, or 4k."""
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def arguments() -> argparse.Namespace:
    """Of the command line, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=number, default=1024, help="4k is 4096")
    parser.add_argument("--block", type=number, default=128, help="keys of a block")
    parser.add_argument("--top", type=int, default=3, help="blocks that a query sees, its own too")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--heads-kv", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=1, help="key heads whose parts are kept")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the fastest counts")
    args = parser.parse_args()
    for name in ("tokens", "heads", "heads_kv", "head_dim", "at_once", "repeat"):
        if getattr(args, name) < 1:
            parser.error(f"{name} = {getattr(args, name)}, expected at least 1")
    if args.top < 2:
        parser.error(f"top = {args.top}, expected at least 2: its own block, and one before it")
    if args.heads % args.heads_kv:
        parser.error(f"heads = {args.heads}, expected a multiple of heads_kv = {args.heads_kv}")
    if args.block < 64 or args.block % 64:
        parser.error(f"block = {args.block}, expected a multiple of 64")
    return args


def main() -> None:
    """Both ways on random tensors: the check, and times beside dense attention's."""
    args = arguments()
    tokens, block, device = args.tokens, args.block, args.device
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(tokens, heads, args.head_dim).to(device, getattr(torch, args.dtype))
        for heads in (args.heads, args.heads_kv, args.heads_kv, args.heads)
    )
    tensors = [q, k, v]
    print(
        f"{tokens} tokens, {args.heads} heads of {args.head_dim}, {args.heads_kv} of keys, "
        f"{args.dtype}; blocks of {block}, {args.top} a query"
    )
    chosen = choose(q, k, block, args.top)
    together = choose_together(q, k, block, args.top)
    mask = block_list(together, tokens, block)

    def by_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = Moba.apply(q, k, v, chosen, block, args.at_once)
        return out

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return strobe.torch.attention(q[None], k[None], v[None], causal=True)[0]

    # Shares of the pairs that causal attention computes.
    all_pairs = args.heads * tokens * (tokens + 1) / 2
    rows = torch.arange(tokens)
    own = args.heads * float((rows % block + 1).sum())
    chosen_pairs = float((chosen < -(-tokens // block)).sum()) * block
    whole = torch.ones(-(-tokens // block)) * block  # rows of each block
    whole[-1] -= len(whole) * block - tokens
    earlier = (together < len(whole)).sum(-1).cpu() - 1
    listed_pairs = float((earlier * whole).sum()) * block
    ways: dict[str, tuple[Callable[..., Tensor], float]] = {
        "dense, causal": (causal, 1.0),
        "each query's choice": (by_query, (own + chosen_pairs) / all_pairs),
        "a block's choice": (
            lambda q, k, v: attend_to_blocks(q, k, v, mask),
            (own + listed_pairs) / all_pairs,
        ),
    }

    if tokens <= LONGEST_CHECKED:
        exact = [x.cpu().double() for x in tensors]
        for name, keep in (
            ("each query's choice", pairs_of_choice(chosen, block)),
            ("a block's choice", pairs_of_list(together, tokens, block)),
        ):
            wanted = with_gradients(
                lambda q, k, v, keep=keep: dense(q, k, v, keep), exact, dout.cpu().double()
            )
            show_check(name, with_gradients(ways[name][0], tensors, dout), wanted)

    # Each time is also shown as a multiple of dense attention's, and that as a multiple of the share
    # of the pairs: 1 would be a pair at the cost that it has in dense attention.
    of_both = f"{'x dense':>8} {'x share':>8}"
    beside = f"{'memory':>14}" if device == "cuda" else ""  # at most, beside the tensors
    print(
        f"\n{'':<24}  pairs {'forward':>12}{beside} {of_both} {'and backward':>15}{beside} {of_both}"
    )
    of_dense: list[float] = []
    for name, (function, share) in ways.items():
        costs = [
            cost(lambda f=function: f(*tensors), device, args.repeat),
            cost(lambda f=function: with_gradients(f, tensors, dout), device, args.repeat),
        ]
        of_dense = of_dense or [each.seconds for each in costs]
        ratio, ratio_both = (x.seconds / y for x, y in zip(costs, of_dense, strict=True))
        print(
            f"{name:<24} {share:6.1%} {costs[0]} {ratio:8.2f} {ratio / share:8.2f} "
            f"   {costs[1]} {ratio_both:8.2f} {ratio_both / share:8.2f}"
        )
    took = cost(lambda: choose(q, k, block, args.top), device, args.repeat)
    print(f"{'the choice itself':<24} {'':6} {took}")
    if device == "cuda":
        took = cost(lambda: block_list(together, tokens, block), device, args.repeat)
        print(f"{'a mask of blocks':<24} {'':6} {took}")
    parts = args.top * tokens * (args.head_dim + 1) * 4
    at_once = min(args.at_once, args.heads_kv) * (args.heads // args.heads_kv)
    print(f"parts kept at once: {parts * at_once / 2**20:.1f} MiB, of {at_once} heads")


if __name__ == "__main__":
    main()
