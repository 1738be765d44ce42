"""PyTorch tensors in and out. Skipped without PyTorch, which is no requirement."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import strobe

import cases
from cases import Case

torch = pytest.importorskip("torch")

DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


def tensor(array: Any) -> Any:
    """A tensor that shares the array's memory; bfloat16 by way of its bits."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array(x: Any) -> Any:
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy().view(cases.DTYPES["bfloat16"])
    return x.numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [
        Case(options={"causal": True, "dropout_p": 0.2, "dropout_seed": 3}, with_dlse=True),
        Case(batch=2, alibi=2, cu_q=[0, 11, 30], cu_k=[0, 20, 37], options={"window": (9, 9)}),
    ],
)
def test_same_bits_as_numpy(case: Case, dtype: str, rng: np.random.Generator) -> None:
    case.dtype = dtype
    inputs = case.make(rng)
    threads = torch.get_num_threads()
    out, lse = strobe.attention(
        inputs.q, inputs.k, inputs.v, return_lse=True, threads=threads, **inputs.options
    )
    grads = strobe.attention_backward(
        inputs.dout,
        inputs.q,
        inputs.k,
        inputs.v,
        out,
        lse,
        dlse=inputs.dlse,
        threads=threads,
        **inputs.options,
    )
    q, k, v = (tensor(x) for x in (inputs.q, inputs.k, inputs.v))
    options: dict[str, Any] = {
        name: tensor(value) if isinstance(value, np.ndarray) else value
        for name, value in inputs.options.items()
    }
    t_out, t_lse = strobe.attention(q, k, v, return_lse=True, **options)
    t_grads = strobe.attention_backward(
        tensor(inputs.dout),
        q,
        k,
        v,
        t_out,
        t_lse,
        dlse=None if inputs.dlse is None else tensor(inputs.dlse),
        **options,
    )
    for got, wanted in zip([t_out, t_lse, *t_grads], [out, lse, *grads], strict=True):
        assert type(got) is torch.Tensor
        assert got.device.type == "cpu"
        assert got.is_contiguous()
        assert not got.requires_grad
        assert np.array_equal(array(got), wanted)


def test_against_torchs_own() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 50, 4, 64, requires_grad=True) for _ in range(3))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    out, lse = strobe.attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(out, wanted.detach(), rtol=1e-4, atol=1e-5)
    dout = torch.randn_like(out)
    wanted.backward(dout)
    grads = strobe.attention_backward(dout, q, k, v, out, lse, causal=True)
    for got, x in zip(grads, (q, k, v), strict=True):
        torch.testing.assert_close(got, x.grad, rtol=1e-4, atol=1e-5)


def test_strides_outputs_and_subclasses() -> None:
    torch.manual_seed(1)
    qkv = torch.randn(2, 4, 3, 30, 16)  # (batch, heads, 3, seqlen, head_dim)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    wanted = strobe.attention(*(x.contiguous() for x in (q, k, v)))
    assert torch.equal(strobe.attention(q, k, v), wanted)
    out = torch.full((2, 4, 30, 16), float("nan")).transpose(1, 2)
    assert strobe.attention(q, k, v, out=out) is out
    assert torch.equal(out, wanted)
    result = strobe.attention(torch.nn.Parameter(q), k, v)
    assert type(result) is torch.Tensor
    assert torch.equal(result, wanted)
    # Expanded over heads: stride 0.
    one = torch.randn(2, 30, 1, 16).expand(2, 30, 4, 16)
    assert torch.equal(
        strobe.attention(q, one, one), strobe.attention(q, one.contiguous(), one.contiguous())
    )


def test_kinds_mix_and_q_decides() -> None:
    x = np.random.default_rng(0).standard_normal((1, 9, 2, 8), np.float32)
    wanted = strobe.attention(x, x, x)
    assert type(strobe.attention(x, torch.from_numpy(x), x)) is np.ndarray
    got = strobe.attention(torch.from_numpy(x), x, x)
    assert type(got) is torch.Tensor
    assert np.array_equal(got.numpy(), wanted)
    offsets = np.array([0, 4, 9], np.int32)
    packed = torch.from_numpy(x[0])
    strobe.attention(packed, packed, packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets)


