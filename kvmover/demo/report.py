"""The demo reports what it found as values, as JSON, as tables, and as one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from kvmover.demo.scenarios import Scenario
from kvmover.observe.tables import Column, Sheet
from kvmover.transport import nixl_version


@dataclass(frozen=True, slots=True)
class Wire:
    """What a request cost on the wire. `legs`: pairs of ranks that moved anything; `sent_bytes`: by source rank."""

    nbytes: int
    legs: int
    descriptors_direct: int
    descriptors_packed: int
    routes: list[str]
    seconds: float
    sent_bytes: list[int]

    @classmethod
    def of(cls, sent: Sequence[Any], landed: Sequence[Any]) -> Wire:
        """From the (result, digests) of every rank. The slowest destination rank counts."""
        results = [result for result, _ in landed]
        return cls(
            sum(result.nbytes for result in results),
            sum(result.peers for result in results),
            sum(result.runs for result in results),
            sum(result.writes for result in results),
            sorted({route.value for result in results for route in result.routes}),
            max(result.seconds for result in results),
            [result.nbytes for result, _ in sent],
        )

    @property
    def gb_per_s(self) -> float:
        """Payload over the time of the slowest rank, in 10^9 bytes a second."""
        return self.nbytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One request: what was there already, what moved, what was answered, and what should have been."""

    name: str
    prompt_tokens: int
    hit_tokens: int
    answer: list[int]
    expected: list[int]
    gaps_agree: bool
    bytes_identical: bool
    wire: Wire
    #: Hits by tier, as the fleet's ledger has them; nothing where the decode fleet's tree alone was asked.
    hits: dict[str, int] = field(default_factory=dict[str, int])
    #: How far the gap of a logit to the second best moved at most, over so many tokens (None: all). Fewer where a cache
    #: that loses something decided between two that were nearly as good.
    gaps_moved: float = 0.0
    compared: int | None = None
    #: How often it was asked: once, and again for each engine that died of it.
    tries: int = 1

    @property
    def tokens_identical(self) -> bool:
        """The text, and how clearly each of its tokens won: a wrong row may keep the text but not the logits."""
        return self.answer[: self.compared] == self.expected[: self.compared] and self.gaps_agree


@dataclass(frozen=True, slots=True)
class ScenarioReport:
    """All requests of a scenario."""

    name: str
    title: str
    requests: list[RequestReport]
    lossy: float = 0.0

    @classmethod
    def of(cls, scenario: Scenario, requests: list[RequestReport]) -> ScenarioReport:
        """Of all requests that a scenario served."""
        return cls(scenario.name, scenario.title, requests, scenario.lossy)

    def loss(self) -> str:
        """What a form that loses something did to the answers; empty where nothing is lost."""
        if not self.lossy or not self.requests:
            return ""
        moved = max(request.gaps_moved for request in self.requests)
        other = sum(r.compared is not None and r.compared < len(r.answer) for r in self.requests)
        ties = f", which decided {other} near ties otherwise" if other else ""
        return (
            f"every byte is as the definition converts it; a number may be off by {self.lossy:.3g} of itself, and the"
            f" gap from a token's logit to the next moved by {moved:.2g} at most{ties}"
        )


