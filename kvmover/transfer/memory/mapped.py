"""The mappings of peers' pools into this process, so that a copy reaches them without a transport.

On the CPU: pools in shared memory of this host; on a GPU: pools that their owner exports, to the host or to the fabric.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmover.regions import BoundMemory
from kvmover.shared_memory import Maker, MapMode, NotShared, SharedRange, machine, map_file, shares_of
from kvmover.transfer.peers.peer_table import Peer
from kvmover.transfer.protocol.wire import Verb
from kvmover.transport.base import Memory, MemoryKind

if TYPE_CHECKING:
    import torch

    from kvmover.kernels.cuda_exports import Export

log = logging.getLogger(__name__)

#: A peer's pools, mapped here [component].
Mapped = tuple[BoundMemory, ...]


def shares(allocations: Sequence[Sequence[Memory]]) -> tuple[tuple[SharedRange, ...], ...]:
    """Returns the `shares` of a card, if all pools lie in shared memory of this host; else ()."""
    every = [memory for pool in allocations for memory in pool]
    if any(memory.kind is not MemoryKind.HOST for memory in every):
        return ()
    found = iter(shares_of([(memory.address, memory.nbytes) for memory in every]))
    answer = [[next(found) for _ in pool] for pool in allocations]
    whole = tuple(tuple(share for share in pool if share is not None) for pool in answer)
    return whole if sum(map(len, whole)) == len(every) else ()


def exports(allocations: Sequence[Sequence[Memory]], device: torch.device) -> tuple[tuple[Export, ...], ...]:
    """Returns the `exports` of a card, if the driver exports all pools on a GPU; else ().

    Pools on the CPU are not exported: they are shared or not by their allocation.
    """
    if any(memory.kind is not MemoryKind.DEVICE for pool in allocations for memory in pool):
        return ()
    from kvmover.kernels.cuda_exports import exported

    answer = [[exported(memory.address, device) for memory in pool] for pool in allocations]
    whole = tuple(tuple(export for export in pool if export is not None) for pool in answer)
    if list(map(len, whole)) == list(map(len, allocations)):
        return whole
    log.warning("pools on %s are not exported: some lie in memory without a handle, as expandable segments do", device)
    return ()


@dataclass(slots=True, eq=False)
class Mappings:
    """The pools of peers, mapped at first use. `ours`: this rank's pools can be mapped by peers.

    A peer's pools are mapped if they are in memory of the same `kind`, for copies by `device`. A mapping stays valid
    when its peer dies, and is unmapped with the last region that uses it once the peer is forgotten.
    """

    ours: bool
    device: torch.device
    kind: MemoryKind
    machine: str = field(default_factory=machine)
    _mapped: dict[tuple[str, MapMode], Mapped | None] = field(
        default_factory=dict["tuple[str, MapMode]", "Mapped | None"]
    )
    _makers: dict[str, Maker | None] = field(default_factory=dict[str, "Maker | None"])

    def reach(self, peer: Peer, verb: Verb) -> bool:
        """Returns True if a copy can go from the peer's pools to this side's without a transport: the peer copies in a
        push, this side in a pull.

        For a push the peer is assumed to have this side's permissions: it may write, since this side may read. It must
        be a process of this host, whose end is known before pages that it may write are reused.
        """
        if self.pools(peer, MapMode.READ) is None:
            return False
        return verb is Verb.PULL or (self.ours and self.maker(peer) is not None)

    def maker(self, peer: Peer) -> Maker | None:
        """Returns the process of a peer that may map and write this side's pools; None if it can't be watched."""
        if peer.name not in self._makers:
            self._makers[peer.name] = self._watch(peer)
        return self._makers[peer.name]

    def _watch(self, peer: Peer) -> Maker | None:
        process = peer.card.process if self._is_near(peer) else None
        try:
            return Maker(process) if process is not None else None
        except NotShared as error:
            log.warning("nothing is mapped between this rank and %s: %s", peer.name, error)
            return None

    def _is_near(self, peer: Peer) -> bool:
        return bool(self.machine) and peer.card.machine == self.machine

    def pools(self, peer: Peer, access: MapMode) -> Mapped | None:
        """Returns the peer's pools; None if it is on another host, does not share them, or the kernel denies access."""
        key = peer.name, access
        if key not in self._mapped:
            self._mapped[key] = self._map(peer, access)
        return self._mapped[key]

    def _map(self, peer: Peer, access: MapMode) -> Mapped | None:
        try:
            return self._of_files(peer, access) if self.kind is MemoryKind.HOST else self._of_exports(peer)
        except NotShared as error:
            log.warning("the pools of %s cannot be mapped: %s", peer.name, error)
            return None

    def _of_files(self, peer: Peer, access: MapMode) -> Mapped | None:
        card = peer.card
        if not card.shares or not self._is_near(peer):
            return None
        every = {share.token: share for pool in card.shares for share in pool}
        files = {token: map_file(share, access) for token, share in every.items()}
        return tuple(
            BoundMemory(
                tuple(_tensor(files[share.token], share, memory) for share, memory in zip(pool, memories, strict=True))
            )
            for pool, memories in zip(card.shares, card.allocations, strict=True)
        )

    def _of_exports(self, peer: Peer) -> Mapped | None:
        """Map exported pools. A GPU maps for both reading and writing."""
        from kvmover.kernels.cuda_driver import CudaError
        from kvmover.kernels.cuda_exports import HandleKind, imported

        card = peer.card
        every = [export for pool in card.exports for export in pool]
        if not every or (not self._is_near(peer) and any(export.kind is HandleKind.IPC for export in every)):
            return None
        try:
            return tuple(
                BoundMemory(
                    tuple(
                        imported(export, self.device).tensor(export.offset, memory.nbytes)
                        for export, memory in zip(pool, memories, strict=True)
                    )
                )
                for pool, memories in zip(card.exports, card.allocations, strict=True)
            )
        except (CudaError, ValueError) as error:
            raise NotShared(str(error)) from error

    def forget(self, peer: str) -> None:
        """Forget a lost peer's mappings. Copies under way keep theirs."""
        for access in MapMode:
            self._mapped.pop((peer, access), None)
        self._makers.pop(peer, None)


def _tensor(file: memoryview, share: SharedRange, memory: Memory) -> torch.Tensor:
    import torch

    part = file[share.offset : share.offset + memory.nbytes]
    if share.offset < 0 or len(part) != memory.nbytes:
        raise NotShared(f"{memory.nbytes} bytes from {share.offset} on of a file of {len(file)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about read-only memory: the tensor is only read
        return torch.frombuffer(part, dtype=torch.uint8)
