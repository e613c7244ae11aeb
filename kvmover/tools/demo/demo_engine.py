"""An Engine is a fleet of the demo as its scheduler sees it: one engine prefills a request, another continues it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmover.cache.prefix import PrefixTree
from kvmover.config.settings import Settings
from kvmover.errors import KvmoverError
from kvmover.plan.fleet_text import FleetText
from kvmover.tools.demo.crew import CrewError, Member, ask, ask_all, hear
from kvmover.tools.demo.demo_report import RequestReport, Wire
from kvmover.tools.demo.model import ContiguousCache, Transformer
from kvmover.tools.demo.rank import Digests, Seat
from kvmover.tools.demo.scenarios import Scenario

#: Tokens of every pool: the prompts of a run, kept for later turns.
POOL_TOKENS = 16384


class Engine:
    """A fleet's seated processes, free pages, and cached prefixes."""

    def __init__(self, name: str, members: Sequence[Member], fleet: FleetText) -> None:
        self.name, self.members, self.fleet = name, members, fleet
        self.page_tokens = fleet.fleet.page_tokens
        self.pages = POOL_TOKENS // self.page_tokens
        self.free = list(range(self.pages))
        random.Random(name).shuffle(self.free)  # a request's pages are not adjacent in the pool
        self.tree = PrefixTree(self.page_tokens)

    def seats(
        self,
        scenario: Scenario,
        folder: Path,
        settings: Settings,
        device: str,
        first_port: int,
        kind: type[Seat] = Seat,
    ) -> list[Seat]:
        """Returns the seats of its processes, by rank."""
        meet = str(folder / self.name)
        ranks = range(len(self.members))
        return [
            kind(scenario, self.name, self.fleet, rank, self.pages, meet, settings, first_port, device)
            for rank in ranks
        ]

    def take(self, tokens: int) -> list[int]:
        """Take pages for `tokens` tokens, evicting the oldest prefixes if necessary. Raises KvmoverError if too few."""
        count = -(-tokens // self.page_tokens)
        if count > len(self.free):
            self.free += self.tree.evict(count - len(self.free)).page_ids().tolist()
        if count > len(self.free):
            raise KvmoverError(f"{self.name}: {tokens} tokens do not fit {self.pages} pages of {self.page_tokens}")
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def keep(self, tokens: list[int], pages: list[int]) -> None:
        """Cache the whole pages of `tokens`; free the rest, and duplicates of pages that the tree has."""
        whole = len(tokens) // self.page_tokens
        kept = self.tree.insert(tokens, pages[:whole])
        self.free += [*kept.page_ids().tolist(), *pages[whole:]]


def pair(
    scenario: Scenario,
    members: Sequence[Member],
    folder: Path,
    settings: Settings,
    names: tuple[str, str] = ("prefill", "decode"),
    kind: type[Seat] = Seat,
    device: str = "cpu",
) -> tuple[Engine, Engine]:
    """Seat a scenario's two fleets on the first of `members`, and connect the second with the first."""
    engines, seats = list[Engine](), list[tuple[Seat]]()
    for name, fleet in zip(names, (scenario.src, scenario.dst), strict=True):
        at = len(seats)
        engines.append(Engine(name, members[at : at + fleet.fleet.size], fleet))
        seats += [(seat,) for seat in engines[-1].seats(scenario, folder, settings, device, at, kind)]
    ask(members[: len(seats)], "seat", seats)
    src, dst = engines
    ask_all(dst.members, "connect", ask_all(src.members, "card"))
    return src, dst


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its unique name, its prompt, and its number of answer tokens."""

    name: str
    prompt: tuple[int, ...]
    answer_tokens: int


def serve(scenario: Scenario, src: Engine, dst: Engine, alone: Transformer, asked: Asked) -> RequestReport:
    """Prefill on `src`, move the tokens that `dst` lacks, decode there, and compare with `alone`.

    Raises CrewError if either engine died; the pages taken stay taken, for late writes may still touch them.
    """
    prompt, answer_tokens = asked.prompt, asked.answer_tokens
    match = dst.tree.match(prompt)
    receipt = dst.tree.lock(match.device_node)
    try:
        src_pages = src.take(len(prompt))
        dst_pages = [*match.page_ids.tolist(), *dst.take(len(prompt) + answer_tokens - match.tokens)]
        moved = range(match.tokens, len(prompt))
        first, gap = ask_all(src.members, "prefill", prompt, src_pages)[0]
        sent, landed = moved_on(src, dst, asked.name, moved, src_pages, dst_pages)
        rest, gaps = ask_all(dst.members, "decode", first, len(prompt), answer_tokens - 1, dst_pages)[0]
    except CrewError:
        dst.tree.unlock(receipt)
        raise
    src.free += src_pages
    answer = [first, *rest]
    dst.keep([*prompt, *answer[:-1]], dst_pages)
    dst.tree.unlock(receipt)
    alone.gaps.clear()
    expected = alone.generate(prompt, answer_tokens, ContiguousCache())
    moved_by, compared = _gaps_moved(answer, [gap, *gaps], expected, alone.gaps, scenario.gap_tolerance)
    same = same_rows([rows for _, rows in sent], [rows for _, rows in landed])
    near = moved_by < scenario.gap_tolerance
    return RequestReport(
        asked.name,
        len(prompt),
        match.tokens,
        answer,
        expected,
        near,
        same,
        Wire.of(sent, landed),
        gaps_moved=moved_by,
        compared=compared,
    )


def moved_on(
    src: Engine, dst: Engine, name: str, moved: range, src_pages: list[int], dst_pages: list[int]
) -> tuple[list[Any], list[Any]]:
    """Move on both fleets in parallel. Returns (result, digests) of every source, and of every destination rank.

    Raises CrewError after hearing all ranks told.
    """
    told: list[Member] = []
    try:
        for member in dst.members:
            member.tell("receive", name, src.name, moved, dst_pages)
            told.append(member)
        for member in src.members:
            member.tell("send", name, src_pages, moved)
            told.append(member)
    except CrewError:
        with suppress(CrewError):  # the transfer failed; the cause is already being raised
            hear(told)
        raise
    heard = hear(told)
    return heard[len(dst.members) :], heard[: len(dst.members)]


def _gaps_moved(
    answer: list[int], gaps: list[float], expected: list[int], others: list[float], tolerance: float
) -> tuple[float, int]:
    """Returns the largest difference between the gaps of two answers, and the number of tokens compared.

    A gap below zero means another token wins, after which the texts differ: comparison stops there.
    """
    moved = 0.0
    for number, (token, gap, due, other) in enumerate(zip(answer, gaps, expected, others, strict=True)):
        if token != due and gap + other < tolerance:
            return max(moved, gap + other), number
        moved = max(moved, abs(gap - other))
    return moved, len(answer)


def same_rows(sent: Sequence[Digests], landed: Sequence[Digests]) -> bool:
    """True if every row of every destination rank equals that row on every source rank."""
    truth: dict[tuple[int, int, int], set[str]] = {}
    for digests in sent:
        for place, digest in digests.items():
            truth.setdefault(place, set()).add(digest)
    return all(truth[place] == {digest} for digests in landed for place, digest in digests.items())
