"""Calls with values that are no plain array or number: what is said of them, how long messages get,
and which layout they guess.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import strobe

from cases import arrays, packed

F = np.float32


def test_values_that_no_c_type_holds() -> None:
    """And what Python itself cannot print."""
    for option in ("scale", "softcap", "dropout_p"):
        with pytest.raises(strobe.InvalidArgument, match=f"{option} = <int of 1329 bits>"):
            strobe.attention(**arrays(**{option: 10**400}))
    with pytest.raises(strobe.InvalidArgument, match=re.escape("window[0] = <int of")):
        strobe.attention(**arrays(window=(10**5000, 0)))
    with pytest.raises(strobe.InvalidArgument, match="dropout_seed = <int of"):
        strobe.attention(**arrays(dropout_p=0.5, dropout_seed=10**5000))
    with pytest.raises(strobe.InvalidArgument, match="threads = <ndarray of shape"):
        strobe.attention(**arrays(threads=np.ones(2)))
    with pytest.raises(strobe.InvalidArgument, match="return_lse = <ndarray of shape"):
        strobe.attention(**arrays(return_lse=np.ones(2)))
    with pytest.raises(strobe.OutOfMemory, match="seqlen_q = 1099511627776"):
        strobe.dropout_mask(1, 1, 2**40, 2**20, dropout_p=0.5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shape": (2**64 + 2, 6, 4, 8)}, "q.shape[0] = 18446744073709551618, expected an integer"),
        ({"shape": (2, -6, 4, 8)}, "q.shape = (2, -6, 4, 8), expected no negative sizes"),
        ({"shape": 3}, "q.shape = 3, expected a tuple of integers"),
        ({"strides": (2**64, 32, 8, 1)}, "q.strides[0] = 18446744073709551616, expected an integ"),
        ({"strides": (1,)}, "q.strides has 1 entries, expected 4"),
        ({"device": f"cuda:{2**64}"}, 'expected "cpu", "cuda" or "cuda:N"'),
        ({"device": "cuda:" + "9" * 5000}, 'expected "cpu", "cuda" or "cuda:N"'),
        ({"device": 7}, 'q.device = 7, expected "cpu"'),
        ({"dtype": ["float32"]}, "q.dtype = ['float32'], expected float32"),
    ],
)
def test_specs_are_not_cut(changes: dict[str, Any], text: str) -> None:
    spec = strobe.ArraySpec(**{"shape": (2, 6, 4, 8), **changes})
    with pytest.raises(strobe.InvalidArgument, match=re.escape(text)):
        strobe.plan(spec, spec, spec)
    assert text in strobe.why(spec, spec, spec)


def test_messages_are_short() -> None:
    for bad in ("é" * 10**6, list(range(10**6)), b"\0" * 10**6, ("x" * 10**6,) * 2):
        for option in ("window", "scale", "causal", "dropout_seed"):
            if option == "causal" or (option == "window" and isinstance(bad, tuple)):
                continue
            with pytest.raises(strobe.InvalidArgument, match=f"^{option} = ") as caught:
                strobe.attention(**arrays(**{option: bad}))
            assert len(str(caught.value).encode()) <= 400
    assert len(str(strobe.InvalidArgument("é" * 1000)).encode()) <= 400


def test_no_kernels_for_a_device() -> None:
    if "cuda" in "".join(kernel.name for kernel in strobe.info().kernels):
        pytest.skip("this build has CUDA kernels")
    spec = strobe.ArraySpec((1, 3, 2, 16), "float16", "cuda")
    with pytest.raises(strobe.Unsupported, match="-DSTROBE_CUDA=ON") as caught:
        strobe.plan(spec, spec, spec)
    assert len(str(caught.value)) <= 400
    assert "-DSTROBE_CUDA=ON" in strobe.why(spec, spec, spec)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        # All three have heads before rows; k and v alone; q alone.
        (
            {"q": (2, 8, 100, 16), "k": (2, 8, 120, 16), "v": (2, 8, 120, 16)},
            (
                "; if q, k and v are (batch, heads, seqlen, head_dim), pass q.swapaxes(1, 2), "
                "k.swapaxes(1, 2), v.swapaxes(1, 2)"
            ),
        ),
        (
            {"q": (2, 100, 8, 16), "k": (2, 8, 120, 16), "v": (2, 8, 120, 16)},
            "; if k and v are (batch, heads, seqlen, head_dim), pass k.swapaxes(1, 2), v.swap",
        ),
        (
            {"q": (2, 7, 100, 16), "k": (2, 120, 7, 16), "v": (2, 120, 7, 16)},
            "; if q is (batch, heads, seqlen, head_dim), pass q.swapaxes(1, 2)",
        ),
        (
            {"q": (2, 6, 4, 8), "k": (2, 10, 2, 8), "v": (2, 2, 10, 8)},
            "; if v is (batch, heads_kv, seqlen_k, head_dim_v), pass v.swapaxes(1, 2)",
        ),
    ],
)
def test_the_other_layout_is_guessed(given: dict[str, Any], text: str) -> None:
    with pytest.raises(strobe.InvalidArgument, match=re.escape(text)):
        strobe.attention(*(np.ones(given[name], F) for name in "qkv"))


@pytest.mark.parametrize(
    ("q", "cache", "more", "text"),
    [
        (
            (2, 8, 1, 16),
            (2, 8, 120, 16),
            {},
            "; if q, k and v are (batch, heads, seqlen, head_dim), pass q.swapaxes(1, 2), k.swapa",
        ),
        ((2, 1, 8, 16), (2, 8, 120, 16), {}, "; if k and v are (batch, heads, seqlen, head_dim)"),
        ((2, 8, 1, 16), (2, 120, 8, 16), {}, "; if q is (batch, heads, seqlen, head_dim), pass"),
        (
            (2, 8, 1, 16),
            (2, 8, 120, 16),
            {"block_table": np.zeros((2, 1), np.int32)},
            (
                "; if q is (batch, heads, seqlen, head_dim), pass q.swapaxes(1, 2); if k and v are "
                "(pages, heads, page_size, head_dim), pass k.swapaxes(1, 2), v.swapaxes(1, 2)"
            ),
        ),
        (
            (8, 2, 16),
            (2, 8, 120, 16),
            {"cu_seqlens_q": np.array([0, 1, 2], np.int32), "max_seqlen_q": 1},
            "; if q is (heads, total, head_dim), pass q.swapaxes(0, 1); if k and v are (batch, hea",
        ),
    ],
)
def test_the_other_layout_of_a_cache_is_guessed(
    q: tuple[int, ...], cache: tuple[int, ...], more: dict[str, Any], text: str
) -> None:
    with pytest.raises(strobe.InvalidArgument, match=re.escape(text)):
        strobe.attention_with_kvcache(np.ones(q, F), *[np.ones(cache, F)] * 2, **more)


def test_the_other_layout_is_not_guessed_where_it_helps_nothing() -> None:
    with pytest.raises(strobe.InvalidArgument) as caught:
        strobe.attention(**arrays(q=np.ones((2, 7, 5, 8), F)))
    assert "swapaxes" not in str(caught.value)


def test_packed_heads_before_rows_are_guessed() -> None:
    swapped = {name: packed()[name].swapaxes(0, 1).copy() for name in "qkv"}
    swapped["k"] = swapped["v"] = np.ones((4, 10, 8), F)
    text = "; if q, k and v are (heads, total, head_dim), pass q.swapaxes(0, 1)"
    with pytest.raises(strobe.InvalidArgument, match=re.escape(text)):
        strobe.attention(**packed(**swapped))
    rows = {name: np.ones((4, 2, 8), F) for name in "kv"}
    text = "; if q is (heads, total, head_dim), pass q.swapaxes(0, 1)"
    with pytest.raises(strobe.InvalidArgument, match=re.escape(text)):
        strobe.attention(
            **packed(q=np.ones((4, 6, 8), F), **rows, cu_seqlens_k=np.array([0, 1, 4], np.int32))
        )


class Larger(np.ndarray[Any, Any]):
    """Says of its shape what is not so."""

    @property  # type: ignore[misc]
    def shape(self) -> Any:
        return (2, 6000, 4, 8)


def test_a_subclass_is_the_array_that_it_is() -> None:
    right = arrays()
    found = strobe.attention(right["q"].view(Larger), right["k"], right["v"])
    assert np.array_equal(found, strobe.attention(**right))


class One:
    """An integer of somebody's own."""

    def __index__(self) -> int:
        return 1


