"""The float64 oracle of oracle/, which the C++ tests and `strobe check` have too, for arrays of
NumPy; and the rule by which results are judged.

It is called through its C interface (oracle/c_api.h), and has nothing of Strobe's own library. With
a dtype to round to it is the comparator: attention as plain tensor operations would do it, each
operation's result rounded to that dtype. A result passes when its largest error against float64 is
at most `factor` times the comparator's, plus 1e-5 (docs/semantics.md).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

OUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
ALIBI_GRADIENT_FACTOR = 8.0
SINK_GRADIENT_FACTOR = 8.0

ROOT = Path(__file__).resolve().parents[2]
NO_LIMIT = 2**63 - 1
NO_POSITION = -(2**63)
ARITHMETIC = {None: -1, "float32": 0, "bfloat16": 1, "float16": 2}
SEQUENCE = ("q_begin", "q_length", "k_begin", "k_length", "q_position", "prefix")
CACHED_SEQUENCE = ("leftpad", "used", "added", "new_begin", "rotary_start", "rows_begin")


def library() -> ctypes.CDLL:
    """The newest libstrobe_oracle.so that CMake built; STROBE_ORACLE names another one."""
    named = os.environ.get("STROBE_ORACLE")
    found = [Path(named)] if named else list(ROOT.glob("build/*/libstrobe_oracle.so"))
    if not found:
        raise FileNotFoundError(
            f"no build/*/libstrobe_oracle.so in {ROOT}: run scripts/build.sh cpu -- "
            "strobe_oracle_shared, or set STROBE_ORACLE to one"
        )
    return ctypes.CDLL(str(max(found, key=lambda path: path.stat().st_mtime)))


def members(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Problem(ctypes.Structure):
    """oracle_problem."""

    _fields_ = [
        *members(ctypes.c_int64, "struct_size sequence_count"),
        *members(ctypes.c_void_p, "sequences"),
        *members(ctypes.c_int64, "heads heads_kv head_dim head_dim_v rows_q rows_k"),
        *members(ctypes.c_int64, "causal window_left window_right window_signed attention_chunk"),
        *members(ctypes.c_double, "scale softcap dropout_p"),
        *members(ctypes.c_void_p, "slopes keep"),
        *members(ctypes.c_int64, "keep_rows keep_columns"),
        *members(ctypes.c_void_p, "q k v dout dlse"),
        *members(ctypes.c_int64, "arithmetic"),
        *members(ctypes.c_uint64, "noise_seed"),
        *members(ctypes.c_void_p, "out lse size dq dk dv sinks"),
        *members(ctypes.c_int64, "sinks_outside_lse"),
        *members(ctypes.c_void_p, "dsinks bias dbias"),
        *members(ctypes.c_int64, "bias_rows bias_queries bias_heads bias_keys"),
    ]


class CacheStruct(ctypes.Structure):
    """oracle_cache."""

    _fields_ = [
        *members(ctypes.c_int64, "struct_size"),
        *members(ctypes.c_void_p, "sequences rows"),
        *members(ctypes.c_int64, "cache_rows new_rows positions pairs interleaved"),
        *members(ctypes.c_void_p, "k v k_new v_new cosines sines"),
    ]


LIBRARY = library()


def pointer(x: Array | None) -> int | None:
    return None if x is None else x.ctypes.data


def doubles(x: Any) -> Array:
    return np.ascontiguousarray(np.asarray(x), np.float64)


def numbers(x: Any) -> Array:
    return np.ascontiguousarray(x, np.int64)


def call(name: str, problem: Problem, *more: Any) -> None:
    problem.struct_size = ctypes.sizeof(problem)
    if getattr(LIBRARY, name)(ctypes.byref(problem), *more) != 0:
        raise RuntimeError(
            f"{name}: the library is of other sources than {__file__}: build it again"
        )


@dataclass
class Result:
    """What attention and its derivative give; gradients are None if dout was not given.

    size: for each row of lse, the largest sum of absolute terms of a score: what its rounding
        errors scale with. Neither lse nor size is the comparator's.
    """

    out: Array
    lse: Array
    size: Array
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    dsinks: Array | None = None
    dbias: Array | None = None


def sequences_of(
    lengths_q: Any,
    lengths_k: Any,
    seqused_q: Any = None,
    seqused_k: Any = None,
    q_position: Any = None,
    prefix: Any = None,
) -> Array:
    """int64 (sequences, 6), the members of oracle_sequence, of rows that lie end to end."""
    lengths = numbers(np.stack([lengths_q, lengths_k], 1))
    begins = np.cumsum(lengths, 0) - lengths
    table = np.zeros((len(lengths), len(SEQUENCE)), np.int64)
    table[:, 0], table[:, 2] = begins[:, 0], begins[:, 1]
    table[:, 1] = lengths[:, 0] if seqused_q is None else seqused_q
    table[:, 3] = lengths[:, 1] if seqused_k is None else seqused_k
    table[:, 4] = NO_POSITION if q_position is None else q_position
    table[:, 5] = 0 if prefix is None else prefix
    return table


def masked(
    causal: bool = False,
    window: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int = 0,
    window_signed: bool = False,
) -> Problem:
    """A problem with a mask, as strobe.attention's arguments say it."""
    left, right = (NO_LIMIT if limit is None else int(limit) for limit in window)
    return Problem(
        causal=causal,
        window_left=left,
        window_right=right,
        window_signed=window_signed or None in window,
        attention_chunk=int(attention_chunk),
    )


