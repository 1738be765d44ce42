"""A call over ranks before anything is sent: whose it is, what it asks for, and what follows from
the shapes, on every rank alike. `strobe.distributed` has the functions that users call.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from . import _options, _questions, _ring, _ring_cost
from ._arrays import ArraySpec
from ._errors import InvalidArgument, Unsupported, shown
from ._flash_attn import as_flag, as_integer, as_number, check_dropout
from ._layout import DOCUMENTS, ORDERS, Documents, Layout, Lengths, Order, layout_of
from ._ring import Mask
from ._ring_cost import Sizes
from ._shares import Cut, Held, nothing_seen
from ._values import pair
from ._values import seed as as_seed

METHODS: Final = ("auto", "ring", "ulysses")
AXES: Final = ("batch", "rows", "heads", "head_dim")
PACKED_AXES: Final = AXES[1:]

# -------------------------------------------------------------------------------- groups and orders


class Place(NamedTuple):
    """One rank of so many. group: None where there is none and nothing is sent."""

    group: Any
    ranks: int
    rank: int


def place_in(group: Any) -> Place:
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
    return Place(group, dist.get_world_size(group), rank)


def place_of(group: Any, rank: int | None, ranks: int | None) -> Place:
    """Of this process in a group, or of any rank of any number without one."""
    if rank is None and ranks is None:
        return place_in(group)
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
    return Place(None, ranks, rank)


def order_of(order: Any, causal: bool) -> Order:
    if order is None:
        return "zigzag" if causal else "plain"
    if order not in ORDERS:
        raise InvalidArgument(f'order = {shown(order)}, expected "plain", "zigzag" or None')
    found: Order = order
    return found


def layout_in(lengths: Lengths, ranks: int, order: Order, documents: Any, packed: bool) -> Layout:
    """Which rows every rank has. documents: as it was given."""
    documents = documents_of(documents, packed)
    return layout_of(lengths, ranks, order, documents if packed else "split")


def documents_of(documents: Any, packed: bool) -> Documents:
    if documents not in DOCUMENTS:
        raise InvalidArgument(
            f'documents = {shown(documents)}, expected "auto", "whole" or "split"'
        )
    if not packed and documents != "auto":
        raise InvalidArgument(
            f'documents = {shown(documents)} without cu_seqlens, expected "auto": there is one '
            "sequence, which is split"
        )
    found: Documents = documents
    return found


def method_of(method: Any) -> str:
    if method not in METHODS:
        raise InvalidArgument(f'method = {shown(method)}, expected "auto", "ring" or "ulysses"')
    found: str = method
    return found


def _limit(name: str, value: Any) -> int | None:
    """One side of a window."""
    if value is None:
        return None
    number = as_integer(name, value)
    if number < -1:
        raise InvalidArgument(f"{name} = {number}, expected at least 0, or -1 or None for no limit")
    return None if number == -1 else number


def _mask(causal: bool, window: Any, by_distance: bool, attention_chunk: int) -> Mask:
    given: dict[str, Any] = {}

    def limit(name: str, value: Any) -> int | None:
        given[name] = value
        return _limit(name, value)

    left, right = pair("window", window, limit, "-1 or None")
    if None in given.values():
        for name, value in given.items():
            if value == -1:
                raise InvalidArgument(
                    f"{name} = -1 beside None, expected at least 0 or None: beside None a number "
                    "is a limit of either sign, and ranks take no negative ones"
                )
    if causal:
        right = 0
    return Mask(left, right, by_distance, attention_chunk or None)


# ------------------------------------------------------------------------- what follows from shapes


class PerHead(NamedTuple):
    """What has numbers for each head, in words."""

    alibi_slopes: ArraySpec | None
    sinks: ArraySpec | None

    @staticmethod
    def of(alibi_slopes: Any, sinks: Any) -> PerHead:
        """Of tensors, or of what is given in words already."""
        found = (None if x is None else spec_of(x) for x in (alibi_slopes, sinks))
        return PerHead(*found)


class Dropout(NamedTuple):
    """Of p, seed and offset `strobe.attention` draws the same bits; None: no weight is dropped."""

    p: float
    seed: int
    offset: int

    @staticmethod
    def of(p: Any, seed: Any, offset: Any) -> Dropout | None:
        p = as_number("dropout_p", p)
        if p == 0:
            return None
        check_dropout(p, 0.0)
        if seed is None:
            raise InvalidArgument(
                f"dropout_seed = None with dropout_p = {p}, expected an integer, the same on every "
                "rank"
            )
        return Dropout(p, as_seed("dropout_seed", seed), as_seed("dropout_offset", offset))

    @property
    def options(self) -> dict[str, Any]:
        return {f"dropout_{name}": value for name, value in self._asdict().items()}


class Wanted(NamedTuple):
    """Arguments that are plain values, checked."""

    causal: bool
    mask: Mask
    scale: float | None
    softcap: float
    dropout: Dropout | None
    deterministic: bool

    @staticmethod
    def of(
        causal: Any,
        window: Any,
        attention_chunk: Any,
        scale: Any,
        softcap: Any,
        slopes: bool,
        dropout: Dropout | None,
        deterministic: Any,
    ) -> Wanted:
        causal, placed = as_flag("causal", causal), slopes or dropout is not None
        return Wanted(
            causal,
            _mask(causal, window, placed, as_integer("attention_chunk", attention_chunk)),
            None if scale is None else as_number("scale", scale),
            as_number("softcap", softcap),
            dropout,
            as_flag("deterministic", deterministic),
        )

    def options(self, per_head: PerHead) -> dict[str, Any]:
        """Those of `strobe.plan`."""
        left, right = (-1 if x is None else x for x in self.mask[:2])
        given = {"causal": self.causal, "window": (left, right), "softcap": self.softcap}
        given["attention_chunk"] = self.mask.attention_chunk or 0
        given["dropout_p"] = 0.0 if self.dropout is None else self.dropout.p
        return given | {"scale": self.scale} | per_head._asdict()


class Settled(NamedTuple):
    """What follows from the shapes. inside: how many neighbouring ranks share out the heads by an
    all-to-all, while a ring goes between such groups; reason: why so many.
    """

    layout: Layout
    inside: int
    reason: str
    sizes: Sizes

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @property
    def groups(self) -> int:
        """How many the ring goes through."""
        return self.ranks // self.inside

    @property
    def method(self) -> str:
        """In words."""
        if self.inside == 1:
            return "ring"
        if self.groups == 1:
            return "ulysses"
        return f"ring of {self.groups} groups, each of which is {self.inside} ranks by all-to-all"


class Ways(NamedTuple):
    """Arguments that say how the work is divided, as they were given; data: which rows there are of
    a mask as data.
    """

    method: str
    ulysses: int | None
    order: Order | None
    documents: Documents
    seqlen: int | None
    packed: Lengths | None
    data: Held


def refuse(options: dict[str, Any]) -> None:
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


def spec_of(x: Any) -> ArraySpec:
    """A tensor in words; what is given so already stays."""
    if isinstance(x, ArraySpec):
        return x
    dtype = str(x.dtype).removeprefix("torch.")
    return ArraySpec(tuple(x.shape), dtype, str(x.device))


@lru_cache(maxsize=1024)
def settle(
    ranks: int,
    rank: int,
    shapes: tuple[ArraySpec, ArraySpec, ArraySpec],
    per_head: PerHead,
    wanted: Wanted,
    ways: Ways,
) -> Settled:
    """Checks a call, and chooses what it leaves open. The same on every rank."""
    q, k, v = shapes
    packed = ways.packed
    axis = 1 if packed is None else 0  # of the rows
    for name, x in (("k", k), ("v", v)):
        if x.shape[axis] != q.shape[axis]:
            raise InvalidArgument(
                f"{name}.shape[{axis}] = {x.shape[axis]}, expected {q.shape[axis]}: the rows of q"
            )
    if q.dtype not in ("float32", "bfloat16", "float16"):
        raise InvalidArgument(
            f"q.dtype = {q.dtype:.60}, expected float32, bfloat16 or float16 over ranks"
        )
    # What `strobe.attention` would refuse it refuses here, by its names, before anything is sent.
    _questions.check(q, k, v, **wanted.options(per_head), **packing(packed, q))
    order = order_of(ways.order, wanted.causal)
    rows = q.shape[axis]
    lengths = lengths_of(ranks * rows, ways.seqlen, packed)
    layout = layout_in(lengths, ranks, order, ways.documents, packed is not None)
    check_share(f"q.shape[{axis}]", rows, layout, rank, packed is not None)
    element = 4 if q.dtype == "float32" else 2
    batch = 1 if packed is not None else q.shape[0]
    sizes = Sizes(batch, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], element)
    inside, reason = _inside(ways, layout, wanted.mask, sizes)
    if inside < ranks and wanted.dropout is not None and not q.device.startswith("cpu"):
        _check_eights(layout, wanted.mask, inside)
    return Settled(layout, inside, reason, sizes)


def _check_eights(layout: Layout, mask: Mask, inside: int) -> None:
    """Dropout's bits are drawn for eight keys at a time, and kernels on GPUs begin with whole ones:
    refuses, on all ranks alike, what would have a call of some rank begin elsewhere.
    """
    for rank in range(layout.ranks // inside):
        plan = _ring.schedule(layout, rank, mask, inside)
        for block in chain(*plan.of_own_keys, *(step.blocks for step in plan.steps)):
            query = layout.place_of_row(rank, block.q.begin, inside)[1]
            if (query - block.position) % 8:
                raise Unsupported(
                    f"dropout_p with keys from {query - block.position} on of rank {rank}'s step, "
                    "expected a multiple of 8 on GPUs, where bits are drawn for 8 keys: sequences "
                    f"of multiples of {8 * layout.ranks * (2 if layout.order == 'zigzag' else 1)} "
                    'rows and windows of multiples of 8 have it; method = "ulysses" and, of packed '
                    'sequences, documents = "whole" without attention chunks do not need it'
                )


def lengths_of(rows: int, seqlen: Any, packed: Lengths | None) -> Lengths:
    """Of the sequences that are split. rows: of one, if nothing else says how many it has."""
    if packed is not None:
        if seqlen is not None:
            raise InvalidArgument(
                f"seqlen = {shown(seqlen)} with cu_seqlens, expected one of the two"
            )
        return packed
    length = rows if seqlen is None else as_integer("seqlen", seqlen)
    if length < 0:
        raise InvalidArgument(f"seqlen = {length}, expected at least 0")
    return (length,)


def check_share(name: str, rows: int, layout: Layout, rank: int, packed: bool) -> None:
    """Refuses another number of rows than a rank has."""
    share = layout.rows_of(rank)
    if rows != share:
        whole = "cu_seqlens[-1]" if packed else "seqlen"
        raise InvalidArgument(
            f"{name} = {rows}, expected {share}: the share of rank {rank} of {layout.ranks} in "
            f"{whole} = {layout.rows} rows in {layout.order} order"
            + (f', documents = "{layout.documents}"' if packed else "")
        )


def packed_lengths(cu_seqlens: Any) -> Lengths | None:
    """The lengths of packed sequences, from where they begin: integers in the CPU's memory."""
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.device.type != "cpu":
            raise InvalidArgument(
                f"cu_seqlens is on {cu_seqlens.device}, expected it in the CPU's memory: which "
                "rows go where follows from its numbers"
            )
        cu_seqlens = cu_seqlens.tolist()
    try:
        begins = [as_integer("cu_seqlens", x) for x in cu_seqlens]
    except TypeError:
        raise InvalidArgument(
            f"cu_seqlens = {shown(cu_seqlens)}, expected a sequence of integers"
        ) from None
    if not begins or begins[0] != 0 or any(a > b for a, b in pairwise(begins)):
        raise InvalidArgument(
            f"cu_seqlens = {shown(begins)}, expected integers from 0 on that do not decrease"
        )
    return tuple(b - a for a, b in pairwise(begins))


