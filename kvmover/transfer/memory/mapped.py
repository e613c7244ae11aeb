"""Mappings: pools of peers on this host, mapped into this process, so that a copy reaches them without a transport."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmover.shared_memory import Maker, MapMode, NotShared, SharedRange, machine, map_file, shares_of
from kvmover.transfer.peers.table import Peer
from kvmover.transport.base import Memory, MemoryKind

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: A peer's pools as memory of ours: one tuple a component, flat uint8 tensors as its own are.
Mapped = tuple[tuple["torch.Tensor", ...], ...]


def shares(allocations: Sequence[Sequence[Memory]]) -> tuple[tuple[SharedRange, ...], ...]:
    """What a card says of pools that all lie in shared memory of this host; empty where some do not."""
    every = [memory for pool in allocations for memory in pool]
    if any(memory.kind is not MemoryKind.HOST for memory in every):
        return ()
    found = iter(shares_of([(memory.address, memory.nbytes) for memory in every]))
    answer = [[next(found) for _ in pool] for pool in allocations]
    whole = tuple(tuple(share for share in pool if share is not None) for pool in answer)
    return whole if sum(map(len, whole)) == len(every) else ()


@dataclass(slots=True, eq=False)
class Mappings:
    """Pools of peers, mapped when they are first asked for. `ours`: whether this rank's pools can be mapped.

    A mapping stays valid when its peer dies, and goes with the last region that uses it once the peer is forgotten.
    """

    ours: bool
    machine: str = field(default_factory=machine)
    _mapped: dict[tuple[str, MapMode], Mapped | None] = field(
        default_factory=dict["tuple[str, MapMode]", "Mapped | None"]
    )
    _makers: dict[str, Maker | None] = field(default_factory=dict[str, "Maker | None"])

    def both(self, peer: Peer) -> bool:
        """Whether this rank and the peer can copy to and from each other's pools, and this one hears of its end.

        The peer is taken to be allowed what we are: it may look, since we may.
        """
        return self.ours and self.pools(peer, MapMode.READ) is not None and self.maker(peer) is not None

    def maker(self, peer: Peer) -> Maker | None:
        """The process that copies into our pools once the peer has mapped them; None where it cannot be watched."""
        if peer.name not in self._makers:
            self._makers[peer.name] = self._watch(peer)
        return self._makers[peer.name]

    def _watch(self, peer: Peer) -> Maker | None:
        share = next((share for pool in peer.card.shares for share in pool), None)
        try:
            return Maker(share) if share is not None else None
        except NotShared as error:
            log.warning("nothing is mapped between this rank and %s: %s", peer.name, error)
            return None

    def pools(self, peer: Peer, access: MapMode) -> Mapped | None:
        """The peer's pools, or None where it is elsewhere, does not share them, or the kernel does not let us."""
        key = peer.name, access
        if key not in self._mapped:
            self._mapped[key] = self._map(peer, access)
        return self._mapped[key]

    def _map(self, peer: Peer, access: MapMode) -> Mapped | None:
        card = peer.card
        if not card.shares or not self.machine or card.machine != self.machine:
            return None
        try:
            every = {share.token: share for pool in card.shares for share in pool}
            files = {token: map_file(share, access) for token, share in every.items()}
            return tuple(
                tuple(_tensor(files[share.token], share, memory) for share, memory in zip(pool, memories, strict=True))
                for pool, memories in zip(card.shares, card.allocations, strict=True)
            )
        except NotShared as error:
            log.warning("the pools of %s cannot be mapped: %s", peer.name, error)
            return None

    def forget(self, peer: str) -> None:
        """The peer is gone. Copies under way keep what they need."""
        for access in MapMode:
            self._mapped.pop((peer, access), None)
        self._makers.pop(peer, None)


def _tensor(file: memoryview, share: SharedRange, memory: Memory) -> torch.Tensor:
    import torch

    part = file[share.offset : share.offset + memory.nbytes]
    if share.offset < 0 or len(part) != memory.nbytes:
        raise NotShared(f"{memory.nbytes} bytes from {share.offset} on of a file of {len(file)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a tensor that must not be written: nobody does
        return torch.frombuffer(part, dtype=torch.uint8)
