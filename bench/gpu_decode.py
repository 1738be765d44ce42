"""Few queries on a KV cache on one GPU: Strobe, cuDNN and FlashAttention-2 through PyTorch in one run, FlashAttention-3
by its ratio to cuDNN in a table of another run.

    make gpu-bench ARGS="--sections decode --decode-peers ../shared/peers/h200_decode.csv"

"appends": Strobe with a new key for each sequence, which is turned as the queries are, in the same launch.
"invariant": Strobe with batch_invariant.

The section "prefill" has 1,024 queries in place of a few, a piece of a long prompt, each seeing the keys up to its own,
which are the last ones. "dense" is Strobe's forward on the same keys, contiguous, without a cache. FlashAttention-2 has
the same mask; cuDNN's, in PyTorch, begins at the first key, so that it is timed without one ("cudnn_unmasked": 7 % more
work at 8k keys, 1 % at 64k).

K and V of so many layers that L2 holds none of them when its turn comes again are read in turn inside one CUDA graph;
microseconds are of one layer's call, the median of the rounds, everybody in turns. Bytes: of the keys and values in use.
The machine's copy rate (bytes read and written) is measured in the same run.

The columns of the table: batch, seqlen_k, heads, heads_kv, head_dim, seqlen_q, page (0: contiguous), ragged, MB, fa3_us,
cudnn_us, fa2_us. FlashAttention-3's time here is this run's time of cuDNN on the contiguous cache of that shape with one
query, times the table's ratio of FlashAttention-3 on that row to cuDNN there; where the table has no cuDNN for the
shape, the table's time scaled by the two runs' copy rates (4.29 TB/s in the table's).
"""

from __future__ import annotations

import csv
import itertools
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from decode_calls import Decode, paged
from gpu_timing import captured, capturing_stream, interleaved

TABLE_COPY = 4.29e12  # bytes a second in the run of the table
COLD_BYTES = 600e6  # between two reads of a layer
NAMES = ("appends", "invariant", "dense", "fa2", "cudnn", "cudnn_unmasked", "fa3", "best")  # what stands beside Strobe


class Row(NamedTuple):
    batch: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    seqlen_q: int = 1
    page: int = 0
    ragged: bool = False
    causal: bool = False

    @property
    def lengths(self) -> list[int]:
        """Keys in use; ragged: log-normal, and seqlen_k is the longest of them."""
        if not self.ragged:
            return [self.seqlen_k] * self.batch
        source = random.Random(1)
        return [int(min(32768, max(16, source.lognormvariate(7.5, 1.2)))) for _ in range(self.batch)]

    @property
    def bytes(self) -> int:
        return 2 * 2 * sum(self.lengths) * self.heads_kv * self.head_dim

    @property
    def flop(self) -> float:
        n = self.seqlen_q
        pairs = sum(n * k - (n * (n - 1) / 2 if self.causal else 0) for k in self.lengths)
        return 4.0 * pairs * self.heads * self.head_dim

    @property
    def shape(self) -> tuple[int, ...]:
        return self[:5]


DENSE = (
    (1, 1024, 32, 8, 128), (1, 8192, 32, 8, 128), (1, 131072, 32, 8, 128), (4, 2048, 32, 8, 128), (8, 32768, 32, 8, 128),
    (16, 4096, 32, 8, 128), (64, 8192, 32, 8, 128), (128, 2048, 64, 8, 128), (256, 1024, 32, 8, 128),
    (16, 8192, 32, 32, 128), (32, 8192, 8, 1, 256), (32, 4096, 64, 8, 64), (16, 4096, 16, 16, 256),
)  # fmt: skip
RAGGED = Row(64, 14196, 32, 8, 128, ragged=True)
# Those that are also timed with a new key for each sequence and rotary embedding ("appends").
APPENDING = {
    *(Row(*shape) for shape in DENSE[:2]), Row(16, 4096, 32, 8, 128), Row(64, 8192, 32, 8, 128), RAGGED,
    Row(1, 1024, 32, 8, 128, page=16), Row(16, 4096, 32, 8, 128, page=16), Row(64, 8192, 32, 8, 128, page=16),
}  # fmt: skip
# Those that are also timed with batch_invariant ("invariant").
INVARIANT = {
    Row(*shape, 32, 8, 128, page=page)
    for shape, page in itertools.product(((1, 8192), (16, 4096), (64, 8192)), (0, 16))
}  # fmt: skip


