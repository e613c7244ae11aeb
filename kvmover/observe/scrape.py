"""A Scrape is what a metrics endpoint answered; two show what changed. Reading is pure; `fetch` alone goes out."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from kvmover.errors import KvmoverError
from kvmover.needs import need

#: No endpoint of ours says more: what is longer is something else.
_MOST_BYTES = 64 << 20

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Every kvmover sample of an exposition, by name and labels, at a time in seconds of any one clock."""

    time_s: float
    samples: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def of(cls, text: str, time_s: float) -> Scrape:
        """Raises KvmoverError for text that Prometheus would not read, or that has no kvmover metric."""
        need("prometheus_client", "reading metrics", "metrics")
        from prometheus_client.parser import text_string_to_metric_families

        samples: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name.startswith("kvmover_"):
                        samples[sample.name][frozenset(sample.labels.items())] = sample.value
        except ValueError as error:
            raise KvmoverError(f"the endpoint's answer is no exposition of metrics: {error}") from error
        if not samples:
            raise KvmoverError("the endpoint has no metric of kvmover")
        return cls(time_s, dict(samples))

    def by(self, name: str, label: str, **fixed: str) -> Mapping[str, float]:
        """Sums of a metric by one of its labels, over the others but those that are `fixed`."""
        found = defaultdict[str, float](float)
        for labels, value in self.samples.get(name, {}).items():
            if fixed.items() <= labels:
                found[dict(labels).get(label, "")] += value
        return found

    def total(self, name: str, **fixed: str) -> float:
        """The sum of a metric over all labels but those that are `fixed`; 0 of a metric that is not there."""
        return sum(value for labels, value in self.samples.get(name, {}).items() if fixed.items() <= labels)

    def and_of(self, other: Scrape) -> Scrape:
        """Both: samples with the same labels, which two processes may have, are added."""
        samples = {name: dict(each) for name, each in self.samples.items()}
        for name, each in other.samples.items():
            mine = samples.setdefault(name, {})
            for labels, value in each.items():
                mine[labels] = mine.get(labels, 0.0) + value
        return Scrape(max(self.time_s, other.time_s), samples)


@dataclass(frozen=True, slots=True)
class Change:
    """From one scrape to a later one, as counters that only grow."""

    before: Scrape
    now: Scrape

    @property
    def seconds(self) -> float:
        """From one to the other, at least a nanosecond."""
        return max(self.now.time_s - self.before.time_s, 1e-9)

    def since(self) -> Scrape:
        """What was added, sample by sample; all of one that began anew, since its process did."""
        grown: dict[str, Mapping[Labels, float]] = {}
        for name, samples in self.now.samples.items():
            old = self.before.samples.get(name, {})
            grown[name] = {
                labels: value - before if value >= (before := old.get(labels, 0.0)) else value
                for labels, value in samples.items()
            }
        return Scrape(self.now.time_s, grown)


def quantile_s(buckets: Mapping[str, float], share: float) -> float | None:
    """The upper bound of the bucket in which the `share` lies; None of an empty histogram.

    >>> quantile_s({"0.1": 8, "0.2": 9, "+Inf": 10}, 0.5), quantile_s({"0.1": 8, "0.2": 9, "+Inf": 10}, 0.99)
    (0.1, inf)
    """
    bounds = sorted((float(bound), count) for bound, count in buckets.items())
    if not bounds or not bounds[-1][1]:
        return None
    return next(bound for bound, count in bounds if count >= share * bounds[-1][1])


def endpoints(text: str) -> list[str]:
    """The address that is meant, or those of a range of ports, as ranks of one host have. Raises KvmoverError.

    >>> endpoints("decode-0:9400-9402"), endpoints("http://decode-0:9400/metrics")
    (['http://decode-0:9400/metrics', 'http://decode-0:9401/metrics', 'http://decode-0:9402/metrics'], \
['http://decode-0:9400/metrics'])
    """
    scheme, _, rest = text.rpartition("://")
    where, slash, path = rest.partition("/")
    host, _, ports = where.rpartition(":")
    path = f"/{path}" if slash else "/metrics"
    found = re.fullmatch(r"(\d+)-(\d+)", ports)
    if not found:
        return [text]
    first, last = int(found[1]), int(found[2])
    if not 0 < first <= last < 1 << 16:
        raise KvmoverError(f"{text} has no ports {ports}: a range goes from a port up to another, at most 65535")
    return [f"{scheme or 'http'}://{host}:{port}{path}" for port in range(first, last + 1)]


def fetch(url: str, timeout_s: float = 5.0) -> str:
    """The text at a metrics endpoint. Raises KvmoverError with the address and what went wrong."""
    if not url.startswith(("http://", "https://")):
        url = f"http://{url}"
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            content = answer.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise KvmoverError(f"cannot read {url}: {error.code} {error.reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise KvmoverError(f"cannot read {url}: {reason}") from error
    if len(content) > _MOST_BYTES:
        raise KvmoverError(f"{url} says more than {_MOST_BYTES} bytes")
    return content.decode("utf-8", "replace")
