"""strobe.flash_attn against float64, and the promises of its interface."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strobe

from cases import DTYPES, Case, Inputs

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint  # noqa: E402

from strobe import flash_attn, flash_attn_3  # noqa: E402
from strobe.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)

from tensors import FUNCTIONS, Tensor, array, assert_same, seed_dropout, takes, tensor  # noqa: E402

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"options": {"causal": True}},
    "window": {"options": {"window": (9, 5)}},
    "window-causal": {"options": {"window": (11, 4), "causal": True}},
    "scale": {"options": {"scale": 0.31}},
    "softcap": {"options": {"softcap": 1.5, "causal": True}},
    "alibi": {"alibi": 1},
    "alibi-batch": {"alibi": 2, "options": {"causal": True, "scale": 0.2}},
    "dropout": {"options": {"dropout_p": 0.25}},
    "dropout-causal": {"alibi": 1, "options": {"dropout_p": 0.5, "causal": True}},
    "head-dim-odd": {"head_dim": 33, "head_dim_v": 33},
    "head-dim-1": {"head_dim": 1, "head_dim_v": 1},
    "head-dim-256": {"head_dim": 256, "head_dim_v": 256},
}


def check(
    inputs: Inputs, out: Tensor, lse: Tensor, gradients: list[Tensor] | tuple[()] = ()
) -> None:
    inputs.check_forward(array(out), array(lse))
    if gradients:
        inputs.check_backward(*(array(x) for x in gradients))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_against_float64(
    function: str, feature: str, dtype: str, device: str, rng: np.random.Generator
) -> None:
    f = FUNCTIONS[function]
    case = f.case(**FEATURES[feature])
    case.dtype, case.with_dlse = dtype, not f.packed
    inputs = case.make(rng)
    if not takes(inputs, device):
        pytest.skip("no kernel on this device")
    tensors, options = f.arguments(inputs, device)
    seed_dropout(inputs, device)
    leaves = [x.requires_grad_() for x in tensors]
    out, lse, _ = f.call(*leaves, **options, return_attn_probs=True)
    assert out.requires_grad
    dout = tensor(inputs.dout, device)
    if inputs.dlse is None:
        gradients = torch.autograd.grad(out, leaves, dout)
    else:
        gradients = torch.autograd.grad((out, lse), leaves, (dout, tensor(inputs.dlse, device)))
    check(inputs, out, lse, f.unpack(list(gradients)))

    # Without gradients the same bits come by the shorter way.
    torch.manual_seed(11)
    with torch.no_grad():
        assert torch.equal(f.call(*leaves, **options), out)


def test_signatures_are_the_official_ones() -> None:
    tail = (
        "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "alibi_slopes=None, deterministic=False, return_attn_probs=False"
    )
    lengths = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
    for name, wanted in {
        "flash_attn_func": f"q, k, v, {tail}",
        "flash_attn_qkvpacked_func": f"qkv, {tail}",
        "flash_attn_kvpacked_func": f"q, kv, {tail}",
        "flash_attn_varlen_func": f"q, k, v, {lengths}, {tail}, block_table=None",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {tail}",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {lengths}, {tail}",
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
            "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
            "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
        ),
    }.items():
        parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
        found = ", ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default!r}"
            for p in parameters
            if p.kind is p.POSITIONAL_OR_KEYWORD
        )
        assert found == wanted
        ours = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        assert ours == ["s_aux", "learnable_sink"]


# --------------------------------------------------------------------------------------- gradients


def qkv_of(device: str, *shape: int, grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Three tensors, in bfloat16 on a GPU."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=grad) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window_size": (3, 2), "softcap": 2.0},
        {"dropout_p": 0.3, "causal": True},
    ],
)
def test_finite_differences(options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    tensors = qkv_of("cpu", 2, 13, 2, 8)
    weight, weight_lse = torch.randn(2, 13, 2, 8), torch.randn(2, 2, 13)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        out, lse, _ = flash_attn_func(q, k, v, **options, return_attn_probs=True)
        return (out * weight).sum(dtype=torch.float64) + (lse * weight_lse).sum(dtype=torch.float64)

    gradients = torch.autograd.grad(loss(*tensors), tensors)
    for n, gradient in enumerate(gradients):
        for _ in range(4):
            step = 1e-2 * torch.nn.functional.normalize(torch.randn(2, 13, 2, 8).flatten(), dim=0)
            step = step.view(2, 13, 2, 8)
            ahead, behind = [*tensors], [*tensors]
            ahead[n], behind[n] = tensors[n].detach() + step, tensors[n].detach() - step
            measured = (loss(*ahead) - loss(*behind)).item()
            assert measured == pytest.approx(2 * (gradient * step).sum().item(), abs=3e-5, rel=2e-3)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_gradients_of_some_inputs_only(wanted: tuple[int, ...], device: str) -> None:
    torch.manual_seed(0)
    everything = qkv_of(device, 2, 17, 4, 16)
    dout = torch.randn_like(everything[0])
    all_gradients = torch.autograd.grad(flash_attn_func(*everything), everything, dout)
    some = [x.detach().requires_grad_(n in wanted) for n, x in enumerate(everything)]
    flash_attn_func(*some).backward(dout)
    for n, x in enumerate(some):
        if n in wanted:
            assert_same(x.grad, all_gradients[n])
        else:
            assert x.grad is None


def test_gradient_of_lse_alone(device: str) -> None:
    torch.manual_seed(0)
    q, k, v = qkv_of(device, 2, 17, 2, 16)
    lse = flash_attn_func(q, k, v, return_attn_probs=True)[1]
    lse.sum().backward()
    probabilities = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / 4, -1)
    expected = torch.einsum("bhqk,bkhd->bqhd", probabilities, k.float()) / 4
    torch.testing.assert_close(q.grad.float(), expected, rtol=2e-2, atol=2e-2)
    assert not v.grad.any()


@pytest.mark.parametrize("compiled", [False, True])
def test_double_backward_is_refused(compiled: bool) -> None:
    q, k, v = qkv_of("cpu", 1, 9, 2, 8)
    if compiled:  # the operator itself, which is what a compiler calls
        options = (None, None, None, None, None, None, 0.0, None, True, -1, -1, 0.0, False)
        out = torch.ops.strobe.attention_forward(q, k, v, *options)[0]
    else:
        out = flash_attn_func(q, k, v, causal=True)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(strobe.Unsupported, match="double backward"):
        dq.sum().backward()


def test_backward_twice_through_a_retained_graph(device: str) -> None:
    q, k, v = qkv_of(device, 1, 9, 2, 8)
    out = flash_attn_func(q, k, v)
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (q, k, v))
    for a, b in zip(first, second, strict=True):
        assert_same(a, b)


def test_parameters_and_modules(device: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.nn.Parameter(x.detach()) for x in qkv_of(device, 1, 9, 2, 8))
    out = flash_attn_func(q, k, v)
    assert type(out) is torch.Tensor
    out.sum().backward()
    plain = [x.detach().requires_grad_() for x in (q, k, v)]
    again = flash_attn_func(*plain)
    again.sum().backward()
    assert torch.equal(out, again)
    assert_same(q.grad, plain[0].grad)


# ----------------------------------------------------------------------------------------- layouts


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The values of x (batch, seqlen, heads, head_dim) with other strides."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype, device=x.device)
    wide[..., :-3] = x
    return {
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "rows apart": wide[..., :-3],
        "last not contiguous": x.transpose(1, 3).contiguous().transpose(1, 3),
        "every other row": x.repeat_interleave(2, 1)[:, ::2],
    }


@pytest.mark.parametrize("grad", [False, True])
def test_any_strides(grad: bool, device: str) -> None:
    torch.manual_seed(0)
    tensors = qkv_of(device, 2, 19, 3, 16, grad=False)
    dout = torch.randn_like(tensors[0])

    def both(tensors: Iterable[Tensor], dout: Tensor) -> list[Tensor]:
        q, k, v = (x.detach().requires_grad_(grad) for x in tensors)
        out = flash_attn_func(q, k, v, causal=True)
        assert out.is_contiguous()
        return [out, *(torch.autograd.grad(out, (q, k, v), dout) if grad else ())]

    wanted = both(tensors, dout)
    for name in layouts(dout):
        found = both([layouts(x)[name] for x in tensors], layouts(dout)[name])
        for a, b in zip(found, wanted, strict=True):
            assert_same(a, b)


def test_expanded_inputs_and_gradients(device: str) -> None:
    torch.manual_seed(0)
    q = qkv_of(device, 2, 9, 4, 16)[0]
    one = torch.randn(1, 9, 1, 16, dtype=q.dtype, device=device, requires_grad=True)
    kv = one.expand(2, 9, 4, 16)
    out = flash_attn_func(q, kv, kv)
    assert torch.equal(out, flash_attn_func(q, kv.contiguous(), kv.contiguous()))
    # the gradient of a sum is an expanded tensor with stride 0 everywhere
    out.sum().backward()
    copy = one.detach().clone().requires_grad_()
    full = copy.expand(2, 9, 4, 16).contiguous()
    flash_attn_func(q, full, full).backward(torch.ones_like(q))
    torch.testing.assert_close(one.grad, copy.grad)


def test_negated_and_conjugated_views() -> None:
    x = torch.randn(1, 9, 2, 16, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    assert torch.equal(flash_attn_func(x, x, x), flash_attn_func(*([x.resolve_neg()] * 3)))


# --------------------------------------------------------------------------------- empty and masked


def test_empty_lengths(device: str) -> None:
    no_keys = qkv_of(device, 2, 0, 2, 16)[0]
    q = qkv_of(device, 2, 5, 2, 16)[0]
    out, lse, _ = flash_attn_func(q, no_keys, no_keys, return_attn_probs=True)
    assert not out.any()
    assert (lse == -torch.inf).all()
    out.sum().backward()
    assert not q.grad.any()
    assert flash_attn_func(no_keys, q, q).shape == (2, 0, 2, 16)
    flash_attn_func(no_keys, q, q).sum().backward()
    assert not no_keys.grad.any()

    offsets = torch.zeros(4, dtype=torch.int32, device=device)
    nothing = no_keys[0]
    assert flash_attn_varlen_func(nothing, nothing, nothing, offsets, offsets, 0, 0).numel() == 0


def test_rows_that_see_nothing(device: str) -> None:
    q, k, v = qkv_of(device, 1, 7, 2, 16)
    out, lse, _ = flash_attn_func(q, k[:, :3], v[:, :3], causal=True, return_attn_probs=True)
    assert not out[:, :4].any()
    assert (lse[..., :4] == -torch.inf).all()
    assert lse[..., 4:].isfinite().all()


# ----------------------------------------------------------------------------------------- dropout


def seeded(seed: int, *tensors: Tensor, **options: Any) -> Any:
    torch.manual_seed(seed)
    return flash_attn_func(*tensors, **options)


def test_dropout_follows_manual_seed() -> None:
    q, k, v = qkv_of("cpu", 2, 33, 2, 16, grad=False)
    first = seeded(7, q, k, v, dropout_p=0.3)
    assert not torch.equal(first, flash_attn_func(q, k, v, dropout_p=0.3))  # the generator moved
    assert torch.equal(first, seeded(7, q, k, v, dropout_p=0.3))
    with torch.random.fork_rng():
        inside = flash_attn_func(q, k, v, dropout_p=0.3)
    assert torch.equal(inside, flash_attn_func(q, k, v, dropout_p=0.3))
    state = torch.get_rng_state()
    flash_attn_func(q, k, v)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn without dropout


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool, device: str) -> None:
    torch.manual_seed(0)
    q, k, v = qkv_of(device, 2, 33, 2, 16)
    p = 0.3 if device == "cpu" else 0.0

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q * 2, k, v, dropout_p=p, causal=True).sin()

    torch.manual_seed(1)
    out = block(q, k, v)
    wanted = torch.autograd.grad(out.sum(), (q, k, v))
    torch.manual_seed(1)
    again = checkpoint(block, q, k, v, use_reentrant=use_reentrant)
    again.sum().backward()
    assert torch.equal(out, again)
    for x, gradient in zip((q, k, v), wanted, strict=True):
        assert_same(x.grad, gradient)


# ------------------------------------------------------------------------------ modes and contexts


def test_inference_mode_and_no_grad(device: str) -> None:
    q, k, v = qkv_of(device, 2, 9, 2, 16)
    wanted = flash_attn_func(q, k, v)
    with torch.no_grad():
        out = flash_attn_func(q, k, v)
    assert not out.requires_grad
    assert torch.equal(out, wanted)
    with torch.inference_mode():
        out = flash_attn_func(q, k, v)
        assert out.is_inference()
        assert torch.equal(out, wanted)


def test_autocast(device: str) -> None:
    q, k, v = (x.float() for x in qkv_of(device, 2, 9, 2, 16))
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flash_attn_func(q, k.bfloat16(), v)
        assert out.dtype == torch.bfloat16
        with torch.no_grad():
            assert torch.equal(flash_attn_func(q, k, v), out)
    assert torch.equal(out, flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert [x.dtype for x in gradients] == [torch.float32] * 3


def test_deterministic_across_thread_counts() -> None:
    torch.manual_seed(0)
    q, k, v = qkv_of("cpu", 1, 300, 2, 64)
    threads = torch.get_num_threads()
    found = []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            out = flash_attn_func(q, k, v, causal=True, deterministic=True)
            found.append(torch.autograd.grad(out.sum(), (q, k, v)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _forward_and_backward(seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 1, 100 + seed, 2, 32, generator=generator).requires_grad_()
    out = flash_attn_func(x[0], x[1], x[2], causal=True)
    return [array(out), array(torch.autograd.grad(out.sum(), x)[0])]


def _same(a: list[Any], b: list[Any]) -> bool:
    return all(np.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(a, b, strict=True))


def test_threads() -> None:
    wanted = [_forward_and_backward(n) for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = list(pool.map(_forward_and_backward, range(8)))
            assert all(_same(a, b) for a, b in zip(found, wanted, strict=True))


FORK = """
import os, signal
# With a GPU, PyTorch's autograd refuses to go on in a forked process.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from test_flash_attn import _forward_and_backward, _same
wanted = _forward_and_backward(5)
child = os.fork()
if child == 0:
    signal.alarm(300)
    os._exit(7 if _same(_forward_and_backward(5), wanted) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert _same(_forward_and_backward(5), wanted)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fork() -> None:
    """Of a process that has PyTorch's threads and Strobe's, and none of other tests' (JAX's)."""
    result = subprocess.run(
        [sys.executable, "-c", FORK],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr


# --------------------------------------------------------------------------------- GPUs and streams


needs_cuda = pytest.mark.skipif(
    not (torch.cuda.is_available() and strobe.info().cuda_devices), reason="no GPU"
)


@needs_cuda
@pytest.mark.parametrize("grad", [False, True])
def test_cuda_graph(grad: bool) -> None:
    torch.manual_seed(0)
    q, k, v = qkv_of("cuda", 2, 65, 4, 64, grad=grad)
    dout = torch.randn_like(q)

    def step() -> list[Tensor]:
        out = flash_attn_func(q, k, v, causal=True)
        return [out, *(torch.autograd.grad(out, (q, k, v), dout) if grad else ())]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # plans, and whatever a first launch sets up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert_same(a, b)


@needs_cuda
def test_cuda_streams() -> None:
    torch.manual_seed(0)
    problems = [qkv_of("cuda", 2, 100 * (n + 1), 4, 64, grad=False) for n in range(4)]
    wanted = [flash_attn_func(*p) for p in problems]
    torch.cuda.synchronize()
    for _ in range(3):
        found = []
        for p in problems:
            with torch.cuda.stream(torch.cuda.Stream()):
                found.append(flash_attn_func(*p))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@needs_cuda
def test_cuda_memory_is_pytorchs() -> None:
    q, k, v = qkv_of("cuda", 1, 4096, 8, 64)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    dout = torch.randn_like(q)

    def peak(function: Callable[[], Tensor]) -> int:
        torch.autograd.grad(function(), (q, k, v), dout)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(function(), (q, k, v), dout)
        return int(torch.cuda.max_memory_allocated() - before)

    ours = peak(lambda: flash_attn_func(q, k, v, causal=True))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        theirs = peak(
            lambda: sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
        )
    assert ours >= 4 * q.numel() * 2  # out and gradients, at the least, are counted here
    assert ours <= theirs


# ----------------------------------------------------------------------------------------- refusals


X = torch.randn(2, 9, 4, 16)
OFFSETS = torch.tensor([0, 4, 9], dtype=torch.int32)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": X.double()}, "q.dtype = float64, expected float32, bfloat16 or float16"),
        ({"q": X.long()}, "q.dtype = int64, expected float32, bfloat16 or float16"),
        ({"k": X.half()}, "k.dtype = float16, expected float32 (that of q)"),
        ({"v": X.bfloat16()}, "v.dtype = bfloat16, expected float32 (that of q)"),
        ({"q": X.numpy()}, "q is of type ndarray, expected a torch.Tensor"),
        ({"v": None}, "v is of type NoneType, expected a torch.Tensor"),
        ({"q": X[0]}, "q.ndim = 3, expected 4: (batch, seqlen, heads, head_dim)"),
        ({"k": X[:1]}, "k.shape[0] = 1, expected 2"),
        ({"k": X[..., :8]}, "k.shape[3] = 8, expected 16"),
        ({"v": X[:, :5]}, "v.shape[1] = 5, expected 9"),
        ({"k": X[:, :, :3], "v": X[:, :, :3]}, "heads"),
        ({"dropout_p": 1.0}, "dropout_p = 1.0, expected a number in [0, 1)"),
        ({"dropout_p": -0.1}, "dropout_p = -0.1, expected a number in [0, 1)"),
        ({"dropout_p": "x"}, "dropout_p = 'x', expected a number"),
        ({"dropout_p": 0.1, "softcap": 3.0}, "softcap = 3.0 with dropout_p = 0.1"),
        ({"softcap": -1.0}, "softcap = -1"),
        ({"softmax_scale": float("nan")}, "softmax_scale = nan, expected a number"),
        ({"softmax_scale": "x"}, "softmax_scale = 'x', expected a number"),
        ({"softcap": torch.ones(2)}, "softcap = <Tensor of shape (2,)>, expected a number"),
        ({"window_size": 3}, "window_size = 3, expected a pair"),
        ({"window_size": (-2, 0.5)}, "window_size[1] = 0.5, expected an integer"),
        ({"window_size": (-2, 2**63)}, f"window_size[1] = {2**63}, expected an integer"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes.shape[0] = 3, expected 4"),
        (
            {"alibi_slopes": torch.ones(4).double()},
            "alibi_slopes.dtype = float64, expected float32",
        ),
        ({"alibi_slopes": torch.ones(2, 4, 1)}, "alibi_slopes.ndim = 3"),
    ],
)
def test_refusals(changes: dict[str, Any], text: str, grad: bool) -> None:
    arguments: dict[str, Any] = {"q": X, "k": X, "v": X, **changes}
    if grad:
        for name in "qkv":
            if isinstance(arguments[name], torch.Tensor) and arguments[name].is_floating_point():
                arguments[name] = arguments[name].detach().requires_grad_()
    with pytest.raises(strobe.InvalidArgument, match=re.escape(text)):
        flash_attn_func(**arguments)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": X}, "q.ndim = 4, expected 3: (total, heads, head_dim)"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q is of type NoneType, expected a torch.Tensor"),
        ({"cu_seqlens_k": None}, "cu_seqlens_k is of type NoneType, expected a torch.Tensor"),
        ({"cu_seqlens_q": OFFSETS.long()}, "cu_seqlens_q.dtype = int64, expected int32"),
        ({"cu_seqlens_k": OFFSETS[:2]}, "cu_seqlens_k.shape[0] = 2, expected 3"),
        ({"cu_seqlens_q": OFFSETS + 1}, "cu_seqlens_q"),
        ({"max_seqlen_q": "x"}, "max_seqlen_q = 'x', expected an integer"),
        ({"max_seqlen_k": torch.ones(2)}, "max_seqlen_k is a tensor of shape (2,)"),
        ({"max_seqlen_q": 2}, "seqlen_q"),
    ],
)
def test_refusals_of_packed_sequences(changes: dict[str, Any], text: str) -> None:
    arguments = {
        "q": X[0],
        "k": X[0],
        "v": X[0],
        "cu_seqlens_q": OFFSETS,
        "cu_seqlens_k": OFFSETS,
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    }
    with pytest.raises(strobe.InvalidArgument, match=re.escape(text)):
        flash_attn_varlen_func(**{**arguments, **changes})


