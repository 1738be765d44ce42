"""attn_implementation="strobe": masks, compilers and refusals, one by one. What they add up to is
in test_transformers_random.py.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

import strobe

torch = pytest.importorskip("torch")
if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

import strobe.transformers  # noqa: E402
import transformers_cases  # noqa: E402
from strobe import _mask_functions, _padding  # noqa: E402
from strobe._mask_functions import Reach  # noqa: E402
from transformers_cases import Case  # noqa: E402

from tensors import Tensor  # noqa: E402


def case(family: str, task: str, **changes: Any) -> Case:
    settings = {
        "window": None,
        "padding": "left",
        "backend": None,
        "lengths": (9, 4, 12),
        "seed": 7,
        **changes,
    }
    return Case(family=family, task=task, **settings)


@pytest.mark.parametrize("family", ["mistral", "mixtral", "phi3", "starcoder2", "gemma3"])
def test_static_caches_of_a_window(family: str, transformers: Any) -> None:
    """generate makes the mask, and the model puts it through the same function again.

    There is padding in the window, whose begin has moved on, while a token is decoded.
    """
    for task in ("static", "static beyond"):
        drawn = case(family, task, window=8, lengths=(12, 2, 12))
        transformers_cases.check(transformers, drawn)


def test_a_mask_passes_twice(transformers: Any) -> None:
    utils = importlib.import_module("transformers.masking_utils")
    config = transformers.MistralConfig(**transformers_cases.GROUPED, sliding_window=4)
    config._attn_implementation = "strobe"
    cache = transformers.StaticCache(config=config, max_cache_len=20)
    row = torch.zeros(2, 2, 6, 8)
    for layer in range(2):
        cache.update(row, row, layer)
    tokens = torch.ones(2, 7, dtype=torch.long)
    tokens[0, :3] = 0
    mask: Any = tokens
    for _ in range(3):
        mask = utils.create_sliding_window_causal_mask(
            config, torch.zeros(2, 1, 32), mask, past_key_values=cache
        )
        # The window holds positions 3 to 6, of which the query is the last.
        assert mask[:, 0, 0].tolist() == [[3, 1, 1, 1, 1], [3, 1, 1, 1, 1]]


@pytest.mark.parametrize("padding", ["left", "right", "both"])
@pytest.mark.parametrize("family", ["modernbert", "t5gemma", "gemma3 encoder"])
def test_windows_to_both_sides(family: str, padding: str, transformers: Any) -> None:
    """Queries of padding are computed and its keys are not seen: the window stays where it is."""
    for window in (1, 3):
        for task in ("forward", "train"):
            transformers_cases.check(
                transformers, case(family, task, padding=padding, window=window)
            )


def test_a_configuration_makes_an_encoder_of_a_decoder(transformers: Any) -> None:
    """The mask says so, though the attention layer says causal."""
    for padding in ("none", "right"):
        transformers_cases.check(transformers, case("llama encoder", "forward", padding=padding))


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_inference_mode(family: str, transformers: Any) -> None:
    """Nothing counts the writes to an inference tensor, such as the mask that a model makes there.
    One that was made there is a mask outside, too.
    """
    drawn = case(family, "forward")
    ids, mask = transformers_cases.tokens_of(drawn)
    model = transformers_cases.make(transformers, drawn, "strobe")
    with torch.no_grad():
        wanted = hidden_of(model, {"input_ids": ids, "attention_mask": mask})
    with torch.inference_mode():
        found = hidden_of(model, {"input_ids": ids, "attention_mask": mask})
        made = mask.clone()
    assert torch.equal(found, wanted)
    with torch.no_grad():
        assert torch.equal(hidden_of(model, {"input_ids": ids, "attention_mask": made}), wanted)


# ---------------------------------------------------------------------------------------- compiling


def hidden_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    found = model(**inputs)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


# Each takes seconds to compile.
COMPILED = [
    *(("llama", padding) for padding in ("none", "left", "inside", "packed", "no mask")),
    *(("mistral", padding) for padding in ("left", "packed")),
    ("modernbert", "right"),
]


@pytest.mark.parametrize(("family", "padding"), COMPILED)
def test_a_compiled_model_is_one_graph(family: str, padding: str, transformers: Any) -> None:
    """With and without a gradient, forward and backward, as without a compiler."""
    torch._dynamo.reset()
    window = 4 if family != "llama" else None
    drawn = case(family, "train", window=window, padding=padding.replace("packed", "none"))
    ids, mask = transformers_cases.tokens_of(drawn)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if padding == "packed":
        places = (torch.arange(ids.shape[1]) % 5)[None].expand(ids.shape[0], -1)
        inputs = {"input_ids": ids, "position_ids": places, "use_cache": False}
    if padding == "no mask":
        inputs = {"input_ids": ids, "use_cache": False}
    rows = mask.bool()
    model = transformers_cases.make(transformers, drawn, "strobe")
    wanted = hidden_of(model, inputs)[rows]
    wanted.square().sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    eager = transformers_cases.make(transformers, drawn, "eager")
    torch.testing.assert_close(wanted, hidden_of(eager, inputs)[rows], rtol=1e-4, atol=1e-4)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(hidden_of(compiled, inputs)[rows], wanted)
    model.zero_grad()
    found = hidden_of(compiled, inputs)[rows]
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    for name, gradient in gradients.items():
        size = gradient.abs().max().item()
        torch.testing.assert_close(
            model.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-5 * max(size, 1)
        )


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_generate_compiles_decoding(family: str, transformers: Any) -> None:
    """As transformers does on GPUs where the cache is static. Each window in one graph."""
    torch._dynamo.reset()
    drawn = case(family, "static", window=None if family == "llama" else 5)
    ids, mask = transformers_cases.tokens_of(drawn)
    config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    found = []
    for attention, settings in (
        ("eager", {"disable_compile": True}),
        ("strobe", {"disable_compile": True}),
        ("strobe", {"compile_config": config}),
    ):
        model = transformers_cases.make(transformers, drawn, attention)
        found.append(
            model.generate(
                ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0,
                eos_token_id=transformers_cases.NO_END, cache_implementation="static", **settings,
            )
        )  # fmt: skip
    assert found[0].tolist() == found[1].tolist() == found[2].tolist()


def test_compiled_code_looks_at_each_mask(transformers: Any) -> None:
    """Nothing of a mask is kept from one run to the next, and what has no kernel is refused."""
    torch._dynamo.reset()
    drawn = case("mistral", "forward", window=4)
    model = transformers_cases.make(transformers, drawn, "strobe")
    compiled = torch.compile(model, backend="aot_eager")
    ids = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(1))
    for begins in ((0, 0), (3, 7), (11, 0)):
        mask = (torch.arange(12) >= torch.tensor(begins)[:, None]).long()
        with torch.no_grad():
            found = compiled(input_ids=ids, attention_mask=mask).logits
            wanted = model(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(found, wanted)
    mask[1, 5] = 0
    with pytest.raises(strobe.Unsupported, match="padding inside"), torch.no_grad():
        compiled(input_ids=ids, attention_mask=mask)


def test_dropout_in_a_compiled_padded_model(transformers: Any) -> None:
    """The backward pass drops what the forward pass dropped: a linear function's derivative."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 2, 9, 2, 16, generator=generator)
    numbers = torch.ones(2, 9, dtype=torch.int32)
    numbers[0, :4] = 0
    mask = _padding.encode(_padding.Kind(True, False, False), numbers, 0)
    options = {
        "dropout_p": 0.4, "softmax_scale": None, "causal": True, "window_size": (-1, -1),
        "softcap": 0.0,
    }  # fmt: skip

    def attend(v: Tensor) -> Tensor:
        return _padding.attend(q, k, v, mask, options)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    v.requires_grad_()
    out = compiled(v)
    (gradient,) = torch.autograd.grad(out.sum(), v)
    assert out.sum().item() == pytest.approx((gradient * v).sum().item(), rel=1e-4)
    assert gradient.std() > 0.1


