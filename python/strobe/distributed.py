"""Attention over a sequence that is split over the ranks of a process group: context parallelism.

    import torch.distributed as dist
    dist.init_process_group("nccl")                      # or "gloo", on CPUs
    x = strobe.distributed.shard(x, causal=True)         # this rank's rows of (batch, seqlen, ...)
    ...
    out = strobe.distributed.attention(q, k, v, causal=True)

Every rank calls with its rows of q, k and v and gets its rows of out: the result and the gradients
are those of the whole sequence, whose scores, keys and values no rank has at once. Everything else
in a transformer is computed row by row and stays as it is, but for rotary embeddings, which take
`positions`. docs/distributed.md draws who holds what when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, overload

import torch
import torch.distributed as dist

from . import _options, _questions, _ring
from ._arrays import ArraySpec
from ._context_parallel import Call, SplitAttention
from ._errors import InvalidArgument, Unsupported, shown
from ._flash_attn import as_flag, as_integer, as_number, autocast, check_tensor
from ._ring import Mask, Order, Sizes
from ._values import constant, pair

__all__ = ["attention", "plan", "positions", "shard", "unshard"]

Tensor: TypeAlias = torch.Tensor
Method: TypeAlias = Literal["auto", "ring", "ulysses"]
Window: TypeAlias = tuple[int | None, int | None]

_METHODS: Final = ("auto", "ring", "ulysses")
_AXES: Final = ("batch", "rows", "heads", "head_dim")


Function = TypeVar("Function", bound=Callable[..., Any])


def _uncompiled(function: Function) -> Function:
    """Has PyTorch's compiler break its graph at calls of `function`, and not look into it: messages
    are no part of a graph here. As torch.compiler.disable, which would import the compiler, for
    seconds, into a program that may never compile.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    compiler = torch._C._dynamo.eval_frame
    try:
        skip = compiler._FrameAction.SKIP
        strategy = compiler._FrameExecStrategy(skip, skip)
        compiler.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:  # pragma: no cover - an older PyTorch, which looks and breaks more often
        pass
    return function


# -------------------------------------------------------------------------------- groups and orders


class _Place(NamedTuple):
    """One rank of so many. group: None where there is none and nothing is sent."""

    group: Any
    ranks: int
    rank: int


def _place_in(group: Any) -> _Place:
    """Of this process. group: a ProcessGroup, a DeviceMesh of one dimension, or None for all."""
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidArgument(
            "torch.distributed has no process group, expected a call of "
            "torch.distributed.init_process_group before"
        )
    if group is None:
        group = dist.group.WORLD
    elif hasattr(group, "get_group"):
        if group.ndim != 1:
            raise InvalidArgument(
                f"group is a DeviceMesh of {group.ndim} dimensions, expected 1: name one, as in "
                f"mesh[{(group.mesh_dim_names or ('context',))[0]!r}]"
            )
        group = group.get_group()
    try:
        rank = dist.get_rank(group)
    except Exception:
        raise InvalidArgument(
            f"group = {shown(group)}, expected a process group of torch.distributed or None"
        ) from None
    if rank < 0:
        raise InvalidArgument("group has not this process among its ranks, expected one that has")
    return _Place(group, dist.get_world_size(group), rank)


def _place(group: Any, rank: int | None, ranks: int | None) -> _Place:
    """Of this process in a group, or of any rank of any number without one."""
    if rank is None and ranks is None:
        return _place_in(group)
    if rank is None or ranks is None or group is not None:
        raise InvalidArgument(
            f"group = {shown(group)}, rank = {shown(rank)}, ranks = {shown(ranks)}, expected group "
            "alone, or rank and ranks"
        )
    ranks, rank = as_integer("ranks", ranks), as_integer("rank", rank)
    if ranks < 1:
        raise InvalidArgument(f"ranks = {ranks}, expected at least 1")
    if not 0 <= rank < ranks:
        raise InvalidArgument(f"rank = {rank}, expected 0 to {ranks - 1}")
    return _Place(None, ranks, rank)


def _order(order: Any, causal: bool) -> Order:
    if order is None:
        return "zigzag" if causal else "plain"
    if order not in _ring.ORDERS:
        raise InvalidArgument(f'order = {shown(order)}, expected "plain", "zigzag" or None')
    found: Order = order
    return found


