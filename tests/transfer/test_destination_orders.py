"""The destination's state machine under every event in every order: the rules of the protocol after each."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmover.transfer.destination.destination_machine import (
    MAX_ROUNDS,
    Action,
    Ask,
    EndReceive,
    Event,
    Free,
    Greeted,
    Isolate,
    Mismatch,
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
    WriterChunk,
    due,
    start,
    step,
)
from kvmover.transfer.events import Cancel, Patience, PeerGone, Tick
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb
from tests.transfer.protocol_words import (
    DONE,
    says_abort,
    says_aux,
    says_chunk,
    says_drained,
    says_kept,
    says_noted,
    says_offered,
    says_staged,
)

DEADLINE, DRAIN_S = 100.0, 2.0
PATIENCE = Patience(DEADLINE, DRAIN_S, resend_s=1.0)
PEERS = ("a", "b", "c")
DIGEST = 77

anybody = st.sampled_from([*PEERS, "stranger"])
some_chunk = st.integers(-1, 4)
some_source = st.builds(Source, st.integers(0, 3), st.booleans(), aux=st.booleans())


@settings(max_examples=200, stateful_step_count=50)
class AnyOrder(RuleBasedStateMachine):
    """`out` [offset] are regions lent to chunks; `leasing`, `reading`, `limbo` and `copying` what is under way for us.

    `grants` [chunk]: the newest round that was granted. `sound`: chunks whose last copy matched. `drained`: sources
    that said so after the failure.
    """

    @initialize(
        sources=st.lists(some_source, min_size=1, max_size=3),
        verb=st.sampled_from(Verb),
        digests=st.booleans(),
    )
    def begin(self, sources: list[Source], verb: Verb, digests: bool) -> None:
        named = {
            peer: Source(source.chunks, source.direct, verb, source.aux)
            for peer, source in zip(PEERS, sources, strict=False)
        }
        self.verb, self.digest = verb, DIGEST if digests else None
        self.state = Receiving("r", 7, named, PATIENCE, DEADLINE)
        self.now, self.offsets = 0.0, 0
        self.out: dict[int, WriterChunk] = {}
        self.leased_once: set[WriterChunk] = set()
        self.leasing: list[WriterChunk] = []
        self.grants: dict[WriterChunk, int] = {}
        self.reading: set[WriterChunk] = set()
        self.quarantine: set[WriterChunk] = set()
        self.copying: dict[WriterChunk, int | None] = {}
        self.sound: set[WriterChunk] = set()
        self.drained: set[str] = set()
        self.aux: set[str] = set()
        self.told: set[str] = set()
        self.kept: set[str] = set()
        self.finishes: list[EndReceive] = []
        self.state, actions = start(self.state)
        self.check(None, actions)

    def keys(self, peer: str | None = None) -> set[WriterChunk]:
        sources = self.state.sources.items()
        return {(name, chunk) for name, s in sources if peer in (None, name) for chunk in range(s.chunks)}

    def feed(self, event: Event) -> None:
        if due(self.state) > self.now:  # a Tick before that changes nothing
            between = self.now + 0.999 * (min(due(self.state), self.now + 100.0) - self.now)
            assert step(self.state, Tick(), between) == (self.state, [])
        before = self.state
        self.state, actions = step(before, event, self.now)
        if before.finished:
            assert self.state == before
            assert actions == ([Free(offset) for _, offset in event.regions] if isinstance(event, Reserved) else [])
        self.check(event, actions)

    def check(self, event: Event | None, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reserve(peer, chunk):
                    assert self.state.reason is None
                    assert (peer, chunk) not in self.leased_once
                    self.leased_once.add((peer, chunk))
                    self.leasing.append((peer, chunk))
                case Send(peer, message):
                    self.check_said(peer, message)
                case Ask():
                    assert self.state.reason is None
                case Read(peer, chunk, _, offset, round_):
                    assert (peer, chunk) not in self.reading | self.quarantine | self.copying.keys()
                    assert self.state.sources[peer].direct or self.out[offset] == (peer, chunk)
                    assert round_ >= self.grants.get((peer, chunk), 0)
                    self.reading.add((peer, chunk))
                case Scatter(peer, chunk, offset):
                    assert (peer, chunk) not in self.reading | self.quarantine | self.copying.keys()
                    assert self.state.sources[peer].direct if offset is None else self.out[offset] == (peer, chunk)
                    self.copying[peer, chunk] = offset
                case Free(offset):
                    key = self.out.pop(offset)
                    refused = isinstance(event, Reserved) and offset in dict(event.regions).values()
                    assert refused or self.may_free(key), f"{key} was freed by {event}"
                case Isolate(peer, offset):
                    key = self.out.pop(offset)
                    assert key[0] == peer
                    assert not self.may_free(key), f"{key} is in quarantine for nothing"
                    assert any(isinstance(other, EndReceive) for other in actions)
                case Mismatch():
                    assert self.digest is not None
                case EndReceive():
                    self.finishes.append(action)
                    self.check_end(action)

    def may_free(self, key: WriterChunk) -> bool:
        """Whether nothing of anybody's can touch a chunk's region any more."""
        if key in self.reading | self.quarantine | self.copying.keys():
            return False
        if key in self.sound or key[0] in self.drained:
            return True
        return self.verb is Verb.PULL and self.state.reason is not None

    def check_said(self, peer: str, message: wire.AnyMessage) -> None:
        match message:
            case wire.Granted(grants=grants):
                assert self.state.reason is None
                for grant in grants:
                    key = peer, grant.chunk
                    assert self.state.sources[peer].direct or self.out[grant.offset] == key
                    assert self.grants.get(key, 0) <= grant.round < MAX_ROUNDS
                    unasked = self.verb is Verb.PULL and self.state.sources[peer].direct  # a source that did not wait
                    assert key not in self.copying.keys() | self.reading or unasked
                    self.grants[key] = grant.round
            case wire.Abort(reason=reason):
                assert peer not in self.state.gone
                assert reason == self.state.reason
                self.told.add(peer)
            case wire.Taken(chunk=chunk):
                assert (peer, chunk) not in self.reading
            case _:
                assert message == DONE
                assert self.state.reason is None
                assert self.everything_is_here()

    def everything_is_here(self) -> bool:
        awaited = {peer for peer, source in self.state.sources.items() if source.aux}
        return self.state.landed == self.keys() and self.keys() <= self.sound and awaited <= self.aux

    def check_end(self, finish: EndReceive) -> None:
        assert not self.copying
        if finish.reason is None:
            assert self.everything_is_here()
            assert self.verb is Verb.PUSH or self.kept >= {peer for peer in self.state.sources if self.keys(peer)}
            assert not finish.quarantined
            assert not self.told
            return
        direct = {peer for peer, source in self.state.sources.items() if source.direct}
        reading = {peer for peer, _ in self.reading | self.quarantine}
        writing = set(self.state.sources) - self.drained if self.verb is Verb.PUSH else set[str]()
        assert finish.quarantined == direct & (reading | writing)
        assert self.told | self.state.gone == set(self.state.sources)

    @rule(peer=anybody, ready=st.lists(st.tuples(some_chunk, some_chunk), max_size=2))
    def offer_anything(self, peer: str, ready: list[tuple[int, int]]) -> None:
        self.feed(says_offered(peer, tuple(ready)))

    @rule(peer=anybody, keeps_ms=st.sampled_from([0, 500, 20_000]))
    def note(self, peer: str, keeps_ms: int) -> None:
        self.feed(says_noted(peer, keeps_ms))

    @rule(peer=anybody)
    def greet(self, peer: str) -> None:
        self.feed(Greeted(peer))

    @rule(peer=st.sampled_from(PEERS), first=st.integers(0, 3))
    def offer(self, peer: str, first: int) -> None:
        if peer in self.state.sources:
            self.feed(says_offered(peer, ((min(first, len(self.keys(peer))), len(self.keys(peer))),)))

    @precondition(lambda self: self.leasing)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.leasing))
        self.leasing.remove(key)
        self.offsets += 256
        self.out[self.offsets] = key
        self.feed(Reserved(key[0], ((key[1], self.offsets),)))

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), late=st.booleans())
    def come_as_granted(self, data: st.DataObject, late: bool) -> None:
        key, round_ = data.draw(st.sampled_from(sorted(self.grants.items())))
        round_ = 0 if late else round_
        self.come(key, round_)

    @rule(peer=anybody, chunk=some_chunk, round_=st.integers(-1, 2))
    def come_somehow(self, peer: str, chunk: int, round_: int) -> None:
        self.come((peer, chunk), round_)

    def come(self, key: WriterChunk, round_: int) -> None:
        if self.verb is Verb.PULL:
            self.feed(says_staged(*key, 4096, round_, self.digest))
            return
        before, direct = self.state, key in self.keys() and self.state.sources[key[0]].direct
        lands = direct and self.digest is None and self.state.reason is None and round_ >= 0 and key not in self.sound
        if lands:  # its bytes are in the pages: with this news all may be here
            self.sound.add(key)
        self.feed(says_chunk(*key, round_, self.digest))
        if lands and key not in self.state.landed - before.landed:
            self.sound.discard(key)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), how=st.sampled_from(["well", "badly", "not"]))
    def end_read(self, data: st.DataObject, how: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.reading)))
        self.reading.discard(key)
        if how == "not":
            self.quarantine.add(key)
        elif how == "well" and self.digest is None and self.state.reason is None:
            self.sound |= {key} if self.state.sources[key[0]].direct else set()
        self.feed(ReadEnded(*key, None if how == "well" else f"read of {key} failed", how != "not"))

    @precondition(lambda self: self.quarantine)
    @rule(data=st.data())
    def settle_read(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.quarantine)))
        self.quarantine.discard(key)
        self.feed(ReadSettled(*key))

    @precondition(lambda self: self.copying)
    @rule(data=st.data(), spoiled=st.sampled_from([False, False, True]), times=st.integers(1, 2))
    def end_copy(self, data: st.DataObject, spoiled: bool, times: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.copying)))
        del self.copying[key]
        spoiled = spoiled and self.digest is not None
        if not spoiled or self.state.reason is not None:
            self.sound.add(key)
        found = None if self.digest is None else self.digest + spoiled
        for _ in range(times):
            if key not in self.copying:
                self.feed(Scattered(*key, found))

    @rule(peer=anybody)
    def attach(self, peer: str) -> None:
        self.aux.add(peer)
        self.feed(says_aux(peer))

    @rule(peer=anybody)
    def keep(self, peer: str) -> None:
        if self.everything_is_here() and self.state.reason is None:
            self.kept.add(peer)
        self.feed(says_kept(peer))

    @rule(peer=anybody)
    def drain(self, peer: str) -> None:
        if self.state.reason is not None and not self.state.finished:
            self.drained.add(peer)
        self.feed(says_drained(peer))

    @rule(peer=anybody, how=st.sampled_from([says_abort, PeerGone]))
    def fail_peer(self, peer: str, how: Callable[[str, str], Event]) -> None:
        self.feed(how(peer, f"{peer} failed"))

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
        assert len(self.finishes) == self.state.finished
        if self.state.finished:
            assert self.out == {}
        else:
            assert self.state.regions == {key: offset for offset, key in self.out.items()}
            assert self.state.reading == self.reading | self.quarantine

    def teardown(self) -> None:
        """Copies of our own end; then nothing but time is needed."""
        if not hasattr(self, "state"):
            return
        for key in list(self.copying):
            del self.copying[key]
            self.sound.add(key)
            self.feed(Scattered(*key, self.digest))
        self.now = max(self.now, DEADLINE)
        self.feed(Tick())
        self.now += DRAIN_S
        self.feed(Tick())
        assert self.state.finished
        self.accounts_agree()


TestAnyOrder = AnyOrder.TestCase
