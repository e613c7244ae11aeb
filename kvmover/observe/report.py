"""The report of a run is one HTML page that needs nothing else: no script, no network, no file beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from kvmover import __version__
from kvmover.errors import KvmoverError
from kvmover.observe import charts
from kvmover.observe.charts import STYLE, Axis, Bar, Ground, Series
from kvmover.observe.formats import bytes_in_words
from kvmover.observe.report_sums import (
    TIERS,
    Bins,
    bins_of,
    bytes_by_bin,
    failures_of,
    lanes_of,
    last_failed,
    predictions_of,
    quantile,
    route_of,
    routes_by_run,
    seconds_by_bin,
    seconds_by_way,
    slowest,
    times_by_part,
    tokens_by_bin,
    tokens_by_group,
    tokens_of,
)
from kvmover.observe.runlog import Lines, Moved, read_lines

#: Nothing is fetched and no script runs, whatever a request is named.
POLICY = """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""

#: Requests that are named one by one.
_MOST_NAMED = 20

_VERBS = {"send": "sent", "receive": "received"}
_ROUTES = ("direct", "packed", "mapped", "both")


def write_report(logs: Iterable[Path], html: Path) -> Lines:
    """Read run logs, of as many ranks as there are, and write the page. Raises KvmoverError for a log with no event."""
    lines = read_lines(logs)
    text = page(lines)
    try:
        html.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise KvmoverError(f"cannot write {html}: {error.strerror}") from error
    return lines


def page(lines: Lines) -> str:
    """The document. Whatever a request is named, it is text in it."""
    bins = bins_of(lines)
    if bins is None:
        raise KvmoverError("no transfer and no request ended in this run: there is nothing to report")
    began = datetime.fromtimestamp(bins.first_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    title = f"kvmover run of {began}"
    ranks = {(run.engine, run.rank) for run in lines.runs}
    logged = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} logged"
    about = f"{_seconds(bins.last_s - bins.first_s)}, {logged}, kvmover {__version__}"
    if lines.cut:
        about += f"; {lines.cut} unfinished lines left out"
    body = [*_tiles(lines), *_hits(lines, bins), *_losses(lines), *_groups(lines), *_predictions(lines)]
    body += [*_bandwidth(lines, bins), *_latency(lines, bins), *_slowest(lines, bins), *_ways(lines), *_parts(lines)]
    body += [*_timeline(lines, bins), *_routes(lines), *_failures(lines, bins)]
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width">',
            POLICY,
            f"<style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1><p>{escape(about)}</p>",
            *body,
            "</body></html>",
            "",
        ]
    )


def _tiles(lines: Lines) -> Iterator[str]:
    total = tokens_of(lines.accounts)
    landed = [line for line in lines.transfers if line.landed]
    received = [line for line in landed if line.verb == "receive"]
    seconds = [line.seconds for line in received]
    tiles = [
        (f"{total.prompt:,}", "prompt tokens"),
        (f"{total.hit_rate:.1%}", "of them hits"),
        (f"{len(landed):,}", "transfers landed"),
        (f"{len(lines.transfers) - len(landed):,}", "transfers failed"),
        (bytes_in_words(sum(line.nbytes for line in received)), "received"),
        (f"{_seconds(quantile(seconds, 0.5))}, {_seconds(quantile(seconds, 0.99))}", "to receive: p50, p99"),
    ]
    yield '<div class="tiles">'
    yield from (f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in tiles)
    yield "</div>"


