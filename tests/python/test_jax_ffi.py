"""strobe.jax where it refuses, and the handlers that XLA calls. What they keep: test_extension."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strobe
from strobe import _core

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402

import strobe.jax  # noqa: E402
from test_jax import on_the_cpu  # noqa: E402, F401 - a fixture

attention: Any = strobe.jax.attention
ROOT = Path(__file__).resolve().parents[2]
Q = np.ones((2, 5, 4, 8), np.float32)
K = np.ones((2, 7, 2, 8), np.float32)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no array": ({"q": object()}, "q = .*, expected an array"),
    "q's axes": ({"q": Q[0, 0]}, r"q.ndim = 2, expected 4: \(batch, seqlen, heads, head_dim\)"),
    "k's axes": ({"k": K[0]}, "k.ndim = 3, expected 4 as of q"),
    "dtype": ({"q": Q.astype(np.int32)}, "q.*int32.*float32"),
    "dtypes": ({"k": K.astype(np.float16)}, "k.*float16.*float32"),
    "batch": ({"k": K[:1]}, r"k.shape\[0\] = 1, expected 2"),
    "heads": (
        {"k": K[:, :, [0] * 3], "v": K[:, :, [0] * 3]},
        r"expected a multiple of k.shape\[2\] \(heads_kv\) = 3",
    ),
    "head_dim": ({"q": Q[..., :4]}, r"k.shape\[3\] = 8, expected 4"),
    "scale": ({"scale": "much"}, "scale = 'much', expected a number"),
    "softcap": ({"softcap": -1.0}, "softcap = -1, expected 0"),
    "window": ({"local_window_size": (1, 2, 3)}, "local_window_size = .*expected a pair"),
    "window's end": ({"local_window_size": (-2, 1)}, r"local_window_size\[0\] = -2, expected"),
    "chunk": ({"attention_chunk": -1}, "attention_chunk = -1, expected"),
    "threads": ({"threads": -1}, "threads = -1, expected"),
    "lengths' dtype": ({"query_seq_lengths": np.ones(2, np.float32)}, "query_seq_lengths.*int32"),
    "lengths' shape": (
        {"key_value_seq_lengths": [1, 2, 3]},
        r"key_value_seq_lengths.shape\[0\] = 3",
    ),
    "position": ({"is_causal": True, "q_position": 2**31}, "q_position = 2147483648, expected"),
    "positions": ({"is_causal": True, "q_position": [1]}, r"q_position.shape\[0\] = 1, expected 2"),
    "prefix": ({"prefix": [1, 1], "local_window_size": 1}, "prefix"),
    "slopes": (
        {"alibi_slopes": np.ones(3, np.float32)},
        r"alibi_slopes.shape\[0\] = 3, expected 4",
    ),
    "dropout": ({"dropout_p": 1.0, "dropout_seed": 1}, "dropout_p = 1, expected"),
    "no seed": ({"dropout_p": 0.5}, "dropout_seed = None with dropout_p = 0.5, expected a key"),
    "seed": ({"dropout_p": 0.5, "dropout_seed": -1}, "dropout_seed = -1, expected an integer"),
    "seeds": (
        {"dropout_p": 0.5, "dropout_seed": np.ones(3)},
        "dropout_seed has dtype.*expected one",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("traced", [False, True])
def test_refused_when_traced(name: str, traced: bool) -> None:
    options, message = REFUSED[name]
    given = {"q": Q, "k": K, "v": options.get("k", K)} | options
    arrays = {name: x for name, x in given.items() if traced and isinstance(x, np.ndarray)}
    rest = {name: x for name, x in given.items() if name not in arrays}
    with pytest.raises(strobe.InvalidArgument, match=message):
        jax.eval_shape(lambda arrays: attention(**arrays, **rest), arrays)


@pytest.mark.parametrize("name", ["scale", "is_causal", "softcap", "dropout_p", "threads"])
def test_options_are_not_traced(name: str) -> None:
    with pytest.raises(strobe.InvalidArgument, match=f"{name} = .*expected a"):
        jax.jit(lambda x: attention(Q, K, K, dropout_seed=1, **{name: x}))(1.0)


def test_no_gradient_of_slopes() -> None:
    def loss(q: Any, slopes: Any) -> Any:
        return attention(q, K, K, alibi_slopes=slopes).sum()

    slopes = jnp.ones(4)
    with pytest.raises(strobe.Unsupported, match="alibi_slopes has no gradient"):
        jax.grad(loss, argnums=1)(Q, slopes)
    wanted = jax.grad(loss)(Q, slopes)
    for wrap in (jax.jit, jax.checkpoint):
        np.testing.assert_array_equal(jax.grad(wrap(loss))(Q, slopes), wanted)
    stopped = jax.grad(lambda q, x: loss(q, jax.lax.stop_gradient(x)), argnums=(0, 1))(Q, slopes)
    np.testing.assert_array_equal(stopped[0], wanted)
    assert not stopped[1].any()


def test_no_second_gradient() -> None:
    with pytest.raises((TypeError, ValueError), match=r"differentiat|jvp"):
        jax.hessian(lambda q: attention(q, K, K).sum())(Q)


def test_refused_when_it_runs() -> None:
    far = np.array([0, 2**30 + 1], np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"strobe: q_position\[1\] = 1073741825"):
        attention(Q, K, K, is_causal=True, q_position=far).block_until_ready()


# ---------------------------------------------------------------------------------------- handlers


def raw(*arrays: Any, results: Any = None, backward: bool = False, **attributes: Any) -> Any:
    """A call without strobe.jax's checks."""
    results = results or [
        jax.ShapeDtypeStruct(Q.shape, Q.dtype),
        jax.ShapeDtypeStruct((0,), jnp.uint8),
    ]
    name = "strobe_attention_" + ("backward" if backward else "forward")
    return jax.block_until_ready(jax.ffi.ffi_call(name, results)(*arrays, **attributes))


