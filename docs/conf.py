"""The documentation site: `make docs` builds it from the Markdown of this folder.

Why these tools. Sphinx is what the field's projects are documented with (PyTorch, JAX, NumPy, CUTLASS' Python), so whoever comes knows
its pages, its search and its index, and other projects can link into them. MyST lets it read the same Markdown that a
repository's page shows, so that there is one text. Doxygen reads C and C++ as a compiler does, and Breathe puts
what it found onto Sphinx's pages; autodoc imports the Python package and shows its own docstrings and signatures. The theme Furo
needs no network, is readable on a telephone, and has a dark form.

The reference of the command line is what the tool itself prints: STROBE_CLI names it, STROBE_LIBRARY the library that
the Python package opens. scripts/docs.sh sets both.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

project = "Strobe"
author = "The Strobe authors"
copyright = author
release = ".".join(re.findall(r"#define STROBE_VERSION_\w+ (\d+)", (ROOT / "include/strobe/strobe.h").read_text()))
version = release

extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc"]
exclude_patterns = ["_static", "figures/README.md"]
nitpicky = False  # types of PyTorch and NumPy are on other sites, which no build asks for
suppress_warnings = ["toctree.empty_glob", "toc.empty_glob"]

# Anchors are those that a repository's page gives to headings, so that a link works in both places.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
myst_links_external_new_tab = False

html_theme = "furo"
html_title = f"Strobe {release}"
html_static_path = ["_static"]
html_css_files = ["strobe.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True, "footer_icons": []}
pygments_style = "friendly"
pygments_dark_style = "monokai"

breathe_projects = {"strobe": str(ROOT / "build/docs-work/doxygen/xml")}
breathe_default_project = "strobe"
breathe_domain_by_extension = {"h": "c", "hpp": "cpp"}
breathe_show_include = False
cpp_id_attributes = ["STROBE_API"]
c_id_attributes = ["STROBE_API", "STROBE_NOEXCEPT"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # else it would show overloads, which name their options in one word; docstrings say types
# Pages of the site whose text has its place elsewhere in the repository.
ELSEWHERE = {
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
    "examples": "examples/README.md",
    "flash-attn-shim": "python/flash_attn_shim/README.md",
}
LINK = re.compile(r"\[([^][]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")  # to a file


def title_of(page: Path) -> str:
    """The first heading of a page of the site."""
    path = ROOT / ELSEWHERE[page.stem] if page.stem in ELSEWHERE else page
    found = re.search(r"^# (.*)$", path.read_text(), re.MULTILINE) if path.is_file() else None
    return found[1] if found else ""


def from_elsewhere(app: Any, docname: str, source: list[str]) -> None:
    """The text of the file that a page stands for, and links to such files turned to their pages."""
    here = Path(app.srcdir) / f"{docname}.md"
    base = here
    if docname in ELSEWHERE:
        base = ROOT / ELSEWHERE[docname]
        app.env.note_dependency(str(base))
        source[0] = base.read_text()
    pages = {ROOT / path: name for name, path in ELSEWHERE.items()}
    pages[ROOT / "README.md"] = "index"

    def turned(found: re.Match[str]) -> str:
        words, path, anchor = found[1], found[2], found[3] or ""
        target = (base.parent / path).resolve()
        if target in pages:
            target = Path(app.srcdir) / f"{pages[target]}.md"
        elif target.suffix == ".md" and Path(app.srcdir) not in target.parents:
            return words  # a page of the repository alone
        if re.fullmatch(r"[\w./-]+\.md", words):
            words = title_of(target) or words  # where files have no names
        return f"[{words}]({os.path.relpath(target, here.parent)}{anchor})"

    source[0] = LINK.sub(turned, source[0])


def command_help(app: Any, docname: str, source: list[str]) -> None:
    """`<!-- help: COMMAND -->` on the page of the command line: what the tool prints."""

    def printed(found: re.Match[str]) -> str:
        tool = os.environ["STROBE_CLI"]
        text = subprocess.run([tool, "help", *found[1].split()], capture_output=True, text=True, check=True).stdout
        return f"```text\n{text.strip()}\n```"

    if docname == "reference/cli":
        source[0] = re.sub(r"<!-- help: *([a-z ]*?) *-->", printed, source[0])


# Sections of the page of the Python package, and what has to be installed for them.
NEEDED = {"flash_attn": "torch", "flash_attn_3": "torch", "torch": "torch", "transformers": "transformers", "jax": "jax"}


def installed_modules(app: Any, docname: str, source: list[str]) -> None:
    """Leaves out what cannot be imported here, and says so."""
    if docname != "reference/python":
        return
    for module, package in NEEDED.items():
        if importlib.util.find_spec(package) is None:
            section = re.compile(rf"(^## strobe\.{module}\n).*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
            source[0] = section.sub(rf"\1\nLeft out: {package} was not installed where this site was built.\n\n", source[0])


SECTION = re.compile(r"(Args|Returns|Raises|Returns, Raises|Yields|Examples?):\s*(.*)")
ITEM = re.compile(r"(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*(?:,\n\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*)*): ")


def inline(text: str) -> str:
    """A docstring's words in reStructuredText: `name` is code, and nothing else means anything."""
    parts = re.split(r"`+([^`]+)`+", text)
    escaped = [re.sub(r"([*|\\]|(?<=\w)_(?!\w))", r"\\\1", part) for part in parts[::2]]
    return "".join(f"{plain}``{code}``" for plain, code in zip(escaped, [*parts[1::2], ""], strict=True)).removesuffix("````")


