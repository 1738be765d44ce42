"""Strobe in PyTorch's registry of flash attention implementations: the aten operators themselves.

On a GPU "STROBE" is activated. On the CPU, for which PyTorch has no kernels of these operators, the
same functions are registered for the CPU's dispatch key: autograd, the compiler and what else lies
above PyTorch's dispatcher meet them as on a GPU.
"""

from __future__ import annotations

import gc
import inspect
import mmap
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import strobe

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import strobe.torch  # noqa: E402
from strobe import _core, _flash_impl, _operators  # noqa: E402

from tensors import Tensor  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"),
    reason="this PyTorch has no registry of flash attention implementations (2.11 has)",
)

aten = torch.ops.aten


@pytest.fixture(params=["in C", "in Python"])
def served(
    request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[strobe.torch.ServedCalls]:
    """Strobe in the place of the operators' kernels for this device; its counts, from 0. In Python:
    as with a PyTorch that has no interface for kernels in C.
    """
    # A profiler of another test in this process may have left its callbacks, and with these the
    # kernels in C leave each call to Python.
    torch._C._autograd._clear_callbacks()
    if request.param == "in Python":
        monkeypatch.setattr(_core, "direct_kernel", lambda *arguments: None)
    counts = strobe.torch.register()
    counts.calls, counts.fallbacks = 0, {}
    if device == "cuda":
        torch.nn.attention.activate_flash_attention_impl("STROBE")
        yield counts
        torch.nn.attention.restore_flash_attention_impl()
        return
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _flash_impl._FOR_CUDA.items():
        if hasattr(aten, name):
            library.impl(name, kernel, "CPU")
    kernels = [_flash_impl.direct(name, "CPU") for name in _flash_impl._DIRECT]
    yield counts
    del kernels, library
    gc.collect()


@pytest.fixture
def gpu(device: str) -> None:
    """For what PyTorch gives to these operators on GPUs alone."""
    if device == "cpu":
        pytest.skip("on a GPU alone")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any]]:
    """In place of PyTorch's own kernels: what they were called with."""
    calls: list[tuple[str, Any, Any]] = []

    def stand_in(name: str) -> Callable[..., Any]:
        def kernel(*args: Any, **options: Any) -> Any:
            calls.append((name, args, options))
            return "PyTorch's"

        return kernel

    for name in _flash_impl._FOR_CUDA:
        monkeypatch.setitem(_flash_impl._pytorchs, name, stand_in(name))
    return calls


def random(device: str, *shape: int, grad: bool = False) -> Tensor:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return torch.randn(shape, dtype=dtype, device=device, requires_grad=grad)


def bound(device: str) -> dict[str, float]:
    return {"rtol": 1e-4, "atol": 1e-5} if device == "cpu" else {"rtol": 3e-2, "atol": 3e-2}


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    slopes: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention in float64 by its definition: (batch, heads, seqlen, head_dim), aligned at the
    bottom right.
    """
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    i = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2], device=q.device)[None]
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (i - j).abs()
    seen = j <= i if causal else torch.ones_like(i + j, dtype=torch.bool)
    if window[0] >= 0:
        seen = seen & (j >= i - window[0])
    if window[1] >= 0:
        seen = seen & (j <= i + window[1])
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    if keep is not None:
        weights = weights * keep / (1 - dropout_p)
    return weights @ v


def gradients(out: Tensor, leaves: Any, dout: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, leaves, dout.to(out.dtype)))


def assert_all_close(found: Any, wanted: Any, device: str) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, check_dtype=False, **bound(device))


# ---------------------------------------------------------------------------------------- registry


def test_import_makes_it_known_and_activates_nothing() -> None:
    assert "STROBE" in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_an_older_pytorch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    assert not _flash_impl._make_known("STROBE")
    with pytest.raises(strobe.Unsupported, match=r"2\.11 does.*sdpa_kernel"):
        strobe.torch.register()


@pytest.mark.parametrize(
    "kernels", [_flash_impl._FOR_CUDA, _flash_impl._FOR_CPU], ids=["for GPUs", "for CPUs"]
)
def test_functions_take_what_the_schemas_say(kernels: dict[str, Callable[..., Any]]) -> None:
    for name, kernel in kernels.items():
        if not hasattr(aten, name):
            assert "inplace" in name  # PyTorch 2.13 and newer
            continue
        arguments = getattr(aten, name).default._schema.arguments
        plain = [x for x in arguments if not x.kwarg_only]
        named = {x.name: x for x in arguments if x.kwarg_only}
        signature = inspect.signature(kernel)
        signature.bind(*plain, **named)
        with_default = [x for x in arguments if x.has_default_value()]
        left_out = signature.bind(*[x for x in plain if x not in with_default])
        left_out.apply_defaults()
        for x in with_default:
            if x.name in signature.parameters:
                assert left_out.arguments[x.name] == x.default_value, (name, x.name)
        parameters = signature.parameters.values()
        places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert places in ([], [x.name for x in plain]), name
        if any(p.kind is p.VAR_KEYWORD for p in parameters) and places:  # which go to `_attend`
            rest = set(named) - set(signature.parameters)
            assert rest <= set(inspect.signature(_flash_impl._attend).parameters)


class _Kernel:
    """What torch.library.get_kernel gives."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def call_boxed(self, keyset: Any, *args: Any, **options: Any) -> Any:
        self.log.append((self.name, keyset, args, options))
        return f"result of {self.name}"


