"""PyTorch's own scaled_dot_product_attention, computed by Strobe.

    import strobe.torch
    with strobe.torch.sdpa_kernel():                     # this thread, this block
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    strobe.torch.register()                              # or for the whole process, PyTorch 2.11
    torch.nn.attention.activate_flash_attention_impl("strobe")

Calls that Strobe does not take go to PyTorch's own kernels; `strobe.why()` then says why the latest
of the thread did, and `strobe.torch.why` says it of any call.

Tensors here are laid out as scaled_dot_product_attention has them: (batch, heads, seqlen,
head_dim), of any strides. `strobe.flash_attn` has the functions in FlashAttention's layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, Final, TypeAlias

import torch
from torch.nn.attention import bias
from torch.overrides import TorchFunctionMode

from . import _arrays, _operators, _questions, functional
from ._errors import Error, Unsupported
from .flash_attn import flash_attn_func

__all__ = ["ServedCalls", "register", "sdpa_kernel", "why"]

Tensor: TypeAlias = torch.Tensor

_sdpa: Final = torch.nn.functional.scaled_dot_product_attention
_multi_head: Final = torch.nn.functional.multi_head_attention_forward  # of nn.MultiheadAttention


# ---------------------------------------------------------------------------------------------- why


@lru_cache(maxsize=4096)
def _planned(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    v_shape: tuple[int, ...],
    dtype: str,
    device: str,
    causal: bool,
    window: tuple[int, int],
    dropout_p: float,
) -> str:
    """Why no kernel takes this problem, forward or backward; "" when kernels do."""
    q, k, v = (_arrays.ArraySpec(shape, dtype, device) for shape in (q_shape, k_shape, v_shape))
    try:
        for direction in (False, True):
            _questions.plan(
                q, k, v, causal=causal, window=window, dropout_p=dropout_p, backward=direction
            )
    except Error as error:
        return str(error)
    return ""


def _top_left(is_causal: bool, seqlen_q: int, seqlen_k: int) -> tuple[bool, tuple[int, int]]:
    """(causal, window) that align the mask top left, as scaled_dot_product_attention's is_causal;
    Strobe's causal is aligned bottom right. Holds for seqlen_q >= seqlen_k.
    """
    if is_causal and seqlen_q > seqlen_k:
        return False, (-1, seqlen_q - seqlen_k)
    return is_causal, (-1, -1)


def _is_bottom_right(attn_mask: Any) -> bool:
    """Whether this is torch.nn.attention.bias.causal_lower_right(...): Strobe's causal."""
    return isinstance(attn_mask, bias.CausalBias) and (
        attn_mask.variant == bias.CausalVariant.LOWER_RIGHT
        or attn_mask.seq_len_q == attn_mask.seq_len_kv
    )


