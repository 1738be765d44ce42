"""scaled_dot_product_attention as PyTorch's compiler sees it under `sdpa_kernel`: the operator
`torch.ops.strobe.scaled_dot_product_attention`.

A compiler knows shapes and dtypes, not what a mask holds. So the operator judges again when it
runs and, if Strobe declines, calls PyTorch's own kernel. What is declined by shapes alone stays
PyTorch's in the compiled code, beside an operator that does nothing but say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, TypeAlias

import torch

from . import _blocks, _calls, _flash_attn, _masks, _operators, _sdpa
from ._blocks import gradient_like, laid_out, result_like
from ._calls import Verdict
from ._sdpa import Request

Tensor: TypeAlias = torch.Tensor

_OPTIONS: Final = (
    "Tensor? attn_mask, Tensor? rng_state, float dropout_p, bool is_causal, bool lower_right, "
    "float? scale"
)


def _by_pytorch(request: Request, lower_right: bool) -> Tensor:
    query, key, value, attn_mask, dropout_p, is_causal, scale, _ = request
    if lower_right:
        seqlen_q, seqlen_k = query.shape[2], key.shape[2]
        seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=query.device)
        attn_mask = seen.tril(seqlen_k - seqlen_q)
    options = {"enable_gqa": True} if key.shape[1] != query.shape[1] else {}
    out: Tensor = _sdpa.sdpa(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options
    )
    return out


def _unseen(kernel: Any) -> Any:
    """A kernel whose own calls of PyTorch no TorchFunctionMode sees: the block's comes first."""

    @wraps(kernel)
    def unseen(*arguments: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return kernel(*arguments)

    return unseen


def _request(*arguments: Any) -> tuple[Request, Tensor | None, bool]:
    """(request, rng_state, lower_right) of the operator's arguments."""
    *tensors, rng_state, dropout_p, is_causal, lower_right, scale = arguments
    request = Request._make([*tensors, dropout_p, is_causal, scale, True])
    return request, rng_state, lower_right


@contextmanager
def _drawing(rng_state: Tensor | None, x: Tensor) -> Iterator[None]:
    """Where PyTorch's dropout draws what it draws for this state each time."""
    if rng_state is None:
        yield
        return
    with torch.random.fork_rng([] if x.device.index is None else [x.device.index]):
        torch.manual_seed(_operators.seed_and_offset(rng_state)[0] >> 1)
        yield


@_unseen
def _operator_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    request, rng_state, lower_right = _request(*arguments)
    verdict, task = _sdpa.judge_task(request, rng_state, lower_right)
    _calls.record(verdict)
    query = request.query
    if not verdict.kind and task.blocks is _masks.BIAS:
        tensors = (x.transpose(1, 2) for x in request[:3])
        out, lse = _operators.forward(*tensors, *_sdpa.bias_options(request, rng_state))
        return laid_out(out.transpose(1, 2), result_like(query, request.value.shape[3])), lse
    if not verdict.kind:
        return _blocks.forward(*request[:3], task)
    with _drawing(rng_state, query):  # so that the backward pass can draw the same again
        out = _by_pytorch(request, lower_right)
    out = laid_out(out, result_like(query, request.value.shape[3]))
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


@_unseen
def _operator_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    request, rng_state, lower_right = _request(query, key, value, *options)
    verdict, task = _sdpa.judge_task(request, rng_state, lower_right)
    if not verdict.kind and task.blocks is _masks.BIAS:
        rows = (x.transpose(1, 2) for x in (query, key, value, out))
        options = _sdpa.bias_options(request, rng_state)
        found = _operators.backward(dout.transpose(1, 2), None, *rows, lse, *options)
        like = (query, key, value)
        dq, dk, dv = (
            laid_out(x.transpose(1, 2), gradient_like(y)) for x, y in zip(found, like, strict=True)
        )
        return dq, dk, dv
    if not verdict.kind:
        return _blocks.backward(dout, query, key, value, out, lse, task)
    # PyTorch's kernel again, with a graph this time: operators run below autograd, which this lets
    # in again, and nothing else: autocast has been here.
    included = torch._C._dispatch_tls_local_include_set()
    autocast = torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA
    excluded = torch._C.DispatchKeySet(autocast[0]).add(autocast[1])
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(included, excluded):
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        with _drawing(rng_state, query):
            again = _by_pytorch(Request._make([*leaves, *request[3:]]), lower_right)
        dq, dk, dv = torch.autograd.grad(again, leaves, dout)
    return (
        laid_out(dq, gradient_like(query)),
        laid_out(dk, gradient_like(key)),
        laid_out(dv, gradient_like(value)),
    )


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    out = result_like(query, value.shape[3])
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


def _fake_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return gradient_like(query), gradient_like(key), gradient_like(value)


def _declined(kind: str) -> None:
    """What compiled code does where PyTorch's kernel stands in it."""
    _calls.record(Verdict(kind=kind))


def _gradients(dout: Tensor | None, _: Any, *saved: Any) -> Any:
    """Of query, key and value; those of lse are left out."""
    return (None, None, None) if dout is None else _backward(dout, *saved)


_NAME: Final = "scaled_dot_product_attention"
_backward: Final = _operators.define(
    f"{_NAME}_backward.as_query",
    "(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _operator_backward,
    _fake_backward,
    _operators.refuse_double_backward,
)
_forward: Final = _operators.define(
    f"{_NAME}.as_query",
    f"(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> (Tensor, Tensor)",
    _operator_forward,
    _fake_forward,
    _operators.derivative_by(_gradients),
    _operators.setup,
)
_say_declined: Final = _operators.define(
    f"{_NAME}_declined",
    "(str kind) -> ()",
    _declined,
    lambda kind: None,
    keys=("CompositeExplicitAutograd",),
)


def _register_effect() -> bool:
    """Keeps the call of an operator that returns nothing; False if this PyTorch drops it."""
    try:
        from torch._library.effects import EffectType

        torch.library._register_effectful_op(
            _say_declined.name(), EffectType.ORDERED, lib=_operators._LIBRARY
        )
    except (ImportError, AttributeError, TypeError):  # pragma: no cover - an older PyTorch
        return False
    return True


REPORTS_FROM_COMPILED_CODE: Final = _register_effect()


def traced(*args: Any, **kwargs: Any) -> Tensor | None:
    """A call while PyTorch compiles it; None if it is PyTorch's, which compiled code then says."""
    request = Request(*args, **kwargs)
    query, key, value, attn_mask, dropout_p, is_causal, scale, _ = request
    kind = _sdpa.foreign(query, key, value) or _sdpa.objection(*request.kind)
    if not kind and attn_mask is not None:
        kind = _sdpa.mask_objection(query, key, attn_mask, is_causal)
        if not kind and not _sdpa.is_causal_bias(attn_mask) and attn_mask.requires_grad:
            kind = "attn_mask requires a gradient, in compiled code"
    if kind:
        declined(kind)
        return None
    lower_right = _sdpa.is_causal_bias(attn_mask)
    query, key, value = _flash_attn.autocast(query, key, value)
    rng_state = _operators.dropout_state(device=query.device) if dropout_p > 0 else None
    mask = None if lower_right else attn_mask
    plain = (dropout_p, is_causal, lower_right, scale)
    out: Tensor
    out, _ = _forward(query, key, value, mask, rng_state, *plain)
    return out


def declined(kind: str) -> None:
    """Makes compiled code say that PyTorch computes a call."""
    if REPORTS_FROM_COMPILED_CODE:
        _say_declined(kind)


def is_traced() -> bool:
    """Whether a compiler looks, or modes that must see operators (fake tensors, export)."""
    return bool(torch.compiler.is_dynamo_compiling() or _flash_attn.is_in_dispatch_mode())
