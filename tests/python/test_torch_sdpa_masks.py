"""Masks of scaled_dot_product_attention that Strobe serves, and those that it must leave."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import strobe.torch  # noqa: E402
from strobe import _masks  # noqa: E402

from tensors import Tensor  # noqa: E402

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5):
    pytest.skip("rows that see nothing are NaN in this PyTorch", allow_module_level=True)

# Random masks; more with `make nightly`.
SEEDS = int(os.environ.get("STROBE_MASK_SEEDS", "16"))

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def compare(
    mask: Tensor,
    heads: tuple[int, int] = (4, 4),
    batch: int = 2,
    dtype: Any = torch.float32,
    seqlen_q: int | None = None,
    seed: int = 0,
) -> strobe.torch.ServedCalls:
    """Output and gradients under sdpa_kernel against PyTorch's own; what became of the call."""
    torch.manual_seed(seed)
    seqlen_q, seqlen_k = seqlen_q or mask.shape[-2], mask.shape[-1]
    leaves = [
        torch.randn(batch, n, h, 16, dtype=dtype).transpose(1, 2).requires_grad_()
        for n, h in ((seqlen_q, heads[0]), (seqlen_k, heads[1]), (seqlen_k, heads[1]))
    ]
    options: dict[str, Any] = {"attn_mask": mask}
    if heads[0] != heads[1]:
        options["enable_gqa"] = True
    wanted = scaled_dot_product_attention(*leaves, **options)
    with strobe.torch.sdpa_kernel() as served:
        found = scaled_dot_product_attention(*leaves, **options)
        with torch.no_grad():  # another way
            again = scaled_dot_product_attention(*leaves, **options)
    assert torch.equal(again, found)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    dout = torch.randn_like(wanted)
    for a, b in zip(
        torch.autograd.grad(found, leaves, dout),
        torch.autograd.grad(wanted, leaves, dout),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    return served


def additive(mask: Tensor, kind: str, dtype: Any = torch.float32) -> Tensor:
    if kind == "bool":
        return mask
    hidden = float("-inf") if kind == "-inf" else torch.finfo(dtype).min
    return torch.where(mask, 0.0, hidden).to(dtype)


def block_mask(rng: np.random.Generator, batch: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Padding at either end of keys and queries, maybe under a diagonal and a window."""
    row, key = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :]
    masks = []
    diagonal = rng.integers(-3, seqlen_k + 3)
    window = rng.integers(0, 9)
    causal, windowed = rng.random(2) < 0.6
    for _ in range(batch):
        begin, length = rng.integers(0, 6), rng.integers(1, seqlen_k + 1)
        mask = (key >= begin) & (key < begin + length)
        if causal:
            mask = mask & (key <= row + diagonal)
        if windowed:
            mask = mask & (key >= row + diagonal - window)
        if rng.random() < 0.2:
            mask = mask & (row >= 2)
        masks.append(np.broadcast_to(mask, (seqlen_q, seqlen_k)))
    return torch.tensor(np.stack(masks))[:, None]


@pytest.mark.parametrize("kind", ["bool", "-inf", "min"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_blocks(seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    seqlen_q, seqlen_k = (int(n) for n in rng.integers(1, 24, 2))
    mask = block_mask(rng, 3, seqlen_q, seqlen_k)
    dtype = torch.bfloat16 if seed % 4 == 3 else torch.float32
    heads = (4, 2) if seed % 2 else (4, 4)
    if seed % 3 == 2:  # alike in all heads, and a copy for each
        mask = mask.repeat(1, 4, 1, 1)
    served = compare(additive(mask, kind, dtype), heads, 3, dtype, seed=seed)
    if kind == "min" and not mask.any(-1).all():
        # A finite number hides nothing from a query that sees nothing else.
        assert list(served.fallbacks) == [
            "attn_mask hides all keys of a query with a finite number"
        ]
    else:
        assert (served.calls, served.fallbacks) == (2, {})


@pytest.mark.parametrize("seed", range(3 * SEEDS))
def test_one_pixel_is_never_left_out(seed: int) -> None:
    """Whatever a mask looks like, the result is PyTorch's."""
    rng = np.random.default_rng(seed)
    seqlen_q, seqlen_k = (int(n) for n in rng.integers(2, 12, 2))
    mask = block_mask(rng, 2, seqlen_q, seqlen_k)
    if seed % 2:  # maybe of another head than the first
        mask = mask.repeat(1, 4, 1, 1)
    place = tuple(int(rng.integers(n)) for n in mask.shape)
    mask[place] = ~mask[place]
    compare(mask, seed=seed)


@pytest.mark.parametrize("kind", ["bool", "-inf", "min"])
@pytest.mark.parametrize(
    "shape",
    [(2, 1, 150, 300), (1, 4, 150, 300), (2, 4, 70, 90), (150, 300), (4, 1, 9), (2, 4, 1, 9)],
)
def test_any_mask_is_served_on_the_cpu(shape: tuple[int, ...], kind: str) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.2
    mask[..., 5] = True
    if shape[-2] > 1 and kind != "min":
        mask[..., 3, :] = False
    served = compare(additive(mask, kind), (4, 2), seqlen_q=max(9, shape[-2]))
    assert (served.calls, served.fallbacks) == (2, {})


def test_a_mask_of_each_head_is_read_once() -> None:
    """And again when it is written to."""
    mask = torch.rand(2, 4, 40, 50, generator=torch.Generator().manual_seed(4)) < 0.5
    mask[..., 0] = True
    first = _masks.blocks(mask, 2, 40)
    assert first.mask is not None
    assert first.mask.shape == (2, 4, 40, 50)
    assert _masks.blocks(mask.clone(), 2, 40) is first
    mask[1, 3, 20, 30] ^= True
    again = _masks.blocks(mask, 2, 40)
    assert again is not first
    assert again.mask is not None
    assert np.array_equal(again.mask.dense(1, 3), mask[1, 3].numpy())


def test_forms_of_a_padding_mask() -> None:
    rows = torch.ones(2, 9, dtype=torch.bool)
    rows[0, :3], rows[1, 7:] = False, False
    plain = rows[:, None, None]
    for mask in (
        plain,
        plain.expand(2, 1, 9, 9),
        plain.expand(2, 4, 9, 9),
        plain.expand(2, 4, 9, 9).contiguous()[:, :1],
        plain[:1],
        plain[1:].expand(2, 4, 9, 9),
        plain[0, 0],
        plain[1].expand(4, 9, 9),
        plain[0, 0].expand(9, 9),
        rows[:1].expand(9, 9),
    ):
        served = compare(mask, seqlen_q=9)
        assert (served.calls, served.fallbacks) == (2, {}), mask.shape


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (torch.zeros(9, 9, dtype=torch.float64), "neither bool"),
    ],
)
def test_other_masks_are_left_to_pytorch(mask: Tensor, kind: str) -> None:
    q = torch.randn(2, 4, 9, 16)

    def call() -> Any:
        try:
            return scaled_dot_product_attention(q, q, q, mask)
        except RuntimeError as error:
            return str(error)

    wanted = call()
    with strobe.torch.sdpa_kernel() as served:
        found = call()
    if isinstance(wanted, str):
        assert found == wanted
    else:
        torch.testing.assert_close(found, wanted, equal_nan=True, rtol=0, atol=0)
    assert served.calls == 0
    (given,) = served.fallbacks
    assert kind in given
    assert "9" not in given


