"""What the functions of `flash_attn` share: which way a call takes, its checks, its messages."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, Final, TypeAlias

import torch
from torch.autograd import forward_ad

from . import _core, _operators
from ._arrays import cannot_be_read, introduce_torch
from ._errors import Error, InvalidArgument, Unsupported, renamed
from ._tensors import check_dense, check_readable, first_line
from ._values import flag, integer, pair, real

Tensor: TypeAlias = torch.Tensor

# What a function of `flash_attn` returns: out, or (out, softmax_lse, S_dmask).
Result: TypeAlias = Any

_is_tracing: Final = torch.compiler.is_dynamo_compiling


# -------------------------------------------------------------------------------- without dispatch

# Whether operators are traced before dispatch, on a stack of modes of its own (export).
_PRE_DISPATCH: Final = getattr(torch._C.DispatchKey, "PreDispatch", None)


def pre_dispatch() -> bool:
    """Whether operators are traced before dispatch, on a stack of modes of its own (export)."""
    return _PRE_DISPATCH is not None and torch._C._dispatch_tls_is_dispatch_key_included(
        _PRE_DISPATCH
    )


def _watchers() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Functions that say whether somebody must see each operator, and of such a somebody who is
    never without a mode for functions, (whether there is one of these, the answer).

    These are dispatch modes (fake tensors, FLOP counters, export), functorch transforms (vmap,
    grad), torch.jit.trace; and tracing before dispatch. PyTorch has public names for none of these
    questions, or slow ones. Where a name is missing, calls go by its dispatcher: right, and slower.
    """
    often = (
        torch._C._len_torch_dispatch_stack,
        torch._C._are_functorch_transforms_active,
        torch._C._is_tracing,
    )
    seldom = (torch._C._len_torch_function_stack, pre_dispatch)
    for function in (*often, *seldom):
        function()
    return often, seldom


introduce_torch()
with suppress(AttributeError, TypeError, KeyError):  # a PyTorch that renamed one of them
    _core.set_watchers(*_watchers(), forward_ad.__dict__, "_current_level")


def _is_plain(q: Any, k: Any, v: Any) -> bool:
    """Whether these are tensors as they come and nobody but autograd watches."""
    return (
        all(type(x) is torch.Tensor for x in (q, k, v))
        and (q.is_cpu or q.is_cuda)
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and _core.unwatched()
    )


# ------------------------------------------------------------------------------------------- checks

# What `strobe.attention` calls arguments, and what flash_attn calls them.
_NAMES: Final = {"scale": "softmax_scale", "window": "window_size"}
_PACKED_NAMES: Final = _NAMES | {
    "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens",
    "max_seqlen_q": "max_seqlen",
    "max_seqlen_k": "max_seqlen",
}


def _by_name(error: Error, packed: str) -> Error:
    """`error` with the names that the caller knows. packed: see `call`."""
    text = renamed(str(error), _PACKED_NAMES if packed == "qkv" else _NAMES)
    name = re.split(r"\W", text, maxsplit=1)[0]
    if (packed and name in ("k", "v")) or (packed == "qkv" and name == "q"):
        text = f"{packed}, as {text}"
    return type(error)(text)


def _refused(error: Exception, named: dict[str, Any]) -> Error | None:
    """For what PyTorch's dispatcher says where a class of tensors takes no part in an operator."""
    for name, x in named.items():
        if isinstance(x, torch.Tensor) and type(x) not in (torch.Tensor, torch.nn.Parameter):
            return Unsupported(
                f"{name} is a {type(x).__name__:.60}, which does not take this: {first_line(error)}"
            )
    return None


def check_tensor(name: str, x: Any, axes: tuple[str, ...]) -> None:
    """Refuses what is no tensor with these axes. An axis named by a number has that length."""
    if not isinstance(x, torch.Tensor):
        raise InvalidArgument(f"{name} is of type {type(x).__name__:.60}, expected a torch.Tensor")
    check_dense(name, x)
    if x.ndim != len(axes):
        raise InvalidArgument(f"{name}.ndim = {x.ndim}, expected {len(axes)}: ({', '.join(axes)})")
    for axis, wanted in enumerate(axes):
        if wanted.isdecimal() and x.shape[axis] != int(wanted):
            raise InvalidArgument(
                f"{name}.shape[{axis}] = {x.shape[axis]}, expected {wanted}: ({', '.join(axes)})"
            )


def unbound(name: str, x: Tensor, axis: int) -> tuple[Tensor, ...]:
    """The tensors that `x` was packed from."""
    try:
        parts: tuple[Tensor, ...] = x.unbind(axis)
    except Exception as error:  # freed, or of a class without operators
        if _is_tracing():
            raise
        check_readable(name, x)
        raise cannot_be_read(name, x, error) from None
    return parts


def check_dropout(dropout_p: Any, softcap: Any) -> None:
    if not 0 <= dropout_p < 1:
        raise InvalidArgument(f"dropout_p = {dropout_p!r}, expected a number in [0, 1)")
    if softcap > 0:
        raise InvalidArgument(
            f"softcap = {softcap!r} with dropout_p = {dropout_p!r}, expected one of them to be 0"
        )


def as_window(window_size: Any) -> tuple[Any, Any]:
    left, right = pair("window_size", window_size)
    return as_integer("window_size[0]", left), as_integer("window_size[1]", right)


