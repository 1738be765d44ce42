"""torch.ops.strobe under PyTorch's own checks, compiler, transforms and distributed training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import strobe

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from strobe import _operators as operators  # noqa: E402
from strobe import flash_attn_3  # noqa: E402
from strobe.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

from tensors import Tensor  # noqa: E402

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


def qkv(device: str, *shape: int, grad: bool = True) -> list[Tensor]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=grad) for _ in range(3)]


def options(**changes: Any) -> tuple[Any, ...]:
    """What follows q, k and v in the operators' schemas."""
    values = {
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "alibi_slopes": None,
        "rng_state": None,
        "max_seqlen_q": None,
        "max_seqlen_k": None,
        "dropout_p": 0.0,
        "scale": None,
        "causal": False,
        "window_left": -1,
        "window_right": -1,
        "softcap": 0.0,
        "deterministic": False,
    }
    assert not changes.keys() - values.keys()
    return tuple({**values, **changes}.values())


# ------------------------------------------------------------------------------------------ opcheck

CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "dense": ((2, 9, 4, 16), {"causal": True}),
    "alibi, window": (
        (2, 9, 4, 16),
        {"alibi_slopes": torch.rand(4), "window_left": 3, "window_right": 2, "scale": 0.3},
    ),
    "dropout": ((2, 9, 4, 16), {"rng_state": torch.tensor([5, 7]), "dropout_p": 0.2}),
    "packed": (
        (9, 4, 16),
        {
            "cu_seqlens_q": torch.tensor([0, 4, 9], dtype=torch.int32),
            "cu_seqlens_k": torch.tensor([0, 4, 9], dtype=torch.int32),
            "max_seqlen_q": 5,
            "max_seqlen_k": 5,
        },
    ),
}


def call(name: str, device: str) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    shape, changes = CALLS[name]
    moved = {
        key: value.to(device) if isinstance(value, torch.Tensor) and key != "rng_state" else value
        for key, value in changes.items()
    }
    return shape, options(**moved)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_forward(name: str, device: str) -> None:
    torch.manual_seed(0)
    shape, rest = call(name, device)
    torch.library.opcheck(operators.attention_forward, (*qkv(device, *shape), *rest))


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_backward(name: str, device: str) -> None:
    torch.manual_seed(0)
    shape, rest = call(name, device)
    q, k, v = qkv(device, *shape, grad=False)
    out, lse = operators.attention_forward(q, k, v, *rest)
    for dout, dlse in ((torch.randn_like(out), None), (None, torch.randn_like(lse))):
        torch.library.opcheck(operators.attention_backward, (dout, dlse, q, k, v, out, lse, *rest))


def test_opcheck_of_the_others() -> None:
    torch.manual_seed(0)
    shape, rest = call("dropout", "cpu")
    q, k, _ = qkv("cpu", *shape, grad=False)
    torch.library.opcheck(operators.attention_dropout_weights, (q, k, *rest))
    # Not test_schema, which calls twice and wants the same numbers.
    device = {"device": torch.device("cpu")}
    torch.library.opcheck(operators.dropout_state, (), device, test_utils="test_faketensor")


def test_rng_state_is_checked() -> None:
    q, k, v = qkv("cpu", 1, 9, 2, 16)
    with pytest.raises(strobe.InvalidArgument, match=r"rng_state is torch\.float32"):
        operators.attention_forward(q, k, v, *options(rng_state=torch.zeros(2), dropout_p=0.1))


def test_a_cuda_generator_gives_its_seed_and_moves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Generator:
        offset = 8

        def initial_seed(self) -> int:
            return 2**64 - 3

        def get_offset(self) -> int:
            return self.offset

        def set_offset(self, offset: int) -> None:
            self.offset = offset

    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(), Generator()))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device = torch.device("cuda", 1)
    for offset in (8, 12, 16):
        state = operators.draw_dropout_state(device=device)
        assert state.dtype == torch.int64
        assert operators.seed_and_offset(state) == (2**64 - 3, offset)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(strobe.Unsupported, match="CUDA graph"):
        operators.draw_dropout_state(device=device)


# ---------------------------------------------------------------------------------------- compiler


class Compiled:
    """A function under torch.compile(fullgraph=True, dynamic=True), which counts compilations."""

    def __init__(self, function: Any, backend: str = "aot_eager") -> None:
        torch._dynamo.reset()
        counters.clear()
        self.function = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    @property
    def compilations(self) -> int:
        return int(counters["stats"]["unique_graphs"])


