"""Bad calls: each message names the argument, what was got and what was wanted, and nothing is
written.
"""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest

import strobe

import cases
from cases import Case, arrays, packed

F = np.float32


def read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


def misaligned(shape: tuple[int, ...], dtype: Any = F) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.zeros(size + 1, np.uint8)[1:].view(dtype).reshape(shape)


BIG = 2**63
INVALID: list[tuple[str, dict[str, Any], str]] = [
    ("list", arrays(q=[1.0]), "q is of type list, expected a NumPy array, a PyTorch tensor or"),
    ("none", arrays(k=None), "k = None, expected an array"),
    ("none-v", arrays(v=None), "v = None, expected an array"),
    ("masked", arrays(v=np.ma.ones((2, 10, 2, 8))), "v is a numpy.ma.MaskedArray"),
    ("scalar", arrays(q=np.float32(1)), "q is of type float32, expected"),
    (
        "ndim",
        arrays(q=np.ones((6, 4, 8), F)),
        "q.ndim = 3, expected 4: (batch, seqlen_q, heads, head_dim)",
    ),
    ("ndim-0", arrays(k=np.array(1, F)), "k.ndim = 0, expected 4"),
    (
        "float64",
        arrays(q=np.ones((2, 6, 4, 8))),
        "q.dtype = float64, expected float32, bfloat16 or float16",
    ),
    ("int", arrays(q=np.ones((2, 6, 4, 8), int)), "q.dtype = int64, expected float32"),
    (
        "two-dtypes",
        arrays(k=np.ones((2, 10, 2, 8), np.float16)),
        "k.dtype = float16, expected float32 (that of q)",
    ),
    (
        "byte-order",
        arrays(q=np.ones((2, 6, 4, 8), ">f4")),
        "q.dtype = >f4, expected this machine's byte order",
    ),
    ("batch", arrays(k=np.ones((3, 10, 2, 8), F)), "k.shape[0] = 3, expected 2 (batch of q)"),
    ("batch-v", arrays(v=np.ones((1, 10, 2, 8), F)), "v.shape[0] = 1, expected 2 (batch of k)"),
    ("seqlen", arrays(v=np.ones((2, 9, 2, 8), F)), "v.shape[1] = 9, expected 10 (seqlen_k of k)"),
    ("heads-v", arrays(v=np.ones((2, 10, 4, 8), F)), "v.shape[2] = 4, expected 2 (heads_kv of k)"),
    ("head-dim", arrays(k=np.ones((2, 10, 2, 9), F)), "k.shape[3] = 9, expected 8 (head_dim of q)"),
    (
        "heads",
        arrays(q=np.ones((2, 6, 5, 8), F)),
        "q.shape[2] (heads) = 5, expected a multiple of k.shape[2] (heads_kv) = 2",
    ),
    (
        "no-heads",
        {n: np.ones((1, 3, 0, 8), F) for n in "qkv"},
        "q.shape[2] (heads) = 0, expected 1 to",
    ),
    (
        "no-heads-kv",
        arrays(k=np.ones((2, 10, 0, 8), F), v=np.ones((2, 10, 0, 8), F)),
        "k.shape[2] = 0, expected at least 1 (heads_kv)",
    ),
    (
        "no-head-dim-v",
        arrays(v=np.ones((2, 10, 2, 0), F)),
        "v.shape[3] = 0, expected 1 to 256 (head_dim_v)",
    ),
    (
        "wide",
        {n: np.ones((1, 3, 1, 257), F) for n in "qkv"},
        "q.shape[3] (head_dim) = 257, expected 1 to 256",
    ),
    (
        "wide-v",
        arrays(v=np.ones((2, 10, 2, 300), F)),
        "v.shape[3] (head_dim_v) = 300, expected 1 to 256",
    ),
    (
        "last-stride",
        arrays(k=np.ones((2, 10, 2, 16), F)[..., ::2]),
        (
            "k.strides[3] = 2 elements, expected 1 (last dimension contiguous): "
            "pass numpy.ascontiguousarray(k)"
        ),
    ),
    (
        "last-stride-negative",
        arrays(q=np.ones((2, 6, 4, 8), F)[..., ::-1]),
        "q.strides[3] = -1 elements, expected 1 (last dimension contiguous)",
    ),
    (
        "broadcast",
        arrays(v=np.broadcast_to(np.ones(1, F), (2, 10, 2, 8))),
        "v.strides[3] = 0 elements, expected 1 (last dimension contiguous)",
    ),
    (
        "byte-strides",
        arrays(q=np.lib.stride_tricks.as_strided(np.ones(999, F), (2, 6, 4, 8), (769, 128, 32, 4))),
        "q.strides[0] = 769 bytes, expected a multiple of the item size 4",
    ),
    ("misaligned", arrays(q=misaligned((2, 6, 4, 8))), "q = 0x"),
    (
        "misaligned-16",
        {n: misaligned((2, 6, 4, 8), np.float16) for n in "qkv"},
        "expected alignment to 2 bytes",
    ),
    # options
    (
        "window",
        arrays(window=3),
        "window = 3, expected a pair (left, right) of integers, -1 or None for no limit",
    ),
    ("window-three", arrays(window=(1, 2, 3)), "window = (1, 2, 3), expected a pair"),
    ("window-low", arrays(window=(-2, 0)), "window[0] = -2, expected -1 (no limit) or more"),
    ("window-float", arrays(window=(1.5, 0)), "window[0] = 1.5, expected an integer"),
    ("window-big", arrays(window=(0, BIG)), f"window[1] = {BIG}, expected an integer of 64 bits"),
    ("scale", arrays(scale="x"), "scale = 'x', expected a number"),
    ("scale-nan", arrays(scale=float("nan")), "scale = nan, expected a number"),
    ("scale-inf", arrays(scale=float("inf")), "scale = inf, expected a finite number"),
    ("scale-big", arrays(scale=1e300), "scale = inf, expected a finite number"),
    ("scale-array", arrays(scale=np.ones(2)), "scale = <ndarray of shape (2,)>, expected a number"),
    ("softcap", arrays(softcap=-1.0), "softcap = -1, expected 0 (off) or a positive"),
    ("softcap-nan", arrays(softcap=float("nan")), "softcap = nan, expected a number"),
    ("dropout", arrays(dropout_p=1.0), "dropout_p = 1, expected at least 0 and below 1"),
    (
        "dropout-negative",
        arrays(dropout_p=-0.1),
        "dropout_p = -0.1, expected at least 0 and below 1",
    ),
    (
        "seed",
        arrays(dropout_p=0.1, dropout_seed=-1),
        "dropout_seed = -1, expected an integer from 0 to 2**64 - 1",
    ),
    (
        "offset",
        arrays(dropout_p=0.1, dropout_offset=2**64),
        "dropout_offset = 18446744073709551616, expected",
    ),
    (
        "seed-float",
        arrays(dropout_p=0.1, dropout_seed=0.5),
        "dropout_seed = 0.5, expected an integer",
    ),
    ("threads", arrays(threads=-1), "threads = -1, expected 0 to 65536"),
    ("threads-big", arrays(threads=2**31), "threads = 2147483648, expected an integer of 32 bits"),
    ("threads-float", arrays(threads=1.5), "threads = 1.5, expected an integer"),
    # ALiBi
    (
        "alibi-list",
        arrays(alibi_slopes=[1.0]),
        "alibi_slopes is of type list, expected a NumPy array",
    ),
    (
        "alibi-dtype",
        arrays(alibi_slopes=np.ones(4)),
        "alibi_slopes.dtype = float64, expected float32",
    ),
    (
        "alibi-heads",
        arrays(alibi_slopes=np.ones(2, F)),
        "alibi_slopes.shape[0] = 2, expected 4 (heads of q)",
    ),
    (
        "alibi-batch",
        arrays(alibi_slopes=np.ones((4, 4), F)),
        "alibi_slopes.shape[0] = 4, expected 2 (batch of q)",
    ),
    (
        "alibi-ndim",
        arrays(alibi_slopes=np.ones((1, 2, 4), F)),
        "alibi_slopes.ndim = 3, expected 1: (heads) or 2",
    ),
    (
        "alibi-strides",
        arrays(alibi_slopes=np.ones(8, F)[::2]),
        (
            "alibi_slopes.strides[0] = 2 elements, expected 1 (contiguous): "
            "pass numpy.ascontiguousarray(alibi_slopes)"
        ),
    ),
    # out
    ("out-list", arrays(out=[1]), "out is of type list, expected"),
    (
        "out-shape",
        arrays(out=np.ones((2, 6, 4, 9), F)),
        "out.shape[3] = 9, expected 8 (head_dim_v of q and v)",
    ),
    (
        "out-ndim",
        arrays(out=np.ones((6, 4, 8), F)),
        "out.ndim = 3, expected 4: (batch, seqlen_q, heads, head_dim_v)",
    ),
    (
        "out-dtype",
        arrays(out=np.ones((2, 6, 4, 8), np.float16)),
        "out.dtype = float16, expected float32 (that of q)",
    ),
    (
        "out-read-only",
        arrays(out=read_only(np.ones((2, 6, 4, 8), F))),
        "out is read-only, expected a writable array",
    ),
    (
        "out-strides",
        arrays(out=np.ones((2, 6, 4, 16), F)[..., ::2]),
        "out.strides[3] = 2 elements, expected 1",
    ),
    (
        "out-overlap",
        arrays(out=np.lib.stride_tricks.as_strided(np.ones(99, F), (2, 6, 4, 8), (0, 4, 4, 4))),
        "out.strides[0] = 0 elements, expected at least 8 (an output must not overlap itself)",
    ),
    # varlen
    (
        "varlen-one",
        packed(cu_seqlens_k=None),
        "cu_seqlens_k = None, expected an array, as cu_seqlens_q is given",
    ),
    (
        "varlen-other",
        packed(cu_seqlens_q=None),
        "cu_seqlens_q = None, expected an array, as cu_seqlens_k is given",
    ),
    ("varlen-list", packed(cu_seqlens_q=[0, 2, 6]), "cu_seqlens_q is of type list, expected"),
    (
        "varlen-int64",
        packed(cu_seqlens_q=np.array([0, 2, 6])),
        "cu_seqlens_q.dtype = int64, expected int32",
    ),
    (
        "varlen-ndim",
        packed(cu_seqlens_k=np.zeros((3, 1), np.int32)),
        "cu_seqlens_k.ndim = 2, expected 1: (batch + 1)",
    ),
    (
        "varlen-short",
        packed(cu_seqlens_q=np.zeros(0, np.int32)),
        "cu_seqlens_q.shape[0] = 0, expected at least 1",
    ),
    (
        "varlen-batch",
        packed(cu_seqlens_k=np.array([0, 10], np.int32)),
        "cu_seqlens_k.shape[0] = 2, expected 3 (batch + 1 of cu_seqlens_q)",
    ),
    (
        "varlen-strides",
        packed(cu_seqlens_q=np.zeros(6, np.int32)[::2]),
        "cu_seqlens_q.strides[0] = 2 elements, expected 1 (contiguous)",
    ),
    (
        "varlen-start",
        packed(cu_seqlens_q=np.array([1, 2, 6], np.int32)),
        "cu_seqlens_q[0] = 1, expected 0",
    ),
    (
        "varlen-order",
        packed(cu_seqlens_k=np.array([0, 11, 10], np.int32)),
        "cu_seqlens_k[2] = 10 after 11, expected not to decrease",
    ),
    (
        "varlen-end",
        packed(cu_seqlens_q=np.array([0, 2, 7], np.int32)),
        "cu_seqlens_q[2] = 7, expected",
    ),
    (
        "varlen-max",
        packed(max_seqlen_q=3),
        "cu_seqlens_q: sequence 1 has length 4, expected at most max_seqlen_q = 3",
    ),
    ("varlen-max-float", packed(max_seqlen_k=7.5), "max_seqlen_k = 7.5, expected an integer"),
    (
        "varlen-dense",
        packed(q=np.ones((1, 6, 4, 8), F)),
        "q.ndim = 4, expected 3: (total_q, heads, head_dim)",
    ),
    ("varlen-total", packed(v=np.ones((9, 2, 8), F)), "v.shape[0] = 9, expected 10 (total_k of k)"),
    ("max-alone", arrays(max_seqlen_q=6), "max_seqlen_q = 6, expected None"),
    ("max-alone-k", arrays(max_seqlen_k=6), "max_seqlen_k = 6, expected None"),
]