def paragraphs(lines: list[str], code: bool = False) -> list[str]:
    """Text, and what is set in by four columns as code."""
    result: list[str] = []
    for block in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        if code or block.startswith("    "):
            result += [".. code-block:: python", "", *("    " + line for line in textwrap.dedent(block).split("\n")), ""]
        elif block.startswith("  - "):
            listed = re.sub(r"\n +(?!- )", " ", textwrap.dedent(block))
            result += [*inline(listed).split("\n"), ""]
        else:
            result += [*inline(block).split("\n"), ""]
    return result


def items(lines: list[str]) -> list[str]:
    """A section's names and what is said of them, as a list of definitions; or its text."""
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    if not ITEM.match(text):
        return paragraphs(text.split("\n"))
    result: list[str] = []
    for item in re.split(r"\n(?=\S)", re.sub(r",\n(?=\S)", ", ", text)):
        found = ITEM.match(item)
        if found is None:
            result += [inline(item), ""]
            continue
        body = re.sub(r"\s*\n\s*", " ", item[found.end() :])
        result += [f"``{found[1]}``", f"    {inline(body)}", ""]
    return result


def docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """The package's docstrings (Args, Returns, Raises) in reStructuredText."""
    blocks: list[tuple[str, list[str]]] = [("", [])]
    for line in lines:
        found = SECTION.fullmatch(line)
        if found:
            blocks.append((found[1], [found[2]] if found[2] else []))
        else:
            blocks[-1][1].append(line)
    result: list[str] = []
    for title, body in blocks:
        if title:
            result += [f".. rubric:: {title.replace('Args', 'Arguments')}", ""]
        result += items(body) if title and not title.startswith("Example") else paragraphs(body, bool(title))
    lines[:] = result


def setup(app: Any) -> dict[str, bool]:
    from breathe.renderer.sphinxrenderer import (
        SphinxRenderer,  # tests read this file without Sphinx
    )

    # Fields before functions, for which Breathe has no option: a C++ Problem is written in the order of its fields.
    SphinxRenderer.sections.sort(key=lambda section: section[1] != "Public Members")
    app.connect("autodoc-process-docstring", docstring)
    app.connect("source-read", from_elsewhere)
    app.connect("source-read", command_help)
    app.connect("source-read", installed_modules)
    return {"parallel_read_safe": True}
