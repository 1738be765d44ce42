#!/usr/bin/env python3
"""Checks that a wheel of Strobe is what its name promises, from the file alone.

    scripts/check_wheel.py [--cpu | --part] [--tag TAG] WHEEL

Name and tag, version, metadata, licences, size, every file of the package, and of the libraries inside: what they need at
run time (names and symbol versions, against the glibc of the tag), what they export, every CUDA kernel of kernels.def.
auditwheel and abi3audit are asked too where this Python has them. Needs binutils. Exit status 1: something is wrong, and
every finding was printed. --cpu: a wheel without CUDA kernels, --part: with some of them. --tag: the platform tag, if it is not manylinux_2_28_x86_64.
"""

from __future__ import annotations

import argparse
import base64
import csv
import email
import email.message
import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/gpu"))
from rows import ROWS

TAG = "manylinux_2_28_x86_64"
MOST_BYTES = 70_000_000

# What the tag lets a wheel need: PEP 600 for glibc, and of GCC's libraries what distributions of that glibc had, which is
# GCC 8 (auditwheel has the same numbers).
NEWEST = {
    "GLIBC": (2, 28),
    "GLIBCXX": (3, 4, 24),
    "CXXABI": (1, 3, 11),
    "GCC": (7, 0, 0),
}
SYSTEM_LIBRARIES = {
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
}


def source_version() -> str:
    """The version in strobe.h."""
    header = (ROOT / "include/strobe/strobe.h").read_text()
    return ".".join(
        re.findall(r"^#define STROBE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header, re.MULTILINE)
    )


def output(*command: str | Path) -> str:
    """What a program prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needed(library: Path) -> list[str]:
    """The libraries that a library asks the dynamic linker for."""
    return re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-dW", library))


def too_new(library: Path) -> list[str]:
    """Symbols of versions that systems of the tag do not have, and versions that are no numbers."""
    found = []
    for symbol, family, version in re.findall(
        r"\bU (\S+?)@+([A-Z_]+?)_([\w.]+)$",
        output("nm", "-D", "--undefined-only", library),
        re.MULTILINE,
    ):
        if family not in NEWEST:
            continue
        number = tuple(int(part) for part in re.findall(r"\d+", version))
        if not number or number > NEWEST[family]:
            newest = ".".join(map(str, NEWEST[family]))
            found.append(
                f"needs {symbol} of {family}_{version}, expected {family}_{newest} or older"
            )
    return found


def missing_from(library: Path, provider: Path) -> list[str]:
    """Versions of OpenMP's symbols that the one library asks for and the other one has not."""
    wanted = set(re.findall(r"@+(G?OMP_[\d.]+)", output("nm", "-D", "--undefined-only", library)))
    there = set(re.findall(r"@+(G?OMP_[\d.]+)", output("nm", "-D", "--defined-only", provider)))
    return sorted(wanted - there)


def check_library(library: Path, *, exports: str, beside: set[str]) -> list[str]:
    """What is wrong with one library of a wheel.

    Args:
        library: the file.
        exports: regular expression of the names that it may export.
        beside: names of libraries that the wheel has in the same folder.
    """
    found = []
    dynamic = output("readelf", "-dW", library)
    headers = output("readelf", "-lW", library)
    own = [name for name in needed(library) if name in beside]
    for name in needed(library):
        if name not in SYSTEM_LIBRARIES and name not in beside:
            found.append(f"needs {name}, which neither the wheel nor every system has")
    paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic)
    if any(path != "$ORIGIN" for path in paths):
        found.append(
            f"looks for libraries in {paths}, expected its own folder ($ORIGIN) or nothing"
        )
    if own and not paths:
        found.append(f"does not look for {own} in its own folder ($ORIGIN)")
    if "TEXTREL" in dynamic:
        found.append("has relocations in its code (TEXTREL)")
    if re.search(r"GNU_STACK.*RWE", headers):
        found.append("asks for a stack that can be executed")
    found += too_new(library)
    exported = output("nm", "-D", "--defined-only", library).split("\n")
    names = {line.split()[-1].split("@")[0] for line in exported if line.split()}
    strangers = sorted(name for name in names if not re.fullmatch(exports, name))
    if strangers:
        found.append(f"exports {len(strangers)} names that are not its own: {strangers[:3]}")
    return found


