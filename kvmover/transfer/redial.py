"""Redial: which lost peers to reach for again, and when. Their memory of us, and ours of what they may still write, is
only settled by talking to them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from kvmover.transfer import backoff
from kvmover.transfer.backoff import Backoff

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Line:
    """A lost peer: its card, the seat it had, and how far trying has got. `since`: when the last try began."""

    card: bytes
    seat: tuple[str, int]
    state: backoff.State
    since: float = 0.0


@dataclass(slots=True, eq=False)
class Redial:
    """Lost peers by transport name, of which no later incarnation has one. `answer_s`: how long a try may take."""

    policy: Backoff
    answer_s: float
    _lines: dict[str, _Line] = field(default_factory=dict[str, _Line])

    def lost(self, name: str, card: bytes, seat: tuple[str, int], reason: str, now: float) -> None:
        """A peer was lost, or a try at it failed."""
        line = self._lines.setdefault(name, _Line(card, seat, backoff.Idle(name)))
        self._step(name, line, backoff.Lost(reason), now)

    def heard(self, name: str, now: float) -> bool:
        """Anything from a peer: whether it was being dialled, and so is back. One that speaks is dialled at once."""
        line = self._lines.get(name)
        if line is None:
            return False
        if isinstance(line.state, backoff.Waiting):
            line.state = replace(line.state, due=min(line.state.due, now))
            return False
        del self._lines[name]
        return True

    def seated(self, seat: tuple[str, int], name: str) -> None:
        """`name` sits there: the one that did before is dialled no more."""
        for other in [other for other, line in self._lines.items() if line.seat == seat and other != name]:
            del self._lines[other]

    def due(self, now: float) -> tuple[list[tuple[str, bytes]], list[str]]:
        """(peers to dial with their cards, peers whose dial was not answered)."""
        dial = list[tuple[str, bytes]]()
        silent = list[str]()
        for name, line in list(self._lines.items()):
            if isinstance(line.state, backoff.Dialling) and now - line.since >= self.answer_s:
                silent.append(name)
            elif self._step(name, line, backoff.Tick(), now):
                line.since = now
                dial.append((name, line.card))
        return dial, silent

    def __len__(self) -> int:
        return len(self._lines)

    def _step(self, name: str, line: _Line, event: backoff.Event, now: float) -> bool:
        """Whether to dial. A peer that is given up is dialled no more until it is lost again."""
        line.state, action = backoff.step(self.policy, line.state, event, now)
        if isinstance(action, backoff.GiveUp):
            del self._lines[name]
            log.warning("%s; it is dialled no more", action.reason)
        return isinstance(action, backoff.Dial)
