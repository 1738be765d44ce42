"""py.typed: what type checkers make of programs that use the installed package (tests/typing)."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import strobe

PROGRAMS = Path(__file__).resolve().parents[1] / "typing"
MISTAKES = {
    number
    for number, line in enumerate((PROGRAMS / "wrong_program.py").read_text().splitlines(), 1)
    if "# mistake: " in line
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has Strobe and NumPy installed: for packages on its path, unlike for files that
    are named to it, a checker looks for py.typed.
    """
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    paths = {str(Path(module.__file__ or "").parents[1]) for module in (strobe, np)}
    (site / "here.pth").write_text("\n".join(sorted(paths)))
    return folder / "bin" / "python"


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert result.stdout, result.stderr
    return result.stdout


def mypy(program: str, python: Path, work: Path) -> dict[int, str]:
    """Messages by line; line 0 is what concerns no line of the program."""
    pytest.importorskip("mypy")
    said = run(
        "mypy",
        "--strict",
        "--config-file=",
        "--cache-dir",
        python.parents[1] / "cache",  # what all programs import is read once
        "--python-executable",
        python,
        PROGRAMS / program,
        cwd=work,
    )
    found = {}
    for line in said.splitlines():
        at = re.fullmatch(rf".*{program}:(\d+): error: (.*)", line)
        if at:
            found[int(at[1])] = at[2]
        elif ": error: " in line:
            found[0] = line
    return found


def pyright(program: str, python: Path, work: Path) -> dict[int, str]:
    """As `mypy`, by basedpyright: pyright that PyPI has whole."""
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed")
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.10"}
    (work / "pyrightconfig.json").write_text(json.dumps(settings))
    (work / program).write_text((PROGRAMS / program).read_text())
    said = json.loads(
        run("basedpyright", "--outputjson", "--pythonpath", python, work / program, cwd=work)
    )
    assert said["summary"]["filesAnalyzed"] == 1
    return {
        entry["range"]["start"]["line"] + 1: entry["message"]
        for entry in said["generalDiagnostics"]
        if entry["severity"] == "error"
    }


Checker = Callable[[str, Path, Path], dict[int, str]]


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_users_program(checker: Checker, python: Path, tmp_path: Path) -> None:
    assert checker("user_program.py", python, tmp_path) == {}


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_program_with_pytorch(checker: Checker, python: Path, tmp_path: Path) -> None:
    """What comes out is a tensor where one went in."""
    pytest.importorskip("torch")
    assert checker("torch_program.py", python, tmp_path) == {}


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_mistakes_are_found(checker: Checker, python: Path, tmp_path: Path) -> None:
    found = checker("wrong_program.py", python, tmp_path)
    assert set(found) == MISTAKES, found
