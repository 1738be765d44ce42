"""The merging of partial results, for arrays of every kind."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from . import _core
from ._arrays import spec_of
from ._errors import InvalidArgument, renamed, shown
from ._plans import allocator
from ._problem import DTYPE_CODES, Problem, axes_of

__all__ = ["merge"]


def merge(
    outs: Any, lses: Any, *, out: Any = None, out_dtype: Any = None, threads: int = 0
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
        out: where to write the result, writable, not tracked by autograd and apart from outs and
            lses; None: a new contiguous array.
        out_dtype: "float32" (None), "bfloat16" or "float16", of a new array.
        threads: CPU threads at most; 0: OpenMP's number.

    Returns:
        (out, lse): lse = log(sum of exp(lses)), out = sum of exp(lses - lse) * outs, which lies
        between the smallest and the largest value of the parts. A row without keys in all parts has
        out 0 and lse -inf.

    Raises:
        InvalidArgument: as `attention`.
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    x, y = spec_of("outs", outs), spec_of("lses", lses)
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
    if out is None:
        name = "float32" if out_dtype is None else dtype_name(out_dtype)
        out = _made(allocator(problem.shape("out"), name, x))
    else:
        z = spec_of("out", out)
        if z.dtype not in DTYPE_CODES:
            raise InvalidArgument(
                f"out.dtype = {z.dtype:.60}, expected float32, bfloat16 or float16"
            )
        problem.take("out", z, "outs", dtype=z.dtype)
    lse = _made(allocator(problem.shape("lse"), "float32", x))
    try:
        _core.merge(outs, lses, out, lse, threads)
    except InvalidArgument as error:
        raise InvalidArgument(renamed(str(error), problem.found)) from None
    return out, lse


def _made(allocation: Any) -> Any:
    function, arguments, *keywords = allocation
    return function(*arguments, **(keywords[0] if keywords else {}))


def _stacked(name: str, parts: Any) -> Any:
    """One array of a list of parts."""
    if not isinstance(parts, list | tuple):
        return parts
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
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(parts[0], torch.Tensor):
        return torch.stack(tuple(parts))
    return np.stack([np.asarray(part) for part in parts])


def dtype_name(dtype: Any) -> str:
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
            f'out_dtype = {shown(dtype)}, expected "float32", "bfloat16" or "float16"'
        )
    return name
