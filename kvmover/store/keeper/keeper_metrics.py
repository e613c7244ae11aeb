"""A KeeperCollector exports a keeper's memory and counts as Prometheus metrics, from a snapshot of its thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvmover.exposition import Metric, MetricKind
from kvmover.store.keeper.messages import KeeperRefusal
from kvmover.store.keeper.state import KeeperState

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


@dataclass(slots=True)
class KeeperCounts:
    """The counts of a keeper since it began. `failed_slabs`: no memory, or short copies. `faults`: see KeeperServer."""

    refused: Counter[KeeperRefusal] = field(default_factory=Counter[KeeperRefusal])
    turned_away: int = 0
    made_slabs: int = 0
    failed_slabs: int = 0
    dropped_slabs: int = 0
    poisoned_objects: int = 0
    faults: int = 0


@dataclass(frozen=True, slots=True)
class KeeperSnapshot:
    """A keeper at one moment, `taken_s` of a monotonic clock."""

    taken_s: float
    counts: KeeperCounts
    capacity_bytes: int = 0
    held_bytes: int = 0
    slabs: int = 0
    namespaces: int = 0
    objects: int = 0
    sessions: int = 0

    @classmethod
    def of(cls, state: KeeperState, counts: KeeperCounts, now: float) -> KeeperSnapshot:
        """Returns a state's sums. Call it in the keeper's thread."""
        return cls(
            now,
            counts,
            state.capacity_bytes,
            state.held_bytes,
            len(state.slabs),
            len(state.namespaces),
            sum(kept.index.holdings.objects for kept in state.namespaces.values()),
            len(state.sessions),
        )


#: By field of a KeeperSnapshot.
_GAUGES: Mapping[str, str] = {
    "capacity_bytes": "Memory that this keeper may take.",
    "held_bytes": "Memory of its slabs, those being filled included.",
    "slabs": "Slabs, each a piece of memory of one namespace.",
    "namespaces": "Namespaces with pages here: a model, its weights, a page size, a tenant.",
    "objects": "Objects that engines can read.",
    "sessions": "Connected processes of engines and tools.",
}
#: By field of KeeperCounts.
_COUNTS: Mapping[str, str] = {
    "turned_away": "Connections beyond the most that are served.",
    "made_slabs": "Slabs that were allocated.",
    "failed_slabs": "Slabs for which the host had no memory, or whose carried objects came short.",
    "dropped_slabs": "Slabs that were evicted, cleared or empty.",
    "poisoned_objects": "Objects that differed from their digests when their slab was sealed, and were dropped.",
    "faults": "Exceptions that ended one session and nothing else: a bug.",
}
_REFUSED = Metric(
    "keeper_refused", MetricKind.COUNTER, "Requests that were refused: fenced, full, gone, invalid.", ("reason",)
)


class KeeperCollector:
    """A collector for `prometheus_client` of a keeper's last snapshot, scraped in any thread."""

    def __init__(self, snapshot: Callable[[], KeeperSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        """Yield the metric families of docs/metrics.md."""
        at = self._snapshot()
        for kind, texts, values in ((MetricKind.GAUGE, _GAUGES, at), (MetricKind.COUNTER, _COUNTS, at.counts)):
            for name, text in texts.items():
                family: Any = Metric(f"keeper_{name}", kind, text, ()).family()
                family.add_metric((), getattr(values, name))
                yield family
        refused: Any = _REFUSED.family()
        for reason in KeeperRefusal:
            refused.add_metric((reason,), at.counts.refused[reason])
        yield refused
