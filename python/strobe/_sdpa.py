"""Which calls of scaled_dot_product_attention are Strobe's, and how they are computed.

`judge` decides of tensors that hold data; `foreign`, `objection` and `mask_objection` are the part
of it that needs no data, so that PyTorch's compiler can ask it as well (`_sdpa_compiled`).
"""

from __future__ import annotations

from functools import lru_cache
from types import NoneType
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from . import (
    _arrays,
    _autograd,
    _blocks,
    _core,
    _flash_attn,
    _masks,
    _operators,
    _options,
    _questions,
)
from ._blocks import Task
from ._calls import SDPA, Verdict
from ._differentiable import attention
from ._errors import Error, InvalidArgument, Unsupported
from ._masks import Block, Blocks
from ._packed_mask import bytes_for
from ._problem import mask_layout
from .flash_attn import flash_attn_func

Tensor: TypeAlias = torch.Tensor
Shape: TypeAlias = tuple[int, ...]

sdpa: Final = torch.nn.functional.scaled_dot_product_attention
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT32_MAX: Final = torch.finfo(torch.float32).max


class Request(NamedTuple):
    """The arguments of a call of scaled_dot_product_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def kind(self) -> tuple[Any, ...]:
        """What `objection` is asked of: all that is known before a tensor holds data."""
        tensors = self[:3]
        return (
            *(tuple(x.shape) for x in tensors),
            tuple(x.dtype for x in tensors),
            tuple(x.device for x in tensors),
            self.dropout_p,
            self.scale,
            self.enable_gqa,
            _flash_attn.autocast_dtype(self.query),
        )


# --------------------------------------------------------------------------------------- objections


def foreign(query: Any, key: Any, value: Any) -> str:
    """What is against tensors of this kind, before anything is asked of them."""
    for x in (query, key, value):
        if not isinstance(x, torch.Tensor):
            return "query, key and value are not all tensors"
        if x.is_nested:
            return "a tensor is nested or jagged"
        if x.layout != torch.strided:
            return "a tensor is not strided"
        if type(x) not in (torch.Tensor, torch.nn.Parameter) and not _stands_for_another(x):
            return "a tensor is of a subclass of torch.Tensor"
    return ""


def _stands_for_another(x: Tensor) -> bool:
    """Whether it stands for a tensor while a compiler looks."""
    return type(x).__name__ in ("FakeTensor", "FunctionalTensor")


def is_causal_bias(attn_mask: Any) -> bool:
    """Whether this is a mask of torch.nn.attention.bias, by name: to import that module imports
    PyTorch's compiler, which takes a second.
    """
    return isinstance(attn_mask, torch.Tensor) and type(attn_mask).__name__ == "CausalBias"


def is_lower_right(attn_mask: Any) -> bool:
    """Whether this is torch.nn.attention.bias.causal_lower_right(...): Strobe's causal."""
    return is_causal_bias(attn_mask) and (
        attn_mask.variant.name == "LOWER_RIGHT" or attn_mask.seq_len_q == attn_mask.seq_len_kv
    )


def mask_objection(query: Tensor, key: Tensor, attn_mask: Any, is_causal: Any) -> str:
    """What is against this mask, whatever it holds."""
    if is_causal:
        return "attn_mask and is_causal are both given"
    if is_causal_bias(attn_mask):
        if not is_lower_right(attn_mask):
            return "attn_mask is causal_upper_left(...) with different lengths"
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (query.shape[2], key.shape[2]):
            return "attn_mask is a CausalBias of other lengths than query and key have"
        if query.shape[2] > key.shape[2] and not _masks.EMPTY_ROWS_ARE_ZERO:
            return (
                "attn_mask is a CausalBias under which queries see nothing, NaN before PyTorch 2.5"
            )
        return ""
    if type(attn_mask) not in (torch.Tensor, torch.nn.Parameter) and not _stands_for_another(
        attn_mask
    ):
        return "attn_mask is no plain tensor"
    if attn_mask.is_nested or attn_mask.layout != torch.strided:
        return "attn_mask is not strided"
    if attn_mask.device != query.device:
        return "attn_mask is on another device than query"
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return "attn_mask is neither bool nor of query's dtype nor float32"
    if not 2 <= attn_mask.ndim <= 4 or attn_mask.shape[-1] != key.shape[2]:
        return "attn_mask is not (batch, heads, seqlen_q, seqlen_k) with the keys of key"
    wanted = (query.shape[0], query.shape[1], query.shape[2])[4 - attn_mask.ndim :]
    for n, whole in zip(attn_mask.shape[:-1], wanted, strict=True):
        if n not in (1, whole):
            return "attn_mask does not broadcast to (batch, heads, seqlen_q, seqlen_k)"
    return ""


