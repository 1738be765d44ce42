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

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, overload

import torch
import torch.distributed as dist

from ._arrays import ArraySpec, check_readable
from ._compiler import uncompiled
from ._context_parallel import SplitAttention
from ._errors import InvalidArgument
from ._flash_attn import as_flag, as_integer, autocast, check_tensor
from ._layout import Documents, Lengths, Order
from ._messages import heads_of
from ._rank_call import Call
from ._shares import Cut, cut_mask, held_of, used_lengths
from ._split_calls import (
    AXES,
    PACKED_AXES,
    Dropout,
    PerHead,
    Place,
    Settled,
    Wanted,
    Ways,
    ask_for_a_backward,
    ask_with_mask,
    check_share,
    compare,
    documents_of,
    layout_in,
    lengths_of,
    method_of,
    order_of,
    packed_lengths,
    place_in,
    place_of,
    refuse,
    settle,
    spec_of,
)
from ._told import plan_told
from ._values import constant

__all__ = ["attention", "plan", "positions", "shard", "unshard"]

Tensor: TypeAlias = torch.Tensor
Method: TypeAlias = Literal["auto", "ring", "ulysses"]
Window: TypeAlias = tuple[int | None, int | None]

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


@uncompiled  # messages are no part of a graph here
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    causal: bool = False,
    window: Window = (-1, -1),
    attention_chunk: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    mask_block: int = 0,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    seqused: Tensor | Sequence[int] | None = None,
    method: Method = "auto",
    ulysses: int | None = None,
    order: Order | None = None,
    documents: Documents = "auto",
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
        q: this rank's queries, (batch, rows, heads, head_dim): float32, bfloat16 or float16. With
            cu_seqlens (rows, heads, head_dim).
        k: the keys of the same rows, (batch, rows, heads_kv, head_dim), or likewise without batch.
        v: their values, as k with head_dim_v.
        group: a process group of torch.distributed, or a DeviceMesh of one dimension; None: all
            ranks. NCCL for tensors on GPUs, gloo for those in the CPU's memory.
        causal, window, attention_chunk, scale, softcap: as in `strobe.attention`, of positions in
            the whole sequence. A window may be wider than a rank's share. window has no negative
            limits but -1, which is none, as None is.
        alibi_slopes: float32, (heads,) or (batch, heads), the same on every rank; with cu_seqlens
            (heads,). Slopes that require a gradient are refused.
        sinks: (heads,), the same on every rank: as in `strobe.torch.attention`; each enters a row
            once. A gradient is that of this rank's part: the sum over ranks is the whole, as it is
            of every parameter.
        mask: a mask as data, in the CPU's memory: bools (batch, heads, rows, seqlen), True attends,
            whose axes before rows may be 1 or missing; or intervals of keys, integers (batch, rows,
            4) or (rows, 4): begin, end, begin, end. A pair is seen if it and all other options
            allow it. With cu_seqlens there is no batch, keys are numbered in a row's own sequence,
            and bools have those of the longest one. The rows are this rank's, or on every rank
            those of all: then what the mask hides whole is neither sent nor computed, and heads may
            be shared out. Each call gets its part, packed when the tensor is first used and kept
            as long as it lives.
        mask_block: the mask says of blocks of so many queries and keys whether they are seen: bools
            (batch, heads, blocks, blocks) of all rows. 0: of pairs. Not with cu_seqlens.
        dropout_p, dropout_seed, dropout_offset: as in `strobe.attention`, the same on every rank:
            the weights that are dropped are those that one device would drop of the whole.
        cu_seqlens: sequences packed end to end, each of which sees itself alone: where they begin
            in the whole, and at last where it ends; integers in the CPU's memory, the same on every
            rank. Ranks have them as `shard` deals them out.
        seqused: of each sequence so many rows are in use, the first ones: integers in the CPU's
            memory, the same on every rank, one for each of the batch or of the packed sequences.
            They are both `seqused_q` and `seqused_k` of `strobe.attention`.
        method: "ring": keys and values go round, and travel while others are computed. "ulysses":
            each rank gets all rows of heads / ranks heads by an all-to-all, and another brings the
            rows back; ranks divides heads and heads_kv. "auto": the one that leaves fewer bytes to
            wait for, or both; `plan` says which and why.
        ulysses: both at once: so many neighbouring ranks (those of a node) share out the heads by
            an all-to-all, and a ring goes between such groups. It divides ranks, heads and
            heads_kv. 1 is "ring", ranks is "ulysses". None: as method says.
        order: which rows a rank has, "plain" or "zigzag", as `shard` has it; None: zigzag if
            causal.
        documents: with cu_seqlens, which ranks have which sequences, as `shard` has it.
        seqlen: rows of the whole sequence, where ranks does not divide them; None: the ranks have
            as many rows as each other.
        deterministic: the same bits of the gradients at every run, also on GPUs. out has them
            anyway.
        return_lse: also return lse, which is differentiable; the same on every rank. A rank whose
            loss does not use it takes part in the others' gradients of it all the same.
        check: compare shapes and arguments of all ranks first, by one more message, and raise where
            they differ. Without it, and with ranks that differ, torch.distributed fails or runs
            into its time-out.
        options: the other options of `strobe.attention` are refused by name.

    Returns:
        out, (batch, rows, heads, head_dim_v), of this rank's rows, or (out, lse): lse is float32,
        (batch, heads, rows), over all keys; with cu_seqlens both without batch. Partial results are
        merged in float32, and gradients are added up in float32, so that out and gradients are as
        near to exact as one device's.

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
    refuse(options)
    constant("alibi_slopes", alibi_slopes)
    packed = packed_lengths(cu_seqlens)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, AXES if packed is None else PACKED_AXES)
        check_readable(name, x)  # what has no memory would end the process that sends it
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if x is not None:
            check_tensor(name, x, None)
            check_readable(name, x)
    if packed is not None and alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes, ("heads",))  # of all sequences
    return_lse = as_flag("return_lse", return_lse)
    q, k, v = autocast(q, k, v)
    if sinks is not None and sinks.is_floating_point():
        sinks = sinks.float()
    dropout = Dropout.of(dropout_p, dropout_seed, dropout_offset)
    slopes = alibi_slopes is not None
    wanted = Wanted.of(
        causal, window, attention_chunk, scale, softcap, slopes, dropout, deterministic
    )
    place = place_in(group)
    shapes = spec_of(q), spec_of(k), spec_of(v)
    per_head = PerHead.of(alibi_slopes, sinks)
    ways = _ways(method, ulysses, order, documents, seqlen, packed, mask, mask_block, place, q)
    if as_flag("check", check):
        compare(place, shapes, per_head, wanted, ways, seqused, return_lse)
    settled = settle(place.ranks, place.rank, shapes, per_head, wanted, ways)
    batch = None if packed is not None else q.shape[0]
    used = used_lengths(seqused, settled.layout.lengths, batch)
    data = _data(mask, mask_block, q, settled, packed)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks)):
        ask_for_a_backward(shapes, per_head, wanted, packed)
    if data is not None and q.numel():
        ask_with_mask(shapes, per_head, wanted, packed, data)
    _meet(place, q.device)
    # The attention chunks of one sequence are computed as packed sequences are, many in a call. (A
    # mask of blocks of a sequence has none of theirs.)
    chunks = settled.groups > 1 and wanted.mask.attention_chunk is not None
    chunks = chunks and batch == 1 and not (data is not None and data.of_blocks)
    if chunks and alibi_slopes is not None and alibi_slopes.ndim == 2:
        alibi_slopes = alibi_slopes[0]
    call = Call(
        *place,
        layout=settled.layout,
        given_packed=packed is not None,
        packed=packed is not None or chunks,
        mask=wanted.mask,
        options={"scale": wanted.scale, "softcap": wanted.softcap},
        slopes=heads_of(alibi_slopes, settled.inside, place.rank % settled.inside),
        deterministic=wanted.deterministic,
        with_lse=return_lse,
        inside=settled.inside,
        used=used,
        data=data,
        dropout={} if dropout is None else dropout.options,
    )
    if packed is None:
        out, lse = SplitAttention.apply(q, k, v, sinks, call)
    else:
        found = SplitAttention.apply(q[None], k[None], v[None], sinks, call)
        # Not x[0], whose gradient is a copy among zeros.
        out, lse = (None if x is None else x.squeeze(0) for x in found)
    return (out, lse) if return_lse else out


