"""What strobe.why() says of scaled_dot_product_attention, and that whatever PyTorch alone computes
comes out under sdpa_kernel: compiled, checkpointed, transformed, in threads, of odd tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import strobe

torch = pytest.importorskip("torch")

from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import strobe.torch  # noqa: E402
from strobe import _calls, _sdpa_compiled  # noqa: E402

from tensors import Tensor  # noqa: E402

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


def tensor(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, requires_grad=grad)


def jagged() -> Tensor:
    rows = [torch.randn(n, 4, 16) for n in (3, 5)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(4, n, 16) for n in (3, 5)])


class Own(Tensor):  # type: ignore[misc]
    """A subclass that PyTorch lets through."""


Q = torch.randn(2, 4, 9, 16)

# What PyTorch computes, or refuses, by itself: arguments and options of a call.
ODD: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "head_dim 300": (lambda: (tensor(1, 1, 4, 300),) * 3, {}),
    "head_dim 512": (lambda: (tensor(1, 1, 4, 512),) * 3, {}),
    "broadcast batch": (lambda: (Q, Q[:1], Q[:1]), {}),
    "batch 0": (lambda: (Q[:0], Q[:0], Q[:0]), {}),
    "no heads": (lambda: (Q[:, :0], Q[:, :0], Q[:, :0]), {}),
    "no keys": (lambda: (Q, Q[:, :, :0], Q[:, :, :0]), {}),
    "no queries": (lambda: (Q[:, :, :0], Q, Q), {}),
    "head_dim 0": (lambda: (Q[..., :0], Q[..., :0], Q), {}),
    "dropout_p 1": (lambda: (Q, Q, Q), {"dropout_p": 1.0}),
    "dropout_p 2": (lambda: (Q, Q, Q), {"dropout_p": 2.0}),
    "dropout_p negative": (lambda: (Q, Q, Q), {"dropout_p": -0.5}),
    "scale inf": (lambda: (Q, Q, Q), {"scale": float("inf")}),
    "scale nan": (lambda: (Q, Q, Q), {"scale": float("nan")}),
    "scale beyond float32": (lambda: (Q, Q, Q), {"scale": 1e300}),
    "float64": (lambda: (Q.double(),) * 3, {}),
    "three dimensions": (lambda: (Q[0], Q[0], Q[0]), {}),
    "two dimensions": (lambda: (Q[0, 0], Q[0, 0], Q[0, 0]), {}),
    "other heads": (lambda: (Q, Q[:, :2], Q[:, :2]), {}),
    "other dtypes": (lambda: (Q, Q.half(), Q), {}),
    "other lengths": (lambda: (Q, Q[:, :, :5], Q[:, :, :6]), {}),
    "other head_dim": (lambda: (Q, Q[..., :8], Q), {}),
    "mask and is_causal": (
        lambda: (Q, Q, Q),
        {"attn_mask": torch.ones(9, 9, dtype=torch.bool), "is_causal": True},
    ),
    "mask of another shape": (lambda: (Q, Q, Q), {"attn_mask": torch.zeros(8, 9)}),
    "integer mask": (lambda: (Q, Q, Q), {"attn_mask": torch.ones(9, 9, dtype=torch.int32)}),
}
# Eager only: what PyTorch's compiler itself does with them is another question.
EAGER: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "jagged": (lambda: (jagged(),) * 3, {}),
    "nested": (lambda: (nested(),) * 3, {}),
    "sparse": (lambda: (Q.to_sparse(),) * 3, {}),
    "meta": (lambda: (Q.to("meta"),) * 3, {}),
    "subclass": (lambda: (Q.as_subclass(Own),) * 3, {}),
    "integers": (lambda: (Q.int(),) * 3, {}),
    "complex": (lambda: (Q.cfloat(),) * 3, {}),
    "no tensor": (lambda: (None, Q, Q), {}),
    "list": (lambda: ([1.0], Q, Q), {}),
    "unknown argument": (lambda: (Q, Q, Q), {"softcap": 1.0}),
    "dropout_p is text": (lambda: (Q, Q, Q), {"dropout_p": "x"}),
    "scale is text": (lambda: (Q, Q, Q), {"scale": "x"}),
    "too few": (lambda: (Q, Q), {}),
    "CausalBias of other lengths": (lambda: (Q, Q, Q), {"attn_mask": causal_lower_right(4, 9)}),
    "CausalBias that broadcasts": (lambda: (Q, Q, Q), {"attn_mask": causal_upper_left(9, 1)}),
}


def outcome(call: Callable[[], Any]) -> Any:
    try:
        found = call()
    except Exception as error:
        return type(error), str(error)
    if found.is_nested:
        return [x.detach() for x in found.unbind()]
    return found.detach()


def assert_same_outcome(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, tuple):
        assert found == wanted
    elif isinstance(wanted, list):
        torch.testing.assert_close(found, wanted)
    elif wanted.is_meta:
        assert found.shape == wanted.shape
    else:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ODD | EAGER)
def test_what_pytorch_alone_computes_or_refuses(name: str, grad: bool) -> None:
    make, options = (ODD | EAGER)[name]
    arguments = make()
    if grad:
        for x in arguments:
            if isinstance(x, torch.Tensor) and x.is_floating_point() and not x.is_sparse:
                x.requires_grad_()
    try:
        wanted = outcome(lambda: scaled_dot_product_attention(*arguments, **options))
        with strobe.torch.sdpa_kernel() as served:
            found = outcome(lambda: scaled_dot_product_attention(*arguments, **options))
    finally:
        Q.requires_grad_(False)
    assert_same_outcome(found, wanted)
    assert served.calls == 0
    if isinstance(wanted, tuple) and wanted[0] is TypeError:
        # PyTorch reads the arguments before it asks whether anybody else wants the call.
        assert not served.fallbacks or strobe.why().startswith("declined: ")
        return
    (kind,) = served.fallbacks
    assert strobe.why().startswith("declined: ")
    assert kind in strobe.why()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
def test_the_same_under_compile(name: str) -> None:
    make, options = ODD[name]
    arguments = make()

    def call() -> Any:
        return scaled_dot_product_attention(*arguments, **options)

    torch._dynamo.reset()
    plain = outcome(torch.compile(call, backend="aot_eager"))
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager")
    with strobe.torch.sdpa_kernel() as served:
        found = outcome(compiled)
    if isinstance(plain, tuple):  # the compiler's error, which quotes lines
        assert isinstance(found, tuple)
        assert found[0] is plain[0]
        return
    assert_same_outcome(found, plain)
    assert served.calls == 0
    if _sdpa_compiled.REPORTS_FROM_COMPILED_CODE:
        assert list(served.fallbacks.values()) == [1]
        assert strobe.why().startswith("declined: ")


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_a_causal_bias_of_other_lengths_is_not_served() -> None:
    """PyTorch applies its lengths, Strobe's causal those of the tensors."""
    q = tensor(1, 2, 8, 16)
    for bias in (causal_lower_right(8, 1), causal_lower_right(1, 8), causal_upper_left(1, 1)):
        call = partial(scaled_dot_product_attention, q, q, q, bias)
        wanted = outcome(call)
        with strobe.torch.sdpa_kernel() as served:
            found = outcome(call)
        if bias.seq_len_kv > 1 or bias.seq_len_q == 1:  # PyTorch 2.4 reads past the mask's end
            assert_same_outcome(found, wanted)
        assert served.calls == 0
        assert any("CausalBias" in kind or "causal_upper_left" in kind for kind in served.fallbacks)