@pytest.mark.parametrize(("given", "text"), [p[1:] for p in INVALID], ids=[p[0] for p in INVALID])
def test_forward_refuses(given: dict[str, Any], text: str) -> None:
    out = None
    if "out" not in given:
        # A right out where possible, to see that it stays as it was.
        q: Any = given["q"]
        v: Any = given["v"]
        if getattr(q, "ndim", 0) > 2 and getattr(v, "ndim", 0) > 2 and q.dtype == F:
            out = given["out"] = cases.poisoned((*q.shape[:-1], v.shape[-1]), F)
    for _ in range(2):  # the second time, whatever the first left behind
        with pytest.raises(strobe.InvalidArgument, match=re.escape(text)) as caught:
            strobe.attention(**given)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, RuntimeError)  # what callers of flash_attn catch
        assert isinstance(caught.value, strobe.Error)
        assert len(str(caught.value).encode()) <= 400
    assert out is None or np.isnan(out).all()


def gradients(**changes: Any) -> dict[str, Any]:
    given = arrays()
    given["out"], given["lse"] = strobe.attention(**given, return_lse=True)
    given["dout"] = np.ones((2, 6, 4, 8), F)
    given.update(changes)
    return given


def three(**changes: Any) -> tuple[Any, ...]:
    given = {
        "dq": np.ones((2, 6, 4, 8), F),
        "dk": np.ones((2, 10, 2, 8), F),
        "dv": np.ones((2, 10, 2, 8), F),
    }
    given.update(changes)
    return tuple(given.values())


