"""PyTorch's own scaled_dot_product_attention, computed by Strobe, and attention with a gradient.

    import strobe.torch
    with strobe.torch.sdpa_kernel():                     # this thread, this block
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    # Or for the whole process, with PyTorch 2.11 and newer: flash attention on GPUs, whoever calls
    # it (scaled_dot_product_attention, varlen_attn, nested tensors), and on the CPU.
    torch.nn.attention.activate_flash_attention_impl("STROBE")

Calls that Strobe does not take go to PyTorch's own kernels. `strobe.why()` says of the thread's
latest call that Strobe saw which kernel served it or why it was declined, or that none was seen;
`strobe.torch.why` says why any call would be declined.

Tensors here are laid out as scaled_dot_product_attention has them: (batch, heads, seqlen,
head_dim), of any strides. `attention` alone has the layout of `strobe.attention` and of
FlashAttention, whose functions are in `strobe.flash_attn`; it takes packed sequences, prefixes,
chunks and lengths in use. `flex_attention` is PyTorch's function of that name for masks.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import FunctionType
from typing import Any, Final, TypeAlias

import torch
from torch.backends.cuda import flash_sdp_enabled
from torch.overrides import TorchFunctionMode

from . import _calls, _checkpoints, _sdpa, _sdpa_compiled
from ._calls import ServedCalls, Verdict
from ._compiler import only_within
from ._differentiable import attention
from ._flash_impl import register
from ._flex import flex_attention

__all__ = ["ServedCalls", "attention", "flex_attention", "register", "sdpa_kernel", "why"]

Tensor: TypeAlias = torch.Tensor

_multi_head: Final = torch.nn.functional.multi_head_attention_forward  # of nn.MultiheadAttention
_MASK_OF_MULTI_HEAD: Final = list(signature(_multi_head).parameters).index("attn_mask")


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
        attn_mask: None, torch.nn.attention.bias.causal_lower_right(seqlen_q, seqlen_k), or a tensor
            that broadcasts to (batch, heads, seqlen_q, seqlen_k): bool, or floats that are added to
            the scores. Its contents are read.
        dropout_p, is_causal, scale, enable_gqa: as scaled_dot_product_attention has them.

    Example:
        >>> import torch, strobe
        >>> q, k, v = torch.randn(3, 2, 8, 300, 64)
        >>> strobe.torch.why(q, k, v, is_causal=True)
        ''
    """
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    verdict, _ = _sdpa.judge_any(*arguments)
    return verdict.reason


