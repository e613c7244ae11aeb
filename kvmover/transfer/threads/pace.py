"""Pace: how long to sleep between two polls of a mover. Pure: seconds in, seconds out.

Nothing wakes a poller of NIXL, and one that never sleeps takes a core and starves whoever shares it: with two of them
on two cores a note's round trip took 112 ms.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvmover.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Pace:
    """The polling thread sleeps `share` of the time since the last event, within bounds. Times in seconds.

    By default an event that comes after 2 ms without one is seen at most 0.5 ms late. No sleep is shorter than
    `shortest_s`, to which Linux adds 60 us, nor longer than `open_s` while a transfer is open, or `idle_s` while none
    is. After a poll that did something the next one follows at once. Raises LayoutError unless all are positive and
    `shortest_s <= open_s <= idle_s`.
    """

    share: float = 0.25
    shortest_s: float = 50e-6
    open_s: float = 1e-3
    idle_s: float = 20e-3

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise LayoutError(f"progress has {field.name} = {getattr(self, field.name)}; it must be positive")
        if not self.shortest_s <= self.open_s <= self.idle_s:
            raise LayoutError(
                f"progress has shortest_s = {self.shortest_s}, open_s = {self.open_s}, idle_s = {self.idle_s};"
                " they must not shrink in this order"
            )

    def nap_s(self, quiet_s: float, open_transfers: int) -> float:
        """Seconds to sleep, `quiet_s` seconds after the last event, with so many transfers open."""
        return min(max(self.share * quiet_s, self.shortest_s), self.open_s if open_transfers else self.idle_s)
