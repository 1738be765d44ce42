"""A cache for models of transformers that keeps codes: what their layers hand to `attention`, and
the cache itself. Importing it imports transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from ._errors import InvalidArgument, Unsupported
from ._padding import Codes
from ._quantised import BLOCKS, quantize
from ._values import integer

Tensor: TypeAlias = torch.Tensor

# Layers of these kinds keep every token's keys and values; what is seen of them the mask says.
_LAYER_TYPES = ("full_attention", "sliding_attention")

# The argument of a layer's crop was the length that is kept, and became what is removed, which is
# negative.
_CROP_OF_0_FORGETS_NONE = "max_length" not in inspect.signature(DynamicLayer.crop).parameters


class QuantizedStaticLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's codes (batch, heads, max_cache_len, bytes of a row), and scales of rows."""

    is_sliding = False
    is_croppable = True
    # A step quantises with a function that PyTorch's compiler does not see into.
    is_compileable = False

    def __init__(self, max_cache_len: int, form: str) -> None:
        """Memory is taken at the first update, which tells the shapes."""
        super().__init__()
        self.max_cache_len = max_cache_len
        self.form: Any = form
        self.cumulative_length = 0
        self.key_scale: Tensor | None = None
        self.value_scale: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes the memory, of zeros."""
        self.device = key_states.device
        self.keys, self.key_scale = self._room(key_states)
        self.values, self.value_scale = self._room(value_states)
        self.is_initialized = True

    def _room(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        codes, scale = self._codes(states[:1, :1, :1])
        shape = (*states.shape[:2], self.max_cache_len)
        room = codes.new_zeros((*shape, codes.shape[-1]))
        return room, None if scale is None else scale.new_zeros(shape)

    def _codes(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes and scales, in the order of states, (batch, heads, rows, ...)."""
        options: dict[str, Any] = {} if self.form in BLOCKS else {"scale_dtype": "float16"}
        rows = states.detach().transpose(1, 2)
        codes, scale = quantize(rows, self.form, **options)
        return codes.transpose(1, 2), None if scale is None else scale.transpose(1, 2)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Codes, Codes]:
        """Quantises the new rows and puts them behind the others; the whole cache."""
        begin = self.cumulative_length
        if not self.is_initialized or (begin == 0 and self._differs(key_states)):
            self.lazy_initialization(key_states, value_states)
        # A single sequence would be written to all, as PyTorch broadcasts.
        if self._differs(key_states):
            raise InvalidArgument(
                f"the cache has tokens of (sequences, heads) = {tuple(self.keys.shape[:2])}, "
                f"expected the batch's {tuple(key_states.shape[:2])}: make one for this batch, or "
                "reset() it before"
            )
        end = begin + key_states.shape[2]
        if end > self.max_cache_len:
            raise InvalidArgument(
                f"the cache has room for max_cache_len = {self.max_cache_len} tokens, expected at "
                f"least {end}"
            )
        kept: Any = ((self.keys, self.key_scale), (self.values, self.value_scale))
        for (room, scales), states in zip(kept, (key_states, value_states), strict=True):
            codes, scale = self._codes(states)
            room[:, :, begin:end].copy_(codes)
            if scales is not None and scale is not None:
                scales[:, :, begin:end].copy_(scale)
        self.cumulative_length = end
        keys, values = (Codes.of(room, scales, end) for room, scales in kept)
        return keys, values

    def _differs(self, states: Tensor) -> bool:
        return bool(self.keys.shape[:2] != states.shape[:2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask is for, and the position of the first."""
        return self.max_cache_len, 0

    def get_seq_length(self) -> int:
        """Tokens in the cache."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """Tokens that it has room for."""
        return self.max_cache_len

    get_max_cache_shape = get_max_length  # its name in older releases

    def crop(self, tokens: int, /) -> None:
        """Forgets the last -tokens tokens, or those behind the first `tokens`. 0 forgets what it
        does in transformers' own layers: none, or all in older releases.
        """
        length = self.cumulative_length
        from_the_end = tokens < 0 or (tokens == 0 and _CROP_OF_0_FORGETS_NONE)
        kept = length + tokens if from_the_end else tokens
        self.cumulative_length = max(0, min(kept, length))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Entry n becomes entry beam_idx[n]."""
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each entry repeats times."""
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These entries alone."""
        self._each(lambda x: x[indices])

    def offload(self) -> None:
        """Refused: there is nothing here that would bring codes back in time."""
        raise Unsupported("a quantised cache is not offloaded, expected offloading=False")

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in ("keys", "values", "key_scale", "value_scale"):
            x = getattr(self, name)
            if x is not None:
                setattr(self, name, change(x))


class QuantizedStaticCache(Cache):  # type: ignore[misc]
    """`strobe.transformers.quantized_static_cache` makes it."""

    def __init__(self, config: Any, max_cache_len: Any, form: str) -> None:
        """A layer for each of the model's that has keys and values of its own."""
        length = integer("max_cache_len", max_cache_len)
        if length < 1:
            raise InvalidArgument(f"max_cache_len = {length}, expected at least 1")
        if not hasattr(config, "get_text_config"):
            raise InvalidArgument(
                f"config is of type {type(config).__name__:.60}, expected the model's "
                "configuration: model.config"
            )
        config = config.get_text_config(decoder=True)
        count = config.num_hidden_layers
        kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * count)
        shared = getattr(config, "num_kv_shared_layers", None)
        kinds = kinds[:-shared] if shared else kinds
        for number, kind in enumerate(kinds):
            if kind not in _LAYER_TYPES:
                raise Unsupported(
                    f"layer {number} of the model is of type {kind}, expected one of "
                    f"{' and '.join(_LAYER_TYPES)}: use transformers' own StaticCache"
                )
        super().__init__(layers=[QuantizedStaticLayer(length, form) for _ in kinds])
