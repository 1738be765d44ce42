"""A public header as Doxygen wants it: `python3 scripts/doxygen_filter.py FILE` prints it. docs/Doxyfile calls this.

The headers' comments are ordinary ones. One that stands before a declaration becomes a documentation comment of what follows, one
behind code, with its further lines, of what stands before it. Where one declaration has several names, each gets the comment: Doxygen would
give it to one of them alone. One that stands before several fields, each of which has its own, is about all of them: it becomes a paragraph of their
struct's text. What is indented by two spaces and more in a comment of lines is code. The comment that opens a file is left out, as the
reference's own page stands for it, and so is what says where a namespace or a condition ends.
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

CODE = r'(?P<code>(?:[^"/]|"(?:[^"\\]|\\.)*"|/(?![/*]))*)'
BLOCK = re.compile(CODE + r"/\*(?P<text>.*?)\*/")
LINE = re.compile(CODE + r"//(?P<text>.*)")

SEVERAL = re.compile(
    r"(?P<type>\s+(?:const )?[\w:]+ )(?P<names>\*?\w+(?: = [^,;(]*)?(?:, \*?\w+(?: = [^,;(]*)?)+);(?P<behind>.*)", re.DOTALL
)


STRUCT = re.compile(r"(?:typedef )?struct \w+ \{.*")
NAME = re.compile(r"(\w+)(?:\[\w+\])?(?: = [^;]*)?;")


def comment(code: str, text: str, lines: bool = False) -> str:
    """A documentation comment behind `code`, or before what follows where there is none. lines: it was one of lines, //."""
    said: list[str] = []
    for is_code, part in itertools.groupby(text.split("\n"), lambda line: lines and line.startswith("  ")):
        if is_code:
            said += ["\\code{.cpp}", *(line.strip() for line in part), "\\endcode"]
        else:
            said += [re.sub(r"([<>@\\])", r"\\\1", line) for line in part]  # what Doxygen would take for its commands or for HTML
    inside = "\n".join(said)
    return f"{code}/**{'<' if code.strip() else ''} {inside} */"


def is_before(line: str) -> bool:
    """Whether this is a comment of what follows."""
    return re.match(r"\s*/\*\*(?!<)", line) is not None


def with_groups(lines: list[str]) -> list[str]:
    """What stands before several fields that have their own comments goes into the text of their struct."""
    result: list[str] = []
    said = 0  # where the comment of the struct is that begins last
    for n, line in enumerate(lines):
        if STRUCT.fullmatch(line):
            said = len(result) - 1
        fields = list(itertools.takewhile(lambda field: "/**<" in field, lines[n + 1 :]))
        if not is_before(line) or len(fields) < 2:
            result.append(line)
            continue
        first, last = (found[-1] for found in (NAME.findall(field.split("/**<")[0].replace(", ", ";")) for field in (fields[0], fields[-1])))
        text = line.strip().removeprefix("/**").removesuffix("*/").strip()
        if not is_before(result[said]):
            raise ValueError(f"{first} to {last} have a comment, and their struct has none")
        result[said] = f"{result[said].removesuffix('*/').rstrip()}\n\n\\c {first} to \\c {last}: {text} */"
    return result


def declarations(line: str, before: str) -> list[str]:
    """A declaration of several names as one of each, with the comment behind it or the one before it, which stands there already."""
    found = SEVERAL.fullmatch(line)
    if not found:
        return [line]
    result: list[str] = []
    for name in found["names"].split(", "):
        if result and is_before(before):
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
            behind = bool(found["code"].strip())
            said = [found["text"].removeprefix(" ").rstrip()]
            # Further lines stand alone, and behind code as far to the right as the first.
            while lines and (more := LINE.fullmatch(lines[0])) and not more["code"].strip():
                if behind and len(more["code"]) != len(found["code"]):
                    break
                said.append(more["text"].removeprefix(" ").rstrip())
                lines.pop(0)
            if re.match(r"\}|#endif|#else", found["code"].strip()):
                result.append(found["code"].rstrip())
            else:
                result.append(comment(found["code"], "\n".join(said), lines=True))
            continue
        while "/*" in line and "*/" not in line and lines:
            line += "\n" + re.sub(r"^\s*(\* ?(?!/))?", "", lines.pop(0))
        found = BLOCK.fullmatch(line) or re.fullmatch(BLOCK.pattern, line, re.DOTALL)
        result.append(comment(found["code"], found["text"].strip()) if found else line)
    result = with_groups(result)
    return "\n".join(line for n, each in enumerate(result) for line in declarations(each, result[n - 1] if n else ""))


if __name__ == "__main__":
    sys.stdout.write(filtered(Path(sys.argv[1]).read_text()))
