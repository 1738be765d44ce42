"""scaled_dot_product_attention served by Strobe: context manager, PyTorch's registry, reasons."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import strobe

import oracle
from cases import DTYPES, Case

torch = pytest.importorskip("torch")

from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import strobe.torch  # noqa: E402

from tensors import Tensor, array, takes, tensor  # noqa: E402

HAS_REGISTRY = hasattr(torch.nn.attention, "register_flash_attention_impl")


def heads_first(device: str, *shape: int, grad: bool = False) -> Tensor:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return torch.randn(shape, dtype=dtype, device=device, requires_grad=grad)


@pytest.fixture
def activated() -> Iterator[strobe.torch.ServedCalls]:
    """Strobe as PyTorch's flash attention implementation; its counts, which begin with 0."""
    if not HAS_REGISTRY:
        pytest.skip("this PyTorch has no register_flash_attention_impl")
    served = strobe.torch.register()
    served.calls, served.fallbacks = 0, {}
    torch.nn.attention.activate_flash_attention_impl("STROBE")
    yield served
    torch.nn.attention.restore_flash_attention_impl()


def check(
    attention: Callable[..., Tensor], dtype: str, device: str, causal: bool, rng: Any
) -> None:
    """Output and gradients of `attention` against float64."""
    case = Case(seqlen_q=45, seqlen_k=45, heads_kv=4, dtype=dtype, options={"causal": causal})
    inputs = case.make(rng)
    if not takes(inputs, device):
        pytest.skip("no kernel on this device")
    leaves = [
        tensor(x, device).transpose(1, 2).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)
    ]
    out = attention(*leaves, is_causal=causal)
    dout = tensor(inputs.dout, device).transpose(1, 2)
    gradients = torch.autograd.grad(out, leaves, dout)
    wanted, plain = inputs.reference(), inputs.draws()
    found = [array(x.transpose(1, 2)) for x in (out, *gradients)]
    for name, x in zip(("out", "dq", "dk", "dv"), found, strict=True):
        factor = oracle.OUT_FACTOR if name == "out" else oracle.GRADIENT_FACTOR
        oracle.check(name, x, getattr(wanted, name), plain, factor)


# --------------------------------------------------------------------------------- context manager


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_context_manager(dtype: str, causal: bool, device: str, rng: np.random.Generator) -> None:
    with strobe.torch.sdpa_kernel() as served:
        check(scaled_dot_product_attention, dtype, device, causal, rng)
    assert (served.calls, served.fallbacks) == (1, {})


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "options"),
    [
        (9, 9, {}),
        (9, 17, {"is_causal": True}),  # aligned top left, unlike flash_attn's causal
        (17, 9, {"is_causal": True}),
        (5, 9, {"scale": 0.7}),
        (5, 9, {"attn_mask": causal_lower_right(5, 9)}),
        (9, 9, {"attn_mask": causal_upper_left(9, 9)}),
    ],
)
def test_masks_and_lengths(seqlen_q: int, seqlen_k: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q, k, v = (heads_first("cpu", 2, 4, n, 16, grad=True) for n in (seqlen_q, seqlen_k, seqlen_k))
    wanted = scaled_dot_product_attention(q, k, v, **options)
    with strobe.torch.sdpa_kernel() as served:
        out = scaled_dot_product_attention(q, k, v, **options)
    assert served.calls == 1
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), dout),
        torch.autograd.grad(wanted, (q, k, v), dout),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_grouped_heads(device: str) -> None:
    if "enable_gqa" not in str(scaled_dot_product_attention.__doc__):
        pytest.skip("this PyTorch has no enable_gqa")
    q, kv = heads_first(device, 2, 4, 9, 16), heads_first(device, 2, 2, 9, 16)
    with strobe.torch.sdpa_kernel() as served:
        out = scaled_dot_product_attention(q, kv, kv, enable_gqa=True)
    assert served.calls == 1
    wanted = scaled_dot_product_attention(q, *[kv.repeat_interleave(2, 1)] * 2)
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2)
    with strobe.torch.sdpa_kernel(), pytest.raises(RuntimeError):
        scaled_dot_product_attention(q, kv, kv)  # PyTorch's own refusal


