"""The functions of `strobe.flash_attn` under their official name, and the four beneath them that
know no autograd, which ring attention and context parallelism call.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

import strobe
from strobe import _operators
from strobe.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Tensor: TypeAlias = torch.Tensor


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`flash_attn_func` without autograd.

    Returns:
        (out, softmax_lse, S_dmask, rng_state). rng_state: int64 (2,), in the CPU's memory, seed and
        offset of dropout.
    """
    return _forward(
        q,
        k,
        v,
        (None, None, None, None),
        (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap),
        alibi_slopes,
        return_softmax,
    )


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`flash_attn_varlen_func` without autograd. Returns what `_flash_attn_forward` does.

    zero_tensors changes nothing: all of out and softmax_lse is written.
    """
    for name, x in (
        ("block_table", block_table),
        ("leftpad_k", leftpad_k),
        ("seqused_k", seqused_k),
    ):
        if x is not None:
            raise strobe.Unsupported(f"{name}: key-value caches are not supported yet")
    return _forward(
        q,
        k,
        v,
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap),
        alibi_slopes,
        return_softmax,
    )


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> None:
    """The derivative of `_flash_attn_forward`, into dq, dk and dv, those that are not None."""
    _backward(
        (dout, q, k, v, out, softmax_lse),
        (dq, dk, dv),
        (None, None, None, None),
        (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap),
        alibi_slopes,
        deterministic,
        rng_state,
    )


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> None:
    """The derivative of `_flash_attn_varlen_forward`, into dq, dk and dv."""
    _backward(
        (dout, q, k, v, out, softmax_lse),
        (dq, dk, dv),
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap),
        alibi_slopes,
        deterministic,
        rng_state,
    )


def _options(
    lengths: tuple[Any, Any, Any, Any],
    options: tuple[Any, ...],
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None,
    deterministic: bool,
) -> tuple[Any, ...]:
    """What follows the tensors in the operators' schemas."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    state = rng_state if options[0] > 0 else None
    tensors = (cu_seqlens_q, cu_seqlens_k, alibi_slopes, state)
    return (*tensors, max_seqlen_q, max_seqlen_k, *options, deterministic)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Any, Any, Any, Any],
    options: tuple[Any, ...],
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dropout_p = options[0]
    if dropout_p > 0:
        rng_state = _operators.dropout_state(device=q.device)
    else:
        rng_state = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        arguments = _options(lengths, options, alibi_slopes, rng_state, False)
        out, lse = _operators.attention_forward(q, k, v, *arguments)
        if return_softmax and dropout_p > 0:
            weights = _operators.attention_probabilities(q, k, lse, *arguments)
        else:
            weights = q.new_empty(0)
    return out, lse, weights, rng_state


def _backward(
    tensors: tuple[Tensor, ...],
    results: tuple[Tensor | None, ...],
    lengths: tuple[Any, Any, Any, Any],
    options: tuple[Any, ...],
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None,
) -> None:
    arguments = _options(lengths, options, alibi_slopes, rng_state, deterministic)
    with torch.no_grad():
        dout, *rest = tensors
        gradients = _operators.attention_backward(dout, None, *rest, *arguments)
        for result, gradient in zip(results, gradients, strict=True):
            if result is not None:
                result.copy_(gradient)
