"""Farewells: sources that owed a request nothing, until they are known to know that it is over.

A source whose chunks have landed has heard what it was asked. One that had none may have missed both the Want and the
Done, and would wait for a destination that is long content: both are said again until it answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: A peer by its transport name, and an attempt.
Key = tuple[str, str, int]


@dataclass(slots=True, eq=False)
class _Farewell:
    """`want`: what the source was asked, encoded. Said again at `due`, and for the last time before `until`."""

    want: bytes
    due: float
    until: float


@dataclass(slots=True, eq=False)
class Farewells:
    """Those that have not been answered, by (peer, request, generation). Times in seconds."""

    _open: dict[Key, _Farewell] = field(default_factory=dict[Key, _Farewell])

    def said(self, key: Key, want: bytes, due: float, until: float) -> None:
        self._open[key] = _Farewell(want, due, until)

    def heard(self, key: Key) -> None:
        """The source knows of the attempt: from now on it asks itself, if it must."""
        self._open.pop(key, None)

    def lost(self, peer: str) -> None:
        """Nobody is there to be told."""
        for key in [key for key in self._open if key[0] == peer]:
            del self._open[key]

    def again(self, now: float, resend_s: float) -> list[tuple[Key, bytes]]:
        """What to say once more."""
        for key in [key for key, farewell in self._open.items() if now >= farewell.until]:
            del self._open[key]
        due = [(key, farewell) for key, farewell in self._open.items() if now >= farewell.due]
        for _, farewell in due:
            farewell.due = now + resend_s
        return [(key, farewell.want) for key, farewell in due]

    def __len__(self) -> int:
        return len(self._open)
