"""Movers with a shared key: they serve each other as ever, and a stranger on the same wire moves nothing."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from random import Random

import pytest
from mover_fleets import CONFIG, Bench, HandClock, Pair
from mover_network import Copies, FaultyNetwork, once

from kvmover.errors import LayoutError, PeerRefused
from kvmover.layout import Component, Fleet
from kvmover.plan.cost import Route
from kvmover.transfer.config import Integrity
from kvmover.transfer.meter import Count
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.auth import Key, Keys, MessageAuth, Refusal
from kvmover.transfer.protocol.wire import Verb
from kvmover.transport import LoopbackNetwork, LoopbackTransport, NixlTransport, Transport
from kvmover.transport.base import Note

SECRET = b"a secret of the tests"
KEYS = Keys(Key(SECRET))
SEALED = replace(CONFIG, keys=KEYS)
#: Where the message of a sealed note begins.
INSIDE = len(wire.SEALED) + 8 + 32


class Overheard(LoopbackNetwork):
    """Everybody's notes as they went over the wire: (from, to, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[str, str, bytes]] = []

    def tell(self, sender: str, peer: str, note: bytes) -> None:
        self.notes.append((sender, peer, note))
        super().tell(sender, peer, note)

    def _land(self, sender: LoopbackTransport, flight) -> None:
        if flight.note:
            self.notes.append((sender.name, flight.peer, flight.note))
        super()._land(sender, flight)

    def inject(self, sender: str, peer: str, note: bytes) -> None:
        """As if `sender` had said it: who sends a note is what the note says."""
        self._members[peer].inbox.append(Note(sender, note))


class FaultySealed(FaultyNetwork):
    """Loses and repeats notes by what is said inside of their seals."""

    def tell(self, sender: str, peer: str, note: bytes) -> None:
        said = [wire.decode(message) for message in wire.split(note[INSIDE:])]
        about = next((message for message in said if isinstance(message, wire.About)), said[0])
        for _ in range(self.copies(sender, peer, about)):
            LoopbackNetwork.tell(self, sender, peer, note)


def refusals(pair: Pair) -> dict[str, int]:
    total: dict[str, int] = {}
    for mover in pair.bench.movers:
        for reason, count in mover.meter.unopened.items():
            total[reason] = total.get(reason, 0) + count
    return total


def move(pair: Pair, name: str = "request") -> None:
    transfers = [*pair.send(name), *pair.receive(name)]
    pair.bench.ended(transfers)
    assert not [transfer.result for transfer in transfers if not transfer.landed().landed]
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()


@pytest.mark.parametrize(("verb", "route"), [(verb, route) for verb in Verb for route in Route])
def test_requests_land_and_every_note_on_the_wire_is_sealed(verb: Verb, route: Route):
    network = Overheard()
    config = replace(SEALED, verb=verb, route=route, integrity=Integrity.DIGEST)
    pair = Pair.of(Fleet(tp=2, page_tokens=4), config=config, network=network)
    move(pair)
    assert network.notes
    assert all(note.startswith(wire.SEALED) for _, _, note in network.notes)
    assert not any(SECRET in note for _, _, note in network.notes)
    said = [message for _, _, note in network.notes for message in wire.split(note[INSIDE:])]
    assert {type(wire.decode(message)) for message in said} >= {wire.Hello, wire.Want, wire.Done}
    assert not refusals(pair)


def test_everything_overheard_and_said_again_is_dropped_and_counted_and_changes_nothing():
    network = Overheard()
    pair = Pair.of(config=SEALED, network=network)
    move(pair)
    heard = list(network.notes)
    for sender, peer, note in heard:
        network.inject(sender, peer, note)
        network.inject(peer, sender, note)
    pair.bench.turn()
    assert refusals(pair) == {Refusal.REPEATED: len(heard), Refusal.FORGED: len(heard)}
    pair.assert_landed()
    pair.bench.assert_nothing_is_left()
    move(Pair.request(pair.bench, pair.src, pair.dst, 100, seed=3), "afterwards")


def test_a_stranger_without_the_key_ends_no_transfer_and_is_no_sign_of_life(caplog: pytest.LogCaptureFixture):
    """Whoever may send notes in a peer's name: an abort of a request that is open, a card, a ping, and garbage."""
    clock, network = HandClock(), Overheard()
    pair = Pair.of(config=SEALED, network=network, clock=clock)
    (landed,) = pair.receive()
    pair.bench.turn()
    source, target = pair.src.movers[0], pair.dst.movers[0]
    names = {mover: mover._transport.name for mover in (source, target)}
    (generation,) = {attempt.id[1] for attempt in target._destination._attempts}
    with caplog.at_level(logging.WARNING):
        for message in (
            wire.Abort("request", generation, "boo"),
            wire.Done("request", generation),
            wire.Hello(source._connections.card),
            wire.Ping(),
        ):
            network.inject(names[source], names[target], wire.encode(message))
            network.inject(names[target], names[source], wire.encode(message))
        network.inject(names[source], names[target], wire.SEALED + bytes(100))
        pair.bench.turn()
    assert refusals(pair) == {Refusal.UNSEALED: 8, Refusal.FORGED: 1}
    assert "has no seal, and this side has a shared key" in caplog.text
    assert "has a seal that is not of a key of ours" in caplog.text
    assert SECRET.decode() not in caplog.text
    assert not landed.ended
    (sent,) = pair.send()
    pair.bench.ended([sent, landed])
    assert landed.landed().landed
    pair.assert_landed()


