"""info, plan, why, `python -m strobe`, and what import refuses."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import strobe
from recorder import compiler
from strobe._problem import DTYPE_CODES

import cases
from cases import Case

HEADER = Path(__file__).resolve().parents[2] / "include" / "strobe" / "strobe.h"
MINOR = strobe.__version__.rpartition(".")[0]  # the releases that go together


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
        check=False,
    )


def test_info() -> None:
    found = strobe.info()
    assert re.fullmatch(r"\d+\.\d+\.\d+", found.version)
    assert found.version == strobe.__version__
    assert Path(found.library).is_file()
    assert found.cpu_threads >= 1
    assert found.cpu_isa in found.cpu_isas
    assert "portable" in found.cpu_isas
    names = [kernel.name for kernel in found.kernels]
    assert len(set(names)) == len(names)
    assert "cpu_portable" in names
    assert any(not kernel.unavailable for kernel in found.kernels)
    assert bool(found.cuda_devices) != bool(found.cuda_reason)
    for line in (found.version, found.library, found.cpu_isa, *names):
        assert line in str(found)
    assert all(len(line) == len(line.rstrip()) for line in str(found).splitlines())


def test_info_on_the_command_line() -> None:
    result = python("-m", "strobe")
    assert result.returncode == 0
    assert result.stderr == ""
    assert result.stdout == f"{strobe.info()}\n"


def test_info_speaks_as_the_tool_does() -> None:
    """`python -m strobe` and `strobe info` say the same of a kernel and of a GPU's memory."""
    kernels = (strobe.Kernel("cpu_a", ""), strobe.Kernel("cpu_b", "this CPU has no B"))
    devices = (
        strobe.CudaDevice("A GPU", 90, 132, 85_029_158_912),
        strobe.CudaDevice("Another", 90, 132, 150_754_820_096),
    )
    found = dataclasses.replace(strobe.info(), kernels=kernels, cuda_devices=devices)
    said = str(found)
    assert re.search(r"cpu_a +ready$", said, re.MULTILINE)
    assert re.search(r"cpu_b +no: this CPU has no B$", said, re.MULTILINE)
    assert "132 multiprocessors, 85.0 GB\n" in said
    assert "132 multiprocessors, 151 GB\n" in said


def test_info_of_limited_instruction_sets() -> None:
    result = python("-m", "strobe", STROBE_CPU_ISA="portable")
    assert re.search(r"^cpu isa +portable ", result.stdout, re.MULTILINE), (
        result.stdout + result.stderr
    )
    for kernel in strobe.info().kernels:
        if kernel.name not in ("cpu_portable",):
            assert re.search(rf"{kernel.name} +no: ", result.stdout)
    # One that does not exist: import and info still work, and say so.
    result = python("-m", "strobe", STROBE_CPU_ISA="mmx")
    assert result.returncode == 0, result.stderr
    assert "STROBE_CPU_ISA = mmx, expected one that this CPU and build have" in result.stdout
    program = "import numpy, strobe; x = numpy.ones((1, 2, 1, 8), 'f'); strobe.attention(x, x, x)"
    result = python("-c", program, STROBE_CPU_ISA="mmx")
    assert result.returncode == 1
    assert "strobe.Unsupported: no kernel takes forward fp32" in result.stderr
    assert "STROBE_CPU_ISA = mmx" in result.stderr


def test_a_free_threaded_python_is_refused() -> None:
    """Before the extension is loaded, whose objects are laid out otherwise."""
    program = "import sys; sys.abiflags += 't'; import strobe"
    result = python("-c", program)
    assert result.returncode == 1
    assert "ImportError: strobe: free-threaded Python is not supported" in result.stderr


def test_no_public_name_is_a_function_and_a_module() -> None:
    """Type checkers take what is both for the module once it has been imported by name."""
    modules = {module.name for module in pkgutil.iter_modules(strobe.__path__)}
    assert "functional" in modules
    public = {name for name in strobe.__all__ if not isinstance(getattr(strobe, name), ModuleType)}
    assert modules.isdisjoint(public)


def test_plan_and_why(rng: np.random.Generator) -> None:
    inputs = Case(alibi=1).make(rng)
    text = strobe.plan(inputs.q, inputs.k, inputs.v, causal=True, threads=1, **inputs.options)
    kernel = next(k.name for k in strobe.info().kernels if not k.unavailable)
    for part in ("forward fp32", "causal", "ALiBi", "heads 4/2", "workspace", "threads    1"):
        assert part in text
    text = strobe.plan(inputs.q, inputs.k, inputs.v, backward=True, dlse=True, deterministic=True)
    for part in ("backward fp32", "dlse", "deterministic", kernel):
        assert part in text
    reasons = strobe.why(inputs.q, inputs.k, inputs.v)
    assert f"{kernel} " in reasons
    assert "takes it" in reasons


