"""Both machines of a transfer under messages of anything, through their decoder: nothing raises, nothing leaks."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvmover.errors import ProtocolError
from kvmover.transfer.destination import destination_machine as receiving
from kvmover.transfer.destination.destination_machine import (
    Allocated,
    EndReceive,
    Free,
    Greeted,
    Heard,
    Isolate,
    OwnFault,
    PeerDead,
    Read,
    ReadEnded,
    ReadSettled,
    Receiving,
    Reserve,
    Reserved,
    Scatter,
    Scattered,
    Source,
)
from kvmover.transfer.events import Cancel, Patience, PeerGone, Tick
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.chunk_sets import WriterChunks
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.source import source_machine as sending
from kvmover.transfer.source.source_machine import (
    Attached,
    EndSend,
    Gathered,
    Lapsed,
    Post,
    Posted,
    Ready,
    Sending,
    Settled,
    Unstage,
    WriteFailed,
    Written,
)
from tests.drawn_values import damaged, drawn
from tests.proofs import searched

PATIENCE = Patience(30.0, 5.0, 1.0)
CHUNKS, SPAN, ROOM = 3, 4096, 1 << 16
USUAL: dict[str, list[Any]] = {
    "chunk": [0, 1, 2],
    "offset": [0, SPAN, 2 * SPAN],
    "round": [0, 0, 1],
    "generation": [1],
    "ready": [0, 1, 2, 3],
    "digest": [7],
}


def said(kinds: tuple[type, ...], dice: Random) -> Any:
    """A message of one of these kinds that the decoder lets through."""
    while True:
        note = wire.encode(drawn(dice.choice(kinds), dice, ["r"], USUAL))
        try:
            message = wire.decode(damaged(note, dice) if dice.random() < 0.2 else note)
        except ProtocolError:
            continue
        if isinstance(message, kinds):
            return message


class SourceScene:
    """One destination's attempt, and the writes and copies that were asked of its driver and have not ended."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = Random(seed)
        direct, verb = dice.random() < 0.3, dice.choice(list(Verb))
        eager = wire.Grant(*dice.choice([(0, 0), (2, SPAN), (7, 0), (0, ROOM)])) if dice.random() < 0.3 else None
        room = 0 if direct or verb is Verb.PULL else ROOM
        spans = (SPAN,) * dice.choice([0, 1, CHUNKS])
        self.state = Sending("r", 1, spans, PATIENCE, 30.0, direct, verb, room_bytes=room, eager=eager)
        self.waiting, self.writing, self.unsettled = list[int](), set[int](), set[int]()
        self.staged = set[int]()
        self.now, self.ends = 0.0, 0

    def step(self, event: Any) -> None:
        self.state, actions = sending.step(self.state, event, self.now)
        for action in actions:
            match action:
                case Post(chunk):
                    assert 0 <= chunk < len(self.state.spans)
                    assert chunk not in {*self.waiting, *self.writing, *self.unsettled}, (
                        "a chunk is written twice at once"
                    )
                    self.waiting.append(chunk)
                case Unstage(chunk):
                    self.staged.discard(chunk)
                case EndSend():
                    self.waiting.clear()
                    self.ends += 1
                case _:
                    pass
        self.state.check()
        assert self.ends <= 1, "it ended twice"

    def own(self) -> Any:
        """What the driver reports of a chunk."""
        dice = self.dice
        if self.waiting:
            chunk = self.waiting.pop(0)
            if self.state.reason is not None or dice.random() < 0.2:
                return Lapsed(chunk)
            self.writing.add(chunk)
            return Posted(chunk, dice.choice([None, 7]))
        if self.unsettled and dice.random() < 0.5:
            return Settled(self.unsettled.pop())
        if not self.writing:
            return Tick()
        chunk = self.writing.pop()
        if dice.random() < 0.1:
            quiescent = dice.random() < 0.5
            self.unsettled |= set() if quiescent else {chunk}
            return WriteFailed(chunk, "failed", quiescent)
        if self.state.verb is Verb.PULL:
            self.staged.add(chunk)
            return Gathered(chunk, chunk * SPAN, dice.choice([None, 7]))
        return Written(chunk)

    def event(self) -> Any:
        dice = self.dice
        unready = [chunk for chunk in range(len(self.state.spans)) if chunk not in self.state.ready]
        match dice.randrange(12):
            case 0 | 1 if unready:
                return Ready(tuple(unready[: dice.randrange(1, 4)]))
            case 2:
                return dice.choice([Tick(), Tick(), Tick(), Cancel("given up"), PeerGone("p", "lost"), Attached(b"a")])
            case 3 | 4 | 5 | 6:
                return self.own()
            case _:
                return said((*wire.ToSource.__args__, wire.Abort), dice)


