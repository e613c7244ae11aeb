"""What is left when all has ended: nothing, whoever died, was stopped or was cut off."""

from __future__ import annotations

from tests.sim.scenario import linked
from tests.sim.scene import Scene
from tests.sim.seats import Seat


def left(scene: Scene) -> list[str]:
    """What movers still remember and should not, and whom they should know and do not."""
    found = [text for seat in scene.alive for text in _remembered(scene, seat)]
    return found or [text for seat in scene.alive for text in _strangers(scene, seat)]


def _remembered(scene: Scene, seat: Seat) -> list[str]:
    mover = seat.mover
    arena, wards = mover._core.incoming.arena, mover._destination.quarantine._isolated
    tables = {
        "attempts": mover._destination._attempts,
        "queue": mover._destination._credits,
        "limbo": wards,
        "farewells": mover._destination._retransmissions,
        "reads": mover._reads.flights,
        "waiting reads": mover._reads._waiting,
        "read bytes": mover._reads._packed,
        "requests": mover._source._requests,
        "early": mover._source.early,
        "posts": mover._writes._queue,
        "staged": mover._writes._staged,
        "writes": mover._writes.flights,
        "later": mover._core.later,
        "staging": mover._core.outgoing.arena._reserved,
        "reserved": arena._reserved,
        "held": seat.orders,
    }
    return [f"{seat.name} {name}: {len(table)}" for name, table in tables.items() if table]


def _strangers(scene: Scene, seat: Seat) -> list[str]:
    """Ranks of another engine that live and can be reached are connected, whatever has happened before."""
    return [
        f"{seat.name} does not know {other.name}"
        for other in scene.alive
        if linked(other.place.engine, seat.place.engine)
        and scene.network.unreachable_since(seat.name, other.name) is None
        and seat.mover._core.peers.get(other.name) is None
    ]
