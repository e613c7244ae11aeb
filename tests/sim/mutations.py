"""Deliberate bugs, one rule of the protocol each. A simulator that finds none of them proves nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace as changed
from typing import Any

import msgspec
import numpy as np
import pytest

from kvmover.transfer import core
from kvmover.transfer.core import Timers
from kvmover.transfer.destination import credits, destination_driver, destination_machine
from kvmover.transfer.destination.destination_attempts import ReceiveAttempt
from kvmover.transfer.destination.destination_driver import DestinationDriver
from kvmover.transfer.destination.destination_machine import Action, Free, Receiving, WriterChunk
from kvmover.transfer.destination.quarantine import Quarantine, Retransmissions, WriteLeases
from kvmover.transfer.memory import registrations
from kvmover.transfer.memory.arena import ALIGN_BYTES, Arena, Renewal
from kvmover.transfer.memory.registrations import Renewals
from kvmover.transfer.peers.liveness import Duty, Liveness
from kvmover.transfer.peers.peer_table import Peer, Peers
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.chunk_sets import WriterChunks
from kvmover.transfer.protocol.chunks import Lane
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.source import source_driver, source_machine
from kvmover.transfer.source.source_attempts import Request, SendAttempt
from kvmover.transfer.source.source_driver import EarlyWants, SourceDriver
from kvmover.transfer.source.source_machine import Say, Sending
from kvmover.transfer.source.writes import Part, Writes
from kvmover.transfer.tombstones import Tombstones
from kvmover.transport.base import Completed, Failed
from kvmover.transport.loopback import LoopbackTransport
from tests.sim.seats import SimMappings

Mutation = Callable[[pytest.MonkeyPatch], None]
Stepped = tuple[Receiving, list[Action]]


def around(patch: pytest.MonkeyPatch, owner: Any, name: str, other: Callable[..., Any]) -> None:
    """Replace a function by `other`, which is handed the honest one first."""
    honest = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments: other(honest, *arguments))


# Completion.


def completion_is_a_counter(patch: pytest.MonkeyPatch) -> None:
    """A chunk that is told of twice counts twice."""

    def arrived(honest: Any, state: Receiving, event: wire.Chunk, key: WriterChunk, now: float) -> Stepped:
        if key not in state.arrived or state.reason is not None:
            return honest(state, event, key, now)
        again = (key[0], (1 << 20) + len(state.landed))
        return destination_machine._progress(msgspec.structs.replace(state, landed=state.landed | {again}), [])

    around(patch, destination_machine, "_arrived", arrived)


def any_writer_will_do(patch: pytest.MonkeyPatch) -> None:
    """A chunk counts for every source that has one of its number."""

    def arrived(honest: Any, state: Receiving, event: wire.Chunk, key: WriterChunk, now: float) -> Stepped:
        after, actions = honest(state, event, key, now)
        others = {(peer, key[1]) for peer, source in state.sources.items() if key[1] < source.chunks}
        if after.finished or after.reason is not None:
            return after, actions
        return destination_machine._progress(msgspec.structs.replace(after, landed=after.landed | others), actions)

    around(patch, destination_machine, "_arrived", arrived)


def a_payload_counts_twice(patch: pytest.MonkeyPatch) -> None:
    """One that comes again is taken for that of another source."""

    def told(honest: Any, state: Receiving, peer: str, message: Any, now: float) -> Stepped:
        if isinstance(message, wire.Aux) and peer in state.aux and state.awaited_aux:
            peer = min(state.awaited_aux)
        return honest(state, peer, message, now)

    around(patch, destination_machine, "_told", told)


def a_pull_lands_without_its_source(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the source to confirm that it reused nothing."""
    patch.setattr(Receiving, "unconfirmed", property(lambda self: frozenset[str]()))


# Generations and rounds.