def as_integer(name: str, value: Any) -> Any:
    """`value` as an int (or, while compiling, a SymInt). Tensors of one element are common: they
    come from seqlens.max().
    """
    if (type(value) is int and abs(value) < 2**63) or isinstance(value, torch.SymInt):
        return value
    if isinstance(value, torch.Tensor):
        check_dense(name, value)
        if value.numel() != 1 or value.is_floating_point():
            raise InvalidArgument(
                f"{name} is a tensor of shape {tuple(value.shape)} and {value.dtype}, "
                "expected an integer"
            )
        try:
            value = value.item()
        except Exception as error:
            raise InvalidArgument(f"{name} cannot be read: {first_line(error)}") from None
    return integer(name, value)


def as_number(name: str, value: Any) -> Any:
    """`value` as a float: plans are kept by it, and a tensor, a learned scale say, may change."""
    if type(value) is float or isinstance(value, torch.SymFloat):
        return value
    return real(name, value)


def as_flag(name: str, value: Any) -> Any:
    """`value` as a bool (or, while compiling, a SymBool)."""
    if type(value) is bool or isinstance(value, torch.SymBool):
        return value
    return flag(name, value)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As autocast treats scaled_dot_product_attention: in its lower precision, but for float64."""
    device = q.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return cast(q), cast(k), cast(v)


def _refuse_tangents(*tensors: Tensor) -> None:
    """PyTorch itself would drop them without a word."""
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise Unsupported(
            "forward-mode differentiation of attention is not supported: use backward-mode, or "
            "plain tensor operations"
        )


# ------------------------------------------------------------------------------------- the one call


def call(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Any,
    deterministic: bool,
    return_attn_probs: bool,
    packed: str = "",
    more: tuple[Any, ...] = (),
) -> Result:
    """What all functions of `flash_attn` do. cu_seqlens_q None: dense.

    packed: the argument that q, k and v ("qkv") or k and v ("kv") were taken from, for messages.
    more: the tail of the operator's arguments, `_options.ROWS`.
    """
    tracing = _is_tracing()
    no_dropout = type(dropout_p) in (float, int) and dropout_p == 0
    if not tracing and no_dropout and return_attn_probs is False and not more:
        try:
            found = _core.flash(
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_k,
                max_seqlen_q,
                max_seqlen_k,
                softmax_scale,
                causal,
                window_size,
                softcap,
                alibi_slopes,
                deterministic,
            )
            if type(found) is tuple:  # autograd watches
                found = _operators.Attention.apply(q, k, v, found, False)
            if found is not None:
                return found
        except InvalidArgument:
            pass  # below, a contiguous copy may help, and if not, the message is given
    if cu_seqlens_q is not None:
        names = _PACKED_NAMES if packed == "qkv" else {}
        max_seqlen_q = as_integer(names.get("max_seqlen_q", "max_seqlen_q"), max_seqlen_q)
        max_seqlen_k = as_integer(names.get("max_seqlen_k", "max_seqlen_k"), max_seqlen_k)
    if softmax_scale is not None:
        softmax_scale = as_number("softmax_scale", softmax_scale)
    if type(softcap) is not float:
        softcap = as_number("softcap", softcap)
    if type(dropout_p) is not float:
        dropout_p = as_number("dropout_p", dropout_p)
    if type(return_attn_probs) is not bool:
        return_attn_probs = as_flag("return_attn_probs", return_attn_probs)
    if alibi_slopes is not None and not isinstance(alibi_slopes, torch.Tensor):
        raise InvalidArgument(
            f"alibi_slopes is of type {type(alibi_slopes).__name__:.60}, expected a torch.Tensor"
        )
    plain = not tracing and _is_plain(q, k, v)
    if alibi_slopes is not None:
        check_dense("alibi_slopes", alibi_slopes)
    if packed != "qkv":
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if x is not None:
                check_tensor(name, x, ("batch + 1",))
    rows = ("batch", "seqlen") if cu_seqlens_q is None else ("total",)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, (*rows, "heads", "head_dim"))
    if not tracing and forward_ad._current_level >= 0:
        _refuse_tangents(q, k, v)
    q, k, v = _autocast(q, k, v)
    window_left, window_right = as_window(window_size)
    causal = as_flag("causal", causal)
    deterministic = as_flag("deterministic", deterministic)
    rng_state = None
    if dropout_p != 0:
        check_dropout(dropout_p, softcap)
        rng_state = _operators.dropout_state(device=q.device)
    options = (
        cu_seqlens_q,
        cu_seqlens_k,
        alibi_slopes,
        rng_state,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_left,
        window_right,
        softcap,
        deterministic,
        *more,
    )
    if tracing:
        out, lse = _operators.attention_forward(q, k, v, *options)
    else:
        try:
            out, lse = _operators.differentiable(plain, q, k, v, options)
        except Error as error:
            raise _by_name(error, packed) from None
        except (AssertionError, NotImplementedError, TypeError) as error:
            named = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes}
            refused = _refused(error, named)
            if refused is None:
                raise
            raise _by_name(refused, packed) from None
    if not return_attn_probs:
        return out
    if rng_state is None:
        return out, lse, q.new_empty(0)  # as flash_attn, which keeps S_dmask for tests of dropout
    weights = _operators.attention_dropout_weights(q.detach(), k.detach(), *options)
    return out, lse, weights
