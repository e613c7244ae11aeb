"""A LedgerCollector exports a ledger as Prometheus metrics, and JsonLines as a line of JSON an account.

Metrics are read at a scrape, so no token counts twice and no event pays for them. They include how long pages live, lie
idle and wait for reuse, which tells a cache that is too small from an idle one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, TYPE_CHECKING, Any, cast

import msgspec

from kvmover.cache.ledger.account import Account
from kvmover.cache.ledger.ledger import Ledger
from kvmover.errors import KvmoverError
from kvmover.exposition import DurationHistogram, Metric, MetricKind

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

_SOURCES = ("device", "host", "storage", "peer", "computed", "abandoned")
_ENDS = ("finished", "retracted", "aborted")
_OUTCOMES = ("foreseen", "missed", "unforeseen")
_GROUP = ("tenant", "model", "attempt")
_COUNTER, _TIMES = MetricKind.COUNTER, MetricKind.HISTOGRAM

_TOKENS = Metric("prompt_tokens", _COUNTER, "Prompt tokens by where their KV came from.", (*_GROUP, "source"))
_LOST = Metric("lost_tokens", _COUNTER, "Reusable tokens that were computed again, by reason.", (*_GROUP, "reason"))
_ATTEMPTS = Metric("attempts", _COUNTER, "Attempts by how they ended.", (*_GROUP, "end"))
_SAVED = Metric("saved_bytes", _COUNTER, "KV that was not computed.", ("tenant", "model"))
_PREDICTED = Metric(
    "predicted_tokens",
    _COUNTER,
    "Prompt tokens of first attempts by what was predicted of them: foreseen hits; missed, no hits; unforeseen hits.",
    ("tenant", "model", "by", "outcome"),
)
_PREDICTIONS = Metric("predicted_requests", _COUNTER, "First attempts with a prediction.", ("tenant", "model", "by"))
_HINTS = Metric(
    "hints",
    _COUNTER,
    "Hints by what they ask for, and by `met` or why they were not.",
    ("tenant", "model", "action", "outcome"),
)
_FAULTS = Metric("ledger_faults", _COUNTER, "Events that did not balance.", ())
_NEVER = Metric("never_admitted", _COUNTER, "Requests that ended before they began.", ())
_NEVER_RESUMED = Metric("never_resumed", _COUNTER, "Requests that ended between a retraction and the next attempt.", ())
#: Metrics by the attribute of Residency.
_STAYS = {
    "lifetimes": Metric("page_lifetime", _TIMES, "From a page's storing to its removal.", ("tier",)),
    "idles": Metric("page_idle", _TIMES, "From a page's last use to its removal.", ("tier",)),
    "gaps": Metric("page_reuse_gap", _TIMES, "Between two uses of a page.", ("tier",)),
}


class LedgerCollector:
    """A collector for `prometheus_client`: `REGISTRY.register(LedgerCollector(ledger, {"device": residency}))`.

    Sums over `source` are prompt tokens, label by label. `attempt` is `first`, or `again` after a retraction: take
    rates of traffic from `first` alone. Scrape in the ledger's own thread, or between its events.
    """

    def __init__(self, ledger: Ledger, tiers: Mapping[str, Residency] = MappingProxyType({})) -> None:
        self._ledger, self._tiers = ledger, tiers

    def collect(self) -> Iterator[Family]:
        """Yield the metric families of docs/metrics.md. For prometheus_client."""
        tokens, lost, attempts, saved = (cast(Any, each.family()) for each in (_TOKENS, _LOST, _ATTEMPTS, _SAVED))
        predicted, predictions = (cast(Any, each.family()) for each in (_PREDICTED, _PREDICTIONS))
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
            for by, sums in book.first.predictions.items():
                predictions.add_metric((group.tenant, group.model, by), sums.requests)
                for outcome in _OUTCOMES:
                    count = getattr(sums, f"{outcome}_tokens")
                    predicted.add_metric((group.tenant, group.model, by, outcome), count)
        yield from (tokens, lost, attempts, saved, predicted, predictions)
        hints: Any = _HINTS.family()
        for (group, action, outcome), count in self._ledger.hints.items():
            hints.add_metric((group.tenant, group.model, action, outcome), count)
        yield hints
        for metric, count in (
            (_FAULTS, self._ledger.faults),
            (_NEVER, self._ledger.never_admitted),
            (_NEVER_RESUMED, self._ledger.never_resumed),
        ):
            alone: Any = metric.family()
            alone.add_metric((), count)
            yield alone
        yield from self._stays()

    def _stays(self) -> Iterator[Family]:
        for attribute, metric in _STAYS.items():
            family: Any = metric.family()
            for tier, residency in self._tiers.items():
                histogram = getattr(residency, attribute)
                family.add_metric((tier,), histogram.cumulative(), histogram.sum_s)
            yield family


#: Upper bounds of how long pages stay, in seconds: a millisecond to three days and a half, by factors of four.
STAY_BOUNDS_S = tuple(0.001 * 4**power for power in range(15))


@dataclass(slots=True)
class _Stay:
    stored_s: float
    used_s: float


class Residency:
    """Three histograms of one tier's pages: `lifetimes`, `idles` (last use to removal) and `gaps` (use to use).

    An event costs a third of a microsecond a page, so pass a sample: always the same ids, such as those divisible by
    61. Pages whose storing was not seen do not count.

    >>> residency = Residency()
    >>> residency.stored([7], 1.0)
    >>> residency.used([7], 5.0)
    >>> residency.removed([7], 8.0)
    >>> residency.lifetimes.sum_s, residency.idles.sum_s, residency.gaps.sum_s
    (7.0, 3.0, 4.0)
    """

    def __init__(self) -> None:
        self.lifetimes, self.idles, self.gaps = (DurationHistogram(STAY_BOUNDS_S) for _ in range(3))
        self._stays = dict[int, _Stay]()

    def __len__(self) -> int:
        """Return the number of pages in the tier."""
        return len(self._stays)

    def stored(self, pages: Iterable[int], now_s: float) -> None:
        """Add pages that have come to the tier, which is their first use."""
        for page in pages:
            self._stays[page] = _Stay(now_s, now_s)

    def used(self, pages: Iterable[int], now_s: float) -> None:
        """Count a use of pages; unknown pages are skipped."""
        for page in pages:
            stay = self._stays.get(page)
            if stay:
                self.gaps.add(now_s - stay.used_s)
                stay.used_s = now_s

    def removed(self, pages: Iterable[int], now_s: float) -> None:
        """Remove pages that have left the tier."""
        for page in pages:
            stay = self._stays.pop(page, None)
            if stay:
                self.lifetimes.add(now_s - stay.stored_s)
                self.idles.add(now_s - stay.used_s)


_FLUSH_BYTES = 1 << 16


class JsonLines:
    """An appender of accounts to a file, 64 KiB at a time: `Ledger(sink=lines.write)`. Close it, or use `with`.

    Raises KvmoverError if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file: IO[bytes] = path.open("ab", buffering=0)
        except OSError as error:
            raise KvmoverError(f"cannot write {path}: {error.strerror}") from error
        self._encoder = msgspec.json.Encoder()
        self._lines = bytearray()

    def write(self, account: Account) -> None:
        """Buffer a line; the file has it after 64 KiB, `flush` or `close`. Raises OSError when the disk is full."""
        self._encoder.encode_into(account, self._lines, len(self._lines))
        self._lines += b"\n"
        if len(self._lines) >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffer, without a sync."""
        self._file.write(self._lines)
        self._lines.clear()

    def close(self) -> None:
        """Write the rest and close the file. Closing again is no error."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_accounts(path: Path) -> Iterator[Account]:
    """Yield the accounts of a file. Raises KvmoverError for a bad line, a last one that was cut off included."""
    decoder = msgspec.json.Decoder(Account)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise KvmoverError(f"{path.name} line {number}: {error}") from error
