"""What became of calls of scaled_dot_product_attention: for `strobe.why` and `sdpa_kernel`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

_NONE_YET: Final = (
    "no call seen: Strobe sees calls of scaled_dot_product_attention inside `with "
    "strobe.torch.sdpa_kernel():`, and in its place as PyTorch's flash kernel after "
    'torch.nn.attention.activate_flash_attention_impl("STROBE"); none was made in this thread'
)
# What `strobe.why()` says of a block in which nothing has been called yet.
_NO_CALL: Final = (
    "no call seen: nothing has called scaled_dot_product_attention since this thread's latest "
    "`with strobe.torch.sdpa_kernel()` began"
)

_counting: Final = threading.Lock()  # what PyTorch's registry gives is counted by all threads


@dataclass
class ServedCalls:
    """What became of the calls inside `sdpa_kernel`, or after `register`: `calls` were computed by
    Strobe, `fallbacks` has the reasons of the others, without their shapes, and how often each was
    given. What activation checkpointing computes again may be counted again.
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
    """Who computes a call. reason: why PyTorch does, with the call's shapes; kind: without; both
    are "" if Strobe does.
    """

    __slots__ = ("kind", "reason", "text")

    def __init__(
        self,
        *,
        kernel: str = "",
        kind: str = "",
        detail: str = "",
        what: str = "scaled_dot_product_attention",
    ) -> None:
        """kernel: of Strobe; kind and detail: why none; what: the function that was called."""
        self.kind = kind
        self.reason = f"{kind}: {detail}" if detail else kind
        self.text = (
            f"declined: {what} was left to PyTorch, because {self.reason}"
            if kind
            else f"served: {what} was computed by Strobe's kernel {kernel}"
        )


class _Thread(threading.local):
    """What each thread keeps."""

    def __init__(self) -> None:
        self.latest = _NONE_YET  # what became of its latest call of PyTorch's attention
        self.open: list[ServedCalls] = []  # the blocks of `sdpa_kernel` that it is in


_thread: Final = _Thread()


def latest() -> str:
    """What `strobe.why()` says."""
    return _thread.latest


def enter(served: ServedCalls, *, again: bool = False) -> None:
    """A block begins. again: only to compute once more what was computed in it."""
    _thread.open.append(served)
    if not again:
        _thread.latest = _NO_CALL


def current() -> ServedCalls | None:
    """The counts of the innermost block that this thread is in."""
    return _thread.open[-1] if _thread.open else None


def leave(served: ServedCalls) -> None:
    """A block ends, maybe one whose beginning was compiled and so is not known here."""
    if _thread.open and _thread.open[-1] is served:
        _thread.open.pop()


def record(verdict: Verdict, *, counted: bool = True) -> None:
    """For `strobe.why()`, and the counts of the innermost block, also from compiled code."""
    _thread.latest = verdict.text
    served = current()
    if served is not None and counted:
        served.count(verdict)
