"""Random, mutated, repeated and replayed notes beside live traffic: nothing raises, and others keep what is theirs.

`KVMOVER_FUZZ=200 python -m pytest tests/transfer/test_hostile_fuzz.py` tries so many seeds each.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from mover_fleets import CONFIG, Bench, Engine, HandClock, Pair

from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.auth import Key, Keys
from kvmover.transfer.protocol.handshake import Card, Rank
from kvmover.transfer.protocol.wire import Verb
from kvmover.transport import LoopbackNetwork
from tests.drawn_values import ODD, damaged, drawn

SEEDS = range(int(os.environ.get("KVMOVER_FUZZ", "3")))
KINDS: tuple[type[msgspec.Struct], ...] = wire.AnyMessage.__args__


class Recording(LoopbackNetwork):
    """`said`: the notes that crossed it lately."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, str, bytes]] = []

    def tell(self, sender: str, peer: str, note: bytes) -> None:
        if len(self.said) < 400:
            self.said.append((sender, peer, note))
        super().tell(sender, peer, note)


@pytest.fixture(autouse=True)
def silent():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def message(dice: random.Random, names: list[str]) -> Any:
    """One of any kind."""
    made = drawn(dice.choice(KINDS), dice, names)
    changes: dict[str, Any] = {}
    if isinstance(made, wire.Want) and dice.random() < 0.7:  # one that could be served
        start = dice.randrange(60)
        changes |= {"start": start, "stop": start + dice.randrange(60), "pages": (bytes(100),)}
    if isinstance(made, wire.About) and dice.random() < 0.7:
        changes["generation"] = dice.randrange(3)
    return msgspec.structs.replace(made, **changes)


def odd_card(mover: Mover, dice: random.Random) -> bytes:
    """Its card, damaged inside."""
    envelope = msgspec.msgpack.decode(mover._connections.card, type=Card)
    body = msgspec.msgpack.decode(envelope.body, type=Rank)
    if dice.random() < 0.5:
        memory = replace(body.arena, nbytes=dice.choice(ODD), address=dice.choice(ODD))
        body = msgspec.structs.replace(body, **{dice.choice(["arena", "staging", "sandbox"]): memory})
    encoded = msgspec.msgpack.encode(body)
    return msgspec.msgpack.encode(
        Card(
            envelope.speaks, envelope.fields, envelope.model, damaged(encoded, dice) if dice.random() < 0.5 else encoded
        )
    )


class Scene:
    """A prefill and a decode rank with requests under way, and a third that talks to both and listens to nobody."""

    def __init__(self, seed: int, keys: Keys | None) -> None:
        self.dice, self.clock, self.network = random.Random(seed), HandClock(), Recording()
        config = replace(
            CONFIG,
            sandbox_bytes=1 << 17,
            route=self.dice.choice([Route.PACKED, Route.DIRECT]),
            verb=self.dice.choice(list(Verb)),
            deadline_s=8.0,
            keys=keys,
        )
        attention = Component("attention", 2, 2, 2, 64, "bfloat16")
        self.bench = Bench((attention,), config, self.clock, self.network)
        fleet = Fleet(page_tokens=4)
        self.src, self.dst = self.bench.engine("prefill", fleet), self.bench.engine("decode", fleet, "HND")
        self.dst.connect(self.src)
        self.other = self.bench.engine("other", fleet, "HND").movers[0]
        self.bench.movers.remove(self.other)
        for target in (self.src, self.dst):
            self.other._transport.connect(target.movers[0]._core.card.transport)
        self.bench.turn()

    def seat(self) -> None:
        """The other has the key and a seat."""
        for target in (self.src, self.dst):
            self.other.connect(target.movers[0].card)
        self.other.poll()
        self.bench.turn()

    def notes(self, names: list[str], sealed: bool) -> Iterator[tuple[Engine, bytes]]:
        """What the other says in one turn; sealed by its key where it has one."""
        for _ in range(self.dice.randrange(6)):
            target = self.dice.choice([self.src, self.dst])
            peer = target.movers[0]._transport.name
            match self.dice.randrange(5):
                case 0:
                    note = damaged(self.dice.choice(self.network.said)[2], self.dice)
                case 1:
                    note = self.dice.choice(self.network.said)[2]
                case 2:
                    note = wire.encode(wire.Hello(odd_card(self.other, self.dice)))
                case _:
                    note = next(iter(wire.notes([wire.encode(message(self.dice, names)) for _ in range(3)])))
            yield target, self.other._core.auth.sign(peer, note) if sealed else note

    def run(self, sealed: bool) -> None:
        rounds = []
        for number in range(6):
            asked = Pair.request(self.bench, self.src, self.dst, 60, number)
            names = [f"live-{number}", "nobody's", "x" * 256]
            sent, wanted = asked.send(names[0]), asked.receive(names[0])
            rounds.append((sent, wanted))
            for _ in range(12):
                for target, note in self.notes(names, sealed):
                    self.other._transport.notify(target.movers[0]._transport.name, note)
                self.bench.turn(1)
                self.clock.now += 0.02
            while not wanted[0].ended:
                self.bench.turn(1)
                self.clock.now += 0.05
            wanted[0].landed()
            asked.assert_landed()
        for _ in range(500):  # deadline, quarantine, what is remembered
            self.bench.turn(1)
            self.clock.now += 0.2
        assert all(transfer.ended for round_ in rounds for transfers in round_ for transfer in transfers)
        for mover in self.bench.movers:
            assert mover.meter.counts[Count.FAULTS] == 0
        self.bench.assert_nothing_is_left()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_peer_of_the_same_model_says_what_it_likes_and_others_land(seed: int):
    scene = Scene(seed, None)
    scene.seat()
    scene.run(sealed=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_peer_that_holds_the_key_says_what_it_likes_and_others_land(seed: int):
    scene = Scene(seed, Keys(Key(bytes(range(32)))))
    scene.seat()
    scene.run(sealed=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_has_no_key_is_not_heard_at_all(seed: int):
    scene = Scene(seed, Keys(Key(bytes(range(32)))))
    scene.run(sealed=False)
    assert all(mover.ranks("other") == frozenset() for mover in scene.bench.movers)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stranger_without_a_seat_is_heard_to_say_hello_and_no_more(seed: int):
    """Without keys he may say Hello, with the card that he has: it is his own."""
    Scene(seed, None).run(sealed=True)
