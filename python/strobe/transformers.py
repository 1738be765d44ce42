"""Strobe as an attention implementation of Hugging Face transformers.

    import strobe.transformers
    strobe.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="strobe")

On the CPU and on NVIDIA GPUs, without the distribution flash-attn: padded batches (left and right),
packed sequences, generation with a cache, sliding windows to one side or both, attention sinks,
soft capping, dropout, gradients, torch.compile. What a model asks for beyond that (chunked
attention, masks of its own) is refused with a message when the model runs, never left out; a model
that asks for no attention implementation is refused when it is made.

Padding takes no part. Rows of padding in front of a causal sequence are 0, where eager attention
has numbers that nobody may use.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache, wraps
from typing import Any, Final, TypeAlias, cast

import torch

from . import _mask_functions, _padding
from ._errors import InvalidArgument, Unsupported
from ._mask_functions import Reach
from ._operators import came_by
from ._quantised import Form
from ._quantised import _form as form_of
from .flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = [
    "NAME",
    "attention",
    "attention_mask",
    "paged_attention",
    "quantized_static_cache",
    "register",
]

Tensor: TypeAlias = torch.Tensor

NAME: Final = "strobe"
_FUNCTION: Final = "the attention of a model of transformers"  # as `strobe.why()` names it


def register() -> None:
    """Makes attn_implementation="strobe" known to transformers: 4.57 and newer, BERT from 5 on.

    Raises:
        Unsupported: transformers is older.

    Example:
        >>> import strobe, torch, transformers
        >>> strobe.transformers.register()
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1, attn_implementation="strobe",
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> tuple(model(input_ids=torch.ones(1, 5).long()).logits.shape)
        (1, 5, 99)
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except ImportError as error:
        raise Unsupported(
            "strobe.transformers.register() needs transformers 4.57 or newer, which has "
            f"AttentionInterface and AttentionMaskInterface: {error}"
        ) from None
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
    AttentionInterface.register(f"paged|{NAME}", paged_attention)  # continuous batching
    _check_models(PreTrainedModel)
    _keep_positions(sys.modules[AttentionMaskInterface.__module__])


# ------------------------------------------------------------------------------------ which models


@cache
def _asks_for_implementations(model: Any) -> bool:
    """Whether attention of this class of models goes where implementations are registered.

    Not all that do say so (`_supports_attention_backend`), but their source does. A module without
    an attention of its own leaves it to another model.
    """
    if model._supports_attention_backend:
        return True
    try:
        source = inspect.getsource(sys.modules[model.__module__])
    except (OSError, TypeError, KeyError):  # made in an interpreter
        return True
    attentions = re.search(r"^class \w*Attention\w*\(([\w.]+\.)?Module\)", source, re.MULTILINE)
    return attentions is None or "ALL_ATTENTION_FUNCTIONS" in source


def _check_models(base: Any) -> None:
    """From now on, a model that would take the name and not keep its promise is refused when it is
    made or told so. transformers itself asks a model that for its own names alone.
    """
    inner = base.get_correct_attn_implementation
    if hasattr(inner, NAME):
        return

    @wraps(inner)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, model = inner(self, *args, **kwargs), cast("Any", type(self))
        if found in (NAME, f"paged|{NAME}") and not _asks_for_implementations(model):
            raise Unsupported(
                f'{model.__name__} does not take attn_implementation="{NAME}": its attention '
                "asks transformers for no implementation. Load this model with "
                'attn_implementation="eager", or, if it has that, "sdpa"'
            )
        return found

    setattr(checked, NAME, True)
    base.get_correct_attn_implementation = checked


# -------------------------------------------------------------------------------------------- masks


def _keep_positions(masking_utils: Any) -> None:
    """From now on, what maps positions of packed sequences before a mask function sees them leaves
    symbols alone, which newer releases do. Within a sequence positions follow each other, so that
    a query sees the same keys by them, and symbols could not be looked up while traced.
    """
    inner = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    if inner is None or hasattr(inner, NAME):
        return

    @wraps(inner)
    def kept(mask_function: Any, position_ids: Any) -> Any:
        mapped = inner(mask_function, position_ids)

        def of_symbols_or_mapped(batch: Any, head: Any, query: Any, key: Any) -> Any:
            if _mask_functions.is_symbol(query):
                return mask_function(batch, head, query, key)
            return mapped(batch, head, query, key)

        return of_symbols_or_mapped

    setattr(kept, NAME, True)
    masking_utils.remap_positions_for_packed_sequence = kept


