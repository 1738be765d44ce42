"""One query a sequence on KV caches of eight bits and four, beside bf16, on one GPU; and prompts of 1,024 queries.

    make gpu-bench ARGS="--sections quantised"

Scales are fp16, of rows. As in gpu_decode.py: so many layers that L2 holds none of them when its turn comes again, inside one
CUDA graph; microseconds are of one layer's call, the median of the rounds, everybody in turns. "append": with a new key for
each sequence, which is turned and quantised. "float8 q": the queries too are e4m3, all scales are float32 of a sequence's
heads, and out is bf16. A prompt is causal: its keys are the last ones of 8k, the others in pages before. "quantize", "dequantize": of the K of all layers together, bytes read and
written a second.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from decode_calls import Decode, paged
from gpu_timing import captured, capturing_stream, interleaved

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

FORMS = ("int8", "float8_e4m3fn", "q8_0", "q4_0")
FLOAT8_Q = "float8 q"
COLD_BYTES = 600e6  # between two reads of a layer
HEADS, HEADS_KV = 32, 8


class Row(NamedTuple):
    batch: int
    seqlen_k: int
    head_dim: int = 128
    page: int = 0
    dtype: str = "bfloat16"
    seqlen_q: int = 1  # several: a prompt, causal

    @property
    def flop(self) -> float:
        n = self.seqlen_q
        return 4.0 * self.batch * (n * self.seqlen_k - n * (n - 1) / 2) * HEADS * self.head_dim


ROWS = (
    Row(64, 8192), Row(16, 4096), Row(1, 1024), Row(1, 8192),
    Row(64, 8192, page=16), Row(16, 4096, page=16), Row(1, 1024, page=16),
    Row(64, 8192, dtype="float16"), Row(16, 4096, dtype="float16"), Row(64, 8192, 64),
    Row(1, 8192, page=16, seqlen_q=1024), Row(4, 8192, page=16, seqlen_q=1024),
)  # fmt: skip


def row_bytes(form: str, head_dim: int) -> int:
    """Of a row of one head, with its scale."""
    return {"bf16": 2 * head_dim, "q8_0": head_dim // 32 * 34, "q4_0": head_dim // 32 * 18}.get(form, head_dim + 2)


def call_of(form: str, row: Row, layers: int, q: Any, used: Any, appends: bool) -> tuple[Callable[[], None], float]:
    """The launches over all layers, and the error of the last one's out against float32 over what the codes stand for."""
    import strobe
    import torch

    kind = {"device": "cuda", "dtype": q.dtype}
    shape = (row.batch, row.seqlen_k, HEADS_KV, row.head_dim)
    launches, out = [], torch.empty_like(q)
    more: dict[str, Any] = {}
    if appends:
        new = (row.batch, 1, HEADS_KV, row.head_dim)
        turns = (row.seqlen_k + 1, row.head_dim // 2)
        more = {"new": tuple(torch.randn(new, **kind) for _ in range(2)),
                "rotary": tuple(torch.randn(turns, **kind) for _ in range(2))}  # fmt: skip
    values, q_scale, exact_q = [], None, q
    if form == FLOAT8_Q:
        q, q_scale = strobe.quantize(q, "float8_e4m3fn", scale="batch_head", heads_kv=HEADS_KV)
        exact_q = strobe.dequantize(q, q_scale)
    for _ in range(layers):
        values, caches, scales, table = [], [], [], None
        for _ in range(2):
            x, scale = torch.randn(shape, **kind), None
            if form == FLOAT8_Q:
                x, scale = strobe.quantize(x, "float8_e4m3fn", scale="batch_head")
                values.append(strobe.dequantize(x, scale) if row.batch <= 16 else None)
            elif form != "bf16":
                options = {} if form.startswith("q") else {"scale_dtype": "float16"}
                x, scale = strobe.quantize(x, form, **options)
                values.append(strobe.dequantize(x, scale, form=form if form.startswith("q") else None) if row.batch <= 16 else None)
            else:
                values.append(x.float() if row.batch <= 16 else None)
            if row.page:
                x = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
                x, table = paged(x, row.page)
                if scale is not None and scale.ndim == 3:
                    scale = paged(scale[..., None], row.page)[0][..., 0]
            caches.append(x)
            scales.append(scale)
        name = {"bf16": "", FLOAT8_Q: "float8_e4m3fn"}.get(form, form)
        cache = {"form": name, "scales": tuple(scales), "q_scale": q_scale, "causal": row.seqlen_q > 1}
        launches.append(Decode(q, *caches, used - int(appends), out, table, **cache, **more))

    def run() -> None:
        for launch in launches:
            launch.run()

    run()
    torch.cuda.synchronize()
    worst = math.nan
    if values[0] is not None and not appends:
        k, v = (x[:4].repeat_interleave(HEADS // HEADS_KV, 2) for x in values)
        scores = torch.einsum("bihd,bjhd->bhij", exact_q[:4].float(), k) / math.sqrt(row.head_dim)
        if row.seqlen_q > 1:
            scores += torch.full_like(scores[0, 0], -math.inf).triu(row.seqlen_k - row.seqlen_q + 1)
        wanted = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
        worst = float((out[:4].float() - wanted).abs().max())
    return run, worst


def measure(row: Row, args: Any, flush: Any) -> dict[str, Any]:
    import torch

    torch.manual_seed(1)
    whole = 2 * row.batch * row.seqlen_k * HEADS_KV * row_bytes("bf16", row.head_dim)
    q = torch.randn(row.batch, row.seqlen_q, HEADS, row.head_dim, device="cuda", dtype=getattr(torch, row.dtype))
    used = torch.full((row.batch,), row.seqlen_k, dtype=torch.int32, device="cuda")
    point: dict[str, Any] = {**row._asdict(), "not_captured": {}, "error": {}, "us": {}, "tb_per_second": {}, "tflops": {}}
    calls: dict[str, Callable[[], Any]] = {}
    layers: dict[str, int] = {}
    for form in ("bf16", *FORMS, FLOAT8_Q):
        size = whole * row_bytes(form, row.head_dim) / row_bytes("bf16", row.head_dim)
        for appends in (False, True):
            if appends and (row.page or form == FLOAT8_Q):
                continue
            name = f"{form} append" if appends else form
            layers[name] = max(2, min(64, math.ceil(COLD_BYTES / size)))
            calls[name], error = call_of(form, row, layers[name], q, used, appends)
            point["error"][name] = error
            if error > 0.02:
                raise AssertionError(f"{name}: out is off by {error:g}: not worth timing")
    times = interleaved(captured(calls, point["not_captured"]), args.rounds, flush)
    for name, seconds in times.items():
        us = seconds / layers[name] * 1e6
        size = whole * row_bytes(name.split()[0], row.head_dim) / row_bytes("bf16", row.head_dim)
        point["us"][name], point["tb_per_second"][name] = us, size / us * 1e-6
        point["tflops"][name] = row.flop / us * 1e-6
    return point


def measure_quantising(args: Any, flush: Any) -> dict[str, Any]:
    """Bytes read and written a second."""
    import strobe
    import torch

    x = torch.randn(64, 8192, HEADS_KV, 128, device="cuda", dtype=torch.bfloat16)
    found = {}
    for form in FORMS:
        codes, scale = strobe.quantize(x, form)
        calls = {
            "quantize": lambda form=form: strobe.quantize(x, form),
            "dequantize": lambda codes=codes, scale=scale, form=form: strobe.dequantize(
                codes, scale, form=form if form.startswith("q") else None, dtype="bfloat16"
            ),
        }
        for name, seconds in interleaved(calls, args.rounds, flush).items():
            size = 2 * x.numel() + x.numel() * row_bytes(form, 128) / 128
            found[f"{name} {form}"] = size / seconds * 1e-12
    print("  ".join(f"{name} {rate:.2f} TB/s" for name, rate in found.items()), flush=True)
    return found


def run(args: Any, flush: Any, end: float, clock: Callable[[], float]) -> dict[str, Any]:
    """end: on the clock; no row begins after it."""
    import torch

    points, failed = [], {}
    for row in ROWS:
        if clock() > end:
            print(f"out of time before {row}")
            break
        try:
            with capturing_stream():
                point = measure(row, args, flush)
        except Exception as e:  # noqa: BLE001 - the other rows are to run too
            failed[str(row)] = f"{type(e).__name__}: {e}".splitlines()[0][:200]
            print(f"{row}: FAILED: {failed[str(row)]}", flush=True)
            continue
        finally:
            torch.cuda.empty_cache()
        points.append(point)
        us = point["us"]
        cells = "".join(
            f"  {name} {us[name]:7.1f} ({us[name] / us['bf16 append' if 'append' in name else 'bf16']:.2f})" for name in us
        )
        print(f"{row.batch:4} x {row.seqlen_k:6} {row.head_dim:3} {row.dtype} q {row.seqlen_q:4} page {row.page:3}{cells}", flush=True)
    return {"points": points, "failed": failed, "quantising_tb_per_second": measure_quantising(args, flush)}
