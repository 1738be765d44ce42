"""S_dmask: attention's weights and what dropout did to them, in the form that flash_attn gives.

flash_attn takes a row's keys in blocks, the last block first, and keeps a maximum of the scores so
far. The weight of a key is exp(score - that maximum, with the key's own block), so that

    probability = |S_dmask| * exp(maximum of this block and those behind it - lse)

which is what programs that test dropout compute, with blocks as wide as `block_size_n` says. The
sign bit is set where dropout drops. In plain tensor operations: memory grows with the square.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import torch

from ._errors import InvalidArgument

Tensor: TypeAlias = torch.Tensor

# Both lengths of the matrix are rounded up to a multiple of this.
_ROUNDED: Final = 128


def block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """How many keys flash_attn's kernel for `device` takes at a time.

    A fact of the interface, not of Strobe's kernels: programs that read S_dmask ask for it. A CPU
    counts as a GPU of compute capability 8.0 or 9.0.
    """
    if not 1 <= head_dim <= 256:
        raise InvalidArgument(f"head_dim = {head_dim}, expected 1 to 256")
    if head_dim <= 32:
        return 128
    if head_dim <= 64:
        return 64 if is_dropout else 128
    if head_dim <= 96 or head_dim > 128:
        return 64
    return 32 if is_dropout or (_is_small_ampere(device) and not is_causal) else 64


def _is_small_ampere(device: Any) -> bool:
    """Compute capability 8.6, 8.7 or 8.9, which have less shared memory than 8.0."""
    if device is not None and torch.device(device).type != "cuda":
        return False
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return bool(major == 8 and minor > 0)


def round_multiple(x: int, m: int) -> int:
    """x, rounded up to a multiple of m.

    Example:
        >>> from flash_attn.flash_attn_interface import round_multiple
        >>> round_multiple(300, 128)
        384
    """
    return -(-x // m) * m


def shape(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: Any, max_seqlen_k: Any
) -> tuple[int, int, int, int]:
    """Of S_dmask: (batch, heads, seqlen_q, seqlen_k), the last two rounded up."""
    if cu_seqlens_q is None:
        batch, max_seqlen_q, max_seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    else:
        batch = cu_seqlens_q.shape[0] - 1
    rounded = (round_multiple(n, _ROUNDED) for n in (max_seqlen_q, max_seqlen_k))
    return (batch, q.shape[-2], *rounded)


# scale, causal, window_left, window_right, softcap
Mask: TypeAlias = tuple[float | None, bool, int, int, float]


def _scores(q: Tensor, k: Tensor, slopes: Tensor | None, mask: Mask) -> Tensor:
    """Of each query and key, float32; -inf where a query does not see a key.

    q: (batch, seqlen_q, heads, head_dim); slopes: (batch, heads).
    """
    scale, causal, left, right, softcap = mask
    (seqlen_q, heads, head_dim), (seqlen_k, heads_kv) = q.shape[1:], k.shape[1:3]
    factor = head_dim**-0.5 if scale is None else scale
    keys = k.float().repeat_interleave(heads // heads_kv, dim=2)
    score = torch.einsum("bqhd,bkhd->bhqk", q.float(), keys) * factor
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    position = torch.arange(seqlen_q, device=q.device)[:, None] + (seqlen_k - seqlen_q)
    distance = torch.arange(seqlen_k, device=q.device)[None, :] - position
    if slopes is not None:
        score = score - slopes[:, :, None, None] * distance.abs()
    last = 0 if causal else right
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if last >= 0:
        seen &= distance <= last
    return score.masked_fill(~seen, -torch.inf)


def _weights(score: Tensor, block: int) -> Tensor:
    """exp(score - maximum of the key's block and those behind it), 0 where the score is -inf."""
    seqlen_k = score.shape[-1]
    if seqlen_k == 0:
        return score
    highest = torch.stack([x.amax(-1) for x in score.split(block, -1)], -1)
    highest = highest.flip(-1).cummax(-1).values.flip(-1)
    reference = highest.repeat_interleave(block, -1)[..., :seqlen_k]
    return torch.where(score == -torch.inf, 0.0, torch.exp(score - reference))


def weights(
    q: Tensor,
    k: Tensor,
    lengths: tuple[Tensor | None, Tensor | None, int | None, int | None],
    alibi_slopes: Tensor | None,
    mask: Mask,
) -> Tensor:
    """S_dmask without its signs, float32; 0 outside of the masks and of the sequences.

    lengths: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k.
    """
    cu_seqlens_q, cu_seqlens_k, *longest = lengths
    found = q.new_zeros(shape(q, k, cu_seqlens_q, *longest), dtype=torch.float32)
    batch, heads = found.shape[:2]
    slopes = None if alibi_slopes is None else alibi_slopes.expand(batch, heads)
    block = block_size_n(q.device, q.shape[-1], True, mask[1])
    if cu_seqlens_q is None or cu_seqlens_k is None:
        found[:, :, : q.shape[1], : k.shape[1]] = _weights(_scores(q, k, slopes, mask), block)
        return found
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(batch):
        rows = slice(starts_q[b], starts_q[b + 1])
        keys = slice(starts_k[b], starts_k[b + 1])
        own = None if slopes is None else slopes[b : b + 1]
        score = _scores(q[None, rows], k[None, keys], own, mask)
        found[b, :, : score.shape[-2], : score.shape[-1]] = _weights(score, block)[0]
    return found
