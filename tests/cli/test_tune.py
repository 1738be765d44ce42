"""strobe tune: what it writes, that it goes on where it was stopped, and what the library makes of
its files, good and bad."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tool import CLI, Tensors, needs_cli, save, strobe

pytestmark = needs_cli

BUCKET = "forward fp32 head_dim 16/16, 1 heads of 1, 64 x 64, threads 1"


def line(**fields: Any) -> str:
    """As STROBE_RECORD writes it, of a small problem."""
    sizes = {"batch": 1, "seqlen_q": 64, "seqlen_k": 64, "heads": 1, "head_dim": 16, "threads": 1}
    return json.dumps({"direction": "forward", "dtype": "fp32"} | sizes | fields) + "\n"


def recorded(folder: Path, *lines: str) -> Path:
    path = folder / "recorded.jsonl"
    path.write_text("".join(lines))
    return path


def table(**changes: Any) -> dict[str, Any]:
    """A table that chooses the portable kernel for BUCKET on this machine."""
    info = json.loads(strobe("info", "--json").stdout)
    choice = {"problems": BUCKET, "kernel": "cpu_portable", "instance": ""}
    choice |= {"block": 64, "gain_percent": 5}
    device = {"device": "cpu", "name": info["cpu"], "compute_capability": 0, "choices": [choice]}
    return {"strobe_tuning": 1, "version": info["strobe"], "devices": [device]} | changes


@pytest.fixture
def qkv(tmp_path: Path) -> Path:
    tensors: Tensors = {name: ("F32", [1, 64, 1, 16], [0.5] * 1024) for name in "qkv"}
    return save(tmp_path / "qkv.safetensors", tensors)


def test_what_is_recorded_is_tuned_and_checked(tmp_path: Path, qkv: Path) -> None:
    record = tmp_path / "recorded.jsonl"
    for causal in ("no", "yes", "yes"):
        run = ("run", qkv, "--threads", "1", "--backward", f"--causal={causal}", "--repeat", "2")
        assert strobe(*run, STROBE_RECORD=str(record)).returncode == 0
    lines = [json.loads(text) for text in record.read_text().splitlines()]
    assert [(x["direction"], x.get("causal", 0)) for x in lines[:4]] == [
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
    ]
    assert all(x["seqlen_q"] == 64 and x["head_dim"] == 16 and x["threads"] == 1 for x in lines)
    out = tmp_path / "tuning.json"
    tuned = strobe("tune", record, "--seconds", "1", "--output", out)
    assert tuned.returncode == 0, tuned.stderr
    assert "4 kinds of problems" in tuned.stdout
    written = json.loads(out.read_text())
    assert list(written) == ["strobe_tuning", "version", "devices"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "qkv.safetensors",
        "recorded.jsonl",
        "tuning.json",
    ]
    found = strobe("info", STROBE_TUNING=str(out)).stdout
    count = len(written["devices"][0]["choices"])
    assert f"{count} choices for this machine: {out}" in found
    checked = strobe("tune", record, "--check", "--seconds", "1", "--output", out)
    assert checked.returncode == 0, checked.stderr
    assert ("geometric mean" in checked.stdout) == (count > 0)


def test_the_cache_folder_is_where_it_goes_and_is_found(tmp_path: Path) -> None:
    record = recorded(tmp_path, line())
    for variables in ({"XDG_CACHE_HOME": str(tmp_path)}, {"HOME": str(tmp_path / "home")}):
        env = {"XDG_CACHE_HOME": "relative", "STROBE_TUNING": ""} | variables
        result = strobe("tune", record, "--seconds", "0", **env)
        assert result.returncode == 0, result.stderr
        path = tmp_path / ("strobe" if "HOME" not in variables else "home/.cache/strobe")
        assert (path / "tuning.json").is_file()
        assert str(path) in strobe("info", **env).stdout
        assert (
            "Tuning            none: STROBE_TUNING = 0"
            in strobe("info", **(env | {"STROBE_TUNING": "0"})).stdout
        )


def test_a_plan_says_that_tuning_chose(tmp_path: Path, qkv: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(table(), indent=1))
    run = ("run", qkv, "--threads", "1", "--why")
    why = strobe(*run, STROBE_TUNING=str(path)).stdout
    assert "kernel     cpu_portable, chosen by tuning" in why
    assert re.search(r"cpu_portable +takes it: chosen by tuning", why)
    assert "chosen by" not in strobe(*run, STROBE_TUNING="0").stdout
    log = strobe(*run, STROBE_TUNING=str(path), STROBE_LOG="1").stderr
    assert log.rstrip().endswith("; chosen by tuning")
    # A limit of the instruction sets comes first; what the choice would be is then none.
    check = strobe("tune", recorded(tmp_path, line()), "--check", "--output", path)
    assert "1 choices for this machine" in check.stdout
    assert "Chosen by tuning: 1 problems" in check.stdout


BAD = {
    "": "is no tuning file: line 1: expected {",
    "null": "is no tuning file: line 1: expected {",
    "{" * 100_000: 'is no tuning file: line 1: expected "strobe_tuning"',
    "\xff\xfe": "is no tuning file: line 1: expected {",
    " " * (2 << 20): "has more than 1048576 bytes",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_files_are_ignored_with_a_word(text: str, tmp_path: Path, qkv: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text)
    info = strobe("info", STROBE_TUNING=str(path))
    assert info.returncode == 0
    assert f"none: {path} {BAD[text]}" in info.stdout
    run = strobe("run", qkv, STROBE_TUNING=str(path))
    assert run.returncode == 0
    assert not run.stderr


def test_what_is_missing_old_or_foreign_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"

    def said() -> str:
        return strobe("info", STROBE_TUNING=str(path)).stdout

    assert f"none: {path} cannot be opened: No such file" in said()
    path.write_text(json.dumps(table(version="0.0.1")))
    assert f"none: {path} is of Strobe 0.0.1, and this is " in said()
    other = table()
    other["devices"][0]["name"] = "Another CPU"
    path.write_text(json.dumps(other))
    assert f"0 choices for this machine, 1 for others: {path}" in said()


def test_other_devices_and_buckets_stay(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    before = table()
    before["devices"][0]["choices"][0]["problems"] = "of another bucket"
    before["devices"].append(before["devices"][0] | {"name": "Another CPU"})
    path.write_text(json.dumps(before))
    assert strobe("tune", recorded(tmp_path, line()), "--seconds", "0", "-o", path).returncode == 0
    after = json.loads(path.read_text())
    assert after["devices"][1] == before["devices"][1]
    assert before["devices"][0]["choices"][0] in after["devices"][0]["choices"]


def test_a_run_that_is_stopped_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "tuning.json"
    # Each takes a second or so, however few rounds it is given: what is left when the first is done
    # takes longer than it takes to see that, however busy the computer is.
    lengths = {"seqlen_q": 2048, "seqlen_k": 2048}
    record = recorded(tmp_path, *(line(head_dim=8 * n, **lengths) for n in range(1, 4)))
    command = [CLI, "tune", str(record), "--seconds", "45", "--output", str(out)]
    for _ in range(5):
        # What a shell runs in the background ignores the signal, and its children do.
        heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        pipes = {"stdout": subprocess.DEVNULL, "preexec_fn": heard}
        with subprocess.Popen(command, **pipes) as stopped:
            while stopped.poll() is None and not (tmp_path / "tuning.json.part").exists():
                time.sleep(0.05)
            stopped.send_signal(signal.SIGINT)
            stopped.wait(60)
        if stopped.returncode != 0:
            break
        out.unlink()  # this process was kept waiting until all were done: once more
    assert stopped.returncode == -signal.SIGINT
    assert not out.exists()
    done = len(json.loads((tmp_path / "tuning.json.part").read_text())["devices"][0]["choices"])
    assert 1 <= done < 3
    goes_on = strobe("tune", record, "--seconds", "1", "--output", out)
    assert goes_on.returncode == 0, goes_on.stderr
    assert f"Goes on: {done} are done." in goes_on.stdout
    assert out.exists()
    assert {p.name for p in tmp_path.iterdir()} == {"tuning.json", "recorded.jsonl"}


def test_two_at_a_time_leave_a_whole_file(tmp_path: Path) -> None:
    out = tmp_path / "tuning.json"
    record = recorded(tmp_path, line(), line(causal=1), line(head_dim=32))
    command = [CLI, "tune", str(record), "--seconds", "1", "--output", str(out)]
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    infos = []
    while any(each.poll() is None for each in running):
        infos.append(strobe("info", STROBE_TUNING=str(out)).stdout)
    assert [each.wait() for each in running] == [0, 0]
    assert not [text for text in infos if "is no tuning file" in text]
    assert json.loads(out.read_text())["devices"]
    assert {p.name for p in tmp_path.iterdir()} == {"tuning.json", "recorded.jsonl"}


def test_a_home_that_cannot_be_written_to(tmp_path: Path, qkv: Path) -> None:
    env = {"HOME": "/dev/null", "XDG_CACHE_HOME": "", "STROBE_TUNING": ""}
    assert strobe("run", qkv, **env).returncode == 0
    assert "Tuning            none\n" in strobe("info", **env).stdout
    refused = strobe("tune", recorded(tmp_path, line()), "--seconds", "0", **env)
    assert refused.returncode == 2
    assert refused.stderr == (
        "strobe tune: cannot make folder /dev/null/.cache/strobe for the choices: Not a directory, "
        "expected --output FILE\n"
    )
    lost = strobe("run", qkv, STROBE_RECORD="/dev/null/record")
    assert lost.returncode == 0
    assert lost.stderr.startswith("strobe: STROBE_RECORD = /dev/null/record: cannot be written: ")
    # A disk that is full.
    lost = strobe("run", qkv, "--backward", STROBE_RECORD="/dev/full")
    assert lost.returncode == 0
    assert lost.stderr == (
        "strobe: STROBE_RECORD = /dev/full: cannot be written: No space left on device\n"
    )


REFUSED = {
    "1" * 70_000: "line 2: longer than 65536 bytes, expected what STROBE_RECORD writes",
    "no JSON": "line 2: no JSON object, expected what STROBE_RECORD writes",
    "[1]": "line 2: no JSON object",
    line(dtype="fp8").strip(): 'line 2: dtype = "fp8", expected one of fp32, bf16, fp16',
    line(batch="two").strip(): 'line 2: batch = "two", expected a number',
    line(batch=1 << 70).strip(): "line 2: batch = ",
    line(varlen=1 << 40).strip(): "line 2: varlen = 1099511627776, expected a number",
    line(colour=3).strip(): "line 2: colour is no field of a problem",
    line(head_dim=1000).strip(): "line 2: head_dim = 1000, expected 1 to 256",
}


@pytest.mark.parametrize("text", REFUSED)
def test_files_of_problems_that_are_none(text: str, tmp_path: Path) -> None:
    result = strobe("tune", recorded(tmp_path, line(), text + "\n"), "-o", tmp_path / "out.json")
    assert result.returncode == 2
    assert REFUSED[text] in result.stderr
    assert result.stderr.count("\n") == 1


def test_nothing_to_choose(tmp_path: Path) -> None:
    record = recorded(tmp_path, line(direction="backward", deterministic=1))
    result = strobe("tune", record, "-o", tmp_path / "out.json")
    assert result.returncode == 2
    assert "there is nothing to choose for any of the problems" in result.stderr
    missing = strobe("tune", tmp_path / "none")
    assert missing.returncode == 2
    assert "cannot read" in missing.stderr


def test_every_choice_is_right() -> None:
    checked = strobe("check", "--choices", "--cases", "3", "--json")
    assert checked.returncode == 0, checked.stdout
    ruled = strobe("check", "--cases", "3", "--json")
    launches = [json.loads(result.stdout)["kernels"] for result in (checked, ruled)]
    assert "cpu_portable" in launches[0]
    assert launches[0] != launches[1]
