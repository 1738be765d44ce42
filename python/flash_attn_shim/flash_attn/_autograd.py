"""The autograd functions beneath `flash_attn_func` and its kin, by position.

`flash_attn_func` itself has a shorter way; these are for code that says `FlashAttnFunc.apply`, or
calls forward and backward in an autograd function of its own. softmax_lse is differentiable.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from strobe import _flash_cache, _operators
from strobe._flash_attn import as_flag, as_limit
from strobe._values import constant, pair

from . import _flash_attn_gpu as gpu

Tensor: TypeAlias = torch.Tensor


def _check_constant(alibi_slopes: Any, is_grad_enabled: Any) -> None:
    """Within an autograd function no gradients are recorded, whatever it is outside."""
    with torch.set_grad_enabled(as_flag("is_grad_enabled", is_grad_enabled)):
        constant("alibi_slopes", alibi_slopes)


def _forward(
    ctx: Any,
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[Any, Any, Any, Any] | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_softmax: bool,
    is_grad_enabled: bool,
) -> Any:
    """What each forward does. lengths: cu_seqlens and max_seqlen of q and k; None: dense.
    is_grad_enabled: outside of the autograd function, in which it never is.
    """
    _check_constant(alibi_slopes, is_grad_enabled)
    window = pair("window_size", window_size, as_limit)
    options = gpu.checked_options(dropout_p, softmax_scale, causal, *window, softcap)
    lengths = gpu.DENSE if lengths is None else gpu.checked_lengths(*lengths)
    return_softmax = as_flag("return_softmax", return_softmax)
    deterministic = as_flag("deterministic", deterministic)
    found = gpu.forward(*tensors, None, lengths, options, alibi_slopes, return_softmax, None)
    out, lse, weights, rng_state = found
    state = rng_state if options[0] > 0 else None
    ctx.save_for_backward(*tensors, out, lse, *lengths[:2], alibi_slopes, state)
    ctx.options = (*lengths[2:], *options, deterministic)
    ctx.set_materialize_grads(False)
    if not return_softmax:
        return out
    ctx.mark_non_differentiable(weights)
    return out, lse, weights


def _backward(ctx: Any, dout: Tensor | None, others: tuple[Tensor | None, ...]) -> Any:
    """dq, dk and dv, or three times None."""
    dlse = others[0] if others else None
    if ctx.options is None:
        raise _flash_cache.no_gradient()
    if dout is None and dlse is None:
        return None, None, None
    return _operators.attention_backward(dout, dlse, *ctx.saved_tensors, *ctx.options)


def _stacked(gradients: tuple[Tensor | None, ...]) -> Tensor | None:
    """Of packed tensors, whose next to last but one axis counts them."""
    if any(x is None for x in gradients):
        return None
    return torch.stack(gradients, -3)


class FlashAttnFunc(torch.autograd.Function):  # type: ignore[misc]
    """Of q, k and v, (batch, seqlen, heads, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool = True,
    ) -> Any:
        """out, or (out, softmax_lse, S_dmask) with return_softmax."""
        return _forward(
            ctx,
            (q, k, v),
            None,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_softmax,
            is_grad_enabled,
        )

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *args: Any) -> Any:
        """A gradient for each argument of forward."""
        return (*_backward(ctx, dout, args), *[None] * 9)


class FlashAttnQKVPackedFunc(torch.autograd.Function):  # type: ignore[misc]
    """Of qkv, (batch, seqlen, 3, heads, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool = True,
    ) -> Any:
        """out, or (out, softmax_lse, S_dmask) with return_softmax."""
        return _forward(
            ctx,
            qkv.detach().unbind(-3),
            None,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_softmax,
            is_grad_enabled,
        )

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *args: Any) -> Any:
        """A gradient for each argument of forward."""
        return (_stacked(_backward(ctx, dout, args)), *[None] * 9)


class FlashAttnKVPackedFunc(torch.autograd.Function):  # type: ignore[misc]
    """Of q, (batch, seqlen_q, heads, head_dim); kv, (batch, seqlen_k, 2, heads_kv, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool = True,
    ) -> Any:
        """out, or (out, softmax_lse, S_dmask) with return_softmax."""
        return _forward(
            ctx,
            (q, *kv.detach().unbind(-3)),
            None,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_softmax,
            is_grad_enabled,
        )

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *args: Any) -> Any:
        """A gradient for each argument of forward."""
        dq, dk, dv = _backward(ctx, dout, args)
        return (dq, _stacked((dk, dv)), *[None] * 9)


class FlashAttnVarlenFunc(torch.autograd.Function):  # type: ignore[misc]
    """Of q, k and v, (total, heads, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        block_table: Tensor | None = None,
        is_grad_enabled: bool = True,
    ) -> Any:
        """out, or (out, softmax_lse, S_dmask) with return_softmax."""
        if block_table is not None:
            _check_constant(alibi_slopes, is_grad_enabled)
            window = pair("window_size", window_size, as_limit)
            given: tuple[Any, ...] = (q, k, v, None, cu_seqlens_q, cu_seqlens_k, None, None)
            given += (block_table, alibi_slopes, max_seqlen_q, max_seqlen_k, dropout_p)
            given += (softmax_scale, False, causal, *window, softcap, return_softmax)
            out, lse, weights, _ = gpu.varlen_fwd(*given)
            ctx.options = None
            if not as_flag("return_softmax", return_softmax):
                return out
            ctx.mark_non_differentiable(weights)
            return out, lse, weights
        return _forward(
            ctx,
            (q, k, v),
            (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_softmax,
            is_grad_enabled,
        )

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *args: Any) -> Any:
        """A gradient for each argument of forward."""
        return (*_backward(ctx, dout, args), *[None] * 14)


class FlashAttnVarlenQKVPackedFunc(torch.autograd.Function):  # type: ignore[misc]
    """Of qkv, (total, 3, heads, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool = True,
    ) -> Any:
        """out, or (out, softmax_lse, S_dmask) with return_softmax."""
        return _forward(
            ctx,
            qkv.detach().unbind(-3),
            (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen),
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_softmax,
            is_grad_enabled,
        )

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *args: Any) -> Any:
        """A gradient for each argument of forward."""
        return (_stacked(_backward(ctx, dout, args)), *[None] * 11)


class FlashAttnVarlenKVPackedFunc(torch.autograd.Function):  # type: ignore[misc]
    """Of q, (total_q, heads, head_dim), and kv, (total_k, 2, heads_kv, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        return_softmax: bool,
        is_grad_enabled: bool = True,
    ) -> Any:
        """out, or (out, softmax_lse, S_dmask) with return_softmax."""
        return _forward(
            ctx,
            (q, *kv.detach().unbind(-3)),
            (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_softmax,
            is_grad_enabled,
        )

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *args: Any) -> Any:
        """A gradient for each argument of forward."""
        dq, dk, dv = _backward(ctx, dout, args)
        return (dq, _stacked((dk, dv)), *[None] * 13)