def test_heads_are_compared_in_the_memory_of_the_cpu_alone() -> None:
    """On a GPU that would wait for the device; a tensor without memory stands for one of a GPU."""
    copied = torch.ones(2, 4, 9, 9, dtype=torch.bool)
    assert _masks._is_alike(copied)
    copied = copied.to("meta")
    assert _masks._is_alike(copied) is None
    assert "would wait for the device" in _masks.blocks(copied, 2, 9).refusal
    for one in (copied[:, :1], copied[:, :1].expand(2, 4, 9, 9), copied[0, 0]):
        assert _masks._is_alike(one)


def multi_head_masks() -> dict[str, dict[str, Tensor]]:
    """Of nn.MultiheadAttention, of 2 sequences and 9 rows; -inf in a float one."""
    padding = torch.arange(9) >= torch.tensor([9, 5])[:, None]
    causal = nn.Transformer.generate_square_subsequent_mask(9)
    return {
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": torch.zeros(2, 9).masked_fill(padding, -torch.inf)},
        "causal": {"attn_mask": causal},
        "causal and padding": {
            "attn_mask": causal,
            "key_padding_mask": torch.zeros(2, 9).masked_fill(padding, -torch.inf),
        },
        "for each head": {"attn_mask": causal.repeat(8, 1, 1), "key_padding_mask": padding.float()},
        "heads that differ": {
            "attn_mask": causal.repeat(8, 1, 1).masked_fill(torch.eye(8)[:1].T.bool()[..., None], 0)
        },
    }


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", multi_head_masks())
def test_masks_of_multi_head_attention(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch copies key_padding_mask for each head. Strobe knows by the arguments that the copies
    are alike, without a look at them.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    masks = multi_head_masks()[name]
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 9, 32)

    def call(x: Tensor) -> Tensor:
        out: Tensor = module(x, x, x, need_weights=False, **masks)[0]
        return out

    wanted = call(x)
    shapes = []
    blocks = _masks.blocks

    def watched(mask: Tensor, *rest: Any) -> Any:
        shapes.append(tuple(mask.shape))
        return blocks(mask, *rest)

    monkeypatch.setattr(_masks, "blocks", watched)
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    with strobe.torch.sdpa_kernel() as served:
        found = run(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert (served.calls, served.fallbacks) == (1, {})
    assert shapes[0][1] == (4 if name in {"heads that differ", "for each head"} else 1)


def test_padding_of_another_shape_is_refused_compiled() -> None:
    torch._dynamo.reset()
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    padding = torch.zeros(9, 2, dtype=torch.bool)  # of as many elements
    call = torch.compile(
        lambda x: module(x, x, x, padding, need_weights=False)[0], backend="aot_eager"
    )
    with strobe.torch.sdpa_kernel(), pytest.raises(AssertionError):
        call(torch.randn(2, 9, 32))


def test_a_mask_that_was_written_to_is_read_again() -> None:
    q = torch.randn(1, 2, 8, 16)
    storage = np.ones((1, 1, 1, 8), dtype=np.bool_)
    mask = torch.from_numpy(storage)
    for length in (8, 5, 3, 6):
        storage[...] = np.arange(8) < length  # PyTorch counts no such write
        wanted = scaled_dot_product_attention(q, q, q, mask)
        with strobe.torch.sdpa_kernel() as served:
            found = scaled_dot_product_attention(q, q, q, mask)
        assert served.calls == 1
        torch.testing.assert_close(found, wanted)


def test_dropout_with_padding() -> None:
    """Sequences that are computed one by one drop weights of their own."""
    mask = torch.ones(2, 1, 1, 64, dtype=torch.bool)
    mask[0, ..., 60:], mask[1, ..., :4] = False, False
    q = torch.zeros(2, 2, 64, 64, requires_grad=True)  # all weights are equal
    v = torch.eye(64).expand(2, 2, 64, 64)

    def weights() -> Tensor:
        torch.manual_seed(1)
        with strobe.torch.sdpa_kernel() as served:
            out = scaled_dot_product_attention(q, q, v, mask, 0.25)
        assert served.calls == 1
        return out

    out = weights()
    assert torch.equal(out, weights())
    kept = out > 0
    seen = mask.expand(2, 2, 64, 64)
    assert not kept[~seen].any()
    assert abs(kept[seen].float().mean().item() - 0.75) < 0.02
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / 60 / 0.75))
    assert not torch.equal(kept[0, :, :, :60], kept[1, :, :, 4:])


