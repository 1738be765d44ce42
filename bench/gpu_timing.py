"""Time on a GPU, alike for everybody: the work of a call alone, captured in a CUDA graph, or the call as a
program makes it, host included."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

Calls = dict[str, Callable[[], Any]]


@contextlib.contextmanager
def capturing_stream() -> Iterator[None]:
    """All that is to be captured, and the forward passes whose backward is, must be made on one stream other than the
    default one: autograd runs a backward pass on its forward's stream."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def captured(calls: Calls, refused: dict[str, str]) -> Calls:
    """Replays of the calls' CUDA graphs. What cannot be captured is left out, and `refused` gets its reason."""
    import torch

    replays: Calls = {}
    for name, call in calls.items():
        call()
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Autograd's own threads launch too: the mode must not be the one that forbids what they do meanwhile.
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
                call()
        except Exception as e:  # a peer that cannot be captured must not end the bench
            if name == "strobe":
                raise
            refused[name] = f"{type(e).__name__}: {e}".splitlines()[0][:120]
            torch.cuda.synchronize()
            continue
        replays[name] = graph.replay
    return replays


def interleaved(calls: Calls, rounds: int, flush: Any) -> dict[str, float]:
    """Median seconds of each call, by CUDA events, with L2 overwritten before each."""
    import torch

    for call in calls.values():
        call()
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    events = []
    for _ in range(rounds):
        for name, call in calls.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events.append((name, begin, end))
    torch.cuda.synchronize()
    for name, begin, end in events:
        times[name].append(begin.elapsed_time(end) * 1e-3)
    return {name: statistics.median(t) for name, t in times.items()}