@pytest.mark.parametrize("queries", [1, 9, 20])
@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_masks_that_cannot_be_looked_at(
    causal: bool, window: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a CUDA graph is captured. What cannot be told there is NaN, and not wrong."""
    generator = torch.Generator().manual_seed(1)
    keys, batch = 25, 4
    q = torch.randn(batch, queries, 2, 8, generator=generator)
    k, v = torch.randn(2, batch, keys, 2, 8, generator=generator)
    numbers = torch.ones(batch, keys, dtype=torch.bool)
    numbers[0, :7], numbers[1, 20:], numbers[2, :3], numbers[2, 22:] = 0, 0, 0, 0
    options = {
        "dropout_p": 0.0, "softmax_scale": None, "causal": causal,
        "window_size": (window, 0 if causal else window), "softcap": 0.0,
    }  # fmt: skip
    layout = _padding._layout

    def results(*, inside: bool, look: bool) -> Tensor:
        shown = numbers.clone()
        shown[3, 12] = not inside
        mask = _padding.encode(_padding.Kind(causal, False, False), shown, keys - queries)
        with monkeypatch.context() as patch:
            patch.setattr(_padding, "_layout", lambda m, n, w, _: layout(m, n, w, look))
            with torch.no_grad():
                return _padding.attend(q, k, v, mask, options)

    wanted = results(inside=False, look=True)
    # Behind the end of a causal sequence, rows are 0 or not, depending on how they are computed.
    rows = slice(0, max(20 - (keys - queries), 0)) if causal else slice(None)
    torch.testing.assert_close(results(inside=False, look=False)[:, rows], wanted[:, rows])
    found = results(inside=True, look=False)
    torch.testing.assert_close(found[:3, rows], wanted[:3, rows])
    if window >= 0:
        assert found[3].isnan().all()
        with pytest.raises(strobe.Unsupported, match="padding inside"):
            results(inside=True, look=True)
    elif queries <= _padding._FEW_QUERIES:
        assert found[3].isnan().all()
    else:
        torch.testing.assert_close(found[3], results(inside=True, look=True)[3])


def test_transforms_leave_nothing_behind() -> None:
    """What torch.func's tensors hold is gone with their transform, and is not kept."""
    q, k, v = torch.randn(3, 2, 9, 2, 8, generator=torch.Generator().manual_seed(1))
    numbers = torch.ones(2, 9, dtype=torch.bool)
    numbers[0, :4] = False
    mask = _padding.encode(_padding.Kind(True, False, False), numbers, 0)
    options = {
        "dropout_p": 0.0, "softmax_scale": None, "causal": True, "window_size": (-1, -1),
        "softcap": 0.0,
    }  # fmt: skip

    def loss(q: Tensor) -> Tensor:
        return _padding.attend(q, k, v, mask, options).square().sum()

    found = torch.func.grad(loss)(q)
    leaf = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(strobe.Unsupported, match="vmap"):
        torch.func.vmap(loss)(torch.stack((q, q)))
    with pytest.raises(strobe.Unsupported, match="double backward"):
        torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0].sum().backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(strobe.Unsupported, match="forward-mode"):
            loss(dual)


