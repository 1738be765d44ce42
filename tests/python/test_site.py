"""The documents hold together before anybody builds a site of them: links, code blocks, and the
tables that say what the code says too. `make docs` builds the site and checks the built pages; this
takes seconds, and needs neither Sphinx nor Doxygen.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import strobe

import documents
import run_blocks
from documents import ROOT, Block

FILES = documents.files()
DOCS = ROOT / "docs"
BLOCKS = [block for path in FILES for block in documents.blocks(path)]
# Those whose Python tests/python/test_documents.py runs, each in its own way.
RUN_THERE = {
    ROOT / "README.md",
    *(DOCS / f"{name}.md" for name in ("pytorch", "jax", "decode", "learn")),
}


def name_of(x: Path | Block) -> str:
    return x.place if isinstance(x, Block) else str(x.relative_to(ROOT))


def blocks_of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages and not block.left_alone]


# ------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    wrong = []
    for link in documents.links(path):
        if re.match(r"https?://[\w.-]+\.\w+(/|$)|mailto:", link):
            continue  # not asked: a test needs no network
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        known = file.exists() and (
            not anchor or file.suffix != ".md" or anchor in documents.anchors(file)
        )
        if not known:
            wrong.append(link)
    assert not wrong


# These tell what was, or what another checkout has.
HISTORY = {ROOT / "CHANGELOG.md", DOCS / "perf-log.md", *(DOCS / "log").glob("*.md")}


@pytest.mark.parametrize("path", [p for p in FILES if p not in HISTORY], ids=name_of)
def test_files_that_are_named_are_there(path: Path) -> None:
    tree = (
        r"`((?:src|include/strobe|python|tests|scripts|bench|examples|docs|cmake|fuzz)/[\w./-]*\w)`"
    )
    named = set(re.findall(tree, path.read_text()))
    assert not sorted(name for name in named if not (ROOT / name).exists())


def test_every_page_is_in_the_table_of_contents() -> None:
    pages = {str(p.relative_to(DOCS).with_suffix("")) for p in DOCS.rglob("*.md")}
    found = {"index"}
    for body in re.findall(
        r"^```\{toctree\}\n(.*?)^```", (DOCS / "index.md").read_text(), re.M | re.S
    ):
        for entry in (
            line.strip() for line in body.splitlines() if line and not line.startswith(":")
        ):
            pattern = (
                re.escape(entry)
                .replace(r"\*\*", ".*")
                .replace(r"\*", "[^/]*")
                .replace(r"\[", "[")
                .replace(r"\]", "]")
            )
            matching = {page for page in pages if re.fullmatch(pattern, page)}
            assert matching, entry
            found |= matching
    assert found == pages


def test_pages_that_stand_for_other_files_link_to_them() -> None:
    """docs/conf.py shows those files' text in their place."""
    source = (DOCS / "conf.py").read_text()
    table = source[source.index("ELSEWHERE = {") : source.index("\n}\n")]
    pairs = re.findall(r'"([\w-]+)": "([\w./-]+)"', table)
    assert len(pairs) > 3
    for page, path in pairs:
        assert documents.links(DOCS / f"{page}.md") == [f"../{path}"]


# ------------------------------------------------------------------------------------- code blocks


@pytest.mark.parametrize(
    "path",
    sorted({b.path for b in blocks_of("python")} - RUN_THERE),
    ids=name_of,
)
def test_python_runs(path: Path) -> None:
    """Each block by itself: run_blocks.py."""
    programs = [block for block in blocks_of("python") if block.path == path]
    for module in ("torch", "jax", "transformers"):
        if any(documents.imports(module, block.text) for block in programs):
            pytest.importorskip(module)
    # Where nothing asks for it, transformers would take its folder for the distribution.
    shim = [block for block in programs if documents.imports("flash_attn", block.text)]
    for some, folders in (
        ([block for block in programs if block not in shim], []),
        (shim, [str(ROOT / "python" / "flash_attn_shim")]),
    ):
        result = subprocess.run(
            [sys.executable, run_blocks.__file__],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*folders, *filter(None, sys.path)])},
            input=json.dumps([(block.place, block.text) for block in some]),
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert result.returncode == 0, result.stderr


def test_python_is_run_somewhere() -> None:
    there = (ROOT / "tests" / "python" / "test_documents.py").read_text()
    for path in RUN_THERE:
        assert f'"{path.relative_to(ROOT)}"' in there


