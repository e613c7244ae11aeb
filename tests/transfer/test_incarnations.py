"""One process after the other stands in a place: a newer one takes it over, and no older one takes it back."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from mover_fleets import CONFIG, Bench, HandClock, Pair
from mover_network import FaultyNetwork

from kvmover.errors import PeerRefused, PeerReplaced, PeerUnknown
from kvmover.layout import Fleet, Pool
from kvmover.transfer.config import Backoff
from kvmover.transfer.meter import Gauge
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.auth import Key, Keys
from kvmover.transfer.protocol.handshake import Card, Place, Rank
from kvmover.transfer.result import Transfer
from kvmover.transport import LoopbackTransport

FLEET = Fleet(page_tokens=4)


def name(mover: Mover) -> str:
    return mover._transport.name


def seated(mover: Mover, engine: str = "prefill", rank: int = 0) -> str | None:
    return mover._core.peers.seated((engine, rank))


def lands(pair: Pair, request: str) -> None:
    again = Pair.request(pair.bench, pair.src, pair.dst, 100)
    transfers = [*again.send(request), *again.receive(request)]
    pair.bench.ended(transfers)
    assert [transfer.landed().reason for transfer in transfers] == [None] * len(transfers)
    again.assert_landed()


def another(pair: Pair, place: Place) -> Mover:
    """A mover that nobody polls, at a place."""
    mover = pair.bench.mover(place, [Pool.zeros(pair.src.pools[0][0].spec)])
    pair.bench.movers.remove(mover)
    return mover


def say(pair: Pair, stranger: Mover, card: bytes) -> None:
    """A Hello with any card, to the decode rank."""
    target, transport = pair.dst.movers[0], stranger._transport
    assert isinstance(transport, LoopbackTransport)
    transport.connect(target._core.card.transport)
    transport.notify(name(target), wire.encode(wire.Hello(card)))
    pair.bench.turn()


@pytest.mark.parametrize("generation", [1, 1 << 62], ids=["older", "newer"])
def test_a_stranger_with_the_card_of_another_process_unseats_nobody(generation: int):
    """The sender is compared before anything of the card counts: also where the card alone would be welcome."""
    pair = Pair.of()
    target, (landed,) = pair.dst.movers[0], pair.receive()
    pair.bench.turn()
    other = another(pair, Place("prefill", FLEET, 0, generation))
    say(pair, another(pair, Place("stranger", FLEET, 0)), other._connections.card)
    assert target.meter.refused.total() == 1
    assert seated(target) == name(pair.src.movers[0])
    assert name(other) not in target._core.peers._by_name
    assert name(other) not in target._transport._peers  # pyright: ignore[reportAttributeAccessIssue]
    pair.bench.ended([*pair.send(), landed])
    pair.assert_landed()


def test_a_recorded_card_of_a_process_that_is_over_opens_nothing_though_it_is_sealed():
    keys = Keys(Key(b"a secret of this fleet"))
    pair = Pair.of(config=replace(CONFIG, keys=keys))
    recorded, target = pair.src.movers[0].card, pair.dst.movers[0]
    old = name(pair.src.movers[0])
    pair.src.movers[0].close()
    pair.bench.movers.remove(pair.src.movers[0])
    pair.src.movers[0] = pair.bench.mover(Place("prefill", FLEET, 0), pair.src.pools[0])
    target.connect(pair.src.movers[0].card)
    pair.bench.turn()
    (landed,) = pair.receive()
    pair.bench.turn()
    with pytest.raises(PeerReplaced, match=f"{old}.* generation .* was replaced by generation"):
        target.connect(recorded)
    assert seated(target) == name(pair.src.movers[0])
    pair.bench.ended([*pair.send(), landed])
    pair.assert_landed()


def test_an_older_card_opens_nothing_either_while_the_newer_process_is_away():
    network = FaultyNetwork()
    pair = Pair.of(network=network)
    target, older = pair.dst.movers[0], another(pair, Place("prefill", FLEET, 0, 1))
    network.cut(name(pair.src.movers[0]))
    (failed,) = pair.receive()
    pair.bench.ended([failed])
    assert seated(target) is None
    with pytest.raises(PeerReplaced):
        target.connect(older.card)
    assert seated(target) is None
    assert name(older) not in target._core.peers._by_name
    assert name(older) not in target._transport._peers, "nothing was loaded"  # pyright: ignore[reportAttributeAccessIssue]


def test_two_processes_of_one_generation_do_not_unseat_each_other():
    pair = Pair.of()
    place = Place("twin", FLEET, 0, 7)
    first, second = another(pair, place), another(pair, place)
    pair.dst.movers[0].connect(first.card)
    with pytest.raises(PeerReplaced, match="generation 7"):
        pair.dst.movers[0].connect(second.card)
    pair.dst.movers[0].connect(first.card)
    assert seated(pair.dst.movers[0], "twin") == name(first)


def test_nobody_has_two_seats():
    """What is gone would otherwise be gone from one of them only."""
    network = FaultyNetwork()
    pair = Pair.of(network=network)
    stranger, target = another(pair, Place("stranger", FLEET, 0)), pair.dst.movers[0]
    for engine in ("stranger", "prefill"):
        envelope = msgspec.msgpack.decode(stranger._connections.card, type=Card)
        rank = msgspec.msgpack.decode(envelope.body, type=Rank)
        rank = msgspec.structs.replace(rank, place=msgspec.structs.replace(rank.place, engine=engine))
        body = msgspec.msgpack.encode(rank)
        say(pair, stranger, msgspec.msgpack.encode(msgspec.structs.replace(envelope, body=body)))
    assert target.meter.refused.total() == 1
    assert seated(target) == name(pair.src.movers[0])
    network.cut(name(stranger))
    target._core.say(name(stranger), wire.Ping())
    pair.bench.turn()
    with pytest.raises(PeerUnknown, match="stranger"):
        target.receive("gone", "stranger", range(100), pair.dst_tables[0])
    lands(pair, "here")


def test_a_process_that_was_cut_off_and_replaced_never_gets_its_seat_back():
    network, clock = FaultyNetwork(), HandClock()
    config = replace(CONFIG, backoff=Backoff(jitter=0))
    pair = Pair.of(config=config, clock=clock, network=network)
    target, old = pair.dst.movers[0], pair.src.movers[0]
    held = old.send("before", pair.src_tables[0], gates=[])
    (lost,) = pair.receive("before")

    def pass_time(seconds: float) -> list[str | None]:
        seats = list[str | None]()
        for _ in range(round(seconds / 0.25)):
            clock.now += 0.25
            pair.bench.turn(2)
            seats.append(seated(target))
        return seats

    pass_time(1.0)
    network.cut(name(old))
    pass_time(15.0)
    assert lost.ended
    assert held.ended
    new = pair.src.movers[0] = pair.bench.mover(Place("prefill", FLEET, 0), pair.src.pools[0])
    target.connect(new.card)
    pass_time(2.0)
    network.heal(name(old))
    landed = list[Transfer]()
    for number in range(30):
        request = Pair.request(pair.bench, pair.src, pair.dst, 100)
        landed += [*request.send(f"r{number}"), *request.receive(f"r{number}")]
        assert set(pass_time(4.0)) == {name(new)}
        request.assert_landed()
    assert [transfer.landed().reason for transfer in landed] == [None] * 60
    assert target.meter.refused.total() > 0


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]], ids=str)
@pytest.mark.parametrize("ranks", [2, 1, 8])
def test_an_engine_that_comes_back_with_other_ranks_is_asked_by_the_ranks_it_has(order: list[int], ranks: int):
    network = FaultyNetwork()
    bench = Bench(Pair.of().bench.components, network=network)
    target, before = bench.engine("decode", FLEET), bench.engine("prefill", Fleet(tp=4, page_tokens=4))
    for rank in order:
        target.movers[0].connect(before.movers[rank].card)
    bench.turn()
    for mover in before.movers:  # nobody waits for them, so nobody notices
        network.cut(name(mover))
        bench.movers.remove(mover)
    after = bench.engine("prefill", Fleet(tp=ranks, page_tokens=4))
    for mover in after.movers:
        target.movers[0].connect(mover.card)
    bench.turn()
    assert target.movers[0].ranks("prefill") == set(range(ranks))
    lands(Pair.request(bench, after, target, 100), "here")
    with pytest.raises(PeerReplaced, match=f"the engine came back as Fleet.tp={ranks}"):
        target.movers[0].connect(before.movers[3].card)


def test_ranks_of_a_fleet_join_in_any_order_of_their_generations():
    pair = Pair.of()
    fleet, target = Fleet(tp=2, page_tokens=4), pair.dst.movers[0]
    spec = pair.bench.engine("other", fleet).pools[0][0].spec
    for rank, generation in ((1, 12), (0, 10), (1, 13)):
        mover = pair.bench.mover(Place("joined", fleet, rank, generation), [Pool.zeros(spec)])
        target.connect(mover.card)
    assert target.ranks("joined") == {0, 1}


@pytest.mark.parametrize("rank", [None, 1], ids=["engine", "rank"])
def test_who_was_disconnected_is_not_dialled_and_what_was_open_with_him_fails(rank: int | None):
    clock = HandClock()
    pair = Pair.of(Fleet(tp=2, page_tokens=4), clock=clock)
    target, (open_,) = pair.dst.movers[0], pair.receive()
    pair.bench.turn()
    target.disconnect("nobody")
    target.disconnect("prefill", rank)
    assert target.ranks("prefill") == ({0} if rank else frozenset())
    for _ in range(40):
        clock.now += 0.25
        pair.bench.turn(2)
    assert "disconnected" in str(open_.result and open_.result.reason)
    assert target.snapshot().gauges[Gauge.DIALLED_PEERS] == 0
    for mover in pair.src.movers:
        target.connect(mover.card)
    lands(pair, "again")


def test_a_mover_that_is_told_no_generation_takes_one_that_is_newer_than_those_before():
    pair = Pair.of()
    first, second = (another(pair, Place("prefill", FLEET, 0))._core.card.place.generation for _ in range(2))
    assert pair.src.movers[0]._core.card.place.generation < first < second


def test_a_card_of_the_same_process_is_welcome_again():
    pair = Pair.of()
    target, source = pair.dst.movers[0], pair.src.movers[0]
    (landed,) = pair.receive()
    assert target.connect(source.card) == name(source)
    pair.bench.ended([*pair.send(), landed])
    pair.assert_landed()


def test_a_stranger_of_another_model_is_still_refused_first():
    pair = Pair.of()
    other = pair.bench.mover(Place("prefill", FLEET, 0, 1), [Pool.zeros(pair.src.pools[0][0].spec)], model="tay")
    with pytest.raises(PeerRefused, match="peer holds tay") as refused:
        pair.dst.movers[0].connect(other.card)
    assert not isinstance(refused.value, PeerReplaced)