# ----------------------------------------------------------------------------------- mask functions


def test_what_mask_functions_say(transformers: Any) -> None:
    utils = importlib.import_module("transformers.masking_utils")
    table = torch.tensor([[0, 0, 1]])
    causal, packed = utils.causal_mask_function, utils.packed_sequence_mask_function(table)
    window = utils.sliding_window_causal_mask_function(5)
    known = {
        causal: Reach(None, 0),
        window: Reach(4, 0),
        utils.bidirectional_mask_function: Reach(None, None),
        utils.sliding_window_bidirectional_mask_function(5): Reach(5, 5),
        utils.sliding_window_causal_mask_function(0): Reach(-1, 0),
        utils.and_masks(causal, packed): Reach(None, 0, True),
        utils.and_masks(window, packed): Reach(4, 0, True),
    }
    for function, reach in known.items():
        assert _mask_functions.reach_of(function) == reach

        def traced(x: Tensor, function: Any = function) -> tuple[Tensor, Any]:
            found = _mask_functions.traced_reach_of(function)
            return x + 1, (found.left, found.right, found.documents)

        torch._dynamo.reset()
        _, found = torch.compile(traced, backend="eager", fullgraph=True)(torch.zeros(1))
        assert found == (reach.left, reach.right, reach.documents)
    both = utils.or_masks(window, lambda b, h, q, k: abs(q - k) < 5)
    assert _mask_functions.reach_of(both) == Reach(4, 4)
    everything = utils.or_masks(causal, lambda *_: torch.tensor(True))
    assert _mask_functions.reach_of(everything) == Reach(None, None)
    lookups = torch.ones(3, 3, dtype=torch.bool)
    for function in (
        utils.or_masks(causal, lambda b, h, q, k: q < 3),
        utils.or_masks(causal, lambda b, h, q, k: torch.tensor(q < 3)),
        utils.and_masks(causal, lambda b, h, q, k: lookups[q, k]),
        utils.and_masks(causal, lambda b, h, q, k: table[b, k] == 1),
        utils.and_masks(causal, lambda b, h, q, k: (q - k) % 2 == 0),
        utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int)),
        utils.sliding_window_overlay(0),
        utils.add_offsets_to_mask_function(causal, 1, 0),
    ):
        with pytest.raises(strobe.Unsupported, match="which says"):
            _mask_functions.reach_of(function)


def test_a_window_of_nothing(transformers: Any) -> None:
    """A model whose windows are off makes such a mask all the same, for layers that it lacks."""
    utils = importlib.import_module("transformers.masking_utils")
    function = utils.sliding_window_causal_mask_function(0)
    mask = strobe.transformers.attention_mask(2, 5, 5, mask_function=function)
    q, k, v = torch.randn(3, 2, 2, 5, 8)
    out, _ = strobe.transformers.attention(torch.nn.Module(), q, k, v, mask)
    assert not out.any()


# ---------------------------------------------------------------------------------------- refusals

