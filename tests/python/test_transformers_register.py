"""strobe.transformers.register(): models with attn_implementation="strobe" equal eager."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import strobe

torch = pytest.importorskip("torch")
if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

import strobe.transformers  # noqa: E402
from generation import check_generated  # noqa: E402
from strobe import _flash_attn, _padding  # noqa: E402

from tensors import Tensor  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
# class of configuration, class of model, configuration
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": 5}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**GROUPED, "sliding_window": 5, "head_dim": 16, "attn_logit_softcapping": 0.5},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SMALL),
    "gpt_oss": (  # with attention sinks
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **GROUPED,
            "head_dim": 16,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "bert": (
        "BertConfig",
        "BertModel",
        {**SMALL, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    ),
}
DECODERS = [name for name in MODELS if name != "bert"]
LENGTHS = (11, 17, 4)
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}  # float32 has no kernel on GPUs


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


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records that attention came to Strobe."""
    made: list[str] = []
    inner = _flash_attn.call

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append("dense" if arguments[3] == _flash_attn.DENSE else "packed")
        return inner(*arguments, **options)

    def recorded(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(strobe.flash_attn, "call", counted)
    monkeypatch.setattr(_padding, "_masked", recorded("masked", _padding._masked))
    cache = recorded("cache", strobe.attention_with_kvcache)
    monkeypatch.setattr(_padding, "attention_with_kvcache", cache)
    return made


def make(transformers: Any, name: str, attention: str, **changes: Any) -> Any:
    config_class, model_class, settings = MODELS[name]
    config = getattr(transformers, config_class)(**{**settings, **changes})
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # grouped products on GPUs take no float64
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).eval()
    # Larger than by default, so that soft capping and windows show in the results.
    for layer_name, parameter in model.named_parameters():
        if any(part in layer_name for part in ("q_proj.weight", "k_proj.weight", "query")):
            parameter.data.mul_(8)
        if layer_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def eager_models(transformers: Any, name: str, device: str) -> tuple[Any, Any]:
    """The model with eager attention in float64, and in the device's dtype."""
    dtypes = (torch.float64, DTYPE[device])
    exact, plain = (make(transformers, name, "eager").to(device, dtype) for dtype in dtypes)
    return exact, plain