def compiled(source: Path, *flags: str | Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    warnings = ["-Wall", "-Wextra", "-Werror"]
    language = ["-x", "c"] if source.suffix == ".c" else []
    command = [
        compiler,
        *warnings,
        f"-I{ROOT / 'include'}",
        *language,
        source,
        "-x",
        "none",
        *flags,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("block", blocks_of("cpp", "c++"), ids=name_of)
def test_cpp_runs(block: Block, tmp_path: Path) -> None:
    source, program = tmp_path / "block.cpp", tmp_path / "block"
    library = Path(os.environ.get("STROBE_LIBRARY", "")).resolve()
    source.write_text(block.text)
    if "int main" not in block.text or not library.is_file():
        compiled(source, "-std=c++20", "-fsyntax-only")
        return
    compiled(source, "-std=c++20", library, f"-Wl,-rpath,{library.parent}", "-o", program)
    result = subprocess.run([program], capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("block", blocks_of("c"), ids=name_of)
def test_c_runs(block: Block, tmp_path: Path) -> None:
    """A block of C stands in a function that has the tensors, and returns where it fails."""
    source, program = tmp_path / "block.c", tmp_path / "block"
    source.write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n#include <strobe/strobe.h>\n"
        "static int f(void* q, void* k, void* v, void* out) {\n"
        f"{block.text}return 0;\n}}\n"
        "int main(void) {\n"
        "  void* x[4];\n"
        "  for (int i = 0; i < 4; ++i) x[i] = calloc(1 << 23, 1);  /* 4096 rows, 8 heads of 64 */\n"
        "  return f(x[0], x[1], x[2], x[3]);\n}\n"
    )
    library = Path(os.environ.get("STROBE_LIBRARY", "")).resolve()
    if not library.is_file():
        compiled(source, "-std=c99", "-fsyntax-only")
        return
    linked = (library, f"-Wl,-rpath,{library.parent}", "-o", program)
    compiled(source, "-std=c99", *linked)
    result = subprocess.run([program], capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("block", blocks_of("cmake"), ids=name_of)
def test_cmake_is_what_an_installed_package_is_tried_with(block: Block) -> None:
    """tests/consumer builds against an installed package by these lines; those of a project that
    has the sources in it are tried by tests/build/check_configure.sh.
    """
    if "add_subdirectory" in block.text:
        assert block.path == DOCS / "building.md"
        return
    tried = (ROOT / "tests" / "consumer" / "CMakeLists.txt").read_text()
    assert "find_package(strobe 0.2 REQUIRED)" in block.text
    for line in re.findall(
        r"^(find_package.*|cmake_minimum_required.*|set\(CMAKE_CXX.*)$", block.text, re.M
    ):
        assert line in tried
    assert "PRIVATE strobe::strobe)" in block.text


def commands() -> Iterable[tuple[str, str]]:
    """(where, command) of all lines of shell, in blocks and set in by four columns."""
    for block in blocks_of("sh", "bash", "shell"):
        yield from ((block.place, line) for line in block.text.splitlines())
    for path in FILES:
        if path in HISTORY:
            continue
        text = path.read_text()
        for line in re.findall(r"^ {4}((?:make|scripts/|python -m|pip) ?.*)$", text, re.M):
            yield name_of(path), line
        for span in re.findall(r"`((?:make|scripts/)[^`\n]*)`", text):
            yield name_of(path), span


@pytest.mark.parametrize("block", blocks_of("sh", "bash", "shell"), ids=name_of)
def test_shell_parses(block: Block) -> None:
    result = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, f"{block.place}: {result.stderr}"


def test_commands_are_there() -> None:
    """Targets of make, scripts, presets, and what `cmake` is told."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    presets = set(re.findall(r'"name": "([\w-]+)"', (ROOT / "CMakePresets.json").read_text()))
    wrong, seen = [], 0
    for place, command in commands():
        words = command.split()
        if words[0] == "make" and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
            seen += 1
            known = words[1] in targets
        elif words and words[0].startswith("scripts/"):
            seen += 1
            known = (ROOT / words[0]).exists() or any(c in words[0] for c in "*{<")
            if words[0] == "scripts/build.sh" and len(words) > 1 and words[1].islower():
                known &= words[1] in presets
        else:
            continue
        if not known:
            wrong.append(f"{place}: {command}")
    assert not wrong
    assert seen > 30


STROBE_CLI = os.environ.get("STROBE_CLI", "")


@pytest.mark.skipif(not STROBE_CLI, reason="STROBE_CLI does not name the program")
def test_flags_of_the_tool_are_there() -> None:
    helps: dict[str, str] = {}
    wrong, seen = [], 0
    texts = [
        (name_of(p), span)
        for p in FILES
        if p not in HISTORY
        for span in re.findall(r"`(strobe [^`\n]*)`", p.read_text())
    ]
    texts += [
        (b.place, line.strip()[2:])
        for b in blocks_of("sh")
        for line in b.text.splitlines()
        if line.startswith("./strobe ")
    ]
    for place, command in texts:
        words = command.partition("#")[0].split()
        if len(words) < 2 or not re.fullmatch(r"[a-z]+", words[1]):
            continue
        seen += 1
        if words[1] not in helps:
            result = subprocess.run(
                [STROBE_CLI, "help", words[1]], capture_output=True, text=True, check=False
            )
            helps[words[1]] = result.stdout
        for word in words[1:2] + [w for w in words if w.startswith("--") and w != "--help"]:
            if not re.search(rf"(?<![\w-]){word}(?![\w-])", helps[words[1]]):
                wrong.append(f"{place}: {command}")
    assert not wrong
    assert seen > 8


def test_options_of_cmake_are_there() -> None:
    text = "\n".join(
        p.read_text()
        for p in [
            ROOT / "CMakeLists.txt",
            *ROOT.glob("cmake/*"),
            *ROOT.glob("src/**/CMakeLists.txt"),
            *ROOT.glob("tests/**/CMakeLists.txt"),
            *ROOT.glob("bench/CMakeLists.txt"),
        ]
    )
    wrong = [
        f"{name_of(path)}: {option}"
        for path in FILES
        if path not in HISTORY
        for option in re.findall(r"-D(STROBE_\w+)", path.read_text())
        if option not in text
    ]
    assert not wrong


def test_code_fits_the_site() -> None:
    """What docs/_static/strobe.css gives the text room for on a computer's screen; a longer line
    would have to be scrolled to be read. Remarks stand above the code where they do not fit. Of
    what is set in by four columns commands alone: others are drawings.
    """
    contents = (DOCS / "index.md").read_text()
    users = re.findall(r":caption: For users.*?\n\n(.*?)\n```", contents, re.DOTALL)[0].split()
    pages = [p for p in FILES if DOCS in p.parents and p not in HISTORY]
    lines = [
        (block.place, line)
        for path in pages
        for block in documents.blocks(path)
        if block.language
        for line in block.text.splitlines()
    ]
    assert len(lines) > 300
    command = re.compile(r"^ {4}((?:make|cmake|apt|scripts/|python3? -m|pip) ?.*)$", re.MULTILINE)
    set_in = [
        (name_of(path), line)
        for path in pages
        if path.stem in users
        for line in command.findall(path.read_text())
    ]
    assert len(set_in) > 8
    lines += set_in
    assert [x for x in lines if len(x[1]) > 90] == []


# ------------------------------------------------------------------- tables that say what code says


def rows(path: Path, under: str = "") -> list[list[str]]:
    """The cells of all tables of a document, or of those under a heading."""
    text = path.read_text()
    if under:
        level = under.count("#")
        text = text[text.index(f"\n{under}\n") + 1 :]
        after = re.search(rf"\n#{{1,{level}}} ", text)
        text = text[: after.start()] if after else text
    lines = [
        line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")
    ]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_function_and_argument_of_flash_attn_is_in_the_table() -> None:
    pytest.importorskip("torch")
    page = DOCS / "from-flash-attn.md"
    for module, headings in (
        ("strobe.flash_attn", ["## FlashAttention-2"]),
        ("strobe.flash_attn_3", ["## FlashAttention-2", "## FlashAttention-3"]),
    ):
        found = importlib.import_module(module)
        documented = {
            code for heading in headings for row in rows(page, heading) for code in codes(row[0])
        }
        for function in found.__all__:
            assert function in {code for row in rows(page, headings[-1]) for code in codes(row[0])}
            if function == "get_scheduler_metadata":  # gives None, whatever it is asked
                continue
            missing = set(inspect.signature(getattr(found, function)).parameters) - documented
            assert not missing, (function, missing)
    functions = {
        n
        for m in ("strobe.flash_attn", "strobe.flash_attn_3")
        for n in importlib.import_module(m).__all__
    }
    parameters = {
        name
        for m in ("strobe.flash_attn", "strobe.flash_attn_3")
        for function in importlib.import_module(m).__all__
        for name in inspect.signature(getattr(importlib.import_module(m), function)).parameters
    }
    stale = (
        documented
        - functions
        - parameters
        - {"flash_attn_interface", "flash_attn", "flash_attn_qkvpacked_func"}
    )
    assert not stale


def test_names_of_the_shim_are_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    for module, cell in (
        (row[0], row[1]) for row in rows(DOCS / "from-flash-attn.md", "## The shim")
    ):
        for name in codes(module):
            folder = ROOT / "python" / "flash_attn_shim" / Path(*name.split("."))
            path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            if cell.startswith("none"):
                assert not path.exists()
                continue
            source = path.read_text()
            for word in codes(cell):
                assert word.rstrip("_") in source, (name, word)


def test_names_of_other_interfaces_are_told_the_name_here() -> None:
    """Those in the table of names of docs/start.md, as keywords of Strobe's own function."""
    q = np.zeros((1, 8, 2, 16), np.float32)
    attention: Any = strobe.attention_with_kvcache
    table = [row for row in rows(DOCS / "start.md") if len(row) == 5]
    seen = 0
    for row in table[1:]:
        here = re.split(r"\W", codes(row[0])[0])[0]
        for cell in row[1:3]:
            for name in (re.split(r"\W", code)[0] for code in codes(cell)):
                if name == here:
                    continue
                seen += 1
                with pytest.raises(TypeError, match=f"{name}': it is called {here!r} here$"):
                    attention(q, q, q, **{name: None})
    assert seen > 6


def members(header: str) -> set[str]:
    """What a header declares: functions, structs, enums of C; classes and functions of C++."""
    text = (ROOT / "include" / "strobe" / header).read_text()
    text = re.sub(
        r"^namespace internal \{.*?^\}  // namespace internal$", "", text, flags=re.S | re.M
    )
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    if header.endswith(".h"):
        return set(
            re.findall(r"(strobe_\w+)\(", "".join(re.findall(r"STROBE_API[^;]*;", text)))
        ) | set(re.findall(r"typedef (?:struct|enum) (strobe_\w+)", text))
    found = re.findall(r"^(?:class|struct|enum class) (\w+)|^using (\w+)", text, re.M)
    found += re.findall(r"^(?:\[\[nodiscard\]\] )?inline [\w:<>* ]+?[ *](\w+)\(", text, re.M)
    return {name for pair in found for name in ((pair,) if isinstance(pair, str) else pair) if name}


def test_the_reference_of_c_is_whole() -> None:
    listed = re.findall(
        r"\{doxygen(?:function|struct|enum)\} (strobe_\w+)",
        (DOCS / "reference" / "c.md").read_text(),
    )
    declared = members("strobe.h")
    assert len(declared) > 25
    assert sorted(listed) == sorted(declared)


def test_the_reference_of_cpp_is_whole() -> None:
    listed = re.findall(
        r"\{doxygen\w+\} strobe::(\w+)", (DOCS / "reference" / "cpp.md").read_text()
    )
    headers = {x.name for x in (ROOT / "include" / "strobe").glob("*.hpp")}
    declared = set().union(*map(members, headers))
    assert len(declared) > 20
    assert sorted(listed) == sorted(declared)


def test_the_reference_of_python_is_whole() -> None:
    listed = set(
        re.findall(
            r"^\.\. auto\w+:: strobe\.(\w+)", (DOCS / "reference" / "python.md").read_text(), re.M
        )
    )
    modules = {"distributed", "flash_attn", "flash_attn_3", "torch", "transformers", "jax"}
    assert listed == (set(strobe.__all__) - {"__version__"}) | modules


def test_the_reference_of_the_tool_has_every_command() -> None:
    declared = re.findall(
        r'^  add\("(\w+)"', (ROOT / "src" / "cli" / "command_line.cpp").read_text(), re.M
    )
    listed = re.findall(r"<!-- help: (\w+) -->", (DOCS / "reference" / "cli.md").read_text())
    assert len(declared) > 4
    assert sorted(listed) == sorted(declared)


# ------------------------------------------------------------------------------- what goes wrong


def joined(path: Path) -> str:
    """A source with literals that stand beside each other as one, and formats as `…`."""
    text = path.read_text()
    text = re.sub(r'%" PRI[dux]64\s*"', "…", text)
    text = re.sub(r'%" PRI[dux]64', '…"', text)
    text = re.sub(r'(?<!\\)["\']\s*\n?\s*f?["\'](?=[^\s)])', "", text)
    text = re.sub(r"\$\{\w+\}|%[-\d.]*l?[dgspzu]+(?![a-z])", "…", text)
    if path.suffix == ".py":
        text = re.sub(r"\{[^{}\n]*\}", "…", text)
    return text.replace('\\"', '"')


def failing(path: str, pattern: str) -> set[str]:
    """The texts that a C++ file gives to what `pattern` matches."""
    text = joined(ROOT / path)
    return {
        found for found in re.findall(pattern + r'\s*"((?:[^"\\]|\\.)*)"', text) if len(found) > 8
    }


def documented_messages() -> list[str]:
    cells = [row[0] for row in rows(DOCS / "troubleshooting.md") if len(row) == 2]
    return [code for cell in cells for code in codes(cell)]


def is_like(message: str, documented: str) -> bool:
    """Whether a documented message, whose `…` stands for anything, is this one."""
    pattern = ".*".join(re.escape(part) for part in documented.split("…"))
    return re.fullmatch(f"(?s){pattern}", message) is not None


def test_every_status_is_documented() -> None:
    header = (ROOT / "include" / "strobe" / "strobe.h").read_text()
    declared = re.findall(
        r"^  (STROBE_\w+) =",
        header[header.index("strobe_status {") : header.index("} strobe_status")],
        re.M,
    )
    table = rows(DOCS / "troubleshooting.md", "## Statuses")
    assert [codes(row[0])[0] for row in table[1:]] == declared
    classes = {
        name
        for name in strobe.__all__
        if inspect.isclass(getattr(strobe, name))
        and issubclass(getattr(strobe, name), strobe.Error)
    }
    named = {
        code.removeprefix("strobe.")
        for row in table
        for code in codes(row[0])
        if code.startswith("strobe.")
    }
    assert named == classes - {"Error"}


RING_MESSAGE = r"(?:Error\(\s*Status::\w+,|invalid\()\s*(?:(?:internal::)?formatted\()?"


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        (
            "src/core/validate.cpp",
            r"(?:invalid\(format\(|invalid\(|STROBE_UNSUPPORTED,\s*format\()",
        ),
        ("src/core/validate_cache.cpp", r"(?:invalid\(\s*format\(|invalid\()"),
        ("src/core/validate_mask.cpp", r"(?:invalid\(\s*format\(|invalid\()"),
        ("src/core/checks.cpp", r"(?:invalid\(\s*format\(|invalid\()"),
        ("src/core/overlap.cpp", r"invalid\(\s*format\("),
        ("src/core/merge.cpp", r"invalid\(\s*format\("),
        ("include/strobe/ring_plan.hpp", RING_MESSAGE),
        ("include/strobe/ring_checks.hpp", RING_MESSAGE),
        ("include/strobe/ulysses.hpp", RING_MESSAGE),
        ("include/strobe/nccl.hpp", RING_MESSAGE),
        ("include/strobe/gpu.hpp", RING_MESSAGE),
        ("src/api/capi.cpp", r"(?:invalid\(\s*format\(|invalid\(|STROBE_UNSUPPORTED,)"),
        ("src/api/tuning.cpp", r"(?:error = format\(|error =|return format\(|return(?= \"is))"),
        ("src/cpu/fill_plan.cpp", r"return format\("),
        ("src/cuda/host/fill_plan.cpp", r"(?:return format\(|return)"),
        ("src/cuda/host/instance_choice.cpp", r"(?:return|return format\(|declined\(format\()"),
        ("src/cuda/host/asked_features.h", r"(?:return|return format\()"),
        ("src/cuda/host/cached_choice.cpp", r"(?:return|return format\(|reason = format\()"),
        ("src/cuda/host/tensor_choice.cpp", r"(?:return|return format\(|reason = format\()"),
        ("src/cuda/host/tma_declines.cpp", r"return format\("),
        ("src/cpu/dispatch.cpp", r"(?:return|return format\()"),
        ("cmake/cuda.cmake", r"FATAL_ERROR"),
        ("cmake/library.cmake", r"FATAL_ERROR"),
        ("cmake/programs.cmake", r"FATAL_ERROR"),
        ("cmake/python.cmake", r"FATAL_ERROR"),
        ("cmake/wheel.cmake", r"FATAL_ERROR"),
        ("cmake/manylinux.cmake", r"FATAL_ERROR"),
    ],
)
def test_every_message_is_documented(path: str, pattern: str) -> None:
    found = failing(path, pattern)
    assert found
    found.discard(
        "… = …, expected ……"
    )  # the rest is in src/core/options.def: the other test has it
    listed = documented_messages()
    # So general that it would stand for any.
    listed = [text for text in listed if len(text.replace("…", "").strip()) > 4]
    missing = [
        text
        for text in found
        if not any(is_like(text, d) or is_like(text, d + "…") for d in listed)
    ]
    assert not missing


def text_of(node: ast.expr) -> str:
    """A message in Python's source, with `…` for what is put in."""
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(x.value) if isinstance(x, ast.Constant) else "…" for x in parts)


