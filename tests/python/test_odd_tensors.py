"""PyTorch's tensors that are none to read: refused by name, or right, and never the process's end.

What ended the process runs in one of its own.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import strobe  # noqa: E402
from strobe.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

ODD = """
import sys, torch, strobe
from strobe.flash_attn import flash_attn_func
from odd import TENSORS
q, k, v = (torch.randn(2, 5, 4, 16) for _ in range(3))
kinds = ["nested", "jagged", "coo", "mkldnn", "freed", "freed slice", "fake", "fake slice"]
for kind in kinds:
    for function in (flash_attn_func, strobe.attention):
        for first, second, third in ((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
            print(kind, function, first, second, third, flush=True)
            for _ in range(3):
                flash_attn_func(q, k, v)  # repeats: the short way is open
            x = TENSORS[kind](None, q)
            try:
                function(x if first else q, x if second else k, x if third else v)
            except strobe.InvalidArgument as error:
                assert str(error)[0] in ("q" if first else "k" if second else "v"), error
            else:
                assert kind in ("fake", "fake slice") and function is flash_attn_func
            if kind.startswith("fake"):
                break  # PyTorch itself refuses them beside others
"""


# The functions beneath flash_attn's, where PyTorch's own kernels read and write as well.
LOWER = """
import inspect, re, sys, torch, strobe
import shim
sys.path.insert(0, str(shim.SOURCE))
from flash_attn import flash_attn_interface as interface
from odd import TENSORS
gpu = interface.flash_attn_gpu
kinds = ["freed", "freed slice", "fake", "wrapper", "functional", "uninitialised", "meta", "list"]
q, k, v, dout = torch.randn(4, 2, 5, 4, 16)
flat = {x: y.flatten(0, 1) for x, y in (("q", q), ("k", k), ("v", v), ("dout", dout))}
offsets = torch.tensor([0, 5, 10], dtype=torch.int32)
lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 5, "max_seqlen_k": 5}
pages = {"k": k, "v": v, "block_table": torch.zeros(2, 1, dtype=torch.int32)}
number = {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": True, "softcap": 0.0}
number |= {"window_size_left": -1, "window_size_right": -1}
dense = {"q": q, "k": k, "v": v, "dout": dout}
def complete(function, given):
    # What is demanded besides, and what forward gave.
    rows = given["q"]
    axes = (4, 10) if rows.ndim == 3 else (2, 4, 5)
    given = {"out": torch.empty_like(rows), "softmax_lse": torch.zeros(axes), **number, **given}
    given |= {f"d{x}": torch.full_like(given[x], 7.0) for x in "qkv"}
    given |= {"k_cache": k, "v_cache": v, "num_splits": 0}
    given["alibi_slopes"] = torch.ones(4)
    given["rng_state"] = torch.tensor([3, 4]) if given["dropout_p"] else None
    demanded = inspect.signature(function).parameters
    if "k_cache" in demanded:
        given |= {"k": None, "v": None, "cache_seqlens": torch.ones_like(offsets[1:])}
    return {x: given.get(x, False if "bool" in str(p.annotation) else None)
            for x, p in demanded.items()}
calls = [(interface._flash_attn_forward, dense), (interface._flash_attn_backward, dense),
         (interface._flash_attn_varlen_forward, flat | lengths),
         (interface._flash_attn_varlen_backward, flat | lengths),
         (gpu.fwd, dense), (gpu.bwd, dense), (gpu.bwd, dense | {"dropout_p": 0.5}),
         (gpu.varlen_fwd, flat | lengths), (gpu.varlen_fwd, flat | lengths | pages),
         (gpu.varlen_bwd, flat | lengths), (gpu.fwd_kvcache, dense)]
for function, given in calls:
    right = complete(function, given)
    function(**right)
    for name, value in right.items():
        x = value if isinstance(value, torch.Tensor) else torch.ones(1)
        unread = ["zero_tensors", "num_splits"]
        if "block_table" in given:
            unread += ["max_seqlen_k", "return_softmax"]
        if value is None or name in unread:
            continue
        for kind in kinds:
            odd = TENSORS[kind](None, x)
            print(function.__name__, name, kind, flush=True)
            targets = [y for x, y in right.items() if x in ("dq", "dk", "dv") and x != name]
            for target in targets:
                target.fill_(7.0)
            try:
                function(**right | {name: odd})
            except strobe.Error as error:
                assert re.search(rf"\\b{name}\\b", str(error)), error
                assert all((y == 7.0).all() for y in targets), "written"
            else:
                assert kind in ("meta", "list") or (x is not value and kind == "functional")
"""


@pytest.mark.parametrize("program", [ODD, LOWER])
def test_the_process_lives(program: str) -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=__file__.rpartition("/")[0],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, f"{found.stdout.splitlines()[-1:]}\n{found.stderr[-2000:]}"


class Unmultiplied(torch.Tensor):  # type: ignore[misc,name-defined]
    """Has memory, and shares it through DLPack, but has no operators."""

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return NotImplemented


@pytest.mark.skipif(importlib.util.find_spec("flit_core") is None, reason="no flit_core")
@pytest.mark.parametrize("name", ["out", "dout"])
def test_softmax_d_names_what_has_no_operators(flash_attn: Any, name: str) -> None:
    gpu = flash_attn.flash_attn_interface.flash_attn_gpu
    q, k, v = inputs()
    number = (0.0, 0.3, False, -1, -1, 0.0)
    out, lse, _, _ = gpu.fwd(q, k, v, None, None, *number, False)
    given = {"dout": q, "q": q, "k": k, "v": v, "out": out}
    odd = torch.Tensor._make_subclass(Unmultiplied, given[name])
    with pytest.raises(strobe.InvalidArgument, match=rf"^{name} \(Unmultiplied\) cannot be read"):
        gpu.bwd(*(given | {name: odd}).values(), lse, *[None] * 4, *number, False)


def inputs() -> list[Any]:
    return [torch.randn(2, 5, 4, 16) for _ in range(3)]


def refuses(function: Callable[..., Any], text: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(strobe.InvalidArgument, match="^" + re.escape(text)):
        function(*arguments, **options)


def test_the_negative_bit() -> None:
    q, k, v = inputs()
    strobe.attention(q, k, v)  # its plan is known
    negative = torch._neg_view(q)
    imaginary = torch.complex(q, -q).conj().imag
    refuses(strobe.attention, "q has its negative bit set", negative, k, v)
    refuses(strobe.attention, "v has its negative bit set", q, k, torch._neg_view(v))
    refuses(strobe.attention, "k has its negative bit set", q.numpy(), torch._neg_view(k), v)
    refuses(strobe.attention, "q has its negative bit set", imaginary, k, v)
    refuses(strobe.attention, "out has its negative bit set", q, k, v, out=torch._neg_view(q))
    refuses(strobe.attention, "q.dtype = complex64", torch.complex(q, q).conj(), k, v)
    out, lse = strobe.attention(q, k, v, return_lse=True)
    backward = strobe.attention_backward
    refuses(backward, "dout has its negative bit set", torch._neg_view(out), q, k, v, out, lse)
    slopes = torch.rand(4)
    refuses(
        strobe.attention,
        "alibi_slopes has its negative bit set",
        q,
        k,
        v,
        alibi_slopes=torch._neg_view(slopes),
    )
    # flash_attn_func goes by PyTorch's dispatcher, which resolves it.
    for _ in range(3):
        wanted = flash_attn_func(-q, k, v)
    assert torch.equal(flash_attn_func(negative, k, v), wanted)
    assert torch.equal(flash_attn_func(imaginary, k, v), flash_attn_func(q, k, v))


def test_packed_tensors_and_cumulative_lengths() -> None:
    q, k, v = inputs()
    kv = torch.stack([k, v], 2)
    kv.untyped_storage().resize_(0)
    refuses(flash_attn_kvpacked_func, "kv is a tensor whose storage was freed", q, kv)
    nested = torch.nested.nested_tensor([torch.randn(5, 2, 4, 16), torch.randn(3, 2, 4, 16)])
    refuses(flash_attn_kvpacked_func, "kv is a nested tensor", q, nested)
    qkv, lengths = torch.randn(5, 3, 4, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    varlen = flash_attn_varlen_qkvpacked_func
    refuses(varlen, "max_seqlen = 'x', expected an integer", qkv, lengths, "x")
    text = "cu_seqlens: sequence 1 has length 3, expected at most max_seqlen = 2"
    refuses(varlen, text, qkv, lengths, 2)


@pytest.mark.parametrize("gradient", [False, True])
def test_names_are_those_of_flash_attn(gradient: bool) -> None:
    q, k, v = (x.requires_grad_(gradient) for x in inputs())
    slopes = np.ones(4, np.float32)
    refuses(flash_attn_func, "alibi_slopes is of type ndarray", q, k, v, alibi_slopes=slopes)
    refuses(flash_attn_func, "window_size[0] = 0.5, expected an", q, k, v, window_size=(0.5, 0))
    refuses(flash_attn_func, "softmax_scale = <int of", q, k, v, softmax_scale=10**400)
    refuses(flash_attn_func, "softmax_scale = inf", q, k, v, softmax_scale=float("inf"))
    for option in ("dropout_p", "causal", "return_attn_probs"):
        refuses(flash_attn_func, f"{option} = <Tensor of", q, k, v, **{option: torch.ones(2, 3, 4)})
    text = "q.shape[2] (heads) = 5, expected a multiple of k.shape[2] (heads_kv) = 4"
    refuses(flash_attn_func, text, torch.randn(2, 7, 5, 16), k, v)


def test_a_tensor_without_memory_as_an_option() -> None:
    # PyTorch's repr of one reads at address 0.
    q, k, v = inputs()
    scale = torch.tensor(1.0)
    scale.untyped_storage().resize_(0)
    refuses(strobe.attention, "scale = <Tensor of shape ()>", q, k, v, scale=scale)
    refuses(flash_attn_func, "softmax_scale = <Tensor of", q, k, v, softmax_scale=scale)


def test_strides_are_called_as_pytorch_calls_them() -> None:
    q, k, v = inputs()
    out = torch.randn(5, 4, 16).expand(2, 5, 4, 16)
    refuses(strobe.attention, "out.stride(0) = 0 elements, expected at least", q, k, v, out=out)
    strided = torch.randn(2, 5, 4, 32)[..., ::2]
    refuses(strobe.attention, "k.stride(3) = 2 elements, expected 1", q, strided, v)


@pytest.mark.parametrize("name", ["causal", "deterministic", "return_attn_probs"])
@pytest.mark.parametrize("gradient", [False, True])
def test_flags_of_flash_attn(name: str, gradient: bool) -> None:
    q, k, v = (x.requires_grad_(gradient) for x in inputs())
    value: Any
    function: Any = flash_attn_func
    for value in ("False", 2, 0.0, None, [], torch.tensor(2), torch.ones(2, dtype=torch.bool)):
        refuses(flash_attn_func, f"{name} = ", q, k, v, **{name: value})
    for value in (1, np.True_, torch.tensor(True), torch.tensor(1)):
        found, wanted = (function(q, k, v, **{name: x}) for x in (value, True))
        assert type(found) is type(wanted)
        if name == "causal":
            assert torch.equal(found, wanted)


def test_a_bool_is_no_number_of_flash_attn() -> None:
    q, k, v = inputs()
    refuses(flash_attn_func, "softmax_scale = True, expected a number", q, k, v, 0.0, True)
    refuses(flash_attn_func, "dropout_p = True, expected a number", q, k, v, True)
    refuses(flash_attn_func, "window_size[0] = True", q, k, v, window_size=(True, False))
