"""The source's state machine under every event in every order: the rules of the protocol after each."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmover.transfer.events import Cancel, Patience, PeerGone, Tick
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.source.source_machine import (
    Attached,
    EndSend,
    Event,
    Gathered,
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

DEADLINE, DRAIN_S = 100.0, 2.0
PATIENCE = Patience(DEADLINE, DRAIN_S, resend_s=1.0)

some_chunk = st.integers(-1, 3)


@settings(max_examples=200, stateful_step_count=50)
class AnyOrder(RuleBasedStateMachine):
    """`queue` is the poster's, `flying` [chunk] what it has started and not seen end, `limbo` what failed and may land.

    `rounds` [chunk]: the newest that was posted. `whole` [chunk]: the newest whose bytes were written or staged.
    """

    @initialize(chunks=st.integers(0, 3), direct=st.booleans(), verb=st.sampled_from(Verb))
    def begin(self, chunks: int, direct: bool, verb: Verb) -> None:
        self.state = Sending("r", 7, (256,) * chunks, PATIENCE, DEADLINE, direct, verb)
        self.now = 0.0
        self.produced: set[int] = set()
        self.queue: list[Post] = []
        self.flying: dict[int, int] = {}
        self.quarantine: set[int] = set()
        self.rounds: dict[int, int] = {}
        self.whole: dict[int, int] = {}
        self.staged: set[int] = set()
        self.finishes: list[EndSend] = []
        self.owed = False
        self.done_heard = False

    def feed(self, event: Event) -> None:
        before = self.state
        if due(before) > self.now:  # a Tick before that changes nothing
            between = self.now + 0.999 * (min(due(before), self.now + 100.0) - self.now)
            assert step(before, Tick(), between) == (before, [])
        self.state, actions = step(before, event, self.now)
        if isinstance(event, wire.Abort):
            self.owed = True
        if isinstance(event, PeerGone):
            self.owed = False
        for action in actions:
            match action:
                case Post(chunk, _, round_):
                    assert before.reason is None
                    assert not before.finished
                    assert chunk in self.produced
                    assert chunk not in self.flying.keys() | self.quarantine | {post.chunk for post in self.queue}
                    assert round_ > self.rounds.get(chunk, -2)
                    self.rounds[chunk] = round_
                    self.queue.append(action)
                case Unstage(chunk):
                    self.staged.remove(chunk)
                case Say(message):
                    self.check_said(message)
                case EndSend(reason, held):
                    self.finishes.append(action)
                    self.queue.clear()
                    assert held == bool(self.flying or self.quarantine)
                    assert reason == self.state.reason
                    assert reason or (reason is None and self.done_heard and not held)
                    assert reason or self.rounds.keys() == set(range(self.state.chunks))
                    assert not self.staged

    def check_said(self, message: wire.AnyMessage) -> None:
        match message:
            case wire.Drained():
                assert not self.flying
                assert not self.quarantine
                assert not self.queue or self.state.reason
                self.owed = False
            case wire.Abort(reason=reason):
                assert reason == self.state.reason
            case wire.Offered(ready=ready):
                named = [chunk for first, stop in ready for chunk in range(first, stop)]
                assert len(named) == len(set(named))
                assert set(named) <= self.produced
                assert all(stop < after for (_, stop), (after, _) in pairwise(ready))
            case wire.Chunk(chunk=chunk, round=round_):
                assert self.whole[chunk] == round_ == self.rounds[chunk]
            case wire.Staged(chunk=chunk, round=round_):
                assert chunk in self.staged
                assert self.whole[chunk] == round_ == self.rounds[chunk]
            case wire.Kept():
                assert self.state.verb is Verb.PULL or not self.state.chunks
                assert self.done_heard
                assert self.state.reason is None
            case wire.Noted():
                assert not self.produced
            case _:
                assert isinstance(message, wire.Aux)

    @rule(chunks=st.sets(st.integers(0, 2)))
    def produce(self, chunks: set[int]) -> None:
        fresh = {chunk for chunk in chunks if chunk < self.state.chunks} - self.produced
        self.produced |= fresh
        self.feed(Ready(tuple(fresh)))

    @rule(chunk=some_chunk, offset=st.sampled_from([0, 256]), round_=st.integers(-1, 2))
    def grant(self, chunk: int, offset: int, round_: int) -> None:
        self.feed(grant(chunk, offset, round_))

    @rule()
    def grant_the_next(self) -> None:
        left = sorted(self.produced - self.rounds.keys())
        if left:
            self.feed(grant(left[0], 0))

    @precondition(lambda self: self.queue)
    @rule()
    def post(self) -> None:
        post = self.queue.pop(0)
        self.flying[post.chunk] = post.round
        self.feed(Posted(post.chunk))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), how=st.sampled_from(["well", "well", "failed", "limbo"]))
    def end_write(self, data: st.DataObject, how: str) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.flying)))
        round_ = self.flying.pop(chunk)
        if how == "well":
            self.whole[chunk] = round_
            if self.state.verb is Verb.PULL:
                self.staged.add(chunk)
            self.feed(Gathered(chunk, 256 * chunk) if self.state.verb is Verb.PULL else Written(chunk))
            return
        if how == "limbo":
            self.quarantine.add(chunk)
        self.feed(WriteFailed(chunk, f"write of {chunk} failed", how == "failed"))

    @precondition(lambda self: self.quarantine)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.quarantine)))
        self.quarantine.remove(chunk)
        self.feed(Settled(chunk))

    @rule(chunk=some_chunk, round_=st.integers(-1, 2))
    def take(self, chunk: int, round_: int) -> None:
        self.feed(taken(chunk, round_))

    @precondition(lambda self: self.staged)
    @rule(data=st.data())
    def take_what_is_there(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(sorted(self.staged)))
        self.feed(taken(chunk, self.rounds[chunk]))
        assert chunk not in self.staged

    @rule()
    def ask(self) -> None:
        self.feed(WANT)

    @rule()
    def attach(self) -> None:
        self.feed(Attached(b"token"))

    @rule()
    def done(self) -> None:
        self.done_heard |= self.state.reason is None
        self.feed(DONE)

    @rule()
    def aborted(self) -> None:
        self.feed(aborted("the destination aborted"))

    @rule(reason=st.sampled_from(["lost", "unknown"]))
    def gone(self, reason: str) -> None:
        self.feed(PeerGone("d", reason))

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
        assert self.state.in_flight == self.flying.keys() | self.quarantine
        assert self.state.staged.keys() == self.staged
        assert len(self.finishes) == self.state.finished
        if not self.flying and not self.quarantine:
            assert not self.owed, "an abort was not answered"

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        self.now = max(self.now, DEADLINE)
        self.feed(Tick())
        for _ in range(4):
            self.now += DRAIN_S / 4
            self.feed(PeerGone("d", "still lost"))
            self.feed(Tick())
        assert self.state.finished
        assert len(self.finishes) == 1
        assert not self.staged


TestAnyOrder = AnyOrder.TestCase
