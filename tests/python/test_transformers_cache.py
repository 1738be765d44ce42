"""strobe.transformers.quantized_static_cache: generation over codes equals eager attention over
what they stand for.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

import strobe

torch = pytest.importorskip("torch")
if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

import strobe.transformers  # noqa: E402
from strobe import _padding  # noqa: E402

from tensors import Tensor  # noqa: E402

Model = Any
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "eos_token_id": None,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
HYBRID = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 5}),
    "Gemma2": (
        "Gemma2ForCausalLM",
        {**GROUPED, **HYBRID, "head_dim": 32, "attn_logit_softcapping": 0.5},
    ),
    "GPTNeoX": ("GPTNeoXForCausalLM", SMALL),
    "GptOss": (  # with attention sinks
        "GptOssForCausalLM",
        {**GROUPED, **HYBRID, "head_dim": 32, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}
# What two codes beside each other are apart, over the largest value of their row.
ONE_CODE = {
    "int8": 1 / 127,
    "float8_e4m3fn": 1 / 8,
    "float8_e5m2": 1 / 4,
    "q8_0": 1 / 127,
    "q4_0": 1 / 7,
}
FORMS = list(ONE_CODE)
LENGTHS = (11, 17, 4)


@pytest.fixture(scope="module")
def transformers() -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    package = importlib.import_module("transformers")
    strobe.transformers.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield package
    torch.set_num_threads(threads)
    patch.undo()


def models(transformers: Any, name: str, **more: Any) -> tuple[Model, Model]:
    """Of the same weights: with eager attention, and with Strobe's."""
    of_model, settings = MODELS[name]
    made = []
    for implementation in ("eager", "strobe"):
        torch.manual_seed(1)
        config = getattr(transformers, f"{name}Config")(**settings, **more)
        config._attn_implementation = implementation
        made.append(getattr(transformers, of_model)(config).eval())
    return made[0], made[1]


def floats_of(codes: Any, scale: Any, form: Any) -> Tensor:
    """What codes of (batch, rows, heads, head_dim) stand for, (batch, heads, rows, head_dim)."""
    floats = strobe.dequantize(codes, scale, form=form if form in ("q8_0", "q4_0") else None)
    return torch.as_tensor(floats).transpose(1, 2)


def rounded(states: Tensor, form: Any) -> Tensor:
    """What codes of (batch, heads, rows, head_dim) stand for."""
    options: dict[str, Any] = {} if form in ("q8_0", "q4_0") else {"scale_dtype": "float16"}
    codes, scale = strobe.quantize(states.transpose(1, 2), form, **options)
    return floats_of(codes, scale, form).to(states.dtype)


def cache_of_floats(transformers: Any, form: str) -> Any:
    """A cache that grows, of what the codes stand for."""
    base: Any = transformers.cache_utils.DynamicLayer

    class Layer(base):  # type: ignore[misc]
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kw: Any) -> Any:
            key_states, value_states = rounded(key_states, form), rounded(value_states, form)
            return super().update(key_states, value_states, *args, **kw)

    return transformers.cache_utils.Cache(layer_class_to_replicate=Layer)


def cache_of_codes(transformers: Any, form: str, filled: Any, mask: Tensor | None = None) -> Any:
    """A cache that grows, of what the codes of a cache stand for that the same tokens have filled.
    Its own states differ from those by rounding alone, which moves a code where they lie between
    two: it sees that few do, by no more than one. mask: which of the first tokens are no padding.
    """
    base: Any = transformers.cache_utils.DynamicLayer
    layers = iter(filled.layers)

    class Layer(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kw: Any) -> None:
            super().__init__(*args, **kw)
            self.filled = next(layers)

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kw: Any) -> Any:
            rows = super().update(key_states, value_states, *args, **kw)[0].shape[2]
            of, found = self.filled, []
            for codes, scale, states in (
                (of.keys, of.key_scale, key_states),
                (of.values, of.value_scale, value_states),
            ):
                of_rows = None if scale is None else scale[:, :, :rows].transpose(1, 2)
                floats = floats_of(codes[:, :, :rows].transpose(1, 2), of_rows, form)
                new = slice(rows - states.shape[2], rows)
                apart = (floats[:, :, new] - rounded(states, form)).abs()
                largest = states.abs().amax(-1, keepdim=True)
                if mask is not None and rows <= mask.shape[1]:
                    apart = apart * mask[:, None, new, None]
                assert (apart <= 1.01 * ONE_CODE[form] * largest).all()
                assert (apart > 1e-5 * largest).float().mean() < 0.05
                found.append(floats)
            return tuple(found)

    return transformers.cache_utils.Cache(layer_class_to_replicate=Layer)


