"""What peers are asked about pages that they hold: every rank that a plan needs answers, and the fewest count."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from mover_fleets import Bench, Engine, HandClock

from kvmover.errors import PeerUnknown, PlanError
from kvmover.layout import Component, Fleet
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.handshake import Place

KV = Component.attention(2, 4, 8, "bfloat16")
HASHES = [bytes([number]) * 32 for number in range(8)]


def fleets(bench: Bench) -> tuple[Engine, Engine]:
    holder, asker = bench.engine("holder", Fleet(tp=4, page_tokens=8)), bench.engine("asker", Fleet(page_tokens=16))
    asker.connect(holder)
    bench.turn()
    return holder, asker


def held_by(holder: Engine, pages: Sequence[int]) -> list[tuple[int, Place, wire.Query]]:
    """Each rank says that it holds so many pages; who was asked by whom for what."""
    heard = list[tuple[int, Place, wire.Query]]()
    for number, mover in enumerate(holder.movers):

        def held(place: Place, ask: wire.Query, number: int = number) -> int:
            heard.append((number, place, ask))
            return pages[number]

        mover.asks.holder = held
    return heard


def test_the_fewest_pages_that_any_rank_holds_count() -> None:
    bench = Bench((KV,))
    holder, asker = fleets(bench)
    asked = held_by(holder, [5, 6, 7, 8])
    ended = list[int | None]()
    asker.movers[0].asks.begin("r", "holder", 2, HASHES, 1.0, ended.append)
    bench.settle(lambda: bool(ended))
    assert ended == [5]
    assert [place.engine for _, place, _ in asked] == ["asker"] * 4
    assert {ask for _, _, ask in asked} == {wire.Query("r", b"".join(HASHES), 2)}
    bench.turn()
    bench.assert_nothing_is_left()
    assert not asker.movers[0]._core.liveness.awaited


def test_nobody_holds_more_than_was_asked_for() -> None:
    bench = Bench((KV,))
    holder, asker = fleets(bench)
    for mover in holder.movers:
        mover.asks.holder = lambda place, ask: 1 << 40
    ended = list[int | None]()
    asker.movers[0].asks.begin("r", "holder", 2, HASHES, 1.0, ended.append)
    bench.settle(lambda: bool(ended))
    assert ended == [10]


def test_who_says_nothing_is_asked_again_and_in_the_end_nobody_counts() -> None:
    clock = HandClock()
    bench = Bench((KV,), clock=clock)
    holder, asker = fleets(bench)
    ended = list[int | None]()
    (mover,) = asker.movers
    mover.asks.begin("r", "holder", 0, HASHES, 2.5, ended.append)
    mover.poll()
    for peer in holder.movers[1:]:  # rank 0 does not run
        peer.asks.holder = lambda place, ask: 3
        peer.poll()
    mover.poll()
    before = mover.meter.counts["resent_messages"]
    clock.now += 1.1
    mover.poll()
    assert mover.meter.counts["resent_messages"] == before + 1
    assert not ended
    clock.now += 1.5
    mover.poll()
    assert ended == [None]
    assert not mover._core.liveness.awaited


def test_a_peer_that_is_lost_holds_nothing() -> None:
    bench = Bench((KV,))
    _, asker = fleets(bench)
    ended = list[int | None]()
    asker.movers[0].asks.begin("r", "holder", 0, HASHES, 60.0, ended.append)
    asker.movers[0].disconnect("holder", 2)
    assert ended == [0]
    with pytest.raises(PeerUnknown):
        asker.movers[0].asks.begin("s", "holder", 0, HASHES, 60.0, ended.append)


def test_a_side_that_keeps_nothing_says_so_and_a_name_is_asked_for_once() -> None:
    bench = Bench((KV,))
    _, asker = fleets(bench)
    ended = list[int | None]()
    asks = asker.movers[0].asks
    asks.begin("r", "holder", 0, HASHES, 60.0, ended.append)
    with pytest.raises(PlanError, match="already"):
        asks.begin("r", "holder", 0, HASHES, 60.0, ended.append)
    bench.settle(lambda: bool(ended))
    assert ended == [0]


def test_an_offer_that_is_not_wanted_is_given_back_to_those_that_made_it() -> None:
    bench = Bench((KV,))
    holder, asker = fleets(bench)
    heard = held_by(holder, [0, 1, 0, 1])
    ended = list[int | None]()
    asks = asker.movers[0].asks
    asks.begin("r", "holder", 0, HASHES, 60.0, ended.append)
    bench.settle(lambda: bool(ended))
    bench.turn()
    bench.turn()
    heard.clear()
    said = [mover.meter.counts["messages"] for mover in holder.movers]
    asks.decline("r")
    asks.decline("r")
    asks.decline("stranger")
    bench.turn()
    bench.turn()
    assert (1, wire.Query("r", b"")) in {(number, ask) for number, _, ask in heard}
    assert {ask for _, _, ask in heard} == {wire.Query("r", b"")}
    assert len(heard) == len({number for number, _, _ in heard})
    assert [mover.meter.counts["messages"] for mover in holder.movers] == said


def test_who_did_not_answer_in_time_is_told_that_nothing_is_wanted() -> None:
    clock = HandClock()
    bench = Bench((KV,), clock=clock)
    holder, asker = fleets(bench)
    ended = list[int | None]()
    (mover,) = asker.movers
    mover.asks.begin("r", "holder", 0, HASHES, 2.5, ended.append)
    mover.poll()
    clock.now += 3.0
    mover.poll()
    assert ended == [None]
    heard = held_by(holder, [0] * 4)
    mover.asks.decline("r")
    bench.turn()
    assert [ask for _, _, ask in heard].count(wire.Query("r", b"")) == 4


def test_what_is_taken_is_not_given_back() -> None:
    bench = Bench((KV,))
    holder, asker = fleets(bench)
    heard = held_by(holder, [3] * 4)
    ended = list[int | None]()
    asks = asker.movers[0].asks
    asks.begin("r", "holder", 0, HASHES, 60.0, ended.append)
    bench.settle(lambda: bool(ended))
    asks.take("r")
    asks.decline("r")
    bench.turn()
    assert {len(ask.hashes) for _, _, ask in heard} == {256}
