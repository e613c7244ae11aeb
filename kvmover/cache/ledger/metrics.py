"""LedgerCollector shows a ledger as Prometheus metrics, read when scraped, so that no event pays for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from kvmover.cache.ledger.ledger import Ledger
from kvmover.cache.ledger.residency import BOUNDS_S, Residency
from kvmover.exposition import Metric, MetricKind, cumulative

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

_SOURCES = ("device", "host", "storage", "computed", "abandoned")
_ENDS = ("finished", "retracted", "aborted")
_GROUP = ("tenant", "model", "attempt")
_COUNTER, _TIMES = MetricKind.COUNTER, MetricKind.HISTOGRAM

_TOKENS = Metric("prompt_tokens", _COUNTER, "Prompt tokens by where their KV came from.", (*_GROUP, "source"))
_LOST = Metric("lost_tokens", _COUNTER, "Reusable tokens that were computed again, by reason.", (*_GROUP, "reason"))
_ATTEMPTS = Metric("attempts", _COUNTER, "Attempts by how they ended.", (*_GROUP, "end"))
_SAVED = Metric("saved_bytes", _COUNTER, "KV that was not computed.", ("tenant", "model"))
_FAULTS = Metric("ledger_faults", _COUNTER, "Events that did not balance.", ())
_NEVER = Metric("never_admitted", _COUNTER, "Requests that ended before they began.", ())
#: By what a Residency calls them.
_STAYS = {
    "lifetimes": Metric("page_lifetime", _TIMES, "From a page's storing to its removal.", ("tier",)),
    "idles": Metric("page_idle", _TIMES, "From a page's last use to its removal.", ("tier",)),
    "gaps": Metric("page_reuse_gap", _TIMES, "Between two uses of a page.", ("tier",)),
}


class LedgerCollector:
    """For `prometheus_client`: `REGISTRY.register(LedgerCollector(ledger, {"device": residency}))`.

    Sums over `source` are prompt tokens, label by label. `attempt` is `first`, or `again` after a retraction: rates of
    traffic are of `first` alone. Scrape in the ledger's own thread, or between its events.
    """

    def __init__(self, ledger: Ledger, tiers: Mapping[str, Residency] = MappingProxyType({})) -> None:
        self._ledger, self._tiers = ledger, tiers

    def collect(self) -> Iterator[Family]:
        """The metric families of docs/metrics.md. For prometheus_client."""
        tokens, lost, attempts, saved = (cast(Any, each.family()) for each in (_TOKENS, _LOST, _ATTEMPTS, _SAVED))
        for group in self._ledger.groups():
            book = self._ledger.total(group)
            saved.add_metric((group.tenant, group.model), self._ledger.saved_bytes(group))
            for attempt, totals in (("first", book.first), ("again", book.again)):
                labels = (group.tenant, group.model, attempt)
                for source in _SOURCES:
                    tokens.add_metric((*labels, source), getattr(totals, f"{source}_tokens"))
                for end in _ENDS:
                    attempts.add_metric((*labels, end), getattr(totals, end))
                for reason, count in totals.lost.items():
                    lost.add_metric((*labels, reason), count)
        yield from (tokens, lost, attempts, saved)
        for metric, count in ((_FAULTS, self._ledger.faults), (_NEVER, self._ledger.never_admitted)):
            alone: Any = metric.family()
            alone.add_metric((), count)
            yield alone
        yield from self._stays()

    def _stays(self) -> Iterator[Family]:
        for attribute, metric in _STAYS.items():
            family: Any = metric.family()
            for tier, residency in self._tiers.items():
                histogram = getattr(residency, attribute)
                family.add_metric((tier,), cumulative(histogram, BOUNDS_S), histogram.sum_s)
            yield family
