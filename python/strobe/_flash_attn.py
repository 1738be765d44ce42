"""What the functions of `flash_attn` share: which way a call takes, its checks, its messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from . import _autograd, _core, _operators, _options
from ._arrays import (
    cannot_be_read,
    check_dense,
    check_memory,
    check_readable,
    how_to_make_mask,
    introduce_torch,
)
from ._errors import Error, InvalidArgument, Unsupported, first_line, renamed
from ._plans import NoSequences
from ._values import constant, flag, integer, pair, real
from .masks import Mask

Tensor: TypeAlias = torch.Tensor

# What a function of `flash_attn` returns: out, or (out, softmax_lse, S_dmask).
Result: TypeAlias = Any
# cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
Lengths: TypeAlias = tuple[Any, Any, Any, Any]
DENSE: Final[Lengths] = (None, None, None, None)
NO_WINDOW: Final = (-1, -1)
# dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
Options: TypeAlias = tuple[Any, Any, Any, Any, Any, Any, Any]
# What a call was given as s_aux and as learnable_sink: two names of the attention sinks.
Sinks: TypeAlias = tuple[Any, Any]
NO_SINKS: Final[Sinks] = (None, None)

# By what q, k and v were taken from (see `call`), and whether the batch is dense.
_FUNCTIONS: Final = {
    ("", True): "flash_attn_func",
    ("kv", True): "flash_attn_kvpacked_func",
    ("qkv", True): "flash_attn_qkvpacked_func",
    ("", False): "flash_attn_varlen_func",
    ("kv", False): "flash_attn_varlen_kvpacked_func",
    ("qkv", False): "flash_attn_varlen_qkvpacked_func",
}

_is_tracing: Final = torch.compiler.is_dynamo_compiling


# -------------------------------------------------------------------------------- without dispatch


def is_in_dispatch_mode() -> bool:
    """Whether a mode sees each operator, also on the stack of tracing before dispatch."""
    return bool(_in_dispatch_mode())


def _older_in_dispatch_mode() -> bool:  # pragma: no cover - PyTorch 2.4
    """There PyTorch's own answer stays True once anything has been compiled."""
    before = torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
    return bool(before or torch._C._len_torch_dispatch_stack())


_in_dispatch_mode: Final = (
    _older_in_dispatch_mode
    if torch.__version__.startswith("2.4.")
    else _python_dispatch.is_in_torch_dispatch_mode
)


def _introduce_watchers() -> None:
    """Tells _core whom to ask whether somebody must see each operator: dispatch modes (FLOP
    counters, export), torch.jit.trace, modes for functions, forward-mode differentiation. The
    tensors of torch.func's transforms cannot be read, which says it of those.

    PyTorch has no public name for the level of forward-mode differentiation. In a PyTorch without
    one of these names, calls go by its dispatcher: right, and slower.
    """
    introduce_torch()
    names, is_tracing = forward_ad.__dict__, torch.jit.is_tracing
    if "_current_level" in names:
        has_function_mode = torch.overrides.has_torch_function
        _core.set_watchers(
            _in_dispatch_mode, is_tracing, has_function_mode, names, "_current_level"
        )


_introduce_watchers()


def is_plain(q: Any, k: Any, v: Any) -> bool:
    """Whether these are tensors as they come and nobody but autograd watches."""
    return (
        all(type(x) is torch.Tensor for x in (q, k, v))
        and (q.is_cpu or q.is_cuda)
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and not _operators.is_transformed()
        and _core.unwatched(q, k, v)
    )


# ------------------------------------------------------------------------------------------- checks

# What `strobe.attention` calls arguments, and what flash_attn calls them.
_NAMES: Final = {"scale": "softmax_scale", "window": "window_size"}
_PACKED_NAMES: Final = _NAMES | {
    "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens",
    "max_seqlen_q": "max_seqlen",
    "max_seqlen_k": "max_seqlen",
}


def _by_name(error: Exception, packed: str, sinks: str) -> Exception:
    """One of ours with the names that the caller knows. packed: see `call`; sinks: the caller's
    name for them.
    """
    names = _PACKED_NAMES if packed == "qkv" else _NAMES
    text = renamed(str(error), names | {"sinks": sinks})
    name = re.split(r"\W", text, maxsplit=1)[0]
    if (packed and name in ("k", "v")) or (packed == "qkv" and name == "q"):
        text = f"{packed}, as {text}"
    elif packed and re.search(rf"(?<![\w.])[{packed}]\.", text):
        text += f" ({', '.join(packed)} are those of {packed})"
    return type(error)(text)


