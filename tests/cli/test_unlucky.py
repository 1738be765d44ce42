"""The command line tool where its surroundings fail it: streams, signals, files, memory."""

from __future__ import annotations

import json
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tool import (
    CLI,
    SHAPE,
    K,
    Q,
    Tensors,
    V,
    limited,
    limits_address_space,
    load,
    needs_cli,
    qkv,
    raw,
    refused,
    save,
    strobe,
)

pytestmark = needs_cli
BENCH = ["bench", "--seqlen", "16", "--head-dim", "8", "--heads", "1", "--min-time", "0"]


def shell(script: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which $0 is the tool and $1 ... are `args`."""
    return subprocess.run(
        ["sh", "-c", script, CLI, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


# Standard streams.


@pytest.mark.parametrize("where", [">/dev/full", ">&-"])
@pytest.mark.parametrize(
    "args",
    [
        ["info"],
        ["info", "--json"],
        ["check", "--cases", "1"],
        BENCH,
        [*BENCH, "--json"],
        ["--help"],
        ["run", "--help"],
        ["--version"],
        [],
    ],
    ids=" ".join,
)
def test_stdout_that_takes_nothing_is_an_error(args: list[str], where: str) -> None:
    result = shell(f'"$0" "$@" {where}', *args)
    assert result.returncode == 2
    assert result.stderr.startswith("strobe")
    assert "cannot write standard output: " in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("where", [">/dev/full", ">&-"])
@pytest.mark.parametrize("flags", ["", "--why --backward"])
def test_run_without_stdout_leaves_a_whole_file_or_none(
    plain: Path, tmp_path: Path, where: str, flags: str
) -> None:
    output = tmp_path / "out"
    result = shell(f'"$0" run "$1" -o "$2" {flags} {where}', plain, output)
    assert result.returncode == 2
    assert "cannot write standard output" in result.stderr
    if output.exists():
        load(output)
    assert not list(tmp_path.glob("*.tmp*"))


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("args", [["run", "nowhere"], ["bench", "--seqlen", "x"], ["foo"]])
def test_an_error_that_nobody_can_read(args: list[str], where: str) -> None:
    assert shell(f'"$0" "$@" {where}', *args).returncode == 2


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full", "<&-", "<&- 2>&-"])
def test_closed_streams_are_not_the_output_file(plain: Path, tmp_path: Path, where: str) -> None:
    """With stderr closed the next file to be opened would get its number."""
    output = tmp_path / "out"
    result = shell(f'"$0" run "$1" -o "$2" {where}', plain, output)
    assert result.returncode == 0
    assert set(load(output)) == {"out", "lse"}


def test_a_reader_that_goes_away(plain: Path) -> None:
    """By the signal of old; and as an error where the signal is ignored."""
    result = shell('("$0" run "$1" --why; echo $? >&2) | true', plain)
    assert result.stderr.strip() in {"0", str(128 + signal.SIGPIPE)}
    result = shell('trap "" PIPE; ("$0" run "$1" --why; echo $? >&2) | sleep 0', plain)
    assert "cannot write standard output: Broken pipe" in result.stderr or result.stderr == "0\n"


# Signals.


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ignored", [True, False])
def test_ignored_signals_stay_ignored(
    tmp_path: Path, number: signal.Signals, ignored: bool
) -> None:
    """While the output is written: a signal that is not ignored leaves nothing behind."""
    rows = 1 << 17
    shape = [1, rows, 4, 8]
    path = tmp_path / "in.safetensors"
    size = rows * 4 * 8 * 4
    header = {
        "q": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]},
        "k": {"dtype": "F32", "shape": [1, 1, 4, 8], "data_offsets": [size, size + 128]},
        "v": {"dtype": "F32", "shape": [1, 1, 4, 8], "data_offsets": [size + 128, size + 256]},
    }
    path.write_bytes(raw(header, bytes(size + 256)))
    output = tmp_path / "out"
    handling = f"--{'ignore' if ignored else 'default'}-signal={number.name[3:]}"
    process = subprocess.Popen(
        ["env", handling, CLI, "run", path, "-o", output, "--repeat", "1"],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    seen = False
    while process.poll() is None and time.monotonic() < deadline and not seen:
        seen = any(tmp_path.glob("out.tmp*"))
    if seen:
        process.send_signal(number)
    code = process.wait(600)
    if ignored:
        assert code == 0
        assert set(load(output)) == {"out", "lse"}
    else:
        assert code in {-number, 0}  # 0: it was done before the signal came
        assert output.exists() == (code == 0)
    assert not list(tmp_path.glob("out.tmp*"))


# The output file.


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
def test_a_replaced_file_keeps_its_permissions(plain: Path, tmp_path: Path, mode: int) -> None:
    output = tmp_path / "out"
    output.write_text("old")
    output.chmod(mode)
    assert strobe("run", plain, "-o", output, "--repeat", "1").returncode == 0
    assert stat.S_IMODE(output.stat().st_mode) == mode
    assert set(load(output)) == {"out", "lse"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_replaced_file_keeps_its_owner(plain: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_text("old")
    os.chown(output, 1234, 5678)
    assert strobe("run", plain, "-o", output, "--repeat", "1").returncode == 0
    assert (output.stat().st_uid, output.stat().st_gid) == (1234, 5678)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_may_not_be_written_is_not_replaced(plain: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_text("old")
    output.chmod(0o444)
    refused(strobe("run", plain, "-o", output), "cannot write", "Permission denied")
    assert output.read_text() == "old"


@pytest.mark.parametrize("args", [["-o", ""], ["--output", ""], ["--output", "x", "-o", ""]])
def test_an_output_without_a_name(plain: Path, args: list[str]) -> None:
    refused(strobe("run", plain, *args), '--output = "", expected a file name')


def test_paths_of_any_length_give_short_messages(plain: Path, tmp_path: Path) -> None:
    refused(strobe("run", "d/" * 2000 + "file"), "cannot open .../d/", "/file: ")
    refused(strobe("run", plain, "-o", "d/" * 1900 + "file"), "cannot write .../d/", "No such file")
    long_name = strobe("run", plain, "-o", "f" * 255, "--repeat", "1")
    assert long_name.returncode == 2
    assert "cannot write ...fff" in long_name.stderr
    assert "File name too long" in long_name.stderr
    refused(strobe("run", tmp_path / "\x1b[31m\n"), "\\x1b[31m\\x0a: No such file")
    refused(strobe("run", ""), 'cannot open "": No such file')


# What is read, and how much of it.


USED = """
import resource, subprocess, sys
result = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(result.returncode, used.ru_maxrss * 1024, used.ru_utime + used.ru_stime)
"""


@dataclass
class Usage:
    code: int  # of its exit
    memory: int  # bytes at its peak
    seconds: float  # of a processor, which other programs do not take from it
    error: str  # what it wrote to standard error


def usage(*args: str | Path) -> Usage:
    """What a run of the tool took.

    A process starts with its parent's peak of memory as its own, so a small one comes between.
    """
    result = subprocess.run(
        [sys.executable, "-c", USED, CLI, *map(str, args)],
        capture_output=True,
        text=True,
        check=True,
    )
    code, memory, seconds = result.stdout.split()
    return Usage(int(code), int(memory), float(seconds), result.stderr)


@pytest.mark.parametrize(
    "first",
    [b"\0" * 64, b"\xff" * 64, b"PK\x03\x04" * 16, struct.pack("<Q", 9000) + b"junk"],
    ids=["zeros", "ones", "zip", "short"],
)
def test_six_gigabytes_of_junk_are_refused_by_their_first_bytes(
    tmp_path: Path, first: bytes
) -> None:
    path = tmp_path / "junk"
    path.write_bytes(first)
    os.truncate(path, 6 << 30)
    used = usage("run", path)
    assert used.code == 2
    assert "not a safetensors file?" in used.error
    assert used.memory < 200 << 20  # AddressSanitizer's own are 100
    assert used.seconds < 1  # to read them takes longer


def sparse(path: Path, name: str, size: int) -> Path:
    """q, k and v of 864 bytes each, and behind them `size` bytes that take no room on the disk."""
    header = {
        n: {"dtype": "F32", "shape": list(SHAPE), "data_offsets": [at, at + 1728]}
        for n, at in (("q", 0), ("k", 1728), ("v", 3456))
    }
    header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [5184, 5184 + size]}
    content = raw(header)
    path.write_bytes(content)
    os.truncate(path, len(content) + 5184 + size)
    return path


def test_only_what_is_used_is_read(tmp_path: Path) -> None:
    used = usage("run", sparse(tmp_path / "f", "other", 6 << 30))
    assert (used.code, used.error) == (0, "")
    assert used.memory < 200 << 20


def test_a_problem_that_no_kernel_takes_is_refused_before_its_tensors_are_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "f"
    rows = 1 << 19
    size = rows * 257 * 8
    header = {
        n: {"dtype": "F32", "shape": [1, rows, 2, 257], "data_offsets": [i * size, i * size + size]}
        for i, n in enumerate("qkv")
    }
    content = raw(header)
    path.write_bytes(content)
    os.truncate(path, len(content) + 3 * size)
    used = usage("run", path)
    assert used.code == 2
    assert "q: head_dim = 257, expected 1 to 256" in used.error
    assert used.memory < 200 << 20  # AddressSanitizer's own are 100


@limits_address_space
def test_promises_of_a_header_take_no_memory(tmp_path: Path) -> None:
    """A file, or a pipe, of a hundred bytes that promises a terabyte."""
    shape = [1, 1 << 30, 4, 64]
    header = {"q": {"dtype": "F32", "shape": shape, "data_offsets": [0, 1 << 40]}}
    path = tmp_path / "f"
    path.write_bytes(raw(header))
    used = usage("run", path)
    assert used.code == 2
    assert "cut off" in used.error
    assert used.memory < 200 << 20  # AddressSanitizer's own are 100
    result = shell('cat "$1" | (ulimit -v 4000000; "$0" run /dev/stdin)', path)
    assert result.returncode == 2
    assert "cut off" in result.stderr


def test_pipes(plain: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    wanted = tmp_path / "wanted"
    assert strobe("run", plain, "-o", wanted, "--repeat", "1").returncode == 0
    for script in ('cat "$1" | "$0" run /dev/stdin -o "$2"', '"$0" run /dev/stdin -o "$2" <"$1"'):
        result = shell(script, plain, output)
        assert result.returncode == 0, result.stderr
        assert load(output) == load(wanted)
        output.unlink()
    refused_by = {
        '(cat "$1"; echo x) | "$0" run /dev/stdin -o "$2"': "more data than its tensors take",
        'head -c 900 "$1" | "$0" run /dev/stdin -o "$2"': "cut off",
        'head -c 9 "$1" | "$0" run /dev/stdin -o "$2"': "cut off",
        'true | "$0" run /dev/stdin -o "$2"': "nothing was written to it",
        '"$0" run /dev/zero -o "$2"': "not a regular file",
    }
    for script, word in refused_by.items():
        refused(shell(script, plain, output), word)
        assert not output.exists()


def test_a_file_that_is_cut_short_meanwhile_never_crashes(tmp_path: Path) -> None:
    """Another program empties and refills the file while it is read."""
    path = save(tmp_path / "f", qkv())
    content = path.read_bytes()
    done = threading.Event()

    def disturb() -> None:
        while not done.is_set():
            os.truncate(path, len(content) // 2)
            path.write_bytes(content)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(40):
            result = strobe("run", path, "--repeat", "1")
            assert result.returncode in {0, 2}, result
            assert result.stderr.count("\n") == (result.returncode == 2)
    finally:
        done.set()
        thread.join()


@limits_address_space
def test_a_little_memory_is_an_error(plain: Path) -> None:
    big = plain.parent / "big"
    header = {
        n: {"dtype": "F32", "shape": [1, 1 << 16, 16, 64], "data_offsets": [i << 28, (i + 1) << 28]}
        for i, n in enumerate("qkv")
    }
    content = raw(header)
    big.write_bytes(content)
    os.truncate(big, len(content) + (3 << 28))
    result = subprocess.run(
        [*limited("AS", 300 << 20), CLI, "run", big, "--threads", "1"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 2
    assert "out of memory" in result.stderr


@limits_address_space
def test_more_threads_than_the_system_makes() -> None:
    """GNU's OpenMP would end the process: the launch, and the read beside it, do with fewer."""
    # So much work that the plan wants all threads.
    work = ["--batch", "64", "--heads", "64", "--heads-kv", "1", "--seqlen-k", "4096"]
    args = ["bench", "--decode", "--min-time", "0", "--threads", "4000", "--dtype", "bf16", *work]
    result = subprocess.run(
        [*limited("AS", 4 << 30), CLI, *args, "--head-dim", "64", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert json.loads(result.stdout)["results"][0]["threads"] >= 512  # of the plan


# Which order of dimensions is meant.


def heads_first(name: str, heads: int, seqlen: int) -> tuple[str, tuple[str, list[int], list]]:
    return name, ("F32", [1, heads, seqlen, 8], [0.5] * (heads * seqlen * 8))


@pytest.mark.parametrize(
    "tensors",
    [
        [heads_first("q", 4, 6), heads_first("k", 4, 10), heads_first("v", 4, 10)],
        [heads_first("q", 4, 10), heads_first("k", 2, 15), heads_first("v", 2, 15)],
        [*(heads_first(n, 4, 6) for n in "qkv"), ("alibi_slopes", ("F32", [4], [0.5] * 4))],
        [*(heads_first(n, 4, 6) for n in "qkv"), ("dlse", ("F32", [1, 4, 6], [0.5] * 24))],
    ],
)
def test_the_other_order_of_dimensions_is_guessed(
    tmp_path: Path, tensors: list[tuple[str, tuple[str, list[int], list]]]
) -> None:
    file: Tensors = dict(tensors)
    path = save(tmp_path / "f", file)
    refused(strobe("run", path, "-o", tmp_path / "out"), "did you mean --layout bhsd?")
    assert strobe("run", path, "--layout", "bhsd", "--repeat", "1").returncode == 0
    if "dlse" in file or "alibi_slopes" in file:
        return
    b, h, s, d = file["q"][1]
    turned = {n: (t, [x[0], x[2], x[1], x[3]], v) for n, (t, x, v) in file.items()}
    assert turned["q"][1] == [b, s, h, d]
    other = save(tmp_path / "g", turned)
    refused(strobe("run", other, "--layout", "bhsd"), "did you mean --layout bshd?")


def test_no_guess_where_neither_order_makes_sense(tmp_path: Path) -> None:
    tensors: Tensors = {
        "q": ("F32", list(SHAPE), Q),
        "k": ("F32", [2, 9, 6, 4], K),
        "v": ("F32", list(SHAPE), V),
    }
    result = strobe("run", save(tmp_path / "f", tensors))
    refused(result, "k: head_dim = 4")
    assert "did you mean" not in result.stderr
