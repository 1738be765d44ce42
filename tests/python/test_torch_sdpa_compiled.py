"""scaled_dot_product_attention under sdpa_kernel in compiled functions that are checkpointed, that
have gradients, or that call it through a module of PyTorch: Strobe computes what it computes in
eager mode.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import pytest

import strobe

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import strobe.torch  # noqa: E402

from tensors import Tensor  # noqa: E402

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
pytestmark = pytest.mark.skipif(VERSION < (2, 6), reason="cannot compile a TorchFunctionMode")


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> None:
    torch._dynamo.reset()


def layer(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    return torch.sin(scaled_dot_product_attention(q * 2, k, v, dropout_p=dropout_p))


def in_block(function: Any, *args: Any) -> Tensor:
    with strobe.torch.sdpa_kernel():
        return function(*args)


def gradients(function: Any, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(out, gradients of sum(out**2)). By backward(): reentrant checkpoints know no other."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    torch.manual_seed(3)
    with strobe.torch.sdpa_kernel() as served:
        out = function(*leaves)
    assert strobe.why().startswith("served: "), strobe.why()
    out.square().sum().backward()
    assert strobe.why().startswith("served: "), strobe.why()
    assert served.calls >= 1
    assert not served.fallbacks
    return out.detach(), [leaf.grad for leaf in leaves]


def close(found: tuple[Tensor, list[Tensor]], wanted: tuple[Tensor, list[Tensor]]) -> None:
    for a, b in zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("what", "backend", "reentrant", "dropout_p"),
    [
        *product(
            ("around", "around, with a block", "inside", "twice"),
            ["aot_eager"],
            (False, True),
            [0.3],
        ),
        ("around", "inductor", False, 0.0),
    ],
)
def test_compiled_and_checkpointed(
    what: str, backend: str, reentrant: bool, dropout_p: float
) -> None:
    """what: where torch.compile stands, as seen from the checkpoint."""
    tensors = [torch.randn(2, 4, n, 16) for n in (9, 7, 7)]
    plain = partial(layer, dropout_p=dropout_p)
    again = partial(checkpoint, plain, use_reentrant=reentrant)
    build = partial(torch.compile, backend=backend, fullgraph=True)
    functions: dict[str, Any] = {
        "around": lambda: build(lambda *args: again(*args)),
        "around, with a block": lambda: build(lambda *args: in_block(again, *args)),
        "inside": lambda: partial(checkpoint, build(plain), use_reentrant=reentrant),
        "twice": lambda: build(
            lambda *args: checkpoint(lambda *args: again(*args), *args, use_reentrant=reentrant)
        ),
    }
    close(gradients(functions[what](), *tensors), gradients(plain, *tensors))


def test_what_is_declined_under_a_checkpoint_is_pytorchs() -> None:
    q = torch.randn(1, 1, 4, 300, requires_grad=True)
    compiled = torch.compile(
        lambda q: checkpoint(scaled_dot_product_attention, q, q, q, use_reentrant=False),
        backend="aot_eager",
        fullgraph=True,
    )
    with strobe.torch.sdpa_kernel() as served:
        (found,) = torch.autograd.grad(compiled(q).square().sum(), q)
    assert served.calls == 0
    (wanted,) = torch.autograd.grad(scaled_dot_product_attention(q, q, q).square().sum(), q)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_compiled_and_checkpointed_without_a_block_is_pytorchs() -> None:
    """Also after the same function was compiled in a block."""
    q = torch.randn(2, 4, 9, 16, requires_grad=True)
    compiled = torch.compile(
        lambda q: checkpoint(scaled_dot_product_attention, q, q, q, use_reentrant=False),
        backend="aot_eager",
        fullgraph=True,
    )
    with strobe.torch.sdpa_kernel() as served:
        compiled(q)
    calls = served.calls
    assert calls >= 1
    compiled(q).sum().backward()
    assert served.calls == calls


def test_threads_have_answers_of_their_own() -> None:
    compiled = torch.compile(
        lambda q: checkpoint(scaled_dot_product_attention, q, q, q, use_reentrant=False),
        backend="aot_eager",
    )

    def answer(head_dim: int) -> str:
        with strobe.torch.sdpa_kernel():
            compiled(torch.randn(1, 2, 9, head_dim, requires_grad=True))
        return strobe.why().partition(":")[0]

    widths = (16, 300)
    assert answer(16) == "served"  # compiled here, as PyTorch's compiler has one thread at a time
    last = answer(300)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(answer, widths * 4)) == ["served", last] * 4
    compiled(torch.randn(1, 2, 9, 16, requires_grad=True))
    assert strobe.why().partition(":")[0] == last  # PyTorch's, without a block


@pytest.mark.parametrize("heads_inner", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_of_any_layout(backend: str, heads_inner: bool) -> None:
    """Compiled code relies on the strides that it was told while it was compiled."""
    shapes = [(2, 4, n, 16) for n in (9, 7, 7)]
    tensors = [torch.randn(b, n, h, d).transpose(1, 2) for b, h, n, d in shapes]
    if not heads_inner:
        tensors = [x.contiguous() for x in tensors]
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    close(gradients(compiled, *tensors), gradients(layer, *tensors))


def test_multi_head_attention() -> None:
    """torch.compile gets through torch.nn.functional.multi_head_attention_forward in one graph."""
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def call(x: Tensor) -> Tensor:
        return module(x, x, x, need_weights=False)[0]

    x = torch.randn(2, 9, 16)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    close(gradients(compiled, x), gradients(call, x))
    again = torch.compile(
        lambda x: checkpoint(call, x, use_reentrant=False), backend="aot_eager", fullgraph=True
    )
    close(gradients(again, x), gradients(call, x))


def test_unflatten() -> None:
    """A method of PyTorch's own whose code its compiler cannot follow from a TorchFunctionMode."""

    def call(x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    x = torch.randn(2, 9, 96)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    close(gradients(compiled, x), gradients(call, x))
    torch._dynamo.reset()
    inside = torch.compile(partial(in_block, call), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(inside(x), call(x))


@pytest.mark.skipif(VERSION < (2, 11), reason="compiles more by itself")
def test_what_is_not_compiled_in_a_block_does_not_compile_the_block() -> None:
    """The functions that uncompiled code calls between compiled parts are many."""
    functions = (torch.sin, torch.cos, torch.exp, torch.tanh, torch.abs, torch.neg, torch.sigmoid)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def uncompiled(x: Tensor) -> Tensor:
        for function in functions:
            x = function(x)
        return scaled_dot_product_attention(x, x, x)

    def call(x: Tensor) -> Tensor:
        return uncompiled(x * 2) + 1

    torch._dynamo.utils.counters.clear()
    x = torch.randn(2, 4, 9, 16)
    compiled = torch.compile(call, backend="aot_eager")
    with strobe.torch.sdpa_kernel() as served:
        for _ in range(3):
            found = compiled(x)
    assert served.calls == 3
    torch.testing.assert_close(found, call(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # around the call


def test_a_model_that_checkpoints_its_layers() -> None:
    transformers = pytest.importorskip("transformers")
    configuration = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(configuration)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    ids = torch.randint(1, 97, (2, 9))

    def step(run: Any) -> list[Tensor]:
        model.zero_grad()
        run(input_ids=ids, labels=ids).loss.backward()
        return [x.grad.clone() for x in model.parameters()]

    wanted = step(model)
    compiled = torch.compile(model, backend="aot_eager")
    with strobe.torch.sdpa_kernel() as served:
        found = step(compiled)
    assert served.calls >= 2
    assert not served.fallbacks
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
