"""The extension: that it keeps nothing of a call, in memory or in references, and what it says
where it cannot be.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import strobe
from strobe import _core

from producer import Producer

CALLS = os.environ.get("STROBE_LEAK_CALLS", "20000")  # of each kind; `make nightly`: more
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")  # which has a malloc of its own


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax", "plans"])
def test_nothing_is_kept_of_a_call(kind: str) -> None:
    if kind in ("torch", "jax"):
        pytest.importorskip(kind)
    result = python("leaks.py", kind, CALLS, JAX_PLATFORMS="cpu", OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stdout + result.stderr


def test_nothing_is_kept_of_shared_tensors() -> None:
    q = Producer(np.ones((1, 2, 1, 8), np.float32))
    for _ in range(200):
        strobe.attention(q, q, q)
        with pytest.raises(strobe.InvalidArgument):
            strobe.attention(q, q, q, softcap=-1.0)
    gc.collect()
    assert q.exported == q.deleted == 1200
    assert q.destroyed == 0


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
        timeout=1200,  # a million calls take minutes
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


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_nothing_is_imported_in_a_call(kind: str) -> None:
    pytest.importorskip(kind)
    result = python("first_calls.py", kind)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


FORK = """
import os, sys, threading, time
import numpy as np, strobe
x = np.ones((1, 3, 2, 8), np.float32)
inside, forked = threading.Event(), threading.Event()
def hook(frame, event, _):
    if event == "call" and frame.f_code.co_name == sys.argv[1]:
        sys.setprofile(None)
        inside.set()
        forked.wait()
def first():
    sys.setprofile(hook)
    strobe.attention(x, x, x)
thread = threading.Thread(target=first)
thread.start()
while not inside.wait(0.01):
    if not thread.is_alive():
        sys.exit()  # nothing of that name is called
child = os.fork()
if child == 0:
    strobe.attention(x, x, x)
    os._exit(0)
for _ in range(600):
    if os.waitpid(child, os.WNOHANG)[0]:
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
    os._exit(7)
forked.set()
thread.join()
"""


@pytest.mark.parametrize("function", ["_find_and_load_unlocked", "classify", "make", "allocator"])
def test_a_fork_during_the_first_call(function: str) -> None:
    """_find_and_load_unlocked: of Python's import, with a module's lock held."""
    result = python("-c", FORK, function)
    assert result.returncode == 0, result.stderr


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
