"""Attention under a mask that was read as blocks (`_masks`): each block is a call of its own.

Tensors are (batch, heads, seqlen, head_dim).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from . import _autograd, _core, _operators, functional
from ._calls import ALL_HIDDEN, GRADIENT_OF_SDPA, SDPA
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
                    "mask": self.blocks.mask,
                },
            )


def result_like(query: Tensor, head_dim_v: int) -> Tensor:
    """Memory for the result, laid out as PyTorch's has it: as query, or contiguous where PyTorch's
    flash kernels do not take the call, for whose code a `view` of the result may be right.
    """
    out = torch.empty_like(query)
    if out.shape[3] != head_dim_v or out.stride(3) != 1:
        out = query.new_empty((*query.shape[:3], head_dim_v))
    return out


def gradient_like(x: Tensor) -> Tensor:
    """Memory for the gradient of query, key or value, laid out as PyTorch's flash kernel for x's
    device has it: on the CPU as (batch, seqlen, heads, ...), else as x.
    """
    if x.device.type != "cpu":
        return result_like(x, x.shape[3])
    batch, heads, seqlen, head_dim = x.shape
    return x.new_empty((batch, seqlen, heads, head_dim)).transpose(1, 2)


def laid_out(x: Tensor, memory: Tensor) -> Tensor:
    """x, copied to `memory` unless it lies so."""
    return x if x.stride() == memory.stride() else memory.copy_(x)


def rows(x: Tensor) -> Tensor:
    """(batch, heads, seqlen, head_dim) as (batch, seqlen, heads, head_dim), readable as it is."""
    return _operators.rows_contiguous(x.transpose(1, 2))


def _part(x: Tensor, batch: slice, seqlen: slice) -> Tensor:
    """Of (batch, seqlen, ...): x itself if it is all of it, as a view takes microseconds."""
    shape = x.shape
    whole = batch.stop - batch.start == shape[0] and seqlen.stop - seqlen.start == shape[1]
    return x if whole else x[batch, seqlen]


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    task: Task,
    out: Tensor | None = None,
    with_lse: bool = True,
) -> tuple[Tensor, Any]:
    """(out, lse), or (out, None)."""
    q, k, v = rows(query), rows(key), rows(value)
    batch, seqlen_q, heads, _ = q.shape
    if out is None:
        out = result_like(query, v.shape[3])
    o = out.transpose(1, 2)
    if task.blocks.hides_queries:
        o.zero_()
    lse: Any = None
    for block, options in task.calls():
        queries = _part(q, block.batch, block.queries)
        found: Any = functional.attention(
            queries,
            _part(k, block.batch, block.keys),
            _part(v, block.batch, block.keys),
            out=_part(o, block.batch, block.queries),
            return_lse=with_lse,
            **options,
        )
        if not with_lse:
            continue
        if queries is q:
            lse = found[1]
            continue
        if lse is None:
            lse = q.new_full((batch, heads, seqlen_q), float("-inf"), dtype=torch.float32)
        lse[block.batch, :, block.queries] = found[1]
    if lse is None and with_lse:
        lse = q.new_full((batch, heads, seqlen_q), float("-inf"), dtype=torch.float32)
    _came_by(SDPA, task)
    return out, lse  # no views, which autograd lets nobody write to


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
    """Gradients of query, key and value."""
    q, k, v, do, o = rows(query), rows(key), rows(value), rows(dout), rows(out)
    if grads is None:
        grads = (gradient_like(query), gradient_like(key), gradient_like(value))
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    hides_keys = task.blocks.hides_keys
    hides_queries = task.blocks.hides_queries or not task.blocks.blocks
    for x, hidden in ((dq, False), (dk, hides_keys), (dv, hides_keys)):
        if hidden or hides_queries:
            x.zero_()
    for block, options in task.calls():
        queries, keys = (block.batch, block.queries), (block.batch, block.keys)
        rows_of_lse = _part(lse.transpose(1, 2), *queries).transpose(1, 2).contiguous()
        functional.attention_backward(
            _part(do, *queries),
            _part(q, *queries),
            _part(k, *keys),
            _part(v, *keys),
            _part(o, *queries),
            rows_of_lse,
            grads=(_part(dq, *queries), _part(dk, *keys), _part(dv, *keys)),
            **options,
        )
    _came_by(GRADIENT_OF_SDPA, task)
    return grads


def _came_by(function: str, task: Task) -> None:
    """Names what has been computed, for `strobe.why()`."""
    if task.blocks.blocks:
        _core.came_by(function)
    else:
        _core.say(ALL_HIDDEN)


class Masked(torch.autograd.Function):  # type: ignore[misc]
    """A call as blocks, of tensors with data."""

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
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
        """Of query, key and value."""
        _autograd.refuse_batched(dout)
        compute: Any = _MaskedBackward.apply if torch.is_grad_enabled() else backward
        return (*compute(dout, *ctx.saved_tensors, ctx.task), None)


class _MaskedBackward(torch.autograd.Function):  # type: ignore[misc]
    """The derivative of `Masked` with create_graph=True, which says that it has none itself."""

    @staticmethod
    def forward(ctx: Any, dout: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        query, key, value, out, lse, task = saved
        return backward(dout, query, key, value, out, lse, task)

    backward = staticmethod(_operators.refuse_double_backward)
