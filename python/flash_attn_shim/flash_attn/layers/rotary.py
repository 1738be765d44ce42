"""Rotary position embeddings as functions, autograd functions and a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .. import _absent
from ..ops.triton.rotary import apply_rotary

__all__ = [
    "ApplyRotaryEmb",
    "ApplyRotaryEmbKV_",
    "ApplyRotaryEmbQKV_",
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]

Tensor: TypeAlias = torch.Tensor


# --------------------------------------------------------------------------------------- functions


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Each pair (a, b) of the last axis as (-b, a): a quarter turn. Pairs as `apply_rotary_emb`.

    Example:
        >>> import torch
        >>> from flash_attn.layers.rotary import rotate_half
        >>> rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        tensor([-3., -4.,  1.,  2.])
    """
    if interleaved:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((-b, a), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """`apply_rotary_emb` in the dtype of its arguments.

    Args:
        x: (batch, seqlen, heads, head_dim).
        cos, sin: (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2).
        interleaved: as `apply_rotary_emb`.

    Example:
        >>> import torch
        >>> from flash_attn.layers.rotary import apply_rotary_emb_torch
        >>> angles = torch.outer(torch.arange(10.0), 10000 ** -(torch.arange(0, 64, 2) / 64))
        >>> x = torch.randn(2, 10, 4, 64)
        >>> tuple(apply_rotary_emb_torch(x, angles.cos(), angles.sin()).shape)
        (2, 10, 4, 64)
    """
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1]:
        raise ValueError(f"rotary_dim = {rotary_dim}, expected at most head_dim = {x.shape[-1]}")

    def both(table: Tensor) -> Tensor:  # one value for each entry of a pair
        pairs = table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)
        return pairs.unsqueeze(-2)

    rotary, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    turned = rotary * both(cos) + rotate_half(rotary, interleaved) * both(sin)
    return torch.cat((turned, rest), -1)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates pairs of the first rotary_dim entries of each head by angles of the row's position.

    Args:
        x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens.
        cos, sin: (seqlen_rotary, rotary_dim / 2); rotary_dim is at most head_dim.
        interleaved: pairs are (0, 1), (2, 3)...; else the halves, (0, rotary_dim / 2)...
        inplace: write into x, and return it.
        seqlen_offsets: what to add to each position, one for all or int (batch,). Rows that tensors
            lead past seqlen_rotary stay as they are.
        cu_seqlens: int32, (batch + 1,): where packed sequences begin and the last one ends.
        max_seqlen: the longest of them; not needed here.

    Returns:
        x rotated, in x's shape and dtype; differentiable.

    Raises:
        ValueError: shapes that do not fit together.
        IndexError: seqlen_offsets is an int, and leads past seqlen_rotary.

    Example:
        >>> import torch
        >>> from flash_attn.layers.rotary import apply_rotary_emb
        >>> angles = torch.outer(torch.arange(10.0), 10000 ** -(torch.arange(0, 64, 2) / 64))
        >>> x = torch.randn(2, 7, 4, 64)
        >>> later = apply_rotary_emb(x, angles.cos(), angles.sin(), seqlen_offsets=3)
        >>> tuple(later.shape)
        (2, 7, 4, 64)
    """

    def rotate(x: Tensor) -> Tensor:
        return apply_rotary(
            x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace
        )

    return _in_place(x, rotate) if inplace else rotate(x)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates q and k of qkv in place.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or with num_heads_q
            (batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim).
        cos, sin, interleaved, seqlen_offsets: as `apply_rotary_emb`.
        cos_k, sin_k: of k, if they are others.
        num_heads_q: how many heads of the second form are q's.

    Returns:
        qkv; differentiable.

    Example:
        >>> import torch
        >>> from flash_attn.layers.rotary import apply_rotary_emb_qkv_
        >>> angles = torch.outer(torch.arange(10.0), 10000 ** -(torch.arange(0, 64, 2) / 64))
        >>> qkv = torch.randn(2, 10, 3, 4, 64)
        >>> v = qkv[:, :, 2].clone()
        >>> rotated = apply_rotary_emb_qkv_(qkv, angles.cos(), angles.sin())
        >>> rotated is qkv, torch.equal(qkv[:, :, 2], v)
        (True, True)
    """
    _q_and_k(qkv, num_heads_q)  # checks

    def rotate(qkv: Tensor) -> None:
        _rotate_qkv(qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, num_heads_q)

    return _in_place(qkv, rotate)


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotates k of kv, (batch, seqlen, 2, heads_kv, head_dim), in place.

    Args:
        kv: what to change.
        cos, sin, interleaved, seqlen_offsets: as `apply_rotary_emb`.

    Returns:
        kv; differentiable.

    Example:
        >>> import torch
        >>> from flash_attn.layers.rotary import apply_rotary_emb_kv_
        >>> angles = torch.outer(torch.arange(10.0), 10000 ** -(torch.arange(0, 64, 2) / 64))
        >>> kv = torch.randn(2, 10, 2, 4, 64)
        >>> apply_rotary_emb_kv_(kv, angles.cos(), angles.sin()) is kv
        True
    """
    _check_kv(kv)

    def rotate(kv: Tensor) -> None:
        _rotate_kv(kv, cos, sin, interleaved, seqlen_offsets)

    return _in_place(kv, rotate)


def _in_place(x: Tensor, rotate: Callable[[Tensor], Any]) -> Tensor:
    """x, which `rotate` has changed; also where autograd lets nobody write into x, a parameter or
    a view of one. There x is written beside autograd, and a copy that autograd knows is returned.
    """
    base = x if x._base is None else x._base
    if not (torch.is_grad_enabled() and base.is_leaf and base.requires_grad):
        rotate(x)
        return x
    rotated = x.clone()
    rotate(rotated)
    with torch.no_grad():
        x.copy_(rotated)
    return rotated


def _q_and_k(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor]:
    """Views of qkv: see `apply_rotary_emb_qkv_`."""
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        return qkv[:, :, 0], qkv[:, :, 1]
    if qkv.ndim != 4:
        raise ValueError(
            f"qkv.shape = {tuple(qkv.shape)}, expected (batch, seqlen, 3, heads, head_dim) or "
            "(batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim)"
        )
    heads = qkv.shape[2]
    if num_heads_q is None or not 0 <= num_heads_q <= heads or (heads - num_heads_q) % 2:
        raise ValueError(
            f"num_heads_q = {num_heads_q} with qkv.shape[2] = {heads}, expected "
            "qkv.shape[2] = num_heads_q + 2 * num_heads_k"
        )
    num_heads_k = (heads - num_heads_q) // 2
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + num_heads_k]


def _check_kv(kv: Tensor) -> None:
    if kv.ndim != 5 or kv.shape[2] != 2:
        raise ValueError(
            f"kv.shape = {tuple(kv.shape)}, expected (batch, seqlen, 2, heads_kv, head_dim)"
        )


def _rotate_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None,
    sin_k: Tensor | None,
    interleaved: bool,
    seqlen_offsets: int | Tensor,
    num_heads_q: int | None,
    conjugate: bool = False,
) -> None:
    q, k = _q_and_k(qkv, num_heads_q)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    for x, c, s in ((q, cos, sin), (k, cos_k, sin_k)):
        apply_rotary(x, c, s, seqlen_offsets, None, None, interleaved, True, conjugate)


def _rotate_kv(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    seqlen_offsets: int | Tensor,
    conjugate: bool = False,
) -> None:
    k = kv[:, :, 0]
    apply_rotary(k, cos, sin, seqlen_offsets, None, None, interleaved, True, conjugate)


# ------------------------------------------------------------------------------- autograd functions
# For code that says `.apply`, or calls forward and backward in an autograd function of its own.


class ApplyRotaryEmb(torch.autograd.Function):  # type: ignore[misc]
    """`apply_rotary_emb`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool = False,
        inplace: bool = False,
        seqlen_offsets: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Rotated x."""
        _keep(ctx, (cos, sin, cu_seqlens), seqlen_offsets)
        ctx.interleaved, ctx.inplace, ctx.max_seqlen = interleaved, inplace, max_seqlen
        return apply_rotary(
            x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace
        )

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        """A gradient for each argument of forward."""
        cos, sin, cu_seqlens, offsets = _kept(ctx)
        dx = apply_rotary(
            do, cos, sin, offsets, cu_seqlens, ctx.max_seqlen, ctx.interleaved, conjugate=True
        )
        return dx, *[None] * 7


class ApplyRotaryEmbQKV_(torch.autograd.Function):  # type: ignore[misc] # noqa: N801
    """`apply_rotary_emb_qkv_`."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cos_k: Tensor | None = None,
        sin_k: Tensor | None = None,
        interleaved: bool = False,
        seqlen_offsets: int | Tensor = 0,
        num_heads_q: int | None = None,
    ) -> Tensor:
        """qkv, changed."""
        _keep(ctx, (cos, sin, cos_k, sin_k), seqlen_offsets)
        ctx.interleaved, ctx.num_heads_q = interleaved, num_heads_q
        _rotate_qkv(qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, num_heads_q)
        return qkv

    @staticmethod
    def backward(ctx: Any, dqkv: Tensor) -> Any:
        """A gradient for each argument of forward."""
        cos, sin, cos_k, sin_k, offsets = _kept(ctx)
        dqkv = dqkv.clone()
        _rotate_qkv(
            dqkv, cos, sin, cos_k, sin_k, ctx.interleaved, offsets, ctx.num_heads_q, conjugate=True
        )
        return dqkv, *[None] * 7