def same_results(compiled: Any, eager: Any, inputs: list[Tensor], *rest: Any) -> None:
    """Outputs and gradients are equal bit for bit."""
    found = []
    for function in (compiled, eager):
        torch.manual_seed(5)
        out = function(*inputs, *rest)
        leaves = [x for x in inputs if x.requires_grad]
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_compile_does_not_break_or_compile_again(device: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        out = flash_attn_func(q * 2, k, v, causal=True, window_size=(7, 0), alibi_slopes=slopes)
        return out.sin()

    compiled = Compiled(function)
    slopes = torch.rand(4, device=device)
    for n in (9, 17, 33, 64):
        same_results(compiled, function, qkv(device, 2, n, 4, 16), slopes)
    assert compiled.compilations == 1


def test_compile_packed_sequences(device: str) -> None:
    def function(qkv: Tensor, offsets: Tensor, longest: int) -> Tensor:
        q, k, v = qkv.unbind(1)
        return flash_attn_varlen_func(q, k, v, offsets, offsets, longest, longest, causal=True)

    compiled = Compiled(function)
    for lengths in ([4, 5], [7, 10], [20, 13], [3, 60]):
        offsets = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device)
        packed = torch.stack(qkv(device, sum(lengths), 4, 16, grad=False), 1).requires_grad_()
        same_results(compiled, function, [packed], offsets, max(lengths))
    assert compiled.compilations == 1


def offsets_of(lengths: Tensor) -> Tensor:
    return nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def varlen(x: Tensor, lengths: Tensor) -> Any:
    offsets, longest = offsets_of(lengths), lengths.max().item()
    return flash_attn_varlen_func(x, x, x, offsets, offsets, longest, longest, causal=True)


def varlen_qkvpacked(x: Tensor, lengths: Tensor) -> Any:
    packed = torch.stack([x, x, x], 1)
    return flash_attn_varlen_qkvpacked_func(packed, offsets_of(lengths), lengths.max())


def varlen_kvpacked(x: Tensor, lengths: Tensor) -> Any:
    offsets, longest, packed = offsets_of(lengths), lengths.max().item(), torch.stack([x, x], 1)
    return flash_attn_varlen_kvpacked_func(x, packed, offsets, offsets, longest, longest)


def varlen_with_probabilities(x: Tensor, lengths: Tensor) -> Any:
    offsets, longest = offsets_of(lengths), lengths.max()
    rest = (offsets, offsets, longest, longest, 0.2)
    return flash_attn_varlen_func(x, x, x, *rest, return_attn_probs=True)


def varlen_of_3(x: Tensor, lengths: Tensor) -> Any:
    offsets, longest = offsets_of(lengths), lengths.max().item()
    return flash_attn_3.flash_attn_varlen_func(x, x, x, offsets, offsets, longest, longest)


def window(x: Tensor, lengths: Tensor) -> Any:
    return flash_attn_func(x[None], x[None], x[None], window_size=(lengths.min().item(), 0))


def chunk(x: Tensor, lengths: Tensor) -> Any:
    length = lengths.max().item()
    return flash_attn_3.flash_attn_func(x[None], x[None], x[None], attention_chunk=length)


def chosen_rows(x: Tensor, lengths: Tensor) -> Any:
    x = x[torch.nonzero(x[:, 0, 0] > -1)[:, 0]]
    offsets = torch.zeros(2, dtype=torch.int32).index_fill(0, torch.tensor(1), x.shape[0])
    return flash_attn_varlen_func(x, x, x, offsets, offsets, x.shape[0], x.shape[0])


def cache(x: Tensor, lengths: Tensor) -> Any:
    length = lengths.min().item()
    return flash_attn_with_kvcache(x[None, :2], x[None], x[None], cache_seqlens=length)


@pytest.mark.skipif(VERSION < (2, 11), reason="whose compiler knows less of such numbers")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "function",
    [
        varlen,
        varlen_qkvpacked,
        varlen_kvpacked,
        varlen_with_probabilities,
        varlen_of_3,
        window,
        chunk,
        chosen_rows,
        cache,
    ],
)
def test_compile_numbers_that_are_known_at_run_time_alone(function: Any, dynamic: Any) -> None:
    """In one graph: no check of an argument may ask for a number that is not there yet."""
    torch._dynamo.reset()
    settings = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(settings):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for given in ([5, 7], [9, 1], [3, 30]):
            x, lengths = torch.randn(sum(given), 4, 16), torch.tensor(given)
            torch.manual_seed(5)
            found = compiled(x, lengths)
            torch.manual_seed(5)
            torch.testing.assert_close(found, function(x, lengths))


