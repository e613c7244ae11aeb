"""ExpectedEnds holds when open transfers should end, by the costs of their routes, so that a poller wakes in time."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class ExpectedEnds:
    """The expected ends of transfers, in seconds of the mover's clock. One that ended before stays until its time."""

    _ahead: list[float] = field(default_factory=list[float])
    _passed: float = -math.inf

    def add(self, at: float, now: float) -> None:
        """Expect the end of a transfer at `at`. Ends that have passed are dropped, so few are held if nobody asks."""
        self._let_pass(now)
        heapq.heappush(self._ahead, at)

    def distance_s(self, now: float) -> float:
        """Returns the seconds from `now` to the nearest expected end, ahead or passed; math.inf without one.

        >>> ends = ExpectedEnds()
        >>> ends.add(30.0, 0.0)
        >>> ends.distance_s(10.0), ends.distance_s(29.0), ends.distance_s(32.0)
        (20.0, 1.0, 2.0)
        """
        self._let_pass(now)
        ahead_s = self._ahead[0] - now if self._ahead else math.inf
        return min(ahead_s, now - self._passed)

    def _let_pass(self, now: float) -> None:
        while self._ahead and self._ahead[0] <= now:
            self._passed = heapq.heappop(self._ahead)

    def __len__(self) -> int:
        return len(self._ahead)