@searched(few=25, many=1000, deadline=None)
@given(st.integers(0, (1 << 32) - 1))
def test_a_source_that_hears_anything_keeps_what_must_hold_and_ends_once(seed: int) -> None:
    scene = SourceScene(seed)
    for _ in range(25):
        scene.now += scene.dice.choice([0.0, 0.1, 1.0])
        scene.step(scene.event())
    scene.step(Cancel("over"))
    while scene.waiting or scene.writing or scene.unsettled:
        scene.step(scene.own())
    scene.step(wire.Abort("r", 1, "over"))
    assert scene.state.finished
    assert scene.ends == 1
    assert not scene.staged, "memory is staged for nobody"


class DestinationScene:
    """One request from two ranks, and the regions, reads and copies that were asked of its driver."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = Random(seed)
        verb = dice.choice(list(Verb))
        sources = {
            peer: Source(dice.choice([0, 1, CHUNKS]), dice.random() < 0.4, verb, dice.random() < 0.3) for peer in "ab"
        }
        self.state = Receiving("r", 1, sources, PATIENCE, 30.0, look_at=1.0)
        if dice.random() < 0.3:
            self.state = receiving.replace(
                self.state,
                unnamed=WriterChunks(
                    (peer, chunk) for peer, source in sources.items() for chunk in range(source.chunks)
                ),
            )
        self.reserves, self.reads, self.copies = list[Reserve](), list[Read](), list[Scatter]()
        self.unsettled, self.reserved = list[Read](), set[int]()
        self.next, self.now, self.ends = 0, 0.0, 0
        self.after(*receiving.start(self.state))

    def step(self, event: Any) -> None:
        self.after(*receiving.step(self.state, event, self.now))

    def after(self, state: Receiving, actions: list[Any]) -> None:
        self.state = state
        for action in actions:
            match action:
                case Reserve():
                    self.reserves.append(action)
                case Read():
                    self.reads.append(action)
                case Scatter():
                    self.copies.append(action)
                case Free(offset) | Isolate(_, offset):
                    assert offset in self.reserved, "a region is given back that is not reserved"
                    self.reserved.discard(offset)
                case EndReceive():
                    self.ends += 1
                case _:
                    pass
        self.state.check()
        assert self.ends <= 1, "it ended twice"

    def own(self) -> Any:
        """What the driver reports: a region, a read that ended, a copy that is over."""
        dice = self.dice
        acts = [act for act, there in self.acts() if there]
        return dice.choice(acts)() if acts else Tick()

    def acts(self) -> list[tuple[Callable[[], Any], bool]]:
        dice = self.dice

        def reserve() -> Any:
            asked, offset = self.reserves.pop(0), self.next
            self.next += SPAN
            self.reserved.add(offset)
            return Reserved(asked.peer, ((asked.chunk, offset),))

        def read() -> Any:
            ended = self.reads.pop(0)
            if dice.random() < 0.8:
                return ReadEnded(ended.peer, ended.chunk)
            quiescent = dice.random() < 0.5
            self.unsettled += [] if quiescent else [ended]
            return ReadEnded(ended.peer, ended.chunk, "failed", quiescent)

        def settle() -> Any:
            ended = self.unsettled.pop(0)
            return ReadSettled(ended.peer, ended.chunk)

        def copy() -> Any:
            ended = self.copies.pop(0)
            return Scattered(ended.peer, ended.chunk, dice.choice([None, 7, 7]))

        return [
            (reserve, bool(self.reserves)),
            (read, bool(self.reads)),
            (settle, bool(self.unsettled)),
            (copy, bool(self.copies)),
        ]

    def event(self) -> Any:
        dice, peer = self.dice, self.dice.choice("aabbx")
        match dice.randrange(16):
            case 0:
                return dice.choice([Tick(), Tick(), Greeted(peer), PeerGone(peer, "lost"), PeerDead(peer, "dead")])
            case 1:
                copying = frozenset((copy.peer, copy.chunk) for copy in self.copies)
                reading = frozenset((read.peer, read.chunk) for read in [*self.reads, *self.unsettled])
                return dice.choice([Cancel("given up"), OwnFault("fault", copying, reading), Tick(), Tick()])
            case 2 | 3 if self.state.unnamed:
                return Allocated(frozenset(dice.sample(sorted(self.state.unnamed), 1)))
            case 4 | 5 | 6 | 7:
                return self.own()
            case _:
                return Heard(peer, said((*wire.ToDestination.__args__, wire.Abort), dice))


@searched(few=25, many=1000, deadline=None)
@given(st.integers(0, (1 << 32) - 1))
def test_a_destination_that_hears_anything_keeps_what_must_hold_and_leaks_no_region(seed: int) -> None:
    scene = DestinationScene(seed)
    for _ in range(30):
        scene.now += scene.dice.choice([0.0, 0.1, 1.0])
        scene.step(scene.event())
    scene.step(Cancel("over"))
    while scene.reserves or scene.reads or scene.copies or scene.unsettled:
        scene.step(scene.own())
    for peer in "ab":
        scene.step(Heard(peer, wire.Drained("r", 1)))
    assert scene.state.finished
    assert scene.ends == 1
    assert not scene.reserved, "regions are nobody's and not free"