def _reach_of(mask_function: Any, custom: bool) -> Reach:
    """What a mask function says, also while PyTorch's compiler traces. custom: it may have parts
    that are not transformers' own, for which tracing stops.
    """
    try:
        if not torch.compiler.is_dynamo_compiling():
            return _mask_functions.reach_of(mask_function)
        if custom:
            found: Reach = _reach_untraced(mask_function)
            return found
        return _mask_functions.traced_reach_of(mask_function)
    except Unsupported as error:
        raise Unsupported(
            f'attn_implementation="{NAME}" knows causal masks, sliding windows, padding and packed '
            f"sequences, but this model's mask is {error}: "
            'load it with attn_implementation="sdpa"'
        ) from None


_reach_untraced: Final = torch.compiler.disable(_mask_functions.reach_of)


def _documents(mask_function: Any, batch_size: int, length: int, device: Any) -> Tensor:
    """The numbers of packed sequences, from 1 on.

    A sequence ends where a query does not see the key before it. With a window of 1 none does, and
    each query is a sequence of its own.
    """
    batch = torch.arange(batch_size, device=device)[:, None]
    query = torch.arange(1, length, device=device)[None]
    seen = mask_function(batch, torch.zeros_like(batch), query, query - 1)
    ends = (~seen.expand(batch_size, length - 1)).cumsum(1)
    return torch.nn.functional.pad(ends, (1, 0)) + 1


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
) -> Tensor:
    """What `attention` gets for a mask, in the form of `strobe._padding`.

    Args:
        batch_size, q_length, kv_length: of the queries and the keys that attention will get.
        q_offset, kv_offset: positions of the first query and the first key. q_offset may be in a
            tensor, and is then not read.
        mask_function: says which keys a query sees: transformers' own, and what is made of them.
        attention_mask: bool, (batch, length): which positions hold tokens; what lies behind length
            holds none. None: all do.
        use_vmap: mask_function has parts that a user or a model has added.
        cache_position: the positions of the queries, in transformers 4.
        options: "device".

    Returns:
        int32, with four axes: transformers hands such a mask on as it is.

    Raises:
        Unsupported: mask_function says what the kernels do not know.

    Example:
        The last of five positions of the second sequence is padding:

        >>> import torch
        >>> from transformers.masking_utils import causal_mask_function
        >>> import strobe
        >>> tokens = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
        >>> mask = strobe.transformers.attention_mask(
        ...     2, 5, 5, mask_function=causal_mask_function, attention_mask=tokens
        ... )
        >>> mask.dtype, mask.ndim
        (torch.int32, 4)
    """
    reach = _reach_of(mask_function, use_vmap)
    if q_length is None or isinstance(q_length, torch.Tensor):  # transformers 4
        positions: Any = cache_position if q_length is None else q_length
        q_length, q_offset = len(positions), positions[0]
    device = options.get("device", "cpu")
    causal, position = reach.right == 0, q_offset - kv_offset
    whole, empty = False, reach.is_empty()
    if reach.documents:
        numbers = _documents(mask_function, batch_size, kv_length, device)
    else:
        numbers = _tokens(batch_size, kv_length, kv_offset, attention_mask, device)
        tells = attention_mask is None and isinstance(position, int)
        if tells or _may_look(numbers):
            unlimited = reach.left is None and reach.right is None
            aligned: Any = unlimited or position + q_length == kv_length
            if tells:
                whole = aligned and not empty
            elif aligned is not False and not empty:
                whole = bool(numbers.all() & aligned)  # a GPU is waited for once
        if causal and not whole:  # what lies behind the last query is not written
            column = torch.arange(kv_length, device=device)
            numbers = numbers & (column < (0 if empty else position + q_length))
    mask = _padding.encode(_padding.Kind(causal, reach.documents, whole), numbers, position)
    mask.reach = (None, reach.right) if empty else (reach.left, reach.right)
    return mask


