"""The functions of flash_attn's extension module, by position as they are called there.

Beneath the functions of `flash_attn_interface`, without autograd: ring attention and context
parallelism call these or the ones right above them. On the CPU too.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

import strobe
from strobe import _flash_attn, _flash_cache, _operators, _options, _s_dmask
from strobe._arrays import check_memory
from strobe._errors import first_line, renamed
from strobe._values import constant
from strobe.flash_attn import flash_attn_with_kvcache

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]

Tensor: TypeAlias = torch.Tensor
Lengths: TypeAlias = tuple[Tensor | None, Tensor | None, int | None, int | None]
# dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
Options: TypeAlias = tuple[float, float | None, bool, int, int, float]

# Arguments that must be tensors.
_NEEDED = frozenset({"dout", "q", "k", "v", "v_cache", "out", "softmax_lse"})
DENSE: Lengths = (None, None, None, None)
_NAMES = {
    "lse": "softmax_lse",
    "scale": "softmax_scale",
    "window": "(window_size_left, window_size_right)",
    "window[0]": "window_size_left",
    "window[1]": "window_size_right",
}


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: Any = None,
) -> list[Tensor]:
    """Attention of (batch, seqlen, heads, head_dim).

    Returns:
        [out, softmax_lse, S_dmask, rng_state]: out is the argument, if one was given; S_dmask is
        empty without return_softmax and dropout. rng_state: int64 (2,), in the CPU's memory.

    Example:
        >>> import torch
        >>> from flash_attn.flash_attn_interface import flash_attn_gpu
        >>> q, k, v = torch.randn(3, 2, 30, 4, 64)
        >>> options = (0.0, 0.125, True, -1, -1, 0.0)
        >>> out, softmax_lse, _, _ = flash_attn_gpu.fwd(q, k, v, None, None, *options, False)
        >>> tuple(out.shape), tuple(softmax_lse.shape)
        ((2, 30, 4, 64), (2, 4, 30))
    """
    options = checked_options(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    )
    return forward(q, k, v, out, DENSE, options, alibi_slopes, return_softmax, gen)


def varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None,
    leftpad_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    return_softmax: bool,
    gen: Any = None,
    num_splits: int = 0,
) -> list[Tensor]:
    """Attention of packed sequences, (total, heads, head_dim). Returns what `fwd` does.

    seqused_k: int32 (batch,): so many keys of each sequence are used, the first ones.
    block_table: int32 (batch, pages_per_sequence): k and v are pages of a cache, of which
    leftpad_k, int32 (batch,), skips the first rows of each sequence. Without dropout.
    zero_tensors changes nothing: all of out and softmax_lse is written. Nor does num_splits.

    Example:
        >>> import torch
        >>> from flash_attn.flash_attn_interface import flash_attn_gpu
        >>> q, k, v = torch.randn(3, 30, 4, 64)
        >>> offsets = torch.tensor([0, 10, 30], dtype=torch.int32)
        >>> before, options = (None,) * 4, (0.0, 0.125, False, True, -1, -1, 0.0, False)
        >>> out, lse, _, _ = flash_attn_gpu.varlen_fwd(
        ...     q, k, v, None, offsets, offsets, *before, 20, 20, *options
        ... )
        >>> tuple(out.shape), tuple(lse.shape)
        ((30, 4, 64), (4, 30))
    """
    options = checked_options(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    )
    _flash_attn.check_unused(zero_tensors=zero_tensors, num_splits=num_splits)
    if block_table is not None:
        if options[0] != 0 or gen is not None:
            raise strobe.InvalidArgument(
                f"dropout_p = {options[0]!r} with block_table, expected 0 and no gen"
            )
        _, softmax_scale, causal, *window, softcap = options
        _check_tensors({"q": q, "v": v}, {"out": (out, "q", "v")})
        constant("alibi_slopes", alibi_slopes)
        with torch.no_grad():
            found, lse = _flash_cache.paged_varlen(
                *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, block_table, softmax_scale),
                *(causal, window, softcap, alibi_slopes, seqused_k, leftpad_k),
            )
        rng_state = torch.zeros(2, dtype=torch.int64)
        return [_write("out", out, found), lse, q.new_empty(0), rng_state]
    if leftpad_k is not None:
        raise strobe.Unsupported("leftpad_k without block_table is not supported")
    lengths = checked_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return forward(q, k, v, out, lengths, options, alibi_slopes, return_softmax, gen, seqused_k)


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: Any = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    """The derivative of `fwd`.

    Returns:
        [dq, dk, dv, softmax_d]: the arguments, where given. softmax_d: float32
        (batch, heads, seqlen_q rounded up to a multiple of 128), each row's sum of dout * out,
        times 1 - dropout_p; zeros behind seqlen_q.

    Example:
        >>> import torch
        >>> from flash_attn.flash_attn_interface import flash_attn_gpu
        >>> q, k, v = torch.randn(3, 2, 30, 4, 64)
        >>> options = (0.0, 0.125, True, -1, -1, 0.0)
        >>> out, lse, _, _ = flash_attn_gpu.fwd(q, k, v, None, None, *options, False)
        >>> dq, dk, dv, softmax_d = flash_attn_gpu.bwd(
        ...     out, q, k, v, out, lse, None, None, None, None, *options, False
        ... )
        >>> tuple(dk.shape), tuple(softmax_d.shape)
        ((2, 30, 4, 64), (2, 4, 128))
    """
    options = checked_options(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    )
    results = _backward(
        (dout, q, k, v, out, softmax_lse),
        (dq, dk, dv),
        DENSE,
        options,
        alibi_slopes,
        deterministic,
        rng_state,
    )
    delta = _delta(dout, out, options[0]).permute(0, 2, 1)  # (batch, heads, seqlen_q)
    seqlen_q = delta.shape[-1]
    more = _s_dmask.round_multiple(seqlen_q, 128) - seqlen_q
    return [*results, torch.nn.functional.pad(delta, (0, more))]


def varlen_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    zero_tensors: bool,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    deterministic: bool,
    gen: Any = None,
    rng_state: Tensor | None = None,
) -> list[Tensor]:
    """The derivative of `varlen_fwd`.

    Returns:
        As `bwd`, but softmax_d is (heads, total_q + 128 * batch), where the rows of sequence b
        begin at cu_seqlens_q[b] + 128 * b. zero_tensors changes nothing.

    Example:
        >>> import torch
        >>> from flash_attn.flash_attn_interface import flash_attn_gpu
        >>> q, k, v = torch.randn(3, 30, 4, 64)
        >>> offsets = torch.tensor([0, 10, 30], dtype=torch.int32)
        >>> before, options = (None,) * 4, (0.0, 0.125, False, True, -1, -1, 0.0, False)
        >>> out, lse, _, _ = flash_attn_gpu.varlen_fwd(
        ...     q, k, v, None, offsets, offsets, *before, 20, 20, *options
        ... )
        >>> dq, dk, dv, softmax_d = flash_attn_gpu.varlen_bwd(
        ...     out, q, k, v, out, lse, None, None, None, offsets, offsets, None, 20, 20, *options
        ... )
        >>> tuple(dq.shape), tuple(softmax_d.shape)
        ((30, 4, 64), (4, 286))
    """
    _flash_attn.check_unused(zero_tensors=zero_tensors)
    options = checked_options(
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap
    )
    results = _backward(
        (dout, q, k, v, out, softmax_lse),
        (dq, dk, dv),
        checked_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        options,
        alibi_slopes,
        deterministic,
        rng_state,
    )
    delta = _delta(dout, out, options[0])  # (total_q, heads)
    (total_q, heads), batch = delta.shape, cu_seqlens_q.shape[0] - 1
    row = torch.arange(total_q, device=q.device)
    sequence = torch.searchsorted(cu_seqlens_q, row, right=True) - 1
    softmax_d = delta.new_zeros((heads, total_q + 128 * batch))
    softmax_d[:, row + 128 * sequence] = delta.t()
    return [*results, softmax_d]


def fwd_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    rotary_interleaved: bool,
    num_splits: int,
) -> list[Tensor]:
    """`flash_attn_with_kvcache`, by position.

    Returns:
        [out, softmax_lse]: out is the argument, if one was given.

    Example:
        >>> import torch
        >>> from flash_attn.flash_attn_interface import flash_attn_gpu
        >>> q, (k_cache, v_cache) = torch.randn(2, 1, 8, 64), torch.randn(2, 2, 100, 2, 64)
        >>> lengths = torch.tensor([7, 12], dtype=torch.int32)
        >>> out, softmax_lse = flash_attn_gpu.fwd_kvcache(
        ...     *(q, k_cache, v_cache, None, None, lengths, *[None] * 7),
        ...     *(0.125, True, -1, -1, 0.0, True, 0),
        ... )
        >>> tuple(out.shape)
        (2, 1, 8, 64)
    """
    _check_tensors({"q": q, "v_cache": v_cache}, {"out": (out, "q", "v_cache")})
    window = _window(window_size_left, window_size_right)
    found, lse = flash_attn_with_kvcache(
        *(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx),
        *(cache_leftpad, block_table, softmax_scale, causal),
        *(window, softcap, rotary_interleaved, alibi_slopes),
        num_splits=num_splits,
        return_softmax_lse=True,
    )
    return [_write("out", out, found), lse]


# ----------------------------------------------------------------------------------- what is shared


def checked_lengths(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any, max_seqlen_k: Any
) -> Lengths:
    """The arguments, with the last two as integers."""
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _flash_attn.check_tensor(name, x, ("batch + 1",))
    longest_q = _flash_attn.as_integer("max_seqlen_q", max_seqlen_q)
    longest_k = _flash_attn.as_integer("max_seqlen_k", max_seqlen_k)
    return cu_seqlens_q, cu_seqlens_k, longest_q, longest_k


def _arguments(
    lengths: Lengths,
    options: Options,
    alibi_slopes: Tensor | None,
    rng_state: Tensor | None,
    deterministic: bool,
) -> tuple[Any, ...]:
    """What follows the tensors in the operators' schemas."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    tensors = (cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state)
    return (*tensors, max_seqlen_q, max_seqlen_k, *options, deterministic)