# -------------------------------------------------------------------------------- the three answers


def test_three_answers() -> None:
    scaled_dot_product_attention(Q, Q, Q)
    with strobe.torch.sdpa_kernel():
        scaled_dot_product_attention(Q, Q, Q)
    assert strobe.why().startswith("served: scaled_dot_product_attention was computed by Strobe")
    plan = strobe.plan(*(x.transpose(1, 2) for x in (Q, Q, Q)))
    assert strobe.why().splitlines()[0].split()[-1] in plan.splitlines()[1]
    with strobe.torch.sdpa_kernel():
        assert strobe.why().startswith("no call seen: ")  # nothing of the block before
        scaled_dot_product_attention(Q[0], Q[0], Q[0])
        assert strobe.why().startswith("declined: ")
    declined = strobe.why()
    assert declined.startswith("declined: ")
    scaled_dot_product_attention(Q, Q, Q)  # which Strobe does not see
    assert strobe.why() == declined


def test_what_served_a_call_may_say_more() -> None:
    head = "problem    forward bf16\nkernel     b\nwhy\n  a    declines: its reason\n"
    found = [
        _calls._served("attention", f"{head}  b    {verdict}\n  c    would take it\n")
        for verdict in ("takes it", "takes it: codes of int8 are unpacked")
    ]
    alone = [
        "served: attention was computed by Strobe's kernel b",
        "problem: forward bf16",
        "a declines: its reason",
    ]
    assert found[0].splitlines() == alone
    assert found[1].splitlines() == [*alone, "b takes it: codes of int8 are unpacked"]


def test_attention_weights_are_never_seen() -> None:
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 9, 32)
    with strobe.torch.sdpa_kernel() as served:
        layer(x, x, x, need_weights=False)
        assert strobe.why().startswith("served: ")
    with strobe.torch.sdpa_kernel() as served:
        layer(x, x, x)  # multiplies matrices of its own
    assert strobe.why().startswith("no call seen: ")
    assert (served.calls, served.fallbacks) == (0, {})


