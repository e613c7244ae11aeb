"""The results of a store: an outcome for each page of a batch, and the reports of upkeep."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Put(StrEnum):
    """The outcome of a put: WRITTEN now; PRESENT already, whole; ELSEWHERE: left to the elected replica; FAILED."""

    WRITTEN = "written"
    PRESENT = "present"
    ELSEWHERE = "elsewhere"
    FAILED = "failed"


class Got(StrEnum):
    """The outcome of a get: READ and checked; ABSENT; EVICTED during the read; POISONED: bad, deleted; FAILED."""

    READ = "read"
    ABSENT = "absent"
    EVICTED = "evicted"
    POISONED = "poisoned"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PutResult:
    """The result of the put of one page. `reason`: why it FAILED."""

    outcome: Put
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Returns True unless the put FAILED."""
        return self.outcome is not Put.FAILED


@dataclass(frozen=True, slots=True)
class GotResult:
    """The result of the read of one page. `reason`: why it was neither READ nor ABSENT."""

    outcome: Got
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Returns True if the page is at its address, which otherwise holds garbage."""
        return self.outcome is Got.READ


@dataclass(slots=True)
class Counters:
    """The operation counts of a store since it was opened. `poisoned`: bad objects that were deleted, by reason.

    `deleted`: objects, empty segments and left-over files deleted for every process, by reason. `spared`: objects
    unreadable, or bad beyond the deletion budget, and left to other processes. `lagged`: index updates that failed, by
    system error.
    """

    puts: Counter[Put] = field(default_factory=Counter[Put])
    gots: Counter[Got] = field(default_factory=Counter[Got])
    poisoned: Counter[str] = field(default_factory=Counter[str])
    failed: Counter[str] = field(default_factory=Counter[str])
    deleted: Counter[str] = field(default_factory=Counter[str])
    lagged: Counter[str] = field(default_factory=Counter[str])
    spared: int = 0
    failed_flushes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    evicted_pages: int = 0
    evicted_bytes: int = 0
    expired_pages: int = 0


@dataclass(frozen=True, slots=True)
class Recovered:
    """The segments and objects found on opening, and the dropped ones by reason."""

    segments: int
    objects: int
    dropped: dict[str, int]


@dataclass(frozen=True, slots=True)
class Stat:
    """The statistics of a namespace. `held_bytes`: blocks of live payloads. `head_bytes`: their head files."""

    pages: int
    objects: int
    segments: int
    payload_bytes: int
    held_bytes: int
    head_bytes: int
    oldest_use_s: int
    newest_use_s: int


@dataclass(frozen=True, slots=True)
class Collected:
    """The report of one upkeep run."""

    expired_pages: int
    evicted_pages: int
    freed_bytes: int
    adopted_segments: int


@dataclass(frozen=True, slots=True)
class Verified:
    """The report of a full verification, by reason: `bad` objects are deleted.

    `spared` objects were unreadable, or bad beyond the deletion budget, and stay.
    """

    objects: int
    nbytes: int
    bad: dict[str, int]
    spared: dict[str, int] = field(default_factory=dict[str, int])
