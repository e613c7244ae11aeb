"""A Metric is a name, a kind and a help text; collectors make families of prometheus_client from tables of them.

Nothing is counted here: values are read from snapshots when somebody scrapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

#: Labels of what a rank says of itself.
RANK = ("engine", "rank")


class MetricKind(StrEnum):
    """As Prometheus has them. Names of counters end in `_total`; histograms here are of seconds, and say so."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `name` without `kvmover_` and without what its kind appends: `sent_bytes`."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = RANK

    def family(self) -> Family:
        """An empty family, for `add_metric(labels, value)`; of a histogram `add_metric(labels, buckets, sum_s)`."""
        from prometheus_client import core

        if self.kind is MetricKind.HISTOGRAM:
            return core.HistogramMetricFamily(f"kvmover_{self.name}_seconds", self.help, labels=self.labels)
        made = core.CounterMetricFamily if self.kind is MetricKind.COUNTER else core.GaugeMetricFamily
        return made(f"kvmover_{self.name}", self.help, labels=self.labels)


def named(prefix: str, kind: MetricKind, texts: Mapping[Any, str]) -> dict[StrEnum, Metric]:
    """Metrics of one kind by the names that a meter has for them: `sent_bytes` is `kvmover_<prefix>sent_bytes`."""
    return {name: Metric(f"{prefix}{name}", kind, text) for name, text in texts.items()}


class Timed(Protocol):
    """A histogram: how many values each bucket counted, the one above all bounds last, and the sum of all values."""

    counts: list[int]
    sum_s: float


class RankMeter(Protocol):
    """What a meter counted and timed, by name."""

    @property
    def counts(self) -> Mapping[Any, int]: ...

    @property
    def stages(self) -> Mapping[Any, Timed]: ...


class RankSnapshot(Protocol):
    """A rank at one moment."""

    @property
    def engine(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def meter(self) -> RankMeter: ...

    @property
    def gauges(self) -> Mapping[Any, int]: ...


def families(
    metrics: Mapping[StrEnum, Metric], taken: Iterable[RankSnapshot], bounds_s: Sequence[float]
) -> Iterator[Family]:
    """A family a metric, with a sample a rank. The keys are those of the snapshots' counts, gauges and stages."""
    taken = list(taken)
    for key, metric in metrics.items():
        family: Any = metric.family()
        for at in taken:
            labels = (at.engine, str(at.rank))
            if metric.kind is MetricKind.HISTOGRAM:
                stage = at.meter.stages[key]
                family.add_metric(labels, cumulative(stage, bounds_s), stage.sum_s)
            else:
                held = at.meter.counts if metric.kind is MetricKind.COUNTER else at.gauges
                family.add_metric(labels, held[key])
        yield family


def cumulative(histogram: Timed, bounds_s: Sequence[float]) -> list[tuple[str, float]]:
    """(upper bound, how many were at most that long), the last one open: counts 1, 0, 2 become 1, 1, 3."""
    return list(zip((*map(str, bounds_s), "+Inf"), accumulate(histogram.counts), strict=True))
