"""Other people's libraries beside the distribution flash-attn.

    run.py SITE RESULTS [LIBRARY...]

Each runs twice (`models.py`), without SITE on the path and with it: a folder that has Strobe and
the distribution flash-attn as pip installed them. With it,

  - every name that the library's sources import from flash_attn is there,
  - plain attention gives the same numbers as without,
  - flash_attn's gives them within rounding, and it was Strobe that computed them,
  - nothing is printed about a flash_attn that failed.

Prints a table. Exits with 1 if any of that does not hold.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from models import LIBRARIES

# What no distribution flash-attn 2.8.3 has: the parts of FlashAttention-4.
NOT_OF_2_8 = ("flash_attn.cute",)
TOLERANCE = 2e-4
COMPLAINTS = (
    "fail",
    "fall back",
    "falling back",
    "not usable",
    "cannot import",
    "could not import",
)


def start(library: str, path: str, target: Path) -> tuple[dict[str, Any] | None, str]:
    """What models.py found, None if it ended with an error, and what was printed."""
    target.unlink(missing_ok=True)
    script = Path(__file__).with_name("models.py")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STROBE_")}
    environment["PYTHONPATH"] = path
    done = subprocess.run(
        [sys.executable, str(script), library, str(target)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    found = json.loads(target.read_text()) if done.returncode == 0 else None
    return found, done.stdout


def difference(a: dict[str, list[float]], b: dict[str, list[float]]) -> float:
    """The worst; infinity where there are other numbers or none, or NaN."""
    if a.keys() != b.keys() or not a:
        return float("inf")
    worst = 0.0
    for name, x in a.items():
        y = b[name]
        if len(x) != len(y) or not x:
            return float("inf")
        for p, q in zip(x, y, strict=True):
            off = abs(p - q) / max(1.0, abs(p))
            worst = float("inf") if math.isnan(off) else max(worst, off)
    return worst


def complaints(text: str) -> list[str]:
    """Lines about a flash_attn that does not work."""
    return [
        line
        for line in text.splitlines()
        if "flash" in line.lower() and any(word in line.lower() for word in COMPLAINTS)
    ]


def check(library: str, site: str, results: Path) -> tuple[list[str], list[str]]:
    """A row of the table, and what is wrong."""
    began = time.monotonic()
    alone, text = start(library, "", results / f"{library}.alone.json")
    if alone is None:
        return [library, "?", *["-"] * 5], [f"without the shim it fails:\n{text}"]
    beside, text = start(library, site, results / f"{library}.beside.json")
    if beside is None:
        return [library, alone["version"], *["-"] * 5], [f"with the shim it fails:\n{text}"]
    assert not alone["beside"]
    assert beside["beside"]
    plain = difference(alone["plain"], beside["plain"])
    flash = difference(alone["plain"], beside["flash"])
    failed = [x for x in beside["failed"] if not x.startswith(NOT_OF_2_8)]
    problems = [f"not in flash_attn: {name}" for name in failed]
    problems += [f"it says: {line}" for line in complaints(text)]
    if plain > 0:
        problems.append(f"plain attention differs by {plain:.1e} when the shim is there")
    if not flash <= TOLERANCE:
        problems.append(f"attention by flash_attn differs by {flash:.1e}")
    if LIBRARIES[library][1] and not beside["calls"]:
        problems.append("Strobe was not called")
    row = [
        library,
        beside["version"],
        f"{beside['names'] - len(beside['failed'])} of {beside['names']}",
        f"{plain:.1e}",
        f"{flash:.1e}",
        str(beside["calls"]),
        f"{time.monotonic() - began:.0f}",
    ]
    return row, problems


def main() -> int:
    """As the module says."""
    site, results, *libraries = sys.argv[1:]
    libraries = libraries or list(LIBRARIES)
    for library in libraries:
        if library not in LIBRARIES:
            print(
                f"run.py: got {library!r}, expected one of {', '.join(LIBRARIES)}", file=sys.stderr
            )
            return 2
    site = str(Path(site).resolve())
    folder = Path(results)
    folder.mkdir(parents=True, exist_ok=True)
    heads = ["library", "version", "names", "plain", "flash", "calls", "s"]
    widths = [22, 10, 9, 9, 9, 6, 4]

    def line(cells: list[str]) -> None:
        print(" ".join(x.ljust(n) for x, n in zip(cells, widths, strict=True)).rstrip(), flush=True)

    line(heads)
    wrong = 0
    for library in libraries:
        row, problems = check(library, site, folder)
        line(row)
        for problem in problems:
            print(f"  {library}: {problem}", flush=True)
        wrong += bool(problems)
    well = len(libraries) - wrong
    print(f"{well} of {len(libraries)} libraries are well beside Strobe's flash-attn")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
