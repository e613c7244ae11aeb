"""A granted chunk at its source: the conditions under which it is begun, and the memory that each end of it frees."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from mover_fleets import CONFIG, HandClock, Pair
from mover_network import FaultyNetwork

from kvmover.errors import TransportError, TransportUnavailable
from kvmover.plan.cost import Route
from kvmover.regions import BoundMemory
from kvmover.transfer.memory.descriptors import InFlight
from kvmover.transfer.memory.registrations import Registrations
from kvmover.transfer.meter import Count, Gauge, Spent, Stage
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb, WriteLease
from kvmover.transfer.source.source_machine import Event, Faulted, Gathered, Lapsed, Post, Posted, WriteFailed
from kvmover.transfer.source.writes import Job, Part, Writes

TERM = 7


class Granting:
    """A source of which a request was asked, with a lease of 5 s: its chunks are begun by hand. `told`: their events.

    The destination is not polled again, so what it is sent waits for it.
    """

    def __init__(self, route: Route = Route.PACKED) -> None:
        self.clock, self.network, self.told = HandClock(), FaultyNetwork(), list[Event]()
        self.pair = Pair.of(config=replace(CONFIG, route=route), clock=self.clock, network=self.network)
        self.pair.send()
        self.pair.receive()
        self.pair.bench.turn(1)
        source = self.pair.src.movers[0]
        source.poll()
        (attempt,) = source._source._requests["request"].attempts.values()
        self.core, self.job = source._core, attempt.job
        registrations = Registrations(self.core)
        self.writes = Writes(self.core, self._tell, InFlight(self.core.transport), registrations)
        self.peer = self.job.peer.name
        self.writes.renew(self.peer, WriteLease(TERM, round(self.clock.now * 1e6), 5_000_000))

    def _tell(self, job: Job, event: Event) -> None:
        self.told.append(event)

    @property
    def reserved_bytes(self) -> int:
        return self.core.outgoing.arena.reserved_bytes

    def asking(self, **changes: object) -> Job:
        """A job of the same request, of which the destination asked otherwise."""
        return msgspec.structs.replace(self.job, want=msgspec.structs.replace(self.job.want, **changes))

    def part(self, chunk: int = 0, job: Job | None = None, registration: int = 0, term: int = TERM) -> Part:
        offset = chunk * CONFIG.costs.chunk_bytes
        return Part(job or self.job, chunk, offset, 0, term, registration, self.clock.now)

    def begin(self, part: Part) -> bool:
        """Begin a chunk, and do as the mover's loop does when it is copied."""
        begun = self.writes._start(part)
        self._copied()
        return begun

    def turn(self) -> None:
        """Begin the queued chunks that can be begun."""
        self.writes.poll()
        self._copied()

    def _copied(self) -> None:
        while self.core.later:
            self.core.later.popleft()()


def test_a_write_that_is_refused_fails_its_chunk_and_frees_its_staging_memory(monkeypatch: pytest.MonkeyPatch):
    source = Granting()
    part = source.part()

    def write(*_: object) -> int:
        raise TransportUnavailable("no route to there")

    monkeypatch.setattr(source.core.transport, "write", write)
    assert source.begin(part)
    assert source.told == [Posted(0), WriteFailed(0, "no route to there", True)]
    assert (source.reserved_bytes, part.posting, len(source.writes.flights)) == (0, False, 0)


def test_a_write_whose_lease_ends_while_it_is_packed_is_not_posted_and_is_offered_again(
    monkeypatch: pytest.MonkeyPatch,
):
    source = Granting()
    part = source.part()
    honest = source.core.transport.write

    def write(*given: Any) -> int:
        source.clock.now += 5.0
        return honest(*given)

    monkeypatch.setattr(source.core.transport, "write", write)
    assert source.begin(part)
    assert source.told == [Posted(0), Lapsed(0)]
    assert (source.reserved_bytes, part.posting, source.network.operations) == (0, False, 0)


def test_a_write_that_may_be_under_way_keeps_its_staging_memory(monkeypatch: pytest.MonkeyPatch):
    source = Granting()
    part = source.part()

    def write(*_: object) -> int:
        raise ZeroDivisionError("after the call of the library")

    monkeypatch.setattr(source.core.transport, "write", write)
    assert source.begin(part)
    *before, fault = source.told
    assert before == [Posted(0)]
    assert isinstance(fault, Faulted)
    assert not fault.quiescent
    assert (source.reserved_bytes, part.posting) == (CONFIG.costs.chunk_bytes, True)


def test_a_chunk_waits_for_the_keys_of_a_newer_registration_and_not_for_ones_that_nobody_has_sent(
    monkeypatch: pytest.MonkeyPatch,
):
    source = Granting()
    registrations = source.writes.registrations
    metadata, honest = source.pair.dst.movers[0]._transport.metadata(), source.core.transport.connect

    def connect(_: bytes) -> str:
        raise TransportError("operations are under way")

    monkeypatch.setattr(source.core.transport, "connect", connect)
    registrations.heard(source.peer, wire.Registered(metadata, 3))
    assert not source.begin(source.part(registration=3))
    assert (source.told, source.reserved_bytes) == ([], 0)
    monkeypatch.setattr(source.core.transport, "connect", honest)
    source.turn()
    assert source.begin(source.part(registration=3))
    assert source.told == [Posted(0)]
    assert source.begin(source.part(1, registration=4))
    assert source.told == [Posted(0), Lapsed(1)]


