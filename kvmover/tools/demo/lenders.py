"""Lenders are fleets of the demo that live together and read from each other's hosts instead of computing again."""

from __future__ import annotations

from pathlib import Path

from kvmover.config.settings import Settings
from kvmover.tools.demo.crew import Crew, Member, ask, ask_all
from kvmover.tools.demo.demo_report import RequestReport
from kvmover.tools.demo.judge import Judge
from kvmover.tools.demo.lives import LIFE_POOL_TOKENS
from kvmover.tools.demo.scenarios import Scenario
from kvmover.tools.demo.tiered_rank import Served, TieredSeat


class Lenders:
    """A stage whose fleets live together and serve in turn, each from its own tiers or from another fleet's host.

    The fleet that served before the last request is killed as it lends for it: the request loses a hit, its answer
    stays.
    """

    def __init__(self, scenario: Scenario, crew: Crew, folder: Path, requests: int, settings: Settings) -> None:
        self.scenario, self._crew, self._last = scenario, crew, requests - 1
        self._judge = Judge.of(scenario)
        self._fleets: list[list[Member]] = []
        self._doomed: list[Member] = []
        names = [f"lender-{number}" for number in range(len(scenario.lenders))]
        at = 0
        for name, fleet in zip(names, scenario.lenders, strict=True):
            size, pages = fleet.fleet.size, LIFE_POOL_TOKENS // fleet.fleet.page_tokens
            peers = tuple(other for other in names if other != name)
            meet = str(folder / name)
            seats = [
                TieredSeat(scenario, fleet, rank, pages, meet, None, "", settings, name, peers, at)
                for rank in range(size)
            ]
            self._fleets.append(list(crew.members[at : at + size]))
            ask(self._fleets[-1], "seat", [(seat,) for seat in seats])
            at += size
        cards = [ask_all(members, "card") for members in self._fleets]
        for number, members in enumerate(self._fleets):
            ask_all(members, "connect", [card for other, own in enumerate(cards) if other != number for card in own])

    def serve(self, number: int, prompt: tuple[int, ...], answer_tokens: int) -> RequestReport:
        """Serve the request on the fleet whose turn it is, and compare. Raises CrewError."""
        turn = number % len(self._fleets)
        if number == self._last and number > 1:
            self._doomed = self._fleets[(number - 1) % len(self._fleets)]
            ask_all(self._doomed, "die_lending")
        served: list[Served] = ask_all(
            self._fleets[turn], "serve", f"{self.scenario.name}-{number}", prompt, answer_tokens
        )
        return self._judge.report(number, prompt, answer_tokens, served)

    def close(self) -> None:
        """Close the living fleets, end the killed one's processes, and renew the crew."""
        for members in self._fleets:
            if members is not self._doomed:
                ask_all(members, "close")
        for member in self._doomed:
            member.process.kill()
            member.process.join()
        self._crew.renew()
