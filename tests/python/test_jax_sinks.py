"""strobe.jax.attention with attention sinks, and their gradient."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import strobe.jax  # noqa: E402


def eager(q: Any, k: Any, v: Any, sinks: Any) -> Any:
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], -1), -1)[..., :-1]
    return jnp.einsum("bhij,bjhd->bihd", weights, v)


def attend(q: Any, k: Any, v: Any, sinks: Any) -> Any:
    return strobe.jax.attention(q, k, v, sinks=sinks)


def arrays() -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    return (*(jax.random.normal(key, (2, 9, 4, 16)) for key in keys[:3]), jnp.arange(4.0) - 1)


def loss(function: Any) -> Any:
    return lambda *x: (function(*x) ** 2).sum()


def test_gradients() -> None:
    given = arrays()
    wanted = jax.grad(loss(eager), argnums=(0, 1, 2, 3))(*given)
    for gradient in (jax.grad, lambda f, argnums: jax.jit(jax.grad(f, argnums=argnums))):
        found = gradient(loss(attend), argnums=(0, 1, 2, 3))(*given)
        for a, b in zip(found, wanted, strict=True):
            assert jnp.allclose(a, b, atol=1e-4)
    assert jnp.allclose(jax.grad(loss(attend))(*given), wanted[0], atol=1e-4)


def test_vmap_gives_each_example_its_own_gradient() -> None:
    q, k, v, sinks = arrays()
    queries = jnp.stack([q, 2 * q, -q])
    for axis, given in ((None, sinks), (0, jnp.stack([sinks, -sinks, 0 * sinks]))):
        found = jax.vmap(jax.grad(loss(attend), argnums=3), in_axes=(0, None, None, axis))
        wanted = jax.vmap(jax.grad(loss(eager), argnums=3), in_axes=(0, None, None, axis))
        assert jnp.allclose(found(queries, k, v, given), wanted(queries, k, v, given), atol=1e-4)