def python_messages() -> Iterable[str]:
    classes = {"InvalidArgument", "Unsupported", "OutOfMemory", "ImportError"}
    for path in (ROOT / "python").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                text = text_of(node.args[0])
                # One without words is made elsewhere; mask functions say what joins another text.
                if node.func.id in classes and re.search("[a-z]{3}", text):
                    yield text


def test_every_message_of_python_is_documented() -> None:
    found = set(python_messages()) - {"…, which says …", "…… = …, expected …", "q.dtype = …, …"}
    assert len(found) > 80
    listed = [d for d in documented_messages() if len(d.replace("…", "").strip(" =,")) > 8]
    missing = [x for x in found if not any(is_like(x, d) or is_like(x, f"…{d}…") for d in listed)]
    assert not missing


# What an engineer who knows attention, Python and C++ knows, and names of products.
KNOWN_WORDS = {
    *(
        "AMD",
        "API",
        "JSON",
        "BERT",
        "BLOOM",
        "BSD-3",
        "CHANGELOG",
        "CLI11",
        "CMake",
        "CONTRIBUTING",
    ),
    *("CPU", "CPUs", "CUDA", "DeBERTa", "EPYC", "FSDP", "GB", "GCC", "GIL", "GPT", "GPU", "GPUs"),
    *(
        "HBM3",
        "RTX",
        "JAX",
        "KERNEL",
        "LM",
        "MB",
        "MiniLM",
        "NVIDIA",
        "OSS",
        "PROBLEM",
        "PyPI",
        "README",
        "TB",
    ),
    *("RMSNorm", "SwiGLU", "XLNet", "macOS", "FLOPs", "FMA", "vLLM"),
}


