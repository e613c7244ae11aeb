"""Closed: what a source remembers of attempts and of requests that are over, for a while.

A Want that its Abort overtook, or that is repeated, must not open an attempt again: its pages are given back. A
destination that missed how its attempt ended is told when it asks. And a request that was served, given up or refused
is not one that is still to come: whoever asks for it late computes at once instead of waiting for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmover.transfer.remembered import Remembered

#: Attempts and requests that are remembered, the latest ones: a minute of a thousand requests a second.
MAX_CLOSED = 65536

#: How long requests that are over are remembered, in seconds: longer than a destination's queue may be.
MEMORY_S = 3600.0

#: How a request ended that nothing was wrong with.
SERVED = "it was served already"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: None is well."""

    generation: int
    reason: str | None


@dataclass(slots=True)
class Closed:
    """Attempts by (request, peer), of which the newest counts, and requests by name."""

    _attempts: Remembered[tuple[str, str], Outcome] = field(
        default_factory=lambda: Remembered["tuple[str, str]", Outcome](MAX_CLOSED)
    )
    _requests: Remembered[str, str] = field(default_factory=lambda: Remembered[str, str](MAX_CLOSED))

    def close(self, key: tuple[str, str], generation: int, reason: str | None, until: float) -> None:
        before = self._attempts.get(key)
        if before is None or before.generation <= generation:
            self._attempts.keep(key, Outcome(generation, reason), until)

    def of(self, request: str, peer: str, generation: int) -> Outcome | None:
        """How an attempt of this generation or of an earlier one ended, if it has."""
        outcome = self._attempts.get((request, peer))
        return outcome if outcome is not None and generation <= outcome.generation else None

    def end(self, request: str, how: str, until: float) -> None:
        """Whoever asks for this request from now on is told how it ended, until it is reopened."""
        self._requests.keep(request, how, until)

    def ending(self, request: str) -> str | None:
        return self._requests.get(request)

    def reopen(self, request: str) -> None:
        self._requests.forget(request)

    def expire(self, now: float) -> None:
        self._attempts.expire(now)
        self._requests.expire(now)
