"""strobe.jax against float64 and against jax.nn.dot_product_attention, values and gradients, under
JAX's transformations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import strobe
from strobe import _core

from cases import Array, Case, Inputs

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402

import strobe.jax  # noqa: E402
from strobe import _jax_launch  # noqa: E402

plain = jax.nn.dot_product_attention
attention: Any = strobe.jax.attention

RENAMED = {
    "causal": "is_causal",
    "window": "local_window_size",
    "seqused_q": "query_seq_lengths",
    "seqused_k": "key_value_seq_lengths",
}


def call(inputs: Inputs) -> tuple[tuple[Any, Any], tuple[Any, Any, Any]]:
    """(out, lse), and (dq, dk, dv), each of a compiled program; lse as strobe.attention has it."""
    options = {RENAMED.get(name, name): value for name, value in inputs.options.items()}
    # As strobe.attention places queries by default.
    options.setdefault("q_position", inputs.k.shape[1] - inputs.q.shape[1])
    function = functools.partial(attention, return_residual=True, **options)
    tensors = (inputs.q, inputs.k, inputs.v)
    out, lse = jax.jit(function)(*tensors)

    def gradients(dout: Any, dlse: Any, *tensors: Any) -> Any:
        if dlse is not None:
            return jax.vjp(function, *tensors)[1]((dout, jnp.swapaxes(dlse, 1, 2)))
        return jax.vjp(lambda *x: function(*x)[0], *tensors)[1](dout)

    return (out, jnp.swapaxes(lse, 1, 2)), jax.jit(gradients)(inputs.dout, inputs.dlse, *tensors)


def numpy(arrays: Any) -> list[Array]:
    return [np.asarray(x) for x in arrays]


CASES = {
    "float32": Case(),
    "bfloat16": Case(dtype="bfloat16", options={"causal": True}),
    "float16": Case(dtype="float16", head_dim=40, head_dim_v=24, with_dlse=True),
    "one row": Case(seqlen_q=1, seqlen_k=1, heads=1, heads_kv=1, head_dim=1, head_dim_v=1),
    "decode": Case(seqlen_q=1, seqlen_k=67, options={"causal": True}),
    "rows without keys": Case(seqlen_q=53, seqlen_k=37, with_dlse=True, options={"causal": True}),
    "no queries": Case(seqlen_q=0),
    "no keys": Case(seqlen_k=0),
    "window": Case(with_dlse=True, options={"window": (5, 3), "scale": 0.3}),
    "softcap": Case(dtype="bfloat16", options={"softcap": 2.5, "causal": True}),
    "alibi": Case(alibi=1, options={"causal": True}),
    "alibi of sequences": Case(alibi=2, with_dlse=True),
    "chunks": Case(options={"attention_chunk": 16, "causal": True}),
    "dropout": Case(options={"dropout_p": 0.3, "dropout_seed": (7 << 32) + 5}),
    "flags": Case(with_dlse=True, options={"batch_invariant": True, "threads": 1}),
    "per sequence": Case(
        batch=3,
        with_dlse=True,
        options={
            "causal": True,
            "seqused_q": np.array([37, 0, 11], np.int32),
            "seqused_k": np.array([50, 9, 53], np.int32),
            "q_position": np.array([13, 0, -2], np.int32),
            "prefix": np.array([0, 9, 30], np.int32),
        },
    ),
}


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.parametrize("platform", sorted({"cpu", jax.default_backend()}))
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, platform: str) -> None:
    case = CASES[name]
    if platform != "cpu" and "dropout_p" in case.options:
        pytest.skip("dropout is on the CPU alone")
    if platform != "cpu" and case.dtype == "float32":
        case = dataclasses.replace(case, dtype="bfloat16")
    inputs = case.make(np.random.default_rng(3))
    inputs.poison_unused()
    with jax.default_device(jax.devices(platform)[0]):
        forward, gradients = call(inputs)
    assert {device.platform for device in forward[0].devices()} == {platform}
    assert forward[0].dtype == inputs.q.dtype
    assert forward[1].dtype == np.float32
    inputs.check_forward(*numpy(forward))
    inputs.check_backward(*numpy(gradients))


def test_not_a_number_where_it_is_seen() -> None:
    inputs = Case(options={"causal": True}).make(np.random.default_rng(4))
    inputs.k[0, 50] = np.nan
    inputs.v[1, 52] = np.inf
    forward, _ = call(inputs)
    inputs.check_forward(*numpy(forward))
    assert np.isnan(np.asarray(forward[0])).any()


# ------------------------------------------------------------------------------ beside jax.nn's own


def tensors(*shape: int, dtype: Any = jnp.float32, seqlen_k: int = 0) -> Any:
    """q, k and v of [..., seqlen, heads, head_dim]."""
    keys = (*shape[:-3], seqlen_k or shape[-3], *shape[-2:])
    seeds = jax.random.split(jax.random.key(5), 3)
    return tuple(
        jax.random.normal(seed, x, dtype)
        for seed, x in zip(seeds, (shape, keys, keys), strict=True)
    )


def same(ours: Any, theirs: Any, within: float = 2e-5) -> None:
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=within, atol=within)


def compare(use: Callable[[Callable[..., Any]], Any], **options: Any) -> None:
    """What `use` makes of each attention."""
    same(use(functools.partial(attention, **options)), use(functools.partial(plain, **options)))


def gradients(function: Callable[..., Any], **options: Any) -> Any:
    """Of a loss whose gradient differs from place to place."""
    return jax.grad(lambda *x: (function(*x, **options) ** 2).sum(), argnums=(0, 1, 2))


@pytest.mark.parametrize("seqlen_k", [9, 21, 40])
def test_defaults_and_positions_of_jax_nn(seqlen_k: int) -> None:
    """A query sees by its own index, whatever the lengths."""
    x = tensors(2, 21, 4, 16, seqlen_k=seqlen_k)
    used = jnp.array([7, 30])  # more than there are: all, as in jax.nn
    for options in (
        {},
        {"scale": 0.5},
        {"scale": 0.0},
        {"is_causal": True},
        {"local_window_size": 3},
        {"local_window_size": (4, 1), "is_causal": True},
        {"key_value_seq_lengths": used},
        {"query_seq_lengths": used, "key_value_seq_lengths": used, "is_causal": True},
    ):
        # jax.nn lets a row without keys see all of them, and takes gradients of it.
        few = options.keys() & {"key_value_seq_lengths", "local_window_size"}
        rows = min(seqlen_k, 7) if few else 21

        def both(f: Any, rows: int = rows, options: Any = options) -> Any:
            def cut(*x: Any) -> Any:
                return f(*x, **options)[:, :rows]

            return jax.jit(lambda x: (cut(*x), gradients(cut)(*x)))(x)

        compare(both)


@pytest.mark.parametrize(
    ("window", "signed"), [((8, -3), True), ((None, -1), False), ((-2, None), False)]
)
def test_windows_beside_a_querys_position(window: Any, signed: bool) -> None:
    x = tensors(2, 21, 4, 16, seqlen_k=21)[:3]
    found = attention(*x, local_window_size=window, window_signed=signed)
    wanted = strobe.attention(*map(np.asarray, x), window=window, window_signed=True)
    np.testing.assert_array_equal(found, wanted)


def test_a_sign_without_a_window() -> None:
    """None is no limit, with the flag too; what is wrong with it is told of it."""
    x = tensors(2, 9, 4, 16)[:3]
    for options in ({}, {"is_causal": True}, {"attention_chunk": 4}):
        same(attention(*x, window_signed=True, **options), attention(*x, **options))
    with pytest.raises(strobe.InvalidArgument, match="window_signed = 3, expected a bool"):
        attention(*x, window_signed=3)
    with pytest.raises(strobe.InvalidArgument, match="window_signed=True with local_window"):
        attention(*x, window_signed=True, local_window_size=-1)
    prefix = np.array([1, 2], np.int32)
    with pytest.raises(strobe.InvalidArgument, match=r"window_size\[0\] = 4 .* expected None"):
        attention(*x, window_signed=True, local_window_size=4, prefix=prefix)


def test_integers_of_numpy() -> None:
    x = tensors(1, 5, 2, 16)[:3]
    for name in ("local_window_size", "q_position"):
        options: dict[str, Any] = {"is_causal": True, name: 2}
        wanted = attention(*x, **options)
        assert (attention(*x, **(options | {name: np.int64(2)})) == wanted).all()
    options = {"dropout_p": 0.5, "dropout_seed": 7}
    wanted = attention(*x, **options)
    assert (attention(*x, **(options | {"dropout_seed": np.int64(7)})) == wanted).all()


WIDE = 2**32 + 5  # cut to 32 bits it is 5


def wide_forms(*numbers: int) -> Iterator[Any]:
    """The ways to hand over integers of 64 bits."""
    yield np.array(numbers)
    yield list(numbers)
    yield [np.int64(n) for n in numbers]
    if importlib.util.find_spec("torch") is not None:
        import torch

        yield torch.tensor(numbers)


def test_lengths_of_64_bits() -> None:
    """JAX cuts them where jax_enable_x64 is off; out of range they mean none or all."""
    x = tensors(2, 9, 2, 16)
    for name in ("query_seq_lengths", "key_value_seq_lengths", "prefix"):
        options = {"is_causal": True}
        wanted = attention(*x, **options, **{name: np.array([9, 4], np.int32)})
        none = attention(*x, **options, **{name: np.array([0, 4], np.int32)})
        for given in wide_forms(WIDE, 4):
            assert (attention(*x, **options, **{name: given}) == wanted).all()
            # The lengths are constants of what is compiled.
            call = jax.jit(lambda *x, n=name, g=given: attention(*x, is_causal=True, **{n: g}))
            assert (call(*x) == wanted).all()
        for given in wide_forms(-WIDE, 4):
            assert (attention(*x, **options, **{name: given}) == none).all()
        with pytest.raises(strobe.InvalidArgument, match=f"^{name}.dtype = uint32, expected int32"):
            attention(*x, **options, **{name: np.array([WIDE, 4], np.uint64)})


@contextlib.contextmanager
def wide_jax() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_arrays_of_64_bits_that_jax_has_itself(dtype: Any) -> None:
    """With jax_enable_x64, whose default is 64 bits: constants and traced."""
    x = tensors(2, 9, 2, 16)
    lengths = np.array([WIDE if dtype == np.int64 else 2**31 - 1, 4], dtype)
    options: list[dict[str, Any]] = [
        {name: lengths} for name in ("query_seq_lengths", "key_value_seq_lengths", "prefix")
    ]
    options += [{"q_position": np.array([3, 4], dtype)}, {"alibi_slopes": np.array([0.5, 0.25])}]
    for option in options:
        ((name, numbers),) = option.items()
        narrow = np.minimum(numbers, 2**30).astype("f4" if numbers.dtype.kind == "f" else "i4")

        def loss(q: Any, k: Any, v: Any, given: Any, name: str = name) -> Any:
            return (attention(q, k, v, is_causal=True, **{name: given}) ** 2).sum()

        gradient = jax.grad(loss, argnums=(0, 1, 2))
        wanted = gradient(*x, narrow)
        with wide_jax():
            for given in (numbers, jnp.asarray(numbers), numbers.tolist()):
                for function in (gradient, jax.jit(gradient)):
                    same(function(*x, given), wanted)
    with wide_jax():
        for given in ([3, WIDE], np.array([3, WIDE])):
            with pytest.raises(strobe.InvalidArgument, match=rf"^q_position\[1\] = {WIDE}, exp"):
                attention(*x, is_causal=True, q_position=given)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_refused(dtype: str) -> None:
    x = [y.astype(dtype) for y in tensors(1, 9, 2, 16)]
    for function in (attention, jax.jit(attention)):
        with pytest.raises(strobe.Unsupported, match=f"^q.dtype = {dtype} is not supported in str"):
            function(*x)


def test_numbers_of_64_bits() -> None:
    x = tensors(2, 9, 2, 16)
    for number in (WIDE, -WIDE, 2**31):
        for given in wide_forms(4, number):
            with pytest.raises(
                strobe.InvalidArgument, match=rf"^q_position\[1\] = {number}, expected -2\*\*30"
            ):
                attention(*x, is_causal=True, q_position=given)
    with pytest.raises(strobe.InvalidArgument, match=f"^q_position = {WIDE}, expected"):
        attention(*x, is_causal=True, q_position=WIDE)
    # Where no option asks for it, too.
    with pytest.raises(strobe.InvalidArgument, match=f"^q_position = {WIDE}, expected"):
        attention(*x, q_position=WIDE)
    for odd in (1.5, "2", None):
        with pytest.raises(strobe.InvalidArgument, match=r"^q_position = .*, expected an integer"):
            attention(*x, q_position=odd)
    with pytest.raises(strobe.InvalidArgument, match=r"^q_position.shape\[0\] = 3, expected 2"):
        attention(*x, q_position=np.zeros(3, np.int32))
    for seeds in (np.array([7, WIDE], np.uint64), np.array([7, WIDE])):
        with pytest.raises(strobe.InvalidArgument, match=rf"^dropout_seed\[1\] = {WIDE}, expected"):
            attention(*x, dropout_p=0.5, dropout_seed=seeds)
    data = np.array([7, 5], np.uint64)
    same(
        attention(*x, dropout_p=0.5, dropout_seed=data),
        attention(*x, dropout_p=0.5, dropout_seed=(7 << 32) + 5),
    )
    # Plain values have 64 bits all the way.
    causal = attention(*x, is_causal=True)
    for option in (
        {"local_window_size": WIDE},
        {"local_window_size": (WIDE, 2**62)},
        {"local_window_size": np.array([WIDE, WIDE])},
        {"attention_chunk": WIDE},
    ):
        wide: Any = option
        assert (attention(*x, is_causal=True, **wide) == causal).all()
        assert (jax.jit(lambda *x, g=wide: attention(*x, is_causal=True, **g))(*x) == causal).all()
    with pytest.raises(strobe.InvalidArgument, match=f"^threads = {WIDE}, expected an integer"):
        attention(*x, threads=WIDE)


def test_every_option() -> None:
    """Of jax.nn and of strobe.attention, but for what this function has another way."""
    ours = set(inspect.signature(attention).parameters)
    nn = set(inspect.signature(plain).parameters)
    assert nn - {"query", "key", "value", "bias", "mask", "implementation"} <= ours
    known = {RENAMED.get(x, x) for x in inspect.signature(strobe.attention).parameters}
    packed = {f"{x}_{y}" for x in ("cu_seqlens", "max_seqlen") for y in "qk"}
    # Parts of a larger call are what strobe.distributed makes of one, without JAX.
    places = {"dropout_heads", *(f"dropout_first_{x}" for x in ("query", "key", "head"))}
    scales = {"q_scale", "k_scale", "v_scale"}  # of float8, which is not taken here
    more = {"mask_layout", "out", "return_lse", "dropout_offset"}
    assert known - packed - places - scales - more <= ours


def test_every_gpu_is_asked_for_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine without one, where every answer is that no kernel takes it."""
    inner, asked = _core.make_plan, []

    def make_plan(fields: dict[str, Any]) -> Any:
        if fields["device"] == 1:
            asked.append(fields)
        return inner(fields)  # a KeyError if there is no such field

    two = SimpleNamespace(cuda_devices=(None, None))
    monkeypatch.setattr(_jax_launch, "info", lambda: two)
    monkeypatch.setattr(_core, "make_plan", make_plan)
    q, (k, v) = tensors(3, 7, 4, 24)[0], tensors(3, 9, 2, 24)[:2]
    options = {"is_causal": True, "softcap": 2.0, "key_value_seq_lengths": jnp.array([5, 9, 1])}
    jax.grad(lambda q: attention(q, k, v, **options).sum())(q)
    directions = {(fields["direction"], fields["device_index"]) for fields in asked}
    assert directions == {(0, 0), (0, 1), (1, 0), (1, 1)}
    sizes = {"batch": 3, "seqlen_q": 7, "heads": 4, "head_dim": 24}
    sizes |= {"seqlen_k": 9, "heads_kv": 2, "head_dim_v": 24, "has_seqused_k": 1, "causal": 1}
    for fields in asked:
        assert fields | sizes == fields


