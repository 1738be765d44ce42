"""Correctness on the GPU against float64: random problems, features, layouts, bad input, graphs, streams.

    make gpu-test                                     everything
    python tests/gpu/run_gpu_tests.py --random 200    fewer random problems
    python tests/gpu/run_gpu_tests.py --only errors,graph

Without a GPU it says that it skipped and exits with 0. Every output tensor lies between red zones in
poisoned memory. Pass rule: |x - reference| <= 2 * |comparator - reference| + 1e-5 at the worst place,
the comparator being plain tensor operations in the case's dtype; infinities and NaNs in the same places.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

try:
    import torch
except ImportError:
    print("gpu tests: skipped (no PyTorch, whose float64 is the reference)")
    sys.exit(0)
if not torch.cuda.is_available():
    print("gpu tests: skipped (no GPU)")
    sys.exit(0)

import strobe_torch as st
from strobe_torch import Case, Forward, lib

POISON = -6.0e4  # representable, after rounding, in all three types
ZONE = 4096  # values before and after each output


class Guarded:
    """A tensor between red zones, all poisoned. `strides`: of a larger layout that it is cut from."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, pad: int = 0, shift: int = 0):
        self.shape, self.pad = shape, pad
        inner = (*shape[:-1], shape[-1] + pad)
        count = math.prod(inner)
        self.storage = torch.full((ZONE + shift + count + ZONE,), POISON, dtype=dtype, device="cuda")
        at = self.storage[ZONE + shift : ZONE + shift + count].view(inner)
        self.tensor = at[..., : shape[-1]]

    def touched_outside(self) -> bool:
        copy = self.storage.clone()
        poison = torch.full((), POISON, dtype=copy.dtype, device="cuda")
        at = self.tensor
        torch.as_strided(copy, at.shape, at.stride(), at.storage_offset()).fill_(poison)
        return not bool((copy == poison).all())


def make_inputs(
    case: Case, seed: int, pad: int = 0, shift: int = 0, sigma: float = 1.0
) -> dict[str, torch.Tensor]:
    g = torch.Generator(device="cuda").manual_seed(seed)

    def one(name: str) -> torch.Tensor:
        shape = case.shape(name)
        inner = (*shape[:-1], shape[-1] + pad)
        flat = torch.randn(math.prod(inner) + shift, generator=g, device="cuda") * sigma
        return flat.to(case.dtype)[shift:].view(inner)[..., : shape[-1]]

    return {name: one(name) for name in ("q", "k", "v")}


def worst(x: torch.Tensor, ref: torch.Tensor) -> float:
    """Largest |x - ref| where ref is finite; inf where the special values differ."""
    x, ref = x.double(), ref.double()
    special = ~torch.isfinite(ref)
    same = (torch.isnan(ref) & torch.isnan(x)) | (x == ref)
    if bool((special & ~same).any()):
        return math.inf
    if x.numel() == 0:
        return 0.0
    difference = torch.where(special, 0, (x - ref).abs())
    return math.inf if bool(torch.isnan(difference).any()) else float(difference.max())


def check_close(
    name: str, x: torch.Tensor, ref: torch.Tensor, comparator: torch.Tensor, factor: float = 2.0
) -> float:
    got, allowed = worst(x, ref), worst(comparator, ref)
    if not math.isfinite(allowed):  # the comparator has no rule for NaN in V: be as strict as for finite data
        allowed = 0.02
    limit = factor * allowed + 1e-5
    if not got <= limit:
        d = (x.double() - ref.double()).abs()
        d = torch.where(torch.isnan(d), math.inf, d)
        at = int(d.flatten().argmax())
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), x.shape))
        raise AssertionError(
            f"{name}: error {got:.3g}, allowed {limit:.3g}; at {place} got "
            f"{float(x.flatten()[at]):.6g}, reference {float(ref.flatten()[at]):.6g}"
        )
    return got / limit if limit else 0.0


