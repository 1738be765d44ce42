"""Quantised keys and values: arrays of codes and their scales, in a cache and on their own.

Forms: int8, float8_e4m3fn, and q8_0 and q4_0, whose blocks of 32 values are bytes (uint8).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np

from . import _core
from ._arrays import (
    NUMPY,
    TORCH,
    AnyArray,
    Spec,
    check_readable,
    contiguous_strides,
    is_tensor,
    new_tensor,
    read_once,
    spec_of,
)
from ._errors import InvalidArgument, Unsupported, shown
from ._merge import dtype_name
from ._plans import torch_stream
from ._problem import DTYPE_CODES, Problem
from ._values import flag, integer

__all__ = ["dequantize", "quantize"]

# strobe_dtype of the forms, the dtypes of their arrays, and bytes of a block of 32 values.
FORMS: Final = {"float8_e4m3fn": 3, "float8_e5m2": 4, "int8": 5, "q8_0": 6, "q4_0": 7}
DTYPES: Final = ("int8", "float8_e4m3fn", "float8_e5m2", "uint8")
BLOCKS: Final = {"q8_0": 34, "q4_0": 18}
SCALED: Final = tuple(form for form in FORMS if form not in BLOCKS)
# strobe_kv_scale
KINDS: Final = {"tensor": 1, "head": 2, "row": 3, "batch_head": 4}
_SYNONYMS: Final = {
    "e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}

Form = Literal["int8", "float8_e4m3fn", "float8_e5m2", "q8_0", "q4_0"]
Scale = Literal["row", "head", "batch_head", "tensor"]


# -------------------------------------------------------------------------------------- of a cache


def take_cache(problem: Problem, specs: dict[str, Spec], extents: tuple[str, str]) -> None:
    """The cache, k and v, of which one is quantised at least, and its scales."""
    fields, sizes = problem.fields, problem.sizes
    forms = {name: _take_rows(problem, specs, name, extents) for name in ("k", "v")}
    codes = {name: FORMS.get(form, DTYPE_CODES.get(form, 0)) for name, form in forms.items()}
    fields["kv_dtype"] = codes["k"]
    if codes["v"] != codes["k"]:
        fields["v_dtype"] = codes["v"]
    scaled = [name for name in ("k", "v") if forms[name] in SCALED]
    refuse_scales(specs, [name for name in ("k", "v") if name not in scaled])
    for name in scaled:
        if f"{name}_scale" not in specs:
            raise InvalidArgument(
                f"{name}_scale = None with {name}.dtype = {forms[name]}, expected what codes are "
                "multiplied by: float32 or float16, of rows, heads or all"
            )
    if not scaled:
        return
    first = f"{scaled[0]}_scale"
    kind, dtype = _kind_of(first, specs[first]), specs[first].dtype
    if kind == "batch_head":
        raise InvalidArgument(
            f"{first}.ndim = 2, expected 3: (entries or pages, rows, heads_kv), or 1: (heads_kv) "
            "or (1); scales of (batch, heads_kv) belong to a float8 q"
        )
    for of in scaled:
        name, spec = f"{of}_scale", specs[f"{of}_scale"]
        axes = {"row": (*extents, "heads_kv"), "head": ("heads_kv",), "tensor": ("one",)}[kind]
        if spec.dtype not in ("float32", "float16"):
            raise InvalidArgument(f"{name}.dtype = {spec.dtype:.60}, expected float32 or float16")
        problem.check(name, spec, axes, "k", dtype, f"that of {first}")
        fields[name] = _scale_strides(name, spec, kind)
    sizes.pop("one", None)
    fields |= {"kv_scale": KINDS[kind], "kv_scale_dtype": DTYPE_CODES[dtype]}


def blocks_in(row: int) -> dict[str, int]:
    """The blocks that a row of so many bytes may be of, and its values then: no number of bytes is
    both, up to 256 values.
    """
    found = {each: row // size * 32 for each, size in BLOCKS.items() if row % size == 0}
    return {each: dim for each, dim in found.items() if 0 < dim <= 256}


def _take_rows(
    problem: Problem, specs: dict[str, Spec], name: str, extents: tuple[str, str]
) -> str:
    """K or v, each by its own dtype: the form of its codes, or the dtype of its floats."""
    spec, like = specs[name], "q" if name == "k" else "k"
    axis = "head_dim" if name == "k" else "head_dim_v"
    if spec.dtype == "uint8":
        return _take_blocks(problem, spec, name, like, axis, extents)
    own = spec.dtype if spec.dtype in DTYPES else problem.q.dtype
    why = f"that of q; or of a quantised cache {', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
    problem.take(name, spec, like, (*extents, "heads_kv", axis), own, why)
    return own


def _take_blocks(
    problem: Problem, spec: Spec, name: str, like: str, axis: str, extents: tuple[str, str]
) -> str:
    """Which blocks the bytes of k or v are; their values become known as `axis`."""
    sizes, row = problem.sizes, f"bytes of {name}"
    problem.take(
        name, spec, like, (*extents, "heads_kv", row), "uint8", "blocks of a quantised cache"
    )
    taken = sizes.pop(row)
    found = blocks_in(taken)
    if axis in sizes:
        found = {each: dim for each, dim in found.items() if dim == sizes[axis]}
    if not found:
        of = f"of {axis} = {sizes[axis]}, " if axis in sizes else f"of {axis}, "
        raise InvalidArgument(
            f"{name}.shape[{len(spec.shape) - 1}] = {taken} bytes, expected {axis} / 32 * 34 "
            f"(q8_0) or * 18 (q4_0), {of}a multiple of 32"
        )
    form, sizes[axis] = next(iter(found.items()))
    return form


def _kind_of(name: str, spec: Spec) -> str:
    kinds = {1: "tensor" if spec.shape == (1,) else "head", 2: "batch_head", 3: "row"}
    kind = kinds.get(len(spec.shape))
    if kind is None:
        raise InvalidArgument(
            f"{name}.ndim = {len(spec.shape)}, expected 3: (entries or pages, rows, heads_kv), or "
            "1: (heads_kv) or (1)"
        )
    return kind


def _scale_strides(name: str, spec: Spec, kind: str) -> tuple[int, ...]:
    if kind == "tensor" or 0 in spec.shape:
        return (0, 0, 0, 0)
    if any(n > 1 for n in spec.shape) and not any(
        step for n, step in zip(spec.shape, spec.strides, strict=True) if n > 1
    ):  # the library would take them for contiguous
        raise InvalidArgument(
            f"the strides of {name} are all 0, expected one that is not: pass "
            f"{spec.kind.contiguous_hint.format(name)}"
        )
    if kind == "batch_head":
        return (spec.strides[0], 0, spec.strides[1], 0)
    return (*(0,) * (3 - len(spec.strides)), *spec.strides, 0)


def refuse_scales(specs: dict[str, Spec], names: Sequence[str] = ("k", "v")) -> None:
    """For those of k and v that have none."""
    for of in names:
        if f"{of}_scale" in specs:
            raise InvalidArgument(
                f"{of}_scale is given with {of}.dtype = {specs[of].dtype:.60}, expected None: "
                "scales belong to int8 and float8"
            )


# ------------------------------------------------------------------------------------ on their own


def quantize(
    x: AnyArray,
    form: Form = "int8",
    *,
    scale: Scale | AnyArray | None = "row",
    scale_dtype: Any = "float32",
    heads_kv: int | None = None,
    scale_rows: int | None = None,
    hadamard: bool = False,
    threads: int = 0,
) -> tuple[Any, Any]:
    """Keys or values as a quantised cache has them; queries, keys or values for float8 attention.

    Args:
        x: (batch, seqlen, heads, head_dim), or (pages, page_size, heads, head_dim): float32,
            bfloat16 or float16; a NumPy array, a PyTorch tensor, on a GPU too, or anything with
            DLPack.
        form: "int8", "float8_e4m3fn", "float8_e5m2", "q8_0" or "q4_0". The last two are ggml's
            blocks of 32 values with a scale each: head_dim is a multiple of 32.
        scale: which values share one: those of a "row" (of one head), "head", "batch_head" (a head
            of one sequence: what `attention` takes beside float8) or "tensor"; or an array of
            scales to use, (batch, seqlen, heads), (heads,), (batch or 1, heads) or (1,). Of blocks
            None, as "row": they have their own.
        scale_dtype: "float32" or "float16", of scales that are made; "batch_head": "float32".
        heads_kv: of scales of heads: so many of them, each shared by heads / heads_kv neighbouring
            heads, as queries share a key head. None: one for each head.
        scale_rows: of scales of rows: so many rows of a head, from a multiple of it on, share one,
            as in block-wise quantisation; the last block may be shorter. scale has it at each of
            these rows, as caches are read. None: each row has its own.
        hadamard: quantise x times the orthonormal Hadamard matrix, row by row; head_dim is a power
            of two, or a multiple of 16, whose rows are rotated in blocks of the largest power of
            two that divides it. Scores of q and k that are both rotated are what they were;
            outliers are spread over their rows or blocks, so that codes are nearer.
        threads: at most; 0: OpenMP's number (of PyTorch's tensors: PyTorch's).

    Returns:
        (codes, scale): int8 or float8 of x's shape, or uint8 with rows of
        head_dim / 32 * 34 (q8_0) or 18 (q4_0) bytes; and the scales, None for blocks. NumPy arrays,
        or tensors where x is one, beside it. A row's scale is its largest magnitude over 127
        (int8), 448 (float8_e4m3fn) or 57344 (float8_e5m2); codes are rounded to nearest, and cut.

    Raises:
        InvalidArgument: the argument, what was got and what was wanted.
        Unsupported: x is on a GPU, and no tensor of PyTorch.

    Example:
        >>> import numpy as np, strobe
        >>> x = np.random.randn(1, 100, 2, 64).astype(np.float32)
        >>> codes, scale = strobe.quantize(x)
        >>> codes.dtype, scale.shape
        (dtype('int8'), (1, 100, 2))
        >>> bool(abs(strobe.dequantize(codes, scale) - x).max() < scale.max())
        True
    """
    name = _form(form)
    x = read_once("x", x)
    spec = spec_of("x", x)
    if spec.dtype not in DTYPE_CODES:
        raise InvalidArgument(f"x.dtype = {spec.dtype:.60}, expected float32, bfloat16 or float16")
    _check_place("x", spec)
    if len(spec.shape) != 4:
        raise InvalidArgument(
            f"x.ndim = {len(spec.shape)}, expected 4: (batch, seqlen, heads, head_dim)"
        )
    x = _readable("x", x, spec)
    head_dim = spec.shape[3]
    _check_head_dim("x", spec, head_dim, name)
    tensor = is_tensor(x)
    row = (*spec.shape[:3], _row_bytes(name, head_dim))
    codes = _new(row, _array_dtype(name), tensor, spec.place)
    fields = _fields(spec, name, threads, tensor) | {"hadamard": int(flag("hadamard", hadamard))}
    fields |= {"x": _address(x), "x_strides": _strides4(spec)}
    heads = spec.shape[2] if heads_kv is None else integer("heads_kv", heads_kv)
    if heads_kv is not None:
        if not 1 <= heads <= max(spec.shape[2], 1) or spec.shape[2] % heads:
            raise InvalidArgument(
                f"heads_kv = {heads}, expected a divisor of x.shape[2] = {spec.shape[2]} (heads)"
            )
        fields["heads_kv"] = heads
    if scale_rows is not None:
        fields["scale_rows"] = integer("scale_rows", scale_rows, 32)
        if fields["scale_rows"] < 1:
            raise InvalidArgument(f"scale_rows = {shown(scale_rows)}, expected at least 1")
        if name in BLOCKS or not (isinstance(scale, str) and scale == "row"):
            raise InvalidArgument(
                f"scale_rows = {shown(scale_rows)} with form = {name!r} and scale = "
                f'{shown(scale)}, expected None, or scales of rows that are made: scale = "row"'
            )
    scales: Any = None
    if name in BLOCKS:
        if scale is not None and not (isinstance(scale, str) and scale == "row"):
            raise InvalidArgument(
                f"scale = {shown(scale)} with form = {name!r}, expected None: its blocks have "
                "their own"
            )
    elif scale is None or isinstance(scale, (str, int, float)):
        if scale not in KINDS:
            raise InvalidArgument(
                f'scale = {shown(scale)}, expected "row", "head", "batch_head" or "tensor", or an '
                "array"
            )
        dtype = dtype_name(scale_dtype, "scale_dtype")
        if dtype not in ("float32", "float16"):
            raise InvalidArgument(f"scale_dtype = {dtype:.60}, expected float32 or float16")
        if scale == "batch_head" and dtype != "float32":
            raise InvalidArgument(
                f'scale_dtype = {dtype:.60} with scale = "batch_head", expected float32'
            )
        if heads_kv is not None and scale not in ("head", "batch_head"):
            raise InvalidArgument(
                f'heads_kv = {heads} with scale = "{scale}", expected None, or scales of heads: '
                '"head" or "batch_head"'
            )
        shape = _scale_shapes(spec.shape, heads)[scale]
        scales = _new(shape, dtype, tensor, spec.place)
        if 0 in spec.shape:
            scales[...] = 0  # of no values: the library writes nothing
        fields |= {"kv_scale": KINDS[scale], "kv_scale_dtype": DTYPE_CODES[dtype]}
        fields["scale"] = _address(scales)
    else:
        shapes = _scale_shapes(spec.shape, heads)
        scales = _give_scale(fields, scale, shapes, spec.place, f"x.shape = {shown(spec.shape)}")
    fields["codes"] = _address(codes)
    _core.quantize(False, fields)
    return codes, scales


def dequantize(
    codes: AnyArray,
    scale: AnyArray | None = None,
    *,
    form: Form | None = None,
    dtype: Any = "float32",
    hadamard: bool = False,
    threads: int = 0,
) -> Any:
    """The values that codes and their scales stand for.

    Args:
        codes: (batch, seqlen, heads, head_dim) of int8 or float8, or of uint8: blocks of q8_0 or
            q4_0. On a GPU: of PyTorch.
        scale: (batch, seqlen, heads), (batch or 1, heads), (heads,) or (1,), float32 or float16;
            None for blocks. Of fewer heads than codes have: each is shared by as many neighbours.
        form: of uint8 "q8_0" or "q4_0", else None.
        dtype: "float32", "bfloat16" or "float16", of the result.
        hadamard: rotate back what was rotated: the matrix is its own inverse.
        threads: as in `quantize`.

    Returns:
        A new array, (batch, seqlen, heads, head_dim), NumPy's or PyTorch's as codes is, beside it.
        Where a scale is not finite its values are NaN.

    Raises:
        InvalidArgument: the argument, what was got and what was wanted.
        Unsupported: codes are on a GPU, and no tensor of PyTorch.

    Example:
        >>> import numpy as np, strobe
        >>> x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 1, 1, 64)
        >>> blocks, _ = strobe.quantize(x, "q8_0")
        >>> bool(abs(strobe.dequantize(blocks, form="q8_0") - x).max() < 0.005)
        True
    """
    codes = read_once("codes", codes)
    spec = spec_of("codes", codes)
    _check_place("codes", spec)
    if len(spec.shape) != 4:
        raise InvalidArgument(
            f"codes.ndim = {len(spec.shape)}, expected 4: (batch, seqlen, heads, bytes of a row)"
        )
    if spec.dtype not in DTYPES:
        raise InvalidArgument(
            f"codes.dtype = {spec.dtype:.60}, expected int8, float8_e4m3fn, float8_e5m2 or uint8"
        )
    name = spec.dtype
    if name == "uint8":
        if not isinstance(form, str) or form not in BLOCKS:
            raise InvalidArgument(
                f'form = {shown(form)} with codes.dtype = uint8, expected "q8_0" or "q4_0"'
            )
        name = form
    elif form is not None and _form(form) != name:
        raise InvalidArgument(f"form = {shown(form)} with codes.dtype = {name}, expected None")
    codes = _readable("codes", codes, spec)
    row, tensor = spec.shape[3], is_tensor(codes)
    if name in BLOCKS and (row == 0 or row % BLOCKS[name] != 0):
        raise InvalidArgument(
            f"codes.shape[3] = {row} bytes, expected a multiple of {BLOCKS[name]} ({name})"
        )
    head_dim = row // BLOCKS[name] * 32 if name in BLOCKS else row
    _check_head_dim("codes", spec, head_dim, name)
    result_dtype = dtype_name(dtype, "dtype")
    shape = (*spec.shape[:3], head_dim)
    result = _new(shape, result_dtype, tensor, spec.place)
    like = Spec(
        spec.kind, shape, contiguous_strides(shape), result_dtype, spec.device, spec.device_index
    )
    fields = _fields(like, name, threads, tensor) | {"hadamard": int(flag("hadamard", hadamard))}
    fields |= {"codes": _address(codes), "codes_strides": _strides4(spec), "x": _address(result)}
    if name in BLOCKS:
        if scale is not None:
            raise InvalidArgument(f"scale is given with form = {name!r}, expected None")
    elif scale is None:
        raise InvalidArgument(f"scale = None with codes.dtype = {name}, expected an array")
    else:
        # (Which lives until the end.)
        shapes, of = _scale_shapes(shape, shape[2]), f"codes.shape = {shown(spec.shape)}"
        scale = _give_scale(fields, scale, shapes, spec.place, of, True)
    _core.quantize(True, fields)
    return result


def _form(form: Any) -> str:
    name = _SYNONYMS.get(form, form) if isinstance(form, str) else form
    if not isinstance(name, str) or name not in FORMS:
        raise InvalidArgument(
            f'form = {shown(form)}, expected "int8", "float8_e4m3fn", "float8_e5m2", "q8_0" or '
            '"q4_0"'
        )
    return name


def _check_place(name: str, spec: Spec) -> None:
    if spec.device != "cpu" and spec.kind is not TORCH:
        raise Unsupported(
            f"{name} is on {spec.place}, expected cpu, or a PyTorch tensor: the stream and the "
            "allocator are PyTorch's on GPUs"
        )


def _readable(name: str, array: Any, spec: Spec) -> Any:
    """`array`, with a contiguous last dimension, as what has an address."""
    if spec.shape[-1] > 1 and spec.strides[-1] != 1 and 0 not in spec.shape:
        stride = spec.kind.stride_hint.format(name, len(spec.shape) - 1)
        raise InvalidArgument(
            f"{stride} = {spec.strides[-1]} elements, expected 1 (last dimension contiguous): "
            f"pass {spec.kind.contiguous_hint.format(name)}"
        )
    if spec.kind not in (NUMPY, TORCH):
        raise InvalidArgument(f"{name} has no memory, expected an array with data")
    if is_tensor(array):
        check_readable(name, array)
    return array


def _check_head_dim(name: str, spec: Spec, head_dim: int, form: str) -> None:
    """head_dim: that of the values, which codes in blocks have other extents than."""
    got = f"{name}.shape[3] (head_dim) = {head_dim}"
    if head_dim != spec.shape[3]:
        got = f"{name}.shape[3] = {spec.shape[3]} bytes, of head_dim = {head_dim}"
    if not 1 <= head_dim <= 256:
        raise InvalidArgument(f"{got}, expected 1 to 256")
    if form in BLOCKS and head_dim % 32:
        raise InvalidArgument(f"{got} with form = {form!r}, expected a multiple of 32")


def _row_bytes(form: str, head_dim: int) -> int:
    return head_dim // 32 * BLOCKS[form] if form in BLOCKS else head_dim


def _array_dtype(form: str) -> str:
    return "uint8" if form in BLOCKS else form


def _new(shape: tuple[int, ...], dtype: str, tensor: bool, place: str) -> Any:
    if tensor:
        return new_tensor(shape, getattr(sys.modules["torch"], dtype), place)
    if dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        try:
            import ml_dtypes
        except ImportError:
            raise InvalidArgument(
                f"{dtype} as a NumPy array needs the package ml_dtypes (pip install ml_dtypes); or "
                "pass PyTorch tensors"
            ) from None
        return np.empty(shape, getattr(ml_dtypes, dtype))
    return np.empty(shape, dtype)


def _address(array: Any) -> int:
    return int(array.data_ptr() if is_tensor(array) else array.ctypes.data)


def _strides4(spec: Spec) -> tuple[int, ...]:
    return (0, 0, 0, 0) if 0 in spec.shape else (*spec.strides[:3], 1)


def _fields(x: Spec, form: str, threads: int, tensor: bool) -> dict[str, Any]:
    most = integer("threads", threads, 32)
    if most == 0 and tensor:
        most = sys.modules["torch"].get_num_threads()
    names = ("batch", "seqlen", "heads", "head_dim")
    fields: dict[str, Any] = dict(zip(names, x.shape, strict=True))
    fields |= {"dtype": DTYPE_CODES[x.dtype], "kv_dtype": FORMS[form], "threads": most}
    if x.device == "cpu":
        return fields
    stream = torch_stream(x.device_index)
    return fields | {"device": 1, "device_index": x.device_index, "stream": stream}


def _scale_shapes(shape: tuple[int, ...], heads: int) -> dict[str, tuple[int, ...]]:
    """Of the scales of a tensor, by kind. heads: those that scales of heads are of."""
    batch_head = (shape[0], heads)
    return {"row": shape[:3], "head": (heads,), "batch_head": batch_head, "tensor": (1,)}


def _give_scale(
    fields: dict[str, Any],
    scale: Any,
    shapes: dict[str, tuple[int, ...]],
    place: str,
    scaled: str,
    shared: bool = False,
) -> Any:
    """Scales that the caller has, as they are read. scaled: what they belong to, in words. shared:
    there may be fewer of them than heads, which divide these.
    """
    scale = read_once("scale", scale)
    spec = spec_of("scale", scale)
    if spec.kind not in (NUMPY, TORCH):
        raise InvalidArgument("scale has no memory, expected an array with data")
    if spec.shape and not any(spec.strides):  # one for all, as float8 attention takes it
        scale = scale.contiguous() if is_tensor(scale) else np.ascontiguousarray(scale)
        spec = spec_of("scale", scale)
    if is_tensor(scale):
        check_readable("scale", scale)
    if spec.place != place:
        raise InvalidArgument(f"scale is on {spec.place}, expected {place}, as what it scales")
    if spec.dtype not in ("float32", "float16"):
        raise InvalidArgument(f"scale.dtype = {spec.dtype:.60}, expected float32 or float16")
    kind, first = _kind_of("scale", spec), spec.shape[:1]
    if kind == "batch_head" and spec.dtype != "float32":
        raise InvalidArgument(
            f"scale.dtype = {spec.dtype:.60} with scales of (batch, heads), expected float32"
        )
    one_for_all = kind == "batch_head" and first == (1,)
    if one_for_all:  # sequences have the same scales of heads
        kind, spec = "head", replace(spec, shape=spec.shape[1:], strides=spec.strides[1:])
    wanted = shapes[kind]
    of_heads = shared and kind in ("head", "batch_head") and spec.shape[-1] > 0
    if of_heads and wanted[-1] % spec.shape[-1] == 0:
        fields["heads_kv"] = spec.shape[-1]
        wanted = (*wanted[:-1], spec.shape[-1])
    if spec.shape != wanted:
        got, wanted = ((*first, *x) if one_for_all else x for x in (spec.shape, wanted))
        raise InvalidArgument(f"scale.shape = {shown(got)} with {scaled}, expected {shown(wanted)}")
    strides = _scale_strides("scale", spec, kind)
    fields |= {"kv_scale": KINDS[kind], "kv_scale_dtype": DTYPE_CODES[spec.dtype]}
    fields |= {"scale": _address(scale), "scale_strides": strides, "scale_is_given": 1}
    return scale
