"""`kvmover top` scrapes the metrics of running engines and shows transfers, hits, bandwidth, arenas and failures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvmover.errors import KvmoverError
from kvmover.observe.formats import bytes_in_words
from kvmover.tools.rank_rows import RankRow, engine_rows, holding, ordered, rank_rows, sum_row, window
from kvmover.tools.scrape import Change, FleetScrape, Scrape, ask, fetch, in_short
from kvmover.tools.tables import Column, Sheet
from kvmover.tools.top_keys import USUAL, Fold, Keyboard, TopState, pressed

#: Most ranks that are shown each by itself unless a viewer wants it, most reasons, by tokens lost, and most groups, by
#: prompt tokens.
MOST_RANKS, MOST_REASONS, MOST_GROUPS = 16, 5, 16

#: Fewest rows of ranks on a screen, and the lines of a frame around them: title, keys, headings, sums and notes.
_LEAST_ROWS, _FRAME_LINES = 3, 7

#: Most columns of a table that fits any screen.
_NARROW = 7

_HEADINGS = (
    *("open", "landed", "failed", "sent", "received", "receive p50"),
    *("p99", "arena out", "in", "quarantine", "peers"),
)

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


def screen(view: View, state: TopState = USUAL, height: int | None = None) -> RenderableType:
    """Returns the frame of a view. `height`: lines of a viewer's screen, which the ranks are cut to.

    None shows all rows, and no keys.
    """
    over = "since the start" if view.seconds is None else f"over the last {view.seconds:.1f} s"
    others = [
        each for each in (_hits(view), _groups(view), _predictions(view), _copies(view), _failures(view)) if each.rows
    ]
    room = None
    if height is not None:
        others, room = _fitting(others, height - _FRAME_LINES)
        for table in others:
            table.band = state.band
    below = [part for table in others for part in (table, Text())]
    parts: list[RenderableType] = [Text(f"kvmover top  {view.address}  {over}", "bold")]
    parts += [Text() if height is None else Text(state.line(), "dim")]
    parts += [_transfers(view, state, room), Text(), *below]
    return Group(*parts)


def _fitting(tables: Sequence[Sheet], lines: int) -> tuple[list[Sheet], int]:
    """Returns the tables that fit below the least rows of ranks, narrow ones first, and the lines left for ranks.

    A table takes a heading and an empty line, and below a wide one a note on its columns.
    """
    kept: list[Sheet] = []
    left = lines
    for table in sorted(tables, key=lambda each: len(each.columns) > _NARROW):
        taken = len(table.rows) + 2 + (len(table.columns) > _NARROW)
        if left - taken >= _LEAST_ROWS:
            kept.append(table)
            left -= taken
    return [table for table in tables if table in kept], max(_LEAST_ROWS, left)


def frame_as_data(view: View, found: FleetScrape) -> dict[str, object]:
    """Returns the JSON of `kvmover top --json`: every rank, engine and sum, since the processes began."""
    tokens = view.now.by("kvmover_prompt_tokens_total", "source", attempt="first")
    lost = view.now.by("kvmover_lost_tokens_total", "reason", attempt="first")
    copies = {word: int(view.now.total(f"kvmover_tier_{word}_bytes_total")) for word in _COPIES}
    ends = view.now.by("kvmover_transfers_total", "end")
    return {
        "endpoints": len(found.said),
        "silent": dict(found.silent),
        "all": asdict(sum_row(view.now, view.new)),
        "engines": [asdict(row) for row in engine_rows(view.now, view.new)],
        "ranks": [asdict(row) for row in rank_rows(view.now, view.new)],
        "prompt_tokens": {source: int(count) for source, count in tokens.items()},
        "lost_tokens": {reason: int(count) for reason, count in lost.items() if count},
        "copied_bytes": {word: count for word, count in copies.items() if count},
        "failed_transfers": {end: int(count) for end, count in ends.items() if count and end != "landed"},
        "faults": {name: int(count) for name in _FAULTS if (count := view.now.total(name))},
    }


def _table(*columns: str) -> Sheet:
    return Sheet([Column(columns[0], "left"), *map(Column, columns[1:])], heading_style="dim")


def _transfers(view: View, state: TopState, room: int | None) -> Sheet:
    """Returns a row of sums, and a row for each rank or engine, as many as `room` lines take; None for all."""
    table = _table("transfers", *_HEADINGS)
    table.band = None if room is None else state.band
    now, new = view.now, view.new
    ranks = len(now.values("kvmover_open_sends", "engine", "rank"))
    folded = state.fold == Fold.ENGINES or (state.fold == Fold.MANY and ranks > MOST_RANKS)
    rows = ordered(holding(engine_rows(now, new) if folded else rank_rows(now, new), state.text), state.sort)
    if ranks != 1:
        table.add(Text("all"), *_cells(view, sum_row(now, new)))
    shown, others = window(rows, state.first, len(rows) if room is None else room)
    for row in shown:
        table.add(Text(row.name), *_cells(view, row))
    if others:
        table.add(Text(f"and {others} more", "dim"))
    return table


def _cells(view: View, row: RankRow) -> Iterator[Text]:
    """Yields the cells below _HEADINGS."""
    yield Text(f"{row.open:,}")
    yield Text(_per_second(view.rate(row.landed), row.landed))
    yield Text(f"{row.failed:,}", "bold red" if row.failed else "")
    yield Text(_bandwidth(view, row.sent_bytes))
    yield Text(_bandwidth(view, row.received_bytes))
    for seconds in (row.receive_p50_s, row.receive_p99_s):
        yield Text(_seconds(seconds))
    for share in (row.arena_out, row.arena_in):
        yield Text(f"{share:.0%}", "yellow" if share > 0.9 else "")
    held = row.quarantined_bytes
    yield Text(bytes_in_words(held) if held else "-", "yellow" if held else "")
    yield Text(f"{row.peers:,}")


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


def watch(
    addresses: Sequence[str],
    interval_s: float,
    out: Console,
    state: TopState = USUAL,
    get: Callable[[str], str] = fetch,
    clock: Callable[[], float] = time.monotonic,
    key: Callable[[float], str | None] | None = None,
) -> None:
    """Show frames every `interval_s` seconds, and after each key, until `q` or an interrupt.

    A frame has the errors of lost endpoints, whose last samples still count: total rates do not jump. `key(within_s)`
    returns a key or None. Raises KvmoverError if no endpoint answers at first.
    """
    name = in_short(addresses)
    before, found = None, _some(ask(addresses, get, clock))
    with Keyboard() as keyboard, Live(console=out, auto_refresh=False) as live:
        key = key or keyboard.key
        due_s = time.monotonic() + interval_s
        while not state.is_over:
            live.update(_frame(View.of(name, before, _whole(found)), found, state, out.size.height), refresh=True)
            told = key(max(0.0, due_s - time.monotonic()))
            if told is not None:
                state = pressed(state, told)
                continue
            due_s = time.monotonic() + interval_s
            last, new = found, ask(addresses, get, clock)
            found = FleetScrape({**last.said, **new.said}, new.silent)
            before = last.whole() if new.said else None


def show(addresses: Sequence[str], out: Console, state: TopState = USUAL, get: Callable[[str], str] = fetch) -> None:
    """Print one frame, of sums since the processes began. Raises KvmoverError if no endpoint answers."""
    found = _some(ask(addresses, get, lambda: 0.0))
    out.print(_frame(View.of(in_short(addresses), None, _whole(found)), found, state, None))


def show_json(addresses: Sequence[str], get: Callable[[str], str] = fetch) -> None:
    """Print one frame as JSON. Raises KvmoverError if no endpoint answers."""
    found = _some(ask(addresses, get, lambda: 0.0))
    view = View.of(in_short(addresses), None, _whole(found))
    sys.stdout.write(json.dumps(frame_as_data(view, found)) + "\n")


def _some(found: FleetScrape) -> FleetScrape:
    if not found.said:
        raise KvmoverError("; ".join(found.errors()))
    return found


def _whole(found: FleetScrape) -> Scrape:
    whole = found.whole()
    assert whole is not None, "some endpoint has answered"
    return whole


def _frame(view: View, found: FleetScrape, state: TopState, height: int | None) -> RenderableType:
    errors = [Text(f"kvmover top: {each}", "bold red") for each in found.errors()]
    return Group(screen(view, state, None if height is None else height - len(errors)), *errors)