FLAGS: dict[str, Any] = {
    "causal": strobe.attention,
    "batch_invariant": strobe.attention,
    "return_lse": strobe.attention,
    "deterministic": strobe.plan,
    "backward": strobe.plan,
    "dlse": strobe.why,
    "rotary_interleaved": strobe.attention_with_kvcache,
}
NO_FLAGS = ["False", "", b"", 2, -1, 0.0, 1.0, None, [], [1], {}, np.array([True]), np.float32(1)]


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str) -> None:
    """What is true as an if-clause has it is no flag: the text "False" is."""
    qkv = {x: arrays()[x] for x in "qkv"}
    function: Any = FLAGS[name]
    if function is strobe.attention_with_kvcache:
        qkv = dict.fromkeys("qkv", qkv["q"])
    for value in NO_FLAGS:
        text = f"{name} = "
        if name == "dlse":  # why says it
            assert text in function(**qkv, **{name: value})
            continue
        with pytest.raises(strobe.InvalidArgument, match=f"^{text}.*, expected a bool"):
            function(**qkv, **{name: value})
    for yes, no in ((True, False), (np.True_, np.False_), (1, 0), (np.int64(1), np.int8(0)),
                    (np.array(True), np.array(False)), (One(), False)):  # fmt: skip
        found, wanted = (function(**qkv, **{name: x}) for x in (yes, True))
        assert type(found) is type(wanted)
        if isinstance(found, str):
            assert found == wanted
        function(**qkv, **{name: no})
    if name == "causal":
        qkv["v"] = qkv["v"] * np.arange(qkv["v"].size, dtype=F).reshape(qkv["v"].shape)
        found = function(**qkv, causal=np.True_)
        assert np.array_equal(found, function(**qkv, causal=True))
        assert not np.array_equal(found, function(**qkv, causal=0))


@pytest.mark.parametrize(
    "value", [True, False, np.True_, np.array(False), "1", b"1", 1j, [1], None]
)
@pytest.mark.parametrize(
    "name",
    ["scale", "softcap", "dropout_p", "dropout_seed", "dropout_offset", "attention_chunk",
     "threads", "window", "max_seqlen_q"],
)  # fmt: skip
def test_numbers(name: str, value: Any) -> None:
    """A bool in the place of a number is a mistake, of the order of arguments say."""
    if value is None and name in ("scale", "max_seqlen_q", "window"):
        return
    given = packed() if name == "max_seqlen_q" else arrays()
    value = (value, 0) if name == "window" else value
    for function in (strobe.attention, strobe.plan):
        if name == "max_seqlen_q" or name not in ("dropout_seed", "dropout_offset"):
            with pytest.raises(strobe.InvalidArgument, match=rf"^{name}(\[0\])? = "):
                function(**given | {name: value})


@pytest.mark.parametrize("window", [{1, 2}, frozenset((1, 2)), {1: 0, 2: 0}])
def test_a_window_has_an_order(window: Any) -> None:
    with pytest.raises(strobe.InvalidArgument, match=r"^window = "):
        strobe.attention(**arrays(window=window))
