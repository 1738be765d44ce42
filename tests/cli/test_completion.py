"""`strobe completion`: scripts for bash and zsh, which complete all that the tool parses."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tool import needs_cli, refused, strobe

pytestmark = needs_cli
COMMANDS = ["info", "run", "check", "bench", "tune", "completion", "help"]


def script(shell: str) -> str:
    result = strobe("completion", shell)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def completed(line: str, folder: Path) -> list[str]:
    """What bash offers for the last word of a line."""
    program = (
        script("bash")
        + 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _strobe; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    found = subprocess.run(
        ["bash", "-c", program, "bash", *line.split(" ")],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    assert found.stderr == ""
    return [line for line in found.stdout.splitlines() if line]


def flags(command: str) -> set[str]:
    """Those that a command's help names."""
    found = re.findall(r"^  (-[\w,-]+)", strobe("help", command).stdout, re.MULTILINE)
    return {name for names in found for name in names.split(",")}


@pytest.mark.parametrize("command", COMMANDS)
def test_bash_knows_every_flag(command: str, tmp_path: Path) -> None:
    assert set(completed(f"strobe {command} -", tmp_path)) == flags(command)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("strobe ", [*COMMANDS, "--version", "-h", "--help"]),
        ("strobe ch", ["check"]),
        ("strobe bench --device c", ["cpu", "cuda"]),
        ("strobe bench --dtype ", ["fp32", "bf16", "fp16"]),
        ("strobe bench --dtype fp32,b", ["fp32,bf16"]),
        ("strobe bench --direction b", ["backward", "both"]),
        ("strobe bench --seqlen ", []),
        ("strobe check --j", ["--json"]),
        ("strobe run -o in", ["in one.safetensors"]),
        ("strobe run in", ["in one.safetensors"]),
        ("strobe completion ", ["bash", "zsh"]),
        ("strobe help be", ["bench"]),
    ],
)
def test_bash(line: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "in one.safetensors").touch()
    assert completed(line, tmp_path) == words


def test_zsh_knows_every_flag() -> None:
    text = script("zsh")
    for command in COMMANDS:
        (part,) = re.findall(rf"^    {command}\)\n(.*?);;", text, re.MULTILINE | re.DOTALL)
        assert set(re.findall(r"^ +'(-[\w-]+)\[", part, re.MULTILINE)) == flags(command)
    assert ":value:(cpu cuda)'" in text


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh")
def test_zsh_reads_its_script(tmp_path: Path) -> None:
    (tmp_path / "_strobe").write_text(script("zsh"))
    result = subprocess.run(
        ["zsh", "-n", tmp_path / "_strobe"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_refusals() -> None:
    refused(strobe("completion", "fish"), "SHELL = fish", "expected bash or zsh")
    refused(
        strobe("completion"), "SHELL is missing, expected bash or zsh: see `strobe help completion`"
    )
