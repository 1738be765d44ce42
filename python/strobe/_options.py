"""The options of a call: what the table of the extension (python/core/call_options.def) means here.

From its rows follow the arguments of `attention`, `attention_backward`, `attention_with_kvcache`,
`plan` and `why`, what becomes of a value, and the tails of the operators' schemas (`_operators`).
tests/python/test_options.py compares the rows with src/core/options.def.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypedDict, TypeVar

from ._arrays import AnyArray, ArraySpec, SupportsMask
from ._core import OPTIONS
from ._values import NO_LIMIT, flag, integer, real, seed, window

# The rows below, for type checkers. First those that are no arrays: of every call, of those without
# a cache, of those with one.


class _SharedScalars(TypedDict, total=False):
    causal: bool
    window: tuple[int | None, int | None]
    scale: float | None
    softcap: float
    max_seqlen_q: int | None
    batch_invariant: bool
    threads: int
    attention_chunk: int
    window_signed: bool
    sinks_outside_lse: bool
    mask_layout: int


class _CallScalars(_SharedScalars, total=False):
    dropout_p: float
    dropout_seed: int
    dropout_offset: int
    dropout_first_query: int
    dropout_first_key: int
    dropout_first_head: int
    dropout_heads: int
    max_seqlen_k: int | None


class _SharedArrays(TypedDict, total=False):
    alibi_slopes: AnyArray | None
    bias: AnyArray | None
    cu_seqlens_q: AnyArray | None
    seqused_q: AnyArray | None
    seqused_k: AnyArray | None
    q_position: AnyArray | None
    prefix: AnyArray | None
    sinks: AnyArray | None
    mask: SupportsMask | AnyArray | None
    q_scale: AnyArray | None
    k_scale: AnyArray | None
    v_scale: AnyArray | None


class CallOptions(_CallScalars, _SharedArrays, total=False):
    """Of a call without a cache."""

    cu_seqlens_k: AnyArray | None


class DescribedOptions(_CallScalars, total=False):
    """Likewise, of a call that is not made (`plan`, `why`), whose arrays may be described."""

    alibi_slopes: AnyArray | ArraySpec | None
    bias: AnyArray | ArraySpec | None
    cu_seqlens_q: AnyArray | ArraySpec | None
    cu_seqlens_k: AnyArray | ArraySpec | None
    seqused_q: AnyArray | ArraySpec | None
    seqused_k: AnyArray | ArraySpec | None
    q_position: AnyArray | ArraySpec | None
    prefix: AnyArray | ArraySpec | None
    sinks: AnyArray | ArraySpec | None
    mask: SupportsMask | AnyArray | ArraySpec | None
    q_scale: AnyArray | ArraySpec | None
    k_scale: AnyArray | ArraySpec | None
    v_scale: AnyArray | ArraySpec | None


class CacheOptions(_SharedScalars, _SharedArrays, total=False):
    """Of `attention_with_kvcache`."""

    block_table: AnyArray | None
    cache_batch_idx: AnyArray | None
    leftpad: AnyArray | None
    k_new: AnyArray | None
    v_new: AnyArray | None
    cu_seqlens_k_new: AnyArray | None
    rotary_cos: AnyArray | None
    rotary_sin: AnyArray | None
    rotary_position: AnyArray | None
    rotary_interleaved: bool


class Kind(NamedTuple):
    """What becomes of a value: convert is None where it is an array. operator_type: in the schemas
    of operators.
    """

    default: Any
    convert: Callable[[str, Any], Any] | None
    operator_type: str


# By the names that the extension has for them (python/core/options.h).
KINDS: Final = {
    "array": Kind(None, None, "Tensor?"),
    "flag": Kind(False, flag, "bool"),
    "integer": Kind(0, integer, "SymInt"),
    "integer of 32 bits": Kind(0, lambda name, value: integer(name, value, 32), "SymInt"),
    "integer or None": Kind(None, integer, "SymInt?"),
    "real": Kind(0.0, real, "float"),
    "real or None": Kind(None, real, "float?"),
    "seed": Kind(0, seed, "SymInt"),
    "window": Kind((-1, -1), window, "SymInt"),  # of each side
}


class Option(NamedTuple):
    """A row of the table."""

    name: str
    kind: Kind

    @property
    def default(self) -> Any:
        return self.kind.default

    @property
    def convert(self) -> Callable[[str, Any], Any] | None:
        return self.kind.convert

    @property
    def schema(self) -> str:
        return f"{self.kind.operator_type} {self.name}={self.default}"


# Of calls without a cache; of calls with one; those that an operator takes at its end; and of these
# one number for each sequence: has_<name> in strobe_problem, <name> in the arguments of a launch.
# A bias is an array of another kind.
ROWS: Final = tuple(Option(row[0], KINDS[row[1]]) for row in OPTIONS if row[3])
CACHE_ROWS: Final = tuple(Option(row[0], KINDS[row[1]]) for row in OPTIONS if row[2])
TAIL: Final = tuple(Option(row[0], KINDS[row[1]]) for row in OPTIONS if row[4])
# Those of one number for each sequence.
ARRAYS: Final = tuple(
    row.name
    for row in TAIL
    if row.convert is None and row.name not in {"sinks", "mask", "bias"}
)
# The places of sinks and bias in the tail.
SINKS, BIAS = map([row.name for row in TAIL].index, ("sinks", "bias"))
_BY_NAME: Final = {row.name: row for row in ROWS}
_BY_NAME_WITH_CACHE: Final = {row.name: row for row in CACHE_ROWS}


# What the interfaces that docs/start.md compares call an argument, and its name here.
_SYNONYMS: Final = {
    "window_size": "window",
    "local_window_size": "window",
    "sliding_window": "window",
    "window_left": "window",
    "window_right": "window",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "is_causal": "causal",
    "attn_mask": "bias",
    "attn_bias": "bias",
    "position_bias": "bias",
    "dropout": "dropout_p",
    "logits_soft_cap": "softcap",
    "cache_seqlens": "seqused_k",
    "query_seq_lengths": "seqused_q",
    "key_value_seq_lengths": "seqused_k",
    "cache_leftpad": "leftpad",
    "page_table": "block_table",
    "rotary_seqlens": "rotary_position",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse",
    "return_residual": "return_lse",
    "learnable_sink": "sinks",
    "s_aux": "sinks",
    "q_descale": "q_scale",
    "k_descale": "k_scale",
    "v_descale": "v_scale",
}
# The arguments of each function whose options are documented by this table.
_PARAMETERS: Final[dict[str, tuple[str, ...]]] = {}


def row_of(function: str, name: str) -> Option:
    """The row of a keyword argument of `function`."""
    rows = _BY_NAME_WITH_CACHE if function == "attention_with_kvcache" else _BY_NAME
    if name not in rows:
        raise TypeError(
            f"{function}() got an unexpected keyword argument {name!r}{_meant(function, name)}"
        )
    return rows[name]


def _meant(function: str, name: str) -> str:
    """What an unexpected keyword argument of `function` may stand for: the name that it has here,
    the function that has it, or the name that it resembles. "" where nothing is known.
    """
    known = _PARAMETERS[function]
    here = _SYNONYMS.get(name, name)
    if name == "attn_mask" and here in known:
        return ": a mask of numbers is 'bias' here, one of bools mask=strobe.masks.from_bool(keep)"
    if here in known:
        return f": it is called {here!r} here"
    for other in ("attention", "attention_backward", "attention_with_kvcache"):
        if here in _PARAMETERS[other]:
            called = f", as {here!r}" if here != name else ""
            return f": strobe.{other} has it{called}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f". Did you mean {near[0]!r}?" if near else ""


def converted(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Plain values as the planner takes them. names: what the caller calls options, where that is
    not their name in the table.
    """
    found = {}
    for name, value in given.items():
        convert = _BY_NAME[name].convert
        assert convert is not None  # no array
        found[name] = convert(names.get(name, name), value)
    return found