# ------------------------------------------------------------------------------------- transformers

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
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": 5}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SMALL),
    "bert": ("BertConfig", "BertModel", SMALL),
}


def model_of(name: str) -> Any:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    transformers = importlib.import_module("transformers")
    config_class, model_class, settings = MODELS[name]
    config = getattr(transformers, config_class)(**settings)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return getattr(transformers, model_class)(config).eval()


def output(model: Any, **inputs: Any) -> Tensor:
    found = model(**inputs)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_padded_models_are_served(name: str, side: str) -> None:
    model = model_of(name)
    ids = torch.randint(1, 97, (3, 11))
    mask = torch.ones_like(ids)
    for row, padding in zip(mask, (0, 3, 7), strict=True):
        row[:padding] = side != "left"
        row[11 - padding :] = side != "right"
    wanted = output(model, input_ids=ids, attention_mask=mask)
    with strobe.torch.sdpa_kernel() as served:
        found = output(model, input_ids=ids, attention_mask=mask)
    assert (served.calls, served.fallbacks) == (2, {})
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)  # padded rows too


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_padded_generation_is_served(name: str) -> None:
    model = model_of(name)
    ids = torch.randint(1, 97, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(ids, **arguments)
    with strobe.torch.sdpa_kernel() as served:
        found = model.generate(ids, **arguments)
    assert torch.equal(found, wanted)
    assert (served.calls, served.fallbacks) == (16, {})


def test_a_compiled_model_is_served() -> None:
    """transformers gives compiled models a causal mask as a tensor: it is read when they run."""
    torch._dynamo.reset()
    model = model_of("llama")
    ids = torch.randint(1, 97, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    compiled = torch.compile(model, backend="aot_eager")
    for arguments in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        with torch.no_grad():
            wanted = output(model, **arguments)
            with strobe.torch.sdpa_kernel() as served:
                found = output(compiled, **arguments)
        assert (served.calls, served.fallbacks) == (2, {})
        assert strobe.why().startswith("served: ")
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "mask",
    [
        torch.randn(9, 9),
        torch.full((9, 9), float("nan")),
        torch.randn(4, 9, 9).masked_fill(torch.eye(9, dtype=torch.bool), -torch.inf),
        torch.randn(2, 1, 1, 9, requires_grad=True),
    ],
)
def test_masks_of_other_numbers_are_biases(mask: Tensor) -> None:
    q = torch.randn(2, 4, 9, 16, requires_grad=True)
    leaves = [q, mask] if mask.requires_grad else [q]
    wanted = scaled_dot_product_attention(q, q, q, mask)
    with strobe.torch.sdpa_kernel() as served:
        found = scaled_dot_product_attention(q, q, q, mask)
    assert (served.calls, served.fallbacks) == (1, {})
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-4, atol=1e-5)
    pairs = (torch.autograd.grad(x.square().sum(), leaves) for x in (found, wanted))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-4, atol=1e-4)
