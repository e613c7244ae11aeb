"""A PeerProcess is the process behind a peer, which may become known to be dead. A silent process may be alive."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmover.layout.component import Component
from kvmover.shared_memory import HostProcess
from kvmover.transfer.protocol.handshake import Rank


@dataclass(slots=True, eq=False, weakref_slot=True)
class Obituary:
    """A record of the death of all processes that held a rank id before it was told."""

    is_told: bool = False


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """The process at `rank` of `engine`, with pools of `components`. It stands for this process even after another one
    takes its rank.
    """

    engine: str
    rank: int
    components: tuple[Component, ...]
    _local: HostProcess | None = field(repr=False)
    _obituary: Obituary = field(repr=False)

    @classmethod
    def behind(cls, card: Rank, machine: str, obituary: Obituary) -> PeerProcess:
        """Returns the process of `card`, as seen from `machine`."""
        components = tuple(pool.component for pool in card.pools)
        return cls(card.place.engine, card.place.rank, components, local_process(card, machine), obituary)

    def has_ended(self) -> bool:
        """Returns True if the process is known to be dead: by the kernel of this host, or by `Mover.forget`."""
        return self._obituary.is_told or (self._local is not None and self._local.has_ended())


def local_process(card: Rank, machine: str) -> HostProcess | None:
    """Returns the process of a card if it runs on `machine`, whose kernel knows it; else None."""
    return card.process if machine and card.machine == machine else None
