"""`kvmover replay` reads a trace, replays it under a progress bar, prints a table, and draws hit rate by capacity."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvmover.errors import KvmoverError, need
from kvmover.tools.replay.replay_config import ReplayConfig
from kvmover.tools.replay.replay_report import Report, print_report
from kvmover.tools.replay.simulator import Requests, replay
from kvmover.tools.replay.trace import TraceOptions, read_trace

POINTS = 10


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


def drawable(path: Path) -> None:
    """Raise KvmoverError if a picture cannot be drawn there: checked before a minute of replays."""
    need("matplotlib", "--plot", "plot")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.filetypes)
    if path.suffix.removeprefix(".") not in formats:
        raise KvmoverError(f"cannot draw {path}: its suffix is none of {', '.join(formats)}")
    if not path.parent.is_dir():
        raise KvmoverError(f"cannot draw {path}: there is no folder {path.parent}")


def draw(reports: Sequence[Report], chosen: Report, path: Path) -> None:
    """Write the picture, in the format of the suffix, with `chosen` marked.

    Raises KvmoverError if it cannot be written.
    """
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = figure.add_subplot()
    millions = [(each.config.device_tokens or 0) / 1e6 for each in reports]
    axes.axhline(chosen.ideal_hit_rate, color="grey", linestyle="--", label="never forgets")
    bottom = [0.0] * len(reports)
    for name, color in (("device", "#4472a8"), ("host", "#7fa650"), ("storage", "#c08a3e")):
        top = [
            low + getattr(each.totals, f"{name}_tokens") / each.totals.prompt_tokens
            for low, each in zip(bottom, reports, strict=True)
        ]
        if top != bottom:
            axes.fill_between(millions, bottom, top, color=color, alpha=0.35, linewidth=0)
            axes.plot(millions, top, color=color, marker="o", markersize=3, label=f"hits up to the {name}")
        bottom = top
    if chosen.config.device_tokens is not None:
        axes.plot(
            [chosen.config.device_tokens / 1e6], [chosen.totals.hit_rate], "k*", markersize=10, label="this replay"
        )
    axes.set(
        xscale="log",
        xlabel="device capacity, million tokens",
        ylabel="hit rate",
        ylim=(0, None),
        title=f"{chosen.requests:,} requests, pages of {chosen.config.page_tokens}, policy {chosen.config.policy.name}",
    )
    axes.legend(frameon=False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise KvmoverError(f"cannot write {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The trace, the cache to replay it against, and the form of output."""

    trace: Path
    config: ReplayConfig
    plot: Path | None = None
    as_json: bool = False
    reading: TraceOptions = field(default_factory=TraceOptions)


def run_replay(options: ReplayOptions, out: Console) -> None:
    """Print the report on `out`, or as JSON on stdout, and draw the picture if requested."""
    if options.plot:
        drawable(options.plot)
    requests = read_trace(options.trace, options.reading)
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

        report = replay(requests, options.config, step)
        if options.plot:
            draw(sweep(requests, options.config, step), report, options.plot)
    if options.as_json:
        sys.stdout.write(json.dumps(report.as_data()) + "\n")
    else:
        if back := requests.backward:
            out.print(f"{options.trace.name}: {back:,} times run backwards; requests were replayed in order of time")
        print_report(report, out)
