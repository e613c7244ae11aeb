"""`kvmover advise` replays a trace for each candidate, and prints the cost of KV in each, and the cheapest good one.

Replays depend only on the number of prefill engines, their page size and their tiers, so equal ones run once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvmover.layout import Component
from kvmover.observe.formats import bytes_in_words
from kvmover.plan.fleet_text import FleetText
from kvmover.tools.advise.candidate import (
    Advice,
    AdviseError,
    Candidate,
    TierRates,
    advice,
    cheapest,
    with_pages,
)
from kvmover.tools.advise.prefill_replay import Prefills, prefills
from kvmover.tools.advise.transfer_table import LinkCosts, TransferTable, transfer_table
from kvmover.tools.replay import ReplayConfig, Requests, TraceOptions, read_trace
from kvmover.tools.tables import Column, Sheet

_FORMAT = "kvmover.cost-table/1"

#: Most candidates compared. Each takes some milliseconds, and each replay some seconds.
_MOST = 10_000

#: A fleet as written, and as parsed.
Named: TypeAlias = tuple[str, FleetText]
Tables: TypeAlias = dict[tuple[FleetText, FleetText], TransferTable]


@dataclass(frozen=True, slots=True)
class AdviseOptions:
    """The trace, the candidates (all products), the costs of their links and tiers, and the form of output.

    `target_us`: most that KV may add to the time to first token of 99 in 100 requests. `cost_table`: file for the
    transfer times, as JSON.
    """

    trace: Path
    components: tuple[Component, ...]
    src: tuple[Named, ...]
    dst: tuple[Named, ...]
    ratios: tuple[tuple[int, int], ...]
    caches: tuple[ReplayConfig, ...]
    link: LinkCosts
    rates: TierRates = field(default_factory=TierRates)
    target_us: float | None = None
    cost_table: Path | None = None
    as_json: bool = False
    reading: TraceOptions = field(default_factory=TraceOptions)

    def candidates(self) -> list[Candidate]:
        """Returns every candidate, in the order of the options. Raises AdviseError above 10,000."""
        count = len(self.ratios) * len(self.src) * len(self.dst) * len(self.caches)
        if count > _MOST:
            raise AdviseError(f"{count:,} candidates; at most {_MOST:,} are compared at a time")
        return [
            Candidate(ratio[0], ratio[1], src, dst, with_pages(cache, src))
            for ratio, (_, src), (_, dst), cache in product(self.ratios, self.src, self.dst, self.caches)
        ]


def run_advise(options: AdviseOptions, out: Console) -> None:
    """Print a row for each candidate on `out`, or JSON on stdout, and write the cost table if requested.

    Raises AdviseError if the cost table cannot be written, ReplayTraceError for a bad trace.
    """
    candidates = options.candidates()
    requests = read_trace(options.trace, options.reading)
    longest = max(request.input_length for request in requests)
    tables = {
        (src, dst): transfer_table(options.components, src, dst, options.link, longest)
        for (_, src), (_, dst) in product(options.src, options.dst)
    }
    if options.cost_table:
        _write_costs(options, tables)
    done = _replays(candidates, requests, options.as_json)
    found = [
        advice(each, done[each.prefills, each.cache], tables[each.src, each.dst], options.components, options.rates)
        for each in candidates
    ]
    best = None if options.target_us is None else cheapest(found, options.target_us)
    if options.as_json:
        rows = [_as_data(options, each) for each in found]
        chosen = None if best is None else found.index(best)
        sys.stdout.write(json.dumps({"requests": len(requests), "candidates": rows, "cheapest": chosen}) + "\n")
        return
    _print(options, found, best, out)


def _replays(
    candidates: Sequence[Candidate], requests: Requests, quiet: bool
) -> dict[tuple[int, ReplayConfig], Prefills]:
    """Run each replay that some candidate needs, once."""
    wanted = dict.fromkeys((each.prefills, each.cache) for each in candidates)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=quiet,
        transient=True,
    ) as progress:
        task = progress.add_task("replaying", total=len(requests) * len(wanted))
        return {
            (engines, cache): prefills(requests, cache, engines, lambda count: progress.advance(task, count))
            for engines, cache in wanted
        }


def _names(options: AdviseOptions, candidate: Candidate) -> tuple[str, str]:
    """Returns both fleets as written."""
    src = next(name for name, fleet in options.src if fleet == candidate.src)
    return src, next(name for name, fleet in options.dst if fleet == candidate.dst)


def _as_data(options: AdviseOptions, found: Advice) -> dict[str, Any]:
    candidate = found.candidate
    src, dst = _names(options, candidate)
    times = {name: getattr(found, name) for name in ("load", "wait", "transfer", "share")}
    return {
        "prefills": candidate.prefills,
        "decodes": candidate.decodes,
        "src": src,
        "dst": dst,
        "ranks": candidate.ranks,
        **candidate.cache.as_data(),
        "hit_rate": round(found.hit_rate, 6),
        "bytes_a_request": round(found.nbytes),
        **{f"{name}_{q}_us": round(getattr(t, f"{q}_us"), 1) for name, t in times.items() for q in ("p50", "p99")},
    }


def _print(options: AdviseOptions, found: Sequence[Advice], best: Advice | None, out: Console) -> None:
    keys = ("P:D", "prefill", "decode", "device", "host", "storage")
    times = [f"{name} {q}" for name in ("load", "wait", "transfer", "share") for q in ("p50", "p99")]
    numbers = ("ranks", "hit rate", "KV a request", *times)
    sheet = Sheet([Column(each, "left") for each in keys] + [Column(each) for each in numbers], keys=len(keys))
    for each in found:
        cache = each.candidate.cache
        sizes = (cache.device_tokens, cache.host_tokens, cache.storage_tokens)
        sheet.add(
            f"{each.candidate.prefills}:{each.candidate.decodes}",
            *_names(options, each.candidate),
            *("any" if tokens is None else f"{tokens:,}" for tokens in sizes),
            str(each.candidate.ranks),
            f"{each.hit_rate:.3f}",
            bytes_in_words(round(each.nbytes)),
            *(
                f"{us / 1e3:,.2f} ms"
                for times in (each.load, each.wait, each.transfer, each.share)
                for us in (times.p50_us, times.p99_us)
            ),
        )
    out.print(sheet)
    out.print(
        f"share: what KV adds to the time to first token of a request: load from host and storage + wait for a wire +"
        f" transfer{_computing(options.rates)}; of half of the requests at most p50, of 99 in 100 at most p99",
        soft_wrap=True,
    )
    if options.target_us is None:
        return
    if best is None:
        fastest = min(found, key=lambda each: each.share.p99_us)
        least = f"{fastest.share.p99_us / 1e3:,.2f} ms"
        out.print(f"no share p99 is below {options.target_us / 1e3:g} ms; the least of all is {least}")
        return
    src, dst = _names(options, best.candidate)
    ratio = f"{best.candidate.prefills} of {src} and {best.candidate.decodes} of {dst}"
    out.print(
        f"the cheapest whose share p99 is below {options.target_us / 1e3:g} ms: {ratio}, {best.candidate.ranks} ranks"
    )


def _computing(rates: TierRates) -> str:
    return f" + computing at {rates.compute_rate * 1e6:,.0f} tokens/s" if rates.compute_rate else ""


def _costs(
    options: AdviseOptions, tables: dict[tuple[FleetText, FleetText], TransferTable]
) -> Iterator[dict[str, Any]]:
    names = product(options.src, options.dst)
    for (src, source), (dst, target) in names:
        table = tables[source, target]
        rate, latency_us = table.line()
        yield {
            "src": src,
            "dst": dst,
            "gb_per_s": round(rate / 1e3, 4),
            "latency_ms": round(latency_us / 1e3, 6),
            "bytes_per_token": round(table.points[-1].nbytes / table.points[-1].tokens),
            "points": [{**point._asdict(), "route": point.route.value} for point in table.points],
        }


def _write_costs(options: AdviseOptions, tables: Tables) -> None:
    """Write points to interpolate, and a fitted line for simulators that know a bandwidth and a latency."""
    assert options.cost_table is not None
    text = json.dumps({"format": _FORMAT, "tables": list(_costs(options, tables))}, indent=1)
    try:
        options.cost_table.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise AdviseError(f"cannot write {options.cost_table}: {error.strerror}") from error