def in_our_words(error: Exception, **named: Any) -> Exception:
    """What PyTorch's dispatcher says where a kind of tensors takes no part in an operator, in words
    of ours; `error` itself if there is none.
    """
    for name, x in named.items():
        if isinstance(x, torch.Tensor):
            if x.is_quantized:
                return Unsupported(f"{name}.dtype = {x.dtype}, which no kernel takes")
            if type(x) not in (torch.Tensor, torch.nn.Parameter):
                said = first_line(error)
                kind = f"{type(x).__name__:.60}"
                return Unsupported(f"{name} is a {kind}, which does not take this: {said}")
    return error


def check_tensor(name: str, x: Any, axes: tuple[str, ...] | None) -> None:
    """Refuses what is no tensor with these axes. An axis named by a number has that length."""
    if not isinstance(x, torch.Tensor):
        raise InvalidArgument(f"{name} is of type {type(x).__name__:.60}, expected a torch.Tensor")
    check_dense(name, x)
    if axes is None:
        return
    if x.ndim != len(axes):
        raise InvalidArgument(f"{name}.ndim = {x.ndim}, expected {len(axes)}: ({', '.join(axes)})")
    for axis, wanted in enumerate(axes):
        if wanted.isdecimal() and x.shape[axis] != int(wanted):
            raise InvalidArgument(
                f"{name}.shape[{axis}] = {x.shape[axis]}, expected {wanted}: ({', '.join(axes)})"
            )


def diagnose(named: dict[str, Any]) -> None:
    """Raises what can be said of a tensor that PyTorch itself could not read."""
    for name, x in named.items():
        try:
            if x is not None:
                check_readable(name, x)
        except Error as found:
            raise found from None
        except Exception as found:
            raise cannot_be_read(name, x, found) from None


def check_eager(named: dict[str, Any]) -> None:
    """Refuses what has no memory, at which PyTorch's kernels would end the process. A tensor of a
    transform, of a compiler or of a class with operators of its own may have it elsewhere.
    """
    if not _is_tracing() and not _operators.is_transformed():
        for name, x in named.items():
            if type(x).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not x.is_meta:
                check_memory(name, x)


def as_sinks(name: str, x: Any) -> Tensor:
    """Attention sinks of any floating-point dtype and strides as kernels read them. Of what has
    another dtype the planner says what is wrong.
    """
    check_tensor(name, x, ("heads",))
    check_eager({name: x})
    if not x.is_floating_point():
        return x
    sinks: Tensor = taken(name, x, lambda x: x.float().contiguous())
    return sinks


def named_sinks(given: Sinks) -> tuple[str, Any]:
    """Under which name a call was given attention sinks, and these, as `as_sinks`; None where it
    was given none.
    """
    s_aux, learnable_sink = given
    if s_aux is None and learnable_sink is None:
        return "sinks", None
    if s_aux is not None and learnable_sink is not None:
        raise InvalidArgument(
            "s_aux and learnable_sink are both given, expected one of them: they are two names of "
            "the attention sinks"
        )
    name, x = ("s_aux", s_aux) if learnable_sink is None else ("learnable_sink", learnable_sink)
    return name, as_sinks(name, x)


def taken(name: str, x: Tensor, take: Callable[[Tensor], Any]) -> Any:
    """take(x), with an error of ours: x may be freed, or of a class without operators."""
    try:
        return take(x)
    except Error:
        raise
    except Exception as error:
        if _is_tracing():
            raise
        diagnose({name: x})
        raise cannot_be_read(name, x, error) from None


def unbound(name: str, x: Tensor, axis: int, count: int) -> Any:
    """The slices of x along an axis, whose length was looked at: x may have changed since."""

    def parts(tensor: Tensor) -> Any:
        found = tensor.unbind(axis)
        if len(found) != count:
            raise IndexError
        return found

    return taken(name, x, parts)


def check_dropout(dropout_p: Any, softcap: Any) -> None:
    if not 0 <= dropout_p < 1:
        raise InvalidArgument(f"dropout_p = {dropout_p!r}, expected a number in [0, 1)")
    if softcap > 0:
        raise InvalidArgument(
            f"softcap = {softcap!r} with dropout_p = {dropout_p!r}, expected one of them to be 0"
        )


