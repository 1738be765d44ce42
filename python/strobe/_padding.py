"""Attention of dense rows that hold padding or several sequences, as transformers hands them over.

A mask is one int32 tensor, (batch, 1, kind, 1 + keys), made by `encode`. Along its last axis are
the key position of the first query, and then for each key the number of its sequence in the row,
from 1 on, or 0 where no query looks. The length of the third axis, along which nothing differs,
says what is known without reading: see `Kind`. Having four axes, it passes through
transformers' functions for masks as it is. It never has the shape of scores, so that a model that
adds it to them fails, and does not go on with wrong numbers.

`attend` is `torch.ops.strobe.masked_attention`, an operator of its own: which rows take part is
seen when it runs, and a compiler need not know.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from . import _autograd, _flash_attn, _operators, _options
from ._errors import Unsupported
from ._kvcache import attention_with_kvcache

Tensor: TypeAlias = torch.Tensor

# -------------------------------------------------------------------------------------------- masks


class Kind(NamedTuple):
    """What is known of a mask without reading it."""

    causal: bool
    documents: bool  # rows hold several sequences, and no padding
    whole: bool  # all keys are seen, and the last query stands at the last one

    def encoded(self) -> int:
        """The length of a mask's third axis."""
        return 2 + self.causal + 2 * self.documents + 4 * self.whole

    @classmethod
    def of(cls, mask: Tensor) -> Kind:
        bits = mask.shape[2] - 2
        return cls(bool(bits & 1), bool(bits & 2), bool(bits & 4))


def encode(kind: Kind, numbers: Tensor, position: int | Tensor) -> Tensor:
    """The mask. numbers: (batch, keys); position: that of the first query among the keys.

    In inference mode too it is a tensor whose writes are counted, so that `layout_of` can keep what
    it has read of it, and need not wait for a GPU in each layer.
    """
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return encode(kind, numbers, position)
    first = torch.zeros_like(numbers[:, :1], dtype=torch.int32) + position
    row = torch.cat((first.to(torch.int32), numbers.to(torch.int32)), 1)
    return row[:, None, None].expand(-1, 1, kind.encoded(), -1)


def is_encoded(mask: Tensor, keys: int) -> bool:
    """Whether `encode` made this mask for so many keys. One that hides nothing is for any."""
    shape = mask.shape
    if mask.dtype != torch.int32 or mask.ndim != 4 or shape[1] != 1 or not 2 <= shape[2] <= 9:
        return False
    return shape[3] == keys + 1 or Kind.of(mask) == Kind(False, False, True)