def test_fallbacks_give_their_reason() -> None:
    q = heads_first("cpu", 2, 4, 9, 16)
    wide = heads_first("cpu", 1, 1, 4, 300)
    hidden = torch.full((9, 9), torch.finfo(torch.float32).min)
    calls: list[tuple[Any, dict[str, Any], str]] = [
        ((q, q, q), {"attn_mask": hidden}, "of a query with a finite number: a Tensor (9, 9)"),
        ((q[0], q[0], q[0]), {}, "not (batch, heads, seqlen, head_dim): query (4, 9, 16)"),
        ((q.double(),) * 3, {}, "no kernels for this dtype on cpu: query (2, 4, 9, 16)"),
        ((wide,) * 3, {}, "head_dim is above 256: query (1, 1, 4, 300)"),
    ]
    for arguments, options, reason in calls:
        wanted = scaled_dot_product_attention(*arguments, **options)
        with strobe.torch.sdpa_kernel() as served:
            assert torch.equal(scaled_dot_product_attention(*arguments, **options), wanted)
        assert served.calls == 0
        (kind,) = served.fallbacks
        given = strobe.torch.why(*arguments, **options)
        assert reason in given
        assert given.startswith(kind)
        assert strobe.why().endswith(given)
        assert strobe.why().startswith("declined: scaled_dot_product_attention was left to PyTorch")
    assert strobe.torch.why(q, q, q) == ""
    assert "heads" in strobe.torch.why(q, q[:, :2], q[:, :2])
    assert "dtype" in strobe.torch.why(q, q.half(), q)


def test_other_functions_and_other_threads_are_left_alone() -> None:
    q = heads_first("cpu", 2, 4, 9, 16)
    with strobe.torch.sdpa_kernel() as served, ThreadPoolExecutor(1) as pool:
        pool.submit(scaled_dot_product_attention, q, q, q).result()
        torch.softmax(q, -1)
        assert served.calls == 0
        scaled_dot_product_attention(q, q, q)
    scaled_dot_product_attention(q, q, q)
    assert served.calls == 1


def operators_of(function: Callable[[], Any]) -> set[str]:
    with torch.profiler.profile() as profile:
        function()
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("inside", [False, True])
def test_under_compile(inside: bool) -> None:
    if inside and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        pytest.skip("this PyTorch cannot compile a TorchFunctionMode")
    torch._dynamo.reset()
    q = heads_first("cpu", 2, 4, 9, 16)

    def call(q: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, q, q, is_causal=True)

    def call_inside(q: Tensor) -> Tensor:
        with strobe.torch.sdpa_kernel():
            return call(q)

    compiled = torch.compile(call_inside if inside else call, fullgraph=True, backend="aot_eager")

    def run() -> Tensor:
        if inside:
            return compiled(q)
        with strobe.torch.sdpa_kernel():
            return compiled(q)

    torch.testing.assert_close(run(), call(q), rtol=1e-5, atol=1e-5)
    assert "strobe::scaled_dot_product_attention" in operators_of(run)
    assert "strobe::scaled_dot_product_attention" not in operators_of(lambda: call(q))


# ------------------------------------------------------------------------------- PyTorch's registry


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_registered(dtype: str, causal: bool, device: str, rng: np.random.Generator) -> None:
    def flash(*arguments: Tensor, **options: Any) -> Tensor:
        backend = torch.nn.attention.SDPBackend.FLASH_ATTENTION
        with torch.nn.attention.sdpa_kernel(backend):
            return scaled_dot_product_attention(*arguments, **options)

    check(flash, dtype, device, causal, rng)


