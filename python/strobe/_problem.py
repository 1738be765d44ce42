"""From the arguments of a call to a problem: the fields of strobe_problem, and every check that
needs more than one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from . import _checks
from ._arrays import Spec, spec_of
from ._checks import DTYPE_CODES
from ._errors import InvalidArgument, shown
from ._options import ARRAYS
from ._values import flag, integer, real

DENSE_Q: Final = ("batch", "seqlen_q", "heads", "head_dim")
DENSE_K: Final = ("batch", "seqlen_k", "heads_kv", "head_dim")
DENSE_V: Final = ("batch", "seqlen_k", "heads_kv", "head_dim_v")
VARLEN_Q: Final = ("total_q", "heads", "head_dim")
VARLEN_K: Final = ("total_k", "heads_kv", "head_dim")
VARLEN_V: Final = ("total_k", "heads_kv", "head_dim_v")

# strobe_alibi of include/strobe/strobe.h
_ALIBI_PER_HEAD: Final = 1
_ALIBI_PER_BATCH_HEAD: Final = 2


# --------------------------------------------------------------------------------- problem and plan


def _strides(spec: Spec) -> tuple[int, ...]:
    """Of one tensor. An empty one keeps zeros: contiguous."""
    if 0 in spec.shape:
        return (0, 0, 0, 0)
    last = 1 if spec.shape[-1] == 1 else spec.strides[-1]  # an axis of one element has no step
    return (*(0,) * (4 - len(spec.strides)), *spec.strides[:-1], last)


@dataclass(slots=True)
class Shapes:
    """What `make_problem` found, for the checks of the tensors that come after q, k and v."""

    problem: dict[str, Any]  # the fields of strobe_problem
    q: Spec
    out_shape: tuple[int, ...]
    out_axes: tuple[str, ...]
    lse_shape: tuple[int, ...]
    lse_axes: tuple[str, ...]
    tensors: dict[str, Spec]  # those that have strides in the problem


def make_problem(backward: bool, arrays: dict[str, Any], options: dict[str, Any]) -> Shapes:
    """Arrays and options, by the names that messages use, as a strobe_problem.

    Raises InvalidArgument for what only Python can see: that shapes, dtypes or devices of several
    tensors contradict each other. The library checks the rest.
    """
    q, k, v = (spec_of(name, arrays[name]) for name in "qkv")
    cu_seqlens_q, cu_seqlens_k, alibi_slopes = (
        spec_of(name, arrays[name]) if arrays.get(name) is not None else None
        for name in ("cu_seqlens_q", "cu_seqlens_k", "alibi_slopes")
    )
    problem: dict[str, Any] = {"direction": int(backward)}
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    q_axes, k_axes, v_axes = (
        (VARLEN_Q, VARLEN_K, VARLEN_V) if varlen else (DENSE_Q, DENSE_K, DENSE_V)
    )
    for name, spec, axes in (("q", q, q_axes), ("k", k, k_axes), ("v", v, v_axes)):
        _checks.check_ndim(name, spec, axes)
    _checks.check_float("q", q)
    for name, spec in (("k", k), ("v", v)):
        _checks.check_dtype(name, spec, "that of q", q.dtype)
        _checks.check_place(name, spec, "q", q)
    problem["dtype"] = DTYPE_CODES[q.dtype]
    problem["device"] = int(q.device == "cuda")
    problem["device_index"] = q.device_index

    heads, head_dim = q.shape[-2:]
    lse_shape: tuple[int, ...]
    lse_axes: tuple[str, ...]
    heads_kv, head_dim_v = v.shape[-2:]
    if varlen:
        batch = _batch_of(q, cu_seqlens_q, cu_seqlens_k)
        _checks.check_shape("k", k, (k.shape[0], k.shape[1], head_dim), k_axes, "q")
        _checks.check_shape("v", v, (*k.shape[:2], head_dim_v), v_axes, "k")
        problem |= {"varlen": 1, "total_q": q.shape[0], "total_k": k.shape[0]}
        seqlen_q = integer("max_seqlen_q", options["max_seqlen_q"])
        seqlen_k = integer("max_seqlen_k", options["max_seqlen_k"])
        lse_shape, lse_axes = (heads, q.shape[0]), ("heads", "total_q")
    else:
        for name in ("max_seqlen_q", "max_seqlen_k"):
            if options[name] is not None:
                raise InvalidArgument(
                    f"{name} = {shown(options[name])}, expected None: "
                    "it belongs to cu_seqlens_q and cu_seqlens_k"
                )
        batch = q.shape[0]
        _checks.check_shape("k", k, (batch, k.shape[1], k.shape[2], head_dim), k_axes, "q")
        _checks.check_shape("v", v, (*k.shape[:3], head_dim_v), v_axes, "k")
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        lse_shape, lse_axes = (batch, heads, q.shape[1]), ("batch", "heads", "seqlen_q")
    # The library reads 0 in these two as "not given"; here they are given.
    if heads_kv == 0 and heads != 0:
        raise InvalidArgument(f"k.shape[{len(k.shape) - 2}] = 0, expected at least 1 (heads_kv)")
    if head_dim_v == 0 and head_dim != 0:
        raise InvalidArgument(f"v.shape[{len(v.shape) - 1}] = 0, expected 1 to 256 (head_dim_v)")
    problem |= {
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "heads": heads,
        "heads_kv": heads_kv,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "causal": flag("causal", options["causal"]),
        "window_left": integer("window[0]", options["window_left"]),
        "window_right": integer("window[1]", options["window_right"]),
        "softcap": real("softcap", options["softcap"]),
        "dropout_p": real("dropout_p", options["dropout_p"]),
        "deterministic": flag("deterministic", options["deterministic"]),
        "batch_invariant": flag("batch_invariant", options["batch_invariant"]),
        "threads": integer("threads", options["threads"], 32),
        **dict(options["scalars"] or ()),
    }
    if options["scale"] is not None:
        problem["scale"] = real("scale", options["scale"])
    if alibi_slopes is not None:
        problem["alibi"] = _alibi(alibi_slopes, q, batch, heads)
    for name in ARRAYS:
        if arrays.get(name) is not None:
            _check_numbers(name, spec_of(name, arrays[name]), q, batch)
            problem[f"has_{name}"] = 1
    for name, spec in (("q", q), ("k", k), ("v", v)):
        _checks.check_last_contiguous(name, spec)
        problem[name] = _strides(spec)
    out_shape = (*q.shape[:-1], head_dim_v)
    return Shapes(
        problem,
        q,
        out_shape,
        (*q_axes[:-1], "head_dim_v"),
        lse_shape,
        lse_axes,
        {"q": q, "k": k, "v": v},
    )


def check_cu_seqlens(name: str, spec: Spec) -> None:
    _checks.check_ndim(name, spec, ("batch + 1",))
    _checks.check_dtype(name, spec, "cumulative lengths", "int32")
    _checks.check_contiguous(name, spec)
    if spec.shape[0] < 2:
        raise InvalidArgument(f"{name}.shape[0] = {spec.shape[0]}, expected at least 2 (batch + 1)")


def _batch_of(q: Spec, cu_seqlens_q: Spec | None, cu_seqlens_k: Spec | None) -> int:
    """The batch size that both arrays of cumulative lengths agree on."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing, given = ("q", "k") if cu_seqlens_q is None else ("k", "q")
        raise InvalidArgument(
            f"cu_seqlens_{missing} = None, expected an array, as cu_seqlens_{given} is given"
        )
    for name, spec in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_cu_seqlens(name, spec)
        _checks.check_place(name, spec, "q", q)
    _checks.check_shape(
        "cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, ("batch + 1",), "cu_seqlens_q"
    )
    return cu_seqlens_q.shape[0] - 1


