"""Strobe as a flash attention implementation of PyTorch's registry (2.11 and newer).

Activated, Strobe's functions take the place of PyTorch's kernels for these operators, below
autograd, autocast, torch.compile and every other layer of PyTorch's dispatcher:

    aten::_scaled_dot_product_flash_attention, and its backward        CUDA
    aten::_flash_attention_forward, and its backward: dense, packed    CUDA
    aten::_flash_attention_forward_no_dropout_inplace, where it exists CUDA
    aten::_scaled_dot_product_flash_attention_for_cpu, and its backward CPU

What Strobe declines goes to the kernel that was there. On CUDA a call is one function of `_core`,
which finds its plan and allocates what PyTorch's kernel would return, in the same memory layout.
Where PyTorch's stable C interface has all that it takes, calls like one before run no Python at all
(`direct`).
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch

from . import _blocks, _calls, _core, _masks, _operators, _sdpa
from ._blocks import Task
from ._calls import ServedCalls, Verdict
from ._errors import InvalidArgument, Unsupported
from ._plans import NoSequences
from ._sdpa import Request

Tensor: TypeAlias = torch.Tensor

NAME: Final = "STROBE"  # of the implementation, in PyTorch's list
_OLDER_NAME: Final = "strobe"  # by which `register` knows it


class _Served(ServedCalls):
    """Those of the process, which the extension counts."""

    _start = 0  # of its count

    @property
    def calls(self) -> int:
        return _core.served_calls() - self._start

    @calls.setter
    def calls(self, number: int) -> None:
        self._start = _core.served_calls() - number


_Served.__qualname__ = ServedCalls.__qualname__  # as it is shown
_SERVED: Final = _Served()
# As `strobe.why()` names them.
_FLASH: Final = "PyTorch's flash attention"
_GRADIENT: Final = f"the gradient of {_FLASH}"


def register() -> ServedCalls:
    """What has become of the calls that Strobe's flash attention implementation got from PyTorch.

    `import strobe.torch` makes Strobe known to PyTorch (2.11 and newer) as the implementation
    "STROBE", and this function makes it known as "strobe" too. Nothing changes before the user's
    `torch.nn.attention.activate_flash_attention_impl("STROBE")`. From then on, where PyTorch
    chooses its flash kernel, on CUDA devices and on the CPU, Strobe computes; what Strobe declines
    goes to the kernel that was there, see `strobe.why()`. PyTorch's cuDNN attention, which
    PyTorch prefers to flash attention on Hopper, is switched off meanwhile.
    `torch.nn.attention.restore_flash_attention_impl()` undoes it all.

    Returns:
        The counts of all threads of the process; they go on counting, and every call of `register`
        returns the same ones.

    Raises:
        Unsupported: PyTorch is older; `sdpa_kernel` works there too.

    Example:
        >>> import torch, strobe
        >>> served = strobe.torch.register()
        >>> torch.nn.attention.activate_flash_attention_impl("STROBE")
        >>> q, k, v = torch.randn(3, 2, 8, 300, 64)
        >>> before = served.calls
        >>> out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.nn.attention.restore_flash_attention_impl()
        >>> served.calls - before
        1
    """
    if not _make_known(_OLDER_NAME):
        raise Unsupported(
            f"PyTorch {torch.__version__} has no register_flash_attention_impl (2.11 does): use "
            "the context manager strobe.torch.sdpa_kernel()"
        )
    return _SERVED


def _make_known(name: str) -> bool:
    """Whether PyTorch has the registry, which then knows Strobe by this name."""
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        return False
    register_flash_attention_impl(name, register_fn=_activate)
    return True


# -------------------------------------------------------------------------------------- activation


@dataclass
class _Activation:
    """What PyTorch keeps while Strobe is active."""

    library: Any
    without_cudnn: bool  # whether cuDNN's attention was switched off for it
    kernels: list[object] = field(default_factory=list)  # those without Python
    names: list[str] = field(default_factory=list)

    def remove(self) -> None:
        """Gives the operators back to the kernels that were there, and cuDNN its place."""
        self.kernels.clear()  # their finalisers do it, and that of the library
        self.library = None
        if self.without_cudnn:
            torch.backends.cuda.enable_cudnn_sdp(True)
        self.without_cudnn = False


# PyTorch's own kernels of the operators that are, or once were, replaced, by name. They stay here
# when the operators are given back: a call in another thread may be on its way to one of them.
_pytorchs: Final[dict[str, Callable[..., Any]]] = {}


def _activate() -> _Activation:
    library = torch.library.Library("aten", "IMPL")
    on_cuda = torch.cuda.is_available()
    activation = _Activation(library, on_cuda and torch.backends.cuda.cudnn_sdp_enabled())
    replace(activation, _FOR_CPU, "CPU")
    if on_cuda:
        replace(activation, _FOR_CUDA, "CUDA")
        for name in activation.names:
            if name in _DIRECT:
                activation.kernels.append(direct(name, "CUDA"))
    if activation.without_cudnn:
        torch.backends.cuda.enable_cudnn_sdp(False)
    return activation


def replace(activation: _Activation, kernels: dict[str, Callable[..., Any]], key: str) -> None:
    """Puts functions in the place of the kernels that PyTorch's dispatcher has for `key`. Operators
    that this PyTorch does not have, and kernels that it was built without, are left out.
    """
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    for name, kernel in kernels.items():
        if not hasattr(torch.ops.aten, name):
            continue
        try:  # before it is replaced
            before = torch.library.get_kernel(f"aten::{name}", key)
        except RuntimeError:
            continue
        _pytorchs[name] = functools.partial(before.call_boxed, keyset)
        activation.names.append(name)
        with warnings.catch_warnings():
            # "Overriding a previously registered kernel": that is what was asked for.
            warnings.simplefilter("ignore", UserWarning)
            activation.library.impl(name, kernel, key)


# --------------------------------------------------------------------------------- who has computed


class _Declined(Exception):
    """A call that is PyTorch's: why, without shapes."""


