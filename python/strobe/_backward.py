"""`attention_backward`. `functional` says how a call goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, overload

from . import _arrays, _checks, _interrupt, _library
from ._arrays import DIRECT, KINDS, AnyArray, NDArray, SupportsDLPack, imported, unreadable
from ._errors import InvalidArgument
from ._launches import BACKWARD_LAUNCHES, make_launch
from ._library import BACKWARD_ARGS_SIZE, pack_backward, with_arrays
from ._options import NO_ARRAYS, Scalars, documented, split
from ._plans import (
    DENSE_K,
    DENSE_Q,
    DENSE_V,
    VARLEN_K,
    VARLEN_Q,
    VARLEN_V,
    CallOptions,
    Options,
    check_like_lse,
    check_like_out,
    check_tensor,
    launch_error,
    longest,
    make_problem,
    no_array,
    optional_spec,
    spec_of,
    views,
)
from ._values import bad_seed, flag, integer, pair, real

if TYPE_CHECKING:
    from typing_extensions import Unpack

_launch_backward: Final = _library.backward

# What messages call the arrays.
_NAMES: Final = (
    "dout",
    "q",
    "k",
    "v",
    "out",
    "lse",
    "dlse",
    "alibi_slopes",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "dq",
    "dk",
    "dv",
)


@overload
def attention_backward(
    dout: AnyArray,
    q: NDArray,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray,
    lse: AnyArray,
    *,
    dlse: AnyArray | None = ...,
    deterministic: bool = ...,
    grads: tuple[NDArray, NDArray, NDArray] | None = ...,
    **options: Unpack[CallOptions],
) -> tuple[NDArray, NDArray, NDArray]: ...


@overload
def attention_backward(
    dout: AnyArray,
    q: SupportsDLPack,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray,
    lse: AnyArray,
    *,
    dlse: AnyArray | None = ...,
    deterministic: bool = ...,
    grads: tuple[AnyArray, AnyArray, AnyArray] | None = ...,
    **options: Unpack[CallOptions],
) -> tuple[Any, Any, Any]: ...


@documented
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    dropout_offset: int = 0,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    batch_invariant: bool = False,
    threads: int = 0,
    dlse: Any = None,
    deterministic: bool = False,
    grads: tuple[Any, Any, Any] | None = None,
    **more: Any,  # _options.ROWS
) -> tuple[Any, Any, Any]:
    """Gradients of `attention` with respect to q, k and v, recomputing the scores tile by tile.

    Algorithm 2 of T. Dao, "FlashAttention-2", arXiv:2307.08691. Every option must have the value
    that it had in the forward call.

    Args:
        dout: gradient of out, in out's shape, any strides with a contiguous last dimension.
        q, k, v: as in `attention`.
        out, lse: what `attention` gave with return_lse=True. lse must be contiguous.
        causal, window, scale, softcap, alibi_slopes: as in `attention`.
        dropout_p, dropout_seed, dropout_offset: as in `attention`.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in `attention`.
        batch_invariant: as in `attention`, with deterministic set too.
        threads: as in `attention`.
        attention_chunk, seqused_q, seqused_k, q_position, prefix: as in `attention`.
        dlse: gradient of lse, float32, contiguous, in lse's shape; None: lse was not used further.
        deterministic: the same bits for every number of threads; at a fixed number they repeat
            anyway.
        grads: where to write (dq, dk, dv), any strides with a contiguous last dimension; they must
            not overlap each other or an input. None: new contiguous arrays.

    Returns:
        (dq, dk, dv), of the shapes of q, k and v and q's dtype; dk and dv are summed over the query
        heads that share a key head. Kinds of array as in `attention`.

    Raises:
        As `attention`.
    """
    dq = dk = dv = None
    if grads is not None:
        try:
            dq, dk, dv = grads
        except Exception:
            raise InvalidArgument("grads is no tuple of three, expected (dq, dk, dv)") from None
        if dq is None or dk is None or dv is None:
            raise no_array(("grads[0]", "grads[1]", "grads[2]"), (dq, dk, dv))
    given = (dout, q, k, v, out, lse, dlse, alibi_slopes, cu_seqlens_q, cu_seqlens_k, dq, dk, dv)
    scalars: Scalars = ()
    arrays, more_key, pointers = NO_ARRAYS, None, None
    if more:
        scalars, arrays = split("attention_backward", more)
    if not DIRECT.issuperset(map(type, given)) or (
        more and not DIRECT.issuperset(map(type, arrays.values()))
    ):
        names = (*_NAMES, *arrays)
        with imported(names, (*given, *arrays.values())) as taken:
            result = attention_backward(
                taken[0],
                taken[1],
                taken[2],
                taken[3],
                taken[4],
                taken[5],
                causal=causal,
                window=window,
                scale=scale,
                softcap=softcap,
                alibi_slopes=taken[7],
                dropout_p=dropout_p,
                dropout_seed=dropout_seed,
                dropout_offset=dropout_offset,
                cu_seqlens_q=taken[8],
                cu_seqlens_k=taken[9],
                max_seqlen_q=max_seqlen_q,
                max_seqlen_k=max_seqlen_k,
                batch_invariant=batch_invariant,
                threads=threads,
                dlse=taken[6],
                deterministic=deterministic,
                grads=None if grads is None else (taken[10], taken[11], taken[12]),
                **dict(scalars),
                **dict(zip(names[13:], taken[13:], strict=True)),
            )
        return result if grads is None else (dq, dk, dv)

    for array in given[:6]:
        if array is None:
            raise no_array(("dout", "q", "k", "v", "out", "lse"), given[:6])
    q_kind = KINDS[type(q)]
    cu_q_pointer = cu_k_pointer = alibi_pointer = dlse_pointer = 0
    dq_pointer = dk_pointer = dv_pointer = 0
    cu_q_signature = cu_k_signature = alibi_signature = dlse_signature = None
    grad_signatures = None
    try:
        dout_pointer, dout_signature = KINDS[type(dout)].view(dout)
        q_pointer, q_signature = q_kind.view(q)
        k_pointer, k_signature = KINDS[type(k)].view(k)
        v_pointer, v_signature = KINDS[type(v)].view(v)
        out_pointer, out_signature = KINDS[type(out)].view(out)
        lse_pointer, lse_signature = KINDS[type(lse)].view(lse)
        if cu_seqlens_q is not None:
            cu_q_pointer, cu_q_signature = KINDS[type(cu_seqlens_q)].view(cu_seqlens_q)
        if cu_seqlens_k is not None:
            cu_k_pointer, cu_k_signature = KINDS[type(cu_seqlens_k)].view(cu_seqlens_k)
        if alibi_slopes is not None:
            alibi_pointer, alibi_signature = KINDS[type(alibi_slopes)].view(alibi_slopes)
        if dlse is not None:
            dlse_pointer, dlse_signature = KINDS[type(dlse)].view(dlse)
        if grads is not None:
            dq_pointer, dq_signature = KINDS[type(dq)].view(dq)
            dk_pointer, dk_signature = KINDS[type(dk)].view(dk)
            dv_pointer, dv_signature = KINDS[type(dv)].view(dv)
            grad_signatures = (dq_signature, dk_signature, dv_signature)
    except Exception as error:
        raise unreadable(tuple(zip(_NAMES, given, strict=True)), error) from None
    if grads is not None:
        for name, array in (("dq", dq), ("dk", dk), ("dv", dv)):
            KINDS[type(array)].check_writable(name, array)
    if max_seqlen_q is not None and type(max_seqlen_q) is not int:
        max_seqlen_q = integer("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None and type(max_seqlen_k) is not int:
        max_seqlen_k = integer("max_seqlen_k", max_seqlen_k)
    if cu_seqlens_q is not None and max_seqlen_q is None:
        max_seqlen_q = longest("cu_seqlens_q", "max_seqlen_q", cu_seqlens_q)
    if cu_seqlens_k is not None and max_seqlen_k is None:
        max_seqlen_k = longest("cu_seqlens_k", "max_seqlen_k", cu_seqlens_k)
    if more:
        pointers, more_key = views(scalars, arrays)
    try:
        left, right = window
    except Exception:
        left, right = pair("window", window)
    # Plans are kept by value: a tensor or an array would be kept by its identity.
    if type(left) is not int or type(right) is not int:
        left, right = integer("window[0]", left), integer("window[1]", right)
    if type(threads) is not int:
        threads = integer("threads", threads, 32)
    if threads == 0:
        threads = q_kind.threads()
    if type(causal) is not bool:
        causal = flag("causal", causal)
    if type(deterministic) is not bool:
        deterministic = flag("deterministic", deterministic)
    if type(batch_invariant) is not bool:
        batch_invariant = flag("batch_invariant", batch_invariant)
    if type(scale) is not float and scale is not None:
        scale = real("scale", scale)
    if type(softcap) is not float:
        softcap = real("softcap", softcap)
    if type(dropout_p) is not float:
        dropout_p = real("dropout_p", dropout_p)

    key = (
        q_signature,
        k_signature,
        v_signature,
        dout_signature,
        out_signature,
        lse_signature,
        dlse_signature,
        alibi_signature,
        cu_q_signature,
        cu_k_signature,
        grad_signatures,
        max_seqlen_q,
        max_seqlen_k,
        deterministic,
        causal,
        left,
        right,
        scale,
        softcap,
        dropout_p,
        batch_invariant,
        threads,
        more_key,
    )
    launch = BACKWARD_LAUNCHES.get(key)
    if launch is None:
        options = Options(
            causal,
            left,
            right,
            scale,
            softcap,
            dropout_p,
            max_seqlen_q,
            max_seqlen_k,
            threads,
            deterministic,
            batch_invariant,
            scalars,
            arrays,
        )
        specs = [spec_of(name, array) for name, array in (("q", q), ("k", k), ("v", v))]
        shapes = make_problem(
            _library.BACKWARD,
            specs[0],
            specs[1],
            specs[2],
            optional_spec("cu_seqlens_q", cu_seqlens_q),
            optional_spec("cu_seqlens_k", cu_seqlens_k),
            optional_spec("alibi_slopes", alibi_slopes),
            options,
        )
        check_like_out("dout", spec_of("dout", dout), shapes)
        check_like_out("out", spec_of("out", out), shapes)
        check_like_lse("lse", spec_of("lse", lse), shapes)
        if dlse is not None:
            check_like_lse("dlse", spec_of("dlse", dlse), shapes)
            shapes.problem.has_dlse = 1
        if grads is not None:
            axes = (
                (VARLEN_Q, VARLEN_K, VARLEN_V)
                if cu_seqlens_q is not None
                else (DENSE_Q, DENSE_K, DENSE_V)
            )
            for like, name, array, axis_names in zip(
                specs, ("dq", "dk", "dv"), (dq, dk, dv), axes, strict=True
            ):
                spec = spec_of(name, array)
                _checks.check_shape(name, spec, like.shape, axis_names, name[1:])
                check_tensor(name, spec, shapes)
        q_spec = specs[0]
        allocator = q_spec.kind.allocator
        new = (
            ()
            if grads is not None
            else tuple(allocator(spec.shape, q_spec.dtype, spec) for spec in specs)
        )
        launch = make_launch(BACKWARD_LAUNCHES, key, shapes, new)

    if grads is None:
        new_dq, new_dk, new_dv = launch.new
        dq, dk, dv = new_dq(q), new_dk(k), new_dv(v)
        pointer = KINDS[type(dq)].pointer
        dq_pointer, dk_pointer, dv_pointer = pointer(dq), pointer(dk), pointer(dv)
    workspace = None
    workspace_pointer = stream = 0
    if launch.on_cuda:
        stream = _arrays.torch_stream(launch.device_index)
        if launch.new_workspace is not None and (not launch.small or _arrays.torch_capturing()):
            workspace = launch.new_workspace(q)
            workspace_pointer = workspace.data_ptr()
    try:
        arguments = pack_backward(
            BACKWARD_ARGS_SIZE,
            q_pointer,
            k_pointer,
            v_pointer,
            out_pointer,
            lse_pointer,
            dout_pointer,
            dlse_pointer,
            dq_pointer,
            dk_pointer,
            dv_pointer,
            cu_q_pointer,
            cu_k_pointer,
            alibi_pointer,
            dropout_seed,
            dropout_offset,
            workspace_pointer,
            launch.workspace_bytes,
            stream,
        )
    except Exception:  # struct.error, or what somebody's __index__ raises
        raise bad_seed(dropout_seed, dropout_offset) from None
    if pointers is not None:
        arguments = with_arrays(arguments, pointers)
    if launch.long:
        status = _interrupt.run(_launch_backward, launch.address, arguments, BACKWARD_ARGS_SIZE)
    else:
        status = _launch_backward(launch.address, arguments)
    if status:
        raise launch_error(status, dict(zip(_NAMES, given, strict=True)) | arrays)
    return dq, dk, dv
