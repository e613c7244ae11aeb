"""Meter: what a controller counts and how long the parts of its work take. Plain numbers; exporters read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvmover.transfer.meter import Histogram


class Count(StrEnum):
    """Totals since the controller was made, of this rank. Bytes are payload."""

    BACKED_PAGES = "backed_pages"
    BACKED_BYTES = "backed_bytes"
    LOADED_PAGES = "loaded_pages"
    LOADED_BYTES = "loaded_bytes"
    STORED_PAGES = "stored_pages"
    STORED_BYTES = "stored_bytes"
    FETCHED_PAGES = "fetched_pages"
    FETCHED_BYTES = "fetched_bytes"
    LOOKED_UP_PAGES = "looked_up_pages"
    FOUND_PAGES = "found_pages"


class Stage(StrEnum):
    """What is timed, in seconds, from its beginning to the end on this rank; RESTORE: to that on all ranks."""

    BACKUP = "backup"
    LOAD = "load"
    LOOK = "look"
    FETCH = "fetch"
    STORE = "store"
    RESTORE = "restore"
    AGREE = "agree"


class Gauge(StrEnum):
    """What there is at this moment."""

    OPEN_OPERATIONS = "open_operations"
    OPEN_RESTORES = "open_restores"
    QUEUED_JOBS = "queued_jobs"
    FREE_DEVICE_PAGES = "free_device_pages"
    FREE_HOST_PAGES = "free_host_pages"
    READING_PAGES = "reading_pages"
    WRITING_PAGES = "writing_pages"


@dataclass(slots=True)
class Meter:
    """`dropped`: pages by (verb, why) that were not backed up, stored, fetched or loaded."""

    counts: Counter[Count] = field(default_factory=Counter[Count])
    stages: dict[Stage, Histogram] = field(default_factory=lambda: {stage: Histogram() for stage in Stage})
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    def copy(self) -> Meter:
        stages = {stage: histogram.copy() for stage, histogram in self.stages.items()}
        return Meter(self.counts.copy(), stages, self.dropped.copy())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The controller of one rank at one moment: nothing changes it any more, so any thread may read it."""

    engine: str
    rank: int
    meter: Meter
    gauges: Mapping[Gauge, int]