def run_case(case: Case, seed: int, pad: int = 0, shift: int = 0, sigma: float = 1.0,
             change: Callable[[dict[str, torch.Tensor]], None] | None = None) -> float:  # fmt: skip
    """Forward of one case against the reference: error over what is allowed."""
    x = make_inputs(case, seed, pad, shift, sigma)
    if change:
        change(x)
    slopes = None
    if case.alibi:
        shape = (case.heads,) if case.alibi == 1 else (case.batch, case.heads)
        slopes = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).cuda() * 0.3
    keep = st.host_dropout_mask(case, seed, 5) if case.dropout_p > 0 else None
    out = Guarded(case.shape("out"), case.dtype, pad, shift)
    lse = Guarded(case.lse_shape(), torch.float32)
    forward = Forward(case, **x, out=out.tensor, lse=lse.tensor, alibi_slopes=slopes, seed=seed, offset=5)
    forward.run()
    ref, ref_lse = st.full_reference(case, **x, slopes=slopes, keep=keep)
    other, other_lse = st.full_reference(case, **x, slopes=slopes, keep=keep, dtype=case.dtype)
    for name, guarded in (("out", out), ("lse", lse)):
        if guarded.touched_outside():
            raise AssertionError(f"{name}: wrote outside of the tensor")
    ratio = check_close("out", out.tensor, ref, other)
    # lse is float32 whatever the inputs are: hold it to the input dtype's rule, and never worse than 1e-3.
    check_close("lse", lse.tensor, ref_lse, other_lse)
    return ratio


def random_case(r: random.Random) -> Case:
    heads_kv = r.choice([1, 1, 2, 3])
    heads = heads_kv * r.choice([1, 1, 2, 4])
    dim = r.choice([8, 16, 40, 64, 64, 72, 80, 96, 112, 128, 128, 160, 192, 256, 256]) if r.random() < 0.85 else r.randint(1, 256)
    case = {
        "heads": heads,
        "heads_kv": heads_kv,
        "head_dim": dim,
        "head_dim_v": dim if r.random() < 0.85 else r.choice([8, 24, 64, 100, 128, 200, 256]),
        "causal": r.random() < 0.4,
        "dtype": r.choice([torch.bfloat16, torch.bfloat16, torch.float16]),
    }

    def length() -> int:
        return r.choice([0, 1, 2, 63, 64, 65, 127, 128, 129, r.randint(1, 300), r.randint(1, 300), r.randint(300, 900)])

    if r.random() < 0.3:
        batch = r.randint(1, 5)
        case["lengths_q"] = [length() for _ in range(batch)]
        case["lengths_k"] = [length() for _ in range(batch)]
    else:
        case |= {"batch": r.randint(1, 3), "seqlen_q": max(length(), r.random() < 0.9), "seqlen_k": length()}
    if r.random() < 0.3:
        case["window"] = (r.choice([-1, 0, 1, 17, 64, 200]), r.choice([-1, 0, 5, 64, 130]))
    if r.random() < 0.15:
        case["softcap"] = r.choice([0.5, 5.0, 30.0])
    if r.random() < 0.2:
        case["alibi"] = r.choice([1, 2])
    if r.random() < 0.2:
        case["dropout_p"] = r.choice([0.1, 0.5, 0.9])
    if r.random() < 0.15:
        case["scale"] = r.choice([0.0, -0.3, 1.0, 0.01])
    return Case(**case)


def test_random(options: argparse.Namespace) -> None:
    failures = 0
    start = time.monotonic()
    for seed in range(options.first, options.first + options.random):
        r = random.Random(seed)
        case = random_case(r)
        pad, shift = (0, 0) if r.random() < 0.6 else (r.choice([0, 8, 3]), r.choice([0, 8, 1]))
        sigma = r.choice([1.0, 1.0, 1.0, 0.1, 3.0])
        try:
            run_case(case, seed, pad, shift, sigma)
        except Exception as e:  # noqa: BLE001 - every failure is to be reported
            failures += 1
            print(f"  seed {seed} pad {pad} shift {shift} sigma {sigma}: {case}\n    {type(e).__name__}: {e}", flush=True)
            if failures >= 12 or isinstance(e, torch.AcceleratorError if hasattr(torch, "AcceleratorError") else ()):
                break
    print(f"  {options.random} random problems in {time.monotonic() - start:.0f} s")
    assert failures == 0, f"{failures} random problems failed"


