"""The operators `torch.ops.strobe.*`: attention as PyTorch's dispatcher, autograd, vmap and
compiler see it.

    dropout_state             seed and offset from PyTorch's generator; the only one with a side
                              effect
    attention_forward         (out, lse), a pure function of its arguments
    attention_backward        (dq, dk, dv), likewise
    attention_gradients       [dq, dk, dv], and of dsinks and dbias those that are asked for
    attention_dropout_weights the attention matrix and what dropout drops, to test dropout with

All randomness goes through `rng_state`, an argument of the others, so that a compiler may reorder
or recompute them, and activation checkpointing, which replays the generators, sees the same
weights dropped.

Arrays, layouts and options are those of `strobe.attention`, whose docstring describes them. Kernels
for CPU and CUDA are one function of `_core`, which finds the device's kernel, PyTorch's current
stream, and takes workspaces from PyTorch's allocator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
import torch.utils.checkpoint
from torch._functorch import config as functorch_config
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from . import _autograd, _core, _options, _questions, _s_dmask
from ._arrays import cannot_be_read
from ._compiler import only_within
from ._errors import InvalidArgument, Unsupported
from ._plans import NoSequences, answer
from ._values import no_gradient_by
from ._vmap import vmap_over

if not hasattr(torch.library, "register_autograd"):
    raise ImportError(
        f"strobe.flash_attn and strobe.torch need PyTorch 2.4 or newer, found {torch.__version__}; "
        "strobe.attention works with older ones"
    )

Tensor: TypeAlias = torch.Tensor

_LIBRARY: Final = torch.library.Library("strobe", "DEF")

# Everything but the tensors q, k and v; the same in each operator that takes a problem.
_OPTIONS: Final = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? alibi_slopes, Tensor? rng_state, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float dropout_p, float? scale, bool causal, "
    "SymInt window_left, SymInt window_right, float softcap, bool deterministic"
)
# And what most calls do without, with defaults, so that a call may end before.
_MORE: Final = ", ".join(row.schema for row in _options.TAIL)


def define(
    name: str,
    schema: str,
    kernel: Any,
    fake: Any,
    gradient: Any = None,
    setup: Any = None,
    *,
    keys: tuple[str, ...] = ("CPU", "CUDA"),
    tags: tuple[Any, ...] = (),
    query: int | None = None,
) -> Any:
    """Registers the operator torch.ops.strobe.<name>.

    PyTorch keeps compiled code on disk and finds it by the names and arguments of operators. So
    where `fake` comes to tell other strides, or a graph is traced in another way, the operator gets
    another name after a dot in `name`, that of an overload.

    kernel: for the dispatcher's `keys`; fake: makes results without data; gradient and setup: as
    `_autograd.kernel` has them; query: the place of q among the arguments, for vmap (`vmap_over`);
    None: without.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    for key in keys:
        _LIBRARY.impl(name, only_within(kernel), key)
    torch.library.register_fake(f"strobe::{name}", fake, lib=_LIBRARY)
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.strobe, packet), overload or "default")
    if gradient is not None:
        derivative = _autograd.kernel(operator, gradient, setup)
        _LIBRARY.impl(name, only_within(derivative), "Autograd", with_keyset=True)
    if query is not None and hasattr(torch.library, "register_vmap"):  # PyTorch 2.5
        rule = vmap_over(operator, query)
        torch.library.register_vmap(operator.name(), rule, lib=_LIBRARY)
    return operator


# ------------------------------------------------------------------ seeds and offsets of dropout

_UINT64: Final = 2**64 - 1
# Philox numbers that a CUDA generator counts for one call. Weights are told apart by their
# position, so a step of 1 would do; PyTorch wants multiples of 4.
_CUDA_OFFSET_STEP: Final = 4


def draw_dropout_state(*, device: Any, draw: int = 0) -> Tensor:
    """int64 (2,) in the CPU's memory: seed and offset for one call, from PyTorch's generator.
    draw: tells apart the calls of a graph (`_traced_draw`), and changes nothing.

    device "cpu": two numbers of the CPU's default generator. A CUDA device: that device's seed and
    offset, and the offset moves on; nothing waits for the device.

    Raises:
        Unsupported: while a CUDA graph is captured, which would repeat one mask at each replay.
    """
    if device.type != "cuda":
        return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device="cpu")
    if torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "dropout_p > 0 while a CUDA graph is captured: seed and offset would be those of the "
            "capture at every replay; capture with dropout_p = 0"
        )
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    seed, offset = generator.initial_seed() & _UINT64, generator.get_offset()
    generator.set_offset(offset + _CUDA_OFFSET_STEP)
    signed = seed - 2**64 if seed >= 2**63 else seed
    return torch.tensor([signed, offset], dtype=torch.int64, device="cpu")