def objection(
    q: Shape,
    k: Shape,
    v: Shape,
    dtypes: tuple[Any, Any, Any],
    devices: tuple[Any, Any, Any],
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
    autocast: Any,
) -> str:
    """Why Strobe has nothing to do with tensors like these, without shapes; "" if it may.

    autocast: the dtype that PyTorch's autocast casts to, or None.
    """
    if len(q) != 4 or len(k) != 4 or len(v) != 4:
        return "a tensor is not (batch, heads, seqlen, head_dim)"
    if k[0] != q[0] or v[0] != q[0]:
        return "the batch is broadcast"
    if k[1] != v[1] or k[2] != v[2]:
        return "key and value differ in heads or seqlen"
    if k[3] != q[3]:
        return "query and key differ in head_dim"
    if 0 in q or 0 in k or 0 in v:
        return "a tensor is empty"
    if q[3] > 256 or v[3] > 256:
        return "head_dim is above 256"
    if k[1] != q[1] and (not enable_gqa or q[1] % k[1] != 0):
        return "key has other heads than query, without enable_gqa or not a divisor of query's"
    if dtypes[1] != dtypes[0] or dtypes[2] != dtypes[0]:
        return "query, key and value differ in dtype"
    if devices[1] != devices[0] or devices[2] != devices[0]:
        return "query, key and value are on different devices"
    device = devices[0].type
    if device not in ("cpu", "cuda"):
        return "Strobe has no kernels for this device"
    dtype = autocast if autocast is not None and dtypes[0] in _FLOATS else dtypes[0]
    if dtype not in (_FLOATS if device == "cpu" else _FLOATS[1:]):
        return f"Strobe has no kernels for this dtype on {device}"
    if not 0 <= dropout_p < 1:
        return "dropout_p is not in [0, 1)"
    if scale is not None and not -_FLOAT32_MAX <= scale <= _FLOAT32_MAX:
        return "scale is not finite in float32"
    return ""


def top_left(is_causal: bool, seqlen_q: int, seqlen_k: int) -> tuple[bool, tuple[int, int]]:
    """(causal, window) that align the mask top left, as scaled_dot_product_attention's is_causal;
    Strobe's causal is aligned bottom right. Holds for seqlen_q >= seqlen_k.
    """
    if is_causal and seqlen_q > seqlen_k:
        return False, (-1, seqlen_q - seqlen_k)
    return is_causal, (-1, -1)


# ----------------------------------------------------------------------------------------- verdicts


@lru_cache(maxsize=4096)
def _verdict(is_causal: bool, *kind: Any) -> Verdict:
    """Of a call without a mask."""
    q, k, v, dtypes, devices, dropout_p, _, _, autocast = kind
    detail = f"query {q} {dtypes[0]} on {devices[0]}, key {k}, value {v}, dropout_p {dropout_p}"
    reason = objection(*kind)
    if reason:
        return Verdict(kind=reason, detail=detail)
    causal, window = top_left(is_causal, q[2], min(q[2], k[2]))
    dtype = str(autocast or dtypes[0]).removeprefix("torch.")
    specs = [_arrays.ArraySpec((n[0], n[2], n[1], n[3]), dtype, str(devices[0])) for n in (q, k, v)]
    try:
        for direction in (False, True):
            _questions.plan(
                *specs, causal=causal, window=window, dropout_p=dropout_p, backward=direction
            )
    except Error as error:
        return Verdict(kind="no kernel of Strobe takes it", detail=str(error))
    return Verdict()


@lru_cache(maxsize=4096)
def _bias_verdict(shape: Shape, dtype: Any, with_grad: bool, *kind: Any) -> Verdict:
    """Of a call whose mask is added to the scores, which `_verdict` has let through."""
    q, k, v, dtypes, devices, dropout_p, _, _, autocast = kind
    named = str(autocast or dtypes[0]).removeprefix("torch."), str(dtype).removeprefix("torch.")
    device = str(devices[0])
    specs = [_arrays.ArraySpec((n[0], n[2], n[1], n[3]), named[0], device) for n in (q, k, v)]
    bias = _arrays.ArraySpec((*(1,) * (4 - len(shape)), *shape), named[1], device)
    try:
        for direction in (False, True):
            dbias = direction and with_grad
            _questions.plan(*specs, bias=bias, dropout_p=dropout_p, backward=direction, dbias=dbias)
    except Error as error:
        return Verdict(kind="no kernel of Strobe takes attn_mask as a bias", detail=str(error))
    return Verdict()


