"""transformers' continuous batching, whose cache is paged, equal to its own eager generation: by
way of the distribution flash-attn, and of strobe.transformers.register().
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import strobe.flash_attn  # noqa: E402
import strobe.transformers  # noqa: E402
from generation import check_generated  # noqa: E402
from strobe import _flash_attn, _flash_cache  # noqa: E402
from test_transformers import GROUPED, MODELS, make, transformers  # noqa: E402, F401 - the fixture

LENGTHS = (11, 3, 17, 1, 8)
NEW = 6
NO_END = 1000  # a token that no model has
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}  # float32 has no kernel on GPUs


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records that attention came to Strobe, and how."""
    made: list[str] = []

    def counted(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            return inner(*arguments, **options)

        return call

    monkeypatch.setattr(strobe.flash_attn, "call", counted("packed", _flash_attn.call))
    monkeypatch.setattr(_flash_cache, "call", counted("cache", _flash_cache.call))
    return made


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks the package psutil for it, and without that finds none."""
    module = pytest.importorskip("transformers.generation.continuous_batching.cache")
    handler = module.PagedAttentionMemoryHandler
    monkeypatch.setattr(handler, "get_available_memory", staticmethod(lambda *_: 1 << 30))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 97, (n,), generator=generator).tolist() for n in LENGTHS]


def generate(transformers: Any, model: Any, **cache: Any) -> list[list[int]]:  # noqa: F811
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=NO_END
    )
    batching = transformers.ContinuousBatchingConfig(
        block_size=4, num_blocks=40, max_batch_tokens=24, **cache
    )
    found = model.generate_batch(
        prompts(),
        generation_config=settings,
        continuous_batching_config=batching,
        progress_bar=False,
    )
    ordered = sorted(found.values(), key=lambda x: int(x.request_id.rpartition("_")[2]))
    assert [x.error for x in ordered] == [None] * len(LENGTHS)
    return [x.generated_tokens for x in ordered]


def check_against_eager(
    transformers: Any,  # noqa: F811
    name: str,
    found: list[list[int]],
    device: str,
) -> None:
    dtypes = (torch.float64, DTYPE[device])
    exact, plain = (make(transformers, name, "eager", dtype, device) for dtype in dtypes)
    for prompt, tokens in zip(prompts(), found, strict=True):
        check_generated(exact, plain, prompt, tokens)


@pytest.mark.parametrize("name", ["llama", "qwen2 with windows", "mistral"])
def test_continuous_batching(
    name: str,
    device: str,
    transformers: Any,  # noqa: F811
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts are cut into chunks and share launches with the tokens of other sequences."""
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("transformers 5 has continuous batching in this form")
    windows = {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    monkeypatch.setitem(MODELS, "qwen2 with windows", (*MODELS["qwen2"][:2], windows))
    strobe.transformers.register()
    # transformers 5.5 does not tell its function for flash_attn about Mistral's window.
    kinds = ["strobe"] if name == "mistral" else ["flash_attention_2", "strobe"]
    if device != "cpu" and name != "llama":
        pytest.skip("windows: transformers' own paged attention is the reference, in float32")
    if device != "cpu":
        for kind in kinds:
            found = generate(transformers, make(transformers, name, kind, DTYPE[device], device))
            assert set(calls) == {"packed"}
            calls.clear()
            check_against_eager(transformers, name, found, device)
        return
    eager = make(transformers, name, "eager", torch.float32, "cpu")
    if name == "llama":  # windows make a difference to transformers' own generate, eager as well
        wanted = []
        for prompt in prompts():
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": NO_END}
            row = eager.generate(ids, attention_mask=mask, **options)
            wanted.append(row[0, len(prompt) :].tolist())
    else:
        wanted = generate(transformers, eager)
        if calls:
            pytest.skip("this release has pages of eager attention computed by flash_attn")
    assert not calls
    for kind in kinds:
        model = make(transformers, name, kind, torch.float32, "cpu")
        assert generate(transformers, model) == wanted
        assert set(calls) == {"packed"}
        calls.clear()


@pytest.mark.parametrize("kind", ["flash_attention_2", "strobe"])
def test_the_decode_path_with_a_block_table(
    kind: str,
    device: str,
    transformers: Any,  # noqa: F811
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers wants a GPU and FlashAttention-3 for it; this says yes to that question."""
    batching = "transformers.generation.continuous_batching"
    if importlib.util.find_spec(f"{batching}.initialization"):  # newer releases
        place = importlib.import_module(f"{batching}.initialization")
        name = "ensure_decode_fast_path_is_available"
    else:
        place = pytest.importorskip(f"{batching}.continuous_api").ContinuousBatchProcessor
        name = "_ensure_decode_fast_path_is_available"
    monkeypatch.setattr(place, name, lambda *_: None)
    strobe.transformers.register()
    model = make(transformers, "llama", kind, DTYPE[device], device)
    found = generate(transformers, model, max_blocks_per_request=8)
    assert "cache" in calls
    check_against_eager(transformers, "llama", found, device)


def test_softcap_reaches_pages() -> None:
    """transformers hands it over, where a model has it."""

    class Cache:
        def update(self, *, key_states: Any, value_states: Any, **_: Any) -> tuple[Any, Any]:
            return key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)

    q, k, v = 3 * torch.randn(3, 1, 2, 7, 16, generator=torch.Generator().manual_seed(1))
    offsets = torch.tensor([0, 4, 7], dtype=torch.int32)
    indices = {"read_index": None, "write_index": None}
    for softcap in (None, 0.5):
        out, _ = strobe.transformers.paged_attention(
            type("Layer", (), {"layer_idx": 0}), q, k, v, None, Cache(), offsets, offsets, 4, 4,
            softcap=softcap, **indices,
        )  # fmt: skip
        wanted = strobe.attention(
            *(x[0].transpose(0, 1).contiguous() for x in (q, k, v)),
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            causal=True,
            softcap=softcap or 0.0,
        )
        torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("odd", ["autocast", "columns"])
def test_decoding_that_a_cache_cannot_take(odd: str) -> None:
    """Autocast decides the types, and rows that do not lie together are copied."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 2, n, 16, generator=generator) for n in (1, 5, 5))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    layer = type("Layer", (), {"is_causal": True, "training": False})
    wanted, _ = strobe.transformers.attention(layer, q, k, v, mask)
    if odd == "columns":
        k = k.transpose(2, 3).contiguous().transpose(2, 3)
        out, _ = strobe.transformers.attention(layer, q, k, v, mask)
        torch.testing.assert_close(out, wanted)
        return
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, _ = strobe.transformers.attention(layer, q, k, v.bfloat16(), mask)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, atol=0.03, rtol=0.03)