def seed_and_offset(rng_state: Tensor | None) -> tuple[int, int]:
    """What `draw_dropout_state` gave, as the library takes it; (0, 0) without dropout."""
    if rng_state is None:
        return 0, 0
    if rng_state.dtype != torch.int64 or tuple(rng_state.shape) != (2,):
        raise InvalidArgument(
            f"rng_state is {rng_state.dtype} {tuple(rng_state.shape)}, expected torch.int64 (2,): "
            "seed and offset"
        )
    try:
        seed, offset = rng_state.tolist()
    except Exception as error:  # without memory, or of a class without operators
        raise cannot_be_read("rng_state", rng_state, error) from None
    return seed & _UINT64, offset & _UINT64


def _traced_draw(
    mode: Any, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """dropout_state while its graph is traced for compilation. A compiler may take two calls alike
    for one, and a partitioner may compute the forward pass again in the backward pass; PyTorch
    knows by name which operators of its own must be spared that.

    So each draw of a graph has a number, and what was drawn is saved. With a memory budget of 0 the
    partitioner saves nothing but the graph's inputs, whatever a node says; but for nodes that a
    checkpoint computes again it replays the generator, so this one says that it is one of those.
    """
    graph = mode.tracer.graph
    number = sum(node.target is function for node in graph.nodes) + 1
    drawn = mode.__torch_dispatch__(function, types, args, {**kwargs, "draw": number})
    node = next(node for node in reversed(graph.nodes) if node.target is function)
    budget = getattr(functorch_config, "activation_memory_budget", 1.0)
    region = getattr(torch.fx.traceback, "_get_memory_budget_annotation", lambda node: None)(node)
    nothing_is_saved = (budget if region is None else region) == 0
    policy = torch.utils.checkpoint.CheckpointPolicy
    node.meta["recompute"] = policy.MUST_RECOMPUTE if nothing_is_saved else policy.MUST_SAVE
    return drawn


# ----------------------------------------------------------------------------- forward and backward


def rows_contiguous(x: Tensor) -> Tensor:
    """x, copied if its last dimension is not contiguous; other strides are read as they are."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


# The kernels of attention_forward and attention_backward: new contiguous tensors. What has rows
# that are not contiguous is copied, a dout of None (out was not used) is zero.


def forward(*arguments: Any) -> Any:
    """(out, lse)."""
    return _computed(_core.operator_forward, arguments, 3)


def backward(*arguments: Any) -> Any:
    """(dq, dk, dv)."""
    return _computed(_core.operator_backward, arguments, 7)


def more_gradients(*arguments: Any) -> Any:
    """[dq, dk, dv], and of dsinks and dbias those that the first two arguments ask for."""
    return list(_computed(_core.operator_gradients, arguments, 9))


def _computed(kernel: Any, arguments: tuple[Any, ...], tensors: int) -> Any:
    """tensors: how many come before the options."""
    try:
        return kernel(*arguments)
    except NoSequences as none:
        longest = tensors + 4
        known = list(arguments)
        known[longest : longest + 2] = (0 if x is None else x for x in known[longest : longest + 2])
        return answer(none, lambda: kernel(*known))


zeros_like: Final = torch.zeros_like


def dtype_of_out(q: Tensor) -> torch.dtype:
    """Where nobody asks for another."""
    return torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype


def new_results(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse), not computed."""
    lse = (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype_of_out(q))
    return out, q.new_empty(lse, dtype=torch.float32)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    """Shapes of the results. The kernel checks the rest when it runs."""
    wanted = 4 if cu_seqlens_q is None else 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != wanted:
            raise InvalidArgument(f"{name}.ndim = {x.ndim}, expected {wanted}")
    return new_results(q, k, v)


def _fake_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _fake_gradients(
    dsinks: bool, dbias: bool, dout: Tensor | None, dlse: Tensor | None, *others: Any
) -> list[Tensor]:
    found = [*_fake_backward(dout, dlse, *others)]
    q, bias = others[0], others[5 + _BIAS :]  # after q, k, v, out and lse
    if dsinks:
        found.append(q.new_empty((q.shape[-2],), dtype=torch.float32))
    if dbias:
        found.append(bias[0].new_empty(bias[0].shape))
    return found


# ----------------------------------------------------------------------------------------- autograd

_SAVED: Final = object()  # in place of an option that was saved as a tensor
# The place of alibi_slopes among the arguments of attention_forward, after the dispatcher's keys,
# and those of sinks and bias among its options.
_SLOPES: Final = 6
_SINKS: Final = 13 + _options.SINKS
_BIAS: Final = 13 + _options.BIAS


def _save(ctx: Any, q: Tensor, k: Tensor, v: Tensor, results: Any, options: Any) -> None:
    """options: those of attention_forward, in which tensors and plain values are mixed."""
    # Nearly always there are no tensors: no lengths, slopes, generator's state, and no tail.
    if options[0] is options[1] is options[2] is options[3] is None and len(options) == 13:
        ctx.save_for_backward(q, k, v, *results)
    else:
        arrays = [x for x in options if isinstance(x, torch.Tensor)]
        ctx.save_for_backward(q, k, v, *results, *arrays)
        options = tuple(_SAVED if isinstance(x, torch.Tensor) else x for x in options)
    ctx.options = options


def gradients(compute: Any, ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
    """(dq, dk, dv), or what else compute gives: attention_backward, attention_gradients, or a
    kernel of theirs.
    """
    if dout is None and dlse is None:
        return (None, None, None)
    options, saved = ctx.options, ctx.saved_tensors
    if len(saved) > 5:
        arrays = iter(saved[5:])
        options = [next(arrays) if x is _SAVED else x for x in options]
        saved = saved[:5]
    return compute(dout, dlse, *saved, *options)


def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Saves what `gradients` needs."""
    q, k, v, *options = inputs
    if ctx.needs_input_grad[_SLOPES]:
        raise no_gradient_by("alibi_slopes")
    _save(ctx, q, k, v, output, options)
    ctx.set_materialize_grads(False)  # no zeros for an lse that nobody used


def derivative_by(
    compute: Any, with_more: Any = None, places: tuple[int, ...] = (_SINKS, _BIAS)
) -> Any:
    """The derivative of an operator with `setup`. compute: as for `gradients`. with_more: likewise,
    where some of the options in these places want their gradients; its first arguments are which.
    None: options have none.
    """

    def derivative(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        of_options: list[Any] = [None] * len(ctx.options)
        wants = tuple(
            with_more is not None and at < len(of_options) and ctx.needs_input_grad[4 + at]
            for at in places
        )
        if any(wants):
            _autograd.refuse_batched(dout, dlse)
        chosen = functools.partial(with_more, *wants) if any(wants) else compute
        found = gradients(chosen, ctx, dout, dlse)
        wanted = (at for at, is_wanted in zip(places, wants, strict=True) if is_wanted)
        for at, gradient in zip(wanted, found[3:], strict=False):
            of_options[at] = gradient
        return (*found[:3], *of_options)

    return derivative


def refuse_double_backward(ctx: Any, *gradients: Any) -> Any:
    """The derivative of an operator that is itself a derivative."""
    raise Unsupported(
        "the gradient of attention's gradient (double backward, create_graph=True) is not "
        "supported: compute this attention with plain tensor operations, for example under "
        "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
    )


def refused_gradient(name: str, refusal: Callable[[], Unsupported]) -> tuple[Any, Any]:
    """The derivative and setup, for `define`, of an operator `name` with the results out and lse
    whose arguments may require a gradient that there is not: its backward pass raises what
    `refusal` gives. That does an operator of its own, so that PyTorch's compiler can trace it.
    """

    def refuse(gradient: Tensor, shape: Any, dtype: Any) -> Tensor:
        raise refusal()

    refusing = define(
        f"{name}_backward",
        "(Tensor gradient, SymInt[] shape, ScalarType dtype) -> Tensor",
        refuse,
        lambda gradient, shape, dtype: gradient.new_empty(shape, dtype=dtype),
    )

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Of what each wanted gradient would be: a compiler leaves out what nobody wants."""
        wanted = zip(inputs, ctx.needs_input_grad[1:], strict=True)
        ctx.gradients = [(x.shape, x.dtype) if needs else None for x, needs in wanted]

    def derivative(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        return tuple(x and refusing(dout, *x) for x in ctx.gradients)

    return derivative, keep


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """attention_forward for eager tensors, at a fraction of what the operator's own autograd takes:
    what was computed already gets its place in the graph.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, computed: Any) -> Any:
        """computed: (out, lse), the operator's options, and whether lse is a result. In one tuple,
        as each argument costs time, and each result.
        """
        results, options, wants_lse = computed
        _save(ctx, q, k, v, results, options)
        if not wants_lse:
            return results[0]
        ctx.set_materialize_grads(False)  # no zeros for an lse or an out that nobody used
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        """As the operator's derivative."""
        # With create_graph=True by way of the operator, whose own derivative says that it is none,
        # and with many gradients at once, which have no memory of their own.
        by_operator = torch.is_grad_enabled() or _autograd.are_batched(dout, dlse)
        compute = attention_backward if by_operator else backward
        return (*gradients(compute, ctx, dout, dlse), None)


# Attention.apply without what torch.autograd.Function puts before it for torch.func's transforms, a
# third of its time: tensors of theirs have no memory, so nothing is computed of them to come here.
record: Final = super(torch.autograd.Function, Attention).apply


# --------------------------------------------------------------------------------------------- vmap


is_transformed: Final = _autograd.is_transformed


def differentiable(plain: bool, q: Any, k: Any, v: Any, options: tuple[Any, ...]) -> Any:
    """attention_forward. plain: nobody but autograd watches."""
    if plain and not _options_want_gradients(options):
        return record(q, k, v, (forward(q, k, v, *options), options, True))
    return attention_forward(q, k, v, *options)


def _options_want_gradients(options: tuple[Any, ...]) -> bool:
    """Whether the operator's own autograd has to see sinks or bias: `Attention` has no gradient of
    theirs.
    """
    given = (options[at] for at in (_SINKS, _BIAS) if at < len(options))
    return any(x is not None and x.requires_grad for x in given) and torch.is_grad_enabled()


def came_by(function: str, out: Any) -> None:
    """Names a call that operators have computed, for `strobe.why()`. Where a compiler or a mode
    makes a graph of the call, nothing has been computed.
    """
    if not torch.compiler.is_compiling() and type(out) is Tensor:
        _core.came_by(function)


# ---------------------------------------------------------------------------------- dropout weights


def dropout_weights(q: Tensor, k: Tensor, *options: Any) -> Tensor:
    """The kernel of attention_dropout_weights: flash_attn's S_dmask, in q's dtype (`_s_dmask`)."""
    lengths, slopes, rng_state = (*options[:2], *options[4:6]), options[2], options[3]
    dropout_p, scale, causal, window_left, window_right, softcap, _ = options[6:]
    mask = (scale, causal, window_left, window_right, softcap)
    weight = _s_dmask.weights(q, k, lengths, slopes, mask)
    seed, offset = seed_and_offset(rng_state)
    keep = _questions.dropout_mask(
        *weight.shape, dropout_p=dropout_p, dropout_seed=seed, dropout_offset=offset
    )
    kept = torch.from_numpy(keep).to(q.device)
    return torch.where(kept, weight, -weight).to(q.dtype)


def _fake_dropout_weights(q: Tensor, k: Tensor, *options: Any) -> Tensor:
    return q.new_empty(_s_dmask.shape(q, k, options[0], *options[4:6]))


# ------------------------------------------------------------------------------------- registration

dropout_state: Final = define(
    "dropout_state.numbered",
    # By keyword, where PyTorch's compiler looks for the device.
    "(*, Device device, int draw=0) -> Tensor",
    draw_dropout_state,
    lambda *, device, draw=0: torch.empty(2, dtype=torch.int64, device="cpu"),
    keys=("CompositeExplicitAutograd",),
    tags=(torch.Tag.nondeterministic_seeded,),
)
if hasattr(torch.library, "register_torch_dispatch"):  # PyTorch 2.5
    torch.library.register_torch_dispatch(
        dropout_state.name(), ProxyTorchDispatchMode, _traced_draw, lib=_LIBRARY
    )
# A policy of selective checkpointing does not decide of a draw: computed again, it is replayed with
# the generators, and in a graph it is saved.
getattr(torch.utils.checkpoint, "SAC_IGNORED_OPS", set()).add(dropout_state)
attention_backward: Final = define(
    "attention_backward",
    "(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, {_MORE}) -> (Tensor, Tensor, Tensor)",
    backward,
    _fake_backward,
    refuse_double_backward,
    query=2,
)
attention_gradients: Final = define(
    "attention_gradients",
    "(bool dsinks, bool dbias, Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, "
    f"Tensor out, Tensor lse, {_OPTIONS}, {_MORE}) -> Tensor[]",
    more_gradients,
    _fake_gradients,
    refuse_double_backward,
    query=4,
)
attention_forward: Final = define(
    "attention_forward",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, {_MORE}) -> (Tensor, Tensor)",
    forward,
    _fake_forward,
    derivative_by(attention_backward, attention_gradients),
    setup,
    query=0,
)
attention_dropout_weights: Final = define(
    "attention_dropout_weights",
    f"(Tensor q, Tensor k, {_OPTIONS}) -> Tensor",
    dropout_weights,
    _fake_dropout_weights,
)
