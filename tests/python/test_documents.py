"""Every Python block of the README and of these documents runs as it stands."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def blocks(document: str) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
    assert found
    return found


def run(program: str, *flags: str) -> str:
    for name in ("torch", "jax"):
        if f"import {name}\n" in program and importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    path = [str(ROOT / "python" / "flash_attn_shim"), *filter(None, sys.path)]
    result = subprocess.run(
        [sys.executable, *flags, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("number", range(len(blocks("README.md"))))
def test_quickstarts(number: int) -> None:
    program = blocks("README.md")[number]
    assert len(program.splitlines()) <= 10
    output = run(program, "-W", "error")
    if "strobe.why()" in program:
        assert output.startswith("served: ")


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 170
    for document in ("README.md", "docs/building.md"):
        folder = (ROOT / document).parent
        links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / document).read_text())
        assert len(links) > 3
        absent = [link for link in links if "://" not in link and not (folder / link).exists()]
        assert not absent, document


def test_readme_speeds_are_those_of_the_results() -> None:
    """README's table of speeds is what one run on each machine gave, and says which."""
    text = (ROOT / "README.md").read_text()
    start = text.index("<!-- speeds:")
    table = text[start:].split("\n\n")[0]
    got = re.findall(r" ([\d.]+) \(([\d.]+)\) \|", table)

    def summary(file: str) -> Any:
        assert f"](bench/results/{file})" in text
        return json.loads((ROOT / "bench" / "results" / file).read_text())["summary"]

    gpu = summary("gpu_h100_bf16.json")
    wanted = [
        gpu[f"{direction}_over_{peer}"] for peer in ("fa2", "cudnn") for direction in ("fwd", "bwd")
    ]
    cpu = {(row["dtype"], row["direction"]): row for row in summary("cpu_amx_16core.json")}
    wanted += [cpu[dtype, direction] for dtype in ("fp32", "bf16") for direction in ("fwd", "bwd")]
    assert got == [(f"{ratio['geometric_mean']:.2f}", f"{ratio['worst']:.2f}") for ratio in wanted]


def test_tables_of_quantised_caches_are_those_of_the_results() -> None:
    """docs/quantised.md: times on a GPU, and errors on the layer in examples/data. make plots draws
    the page's figure from the same files.
    """
    text = (ROOT / "docs" / "quantised.md").read_text()

    def result(name: str) -> Any:
        return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())

    row_of_times = r"^\| (\d[^|]*|the same in pages of 16) \|[^|]*((?:\| \d\.\d\d ){5})\|$"
    got = re.findall(row_of_times, text, re.MULTILINE)
    points = {
        (p["batch"], p["seqlen_k"], p["head_dim"], p["page"]): p["us"]
        for p in result("gpu_h200_quantised")["quantised"]["points"]
        if p["dtype"] == "bfloat16"
    }
    long = (64, 8192, 128, 0)
    rows = {"the same in pages of 16": (*long[:3], 16)}
    for name, _ in got:
        if name not in rows:
            batch, keys, *dim = map(int, re.findall(r"\d+", name.replace(",", "")))
            rows[name] = (batch, keys, dim[0] if dim else 128, 0)
    assert {name: re.findall(r"[\d.]+", numbers) for name, numbers in got} == {
        name: [f"{points[row][form] / points[row]['bf16']:.2f}" for form in _TIMED]
        for name, row in rows.items()
    }
    assert len(got) == 6

    def percent(x: float) -> str:
        """As the tool writes it."""
        return f"{100 * x:.0f} %" if x >= 1 else f"{100 * x:.2g} %"

    caches = result("quantised_minilm")["inputs"][0]["caches"]
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    for cache in caches:
        name = names[cache["dtype"]] if cache["kv"] == "same" else cache["kv"]
        found = cache["attention"]
        worst = max(found["heads"])
        numbers = (found["rms"], found["worst"], worst)
        words = [f"{name} +{cache['bytes']}", *map(percent, numbers)]
        words += [rf"\({cache['worst_head']}\)", percent(cache["k_and_v_alone"]["rms"])]
        assert re.search(" +".join(words) + "\n", text), name