def visible(
    seqlen_q: int, seqlen_k: int, offset: int | None = None, prefix: int = 0, **mask: Any
) -> Array:
    """bool (seqlen_q, seqlen_k): which keys each query sees. offset: where query 0 stands."""
    problem = masked(**mask)
    table = sequences_of([seqlen_q], [seqlen_k], None, None, offset, prefix)
    problem.sequence_count, problem.sequences = 1, pointer(table)
    problem.heads = problem.heads_kv = problem.head_dim = problem.head_dim_v = 1
    seen = np.zeros((seqlen_q, seqlen_k), bool)
    call("oracle_visible", problem, ctypes.c_int64(0), ctypes.c_void_p(pointer(seen)))
    return seen


def dropout_mask(*shape: int, dropout_p: float, seed: int = 0, offset: int = 0) -> Array:
    """bool (batch, heads, seqlen_q, seqlen_k): which weights dropout keeps."""
    keep = np.zeros(shape, bool)
    LIBRARY.oracle_dropout_mask(
        *map(ctypes.c_int64, shape),
        ctypes.c_float(dropout_p),
        ctypes.c_uint64(seed),
        ctypes.c_uint64(offset),
        ctypes.c_void_p(pointer(keep)),
    )
    return keep


def attend(
    q: Array,
    k: Array,
    v: Array,
    sequences: Array,
    problem: Problem,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    sinks_outside_lse: bool = False,
    bias: Array | None = None,
    dropout_p: float = 0.0,
    keep: Array | None = None,
    dout: Array | None = None,
    dlse: Array | None = None,
    round_to: Any = None,
    noise_seed: int = 0,
) -> Result:
    """Of packed rows (rows, heads, dim), with lse (rows, heads). bias: as strobe.attention's."""
    heads, heads_kv = q.shape[1], k.shape[1]
    p, kept = problem, {name: doubles(x) for name, x in (("q", q), ("k", k), ("v", v))}
    p.sequence_count, p.sequences = len(sequences), pointer(sequences)
    p.heads, p.heads_kv, p.head_dim, p.head_dim_v = heads, heads_kv, q.shape[-1], v.shape[-1]
    p.rows_q, p.rows_k = len(q), len(k)
    p.scale = q.shape[-1] ** -0.5 if scale is None else scale
    p.softcap, p.dropout_p = softcap, dropout_p
    if alibi_slopes is not None:
        kept["slopes"] = doubles(np.broadcast_to(alibi_slopes, (len(sequences), heads)))
    p.sinks_outside_lse = sinks_outside_lse
    if sinks is not None:
        kept["sinks"] = doubles(sinks)
    if bias is not None:
        entries, p.bias_heads, p.bias_queries, p.bias_keys = bias.shape
        p.bias_rows = entries * p.bias_queries
        kept["bias"] = doubles(np.swapaxes(bias, 1, 2))
    if dropout_p > 0:
        assert keep is not None
        kept["keep"] = np.ascontiguousarray(keep, np.uint8)
        p.keep_rows, p.keep_columns = keep.shape[2:]
    p.noise_seed = noise_seed
    p.arithmetic = ARITHMETIC[None if round_to is None else np.dtype(round_to).name]
    shapes = {"out": (len(q), heads, v.shape[-1]), "lse": q.shape[:2], "size": q.shape[:2]}
    if dout is not None:
        kept["dout"] = doubles(dout)
        if dlse is not None:
            kept["dlse"] = doubles(dlse)
        shapes |= {"dq": q.shape, "dk": k.shape, "dv": v.shape, "dsinks": (heads,)}
        if bias is not None:
            shapes["dbias"] = kept["bias"].shape
    found = {name: np.zeros(shape) for name, shape in shapes.items()}
    for name, x in (kept | found).items():
        setattr(p, name, pointer(x))
    call("oracle_attention", p)
    if "dbias" in found:
        found["dbias"] = np.swapaxes(found["dbias"], 1, 2)
    return Result(**found)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    q_position: Array | None = None,
    prefix: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int = 0,
    window_signed: bool = False,
    dlse: Array | None = None,
    **options: Any,
) -> Result:
    """Forward, and backward if dout is given. Layouts and options as in strobe.attention.

    keep: bool (batch, heads, seqlen_q, seqlen_k), with dropout_p. round_to: the comparator's dtype;
    noise_seed: other rounding errors of it than the true ones (oracle/comparator.h).
    """
    problem = masked(causal, window, attention_chunk, window_signed)
    rows_q, rows_k = q.shape[:-2], k.shape[:-2]
    packed = cu_seqlens_q is not None
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        lengths = np.diff(cu_seqlens_q), np.diff(cu_seqlens_k)
    else:
        lengths = np.full(*rows_q), np.full(*rows_k)
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        if options.get("dout") is not None:
            options["dout"] = options["dout"].reshape(len(q), *options["dout"].shape[2:])
    if dlse is not None:  # to (rows, heads)
        dlse = dlse.T if packed else np.swapaxes(dlse, 1, 2).reshape(-1, q.shape[1])
    table = sequences_of(*lengths, seqused_q, seqused_k, q_position, prefix)
    result = attend(q, k, v, table, problem, dlse=dlse, **options)
    for name in ("lse", "size"):
        x = getattr(result, name)
        setattr(result, name, x.T if packed else x.reshape(*rows_q, *x.shape[1:]).swapaxes(1, 2))
    for name, rows in (("out", rows_q), ("dq", rows_q), ("dk", rows_k), ("dv", rows_k)):
        x = getattr(result, name)
        setattr(result, name, None if x is None else x.reshape(*rows, *x.shape[1:]))
    return result


