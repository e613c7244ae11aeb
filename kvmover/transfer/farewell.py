"""Sources with no chunks for a request. Want and Done are the only messages they get and both may be lost, so both are
resent until the source replies or `until` passes.

A source whose chunks have landed must have received the Want. One without chunks may have missed both messages, and
would then hold its pages until its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: A peer by its transport name, and an attempt.
Key = tuple[str, str, int]


@dataclass(slots=True, eq=False)
class _Farewell:
    """`want`: the encoded Want. It is resent at `due`, and no more after `until`."""

    want: bytes
    due: float
    until: float


@dataclass(slots=True, eq=False)
class Farewells:
    """Sources that have not replied, by (peer, request, generation). Times in seconds."""

    _open: dict[Key, _Farewell] = field(default_factory=dict[Key, _Farewell])

    def said(self, key: Key, want: bytes, due: float, until: float) -> None:
        self._open[key] = _Farewell(want, due, until)

    def heard(self, key: Key) -> None:
        """The source has replied, so it knows the attempt. From now on it asks again itself if it has to."""
        self._open.pop(key, None)

    def lost(self, peer: str) -> None:
        """The peer is gone: nothing is resent to it."""
        for key in [key for key in self._open if key[0] == peer]:
            del self._open[key]

    def again(self, now: float, resend_s: float) -> list[tuple[Key, bytes]]:
        """Wants to resend now, by key; each is due again `resend_s` later. Those past `until` are dropped."""
        for key in [key for key, farewell in self._open.items() if now >= farewell.until]:
            del self._open[key]
        due = [(key, farewell) for key, farewell in self._open.items() if now >= farewell.due]
        for _, farewell in due:
            farewell.due = now + resend_s
        return [(key, farewell.want) for key, farewell in due]

    def __len__(self) -> int:
        return len(self._open)