def test_a_chunk_waits_for_kernels_and_for_staging_memory():
    source = Granting()
    part = source.part()
    loading, arena = Future[Any](), source.core.outgoing.arena
    source.core.compiler._begun[source.peer, source.job.way] = loading
    assert not source.begin(part)
    loading.set_result(None)
    assert arena.reserve(arena.nbytes) == 0
    source.writes.post(source.job, Post(0, 0, 0, TERM))
    source.turn()
    assert not source.begin(part)
    assert source.told == []
    arena.release(0)
    source.turn()
    assert source.told == [Posted(0)], "it kept its place"


def test_a_chunk_to_be_read_needs_no_lease_and_each_is_where_it_was_said_to_be():
    source = Granting()
    pull = source.asking(verb=Verb.PULL)
    parts = [source.part(chunk, pull, term=TERM + 1) for chunk in range(3)]
    assert all(map(source.begin, parts))
    staged = [event for event in source.told if isinstance(event, Gathered)]
    nbytes = CONFIG.costs.chunk_bytes
    assert [(event.chunk, event.offset) for event in staged] == [(0, 0), (1, nbytes), (2, 2 * nbytes)]
    held = source.core.outgoing.tensor[: 3 * nbytes].view(3, nbytes)
    assert not torch.equal(held[0], held[1])
    assert source.writes.gauges()[Gauge.CHUNKS_WAITING_TO_BE_READ] == 3


def test_an_attempt_that_ends_frees_its_own_chunks_and_no_others():
    source = Granting()
    ended, other = (source.asking(verb=Verb.PULL) for _ in range(2))
    for chunk, job in enumerate((ended, other)):
        assert source.begin(source.part(chunk, job))
        source.writes.post(job, Post(2 + chunk, 0, 0, TERM))
    source.writes.drop(ended)
    assert source.reserved_bytes == CONFIG.costs.chunk_bytes
    assert source.writes.gauges()[Gauge.CHUNKS_WAITING_FOR_STAGING] == 1
    source.turn()
    assert [event.chunk for event in source.told if isinstance(event, Gathered)] == [0, 1, 3]
    source.writes.drop(other)
    assert (source.reserved_bytes, source.writes._staged) == (0, {})


def test_the_digest_of_a_chunk_is_told_before_its_write_and_only_where_it_was_asked_for():
    source = Granting()
    assert source.begin(source.part(0))
    assert source.told == [Posted(0)]
    assert source.begin(source.part(1, source.asking(digests=True)))
    *_, posted, digested = source.told
    assert posted == Posted(1)
    assert isinstance(digested, Posted)
    assert digested.digest


def test_a_chunk_that_is_copied_into_mapped_pages_is_not_written_once_more():
    source = Granting(Route.DIRECT)
    (target,) = source.pair.dst.pools[0]
    landed, sent = source.network.operations, source.core.meter.counts[Count.SENT_CHUNKS]
    mapped = msgspec.structs.replace(source.job, mapped=(BoundMemory(target.tensors),))
    assert source.begin(source.part(job=mapped))
    assert (source.network.operations, len(source.writes.flights)) == (landed, 0)
    assert source.core.meter.counts[Count.SENT_CHUNKS] == sent + 1


def test_messages_of_the_same_poll_go_before_the_note_of_a_chunk():
    source, sent = Granting(), list[type]()

    def copies(_: str, __: str, message: wire.AnyMessage) -> int:
        sent.append(type(message))
        return 1

    source.network.copies = copies
    source.core.say(source.peer, wire.Aux("request", source.job.want.generation, b"payload"))
    assert source.begin(source.part())
    assert sent == [wire.Aux, wire.Chunk]


@pytest.mark.parametrize(("route", "runs"), [(Route.PACKED, 1), (Route.DIRECT, 2 * 2 * 2 * 4)])
def test_a_chunk_is_counted_once_by_its_route_with_its_runs_and_the_time_of_its_steps(
    route: Route, runs: int, monkeypatch: pytest.MonkeyPatch
):
    source = Granting(route)
    job = msgspec.structs.replace(source.job, spent_s=Spent(float))
    honest, meter, part = source.core.transport.write, source.core.meter, source.part(job=job)
    before = meter.copy()

    def write(*given: Any) -> int:
        source.clock.now += 1.0
        return honest(*given)

    monkeypatch.setattr(source.core.transport, "write", write)
    source.clock.now += 3.0
    assert source.begin(part)
    assert meter.routes - before.routes == {route: 1}
    assert (meter.counts - before.counts)[Count.DESCRIPTORS] == part.runs == runs
    assert (job.spent_s[Stage.STAGING_WAIT], job.spent_s[Stage.POST]) == (3.0, 1.0)