TINY = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
# Class of configuration, class of model, configuration: their attention asks for no implementation.
WITHOUT: list[tuple[str, str, dict[str, Any]]] = [
    ("T5Config", "T5ForConditionalGeneration", TINY),
    ("MT5Config", "MT5EncoderModel", TINY),
    ("BloomConfig", "BloomModel", {"vocab_size": 97, "hidden_size": 32, "n_layer": 1, "n_head": 4}),
    ("FalconConfig", "FalconModel", transformers_cases.SMALL),
    ("MptConfig", "MptModel", {"vocab_size": 97, "d_model": 32, "n_heads": 4, "n_layers": 1}),
    ("DebertaV2Config", "DebertaV2Model", transformers_cases.SMALL),
    ("XLNetConfig", "XLNetModel", {"vocab_size": 97, "d_model": 32, "n_layer": 1, "n_head": 4}),
    ("OpenAIGPTConfig", "OpenAIGPTModel", {"vocab_size": 97, "n_embd": 32, "n_head": 4}),
]


@pytest.mark.parametrize(("config", "model", "settings"), WITHOUT)
def test_models_without_implementations_are_refused(
    config: str, model: str, settings: dict[str, Any], transformers: Any
) -> None:
    model_class = getattr(transformers, model)
    made = getattr(transformers, config)(**settings)
    # In releases whose T5 asks for an implementation, it hands over a bias of positions: refused
    # then, when it first runs.
    asks = strobe.transformers._asks_for_implementations(model_class)
    words = "no position_bias" if asks else rf'{model}.* attn_implementation="strobe"'
    ids = torch.arange(1, 9)[None]
    with pytest.raises(strobe.Unsupported, match=words):
        model_class._from_config(made, attn_implementation="strobe")(input_ids=ids)
    if asks:
        return
    plain = model_class._from_config(getattr(transformers, config)(**settings))
    strobe.transformers.register()  # a second time, which checks nothing twice
    with pytest.raises(strobe.Unsupported, match=rf'{model}.* attn_implementation="strobe"'):
        plain.get_correct_attn_implementation("strobe")
    assert plain.get_correct_attn_implementation("eager") == "eager"


def test_attention_weights_are_refused(transformers: Any) -> None:
    """Not left out, as an empty tuple."""
    for family in ("llama", "bert", "modernbert", "bart"):
        drawn = case(family, "forward")
        model = transformers_cases.make(transformers, drawn, "strobe")
        ids, mask = transformers_cases.tokens_of(drawn)
        with pytest.raises(strobe.Unsupported, match="output_attentions=True"):
            model(input_ids=ids, attention_mask=mask, output_attentions=True)


def test_a_mask_that_a_model_adds_to_its_scores_does_not_fit() -> None:
    """A model with attention of its own fails then, and does not go on with wrong numbers."""
    for keys in (2, 3, 4, 12):
        for kind in (_padding.Kind(*(bool(n & bit) for bit in (1, 2, 4))) for n in range(8)):
            mask = _padding.encode(kind, torch.ones(2, keys), 0)
            for queries in range(1, 12):
                with pytest.raises(RuntimeError, match="must match"):
                    torch.zeros(2, 4, queries, keys) + mask


# ---------------------------------------------------------------------------------------- training


def test_labels_of_a_left_padded_batch(transformers: Any) -> None:
    """The first token's label is predicted from a row of padding: docs/pytorch.md."""
    drawn = case("llama", "train", padding="left")
    ids, mask = transformers_cases.tokens_of(drawn)
    labels = ids.masked_fill(mask == 0, -100)
    first = mask.cumsum(1) == 1
    losses = {}
    for attention in ("eager", "strobe"):
        model = transformers_cases.make(transformers, drawn, attention)
        for name, chosen in (("all", labels), ("but the first", labels.masked_fill(first, -100))):
            with torch.no_grad():
                loss = model(input_ids=ids, attention_mask=mask, labels=chosen).loss.item()
            losses[attention, name] = loss
    assert losses["strobe", "all"] != pytest.approx(losses["eager", "all"], abs=1e-4)
    wanted = losses["eager", "but the first"]
    assert losses["strobe", "but the first"] == pytest.approx(wanted, abs=1e-5)


def test_a_padding_mask_of_another_batch_is_refused(transformers: Any) -> None:
    utils = importlib.import_module("transformers.masking_utils")
    rule = {"mask_function": utils.causal_mask_function}
    for sequences in (1, 3):
        tokens = torch.ones(sequences, 5, dtype=torch.bool)
        wrong = rf"attention_mask.shape\[0\] = {sequences}, expected 2, the batch"
        with pytest.raises(strobe.InvalidArgument, match=wrong):
            strobe.transformers.attention_mask(2, 5, 5, attention_mask=tokens, **rule)