def test_reasons_are_counted_without_shapes() -> None:
    """24 generated tokens once were 24 reasons."""
    with strobe.torch.sdpa_kernel() as served:
        for length in range(2, 26):
            scaled_dot_product_attention(*(tensor(2, 4, length, 16).double(),) * 3)
            scaled_dot_product_attention(*(tensor(1, 1, length, 300),) * 3)
    assert list(served.fallbacks.values()) == [24, 24]


def test_threads_have_answers_of_their_own() -> None:
    def answer(length: int) -> tuple[int, str]:
        q = tensor(1, 2, length, 16 if length % 2 else 300)
        with strobe.torch.sdpa_kernel() as served:
            scaled_dot_product_attention(q, q, q)
            return served.calls, strobe.why()

    with ThreadPoolExecutor(4) as pool:
        for length, (calls, text) in enumerate(pool.map(answer, range(1, 41)), 1):
            assert calls == length % 2
            assert text.startswith("served: " if length % 2 else "declined: ")


def test_pytorchs_own_choice_inside_the_block_wins() -> None:
    """torch.nn.attention.sdpa_kernel(MATH), as the message about double backward recommends."""
    q = tensor(1, 2, 5, 8, grad=True)
    backend = torch.nn.attention.SDPBackend.MATH
    with strobe.torch.sdpa_kernel(), torch.nn.attention.sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, q, q)
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), q)
    assert second.isfinite().all()
    assert "switched off" in strobe.why()


# ------------------------------------------------------------------------ compiled and checkpointed

needs_effects = pytest.mark.skipif(
    not _sdpa_compiled.REPORTS_FROM_COMPILED_CODE, reason="this PyTorch drops the report"
)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_are_counted_when_they_run(backend: str) -> None:
    torch._dynamo.reset()
    wanted = scaled_dot_product_attention(Q, Q, Q, is_causal=True)
    compiled = torch.compile(
        lambda q: scaled_dot_product_attention(q, q, q, is_causal=True),
        backend=backend,
        fullgraph=True,
    )
    with strobe.torch.sdpa_kernel() as served:
        torch.testing.assert_close(compiled(Q), wanted, rtol=1e-5, atol=1e-5)
        assert (served.calls, served.fallbacks) == (1, {})
        scaled_dot_product_attention(Q[0], Q[0], Q[0])
        assert strobe.why().startswith("declined: ")
        compiled(Q)
        assert strobe.why().startswith("served: ")
    assert served.calls == 2
    if torch.__version__.startswith("2.4."):  # its compiler does not see that the block has ended
        return
    torch.testing.assert_close(compiled(Q), wanted, rtol=0, atol=0)  # outside: PyTorch's
    assert served.calls == 2


@needs_effects
def test_compiled_code_says_that_pytorch_computed_it() -> None:
    torch._dynamo.reset()
    q = tensor(1, 1, 4, 300, grad=True)
    compiled = torch.compile(
        lambda q: scaled_dot_product_attention(q, q, q), backend="aot_eager", fullgraph=True
    )
    with strobe.torch.sdpa_kernel() as served:
        for _ in range(3):
            compiled(q).sum().backward()
    assert list(served.fallbacks.items()) == [("head_dim is above 256", 3)]
    assert strobe.why().startswith("declined: ")


