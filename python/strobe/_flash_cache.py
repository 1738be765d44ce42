"""What the functions of `flash_attn` and `flash_attn_3` with a key-value cache share: the operator
`torch.ops.strobe.attention_with_kvcache`, the checks of values on GPUs, and messages.
"""

from __future__ import annotations

import os
from typing import Any, Final, TypeAlias

import torch

from . import _core
from ._errors import InvalidArgument, Unsupported, renamed, shown
from ._flash_attn import as_integer, as_number, check_tensor
from ._operators import _LIBRARY

Tensor: TypeAlias = torch.Tensor

# The arrays of `_core.kvcache`, in its order: q, k and v, out, and these.
_ARRAYS: Final = (
    "seqused_k",
    "block_table",
    "cache_batch_idx",
    "leftpad",
    "k_new",
    "v_new",
    "cu_seqlens_k_new",
    "rotary_cos",
    "rotary_sin",
    "rotary_position",
    "cu_seqlens_q",
    "seqused_q",
    "q_position",
    "prefix",
    "alibi_slopes",
)
# What the library calls things, and what flash_attn calls them.
NAMES: Final = {
    "k": "k_cache",
    "v": "v_cache",
    "k_new": "k",
    "v_new": "v",
    "seqused_k": "cache_seqlens",
    "leftpad": "cache_leftpad",
    "scale": "softmax_scale",
    "window": "window_size",
}
_SKIP: Final = "STROBE_SKIP_VALUE_CHECKS"