class ApplyRotaryEmbKV_(torch.autograd.Function):  # type: ignore[misc] # noqa: N801
    """`apply_rotary_emb_kv_`."""

    @staticmethod
    def forward(
        ctx: Any,
        kv: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool = False,
        seqlen_offsets: int | Tensor = 0,
    ) -> Tensor:
        """kv, changed."""
        _check_kv(kv)
        _keep(ctx, (cos, sin), seqlen_offsets)
        ctx.interleaved = interleaved
        _rotate_kv(kv, cos, sin, interleaved, seqlen_offsets)
        return kv

    @staticmethod
    def backward(ctx: Any, dkv: Tensor) -> Any:
        """A gradient for each argument of forward."""
        cos, sin, offsets = _kept(ctx)
        dkv = dkv.clone()
        _rotate_kv(dkv, cos, sin, ctx.interleaved, offsets, conjugate=True)
        return dkv, *[None] * 4


def _keep(ctx: Any, tables: tuple[Tensor | None, ...], seqlen_offsets: int | Tensor) -> None:
    """For `_kept`: save_for_backward takes tensors only."""
    tensor = isinstance(seqlen_offsets, torch.Tensor)
    ctx.save_for_backward(*tables, seqlen_offsets if tensor else None)
    ctx.seqlen_offsets = None if tensor else seqlen_offsets