def rows(section: str) -> list[Row]:
    """Of "decode" those of the table, in its order, and one more."""
    if section == "prefill":
        return [
            Row(batch, keys, 32, 8, 128, seqlen_q=1024, page=page, causal=True)
            for batch, keys, page in itertools.product((1, 4), (8192, 32768, 65536), (16, 256))
        ]
    paged_rows = [
        row._replace(page=page)
        for page, row in itertools.product(
            (1, 16, 64, 256), (Row(1, 1024, 32, 8, 128), Row(16, 4096, 32, 8, 128), Row(64, 8192, 32, 8, 128), RAGGED)
        )
    ]
    several = [
        Row(*shape, 32, 8, 128, seqlen_q=queries, page=page)
        for queries, shape, page in itertools.product((4, 16), ((1, 8192), (16, 4096), (64, 8192)), (0, 16))
    ]
    return [*(Row(*shape) for shape in DENSE), RAGGED, *paged_rows, *several, Row(1, 8192, 32, 8, 128, page=16)]


def table(path: Path | None) -> dict[Row, dict[str, float]]:
    """Microseconds of each row by contender; what the table lacks is left out."""
    found: dict[Row, dict[str, float]] = {}
    if path is None or not path.exists():
        return found
    with path.open() as file:
        for line in csv.DictReader(x for x in file if not x.startswith("#")):
            numbers = [int(line[name]) for name in (*Row._fields[:6], "page")]
            times = {name: float(line[f"{name}_us"]) for name in ("fa3", "cudnn", "fa2") if line[f"{name}_us"]}
            found[Row(*numbers, ragged=line["ragged"] == "1")] = times
    return found