@pytest.mark.parametrize("cudnn", [True, False])
def test_activation_takes_kernels_first_and_switches_cudnn_off(
    cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with a GPU, with PyTorch's registration replaced by a list of what it saw."""
    log: list[Any] = []
    monkeypatch.setattr(_flash_impl, "_pytorchs", {})

    class Library:
        def __init__(self, *_: Any) -> None: ...

        def impl(self, name: str, function: Any, key: str) -> None:
            log.append(("replaced", name, key))

    def get_kernel(name: str, key: str) -> _Kernel:
        log.append(("taken", name.removeprefix("aten::"), key))
        return _Kernel(name, log)

    before = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.library, "Library", Library)
    monkeypatch.setattr(torch.library, "get_kernel", get_kernel)
    try:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        torch.nn.attention.activate_flash_attention_impl("STROBE")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        names = [n for n in (*_flash_impl._FOR_CPU, *_flash_impl._FOR_CUDA) if hasattr(aten, n)]
        keys = ["CPU"] * 2 + ["CUDA"] * (len(names) - 2)
        wanted = []
        for name, key in zip(names, keys, strict=True):
            wanted += [("taken", name, key), ("replaced", name, key)]
        assert log == wanted
        log.clear()
        assert _flash_impl._pytorchs[names[-1]](1, scale=2) == f"result of aten::{names[-1]}"
        keyset = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        assert [(x[0], x[2], x[3]) for x in log] == [(f"aten::{names[-1]}", (1,), {"scale": 2})]
        assert log[0][1] == keyset
        torch.nn.attention.restore_flash_attention_impl()
        assert torch.backends.cuda.cudnn_sdp_enabled() is cudnn
    finally:
        if torch.nn.attention.current_flash_attention_impl() is not None:
            torch.nn.attention.restore_flash_attention_impl()
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_pytorch_without_these_kernels_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that a PyTorch does not have, and kernels that it was built without."""
    monkeypatch.setattr(_flash_impl, "_pytorchs", {})
    activation = _flash_impl._Activation(torch.library.Library("aten", "IMPL"), False)
    kernels = {"_no_such_operator": print, "_flash_attention_forward": print}
    _flash_impl.replace(activation, kernels, "CPU")
    assert activation.names == []
    assert not _flash_impl._pytorchs


# ----------------------------------------------------------------------------------- what they give


def laid_out(kind: str, device: str, heads: int, seqlen: int, head_dim: int) -> Tensor:
    """(2, heads, seqlen, head_dim), in some layout."""
    if kind == "as rows":
        return random(device, 2, seqlen, heads, head_dim).transpose(1, 2)
    if kind == "a part":
        whole = random(device, 2, seqlen, heads, 3 * head_dim)
        return whole[..., head_dim : 2 * head_dim].transpose(1, 2)
    if kind == "expanded":
        return random(device, 1, heads, seqlen, head_dim).expand(2, -1, -1, -1)
    return random(device, 2, heads, seqlen, head_dim)


def assert_as_foretold(
    found: Any, function: Callable[..., Any], *args: Any, **options: Any
) -> None:
    """Shapes, strides and dtypes are those of PyTorch's meta functions, which compiled code is made
    for.
    """
    with FakeTensorMode() as mode:

        def fake(x: Any) -> Any:
            return mode.from_tensor(x) if isinstance(x, torch.Tensor) else x

        wanted = function(*map(fake, args), **{n: fake(x) for n, x in options.items()})
    for a, b in zip(found, wanted, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b
            continue
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("kind", ["contiguous", "as rows", "a part", "expanded"])
def test_heads_first(kind: str, device: str, served: strobe.torch.ServedCalls) -> None:
    torch.manual_seed(0)
    q = laid_out(kind, device, 4, 21, 16).detach().requires_grad_()
    k, v = (laid_out(kind, device, 2, 17, 16).detach().requires_grad_() for _ in range(2))
    operator = aten._scaled_dot_product_flash_attention.default
    found = operator(q, k, v, 0.0, True, scale=0.3)
    assert_as_foretold(found, operator, q, k, v, 0.0, True, scale=0.3)
    assert strobe.why().startswith("served: PyTorch's flash attention was computed by")
    wanted = exact(q, k, v, causal=True, scale=0.3)
    dout = torch.randn_like(wanted)
    grads = gradients(found[0], (q, k, v), dout)
    assert_all_close([found[0], *grads], [wanted, *gradients(wanted, (q, k, v), dout)], device)
    assert (served.calls, served.fallbacks) == (1, {})
    # PyTorch's meta functions take seed and offset on the tensors' device.
    more = (*found[1:6], 0.0, True, *(x.to(device) for x in found[6:8]))
    backward = aten._scaled_dot_product_flash_attention_backward.default
    given = (torch.randn_like(q), *(x.detach() for x in (q, k, v, found[0])), *more)
    assert_as_foretold(backward(*given, scale=0.3), backward, *given, scale=0.3)


def packed(device: str, *, grad: bool = True) -> tuple[Any, ...]:
    """(q, k, v, cum_seq_q, cum_seq_k, max_q, max_k) of three sequences."""
    q = random(device, 46, 4, 16, grad=grad)
    k, v = (random(device, 60, 2, 16, grad=grad) for _ in range(2))
    numbers = {"dtype": torch.int32, "device": device}
    cum_q, cum_k = torch.tensor([0, 9, 9, 46], **numbers), torch.tensor([0, 20, 31, 60], **numbers)
    return q, k, v, cum_q, cum_k, 37, 29


def exact_packed(q: Tensor, k: Tensor, v: Tensor, cum_q: Any, cum_k: Any, **options: Any) -> Tensor:
    used = options.pop("used", None)
    parts = []
    for b in range(3):
        end = cum_k[b + 1] if used is None else cum_k[b] + used[b]
        rows = (q[cum_q[b] : cum_q[b + 1]], k[cum_k[b] : end], v[cum_k[b] : end])
        parts.append(exact(*(x.transpose(0, 1)[None] for x in rows), **options)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, (-1, -1), (7, 0), (5, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_packed(
    causal: bool, window: tuple[int, int] | None, device: str, served: strobe.torch.ServedCalls
) -> None:
    torch.manual_seed(0)
    given = packed(device)
    options: dict[str, Any] = {}
    if window is not None:
        options = {"window_size_left": window[0], "window_size_right": window[1]}
    operator = aten._flash_attention_forward.default
    found = operator(*given, 0.0, causal, False, **options)
    assert_as_foretold(found, operator, *given, 0.0, causal, False, **options)
    wanted = exact_packed(*given[:5], causal=causal, window=window or (-1, -1))
    dout = torch.randn_like(wanted)
    leaves = given[:3]
    grads = gradients(found[0], leaves, dout)
    assert_all_close([found[0], *grads], [wanted, *gradients(wanted, leaves, dout)], device)
    assert (served.calls, served.fallbacks) == (1, {})


def test_rows_first_without_lengths(device: str, served: strobe.torch.ServedCalls) -> None:
    """(batch, seqlen, heads, head_dim), no cumulative lengths."""
    q, k, v = (random(device, 2, n, 4, 16, grad=True) for n in (9, 17, 17))
    operator = aten._flash_attention_forward.default
    given = (q, k, v, None, None, 9, 17, 0.0, True, False)
    found = operator(*given)
    assert_as_foretold(found, operator, *given)
    wanted = exact(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    dout = torch.randn_like(wanted)
    grads = gradients(found[0], (q, k, v), dout)
    assert_all_close([found[0], *grads], [wanted, *gradients(wanted, (q, k, v), dout)], device)
    assert served.calls == 1


def test_lengths_in_use_and_slopes(device: str, served: strobe.torch.ServedCalls) -> None:
    given = packed(device, grad=False)
    used = torch.tensor([20, 5, 11], dtype=torch.int32, device=device)
    slopes = torch.rand(4, device=device)
    found = aten._flash_attention_forward(
        *given, 0.0, True, False, seqused_k=used, alibi_slopes=slopes
    )
    wanted = exact_packed(*given[:5], causal=True, used=used.tolist(), slopes=slopes)
    assert_all_close(found[:1], [wanted], device)
    assert (served.calls, served.fallbacks) == (1, {})


def has(argument: str) -> pytest.MarkDecorator:
    names = [x.name for x in aten._flash_attention_forward.default._schema.arguments]
    reason = f"{argument} came with a newer PyTorch"
    return pytest.mark.skipif(argument not in names, reason=reason)


@has("block_table")
@pytest.mark.parametrize("to_out", [False, True])
def test_pages(to_out: bool, device: str, served: strobe.torch.ServedCalls) -> None:
    q, _, _, cum_q, _, longest, _ = packed(device, grad=False)
    rows = 16 if device == "cpu" else 256
    keys, values = (random(device, 7, rows, 2, 16) for _ in range(2))
    table = torch.tensor([[3, 1], [6, 6], [5, 0]], dtype=torch.int32, device=device)
    used = torch.tensor([rows + 3, 4, 2 * rows - 1], dtype=torch.int32, device=device)
    given = (q, keys, values, cum_q, None, longest, 2 * rows, 0.0, True, False)
    options = {"seqused_k": used, "block_table": table}
    if to_out:
        out = torch.full_like(q, torch.nan)
        version = out._version
        name = "_flash_attention_forward_no_dropout_inplace"
        lse = getattr(aten, name)(out, *given, **options)
        assert out._version > version
    else:
        operator = aten._flash_attention_forward.default
        found = operator(*given, **options)
        assert_as_foretold(found, operator, *given, **options)
        out, lse = found[:2]
    assert lse.shape == (4, 46)
    k, v = (x[table.long()].flatten(1, 2).flatten(0, 1) for x in (keys, values))
    cum_k = [0, 2 * rows, 4 * rows, 6 * rows]
    wanted = exact_packed(q, k, v, cum_q, cum_k, causal=True, used=used.tolist())
    assert_all_close([out], [wanted], device)
    assert (served.calls, served.fallbacks) == (1, {})


@has("num_splits")
def test_one_split_is_batch_invariance(device: str, served: strobe.torch.ServedCalls) -> None:
    q, k, v, cum_q, cum_k, max_q, max_k = packed(device, grad=False)
    given = (q, k, v, cum_q, cum_k, max_q, max_k)
    both = aten._flash_attention_forward(*given, 0.0, False, False, num_splits=1)
    rows = (q[9:], k[31:], v[31:])
    alone = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (37, 29)]
    one = aten._flash_attention_forward(*rows, *alone, 37, 29, 0.0, False, False, num_splits=1)
    assert torch.equal(both[0][9:], one[0])
    assert served.calls == 2


def test_one_split_alone_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def forward(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        return (), "none"

    monkeypatch.setattr(_core, "aten_forward", forward)
    x = torch.zeros(1, 1, 1, 8)
    for num_splits in (None, 1, 4):
        options = {"num_splits": num_splits}
        _flash_impl._flash_forward(x, x, x, None, None, 1, 1, 0.0, False, False, **options)
    assert asked == [False, True, False]


def test_empty_and_tiny(device: str, served: strobe.torch.ServedCalls) -> None:
    """Whoever computes them: what PyTorch's kernels give."""
    q, k, v = (random(device, 1, 1, n, 8, grad=True) for n in (1, 1, 1))
    out = aten._scaled_dot_product_flash_attention(q, k, v)[0]
    assert torch.equal(out, v)
    assert [x.shape for x in gradients(out, (q, k, v), torch.ones_like(out))] == [q.shape] * 3
    assert served.calls == 1