def kernel_names() -> list[str]:
    """The names of the CUDA kernel instances: of each row of kernels.def one for each type and variant."""
    return [name for row in ROWS for name in row.instances]


def cpu_kernels() -> list[str]:
    """The CPU's rows of the kernel table: an instruction set each, of this architecture."""
    built = (ROOT / "cmake/library.cmake").read_text()
    return [
        f"cpu_{isa}"
        for isa in re.findall(r"^ *strobe_isa\((\w+)", built, re.MULTILINE)
        if isa != "neon"
    ]


def check_kernels(library: Path, *, cpu: bool, part: bool) -> list[str]:
    """Whether the library has every CPU kernel, and of the CUDA kernels each row of kernels.def.

    Args:
        library: the file.
        cpu: it has no CUDA kernels.
        part: it has some of what there is, for development.
    """
    code = library.read_bytes()
    found = []
    for kernel in cpu_kernels():
        if kernel.encode() not in code and not part:
            found.append(f"lacks the CPU kernel {kernel}")
    there = [name for name in kernel_names() if name.encode() + b"\0" in code]
    if cpu:
        return [*found, f"has {len(there)} CUDA kernels, expected none"] if there else found
    if (absent := sorted(set(kernel_names()) - set(there))) and not part:
        found.append(f"lacks {len(absent)} CUDA kernels of kernels.def: {', '.join(absent[:3])}")
    if ".nv_fatbin" not in output("readelf", "-SW", library):
        found.append("has no machine code for GPUs (.nv_fatbin)")
    return found


def check_record(wheel: zipfile.ZipFile, record: str) -> list[str]:
    """Whether RECORD lists every file with its hash."""
    rows = {row[0]: row[1] for row in csv.reader(wheel.read(record).decode().splitlines())}
    files = [name for name in wheel.namelist() if not name.endswith("/")]
    found = [f"RECORD does not have {name}" for name in files if name not in rows]
    for name, digest in rows.items():
        if name == record:
            continue
        sha256 = base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest())
        if digest != f"sha256={sha256.decode().rstrip('=')}":
            found.append(f"RECORD has another hash than the file {name}")
    return found


def check_metadata(metadata: email.message.Message, version: str) -> list[str]:
    """What pip and an index show."""
    wanted: dict[str, list[str]] = {
        "Name": ["strobe-attention"],
        "Version": [version],
        "License-Expression": ["BSD-3-Clause"],
        "Requires-Python": [">=3.10"],
        "Requires-Dist": ["numpy>=1.22"],
        "Description-Content-Type": ["text/markdown"],
    }
    found = [
        f"METADATA has {key} = {metadata.get_all(key)}, expected {value}"
        for key, value in wanted.items()
        if metadata.get_all(key) != value
    ]
    classifiers = metadata.get_all("Classifier") or []
    for classifier in ("Typing :: Typed", "Operating System :: POSIX :: Linux"):
        if classifier not in classifiers:
            found.append(f"METADATA has no classifier {classifier}")
    return found


def check_files(names: list[str], info: str, *, cpu: bool) -> list[str]:
    """Whether the package is whole, and nothing else is there."""
    found = []
    package = {name.split("/", 1)[1] for name in names if name.startswith("strobe/")}
    sources = {
        file.relative_to(ROOT / "python/strobe").as_posix()
        for file in (ROOT / "python/strobe").rglob("*")
        if file.suffix in (".py", ".pyi", ".typed") or file.name == "py.typed"
    }
    libraries = {"_core.abi3.so", "libstrobe.so", "libgomp.so.1"}
    if absent := sorted((sources | libraries) - package):
        found.append(f"the package lacks {absent}")
    if strangers := sorted(package - sources - libraries):
        found.append(f"the package has {strangers}, which python/strobe does not")
    outside = [name for name in names if not name.startswith(("strobe/", f"{info}/"))]
    if outside:
        found.append(f"files outside the package: {outside}")
    licences = {name.split("/licenses/", 1)[1] for name in names if "/licenses/" in name}
    third_party = (
        "README.txt",
        "apache-2.0.txt",
        "cuda.txt",
        "gcc.txt",
        "gpl-3.txt",
        "highway.txt",
    )
    wanted = {"LICENSE", *(f"third-party/{name}" for name in third_party)}
    if cpu:
        wanted.remove("third-party/cuda.txt")
    if absent := sorted(wanted - licences):
        found.append(f"the licences lack {absent}")
    return found