def test_special(_: argparse.Namespace) -> None:
    """Infs and NaNs, scores that outgrow the reference maximum, empty rows."""

    def poison_v(value: float, key: int) -> Callable[[dict[str, torch.Tensor]], None]:
        def change(x: dict[str, torch.Tensor]) -> None:
            x["v"][:, key, :, ::3] = value
        return change

    def poison_k(x: dict[str, torch.Tensor]) -> None:
        x["k"][:, 150, :, 3] = math.nan

    def growing(factor: float) -> Callable[[dict[str, torch.Tensor]], None]:
        def change(x: dict[str, torch.Tensor]) -> None:
            n = x["k"].shape[1]
            x["k"] *= torch.linspace(0, factor, n, device="cuda").to(x["k"].dtype)[None, :, None, None]
        return change

    for dim in (64, 128, 256):
        for dtype in (torch.bfloat16, torch.float16):
            base = {
                "batch": 1,
                "seqlen_q": 300,
                "seqlen_k": 300,
                "heads": 2,
                "head_dim": dim,
                "dtype": dtype,
            }
            for causal in (False, True):
                case = Case(**base, causal=causal)
                for value in (math.inf, -math.inf, math.nan):
                    run_case(case, 1, change=poison_v(value, 170))
                run_case(Case(**base, causal=causal, window=(40, 20)), 1, change=poison_v(math.nan, 130))
                run_case(case, 2, change=poison_k)
                for factor in (4.0, 40.0, 400.0):
                    run_case(case, 3, change=growing(factor))
            run_case(Case(**base, causal=True, dropout_p=0.3), 4, change=poison_v(math.inf, 100))
    run_case(Case(batch=2, seqlen_q=200, seqlen_k=70, heads=2, causal=True), 5)  # rows that see nothing
    run_case(Case(batch=2, seqlen_q=70, seqlen_k=0, heads=2), 6)


def test_shapes(_: argparse.Namespace) -> None:
    """Grid limits, many heads, more than 2^31 elements."""
    run_case(Case(batch=700, seqlen_q=3, seqlen_k=5, heads=100, heads_kv=1, head_dim=64), 1)  # 70,000
    n, heads, dim = 140_000, 128, 128  # 2.3e9 values: batch 1, one long sequence with broadcast heads
    case = Case(batch=1, seqlen_q=n, seqlen_k=128, heads=heads, heads_kv=1, head_dim=dim)
    q = torch.empty(case.shape("q"), dtype=torch.bfloat16, device="cuda").normal_()
    k, v = (torch.randn(case.shape(s), device="cuda").bfloat16() for s in "kv")
    out = torch.full_like(q, POISON)
    Forward(case, q, k, v, out).run()
    rows = torch.tensor([0, 1, 65_535, 131_071, 131_072, n - 1], device="cuda")
    small = Case(batch=1, seqlen_q=len(rows), seqlen_k=128, heads=heads, heads_kv=1, head_dim=dim)
    ref, _lse = st.full_reference(small, q[:, rows], k, v)
    other, _lse = st.full_reference(small, q[:, rows], k, v, dtype=torch.bfloat16)
    check_close("out of 2.3e9 values", out[:, rows], ref, other)
    assert not bool((out == POISON).any())


def test_errors(_: argparse.Namespace) -> None:
    """Bad input is refused with a text, nothing is launched, and the next call works."""
    case = Case(batch=1, seqlen_q=128, seqlen_k=128, heads=2)
    x = make_inputs(case, 0)
    out = torch.full(case.shape("out"), POISON, dtype=case.dtype, device="cuda")

    def refused(what: str, wanted: str, run: Callable[[], object]) -> None:
        try:
            run()
        except Exception as e:  # noqa: BLE001
            assert wanted in str(e), f"{what}: text is {e}, expected {wanted!r} in it"
            torch.cuda.synchronize()
            return
        raise AssertionError(f"{what}: was accepted")

    host = torch.zeros(case.shape("q"), dtype=case.dtype)
    refused("host pointer", "host memory", lambda: Forward(case, host, x["k"], x["v"], out).run())
    refused("host output", "host memory", lambda: Forward(case, **x, out=host).run())
    refused("odd address", "alignment", lambda: Forward(case, q=_off_by_one_byte(x["q"]), k=x["k"], v=x["v"], out=out).run())
    f = Case(**{**case.__dict__, "dtype": torch.float32})
    refused("float32", "fp32", lambda: Forward(f, **{n: t.float() for n, t in x.items()}, out=out.float()))
    refused("device", "device_index", lambda: lib.make_plan(st.problem_of(case, False, device_index=77, **x)))
    if torch.cuda.device_count() > 1:
        other = x["q"].to("cuda:1")
        refused("wrong device", "memory of device 1", lambda: Forward(case, other, x["k"], x["v"], out).run())
    assert bool((out == POISON).all()), "a refused call wrote"
    run_case(case, 0)


