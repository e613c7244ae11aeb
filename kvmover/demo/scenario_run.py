"""A scenario runs on its fleets, request by request, against the model in one process.

`ScenarioRun`: two fleets that live together. `Lives`: fleets that live one after another over a page store, and keep KV
for each other, not for themselves. What is restored is compared row by row with what some rank computed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvmover.cache.prefix import PrefixTree
from kvmover.config.settings import Settings
from kvmover.demo.crew import Crew, Member, ask, ask_all
from kvmover.demo.model import Alone, ContiguousCache, ModelShard, Transformer
from kvmover.demo.rank import Digests, Seat
from kvmover.demo.report import RequestReport, Wire
from kvmover.demo.scenarios import Scenario
from kvmover.demo.tiered_rank import Served, TieredSeat
from kvmover.errors import KvmoverError
from kvmover.plan.fleet_text import FleetText

#: Pages for this many tokens in every pool: the prompts of a run, kept for later turns.
POOL_TOKENS = 16384

#: Logit gaps of two runs over the same rows differ by 1e-14; one wrong element moves them by far more than this.
GAP_TOLERANCE = 1e-9


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

    def __init__(self, scenario: Scenario, crew: Crew, folder: Path, settings: Settings) -> None:
        sizes = scenario.src.fleet.size, scenario.dst.fleet.size
        self.src = Engine("prefill", crew.members[: sizes[0]], scenario.src)
        self.dst = Engine("decode", crew.members[sizes[0] : sum(sizes)], scenario.dst)
        self.scenario = scenario
        seats = [
            Seat(scenario, engine.name, engine.fleet, rank, engine.pages, str(folder / engine.name), settings, ports)
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
        near = all(abs(a - b) < GAP_TOLERANCE for a, b in zip([gap, *gaps], self.alone.gaps, strict=True))
        return RequestReport(
            name, len(prompt), match.tokens, answer, expected, near, _same_bytes(sent, landed), Wire.of(sent, landed)
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


def _same_bytes(sent: list[Any], landed: list[Any]) -> bool:
    """Whether every row that any destination rank holds is the row that every source rank had."""
    truth: dict[tuple[int, int, int], set[str]] = {}
    for _, digests in sent:
        for place, digest in digests.items():
            truth.setdefault(place, set()).add(digest)
    return all(truth[place] == {digest} for _, digests in landed for place, digest in digests.items())


#: The same of fleets that live one after another.
LIFE_POOL_TOKENS = 4096

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
        """End the fleet that lives, if one does."""
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
            pages = LIFE_POOL_TOKENS // fleet.fleet.page_tokens
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
