"""Results that would share memory with an input or with each other are refused in the names of
both; arrays that are interleaved in one, without a common element, are served."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import strobe

F = np.float32
OWN = ", expected memory of its own (outputs must overlap neither inputs nor each other)"


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(F)


def refused(one: str, other: str) -> Any:
    text = "^" + re.escape(f"{one} shares memory with {other}{OWN}")
    return pytest.raises(strobe.InvalidArgument, match=text)


def inputs(rng: np.random.Generator) -> dict[str, Any]:
    return {name: normal(rng, (2, 30, 4, 16)) for name in "qkv"}


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_output_that_is_an_input(rng: np.random.Generator, name: str) -> None:
    given = inputs(rng)
    before = {n: x.copy() for n, x in given.items()}
    with refused("out", name):
        strobe.attention(**given, out=given[name])
    assert all((x == before[n]).all() for n, x in given.items())


def test_gradients(rng: np.random.Generator) -> None:
    given = inputs(rng)
    out, lse = strobe.attention(**given, return_lse=True)
    dout = normal(rng, out.shape)

    def backward(**instead: Any) -> None:
        made = {name: np.zeros_like(out) for name in ("dq", "dk", "dv")} | instead
        grads = made["dq"], made["dk"], made["dv"]
        strobe.attention_backward(dout, **given, out=out, lse=lse, grads=grads)

    one = np.zeros_like(out)
    both = np.zeros((3, 30, 4, 16), F)
    for one_name, other, instead in (
        ("dq", "dk", {"dq": one, "dk": one}),
        ("dk", "dv", {"dk": one, "dv": one}),
        ("dk", "dv", {"dk": both[:2], "dv": both[1:]}),
        ("dq", "q", {"dq": given["q"]}),
        ("dk", "k", {"dk": given["k"]}),
        ("dv", "out", {"dv": out}),
        ("dv", "dout", {"dv": dout}),
    ):
        with refused(one_name, other):
            backward(**instead)
    assert not one.any()
    assert not both.any()


def appended(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "k_new": normal(rng, (2, 1, 4, 16)),
        "v_new": normal(rng, (2, 1, 4, 16)),
        "seqused_k": np.array([3, 5], np.int32),
    }


def test_a_cache_that_is_appended_to(rng: np.random.Generator) -> None:
    given = inputs(rng)
    q, cache = given["q"][:, :1], given["k"]
    more = appended(rng)
    with refused("k", "v"):
        strobe.attention_with_kvcache(q, cache, cache, **more)
    with refused("k", "k_new"):
        strobe.attention_with_kvcache(q, cache, given["v"], **more | {"k_new": cache[:, 8:9]})
    # Without an append both are inputs.
    strobe.attention_with_kvcache(q, cache, cache, seqused_k=more["seqused_k"])


def test_merge(rng: np.random.Generator) -> None:
    outs, lses = normal(rng, (4, 2, 9, 3, 8)), normal(rng, (4, 2, 3, 9))
    part = outs.reshape(-1)[8 * 7 :][: 2 * 9 * 3 * 8].reshape(2, 9, 3, 8)
    before = outs.copy()
    with refused("out", "outs"):
        strobe.merge(outs, lses, out=part)
    assert (outs == before).all()
    with refused("lse", "lses"):
        strobe.merge(outs, lses, lse=lses.reshape(-1)[27:][: 2 * 3 * 9].reshape(2, 3, 9))
    # But the whole may take the place of a part.
    wanted = strobe.merge(outs, lses)
    into, kept = outs.copy(), lses.copy()
    found = strobe.merge(into, kept, out=into[2], lse=kept[0])
    assert all((x == y).all() for x, y in zip(found, wanted, strict=True))
    assert (into == np.stack([outs[0], outs[1], wanted[0], outs[3]])).all()
    assert (kept == np.stack([wanted[1], *lses[1:]])).all()
    # A list's parts are joined in a new array, before the result is written.
    assert (strobe.merge(list(outs), lses, out=outs[0])[0] == wanted[0]).all()


def test_in_flash_attns_words(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    from strobe.flash_attn import flash_attn_with_kvcache

    q, cache, new = (torch.from_numpy(normal(rng, (2, n, 4, 16))) for n in (1, 30, 1))
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    with refused("k_cache", "v_cache"):
        flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=lengths)


def test_interleaved_arrays_are_served(rng: np.random.Generator) -> None:
    """One tensor of queries, keys and values, one of their gradients, one of results and inputs,
    and one pool of both caches, page by page."""
    qkv, dqkv = normal(rng, (2, 30, 3, 4, 16)), np.zeros((2, 30, 3, 4, 16), F)
    q, k, v = (qkv[:, :, n] for n in range(3))
    apart: dict[str, Any] = {"q": q.copy(), "k": k.copy(), "v": v.copy()}
    wanted, lse = strobe.attention(**apart, return_lse=True)
    beside = np.zeros((2, 30, 4, 2, 16), F)
    beside[..., 0, :] = q
    found = strobe.attention(beside[..., 0, :], k, v, out=beside[..., 1, :])
    assert (found == wanted).all()
    assert (beside[..., 0, :] == q).all()
    grads: tuple[Any, Any, Any] = (dqkv[:, :, 0], dqkv[:, :, 1], dqkv[:, :, 2])
    strobe.attention_backward(wanted, q, k, v, wanted, lse, grads=grads)
    for got, want in zip(
        grads, strobe.attention_backward(wanted, **apart, out=wanted, lse=lse), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

    pool = normal(rng, (6, 2, 8, 4, 16))
    table = np.array([[0, 2, 4], [5, 1, 3]], np.int32)
    one, two = pool[:, 0].copy(), pool[:, 1].copy()
    more = appended(rng) | {"block_table": table}
    wanted = strobe.attention_with_kvcache(q[:, :1], one, two, **more)
    assert (strobe.attention_with_kvcache(q[:, :1], pool[:, 0], pool[:, 1], **more) == wanted).all()
    assert (pool[:, 0] == one).all()
    assert (pool[:, 1] == two).all()


def test_broadcast_inputs_are_served(rng: np.random.Generator) -> None:
    given = inputs(rng)
    given["v"] = np.broadcast_to(given["v"][:1, :, :1], given["v"].shape)
    strobe.attention(**given, out=np.zeros((2, 30, 4, 16), F))


def view(rng: np.random.Generator, memory: np.ndarray[Any, Any], steps: Any) -> Any:
    """An array of (2, 3, 2, 4) that lies anywhere in `memory`, without an element twice. steps: the
    strides that it has most often, so that some share elements, some are interleaved and some lie
    apart.
    """
    for _ in range(1000):
        strides = rng.permutation(steps if rng.random() < 0.8 else rng.integers(4, 100, 3))
        begin = int(rng.integers(0, 60)) * int(rng.choice([1, 4]))
        span, overlaps = 4, False
        for stride, count in sorted(zip(strides, (2, 3, 2), strict=True)):
            overlaps |= stride < span
            span += stride * (count - 1)
        if not overlaps and begin + span <= memory.size:
            in_bytes = tuple(4 * int(n) for n in (*strides, 1))
            return np.lib.stride_tricks.as_strided(memory[begin:], (2, 3, 2, 4), in_bytes)
    raise AssertionError(f"no array of strides {steps} fits")


@pytest.mark.parametrize("seed", range(20))
def test_arrays_anywhere_in_one_memory(seed: int) -> None:
    """NumPy says which of them have an element in common."""
    rng = np.random.default_rng(seed)
    served = refusals = 0
    for _ in range(40):
        memory = normal(rng, (900,))
        steps = [int(n) for n in rng.choice([(4, 8, 24), (8, 16, 48), (12, 24, 72), (4, 40, 80)])]
        q, k, v, out = (view(rng, memory, steps) for _ in range(4))
        shared = [n for n, x in (("q", q), ("k", k), ("v", v)) if np.shares_memory(out, x)]
        wanted = strobe.attention(q.copy(), k.copy(), v.copy())
        if shared:
            with refused("out", shared[0]):
                strobe.attention(q, k, v, out=out)
            refusals += 1
        else:
            np.testing.assert_allclose(strobe.attention(q, k, v, out=out), wanted, atol=1e-5)
            served += 1
    assert served > 3
    assert refusals > 3
