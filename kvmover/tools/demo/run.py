"""The demo's prefill fleets make KV by real forward passes, kvmover moves it, decode fleets continue from it.

A scenario runs on its fleets against the model in one process. `ScenarioRun`: two fleets that live together. `Lives`:
fleets one after another. `English`: a trained model answers questions. `Rolling`: fleets replaced while others serve.
`Migrations`: fleets whose answers move while they are computed. `Lenders`: fleets that lend each other pages.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvmover.config import ConfigError, load
from kvmover.config.settings import Level, LoggingSettings, Settings
from kvmover.errors import KvmoverError, need
from kvmover.exposition import FIRST_METRICS_PORT
from kvmover.observe.runlog import LineReader, read_lines
from kvmover.plan.cost import HOST
from kvmover.store import store_location
from kvmover.tools import top
from kvmover.tools.demo.crew import Crew, ask_all
from kvmover.tools.demo.demo_engine import POOL_TOKENS, Asked, pair, serve
from kvmover.tools.demo.demo_report import RequestReport, RunReport, ScenarioReport, show
from kvmover.tools.demo.english import MOVES, QUESTIONS, English, Questions, shown
from kvmover.tools.demo.lenders import Lenders
from kvmover.tools.demo.lives import LIFE_POOL_TOKENS, Lives
from kvmover.tools.demo.migrations import Migrations
from kvmover.tools.demo.model import Transformer
from kvmover.tools.demo.perplexity import Perplexity
from kvmover.tools.demo.requests import Chats, Traced, TraceError, TraceScale
from kvmover.tools.demo.rolling import Rolling
from kvmover.tools.demo.scenarios import Scenario, choose
from kvmover.tools.report.run_trace import check_name, write_trace
from kvmover.tools.scrape import endpoints, fetch
from kvmover.tools.tables import console
from kvmover.transfer.config import Exports, MoverConfig
from kvmover.transport import nixl_version


class ScenarioRun:
    """A scenario on its two fleets, with the one-process model that gives the expected answers."""

    def __init__(self, scenario: Scenario, crew: Crew, folder: Path, options: DemoOptions) -> None:
        self.scenario = scenario
        self.src, self.dst = pair(scenario, crew.members, folder, options.settings, device=options.device)
        self.alone = Transformer.alone(scenario.model)

    def close(self) -> None:
        """End both fleets; their processes can be seated again."""
        ask_all([*self.src.members, *self.dst.members], "close")

    def serve(self, number: int, prompt: tuple[int, ...], answer_tokens: int) -> RequestReport:
        """Prefill, move the tokens that the decode fleet lacks, decode, compare."""
        name = f"{self.scenario.name}-{number}"
        return serve(self.scenario, self.src, self.dst, self.alone, Asked(name, prompt, answer_tokens))


#: The server of a scenario's requests.
Stage = ScenarioRun | Lives | Lenders | Rolling | Migrations | English

#: Defaults for processes of one machine that move a few MB.
MOVER = MoverConfig(costs=HOST, arena_bytes=8 << 20, exports=Exports.POOLS)

#: The demo kills ranks, whose peers would warn.
QUIET = LoggingSettings(Level.ERROR)

#: Seconds between two frames.
_FRAME_S = 1.0

#: Default scale of a trace's lengths.
SCALE = 0.02


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The demo's options: all scenarios unless named; the requests of a trace, its lengths times `scale`, if given.

    `report`: a trace to write at the end, as run.json, with the run log beside it, as run.jsonl. `watch`: show
    `kvmover top` of the demo's own ranks. `device`: place of the pools. `store`: location below which page stores are
    made, and cleared at the end; None: a temporary folder. `settings`: omitted ones are those of `MOVER` and `QUIET`.
    """

    scenarios: tuple[str, ...] = ()
    requests: int | None = None
    seed: int = 0
    trace: Path | None = None
    scale: float | None = None
    as_json: bool = False
    report: Path | None = None
    watch: bool = False
    device: str = "cpu"
    store: str | None = None
    settings: Settings = field(default_factory=lambda: Settings(mover=MOVER, logging=QUIET))

    @property
    def requests_each(self) -> int:
        """Returns the requests of a scenario; by default five turns of one conversation."""
        return self.requests or 5

    @property
    def chosen(self) -> list[Scenario]:
        """Returns the scenarios to play: with a trace and no names, those that have no questions of their own."""
        return [each for each in choose(self.scenarios) if self.scenarios or not (self.trace and each.speaks)]