def generations_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """What is said of an earlier attempt is taken for the current one at the same request."""
    around(
        patch,
        DestinationDriver,
        "hear",
        lambda honest, self, peer, message: honest(self, peer, _current(self, message)),
    )

    def source_hear(honest: Any, self: SourceDriver, peer: Peer, message: wire.About) -> None:
        request = self._requests.get(message.request)
        attempt = request.attempts.get(peer.name) if request else None
        if attempt is not None and not isinstance(message, wire.Want):
            message = msgspec.structs.replace(message, generation=attempt.state.generation)
        honest(self, peer, message)

    around(patch, SourceDriver, "hear", source_hear)


def chunks_have_no_generation(patch: pytest.MonkeyPatch) -> None:
    """A chunk of an earlier attempt is taken for one of the current."""

    def hear(honest: Any, self: DestinationDriver, peer: Peer, message: wire.About) -> None:
        honest(self, peer, _current(self, message) if isinstance(message, wire.Chunk) else message)

    around(patch, DestinationDriver, "hear", hear)


def _current(self: DestinationDriver, message: wire.About) -> wire.About:
    generations = [attempt.id[1] for attempt in self._attempts if attempt.id[0] == message.request]
    return msgspec.structs.replace(message, generation=generations[0]) if generations else message


def rounds_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """What is told again of a chunk that did not match is taken for its second sending."""

    def arrived(honest: Any, state: Receiving, event: wire.Chunk, key: WriterChunk, now: float) -> Stepped:
        return honest(state, msgspec.structs.replace(event, round=state.rounds.get(key, 0)), key, now)

    around(patch, destination_machine, "_arrived", arrived)
    around(patch, destination_machine, "_staged", arrived)


def digests_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    def scattered(honest: Any, state: Receiving, key: WriterChunk, digest: int | None, now: float) -> Stepped:
        return honest(state, key, state.digests.get(key), now)

    around(patch, destination_machine, "_scattered", scattered)


def a_want_opens_what_is_over(patch: pytest.MonkeyPatch) -> None:
    """A Want that its Abort overtook is taken for a new one."""
    patch.setattr(SourceDriver, "_past", lambda self, peer, want: False)


# What may not be used yet.


def regions_are_freed_at_abort(patch: pytest.MonkeyPatch) -> None:
    """The destination does not wait for Drained."""

    def fail(honest: Any, state: Receiving, reason: str, now: float) -> Stepped:
        free = [key for key in state.regions if key not in state.arrived] if state.reason is None else []
        regions = {key: offset for key, offset in state.regions.items() if key not in free}
        after, actions = honest(msgspec.structs.replace(state, regions=regions), reason, now)
        return after, [*(Free(state.regions[key]) for key in free), *actions]

    around(patch, destination_machine, "_fail", fail)


def drained_is_said_with_a_write_in_flight(patch: pytest.MonkeyPatch) -> None:
    def aborted(honest: Any, state: Sending, reason: str, now: float) -> Any:
        after, actions = honest(state, reason, now)
        early = [Say(wire.Drained(state.request, state.generation))]
        return after, actions + early * bool(state.in_flight)

    around(patch, source_machine, "_aborted", aborted)


def quarantine_is_a_release(patch: pytest.MonkeyPatch) -> None:
    """A region goes back into use while a source that never answered may still write it."""
    patch.setattr(Arena, "quarantine", Arena.release)


def the_arena_is_a_ring(patch: pytest.MonkeyPatch) -> None:
    """The next region follows the last one, whoever has it."""
    ends: dict[int, int] = {}

    def reserve(honest: Any, self: Arena, nbytes: int, owner: str = "") -> int | None:
        size = -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        offset = ends.get(id(self), 0)
        if offset + size > self.nbytes:
            offset = 0
        if offset in self._reserved:  # a ring that counts would stop here; one that overcommits goes on
            offset = (offset + ALIGN_BYTES) % self.nbytes
        if offset + size > self.nbytes or offset in self._reserved:
            return honest(self, nbytes, owner)
        ends[id(self)] = offset + size
        self._reserved[offset], self._owners[offset] = size, owner
        self._owned[owner] += size
        return offset

    around(patch, Arena, "reserve", reserve)


def a_source_may_have_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(credits, "within_share", lambda arena, source, nbytes: True)