@pytest.mark.parametrize("kind", ["padding", "arbitrary", "causal"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_masks_are_read_when_compiled_code_runs(kind: str, dropout_p: float) -> None:
    torch._dynamo.reset()
    q, k, v = (tensor(2, 4, n, 16, grad=True) for n in (9, 9, 9))
    mask = torch.rand(2, 1, 9, 9) < 0.5 if kind == "arbitrary" else torch.ones(2, 1, 9, 9) > 0
    mask[..., 0] = True
    if kind == "causal":
        mask = mask.tril()
    elif kind == "padding":
        mask[0, ..., 5:] = False

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask, dropout_p)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    with strobe.torch.sdpa_kernel() as served:
        out = compiled(q, k, v, mask)
    assert (served.calls, served.fallbacks) == (1, {})
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    if dropout_p == 0:
        wanted = call(q, k, v, mask)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
        wanted_gradients = torch.autograd.grad(wanted, (q, k, v), dout)
        for a, b in zip(found, wanted_gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    else:  # out is linear in v: the gradient belongs to the same dropped weights
        torch.testing.assert_close((found[2] * v).sum(), (dout * out).sum(), rtol=1e-3, atol=1e-3)


def test_compiled_with_new_lengths() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q: scaled_dot_product_attention(q, q, q), backend="aot_eager", dynamic=True
    )
    with strobe.torch.sdpa_kernel() as served:
        for length in (5, 9, 17, 33):
            q = tensor(2, 4, length, 16)
            torch.testing.assert_close(
                compiled(q), torch.ops.aten.scaled_dot_product_attention(q, q, q)
            )
    assert (served.calls, served.fallbacks) == (4, {})


@pytest.mark.skipif(VERSION < (2, 6), reason="cannot compile this")
def test_a_compiled_block_that_is_interrupted() -> None:
    torch._dynamo.reset()

    def call(q: Tensor) -> Tensor:
        with strobe.torch.sdpa_kernel():
            out = scaled_dot_product_attention(q, q, q)
            torch._dynamo.graph_break()
            return out + scaled_dot_product_attention(q, q, q)

    compiled = torch.compile(call, backend="aot_eager")
    wanted = 2 * scaled_dot_product_attention(Q, Q, Q)
    with strobe.torch.sdpa_kernel() as outer:
        for _ in range(2):
            torch.testing.assert_close(compiled(Q), wanted, rtol=1e-5, atol=1e-5)
        before = outer.calls
        scaled_dot_product_attention(Q, Q, Q)
        assert outer.calls == before + 1  # nothing of the inner blocks is left
    compiled(Q)
    assert strobe.why().startswith("served: ")


@pytest.mark.parametrize(
    "arguments",
    [(None, Q, Q), ([1.0], Q, Q), (Q, Q, Q, [1]), (Q, Q, Q, None, "x"), (Q, Q, Q, None, [])],
)
def test_why_of_odd_arguments_is_an_answer(arguments: tuple[Any, ...]) -> None:
    assert strobe.torch.why(*arguments)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_activation_checkpointing(inside: bool, reentrant: bool) -> None:
    """What is computed again drops the same weights, so it must be Strobe that computes it."""

    def layer(q: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, q, q, dropout_p=0.3) * 2

    q = tensor(2, 4, 9, 16, grad=True)
    torch.manual_seed(3)
    with strobe.torch.sdpa_kernel():
        layer(q).square().sum().backward()
    assert q.grad is not None
    wanted, q.grad = q.grad, None
    torch.manual_seed(3)
    with strobe.torch.sdpa_kernel() as served:
        out = checkpoint(layer, q, use_reentrant=reentrant)
        assert served.calls == 1
        assert strobe.why().startswith("served: ")
        if inside:
            out.square().sum().backward()
    if not inside:
        out.square().sum().backward()
    assert torch.equal(q.grad, wanted)
    assert strobe.why().startswith("served: ")
    assert not served.fallbacks


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_without_a_block_is_pytorchs(reentrant: bool) -> None:
    q = tensor(2, 4, 9, 16, grad=True)
    out = checkpoint(lambda q: scaled_dot_product_attention(q, q, q), q, use_reentrant=reentrant)
    with strobe.torch.sdpa_kernel() as served:  # this call is not that of the block
        out.sum().backward()
    assert (served.calls, served.fallbacks) == (0, {})


# --------------------------------------------------------------------------------------- torch.func


def loss(q: Tensor, k: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, k).square().sum()


def one(q: Tensor, k: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, k)


TRANSFORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grad": lambda q, k: torch.func.grad(loss, (0, 1))(q, k),
    "vjp": lambda q, k: torch.func.vjp(one, q, k)[1](torch.ones_like(q)),
    "jacrev": lambda q, k: torch.func.jacrev(one)(q[:1, :1], k[:1, :1]),
    "vmap": lambda q, k: torch.vmap(one)(q[:, None], k[:, None]),
    "vmap of grad": lambda q, k: torch.vmap(torch.func.grad(loss))(q[:, None], k[:, None]),
    "grad of vmap": lambda q, k: torch.func.grad(
        lambda q: torch.vmap(one)(q[:, None], k[:, None]).square().sum()
    )(q),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func(name: str) -> None:
    q, k = tensor(2, 4, 9, 16), tensor(2, 4, 7, 16)
    wanted = TRANSFORMS[name](q, k)
    with strobe.torch.sdpa_kernel() as served:
        found = TRANSFORMS[name](q, k)
    assert (served.calls, served.fallbacks) == (1, {})
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_transforms_that_strobe_has_not() -> None:
    q, k = tensor(1, 2, 5, 16), tensor(1, 2, 5, 16)
    with strobe.torch.sdpa_kernel(), pytest.raises(strobe.Unsupported, match="double backward"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, k).sum())(q)
    backend = torch.nn.attention.SDPBackend.MATH  # which can differentiate forward
    with torch.nn.attention.sdpa_kernel(backend):
        wanted = torch.func.jvp(lambda q: one(q, k), (q,), (q,))
        with strobe.torch.sdpa_kernel() as served:
            found = torch.func.jvp(lambda q: one(q, k), (q,), (q,))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert list(served.fallbacks) == ["forward-mode differentiation is at work"]
