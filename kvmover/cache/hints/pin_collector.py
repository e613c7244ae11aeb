"""A PinCollector exports pins as gauges of one rank, read at a scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from kvmover.exposition import Metric, MetricKind

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

_PREFIXES = Metric("pinned_prefixes", MetricKind.GAUGE, "Prefixes that a hint keeps on the device.", ())
_PAGES = Metric("pinned_pages", MetricKind.GAUGE, "Pages of attention KV that they keep there, each once.", ())


class PinGauges(Protocol):
    """The pins at this moment: Pins, or another keeper of them."""

    def __len__(self) -> int: ...

    @property
    def pages(self) -> int:
        """Pinned pages, each once."""
        ...


class PinCollector:
    """A collector for `prometheus_client`: `REGISTRY.register(PinCollector(pins))`, scraped in any thread."""

    def __init__(self, pins: PinGauges) -> None:
        self._pins = pins

    def collect(self) -> Iterator[Family]:
        """Yield the metric families of docs/metrics.md. For prometheus_client."""
        for metric, value in ((_PREFIXES, len(self._pins)), (_PAGES, self._pins.pages)):
            family: Any = metric.family()
            family.add_metric((), value)
            yield family
