"""Lengths, offsets, indices, pages that change during a call on the CPU: a child process lives."""

from __future__ import annotations

import subprocess
import sys

import pytest

PREPARE = """
import signal, threading, time
import numpy as np
import strobe

random = np.random.default_rng(1)
batch, rows, heads, dim = 16, 512, 8, 64
def normal(*shape):
    return random.standard_normal(shape, np.float32)
def numbers(low, high, count=batch):  # and between which they stay whatever the others are
    low, high = (np.broadcast_to(np.asarray(x, np.int32), count) for x in (low, high))
    return (high.copy(), low, high)
def offsets(length, slack):
    low = np.arange(batch + 1) * length
    high = low + slack
    high[[0, -1]] = low[[0, -1]]
    return numbers(low, high, batch + 1)
"""

# Each sets `arrays`, and `call`, which gives all that a call writes.
KINDS = {
    "lengths": """
q, k, v = normal(batch, 4, heads, dim), *normal(2, batch, rows, 2, dim)
arrays = {"seqused_q": numbers(0, 4), "seqused_k": numbers(0, rows)}
def call(**numbers):
    return strobe.attention(q, k, v, **numbers)
""",
    "offsets": """
q, k, v = normal(batch * 40, heads, dim), *normal(2, batch * 200, 2, dim)
arrays = {"cu_seqlens_q": offsets(40, 30), "cu_seqlens_k": offsets(200, 90)}
def call(**numbers):
    return strobe.attention(q, k, v, causal=True, max_seqlen_q=70, max_seqlen_k=290, **numbers)
""",
    "backward": """
q, k, v = normal(batch * 40, heads, dim), *normal(2, batch * 200, 2, dim)
arrays = {"cu_seqlens_q": offsets(40, 30), "cu_seqlens_k": offsets(200, 90)}
longest = {"max_seqlen_q": 70, "max_seqlen_k": 290}
first = {name: array[0].copy() for name, array in arrays.items()}
out, lse = strobe.attention(q, k, v, return_lse=True, **longest, **first)
def call(**numbers):
    return np.concatenate(
        [x.ravel() for x in strobe.attention_backward(q, q, k, v, out, lse, **longest, **numbers)]
    )
""",
    "cache": """
q, k, v = normal(batch, 2, heads, dim), *normal(2, 5, rows, 2, dim)
k_new, v_new = normal(2, batch, 2, 2, dim)
arrays = {"seqused_k": numbers(50, rows - 2), "leftpad": numbers(0, 50)}
arrays["cache_batch_idx"] = numbers(0, 4)
def call(**numbers):
    return strobe.attention_with_kvcache(q, k, v, k_new=k_new, v_new=v_new, **numbers)
""",
    "pages": """
pages = 5 * rows // 16
q, k, v = normal(batch, 2, heads, dim), *normal(2, pages, 16, 2, dim)
table = random.integers(0, pages, (batch, rows // 16), np.int32)
arrays = {"seqused_k": numbers(0, rows)}
def call(**numbers):
    return strobe.attention_with_kvcache(q, k, v, block_table=table, **numbers)
""",
}

# Another thread writes while calls run. The table has numbers of pages that are not there now and
# then: such calls are refused, or read another page.
WRITE = """
stop = False
def write():
    number = np.random.default_rng(2)
    while not stop:
        for values, low, high in arrays.values():
            values[:] = number.integers(low, high + 1)
        if "table" in globals():
            table[3, 2] = 1 << 30
            table[3, 2] = 1
writer = threading.Thread(target=write)
writer.start()
end, good = time.monotonic() + 2, 0
while time.monotonic() < end or good < 3:
    try:
        result = call(**{name: array[0] for name, array in arrays.items()})
        assert np.isfinite(result).all() or "lse" in globals()
        good += 1
    except strobe.InvalidArgument:
        assert "table" in globals()
stop = True
writer.join()
print("lives")
"""

# A handler of a signal writes, in the midst of a call of the main thread: nobody reads that.
HANDLE = """
named = {name: array[0] for name, array in arrays.items()}
wanted = call(**named)
handled = []
def write(number, frame):
    handled.append(number)
    for values in named.values():
        values[:] = -(1 << 31)
signal.signal(signal.SIGALRM, write)
signal.setitimer(signal.ITIMER_REAL, 0.05)
got = call(**named)
assert handled
assert np.array_equal(got, wanted)
print("lives")
"""
# Seconds.
LONG = """
q = np.lib.stride_tricks.as_strided(normal(64), (16, 1024, 64, 64), (0, 0, 0, 4))
arrays = {"seqused_q": numbers(1000, 1024), "seqused_k": numbers(900, 1024)}
def call(**numbers):
    return strobe.attention(q, q[:, :, :1], q[:, :, :1], threads=1, **numbers)
"""


def lives(program: str) -> None:
    child = [sys.executable, "-c", PREPARE + program]
    result = subprocess.run(child, capture_output=True, text=True, timeout=600, check=False)
    assert (result.returncode, result.stdout) == (0, "lives\n"), result.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_another_thread_may_write_them(kind: str) -> None:
    lives(KINDS[kind] + WRITE)


def test_a_signal_handler_may_write_them() -> None:
    lives(LONG + HANDLE)
