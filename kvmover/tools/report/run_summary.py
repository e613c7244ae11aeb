"""A summary of a run, from its logs: the slowest and the failed requests, where the time went, and prompt tokens."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from heapq import heappush, heappushpop
from math import ceil, inf
from pathlib import Path

from rich.console import Console

from kvmover.cache.ledger import AccountGroup, Totals
from kvmover.errors import KvmoverError
from kvmover.observe.formats import bytes_in_words, seconds_in_words
from kvmover.observe.runlog import Accounted, AnyLine, LineReader, Moved, Run
from kvmover.tools.report.run_trace import check_name, write_trace
from kvmover.tools.tables import Column, Sheet
from kvmover.transfer.meter import Stage

#: Stages of a chunk, in order.
_PARTS = (Stage.CREDIT_WAIT, Stage.STAGING_WAIT, Stage.GATHER, Stage.POST, Stage.WIRE, Stage.SCATTER)

_TIERS = ("device", "host", "storage", "peer")


def summed(logs: Sequence[Path], trace: Path | None, most: int) -> tuple[Summary, int]:
    """Sum up run logs, with up to `most` slow and failed requests, and write the trace to `trace`.

    Reads each log once. Returns the sums, and the number of unfinished lines. Raises KvmoverError if a file is no run
    log, `trace` is one of `logs`, or no transfer or request ended.
    """
    reader, summary = LineReader(logs), Summary(most)
    if trace is not None:
        if trace.resolve() in {log.resolve() for log in logs}:
            raise KvmoverError(f"--trace {trace} is a run log that is read: name another file")
        check_name("--trace", trace)
        write_trace(summary.counted(reader), trace)
    else:
        for _ in summary.counted(reader):
            pass
    return summary, reader.cut


def report_run(logs: Sequence[Path], trace: Path | None, most: int, out: Console) -> None:
    """Print the summary of run logs. Raises KvmoverError as `summed` does."""
    print_summary(*summed(logs, trace, most), out)
    if trace is not None:
        out.print(f"wrote {trace}, for ui.perfetto.dev or chrome://tracing", soft_wrap=True)


@dataclass(slots=True)
class Summary:
    """Sums over the lines of a run: numbers of each transfer, and the lines of `most` slow and `most` failed ones.

    `received_s`: seconds of each receive. `ways_s`: seconds of receives by route, of failed ones by cause. `parts_s`:
    seconds that a transfer's chunks spent on its rank in each stage. `slowest`: a heap of receives by seconds.
    `failed`: by request and reason the first transfer and the count, latest last. `causes`: failed transfers of both
    sides. `tokens`: first attempts, by tenant and model.
    """

    most: int
    ranks: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    began_s: float = inf
    ended_s: float = -inf
    landed: int = 0
    received_bytes: int = 0
    received_s: array[float] = field(default_factory=lambda: array("d"))
    ways_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    parts_s: dict[Stage, array[float]] = field(default_factory=lambda: {part: array("d") for part in _PARTS})
    slowest: list[tuple[float, int, Moved]] = field(default_factory=list[tuple[float, int, Moved]])
    failed: dict[tuple[str, str], tuple[Moved, int]] = field(default_factory=dict[tuple[str, str], tuple[Moved, int]])
    causes: Counter[str] = field(default_factory=Counter[str])
    tokens: defaultdict[AccountGroup, Totals] = field(default_factory=lambda: defaultdict(Totals))

    def counted(self, lines: Iterable[AnyLine]) -> Iterator[AnyLine]:
        """Count each line and yield it. Raises KvmoverError at the end if no transfer or request ended."""
        for line in lines:
            if isinstance(line, Run):
                self.ranks.add((line.engine, line.rank))
            else:
                self.ended_s = max(self.ended_s, line.time_s)
                self.began_s = min(self.began_s, line.began_s if isinstance(line, Moved) else line.time_s)
                self._add(line)
            yield line
        if self.ended_s < self.began_s:
            raise KvmoverError("no transfer and no request ended in this run: there is nothing to report")

    def _add(self, line: Moved | Accounted) -> None:
        if isinstance(line, Accounted):
            if line.account.attempt == 1:  # a prompt counts once, however often it was retracted
                self.tokens[line.account.group].add(line.account)
            return
        cause = str(line.cause or "unknown")
        if line.verb == "receive":
            self.ways_s[route_of(line) if line.landed else f"failed: {cause}"] += line.seconds
        if line.reason is not None:
            self.causes[cause] += 1
            first, count = self.failed.pop((line.request, line.reason), (line, 0))
            self.failed[line.request, line.reason] = first, count + 1
            if len(self.failed) > self.most:
                del self.failed[next(iter(self.failed))]
            return
        self.landed += 1
        for part, seconds in line.spent_s.items():
            if part in self.parts_s:
                self.parts_s[part].append(seconds)
        if line.verb == "receive":
            self.received_bytes += line.nbytes
            self.received_s.append(line.seconds)
            push = heappush if len(self.slowest) < self.most else heappushpop
            push(self.slowest, (line.seconds, len(self.received_s), line))


def print_summary(summary: Summary, cut: int, out: Console) -> None:
    """Print the sums and a table for each question about the run. `cut`: unfinished lines of its logs."""
    began = datetime.fromtimestamp(summary.began_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    ranks = f"{len(summary.ranks)} rank{'' if len(summary.ranks) == 1 else 's'} logged"
    left = f"; {cut} unfinished lines left out" if cut else ""
    out.print(f"run of {began}, {seconds_in_words(summary.ended_s - summary.began_s)}, {ranks}{left}", style="bold")
    p50, p99 = (seconds_in_words(quantile(summary.received_s, share)) for share in (0.5, 0.99))
    out.print(
        f"{summary.landed:,} transfers landed, {summary.causes.total():,} failed;"
        f" {bytes_in_words(summary.received_bytes)} received, p50 {p50}, p99 {p99}"
    )
    reasons = ", ".join(f"{count:,} {cause}" for cause, count in summary.causes.most_common())
    for title, table in (
        ("Slowest requests, of those received", _slowest(summary)),
        (f"Failed requests, the latest first; transfers failed by cause: {reasons}", _failed(summary)),
        ("Where the time went: receives by route, failed ones by cause", _ways(summary)),
        ("Parts of the way: seconds that the chunks of a transfer spent on its rank, overlapping", _parts(summary)),
        ("Prompt tokens of first attempts", _tokens(summary)),
        ("Hits that were predicted", _predictions(summary)),
    ):
        if table.rows:
            out.print(f"\n{title}", style="bold", soft_wrap=True)
            out.print(table)


def _table(*columns: str | Column) -> Sheet:
    return Sheet([each if isinstance(each, Column) else Column(each) for each in columns], heading_style="dim")


def _words(heading: str, folds_at: int = 48) -> Column:
    return Column(heading, "left", folds_at)


def _slowest(summary: Summary) -> Sheet:
    numbers = ("asked at", "took", "bytes", "a second", "chunks", "resent")
    table = _table(_words("request"), _words("rank"), _words("route"), *numbers)
    for seconds, _, line in sorted(summary.slowest, reverse=True):
        rate = f"{bytes_in_words(int(line.nbytes / seconds))}/s" if seconds else ""
        times = (seconds_in_words(line.began_s - summary.began_s), seconds_in_words(seconds))
        counts = (bytes_in_words(line.nbytes), rate, f"{line.writes:,}", f"{line.resent:,}")
        table.add(line.request, f"{line.engine} {line.rank}", route_of(line), *times, *counts)
    return table


def _failed(summary: Summary) -> Sheet:
    """Returns a row for each request and reason, with the rank whose transfer failed first."""
    table = _table(
        _words("request"), "transfers", _words("first"), "ended at", "after", _words("cause"), _words("reason", 80)
    )
    for (request, reason), (line, count) in reversed(summary.failed.items()):
        times = (seconds_in_words(line.time_s - summary.began_s), seconds_in_words(line.seconds))
        rank = f"{line.engine} {line.rank} {line.verb}"
        table.add(request, f"{count:,}", rank, *times, str(line.cause or "unknown"), reason)
    return table


def _ways(summary: Summary) -> Sheet:
    table, whole = _table(_words("way"), "seconds", "share"), sum(summary.ways_s.values()) or 1.0
    for way, seconds in sorted(summary.ways_s.items(), key=lambda each: -each[1]):
        table.add(way, f"{seconds:.3f}", f"{seconds / whole:.1%}")
    return table


def _parts(summary: Summary) -> Sheet:
    table = _table(_words("part"), "transfers", "share", "p50", "p90", "p99", "most")
    whole = sum(map(sum, summary.parts_s.values())) or 1.0
    for part, spent_s in summary.parts_s.items():
        if spent_s:
            times = (seconds_in_words(quantile(spent_s, share)) for share in (0.5, 0.9, 0.99, 1.0))
            table.add(str(part).replace("_", " "), f"{len(spent_s):,}", f"{sum(spent_s) / whole:.1%}", *times)
    return table


def _tokens(summary: Summary) -> Sheet:
    table = _table(_words("tenant"), _words("model"), "prompt", *_TIERS, "hit rate", "lost", _words("to"))
    for group, total in sorted(summary.tokens.items(), key=lambda each: (-each[1].prompt_tokens, str(each[0]))):
        hits = (f"{getattr(total, f'{tier}_tokens'):,}" for tier in _TIERS)
        lost = Counter(total.lost)
        to = ", ".join(f"{reason} {count:,}" for reason, count in lost.most_common() if count)
        counts = (f"{total.prompt_tokens:,}", *hits, f"{total.hit_rate:.1%}", f"{lost.total():,}")
        table.add(group.tenant, group.model, *counts, to)
    return table


def _predictions(summary: Summary) -> Sheet:
    table = _table(_words("by"), "requests", "predicted", "delivered", "foreseen", "missed", "unforeseen")
    total = Totals()
    for each in summary.tokens.values():
        total.merge(each)
    for by, sums in sorted(total.predictions.items()):
        foreseen, missed, unforeseen = sums.foreseen_tokens, sums.missed_tokens, sums.unforeseen_tokens
        counts = (sums.requests, foreseen + missed, foreseen + unforeseen, foreseen, missed, unforeseen)
        table.add(str(by), *(f"{count:,}" for count in counts))
    return table


def route_of(line: Moved) -> str:
    """Returns the route; `both` if the other side's ranks used several, `none` if there was no route."""
    routes = set(line.routes)
    return "both" if len(routes) > 1 else str(next(iter(routes), "none"))


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least `share` of the values do not exceed; 0 if empty.

    >>> quantile([3.0, 1.0, 2.0], 0.5), quantile([1.0, 2.0], 0.99)
    (2.0, 2.0)
    """
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else 0.0
