"""The merging of partial results, for arrays of every kind."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import numpy as np

from . import _arrays, _core
from ._arrays import AnyArray, NDArray, Spec, spec_of
from ._errors import Error, InvalidArgument, error_for_status, renamed, shown
from ._plans import Allocator, allocator
from ._problem import DTYPE_CODES, Problem, axes_of, take_sinks

__all__ = ["merge"]


if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike

    from ._arrays import Tensor

    DType: TypeAlias = DTypeLike | torch.dtype | None


@overload
def merge(
    outs: NDArray | Sequence[NDArray],
    lses: NDArray | Sequence[NDArray],
    *,
    sinks: NDArray | None = ...,
    out: NDArray | None = ...,
    lse: NDArray | None = ...,
    out_dtype: DType = ...,
    threads: int = ...,
) -> tuple[NDArray, NDArray]: ...


@overload
def merge(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    sinks: Tensor | None = ...,
    out: Tensor | None = ...,
    lse: Tensor | None = ...,
    out_dtype: DType = ...,
    threads: int = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def merge(
    outs: AnyArray | Sequence[AnyArray],
    lses: AnyArray | Sequence[AnyArray],
    *,
    sinks: AnyArray | None = ...,
    out: AnyArray | None = ...,
    lse: AnyArray | None = ...,
    out_dtype: DType = ...,
    threads: int = ...,
) -> tuple[Any, Any]: ...


def merge(
    outs: AnyArray | Sequence[AnyArray],
    lses: AnyArray | Sequence[AnyArray],
    *,
    sinks: AnyArray | None = None,
    out: AnyArray | None = None,
    lse: AnyArray | None = None,
    out_dtype: DType = None,
    threads: int = 0,
) -> tuple[Any, Any]:
    """Joins partial results of attention whose keys were divided into parts.

    With it, what sequences share is attended to once (`attention_with_kvcache` with out_dtype
    "float32" and return_lse=True gives such parts), and keys may lie on several machines.

    Args:
        outs: float32, (parts, batch, seqlen_q, heads, head_dim_v), or packed
            (parts, total_q, heads, head_dim_v), head_dim_v up to 512; or a list or tuple of the
            parts.
        lses: float32, (parts, batch, heads, seqlen_q), or (parts, heads, total_q); or a list. A row
            without keys in a part has lse -inf there, or +inf as flash_attn 2 reports it; what its
            outs hold does not count then.
        sinks: float32, (heads,): attention sinks, one more term exp(sink) of each row's sum. The
            parts are computed without, so that they enter once.
        out, lse: where to write the results, writable, not tracked by autograd and apart from each
            other, outs and lses; None: new contiguous arrays. A float32 out may be one of the parts
            of outs, as outs[0] is, and lse one of lses: the part is then replaced by the whole.
        out_dtype: "float32" (None), "bfloat16" or "float16", of a new array. Of NumPy's, "bfloat16"
            needs the package ml_dtypes imported.
        threads: CPU threads at most; 0: OpenMP's number.

    Returns:
        (out, lse): lse = log(sum of exp(lses)), out = sum of exp(lses - lse) * outs, which lies
        between the smallest and the largest value of the parts. A row without keys in all parts has
        out 0 and lse -inf. With sinks, exp(sink) is in lse, and takes its part of the weight.

    Raises:
        InvalidArgument: as `attention`.

    Example:
        Two halves of the keys, one after the other:

        >>> import numpy as np, strobe
        >>> q, k, v = np.random.randn(3, 1, 64, 2, 32).astype(np.float32)
        >>> first = strobe.attention(q, k[:, :32], v[:, :32], return_lse=True)
        >>> second = strobe.attention(q, k[:, 32:], v[:, 32:], return_lse=True)
        >>> out, lse = strobe.merge([first[0], second[0]], [first[1], second[1]])
        >>> bool(np.allclose(out, strobe.attention(q, k, v), atol=1e-5))
        True
    """
    dtype = "float32" if out_dtype is None else dtype_name(out_dtype)
    result: tuple[Any, Any] = _core.merge(outs, lses, sinks, out, lse, dtype, threads)
    return result


# What `_core` asks for, in the order in which it does.


def stacked(name: str, parts: Any) -> Any:
    """One array of a list or tuple of parts."""
    parts = [_arrays.read_once(f"{name}[{n}]", part) for n, part in enumerate(parts)]
    if not parts:
        raise InvalidArgument(f"{name} is empty, expected at least one part")
    specs = [spec_of(f"{name}[{n}]", part) for n, part in enumerate(parts)]
    axes = tuple(f"axis {n}" for n in range(len(specs[0].shape)))
    problem = Problem({}, False, specs[0], first=f"{name}[0]")
    kind = type(parts[0])
    for n, spec in enumerate(specs):
        if spec.kind is not specs[0].kind:
            got = type(parts[n])
            raise InvalidArgument(
                f"{name}[{n}] is a {got.__module__}.{got.__name__}, expected a {kind.__module__}."
                f"{kind.__name__} as {name}[0]"
            )
        problem.check(f"{name}[{n}]", spec, axes, f"{name}[0]", "float32", "partial results")
    # The result is read and checked as any other array.
    if specs[0].kind is _arrays.TORCH:
        return sys.modules["torch"].stack(parts)
    return np.stack([_arrays.plain_array(part) for part in parts])


def make(
    specs: dict[str, Spec], out_dtype: str
) -> tuple[Allocator | None, Allocator | None, dict[str, str]]:
    """Checks outs, lses, and sinks, out and lse, if they are given. What makes out and lse, where
    they are not; and what the library's messages call things, as the caller knows them.
    """
    x, y, z = specs["outs"], specs["lses"], specs.get("out")
    if len(x.shape) not in (4, 5):
        raise InvalidArgument(
            f"outs.ndim = {len(x.shape)}, expected 5: (parts, batch, seqlen_q, heads, head_dim_v) "
            "or 4: (parts, total_q, heads, head_dim_v)"
        )
    packed = len(x.shape) == 4
    if len(y.shape) != len(x.shape) - 1:
        raise InvalidArgument(
            f"lses.ndim = {len(y.shape)}, expected outs.ndim - 1 = {len(x.shape) - 1}"
        )
    problem = Problem({}, packed, x, first="outs")
    partial = "partial results"
    problem.take("outs", x, "", ("parts", *axes_of("out", packed)), "float32", partial)
    problem.check("lses", y, ("parts", *axes_of("lse", packed)), "outs", "float32", partial)
    for name, spec in (("outs", x), ("lses", y)):
        if spec.shape[0] > 1 and spec.strides[0] == 0 and 0 not in spec.shape:
            raise InvalidArgument(
                f"{spec.kind.stride_hint.format(name, 0)} = 0, expected another stride: parts that "
                "are one and the same"
            )
    if "sinks" in specs:
        take_sinks(problem, specs["sinks"], "outs")
    if z is not None:
        if z.dtype not in DTYPE_CODES:
            raise InvalidArgument(
                f"out.dtype = {z.dtype:.60}, expected float32, bfloat16 or float16"
            )
        problem.take("out", z, "outs", dtype=z.dtype)
    if "lse" in specs:
        problem.check("lse", specs["lse"], axes_of("lse", packed), "outs", "float32", partial)
    made = allocator(problem.shape("out"), out_dtype, x) if z is None else None
    of_lse = None if "lse" in specs else allocator(problem.shape("lse"), "float32", x)
    return made, of_lse, problem.found


def launch_error(status: int, text: str, names: dict[str, str]) -> Error:
    """For a merge that the library refused."""
    error = error_for_status(status, text)
    return InvalidArgument(renamed(text, names)) if isinstance(error, InvalidArgument) else error


def is_float(name: str, dtype: Any) -> bool:
    """Whether a dtype of results, which may be None for q's, is float32: the only other choice."""
    if dtype is None:
        return False
    if dtype_name(dtype, name) != "float32":
        raise InvalidArgument(f'{name} = {shown(dtype)}, expected None or "float32"')
    return True


def dtype_name(dtype: Any, called: str = "out_dtype") -> str:
    """Of a name, or of a dtype of NumPy's or PyTorch's."""
    name = dtype
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        name = dtype.__name__
    elif isinstance(dtype, np.dtype):
        name = dtype.name
    elif type(dtype).__module__ == "torch" and type(dtype).__name__ == "dtype":
        name = str(dtype).removeprefix("torch.")
    if not isinstance(name, str) or name not in DTYPE_CODES:
        raise InvalidArgument(
            f'{called} = {shown(dtype)}, expected "float32", "bfloat16" or "float16"'
        )
    return name
