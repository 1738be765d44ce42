"""Ranges of PyTorch's profiler around launches: `_core` asks for them while a profiler is on."""

from __future__ import annotations

from typing import Any, Final

import torch.autograd.profiler

from . import _core

# The module's flag, which PyTorch sets for torch.profiler, emit_nvtx and emit_itt, and asks itself
# where a question of the profiler would take too long. Without it calls have no ranges.
_FLAG: Final = "_is_profiler_enabled"


def introduce() -> None:
    """Tells _core where it says whether a profiler is on."""
    names = torch.autograd.profiler.__dict__
    if _FLAG in names:
        _core.set_profiler(names, _FLAG)


def begin(name: str) -> Any:
    """A range begins."""
    record = torch.autograd.profiler.record_function(name)
    record.__enter__()
    return record


def end(record: Any) -> None:
    """What `begin` began ends."""
    record.__exit__(None, None, None)