def a_slab_is_renewed_under_its_neighbours(patch: pytest.MonkeyPatch) -> None:
    """Whoever else has a region of it is shut out with the lost."""
    patch.setattr(registrations, "renewal", lambda arena, lost: Renewal(tuple(sorted(set(map(arena.slab_of, lost))))))

    def renew(self: Arena, slab: int) -> list[int]:
        freed = [offset for offset in self._quarantined if self.slab_of(offset) == slab]
        for offset in freed:
            self.release(offset)
        self._registrations[slab] = self.registration + 1
        return freed

    patch.setattr(Arena, "renew", renew)


def a_slab_is_released_and_not_renewed(patch: pytest.MonkeyPatch) -> None:
    """Regions of the lost are free, and their writes land."""
    patch.setattr(Renewals, "_renew", lambda self, slab: self.quarantine.revoked(self.core.incoming.arena.renew(slab)))


def nobody_is_told_of_a_registration(patch: pytest.MonkeyPatch) -> None:
    """Regions of a renewed slab are granted as if everybody knew its keys."""
    patch.setattr(Renewals, "granted", lambda self, source, granted: granted)


def a_region_is_free_while_its_source_waits(patch: pytest.MonkeyPatch) -> None:
    """What went out with a Want is reserved to others when the source says that it has nothing to write yet."""

    def noted(honest: Any, state: Receiving, peer: str, until: float) -> Stepped:
        after, actions = honest(state, peer, until)
        free = [key for key in state.regions if key[0] == peer and key not in state.arrived | state.ready]
        regions = {key: offset for key, offset in after.regions.items() if key not in free}
        freed = [Free(state.regions[key]) for key in free]
        return msgspec.structs.replace(after, regions=regions), [*freed, *actions]

    around(patch, destination_machine, "_noted", noted)


def waiting_requests_may_have_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(credits, "EAGER_PART", 1)


def regions_that_went_out_with_wants_count_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(credits.EagerGrants, "freed", lambda self, offset: None)


def staging_is_reused_before_a_failed_write_settles(patch: pytest.MonkeyPatch) -> None:
    def handle(honest: Any, self: Writes, event: Completed | Failed) -> bool:
        return honest(self, changed(event, quiescent=True) if isinstance(event, Failed) else event)

    around(patch, Writes, "handle", handle)


def staging_is_reused_before_it_was_read(patch: pytest.MonkeyPatch) -> None:
    """A source of a pull gives the memory back when it says where the chunk lies."""

    def gathered(honest: Any, self: Writes, entry: Part, digest: int | None) -> None:
        honest(self, entry, digest)
        if entry.job.want.verb is Verb.PULL:
            self._release(entry)

    around(patch, Writes, "_gathered", gathered)


def a_lease_that_is_over_leaves_nothing_under_way(patch: pytest.MonkeyPatch) -> None:
    """What a source may still write is free with its lease: what it posted last may take its time."""
    around(patch, WriteLeases, "retire", lambda honest, self, peer: honest(self, peer) - self.linger_s)


def a_lease_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """A source writes what it was granted, however long ago."""
    patch.setattr(Writes, "_until", lambda self, entry: math.inf)


def a_lease_is_looked_at_before_the_gather_only(patch: pytest.MonkeyPatch) -> None:
    write = LoopbackTransport.write
    patch.setattr(LoopbackTransport, "write", lambda self, *arguments: write(self, *arguments[:5]))


def a_renewal_revives_old_grants(patch: pytest.MonkeyPatch) -> None:
    """A source that speaks again may write what it was granted before its lease was given up."""

    def retire(honest: Any, self: WriteLeases, peer: str) -> float:
        lent, self.term = self._lent.get(peer), self.term - 1
        until = honest(self, peer)
        if lent is not None:
            lent.term = self.term
        return until

    around(patch, WriteLeases, "retire", retire)


def a_lapsed_chunk_is_not_offered_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Writes, "_lapse", lambda self, entry: self._release(entry))


def quarantined_pages_are_given_back(patch: pytest.MonkeyPatch) -> None:
    """A direct route's pages are not reported as held when a source never answered."""
    around(
        patch,
        DestinationDriver,
        "_finish",
        lambda honest, self, attempt, reason, held: honest(self, attempt, reason, set()),
    )