class sdpa_kernel(TorchFunctionMode):  # type: ignore[misc] # noqa: N801 - as PyTorch's own
    """Context manager: scaled_dot_product_attention in this block and thread is Strobe's.

        with strobe.torch.sdpa_kernel() as served:
            model(x)
        print(served.calls, served.fallbacks)

    Under torch.compile, enter it around the compiled call or, with a PyTorch that can compile such
    blocks (2.4 cannot), inside; calls of a block that is compiled itself are not counted. Gradients
    work after the block has ended, as they are recorded in it.

    Example:
        >>> import torch, strobe
        >>> q, k, v = torch.randn(3, 2, 8, 300, 64)
        >>> with strobe.torch.sdpa_kernel() as served:
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> served.calls, served.fallbacks
        (1, {})
    """

    def __init__(self) -> None:
        """Without arguments: what is served and what is not depends on each call."""
        super().__init__()
        self.served = ServedCalls()
        self._may_be_switched_off = False
        self._again = False

    def __enter__(self) -> ServedCalls:
        super().__enter__()
        if not torch.compiler.is_dynamo_compiling():  # which can ask neither
            self._may_be_switched_off = flash_sdp_enabled()
            _calls.enter(self.served, again=self._again)
        return self.served

    def __exit__(self, *error: Any) -> None:
        """Ends the block."""
        if not torch.compiler.is_dynamo_compiling():
            _calls.leave(self.served)
        super().__exit__(*error)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called for each function of PyTorch in the block, and for none that those call."""
        kwargs = kwargs or {}
        if function is _sdpa.sdpa:
            if (
                not torch.compiler.is_dynamo_compiling()
                and self._may_be_switched_off
                and not flash_sdp_enabled()
            ):
                return _left_to_pytorch(_SWITCHED_OFF, *args, **kwargs)
            return _attention(*args, **kwargs)
        if function is _multi_head:
            alike = _has_heads_alike(args, kwargs)
            if torch.compiler.is_dynamo_compiling():
                compiled = _multi_head_alike_compiled if alike else _multi_head_compiled
                return compiled(*args, **kwargs)
            return _within(_multi_head, _attention_alike if alike else _attention)(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            if function is _checkpoints.OPERATOR:
                return function(_checkpoints.traced(self, args[0]), *args[1:], **kwargs)
            if function is torch.Tensor.unflatten:
                return torch.unflatten(*args, **kwargs)  # else the compiler stumbles over super()
        return function(*args, **kwargs)


# Where a compiled function goes on uncompiled, each function of PyTorch's would cost a compilation
# of it, up to the compiler's limit.
only_within(sdpa_kernel.__torch_function__)


def _resume(served: ServedCalls) -> sdpa_kernel:
    """A block that takes up where another was, for activation checkpointing."""
    block = sdpa_kernel()
    block.served, block._again = served, True
    return block


_checkpoints.follow(_resume)

_SWITCHED_OFF: Final = (
    "PyTorch's flash attention was switched off inside the block (torch.nn.attention.sdpa_kernel)"
)


def _left_to_pytorch(kind: str, *args: Any, **kwargs: Any) -> Any:
    if _sdpa_compiled.is_traced():
        _sdpa_compiled.declined(kind)
    else:
        _calls.record(Verdict(kind=kind))
    return _sdpa.sdpa(*args, **kwargs)


def _attend(args: tuple[Any, ...], kwargs: dict[str, Any], given: tuple[Any, ...]) -> Any:
    """scaled_dot_product_attention, by whom it may be. given: for PyTorch, in place of args, the
    same in other words.
    """
    if _sdpa_compiled.is_traced():
        out = _sdpa_compiled.traced(*args, **kwargs)
        return _sdpa.sdpa(*given, **kwargs) if out is None else out
    verdict, blocks = _sdpa.judge_any(*args, **kwargs)
    if not verdict.kind:
        try:
            out = _sdpa.serve(blocks, *args, **kwargs)
        except _sdpa.REFUSALS as error:
            verdict = Verdict(kind="Strobe refused it", detail=str(error))
        else:
            _calls.record(verdict)
            return out
    _calls.record(verdict)
    return _sdpa.sdpa(*given, **kwargs)


def _attention(*args: Any, **kwargs: Any) -> Any:
    return _attend(args, kwargs, args)


# ------------------------------------------------------------------------- nn.MultiheadAttention


def _has_heads_alike(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `_multi_head` has one mask for all heads. It joins key_padding_mask, which
    has no heads, with attn_mask, and copies the two for each head, so that this is known here alone
    without a look at what they hold.
    """
    mask = kwargs.get("attn_mask")
    if len(args) > _MASK_OF_MULTI_HEAD:
        mask = args[_MASK_OF_MULTI_HEAD]
    return mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)


def _attention_alike(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any
) -> Any:
    """`_attention` whose mask, (batch, heads, seqlen_q, seqlen_k), is alike in all heads."""
    one = attn_mask[:, :1] if attn_mask is not None and attn_mask.ndim == 4 else attn_mask
    return _attend((query, key, value, one, *rest), {}, (query, key, value, attn_mask, *rest))


def _within(function: Any, attention: Any, **others: Any) -> Callable[..., Any]:
    """A Python function of torch.nn.functional that sees this scaled_dot_product_attention, and
    other names of its module.
    """
    names = {**function.__globals__, "scaled_dot_product_attention": attention, **others}
    del names["__name__"]  # by which PyTorch's compiler would look for them elsewhere
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _check_padding(key_padding_mask: Tensor, src_len: int, bsz: int) -> None:
    """As a function of PyTorch's does in a way that its compiler cannot follow from here."""
    if key_padding_mask.shape[0] != bsz or key_padding_mask.shape[1] != src_len:
        raise AssertionError("key_padding_mask has another shape, expected (batch, seqlen_k)")


# PyTorch's compiler can follow a function, but not make one.
_CHECKS: Final = {"_check_key_padding_mask": _check_padding}
_multi_head_compiled: Final = _within(_multi_head, _attention, **_CHECKS)
_multi_head_alike_compiled: Final = _within(_multi_head, _attention_alike, **_CHECKS)
