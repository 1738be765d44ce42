"""strobe.why() without arguments: what became of the latest call, by whichever function it came."""

from __future__ import annotations

import _thread
import gc
import importlib.util
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import strobe
from strobe import _core

torch = pytest.importorskip("torch")

import strobe.torch  # noqa: E402
import strobe.transformers  # noqa: E402
from strobe import _masks, flash_attn, flash_attn_3  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
ROWS = np.random.default_rng(1).standard_normal((2, 5, 4, 8)).astype(np.float32)
T = torch.from_numpy(ROWS)  # (batch, seqlen, heads, head_dim)
H = T.transpose(1, 2)  # (batch, heads, seqlen, head_dim)
PACKED = T.flatten(0, 1)
OFFSETS = torch.tensor([0, 5, 10], dtype=torch.int32)
USED = torch.tensor([3, 4], dtype=torch.int32)
TABLE = torch.tensor([[0], [1]], dtype=torch.int32)
OUT, LSE = strobe.attention(ROWS, ROWS, ROWS, return_lse=True)
SDPA = "scaled_dot_product_attention"


def leaf(x: Any = T) -> Any:
    return x.clone().requires_grad_()


def in_block(function: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with strobe.torch.sdpa_kernel():
            return function()

    return run


def gradient(function: Callable[[Any], Any], x: Any = T) -> Callable[[], Any]:
    def run() -> Any:
        q = leaf(x)
        return torch.autograd.grad(function(q).sum(), q)

    return run


def compiled(function: Callable[[Any], Any]) -> Callable[[], Any]:
    def run() -> Any:
        torch._dynamo.reset()
        return torch.compile(function, backend="aot_eager", fullgraph=True)(T)

    return run


def padded() -> Any:
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[1, ..., 3:] = False
    return mask


def of_a_model(mask: Any = None, x: Any = H) -> Any:
    module = torch.nn.Module()
    return strobe.transformers.attention(module, x, x, x, mask)[0]


def cached(module: Any = flash_attn, **options: Any) -> Any:
    return module.flash_attn_with_kvcache(
        T[:, :1], T.clone(), T.clone(), cache_seqlens=USED, **options
    )


def combined() -> Any:
    outs = torch.from_numpy(np.stack([OUT, OUT]))
    return flash_attn_3.flash_attn_combine(outs, torch.zeros(2, 2, 5, 4))


packed = (OFFSETS, OFFSETS, 5, 5)
FORWARD: dict[str, tuple[str, Callable[[], Any]]] = {
    "numpy": ("strobe.attention", lambda: strobe.attention(ROWS, ROWS, ROWS)),
    "tensors": ("strobe.attention", lambda: strobe.attention(T, T, T)),
    "cache": (
        "strobe.attention_with_kvcache",
        lambda: strobe.attention_with_kvcache(ROWS, ROWS, ROWS),
    ),
    "dense": ("flash_attn_func", lambda: flash_attn.flash_attn_func(T, T, T)),
    "dense, recorded": ("flash_attn_func", lambda: flash_attn.flash_attn_func(leaf(), T, T)),
    "dense, copied": (
        "flash_attn_func",
        lambda: flash_attn.flash_attn_func(T.transpose(1, 3).contiguous().transpose(1, 3), T, T),
    ),
    "dense, dropout": ("flash_attn_func", lambda: flash_attn.flash_attn_func(T, T, T, 0.5)),
    "qkv": (
        "flash_attn_qkvpacked_func",
        lambda: flash_attn.flash_attn_qkvpacked_func(torch.stack([T, T, T], 2)),
    ),
    "kv": (
        "flash_attn_kvpacked_func",
        lambda: flash_attn.flash_attn_kvpacked_func(T, torch.stack([T, T], 2)),
    ),
    "varlen": (
        "flash_attn_varlen_func",
        lambda: flash_attn.flash_attn_varlen_func(PACKED, PACKED, PACKED, *packed),
    ),
    "varlen, qkv": (
        "flash_attn_varlen_qkvpacked_func",
        lambda: flash_attn.flash_attn_varlen_qkvpacked_func(
            torch.stack([PACKED] * 3, 1), OFFSETS, 5
        ),
    ),
    "varlen, kv": (
        "flash_attn_varlen_kvpacked_func",
        lambda: flash_attn.flash_attn_varlen_kvpacked_func(
            PACKED, torch.stack([PACKED] * 2, 1), *packed
        ),
    ),
    "varlen, pages": (
        "flash_attn_varlen_func",
        lambda: flash_attn.flash_attn_varlen_func(PACKED, T, T, *packed, block_table=TABLE),
    ),
    "kvcache": ("flash_attn_with_kvcache", cached),
    "kvcache, converted": (
        "flash_attn_with_kvcache",
        lambda: cached(rotary_cos=torch.ones(4, 9).T, rotary_sin=torch.ones(4, 9).T),
    ),
    "3": ("flash_attn_func", lambda: flash_attn_3.flash_attn_func(T, T, T)),
    "3, chunks": (
        "flash_attn_func",
        lambda: flash_attn_3.flash_attn_func(T, T, T, attention_chunk=2),
    ),
    "3, kvcache": ("flash_attn_with_kvcache", lambda: cached(flash_attn_3)),
    "operator": (
        "torch.ops.strobe.attention_forward",
        lambda: torch.ops.strobe.attention_forward(
            T, T, T, None, None, None, None, None, None, 0.0, None, False, -1, -1, 0.0, False
        ),
    ),
    "compiled": (
        "torch.ops.strobe.attention_forward",
        compiled(lambda q: flash_attn.flash_attn_func(q, q, q)),
    ),
    "block": (SDPA, in_block(lambda: sdpa(H, H, H))),
    "block, rows": (SDPA, in_block(lambda: sdpa(*(H.contiguous(),) * 3))),
    "block, mask": (SDPA, in_block(lambda: sdpa(H, H, H, padded()))),
    "block, recorded": (SDPA, in_block(lambda: sdpa(leaf(H), H, H))),
    "block, compiled": (
        SDPA,
        in_block(compiled(lambda q: sdpa(*(q.transpose(1, 2),) * 3))),
    ),
    "transformers": ("the attention of a model of transformers", of_a_model),
    "transformers, padding": (
        "the attention of a model of transformers",
        lambda: of_a_model(torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])),
    ),
    "transformers, padding, recorded": (
        "the attention of a model of transformers",
        lambda: of_a_model(torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]), leaf(H)),
    ),
    "transformers, compiled": (
        "torch.ops.strobe.attention_forward",
        compiled(lambda x: of_a_model(None, x.transpose(1, 2))),
    ),
}
BACKWARD: dict[str, tuple[str, Callable[[], Any]]] = {
    "numpy": (
        "strobe.attention_backward",
        lambda: strobe.attention_backward(OUT, ROWS, ROWS, ROWS, OUT, LSE),
    ),
    "dense": (
        "the backward pass",
        gradient(lambda q: flash_attn.flash_attn_func(q, q, q)),
    ),
    "dense, dropout": (
        "the backward pass",
        gradient(lambda q: flash_attn.flash_attn_func(q, q, q, 0.5)),
    ),
    "block": (
        "the backward pass",
        gradient(lambda q: in_block(lambda: sdpa(*(q.transpose(1, 2),) * 3))()),
    ),
    "block, mask": (
        f"the gradient of {SDPA}",
        gradient(lambda q: in_block(lambda: sdpa(q, q, q, padded()))(), H),
    ),
    "transformers": ("the backward pass", gradient(lambda q: of_a_model(None, q), H)),
}


