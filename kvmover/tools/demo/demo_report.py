"""The demo reports its results as values, as JSON, as tables, and as one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from kvmover.tools.demo.perplexity import Perplexity
from kvmover.tools.demo.scenarios import Scenario
from kvmover.tools.tables import Column, Sheet
from kvmover.transport import nixl_version


@dataclass(frozen=True, slots=True)
class Wire:
    """A request's cost on the wire. `legs`: pairs of ranks that moved bytes; `sent_bytes`: by source rank."""

    nbytes: int
    legs: int
    descriptors_direct: int
    descriptors_packed: int
    routes: list[str]
    seconds: float
    sent_bytes: list[int]

    @classmethod
    def of(cls, sent: Sequence[Any], landed: Sequence[Any]) -> Wire:
        """Sum the (result, digests) of all ranks; the time is the slowest destination rank's."""
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
        """Returns payload over the time of the slowest rank, in 10^9 bytes a second."""
        return self.nbytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class RequestReport:
    """A request: its cached and moved tokens, its answer, and the expected answer."""

    name: str
    prompt_tokens: int
    hit_tokens: int
    answer: list[int]
    expected: list[int]
    gaps_agree: bool
    bytes_identical: bool
    wire: Wire
    #: Hits by tier, from the fleet's ledger; empty if only the decode fleet's tree was asked.
    hits: dict[str, int] = field(default_factory=dict[str, int])
    #: Largest change of a logit's gap to the second best, over `compared` tokens (None: all). Fewer where a lossy cache
    #: decided a near tie differently.
    gaps_moved: float = 0.0
    compared: int | None = None
    #: Attempts: one, plus one for each engine that died of it.
    tries: int = 1
    #: Tokens of the answer that the first fleet computed, and the texts, if the model speaks a language.
    source_tokens: int = 1
    question: str = ""
    text: str = ""
    expected_text: str = ""

    @property
    def tokens_identical(self) -> bool:
        """True if all tokens are the one-process model's, and each won as clearly."""
        return self.answer == self.expected and self.gaps_agree

    @property
    def after_near_tie(self) -> int:
        """Returns the number of tokens from the first near tie decided differently."""
        return 0 if self.compared is None else len(self.answer) - self.compared

    @property
    def passed(self) -> bool:
        """True if every byte is right, and every token up to the first near tie.

        A wrong row may keep the text, but it changes how clearly each token won.
        """
        same = self.answer[: self.compared] == self.expected[: self.compared]
        return same and self.gaps_agree and self.bytes_identical