def _limit(name: str, value: Any) -> int | None:
    """One side of a window."""
    if value is None:
        return None
    number = as_integer(name, value)
    if number < -1:
        raise InvalidArgument(f"{name} = {number}, expected at least 0, or -1 or None for no limit")
    return None if number == -1 else number


def _mask(causal: bool, window: Any, by_distance: bool) -> Mask:
    left, right = pair("window", window, _limit, "-1 or None")
    if causal:
        right = 0
    return Mask(left, right, by_distance)


# ---------------------------------------------------------------------------------------- attention


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = ...,
    return_lse: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = ...,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...


@_uncompiled
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    causal: bool = False,
    window: Window = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    method: Method = "auto",
    order: Order | None = None,
    seqlen: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    check: bool = False,
    **options: Any,
) -> Any:
    """`strobe.torch.attention` over a sequence whose rows are split over ranks, with its gradient.

    Every rank of the group calls it, forward and backward, in the same order among its calls. Each
    gives the rows that `shard` gives it.

    Args:
        q: this rank's queries, (batch, rows, heads, head_dim): float32, bfloat16 or float16.
        k: the keys of the same rows, (batch, rows, heads_kv, head_dim).
        v: their values, (batch, rows, heads_kv, head_dim_v).
        group: a process group of torch.distributed, or a DeviceMesh of one dimension; None: all
            ranks. NCCL for tensors on GPUs, gloo for those in the CPU's memory.
        causal, window, scale, softcap: as in `strobe.attention`, of positions in the whole
            sequence. A window may be wider than a rank's share. window has no negative limits but
            -1, which is none, as None is.
        alibi_slopes: float32, (heads,) or (batch, heads), the same on every rank. Slopes that
            require a gradient are refused.
        method: "ring": keys and values go round, and travel while others are computed. "ulysses":
            each rank gets all rows of heads / ranks heads by an all-to-all, and another brings the
            rows back; ranks divides heads and heads_kv. "auto": the one that leaves fewer bytes to
            wait for; `plan` says which and why.
        order: which rows a rank has, "plain" or "zigzag", as `shard` has it; None: zigzag if
            causal.
        seqlen: rows of the whole sequence, where ranks does not divide them; None: the ranks have
            as many rows as each other.
        deterministic: the same bits of the gradients at every run, also on GPUs. out has them
            anyway.
        return_lse: also return lse, which is differentiable.
        check: compare shapes and arguments of all ranks first, by one more message, and raise where
            they differ. Without it, and with ranks that differ, torch.distributed fails or runs
            into its time-out.
        options: the other options of `strobe.attention` are refused by name.

    Returns:
        out, (batch, rows, heads, head_dim_v), of this rank's rows, or (out, lse): lse is float32,
        (batch, heads, rows), over all keys. Partial results are merged in float32, and gradients
        are added up in float32, so that out and gradients are as near to exact as one device's.

    Raises:
        InvalidArgument: no process group, arguments that contradict each other, or rows that are
            not this rank's share; before anything is sent.
        Unsupported: no kernel takes this, or an option is not supported over ranks.
        RuntimeError: torch.distributed's own, where a rank is gone or late.

    Example:
        A group of one rank; with torchrun the same lines run on every one:

        >>> import tempfile, torch, strobe
        >>> import torch.distributed as dist
        >>> store = dist.FileStore(tempfile.mktemp(), 1)
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> x = torch.randn(2, 64, 4, 32)
        >>> mine = strobe.distributed.shard(x, causal=True).requires_grad_()
        >>> out = strobe.distributed.attention(mine, mine, mine, causal=True)
        >>> out.sum().backward()
        >>> tuple(out.shape), tuple(strobe.distributed.unshard(out, causal=True).shape)
        ((2, 64, 4, 32), (2, 64, 4, 32))
        >>> dist.destroy_process_group()
    """
    _refuse(options)
    constant("alibi_slopes", alibi_slopes)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, _AXES)
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes, None)
    return_lse = as_flag("return_lse", return_lse)
    q, k, v = autocast(q, k, v)
    wanted = _Wanted.of(causal, window, scale, softcap, alibi_slopes is not None, deterministic)
    place = _place_in(group)
    shapes = _spec(q), _spec(k), _spec(v)
    slopes = None if alibi_slopes is None else _spec(alibi_slopes)
    if as_flag("check", check):
        _compare(place, shapes, slopes, wanted, (method, order, seqlen))
    settled = _settle(place.ranks, place.rank, shapes, slopes, wanted, method, order, seqlen)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        _ask_for_a_backward(shapes, slopes, wanted)
    _meet(place, q.device)
    call = Call(
        *place,
        length=settled.length,
        order=settled.order,
        mask=wanted.mask,
        options={"scale": wanted.scale, "softcap": wanted.softcap},
        slopes=alibi_slopes,
        deterministic=wanted.deterministic,
        method=settled.method,
    )
    out, lse = SplitAttention.apply(q, k, v, call)
    return (out, lse) if return_lse else out


