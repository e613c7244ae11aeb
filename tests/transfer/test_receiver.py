"""The destination's state machine: what it says and frees, whatever happens to it in whatever order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmover.transfer import wire
from kvmover.transfer.receiver import (
    Action,
    Arrived,
    Cancel,
    Event,
    Finish,
    Free,
    Lease,
    Leased,
    Offered,
    PeerAborted,
    PeerDrained,
    PeerGone,
    Quarantine,
    Receiving,
    Scatter,
    Scattered,
    Send,
    Source,
    Tick,
    WriterChunk,
    start,
    step,
)

DEADLINE, DRAIN_S = 100.0, 2.0


def receiving(**sources: Source) -> Receiving:
    return Receiving("r", 7, sources, DEADLINE, DRAIN_S)


def run(state: Receiving, *events: Event, now: float = 0.0) -> tuple[Receiving, list[Action]]:
    """The state after all events, and the actions of the last."""
    actions: list[Action] = []
    for event in events:
        state, actions = step(state, event, now)
    return state, actions


def granted(peer: str, chunk: int, offset: int) -> Send:
    return Send(peer, wire.Granted("r", 7, (wire.Grant(chunk, offset),)))


def aborts(reason: str, *peers: str) -> list[Action]:
    return [Send(peer, wire.Abort("r", 7, reason)) for peer in peers]


DONE = wire.Done("r", 7)
ONE = receiving(a=Source(1))
TWO = receiving(a=Source(1), b=Source(2))
STRAIGHT = receiving(a=Source(1, direct=True), b=Source(2, direct=True))


def test_a_request_that_needs_nothing_is_done_at_once():
    state, actions = start(receiving(a=Source(0), b=Source(0, direct=True)))
    assert state.finished
    assert actions == [Send("a", DONE), Send("b", DONE), Finish(None)]
    assert start(receiving()) == (replace(receiving(), finished=True), [Finish(None)])


def test_a_chunk_is_granted_scattered_freed_and_the_last_one_says_done():
    state, actions = start(ONE)
    assert actions == []
    state, actions = run(state, Leased("a", 0, 512))
    assert actions == [granted("a", 0, 512)]
    state, actions = run(state, Arrived("a", 0))
    assert actions == [Scatter("a", 0, 512)]
    state, actions = run(state, Scattered("a", 0))
    assert actions == [Free(512), Send("a", DONE), Finish(None)]


def test_direct_chunks_are_landed_when_they_arrive():
    state, actions = run(STRAIGHT, Arrived("b", 1), Arrived("a", 0))
    assert actions == []
    state, actions = run(state, Arrived("b", 0))
    assert actions == [Send("a", DONE), Send("b", DONE), Finish(None)]


@pytest.mark.parametrize("state", [TWO, STRAIGHT], ids=["packed", "direct"])
def test_completion_is_a_set_and_a_chunk_told_of_twice_counts_once(state: Receiving):
    for key, source in state.sources.items():
        for chunk in range(source.chunks):
            if not source.direct:
                state, _ = run(state, Leased(key, chunk, 256 * chunk))
    once, _first = run(state, Arrived("b", 1))
    twice, second = run(once, Arrived("b", 1), Arrived("b", 1))
    assert twice == once
    assert second == []
    assert once.missing in (2, 3)
    landed, _ = run(once, Scattered("b", 1))
    again, actions = run(landed, Scattered("b", 1), Arrived("b", 1))
    assert again == landed
    assert actions == []


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Arrived("a", 0), "a sent chunk 0 without a grant"),
        (Arrived("b", 2), "b sent chunk 2 of 2"),
        (Arrived("b", -1), "b sent chunk -1 of 2"),
        (PeerAborted("b", "out of pages"), "out of pages"),
        (PeerGone("a", "a is lost"), "a is lost"),
        (Cancel("the user left"), "the user left"),
    ],
)
def test_every_failure_has_its_reason_and_reaches_all_sources(event: Event, reason: str):
    state, actions = run(TWO, event)
    assert state.reason == reason
    assert actions == aborts(reason, *sorted(state.sources.keys() - state.gone))
    state, actions = run(state, PeerDrained("a"), PeerDrained("b"))
    assert actions == [Finish(reason)]


def test_a_chunk_of_a_source_counts_for_that_source_only():
    state, _actions = run(TWO, Leased("a", 0, 0), Arrived("b", 0))
    assert state.reason == "b sent chunk 0 without a grant"


def test_the_first_reason_stays():
    state, _actions = run(TWO, Cancel("first"), PeerAborted("a", "second"), Cancel("third"), PeerGone("b", "fourth"))
    assert state.reason == "first"
    assert run(state, PeerDrained("a"))[1] == [Finish("first")]


def test_strangers_change_nothing():
    for event in (Arrived("c", 0), PeerAborted("c", "no"), PeerDrained("c"), PeerGone("c", "lost")):
        assert step(TWO, event, 0.0) == (TWO, [])


def test_drained_before_any_failure_means_nothing():
    state, actions = run(TWO, PeerDrained("a"), PeerDrained("b"))
    assert (state, actions) == (TWO, [])
    state, _ = run(state, Cancel("late"))
    assert state.undrained == {"a", "b"}


def test_a_region_is_kept_until_its_writer_has_drained():
    state, _ = run(TWO, Leased("a", 0, 0), Leased("b", 0, 256), Leased("b", 1, 512), Cancel("enough"))
    state, actions = run(state, PeerDrained("b"))
    assert actions == [Free(256), Free(512)]
    state, actions = run(state, PeerDrained("a"))
    assert actions == [Free(0), Finish("enough")]


def test_a_region_that_is_being_scattered_outlives_its_drained_writer():
    state, _ = run(ONE, Leased("a", 0, 0), Arrived("a", 0), Cancel("enough"))
    state, actions = run(state, PeerDrained("a"))
    assert actions == []
    assert run(state, Scattered("a", 0))[1] == [Free(0), Finish("enough")]


def test_a_region_leased_after_a_failure_or_after_the_end_goes_straight_back():
    failing, _ = run(ONE, Cancel("enough"))
    assert step(failing, Leased("a", 0, 256), 0.0) == (failing, [Free(256)])
    ended, _ = run(failing, PeerDrained("a"))
    assert step(ended, Leased("a", 0, 256), 0.0) == (ended, [Free(256)])


def test_a_lost_writer_keeps_its_region_in_quarantine():
    _state, actions = run(ONE, Leased("a", 0, 256), PeerGone("a", "a is lost"))
    assert actions == [Quarantine(256), Finish("a is lost")]


def test_a_lost_writer_of_pages_keeps_them_held():
    state, _ = run(STRAIGHT, PeerGone("a", "a is lost"))
    assert not state.finished
    assert run(state, PeerDrained("b"))[1] == [Finish("a is lost", frozenset({"a"}))]


def test_a_source_that_has_sent_everything_may_go():
    state, actions = run(TWO, Leased("a", 0, 0), Arrived("a", 0), PeerGone("a", "a is lost"))
    assert (state.reason, actions) == (None, [])
    events = (Scattered("a", 0), Leased("b", 0, 0), Arrived("b", 0), Scattered("b", 0), Leased("b", 1, 0))
    state, _ = run(state, *events, Arrived("b", 1))
    assert run(state, Scattered("b", 1))[1][-1] == Finish(None)


def test_the_deadline_fails_with_what_is_missing_and_from_whom():
    state, _ = run(TWO, Leased("a", 0, 0), Arrived("a", 0), Scattered("a", 0))
    assert step(state, Tick(), DEADLINE - 0.1) == (state, [])
    state, actions = step(state, Tick(), DEADLINE)
    reason = "deadline passed with 2 chunks missing from b"
    assert actions == aborts(reason, "a", "b")
    assert step(state, Tick(), DEADLINE + DRAIN_S - 0.1) == (state, [])
    state, actions = step(state, Tick(), DEADLINE + DRAIN_S)
    assert actions == [Finish(reason)]


def test_draining_is_not_waited_for_longer_than_allowed():
    state, _ = run(TWO, Leased("b", 1, 512), Cancel("enough"), now=10.0)
    state, _ = run(state, PeerDrained("a"), now=11.0)
    state, actions = step(state, Tick(), 10.0 + DRAIN_S)
    assert actions == [Quarantine(512), Finish("enough")]


PEERS = ("a", "b", "c")


@settings(max_examples=150, stateful_step_count=40)
class AnyOrder(RuleBasedStateMachine):
    """Every event in every order; the rules of the protocol after each."""

    @initialize(sources=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=3))
    def begin(self, sources: list[tuple[int, bool]]) -> None:
        named = {peer: Source(chunks, direct) for peer, (chunks, direct) in zip(PEERS, sources, strict=False)}
        self.state = receiving(**named)
        self.now, self.offsets, self.last_tick = 0.0, 0, 0.0
        self.out: dict[int, WriterChunk] = {}
        self.scattering: dict[WriterChunk, int] = {}
        self.scattered: set[WriterChunk] = set()
        self.drained: set[str] = set()
        self.aborted: list[str] = []
        self.granted: set[WriterChunk] = set()
        self.finishes: list[Finish] = []
        self.state, actions = start(self.state)
        self.check(None, None, actions)

    def feed(self, event: Event) -> None:
        before = self.state
        if isinstance(event, PeerDrained) and before.reason is not None and not before.finished:
            self.drained.add(event.peer)
        self.state, actions = step(before, event, self.now)
        if before.finished:
            assert self.state == before
            assert actions == ([Free(event.offset)] if isinstance(event, Leased) else [])
        self.check(before, event, actions)

    def check(self, before: Receiving | None, event: Event | None, actions: list[Action]) -> None:
        finishing = any(isinstance(action, Finish) for action in actions)
        for action in actions:
            match action:
                case Send(peer, wire.Granted(grants=((wire.Grant(chunk, offset)),))):
                    assert before is not None
                    assert before.reason is None
                    assert self.out[offset] == (peer, chunk)
                    assert (peer, chunk) not in self.granted
                    self.granted.add((peer, chunk))
                case Send(peer, wire.Abort(reason=reason)):
                    assert peer not in self.aborted
                    assert peer not in self.state.gone
                    assert reason == self.state.reason
                    self.aborted.append(peer)
                case Send(peer, message):
                    assert message == DONE
                    assert finishing
                    assert self.state.reason is None
                case Scatter(peer, chunk, offset):
                    assert self.out[offset] == (peer, chunk)
                    assert (peer, chunk) in self.granted
                    assert (peer, chunk) not in self.scattering
                    self.scattering[peer, chunk] = offset
                case Free(offset):
                    key = self.out.pop(offset)
                    refused = isinstance(event, Leased) and event.offset == offset
                    assert refused or key in self.scattered or key[0] in self.drained
                    assert refused or key in self.scattered or key not in self.scattering
                case Quarantine(offset):
                    assert finishing
                    assert self.out.pop(offset)[0] in self.state.sources
                case Finish():
                    self.finishes.append(action)
                    self.ended(action)

    def ended(self, finish: Finish) -> None:
        every = {(p, c) for p, source in self.state.sources.items() for c in range(source.chunks)}
        direct = {peer for peer, source in self.state.sources.items() if source.direct}
        landed = {key for key in self.state.landed if key[0] in direct} | self.scattered
        if finish.reason is None:
            assert landed == every
            assert finish.held == frozenset()
            assert not self.aborted
        else:
            assert finish.reason
            may_write = {p for p in direct - self.drained if any(k[0] == p and k not in landed for k in every)}
            assert may_write <= finish.held <= direct - self.drained
            assert set(self.aborted) | self.state.gone == set(self.state.sources)

    @precondition(lambda self: self.ungranted())
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.ungranted()))
        self.offsets += 256
        self.out[self.offsets] = key
        self.feed(Leased(*key, self.offsets))

    def ungranted(self) -> list[WriterChunk]:
        packed = [(peer, source) for peer, source in self.state.sources.items() if not source.direct]
        return [(p, c) for p, source in packed for c in range(source.chunks) if (p, c) not in self.granted]

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def arrive_as_granted(self, data: st.DataObject) -> None:
        self.feed(Arrived(*data.draw(st.sampled_from(sorted(self.granted)))))

    @rule(peer=st.sampled_from([*PEERS, "stranger"]), chunk=st.integers(-1, 4))
    def arrive_somehow(self, peer: str, chunk: int) -> None:
        self.feed(Arrived(peer, chunk))

    @precondition(lambda self: self.scattering.keys() - self.scattered)
    @rule(data=st.data(), times=st.integers(1, 2))
    def scattered_chunk(self, data: st.DataObject, times: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.scattering.keys() - self.scattered)))
        self.scattered.add(key)
        for _ in range(times):
            self.feed(Scattered(*key))

    @rule(peer=st.sampled_from([*PEERS, "stranger"]))
    def drain(self, peer: str) -> None:
        self.feed(PeerDrained(peer))

    @rule(peer=st.sampled_from([*PEERS, "stranger"]), how=st.sampled_from([PeerAborted, PeerGone]))
    def fail_peer(self, peer: str, how: type[PeerAborted | PeerGone]) -> None:
        self.feed(how(peer, f"{peer} failed"))

    @rule()
    def cancel(self) -> None:
        self.feed(Cancel("cancelled"))

    @rule(seconds=st.sampled_from([0.0, 1.0, 50.0, DRAIN_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @invariant()
    def finishes_once(self) -> None:
        assert len(self.finishes) == self.state.finished
        if self.state.finished:
            assert self.out == {}

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        self.now = max(self.now, DEADLINE)
        self.feed(Tick())
        self.now += DRAIN_S
        self.feed(Tick())
        assert self.state.finished
        self.finishes_once()


TestAnyOrder = AnyOrder.TestCase


def test_an_offer_asks_for_a_region_for_each_chunk_once():
    state, actions = run(ONE, Offered("a"))
    chunks = ONE.sources["a"].chunks
    assert actions == [Lease("a", chunk) for chunk in range(chunks)]
    assert run(state, Offered("a"), Offered("stranger"))[1] == []


def test_an_offer_of_an_attempt_that_failed_asks_for_nothing():
    state, _ = run(ONE, Cancel("over"))
    assert run(state, Offered("a"))[1] == []