def test_residual_and_no_batch() -> None:
    x = tensors(21, 4, 16)
    out, lse = attention(*x, return_residual=True)
    score = jnp.einsum("tnh,snh->tns", x[0], x[1]) / 4
    same(lse, jax.nn.logsumexp(score, axis=-1))
    same(out, plain(*x))
    compare(lambda f: f(*x, key_value_seq_lengths=jnp.array([5])))
    same(
        jax.grad(lambda q: attention(q, *x[1:], return_residual=True)[1].sum())(x[0]),
        jax.grad(lambda q: jax.nn.logsumexp(jnp.einsum("tnh,snh->tns", q, x[1]) / 4, -1).sum())(
            x[0]
        ),
    )


def test_grouped_heads_and_half_precision() -> None:
    q, k, v = tensors(2, 33, 4, 16, dtype=jnp.bfloat16)
    for heads in (2, 1):
        x = (q, k[:, :, :heads], v[:, :, :heads])
        same(attention(*x), plain(*x), 0.03)


# ---------------------------------------------------------------------------------- transformations


def test_without_jit_with_it_and_recomputed() -> None:
    x = tensors(2, 21, 4, 16)
    wanted = plain(*x, is_causal=True), gradients(plain, is_causal=True)(*x)
    ours = functools.partial(attention, is_causal=True)
    for f in (ours, jax.jit(ours), jax.checkpoint(ours), jax.jit(jax.checkpoint(ours))):
        same((f(*x), gradients(f)(*x)), wanted)