_MET: Final[set[str]] = set()  # names of groups


def _meet(place: _Place, device: Any) -> None:
    """The first call of a group on GPUs: NCCL connects the ranks in a message of all of them. A
    step of the ring is none, since some have nothing to send.
    """
    if device.type != "cuda" or place.ranks == 1 or place.group.group_name in _MET:
        return
    dist.all_reduce(torch.zeros(1, device=device), group=place.group)
    _MET.add(place.group.group_name)


class _Wanted(NamedTuple):
    """Arguments that are plain values, checked."""

    causal: bool
    mask: Mask
    scale: float | None
    softcap: float
    deterministic: bool

    @staticmethod
    def of(
        causal: Any, window: Any, scale: Any, softcap: Any, slopes: bool, deterministic: Any
    ) -> _Wanted:
        causal = as_flag("causal", causal)
        return _Wanted(
            causal,
            _mask(causal, window, slopes),
            None if scale is None else as_number("scale", scale),
            as_number("softcap", softcap),
            as_flag("deterministic", deterministic),
        )

    def options(self, slopes: ArraySpec | None) -> dict[str, Any]:
        """Those of `strobe.plan`."""
        left, right = (-1 if x is None else x for x in self.mask[:2])
        given = {"causal": self.causal, "window": (left, right), "softcap": self.softcap}
        return given | {"scale": self.scale, "alibi_slopes": slopes}


class _Settled(NamedTuple):
    """What follows from the shapes. reason: for the method."""

    length: int
    order: Order
    method: str
    reason: str
    sizes: Sizes


def _refuse(options: dict[str, Any]) -> None:
    """Refuses every option of `strobe.attention` that has another value than its default."""
    for name, value in options.items():
        row = _options.row_of("attention", name)
        plain = not isinstance(value, torch.Tensor)
        if value is None or (plain and row.convert is not None and value == row.default):
            continue
        raise Unsupported(
            f"{name} = {shown(value)} is not supported over ranks, where a call has a part of the "
            "keys, and this is meant for all of them together"
        )


def _spec(x: Any) -> ArraySpec:
    """A tensor in words; what is given so already stays."""
    if isinstance(x, ArraySpec):
        return x
    dtype = str(x.dtype).removeprefix("torch.")
    return ArraySpec(tuple(x.shape), dtype, str(x.device))


@lru_cache(maxsize=1024)
def _settle(
    ranks: int,
    rank: int,
    shapes: tuple[ArraySpec, ArraySpec, ArraySpec],
    slopes: ArraySpec | None,
    wanted: _Wanted,
    method: Any,
    order: Any,
    seqlen: Any,
) -> _Settled:
    """Checks a call, and chooses what it leaves open. The same on every rank."""
    q, k, v = shapes
    for name, x in (("k", k), ("v", v)):
        if x.shape[1] != q.shape[1]:
            raise InvalidArgument(
                f"{name}.shape[1] = {x.shape[1]}, expected {q.shape[1]}: the rows of q"
            )
    # What `strobe.attention` would refuse it refuses here, by its names, before anything is sent.
    _questions.check(q, k, v, **wanted.options(slopes))
    order = _order(order, wanted.causal)
    rows = q.shape[1]
    length = ranks * rows if seqlen is None else as_integer("seqlen", seqlen)
    if length < 0:
        raise InvalidArgument(f"seqlen = {length}, expected at least 0")
    share = _ring.rows_of(length, ranks, rank, order)
    if rows != share:
        raise InvalidArgument(
            f"q.shape[1] = {rows}, expected {share}: the share of rank {rank} of {ranks} in "
            f"seqlen = {length} rows in {order} order"
        )
    element = 4 if q.dtype == "float32" else 2
    sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], element)
    chosen, reason = _method(method, length, ranks, order, wanted.mask, sizes)
    return _Settled(length, order, chosen, reason, sizes)


