"""Inputs for the tests, and the comparison of a call with the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import strobe

import oracle

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """Standard normal values, rounded to dtype."""
    return rng.standard_normal(shape, np.float32).astype(dtype)


def poisoned(shape: tuple[int, ...], dtype: Any) -> Array:
    """An output that shows what was not written."""
    return np.full(shape, np.nan, dtype)


@dataclass
class Case:
    """Shapes and options of a problem; `options` are those of strobe.attention."""

    batch: int = 2
    seqlen_q: int = 37
    seqlen_k: int = 53
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int = 32
    dtype: str = "float32"
    alibi: int = 0  # number of dimensions of the slopes
    with_dlse: bool = False
    cu_q: list[int] | None = None
    cu_k: list[int] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, rng: np.random.Generator) -> Inputs:
        """Random inputs."""
        dtype = DTYPES[self.dtype]
        if self.cu_q is None:
            rows_q: tuple[int, ...] = (self.batch, self.seqlen_q)
            rows_k: tuple[int, ...] = (self.batch, self.seqlen_k)
            lse_shape: tuple[int, ...] = (self.batch, self.heads, self.seqlen_q)
        else:
            assert self.cu_k is not None
            rows_q, rows_k = (self.cu_q[-1],), (self.cu_k[-1],)
            lse_shape = (self.heads, self.cu_q[-1])
        options = dict(self.options)
        if self.alibi:
            shape = (self.heads,) if self.alibi == 1 else (self.batch, self.heads)
            options["alibi_slopes"] = rng.uniform(0.01, 0.3, shape).astype(np.float32)
        if self.cu_q is not None:
            options["cu_seqlens_q"] = np.array(self.cu_q, np.int32)
            options["cu_seqlens_k"] = np.array(self.cu_k, np.int32)
        return Inputs(
            q=normal(rng, (*rows_q, self.heads, self.head_dim), dtype),
            k=normal(rng, (*rows_k, self.heads_kv, self.head_dim), dtype),
            v=normal(rng, (*rows_k, self.heads_kv, self.head_dim_v), dtype),
            dout=normal(rng, (*rows_q, self.heads, self.head_dim_v), dtype),
            dlse=normal(rng, lse_shape) if self.with_dlse else None,
            options=options,
        )


@dataclass
class Inputs:
    """Tensors of a call. `options` are keyword arguments of both strobe.attention and its
    derivative.
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None
    options: dict[str, Any]

    # What the oracle takes of them.
    PLAIN = (
        "causal",
        "window",
        "scale",
        "softcap",
        "dropout_p",
        "alibi_slopes",
        "bias",
        "attention_chunk",
        "window_signed",
        "sinks",
        "sinks_outside_lse",
    )
    PER_SEQUENCE = (
        *("cu_seqlens_q", "cu_seqlens_k"),
        *("seqused_q", "seqused_k", "q_position", "prefix"),
    )

    def poison_unused(self) -> None:
        """NaN in the rows that are not in use: they are never read."""
        for side, tensors in (("q", (self.q, self.dout)), ("k", (self.k, self.v))):
            used, cu = self.options.get(f"seqused_{side}"), self.options.get(f"cu_seqlens_{side}")
            if used is None:
                continue
            for b, count in enumerate(used):
                for x in tensors:
                    entry = x[b] if cu is None else x[cu[b] : cu[b + 1]]
                    entry[count:] = np.nan
                if side == "q" and self.dlse is not None:
                    dlse = self.dlse[b] if cu is None else self.dlse[:, cu[b] : cu[b + 1]]
                    dlse[:, count:] = np.nan

    def reference(
        self, round_to: Any = None, backward: bool = True, noise_seed: int = 0
    ) -> oracle.Result:
        """What the oracle, or with a dtype the comparator, makes of these inputs."""
        options = {
            name: value
            for name, value in self.options.items()
            if name in (*self.PLAIN, *self.PER_SEQUENCE)
        }
        gradients: dict[str, Any] = {"dout": self.dout, "dlse": self.dlse} if backward else {}
        if self.options.get("dropout_p", 0) > 0:
            cu_q: Array | None = self.options.get("cu_seqlens_q")
            cu_k: Array | None = self.options.get("cu_seqlens_k")
            if cu_q is None or cu_k is None:
                shape = (self.q.shape[0], self.q.shape[1], self.k.shape[1])
            else:
                shape = (len(cu_q) - 1, int(np.diff(cu_q).max()), int(np.diff(cu_k).max()))
            options["keep"] = oracle.dropout_mask(
                shape[0],
                self.q.shape[-2],
                *shape[1:],
                dropout_p=self.options["dropout_p"],
                seed=self.options.get("dropout_seed", 0),
                offset=self.options.get("dropout_offset", 0),
            )
        options |= {"round_to": round_to, "noise_seed": noise_seed}
        return oracle.attention(self.q, self.k, self.v, **gradients, **options)

    def draws(self, backward: bool = True) -> oracle.Draws:
        """The comparator's results."""
        return oracle.Draws(lambda n: self.reference(self.q.dtype, backward, n))

    def check_forward(self, out: Array, lse: Array) -> None:
        wanted = self.reference(backward=False)
        oracle.check("out", out, wanted.out, self.draws(backward=False), oracle.OUT_FACTOR)
        oracle.check_lse("lse", lse, wanted.lse, wanted.size)

    def check_backward(
        self,
        dq: Array,
        dk: Array,
        dv: Array,
        dsinks: Array | None = None,
        dbias: Array | None = None,
    ) -> None:
        wanted = self.reference()
        plain = self.draws()
        alibi = "alibi_slopes" in self.options
        factor = oracle.ALIBI_GRADIENT_FACTOR if alibi else oracle.GRADIENT_FACTOR
        given = {"dq": dq, "dk": dk, "dv": dv} | ({} if dbias is None else {"dbias": dbias})
        for name, got in given.items():
            oracle.check(name, got, getattr(wanted, name), plain, factor)
        if dsinks is not None:
            assert wanted.dsinks is not None
            oracle.check("dsinks", dsinks, wanted.dsinks, plain, oracle.SINK_GRADIENT_FACTOR)

    def check(self, threads: int = 0) -> None:
        """Runs forward and backward into poisoned memory and compares both with the oracle."""
        out = poisoned(self.dout.shape, self.q.dtype)
        result, lse = strobe.attention(
            self.q, self.k, self.v, out=out, return_lse=True, threads=threads, **self.options
        )
        assert result is out
        self.check_forward(out, lse)
        sinks = self.options.get("sinks")
        like = (self.q, self.k, self.v, *([] if sinks is None else [sinks]))
        grads = tuple(poisoned(x.shape, x.dtype) for x in like)
        bias = self.options.get("bias")
        dbias = None if bias is None else poisoned(bias.shape, np.float32)
        given = strobe.attention_backward(
            self.dout,
            self.q,
            self.k,
            self.v,
            out,
            lse,
            dlse=self.dlse,
            grads=grads,
            return_dsinks=sinks is not None,
            threads=threads,
            dbias=dbias,
            **self.options,
        )
        wanted = grads if dbias is None else (*grads, dbias)
        assert all(a is b for a, b in zip(given, wanted, strict=True))
        dsinks = grads[3] if len(grads) > 3 else None
        self.check_backward(grads[0], grads[1], grads[2], dsinks=dsinks, dbias=dbias)


def arrays(**changes: Any) -> dict[str, Any]:
    """Arguments of a call that is right, with changes. q (2, 6, 4, 8), k and v (2, 10, 2, 8)."""
    given: dict[str, Any] = {
        "q": np.ones((2, 6, 4, 8), np.float32),
        "k": np.ones((2, 10, 2, 8), np.float32),
        "v": np.ones((2, 10, 2, 8), np.float32),
    }
    given.update(changes)
    return given


def packed(**changes: Any) -> dict[str, Any]:
    """The same with varlen: two sequences."""
    given: dict[str, Any] = {
        "q": np.ones((6, 4, 8), np.float32),
        "k": np.ones((10, 2, 8), np.float32),
        "v": np.ones((10, 2, 8), np.float32),
        "cu_seqlens_q": np.array([0, 2, 6], np.int32),
        "cu_seqlens_k": np.array([0, 7, 10], np.int32),
    }
    given.update(changes)
    return given