def prompts(left: bool) -> dict[str, Tensor]:
    """A batch of unequal lengths, with padding on one side."""
    torch.manual_seed(2)
    longest = max(LENGTHS)
    ids = torch.randint(1, 97, (len(LENGTHS), longest))
    column = torch.arange(longest)
    lengths = torch.tensor(LENGTHS)[:, None]
    mask = (column >= longest - lengths) if left else (column < lengths)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", FORMS)
def test_generation(transformers: Any, name: str, form: str) -> None:
    """A padded batch, greedy: the same tokens, and nearly the same logits at every step."""
    eager, model = models(transformers, name)
    batch = prompts(left=True)
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    cache = strobe.transformers.quantized_static_cache(model.config, 17 + 9, form)  # type: ignore[arg-type]
    got = model.generate(**batch, past_key_values=cache, **options)
    reference = cache_of_codes(transformers, form, cache, batch["attention_mask"])
    wanted = eager.generate(**batch, past_key_values=reference, **options)
    assert "the attention of a model of transformers" in strobe.why()
    assert len(got.logits) == 9
    for step, (x, y) in enumerate(zip(got.logits, wanted.logits, strict=True)):
        assert (x - y).abs().max() < 2e-4, step
    assert (got.sequences == wanted.sequences).all()
    layer = cache.layers[0]
    assert not layer.keys.dtype.is_floating_point or form.startswith("float8")
    assert layer.keys.shape[2] == 26
    assert cache.get_seq_length() == 25  # the last token is in no cache
    # Codes are far from floats, or the test would show little.
    plain = eager.generate(**batch, **options)
    assert max((x - y).abs().max() for x, y in zip(got.logits, plain.logits, strict=True)) > 5e-4


def test_prompts_in_chunks_and_on_the_right(transformers: Any) -> None:
    """Forward calls as generate does not make them: chunks of many queries, padding behind."""
    eager, model = models(transformers, "Llama")
    batch = prompts(left=False)
    filled = strobe.transformers.quantized_static_cache(model.config, 40)
    of_codes = cache_of_codes(transformers, "int8", filled, batch["attention_mask"])
    outs = []
    for each, cache in ((model, filled), (eager, of_codes)):
        parts = []
        with torch.no_grad():
            for begin, end in ((0, 9), (9, 10), (10, 17)):
                part = each(
                    input_ids=batch["input_ids"][:, begin:end],
                    attention_mask=batch["attention_mask"][:, :end],
                    past_key_values=cache,
                )
                parts.append(part.logits)
        outs.append(torch.cat(parts, 1))
    for b, length in enumerate(LENGTHS):
        assert (outs[0][b, :length] - outs[1][b, :length]).abs().max() < 1e-4


