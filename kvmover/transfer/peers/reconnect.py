"""Which lost peers to connect again, and when, with exponential backoff. What they may still write is only settled by
talking to them.
"""

from __future__ import annotations

import logging
import math
import zlib
from dataclasses import dataclass, field, replace

from kvmover.errors import LayoutError
from kvmover.transfer.events import Tick

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backoff:
    """When to dial a lost peer: after `first_s` seconds, then twice as long each time, at most `most_s`.

    Each wait is shortened by up to the fraction `jitter` of it. After `attempts` failures the peer is given up.

    The defaults wait 0.5, 1, 2, 4, 8, 16, 30, 30, ... s and give up after some 3 minutes.
    """

    first_s: float = 0.5
    most_s: float = 30.0
    jitter: float = 0.25
    attempts: int = 12

    def __post_init__(self) -> None:
        rules = (
            ("first_s", 0 < self.first_s <= self.most_s, f"must be in (0, most_s], and most_s is {self.most_s}"),
            ("most_s", self.most_s < math.inf, "must be finite"),
            ("jitter", 0 <= self.jitter < 1, "must be in [0, 1)"),
            ("attempts", self.attempts >= 1, "must be at least 1"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise LayoutError(f"backoff.{name} = {getattr(self, name)}: {rule}")

    def wait_s(self, name: str, attempt: int) -> float:
        """Before the `attempt`-th try (from 0) at `name`: the same everywhere and always, and spread over names.

        `name` is of both ends where many reach for one: a thousand ranks that lost the same peer must not dial as one.
        """
        longest_s = min(self.most_s, math.ldexp(self.first_s, min(attempt, 64)))
        return longest_s * (1 - self.jitter * zlib.crc32(f"{name}/{attempt}".encode()) / (1 << 32))


@dataclass(frozen=True, slots=True)
class Idle:
    """No tries are under way: the peer was never lost, or was given up."""

    name: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """The peer is lost, and the next try is `due`. `failed` tries went before; the last said `reason`."""

    name: str
    failed: int
    due: float
    reason: str


@dataclass(frozen=True, slots=True)
class Dialling:
    """A try is under way: the peer's answer, or its failure, decides."""

    name: str
    failed: int


State = Idle | Waiting | Dialling


@dataclass(frozen=True, slots=True)
class Lost:
    """The peer died, was cut off, or a try to reach it failed."""

    reason: str


Event = Lost | Tick


@dataclass(frozen=True, slots=True)
class Dial:
    """Try to connect the peer, and say Lost if that fails."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No more tries; `reason` is for whoever reads the log."""

    reason: str


Action = Dial | GiveUp


def step(policy: Backoff, state: State, event: Event, now: float) -> tuple[State, Action | None]:
    """The next state, and what to do."""
    if isinstance(event, Tick):
        if isinstance(state, Waiting) and now >= state.due:
            return Dialling(state.name, state.failed), Dial()
        return state, None
    if isinstance(state, Waiting):
        return replace(state, reason=event.reason), None
    failed = state.failed + 1 if isinstance(state, Dialling) else 0
    if failed >= policy.attempts:
        return Idle(state.name), GiveUp(f"{state.name} was not reached in {failed} tries: {event.reason}")
    return Waiting(state.name, failed, now + policy.wait_s(state.name, failed), event.reason), None


@dataclass(slots=True, eq=False)
class _LostPeer:
    """A lost peer: its card, the seat it had, and how far trying has got. `since`: when the last try began."""

    card: bytes
    seat: tuple[str, int]
    state: State
    since: float = 0.0


@dataclass(slots=True, eq=False)
class Reconnector:
    """Lost peers by transport name, of which no later incarnation has one. `answer_s`: how long a try may take."""

    policy: Backoff
    answer_s: float
    _lost_peers: dict[str, _LostPeer] = field(default_factory=dict[str, _LostPeer])

    def lost(self, name: str, card: bytes, seat: tuple[str, int], reason: str, now: float) -> None:
        """A peer was lost, or a try at it failed."""
        line = self._lost_peers.setdefault(name, _LostPeer(card, seat, Idle(name)))
        self._step(name, line, Lost(reason), now)

    def heard(self, name: str, now: float) -> bool:
        """Anything from a peer: whether it was being dialled, and so is back. One that speaks is dialled at once."""
        line = self._lost_peers.get(name)
        if line is None:
            return False
        if isinstance(line.state, Waiting):
            line.state = replace(line.state, due=min(line.state.due, now))
            return False
        del self._lost_peers[name]
        return True

    def seated(self, seat: tuple[str, int], name: str) -> None:
        """`name` sits there: the one that did before is dialled no more."""
        for other in [other for other, line in self._lost_peers.items() if line.seat == seat and other != name]:
            del self._lost_peers[other]

    def retired(self, name: str) -> None:
        """Another process has taken the place of `name`, which is dialled no more."""
        self._lost_peers.pop(name, None)

    def forget(self, engine: str, rank: int | None) -> None:
        """Dial nobody of an engine, or nobody at one rank of it, until they are lost again."""
        for name in [
            n for n, lost in self._lost_peers.items() if lost.seat[0] == engine and rank in (None, lost.seat[1])
        ]:
            del self._lost_peers[name]

    def due(self, now: float) -> tuple[list[tuple[str, bytes]], list[str]]:
        """(peers to dial with their cards, peers whose dial was not answered)."""
        dial = list[tuple[str, bytes]]()
        silent = list[str]()
        for name, line in list(self._lost_peers.items()):
            if isinstance(line.state, Dialling) and now - line.since >= self.answer_s:
                silent.append(name)
            elif self._step(name, line, Tick(), now):
                line.since = now
                dial.append((name, line.card))
        return dial, silent

    def next_due(self) -> float:
        """Before this time `due` has nothing to say. O(lost peers)."""
        return min(map(self._due_of, self._lost_peers.values()), default=math.inf)

    def _due_of(self, line: _LostPeer) -> float:
        match line.state:
            case Waiting(due=due):
                return due
            case Dialling():
                return line.since + self.answer_s
            case Idle():
                return math.inf

    def __contains__(self, name: str) -> bool:
        return name in self._lost_peers

    def __len__(self) -> int:
        return len(self._lost_peers)

    def _step(self, name: str, line: _LostPeer, event: Event, now: float) -> bool:
        """Whether to dial. A peer that is given up is dialled no more until it is lost again."""
        line.state, action = step(self.policy, line.state, event, now)
        if isinstance(action, GiveUp):
            del self._lost_peers[name]
            log.warning("%s; it is dialled no more", action.reason)
        return isinstance(action, Dial)