def forget_the_latest() -> None:
    strobe.merge([OUT, OUT], [LSE, LSE])
    assert strobe.why().startswith("served: strobe.merge was computed by Strobe on cpu\n")


def kernel_and_declines(text: str, backward: bool = False) -> None:
    """The first line names the kernel, the others are what strobe.why says of the problem."""
    first, problem, *declines = text.splitlines()
    kernel = first.split()[-1]
    assert kernel in [k.name for k in strobe.info().kernels]
    assert problem.startswith(f"problem: {'backward' if backward else 'forward'} fp32, batch ")
    lines = strobe.why(ROWS, ROWS, ROWS, backward=backward).splitlines()
    names = [line.split()[0] for line in lines]
    assert [line.split()[0] for line in declines] == names[: names.index(kernel)]
    for line in declines:
        assert line.split(maxsplit=1)[1].startswith("declines: ")


@pytest.mark.parametrize("name", FORWARD)
def test_a_call(name: str) -> None:
    function, call = FORWARD[name]
    forget_the_latest()
    call()
    text = strobe.why()
    assert text.startswith(f"served: {function} was computed by Strobe's kernel cpu_"), text
    kernel_and_declines(text)


@pytest.mark.parametrize("name", BACKWARD)
def test_a_backward_pass(name: str) -> None:
    function, call = BACKWARD[name]
    forget_the_latest()
    call()
    text = strobe.why()
    assert text.startswith(f"served: {function} was computed by Strobe's kernel cpu_"), text
    kernel_and_declines(text, backward=True)