# --------------------------------------------------------------------------------- which rows where


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the sequences of a mask are. Arrays are of one number for each row of the batch, or
    for each sequence, if there are several in a row (`offsets`).
    """

    queries: Tensor | None  # (batch, seqlen_q): rows in the order in which kernels get them
    keys: Tensor | None  # (batch, keys)
    used_q: Tensor | None
    used_k: Tensor | None
    position: Tensor | None  # of the first query, in a sequence that is not causal
    bounds: tuple[Tensor, Tensor, Tensor] | None  # first key, end of keys, position: without a copy
    poison: Tensor | None  # bool: rows that hold what nobody has looked at, and cannot be computed
    offsets: Tensor | None = None
    longest: int = 0


def _documents(numbers: Tensor) -> Layout:
    """Of sequences that lie end to end."""
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers.diff(dim=1) != 0
    places = begins.flatten().nonzero()[:, 0]
    offsets = torch.cat((places, places.new_full((1,), numbers.numel())))
    longest = int(offsets.diff().max()) if numbers.numel() else 0
    offsets = offsets.to(torch.int32)
    return Layout(*(None,) * 7, offsets=offsets, longest=longest)


def _used_first(used: Tensor) -> Tensor:
    """Rows in use before the others; both in order."""
    return torch.argsort(~used, dim=1, stable=True)


def _layout(mask: Tensor, seqlen_q: int, windowed: bool, look: bool) -> Layout:
    """look: whether values may be read, for which a GPU is waited for."""
    kind, row = Kind.of(mask), mask[:, 0, 0]
    first, numbers = row[:, 0], row[:, 1:]
    if kind.documents:
        return _documents(numbers)
    seen = numbers > 0
    keys = seen.shape[1]
    column = torch.arange(keys, dtype=torch.int32, device=mask.device)
    used_k = seen.sum(1, dtype=torch.int32)
    ends = (seen * (column + 1)).amax(1)
    begins = torch.where(seen, column, keys).amin(1).clamp(max=ends).to(torch.int32)
    gaps = ends - begins != used_k
    has_gaps = any_before = True
    if look:
        has_gaps, any_before = torch.stack((gaps.any(), (begins > 0).any())).tolist()
        if has_gaps and windowed:
            raise Unsupported(
                "a sliding window over a sequence with padding inside, expected padding at its "
                'ends: pad on the left, or use attn_implementation="sdpa"'
            )
    bounds = None if look and has_gaps else (begins, ends, first - begins)
    moved = has_gaps or any_before
    order = _used_first(seen) if moved else None
    poison = None if look else gaps
    if not kind.causal:  # keys may be another model's, whose padding is not the queries'
        position = first - begins if windowed else None
        return Layout(None, order, None, used_k, position, bounds, poison)
    place = first[:, None] + torch.arange(seqlen_q, dtype=torch.int32, device=mask.device)
    inside = (place >= 0) & (place < keys)
    own = seen.gather(1, place.clamp(0, keys - 1).long()) & inside
    queries = _used_first(own) if moved else None
    return Layout(queries, order, own.sum(1, dtype=torch.int32), used_k, None, bounds, poison)


def layout_of(mask: Tensor, seqlen_q: int, windowed: bool, keep: bool) -> Layout:
    """Of a mask and so many queries.

    keep: with the mask, for a model's other layers. Not in compiled code, where the same tensor may
    hold another mask the next time.
    """
    look = not (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    if mask.is_inference():  # a copy: nothing counts the writes to it, so nothing of it is kept
        return _layout(mask, seqlen_q, windowed, look)
    known: dict[Any, Layout] = mask.__dict__.get("strobe", {})
    key = (mask._version, seqlen_q, windowed)
    found = known.get(key)
    if found is None:
        found = _layout(mask, seqlen_q, windowed, look)
        if keep:
            mask.__dict__["strobe"] = {**known, key: found}
    return found


# ---------------------------------------------------------------------------------------- operators


def _taken(x: Tensor, rows: Tensor | None) -> Tensor:
    """x[b, rows[b]], for x (batch, length, heads, head_dim)."""
    if rows is None:
        return x
    batch = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[batch, rows]


def _put_back(x: Tensor, rows: Tensor | None) -> Tensor:
    """What `_taken` made x of."""
    if rows is None:
        return x
    return _taken(x, torch.argsort(rows, dim=1))


def _poisoned(x: Tensor, layout: Layout, where: bool) -> Tensor:
    if layout.poison is None or not where:
        return x
    return torch.where(layout.poison[:, None, None, None], torch.nan, x)


def _every(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The options with their last one, sinks, which the dispatcher leaves out where it is None."""
    return (*options, None)[:8]