def test_handlers_check_what_xla_gives() -> None:
    numbers, short = np.ones(2, np.int32), np.ones(1, np.int32)
    assert raw(Q, K, K)[0].shape == Q.shape
    out = jax.ShapeDtypeStruct((2, 5, 4, 9), Q.dtype)
    flat, workspace = jax.ShapeDtypeStruct((9,), Q.dtype), jax.ShapeDtypeStruct((0,), jnp.uint8)
    lse = np.ones((2, 4, 5), np.float32)
    calls: dict[str, Any] = {
        "the call has no buffer v": lambda: raw(Q, K),
        "the call has 4 buffers, expected 3": lambda: raw(Q, K, K, K),
        "q.ndim = 3": lambda: raw(Q[0], K, K),
        "q has XLA's type 4": lambda: raw(Q.astype(np.int32), K, K),
        "q, k and v differ": lambda: raw(Q, K[:1], K),
        r"out.shape\[3\] = 9, expected 8": lambda: raw(Q, K, K, results=[out, workspace]),
        "the result has no buffer workspace": lambda: raw(
            Q, K, K, results=[jax.ShapeDtypeStruct(Q.shape, Q.dtype)]
        ),
        "out.ndim = 1, expected 4": lambda: raw(Q, K, K, results=[flat, workspace]),
        "attribute size is unknown": lambda: raw(Q, K, K, size=np.int64(1)),
        "attribute causal is unknown": lambda: raw(Q, K, K, causal="yes"),
        "softcap = -1": lambda: raw(Q, K, K, softcap=np.float32(-1)),
        r"seqused_k.shape\[0\] = 1": lambda: raw(Q, K, K, short, has_seqused_k=np.int64(1)),
        "seqused_k has XLA's type 11": lambda: raw(
            Q, K, K, numbers.astype(np.float32), has_seqused_k=np.int64(1)
        ),
        "dout differs": lambda: raw(Q[:1], Q, K, K, Q, lse, backward=True),
        r"lse.shape\[1\] = 5": lambda: raw(Q, Q, K, K, Q, lse.swapaxes(1, 2), backward=True),
    }
    for expected, call in calls.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
            call()


class Values(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int32)),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
    )


class Attributes(ctypes.Structure):
    _fields_ = (*Values._fields_[:4], ("names", ctypes.c_void_p), ("values", ctypes.c_void_p))


class Buffer(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class ErrorArgs(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int32),
    )


class AskArgs(ctypes.Structure):
    """Of a stream or, in its low half, a device."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("answer", ctypes.c_uint64),
    )


Create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ErrorArgs))
Ask = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(AskArgs))
Destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Api(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("api_version", ctypes.c_size_t * 3),
        ("internal", ctypes.c_void_p),
        ("create_error", Create),
        ("error_message", ctypes.c_void_p),
        ("destroy_error", Destroy),
        ("register_handler", ctypes.c_void_p),
        ("get_stream", Ask),
        ("others", ctypes.c_void_p * 12),
        ("get_device_ordinal", Ask),
    )


class Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("api_version", ctypes.c_size_t * 2),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("traits", ctypes.c_uint32),
    )


class Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(Metadata)),
    )


class Frame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.POINTER(Extension)),
        ("api", ctypes.POINTER(Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int32),
        ("arguments", Values),
        ("results", Values),
        ("attributes", Attributes),
    )


def handlers() -> list[Any]:
    """forward and backward of the CPU, then of CUDA."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(Frame))
    return [kind(pointer(capsule, None)) for capsule in _core.xla_handlers()]


