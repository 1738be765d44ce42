"""scripts/check_wheel.py, which looks at a wheel before anybody installs it: it finds defects."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/check_wheel.py"
if not SCRIPT.is_file():
    pytest.skip("not run from a source tree", allow_module_level=True)
for program in ("gcc", "readelf", "nm"):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("check_wheel", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def library(folder: Path, code: str, *flags: str, name: str = "libstrobe.so") -> Path:
    source = folder / f"{name}.c"
    source.write_text(code)
    made = folder / name
    command = ["gcc", "-shared", "-fPIC", "-o", str(made), str(source), *flags]
    subprocess.run(command, check=True)
    return made


def findings(script: ModuleType, made: Path, *beside: str) -> str:
    found = script.check_library(made, exports="strobe_[a-z]+", beside=set(beside))
    return "\n".join(found)


FUNCTION = "int strobe_one(void) { return 1; }\n"


def test_a_library_with_nothing_wrong(script: ModuleType, tmp_path: Path) -> None:
    assert findings(script, library(tmp_path, FUNCTION)) == ""


def test_symbols_that_are_too_new(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "#include <stdlib.h>\nvoid* strobe_memory(void) { return malloc(8); }\n"
    made = library(tmp_path, code)
    assert findings(script, made) == ""
    monkeypatch.setitem(script.NEWEST, "GLIBC", (2, 2))
    assert "needs malloc of GLIBC_2.2.5, expected GLIBC_2.2 or older" in findings(script, made)


@pytest.mark.parametrize(
    ("code", "flags", "text"),
    [
        (FUNCTION + "int other(void) { return 2; }\n", [], "exports 1 names that are not its own"),
        (FUNCTION, ["-Wl,-rpath,/usr/local/lib"], "looks for libraries in ['/usr/local/lib']"),
        (FUNCTION, ["-Wl,-z,execstack"], "asks for a stack that can be executed"),
    ],
)
def test_other_defects(
    script: ModuleType, tmp_path: Path, code: str, flags: list[str], text: str
) -> None:
    assert text in findings(script, library(tmp_path, code, *flags))


def test_libraries_that_systems_may_not_have(script: ModuleType, tmp_path: Path) -> None:
    library(
        tmp_path, "int more(void) { return 3; }\n", "-Wl,-soname,libmore.so.1", name="libmore.so"
    )
    code = "int more(void); int strobe_one(void) { return more(); }\n"
    link = [f"-L{tmp_path}", "-lmore"]
    made = library(tmp_path, code, *link)
    assert "needs libmore.so.1, which neither the wheel nor every system has" in findings(
        script, made
    )
    assert "does not look for ['libmore.so.1'] in its own folder" in findings(
        script, made, "libmore.so.1"
    )
    made = library(tmp_path, code, *link, "-Wl,-rpath,$ORIGIN")
    assert findings(script, made, "libmore.so.1") == ""


def test_kernels(script: ModuleType, tmp_path: Path) -> None:
    names = script.kernel_names()
    cpu = script.cpu_kernels()
    assert cpu == ["cpu_portable", "cpu_avx2", "cpu_avx512", "cpu_avx512_bf16", "cpu_amx"]
    assert "forward_sm80_bf16_64_128x128x2x4_general" in names
    assert "backward_sm90_fp16_192_64x128x2x12_v128_plain" in names
    assert len(set(names)) == len(names) > 300
    section = '__attribute__((section(".nv_fatbin"), used)) static int code = 1;\n'

    def made(kernels: list[str], more: str) -> Path:
        text = "\\0".join([*kernels, *cpu])
        return library(tmp_path, f'const char* strobe_names(void) {{ return "{text}"; }}\n{more}')

    assert script.check_kernels(made(names, section), cpu=False, part=False) == []
    (found,) = script.check_kernels(made(names[1:], section), cpu=False, part=False)
    assert f"lacks 1 CUDA kernels of kernels.def: {names[0]}" in found
    assert script.check_kernels(made(names[1:], section), cpu=False, part=True) == []
    (found,) = script.check_kernels(made(names, ""), cpu=False, part=False)
    assert "no machine code for GPUs" in found
    assert script.check_kernels(made([], ""), cpu=True, part=False) == []
    assert script.check_kernels(made(names, section), cpu=True, part=False) != []
    cpu.remove("cpu_amx")
    (found,) = script.check_kernels(made(names, section), cpu=False, part=False)
    assert "lacks the CPU kernel cpu_amx" in found


def test_a_wheel_of_another_kind(script: ModuleType, tmp_path: Path) -> None:
    version = script.source_version()
    info = f"strobe_attention-{version}.dist-info"
    wheel = tmp_path / f"strobe-{version}-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("strobe/__init__.py", "")
        archive.writestr("strobe/stray.txt", "")
        archive.writestr("other/__init__.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.4\nName: strobe\nVersion: 9\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: cp311-cp311-linux_x86_64\n")
        archive.writestr(f"{info}/RECORD", f"strobe/__init__.py,sha256=AAAA,0\n{info}/RECORD,,\n")
    found = "\n".join(script.check_wheel(wheel))
    for text in (
        f"expected strobe_attention-{version}-cp310-abi3-manylinux_2_28_x86_64.whl",
        "expected cp310-abi3-manylinux_2_28_x86_64",
        "METADATA has Name = ['strobe'], expected ['strobe-attention']",
        f"METADATA has Version = ['9'], expected ['{version}']",
        "METADATA has no classifier Typing :: Typed",
        "'_core.abi3.so'",
        "'stray.txt'",
        "files outside the package: ['other/__init__.py']",
        "RECORD does not have strobe/stray.txt",
        "RECORD has another hash than the file strobe/__init__.py",
        "the licences lack ['LICENSE'",
    ):
        assert text in found