def why(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """Why Strobe leaves this call of scaled_dot_product_attention to PyTorch; "" when it takes it.

    Args:
        query: (batch, heads, seqlen_q, head_dim).
        key: (batch, heads_kv, seqlen_k, head_dim).
        value: (batch, heads_kv, seqlen_k, head_dim_v).
        attn_mask: None, or torch.nn.attention.bias.causal_lower_right(seqlen_q, seqlen_k).
        dropout_p, is_causal, scale, enable_gqa: as scaled_dot_product_attention has them.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            return f"{name}.ndim = {x.ndim}, expected 4: (batch, heads, seqlen, head_dim)"
    if attn_mask is not None and (is_causal or not _is_bottom_right(attn_mask)):
        return (
            f"attn_mask is a {type(attn_mask).__name__} of shape {tuple(attn_mask.shape)}, "
            "expected None or causal_lower_right(...): Strobe has causal and window masks and "
            "lengths (flash_attn_varlen_func), no arbitrary ones"
        )
    if key.shape[1] != query.shape[1] and not enable_gqa:
        return (
            f"key.shape[1] = {key.shape[1]}, expected {query.shape[1]} (heads of query) "
            "without enable_gqa"
        )
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            return f"{name}.dtype = {x.dtype}, expected {query.dtype} (that of query)"
        if x.device != query.device:
            return f"{name}.device = {x.device}, expected {query.device} (that of query)"
    if torch.compiler.is_dynamo_compiling():
        return _traced(query, dropout_p)
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    causal, window = _top_left(is_causal, seqlen_q, min(seqlen_q, seqlen_k))
    shapes = ((x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (query, key, value))
    dtype, device = str(query.dtype).removeprefix("torch."), str(query.device)
    return _planned(*shapes, dtype, device, causal, window, dropout_p)


def _traced(query: Tensor, dropout_p: float) -> str:
    """What the plan would say, as far as it is known of tensors without shapes or data."""
    on_cuda = query.device.type == "cuda"
    half = (torch.float16, torch.bfloat16)
    if query.dtype not in (half if on_cuda else (*half, torch.float32)):
        return f"query.dtype = {query.dtype}, on {query.device.type}"
    if on_cuda and dropout_p > 0:
        return "dropout_p > 0 on a CUDA device"
    return ""


# ---------------------------------------------------------------------------------- context manager


@dataclass
class ServedCalls:
    """What became of the calls inside `sdpa_kernel`: `calls` were computed by Strobe, `fallbacks`
    has the reasons of the others and how often each was given.
    """

    calls: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


def _serve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention of a call that `why` has nothing against."""
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    if is_causal and seqlen_q < seqlen_k:  # aligned top left, nobody sees what comes after
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
        seqlen_k = seqlen_q
    causal, window = _top_left(is_causal, seqlen_q, seqlen_k)
    out: Tensor = flash_attn_func(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        dropout_p,
        scale,
        causal or attn_mask is not None,
        window,
    )
    return out.transpose(1, 2)


class sdpa_kernel(TorchFunctionMode):  # type: ignore[misc] # noqa: N801 - as PyTorch's own
    """Context manager: scaled_dot_product_attention in this block and thread is Strobe's.

        with strobe.torch.sdpa_kernel() as served:
            model(x)
        print(served.calls, served.fallbacks)

    Under torch.compile, enter it around the compiled call or, with a PyTorch that can compile such
    blocks (2.4 cannot), inside; compiled calls are not counted. Gradients work after the block has
    ended, as they are recorded in it.
    """

    def __init__(self) -> None:
        """Without arguments: what is served and what is not depends on each call."""
        super().__init__()
        self.served = ServedCalls()

    def __enter__(self) -> ServedCalls:
        super().__enter__()
        return self.served

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called for each function of PyTorch in the block, and for none that those call."""
        kwargs = kwargs or {}
        if function is _sdpa:
            return self._attention(*args, **kwargs)
        if function is _multi_head:
            return self._within(_multi_head)(*args, **kwargs)
        return function(*args, **kwargs)

    def _attention(self, *args: Any, **kwargs: Any) -> Tensor:
        """scaled_dot_product_attention, by whom it may be."""
        reason = why(*args, **kwargs)
        if not torch.compiler.is_dynamo_compiling():
            if reason:
                self.served.fallbacks[reason] = self.served.fallbacks.get(reason, 0) + 1
                _remember(reason)
            else:
                self.served.calls += 1
        out: Tensor = _sdpa(*args, **kwargs) if reason else _serve(*args, **kwargs)
        return out

    def _within(self, function: Any) -> Callable[..., Any]:
        """A Python function of torch.nn.functional that sees this scaled_dot_product_attention."""
        names = {**function.__globals__, "scaled_dot_product_attention": self._attention}
        copy = FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, function.__closure__
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy


def _remember(reason: str) -> None:
    functional.latest_fallback.text = (
        f"scaled_dot_product_attention: PyTorch's own kernel ran, as Strobe declined: {reason}"
    )


# -------------------------------------------------------------------- PyTorch's registry (2.11, on)


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
    """`why`, for a kernel: remembered for strobe.why(). The same in forward and backward."""
    if is_causal and query.shape[2] < key.shape[2]:
        reason = (
            f"is_causal with seqlen_q = {query.shape[2]}, expected at least seqlen_k = "
            f"{key.shape[2]}"
        )
    else:
        reason = why(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=True)
    if reason:
        _remember(reason)
    return bool(reason)


def _options(
    query: Tensor,
    key: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    rng_state: Tensor | None,
) -> dict[str, Any]:
    """Options of strobe.attention and its derivative."""
    causal, window = _top_left(is_causal, query.shape[2], key.shape[2])
    seed, offset = _operators.seed_and_offset(rng_state)
    return {
        "causal": causal,
        "window": window,
        "scale": scale,
        "dropout_p": dropout_p,
        "dropout_seed": seed,
        "dropout_offset": offset,
    }


def _rows(x: Tensor) -> Tensor:
    """(batch, heads, seqlen, head_dim) as (batch, seqlen, heads, head_dim), readable as it is."""
    return _operators.rows_contiguous(x.transpose(1, 2))


def _forward(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    # In query's layout, as PyTorch's kernels and their meta functions have it.
    out = torch.empty_like(query)
    if out.stride(-1) != 1 or out.shape != (*query.shape[:3], value.shape[3]):
        out = query.new_empty((*query.shape[:3], value.shape[3]))
    _, lse = functional.attention(
        _rows(query), _rows(key), _rows(value), out=out.transpose(1, 2), return_lse=True, **options
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
        _rows(grad_out),
        _rows(query),
        _rows(key),
        _rows(value),
        _rows(out),
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