def ask(tool: str, *arguments: str | Path) -> tuple[int, str]:
    """Runs a Python program of this environment."""
    result = subprocess.run(
        [sys.executable, "-m", tool, *arguments], capture_output=True, text=True, check=False
    )
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def check_by_tools(wheel: Path, tag: str) -> list[str]:
    """What auditwheel and abi3audit say, where they are installed."""
    found = []
    if importlib.util.find_spec("auditwheel"):
        _, said = ask("auditwheel", "show", wheel)
        tags = re.findall(r'"manylinux_2_(\d+)_x86_64"', said)
        most = int(tag.split("_")[2])
        if not tags or int(tags[0]) > most:
            found.append(f"auditwheel does not agree with the tag {tag}: {said}")
    else:
        print("check_wheel: auditwheel is not installed: only the checks of this program")
    if importlib.util.find_spec("abi3audit"):
        status, said = ask("abi3audit", "--strict", "--report", wheel)
        if status != 0:
            found.append(f"abi3audit: {said}")
    else:
        print("check_wheel: abi3audit is not installed: the limited API is not checked")
    return found


def check_wheel(path: Path, *, cpu: bool = False, part: bool = False, tag: str = TAG) -> list[str]:
    """All that is wrong with a wheel, one line each."""
    version = source_version()
    name = f"strobe_attention-{version}-cp310-abi3-{tag}.whl"
    found = [] if path.name == name else [f"the file is called {path.name}, expected {name}"]
    if path.stat().st_size > MOST_BYTES:
        found.append(f"{path.stat().st_size} bytes, expected at most {MOST_BYTES}")
    info = f"strobe_attention-{version}.dist-info"
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as work:
        names = [entry for entry in wheel.namelist() if not entry.endswith("/")]
        if f"{info}/METADATA" not in names:
            return [*found, f"no {info}/METADATA"]
        text = email.message_from_bytes(wheel.read(f"{info}/WHEEL"))
        if text.get_all("Tag") != [f"cp310-abi3-{tag}"]:
            found.append(f"WHEEL has Tag = {text.get_all('Tag')}, expected cp310-abi3-{tag}")
        found += check_metadata(email.message_from_bytes(wheel.read(f"{info}/METADATA")), version)
        found += check_files(names, info, cpu=cpu)
        found += check_record(wheel, f"{info}/RECORD")
        wheel.extractall(work)
        folder = Path(work) / "strobe"
        exports = {
            "_core.abi3.so": "PyInit__core",
            "libstrobe.so": "strobe_[a-z0-9_]+",
            "libgomp.so.1": ".*",
        }
        present = {
            library: names_ for library, names_ in exports.items() if (folder / library).is_file()
        }
        for library, allowed in present.items():
            says = check_library(folder / library, exports=allowed, beside=set(present) - {library})
            if library == "libstrobe.so":
                says += check_kernels(folder / library, cpu=cpu, part=part)
                if "libgomp.so.1" in present:
                    for absent in missing_from(folder / library, folder / "libgomp.so.1"):
                        says.append(f"needs {absent}, which the libgomp beside it has not")
            found += [f"{library} {line}" for line in says]
    return found + check_by_tools(path, tag)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--cpu", action="store_true", help="a wheel without CUDA kernels")
    parser.add_argument("--part", action="store_true", help="a wheel with some CUDA kernels")
    parser.add_argument("--tag", default=TAG, help="its platform tag")
    arguments = parser.parse_args()
    found = check_wheel(arguments.wheel, cpu=arguments.cpu, part=arguments.part, tag=arguments.tag)
    for line in found:
        print(f"check_wheel: {line}", file=sys.stderr)
    size = arguments.wheel.stat().st_size / 1e6
    if not found:
        print(f"check_wheel: {arguments.wheel.name}: {size:.1f} MB, nothing wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