INVALID_BACKWARD: list[tuple[str, dict[str, Any], str]] = [
    ("dout-none", {"dout": None}, "dout = None, expected an array"),
    ("lse-none", {"lse": None}, "lse = None, expected an array"),
    (
        "dout-shape",
        {"dout": np.ones((2, 6, 4, 7), F)},
        "dout.shape[3] = 7, expected 8 (head_dim_v of q and v)",
    ),
    (
        "dout-dtype",
        {"dout": np.ones((2, 6, 4, 8))},
        "dout.dtype = float64, expected float32 (that of q)",
    ),
    (
        "dout-strides",
        {"dout": np.broadcast_to(np.ones(1, F), (2, 6, 4, 8))},
        (
            "dout.strides[3] = 0 elements, expected 1 (last dimension contiguous): "
            "pass numpy.ascontiguousarray(dout)"
        ),
    ),
    (
        "out-shape",
        {"out": np.ones((2, 5, 4, 8), F)},
        "out.shape[1] = 5, expected 6 (seqlen_q of q and v)",
    ),
    ("lse-shape", {"lse": np.ones((2, 6, 4), F)}, "lse.shape[1] = 6, expected 4 (heads of q)"),
    ("lse-ndim", {"lse": np.ones((4, 6), F)}, "lse.ndim = 2, expected 3: (batch, heads, seqlen_q)"),
    ("lse-dtype", {"lse": np.ones((2, 4, 6))}, "lse.dtype = float64, expected float32"),
    (
        "lse-strides",
        {"lse": np.ones((2, 6, 4), F).swapaxes(1, 2)},
        "lse.strides[2] = 4 elements, expected 1 (contig",
    ),
    (
        "dlse-shape",
        {"dlse": np.ones((2, 4, 7), F)},
        "dlse.shape[2] = 7, expected 6 (seqlen_q of q)",
    ),
    ("dlse-list", {"dlse": [1]}, "dlse is of type list, expected"),
    (
        "dlse-strides",
        {"dlse": np.broadcast_to(np.ones(1, F), (2, 4, 6))},
        "dlse.strides[2] = 0 elements, expected 1",
    ),
    ("grads-two", {"grads": three()[:2]}, "grads is no tuple of three, expected (dq, dk, dv)"),
    ("grads-none", {"grads": three(dk=None)}, "grads[1] = None, expected an array"),
    (
        "dq-shape",
        {"grads": three(dq=np.ones((2, 7, 4, 8), F))},
        "dq.shape[1] = 7, expected 6 (seqlen_q of q)",
    ),
    (
        "dk-dtype",
        {"grads": three(dk=np.ones((2, 10, 2, 8)))},
        "dk.dtype = float64, expected float32 (that of q, or float32 for all three)",
    ),
    (
        "dv-read-only",
        {"grads": three(dv=read_only(np.ones((2, 10, 2, 8), F)))},
        "dv is read-only, expected a writable",
    ),
    (
        "dk-overlap",
        {"grads": three(dk=np.broadcast_to(np.ones((1, 8), F), (2, 10, 2, 8)))},
        "dk is read-only",
    ),
    ("softcap", {"softcap": -2.0}, "softcap = -2, expected 0 (off)"),
    ("scale-array", {"scale": np.ones(2)}, "scale = <ndarray of shape (2,)>, expected a number"),
    ("threads", {"threads": 1 << 40}, "threads = 1099511627776, expected an integer of 32 bits"),
    ("seed", {"dropout_seed": -5}, "dropout_seed = -5, expected an integer from 0"),
    ("misaligned", {"dout": misaligned((2, 6, 4, 8))}, "dout = 0x"),
]


