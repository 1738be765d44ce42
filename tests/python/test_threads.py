"""Several Python threads at once, and children of fork."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import strobe

import cases
from cases import Array, Case


def both(seed: int, seqlen: int, threads: int = 2) -> list[Array]:
    inputs = Case(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, options={"causal": True}).make(
        np.random.default_rng(seed)
    )
    out, lse = strobe.attention(
        inputs.q, inputs.k, inputs.v, causal=True, return_lse=True, threads=threads
    )
    return [
        out,
        lse,
        *strobe.attention_backward(
            inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, causal=True, threads=threads
        ),
    ]


def same(a: list[Array], b: list[Array]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_python_threads_do_not_disturb_each_other() -> None:
    problems = [(seed, 40 + 37 * (seed % 5)) for seed in range(10)]
    wanted = [both(*p) for p in problems]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(4):
            found = list(pool.map(lambda p: both(*p), problems))
            assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


def test_launches_of_two_threads_on_one_stream(device: str) -> None:
    # Keys are divided: on a GPU a second kernel merges what a first one left in the workspace.
    torch = pytest.importorskip("torch")
    shapes = [(1, rows, 1, 64) for rows in (32, 1536, 1536)]
    problems = [
        [
            torch.randn(s, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)
            for s in shapes
        ]
        for seed in range(2)
    ]
    wanted = [strobe.attention(*p) for p in problems]

    def repeat(n: int) -> bool:
        found = [strobe.attention(*problems[n]) for _ in range(300)]
        return all(torch.equal(x, wanted[n]) for x in found)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(repeat, range(2)))


def test_errors_belong_to_their_thread() -> None:
    x = np.ones((1, 8, 1, 16), np.float32)

    def fail(softcap: float) -> str:
        texts = set()
        for _ in range(50):
            with pytest.raises(strobe.InvalidArgument) as caught:
                strobe.attention(x, x, x, softcap=softcap)
            texts.add(str(caught.value))
        assert len(texts) == 1
        return texts.pop()

    with ThreadPoolExecutor(4) as pool:
        for n, text in enumerate(pool.map(fail, [-1.0, -2.0, -3.0, -4.0]), 1):
            assert f"softcap = -{n}" in text


def test_the_interpreter_runs_on_during_a_call(rng: np.random.Generator) -> None:
    def ticks_during_a_call(seqlen: int) -> int:
        x = cases.normal(rng, (1, seqlen, 4, 64))
        done = threading.Event()

        def work() -> None:
            strobe.attention(x, x, x, threads=1)
            done.set()

        worker = threading.Thread(target=work, daemon=True)
        ticks = 0
        worker.start()
        while not done.is_set():
            ticks += 1
            time.sleep(0.001)
        worker.join()
        return ticks

    # A call that held the GIL would let through one or two, however long it takes. On a busy
    # machine a thread may sleep for a while.
    assert any(ticks_during_a_call(seqlen) > 10 for seqlen in (2048, 4096, 8192, 16384))


def _child(seqlen: int, threads: int, queue: Any) -> None:
    queue.put(both(1, seqlen, threads))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("threads", [1, 2, 0])
def test_fork_after_use(threads: int) -> None:
    # Large enough that the parent's OpenMP team has run: a child that inherits it must not wait for
    # its threads.
    wanted = both(1, 600, threads)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [
        context.Process(target=_child, args=(600, threads, queue), daemon=True) for _ in range(2)
    ]
    for child in children:
        child.start()
    try:
        for _ in children:
            found = queue.get(timeout=300)
            assert same(found[:2], wanted[:2])
            for a, b in zip(found[2:], wanted[2:], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        for child in children:
            child.join(300)
            assert child.exitcode == 0
    finally:
        for child in children:
            child.kill()
    assert same(both(1, 600, threads), wanted)


def test_exit_while_another_thread_computes() -> None:
    program = """
import threading, time, numpy as np, strobe
x = np.ones((1, 4096, 8, 64), np.float32)
work = lambda: [strobe.attention(x, x, x) for _ in range(100)]
threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fork_after_pytorch_made_its_pool() -> None:
    pytest.importorskip("torch")
    program = """
import os, signal, numpy as np, torch, strobe
torch.set_num_threads(2)
torch.randn(1 << 20).sigmoid().sum()  # PyTorch's OpenMP threads, which libstrobe shares
x = np.ones((1, 512, 4, 64), np.float32)
child = os.fork()
if child == 0:
    signal.alarm(300)
    strobe.attention(x, x, x, threads=2)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    result = run(program)
    assert (result.returncode, result.stdout, result.stderr) == (0, "0\n", "")
