"""The extension: that it keeps nothing of a call, in memory or in references, and what it says
where it cannot be.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strobe
from strobe import _core

import cases
from producer import Producer

CALLS = int(os.environ.get("STROBE_LEAK_CALLS", "20000"))  # of each kind; `make nightly`: more
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")  # which keeps what is freed for a while


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def refused(call: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        try:
            call()
        except strobe.Error:
            return
        raise AssertionError("not refused")

    return run


def numpy_calls() -> tuple[list[Any], dict[str, Callable[[], Any]]]:
    rng = np.random.default_rng(1)
    q, k, v = (cases.normal(rng, (1, 2, 1, 8)) for _ in range(3))
    out, lse = strobe.attention(q, k, v, return_lse=True)
    used = np.array([2], np.int32)
    slopes = np.ones(1, np.float32)
    three = (q.copy(), k.copy(), v.copy())
    function: Any = strobe.attention
    return [q, k, v, out, lse, used, slopes, *three], {
        "forward": lambda: strobe.attention(q, k, v, return_lse=True),
        "out": lambda: strobe.attention(q, k, v, out=out, alibi_slopes=slopes, seqused_k=used),
        "backward": lambda: strobe.attention_backward(out, q, k, v, out, lse),
        "grads": lambda: strobe.attention_backward(out, q, k, v, out, lse, grads=three),
        "converted": lambda: function(q, k, v, window=[np.int64(1), 1], scale=1),
        "no array": refused(lambda: function(q, [1], v)),
        "wrong shape": refused(lambda: strobe.attention(q, k[:, :1], v)),
        "wrong value": refused(lambda: strobe.attention(q, k, v, dropout_seed=-1)),
    }


def torch_calls() -> tuple[list[Any], dict[str, Callable[[], Any]]]:
    torch = pytest.importorskip("torch")
    from strobe.flash_attn import flash_attn_func

    q, k, v = (torch.randn(1, 2, 1, 8) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    columns = torch.randn(1, 2, 8, 1).transpose(2, 3)
    return (
        [q, k, v, *leaves],
        {
            "forward": lambda: flash_attn_func(q, k, v, causal=True),
            "copied": lambda: flash_attn_func(columns, k, v),
            "gradient": lambda: torch.autograd.grad(flash_attn_func(*leaves).sum(), leaves),
            "operator": lambda: flash_attn_func(q, k, v, causal=1),  # type: ignore[arg-type]
            "refused": refused(lambda: flash_attn_func(q, k[:, :1], v)),
        },
    )


@pytest.mark.parametrize("library", [numpy_calls, torch_calls])
def test_nothing_is_kept_of_a_call(library: Any) -> None:
    watched, calls = library()
    watched += [None, True, (-1, -1)]
    for name, call in calls.items():
        count = CALLS // 20 if name in ("copied", "operator", "refused", "gradient") else CALLS
        for _ in range(count // 4):  # pools fill, caches too
            call()
        gc.collect()
        before, memory = [sys.getrefcount(x) for x in watched], resident()
        for _ in range(count):
            call()
        gc.collect()
        after = [sys.getrefcount(x) for x in watched]
        assert all(abs(a - b) < 20 for a, b in zip(after, before, strict=True)), (name, library)
        # An object of 16 bytes kept by each call, or a page by any rate.
        assert SANITIZED or resident() - memory < max(16 * count, 1 << 20), name


def test_nothing_is_kept_of_shared_tensors() -> None:
    q = Producer(np.ones((1, 2, 1, 8), np.float32))
    for _ in range(200):
        strobe.attention(q, q, q)
        with pytest.raises(strobe.InvalidArgument):
            strobe.attention(q, q, q, softcap=-1.0)
    gc.collect()
    assert q.exported == q.deleted == 1200
    assert q.destroyed == 0


def test_bounded_plans_free_what_they_kept() -> None:
    x = np.ones((1, 1200, 1, 8), np.float32)
    for _ in range(2):
        for n in range(1, 1200):
            strobe.attention(x[:, :1], x[:, :n], x[:, :n])
        memory = resident()
    for n in range(1, 1200):
        strobe.attention(x[:, :1], x[:, :n], x[:, :n])
    assert SANITIZED or resident() - memory < 2 << 20
    assert _core.kept()[0] == _core.CAPACITY


DEVELOPERS = """
import numpy as np, strobe
from producer import Producer
x = np.ones((1, 3, 2, 8), np.float32)
out, lse = strobe.attention(x, x, x, return_lse=True)
strobe.attention_backward(out, x, x, x, out, lse)
strobe.attention(Producer(x), x, x, window=[1, 2], attention_chunk=2)
for wrong in ({"scale": "x"}, {"softcap": -1.0}, {"threads": 2**40}, {"cu_seqlens_q": x}):
    try:
        strobe.attention(x, x, x, **wrong)
    except strobe.Error:
        pass
try:
    import torch
except ImportError:
    pass