@pytest.mark.usefixtures("activated")
def test_registered_is_strobe_and_restored(device: str) -> None:
    assert torch.nn.attention.current_flash_attention_impl() == "STROBE"
    torch.manual_seed(0)
    q, k, v = (heads_first(device, 2, 4, 64, 32) for _ in range(3))
    own = strobe.attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    assert torch.equal(scaled_dot_product_attention(q, k, v, is_causal=True), own)

    mask = torch.zeros(64, 64, dtype=q.dtype, device=device)
    mask[0, 3] = 0.5
    masked = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if device == "cpu":  # on CUDA devices PyTorch does not choose flash attention for this
        assert "attn_mask adds other numbers" in strobe.why()
    torch.nn.attention.restore_flash_attention_impl()
    torch.testing.assert_close(
        masked, scaled_dot_product_attention(q, k, v, attn_mask=mask), rtol=1e-2, atol=1e-2
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said when it is activated again
        torch.nn.attention.activate_flash_attention_impl("STROBE")


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("mask", ["fewer queries", "padding", "float", "empty rows", "learned"])
def test_registered_masks_and_gradients(mask: str) -> None:
    torch.manual_seed(0)
    q, k, v = (heads_first("cpu", 2, 4, n, 16, grad=True) for n in (9, 17, 17))
    options: dict[str, Any] = {"is_causal": True}
    if mask != "fewer queries":
        seen = torch.arange(17)[None] < torch.tensor([[17], [11]])
        seen = seen[:, None, None].expand(2, 1, 9, 17).clone()
        seen[1, :, 7:] &= mask != "empty rows"
        added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        options = {"attn_mask": added if mask in ("float", "learned") else seen}
        if mask == "learned":  # PyTorch's own, of which its flash kernel is not asked
            options["attn_mask"] = torch.randn(9, 17)

    def both() -> Any:
        out = scaled_dot_product_attention(q, k, v, **options)
        return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out) / out.numel())]

    found = both()
    assert strobe.why().startswith("declined" if mask == "learned" else "served")
    torch.nn.attention.restore_flash_attention_impl()
    for a, b in zip(found, both(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.nn.attention.activate_flash_attention_impl("STROBE")


@pytest.mark.usefixtures("activated")
def test_registered_under_inductor(device: str) -> None:
    """Strides are what PyTorch's meta functions say, or the compiled code would refuse them."""
    torch._dynamo.reset()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = (heads_first(device, 2, 4, 33, 16, grad=True) for _ in range(3))
    compiled = torch.compile(function, fullgraph=True)
    dout = torch.randn_like(q)
    found, wanted = compiled(q, k, v), function(q, k, v)
    assert torch.equal(found, wanted)
    for a, b in zip(
        torch.autograd.grad(found, (q, k, v), dout),
        torch.autograd.grad(wanted, (q, k, v), dout),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_registered_calls_are_counted(activated: strobe.torch.ServedCalls) -> None:
    """Of all threads, and each once: neither in the backward pass again nor those of a block."""
    q = heads_first("cpu", 2, 4, 9, 16, grad=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: scaled_dot_product_attention(q, q, q).sum().backward(), range(6)))
    assert (activated.calls, activated.fallbacks) == (6, {})
    scaled_dot_product_attention(q, q, q, attn_mask=torch.randn(9, 9))
    assert list(activated.fallbacks.values()) == [1]
    with strobe.torch.sdpa_kernel() as served:
        scaled_dot_product_attention(q, q, q)
    assert (served.calls, activated.calls) == (1, 6)
    assert strobe.torch.register() is activated


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_encoders_fast_path_stays_when_registered(
    activated: strobe.torch.ServedCalls,
) -> None:
    """A block is a TorchFunctionMode, any of which switches it off."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.rand(2, 9, 32), torch.arange(9) >= torch.tensor([9, 5])[:, None]
    with torch.no_grad():
        wanted = encoder(x, src_key_padding_mask=padding)
        assert activated.calls == 0
        with strobe.torch.sdpa_kernel() as served:
            found = encoder(x, src_key_padding_mask=padding)
    assert (served.calls, served.fallbacks) == (2, {})
    torch.testing.assert_close(found[~padding], wanted[~padding], rtol=1e-4, atol=1e-5)
    assert not wanted[padding].any()
    assert found[padding].any()
    encoder.train()(x, src_key_padding_mask=padding).sum().backward()
    assert (activated.calls, activated.fallbacks) == (2, {})


@pytest.mark.skipif(HAS_REGISTRY, reason="this PyTorch has the registry")
def test_older_pytorch_says_so() -> None:
    with pytest.raises(strobe.Unsupported, match="sdpa_kernel"):
        strobe.torch.register()


def test_encoder_layer_of_pytorch() -> None:
    """nn.MultiheadAttention reaches scaled_dot_product_attention by itself."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 9, 32)
    wanted = layer(x)
    with strobe.torch.sdpa_kernel() as served:
        out = layer(x)
    assert served.calls == 1
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