def test_every_abbreviation_for_users_is_in_the_glossary() -> None:
    """Of README and the pages that the site has for users, but in code."""
    words = re.findall(r"^\| ([^|]+) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    explained = set(re.findall(r"[\w.-]+", " ".join(words)))
    explained |= {"KV", "GFLOP", "TFLOP"}
    contents = (DOCS / "index.md").read_text()
    users = re.findall(r":caption: For users.*?\n\n(.*?)\n```", contents, re.DOTALL)[0].split()
    pages = [DOCS / f"{name}.md" for name in users] + [
        ROOT / "README.md",
        ROOT / "examples/README.md",
    ]
    found = set()
    for path in pages:
        if path.stem == "glossary":
            continue
        text = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL)
        text = re.sub(r"^    .*$|(?<=\])\([^)]*\)", "", text, flags=re.MULTILINE)
        found |= set(re.findall(r"\b[A-Za-z]*[A-Z]{2,}[A-Za-z0-9]*(?:-\d+)?\b", text))
    assert len(found) > 40
    assert sorted(found - explained - KNOWN_WORDS) == []


def test_the_instruction_sets_are_limited_by_one_word() -> None:
    """A name of STROBE_CPU_ISA stands for all narrower instruction sets too: it forces none."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    for folder in ("include", "src", "python"):
        paths += [
            p for p in (ROOT / folder).rglob("*") if p.suffix in {".h", ".hpp", ".cpp", ".py"}
        ]
    lines = [x for p in paths for x in p.read_text().splitlines() if "STROBE_CPU_ISA" in x]
    assert len(lines) > 10
    assert [x for x in lines if re.search(r"\b(forc|cap)(es|s|e|ed)?\b", x)] == []


def test_every_environment_variable_is_documented() -> None:
    sources = [
        p
        for f in ("src", "python")
        for p in (ROOT / f).rglob("*")
        if p.suffix in {".cpp", ".h", ".py"}
    ]
    asked = r"""(?:getenv\(|environ(?:\.get)?[(\[])\s*["'](STROBE_\w+)"""
    found = {name for p in sources for name in re.findall(asked, p.read_text())}
    assert len(found) > 3
    table = rows(DOCS / "troubleshooting.md", "## Environment variables")
    assert not found - {code.partition("=")[0] for row in table for code in codes(row[0])}


def test_documented_messages_are_what_the_code_says() -> None:
    folders = ("src", "include", "python", "cmake", "scripts")
    suffixes = (".cpp", ".h", ".hpp", ".def", ".py", ".cmake", ".sh")
    sources = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    text = "\n".join(joined(p) for p in sorted(sources))
    others = {  # the system's, and the C++ library's
        "error while loading shared libraries: libstrobe.so",
        "terminate called without an active exception",
    }
    stale = []
    table = (row for row in rows(DOCS / "troubleshooting.md") if len(row) == 2)
    messages = [
        code for row in table for code in codes(row[0]) if " " in code and code not in others
    ]
    assert len(messages) > 90
    for message in messages:
        # What is expected of an option is a text of its own.
        parts = [
            part for part in re.split(r"…|(?<=^… = …), expected ", message) if len(part.strip()) > 2
        ]
        if not all(part in text for part in parts):
            stale.append((message, [part for part in parts if part not in text]))
    assert not stale


# ----------------------------------------------------------------------------- the site's machinery


def script(name: str, folder: str = "scripts") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figure_is_what_the_script_draws() -> None:
    drawn = script("tile_figure")
    assert drawn.FIGURE.read_text() == drawn.figure()
    # As docs/learn.md says of it, by a count of pairs of its own.
    for left, counts in ((None, (36, 8)), (160, (26, 19))):
        kinds = []
        for tile in range(8):
            for block in range(8):
                seen = [
                    j <= i and (left is None or i - j <= left)
                    for i in range(64 * tile, 64 * tile + 64)
                    for j in range(64 * block, 64 * block + 64)
                ]
                if any(seen):
                    kinds.append(all(seen))
        assert (len(kinds), kinds.count(False)) == counts
        assert f"{counts[0]} of 64 pairs are computed, {counts[1]} with a mask" in drawn.figure()


def test_headers_become_doxygens() -> None:
    header = """/* The file.
 */
#define A 1 /* one */
/* Of b:
 *  - two lines. */
int b;  // behind <b>
        // and on
// Of c.
// Still.
int c; /* more
          lines */
const char* d = "//";
"""
    wanted = """#define A 1 /**< one */
/** Of b:
 - two lines. */
int b;  /**< behind \\<b\\>
and on */
/** Of c.
Still. */
int c; /**< more
lines */
const char* d = "//";
"""
    assert script("doxygen_filter").filtered(header) == wanted


def test_every_name_of_a_declaration_gets_its_comment() -> None:
    header = """#define A
  // Of both.
  int64_t left = -1, right = -1;
  const void *q, *k; /* also
                        of both */
  int f(int a, int b);
  std::vector<int> v(a, b), w;
"""
    wanted = """#define A
/** Of both. */
  int64_t left = -1;
/** Of both. */
  int64_t right = -1;
  const void *q; /**< also
of both */
  const void *k; /**< also
of both */
  int f(int a, int b);
  std::vector<int> v(a, b), w;
"""
    said = script("doxygen_filter").filtered(header)
    assert re.sub(r"^ *(?=/\*\*)", "", said, flags=re.MULTILINE) == wanted


def test_comments_of_lines_may_have_code_in_them() -> None:
    header = """#define A
// As in
//   A<int> a = {.b = 1};
//   a.c();
// and so on <b>.
int a;
"""
    wanted = """#define A
/** As in
\\code{.cpp}
A<int> a = {.b = 1};
a.c();
\\endcode
and so on \\<b\\>. */
int a;
"""
    assert script("doxygen_filter").filtered(header) == wanted


def test_what_ends_a_namespace_is_no_comment_of_what_follows() -> None:
    header = """#define A
namespace b {
}  // namespace b
// Of c.
int c;
#endif  // A
"""
    wanted = """#define A
namespace b {
}
/** Of c. */
int c;
#endif
"""
    assert script("doxygen_filter").filtered(header) == wanted


def test_a_comment_of_several_fields_is_one_of_their_struct() -> None:
    header = """#define A
/* Some. */
typedef struct some {
  int first; /* 1 */
  /* Of the
   * next two. */
  int second; /* 2 */
  int third, fourth; /* 3 and 4 */

  /* More of one. */
  int fifth; /* 5 */
} some;
"""
    wanted = """#define A
/** Some.

\\c second to \\c fourth: Of the
next two. */
typedef struct some {
  int first; /**< 1 */
  int second; /**< 2 */
  int third; /**< 3 and 4 */
  int fourth; /**< 3 and 4 */

  /** More of one. */
  int fifth; /**< 5 */
} some;
"""
    assert script("doxygen_filter").filtered(header) == wanted
    with pytest.raises(
        ValueError, match="second to fourth have a comment, and their struct has none"
    ):
        script("doxygen_filter").filtered(header.replace("/* Some. */", ""))


HEADER = """#define STROBE_A 1 /* a */
/* Where. */
typedef enum strobe_where {
  STROBE_HERE = 0, /* here */
  STROBE_THERE = 1 /* there */
} strobe_where;
/* Both. */
typedef struct strobe_both {
  int left, right; /* each */
} strobe_both;
/* Does it. */
int strobe_do(strobe_both* both);
"""


def undocumented(folder: Path, headers: dict[str, str]) -> list[str]:
    """What scripts/check_site.py says of headers, as Doxygen reads them for the site."""
    (folder / "include" / "strobe").mkdir(parents=True)
    for name, text in headers.items():
        (folder / "include" / "strobe" / name).write_text(text)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / "build" / "docs-work" / "doxygen").mkdir(parents=True)
    subprocess.run(["doxygen", ROOT / "docs" / "Doxyfile"], cwd=folder, check=True)
    found: list[str] = script("check_site").undocumented(
        folder / "build" / "docs-work" / "doxygen" / "xml"
    )
    return found


@pytest.mark.skipif(not shutil.which("doxygen"), reason="no Doxygen")
@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("", []),
        (" /* a */", ["STROBE_A"]),
        ("/* Where. */", ["strobe_where"]),
        (" /* there */", ["strobe_where.STROBE_THERE"]),
        ("/* Both. */", ["strobe_both"]),
        (" /* each */", ["strobe_both.left", "strobe_both.right"]),
        ("/* Does it. */", ["strobe_do"]),
    ],
)
def test_a_symbol_without_text_is_found(text: str, missing: list[str], tmp_path: Path) -> None:
    header = "/* A file. */\n" + (HEADER.replace(text, "") if text else HEADER)
    assert undocumented(tmp_path, {"a.h": header}) == [
        f"{x}: no text in its header" for x in missing
    ]


@pytest.mark.skipif(not shutil.which("doxygen"), reason="no Doxygen")
def test_no_public_symbol_is_without_text(tmp_path: Path) -> None:
    headers = {p.name: p.read_text() for p in (ROOT / "include" / "strobe").iterdir()}
    assert undocumented(tmp_path, headers) == []


def test_no_xml_is_a_fault(tmp_path: Path) -> None:
    assert script("check_site").undocumented(tmp_path) == [f"{tmp_path}: no public symbol"]


def test_how_documents_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text(
        "# A `b`, [c](d.md): e\n## A\n## A\n`[no](link)` [yes](x.md#y)\n\n    [no](code)\n\n"
        "```{directive} x\n```\n<!-- not run: it has no GPU -->\n```python\n# no heading\n```\n"
        "<!-- not run: -->\n````sh\n```\n````\n"
    )
    assert documents.anchors(path) == {"a-b-c-e", "a", "a-1"}
    assert documents.links(path) == ["d.md", "x.md#y"]
    found = [(b.language, b.text, b.left_alone) for b in documents.blocks(path)]
    assert found == [("python", "# no heading\n", True), ("sh", "```\n", False)]


def test_docstrings_become_restructuredtext() -> None:
    text = """What `it` does to |x| and has_ *.

    call(it)

Args:
    q, k: the first
        two.
    more,
    and_more: as in `other`.

Returns, Raises: as `other`.

Example:
    >>> it(1)"""
    lines = text.splitlines()
    script("conf", "docs").docstring(None, "function", "it", None, None, lines)
    assert "\n".join(lines).strip("\n").split("\n") == [
        "What ``it`` does to \\|x\\| and has\\_ \\*.",
        "",
        ".. code-block:: python",
        "",
        "    call(it)",
        "",
        ".. rubric:: Arguments",
        "",
        "``q, k``",
        "    the first two.",
        "",
        "``more, and_more``",
        "    as in ``other``.",
        "",
        ".. rubric:: Returns, Raises",
        "",
        "as ``other``.",
        "",
        ".. rubric:: Example",
        "",
        ".. code-block:: python",
        "",
        "    >>> it(1)",
    ]


def test_links_of_a_page_on_the_site() -> None:
    conf = script("conf", "docs")
    app = SimpleNamespace(srcdir=str(DOCS), env=SimpleNamespace(note_dependency=lambda path: None))
    given = {
        "[jax.md](jax.md#speed)": "[Strobe in JAX](jax.md#speed)",
        "[x](../CONTRIBUTING.md)": "[x](contributing.md)",
        "[y](../bench/README.md)": "y",
        "[z](https://example.org/a.md)": "[z](https://example.org/a.md)",
        "[README](../README.md)": "[README](index.md)",
        "![f](figures/tiles.svg)": "![f](figures/tiles.svg)",
    }
    source = [" ".join(given)]
    conf.from_elsewhere(app, "learn", source)
    assert source == [" ".join(given.values())]
    source = [""]
    conf.from_elsewhere(app, "contributing", source)
    assert source[0].startswith("# Contributing")
    assert "[Architecture](architecture.md)" in source[0]


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    conf = script("conf", "docs")
    text = (DOCS / "reference" / "python.md").read_text()
    source = [text]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax" else name)
    conf.installed_modules(None, "reference/python", source)
    before = text.partition("## strobe.jax\n")[0]
    assert source[0].startswith(before + "## strobe.jax\n\nLeft out: jax was not installed")
    assert "automodule:: strobe.jax" not in source[0]


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        (
            '<a href="other.html#there">x</a><a href="https://example.org">x</a><img src="a.svg">',
            "",
        ),
        ('<a href="none.html">x</a>', "index.html: none.html leads to no file"),
        ('<a href="other.html#nowhere">x</a>', "index.html: other.html#nowhere leads to no anchor"),
        ('<a href="#nowhere">x</a>', "index.html: #nowhere leads to no anchor"),
        (
            '<script src="https://cdn.example.org/x.js"></script>',
            "index.html: loads https://cdn.example.org/x.js",
        ),
        (
            '<link rel="stylesheet" href="//example.org/x.css">',
            "index.html: loads //example.org/x.css",
        ),
        (
            "<style>@import 'https://example.org/f.css';</style>",
            "index.html: loads https://example.org/f.css",
        ),
        (
            '<p style="background: url(http://example.org/x.png)">',
            "index.html: loads http://example.org/x.png",
        ),
        ("<p>a `b` <code>`c`</code></p>", "index.html: shows 'a `b`'"),
        ("<p>**&lt; namespace x** y</p>", "index.html: shows '**< namespace x** y'"),
        ("<dd><p>\n&lt; namespace x</p></dd>", "index.html: shows '< namespace x'"),
        ("<pre>`x` /** y</pre>", ""),
        ("<dl><dt>f</dt><dd><p>Likewise. So.</p></dd></dl>", "index.html: shows 'Likewise. So.'"),
        ("<dl><dt>f</dt><dd><p>That.</p><p>Likewise</p></dd></dl>", ""),
    ],
)
def test_a_built_site_is_whole(page: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(page)
    (tmp_path / "other.html").write_text('<h1 id="there">x</h1>')
    (tmp_path / "a.svg").write_text("<svg/>")
    (tmp_path / "a.css").write_text("p { background: url(a.svg) }")
    check = script("check_site")
    assert check.faults(tmp_path) == ([fault] if fault else [])


def test_scripts_and_styles_of_a_site_load_nothing(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<p>x</p>")
    (tmp_path / "a.css").write_text("@font-face { src: url('https://example.org/f.woff') }")
    (tmp_path / "a.js").write_text(
        'fetch("https://example.org/data.json"); // see https://example.org'
    )
    found: Any = script("check_site").faults(tmp_path)
    assert found == [
        "a.css: loads https://example.org/f.woff",
        "a.js: loads https://example.org/data.json",
    ]
