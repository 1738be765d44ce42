"""What became of calls: `strobe.why()` of every call, `sdpa_kernel` of its block's.

The extension keeps what the latest call of each thread was (`python/core/latest.h`), as every
launch goes by there. Functions further out tell it their name, when they have been served, and
what became of a call that was not.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Final

from . import _core
from ._problem import DTYPE_CODES

_NONE_YET: Final = (
    "no call seen: no function of Strobe's has computed anything in this thread. Strobe sees calls "
    "of scaled_dot_product_attention inside `with strobe.torch.sdpa_kernel():`, and in its place "
    "as PyTorch's flash kernel after "
    'torch.nn.attention.activate_flash_attention_impl("STROBE")'
)
# What `strobe.why()` says of a block in which nothing has been called yet.
_NO_CALL: Final = (
    "no call seen: no call has come to Strobe since this thread's latest "
    "`with strobe.torch.sdpa_kernel()` began"
)
# Of a call that came to no kernel.
ALL_HIDDEN: Final = "served: there was nothing to compute, as the mask hides every key"

# As `strobe.why()` names them.
SDPA: Final = "scaled_dot_product_attention"
GRADIENT_OF_SDPA: Final = f"the gradient of {SDPA}"

_counting: Final = threading.Lock()  # what PyTorch's registry gives is counted by all threads


@dataclass
class ServedCalls:
    """What became of the calls inside `sdpa_kernel`, or after `register`: `calls` were computed by
    Strobe, `fallbacks` has the reasons of the others, without their shapes, and how often each was
    given. What activation checkpointing computes again may be counted again.

    Example:
        >>> import torch, strobe
        >>> q, k, v = torch.randn(3, 2, 8, 300, 64)
        >>> with strobe.torch.sdpa_kernel() as served:
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> served
        ServedCalls(calls=1, fallbacks={})
    """

    calls: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)

    def count(self, verdict: Verdict) -> None:
        """One more call."""
        with _counting:
            if verdict.kind:
                self.fallbacks[verdict.kind] = self.fallbacks.get(verdict.kind, 0) + 1
            else:
                self.calls += 1


class Verdict:
    """Who computes a call. reason: why PyTorch does, with the call's shapes; kind: without; text:
    what `strobe.why()` says of it. All are "" if Strobe does.
    """

    __slots__ = ("kind", "reason", "text")

    def __init__(self, *, kind: str = "", detail: str = "", what: str = SDPA) -> None:
        """Of Strobe's; with a kind, of PyTorch's: what it is and, in detail, why; what: the
        function that was called.
        """
        self.kind = kind
        self.reason = f"{kind}: {detail}" if detail else kind
        self.text = f"declined: {what} was left to PyTorch, because {self.reason}" if kind else ""


class _Thread(threading.local):
    """What each thread keeps."""

    def __init__(self) -> None:
        self.open: list[ServedCalls] = []  # the blocks of `sdpa_kernel` that it is in


_thread: Final = _Thread()


def in_foreign_thread() -> bool:
    """Whether this thread is none that Python's `threading` started: one of PyTorch's, in which a
    backward pass runs on a GPU, say. Its calls are others' calls.
    """
    me = threading.get_ident()
    # Python gives a thread that it does not know such a name when somebody asks which one it is.
    return not any(
        x.ident == me and not x.name.startswith("Dummy-") for x in threading.enumerate()
    )


def latest() -> str:
    """What `strobe.why()` says."""
    found = _core.latest()
    if found is None:
        return _NONE_YET
    return found if isinstance(found, str) else _served(*found)


def _served(function: str, what: str | dict[str, Any]) -> str:
    """Of a call by `function`. what: the text of its plan, or the sizes of a merge."""
    if isinstance(what, dict):
        device = f"cuda:{what['device_index']}" if what["device"] else "cpu"
        dtype = next(name for name, code in DTYPE_CODES.items() if code == what["out_dtype"])
        sizes = ", ".join(
            f"{name} {what[name]}" for name in ("parts", "batch", "heads", "seqlen_q", "head_dim_v")
        )
        return (
            f"served: {function} was computed by Strobe on {device}\n"
            f"problem: {sizes}, float32 to {dtype}"
        )
    # As describe() of src/api/plan.cpp has it.
    head, _, kernels = what.partition("\nwhy\n")
    lines = dict(line.split(maxsplit=1) for line in head.splitlines())
    before: list[str] = []
    for line in kernels.splitlines():
        name, verdict = line.split(maxsplit=1)
        if verdict == "takes it":
            break
        before.append(f"{name} {verdict}")
        if verdict.startswith("takes it: "):  # and how
            break
    return "\n".join(
        [
            f"served: {function} was computed by Strobe's kernel {lines['kernel']}",
            f"problem: {lines['problem']}",
            *before,
        ]
    )


def enter(served: ServedCalls, *, again: bool = False) -> None:
    """A block begins. again: only to compute once more what was computed in it."""
    _thread.open.append(served)
    if not again:
        _core.say(_NO_CALL)


def current() -> ServedCalls | None:
    """The counts of the innermost block that this thread is in."""
    return _thread.open[-1] if _thread.open else None


def leave(served: ServedCalls) -> None:
    """A block ends, maybe one whose beginning was compiled and so is not known here."""
    if _thread.open and _thread.open[-1] is served:
        _thread.open.pop()


def record(verdict: Verdict, *, counted: bool = True) -> None:
    """For `strobe.why()`, and the counts of the innermost block, also from compiled code. Of a call
    that Strobe computed, its launches have told `strobe.why()`.
    """
    if verdict.kind:
        _core.say(verdict.text)
    served = current()
    if served is not None and counted:
        served.count(verdict)
