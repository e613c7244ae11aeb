"""In the demo prefill fleets make KV by real forward passes, kvmover moves it, decode fleets go on from what landed.

A scenario runs on its fleets, request by request, against the model in one process: two fleets that live together, or
those of `keepers`, which keep KV for each other.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvmover.cache.prefix import PrefixTree
from kvmover.config import ConfigError, load
from kvmover.config.settings import Settings
from kvmover.demo.keepers import LIFE_POOL_TOKENS, Lenders, Lives
from kvmover.demo.model import Alone, ContiguousCache, ModelShard, Transformer
from kvmover.demo.processes import Crew, Member, ask, ask_all
from kvmover.demo.rank import Seat
from kvmover.demo.report import RequestReport, RunReport, ScenarioReport, Wire, show
from kvmover.demo.requests import Chats, Traced, TraceError, TraceScale
from kvmover.demo.scenarios import Scenario, choose
from kvmover.errors import KvmoverError, need
from kvmover.observe import top
from kvmover.observe.report import write_report
from kvmover.observe.runlog import read_lines
from kvmover.observe.tables import console
from kvmover.observe.top import endpoints, fetch
from kvmover.plan.cost import HOST
from kvmover.plan.fleet_text import FleetText
from kvmover.transfer.config import Exports, MoverConfig
from kvmover.transport import nixl_version

#: Pages for this many tokens in every pool: the prompts of a run, kept for later turns.
POOL_TOKENS = 16384


class Engine:
    """One fleet as its scheduler sees it: seated processes, free pages, and the prefixes it keeps."""

    def __init__(self, name: str, members: Sequence[Member], fleet: FleetText) -> None:
        self.name, self.members, self.fleet = name, members, fleet
        self.page_tokens = fleet.fleet.page_tokens
        self.pages = POOL_TOKENS // self.page_tokens
        self.free = list(range(self.pages))
        random.Random(name).shuffle(self.free)  # neighbours in a request are no neighbours in the pool
        self.tree = PrefixTree(self.page_tokens)

    def take(self, tokens: int) -> list[int]:
        """Pages for `tokens` tokens, from the oldest prefixes where none are free."""
        count = -(-tokens // self.page_tokens)
        if count > len(self.free):
            self.free += self.tree.evict(count - len(self.free)).page_ids().tolist()
        if count > len(self.free):
            raise KvmoverError(f"{self.name}: {tokens} tokens do not fit {self.pages} pages of {self.page_tokens}")
        taken, self.free = self.free[:count], self.free[count:]
        return taken


class ScenarioRun:
    """One scenario on its two fleets, with the one-process model that says what the answers must be."""

    def __init__(self, scenario: Scenario, crew: Crew, folder: Path, options: DemoOptions) -> None:
        settings, device = options.settings, options.device
        sizes = scenario.src.fleet.size, scenario.dst.fleet.size
        self.src = Engine("prefill", crew.members[: sizes[0]], scenario.src)
        self.dst = Engine("decode", crew.members[sizes[0] : sum(sizes)], scenario.dst)
        self.scenario = scenario
        seats = [
            Seat(
                scenario,
                engine.name,
                engine.fleet,
                rank,
                engine.pages,
                str(folder / engine.name),
                settings,
                ports,
                device,
            )
            for engine, ports in ((self.src, 0), (self.dst, sizes[0]))
            for rank in range(len(engine.members))
        ]
        everyone = [*self.src.members, *self.dst.members]
        ask(everyone, "seat", [(seat,) for seat in seats])
        ask_all(self.dst.members, "connect", ask_all(self.src.members, "card"))
        self.alone = Transformer(scenario.model, ModelShard.of_rank(scenario.model, 1, 1, 0, 0), Alone())

    def close(self) -> None:
        """End both fleets; their processes can be seated again."""
        ask_all([*self.src.members, *self.dst.members], "close")

    def serve(self, number: int, prompt: tuple[int, ...], answer_tokens: int) -> RequestReport:
        """Prefill, move what the decode fleet does not have, decode, compare."""
        name = f"{self.scenario.name}-{number}"
        match = self.dst.tree.match(prompt)
        receipt = self.dst.tree.lock(match.device_node)
        src_pages = self.src.take(len(prompt))
        missing = len(prompt) + answer_tokens - match.tokens
        dst_pages = [*match.page_ids.tolist(), *self.dst.take(missing)]
        moved = range(match.tokens, len(prompt))
        first, gap = ask_all(self.src.members, "prefill", prompt, src_pages)[0]
        sent, landed = self._move(name, moved, src_pages, dst_pages)
        rest, gaps = ask_all(self.dst.members, "decode", first, len(prompt), answer_tokens - 1, dst_pages)[0]
        self.src.free += src_pages
        answer = [first, *rest]
        self._keep([*prompt, *answer[:-1]], dst_pages)
        self.dst.tree.unlock(receipt)
        self.alone.gaps.clear()
        expected = self.alone.generate(prompt, answer_tokens, ContiguousCache())
        moved_by, compared = _gaps_moved(answer, [gap, *gaps], expected, self.alone.gaps, self.scenario.gap_tolerance)
        same, near = _same_bytes(sent, landed), moved_by < self.scenario.gap_tolerance
        wire = Wire.of(sent, landed)
        return RequestReport(
            name, len(prompt), match.tokens, answer, expected, near, same, wire, gaps_moved=moved_by, compared=compared
        )

    def _move(self, name: str, moved: range, src_pages: list[int], dst_pages: list[int]) -> tuple[list[Any], list[Any]]:
        """Both fleets at once: (result, digests) of every rank."""
        for member in self.src.members:
            member.tell("send", name, src_pages, moved)
        landed = ask_all(self.dst.members, "receive", name, self.src.name, moved, dst_pages)
        return [member.answer() for member in self.src.members], landed

    def _keep(self, tokens: list[int], pages: list[int]) -> None:
        """Keep the whole pages of what is cached now; free the rest, and what the tree has in other pages."""
        whole = len(tokens) // self.dst.page_tokens
        kept = self.dst.tree.insert(tokens, pages[:whole])
        self.dst.free += [*kept.page_ids().tolist(), *pages[whole:]]


def _gaps_moved(
    answer: list[int], gaps: list[float], expected: list[int], others: list[float], tolerance: float
) -> tuple[float, int]:
    """How far the gaps of an answer are from those of another, at most, and over how many tokens.

    A gap may fall below zero, and then another token wins: what comes after it answers another text.
    """
    moved = 0.0
    for number, (token, gap, due, other) in enumerate(zip(answer, gaps, expected, others, strict=True)):
        if token != due and gap + other < tolerance:
            return max(moved, gap + other), number
        moved = max(moved, abs(gap - other))
    return moved, len(answer)


def _same_bytes(sent: list[Any], landed: list[Any]) -> bool:
    """Whether every row that any destination rank holds is the row that every source rank had."""
    truth: dict[tuple[int, int, int], set[str]] = {}
    for _, digests in sent:
        for place, digest in digests.items():
            truth.setdefault(place, set()).add(digest)
    return all(truth[place] == {digest} for _, digests in landed for place, digest in digests.items())


#: Processes of one machine that move a few MB.
MOVER = MoverConfig(costs=HOST, arena_bytes=8 << 20, exports=Exports.POOLS)

#: The first port that is tried where the demo is watched and no port is configured.
_FIRST_PORT = 9400

#: Seconds between two frames.
_FRAME_S = 1.0

#: Lengths of a trace are multiplied by this, unless it is given.
SCALE = 0.02


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to run: all scenarios when none is named; the requests of a trace, its lengths times `scale`, if given.

    `report`: a page of HTML to write at the end, with the run log beside it, as run.html and run.jsonl. `watch`: show
    `kvmover top` of the demo's own ranks while it runs. `device`: where pools lie. `settings`: the configuration; what
    that does not say of the mover is as `MOVER`.
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
            write_report([log], options.report)
    if options.as_json:
        print(json.dumps(report.as_data()))
    else:
        show(report, console())
    if log and options.report:
        notes.print(f"what happened is in {log}, and drawn in {options.report}", soft_wrap=True)
    elif log and not options.as_json:
        notes.print(f"what happened is in {log}: kvmover report {log} --html run.html", soft_wrap=True)
    return 0 if report.identical else 1


def _log_beside(page: Path) -> Path:
    """The run log that belongs to a page. An older one there is written anew; any other file is refused."""
    log = page.with_suffix(".jsonl")
    if log == page:
        raise KvmoverError(f"--report {page} is a page of HTML: {log} is where its run log goes")
    if not page.absolute().parent.is_dir():
        raise KvmoverError(f"cannot write {page}: there is no folder {page.absolute().parent}")
    if log.exists():
        read_lines([log])  # raises for what is none
    return log


def _processes(options: DemoOptions) -> int:
    return max(scenario.processes for scenario in choose(options.scenarios))


def _watched(options: DemoOptions) -> DemoOptions:
    """With a port for each rank, where it is watched and none are configured."""
    metrics = options.settings.metrics
    if not options.watch or metrics.port:
        return options
    need("prometheus_client", "serving metrics", "metrics")
    metrics = replace(metrics, port=_free_ports(metrics.address, _processes(options)))
    return replace(options, settings=replace(options.settings, metrics=metrics))


def _free_ports(address: str, count: int) -> int:
    """The first of `count` neighbouring ports that nobody listens on."""
    for first in range(_FIRST_PORT, (1 << 16) - count, count):
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
    """Run under a bar that says how far it is; with `watch` the ranks' metrics stand below it."""
    progress = Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=notes,
        disable=options.as_json and not options.watch,
        transient=True,
    )
    task = progress.add_task("starting processes", total=len(choose(options.scenarios)) * options.requests_each)

    def step(what: str, requests: int) -> None:
        progress.update(task, description=what, advance=requests)

    addresses = _endpoints(options)
    if addresses and not options.watch:
        notes.print(f"to watch it: kvmover top {addresses}", soft_wrap=True)
    if addresses and options.watch:
        with _top(addresses, progress, notes):
            return run(options, step)
    with progress:
        return run(options, step)


