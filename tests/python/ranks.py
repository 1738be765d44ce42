"""Ranks as threads of one process, for tests of `strobe.distributed`: messages are handed over in
queues, and a rank that waits for one that never comes fails soon.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from strobe import _messages

SECONDS = 60


class Threads:
    """A group of ranks; `at(rank)` is what one of them has for its process group."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.bytes = 0  # sent by all
        self._queues: dict[tuple[int, int], queue.SimpleQueue[Any]] = {
            (a, b): queue.SimpleQueue() for a in range(ranks) for b in range(ranks)
        }
        self._lock = threading.Lock()

    def send(self, x: torch.Tensor, source: int, target: int) -> None:
        """A message takes what is there now: on a GPU it may be read later, never before."""
        assert x.is_contiguous()
        with self._lock:
            self.bytes += x.numel() * x.element_size()
        self._queues[source, target].put(x.clone())

    def receive(self, x: torch.Tensor, source: int, target: int) -> None:
        got = self._queues[source, target].get(timeout=SECONDS)
        assert got.shape == x.shape, (got.shape, x.shape)
        assert got.dtype == x.dtype
        x.copy_(got)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """work(rank) of every rank, at the same time; the first error of one of them."""
        results: list[Any] = [None] * self.ranks
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(n,)) for n in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        assert all(q.empty() for q in self._queues.values()), "a message that nobody took"
        return results


class Member:
    """One rank of a group of threads."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.rank = threads, rank


class ThreadExchange:
    """`_messages.Exchange` between threads. What is received is there when it is waited
    for, and not before: until then it is NaN.
    """

    def __init__(
        self,
        group: Member,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> None:
        self._group, self._receives = group, receives
        for x, rank in sends:
            if x.numel():
                group.threads.send(x, group.rank, rank)
        for x, _ in receives:
            x.fill_(float("nan"))

    def arrived(self) -> list[torch.Tensor]:
        for x, rank in self._receives:
            if x.numel():
                self._group.threads.receive(x, rank, self._group.rank)
        return [x for x, _ in self._receives]


class ThreadAllToAll:
    """`_messages.AllToAll` between threads, likewise."""

    def __init__(
        self, call: Any, sent: torch.Tensor, sizes: list[int], received: list[int]
    ) -> None:
        self._group, self._first = call.group, call.group_rank * call.inside
        assert sent.numel() == sum(sizes)
        for rank, part in enumerate(sent.split(sizes), self._first):
            self._group.threads.send(part, self._group.rank, rank)
        self._found = sent.new_full((sum(received),), 255)
        self._received = received

    def arrived(self) -> torch.Tensor:
        for rank, x in enumerate(self._found.split(self._received), self._first):
            self._group.threads.receive(x, rank, self._group.rank)
        return self._found


def use_threads(monkeypatch: Any) -> None:
    """Has `strobe.distributed` send by these."""
    monkeypatch.setattr(_messages, "Exchange", ThreadExchange)
    monkeypatch.setattr(_messages, "AllToAll", ThreadAllToAll)
