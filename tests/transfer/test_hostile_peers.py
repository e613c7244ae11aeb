"""Peers that hold the right model and mean harm: nothing they say raises, fills memory, or costs others a request."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np
import pytest
from mover_fleets import CONFIG, Bench, HandClock, Pair

from kvmover.errors import PeerRefused, PlanError, RefusedFor
from kvmover.layout import Fleet, Layout, Pool, PoolSpec
from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.transfer import tombstones
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.handshake import Card, Place, Rank, read_card
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.result import Cause
from kvmover.transport import Memory, MemoryKind, NixlTransport, Transport
from kvmover.transport.envelope import seal, unseal

FLEET = Fleet(page_tokens=4)
WANT = wire.Want("request", 1, 0, 100, Route.PACKED, Replicas.STRIPE, 4096)


def card_of(mover: Mover, **changes: Any) -> bytes:
    """Its card, with other values of the body."""
    envelope = msgspec.msgpack.decode(mover._connections.card, type=Card)
    rank = msgspec.msgpack.decode(envelope.body, type=Rank)
    body = msgspec.msgpack.encode(msgspec.structs.replace(rank, **changes))
    return msgspec.msgpack.encode(Card(envelope.speaks, envelope.fields, envelope.model, body))


def host(address: int, nbytes: int, device: int = 0) -> Memory:
    return Memory(MemoryKind.HOST, address, nbytes, device)


def beyond(mover: Mover) -> dict[str, dict[str, Any]]:
    """Cards whose numbers are not of this world, by what is wrong with them."""
    card = mover._core.card
    (own,), (spec,) = card.allocations[0], card.pools
    return {
        "arena address": {"arena": host(1 << 63, 1 << 40)},
        "arena end": {"arena": host((1 << 63) - 10, 11)},
        "staging": {"staging": host(1 << 63, 4096)},
        "sandbox": {"sandbox": host(0, 1 << 63)},
        "device": {"arena": host(4096, 4096, -1)},
        "allocation": {"allocations": ((host((1 << 63) + 8, own.nbytes),),)},
        "negative": {"allocations": ((host(-5, own.nbytes),),)},
        "length": {"allocations": ((host(4096, (1 << 64) - 1),),)},
        "stride": {
            "pools": (PoolSpec(spec.component, _stride(spec.layout, "page", 1 << 61)),),
            "allocations": ((host(0, (1 << 63) - 1),),),
        },
        "host": {"host": "h" * 300},
        "many pools": {"pools": (spec,) * 300},
    }


def _stride(layout: Layout, axis: str, stride: int) -> Layout:
    return Layout(
        layout.axes,
        layout.shape,
        tuple(stride if a == axis else s for a, s in zip(layout.axes, layout.stride, strict=True)),
    )


@pytest.mark.parametrize("what", list(beyond(Pair.of().dst.movers[0])))
def test_a_card_with_numbers_beyond_64_bits_or_too_many_is_refused(what: str):
    pair = Pair.of()
    stranger = pair.dst.movers[0]
    with pytest.raises(PeerRefused):
        read_card(stranger._model, card_of(stranger, **beyond(stranger)[what]))


@pytest.mark.parametrize(("tp", "pp", "rank"), [(65536, 2, 5), (1 << 40, 1, 5)])
def test_a_fleet_of_more_ranks_than_there_are_is_refused(tp: int, pp: int, rank: int):
    mover = Pair.of().dst.movers[0]
    fleet = msgspec.to_builtins(FLEET) | {"tp": tp, "pp": pp}
    envelope = msgspec.msgpack.decode(mover._connections.card, type=Card)
    body = msgspec.msgpack.decode(envelope.body)
    body["place"] = {**body["place"], "fleet": fleet, "rank": rank}
    with pytest.raises(PeerRefused, match="at most 65536"):
        read_card(
            mover._model,
            msgspec.msgpack.encode(
                Card(envelope.speaks, envelope.fields, envelope.model, msgspec.msgpack.encode(body))
            ),
        )


def hostile(pair: Pair, name: str = "hostile") -> tuple[Mover, Callable[[wire.AnyMessage], None]]:
    """A connected decode rank that says what it likes and hears nothing."""
    source = pair.src.movers[0]
    mover = pair.bench.mover(Place(name, FLEET, 0), [Pool.zeros(pair.dst.pools[0][0].spec)])
    mover.connect(source.card)
    pair.bench.turn()
    pair.bench.movers.remove(mover)

    def say(message: wire.AnyMessage) -> None:
        mover._transport.notify(source._transport.name, wire.encode(message))

    return mover, say


def lands(pair: Pair, name: str = "afterwards") -> None:
    transfers = [*pair.send(name), *pair.receive(name)]
    pair.bench.ended(transfers)
    assert [transfer.landed().reason for transfer in transfers] == [None] * 2
    pair.assert_landed()


def test_a_card_that_computes_to_nowhere_costs_nobody_a_request_or_a_region():
    """Its arena lies at 2**63: each write to it would raise out of every poll, and keep a staging region for ever."""
    pair = Pair.of()
    source = pair.src.movers[0]
    stranger = pair.bench.mover(Place("stranger", FLEET, 0), [Pool.zeros(pair.dst.pools[0][0].spec)])
    pair.bench.movers.remove(stranger)
    stranger._transport.connect(source._core.card.transport)
    speak = stranger._transport.notify
    name = source._transport.name
    speak(name, wire.encode(wire.Hello(card_of(stranger, arena=host(1 << 63, 1 << 40)))))
    speak(name, wire.encode(WANT))
    speak(name, wire.encode(wire.Granted("request", 1, (wire.Grant(0, 0),))))
    pair.bench.turn()
    assert source.meter.refused.total() == 1
    lands(pair, "request")
    pair.bench.assert_nothing_is_left()


Flood = Callable[[int], Iterator[wire.AnyMessage]]


def aborts(number: int) -> Iterator[wire.AnyMessage]:
    yield wire.Abort(f"{number}" + "x" * 240, 1, "y" * 1024)


def wants(number: int) -> Iterator[wire.AnyMessage]:
    yield msgspec.structs.replace(WANT, request=f"{number}" + "x" * 240)


def tables(number: int) -> Iterator[wire.AnyMessage]:
    yield msgspec.structs.replace(WANT, request=f"{number}", pages=(bytes(500_000),))


def payloads(number: int) -> Iterator[wire.AnyMessage]:
    yield msgspec.structs.replace(WANT, request=f"{number}", aux=tuple(range(60_000)))


def followed(number: int) -> Iterator[wire.AnyMessage]:
    yield msgspec.structs.replace(WANT, request=f"{number}")
    yield from (wire.Granted(f"{number}", 1, (wire.Grant(1, 300, 300),) * 4096),) * 20


@pytest.mark.parametrize(
    ("flood", "count"), [(aborts, 2000), (wants, 4000), (tables, 12), (payloads, 8), (followed, 4)]
)
def test_what_a_peer_says_fills_its_budget_and_no_more(flood: Flood, count: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tombstones, "PEER_BYTES", 1 << 20)
    pair = Pair.of(clock=HandClock())
    mover, say = hostile(pair)
    source = pair.src.movers[0]
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(count):
            for message in flood(number):
                say(message)
                del message
            source.poll()
            mover._transport.poll()
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    counted = source._source.early.budget
    filled = max(counted.kept_bytes(name) for name in source._core.peers._by_name)
    least = {payloads: 0, aborts: 1 << 18}.get(flood, 1 << 19)  # the past fills half of it
    assert least <= filled <= 1 << 20
    assert (source.meter.refused[RefusedFor.CAPACITY] > 0) == (flood in (wants, tables))
    assert kept < 1.5 * (1 << 20), f"{kept >> 10} KiB are kept of {filled >> 10} counted"
    lands(pair)


def test_one_message_is_answered_once_for_each_chunk_that_it_names():
    pair = Pair.of()
    (sent,) = pair.send("request")
    _, say = hostile(pair)
    source = pair.src.movers[0]
    lease = wire.WriteLease(1, 1 << 60, 0)
    say(WANT)
    for chunk in range(4):
        say(wire.Granted("request", 1, (wire.Grant(chunk, 4096 * chunk),), lease))
    for _ in range(20):
        source.poll()
    before = source.meter.counts[Count.MESSAGES]
    say(wire.Granted("request", 1, tuple(wire.Grant(n % 4, 4096 * (n % 4)) for n in range(wire.MAX_GRANTS)), lease))
    source.poll()
    assert source.meter.counts[Count.MESSAGES] - before == 4
    assert not sent.ended


def test_a_message_of_more_grants_than_there_may_be_is_dropped():
    pair = Pair.of()
    pair.send("request")
    _, say = hostile(pair)
    source = pair.src.movers[0]
    say(WANT)
    source.poll()
    before = source.meter.counts[Count.MESSAGES], source.meter.counts[Count.MALFORMED_MESSAGES]
    say(wire.Granted("request", 1, (wire.Grant(0, 0),) * 200_000))
    source.poll()
    after = source.meter.counts[Count.MESSAGES], source.meter.counts[Count.MALFORMED_MESSAGES]
    assert after == (before[0], before[1] + 1)


def test_nobody_derives_more_chunks_than_there_may_be_because_a_peer_asks_for_them():
    pair = Pair.of(clock=HandClock())
    network: list[wire.AnyMessage] = []
    bench = pair.bench
    spec = PoolSpec.dense(bench.components[0], Fleet(page_tokens=1).shard(bench.components[0], 0, 1), 20_000, 1, "NHD")
    source = bench.mover(Place("long", Fleet(page_tokens=1), 0), [Pool.zeros(spec)])
    target = bench.mover(
        Place("asks", Fleet(page_tokens=1), 0),
        [Pool.zeros(spec)],
        replace(CONFIG, costs=replace(CONFIG.costs, chunk_bytes=1)),
    )
    target.connect(source.card)
    bench.turn()
    source.send("request", [range(20_000)])
    with pytest.raises(PlanError, match="more than 16384 chunks of 1 bytes"):
        target.receive("request", "long", range(20_000), [range(20_000)])
    bench.movers.remove(target)
    want = msgspec.structs.replace(WANT, stop=20_000, chunk_bytes=1)
    target._transport.notify(source._transport.name, wire.encode(want))
    bench.turn()
    network += [wire.decode(event.payload) for event in target._transport.poll()]
    (answer,) = [message for message in network if isinstance(message, wire.Abort)]
    assert "more than 16384 chunks" in answer.reason


@pytest.mark.parametrize("page", [-1, 1 << 20, (1 << 31) - 1])
@pytest.mark.parametrize("named", [0, 2], ids=["at once", "later"])
def test_a_page_that_the_asker_does_not_have_is_refused_before_anything_is_written(page: int, named: int):
    """It is the asker's error, not a fault of the source; also of a page that a second Want names."""
    pair = Pair.of()
    pair.send("request")
    mover, say = hostile(pair)
    source = pair.src.movers[0]
    table = np.array([*range(named), page], np.int64)
    want = msgspec.structs.replace(WANT, route=Route.DIRECT, pages=wire.encoded([table[:named]]))
    if named:
        say(want)
        pair.bench.turn()
    say(msgspec.structs.replace(want, pages=wire.encoded([table])))
    pair.bench.turn()
    answers = [wire.decode(said) for event in mover._transport.poll() for said in wire.split(event.payload)]
    (answer,) = {message.reason for message in answers if isinstance(message, wire.Abort)}
    assert f"page id {page} is outside a pool of" in answer
    assert "fault" not in answer
    assert source.meter.counts[Count.FAULTS] == 0