def the_quarantine_is_over_with_the_transfer(patch: pytest.MonkeyPatch) -> None:
    """`Transfer.quarantined` turns false at once, while a write may still land."""

    def close(honest: Any, attempt: Any, *rest: Any) -> None:
        honest(attempt, *rest)
        attempt.transfer.quarantined = False

    around(patch, destination_driver, "close", close)


def a_message_is_said_to_a_release_that_lacks_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wire.Dialect, "knows", lambda self, version, message: True)


def gates_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """Chunks go before the engine has produced them."""

    def take_ready(honest: Any, self: Request, attempt: Any) -> tuple[int, ...]:
        ready, attempt.waiting = attempt.waiting, ()
        return ready

    around(patch, Request, "take_ready", take_ready)


def pages_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """A chunk goes when its gate has passed, and takes page 0 for pages that nobody has named."""

    def take_ready(honest: Any, self: Request, attempt: Any) -> tuple[int, ...]:
        named = self.pages[:]
        for number, (table, most) in enumerate(zip(named, attempt.job.lane.source_reads, strict=True)):
            self.pages[number] = np.pad(table, (0, max(0, most - len(table))))
        ready = honest(self, attempt)
        self.pages[:] = named if not ready else self.pages
        return ready

    around(patch, Request, "take_ready", take_ready)


def lost_page_ids_are_not_missed(patch: pytest.MonkeyPatch) -> None:
    """What a source says of its page tables is put behind what it said before, whatever was lost between."""

    def spliced(honest: Any, known: Any, more: Any, first: Any, most: Any) -> Any:
        return honest(known, more, [len(table) for table in known], most)

    around(patch, destination_driver, "spliced", spliced)


def pages_here_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """A chunk is granted when it is offered, and takes page 0 for pages that the engine has not named."""
    around(
        patch,
        destination_driver,
        "attempt_of",
        lambda honest, *given: _unawaited(honest(*given)),
    )


def _unawaited(attempt: Any) -> Any:
    attempt.state = msgspec.structs.replace(attempt.state, unnamed=WriterChunks())
    if attempt.most is not None:
        attempt.pages = tuple(np.zeros(pages, np.int64) for pages in attempt.most)
    return attempt


def pages_there_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """A source takes page 0 for pages that a destination it writes into has not named."""

    def placed(honest: Any, self: SendAttempt) -> tuple[int, ...]:
        if self.job.target is not None:
            pairs = zip(self.job.target, self.job.lane.target_reads, strict=True)
            self.job.target[:] = [np.pad(table, (0, max(0, most - len(table)))) for table, most in pairs]
        return honest(self)

    around(patch, SendAttempt, "placed", placed)


def any_answer_notes_all_pages(patch: pytest.MonkeyPatch) -> None:
    """A destination takes it that a source has all its pages noted, whenever it has noted some."""
    patch.setattr(ReceiveAttempt, "has_noted", lambda self, peer, noted: True)


def a_state_goes_with_its_layers(patch: pytest.MonkeyPatch) -> None:
    """A state is sent when its layers have seen some of the tokens."""

    def stop(honest: Any, self: Lane, piece: Any, end: int) -> int:
        return 0 if self.src[piece.component].spec.component.states else honest(self, piece, end)

    around(patch, Lane, "_stop", stop)


# What must not be waited for, or forgotten.


def what_is_lost_is_not_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(destination_machine, "_again", lambda state, peer, now: [])


def a_want_is_said_once(patch: pytest.MonkeyPatch) -> None:
    """Every source is taken to have noted what it was asked."""

    def again_at(honest: Any, state: Receiving, peer: str) -> float:
        at = honest(state, peer)
        return at if state.reason is not None or destination_machine._pending(state, peer) else max(at, state.deadline)

    around(patch, destination_machine, "_again_at", again_at)


