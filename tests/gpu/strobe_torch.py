"""The C ABI on torch tensors, and float64 attention to hold it against: shared by the GPU tests and the
bench. Nothing of the reference comes from the library, but for the dropout mask where `keep` is given it."""

from __future__ import annotations

import ctypes
import math
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "python")]

import capi as lib

# Keys at the begin of every sequence that no query sees: 1 for a library built with STROBE_BREAK_KERNEL=MASK_MEMBER.
HIDDEN_KEYS = int(os.environ.get("STROBE_TEST_HIDDEN_KEYS", "0"))
NO_LIMIT = 2**63 - 1  # STROBE_NO_LIMIT
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class RandomBlocks(ctypes.Structure):
    """core/random_blocks.h's: blocks of pairs that are hidden, of a library built with STROBE_RANDOM_WALKS."""

    _fields_ = [("seed", ctypes.c_uint64), ("queries", ctypes.c_int64), ("keys", ctypes.c_int64), ("by_head", ctypes.c_int64)]

    def install(self) -> None:
        """For the launches that follow."""
        ctypes.memmove(ctypes.addressof(RandomBlocks.in_dll(lib.LIBRARY, "strobe_random_blocks")), ctypes.addressof(self), ctypes.sizeof(self))

    def hides_block(self, sequence: int, head: int, query_block: int, key_block: int) -> bool:
        word = 2**64 - 1
        x = int(self.seed)
        for number in (sequence, head if self.by_head else 0, query_block, key_block):
            x = ((x ^ number) * 0x9E3779B97F4A7C15) & word
            x ^= x >> 29
        x = (x * 0xBF58476D1CE4E5B9) & word
        return self.seed != 0 and (x >> 60) < (4, 8, 12, 15)[self.seed & 3]

    def hides(self, sequence: int, heads: int, nq: int, nk: int, device: torch.device) -> torch.Tensor:
        """bool [heads, nq, nk]: whether a query of a sequence's head does not see a key."""
        blocks_q, blocks_k = -(-nq // self.queries), -(-nk // self.keys)
        found = [
            [[self.hides_block(sequence, head, q, k) for k in range(blocks_k)] for q in range(blocks_q)] for head in range(heads)
        ]
        blocks = torch.tensor(found, dtype=torch.bool, device=device).reshape(heads, blocks_q, blocks_k)
        return blocks.repeat_interleave(self.queries, 1)[:, :nq].repeat_interleave(self.keys, 2)[..., :nk]


@dataclass
class Case:
    """A problem, as strobe_problem has it."""

    batch: int = 1
    seqlen_q: int = 1
    seqlen_k: int = 1
    heads: int = 1
    heads_kv: int = 0
    head_dim: int = 64
    head_dim_v: int = 0
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    window_signed: bool = False  # negative numbers are limits, and NO_LIMIT is none
    scale: float = math.nan
    softcap: float = 0.0
    dropout_p: float = 0.0
    alibi: int = 0
    has_dlse: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    dtype: torch.dtype = torch.float16 if os.environ.get("STROBE_CUDA_ARCH") == "75" else torch.bfloat16  # 7.5 has no bf16
    lengths_q: list[int] = field(default_factory=list)  # varlen when not empty
    lengths_k: list[int] = field(default_factory=list)
    past: tuple[int, int] = (0, 0)  # varlen: rows of queries and of keys past the end of the last sequence
    random_blocks: RandomBlocks | None = None

    def __post_init__(self) -> None:
        self.heads_kv = self.heads_kv or self.heads
        self.head_dim_v = self.head_dim_v or self.head_dim
        if self.lengths_q:
            self.batch = len(self.lengths_q)
            self.seqlen_q, self.seqlen_k = max(self.lengths_q), max(self.lengths_k)

    @property
    def varlen(self) -> bool:
        return bool(self.lengths_q)

    @property
    def totals(self) -> tuple[int, int]:
        """Rows of queries and of keys, varlen."""
        return sum(self.lengths_q) + self.past[0], sum(self.lengths_k) + self.past[1]

    @property
    def real_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if math.isnan(self.scale) else self.scale

    def shape(self, of: str) -> tuple[int, ...]:
        """Of q, k, v, out or their gradients."""
        name = of.removeprefix("d") if of != "dout" else "out"
        heads = self.heads if name in ("q", "out") else self.heads_kv
        dim = self.head_dim if name in ("q", "k") else self.head_dim_v
        queries = name in ("q", "out")
        if self.varlen:
            return (self.totals[0 if queries else 1], heads, dim)
        return (self.batch, self.seqlen_q if queries else self.seqlen_k, heads, dim)

    def lse_shape(self) -> tuple[int, ...]:
        if self.varlen:
            return (self.heads, self.totals[0])
        return (self.batch, self.heads, self.seqlen_q)


def problem_of(case: Case, backward: bool, device_index: int = 0, **tensors: torch.Tensor) -> Any:
    p = lib.new_problem()
    p.direction = int(backward)
    p.dtype = DTYPES[case.dtype]
    host = bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors.values())
    p.device, p.device_index = (lib.CPU, 0) if host else (lib.CUDA, device_index)
    p.batch, p.seqlen_q, p.seqlen_k = case.batch, case.seqlen_q, case.seqlen_k
    p.heads, p.heads_kv = case.heads, case.heads_kv
    p.head_dim, p.head_dim_v = case.head_dim, case.head_dim_v
    p.varlen, p.causal = int(case.varlen), int(case.causal)
    if case.varlen:
        p.total_q, p.total_k = case.totals
    p.window_left, p.window_right = case.window
    p.window_signed = int(case.window_signed)
    p.scale, p.softcap, p.dropout_p, p.alibi = case.scale, case.softcap, case.dropout_p, case.alibi
    p.has_dlse, p.deterministic = int(case.has_dlse and backward), int(case.deterministic)
    p.batch_invariant = int(case.batch_invariant)
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        s = getattr(p, name)
        strides = tensor.stride()
        if len(strides) == 4:
            s.batch = strides[0]
        s.seqlen, s.head, s.dim = strides[-3:]
        if tensor.shape[-1] == 1:
            s.dim = 1
    return p


