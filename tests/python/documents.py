"""The project's Markdown as tests read it: files, code blocks, links, headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A block that a test leaves alone says so in the line above it, and why.
LEFT_ALONE = re.compile(r"<!-- not run: \S.*-->")


def files() -> list[Path]:
    """All Markdown of the repository but what others' tools leave in it."""
    folders = ("docs", "examples", "python", "tests", "bench")
    found = [*ROOT.glob("*.md"), *(p for f in folders for p in (ROOT / f).rglob("*.md"))]
    return sorted(p for p in found if ".pytest_cache" not in p.parts)


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    path: Path
    line: int
    language: str
    text: str
    left_alone: bool

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks(path: Path) -> list[Block]:
    """Of one file. Sphinx's directives, ```{name}, are no code."""
    found, lines, at = [], path.read_text().split("\n"), 0
    while at < len(lines):
        opened = re.match(r"(`{3,})([\w{}+-]*)", lines[at])
        if not opened:
            at += 1
            continue
        end = at + 1
        while end < len(lines) and lines[end].rstrip() != opened[1]:
            end += 1
        if not opened[2].startswith("{"):
            above = lines[at - 1] if at else ""
            text = "\n".join(lines[at + 1 : end]) + "\n"
            left_alone = LEFT_ALONE.fullmatch(above.strip()) is not None
            found.append(Block(path, at + 1, opened[2], text, left_alone))
        at = end + 1
    return found


def imports(module: str, program: str) -> bool:
    """Whether a line of a program says so."""
    return re.search(rf"^ *(import|from) {module}\b", program, re.MULTILINE) is not None


def without_code(text: str) -> str:
    """The Markdown without its blocks and spans of code, on as many lines."""

    def blank(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    text = re.sub(r"^(`{3,}).*?^\1`*$", blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?<=\n\n)(?: {4}.*\n|\n)+", blank, text)
    return re.sub(r"(`+)[^`]+\1", "", text)


def anchors(path: Path) -> set[str]:
    """What a repository's page, and the site, call the headings of a file."""
    found: set[str] = set()
    text = re.sub(r"^(`{3,}).*?^\1`*$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,6} +(.+?) *$", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 0
        while (slug if not number else f"{slug}-{number}") in found:
            number += 1
        found.add(slug if not number else f"{slug}-{number}")
    return found


def links(path: Path) -> list[str]:
    """Targets of links and images."""
    return re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text()))
