"""A Scenario says which model, which two fleets, and which requests the demo moves between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from kvmover.demo.conversations import Conversation, Turn, conversations
from kvmover.demo.model import GQA, LATENT, ModelConfig
from kvmover.demo.trace import TraceError, TraceRequest, TraceScale, read_trace
from kvmover.errors import LayoutError
from kvmover.layout.component import Component
from kvmover.plan.cost import Route
from kvmover.plan.text import FleetText

#: Answers of a trace are cut here: the demo is about moving, not about generating.
MOST_ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Scenario:
    """One model served by two fleets of different shape."""

    name: str
    title: str
    model: ModelConfig
    src: FleetText
    dst: FleetText
    route: Route | None = None
    #: Fleets that serve one after another over a page store, where nothing moves between two that live together.
    lives: tuple[FleetText, ...] = ()

    @property
    def processes(self) -> int:
        """How many it takes: every fleet has processes of its own, those that live later too."""
        return sum(fleet.fleet.size for fleet in self.lives or (self.src, self.dst))

    @classmethod
    def of(cls, name: str, title: str, model: ModelConfig, src: str, dst: str) -> Scenario:
        """With the route left to the cost model."""
        return cls(name, title, model, FleetText.parse(src), FleetText.parse(dst))

    @classmethod
    def stored(cls, name: str, title: str, model: ModelConfig, *lives: str) -> Scenario:
        """Fleets in the order of their lives."""
        fleets = tuple(FleetText.parse(text) for text in lives)
        return cls(name, title, model, fleets[0], fleets[-1], lives=fleets)

    @property
    def component(self) -> Component:
        """What the model caches, in the precision it computes in: a move never looks inside an element."""
        model = self.model
        return Component(model.name, model.layers, model.kv, model.kv_heads, model.head_dim, "float64")


SCENARIOS = (
    Scenario.of(
        "gqa",
        "GQA, 8 KV heads, TP4 to TP2, pages of 16 in NHD to pages of 64 in HND",
        replace(GQA, kv_heads=8),
        "tp=4,page=16,order=NHD",
        "tp=2,page=64,order=HND",
    ),
    Scenario.of(
        "replicated-dst",
        "GQA, 2 KV heads, TP1 to TP4: each head lands on two ranks",
        GQA,
        "tp=1,page=16,order=NHD",
        "tp=4,page=16,order=HND",
    ),
    Scenario.of(
        "replicated-both",
        "GQA, 2 KV heads, TP4 to TP8: heads replicated on both sides",
        GQA,
        "tp=4,page=16,order=NHD",
        "tp=8,page=32,order=NHD",
    ),
    Scenario.of(
        "uneven",
        "6 KV heads, TP3 to TP2: neither size divides the other",
        replace(GQA, query_heads=6, kv_heads=6, mlp=96),
        "tp=3,page=16,order=HND",
        "tp=2,page=24,order=NHD",
    ),
    Scenario.of(
        "pipeline",
        "GQA, 4 KV heads, PP2 x TP2 to TP2",
        replace(GQA, kv_heads=4),
        "tp=2,pp=2,page=16,order=NHD",
        "tp=2,page=32,order=page-layer-kv-head-token-dim",
    ),
    replace(
        Scenario.of(
            "latent",
            "MLA latent, TP4 to TP2: pages striped over the replicas, layers interleaved on the wire",
            LATENT,
            "tp=4,page=16,order=NHD",
            "tp=2,page=64,order=NHD",
        ),
        route=Route.PACKED,  # few enough runs to go direct, which would not show the interleaving
    ),
    replace(
        Scenario.of(
            "mapped",
            "GQA, 2 KV heads, TP2 to TP1, pools in shared memory: each rank copies into the other's pages",
            GQA,
            "tp=2,page=16,order=NHD",
            "tp=1,page=64,order=HND",
        ),
        route=Route.MAPPED,
    ),
    Scenario.stored(
        "storage",
        "GQA, 8 KV heads, TP4, then TP2, then TP4 again: each starts empty, over one page store",
        replace(GQA, kv_heads=8),
        "tp=4,page=16,order=NHD",
        "tp=2,page=16,order=HND",
        "tp=4,page=16,order=NHD",
    ),
)


def choose(names: tuple[str, ...]) -> tuple[Scenario, ...]:
    """The named scenarios in their order, all when none is named. Raises LayoutError for an unknown name."""
    known = {scenario.name: scenario for scenario in SCENARIOS}
    for name in names:
        if name not in known:
            raise LayoutError(f"unknown scenario {name!r}; known are {', '.join(known)}")
    return tuple(known[name] for name in names) or SCENARIOS


@dataclass(slots=True)
class Chats:
    """Requests from the conversation generator: prompts grow by what was answered, so later turns share prefixes."""

    turns: list[Turn]
    talks: dict[int, Conversation]

    @classmethod
    def seeded(cls, seed: int, requests: int) -> Chats:
        """`requests` turns of a few interleaved conversations."""
        count = max(1, requests // 3)
        return cls(conversations(seed, count, -(-requests // count))[:requests], {})

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """(prompt, answer length); the answer has to be told by `answered` before the next is asked for."""
        for turn in self.turns:
            talk = self.talks.get(turn.conversation, Conversation()).said(turn.new_tokens)
            self.talks[turn.conversation] = talk
            yield talk.tokens, min(turn.answer_tokens, MOST_ANSWER_TOKENS)
            self.talks[turn.conversation] = talk.said(self._answer)

    _answer: tuple[int, ...] = ()

    def answered(self, tokens: list[int]) -> None:
        self._answer = tuple(tokens)


@dataclass(frozen=True, slots=True)
class Traced:
    """Requests from a Mooncake trace, scaled down to what a small model reads in a second."""

    requests: tuple[TraceRequest, ...]

    @classmethod
    def read(cls, path: Path, scale: TraceScale, requests: int, most_tokens: int) -> Traced:
        """The first `requests` of the file. Raises TraceError for a file that cannot be read or has none, and for a
        prompt that is longer than `most_tokens` when it is scaled."""
        found = tuple(islice(read_trace(path, scale), requests))
        if not found:
            raise TraceError(f"{path} has no requests")
        for number, request in enumerate(found):
            if len(request.tokens) + MOST_ANSWER_TOKENS > most_tokens:
                raise TraceError(
                    f"{path.name} request {number}: {len(request.tokens):,} tokens at --scale {scale.factor}, and the"
                    f" demo's pools hold {most_tokens - MOST_ANSWER_TOKENS:,}"
                )
        return cls(found)

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], int]]:
        for request in self.requests:
            yield request.tokens, min(max(request.output_tokens, 1), MOST_ANSWER_TOKENS)

    def answered(self, tokens: list[int]) -> None:
        """A trace goes on as it was recorded, whatever was answered."""
