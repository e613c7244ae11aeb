"""PeerProcess: a process behind a peer, of which it may become known that it is dead. Who is silent is not."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmover.layout.component import Component
from kvmover.shared_memory import HostProcess
from kvmover.transfer.protocol.handshake import Rank


@dataclass(slots=True, eq=False, weakref_slot=True)
class Obituary:
    """A word that the processes of one rank are dead: those that sat there until it was said."""

    is_told: bool = False


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """What sits at `rank` of `engine` now, with pools of `components`. It stays this process when it is lost and
    another one sits there.
    """

    engine: str
    rank: int
    components: tuple[Component, ...]
    _local: HostProcess | None = field(repr=False)
    _obituary: Obituary = field(repr=False)

    @classmethod
    def behind(cls, card: Rank, machine: str, obituary: Obituary) -> PeerProcess:
        """The process that `card` is of, as one that runs on `machine` sees it."""
        components = tuple(pool.component for pool in card.pools)
        return cls(card.place.engine, card.place.rank, components, local_process(card, machine), obituary)

    def has_ended(self) -> bool:
        """Whether it is known to be dead: the kernel of this host says so, or `Mover.forget` was told."""
        return self._obituary.is_told or (self._local is not None and self._local.has_ended())


def local_process(card: Rank, machine: str) -> HostProcess | None:
    """The process of a card where it runs on `machine`, whose kernel knows of it; else None."""
    return card.process if machine and card.machine == machine else None