@lru_cache(maxsize=4096)
def _data_verdict(
    block: tuple[int, int], of_sequences: bool, of_heads: bool, *kind: Any
) -> Verdict:
    """Of a call whose mask is data, as `_masks.data_options` says, which `_verdict` has let
    through.
    """
    q, k, v, dtypes, devices, dropout_p, _, _, autocast = kind
    if not _masks.EMPTY_ROWS_ARE_ZERO:  # pragma: no cover - another PyTorch
        return Verdict(kind=_masks.NAN)
    dtype, device = str(autocast or dtypes[0]).removeprefix("torch."), str(devices[0])
    specs = [_arrays.ArraySpec((n[0], n[2], n[1], n[3]), dtype, device) for n in (q, k, v)]
    # Which kernel takes it does not depend on the room that it has.
    fields = {"batch": q[0] if of_sequences else 1, "heads": q[1] if of_heads else 1}
    fields |= {"seqlen_q": q[2], "seqlen_k": k[2]}
    options: dict[str, Any] = {
        "mask_layout": mask_layout(block, of_sequences, of_heads, 1, 1),
    }
    try:
        words = (bytes_for(fields, block, (1, 1)) or 0) // 4
        options["mask"] = _arrays.ArraySpec((words,), "int32", device)
        for direction in (False, True):
            _questions.plan(*specs, **options, dropout_p=dropout_p, backward=direction)
    except Error as error:
        return Verdict(kind="no kernel of Strobe takes attn_mask as data", detail=str(error))
    return Verdict()


def judge(request: Request) -> tuple[Verdict, Blocks | None]:
    """Who computes this call, and, if it has a mask that Strobe serves, as which blocks, or as
    `_masks.BIAS`.
    """
    query, key, value, attn_mask, dropout_p, is_causal, scale, _ = request
    kind = foreign(query, key, value)
    if not kind and _autograd.differentiates_forward():
        kind = "forward-mode differentiation is at work"
    plain = isinstance(dropout_p, (float, int)) and isinstance(scale, (float, int, NoneType))
    if not plain or bool in (type(dropout_p), type(scale)):  # PyTorch takes a bool for a number
        kind = kind or "dropout_p or scale is no plain number"
    if kind:
        return Verdict(kind=kind), None
    verdict = _verdict(is_causal, *request.kind)
    if verdict.kind or attn_mask is None:
        return verdict, None
    kind = mask_objection(query, key, attn_mask, is_causal)
    if kind:
        return Verdict(kind=kind, detail=_describe(attn_mask)), None
    if is_causal_bias(attn_mask):
        return verdict, None
    refusal = ""
    if _operators.is_transformed():
        refusal = "attn_mask under a transform of torch.func"
    elif attn_mask.requires_grad and torch.is_grad_enabled():
        refusal = "attn_mask requires a gradient"
    else:
        as_data = None
        if attn_mask.is_cuda and attn_mask.dtype == torch.bool:
            options = _masks.data_options(attn_mask, query.shape[2])
            as_data = _data_verdict(*options, *request.kind)
        serves = as_data is not None and not as_data.kind
        blocks = _masks.blocks(attn_mask, query.shape[0], query.shape[2], serves)
        if not blocks.refusal:
            return verdict, blocks
        refusal = blocks.refusal
        if as_data is not None and refusal in _masks.DATA_ALONE:
            return as_data, None
    # A row whose keys all have the most negative number is their average. PyTorch's own backward is
    # another there, and who has such padding rows expects that one.
    stays = refusal == _masks.ALL_HIDDEN or not _masks.EMPTY_ROWS_ARE_ZERO
    if stays or not attn_mask.is_floating_point():
        return Verdict(kind=refusal, detail=_describe(attn_mask)), None
    shape, dtype = tuple(attn_mask.shape), attn_mask.dtype
    return _bias_verdict(shape, dtype, attn_mask.requires_grad, *request.kind), _masks.BIAS


def judge_task(
    request: Request, rng_state: Tensor | None = None, lower_right: bool = False
) -> tuple[Verdict, Task]:
    """`judge`, with one block for a call without a mask. lower_right: is_causal's alignment. Where
    the task's blocks are `_masks.BIAS`, `bias_options` has the call.
    """
    verdict, blocks = judge(request)
    if blocks is not _masks.BIAS:
        blocks = blocks or _whole_of(request, lower_right)
    return verdict, Task(blocks, rng_state, request.dropout_p, request.scale)


