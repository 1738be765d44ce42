"""Every argument of every function of flash_attn and flash_attn_3: it has its documented meaning,
which is told in `strobe.attention`'s words, or it is refused by name, or it is documented to change
nothing; and what makes no sense is refused by name. Nothing is ignored in silence.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import strobe  # noqa: E402
from strobe import _operators, flash_attn, flash_attn_3  # noqa: E402

from tensors import Tensor  # noqa: E402

GENERATOR = torch.Generator().manual_seed(7)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


HEADS, DIM = 4, 16
SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4])
SINKS = torch.tensor([0.5, -1.0, 2.0, -torch.inf])
Q, K, V = random(2, 7, HEADS, DIM), random(2, 11, 2, DIM), random(2, 11, 2, DIM)
QKV, KV = random(2, 9, 3, HEADS, DIM), torch.stack((K, V), 2)
CU_Q, CU_K = numbers(0, 3, 14), numbers(0, 9, 22)
ROWS, KEYS, VALUES = Q.flatten(0, 1), K.flatten(0, 1), V.flatten(0, 1)
# A cache of 3 entries of 40 rows; the same as pages of 8 rows, of which the table knows two rows.
CACHE_K, CACHE_V = random(3, 40, 2, DIM), random(3, 40, 2, DIM)
PAGES_K, PAGES_V = CACHE_K.view(15, 8, 2, DIM), CACHE_V.view(15, 8, 2, DIM)
TABLE = numbers(*range(2, 12)).view(2, 5)
USED = numbers(13, 30)
NEW_K, NEW_V = random(2, 3, 2, DIM), random(2, 3, 2, DIM)
COS, SIN = random(64, 4), random(64, 4)


@dataclass(frozen=True)
class Means:
    """A value, and the options of `Function.plain` that mean the same. base: other arguments of the
    call; also: what `base` is in options.
    """

    value: Any
    options: dict[str, Any]
    base: dict[str, Any] = field(default_factory=dict)
    also: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Nothing:
    """Values that change no result, as is documented."""

    values: tuple[Any, ...]
    base: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """A value that is refused, and with what text; `base`: together with these arguments."""

    value: Any
    text: str
    base: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Gives:
    """A value that adds results, which `check` looks at."""

    value: Any
    check: Callable[[Any], None]
    base: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Function:
    """base: the arguments that are needed; plain: the same in Strobe's own words, of options."""

    call: Callable[..., Any]
    base: dict[str, Any]
    plain: Callable[..., Any]
    rows: dict[str, Any]


def first(found: Any) -> Tensor:
    return found[0] if isinstance(found, tuple | list) else found


def three_results(found: Any) -> None:
    out, lse, weights = found
    assert lse.dtype == torch.float32
    assert out.numel() == Q.numel() or weights.numel() == 0


def two_results(found: Any) -> None:
    out, lse = found
    assert out.dtype == lse.dtype == torch.float32


OPTIONS: dict[str, Any] = {
    "softmax_scale": Means(0.4, {"scale": 0.4}),
    "causal": Means(True, {"causal": True}),
    "window_size": Means((3, 1), {"window": (3, 1)}),
    "softcap": Means(0.7, {"softcap": 0.7}),
    "s_aux": Means(SINKS.half(), {"sinks": SINKS}),
    "learnable_sink": Means(SINKS.double(), {"sinks": SINKS}),
}
MASKS = {
    **OPTIONS,
    "dropout_p": Means(0.4, {"dropout_p": 0.4}),
    "alibi_slopes": Means(SLOPES, {"alibi_slopes": SLOPES}),
    "deterministic": Nothing((True,)),  # of the forward pass; test_flash_attn has the backward's
    "return_attn_probs": Gives(True, three_results),
}
TUNING = {
    "num_splits": Nothing((0, 1, 3)),
    "pack_gqa": Nothing((None, True, False)),
    "sm_margin": Nothing((0, 8)),
}
UNSUPPORTED = {
    "qv": Refused(torch.ones(2, 2), "qv is given, expected None"),
    **{  # of float8 tensors: test_float8.py
        name: Refused(torch.ones(2, 2), f"{name} is given with q.dtype = ")
        for name in ("q_descale", "k_descale", "v_descale")
    },
}
CHUNK = {"attention_chunk": Means(4, {"attention_chunk": 4})}


def plain(q: Tensor, k: Tensor, v: Tensor, **fixed: Any) -> Callable[..., Any]:
    """strobe.attention of these; dropout's seed is what PyTorch's generator gives."""

    def call(**options: Any) -> Any:
        if options.get("dropout_p"):
            state = _operators.draw_dropout_state(device=q.device)
            options["dropout_seed"], options["dropout_offset"] = _operators.seed_and_offset(state)
        return strobe.attention(q, k, v, **fixed, **options)

    return call