def run_demo(options: DemoOptions) -> int:
    """Run, show, and return the exit status: 0 only if every byte is right, and every token up to a near tie.

    Reads the configuration. Ctrl-C and SIGTERM end it at once, with all of its processes and files.
    """
    options = replace(options, settings=load(defaults=options.settings).settings)
    configured = options.settings.record.run_log
    log = _log_beside(options.report) if options.report and configured is None else configured
    notes = Console(stderr=True, highlight=False, markup=False)
    with ExitStack() as until_done, _ended_by_a_signal():
        options = _watched(options)
        if options.report and log != configured:
            folder = until_done.enter_context(tempfile.TemporaryDirectory(prefix="kvmover-demo-"))
            record = replace(options.settings.record, run_log=Path(folder) / "run.jsonl")
            options = replace(options, settings=replace(options.settings, record=record))
        report = _run_in_view(options, notes)
        if log and log != configured:
            shutil.move(str(options.settings.record.run_log), log)
        if log and options.report:
            write_trace(LineReader([log]), options.report)
    if options.as_json:
        typer.echo(json.dumps(report.as_data()))
    else:
        show(report, console())
    if log and options.report:
        notes.print(f"{options.report} is a trace of it for ui.perfetto.dev", soft_wrap=True)
    if log and (options.report or not options.as_json):
        notes.print(f"what happened is in {log}: kvmover report {log}", soft_wrap=True)
    return 0 if report.passed else 1


def _log_beside(trace: Path) -> Path:
    """Returns the run log of a trace. An older run log there is overwritten; any other file raises KvmoverError."""
    check_name("--report", trace)
    log = trace.with_suffix(".jsonl")
    if not trace.absolute().parent.is_dir():
        raise KvmoverError(f"cannot write {trace}: there is no folder {trace.absolute().parent}")
    if log.exists():
        read_lines([log])  # raises unless it is a run log
    return log


def _processes(options: DemoOptions) -> int:
    return max(scenario.processes for scenario in options.chosen)


def _watched(options: DemoOptions) -> DemoOptions:
    """Returns options with a port for each rank, if watched without configured ports."""
    metrics = options.settings.metrics
    if not options.watch or metrics.port:
        return options
    need("prometheus_client", "serving metrics", "metrics")
    metrics = replace(metrics, port=_free_ports(metrics.address, _processes(options)))
    return replace(options, settings=replace(options.settings, metrics=metrics))


def _free_ports(address: str, count: int) -> int:
    """Returns the first of `count` consecutive free ports. Raises KvmoverError if too few are free."""
    for first in range(FIRST_METRICS_PORT, (1 << 16) - count, count):
        with ExitStack() as taken:
            try:
                for port in range(first, first + count):
                    held = taken.enter_context(socket.socket())
                    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the ranks' servers do
                    held.bind((address, port))
            except OSError:
                continue
            return first
    raise KvmoverError(f"{address or 'this host'} has no {count} neighbouring ports free for metrics")


def _run_in_view(options: DemoOptions, notes: Console) -> RunReport:
    """Run under a progress bar; with `watch` the ranks' metrics stand below it."""
    progress = Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=notes,
        disable=options.as_json and not options.watch,
        transient=True,
    )
    total = sum(_steps(scenario, options.requests_each) for scenario in options.chosen)
    task = progress.add_task("starting processes", total=total)

    def step(what: str, requests: int) -> None:
        progress.update(task, description=what, advance=requests)

    say = _nothing if options.as_json else notes.print
    addresses = _endpoints(options)
    if addresses and not options.watch:
        notes.print(f"to watch it: kvmover top {addresses}", soft_wrap=True)
    if addresses and options.watch:
        with _top(addresses, progress, notes):
            return run(options, step, say)
    with progress:
        return run(options, step, say)


def _steps(scenario: Scenario, requests: int) -> int:
    """Returns the steps of a scenario: its requests and, of a model that speaks, the texts that it scores."""
    return min(requests, len(QUESTIONS)) + len(MOVES) if scenario.speaks else requests


def _nothing(text: Text) -> None:
    """Say nothing of an answer: the report has it."""