def test_in_a_loop() -> None:
    q, k, v = tensors(2, 9, 2, 8)

    def loop(f: Callable[..., Any]) -> Any:
        def layers(q: Any) -> Any:
            return (jax.lax.scan(lambda x, _: (f(x, k, v), None), q, length=3)[0] ** 2).sum()

        return jax.jit(jax.grad(layers))(q)

    compare(loop)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (2, 1, None), (-1, 0, 0)]
)
def test_vmap(axes: tuple[int | None, ...]) -> None:
    x = tensors(3, 2, 11, 2, 8)
    moved = [y[0] if at is None else jnp.moveaxis(y, 0, at) for y, at in zip(x, axes, strict=True)]
    compare(lambda f: jax.vmap(f, in_axes=axes)(*moved), is_causal=True)
    compare(lambda f: jax.vmap(gradients(f), in_axes=axes)(*moved), is_causal=True)
    compare(lambda f: gradients(jax.vmap(f, in_axes=axes))(*moved), is_causal=True)


def test_vmap_of_vmap_and_of_options() -> None:
    x = tensors(2, 3, 2, 11, 2, 8)
    used = jnp.arange(1, 13).reshape(2, 3, 2) % 12
    compare(lambda f: jax.vmap(jax.vmap(f))(*x))
    got = jax.vmap(jax.vmap(lambda *y: attention(*y[:3], key_value_seq_lengths=y[3])))(*x, used)
    for at in np.ndindex(2, 3):
        same(got[at], attention(*(y[at] for y in x), key_value_seq_lengths=used[at]))
    slopes = jnp.linspace(0.1, 1, 12)
    for shape, batch in (((2, 3, 2), False), ((2, 3, 2, 2), True)):
        given = jnp.resize(slopes, shape)
        got = jax.vmap(jax.vmap(lambda *y: attention(*y[:3], alibi_slopes=y[3])))(*x, given)
        for at in np.ndindex(2, 3):
            same(got[at], attention(*(y[at] for y in x), alibi_slopes=given[at]))
        assert (given[0, 0].ndim == 2) == batch
    shared = jax.vmap(lambda *y: attention(*y, alibi_slopes=slopes[:2]))(*(y[0] for y in x))
    same(shared[1], attention(*(y[0, 1] for y in x), alibi_slopes=slopes[:2]))