def _may_look(x: Tensor) -> bool:
    """Whether what is in a tensor may be asked: not while compiling, nor while a CUDA graph is
    captured.
    """
    if torch.compiler.is_compiling():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _tokens(
    batch_size: int, kv_length: int, kv_offset: Any, attention_mask: Tensor | None, device: Any
) -> Tensor:
    """Which keys are tokens: bool, (batch, kv_length)."""
    if attention_mask is None:
        return torch.ones((batch_size, kv_length), dtype=torch.bool, device=device)
    if attention_mask.shape[0] != batch_size:
        raise InvalidArgument(
            f"attention_mask.shape[0] = {attention_mask.shape[0]}, expected {batch_size}, the batch"
        )
    missing = kv_length + kv_offset - attention_mask.shape[1]
    padded = torch.nn.functional.pad(attention_mask.bool(), (0, max(missing, 0)))
    return padded[:, kv_offset : kv_offset + kv_length]


# ---------------------------------------------------------------------------------------- attention


def _refuse(others: dict[str, Any], *names: str) -> None:
    """Refuses what a model may ask for, and what has no place here."""
    for name in names:
        if others.get(name) is not None:
            raise Unsupported(
                f'attn_implementation="{NAME}" has no {name}: load this model with '
                'attn_implementation="eager"'
            )


def _sinks(others: dict[str, Any]) -> Tensor | None:
    """The attention sinks of a layer, (heads,), float32."""
    sinks = others.get("s_aux")
    return None if sinks is None else sinks.float()


def _wants_weights(module: Any) -> bool:
    """Whether the model's configuration asks for attention weights."""
    return bool(getattr(getattr(module, "config", None), "output_attentions", False))


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