def test_notes_of_a_stranger_do_not_keep_a_silent_peer_alive():
    clock, network = HandClock(), Overheard()
    pair = Pair.of(config=replace(SEALED, deadline_s=1000.0), network=network, clock=clock)
    pair.receive()
    pair.bench.turn()
    source, target = pair.src.movers[0], pair.dst.movers[0]
    for _ in range(12):  # the source is not polled: only the stranger speaks
        clock.now += SEALED.silence_s / 10
        network.inject(source._transport.name, target._transport.name, wire.encode(wire.Pong()))
        target.poll()
    assert target.meter.counts[Count.LOST_PEERS] == 1


def lose_a_third() -> Copies:
    """Not every third: what is resent goes round in threes, and the same message would be lost for ever."""
    random = Random(1)
    return lambda source, target, message: random.choice((0, 1, 2)) if isinstance(message, wire.About) else 1


def test_lost_and_repeated_notes_cost_no_request():
    clock, network = HandClock(), FaultySealed()
    config = replace(SEALED, deadline_s=500.0, silence_s=400.0)
    pair = Pair.of(config=config, network=network, clock=clock)
    network.copies = lose_a_third()
    transfers = [*pair.send(), *pair.receive()]
    for _ in range(300):
        pair.bench.turn(1)
        clock.now += 0.6
        if all(transfer.ended for transfer in transfers):
            break
    network.copies = once
    assert all(transfer.landed().landed for transfer in transfers)
    pair.assert_landed()
    assert refusals(pair)[Refusal.REPEATED] > 0
    assert set(refusals(pair)) == {Refusal.REPEATED}


def mixed(ours: Keys | None, theirs: Keys | None) -> tuple[Pair, Bench]:
    attention = Component("attention", 2, 2, 2, 64, "bfloat16")
    bench = Bench((attention,))
    source = bench.engine("prefill", Fleet(page_tokens=4), config=replace(CONFIG, keys=ours))
    target = bench.engine("decode", Fleet(page_tokens=4), "HND", config=replace(CONFIG, keys=theirs))
    return Pair.request(bench, source, target, 20), bench


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (KEYS, None, "card is sealed, and this side has no shared key"),
        (None, KEYS, "card has no seal, and this side has a shared key"),
        (KEYS, Keys(Key(b"a key of somebody else")), "not of a key of ours"),
    ],
)
def test_who_has_another_key_is_refused_by_its_card_with_the_reason(ours: Keys, theirs: Keys, said: str):
    pair, _ = mixed(ours, theirs)
    with pytest.raises(PeerRefused, match=said):
        pair.dst.connect(pair.src)


def test_a_side_without_the_key_is_told_why_its_peer_is_silent(caplog: pytest.LogCaptureFixture):
    """A card that somebody read elsewhere and hands over bare: what comes back is sealed, and dropped by name."""
    pair, bench = mixed(KEYS, None)
    source, target = pair.src.movers[0], pair.dst.movers[0]
    target.connect(source._connections.card)
    source.connect(source._core.auth.sign_card(target._connections.card))
    with caplog.at_level(logging.WARNING):
        bench.turn()
    assert "a sealed message, and this side has no shared key" in caplog.text
    assert target.meter.counts[Count.MALFORMED_MESSAGES] == 1
    assert source.meter.unopened == {Refusal.UNSEALED: 1}


def test_keys_are_changed_while_a_request_is_open():
    pair = Pair.of(config=SEALED)
    new = Key(b"the key of next year")
    (landed,) = pair.receive()
    pair.bench.turn()
    for keys in (Keys(KEYS.seals, (new,)), Keys(new, (KEYS.seals,)), Keys(new)):
        for mover in pair.bench.movers:
            mover.configure(replace(SEALED, keys=keys))
            pair.bench.turn()
    (sent,) = pair.send()
    pair.bench.ended([sent, landed])
    pair.assert_landed()
    assert not refusals(pair)
    for mover in pair.bench.movers:
        assert MessageAuth(Keys(new), "new").verify_card(mover.card) == mover._connections.card
        with pytest.raises(PeerRefused):
            MessageAuth(KEYS, "old").verify_card(mover.card)


@pytest.mark.parametrize(("before", "after"), [(KEYS, None), (None, KEYS)])
def test_sealing_neither_begins_nor_ends_under_traffic(before: Keys | None, after: Keys | None):
    pair = Pair.of(config=replace(CONFIG, keys=before))
    with pytest.raises(LayoutError, match="from its beginning to its end, or never"):
        pair.src.movers[0].configure(replace(CONFIG, keys=after))
    move(pair)


class NixlBench(Bench):
    """Movers over agents of NIXL, all in this process."""

    def transport(self, name: str) -> Transport:
        return NixlTransport(name)


@pytest.mark.skipif(not any(map(find_spec, ("nixl_cu13", "nixl_cu12"))), reason="no NIXL wheel is installed")
def test_seals_open_under_the_names_that_nixl_gives_its_agents():
    bench = NixlBench((Component("attention", 2, 2, 2, 64, "bfloat16"),), SEALED)
    try:
        source, target = bench.engine("prefill", Fleet(page_tokens=4)), bench.engine("decode", Fleet(page_tokens=4))
        target.connect(source)
        move(pair := Pair.request(bench, source, target, 100))
        assert not refusals(pair)
    finally:
        for mover in bench.movers:
            mover.close()