def _method(
    method: Any, length: int, ranks: int, order: Order, mask: Mask, sizes: Sizes
) -> tuple[str, str]:
    """The method, and why."""
    if method not in _METHODS:
        raise InvalidArgument(f'method = {shown(method)}, expected "auto", "ring" or "ulysses"')
    for name, heads in (("heads", sizes.heads), ("heads_kv", sizes.heads_kv)):
        if heads % ranks:
            if method == "ulysses":
                raise InvalidArgument(
                    f'method = "ulysses" with {name} = {heads}, expected a multiple of {ranks}, '
                    "the number of ranks"
                )
            if method == "auto":
                return "ring", f"{ranks} ranks do not divide {name} = {heads}"
    if method != "auto":
        return method, "it was asked for"
    if ranks == 1:
        return "ring", "one rank sends nothing"
    # The heaviest of a few ranks: the first has the most keys to get in zigzag order, the last in
    # plain order under a causal mask, one in the middle in a window.
    heaviest = max(
        _ring.ring_traffic(_ring.schedule(length, ranks, rank, order, mask), sizes).exposed
        for rank in {0, ranks // 2, ranks - 1}
    )
    at_once = _ring.ulysses_traffic(length, ranks, sizes).exposed
    chosen = "ring" if heaviest <= at_once else "ulysses"
    return chosen, (
        f"a rank waits for {_bytes(heaviest)} in a ring and for {_bytes(at_once)} by all-to-all, "
        f"where {_ring.FLOP_PER_BYTE} FLOP hide a byte"
    )


@lru_cache(maxsize=1024)
def _ask_for_a_backward(
    shapes: tuple[ArraySpec, ArraySpec, ArraySpec], slopes: ArraySpec | None, wanted: _Wanted
) -> str:
    """Raises, before anything is sent, where no kernel has the gradient."""
    if 0 in shapes[0].shape:
        return ""
    q, k, v = shapes
    options = wanted.options(slopes) | {"deterministic": wanted.deterministic, "delta": True}
    return _questions.plan(q, k, v, backward=True, grad_dtype="float32", accumulate=True, **options)


def _compare(place: _Place, *said: Any) -> None:
    """Raises on every rank where one says something else; rows may differ where seqlen is given."""
    shapes, slopes, wanted, (method, order, seqlen) = said
    mine: dict[str, Any] = {"seqlen": seqlen, "method": method, "order": order}
    for name, x in zip("qkv", shapes, strict=True):
        rows = x.shape[1] if seqlen is None else "rows"
        mine |= {f"{name}.shape": (x.shape[0], rows, *x.shape[2:]), f"{name}.dtype": x.dtype}
    mine |= {"alibi_slopes.shape": None if slopes is None else slopes.shape}
    mine |= {"window": wanted.mask[:2]} | wanted._asdict()
    del mine["mask"]
    found: list[Any] = [None] * place.ranks
    dist.all_gather_object(found, mine, place.group)
    for rank, theirs in enumerate(found):
        for name, value in found[0].items():
            if theirs[name] != value:
                raise InvalidArgument(
                    f"{name} = {shown(theirs[name])} on rank {rank}, expected {shown(value)} as on "
                    "rank 0"
                )


# ----------------------------------------------------------------------------------- rows and ranks


@_uncompiled
def shard(
    x: Tensor,
    *,
    group: Any = None,
    rank: int | None = None,
    ranks: int | None = None,
    dim: int = 1,
    causal: bool = False,
    order: Order | None = None,
) -> Tensor:
    """This rank's rows of a tensor that every rank has whole: tokens, labels, q, k or v.

    Args:
        x: a tensor with the whole sequence along dim.
        group: as in `attention`.
        rank, ranks: instead of a group, which rank's rows, of how many; nothing needs to be
            initialised then.
        dim: the axis of the sequence.
        causal, order: as in `attention`: zigzag order if causal, unless order says otherwise.

    Returns:
        The rows, contiguous. Without ranks that divide the rows, ranks have unlike numbers of them,
        and `attention` wants seqlen. Differentiable, as slices are.

    Example:
        >>> import torch, strobe
        >>> x = torch.arange(8)
        >>> strobe.distributed.shard(x, rank=0, ranks=2, dim=0, causal=True).tolist()
        [0, 1, 6, 7]
        >>> strobe.distributed.shard(x, rank=1, ranks=2, dim=0, causal=True).tolist()
        [2, 3, 4, 5]
    """
    place = _place(group, rank, ranks)
    dim = _axis(x, dim)
    found = _ring.chunks(
        x.shape[dim], place.ranks, place.rank, _order(order, as_flag("causal", causal))
    )
    pieces = [x.narrow(dim, begin, end - begin) for _, begin, end in found]
    return torch.cat(pieces or [x.narrow(dim, 0, 0)], dim=dim)


@_uncompiled
def unshard(
    x: Tensor,
    *,
    group: Any = None,
    dim: int = 1,
    causal: bool = False,
    order: Order | None = None,
    seqlen: int | None = None,
) -> Tensor:
    """The whole of a tensor of which each rank has the rows that `shard` gave it, on every rank.

    Args:
        x: this rank's rows along dim.
        group, causal, order, seqlen: as in `attention`.
        dim: the axis of the sequence.

    Returns:
        A new tensor, with all rows in the order of the sequence. It carries no gradient: a loss is
        computed of each rank's own rows, and summed over ranks.

    Example:
        >>> import tempfile, torch, strobe  # in a group of one rank, as in `attention`
        >>> import torch.distributed as dist
        >>> store = dist.FileStore(tempfile.mktemp(), 1)
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> strobe.distributed.unshard(torch.arange(4), dim=0).tolist()
        [0, 1, 2, 3]
        >>> dist.destroy_process_group()
    """
    place, order = _place_in(group), _order(order, as_flag("causal", causal))
    dim = _axis(x, dim)
    mine = x.detach().movedim(dim, 0)
    rows = mine.shape[0]
    length = place.ranks * rows if seqlen is None else as_integer("seqlen", seqlen)
    counts = [_ring.rows_of(length, place.ranks, rank, order) for rank in range(place.ranks)]
    if rows != counts[place.rank]:
        raise InvalidArgument(
            f"x.shape[{dim}] = {rows}, expected {counts[place.rank]}: the share of rank "
            f"{place.rank} of {place.ranks} in seqlen = {length} rows in {order} order"
        )
    # A gathering wants tensors of one shape.
    padded = mine.new_zeros((max(counts), *mine.shape[1:]))
    padded[:rows] = mine
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, place.group)
    whole = mine.new_empty((length, *mine.shape[1:]))
    for rank, part in enumerate(parts):
        for row, begin, end in _ring.chunks(length, place.ranks, rank, order):
            whole[begin:end] = part[row : row + end - begin]
    return whole.movedim(0, dim).contiguous()