def test_the_problem_is_told() -> None:
    options: Any = {"causal": True, "window": (3, 0), "softcap": 2.0}
    strobe.attention(ROWS, ROWS[:, :, :2], ROWS[:, :, :2], **options)
    (wanted,) = (
        line.split(maxsplit=1)[1]
        for line in strobe.plan(ROWS, ROWS[:, :, :2], ROWS[:, :, :2], **options).splitlines()
        if line.startswith("problem")
    )
    assert strobe.why().splitlines()[1] == f"problem: {wanted}"
    assert "heads 4/2" in wanted


def test_merges() -> None:
    strobe.attention(ROWS, ROWS, ROWS)
    combined()
    assert strobe.why() == (
        "served: flash_attn_combine was computed by Strobe on cpu\n"
        "problem: parts 2, batch 2, heads 4, seqlen_q 5, head_dim_v 8, float32 to float32"
    )
    halves = torch.from_numpy(OUT)[None].repeat(3, 1, 1, 1, 1)
    strobe.merge(halves, torch.from_numpy(LSE)[None].repeat(3, 1, 1, 1), out_dtype="float16")
    assert strobe.why().startswith("served: strobe.merge was computed by Strobe on cpu\n")
    assert strobe.why().endswith(
        "parts 3, batch 2, heads 4, seqlen_q 5, head_dim_v 8, float32 to float16"
    )


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="PyTorch is older"
)
def test_pytorchs_registry() -> None:
    strobe.torch.register()
    torch.nn.attention.activate_flash_attention_impl("strobe")
    try:
        forget_the_latest()
        q = leaf(H)
        out = sdpa(q, q, q)
        text = strobe.why()
        assert text.startswith(f"served: {SDPA} was computed by Strobe's kernel cpu_"), text
        kernel_and_declines(text)
        out.sum().backward()
        text = strobe.why()
        assert text.startswith(f"served: the gradient of {SDPA} was computed by"), text
        kernel_and_declines(text, backward=True)
        wide = torch.randn(1, 1, 3, 300)
        sdpa(wide, wide, wide)
        assert strobe.why().startswith(f"declined: {SDPA} was left to PyTorch, because head_dim")
    finally:
        torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_jax() -> None:
    import jax
    import jax.numpy as jnp

    import strobe.jax

    x = jnp.asarray(ROWS)
    calls: list[Callable[[], Any]] = [
        lambda: strobe.jax.attention(x, x, x),
        lambda: jax.grad(lambda q: strobe.jax.attention(q, x, x).sum())(x),
    ]
    for backward, call in enumerate(calls):
        forget_the_latest()
        jax.block_until_ready(call())
        text = strobe.why()
        door = f"{'the gradient of ' if backward else ''}strobe.jax.attention"
        assert text.startswith(f"served: {door} was computed by Strobe's kernel cpu_"), text
        kernel_and_declines(text, bool(backward))
        assert strobe.why() == ThreadPoolExecutor(1).submit(strobe.why).result()


# --------------------------------------------------------------------------------- without a kernel


NO_CALL = """
import threading
import numpy as np, strobe
first = strobe.why()
assert first.startswith("no call seen: no function of Strobe's has computed anything"), first
x = np.ones((1, 2, 1, 8), np.float32)
strobe.plan(x, x, x)
assert strobe.why() == first
strobe.attention(x, x, x)
assert strobe.why().startswith("served: strobe.attention "), strobe.why()
texts = []
thread = threading.Thread(target=lambda: texts.append(strobe.why()))
thread.start()
thread.join()
assert texts == [first], texts
"""


def test_no_call() -> None:
    subprocess.run([sys.executable, "-c", NO_CALL], check=True, timeout=300)


def test_declined_calls() -> None:
    wide = torch.randn(1, 1, 3, 300)
    forget_the_latest()
    in_block(lambda: sdpa(wide, wide, wide))()
    reason = f"declined: {SDPA} was left to PyTorch, because head_dim is above 256: query "
    assert strobe.why().startswith(reason)
    strobe.attention(ROWS, ROWS, ROWS)
    assert strobe.why().startswith("served: strobe.attention ")


def test_nothing_to_compute() -> None:
    empty = np.zeros((0, 5, 4, 8), np.float32)
    forget_the_latest()
    strobe.attention(empty, empty, empty)
    assert strobe.why() == "served: there was nothing to compute, as there are no sequences"
    none = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    forget_the_latest()
    out = in_block(lambda: sdpa(H, H, H, none))()
    if _masks.EMPTY_ROWS_ARE_ZERO:
        assert not out.any()
        assert strobe.why() == "served: there was nothing to compute, as the mask hides every key"
    else:
        assert strobe.why().startswith("declined: ")


