"""Migrations: a stage of the demo whose answers begin on one fleet and continue on another, moved while they grow."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from kvmover.config.settings import Settings
from kvmover.migrate import Migration, Party
from kvmover.tools.demo.crew import Member, ask, ask_all
from kvmover.tools.demo.demo_engine import Engine
from kvmover.tools.demo.demo_report import RequestReport, Wire
from kvmover.tools.demo.migrating_rank import AnswerShare, MigratingSeat
from kvmover.tools.demo.model import Alone, ContiguousCache, ModelShard, Transformer
from kvmover.tools.demo.rank import Digests
from kvmover.tools.demo.scenarios import Scenario


class Migrations:
    """A stage of two fleets that live together. Each answer begins to move at a random token."""

    def __init__(
        self, scenario: Scenario, members: Sequence[Member], folder: Path, seed: int, settings: Settings
    ) -> None:
        sizes = scenario.src.fleet.size, scenario.dst.fleet.size
        self.scenario, self._random = scenario, Random(f"cuts {seed}")
        self.src = Engine("leaving", members[: sizes[0]], scenario.src)
        self.dst = Engine("joining", members[sizes[0] : sum(sizes)], scenario.dst)
        seats = [
            seat
            for each, first_port in ((self.src, 0), (self.dst, sizes[0]))
            for seat in each.seats(scenario, folder, settings, "cpu", first_port, MigratingSeat)
        ]
        everyone = [*self.src.members, *self.dst.members]
        ask(everyone, "seat", [(seat,) for seat in seats])
        ask_all(self.dst.members, "connect", ask_all(self.src.members, "card"))
        self.alone = Transformer(scenario.model, ModelShard.of_rank(scenario.model, 1, 1, 0, 0), Alone())

    def close(self) -> None:
        """End both fleets; their processes can be seated again."""
        ask_all([*self.src.members, *self.dst.members], "close")

    def serve(self, number: int, prompt: tuple[int, ...], answer_tokens: int) -> RequestReport:
        """Compute an answer on both fleets, and compare. The scenario sets its length, not `answer_tokens`."""
        length = self.scenario.answer_tokens
        return self.migrated(number, prompt, length, self._random.randrange(length // 2))

    def migrated(self, number: int, prompt: tuple[int, ...], length: int, cut: int) -> RequestReport:
        """Compute an answer of `length` tokens, which begins to move after the first and `cut` more; compare."""
        name = f"{self.scenario.name}-{number}"
        src_pages, dst_pages = (engine.take(len(prompt) + length) for engine in (self.src, self.dst))
        first, gap = ask_all(self.src.members, "prefill", prompt, src_pages)[0]
        early, gaps = ask_all(self.src.members, "decode", first, len(prompt), cut, src_pages)[0]
        answer, gaps = [first, *early], [gap, *gaps]
        source, target = (Party(engine.name, len(engine.members)) for engine in (self.src, self.dst))
        migration = Migration(name, number, source, target, len(prompt) + cut, json.dumps(answer).encode())
        left, came = self.move(migration, answer, length, src_pages, dst_pages)
        gaps += left[0].gaps
        owner, pages = (self.dst, dst_pages) if came[0].goes_on else (self.src, src_pages)
        answer = (came if came[0].goes_on else left)[0].answer
        tokens = len(prompt) + len(answer) - 1
        same = self._same(tokens if came[0].goes_on else 0, src_pages, dst_pages)
        rest, more = ask_all(owner.members, "decode", answer[-1], tokens, length - len(answer), pages)[0]
        self.src.free += src_pages
        self.dst.free += dst_pages
        self.alone.gaps.clear()
        expected = self.alone.generate(prompt, length, ContiguousCache())
        moved_by = max(abs(a - b) for a, b in zip([*gaps, *more], self.alone.gaps, strict=True))
        agree = moved_by < self.scenario.gap_tolerance and left[0].goes_on != came[0].goes_on
        wire = _wire(left, came)
        here = len(answer) if came[0].goes_on else length
        return RequestReport(
            name, len(prompt), 0, [*answer, *rest], expected, agree, same, wire, gaps_moved=moved_by, source_tokens=here
        )

    def outlived(
        self, number: int, prompt: tuple[int, ...], length: int, cut: int, kill_after_s: float
    ) -> RequestReport:
        """Compute an answer whose source is killed with SIGKILL as it moves; the other fleet goes on, and compares.

        Rows that had not landed are computed again. The source's pages and processes are gone.
        """
        name = f"{self.scenario.name}-{number}"
        src_pages, pages = (engine.take(len(prompt) + length) for engine in (self.src, self.dst))
        first, _ = ask_all(self.src.members, "prefill", prompt, src_pages)[0]
        early, _ = ask_all(self.src.members, "decode", first, len(prompt), cut, src_pages)[0]
        source, target = (Party(engine.name, len(engine.members)) for engine in (self.src, self.dst))
        begun = [first, *early]
        migration = Migration(name, number, source, target, len(prompt) + cut, json.dumps(begun).encode())
        for member in self.dst.members:
            member.tell("arrive", migration, pages)
        for member in self.src.members:
            member.tell("depart", migration, begun, length - len(begun), src_pages)
        time.sleep(kill_after_s)
        for member in self.src.members:
            member.process.kill()
        came: list[AnswerShare] = [member.answer() for member in self.dst.members]
        answer = came[0].answer
        tokens, source_tokens = (*prompt, *answer[:-1]), len(answer)
        if came[0].tokens < len(tokens):
            ask_all(self.dst.members, "catch_up", tokens, came[0].tokens, pages)
        rest, _ = ask_all(self.dst.members, "decode", answer[-1], len(tokens), length - len(answer), pages)[0]
        self.dst.free += pages
        expected = self.alone.generate(prompt, length, ContiguousCache())
        wire, whole = _wire([], came), [*answer, *rest]
        return RequestReport(
            name, len(prompt), 0, whole, expected, True, True, wire, tries=2, source_tokens=source_tokens
        )

    def move(
        self, migration: Migration, answer: list[int], length: int, src_pages: list[int], dst_pages: list[int]
    ) -> tuple[list[AnswerShare], list[AnswerShare]]:
        """Move on both fleets in parallel, until each knows the request's owner.

        Returns the source and destination shares.
        """
        for member in self.src.members:
            member.tell("depart", migration, answer, length - len(answer), src_pages)
        came: list[AnswerShare] = ask_all(self.dst.members, "arrive", migration, dst_pages)
        return [member.answer() for member in self.src.members], came

    def _same(self, tokens: int, src_pages: list[int], dst_pages: list[int]) -> bool:
        """True if each rank holds every moved row unchanged."""
        sent: list[Digests] = ask_all(self.src.members, "digests", src_pages, tokens)
        landed: list[Digests] = ask_all(self.dst.members, "digests", dst_pages, tokens)
        truth = {place: digest for each in sent for place, digest in each.items()}
        return all(truth[place] == digest for each in (*sent, *landed) for place, digest in each.items())


def _wire(left: list[AnswerShare], came: list[AnswerShare]) -> Wire:
    """Sum all rounds of all ranks. The time is that of the slowest rank's rounds, while the answer grew."""
    results = [result for share in came for result in share.results]
    return Wire(
        nbytes=sum(result.nbytes for result in results),
        legs=sum(result.peers for result in results),
        descriptors_direct=sum(result.runs for result in results),
        descriptors_packed=sum(result.writes for result in results),
        routes=sorted({route.value for result in results for route in result.routes}),
        seconds=max((sum(result.seconds for result in share.results) for share in came), default=0.0) or 1e-6,
        sent_bytes=[sum(result.nbytes for result in share.results) for share in left],
    )
