"""What a mask function of transformers says, read by calling it with symbols for its indices.

transformers describes a mask by a function of (batch, head, query, key) that is made of smaller
ones. Here it gets symbols in place of numbers. `key <= query` and its like answer with a `Reach`,
intersections and unions of which are a `Reach` again; whatever the symbols do not know is refused.
Neither names nor closures are looked at, which torch.compile could not follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch

from ._errors import Unsupported

_UNKNOWN: Final = "something that is no interval of keys around the query"


@dataclass(frozen=True)
class Reach:
    """A query sees keys from `left` before it to `right` behind it; None: no limit.

    documents: besides, only those of its own document.
    """

    left: int | None = None
    right: int | None = None
    documents: bool = False

    def is_empty(self) -> bool:
        """Whether a query sees no key."""
        return self.left is not None and self.right is not None and self.left + self.right < 0

    def is_served(self) -> bool:
        """Whether a query sees itself, or nothing.

        A window beside its query has a negative limit, which without `window_signed` means none.
        """
        return self.is_empty() or min(self.left or 0, self.right or 0) >= 0

    device = None  # where and_masks and or_masks of transformers put the next part

    def to(self, device: Any) -> Reach:
        """As a tensor's."""
        return self

    def __and__(self, other: Reach) -> Reach:
        if not isinstance(other, Reach):
            _refuse()
        left, right = _nearer(self.left, other.left), _nearer(self.right, other.right)
        return Reach(left, right, self.documents or other.documents)

    def __or__(self, other: Any) -> Reach:
        """Of intervals that both hold the query itself, so that their union is one."""
        if isinstance(other, torch.Tensor) and other.ndim == 0 and other.dtype == torch.bool:
            other = EVERYTHING if bool(other) else NOTHING
        if not isinstance(other, Reach) or self.documents or other.documents:
            _refuse()
        if other is NOTHING:
            return self
        if self is NOTHING:
            return other
        return Reach(_farther(self.left, other.left), _farther(self.right, other.right))


