"""Draws models of transformers and what is done with them, and compares
attn_implementation="strobe" with eager.

    python tests/python/transformers_cases.py SEED COUNT [WORD...]

runs COUNT problems from SEED on, those whose text holds all words, and prints each that fails.
"""

from __future__ import annotations

import importlib
import random
import sys
from dataclasses import dataclass
from typing import Any, Final

import torch

from tensors import Tensor

VOCABULARY: Final = 97
NO_END: Final = 1000  # a token that no model has
SMALL: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: Final = {**SMALL, "num_key_value_heads": 2}
EXPERTS: Final = {"num_local_experts": 4, "num_experts_per_tok": 2}
ENCODER: Final = {
    **SMALL,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
BART: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}


def _layers(kind: str) -> dict[str, Any]:
    return {"layer_types": [kind, "full_attention"]}


# Of models whose layers are not alike, if nothing else is said.
FULL: Final = {**GROUPED, **_layers("full_attention")}


# Name: class of configuration, class of model, settings, and how a window is set: the name of a
# setting, and settings with it; None: the model has none.
Family = tuple[str, str, dict[str, Any], "tuple[str, dict[str, Any]] | None"]
_HYBRID: Final = ("sliding_window", _layers("sliding_attention"))
_PLAIN: Final[tuple[str, dict[str, Any]]] = ("sliding_window", {})
DECODERS: Final[dict[str, Family]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED, None),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": None}, _PLAIN),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**GROUPED, **EXPERTS, "sliding_window": None},
        _PLAIN,
    ),
    "ministral": (
        "MinistralConfig",
        "MinistralForCausalLM",
        {**FULL, "head_dim": 8, "sliding_window": 100},
        _HYBRID,
    ),
    "qwen2": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        GROUPED,
        ("sliding_window", {"use_sliding_window": True, "max_window_layers": 1}),
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            **GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        None,
    ),
    "qwen3": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {**GROUPED, "head_dim": 8},
        ("sliding_window", {"use_sliding_window": True, "max_window_layers": 1}),
    ),
    "phi": ("PhiConfig", "PhiForCausalLM", GROUPED, None),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**GROUPED, "sliding_window": None}, _PLAIN),
    "phimoe": (
        "PhimoeConfig",
        "PhimoeForCausalLM",
        {**GROUPED, **EXPERTS, "sliding_window": None},
        _PLAIN,
    ),
    "starcoder2": (
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        {**GROUPED, "sliding_window": None},
        _PLAIN,
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**GROUPED, "head_dim": 8}, None),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**GROUPED, "head_dim": 8, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
        ("sliding_window", {}),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**FULL, "head_dim": 8, "query_pre_attn_scalar": 8},
        _HYBRID,
    ),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", FULL, _HYBRID),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", GROUPED, None),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", FULL, _HYBRID),
    "granite": ("GraniteConfig", "GraniteForCausalLM", GROUPED, None),
    "smollm3": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        FULL,
        ("sliding_window", {"use_sliding_window": True, **_layers("sliding_attention")}),
    ),
    "exaone4": (
        "Exaone4Config",
        "Exaone4ForCausalLM",
        {**FULL, "sliding_window": None},
        _HYBRID,
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SMALL, None),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {**SMALL, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        None,
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
        None,
    ),
    "modernbert_decoder": (
        "ModernBertDecoderConfig",
        "ModernBertDecoderForCausalLM",
        {**SMALL, "global_attn_every_n_layers": 2},
        ("local_attention", {}),
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART, None),
    "t5gemma": ("T5GemmaConfig", "T5GemmaForConditionalGeneration", {}, ("sliding_window", {})),
}
ENCODERS: Final[dict[str, Family]] = {
    "bert": ("BertConfig", "BertModel", ENCODER, None),
    "roberta": ("RobertaConfig", "RobertaModel", ENCODER, None),
    "electra": ("ElectraConfig", "ElectraModel", {**ENCODER, "embedding_size": 32}, None),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertModel",
        {**SMALL, "dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48},
        None,
    ),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertModel",
        {**SMALL, "global_attn_every_n_layers": 2},
        ("local_attention", {}),
    ),
    "eurobert": ("EuroBertConfig", "EuroBertModel", GROUPED, None),
    # Decoders whose configuration makes encoders of them.
    "llama encoder": ("LlamaConfig", "LlamaModel", {**GROUPED, "is_causal": False}, None),
    "gemma3 encoder": (
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {
            **FULL,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "use_bidirectional_attention": True,
        },
        _HYBRID,
    ),
}
FAMILIES: Final = DECODERS | ENCODERS
ENCODER_DECODERS: Final = ("bart", "t5gemma")
PADDING: Final = ("none", "left", "right", "both", "inside")
CACHES: Final = ("dynamic", "static", "static beyond", "chunks", "beams", "continued")
BACKENDS: Final = (None, "eager", "aot_eager")


