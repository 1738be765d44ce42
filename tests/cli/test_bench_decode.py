"""`strobe bench --decode`: what its table and its JSON hold, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest

from tool import needs_cli, refused, strobe

pytestmark = needs_cli

SMALL = ["--decode", "--min-time", "0.01", "--seqlen-k", "70", "--batch", "3", "--head-dim", "16"]


def test_table() -> None:
    result = strobe("bench", *SMALL, "--dtype", "bf16", "--page-size", "0,8")
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("bfloat16")]
    assert len(rows) == 2
    for row, page in zip(rows, ("-", "8"), strict=True):
        assert row.split()[4] == page
        assert row.removesuffix("  busy").endswith(" %")
        assert re.search(r" (\d\.\d\d|\d\d\.\d|\d\d\d) [um]s ", row)  # three digits
        assert row.count("B/s") == 2


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_json(layout: str) -> None:
    result = strobe(
        *("bench", *SMALL, "--json", "--layout", layout, "--page-size", "7", "--seqlen", "2"),
        *("--heads", "4", "--heads-kv", "2", "--threads", "2", "--causal=yes"),
    )
    results = json.loads(result.stdout)["results"]
    assert [r["dtype"] for r in results] == ["float32", "bfloat16"]
    for r in results:
        assert (r["seqlen"], r["seqlen_k"], r["page_size"], r["layout"]) == (2, 70, 7, layout)
        assert (r["batch"], r["heads"], r["heads_kv"], r["head_dim"]) == (3, 4, 2, 16)
        # K and V, once for all heads of a group.
        assert r["bytes"] == 2 * 3 * 70 * 2 * 16 * (4 if r["dtype"] == "float32" else 2)
        assert 0 < r["best_seconds"] <= r["median_seconds"]
        assert r["gbytes_per_second"] == pytest.approx(r["bytes"] / r["median_seconds"] / 1e9)
        assert r["share_of_read"] == pytest.approx(r["read_median_seconds"] / r["median_seconds"])


def test_defaults() -> None:
    result = strobe("bench", *SMALL[:3], "--seqlen-k", "64", "--dtype", "bf16", "--json")
    (r,) = json.loads(result.stdout)["results"]
    assert [
        r[name] for name in ("batch", "heads", "heads_kv", "head_dim", "seqlen", "page_size")
    ] == [*(16, 32, 8, 128, 1, 0)]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--direction", "backward"], ["--direction with --decode", "expected forward"]),
        (["--seqlen", "1,2"], ["--seqlen with --decode", "one number"]),
        (["--causal=no,yes"], ["--causal with --decode"]),
        (["--page-size", "-1"], ["--page-size = -1", "from 0"]),
        (["--heads-kv", "3"], ["--heads = 32", "--heads-kv = 3"]),
        (["--dropout", "0.5"], ["--dropout = 0.5 with --decode", "expected 0"]),
        (["--kv", "int8,q4_0", "--head-dim", "64,48"], ["--head-dim = 48 with --kv q4_0"]),
        (["--seqlen-k", "2147483647", "--batch", "2147483647"], ["out of memory"]),
    ],
)
def test_refusals(args: list[str], words: list[str]) -> None:
    refused(strobe("bench", "--decode", *args), *words)


@pytest.mark.parametrize("flag", [("--page-size", "16"), ("--layout", "bhsd")])
def test_flags_of_decode_alone(flag: tuple[str, str]) -> None:
    refused(strobe("bench", *flag), f"{flag[0]} without --decode")