def call(
    q: Any,
    k: Any,
    v: Any,
    arrays: dict[str, Any],
    max_seqlen_q: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    attention_chunk: Any = 0,
    rotary_interleaved: Any = False,
    names: dict[str, str] = NAMES,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries with a cache, without a gradient.

    arrays: those of `_ARRAYS` that are given; names: what the caller calls them.
    """
    for name, x in (("q", q), ("k", k), ("v", v), *arrays.items()):
        if not isinstance(x, torch.Tensor) and (x is not None or name in ("q", "k", "v")):
            raise InvalidArgument(
                f"{names.get(name, name)} is of type {type(x).__name__:.60}, expected a torch.Tensor"
            )
    if max_seqlen_q is not None:
        max_seqlen_q = as_integer("max_seqlen_q", max_seqlen_q)
    if softmax_scale is not None:
        softmax_scale = as_number("softmax_scale", softmax_scale)
    try:
        left, right = window_size
    except Exception:
        raise InvalidArgument(
            f"window_size = {shown(window_size)}, expected a pair (left, right) of integers"
        ) from None
    given = tuple(map(arrays.get, _ARRAYS))
    options = (
        max_seqlen_q,
        softmax_scale,
        causal,
        as_integer("window_size[0]", left),
        as_integer("window_size[1]", right),
        as_number("softcap", softcap),
        as_integer("attention_chunk", attention_chunk),
        rotary_interleaved,
    )
    if torch.compiler.is_dynamo_compiling() or not _core.unwatched():
        found: tuple[Tensor, Tensor] = _operator(q, k, v, *given, *options)
        return found
    try:
        return _kernel(q, k, v, *given, *options)
    except InvalidArgument as error:
        # flash_attn copies what is not contiguous, but for the cache, which it writes to.
        straight = [_straight(x, name) for name, x in zip(("q", *_ARRAYS), (q, *given), strict=True)]
        if all(a is b for a, b in zip(straight, (q, *given), strict=True)):
            raise InvalidArgument(renamed(str(error), names)) from None
    except Unsupported as error:
        raise Unsupported(renamed(str(error), names)) from None
    try:
        return _kernel(straight[0], k, v, *straight[1:], *options)
    except InvalidArgument as error:
        raise InvalidArgument(renamed(str(error), names)) from None


def _straight(x: Any, name: str) -> Any:
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.ndim == 0:
        return x
    whole = name not in ("q", "k_new", "v_new", "block_table")
    if x.is_contiguous() if whole else x.stride(-1) == 1 and 0 not in x.stride():
        return x
    return x.contiguous()


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: Any,
) -> tuple[Tensor, Tensor]:
    """The kernel of the operator: its arguments are those of `_SCHEMA`."""
    given = more[:15]
    max_seqlen_q, scale, causal, left, right, softcap, chunk, interleaved = more[15:]
    if q.is_cuda and not os.environ.get(_SKIP) and not torch.cuda.is_current_stream_capturing():
        moving = bool(causal) or (left, right) != (-1, -1) or chunk > 0
        check_values(q, k, dict(zip(_ARRAYS, given, strict=True)), moving)
    found: tuple[Tensor, Tensor] = _core.kvcache(
        q,
        k,
        v,
        None,
        *given,
        max_seqlen_q,
        causal,
        (left, right),
        scale,
        softcap,
        chunk,
        interleaved,
        False,
        False,
        0,
        True,
    )
    return found


# ------------------------------------------------------------------------------------------- values


def check_values(q: Tensor, k: Tensor, arrays: dict[str, Any], moving: bool) -> None:
    """Refuses lengths, indices and pages out of range: for tensors on GPUs, where a launch cannot.

    It waits for the device, so not while a graph is captured; STROBE_SKIP_VALUE_CHECKS=1 in the
    environment leaves it out. The library itself checks what is in the CPU's memory. moving:
    whether queries have positions of their own, for the rotary embedding.
    """
    offsets, table, new = (arrays.get(n) for n in ("cu_seqlens_q", "block_table", "k_new"))
    batch = q.shape[0] if offsets is None else offsets.shape[0] - 1
    if any(
        x.shape != (batch,) or x.dtype != torch.int32 or x.device != q.device
        for name, x in arrays.items()
        if x is not None and name in ("seqused_k", "leftpad", "cache_batch_idx", "rotary_position")
    ):
        return  # what is wrong with these the launch itself says
    if k.ndim != 4 or (table is not None and (table.ndim != 2 or table.shape[0] != batch)):
        return
    entries, rows = k.shape[:2]
    capacity = rows if table is None else rows * table.shape[1]
    zeros = torch.zeros(batch, dtype=torch.int64, device=q.device)
    added: Any = 0
    if new is not None:
        packed = arrays.get("cu_seqlens_k_new")
        added = new.shape[1] if packed is None else packed.diff().long()
    used = zeros + (capacity if arrays.get("seqused_k") is None else arrays["seqused_k"])
    pad = zeros if arrays.get("leftpad") is None else arrays["leftpad"].long()
    suffix = " (the capacity less the sequence's new keys)" if new is not None else ""
    checks = [
        ("seqused_k", used, zeros + capacity - added, suffix),
        ("leftpad", pad, used, " (the sequence's seqused_k)"),
    ]
    if arrays.get("cache_batch_idx") is not None:
        checks.append(("cache_batch_idx", arrays["cache_batch_idx"], zeros + entries - 1, ""))
    if table is not None and table.numel() > 0:
        column = torch.arange(table.shape[1], device=q.device)
        keys = (used + added)[:, None]
        seen = (column >= pad[:, None] // rows) & (column * rows < keys) & (pad[:, None] < keys)
        checks.append(("block_table", torch.where(seen, table, 0), seen * 0 + entries - 1, ""))
    if arrays.get("rotary_cos") is not None:
        start = arrays.get("rotary_position")
        start = used - pad if start is None else start.long()
        queries = zeros + q.shape[1] if offsets is None else offsets.diff().long()
        steps = torch.maximum(zeros + added, queries if moving else queries.clamp(max=1))
        most = zeros + arrays["rotary_cos"].shape[0] - steps
        start = torch.where(steps > 0, start, 0)
        most = torch.where(steps > 0, most, 0)
        checks.append(("rotary_position", start, most, " (a row of rotary_cos)"))
    bad = torch.stack([((x < 0) | (x > most)).any() for _, x, most, _ in checks]).tolist()
    for (name, x, most, because), wrong in zip(checks, bad, strict=True):
        if not wrong:
            continue
        at = tuple(((x < 0) | (x > most)).nonzero()[0].tolist())
        raise InvalidArgument(
            f"{name}{''.join(f'[{n}]' for n in at)} = {int(x[at])}, expected 0 to {int(most[at])}"
            + because
        )


# ----------------------------------------------------------------------------------------- operator

_SCHEMA: Final = (
    "attention_with_kvcache(Tensor q, Tensor(a!) k, Tensor(b!) v, "
    + "".join(f"{'Tensor?'} {name}, " for name in _ARRAYS)
    + "SymInt? max_seqlen_q, float? scale, bool causal, SymInt window_left, SymInt window_right, "
    "float softcap, SymInt attention_chunk, bool rotary_interleaved) -> (Tensor, Tensor)"
)


def _fake(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(lse, dtype=torch.float32)


_LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention_with_kvcache", _kernel, _key)
torch.library.register_fake("strobe::attention_with_kvcache", _fake, lib=_LIBRARY)
_operator: Final = torch.ops.strobe.attention_with_kvcache.default


# ------------------------------------------------------------------------------- flash_attn's own


def lengths(name: str, given: Any, batch: int, device: torch.device) -> Any:
    """cache_seqlens, which may be one integer for all sequences."""
    if given is None or isinstance(given, torch.Tensor):
        return given
    return torch.full((batch,), as_integer(name, given), dtype=torch.int32, device=device)


def check_queries(q: Any, ndim: int) -> Any:
    """The shape of q, which is a tensor of so many axes."""
    axes = ("batch", "seqlen_q", "heads", "head_dim") if ndim == 4 else ("total_q", "heads", "head_dim")
    if not isinstance(q, torch.Tensor) or q.ndim != ndim:
        check_tensor("q", q, axes)
    return q.shape


def rotary_start(arrays: dict[str, Any]) -> None:
    """flash_attn counts positions from the cache's first row, a left pad included."""
    if arrays["leftpad"] is not None and arrays["rotary_cos"] is not None:
        arrays["rotary_position"] = arrays["seqused_k"]


def paged_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    block_table: Any,
    softmax_scale: Any = None,
    causal: Any = False,
    window_size: Any = (-1, -1),
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    seqused_k: Any = None,
    leftpad_k: Any = None,
) -> tuple[Tensor, Tensor]:
    """flash_attn_varlen_func with a block_table: (out, lse)."""
    if torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in (q, k, v)
    ):
        raise Unsupported(
            "block_table with q, k or v that requires a gradient: a paged cache has no backward "
            "pass, expected torch.no_grad() or tensors that require none"
        )
    if seqused_k is None and isinstance(cu_seqlens_k, torch.Tensor) and cu_seqlens_k.ndim == 1:
        seqused_k = cu_seqlens_k.diff()
    arrays = {
        "cu_seqlens_q": cu_seqlens_q,
        "seqused_k": seqused_k,
        "block_table": block_table,
        "leftpad": leftpad_k,
        "alibi_slopes": alibi_slopes,
    }
    names = {**NAMES, "k": "k", "v": "v", "leftpad": "leftpad_k"}
    names["seqused_k"] = "the length that cu_seqlens_k or seqused_k gives"
    return call(
        q, k, v, arrays, max_seqlen_q, softmax_scale, causal, window_size, softcap, names=names
    )
