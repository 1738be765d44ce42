"""Attention in float64, naively, from its definition, and the rule by which results are judged.

    s_ij = scale * q_i . k_j;  softcap c: c * tanh(s / c);  ALiBi: - slope * |position(i) - j|
    position(i) = i + seqlen_k - seqlen_q;  i sees j when position(i) - left <= j <= position(i) +
    right P = softmax(s) over the keys that i sees;  out = (P * keep / (1 - p)) v;  lse_i = log
    sum_j exp(s_ij)

A row that sees no key has out 0, lse -infinity and gradients 0. Nothing here comes from the
library.

The same code with a dtype to round to is the comparator: attention as plain tensor operations would
do it, each operation's result rounded to that dtype. A result passes when its largest error against
float64 is at most `factor` times the comparator's, plus 1e-5 (docs/semantics.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

OUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
ALIBI_GRADIENT_FACTOR = 8.0


@dataclass
class Result:
    """What attention and its derivative give; gradients are None if dout was not given.

    size: for each row of lse, the largest sum of absolute terms of a score: what its rounding
        errors scale with.
    """

    out: Array
    lse: Array
    size: Array
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None


def visible(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool = False,
    window: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int = 0,
    offset: int | None = None,
    prefix: int = 0,
    window_signed: bool = False,
) -> Array:
    """bool (seqlen_q, seqlen_k): which keys each query sees. offset: where query 0 stands."""
    offset = seqlen_k - seqlen_q if offset is None else offset
    position = np.arange(seqlen_q)[:, None] + offset
    keys = np.arange(seqlen_k)[None, :]
    seen = np.ones((seqlen_q, seqlen_k), bool)
    if causal:
        seen &= keys <= position
    signed = window_signed or None in window
    if window[0] is not None and (signed or window[0] >= 0):
        seen &= keys >= position - window[0]
    if window[1] is not None and (signed or window[1] >= 0):
        seen &= keys <= position + window[1]
    if attention_chunk > 0:
        seen &= keys // attention_chunk == position // attention_chunk
    return seen | (keys < prefix)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    dropout_p: float = 0.0,
    keep: Array | None = None,
    attention_chunk: int = 0,
    offset: int | None = None,
    prefix: int = 0,
    window_signed: bool = False,
    round_to: Any = None,
) -> Result:
    """Forward, and backward if dout is given. Layouts as in strobe.attention, without varlen.

    keep: bool (batch, heads, seqlen_q, seqlen_k), with dropout_p. offset: the position of the first
    query; prefix: keys that all queries see. round_to: the comparator's dtype.
    """
    work: Any = np.float64 if round_to is None else np.float32

    def r(x: Array) -> Array:
        return x if round_to is None else x.astype(round_to).astype(work)

    def heads_first(x: Array) -> Array:
        return np.ascontiguousarray(np.moveaxis(x.astype(work), 1, 2))

    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1:3]
    group = heads // heads_kv
    qh = heads_first(q)
    kh = np.repeat(heads_first(k), group, axis=1)
    vh = np.repeat(heads_first(v), group, axis=1)
    factor = work(1 / np.sqrt(head_dim) if scale is None else scale)

    with np.errstate(all="ignore"):
        score = r(r(qh @ kh.swapaxes(2, 3)) * factor)
        size = np.abs(factor) * (np.abs(qh) @ np.abs(kh).swapaxes(2, 3))
        slope = np.ones_like(score)
        if softcap > 0:
            t = r(np.tanh(r(score / work(softcap))))
            score = r(t * work(softcap))
            slope = r(1 - r(t * t))
        if alibi_slopes is not None:
            slopes = np.broadcast_to(alibi_slopes.astype(work), (batch, heads))[:, :, None, None]
            first = seqlen_k - seqlen_q if offset is None else offset
            position = np.arange(seqlen_q)[:, None] + first
            bias = r(slopes * np.abs(position - np.arange(seqlen_k)[None, :]).astype(work))
            score = r(score - bias)
            size = size + np.abs(bias)
        seen = np.broadcast_to(
            visible(
                seqlen_q, seqlen_k, causal, window, attention_chunk, offset, prefix, window_signed
            ),
            score.shape,
        )
        any_seen = seen.any(-1)
        score = np.where(seen, score, -np.inf)
        largest = score.max(-1, initial=-np.inf)
        weight = np.where(seen, np.exp(score - largest[..., None]), 0)
        total = weight.sum(-1)
        lse = np.where(any_seen, largest + np.log(total), -np.inf)
        weight = np.where(seen, r(weight / total[..., None]), 0)
        # Keys that are not seen take no part, whatever stands there, so products with them are left
        # out.
        keep_scale = np.ones_like(score)
        if dropout_p > 0:
            assert keep is not None
            keep_scale = keep.astype(work) / work(1 - dropout_p)
        dropped = r(weight * keep_scale)
        out = r(_masked_product(dropped, vh, seen))
        result = Result(
            np.moveaxis(out, 2, 1),
            lse,
            np.where(seen, size, 0).max(-1, initial=0).astype(np.float64),
        )
        if dout is None:
            return result

        g = heads_first(dout)
        dv = r(dropped.swapaxes(2, 3) @ g)
        dweight = r(r(g @ vh.swapaxes(2, 3)) * keep_scale)
        mean = (dweight * weight).sum(-1, keepdims=True)
        dscore = r(weight * (dweight - mean))
        if dlse is not None:
            dscore = r(dscore + weight * dlse.astype(work)[..., None])
        dscore = r(r(np.where(seen, dscore, 0) * slope) * factor)
        dq = r(dscore @ kh)
        dk = r(dscore.swapaxes(2, 3) @ qh)

        def ungroup(x: Array) -> Array:
            return r(x.reshape(batch, heads_kv, group, *x.shape[2:]).sum(2))

        result.dq = np.moveaxis(dq, 2, 1)
        result.dk = np.moveaxis(ungroup(dk), 2, 1)
        result.dv = np.moveaxis(ungroup(dv), 2, 1)
        return result


def _masked_product(weight: Array, v: Array, seen: Array) -> Array:
    """weight @ v, in which 0 * NaN and 0 * infinity count only where the key is seen."""
    if np.isfinite(v).all():
        product: Array = weight @ v
        return product
    terms = np.where(seen[..., None], weight[..., None] * v[:, :, None], 0)
    total: Array = terms.sum(3)
    return total


def varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    alibi_slopes: Array | None = None,
    keep: Array | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    q_position: Array | None = None,
    prefix: Array | None = None,
    **options: Any,
) -> Result:
    """`attention` for each sequence of a packed batch. Rows not in use: zeros, lse -inf."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    lse = np.full(q.shape[1::-1], -np.inf)
    result = Result(out, lse, np.zeros(lse.shape))
    if dout is not None:
        result.dq, result.dk, result.dv = (np.zeros(x.shape) for x in (q, k, v))
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        if seqused_q is not None:
            rows = slice(rows.start, rows.start + int(seqused_q[b]))
        if seqused_k is not None:
            keys = slice(keys.start, keys.start + int(seqused_k[b]))
        lengths = (rows.stop - rows.start, keys.stop - keys.start)
        slopes = alibi_slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[b]
        piece = attention(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            dout=None if dout is None else dout[None, rows],
            dlse=None if dlse is None else dlse[None, :, rows],
            alibi_slopes=slopes,
            keep=None if keep is None else keep[b : b + 1, :, : lengths[0], : lengths[1]],
            offset=None if q_position is None else int(q_position[b]),
            prefix=0 if prefix is None else int(prefix[b]),
            **options,
        )
        result.out[rows] = piece.out[0]
        result.lse[:, rows] = piece.lse[0]
        result.size[:, rows] = piece.size[0]
        if result.dq is not None and piece.dq is not None:
            result.dq[rows] = piece.dq[0]
        for name in ("dk", "dv"):
            if getattr(result, name) is not None:
                getattr(result, name)[keys] = getattr(piece, name)[0]
    return result