@dataclass(frozen=True)
class Case:
    """One comparison."""

    family: str
    window: int | None
    padding: str
    task: str  # "forward", "train", "packed", or one of CACHES: generation
    backend: str | None  # of torch.compile
    lengths: tuple[int, ...]
    seed: int

    def __str__(self) -> str:
        compiled = f"compiled by {self.backend}" if self.backend else "eager"
        return (
            f"seed {self.seed}: {self.family}, window {self.window}, padding {self.padding}, "
            f"{self.task}, {compiled}, lengths {self.lengths}"
        )


def draw(seed: int) -> Case:
    """The case of a seed. A family's features are drawn, and those that it lacks left out."""
    draws = random.Random(seed)
    family = draws.choice([*FAMILIES])
    window = draws.choice((1, 2, 3, 4, 5, 8, 16, 100)) if draws.random() < 0.75 else None
    if FAMILIES[family][3] is None:
        window = None
    is_decoder = family in DECODERS
    task = draws.choice(
        ("forward", "train", *CACHES, *CACHES) if is_decoder else ("forward", "train")
    )
    if is_decoder and family not in ENCODER_DECODERS and draws.random() < 0.1:
        task = "packed"
    padding = draws.choice(PADDING)
    windowed = window is not None or family in ("modernbert", "modernbert_decoder", "gemma2")
    if padding == "inside" and (windowed or task not in ("forward", "train")):
        padding = "both"
    if task in CACHES and family not in ENCODER_DECODERS and padding != "none":
        padding = "left"  # generation continues at the right
    if task in CACHES and window == 1:
        window = 2  # in transformers' own caches of one key, keys[-0:] is all of them
    if task in CACHES and family == "t5gemma" and window is not None:
        window = 100  # its own caches cut the encoder's keys to the window, and eager fails too
    if task == "packed":
        padding = "none"
    backend = draws.choice(BACKENDS[1:]) if draws.random() < 0.2 else None
    if task in ("beams", "chunks", "continued"):
        backend = None
    longest = draws.choice((3, 6, 12, 20, 40))
    lengths = tuple(draws.randint(1, longest) for _ in range(draws.randint(1, 4)))
    return Case(family, window, padding, task, backend, lengths, seed)


# ------------------------------------------------------------------------------- models and batches


def configuration(transformers: Any, case: Case) -> Any:
    config_class, _, settings, window = FAMILIES[case.family]
    settings = dict(settings)
    if case.window is not None and window is not None:
        size = 2 * case.window if window[0] == "local_attention" else case.window
        settings |= {window[0]: size, **window[1]}
    if case.family == "t5gemma":
        settings = {"head_dim": 8, "query_pre_attn_scalar": 8, **GROUPED, **settings}
        kind = "full_attention" if case.window is None else "sliding_attention"
        settings |= {"layer_types": [kind, "full_attention"], "dropout_rate": 0.0}
        # Both halves are configurations of their own, which the model's changes.
        return transformers.T5GemmaConfig(
            encoder=dict(settings),
            decoder=dict(settings),
            vocab_size=VOCABULARY,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            dropout_rate=0.0,
        )
    is_causal = settings.pop("is_causal", None)
    config = getattr(transformers, config_class)(**settings)
    if is_causal is not None:
        config.is_causal = is_causal
    return config