def test_threads_follow_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 2048, 4, 64)
    saved = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            assert f"threads    {n}\n" in strobe.plan(x, x, x)
            strobe.attention(x, x, x)
    finally:
        torch.set_num_threads(saved)


def test_refusals() -> None:
    x = torch.randn(1, 9, 2, 8)

    def refuses(text: str, kind: type[Exception] = strobe.InvalidArgument, **changes: Any) -> None:
        with pytest.raises(kind, match=re.escape(text)):
            strobe.attention(**{"q": x, "k": x, "v": x, **changes})

    refuses("q.dtype = float64, expected float32, bfloat16 or float16", q=x.double())
    refuses("k.dtype = float16, expected float32 (that of q)", k=x.half())
    refuses(
        "v.stride(3) = 2 elements, expected 1 (last dimension contiguous): pass v.contiguous()",
        v=torch.randn(1, 9, 2, 8, 2)[..., 0],
    )
    refuses("q is on meta, expected a cpu or cuda tensor", strobe.Unsupported, q=x.to("meta"))
    refuses(
        "out requires grad, expected a tensor that autograd does not track",
        out=torch.empty_like(x, requires_grad=True),
    )
    with torch.no_grad():
        strobe.attention(x, x, x, out=torch.empty_like(x, requires_grad=True))
    refuses("alibi_slopes.dtype = float64, expected float32", alibi_slopes=torch.ones(2).double())
    refuses("scale = <ndarray of shape (2,)>, expected a number", scale=np.ones(2))
    if not torch.cuda.is_available():
        return
    refuses("k is on cpu, expected cuda:0 as q", q=x.cuda())


def test_an_option_that_is_a_tensor_is_read_at_each_call() -> None:
    x = torch.randn(1, 9, 2, 8)
    for name in ("scale", "softcap"):
        value: Any = torch.tensor(0.5)
        for _ in range(2):
            options: dict[str, Any] = {name: value.item()}
            wanted = strobe.attention(x, x, x, **options)
            assert torch.equal(strobe.attention(x, x, x, **{name: value}), wanted)
            value += 1


def test_gradients_in_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.randn(1, 9, 2, 8)
        out, lse = strobe.attention(x, x, x, return_lse=True)
        assert len(strobe.attention_backward(out, x, x, x, out, lse)) == 3


def test_torch_is_not_imported_for_numpy() -> None:
    program = (
        "import sys, numpy, strobe; x = numpy.ones((1, 2, 1, 8), 'f'); strobe.attention(x, x, x); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


def test_a_tensor_through_dlpack_is_a_tensor() -> None:
    class Foreign:
        def __init__(self, x: Any) -> None:
            self.x = x

        def __dlpack__(self, **asked: Any) -> Any:
            return self.x.__dlpack__(**asked)

        def __dlpack_device__(self) -> Any:
            return self.x.__dlpack_device__()

    x = torch.randn(1, 9, 2, 8, dtype=torch.bfloat16)
    out = strobe.attention(Foreign(x), Foreign(x), Foreign(x))
    assert out.dtype.name == "bfloat16"
    assert np.array_equal(out, array(strobe.attention(x, x, x)))


def test_a_call_within_fake_tensors_does_not_spoil_later_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(1, 11, 2, 8)
    with FakeTensorMode(allow_non_fake_inputs=True), suppress(Exception):
        strobe.attention(x, x, x, return_lse=True)
    out, lse = strobe.attention(x, x, x, return_lse=True)
    assert type(out) is type(lse) is torch.Tensor


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda() -> None:
    if not strobe.info().cuda_devices:
        pytest.skip("this build of Strobe has no CUDA kernels")
    q, k, v = (torch.randn(2, 65, 4, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    out, lse = strobe.attention(q, k, v, causal=True, return_lse=True)
    assert out.device == lse.device == q.device
    wanted = strobe.attention(*(x.cpu().float() for x in (q, k, v)), causal=True)
    torch.testing.assert_close(out.cpu().float(), wanted, rtol=2e-2, atol=2e-2)
    with torch.cuda.stream(torch.cuda.Stream()):
        again = strobe.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    assert torch.equal(again, out)