# What a call that Strobe was to compute raises where PyTorch may compute it all the same.
_REFUSALS: Final = (_Declined, InvalidArgument, Unsupported, NoSequences)

# PyTorch's kernel for scaled_dot_product_attention calls another of these operators, with which it
# comes here again: that is one call.
_at_pytorchs: Final = threading.local()


def _refusal(error: Exception, *, gradient: bool) -> Verdict:
    if isinstance(error, _Declined):
        kind, detail = str(error), ""
    elif isinstance(error, NoSequences):
        kind, detail = "there are no sequences", ""
    elif isinstance(error, Unsupported):
        kind, detail = "no kernel of Strobe takes it", str(error)
    else:
        kind, detail = "Strobe refused it", str(error)
    if gradient:
        kind = f"in a backward pass: {kind}"
    return Verdict(kind=kind, detail=detail, what=_GRADIENT if gradient else _FLASH)


def _by_pytorch(name: str, error: Exception, *args: Any, **options: Any) -> Any:
    """The call by PyTorch's own kernel. error: why."""
    nested = getattr(_at_pytorchs, "now", False)
    if not nested:
        verdict = _refusal(error, gradient=name.endswith("_backward"))
        _calls.record(verdict, counted=False)
        _SERVED.count(verdict)
    _at_pytorchs.now = True
    try:
        return _pytorchs[name](*args, **options)
    finally:
        _at_pytorchs.now = nested


# ------------------------------------------------------------------------------------ CUDA devices


