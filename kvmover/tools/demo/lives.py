"""Lives are fleets of the demo that live one after another over a page store: they keep KV for each other.

Over a keeper each fleet is killed, with SIGKILL, before the next begins.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

from kvmover.config.settings import Settings
from kvmover.store import Namespace, PageStore
from kvmover.tools.demo.crew import Crew, Member, ask, ask_all
from kvmover.tools.demo.demo_keeper import DemoKeeper
from kvmover.tools.demo.demo_report import RequestReport
from kvmover.tools.demo.judge import Judge
from kvmover.tools.demo.scenarios import Scenario
from kvmover.tools.demo.tiered_rank import Served, TieredSeat

#: Tokens of every pool.
LIFE_POOL_TOKENS = 4096


class Lives:
    """A stage whose requests are dealt to its fleets in order: each fleet is gone before the next begins."""

    def __init__(
        self, scenario: Scenario, crew: Crew, folder: Path, root: Path | str, requests: int, settings: Settings
    ) -> None:
        """`folder`: meeting place of a fleet. `root`: location of the page store, cleared at the end."""
        self.scenario, self._crew, self._folder, self._root = scenario, crew, folder, root
        self._keeper = DemoKeeper(folder, scenario.keeper_bytes) if scenario.keeper_bytes else None
        self._requests, self._settings, self._run = requests, settings, uuid.uuid4().hex[:8]
        self._waiting = list(crew.members)
        self._life = -1
        self._members: list[Member] = []
        self._spaces = set[Namespace]()
        self._judge = Judge.of(scenario)

    def serve(self, number: int, prompt: tuple[int, ...], answer_tokens: int) -> RequestReport:
        """Serve the request on the fleet whose turn it is, and compare. Raises CrewError."""
        self._begin_life(number)
        name = f"{self.scenario.name}-{number}"
        served: list[Served] = ask_all(self._members, "serve", name, prompt, answer_tokens)
        return self._judge.report(number, prompt, answer_tokens, served)

    def close(self) -> None:
        """End the living fleet, if any, and delete all stored pages."""
        self._end()
        if self._keeper:
            self._keeper.close()
            self._crew.renew()
            return
        for space in self._spaces:
            with PageStore.open(self._root, space) as store:
                store.clear()

    def _end(self) -> None:
        if self._keeper:
            for member in self._members:
                member.process.kill()
            for member in self._members:
                member.process.join()
        elif self._members:
            ask_all(self._members, "close")

    def _begin_life(self, number: int) -> None:
        """Seat the fleet that serves request `number`, after ending the fleet before it."""
        lives = self.scenario.lives
        life = number * len(lives) // max(self._requests, len(lives))
        fleet = lives[life]
        if life != self._life:
            self._end()
            size = fleet.fleet.size
            self._life, self._members, self._waiting = life, self._waiting[:size], self._waiting[size:]
            meet, pages = str(self._folder / f"life-{life}"), LIFE_POOL_TOKENS // fleet.fleet.page_tokens
            root = self._keeper.location(life + 1) if self._keeper else self._root
            first = TieredSeat(self.scenario, fleet, 0, pages, meet, root, self._run, self._settings)
            self._spaces.add(first.namespace)
            seats = [replace(first, rank=rank) for rank in range(size)]
            ask(self._members, "seat", [(seat,) for seat in seats])
