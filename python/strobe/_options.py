"""The options of a call, in one table: names, defaults and what becomes of a value.

From the rows follow the arguments of `attention`, `attention_backward`, `attention_with_kvcache`,
`plan` and `why`, and the tails of the operators' schemas (`_operators`). The extension converts
most of them itself and asks here for the rest; tests/python/test_options.py compares the rows with
src/core/options.def.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict, TypeVar

from ._values import flag, integer, real, seed, window


class SharedOptions(TypedDict, total=False):
    """The rows below, for type checkers: those of every call."""

    causal: bool
    window: tuple[int | None, int | None]
    scale: float | None
    softcap: float
    alibi_slopes: Any
    cu_seqlens_q: Any
    max_seqlen_q: int | None
    batch_invariant: bool
    threads: int
    attention_chunk: int
    seqused_q: Any
    seqused_k: Any
    q_position: Any
    prefix: Any
    window_signed: bool


class CallOptions(SharedOptions, total=False):
    """And those of a call without a cache."""

    dropout_p: float
    dropout_seed: int
    dropout_offset: int
    cu_seqlens_k: Any
    max_seqlen_k: int | None


class CacheOptions(SharedOptions, total=False):
    """And those of `attention_with_kvcache`."""

    block_table: Any
    cache_batch_idx: Any
    leftpad: Any
    k_new: Any
    v_new: Any
    cu_seqlens_k_new: Any
    rotary_cos: Any
    rotary_sin: Any
    rotary_position: Any
    rotary_interleaved: bool


@dataclass(frozen=True)
class Option:
    """convert: None where the value is an array, in `operator_type` "Tensor?". operator_type: in
    the schemas of operators, of those that most calls do without.
    """

    name: str
    default: Any
    convert: Callable[[str, Any], Any] | None = None
    operator_type: str = ""

    @property
    def schema(self) -> str:
        return f"{self.operator_type} {self.name}={self.default}"


ROWS: Final[tuple[Option, ...]] = (
    Option("causal", False, flag),
    Option("window", (-1, -1), window),
    Option("scale", None, real),
    Option("softcap", 0.0, real),
    Option("alibi_slopes", None),
    Option("dropout_p", 0.0, real),
    Option("dropout_seed", 0, seed),
    Option("dropout_offset", 0, seed),
    Option("cu_seqlens_q", None),
    Option("cu_seqlens_k", None),
    Option("max_seqlen_q", None, integer),
    Option("max_seqlen_k", None, integer),
    Option("batch_invariant", False, flag),
    Option("threads", 0, lambda name, value: integer(name, value, 32)),
    # In the order of strobe_problem's fields, by whose names they are called:
    Option("attention_chunk", 0, integer, "SymInt"),
    Option("seqused_q", None, None, "Tensor?"),
    Option("seqused_k", None, None, "Tensor?"),
    Option("q_position", None, None, "Tensor?"),
    Option("prefix", None, None, "Tensor?"),
    Option("window_signed", False, flag, "bool"),
)
# Those that an operator takes at its end, and of them one number for each sequence: has_<name> in
# strobe_problem, <name> in the arguments of a launch.
TAIL: Final = tuple(row for row in ROWS if row.operator_type)
ARRAYS: Final = tuple(row.name for row in TAIL if row.convert is None)
_CACHE_ARRAYS: Final = [
    name
    for name in CacheOptions.__annotations__
    if name not in SharedOptions.__annotations__ and name != "rotary_interleaved"
]
CACHE_ROWS: Final = (
    *(row for row in ROWS if row.name in SharedOptions.__annotations__),
    *(Option(name, None) for name in _CACHE_ARRAYS),
    Option("rotary_interleaved", False, flag),
)
_BY_NAME: Final = {row.name: row for row in ROWS}
_BY_NAME_WITH_CACHE: Final = {row.name: row for row in CACHE_ROWS}


def row_of(function: str, name: str) -> Option:
    """The row of a keyword argument of `function`."""
    rows = _BY_NAME_WITH_CACHE if function == "attention_with_kvcache" else _BY_NAME
    if name not in rows:
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return rows[name]


def scalar(function: str, name: str, value: Any) -> Any:
    """A plain value as strobe_problem has it, of a field that the extension does not know."""
    convert = row_of(function, name).convert
    return value if convert is None else convert(name, value)


def positional(**more: Any) -> tuple[Any, ...]:
    """The tail of an operator's arguments."""
    return tuple(more.get(row.name, row.default) for row in TAIL)


def by_name(tail: tuple[Any, ...]) -> dict[str, Any]:
    """The tail of an operator's arguments, which may have been cut where defaults begin."""
    return {row.name: value for row, value in zip(TAIL, tail, strict=False)}


Function = TypeVar("Function", bound=Callable[..., Any])
_HINTS: Final = CallOptions.__annotations__ | CacheOptions.__annotations__


def documented(function: Function, rows: Sequence[Option] = ROWS) -> Function:
    """`function` whose signature shows the rows in place of **options."""
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    for row in rows:
        hint = _HINTS[row.name].__forward_arg__
        shown.append(inspect.Parameter(row.name, keyword, default=row.default, annotation=hint))
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def documented_with_cache(function: Function) -> Function:
    """Likewise, of a call with a cache."""
    return documented(function, CACHE_ROWS)
