"""PageTier: a place beside an engine's own memory that holds pages by name. Jobs are submitted, and polled for.

An engine's adapter translates: its keys to names, its blocks or rows to places, and each FinishedJob to its own result.
A place is the number of a page in memory that was registered when the tier was made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvmover.cache.prefix import RadixKey


class PageVerb(StrEnum):
    """A kind of job."""

    LOOKUP = "lookup"
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request of the engine that pages are looked up for.

    `name`: unlike that of every other request until it is released. `key`: the tokens of its prompt. A tier whose pages
    have another size than the engine's needs them, since a page's name depends on its size.
    """

    name: str
    key: RadixKey


@dataclass(frozen=True, slots=True)
class PageJob:
    """Pages to look up, read or write: `names[i]`, 32 bytes, lies in or goes to place `places[i]`.

    `number`: the engine's own, handed back in the FinishedJob; a tier does not read it. `places` is empty in a look-up.
    `request`: the request that the pages belong to; None finds only pages that a tier has by their names alone.
    """

    number: int
    names: tuple[bytes, ...]
    places: tuple[int, ...] = ()
    request: PageRequest | None = None


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """The end of a job. `done[i]`: page i was found, is whole in its place, or need not be written again.

    `outcomes`: pages by how they ended, in the words of the tier; empty for a look-up. `nbytes`: moved by this job.
    `seconds`: under way, without the wait in a queue.
    """

    verb: PageVerb
    job: PageJob
    done: tuple[bool, ...]
    outcomes: Counter[str]
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Returns whether every page was done."""
        return all(self.done)


class PageTier(Protocol):
    """A place that holds pages by name. A failure is a miss: no method raises because a page cannot be had.

    Methods are called from one thread at a time, and none but `settle` and `close` blocks. Each submitted job is
    returned by `finished` exactly once, in any order. The tests of `kvmover.tools.tier_conformance` check all of this.
    """

    def lookup(self, job: PageJob) -> None:
        """Submit a job that finds out which pages a read would bring now.

        Pages of one request are asked for from the first one that the engine lacks. A tier may offer no page behind the
        first that it lacks.
        """
        ...

    def read(self, job: PageJob) -> None:
        """Submit a job that copies pages from this tier into their places.

        Preconditions:
          - the places belong to the job, and hold nothing that is needed, until the job is finished;
          - a look-up of the same request found the pages, for a tier that needs a request.

        A place whose page was not done holds undefined bytes. A tier may bring pages of one request in one job only.
        """
        ...

    def write(self, job: PageJob) -> None:
        """Submit a job that makes pages available to every engine that shares this tier.

        Preconditions:
          - the bytes in the places are whole, and do not change until the job is finished.

        A page that the tier has already is done, and is not copied again.
        """
        ...

    def touch(self, names: Iterable[bytes]) -> None:
        """Mark pages as used in the engine's own memory, so that the tier evicts them last. Unknown ones are ignored.

        `names` may be read later, by another thread.
        """
        ...

    def release(self, request: PageRequest) -> None:
        """Forget a request: no job for it will follow. A job of it that is under way ends as any other."""
        ...

    def finished(self) -> list[FinishedJob]:
        """Returns the jobs that ended since the last call."""
        ...

    def settle(self) -> None:
        """Block until no read or write is under way: no place is touched then, and `finished` has all their ends."""
        ...

    def close(self) -> None:
        """End what was submitted, and release threads and connections. Memory may be freed once this returns."""
        ...
