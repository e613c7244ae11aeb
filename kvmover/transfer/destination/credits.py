"""The credits of an arena: they decide which chunk gets the next region. Integers only.

Requests take turns, and sources within a request, so that a long request does not delay a short one. A chunk that
doesn't fit lets others pass up to PATIENCE times; then reserving stops until it fits.

A source may hold at most as many bytes as stay free (dynamic thresholds, Choudhury and Hahne 1998): half of the arena
if it is alone, an eighth each of seven. One that dies with its full share leaves half of the rest to the next. A source
without a region may have one of any size.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvmover.transfer.memory.arena import Arena, region_bytes

#: Regions that other requests may get while a chunk waits for a larger one.
PATIENCE = 16

#: The divisor of the arena for regions sent with Wants, which wait until their request is computed.
EAGER_PART = 8

Request = TypeVar("Request", bound=Hashable)
Chunk = TypeVar("Chunk")


def within_share(arena: Arena, source: str, nbytes: int) -> bool:
    """Returns True if a source may have `nbytes` bytes more.

    Of an arena of 8 chunks it may have 4; with 4 of them quarantined another source may have 2.
    """
    reserved, size = arena.reserved_by(source), region_bytes(nbytes)
    return not reserved or reserved + size <= arena.free_bytes - size


@dataclass(slots=True)
class EagerGrants:
    """The regions reserved eagerly, sent with Wants of one chunk before the source offers it, until they are freed.

    The chunks may take long to compute, so all of these regions together take at most an eighth of the arena, and a
    source holds at most as much as stays left of that, or one region. Of an arena of 64 MiB one source may have 4 MiB.
    """

    _regions: dict[int, tuple[str, int]] = field(default_factory=dict[int, "tuple[str, int]"])
    _reserved: Counter[str] = field(default_factory=Counter[str])

    def reserve(self, arena: Arena, source: str, nbytes: int) -> int | None:
        """Returns the offset of a region for a source's chunk, or None: the source then offers it first."""
        size, own = region_bytes(nbytes), self._reserved.get(source, 0)
        left = arena.nbytes // EAGER_PART - self.nbytes - size
        if left < 0 or (own and own + size > left) or not within_share(arena, source, nbytes):
            return None
        offset = arena.reserve(nbytes, source)
        if offset is not None and arena.registration_of(offset):  # a Want carries no registration, as Granted does
            arena.release(offset)
            return None
        if offset is not None:
            self._regions[offset] = source, size
            self._reserved[source] += size
        return offset

    def freed(self, offset: int) -> None:
        """Forget a freed region. Regions that were not reserved eagerly are ignored."""
        source, size = self._regions.pop(offset, ("", 0))
        if size:
            self._reserved[source] -= size
            if not self._reserved[source]:
                del self._reserved[source]

    @property
    def nbytes(self) -> int:
        """The bytes of all eager regions."""
        return self._reserved.total()


@dataclass(slots=True)
class _Line(Generic[Chunk]):
    """One request's queued chunks by source, in order of asking, and how often other requests passed its first."""

    sources: OrderedDict[str, deque[tuple[Chunk, int]]] = field(
        default_factory=OrderedDict[str, "deque[tuple[Chunk, int]]"]
    )
    passed: int = 0


@dataclass(slots=True)
class Credits(Generic[Request, Chunk]):
    """The requests that wait for regions, in the order of their turns."""

    _lines: OrderedDict[Request, _Line[Chunk]] = field(default_factory=OrderedDict["Request", "_Line[Chunk]"])

    def ask(self, request: Request, source: str, chunk: Chunk, nbytes: int) -> None:
        """Queue a chunk of `nbytes` bytes of a source. The empty arena must be able to hold it."""
        self._lines.setdefault(request, _Line()).sources.setdefault(source, deque()).append((chunk, nbytes))

    def forget(self, request: Request) -> None:
        """Drop the queued chunks of an ended request."""
        self._lines.pop(request, None)

    @property
    def idle(self) -> bool:
        """True if no chunk is queued."""
        return not self._lines

    def reserve(self, arena: Arena) -> tuple[Request, Chunk, int] | None:
        """Reserve a region for the next chunk. Returns (request, chunk, offset), or None if no chunk may have a region
        now.
        """
        for request, line in self._lines.items():
            source = next((s for s, waiting in line.sources.items() if within_share(arena, s, waiting[0][1])), None)
            if source is None:
                continue
            chunk, nbytes = line.sources[source][0]
            offset = arena.reserve(nbytes, source)
            if offset is None:
                if line.passed >= PATIENCE:
                    return None
                continue
            self._served(request, line, source)
            return request, chunk, offset
        return None

    def _served(self, request: Request, line: _Line[Chunk], source: str) -> None:
        """Count a pass for the requests ahead, and move the request, and its source within it, to the back."""
        for other, waiting in self._lines.items():
            if other == request:
                break
            waiting.passed += 1
        line.passed = 0
        waiting = line.sources.pop(source)
        waiting.popleft()
        if waiting:
            line.sources[source] = waiting
        del self._lines[request]
        if line.sources:
            self._lines[request] = line

    def __len__(self) -> int:
        return sum(len(waiting) for line in self._lines.values() for waiting in line.sources.values())