def _ways(
    method: Any,
    ulysses: Any,
    order: Any,
    documents: Any,
    seqlen: Any,
    packed: Lengths | None,
    mask: Any,
    mask_block: Any,
    place: Place,
    q: Any,
) -> Ways:
    """The arguments of those names, each checked by itself: `settle` keeps its answers by them."""
    block = as_integer("mask_block", mask_block)
    if block < 0 or (block and mask is None):
        raise InvalidArgument(f"mask_block = {block}, expected 0, or with mask at least 1")
    ulysses = None if ulysses is None else as_integer("ulysses", ulysses)
    seqlen = None if seqlen is None else as_integer("seqlen", seqlen)
    rows = q.shape[1 if packed is None else 0]
    length = 0 if mask is None else sum(lengths_of(place.ranks * rows, seqlen, packed))
    data = held_of(mask, block, length)
    documents = documents_of(documents, packed is not None)
    order = None if order is None else order_of(order, False)
    return Ways(method_of(method), ulysses, order, documents, seqlen, packed, data)


def _data(
    mask: Any, mask_block: int, q: Any, settled: Settled, packed: Lengths | None
) -> Cut | None:
    """The mask as data, checked. q: a tensor, or one in words."""
    if mask is None:
        return None
    batch = 1 if packed is not None else q.shape[0]
    what = batch, q.shape[-2], q.shape[-3], settled.layout.lengths, packed is not None
    return cut_mask(mask, as_integer("mask_block", mask_block), *what)