def test_plan_without_data() -> None:
    def spec(*shape: int, **more: Any) -> strobe.ArraySpec:
        return strobe.ArraySpec(shape, **{"dtype": "bfloat16", **more})

    # 2 TB of keys: nothing is allocated.
    text = strobe.plan(spec(8, 1, 64, 128), spec(8, 10**9, 8, 128), spec(8, 10**9, 8, 128))
    assert "forward bf16, batch 8, heads 64/8, seqlen 1/1000000000, head_dim 128" in text
    offsets = strobe.ArraySpec((3,), "int32")
    packed = spec(100, 4, 64)
    text = strobe.plan(
        packed,
        packed,
        packed,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=70,
        max_seqlen_k=60,
    )
    assert "total 100/100" in text
    with pytest.raises(strobe.InvalidArgument, match="max_seqlen_q = None, expected an integer"):
        strobe.plan(packed, packed, packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    with pytest.raises(strobe.InvalidArgument, match=r"q\.strides\[3\] = 2 elements, expected 1"):
        strobe.plan(spec(1, 2, 3, 4, strides=(48, 24, 8, 2)), spec(1, 2, 3, 4), spec(1, 2, 3, 4))
    with pytest.raises(strobe.InvalidArgument, match=r"q\.device = 'tpu', expected"):
        strobe.plan(spec(1, 2, 3, 4, device="tpu"), spec(1, 2, 3, 4), spec(1, 2, 3, 4))
    with pytest.raises(strobe.InvalidArgument, match="k is on cpu, expected cuda:1 as q"):
        strobe.plan(spec(1, 2, 3, 4, device="cuda:1"), spec(1, 2, 3, 4), spec(1, 2, 3, 4))


def test_cuda_without_a_gpu_says_why() -> None:
    if strobe.info().cuda_devices:
        pytest.skip("this machine has a GPU")
    x = strobe.ArraySpec((1, 64, 4, 64), "bfloat16", "cuda")
    assert strobe.why(x, x, x)
    with pytest.raises(strobe.Unsupported) as caught:
        strobe.plan(x, x, x)
    assert isinstance(caught.value, NotImplementedError)
    assert "CUDA" in str(caught.value) or "device" in str(caught.value)


def test_why_answers_for_bad_requests(rng: np.random.Generator) -> None:
    inputs = Case().make(rng)
    q, k, v = inputs.q, inputs.k, inputs.v
    assert "softcap = -1" in strobe.why(q, k, v, softcap=-1)
    assert strobe.why(q, k[..., :5], v).startswith("k.shape[3] = 5, expected 32")
    assert "window = 3" in strobe.why(q, k, v, window=3)  # type: ignore[arg-type]
    assert "k = None" in strobe.why(q, None, v)
    assert "q is of type list" in strobe.why([1], k, v)  # type: ignore[arg-type]


def test_import_without_a_library(tmp_path: Path) -> None:
    missing = tmp_path / "libstrobe.so"
    result = python("-c", "import strobe", STROBE_LIBRARY=str(missing))
    assert result.returncode == 1
    assert (
        f"ImportError: strobe: the library was not found. Tried:\n  {missing}: no such file\n"
        in result.stderr
    )
    missing.write_text("no library")
    result = python("-c", "import strobe", STROBE_LIBRARY=str(missing))
    assert f"  {missing}: {missing}: " in result.stderr  # the loader's own words
    assert "STROBE_LIBRARY is set, so nothing else was tried." in result.stderr


def test_import_of_another_library() -> None:
    libc = ctypes.CDLL(None)
    path = _mapped("libc.so")
    assert libc
    result = python("-c", "import strobe", STROBE_LIBRARY=path)
    assert f"ImportError: strobe: {path} has no function strobe_" in result.stderr


def _mapped(part: str) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if part in line:
            return line.split()[-1]
    pytest.skip("libc was not found in /proc/self/maps")


@pytest.mark.skipif(not HEADER.is_file(), reason="not run from a source tree")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("VERSION", f"has version 7.1.0, expected {MINOR}.x"),
        ("PROBLEM", rf"refuses strobe_problem of \d+ bytes \(version {MINOR}.0\): struct_size"),
        ("PLAN", r"refuses strobe_plan of \d+ bytes"),
        ("BACKWARD", r"refuses strobe_backward_args of \d+ bytes"),
    ],
)
def test_import_of_another_version(change: str, text: str, tmp_path: Path) -> None:
    # A library with every symbol, which differs in one struct.
    functions = {
        "strobe_problem_init(void* p, size_t n)": "return PROBLEM ? 1 : 0;",
        "strobe_plan_make(const void* p, void* q)": "return PLAN ? 1 : 0;",
        "strobe_forward(const void* p, const void* a)": "return 0;",
        "strobe_backward(const void* p, const void* a)": "return BACKWARD ? 1 : 0;",
        "strobe_machine_info(void* m)": "return 0;",
    }
    texts = {
        "strobe_version(void)": f'return VERSION ? "7.1.0" : "{MINOR}.0";',
        "strobe_last_error(void)": 'return "struct_size = 1, expected 2";',
    }
    source = tmp_path / "other.c"
    flags = [
        f"#define {name} {int(name == change)}"
        for name in ("VERSION", "PROBLEM", "PLAN", "BACKWARD")
    ]
    code = ["#include <stddef.h>", *flags]
    code += [f"int {name} {{ {body} }}" for name, body in functions.items()]
    code += [f"const char* {name} {{ {body} }}" for name, body in texts.items()]
    made = {name.split("(")[0] for name in (*functions, *texts)}
    code += [
        f"int {name}(void) {{ return 0; }}"
        for name in sorted(set(re.findall(r"\b(strobe_\w+)\(", HEADER.read_text())))
        if name not in made
    ]
    source.write_text("\n".join(code))
    library = tmp_path / "libstrobe.so"
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", library, source], check=True)
    result = python("-c", "import strobe", STROBE_LIBRARY=str(library))
    assert result.returncode == 1
    assert re.search(f"ImportError: strobe: {library} {text}", result.stderr), result.stderr


def test_public_names() -> None:
    assert sorted(strobe.__all__) == [n for n in sorted(strobe.__all__) if hasattr(strobe, n)]
    for name in strobe.__all__:
        if name != "__version__":
            assert getattr(strobe, name).__doc__, name
    assert cases.DTYPES.keys() == DTYPE_CODES.keys()


def test_numpy_is_the_only_import() -> None:
    program = (
        "import sys, numpy; numpys = set(sys.modules); import strobe; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - numpys} "
        "- set(sys.stdlib_module_names)))"
    )
    result = python("-c", program)
    assert result.stdout.split() == ["strobe"], result.stderr