@_uncompiled
def positions(
    seqlen: int,
    *,
    group: Any = None,
    rank: int | None = None,
    ranks: int | None = None,
    causal: bool = False,
    order: Order | None = None,
    device: Any = None,
) -> Tensor:
    """The positions of this rank's rows in the whole sequence: for rotary embeddings and the like.

    Args:
        seqlen: rows of the whole sequence.
        group, rank, ranks: as in `shard`.
        causal, order: as in `attention`.
        device: of the result; None: the CPU.

    Returns:
        int64, (rows,).

    Example:
        >>> import strobe
        >>> strobe.distributed.positions(8, rank=0, ranks=2, causal=True).tolist()
        [0, 1, 6, 7]
    """
    place, seqlen = _place(group, rank, ranks), as_integer("seqlen", seqlen)
    if seqlen < 0:
        raise InvalidArgument(f"seqlen = {seqlen}, expected at least 0")
    order = _order(order, as_flag("causal", causal))
    found = _ring.chunks(seqlen, place.ranks, place.rank, order)
    pieces = [torch.arange(begin, end, device=device) for _, begin, end in found]
    return torch.cat(pieces or [torch.arange(0, device=device)])


def _axis(x: Any, dim: Any) -> int:
    """`dim` from 0 on."""
    check_tensor("x", x, None)
    dim = as_integer("dim", dim)
    if not -x.ndim <= dim < x.ndim:
        raise InvalidArgument(f"dim = {dim}, expected {-x.ndim} to {x.ndim - 1}: an axis of x")
    return int(dim % x.ndim)


# --------------------------------------------------------------------------------------------- plan


