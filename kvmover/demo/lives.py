"""Lives are fleets of the demo that live one after another over a page store: they keep KV for each other.

Over a keeper each is killed, with SIGKILL, when the next one is to come.

What is restored is compared row by row with what some rank computed.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvmover.config.settings import Settings
from kvmover.demo.keeper import DemoKeeper
from kvmover.demo.model import Alone, ContiguousCache, ModelShard, Transformer
from kvmover.demo.processes import Crew, Member, ask, ask_all
from kvmover.demo.rank import Digests, Served, TieredSeat
from kvmover.demo.report import RequestReport, Wire
from kvmover.demo.scenarios import GAP_TOLERANCE, Scenario
from kvmover.plan.fleet_text import FleetText
from kvmover.store import Namespace, PageStore

#: Pages for this many tokens in every pool.
LIFE_POOL_TOKENS = 4096

#: What a row must be, by the tokens up to its page's end and its place in the model.
Truth = dict[tuple[tuple[int, ...], int, int, int], str]


class Lives:
    """A stage whose requests are dealt to its fleets in their order: each is gone before the next begins."""

    def __init__(
        self, scenario: Scenario, crew: Crew, folder: Path, root: Path | str, requests: int, settings: Settings
    ) -> None:
        """`folder`: where a fleet meets. `root`: where their page store is, whose pages are deleted at the end."""
        self.scenario, self._folder, self._root = scenario, folder, root
        self._keeper = DemoKeeper(folder, scenario.keeper_bytes) if scenario.keeper_bytes else None
        self._requests, self._settings, self._run = requests, settings, uuid.uuid4().hex[:8]
        self._waiting = list(crew.members)
        self._life = -1
        self._members: list[Member] = []
        self._spaces = set[Namespace]()
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
        """End the fleet that lives, if one does, and delete what all stored."""
        self._end()
        if self._keeper:
            self._keeper.close()
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

    def _fleet(self, number: int) -> FleetText:
        """The fleet that serves request `number`, seated; the one before it ends when it does."""
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
