"""A StoreCollector exports a page store's counts as Prometheus metrics, read from its counters at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvmover.exposition import RANK, Metric, MetricKind
from kvmover.store.page_store import PageStore
from kvmover.store.store_results import Counters, Got, Put

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


#: The counts of a store, by field of its Counters, and sums over the reasons: those are in the log, and have no bound.
_COUNTS: Mapping[str, str] = {
    "written_bytes": "Bytes of pages that this rank wrote to its store.",
    "read_bytes": "Bytes of pages that this rank read whole from its store.",
    "failed_flushes": "Flushes after which pages were not durable.",
    "evicted_pages": "Pages that this process evicted to the quota.",
    "evicted_bytes": "Bytes that this process freed by evicting.",
    "expired_pages": "Pages that this process deleted when their time was over.",
}
_SUMS: Mapping[str, tuple[str, Callable[[Counters], int]]] = {
    "poisoned_objects": (
        "Objects that differed from their digests at a second look too, and were deleted.",
        lambda at: at.poisoned.total(),
    ),
    "spared_objects": (
        "Objects that could not be read, or were bad, and were left to other processes.",
        lambda at: at.spared,
    ),
    "deleted_objects": (
        "Objects, segments and left-over files that this process deleted for all.",
        lambda at: at.deleted.total(),
    ),
    "refused_steps": (
        "Look-ups and steps of upkeep that the disk, bucket, pool or keeper refused.",
        lambda at: at.lagged.total(),
    ),
}
_PUTS = Metric(
    "store_puts",
    MetricKind.COUNTER,
    "Pages given to the store: written, present, elsewhere, failed.",
    (*RANK, "outcome"),
)
_GOTS = Metric(
    "store_gots",
    MetricKind.COUNTER,
    "Pages asked of the store: read, absent, evicted, poisoned, failed.",
    (*RANK, "outcome"),
)


class StoreCollector:
    """A collector for `prometheus_client` of one rank's store: `REGISTRY.register(StoreCollector(store, "engine", 0))`.

    Scraped in any thread. Counts begin anew when the store switches its namespace.
    """

    def __init__(self, store: PageStore, engine: str, rank: int) -> None:
        self._store, self._rank = store, (engine, str(rank))

    def collect(self) -> Iterator[Family]:
        """Yield the metric families of docs/metrics.md, zeros too, so that a first failure is a step."""
        counters = self._store.counters
        counts = {name: (text, getattr(counters, name)) for name, text in _COUNTS.items()}
        counts |= {name: (text, total(counters)) for name, (text, total) in _SUMS.items()}
        for name, (text, count) in counts.items():
            family: Any = Metric(f"store_{name}", MetricKind.COUNTER, text).family()
            family.add_metric(self._rank, count)
            yield family
        puts: Any = _PUTS.family()
        for put in Put:
            puts.add_metric((*self._rank, put), counters.puts[put])
        gots: Any = _GOTS.family()
        for got in Got:
            gots.add_metric((*self._rank, got), counters.gots[got])
        yield from (puts, gots)
