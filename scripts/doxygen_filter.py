"""A public header as Doxygen wants it: `python3 scripts/doxygen_filter.py FILE` prints it. docs/Doxyfile calls this.

The headers' comments are ordinary ones. One that stands before a declaration becomes a documentation comment of what follows, one
behind code, with its further lines, of what stands before it. Where one declaration has several names, each gets the comment: Doxygen would
give it to one of them alone. The comment that opens a file is left out: the reference's own
page stands for it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CODE = r'(?P<code>(?:[^"/]|"(?:[^"\\]|\\.)*"|/(?![/*]))*)'
BLOCK = re.compile(CODE + r"/\*(?P<text>.*?)\*/")
LINE = re.compile(CODE + r"//(?P<text>.*)")

SEVERAL = re.compile(
    r"(?P<type>\s+(?:const )?[\w:]+ )(?P<names>\*?\w+(?: = [^,;(]*)?(?:, \*?\w+(?: = [^,;(]*)?)+);(?P<behind>.*)", re.DOTALL
)


def comment(code: str, text: str) -> str:
    """A documentation comment behind `code`, or before what follows where there is none."""
    escaped = re.sub(r"([<>@\\])", r"\\\1", text)  # what Doxygen would take for its commands or for HTML
    return f"{code}/**{'<' if code.strip() else ''} {escaped} */"


def declarations(line: str, before: str) -> list[str]:
    """A declaration of several names as one of each, with the comment behind it or the one before it, which stands there already."""
    found = SEVERAL.fullmatch(line)
    if not found:
        return [line]
    result: list[str] = []
    for name in found["names"].split(", "):
        if result and re.match(r"\s*/\*\*(?!<)", before):
            result.append(before)
        result.append(f"{found['type']}{name};{found['behind']}")
    return result


def filtered(text: str) -> str:
    """The header with documentation comments."""
    lines = text.split("\n")
    while lines and not lines[0].startswith("#"):
        lines.pop(0)
    result: list[str] = []
    while lines:
        line = lines.pop(0)
        found = LINE.fullmatch(line)
        if found:
            said = [found["text"].strip()]
            behind = bool(found["code"].strip())
            # Further lines stand alone, and behind code as far to the right as the first.
            while lines and (more := LINE.fullmatch(lines[0])) and not more["code"].strip():
                if behind and len(more["code"]) != len(found["code"]):
                    break
                said.append(more["text"].strip())
                lines.pop(0)
            result.append(comment(found["code"], "\n".join(said)))
            continue
        while "/*" in line and "*/" not in line and lines:
            line += "\n" + re.sub(r"^\s*(\* ?(?!/))?", "", lines.pop(0))
        found = BLOCK.fullmatch(line) or re.fullmatch(BLOCK.pattern, line, re.DOTALL)
        result.append(comment(found["code"], found["text"].strip()) if found else line)
    return "\n".join(line for n, each in enumerate(result) for line in declarations(each, result[n - 1] if n else ""))


if __name__ == "__main__":
    sys.stdout.write(filtered(Path(sys.argv[1]).read_text()))
