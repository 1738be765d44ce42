"""Scores, values and bounds at the ends of their range on the GPU, against float64: run_gpu_tests.py --only extremes.

Where float32 scores are so large that rounding decides which of two keys has the weight, inputs are such that one key
has it by far: its row's result is then that key's, whatever was rounded.
"""

from __future__ import annotations

import math
import time
from typing import Any

import strobe_torch as st
import torch
from device import HALVES, widths
from strobe_torch import Backward, Case, Forward

INT32_MAX = 2**31 - 1


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Run:
    """Forward and backward of a case; results as attributes."""

    def __init__(self, case: Case, x: dict[str, torch.Tensor], dout: torch.Tensor | None = None, seed: int = 3) -> None:
        device = x["q"].device
        self.out = torch.full(case.shape("out"), 7.0, dtype=case.dtype, device=device)
        self.lse = torch.full(case.lse_shape(), 7.0, device=device)
        self.forward = Forward(case, **x, out=self.out, lse=self.lse, seed=seed, offset=5)
        self.forward.run()
        if dout is None:
            return
        self.dq, self.dk, self.dv = (torch.full(case.shape(n), 7.0, dtype=case.dtype, device=device) for n in "qkv")
        tensors = {**x, "out": self.out, "dout": dout, "dq": self.dq, "dk": self.dk, "dv": self.dv}
        self.backward = Backward(case, tensors, self.lse, seed=seed, offset=5)
        self.backward.run()


def draw(case: Case, device: str, seed: int, q: float = 1.0, k: float = 1.0) -> dict[str, torch.Tensor]:
    g = torch.Generator(device=device).manual_seed(seed)
    size = {"q": q, "k": k, "v": 1.0, "dout": 1.0}
    return {
        n: (torch.randn(case.shape(n if n != "dout" else "out"), generator=g, device=device) * s).to(case.dtype)
        for n, s in size.items()
    }


class Faults(list[str]):
    def expect(self, what: str, error: float | torch.Tensor, limit: float) -> None:
        if not float(error) <= limit:  # NaN is a fault
            self.append(f"{what}: {float(error):.3g}, allowed {limit:.3g}")