def _arguments(layout: Layout, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of attention_forward, after q, k and v."""
    rng_state, dropout_p, scale, causal, left, right, softcap, sinks = _every(options)
    plain = (dropout_p, scale, causal, left, right, softcap, False)
    if layout.offsets is not None:
        longest = layout.longest
        tail = () if sinks is None else _options.positional(sinks=sinks)
        return (layout.offsets, layout.offsets, None, rng_state, longest, longest, *plain, *tail)
    tail = _options.positional(
        seqused_q=layout.used_q, seqused_k=layout.used_k, q_position=layout.position, sinks=sinks
    )
    return (None, None, None, rng_state, None, None, *plain, *tail)


_NO_SCALES: Final[dict[str, Tensor | None]] = {}


def _is_windowed(options: tuple[Any, ...]) -> bool:
    """Whether keys are counted, by which a query sees them."""
    _, _, _, causal, left, right, *_ = options
    return bool(left >= 0 or (right >= 0 and not causal))


def _in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    options: tuple[Any, ...],
    scales: dict[str, Tensor | None] = _NO_SCALES,
) -> Tensor | None:
    """Without a copy of the keys, where a cache's kernels will do. scales: of k and v that are
    codes.
    """
    if layout.bounds is None or not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return None
    begins, ends, position = layout.bounds
    _, _, scale, causal, left, right, softcap, sinks = _every(options)
    out: Tensor = attention_with_kvcache(
        q,
        k,
        v,
        seqused_k=ends,
        leftpad=begins,
        q_position=position,
        causal=causal,
        window=(left, right),
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        k_scale=scales.get("k_scale"),
        v_scale=scales.get("v_scale"),
    )
    return _poisoned(out, layout, True)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, in_place: bool, *options: Any
) -> tuple[Tensor, Tensor]:
    """The operator's kernel. lse is in the order of the layout."""
    windowed = _is_windowed(options)
    layout = layout_of(mask, q.shape[1], windowed, keep=False)
    if in_place:
        found = _in_place(q, k, v, layout, options)
        if found is not None:
            return found, q.new_empty(_lse_shape(q, mask), dtype=torch.float32)
    if layout.offsets is not None:
        q_, k_, v_ = (x.flatten(0, 1) for x in (q, k, v))
        out, lse = _operators.forward(q_, k_, v_, *_arguments(layout, options))
        return out.unflatten(0, q.shape[:2]), lse
    out, lse = _operators.forward(
        _taken(q, layout.queries),
        _taken(k, layout.keys),
        _taken(v, layout.keys),
        *_arguments(layout, options),
    )
    return _poisoned(_put_back(out, layout.queries), layout, windowed), lse


def _backward(*arguments: Any) -> Any:
    """(dq, dk, dv)."""
    return _computed(_operators.backward, *arguments)


def _sinks_backward(*arguments: Any) -> Any:
    """(dq, dk, dv, dsinks)."""
    return _computed(functools.partial(_operators.more_gradients, True, False), *arguments)


def _computed(
    kernel: Any,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor,
    in_place: bool,
    *options: Any,
) -> tuple[Tensor, ...]:
    layout = layout_of(mask, q.shape[1], _is_windowed(options), keep=False)
    arguments = _arguments(layout, options)
    if layout.offsets is not None:
        rows = [x.flatten(0, 1) for x in (dout, q, k, v, out)]
        found = kernel(rows[0], None, *rows[1:], lse, *arguments)
        given = zip(found[:3], (q, k, v), strict=True)
        return (*(x.unflatten(0, of.shape[:2]) for x, of in given), *found[3:])
    dout, q, out = (_taken(x, layout.queries) for x in (dout, q, out))
    k, v = _taken(k, layout.keys), _taken(v, layout.keys)
    dq, dk, dv, *dsinks = kernel(dout, None, q, k, v, out, lse, *arguments)
    return (
        _put_back(dq, layout.queries),
        _put_back(dk, layout.keys),
        _put_back(dv, layout.keys),
        *dsinks,
    )


def _lse_shape(q: Tensor, mask: Tensor) -> tuple[int, ...]:
    batch, seqlen, heads = q.shape[:3]
    return (heads, batch * seqlen) if Kind.of(mask).documents else (batch, heads, seqlen)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(_lse_shape(q, mask), dtype=torch.float32)


def _fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _fake_sinks_backward(dout: Tensor, q: Tensor, *others: Any) -> tuple[Tensor, ...]:
    dsinks = q.new_empty((q.shape[2],), dtype=torch.float32)
    return *_fake_backward(dout, q, *others), dsinks


def _gradients(dout: Tensor | None, _: Any, *saved: Any) -> Any:
    """Of q, k and v; lse has none."""
    return (None, None, None) if dout is None else _masked_backward(dout, *saved)


def _sinks_gradients(wanted: bool, dout: Tensor | None, _: Any, *saved: Any) -> Any:
    """Likewise, and of sinks, which are wanted where this is called."""
    return (None, None, None) if dout is None else _masked_sinks_backward(dout, *saved)


_OPTIONS: Final = (
    "Tensor mask, bool in_place, Tensor? rng_state, float dropout_p, float? scale, bool causal, "
    "SymInt window_left, SymInt window_right, float softcap, Tensor? sinks=None"
)
_SINKS: Final = 9  # its place there
_masked_backward: Final = _operators.define(
    "masked_attention_backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    _operators.refuse_double_backward,
    query=2,
)
_masked_sinks_backward: Final = _operators.define(
    "masked_attention_sinks_backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _sinks_backward,
    _fake_sinks_backward,
    _operators.refuse_double_backward,
    query=2,
)
_masked: Final = _operators.define(
    "masked_attention",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
    _operators.derivative_by(_gradients, _sinks_gradients, (_SINKS,)),
    _operators.setup,
    query=0,
)

# ------------------------------------------------------------------------------------------ callers

# A prompt of more queries is worth a copy of its keys: the kernels for keys in a cache are for few.
_FEW_QUERIES: Final = 16


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    options: dict[str, Any],
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention under an encoded mask that is not whole.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim).
        mask: of `encode`, for k's keys.
        options: dropout_p, softmax_scale, causal, window_size and softcap of `strobe.flash_attn`.
        sinks: float32, (heads,), as in `strobe.torch.attention`.

    Returns:
        (batch, seqlen_q, heads, head_dim_v). Rows of padding in front of a causal sequence are 0.

    Raises:
        Unsupported: a window over padding inside a sequence.
    """
    q, k, v = _flash_attn.autocast(q, k, v)
    dropout_p, softcap = options["dropout_p"], options["softcap"]
    rng_state = None
    if dropout_p != 0:
        _flash_attn.check_dropout(dropout_p, softcap)
        rng_state = _operators.dropout_state(device=q.device)
    given = [x for x in (q, k, v, sinks) if x is not None]
    tracked = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    few = q.shape[1] <= _FEW_QUERIES and not Kind.of(mask).documents
    in_place = few and not tracked and dropout_p == 0
    left, right = options["window_size"]
    scale, causal = options["softmax_scale"], options["causal"]
    plain = (rng_state, dropout_p, scale, causal, left, right, softcap, sinks)
    compiling = torch.compiler.is_compiling()
    if not compiling and _autograd.differentiates_forward():
        _autograd.refuse_tangents(*given)
    if not compiling and _autograd.is_transformed():
        in_place = False
    elif not compiling and not _flash_attn.is_in_dispatch_mode():
        layout = layout_of(mask, q.shape[1], _is_windowed(plain), keep=True)
        if in_place:
            found = _in_place(q, k, v, layout, plain)
            if found is not None:
                return found
    out: Tensor
    out, _ = _masked(q, k, v, mask, in_place, *plain)
    return out


# -------------------------------------------------------------------------------------------- codes


class Codes(torch.Tensor):  # type: ignore[misc]
    """Keys or values of a quantised cache as a model of transformers hands them from its cache to
    attention: codes (batch, heads_kv, rows, bytes), with scales and the rows in use. A model that
    computes with them, and any attention but Strobe's, would take codes for values: every function
    of PyTorch is refused.
    """

    codes: Tensor
    scale: Tensor | None  # (batch, heads_kv, rows)
    used: int

    @staticmethod
    def of(codes: Tensor, scale: Tensor | None, used: int) -> Codes:
        """codes: a plain tensor, which this one is in the place of."""
        made: Codes = torch.Tensor._make_subclass(Codes, codes)
        made.codes, made.scale, made.used = codes, scale, used
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called for each of them."""
        if function in _ASKED_OF_CODES:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise Unsupported(
            'this cache holds codes, with which attn_implementation="strobe" alone can compute: '
            "load this model so, or use transformers' own StaticCache (here "
            f"{getattr(function, '__name__', function)} was called)"
        )