def as_integer(name: str, value: Any) -> Any:
    """`value` as an int (or, while compiling, a SymInt). Tensors of one element are common: they
    come from seqlens.max(). One on a GPU is waited for, since a launch is planned by the number.
    """
    # While compiling it may be known at run time alone, where there is nothing to ask of it; the
    # operator's schema keeps it to 64 bits.
    if isinstance(value, torch.SymInt) or (
        type(value) is int and (_is_tracing() or abs(value) < 2**63)
    ):
        return value
    if isinstance(value, torch.Tensor):
        check_integer(name, value)
        try:
            value = value.item()
        except Exception as error:
            raise _unread(name, error) from None
        if _is_tracing():
            return value
    return integer(name, value)


def words_of(mask: Any, q: Tensor) -> Tensor:
    """The words of a mask as a tensor."""
    if not isinstance(mask, Mask):
        raise InvalidArgument(
            f"mask is a {type(mask).__name__}, expected a strobe.masks.Mask: "
            + how_to_make_mask(mask)
        )
    words: Tensor = mask.packed
    if not isinstance(words, torch.Tensor):
        words = torch.from_numpy(words)
    if words.device != q.device:
        raise InvalidArgument(
            f"mask is on {words.device}, and q on {q.device}: pass mask.to(q.device)"
        )
    return words


def side_of_window(name: str, value: Any) -> Any:
    """One side of a window."""
    return value if value is None else as_integer(name, value)


def check_integer(name: str, value: Any) -> None:
    """Refuses what is no integer. What a tensor holds is not read, for which a GPU would have to be
    waited for.
    """
    if not isinstance(value, torch.Tensor):
        as_integer(name, value)
        return
    check_dense(name, value)
    try:
        floats = value.is_floating_point() or value.is_complex()
        whole = value.numel() == 1 and not floats and value.dtype != torch.bool
    except Exception as error:
        raise _unread(name, error) from None
    if not whole:
        raise InvalidArgument(
            f"{name} is a tensor of shape {tuple(value.shape)} and {value.dtype}, "
            "expected an integer"
        )


def _unread(name: str, error: Exception) -> Error:
    return InvalidArgument(f"{name} cannot be read: {first_line(error)}")


def limited(window: Any) -> Any:
    """`window` for the extension: a negative side, in flash_attn no limit whatever the number, is
    -1, and None is no number there.
    """
    # A compiler's numbers, which may be known at run time alone, are asked nothing here.
    if torch.compiler.is_compiling():
        return window
    if type(window) is tuple and len(window) == 2:
        left, right = window
        if type(left) is int and type(right) is int:
            return window if left >= -1 and right >= -1 else (max(left, -1), max(right, -1))
    return pair("window_size", window, as_limit)


def as_limit(name: str, value: Any) -> Any:
    """One side of a window as an integer: -1 for any negative number."""
    side = as_integer(name, value)
    return torch.sym_max(side, -1) if isinstance(side, torch.SymInt) else max(side, -1)


def as_number(name: str, value: Any) -> Any:
    """`value` as a float: plans are kept by it, and a tensor, a learned scale say, may change."""
    return value if type(value) is float or isinstance(value, torch.SymFloat) else real(name, value)


def as_flag(name: str, value: Any) -> Any:
    """`value` as a bool (or, while compiling, a SymBool)."""
    return value if type(value) is bool or isinstance(value, torch.SymBool) else flag(name, value)


# What checks arguments that change no result, and whether None will do.
_UNUSED: Final[dict[str, tuple[Callable[[str, Any], Any], bool]]] = {
    "num_splits": (check_integer, False),
    "sm_margin": (check_integer, False),
    "max_seqlen_k": (check_integer, True),
    "pack_gqa": (as_flag, True),
    "zero_tensors": (as_flag, False),
    "deterministic": (as_flag, False),
}


def check_unused(**arguments: Any) -> None:
    """Refuses arguments of the wrong type where they change no result, as where they do."""
    for name, value in arguments.items():
        check, optional = _UNUSED[name]
        if not (optional and value is None):
            check(name, value)


