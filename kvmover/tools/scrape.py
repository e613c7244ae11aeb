"""A Scrape is the kvmover metrics of an endpoint at one time, and a Change the difference of two."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce

from kvmover.errors import KvmoverError, need

#: Longest answer accepted; no kvmover endpoint sends more.
_MOST_BYTES = 64 << 20

#: Most endpoints asked in parallel.
_MOST_ASKED = 64

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of an exposition, by name and labels, at a time in seconds of any one clock."""

    time_s: float
    samples: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def of(cls, text: str, time_s: float, prefix: str = "kvmover_") -> Scrape:
        """Parse the metrics of an exposition whose names begin with `prefix`. Raises KvmoverError if it is malformed or
        has none.
        """
        need("prometheus_client", "reading metrics", "metrics")
        from prometheus_client.parser import text_string_to_metric_families

        samples: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name.startswith(prefix):
                        samples[sample.name][frozenset(sample.labels.items())] = sample.value
        except ValueError as error:
            raise KvmoverError(f"the endpoint's answer is no exposition of metrics: {error}") from error
        if not samples:
            raise KvmoverError("the endpoint has no metric of kvmover")
        return cls(time_s, dict(samples))

    def by(self, name: str, label: str, **fixed: str) -> Mapping[str, float]:
        """Returns the sums of a metric by one label, of the samples with the `fixed` labels."""
        found = defaultdict[str, float](float)
        for labels, value in self.samples.get(name, {}).items():
            if fixed.items() <= labels:
                found[dict(labels).get(label, "")] += value
        return found

    def values(self, name: str, *labels: str) -> set[tuple[str, ...]]:
        """Returns the distinct values of these labels of a metric; a missing label is ""."""
        found = (dict(each) for each in self.samples.get(name, {}))
        return {tuple(each.get(label, "") for label in labels) for each in found}

    def split(self, labels: Sequence[str]) -> dict[tuple[str, ...], Scrape]:
        """Returns the samples by the values of these labels; those without one of them are left out."""
        found: dict[tuple[str, ...], dict[str, dict[Labels, float]]] = {}
        for name, samples in self.samples.items():
            for each, value in samples.items():
                said = dict(each)
                if all(label in said for label in labels):
                    part = found.setdefault(tuple(said[label] for label in labels), {})
                    part.setdefault(name, {})[each] = value
        return {key: Scrape(self.time_s, part) for key, part in found.items()}

    def total(self, name: str, **fixed: str) -> float:
        """Returns the sum of a metric's samples with the `fixed` labels; 0 if the metric is absent."""
        return sum(value for labels, value in self.samples.get(name, {}).items() if fixed.items() <= labels)

    def and_of(self, other: Scrape) -> Scrape:
        """Returns both scrapes, with samples of equal labels added."""
        samples = {name: dict(each) for name, each in self.samples.items()}
        for name, each in other.samples.items():
            mine = samples.setdefault(name, {})
            for labels, value in each.items():
                mine[labels] = mine.get(labels, 0.0) + value
        return Scrape(max(self.time_s, other.time_s), samples)


@dataclass(frozen=True, slots=True)
class Change:
    """The difference of two scrapes of counters."""

    before: Scrape
    now: Scrape

    @property
    def seconds(self) -> float:
        """Seconds between the scrapes, at least a nanosecond."""
        return max(self.now.time_s - self.before.time_s, 1e-9)

    def since(self) -> Scrape:
        """Returns each sample's increase; one that shrank counts in full, since its process restarted."""
        grown: dict[str, Mapping[Labels, float]] = {}
        for name, samples in self.now.samples.items():
            old = self.before.samples.get(name, {})
            grown[name] = {
                labels: value - before if value >= (before := old.get(labels, 0.0)) else value
                for labels, value in samples.items()
            }
        return Scrape(self.now.time_s, grown)


def quantile_s(buckets: Mapping[str, float], share: float) -> float | None:
    """Returns the upper bound of the bucket that holds the quantile `share`; None for an empty histogram.

    >>> quantile_s({"0.1": 8, "0.2": 9, "+Inf": 10}, 0.5), quantile_s({"0.1": 8, "0.2": 9, "+Inf": 10}, 0.99)
    (0.1, inf)
    """
    bounds = sorted((float(bound), count) for bound, count in buckets.items())
    if not bounds or not bounds[-1][1]:
        return None
    return next(bound for bound, count in bounds if count >= share * bounds[-1][1])


def endpoints(text: str) -> list[str]:
    """Expand the port range of a host's ranks into addresses; other text is returned as it is.

    Raises KvmoverError if the range descends or leaves 1 to 65535.

    >>> endpoints("decode-0:24400-24402"), endpoints("http://decode-0:24400/metrics")
    (['http://decode-0:24400/metrics', 'http://decode-0:24401/metrics', 'http://decode-0:24402/metrics'], \
['http://decode-0:24400/metrics'])
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
    """Return the text of a metrics endpoint. Raises KvmoverError with the address and the cause."""
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


@dataclass(frozen=True, slots=True)
class FleetScrape:
    """Scrapes by address of the endpoints that answered, and the errors of the silent ones."""

    said: Mapping[str, Scrape]
    silent: Mapping[str, str]

    def errors(self) -> list[str]:
        """Returns a line for each cause, with the first of the endpoints that have it and how many more."""
        alike: defaultdict[str, list[str]] = defaultdict(list)
        for address, error in self.silent.items():
            alike[error.replace(address, "\0", 1)].append(address)
        return [error.replace("\0", in_short(addresses)) for error, addresses in alike.items()]

    def whole(self) -> Scrape | None:
        """Returns the sum of all scrapes; None if no endpoint answered."""
        return reduce(Scrape.and_of, self.said.values()) if self.said else None


def ask(addresses: Sequence[str], get: Callable[[str], str], clock: Callable[[], float]) -> FleetScrape:
    """Scrape all endpoints in parallel, so that a silent host delays no other."""

    def one(address: str) -> Scrape | str:
        try:
            return Scrape.of(get(address), clock())
        except KvmoverError as error:
            return str(error) if address in str(error) else f"{address}: {error}"

    with ThreadPoolExecutor(max(1, min(len(addresses), _MOST_ASKED))) as pool:
        answers = dict(zip(addresses, pool.map(one, addresses), strict=True))
    said = {address: each for address, each in answers.items() if isinstance(each, Scrape)}
    return FleetScrape(said, {address: each for address, each in answers.items() if isinstance(each, str)})


def in_short(addresses: Sequence[str]) -> str:
    """Returns the first address and the number of the others.

    >>> in_short(["a:1"]), in_short(["a:1", "a:2", "a:3"])
    ('a:1', 'a:1 and 2 more')
    """
    return addresses[0] if len(addresses) == 1 else f"{addresses[0]} and {len(addresses) - 1} more"
