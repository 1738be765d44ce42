"""Tensors that a call writes to: autograd is told, as by PyTorch's own operators, and those that
PyTorch's would refuse are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import strobe  # noqa: E402
import strobe.flash_attn as fa  # noqa: E402
import strobe.flash_attn_3 as fa3  # noqa: E402

Write = Callable[[Any], Any]
SHAPE = (4, 8, 2, 16)


def normal(*shape: int) -> Any:
    return torch.randn(*shape)


def append(x: Any, function: Any, which: int, **names: Any) -> None:
    """Appends to two caches, of which x is one."""
    caches = [x, normal(*SHAPE)] if which == 0 else [normal(*SHAPE), x]
    new, lengths = normal(4, 1, 2, 16), torch.zeros(4, dtype=torch.int32)
    k_new, v_new, seqused = names.values()
    function(new, *caches, **{k_new: new, v_new: new, seqused: lengths})


def append_by_operator(x: Any, which: int) -> None:
    caches = [x, normal(*SHAPE)] if which == 0 else [normal(*SHAPE), x]
    new, lengths = normal(4, 1, 2, 16), torch.zeros(4, dtype=torch.int32)
    given = (*[None] * 3, new, new, *[None] * 11, False, -1, -1, 0.0, 0, False)
    torch.ops.strobe.attention_with_kvcache(new, *caches, lengths, *given)


def gradients(x: Any, which: int) -> None:
    q, k, v, dout = normal(4, *SHAPE)
    out, lse = strobe.attention(q, k, v, return_lse=True)
    given = [torch.empty(SHAPE) for _ in range(3)]
    given[which] = x
    strobe.attention_backward(dout, q, k, v, out, lse, grads=tuple(given))


OURS = {"k_new": "k_new", "v_new": "v_new", "seqused": "seqused_k"}
THEIRS = {"k_new": "k", "v_new": "v", "seqused": "cache_seqlens"}
WRITES: dict[str, Write] = {
    **{
        f"{function.__module__}.{function.__name__} {which}": partial(
            append, function=function, which=which, **names
        )
        for function, names in (
            (strobe.attention_with_kvcache, OURS),
            (fa.flash_attn_with_kvcache, THEIRS),
            (fa3.flash_attn_with_kvcache, THEIRS),
        )
        for which in (0, 1)
    },
    **{f"operator {which}": partial(append_by_operator, which=which) for which in (0, 1)},
    **{f"grads {which}": partial(gradients, which=which) for which in (0, 1, 2)},
    "out": lambda x: strobe.attention(*normal(3, *SHAPE), out=x),
    "out of a cache": lambda x: strobe.attention_with_kvcache(*normal(3, *SHAPE), out=x),
    "out of merge": lambda x: strobe.merge(normal(2, *SHAPE), normal(2, 4, 2, 8), out=x),
    "combine": lambda x: fa3.flash_attn_combine(normal(2, *SHAPE), normal(2, 4, 8, 2), out=x),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_saved_tensor_is_not_written_to_in_silence(write: str) -> None:
    views: list[Write] = [lambda x: x, lambda x: x[:], lambda x: x.detach()]
    for written in views:
        weight = normal(*SHAPE).requires_grad_()
        x = normal(*SHAPE)
        loss = (x * weight).sum()
        WRITES[write](written(x))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("write", WRITES)
def test_inference_tensors(write: str) -> None:
    with torch.inference_mode():
        x = torch.zeros(SHAPE)
        WRITES[write](x)  # as PyTorch's operators may
    before = x.clone()
    with pytest.raises(strobe.InvalidArgument, match=r"inference tensor.*clone"):
        WRITES[write](x)
    assert torch.equal(x, before)
    plain = torch.zeros(SHAPE)
    with torch.inference_mode():
        WRITES[write](plain)
    assert plain._version == 1


@pytest.mark.parametrize("write", WRITES)
def test_leaves_that_require_a_gradient(write: str) -> None:
    x = torch.nn.Parameter(torch.zeros(SHAPE))
    with pytest.raises(strobe.InvalidArgument, match="requires grad"):
        WRITES[write](x)
    assert x._version == 0
    assert not x.any()
    with torch.no_grad():
        WRITES[write](x)
    assert x._version == 1
    assert x.any()


def test_what_is_only_read_or_refused_keeps_its_version() -> None:
    q, k, v = normal(3, *SHAPE)
    out, new = torch.zeros(SHAPE), normal(4, 1, 2, 16)
    strobe.attention(q, k, v, return_lse=True)
    strobe.attention_with_kvcache(q, k, v)
    fa.flash_attn_with_kvcache(q, k, v)
    with pytest.raises(strobe.InvalidArgument):
        strobe.attention(q, k, v, out=out, softcap=-1.0)
    lengths = torch.full((4,), 99, dtype=torch.int32)
    with pytest.raises(strobe.InvalidArgument, match="cache_seqlens"):
        fa.flash_attn_with_kvcache(new, k, v, new, new, cache_seqlens=lengths)
    assert [x._version for x in (q, k, v, out, new)] == [0] * 5
    assert strobe.attention(q, k, v)._version == 0


def test_compiled() -> None:
    weight = normal(*SHAPE).requires_grad_()
    k, v, new = normal(*SHAPE), normal(*SHAPE), normal(4, 1, 2, 16)
    lengths = torch.zeros(4, dtype=torch.int32)

    def step(new: Any, k: Any, v: Any) -> Any:
        return fa.flash_attn_with_kvcache(new, k, v, new, new, cache_seqlens=lengths)

    loss = (k * weight).sum()
    torch.compile(step, backend="aot_eager")(new, k, v)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