def _hits(lines: Lines, bins: Bins) -> Iterator[str]:
    """Shares of prompt tokens."""
    by_bin = tokens_by_bin(lines.accounts, bins)
    series = [Series(tier, tier, [t.hits[tier] / (t.prompt or 1) for t in by_bin]) for tier in TIERS]
    could = [(t.hits.total() + t.lost.total()) / (t.prompt or 1) for t in by_bin]
    header = ["from", "prompt tokens", *TIERS, "lost", "hit rate"]
    rows = [
        [at, t.prompt, *(t.hits[tier] for tier in TIERS), t.lost.total(), f"{t.hit_rate:.1%}"]
        for at, t in zip(_labels(bins), by_bin, strict=True)
        if t.prompt
    ]
    hints = [
        f"{at}: {t.prompt:,} prompt tokens, {t.hit_rate:.1%} hits, {share:.1%} could have been"
        for at, t, share in zip(_labels(bins), by_bin, could, strict=True)
    ]
    ground = Ground(_labels(bins), hints, Axis(1.0, 0.25, lambda share: f"{share:.0%}"))
    title = "Hit rate by tier"
    yield from _figure(
        title,
        "Share of the prompt tokens of first attempts, by when they ended. A dash: what could have been reused.",
        charts.columns(title, ground, series, could) if rows else None,
        [(tier, tier) for tier in TIERS],
        (header, rows),
    )


def _losses(lines: Lines) -> Iterator[str]:
    total = tokens_of(lines.accounts)
    lost = [(str(reason), count) for reason, count in total.lost.most_common() if count]
    rows = [(reason, count, f"{count:,} ({count / (total.prompt or 1):.1%} of the prompts)") for reason, count in lost]
    title = "Where lost hits went"
    yield from _figure(
        title,
        "Tokens that could have been reused and were computed again, by the reason that the ledger gives.",
        charts.bars(title, rows, "lost") if rows else None,
        [],
        (["reason", "tokens"], [list(row) for row in lost]),
    )


def _groups(lines: Lines) -> Iterator[str]:
    groups = tokens_by_group(lines.accounts)
    if not groups:
        return
    yield "<section><h2>Tenants and models</h2><p>Prompt tokens of first attempts, those with the most first.</p>"
    yield from _table(
        ["tenant", "model", "prompt tokens", *TIERS, "hit rate", "lost", "to"],
        [
            [
                group.tenant,
                group.model,
                tokens.prompt,
                *(tokens.hits[tier] for tier in TIERS),
                f"{tokens.hit_rate:.1%}",
                tokens.lost.total(),
                ", ".join(f"{reason} {count:,}" for reason, count in tokens.lost.most_common() if count),
            ]
            for group, tokens in groups.items()
        ],
    )
    yield "</section>"


def _predictions(lines: Lines) -> Iterator[str]:
    found = predictions_of(lines.accounts)
    if not found:
        return
    yield "<section><h2>Predicted and delivered hits</h2><p>Tokens of requests of which somebody said, before they were"
    yield "looked up, how much of them is cached. Missed: predicted, and no hits. Unforeseen: hits beyond that.</p>"
    yield from _table(
        ["by", "requests", "predicted", "delivered", "foreseen", "missed", "unforeseen"],
        [
            [
                str(by),
                sums.requests,
                sums.foreseen_tokens + sums.missed_tokens,
                sums.foreseen_tokens + sums.unforeseen_tokens,
                sums.foreseen_tokens,
                sums.missed_tokens,
                sums.unforeseen_tokens,
            ]
            for by, sums in found.items()
        ],
    )
    yield "</section>"


def _bandwidth(lines: Lines, bins: Bins) -> Iterator[str]:
    series = [
        Series(word, verb, [nbytes / bins.width_s for nbytes in bytes_by_bin(lines.transfers, verb, bins)])
        for verb, word in _VERBS.items()
    ]
    most = max(max(each.values) for each in series)
    rows = [
        [at, *(_rate(each.values[i]) for each in series)]
        for i, at in enumerate(_labels(bins))
        if any(each.values[i] for each in series)
    ]
    hints = [
        f"{at}: " + ", ".join(f"{_rate(s.values[i])} {s.name}" for s in series) for i, at in enumerate(_labels(bins))
    ]
    title = "Bandwidth"
    yield from _figure(
        title,
        "Bytes a second of transfers that landed, over all logged ranks, each spread over the time that it took.",
        charts.lines(title, Ground(_labels(bins), hints, Axis.of(most, _rate)), series) if most else None,
        [(word, verb) for verb, word in _VERBS.items()],
        (["from", *_VERBS.values()], rows),
    )


