"""What either rank of a migration knows of the other side: its processes, and what all of them have said."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvmover.errors import PeerUnknown
from kvmover.migrate.migration import Party
from kvmover.transfer.mover import Mover
from kvmover.transfer.peers.processes import PeerProcess
from kvmover.transfer.result import Transfer

#: From an attempt to tell, or to hear, that failed until the next: names come again only after a poll.
AGAIN_S = 0.5


#: To ask the kernel of a process takes some 20 us: so seldom it is asked again.
LOOK_S = 0.02


@dataclass(slots=True)
class Partners:
    """The processes of the other side, as they were when the migration began."""

    processes: tuple[PeerProcess, ...]
    _live: bool = True
    _look_at: float = -math.inf

    @classmethod
    def of(cls, mover: Mover, party: Party) -> Partners:
        """Raises PeerUnknown where not all of them are connected."""
        processes = mover.processes(party.engine)
        ranks = [process.rank for process in processes]
        if ranks != [*party.everyone]:
            raise PeerUnknown(f"ranks {ranks} of {party.engine} are connected, which has {party.ranks}")
        return cls(processes)

    @property
    def has_states(self) -> bool:
        """Whether what they cache has some that every token changes."""
        return any(component.states for component in self.processes[0].components)

    def live(self, now: float) -> bool:
        """Whether none of them is known to be dead."""
        if self._live and now >= self._look_at:
            self._look_at = now + LOOK_S
            self._live = not any(process.has_ended() for process in self.processes)
        return self._live


def said_in(transfer: Transfer) -> bytes:
    """What every rank of the other side has handed over beside a transfer that landed: each the same."""
    payloads = transfer.landed().aux
    return payloads[min(payloads)]


def has_failed(transfer: Transfer) -> bool:
    """Whether it ended without landing."""
    return transfer.result is not None and not transfer.result.landed
