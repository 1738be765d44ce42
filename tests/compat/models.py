"""Runs one library with a tiny model of random weights, beside the distribution flash-attn or not.

    models.py LIBRARY RESULT

RESULT is a JSON file: versions, which of the library's imports of flash_attn fail, numbers of the
model with plain attention and, where flash-attn is installed, with flash_attn's, and how often
Strobe was called then. Nothing is loaded from a model hub. `run.py` starts this.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="2"
)

import torch

Numbers = dict[str, list[float]]

TOKENS = 97
BESIDE = importlib.util.find_spec("flash_attn") is not None


# ------------------------------------------------------------------------------------- transformers


def repair_torchvision() -> None:
    """PyPI's torchvision is made for CUDA: beside PyTorch's CPU build its operators are missing,
    and its import fails over those of which it describes shapes. Nothing here calls them.
    """
    while importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            missing = re.search(r"operator (torchvision::\w+) does not exist", str(error))
            if missing is None:
                raise
            torch.library.define(missing[1], "(Tensor x) -> Tensor")
        else:
            return


@contextlib.contextmanager
def a_gpu() -> Iterator[None]:
    """What transformers wants before it looks for flash-attn; 4.57 asks for it twice."""
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.version.cuda", "12.8"),
    ):
        yield


def transformers() -> Any:
    """The package, which finds flash-attn where it is, and takes the CPU for a GPU's place."""
    with a_gpu():
        package = importlib.import_module("transformers")
        utils = importlib.import_module("transformers.utils.import_utils")
        flash = importlib.import_module("transformers.modeling_flash_attention_utils")
        assert utils.is_flash_attn_2_available() == BESIDE
    matrix = getattr(flash, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", None)
    if matrix is not None:
        matrix[2]["supported_devices"] = ((lambda: True, "cpu"),)
    return package


def implementation(attention: str) -> str:
    return "flash_attention_2" if attention == "flash" else "eager"


def model_of(name: str, head: str, attention: str, **settings: Any) -> Any:
    """A tiny model of transformers; the same weights for each attention."""
    package = transformers()
    with a_gpu():
        config = getattr(package, f"{name}Config")(
            vocab_size=TOKENS,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            pad_token_id=0,
            **settings,
        )
        config._attn_implementation = implementation(attention)
        torch.manual_seed(0)
        return getattr(package, f"{name}{head}")(config).eval()


def llama(attention: str) -> Any:
    return model_of("Llama", "ForCausalLM", attention, num_key_value_heads=2)


def batch() -> dict[str, Any]:
    """Three rows of tokens, padded on the right."""
    torch.manual_seed(1)
    mask = torch.arange(23) < torch.tensor([[11], [23], [7]])
    ids = torch.randint(1, TOKENS, (3, 23)) * mask
    return {"input_ids": ids, "attention_mask": mask.long()}


def numbers(x: Any) -> list[float]:
    return [float(y) for y in x.detach().float().flatten()[:4096]]


def run_and_differentiate(model: Any) -> Numbers:
    inputs = batch()
    found = model(**inputs)
    rows = getattr(found, "logits", getattr(found, "last_hidden_state", None))
    assert rows is not None
    rows = rows[inputs["attention_mask"].bool()]
    rows.square().mean().backward()
    gradient = next(p.grad for p in model.parameters() if p.grad is not None)
    return {"out": numbers(rows), "gradient": numbers(100 * gradient)}


def run_transformers(attention: str) -> Numbers:
    transformers()
    with a_gpu():  # which in 4.57 takes more than the others from flash_attn
        importlib.import_module("transformers.models.modernbert.modeling_modernbert")
    found: Numbers = {}
    for name, head, settings in (
        ("Llama", "ForCausalLM", {"num_key_value_heads": 2}),
        ("Mistral", "ForCausalLM", {"num_key_value_heads": 2, "sliding_window": 5}),
        ("Qwen2", "ForCausalLM", {"num_key_value_heads": 2}),
        ("GPTNeoX", "ForCausalLM", {}),
        ("Bert", "Model", {}),
    ):
        with a_gpu():
            model_class = getattr(transformers(), f"{name}{head}")
        if not getattr(model_class, "_supports_flash_attn", False):
            continue  # BERT before 5.0
        model = model_of(name, head, attention, **settings)
        for what, x in run_and_differentiate(model).items():
            found[f"{name} {what}"] = x
    return found


# ---------------------------------------------------------------------------------- on transformers


def run_peft(attention: str) -> Numbers:
    model = llama(attention)
    peft = importlib.import_module("peft")
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return run_and_differentiate(peft.get_peft_model(model, config).eval())


def run_accelerate(attention: str) -> Numbers:
    model = llama(attention)
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    inputs = batch()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    losses = []
    for _ in range(3):
        loss = model(**inputs, labels=labels).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return {"losses": numbers(torch.stack(losses))}


def tokenizer() -> Any:
    """Of single words "1" to "96"."""
    words = {"[PAD]": 0, **{str(n): n for n in range(1, TOKENS)}}
    parts = importlib.import_module("tokenizers")
    made = parts.Tokenizer(parts.models.WordLevel(words, unk_token="1"))
    made.pre_tokenizer = parts.pre_tokenizers.Whitespace()
    package = transformers()
    return package.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="96", unk_token="1", model_max_length=64
    )