def cached(q: Tensor, k: Tensor, v: Tensor, **fixed: Any) -> Callable[..., Any]:
    """strobe.attention_with_kvcache of these; the caches are copied."""

    def call(**options: Any) -> Any:
        given = {**fixed, **options}
        pools = (given.pop("k", k).clone(), given.pop("v", v).clone())
        return strobe.attention_with_kvcache(given.pop("q", q), *pools, **given)

    return call


PACKED_LENGTHS = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
LENGTHS = {**PACKED_LENGTHS, "max_seqlen_q": 11, "max_seqlen_k": 13}
TENSORS = {"q": Q, "k": K, "v": V}
PACKED = {"q": ROWS, "k": KEYS, "v": VALUES, **LENGTHS}
CACHES = {"q": Q, "k_cache": CACHE_K, "v_cache": CACHE_V}
OTHER = numbers(0, 7, 14)
OTHER_K = numbers(0, 2, 22)


def needed(base: dict[str, Any]) -> dict[str, Any]:
    """Rows of the arguments that every call has: that they are used is seen in the result."""
    rows: dict[str, Any] = {}
    for name, value in base.items():
        if name in ("q", "k", "v", "k_cache", "v_cache"):
            own = name.removesuffix("_cache")
            rows[name] = Means(value * 0.5, {own: value * 0.5})
        elif name == "cu_seqlens_q":
            rows[name] = Means(OTHER, {name: OTHER})
        elif name == "cu_seqlens_k":
            longest = {"max_seqlen_k": 20}
            rows[name] = Means(OTHER_K, {name: OTHER_K}, longest, longest)
        elif name.startswith("max_seqlen"):  # an upper bound, and none that is too low
            rows[name] = Nothing((value + 5,))
    return rows


def own_tensors(**fixed: Any) -> Callable[..., Any]:
    """`plain`, whose options may have q, k and v."""

    def call(**options: Any) -> Any:
        given = {**fixed, **options}
        tensors = (given.pop("q"), given.pop("k"), given.pop("v"))
        return plain(*tensors)(**given)

    return call


def of_qkv(qkv: Tensor, axis: int, **fixed: Any) -> Callable[..., Any]:
    q, k, v = qkv.unbind(axis)
    return own_tensors(q=q, k=k, v=v, **fixed)


def doubled(x: Tensor, axis: int, *names: str) -> dict[str, Any]:
    return dict(zip(names, (x * 0.5).unbind(axis), strict=True))


ROWS_QKV, KEYS_KV = QKV.flatten(0, 1), torch.stack((KEYS, VALUES), 1)
CU = numbers(0, 5, 18)
PACKED_QKV = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 13, "max_seqlen_k": 13}
ROTARY = {"rotary_cos": COS, "rotary_sin": SIN, "rotary_interleaved": False}
NEW = {"k": NEW_K, "v": NEW_V, "cache_seqlens": USED}
NEW_OWN = {"k_new": NEW_K, "v_new": NEW_V, "seqused_k": USED}
HALF = NEW_K * 0.5
CACHE_ROWS: dict[str, Any] = {
    **OPTIONS,
    "k": Means(HALF, {"k_new": HALF}, NEW, NEW_OWN),
    "v": Means(HALF, {"v_new": HALF}, NEW, NEW_OWN),
    "rotary_cos": Means(COS * 2, {"rotary_cos": COS * 2}, ROTARY | NEW, ROTARY | NEW_OWN),
    "rotary_sin": Means(SIN * 2, {"rotary_sin": SIN * 2}, ROTARY | NEW, ROTARY | NEW_OWN),
    "rotary_interleaved": Means(True, {"rotary_interleaved": True}, ROTARY | NEW, ROTARY | NEW_OWN),
    "cache_seqlens": Means(USED, {"seqused_k": USED}),
    "cache_batch_idx": Means(numbers(2, 0), {"cache_batch_idx": numbers(2, 0)}),
    "cache_leftpad": Means(
        numbers(3, 5), {"leftpad": numbers(3, 5)}, {"cache_seqlens": USED}, {"seqused_k": USED}
    ),
    "num_splits": Nothing((0, 1, 7)),
    "return_softmax_lse": Gives(True, two_results),
}
PAGED = {"k_cache": PAGES_K, "v_cache": PAGES_V, "cache_seqlens": USED}
PAGED_OWN = {"k": PAGES_K, "v": PAGES_V, "seqused_k": USED}

