"""What became of calls of scaled_dot_product_attention: for `strobe.why` and `sdpa_kernel`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

# .text: what became of this thread's latest call of PyTorch's attention.
_latest: Final = threading.local()

_NONE_YET: Final = (
    "no call seen: Strobe sees calls of scaled_dot_product_attention inside `with "
    "strobe.torch.sdpa_kernel():`, and in its place as PyTorch's flash kernel after "
    "strobe.torch.register(); none was made in this thread"
)
# What `strobe.why()` says of a block in which nothing has been called yet.
_NO_CALL: Final = (
    "no call seen: nothing has called scaled_dot_product_attention since this thread's latest "
    "`with strobe.torch.sdpa_kernel()` began"
)


def latest() -> str:
    """What `strobe.why()` says."""
    return str(getattr(_latest, "text", _NONE_YET))


@dataclass
class ServedCalls:
    """What became of the calls inside `sdpa_kernel`: `calls` were computed by Strobe, `fallbacks`
    has the reasons of the others, without their shapes, and how often each was given. What
    activation checkpointing computes again may be counted again.
    """

    calls: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


class Verdict:
    """Who computes a call. reason: why PyTorch does, with the call's shapes; kind: without; both
    are "" if Strobe does.
    """

    __slots__ = ("kind", "reason", "text")

    def __init__(self, *, kernel: str = "", kind: str = "", detail: str = "") -> None:
        """kernel: of Strobe; kind and detail: why none."""
        self.kind = kind
        self.reason = f"{kind}: {detail}" if detail else kind
        self.text = (
            f"declined: scaled_dot_product_attention was left to PyTorch, because {self.reason}"
            if kind
            else f"served: scaled_dot_product_attention was computed by Strobe's kernel {kernel}"
        )


class _Blocks(threading.local):
    """The blocks of `sdpa_kernel` that this thread is in."""

    def __init__(self) -> None:
        self.open: list[ServedCalls] = []


_blocks: Final = _Blocks()


def enter(served: ServedCalls, *, again: bool = False) -> None:
    """A block begins. again: only to compute once more what was computed in it."""
    _blocks.open.append(served)
    if not again:
        _latest.text = _NO_CALL


def current() -> ServedCalls | None:
    """The counts of the innermost block that this thread is in."""
    return _blocks.open[-1] if _blocks.open else None


def leave(served: ServedCalls) -> None:
    """A block ends, maybe one whose beginning was compiled and so is not known here."""
    if _blocks.open and _blocks.open[-1] is served:
        _blocks.open.pop()


def record(verdict: Verdict, *, counted: bool = True) -> None:
    """For `strobe.why()`, and the counts of the innermost block, also from compiled code."""
    _latest.text = verdict.text
    served = current()
    if served is not None and counted:
        if verdict.kind:
            served.fallbacks[verdict.kind] = served.fallbacks.get(verdict.kind, 0) + 1
        else:
            served.calls += 1