def test_compile_with_dropout_and_autocast() -> None:
    def function(qkv: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flash_attn_qkvpacked_func(qkv, 0.3, causal=True)

    compiled = Compiled(function)
    for n in (9, 20):
        packed = torch.randn(2, n, 3, 4, 16, requires_grad=True)
        assert compiled(packed).dtype == torch.bfloat16
        same_results(compiled, function, [packed])
    assert compiled.compilations == 1


def test_compile_dropout_weights() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_func(q, k, v, 0.3, return_attn_probs=True)

    inputs = qkv("cpu", 2, 9, 4, 16, grad=False)
    found = []
    for f in (Compiled(function), function):
        torch.manual_seed(5)
        found.append(f(*inputs))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_compile_with_inductor(device: str) -> None:
    """Through code generation: strides and sizes are as the fake implementations say."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True)

    compiled = Compiled(function, "inductor")
    for n in (9, 17):
        q, k, v = qkv(device, 2, 4, n, 16, grad=False)
        rows = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
        same_results(compiled, function, rows)
    assert compiled.compilations == 1


def test_compile_under_checkpoint() -> None:
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q.sin(), k, v, 0.3)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(block, q, k, v, use_reentrant=False)
        return out

    inputs = qkv("cpu", 2, 9, 4, 16)
    torch.manual_seed(5)
    out = Compiled(function)(*inputs)
    gradients = torch.autograd.grad(out.sum(), inputs)
    # What the forward pass drew, its repetition in the backward pass drew again.
    torch.manual_seed(5)
    again = block(*inputs)
    assert torch.equal(out, again)
    for a, b in zip(gradients, torch.autograd.grad(again.sum(), inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_export() -> None:
    class Module(nn.Module):  # type: ignore[misc]
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attn_func(q, k, v, causal=True)

    inputs = tuple(qkv("cpu", 2, 9, 4, 16, grad=False))
    length = torch.export.Dim("length", min=2, max=1000)
    program = torch.export.export(Module(), inputs, dynamic_shapes=[{1: length}] * 3)
    assert "strobe.attention_forward" in str(program.graph)
    longer = qkv("cpu", 2, 40, 4, 16, grad=False)
    assert torch.equal(program.module()(*longer), Module()(*longer))


# --------------------------------------------------------- options that most calls do without

MORE: list[dict[str, Any]] = [
    {"attention_chunk": 4},
    {"seqused_q": [9, 4], "seqused_k": [2, 9]},
    {"q_position": [3, -2], "seqused_k": [5, 0]},
    {"prefix": [0, 7]},
]


def with_more(more: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments after q, k and v."""
    named = {
        name: torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x
        for name, x in more.items()
    }
    return options(causal=True), named


@pytest.mark.parametrize("more", MORE)
def test_more_options(more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    rest, named = with_more(more)
    q, k, v = qkv("cpu", 2, 9, 4, 16)
    out, lse = operators.attention_forward(q, k, v, *rest, **named)
    plain = [x.detach() for x in (q, k, v)]
    wanted = strobe.attention(*plain, causal=True, return_lse=True, **named)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])
    dout = torch.randn_like(out)
    out.backward(dout)
    gradients = strobe.attention_backward(dout, *plain, *wanted, causal=True, **named)
    for x, gradient in zip((q, k, v), gradients, strict=True):
        assert torch.equal(x.grad, gradient)

    torch.library.opcheck(operators.attention_forward, (q, k, v, *rest), named)
    torch.library.opcheck(operators.attention_backward, (dout, None, *plain, *wanted, *rest), named)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return operators.attention_forward(q, k, v, *rest, **named)[0]

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for x in (q, k, v):
        x.grad = None
    compiled(q, k, v).backward(dout)
    for x, gradient in zip((q, k, v), gradients, strict=True):
        assert torch.equal(x.grad, gradient)