FUNCTIONS: dict[str, Function] = {
    "flash_attn_func": Function(
        flash_attn.flash_attn_func, TENSORS, own_tensors(**TENSORS), {**MASKS, **needed(TENSORS)}
    ),
    "flash_attn_qkvpacked_func": Function(
        flash_attn.flash_attn_qkvpacked_func,
        {"qkv": QKV},
        of_qkv(QKV, 2),
        {**MASKS, "qkv": Means(QKV * 0.5, doubled(QKV, 2, "q", "k", "v"))},
    ),
    "flash_attn_kvpacked_func": Function(
        flash_attn.flash_attn_kvpacked_func,
        {"q": Q, "kv": KV},
        own_tensors(**TENSORS),
        {**MASKS, **needed({"q": Q}), "kv": Means(KV * 0.5, doubled(KV, 2, "k", "v"))},
    ),
    "flash_attn_varlen_func": Function(
        flash_attn.flash_attn_varlen_func,
        PACKED,
        own_tensors(**PACKED),
        {
            **MASKS,
            **needed(PACKED),
            "block_table": Refused(
                TABLE, "dropout_p = 0.5 with block_table", {"dropout_p": 0.5}
            ),  # its meaning: test_flash_attn_kvcache
        },
    ),
    "flash_attn_varlen_qkvpacked_func": Function(
        flash_attn.flash_attn_varlen_qkvpacked_func,
        {"qkv": ROWS_QKV, "cu_seqlens": CU, "max_seqlen": 13},
        of_qkv(ROWS_QKV, 1, **PACKED_QKV),
        {
            **MASKS,
            "qkv": Means(ROWS_QKV * 0.5, doubled(ROWS_QKV, 1, "q", "k", "v")),
            "cu_seqlens": Means(
                numbers(0, 9, 18), {f"cu_seqlens_{x}": numbers(0, 9, 18) for x in "qk"}
            ),
            "max_seqlen": Nothing((18,)),
        },
    ),
    "flash_attn_varlen_kvpacked_func": Function(
        flash_attn.flash_attn_varlen_kvpacked_func,
        {"q": ROWS, "kv": KEYS_KV, **LENGTHS},
        own_tensors(**PACKED),
        {
            **MASKS,
            **needed({"q": ROWS, **LENGTHS}),
            "kv": Means(KEYS_KV * 0.5, doubled(KEYS_KV, 1, "k", "v")),
        },
    ),
    "flash_attn_with_kvcache": Function(
        flash_attn.flash_attn_with_kvcache,
        CACHES,
        cached(Q, CACHE_K, CACHE_V),
        {
            **CACHE_ROWS,
            **needed(CACHES),
            "alibi_slopes": Means(SLOPES, {"alibi_slopes": SLOPES}),
            "block_table": Means(TABLE, {"block_table": TABLE}, PAGED, PAGED_OWN),
        },
    ),
    "flash_attn_3.flash_attn_func": Function(
        flash_attn_3.flash_attn_func,
        TENSORS,
        own_tensors(**TENSORS),
        {
            **OPTIONS,
            **CHUNK,
            **TUNING,
            **UNSUPPORTED,
            **needed(TENSORS),
            "deterministic": MASKS["deterministic"],
            "return_attn_probs": Gives(True, two_results),
        },
    ),
    "flash_attn_3.flash_attn_varlen_func": Function(
        flash_attn_3.flash_attn_varlen_func,
        PACKED,
        own_tensors(**PACKED),
        {
            **OPTIONS,
            **CHUNK,
            **TUNING,
            **UNSUPPORTED,
            **needed(PACKED),
            "deterministic": MASKS["deterministic"],
            "return_attn_probs": Gives(True, two_results),
            "seqused_q": Means(numbers(1, 8), {"seqused_q": numbers(1, 8)}),
            "seqused_k": Means(numbers(4, 8), {"seqused_k": numbers(4, 8)}),
        },
    ),
    "flash_attn_3.flash_attn_with_kvcache": Function(
        flash_attn_3.flash_attn_with_kvcache,
        CACHES,
        cached(Q, CACHE_K, CACHE_V),
        {
            **CACHE_ROWS,
            **CHUNK,
            **TUNING,
            **UNSUPPORTED,
            **needed(CACHES),
            "page_table": Means(TABLE, {"block_table": TABLE}, PAGED, PAGED_OWN),
            "cu_seqlens_q": Means(CU_Q, {"cu_seqlens_q": CU_Q, "q": ROWS}, {"q": ROWS}),
            "max_seqlen_q": Nothing((11, 14), {"q": ROWS, "cu_seqlens_q": CU_Q}),
            "cu_seqlens_k_new": Means(
                numbers(0, 2, 6),
                {"cu_seqlens_k_new": numbers(0, 2, 6)},
                {**NEW, "k": NEW_K.flatten(0, 1), "v": NEW_V.flatten(0, 1)},
                {**NEW_OWN, "k_new": NEW_K.flatten(0, 1), "v_new": NEW_V.flatten(0, 1)},
            ),
            "rotary_seqlens": Means(
                numbers(4, 6), {"rotary_position": numbers(4, 6)}, ROTARY | NEW, ROTARY | NEW_OWN
            ),
            "scheduler_metadata": Refused(
                torch.ones(2, 2), "scheduler_metadata is given, expected None"
            ),
        },
    ),
}