def a_want_is_noted_and_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A source says that it keeps a Want, and does not."""
    patch.setattr(EarlyWants, "take", lambda self, request: [])


def a_timer_that_comes_late_is_dropped(patch: pytest.MonkeyPatch) -> None:
    def take(honest: Any, self: Timers[Any], now: float, most: int) -> list[Any]:
        due = dict(self._due)
        return [key for key in honest(self, now, most) if due[key] > now - 0.05]

    around(patch, Timers, "take", take)


def timers_come_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Of what falls due at once a poll does the first, and forgets the others."""
    around(patch, Timers, "take", lambda honest, self, now, most: honest(self, now, most)[:1])


def a_note_is_its_last_message(patch: pytest.MonkeyPatch) -> None:
    """What is said to a peer in one poll is one message, however much it is."""
    around(patch, core, "notes", lambda honest, messages: honest(messages[-1:]))


def what_is_over_is_still_to_come(patch: pytest.MonkeyPatch) -> None:
    """A source forgets that a request has ended."""
    patch.setattr(Tombstones, "end", lambda self, request, how, until: None)


def hello_is_said_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Liveness, "greeted", lambda self, peer, now: None)


def a_source_without_chunks_is_told_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Retransmissions, "said", lambda self, key, want, due, until: None)


def silence_is_never_noticed(patch: pytest.MonkeyPatch) -> None:
    def look(honest: Any, self: Liveness, peer: str, now: float) -> Duty | None:
        duty = honest(self, peer, now)
        return None if duty is Duty.LOSE else duty

    around(patch, Liveness, "look", look)


def an_older_process_takes_its_seat_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Peers, "admit", lambda self, card, name, now, linger_s: None)


def a_peer_that_is_back_releases_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Quarantine, "drained", lambda self, key: [])


def a_mapped_copy_ends_with_its_lease(patch: pytest.MonkeyPatch) -> None:
    """Pages are given back by the clock, whoever may still copy into them."""
    patch.setattr(SimMappings, "maker", lambda self, peer: None)


def a_dead_peer_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    """What an orchestrator says of a process is not believed."""
    patch.setattr(Quarantine, "forget", lambda self, seat: [])


def answers_are_answered(patch: pytest.MonkeyPatch) -> None:
    """The destination says Done to a source's Abort, and the source Abort to a Done."""

    def late(honest: Any, self: DestinationDriver, peer: Peer, message: wire.About) -> None:
        id_ = message.request, message.generation
        if isinstance(message, wire.Abort) and id_ in self._ended and self._ended.get(id_) is None:
            self.core.say(peer.name, wire.Done(*id_))
        else:
            honest(self, peer, message)

    around(patch, DestinationDriver, "_late", late)


def a_chunk_is_told_before_it_is_copied(patch: pytest.MonkeyPatch) -> None:
    """The note of a mapped chunk goes out when its copy begins."""

    def copy(honest: Any, self: Writes, regions: Any, entry: Part) -> None:
        if entry.job.mapped is not None:
            self.core.post(entry.job.peer.name, entry.job.note(entry))
        honest(self, regions, entry)

    around(patch, Writes, "_copy", copy)


# Several engines.


def what_fails_one_engine_fails_all(patch: pytest.MonkeyPatch) -> None:
    def part(self: SourceDriver, request: Request, engine: str, reason: str, cause: Any) -> None:
        self._fail(request, reason, cause)

    patch.setattr(SourceDriver, "_part", part)