def test_refusals_of_packed_tensors() -> None:
    qkv = torch.randn(2, 9, 3, 4, 16)
    for wrong, text in (
        (qkv[0], "qkv.ndim = 4, expected 5: (batch, seqlen, 3, heads, head_dim)"),
        (qkv[:, :, :2], "qkv.shape[2] = 2, expected 3"),
        (qkv.double(), "qkv, as q.dtype = float64, expected float32"),
    ):
        with pytest.raises(strobe.InvalidArgument, match=re.escape(text)):
            flash_attn_qkvpacked_func(wrong)
    with pytest.raises(strobe.InvalidArgument, match=re.escape("kv.shape[2] = 3, expected 2")):
        flash_attn_kvpacked_func(X, qkv)
    with pytest.raises(strobe.InvalidArgument, match=re.escape("kv, as k.dtype = float16")):
        flash_attn_kvpacked_func(X, qkv[:, :, :2].half())
    with pytest.raises(strobe.InvalidArgument, match=re.escape("cu_seqlens.dtype = int64")):
        flash_attn_varlen_qkvpacked_func(qkv[0], OFFSETS.long(), 5)


def test_an_old_pytorch_is_refused() -> None:
    program = (
        "import torch; del torch.library.register_autograd; torch.__version__ = '2.3.1'; "
        "import strobe.flash_attn"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "need PyTorch 2.4 or newer, found 2.3.1" in result.stderr


def test_devices_are_named(device: str) -> None:
    if device == "cpu":
        meta = X.to("meta")
        assert flash_attn_func(meta, meta, meta).shape == X.shape  # shapes only: that is meta
        return
    half = X.half()
    with pytest.raises(strobe.InvalidArgument, match="k is on cpu, expected cuda:0 as q"):
        flash_attn_func(half.cuda(), half, half.cuda())
    with pytest.raises(strobe.Unsupported, match="dtype = fp32, expected bf16 or fp16"):
        flash_attn_func(X.cuda(), X.cuda(), X.cuda())


@pytest.mark.parametrize("window", [(None, -1), (None, None), [3, None]])
def test_none_is_no_side_of_a_window(window: Any) -> None:
    """In flash_attn's functions: the extension takes it, for `strobe.attention`."""
    functions: Any = (
        (flash_attn_func, (X, X, X)),
        (flash_attn.flash_attn_with_kvcache, (X, X, X)),
        (flash_attn_3.flash_attn_with_kvcache, (X, X, X)),
    )
    for function, arguments in functions:
        with pytest.raises(strobe.InvalidArgument, match=r"^window_size\[[01]\] = None"):
            function(*arguments, window_size=window)


@pytest.mark.parametrize("window", [(-2, 3), (4, -7), (-5, -3), (-(2**62), 0), [-2, 3]])
@pytest.mark.parametrize("grad", [False, True])
def test_any_negative_side_of_a_window_is_no_limit(window: Any, grad: bool) -> None:
    """As in flash_attn, which looks at the sign alone."""
    same = (max(window[0], -1), max(window[1], -1))
    q = X.clone().requires_grad_(grad)
    found, wanted = (flash_attn_func(q, X, X, window_size=w) for w in (window, same))
    assert torch.equal(found, wanted)
    if grad:
        assert torch.equal(*(torch.autograd.grad(x.sum(), q)[0] for x in (found, wanted)))
    lengths = (OFFSETS, OFFSETS, 9, 9)
    functions: Any = (
        (flash_attn_varlen_func, (q[0], X[0], X[0], *lengths)),
        (flash_attn.flash_attn_with_kvcache, (q, X, X)),
        (flash_attn_3.flash_attn_func, (q, X, X)),
        (flash_attn_3.flash_attn_with_kvcache, (q, X, X)),
    )
    for function, arguments in functions:
        found, wanted = (function(*arguments, window_size=w) for w in (window, same))
        assert torch.equal(found, wanted)
    if isinstance(window, tuple):
        compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
        assert torch.equal(
            compiled(q, X, X, window_size=window), flash_attn_func(q, X, X, window_size=same)
        )


def test_lengths_may_be_tensors() -> None:
    longest = (OFFSETS[1:] - OFFSETS[:-1]).max()
    wanted = flash_attn_varlen_func(X[0], X[0], X[0], OFFSETS, OFFSETS, 5, 5)
    five: Any = np.int64(5)
    found = flash_attn_varlen_func(X[0], X[0], X[0], OFFSETS, OFFSETS, longest, five)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_a_learned_scale_is_read_at_each_call(name: str) -> None:
    value: Any = torch.tensor(0.5)
    for _ in range(2):
        found = flash_attn_func(X, X, X, **{name: value})
        assert torch.equal(found, flash_attn_func(X, X, X, **{name: value.item()}))
        value += 1


def test_more_than_flash_attn_has(rng: np.random.Generator) -> None:
    inputs = Case(head_dim=40, head_dim_v=7).make(rng)
    q, k, v = (tensor(x) for x in (inputs.q, inputs.k, inputs.v))
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert out.shape[-1] == 7
    check(inputs, out, lse)