def _window(left: Any, right: Any) -> tuple[Any, Any]:
    limit = _flash_attn.as_limit
    return limit("window_size_left", left), limit("window_size_right", right)


def checked_options(
    dropout_p: Any, softmax_scale: Any, causal: Any, left: Any, right: Any, softcap: Any
) -> Options:
    """The arguments as Python's numbers: PyTorch would end the process at freed tensors."""
    dropout_p = _flash_attn.as_number("dropout_p", dropout_p)
    softcap = _flash_attn.as_number("softcap", softcap)
    if dropout_p != 0:
        _flash_attn.check_dropout(dropout_p, softcap)
    if softmax_scale is not None:
        softmax_scale = _flash_attn.as_number("softmax_scale", softmax_scale)
    causal = _flash_attn.as_flag("causal", causal)
    return dropout_p, softmax_scale, causal, *_window(left, right), softcap


def _check_tensors(
    given: dict[str, Any], targets: dict[str, tuple[Any, str, str]], lengths: Lengths | None = None
) -> None:
    """Refuses what can neither be read nor take results, before anything is computed.

    given: by name, tensors and None. lengths: say whether q, k, v and their like are packed; None:
    their axes are checked elsewhere. targets: what is written to, with the names of the tensors
    that have its rows and its last axis.
    """
    rows = ("batch", "seqlen") if lengths is None or lengths[0] is None else ("total",)
    every = given | {name: target for name, (target, _, _) in targets.items() if target is not None}
    for name, x in every.items():
        if x is not None or name in _NEEDED:
            shaped = lengths is not None and name in _NEEDED and name != "softmax_lse"
            _flash_attn.check_tensor(name, x, (*rows, "heads", "head_dim") if shaped else None)
    _flash_attn.check_eager({name: x for name, x in every.items() if x is not None})
    q = given["q"]
    for name, x in given.items():
        if x is not None and name != "rng_state" and x.device != q.device:
            raise strobe.InvalidArgument(f"{name} is on {x.device}, expected {q.device} as q")
    plain = not torch.compiler.is_dynamo_compiling() and _flash_attn.is_plain(q, q, q)
    for name, (target, *like) in targets.items():
        if target is None:
            continue
        shape = (*given[like[0]].shape[:-1], *given[like[1]].shape[-1:])
        for what, wanted in (("shape", shape), ("dtype", q.dtype), ("device", q.device)):
            got = tuple(target.shape) if what == "shape" else getattr(target, what)
            if got != wanted:
                names = " and ".join(dict.fromkeys(("q", *like)))
                raise strobe.InvalidArgument(f"{name}.{what} = {got}, expected {wanted} as {names}")
        if plain:  # the results are in memory, so a fake tensor cannot take them
            check_memory(name, target)