def test_payloads_of_more_ranks_than_there_are_are_not_asked_for():
    pair = Pair.of()
    mover, say = hostile(pair)
    say(msgspec.structs.replace(WANT, aux=(0, 1)))
    pair.bench.turn()
    answers = [wire.decode(event.payload) for event in mover._transport.poll()]
    (answer,) = [message for message in answers if isinstance(message, wire.Abort)]
    assert "payloads of 2 ranks of a fleet of 1" in answer.reason


@pytest.mark.parametrize("name", ["r" * 257, "lone \ud800 surrogate"])
def test_a_name_that_no_message_may_carry_is_refused_at_the_call(name: str):
    pair = Pair.of()
    source, target = pair.src.movers[0], pair.dst.movers[0]
    calls: list[Callable[[], object]] = [
        lambda: source.send(name, pair.src_tables[0]),
        lambda: target.receive(name, "prefill", range(100), pair.dst_tables[0]),
        lambda: source.refuse(name, "no"),
        lambda: source.reopen(name),
    ]
    for call in calls:
        with pytest.raises(PlanError, match="request's name"):
            call()
    lands(pair, "r" * 256)


def test_a_reason_of_any_length_reaches_the_other_side_in_full_or_cut():
    pair = Pair.of()
    (landed,) = pair.receive("request")
    pair.src.movers[0].refuse("request", "because " * 1000)
    pair.bench.ended([landed])
    assert landed.result is not None
    assert landed.result.reason is not None
    assert landed.result.reason.startswith("because because")
    assert len(landed.result.reason) == wire.MAX_REASON_CHARACTERS