# ------------------------------------------------------------------------------------------ dropout


def test_dropout_is_that_of_pytorchs_generator(
    device: str, served: strobe.torch.ServedCalls
) -> None:
    """The same seed, the same weights: those that `strobe.dropout_mask` shows, in the backward pass
    too.
    """
    torch.manual_seed(0)
    q, k, v = (random(device, 2, 4, n, 16, grad=True) for n in (21, 17, 17))
    torch.manual_seed(5)
    state = _operators.draw_dropout_state(device=q.device)
    seed, offset = _operators.seed_and_offset(state)
    torch.manual_seed(5)
    found = aten._scaled_dot_product_flash_attention(q, k, v, 0.3)
    assert found[6].device.type == "cpu"
    assert found[6].view(torch.int64).tolist() == state.tolist()
    again = aten._scaled_dot_product_flash_attention(q, k, v, 0.3)
    assert not torch.equal(found[0], again[0])
    torch.manual_seed(5)
    assert torch.equal(found[0], aten._scaled_dot_product_flash_attention(q, k, v, 0.3)[0])
    keep = strobe.dropout_mask(
        2, 4, 21, 17, dropout_p=0.3, dropout_seed=seed, dropout_offset=offset
    )
    wanted = exact(q, k, v, keep=torch.from_numpy(keep).to(device), dropout_p=0.3)
    dout = torch.randn_like(wanted)
    grads = gradients(found[0], (q, k, v), dout)
    assert_all_close([found[0], *grads], [wanted, *gradients(wanted, (q, k, v), dout)], device)
    assert (served.calls, served.fallbacks) == (3, {})