def fields_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Converted values, a window among them, as the fields of strobe_problem that they are."""
    fields = dict(values)
    limits = fields.pop("window")
    if None in limits:  # where None says that there is no limit, -1 says something else
        fields["window_signed"] = True
        limits = tuple(NO_LIMIT if x is None else x for x in limits)
    fields["window_left"], fields["window_right"] = limits
    if fields.get("scale") is None:
        fields.pop("scale", None)
    return fields


def positional(**more: Any) -> tuple[Any, ...]:
    """The tail of an operator's arguments."""
    return tuple(more.get(row.name, row.default) for row in TAIL)


Function = TypeVar("Function", bound=Callable[..., Any])


def documented(
    function: Function, rows: Sequence[Option] = ROWS, hints: type = CallOptions
) -> Function:
    """`function` whose signature shows the rows in place of **options. hints: their types."""
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    for row in rows:
        hint = hints.__annotations__[row.name].__forward_arg__
        shown.append(inspect.Parameter(row.name, keyword, default=row.default, annotation=hint))
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    _PARAMETERS[function.__name__] = tuple(p.name for p in shown)
    return function


def documented_with_cache(function: Function) -> Function:
    """Likewise, of a call with a cache."""
    return documented(function, CACHE_ROWS, CacheOptions)


def documented_for_description(function: Function) -> Function:
    """Likewise, of a call that is not made."""
    return documented(function, ROWS, DescribedOptions)
