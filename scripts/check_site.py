"""Whether a built documentation site is whole: `scripts/check_site.py FOLDER`. Exit 1 where it is not.

Every link within the site leads to a file, and to an anchor that is there; and no page, style or script asks the network for
anything, so that the site opens from its files. Links that a reader may follow to other sites are not asked.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes by which a page loads what it shows; an <a> is followed by the reader alone.
LOADED = {"src", "srcset", "poster", "data", "href"}
STYLE = re.compile(r"""@import\s+["']?([^"';]+)|url\(\s*["']?([^"')]+)""")
REMOTE = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
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


def main() -> int:
    site = Path(sys.argv[1])
    found = faults(site)
    count = len(list(site.rglob("*.html")))
    print("\n".join([*found, f"{site / 'index.html'}: {count} pages, " + (f"{len(found)} faults" if found else "no faults")]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