@pytest.mark.usefixtures("served")
def test_keys_in_parts(device: str) -> None:
    """As PyTorch's ring of devices has them: forward over one part of the keys after the other,
    merged; backward over the parts with out and logsumexp of all keys.
    """
    q, k, v, dout = (random(device, 2, 4, 96, 64) for _ in range(4))
    exact_inputs = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = exact(*exact_inputs)
    wanted_grads = torch.autograd.grad(wanted, exact_inputs, dout.double())
    parts = [(k[:, :, i : i + 48], v[:, :, i : i + 48]) for i in (0, 48)]
    for _ in range(3):  # calls that are known by then
        done = [aten._scaled_dot_product_flash_attention(q, *part, 0.0, False) for part in parts]
        lse = torch.logaddexp(done[0][1], done[1][1])
        shares = [(x[1] - lse).exp().unsqueeze(-1) for x in done]
        out = sum(x[0].float() * share for x, share in zip(done, shares, strict=True)).to(q.dtype)
        more = (*done[1][2:6], 0.0, False, *done[1][6:8])
        grads = [
            aten._scaled_dot_product_flash_attention_backward(dout, q, *part, out, lse, *more)
            for part in parts
        ]
        dq = grads[0][0].float() + grads[1][0].float()
        dk, dv = (torch.cat([grad[i] for grad in grads], 2) for i in (1, 2))
        assert_all_close([out, dq, dk, dv], [wanted, *wanted_grads], device)


