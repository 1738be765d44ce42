"""Strobe as an attention implementation of Hugging Face transformers.

    import strobe.transformers
    strobe.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="strobe")

On the CPU and on NVIDIA GPUs, without the distribution flash-attn: padded batches (left and right),
packed sequences, generation with a cache, sliding windows, soft capping, dropout, gradients. What a
model asks for beyond that (chunked attention, masks of its own, attention sinks) is refused with a
message when the model runs, never left out.

Padding takes no part: sequences are packed end to end for `strobe.flash_attn`'s varlen functions.
Rows of a causal model's padding are 0, where eager attention has numbers that nobody may use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from ._errors import Unsupported
from ._kvcache import attention_with_kvcache
from .flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["NAME", "attention", "attention_mask", "paged_attention", "register"]

Tensor: TypeAlias = torch.Tensor

NAME: Final = "strobe"

# Functions of transformers.masking_utils that masks are made of, as far as arguments of the varlen
# functions say the same.
_KNOWN_MASKS: Final = frozenset(
    {
        "causal_mask_function",
        "bidirectional_mask_function",
        "sliding_window_overlay.<locals>.inner_mask",
        "sliding_window_bidirectional_overlay.<locals>.inner_mask",
        "packed_sequence_mask_function.<locals>.inner_mask",
    }
)
_PACKED: Final = "packed_sequence_mask_function.<locals>.inner_mask"
_CAUSAL: Final = "causal_mask_function"


def register() -> None:
    """Makes attn_implementation="strobe" known to transformers: 4.57 and newer, BERT from 5 on.

    Raises:
        Unsupported: transformers is older.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise Unsupported(
            "strobe.transformers.register() needs transformers 4.57 or newer, which has "
            f"AttentionInterface and AttentionMaskInterface: {error}"
        ) from None
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
    AttentionInterface.register(f"paged|{NAME}", paged_attention)  # continuous batching


# -------------------------------------------------------------------------------------------- masks


def _parts(mask_function: Any) -> Iterator[tuple[str, Any]]:
    """Names and functions that a mask function of transformers is the intersection of."""
    name = mask_function.__qualname__
    inner = dict(
        zip(
            mask_function.__code__.co_freevars,
            (cell.cell_contents for cell in mask_function.__closure__ or ()),
            strict=True,
        )
    )
    if name == "and_masks.<locals>.and_mask":
        for part in inner["mask_functions"]:
            yield from _parts(part)
    else:
        yield name, inner


