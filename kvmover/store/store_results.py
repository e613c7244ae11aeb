"""A batch has one of these answers for every page; upkeep has these reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Put(StrEnum):
    """WRITTEN now; PRESENT already, whole; ELSEWHERE: another replica is elected to write it; FAILED."""

    WRITTEN = "written"
    PRESENT = "present"
    ELSEWHERE = "elsewhere"
    FAILED = "failed"


class Got(StrEnum):
    """READ and checked; ABSENT; EVICTED while it was read; POISONED: bad, and deleted now; FAILED to be read."""

    READ = "read"
    ABSENT = "absent"
    EVICTED = "evicted"
    POISONED = "poisoned"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PutResult:
    """How the put of one page ended. `reason`: of one that FAILED, in the words of the system."""

    outcome: Put
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether nobody has to write this page again."""
        return self.outcome is not Put.FAILED


@dataclass(frozen=True, slots=True)
class GotResult:
    """How the read of one page ended. `reason`: of one that was not READ, nor ABSENT."""

    outcome: Got
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the bytes are at the address. Otherwise what is there is garbage."""
        return self.outcome is Got.READ


@dataclass(slots=True)
class Counters:
    """What one store has done since it was opened. `poisoned` by reason: each was deleted.

    `deleted`: objects, and empty segments and left-overs, that went for every process, by the reason for it.
    `spared`: found bad after too many others, or not to be had, and left to other processes. `lagged`: times that the
    index stayed as it was, by what the system said.
    """

    puts: Counter[Put] = field(default_factory=Counter[Put])
    gots: Counter[Got] = field(default_factory=Counter[Got])
    poisoned: Counter[str] = field(default_factory=Counter[str])
    failed: Counter[str] = field(default_factory=Counter[str])
    deleted: Counter[str] = field(default_factory=Counter[str])
    lagged: Counter[str] = field(default_factory=Counter[str])
    spared: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    evicted_pages: int = 0
    evicted_bytes: int = 0
    expired_pages: int = 0


@dataclass(frozen=True, slots=True)
class Recovered:
    """What opening found: segments, objects, and what was left behind, by reason."""

    segments: int
    objects: int
    dropped: dict[str, int]


@dataclass(frozen=True, slots=True)
class Stat:
    """Of one namespace. `held_bytes` are blocks of live payloads, `head_bytes` the files that describe them."""

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
    """What one upkeep did."""

    expired_pages: int
    evicted_pages: int
    freed_bytes: int
    adopted_segments: int


@dataclass(frozen=True, slots=True)
class Verified:
    """The finding of a reader of everything, by reason: `bad` objects are deleted, `spared` ones left to others, as the
    disk did not give them, or too many had been bad.
    """

    objects: int
    nbytes: int
    bad: dict[str, int]
    spared: dict[str, int] = field(default_factory=dict[str, int])