_TENSOR: Final[Any] = torch.Tensor  # whose attributes are descriptors here
_ASKED_OF_CODES: Final = (
    *(
        getattr(_TENSOR, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")
    ),
    _TENSOR.size,
    _TENSOR.__repr__,
)


def attend_to_codes(
    q: Tensor,
    k: Codes,
    v: Codes,
    mask: Tensor | None,
    options: dict[str, Any],
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` over keys and values of a quantised cache. mask: None where the model has none.

    Raises:
        Unsupported: a gradient, dropout, several sequences in a row, or padding inside of one.
    """
    if torch.is_grad_enabled() and q.requires_grad:
        raise Unsupported(
            "attention over a quantised cache has no gradient, expected torch.no_grad() around the "
            "model"
        )
    if options["dropout_p"] != 0:
        raise Unsupported(
            f"dropout = {options['dropout_p']} over a quantised cache, expected 0 (model.eval())"
        )
    left, right = options["window_size"]
    scale, causal, softcap = options["softmax_scale"], options["causal"], options["softcap"]
    plain = (None, 0.0, scale, causal, left, right, softcap, sinks)
    kind = None if mask is None else Kind.of(mask)
    if kind is None or kind.whole:
        rows = k.used if kind is None else k.shape[2]
        ends = torch.full((q.shape[0],), rows, dtype=torch.int32, device=q.device)
        layout = Layout(*(None,) * 5, (torch.zeros_like(ends), ends, ends - q.shape[1]), None)
    else:
        assert mask is not None
        layout = layout_of(mask, q.shape[1], _is_windowed(plain), keep=True)
    scales = {
        name: None if x.scale is None else x.scale.transpose(1, 2)
        for name, x in (("k_scale", k), ("v_scale", v))
    }
    keys, values = k.codes.transpose(1, 2), v.codes.transpose(1, 2)
    straight = q if q.stride(-1) == 1 else q.contiguous()
    out = _in_place(straight, keys, values, layout, plain, scales)
    if out is None:
        what = "several sequences in a row" if layout.offsets is not None else "padding inside"
        raise Unsupported(
            f"{what} over a quantised cache, expected one sequence a row, padded at its ends"
        )
    return out