def offsets(lengths: list[int], device: torch.device | str = "cuda") -> torch.Tensor:
    cu = [0]
    for n in lengths:
        cu.append(cu[-1] + n)
    return torch.tensor(cu, dtype=torch.int32, device=device)


def pointer(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Workspace:
    """Of a plan: aligned, poisoned (whatever it holds must not matter), between red zones."""

    ZONE = 4096

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.storage = torch.full((size + 64 + 2 * self.ZONE,), 0xFF, dtype=torch.uint8, device=device)
        self.address = (self.storage.data_ptr() + self.ZONE + 63) // 64 * 64
        self.begin = self.address - self.storage.data_ptr()

    def touched_outside(self) -> bool:
        before, after = self.storage[: self.begin], self.storage[self.begin + self.size :]
        return not bool((before == 0xFF).all() and (after == 0xFF).all())


def stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class Forward:
    """A plan and packed arguments: `run()` is one launch."""

    def __init__(
        self,
        case: Case,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        self.plan = lib.make_plan(problem_of(case, False, q=q, k=k, v=v, out=out))
        self.kernel = lib.text(self.plan.kernel)
        # The plan's device, which a misplaced tensor of a test does not change.
        device = next((t.device for t in (q, k, v, out) if t.device.type != "cpu"), q.device)
        cu_q = offsets(case.lengths_q, device) if case.varlen else None
        cu_k = offsets(case.lengths_k, device) if case.varlen else None
        self.workspace = Workspace(int(self.plan.workspace_bytes), device)
        self.keep = (q, k, v, out, lse, alibi_slopes, cu_q, cu_k)
        self.args = lib.pack_forward(
            lib.FORWARD_ARGS_SIZE, pointer(q), pointer(k), pointer(v), pointer(out), pointer(lse),
            pointer(cu_q), pointer(cu_k), pointer(alibi_slopes), seed, offset,
            self.workspace.address, self.workspace.size, stream_of(device),
        )  # fmt: skip
        self.address = ctypes.addressof(self.plan)

    def run(self) -> None:
        status = lib.forward(self.address, self.args)
        if status:
            lib.check(status)


class Backward:
    def __init__(
        self,
        case: Case,
        tensors: dict[str, torch.Tensor],  # q k v out dout dq dk dv
        lse: torch.Tensor,
        dlse: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        self.plan = lib.make_plan(problem_of(case, True, **tensors))
        self.kernel = lib.text(self.plan.kernel)
        device = tensors["q"].device
        cu_q = offsets(case.lengths_q, device) if case.varlen else None
        cu_k = offsets(case.lengths_k, device) if case.varlen else None
        self.workspace = Workspace(int(self.plan.workspace_bytes), device)
        self.keep = (tensors, lse, dlse, alibi_slopes, cu_q, cu_k)
        p = {name: pointer(tensor) for name, tensor in tensors.items()}
        self.args = lib.pack_backward(
            lib.BACKWARD_ARGS_SIZE, p["q"], p["k"], p["v"], p["out"], pointer(lse), p["dout"],
            pointer(dlse), p["dq"], p["dk"], p["dv"], pointer(cu_q), pointer(cu_k),
            pointer(alibi_slopes), seed, offset, self.workspace.address, self.workspace.size,
            stream_of(device),
        )  # fmt: skip
        self.address = ctypes.addressof(self.plan)

    def run(self) -> None:
        status = lib.backward(self.address, self.args)
        if status:
            lib.check(status)


def host_dropout_mask(case: Case, seed: int, offset: int) -> torch.Tensor:
    """[batch, heads, seqlen_q, seqlen_k] of the CPU library."""
    mask = torch.empty(case.batch, case.heads, case.seqlen_q, case.seqlen_k, dtype=torch.uint8)
    lib.check(
        lib.LIBRARY.strobe_dropout_mask(
            case.batch, case.heads, case.seqlen_q, case.seqlen_k, case.dropout_p, seed, offset,
            mask.data_ptr(),
        )
    )  # fmt: skip
    return mask.bool()


@dataclass(frozen=True)
class Rule:
    """What scores are and which keys a query sees, of one sequence."""

    scale: float
    softcap: float = 0.0
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    window_signed: bool = False
    chunk: int = 0
    prefix: int = 0
    q_position: int | None = None  # of the first query; None: the last query stands at the last key
    random_blocks: RandomBlocks | None = None
    sequence: int = 0  # its number, which random_blocks ask for; and how many query heads it has
    heads: int = 1

    @staticmethod
    def of(case: Case, sequence: int = 0, **more: Any) -> Rule:
        of_case = (case.real_scale, case.softcap, case.causal, case.window, case.window_signed)
        return Rule(*of_case, random_blocks=case.random_blocks, sequence=sequence, heads=case.heads, **more)

    def positions(self, nq: int, nk: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Of queries [nq, 1] and keys [1, nk]."""
        offset = nk - nq if self.q_position is None else self.q_position
        return torch.arange(nq, device=device)[:, None] + offset, torch.arange(nk, device=device)[None, :]

    def seen(self, nq: int, nk: int, device: torch.device) -> torch.Tensor:
        """bool [nq, nk]; with random blocks [heads, nq, nk]"""
        i, j = self.positions(nq, nk, device)
        see = in_window(i, j, self.window, self.window_signed)
        if self.causal:
            see &= j <= i
        if self.chunk:
            see &= i.div(self.chunk, rounding_mode="floor") == j.div(self.chunk, rounding_mode="floor")
        see = (see | (j < self.prefix)) & (j >= HIDDEN_KEYS)
        return see if self.random_blocks is None else see & ~self.random_blocks.hides(self.sequence, self.heads, nq, nk, device)


def scores(
    rule: Rule, q: torch.Tensor, k: torch.Tensor, slopes: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores [heads, q, k] without a mask, d(score) / d(scaled q . k), and which keys a row sees: all of one shape."""
    s = torch.einsum("qhd,khd->hqk", q, k) * rule.scale
    slope = torch.ones_like(s)
    if rule.softcap > 0:
        t = torch.tanh(s / rule.softcap)
        s, slope = rule.softcap * t, 1 - t * t
    if slopes is not None:
        i, j = rule.positions(q.shape[0], k.shape[0], q.device)
        s = s - slopes.to(s.dtype)[:, None, None] * (i - j).abs().to(s.dtype)
    return s, slope, rule.seen(q.shape[0], k.shape[0], q.device).expand_as(s)


def in_window(i: torch.Tensor, j: torch.Tensor, window: tuple[int, int], signed: bool) -> torch.Tensor:
    """Which keys, at positions j, the window of queries at positions i lets them see."""
    left, right = window
    seen = torch.ones(torch.broadcast_shapes(i.shape, j.shape), dtype=torch.bool, device=i.device)
    if left != NO_LIMIT and (signed or left >= 0):
        seen &= j >= i - left
    if right != NO_LIMIT and (signed or right >= 0):
        seen &= j <= i + right
    return seen


def draw_signed_window(r: random.Random, causal: bool) -> tuple[int, int]:
    """Limits of which one at least is negative, or none on a side, that leave some key to some query."""
    right = r.choice((NO_LIMIT, -1, -3, -40, r.randint(-100, 60)))
    reach = min(right, 0) if causal else right
    if right == NO_LIMIT and not causal:
        return r.choice((-1, -5, r.randint(-60, -1))), NO_LIMIT
    return r.choice((NO_LIMIT, -reach, -reach + 1, -reach + r.randint(0, 150))), right


def softmax(s: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and lse by the definition: a row that sees a score of +inf, or only -inf, gives NaN; one
    that sees nothing has weights of 0 and lse -inf."""
    some = seen.any(-1)
    s = s.masked_fill(~seen, -math.inf)
    if s.shape[-1] == 0:
        return s, s.new_full(s.shape[:-1], -math.inf)
    most = s.amax(-1)
    most = torch.where(some, most, 0)
    e = torch.where(seen, torch.exp(s - most[..., None]), 0)
    total = e.sum(-1)
    p = torch.where(seen, e / total[..., None], 0)
    return p, torch.where(some, most + torch.log(total), -math.inf)


def answers(rule: Rule, q: torch.Tensor, k: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the oracle does: in float64, where it takes a fraction of a second. It is one thread of the CPU: for thousands
    of queries and keys it would take minutes, and PyTorch's float64 on the GPU answers. Nor does it know of hidden keys and
    blocks."""
    products = q.shape[0] * q.shape[1] * k.shape[0] * q.shape[2]
    return dtype == torch.float64 and products <= 1 << 22 and HIDDEN_KEYS == 0 and rule.random_blocks is None


def ask_oracle(
    rule: Rule, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None,
    keep: torch.Tensor | None, dropout_p: float, dout: torch.Tensor | None = None, dlse: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Of one sequence, q [seqlen_q, heads, head_dim]; keep [heads, seqlen_q, seqlen_k], dlse [heads, seqlen_q]."""
    import oracle  # here: the bench, which needs none of this, does without its library

    host = lambda t: None if t is None else t.double().cpu().numpy()
    problem = oracle.masked(rule.causal, rule.window, rule.chunk, rule.window_signed)
    sequence = oracle.sequences_of([q.shape[0]], [k.shape[0]], None, None, rule.q_position, rule.prefix)
    return oracle.attend(
        host(q), host(k), host(v), sequence, problem, scale=rule.scale, softcap=rule.softcap,
        alibi_slopes=host(slopes), dropout_p=dropout_p if keep is not None else 0.0,
        keep=None if keep is None else keep.cpu().numpy()[None], dout=host(dout),
        dlse=None if dlse is None else host(dlse).T,
    )  # fmt: skip


def attend(
    rule: Rule,
    q: torch.Tensor,  # [seqlen_q, heads, head_dim] of one sequence
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None = None,  # [heads]
    keep: torch.Tensor | None = None,  # [heads, seqlen_q, seqlen_k]
    dropout_p: float = 0.0,
    dtype: torch.dtype = torch.float64,
    stored_weights: tuple[torch.dtype, torch.Generator] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [seqlen_q, heads, head_dim_v] and lse [heads, seqlen_q], in plain tensor operations of `dtype`.

    With dtype float64 this is the reference, of which the oracle gives the small ones, with the case's own dtype the
    comparator. A key that a row does not see contributes nothing, whatever K and V hold there. With `stored_weights` the
    weights are `with_rounded_weights`.
    """
    if stored_weights is None and answers(rule, q, k, dtype):
        found = ask_oracle(rule, q, k, v, slopes, keep, dropout_p)
        return torch.from_numpy(found.out).to(q.device), torch.from_numpy(found.lse.T.copy()).to(q.device)
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    s, _slope, seen = scores(rule, q, k, slopes)
    some = seen.any(-1)
    p, lse = softmax(s, seen)
    if stored_weights is not None:
        p = with_rounded_weights(p, *stored_weights)
    if keep is not None:
        p = p * keep.to(dtype) / (1 - dropout_p)
    finite = torch.isfinite(v)
    if bool(finite.all()):
        out = torch.einsum("hqk,khd->qhd", p, v)
    else:
        out = torch.einsum("hqk,khd->qhd", p, torch.where(finite, v, 0))
        for key in (~finite).any(-1).any(-1).nonzero().flatten().tolist():
            bad = torch.where(finite[key], 0, v[key])  # [heads, dim]
            terms = torch.where(finite[key][None], 0, p[..., key].T[..., None] * bad[None])
            out += torch.where(seen[..., key].T[..., None], terms, 0)
    out[~some.T] = 0
    return out, lse


def reference(
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    stored_weights: torch.Generator | None = None,
    sequence: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` of one sequence of a case."""
    stored = None if stored_weights is None else (case.dtype, stored_weights)
    return attend(Rule.of(case, sequence), q, k, v, slopes, keep, case.dropout_p, dtype, stored)


def reference_backward(
    case: Case,
    q: torch.Tensor,  # [seqlen_q, heads, head_dim] of one sequence
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,  # [heads, seqlen_q]
    slopes: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    stored: tuple[torch.Tensor, torch.Tensor] | None = None,  # out and lse of the sequence
    rounding: torch.Generator | None = None,
    sequence: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv by the definition, in plain tensor operations of `dtype`, of finite tensors.

    With `stored`, from what the interface carries from forward to backward: the weights from lse, a float32, and the
    mean of their gradient as dout . out with out rounded, against gradients of the weights with the errors of float32
    sums. With `rounding`, what is multiplied as the case's dtype, weights and dS, is rounded to it, up or down.
    """
    rule = Rule.of(case, sequence)
    if stored is None and rounding is None and answers(rule, q, k, dtype):
        found = ask_oracle(rule, q, k, v, slopes, keep, case.dropout_p, dout, dlse)
        dq, dk, dv = (torch.from_numpy(x).to(q.device) for x in (found.dq, found.dk, found.dv))
        return dq, dk, dv
    group = case.heads // case.heads_kv
    q, dout = q.to(dtype), dout.to(dtype)
    k, v = (t.to(dtype).repeat_interleave(group, dim=1) for t in (k, v))
    s, slope, seen = scores(rule, q, k, slopes)
    p, _lse = softmax(s, seen)
    dp = torch.einsum("qhd,khd->hqk", dout, v)
    if stored is not None:
        p = torch.where(seen, torch.exp(s - stored[1].to(dtype)[..., None]), 0)
        dp = dp + tensor_core_noise(dout, v)
    dropped = p
    if keep is not None:
        factor = keep.to(dtype) / (1 - case.dropout_p)
        dp, dropped = dp * factor, p * factor
    delta = (p * dp).sum(-1)
    if stored is not None:
        delta = (dout * stored[0].to(dtype)).sum(-1).T
    if dlse is not None:
        delta = delta - dlse.to(dtype)
    ds = p * (dp - delta[..., None]) * slope * case.real_scale
    if rounding is not None:
        ds, dropped = (rounded_at_random(t, case.dtype, rounding).to(dtype) for t in (ds, dropped))
    dq = torch.einsum("hqk,khd->qhd", ds, k)

    def of_group(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(t.shape[0], case.heads_kv, group, t.shape[-1]).sum(2)

    dk = of_group(torch.einsum("hqk,qhd->khd", ds, q))
    return dq, dk, of_group(torch.einsum("hqk,qhd->khd", dropped, dout))


def by_sequence(case: Case) -> list[tuple[slice, slice]]:
    """Rows of each sequence of a varlen case."""
    places, at_q, at_k = [], 0, 0
    for nq, nk in zip(case.lengths_q, case.lengths_k, strict=True):
        places.append((slice(at_q, at_q + nq), slice(at_k, at_k + nk)))
        at_q, at_k = at_q + nq, at_k + nk
    return places


def full_reference(
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    stored_weights: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference` of all sequences: out and lse in the library's shapes."""
    outs, lses = [], []
    for b in range(case.batch):
        rows_q, rows_k = by_sequence(case)[b] if case.varlen else (slice(None), slice(None))
        at = (lambda t, rows: t[rows]) if case.varlen else (lambda t, rows, b=b: t[b])
        sequence_keep = None
        nq, nk = at(q, rows_q).shape[0], at(k, rows_k).shape[0]
        if keep is not None:
            sequence_keep = keep[b, :, :nq, :nk].to(q.device)
        out, lse = reference(
            case, at(q, rows_q), at(k, rows_k), at(v, rows_k),
            None if slopes is None else slopes if slopes.dim() == 1 else slopes[b],
            sequence_keep, dtype, stored_weights, b,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
    if case.varlen:
        past = case.past[0]
        outs.append(outs[0].new_zeros(past, *outs[0].shape[1:]))
        lses.append(lses[0].new_full((case.heads, past), -math.inf))
        return torch.cat(outs), torch.cat(lses, dim=-1)
    return torch.stack(outs), torch.stack(lses)


def full_reference_backward(
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    stored: tuple[torch.Tensor, torch.Tensor] | None = None,
    rounding: torch.Generator | None = None,
) -> list[torch.Tensor]:
    """`reference_backward` of all sequences: dq, dk, dv in the library's shapes."""
    grads: list[list[torch.Tensor]] = [[], [], []]
    for b in range(case.batch):
        rows_q, rows_k = by_sequence(case)[b] if case.varlen else (slice(None), slice(None))
        at = (lambda t, rows: t[rows]) if case.varlen else (lambda t, rows, b=b: t[b])
        nq, nk = at(q, rows_q).shape[0], at(k, rows_k).shape[0]
        found = reference_backward(
            case, at(q, rows_q), at(k, rows_k), at(v, rows_k), at(dout, rows_q),
            None if dlse is None else dlse[:, rows_q] if case.varlen else dlse[b],
            None if slopes is None else slopes if slopes.dim() == 1 else slopes[b],
            None if keep is None else keep[b, :, :nq, :nk].to(q.device), dtype,
            None if stored is None else (at(stored[0], rows_q), stored[1][:, rows_q] if case.varlen else stored[1][b]),
            rounding, b,
        )  # fmt: skip
        for all_of_it, one in zip(grads, found, strict=True):
            all_of_it.append(one)
    if case.varlen:
        for all_of_it, past in zip(grads, (case.past[0], case.past[1], case.past[1]), strict=True):
            all_of_it.append(all_of_it[0].new_zeros(past, *all_of_it[0].shape[1:]))
    return [torch.cat(g) if case.varlen else torch.stack(g) for g in grads]


def tensor_core_noise(dout: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What dout . v in float32 may be off by: tensor cores cut, and do not round, each sum of 16 products. One unit of
    the last place of the length of both rows for each root of the number of such sums, as in a random walk."""
    lengths = torch.einsum("qh,kh->hqk", dout.norm(dim=-1), v.norm(dim=-1))
    steps = math.sqrt(max(1, math.ceil(v.shape[-1] / 16)))
    return (torch.rand_like(lengths) * 2 - 1) * lengths * (2.0**-23 * steps)


def with_rounded_weights(p: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Each weight off by a random part of what rounding it to `dtype` may cost, wherever the weights' scale is."""
    spacing = torch.finfo(dtype).eps / 2
    return p * (1 + spacing * (2 * torch.rand(p.shape, generator=generator, device=p.device, dtype=p.dtype) - 1))


def rounded_at_random(x: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Each value moved to one of its two neighbours in `dtype`, or to itself where it is one of them."""
    near = x.to(dtype)
    other = torch.where(near.double() < x, math.inf, -math.inf).to(dtype)
    coin = torch.rand(x.shape, generator=generator, device=x.device) < 0.5
    exact = (near.double() == x) | ~torch.isfinite(x)
    return torch.where(coin & ~exact, torch.nextafter(near, other), near)
