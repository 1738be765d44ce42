"""Few queries on a KV cache on one GPU: Strobe, cuDNN and FlashAttention-2 through PyTorch in one run, FlashAttention-3
by its ratio to cuDNN in a table of another run.

    make gpu-bench ARGS="--sections decode --decode-peers ../shared/peers/h200_decode.csv"

"appends": Strobe with a new key for each sequence, which is turned as the queries are, in the same launch.

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


class Row(NamedTuple):
    batch: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    seqlen_q: int = 1
    page: int = 0
    ragged: bool = False

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


def rows() -> list[Row]:
    """Those of the table, in its order."""
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
    return [*(Row(*shape) for shape in DENSE), RAGGED, *paged_rows, *several]


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

    def strobe(self, appends: bool = False) -> tuple[Callable[[], None], str]:
        """appends: the last key of each sequence is new, and it and the queries are turned over their whole length."""
        import torch

        more: dict[str, Any] = {}
        used, out = self.used, self.out
        if appends:
            kind = {"device": "cuda", "dtype": torch.bfloat16}
            shape = (self.row.batch, 1, self.row.heads_kv, self.row.head_dim)
            tables = (self.row.seqlen_k + self.row.seqlen_q, self.row.head_dim // 2)
            used, out = self.used - 1, torch.empty_like(self.out)
            more = {"new": tuple(torch.randn(shape, **kind) for _ in range(2)),
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

    def error(self) -> float:
        """Of Strobe's out against float32 attention over the last layer, which is what out holds after a run."""
        import torch

        k, v = self.dense[-1]
        worst = 0.0
        group = self.row.heads // self.row.heads_kv
        for b, n in enumerate(self.row.lengths[:4]):
            keys, values = (t[b, :n].float().repeat_interleave(group, 1) for t in (k, v))
            scores = torch.einsum("ihd,jhd->hij", self.q[b].float(), keys) / math.sqrt(self.row.head_dim)
            wanted = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values)
            difference = (self.out[b].float() - wanted).abs().max().item()
            worst = math.inf if math.isnan(difference) else max(worst, difference)
        return worst


def copy_rate(rounds: int, flush: Any) -> float:
    """Bytes read and written a second by a copy of 1 GB on the device."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    seconds = interleaved({"copy": lambda: target.copy_(source)}, rounds, flush)["copy"]
    return 2 * source.numel() / seconds


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
    # With several queries a cache is read under a causal mask as well as without one: the time is that of reading.
    if not row.ragged and not row.page:
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
            try:
                call = layers.peer(backend)
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
        peers = [t for name, t in us.items() if name not in ("strobe", "appends", "best")]
        if peers:
            us["best"] = min(peers)


def summary(points: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for peer in ("fa2", "cudnn", "fa3", "best"):
        ratios = [p["us"][peer] / p["us"]["strobe"] for p in points if peer in p["us"]]
        if not ratios:
            continue
        mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
        result[f"over_{peer}"] = {"geometric_mean": mean, "worst": min(ratios), "rows": len(ratios)}
        print(f"decode / {peer}: geometric mean {mean:.3f}, worst {min(ratios):.3f}, {len(ratios)} rows")
    return result


def run(args: Any, flush: Any, end: float, clock: Callable[[], float]) -> dict[str, Any]:
    """end: on the clock; no row begins after it."""
    import torch

    known = table(args.decode_peers)
    copy = copy_rate(args.rounds, flush)
    print(f"copy {copy * 1e-12:.2f} TB/s, read and written")
    points: dict[Row, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for row in rows():
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
        cells = "".join(f"  {n} {us[n]:7.1f} ({us[n] / us['strobe']:.2f})" for n in ("appends", "fa2", "cudnn", "fa3", "best") if n in us)
        print(f"{row.batch:4} x {row.seqlen_k:6} {row.heads:3}/{row.heads_kv:<2} {row.head_dim:3} q {row.seqlen_q:2} page {row.page:3}"
              f"{' ragged' if row.ragged else '':7}  {us['strobe']:7.1f} us {row.bytes / us['strobe'] * 1e-6:5.2f} TB/s{cells}", flush=True)  # fmt: skip
    done = list(points.values())
    return {"copy_tb_per_second": copy * 1e-12, "points": done, "failed": failed, "summary": summary(done)}
