"""What is said about names that are not here: that this is Strobe's, and which names there are.

Whoever asks whether a name is there gets the answer of any other package: hasattr says False,
importlib.util.find_spec gives None. An import statement fails in any case; it fails with a reason.
Python itself does not tell the two apart, so the frames of the caller do. Should a later Python
have other frames, its own message takes the place of these.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

import strobe

_LONGEST: Final = 400

MODULES: Final = (
    "bert_padding",
    "flash_attn_interface",
    "layers.rotary",
    "ops.triton.rotary",
)


def _reason(problem: str, names: Sequence[str]) -> str:
    """`problem`, and as many of the names as fit."""
    text = f"{problem}: this flash_attn is Strobe's {strobe.__version__}, which has "
    rest = " and more, see dir()"
    for n, name in enumerate(names):
        separator = ", " if n else ""
        if len(text) + len(separator) + len(name) + len(rest) > _LONGEST:
            return text + rest.lstrip()
        text += separator + name
    return text


def _imports_from() -> bool:
    """Whether the caller's caller is at `from module import name`."""
    frame = sys._getframe(2)
    try:
        return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"
    except IndexError:
        return False


def attribute(module: str, names: Sequence[str]) -> Callable[[str], Any]:
    """The function `__getattr__` of a module that has `names`."""

    def get(name: str) -> Any:
        if _imports_from():
            problem = f"cannot import name {name!r} from {module!r}"
            raise ImportError(_reason(problem, names), name=module)
        raise AttributeError(_reason(f"module {module!r} has no attribute {name!r}", names))

    return get


class _Modules:
    """Last of the finders: knows no module, but why one of flash_attn's is not there."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # The caller is importlib's loop over the finders. Its caller is import or a question.
        imports = sys._getframe(2).f_code.co_name == "_find_and_load_unlocked"
        if imports and name.startswith("flash_attn."):
            raise ModuleNotFoundError(_reason(f"No module named {name!r}", MODULES), name=name)
        return None


def explain_modules() -> None:
    """From now on."""
    if _Modules not in sys.meta_path:
        sys.meta_path.append(_Modules)