def off(x: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return (x.double() - reference).abs().max()


def softcaps(faults: Faults, device: str) -> None:
    """Caps from subnormal to 1e30: lse, out and gradients, for scores far below the cap, and at it."""
    for dim in widths(64, 128):
        for cap in (1e-45, 1e-40, 2.9e-39, 1e-20, 1.0, 1e3, 1e5, 1e7, 1e10, 1e20, 1e30):
            for at_cap in (False, True):
                if at_cap and not 1e3 <= cap <= 1e7:
                    continue
                case = Case(batch=1, seqlen_q=200, seqlen_k=300, heads=2, head_dim=dim, softcap=cap)
                x = draw(case, device, 1, math.sqrt(cap) if at_cap else 1.0, math.sqrt(cap) if at_cap else 1.0)
                dout = x.pop("dout")
                x["q"][:, :7] = 0  # scores of 0
                run = Run(case, x, None if at_cap else dout)
                ref, ref_lse = st.full_reference(case, **x)
                size = float(ref_lse.abs().max())
                name = f"softcap {cap:g}, head_dim {dim}{', scores at the cap' if at_cap else ''}: "
                faults.expect(name + "lse", off(run.lse, ref_lse), 1e-5 + 2e-6 * size)
                if at_cap:  # which key has the weight is decided by rounding
                    continue
                faults.expect(name + "out", off(run.out, ref), 0.02)
                grads = st.full_reference_backward(case, **x, dout=dout)
                for n, reference in zip(("dq", "dk", "dv"), grads, strict=True):
                    at = reference.abs().max()
                    if n == "dv" or cap >= 1:  # the tiny gradients of small caps vanish in bf16 on the way
                        faults.expect(name + n, off(getattr(run, n), reference) / at, 0.03)
    # Slopes of a few 1e-6: an error of 1e-7 of tanh is a tenth of them.
    case = Case(batch=1, seqlen_q=64, seqlen_k=16, heads=2, head_dim=64, softcap=2.0, scale=1.0)
    x = draw(case, device, 2, 0.01, 0.01)
    dout = x.pop("dout")
    if case.dtype == torch.float16:  # else dS, a matrix operand of that type, is subnormal
        dout *= 1000
    x["q"][..., 0], x["k"][..., 0] = 3.9, torch.tensor([3.85, -3.85], device=device).repeat(8)[None, :, None]
    run, grads = Run(case, x, dout), st.full_reference_backward(case, **x, dout=dout)
    for n, reference in zip(("dq", "dk"), grads[:2], strict=True):
        faults.expect(f"saturated softcap: {n}", off(getattr(run, n), reference) / reference.abs().max(), 0.05)


def huge_scores(faults: Faults, device: str) -> None:
    for dim in widths(64, 128, 256):
        for size in (1e6, 1e7, 3e7, 1e9, 1e12):
            for causal in (False, True):
                case = Case(batch=1, seqlen_q=256, seqlen_k=256, heads=2, head_dim=dim, causal=causal)
                if 6 * math.sqrt(size) > torch.finfo(case.dtype).max:  # q and k themselves would be infinite
                    continue
                x = draw(case, device, dim, math.sqrt(size), math.sqrt(size))
                dout = x.pop("dout")
                run = Run(case, x, dout)
                ref, ref_lse = st.full_reference(case, **x)
                name = f"scores of {size:g}, head_dim {dim}{', causal' * causal}: "
                faults.expect(name + "lse", off(run.lse, ref_lse) / ref_lse.abs().max(), 1e-6)
                # A row whose second score is within 1e-5 of its first may go either way.
                s = torch.einsum("bqhd,bkhd->bhqk", x["q"].double(), x["k"].double()) * case.real_scale
                if causal:
                    s = s.masked_fill(torch.ones(256, 256, device=device).triu(1).bool(), -math.inf)
                top = s.topk(2, dim=-1).values
                clear = (top[..., 0] - top[..., 1] > 1e-5 * size)  # [batch, heads, q]
                rows = clear.transpose(1, 2)[..., None]
                faults.expect(name + "out", off(run.out * rows, ref * rows), 0.04)
                silent = dout * rows  # rows that may go either way say nothing
                run = Run(case, x, silent)
                reference = st.full_reference_backward(case, **x, dout=silent)[2]
                # Below 3e6 float32's lse decides; up to 1e9 a short row's score may be off by more than its own rounding.
                limit = 0.25 if size < 3e6 else 0.06 if size < 1e9 else 0.01
                faults.expect(name + "dv", off(run.dv, reference) / reference.abs().max(), limit)
                for n in ("dq", "dk"):
                    if not bool(torch.isfinite(getattr(run, n)).all()):
                        faults.append(name + n + " is not finite")


def largest_fp16(faults: Faults, device: str) -> None:
    """q and k of 65504: scores of 5e10."""
    for dim in widths(64, 128, 256):
        for causal in (False, True):
            case = Case(batch=1, seqlen_q=200, seqlen_k=200, heads=2, head_dim=dim, causal=causal, dtype=torch.float16)
            x = draw(case, device, dim)
            dout = x.pop("dout")
            x["q"][:], name = 65504, f"fp16 65504, head_dim {dim}{', causal' * causal}: "
            for one_key in (True, False):
                x["k"][:] = -65504 if one_key else 65504
                x["k"][:, 0] = 65504
                run = Run(case, x, dout)
                ref, ref_lse = st.full_reference(case, **x)
                faults.expect(name + f"out ({one_key})", off(run.out, ref), 0.01)
                faults.expect(name + f"lse ({one_key})", off(run.lse, ref_lse) / ref_lse.abs().max(), 1e-6)
                if one_key:
                    reference = st.full_reference_backward(case, **x, dout=dout)[2]
                    faults.expect(name + "dv", off(run.dv, reference) / reference.abs().max(), 0.01)
                if not bool(torch.isfinite(run.dv).all()):
                    faults.append(name + f"dv is not finite ({one_key})")
                # Where all scores are equal, log(200) is lost in the lse, and weights are 1 in place of 1 / 200: the
                # others' gradients may be too large for fp16, not NaN.
                if bool(torch.isnan(run.dq).any() | torch.isnan(run.dk).any()):
                    faults.append(name + f"dq or dk is NaN ({one_key})")


def huge_values(faults: Faults, device: str) -> None:
    """V near the type's largest: means that are finite come out finite, by every way there is."""
    for dtype in HALVES:
        most = torch.finfo(dtype).max
        for dim in widths(64, 128, 192, 256):
            for more in ({}, {"causal": True}, {"softcap": 5.0}, {"dropout_p": 0.25}):
                case = Case(batch=1, seqlen_q=150, seqlen_k=700, heads=2, head_dim=dim, dtype=dtype, **more)
                x = draw(case, device, dim)
                x.pop("dout")
                keep = st.host_dropout_mask(case, 3, 5) if case.dropout_p else None
                for kind in ("all", "each column's sign", "any"):
                    sign = torch.ones_like(x["v"])
                    if kind != "all":
                        sign = x["v"].sign()
                    if kind == "each column's sign":
                        sign = sign[:, :1].expand_as(sign)
                    inputs = {**x, "v": (sign.double() * most * (1 if kind == "all" else 0.97)).to(dtype)}
                    run = Run(case, inputs)
                    ref, _lse = st.full_reference(case, **inputs, keep=keep)
                    name = f"{dtype} v of {most:.3g} ({kind}), head_dim {dim} {more}: out"
                    safe = ref.abs() <= most if not case.dropout_p else ref.abs() < 0.98 * most
                    got = torch.where(safe, run.out.double(), 0)
                    faults.expect(name, off(got / most, torch.where(safe, ref, 0) / most), 0.01)
                    over = run.out[ref.abs() > 1.02 * most]
                    if not bool(torch.isinf(over).all()):
                        faults.append(name + ": a mean too large for the type is not infinite")
    # Beside V's own infinity, which some rows see.
    case = Case(batch=1, seqlen_q=300, seqlen_k=300, heads=1, head_dim=64, causal=True)
    x = draw(case, device, 1)
    x.pop("dout")
    x["v"][:] = 3e38
    x["v"][:, 170, :, ::3] = math.inf
    run, (ref, _lse) = Run(case, x), st.full_reference(case, **x)
    same = (run.out.double() == ref) | ((run.out.double() - ref).abs() < 3e36)
    faults.expect("v of 3e38 beside an infinity: wrong values", int((~same).sum()), 0)


def dropped_nan(faults: Faults, device: str) -> None:
    """The weight of a NaN score is NaN, and dropped still is: NaN * 0."""
    for dim in widths(64, 128, 256):
        case = Case(batch=1, seqlen_q=100, seqlen_k=100, heads=1, head_dim=dim, causal=True, dropout_p=0.5)
        x = draw(case, device, dim)
        dout = x.pop("dout")
        x["q"][:, 60] = math.nan
        run = Run(case, x, dout)
        for n in ("dk", "dv"):
            got = torch.isnan(getattr(run, n)[0, :, 0]).all(-1)
            faults.expect(f"dropped NaN, head_dim {dim}: keys of {n} that are not NaN", int((~got[:61]).sum()), 0)
            faults.expect(f"dropped NaN, head_dim {dim}: keys of {n} that are", int(got[61:].sum()), 0)


def huge_bounds(faults: Faults, device: str) -> None:
    """seqlen_q and seqlen_k of 2^31 - 1 for 64 tokens: the results, the workspace and the time of a close bound."""
    for more in ({}, {"causal": True}, {"dropout_p": 0.3}, {"alibi": 0, "softcap": 3.0, "causal": True}):
        results: list[dict[str, Any]] = []
        for bound in (40, INT32_MAX):
            case = Case(lengths_q=[40, 0, 24], lengths_k=[40, 3, 21], heads=4, heads_kv=2, deterministic=True, **more)
            case.seqlen_q = case.seqlen_k = bound
            x = draw(case, device, 5)
            dout = x.pop("dout")
            Run(case, x, dout)  # loads the kernels
            synchronize(device)
            start = time.monotonic()
            run = Run(case, x, dout)
            synchronize(device)
            tensors = {n: getattr(run, n) for n in ("out", "lse", "dq", "dk", "dv")}
            workspace = int(run.forward.plan.workspace_bytes + run.backward.plan.workspace_bytes)
            results.append({**tensors, "seconds": time.monotonic() - start, "workspace": workspace})
        close, huge = results
        name = f"bound of 2^31 - 1 {more}: "
        for n in ("out", "lse", "dq", "dk", "dv"):
            a, b = (torch.nan_to_num(r[n].double(), nan=1e9, neginf=-1e6) for r in results)
            faults.expect(name + n, off(b, a), 0.02)
        faults.expect(name + "seconds", huge["seconds"], 0.1)
        faults.expect(name + "workspace", huge["workspace"], 2 * close["workspace"] + 65536)


def check(device: str) -> str:
    faults = Faults()
    parts = (softcaps, huge_scores, largest_fp16, huge_values, dropped_nan, huge_bounds)
    for part in parts:
        before = len(faults)
        try:
            part(faults, device)
            synchronize(device)
        except Exception as e:  # noqa: BLE001 - the others are to run too
            faults.append(f"{part.__name__}: {type(e).__name__}: {e}")
        for fault in faults[before:][:12]:
            print(f"  {fault}", flush=True)
        print(f"  {part.__name__}: {len(faults) - before} faults", flush=True)
    assert not faults, f"{len(faults)} faults, the first: {faults[0]}"
    return ", ".join(part.__name__ for part in parts)
