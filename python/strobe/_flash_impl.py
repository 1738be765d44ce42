"""Strobe as a flash attention implementation of PyTorch's registry (2.11 and newer)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from . import _blocks, _calls, _operators, _sdpa, functional
from ._calls import Verdict
from ._errors import Unsupported

Tensor: TypeAlias = torch.Tensor


def register() -> None:
    """Makes Strobe known to PyTorch (2.11 and newer) as a flash attention implementation.

    Nothing changes before the user's `torch.nn.attention.activate_flash_attention_impl("strobe")`.
    From then on, where PyTorch chooses its flash kernel for scaled_dot_product_attention, on the
    CPU and on CUDA devices, Strobe computes; what Strobe declines goes to the kernel that was
    there, see `strobe.why()`. `torch.nn.attention.restore_flash_attention_impl()` undoes it.

    Raises:
        Unsupported: PyTorch is older; `sdpa_kernel` works there too.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise Unsupported(
            f"PyTorch {torch.__version__} has no register_flash_attention_impl (2.11 does): use "
            "the context manager strobe.torch.sdpa_kernel()"
        ) from None
    register_flash_attention_impl("strobe", register_fn=_activate)


@dataclass
class _Activation:
    """What PyTorch keeps while Strobe is active."""

    library: Any

    def remove(self) -> None:
        """Gives the operators back to the kernels that were there."""
        self.library = None  # its finaliser does it


def _activate() -> _Activation:
    library = torch.library.Library("aten", "IMPL")
    overrides: list[tuple[str, str, Callable[..., Any]]] = [
        ("_scaled_dot_product_flash_attention_for_cpu", "CPU", _cpu_forward),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "CPU", _cpu_backward),
    ]
    if torch.cuda.is_available():
        overrides += [
            ("_scaled_dot_product_flash_attention", "CUDA", _cuda_forward),
            ("_scaled_dot_product_flash_attention_backward", "CUDA", _cuda_backward),
        ]
    for name, key, kernel in overrides:
        before = torch.library.get_kernel(f"aten::{name}", key)
        with warnings.catch_warnings():
            # "Overriding a previously registered kernel": that is what was asked for.
            warnings.simplefilter("ignore", UserWarning)
            library.impl(name, partial(kernel, before), key, with_keyset=True)
    return _Activation(library)


def _declines(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, dropout_p: float, is_causal: bool
) -> bool:
    """What `judge` says, for a kernel. The same in forward and backward."""
    if attn_mask is not None:
        verdict = Verdict(kind="attn_mask comes to PyTorch's flash kernel as a tensor")
    elif is_causal and query.shape[2] < key.shape[2]:
        verdict = Verdict(
            kind="is_causal with fewer queries than keys",
            detail=f"seqlen_q = {query.shape[2]}, expected at least seqlen_k = {key.shape[2]}",
        )
    else:
        verdict, _ = _sdpa.judge(query, key, value, None, dropout_p, is_causal, None, True)
    _calls.record(verdict, counted=False)  # a block has counted what came by it
    return bool(verdict.kind)


def _options(
    query: Tensor,
    key: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    rng_state: Tensor | None,
) -> dict[str, Any]:
    """Options of strobe.attention and its derivative."""
    causal, window = _sdpa.top_left(is_causal, query.shape[2], key.shape[2])
    seed, offset = _operators.seed_and_offset(rng_state)
    return {
        "causal": causal,
        "window": window,
        "scale": scale,
        "dropout_p": dropout_p,
        "dropout_seed": seed,
        "dropout_offset": offset,
    }


def _forward(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    # In query's layout, as PyTorch's kernels and their meta functions have it.
    out = torch.empty_like(query)
    if out.stride(-1) != 1 or out.shape != (*query.shape[:3], value.shape[3]):
        out = query.new_empty((*query.shape[:3], value.shape[3]))
    _, lse = functional.attention(
        _blocks.rows(query),
        _blocks.rows(key),
        _blocks.rows(value),
        out=out.transpose(1, 2),
        return_lse=True,
        **options,
    )
    return out, lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    functional.attention_backward(
        _blocks.rows(grad_out),
        _blocks.rows(query),
        _blocks.rows(key),
        _blocks.rows(value),
        _blocks.rows(out),
        logsumexp.contiguous(),
        grads=(grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)),
        **options,
    )
    return grads


def _cpu_forward(
    before: Any,
    keyset: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_flash_attention_for_cpu; PyTorch calls it without dropout only."""
    if dropout_p > 0 or _declines(query, key, value, attn_mask, dropout_p, is_causal):
        return before.call_boxed(
            keyset, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
    out, lse = _forward(query, key, value, _options(query, key, 0.0, is_causal, scale, None))
    # The layout that PyTorch's compiler expects of this operator: heads innermost.
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(
    before: Any,
    keyset: Any,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward."""
    if dropout_p > 0 or _declines(query, key, value, attn_mask, dropout_p, is_causal):
        return before.call_boxed(
            keyset,
            grad_out,
            query,
            key,
            value,
            out,
            logsumexp,
            dropout_p,
            is_causal,
            attn_mask=attn_mask,
            scale=scale,
        )
    batch_seqlen_heads = (0, 2, 1, 3)
    grad_query, grad_key, grad_value = (
        torch.empty_permuted(x.shape, batch_seqlen_heads, dtype=x.dtype)
        for x in (query, key, value)
    )
    options = _options(query, key, 0.0, is_causal, scale, None)
    grads = (grad_query, grad_key, grad_value)
    return _backward(grad_out, query, key, value, out, logsumexp, grads, options)


def _cuda_forward(
    before: Any,
    keyset: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_flash_attention."""
    if return_debug_mask or _declines(query, key, value, None, dropout_p, is_causal):
        return before.call_boxed(
            keyset, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
        )
    if dropout_p > 0:
        rng_state = _operators.draw_dropout_state(device=query.device)
    else:
        rng_state = torch.zeros(2, dtype=torch.int64)
    options = _options(query, key, dropout_p, is_causal, scale, rng_state)
    out, lse = _forward(query, key, value, options)
    return (
        out,
        lse,
        None,
        None,
        query.shape[2],
        key.shape[2],
        rng_state.view(torch.uint64),
        torch.zeros((), dtype=torch.uint64),
        query.new_empty(0),
    )


def _cuda_backward(
    before: Any,
    keyset: Any,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_flash_attention_backward."""
    if _declines(query, key, value, None, dropout_p, is_causal):
        return before.call_boxed(
            keyset,
            grad_out,
            query,
            key,
            value,
            out,
            logsumexp,
            cum_seq_q,
            cum_seq_k,
            max_q,
            max_k,
            dropout_p,
            is_causal,
            philox_seed,
            philox_offset,
            scale=scale,
        )
    rng_state = philox_seed.view(torch.int64) if dropout_p > 0 else None
    options = _options(query, key, dropout_p, is_causal, scale, rng_state)
    grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    return _backward(grad_out, query, key, value, out, logsumexp, grads, options)