def test_whole_cache_and_no_mask(transformers: Any) -> None:
    """A cache that the prompt fills, and attention that is handed no mask."""
    eager, model = models(transformers, "Llama")
    ids = torch.arange(1, 13)[None]
    full = strobe.transformers.quantized_static_cache(model.config, 12, "q8_0")
    with torch.no_grad():
        got = model(ids, past_key_values=full).logits
        wanted = eager(ids, past_key_values=cache_of_codes(transformers, "q8_0", full)).logits
        assert (got - wanted).abs().max() < 1e-4
    layer = strobe.transformers.quantized_static_cache(model.config, 20).layers[0]
    q, k, v = torch.randn(3, 2, 2, 5, 32)
    keys, values = layer.update(k, v)
    out, _ = strobe.transformers.attention(None, q, keys, values, None, is_causal=True)
    q, k, v = (x.transpose(1, 2) for x in (q, rounded(k, "int8"), rounded(v, "int8")))
    wanted = strobe.flash_attn.flash_attn_func(q, k, v, causal=True)
    assert (out - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("form", ["int8", "q8_0"])
def test_bfloat16(transformers: Any, device: str, form: Any) -> None:
    """A prompt, more of it, and a token; on GPUs too."""
    eager, model = models(transformers, "Llama")
    model = model.to(device, torch.bfloat16)
    ids = torch.arange(1, 50)[None]
    floats = cache_of_floats(transformers, form)
    cache = strobe.transformers.quantized_static_cache(model.config, 50, form)
    with torch.no_grad():
        for begin, end in ((0, 30), (30, 48), (48, 49)):
            part = ids[:, begin:end]
            wanted = eager(part, past_key_values=floats).logits
            got = model(part.to(device), past_key_values=cache).logits
            assert got.dtype == torch.bfloat16
            assert (got.cpu() - wanted).abs().max() < 0.03 * wanted.abs().max()


def test_beams_and_other_uses_of_a_cache(transformers: Any) -> None:
    """What reorders, repeats, crops and resets entries moves scales with their codes."""
    eager, model = models(transformers, "Llama")
    batch = prompts(left=True)
    options: dict[str, Any] = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    wanted = eager.generate(
        **batch, past_key_values=cache_of_floats(transformers, "int8"), **options
    )
    cache = strobe.transformers.quantized_static_cache(model.config, 30)
    assert (model.generate(**batch, past_key_values=cache, **options) == wanted).all()

    cache = strobe.transformers.quantized_static_cache(model.config, 30)
    ids = batch["input_ids"][1:2]
    with torch.no_grad():
        first = model(ids, past_key_values=cache).logits
        cache.crop(-5)
        assert cache.get_seq_length() == 12
        assert (model(ids[:, 12:], past_key_values=cache).logits - first[:, 12:]).abs().max() < 1e-5
        cache.crop(12)
        # What 0 means is the release's, as in its own layers; sizes have a name or another.
        others = transformers.cache_utils.DynamicCache()
        others.update(*torch.zeros(2, 1, 2, 12, 32), 0)
        kept = strobe.transformers.quantized_static_cache(model.config, 30)
        kept.layers[0].update(*torch.zeros(2, 1, 2, 12, 32))
        for some in (others, kept):
            some.crop(0)
        assert kept.get_seq_length() == others.get_seq_length()
        names = {"get_max_length", "get_max_cache_shape"}
        assert {getattr(kept.layers[0], name)() for name in names} == {30}
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([1, 0, 1]))
        three = model(ids[:, 12:].expand(3, -1), past_key_values=cache).logits
        assert (three - first[:, 12:]).abs().max() < 1e-5
        cache = strobe.transformers.quantized_static_cache(model.config, 30)
        model(ids.flip(1), past_key_values=cache)
        cache.reset()
        assert (model(ids, past_key_values=cache).logits - first).abs().max() < 1e-5