def attention_mask(
    batch_size: int,
    q_length: Any = None,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    cache_position: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """What `attention` gets for a mask: which sequence each key belongs to.

    Returns:
        int32 (batch, keys): 0 where no query looks, else the number of the sequence in its row,
        from 1 on; keys are the first of the cache. None: each row is one sequence, as long as its
        keys.

    Raises:
        Unsupported: mask_function is none of those that the varlen functions know.
    """
    parts = dict(_parts(mask_function))
    unknown = [name for name in parts if name not in _KNOWN_MASKS]
    if unknown or use_vmap:
        raise Unsupported(
            f'attn_implementation="{NAME}" knows causal masks, sliding windows, padding and packed '
            f"sequences, but this model's mask has {', '.join(unknown) or 'functions of its own'}: "
            'load it with attn_implementation="sdpa"'
        )
    if q_length is None or isinstance(q_length, torch.Tensor):  # transformers 4
        positions: Any = cache_position if q_length is None else q_length
        q_length, q_offset = len(positions), int(positions[0])
    if _PACKED in parts:
        numbers: Tensor = parts[_PACKED]["packed_sequence_mask"] + 1
        return numbers.to(torch.int32)
    seen = kv_length
    if _CAUSAL in parts:  # what lies behind the last query, a static cache's rest, is not written
        seen = min(kv_length, int(q_offset) + q_length - int(kv_offset))
    if attention_mask is not None:
        attention_mask = attention_mask[:, int(kv_offset) : int(kv_offset) + seen]
        if attention_mask.shape[1] == kv_length and bool(attention_mask.all()):
            return None
        return attention_mask.to(torch.int32)
    if seen == kv_length:
        return None
    device = options.get("device", "cpu")
    return torch.ones((batch_size, seen), dtype=torch.int32, device=device)


# ---------------------------------------------------------------------------------------- attention


def _lengths(numbers: Tensor) -> Tensor:
    """How many keys each sequence has, in order. numbers: (batch, keys), see `attention_mask`."""
    packed = numbers.shape[1] > 0 and int(numbers.max()) > 1
    if not packed:
        return numbers.sum(1)
    row = torch.arange(numbers.shape[0], device=numbers.device)[:, None]
    sequence = (row * (int(numbers.max()) + 1) + numbers)[numbers > 0]
    return torch.unique_consecutive(sequence, return_counts=True)[1]


def _offsets(lengths: Tensor) -> tuple[Tensor, int]:
    """(cu_seqlens, longest)."""
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return offsets, int(lengths.max())


def _check_gaps(numbers: Tensor) -> None:
    """A window counts keys, so no padding may lie between them."""
    hidden = (numbers == 0).to(torch.int32)
    begins = (hidden.diff(dim=1) == -1).sum(1) + (hidden[:, 0] == 0)
    if bool((begins > 1).any()):
        raise Unsupported(
            f'attn_implementation="{NAME}": a sliding window over a sequence with padding inside, '
            'expected padding at its ends: pad on the left, or use attn_implementation="sdpa"'
        )


@dataclass(frozen=True, slots=True)
class _Packing:
    """Which rows take part, and where their sequences begin."""

    rows: Tensor  # bool (batch, seqlen_q)
    keys: Tensor  # bool (batch, keys)
    lengths: tuple[Tensor, Tensor, int, int]  # cu_seqlens and max_seqlen of queries and keys
    whole: bool  # all rows take part
    # Of each row of the batch the first key and the end, int32, if its keys lie side by side.
    bounds: tuple[Tensor, Tensor] | None


def _bounds(numbers: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where each row's keys begin and end; None: rows hold several sequences, or have gaps."""
    seen = (numbers > 0).to(torch.int32)
    if numbers.shape[1] == 0 or int(numbers.max()) > 1:
        return None
    begins = seen.argmax(1)
    ends = begins + seen.sum(1)
    gaps = seen.cumsum(1).argmax(1) + 1 != ends
    if bool((gaps & (ends > begins)).any()):
        return None
    return begins.to(torch.int32), ends.to(torch.int32)


def _packing(numbers: Tensor, seqlen_q: int, causal: bool, window: bool) -> _Packing:
    """Kept with the mask, for a model's other layers: to find it waits for the device."""
    known: dict[Any, _Packing] = numbers.__dict__.setdefault("strobe", {})
    key = (seqlen_q, causal, window)
    if key in known:
        return known[key]
    if window:
        _check_gaps(numbers)
    if causal:  # a causal model's queries are the last of its keys
        own = numbers[:, numbers.shape[1] - seqlen_q :]
    elif seqlen_q == numbers.shape[1] and int(numbers.max()) > 1:
        own = numbers
    else:  # keys may be another model's, whose padding is not the queries': all are computed
        own = numbers.new_ones((numbers.shape[0], seqlen_q))
    rows = own > 0
    offsets_q, longest_q = _offsets(_lengths(own))
    offsets_k, longest_k = _offsets(_lengths(numbers))
    lengths = (offsets_q, offsets_k, longest_q, longest_k)
    found = _Packing(rows, numbers > 0, lengths, bool(rows.all()), _bounds(numbers))
    known[key] = found
    return found


# On a GPU a prompt of more queries is worth a copy of its keys: the kernels for keys in a cache are
# for few queries.
_FEW_QUERIES: Final = 16


def _is_decoding(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> bool:
    """Whether a cache will do: no gradient, no dropout, no compiler, no autocast, rows that can be
    read where they lie; on a GPU few queries.
    """
    suits = q.is_cpu or (q.is_cuda and q.shape[1] <= _FEW_QUERIES)
    if not suits or not q.device == k.device == v.device:
        return False
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return False
    tracked = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    compiled, autocast = torch.compiler.is_compiling(), torch.is_autocast_enabled(q.device.type)
    return not (tracked or compiled or autocast or options["dropout_p"] > 0)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attention of rows with padding or several sequences; (batch, seqlen, heads, head_dim)."""
    causal = options["causal"]
    batch, seqlen_q = q.shape[:2]
    packing = _packing(numbers, seqlen_q, causal, options["window_size"] != (-1, -1))
    if causal and packing.whole and packing.bounds is not None and _is_decoding(q, k, v, options):
        begins, ends = packing.bounds  # read where they lie, which saves a copy of all keys
        out: Tensor = attention_with_kvcache(
            q,
            k,
            v,
            seqused_k=ends,
            leftpad=begins,
            causal=True,
            window=options["window_size"],
            scale=options["softmax_scale"],
            softcap=options["softcap"],
        )
        return out
    k, v = k[:, : numbers.shape[1]], v[:, : numbers.shape[1]]
    found: Tensor = flash_attn_varlen_func(
        q.flatten(0, 1) if packing.whole else q[packing.rows],
        k[packing.keys],
        v[packing.keys],
        *packing.lengths,
        **options,
    )
    if packing.whole:
        return found.unflatten(0, (batch, seqlen_q))
    out = found.new_zeros((batch, seqlen_q, *found.shape[1:]))
    return out.index_put((packing.rows,), found)


def _refuse(others: dict[str, Any], *names: str) -> None:
    """Refuses what a model may ask for, and what has no place here."""
    for name in names:
        if others.get(name) is not None:
            raise Unsupported(
                f'attn_implementation="{NAME}" has no {name}: load this model with '
                'attn_implementation="eager"'
            )


def _options(
    causal: bool, sliding_window: int | None, scaling: float | None, softcap: float | None
) -> dict[str, Any]:
    """Arguments of `strobe.flash_attn`'s functions. sliding_window counts the query itself."""
    window = (-1, -1)
    if sliding_window is not None:
        window = (sliding_window - 1, 0 if causal else sliding_window - 1)
    return {
        "softmax_scale": scaling,
        "causal": causal,
        "window_size": window,
        "softcap": softcap or 0.0,
    }


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers' models call: query, key and value are (batch, heads, seqlen, head_dim).

    Returns:
        (batch, seqlen, heads, head_dim) and None, as there are no attention weights to return.

    Raises:
        Unsupported: the model wants something that the varlen functions have not.
    """
    _refuse(others, "s_aux", "position_bias", "cache")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise Unsupported(
            f'attn_implementation="{NAME}" with an attention_mask of shape '
            f"{tuple(attention_mask.shape)}, expected (batch, seqlen): masks for each query come "
            'with attn_implementation="sdpa"'
        )
    if query.is_cuda and query.dtype == torch.float32:  # after layers that are kept in float32
        from transformers.integrations.flash_attention import get_target_dtype

        dtype = get_target_dtype(query, module)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    causal = module.is_causal if is_causal is None else is_causal
    options = _options(causal, sliding_window, scaling, softcap)
    options["dropout_p"] = dropout
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if others.get("cu_seq_lens_q") is not None:  # a collator has packed the batch into one row
        out = flash_attn_varlen_func(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            others["cu_seq_lens_q"].to(torch.int32),
            others["cu_seq_lens_k"].to(torch.int32),
            others["max_length_q"],
            others["max_length_k"],
            **options,
        ).unflatten(0, q.shape[:2])
    elif attention_mask is not None:
        out = _packed(q, k, v, attention_mask, options)
    else:
        out = flash_attn_func(q, k, v, **options)
    return out, None


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cache: Any,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: Any,
    block_table: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What models call in transformers' continuous batching: all sequences lie in one row.

    Args:
        module: the attention layer.
        query, key, value: (1, heads or heads_kv, total, head_dim).
        attention_mask: not used: sequences and causality say it all.
        cache: transformers' PagedAttentionCache, which takes key and value in.
        cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q, max_seqlen_k: of the sequences, or the last two
            as dicts by the layers' types.
        block_table: int32, (groups, batch, pages_per_sequence), where each sequence has one query.
        scaling: multiplies the scores.
        sliding_window: so many keys each query sees, itself included.
        softcap: scores are softcap * tanh(score / softcap); None: as they are.
        others: the indices by which the cache is read and written, and attention sinks.

    Returns:
        (total, heads, head_dim), and None.

    Raises:
        Unsupported: the model has attention sinks.
    """
    _refuse(others, "s_aux")
    if isinstance(cu_seq_lens_k, dict):
        kind = "sliding_attention" if sliding_window else "full_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    options = _options(True, sliding_window or None, scaling, softcap)
    q = query[0].transpose(0, 1)
    if block_table is None:
        k, v = cache.update(
            key_states=key,
            value_states=value,
            layer_idx=module.layer_idx,
            read_index=others["read_index"],
            write_index=others["write_index"],
        )
        lengths = (cu_seq_lens_q, cu_seq_lens_k, max_seqlen_q, max_seqlen_k)
        return flash_attn_varlen_func(q, k, v, *lengths, **options), None
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    k_cache, v_cache = (
        x[layer].view(-1, cache.block_size, *x[layer].shape[1:])
        for x in (cache.key_cache, cache.value_cache)
    )
    out = flash_attn_with_kvcache(
        q[:, None],
        k_cache,
        v_cache,
        key[0].transpose(0, 1)[:, None],
        value[0].transpose(0, 1)[:, None],
        cache_seqlens=(cu_seq_lens_k.diff() - 1).to(torch.int32),
        block_table=block_table[group],
        **options,
    )
    return out[:, 0], None
