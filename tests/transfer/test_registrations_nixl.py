"""Slabs over NIXL, where somebody vouches for the hardware: a healthy peer loads the new keys and goes on.

UCX's tcp and cma do not end what a peer may do (see `test_nixl_processes`), so this shows that nobody is disturbed, and
not that anybody is shut out.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from mover_fleets import CONFIG, Bench, Pair

pytest.importorskip("nixl_cu13._api", reason="needs the nixl-cu13 wheel")

from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.meter import Count
from kvmover.transfer.result import Cause
from kvmover.transport import NixlTransport, Note, Revocation, Transport

pytestmark = pytest.mark.timeout(90)

CHUNK_BYTES = 4096


class NixlBench(Bench):
    def transport(self, name: str) -> Transport:
        return NixlTransport(name)


def test_a_peer_goes_on_by_new_keys_when_another_has_died_and_its_slabs_were_registered_anew():
    costs = replace(CONFIG.costs, chunk_bytes=CHUNK_BYTES)
    config = replace(CONFIG, route=Route.PACKED, arena_bytes=8 * CHUNK_BYTES, costs=costs, revocation=Revocation.PROVEN)
    bench = NixlBench((Component("attention", 2, 2, 2, 64, "bfloat16"),), config)
    doomed, healthy, target = (bench.engine(name, Fleet(page_tokens=4)) for name in ("doomed", "healthy", "decode"))
    (decode,), (dying,) = target.movers, doomed.movers
    try:
        target.connect(doomed)
        target.connect(healthy)
        bench.settle(lambda: all(len(mover._core.peers) for mover in bench.movers))
        arena = decode._core.incoming.arena
        first = Pair.request(bench, healthy, target, 100)
        bench.ended([*first.send("first"), *first.receive("first")])
        first.assert_landed()
        lost = Pair.request(bench, doomed, target, 100, seed=3)
        lost.send("lost")
        (landing,) = lost.receive("lost")
        bench.movers.remove(dying)
        while arena.reserved_bytes < 4 * CHUNK_BYTES:  # its share, all of which is granted and none of which it writes
            for event in dying._transport.poll():
                if isinstance(event, Note):
                    dying._hear(event)
            dying._flush()
            bench.turn(1)
        dying._transport.close()
        bench.ended([landing])
        assert landing.result is not None
        assert landing.result.cause is Cause.PEER_LOST
        bench.settle(lambda: not arena.reserved_bytes)
        assert decode.meter.counts[Count.RENEWED_SLABS] == 4
        second = Pair.request(bench, healthy, target, 100, seed=5)
        transfers = [*second.send("second"), *second.receive("second")]
        bench.ended(transfers)
        assert [transfer.result is not None and transfer.result.landed for transfer in transfers] == [True, True]
        second.assert_landed()
        assert healthy.movers[0]._writes.registrations.known(decode._transport.name) == arena.registration == 4
    finally:
        for mover in bench.movers:
            mover.close()
