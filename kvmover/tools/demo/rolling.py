"""Rolling: the engines of a scenario are replaced one after another, by leaving or by kill -9, while the others serve.

Requests take engines in turn. A successor is seated while requests are served, and connected between two of them; then
its predecessor leaves, or is killed during the next request, which living engines repeat.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from kvmover.config.settings import Settings
from kvmover.plan.fleet_text import FleetText
from kvmover.tools.demo.crew import Crew, CrewError, ask, ask_all
from kvmover.tools.demo.demo_engine import Asked, Engine, serve
from kvmover.tools.demo.demo_report import RequestReport
from kvmover.tools.demo.model import Transformer
from kvmover.tools.demo.scenarios import Scenario

#: Latest time of a kill after its request began, s. A request takes some 200 ms.
KILL_WITHIN_S = 0.15

#: Deadline of a prefill whose decode engine died before asking, s.
DEADLINE_S = 5.0


class Rolling:
    """A stage with several prefill and decode engines, one of which is replaced before each request, until all are.

    Of four, the first and the last leave before that request, the others are killed in its middle.
    """

    def __init__(self, scenario: Scenario, crew: Crew, folder: Path, settings: Settings) -> None:
        self.scenario, self._crew, self._folder = scenario, crew, folder
        patience = min(DEADLINE_S, settings.mover.deadline_s)
        self._settings = replace(settings, mover=replace(settings.mover, deadline_s=patience))
        self._waiting, self._ports = list(crew.members), 0
        self._random = random.Random(scenario.model.seed)
        self._prefills: list[Engine] = []
        self._decodes: list[Engine] = []
        self._due: list[Engine] = []
        for number in range(scenario.replaced):
            for name, fleet in ("prefill", scenario.src), ("decode", scenario.dst):
                self._due.append(self._seated(f"{name}-{number}", fleet))
                self._join(self._due[-1])
        self._replaced = 0
        self._seating = ThreadPoolExecutor(1, "kvmover-demo-seats")
        self._successor = self._seat_next()
        self.alone = Transformer.alone(scenario.model)

    def serve(self, number: int, prompt: tuple[int, ...], answer_tokens: int) -> RequestReport:
        """Serve on the engines whose turn it is; if one of them is killed, again on living ones."""
        dying = self._replace_one() if number else None
        name = f"{self.scenario.name}-{number}"
        src, dst = self._turn(number, dying)
        if dying is None:
            return serve(self.scenario, src, dst, self.alone, Asked(name, prompt, answer_tokens))
        self._leave(dying)
        killer = threading.Timer(self._random.uniform(0, KILL_WITHIN_S), _kill, [dying])
        killer.start()
        try:
            return serve(self.scenario, src, dst, self.alone, Asked(name, prompt, answer_tokens))
        except CrewError:
            src, dst = self._turn(number, None)
            report = serve(self.scenario, src, dst, self.alone, Asked(f"{name}-again", prompt, answer_tokens))
            return replace(report, tries=2)
        finally:
            killer.join()

    def close(self) -> None:
        """End all living engines, and respawn the killed ones' processes."""
        waiting = [self._successor.result()] if self._successor else []
        self._seating.shutdown()
        left = *self._prefills, *self._decodes, *waiting
        ask_all([member for engine in left for member in engine.members], "close")
        self._crew.renew()

    def _turn(self, number: int, dying: Engine | None) -> tuple[Engine, Engine]:
        """Returns the prefill and decode engine whose turn it is, with the dying one in its place."""
        src, dst = (engines[number % len(engines)] for engines in (self._prefills, self._decodes))
        return dying if dying in self._prefills else src, dying if dying in self._decodes else dst

    def _replace_one(self) -> Engine | None:
        """Join the next successor. Returns its predecessor if that is to be killed; otherwise it has left."""
        if self._successor is None:
            return None
        self._join(self._successor.result())
        place, before = self._replaced, self._due[self._replaced]
        self._replaced += 1
        self._successor = self._seat_next()
        if place % 4 in (1, 2):
            return before
        self._leave(before)
        ask_all(before.members, "close")
        return None

    def _seat_next(self) -> Future[Engine] | None:
        """Seat the next successor in a thread, while requests are served; None if all are replaced."""
        if self._replaced == len(self._due):
            return None
        before = self._due[self._replaced]
        return self._seating.submit(self._seated, f"{before.name}-next", before.fleet)

    def _seated(self, name: str, fleet: FleetText) -> Engine:
        size = fleet.fleet.size
        members, self._waiting = self._waiting[:size], self._waiting[size:]
        engine = Engine(name, members, fleet)
        seats = engine.seats(self.scenario, self._folder, self._settings, "cpu", self._ports)
        self._ports += size
        ask(members, "seat", [(seat,) for seat in seats])
        return engine

    def _join(self, engine: Engine) -> None:
        """Add the engine to the turns, and connect it with all engines of the other kind."""
        if engine.name.startswith("prefill"):
            self._prefills.append(engine)
            pairs = [(decode, engine) for decode in self._decodes]
        else:
            self._decodes.append(engine)
            pairs = [(engine, prefill) for prefill in self._prefills]
        for decode, prefill in pairs:
            ask_all(decode.members, "connect", ask_all(prefill.members, "card"))

    def _leave(self, engine: Engine) -> None:
        """Remove the engine from the turns."""
        for engines in (self._prefills, self._decodes):
            if engine in engines:
                engines.remove(engine)


def _kill(engine: Engine) -> None:
    for member in engine.members:
        member.process.kill()
