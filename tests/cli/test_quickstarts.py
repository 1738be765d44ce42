"""The quickstart of the command line works as it is printed. Those of C++ are tested by
tests/consumer/run.sh, those of Python by tests/python/test_documents.py."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLI = os.environ.get("STROBE_CLI", "")


def quickstart() -> str:
    """The shell block of docs/building.md."""
    text = (ROOT / "docs" / "building.md").read_text()
    (block,) = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return str(block)


def run(*words: str | Path, **options: object) -> str:
    result = subprocess.run(  # type: ignore[call-overload]
        words, capture_output=True, text=True, timeout=600, check=False, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return str(result.stdout)


@pytest.mark.skipif(not CLI, reason="STROBE_CLI does not name the program")
def test_command_line(tmp_path: Path) -> None:
    # The program is built already, so `make` has nothing to do, and the tree looks as it leaves it.
    programs = tmp_path / "build" / "release" / "bin"
    programs.mkdir(parents=True)
    (programs / "strobe").symlink_to(Path(CLI).resolve())
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    make = tmp_path / "path" / "make"
    make.parent.mkdir()
    make.write_text('#!/bin/sh\necho "make $*"\n')
    make.chmod(0o755)

    script = quickstart()
    for long, short in (
        ("strobe check ", "strobe check --cases 1 "),
        ("--seqlen 2k", "--seqlen 128 --min-time 0.01"),
    ):
        assert script.count(long) == 1
        script = script.replace(long, short)
    path = os.pathsep.join((str(make.parent), os.environ["PATH"]))
    output = run("bash", "-euc", script, cwd=tmp_path, env=os.environ | {"PATH": path})
    assert output.startswith("make demo\n")
    assert "features are right" in output
    assert (programs / "out.safetensors").stat().st_size > 0
