"""A report draws these sums over the lines of its logs, by bins of time and by classes. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, floor

from kvmover.cache.ledger import AccountGroup, Loss, PredictionTotals, Predictor, Totals
from kvmover.observe.runlog import Accounted, Lines, Moved
from kvmover.transfer.meter import Stage, summed

#: Where prompt tokens come from, nearest first; what is left was computed.
TIERS = ("device", "host", "storage", "peer")

#: Widths of bins that people read easily, in seconds.
_WIDTHS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)
_DAY_S = 86400
_MOST_BINS = 60

#: Bars of the timeline: more cannot be told apart, and the page stays small.
MOST_BARS = 1200


@dataclass(frozen=True, slots=True)
class Bins:
    """Equal parts of the time of a run: bin `i` is [first_s + i * width_s, first_s + (i + 1) * width_s)."""

    first_s: float
    width_s: float
    count: int

    @classmethod
    def over(cls, first_s: float, last_s: float) -> Bins:
        """At most 60 of a round width, the first from a multiple of it.

        >>> Bins.over(1003.0, 1100.0)
        Bins(first_s=1002.0, width_s=2, count=50)
        """
        span_s = last_s - first_s
        width_s = next((each for each in _WIDTHS_S if span_s / each < _MOST_BINS - 1), None)
        if width_s is None:
            width_s = ceil(span_s / (_MOST_BINS - 1) / _DAY_S) * _DAY_S
        start_s = min(floor(first_s / width_s) * width_s, first_s)  # 35 * 0.01 is more than 0.35
        return cls(float(start_s), width_s, max(1, floor((last_s - start_s) / width_s) + 1))

    @property
    def last_s(self) -> float:
        """Where the last bin ends, in seconds of the wall clock."""
        return self.first_s + self.count * self.width_s

    def of(self, time_s: float) -> int:
        """The bin of a time, or the one nearest to it."""
        return min(max(floor((time_s - self.first_s) / self.width_s), 0), self.count - 1)


def bins_of(lines: Lines) -> Bins | None:
    """Over all that happened; None where nothing did."""
    times = [line.time_s for line in (*lines.accounts, *lines.transfers)]
    times += [line.began_s for line in lines.transfers]
    return Bins.over(min(times), max(times)) if times else None


@dataclass(slots=True)
class Tokens:
    """Prompt tokens of first attempts, by where their KV came from: those of retries would count a prompt twice."""

    prompt: int = 0
    hits: Counter[str] = field(default_factory=Counter[str])
    lost: Counter[Loss] = field(default_factory=Counter[Loss])

    @property
    def hit_rate(self) -> float:
        """Hits over prompt tokens, from 0 to 1; 0 of no prompt."""
        return self.hits.total() / self.prompt if self.prompt else 0.0

    def add(self, line: Accounted) -> None:
        """Count a first attempt; others would count their prompt twice."""
        account = line.account
        if account.attempt != 1:
            return
        self.prompt += account.prompt_tokens
        for tier in TIERS:
            self.hits[tier] += getattr(account, f"{tier}_tokens")
        self.lost.update(account.lost)


def tokens_of(accounts: Iterable[Accounted]) -> Tokens:
    """The sums over all first attempts."""
    total = Tokens()
    for line in accounts:
        total.add(line)
    return total


def tokens_by_group(accounts: Iterable[Accounted]) -> dict[AccountGroup, Tokens]:
    """The same by tenant and model, those with the longest prompts first."""
    found = defaultdict[AccountGroup, Tokens](Tokens)
    for line in accounts:
        found[line.account.group].add(line)
    return dict(sorted(found.items(), key=lambda each: (-each[1].prompt, each[0].tenant, each[0].model)))


def predictions_of(accounts: Iterable[Accounted]) -> dict[Predictor, PredictionTotals]:
    """Predicted against delivered hits of first attempts, by who predicted."""
    total = Totals()
    for line in accounts:
        if line.account.attempt == 1:
            total.add(line.account)
    return dict(sorted(total.predictions.items()))


def tokens_by_bin(accounts: Iterable[Accounted], bins: Bins) -> list[Tokens]:
    """By when the attempt ended."""
    found = [Tokens() for _ in range(bins.count)]
    for line in accounts:
        found[bins.of(line.time_s)].add(line)
    return found


def bytes_by_bin(transfers: Iterable[Moved], verb: str, bins: Bins) -> list[float]:
    """Bytes that landed, each transfer's spread evenly over its time.

    >>> line = Moved(10.0, 4.0, "decode", 0, "receive", "r", nbytes=400)
    >>> bytes_by_bin([line], "receive", Bins(5.0, 2.5, 2))
    [150.0, 250.0]
    """
    found = [0.0] * bins.count
    for line in transfers:
        if line.verb != verb or not line.landed:
            continue
        if line.seconds <= 0:
            found[bins.of(line.time_s)] += line.nbytes
            continue
        for index in range(bins.of(line.began_s), bins.of(line.time_s) + 1):
            left_s = bins.first_s + index * bins.width_s
            overlap_s = min(line.time_s, left_s + bins.width_s) - max(line.began_s, left_s)
            found[index] += line.nbytes * max(overlap_s, 0.0) / line.seconds
    return found


def route_of(line: Moved) -> str:
    """The route, or `both` where sources of one transfer differ; `none` where nothing was to be moved."""
    routes = set(line.routes)
    return "both" if len(routes) > 1 else str(next(iter(routes), "none"))


def routes_by_run(transfers: Iterable[Moved]) -> dict[int, Counter[str]]:
    """Transfers received by route, for each power of two that their contiguous runs are on average as long as."""
    found: defaultdict[int, Counter[str]] = defaultdict(Counter[str])
    for line in transfers:
        if line.landed and line.verb == "receive" and 0 < line.runs <= line.nbytes:
            found[(line.nbytes // line.runs).bit_length() - 1][route_of(line)] += 1
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """A row of the timeline: transfers of one rank and direction that do not overlap."""

    name: str
    bars: tuple[Moved, ...]


def lanes_of(transfers: Sequence[Moved]) -> tuple[list[TimelineRow], int]:
    """Rows by rank and direction, as few as hold all bars side by side, and how many bars were left out.

    Failed transfers stay before others, and long ones before short ones.
    """
    kept = sorted(transfers, key=lambda line: (line.landed, -line.seconds))[:MOST_BARS]
    groups: defaultdict[str, list[list[Moved]]] = defaultdict(list)
    for line in sorted(kept, key=lambda line: (line.engine, line.rank, line.verb, line.began_s)):
        rows = groups[f"{line.engine} {line.rank} {line.verb}"]
        free = next((row for row in rows if row[-1].time_s <= line.began_s), None)
        if free is None:
            rows.append([line])
        else:
            free.append(line)
    lanes = [
        TimelineRow(name if not i else "", tuple(row)) for name, rows in groups.items() for i, row in enumerate(rows)
    ]
    return lanes, len(transfers) - len(kept)


def seconds_by_bin(transfers: Iterable[Moved], bins: Bins) -> list[list[float]]:
    """How long those received took that landed in each bin."""
    found: list[list[float]] = [[] for _ in range(bins.count)]
    for line in transfers:
        if line.landed and line.verb == "receive":
            found[bins.of(line.time_s)].append(line.seconds)
    return found


def seconds_by_way(transfers: Iterable[Moved]) -> list[tuple[str, float]]:
    """Seconds of all that were received together, by route, and by cause of those that failed; the most first.

    >>> seconds_by_way([Moved(10.0, 4.0, "decode", 0, "receive", "r")])
    [('none', 4.0)]
    """
    found = defaultdict[str, float](float)
    for line in transfers:
        if line.verb == "receive":
            found[route_of(line) if line.landed else f"failed: {line.cause or 'unknown'}"] += line.seconds
    return sorted(((way, seconds) for way, seconds in found.items() if seconds), key=lambda each: -each[1])


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Seconds of one part of the way, one number for each request that had it: of all its chunks, on all ranks."""

    part: Stage
    seconds: tuple[float, ...]


