"""`kvmover replay` reads a trace and replays it once for each policy and capacity, under a progress bar.

It prints a table, draws hit rate by capacity, and writes the hits of each request.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvmover.cache.ledger import Credit
from kvmover.errors import KvmoverError
from kvmover.tools.replay.replay_config import ReplayConfig
from kvmover.tools.replay.replay_picture import draw, drawable
from kvmover.tools.replay.replay_report import Report, print_report, print_reports
from kvmover.tools.replay.simulator import Requests, replay
from kvmover.tools.replay.trace import TraceOptions, read_trace
from kvmover.tools.replay.trace_reader import ReplayRequest

POINTS = 10

#: A row of `--requests` for each request of each replay. A capacity without end is empty; times in seconds.
COLUMNS = (
    *("policy", "capacity_tokens", "request", "arrived_s", "prompt_tokens"),
    *("device_tokens", "host_tokens", "storage_tokens", "computed_tokens"),
)


def capacities(requests: Requests, page_tokens: int) -> list[int]:
    """Returns capacities (tokens, whole pages) from twice the longest prompt to the whole trace, by equal factors."""
    blocks, longest = dict[int, int](), 0
    for request in requests:
        longest = max(longest, request.input_length)
        for block, tokens in zip(request.hash_ids, request.lengths(), strict=True):
            blocks[block] = max(tokens, blocks.get(block, 0))
    least = 2 * longest
    most = max(sum(blocks.values()), 2 * least)
    sizes = [least * (most / least) ** (point / (POINTS - 1)) for point in range(POINTS)]
    return [max(1, round(size / page_tokens)) * page_tokens for size in sizes]


def sweep(requests: Requests, config: ReplayConfig, step: Callable[[int], object] = int) -> list[Report]:
    """Replay once for each capacity, all else as in `config`."""
    return [
        replay(requests, replace(config, device_tokens=tokens), step)
        for tokens in capacities(requests, config.page_tokens)
    ]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The trace, the caches to replay it against, and the forms of output.

    `plot`: a picture of hit rate by capacity; one cache is drawn among others of its kind. `requests`: a CSV file with
    a row for each request and cache.
    """

    trace: Path
    caches: tuple[ReplayConfig, ...]
    plot: Path | None = None
    requests: Path | None = None
    as_json: bool = False
    reading: TraceOptions = field(default_factory=TraceOptions)


class _RequestRows:
    """The rows of one replay in the file of `--requests`."""

    def __init__(self, write: Callable[[Sequence[object]], object], config: ReplayConfig) -> None:
        self._write, self._config, self._served = write, config, 0

    def served(self, request: ReplayRequest, credit: Credit) -> None:
        """Write a request's row."""
        config, length = self._config, request.input_length
        hits = credit.device_tokens, credit.host_tokens, credit.storage_tokens
        cache = config.policy.name, config.device_tokens
        self._write((*cache, self._served, request.arrived_s, length, *hits, length - credit.tokens))
        self._served += 1


@contextmanager
def _request_file(path: Path | None) -> Generator[Callable[[Sequence[object]], object]]:
    """Yield what writes a row, or does nothing without a path. Raises KvmoverError if the file cannot be written."""
    if path is None:
        yield len
        return
    try:
        file = path.open("w", newline="", encoding="utf-8")
    except OSError as error:
        raise KvmoverError(f"cannot write {path}: {error.strerror}") from error
    with file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        yield writer.writerow


def run_replay(options: ReplayOptions, out: Console) -> None:
    """Print the report on `out`, or a line of JSON a cache on stdout, and write the files that were requested."""
    if options.plot:
        drawable(options.plot)
    alone = len(options.caches) == 1
    requests = read_trace(options.trace, options.reading)
    runs = len(options.caches) + (POINTS if options.plot and alone else 0)
    with (
        _request_file(options.requests) as write,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=options.as_json,
            transient=True,
        ) as progress,
    ):
        task = progress.add_task("replaying", total=len(requests) * runs)

        def step(count: int) -> None:
            progress.advance(task, count)

        reports = [replay(requests, each, step, _RequestRows(write, each).served) for each in options.caches]
        if options.plot:
            draw(sweep(requests, options.caches[0], step) if alone else reports, reports[0], options.plot)
    if options.as_json:
        sys.stdout.writelines(json.dumps(report.as_data()) + "\n" for report in reports)
        return
    if back := requests.backward:
        out.print(f"{options.trace.name}: {back:,} times run backwards; requests were replayed in order of time")
    if alone:
        print_report(reports[0], out)
    else:
        print_reports(reports, out)