@dataclass(frozen=True, slots=True)
class RunReport:
    """The whole run."""

    scenarios: list[ScenarioReport]
    seconds: float
    nixl_version: str
    nixl_backend: str = "UCX"

    @classmethod
    def of(cls, scenarios: list[ScenarioReport], seconds: float) -> RunReport:
        """With the release of NIXL that carried it."""
        return cls(scenarios, seconds, nixl_version())

    @property
    def requests(self) -> list[RequestReport]:
        """Those of all scenarios, in their order."""
        return [request for scenario in self.scenarios for request in scenario.requests]

    @property
    def tokens_identical(self) -> bool:
        """False of no requests at all: nothing was shown."""
        return bool(self.requests) and all(request.tokens_identical for request in self.requests)

    @property
    def bytes_identical(self) -> bool:
        """False of no requests at all."""
        return bool(self.requests) and all(request.bytes_identical for request in self.requests)

    @property
    def identical(self) -> bool:
        """Whether all tokens and all bytes are those of the one-process model."""
        return self.tokens_identical and self.bytes_identical

    def sentence(self) -> str:
        """What happened, in words."""
        answers = sum(len(r.answer) if r.compared is None else r.compared for r in self.requests)
        exactly = "bit for bit" + ", or as its conversion is defined," * any(each.lossy for each in self.scenarios)
        wired = [request for request in self.requests if not request.hits]
        moved = sum(request.wire.nbytes for request in wired)
        hits = sum(request.hit_tokens for request in wired)
        stored = sum(request.hits.get("storage", 0) for request in self.requests)
        read = f" Fleets that started empty read {stored} prompt tokens from the page store." if stored else ""
        again = sum(request.tries > 1 for request in self.requests)
        died = f" {again} of them outlived an engine that was killed." if again else ""
        wrong = [r.name for r in self.requests if not (r.tokens_identical and r.bytes_identical)]
        if not self.requests:
            return "FAILED: there was no request to serve"
        if wrong:
            return f"FAILED: {len(wrong)} of {len(self.requests)} requests differ from the one-process model: {wrong}"
        plural = "" if len(self.scenarios) == 1 else "s"
        sent = (
            f": {moved / 1e6:.1f} MB of KV moved {exactly} between fleets of different shape over"
            f" NIXL {self.nixl_version} ({self.nixl_backend}), {hits} prompt tokens were there already and not sent"
            " again"
        )
        return (
            f"All {answers} tokens of {len(self.requests)} requests in {len(self.scenarios)} scenario{plural} are those"
            f" of the one-process model{sent if wired else ''}, in {self.seconds:.0f} s.{died}{read}"
        )

    def as_data(self) -> dict[str, Any]:
        """The JSON contract of `kvmover demo --json`."""
        return {
            "tokens_identical": self.tokens_identical,
            "bytes_identical": self.bytes_identical,
            "nixl": {"version": self.nixl_version, "backend": self.nixl_backend},
            "seconds": self.seconds,
            "scenarios": [
                {
                    "name": scenario.name,
                    "title": scenario.title,
                    "tokens_identical": all(r.tokens_identical for r in scenario.requests),
                    "bytes_identical": all(r.bytes_identical for r in scenario.requests),
                    "lossy": scenario.lossy,
                    "requests": [_request_data(request) for request in scenario.requests],
                }
                for scenario in self.scenarios
            ],
            "summary": self.sentence(),
        }


def _request_data(request: RequestReport) -> dict[str, Any]:
    data = asdict(request)
    wire = data.pop("wire")
    wire["bytes"] = wire.pop("nbytes")
    return {
        **data,
        "moved_tokens": request.hits.get("storage", request.prompt_tokens - request.hit_tokens),
        "tokens_identical": request.tokens_identical,
        **wire,
        "gb_per_s": request.wire.gb_per_s,
    }


_COLUMNS = (
    *(Column(heading) for heading in ("#", "prompt", "hits", "bytes", "legs", "direct", "packed")),
    Column("route", "left"),
    *(Column(heading) for heading in ("ms", "GB/s")),
    Column("tokens", "left"),
)


def show(report: RunReport, console: Console) -> None:
    """One table a scenario, then the sentence."""
    for scenario in report.scenarios:
        console.print(f"{scenario.name}: {scenario.title}", style="bold")
        table = Sheet(_COLUMNS)
        for number, r in enumerate(scenario.requests):
            same = r.tokens_identical and r.bytes_identical
            table.add(
                str(number),
                str(r.prompt_tokens),
                str(r.hit_tokens),
                f"{r.wire.nbytes:,}",
                str(r.wire.legs),
                f"{r.wire.descriptors_direct:,}",
                f"{r.wire.descriptors_packed:,}",
                "+".join(r.wire.routes) or "none",
                f"{r.wire.seconds * 1e3:.1f}",
                f"{r.wire.gb_per_s:.3f}",
                Text(f"{len(r.answer)} same", "green") if same else Text(f"{len(r.answer)} DIFFER", "red"),
            )
        console.print(table)
        console.print(scenario.loss(), soft_wrap=True)
    console.print(
        "direct, packed: descriptors that either route posts. ms: from asking to landed, on the slowest rank."
    )
    console.print(report.sentence(), style="bold green" if report.identical else "bold red", soft_wrap=True)
