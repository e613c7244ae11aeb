"""InFlight: one-sided operations of this side, from their post until they can touch no memory any more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvmover.transport.base import Completed, Failed, Transport

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Completion(Generic[T]):
    """An operation ended: well, or for `reason`. `quiescent`: it cannot touch memory any more."""

    what: T
    seconds: float
    reason: str | None = None
    quiescent: bool = True


@dataclass(slots=True, eq=False)
class InFlight(Generic[T]):
    """Operations by ticket, with what the caller knows them by."""

    transport: Transport
    _posted: dict[int, tuple[T, float]] = field(default_factory=dict[int, "tuple[T, float]"])
    _unsettled: dict[int, T] = field(default_factory=dict[int, "T"])

    def add(self, ticket: int, what: T, now: float) -> None:
        """Note what was posted under `ticket`, and when."""
        self._posted[ticket] = what, now

    def end(self, event: Completed | Failed, now: float) -> Completion[T] | None:
        """What ended, or None for an operation of somebody else."""
        found = self._posted.pop(event.ticket, None)
        if found is None:
            return None
        what, since = found
        if isinstance(event, Completed):
            return Completion(what, now - since)
        if not event.quiescent:
            self._unsettled[event.ticket] = what
        return Completion(what, now - since, str(event.error), event.quiescent)

    def settled(self) -> list[T]:
        """Operations that failed earlier and can touch memory no longer."""
        if not self._unsettled:
            return []
        still = self.transport.unsettled()
        return [self._unsettled.pop(ticket) for ticket in list(self._unsettled) if ticket not in still]

    def under_way(self) -> list[T]:
        """All that may still touch memory."""
        return [*(what for what, _ in self._posted.values()), *self._unsettled.values()]

    def __len__(self) -> int:
        return len(self._posted) + len(self._unsettled)
