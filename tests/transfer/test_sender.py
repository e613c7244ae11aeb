"""The source's state machine: what it posts and says, whatever happens to it in whatever order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmover.transfer import wire
from kvmover.transfer.sender import (
    Action,
    Cancel,
    Event,
    Finish,
    Granted,
    PeerAborted,
    PeerDone,
    PeerGone,
    Post,
    Posted,
    Say,
    Sending,
    Settled,
    Tick,
    WriteFailed,
    Written,
    step,
)

DEADLINE, DRAIN_S = 100.0, 2.0
DRAINED = Say(wire.Drained("r", 7))


def sending(chunks: int = 2) -> Sending:
    return Sending("r", 7, chunks, DEADLINE, DRAIN_S)


def run(state: Sending, *events: Event, now: float = 0.0) -> tuple[Sending, list[Action]]:
    """The state after all events, and the actions of the last."""
    actions: list[Action] = []
    for event in events:
        state, actions = step(state, event, now)
    return state, actions


def abort(reason: str) -> Say:
    return Say(wire.Abort("r", 7, reason))


FLYING = (Granted(0, 256), Granted(1, 512), Posted(0), Posted(1))


def test_a_grant_is_posted_where_it_says():
    _state, actions = run(sending(), Granted(1, 512))
    assert actions == [Post(1, 512)]


def test_a_grant_is_used_once():
    state, _ = run(sending(), Granted(1, 512))
    for offset in (512, 0):
        assert step(state, Granted(1, offset), 0.0) == (state, [])
    state, _ = run(state, Posted(1), Written(1))
    assert step(state, Granted(1, 512), 0.0) == (state, [])


def test_a_served_destination_ends_when_it_is_done_and_our_writes_are():
    state, actions = run(sending(), *FLYING, Written(1), Written(0))
    assert actions == []
    assert run(state, PeerDone())[1] == [Finish(None)]


def test_done_may_come_before_our_own_completions_which_are_waited_for():
    state, actions = run(sending(), *FLYING, Written(1), PeerDone())
    assert actions == []
    assert run(state, Written(0))[1] == [Finish(None)]


def test_a_destination_that_needs_nothing_ends_with_done():
    assert run(sending(0), PeerDone())[1] == [Finish(None)]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Granted(2, 0), "granted chunk 2 of 2"),
        (Granted(-1, 0), "granted chunk -1 of 2"),
        (PeerDone(), "done after 0 of 2 chunks"),
        (Cancel("the user left"), "the user left"),
    ],
)
def test_our_failure_is_told_and_ends_when_the_destination_answers(event: Event, reason: str):
    state, actions = run(sending(), event)
    assert actions == [abort(reason)]
    assert run(state, PeerAborted(reason))[1] == [DRAINED, Finish(reason)]


def test_a_failed_write_is_told_with_its_reason():
    state, actions = run(sending(), *FLYING, Written(1), WriteFailed(0, "remote refused", True))
    assert actions == [abort("remote refused")]
    assert run(state, PeerAborted("remote refused"))[1] == [DRAINED, Finish("remote refused")]


def test_nothing_is_posted_after_an_abort():
    for event in (PeerAborted("enough"), Cancel("enough"), PeerGone("lost")):
        state, _ = run(sending(), event)
        assert step(state, Granted(0, 0), 0.0) == (state, [])


def test_drained_is_said_when_the_last_write_has_ended():
    state, actions = run(sending(), *FLYING, PeerAborted("enough"))
    assert actions == []
    state, actions = run(state, Written(0))
    assert actions == []
    assert run(state, Written(1))[1] == [DRAINED, Finish("enough")]


def test_a_write_that_failed_but_may_still_land_is_waited_for():
    state, actions = run(sending(1), Granted(0, 0), Posted(0), WriteFailed(0, "deadline", False))
    assert actions == [abort("deadline")]
    state, actions = run(state, PeerAborted("deadline"))
    assert actions == []
    assert run(state, Settled(0))[1] == [DRAINED, Finish("deadline")]


def test_an_abort_of_a_served_destination_is_answered():
    state, _ = run(sending(0), PeerDone())
    assert step(state, PeerAborted("late"), 0.0) == (state, [DRAINED])


def test_the_deadline_ends_with_what_is_unwritten_and_holds_pages_that_are_still_read():
    state, _ = run(sending(), *FLYING, Written(0))
    assert step(state, Tick(), DEADLINE - 0.1) == (state, [])
    state, actions = step(state, Tick(), DEADLINE)
    reason = "deadline passed with 1 of 2 chunks unwritten"
    assert actions == [abort(reason)]
    state, actions = step(state, Tick(), DEADLINE + DRAIN_S)
    assert actions == [Finish(reason, held=True)]


def test_an_attempt_that_ended_while_writing_still_answers_an_abort_when_the_write_is_over():
    state, _ = run(sending(1), Granted(0, 0), Posted(0), Cancel("enough"))
    state, actions = step(state, Tick(), DRAIN_S)
    assert actions == [Finish("enough", held=True)]
    state, actions = run(state, PeerAborted("enough"), now=DRAIN_S)
    assert actions == []
    state, actions = run(state, Written(0), now=DRAIN_S)
    assert actions == [DRAINED]
    assert run(state, Tick(), Settled(0), now=2 * DRAIN_S)[1] == []


def test_a_lost_destination_ends_at_once_when_nothing_is_in_flight():
    assert run(sending(), PeerGone("d is lost"))[1] == [Finish("d is lost")]


def test_news_of_a_lost_destination_do_not_put_the_end_off():
    state, _ = run(sending(1), Granted(0, 0), Posted(0), PeerGone("d is lost"))
    for tenths in range(1, 20):
        state, actions = run(state, PeerGone("d is unknown"), Tick(), now=tenths * DRAIN_S / 20)
        assert actions == []
    state, actions = run(state, PeerGone("d is unknown"), Tick(), now=DRAIN_S)
    assert actions == [Finish("d is lost", held=True)]


@settings(max_examples=150, stateful_step_count=40)
class AnyOrder(RuleBasedStateMachine):
    """Every event in every order. `posted` is the poster's queue, `flying` what it has started and not seen end."""

    @initialize(chunks=st.integers(0, 3))
    def begin(self, chunks: int) -> None:
        self.state = sending(chunks)
        self.now = 0.0
        self.queue: list[int] = []
        self.flying: set[int] = set()
        self.limbo: set[int] = set()
        self.used: set[int] = set()
        self.finishes: list[Finish] = []
        self.aborts = 0
        self.owed = False
        self.done_heard = False

    def feed(self, event: Event) -> None:
        before = self.state
        self.state, actions = step(before, event, self.now)
        if isinstance(event, PeerAborted):
            self.owed = True
        if isinstance(event, PeerGone):
            self.owed = False
        for action in actions:
            match action:
                case Post(chunk, _):
                    assert before.reason is None
                    assert not before.finished
                    assert 0 <= chunk < before.chunks
                    assert chunk not in self.used
                    self.used.add(chunk)
                    self.queue.append(chunk)
                case Say(wire.Drained()):
                    assert not self.flying
                    assert not self.limbo
                    self.owed = False
                case Say(wire.Abort(reason=reason)):
                    assert reason == self.state.reason
                    self.aborts += 1
                case Finish(reason, held):
                    self.finishes.append(action)
                    self.queue.clear()
                    assert held == bool(self.flying or self.limbo)
                    assert reason == self.state.reason
                    if reason is None:
                        assert self.done_heard
                        assert self.used == set(range(self.state.chunks))
                        assert not held
                    else:
                        assert reason

    @rule(chunk=st.integers(-1, 3), offset=st.sampled_from([0, 256]))
    def grant(self, chunk: int, offset: int) -> None:
        self.feed(Granted(chunk, offset))

    @rule()
    def grant_the_next(self) -> None:
        left = sorted(set(range(self.state.chunks)) - self.used)
        if left:
            self.feed(Granted(left[0], 0))

    @precondition(lambda self: self.queue)
    @rule()
    def post(self) -> None:
        chunk = self.queue.pop(0)
        self.flying.add(chunk)
        self.feed(Posted(chunk))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), how=st.sampled_from(["written", "failed", "limbo"]))
    def end_write(self, data: st.DataObject, how: str) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.flying)))
        self.flying.remove(chunk)
        if how == "written":
            self.feed(Written(chunk))
            return
        if how == "limbo":
            self.limbo.add(chunk)
        self.feed(WriteFailed(chunk, f"write of {chunk} failed", how == "failed"))

    @precondition(lambda self: self.limbo)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.limbo)))
        self.limbo.remove(chunk)
        self.feed(Settled(chunk))

    @rule()
    def done(self) -> None:
        self.done_heard |= self.state.reason is None
        self.feed(PeerDone())

    @rule()
    def aborted(self) -> None:
        self.feed(PeerAborted("the destination aborted"))

    @rule(reason=st.sampled_from(["lost", "unknown"]))
    def gone(self, reason: str) -> None:
        self.feed(PeerGone(reason))

    @rule()
    def cancel(self) -> None:
        self.feed(Cancel("cancelled"))

    @rule(seconds=st.sampled_from([0.0, 1.0, 50.0, DRAIN_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "state"):
            return
        assert self.state.in_flight == self.flying | self.limbo
        assert len(self.finishes) == self.state.finished
        assert self.aborts <= 1
        if not self.flying and not self.limbo:
            assert not self.owed, "an abort was not answered"

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        self.now = max(self.now, DEADLINE)
        self.feed(Tick())
        for _ in range(4):
            self.now += DRAIN_S / 4
            self.feed(PeerGone("still lost"))
            self.feed(Tick())
        assert self.state.finished
        assert len(self.finishes) == 1


TestAnyOrder = AnyOrder.TestCase


def test_an_event_of_another_attempt_cannot_reach_a_state():
    """Events carry no generation: the runner looks the attempt up by it. What the state says carries it."""
    state = replace(sending(), generation=8)
    assert step(state, Cancel("no"), 0.0)[1] == [Say(wire.Abort("r", 8, "no"))]
