"""Attention under a mask that was read as blocks (`_masks`): each block is a call of its own.

Tensors are (batch, heads, seqlen, head_dim).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from . import _operators, functional
from ._masks import Block, Blocks

Tensor: TypeAlias = torch.Tensor

# Philox's multiplier for keys: blocks that share a batch index drop weights of their own.
_SEED_STEP: Final = 0x9E3779B97F4A7C15


class Task(NamedTuple):
    """What is computed, besides tensors."""

    blocks: Blocks
    rng_state: Tensor | None
    dropout_p: float
    scale: float | None

    def calls(self) -> Iterator[tuple[Block, dict[str, Any]]]:
        """Each block, with its options of strobe.attention and its derivative."""
        seed, offset = _operators.seed_and_offset(self.rng_state)
        for index, block in enumerate(self.blocks.blocks):
            yield (
                block,
                {
                    "causal": block.causal,
                    "window": block.window,
                    "scale": self.scale,
                    "dropout_p": self.dropout_p,
                    "dropout_seed": (seed + index * _SEED_STEP) % 2**64,
                    "dropout_offset": offset,
                },
            )


def heads_inner(x: Tensor, head_dim: int | None = None) -> Tensor:
    """Memory for x, (batch, heads, seqlen, head_dim), that lies as (batch, seqlen, heads, ...).
    head_dim: if another than that of x.
    """
    batch, heads, seqlen, own = x.shape
    width = own if head_dim is None else head_dim
    return x.new_empty((batch, seqlen, heads, width)).transpose(1, 2)


def heads_inner_copy(x: Tensor) -> Tensor:
    """A copy of x that lies so; of an lse too, which has no head_dim."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def rows(x: Tensor) -> Tensor:
    """(batch, heads, seqlen, head_dim) as (batch, seqlen, heads, head_dim), readable as it is."""
    return _operators.rows_contiguous(x.transpose(1, 2))


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    task: Task,
    out: Tensor | None = None,
    with_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """(out, lse). Without an out to write to, its heads are innermost but head_dim, as PyTorch's
    kernel for the CPU has them.
    """
    q, k, v = rows(query), rows(key), rows(value)
    batch, seqlen_q, heads, _ = q.shape
    shape = (batch, seqlen_q, heads, v.shape[3])
    out = q.new_empty(shape) if out is None else out.transpose(1, 2)
    if task.blocks.hides_queries:
        out.zero_()
    lse = q.new_empty((batch, heads, seqlen_q) if with_lse else (0,), dtype=torch.float32)
    if task.blocks.hides_queries and with_lse:
        lse.fill_(float("-inf"))
    for block, options in task.calls():
        found: Any = functional.attention(
            q[block.batch, block.queries],
            k[block.batch, block.keys],
            v[block.batch, block.keys],
            out=out[block.batch, block.queries],
            return_lse=with_lse,
            **options,
        )
        if with_lse:
            lse[block.batch, :, block.queries] = found[1]
    return out.transpose(1, 2), lse


def backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    task: Task,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, laid out as `forward` lays out its out if there are none to write to."""
    q, k, v, do, o = rows(query), rows(key), rows(value), rows(dout), rows(out)
    if grads is None:
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))  # not as their strides are
    else:
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
    hides_keys = task.blocks.hides_keys
    hides_queries = task.blocks.hides_queries or not task.blocks.blocks
    for x, hidden in ((dq, False), (dk, hides_keys), (dv, hides_keys)):
        if hidden or hides_queries:
            x.zero_()
    for block, options in task.calls():
        queries, keys = (block.batch, block.queries), (block.batch, block.keys)
        functional.attention_backward(
            do[queries],
            q[queries],
            k[keys],
            v[keys],
            o[queries],
            lse[block.batch, :, block.queries].contiguous(),
            grads=(dq[queries], dk[keys], dv[keys]),
            **options,
        )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class Masked(torch.autograd.Function):  # type: ignore[misc]
    """A call with a mask, of tensors with data."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, task: Task
    ) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        out, lse = forward(query, key, value, task)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.task = task
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
        """Of query, key and value."""
        query, key, value, out, lse = ctx.saved_tensors
        return (*backward(dout, query, key, value, out, lse, ctx.task), None)