def _check_numbers(name: str, spec: Spec, q: Spec, batch: int) -> None:
    """An array of one number for each sequence."""
    _checks.check_ndim(name, spec, ("batch",))
    _checks.check_dtype(name, spec, "one number for each sequence", "int32")
    _checks.check_place(name, spec, "q", q)
    of = "q" if len(q.shape) == 4 else "cu_seqlens_q"
    _checks.check_shape(name, spec, (batch,), ("batch",), of)
    _checks.check_contiguous(name, spec)


def _alibi(spec: Spec, q: Spec, batch: int, heads: int) -> int:
    name = "alibi_slopes"
    _checks.check_dtype(name, spec, "whatever the dtype of q", "float32")
    _checks.check_place(name, spec, "q", q)
    if len(spec.shape) == 1:
        _checks.check_shape(name, spec, (heads,), ("heads",), "q")
        kind = _ALIBI_PER_HEAD
    elif len(spec.shape) == 2:
        _checks.check_shape(name, spec, (batch, heads), ("batch", "heads"), "q")
        kind = _ALIBI_PER_BATCH_HEAD
    else:
        raise InvalidArgument(
            f"{name}.ndim = {len(spec.shape)}, expected 1: (heads) or 2: (batch, heads)"
        )
    _checks.check_contiguous(name, spec)
    return kind


def check_like_out(name: str, spec: Spec, shapes: Shapes) -> None:
    """Checks out or dout and sets its strides."""
    _checks.check_shape(name, spec, shapes.out_shape, shapes.out_axes, "q and v")
    check_tensor(name, spec, shapes)


def check_tensor(name: str, spec: Spec, shapes: Shapes) -> None:
    _checks.check_dtype(name, spec, "that of q", shapes.q.dtype)
    _checks.check_place(name, spec, "q", shapes.q)
    _checks.check_last_contiguous(name, spec)
    shapes.problem[name] = _strides(spec)
    shapes.tensors[name] = spec


def check_like_lse(name: str, spec: Spec, shapes: Shapes) -> None:
    _checks.check_shape(name, spec, shapes.lse_shape, shapes.lse_axes, "q")
    _checks.check_dtype(name, spec, "whatever the dtype of q", "float32")
    _checks.check_place(name, spec, "q", shapes.q)
    _checks.check_contiguous(name, spec)
