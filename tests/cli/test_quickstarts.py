"""README's quickstarts for C++ and the command line work as they are printed. tests/python has the
Python ones."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLI = os.environ.get("STROBE_CLI", "")
LIBRARY = os.environ.get("STROBE_LIBRARY", "")  # not set where it is built with sanitizers


def quickstart(language: str) -> str:
    """README's block of six lines in that language."""
    (block,) = re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert block.count("\n") == 6
    return str(block)


def run(*words: str | Path, **options: object) -> str:
    result = subprocess.run(  # type: ignore[call-overload]
        words, capture_output=True, text=True, timeout=120, check=False, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return str(result.stdout)


@pytest.mark.skipif(not LIBRARY, reason="STROBE_LIBRARY does not name the library")
def test_cpp(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, program = tmp_path / "quickstart.cpp", tmp_path / "quickstart"
    source.write_text(quickstart("cpp"))
    library = Path(LIBRARY).resolve()
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}"]
    run(compiler, *flags, source, library, f"-Wl,-rpath,{library.parent}", "-o", program)
    run(program)


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

    script = quickstart("sh")
    for long, short in (
        ("strobe check ", "strobe check --cases 1 "),
        ("--seqlen 2048", "--seqlen 128 --min-time 0.01"),
    ):
        assert script.count(long) == 1
        script = script.replace(long, short)
    path = os.pathsep.join((str(make.parent), os.environ["PATH"]))
    output = run("bash", "-euc", script, cwd=tmp_path, env=os.environ | {"PATH": path})
    assert output.startswith("make demo\n")
    assert "features are right" in output
    assert (programs / "out.safetensors").stat().st_size > 0
