"""The functions of `strobe.flash_attn` under their official name, and what is beneath them: the
autograd functions, the functions without autograd, and PyTorch's operators `flash_attn::*`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from strobe import _s_dmask
from strobe._s_dmask import block_size_n as _get_block_size_n  # noqa: F401 - imported from here
from strobe._s_dmask import round_multiple
from strobe.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

from . import _absent
from . import _flash_attn_gpu as flash_attn_gpu
from ._autograd import (
    FlashAttnFunc,
    FlashAttnKVPackedFunc,
    FlashAttnQKVPackedFunc,
    FlashAttnVarlenFunc,
    FlashAttnVarlenKVPackedFunc,
    FlashAttnVarlenQKVPackedFunc,
)

__all__ = [
    "FlashAttnFunc",
    "FlashAttnKVPackedFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "FlashAttnVarlenKVPackedFunc",
    "FlashAttnVarlenQKVPackedFunc",
    "flash_attn_func",
    "flash_attn_gpu",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
    "round_multiple",
]

Tensor: TypeAlias = torch.Tensor

# Whether AMD's kernels take the place of NVIDIA's.
USE_TRITON_ROCM: Final = False


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """x, copied if its last dimension is not contiguous.

    Example:
        >>> import torch
        >>> from flash_attn.flash_attn_interface import maybe_contiguous
        >>> maybe_contiguous(torch.ones(2, 3).t()).stride()
        (2, 1)
    """
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


# --------------------------------------------------------------------------------- without autograd


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
    out, lse, weights, rng_state = flash_attn_gpu.fwd(
        q,
        k,
        v,
        None,
        alibi_slopes,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        return_softmax,
        None,
    )
    return out, lse, weights, rng_state


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
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`flash_attn_varlen_func` without autograd. Returns what `_flash_attn_forward` does.

    zero_tensors changes nothing: all of out and softmax_lse is written. Nor does num_splits: the
    kernels find themselves how to divide the keys.
    """
    out, lse, weights, rng_state = flash_attn_gpu.varlen_fwd(
        q,
        k,
        v,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        leftpad_k,
        block_table,
        alibi_slopes,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        zero_tensors,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        return_softmax,
        None,
        num_splits,
    )
    return out, lse, weights, rng_state


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
) -> Tensor:
    """The derivative of `_flash_attn_forward`, into dq, dk and dv, those that are not None.

    Returns:
        softmax_d, float32 (batch, heads, seqlen_q rounded up to a multiple of 128): each row's sum
        of dout * out, times 1 - dropout_p.
    """
    return flash_attn_gpu.bwd(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        alibi_slopes,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        deterministic,
        None,
        rng_state,
    )[3]


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
) -> Tensor:
    """The derivative of `_flash_attn_varlen_forward`, into dq, dk and dv.

    Returns:
        softmax_d, (heads, total_q + 128 * batch): see `flash_attn_gpu.varlen_bwd`.
    """
    return flash_attn_gpu.varlen_bwd(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        zero_tensors,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        deterministic,
        None,
        rng_state,
    )[3]


# ------------------------------------------------------------------------------------ flash_attn::*
# The same four as operators of PyTorch, which a compiler takes as they are and selective
# checkpointing knows by name.

_TYPES: Final = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "bool": "bool",
    "float": "float",
    "int": "SymInt",
}


def _operator(function: Callable[..., Any], fake: Callable[..., Any], results: str) -> Any:
    """`function` as the operator of its name. fake: makes results of its shapes and dtypes."""
    parameters, written = [], []
    for p in inspect.signature(function).parameters.values():
        kind = _TYPES[p.annotation]
        if p.name in ("dq", "dk", "dv"):
            kind = f"Tensor({p.name}!)?"
            written.append(p.name)
        default = "" if p.default is p.empty else f"={p.default}"
        parameters.append(f"{kind} {p.name}{default}")
    name = function.__name__
    made = torch.library.custom_op(
        f"flash_attn::{name}",
        function,
        mutates_args=written,
        schema=f"({', '.join(parameters)}) -> {results}",
    )
    made.register_fake(fake)
    return getattr(torch.ops.flash_attn, name)


def _fake_results(
    q: Tensor, v: Tensor, lse: tuple[int, ...], weights: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(lse, dtype=torch.float32),
        q.new_empty(weights),
        torch.empty(2, dtype=torch.int64, device="cpu"),
    )


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, *options: Any) -> Any:
    weights = _s_dmask.shape(q, k, None, None, None) if options[-1] and dropout_p > 0 else (0,)
    return _fake_results(q, v, (q.shape[0], q.shape[2], q.shape[1]), weights)


def _fake_varlen_forward(
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
    *others: Any,
) -> Any:
    weights: tuple[int, ...] = (0,)
    if return_softmax and dropout_p > 0:
        weights = _s_dmask.shape(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    return _fake_results(q, v, (q.shape[1], q.shape[0]), weights)


def _fake_backward(dout: Tensor, q: Tensor, *others: Any, **more: Any) -> Tensor:
    batch, seqlen_q, heads, _ = q.shape
    return q.new_empty((batch, heads, round_multiple(seqlen_q, 128)), dtype=torch.float32)


def _fake_varlen_backward(
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
    *others: Any,
    **more: Any,
) -> Tensor:
    rows = q.shape[0] + 128 * (cu_seqlens_q.shape[0] - 1)
    return q.new_empty((q.shape[1], rows), dtype=torch.float32)


_FOUR: Final = "(Tensor, Tensor, Tensor, Tensor)"
_wrapped_flash_attn_forward = _operator(_flash_attn_forward, _fake_forward, _FOUR)
_wrapped_flash_attn_varlen_forward = _operator(
    _flash_attn_varlen_forward, _fake_varlen_forward, _FOUR
)
_wrapped_flash_attn_backward = _operator(_flash_attn_backward, _fake_backward, "Tensor")
_wrapped_flash_attn_varlen_backward = _operator(
    _flash_attn_varlen_backward, _fake_varlen_backward, "Tensor"
)

if not TYPE_CHECKING:
    _operators = [
        name for name in globals() if name.startswith(("_flash_attn", "_wrapped", "_get"))
    ]
    __getattr__ = _absent.attribute(__name__, (*__all__, *_operators))