def _tokens_mask(tokens: Tensor, seqlen_q: int, keys: int, causal: bool) -> Tensor:
    """For a model that hands on which positions hold tokens, (batch, seqlen): the queries are the
    last of them.
    """
    seqlen = tokens.shape[1]
    if seqlen > keys:
        raise Unsupported(
            f'attn_implementation="{NAME}" with an attention_mask of shape {tuple(tokens.shape)}, '
            f"expected at most {keys} columns, as there are keys"
        )
    seen = torch.nn.functional.pad(tokens != 0, (0, keys - seqlen))
    return _padding.encode(_padding.Kind(causal, False, False), seen, seqlen - seqlen_q)


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

    A mask decides what is seen, as it does with eager attention. Where there is none, is_causal or
    the module and sliding_window do.

    Returns:
        (batch, seqlen, heads, head_dim) and None, as there are no attention weights to return.

    Raises:
        Unsupported: the model wants something that the kernels have not.

    Example:
        >>> import torch, strobe
        >>> q, k, v = torch.randn(3, 2, 8, 300, 64)
        >>> out, weights = strobe.transformers.attention(None, q, k, v, None, is_causal=True)
        >>> tuple(out.shape), weights
        ((2, 300, 8, 64), None)
    """
    _refuse(others, "position_bias", "cache")
    sinks = _sinks(others)
    if others.get("output_attentions") or _wants_weights(module):
        raise Unsupported(
            f'attn_implementation="{NAME}" with output_attentions=True: there are no attention '
            'weights to return; load this model with attn_implementation="eager"'
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    seqlen_q, keys = query.shape[2], key.shape[2]
    mask = attention_mask
    if mask is not None and mask.ndim == 2:
        mask = _tokens_mask(mask, seqlen_q, keys, causal)
    if mask is not None and not _padding.is_encoded(mask, keys):
        raise Unsupported(
            f'attn_implementation="{NAME}" with an attention_mask of shape {tuple(mask.shape)} for '
            f"{keys} keys, expected (batch, seqlen): masks for each query come "
            'with attn_implementation="sdpa"'
        )
    coded = isinstance(key, _padding.Codes)
    if (
        not coded and query.is_cuda and query.dtype == torch.float32
    ):  # after layers that are kept in float32
        from transformers.integrations.flash_attention import get_target_dtype

        dtype = get_target_dtype(query, module)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    kind = None if mask is None else _padding.Kind.of(mask)
    options = _options(causal if kind is None else kind.causal, sliding_window, scaling, softcap)
    reach = getattr(mask, "reach", None)
    if reach is not None:
        options["window_size"] = tuple(-1 if limit is None else limit for limit in reach)
    options["dropout_p"] = dropout
    if coded:
        if others.get("cu_seq_lens_q") is not None:
            raise Unsupported("cu_seq_lens_q with a quantised cache, expected one sequence a row")
        q = query.transpose(1, 2)
        out = _padding.attend_to_codes(
            q, cast("Any", key), cast("Any", value), mask, options, sinks
        )
        came_by(_FUNCTION, out)
        return out, None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if others.get("cu_seq_lens_q") is not None:  # a collator has packed the batch into one row
        lengths = (
            others["cu_seq_lens_q"].to(torch.int32),
            others["cu_seq_lens_k"].to(torch.int32),
            others["max_length_q"],
            others["max_length_k"],
        )
        rows_q, rows_k, rows_v = (x.flatten(0, 1) for x in (q, k, v))
        out = flash_attn_varlen_func(rows_q, rows_k, rows_v, *lengths, **options, s_aux=sinks)
        out = out.unflatten(0, q.shape[:2])
    elif kind is None or kind.whole:
        out = flash_attn_func(q, k, v, **options, s_aux=sinks)
    else:
        out = _padding.attend(q, k, v, mask, options, sinks)
    came_by(_FUNCTION, out)
    return out, None


def quantized_static_cache(config: Any, max_cache_len: int, form: Form = "int8") -> Any:
    """A static cache of codes, for generation with models that have attn_implementation="strobe".

    Keys and values are quantised when they come, each row of a head with a scale of its own
    (float16; blocks have theirs), and stay codes: attention reads them so.

    Args:
        config: the model's configuration.
        max_cache_len: tokens that each sequence has room for, those of the prompt included.
        form: "int8", "float8_e4m3fn", "float8_e5m2" (on CPUs), "q8_0" or "q4_0"
            (`strobe.quantize`).

    Returns:
        A transformers.Cache, for `past_key_values` of `generate` or of the model. Layers with a
        sliding window keep all their tokens too. It is not for training, nor for cross-attention,
        and steps with it are not compiled.

    Raises:
        InvalidArgument: form or max_cache_len.
        Unsupported: the model has layers of other kinds; transformers is older than 4.57.

    Example:
        >>> import strobe, torch, transformers
        >>> strobe.transformers.register()
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=99, hidden_size=64, intermediate_size=48, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1, attn_implementation="strobe",
        ... )
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> cache = strobe.transformers.quantized_static_cache(config, 16)
        >>> prompt, options = torch.ones(1, 5).long(), {"max_new_tokens": 3, "min_new_tokens": 3}
        >>> tuple(model.generate(prompt, past_key_values=cache, **options).shape)
        (1, 8)
        >>> cache.layers[0].keys.dtype, tuple(cache.layers[0].keys.shape)
        (torch.int8, (1, 1, 16, 32))
    """
    name = form_of(form)
    try:
        from ._static_cache import QuantizedStaticCache
    except ImportError as error:
        raise Unsupported(
            "strobe.transformers.quantized_static_cache() needs transformers 4.57 or newer, which "
            f"has layers of caches: {error}"
        ) from None
    return QuantizedStaticCache(config, max_cache_len, name)


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

    Example:
        Two sequences of 3 and 5 tokens, whose keys the cache hands back as they are:

        >>> import types
        >>> import torch, strobe
        >>> q, k, v = torch.randn(3, 1, 4, 8, 64)
        >>> def update(key_states, value_states, **options):  # (total, heads_kv, head_dim)
        ...     return key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        >>> cache = types.SimpleNamespace(update=update)
        >>> offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> layer = types.SimpleNamespace(layer_idx=0)
        >>> indices = {"read_index": None, "write_index": None}
        >>> out, _ = strobe.transformers.paged_attention(
        ...     layer, q, k, v, None, cache, offsets, offsets, 5, 5, **indices
        ... )
        >>> tuple(out.shape)
        (8, 4, 64)
    """
    sinks = _sinks(others)
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
        out = flash_attn_varlen_func(q, k, v, *lengths, **options, s_aux=sinks)
        came_by(_FUNCTION, out)
        return out, None
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    k_cache, v_cache = (
        x[layer].view(-1, cache.block_size, *x[layer].shape[1:])
        for x in (cache.key_cache, cache.value_cache)
    )
    k_new, v_new = (x[0].transpose(0, 1)[:, None] for x in (key, value))
    used, table = (cu_seq_lens_k.diff() - 1).to(torch.int32), block_table[group]
    out = flash_attn_with_kvcache(
        q[:, None],
        k_cache,
        v_cache,
        k_new,
        v_new,
        cache_seqlens=used,
        block_table=table,
        s_aux=sinks,
        **options,
    )
    came_by(_FUNCTION, out)
    return out[:, 0], None
