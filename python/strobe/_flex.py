"""FlexAttention's function, where what it is given is a mask: `strobe.torch.flex_attention`."""

from __future__ import annotations

import weakref
from typing import Any, Final, TypeAlias

import torch

from . import _arrays
from ._differentiable import attention
from ._errors import Error, InvalidArgument, Unsupported, renamed, shown
from ._flash_attn import as_flag
from ._mask_arrays import current_stream, is_capturing
from .masks import Mask, from_block_mask

Tensor: TypeAlias = torch.Tensor

# What was packed of a BlockMask, which the layers of a model share, while that lives; with how
# often its lists had been written to, and the stream that packed it.
_kept: Final[weakref.WeakKeyDictionary[Any, tuple[Any, int, Mask]]] = weakref.WeakKeyDictionary()


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _packed(block_mask: Any) -> Mask:
    if not hasattr(block_mask, "kv_num_blocks"):
        raise InvalidArgument(
            f"block_mask is {shown(block_mask)}, expected PyTorch's BlockMask or a "
            "strobe.masks.Mask"
        )
    lists = (
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
    )
    writes = [None if x is None or x.is_inference() else x._version for x in lists]
    device = block_mask.kv_num_blocks.device
    stream = current_stream(device)
    kept = _kept.get(block_mask)
    # A graph is captured on a stream of its own, after all others.
    if kept is None or kept[0] != writes or not (kept[1] == stream or is_capturing(device)):
        kept = _kept[block_mask] = (writes, stream, from_block_mask(block_mask))
    return kept[2]


_NAMES: Final = {"q": "query", "k": "key", "v": "value", "mask": "block_mask"}


def _as_rows(name: str, x: Any) -> Tensor:
    """(batch, heads, seqlen, head_dim) as strobe.torch.attention has it."""
    if not isinstance(x, torch.Tensor):
        raise InvalidArgument(f"{name} is of type {type(x).__name__:.60}, expected a torch.Tensor")
    if not torch.compiler.is_compiling():
        _arrays.check_dense(name, x)
    if x.ndim != 4:
        raise InvalidArgument(
            f"{name}.ndim = {x.ndim}, expected 4: (batch, heads, seqlen, head_dim)"
        )
    try:
        return x.transpose(1, 2)
    except Exception as error:  # of a tensor without memory, or of somebody else's class
        raise _arrays.unreadable(name, x, error) from None


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
    bias: Tensor | None = None,
) -> Any:
    """torch.nn.attention.flex_attention's function of the same name, for masks, on GPUs and on the
    CPU, where PyTorch's has no gradient.

    Args:
        query: (batch, heads, seqlen_q, head_dim).
        key: (batch, heads_kv, seqlen_k, head_dim).
        value: (batch, heads_kv, seqlen_k, head_dim_v).
        score_mod: None: a function of scores is refused. Numbers to add to scores are `bias`;
            softcap, alibi_slopes and sinks are arguments of `strobe.torch.attention`.
        block_mask: a BlockMask whose BLOCK_SIZE is 64, 128 or 256 on either side, or what
            `strobe.masks` packed. A BlockMask is packed by the first call with it, which asks its
            mask_mod about the blocks that are seen in part; later calls rely on that as long as
            the object lives and its lists are not written to; on a GPU it waits for the device, and
            has to come before a CUDA graph is captured. None: all pairs are seen.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        enable_gqa: whether key and value may have fewer heads, a divisor of query's.
        return_lse: also return lse, which is differentiable.
        kernel_options: of PyTorch's kernels; not looked at.
        return_aux: an AuxRequest of lse: also return an AuxOutput.
        bias: (batch, heads, seqlen_q, seqlen_k), each of the first three 1 where all share it, of
            float32, bfloat16 or float16 and any strides: what a score_mod
            `score + bias[b, h, q_idx, kv_idx]` adds. It may require a gradient. PyTorch's function
            has no such argument.

    Returns:
        out, (batch, heads, seqlen_q, head_dim_v), or (out, lse): lse is float32,
        (batch, heads, seqlen_q). A query that sees no key has out 0 and lse -inf.

    Example:
        >>> import torch, strobe
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> ids = torch.repeat_interleave(torch.arange(3), torch.tensor([250, 50, 340]))
        >>> made = create_block_mask(
        ...     lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), None, None, 640, 640, "cpu"
        ... )
        >>> q, k, v = torch.randn(3, 1, 8, 640, 64).requires_grad_()
        >>> strobe.torch.flex_attention(q, k, v, block_mask=made).shape
        torch.Size([1, 8, 640, 64])
    """
    if score_mod is not None:
        name = getattr(score_mod, "__name__", None) or shown(score_mod)
        raise Unsupported(
            f"score_mod = {name}: Strobe computes no function of scores; numbers to add are bias=, "
            "a tensor, and softcap, alibi_slopes and sinks are arguments of strobe.torch.attention"
        )
    if return_aux is not None and getattr(return_aux, "max_scores", False):
        raise Unsupported("return_aux.max_scores = True: Strobe returns lse alone")
    shares_heads = as_flag("enable_gqa", enable_gqa)
    with_lse = as_flag("return_lse", return_lse) or bool(getattr(return_aux, "lse", False))
    q, k, v = (_as_rows(*x) for x in (("query", query), ("key", key), ("value", value)))
    if not shares_heads and k.shape[2] != q.shape[2]:
        raise InvalidArgument(
            f"key has {k.shape[2]} heads and query {q.shape[2]}, expected as many without "
            "enable_gqa"
        )
    mask = block_mask
    if mask is not None and not isinstance(mask, Mask):
        mask = _packed(block_mask)
    try:
        out, lse = attention(q, k, v, scale=scale, mask=mask, bias=bias, return_lse=True)
    except Error as error:
        raise type(error)(renamed(str(error), _NAMES)) from None
    out = out.transpose(1, 2)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if with_lse else None, max_scores=None)
    return (out, lse) if with_lse else out
