"""Finds libstrobe and the extension `_core`, and opens the one by the other."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

if "t" in sys.abiflags:
    # It would load the extension by its name, and read objects where they are not.
    raise ImportError(
        "strobe: free-threaded Python is not supported: the extension is built for the limited API "
        "of Python with a GIL, whose objects are laid out otherwise. Use the build with a GIL"
    )
try:
    from . import _core
except ImportError as error:
    if not any(Path(__file__).parent.glob("_core*.so")):
        raise ImportError(
            "strobe: the extension strobe._core is not there: install the package with pip (pip "
            "install . at the root of the repository; it is called strobe-attention), or build "
            "CMake's target strobe_python, which puts it beside the package's Python files"
        ) from None
    raise error


def _candidates() -> list[Path]:
    """Where the library may be: STROBE_LIBRARY alone if it is set, else inside this package."""
    override = os.environ.get("STROBE_LIBRARY")
    if override:
        return [Path(override)]
    names = ["libstrobe.dylib", "libstrobe.so"] if sys.platform == "darwin" else ["libstrobe.so"]
    here = Path(__file__).resolve().parent
    return [folder / name for folder in (here, here / "lib") for name in names]


def _load() -> tuple[str, Path]:
    tried: list[str] = []
    for path in _candidates():
        if not path.is_file():
            tried.append(f"{path}: no such file")
            continue
        try:
            return _core.load(path), path
        except OSError as error:
            tried.append(f"{path}: {error}")
    if os.environ.get("STROBE_LIBRARY"):
        hint = "STROBE_LIBRARY is set, so nothing else was tried"
    else:
        hint = (
            "install the package with pip (pip install . at the root of the repository; it is "
            "called strobe-attention), or set STROBE_LIBRARY to a libstrobe.so that CMake built"
        )
    listed = "".join(f"\n  {line}" for line in tried)
    raise ImportError(f"strobe: the library was not found. Tried:{listed}\n{hint}.")


_LOADED: Final = _load()
VERSION: Final[str] = _LOADED[0]
LIBRARY_PATH: Final[Path] = _LOADED[1]
