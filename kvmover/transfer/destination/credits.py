"""Credits: whose chunk gets the next region of an arena. Integers only.

Requests take turns, and in a request its sources, so that a long one does not keep a short one waiting. A chunk that
does not fit lets others pass, but only so often: then nothing is leased until there is room for it.

No source may have more than what is left free when it has it (dynamic thresholds, Choudhury and Hahne 1998): half of
the arena where it is alone, an eighth each of seven. One that dies with all that it may have leaves half of the rest to
the next. A source that has nothing may have one region of any size.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvmover.transfer.memory.arena import Arena, region_bytes

#: So many regions may go to others while a chunk waits for a larger one.
PATIENCE = 16

#: What part of an arena regions may take that go out with Wants, whoever waits for his request to be computed.
EAGER_PART = 8

Request = TypeVar("Request", bound=Hashable)
Chunk = TypeVar("Chunk")


def within_share(arena: Arena, source: str, nbytes: int) -> bool:
    """Whether a source may have `nbytes` bytes more.

    Of an arena of 8 chunks it may have 4, and with 4 of them quarantined another may have 2.
    """
    held, size = arena.leased_by(source), region_bytes(nbytes)
    return not held or held + size <= arena.free_bytes - size


@dataclass(slots=True)
class EagerGrants:
    """Regions that were leased before anybody said that he needs them, for Wants of one chunk, until they are free.

    Their chunks may not be computed for long. So all of them take an eighth of the arena at most, and a source has no
    more of that than what is left of it, or one region. Of an arena of 64 MiB one source may have 4 MiB at a time.
    """

    _regions: dict[int, tuple[str, int]] = field(default_factory=dict[int, "tuple[str, int]"])
    _held: Counter[str] = field(default_factory=Counter[str])

    def lease(self, arena: Arena, source: str, nbytes: int) -> int | None:
        """Offset of a region for a chunk of a source, or None: then it is to be offered first."""
        size, own = region_bytes(nbytes), self._held.get(source, 0)
        left = arena.nbytes // EAGER_PART - self.nbytes - size
        if left < 0 or (own and own + size > left) or not within_share(arena, source, nbytes):
            return None
        offset = arena.lease(nbytes, source)
        if offset is not None and arena.registration_of(offset):  # a Want tells nobody of new keys, as Granted does
            arena.release(offset)
            return None
        if offset is not None:
            self._regions[offset] = source, size
            self._held[source] += size
        return offset

    def freed(self, offset: int) -> None:
        """A region, perhaps one of these, is nobody's any more."""
        source, size = self._regions.pop(offset, ("", 0))
        if size:
            self._held[source] -= size
            if not self._held[source]:
                del self._held[source]

    @property
    def nbytes(self) -> int:
        """What all of them take."""
        return self._held.total()


@dataclass(slots=True)
class _Line(Generic[Chunk]):
    """One request's chunks by source, in the order they asked, and how often others have passed its first."""

    sources: OrderedDict[str, deque[tuple[Chunk, int]]] = field(
        default_factory=OrderedDict[str, "deque[tuple[Chunk, int]]"]
    )
    passed: int = 0


@dataclass(slots=True)
class Credits(Generic[Request, Chunk]):
    """Requests that wait for regions, the one whose turn it is first."""

    _lines: OrderedDict[Request, _Line[Chunk]] = field(default_factory=OrderedDict["Request", "_Line[Chunk]"])

    def ask(self, request: Request, source: str, chunk: Chunk, nbytes: int) -> None:
        """Queue a chunk of a source that needs `nbytes` bytes, which the arena must be able to hold."""
        self._lines.setdefault(request, _Line()).sources.setdefault(source, deque()).append((chunk, nbytes))

    def forget(self, request: Request) -> None:
        """Drop what a request waits for: it has ended."""
        self._lines.pop(request, None)

    @property
    def idle(self) -> bool:
        """Whether nobody waits."""
        return not self._lines

    def lease(self, arena: Arena) -> tuple[Request, Chunk, int] | None:
        """The next (request, chunk, offset), or None when nobody may have a region now."""
        for request, line in self._lines.items():
            source = next((s for s, waiting in line.sources.items() if within_share(arena, s, waiting[0][1])), None)
            if source is None:
                continue
            chunk, nbytes = line.sources[source][0]
            offset = arena.lease(nbytes, source)
            if offset is None:
                if line.passed >= PATIENCE:
                    return None
                continue
            self._served(request, line, source)
            return request, chunk, offset
        return None

    def _served(self, request: Request, line: _Line[Chunk], source: str) -> None:
        """Those before it were passed; it goes to the back, and so does the source among those of the request."""
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