@pytest.mark.parametrize(
    ("changes", "text"), [p[1:] for p in INVALID_BACKWARD], ids=[p[0] for p in INVALID_BACKWARD]
)
def test_backward_refuses(changes: dict[str, Any], text: str) -> None:
    given = gradients(**changes)
    positional = [given.pop(name) for name in ("dout", "q", "k", "v", "out", "lse")]
    with pytest.raises(strobe.InvalidArgument, match=re.escape(text)):
        strobe.attention_backward(*positional, **given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"batch": -1}, "batch = -1, expected at least 0"),
        ({"seqlen_k": 2.5}, "seqlen_k = 2.5, expected an integer"),
        ({"dropout_p": 1.5}, "dropout_p = 1.5, expected at least 0 and below 1"),
        ({"dropout_p": float("nan")}, "dropout_p = nan, expected a number"),
        ({"dropout_seed": -1}, "dropout_seed = -1, expected an integer from 0"),
        ({"dropout_offset": "x"}, "dropout_offset = 'x', expected an integer from 0"),
    ],
)
def test_dropout_mask_refuses(given: dict[str, Any], text: str) -> None:
    right: dict[str, Any] = {"batch": 1, "heads": 1, "seqlen_q": 2, "seqlen_k": 2, "dropout_p": 0.5}
    with pytest.raises(strobe.InvalidArgument, match=re.escape(text)):
        strobe.dropout_mask(**{**right, **given})


