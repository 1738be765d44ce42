"""vmap over the operators: the vmapped dimension becomes a part of the batch."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import torch

from . import _options
from ._errors import Unsupported
from ._options import TAIL
from ._problem import mask_fields

Tensor: TypeAlias = torch.Tensor


_PLAIN: Final = 13  # options before the tail
_MASK_LAYOUT: Final = [row.name for row in TAIL].index("mask_layout")


def _fold(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """(batch, ...) with a vmapped dimension of `size` as (size * batch, ...)."""
    if x is None:
        return None
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _fold_bias(bias: Tensor, dim: int | None, size: int, batch: int, whole: bool) -> Tensor:
    """A bias whose batch may be 1. whole: with one for each sequence, even where all share it, so
    that its gradient has a part for each entry of the vmapped dimension.
    """
    if dim is None and bias.shape[0] == 1 and not whole:
        return bias
    bias = bias.unsqueeze(0) if dim is None else bias.movedim(dim, 0)
    bias = bias.expand(size, batch, *bias.shape[2:])
    return bias.reshape(size * batch, *bias.shape[2:])


def _fold_options(
    options: tuple[Any, ...],
    dims: tuple[Any, ...],
    size: int,
    batch: int,
    randomness: str,
    whole_bias: bool,
) -> tuple[Any, ...]:
    """Options of a dense problem whose batch is `size` times larger. whole_bias: `_fold_bias`."""
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
        elif row.name == "bias" and x is not None:
            x = _fold_bias(x, dim, size, batch, whole_bias)
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


def _one_by_one(
    operator: Any, size: int, in_dims: Any, arguments: Any, draws: bool
) -> list[Tensor]:
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
    return [torch.stack(x) for x in zip(*entries, strict=True)]


def vmap_over(operator: Any, query: int) -> Any:
    """A vmap rule that makes the vmapped dimension a part of the batch.

    query: which argument of the operator is q. (batch, ...) are q, k and v of the forward, where it
    is 0, and dout, dlse, q, k, v, out and lse of the backward, where it is 2; where it is 4 whether
    dsinks and dbias are wanted comes before these.
    """
    flags = max(query - 2, 0)
    tensors = 3 if query == 0 else query + 5  # and flags

    def results_of(found: list[Tensor]) -> Any:
        # As the operator's schema has them: with flags a list.
        return (found, [0] * len(found)) if flags else (tuple(found), (0,) * len(found))

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        size = info.batch_size
        sinks = tensors + _PLAIN + _options.SINKS
        wants_dsinks, wants_dbias = arguments[:flags] if flags else (False, False)
        if wants_dsinks or (len(in_dims) > sinks and in_dims[sinks] is not None):
            draws = arguments[tensors + 3] is not None
            return results_of(_one_by_one(operator, size, in_dims, arguments, draws))
        q, q_dim = arguments[query], in_dims[query]
        batch = q.shape[0] if q_dim is None else q.movedim(q_dim, 0).shape[1]
        folded = [
            _fold(x, dim, size)
            for x, dim in zip(arguments[flags:tensors], in_dims[flags:tensors], strict=True)
        ]
        given, dims = arguments[tensors:], in_dims[tensors:]
        options = _fold_options(given, dims, size, batch, info.randomness, wants_dbias)
        results = operator(*arguments[:flags], *folded, *options)
        found = [x.unflatten(0, (size, batch)) for x in results]
        if wants_dbias:
            place = _PLAIN + _options.BIAS
            bias, dim = given[place], dims[place]
            if bias.ndim > 4:
                bias = bias.select(dim, 0)
            if bias.shape[0] < batch:  # one for the batch of an entry
                found[3] = found[3].sum(1, keepdim=True)
        return results_of(found)

    return rule