#: The parts of a chunk's way in their order.
PARTS = (Stage.CREDIT_WAIT, Stage.STAGING_WAIT, Stage.GATHER, Stage.POST, Stage.WIRE, Stage.SCATTER)


def times_by_part(transfers: Iterable[Moved]) -> list[PartTimes]:
    """What landed, by the parts of the way that took any time; a request's lines of both sides are one request.

    >>> lines = [Moved(10.0, 4.0, "decode", 0, verb, "r", spent_s=spent) for verb, spent in
    ...          (("send", {Stage.WIRE: 2.0}), ("receive", {Stage.WIRE: 1.0, Stage.SCATTER: 0.5}))]
    >>> [(str(each.part), each.seconds) for each in times_by_part(lines)]
    [('wire', (3.0,)), ('scatter', (0.5,))]
    """
    requests = defaultdict[str, list[dict[Stage, float]]](list)
    for line in transfers:
        if line.landed and line.spent_s:
            requests[line.request].append(line.spent_s)
    spent = [summed(each) for each in requests.values()]
    found = [PartTimes(part, tuple(each[part] for each in spent if part in each)) for part in PARTS]
    return [each for each in found if each.seconds]


def slowest(transfers: Iterable[Moved], most: int) -> list[Moved]:
    """Those received that took longest to land."""
    landed = (line for line in transfers if line.landed and line.verb == "receive")
    return sorted(landed, key=lambda line: -line.seconds)[:most]


def last_failed(transfers: Iterable[Moved], most: int) -> list[Moved]:
    """The last that failed, the latest first."""
    return sorted((line for line in transfers if not line.landed), key=lambda line: -line.time_s)[:most]


@dataclass(frozen=True, slots=True)
class Failures:
    """Transfers that failed for one cause, with the words of the last of them."""

    cause: str
    count: int
    reason: str


def failures_of(transfers: Iterable[Moved]) -> list[Failures]:
    """Most frequent first."""
    last: dict[str, str] = {}
    counts = Counter[str]()
    for line in transfers:
        if line.reason is not None:
            cause = str(line.cause or "unknown")
            counts[cause] += 1
            last[cause] = line.reason
    return [Failures(cause, count, last[cause]) for cause, count in counts.most_common()]


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of all do not exceed; 0 of none.

    >>> quantile([3.0, 1.0, 2.0], 0.5), quantile([1.0, 2.0], 0.99)
    (2.0, 2.0)
    """
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else 0.0
