"""No call waits for a GPU unasked.

On the CPU the tensors are of a class that says they are on a GPU and tells who has asked what they
hold (`tensors.OnGpu`); on a GPU PyTorch itself refuses whatever would wait for it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import strobe  # noqa: E402
from strobe import _core, _flash_cache, _masks, _padding, flash_attn, flash_attn_3  # noqa: E402

from tensors import OnGpu, Tensor  # noqa: E402


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is where nobody has set anything."""
    monkeypatch.delenv("STROBE_CHECK_VALUES", raising=False)
    monkeypatch.setattr(OnGpu, "asked", [])


def placed(x: Tensor, device: str) -> Tensor:
    if device == "cpu":
        return x.as_subclass(OnGpu)
    return x.to(device, torch.bfloat16 if x.is_floating_point() else x.dtype)


@contextlib.contextmanager
def without_waiting(device: str) -> Iterator[None]:
    if device == "cpu":
        yield
        assert OnGpu.asked == []
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def numbers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# The functions over a cache: two sequences, of 5 and 17 keys, and one query each.
def by_pages(q: Tensor, k: Tensor, v: Tensor, of: Callable[..., Tensor]) -> Any:
    return flash_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=of(5, 17), block_table=of([0, 1], [2, 3]), causal=True
    )


def by_rows(q: Tensor, k: Tensor, v: Tensor, of: Callable[..., Tensor]) -> Any:
    cos = torch.ones(99, 4, dtype=q.dtype, device=q.device)
    rows = {"cache_seqlens": 5, "cache_batch_idx": of(1, 0), "cache_leftpad": of(0, 2)}
    new = torch.ones_like(k[:2, :1]), torch.ones_like(v[:2, :1])
    return flash_attn.flash_attn_with_kvcache(q, k, v, *new, rotary_cos=cos, rotary_sin=cos, **rows)


def by_pages_of_an_index(q: Tensor, k: Tensor, v: Tensor, of: Callable[..., Tensor]) -> Any:
    return flash_attn_3.flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=of(5, 17),
        page_table=of([2, 3], [0, 1], [0, 0]),
        cache_batch_idx=of(1, 0),
    )


def by_pages_of_packed_queries(q: Tensor, k: Tensor, v: Tensor, of: Callable[..., Tensor]) -> Any:
    return flash_attn.flash_attn_varlen_func(
        q[:, 0], k, v, of(0, 1, 2), of(0, 5, 22), 1, of(17)[0], block_table=of([0, 1], [2, 3])
    )


def by_strobes_own(q: Tensor, k: Tensor, v: Tensor, of: Callable[..., Tensor]) -> Any:
    pages = of([0, 1], [2, 3])
    return strobe.attention_with_kvcache(q, k, v, seqused_k=of(5, 17), block_table=pages)


WITH_CACHE = [
    by_pages, by_rows, by_pages_of_an_index, by_pages_of_packed_queries, by_strobes_own,
]  # fmt: skip