@pytest.mark.usefixtures("served")
def test_dropout_of_packed_sequences(device: str) -> None:
    torch.manual_seed(0)
    given = packed(device)
    torch.manual_seed(5)
    out = aten._flash_attention_forward(*given, 0.3, True, False)[0]
    torch.manual_seed(5)
    options: dict[str, Any] = {"dropout_p": 0.3, "causal": True}
    wanted = strobe.flash_attn.flash_attn_varlen_func(*given, **options)
    dout = torch.randn_like(out)
    leaves = given[:3]
    assert_all_close(
        [out, *gradients(out, leaves, dout)], [wanted, *gradients(wanted, leaves, dout)], device
    )


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_drop_the_same_weights(reentrant: bool, device: str) -> None:
    q, k, v = (random(device, 2, 4, 33, 16, grad=True) for _ in range(3))

    def attend(*x: Tensor) -> Tensor:
        out: Tensor = aten._scaled_dot_product_flash_attention(*x, 0.3, True)[0]
        return out

    def all_of_it(function: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(5)
        out = function(q, k, v)
        for x in (q, k, v):
            x.grad = None
        out.float().square().sum().backward()
        return [out, q.grad, k.grad, v.grad]

    found = all_of_it(lambda *x: checkpoint(attend, *x, use_reentrant=reentrant))
    assert_all_close(found, all_of_it(attend), device)


# ----------------------------------------------------------------------------------- who declines


def declined(tensors: tuple[Tensor, ...], *plain: Any, **options: Any) -> Any:
    return _flash_impl._sdpa_forward(*tensors, *plain, **options)


def test_what_is_declined_goes_to_pytorchs_kernel(stub: list[Any]) -> None:
    """With its own arguments, counted once, and `strobe.why` says it."""
    counts = strobe.torch.register()
    counts.calls, counts.fallbacks = 0, {}
    q, k, v = (random("cpu", 2, 4, 9, 16) for _ in range(3))
    assert declined((q, k, v), 0.1, True, True, scale=0.5) == "PyTorch's"
    name, args, options = stub.pop()
    assert (name, options) == ("_scaled_dot_product_flash_attention", {"scale": 0.5})
    assert args == (q, k, v, 0.1, True, True)
    assert strobe.why() == (
        "declined: PyTorch's flash attention was left to PyTorch, because "
        "return_debug_mask is given"
    )
    for tensors, reason in (
        ((q, k, v[..., :8]), "Strobe refused it"),  # another head_dim
        ((q.double(), k.double(), v.double()), "float64"),
        ((q.transpose(2, 3).contiguous().transpose(2, 3), k, v), "Strobe refused it"),  # rows apart
        ((q[:0], k[:0], v[:0]), "there are no sequences"),
    ):
        assert declined(tensors) == "PyTorch's"
        assert stub.pop()[0] == "_scaled_dot_product_flash_attention"
        assert strobe.why().startswith("declined"), tensors
        assert reason in strobe.why()
    assert (counts.calls, sum(counts.fallbacks.values())) == (0, 5)
    lengths = (None, None, 9, 9)
    found = _flash_impl._flash_forward(q, k, v, *lengths, 0.0, False, True, scale=2.0)
    assert found == "PyTorch's"
    name, args, options = stub.pop()
    assert name == "_flash_attention_forward"
    assert args == (q, k, v, None, None, 9, 9, 0.0, False, True)
    assert options == {"scale": 2.0, "window_size_left": None, "window_size_right": None}
    out = torch.empty_like(q)
    _flash_impl._flash_forward_to(out, q, k, v, None, None, 9, 9, 0.5, False, False)
    name, args, _ = stub.pop()
    assert name == "_flash_attention_forward_no_dropout_inplace"
    assert args[0] is out


def test_the_backward_pass_follows_the_forward_pass(stub: list[Any]) -> None:
    """What PyTorch's kernel dropped, whose seed lies on the device, PyTorch's kernel must drop
    again, and that is told; without dropout either may compute it.
    """
    counts = strobe.torch.register()
    counts.calls, counts.fallbacks = 0, {}
    q, k, v = (random("cpu", 2, 4, 9, 16) for _ in range(3))
    out, lse, *_, seed, unused, _ = _flash_impl._sdpa_forward(q, k, v)
    numbers = torch.zeros(2, dtype=torch.int64)  # which could be read, after a wait
    elsewhere: Any = SimpleNamespace(device=torch.device("cuda"), view=lambda dtype: numbers)
    tensors = (out, q, k, v, out, lse)
    lengths = (None, None, 9, 9)
    dropped = (*tensors, *lengths, 0.1, False, elsewhere, unused)
    assert _flash_impl._sdpa_backward(*dropped) == "PyTorch's"
    assert stub.pop()[1] == dropped
    assert _flash_impl._flash_backward(*dropped) == "PyTorch's"
    assert stub.pop()[0] == "_flash_attention_backward"
    reason = "in a backward pass: the dropout of its forward pass is PyTorch's"
    assert counts.fallbacks == {reason: 2}
    assert strobe.why() == (
        f"declined: the gradient of PyTorch's flash attention was left to PyTorch, because {reason}"
    )
    found = _flash_impl._sdpa_backward(*tensors, *lengths, 0.0, False, elsewhere, unused)
    again = _flash_impl._sdpa_backward(*tensors, *lengths, 0.0, False, seed, unused)
    assert_all_close(found, again, "cpu")
    assert not stub


def test_pytorchs_kernel_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel for scaled_dot_product_attention calls _flash_attention_forward: one call, counted
    once, that ends.
    """
    counts = strobe.torch.register()
    counts.calls, counts.fallbacks = 0, {}
    q, k, v = (random("cpu", 2, 4, 9, 16) for _ in range(3))
    calls: list[str] = []

    def outer(q: Tensor, k: Tensor, v: Tensor, *plain: Any, **options: Any) -> Any:
        calls.append("outer")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _flash_impl._flash_forward(q, k, v, None, None, 9, 9, *plain, **options)

    def inner(*args: Any, **options: Any) -> str:
        calls.append("inner")
        return "PyTorch's"

    monkeypatch.setitem(_flash_impl._pytorchs, "_scaled_dot_product_flash_attention", outer)
    monkeypatch.setitem(_flash_impl._pytorchs, "_flash_attention_forward", inner)
    assert declined((q, k, v), 0.0, False, True) == "PyTorch's"
    assert calls == ["outer", "inner"]
    assert counts.fallbacks == {"return_debug_mask is given": 1}
    assert not _flash_impl._at_pytorchs.now


def test_errors_of_pytorchs_kernel_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise RuntimeError("its own words")

    monkeypatch.setitem(_flash_impl._pytorchs, "_scaled_dot_product_flash_attention", fails)
    x = random("cpu", 2, 4, 9, 16)
    with pytest.raises(RuntimeError, match="its own words"):
        declined((x, x, x[..., :8]))
    assert not _flash_impl._at_pytorchs.now


# ------------------------------------------------------------------- what lies above the dispatcher


def test_deterministic_algorithms(device: str, served: strobe.torch.ServedCalls) -> None:
    q, k, v = (random(device, 2, 4, 300, 64, grad=True) for _ in range(3))
    dout = torch.randn_like(q)

    def grads() -> list[Tensor]:
        return gradients(aten._scaled_dot_product_flash_attention(q, k, v)[0], (q, k, v), dout)

    torch.use_deterministic_algorithms(True)
    try:
        for a, b in zip(grads(), grads(), strict=True):
            assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)
    assert served.calls == 2


def test_deterministic_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time anew."""
    asked: list[Any] = []

    def backward(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        return ()

    monkeypatch.setattr(_core, "aten_backward", backward)
    x, lse, state = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1), torch.zeros(2)
    for wanted in (False, True, False):
        torch.use_deterministic_algorithms(wanted)
        try:
            given = (x, x, x, x, x, lse, None, None, 1, 1, 0.0, False, state, state)
            _flash_impl._sdpa_backward(*given)
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False, True, False]


def test_compiled(device: str, served: strobe.torch.ServedCalls) -> None:
    """Inductor asserts the strides of all results."""
    torch._dynamo.reset()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.unflatten(2, (4, 16)).transpose(1, 2) for x in (q, k, v))
        found = aten._scaled_dot_product_flash_attention(*rows, 0.0, True)[0]
        out: Tensor = found.transpose(1, 2).reshape(2, -1, 64).relu()
        return out

    compiled = torch.compile(function, fullgraph=True)
    for seqlen in (33, 17):
        q, k, v = (random(device, 2, seqlen, 64, grad=True) for _ in range(3))
        found, wanted = compiled(q, k, v), function(q, k, v)
        assert_all_close([found], [wanted], device)
        dout = torch.randn_like(wanted)
        assert_all_close(
            gradients(found, (q, k, v), dout), gradients(wanted, (q, k, v), dout), device
        )
    assert served.calls == 4


