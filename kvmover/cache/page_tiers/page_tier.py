"""PageTier is the interface of a place beside an engine's own memory that holds pages by name.

Jobs are submitted, and polled for. An engine's adapter maps its keys to names, its blocks or rows to places, and each
FinishedJob to its own result. A place is the number of a page in memory that was registered when the tier was made.
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
    """An engine's request, for which pages are looked up.

    `name` is unique until the request is released. `key` holds the prompt's tokens, for a tier with another page size
    than the engine's: a page's name depends on its size. `source`: the engine to ask, of those that are tiers.
    """

    name: str
    key: RadixKey
    source: str | None = None


@dataclass(frozen=True, slots=True)
class PageJob:
    """The pages to look up, read or write: `names[i]`, 32 bytes, lies in or goes to place `places[i]`.

    `number`: the engine's own, unread by the tier. `places`: empty in a look-up. `request`: the request that the pages
    belong to; None finds only pages that a tier has by name alone.
    """

    number: int
    names: tuple[bytes, ...]
    places: tuple[int, ...] = ()
    request: PageRequest | None = None


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """The result of a job. `done[i]`: page i was found, is whole in its place, or need not be written again.

    `outcomes`: pages by the tier's outcome words; empty for a look-up. `nbytes`: bytes moved. `seconds`: duration
    without the wait in a queue.
    """

    verb: PageVerb
    job: PageJob
    done: tuple[bool, ...]
    outcomes: Counter[str]
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Returns True if every page was done."""
        return all(self.done)


class PageTier(Protocol):
    """A place that holds pages by name. A failure is a miss: no method raises because a page cannot be had.

    Methods are called from one thread at a time; only `settle` and `close` block. `finished` returns each submitted job
    exactly once, in any order. `kvmover.tools.tier_conformance` tests all of this.
    """

    def lookup(self, job: PageJob) -> None:
        """Submit a job that finds the pages that a read would bring now.

        A request's pages are looked up from the first that the engine lacks. A tier may leave out all pages behind the
        first that it lacks.
        """
        ...

    def read(self, job: PageJob) -> None:
        """Submit a job that copies pages from this tier into their places.

        Preconditions:
          - the places belong to the job, and their bytes are not needed, until the job is finished;
          - a look-up of the same request found the pages, for a tier that needs a request.

        A place whose page was not done holds undefined bytes. A tier may bring pages of one request in one job only.
        """
        ...

    def write(self, job: PageJob) -> None:
        """Submit a job that makes pages available to every engine that shares this tier.

        Preconditions:
          - the bytes in the places are whole, and do not change until the job is finished.

        A page that the tier has already is done without a copy.
        """
        ...

    def touch(self, names: Iterable[bytes]) -> None:
        """Mark pages as used in the engine's own memory, so that the tier evicts them last. Unknown names are ignored.

        Another thread may read `names` later.
        """
        ...

    def release(self, request: PageRequest) -> None:
        """Forget a request; the engine submits no further job for it. Its jobs in flight end as usual."""
        ...

    def finished(self) -> list[FinishedJob]:
        """Returns the jobs that ended since the last call."""
        ...

    def settle(self) -> None:
        """Block until no read or write is in flight: then no place is accessed, and `finished` has all results."""
        ...

    def close(self) -> None:
        """End submitted jobs, and release threads and connections. Registered memory may be freed afterwards."""
        ...