def test_jacobian() -> None:
    x = tensors(1, 3, 2, 4)
    compare(lambda f: jax.jacrev(f, argnums=(0, 1, 2))(*x), is_causal=True)


def test_dropout_by_keys() -> None:
    q, k, v = tensors(3, 2, 21, 2, 16)
    keys = jax.random.split(jax.random.key(1), 3)
    drop = functools.partial(attention, dropout_p=0.5)
    each = jax.jit(jax.vmap(lambda q, key: drop(q, k[0], v[0], dropout_seed=key)))(q, keys)
    for at in range(3):
        same(each[at], drop(q[at], k[0], v[0], dropout_seed=keys[at]))
        data = [int(x) for x in jax.random.key_data(keys[at])]
        same(each[at], drop(q[at], k[0], v[0], dropout_seed=(data[0] << 32) + data[1]))
    assert np.abs(drop(q[0], k[0], v[0], dropout_seed=keys[1]) - each[0]).max() > 0.1
    shared = jax.vmap(lambda q: drop(q, k[0], v[0], dropout_seed=keys[0]))(q)
    same(shared[2], drop(q[2], k[0], v[0], dropout_seed=keys[0]))
    rbg = jax.random.key(3, impl="rbg")
    same(*(drop(q[0], k[0], v[0], dropout_seed=x) for x in (rbg, jax.random.key_data(rbg))))


SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"  # four devices, where there is a GPU too
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import strobe.jax
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map
q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 33, 4, 16))
two = Mesh(np.array(jax.devices()).reshape(2, 2), ("batch", "heads"))
one = Mesh(np.array(jax.devices()), ("rows",))
whole, rows = P("batch", None, "heads"), P(None, "rows")
used = jnp.array([33, 20, 5, 1])

def gradients(f):
    return jax.jit(jax.grad(lambda *x: (f(*x) ** 2).sum(), argnums=(0, 1, 2)))

def lengths(q, k, v, n):
    return strobe.jax.attention(q, k, v, is_causal=True, key_value_seq_lengths=n)

def without(q, k, v):
    return strobe.jax.attention(q, k, v)

by_batch = shard_map(lengths, mesh=two, in_specs=(whole, whole, whole, P("batch")), out_specs=whole)
by_rows = shard_map(without, mesh=one, in_specs=(rows, P(), P()), out_specs=rows)
for got, wanted in (
    (jax.jit(by_batch)(q, k, v, used), lengths(q, k, v, used)),
    [gradients(lambda *x: f(*x, used))(q, k, v) for f in (by_batch, lengths)],
    (gradients(by_rows)(q[:, :32], k, v), gradients(without)(q[:, :32], k, v)),
):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
print("same")
"""


def test_shard_map() -> None:
    """Four devices, in a process of their own; arrays that are alike on all are cast."""
    assert run(SHARDED) == "same\n"


def run(program: str) -> str:
    path = os.pathsep.join(filter(None, sys.path))
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


FREED = """
import torch, strobe, strobe.jax
q = torch.ones(1, 4, 2, 8)
for x in (torch.ones(2, 4, 2, 8), torch.ones(2, dtype=torch.int32), torch.ones(2)):
    part = x[1:]
    x.untyped_storage().resize_(0)
    for name in ("q", "k", "v", "q_position", "alibi_slopes", "prefix", "query_seq_lengths"):
        try:
            strobe.jax.attention(**{"q": q, "k": q, "v": q, "is_causal": True, name: part})
        except strobe.InvalidArgument as error:
            assert str(error).startswith(f"{name} is a tensor whose storage was freed"), error
        else:
            raise AssertionError(name)
