"""Packed chunks go a window at a time where operations share the wire, so that they end one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvmover.plan.cost import Posting
from kvmover.transfer.meter import Gauge
from kvmover.transfer.protocol.wire import Verb
from tests.transfer.mover_fleets import CONFIG, Pair

#: A window of two chunks of 4 KiB, of the 25 of a request.
SOCKET = replace(CONFIG, costs=replace(CONFIG.costs, posting=Posting.SOCKET), drain_s=0.01)


def under_way(pair: Pair) -> int:
    (source, target) = pair.bench.movers
    return source.snapshot().gauges[Gauge.WRITES_UNDER_WAY] + target.snapshot().gauges[Gauge.READS_UNDER_WAY]


@pytest.mark.parametrize(("verb", "most"), [(Verb.PUSH, 2), (Verb.PULL, 4)])
def test_a_window_of_chunks_is_under_way_and_every_byte_lands(verb: Verb, most: int) -> None:
    pair = Pair.of(config=replace(SOCKET, verb=verb))
    network, transfers, seen = pair.bench.network, [*pair.send(), *pair.receive()], list[int]()
    while not all(transfer.ended for transfer in transfers):
        network.hold()
        pair.bench.turn()
        seen.append(under_way(pair))
        network.deliver()
    assert max(seen) == most
    pair.assert_landed()


def lose(pair: Pair) -> None:
    (source, target) = pair.bench.movers
    target._lose(source._core.transport.name, "gone")


def abort(pair: Pair) -> None:
    target = pair.bench.movers[1]
    (attempt,) = target._destination._attempts
    target.abort(attempt.transfer, "enough of this")


@pytest.mark.parametrize("end", [lose, abort])
def test_reads_that_wait_for_room_end_with_their_request(end: Callable[[Pair], None]) -> None:
    """Memory of the arena stays theirs until no read can touch it, and is free then."""
    pair = Pair.of(config=replace(SOCKET, verb=Verb.PULL))
    network, target = pair.bench.network, pair.bench.movers[1]
    network.hold()
    pair.send()
    (landing,) = pair.receive()
    pair.bench.settle(lambda: under_way(pair) == 4 and bool(target._reads._waiting))
    end(pair)
    network.deliver()
    pair.bench.settle(lambda: landing.ended and not target.snapshot().gauges[Gauge.ATTEMPTS_IN_LIMBO])
    assert landing.result is not None
    assert landing.result.reason is not None
    assert not target._reads._waiting
    assert not target._reads._packed
    assert target.snapshot().gauges[Gauge.INCOMING_RESERVED_BYTES] == 0
