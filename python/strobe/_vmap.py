"""vmap over the operators: the vmapped dimension becomes a part of the batch."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import torch

from ._errors import Unsupported
from ._options import TAIL
from ._problem import mask_fields

Tensor: TypeAlias = torch.Tensor


_PLAIN: Final = 13  # options before the tail
_TAIL_NAMES: Final = [row.name for row in TAIL]
_SINKS: Final = _TAIL_NAMES.index("sinks")
_MASK_LAYOUT: Final = _TAIL_NAMES.index("mask_layout")


def _fold(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """(batch, ...) with a vmapped dimension of `size` as (size * batch, ...)."""
    if x is None:
        return None
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _fold_options(
    options: tuple[Any, ...], dims: tuple[Any, ...], size: int, batch: int, randomness: str
) -> tuple[Any, ...]:
    """Options of a dense problem whose batch is `size` times larger."""
    cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, *rest = options
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        raise Unsupported("vmap over packed sequences (cu_seqlens): pack them into one call")
    if rng_state is not None and randomness != "different":
        raise Unsupported(
            f"dropout_p > 0 under vmap with randomness={randomness!r}: expected 'different', each "
            "entry drops weights of its own"
        )
    if alibi_slopes is not None:
        if alibi_slopes.ndim == (1 if dims[2] is None else 2):  # (heads) for each entry
            if dims[2] is not None:
                slopes = alibi_slopes.movedim(dims[2], 0).unsqueeze(1)
                alibi_slopes = slopes.expand(size, batch, -1).reshape(size * batch, -1)
        else:
            alibi_slopes = _fold(alibi_slopes, dims[2], size)
        alibi_slopes = alibi_slopes.contiguous()
    tail = options[_PLAIN:]
    folded = []
    for row, x, dim in zip(TAIL, tail, dims[_PLAIN:], strict=False):
        if row.name == "mask" and x is not None:
            _check_mask(dim, tail[_MASK_LAYOUT])
        elif isinstance(x, torch.Tensor) and row.name != "sinks":
            x = _fold(x, dim, size)
        folded.append(x)
    return (None, None, alibi_slopes, rng_state, *rest[: _PLAIN - 4], *folded)


def _check_mask(dim: int | None, layout: int) -> None:
    """Lets by a mask that is one for all sequences."""
    if dim is not None:
        raise Unsupported("vmap over a mask: pass one mask for all entries, in_dims=None")
    if mask_fields(layout, 2, 1, False)["mask_batch"] != 1:
        raise Unsupported("vmap with a mask of each sequence: pass one mask for all sequences")


def _one_by_one(operator: Any, size: int, in_dims: Any, arguments: Any, draws: bool) -> Any:
    """Each entry by itself: sinks, and their gradient, are of a whole batch."""
    if draws:
        raise Unsupported(
            "dropout_p > 0 under vmap with sinks of each entry, or their gradient: which weights "
            "are dropped goes by an entry's place in the batch"
        )
    entries = [
        operator(
            *(
                x if dim is None else x.select(dim, n)
                for x, dim in zip(arguments, in_dims, strict=True)
            )
        )
        for n in range(size)
    ]
    found = tuple(torch.stack(x) for x in zip(*entries, strict=True))
    return found, (0,) * len(found)


def vmap_over(operator: Any, query: int, *, sums_batch: bool = False) -> Any:
    """A vmap rule that makes the vmapped dimension a part of the batch.

    query: which argument of the operator is q. (batch, ...) are q, k and v of the forward, where it
    is 0, and dout, dlse, q, k, v, out and lse of the backward, where it is 2. sums_batch: one of
    the results is a sum over the batch.
    """
    tensors = 3 if query == 0 else 7

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        size = info.batch_size
        sinks = tensors + _PLAIN + _SINKS
        if sums_batch or (len(in_dims) > sinks and in_dims[sinks] is not None):
            draws = arguments[tensors + 3] is not None
            return _one_by_one(operator, size, in_dims, arguments, draws)
        q, q_dim = arguments[query], in_dims[query]
        batch = q.shape[0] if q_dim is None else q.movedim(q_dim, 0).shape[1]
        folded = [
            _fold(x, dim, size)
            for x, dim in zip(arguments[:tensors], in_dims[:tensors], strict=True)
        ]
        options = _fold_options(
            arguments[tensors:], in_dims[tensors:], size, batch, info.randomness
        )
        found = operator(*folded, *options)
        return tuple(x.unflatten(0, (size, batch)) for x in found), (0,) * len(found)

    return rule