def values(arrays: list[Any]) -> Values:
    buffers = [
        Buffer(
            48,
            None,
            {"f": 11, "u": 6}[x.dtype.kind],
            x.ctypes.data,
            x.ndim,
            (ctypes.c_int64 * x.ndim)(*x.shape),
        )
        for x in arrays
    ]
    addresses = (ctypes.c_void_p * len(arrays))(*(ctypes.addressof(x) for x in buffers))
    made = Values(
        40, None, len(arrays), (ctypes.c_int32 * len(arrays))(*(1 for _ in arrays)), addresses
    )
    made.kept = (buffers, addresses)
    return made


def test_metadata() -> None:
    """Version 0.1, and which handlers may be in CUDA graphs."""
    for handler, traits in zip(handlers(), (0, 0, 1, 1), strict=True):
        metadata = Metadata()
        extension = Extension(24, 1, None, ctypes.pointer(metadata))
        frame = Frame(extensions=ctypes.pointer(extension))
        assert handler(ctypes.byref(frame)) is None
        assert (metadata.major, metadata.minor, metadata.traits) == (0, 1, traits)


@pytest.mark.parametrize("old", [False, True])
def test_the_cuda_handler_as_far_as_the_cpu_goes(old: bool) -> None:
    """It asks XLA for device and stream, and plans for that device. 999: there is none."""
    said, asked = [], []

    def create(arguments: Any) -> int:
        said.append((arguments[0].code, arguments[0].message.decode()))
        return 77

    def device(arguments: Any) -> None:
        asked.append("device")
        arguments[0].answer = 999

    def stream(arguments: Any) -> None:
        asked.append("stream")
        arguments[0].answer = 4096

    api = Api(
        struct_size=0 if old else ctypes.sizeof(Api),
        create_error=Create(create),
        get_stream=Ask(stream),
        get_device_ordinal=Ask(device),
    )
    out = np.full(Q.shape, 9, np.float32)
    given, results = values([Q, K, K]), values([out, np.zeros(0, np.uint8)])
    frame = Frame(api=ctypes.pointer(api), stage=3, arguments=given, results=results)
    handler = handlers()[2]
    assert handler(ctypes.byref(frame)) == 77
    assert (out == 9).all()
    if old:
        assert asked == []
        assert said == [(12, said[0][1])]
        assert "update jaxlib" in said[0][1]
    else:
        assert asked == ["device", "stream"]
        assert said[0][0] in (3, 12)
        assert said[0][1].startswith("strobe: ")
    frame.stage = 0  # other stages have nothing to do
    assert handler(ctypes.byref(frame)) is None