@pytest.mark.parametrize("call", WITH_CACHE, ids=lambda call: call.__name__)
def test_of_a_cache_no_number_is_looked_at(
    call: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(2, 4, 16, 2, 16, generator=generator)
    q = torch.randn(2, 1, 4, 16, generator=generator)
    given = [placed(x, device) for x in (q, *cache)]
    made: dict[str, Tensor] = {}

    def of(*values: Any) -> Tensor:  # before anybody may wait, which a copy to a GPU does
        key = str(values)
        if key not in made:
            made[key] = placed(numbers(*values), device)
        return made[key]

    wanted = call(*given, of)
    OnGpu.asked.clear()
    with without_waiting(device):
        found = call(*given, of)
    assert torch.equal(torch.Tensor(found.float().cpu()), torch.Tensor(wanted.float().cpu()))
    # With the variable they are looked at, from the next call on.
    seen: list[Any] = []
    monkeypatch.setattr(_flash_cache, "check_values", lambda *given: seen.append(given))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call(*given, of)
    assert not seen
    monkeypatch.setenv("STROBE_CHECK_VALUES", "1")
    call(*given, of)
    assert len(seen) == 1


@pytest.mark.parametrize("call", WITH_CACHE, ids=lambda call: call.__name__)
def test_of_a_cache_the_short_way_is_taken(
    call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By plain tensors, of which all say here that they are on a GPU and none says what it holds:
    one call of the extension, and no question to CUDA.
    """
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 4, 16, 2, 16)
    wanted = call(q, *cache, numbers)
    made: dict[str, Tensor] = {}
    call(q, *cache, lambda *values: made.setdefault(str(values), numbers(*values)))
    launched, inner = [], _core.kvcache

    def launch(*arguments: Any) -> Any:
        launched.append(arguments)
        return inner(*arguments)

    def waits(*_: Any, **__: Any) -> Any:
        raise AssertionError("a GPU would be waited for")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(torch.Tensor, "is_cpu", False)
        for name in OnGpu.ASK:
            patch.setattr(torch.Tensor, name, waits)
        patch.setattr(torch.cuda, "is_current_stream_capturing", waits)
        patch.setattr(_flash_cache, "_kernel", waits)
        patch.setattr(_core, "kvcache", launch)
        found = call(q, *cache, lambda *values: made[str(values)])
    assert torch.equal(found, wanted)
    assert len(launched) == 1


def test_longest_sequences_in_tensors() -> None:
    """A launch is planned by them, so each is read, once; one that changes nothing is not."""
    q, k, v = torch.randn(3, 9, 2, 16)
    offsets, longest = numbers(0, 4, 9), numbers(5).as_subclass(OnGpu)
    call = flash_attn.flash_attn_varlen_func
    wanted = call(q, k, v, offsets, offsets, 5, 5)
    assert torch.equal(call(q, k, v, offsets, offsets, longest, longest), wanted)
    assert OnGpu.asked == ["item"]
    for wrong in (torch.ones(1), torch.ones(1, dtype=torch.bool), torch.ones(2, dtype=torch.int32)):
        with pytest.raises(strobe.InvalidArgument, match=r"^max_seqlen_k is a tensor of shape"):
            call(q, k[None], v[None], offsets, offsets, 5, wrong, block_table=numbers([0], [0]))


def test_a_mask_is_read_in_one_piece() -> None:
    """As on the CPU, for whatever it holds."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        kept = torch.from_numpy(np.tril(np.ones((2, 5, 7), bool), 2))
        kept[1, :, : rng.integers(0, 4)] = False
        if rng.random() < 0.3:
            kept[0, rng.integers(0, 5), rng.integers(0, 7)] ^= True
        mask = kept
        if rng.random() < 0.7:
            hides = -np.inf if rng.random() < 0.5 else float(np.finfo(np.float32).min)
            mask = torch.where(kept, 0.0, torch.tensor(hides, dtype=torch.float32))
            if rng.random() < 0.3:
                mask[1, 2, 3] = 0.5
        wanted = _masks._find(mask, 2, 5)
        assert _masks._find(mask.as_subclass(OnGpu), 2, 5) == wanted
        assert OnGpu.asked.pop(0) == "cpu"
        # What comes back is in the CPU's memory.
        assert set(OnGpu.asked) <= {"numpy"}
        OnGpu.asked.clear()


def test_lengths_of_jax_in_tensors() -> None:
    pytest.importorskip("jax")
    arrays = importlib.import_module("strobe._jax_arrays")
    assert arrays.wide_integers("query_seq_lengths", numbers(1, 2).as_subclass(OnGpu)) is None
    assert OnGpu.asked == []
    wide = arrays.wide_integers("query_seq_lengths", torch.tensor([1, 2**40]))
    assert wide.tolist() == [1, 2**40]


# ------------------------------------------------------------------------------------ transformers


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers")
def test_a_mask_of_transformers_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = importlib.import_module("transformers.masking_utils")
    make = importlib.import_module("strobe.transformers").attention_mask
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    tokens, position = torch.ones(2, 7, dtype=torch.bool), torch.tensor(4)
    causal = utils.causal_mask_function
    for padded in (False, True):
        tokens[0, 0] = not padded
        for begin in (position, 4, 3):
            given = {"q_offset": begin, "mask_function": causal}
            wanted = make(2, 3, 7, **given, attention_mask=tokens)
            assert _padding.Kind.of(wanted).whole == (not padded and int(begin) == 4)
            given["q_offset"] = begin if begin is not position else begin.as_subclass(OnGpu)
            found = make(2, 3, 7, **given, attention_mask=tokens.as_subclass(OnGpu))
            assert OnGpu.asked == (["__bool__"] if int(begin) == 4 else [])
            assert torch.equal(found, wanted)
            # While a CUDA graph is captured nothing may be.
            OnGpu.asked.clear()
            capturing[0] = True
            found = make(2, 3, 7, **given, attention_mask=tokens.as_subclass(OnGpu))
            assert OnGpu.asked == []
            assert not _padding.Kind.of(found).whole
            capturing[0] = False


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_layers_of_a_model_share_what_was_read(
    mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "dropout_p": 0.0, "softmax_scale": None, "causal": True, "window_size": (-1, -1),
        "softcap": 0.0,
    }  # fmt: skip
    inner, read = _padding._layout, []

    def layout(*given: Any) -> Any:
        read.append(given)
        return inner(*given)

    monkeypatch.setattr(_padding, "_layout", layout)
    q, k, v = torch.randn(3, 2, 9, 2, 8)
    with mode():
        tokens = torch.ones(2, 9, dtype=torch.bool)
        tokens[0, :4] = False
        mask = _padding.encode(_padding.Kind(True, False, False), tokens, 0)
        found = [_padding.attend(q, k, v, mask, options) for _layer in range(3)]
        assert len(read) == 1
        mask[1, 0, 0, 1:4] = 0  # which is seen
        assert not torch.equal(_padding.attend(q, k, v, mask, options), found[0])
        assert len(read) == 2
        mask[1, 0, 0, 1:4] = 1
    assert torch.equal(found[0], found[1])
    # What was kept in inference mode serves a gradient as well.
    with mode():
        again = _padding.attend(q, k, v, mask, options)
    leaf = q.clone().requires_grad_()
    out = _padding.attend(leaf, k, v, mask, options)
    torch.testing.assert_close(out, again)
    out.square().sum().backward()
    assert leaf.grad is not None
    assert len(read) == 3
