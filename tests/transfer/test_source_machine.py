"""The source's state machine: what it posts and says, whatever happens to it in whatever order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from kvmover.transfer.events import Cancel, Patience, PeerGone, Tick
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.source.source_machine import (
    Action,
    Attached,
    EndSend,
    Event,
    Gathered,
    Lapsed,
    Post,
    Posted,
    Ready,
    Say,
    Sending,
    Settled,
    Unstage,
    WriteFailed,
    Written,
    due,
    step,
)
from tests.transfer.protocol_words import DONE, WANT, grant, taken
from tests.transfer.protocol_words import abort as aborted

DEADLINE, DRAIN_S, RESEND_S = 100.0, 2.0, 1.0
PATIENCE = Patience(DEADLINE, DRAIN_S, RESEND_S)
DRAINED = Say(wire.Drained("r", 7))
KEPT = Say(wire.Kept("r", 7))


def unready(chunks: int) -> Sending:
    """Of a request that the engine has not computed."""
    return Sending("r", 7, (256,) * chunks, PATIENCE, DEADLINE)


def sending(chunks: int = 2, direct: bool = False, verb: Verb = Verb.PUSH) -> Sending:
    """Of a request whose chunks are all ready and offered."""
    state = Sending("r", 7, (256,) * chunks, PATIENCE, DEADLINE, direct, verb)
    return step(state, Ready(tuple(range(chunks))), 0.0)[0]


def run(state: Sending, *events: Event, now: float = 0.0) -> tuple[Sending, list[Action]]:
    """The state after all events, and the actions of the last."""
    actions: list[Action] = []
    for event in events:
        state, actions = step(state, event, now)
    return state, actions


def abort(reason: str) -> Say:
    return Say(wire.Abort("r", 7, reason))


def offered(*ready: tuple[int, int]) -> Say:
    return Say(wire.Offered("r", 7, ready))


NOTED = Say(wire.Noted("r", 7, int(DEADLINE * 1e3)))
FLYING = (grant(0, 256), grant(1, 512), Posted(0), Posted(1))


def test_a_grant_is_posted_where_it_says():
    _state, actions = run(sending(), grant(1, 512))
    assert actions == [Post(1, 512)]


def test_a_grant_is_used_once():
    state, _ = run(sending(), grant(1, 512))
    for offset in (512, 0):
        assert step(state, grant(1, offset), 0.0) == (state, [])
    state, _ = run(state, Posted(1))
    assert step(state, grant(1, 512), 0.0) == (state, [])


def test_a_grant_that_is_said_again_is_answered_once_the_chunk_was_written():
    state, _ = run(sending(), grant(1, 512), Posted(1), Posted(1, 77), Written(1))
    assert step(state, grant(1, 512), 0.0) == (state, [Say(wire.Chunk("r", 7, 1, 0, 77))])


def test_a_chunk_whose_lease_was_over_is_offered_again_and_posted_when_it_is_granted_again():
    state, actions = run(sending(), grant(0, 256), Posted(0), Lapsed(0))
    assert actions == [offered((0, 1))]
    assert run(state, grant(0, 256))[1] == [Post(0, 256)]
    assert run(state, grant(0, 256), Posted(0), Written(0), Lapsed(1))[1] == [offered((1, 2))]


def test_pages_are_written_in_the_latest_term_of_their_attempt():
    state, _ = run(sending(direct=True), Lapsed(0))
    later = wire.Granted("r", 7, (wire.Grant(0, 0),), wire.WriteLease(5, 1, 1))
    state, actions = run(state, later)
    assert actions == [Post(0, 0, 0, 5)]
    assert run(state, Lapsed(1), wire.Granted("r", 7, (wire.Grant(1, 0),), wire.WriteLease(4, 1, 1)))[1] == [
        Post(1, 0, 0, 5)
    ]


def test_a_chunk_that_lapses_after_the_failure_is_not_offered_and_lets_it_drain():
    state, _ = run(sending(), grant(0, 256), Posted(0), aborted("enough"))
    state, actions = run(state, Lapsed(0))
    assert actions == [DRAINED, EndSend("enough")]


def test_a_chunk_that_was_not_offered_is_not_posted():
    state = Sending("r", 7, (256, 256), PATIENCE, DEADLINE)
    assert step(state, grant(0, 256), 0.0) == (state, [])
    state, actions = run(state, Ready((0,)))
    assert actions == [offered((0, 1))]
    assert run(state, grant(0, 256), grant(1, 512))[1] == []
    assert run(state, grant(0, 256))[1] == [Post(0, 256)]


def test_a_served_destination_ends_when_it_is_done_and_our_writes_are():
    state, actions = run(sending(), *FLYING, Written(1), Written(0))
    assert actions == []
    assert run(state, DONE)[1] == [EndSend(None)]


def test_done_may_come_before_our_own_completions_which_are_waited_for():
    state, actions = run(sending(), *FLYING, Written(1), DONE)
    assert actions == []
    assert run(state, Written(0))[1] == [EndSend(None)]


def test_a_destination_that_needs_nothing_ends_with_done_and_is_answered():
    """Nothing else tells it that we know."""
    state, actions = run(sending(0), DONE)
    assert actions == [KEPT, EndSend(None)]
    assert run(state, DONE) == (state, [KEPT])


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (grant(2, 0), "granted chunk 2 of 2"),
        (grant(-1, 0), "granted chunk -1 of 2"),
        (DONE, "done after 0 of 2 chunks"),
        (Cancel("the user left"), "the user left"),
    ],
)
def test_our_failure_is_told_and_ends_when_the_destination_answers(event: Event, reason: str):
    state, actions = run(sending(), event)
    assert actions == [abort(reason)]
    assert run(state, aborted(reason))[1] == [DRAINED, EndSend(reason)]


def test_a_failed_write_is_told_with_its_reason():
    state, actions = run(sending(), *FLYING, Written(1), WriteFailed(0, "remote refused", True))
    assert actions == [abort("remote refused")]
    assert run(state, aborted("remote refused"))[1] == [DRAINED, EndSend("remote refused")]


def test_nothing_is_posted_after_an_abort():
    for event in (aborted("enough"), Cancel("enough"), PeerGone("d", "lost")):
        state, _ = run(sending(), event)
        after, actions = step(state, grant(0, 0), 0.0)
        assert after == state
        assert actions in ([], [abort(state.reason or "")])


def test_drained_is_said_when_the_last_write_has_ended():
    state, actions = run(sending(), *FLYING, aborted("enough"))
    assert actions == []
    state, actions = run(state, Written(0))
    assert actions == []
    assert run(state, Written(1))[1] == [DRAINED, EndSend("enough")]


def test_a_write_that_failed_but_may_still_land_is_waited_for():
    state, actions = run(sending(1), grant(0, 0), Posted(0), WriteFailed(0, "deadline", False))
    assert actions == [abort("deadline")]
    state, actions = run(state, aborted("deadline"))
    assert actions == []
    assert run(state, Settled(0))[1] == [DRAINED, EndSend("deadline")]


def test_an_abort_of_a_served_destination_is_answered():
    state, _ = run(sending(0), DONE)
    assert step(state, aborted("late"), 0.0) == (state, [DRAINED])


def test_the_deadline_ends_with_what_is_unwritten_and_holds_pages_that_are_still_read():
    state, _ = run(sending(), *FLYING, Written(0))
    state, actions = step(state, Tick(), DEADLINE - 0.1)
    assert (state.reason, actions) == (None, [offered((0, 2))])
    state, actions = step(state, Tick(), DEADLINE)
    reason = "deadline passed with 1 of 2 chunks unwritten"
    assert actions == [abort(reason)]
    state, actions = step(state, Tick(), DEADLINE + DRAIN_S)
    assert actions == [EndSend(reason, quarantined=True)]


def test_an_attempt_that_ended_while_writing_still_answers_an_abort_when_the_write_is_over():
    state, _ = run(sending(1), grant(0, 0), Posted(0), Cancel("enough"))
    state, actions = step(state, Tick(), DRAIN_S)
    assert actions == [EndSend("enough", quarantined=True)]
    state, actions = run(state, aborted("enough"), now=DRAIN_S)
    assert actions == []
    state, actions = run(state, Written(0), now=DRAIN_S)
    assert actions == [DRAINED]
    assert run(state, Tick(), Settled(0), now=2 * DRAIN_S)[1] == []


def test_a_lost_destination_ends_at_once_when_nothing_is_in_flight():
    assert run(sending(), PeerGone("d", "d is lost"))[1] == [EndSend("d is lost")]


def test_news_of_a_lost_destination_do_not_put_the_end_off():
    state, _ = run(sending(1), grant(0, 0), Posted(0), PeerGone("d", "d is lost"))
    for tenths in range(1, 20):
        state, actions = run(state, PeerGone("d", "d is unknown"), Tick(), now=tenths * DRAIN_S / 20)
        assert actions == []
    state, actions = run(state, PeerGone("d", "d is unknown"), Tick(), now=DRAIN_S)
    assert actions == [EndSend("d is lost", quarantined=True)]


def test_an_event_of_another_attempt_cannot_reach_a_state():
    """Events carry no generation: the runner looks the attempt up by it. What the state says carries it."""
    state = replace(sending(), generation=8)
    assert step(state, Cancel("no"), 0.0)[1] == [Say(wire.Abort("r", 8, "no"))]


# Offers


def test_chunks_are_offered_as_they_are_produced_in_ranges():
    state = Sending("r", 7, 9, PATIENCE, DEADLINE)
    state, actions = run(state, Ready((0, 1, 2, 5)))
    assert actions == [offered((0, 3), (5, 6))]
    state, actions = run(state, Ready((8, 7)))
    assert actions == [offered((7, 9))]
    assert run(state, Ready(()))[1] == []
    assert run(state, WANT)[1] == [offered((0, 3), (5, 6), (7, 9))]


def test_chunks_that_go_from_pages_to_pages_are_posted_when_they_are_produced_once_each():
    state = Sending("r", 7, 3, PATIENCE, DEADLINE, direct=True)
    state, actions = run(state, Ready((2, 0)))
    assert actions == [Post(2, 0), Post(0, 0)]
    assert run(state, Ready((0, 2)), WANT)[1] == []
    assert run(state, Ready((1,)))[1] == [Post(1, 0)]


def test_pages_to_be_read_are_staged_as_soon_as_they_are_ready_and_say_where_they_are():
    state, actions = run(Sending("r", 7, (256,), PATIENCE, DEADLINE, True, Verb.PULL), Ready((0,), (b"table",)))
    assert actions == [Post(0, 0)]
    assert run(state, Posted(0), Gathered(0, 0))[1] == [Say(wire.Staged("r", 7, 0, 0, pages=(b"table",)))]


def test_staged_says_the_pages_that_came_since_the_last_and_all_of_them_to_who_asks_again():
    """Two components: pages 1 and 2, then 3; and 9, then none."""
    state = Sending("r", 7, (256,) * 3, PATIENCE, DEADLINE, True, Verb.PULL)
    one, two, three = (page.to_bytes(4, "little") for page in (1, 2, 3))
    state, _ = run(state, Ready((0,), (one + two, b"")), Posted(0), Gathered(0, 0))
    state, actions = run(state, Ready((1,), (one + two + three, b"nine")), Posted(1), Gathered(1, 0))
    assert actions == [Say(wire.Staged("r", 7, 1, 0, 0, None, (three, b"nine"), (2, 0)))]
    state, actions = run(state, Ready((2,), (one + two + three, b"nine")), Posted(2), Gathered(2, 0))
    known = (b"", b""), (3, 1)
    assert actions == [Say(wire.Staged("r", 7, 2, 0, 0, None, *known))]
    whole = [
        Say(wire.Offered("r", 7, ())),
        Say(wire.Staged("r", 7, 0, 0, 0, None, (one + two + three, b"nine"))),
        *(Say(wire.Staged("r", 7, chunk, 0, 0, None, *known)) for chunk in (1, 2)),
    ]
    assert run(state, WANT)[1] == whole
    assert run(state, Tick(), now=RESEND_S)[1] == whole


def test_a_source_whose_engine_goes_on_after_a_failure_offers_nothing():
    state, _ = run(Sending("r", 7, (256, 256), PATIENCE, DEADLINE), Cancel("enough"))
    assert run(state, Ready((0, 1)))[1] == []


# Rounds


def test_a_chunk_is_posted_again_in_the_next_round_and_told_of_with_its_number():
    state, _ = run(sending(), grant(1, 512), Posted(1, 77), Written(1))
    state, actions = run(state, grant(1, 512, 1))
    assert actions == [Post(1, 512, 1)]
    assert 1 not in state.written
    assert run(state, grant(1, 512, 1), grant(1, 512, 0)) == (state, [])
    assert run(state, Posted(1, 78), Written(1), grant(1, 512, 1))[1] == [Say(wire.Chunk("r", 7, 1, 1, 78))]


def test_the_next_round_waits_for_the_end_of_the_last_one_on_this_side():
    """The destination hears of a write before we do: a chunk in flight twice would be taken for written after one."""
    for before in ([grant(1, 512)], [grant(1, 512), Posted(1)]):
        state, _ = run(sending(), *before)
        assert step(state, grant(1, 512, 1), 0.0) == (state, [])
    state, _ = run(state, Written(1))
    assert run(state, grant(1, 512, 1))[1] == [Post(1, 512, 1)]


# Payloads


def test_a_payload_is_said_when_it_is_there_and_again_when_it_is_asked_for():
    aux = Say(wire.Aux("r", 7, b"token"))
    state, actions = run(sending(), Attached(b"token"))
    assert actions == [aux]
    assert run(state, WANT)[1] == [offered((0, 2)), aux]


def test_a_source_with_a_payload_and_no_chunk_ends_with_done():
    state, actions = run(sending(0), Attached(b"token"), WANT)
    assert actions == [NOTED, Say(wire.Aux("r", 7, b"token"))]
    assert run(state, DONE)[1] == [KEPT, EndSend(None)]


# Pull


def pulled(chunks: int = 2, direct: bool = False) -> Sending:
    return sending(chunks, direct, Verb.PULL)


def staged(chunk: int, offset: int, round_: int = 0, digest: int | None = None) -> Say:
    return Say(wire.Staged("r", 7, chunk, offset, round_, digest))


def test_a_staged_chunk_is_told_of_until_it_is_taken_and_its_memory_given_back_once():
    state, actions = run(pulled(), grant(1, 512), Posted(1), Gathered(1, 4096, 77))
    assert actions == [staged(1, 4096, 0, 77)]
    assert run(state, grant(1, 512)) == (state, [staged(1, 4096, 0, 77)])
    state, actions = run(state, taken(1))
    assert actions == [Unstage(1)]
    assert run(state, taken(1), grant(1, 512)) == (state, [])


def test_only_what_is_staged_can_be_taken():
    state, _ = run(pulled(), grant(0, 0), Posted(0), Gathered(0, 256))
    for chunk in (1, 2, -1, 2**62):
        assert run(state, taken(chunk)) == (state, [])
    assert run(state, taken(0, 1)) == (state, [])  # of another round


def test_done_is_answered_with_kept_as_often_as_it_is_said():
    state, _ = run(pulled(1), grant(0, 0), Posted(0), Gathered(0, 256))
    state, actions = run(state, DONE)
    assert actions == [Unstage(0), KEPT, EndSend(None)]
    assert run(state, DONE) == (state, [KEPT])


def test_a_push_is_not_confirmed():
    state, actions = run(sending(), *FLYING, Written(0), Written(1), DONE)
    assert actions == [EndSend(None)]
    assert run(state, DONE) == (state, [])


def test_a_reader_that_is_done_after_we_failed_hears_that_nothing_was_kept():
    state, actions = run(pulled(1), grant(0, 0), Posted(0), Gathered(0, 256), Cancel("enough"))
    assert actions == [Unstage(0), abort("enough")]
    assert run(state, DONE)[1] == []  # said again by the clock
    assert step(state, Tick(), RESEND_S)[1] == [abort("enough")]
    state, actions = step(state, Tick(), DRAIN_S)
    assert actions == [EndSend("enough")]
    for asks in (DONE, WANT, grant(0, 0)):
        assert step(state, asks, DRAIN_S) == (state, [abort("enough")])


def test_a_chunk_that_was_packed_after_the_failure_is_not_told_of():
    state, _ = run(pulled(1), grant(0, 0), Posted(0), aborted("enough"))
    assert run(state, Gathered(0, 256))[1] == [Unstage(0), DRAINED, EndSend("enough")]


def test_a_source_does_not_wait_for_a_reader_of_a_failed_attempt():
    for event in (Cancel("enough"), aborted("enough"), PeerGone("d", "enough")):
        state, actions = run(pulled(1), grant(0, 0), Posted(0), Gathered(0, 256), event)
        assert actions[0] == Unstage(0)
        assert not state.staged


def test_a_read_chunk_that_is_asked_for_again_is_packed_again():
    state, _ = run(pulled(1), grant(0, 0), Posted(0), Gathered(0, 256, 77))
    state, actions = run(state, grant(0, 0, 1))  # the Taken of the first round was lost
    assert actions == [Unstage(0), Post(0, 0, 1)]
    assert run(state, taken(0, 0)) == (state, [])
    state, actions = run(state, Posted(0), Gathered(0, 512, 78))
    assert actions == [staged(0, 512, 1, 78)]
    assert run(state, taken(0, 1))[1] == [Unstage(0)]


# Saying it again


def test_a_silent_destination_is_told_again_what_there_is_and_where_it_lies():
    state, _ = run(pulled(2), grant(1, 0), Posted(1), Gathered(1, 256), now=10.0)
    state = replace(state, quiet_since=10.0)
    assert step(state, Tick(), 10.9) == (state, [])
    state, actions = step(state, Tick(), 11.0)
    assert actions == [offered((0, 2)), staged(1, 256)]
    assert step(state, Tick(), 11.9) == (state, [])


def test_a_destination_that_says_nothing_new_counts_as_silent():
    state, _ = run(sending(), grant(0, 0), now=0.5)
    for tenths in range(6, 15):
        state, _ = run(state, WANT, grant(0, 0), taken(1), now=tenths / 10)
        assert step(state, Tick(), tenths / 10) == (state, [])
    assert step(state, Tick(), 1.5)[1] == [offered((0, 2))]
    state, _ = run(state, grant(1, 256), now=1.4)
    assert step(state, Tick(), 1.5) == (state, [])


def test_who_asks_before_there_is_anything_to_offer_is_told_that_we_know():
    state, actions = run(unready(2), WANT)
    assert actions == [NOTED]
    assert run(state, Ready((0,)), WANT)[1] == [offered((0, 1))]


def test_while_there_is_nothing_to_offer_a_silent_destination_is_told_later_and_later():
    """It may have given the request up, and what it said of that may be lost."""
    state, times = unready(2), list[float]()
    while len(times) < 6:
        state, actions = step(state, Tick(), due(state))
        assert actions == [offered()]
        times.append(state.quiet_since)
    waits = [after - before for before, after in pairwise([0.0, *times])]
    assert waits[0] == RESEND_S
    assert all(0.75 * most < wait <= most for wait, most in zip(waits[1:], (2.0, 4.0, 8.0, 8.0, 8.0), strict=True))
    state, _ = run(state, Ready((0,)), now=times[-1])
    assert due(state) == times[-1] + RESEND_S


def test_an_abort_is_said_again_until_it_is_answered():
    state, _ = run(sending(), Cancel("enough"))
    state, actions = step(state, Tick(), RESEND_S)
    assert actions == [abort("enough")]
    state, _ = run(state, aborted("enough"))
    assert step(state, Tick(), DRAIN_S) == (state, [])


def eagerly(chunks: int = 1, offset: int = 512) -> Sending:
    """Of a request that the engine has not computed, whose region came with the Want."""
    return replace(unready(chunks), eager=wire.Grant(0, offset), room_bytes=1024)


def test_a_chunk_whose_region_came_with_the_want_goes_without_an_offer_when_it_is_computed():
    state, actions = run(eagerly(), WANT)
    assert actions == [NOTED]
    state, actions = run(state, Ready((0,)))
    assert actions == [Post(0, 512)]
    assert step(state, grant(0, 512), 0.0) == (state, [])
    _, actions = run(eagerly(2), Ready((0, 1)))
    assert actions == [Post(0, 512), offered((1, 2))]


def test_who_asks_again_for_a_chunk_that_went_at_once_is_told_of_it_when_it_was_written():
    state, actions = run(eagerly(), Ready((0,)), Posted(0), WANT)
    assert actions == []
    _, actions = run(state, Written(0), WANT)
    assert actions == [Say(wire.Chunk("r", 7, 0))]


def test_a_region_that_came_with_the_want_and_lapsed_is_asked_for_again():
    state, actions = run(eagerly(), Ready((0,)), Lapsed(0))
    assert actions == [offered((0, 1))]
    assert run(state, WANT)[1] == [offered((0, 1))]
    assert run(state, grant(0, 512))[1] == [Post(0, 512)]


def test_a_region_outside_the_arena_that_came_with_the_want_fails_the_attempt():
    _, actions = run(eagerly(offset=1024), Ready((0,)))
    assert actions == [abort("grant at 1024 leaves the arena of 1024 bytes")]


def test_nothing_goes_of_an_attempt_that_failed_before_its_chunk_was_computed():
    assert run(eagerly(), Cancel("given up"), Ready((0,)))[1] == []