def _write(name: str, target: Tensor | None, found: Tensor) -> Tensor:
    """`found`, or `target` with its numbers."""
    if target is None:
        return found
    # Again: to read another argument may have run code that freed it, and copy_ does not look.
    if not torch.compiler.is_dynamo_compiling() and _flash_attn.is_plain(found, found, found):
        check_memory(name, target)
    try:
        return target.copy_(found)
    except Exception as error:  # elements that are one and the same, or no operators
        raise strobe.InvalidArgument(f"{name} cannot be written: {first_line(error)}") from None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lengths: Lengths,
    options: Options,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
    gen: Any,
    seqused_k: Tensor | None = None,
) -> list[Tensor]:
    """What `fwd` and `varlen_fwd` do. lengths: `DENSE`, or what `checked_lengths` gave."""
    if gen is not None:
        raise strobe.Unsupported(
            "gen: a generator of one's own is not supported, expected None, which is PyTorch's "
            "default generator of q's device"
        )
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": lengths[0], "cu_seqlens_k": lengths[1]}
    given |= {"alibi_slopes": alibi_slopes, "seqused_k": seqused_k}
    constant("alibi_slopes", alibi_slopes)
    _check_tensors(given, {"out": (out, "q", "v")}, lengths)
    return_softmax = _flash_attn.as_flag("return_softmax", return_softmax)
    dropout = options[0] > 0
    if dropout:
        state = rng_state = _operators.dropout_state(device=q.device)
    else:
        state, rng_state = None, torch.zeros(2, dtype=torch.int64)
    arguments = _arguments(lengths, options, alibi_slopes, state, False)
    more = () if seqused_k is None else _options.positional(seqused_k=seqused_k)
    if more and return_softmax and dropout:
        raise strobe.Unsupported("return_softmax with seqused_k and dropout_p > 0")
    with torch.no_grad():
        found, lse = _call(_FORWARD, given, (q, k, v, *arguments, *more))
        if return_softmax and dropout:
            weights = _operators.attention_dropout_weights(q, k, *arguments)
        else:
            weights = q.new_empty(0)
        return [_write("out", out, found), lse, weights, rng_state]


