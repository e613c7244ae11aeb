"""A TierMeter holds a controller's counts and times as plain numbers, which become Prometheus metrics at a scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvmover.exposition import OPERATION_BOUNDS_S, RANK, DurationHistogram, Metric, MetricKind, families, named

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


class TierCount(StrEnum):
    """The totals of this rank since its controller was made. Bytes are payload."""

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
    BORROWED_PAGES = "borrowed_pages"
    BORROWED_BYTES = "borrowed_bytes"
    DEMOTED_PAGES = "demoted_pages"


class TierStage(StrEnum):
    """The timed stages, s, on this rank; RESTORE until all ranks end."""

    BACKUP = "backup"
    LOAD = "load"
    LOOK = "look"
    ASK = "ask"
    BORROW = "borrow"
    FETCH = "fetch"
    STORE = "store"
    RESTORE = "restore"
    AGREE = "agree"


class TierGauge(StrEnum):
    """The quantities read at a snapshot."""

    OPEN_OPERATIONS = "open_operations"
    OPEN_RESTORES = "open_restores"
    QUEUED_JOBS = "queued_jobs"
    FREE_DEVICE_PAGES = "free_device_pages"
    FREE_HOST_PAGES = "free_host_pages"
    READING_PAGES = "reading_pages"
    WRITING_PAGES = "writing_pages"
    LENDABLE_PAGES = "lendable_pages"
    OPEN_LOANS = "open_loans"


def _empty() -> dict[TierStage, DurationHistogram]:
    return {stage: DurationHistogram(OPERATION_BOUNDS_S) for stage in TierStage}


@dataclass(slots=True)
class TierMeter:
    """The totals, stage times and drops of a controller.

    `dropped`: pages by (verb, why) that did not reach their tier.
    """

    counts: Counter[TierCount] = field(default_factory=Counter[TierCount])
    stages: dict[TierStage, DurationHistogram] = field(default_factory=_empty)
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    def copy(self) -> TierMeter:
        """Return an independent copy."""
        stages = {stage: histogram.copy() for stage, histogram in self.stages.items()}
        return TierMeter(self.counts.copy(), stages, self.dropped.copy())


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """A snapshot of one rank's controller, for any thread."""

    engine: str
    rank: int
    meter: TierMeter
    gauges: Mapping[TierGauge, int]


#: The exported metrics, by their keys in a meter.
METRICS: Mapping[StrEnum, Metric] = {
    **named(
        "tier_",
        MetricKind.COUNTER,
        {
            TierCount.BACKED_PAGES: "Pages that this rank copied from the device to the host.",
            TierCount.BACKED_BYTES: "Bytes that this rank copied from the device to the host.",
            TierCount.LOADED_PAGES: "Pages copied from the host to the device.",
            TierCount.LOADED_BYTES: "Bytes copied from the host to the device.",
            TierCount.STORED_PAGES: "Pages that this rank wrote to storage, which did not have them.",
            TierCount.STORED_BYTES: "Bytes that this rank wrote to storage.",
            TierCount.FETCHED_PAGES: "Pages read from storage to the host.",
            TierCount.FETCHED_BYTES: "Bytes read from storage to the host.",
            TierCount.LOOKED_UP_PAGES: "Pages that storage was asked for.",
            TierCount.FOUND_PAGES: "Pages that storage has and nearer tiers do not, as far as they make a prefix.",
            TierCount.BORROWED_PAGES: "Pages read from the host of another engine.",
            TierCount.BORROWED_BYTES: "Bytes read from the host of another engine.",
            TierCount.DEMOTED_PAGES: "Pages of attention KV that left the device for the host because a hint said so.",
        },
    ),
    **named(
        "tier_",
        MetricKind.GAUGE,
        {
            TierGauge.OPEN_OPERATIONS: "Operations that have not ended on all ranks.",
            TierGauge.OPEN_RESTORES: "Requests whose prefix is on its way.",
            TierGauge.QUEUED_JOBS: "Jobs of the storage thread, the one under way included.",
            TierGauge.FREE_DEVICE_PAGES: "Pages of attention KV on the device that nobody uses.",
            TierGauge.FREE_HOST_PAGES: "Pages of attention KV on the host that nobody uses.",
            TierGauge.READING_PAGES: "Pages on the host that are being read into.",
            TierGauge.WRITING_PAGES: "Pages that wait to be written to storage, or are being written.",
            TierGauge.LENDABLE_PAGES: "Pages on the host that peers may ask for.",
            TierGauge.OPEN_LOANS: "Prefixes that peers may read at this moment.",
        },
    ),
    **named(
        "tier_",
        MetricKind.HISTOGRAM,
        {
            TierStage.BACKUP: "From the start of a copy to the host until it is there.",
            TierStage.LOAD: "From the start of a copy to the device until it is there.",
            TierStage.LOOK: "From a look-up's queueing until its answer.",
            TierStage.ASK: "From asking peers until all have answered, or are not waited for.",
            TierStage.BORROW: "From the start of a read from a peer until its end.",
            TierStage.FETCH: "From a read's queueing until its end.",
            TierStage.STORE: "From a write's queueing until its end.",
            TierStage.RESTORE: "From a request's coming until its prefix is on the device, on all ranks.",
            TierStage.AGREE: "In the collective of a round.",
        },
    ),
}

_DROPPED = Metric(
    "tier_dropped_pages", MetricKind.COUNTER, "Pages that did not reach their tier.", (*RANK, "verb", "why")
)


class TierCollector:
    """A collector for `prometheus_client`: `REGISTRY.register(TierCollector(controller.snapshot))`, one call a rank.

    Scrape in the polling thread, or pass functions that return the last snapshot.
    """

    def __init__(self, *snapshots: Callable[[], TierSnapshot]) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterator[Family]:
        """Yield the metric families of docs/metrics.md, one snapshot a rank."""
        taken = [snapshot() for snapshot in self._snapshots]
        yield from families(METRICS, taken)
        dropped: Any = _DROPPED.family()
        for at in taken:
            for (verb, why), pages in at.meter.dropped.items():
                dropped.add_metric((at.engine, str(at.rank), verb, why), pages)
        yield dropped
