"""The backward pass with what tells sequences apart: lengths in use, positions, prefixes; and chunks.

    python tests/gpu/sequences_backward.py [--count N] [--first N] [--dims 64,128]

Random problems of sequences.py, gradients against float64; every other one deterministic, and then run twice.
Some gradients are float32, some are added to what dq, dk and dv hold, some problems are given delta in place of out.
Rows that are not in use hold NaN, and outputs lie between red zones. The reference's own out and lse go in, so that
no forward kernel takes part.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import random
from dataclasses import dataclass

import sequences as sq
import strobe_torch as st
import torch
from device import narrowed
from strobe_torch import lib

Tensors = dict[str, torch.Tensor]
DRAWS = 4


def forward(
    scale: float, see: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Weights, out and lse, heads first; rows that see no key have weights 0 and lse -inf."""
    s = torch.where(see, scale * (q @ k.transpose(-1, -2)), -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.where(see, torch.exp(s - torch.where(lse == -math.inf, 0, lse)[..., None]), 0)
    return p, p @ v, lse


def gradients(
    scale: float, p: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    dout: torch.Tensor, dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dq, dk, dv by the formulas; P, dP - delta and dS rounded to dtype on the way, dP off by what tensor cores cut."""
    near = lambda t: t.to(dtype).to(t.dtype)
    dp = dout @ v.transpose(-1, -2)
    if dtype != torch.float64:
        dp = dp + st.tensor_core_noise(dout.transpose(0, 1), v.transpose(0, 1))
    ds = near(near(p) * near(dp - (dout * out).sum(-1, keepdim=True)))
    return scale * (ds @ k), scale * (ds.transpose(-1, -2) @ q), near(p).transpose(-1, -2) @ dout


@dataclass
class Gradients:
    """What the caller wants of dq, dk and dv, and hands over."""

    float32: bool
    accumulate: bool
    delta: bool

    @staticmethod
    def draw(seed: int) -> Gradients:
        r = random.Random(seed ^ 0xDE17A)
        return Gradients(*(r.random() < 0.3 for _ in range(3)))


def run(case: st.Case, s: sq.Sequences, wanted: Gradients, seed: int) -> str:
    g = torch.Generator(device=sq.DEV).manual_seed(seed)
    draw = lambda n: torch.randn(case.shape(n), generator=g, device=sq.DEV).to(case.dtype)
    x: Tensors = {n: draw(n) for n in ("q", "k", "v", "dout")}
    x["out"] = torch.full(case.shape("out"), math.nan, dtype=case.dtype, device=sq.DEV)
    lse = torch.full(case.lse_shape(), math.nan, device=sq.DEV)
    lengths = {"q": case.lengths_q or [case.seqlen_q] * case.batch, "k": case.lengths_k or [case.seqlen_k] * case.batch}
    used = {"q": s.used_q or lengths["q"], "k": s.used_k or lengths["k"]}
    side = {"q": "q", "out": "q", "dout": "q", "dq": "q", "k": "k", "v": "k", "dk": "k", "dv": "k"}
    group = case.heads // case.heads_kv

    def rows(name: str, b: int, t: torch.Tensor) -> torch.Tensor:
        n = lengths[side[name]]
        return t[sum(n[:b]) : sum(n[: b + 1])] if case.varlen else t[b]

    def heads_first(name: str, b: int, t: torch.Tensor) -> torch.Tensor:
        t = rows(name, b, t)[: used[side[name]][b]].double().transpose(0, 1)
        return t.repeat_interleave(group, 0) if side[name] == "k" else t

    want: list[Tensors] = []
    comparator: list[list[Tensors]] = []  # of each sequence: may be exact by luck, so it is drawn several times
    for b in range(case.batch):
        for name in ("q", "k", "v", "dout"):
            rows(name, b, x[name])[used[side[name]][b] :] = math.nan
        nq = used["q"][b]
        q, k, v, dout = (heads_first(n, b, x[n]) for n in ("q", "k", "v", "dout"))
        p, out, natural = forward(case.real_scale, sq.rule(case, s, b).seen(nq, used["k"][b], q.device), q, k, v)
        rows("out", b, x["out"])[:nq] = out.transpose(0, 1).to(case.dtype)
        first = sum(lengths["q"][:b])
        (lse[:, first : first + nq] if case.varlen else lse[b, :, :nq]).copy_(natural)
        draws: list[Tensors] = []
        for o, dtype in ((out, torch.float64), *[(heads_first("out", b, x["out"]), case.dtype)] * DRAWS):
            dq, dk, dv = gradients(case.real_scale, p, q, k, v, o, dout, dtype)
            of_group = [t.view(case.heads_kv, group, *t.shape[1:]).sum(1) for t in (dk, dv)]
            draws.append({n: t.transpose(0, 1) for n, t in zip(("dq", "dk", "dv"), (dq, *of_group), strict=True)})
        plain = [rows(n, b, x[n])[: used[side[n]][b]] for n in ("q", "k", "v", "dout")]
        rule = sq.rule(case, s, b)
        if st.answers(rule, plain[0], plain[1], torch.float64):
            found = st.ask_oracle(rule, *plain[:3], None, None, 0.0, plain[3])
            draws[0] = {n: torch.from_numpy(getattr(found, n)).to(sq.DEV) for n in ("dq", "dk", "dv")}
        want.append(draws[0])
        comparator.append(draws[1:])

    dtype = torch.float32 if wanted.float32 else case.dtype
    zones = {n: sq.guarded(case.shape(n), dtype) for n in ("dq", "dk", "dv")}
    grads = {n: t for n, (_, t) in zones.items()}
    before = {n: draw(n).to(dtype) if wanted.accumulate else torch.zeros_like(t) for n, t in grads.items()}
    delta = torch.full(case.lse_shape(), math.nan, device=sq.DEV)
    if wanted.delta:
        products = (x["dout"].float() * x["out"].float()).sum(-1)
        delta.copy_(products.transpose(-1, -2))  # NaN where rows are not in use
    p_ = st.problem_of(case, True, **x, **grads)
    p_.attention_chunk = s.chunk
    p_.grad_dtype = st.DTYPES[dtype]
    p_.accumulate, p_.has_delta = int(wanted.accumulate), int(wanted.delta)
    arrays = {"seqused_q": s.used_q, "seqused_k": s.used_k, "q_position": s.q_position, "prefix": s.prefix}
    kept = {n: torch.tensor(a, dtype=torch.int32, device=sq.DEV) for n, a in arrays.items() if a}
    for n in kept:
        setattr(p_, f"has_{n}", 1)
    plan = lib.make_plan(p_)
    workspace = st.Workspace(int(plan.workspace_bytes), x["q"].device)
    args = lib.BackwardArgs()
    args.struct_size = ctypes.sizeof(args)
    for n, t in (*x.items(), *grads.items(), ("lse", lse), *kept.items()):
        setattr(args, n, st.pointer(t))
    if wanted.delta:
        args.out, args.delta = None, st.pointer(delta)
    cu_q, cu_k = (st.offsets(n, x["q"].device) if case.varlen else None for n in (case.lengths_q, case.lengths_k))
    args.cu_seqlens_q, args.cu_seqlens_k = st.pointer(cu_q), st.pointer(cu_k)
    args.workspace, args.workspace_bytes = workspace.address, workspace.size
    args.stream = st.stream_of(x["q"].device)
    bits: Tensors = {}
    for again in range(2 if case.deterministic else 1):
        for n, t in grads.items():
            if wanted.accumulate:
                t.copy_(before[n])
        lib.check(lib.backward(ctypes.addressof(plan), bytes(args)))
        for n, t in grads.items():
            assert again == 0 or bool((t == bits[n]).all()), f"{n}: other bits the second time"
            bits[n] = t.clone()
    for b in range(case.batch):
        for n, t in grads.items():
            got, was, in_use = rows(n, b, t), rows(n, b, before[n]), used[side[n]][b]
            assert bool((got[in_use:] == was[in_use:]).all()), f"{n} of sequence {b}: rows that are not in use were changed, or are not 0"
            drawn = [(c[n].to(dtype) + was[:in_use]).to(dtype) for c in comparator[b]]
            sq.check_close(f"{n} of sequence {b}", got[:in_use], want[b][n] + was[:in_use].double(), drawn, 3)
    for storage, _ in zones.values():
        assert bool((storage[: sq.ZONE] == sq.POISON).all() and (storage[-sq.ZONE :] == sq.POISON).all()), "a red zone was written"
    assert not workspace.touched_outside(), "the workspace's red zone was written"
    return lib.text(plan.kernel)


def main() -> None:
    parser = argparse.ArgumentParser(description="Backward with lengths in use, positions, prefixes and chunks.")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--dims", default="64,40,96,128,80,192,256")
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: the CPU library")
    options = parser.parse_args()
    dims = [narrowed(int(d)) for d in options.dims.split(",")]
    dtypes = [getattr(torch, d) for d in options.dtypes.split(",")]
    kernels: dict[str, int] = {}
    failed = 0
    for seed in range(options.first, options.first + options.count):
        case, s = sq.draw(seed, dims, dtypes)
        case.alibi, case.softcap, case.deterministic = 0, 0.0, seed % 2 == 1
        try:
            wanted = Gradients.draw(seed)
            kernel = run(case, s, wanted, seed)
        except (AssertionError, lib.Error) as e:
            failed += 1
            if failed <= 5:
                print(f"seed {seed}: {e}\n  {case}\n  {s}\n  {wanted}")
            continue
        kernels[kernel] = kernels.get(kernel, 0) + 1
    print("gpu sequences, backward:", ", ".join(f"{n} by {k}" for k, n in sorted(kernels.items())), f"; {failed} failed")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