def plan(
    q: Tensor | ArraySpec,
    k: Tensor | ArraySpec,
    v: Tensor | ArraySpec,
    *,
    group: Any = None,
    rank: int | None = None,
    ranks: int | None = None,
    causal: bool = False,
    window: Window = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | ArraySpec | None = None,
    method: Method = "auto",
    order: Order | None = None,
    seqlen: int | None = None,
    deterministic: bool = False,
) -> str:
    """How `attention` would do this, in words: who computes what, what travels, and why so.

    Computes and sends nothing, and reads no tensor.

    Args: as `attention`; `strobe.ArraySpec(shape, dtype, device)` will do for a tensor, and rank
        and ranks for a group: which rank's part is told, of how many.

    Returns:
        Lines: the sequence and this rank's rows of it, the method and why it was chosen, each step
        of the forward pass, and bytes. A step that has nothing to do is not told.

    Raises:
        InvalidArgument, Unsupported: as the call itself would.

    Example:
        >>> import strobe
        >>> x = strobe.ArraySpec((1, 8192, 16, 128), "bfloat16", "cpu")
        >>> print(strobe.distributed.plan(x, x, x, rank=0, ranks=2, causal=True).splitlines()[0])
        sequence   16384 rows over 2 ranks in zigzag order: rank 0 has rows 0-4095, 12288-16383
    """
    place = _place(group, rank, ranks)
    has_slopes = alibi_slopes is not None
    wanted = _Wanted.of(causal, window, scale, softcap, has_slopes, deterministic)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 4:
            raise InvalidArgument(f"{name}.ndim = {len(x.shape)}, expected 4: ({', '.join(_AXES)})")
    q, k, v = map(_spec, (q, k, v))
    slopes = _spec(alibi_slopes) if has_slopes else None
    found = _settle(place.ranks, place.rank, (q, k, v), slopes, wanted, method, order, seqlen)
    mine = _ring.chunks(found.length, place.ranks, place.rank, found.order)
    held = ", ".join(f"{begin}-{end - 1}" for _, begin, end in mine)
    sequence = (
        f"sequence   {found.length} rows over {place.ranks} ranks in {found.order} order: rank "
        f"{place.rank} has {f'rows {held}' if held else 'no rows'}"
    )
    chosen = f"method     {found.method}, because {found.reason}"
    if found.method == "ring":
        return "\n".join([sequence, chosen, *_told_ring(place, found, wanted.mask)])
    return "\n".join([sequence, chosen, *_told_ulysses(place, found)])


def _told_ring(place: _Place, found: _Settled, mask: Mask) -> list[str]:
    """The steps of a rank, and what travels."""
    schedule = _ring.schedule(found.length, place.ranks, place.rank, found.order, mask)
    row = found.sizes.kv_row * found.sizes.element
    lines = [f"step 0     computes {_listed(schedule.own)} with its own keys"]
    for step in schedule.steps:
        said = []
        if step.sends:
            count = sum(x.size for x in step.sends)
            said.append(f"sends {count} rows ({_bytes(count * row)}) to rank {step.target}")
        if step.receives:
            count = sum(x.size for x in step.receives)
            said.append(f"receives {count} rows ({_bytes(count * row)}) from rank {step.source}")
            said.append(f"computes {_listed(step.blocks)}")
        if said:
            lines.append(f"step {step.distance:<6}{'; '.join(said)}")
    traffic = _ring.ring_traffic(schedule, found.sizes)
    waits = "no byte of it" if traffic.exposed == 0 else f"{_bytes(traffic.exposed)} of it"
    lines.append(
        f"messages   receives {_bytes(traffic.forward)} forward (K and V), "
        f"{_bytes(traffic.backward)} backward (K and V again, float32 dK and dV home); "
        f"{waits} without work to hide behind"
    )
    return lines


def _told_ulysses(place: _Place, found: _Settled) -> list[str]:
    """The all-to-all of a rank."""
    sizes = found.sizes
    heads, heads_kv = sizes.heads // place.ranks, sizes.heads_kv // place.ranks
    once = _ring.ulysses_traffic(found.length, place.ranks, sizes).forward
    messages = (
        f"messages   receives {_bytes(once)} forward (Q, K and V before, O after), {_bytes(once)} "
        "backward (dO before; dQ, dK and dV after); attention waits for all of it"
    )
    computes = (
        f"computes   all {found.length} rows of {heads} heads ({heads_kv} of keys), by one call"
    )
    return [computes, messages]


def _listed(blocks: Sequence[_ring.Block]) -> str:
    """Blocks in words, queries x keys."""
    if not blocks:
        return "nothing"
    return " and ".join(
        f"rows {block.q.begin}-{block.q.end - 1} x {block.k.size} keys"
        f"{' (masked)' if block.masked else ''}"
        for block in blocks
    )


def _bytes(count: int) -> str:
    """With a unit, powers of ten as links have them."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
