"""The demo: prefill fleets make KV by real forward passes, kvmover moves it, decode fleets go on from what landed."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvmover.config import ConfigError, load
from kvmover.config.settings import Settings
from kvmover.demo.crew import Crew
from kvmover.demo.lives import POOL_TOKENS as LIFE_TOKENS
from kvmover.demo.lives import Lives
from kvmover.demo.report import RequestReport, RunReport, ScenarioReport, show
from kvmover.demo.scenario_run import POOL_TOKENS, ScenarioRun
from kvmover.demo.scenarios import Chats, Scenario, Traced, choose
from kvmover.demo.trace import TraceError, TraceScale
from kvmover.needs import need
from kvmover.observe.console import console
from kvmover.plan.cost import HOST
from kvmover.transfer.result import MoverConfig
from kvmover.transport.nixl_agent import nixl_version

#: Processes of one machine that move a few MB.
MOVER = MoverConfig(costs=HOST, arena_bytes=8 << 20)

#: Lengths of a trace are multiplied by this, unless it is given.
SCALE = 0.02


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to run: all scenarios when none is named; the requests of a trace, its lengths times `scale`, if given.

    `settings`: the configuration; what it does not say of the mover is as `MOVER`.
    """

    scenarios: tuple[str, ...] = ()
    requests: int | None = None
    seed: int = 0
    trace: Path | None = None
    scale: float | None = None
    as_json: bool = False
    settings: Settings = field(default_factory=lambda: Settings(mover=MOVER))

    @property
    def requests_each(self) -> int:
        """Requests of a scenario: five turns of one conversation."""
        return self.requests or 5


def run_demo(options: DemoOptions) -> int:
    """Run, show, and return the exit status: 0 only if every token and every byte is what it should be.

    Reads the configuration. Ctrl-C and SIGTERM end it at once, with all of its processes and files.
    """
    options = replace(options, settings=load(defaults=options.settings).settings)
    notes = Console(stderr=True, highlight=False, markup=False)
    if told := _where_to_look(options):
        notes.print(told, soft_wrap=True)
    with (
        _ended_by_a_signal(),
        Progress(
            TextColumn("{task.description:<44}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=notes,
            disable=options.as_json,
            transient=True,
        ) as progress,
    ):
        task = progress.add_task("starting processes", total=len(choose(options.scenarios)) * options.requests_each)

        def step(what: str, requests: int) -> None:
            progress.update(task, description=what, advance=requests)

        report = run(options, step)
    if options.as_json:
        print(json.dumps(report.as_data()))
    else:
        show(report, console())
        if (log := options.settings.record.run_log) is not None:
            notes.print(f"what happened is in {log}: kvmover report {log} --html run.html", soft_wrap=True)
    return 0 if report.identical else 1


def run(options: DemoOptions, step: Callable[[str, int], None]) -> RunReport:
    """Run the scenarios on one crew of processes. `step` hears what is being done, and how many requests ended."""
    began, settings = time.monotonic(), options.settings
    scenarios = choose(options.scenarios)
    plays = [(scenario, _requests(options, scenario)) for scenario in scenarios]  # bad ones start no process
    size = max(scenario.processes for scenario in scenarios)
    nixl_version()  # raises where there is none
    if settings.metrics.port is not None:
        need("prometheus_client", "serving metrics", "metrics")
        if settings.metrics.port and settings.metrics.port + size > 1 << 16:
            raise ConfigError(f"metrics.port = {settings.metrics.port} leaves no ports for {size} ranks")
    reports: list[ScenarioReport] = []
    with tempfile.TemporaryDirectory(prefix="kvmover-demo-") as folder, Crew(size) as crew:
        for scenario, requests in plays:
            seeded = replace(scenario, model=replace(scenario.model, seed=options.seed))
            place = Path(folder) / scenario.name
            place.mkdir()
            if seeded.lives:
                stage = Lives(seeded, crew, place, options.requests_each, settings)
            else:
                stage = ScenarioRun(seeded, crew, place, settings)
            reports.append(_play(stage, requests, step))
    return RunReport.of(reports, time.monotonic() - began)


def _where_to_look(options: DemoOptions) -> str | None:
    """How to watch, where metrics are configured: every rank has a port of its own."""
    metrics = options.settings.metrics
    if not metrics.port:
        return None
    last = metrics.port + max(scenario.processes for scenario in choose(options.scenarios)) - 1
    return f"to watch it: kvmover top {metrics.address or '127.0.0.1'}:{metrics.port}-{last}"


@contextmanager
def _ended_by_a_signal() -> Generator[None]:
    """SIGTERM, which would leave processes and files, ends it as an exception does. Signals are the main thread's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _play(stage: ScenarioRun | Lives, requests: Chats | Traced, step: Callable[[str, int], None]) -> ScenarioReport:
    """All requests of one scenario, in order of arrival."""
    scenario = stage.scenario
    ranks = " + ".join(str(fleet.fleet.size) for fleet in scenario.lives or (scenario.src, scenario.dst))
    step(f"{scenario.name}: {ranks} ranks", 0)
    done: list[RequestReport] = []
    for number, (prompt, answer_tokens) in enumerate(requests):
        done.append(stage.serve(number, prompt, answer_tokens))
        requests.answered(done[-1].answer)
        step(f"{scenario.name}: {ranks} ranks", 1)
    stage.close()
    return ScenarioReport.of(scenario, done)


def _requests(options: DemoOptions, scenario: Scenario) -> Chats | Traced:
    if options.trace is None:
        if options.scale is not None:
            raise TraceError(f"--scale {options.scale} has no meaning without --trace")
        return Chats.seeded(options.seed, options.requests_each)
    scale = TraceScale(scenario.model.vocab, SCALE if options.scale is None else options.scale)
    most = LIFE_TOKENS if scenario.lives else POOL_TOKENS
    return Traced.read(options.trace, scale, options.requests_each, most)
