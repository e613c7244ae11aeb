"""What every check looks at: the state of a schedule, and what it is to say when an invariant does not hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvmover.transfer.destination.quarantine import Key
from tests.sim.network import SimNetwork
from tests.sim.scenario import Profile, Scenario
from tests.sim.seats import Order, Seat

#: An attempt and its chunk: (request, generation), (writer, chunk).
Owner = tuple[tuple[str, int], tuple[str, int]]


class Broken(BaseException):
    """An invariant does not hold. No mover takes it for a fault of one of its attempts."""


@dataclass(slots=True, eq=False)
class Scene:
    """`seats` by process name, `at` by place. `seen`: situations that the protocol is there for, and how often.

    `spoilt`: how often an attempt's chunk landed with a wrong bit. `idle_since` [rank, attempt]: since when a peer from
    whom the rank keeps memory could say that it has drained. `newest` [mover, place]: the newest process that a mover
    has seated there.
    """

    scenario: Scenario
    profile: Profile
    network: SimNetwork
    seats: dict[str, Seat] = field(default_factory=dict[str, Seat])
    at: dict[tuple[str, int], Seat] = field(default_factory=dict[tuple[str, int], Seat])
    orders: list[Order] = field(default_factory=list[Order])
    seen: Counter[str] = field(default_factory=Counter[str])
    spoilt: Counter[Owner] = field(default_factory=Counter[Owner])
    idle_since: dict[tuple[str, Key], float] = field(default_factory=dict[tuple[str, Key], float])
    newest: Counter[tuple[str, tuple[str, int]]] = field(default_factory=Counter[tuple[str, tuple[str, int]]])

    @property
    def alive(self) -> list[Seat]:
        return [seat for seat in self.at.values() if seat.alive]

    @property
    def calm(self) -> bool:
        """Nothing goes wrong in this schedule but what the protocol makes good."""
        return self.scenario.calm and self.profile.ordered

    def twice_spoilt(self, request: str) -> bool:
        """Whether a chunk of a request came to harm twice: then it may fail."""
        return any(count > 1 for ((name, _), _), count in self.spoilt.items() if name == request)
