"""English: a stage whose fleets answer questions by a trained model, and whose moved KV is measured in perplexity."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path

from rich.text import Text

from kvmover import vocabulary
from kvmover.config.settings import Settings
from kvmover.plan.fleet_text import FleetText
from kvmover.tools.demo.crew import Crew, ask, ask_all
from kvmover.tools.demo.demo_engine import Asked, Engine, moved_on, serve
from kvmover.tools.demo.demo_report import RequestReport
from kvmover.tools.demo.migrations import Migrations
from kvmover.tools.demo.perplexity import Perplexity
from kvmover.tools.demo.scenarios import Scenario
from kvmover.tools.demo.smollm2 import Tongue, unpack

#: Time of the kill after the last answer begins to move, s.
KILL_AFTER_S = 0.1

#: Scored tokens: the KV of the first half is computed on one fleet, and the second half on the fleet that it moved to.
SCORED_TOKENS = 2000


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the tokens of its answer with the end, and how many are computed before it moves."""

    text: str
    tokens: int
    cut: int = 0


#: One is answered by two fleets, one migrates in mid-sentence, one outlives its source.
QUESTIONS = (
    Question("What is the capital of France?", 8),
    Question("Why do leaves fall in autumn? Answer in two sentences.", 27, 8),
    Question("What is a computer? Answer in one sentence.", 19, 6),
)

_SOURCE, _TARGET = "tp=1,page=16,order=NHD", "tp=1,page=64,order=HND"

#: Moves whose perplexity is measured: name, title, fleets, and if every bit has to stay.
MOVES = (
    ("moved", "KV of TP1 moved to another process, page size and order", _SOURCE, _TARGET, True),
    ("another TP", "KV of TP3, whose ranks add up float32 in another order", "tp=3,page=16,order=NHD", _TARGET, False),
    ("fp8", "KV moved to fp8, a conversion with loss", _SOURCE, f"{_TARGET},dtype=fp8_e4m3", False),
)


class English:
    """A stage of two fleets that live together, over weights unpacked from installed packages."""

    def __init__(self, scenario: Scenario, crew: Crew, folder: Path, settings: Settings) -> None:
        weights = unpack(folder / "weights")
        model = replace(scenario.model, checkpoint=str(weights / "model.safetensors"))
        self.scenario = replace(scenario, model=model)
        self._tongue = Tongue.of(weights)
        self._crew, self._folder, self._settings = crew, folder, settings
        self._pair = Migrations(self.scenario, crew.members, folder, 0, settings)
        self._living = [*self._pair.src.members, *self._pair.dst.members]

    def serve(self, number: int, prompt: tuple[int, ...], answer_tokens: int) -> RequestReport:
        """Answer the question of this number, each in another way, and compare. The other arguments are unused."""
        question, pair = QUESTIONS[number], self._pair
        prompt = self._tongue.asked(question.text)
        if number == 0:
            asked = Asked(f"{self.scenario.name}-0", prompt, question.tokens)
            report = serve(self.scenario, pair.src, pair.dst, pair.alone, asked)
        elif number == 1:
            report = pair.migrated(number, prompt, question.tokens, question.cut)
        else:
            report = pair.outlived(number, prompt, question.tokens, question.cut, KILL_AFTER_S)
            self._living = list(pair.dst.members)
        text, expected = (self._tongue.text(answer) for answer in (report.answer, report.expected))
        return replace(report, question=question.text, text=text, expected_text=expected)

    def perplexities(self) -> tuple[Perplexity, ...]:
        """Measure every move over a text of the project's own, kvmover/vocabulary.py."""
        self.close()
        self._crew.renew()
        tokens = self._tongue.tokens(inspect.getsource(vocabulary))[: SCORED_TOKENS + 1]
        in_place, found = list[float](), list[Perplexity]()
        for name, title, src, dst, exact in MOVES:
            stayed, moved = self._scored(name.replace(" ", "-"), src, dst, tokens, in_place)
            in_place = in_place or stayed
            found.append(Perplexity.of(name, title, exact, in_place, moved))
        return tuple(found)

    def _scored(
        self, name: str, src: str, dst: str, tokens: tuple[int, ...], known: list[float]
    ) -> tuple[list[float], list[float]]:
        """Score a text on one fleet, and from its middle on another too.

        Returns the surprises in place, empty where some are `known`, and those of the half before and after the move.
        """
        fleets, half = (FleetText.parse(src), FleetText.parse(dst)), len(tokens) // 2
        scenario = replace(self.scenario, name=f"{self.scenario.name}-{name}", src=fleets[0], dst=fleets[1], lossy=0.1)
        members, at, engines = self._crew.members, 0, list[Engine]()
        for side, fleet in zip(("source", "target"), fleets, strict=True):
            engines.append(Engine(f"{name}-{side}", members[at : at + fleet.fleet.size], fleet))
            seats = engines[-1].seats(scenario, self._folder, self._settings, "cpu", at)
            at += fleet.fleet.size
            for member, seat in zip(engines[-1].members, seats, strict=True):
                member.tell("seat", seat)
        for member in members[:at]:
            member.answer()
        source, target = engines
        ask_all(target.members, "connect", ask_all(source.members, "card"))
        pages = [engine.take(len(tokens)) for engine in engines]
        early: list[float] = ask_all(source.members, "score", tokens[: half + 1], 0, pages[0])[0]
        moved_on(source, target, scenario.name, range(half), pages[0], pages[1])
        told = [*target.members] if known else [*target.members, *source.members]
        late = ask(told, "score", [(tokens, half, pages[0 if each in source.members else 1]) for each in told])
        ask_all(members[:at], "close")
        return ([] if known else [*early, *late[-1]]), [*early, *late[0]]

    def close(self) -> None:
        """End the fleets that live."""
        ask_all(self._living, "close")
        self._living = []


def shown(scenario: Scenario, report: RequestReport) -> Text:
    """Returns a question, its answer by both fleets, and that of one process."""
    src, dst = (f"TP{each.fleet.tp}, pages of {each.fleet.page_tokens}, {each.order}" for each in scenario.fleets)
    killed = f", killed after {report.source_tokens} tokens" if report.tries > 1 else ""
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
