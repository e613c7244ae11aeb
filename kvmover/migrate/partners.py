"""The other side of a migration, as one rank knows it: its processes, and the payload that they all sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvmover.errors import PeerUnknown
from kvmover.migrate.migration import Party
from kvmover.transfer.mover import Mover
from kvmover.transfer.peers.processes import PeerProcess
from kvmover.transfer.result import Transfer

#: Seconds from a failed attempt to send or receive until the next: a name is free again only after a poll.
AGAIN_S = 0.5


#: Seconds between looks at a process: each asks the kernel, which takes some 20 us.
LOOK_S = 0.02


@dataclass(slots=True)
class Partners:
    """The processes of the other side, as the migration began."""

    processes: tuple[PeerProcess, ...]
    _live: bool = True
    _look_at: float = -math.inf

    @classmethod
    def of(cls, mover: Mover, party: Party) -> Partners:
        """Look up all ranks of `party`. Raises PeerUnknown unless all are connected."""
        processes = mover.processes(party.engine)
        ranks = [process.rank for process in processes]
        if ranks != [*party.everyone]:
            raise PeerUnknown(f"ranks {ranks} of {party.engine} are connected, which has {party.ranks}")
        return cls(processes)

    @property
    def has_states(self) -> bool:
        """Returns True if their caches have recurrent states."""
        return any(component.states for component in self.processes[0].components)

    def live(self, now: float) -> bool:
        """Returns False once one is known to be dead."""
        if self._live and now >= self._look_at:
            self._look_at = now + LOOK_S
            self._live = not any(process.has_ended() for process in self.processes)
        return self._live


def said_in(transfer: Transfer) -> bytes:
    """Returns the payload of a landed transfer, equal from all ranks."""
    payloads = transfer.landed().aux
    return payloads[min(payloads)]


def has_failed(transfer: Transfer) -> bool:
    """Returns True if it ended without landing."""
    return transfer.result is not None and not transfer.result.landed