def _nearer(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _farther(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)


EVERYTHING: Final = Reach()
NOTHING: Final = Reach(-1, -1)
_DOCUMENTS: Final = Reach(documents=True)


def _refuse(*_: Any) -> NoReturn:
    raise Unsupported(_UNKNOWN)


class _Limit:
    """The query's index less a number."""

    def __init__(self, less: int) -> None:
        self.less = less


class _Distance:
    """The difference of a query's and a key's index, or its absolute value."""

    def __init__(self, absolute: bool = False) -> None:
        self.absolute = absolute

    def __abs__(self) -> _Distance:
        return _Distance(True)

    def __le__(self, most: int) -> Reach:
        if not self.absolute:
            _refuse()
        return Reach(most, most)

    def __lt__(self, most: int) -> Reach:
        return self <= most - 1


class _Entry:
    """What a tensor holds for a sequence of the batch and a query or key."""

    def __init__(self, table: Any, of: Any) -> None:
        self.table, self.of = table, of

    def __eq__(self, other: Any) -> Any:
        kinds = {type(self.of), type(other.of)} if isinstance(other, _Entry) else set()
        if kinds != {_Query, _Key} or self.table is not other.table:
            _refuse()
        return _DOCUMENTS

    __hash__ = None  # type: ignore[assignment]


class _Symbol:
    """An index. What its subclasses do not define is refused."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """A tensor was asked for its entry at [batch, query or key]."""
        if function is not torch.Tensor.__getitem__ or not isinstance(args[1], tuple):
            _refuse()
        table, (batch, of) = args
        if type(batch) is not _Symbol:
            _refuse()
        return _Entry(table, of)


class _Query(_Symbol):
    def __sub__(self, other: Any) -> Any:
        return _Distance() if isinstance(other, _Key) else _Limit(other)

    def __ge__(self, least: int) -> Reach:
        if least != 0:
            _refuse()
        return EVERYTHING

    def new_ones(self, *_: Any, **__: Any) -> Reach:
        """Where and_masks begins."""
        return EVERYTHING

    def new_zeros(self, *_: Any, **__: Any) -> Reach:
        """Where or_masks begins."""
        return NOTHING


class _Key(_Symbol):
    def __le__(self, other: Any) -> Reach:
        return Reach(right=0) if isinstance(other, _Query) else _refuse()

    def __gt__(self, other: Any) -> Reach:
        return Reach(left=other.less - 1) if isinstance(other, _Limit) else _refuse()


def _names(mask_function: Any) -> str:
    """Of the parts of a mask function, for a message."""
    cells = (cell.cell_contents for cell in mask_function.__closure__ or ())
    parts = [part for cell in cells if isinstance(cell, tuple) for part in cell if callable(part)]
    name: str = mask_function.__qualname__.partition(".<locals>")[0]
    return f"{name} of ({', '.join(map(_names, parts))})" if parts else name


def reach_of(mask_function: Any) -> Reach:
    """What a mask function says.

    Raises:
        Unsupported: it says more than a `Reach` can.
    """
    try:
        found = mask_function(_Symbol(), _Symbol(), _Query(), _Key())
        if isinstance(found, Reach) and found.is_served():
            return found
        problem = _UNKNOWN
    except Exception as error:  # whatever symbols cannot do
        problem = f"{error}"
    raise Unsupported(f"{_names(mask_function)}, which says {problem}") from None


# ------------------------------------------------------------------------------------- while traced

# PyTorch's compiler takes nothing but numbers as indices of a tensor, and nothing but tensors and
# numbers beside a tensor. So while it traces, symbols are numbers, an intersection is a tensor that
# nobody needs, and what is said is noted aside.


class _Said:
    def __init__(self, notes: list[Any], left: int | None, right: int | None) -> None:
        notes.append((left, right))

    def to(self, device: Any) -> bool:
        """Neutral in an intersection."""
        return True


class _TracedDistance:
    def __init__(self, notes: list[Any]) -> None:
        self.notes = notes

    def __abs__(self) -> _TracedDistance:
        return self

    def __le__(self, most: int) -> _Said:
        return _Said(self.notes, most, most)


class _TracedQuery(int):
    notes: list[Any]

    def __sub__(self, other: Any) -> Any:
        return _TracedDistance(self.notes) if isinstance(other, _TracedKey) else _Limit(other)

    def __ge__(self, least: int) -> Any:
        return _Said(self.notes, None, None)

    def new_ones(self, *_: Any, **__: Any) -> torch.Tensor:
        """Where and_masks begins."""
        self.notes.append(None)
        return torch.ones((), dtype=torch.bool)


class _TracedKey(int):
    notes: list[Any]

    def __le__(self, other: Any) -> Any:
        return _Said(self.notes, None, 0)

    def __gt__(self, other: Any) -> Any:
        return _Said(self.notes, other.less - 1, None)


def is_symbol(query: Any) -> bool:
    """Whether a mask function is read, and not asked about numbers."""
    return isinstance(query, (_Query, _TracedQuery))


def traced_reach_of(mask_function: Any) -> Reach:
    """`reach_of` for functions of transformers' own, while PyTorch's compiler traces."""
    notes: list[Any] = []
    query, key = _TracedQuery(0), _TracedKey(0)
    query.notes = key.notes = notes
    mask_function(0, 0, query, key)
    said = [note for note in notes if note is not None]
    found = Reach()
    for left, right in said:
        found = found & Reach(left, right)
    # and_masks takes two parts each time. One that noted nothing is about documents.
    if not found.is_served():
        _refuse()
    silent = len(notes) - len(said) + 1 - len(said)
    if silent not in (0, 1):  # a part whose answer nobody has heard
        _refuse()
    return Reach(found.left, found.right, silent == 1)