@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"), reason="PyTorch before 2.5 calls entry by entry"
)
@pytest.mark.parametrize("more", MORE)
def test_vmap_with_more_options(more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    rest, named = with_more(more)
    q, k, v = (torch.stack([x, x + 1, x * 2]) for x in qkv("cpu", 2, 9, 4, 16, grad=False))

    def function(q: Tensor, k: Tensor, v: Tensor, arrays: dict[str, Tensor]) -> Tensor:
        out: Tensor = operators.attention_forward(q, k, v, *rest, **(named | arrays))[0]
        return out

    wanted = torch.stack([function(a, b, c, {}) for a, b, c in zip(q, k, v, strict=True)])
    assert torch.equal(torch.vmap(lambda a, b, c: function(a, b, c, {}))(q, k, v), wanted)
    arrays = {
        name: torch.stack([x, x.flip(0), x])
        for name, x in named.items()
        if isinstance(x, torch.Tensor)
    }
    each = [{n: a[i] for n, a in arrays.items()} for i in range(3)]
    wanted = torch.stack([function(q[i], k[i], v[i], each[i]) for i in range(3)])
    assert torch.equal(torch.vmap(function)(q, k, v, arrays), wanted)


# ------------------------------------------------------------------------- transforms and observers


def test_vmap(device: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.stack([x, x + 1, x * 2]) for x in qkv(device, 2, 9, 4, 16, grad=False))
    slopes = torch.rand(3, 4, device=device)

    def function(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)

    wanted = torch.stack([function(*x) for x in zip(q, k, v, slopes, strict=True)])
    assert torch.equal(torch.vmap(function)(q, k, v, slopes), wanted)
    moved = torch.vmap(function, in_dims=(2, 0, 0, 1))(q.movedim(0, 2), k, v, slopes.T)
    assert torch.equal(moved, wanted)
    # Some of the arguments only, through autograd.
    one = k[0].requires_grad_()
    out = torch.vmap(lambda q: flash_attn_func(q, one, v[0]))(q)
    out.sum().backward()
    wanted = torch.autograd.grad(sum(flash_attn_func(x, one, v[0]).sum() for x in q), one)[0]
    torch.testing.assert_close(one.grad, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"), reason="PyTorch before 2.5 calls entry by entry"
)
def test_vmap_refusals() -> None:
    q, k, v = qkv("cpu", 3, 9, 4, 16, grad=False)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    with pytest.raises(strobe.Unsupported, match="vmap over packed sequences"):
        torch.vmap(lambda q: flash_attn_varlen_func(q, k[0], v[0], offsets, offsets, 5, 5))(q)
    q, k, v = (x[:, None] for x in (q, k, v))
    with pytest.raises(strobe.Unsupported, match="randomness"):
        torch.vmap(lambda q: flash_attn_func(q, k[0], v[0], 0.1))(q)
    function = torch.vmap(lambda q: flash_attn_func(q, k[0], v[0], 0.1), randomness="different")
    out = function(q)
    assert not torch.equal(out[0], flash_attn_func(q[0], k[0], v[0]))


def test_forward_mode_derivatives_are_refused() -> None:
    q, k, v = qkv("cpu", 1, 9, 2, 16, grad=False)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level(), pytest.raises(strobe.Unsupported, match="forward-mode"):
        flash_attn_func(forward_ad.make_dual(q, torch.ones_like(q)), k, v)


def one(q: Tensor, k: Tensor) -> Tensor:
    return flash_attn_func(q, k, k, causal=True)


def loss(q: Tensor, k: Tensor) -> Tensor:
    return one(q, k).sin().sum()


def packed_loss(q: Tensor, k: Tensor) -> Tensor:
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    return flash_attn_varlen_func(q[0], k[0], k[0], offsets, offsets, 3, 3).sin().sum()


def twice(function: Any, *tensors: Tensor) -> Any:
    """vmap over two entries."""
    return torch.vmap(function)(*(torch.stack([x, x * 2]) for x in tensors))


TRANSFORMS: dict[str, Any] = {
    "grad": torch.func.grad(loss, (0, 1)),
    "grad and value": torch.func.grad_and_value(loss),
    "grad, packed": torch.func.grad(packed_loss, (0, 1)),
    "vjp": lambda q, k: torch.func.vjp(one, q, k)[1](torch.ones_like(q)),
    "jacrev": torch.func.jacrev(one, (0, 1)),
    "vmap": lambda q, k: twice(one, q, k),
    "vmap of grad": lambda q, k: twice(torch.func.grad(loss, (0, 1)), q, k),
    "grad of vmap": torch.func.grad(lambda q, k: twice(one, q, k).sin().sum()),
}


@pytest.mark.skipif(
    not hasattr(torch.library, "register_vmap"), reason="PyTorch before 2.5 calls entry by entry"
)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_compiled_transforms(name: str) -> None:
    torch._dynamo.reset()
    q, k = (x.detach() for x in qkv("cpu", 1, 5, 2, 8)[:2])
    transform = TRANSFORMS[name]
    compiled = torch.compile(lambda q, k: transform(q, k), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k), transform(q, k))