LAYOUT = """
#include <cstddef>
#include <type_traits>
#include "xla/ffi/api/c_api.h"
#include "core/xla_ffi.h"
using namespace strobe_python::xla;
#define SAME(ours, a, theirs, b) \\
  static_assert(offsetof(ours, a) == offsetof(theirs, b)); \\
  static_assert(sizeof(ours::a) == sizeof(theirs::b));
using Theirs = std::remove_pointer_t<decltype(XLA_FFI_Api_Version::extension_start)>;  // two names
SAME(Extension, type, Theirs, type)
SAME(Extension, next, Theirs, next)
SAME(ApiVersion, extensions, XLA_FFI_Api_Version, extension_start)
SAME(ApiVersion, major, XLA_FFI_Api_Version, major_version)
SAME(ApiVersion, minor, XLA_FFI_Api_Version, minor_version)
SAME(Metadata, api_version, XLA_FFI_Metadata, api_version)
SAME(Metadata, traits, XLA_FFI_Metadata, traits)
SAME(MetadataExtension, base, XLA_FFI_Metadata_Extension, extension_base)
SAME(MetadataExtension, metadata, XLA_FFI_Metadata_Extension, metadata)
SAME(Text, data, XLA_FFI_ByteSpan, ptr)
SAME(Text, length, XLA_FFI_ByteSpan, len)
SAME(Scalar, dtype, XLA_FFI_Scalar, dtype)
SAME(Scalar, value, XLA_FFI_Scalar, value)
SAME(Buffer, dtype, XLA_FFI_Buffer, dtype)
SAME(Buffer, data, XLA_FFI_Buffer, data)
SAME(Buffer, rank, XLA_FFI_Buffer, rank)
SAME(Buffer, dims, XLA_FFI_Buffer, dims)
SAME(Values, size, XLA_FFI_Args, size)
SAME(Values, types, XLA_FFI_Args, types)
SAME(Values, values, XLA_FFI_Args, args)
SAME(Values, size, XLA_FFI_Rets, size)
SAME(Values, types, XLA_FFI_Rets, types)
SAME(Values, values, XLA_FFI_Rets, rets)
SAME(Attributes, size, XLA_FFI_Attrs, size)
SAME(Attributes, types, XLA_FFI_Attrs, types)
SAME(Attributes, names, XLA_FFI_Attrs, names)
SAME(Attributes, values, XLA_FFI_Attrs, attrs)
SAME(ErrorArgs, message, XLA_FFI_Error_Create_Args, message)
SAME(ErrorArgs, code, XLA_FFI_Error_Create_Args, errc)
SAME(ErrorDestroyArgs, error, XLA_FFI_Error_Destroy_Args, error)
SAME(StreamArgs, context, XLA_FFI_Stream_Get_Args, ctx)
SAME(StreamArgs, stream, XLA_FFI_Stream_Get_Args, stream)
SAME(DeviceArgs, context, XLA_FFI_DeviceOrdinal_Get_Args, ctx)
SAME(DeviceArgs, ordinal, XLA_FFI_DeviceOrdinal_Get_Args, device_ordinal)
SAME(Api, api_version, XLA_FFI_Api, api_version)
SAME(Api, create_error, XLA_FFI_Api, XLA_FFI_Error_Create)
SAME(Api, destroy_error, XLA_FFI_Api, XLA_FFI_Error_Destroy)
SAME(Api, get_stream, XLA_FFI_Api, XLA_FFI_Stream_Get)
SAME(Api, get_device_ordinal, XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get)
SAME(CallFrame, extensions, XLA_FFI_CallFrame, extension_start)
SAME(CallFrame, api, XLA_FFI_CallFrame, api)
SAME(CallFrame, context, XLA_FFI_CallFrame, ctx)
SAME(CallFrame, stage, XLA_FFI_CallFrame, stage)
SAME(CallFrame, arguments, XLA_FFI_CallFrame, args)
SAME(CallFrame, results, XLA_FFI_CallFrame, rets)
SAME(CallFrame, attributes, XLA_FFI_CallFrame, attrs)
static_assert(STROBE_XLA_SIZE(ErrorArgs, code) == XLA_FFI_Error_Create_Args_STRUCT_SIZE);
static_assert(STROBE_XLA_SIZE(ErrorDestroyArgs, error) == XLA_FFI_Error_Destroy_Args_STRUCT_SIZE);
static_assert(STROBE_XLA_SIZE(StreamArgs, stream) == XLA_FFI_Stream_Get_Args_STRUCT_SIZE);
static_assert(STROBE_XLA_SIZE(DeviceArgs, ordinal) == XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE);
static_assert(kVersionMajor == XLA_FFI_API_MAJOR && kVersionMinor <= XLA_FFI_API_MINOR);
static_assert(kS32 == int{XLA_FFI_DataType_S32} && kS64 == int{XLA_FFI_DataType_S64});
static_assert(kU8 == int{XLA_FFI_DataType_U8} && kU32 == int{XLA_FFI_DataType_U32});
static_assert(kF16 == int{XLA_FFI_DataType_F16} && kF32 == int{XLA_FFI_DataType_F32});
static_assert(kBF16 == int{XLA_FFI_DataType_BF16});
static_assert(kInvalidArgument == int{XLA_FFI_Error_Code_INVALID_ARGUMENT});
static_assert(kResourceExhausted == int{XLA_FFI_Error_Code_RESOURCE_EXHAUSTED});
static_assert(kUnimplemented == int{XLA_FFI_Error_Code_UNIMPLEMENTED});
static_assert(kInternal == int{XLA_FFI_Error_Code_INTERNAL});
static_assert(kMetadataExtension == int{XLA_FFI_Extension_Metadata});
static_assert(kBufferType == int{XLA_FFI_ArgType_BUFFER});
static_assert(kBufferType == int{XLA_FFI_RetType_BUFFER});
static_assert(kScalarAttribute == int{XLA_FFI_AttrType_SCALAR});
static_assert(kExecute == int{XLA_FFI_ExecutionStage_EXECUTE});
static_assert(kCommandBufferCompatible ==
              unsigned{XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE});
"""


def test_layouts_are_those_of_xla() -> None:
    compiler = shutil.which("c++")
    if compiler is None or not (ROOT / "python" / "core" / "xla_ffi.h").exists():
        pytest.skip("no C++ compiler, or no source tree")
    include = jax.ffi.include_dir()
    command = [
        compiler,
        "-std=c++20",
        "-fsyntax-only",
        "-Wno-invalid-offsetof",
        f"-I{ROOT / 'python'}",
        "-isystem",
        include,
        "-xc++",
        "-",
    ]
    result = subprocess.run(command, input=LAYOUT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
