"""What tools and logs show of a call: ranges of PyTorch's profiler, STROBE_LOG's lines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strobe

torch = pytest.importorskip("torch")

import strobe.torch  # noqa: E402
from strobe import _core, _profiler  # noqa: E402
from strobe.flash_attn import flash_attn_func, flash_attn_with_kvcache  # noqa: E402

T = torch.randn(1, 5, 2, 8)
OUT, LSE = strobe.attention(T, T, T, return_lse=True)


def kernel(backward: bool = False) -> str:
    plan = strobe.plan(T, T, T, backward=backward)
    return plan.splitlines()[1].split()[1]


def ranges(call: Callable[[], Any]) -> list[Any]:
    """Strobe's events while `call` runs, in their order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        call()
    events = [e for e in found.events() if e.name.startswith("strobe::") and "[" in e.name]
    return sorted(events, key=lambda e: e.time_range.start)


def names(call: Callable[[], Any]) -> list[str]:
    return [e.name for e in ranges(call)]


def train() -> None:
    q = T.clone().requires_grad_()
    flash_attn_func(q, T, T).sum().backward()


def in_block() -> None:
    q = T.transpose(1, 2).clone().requires_grad_()
    with strobe.torch.sdpa_kernel():
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    out.sum().backward()


def test_ranges() -> None:
    forward, backward = f"strobe::forward [{kernel()}]", f"strobe::backward [{kernel(True)}]"
    assert names(lambda: strobe.attention(T, T, T)) == [forward]
    assert names(lambda: flash_attn_func(T, T, T)) == [forward]
    assert names(lambda: flash_attn_with_kvcache(T, T, T)) == [forward]
    assert names(lambda: strobe.attention_backward(OUT, T, T, T, OUT, LSE)) == [backward]
    assert names(train) == [forward, backward]
    assert names(in_block) == [forward, backward]
    outs, lses = torch.stack([OUT, OUT]), torch.stack([LSE, LSE])
    assert names(lambda: strobe.merge(outs, lses)) == ["strobe::merge [cpu]"]


PLAIN = """
import numpy, torch, strobe
x = torch.randn(1, 5, 2, 8)
strobe.attention(x, x, x)
with torch.profiler.profile() as found:
    strobe.attention(x, x, x)
assert [e.name for e in found.events() if e.name.startswith("strobe::forward [cpu_")]
"""


def test_ranges_without_strobes_modules_for_pytorch() -> None:
    subprocess.run([sys.executable, "-c", PLAIN], check=True, timeout=300)


def test_a_range_in_a_compiled_program() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: flash_attn_func(q, q, q), backend="aot_eager")
    compiled(T)
    assert names(lambda: compiled(T)) == [f"strobe::forward [{kernel()}]"]


def test_arrays_of_others_have_none() -> None:
    """Who profiles PyTorch asks about PyTorch."""
    x = T.numpy()
    assert names(lambda: strobe.attention(x, x, x)) == []


def test_a_range_ends_where_the_launch_is_refused() -> None:
    packed = T[0]
    offsets = torch.tensor([0, 9, 5], dtype=torch.int32)

    def refused() -> None:
        with pytest.raises(strobe.InvalidArgument, match="cu_seqlens"):
            strobe.attention(
                packed,
                packed,
                packed,
                cu_seqlens_q=offsets,
                cu_seqlens_k=offsets,
                max_seqlen_q=9,
                max_seqlen_k=9,
            )
        strobe.attention(T, T, T)

    first, second = ranges(refused)
    assert second.cpu_parent is None
    assert first.time_range.end <= second.time_range.start


def test_without_a_profiler_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def count(name: str) -> Any:
        asked.append(name)
        raise AssertionError

    monkeypatch.setattr(torch.autograd.profiler, "record_function", count)
    train()
    strobe.merge(torch.stack([OUT, OUT]), torch.stack([LSE, LSE]))
    assert asked == []
    with torch.profiler.profile(), pytest.raises(AssertionError):
        strobe.attention(T, T, T)
    assert len(asked) == 1
    assert _profiler._FLAG in torch.autograd.profiler.__dict__


def test_arguments_of_set_profiler() -> None:
    every: list[Any] = [(1, "x"), ({}, 1), ({},)]
    for wrong in every:
        with pytest.raises(TypeError):
            _core.set_profiler(*wrong)


# ----------------------------------------------------------------------------------------- the log

PROGRAM = """
import numpy as np, strobe
x = np.ones((1, 3, 2, 8), np.float32)
for _ in range(3):
    out, lse = strobe.attention(x, x, x, return_lse=True)
strobe.attention_backward(out, x, x, x, out, lse)
strobe.plan(x, x, x, causal=True)
"""


def stderr_of(**environment: str) -> str:
    variables = {**os.environ, **environment}
    if not environment:
        variables.pop("STROBE_LOG", None)
    program = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(
        program, env=variables, capture_output=True, text=True, timeout=300, check=True
    )
    return run.stderr


def test_the_log() -> None:
    x = np.ones((1, 3, 2, 8), np.float32)
    lines = stderr_of(STROBE_LOG="1").splitlines()
    assert len(lines) == 2, lines
    for line, backward in zip(lines, (False, True), strict=True):
        problem, name = (
            row.split(maxsplit=1)[1]
            for row in strobe.plan(x, x, x, backward=backward).splitlines()[:2]
        )
        assert line.startswith(f"strobe: {name} computes {problem}")
        for row in strobe.why(x, x, x, backward=backward).splitlines():
            if row.endswith("takes it"):
                break
            assert row.split("declines: ")[1] in line


def test_without_the_log() -> None:
    assert stderr_of() == ""
    assert stderr_of(STROBE_LOG="0") == ""


def test_a_wrong_setting_of_the_log() -> None:
    wanted = "strobe: STROBE_LOG = on, expected 0 (off) or 1 (a line for each new problem)\n"
    assert stderr_of(STROBE_LOG="on") == wanted