def _kept(ctx: Any) -> tuple[Any, ...]:
    *tables, offsets = ctx.saved_tensors
    return (*tables, ctx.seqlen_offsets if offsets is None else offsets)


# ------------------------------------------------------------------------------------------- module


class RotaryEmbedding(torch.nn.Module):  # type: ignore[misc]
    """Rotates q and k by angles position * base ** (-2 i / dim), i < dim / 2.

    Args:
        dim: rotary_dim, even.
        base: see above.
        interleaved: as `apply_rotary_emb`.
        scale_base: not None: XPos (Y. Sun et al., arXiv:2212.10554), which scales q up and k down
            with the position; 512 is its usual value.
        device: of the frequencies.
        pos_idx_in_fp32: an argument of older versions; positions are always float32.

    Example:
        >>> import torch
        >>> from flash_attn.layers.rotary import RotaryEmbedding
        >>> tuple(RotaryEmbedding(64)(torch.randn(2, 10, 3, 4, 64)).shape)
        (2, 10, 3, 4, 64)
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
        *,
        pos_idx_in_fp32: bool = True,
    ) -> None:
        """As the class says."""
        super().__init__()
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = interleaved, scale_base
        scale = None if scale_base is None else self._compute_scale(device)
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _even(self, device: Any) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return self.base ** (-self._even(device) / self.dim)

    def _compute_scale(self, device: Any = None) -> Tensor:
        """XPos's zeta, with its gamma of 0.4."""
        return (self._even(device) / self.dim + 0.4) / 1.4

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        """Makes tables for positions to seqlen, unless those that are there will do."""
        table = self._cos_cached
        if (
            table is not None
            and seqlen <= self._seq_len_cached
            and table.device == torch.device(device if device is not None else "cpu")
            and table.dtype == dtype
            and not (self.training and table.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        # A module that was cast to half precision has lost bits of its buffers.
        frequency, scale = self.inv_freq, self.scale
        if frequency.dtype != torch.float32:
            frequency = self._compute_inv_freq(device)
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        angle = torch.outer(position, frequency.to(position.device))
        if scale is None:
            self._cos_cached, self._sin_cached = angle.cos().to(dtype), angle.sin().to(dtype)
            return
        if scale.dtype != torch.float32:
            scale = self._compute_scale(device)
        power = (position - seqlen // 2) / self.scale_base
        growth = scale.to(position.device) ** power[:, None]
        self._cos_cached = (angle.cos() * growth).to(dtype)
        self._sin_cached = (angle.sin() * growth).to(dtype)
        self._cos_k_cached = (angle.cos() / growth).to(dtype)
        self._sin_k_cached = (angle.sin() / growth).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotates in place.

        Args:
            qkv: as `apply_rotary_emb_qkv_`; with kv it is q, (batch, seqlen, heads, head_dim).
            kv: None, or (batch, seqlen, 2, heads_kv, head_dim).
            seqlen_offset: what to add to each position, one for all or int (batch,).
            max_seqlen: tables are made for this many positions; needed where seqlen_offset is a
                tensor, because rows past the tables stay as they are.
            num_heads_q: as `apply_rotary_emb_qkv_`.

        Returns:
            qkv, or (q, kv).
        """
        longest = max_seqlen
        if longest is None and isinstance(seqlen_offset, int):
            longest = qkv.shape[1] + seqlen_offset
        if longest is not None:
            self._update_cos_sin_cache(longest, device=qkv.device, dtype=qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise ValueError("max_seqlen = None with a tensor seqlen_offset, expected an integer")
        cos_k, sin_k = self._cos_k_cached, self._sin_k_cached  # None without XPos
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        kv = apply_rotary_emb_kv_(
            kv,
            cos if cos_k is None else cos_k,
            sin if sin_k is None else sin_k,
            self.interleaved,
            seqlen_offset,
        )
        return q, kv


if not TYPE_CHECKING:
    __getattr__ = _absent.attribute(__name__, __all__)
