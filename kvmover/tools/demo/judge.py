"""A Judge compares answers and restored rows of demo fleets with the model in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmover.tools.demo.demo_report import RequestReport, Wire
from kvmover.tools.demo.model import ContiguousCache, Transformer
from kvmover.tools.demo.rank import Digests
from kvmover.tools.demo.scenarios import GAP_TOLERANCE, Scenario
from kvmover.tools.demo.tiered_rank import Served

#: A row's place: all tokens up to its unit's end, layer, plane and head.
RowPlace = tuple[tuple[int, ...], int, int, int]


@dataclass(slots=True)
class Judge:
    """The one-process model, and every row computed by any rank: rows of different TP differ in the last bits."""

    scenario: Scenario
    alone: Transformer
    _truth: dict[RowPlace, set[str]] = field(default_factory=dict[RowPlace, set[str]])

    @classmethod
    def of(cls, scenario: Scenario) -> Judge:
        """Make a judge that knows no rows."""
        return cls(scenario, Transformer.alone(scenario.model))

    def report(self, number: int, prompt: tuple[int, ...], answer_tokens: int, served: list[Served]) -> RequestReport:
        """Compare the results of all ranks of a fleet for a request, and learn their rows."""
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


def _wire(served: Sequence[Served], route: str) -> Wire:
    """Sum the reads from the store or a peer, over all ranks; the time is the slowest rank's."""
    return Wire(
        nbytes=sum(each.read_bytes for each in served),
        legs=sum(each.read_pages > 0 for each in served),
        descriptors_direct=0,
        descriptors_packed=sum(each.read_pages for each in served),
        routes=[route],
        seconds=max(each.seconds for each in served),
        sent_bytes=[each.read_bytes for each in served],
    )
