"""Plans that were made, kept with what a launch needs besides addresses."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from . import _library
from ._arrays import Allocator
from ._library import Plan, Problem
from ._plans import Shapes, plan_of


@dataclass(slots=True)
class Launch:
    """A plan and all that a call needs besides the addresses of its tensors."""

    plan: Plan
    address: int  # of plan
    on_cuda: bool
    device_index: int
    new: tuple[Allocator, ...]  # make the results: out and lse, or dq, dk and dv
    # CUDA: workspaces are the framework's; None: the library makes its own.
    new_workspace: Allocator | None
    # The library keeps so small a workspace itself, for each stream: a quarter of what an
    # allocation costs. Not in a graph, whose replays must not share it with launches.
    small: bool
    workspace_bytes: int
    long: bool  # enough for a user to lose patience: see `_interrupt`
    repeat: Any = None  # what `_repeat` knows of calls that took this


# Plans by signature. Plain dicts, whose look-ups and stores are atomic: a lock could be held when
# the process forks.
FORWARD_LAUNCHES: Final[dict[Any, Launch]] = {}
BACKWARD_LAUNCHES: Final[dict[Any, Launch]] = {}
CAPACITY: Final = 1024  # about 3 KiB each; the oldest goes first


# Milliseconds on the fastest CPU, where to listen for signals costs microseconds; a second on a
# slow one.
_LONG: Final = 4e9


def _flop(problem: Problem) -> float:
    """Of the matrix products, unmasked and as if all sequences were as long as the longest."""
    rows = problem.total_q if problem.varlen else problem.batch * problem.seqlen_q
    scores: float = rows * problem.heads * problem.seqlen_k
    products = 2.0 if problem.direction == _library.FORWARD else 5.0
    return float(scores * products * (problem.head_dim + problem.head_dim_v))


def make_launch(
    cache: dict[Any, Launch],
    key: Any,
    shapes: Shapes,
    new: tuple[Allocator, ...],
) -> Launch:
    """Makes the plan and keeps it."""
    plan = plan_of(shapes)
    q = shapes.q
    on_cuda = q.device == "cuda"
    bytes_needed = int(plan.workspace_bytes)
    new_workspace = None
    if on_cuda and bytes_needed:
        new_workspace = q.kind.allocator((bytes_needed,), "uint8", q)
    launch = Launch(
        plan=plan,
        address=ctypes.addressof(plan),
        on_cuda=on_cuda,
        device_index=q.device_index,
        new=new,
        new_workspace=new_workspace,
        small=shapes.problem.direction == _library.FORWARD
        and bytes_needed <= _library.OWN_WORKSPACE,
        workspace_bytes=bytes_needed if new_workspace else 0,
        long=not on_cuda and _flop(plan.problem) > _LONG,
    )
    if len(cache) >= CAPACITY:
        # Another thread may be at it too: then it makes room, or the next call does.
        with suppress(RuntimeError, StopIteration):
            cache.pop(next(iter(cache)), None)
    cache[key] = launch
    return launch
