"""The demo: prefill fleets make KV by real forward passes, kvmover moves it, decode fleets go on from what landed."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvmover.demo.crew import Crew
from kvmover.demo.lives import Lives
from kvmover.demo.report import RequestReport, RunReport, ScenarioReport, show
from kvmover.demo.scenarios import Chats, Scenario, Traced, choose
from kvmover.demo.stage import Stage
from kvmover.demo.trace import Scale


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to run: all scenarios when none is named; the requests of a trace, its lengths times `scale`, if given."""

    scenarios: tuple[str, ...] = ()
    requests: int | None = None
    seed: int = 0
    trace: Path | None = None
    scale: float = 0.02
    as_json: bool = False

    @property
    def requests_each(self) -> int:
        """Requests of a scenario: five turns of one conversation."""
        return self.requests or 5


def run_demo(options: DemoOptions) -> int:
    """Run, show, and return the exit status: 0 only if every token and every byte is what it should be."""
    with Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=options.as_json,
        transient=True,
    ) as progress:
        task = progress.add_task("starting processes", total=len(choose(options.scenarios)) * options.requests_each)

        def step(what: str, requests: int) -> None:
            progress.update(task, description=what, advance=requests)

        report = run(options, step)
    if options.as_json:
        print(json.dumps(report.as_data()))
    else:
        show(report, Console())
    return 0 if report.identical else 1


def run(options: DemoOptions, step: Callable[[str, int], None]) -> RunReport:
    """Run the scenarios on one crew of processes. `step` hears what is being done, and how many requests ended."""
    began = time.monotonic()
    scenarios = choose(options.scenarios)
    reports: list[ScenarioReport] = []
    size = max(scenario.processes for scenario in scenarios)
    with tempfile.TemporaryDirectory(prefix="kvmover-demo-") as folder, Crew(size) as crew:
        for scenario in scenarios:
            seeded = replace(scenario, model=replace(scenario.model, seed=options.seed))
            place = Path(folder) / scenario.name
            place.mkdir()
            stage = Lives(seeded, crew, place, options.requests_each) if seeded.lives else Stage(seeded, crew, place)
            reports.append(_play(stage, options, step))
    return RunReport.of(reports, time.monotonic() - began)


def _play(stage: Stage | Lives, options: DemoOptions, step: Callable[[str, int], None]) -> ScenarioReport:
    """All requests of one scenario, in order of arrival."""
    scenario = stage.scenario
    ranks = " + ".join(str(fleet.fleet.size) for fleet in scenario.lives or (scenario.src, scenario.dst))
    step(f"{scenario.name}: {ranks} ranks", 0)
    requests = _requests(options, scenario)
    done: list[RequestReport] = []
    for number, (prompt, answer_tokens) in enumerate(requests):
        done.append(stage.serve(number, prompt, answer_tokens))
        requests.answered(done[-1].answer)
        step(f"{scenario.name}: {ranks} ranks", 1)
    stage.close()
    return ScenarioReport.of(scenario, done)


def _requests(options: DemoOptions, scenario: Scenario) -> Chats | Traced:
    if options.trace is None:
        return Chats.seeded(options.seed, options.requests_each)
    return Traced(options.trace, Scale(scenario.model.vocab, options.scale), options.requests_each)
