"""A running request moves between two engines of unlike shape while it writes, or comes back, in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from migrating import ATTENTION, DIGEST, HYBRID, Move

from kvmover.errors import PeerUnknown, PlanError, ProtocolError
from kvmover.layout import Component, Fleet
from kvmover.migrate import ArrivalPhase, DepartingRank, DeparturePhase, Migration, MigrationConfig, Party
from kvmover.migrate.migration import MAX_PAYLOAD_BYTES, Decision
from kvmover.migrate.partners import LOOK_S
from kvmover.plan.cost import Route
from kvmover.transfer.protocol.content import Content, IdentityCheck
from kvmover.transfer.protocol.wire import Verb
from tests.transfer.mover_fleets import CONFIG, HandClock

FLEETS = [
    (Fleet(tp=2, page_tokens=4), Fleet(tp=1, page_tokens=8)),
    (Fleet(tp=1, page_tokens=8), Fleet(tp=2, page_tokens=4)),
    (Fleet(tp=1, pp=2, page_tokens=3), Fleet(tp=2, page_tokens=4)),
    (Fleet(tp=1, cp=2, page_tokens=4), Fleet(tp=1, page_tokens=4)),
    (Fleet(tp=4, page_tokens=4), Fleet(tp=2, page_tokens=4)),
]


@pytest.mark.parametrize("components", [ATTENTION, HYBRID], ids=["attention", "hybrid"])
@pytest.mark.parametrize(("src", "dst"), FLEETS, ids=str)
def test_a_request_that_goes_on_writing_arrives_whole(src: Fleet, dst: Fleet, components: tuple[Component, ...]):
    move = Move.between(src, dst, components)
    move.begin()
    move.until_settled()
    assert {each.phase for each in move.departing} == {DeparturePhase.GONE}
    for arriving in move.arriving:
        assert arriving.phase is ArrivalPhase.HERE
        assert arriving.landed_tokens == arriving.payload_tokens == move.tokens > 20
        assert arriving.payload == move.payload()
    move.assert_target_holds(move.tokens)
    move.bench.turn()
    assert not any(each.holds_pages for each in (*move.departing, *move.arriving))
    move.bench.assert_nothing_is_left()


@pytest.mark.parametrize("route", [Route.PACKED, Route.DIRECT])
@pytest.mark.parametrize("verb", Verb)
def test_it_moves_by_every_route_and_verb(route: Route, verb: Verb):
    move = Move.between(*FLEETS[0], HYBRID, replace(CONFIG, route=route, verb=verb))
    move.begin()
    move.until_settled()
    assert {each.phase for each in move.arriving} == {ArrivalPhase.HERE}
    move.assert_target_holds(move.tokens)


def test_the_request_pauses_at_the_token_that_was_announced_and_nowhere_else():
    move, stops = Move.between(*FLEETS[0]), set[int]()
    move.begin(MigrationConfig(tail_tokens=0, ahead_tokens=2, most_rounds=3))
    while move.departing[0].phase is not DeparturePhase.GONE:
        before = move.tokens
        move.step()
        if move.tokens == before:
            stops.add(move.tokens)
    assert len(stops) == 1
    assert len(move.departing[0].transfers) == 3
    assert move.departing[0].may_write == 0


def test_an_engine_that_keeps_its_request_has_it_at_once_and_the_target_lets_its_pages_go():
    move = Move.between(*FLEETS[0])
    move.begin()
    move.step()
    for departing in move.departing:
        departing.keep("it has ended")
    assert {(each.phase, each.reason) for each in move.departing} == {(DeparturePhase.BACK, "it has ended")}
    move.until_settled()
    assert {each.phase for each in move.arriving} == {ArrivalPhase.DECLINED}
    assert "it has ended" in str(move.arriving[0].reason)
    move.bench.turn()
    assert not move.arriving[0].holds_pages
    move.bench.assert_nothing_is_left()


def test_a_target_without_room_declines_and_the_request_goes_on_where_it_is():
    move = Move.between(*FLEETS[1])
    move.begin()
    move.step()
    for arriving in move.arriving:
        arriving.decline("no pages are free")
    move.until_settled()
    assert {each.phase for each in move.arriving} == {ArrivalPhase.DECLINED}
    assert {(each.phase, each.reason) for each in move.departing} == {(DeparturePhase.BACK, "no pages are free")}
    assert move.departing[0].may_write > 1000


def test_a_request_that_came_back_moves_at_the_next_try_under_the_same_name():
    move = Move.between(*FLEETS[0])
    move.begin()
    move.step()
    for departing in move.departing:
        departing.keep("not now")
    move.until_settled()
    move.begin()
    move.until_settled()
    assert {each.phase for each in move.arriving} == {ArrivalPhase.HERE}
    move.assert_target_holds(move.tokens)


@pytest.mark.parametrize("steps", range(0, 24, 2))
def test_a_source_that_is_known_to_be_dead_leaves_its_request_to_the_target(steps: int):
    """At any moment: with the tokens that have landed, and the words of its engine as of more of them."""
    move = Move.between(*FLEETS[0])
    move.begin()
    for _ in range(steps):
        move.step()
    for mover in move.source.movers:
        move.bench.network.leave(mover._transport.name)
        move.bench.movers.remove(mover)
    for mover in move.target.movers:
        for rank in range(move.source.fleet.size):
            mover.forget("a", rank)
    move.departing = []
    move.until_settled()
    (arriving,) = move.arriving
    assert arriving.phase is ArrivalPhase.HERE
    assert 0 <= arriving.landed_tokens <= arriving.payload_tokens <= move.tokens
    assert arriving.payload == f"{arriving.payload_tokens} tokens".encode()
    move.assert_target_holds(arriving.landed_tokens)


@pytest.mark.parametrize("steps", range(0, 24, 2))
def test_a_target_that_is_known_to_be_dead_leaves_the_request_where_it_was(steps: int):
    move = Move.between(*FLEETS[0])
    move.begin()
    for _ in range(steps):
        move.step()
    gone = move.departing[0].phase is DeparturePhase.GONE
    for mover in move.target.movers:
        move.bench.network.leave(mover._transport.name)
        move.bench.movers.remove(mover)
    for mover in move.source.movers:
        mover.forget("b", 0)
    move.arriving = []
    move.until_settled()
    assert {each.phase for each in move.departing} == {DeparturePhase.GONE if gone else DeparturePhase.BACK}
    assert gone or move.departing[0].may_write > 1000


def test_a_source_that_is_only_silent_is_not_taken_for_dead():
    """After the hand-over neither side has the request until they hear of each other: never both."""
    move = Move.between(
        *FLEETS[0], config=replace(CONFIG, deadline_s=0.2, drain_s=0.1, silence_s=0.2, ping_s=0.05, resend_s=0.1)
    )
    move.begin(MigrationConfig(patience_s=0.3))
    while move.departing[0].phase is not DeparturePhase.STOPPING:
        move.step()
    names = [mover._transport.name for mover in move.source.movers]
    for name in names:
        move.bench.network.cut(name)
    while move.arriving[0].phase is ArrivalPhase.COPYING or move.departing[0].phase is DeparturePhase.STOPPING:
        move.step()
    assert move.arriving[0].phase is ArrivalPhase.DECLINING
    assert move.departing[0].phase in (DeparturePhase.HANDING_OVER, DeparturePhase.BACK)


def test_what_cannot_be_is_refused_by_its_values():
    parties = Party("a", 1), Party("b", 1)
    with pytest.raises(PlanError, match=f"a payload of {MAX_PAYLOAD_BYTES + 1} bytes is over the limit"):
        Migration("r", 1, *parties, 1, bytes(MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(PlanError, match="r has 0 tokens"):
        Migration("r", 1, *parties, 0)
    with pytest.raises(PlanError, match="name has 26[0-9] characters"):
        Migration("r" * 250, 1, *parties, 1)
    with pytest.raises(PlanError, match="r has 7 tokens, and its content is of 8"):
        Migration("r", 1, *parties, 7, content=Content(8, DIGEST))
    with pytest.raises(PlanError, match="a migration has ahead_tokens = 0; it must be at least 1"):
        MigrationConfig(ahead_tokens=0)
    with pytest.raises(ProtocolError, match="no Migration in 3 bytes"):
        Migration.decode(b"abc")
    move = Move.between(*FLEETS[0])
    with pytest.raises(PeerUnknown, match=r"ranks \[\] of c are connected, which has 2"):
        DepartingRank(move.source.movers[0], Migration("r", 1, Party("a", 2), Party("c", 2), 20), move.now(0))
    with pytest.raises(PlanError, match="r has 20 tokens, and its migration begins at 21"):
        DepartingRank(move.source.movers[0], Migration("r", 1, Party("a", 2), Party("b", 1), 21), move.now(0))


def test_pages_that_cannot_be_are_refused_and_others_may_be_named():
    move = Move.between(*FLEETS[0])
    move.begin()
    (arriving,) = move.arriving
    while not arriving.pages_for:
        for mover in move.bench.movers:
            mover.poll()
        for each in (*move.departing, arriving):
            each.poll()
    with pytest.raises(PlanError, match="too short"):
        arriving.allocated(arriving.pages_for, [[1]])
    assert arriving.pages_for
    move.until_settled()
    assert arriving.phase is ArrivalPhase.HERE
    move.assert_target_holds(move.tokens)


def test_words_that_are_no_decision_bring_the_request_back():
    move = Move.between(*FLEETS[0])
    move.begin()
    (arriving,) = move.arriving
    move.arriving = []
    arriving.decline("no room")
    move.target.movers[0].send(move.departing[0].migration.decision_name, [[]], [], b"what?")
    for _ in range(200):
        move.step()
    assert {each.phase for each in move.departing} == {DeparturePhase.BACK}
    assert all(each.settled for each in move.departing)


OTHER = b"b" * 16


@pytest.mark.parametrize(("src", "dst"), FLEETS[:3], ids=str)
def test_a_target_that_means_another_request_gets_no_byte_and_the_right_one_moves(src: Fleet, dst: Fleet):
    """Their names, lengths and engines are the same."""
    move = Move.between(src, dst)
    before = move.target.snapshot()
    move.begin(meant=OTHER)
    move.until_settled()
    sentence = f"the KV is of {Content(20, DIGEST)}, and {Content(20, OTHER)} were asked for"
    assert {(each.phase, each.reason) for each in move.arriving} == {(ArrivalPhase.DECLINED, sentence)}
    assert {(each.phase, each.reason) for each in move.departing} == {(DeparturePhase.BACK, sentence)}
    move.target.assert_holds(before)
    move.begin()
    move.until_settled()
    assert {each.phase for each in move.arriving} == {ArrivalPhase.HERE}
    move.assert_target_holds(move.tokens)


@pytest.mark.parametrize("identity", IdentityCheck)
def test_a_target_that_cannot_say_what_it_means_is_refused_unless_it_is_trusted(identity: IdentityCheck):
    move = Move.between(*FLEETS[0], config=replace(CONFIG, identity=identity))
    move.begin(meant=b"")
    move.until_settled()
    is_here = identity is IdentityCheck.TRUST
    assert (move.arriving[0].phase is ArrivalPhase.HERE) == is_here
    assert {each.phase for each in move.departing} == {DeparturePhase.GONE if is_here else DeparturePhase.BACK}


@pytest.mark.parametrize("content", [Content(20, OTHER), None])
def test_the_word_that_another_request_was_taken_leaves_this_one_where_it_is(content: Content | None):
    move = Move.between(*FLEETS[0])
    move.begin()
    move.arriving = []
    said = Decision(taken=True, content=content).encode()
    move.target.movers[0].send(move.departing[0].migration.decision_name, [[]], [], said)
    for _ in range(200):
        move.step()
    assert {each.phase for each in move.departing} == {DeparturePhase.BACK}
    assert {str(Content(20, DIGEST)) in str(each.reason) for each in move.departing} == {True}


def test_a_request_of_a_dead_source_is_taken_once_none_of_its_own_reads_may_land_in_the_pages():
    """Until then the engine would write tokens into pages that a read under way writes over."""
    move, clock = Move.between(*FLEETS[0], config=replace(CONFIG, route=Route.DIRECT, verb=Verb.PULL)), HandClock()
    move.begin(clock=clock)
    move.bench.network.hold()
    for _ in range(8):
        move.step()
    (arriving,) = move.arriving
    for mover in move.source.movers:
        move.bench.movers.remove(mover)
    for rank in range(move.source.fleet.size):
        move.target.movers[0].forget("a", rank)
    move.departing = []
    clock.now += 2 * LOOK_S
    for _ in range(20):
        move.turn()
    assert arriving.holds_pages
    assert arriving.phase is ArrivalPhase.DECLINING
    before, after = move.target.snapshot()[0][0], move.target.pools[0][0]
    move.bench.network.deliver()
    assert not all(map(torch.equal, before.tensors, after.tensors)), "a read landed late"
    move.until_settled()
    assert arriving.phase is ArrivalPhase.HERE
    move.assert_target_holds(arriving.landed_tokens)
