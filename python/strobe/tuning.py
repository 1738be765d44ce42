"""Choices that `strobe tune` measured on this machine: which file of them is in force.

    strobe.tuning.load("mine.json")     # from now on
    print(strobe.tuning.text())         # which file, and how many of its choices are for here

The library loads one by itself when the first plan is made: the file that STROBE_TUNING names, or
strobe/tuning.json in the user's cache folder. docs/tuning.md says how one is made, and what is
chosen. `strobe.plan` says of a call whether tuning chose.
"""

from __future__ import annotations

from os import PathLike

from . import _core

__all__ = ["load", "text"]


def load(path: str | PathLike[str] | None) -> None:
    """Puts a file of choices into force, for the calls from now on.

    Args:
        path: what `strobe tune` wrote on this machine; None: none, the rules choose alone.

    Raises:
        InvalidArgument: it cannot be read, is no such file, or is of another version of Strobe.
            What was in force stays.

    Example:
        >>> import strobe
        >>> strobe.tuning.load(None)
    """
    _core.load_tuning(path)
    _core.forget()


def text() -> str:
    """Which file of choices is in force, and how many of them are for this machine; or "none", and
    why where there is a reason.

    Example:
        >>> import strobe
        >>> strobe.tuning.load(None)
        >>> strobe.tuning.text()
        'none'
    """
    return _core.tuning_text()