"""


def test_a_tensor_of_pytorchs_without_memory() -> None:
    pytest.importorskip("torch")
    run(FREED)


def test_nobody_writes_to_an_array() -> None:
    """Others may share its memory, and JAX counts on what it holds."""
    q = np.ones((1, 1, 2, 8), np.float32)
    k, v, out = (jnp.zeros((1, n, 2, 8)) for n in (4, 4, 1))
    with pytest.raises(strobe.InvalidArgument, match=r"^out is read-only, expected a writable"):
        strobe.attention(q, q, q, out=out)
    new: dict[str, Any] = {"k_new": q, "v_new": q, "seqused_k": np.zeros(1, np.int32)}
    with pytest.raises(strobe.InvalidArgument, match=r"^k is read-only, expected a writable"):
        strobe.attention_with_kvcache(q, k, v, **new)
    assert not any(x.any() for x in (k, v, out))
    assert strobe.attention_with_kvcache(q, k, v).shape == q.shape


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_arrays_are_quantised(name: str) -> None:
    x = jnp.linspace(-1, 1, 64, dtype=name).reshape(1, 2, 2, 16)
    codes, scale = strobe.quantize(x, "float8_e4m3fn")
    wanted = strobe.quantize(np.asarray(x, np.float32), "float8_e4m3fn")
    assert np.array_equal(codes.view(np.uint8), wanted[0].view(np.uint8))
    assert np.array_equal(scale, wanted[1])
    again = strobe.dequantize(jnp.asarray(codes), jnp.asarray(scale))
    assert np.array_equal(again, strobe.dequantize(codes, scale))
