"""What docs/performance.md and docs/testing.md say of files that are here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTING = (ROOT / "docs/testing.md").read_text()


def test_tables_are_what_the_results_say(tmp_path: Path) -> None:
    for part in ("bench/results", "docs"):
        shutil.copytree(ROOT / part, tmp_path / part)
    script = shutil.copy(ROOT / "bench/tables.py", tmp_path / "bench")

    def check() -> int:
        return subprocess.run(
            [sys.executable, script, "--check"], capture_output=True, check=False
        ).returncode

    assert check() == 0, "run python bench/tables.py"
    # And another figure in a result is noticed.
    path = tmp_path / "bench/results/gpu_h100_bf16.json"
    result = json.loads(path.read_text())
    result["grid"][0]["fwd"]["strobe"] *= 2
    path.write_text(json.dumps(result))
    assert check() == 1


def named_files() -> list[str]:
    return sorted(set(re.findall(r"`([\w/.*-]+\.(?:py|cpp|h|sh|def))(?: [^`]*)?`", TESTING)))


@pytest.mark.parametrize("name", named_files())
def test_a_file_that_is_named_is_here(name: str) -> None:
    folders = [
        "",
        "check",
        "oracle",
        "tests",
        "tests/unit",
        "tests/python",
        "tests/gpu",
        "src/cuda", "include/strobe",
    ]
    assert any(list((ROOT / folder).glob(name)) for folder in folders), name


def test_parts_of_the_gpu_tests_that_are_named_are_here() -> None:
    sources = "".join(
        (ROOT / "tests/gpu" / name).read_text() for name in ("run_gpu_tests.py", "promises.py")
    )
    parts = set(re.findall(r"^def test_(\w+)", sources, re.M))
    named = {part for words in re.findall(r"--only ([\w,]+)", TESTING) for part in words.split(",")}
    assert named
    assert named <= parts, named - parts
