"""`strobe bench --ranks` and the examples of rings, where there are no GPUs, or no NCCL: what they
say. A driver that is none (tests/fake_gpu.cpp) stands for eight GPUs.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tool import CLI, refused, strobe

PROGRAMS = Path(CLI).parent
FAKE = PROGRAMS.parent / "tests" / "fake_gpu" / "libstrobe_fake_gpu.so"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["--ranks without --device cuda, expected both"]),
        (["--decode"], ["--ranks with --decode, expected one of them"]),
        (["--seqlen-k", "64"], ["--ranks with --seqlen-k, expected --seqlen alone"]),
        (["--device", "cuda", "--device-index", "1"], ["--device-index = 1 with --ranks"]),
        (["--device", "cuda", "--ranks", "1000"], ["--ranks = 1000, expected at most "]),
        (
            ["--device", "cuda", "--documents", "4", "--batch", "2"],
            ["--batch = 2 with --documents, expected 1"],
        ),
        (["--documents", "0"], ["--documents = 0, expected a whole number from 1 to "]),
        (["--ranks", "0"], ["--ranks = 0, expected a whole number from 1 to "]),
    ],
)
def test_refusals(args: list[str], words: list[str]) -> None:
    refused(strobe("bench", "--ranks", "2", *args), *words)


@pytest.fixture
def gpus_without_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not FAKE.is_file():
        pytest.skip("the tests in C++ were not built")
    (tmp_path / "libcuda.so.1").symlink_to(FAKE)
    # Before an NCCL that may be there.
    (tmp_path / "libnccl.so.2").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


@pytest.mark.usefixtures("gpus_without_nccl")
def test_no_nccl() -> None:
    refused(
        strobe("bench", "--device", "cuda", "--ranks", "2"),
        "no NCCL, which carries messages between GPUs: libnccl.so.2: ",
    )
    refused(
        strobe("bench", "--device", "cuda", "--ranks", "9"),
        "--ranks = 9, expected at most 8, the GPUs of this machine\n",
    )


def test_what_no_kernel_takes_ends_the_command_before_it_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not FAKE.is_file():
        pytest.skip("the tests in C++ were not built")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(FAKE.parent))
    command = ("bench", "--device", "cuda", "--ranks", "2")
    result = strobe(*command, "--dtype", "fp32")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "no kernel takes forward fp32" in result.stderr


def printed(*words: str) -> str:
    command = [str(PROGRAMS / words[0]), *words[1:]]
    if not Path(command[0]).is_file():
        pytest.skip("the examples were not built")
    result = subprocess.run(
        command, env=os.environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.usefixtures("gpus_without_nccl")
@pytest.mark.parametrize("words", [("ring_two_gpus",), ("ring_ranks", "0", "2", "nowhere")])
def test_examples_say_that_there_is_no_nccl(words: tuple[str, ...]) -> None:
    text = printed(*words)
    assert text.startswith(f"{words[0]}: no NCCL, which carries messages between GPUs: ")
    assert text.endswith(": nothing to show\n")