# What goes wrong inside one attempt is its own affair.


class Planted(Exception):
    """Not one that anybody expects."""


def fails_once(honest: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter(range(1 << 30))

    def call(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 0:
            raise Planted("of nobody's making")
        return honest(*arguments, **named)

    return call


def plant(pair: Pair, what: str, patch: pytest.MonkeyPatch) -> None:
    source, target = pair.src.movers[0], pair.dst.movers[0]
    match what:
        case "gather":
            patch.setattr(source._core, "copier", _copier(source))
        case "scatter":
            patch.setattr(target._core, "copier", _copier(target))
        case "post":
            name = "_packed" if source.config.route is Route.PACKED else "_direct"
            patch.setattr(type(source._writes), name, fails_once(getattr(type(source._writes), name)))
        case "source's step":
            from kvmover.transfer.source import source_machine

            patch.setattr(source_machine, "_heard", fails_once(source_machine._heard))
        case "destination's step":
            from kvmover.transfer.destination import destination_machine

            patch.setattr(destination_machine, "_told", fails_once(destination_machine._told))
        case "read":
            name = "packed" if target.config.route is Route.PACKED else "direct"
            patch.setattr(type(target._reads), name, fails_once(getattr(type(target._reads), name)))
        case _:
            raise AssertionError(what)


def _copier(mover: Mover) -> Any:
    copier = mover._core.copier

    class Copier(type(copier)):
        run = fails_once(type(copier).run)

    return Copier(copier.device, copier.sms)


PLANTED = [
    (what, verb, route)
    for what in ("gather", "scatter", "post", "source's step", "destination's step", "read")
    for verb in Verb
    for route in Route
    if not (what in ("gather", "scatter") and route is not Route.PACKED)
    if not (what in ("post", "read") and route is Route.MAPPED)
    if not (what == "post" and verb is Verb.PULL)
    if not (what == "read" and verb is Verb.PUSH)
]


@pytest.mark.parametrize(("what", "verb", "route"), PLANTED, ids=lambda each: str(each))
def test_an_exception_inside_one_attempt_fails_that_attempt_and_leaves_nothing_behind(
    what: str, verb: Verb, route: Route, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    clock = HandClock()
    pair = Pair.of(config=replace(CONFIG, verb=verb, route=route), clock=clock)
    plant(pair, what, monkeypatch)
    sent, landed = pair.send("request")[0], pair.receive("request")[0]
    for _ in range(40):
        pair.bench.turn(4)
        clock.now += 0.25
    assert sent.result is not None
    assert landed.result is not None
    causes = {sent.result.cause, landed.result.cause}
    assert Cause.FAULT in causes
    assert "Planted: of nobody's making" in str(landed.result.reason or sent.result.reason)
    assert sum(mover.meter.counts[Count.FAULTS] for mover in pair.bench.movers) == 1
    assert "Traceback" in caplog.text
    assert (sent.quarantined, landed.quarantined) == (False, False)
    pair.bench.assert_nothing_is_left()
    again = Pair.request(pair.bench, pair.src, pair.dst, 100)
    transfers = [*again.send("afterwards"), *again.receive("afterwards")]
    for _ in range(20):
        pair.bench.turn(4)
        clock.now += 0.25
    assert [transfer.landed().reason for transfer in transfers] == [None] * 2
    again.assert_landed()
    pair.bench.assert_nothing_is_left()


class NixlBench(Bench):
    """Movers over agents of NIXL, all in this process."""

    def transport(self, name: str) -> Transport:
        return NixlTransport(name)


def test_a_gate_that_cannot_be_asked_fails_its_request():
    from kvmover.transfer.result import Gate

    class Odd:
        def query(self) -> bool:
            raise Planted("no device")

    pair = Pair.of()
    odd = pair.src.movers[0].send("request", pair.src_tables[0], [Gate(Odd())])
    wanted = pair.receive("request")
    pair.bench.ended([odd, *wanted])
    lands(pair)
    assert odd.result is not None
    assert odd.result.cause is Cause.FAULT
    assert "no device" in str(odd.result.reason)
    pair.bench.assert_nothing_is_left()


def test_an_exception_while_a_want_is_answered_reaches_who_asked(monkeypatch: pytest.MonkeyPatch):
    pair = Pair.of()
    writes = pair.src.movers[0]._writes
    monkeypatch.setattr(type(writes), "check", fails_once(type(writes).check))
    pair.send("request")
    (landed,) = pair.receive("request")
    pair.bench.ended([landed])
    assert landed.result is not None
    assert landed.result.cause is Cause.PEER_ABORTED
    assert "Planted" in str(landed.result.reason)


@pytest.mark.skipif(not any(map(find_spec, ("nixl_cu13", "nixl_cu12"))), reason="no NIXL wheel is installed")
def test_metadata_of_an_agent_whose_name_is_no_text_is_refused_and_unloaded():
    bench = NixlBench(Pair.of().bench.components, CONFIG)
    try:
        source, other = bench.engine("prefill", FLEET).movers[0], bench.engine("stranger", FLEET).movers[0]
        card = unseal(other._core.card.transport, "nixl")
        name = card.name.encode()
        odd = msgspec.structs.replace(card, agent=card.agent.replace(name, b"\xff" + name[1:]))
        with pytest.raises(PeerRefused, match="holds the agent"):
            source.connect(card_of(other, transport=seal(odd)))
        assert source.connect(other.card) == other._transport.name
    finally:
        for mover in bench.movers:
            mover.close()
