"""Pace: how long to sleep between two polls of a mover. Pure: seconds in, seconds out.

Nothing wakes a poller of NIXL, and one that never sleeps takes a core and starves whoever shares it: with two of them
on two cores a note's round trip took 112 ms.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvmover.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Pace:
    """A share of the time since anything happened, within bounds: what took long to come may be seen a little later.

    By default what comes after 2 ms of nothing is seen at most 0.5 ms late. No nap is shorter than `shortest_s`, to
    which Linux adds 60 us, or longer than `open_s` while a transfer is open and `idle_s` while none is. A poll that did
    something is followed by another at once.
    """

    share: float = 0.25
    shortest_s: float = 50e-6
    open_s: float = 1e-3
    idle_s: float = 20e-3

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise LayoutError(f"pace has {field.name} = {getattr(self, field.name)}; it must be positive")
        if not self.shortest_s <= self.open_s <= self.idle_s:
            raise LayoutError(f"{self} has naps that do not grow from shortest_s over open_s to idle_s")

    def nap_s(self, quiet_s: float, open_transfers: int) -> float:
        """The next nap, `quiet_s` after anything happened."""
        return min(max(self.share * quiet_s, self.shortest_s), self.open_s if open_transfers else self.idle_s)
