"""A public header as Doxygen wants it: `python3 scripts/doxygen_filter.py FILE` prints it. docs/Doxyfile calls this.

The headers' comments are ordinary ones. One that stands before a declaration, at the beginning of its lines, becomes a
documentation comment of what follows; one behind code becomes a comment of what stands before it, with its further lines.
Lines keep their numbers.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# What a comment says in words that Doxygen would take for its commands or for HTML.
ESCAPED = re.compile(r"[<>@\\]")


def escaped(text: str) -> str:
    return ESCAPED.sub(lambda found: "\\" + found[0], text)


def filtered(text: str) -> str:
    """The header with `///` and `///<` in place of `//` and `/* */`."""
    lines = text.split("\n")
    result: list[str] = []
    in_block = False  # between /* and */
    behind = False  # the comment belongs to what stands before it
    head = True  # the comment that opens the file, which the reference's own page stands for
    for line in lines:
        head = head and not line.startswith("#")
        if head:
            result.append("")
            continue
        code, mark, comment = line, "", ""
        if in_block:
            code, mark, comment = "", "*", re.sub(r"^\s*(\* |\*(?!/))?", "", line)
        else:
            found = re.match(r'((?:[^"/]|"(?:[^"\\]|\\.)*"|/(?![/*]))*)(//|/\*)(.*)$', line)
            if found:
                code, mark, comment = found[1], found[2], found[3]
        if not mark:
            result.append(line)
            behind = False
            continue
        if mark != "*":
            # A further line of a comment behind code stands alone, and far to the right of what is declared.
            continued = behind and not code.strip() and mark == "//" and len(code) > 20
            behind = bool(code.strip()) or continued
        if mark == "/*" or mark == "*":
            in_block = not comment.rstrip().endswith("*/")
            comment = comment.rstrip().removesuffix("*/").rstrip()
        result.append(f"{code}///{'<' if behind else ''} {escaped(comment.strip())}".rstrip())
        if not in_block and mark == "*":
            behind = False
    return "\n".join(result)


if __name__ == "__main__":
    sys.stdout.write(filtered(Path(sys.argv[1]).read_text()))