_MET: Final[set[str]] = set()  # names of groups


def _meet(place: Place, device: Any) -> None:
    """The first call of a group on GPUs: NCCL connects the ranks in a message of all of them. A
    step of the ring is none, since some have nothing to send.
    """
    if device.type != "cuda" or place.ranks == 1 or place.group.group_name in _MET:
        return
    dist.all_reduce(torch.zeros(1, device=device), group=place.group)
    _MET.add(place.group.group_name)


# ----------------------------------------------------------------------------------- rows and ranks


@uncompiled  # messages are no part of a graph here
def shard(
    x: Tensor,
    *,
    group: Any = None,
    rank: int | None = None,
    ranks: int | None = None,
    dim: int | None = None,
    causal: bool = False,
    order: Order | None = None,
    documents: Documents = "auto",
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """This rank's rows of a tensor that every rank has whole: tokens, labels, q, k or v.

    Args:
        x: a tensor with the whole sequence along dim.
        group: as in `attention`.
        rank, ranks: instead of a group, which rank's rows, of how many; nothing needs to be
            initialised then.
        dim: the axis of the sequence; None: 1, or 0 with cu_seqlens.
        causal, order: as in `attention`: zigzag order if causal, unless order says otherwise.
        documents: with cu_seqlens, which ranks have which of the packed sequences: "whole": each
            has one; "split": each is split over all ranks; "auto": the longest are split, as few as
            it takes for the others to be dealt out evenly, whole but for some that fill up what is
            left: all ranks then have as many rows, give or take one, and about as many pairs of
            queries and keys. It follows from lengths, ranks and order, so layers with a window and
            layers without have the same rows.
        cu_seqlens: as in `attention`. A rank gets first what it has of the sequences that are
            split, then those that it has whole.

    Returns:
        The rows, contiguous. Without ranks that divide the rows, ranks have unlike numbers of them,
        and `attention` wants seqlen or cu_seqlens. Differentiable, as slices are.

    Example:
        >>> import torch, strobe
        >>> x = torch.arange(8)
        >>> strobe.distributed.shard(x, rank=0, ranks=2, dim=0, causal=True).tolist()
        [0, 1, 6, 7]
        >>> strobe.distributed.shard(x, rank=1, ranks=2, dim=0, causal=True).tolist()
        [2, 3, 4, 5]
        >>> strobe.distributed.shard(x, rank=0, ranks=2, cu_seqlens=[0, 4, 8]).tolist()
        [0, 1, 2, 3]
    """
    place, packed = place_of(group, rank, ranks), packed_lengths(cu_seqlens)
    dim = _axis(x, dim, packed)
    lengths = (x.shape[dim],) if packed is None else packed
    if sum(lengths) != x.shape[dim]:
        raise InvalidArgument(
            f"x.shape[{dim}] = {x.shape[dim]}, expected cu_seqlens[-1] = {sum(lengths)}"
        )
    order = order_of(order, as_flag("causal", causal))
    layout = layout_in(lengths, place.ranks, order, documents, packed is not None)
    found = layout.chunks(place.rank)
    pieces = [x.narrow(dim, chunk.begin, chunk.end - chunk.begin) for chunk in found]
    return torch.cat(pieces or [x.narrow(dim, 0, 0)], dim=dim)


@uncompiled  # messages are no part of a graph here
def unshard(
    x: Tensor,
    *,
    group: Any = None,
    dim: int | None = None,
    causal: bool = False,
    order: Order | None = None,
    documents: Documents = "auto",
    seqlen: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """The whole of a tensor of which each rank has the rows that `shard` gave it, on every rank.

    Args:
        x: this rank's rows along dim.
        group, causal, order, documents, seqlen, cu_seqlens: as in `attention`.
        dim: the axis of the sequence; None: 1, or 0 with cu_seqlens.

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
    place, order = place_in(group), order_of(order, as_flag("causal", causal))
    packed = packed_lengths(cu_seqlens)
    dim = _axis(x, dim, packed)
    check_readable("x", x)
    mine = x.detach().movedim(dim, 0)
    rows = mine.shape[0]
    lengths = lengths_of(place.ranks * rows, seqlen, packed)
    layout = layout_in(lengths, place.ranks, order, documents, packed is not None)
    check_share(f"x.shape[{dim}]", rows, layout, place.rank, packed is not None)
    counts = [layout.rows_of(rank) for rank in range(place.ranks)]
    # A gathering wants tensors of one shape.
    padded = mine.new_zeros((max(counts), *mine.shape[1:]))
    padded[:rows] = mine
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, place.group)
    whole = mine.new_empty((sum(lengths), *mine.shape[1:]))
    for rank, part in enumerate(parts):
        for row, begin, end, _ in layout.chunks(rank):
            whole[begin:end] = part[row : row + end - begin]
    return whole.movedim(0, dim).contiguous()


@uncompiled  # messages are no part of a graph here
def positions(
    seqlen: int | None = None,
    *,
    group: Any = None,
    rank: int | None = None,
    ranks: int | None = None,
    causal: bool = False,
    order: Order | None = None,
    documents: Documents = "auto",
    cu_seqlens: Tensor | Sequence[int] | None = None,
    device: Any = None,
) -> Tensor:
    """The positions of this rank's rows in the whole sequence: for rotary embeddings and the like.

    Args:
        seqlen: rows of the whole sequence.
        group, rank, ranks: as in `shard`.
        causal, order, documents: as in `attention`.
        cu_seqlens: instead of seqlen, packed sequences as in `attention`: positions are in the
            row's own one.
        device: of the result; None: the CPU.

    Returns:
        int64, (rows,).

    Example:
        >>> import strobe
        >>> strobe.distributed.positions(8, rank=0, ranks=2, causal=True).tolist()
        [0, 1, 6, 7]
        >>> strobe.distributed.positions(cu_seqlens=[0, 4, 8], rank=0, ranks=2).tolist()
        [0, 1, 2, 3]
    """
    place, packed = place_of(group, rank, ranks), packed_lengths(cu_seqlens)
    if seqlen is None and packed is None:
        raise InvalidArgument("seqlen = None without cu_seqlens, expected one of the two")
    lengths = lengths_of(0, seqlen, packed)
    order = order_of(order, as_flag("causal", causal))
    layout = layout_in(lengths, place.ranks, order, documents, packed is not None)
    pieces = [
        torch.arange(begin, end, device=device) - layout.starts[sequence]
        for _, begin, end, sequence in layout.chunks(place.rank)
    ]
    return torch.cat(pieces or [torch.arange(0, device=device)])


def _axis(x: Any, dim: Any, packed: Lengths | None) -> int:
    """`dim` from 0 on."""
    check_tensor("x", x, None)
    if x.ndim == 0:
        raise InvalidArgument("x.ndim = 0, expected at least 1: the axis of the sequence")
    dim = (1 if packed is None else 0) if dim is None else as_integer("dim", dim)
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
    attention_chunk: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | ArraySpec | None = None,
    sinks: Tensor | ArraySpec | None = None,
    mask: Tensor | ArraySpec | None = None,
    mask_block: int = 0,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    method: Method = "auto",
    ulysses: int | None = None,
    order: Order | None = None,
    documents: Documents = "auto",
    seqlen: int | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
) -> str:
    """How `attention` would do this, in words: who computes what, what travels, and why so.

    Computes and sends nothing, and reads no tensor but a mask of all rows, if that is one.

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
    place, packed = place_of(group, rank, ranks), packed_lengths(cu_seqlens)
    slopes, dropout = alibi_slopes is not None, Dropout.of(dropout_p, 0, 0)
    wanted = Wanted.of(
        causal, window, attention_chunk, scale, softcap, slopes, dropout, deterministic
    )
    axes = AXES if packed is None else PACKED_AXES
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != len(axes):
            raise InvalidArgument(
                f"{name}.ndim = {len(x.shape)}, expected {len(axes)}: ({', '.join(axes)})"
            )
    q, k, v = map(spec_of, (q, k, v))
    per_head = PerHead.of(alibi_slopes, sinks)
    ways = _ways(method, ulysses, order, documents, seqlen, packed, mask, mask_block, place, q)
    found = settle(place.ranks, place.rank, (q, k, v), per_head, wanted, ways)
    data = _data(mask, mask_block, q, found, packed) if isinstance(mask, torch.Tensor) else None
    return plan_told(found, place.rank, packed is not None, wanted.mask, data)
