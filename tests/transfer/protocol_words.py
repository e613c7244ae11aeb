"""What peers say of attempt 7 at request r: one short word for each message, for tests of the state machines."""

from __future__ import annotations

from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.destination.destination_machine import Heard
from kvmover.transfer.protocol import wire

WANT = wire.Want("r", 7, 0, 1, Route.PACKED, Replicas.STRIPE, 1 << 20)
DONE = wire.Done("r", 7)


def says_noted(peer: str, keeps_ms: int) -> Heard:
    return Heard(peer, wire.Noted("r", 7, keeps_ms))


def says_offered(peer: str, ready: tuple[tuple[int, int], ...]) -> Heard:
    return Heard(peer, wire.Offered("r", 7, ready))


def says_chunk(peer: str, chunk: int, round_: int = 0, digest: int | None = None) -> Heard:
    return Heard(peer, wire.Chunk("r", 7, chunk, round_, digest))


def says_staged(peer: str, chunk: int, offset: int, round_: int = 0, digest: int | None = None) -> Heard:
    return Heard(peer, wire.Staged("r", 7, chunk, offset, round_, digest))


def says_aux(peer: str) -> Heard:
    return Heard(peer, wire.Aux("r", 7, b""))


def says_kept(peer: str) -> Heard:
    return Heard(peer, wire.Kept("r", 7))


def says_abort(peer: str, reason: str) -> Heard:
    return Heard(peer, wire.Abort("r", 7, reason))


def says_drained(peer: str) -> Heard:
    return Heard(peer, wire.Drained("r", 7))


def grant(chunk: int, offset: int, round_: int = 0) -> wire.Granted:
    return wire.Granted("r", 7, (wire.Grant(chunk, offset, round_),))


def taken(chunk: int, round_: int = 0) -> wire.Taken:
    return wire.Taken("r", 7, chunk, round_)


def abort(reason: str) -> wire.Abort:
    return wire.Abort("r", 7, reason)