@dataclass(frozen=True, slots=True)
class ScenarioReport:
    """The report of a scenario: its requests, in order. `lossy`: largest relative error that its conversion of numbers
    may make, 0 if every byte is moved unchanged.
    """

    name: str
    title: str
    requests: list[RequestReport]
    lossy: float = 0.0
    #: Perplexities over moved KV, if the model speaks a language.
    perplexities: tuple[Perplexity, ...] = ()

    @classmethod
    def of(
        cls, scenario: Scenario, requests: list[RequestReport], perplexities: tuple[Perplexity, ...] = ()
    ) -> ScenarioReport:
        """Build the report of all requests that a scenario served."""
        return cls(scenario.name, scenario.title, requests, scenario.lossy, perplexities)

    def loss(self) -> str:
        """Describe the effect of a lossy form on the answers; empty if lossless."""
        if not self.lossy or not self.requests:
            return ""
        moved = max(request.gaps_moved for request in self.requests)
        other = sum(request.after_near_tie > 0 for request in self.requests)
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
        """Build the report, with the release of NIXL used."""
        return cls(scenarios, seconds, nixl_version())

    @property
    def requests(self) -> list[RequestReport]:
        """Returns the requests of all scenarios, in order."""
        return [request for scenario in self.scenarios for request in scenario.requests]

    @property
    def tokens_identical(self) -> bool:
        """True if all requests' tokens are identical; False without requests."""
        return bool(self.requests) and all(request.tokens_identical for request in self.requests)

    @property
    def bytes_identical(self) -> bool:
        """True if all requests' bytes are identical; False without requests."""
        return bool(self.requests) and all(request.bytes_identical for request in self.requests)

    @property
    def passed(self) -> bool:
        """True if every request and every perplexity passed; False without requests."""
        scored = [each for scenario in self.scenarios for each in scenario.perplexities]
        return bool(self.requests) and all(each.passed for each in (*self.requests, *scored))

    def sentence(self) -> str:
        """Return the outcome in words."""
        exactly = "bit for bit" + ", or as its conversion is defined," * any(each.lossy for each in self.scenarios)
        wired = [request for request in self.requests if not request.hits]
        moved = sum(request.wire.nbytes for request in wired)
        hits = sum(request.hit_tokens for request in wired)
        stored = sum(request.hits.get("storage", 0) for request in self.requests)
        read = f" Fleets that started empty read {stored} prompt tokens from the page store." if stored else ""
        lent = sum(request.hits.get("peer", 0) for request in self.requests)
        read += f" {lent} prompt tokens came from another fleet's host; one was killed as it lent." if lent else ""
        again = sum(request.tries > 1 for request in self.requests)
        died = f" {again} of them outlived an engine that was killed." if again else ""
        wrong = [request.name for request in self.requests if not request.passed]
        changed = [each.title for scenario in self.scenarios for each in scenario.perplexities if not each.passed]
        if not self.requests:
            return "FAILED: there was no request to serve"
        if wrong:
            return f"FAILED: {len(wrong)} of {len(self.requests)} requests differ from the one-process model: {wrong}"
        if changed:
            return f"FAILED: perplexities over moved KV are not what they have to be: {changed}"
        plural = "" if len(self.scenarios) == 1 else "s"
        sent = (
            f": {moved / 1e6:.1f} MB of KV moved {exactly} between fleets of different shape over"
            f" NIXL {self.nixl_version} ({self.nixl_backend}), {hits} prompt tokens were there already and not sent"
            " again"
        )
        return (
            f"{self._same_tokens()} of {len(self.requests)} requests in {len(self.scenarios)} scenario{plural} are"
            f" those of the one-process model{self._ties()}{sent if wired else ''},"
            f" in {self.seconds:.0f} s.{died}{read}"
        )

    def _same_tokens(self) -> str:
        tokens = sum(len(request.answer) for request in self.requests)
        other = sum(request.after_near_tie for request in self.requests)
        return f"{tokens - other} of {tokens} tokens" if other else f"All {tokens} tokens"

    def _ties(self) -> str:
        """Describe the tokens that differ from the one-process model; empty without near ties."""
        decided = {each.name: sum(r.after_near_tie for r in each.requests) for each in self.scenarios}
        names = " and ".join(name for name, other in decided.items() if other)
        return f"; {sum(decided.values())} follow a near tie that {names} decided otherwise" if names else ""

    def as_data(self) -> dict[str, Any]:
        """Return the JSON contract of `kvmover demo --json`."""
        return {
            "passed": self.passed,
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
                    "perplexities": [asdict(each) for each in scenario.perplexities],
                    "requests": [_request_data(request) for request in scenario.requests],
                }
                for scenario in self.scenarios
            ],
            "summary": self.sentence(),
        }


def _moved_tokens(request: RequestReport) -> int:
    """Returns the tokens whose KV came over the wire, from the store or from a peer."""
    if not request.hits:
        return request.prompt_tokens - request.hit_tokens
    return request.hits["storage"] + request.hits.get("peer", 0)


def _request_data(request: RequestReport) -> dict[str, Any]:
    data = asdict(request)
    wire = data.pop("wire")
    wire["bytes"] = wire.pop("nbytes")
    return {
        **data,
        "moved_tokens": _moved_tokens(request),
        "tokens_identical": request.tokens_identical,
        "after_near_tie": request.after_near_tie,
        **wire,
        "gb_per_s": request.wire.gb_per_s,
    }


_COLUMNS = (
    *(Column(heading) for heading in ("#", "prompt", "hits", "bytes", "legs", "direct", "packed")),
    Column("route", "left"),
    *(Column(heading) for heading in ("ms", "GB/s")),
    Column("tokens", "left"),
)


def _same(request: RequestReport) -> Text:
    """Returns how many tokens are those of the one-process model."""
    if not request.passed:
        return Text(f"{len(request.answer)} DIFFER", "red")
    if request.after_near_tie:
        return Text(f"{request.compared} of {len(request.answer)} same, then a near tie", "yellow")
    return Text(f"{len(request.answer)} same", "green")


def show(report: RunReport, console: Console) -> None:
    """Print a table for each scenario, then the sentence."""
    for scenario in report.scenarios:
        console.print(f"{scenario.name}: {scenario.title}", style="bold")
        table = Sheet(_COLUMNS)
        for number, r in enumerate(scenario.requests):
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
                _same(r),
            )
        console.print(table)
        console.print(scenario.loss(), soft_wrap=True)
        for each in scenario.perplexities:
            console.print(each.sentence(), style="" if each.passed else "red", soft_wrap=True)
    console.print(
        "direct, packed: descriptors that either route posts. ms: from asking to landed, on the slowest rank."
    )
    console.print(report.sentence(), style="bold green" if report.passed else "bold red", soft_wrap=True)
