"""A mover joins again with other weights: what is open ends on both sides, and nobody meets the rank as it was."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace

import pytest
from mover_fleets import CONFIG, Bench, HandClock, Pair
from mover_network import FaultyNetwork

from kvmover.errors import LayoutError, OtherWeights, PlanError, TransportError
from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.handshake import Model
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Transfer
from kvmover.transfer.threads.progress import Progress

FLEET = Fleet(page_tokens=4)
WHY = "the weights of this engine were updated"


def other(bench: Bench, weights: str) -> Model:
    return Model("toy", bench.components, weights)


def rejoin(pair: Pair, mover: Mover, weights: str) -> None:
    name = f"again-{mover._core.card.place.engine}"
    mover.rejoin(lambda: pair.bench.transport(name), other(pair.bench, weights), WHY)


def lands(pair: Pair, request: str) -> None:
    again = Pair.request(pair.bench, pair.src, pair.dst, 100, seed=7)
    transfers = [*again.send(request), *again.receive(request)]
    pair.bench.ended(transfers)
    assert [transfer.landed().reason for transfer in transfers] == [None] * len(transfers)
    again.assert_landed()


def reason(transfer: Transfer) -> str:
    assert transfer.result is not None
    return str(transfer.result.reason)


def both(pair: Pair) -> tuple[Mover, Mover]:
    return pair.src.movers[0], pair.dst.movers[0]


@pytest.mark.parametrize("verb", Verb)
@pytest.mark.parametrize("route", [Route.PACKED, Route.DIRECT])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_what_is_open_ends_on_both_sides_for_the_reason_of_the_update(side: str, route: Route, verb: Verb):
    network = FaultyNetwork()
    pair = Pair.of(config=replace(CONFIG, verb=verb, route=route), network=network)
    source, target = both(pair)
    network.most = 1  # the others stay under way
    transfers = [*pair.send(), *pair.receive()]
    pair.bench.turn()
    assert not any(transfer.ended for transfer in transfers)
    rejoin(pair, source if side == "source" else target, "of version 2")
    pair.bench.turn()
    assert transfers[side == "destination"].ended
    were_free, landed = transfers[1].ended and not transfers[1].quarantined, pair.dst.snapshot()
    network.deliver()
    pair.bench.ended(transfers)
    assert [WHY in reason(transfer) for transfer in transfers] == [True, True]
    if were_free:  # and others' by now
        pair.dst.assert_holds(landed)
    assert not transfers[0].quarantined


def test_pages_that_a_peer_may_still_write_are_held_and_nobody_elses_until_its_lease_is_over():
    network, clock = FaultyNetwork(), HandClock()
    pair = Pair.of(config=replace(CONFIG, route=Route.DIRECT), network=network, clock=clock)
    source, target = both(pair)
    network.most = 1
    pair.send()
    (receive,) = pair.receive()
    pair.bench.turn()
    pair.bench.movers.remove(source)  # it has stopped, and says nothing any more
    rejoin(pair, target, "of version 2")
    assert receive.ended
    assert receive.quarantined
    rejoin(pair, target, "of version 3")
    assert receive.quarantined
    source.close()
    again = pair.bench.mover(source._core.card.place, pair.src.pools[0])
    again.rejoin(lambda: pair.bench.transport("prefill-again"), other(pair.bench, "of version 3"), WHY)
    target.connect(again.card)
    with pytest.raises(PlanError, match="may still be written"):
        target.receive("next", "prefill", range(100), pair.dst_tables[0])
    clock.now += CONFIG.lease_s * 1.02 + CONFIG.linger_s
    target.poll()
    assert not receive.quarantined
    assert not target.receive("next", "prefill", range(100), pair.dst_tables[0]).ended


def test_staging_memory_that_a_peer_may_still_write_is_leased_to_nobody_until_its_lease_is_over():
    network, clock = FaultyNetwork(), HandClock()
    pair = Pair.of(config=replace(CONFIG, route=Route.PACKED), network=network, clock=clock)
    source, target = both(pair)
    network.most = 1
    pair.send()
    pair.receive()
    pair.bench.turn()
    pair.bench.movers.remove(source)
    rejoin(pair, target, "of version 2")
    arena = target._core.incoming.arena
    assert arena.quarantined_bytes == arena.reserved_bytes > 0
    clock.now += CONFIG.lease_s * 1.02 + CONFIG.linger_s
    target.poll()
    pair.bench.assert_nothing_is_left()


def test_the_rank_as_it_was_is_met_by_nobody_and_halves_of_one_version_meet():
    pair = Pair.of()
    source, target = both(pair)
    lands(pair, "before")
    old = source.card
    rejoin(pair, source, "a, version 2")
    pair.bench.turn()
    assert target.ranks("prefill") == frozenset()
    with pytest.raises(OtherWeights, match="peer holds weights a, version 2 of toy .*; this side holds toy"):
        target.connect(source.card)
    with suppress(TransportError):
        target.connect(old)
    pair.bench.turn()
    assert target.ranks("prefill") == frozenset()  # nobody is there any more
    rejoin(pair, target, "a, version 2")
    target.connect(source.card)
    lands(pair, "after")
    assert source.meter.counts[Count.SENT_BYTES] == target.meter.counts[Count.RECEIVED_BYTES] > 100 * 1024


def test_what_a_rank_was_asked_for_before_it_joined_again_is_not_sent_after():
    pair = Pair.of()
    source, _ = both(pair)
    (receive,) = pair.receive()
    pair.bench.turn()
    rejoin(pair, source, "of version 2")
    pair.bench.ended([receive])
    assert WHY in reason(receive)
    (send,) = pair.send()
    pair.bench.turn()
    assert not send.ended
    pair.dst.assert_holds(pair.before)


def test_who_asks_anew_for_what_was_offered_before_hears_at_once_why_it_is_gone():
    pair = Pair.of()
    source, target = both(pair)
    pair.send()
    for weights in ("of version 2", "of version 3"):
        rejoin(pair, source, weights)
    rejoin(pair, target, "of version 3")
    target.connect(source.card)
    (receive,) = pair.receive()
    pair.bench.ended([receive])
    assert WHY in reason(receive)
    pair.dst.assert_holds(pair.before)
    lands(pair, "after")


def test_a_model_of_other_components_ends_nothing():
    pair = Pair.of()
    source, _ = both(pair)
    model = Model("toy", (Component.attention(9, 9, 64, "bfloat16"),), "of version 2")
    with pytest.raises(LayoutError, match="9x2x9x64"):
        source.rejoin(lambda: pair.bench.transport("again"), model, WHY)
    lands(pair, "after")


def test_watchers_and_counts_go_on_and_a_driven_mover_is_driven_on():
    pair = Pair.of()
    source, target = both(pair)
    heard: list[str | None] = []
    source.watch(lambda ending: heard.append(ending.result.reason))
    pair.send()
    rejoin(pair, source, "of version 2")
    rejoin(pair, target, "of version 2")
    target.connect(source.card)
    lands(pair, "after")
    assert heard == [WHY, None]


def test_an_engine_ends_what_is_open_and_waits_for_its_peers_before_its_rank_joins_again():
    bench = Bench((Component("attention", 2, 2, 2, 64, "bfloat16"),), CONFIG)
    source, target = bench.engine("prefill", FLEET), bench.engine("decode", FLEET, "HND")
    target.connect(source)
    pair = Pair.request(bench, source, target, 100)
    with closing(Progress(source.movers[0])) as sends, closing(Progress(target.movers[0])) as receives:
        waits = receives.begin(lambda mover: mover.receive("request", "prefill", range(100), pair.dst_tables[0]))
        offer = sends.begin(lambda mover: mover.send("other", pair.src_tables[0]))
        ended = [receives.ended(waits.result()), sends.ended(offer.result())]
        sends.rejoin(lambda: bench.transport("again"), other(bench, "of version 2"), WHY)
        assert ended[1].result(9).reason == WHY
        assert WHY in str(ended[0].result(9).reason)
        receives.rejoin(lambda: bench.transport("again"), other(bench, "of version 2"), WHY)
        receives.submit(lambda mover: mover.connect(sends.card)).result()
        sends.begin(lambda mover: mover.send("after", pair.src_tables[0]))
        landing = receives.begin(lambda mover: mover.receive("after", "prefill", range(100), pair.dst_tables[0]))
        assert receives.ended(landing.result()).result(9).reason is None
        pair.assert_landed()
