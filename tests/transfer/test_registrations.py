"""Slabs: what a lost peer may write is registered anew, so its regions are free at once and its writes go nowhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mover_fleets import CONFIG, POISON, Bench, HandClock, Pair
from mover_network import FaultyNetwork

from kvmover.errors import LayoutError, TransportUnavailable
from kvmover.layout import Fleet
from kvmover.plan.cost import Costs, Route
from kvmover.transfer.config import Backoff, MoverConfig
from kvmover.transfer.memory.arena import ALIGN_BYTES, Arena, Renewal, renewal, slab_bytes
from kvmover.transfer.meter import Count
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol import wire
from kvmover.transfer.result import Cause, Transfer
from kvmover.transport import Memory, Revocation

PROVEN, UNPROVEN = Revocation.PROVEN, Revocation.UNPROVEN
#: Of every request of a hundred tokens, from one source: 25 chunks of 4 KiB. An arena of 16 chunks, in 8 slabs of 2.
CHUNK_BYTES = 4096
SLAB_BYTES = 2 * CHUNK_BYTES
ROOMY = replace(
    CONFIG,
    route=Route.PACKED,
    arena_bytes=16 * CHUNK_BYTES,
    costs=replace(CONFIG.costs, chunk_bytes=CHUNK_BYTES),
    backoff=Backoff(jitter=0, attempts=5),
)


class Trouble:
    """A decode rank, and two prefills of which one is cut off with its writes under way.

    `late`: what those writes carry, as none of them may show.
    """

    def __init__(self, config: MoverConfig = ROOMY) -> None:
        self.network, self.clock = FaultyNetwork(), HandClock()
        self.pair = Pair.of(config=config, clock=self.clock, network=self.network)
        self.bench: Bench = self.pair.bench
        other = self.bench.engine("other", Fleet(page_tokens=4))
        self.pair.dst.connect(other)
        self.bench.turn()
        self.healthy = Pair.request(self.bench, other, self.pair.dst, 100, seed=7)
        self.healthy.dst_tables = [[table - 1 for table in rank] for rank in self.pair.dst_tables]  # which are odd
        self.healthy.before = self.pair.dst.snapshot()

    @property
    def source(self) -> Mover:
        return self.pair.src.movers[0]

    @property
    def target(self) -> Mover:
        return self.pair.dst.movers[0]

    @property
    def arena(self) -> Arena:
        return self.target._core.incoming.arena

    @property
    def renewed(self) -> int:
        return self.target.meter.counts[Count.RENEWED_SLABS]

    def cut(self) -> Transfer:
        """The first source is lost with half of the arena granted to it and its writes in the air."""
        _, (landed,) = self.pair.send("lost"), self.pair.receive("lost")
        self.network.hold()
        self.bench.turn(4)
        self.network.cut(self.source._transport.name)
        return landed

    def pass_time(self, seconds: float, step_s: float = 0.25) -> None:
        for _ in range(round(seconds / step_s)):
            self.clock.now += step_s
            self.bench.turn(2)


def incoming(mover: Mover) -> bytes:
    return mover._core.incoming.tensor.numpy().tobytes()


def ends_well(transfers: list[Transfer]) -> bool:
    return [transfer.result is not None and transfer.result.landed for transfer in transfers] == [True] * len(transfers)


def test_what_a_dead_peer_may_write_is_free_at_once_and_its_late_writes_change_nothing():
    trouble = Trouble()
    landed = trouble.cut()
    held = trouble.arena.reserved_bytes
    assert held == 8 * CHUNK_BYTES  # its share
    trouble.pass_time(1.0)
    assert landed.result is not None
    assert landed.result.cause is Cause.PEER_LOST
    assert not landed.quarantined
    assert trouble.clock.now < 1000 + ROOMY.lease_s, "no lease is over"
    assert trouble.arena.reserved_bytes == 0
    assert trouble.renewed == held // SLAB_BYTES
    trouble.target._core.incoming.tensor.fill_(POISON)
    before = incoming(trouble.target)
    trouble.network.deliver()
    trouble.bench.turn()
    assert incoming(trouble.target) == before == bytes([POISON]) * len(before)
    trouble.pair.dst.assert_holds(trouble.pair.before)


def test_what_nobody_proves_is_kept_until_the_lease_has_been_over_long_enough():
    trouble = Trouble(replace(ROOMY, revocation=UNPROVEN))
    trouble.cut()
    trouble.pass_time(1.0)
    assert trouble.arena.slabs == 1
    assert (trouble.arena.quarantined_bytes, trouble.renewed) == (8 * CHUNK_BYTES, 0)


def test_the_next_source_writes_where_the_dead_one_might_have():
    trouble = Trouble()
    trouble.cut()
    trouble.pass_time(1.0)
    assert trouble.arena.reserved_bytes == 0
    trouble.network._held = None  # and what the dead one had posted never comes
    transfers = [*trouble.healthy.send("next"), *trouble.healthy.receive("next")]
    trouble.bench.ended(transfers)
    assert ends_well(transfers)
    trouble.healthy.assert_landed()
    source = trouble.healthy.src.movers[0]
    assert source._writes.registrations.known(trouble.target._transport.name) == trouble.arena.registration > 0


def test_the_dead_ones_writes_land_late_among_those_of_the_next_and_spoil_none():
    trouble = Trouble()
    trouble.cut()
    trouble.pass_time(1.0)
    transfers = [*trouble.healthy.send("next"), *trouble.healthy.receive("next")]
    trouble.bench.turn(4)
    assert trouble.arena.reserved_bytes  # its writes are under way, behind those of the dead one
    trouble.network.deliver()
    trouble.bench.ended(transfers)
    assert ends_well(transfers)
    trouble.healthy.assert_landed()
    trouble.bench.movers.remove(trouble.source)
    assert trouble.arena.reserved_bytes == 0


def test_a_peer_that_is_only_slow_is_waited_for_though_its_attempt_has_failed():
    """To shut it out would make a write of it fail, and with that what else it writes."""
    trouble = Trouble()
    (landed,), _ = trouble.pair.receive("slow"), trouble.pair.send("slow")
    trouble.network.hold()
    trouble.bench.turn(4)
    trouble.target.abort(landed, "enough")
    trouble.pass_time(2 * ROOMY.drain_s)
    assert landed.ended
    assert trouble.target._core.peers.get(trouble.source._transport.name) is not None
    assert (trouble.arena.quarantined_bytes, trouble.renewed) == (8 * CHUNK_BYTES, 0)
    trouble.network.deliver()
    trouble.pass_time(2.0)
    assert (trouble.arena.reserved_bytes, trouble.renewed) == (0, 0)


def test_a_healthy_peer_in_the_same_slab_is_waited_for_and_not_disturbed():
    trouble = Trouble()
    arena, other = trouble.arena, trouble.healthy.src.movers[0]._transport.name
    assert arena.reserve(SLAB_BYTES, "somebody") == 0  # which leaves an odd number of chunks for the next
    sent, landing = trouble.healthy.send("healthy"), trouble.healthy.receive("healthy")
    trouble.network.hold()
    trouble.bench.turn(4)
    trouble.cut()
    arena.release(0)
    slabs = {owner: {arena.slab_of(at) for at, of in arena._owners.items() if of == owner} for owner in arena._owned}
    shared = slabs.pop(other).intersection(*slabs.values())
    assert shared
    trouble.pass_time(1.0)
    assert {arena.slab_of(offset) for offset in arena._quarantined} == shared == arena.shut, "the others are renewed"
    assert {of for at, of in arena._owners.items() if at not in arena._quarantined} == {other}
    trouble.network.deliver()
    trouble.bench.ended([*sent, *landing])
    assert ends_well([*sent, *landing])
    trouble.healthy.assert_landed()
    assert trouble.arena.reserved_bytes == 0


@pytest.mark.parametrize("lost", [1, 2])
def test_news_of_a_registration_that_is_lost_comes_again_with_the_grant(lost: int):
    trouble = Trouble()
    trouble.cut()
    trouble.pass_time(1.0)
    trouble.network._held = None
    news = list[wire.Registered]()

    def copies(_: str, __: str, message: wire.AnyMessage) -> int:
        if isinstance(message, wire.Registered):
            news.append(message)
            return int(len(news) > lost)
        return 1

    trouble.network.copies = copies
    transfers = [*trouble.healthy.send("next"), *trouble.healthy.receive("next")]
    trouble.bench.turn(40)
    trouble.pass_time(2.0)
    assert ends_well(transfers)
    trouble.healthy.assert_landed()
    assert len(news) == lost + 1, "who knows is not told again"


def test_a_peer_that_connects_by_a_card_from_before_learns_of_it_too():
    trouble = Trouble()
    card = trouble.target.card
    trouble.cut()
    trouble.pass_time(1.0)
    trouble.network._held = None
    assert trouble.target.card != card
    late = trouble.bench.engine("late", Fleet(page_tokens=4))
    late.movers[0].connect(card)
    trouble.bench.turn()
    pair = Pair.request(trouble.bench, late, trouble.pair.dst, 100, seed=3)
    transfers = [*pair.send("late"), *pair.receive("late")]
    trouble.bench.ended(transfers)
    assert ends_well(transfers)
    pair.assert_landed()


def test_a_peer_that_is_back_writes_again_and_is_told_the_new_keys():
    trouble = Trouble()
    trouble.cut()
    trouble.pass_time(1.0)
    trouble.network.deliver()
    trouble.network.heal(trouble.source._transport.name)
    trouble.pass_time(10.0)
    again = Pair.request(trouble.bench, trouble.pair.src, trouble.pair.dst, 100, seed=5)
    transfers = [*again.send("again"), *again.receive("again")]
    trouble.pass_time(2.0)
    trouble.bench.ended(transfers)
    assert ends_well(transfers)
    again.assert_landed()
    trouble.bench.assert_nothing_is_left()


def test_registrations_that_are_of_somebody_else_or_nonsense_are_dropped():
    trouble = Trouble()
    source, target = trouble.source, trouble.target._transport.name
    for metadata in (b"", b"nonsense", trouble.healthy.src.movers[0]._transport.metadata()):
        trouble.target._core.say(source._transport.name, wire.Registered(metadata, 1))
    trouble.bench.turn()
    assert source.meter.counts[Count.MALFORMED_MESSAGES] == 3
    assert source._writes.registrations.known(target) == 0
    transfers = [*trouble.pair.send(), *trouble.pair.receive()]
    trouble.bench.ended(transfers)
    assert ends_well(transfers)
    trouble.pair.assert_landed()


def test_of_two_registrations_the_newer_is_loaded_in_whichever_order_they_are_heard(monkeypatch: pytest.MonkeyPatch):
    trouble = Trouble()
    registrations, target = trouble.source._writes.registrations, trouble.target._transport.name
    metadata, wire_, loaded = trouble.target._transport.metadata(), trouble.source._transport, list[bytes]()
    honest = wire_.connect

    def connect(given: bytes) -> str:
        loaded.append(given)
        return honest(given)

    monkeypatch.setattr(wire_, "connect", connect)
    for heard, known, loads in ((2, 2, 1), (1, 2, 1), (2, 2, 1), (3, 3, 2)):
        registrations.heard(target, wire.Registered(metadata, heard))
        assert (registrations.known(target), len(loaded)) == (known, loads)
    trouble.source._writes.lost(target)
    assert (registrations.known(target), registrations.known("nobody")) == (0, 0)


def test_of_registrations_that_wait_for_operations_under_way_the_newest_is_loaded(monkeypatch: pytest.MonkeyPatch):
    trouble = Trouble()
    registrations, target = trouble.source._writes.registrations, trouble.target._transport.name
    metadata, wire_ = trouble.target._transport.metadata(), trouble.source._transport
    honest = wire_.connect

    def connect(_: bytes) -> str:
        raise TransportUnavailable("operations under way use the old keys")

    monkeypatch.setattr(wire_, "connect", connect)
    for number in (4, 6, 5):
        registrations.heard(target, wire.Registered(metadata, number))
    registrations.poll()
    assert (registrations.known(target), registrations.waits(target)) == (0, True)
    monkeypatch.setattr(wire_, "connect", honest)
    registrations.poll()
    assert (registrations.known(target), registrations.waits(target)) == (6, False)
    monkeypatch.setattr(wire_, "connect", connect)
    registrations.heard(target, wire.Registered(metadata, 7))
    registrations.lost(target)
    assert (registrations.known(target), registrations.waits(target)) == (0, False)


def test_a_peer_that_connects_by_a_card_from_afterwards_knows_its_registration():
    trouble = Trouble()
    trouble.cut()
    trouble.pass_time(1.0)
    late = trouble.bench.engine("late", Fleet(page_tokens=4)).movers[0]
    late.connect(trouble.target.card)
    known = late._writes.registrations.known(trouble.target._transport.name)
    assert known == trouble.arena.registration > 0


def test_a_slab_that_was_shut_is_open_once_no_memory_is_quarantined():
    trouble = Trouble()
    trouble.arena.shut = frozenset({3})
    card = trouble.target._core.card
    assert trouble.target._destination.renewals.renew() == []
    assert not trouble.arena.shut
    assert trouble.target._core.card is card, "nothing was registered anew"


def test_a_grant_without_a_region_needs_no_keys():
    renewals = Trouble().target._destination.renewals
    assert renewals.granted("a stranger", wire.Granted("request", 1, ())).registration == 0
    assert "a stranger" not in renewals._known


def test_what_a_lost_source_knew_is_forgotten():
    trouble = Trouble()
    known, source = trouble.target._destination.renewals._known, trouble.source._transport.name
    trouble.cut()
    assert source in known
    trouble.pass_time(1.0)
    assert source not in known


def test_a_slab_that_cannot_be_registered_again_is_used_no_more_and_the_others_are(monkeypatch: pytest.MonkeyPatch):
    trouble = Trouble()
    trouble.cut()
    memory, honest = trouble.target._core.incoming.slab(1), trouble.target._transport.register

    def register(given: Memory) -> None:
        if given == memory:
            raise TransportUnavailable("no memory can be pinned")
        honest(given)

    monkeypatch.setattr(trouble.target._transport, "register", register)
    trouble.pass_time(1.0)
    assert trouble.arena.reserved_bytes == 0
    assert trouble.arena.shut == {1}
    trouble.network._held = None
    trouble.target._core.incoming.tensor.fill_(POISON)
    transfers = [*trouble.healthy.send("next"), *trouble.healthy.receive("next")]
    trouble.bench.ended(transfers)
    assert ends_well(transfers)
    trouble.healthy.assert_landed()
    slabs = np.frombuffer(incoming(trouble.target), np.uint8).reshape(8, SLAB_BYTES)
    assert [bool((slab == POISON).all()) for slab in slabs[:3]] == [False, True, False]


def test_who_is_told_to_trust_the_transport_no_more_shuts_no_slab():
    trouble = Trouble()
    trouble.arena.shut = frozenset({3})
    trouble.target.configure(replace(ROOMY, revocation=UNPROVEN))
    trouble.cut()
    trouble.pass_time(1.0)
    assert not trouble.arena.shut
    assert trouble.arena.quarantined_bytes
    assert not trouble.renewed


# Integers.


def test_an_arena_has_eight_slabs_or_as_many_as_hold_a_chunk():
    mib = 1 << 20
    defaults = MoverConfig()
    assert slab_bytes(defaults.arena_bytes, defaults.costs.chunk_bytes, PROVEN) == 8 * mib
    assert defaults.arena_bytes // slab_bytes(defaults.arena_bytes, defaults.costs.chunk_bytes, PROVEN) == 8
    assert slab_bytes(64 * mib, 32 * mib, PROVEN) == 32 * mib
    assert slab_bytes(64 * mib, 64 * mib, PROVEN) == slab_bytes(64 * mib, 65 * mib, PROVEN) == 64 * mib
    assert slab_bytes(1024 * mib, 8 * mib, PROVEN) == 128 * mib
    assert slab_bytes(64 * mib, 8 * mib, UNPROVEN) == 64 * mib
    assert slab_bytes(1001, 600, PROVEN) == 1001, "one slab is the arena, to its last byte"
    assert slab_bytes(1001, 100, PROVEN) == 1001 // 3 // ALIGN_BYTES * ALIGN_BYTES


@pytest.mark.parametrize("arena_bytes", [256, 700, 2048, 5000])
@pytest.mark.parametrize("chunk_bytes", [1, 256, 300, 1000])
def test_a_slab_holds_a_chunk_wherever_the_arena_does(arena_bytes: int, chunk_bytes: int):
    nbytes = slab_bytes(arena_bytes, chunk_bytes, PROVEN)
    arena = Arena(arena_bytes, nbytes)
    assert arena.fits(chunk_bytes) == Arena(arena_bytes).fits(chunk_bytes)
    assert 1 <= arena.slabs <= 9, "eight, and one of what rounding left"


def test_no_region_straddles_two_slabs_and_none_is_larger_than_one():
    arena = Arena(4 * 1024, 1024)
    assert [arena.reserve(768) for _ in range(5)] == [0, 1024, 2048, 3072, None]
    assert [arena.reserve(256) for _ in range(5)] == [768, 1792, 2816, 3840, None]
    arena.check()
    for offset, _ in list(arena.reserved()):
        arena.release(offset)
    arena.check()
    assert not arena.fits(1025)
    with pytest.raises(LayoutError, match="1025 bytes does not fit a slab of 1024"):
        arena.reserve(1025)


def test_a_slab_is_renewed_when_nobody_but_the_lost_has_a_region_of_it():
    arena = Arena(4 * 1024, 1024)
    regions = [arena.reserve(512) for _ in range(8)]
    assert regions == [*range(0, 4096, 512)]
    assert renewal(arena, frozenset()) == Renewal()
    assert renewal(arena, {0, 512}) == Renewal((0,))
    assert renewal(arena, {0, 1024, 1536}) == Renewal((1,), 0)
    arena.release(3072)
    assert renewal(arena, {0, 2048, 3584}) == Renewal((3,), 0)
    small = Arena(1024)
    assert (small.reserve(256), small.reserve(256)) == (0, 256)
    assert renewal(small, {0}) == Renewal(), "others must go on"


def test_of_slabs_that_others_use_the_one_with_the_least_to_wait_for_is_shut():
    arena = Arena(2 * 1024, 1024)
    assert [arena.reserve(nbytes) for nbytes in (256, 512, 256, 256, 256)] == [0, 256, 768, 1024, 1280]
    found = renewal(arena, {0, 1024})
    assert found == Renewal((), 1)
    arena.shut = frozenset({1})
    arena.release(1280)
    assert arena.reserve(256) is None
    arena.shut = frozenset()
    assert arena.reserve(256) == 1280


def test_a_slab_is_never_renewed_under_a_region_that_is_in_use():
    arena = Arena(2 * 1024, 1024)
    assert (arena.reserve(256), arena.reserve(256)) == (0, 256)
    arena.quarantine(0)
    with pytest.raises(LayoutError, match=r"slab 0 is renewed under the regions at \[256\]"):
        arena.renew(0)
    arena.quarantine(256)
    assert arena.renew(0) == [0, 256]
    assert (arena.registration, arena.registration_of(0), arena.registration_of(1024)) == (1, 1, 0)
    assert (arena.reserved_bytes, arena.quarantined_bytes) == (0, 0)
    arena.check()


def test_costs_of_another_size_of_chunk_change_the_number_of_slabs():
    config = MoverConfig(arena_bytes=1 << 20, costs=Costs(1.0, 1e3, 1e3, 1e3, 10.0, chunk_bytes=1 << 18))
    pair = Pair.of(config=replace(CONFIG, arena_bytes=config.arena_bytes, costs=config.costs))
    assert pair.dst.movers[0]._core.incoming.arena.slabs == 4
    assert pair.dst.movers[0]._core.outgoing.arena.slabs == 1, "to read late harms nobody"
