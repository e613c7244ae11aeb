"""Messages about attempts that a source does not have: over, withdrawn, or never asked for. Each has one answer."""

from __future__ import annotations

import pytest
from mover_fleets import HandClock, Pair

from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.meter import Count
from kvmover.transfer.protocol import wire
from kvmover.transfer.tombstones import MEMORY_S


def said(pair: Pair, *messages: wire.AnyMessage) -> list[wire.AnyMessage]:
    """What the source answers to messages of the target, which hears nothing of it."""
    source, target = pair.src.movers[0], pair.dst.movers[0]
    target._transport.inbox.clear()
    for message in messages:
        target._transport.notify(source._transport.name, wire.encode(message))
        source.poll()
    source.poll()
    found = [wire.decode(each) for note in target._transport.inbox for each in wire.split(note.payload)]
    return [each for each in found if isinstance(each, wire.About)]


def late(pair: Pair) -> int:
    return pair.src.movers[0].meter.counts[Count.LATE_MESSAGES]


def want(request: str = "request", generation: int = 1) -> wire.Want:
    return wire.Want(request, generation, 0, 100, Route.PACKED, Replicas.STRIPE, 4096)


GRANTED = wire.Granted("request", 1, (wire.Grant(0, 0),))


def test_an_attempt_that_has_landed_is_told_so_where_it_asks_and_opens_nothing_again():
    pair = Pair.of()
    pair.bench.ended([*pair.send(), *pair.receive()])
    (key,) = pair.src.movers[0]._source._closed._attempts._entries
    (outcome, _) = pair.src.movers[0]._source._closed._attempts._entries[key]
    id_ = "request", outcome.generation
    assert outcome.reason is None
    assert said(pair, want(*id_)) == []
    assert late(pair) == 0
    assert said(pair, wire.Done(*id_)) == [wire.Kept(*id_)]
    assert said(pair, wire.Granted(*id_, ())) == []
    assert late(pair) == 2
    assert not pair.src.movers[0]._source.early
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize("message", [GRANTED, wire.Done("request", 1)], ids=["granted", "done"])
def test_an_attempt_that_has_failed_is_told_the_reason_whatever_it_says(message: wire.AnyMessage):
    pair = Pair.of()
    pair.send()
    assert [type(each) for each in said(pair, want())] == [wire.Offered]
    assert said(pair, wire.Abort("request", 1, "enough")) == [wire.Drained("request", 1)]
    assert said(pair, message) == [wire.Abort("request", 1, "enough")]
    assert late(pair) == 1


def test_an_attempt_that_was_never_heard_of_is_counted_and_not_answered():
    pair = Pair.of()
    assert said(pair, GRANTED, wire.Done("request", 1)) == []
    assert late(pair) == 2
    assert said(pair, wire.Abort("request", 1, "enough")) == [wire.Drained("request", 1)]


def test_a_peer_is_watched_while_its_want_waits_and_no_longer():
    pair = Pair.of()
    awaited = pair.src.movers[0]._core.liveness.awaited
    name = pair.dst.movers[0]._transport.name
    said(pair, wire.Abort("other", 1, "never asked"))
    assert name not in awaited
    assert [type(each) for each in said(pair, want(), want("second"))] == [wire.Noted, wire.Noted]
    said(pair, wire.Abort("request", 1, "enough"), wire.Abort("other", 1, "never asked"))
    assert name in awaited
    said(pair, wire.Abort("second", 1, "enough"))
    assert name not in awaited
    assert not pair.src.movers[0]._source.early


def test_a_request_that_is_reopened_is_asked_for_anew_and_remembers_no_loss():
    pair = Pair.of(clock=HandClock())
    source, target = pair.src.movers[0], pair.dst.movers[0]
    source.refuse("request", "no room")
    assert said(pair, want()) == [wire.Abort("request", 1, "no room")]
    source.reopen("request")
    assert [type(each) for each in said(pair, want(generation=2))] == [wire.Noted]
    source._source.lost(target._transport.name, "it died")
    assert source._source.early._lost.get("request") == {"decode": "it died"}
    source.reopen("request")
    assert source._source.early._lost.get("request") is None


def test_losses_and_ends_are_forgotten_in_time():
    clock = HandClock()
    pair = Pair.of(clock=clock)
    source, target = pair.src.movers[0], pair.dst.movers[0]
    said(pair, want())
    source._source.lost(target._transport.name, "it died")
    source.refuse("other", "no room")
    lost, ended = source._source.early._lost, source._source._closed
    source._source.expire(clock.now)
    assert (len(lost), ended.ending("other")) == (1, "no room")
    source._source.expire(clock.now + MEMORY_S)
    assert (len(lost), ended.ending("other")) == (0, None)
