"""The command `kvmover replay`: read, replay under a progress bar, print, draw."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvmover.cache.replay.plot import POINTS, draw, drawable, sweep
from kvmover.cache.replay.report import print_report
from kvmover.cache.replay.run import replay
from kvmover.cache.replay.setup import Setup
from kvmover.cache.replay.trace import read_trace


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to replay against what, and how to answer."""

    trace: Path
    setup: Setup
    plot: Path | None = None
    as_json: bool = False


def run_replay(options: ReplayOptions, out: Console) -> None:
    """Print the report on `out`, or as JSON on stdout, and draw the picture if one was asked for."""
    if options.plot:
        drawable(options.plot)
    requests = read_trace(options.trace)
    runs = POINTS + 1 if options.plot else 1
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=options.as_json,
        transient=True,
    ) as progress:
        task = progress.add_task("replaying", total=len(requests) * runs)

        def step(count: int) -> None:
            progress.advance(task, count)

        report = replay(requests, options.setup, step)
        if options.plot:
            draw(sweep(requests, options.setup, step), report, options.plot)
    if options.as_json:
        sys.stdout.write(json.dumps(report.as_data()) + "\n")
    else:
        print_report(report, out)
