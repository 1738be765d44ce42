"""Whether a built documentation site is whole: `scripts/check_site.py FOLDER XML`. Exit 1 where it is not.

Every link within the site leads to a file, and to an anchor that is there; and no page, style or script asks the network for
anything, so that the site opens from its files. Links that a reader may follow to other sites are not asked. No page shows the marks of a
comment or of code that was not read as such, and no text of a symbol begins with "likewise", which says nothing to whoever looks up the symbol
alone. XML is the folder in which Doxygen left what it read in the public headers: every function, type, field, value and macro there has a text.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes by which a page loads what it shows; an <a> is followed by the reader alone.
LOADED = {"src", "srcset", "poster", "data", "href"}
STYLE = re.compile(r"""@import\s+["']?([^"';]+)|url\(\s*["']?([^"')]+)""")
REMOTE = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)
# What may have any text, and marks that stand nowhere else: of code in Markdown, and of comments that Doxygen or its filter took wrongly.
LITERAL = {"code", "pre", "script", "style", "title"}
MARKS = re.compile(r"`|\*\*<|/\*\*|< ?namespace|[\\@]code\b")


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.marks: list[str] = []
        self.literal = 0  # elements around that are in LITERAL
        self.begins = False  # whether the next text is the first of a symbol's

    def handle_endtag(self, tag: str) -> None:
        self.literal -= tag in LITERAL

    def handle_data(self, data: str) -> None:
        text = " ".join(data.split())
        if self.literal or not text:
            return
        if MARKS.search(text) or (self.begins and text.lower().startswith("likewise")):
            self.marks.append(text[:60])
        self.begins = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.literal += tag in LITERAL
        self.begins = tag == "dd" or (self.begins and tag != "dt")
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            elif tag == "a" and name == "href":
                self.links.append(value)
            elif tag == "link" and ("rel", "canonical") in attrs:
                continue
            elif name in LOADED:
                self.loaded.append(value)
            elif name == "style":
                self.loaded += styles(value)


def styles(text: str) -> list[str]:
    return [first or second for first, second in STYLE.findall(text)]


def faults(site: Path) -> list[str]:
    pages: dict[Path, Page] = {}
    for path in sorted(site.rglob("*.html")):
        page = pages[path.resolve()] = Page()
        text = path.read_text()
        page.feed(text)
        page.loaded += [found for block in re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL) for found in styles(block)]
    found = [] if pages else [f"{site}: no page"]
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name}: shows {mark!r}" for mark in page.marks]
        for link in page.links + page.loaded:
            if REMOTE.match(link):
                if link in page.loaded:
                    found.append(f"{name}: loads {link}")
                continue
            url = urlsplit(link)
            if url.scheme:  # mailto:, data:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not target.is_file():
                found.append(f"{name}: {link} leads to no file")
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].anchors | {"top"}:
                found.append(f"{name}: {link} leads to no anchor")
    for path in sorted(site.rglob("*.css")):
        found += [f"{path.relative_to(site)}: loads {link}" for link in styles(path.read_text()) if REMOTE.match(link)]
    for path in sorted(site.rglob("*.js")):
        asked = re.findall(r"""(?:fetch|import|importScripts|XMLHttpRequest)\(\s*["'`]((?:https?:)?//[^"'`]+)""", path.read_text())
        found += [f"{path.relative_to(site)}: loads {link}" for link in asked]
    return found


def undocumented(xml: Path) -> list[str]:
    """Of the public headers. What stands in a namespace `internal`, is private, or is not for callers to write is no public symbol."""
    not_public = re.compile(r"::internal(::.*)?$|_(H|HPP)_$|^STROBE_(API|NOEXCEPT)$")
    found = []
    symbols = 0
    for path in sorted(xml.glob("*.xml")):
        for compound in ET.parse(path).getroot().iter("compounddef"):
            owner = compound.findtext("compoundname", "")
            if not_public.search(owner) or compound.get("prot") == "private":
                continue
            symbols_here = [(owner, compound)] if compound.get("kind") in ("class", "struct", "union") else []
            for member in compound.iter("memberdef"):
                if member.get("prot") == "private":
                    continue
                name = member.findtext("name", "")
                scope = "" if compound.get("kind") in ("file", "namespace") else f"{owner}."
                symbols_here.append((scope + name, member))
                symbols_here += [(f"{name}.{value.findtext('name')}", value) for value in member.iter("enumvalue")]
            for name, symbol in symbols_here:
                symbols += 1
                said = [symbol.find(f"{part}description") for part in ("brief", "detailed")]
                if not not_public.search(name) and not any("".join(text.itertext()).strip() for text in said if text is not None):
                    found.append(f"{name}: no text in its header")
    return sorted(set(found)) if symbols else [f"{xml}: no public symbol"]


def main() -> int:
    site = Path(sys.argv[1])
    found = faults(site) + undocumented(Path(sys.argv[2]))
    count = len(list(site.rglob("*.html")))
    print("\n".join([*found, f"{site / 'index.html'}: {count} pages, " + (f"{len(found)} faults" if found else "no faults")]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
