"""A Metric is a name, a kind and a help text; collectors make families of prometheus_client of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

#: The port of rank 0's metrics in all recipes, `kvmover top` and a watched demo; rank r has this plus r. It is below
#: the ports that Kubernetes gives to nodes (30000) and Linux to clients (32768), and no default of a neighbour's: 9400
#: is dcgm-exporter's, 29400 torchrun's, and 10002 to 19999 are for Ray's workers.
FIRST_METRICS_PORT = 24400

#: The labels of a rank's metrics.
RANK = ("engine", "rank")


class MetricKind(StrEnum):
    """A kind of metric, as in Prometheus. Counters' names end in `_total`, histograms' in `_seconds`."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `name` is without `kvmover_` and its kind's suffix."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = RANK

    def family(self) -> Family:
        """Returns an empty family, for `add_metric(labels, value)` or a histogram's `(labels, buckets, sum_s)`."""
        from prometheus_client import core

        if self.kind is MetricKind.HISTOGRAM:
            return core.HistogramMetricFamily(f"kvmover_{self.name}_seconds", self.help, labels=self.labels)
        made = core.CounterMetricFamily if self.kind is MetricKind.COUNTER else core.GaugeMetricFamily
        return made(f"kvmover_{self.name}", self.help, labels=self.labels)


def named(prefix: str, kind: MetricKind, texts: Mapping[Any, str]) -> dict[StrEnum, Metric]:
    """Returns metrics of one kind by their names in a meter: `sent_bytes` is `kvmover_<prefix>sent_bytes`."""
    return {name: Metric(f"{prefix}{name}", kind, text) for name, text in texts.items()}


#: Upper bounds of one operation's time, in seconds: 10 us to 84 s in powers of two.
OPERATION_BOUNDS_S = tuple(10e-6 * 2**power for power in range(24))


class DurationHistogram:
    """A histogram of times, s: for each of `bounds_s` the number up to it and above the one before, and at the end the
    rest.

    >>> histogram = DurationHistogram((1.0, 2.0))
    >>> for seconds in (0.5, 2.0, 9.0): histogram.add(seconds)
    >>> histogram.counts, histogram.count, histogram.sum_s
    ([1, 1, 1], 3, 11.5)
    >>> histogram.cumulative()
    [('1.0', 1), ('2.0', 2), ('+Inf', 3)]
    """

    __slots__ = ("bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DurationHistogram):
            return NotImplemented
        return (self.bounds_s, self.counts, self.sum_s) == (other.bounds_s, other.counts, other.sum_s)

    @property
    def count(self) -> int:
        """Returns the number of times."""
        return sum(self.counts)

    def add(self, seconds: float) -> None:
        """Count one time."""
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds

    def copy(self) -> DurationHistogram:
        """Returns an independent copy."""
        copy = DurationHistogram(self.bounds_s)
        copy.counts, copy.sum_s = self.counts.copy(), self.sum_s
        return copy

    def cumulative(self) -> list[tuple[str, float]]:
        """Returns (upper bound, times up to it), the last one open."""
        return list(zip((*map(str, self.bounds_s), "+Inf"), accumulate(self.counts), strict=True))


class RankMeter(Protocol):
    """A meter's counts and times, by name."""

    @property
    def counts(self) -> Mapping[Any, int]: ...

    @property
    def stages(self) -> Mapping[Any, DurationHistogram]: ...


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


def families(metrics: Mapping[StrEnum, Metric], taken: Iterable[RankSnapshot]) -> Iterator[Family]:
    """Yields a family for each metric, whose key is one of each snapshot's counts, gauges or stages."""
    taken = list(taken)
    for key, metric in metrics.items():
        family: Any = metric.family()
        for at in taken:
            labels = (at.engine, str(at.rank))
            if metric.kind is MetricKind.HISTOGRAM:
                stage = at.meter.stages[key]
                family.add_metric(labels, stage.cumulative(), stage.sum_s)
            else:
                held = at.meter.counts if metric.kind is MetricKind.COUNTER else at.gauges
                family.add_metric(labels, held[key])
        yield family