def dense(
    q: Array,
    k: Array,
    v: Array,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    **options: Any,
) -> Result:
    """`varlen` for a dense batch, of which each entry has lengths and positions of its own."""
    batch, seqlen_q = q.shape[:2]
    found = varlen(
        q.reshape(-1, *q.shape[2:]),
        k.reshape(-1, *k.shape[2:]),
        v.reshape(-1, *v.shape[2:]),
        np.arange(batch + 1) * seqlen_q,
        np.arange(batch + 1) * k.shape[1],
        dout=None if dout is None else dout.reshape(-1, *dout.shape[2:]),
        dlse=None if dlse is None else np.concatenate(list(dlse), axis=1),
        **options,
    )
    size = found.size.reshape(-1, batch, seqlen_q).swapaxes(0, 1)
    lse = found.lse.reshape(-1, batch, seqlen_q).swapaxes(0, 1)
    result = Result(found.out.reshape(*q.shape[:-1], v.shape[-1]), lse, size)
    if found.dq is not None and found.dk is not None and found.dv is not None:
        result.dq = found.dq.reshape(q.shape)
        result.dk, result.dv = found.dk.reshape(k.shape), found.dv.reshape(v.shape)
    return result


def check(name: str, got: Array, wanted: Array, plain: Array, factor: float) -> None:
    """The rule of the module's docstring; NaN and infinities must stand in the same places."""
    assert got.shape == wanted.shape, f"{name}: shape {got.shape}, expected {wanted.shape}"
    with np.errstate(invalid="ignore"):
        error = np.abs(plain.astype(np.float64) - wanted)
    allowed = factor * float(error.max(initial=0, where=np.isfinite(error))) + 1e-5
    check_within(name, got, wanted, np.full(wanted.shape, allowed))


def check_lse(name: str, got: Array, wanted: Array, size: Array) -> None:
    """lse is float32 in every dtype; its rounding errors scale with the terms of the scores."""
    check_within(name, got, wanted, 1e-5 + 4e-6 * size)


def check_within(name: str, got: Array, wanted: Array, allowed: Array) -> None:
    assert got.shape == wanted.shape, f"{name}: shape {got.shape}, expected {wanted.shape}"
    result = got.astype(np.float64)
    finite = np.isfinite(wanted)
    with np.errstate(invalid="ignore"):
        same = np.where(np.isnan(wanted), np.isnan(result), result == wanted)
        ratio = np.where(finite, np.abs(result - wanted) / allowed, np.where(same, 0, np.inf))
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    if ratio.size and ratio.max() > 1:
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        raise AssertionError(
            f"{name}{[int(i) for i in at]} = {result[at]:.9g}, expected {wanted[at]:.9g} "
            f"within {allowed[at]:.3g}"
        )
