"""Attention in JAX, on CPUs and NVIDIA GPUs: under jit, grad, vmap, shard_map and checkpoint.

    out = strobe.jax.attention(q, k, v, is_causal=True)      # (batch, seqlen, heads, head_dim)

Shapes, and the options that both have, are those of jax.nn.dot_product_attention. XLA calls the
library by itself (`python/core/xla.cpp`): no Python runs while a compiled program does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np

from . import ArraySpec, Error, InvalidArgument, Unsupported, _core, info
from ._arrays import check_readable, is_tensor
from ._errors import renamed, shown
from ._options import ARRAYS, converted, fields_of
from ._packed_mask import check_lengths
from ._problem import DTYPE_CODES, mask_fields
from ._questions import check
from ._values import NO_LIMIT, flag, integer, seed
from .masks import Mask

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from ._arrays import SupportsDLPack

    Array: TypeAlias = ArrayLike | SupportsDLPack

__all__ = ["attention"]

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

_NAMES: Final = {  # strobe.attention's, and what this module calls them
    "causal": "is_causal",
    "window": "local_window_size",
    "window[0]": "local_window_size[0]",
    "window[1]": "local_window_size[1]",
    "window_left": "local_window_size[0]",
    "window_right": "local_window_size[1]",
    "seqused_q": "query_seq_lengths",
    "seqused_k": "key_value_seq_lengths",
}
# The arrays of a call besides its tensors, in the order in which the handlers take them.
_MORE: Final = ("alibi_slopes", *ARRAYS, "sinks", "mask", "bias", "dropout_seed")
# Those that stand for all sequences, and those that have a gradient.
_OF_ALL: Final = ("sinks", "mask")
_LEARNED: Final = ("sinks", "bias")

# What a mask is packed of is an array like another, which may be traced; the rest is known then.
jax.tree_util.register_pytree_node(
    Mask,
    lambda mask: ((mask.packed,), (mask.shape, mask.block, mask.capacity, mask.partial_capacity)),
    lambda known, packed: Mask(packed[0], *known),
)


class _Call(NamedTuple):
    """What is known of a call when it is traced, besides shapes and dtypes."""

    options: tuple[tuple[str, Any], ...]  # fields of strobe_problem, where they have no default
    deterministic: bool
    return_lse: bool
    mask_layout: int = 0  # _problem.mask_layout


# --------------------------------------------------------------------------------------- launches


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


def _alike(arrays: dict[str, Any]) -> dict[str, Any]:
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
    call: _Call,
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
def _attention(call: _Call, q: Any, k: Any, v: Any, more: dict[str, Any]) -> Any:
    return _launch(call, False, (q, k, v), more)


def _attention_fwd(call: _Call, q: Any, k: Any, v: Any, more: dict[str, Any]) -> Any:
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


def _attention_bwd(call: _Call, kept: Any, gradients: Sequence[Any]) -> Any:
    *tensors, more, asked = kept
    dout, *dlse = gradients
    if isinstance(dout, SymbolicZero):
        dout = jnp.zeros_like(tensors[3])
    dlse = [x for x in dlse if not isinstance(x, SymbolicZero)]
    wanted = [name for name in _LEARNED if name in asked]
    found = _launch(call, True, (dout, *tensors, *dlse), more, wanted)
    of_more = dict.fromkeys(more) | dict(zip(wanted, found[3:], strict=True))
    return (*found[:3], of_more)


_attention.__wrapped__.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


# -------------------------------------------------------------------------------------- arguments


def _array(name: str, value: Any) -> Any:
    try:
        if is_tensor(value):  # JAX reads PyTorch's, even at the address of a storage that was freed
            check_readable(name, value)
        return jnp.asarray(value)
    except Error:
        raise
    except Exception:
        raise InvalidArgument(f"{name} = {shown(value)}, expected an array") from None


def _wide(name: str, value: Any) -> Any:
    """Integers of 64 bits, as a NumPy array, where JAX would cut them to 32; else None."""
    if jax.config.jax_enable_x64 or (
        isinstance(value, jax.Array) and value.dtype not in (np.int64, np.uint64)
    ):
        return None
    if is_tensor(value):
        check_readable(name, value)
        if value.dtype.itemsize < 8:  # nothing to cut, and a GPU would have to be waited for
            return None
    try:
        host = np.asarray(value.detach().cpu() if is_tensor(value) else value)
    except Exception:  # a list with something traced in it, or nothing to make an array of
        return None
    return host if host.dtype in (np.int64, np.uint64) else None


def _lengths(name: str, value: Any) -> Any:
    """An array of lengths: one that is too long for an int32 is as good as the longest."""
    wide = _wide(name, value)
    if wide is None or wide.dtype == np.uint64:
        return _array(name, value)
    most = np.iinfo(np.int32)
    return jnp.asarray(np.clip(wide, most.min, most.max).astype(np.int32))


def _numbers(name: str, value: Any, dtype: Any, wanted: str) -> Any:
    """An array of integers, refused where one of them does not fit `dtype`."""
    wide, most = _wide(name, value), np.iinfo(dtype)
    if wide is not None:
        for at in np.argwhere((wide < most.min) | (wide > most.max)):
            index = "".join(f"[{n}]" for n in at)
            raise InvalidArgument(f"{name}{index} = {wide[tuple(at)]}, expected {wanted}")
    return _array(name, value)


def _seed(value: Any) -> Any:
    """uint32 (2,): the high and the low half of a seed."""
    if isinstance(value, int | np.integer):
        number = seed("dropout_seed", value)
        return np.array([number >> 32, number & 0xFFFFFFFF], np.uint32)
    data = _numbers("dropout_seed", value, np.uint32, "32 bits: half of a seed")
    if jax.dtypes.issubdtype(data.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(data)
    if data.dtype != jnp.uint32 or data.shape not in ((2,), (4,)):
        raise InvalidArgument(
            f"dropout_seed has dtype {data.dtype} and shape {data.shape}, expected one key of "
            "jax.random, or an integer from 0 to 2**64 - 1"
        )
    return data if data.shape == (2,) else data[:2] ^ data[2:]  # the latter: keys of rbg


@functools.lru_cache(1024)
def _check(tensors: Any, more: Any, options: Any) -> None:
    """Raises what is wrong with a call. The CPU's kernels take whatever is not wrong."""
    specs: Any = {name: ArraySpec(shape, dtype) for name, shape, dtype in (*tensors, *more)}
    try:
        check(**specs, **dict(options))
    except Error as error:
        raise type(error)(renamed(str(error), _NAMES)) from None


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: Array | None = ...,
    key_value_seq_lengths: Array | None = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    window_signed: bool = ...,
    return_residual: Literal[False] = ...,
    softcap: float = ...,
    alibi_slopes: Array | None = ...,
    sinks: Array | None = ...,
    sinks_outside_lse: bool = ...,
    mask: Mask | None = ...,
    bias: Array | None = ...,
    q_position: int | Array = ...,
    prefix: Array | None = ...,
    attention_chunk: int = ...,
    dropout_p: float = ...,
    dropout_seed: int | Array | None = ...,
    deterministic: bool = ...,
    batch_invariant: bool = ...,
    threads: int = ...,
) -> jax.Array: ...


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: Array | None = ...,
    key_value_seq_lengths: Array | None = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    window_signed: bool = ...,
    return_residual: Literal[True],
    softcap: float = ...,
    alibi_slopes: Array | None = ...,
    sinks: Array | None = ...,
    sinks_outside_lse: bool = ...,
    mask: Mask | None = ...,
    bias: Array | None = ...,
    q_position: int | Array = ...,
    prefix: Array | None = ...,
    attention_chunk: int = ...,
    dropout_p: float = ...,
    dropout_seed: int | Array | None = ...,
    deterministic: bool = ...,
    batch_invariant: bool = ...,
    threads: int = ...,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: Array | None = ...,
    key_value_seq_lengths: Array | None = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    window_signed: bool = ...,
    return_residual: bool = ...,
    softcap: float = ...,
    alibi_slopes: Array | None = ...,
    sinks: Array | None = ...,
    sinks_outside_lse: bool = ...,
    mask: Mask | None = ...,
    bias: Array | None = ...,
    q_position: int | Array = ...,
    prefix: Array | None = ...,
    attention_chunk: int = ...,
    dropout_p: float = ...,
    dropout_seed: int | Array | None = ...,
    deterministic: bool = ...,
    batch_invariant: bool = ...,
    threads: int = ...,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    window_signed: bool = False,
    return_residual: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    sinks_outside_lse: bool = False,
    mask: Mask | None = None,
    bias: Array | None = None,
    q_position: int | Array = 0,
    prefix: Array | None = None,
    attention_chunk: int = 0,
    dropout_p: float = 0.0,
    dropout_seed: int | Array | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    threads: int = 0,
) -> Any:
    """Exact attention, differentiable by q, k, v, sinks and bias in reverse mode, in memory that is
    linear in the sequence length, but for bias.

    Arrays may be traced; other arguments are Python's. The defaults compute what
    jax.nn.dot_product_attention does. Query i is at the key position q_position + i: masks and
    ALiBi go by it. Unlike strobe.attention, q_position is 0 by default, as it is in jax.nn: the
    first query sees the first key only, also where there are fewer queries than keys.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float32, bfloat16 or float16.
        k: (batch, seqlen_k, heads_kv, head_dim), of q's dtype; heads_kv divides heads.
        v: (batch, seqlen_k, heads_kv, head_dim_v). All three may be without batch.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        is_causal: a query sees keys up to its own position.
        query_seq_lengths, key_value_seq_lengths: int32, (batch,): so many rows of each sequence are
            in use, the first ones; numbers out of range, of 64 bits too, mean none or all. The
            others are not read: their out is 0, their lse -inf and their gradients are 0.
        local_window_size: (left, right): a query sees keys so far from its own position, -1: no
            limit; a number: both; None: no window. A limit that is None is none; the other number
            is then a limit of either sign, as both are with window_signed.
        window_signed: -1 and other negative numbers of local_window_size are limits, on the other
            side of a query's own position: (8, -3) are the keys from 8 to 3 positions before it.
            The two are at least 0 together. Not with attention_chunk.
        return_residual: also return lse.
        softcap: c > 0: the scaled score s becomes c * tanh(s / c); 0: off.
        alibi_slopes: float32, (heads,) or (batch, heads): adds -slope * |distance of positions|.
            Constants: a gradient with respect to them is refused.
        sinks: (heads,): attention sinks, computed in float32. Each takes part in the softmax of its
            head's rows as the score of one more key, whose value is 0; it is neither scaled nor
            capped, and can be differentiated.
        sinks_outside_lse: lse is that of the keys alone.
        mask: a mask as data, of `strobe.masks`, for these lengths, batch and heads: a pair is seen
            if it and all other options allow it. It is a pytree, and may be an argument of jitted
            functions. jax.nn's bools: `strobe.masks.from_bool`.
        bias: float32, bfloat16 or float16, (batch, heads, seqlen_q, seqlen_k), each of the first
            three 1 where all share it; without batch (heads, seqlen_q, seqlen_k). Added to the
            scores after softcap; -inf hides a pair.
        q_position: an integer, or int32 (batch,): seqlen_k - seqlen_q aligns the last query with
            the last key, as strobe.attention does.
        prefix: int32, (batch,): so many first keys are seen by all queries, whatever is_causal
            says; out of range as for lengths. Not with attention_chunk or a left window.
        attention_chunk: c > 0: a query sees keys of its own chunk of c positions only; 0: off.
        dropout_p: probability of dropping a weight, in [0, 1). On the CPU alone.
        dropout_seed: with dropout_p: a key of jax.random (traced or not), or an integer from 0 to
            2**64 - 1. The same seed drops the same weights; with vmap, in each example.
        deterministic: backward: the same bits for every number of threads.
        batch_invariant: a row's bits do not depend on what it is computed with; gradients, with
            deterministic too, do not on the other sequences of the batch.
        threads: CPU threads at most; 0: OpenMP's number (OMP_NUM_THREADS).

    Returns:
        out, (batch, seqlen_q, heads, head_dim_v), of q's dtype; or (out, lse). lse is the natural
        logarithm of the sum of exponentials of a row's scores: float32, (batch, seqlen_q, heads);
        it can be differentiated. A query that sees no key has out = 0 and lse = -inf.

    Raises:
        InvalidArgument, Unsupported: when the call is traced, as strobe.attention would.
        jax.errors.JaxRuntimeError: when it runs: a position out of range; on a GPU: a problem that
            none of its kernels takes. On platforms other than CPU and CUDA, XLA refuses to compile
            the call: it knows no strobe_attention_forward there.

    Example:
        >>> import jax, strobe
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 30, 4, 16))
        >>> out = strobe.jax.attention(q, k, v, is_causal=True)
        >>> dq = jax.grad(lambda q: strobe.jax.attention(q, k, v, is_causal=True).sum())(q)
        >>> out.shape, dq.shape
        ((2, 30, 4, 16), (2, 30, 4, 16))
    """
    arrays = {name: _array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    ndim = arrays["q"].ndim
    for name, x in arrays.items():
        if ndim not in (3, 4) or x.ndim != ndim:
            wanted = "4: (batch, seqlen, heads, head_dim), or 3 without batch"
            wanted = wanted if name == "q" else f"{ndim} as of q"
            raise InvalidArgument(f"{name}.ndim = {x.ndim}, expected {wanted}")
    tensors = {name: x if ndim == 4 else x[None] for name, x in arrays.items()}
    batch, seqlen_q = tensors["q"].shape[:2]
    seqlen_k = tensors["k"].shape[1]

    limits: Any = (-1, -1) if local_window_size is None else local_window_size
    if isinstance(limits, int | np.integer):
        limits = (limits, limits)
    checked = converted(
        {
            "causal": is_causal,
            "window": limits,
            "window_signed": window_signed,
            "softcap": softcap,
            "dropout_p": dropout_p,
            "batch_invariant": batch_invariant,
            "attention_chunk": attention_chunk,
            "sinks_outside_lse": sinks_outside_lse,
            "threads": threads,
            **({} if scale is None else {"scale": scale}),
        },
        _NAMES,
    )
    # As fields of strobe_problem, by whose names XLA hands them on.
    options: dict[str, Any] = {
        name: int(value) if isinstance(value, bool) else value
        for name, value in fields_of(checked).items()
    }
    left, right = options["window_left"], options["window_right"]

    more: dict[str, Any] = {}
    if alibi_slopes is not None:
        more["alibi_slopes"] = _array("alibi_slopes", alibi_slopes)
    if sinks is not None:
        of_heads = _array("sinks", sinks)
        is_float = jnp.issubdtype(of_heads.dtype, jnp.floating)
        more["sinks"] = of_heads.astype(jnp.float32) if is_float else of_heads
    layout: dict[str, int] = {}
    if mask is not None:
        if not isinstance(mask, Mask):
            raise InvalidArgument(
                f"mask is {shown(mask)}, expected a strobe.masks.Mask: "
                "strobe.masks.from_bool(keep) makes one of bools"
            )
        check_lengths(mask._lengths_of_calls, (seqlen_q, seqlen_k))
        more["mask"] = _array("mask", mask.packed)
        layout["mask_layout"] = mask.layout
    if bias is not None:
        array = _array("bias", bias)
        more["bias"] = array if ndim == 4 or array.ndim == 4 else array[None]
    lengths = {"seqused_q": query_seq_lengths, "seqused_k": key_value_seq_lengths, "prefix": prefix}
    for field, length in lengths.items():
        if length is not None:
            more[field] = _lengths(_NAMES.get(field, field), length)
    # Where a query is matters to these alone. Without a position, the last one is at the last key.
    placed = options["causal"] or {left, right} - {-1, NO_LIMIT} or options["attention_chunk"]
    placed = placed or options["window_signed"]
    if placed or alibi_slopes is not None:
        if isinstance(q_position, int | np.integer):
            position = integer("q_position", q_position)
            if abs(position) > 2**30:
                raise InvalidArgument(f"q_position = {position}, expected -2**30 to 2**30")
            if position != seqlen_k - seqlen_q or "seqused_q" in more or "seqused_k" in more:
                more["q_position"] = np.full(batch, position, np.int32)
        else:
            more["q_position"] = _numbers("q_position", q_position, np.int32, "-2**30 to 2**30")
    _check(
        tuple((name, x.shape, x.dtype.name) for name, x in tensors.items()),
        tuple((name, x.shape, x.dtype.name) for name, x in more.items()),
        tuple((checked | layout).items()),
    )
    for field, most in (("seqused_q", seqlen_q), ("seqused_k", seqlen_k), ("prefix", seqlen_k)):
        if field in more:
            more[field] = jnp.clip(more[field], 0, most)
    if options["dropout_p"] > 0:
        if dropout_seed is None:
            raise InvalidArgument(
                f"dropout_seed = None with dropout_p = {float(options['dropout_p']):g}, "
                "expected a key of jax.random, or an integer"
            )
        more["dropout_seed"] = _seed(dropout_seed)

    default = {"window_left": -1, "window_right": -1, "scale": None}
    given_options = tuple((x, y) for x, y in options.items() if y != default.get(x, 0))
    call = _Call(
        given_options,
        flag("deterministic", deterministic),
        flag("return_residual", return_residual),
        **layout,
    )
    given = _alike(tensors | more)
    results = _attention(call, *(given[x] for x in "qkv"), {name: given[name] for name in more})
    if ndim == 3:
        results = [x[0] for x in results]
    return (results[0], jnp.swapaxes(results[1], -1, -2)) if call.return_lse else results[0]
