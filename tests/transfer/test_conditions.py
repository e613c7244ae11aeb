"""Where memory changes hands each function has conditions that stay on; each is proved by a mutant that it catches."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kvmover.cache.tiers import allocator
from kvmover.errors import LayoutError, TierError
from kvmover.plan.cost import Route
from kvmover.transfer.destination import quarantine
from kvmover.transfer.memory import arena, registrations
from kvmover.transfer.protocol import wire
from kvmover.transfer.source import writes
from tests.mutants.code_exchange import exchanged, mutant

A, KEY = "a.1", ("a.1", "request", 1)


class Mutant(NamedTuple):
    """A fragment of a method, its replacement, and words of the condition that finds it."""

    method: str
    old: str
    new: str
    words: str


# Scenarios, in which the honest functions keep their conditions.


def regions_come_and_go() -> None:
    made = arena.Arena(2048, 1024)
    first, second, third = (made.reserve(nbytes) for nbytes in (256, 512, 512))
    assert first is not None
    assert second is not None
    assert third is not None
    for offset in (first, second, third):
        made.release(offset)
    made.check()


def a_free_region_is_quarantined() -> None:
    with pytest.raises(LayoutError, match="no region is reserved at 0"):
        arena.Arena(1024).quarantine(0)


def a_slab_is_renewed() -> None:
    made = arena.Arena(2048, 1024)
    for _ in range(3):
        offset = made.reserve(256)
        assert offset is not None
        made.quarantine(offset)
    assert made.renew(0) == [0, 256, 512]
    assert made.registration_of(0) == 1


def a_source_is_leased_to_and_forgotten() -> None:
    leases = quarantine.WriteLeases(5.0, 40.0)
    leases.heard(A, 7_000_000, 100.0)
    leases.renewed(A)
    assert leases.retire(A) == pytest.approx(145.05)
    leases.expire(140.0)
    leases.expire(150.0)
    assert not len(leases)


def reads_hold_memory() -> None:
    held = quarantine.Quarantine()
    held.hold(KEY, quarantine.Isolated("failed", ("a", 0), offsets=[0], reads={1, 2}, lives=lambda: False))
    assert held.drained(KEY) == held.settled(KEY, 2) == held.forget(("a", 0)) == held.expired(KEY, 0.0) == []
    assert held.outlive() == [0]


def a_slab_is_revoked() -> None:
    held = quarantine.Quarantine()
    held.hold(KEY, quarantine.Isolated("failed", ("a", 0), offsets=[0, 256]))
    held.revoked([256])
    assert held.drained(KEY) == [0]


def an_attempt_is_isolated_twice() -> None:
    held = quarantine.Quarantine()
    held.hold(KEY, quarantine.Isolated("failed", ("a", 0), offsets=[0]))
    held.hold(KEY, quarantine.Isolated("failed", ("a", 0), offsets=[256]))


def source(**more: Any) -> writes.Writes:
    core: Any = SimpleNamespace(outgoing=SimpleNamespace(arena=arena.Arena(4096)), clock=lambda: 0.0, **more)
    flights: Any = {}
    known: Any = SimpleNamespace(waits=lambda peer: True)
    return writes.Writes(core, lambda job, event: None, flights, known)


def chunk(verb: wire.Verb = wire.Verb.PULL, route: Route = Route.PACKED) -> Any:
    """A chunk of 512 bytes, granted to a source."""
    want = SimpleNamespace(verb=verb, route=route)
    lane = SimpleNamespace(chunks=[SimpleNamespace(span_bytes=512)])
    job: Any = SimpleNamespace(want=want, peer=SimpleNamespace(name=A), lane=lane)
    return writes.Part(job, 0, 0, 0, 1, 0, 0.0)


def a_lease_is_renewed() -> None:
    made = source()
    for until_us in (50, 100, 70):
        made.renew(A, wire.WriteLease(2, until_us, 0))
    assert made._leases[A].until_us == 100


def chunks_are_staged_and_released() -> None:
    made, entries = source(), [chunk(), chunk()]
    for entry in entries:
        entry.staged = made._reserve(entry.job, 512)
    for entry in entries:
        made._release(entry)
    assert not made._reserved
    assert not made.core.outgoing.arena.reserved_bytes


def a_chunk_is_begun_twice() -> None:
    made, entry = source(), chunk()
    entry.staged = made._reserve(entry.job, 512)
    made._start(entry)


def a_chunk_is_gathered_from_nowhere() -> None:
    source()._gathered(chunk(), None)


def loading(keys: int) -> tuple[registrations.Registrations, wire.Registered]:
    transport = SimpleNamespace(identify=lambda metadata: A, connect=lambda metadata: None)
    core: Any = SimpleNamespace(peers={}, transport=transport)
    return registrations.Registrations(core), wire.Registered(b"", keys)


def keys_are_loaded() -> None:
    made, message = loading(3)
    made.heard(A, message)
    assert made.known(A) == 3
    assert not made.waits(A)


def memory_is_granted_under_new_keys() -> None:
    made, said = arena.Arena(1024), list[object]()
    made.renew(0)
    core: Any = SimpleNamespace(
        incoming=SimpleNamespace(arena=made),
        card=SimpleNamespace(transport=b""),
        say=lambda peer, message: said.append(message),
    )
    granted = wire.Granted("request", 1, (wire.Grant(0, 0),))
    renewals = registrations.Renewals(core, quarantine.Quarantine())
    assert renewals.granted(A, granted).registration == 1
    assert renewals.granted(A, granted).registration == 1
    assert len(said) == 1


def pages_are_taken_and_given() -> None:
    free = allocator.FreeList("kv", 8)
    assert free.take(3) == [0, 1, 2]
    free.claim([4])
    free.give([1])
    assert free.take(4) == [1, 3, 5, 6]
    free.check([0, 2, 1, 3, 5, 6, 4])


def a_page_is_claimed_that_is_not_free() -> None:
    free = allocator.FreeList("kv", 8)
    free.take(1)
    with pytest.raises(TierError, match=r"pages \[0\] of kv are claimed, and are not free"):
        free.claim([0, 1])
    assert len(free) == 7


def pages_of_an_allocator_are_taken() -> None:
    made = allocator.PageAllocator.__new__(allocator.PageAllocator)
    made.free = {("kv", allocator.Tier.HOST): allocator.FreeList("kv", 8)}
    assert made.take("kv", allocator.Tier.HOST, 2) == [0, 1]


#: Mutants of a class, by the scenario in which they err.
MUTANTS: dict[tuple[type, Callable[[], None]], list[Mutant]] = {
    (arena.Arena, regions_come_and_go): [
        Mutant("reserve", "offset + size, room - size", "offset, room", "is reserved twice"),
        Mutant("reserve", "room >= size", "room >= 256", "straddle"),
        Mutant("release", "if at and sum", "if False and sum", "were not merged"),
        Mutant("release", "self._reserved.pop(offset)", "self._reserved.pop(offset) + 8", "overlap"),
    ],
    (arena.Arena, a_free_region_is_quarantined): [
        Mutant("quarantine", "not in", "in", "the quarantined region at 0 is free"),
    ],
    (arena.Arena, a_slab_is_renewed): [
        Mutant("renew", "before + 1", "before", "keeps its registration"),
        Mutant("renew", "self.release(offset)", "self._reserved.pop(offset)", "not free as a whole"),
    ],
    (quarantine.WriteLeases, a_source_is_leased_to_and_forgotten): [
        Mutant("heard", "if stamp_us >", "if stamp_us <", "older stamp"),
        Mutant("renewed", "lent.over, max(", "lent.over, min(", "ends before"),
        Mutant("retire", "+= 1", "+= 0", "keeps term"),
        Mutant("expire", ") + self.linger_s\n", ")\n", "is forgotten at"),
    ],
    (quarantine.Quarantine, reads_hold_memory): [
        Mutant("drained", " or isolated.reads", "", "may still land"),
        Mutant("settled", "[] if isolated.reads else ", "", "may still land"),
        Mutant("forget", " and not isolated.reads", "", "may still land"),
        Mutant("expired", "self.drained(key) if", "self._release(key) if", "may still land"),
        Mutant("outlive", "self._isolated[key].reads.clear()", "pass", "may still land"),
    ],
    (quarantine.Quarantine, a_slab_is_revoked): [
        Mutant("revoked", "if offset not in offsets", "", "freed twice"),
    ],
    (writes.Writes, a_lease_is_renewed): [
        Mutant("renew", ") > (", ") < (", "is kept"),
    ],
    (writes.Writes, chunks_are_staged_and_released): [
        Mutant("_reserve", "+= span_bytes", "+= 2 * span_bytes", "are counted of"),
        Mutant("_release", "-= span_bytes", "-= 2 * span_bytes", "releases 512 bytes"),
    ],
    (registrations.Registrations, keys_are_loaded): [
        Mutant("_load", "= message.registration\n", "= 0\n", "loaded over a newer"),
        Mutant("_load", "del self.waiting[peer]", "pass", "loaded already"),
    ],
    (registrations.Renewals, memory_is_granted_under_new_keys): [
        Mutant("granted", "self._known[source] = arena", "_ = arena", "without keys"),
    ],
    (allocator.FreeList, pages_are_taken_and_given): [
        Mutant("take", "heappop(self._heap)", "self._heap[0]", "are taken of kv"),
        Mutant("claim", "self._heap = sorted(self._ids)", "pass", "by id"),
        Mutant("give", "heappush(self._heap, page)", "pass", "by id"),
    ],
    (allocator.PageAllocator, pages_of_an_allocator_are_taken): [
        Mutant("take", "take(count)", "take(count - 1)", "pages of kv for 2"),
    ],
}
CASES = [(owner, scenario, each) for (owner, scenario), mutants in MUTANTS.items() for each in mutants]


@pytest.mark.parametrize(("owner", "scenario", "each"), CASES, ids=[f"{o.__name__}.{m.method}" for o, _, m in CASES])
def test_a_condition_finds_its_mutant_and_no_fault_of_the_honest_function(
    owner: type, scenario: Callable[[], None], each: Mutant
) -> None:
    scenario()
    changed = mutant(owner.__module__, f"{owner.__name__}.{each.method}", each.old, each.new)
    with exchanged(changed), pytest.raises(AssertionError, match=each.words):
        scenario()


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (lambda: arena.Arena(1024).reserve(0), "a region of 0 bytes"),
        (an_attempt_is_isolated_twice, "would never be free"),
        (a_chunk_is_begun_twice, "is begun twice"),
        (a_chunk_is_gathered_from_nowhere, "is staged"),
    ],
)
def test_a_call_that_may_not_be_is_refused(scenario: Callable[[], object], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        scenario()


def test_ids_that_are_not_free_are_claimed_by_nobody() -> None:
    a_page_is_claimed_that_is_not_free()


def test_a_region_without_a_lease_is_not_released() -> None:
    with pytest.raises(LayoutError, match="no region is reserved at 256"):
        arena.Arena(1024).release(256)


def test_conditions_stay_on_and_a_lease_that_never_was_is_over() -> None:
    assert sys.flags.optimize == 0
    assert source()._until(chunk()) == -math.inf
