"""A stage says who takes part in a play, what moves, and which faults may come; each of these is searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Costs, Route
from kvmover.transfer.config import Backoff, MoverConfig
from kvmover.transfer.protocol.wire import Verb
from tests.sim.scenario import Asked, Scenario, Step
from tests.states.chosen_network import BY_CHOICE_S, Choice

#: Times in seconds, so that a resend, a ping, the end of a lease and a deadline come one after another, and few differ.
CONFIG = MoverConfig(
    arena_bytes=2048,
    sandbox_bytes=0,
    deadline_s=4.0,
    drain_s=1.0,
    ping_s=1.0,
    resend_s=1.0,
    silence_s=3.0,
    lease_s=1.5,
    linger_s=2.0,
    backoff=Backoff(1.0, 1.0, 0.0, 2),
    costs=Costs(1.0, 1e3, 1e3, 1e3, 10.0, chunk_bytes=1024),
)

MODEL = (Component("mla", 1, 1, 1, 16, "uint8"),)
RANK = Fleet(1, 1, 1, page_tokens=2)

#: What may happen to notes and operations, and does not keep a request from landing.
MENDED = ("lose", "repeat", "overtake", "gather", "late")
#: All kinds of faults; of each a stage allows so many.
FAULTS = (*MENDED, "delay", "stop", "abort", "crash", "kill")


@dataclass(frozen=True, slots=True)
class Stage:
    """A request of `tokens` tokens, of which those from `start` on are wanted, and the fleets of its engines.

    `faults`: how many of each kind may come. `parts`: both ends name their page tables in so many parts. `opening`:
    choices made before the play, each heard by all.
    """

    name: str
    verb: Verb
    route: Route
    faults: tuple[tuple[str, int], ...] = ()
    fleets: tuple[tuple[str, Fleet], ...] = (("p", RANK), ("d", RANK))
    tokens: int = 2
    start: int = 0
    parts: int = 1
    opening: tuple[Choice, ...] = ()
    allowed: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed", dict(self.faults))

    def __str__(self) -> str:
        faults = ", ".join(f"{kind} {most}" for kind, most in self.faults)
        return f"{self.name}, {self.verb} {self.route}, {faults or 'no faults'}"

    @property
    def scenario(self) -> Scenario:
        """The stage as a scenario of the simulator. Its engines are called by choice, and name parts by choice."""
        other = 0.0 if "e" in dict(self.fleets) else None
        asked = Asked("r", self.tokens, self.start, (0.0, 0.0), other_s=other)
        if self.parts > 1:
            shares = [(number + 1) / self.parts for number in range(self.parts)]
            seconds = [BY_CHOICE_S + number for number in range(self.parts)]
            asked = replace(
                asked,
                allocated=tuple(zip(seconds, shares, strict=True)),
                steps=tuple(
                    Step(at, tokens=round(share * self.tokens)) for at, share in zip(seconds, shares, strict=True)
                ),
                named=tuple(shares[:1] + shares),
            )
        config = replace(CONFIG, verb=self.verb, route=self.route)
        shared = self.route is Route.MAPPED
        calm = not self.faults
        return Scenario(MODEL, dict(self.fleets), config, calm, (0.0, 0.0), (0.0, 0.0), (), shared, (asked,))


WAYS = [(verb, route) for verb in Verb for route in Route]
LOST_AND_REPEATED = (("lose", 1), ("repeat", 1))
TWO_ENGINES = (("p", RANK), ("d", RANK), ("e", RANK))

#: A prefill whose second rank holds no chunk of the request, and two engines that have asked it before it sends.
WAITED_FOR = Stage(
    "2 x 2 x 1, asked early",
    Verb.PUSH,
    Route.DIRECT,
    fleets=(("p", Fleet(1, 1, 2, page_tokens=2)), ("d", RANK), ("e", RANK)),
    opening=(("call", "d", 0), ("call", "e", 0)),
)


def one_to_one(*faults: tuple[str, int]) -> list[Stage]:
    """Returns the stages of one source, one destination and one chunk with these faults, each way that it may go."""
    return [Stage("1 x 1 x 1", verb, route, faults) for verb, route in WAYS]


def one_to_two(*faults: tuple[str, int]) -> list[Stage]:
    """Returns the stages of one source and two engines that ask it for a chunk, each way that it may go."""
    return [Stage("1 x 2 x 1", verb, route, faults, TWO_ENGINES) for verb, route in WAYS]


def growing(*faults: tuple[str, int]) -> list[Stage]:
    """Returns the stages of a request whose source computes, and whose destination names, its pages one by one."""
    return [Stage("growing tables", verb, route, faults, tokens=4, parts=2) for verb, route in WAYS]