def packing(packed: Lengths | None, q: ArraySpec) -> dict[str, Any]:
    """Options by which the planner sees packed sequences. A call has a part of their rows."""
    if packed is None:
        return {}
    return _ring.packed_options(ArraySpec((len(packed) + 1,), "int32", q.device), packed)


def _inside(ways: Ways, layout: Layout, mask: Mask, sizes: Sizes) -> tuple[int, str]:
    """How many ranks share out the heads, and why."""
    method, data, ranks = ways.method, ways.data, layout.ranks
    asked, wanted = f'method = "{method}"', {"ring": 1, "ulysses": ranks}.get(method)
    if ways.ulysses is not None:
        number = ways.ulysses
        asked = f"ulysses = {number}"
        if number < 1 or ranks % number:
            raise InvalidArgument(f"{asked}, expected a divisor of {ranks}, the number of ranks")
        if wanted not in (None, number):
            raise InvalidArgument(f'method = "{method}" with {asked}, expected "auto"')
        wanted = number
    heads = (("heads", sizes.heads), ("heads_kv", sizes.heads_kv))
    # A rank that has all rows cannot tell a mask of its own from one of all; and all ranks have to
    # find the same.
    has_all = max(map(layout.rows_of, range(ranks))) == layout.rows
    is_own = data == "own" or (data == "all" and has_all and ranks > 1)
    if wanted is not None:
        for name, count in heads:
            if count % wanted:
                which = "the number of ranks" if wanted == ranks else "so many ranks"
                raise InvalidArgument(
                    f"{asked} with {name} = {count}, expected a multiple of {wanted}, {which}"
                )
        if is_own and wanted > 1:
            raise Unsupported(
                f"{asked} with mask, expected it of all rows, and no rank that has them all: by "
                "all-to-all a rank computes rows of others, and has the mask of its own"
            )
        return wanted, "it was asked for"
    if is_own:
        return 1, "a rank has its own rows of the mask alone"
    return _ring_cost.chosen(layout, mask, sizes)