def test_a_call_that_raises_leaves_it_as_it_was() -> None:
    strobe.attention(ROWS, ROWS, ROWS, causal=True)
    before = strobe.why()
    with pytest.raises(strobe.InvalidArgument):
        strobe.attention(ROWS, ROWS[:1], ROWS)
    with pytest.raises(strobe.InvalidArgument):
        strobe.attention(
            ROWS.reshape(-1, 4, 8),
            ROWS.reshape(-1, 4, 8),
            ROWS.reshape(-1, 4, 8),
            cu_seqlens_q=np.array([0, 9, 5], np.int32),
            cu_seqlens_k=np.array([0, 9, 5], np.int32),
            max_seqlen_q=9,
            max_seqlen_k=9,
        )
    assert strobe.why() == before


def test_questions_are_no_calls() -> None:
    strobe.attention(ROWS, ROWS, ROWS, causal=True)
    before = strobe.why()
    strobe.plan(ROWS, ROWS, ROWS)
    strobe.why(ROWS, ROWS, ROWS)
    strobe.torch.why(H, H, H)
    assert strobe.why() == before


# ------------------------------------------------------------------------------- threads, lifetimes


def test_threads_have_answers_of_their_own() -> None:
    together = threading.Barrier(4)

    def answer(heads: int) -> str:
        x = np.ones((1, 3, heads, 8), np.float32)
        together.wait()
        strobe.attention(x, x, x)
        together.wait()
        return strobe.why()

    strobe.attention(ROWS, ROWS, ROWS)
    mine = strobe.why()
    with ThreadPoolExecutor(4) as pool:
        for heads, text in enumerate(pool.map(answer, range(1, 5)), 1):
            assert f"heads {heads}," in text
    assert strobe.why() == mine


def test_calls_of_foreign_threads_are_everybodys() -> None:
    """As PyTorch's, in which a backward pass runs on a GPU: Python's threading did not start it."""
    x = np.ones((1, 3, 7, 8), np.float32)
    done = threading.Event()

    def call() -> None:
        try:
            strobe.attention(x, x, x)
        finally:
            done.set()

    strobe.attention(ROWS, ROWS, ROWS)
    _thread.start_new_thread(call, ())
    assert done.wait(60)
    assert "heads 7," in strobe.why()
    assert "heads 7," in ThreadPoolExecutor(1).submit(strobe.why).result()
    strobe.attention(ROWS, ROWS, ROWS)
    assert "heads 4," in strobe.why()


def test_it_outlives_plans_and_threads() -> None:
    strobe.attention(ROWS, ROWS, ROWS)
    before = strobe.why()
    _core.forget()
    assert strobe.why() == before
    for _ in range(20):
        thread = threading.Thread(target=lambda: strobe.attention(ROWS, ROWS, ROWS))
        thread.start()
        thread.join()
    _core.forget()
    assert strobe.why() == before


def test_no_array_is_kept() -> None:
    class Array(np.ndarray[Any, Any]):
        pass

    # The array is made here and not handed over: while torch.compile has its own way of running
    # frames, which it may leave behind, Python keeps a call's arguments until the call returns.
    def watch(call: Callable[[Any], Any], make: Callable[[], Any]) -> None:
        x = make()
        results = call(x)
        results = results if isinstance(results, tuple) else (results,)
        watched = [weakref.ref(y) for y in (x, *results)]
        assert strobe.why().startswith("served: ")
        del x, results
        gc.collect()
        assert all(y() is None for y in watched)

    watch(lambda x: strobe.attention(x, x, x, return_lse=True), lambda: ROWS.copy().view(Array))
    watch(lambda x: flash_attn.flash_attn_func(x, x, x), T.clone)
    lse = np.zeros((2, 2, 4, 5), np.float32)
    watch(lambda x: strobe.merge(x, lse), lambda: np.stack([OUT, OUT]))
    watch(lambda x: in_block(lambda: sdpa(x, x, x, padded()))(), H.clone)


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_child_knows_it_too() -> None:
    strobe.attention(ROWS, ROWS, ROWS)
    before = strobe.why()
    child = os.fork()
    if child == 0:
        try:
            good = strobe.why() == before
            strobe.attention(ROWS, ROWS, ROWS, causal=True)
            good = good and "causal" in strobe.why()
        finally:
            os._exit(not good)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