class _off_by_one_byte:
    def __init__(self, like: torch.Tensor) -> None:
        self.like = like

    def __getattr__(self, name: str) -> object:
        return getattr(self.like, name)

    def data_ptr(self) -> int:
        return self.like.data_ptr() + 1


def test_graph(_: argparse.Namespace) -> None:
    """Captured once, replayed on new data, the same bits as a launch."""
    case = Case(batch=2, seqlen_q=500, seqlen_k=500, heads=4, causal=True)
    x = make_inputs(case, 0)
    out = torch.empty(case.shape("out"), dtype=case.dtype, device="cuda")
    lse = torch.empty(case.lse_shape(), device="cuda")
    Forward(case, **x, out=out, lse=lse).run()  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        Forward(case, **x, out=out, lse=lse).run()
    for seed in range(3):
        for name, tensor in make_inputs(case, seed).items():
            x[name].copy_(tensor)
        out.fill_(POISON)
        graph.replay()
        replayed = out.clone()
        out.fill_(POISON)
        Forward(case, **x, out=out, lse=lse).run()
        assert torch.equal(replayed, out), "replay differs from launch"


def test_threads(_: argparse.Namespace) -> None:
    """Several host threads, each on its own stream; repeats give the same bits."""
    case = Case(batch=2, seqlen_q=700, seqlen_k=700, heads=4, head_dim=128, causal=True)
    x = make_inputs(case, 0)
    expected = torch.empty(case.shape("out"), dtype=case.dtype, device="cuda")
    Forward(case, **x, out=expected).run()
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                out = torch.empty_like(expected)
                forward = Forward(case, **x, out=out)
                for _ in range(100):
                    out.fill_(POISON)
                    forward.run()
                    if not torch.equal(out, expected):
                        wrong.append("different bits")
                        return
        except Exception:  # noqa: BLE001
            wrong.append(traceback.format_exc())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[0]


def test_fuzz_sanitizer(_: argparse.Namespace) -> None:
    """A small problem for every kernel instance: what compute-sanitizer is run over."""
    for dtype in (torch.bfloat16, torch.float16):
        for dim in (64, 96, 128, 192, 256):
            run_case(Case(batch=1, seqlen_q=140, seqlen_k=200, heads=2, heads_kv=1, head_dim=dim, causal=True, dtype=dtype), 1)
            run_case(Case(seqlen_q=70, seqlen_k=90, heads=1, head_dim=dim - 8, dtype=dtype, dropout_p=0.2, alibi=1, softcap=20.0), 2)
            run_case(Case(lengths_q=[65, 0, 1], lengths_k=[3, 70, 130], heads=1, head_dim=dim - 3, dtype=dtype, window=(30, 3)), 3, pad=1, shift=1)


TESTS = {
    name.removeprefix("test_"): function
    for name, function in list(globals().items())
    if name.startswith("test_")
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--random", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first random problem")
    parser.add_argument("--only", default="", help=f"some of {','.join(TESTS)}")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(TESTS)
    print(f"gpu tests on {torch.cuda.get_device_name()}, strobe {lib.VERSION}")
    failed = []
    for name in names:
        start = time.monotonic()
        try:
            TESTS[name](options)
            torch.cuda.synchronize()
            verdict = "ok"
        except Exception as e:  # noqa: BLE001 - the others are to run too
            failed.append(name)
            verdict = f"FAILED: {type(e).__name__}: {e}"
            if not isinstance(e, AssertionError):
                traceback.print_exc()
        print(f"{name}: {verdict} ({time.monotonic() - start:.1f} s)", flush=True)
    print("gpu tests: " + (f"FAILED: {', '.join(failed)}" if failed else "all passed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