@lru_cache(maxsize=1024)
def ask_for_a_backward(
    shapes: tuple[ArraySpec, ArraySpec, ArraySpec],
    per_head: PerHead,
    wanted: Wanted,
    packed: Lengths | None,
) -> str:
    """Raises, before anything is sent, where no kernel has the gradient."""
    if 0 in shapes[0].shape:
        return ""
    q, k, v = shapes
    options = wanted.options(per_head) | packing(packed, q)
    options |= {"deterministic": wanted.deterministic, "delta": True}
    return _questions.plan(q, k, v, backward=True, grad_dtype="float32", accumulate=True, **options)


def ask_with_mask(
    shapes: tuple[ArraySpec, ArraySpec, ArraySpec],
    per_head: PerHead,
    wanted: Wanted,
    packed: Lengths | None,
    data: Cut,
) -> None:
    """Raises, before anything is sent, where no kernel has masks as data, or their gradient."""
    what = (shapes, per_head, wanted, packed, torch.is_grad_enabled())
    if what in data.answered:
        return
    q, k, v = shapes
    options = wanted.options(per_head) | packing(packed, q)
    own = nothing_seen(q.shape[0 if packed is not None else 1], packed).to(q.device)
    _questions.check(q, k, v, mask=own, **options)
    if torch.is_grad_enabled():
        more: dict[str, Any] = {"deterministic": wanted.deterministic, "delta": True}
        more |= {"grad_dtype": "float32", "accumulate": True, "backward": True}
        _questions.plan(q, k, v, mask=own, **more, **options)
    data.answered.add(what)


