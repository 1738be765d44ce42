"""Strobe as a flash attention implementation of PyTorch's registry (2.11 and newer)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch

from . import _blocks, _calls, _operators, _sdpa
from ._blocks import Task
from ._calls import ServedCalls
from ._errors import Unsupported
from ._sdpa import Request

Tensor: TypeAlias = torch.Tensor


_SERVED: Final = ServedCalls()  # of the process


def register() -> ServedCalls:
    """Makes Strobe known to PyTorch (2.11 and newer) as a flash attention implementation.

    Nothing changes before the user's `torch.nn.attention.activate_flash_attention_impl("strobe")`.
    From then on, where PyTorch chooses its flash kernel for scaled_dot_product_attention, on the
    CPU and on CUDA devices, Strobe computes; what Strobe declines goes to the kernel that was
    there, see `strobe.why()`. `torch.nn.attention.restore_flash_attention_impl()` undoes it.

    Returns:
        What has become of these calls, in all threads of the process; it goes on counting, and
        every call of `register` returns the same one.

    Raises:
        Unsupported: PyTorch is older; `sdpa_kernel` works there too.

    Example:
        >>> import torch, strobe
        >>> served = strobe.torch.register()
        >>> torch.nn.attention.activate_flash_attention_impl("strobe")
        >>> q, k, v = torch.randn(3, 2, 8, 300, 64)
        >>> before = served.calls
        >>> out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.nn.attention.restore_flash_attention_impl()
        >>> served.calls - before
        1
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise Unsupported(
            f"PyTorch {torch.__version__} has no register_flash_attention_impl (2.11 does): use "
            "the context manager strobe.torch.sdpa_kernel()"
        ) from None
    register_flash_attention_impl("strobe", register_fn=_activate)
    return _SERVED


@dataclass
class _Activation:
    """What PyTorch keeps while Strobe is active."""

    library: Any

    def remove(self) -> None:
        """Gives the operators back to the kernels that were there."""
        self.library = None  # its finaliser does it


def _activate() -> _Activation:
    library = torch.library.Library("aten", "IMPL")
    overrides: list[tuple[str, str, Callable[..., Any]]] = [
        ("_scaled_dot_product_flash_attention_for_cpu", "CPU", _cpu_forward),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "CPU", _cpu_backward),
    ]
    if torch.cuda.is_available():
        overrides += [
            ("_scaled_dot_product_flash_attention", "CUDA", _cuda_forward),
            ("_scaled_dot_product_flash_attention_backward", "CUDA", _cuda_backward),
        ]
    for name, key, kernel in overrides:
        before = torch.library.get_kernel(f"aten::{name}", key)
        with warnings.catch_warnings():
            # "Overriding a previously registered kernel": that is what was asked for.
            warnings.simplefilter("ignore", UserWarning)
            library.impl(name, partial(kernel, before), key, with_keyset=True)
    return _Activation(library)


def _task_of(request: Request, *, forward: bool = False) -> Task | None:
    """What Strobe computes; None if it declines. The same in forward and backward."""
    verdict, task = _sdpa.judge_task(request)
    _calls.record(verdict, counted=False)  # a block has counted what came by it
    if forward:
        _SERVED.count(verdict)
    return None if verdict.kind else task


def _forward(request: Request, task: Task) -> tuple[Tensor, Tensor]:
    out = _blocks.result_like(request.query, request.value.shape[3])
    _, lse = _blocks.forward(*request[:3], task, out=out)
    return out, lse


def _backward(
    request: Request, new: Callable[[Tensor], Tensor], task: Task, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """new: makes a gradient's tensor. others: gradient of out, out, lse."""
    dout, out, lse = others
    query, key, value = tensors = request[:3]
    grads = (new(query), new(key), new(value))
    return _blocks.backward(dout, *tensors, out, lse, task, grads)


def _cpu_request(query: Tensor, key: Tensor, value: Tensor, *plain: Any, **named: Any) -> Request:
    """From the arguments of PyTorch's kernels for the CPU: plain are dropout_p and is_causal."""
    given = dict(zip(("dropout_p", "is_causal"), plain, strict=False))
    return Request(query, key, value, enable_gqa=True, **given, **named)


def _cpu_forward(before: Any, keyset: Any, *args: Any, **options: Any) -> Any:
    """aten::_scaled_dot_product_flash_attention_for_cpu; PyTorch calls it without dropout only."""
    request = _cpu_request(*args, **options)
    task = None if request.dropout_p > 0 else _task_of(request, forward=True)
    if task is None:
        return before.call_boxed(keyset, *args, **options)
    out, lse = _forward(request, task)
    # The layout that PyTorch's compiler expects of this operator: heads innermost.
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_backward(before: Any, keyset: Any, *args: Any, **options: Any) -> Any:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward."""
    dout, query, key, value, out, lse, *plain = args
    request = _cpu_request(query, key, value, *plain, **options)
    task = None if request.dropout_p > 0 else _task_of(request)
    if task is None:
        return before.call_boxed(keyset, *args, **options)
    return _backward(request, _blocks.gradient_like, task, dout, out, lse)


def _cuda_forward(
    before: Any,
    keyset: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_flash_attention."""
    request = Request(query, key, value, None, dropout_p, is_causal, scale, True)
    task = None if return_debug_mask else _task_of(request, forward=True)
    if task is None:
        plain = (dropout_p, is_causal, return_debug_mask)
        return before.call_boxed(keyset, query, key, value, *plain, scale=scale)
    rng_state = torch.zeros(2, dtype=torch.int64)
    if dropout_p > 0:
        rng_state = _operators.draw_dropout_state(device=query.device)
    results = _forward(request, task._replace(rng_state=rng_state))
    longest = (query.shape[2], key.shape[2])
    seed, unused = rng_state.view(torch.uint64), torch.zeros((), dtype=torch.uint64)
    return (*results, None, None, *longest, seed, unused, query.new_empty(0))


def _cuda_backward(before: Any, keyset: Any, *args: Any, scale: float | None = None) -> Any:
    """aten::_scaled_dot_product_flash_attention_backward."""
    dout, query, key, value, out, lse, *_, dropout_p, is_causal, seed, _ = args
    request = Request(query, key, value, None, dropout_p, is_causal, scale, True)
    task = _task_of(request)
    if task is None:
        return before.call_boxed(keyset, *args, scale=scale)
    if dropout_p > 0:
        task = task._replace(rng_state=seed.view(torch.int64))
    return _backward(request, torch.empty_like, task, dout, out, lse)
