"""`strobe.torch.attention`: the options of `strobe.attention` that an operator has, with gradients.

It goes by the operators of `_operators`, as `flash_attn`'s functions do where somebody must see
them. The names in its messages are those of `strobe.attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, overload

import torch

from . import _autograd, _operators, _options
from ._errors import Error
from ._flash_attn import (
    as_flag,
    as_integer,
    as_number,
    as_sinks,
    autocast,
    check_dropout,
    check_tensor,
    in_our_words,
    is_plain,
    side_of_window,
    words_of,
)
from ._packed_mask import check_made_for, check_made_for_packed, check_starts
from ._values import NO_LIMIT, constant, pair
from .masks import Mask

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tensor: TypeAlias = torch.Tensor
Window: TypeAlias = tuple[int | None, int | None]


class Options(TypedDict, total=False):
    """Those of `attention`, for type checkers."""

    causal: bool
    window: Window
    scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    dropout_p: float
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    attention_chunk: int
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    q_position: Tensor | None
    prefix: Tensor | None
    window_signed: bool
    sinks: Tensor | None
    sinks_outside_lse: bool
    mask: Mask | None
    bias: Tensor | None
    deterministic: bool


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    attention_chunk: int = 0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_position: Tensor | None = None,
    prefix: Tensor | None = None,
    window_signed: bool = False,
    sinks: Tensor | None = None,
    sinks_outside_lse: bool = False,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """`strobe.attention` with a gradient: also of packed sequences, prefixes and lengths in use.

    Algorithms 1 and 2 of T. Dao, "FlashAttention-2", arXiv:2307.08691. Under autograd, torch.func,
    torch.compile (one graph), export and vmap; under autocast tensors are cast as
    scaled_dot_product_attention's are.

    Args:
        q: queries, (batch, seqlen_q, heads, head_dim), or with cu_seqlens_q
            (total_q, heads, head_dim): not laid out as the tensors of this module's other
            functions.
        k: keys, (batch, seqlen_k, heads_kv, head_dim), or (total_k, heads_kv, head_dim).
        v: values, as k with head_dim_v.
        causal, window, scale, softcap, alibi_slopes: as in `strobe.attention`. Slopes that require
            a gradient are refused.
        dropout_p: as there. Seed and offset come from PyTorch's default generator of q's device:
            torch.manual_seed repeats them.
        cu_seqlens_q, cu_seqlens_k: int32, (batch + 1,), from 0 to at most total: sequences of
            different lengths packed end to end. None: none are packed.
        max_seqlen_q, max_seqlen_k: the longest sequences with cu_seqlens, or upper bounds; None:
            found from cu_seqlens, if those are in the CPU's memory.
        attention_chunk, window_signed: as in `strobe.attention`.
        seqused_q, seqused_k, q_position, prefix: int32, (batch,): as in `strobe.attention`.
        sinks: (heads,): as in `strobe.attention`, of any floating-point dtype and strides,
            computed in float32. They may require a gradient.
        sinks_outside_lse: as in `strobe.attention`.
        mask: of `strobe.masks`, made for these lengths, on the device of q: a pair is seen if it
            and all other options allow it.
        bias: as in `strobe.attention`. It may require a gradient, which has its shape and dtype; of
            an expanded one PyTorch sums what each pair gives.
        deterministic: in the backward pass, the same bits for every number of CPU threads.
        return_lse: also return lse, which is differentiable.

    Returns:
        out, (batch, seqlen_q, heads, head_dim_v) or (total_q, heads, head_dim_v), or (out, lse):
        lse is float32, (batch, heads, seqlen_q) or (heads, total_q). Both are new tensors on q's
        device, differentiable once by q, k, v, sinks and bias.

    Raises:
        InvalidArgument: arguments that contradict each other or break a rule of `strobe.attention`.
        Unsupported: no kernel takes this, or a gradient that there is not is asked for.

    Example:
        Three sequences of 3, 5 and 2 rows in one tensor. Each is causal but for its first rows,
        which all of its queries see:

        >>> import torch, strobe
        >>> q, k, v = torch.randn(3, 10, 4, 64).requires_grad_()
        >>> offsets = torch.tensor([0, 3, 8, 10], dtype=torch.int32)
        >>> prefix = torch.tensor([2, 1, 0], dtype=torch.int32)
        >>> out = strobe.torch.attention(
        ...     q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True, prefix=prefix
        ... )
        >>> out.sum().backward()
        >>> tuple(out.shape)
        (10, 4, 64)
    """
    constant("alibi_slopes", alibi_slopes)
    tracing = torch.compiler.is_dynamo_compiling()
    plain = not tracing and is_plain(q, k, v)
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, (*(("total",) if packed else ("batch", "seqlen")), *_HEADS))
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x is not None:
            check_tensor(name, x, ("batch + 1",))
    numbers = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    numbers |= {"q_position": q_position, "prefix": prefix}
    for name, x in numbers.items():
        if x is not None:
            check_tensor(name, x, ("batch",))
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes, None)
    if sinks is not None:
        sinks = as_sinks("sinks", sinks)
    if bias is not None:
        check_tensor("bias", bias, ("batch", "heads", "seqlen_q", "seqlen_k"))
        plain = plain and type(bias) is Tensor and not bias.is_neg()
    if not tracing and _autograd.differentiates_forward():
        _autograd.refuse_tangents(q, k, v, alibi_slopes, sinks, bias)
    longest_q = None if max_seqlen_q is None else as_integer("max_seqlen_q", max_seqlen_q)
    longest_k = None if max_seqlen_k is None else as_integer("max_seqlen_k", max_seqlen_k)
    left, right = pair("window", window, side_of_window, "-1 or None")
    signed = as_flag("window_signed", window_signed)
    if left is None or right is None:  # where None says that there is no limit, -1 is one
        signed = True
    masked: dict[str, Any] = {}
    if mask is not None:
        masked = {"mask": words_of(mask, q), "mask_layout": mask.layout}
        if cu_seqlens_q is None and q.ndim == k.ndim == 4:  # else the planner says what is wrong
            check_made_for(mask._of_calls, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
        elif cu_seqlens_q is not None and cu_seqlens_k is not None:
            if tracing:
                check_made_for_packed(mask._of_calls, -1)
            else:
                check_starts(mask, cu_seqlens_q, cu_seqlens_k)
    tail = _options.positional(
        attention_chunk=as_integer("attention_chunk", attention_chunk),
        window_signed=signed,
        sinks=sinks,
        sinks_outside_lse=as_flag("sinks_outside_lse", sinks_outside_lse),
        bias=bias,
        **numbers,
        **masked,
    )
    dropout_p = as_number("dropout_p", dropout_p)
    options = (
        dropout_p,
        None if scale is None else as_number("scale", scale),
        as_flag("causal", causal),
        NO_LIMIT if left is None else left,
        NO_LIMIT if right is None else right,
        as_number("softcap", softcap),
        as_flag("deterministic", deterministic),
    )
    return_lse = as_flag("return_lse", return_lse)
    q, k, v = autocast(q, k, v)
    rng_state = None
    if dropout_p != 0:
        check_dropout(dropout_p, 0.0)
        rng_state = _operators.dropout_state(device=q.device)
    arrays = (cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, longest_q, longest_k)
    arguments = (*arrays, *options, *tail)
    if tracing:
        out, lse = _operators.attention_forward(q, k, v, *arguments)
    else:
        try:
            out, lse = _operators.differentiable(plain, q, k, v, arguments)
        except Error:
            raise
        except (AssertionError, NotImplementedError, TypeError) as error:
            raise in_our_words(error, q=q, k=k, v=v, alibi_slopes=alibi_slopes, bias=bias) from None
    return (out, lse) if return_lse else out


_HEADS = ("heads", "head_dim")
