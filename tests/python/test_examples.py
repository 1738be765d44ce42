"""The examples and bench/gpt_training.py run, in short, and show what they say they show."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
GPT_TRAINING = ROOT / "bench" / "gpt_training.py"
# Where the examples in C++ are built, beside the tool.
PROGRAMS = Path(os.environ.get("STROBE_CLI", "")).parent


def run(*words: str | Path) -> str:
    """Standard output of a program, which must succeed."""
    result = subprocess.run(
        [str(word) for word in words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # tests run beside each other
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def numbers(output: str) -> dict[str, list[float]]:
    """What a Llama block printed: the name in the first 12 columns, then the values."""
    return {line[:12]: [float(x) for x in line[12:].split()] for line in output.splitlines()[1:]}


def test_llama_block_is_the_same_in_cpp_and_pytorch() -> None:
    program = PROGRAMS / "llama_block"
    if not os.access(program, os.X_OK):
        pytest.skip(f"no {program}: STROBE_CLI names the tool, with the examples beside it")
    cpp = numbers(run(program))
    python = numbers(run(sys.executable, ROOT / "examples" / "llama_block.py"))
    assert list(cpp) == ["first token ", "last token  ", "rms         ", "checksum    "]
    assert python.keys() == cpp.keys()
    for name, values in cpp.items():
        assert python[name] == pytest.approx(values, rel=1e-5, abs=1e-5), name


def test_char_gpt_learns_the_same_with_both_attentions(tmp_path: Path) -> None:
    script, figure = ROOT / "examples" / "char_gpt.py", tmp_path / "figure"
    text = ROOT / "examples" / "data" / "text.txt"
    output = run(
        sys.executable, script, "--text", text, "--steps", "5", "--length", "20", "--figure", figure
    )
    lines = dict(re.findall(r"^(\S.*?)  +(.*)$", output, re.MULTILINE))
    assert lines["steps"] == "5"
    for name in ("Strobe", "PyTorch"):
        loss, difference, speed = (float(x.replace(",", "")) for x in lines[name].split())
        assert 3 < loss < 3.9  # nats; it starts near the log of 41 characters, 3.7
        assert difference < 1e-4
        assert speed > 0
    if importlib.util.find_spec("matplotlib") is None:
        assert lines["figure"].startswith("none: ")
    else:
        assert "<svg" in figure.with_suffix(".svg").read_text()
        assert figure.with_suffix(".png").stat().st_size > 0
    assert len(output.split("\n\n", 1)[1].rstrip("\n")) >= 20


@pytest.fixture
def gpt_training() -> Iterator[ModuleType]:
    """bench/gpt_training.py as a module, on one thread: its work here is too little for more."""
    spec = importlib.util.spec_from_file_location("gpt_training", GPT_TRAINING)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt_training"] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)


TINY = {
    "model": "tiny",
    "context": 64,
    "batch": 2,
    "checkpointing": False,
    "device": "cpu",
    "steps": 1,
    "warm_up": 1,
}


def test_gpt_training_on_the_cpu(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    options = {"device": "cpu", "model": "tiny", "context": 64, "tokens": 128, "steps": 1}
    options |= {"warm-up": 0, "attention": "Strobe", "output": file}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    output = run(sys.executable, GPT_TRAINING, *words)
    assert "model  context              Strobe\ntiny        64" in output
    (row,) = json.loads(file.read_text())["rows"]
    assert row["status"] == "ok"
    assert row["tflops"] > 0
    assert (row["batch"], row["context"], row["checkpointing"]) == (2, 64, False)


def test_gpt_training_is_the_same_with_every_attention(gpt_training: ModuleType) -> None:
    losses = [
        gpt_training.train(gpt_training.Configuration(**TINY | changes))["last_loss"]
        for changes in (
            {"attention": "standard"},
            {"attention": "FlashAttention-2"},
            {"attention": "Strobe"},
            {"attention": "Strobe", "checkpointing": True},
        )
    ]
    assert losses == pytest.approx([losses[0]] * 4, abs=2e-3)  # bfloat16
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)


def test_gpt_training_says_what_cannot_run(
    gpt_training: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def result(attention: str) -> dict[str, Any]:
        gpt_training.worker(json.dumps(TINY | {"attention": attention}))
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    assert result("cuDNN")["status"] == "failed"  # there is none for the CPU
    assert "backend" in result("cuDNN")["reason"]

    def greedy(q: Any, k: Any, v: Any) -> Any:
        return q.new_empty(1 << 60)

    monkeypatch.setitem(gpt_training.ATTENTIONS, "standard", greedy)
    assert result("standard")["status"] == "out of memory"

    # As Linux does it to a process when memory is short.
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    configuration = gpt_training.Configuration(**TINY, attention="standard")
    assert gpt_training.run(configuration, 60)["status"] == "out of memory"


@pytest.mark.parametrize(("model", "billions"), [("1.3B", 1.3), ("2.7B", 2.7)])
def test_gpt_training_has_models_of_these_sizes(
    gpt_training: ModuleType, model: str, billions: float
) -> None:
    size = gpt_training.SIZES[model]
    with torch.device("meta"):
        gpt = gpt_training.Gpt(size, 2048, gpt_training.standard_attention, False)
    parameters = sum(p.numel() for p in gpt.parameters())
    assert parameters == pytest.approx(billions * 1e9, rel=0.03)
    # The FlashAttention-2 paper's formula, written out for 2k tokens.
    attention = 12 * size.layers * size.dim * 2048**2
    assert gpt_training.flop(size, parameters, 2048) == 6 * 2048 * parameters + attention