@pytest.mark.parametrize("compiled", [False, True])
def test_transforms_that_attention_has_not(compiled: bool) -> None:
    """Refused, rather than derivatives that are 0 or lack a part."""
    torch._dynamo.reset()
    q, k = (x.detach() for x in qkv("cpu", 1, 5, 2, 8)[:2])
    transforms: dict[str, Any] = {
        "forward-mode": lambda q, k: torch.func.jvp(lambda q: one(q, k), (q,), (q,)),
        "double backward": torch.func.grad(lambda q, k: torch.func.grad(loss)(q, k).square().sum()),
    }
    for words, transform in transforms.items():
        run = torch.compile(transform, backend="aot_eager") if compiled else transform
        with pytest.raises(Exception, match=words):
            run(q, k)


@torch._disable_dynamo(recursive=False)  # type: ignore[untyped-decorator]
def left_uncompiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.strobe.attention_forward(
        q, k, v, None, None, None, None, None, None, 0.0, None, True, -1, -1, 0.0, False
    )[0]


def test_kernels_are_not_compiled_by_themselves() -> None:
    """Where a compiled function goes on uncompiled, the compiler takes up whatever is called from
    there. It has nothing to find in kernels, and says so with a warning.
    """
    torch._dynamo.reset()
    counters.clear()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend)  # type: ignore[untyped-decorator]
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return left_uncompiled(2 * q, k, v)

    tensors = qkv("cpu", 1, 5, 2, 16)
    step(*tensors).sum().backward()
    assert all(x.grad is not None for x in tensors)
    assert len(graphs) == 1
    assert ["left_uncompiled" in reason for reason in counters["graph_break"]] == [True]


def test_dispatch_modes_see_the_operator() -> None:
    seen = []

    class Watch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v = qkv("cpu", 1, 9, 2, 16, grad=False)
    with Watch():
        flash_attn_func(q, k, v)
    assert seen == ["strobe.attention_forward.default"]


def test_fake_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = qkv("cpu", 1, 9, 2, 16)
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
        assert (out.shape, lse.shape) == ((1, 9, 2, 16), (1, 2, 9))
        out.sum().backward()
        assert q.grad.shape == q.shape


# ------------------------------------------------------------------------------------- distributed

FSDP = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from strobe.flash_attn import flash_attn_qkvpacked_func

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, 4, 8))
        return x + self.out(flash_attn_qkvpacked_func(qkv, causal=True).flatten(2))

rank, path = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(Layer(), Layer())
alone = torch.nn.Sequential(Layer(), Layer())
alone.load_state_dict(model.state_dict())
batch = torch.randn(4, 11, 32)
alone(batch).square().mean().backward()
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
model(batch[2 * rank : 2 * rank + 2]).square().mean().backward()
for (name, p), wanted in zip(model.named_parameters(), alone.parameters()):
    torch.testing.assert_close(p.grad.full_tensor(), wanted.grad, msg=name)
dist.barrier()  # the other one may still be gathering
print("gradients agree", flush=True)
os._exit(0)  # the mesh keeps gloo's threads, which can abort as the interpreter ends
"""


def test_fsdp_of_two_processes(tmp_path: Path) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no fully_shard")
    commands = [
        [sys.executable, "-c", FSDP, str(rank), str(tmp_path / "rendezvous")] for rank in (0, 1)
    ]
    workers = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c in commands
    ]
    try:
        for worker in workers:
            output, _ = worker.communicate(timeout=600)
            # Not the exit status: PyTorch's own threads now and then end a process with "terminate
            # called without an active exception" while it shuts down, after all that is tested.
            assert "gradients agree" in output, output
    finally:
        for worker in workers:
            worker.kill()