# Columns of the table of times.
_TIMED = ("int8", "float8_e4m3fn", "q8_0", "q4_0", "float8 q")


@pytest.mark.skipif(not os.environ.get("STROBE_LIBRARY"), reason="STROBE_LIBRARY is not set")
def test_readme_support_table() -> None:
    """The CPU's rows; ctest cuda.support_table has the others."""
    script = ROOT / "scripts" / "support_table.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_pytorch_document() -> None:
    """Its blocks build on each other."""
    found = blocks("docs/pytorch.md")
    if importlib.util.find_spec("torch") and not _has_flex_attention():
        found = [block for block in found if "flex_attention" not in block]
    run("\n".join(found))


def test_jax_document() -> None:
    run("\n".join(blocks("docs/jax.md")))


@pytest.mark.parametrize("number", range(len(blocks("docs/decode.md"))))
def test_decoding_document(number: int) -> None:
    run(blocks("docs/decode.md")[number], "-W", "error")


def test_learning_document() -> None:
    """Its blocks build on each other, check themselves, and name files that exist."""
    assert run("\n".join(blocks("docs/learn.md"))) == "out 36.88, lse 5.185\n"
    text = (ROOT / "docs" / "learn.md").read_text()
    named = set(re.findall(r"`((?:src|tests)/[^` ]+)`", text))
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]
    for function in ("forward", "backward"):
        block = next(b for b in blocks("docs/learn.md") if f"def {function}(" in b)
        assert len(block.splitlines()) <= 25


def _has_flex_attention() -> bool:
    return importlib.util.find_spec("torch.nn.attention.flex_attention") is not None


DOCUMENTS = (0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seqlen_q", [5, 13])
@pytest.mark.parametrize(
    "row", ["causal", "sliding window", "local", "documents", "alibi", "softcap"]
)
def test_table_of_flex_attention_masks(row: str, seqlen_q: int) -> None:
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")  # PyTorch 2.5
    flash = importlib.import_module("strobe.flash_attn")
    torch.manual_seed(0)
    seqlen_k = 13
    n = seqlen_k - seqlen_q
    document, slope = torch.tensor(DOCUMENTS), torch.rand(4)
    q, k, v = (torch.randn(2, 4, length, 16) for length in (seqlen_q, seqlen_k, seqlen_k))
    masks = {
        "causal": lambda b, h, i, j: i + n >= j,
        "sliding window": lambda b, h, i, j: (i + n >= j) & (i + n - j <= 3),
        "local": lambda b, h, i, j: abs(i + n - j) <= 2,
        "documents": lambda b, h, i, j: (document[i] == document[j]) & (i >= j),
    }
    scores = {
        "alibi": lambda s, b, h, i, j: s - slope[h] * abs(i + n - j),
        "softcap": lambda s, b, h, i, j: 0.7 * torch.tanh(s / 0.7),
    }
    arguments: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "sliding window": {"causal": True, "window_size": (3, 0)},
        "local": {"window_size": (2, 2)},
        "alibi": {"alibi_slopes": slope},
        "softcap": {"softcap": 0.7},
    }
    block_mask = None
    if row in masks:
        block_mask = flex.create_block_mask(
            masks[row], None, None, seqlen_q, seqlen_k, device="cpu"
        )
    wanted = flex.flex_attention(q, k, v, score_mod=scores.get(row), block_mask=block_mask)
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    if row == "documents":
        if n:
            pytest.skip("documents are for seqlen_q = seqlen_k")
        lengths = torch.tensor([0, 3, 9, 13], dtype=torch.int32)
        offsets = torch.cat((lengths, 13 + lengths[1:]))  # of the batch's two entries
        packed = [x.flatten(0, 1) for x in rows]
        out = flash.flash_attn_varlen_func(*packed, offsets, offsets, 6, 6, causal=True)
        out = out.unflatten(0, (2, 13))
    else:
        out = flash.flash_attn_func(*rows, **arguments[row])
    torch.testing.assert_close(out.transpose(1, 2), wanted, rtol=1e-5, atol=1e-5)
