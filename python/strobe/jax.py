"""Attention in JAX, on CPUs and NVIDIA GPUs: under jit, grad, vmap, shard_map and checkpoint.

    out = strobe.jax.attention(q, k, v, is_causal=True)      # (batch, seqlen, heads, head_dim)

Shapes, and the options that both have, are those of jax.nn.dot_product_attention. XLA calls the
library by itself (`python/core/xla.cpp`): no Python runs while a compiled program does.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np

from . import ArraySpec, Error, InvalidArgument, Unsupported
from ._errors import renamed
from ._jax_arrays import array_of, lengths_of, mask_of_bools, numbers_of, seed_words
from ._jax_launch import Call, alike, attend
from ._options import converted, fields_of
from ._packed_mask import check_made_for
from ._questions import check
from ._values import NO_LIMIT, flag, integer
from .masks import Mask

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from ._arrays import SupportsDLPack

    Array: TypeAlias = ArrayLike | SupportsDLPack

__all__ = ["attention"]

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

# What a mask is packed of is an array like another, which may be traced; the rest is known then.
jax.tree_util.register_pytree_node(
    Mask,
    lambda mask: ((mask.packed,), (mask.shape, mask.block, mask.capacity, mask.partial_capacity)),
    lambda known, packed: Mask(packed[0], *known),
)


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
    mask: Mask | Array | None = ...,
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
    mask: Mask | Array | None = ...,
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
    mask: Mask | Array | None = ...,
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
    mask: Mask | Array | None = None,
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
            functions. Or bools of NumPy or JAX, (batch, heads, seqlen_q, seqlen_k), each of the
            four 1 where all share it, axes before seqlen_q also missing: True attends. They are
            packed on the host by each call that is not compiled, and once where a call is traced,
            so they may not be traced themselves: what is jitted takes `strobe.masks.from_bool`'s
            mask in their place.
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
    arrays = {name: array_of(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    ndim = arrays["q"].ndim
    for name, x in arrays.items():
        if ndim not in (3, 4) or x.ndim != ndim:
            wanted = "4: (batch, seqlen, heads, head_dim), or 3 without batch"
            wanted = wanted if name == "q" else f"{ndim} as of q"
            raise InvalidArgument(f"{name}.ndim = {x.ndim}, expected {wanted}")
    if arrays["q"].dtype.name.startswith("float8"):
        raise Unsupported(
            f"q.dtype = {arrays['q'].dtype} is not supported in strobe.jax, which takes no scales: "
            "expected float32, bfloat16 or float16"
        )
    tensors = {name: x if ndim == 4 else x[None] for name, x in arrays.items()}
    batch, seqlen_q, heads = tensors["q"].shape[:3]
    seqlen_k = tensors["k"].shape[1]

    # Where there is no window, no limit of it has a sign.
    signed = flag("window_signed", window_signed) and local_window_size is not None
    limits: Any = (-1, -1) if local_window_size is None else local_window_size
    if isinstance(limits, int | np.integer):
        limits = (limits, limits)
    checked = converted(
        {
            "causal": is_causal,
            "window": limits,
            "window_signed": signed,
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
        slopes = array_of("alibi_slopes", alibi_slopes)
        more["alibi_slopes"] = slopes.astype(np.float32) if slopes.dtype == np.float64 else slopes
    if sinks is not None:
        of_heads = array_of("sinks", sinks)
        is_float = jnp.issubdtype(of_heads.dtype, jnp.floating)
        more["sinks"] = of_heads.astype(jnp.float32) if is_float else of_heads
    layout: dict[str, int] = {}
    if mask is not None:
        sides = (batch, heads, seqlen_q, seqlen_k)
        packed = mask if isinstance(mask, Mask) else mask_of_bools(mask, sides)
        check_made_for(packed._of_calls, sides)
        more["mask"] = array_of("mask", packed.packed)
        layout["mask_layout"] = packed.layout
    if bias is not None:
        array = array_of("bias", bias)
        more["bias"] = array if ndim == 4 or array.ndim == 4 else array[None]
    lengths = {"seqused_q": query_seq_lengths, "seqused_k": key_value_seq_lengths, "prefix": prefix}
    for field, length in lengths.items():
        if length is not None:
            more[field] = lengths_of(_NAMES.get(field, field), length)
    # Where a query is matters to these alone. Without a position, the last one is at the last key.
    placed = options["causal"] or {left, right} - {-1, NO_LIMIT} or options["attention_chunk"]
    placed = placed or options["window_signed"]
    is_used = bool(placed) or alibi_slopes is not None
    unused: dict[str, Any] = {}
    if not isinstance(q_position, list | tuple) and getattr(q_position, "ndim", 0) == 0:
        position = integer("q_position", q_position)
        if abs(position) > 2**30:
            raise InvalidArgument(f"q_position = {position}, expected -2**30 to 2**30")
        stands = position == seqlen_k - seqlen_q and not {"seqused_q", "seqused_k"} & {*more}
        if is_used and not stands:
            more["q_position"] = np.full(batch, position, np.int32)
    else:
        positions = numbers_of("q_position", q_position, np.int32, "-2**30 to 2**30")
        (more if is_used else unused)["q_position"] = positions
    _check(
        tuple((name, x.shape, x.dtype.name) for name, x in tensors.items()),
        tuple((name, x.shape, x.dtype.name) for name, x in (more | unused).items()),
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
        more["dropout_seed"] = seed_words(dropout_seed)

    default = {"window_left": -1, "window_right": -1, "scale": None}
    given_options = tuple((x, y) for x, y in options.items() if y != default.get(x, 0))
    call = Call(
        given_options,
        flag("deterministic", deterministic),
        flag("return_residual", return_residual),
        **layout,
    )
    given = alike(tensors | more)
    results = attend(call, *(given[x] for x in "qkv"), {name: given[name] for name in more})
    if ndim == 3:
        results = [x[0] for x in results]
    return (results[0], jnp.swapaxes(results[1], -1, -2)) if call.return_lse else results[0]