def auxiliary(query: Tensor, captured: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What PyTorch's kernels return besides, of a call without dropout and without a debug mask:
    seed, offset and the mask. captured: into a CUDA graph, where all lies on its device; else, as
    the state of dropout, in the CPU's memory, and `_core` keeps it: on the device it would lie
    outside of the pool in which PyTorch's graph trees look for what a call returns.
    """
    place, new = (query.device, torch.empty) if captured else (torch.device("cpu"), torch.zeros)
    with torch.inference_mode(False):
        return (
            new(2, dtype=torch.uint64, device=place),
            new((), dtype=torch.uint64, device=place),
            torch.empty(0, dtype=query.dtype, device=query.device),
        )


def _drawn(device: torch.device) -> tuple[Tensor, int, int]:
    """Of dropout: the state that the operator returns and the backward pass gets, in the CPU's
    memory, with its seed and offset.
    """
    state = _operators.draw_dropout_state(device=device)
    return (state.view(torch.uint64), *_operators.seed_and_offset(state))


def _state(dropout_p: float, rng_state: Tensor) -> tuple[int, int]:
    """Seed and offset of a backward pass. Those of PyTorch's kernels lie on the device."""
    if dropout_p == 0:
        return 0, 0
    if rng_state.device.type != "cpu":
        raise _Declined("the dropout of its forward pass is PyTorch's")
    return _operators.seed_and_offset(rng_state.view(torch.int64))


def _attend(
    heads_first: bool,
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[Any, Any, Any, Any],
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    scale: float | None,
    window: tuple[Any, Any] = (None, None),
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> Any:
    """The results of PyTorch's forward operator. lengths: cum_seq_q and _k, max_q and _k.
    num_splits: 1 asks for bits that do not depend on the other sequences of the batch.
    """
    if return_debug_mask:
        raise _Declined("return_debug_mask is given")
    if block_table is not None:
        # As in PyTorch nothing waits for the device to look at lengths and pages: where they are
        # out of range, rows are NaN.
        if seqused_k is None and lengths[1] is not None:
            seqused_k = lengths[1].diff()
        if lengths[0] is None or seqused_k is None or dropout_p != 0:
            raise _Declined("block_table without cum_seq_q or seqused_k, or with dropout")
        lengths = (lengths[0], None, lengths[2], None)
    elif (lengths[0] is None) != (lengths[1] is None) or (
        lengths[0] is None and seqused_k is not None
    ):
        raise _Declined("cum_seq_q, cum_seq_k and seqused_k are not given together")
    rng_state, seed, offset = None, 0, 0
    if dropout_p != 0:
        rng_state, seed, offset = _drawn(tensors[0].device)
    return _core.aten_forward(
        heads_first, *tensors, out, alibi_slopes, seqused_k, block_table, *lengths, dropout_p, seed,
        offset, rng_state, is_causal, scale, *window, num_splits == 1,
    )  # fmt: skip


def _differentiate(
    heads_first: bool,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    lengths: tuple[Any, Any, Any, Any],
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None,
    window: tuple[Any, Any] = (None, None),
) -> Any:
    """Gradients of query, key and value. tensors: grad_out, query, key, value, out, logsumexp."""
    seed, offset = _state(dropout_p, rng_state)
    return _core.aten_backward(
        heads_first, *tensors, *lengths, dropout_p, seed, offset, is_causal, scale, *window,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


_DENSE: Final = (None, None, None, None)


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_flash_attention, whose is_causal is aligned at the bottom right."""
    plain = (dropout_p, is_causal, return_debug_mask)
    try:
        return _attend(True, (query, key, value), _DENSE, *plain, scale)
    except _REFUSALS as error:
        name = "_scaled_dot_product_flash_attention"
        return _by_pytorch(name, error, query, key, value, *plain, scale=scale)


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_flash_attention_backward."""
    tensors = (grad_out, query, key, value, out, logsumexp)
    try:
        return _differentiate(True, tensors, _DENSE, dropout_p, is_causal, philox_seed, scale)
    except _REFUSALS as error:
        more = (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)
        name = "_scaled_dot_product_flash_attention_backward"
        return _by_pytorch(name, error, *tensors, *more, philox_seed, philox_offset, scale=scale)


def _flash(
    out: Tensor | None,
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[Any, Any, Any, Any],
    plain: tuple[float, bool, bool],
    scale: float | None,
    window: tuple[Any, Any],
    options: dict[str, Any],
) -> Any:
    """The two operators below. out: where the second one writes. plain: dropout_p, is_causal and
    return_debug_mask.
    """
    try:
        if out is None:
            return _attend(False, tensors, lengths, *plain, scale, window, **options)
        if plain[0] != 0:
            raise _Declined("dropout_p is not 0")
        return _attend(False, tensors, lengths, *plain, scale, window, out=out, **options)[1]
    except _REFUSALS as error:
        first: tuple[Tensor, ...] = ()
        name = "_flash_attention_forward"
        if out is not None:
            name, first = f"{name}_no_dropout_inplace", (out,)
        options |= {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
        return _by_pytorch(name, error, *first, *tensors, *lengths, *plain, **options)


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **options: Any,
) -> Any:
    """aten::_flash_attention_forward. options: seqused_k and alibi_slopes; from PyTorch 2.13 on
    also block_table and num_splits.
    """
    tensors, lengths = (query, key, value), (cum_seq_q, cum_seq_k, max_q, max_k)
    plain = (dropout_p, is_causal, return_debug_mask)
    window = (window_size_left, window_size_right)
    return _flash(None, tensors, lengths, plain, scale, window, options)


def _flash_forward_to(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **options: Any,
) -> Any:
    """aten::_flash_attention_forward_no_dropout_inplace: logsumexp, and the result in out."""
    tensors, lengths = (query, key, value), (cum_seq_q, cum_seq_k, max_q, max_k)
    plain = (dropout_p, is_causal, return_debug_mask)
    window = (window_size_left, window_size_right)
    return _flash(out, tensors, lengths, plain, scale, window, options)


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    """aten::_flash_attention_backward."""
    tensors = (grad_out, query, key, value, out, logsumexp)
    lengths, window = (cum_seq_q, cum_seq_k, max_q, max_k), (window_size_left, window_size_right)
    plain = (dropout_p, is_causal)
    try:
        return _differentiate(False, tensors, lengths, *plain, rng_state, scale, window)
    except _REFUSALS as error:
        options = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
        name = "_flash_attention_backward"
        return _by_pytorch(name, error, *tensors, *lengths, *plain, rng_state, unused, **options)


_FOR_CUDA: Final[dict[str, Callable[..., Any]]] = {
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_to,
    "_flash_attention_backward": _flash_backward,
}


# Those whose kernel may be a function of C, see python/core/direct.h; of each whether it is a
# derivative. The other one writes to a tensor that it is given.
_DIRECT: Final = {
    "_scaled_dot_product_flash_attention": False,
    "_scaled_dot_product_flash_attention_backward": True,
    "_flash_attention_forward": False,
    "_flash_attention_backward": True,
}
_FRAGMENT: Final = torch.library.Library("strobe", "FRAGMENT")
_defined: Final[set[str]] = set()  # in it


@functools.cache
def speaks_c() -> bool:
    """Whether this PyTorch has the C interface that `direct` takes, and hands values over as the
    extension reads them. Asked of an operator that does nothing else.
    """
    _FRAGMENT.define(
        "aten_probe(Tensor x, Tensor? y, SymInt i, SymInt? j, float a, float? b, bool c, int? k) "
        "-> (Tensor, SymInt)"
    )
    kernel = _core.direct_probe()
    if kernel is None:
        return False
    x = torch.empty(1, device="cpu")
    try:
        with torch._C._DisableTorchDispatch():  # of a mode that may be on
            found = [
                torch.ops.strobe.aten_probe(x, x.view(1, 1, 1), 2, 4, 5.0, 6.0, True, 7),
                torch.ops.strobe.aten_probe(x, None, 2, None, 5.0, None, False, None),
            ]
    except RuntimeError:
        return False
    same = all(y.data_ptr() == x.data_ptr() for y, _ in found)
    return same and [n for _, n in found] == [3245617, 205000]


def direct(name: str, key: str) -> object | None:
    """Puts a function of C in the place of an operator's kernel for a dispatch key. What it has not
    met before, and what Strobe declines, it hands to an operator with the same schema but for
    results that are no tensors, whose kernel is the Python function of `_FOR_CUDA`. That function
    is in place already.

    Returns:
        What keeps it there; None where this PyTorch has no interface for it.
    """
    if not speaks_c():
        return None
    schema = getattr(torch.ops.aten, name).default._schema
    arguments, results = (
        tuple((x.name, str(x.type)) for x in side) for side in (schema.arguments, schema.returns)
    )
    if name not in _defined:
        tensors = [at for at, (_, kind) in enumerate(results) if kind == "Tensor"]
        given = str(schema).removeprefix("aten::").rpartition(" -> ")[0]
        _FRAGMENT.define(f"aten{given} -> ({', '.join('Tensor' for _ in tensors)})")
        kernel = _without_exceptions(_FOR_CUDA[name], tensors)
        for device in ("CPU", "CUDA"):
            _FRAGMENT.impl(f"aten{name}", kernel, device)
        _defined.add(name)
    return _core.direct_kernel(name, f"strobe::aten{name}", key, _DIRECT[name], arguments, results)


class _Raising(torch.Tensor):  # type: ignore[misc]
    """A tensor that raises an exception whatever is done to it: PyTorch's C interface lets results
    pass, and no exceptions, which it prints.
    """

    error: BaseException

    @staticmethod
    def __new__(cls: type[_Raising], error: BaseException) -> _Raising:
        """error: what it raises."""
        made: _Raising = torch.Tensor._make_wrapper_subclass(cls, (0,))
        made.error = error
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, options: Any = None) -> Any:
        """Raises it."""
        raise next(x for x in args if isinstance(x, cls)).error


def _in_words(error: BaseException) -> str:
    """Its class and text, of which any character may be none of Unicode's."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text.encode("utf-8", "backslashreplace").decode()


def _without_exceptions(kernel: Callable[..., Any], chosen: list[int]) -> Callable[..., Any]:
    """The kernel for `direct`, of whose results it gives the chosen ones. An exception is given as
    tensors that raise it, once `_core` has left PyTorch's C interface.
    """

    def call(*args: Any, **options: Any) -> Any:
        try:
            found = kernel(*args, **options)
            return tuple(found[at] for at in chosen)
        except BaseException as error:
            raising = tuple(_Raising(error) for _ in chosen)
            _core.direct_error(_in_words(error))
            return raising

    return call


# ------------------------------------------------------------------------------------------ the CPU
# Its operators take a mask, which is read as blocks.


def _cpu_request(query: Tensor, key: Tensor, value: Tensor, *plain: Any, **named: Any) -> Request:
    """From the arguments of PyTorch's kernels for the CPU: plain are dropout_p and is_causal."""
    given = dict(zip(("dropout_p", "is_causal"), plain, strict=False))
    return Request(query, key, value, enable_gqa=True, **given, **named)


def _cpu_task(request: Request, *, forward: bool = False) -> Task | None:
    """What Strobe computes; None if it declines. The same in forward and backward. PyTorch calls
    these operators without dropout only.
    """
    if request.dropout_p > 0:
        return None
    verdict, task = _sdpa.judge_task(request)
    if not verdict.kind and task.blocks is _masks.BIAS:  # these operators have no gradient of it
        verdict = Verdict(kind="attn_mask adds other numbers than 0 and -inf")
    _calls.record(verdict, counted=False)  # a block has counted what came by it
    if forward:
        _SERVED.count(verdict)
    return None if verdict.kind else task


def _cpu_forward(*args: Any, **options: Any) -> Any:
    """aten::_scaled_dot_product_flash_attention_for_cpu."""
    request = _cpu_request(*args, **options)
    task = _cpu_task(request, forward=True)
    if task is None:
        return _pytorchs["_scaled_dot_product_flash_attention_for_cpu"](*args, **options)
    out = _blocks.result_like(request.query, request.value.shape[3])
    _, lse = _blocks.forward(*request[:3], task, out=out)
    # The layout that PyTorch's compiler expects of this operator: heads innermost.
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(*args: Any, **options: Any) -> Any:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward."""
    dout, query, key, value, out, lse, *plain = args
    task = _cpu_task(_cpu_request(query, key, value, *plain, **options))
    if task is None:
        return _pytorchs["_scaled_dot_product_flash_attention_for_cpu_backward"](*args, **options)
    return _blocks.backward(dout, query, key, value, out, lse, task)


_FOR_CPU: Final[dict[str, Callable[..., Any]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
}

_make_known(NAME)