def _backward(
    tensors: tuple[Tensor, ...],
    results: tuple[Tensor | None, ...],
    lengths: Lengths,
    options: Options,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None,
) -> list[Tensor]:
    dout, q, k, v, out, lse = tensors
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
    given |= {"cu_seqlens_q": lengths[0], "cu_seqlens_k": lengths[1]}
    given |= {"alibi_slopes": alibi_slopes, "rng_state": rng_state}
    constant("alibi_slopes", alibi_slopes)
    targets = {f"d{x}": (target, x, x) for x, target in zip("qkv", results, strict=True)}
    _check_tensors(given, targets, lengths)
    deterministic = _flash_attn.as_flag("deterministic", deterministic)
    state = rng_state if options[0] > 0 else None
    if options[0] > 0 and state is None:
        raise strobe.InvalidArgument(
            f"rng_state = None with dropout_p = {options[0]!r}, expected what the forward returned"
        )
    arguments = _arguments(lengths, options, alibi_slopes, state, deterministic)
    with torch.no_grad():
        gradients = _call(_BACKWARD, given, (dout, None, q, k, v, out, lse, *arguments))
        return [
            _write(name, target, found)
            for name, target, found in zip(("dq", "dk", "dv"), results, gradients, strict=True)
        ]


def _delta(dout: Tensor, out: Tensor, dropout_p: float) -> Tensor:
    """(..., heads), float32."""
    with torch.no_grad():
        try:
            delta: Tensor = (dout.float() * out.float()).sum(-1)
        except Exception:
            for name, x in (("dout", dout), ("out", out)):  # which of them it was
                _flash_attn.taken(name, x, lambda x: (x.float() * 1.0).sum(-1))
            raise
        return delta * (1 - dropout_p)


# An operator, and its kernel, for where nobody watches.
_FORWARD = (_operators.attention_forward, _operators.forward)
_BACKWARD = (_operators.attention_backward, _operators.backward)


def _call(ways: tuple[Any, Any], given: dict[str, Any], arguments: tuple[Any, ...]) -> Any:
    """An operator, whose errors name arguments as these functions do. given: see _check_tensors."""
    tracing = torch.compiler.is_dynamo_compiling()
    try:
        direct = not tracing and _flash_attn.is_plain(*(given[name] for name in "qkv"))
        return ways[direct](*arguments)
    except strobe.Error as error:
        raise type(error)(renamed(str(error), _NAMES)) from None
    except (AssertionError, NotImplementedError, TypeError) as error:
        if tracing:
            raise
        raise _flash_attn.in_our_words(error, **given) from None