def autocast_dtype(x: Tensor) -> Any:
    """What autocast casts tensors like `x` to, or None."""
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast treats scaled_dot_product_attention: in its lower precision, but for float64."""
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        return tensors

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return tuple(map(cast, tensors))


# ------------------------------------------------------------------------------------- the one call


def call(
    q: Any,
    k: Any,
    v: Any,
    lengths: Lengths,
    options: Options,
    return_attn_probs: Any,
    packed: str = "",
    sinks: Sinks = NO_SINKS,
    more: dict[str, Any] | None = None,
) -> Result:
    """What all functions of `flash_attn` do.

    packed: the argument that q, k and v ("qkv") or k and v ("kv") were taken from, for messages.
    more: others of the tail of the operator's arguments, `_options.TAIL`.
    """
    if options[3] is not NO_WINDOW:
        options = (*options[:3], limited(options[3]), *options[4:])
    if options[5] is not None:
        constant("alibi_slopes", options[5])
    name_of_sinks, logits = "sinks", None
    if sinks[0] is not None or sinks[1] is not None:
        name_of_sinks, logits = named_sinks(sinks)
        more = {**(more or {}), "sinks": logits}
    tracing = _is_tracing()
    if not tracing and not more:
        try:
            found = _core.flash(q, k, v, lengths, options, return_attn_probs)
            if found is not None and packed:
                _core.came_by(_FUNCTIONS[packed, lengths[0] is None])
            if type(found) is tuple:  # autograd watches
                return _operators.record(q, k, v, found)
            if found is not None:
                return found
        except (InvalidArgument, NoSequences):
            pass  # below, a contiguous copy may help, and if not, the message is given
    plain = not tracing and is_plain(q, k, v)
    q, k, v, plain_arguments = _checked(q, k, v, lengths, options, packed, logits)
    arguments = plain_arguments + (_options.positional(**more) if more else ())
    return_attn_probs = as_flag("return_attn_probs", return_attn_probs)
    if tracing:
        out, lse = _operators.attention_forward(q, k, v, *arguments)
    else:
        try:
            out, lse = _operators.differentiable(plain, q, k, v, arguments)
        except Error as error:
            raise _by_name(error, packed, name_of_sinks) from None
        except (AssertionError, NotImplementedError, TypeError) as error:
            others = {"alibi_slopes": arguments[2], name_of_sinks: logits}
            found = in_our_words(error, q=q, k=k, v=v, **others)
            if found is error:
                raise
            raise _by_name(found, packed, name_of_sinks) from None
    _operators.came_by(_FUNCTIONS[packed, lengths[0] is None], out)
    if not return_attn_probs:
        return out
    if arguments[3] is None:
        return out, lse, q.new_empty(0)  # as flash_attn, which keeps S_dmask for tests of dropout
    weights = _operators.attention_dropout_weights(q.detach(), k.detach(), *plain_arguments)
    return out, lse, weights


def _checked(
    q: Any, k: Any, v: Any, lengths: Lengths, options: Options, packed: str, sinks: Tensor | None
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """q, k and v as autocast wants them, and the operator's options."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    dropout_p, scale, causal, window_size, softcap, alibi_slopes, deterministic = options
    if cu_seqlens_q is not None:
        names = _PACKED_NAMES if packed == "qkv" else {}
        one_for_both = max_seqlen_q is max_seqlen_k  # a tensor, say, which is read once
        max_seqlen_q = as_integer(names.get("max_seqlen_q", "max_seqlen_q"), max_seqlen_q)
        max_seqlen_k = (
            max_seqlen_q
            if one_for_both
            else as_integer(names.get("max_seqlen_k", "max_seqlen_k"), max_seqlen_k)
        )
    if scale is not None:
        scale = as_number("softmax_scale", scale)
    softcap = as_number("softcap", softcap)
    dropout_p = as_number("dropout_p", dropout_p)
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes, None)
    if packed != "qkv":
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if x is not None:
                check_tensor(name, x, ("batch + 1",))
    rows = ("batch", "seqlen") if cu_seqlens_q is None else ("total",)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, (*rows, "heads", "head_dim"))
    if not _is_tracing() and _autograd.differentiates_forward():
        _autograd.refuse_tangents(q, k, v, alibi_slopes, sinks)
    q, k, v = autocast(q, k, v)
    left, right = pair("window_size", window_size, as_limit)
    causal, deterministic = as_flag("causal", causal), as_flag("deterministic", deterministic)
    rng_state = None
    if dropout_p != 0:
        check_dropout(dropout_p, softcap)
        rng_state = _operators.dropout_state(device=q.device)
    arrays = (cu_seqlens_q, cu_seqlens_k, alibi_slopes, rng_state, max_seqlen_q, max_seqlen_k)
    plain = (dropout_p, scale, causal, left, right, softcap, deterministic)
    return q, k, v, arrays + plain
