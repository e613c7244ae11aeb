"""Lives are fleets of different shape that serve one after another, each starting empty, over one page store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvmover.config.settings import Settings
from kvmover.demo.crew import Crew, Member, ask, ask_all
from kvmover.demo.model import Alone, ContiguousCache, ModelShard, Transformer
from kvmover.demo.rank import Digests
from kvmover.demo.report import RequestReport, Wire
from kvmover.demo.scenario_run import GAP_TOLERANCE
from kvmover.demo.scenarios import Scenario
from kvmover.demo.tiered_rank import Served, TieredSeat
from kvmover.plan.text import FleetText

#: Pages of this many tokens in every pool.
POOL_TOKENS = 4096

#: What a row must be, by the tokens up to its page's end and its place in the model.
Truth = dict[tuple[tuple[int, ...], int, int, int], str]


class Lives:
    """A stage whose requests are dealt to its fleets in their order: each is gone before the next begins."""

    def __init__(self, scenario: Scenario, crew: Crew, folder: Path, requests: int, settings: Settings) -> None:
        self.scenario, self._folder, self._requests, self._settings = scenario, folder, requests, settings
        self._waiting = list(crew.members)
        (folder / "store").mkdir()
        self._life = -1
        self._members: list[Member] = []
        self._truth: Truth = {}
        self.alone = Transformer(scenario.model, ModelShard.of_rank(scenario.model, 1, 1, 0, 0), Alone())

    def serve(self, number: int, prompt: tuple[int, ...], answer_tokens: int) -> RequestReport:
        """Ask the fleet whose turn it is, and compare."""
        fleet = self._fleet(number)
        name = f"{self.scenario.name}-{number}"
        served: list[Served] = ask_all(self._members, "serve", name, prompt, answer_tokens)
        first = served[0]
        self.alone.gaps.clear()
        expected = self.alone.generate(prompt, answer_tokens, ContiguousCache())
        near = all(abs(a - b) < GAP_TOLERANCE for a, b in zip(first.gaps, self.alone.gaps, strict=True))
        tokens, page_tokens = (*prompt, *first.answer[:-1]), fleet.fleet.page_tokens
        same = all(self._same(tokens, page_tokens, each.restored) for each in served)
        for each in served:
            self._learn(tokens, page_tokens, each.kept)
        alike = all((each.answer, each.hits) == (first.answer, first.hits) for each in served)
        hit, wire = first.restored_tokens, _wire(served)
        return RequestReport(name, len(prompt), hit, first.answer, expected, near and alike, same, wire, first.hits)

    def close(self) -> None:
        if self._members:
            ask_all(self._members, "close")

    def _fleet(self, number: int) -> FleetText:
        """The fleet that serves request `number`, seated; the one before it ends when it does."""
        lives = self.scenario.lives
        life = number * len(lives) // max(self._requests, len(lives))
        fleet = lives[life]
        if life != self._life:
            self.close()
            size = fleet.fleet.size
            self._life, self._members, self._waiting = life, self._waiting[:size], self._waiting[size:]
            meet, root = str(self._folder / f"life-{life}"), str(self._folder / "store")
            pages = POOL_TOKENS // fleet.fleet.page_tokens
            seats = [TieredSeat(self.scenario, fleet, rank, pages, meet, root, self._settings) for rank in range(size)]
            ask(self._members, "seat", [(seat,) for seat in seats])
        return fleet

    def _same(self, tokens: Sequence[int], page_tokens: int, rows: Digests) -> bool:
        return all(
            self._truth.get(place) == digest for place, digest in self._places(tokens, page_tokens, rows).items()
        )

    def _learn(self, tokens: Sequence[int], page_tokens: int, rows: Digests) -> None:
        for place, digest in self._places(tokens, page_tokens, rows).items():
            self._truth.setdefault(place, digest)

    def _places(self, tokens: Sequence[int], page_tokens: int, rows: Digests) -> Truth:
        layers, places = self.scenario.model.layers, Truth()
        for (number, plane, head), digest in rows.items():
            page, layer = divmod(number, layers)
            places[tuple(tokens[: (page + 1) * page_tokens]), layer, plane, head] = digest
        return places


def _wire(served: Sequence[Served]) -> Wire:
    """What was read from the store, by all ranks; the slowest rank counts."""
    return Wire(
        nbytes=sum(each.read_bytes for each in served),
        legs=sum(each.read_pages > 0 for each in served),
        descriptors_direct=0,
        descriptors_packed=sum(each.read_pages for each in served),
        routes=["storage"],
        seconds=max(each.seconds for each in served),
        sent_bytes=[each.read_bytes for each in served],
    )
