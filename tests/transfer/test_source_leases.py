"""Which lease a source holds, and what it may write under it: the newest term's, of a peer that is there."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from mover_fleets import CONFIG, HandClock, Pair

from kvmover.plan.cost import Route
from kvmover.regions import BoundMemory
from kvmover.transfer.meter import Count
from kvmover.transfer.protocol.wire import WriteLease
from kvmover.transfer.source.writes import Part, Writes


@pytest.fixture
def writes() -> Writes:
    return Pair.of().src.movers[0]._writes


def until(writes: Writes, term: int) -> float:
    """When a write to `a` that was granted in a term may be posted last."""
    entry: Any = SimpleNamespace(job=SimpleNamespace(peer=SimpleNamespace(name="a")), term=term)
    return writes._until(entry)


def test_a_write_is_posted_in_the_term_of_the_lease_and_no_other(writes: Writes):
    assert until(writes, 0) == until(writes, 2) == -math.inf
    writes.renew("a", WriteLease(2, 100, 50))
    assert until(writes, 2) == pytest.approx(150e-6)
    assert until(writes, 1) == until(writes, 3) == -math.inf
    writes.renew("b", WriteLease(3, 10**9, 10**9))
    assert until(writes, 3) == -math.inf, "another destination's"


def test_of_two_leases_the_later_term_counts_and_of_one_term_the_one_that_ends_later(writes: Writes):
    writes.renew("a", WriteLease(2, 100, 50))
    writes.renew("a", WriteLease(1, 10**9, 10**9))
    writes.renew("a", WriteLease(2, 90, 50))
    assert until(writes, 2) == pytest.approx(150e-6)
    assert until(writes, 1) == -math.inf
    writes.renew("a", WriteLease(2, 200, 50))
    assert until(writes, 2) == pytest.approx(250e-6)
    writes.renew("a", WriteLease(3, 10, 5))
    assert until(writes, 2) == -math.inf, "what was granted before is void"
    assert until(writes, 3) == pytest.approx(15e-6)


def test_a_peer_that_is_lost_takes_its_lease_along(writes: Writes):
    writes.renew("a", WriteLease(2, 10**9, 10**9))
    writes.lost("a")
    assert until(writes, 2) == -math.inf


def test_a_chunk_is_copied_into_mapped_pages_under_its_lease_alone():
    """No transport looks at the lease of such a copy once more: the source does, before it begins."""
    pair = Pair.of(config=replace(CONFIG, route=Route.DIRECT), clock=HandClock())
    pair.bench.network.hold()
    pair.send()
    pair.receive()
    pair.bench.turn()
    source, (target,) = pair.src.movers[0], pair.dst.pools[0]
    (attempt,) = source._source._requests["request"].attempts.values()
    job = msgspec.structs.replace(attempt.job, mapped=(BoundMemory(target.tensors),))
    writes, name, count = source._writes, attempt.job.peer.name, source.meter.counts
    before, term, now_us = [each.clone() for each in target.tensors], writes._leases[name].term, 1_000_000_000
    for until_us in (now_us, now_us + 1):
        writes.renew(name, WriteLease(term + 1, until_us, 0))
        lapsed = count[Count.LAPSED_CHUNKS]
        assert writes._start(Part(job, 0, 0, 0, term + 1, 0, 0.0))
        assert count[Count.LAPSED_CHUNKS] == lapsed + (until_us == now_us)
        assert all(map(torch.equal, before, target.tensors)) == (until_us == now_us)