@contextmanager
def _top(addresses: str, progress: Progress, notes: Console) -> Generator[None]:
    """Show `kvmover top` under the bar. Silent ranks are left out: scenarios begin and end them."""
    frame: list[RenderableType] = []
    done = threading.Event()

    def follow() -> None:
        while not done.wait(_FRAME_S):
            now = top.ask(endpoints(addresses), fetch, time.monotonic).whole()
            if now is not None:  # sums: a rate over a second mostly covers no request
                frame[:] = [top.screen(top.View.of(addresses, None, now))]

    thread = threading.Thread(target=follow, name="kvmover-demo-top", daemon=True)
    with Live(get_renderable=lambda: Group(progress.get_renderable(), *frame), console=notes, transient=True):
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def run(options: DemoOptions, step: Callable[[str, int], None], say: Callable[[Text], None] = _nothing) -> RunReport:
    """Run the scenarios on one crew of processes.

    `step` gets the current work and the number of requests ended, `say` each answer in a language as it is complete.
    """
    began, settings = time.monotonic(), options.settings
    scenarios = options.chosen
    plays = [(scenario, _requests(options, scenario)) for scenario in scenarios]  # bad ones start no process
    size = max(scenario.processes for scenario in scenarios)
    nixl_version()  # raises without NIXL
    if options.store is not None:
        _need_store(options.store)
    if options.device != "cpu":
        _need_device(options.device)
    if settings.metrics.port is not None:
        need("prometheus_client", "serving metrics", "metrics")
        if settings.metrics.port and settings.metrics.port + size > 1 << 16:
            raise ConfigError(f"metrics.port = {settings.metrics.port} leaves no ports for {size} ranks")
    reports: list[ScenarioReport] = []
    with tempfile.TemporaryDirectory(prefix="kvmover-demo-") as folder, Crew(scenarios[0].processes) as crew:
        for scenario, requests in plays:
            seeded = replace(scenario, model=replace(scenario.model, seed=options.seed))
            place = Path(folder) / scenario.name
            place.mkdir()
            reports.append(_play(_stage(seeded, crew, place, options), requests, step, say))
            crew.grow(size)
    return RunReport.of(reports, time.monotonic() - began)


def _stage(scenario: Scenario, crew: Crew, folder: Path, options: DemoOptions) -> Stage:
    if scenario.speaks:
        return English(scenario, crew, folder, options.settings, options.device)
    if scenario.lives:
        root = folder if options.store is None else store_location(options.store)
        return Lives(scenario, crew, folder, root, options.requests_each, options.settings)
    if scenario.lenders:
        return Lenders(scenario, crew, folder, options.requests_each, options.settings)
    if scenario.replaced:
        return Rolling(scenario, crew, folder, options.settings)
    if scenario.answer_tokens:
        return Migrations(scenario, crew.members, folder, options.seed, options.settings, options.device)
    return ScenarioRun(scenario, crew, folder, options)


def _need_store(location: str) -> None:
    """Raise KvmoverError for a directory that is not there, before any process starts."""
    place = store_location(location)
    if isinstance(place, Path) and not place.is_dir():
        raise KvmoverError(f"--store {location} is not a directory")


def _need_device(name: str) -> None:
    """Raise KvmoverError for a device that torch lacks, before any process starts."""
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise KvmoverError(f"--device {name}: {str(error).splitlines()[0]}") from error


def _endpoints(options: DemoOptions) -> str | None:
    """Returns the address range for `kvmover top`, a port for each rank; None without configured metrics."""
    metrics = options.settings.metrics
    if not metrics.port:
        return None
    return f"{metrics.address or '127.0.0.1'}:{metrics.port}-{metrics.port + _processes(options) - 1}"


@contextmanager
def _ended_by_a_signal() -> Generator[None]:
    """Turn SIGTERM, which would leave processes and files, into SystemExit. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _play(
    stage: Stage,
    requests: Chats | Traced | Questions,
    step: Callable[[str, int], None],
    say: Callable[[Text], None],
) -> ScenarioReport:
    """Serve all requests of a scenario, in order of arrival."""
    scenario = stage.scenario
    ranks = " + ".join(str(fleet.fleet.size) for fleet in scenario.fleets)
    step(f"{scenario.name}: {ranks} ranks", 0)
    done: list[RequestReport] = []
    for number, (prompt, answer_tokens) in enumerate(requests):
        done.append(stage.serve(number, prompt, answer_tokens))
        requests.answered(done[-1].answer)
        if done[-1].text:
            say(shown(scenario, done[-1]))
        step(f"{scenario.name}: {ranks} ranks", 1)
    scored: list[Perplexity] = []
    for each in stage.perplexities() if isinstance(stage, English) else ():
        scored.append(each)
        step(f"{scenario.name}: perplexity over moved KV", 1)
    stage.close()
    return ScenarioReport.of(scenario, done, tuple(scored))


def _requests(options: DemoOptions, scenario: Scenario) -> Chats | Traced | Questions:
    if options.trace is None:
        if options.scale is not None:
            raise TraceError(f"--scale {options.scale} has no meaning without --trace")
        if scenario.speaks:
            return Questions(options.requests_each)
        return Chats.seeded(options.seed, options.requests_each)
    if scenario.speaks:
        raise TraceError(f"{scenario.name} answers questions of its own: leave out --trace {options.trace}")
    scale = TraceScale(scenario.model.vocab, SCALE if options.scale is None else options.scale)
    most = LIFE_POOL_TOKENS if scenario.lives or scenario.lenders else POOL_TOKENS
    return Traced.read(options.trace, scale, options.requests_each, most)