@pytest.mark.filterwarnings("ignore")
def test_varlen_attn(device: str, served: strobe.torch.ServedCalls) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="PyTorch 2.10 has it")
    q, k, v = (random(device, 46, 4, 16, grad=True) for _ in range(3))
    cum = torch.tensor([0, 9, 9, 46], dtype=torch.int32, device=device)
    names = inspect.signature(varlen.varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    out = varlen.varlen_attn(q, k, v, cum, cum, 37, 37, **causal)
    wanted = exact_packed(q, k, v, cum, cum, causal=True)
    dout = torch.randn_like(wanted)
    assert_all_close(
        [out, *gradients(out, (q, k, v), dout)],
        [wanted, *gradients(wanted, (q, k, v), dout)],
        device,
    )
    assert (served.calls, served.fallbacks) == (1, {})


@pytest.mark.usefixtures("served")
def test_autocast_vmap_and_inference_mode(device: str) -> None:
    x = random(device, 3, 2, 4, 9, 16)
    operator = aten._scaled_dot_product_flash_attention
    with torch.inference_mode():
        out = operator(x[0], x[0], x[0])[0]
    found = torch.vmap(lambda y: operator(y, y, y)[0])(x)
    assert_all_close([found[0]], [out], device)
    version = x._version
    operator(x[0], x[0], x[0])
    assert x._version == version


def test_threads(device: str, served: strobe.torch.ServedCalls) -> None:
    q = random(device, 2, 4, 9, 16, grad=True)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                out = aten._scaled_dot_product_flash_attention(q, q, q)[0]
                torch.autograd.grad(out.sum(), q)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    assert served.calls == 40


# ------------------------------------------------------------------------------- on a GPU alone


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("enable_gqa", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 100, 128, 256])
def test_sdpa_on_a_gpu(
    device: str, head_dim: int, enable_gqa: bool, served: strobe.torch.ServedCalls
) -> None:
    """scaled_dot_product_attention without a mask is Strobe's, cuDNN or not."""
    torch.manual_seed(0)
    q = random(device, 2, 4, 160, head_dim, grad=True)
    k, v = (random(device, 2, 2 if enable_gqa else 4, 160, head_dim, grad=True) for _ in range(2))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa)
    assert (served.calls, served.fallbacks) == (1, {})
    wanted = exact(q, k, v, causal=True)
    dout = torch.randn_like(wanted)
    assert_all_close(
        [out, *gradients(out, (q, k, v), dout)],
        [wanted, *gradients(wanted, (q, k, v), dout)],
        device,
    )
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.nn.attention.restore_flash_attention_impl()
    scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa)
    assert served.calls == 1
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.usefixtures("gpu")
def test_bottom_right_on_a_gpu(device: str, served: strobe.torch.ServedCalls) -> None:
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = (random(device, 2, 4, n, 64) for n in (9, 33, 33))
    out = scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(9, 33))
    assert served.calls == 1
    assert_all_close([out], [exact(q, k, v, causal=True)], device)


@pytest.mark.usefixtures("gpu")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["jagged", "strided"])
def test_nested_tensors_on_a_gpu(
    layout: str, device: str, served: strobe.torch.ServedCalls
) -> None:
    parts = [random(device, n, 4, 64) for n in (9, 33, 17)]
    layouts = {"jagged": torch.jagged, "strided": torch.strided}
    nested = torch.nested.nested_tensor(parts, layout=layouts[layout], requires_grad=True)
    heads_first = nested.transpose(1, 2)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(heads_first, heads_first, heads_first)
    assert served.calls == 1, served
    for found, part in zip(out.transpose(1, 2).unbind(), parts, strict=True):
        x = part.transpose(0, 1)[None]
        assert_all_close([found], [exact(x, x, x)[0].transpose(0, 1)], device)
    if layout == "jagged":
        out.values().float().square().sum().backward()
        assert nested.grad is not None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_on_a_gpu(
    mode: str, dropout_p: float, device: str, served: strobe.torch.ServedCalls
) -> None:
    """CUDA graphs as well: dropout that is captured is PyTorch's, forward and backward."""
    torch._dynamo.reset()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p).relu()

    compiled = torch.compile(function, mode=mode, fullgraph=True)
    q, k, v = (random(device, 2, 4, 128, 64, grad=True) for _ in range(3))
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        for x in (q, k, v):
            x.grad = None
        out = compiled(q, k, v)
        out.float().square().sum().backward()
        if dropout_p == 0:
            wanted = exact(q, k, v, causal=True).relu()
            assert_all_close([out], [wanted], device)
            grads = torch.autograd.grad(wanted.square().sum(), (q, k, v))
            for x, y in zip((q, k, v), grads, strict=True):
                torch.testing.assert_close(x.grad, y.to(x.dtype), rtol=5e-2, atol=1e-1)
        assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))
    assert served.calls > 0


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_captured_in_a_graph_on_a_gpu(
    dropout_p: float, device: str, served: strobe.torch.ServedCalls
) -> None:
    q, k, v = (random(device, 2, 4, 128, 64) for _ in range(3))
    scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p)
    assert results[6].is_cuda
    graph.replay()
    first = results[0].clone()
    graph.replay()
    if dropout_p == 0:
        assert_all_close([first], [exact(q, k, v)], device)
        assert served.fallbacks == {}
    else:
        assert not torch.equal(first, results[0])  # another mask at each replay
        assert sum(served.fallbacks.values()) == 1


