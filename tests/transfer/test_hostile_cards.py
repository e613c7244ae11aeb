"""Cards that are well formed and still mean harm: who seats one spins, raises and keeps nothing because of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from mover_fleets import CONFIG, Pair

from kvmover.errors import PeerRefused
from kvmover.layout import Fleet, Pool
from kvmover.transfer.memory.arena import ALIGN_BYTES
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.handshake import Card, Place, Rank
from kvmover.transport import Memory, MemoryKind

FLEET = Fleet(page_tokens=4)


def card_of(mover: Mover, **changes: Any) -> bytes:
    """Its card, with other values of the body."""
    envelope = msgspec.msgpack.decode(mover._connections.card, type=Card)
    rank = msgspec.msgpack.decode(envelope.body, type=Rank)
    body = msgspec.msgpack.encode(msgspec.structs.replace(rank, **changes))
    return msgspec.msgpack.encode(Card(envelope.speaks, envelope.fields, envelope.model, body))


def stranger(pair: Pair) -> Mover:
    """A rank of the same model that is not polled, and may speak to the destination."""
    mover = pair.bench.mover(Place("stranger", FLEET, 0), [Pool.zeros(pair.src.pools[0][0].spec)])
    pair.bench.movers.remove(mover)
    mover._transport.connect(pair.dst.movers[0]._core.card.transport)
    return mover


def says(pair: Pair, mover: Mover, **changes: Any) -> None:
    """A Hello of its own card, with other values."""
    target = pair.dst.movers[0]._transport.name
    mover._transport.notify(target, wire.encode(wire.Hello(card_of(mover, **changes))))
    pair.bench.turn()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ["arena", "staging"])
@pytest.mark.parametrize("nbytes", [0, 1, ALIGN_BYTES - 1])
def test_staging_memory_that_holds_no_region_is_refused_and_is_never_divided_by(what: str, nbytes: int):
    """Chunks would be cut ever smaller to fit it, inside one `receive`."""
    pair = Pair.of()
    mover = stranger(pair)
    memory = replace(getattr(mover._core.card, what), nbytes=nbytes)
    with pytest.raises(PeerRefused, match=f"{what} of {nbytes} bytes"):
        pair.dst.movers[0].connect(card_of(mover, **{what: memory}))


@pytest.mark.parametrize("nbytes", [0, 1, (128 << 10) - 1])
def test_a_sandbox_that_is_too_small_to_measure_in_is_not_measured_in(nbytes: int):
    pair = Pair.of(config=replace(CONFIG, sandbox_bytes=1 << 20))
    mover, target = stranger(pair), pair.dst.movers[0]
    says(pair, mover, sandbox=Memory(MemoryKind.HOST, 4096, nbytes), host="elsewhere")
    assert target.meter.counts[Count.FAULTS] == 0
    assert target.meter.refused.total() == 0
    assert target.ranks("stranger") == {0}


def test_a_process_says_of_itself_what_it_said_before():
    """Only what it registered may have changed since: with another host each time it would be measured for ever."""
    pair = Pair.of(config=replace(CONFIG, sandbox_bytes=1 << 20))
    mover, target = stranger(pair), pair.dst.movers[0]
    says(pair, mover)
    known = target._core.peers[mover._transport.name].card
    for number in range(20):
        says(pair, mover, host=f"host {number}")
        says(pair, mover, arena=replace(known.arena, address=4096))
    assert target._core.peers[mover._transport.name].card == known
    assert target.meter.refused.total() == 40
    assert len(target._core.links._links) == 1
    says(pair, mover, registration=3)
    assert target._core.peers[mover._transport.name].card.registration == 3