def ranks_are_counted_without_their_engine(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 of one engine and rank 1 of another are taken for both ranks of each."""

    def all_asked(self: Request) -> bool:
        asked = {attempt.job.peer.card.place.rank for attempt in self.attempts.values()}
        return bool(self.expected) and all(ranks <= asked for ranks in self.expected.values())

    patch.setattr(Request, "all_asked", property(all_asked))


def what_one_engine_said_is_heard_before_another_asked(patch: pytest.MonkeyPatch) -> None:
    """Of two that waited for `send`, one ends the request before the other's Want is looked at."""
    patch.setattr(source_driver, "sorted", lambda said, key: said, raising=False)


# What the engine is told.


def a_spoilt_chunk_of_a_failed_request_is_whole(patch: pytest.MonkeyPatch) -> None:
    def scattered(honest: Any, state: Receiving, key: WriterChunk, digest: int | None, now: float) -> Stepped:
        return honest(state, key, state.digests.get(key) if state.reason is not None else digest, now)

    around(patch, destination_machine, "_scattered", scattered)


def reads_count_unconfirmed(patch: pytest.MonkeyPatch) -> None:
    """Pages that were read from a source that reused them are called whole."""

    def close(honest: Any, attempt: Any, *rest: Any) -> None:
        state = attempt.state
        attempt.state = msgspec.structs.replace(state, kept=frozenset(state.sources))
        honest(attempt, *rest)

    around(patch, destination_driver, "close", close)


#: Each with the profile under which it shows.
MUTATIONS: list[tuple[Mutation, str]] = [
    (completion_is_a_counter, "echoes"),
    (any_writer_will_do, "default"),
    (a_payload_counts_twice, "echoes"),
    (a_pull_lands_without_its_source, "ambushed"),
    (generations_are_ignored, "echoes"),
    (chunks_have_no_generation, "echoes"),
    (rounds_are_ignored, "echoes"),
    (digests_are_not_compared, "default"),
    (a_want_opens_what_is_over, "reordered"),
    (regions_are_freed_at_abort, "default"),
    (drained_is_said_with_a_write_in_flight, "frail"),
    (quarantine_is_a_release, "default"),
    (the_arena_is_a_ring, "default"),
    (a_slab_is_renewed_under_its_neighbours, "revoked"),
    (a_slab_is_released_and_not_renewed, "revoked"),
    (nobody_is_told_of_a_registration, "revoked"),
    (a_source_may_have_all, "default"),
    (a_region_is_free_while_its_source_waits, "echoes"),
    (waiting_requests_may_have_all, "default"),
    (regions_that_went_out_with_wants_count_for_ever, "default"),
    (a_dead_peer_is_waited_for, "frail"),
    (staging_is_reused_before_a_failed_write_settles, "frail"),
    (staging_is_reused_before_it_was_read, "default"),
    (a_lease_that_is_over_leaves_nothing_under_way, "frail"),
    (a_lease_is_not_looked_at, "drowsy"),
    (a_lease_is_looked_at_before_the_gather_only, "drowsy"),
    (a_renewal_revives_old_grants, "drowsy"),
    (a_lapsed_chunk_is_not_offered_again, "drowsy"),
    (a_mapped_copy_ends_with_its_lease, "drowsy"),
    (quarantined_pages_are_given_back, "default"),
    (the_quarantine_is_over_with_the_transfer, "default"),
    (a_message_is_said_to_a_release_that_lacks_it, "mixed"),
    (gates_are_ignored, "default"),
    (pages_are_not_awaited, "default"),
    (lost_page_ids_are_not_missed, "pulled"),
    (pages_here_are_not_awaited, "default"),
    (pages_there_are_not_awaited, "default"),
    (any_answer_notes_all_pages, "lossy"),
    (a_state_goes_with_its_layers, "default"),
    (what_is_lost_is_not_asked_for_again, "lossy"),
    (a_want_is_said_once, "lossy"),
    (a_want_is_noted_and_forgotten, "lossy"),
    (a_timer_that_comes_late_is_dropped, "lossy"),
    (timers_come_one_by_one, "lossy"),
    (a_note_is_its_last_message, "lossy"),
    (what_is_over_is_still_to_come, "default"),
    (hello_is_said_once, "lossy"),
    (a_source_without_chunks_is_told_once, "lossy"),
    (silence_is_never_noticed, "default"),
    (a_peer_that_is_back_releases_nothing, "default"),
    (an_older_process_takes_its_seat_back, "replaced"),
    (answers_are_answered, "hostile"),
    (a_chunk_is_told_before_it_is_copied, "default"),
    (what_fails_one_engine_fails_all, "several"),
    (ranks_are_counted_without_their_engine, "several"),
    (what_one_engine_said_is_heard_before_another_asked, "staggered"),
    (a_spoilt_chunk_of_a_failed_request_is_whole, "default"),
    (reads_count_unconfirmed, "ambushed"),
]
