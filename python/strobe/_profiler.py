"""Ranges of PyTorch's profiler around launches: `_core` asks for them while a profiler is on."""

from __future__ import annotations

import sys
from typing import Any, Final

from . import _core

# A flag of torch.autograd.profiler, which PyTorch sets for torch.profiler, emit_nvtx and emit_itt,
# and reads itself where to ask the profiler would take too long. Without it calls have no ranges.
_FLAG: Final = "_is_profiler_enabled"


def introduce(torch: Any) -> None:
    """Tells _core where this PyTorch says whether a profiler is on."""
    names = torch.autograd.profiler.__dict__
    if _FLAG in names:
        _core.set_profiler(names, _FLAG)


def begin(name: str) -> Any:
    """A range begins."""
    record = sys.modules["torch"].autograd.profiler.record_function(name)
    record.__enter__()
    return record


def end(record: Any) -> None:
    """What `begin` began ends."""
    record.__exit__(None, None, None)
