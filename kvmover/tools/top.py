"""`kvmover top` scrapes the metrics of running engines and shows transfers, hits, bandwidth, arenas and failures."""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvmover.errors import KvmoverError, need
from kvmover.observe.formats import bytes_in_words
from kvmover.tools.tables import Column, Sheet

#: Longest answer accepted; no kvmover endpoint sends more.
_MOST_BYTES = 64 << 20

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The kvmover samples of an exposition, by name and labels, at a time in seconds of any one clock."""

    time_s: float
    samples: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def of(cls, text: str, time_s: float) -> Scrape:
        """Parse an exposition. Raises KvmoverError if it is malformed or has no kvmover metric."""
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


#: Most ranks shown (sums cover all), most reasons, by tokens lost, and most groups, by prompt tokens.
MOST_RANKS, MOST_REASONS, MOST_GROUPS = 32, 5, 16

#: Most endpoints asked in parallel.
_MOST_ASKED = 64

_SOURCES = ("device", "host", "storage", "peer", "computed", "abandoned")
_COPIES = {
    "backed": "device to host",
    "loaded": "host to device",
    "stored": "host to storage",
    "fetched": "storage to host",
}
#: Counters of faults, which may not have failed a transfer.
_FAULTS = {
    "kvmover_lost_peers_total": "peers lost",
    "kvmover_refused_total": "peers and requests refused",
    "kvmover_mismatched_chunks_total": "chunks with another digest",
    "kvmover_malformed_messages_total": "messages malformed",
    "kvmover_unopened_messages_total": "messages without a good seal",
    "kvmover_faults_total": "faults in one attempt",
    "kvmover_poll_faults_total": "polls that raised",
    "kvmover_ledger_faults_total": "ledger events that do not balance",
}


@dataclass(frozen=True, slots=True)
class View:
    """The samples shown: `now` since the processes began, `new` of the last `seconds`; equal in the first frame."""

    address: str
    now: Scrape
    new: Scrape
    seconds: float | None

    @classmethod
    def of(cls, address: str, before: Scrape | None, now: Scrape) -> View:
        """Build the view of `now` and its increase since `before`, or of `now` alone."""
        if before is None:
            return cls(address, now, now, None)
        change = Change(before, now)
        return cls(address, now, change.since(), change.seconds)

    def rate(self, count: float) -> float | None:
        """Returns `count` per second; None before the second scrape."""
        return None if self.seconds is None else count / self.seconds


def screen(view: View) -> RenderableType:
    """Returns the frame of a view."""
    over = "since the start" if view.seconds is None else f"over the last {view.seconds:.1f} s"
    parts = [Text(f"kvmover top  {view.address}  {over}", "bold"), Text()]
    parts += [_transfers(view), Text()]
    for table in (_hits(view), _groups(view), _predictions(view), _copies(view), _failures(view)):
        if table.rows:
            parts += [table, Text()]
    return Group(*parts)


def _table(*columns: str) -> Sheet:
    return Sheet([Column(columns[0], "left"), *map(Column, columns[1:])], heading_style="dim")


def _transfers(view: View) -> Sheet:
    """Returns a row of sums and a row for each rank."""
    numbers = (
        "open",
        "landed",
        "failed",
        "sent",
        "received",
        "receive p50",
        "p99",
        "arena out",
        "in",
        "quarantine",
        "peers",
    )
    table = _table("transfers", *numbers)
    found = (dict(labels) for labels in view.now.samples.get("kvmover_open_sends", {}))
    ranks = sorted({(each.get("engine", ""), each.get("rank", "")) for each in found}, key=_by_number)
    if len(ranks) != 1:
        table.add(Text("all"), *_row(view))
    for engine, rank in ranks[:MOST_RANKS]:
        table.add(Text(f"{engine} {rank}"), *_row(view, engine=engine, rank=rank))
    if len(ranks) > MOST_RANKS:
        table.add(Text(f"and {len(ranks) - MOST_RANKS} more", "dim"))
    return table


def _by_number(rank: tuple[str, str]) -> tuple[str, int, str]:
    """Returns a sort key that puts rank 2 before rank 10."""
    return rank[0], len(rank[1]), rank[1]


def _row(view: View, **of: str) -> Iterator[Text]:
    now, new = view.now, view.new
    ends = new.by("kvmover_transfers_total", "end", **of)
    landed = ends.get("landed", 0.0)
    failed = sum(ends.values()) - landed
    buckets = new.by("kvmover_receive_seconds_bucket", "le", **of)
    quarantined = now.total("kvmover_incoming_quarantined_bytes", **of)
    yield Text(f"{now.total('kvmover_open_sends', **of) + now.total('kvmover_open_receives', **of):,.0f}")
    yield Text(_per_second(view.rate(landed), landed))
    yield Text(f"{failed:,.0f}", "bold red" if failed else "")
    yield Text(_bandwidth(view, new.total("kvmover_sent_bytes_total", **of)))
    yield Text(_bandwidth(view, new.total("kvmover_received_bytes_total", **of)))
    for share in (0.5, 0.99):
        yield Text(_seconds(quantile_s(buckets, share)))
    for side in ("outgoing", "incoming"):
        reserved, whole = (now.total(f"kvmover_{side}_{each}_bytes", **of) for each in ("reserved", "arena"))
        share = reserved / whole if whole else 0.0
        yield Text(f"{share:.0%}", "yellow" if share > 0.9 else "")
    yield Text(bytes_in_words(int(quarantined)) if quarantined else "-", "yellow" if quarantined else "")
    yield Text(f"{now.total('kvmover_peers', **of):,.0f}")


def _hits(view: View) -> Sheet:
    """Returns prompt tokens by source. First attempts only: retries would count a prompt twice."""
    table = _table("prompt tokens", "now", "share", "in all", "share")
    new = view.new.by("kvmover_prompt_tokens_total", "source", attempt="first")
    whole = view.now.by("kvmover_prompt_tokens_total", "source", attempt="first")
    if not any(whole.values()):
        return table
    for source in _SOURCES:
        cells: list[str] = []
        for counts in (new, whole):
            count, total = counts.get(source, 0.0), sum(counts.values())
            cells += [f"{count:,.0f}", f"{count / total:.1%}" if total else "-"]
        table.add(Text(source), *cells)
    lost = view.now.by("kvmover_lost_tokens_total", "reason", attempt="first")
    for reason, tokens in sorted(lost.items(), key=lambda item: -item[1])[:MOST_REASONS]:
        if tokens:
            added = view.new.total("kvmover_lost_tokens_total", attempt="first", reason=reason)
            table.add(Text(f"lost: {reason}", "dim"), f"{added:,.0f}", "", f"{tokens:,.0f}", "")
    return table


def _groups(view: View) -> Sheet:
    """Returns first attempts by tenant and model since the start, with the reason that lost most tokens."""
    table = _table("tenant, model", "prompt tokens", "hits", *_SOURCES, "lost", "most of it to")
    prompts = {
        group: view.now.by("kvmover_prompt_tokens_total", "source", attempt="first", tenant=group[0], model=group[1])
        for group in view.now.values("kvmover_prompt_tokens_total", "tenant", "model")
    }
    ranked = sorted(prompts.items(), key=lambda each: (-sum(each[1].values()), each[0]))
    for (tenant, model), sources in ranked[:MOST_GROUPS]:
        total = sum(sources.values())
        if not total:
            continue
        hits = total - sources.get("computed", 0.0) - sources.get("abandoned", 0.0)
        lost = view.now.by("kvmover_lost_tokens_total", "reason", attempt="first", tenant=tenant, model=model)
        most = max(lost, key=lambda reason: lost[reason]) if any(lost.values()) else ""
        parts = (f"{sources.get(source, 0.0):,.0f}" for source in _SOURCES)
        name = Text(f"{tenant or 'no tenant'}, {model or 'no model'}")
        table.add(name, f"{total:,.0f}", f"{hits / total:.1%}", *parts, f"{sum(lost.values()):,.0f}", most)
    if len(ranked) > MOST_GROUPS:
        table.add(Text(f"and {len(ranked) - MOST_GROUPS} more", "dim"))
    return table


def _predictions(view: View) -> Sheet:
    """Returns predicted hits since the start.

    A router with a stale view of the cache misses; one with a partial view foresees less.
    """
    table = _table("hits predicted by", "requests", "predicted", "delivered", "foreseen", "missed", "unforeseen")
    for by in sorted(each for (each,) in view.now.values("kvmover_predicted_tokens_total", "by")):
        found = view.now.by("kvmover_predicted_tokens_total", "outcome", by=by)
        foreseen, missed, unforeseen = (found.get(each, 0.0) for each in ("foreseen", "missed", "unforeseen"))
        counts = (foreseen + missed, foreseen + unforeseen, foreseen, missed, unforeseen)
        requests = view.now.total("kvmover_predicted_requests_total", by=by)
        table.add(Text(by), f"{requests:,.0f}", *(f"{count:,.0f}" for count in counts))
    return table


def _copies(view: View) -> Sheet:
    table = _table("tiers", "pages", "bandwidth", "in all")
    for word, name in _COPIES.items():
        if whole := view.now.total(f"kvmover_tier_{word}_bytes_total"):
            pages = view.new.total(f"kvmover_tier_{word}_pages_total")
            rate = _bandwidth(view, view.new.total(f"kvmover_tier_{word}_bytes_total"))
            table.add(Text(name), f"{pages:,.0f}", rate, bytes_in_words(int(whole)))
    return table


def _failures(view: View) -> Sheet:
    """Returns all failures since the start, so that they stay in view."""
    table = _table("failures", "now", "in all")
    found: list[tuple[str, float, float]] = []
    new = view.new.by("kvmover_transfers_total", "end")
    whole = view.now.by("kvmover_transfers_total", "end")
    found += [(f"transfers: {end}", new.get(end, 0.0), count) for end, count in whole.items() if end != "landed"]
    found += [(words, view.new.total(name), view.now.total(name)) for name, words in _FAULTS.items()]
    for words, added, count in found:
        if count:
            style = "bold red" if added and view.seconds is not None else ""
            table.add(Text(words, style), Text(f"{added:,.0f}", style), f"{count:,.0f}")
    return table


def _per_second(rate: float | None, count: float) -> str:
    return f"{count:,.0f}" if rate is None else f"{rate:,.1f}/s"


def _bandwidth(view: View, nbytes: float) -> str:
    rate = view.rate(nbytes)
    return bytes_in_words(int(nbytes)) if rate is None else f"{bytes_in_words(int(rate))}/s"


def _seconds(seconds: float | None) -> str:
    """Returns the upper bound of a bucket, in words."""
    if seconds is None:
        return "-"
    if seconds == float("inf"):
        return "> 84 s"
    return f"<={seconds * 1e3:.3g} ms" if seconds < 1 else f"<={seconds:.3g} s"


@dataclass(frozen=True, slots=True)
class FleetScrape:
    """Scrapes by address of the endpoints that answered, and the errors of the silent ones."""

    said: Mapping[str, Scrape]
    silent: Sequence[str]

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

    with ThreadPoolExecutor(min(len(addresses), _MOST_ASKED)) as pool:
        answers = dict(zip(addresses, pool.map(one, addresses), strict=True))
    said = {address: each for address, each in answers.items() if isinstance(each, Scrape)}
    return FleetScrape(said, [each for each in answers.values() if isinstance(each, str)])


def _name(addresses: Sequence[str]) -> str:
    return addresses[0] if len(addresses) == 1 else f"{addresses[0]} and {len(addresses) - 1} more"


def watch(
    addresses: Sequence[str],
    interval_s: float,
    out: Console,
    get: Callable[[str], str] = fetch,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show frames every `interval_s` seconds until interrupted.

    A frame has the errors of lost endpoints, whose last samples still count: total rates do not jump.

    Raises KvmoverError if no endpoint answers at first.
    """
    name = _name(addresses)
    found = _some(ask(addresses, get, clock))
    with Live(_frame(name, None, found), console=out, auto_refresh=False) as live:
        while True:
            sleep(interval_s)
            before, new = found, ask(addresses, get, clock)
            found = FleetScrape({**before.said, **new.said}, new.silent)
            live.update(_frame(name, before.whole() if new.said else None, found), refresh=True)


def show(addresses: Sequence[str], out: Console, get: Callable[[str], str] = fetch) -> None:
    """Print one frame, of sums since the processes began. Raises KvmoverError if no endpoint answers."""
    out.print(_frame(_name(addresses), None, _some(ask(addresses, get, lambda: 0.0))))


def _some(found: FleetScrape) -> FleetScrape:
    if not found.said:
        raise KvmoverError("; ".join(found.silent))
    return found


def _frame(name: str, before: Scrape | None, found: FleetScrape) -> RenderableType:
    errors = [Text(f"kvmover top: {each}", "bold red") for each in found.silent]
    now = found.whole()
    return Group(*([screen(View.of(name, before, now))] if now else []), *errors)