@pytest.mark.usefixtures("gpu", "served")
def test_numeric_gradient_under_dropout_on_a_gpu(device: str) -> None:
    """The directional derivative of the forward pass, the mask held fast by the seed."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 64, dtype=torch.float16, device=device) for _ in range(3))
    direction = [torch.randn_like(x) for x in (q, k, v)]
    dout = torch.randn_like(q).double()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        return scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    def at(step: float) -> Any:
        moved = (x + step * d for x, d in zip((q, k, v), direction, strict=True))
        return (attend(*moved).double() * dout).sum()

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, dout.half())
    slope = sum((g.double() * d.double()).sum() for g, d in zip(grads, direction, strict=True))
    step = 2.0**-5
    torch.testing.assert_close(slope, (at(step) - at(-step)) / (2 * step), rtol=5e-2, atol=1.0)


@pytest.mark.usefixtures("gpu", "served")
def test_saved_tensors_may_go_to_the_cpu_on_a_gpu(device: str) -> None:
    """Whatever the operator returns has memory."""
    q, k, v = (random(device, 2, 4, 128, 64, grad=True) for _ in range(3))
    for dropout_p in (0.0, 0.2):
        with torch.autograd.graph.save_on_cpu():
            out = scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
        assert all(bool(x.isfinite().all()) for x in gradients(out, (q, k, v), out.detach()))


# --------------------------------------------------------------------------- kernels without Python


@pytest.fixture
def in_c(request: pytest.FixtureRequest, served: strobe.torch.ServedCalls) -> None:
    """Strobe in the operators' place by kernels in C."""
    if request.node.callspec.params["served"] != "in C":
        pytest.skip("of kernels in C")


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the functions have been called by which Python computes a call."""
    calls: list[str] = []

    def watch(name: str) -> None:
        function = getattr(_core, name)

        def watched(*arguments: Any) -> Any:
            calls.append(name)
            return function(*arguments)

        monkeypatch.setattr(_core, name, watched)

    watch("aten_forward")
    watch("aten_backward")
    return calls


def dense(device: str, *, grad: bool = False) -> list[Tensor]:
    return [random(device, 2, 4, n, 16, grad=grad) for n in (21, 17, 17)]


def sdpa(*args: Any, **options: Any) -> Any:
    return aten._scaled_dot_product_flash_attention(*args, **options)


@pytest.mark.usefixtures("in_c")
def test_a_known_call_runs_no_python(
    device: str, by_python: list[str], served: strobe.torch.ServedCalls
) -> None:
    """Forward and backward, dense and packed; with results like the first call's."""
    _core.forget()
    q, k, v = dense(device, grad=True)
    dout = torch.randn_like(q)
    *tensors, cum_q, cum_k, max_q, max_k = packed(device)

    def both() -> list[Any]:
        found = sdpa(q, k, v, 0.0, True, scale=0.3)
        plain = (cum_q, cum_k, max_q, max_k, 0.0, True, False)
        rows = aten._flash_attention_forward(*tensors, *plain)
        grads = gradients(rows[0], tensors, torch.ones_like(rows[0]))
        return [*found, *rows, *gradients(found[0], (q, k, v), dout), *grads]

    first = both()
    assert by_python == ["aten_forward"] * 2 + ["aten_backward"] * 2
    again = both()
    assert len(by_python) == 4
    assert served.calls == 4
    for a, b in zip(first, again, strict=True):
        if not isinstance(a, torch.Tensor):
            assert a == b
            continue
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
        if a.dtype != torch.uint64:  # of which nobody reads the numbers
            assert torch.equal(a, b)
    out = sdpa(q, k, v, 0.0, True, scale=0.3)[0]
    assert strobe.why().startswith("served: PyTorch's flash attention was computed by")
    gradients(out, (q, k, v), dout)
    assert strobe.why().startswith("served: the gradient of PyTorch's flash attention was computed")
    assert len(by_python) == 4


def test_a_pytorch_with_another_interface_has_pythons_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the functions, or with values that come in another way."""
    assert _flash_impl.speaks_c()
    asked = _flash_impl.speaks_c.__wrapped__
    monkeypatch.setattr(_flash_impl, "_FRAGMENT", SimpleNamespace(define=lambda schema: None))
    assert asked()
    probe = torch.ops.strobe.aten_probe
    for add, other in ((1, False), (0, True)):

        def differs(x: Tensor, *rest: Any, add: int = add, other: bool = other) -> Any:
            y, found = probe(x, *rest)
            return y.clone() if other else y, found + add

        monkeypatch.setattr(torch.ops.strobe, "aten_probe", differs)
        assert not asked()

    def refuses(*arguments: Any) -> Any:
        raise RuntimeError("Not yet supported conversion")

    monkeypatch.setattr(torch.ops.strobe, "aten_probe", refuses)
    assert not asked()
    monkeypatch.undo()
    monkeypatch.setattr(_flash_impl, "_FRAGMENT", SimpleNamespace(define=lambda schema: None))
    monkeypatch.setattr(_core, "direct_probe", lambda: None)
    assert not asked()
    monkeypatch.setattr(_flash_impl, "speaks_c", lambda: False)
    for name in _flash_impl._DIRECT:
        assert _flash_impl.direct(name, "CPU") is None


@pytest.mark.usefixtures("in_c")
def test_memory_below_four_gibibytes_is_memory(device: str, by_python: list[str]) -> None:
    """Where a Python that is not position-independent has its heap, as Debian's."""
    if device != "cpu" or platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("of the CPU, with a flag of Linux on x86-64 for memory below 2 GiB")
    low = mmap.mmap(-1, 3 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40)  # MAP_32BIT
    tensors = []
    for i, given in enumerate(dense(device)):
        tensor = torch.frombuffer(low, dtype=given.dtype, count=given.numel(), offset=i << 16)
        tensors.append(tensor.view(given.shape).copy_(given))
    assert all(0 < tensor.data_ptr() < 1 << 32 for tensor in tensors)
    _core.forget()
    first = sdpa(*tensors)[0]
    assert torch.equal(sdpa(*tensors)[0], first)
    assert by_python == ["aten_forward"]


@pytest.mark.usefixtures("in_c")
def test_another_call_is_another(device: str, by_python: list[str]) -> None:
    """Whatever a plan depends on, a call that differs in it alone is not computed by that plan."""
    _core.forget()
    q, k, v, *lengths = packed(device, grad=False)
    padded = torch.cat((q, q), 2)[:, :, :16]
    narrow = {"window_size_left": 3, "window_size_right": 0}
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q, k, v, *lengths, 0.0, False, False), {}),
        ((q, k, v, *lengths, 0.0, True, False), {}),
        ((q, k, v, *lengths, 0.0, True, False), {"scale": 0.3}),
        ((q, k, v, *lengths, 0.0, True, False), narrow),
        ((q, k, v, *lengths, 0.0, True, False), {"window_size_left": 3}),
        ((padded, k, v, *lengths, 0.0, True, False), {}),
        ((q[:, :2], k, v, *lengths, 0.0, True, False), {}),
        ((q, k, v, *lengths[:2], 64, 29, 0.0, True, False), {}),
        ((q, k, v, *lengths, 0.0, True, False), {"alibi_slopes": torch.rand(4, device=device)}),
        ((q[None], k[None], v[None], None, None, 46, 60, 0.0, True, False), {}),
    ]
    first = [aten._flash_attention_forward(*a, **o) for a, o in calls]
    assert len(by_python) == len(calls)
    for wanted, (args, options) in zip(first, calls, strict=True):
        found = aten._flash_attention_forward(*args, **options)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
    assert len(by_python) == len(calls)