def called(function: Function, **arguments: Any) -> Any:
    """A call, of copies of the caches, with PyTorch's generator at a seed."""
    given = {**function.base, **arguments}
    for name in ("k_cache", "v_cache"):
        if name in given and isinstance(given[name], torch.Tensor):
            given[name] = given[name].clone()
    torch.manual_seed(3)
    return function.call(**given)


EVERY = [(name, argument) for name, f in FUNCTIONS.items() for argument in f.rows]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_table_has_every_argument(name: str) -> None:
    function = FUNCTIONS[name]
    assert set(inspect.signature(function.call).parameters) == set(function.rows)


@pytest.mark.parametrize(("name", "argument"), EVERY)
def test_what_it_means(name: str, argument: str) -> None:
    function = FUNCTIONS[name]
    row = function.rows[argument]
    if isinstance(row, Refused):
        with pytest.raises((strobe.InvalidArgument, strobe.Unsupported)) as caught:
            called(function, **row.base, **{argument: row.value})
        assert row.text in str(caught.value)
        return
    if isinstance(row, Gives):
        found = called(function, **row.base, **{argument: row.value})
        row.check(found)
        assert torch.equal(found[0], called(function, **row.base))
        return
    if isinstance(row, Nothing):
        wanted = called(function, **row.base)
        for value in row.values:
            assert torch.equal(called(function, **{**row.base, argument: value}), wanted)
        return
    found = called(function, **{**row.base, argument: row.value})
    torch.manual_seed(3)
    assert torch.equal(found, function.plain(**{**row.also, **row.options}))
    if argument not in ("cu_seqlens_q", "cu_seqlens_k_new", "block_table", "page_table"):
        assert not torch.equal(found, called(function, **row.base))  # so it was looked at


@pytest.mark.parametrize(("name", "argument"), EVERY)
def test_what_makes_no_sense_is_refused_by_name(name: str, argument: str) -> None:
    function = FUNCTIONS[name]
    row = function.rows[argument]
    for junk in (torch.ones(2), torch.ones(2, dtype=torch.complex64)):
        given = {**row.base, argument: junk}
        with pytest.raises((strobe.InvalidArgument, strobe.Unsupported)) as caught:
            called(function, **given)
        text = str(caught.value)
        assert re.search(rf"(?<![\w.]){argument}\b", text), text
        assert len(text.encode()) <= 400
        assert isinstance(caught.value, RuntimeError)  # as flash_attn's callers expect


# ------------------------------------------------------------------- beneath, by place and by name

LOWER = {
    "_flash_attn_forward": (
        "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, "
        "alibi_slopes, return_softmax"
    ),
    "_flash_attn_varlen_forward": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, "
        "softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, "
        "alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
        "seqused_k=None, zero_tensors=False, num_splits=0"
    ),
    "_flash_attn_backward": (
        "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, "
        "window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None"
    ),
    "_flash_attn_varlen_backward": (
        "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, "
        "max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, "
        "softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False"
    ),
}


def lower_arguments(name: str) -> dict[str, Any]:
    """Arguments of a call that is right, with dropout, so that the generator's state counts."""
    packed = "varlen" in name
    q, k, v = (ROWS, KEYS, VALUES) if packed else (Q, K, V)
    lengths = LENGTHS if packed else {}
    given = {"q": q, "k": k, "v": v, **lengths, "dropout_p": 0.3, "softmax_scale": 0.2}
    given |= {"causal": True, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0}
    given["alibi_slopes"] = None
    if "forward" in name:
        return given | {"return_softmax": False}
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    forward = getattr(interface, name.replace("backward", "forward"))
    out, lse, _, state = forward(**given, return_softmax=False)
    given |= {"dout": random(*out.shape), "out": out, "softmax_lse": lse, "rng_state": state}
    return given | {"dq": None, "dk": None, "dv": None, "deterministic": False}


@pytest.mark.skipif(importlib.util.find_spec("flit_core") is None, reason="no flit_core")
@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("name", LOWER)
def test_lower_functions(name: str) -> None:
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    function = getattr(interface, name)
    found = ", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in inspect.signature(function).parameters.values()
    )
    assert found == LOWER[name]
    given = lower_arguments(name)
    function(**given)
    for argument in inspect.signature(function).parameters:
        for junk in (torch.ones(2), torch.ones(2, dtype=torch.complex64)):
            with pytest.raises((strobe.InvalidArgument, strobe.Unsupported)) as caught:
                function(**{**given, argument: junk})
            text = str(caught.value)
            assert re.search(rf"(?<![\w.]){argument}\b", text), (argument, text)
            assert len(text.encode()) <= 400