@contextmanager
def _top(addresses: str, progress: Progress, notes: Console) -> Generator[None]:
    """`kvmover top` under the bar. Ranks that are not there are not named: scenarios begin and end them."""
    frame: list[RenderableType] = []
    done = threading.Event()

    def follow() -> None:
        while not done.wait(_FRAME_S):
            now = top.ask(endpoints(addresses), fetch, time.monotonic).whole()
            if now is not None:  # sums, because a rate over a second is mostly that of no request
                frame[:] = [top.screen(top.View.of(addresses, None, now))]

    thread = threading.Thread(target=follow, name="kvmover-demo-top", daemon=True)
    with Live(get_renderable=lambda: Group(progress.get_renderable(), *frame), console=notes, transient=True):
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def run(options: DemoOptions, step: Callable[[str, int], None]) -> RunReport:
    """Run the scenarios on one crew of processes. `step` hears what is being done, and how many requests ended."""
    began, settings = time.monotonic(), options.settings
    scenarios = choose(options.scenarios)
    plays = [(scenario, _requests(options, scenario)) for scenario in scenarios]  # bad ones start no process
    size = max(scenario.processes for scenario in scenarios)
    nixl_version()  # raises where there is none
    if options.device != "cpu":
        _need_device(options.device)
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
            elif seeded.lenders:
                stage = Lenders(seeded, crew, place, options.requests_each, settings)
            else:
                stage = ScenarioRun(seeded, crew, place, options)
            reports.append(_play(stage, requests, step))
            crew.revive()
    return RunReport.of(reports, time.monotonic() - began)


def _need_device(name: str) -> None:
    """Raises KvmoverError for a device that torch does not have: before a process is started."""
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise KvmoverError(f"--device {name}: {str(error).splitlines()[0]}") from error


def _endpoints(options: DemoOptions) -> str | None:
    """What `kvmover top` is told, where metrics are configured: every rank has a port of its own."""
    metrics = options.settings.metrics
    if not metrics.port:
        return None
    return f"{metrics.address or '127.0.0.1'}:{metrics.port}-{metrics.port + _processes(options) - 1}"


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


def _play(
    stage: ScenarioRun | Lives | Lenders, requests: Chats | Traced, step: Callable[[str, int], None]
) -> ScenarioReport:
    """All requests of one scenario, in order of arrival."""
    scenario = stage.scenario
    ranks = " + ".join(str(fleet.fleet.size) for fleet in scenario.fleets)
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
    most = LIFE_POOL_TOKENS if scenario.lives or scenario.lenders else POOL_TOKENS
    return Traced.read(options.trace, scale, options.requests_each, most)