@pytest.mark.usefixtures("in_c")
def test_what_is_known_is_forgotten_and_each_threads_own(
    device: str, by_python: list[str]
) -> None:
    q, k, v = dense(device)
    _core.forget()
    for _ in range(2):
        sdpa(q, k, v)
    assert len(by_python) == 1
    _core.forget()
    sdpa(q, k, v)
    assert len(by_python) == 2
    worker = threading.Thread(target=lambda: [sdpa(q, k, v) for _ in range(3)])
    worker.start()
    worker.join()
    # A new thread has no context of CUDA before its first call, which therefore is not remembered.
    assert len(by_python) == (4 if device == "cuda" else 3)


@pytest.mark.usefixtures("in_c")
def test_settings_of_pytorch_are_asked_each_time(device: str, by_python: list[str]) -> None:
    """Deterministic algorithms, the number of threads, and whether a profiler is on."""
    _core.forget()
    q, k, v = dense(device, grad=True)

    def both() -> None:
        gradients(sdpa(q, k, v)[0], (q, k, v), q)

    for wanted in (False, True, False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            both()
        finally:
            torch.use_deterministic_algorithms(False)
    assert by_python.count("aten_forward") == 1
    assert by_python.count("aten_backward") == 2
    by_python.clear()
    with torch.profiler.profile() as found:
        sdpa(q, k, v)
    assert by_python == ["aten_forward"]
    assert [e.name for e in found.events() if e.name.startswith("strobe::forward [")]
    if device == "cpu":
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            sdpa(q, k, v)
        finally:
            torch.set_num_threads(threads)
        assert by_python == ["aten_forward"] * 2


@pytest.mark.usefixtures("in_c")
def test_what_was_copied_or_drawn_is_pythons_each_time(device: str, by_python: list[str]) -> None:
    q, k, v = dense(device, grad=True)
    for _ in range(2):
        out = sdpa(q, k, v)[0]
        wide = torch.randn_like(out).transpose(2, 3).contiguous().transpose(2, 3)
        wanted = gradients(sdpa(q, k, v)[0], (q, k, v), wide.contiguous())
        by_python.clear()
        assert_all_close(gradients(out, (q, k, v), wide), wanted, device)
        assert by_python == ["aten_backward"]
        by_python.clear()
        sdpa(q, k, v, 0.2)
        assert by_python == ["aten_forward"]


@pytest.mark.usefixtures("in_c")
def test_a_tensor_without_memory(device: str, stub: list[Any]) -> None:
    """Known or not, it is Python that finds the words."""
    q, k, v = dense(device)
    for _ in range(2):
        sdpa(q, k, v)
    for freed in (q.clone(), torch.stack((q, q))[1]):  # the address of the other is an offset
        freed.untyped_storage().resize_(0)
        del stub[:]
        with pytest.raises(RuntimeError):  # what stands in for PyTorch's kernel gives no tensors
            sdpa(freed, k, v)
        assert [x[0] for x in stub] == ["_scaled_dot_product_flash_attention"]
        assert strobe.why().startswith("declined")


class _Own(Exception):
    pass


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("error", [_Own("its words"), torch.OutOfMemoryError("CUDA out of memory")])
@pytest.mark.parametrize("backward", [False, True])
def test_exceptions_pass_kernels_in_c(
    backward: bool, error: Exception, device: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Of the same class, and nothing is printed."""

    def fails(*arguments: Any) -> Any:
        raise error

    q, k, v = dense(device, grad=True)
    out = sdpa(q, k, v)[0]
    _core.forget()
    monkeypatch.setattr(_core, "aten_backward" if backward else "aten_forward", fails)
    with pytest.raises(type(error), match=str(error)):
        gradients(out, (q, k, v), out) if backward else sdpa(q, k, v)
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("in_c")
def test_an_interrupt_passes_kernels_in_c(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    q, k, v = dense(device)
    _core.forget()
    monkeypatch.setattr(_core, "aten_forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sdpa(q, k, v)


@pytest.mark.usefixtures("served")
def test_a_mode_sees_pytorchs_operator_alone(device: str) -> None:
    """In the first call as in the next ones."""
    seen: list[str] = []

    class Log(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    _core.forget()
    q, k, v = dense(device)
    with Log():
        for _ in range(2):
            sdpa(q, k, v)
    assert seen == ["aten::_scaled_dot_product_flash_attention"] * 2


@pytest.mark.usefixtures("in_c")
def test_inference_mode_and_gradients_in_turns(device: str, by_python: list[str]) -> None:
    """What all calls get is no tensor of inference mode, also where the first call was in it."""
    _core.forget()
    q, k, v = dense(device, grad=True)
    with torch.inference_mode():
        assert sdpa(q, k, v)[0].is_inference()
    found = sdpa(q, k, v)
    assert len(by_python) == 1
    assert not any(x.is_inference() for x in found if isinstance(x, torch.Tensor))
    gradients(found[0], (q, k, v), q)


def test_a_call_on_its_way_to_pytorch_outlives_the_activation() -> None:
    # Another thread gives the operators back between the moment at which a call was declined and
    # that at which PyTorch's own kernel is asked for.
    torch.nn.attention.activate_flash_attention_impl("STROBE")
    torch.nn.attention.restore_flash_attention_impl()
    gc.collect()
    q, k, v = (random("cpu", 1, 2, 5, 8) for _ in range(3))
    name = "_scaled_dot_product_flash_attention_for_cpu"
    declined = _flash_impl._Declined("a test's reason")
    out = _flash_impl._by_pytorch(name, declined, q, k, v, 0.0, True)[0]
    assert_all_close([out], [scaled_dot_product_attention(q, k, v, is_causal=True)], "cpu")