@lru_cache(maxsize=4096)
def _whole(batch: int, seqlen_q: int, seqlen_k: int, is_causal: bool, lower_right: bool) -> Blocks:
    """A call without a mask in a tensor, as one block."""
    seen = min(seqlen_q, seqlen_k) if is_causal else seqlen_k
    causal, window = top_left(is_causal, seqlen_q, seen)
    queries, keys = slice(0, seqlen_q), slice(0, seen)
    block = Block(slice(0, batch), queries, keys, causal or lower_right, window)
    return Blocks((block,), hides_keys=seen < seqlen_k)


def _whole_of(request: Request, lower_right: bool) -> Blocks:
    (batch, _, seqlen_q, _), is_causal = request.query.shape, bool(request.is_causal)
    return _whole(batch, seqlen_q, request.key.shape[2], is_causal, lower_right)


def _lies_as_rows(x: Tensor) -> bool:
    """Whether tensors laid out like x, (batch, heads, seqlen, head_dim), lie as (batch, seqlen,
    heads, head_dim), which is how `flash_attn_func` makes them.
    """
    batch, heads, seqlen, head_dim = x.stride()
    return bool(batch > seqlen > heads > head_dim == 1)


# What a call with arguments that are none of scaled_dot_product_attention's raises on the way.
_NOT_ARGUMENTS: Final = (TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


def judge_any(*args: Any, **kwargs: Any) -> tuple[Verdict, Blocks | None]:
    """`judge` of whatever somebody calls with."""
    try:
        return judge(Request(*args, **kwargs))
    except _NOT_ARGUMENTS as error:
        return Verdict(kind="the arguments are not those of a call", detail=str(error)[:200]), None


def _describe(attn_mask: Any) -> str:
    if is_causal_bias(attn_mask):  # before PyTorch 2.5 it has no shape
        return f"{attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys"
    return f"a {type(attn_mask).__name__} {tuple(attn_mask.shape)} {attn_mask.dtype}"


# ---------------------------------------------------------------------------------------- computing


def _four_axes(attn_mask: Tensor) -> Tensor:
    return attn_mask[(None,) * (4 - attn_mask.ndim)]


def bias_options(request: Request, rng_state: Tensor | None) -> tuple[Any, ...]:
    """What `_operators.forward` is given besides q, k and v, where the mask is a bias."""
    assert request.attn_mask is not None
    tail = _options.positional(bias=_four_axes(request.attn_mask))
    scores = (request.dropout_p, request.scale, False, -1, -1, 0.0, False)
    return (None, None, None, rng_state, None, None, *scores, *tail)


def serve(blocks: Blocks | None, *args: Any, **kwargs: Any) -> Tensor:
    """scaled_dot_product_attention of a call that `judge` gives to Strobe, of tensors with data."""
    request = Request(*args, **kwargs)
    query, key, value, attn_mask, dropout_p, is_causal, scale, _ = request
    if blocks is _masks.BIAS:
        assert attn_mask is not None
        query, key, value = _flash_attn.autocast(query, key, value)
        rows = [x.transpose(1, 2) for x in (query, key, value)]
        bias = _four_axes(attn_mask)
        biased = attention(rows[0], rows[1], rows[2], bias=bias, dropout_p=dropout_p, scale=scale)
        _core.came_by(SDPA)
        biased = biased.transpose(1, 2)
        if _operators.is_transformed():
            return biased
        return _blocks.laid_out(biased, _blocks.result_like(query, value.shape[3]))
    if blocks is None and not _operators.is_transformed():
        tensors = (query,) if query.is_cpu else (query, key, value)
        if query.shape[3] != value.shape[3] or not all(map(_lies_as_rows, tensors)):
            blocks = _whole_of(request, attn_mask is not None)
    if blocks is not None:
        query, key, value = _flash_attn.autocast(query, key, value)
        rng_state = None
        if dropout_p > 0:
            rng_state = _operators.dropout_state(device=query.device)
        arguments = (query, key, value, Task(blocks, rng_state, dropout_p, scale))
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            out: Tensor = _blocks.Masked.apply(*arguments)[0]
            return out
        return _blocks.forward(*arguments, with_lse=False)[0]
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    if is_causal and seqlen_q < seqlen_k:  # aligned top left, nobody sees what comes after
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
        seqlen_k = seqlen_q
    causal, window = top_left(is_causal, seqlen_q, seqlen_k)
    out = flash_attn_func(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        dropout_p,
        scale,
        causal or attn_mask is not None,
        window,
    )
    _core.came_by(SDPA)
    return out.transpose(1, 2)


# What goes wrong with a call that Strobe was to compute, and PyTorch may compute all the same.
REFUSALS: Final = (InvalidArgument, Unsupported)
