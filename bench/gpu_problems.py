"""The problems of gpu_features.py's sections."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

TOKENS, HIDDEN = 16384, 2048


class Problem(NamedTuple):
    label: str
    head_dim: int = 128
    seqlen: int = 8192
    causal: bool = True
    heads: int = 16
    heads_kv: int = 16
    window: int = -1  # keys to the left
    lengths: tuple[int, ...] = ()  # varlen
    dtype: str = "bf16"
    deterministic: bool = False
    batch_invariant: bool = False
    softcap: float = 0.0
    alibi: bool = False
    batch: int = 0  # 0: as many as make TOKENS
    dim_v: int = 0  # 0: head_dim
    dropout_p: float = 0.0

    @property
    def sequences(self) -> int:
        """Of one length."""
        return self.batch or max(1, TOKENS // self.seqlen)

    @property
    def pairs(self) -> float:
        """Query-key pairs of one head that are computed."""
        total = 0.0
        for n in self.lengths or (self.seqlen,) * self.sequences:
            if self.window >= 0:
                w = min(self.window, n)
                total += w * (w + 1) / 2 + (n - w) * (w + 1)
            else:
                total += n * n * (0.5 if self.causal else 1.0)
        return total

    @property
    def head_dim_v(self) -> int:
        return self.dim_v or self.head_dim

    @property
    def flop(self) -> float:
        """Of the forward pass: Q K^T and P V."""
        return 2.0 * self.pairs * (self.head_dim + self.head_dim_v) * self.heads

    @property
    def backward_flop(self) -> float:
        """Q K^T again, dQ, dK; dP and dV. With one head dimension 2.5 times the forward pass's."""
        return 2.0 * self.pairs * (3 * self.head_dim + 2 * self.head_dim_v) * self.heads


def tensors(p: Problem) -> dict[str, Any]:
    import torch

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[p.dtype]
    torch.manual_seed(1)
    rows = (sum(p.lengths),) if p.lengths else (p.sequences, p.seqlen)
    shapes = {
        "q": (p.heads, p.head_dim), "k": (p.heads_kv, p.head_dim),
        "v": (p.heads_kv, p.head_dim_v), "dout": (p.heads, p.head_dim_v),
    }  # fmt: skip
    made = {name: torch.randn(*rows, *shape, device="cuda", dtype=kind) for name, shape in shapes.items()}
    if p.lengths:
        ends = torch.tensor((0, *p.lengths)).cumsum(0)
        made["cu"] = ends.to("cuda", torch.int32)
    if p.alibi:
        made["slopes"] = 2.0 ** -torch.linspace(1, 8, p.heads, device="cuda")
    return made


def packed_lengths() -> tuple[int, ...]:
    """Log-uniform from 64 to 8k, as documents packed for training are."""
    r = random.Random(7)
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(min(int(64 * 128 ** r.random()), 8192))
    return tuple(lengths)


def problems(section: str) -> list[Problem]:
    if section == "fp16":
        return [Problem(f"fp16 {d} causal", d, heads=HIDDEN // d, heads_kv=HIDDEN // d, dtype="fp16") for d in (64, 128, 256)]
    if section == "gqa":
        quarter = [Problem(f"GQA 4:1 {d}", d, heads=HIDDEN // d, heads_kv=HIDDEN // d // 4) for d in (64, 128)]
        return [*quarter, Problem("GQA 8:1 128", heads=64, heads_kv=8)]
    if section == "window":
        return [Problem(f"window 1024 {d}", d, heads=HIDDEN // d, heads_kv=HIDDEN // d, window=1023) for d in (64, 128)]
    if section == "odd":
        return [Problem(f"head_dim {d}", d, seqlen=4096) for d in (40, 72, 80, 96, 112, 160, 192)]
    if section == "mixed":  # as DeepSeek's models have them
        return [Problem(f"head_dim 192, head_dim_v 128, {n}", 192, seqlen=n, dim_v=128) for n in (2048, 8192)]
    if section == "scores":
        plain = Problem("plain")
        return [
            plain._replace(label="softcap", softcap=30.0),
            plain._replace(label="ALiBi", alibi=True),
            plain._replace(label="dropout 0.1", dropout_p=0.1),
        ]
    if section == "deterministic":
        return [Problem(f"deterministic {d}", d, heads=HIDDEN // d, heads_kv=HIDDEN // d, deterministic=True) for d in (64, 128, 192, 256)]
    if section == "batch_invariant":
        # Where the flag may choose another row or order: many tiles, few, and a group that is split.
        shapes = [Problem(f"{d}", d, heads=HIDDEN // d, heads_kv=HIDDEN // d) for d in (64, 128, 256)]
        shapes += [Problem("64, 1k", 64, seqlen=1024, heads=32, heads_kv=32)]
        shapes += [Problem("128, one short sequence", seqlen=512, batch=1)]
        shapes += [Problem("128, GQA 8:1, one sequence", seqlen=2048, batch=1, heads=32, heads_kv=4)]
        shapes += [Problem("128, packed", lengths=packed_lengths())]
        return [p._replace(label=f"batch invariant {p.label}", batch_invariant=True) for p in shapes]
    if section == "paths":
        plain = Problem("plain")
        return [
            plain,
            plain._replace(label="fp16", dtype="fp16"),
            plain._replace(label="GQA 4:1", heads_kv=4),
            plain._replace(label="packed", lengths=packed_lengths()),
            plain._replace(label="window 1024", window=1023),
            plain._replace(label="softcap", softcap=30.0),
            plain._replace(label="ALiBi", alibi=True),
            *(Problem(f"head_dim {d}", d, seqlen=4096) for d in (40, 64, 72, 80, 96, 112, 160, 192, 256)),
            *(Problem(f"softcap {d}", d, heads=HIDDEN // d, heads_kv=HIDDEN // d, softcap=30.0) for d in (64, 256)),
            *(Problem(f"ALiBi {d}", d, heads=HIDDEN // d, heads_kv=HIDDEN // d, alibi=True) for d in (64, 256)),
        ]
    if section == "varlen":
        lengths = packed_lengths()
        return [Problem(f"varlen {len(lengths)} sequences {d}", d, lengths=lengths, heads=HIDDEN // d, heads_kv=HIDDEN // d) for d in (64, 128)]
    raise ValueError(section)


def variants_of(p: Problem) -> dict[str, Problem]:
    """Of a problem: the same without what its section is about, timed in the same rounds."""
    if p.dtype == "fp16":
        return {"bf16": p._replace(dtype="bf16")}
    if p.deterministic or p.batch_invariant:
        return {"without": p._replace(deterministic=False, batch_invariant=False)}
    if p.softcap or p.alibi or p.dropout_p:
        return {"without": p._replace(softcap=0.0, alibi=False, dropout_p=0.0)}
    return {}