def compare(place: Place, *said: Any) -> None:
    """Raises on every rank where one says something else; rows may differ where seqlen or
    cu_seqlens is given.
    """
    shapes, per_head, wanted, ways, seqused, return_lse = said
    mine: dict[str, Any] = ways._asdict()
    seqlen, packed = ways.seqlen, mine.pop("packed")
    mine["rows of mask"] = mine.pop("data")
    mine["seqused"] = seqused.tolist() if isinstance(seqused, torch.Tensor) else seqused
    mine |= {"the sequences' lengths": packed, "return_lse": return_lse}
    for name, x in zip("qkv", shapes, strict=True):
        shape: list[Any] = list(x.shape)
        if seqlen is not None or packed is not None:
            shape[-3] = "rows"
        mine |= {f"{name}.shape": tuple(shape), f"{name}.dtype": x.dtype}
    for name, x in per_head._asdict().items():
        mine |= {f"{name}.shape": None if x is None else x.shape}
    mine |= {"window": wanted.mask[:2], "attention_chunk": wanted.mask.attention_chunk or 0}
    mine |= wanted._asdict()
    del mine["mask"]
    found: list[Any] = [None] * place.ranks
    mine["rows"] = shapes[0].shape[-3]
    dist.all_gather_object(found, mine, place.group)
    rows = [theirs.pop("rows") for theirs in found]
    if max(rows) == sum(rows):  # that rank cannot tell a mask of its own from one of all
        for theirs in found:
            del theirs["rows of mask"]
    for rank, theirs in enumerate(found):
        for name, value in found[0].items():
            if theirs[name] != value:
                raise InvalidArgument(
                    f"{name} = {shown(theirs[name])} on rank {rank}, expected {shown(value)} as on "
                    "rank 0"
                )