def run_trl(attention: str) -> Numbers:
    """With flash_attn its trainer packs rows without padding; the loss is the same."""
    model = llama(attention)
    trl, datasets = (importlib.import_module(name) for name in ("trl", "datasets"))
    inputs = batch()
    rows = [
        {"input_ids": ids[mask.bool()].tolist()}
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = trl.SFTConfig(
            output_dir=folder,
            max_steps=2,
            per_device_train_batch_size=3,
            learning_rate=0.1,
            optim="sgd",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            padding_free=attention == "flash",
            max_length=None,
        )
        trainer = trl.SFTTrainer(
            model=model,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
        )
        trainer.train()
    return {"losses": [x["loss"] for x in trainer.state.log_history if "loss" in x]}


def run_sentence_transformers(attention: str) -> Numbers:
    model = model_of("Bert", "Model", "plain")
    package = importlib.import_module("sentence_transformers")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        with a_gpu():
            options = {"attn_implementation": implementation(attention)}
            encoder = package.SentenceTransformer(folder, device="cpu", model_kwargs=options)
        sentences = ["3 1 4 1 5 9 2 6", "27 18 28", "5"]
        return {"embeddings": numbers(encoder.encode(sentences, convert_to_tensor=True))}


# --------------------------------------------------------------------------------------- the others


def run_diffusers(attention: str) -> Numbers:
    package = importlib.import_module("diffusers")
    backends = ("flash", "flash_varlen") if attention == "flash" else ("native", "native")
    torch.manual_seed(0)
    flux = package.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ).eval()
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 24, 32),
        "pooled_projections": torch.randn(2, 32),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(24, 3),
        "timestep": torch.tensor([1.0, 0.5]),
    }
    found = {}
    for n, backend in enumerate(backends):
        flux.set_attention_backend(backend)
        flux.zero_grad()
        out = flux(**inputs).sample
        out.square().mean().backward()
        gradient = flux.transformer_blocks[0].attn.to_q.weight.grad
        found[f"Flux {n}"] = numbers(out)
        found[f"Flux {n} gradient"] = numbers(100 * gradient)
    torch.manual_seed(0)
    vae = package.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, layers_per_block=1, latent_channels=2
    ).eval()
    with torch.no_grad():
        found["AutoencoderKL"] = numbers(vae(torch.randn(1, 3, 8, 8)).sample)
    return found


def run_x_transformers(attention: str) -> Numbers:
    """Its switch is PyTorch's kernel; flash_attn is for packed sequences, on GPUs alone."""
    package = importlib.import_module("x_transformers")
    if BESIDE and attention == "flash":
        attend = importlib.import_module("x_transformers.attend").Attend
        assert attend(flash=True, flash_pack_seq=True).flash_attn_varlen_func is not None
    torch.manual_seed(0)
    layers = package.Decoder(dim=32, depth=2, heads=2, attn_flash=attention == "flash")
    model = package.TransformerWrapper(num_tokens=TOKENS, max_seq_len=32, attn_layers=layers)
    return {"out": numbers(model.eval()(batch()["input_ids"]))}


def run_timm(attention: str) -> Numbers:
    """Its switch is PyTorch's kernel; it does not know flash_attn."""
    timm = importlib.import_module("timm")
    importlib.import_module("timm.layers").set_fused_attn(attention == "flash")
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, img_size=64, depth=2, num_classes=7
    )
    torch.nn.init.normal_(model.head.weight)
    return {"out": numbers(model.eval()(torch.randn(2, 3, 64, 64)))}


# library: its run, and whether its switch leads to flash_attn on a CPU
LIBRARIES: dict[str, tuple[Callable[[str], Numbers], bool]] = {
    "diffusers": (run_diffusers, True),
    "transformers": (run_transformers, True),
    "peft": (run_peft, True),
    "trl": (run_trl, True),
    "sentence-transformers": (run_sentence_transformers, True),
    "accelerate": (run_accelerate, True),
    "x-transformers": (run_x_transformers, False),
    "timm": (run_timm, False),
}


# ------------------------------------------------------------------------------------------ imports


def imported_names(library: str) -> set[tuple[str, str]]:
    """(module, name) of all `from flash_attn... import ...` in the library's sources."""
    spec = importlib.util.find_spec(library.replace("-", "_"))
    assert spec is not None
    assert spec.submodule_search_locations is not None
    found = set()
    for folder in spec.submodule_search_locations:
        for path in Path(folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            if "flash_attn" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                    if node.module.split(".")[0] == "flash_attn":
                        found |= {(node.module, alias.name) for alias in node.names}
                elif isinstance(node, ast.Import):
                    names = (alias.name for alias in node.names)
                    found |= {(x, "") for x in names if x.split(".")[0] == "flash_attn"}
    return found


def failed_imports(library: str) -> tuple[int, list[str]]:
    """How many names the library asks flash_attn for, and those that are not there."""
    wanted = sorted(imported_names(library))
    failed = []
    for module, name in wanted:
        try:
            found = importlib.import_module(module)
            if name:
                getattr(found, name)
        except (ImportError, AttributeError):
            failed.append(f"{module}.{name}".rstrip("."))
    return len(wanted), failed


def main() -> None:
    """As the module says."""
    library, target = sys.argv[1:]
    function, _ = LIBRARIES[library]
    repair_torchvision()
    result: dict[str, Any] = {
        "version": importlib.metadata.version(library),
        "beside": BESIDE,
        "plain": function("plain"),
        "calls": 0,
    }
    if BESIDE:
        assert importlib.util.find_spec("flash_attn.cute") is None
        result["names"], result["failed"] = failed_imports(library)
        flash = importlib.import_module("strobe.flash_attn")
        calls = []
        inner = flash.call  # of all its functions for dense and packed tensors

        def counted(*arguments: Any, **options: Any) -> Any:
            result = inner(*arguments, **options)
            calls.append(1)
            return result

        with mock.patch.object(flash, "call", counted):
            result["flash"] = function("flash")
        result["calls"] = len(calls)
    Path(target).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
