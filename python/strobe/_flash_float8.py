"""FlashAttention-3's float8 attention without a cache where autograd, PyTorch's compiler or a mode
watches: the operator `torch.ops.strobe.float8_attention`, whose backward pass is refused.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import torch

from ._errors import InvalidArgument, Unsupported
from ._flash_attn import as_flag, as_integer, as_limit, as_number
from ._operators import define, new_results, refused_gradient
from ._options import ROWS
from ._values import pair
from .functional import attention

Tensor: TypeAlias = torch.Tensor

# What a call may have besides q, k and v, in the operator's order.
_SCALES: Final = ("q_scale", "k_scale", "v_scale")
_LENGTHS: Final = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
_ARRAYS: Final = (*_SCALES, *_LENGTHS, "sinks")
_PLAIN: Final = ("max_seqlen_q", "max_seqlen_k", "scale", "causal", "softcap", "attention_chunk")
_WINDOW: Final = ("window_left", "window_right")
_TYPES: Final = {row.name: row.kind.operator_type for row in ROWS}
_TYPES.update(dict.fromkeys(_WINDOW, _TYPES["window"]))
_EVERY: Final = (*_ARRAYS, *_PLAIN, *_WINDOW)
_CONVERTERS: Final = {"SymInt": as_integer, "float": as_number, "bool": as_flag}


def call(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], names: dict[str, str]) -> Any:
    """(out, lse), as results that autograd knows. options: of `strobe.attention`; names: what the
    caller calls them.
    """
    given: list[Any] = [options.get(name) for name in _ARRAYS]
    for name in _PLAIN:
        value, kind = options.get(name), _TYPES[name]
        optional = value is None and kind.endswith("?")
        convert = _CONVERTERS[kind.rstrip("?")]
        given.append(None if optional else convert(names.get(name, name), value))
    given += pair("window_size", options["window"], as_limit)
    return _operator(q, k, v, *given)


def _kernel(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    options = dict(zip(_EVERY, more, strict=True))
    options["window"] = tuple(options.pop(name) for name in _WINDOW)
    found: tuple[Tensor, Tensor] = attention(q, k, v, return_lse=True, **options)
    return found


def _fake(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    """(out, lse), not computed. The kernel checks the rest when it runs."""
    wanted = 4 if more[_ARRAYS.index("cu_seqlens_q")] is None else 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != wanted:
            raise InvalidArgument(f"{name}.ndim = {x.ndim}, expected {wanted}")
    return new_results(q, k, v)


def _no_gradient() -> Unsupported:
    return Unsupported(
        "the gradient of attention with q.dtype = torch.float8_e4m3fn: no kernel computes "
        "gradients from float8, expected torch.no_grad(), tensors that require none, or bfloat16"
    )


_operator: Final = define(
    "float8_attention",
    "(Tensor q, Tensor k, Tensor v, "
    + ", ".join(f"{_TYPES[name]} {name}" for name in _EVERY)
    + ") -> (Tensor, Tensor)",
    _kernel,
    _fake,
    *refused_gradient("float8_attention", _no_gradient),
)
