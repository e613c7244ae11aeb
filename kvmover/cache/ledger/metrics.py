"""LedgerCollector shows a ledger as Prometheus metrics, read when scraped, so that no event pays for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvmover.cache.ledger.ledger import Ledger
from kvmover.cache.ledger.residency import Residency

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

_SOURCES = ("device", "host", "storage", "computed", "abandoned")
_ENDS = ("finished", "retracted", "aborted")
_GROUP = ("tenant", "model", "attempt")
_TIMES = (
    ("lifetimes", "kvmover_page_lifetime_seconds", "From a page's storing to its removal."),
    ("idles", "kvmover_page_idle_seconds", "From a page's last use to its removal."),
    ("gaps", "kvmover_page_reuse_gap_seconds", "Between two uses of a page."),
)


class LedgerCollector:
    """For `prometheus_client`: `REGISTRY.register(LedgerCollector(ledger, {"device": residency}))`.

    Sums over `source` are prompt tokens, label by label. `attempt` is `first`, or `again` after a retraction: rates of
    traffic are of `first` alone. Scrape in the ledger's own thread, or between its events.
    """

    def __init__(self, ledger: Ledger, tiers: Mapping[str, Residency] = MappingProxyType({})) -> None:
        self._ledger, self._tiers = ledger, tiers

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        from prometheus_client.core import CounterMetricFamily

        tokens = CounterMetricFamily(
            "kvmover_prompt_tokens", "Prompt tokens by where their KV came from.", labels=(*_GROUP, "source")
        )
        lost = CounterMetricFamily(
            "kvmover_lost_tokens", "Reusable tokens that were computed again, by reason.", labels=(*_GROUP, "reason")
        )
        attempts = CounterMetricFamily("kvmover_attempts", "Attempts by how they ended.", labels=(*_GROUP, "end"))
        saved = CounterMetricFamily("kvmover_saved_bytes", "KV that was not computed.", labels=("tenant", "model"))
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
        yield CounterMetricFamily("kvmover_ledger_faults", "Events that did not balance.", value=self._ledger.faults)
        yield CounterMetricFamily(
            "kvmover_never_admitted", "Requests that ended before they began.", value=self._ledger.never_admitted
        )
        yield from self._times()

    def _times(self) -> Iterator[HistogramMetricFamily]:
        from prometheus_client.core import HistogramMetricFamily

        for attribute, name, text in _TIMES:
            family = HistogramMetricFamily(name, text, labels=("tier",))
            for tier, residency in self._tiers.items():
                histogram = getattr(residency, attribute)
                family.add_metric((tier,), histogram.cumulative(), histogram.sum_s)
            yield family
