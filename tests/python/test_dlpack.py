"""DLPack: read in place, every tensor given back once and in time, whatever happens."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import strobe

import cases
from cases import DTYPES, Array, Case
from producer import ALIVE, Producer

VERSIONS: list[tuple[int, int] | None] = [None, (1, 0), (1, 7)]


@pytest.fixture(autouse=True)
def _all_given_back() -> Iterator[None]:
    yield
    gc.collect()
    assert not ALIVE


def check_once(*producers: Producer) -> None:
    for producer in producers:
        assert producer.exported == producer.deleted == 1
        assert producer.destroyed == 0  # taken over, not dropped


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_result_as_numpy(
    dtype: str, version: tuple[int, int] | None, rng: np.random.Generator
) -> None:
    inputs = Case(dtype=dtype).make(rng)
    wanted = strobe.attention(inputs.q, inputs.k, inputs.v)
    q, k, v = (Producer(x, version) for x in (inputs.q, inputs.k, inputs.v))
    out = strobe.attention(q, k, v)
    check_once(q, k, v)
    assert type(out) is np.ndarray
    assert out.dtype == inputs.q.dtype
    assert np.array_equal(out, wanted)


def test_every_argument(rng: np.random.Generator) -> None:
    inputs = Case(
        batch=2, alibi=2, with_dlse=True, cu_q=[0, 11, 30], cu_k=[0, 20, 37], dtype="bfloat16"
    ).make(rng)
    wanted_out, wanted_lse = strobe.attention(
        inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.options
    )
    q, k, v = (Producer(x) for x in (inputs.q, inputs.k, inputs.v))
    options: Any = {name: Producer(value) for name, value in inputs.options.items()}
    out = Producer(cases.poisoned(inputs.dout.shape, inputs.q.dtype))
    result, lse = strobe.attention(q, k, v, **options, out=out, return_lse=True)
    assert result is out
    assert np.array_equal(out.array, wanted_out)
    assert np.array_equal(lse, wanted_lse)
    check_once(q, k, v, *options.values(), out)

    wanted = strobe.attention_backward(
        inputs.dout,
        inputs.q,
        inputs.k,
        inputs.v,
        wanted_out,
        lse,
        dlse=inputs.dlse,
        **inputs.options,
    )
    assert inputs.dlse is not None
    given = [
        Producer(x)
        for x in (inputs.dout, inputs.q, inputs.k, inputs.v, wanted_out, lse, inputs.dlse)
    ]
    options = {name: Producer(value) for name, value in inputs.options.items()}
    grads = tuple(
        Producer(cases.poisoned(x.shape, x.dtype)) for x in (inputs.q, inputs.k, inputs.v)
    )
    result = strobe.attention_backward(
        given[0],
        given[1],
        given[2],
        given[3],
        given[4],
        given[5],
        dlse=given[6],
        grads=(grads[0], grads[1], grads[2]),
        **options,
    )
    assert all(a is b for a, b in zip(result, grads, strict=True))
    assert all(np.array_equal(a.array, b) for a, b in zip(grads, wanted, strict=True))
    check_once(*given, *options.values(), *grads)
    fresh = strobe.attention_backward(
        Producer(inputs.dout),
        Producer(inputs.q),
        inputs.k,
        inputs.v,
        wanted_out,
        lse,
        dlse=inputs.dlse,
        **inputs.options,
    )
    assert all(np.array_equal(a, b) for a, b in zip(fresh, wanted, strict=True))


def test_strides_offset_and_null_strides(rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    wanted = strobe.attention(inputs.q, inputs.k, inputs.v)
    q = Producer(np.ascontiguousarray(inputs.q.swapaxes(1, 2)).swapaxes(1, 2))
    k = Producer(inputs.k, offset=64)
    v = Producer(inputs.v, null_strides=True)
    assert np.array_equal(strobe.attention(q, k, v), wanted)


def test_a_capsule_is_asked_for_without_a_copy(rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    q = Producer(inputs.q)
    strobe.attention(q, inputs.k, inputs.v)
    assert q.asked == [{"max_version": (1, 0), "copy": False}]
    old = Producer(inputs.q, None)
    strobe.attention(old, inputs.k, inputs.v)
    assert old.asked == [{}]


@pytest.mark.parametrize("version", VERSIONS)
def test_given_back_when_the_call_fails(
    version: tuple[int, int] | None, rng: np.random.Generator
) -> None:
    inputs = Case().make(rng)
    q, k = Producer(inputs.q, version), Producer(inputs.k[:, :, :, :5], version)
    with pytest.raises(strobe.InvalidArgument, match=re.escape("k.shape[3] = 5")) as caught:
        strobe.attention(q, k, inputs.v)
    check_once(q, k)  # at once, although the traceback still holds the frames
    assert caught.tb is not None
    q, bad = Producer(inputs.q, version), [1.0]
    with pytest.raises(strobe.InvalidArgument, match="v is of type list"):
        strobe.attention(q, inputs.k, bad)  # type: ignore[call-overload]
    check_once(q)


def test_null_deleter(rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    q = Producer(inputs.q, null_deleter=True)
    out = strobe.attention(q, inputs.k, inputs.v)
    assert np.array_equal(out, strobe.attention(inputs.q, inputs.k, inputs.v))
    assert q.deleted == 0
    ALIVE.clear()


def test_what_it_says_without_memory_of_its_own(rng: np.random.Generator) -> None:
    q = Producer(cases.normal(rng, (1, 2, 1, 3)))
    found = strobe.why(q, q, q)
    assert "takes it" in found
    assert q.exported == q.deleted == 3
    q = Producer(cases.normal(rng, ()))
    with pytest.raises(strobe.InvalidArgument, match=r"q\.ndim = 0, expected 4"):
        strobe.attention(q, q, q)
    assert q.exported == q.deleted


def test_the_producers_array_is_not_kept(rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    q = Producer(inputs.q.copy())
    watch = weakref.ref(q)
    strobe.attention(q, inputs.k, inputs.v)
    del q
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"version": (2, 0)}, strobe.Unsupported, "q comes as DLPack 2.0, expected 1.x"),
        (
            {"flags": 2},
            strobe.InvalidArgument,
            "q.__dlpack__() made a copy, expected memory shared",
        ),
        ({"lanes": 4}, strobe.InvalidArgument, "q.dtype = float32x4, expected float32"),
        (
            {"device": (2, 1)},
            strobe.Unsupported,
            "q is on cuda:1 and comes through DLPack, expected a torch.Tensor",
        ),
    ],
)
def test_refused_and_given_back(
    changes: dict[str, Any], kind: type[Exception], text: str, rng: np.random.Generator
) -> None:
    inputs = Case().make(rng)
    q = Producer(inputs.q, **changes)
    with pytest.raises(kind, match=re.escape(text)):
        strobe.attention(q, inputs.k, inputs.v)
    check_once(q)


def test_unknown_device_is_not_even_asked(rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    q = Producer(inputs.q, device=(7, 0))
    with pytest.raises(strobe.Unsupported, match="q is on DLPack device type 7, expected 1"):
        strobe.attention(q, inputs.k, inputs.v)
    assert q.exported == 0


def test_pinned_memory_is_the_cpus(rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    out = strobe.attention(Producer(inputs.q, device=(3, 0)), inputs.k, inputs.v)
    assert np.array_equal(out, strobe.attention(inputs.q, inputs.k, inputs.v))


def test_read_only_is_for_inputs(rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    out = Producer(cases.poisoned(inputs.dout.shape, np.float32), flags=1)
    with pytest.raises(strobe.InvalidArgument, match="out is read-only, expected a writable"):
        strobe.attention(Producer(inputs.q, flags=1), inputs.k, inputs.v, out=out)
    assert np.isnan(out.array).all()
    strobe.attention(Producer(inputs.q, flags=1), inputs.k, inputs.v)


class Wrapper:
    """Passes DLPack calls on, as a thin tensor class would."""

    def __init__(self, capsule: Any, error: Exception | None = None) -> None:
        self.capsule = capsule
        self.error = error

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **asked: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self.capsule


def test_producers_that_fail(rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    refuses = Wrapper(None, BufferError("no export today"))
    with pytest.raises(
        strobe.InvalidArgument, match=r"q \(Wrapper\) cannot be shared through DLPack: no export"
    ):
        strobe.attention(refuses, inputs.k, inputs.v)
    with pytest.raises(
        strobe.InvalidArgument, match=r"gave None, expected a capsule named dltensor"
    ):
        strobe.attention(Wrapper(None), inputs.k, inputs.v)
    used = Producer(inputs.q).capsule()
    strobe.attention(Wrapper(used), inputs.k, inputs.v)
    with pytest.raises(strobe.InvalidArgument, match="used_dltensor"):
        strobe.attention(Wrapper(used), inputs.k, inputs.v)


def test_one_object_for_all_three(rng: np.random.Generator) -> None:
    x = cases.normal(rng, (1, 20, 2, 16))
    producer = Producer(x)
    assert np.array_equal(strobe.attention(producer, producer, producer), strobe.attention(x, x, x))
    assert producer.exported == producer.deleted == 3


def test_bfloat16_without_ml_dtypes() -> None:
    # NumPy itself has no bfloat16: results go into out, or the message says what is missing.
    program = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np
import producer, strobe

# bfloat16 as its bits, which the producer exports under the right name.
producer.CODES["uint16"] = producer.CODES["bfloat16"]
values = np.random.default_rng(0).standard_normal((1, 5, 2, 8), np.float32)
bits = (values.view(np.uint32) >> 16).astype(np.uint16)
make = lambda: producer.Producer(bits)
out = producer.Producer(np.zeros_like(bits))
assert strobe.attention(make(), make(), make(), out=out) is out
assert out.array.any()
try:
    strobe.attention(make(), make(), make())
except strobe.Unsupported as error:
    assert "needs the package ml_dtypes" in str(error), error
else:
    raise AssertionError("not refused")
assert not producer.ALIVE
"""
    subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=__file__.rpartition("/")[0], timeout=600
    )


