"""What the functions of `flash_attn` and `flash_attn_3` with a key-value cache share: the operator
`torch.ops.strobe.attention_with_kvcache`, the checks of values on GPUs, and messages.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import torch

from . import _core
from ._arrays import cannot_be_read, check_memory
from ._errors import Error, InvalidArgument, Unsupported, renamed
from ._flash_attn import (
    NO_SINKS,
    NO_WINDOW,
    Result,
    Sinks,
    as_flag,
    as_integer,
    as_limit,
    as_number,
    check_eager,
    check_tensor,
    diagnose,
    in_our_words,
    limited,
    named_sinks,
    side_of_window,
    taken,
    words_of,
)
from ._merge import is_float
from ._operators import (
    _LIBRARY,
    came_by,
    define,
    dtype_of_out,
    is_transformed,
    new_results,
    refused_gradient,
)
from ._options import CACHE_ROWS, row_of
from ._packed_mask import check_made_for, check_made_for_packed
from ._plans import NoSequences, answer, maybe_pages, no_lengths
from ._quantised import blocks_in
from ._values import NO_LIMIT, checked_on_gpus, constant, integer, pair

Tensor: TypeAlias = torch.Tensor

# The arrays that a call may have besides q, k and v, in the operator's order.
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
# And the rest, with PyTorch's types.
_TYPES: Final = {row.name: row.kind.operator_type for row in CACHE_ROWS}
_PLAIN: Final = {
    "max_seqlen_q": _TYPES["max_seqlen_q"],
    "scale": _TYPES["scale"],
    "causal": _TYPES["causal"],
    "window_left": _TYPES["window"],
    "window_right": _TYPES["window"],
    "softcap": _TYPES["softcap"],
    "attention_chunk": _TYPES["attention_chunk"],
    "rotary_interleaved": _TYPES["rotary_interleaved"],
}
# Last, so that a call may end before: the scales of a quantised cache, which an append writes.
_SCALES: Final = ("k_scale", "v_scale")
# And what few calls have, with their defaults; a dtype of out last, which may be None.
_MORE: Final = tuple(
    row for row in CACHE_ROWS if row.name not in {*_ARRAYS, *_PLAIN, *_SCALES, "window"}
)
_EVERY: Final = (*_ARRAYS, *_PLAIN, *_SCALES, *(row.name for row in _MORE), "out_dtype")
_CONVERTERS: Final = {"SymInt": as_integer, "float": as_number, "bool": as_flag}
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
# The types of all but out_dtype; and which of them are tensors.
_KINDS: Final = (
    dict.fromkeys(_ARRAYS, "Tensor?")
    | _PLAIN
    | dict.fromkeys(_SCALES, "Tensor?")
    | {row.name: row.kind.operator_type for row in _MORE}
)
_TENSORS: Final = tuple(name for name, kind in _KINDS.items() if kind == "Tensor?")
# Those of _ARRAYS that `check_values` reads a number for each sequence from.
_ONE_EACH: Final = ("seqused_k", "leftpad", "cache_batch_idx", "rotary_position", "seqused_q")


def call(
    q: Any,
    k: Any,
    v: Any,
    options: dict[str, Any],
    return_lse: Any = True,
    names: dict[str, str] = NAMES,
    recorded: bool = False,
    function: str = "flash_attn_with_kvcache",
    sinks: Sinks = NO_SINKS,
) -> Result:
    """out, or (out, lse), of queries with a cache, without a gradient.

    options: of `strobe.attention_with_kvcache`; names: what the caller calls them. recorded: as
    results that autograd knows, whose backward pass is refused. function: the caller.
    """
    if options["window"] is not NO_WINDOW:
        options["window"] = limited(options["window"])
    if options.get("alibi_slopes") is not None:
        constant("alibi_slopes", options["alibi_slopes"])
    if sinks[0] is not None or sinks[1] is not None:
        name, options["sinks"] = named_sinks(sinks)
        names = names | {"sinks": name}
    tracing = torch.compiler.is_dynamo_compiling()
    is_tensor = not tracing and not recorded and isinstance(q, torch.Tensor)
    if is_tensor and _core.unwatched(q, k, v) and not wants_value_checks(q):
        try:  # what is wrong here is said below
            found = _core.kvcache(q, k, v, None, return_lse, False, options)
        except InvalidArgument:
            pass
        except Error as error:
            raise type(error)(renamed(str(error), names)) from None
        except Exception:
            pass
        else:
            _core.came_by(function)
            return found
    every = {row.name: row.default for row in CACHE_ROWS} | options
    named = {"q": q, "k": k, "v": v} | {name: every[name] for name in _ARRAYS}
    for name, x in named.items():
        if not isinstance(x, torch.Tensor) and (x is not None or name in ("q", "k", "v")):
            raise InvalidArgument(
                f"{names.get(name, name)} is of type {type(x).__name__:.60}, "
                "expected a torch.Tensor"
            )
    return_lse = as_flag("return_softmax_lse", return_lse)
    every["window_left"], every["window_right"] = pair("window_size", every["window"], as_limit)
    given = [every[name] for name in _ARRAYS]
    for name, kind in _PLAIN.items():
        value, convert = every[name], _CONVERTERS[kind.rstrip("?")]
        optional = value is None and kind.endswith("?")
        given.append(None if optional else convert(names.get(name, name), value))
    if every["sinks"] is not None:
        named["sinks"] = every["sinks"]
        given += [every[name] for name in (*_SCALES, *(row.name for row in _MORE))]
    operator = _recorded if recorded else _operator
    if tracing:
        found = operator(q, k, v, *given)
        return found if return_lse else found[0]
    if is_transformed():
        raise Unsupported(
            "attention with a key-value cache under torch.func's transforms (vmap, grad) is not "
            "supported: a cache is written in place and has no backward pass"
        )
    kernel = _kernel if not recorded and _core.unwatched(q, k, v) else operator
    try:
        try:
            found = kernel(q, k, v, *given)
        except InvalidArgument as refused:
            # flash_attn copies what is not contiguous, but for the cache, which it writes to.
            straight = [_straight(name, named[name], refused) for name in ("q", *_ARRAYS)]
            if all(a is named[name] for name, a in zip(("q", *_ARRAYS), straight, strict=True)):
                raise
            found = kernel(straight[0], k, v, *straight[1:], *given[len(_ARRAYS) :])
    except Error as error:
        raise type(error)(renamed(str(error), names)) from None
    except Exception as error:
        theirs = {names.get(name, name): x for name, x in named.items() if x is not None}
        diagnose(theirs)
        found = in_our_words(error, **theirs)
        if found is error:
            found = cannot_be_read(names.get("k", "k"), k, error)
        raise found from None
    came_by(function, found[0])
    return found if return_lse else found[0]


def traced(
    q: Any, k: Any, v: Any, out: Any, out_dtype: Any, return_lse: Any, options: dict[str, Any]
) -> Result:
    """`strobe.attention_with_kvcache` of tensors, where PyTorch's compiler traces it."""
    for name in options:
        row_of("attention_with_kvcache", name)
    every: dict[str, Any] = {row.name: row.default for row in CACHE_ROWS} | options
    left, right = pair("window", every["window"], side_of_window, "-1 or None")
    if left is None or right is None:  # where None says that there is no limit, -1 is one
        every["window_signed"] = True
    every["window_left"] = NO_LIMIT if left is None else left
    every["window_right"] = NO_LIMIT if right is None else right
    mask, table = every["mask"], every["block_table"]
    if mask is not None and not isinstance(mask, torch.Tensor):
        every |= {"mask": words_of(mask, q), "mask_layout": mask.layout}
        keys = k.shape[1] * (1 if table is None else table.shape[1]) if k.ndim == 4 else -1
        if k.ndim == 4 and every["cu_seqlens_q"] is not None:
            check_made_for_packed(mask._of_calls, keys)
        elif k.ndim == q.ndim == 4:
            wanted = q.shape[0], q.shape[2], q.shape[1], keys
            check_made_for(mask._of_calls, wanted, cached=True)
    for name, x in {"q": q, "k": k, "v": v, **{name: every[name] for name in _TENSORS}}.items():
        if x is not None:
            check_tensor(name, x, None)
    for name in _SCALES:  # the operator may write them, and a compiler what it may have written
        if every[name] is not None and 0 in every[name].stride():
            every[name] = every[name].contiguous()
    given = []
    for name, kind in _KINDS.items():
        value, convert = every[name], _CONVERTERS.get(kind.rstrip("?"))
        optional = value is None and kind.endswith("?")
        given.append(value if optional or convert is None else convert(name, value))
    dtype = torch.float32 if is_float("out_dtype", out_dtype) else None
    if out is not None:
        allowed = [dtype or dtype_of_out(q)]
        if q.dtype.itemsize == 1 and dtype is None:
            allowed = [torch.float32, torch.bfloat16, torch.float16]
        if out.dtype not in allowed:
            words = " or ".join(str(x) for x in allowed)
            raise InvalidArgument(f"out.dtype = {out.dtype}, expected {words}")
        dtype = out.dtype
    found, lse = _operator(q, k, v, *given, dtype)
    if out is not None:
        if out.shape != found.shape:
            raise InvalidArgument(
                f"out.shape = {tuple(out.shape)}, expected {tuple(found.shape)} like q and v"
            )
        found = out.copy_(found)
    return (found, lse) if as_flag("return_lse", return_lse) else found


