"""A Tally counts each request once, in the scheduler's half, when the last rank has reported how its part ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RankEnding:
    """How one rank's part of a request ended. `way`: "sent" or "received". `microseconds`: of one that landed."""

    way: str
    request: str
    landed: bool
    microseconds: int


@dataclass(slots=True)
class Tally:
    """Of `ranks` ranks. A request landed if its part did on each of them, and took as long as on the slowest."""

    ranks: int
    _counts: Counter[str] = field(default_factory=Counter[str])
    _open: dict[tuple[str, str], list[RankEnding]] = field(default_factory=dict[tuple[str, str], list[RankEnding]])

    def hear(self, endings: Iterable[RankEnding]) -> None:
        """Parts of requests that have ended, each from one rank and once."""
        for ending in endings:
            key = ending.way, ending.request
            parts = self._open.setdefault(key, [])
            parts.append(ending)
            if len(parts) == self.ranks:
                self._count(ending.way, self._open.pop(key))

    def take(self) -> Counter[str]:
        """What was counted since the last call."""
        taken, self._counts = self._counts, Counter[str]()
        return taken

    def _count(self, way: str, parts: list[RankEnding]) -> None:
        if all(part.landed for part in parts):
            self._counts[f"{way}_requests"] += 1
            self._counts[f"{way}_microseconds"] += max(part.microseconds for part in parts)
        else:
            self._counts[f"{way}_failures"] += 1