def test_numpy_arrays_of_numpys_own_dlpack(rng: np.random.Generator) -> None:
    class Foreign:
        def __init__(self, array: Array) -> None:
            self.array = array

        def __dlpack__(self, **asked: Any) -> Any:
            return self.array.__dlpack__(**asked)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    inputs = Case(dtype="float16").make(rng)
    inputs.q.flags.writeable = False
    out = strobe.attention(Foreign(inputs.q), Foreign(inputs.k), Foreign(inputs.v))
    assert np.array_equal(out, strobe.attention(inputs.q, inputs.k, inputs.v))
    with pytest.raises(strobe.InvalidArgument, match="cannot be shared through DLPack"):
        strobe.attention(Foreign(inputs.q.astype(ml_dtypes.bfloat16)), inputs.k, inputs.v)


class OddDevice(Producer):
    """Whose __dlpack_device__ is broken."""

    given: Any = None

    def __dlpack_device__(self) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


@pytest.mark.parametrize(
    "given", [OSError("not today"), None, 3, (), (1,), ("x", 0), (1.5, 0), (None, None)]
)
def test_a_broken_device(given: Any, rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    q = OddDevice(inputs.q)
    q.given = given
    with pytest.raises(strobe.InvalidArgument, match=r"^q\.__dlpack_device__\(\) does not give"):
        strobe.attention(q, inputs.k, inputs.v)
    assert q.exported == 0


def test_a_device_type_that_no_c_type_holds(rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    for device_type in (2**64 + 1, 10**400):
        q = OddDevice(inputs.q)
        q.given = (device_type, 0)
        with pytest.raises(strobe.Unsupported, match="q is on DLPack device type"):
            strobe.attention(q, inputs.k, inputs.v)


def test_an_address_past_the_end(rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    q = Producer(inputs.q, offset=2**62)
    with pytest.raises(strobe.InvalidArgument, match="q comes through DLPack with byte_offset"):
        strobe.attention(q, inputs.k, inputs.v)
    check_once(q)
