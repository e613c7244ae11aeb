"""Credits: whose chunk gets the next region of an arena. Integers only.

Requests take turns, so that a long one does not keep a short one waiting. A chunk that does not fit lets others pass,
but only so often: then nothing is leased until there is room for it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvmover.transfer.memory.arena import Arena

#: So many regions may go to others while a chunk waits for a larger one.
PATIENCE = 16

Request = TypeVar("Request", bound=Hashable)
Chunk = TypeVar("Chunk")


@dataclass(slots=True)
class _Line(Generic[Chunk]):
    """One request's chunks in the order they asked, and how often others have passed its first."""

    chunks: deque[tuple[Chunk, int]] = field(default_factory=deque["tuple[Chunk, int]"])
    passed: int = 0


@dataclass(slots=True)
class Credits(Generic[Request, Chunk]):
    """Requests that wait for regions, the one whose turn it is first."""

    _lines: OrderedDict[Request, _Line[Chunk]] = field(default_factory=OrderedDict["Request", "_Line[Chunk]"])

    def ask(self, request: Request, chunk: Chunk, nbytes: int) -> None:
        """Queue a chunk that needs `nbytes` bytes, which the arena must be able to hold."""
        self._lines.setdefault(request, _Line()).chunks.append((chunk, nbytes))

    def forget(self, request: Request) -> None:
        self._lines.pop(request, None)

    def lease(self, arena: Arena) -> tuple[Request, Chunk, int] | None:
        """The next (request, chunk, offset), or None when nobody may have a region now."""
        for request, line in self._lines.items():
            chunk, nbytes = line.chunks[0]
            offset = arena.lease(nbytes)
            if offset is None:
                if line.passed >= PATIENCE:
                    return None
                continue
            self._served(request, line)
            return request, chunk, offset
        return None

    def _served(self, request: Request, line: _Line[Chunk]) -> None:
        """Those before it were passed; it goes to the back."""
        for other, waiting in self._lines.items():
            if other == request:
                break
            waiting.passed += 1
        line.passed = 0
        line.chunks.popleft()
        del self._lines[request]
        if line.chunks:
            self._lines[request] = line

    def __len__(self) -> int:
        return sum(len(line.chunks) for line in self._lines.values())