else:
    from strobe.flash_attn import flash_attn_func
    q = torch.ones(1, 3, 2, 8, requires_grad=True)
    flash_attn_func(q, q, q).sum().backward()
"""


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parent,
        env=os.environ | environment,
        check=False,
    )


def test_in_development_mode() -> None:
    """`-X dev`: assertions of Python's allocators, warnings, a traceback where it crashes."""
    result = python("-X", "dev", "-c", DEVELOPERS)
    assert result.returncode == 0, result.stderr
    assert "strobe" not in result.stderr
    assert "SystemError" not in result.stderr


NO_MEMORY = """
import ctypes, sys
import numpy as np, strobe
from producer import Producer
from strobe import _core
fail_at = ctypes.CDLL(sys.argv[1]).fail_at
x = np.ones((1, 3, 2, 8), np.float32)
lengths = np.array([0, 3], np.int32)
out, lse = strobe.attention(x, x, x, return_lse=True)
calls = {
    "forward": lambda: strobe.attention(x, x, x, attention_chunk=2),
    "backward": lambda: strobe.attention_backward(out, x, x, x, out, lse, grads=[x + 1] * 3),
    "shared": lambda: strobe.attention(Producer(x), x, x),
    "packed": lambda: strobe.attention(*[x[0]] * 3, cu_seqlens_q=lengths, cu_seqlens_k=lengths),
    "refused": lambda: strobe.attention(x, x[:, :2, :1, :4], x),
    "cache": lambda: strobe.attention_with_kvcache(x, x, x, causal=True),
    "merge": lambda: strobe.merge(x[None], np.zeros((1, 1, 2, 3), np.float32)),
    "questions": lambda: (strobe.plan(x, x, x), strobe.why(x, x, x), strobe.info()),
}
for name, call in calls.items():
    failures = 0
    for number in range(1, 400):
        _core.forget()
        fail_at(number)
        try:
            call()
        except (MemoryError, strobe.OutOfMemory):
            failures += 1
        except strobe.InvalidArgument:
            pass
        fail_at(0)
    print(name, failures)
    assert failures or name in ("refused", "merge"), name
"""


def test_an_allocation_that_fails_is_an_exception(tmp_path: Path) -> None:
    """No exception of C++ passes into Python, which would end the process."""
    compiler = shutil.which("c++")
    if compiler is None or SANITIZED:
        pytest.skip("needs a compiler, and allocations of C++ that are nobody else's")
    library = tmp_path / "failing_new.so"
    source = Path(__file__).with_name("failing_new.cpp")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", source, "-o", library], check=True)
    result = python("-c", NO_MEMORY, str(library), LD_PRELOAD=str(library))
    assert result.returncode == 0, result.stdout + result.stderr


OLDER = """
import torch
if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    del torch.Tensor.__dlpack_c_exchange_api__  # as PyTorch before 2.10
import strobe
from strobe.flash_attn import flash_attn_func
q, k, v = (torch.randn(2, 5, 4, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
flash_attn_func(q, k.transpose(0, 1).contiguous().transpose(0, 1), v, causal=True).sum().backward()
inputs = (q.detach(), k.detach(), v.detach())
wanted = strobe.attention(*(x.float().numpy() for x in inputs))
assert abs(strobe.attention(*inputs).float().numpy() - wanted).max() < 0.02
for wrong, word in (
    (torch._neg_view(inputs[0]), "negative bit"),
    (inputs[0].to_sparse(), "layout"),
    (inputs[0].to("meta"), "meta"),
    (inputs[0].double(), "float64"),
    (inputs[0][None], "ndim = 5"),
):
    try:
        strobe.attention(wrong, *inputs[1:])
    except strobe.Error as error:
        assert word in str(error), error
    else:
        raise AssertionError(word)
"""


def test_a_pytorch_without_an_exchange_api() -> None:
    pytest.importorskip("torch")
    result = python("-c", OLDER)
    assert result.returncode == 0, result.stderr


def test_subinterpreters_are_refused() -> None:
    program = (
        "import strobe\n"
        "try:\n    import _interpreters as i\n"
        "except ImportError:\n    import _xxsubinterpreters as i\n"
        "code = 'import sys; sys.path[:] = ' + repr(__import__('sys').path) + '''\n"
        "try:\n    import strobe\nexcept ImportError as error:\n    print(error)\n'''\n"
        "i.run_string(i.create(), code)\n"
    )
    result = python("-c", program)
    assert "subinterpreters" in result.stdout, result
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["forward", "backward", "flash", "operator_forward"])
def test_arguments_of_another_number(name: str) -> None:
    """The package calls these with all arguments; whoever else does gets an error."""
    for count in (0, 1, 12, 30):
        if (name, count) != ("operator_forward", 30):
            with pytest.raises((TypeError, strobe.Error)):
                getattr(_core, name)(*[None] * count)


def test_help_shows_signatures() -> None:
    result = python("-c", "import strobe; help(strobe.attention)")
    for part in ("causal: ", "window: ", "= (-1, -1)", "seqused_k", "Raises:"):
        assert part in result.stdout
