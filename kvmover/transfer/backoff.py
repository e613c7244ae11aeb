"""When to try again to reach a peer that was lost: a policy and its steps. Pure: state, event and time in, actions out.

The caller keeps one state a peer that is lost, says what happened, and dials when told to.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace

from kvmover.errors import LayoutError


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


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


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