@pytest.mark.parametrize("form", ["int8", "q8_0"])
def test_a_batch_of_another_size(transformers: Any, form: Any) -> None:
    """It is not written over the sequences that are there; after a reset it has room of its own."""
    _, model = models(transformers, "Llama")
    ids = torch.arange(1, 9)[None]
    for before, after in ((3, 1), (1, 3), (3, 2)):
        cache = strobe.transformers.quantized_static_cache(model.config, 30, form)
        fresh = strobe.transformers.quantized_static_cache(model.config, 30, form)
        with torch.no_grad():
            model(ids.expand(before, -1), past_key_values=cache)
            held = cache.layers[0].keys.clone()
            words = rf"\(sequences, heads\) = \({before}, 2\), expected the batch's \({after}, 2\)"
            with pytest.raises(strobe.InvalidArgument, match=words):
                model(ids.expand(after, -1), past_key_values=cache)
            assert (cache.layers[0].keys == held).all()
            assert cache.get_seq_length() == 8
            cache.reset()
            batch = ids.flip(1).expand(after, -1)
            for more in (batch, ids[:, :1].expand(after, -1)):
                wanted = model(more, past_key_values=fresh).logits
                assert (model(more, past_key_values=cache).logits == wanted).all()


def test_what_is_refused(transformers: Any) -> None:
    eager, model = models(transformers, "Llama")
    make = strobe.transformers.quantized_static_cache
    ids = torch.arange(1, 9)[None]
    with pytest.raises(strobe.InvalidArgument, match=r"form = 'int5', expected \"int8\""):
        make(model.config, 20, "int5")  # type: ignore[arg-type]
    with pytest.raises(strobe.InvalidArgument, match="max_cache_len = 0, expected at least 1"):
        make(model.config, 0)
    with pytest.raises(strobe.InvalidArgument, match="max_cache_len = 'x', expected an integer"):
        make(model.config, "x")  # type: ignore[arg-type]
    with pytest.raises(strobe.InvalidArgument, match=r"config is of type LlamaForC.*model\.config"):
        make(model, 20)
    chunked = transformers.LlamaConfig(**GROUPED)
    chunked.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(strobe.Unsupported, match="layer 1 of the model is of type chunked_att"):
        make(chunked, 20)
    with torch.no_grad():
        words = "room for max_cache_len = 7 tokens, expected at least 8"
        with pytest.raises(strobe.InvalidArgument, match=words):
            model(ids, past_key_values=make(model.config, 7))
        # Whoever else computes with codes is stopped, and told what to do.
        for implementation in ("eager", "sdpa"):
            eager.config._attn_implementation = implementation
            words = 'this cache holds codes, with which attn_implementation="strobe" alone'
            with pytest.raises(strobe.Unsupported, match=words):
                eager(ids, past_key_values=make(eager.config, 20))
        holes = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]])
        with pytest.raises(strobe.Unsupported, match="padding inside over a quantised cache"):
            model(ids, attention_mask=holes, past_key_values=make(model.config, 20))
    with pytest.raises(strobe.Unsupported, match=r"no gradient, expected torch.no_grad\(\)"):
        model(ids, past_key_values=make(model.config, 20))
    layer = make(model.config, 20).layers[0]
    q, k, v = torch.randn(3, 1, 2, 5, 32)
    codes, values = layer.update(k, v)
    with pytest.raises(strobe.Unsupported, match=r"dropout = 0\.5 over a quantised cache"):
        strobe.transformers.attention(None, q, codes, values, None, dropout=0.5, is_causal=True)
    numbers = torch.tensor([[1, 1, 2, 2, 2, *[0] * 15]])
    several = _padding.encode(_padding.Kind(True, True, False), numbers, 0)
    with pytest.raises(strobe.Unsupported, match="several sequences in a row over a quantised"):
        strobe.transformers.attention(None, q, codes, values, several)
    with pytest.raises(strobe.Unsupported, match="cu_seq_lens_q with a quantised cache"):
        strobe.transformers.attention(
            None, q, codes, values, None, cu_seq_lens_q=torch.tensor([0, 5])
        )
    with pytest.raises(strobe.Unsupported, match="a quantised cache is not offloaded"):
        layer.offload()
    for use in (lambda x: x.float(), lambda x: x + 1, lambda x: x.T, lambda x: x[0], torch.sum):
        with pytest.raises(strobe.Unsupported, match="holds codes"):
            use(codes)
    assert isinstance(codes, _padding.Codes)
    assert codes.shape == (1, 2, 20, 32)
    assert codes.dtype == torch.int8
