"""The options of a problem that a call takes by keyword alone and that most calls do without.

One row each, in the order of strobe_problem's fields. From the rows follow the arguments of
`attention`, `attention_backward`, `plan` and `why`, and the tails of the operators' schemas
(`_operators`); the extension reads src/core/options.def itself, and tests/python/test_options.py
compares the two. The options that nearly every call has (causal, window, scale, ...) are written
out in those functions, which saves time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypedDict, TypeVar

from ._values import integer


class MoreOptions(TypedDict, total=False):
    """The rows below, for type checkers."""

    attention_chunk: int
    seqused_q: Any
    seqused_k: Any
    q_position: Any
    prefix: Any


@dataclass(frozen=True)
class Scalar:
    """A plain value, a field of strobe_problem."""

    name: str
    default: Any
    convert: Callable[[str, Any], Any]
    torch_type: str  # in an operator's schema

    @property
    def schema(self) -> str:
        return f"{self.torch_type} {self.name}={self.default}"


@dataclass(frozen=True)
class Numbers:
    """An array of one int32 for each sequence: has_<name> in strobe_problem, <name> in the
    arguments of a launch.
    """

    name: str
    default: None = None

    @property
    def schema(self) -> str:
        return f"Tensor? {self.name}=None"


ROWS: Final[tuple[Scalar | Numbers, ...]] = (
    Scalar("attention_chunk", 0, integer, "SymInt"),
    Numbers("seqused_q"),
    Numbers("seqused_k"),
    Numbers("q_position"),
    Numbers("prefix"),
)
NAMES: Final = tuple(row.name for row in ROWS)
ARRAYS: Final = tuple(row.name for row in ROWS if isinstance(row, Numbers))
_ROWS: Final = {row.name: row for row in ROWS}

# What of them a call gave: values by name, sorted as above and hashable; and arrays by name.
Scalars: TypeAlias = tuple[tuple[str, Any], ...]
Arrays: TypeAlias = dict[str, Any]


def split(function: str, more: dict[str, Any]) -> tuple[Scalars, Arrays]:
    """The options that `more` gives, but for those that have their defaults."""
    for name in more:
        if name not in _ROWS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    scalars, arrays = [], {}
    for name, row in _ROWS.items():
        value = more.get(name, row.default)
        if isinstance(row, Numbers):
            if value is not None:
                arrays[name] = value
        elif value is not row.default:
            value = row.convert(name, value)
            if value != row.default:
                scalars.append((name, value))
    return tuple(scalars), arrays


def positional(**more: Any) -> tuple[Any, ...]:
    """The tail of an operator's arguments."""
    return tuple(more.get(row.name, row.default) for row in ROWS)


def by_name(tail: Sequence[Any]) -> dict[str, Any]:
    """The tail of an operator's arguments, which may have been cut where defaults begin."""
    return dict(zip(NAMES, tail, strict=False))


Function = TypeVar("Function", bound=Callable[..., Any])


def documented(function: Function) -> Function:
    """`function` whose signature shows the rows in place of **more."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    private = [p for p in parameters if p.name.startswith("_")]
    shown = [p for p in parameters if p not in private]
    shown += [
        inspect.Parameter(row.name, inspect.Parameter.KEYWORD_ONLY, default=row.default)
        for row in ROWS
    ]
    function.__signature__ = signature.replace(parameters=shown + private)  # type: ignore[attr-defined]
    return function