def _latency(lines: Lines, bins: Bins) -> Iterator[str]:
    by_bin = seconds_by_bin(lines.transfers, bins)
    series = [
        Series(name, name, [quantile(seconds, share) for seconds in by_bin])
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]
    most = max(series[1].values)
    rows = [
        [at, len(seconds), *(_seconds(each.values[i]) for each in series)]
        for i, (at, seconds) in enumerate(zip(_labels(bins), by_bin, strict=True))
        if seconds
    ]
    hints = [
        f"{at}: {len(seconds):,} landed, p50 {_seconds(series[0].values[i])}, p99 {_seconds(series[1].values[i])}"
        for i, (at, seconds) in enumerate(zip(_labels(bins), by_bin, strict=True))
    ]
    title = "Latency"
    yield from _figure(
        title,
        "From asking until landed, of what was received in each part of the run; 0 where nothing was.",
        charts.lines(title, Ground(_labels(bins), hints, Axis.of(most, _seconds)), series) if most else None,
        [(each.name, each.paint) for each in series],
        (["from", "landed", "p50", "p99"], rows),
    )


def _slowest(lines: Lines, bins: Bins) -> Iterator[str]:
    found = slowest(lines.transfers, _MOST_NAMED)
    if not found:
        return
    yield "<section><h2>Slowest requests</h2><p>Of those that were received.</p>"
    yield from _table(
        ["request", "rank", "asked at", "took", "bytes", "a second", "route", "descriptors", "resent chunks"],
        [
            [
                line.request,
                f"{line.engine} {line.rank}",
                _seconds(line.began_s - bins.first_s),
                _seconds(line.seconds),
                bytes_in_words(line.nbytes),
                _rate(line.nbytes / line.seconds) if line.seconds else "",
                route_of(line),
                line.writes,
                line.resent,
            ]
            for line in found
        ],
    )
    yield "</section>"


def _ways(lines: Lines) -> Iterator[str]:
    found = seconds_by_way(lines.transfers)
    whole = sum(seconds for _, seconds in found) or 1.0
    rows = [(way, seconds, f"{_seconds(seconds)} ({seconds / whole:.1%})") for way, seconds in found]
    title = "Where the time went"
    yield from _figure(
        title,
        "Seconds of all that were received together, by route, and by cause of those that failed.",
        charts.bars(title, rows, "receive") if rows else None,
        [],
        (["way", "seconds"], [[way, f"{seconds:.3f}"] for way, seconds in found]),
    )


def _parts(lines: Lines) -> Iterator[str]:
    found = times_by_part(lines.transfers)
    if not found:
        return
    whole = sum(sum(each.seconds) for each in found) or 1.0
    yield "<section><h2>Parts of the way</h2><p>Seconds that the chunks of a request spent in each part, on all logged"
    yield "ranks of both sides. Chunks overlap, so that parts may add up to more than the request took.</p>"
    yield from _table(
        ["part", "requests", "share", "p50", "p90", "p99", "most"],
        [
            [
                str(each.part).replace("_", " "),
                len(each.seconds),
                f"{sum(each.seconds) / whole:.1%}",
                *(_seconds(quantile(each.seconds, share)) for share in (0.5, 0.9, 0.99, 1.0)),
            ]
            for each in found
        ],
    )
    yield "</section>"


def _timeline(lines: Lines, bins: Bins) -> Iterator[str]:
    lanes, left_out = lanes_of(lines.transfers)
    whole_s = bins.last_s - bins.first_s

    def bar(line: Moved) -> Bar:
        words = f"{line.request}: {bytes_in_words(line.nbytes)} in {_seconds(line.seconds)}, {route_of(line)}"
        start, stop = ((at - bins.first_s) / whole_s for at in (line.began_s, line.time_s))
        if line.landed:
            return Bar(start, stop, route_of(line), words)
        return Bar(start, stop, "failed", f"{words}; failed, {line.cause}: {line.reason}")

    labels = [_seconds(whole_s * quarter / 4) for quarter in range(5)]
    drawn = [(lane.name, [bar(line) for line in lane.bars]) for lane in lanes]
    said = "Each transfer of each rank, from its call to its end."
    if left_out:
        said += f" The {left_out:,} shortest of those that landed are left out."
    title = "Transfers"
    yield from _figure(
        title,
        said,
        charts.timeline(title, drawn, labels) if drawn else None,
        [*((route, route) for route in _ROUTES), ("nothing to move", "none"), ("failed", "failed")],
        None,
    )


