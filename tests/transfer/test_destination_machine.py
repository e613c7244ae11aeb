"""The destination's state machine: what it says and frees, whatever happens to it in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from msgspec.structs import replace

from kvmover.transfer.destination.destination_machine import (
    Action,
    Allocated,
    Ask,
    EndReceive,
    Event,
    Free,
    Greeted,
    Isolate,
    Mismatch,
    PeerDead,
    Read,
    ReadEnded,
    ReadSettled,
    Receiving,
    Reserve,
    Reserved,
    Scatter,
    Scattered,
    Send,
    Source,
    due,
    start,
    step,
)
from kvmover.transfer.events import Cancel, Patience, PeerGone, Tick
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.chunk_sets import WriterChunks
from kvmover.transfer.protocol.wire import Verb
from tests.transfer.protocol_words import (
    says_abort,
    says_aux,
    says_chunk,
    says_drained,
    says_kept,
    says_noted,
    says_offered,
    says_staged,
    taken,
)

DEADLINE, DRAIN_S, RESEND_S = 100.0, 2.0, 1.0
PATIENCE = Patience(DEADLINE, DRAIN_S, RESEND_S)


def receiving(**sources: Source) -> Receiving:
    return Receiving("r", 7, sources, PATIENCE, DEADLINE)


def run(state: Receiving, *events: Event, now: float = 0.0) -> tuple[Receiving, list[Action]]:
    """The state after all events, and the actions of the last."""
    actions: list[Action] = []
    for event in events:
        state, actions = step(state, event, now)
    return state, actions


def granted(peer: str, chunk: int, offset: int, round_: int = 0) -> Send:
    return Send(peer, wire.Granted("r", 7, (wire.Grant(chunk, offset, round_),)))


def aborts(reason: str, *peers: str) -> list[Action]:
    return [Send(peer, wire.Abort("r", 7, reason)) for peer in peers]


def done(*peers: str) -> list[Action]:
    return [Send(peer, wire.Done("r", 7)) for peer in peers]


ONE = receiving(a=Source(1))
TWO = receiving(a=Source(1), b=Source(2))
STRAIGHT = receiving(a=Source(1, direct=True), b=Source(2, direct=True))


def test_a_request_that_needs_nothing_is_done_at_once():
    state, actions = start(receiving(a=Source(0), b=Source(0, direct=True)))
    assert state.finished
    assert actions == [*done("a", "b"), EndReceive(None)]
    assert start(receiving()) == (replace(receiving(), finished=True), [EndReceive(None)])


def test_what_is_offered_again_is_granted_again_until_it_is_here():
    """Its lease was over before it could be written."""
    state, _ = run(ONE, says_offered("a", ((0, 1),)))
    assert run(state, says_offered("a", ((0, 1),)))[1] == [], "no region is free yet"
    state, _ = run(state, Reserved("a", ((0, 512),)))
    assert run(state, says_offered("a", ((0, 1),))) == (state, [granted("a", 0, 512)])
    state, _ = run(state, says_chunk("a", 0))
    assert run(state, says_offered("a", ((0, 1),)))[1] == []
    state, actions = run(STRAIGHT, says_offered("b", ((1, 2),)))
    assert actions == [granted("b", 1, 0)], "pages are granted with the Want"
    assert run(state, says_offered("b", ((1, 2),)))[1] == [granted("b", 1, 0)]


def test_a_peer_that_is_dead_has_drained():
    state, actions = run(TWO, Reserved("a", ((0, 512),)), Reserved("b", ((1, 1024),)), PeerDead("a", "a is dead"))
    assert actions == [*aborts("a is dead", "a", "b"), Free(512)]
    state, actions = run(state, says_drained("b"))
    assert actions == [Free(1024), EndReceive("a is dead")]
    state, _ = run(TWO, Reserved("a", ((0, 512),)), Cancel("enough"), says_drained("b"))
    assert run(state, PeerDead("a", "a is dead"))[1] == [Free(512), EndReceive("enough")]
    state, _ = run(STRAIGHT, PeerDead("a", "a is dead"), PeerGone("b", "b is lost"))
    assert state.finished


def test_a_peer_that_dies_after_its_part_is_here_fails_nothing():
    state, _ = run(STRAIGHT, says_chunk("a", 0), PeerDead("a", "a is dead"))
    assert state.reason is None
    assert run(state, says_chunk("b", 0), says_chunk("b", 1))[1][-1] == EndReceive(None)


def test_a_chunk_is_granted_scattered_freed_and_the_last_one_says_done():
    state, actions = start(ONE)
    assert actions == []
    state, actions = run(state, Reserved("a", ((0, 512),)))
    assert actions == [granted("a", 0, 512)]
    state, actions = run(state, says_chunk("a", 0))
    assert actions == [Scatter("a", 0, 512)]
    state, actions = run(state, Scattered("a", 0))
    assert actions == [Free(512), *done("a"), EndReceive(None)]


def test_direct_chunks_are_landed_when_they_arrive():
    state, actions = run(STRAIGHT, says_chunk("b", 1), says_chunk("a", 0))
    assert actions == []
    state, actions = run(state, says_chunk("b", 0))
    assert actions == [*done("a", "b"), EndReceive(None)]


@pytest.mark.parametrize("state", [TWO, STRAIGHT], ids=["packed", "direct"])
def test_completion_is_a_set_and_a_chunk_told_of_twice_counts_once(state: Receiving):
    for key, source in state.sources.items():
        for chunk in range(source.chunks):
            if not source.direct:
                state, _ = run(state, Reserved(key, ((chunk, 256 * chunk),)))
    once, _first = run(state, says_chunk("b", 1))
    twice, second = run(once, says_chunk("b", 1), says_chunk("b", 1))
    assert twice == once
    assert second == []
    assert once.missing in (2, 3)
    landed, _ = run(once, Scattered("b", 1))
    again, actions = run(landed, Scattered("b", 1), says_chunk("b", 1))
    assert again == landed
    assert actions == []


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (says_chunk("a", 0), "a sent chunk 0 without a grant"),
        (says_chunk("b", 2), "b sent chunk 2 of 2"),
        (says_chunk("b", -1), "b sent chunk -1 of 2"),
        (says_abort("b", "out of pages"), "out of pages"),
        (PeerGone("a", "a is lost"), "a is lost"),
        (Cancel("the user left"), "the user left"),
    ],
)
def test_every_failure_has_its_reason_and_reaches_all_sources(event: Event, reason: str):
    state, actions = run(TWO, event)
    assert state.reason == reason
    assert actions == aborts(reason, *sorted(state.sources.keys() - state.gone))
    state, actions = run(state, says_drained("a"), says_drained("b"))
    assert actions == [EndReceive(reason)]


def test_a_chunk_of_a_source_counts_for_that_source_only():
    state, _actions = run(TWO, Reserved("a", ((0, 0),)), says_chunk("b", 0))
    assert state.reason == "b sent chunk 0 without a grant"


def test_the_first_reason_stays():
    state, _actions = run(TWO, Cancel("first"), says_abort("a", "second"), Cancel("third"), PeerGone("b", "fourth"))
    assert state.reason == "first"
    assert run(state, says_drained("a"))[1] == [EndReceive("first")]


def test_strangers_change_nothing():
    for event in (says_chunk("c", 0), says_abort("c", "no"), says_drained("c"), PeerGone("c", "lost")):
        assert step(TWO, event, 0.0) == (TWO, [])


def test_drained_before_any_failure_means_nothing():
    state, actions = run(TWO, says_drained("a"), says_drained("b"))
    assert (state, actions) == (TWO, [])
    state, _ = run(state, Cancel("late"))
    assert state.undrained == {"a", "b"}


def test_a_region_is_kept_until_its_writer_has_drained():
    state, _ = run(
        TWO, Reserved("a", ((0, 0),)), Reserved("b", ((0, 256),)), Reserved("b", ((1, 512),)), Cancel("enough")
    )
    state, actions = run(state, says_drained("b"))
    assert actions == [Free(256), Free(512)]
    state, actions = run(state, says_drained("a"))
    assert actions == [Free(0), EndReceive("enough")]


def test_a_region_that_is_being_scattered_outlives_its_drained_writer():
    state, _ = run(ONE, Reserved("a", ((0, 0),)), says_chunk("a", 0), Cancel("enough"))
    state, actions = run(state, says_drained("a"))
    assert actions == []
    assert run(state, Scattered("a", 0))[1] == [Free(0), EndReceive("enough")]


def test_regions_that_are_free_at_once_are_granted_in_one_message():
    state, actions = run(TWO, says_offered("b", ((0, 2),)), Reserved("b", ((0, 512), (1, 1024))))
    assert state.regions == {("b", 0): 512, ("b", 1): 1024}
    assert actions == [Send("b", wire.Granted("r", 7, (wire.Grant(0, 512), wire.Grant(1, 1024))))]
    failing, _ = run(TWO, Cancel("enough"))
    assert step(failing, Reserved("b", ((0, 512), (1, 1024))), 0.0) == (failing, [Free(512), Free(1024)])


def test_a_region_leased_after_a_failure_or_after_the_end_goes_straight_back():
    failing, _ = run(ONE, Cancel("enough"))
    assert step(failing, Reserved("a", ((0, 256),)), 0.0) == (failing, [Free(256)])
    ended, _ = run(failing, says_drained("a"))
    assert step(ended, Reserved("a", ((0, 256),)), 0.0) == (ended, [Free(256)])


def test_a_lost_writer_keeps_its_region_in_quarantine():
    _state, actions = run(ONE, Reserved("a", ((0, 256),)), PeerGone("a", "a is lost"))
    assert actions == [Isolate("a", 256), EndReceive("a is lost")]


def test_a_lost_writer_of_pages_keeps_them_held():
    state, _ = run(STRAIGHT, PeerGone("a", "a is lost"))
    assert not state.finished
    assert run(state, says_drained("b"))[1] == [EndReceive("a is lost", frozenset({"a"}))]


def test_a_source_that_has_sent_everything_may_go():
    state, actions = run(TWO, Reserved("a", ((0, 0),)), says_chunk("a", 0), PeerGone("a", "a is lost"))
    assert (state.reason, actions) == (None, [])
    events = (
        Scattered("a", 0),
        Reserved("b", ((0, 0),)),
        says_chunk("b", 0),
        Scattered("b", 0),
        Reserved("b", ((1, 0),)),
    )
    state, _ = run(state, *events, says_chunk("b", 1))
    assert run(state, Scattered("b", 1))[1][-1] == EndReceive(None)


def test_the_deadline_fails_with_what_is_missing_and_from_whom():
    state, _ = run(TWO, Reserved("a", ((0, 0),)), says_chunk("a", 0), Scattered("a", 0))
    state, actions = step(state, Tick(), DEADLINE - 0.1)
    assert (state.reason, actions) == (None, [Ask("b")])
    state, actions = step(state, Tick(), DEADLINE)
    reason = "deadline passed with 2 chunks missing, waiting for b"
    assert actions == aborts(reason, "a", "b")
    state, actions = step(state, Tick(), DEADLINE + DRAIN_S - 0.1)
    assert actions == aborts(reason, "a", "b")
    state, actions = step(state, Tick(), DEADLINE + DRAIN_S)
    assert actions == [EndReceive(reason)]


def test_draining_is_not_waited_for_longer_than_allowed():
    state, _ = run(TWO, Reserved("b", ((1, 512),)), Cancel("enough"), now=10.0)
    state, _ = run(state, says_drained("a"), now=11.0)
    state, actions = step(state, Tick(), 10.0 + DRAIN_S)
    assert actions == [Isolate("b", 512), EndReceive("enough")]


# Offers and grants


def test_an_offer_asks_for_a_region_for_each_chunk_once():
    state, actions = run(TWO, says_offered("b", ((0, 2),)))
    assert actions == [Reserve("b", 0), Reserve("b", 1)]
    assert run(state, says_offered("b", ((0, 2),))) == (state, [])
    assert run(state, says_offered("stranger", ((0, 1),))) == (state, [])


def test_an_offer_may_come_in_pieces_that_overlap_earlier_ones():
    state, actions = run(receiving(a=Source(6)), says_offered("a", ((1, 3),)))
    assert actions == [Reserve("a", 1), Reserve("a", 2)]
    state, actions = run(state, says_offered("a", ((0, 3), (5, 6))))
    assert actions == [Reserve("a", 0), Reserve("a", 5)]
    assert run(state, says_offered("a", ((0, 6),)))[1] == [Reserve("a", 3), Reserve("a", 4)]


def test_an_offer_of_an_attempt_that_failed_asks_for_nothing():
    state, _ = run(ONE, Cancel("over"))
    assert run(state, says_offered("a", ((0, 1),)))[1] == []


@pytest.mark.parametrize(
    "ready",
    [
        ((0, 3),),
        ((-1, 1),),
        ((1, 0),),
        ((0, 2**63 - 1),),
        ((2**62, 2**62),),
        ((0, 2), (1, 2)),  # a chunk twice would be reserved twice
        ((1, 2), (0, 1)),
        ((0, 1),) * 100_000,
    ],
    ids=lambda ready: str(ready)[:30],
)
def test_an_offer_of_what_there_is_not_fails_the_attempt_before_anything_is_counted_out(
    ready: tuple[tuple[int, int], ...],
):
    state, actions = run(TWO, says_offered("b", ready))
    assert state.reason is not None
    assert state.reason.startswith("b offers chunks")
    assert not state.ready
    assert actions == aborts(state.reason, "a", "b")


def test_ranges_of_no_chunk_are_harmless():
    assert run(TWO, says_offered("b", ()), says_offered("b", ((0, 0), (1, 1), (2, 2)))) == (TWO, [])


@pytest.mark.parametrize("chunk", [-1, 2, 2**62, -(2**62)])
@pytest.mark.parametrize("how", [says_chunk, lambda peer, c: says_staged(peer, c, 0)], ids=["written", "staged"])
def test_no_number_of_a_chunk_is_taken_on_trust(how: Callable[[str, int], Event], chunk: int):
    for state in (TWO, STRAIGHT, PULLED, READ):
        after, actions = run(state, how("b", chunk))
        assert after.reason == f"b sent chunk {chunk} of 2"
        assert (after.arrived, after.regions, after.reading) == (frozenset(), {}, frozenset())
        assert actions[0] == aborts(after.reason, "a")[0]


# Digests


DIGESTED = [Reserved("a", ((0, 512),)), says_chunk("a", 0, 0, 77), Scattered("a", 0, 77)]


def test_a_chunk_with_its_source_s_digest_lands():
    assert run(ONE, *DIGESTED)[1] == [Free(512), *done("a"), EndReceive(None)]


def test_a_chunk_lands_without_a_digest_of_its_source_whatever_its_own_is():
    assert run(ONE, Reserved("a", ((0, 512),)), says_chunk("a", 0), Scattered("a", 0, 78))[1][-1] == EndReceive(None)


@pytest.mark.parametrize("digest", [77, 78], ids=["right", "wrong"])
def test_a_copy_that_ends_twice_counts_once(digest: int):
    state, _ = run(TWO, *DIGESTED[:2], Scattered("a", 0, digest))
    assert run(state, Scattered("a", 0, digest)) == (state, [])


def test_a_direct_chunk_with_a_digest_lands_when_it_was_compared():
    state, actions = run(receiving(a=Source(1, direct=True)), says_chunk("a", 0, 0, 77))
    assert actions == [Scatter("a", 0, None)]
    assert run(state, Scattered("a", 0, 77))[1] == [*done("a"), EndReceive(None)]


@pytest.mark.parametrize("direct", [False, True], ids=["packed", "direct"])
def test_a_chunk_that_does_not_match_is_asked_for_once_more_into_the_same_region(direct: bool):
    state, offset = receiving(a=Source(1, direct)), 0 if direct else 512
    reserved = [] if direct else [Reserved("a", ((0, offset),))]
    state, actions = run(state, *reserved, says_chunk("a", 0, 0, 77), Scattered("a", 0, 78))
    assert actions == [Mismatch("a", 0), granted("a", 0, offset, 1)]
    assert (state.arrived, state.landed) == (frozenset(), frozenset())
    assert run(state, says_chunk("a", 0, 0, 77)) == (state, [])  # of the first round, told of twice
    state, actions = run(state, says_chunk("a", 0, 1, 77))
    assert actions == [Scatter("a", 0, None if direct else 512)]
    assert run(state, Scattered("a", 0, 77))[1] == [*([] if direct else [Free(512)]), *done("a"), EndReceive(None)]


def test_a_chunk_that_does_not_match_twice_fails_the_attempt():
    state, _ = run(
        ONE, Reserved("a", ((0, 512),)), says_chunk("a", 0, 0, 77), Scattered("a", 0, 78), says_chunk("a", 0, 1, 77)
    )
    state, actions = run(state, Scattered("a", 0, 79))
    reason = "chunk 0 of a did not match its digest 2 times"
    assert actions == [Mismatch("a", 0), *aborts(reason, "a")]
    assert run(state, says_drained("a"))[1] == [Free(512), EndReceive(reason)]
    assert not state.landed


def test_a_chunk_of_a_failed_attempt_is_not_asked_for_again():
    state, actions = run(ONE, *DIGESTED[:2], Cancel("enough"), Scattered("a", 0, 78))
    assert actions == [Free(512)]
    assert not state.landed
    assert run(state, says_drained("a"))[1] == [EndReceive("enough")]


# Payloads


def test_a_payload_is_awaited_from_whom_it_was_asked_of_and_counts_once():
    state = receiving(a=Source(1, direct=True, aux=True), b=Source(0, aux=True))
    state, actions = run(state, says_chunk("a", 0), says_aux("b"), says_aux("b"))
    assert (actions, state.awaited_aux) == ([], {"a"})
    assert run(state, says_aux("a"))[1] == [*done("a", "b"), EndReceive(None)]


def test_a_payload_that_nobody_asked_for_ends_nothing():
    state, actions = run(receiving(a=Source(1), b=Source(0, aux=True)), says_aux("a"))
    assert (actions, state.awaited_aux) == ([], {"b"})


def test_a_source_whose_payload_is_missing_may_not_go():
    state, _ = run(receiving(a=Source(0, aux=True), b=Source(1)), PeerGone("a", "a is lost"))
    assert state.reason == "a is lost"


# Pull


PULLED = receiving(a=Source(1, verb=Verb.PULL), b=Source(2, verb=Verb.PULL))
READ = receiving(a=Source(1, True, Verb.PULL), b=Source(2, True, Verb.PULL))
PULL_ONE = receiving(a=Source(1, verb=Verb.PULL))


def test_a_staged_chunk_is_read_into_its_region_and_given_back_and_lands_when_it_was_kept():
    state, actions = run(PULL_ONE, says_offered("a", ((0, 1),)))
    assert actions == [Reserve("a", 0)]
    state, actions = run(state, Reserved("a", ((0, 512),)))
    assert actions == [granted("a", 0, 512)]
    state, actions = run(state, says_staged("a", 0, 4096))
    assert actions == [Read("a", 0, 4096, 512, 0, taken(0))]
    assert run(state, says_staged("a", 0, 4096)) == (state, [])
    state, actions = run(state, ReadEnded("a", 0))
    assert actions == [Scatter("a", 0, 512)]
    state, actions = run(state, Scattered("a", 0))
    assert actions == [Free(512), *done("a")]
    assert not state.finished
    assert run(state, says_kept("a"))[1] == [EndReceive(None)]


def test_pages_are_read_into_pages_where_the_route_is_direct():
    state, actions = run(READ, says_staged("b", 1, 0))
    assert actions == [Read("b", 1, 0, 0, 0, taken(1))]
    state, actions = run(state, ReadEnded("b", 1))
    assert actions == []
    assert state.landed == {("b", 1)}
    assert run(state, says_staged("b", 1, 0)) == (state, [Send("b", taken(1))])


def test_pages_are_read_once_they_have_pages_here():
    state, actions = run(replace(READ, unnamed=WriterChunks([("b", 0)])), says_staged("b", 0, 0))
    assert actions == []
    assert run(state, Allocated({("b", 0)}))[1] == [Read("b", 0, 0, 0, 0, taken(0))]


def test_chunks_that_are_read_from_pages_are_not_offered():
    assert run(READ, says_offered("b", ()))[1] == []
    assert run(READ, says_offered("b", ((0, 1),)))[0].reason == "b offers chunks that it has to stage"


def test_the_read_that_is_the_last_to_land_says_done_unless_a_digest_or_a_payload_is_awaited():
    one = receiving(a=Source(1, True, Verb.PULL))
    state, actions = run(one, says_staged("a", 0, 0))
    assert actions == [Read("a", 0, 0, 0, 0, wire.Done("r", 7))]
    state, actions = run(state, ReadEnded("a", 0))
    assert (actions, state.finished) == ([], False)
    assert run(state, says_kept("a"))[1] == [EndReceive(None)]
    assert run(one, says_staged("a", 0, 0, 0, 77))[1] == [Read("a", 0, 0, 0, 0, taken(0))]
    awaiting = receiving(a=Source(1, True, Verb.PULL, aux=True))
    assert run(awaiting, says_staged("a", 0, 0))[1] == [Read("a", 0, 0, 0, 0, taken(0))]


def read(*peers: str) -> list[Event]:
    """Every chunk of some sources of READ."""
    keys = [(peer, chunk) for peer in peers for chunk in range(READ.sources[peer].chunks)]
    return [event for key in keys for event in (says_staged(*key, 0), ReadEnded(*key))]


def test_a_pull_ends_when_every_source_has_confirmed_and_each_is_asked_once():
    state, actions = run(READ, *read("a", "b"))
    assert state.told == {"b"}
    assert actions == done("a")
    assert run(state, Scattered("b", 1, None)) == (state, []), "a copy that ends twice sends no second Done"
    state, actions = run(state, says_kept("b"), says_kept("b"))
    assert (actions, state.finished) == ([], False)
    assert run(state, says_kept("a"))[1] == [EndReceive(None)]


def test_a_confirmation_before_everything_was_read_confirms_nothing():
    for early in ([], read("a"), read("b")):
        state, actions = run(READ, *early, says_kept("a"))
        assert (actions, state.kept) == ([], frozenset())
    awaiting = receiving(a=Source(1, True, Verb.PULL, aux=True))
    state, _ = run(awaiting, *read("a"), says_kept("a"))
    assert not state.kept
    assert run(state, says_aux("a"), says_kept("a"))[1] == [EndReceive(None)]


def test_a_source_of_which_nothing_is_read_need_not_confirm():
    state, actions = run(receiving(a=Source(1, True, Verb.PULL), b=Source(0, verb=Verb.PULL)), *read("a"))
    assert (actions, state.told) == ([], {"a"})
    assert run(state, says_kept("a"))[1] == [*done("b"), EndReceive(None)]


def test_a_source_that_was_read_and_did_not_keep_what_it_had_fails_the_request():
    for event in (says_abort("a", "its pages are gone"), PeerGone("a", "its pages are gone")):
        state, _ = run(READ, *read("a", "b"), says_kept("b"))
        state, actions = run(state, event)
        assert state.reason == "its pages are gone"
        assert actions[-1] == EndReceive("its pages are gone")
        assert aborts("its pages are gone", "b")[0] in actions


def test_a_chunk_that_is_pushed_to_a_reader_or_the_other_way_round_fails_the_attempt():
    state, _ = run(PULL_ONE, Reserved("a", ((0, 512),)), says_staged("a", 0, 0))
    state, actions = run(state, says_chunk("a", 0))
    assert state.reason == "a pushed chunk 0, which is to be read"
    assert Free(512) not in actions  # it is being read into
    state, _ = run(ONE, Reserved("a", ((0, 512),)), says_staged("a", 0, 0))
    assert state.reason == "a wants chunk 0 to be read, which is pushed"


def test_what_is_staged_without_a_grant_is_not_read():
    state, _ = run(PULLED, says_staged("b", 1, 0))
    assert state.reason == "b sent chunk 1 without a grant"


def test_a_read_that_fails_quietly_gives_its_region_back_at_once():
    state, actions = run(
        PULL_ONE, Reserved("a", ((0, 512),)), says_staged("a", 0, 0), ReadEnded("a", 0, "remote refused")
    )
    assert state.finished
    assert actions == [Free(512), *aborts("remote refused", "a"), EndReceive("remote refused")]


@pytest.mark.parametrize("state", [PULL_ONE, receiving(a=Source(1, True, Verb.PULL))], ids=["packed", "direct"])
def test_a_read_that_fails_and_may_still_land_is_waited_for(state: Receiving):
    reserved = [] if state.sources["a"].direct else [Reserved("a", ((0, 512),))]
    state, actions = run(state, *reserved, says_staged("a", 0, 0), ReadEnded("a", 0, "deadline", quiescent=False))
    assert actions == aborts("deadline", "a")
    assert not state.finished
    settled, actions = run(state, ReadSettled("a", 0))
    assert actions == [*[Free(512) for _ in reserved], EndReceive("deadline")]
    assert step(settled, ReadSettled("a", 0), 0.0) == (settled, [])


def test_a_read_that_never_ends_leaves_its_region_in_quarantine_or_its_pages_held():
    state, _ = run(
        PULL_ONE, Reserved("a", ((0, 512),)), says_staged("a", 0, 0), ReadEnded("a", 0, "late", quiescent=False)
    )
    assert step(state, Tick(), DRAIN_S)[1] == [Isolate("a", 512), EndReceive("late")]
    state, _ = run(READ, says_staged("b", 1, 0), ReadEnded("b", 1, "late", quiescent=False))
    assert step(state, Tick(), DRAIN_S)[1] == [EndReceive("late", frozenset({"b"}))]


@pytest.mark.parametrize("reason", [None, "remote refused"], ids=["well", "badly"])
def test_a_read_that_ends_after_the_attempt_failed_gives_its_region_back_and_lands_nothing(reason: str | None):
    state, actions = run(PULL_ONE, Reserved("a", ((0, 512),)), says_staged("a", 0, 0), Cancel("enough"))
    assert actions == aborts("enough", "a")
    assert run(state, ReadEnded("a", 0, reason))[1] == [Free(512), EndReceive("enough")]


def test_a_read_chunk_that_does_not_match_is_staged_and_read_once_more():
    state, _ = run(PULL_ONE, Reserved("a", ((0, 512),)), says_staged("a", 0, 4096, 0, 77), ReadEnded("a", 0))
    state, actions = run(state, Scattered("a", 0, 78))
    assert actions == [Mismatch("a", 0), granted("a", 0, 512, 1)]
    assert run(state, says_staged("a", 0, 4096, 0, 77)) == (state, [])
    state, actions = run(state, says_staged("a", 0, 8192, 1, 77))
    assert actions == [Read("a", 0, 8192, 512, 1, taken(0, 1))]
    state, actions = run(state, ReadEnded("a", 0))
    assert actions == [Scatter("a", 0, 512)]
    assert run(state, Scattered("a", 0, 77))[1] == [Free(512), *done("a")]


# Saying it again


def test_what_is_not_answered_is_said_again_and_not_sooner():
    state, _ = run(TWO, says_offered("b", ((0, 1),)), Reserved("b", ((0, 512),)), now=10.0)
    state = replace(state, begun=10.0, look_at=11.0)
    assert step(state, Tick(), 10.9) == (state, [])
    state, actions = step(state, Tick(), 11.0)
    assert actions == [Ask("a"), Ask("b"), granted("b", 0, 512)]  # b may have more to offer
    assert step(state, Tick(), 11.9) == (state, [])
    state, actions = step(state, Tick(), 12.0)
    assert actions == [Ask("b"), granted("b", 0, 512)]  # what was offered is not put off, as what may not exist is
    assert step(state, Tick(), 13.0)[1][0] == Ask("a")


def times_asked(state: Receiving, until: float) -> list[tuple[float, list[Action]]]:
    """What is said by the clock alone, when a Tick comes whenever one is due."""
    said = list[tuple[float, list[Action]]]()
    while (at := due(state)) < until:
        state, actions = step(state, Tick(), at)
        if actions:
            said.append((at, actions))
    return said


def test_a_source_that_does_not_answer_is_asked_later_and_later_and_not_all_at_one_time():
    said = times_asked(TWO, 30.0)
    for peer in "ab":
        times = [at for at, actions in said if Ask(peer) in actions]
        waits = [after - before for before, after in pairwise([0.0, *times])]
        assert waits[0] == RESEND_S
        assert all(0.75 * most < wait <= most for wait, most in zip(waits[1:5], (2.0, 4.0, 8.0, 8.0), strict=True))
    assert all(len(actions) == 1 for at, actions in said if at > RESEND_S)


def test_a_source_that_has_noted_our_want_is_asked_when_it_may_have_forgotten():
    state, actions = run(TWO, says_noted("a", 20_000), now=0.5)
    assert actions == []
    asked = [at for at, actions in times_asked(state, 30.0) if Ask("a") in actions]
    assert asked[0] == 20.5
    longer, _ = run(state, says_noted("a", 20_000), now=10.0)
    assert [at for at, actions in times_asked(longer, 30.4) if Ask("a") in actions] == [30.0]


def test_a_source_that_noted_our_want_still_owes_what_it_has_offered_since():
    state, _ = run(TWO, says_noted("b", 20_000), now=0.5)
    state, _ = run(state, says_offered("b", ((0, 1),)), Reserved("b", ((0, 512),)), now=3.0)
    assert due(state) <= 4.0
    assert (4.0, [granted("b", 0, 512)]) in times_asked(state, 4.5)  # not the Want: it says by itself what comes after


def test_a_source_that_says_hello_may_have_forgotten_and_is_asked_again():
    state, _ = run(TWO, says_noted("a", 20_000), says_noted("b", 20_000), now=0.5)
    state, _ = step(state, Tick(), 2.0)
    state, actions = run(state, Greeted("a"), now=5.0)
    assert actions == []
    assert times_asked(state, 6.5) == [(6.0, [Ask("a")])]


def test_a_payload_is_asked_for_once_all_else_is_here_though_the_source_noted_the_want():
    """Nothing else tells the source that it was lost."""
    state, _ = run(receiving(a=Source(1, aux=True)), says_noted("a", 20_000), Reserved("a", ((0, 512),)), now=0.5)
    assert times_asked(state, 10.0) == []
    state, _ = run(state, says_chunk("a", 0), Scattered("a", 0), now=0.5)
    assert times_asked(state, 2.0) == [(1.5, [Ask("a")])]


def test_a_source_that_has_given_everything_is_left_alone():
    state, _ = run(TWO, Reserved("a", ((0, 0),)), says_chunk("a", 0), Scattered("a", 0))
    assert step(state, Tick(), RESEND_S)[1] == [Ask("b")]


def test_only_what_is_new_puts_the_next_question_off():
    state, _ = run(TWO, says_offered("b", ((0, 2),)), Reserved("b", ((0, 0),)), now=0.5)
    for tenths in range(6, 16):
        state, actions = run(
            state, says_offered("b", ((0, 2),)), says_drained("b"), says_chunk("b", 7, -1), now=tenths / 10
        )
        assert actions == []
    state, actions = step(state, Tick(), 1.2)
    assert actions == [Ask("a")]
    state, actions = step(state, Tick(), 1.5)
    assert actions == [granted("b", 0, 0)]
    state, _ = run(state, says_chunk("b", 0), now=2.4)
    state, actions = step(state, Tick(), 3.2)
    assert actions == [Ask("a")]


def test_a_source_that_is_read_hears_again_what_was_taken_and_that_all_is_done():
    state, _ = run(READ, *read("a"))
    assert run(state, says_staged("a", 0, 0)) == (state, [Send("a", taken(0))])
    state, _ = run(state, *read("b"), says_kept("b"))
    assert step(state, Tick(), RESEND_S)[1] == done("a")


def test_an_abort_is_said_again_to_those_that_have_not_drained():
    state, _ = run(TWO, Cancel("enough"), says_drained("a"))
    state, actions = step(state, Tick(), RESEND_S)
    assert actions == aborts("enough", "b")
    assert step(state, Tick(), RESEND_S)[1] == []


def test_a_copy_of_our_own_is_waited_for_however_long_it_takes():
    """It writes the pages until it ends: nobody else can say when."""
    state, _ = run(ONE, Reserved("a", ((0, 512),)), says_chunk("a", 0), Cancel("enough"))
    assert step(state, Tick(), DRAIN_S)[1] == []
    state, actions = run(state, Scattered("a", 0), now=DRAIN_S)
    assert actions == [Free(512)]
    assert step(state, Tick(), DRAIN_S)[1] == [EndReceive("enough")]


def eagerly(**sources: Source) -> Receiving:
    """Each source was given a region with its Want."""
    return replace(receiving(**sources), regions={(peer, 0): 256 * at for at, peer in enumerate(sources)})


def test_a_chunk_whose_region_went_out_with_the_want_lands_without_an_offer():
    state, actions = run(eagerly(a=Source(1)), says_chunk("a", 0))
    assert actions == [Scatter("a", 0, 0)]
    state, actions = run(state, Scattered("a", 0))
    assert actions == [Free(0), Send("a", wire.Done("r", 7)), EndReceive(None)]


def test_who_offers_what_went_out_with_the_want_is_granted_the_same_region_until_it_is_here():
    state, actions = run(eagerly(a=Source(1), b=Source(1)), says_offered("b", ((0, 1),)))
    assert actions == [granted("b", 0, 256)]
    state, _ = run(state, says_chunk("a", 0), Scattered("a", 0))
    assert run(state, says_offered("a", ((0, 1),)))[1] == []


def test_a_region_that_went_out_with_the_want_stays_leased_while_its_source_waits_and_until_it_has_drained():
    state, _ = run(eagerly(a=Source(1)), says_noted("a", 1000))
    assert state.regions == {("a", 0): 0}
    state, actions = run(state, Cancel("given up"))
    assert actions == aborts("given up", "a")
    assert run(state, says_drained("a"))[1] == [Free(0), EndReceive("given up")]