@dataclass
class CachedSequence:
    """leftpad: rows to skip; used: rows before the append, those counted; added: new keys, from row
    new_begin of k_new on; rows: where in the cache its used + added rows are.
    """

    leftpad: int
    used: int
    added: int
    new_begin: int
    rotary_start: int
    rows: Array


@dataclass
class Cache:
    """k, v (rows, heads_kv, dim): of all entries or pages. cosines, sines (positions, pairs)."""

    sequences: Sequence[CachedSequence]
    k: Array
    v: Array
    k_new: Array | None = None
    v_new: Array | None = None
    cosines: Array | None = None
    sines: Array | None = None
    interleaved: bool = False
    kept: list[Array] = field(default_factory=list)  # what the struct points to

    def struct(self, problem: Problem) -> CacheStruct:
        """As C has it; the problem gets the cache's extents."""
        rows = [numbers(s.rows) for s in self.sequences]
        assert [len(x) for x in rows] == [s.used + s.added for s in self.sequences]
        table = numbers(
            [
                (s.leftpad, s.used, s.added, s.new_begin, s.rotary_start, sum(map(len, rows[:b])))
                for b, s in enumerate(self.sequences)
            ]
        )
        c = CacheStruct(cache_rows=len(self.k), interleaved=self.interleaved)
        c.struct_size = ctypes.sizeof(c)
        self.kept = [table, np.concatenate(rows)]
        c.sequences, c.rows = map(pointer, self.kept)
        if self.k_new is not None:
            c.new_rows = len(self.k_new)
        if self.cosines is not None:
            c.positions, c.pairs = self.cosines.shape
        for name in ("k", "v", "k_new", "v_new", "cosines", "sines"):
            if getattr(self, name) is not None:
                self.kept.append(doubles(getattr(self, name)))
                setattr(c, name, pointer(self.kept[-1]))
        problem.sequence_count = len(self.sequences)
        problem.heads_kv, problem.head_dim = self.k.shape[1:]
        problem.head_dim_v = self.v.shape[-1]
        return c

    def appended(self) -> tuple[Array, Array]:
        """k and v of the new rows of all sequences, turned, one sequence after the other."""
        count = sum(s.added for s in self.sequences)
        problem, found = Problem(), [np.zeros((count, *x.shape[1:])) for x in (self.k, self.v)]
        empty = sequences_of(none := [0] * len(self.sequences), none)
        problem.sequences = pointer(empty)
        cache = self.struct(problem)
        call(
            "oracle_append",
            problem,
            ctypes.byref(cache),
            *map(ctypes.c_void_p, map(pointer, found)),
        )
        return found[0], found[1]

    def gathered(
        self, q: Array, sequences: Array, problem: Problem
    ) -> tuple[Array, Array, Array, Array]:
        """q turned, k and v end to end, and the sequences over them. q (rows, heads, head_dim)."""
        count = sum(s.used + s.added - s.leftpad for s in self.sequences)
        found = [np.zeros(q.shape), *(np.zeros((count, *x.shape[1:])) for x in (self.k, self.v))]
        places, given = np.zeros_like(sequences), doubles(q)
        problem.sequences, problem.q, problem.rows_q = pointer(sequences), pointer(given), len(q)
        problem.heads = q.shape[1]
        cache = self.struct(problem)
        pointers = [ctypes.c_void_p(pointer(x)) for x in (places, *found)]
        call("oracle_gather", problem, ctypes.byref(cache), *pointers)
        return found[0], found[1], found[2], places


