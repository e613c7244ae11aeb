"""Migrations: a stage of the demo whose answers begin on one fleet and continue on another, moved while they grow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from kvmover.config.settings import Settings
from kvmover.migrate import Migration, Party
from kvmover.tools.demo.crew import Member, ask_all
from kvmover.tools.demo.demo_engine import Engine, pair, same_rows
from kvmover.tools.demo.demo_report import RequestReport, Wire
from kvmover.tools.demo.migrating_rank import AnswerShare, MigratingSeat
from kvmover.tools.demo.model import ContiguousCache, Transformer
from kvmover.tools.demo.rank import Digests
from kvmover.tools.demo.scenarios import Scenario

#: Tokens that the last round lacks when its source is killed: it never lands.
UNFINISHED_TOKENS = 1


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer of `length` tokens that is to move: its first tokens and their gaps, and its pages on both fleets."""

    migration: Migration
    prompt: tuple[int, ...]
    length: int
    answer: list[int]
    gaps: list[float]
    src_pages: list[int]
    dst_pages: list[int]


class Migrations:
    """A stage of two fleets that live together. Each answer begins to move at a random token."""

    def __init__(
        self,
        scenario: Scenario,
        members: Sequence[Member],
        folder: Path,
        seed: int,
        settings: Settings,
        device: str = "cpu",
    ) -> None:
        self.scenario, self._random = scenario, Random(f"cuts {seed}")
        self.src, self.dst = pair(scenario, members, folder, settings, ("leaving", "joining"), MigratingSeat, device)
        self.alone = Transformer.alone(scenario.model)

    def close(self) -> None:
        """End both fleets; their processes can be seated again."""
        ask_all([*self.src.members, *self.dst.members], "close")

    def serve(self, number: int, prompt: tuple[int, ...], answer_tokens: int) -> RequestReport:
        """Compute an answer on both fleets, and compare. The scenario sets its length, not `answer_tokens`."""
        length = self.scenario.answer_tokens
        return self.migrated(number, prompt, length, self._random.randrange(length // 2))

    def migrated(self, number: int, prompt: tuple[int, ...], length: int, cut: int) -> RequestReport:
        """Compute an answer of `length` tokens, which begins to move after the first and `cut` more, and compare."""
        begun = self._begin(number, prompt, length, cut)
        self._tell(begun)
        came: list[AnswerShare] = [member.answer() for member in self.dst.members]
        left: list[AnswerShare] = [member.answer() for member in self.src.members]
        moved = came[0].goes_on
        owner, share = (self.dst, came[0]) if moved else (self.src, left[0])
        landed_tokens = came[0].tokens if moved else 0
        sent, landed = self._sent(begun, landed_tokens), self._landed(begun, landed_tokens)
        rest, more = self._rest(begun, owner, share.answer)
        self.src.free += begun.src_pages
        answer, gaps = [*share.answer, *rest], [*begun.gaps, *left[0].gaps, *more]
        report = self._report(begun, answer, gaps, _wire(left, came), same_rows(sent, landed))
        agree = report.gaps_agree and left[0].goes_on != moved
        return replace(report, gaps_agree=agree, source_tokens=len(share.answer) if moved else length)

    def outlived(self, number: int, prompt: tuple[int, ...], length: int, cut: int) -> RequestReport:
        """Compute an answer whose source is killed with SIGKILL in the middle of the last round, and compare.

        Rows of the rounds before have landed, and are compared with the source's; the target computes the others. The
        source's processes and pages are gone.
        """
        begun = self._begin(number, prompt, length, cut)
        self._tell(begun, UNFINISHED_TOKENS)
        left: list[AnswerShare] = [member.answer() for member in self.src.members]
        sent = self._sent(begun, left[0].landed_tokens)
        for member in self.src.members:
            member.process.kill()
        came: list[AnswerShare] = [member.answer() for member in self.dst.members]
        answer, landed_tokens = came[0].answer, came[0].tokens
        same = landed_tokens == left[0].landed_tokens > 0 and same_rows(sent, self._landed(begun, landed_tokens))
        tokens, again = (*prompt, *answer[:-1]), answer[-1:]
        if landed_tokens < len(tokens):
            again = ask_all(self.dst.members, "catch_up", tokens, landed_tokens, begun.dst_pages)
        rest, more = self._rest(begun, self.dst, answer)
        gaps = [*begun.gaps, *left[0].gaps][: len(answer)]
        report = self._report(begun, [*answer, *rest], [*gaps, *more], _wire([], came), same)
        agree = report.gaps_agree and came[0].goes_on and set(again) == {answer[-1]}
        return replace(report, gaps_agree=agree, source_tokens=len(answer), tries=2)

    def _begin(self, number: int, prompt: tuple[int, ...], length: int, cut: int) -> Begun:
        """Compute the prompt, the first token and `cut` more on the source."""
        src_pages, dst_pages = (engine.take(len(prompt) + length) for engine in (self.src, self.dst))
        first, gap = ask_all(self.src.members, "prefill", prompt, src_pages)[0]
        early, gaps = ask_all(self.src.members, "decode", first, len(prompt), cut, src_pages)[0]
        source, target = (Party(engine.name, len(engine.members)) for engine in (self.src, self.dst))
        answer, name = [first, *early], f"{self.scenario.name}-{number}"
        migration = Migration(name, number, source, target, len(prompt) + cut, json.dumps(answer).encode())
        return Begun(migration, prompt, length, answer, [gap, *gaps], src_pages, dst_pages)

    def _tell(self, begun: Begun, *until: int) -> None:
        """Tell both fleets to move the answer, in parallel."""
        for member in self.dst.members:
            member.tell("arrive", begun.migration, begun.dst_pages)
        for member in self.src.members:
            member.tell(
                "depart", begun.migration, begun.answer, begun.length - len(begun.answer), begun.src_pages, *until
            )

    def _sent(self, begun: Begun, tokens: int) -> list[Digests]:
        return ask_all(self.src.members, "digests", begun.src_pages, tokens)

    def _landed(self, begun: Begun, tokens: int) -> list[Digests]:
        return ask_all(self.dst.members, "digests", begun.dst_pages, tokens)

    def _rest(self, begun: Begun, owner: Engine, answer: list[int]) -> tuple[list[int], list[float]]:
        """Compute the tokens that `answer` lacks, and their gaps."""
        pages = begun.dst_pages if owner is self.dst else begun.src_pages
        at, count = len(begun.prompt) + len(answer) - 1, begun.length - len(answer)
        return ask_all(owner.members, "decode", answer[-1], at, count, pages)[0]

    def _report(self, begun: Begun, answer: list[int], gaps: list[float], wire: Wire, same: bool) -> RequestReport:
        """Compare an answer with that of one process, and free the target's pages."""
        self.dst.free += begun.dst_pages
        self.alone.gaps.clear()
        expected = self.alone.generate(begun.prompt, begun.length, ContiguousCache())
        apart = max(abs(a - b) for a, b in zip(gaps, self.alone.gaps, strict=True))
        agree = apart < self.scenario.gap_tolerance
        name = begun.migration.request
        return RequestReport(name, len(begun.prompt), 0, answer, expected, agree, same, wire, gaps_moved=apart)


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