def make(transformers: Any, case: Case, attention: str) -> Any:
    """The model, with the same random weights for each attention."""
    config = configuration(transformers, case)
    torch.manual_seed(case.seed)
    model_class = getattr(transformers, FAMILIES[case.family][1])
    model = model_class._from_config(config, attn_implementation=attention).eval()
    for name, parameter in model.named_parameters():  # so that it matters what is seen
        if any(part in name for part in ("q_proj.weight", "k_proj.weight", "query", "Wqkv")):
            parameter.data.mul_(8)
    return model


def tokens_of(case: Case) -> tuple[Tensor, Tensor]:
    """Token ids and mask, (batch, seqlen)."""
    draws = random.Random(case.seed + 1)
    generator = torch.Generator().manual_seed(case.seed)
    longest = max(case.lengths)
    if case.padding in ("left", "right", "both") and draws.random() < 0.3:
        longest += draws.randint(1, 3)  # no row is full
    ids = torch.randint(3, VOCABULARY, (len(case.lengths), longest), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in zip(mask, case.lengths, strict=True):
        begin = {"left": longest - length, "right": 0}.get(case.padding, 0)
        if case.padding == "both":
            begin = draws.randint(0, longest - length)
        row[begin : begin + length] = 1
        if case.padding == "none":
            row[:] = 1
        if case.padding == "inside" and length > 2:
            row[draws.randint(1, length - 2)] = 0
    return torch.where(mask > 0, ids, torch.zeros_like(ids)), mask


# -------------------------------------------------------------------------------------- comparisons


def _outputs(model: Any, case: Case) -> Tensor:
    """Logits or hidden states of all tokens that are no padding."""
    ids, mask = tokens_of(case)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if case.task == "packed":
        lengths = case.lengths
        ids = torch.cat([row[:n] for row, n in zip(ids, lengths, strict=True)])[None]
        places = torch.cat([torch.arange(n) for n in lengths])[None]
        inputs, mask = {"input_ids": ids, "position_ids": places}, torch.ones_like(ids)
    if case.padding in ("left", "both") and case.family not in (
        *ENCODERS,
        *ENCODER_DECODERS,
        "opt",
    ):
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    rows = mask.bool()
    if case.family in ENCODER_DECODERS:
        inputs["decoder_input_ids"] = torch.flip(ids, (1,)).clamp(min=3)
        rows = torch.ones_like(rows)
        if case.padding == "right":
            inputs["decoder_attention_mask"] = mask
            rows = mask.bool()
    if case.task == "packed" or (case.seed % 2 and case.family not in ENCODERS):
        inputs["use_cache"] = False
    run = torch.compile(model, backend=case.backend) if case.backend else model
    found = run(**inputs)
    hidden = found.logits if hasattr(found, "logits") else found.last_hidden_state
    return hidden[rows]


def _compare(name: str, found: Tensor, wanted: Tensor, relative: float) -> None:
    """Raises an AssertionError that says how far off."""
    size = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    error = (found - wanted).abs().max().item() if wanted.numel() else 0.0
    if found.shape != wanted.shape or not error <= relative * size:
        raise AssertionError(f"{name} is off by {error}, expected at most {relative * size}")


def _generated(transformers: Any, model: Any, case: Case) -> Any:
    ids, mask = tokens_of(case)
    draws = random.Random(case.seed + 2)
    new = draws.randint(2, 10)
    settings: dict[str, Any] = {
        "max_new_tokens": new,
        "do_sample": False,
        "eos_token_id": NO_END,
        "pad_token_id": 0,
        "output_scores": True,
        "return_dict_in_generate": True,
        "disable_compile": True,
    }
    if case.task.startswith("static"):
        settings["cache_implementation"] = "static"
    if case.task == "static beyond":  # a cache that has room for more
        config = model.config.get_text_config(decoder=True)
        settings.pop("cache_implementation")
        room = ids.shape[1] + new + 30
        if case.family in ENCODER_DECODERS:
            self_cache = transformers.StaticCache(config=config, max_cache_len=new + 30)
            cross = transformers.StaticCache(config=config, max_cache_len=ids.shape[1])
            settings["past_key_values"] = transformers.EncoderDecoderCache(self_cache, cross)
        else:
            settings["past_key_values"] = transformers.StaticCache(
                config=config, max_cache_len=room
            )
    if case.task == "chunks" and case.family not in ENCODER_DECODERS:
        settings["prefill_chunk_size"] = draws.randint(1, 8)
    if case.task == "beams":
        settings["num_beams"] = 2
    if case.backend:
        config = transformers.CompileConfig(
            fullgraph=False, dynamic=None, backend=case.backend, mode=None
        )
        config._compile_all_devices = True
        settings |= {"disable_compile": False, "compile_config": config}
        if "past_key_values" not in settings:
            settings["cache_implementation"] = "static"
    found = model.generate(ids, attention_mask=mask, **settings)
    if case.task != "continued" or case.family in ENCODER_DECODERS:
        return found
    # Another turn, whose prompt follows what was said, padding between them included.
    settings["past_key_values"] = found.past_key_values
    more = torch.randint(3, VOCABULARY, (ids.shape[0], draws.randint(1, 20)))
    said = torch.cat((found.sequences, more), 1)
    mask = torch.nn.functional.pad(mask, (0, said.shape[1] - mask.shape[1]), value=1)
    return model.generate(said, attention_mask=mask, **settings)


def check(transformers: Any, case: Case) -> None:
    """Raises an AssertionError, or whatever a model raises, where Strobe is not as eager."""
    torch._dynamo.reset()
    models = [make(transformers, case, attention) for attention in ("eager", "strobe")]
    if case.task in CACHES:
        found = []
        for model in models:
            torch.manual_seed(case.seed)
            with torch.no_grad():
                plain = case if model is models[1] else Case(**{**vars(case), "backend": None})
                found.append(_generated(transformers, model, plain))
        wanted, strobes = found
        if not torch.equal(wanted.sequences, strobes.sequences):
            raise AssertionError(
                f"tokens {strobes.sequences.tolist()}, expected {wanted.sequences.tolist()}"
            )
        if case.task != "beams":
            _compare("a score", torch.stack(strobes.scores), torch.stack(wanted.scores), 1e-4)
        return
    if case.task in ("forward", "packed"):
        with torch.no_grad():
            wanted = _outputs(models[0], Case(**{**vars(case), "backend": None}))
            _compare("an output", _outputs(models[1], case), wanted, 1e-4)
        return
    results = []
    for model in models:
        plain = case if model is models[1] else Case(**{**vars(case), "backend": None})
        out = _outputs(model, plain)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        (out * weight).sum().backward()
        results.append((out.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (wanted, gradients), (out, found_gradients) = results
    _compare("an output", out, wanted, 1e-4)
    for name, gradient in gradients.items():
        other = found_gradients[name]
        if gradient is not None and other is not None:
            _compare(f"the gradient of {name}", other, gradient, 1e-3)
        elif (gradient is not None and gradient.any()) or (other is not None and other.any()):
            raise AssertionError(f"{name} has a gradient in one of the two")


def main() -> int:
    """As the module says."""
    import strobe.transformers

    first, count, *words = sys.argv[1:]
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    strobe.transformers.register()
    torch.set_num_threads(1)
    failed = 0
    for seed in range(int(first), int(first) + int(count)):
        case = draw(seed)
        if not all(word in str(case) for word in words):
            continue
        try:
            check(transformers, case)
        except Exception as error:
            failed += 1
            print(f"{case}: {type(error).__name__}: {str(error)[:600]}", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
