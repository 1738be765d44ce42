"""XLA's calls of the library: their targets, shapes and results, and their transformations (grad,
vmap, shard_map).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import Error, Unsupported, _core, info
from ._options import ARRAYS
from ._problem import DTYPE_CODES, mask_fields

try:
    from jax.custom_batching import custom_vmap
    from jax.custom_derivatives import SymbolicZero
    from jax.ffi import ffi_call, register_ffi_target
except ImportError:
    raise ImportError(f"strobe.jax: jax {jax.__version__}, expected 0.6 or newer") from None

# Forward, backward; on the CPU, on CUDA.
_TARGETS: Final = ("strobe_attention_forward", "strobe_attention_backward")
for _index, _handler in enumerate(_core.xla_handlers()):
    register_ffi_target(_TARGETS[_index % 2], _handler, platform=("cpu", "CUDA")[_index // 2])

# The arrays of a call besides its tensors, in the order in which the handlers take them.
_MORE: Final = ("alibi_slopes", *ARRAYS, "sinks", "mask", "bias", "dropout_seed")
# Those that stand for all sequences, and those that have a gradient.
_OF_ALL: Final = ("sinks", "mask")
_LEARNED: Final = ("sinks", "bias")


class Call(NamedTuple):
    """What is known of a call when it is traced, besides shapes and dtypes."""

    options: tuple[tuple[str, Any], ...]  # fields of strobe_problem, where they have no default
    deterministic: bool
    return_lse: bool
    mask_layout: int = 0  # _problem.mask_layout


@functools.lru_cache(1024)
def _workspace(
    backward: bool, dtype: str, shapes: Any, options: tuple[tuple[str, Any], ...]
) -> int:
    """Bytes that a launch may need on a GPU of this machine. XLA is to give them as a result of the
    call, so that CUDA graphs can be made of it.
    """
    q, k, v = shapes
    names = ("batch", "seqlen_q", "heads", "head_dim", "seqlen_k", "heads_kv", "head_dim_v")
    fields = dict(zip(names, (*q, k[1], k[2], v[3]), strict=True)) | dict(options)
    fields |= {"direction": int(backward), "dtype": DTYPE_CODES[dtype], "device": 1}
    most = 0
    for device in range(len(info().cuda_devices)):
        try:
            made = _core.make_plan(fields | {"device_index": device})
            most = max(most, _core.workspace_bytes(made))
        except Error:
            continue  # should there be a launch on that device, it says why it cannot be
    return most


def _axes(x: Any) -> frozenset[str]:
    """Over which axes of shard_map an array varies, as jax 0.10, and as 0.7 to 0.9 say it."""
    kind: Any = jax.typeof(x) if hasattr(jax, "typeof") else None
    if hasattr(kind, "manual_axis_type"):
        return frozenset(kind.manual_axis_type.varying)
    return frozenset(getattr(kind, "vma", ()))


def alike(arrays: dict[str, Any]) -> dict[str, Any]:
    """`arrays`, each of which varies over all axes that one of them does, as ffi_call wants it."""
    every = frozenset().union(*map(_axes, arrays.values()))
    cast = getattr(jax.lax, "pcast", None) or (lambda x, axes, to: jax.lax.pvary(x, axes))
    missing = {name: tuple(sorted(every - _axes(x))) for name, x in arrays.items()}
    return {
        name: cast(x, missing[name], to="varying") if missing[name] else x
        for name, x in arrays.items()
    }


def _structs(like: Any, results: Sequence[tuple[tuple[int, ...], Any]]) -> Any:
    """What ffi_call is told of its results: in shard_map they vary as `like` does."""
    if not _axes(like):
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]

    def spread(x: Any) -> Any:
        return [jnp.broadcast_to(x.sum().astype(dtype), shape) for shape, dtype in results]

    return jax.eval_shape(spread, like)


def _launch(
    call: Call,
    backward: bool,
    own: Sequence[Any],
    more: dict[str, Any],
    wanted: Sequence[str] = (),
) -> Any:
    """Out and with return_lse lse, (batch, heads, seqlen_q); or dq, dk and dv, and the gradients
    of `wanted`, which are of _LEARNED in its order.

    own: (q, k, v), or (dout, q, k, v, out, lse) and dlse if there is one. more: of _MORE, by name.
    """
    names: list[str] = [name for name in _MORE if name in more]
    first = int(backward)  # of q, k and v

    def launch(*arrays: Any) -> Sequence[Any]:
        q, k, v = arrays[first : first + 3]
        options = dict(call.options) | {f"has_{name}": 1 for name in names if name in ARRAYS}
        if "alibi_slopes" in names:
            options["alibi"] = arrays[len(own)].ndim
        if "sinks" in names:
            options["has_sinks"] = 1
        if "mask" in names:
            options |= mask_fields(call.mask_layout, q.shape[0], q.shape[2], False)
        if "bias" in names:
            bias = arrays[len(own) + names.index("bias")]
            options |= {"has_bias": 1, "bias_dtype": DTYPE_CODES[bias.dtype.name]}
            extents = ("bias_batch", "bias_heads", "bias_seqlen_q")
            options |= dict(zip(extents, bias.shape[:3], strict=True))
        if backward:
            options |= {"deterministic": int(call.deterministic), "has_dlse": len(own) - 6}
            options |= {f"has_d{name}": 1 for name in wanted}
            learned = [arrays[len(own) + names.index(name)] for name in wanted]
            results = [(x.shape, x.dtype) for x in (q, k, v, *learned)]
        else:
            results = [((*q.shape[:3], v.shape[3]), q.dtype)]
            if call.return_lse:
                results.append(((q.shape[0], q.shape[2], q.shape[1]), jnp.float32))
        if q.shape[0] == 0:  # nothing to launch; in shard_map they vary as q does
            return tuple(jnp.broadcast_to(q.sum().astype(x), shape) for shape, x in results)
        shapes = (q.shape, k.shape, v.shape)
        size = _workspace(backward, q.dtype.name, shapes, tuple(options.items()))
        results.append(((size,), jnp.uint8))
        attributes: Any = {
            name: np.float32(value) if isinstance(value, float) else np.int64(value)
            for name, value in options.items()
        }
        function = ffi_call(_TARGETS[backward], _structs(q, results))
        return tuple(function(*arrays, **attributes)[:-1])

    def folded(size: int, batched: Sequence[bool], *arrays: Any) -> Any:
        """All examples as one batch."""
        batch = arrays[first].shape[int(batched[first])]
        whole = []
        for x, many, name in zip(arrays, batched, [""] * len(own) + names, strict=True):
            if name in ("alibi_slopes", *_OF_ALL) and x.ndim == 1:  # (heads,): of every sequence
                whole.append(x)
                continue
            if name == "bias":
                # Of every sequence it stays one, unless each example's gradient is wanted.
                if not many and x.shape[0] == 1 and name not in wanted:
                    whole.append(x)
                    continue
                x = x if many else x[None]
                x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
                whole.append(x.reshape(size * batch, *x.shape[2:]))
                continue
            if name == "alibi_slopes" and many and x.ndim == 2:
                x = jnp.broadcast_to(x[:, None], (size, batch, x.shape[1]))
            if not many:
                x = jnp.broadcast_to(x, (size, *x.shape))
            whole.append(x.reshape(size * batch, *x.shape[2:]))
        results = [x.reshape(size, batch, *x.shape[1:]) for x in run(*whole)]
        if "bias" in wanted:
            at = len(own) + names.index("bias")
            if arrays[at].shape[int(batched[at])] < batch:  # one for the batch of an example
                results[3] = results[3].sum(1, keepdims=True)
        return tuple(results)

    def one_by_one(_size: int, batched: Sequence[bool], *arrays: Any) -> Any:
        """Each example by itself: dropout draws by a sequence's place in its batch, and sinks,
        their gradient and masks are of a whole batch.
        """

        def one(chosen: Sequence[Any]) -> Any:
            rest = iter(chosen)
            return run(*(next(rest) if m else x for x, m in zip(arrays, batched, strict=True)))

        return jax.lax.map(one, [x for x, many in zip(arrays, batched, strict=True) if many])

    def rule(size: int, batched: Sequence[bool], *arrays: Any) -> Any:
        own_one = any(x in names and batched[len(own) + names.index(x)] for x in _OF_ALL)
        of_each = mask_fields(call.mask_layout, 2, 1, False)["mask_batch"] > 1
        apart = "dropout_seed" in names or "sinks" in wanted or own_one or of_each
        results = (one_by_one if apart else folded)(size, batched, *arrays)
        return results, (True,) * len(results)

    run = custom_vmap(launch)
    run.def_vmap(rule)
    return run(*own, *(more[name] for name in names))


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(call: Call, q: Any, k: Any, v: Any, more: dict[str, Any]) -> Any:
    return _launch(call, False, (q, k, v), more)


def _attend_fwd(call: Call, q: Any, k: Any, v: Any, more: dict[str, Any]) -> Any:
    for name, given in more.items():
        if given.perturbed and name not in _LEARNED:
            raise Unsupported(
                f"{name} has no gradient, and one is asked for: pass "
                f"jax.lax.stop_gradient({name}) if it is a constant"
            )
    own = (q.value, k.value, v.value)
    values = {name: given.value for name, given in more.items()}
    out, lse = _launch(call._replace(return_lse=True), False, own, values)
    # Said by the names that are there: what is kept may be arrays alone.
    wanted = {name: () for name in _LEARNED if name in more and more[name].perturbed}
    kept = (*own, out, lse, values, wanted)
    return (out, lse) if call.return_lse else (out,), kept


def _attend_bwd(call: Call, kept: Any, gradients: Sequence[Any]) -> Any:
    *tensors, more, asked = kept
    dout, *dlse = gradients
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros_like(tensors[3])
    dlse = [x for x in dlse if not isinstance(x, SymbolicZero)]
    wanted = [name for name in _LEARNED if name in asked]
    found = _launch(call, True, (dout, *tensors, *dlse), more, wanted)
    of_more = dict.fromkeys(more) | dict(zip(wanted, found[3:], strict=True))
    return (*found[:3], of_more)


attend.__wrapped__.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)