def inputs(kind: str) -> tuple[dict[str, Any], Any]:
    """Arguments of a model, and which of its rows hold tokens."""
    generator = torch.Generator().manual_seed(1)
    longest = max(LENGTHS)
    ids = torch.randint(1, 97, (len(LENGTHS), longest), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in zip(mask, LENGTHS, strict=True):
        if kind == "padded left":
            row[: longest - length] = 0
        elif kind == "padded right":
            row[length:] = 0
    if kind == "packed":
        places = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        ids = torch.randint(1, 97, (1, sum(LENGTHS)), generator=generator)
        return {"input_ids": ids, "position_ids": places, "use_cache": False}, slice(None)
    return {"input_ids": ids, "attention_mask": mask}, mask.bool()


def run(model: Any, arguments: dict[str, Any], rows: Any) -> tuple[Tensor, dict[str, Tensor]]:
    found = model(**arguments)
    hidden = found.logits if hasattr(found, "logits") else found.last_hidden_state
    hidden = hidden[rows]
    weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    (hidden * weight).sum().backward()
    return hidden, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["whole", "padded left", "padded right", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_eager(name: str, kind: str, transformers: Any, calls: list[str]) -> None:
    if kind == "packed" and name == "bert":
        pytest.skip("transformers packs by position_ids in decoders only")
    if name == "bert" and transformers.__version__.startswith("4."):
        pytest.skip("BERT of transformers 4 asks for no attention implementation")
    arguments, rows = inputs(kind)
    wanted, wanted_gradients = run(make(transformers, name, "eager"), arguments, rows)
    assert not calls
    found, gradients = run(make(transformers, name, "strobe"), arguments, rows)
    # GPT-OSS makes its masks without position_ids: a packed batch is one sequence, eager too.
    whole = kind == "whole" or (kind == "packed" and name == "gpt_oss")
    assert calls == ["dense" if whole else "masked"] * 2
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert gradients.keys() == wanted_gradients.keys()
    for parameter, gradient in gradients.items():
        reference = wanted_gradients[parameter]
        size = reference.abs().max().item()
        torch.testing.assert_close(gradient, reference, rtol=1e-3, atol=1e-4 * max(size, 1))


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "gpt_oss"])
def test_a_collators_packed_batch(
    name: str, transformers: Any, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cu_seq_lens_q and its like of DataCollatorWithFlattening are taken as they are."""
    generator = torch.Generator().manual_seed(1)
    examples = [
        {"input_ids": torch.randint(1, 97, (length,), generator=generator).tolist()}
        for length in LENGTHS
    ]
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = {**collator(examples), "use_cache": False}
    labels = batch.pop("labels")
    assert labels.shape == (1, sum(LENGTHS))
    assert batch["cu_seq_lens_q"].flatten().tolist() == [0, 11, 28, 32]
    plain = {key: batch[key] for key in ("input_ids", "position_ids", "use_cache")}
    wanted, wanted_gradients = run(make(transformers, name, "eager"), plain, slice(None))
    monkeypatch.setattr(_padding, "attend", None)  # the lengths need no mask
    found, gradients = run(make(transformers, name, "strobe"), batch, slice(None))
    assert calls == ["packed"] * 2
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for parameter, gradient in gradients.items():
        reference = wanted_gradients[parameter]
        size = reference.abs().max().item()
        torch.testing.assert_close(gradient, reference, rtol=1e-3, atol=1e-4 * max(size, 1))


def test_sinks_of_packed_sequences() -> None:
    torch.manual_seed(4)
    q, k, v = torch.randn(1, 4, 32, 16), torch.randn(1, 2, 32, 16), torch.randn(1, 2, 32, 16)
    sinks = torch.randn(4).bfloat16()
    offsets = torch.tensor([0, 11, 28, 32])
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    lengths |= {"max_length_q": 17, "max_length_k": 17}
    options = {"is_causal": True, "sliding_window": 6, "s_aux": sinks}
    out, _ = strobe.transformers.attention(None, q, k, v, None, **options, **lengths)
    alone = []
    for a, b in itertools.pairwise(offsets.tolist()):
        own = [x[:, :, a:b] for x in (q, k, v)]
        attended = strobe.transformers.attention(None, own[0], own[1], own[2], None, **options)
        alone.append(attended[0])
    torch.testing.assert_close(out, torch.cat(alone, 1))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation(
    name: str, cache: str, device: str, transformers: Any, calls: list[str]
) -> None:
    """Left padded, beyond the windows of Mistral and Gemma 2."""
    arguments, rows = inputs("padded left")
    settings: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": "static"}

    def generate(attention: str) -> tuple[Tensor, Tensor]:
        model = make(transformers, name, attention).to(device, DTYPE[device])
        steps = model.generate(
            **{key: x.to(device) for key, x in arguments.items()},
            max_new_tokens=8,
            eos_token_id=1000,  # a token that no model has
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            disable_compile=True,
            **settings,
        )
        return steps.sequences.cpu(), torch.stack(steps.scores)

    tokens, scores = generate("strobe")
    assert len(calls) == 2 * 8
    assert calls[:2] == ["masked"] * 2  # the prompt, whose padding takes no part
    # Of what follows, keys are read where they lie. Mistral's window has passed the padding.
    assert "cache" in calls or name == "mistral"
    if DTYPE[device] == torch.float32:
        wanted, wanted_scores = generate("eager")
        assert torch.equal(tokens, wanted)
        torch.testing.assert_close(scores, wanted_scores, rtol=1e-4, atol=1e-4)
        return
    exact, plain = eager_models(transformers, name, device)
    longest = max(LENGTHS)
    for b, seen in enumerate(rows):
        prompt = tokens[b, :longest][seen].tolist()
        check_generated(exact, plain, prompt, tokens[b, longest:].tolist(), scores[:, b])


def test_lengths_that_differ_from_one_batch_to_the_next(transformers: Any, device: str) -> None:
    """What is kept of one mask is not used for the next."""
    model = make(transformers, "llama", "strobe").to(device, DTYPE[device])
    exact, plain = eager_models(transformers, "llama", device)
    ids = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(3)).to(device)
    for length in (3, 5, 8):
        mask = torch.ones_like(ids)
        mask[0, : 9 - length] = 0
        with torch.no_grad():
            found = model(input_ids=ids, attention_mask=mask).logits[mask.bool()].double()
            rows = (ids[0, 9 - length :], ids[1])  # padding is NaN with eager and float64
            wanted, near = (
                torch.cat([m(input_ids=row[None]).logits[0].double() for row in rows])
                for m in (exact, plain)
            )
        allowed = 3 * (near - wanted).abs().max() + 1e-5
        assert (found - wanted).abs().max() <= allowed


def test_what_the_varlen_functions_have_not_is_refused(transformers: Any) -> None:
    model = make(transformers, "llama", "strobe")
    ids = torch.randint(1, 97, (2, 9))
    with pytest.raises(strobe.Unsupported, match=r'\(2, 1, 9, 9\).*"sdpa"'):
        model(input_ids=ids, attention_mask=torch.zeros(2, 1, 9, 9))
    utils = importlib.import_module("transformers.masking_utils")
    with pytest.raises(strobe.Unsupported, match="or_masks"):
        utils.create_causal_mask(
            config=model.config,
            inputs_embeds=torch.randn(2, 9, 64),
            attention_mask=None,
            past_key_values=None,
            or_mask_function=lambda b, h, q, k: q < 3,
        )
    chunked = utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int))
    with pytest.raises(strobe.Unsupported, match="chunked_overlay"):
        strobe.transformers.attention_mask(2, 9, 9, mask_function=chunked)
    mistral = make(transformers, "mistral", "strobe")
    holes = torch.ones_like(ids)
    holes[:, 4] = 0
    with pytest.raises(strobe.Unsupported, match="padding inside"):
        mistral(input_ids=ids, attention_mask=holes)


def test_checkpointed_training_with_dropout(transformers: Any) -> None:
    model = make(transformers, "llama", "strobe", attention_dropout=0.2).train()
    ids = torch.randint(1, 97, (2, 9))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        model(input_ids=ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    wanted = gradients()
    model.gradient_checkpointing_enable()
    for a, b in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(a, b)
