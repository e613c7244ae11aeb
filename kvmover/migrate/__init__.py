"""Live migration: a running request moves to another engine while it decodes, and exactly one of the two continues it.

It uses a Mover's public calls alone: pages, announcements and the hand-over are transfers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmover.faces import public

if TYPE_CHECKING:
    from kvmover.migrate.arrival import ArrivalPhase
    from kvmover.migrate.arriving_rank import ArrivingRank
    from kvmover.migrate.departing_rank import Checkpoint, DepartingRank
    from kvmover.migrate.departure import DeparturePhase
    from kvmover.migrate.migration import Migration, Party
    from kvmover.migrate.rounds import MigrationConfig

_HOME = {
    "ArrivalPhase": "arrival",
    "ArrivingRank": "arriving_rank",
    "Checkpoint": "departing_rank",
    "DepartingRank": "departing_rank",
    "DeparturePhase": "departure",
    "Migration": "migration",
    "MigrationConfig": "rounds",
    "Party": "migration",
}

__all__ = [
    "ArrivalPhase",
    "ArrivingRank",
    "Checkpoint",
    "DepartingRank",
    "DeparturePhase",
    "Migration",
    "MigrationConfig",
    "Party",
]


def __getattr__(name: str) -> object:
    return public(__name__, _HOME, name)