def _routes(lines: Lines) -> Iterator[str]:
    found = routes_by_run(lines.transfers)
    labels = [bytes_in_words(1 << power) for power in found]
    series = [Series(route, route, [found[power][route] for power in found]) for route in _ROUTES]
    most = max((counts.total() for counts in found.values()), default=0)
    hints = [
        f"runs of {label} and more: " + ", ".join(f"{counts[r]:,} {r}" for r in _ROUTES if counts[r])
        for label, counts in zip(labels, found.values(), strict=True)
    ]
    rows = [
        [label, *(counts[route] for route in _ROUTES)] for label, counts in zip(labels, found.values(), strict=True)
    ]
    title = "Route choices"
    yield from _figure(
        title,
        "Transfers received by route, by how long their contiguous runs are on average. Long runs go directly, short"
        " ones packed, where the costs were measured well.",
        charts.columns(title, Ground(labels, hints, Axis.of(most, "{:,g}".format)), series) if found else None,
        [(route, route) for route in _ROUTES],
        (["runs from", *_ROUTES], rows),
    )


def _failures(lines: Lines, bins: Bins) -> Iterator[str]:
    failures = failures_of(lines.transfers)
    if not failures:
        return
    yield "<section><h2>Failures</h2>"
    yield from _table(["cause", "transfers", "the last reason"], [[f.cause, f.count, f.reason] for f in failures])
    yield "</section>"
    latest = last_failed(lines.transfers, _MOST_NAMED)
    yield f"<section><h2>Failed requests</h2><p>The last {len(latest)}, the latest first.</p>"
    yield from _table(
        ["request", "rank", "verb", "ended at", "after", "cause", "reason"],
        [
            [
                line.request,
                f"{line.engine} {line.rank}",
                line.verb,
                _seconds(line.time_s - bins.first_s),
                _seconds(line.seconds),
                str(line.cause or "unknown"),
                line.reason or "",
            ]
            for line in latest
        ],
    )
    yield "</section>"


def _figure(
    title: str,
    caption: str,
    picture: str | None,
    legend: Sequence[tuple[str, str]],
    table: tuple[Sequence[str], Sequence[Sequence[object]]] | None,
) -> Iterator[str]:
    """A section with a chart, or a word that there is nothing to show, and its numbers to unfold."""
    yield f"<section><h2>{escape(title)}</h2><p>{escape(caption)}</p>"
    if picture is None:
        yield '<p class="empty">Nothing of this was logged.</p></section>'
        return
    if legend:
        keys = (f'<span><i class="{paint}"></i>{escape(name)}</span>' for name, paint in legend)
        yield f'<p class="legend">{"".join(keys)}</p>'
    yield picture
    if table:
        yield "<details><summary>numbers</summary>"
        yield from _table(*table)
        yield "</details>"
    yield "</section>"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"<table><tr>{''.join(f'<th>{escape(each)}</th>' for each in header)}</tr>"
    for row in rows:
        cells = (f"{each:,}" if isinstance(each, int) else str(each) for each in row)
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    yield "</table>"


def _labels(bins: Bins) -> list[str]:
    return [_seconds(index * bins.width_s) for index in range(bins.count)]


def _seconds(seconds: float) -> str:
    """
    >>> [_seconds(each) for each in (0, 0.0042, 0.25, 12, 90, 5400, 200000)]
    ['0 s', '4.2 ms', '250 ms', '12 s', '1.5 min', '1.5 h', '55.6 h']
    """
    if 0 < seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _rate(bytes_per_s: float) -> str:
    """Decimal, as links are named: 25e9 is `25 GB/s`."""
    return f"{_size(bytes_per_s)}/s"


def _size(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.3g} B"