def _straight(name: str, x: Any, refused: Error) -> Any:
    if x is None or x.is_nested or x.layout is not torch.strided or x.ndim == 0:
        return x
    whole = name not in ("q", "k_new", "v_new", "block_table")
    if x.is_contiguous() if whole else x.stride(-1) == 1 and 0 not in x.stride():
        return x
    check_eager({name: x})  # it may have been freed since it was refused
    try:
        return x.contiguous()
    except Exception:  # there is no memory for so many elements
        raise refused from None


def _kernel(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    """The kernel of the operator: more are `_EVERY`, whose end the dispatcher leaves out where it
    is the default.
    """
    options = dict(zip(_EVERY, more, strict=False))
    out, dtype = None, options.pop("out_dtype", None)
    if dtype not in (None, torch.float32, dtype_of_out(q)):
        out = q.new_empty(_shape_of_out(q, v), dtype=dtype)
    options["window"] = options.pop("window_left"), options.pop("window_right")
    constant("alibi_slopes", options["alibi_slopes"])
    check_options(q, k, options)
    tail = (out, True, dtype == torch.float32)
    try:
        found: tuple[Tensor, Tensor] = _core.kvcache(q, k, v, *tail, options)
    except NoSequences as none:
        known = no_lengths(options)
        found = answer(none, lambda: _core.kvcache(q, k, v, *tail, known))
    return found[0], found[1]


# ------------------------------------------------------------------------------------------- values


def check_options(q: Any, k: Any, options: dict[str, Any]) -> None:
    """`check_values` of a call's options, if it has to look at them. Of arguments that it cannot
    make sense of the launch says what is wrong.
    """
    arrays = {name: options.get(name) for name in _ARRAYS}
    if wants_value_checks(q) and isinstance(k, torch.Tensor):
        window, chunk = options.get("window", (-1, -1)), options.get("attention_chunk", 0)
        try:
            moves = any(side not in (-1, None, NO_LIMIT) for side in window) or chunk > 0
            moving = bool(options.get("causal")) or moves
            check_values(q, k, arrays, moving)
        except Error:
            raise
        except (AttributeError, IndexError, RuntimeError, TypeError):
            pass


def wants_value_checks(q: Tensor) -> bool:
    """Whether `check_values` looks at this call: on a GPU, if the environment asks for it, as it
    waits for the device, which no capture of a graph allows.
    """
    return q.is_cuda and checked_on_gpus() and not torch.cuda.is_current_stream_capturing()


def check_values(q: Tensor, k: Tensor, arrays: dict[str, Any], moving: bool) -> None:
    """Refuses lengths, indices and pages out of range: for tensors on GPUs, where a launch cannot,
    and gives NaN. It waits for the device: see `wants_value_checks`. The library itself checks what
    is in the CPU's memory.

    moving: whether queries have positions of their own, for the rotary embedding.
    """
    offsets, table, new = (arrays.get(n) for n in ("cu_seqlens_q", "block_table", "k_new"))
    batch = q.shape[0] if offsets is None else offsets.shape[0] - 1
    if any(
        x.shape != (batch,) or x.dtype != torch.int32 or x.device != q.device
        for name, x in arrays.items()
        if x is not None and name in _ONE_EACH
    ):
        return  # what is wrong with these the launch itself says
    if q.ndim not in (3, 4) or any(
        x is not None and x.device != q.device for x in (k, table, arrays.get("cu_seqlens_k_new"))
    ):
        return
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
    suffix = " (k.shape[1]" + " * block_table.shape[1]" * (table is not None)
    suffix += " less the sequence's new keys" if new is not None else ""
    if table is None and arrays.get("cache_batch_idx") is None:
        suffix += maybe_pages(entries, batch)
    suffix += ")"
    checks = [
        ("seqused_k", used, zeros + capacity - added, suffix),
        ("leftpad", pad, used, " (the sequence's seqused_k)"),
    ]
    queries = zeros + q.shape[1] if offsets is None else offsets.diff().long()
    if arrays.get("seqused_q") is not None:
        checks.append(("seqused_q", arrays["seqused_q"], queries, ""))
        queries = arrays["seqused_q"].long()
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

_OPTIONS: Final = "".join(f"Tensor? {name}, " for name in _ARRAYS) + ", ".join(
    f"{kind} {name}" for name, kind in _PLAIN.items()
)
_MORE_OPTIONS: Final = ", ".join(row.schema for row in _MORE)
_RESULTS: Final = ") -> (Tensor, Tensor)"


def _shape_of_out(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """Of blocks that are none the kernel says what is wrong."""
    dim_v: int = v.shape[-1]
    if v.dtype == torch.uint8:
        dim_v = next(iter(blocks_in(dim_v).values()), dim_v)
    return (*q.shape[:-1], dim_v)


def _fake(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    """(out, lse), not computed."""
    dtype = dict(zip(_EVERY, more, strict=False)).get("out_dtype") or dtype_of_out(q)
    _, lse = new_results(q, k, v)
    return q.new_empty(_shape_of_out(q, v), dtype=dtype), lse


_operator: Final = define(
    "attention_with_kvcache",
    f"(Tensor q, Tensor(a!) k, Tensor(b!) v, {_OPTIONS}, "
    f"Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, {_MORE_OPTIONS}, "
    f"ScalarType? out_dtype=None{_RESULTS}",
    _kernel,
    _fake,
)


def _without_gradient(keys: Any, *inputs: Any) -> Any:
    """The operator where autograd watches: it has no gradient, as in flash_attn, and slopes that
    require one are refused, also while a graph is traced, whose kernels run where nobody records.
    """
    constant("alibi_slopes", inputs[3 + _ARRAYS.index("alibi_slopes")])
    with torch._C._AutoDispatchBelowAutograd():
        return _operator.redispatch(keys & torch._C._after_autograd_keyset, *inputs)


_LIBRARY.impl("attention_with_kvcache", _without_gradient, "Autograd", with_keyset=True)


# As in flash_attn, packed queries over pages may require a gradient, and the error is that of their
# backward pass, which knows no pages.


def no_gradient() -> Unsupported:
    """What the backward pass of attention over pages says."""
    return Unsupported(
        "the gradient of attention with block_table: a paged cache has no backward pass, expected "
        "torch.no_grad() or tensors that require none"
    )


_recorded: Final = define(
    "paged_attention",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, Tensor? k_scale=None, Tensor? v_scale=None, "
    f"{_MORE_OPTIONS}{_RESULTS}",
    _kernel,
    new_results,
    *refused_gradient("paged_attention", no_gradient),
)


# ------------------------------------------------------------------------------- flash_attn's own


def lengths(given: Any, q: Any, cu_seqlens_q: Any = None) -> Any:
    """cache_seqlens, which may be one integer for all sequences."""
    if given is None or isinstance(given, torch.Tensor):
        return given
    if cu_seqlens_q is None:
        if not isinstance(q, torch.Tensor) or q.is_nested or q.ndim != 4:
            check_tensor("q", q, ("batch", "seqlen_q", "heads", "head_dim"))
        batch = q.shape[0]
    else:
        check_tensor("cu_seqlens_q", cu_seqlens_q, ("batch + 1",))
        batch = max(cu_seqlens_q.shape[0] - 1, 0)
    # While compiling it may be known at run time alone.
    traced = torch.compiler.is_dynamo_compiling() and isinstance(given, int | torch.SymInt)
    if not traced and (type(given) is not int or abs(given) >= 1 << 31):
        given = integer("cache_seqlens", given, 32)
    return torch.full((batch,), given, dtype=torch.int32, device=q.device)


def chosen_pages(name: str, table: Any, index: Any) -> Tensor:
    """The rows `index` (cache_batch_idx) of a table of pages, as FlashAttention-3 reads them.

    A number out of range is refused on the CPU and where `wants_value_checks` says so; elsewhere
    its sequence has pages that are out of range themselves, and so NaN.
    """
    check_tensor(name, table, ("cache_batch", "pages_per_sequence"))
    check_tensor("cache_batch_idx", index, ("batch",))
    for each, x in ((name, table), ("cache_batch_idx", index)):
        if x.dtype != torch.int32:
            raise InvalidArgument(f"{each}.dtype = {x.dtype}, expected torch.int32")
        # PyTorch's operators on the CPU read a storage that was freed.
        if not torch.compiler.is_compiling() and type(x) is torch.Tensor and x.is_cpu:
            check_memory(each, x)
    if index.device != table.device:
        raise InvalidArgument(
            f"cache_batch_idx is on {index.device}, expected {table.device} as {name}"
        )
    entries = table.shape[0]
    if entries == 0:
        raise InvalidArgument(
            f"{name}.shape[0] = 0, expected at least 1 (cache_batch_idx is given)"
        )

    def choose(index: Tensor) -> Tensor:
        good = (index >= 0) & (index < entries)
        looks = not torch.compiler.is_dynamo_compiling() and type(index) is torch.Tensor
        if looks and (index.is_cpu or wants_value_checks(index)) and not bool(good.all()):
            at = int((~good).nonzero()[0])
            raise InvalidArgument(
                f"cache_batch_idx[{at}] = {int(index[at])}, expected 0 to {entries - 1} (a row of "
                f"{name})"
            )
        wanted = index.clamp(0, entries - 1)
        rows = taken(name, table, lambda table: table.index_select(0, wanted))
        return torch.where(good[:, None], rows, -1)

    chosen: Tensor = taken("cache_batch_idx", index, choose)
    return chosen


def rotary_start(options: dict[str, Any], q: Any, k_cache: Any) -> None:
    """flash_attn counts positions from the cache's first row, a left pad included."""
    if options["leftpad"] is None or options["rotary_cos"] is None:
        return
    options["rotary_position"] = options["seqused_k"]
    if options["seqused_k"] is not None:
        return
    # All of the cache. (What is no cache is refused by the call.)
    table = options["block_table"]
    columns = 1 if table is None else table.shape[1] if getattr(table, "ndim", 0) == 2 else None
    if columns is not None and getattr(k_cache, "ndim", 0) == 4:
        rows = columns * k_cache.shape[1]
        options["rotary_position"] = lengths(rows, q, options.get("cu_seqlens_q"))


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
    window_size: Any = NO_WINDOW,
    softcap: Any = 0.0,
    alibi_slopes: Any = None,
    seqused_k: Any = None,
    leftpad_k: Any = None,
    sinks: Sinks = NO_SINKS,
) -> tuple[Tensor, Tensor]:
    """flash_attn_varlen_func with a block_table: (out, lse). Where q, k, v or a sink requires a
    gradient, so do they, and the backward pass is refused.
    """
    recorded = torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in (q, k, v, *sinks)
    )
    check_tensor("cu_seqlens_q", cu_seqlens_q, ("batch + 1",))
    if seqused_k is None:
        check_tensor("cu_seqlens_k", cu_seqlens_k, ("batch + 1",))
        seqused_k = taken("cu_seqlens_k", cu_seqlens_k, torch.diff)
    options = {
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
        "seqused_k": seqused_k,
        "block_table": block_table,
        "leftpad": leftpad_k,
        "alibi_slopes": alibi_slopes,
        "scale": softmax_scale,
        "causal": causal,
        "window": window_size,
        "softcap": softcap,
    }
    names = {**NAMES, "k": "k", "v": "v", "leftpad": "leftpad_k"}
    names["seqused_k"] = "the length that cu_seqlens_k or seqused_k gives"
    function = "flash_attn_varlen_func"
    found: tuple[Tensor, Tensor]
    found = call(q, k, v, options, names=names, recorded=recorded, function=function, sinks=sinks)
    return found
