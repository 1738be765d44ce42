"""Calls by the thousand, and what they keep: references, objects of Python, memory of malloc.

A program, since other threads move these counts as well, and the process that runs the tests has
some (pytest-xdist's, JAX's). What is kept by one call in ten is seen; nothing here is timed.

Usage: leaks.py KIND CALLS, with KIND of `KINDS` and CALLS for each of its calls.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import strobe
from strobe import _core

import cases

Calls = dict[str, Callable[[], Any]]
# A twentieth of the calls, 500 at least.
SLOW = ("copied", "operator", "refused", "dispatched, refused", "gradient", "gradient, dispatched")


class _Mallinfo2(ctypes.Structure):
    _fields_ = (
        ("before", ctypes.c_size_t * 4),
        ("hblkhd", ctypes.c_size_t),  # in mappings of their own
        ("between", ctypes.c_size_t * 2),
        ("uordblks", ctypes.c_size_t),  # in arenas
        ("behind", ctypes.c_size_t * 2),
    )


# glibc's, from 2.33 on. Under AddressSanitizer, whose malloc is another, it stands still.
_mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _Mallinfo2


def allocated() -> int:
    """Bytes that malloc has given out in this process."""
    if _mallinfo2 is None:
        return 0
    info = _mallinfo2()
    return int(info.uordblks + info.hblkhd)


def refused(call: Callable[[], Any], error: type[Exception] = strobe.Error) -> Callable[[], None]:
    def run() -> None:
        try:
            call()
        except error:
            return
        raise AssertionError("not refused")

    return run


def numpy_calls() -> tuple[list[Any], Calls]:
    rng = np.random.default_rng(1)
    q, k, v = (cases.normal(rng, (1, 2, 1, 8)) for _ in range(3))
    out, lse = strobe.attention(q, k, v, return_lse=True)
    used = np.array([2], np.int32)
    slopes = np.ones(1, np.float32)
    three = (q.copy(), k.copy(), v.copy())
    function: Any = strobe.attention
    return [q, k, v, out, lse, used, slopes, *three], {
        "forward": lambda: strobe.attention(q, k, v, return_lse=True),
        "out": lambda: strobe.attention(q, k, v, out=out, alibi_slopes=slopes, seqused_k=used),
        "backward": lambda: strobe.attention_backward(out, q, k, v, out, lse),
        "grads": lambda: strobe.attention_backward(out, q, k, v, out, lse, grads=three),
        "converted": lambda: function(q, k, v, window=[np.int64(1), 1], scale=1),
        "no array": refused(lambda: function(q, [1], v)),
        "wrong shape": refused(lambda: strobe.attention(q, k[:, :1], v)),
        "wrong value": refused(lambda: strobe.attention(q, k, v, dropout_seed=-1)),
    }


def torch_calls() -> tuple[list[Any], Calls]:
    import torch

    from strobe import _flash_impl
    from strobe.flash_attn import flash_attn_func

    q, k, v = (torch.randn(1, 2, 1, 8) for _ in range(3))
    out, lse, *_, seed, unused, _ = _flash_impl._sdpa_forward(q, k, v)
    plain = (None, None, 1, 1, 0.0, False, seed, unused)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    columns = torch.randn(1, 2, 8, 1).transpose(2, 3)
    # The operators as PyTorch's dispatcher calls them, by kernels in C where it has these.
    aten, taken = torch.ops.aten, torch.library.Library("aten", "IMPL")
    for name in _flash_impl._DIRECT:
        taken.impl(name, _flash_impl._FOR_CUDA[name], "CPU")
    kernels = [_flash_impl.direct(name, "CPU") for name in _flash_impl._DIRECT]
    sdpa, flash = aten._scaled_dot_product_flash_attention, aten._flash_attention_forward
    cum = torch.tensor([0, 1], dtype=torch.int32)
    rows = (*(x[0].transpose(0, 1).contiguous() for x in (q, k, v)), cum, cum, 1, 1, 0.0, True)
    slopes = torch.ones(2)
    options = {"scale": 0.5, "window_size_left": 1, "alibi_slopes": slopes}
    return (
        [q, k, v, out, lse, *leaves, cum, slopes, kernels],
        {
            "dispatched": lambda: sdpa(q, k, v, 0.0, True, scale=0.5),
            "dispatched, packed": lambda: flash(*rows, False, **options),
            "gradient, dispatched": lambda: torch.autograd.grad(sdpa(*leaves)[0].sum(), leaves),
            "dispatched, refused": refused(lambda: sdpa(q, k[:, :1], v, 0.0, True), Exception),
            "forward": lambda: flash_attn_func(q, k, v, causal=True),
            "PyTorch's operator": lambda: _flash_impl._sdpa_forward(q, k, v, 0.0, True),
            "its backward": lambda: _flash_impl._sdpa_backward(out, q, k, v, out, lse, *plain),
            "operator refused": refused(lambda: _core.aten_forward(1, q), TypeError),
            "copied": lambda: flash_attn_func(columns, k, v),
            "gradient": lambda: torch.autograd.grad(flash_attn_func(*leaves).sum(), leaves),
            "operator": lambda: flash_attn_func(q, k, v, causal=1),  # type: ignore[call-overload]
            "refused": refused(lambda: flash_attn_func(q, k[:, :1], v)),
        },
    )


def jax_calls() -> tuple[list[Any], Calls]:
    import jax
    import jax.numpy as jnp

    from strobe.jax import attention

    q, k = jnp.ones((1, 2, 1, 8)), jnp.ones((1, 2, 1, 8))
    wait = jax.block_until_ready
    compiled = jax.jit(lambda: attention(q, k, k))
    gradient = jax.jit(lambda: jax.grad(lambda x: attention(x, k, k, is_causal=True).sum())(q))
    far = jnp.array([2**30 + 1], jnp.int32)
    late = jax.jit(lambda: attention(q, k, k, is_causal=True, q_position=far))
    return [q, k], {
        "compiled": lambda: wait(compiled()),
        "with a gradient": lambda: wait(gradient()),
        "not compiled": lambda: wait(attention(q, k, k, return_residual=True)),
        "refused": refused(lambda: wait(late()), jax.errors.JaxRuntimeError),
    }


def rests(name: str, count: int, watched: list[Any], calls: Callable[[], Any]) -> None:
    """Demands of one round of `count` calls in eight that less than one call in ten keeps anything.

    What is kept of each call is kept in all rounds; caches and free lists fill in the first ones.
    """
    for _ in range(8):
        gc.collect()
        references = [sys.getrefcount(x) for x in watched]
        objects, memory = sys.getallocatedblocks(), allocated()
        calls()
        gc.collect()
        objects, memory = sys.getallocatedblocks() - objects, allocated() - memory
        moved = [sys.getrefcount(x) - before for x, before in zip(watched, references, strict=True)]
        found = f"{name}: {count} calls, references {moved}, {objects} objects, {memory} bytes"
        print(found)
        if max(objects, *map(abs, moved)) < count // 20 and memory < count:
            return
    raise AssertionError(found)


def keeps_nothing(make: Callable[[], tuple[list[Any], Calls]], most: int) -> None:
    watched, named = make()
    watched += [None, True, (-1, -1)]
    for name, call in named.items():
        count = max(most // 20, 500) if name in SLOW else most

        def calls(call: Callable[[], Any] = call, count: int = count) -> None:
            for _ in range(count):
                call()

        for _ in range(count // 4):  # pools fill, caches too
            call()
        rests(name, count, watched, calls)


def plans(_: int) -> None:
    """The number of plans that are kept is bounded, and what goes leaves nothing behind."""
    x = np.ones((1, 1200, 1, 8), np.float32)

    def through_all() -> None:
        for n in range(1, 1200):
            strobe.attention(x[:, :1], x[:, :n], x[:, :n])

    through_all()
    rests("plans", 1199, [None], through_all)
    assert _core.kept()[0] == _core.CAPACITY


KINDS: dict[str, Callable[[int], None]] = {
    "numpy": lambda most: keeps_nothing(numpy_calls, most),
    "torch": lambda most: keeps_nothing(torch_calls, most),
    "jax": lambda most: keeps_nothing(jax_calls, most),
    "plans": plans,
}

if __name__ == "__main__":
    KINDS[sys.argv[1]](int(sys.argv[2]))