def test_positional_options_are_refused() -> None:
    given = arrays()
    with pytest.raises(TypeError, match="positional"):
        strobe.attention(given["q"], given["k"], given["v"], True)  # type: ignore[call-overload]


def test_errors_form_a_family_and_pickle() -> None:
    family = {
        strobe.InvalidArgument: (ValueError, RuntimeError),
        strobe.Unsupported: (NotImplementedError, RuntimeError),
        strobe.OutOfMemory: (MemoryError,),
        strobe.DeviceError: (RuntimeError,),
        strobe.InternalError: (RuntimeError,),
    }
    for ours, builtins in family.items():
        assert issubclass(ours, strobe.Error)
        assert all(issubclass(ours, builtin) for builtin in builtins)
        again = pickle.loads(pickle.dumps(ours("text")))
        assert type(again) is ours
        assert str(again) == "text"
        assert repr(again) == f"{ours.__name__}('text')"


def test_a_spec_has_no_data() -> None:
    spec = strobe.ArraySpec((2, 6, 4, 8))
    with pytest.raises(strobe.InvalidArgument, match="has no data"):
        strobe.attention(spec, spec, spec)  # type: ignore[call-overload]


def test_a_failed_call_does_not_spoil_the_next(rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    wanted = strobe.attention(inputs.q, inputs.k, inputs.v)
    with pytest.raises(strobe.InvalidArgument):
        strobe.attention(inputs.q, inputs.k, inputs.v, softcap=-1)
    assert np.array_equal(strobe.attention(inputs.q, inputs.k, inputs.v), wanted)