def merge(outs: Array, lses: Array, sinks: Array | None = None) -> tuple[Array, Array]:
    """outs (parts, batch, seqlen, heads, dim) and lses (parts, batch, heads, seqlen) joined."""
    parts, batch, seqlen, heads, dim = outs.shape
    given = doubles(outs), doubles(np.swapaxes(lses, -1, -2))
    of_heads = None if sinks is None else doubles(sinks)
    out, lse = np.zeros(outs.shape[1:]), np.zeros((batch, seqlen, heads))
    sizes = map(ctypes.c_int64, (parts, batch * seqlen, heads, dim))
    LIBRARY.oracle_merge(
        *sizes, *(ctypes.c_void_p(pointer(x)) for x in (*given, of_heads, out, lse))
    )
    return out, lse.swapaxes(1, 2)


class Draws:
    """Results of the comparator. The first has its true rounding errors, which may be none by luck
    on a small problem, so others are drawn while a result fails.

    draw(noise_seed): a result.
    """

    MOST = 25

    def __init__(self, draw: Callable[[int], Result]) -> None:
        self.draw = draw
        self.found: list[Result] = []

    def named(self, name: str) -> Iterator[Array]:
        """out, dq, dk or dv of one after the other."""
        for n in range(self.MOST):
            if n == len(self.found):
                self.found.append(self.draw(n))
            x: Array = getattr(self.found[n], name)
            yield x


def check(name: str, got: Array, wanted: Array, plain: Array | Draws, factor: float) -> None:
    """The rule of the module's docstring; NaN and infinities must stand in the same places.

    plain: the comparator's result, or draws of it, of which `name` is taken.
    """
    assert got.shape == wanted.shape, f"{name}: shape {got.shape}, expected {wanted.shape}"
    largest = 0.0
    results = plain.named(name) if isinstance(plain, Draws) else iter([plain])
    failure: AssertionError | None = None
    for result in results:
        with np.errstate(invalid="ignore"):
            error = np.abs(result.astype(np.float64) - wanted)
        largest = max(largest, float(error.max(initial=0, where=np.isfinite(error))))
        try:
            return check_within(name, got, wanted, np.full(wanted.shape, factor * largest + 1e-5))
        except AssertionError as found:
            failure = found
    assert failure is not None
    raise failure


def check_lse(name: str, got: Array, wanted: Array, size: Array) -> None:
    """lse is float32 in every dtype; its rounding errors scale with the terms of the scores."""
    check_within(name, got, wanted, 1e-5 + 4e-6 * size)


def check_within(name: str, got: Array, wanted: Array, allowed: Array) -> None:
    assert got.shape == wanted.shape, f"{name}: shape {got.shape}, expected {wanted.shape}"
    result = got.astype(np.float64)
    finite = np.isfinite(wanted)
    with np.errstate(invalid="ignore"):
        same = np.where(np.isnan(wanted), np.isnan(result), result == wanted)
        ratio = np.where(finite, np.abs(result - wanted) / allowed, np.where(same, 0, np.inf))
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    if ratio.size and ratio.max() > 1:
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        raise AssertionError(
            f"{name}{[int(i) for i in at]} = {result[at]:.9g}, expected {wanted[at]:.9g} "
            f"within {allowed[at]:.3g}"
        )
