"""Fleets of the demo that keep KV for each other: one after another over a page store, or together from host to host.

What is restored is compared row by row with what some rank computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvmover.config.settings import Settings
from kvmover.demo.model import Alone, ContiguousCache, ModelShard, Transformer
from kvmover.demo.processes import Crew, Member, ask, ask_all
from kvmover.demo.rank import Digests, Served, TieredSeat
from kvmover.demo.report import RequestReport, Wire
from kvmover.demo.scenarios import GAP_TOLERANCE, Scenario

#: Pages for this many tokens on the device of each fleet.
LIFE_POOL_TOKENS = 4096

#: What rows are or may be, by the tokens up to their unit's end and their place in the model.
RowPlace = tuple[tuple[int, ...], int, int, int]


@dataclass(slots=True)
class Judge:
    """The model in one process, and every row that some rank computed: two of another TP differ in the last bits."""

    scenario: Scenario
    alone: Transformer
    _truth: dict[RowPlace, set[str]] = field(default_factory=dict[RowPlace, set[str]])

    @classmethod
    def of(cls, scenario: Scenario) -> Judge:
        """Before anything was served."""
        return cls(scenario, Transformer(scenario.model, ModelShard.of_rank(scenario.model, 1, 1, 0, 0), Alone()))

    def report(self, number: int, prompt: tuple[int, ...], answer_tokens: int, served: list[Served]) -> RequestReport:
        """Compare what all ranks of a fleet said of one request."""
        first, name = served[0], f"{self.scenario.name}-{number}"
        self.alone.gaps.clear()
        expected = self.alone.generate(prompt, answer_tokens, ContiguousCache())
        near = all(abs(a - b) < GAP_TOLERANCE for a, b in zip(first.gaps, self.alone.gaps, strict=True))
        tokens = *prompt, *first.answer[:-1]
        same = all(self._same(tokens, each.restored) for each in served)
        for each in served:
            self._learn(tokens, each.kept)
        alike = all((each.answer, each.hits) == (first.answer, first.hits) for each in served)
        hit, wire = first.restored_tokens, _wire(served, "peer" if first.hits.get("peer") else "storage")
        return RequestReport(name, len(prompt), hit, first.answer, expected, near and alike, same, wire, first.hits)

    def _same(self, tokens: Sequence[int], rows: Digests) -> bool:
        return all(digest in self._truth.get(place, ()) for place, digest in self._places(tokens, rows).items())

    def _learn(self, tokens: Sequence[int], rows: Digests) -> None:
        for place, digest in self._places(tokens, rows).items():
            self._truth.setdefault(place, set()).add(digest)

    def _places(self, tokens: Sequence[int], rows: Digests) -> dict[RowPlace, str]:
        layers, unit_tokens = self.scenario.model.layers, self.scenario.unit_tokens
        places: dict[RowPlace, str] = {}
        for (number, plane, head), digest in rows.items():
            unit, layer = divmod(number, layers)
            places[tuple(tokens[: (unit + 1) * unit_tokens]), layer, plane, head] = digest
        return places


class Lives:
    """A stage whose requests are dealt to its fleets in their order: each is gone before the next begins."""

    def __init__(self, scenario: Scenario, crew: Crew, folder: Path, requests: int, settings: Settings) -> None:
        self.scenario, self._folder, self._requests, self._settings = scenario, folder, requests, settings
        self._waiting = list(crew.members)
        (folder / "store").mkdir()
        self._life = -1
        self._members: list[Member] = []
        self._judge = Judge.of(scenario)

    def serve(self, number: int, prompt: tuple[int, ...], answer_tokens: int) -> RequestReport:
        """Ask the fleet whose turn it is, and compare."""
        self._begin_life(number)
        name = f"{self.scenario.name}-{number}"
        served: list[Served] = ask_all(self._members, "serve", name, prompt, answer_tokens)
        return self._judge.report(number, prompt, answer_tokens, served)

    def close(self) -> None:
        """End the fleet that lives, if one does."""
        if self._members:
            ask_all(self._members, "close")

    def _begin_life(self, number: int) -> None:
        """Seat the fleet that serves request `number`; the one before it ends when it does."""
        lives = self.scenario.lives
        life = number * len(lives) // max(self._requests, len(lives))
        fleet = lives[life]
        if life != self._life:
            self.close()
            size = fleet.fleet.size
            self._life, self._members, self._waiting = life, self._waiting[:size], self._waiting[size:]
            meet, root = str(self._folder / f"life-{life}"), str(self._folder / "store")
            pages = LIFE_POOL_TOKENS // fleet.fleet.page_tokens
            seats = [TieredSeat(self.scenario, fleet, rank, pages, meet, root, self._settings) for rank in range(size)]
            ask(self._members, "seat", [(seat,) for seat in seats])


class Lenders:
    """A stage whose fleets live together and serve in turn, each from its own tiers or from another's host.

    The fleet that served before the last request is killed as it lends for that: a hit less, and no other answer.
    """

    def __init__(self, scenario: Scenario, crew: Crew, folder: Path, requests: int, settings: Settings) -> None:
        self.scenario, self._last = scenario, requests - 1
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
                TieredSeat(scenario, fleet, rank, pages, meet, "", settings, name, peers, at) for rank in range(size)
            ]
            self._fleets.append(list(crew.members[at : at + size]))
            ask(self._fleets[-1], "seat", [(seat,) for seat in seats])
            at += size
        cards = [ask_all(members, "card") for members in self._fleets]
        for number, members in enumerate(self._fleets):
            ask_all(members, "connect", [card for other, own in enumerate(cards) if other != number for card in own])

    def serve(self, number: int, prompt: tuple[int, ...], answer_tokens: int) -> RequestReport:
        """Ask the fleet whose turn it is, and compare."""
        turn = number % len(self._fleets)
        if number == self._last and number > 1:
            self._doomed = self._fleets[(number - 1) % len(self._fleets)]
            ask_all(self._doomed, "die_lending")
        served: list[Served] = ask_all(
            self._fleets[turn], "serve", f"{self.scenario.name}-{number}", prompt, answer_tokens
        )
        return self._judge.report(number, prompt, answer_tokens, served)

    def close(self) -> None:
        """End the fleets that live, and what is left of the one that does not."""
        for members in self._fleets:
            if members is not self._doomed:
                ask_all(members, "close")
        for member in self._doomed:
            member.process.kill()
            member.process.join()


def _wire(served: Sequence[Served], route: str) -> Wire:
    """What was read from the store or from a peer, by all ranks; the slowest rank counts."""
    return Wire(
        nbytes=sum(each.read_bytes for each in served),
        legs=sum(each.read_pages > 0 for each in served),
        descriptors_direct=0,
        descriptors_packed=sum(each.read_pages for each in served),
        routes=[route],
        seconds=max(each.seconds for each in served),
        sent_bytes=[each.read_bytes for each in served],
    )