class Layers:
    """The tensors of one row, and the launches of its contenders over all layers."""

    def __init__(self, row: Row) -> None:
        import torch

        self.row = row
        self.count = max(2, min(32, math.ceil(COLD_BYTES / row.bytes)))
        torch.manual_seed(row.seqlen_k + row.batch)
        lengths = row.lengths
        # Whole pages of every size in the table.
        capacity = -(-max(lengths) // 256) * 256
        shape = (row.batch, capacity, row.heads_kv, row.head_dim)
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        self.q = torch.randn(row.batch, row.seqlen_q, row.heads, row.head_dim, **kind)
        self.used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.dense = [tuple(torch.randn(shape, **kind) for _ in range(2)) for _ in range(self.count)]
        self.out = torch.empty_like(self.q)
        self.table = None
        self.pools = self.dense
        if row.page:
            # All layers of a model have one table.
            pools = [(paged(k, row.page), paged(v, row.page)) for k, v in self.dense]
            self.table = pools[0][0][1]
            self.pools = [(k[0], v[0]) for k, v in pools]

    def strobe(self, appends: bool = False, invariant: bool = False) -> tuple[Callable[[], None], str]:
        """appends: the last key of each sequence is new, and it and the queries are turned over their whole length."""
        import torch

        more: dict[str, Any] = {"causal": self.row.causal, "batch_invariant": invariant}
        used, out = self.used, self.out
        if appends:
            kind = {"device": "cuda", "dtype": torch.bfloat16}
            shape = (self.row.batch, 1, self.row.heads_kv, self.row.head_dim)
            tables = (self.row.seqlen_k + self.row.seqlen_q, self.row.head_dim // 2)
            used, out = self.used - 1, torch.empty_like(self.out)
            more |= {"new": tuple(torch.randn(shape, **kind) for _ in range(2)),
                     "rotary": tuple(torch.randn(tables, **kind) for _ in range(2))}  # fmt: skip
        launches = [Decode(self.q, k, v, used, out, self.table, **more) for k, v in self.pools]

        def run() -> None:
            for launch in launches:
                launch.run()

        return run, launches[0].kernel

    def peer(self, backend: Any) -> Callable[[], Any]:
        """scaled_dot_product_attention on the contiguous caches, every key in use. Not for ragged lengths."""
        import torch
        from torch.nn.attention import sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as sdpa

        n = self.row.seqlen_k
        group = self.row.heads != self.row.heads_kv
        views = [[t[:, :n].transpose(1, 2) for t in pair] for pair in self.dense]
        q = self.q.transpose(1, 2)

        def run() -> None:
            with torch.no_grad(), sdpa_kernel(backend):
                for k, v in views:
                    sdpa(q, k, v, enable_gqa=group)

        return run

    def whole(self) -> dict[str, tuple[Callable[[], Any], Any]]:
        """Of a row of "prefill", who reads contiguous keys without a cache: the launches over all layers, and one over
        the last of them."""
        import strobe
        import torch

        row = self.row
        views = [tuple(t[:, : row.seqlen_k] for t in pair) for pair in self.dense]
        out = torch.empty_like(self.out)
        fa2_op = torch.ops.aten._flash_attention_forward

        def dense(k: Any, v: Any) -> Any:
            return strobe.attention(self.q, k, v, causal=True, out=out)

        def fa2(k: Any, v: Any) -> Any:
            return fa2_op(self.q, k, v, None, None, row.seqlen_q, row.seqlen_k, 0.0, True, False)[0]

        def over_all(call: Callable[[Any, Any], Any]) -> tuple[Callable[[], Any], Any]:
            def run() -> None:
                for k, v in views:
                    call(k, v)

            return run, lambda: call(*views[-1])

        return {"dense": over_all(dense), "fa2": over_all(fa2)}

    def error(self) -> float:
        """Of Strobe's out against float32 attention over the last layer, which is what out holds after a run."""
        import torch

        k, v = self.dense[-1]
        worst = 0.0
        group = self.row.heads // self.row.heads_kv
        picked = torch.linspace(0, self.row.seqlen_q - 1, min(self.row.seqlen_q, 48), device=self.q.device).long()
        for b, n in enumerate(self.row.lengths[:4]):
            keys, values = (t[b, :n].float().repeat_interleave(group, 1) for t in (k, v))
            scores = torch.einsum("ihd,jhd->hij", self.q[b, picked].float(), keys) / math.sqrt(self.row.head_dim)
            if self.row.causal:
                hidden = torch.arange(n, device=self.q.device) > (picked + n - self.row.seqlen_q)[:, None]
                scores = scores.masked_fill(hidden, -math.inf)
            wanted = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values)
            difference = (self.out[b, picked].float() - wanted).abs().max().item()
            worst = math.inf if math.isnan(difference) else max(worst, difference)
        return worst


def copy_rate(rounds: int, flush: Any) -> float:
    """Bytes read and written a second by a copy of 1 GB on the device."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    seconds = interleaved({"copy": lambda: target.copy_(source)}, rounds, flush)["copy"]
    return 2 * source.numel() / seconds


def agreeing(call: Callable[[], Any], once: Callable[[], Any], out: Any) -> Callable[[], Any]:
    """call, if what it computes over the last layer is what out holds."""
    difference = (once().float() - out.float()).abs().max().item()
    if not difference < 0.03:
        raise AssertionError(f"its out is off by {difference:g}")
    return call


def measure(row: Row, args: Any, flush: Any) -> dict[str, Any]:
    import torch
    from torch.nn.attention import SDPBackend

    layers = Layers(row)
    point: dict[str, Any] = {**row._asdict(), "mb": row.bytes / 1e6, "layers": layers.count, "not_captured": {}}
    strobe, point["kernel"] = layers.strobe()
    strobe()
    torch.cuda.synchronize()
    point["error"] = layers.error()
    if not point["error"] < 0.02:
        raise AssertionError(f"out is off by {point['error']:g}: not worth timing")
    calls: dict[str, Callable[[], Any]] = {"strobe": strobe}
    if row in APPENDING:
        calls["appends"], _ = layers.strobe(appends=True)
        calls["appends"]()
    if row in INVARIANT:
        calls["invariant"], point["invariant_kernel"] = layers.strobe(invariant=True)
        calls["invariant"]()
    # With several queries a cache is read under a causal mask as well as without one: the time is that of reading.
    peers: dict[str, Callable[[], Callable[[], Any]]] = {}
    if row.causal:
        for name, (call, once) in layers.whole().items():
            peers[name] = lambda call=call, once=once: agreeing(call, once, layers.out)
        peers["cudnn_unmasked"] = lambda: layers.peer(SDPBackend.CUDNN_ATTENTION)
    elif not row.ragged and not row.page:
        peers["cudnn"] = lambda: layers.peer(SDPBackend.CUDNN_ATTENTION)
        peers["fa2"] = lambda: layers.peer(SDPBackend.FLASH_ATTENTION)
    for name, make in peers.items():
        try:
            call = make()
            call()
            calls[name] = call
        except Exception as e:  # noqa: BLE001 - a peer that cannot must not end the bench
            point["not_captured"][name] = f"{type(e).__name__}: {e}".splitlines()[0][:120]
    times = interleaved(captured(calls, point["not_captured"]), args.rounds, flush)
    point["us"] = {name: t / layers.count * 1e6 for name, t in times.items()}
    return point


def add_fa3(points: dict[Row, dict[str, Any]], known: dict[Row, dict[str, float]], copy: float) -> None:
    """FlashAttention-3's times as the module's text says, and "best" of all."""
    for row, point in points.items():
        us, base = point["us"], Row(*row.shape)
        fa3 = known.get(row, {}).get("fa3")
        theirs, ours = known.get(base, {}).get("cudnn"), points.get(base, {}).get("us", {}).get("cudnn")
        if fa3 and theirs and ours and not row.ragged:
            us["fa3"] = fa3 * ours / theirs
        elif fa3:
            us["fa3"] = fa3 * TABLE_COPY / copy
        peers = [us[name] for name in ("fa2", "cudnn", "fa3") if name in us]
        if peers:
            us["best"] = min(peers)


def summary(section: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for peer in NAMES:
        ratios = [p["us"][peer] / p["us"]["strobe"] for p in points if peer in p["us"]]
        if not ratios:
            continue
        mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
        result[f"over_{peer}"] = {"geometric_mean": mean, "worst": min(ratios), "rows": len(ratios)}
        print(f"{section} / {peer}: geometric mean {mean:.3f}, worst {min(ratios):.3f}, {len(ratios)} rows")
    return result


def run(section: str, args: Any, flush: Any, end: float, clock: Callable[[], float]) -> dict[str, Any]:
    """section: decode or prefill. end: on the clock; no row begins after it."""
    import torch

    known = table(args.decode_peers)
    copy = copy_rate(args.rounds, flush)
    print(f"copy {copy * 1e-12:.2f} TB/s, read and written")
    points: dict[Row, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for row in rows(section):
        if clock() > end:
            print(f"out of time before {row}")
            break
        try:
            with capturing_stream():
                points[row] = measure(row, args, flush)
        except Exception as e:  # noqa: BLE001 - the other rows are to run too
            failed[str(row)] = f"{type(e).__name__}: {e}".splitlines()[0][:200]
            print(f"{row}: FAILED: {failed[str(row)]}", flush=True)
            continue
        torch.cuda.empty_cache()
        add_fa3(points, known, copy)
        us = points[row]["us"]
        speed = f"{row.flop / us['strobe'] * 1e-6:4.0f} TFLOP/s" if row.causal else f"{row.bytes / us['strobe'] * 1e-6:5.2f} TB/s"
        cells = "".join(f"  {n} {us[n]:7.1f} ({us[n] / us['strobe']:.2f})" for n in NAMES if n in us)
        print(f"{row.batch:4} x {row.seqlen_k:6} {row.heads:3}/{row.heads_kv:<2} {row.head_dim:3} q {row.seqlen_q:4} page {row.page:3}"
              f"{' ragged' if row.ragged else '':7}  {us['strobe']:7.1f} us {speed}{cells}", flush=True)  # fmt: skip
    done = list(points.values())
    return {"copy_tb_per_second": copy * 1e-12, "points": done, "failed": failed, "summary": summary(section, done)}
