"""strobe.jax.attention with masks as data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import strobe.jax  # noqa: E402
from strobe import masks  # noqa: E402


def eager(q: Any, k: Any, v: Any, keep: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(keep))


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return strobe.jax.attention(q, k, v, mask=mask)


def keep_of(shape: tuple[int, ...], seed: int = 0) -> Any:
    keep = np.random.default_rng(seed).random(shape) < 0.3
    keep[..., 0] = True
    return keep


def tensors() -> Any:
    keys = jax.random.split(jax.random.key(1), 3)
    return [jax.random.normal(x, (2, n, 3, 16)) for x, n in zip(keys, (90, 150, 150), strict=True)]


def loss(function: Any) -> Any:
    return lambda *x: (function(*x) ** 2).sum()


@pytest.mark.parametrize("shape", [(1, 1, 90, 150), (2, 1, 90, 150), (1, 3, 90, 150)])
def test_gradients(shape: tuple[int, ...]) -> None:
    """The mask as an argument of what is jitted, which is compiled once for all of its kind."""
    given = tensors()
    compiled = jax.jit(jax.value_and_grad(loss(attend), argnums=(0, 1, 2)))
    for seed in (0, 1):
        keep = keep_of(shape, seed)
        mask = masks.from_bool(keep, block=64, capacity=1000)
        wanted = jax.value_and_grad(loss(eager), argnums=(0, 1, 2))(*given, keep)
        for found in (compiled(*given, mask), jax.grad(loss(attend), (0, 1, 2))(*given, mask)):
            grads = found[1] if len(found) == 2 else found
            for a, b in zip(grads, wanted[1], strict=True):
                assert jnp.allclose(a, b, atol=1e-4)
        assert jnp.allclose(compiled(*given, mask)[0], wanted[0], rtol=1e-5)
    assert compiled._cache_size() == 1


def test_with_other_options() -> None:
    q, k, v = tensors()
    sinks = jnp.arange(3.0)
    mask = masks.from_bool(keep_of((90, 150)))
    options: dict[str, Any] = {"is_causal": True, "q_position": 60, "sinks": sinks, "mask": mask}
    out = strobe.jax.attention(q, k, v, **options)
    same: dict[str, Any] = {"causal": True, "sinks": np.asarray(sinks), "mask": mask}
    attention: Any = strobe.attention
    wanted = attention(*(np.asarray(x) for x in (q, k, v)), **same)
    assert np.array_equal(out, wanted)


def test_vmap() -> None:
    q, k, v = tensors()
    queries = jnp.stack([q, 2 * q])
    for shape in ((1, 1, 90, 150), (2, 1, 90, 150)):  # one for all, and of each sequence
        keep = keep_of(shape)
        mask = masks.from_bool(keep)
        found = jax.vmap(attend, (0, None, None, None))(queries, k, v, mask)
        wanted = jax.vmap(eager, (0, None, None, None))(queries, k, v, keep)
        assert jnp.allclose(found, wanted, atol=1e-5)
    both = [masks.from_bool(keep_of((90, 150), seed), capacity=4) for seed in (3, 4)]
    each = jax.tree.map(lambda *x: jnp.stack(x), *both)
    found = jax.vmap(attend, (0, None, None, 0))(queries, k, v, each)
    for n, seed in enumerate((3, 4)):
        assert jnp.allclose(found[n], eager(queries[n], k, v, keep_of((90, 150), seed)), atol=1e-5)


SHAPES = [
    *((2, 3, 90, 150), (1, 1, 90, 150), (2, 1, 1, 150), (1, 3, 90, 1)),
    *((3, 90, 150), (1, 90, 150), (90, 150)),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_bools(shape: tuple[int, ...]) -> None:
    """What jax.nn takes, of NumPy and of JAX, also where a jitted function has it in itself."""
    q, k, v = tensors()
    keep = keep_of(shape)
    theirs = keep[None] if keep.ndim == 2 else keep
    wanted = eager(q, k, v, theirs)
    packed = attend(q, k, v, masks.from_bool(np.broadcast_to(keep, (*shape[:-2], 90, 150))))
    for given in (keep, jnp.asarray(keep)):
        found = attend(q, k, v, given)
        assert jnp.allclose(found, wanted, atol=1e-5)
        assert np.array_equal(found, packed)

        def closed(q: Any, given: Any = given) -> Any:
            return attend(q, k, v, given)

        assert jnp.allclose(jax.jit(closed)(q), wanted, atol=1e-5)
    gradient = jax.grad(loss(attend), (0, 1, 2))(q, k, v, keep)
    right = jax.grad(loss(eager), (0, 1, 2))(q, k, v, theirs)
    for a, b in zip(gradient, right, strict=True):
        assert jnp.allclose(a, b, atol=1e-4)


def test_bools_without_a_batch() -> None:
    q, k, v = (x[0] for x in tensors())
    keep = keep_of((3, 90, 150))
    assert jnp.allclose(attend(q, k, v, keep), eager(q, k, v, keep), atol=1e-5)


def test_bools_of_queries_that_see_nothing() -> None:
    q, k, v = tensors()
    keep = np.arange(90)[:, None] % 2 == 0
    out, lse = strobe.jax.attention(q, k, v, mask=keep[None, None], return_residual=True)
    assert not out[:, 1::2].any()
    assert (lse[:, 1::2] == -jnp.inf).all()
    assert jnp.allclose(out[:, ::2], strobe.jax.attention(q[:, ::2], k, v), atol=1e-5)


def test_bools_that_are_traced() -> None:
    """Refused wherever the values are not known, with what to do in place of it."""
    q, k, v = tensors()
    keep = jnp.asarray(keep_of((90, 150)))
    text = r"^mask is traced, expected .* make one outside of jit by strobe\.masks\.from_bool"
    for call in (
        jax.jit(attend),
        jax.vmap(attend, (None, None, None, 0)),
        lambda q, k, v, keep: jax.jit(lambda: attend(q, k, v, jnp.tril(keep)))(),
    ):
        with pytest.raises(strobe.InvalidArgument, match=text):
            call(q, k, v, keep)
    # As it says
    found = jax.jit(attend)(q, k, v, masks.from_bool(keep))
    assert jnp.allclose(found, attend(q, k, v, keep), atol=1e-6)


def test_what_is_wrong_is_said() -> None:
    given = tensors()
    call: Any = strobe.jax.attention
    with pytest.raises(strobe.InvalidArgument, match=r"mask is for .*, and "):
        call(*given, mask=masks.sliding(300, left=3))
    for wrong in (jnp.ones((90, 150)), np.ones((90, 150), np.int8), [[True]], "tril"):
        text = r"^mask is .*expected a strobe\.masks\.Mask, or bools of NumPy or JAX: "
        with pytest.raises(strobe.InvalidArgument, match=text):
            call(*given, mask=wrong)
    for shape in ((90, 149), (3, 3, 90, 150), (2, 2, 90, 150), (150,), (1, 2, 3, 90, 150)):
        text = r"^mask\.shape = \(.*\), expected \(2, 3, 90, 150\), each of them 1 where"
        with pytest.raises(strobe.InvalidArgument, match=text):
            call(*given, mask=np.ones(shape, np.bool_))
    with pytest.raises(strobe.InvalidArgument, match=r"^mask is a numpy\.ma\.MaskedArray"):
        call(*given, mask=np.ma.masked_array(np.ones((90, 150), np.bool_)))
