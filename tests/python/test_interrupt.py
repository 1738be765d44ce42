"""Signals in a long call: a child process gets one and ends as Python code would."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

CALLS = {
    "attention": "strobe.attention(x, x, x)",
    "attention_backward": "strobe.attention_backward(x, x, x, x, out, lse)",
    "out": "strobe.attention(x, x, x, out=out, return_lse=True, causal=True, threads=1)",
    "dropout_mask": "strobe.dropout_mask(1, 1, 1 << 15, 1 << 16, dropout_p=0.5)",
}
TORCH_CALLS = {
    "flash_attn_func": "flash_attn_func(t, t, t)",
    "operator": "backward(t, None, t, t, t, *results, *options)",
    "scaled_dot_product_attention": "sdpa(s, s, s)",
}

# A minute or more on two cores, in items of some hundredths of a second. One head's values stand
# for all, so that there is little to make.
PREPARE = """
import os, signal, sys, threading, time
import numpy as np
import strobe
# Whoever runs the tests in the background may have them ignore it, and Python then leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)
shape = (1, 16384, 128, 64)
x = np.lib.stride_tricks.as_strided(np.ones(1 << 20, np.float32), shape, (0, 256, 0, 4))
out, lse = np.zeros(shape, np.float32), np.zeros((1, 128, 16384), np.float32)
"""
PREPARE_TORCH = """
import torch
import strobe.torch
from strobe.flash_attn import flash_attn_func
t = torch.from_numpy(x)
results = torch.from_numpy(out), torch.from_numpy(lse)
backward = torch.ops.strobe.attention_backward
options = (None,) * 6 + (0.0, None, False, -1, -1, 0.0, False)
s = t.transpose(1, 2)
def sdpa(q, k, v):
    with strobe.torch.sdpa_kernel():
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
"""
ONE_HEAD = """
y = x[:, :, :1]
strobe.attention(y[:, :64], y[:, :64], y[:, :64])  # which makes the threads
start = time.monotonic()
strobe.attention(y, y, y)
print(time.monotonic() - start, flush=True)
"""
SAY_WHEN = """
def send(number, after):
    def wait_and_send():
        time.sleep(after)
        print(time.monotonic(), flush=True)
        os.kill(os.getpid(), number)
    threading.Thread(target=wait_and_send, daemon=True).start()
"""


def run(program: str) -> tuple[int, str, str]:
    """Its exit status and what it wrote."""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    return result.returncode, result.stdout, result.stderr


def interrupt_each(prepare: str, calls: dict[str, str]) -> None:
    """One process for all: it takes seconds to import PyTorch."""
    program = prepare + SAY_WHEN + ONE_HEAD
    for name, call in calls.items():
        program += f"""
send(signal.SIGINT, 0.5)
try:
    {call}
    print("not interrupted: {name}", file=sys.stderr)
except KeyboardInterrupt:
    print(time.monotonic(), {name!r}, flush=True)
"""
    status, output, errors = run(program + "os._exit(7)\n")
    assert (status, errors) == (7, "")
    one_head, *lines = output.splitlines()
    for sent, caught in zip(lines[::2], lines[1::2], strict=True):
        at, _, name = caught.partition(" ")
        took = float(at) - float(sent)
        # A fifth of what the shortest of these calls takes, on a machine as busy as this one is.
        # Some tenths of a second are wanted.
        assert took < 128 * float(one_head) / 5, name


def test_control_c_ends_a_call() -> None:
    interrupt_each(PREPARE, CALLS)


def test_control_c_ends_a_call_from_pytorch() -> None:
    pytest.importorskip("torch")
    interrupt_each(PREPARE + PREPARE_TORCH, TORCH_CALLS)


def test_the_program_ends_as_python_does() -> None:
    program = f"{PREPARE}{SAY_WHEN}\nsend(signal.SIGINT, 0.5)\n{CALLS['attention']}\n"
    status, _, errors = run(program)
    assert status in (-2, 130)
    assert re.search(r"^KeyboardInterrupt", errors, re.MULTILINE)
    assert "Exception ignored" not in errors


def test_a_handler_of_the_callers_own() -> None:
    program = f"""{PREPARE}{SAY_WHEN}
class Late(Exception): pass
seen = []
def handle(number, frame):
    seen.append(number)
    # As a handler may: a call in the call.
    y = x[:, :512]
    strobe.attention(y, y, y)
    if number == signal.SIGUSR2: raise Late
signal.signal(signal.SIGUSR1, handle)
signal.signal(signal.SIGUSR2, handle)
send(signal.SIGUSR1, 0.3)
send(signal.SIGUSR2, 0.9)
try:
    {CALLS["attention"]}
except Late:
    assert seen == [signal.SIGUSR1, signal.SIGUSR2], seen
    y = x[:, :512]
    assert np.isfinite(strobe.attention(y, y, y)).all()
    os._exit(7)
"""
    status, _, errors = run(program)
    assert (status, errors) == (7, "")


def test_other_threads_go_on() -> None:
    """Handlers run on the main thread; a call elsewhere is not theirs to stop."""
    program = f"""{PREPARE}{SAY_WHEN}
y = x[:, :1536]
done = []
worker = threading.Thread(target=lambda: done.append(strobe.attention(y, y, y)))
worker.start()
send(signal.SIGINT, 0.05)
try:
    worker.join()
    time.sleep(60)  # to the signal
except KeyboardInterrupt:
    while not done:
        time.sleep(0.01)
    assert np.isfinite(done[0]).all()
    os._exit(7)
"""
    status, _, errors = run(program)
    assert (status, errors) == (7, "")


def test_other_threads_go_on_beside_a_mask() -> None:
    """It takes seconds, of which a thread that only counts gets its share."""
    program = f"""{PREPARE}
ticks = []
def tick():
    while True:
        ticks.append(time.monotonic())
        time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
time.sleep(0.05)
start = time.monotonic()
strobe.dropout_mask(1, 1, 1 << 13, 1 << 13, dropout_p=0.5)
end = time.monotonic()
inside = [x for x in ticks if start < x < end]
assert max(b - a for a, b in zip([start, *inside], [*inside, end])) < (end - start) / 2, len(inside)
os._exit(7)
"""
    status, _, errors = run(program)
    assert (status, errors) == (7, "")


def test_tensors_are_freed() -> None:
    """The exception's traceback does not hold the call's arrays once it is gone."""
    program = f"""{PREPARE}{SAY_WHEN}
import gc, weakref
gc.disable()
send(signal.SIGINT, 0.3)
def work():
    result = np.empty(shape, np.float32)
    watched.append(weakref.ref(result))
    strobe.attention(x, x, x, out=result)
watched = []
try:
    work()
except KeyboardInterrupt:
    pass
assert watched[0]() is None
os._exit(7)
"""
    status, _, errors = run(program)
    assert (status, errors) == (7, "")
