"""What either rank of a migration knows of the other side: its processes, and what all of them have said."""

from __future__ import annotations

from kvmover.errors import PeerUnknown
from kvmover.migrate.migration import Party
from kvmover.transfer.mover import Mover
from kvmover.transfer.peers.processes import PeerProcess
from kvmover.transfer.result import Transfer

#: From an attempt to tell, or to hear, that failed until the next: names come again only after a poll.
AGAIN_S = 0.5


def partners_of(mover: Mover, party: Party) -> tuple[PeerProcess, ...]:
    """The processes of the other side as they are now. Raises PeerUnknown where not all of them are connected."""
    processes = mover.processes(party.engine)
    ranks = [process.rank for process in processes]
    if ranks != [*party.everyone]:
        raise PeerUnknown(f"ranks {ranks} of {party.engine} are connected, which has {party.ranks}")
    return processes


def said_in(transfer: Transfer) -> bytes:
    """What every rank of the other side has handed over beside a transfer that landed: each the same."""
    payloads = transfer.landed().aux
    return payloads[min(payloads)]


def has_failed(transfer: Transfer) -> bool:
    """Whether it ended without landing."""
    return transfer.result is not None and not transfer.result.landed
