"""PeerProcess: a process behind a peer, of which it may become known that it is dead. Who is silent is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmover.layout.component import Component
from kvmover.shared_memory import HostProcess
from kvmover.transfer.protocol.handshake import Rank


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """What sits at `rank` of `engine` now, with pools of `components`. It stays this process when it is lost and
    another one sits there.
    """

    engine: str
    rank: int
    components: tuple[Component, ...]
    _generation: int = field(repr=False)
    _local: HostProcess | None = field(repr=False)
    _dead: Mapping[int, int] = field(repr=False)

    @classmethod
    def behind(cls, card: Rank, machine: str, dead: Mapping[int, int]) -> PeerProcess:
        """The process that `card` is of, as one that runs on `machine` sees it. `dead` [rank]: the newest generation of
        its engine's that this side was told is dead, now or later.
        """
        place = card.place
        local = card.process if machine and card.machine == machine else None
        components = tuple(pool.component for pool in card.pools)
        return cls(place.engine, place.rank, components, place.generation, local, dead)

    def has_ended(self) -> bool:
        """Whether it is known to be dead: the kernel of this host says so, or `Mover.forget` was told."""
        told = self._dead.get(self.rank, -1) >= self._generation
        return told or (self._local is not None and self._local.has_ended())
