"""Deliberate bugs, one rule of the protocol each. A simulator that finds none of them proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from kvmover.transfer import receiver, sender, wire
from kvmover.transfer.arena import Arena
from kvmover.transfer.inbound import Inbound
from kvmover.transfer.outbound import Outbound
from kvmover.transfer.peers import Peer
from kvmover.transfer.posts import Poster
from kvmover.transport.base import Completed, Failed

Mutation = Callable[[pytest.MonkeyPatch], None]
Stepped = tuple[receiver.Receiving, list[receiver.Action]]


def completion_is_a_counter(patch: pytest.MonkeyPatch) -> None:
    """A chunk that is told of twice counts twice."""
    honest = receiver._arrived

    def arrived(state: receiver.Receiving, key: receiver.WriterChunk, now: float) -> Stepped:
        if key not in state.arrived or state.reason is not None:
            return honest(state, key, now)
        again = (key[0], -1 - len(state.landed))
        return receiver._land(replace(state, landed=state.landed | {again}), [])

    patch.setattr(receiver, "_arrived", arrived)


def generations_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """What is said of an earlier attempt is taken for the current one at the same request."""
    honest = Inbound.hear

    def hear(self: Inbound, peer: Peer, message: wire.About) -> None:
        for request, generation in self._attempts:
            if request == message.request:
                honest(self, peer, msgspec.structs.replace(message, generation=generation))
                return
        honest(self, peer, message)

    patch.setattr(Inbound, "hear", hear)
    honest_source = Outbound.hear

    def source_hear(self: Outbound, peer: Peer, message: wire.About) -> None:
        request = self._requests.get(message.request)
        attempt = request.attempts.get(peer.name) if request else None
        if attempt is not None and not isinstance(message, wire.Want):
            message = msgspec.structs.replace(message, generation=attempt.state.generation)
        honest_source(self, peer, message)

    patch.setattr(Outbound, "hear", source_hear)


def regions_are_freed_at_abort(patch: pytest.MonkeyPatch) -> None:
    """The destination does not wait for Drained."""
    honest = receiver._fail

    def fail(state: receiver.Receiving, reason: str, now: float) -> Stepped:
        free = [key for key in state.regions if key not in state.arrived] if state.reason is None else []
        regions = {key: offset for key, offset in state.regions.items() if key not in free}
        after, actions = honest(replace(state, regions=regions), reason, now)
        return after, [*(receiver.Free(state.regions[key]) for key in free), *actions]

    patch.setattr(receiver, "_fail", fail)


def any_writer_will_do(patch: pytest.MonkeyPatch) -> None:
    """A chunk counts for every source that has one of its number."""
    honest = receiver._arrived

    def arrived(state: receiver.Receiving, key: receiver.WriterChunk, now: float) -> Stepped:
        after, actions = honest(state, key, now)
        others = {(peer, key[1]) for peer, source in state.sources.items() if key[1] < source.chunks}
        if after.finished or after.reason is not None:
            return after, actions
        return receiver._land(replace(after, landed=after.landed | others), actions)

    patch.setattr(receiver, "_arrived", arrived)


def drained_is_said_with_a_write_in_flight(patch: pytest.MonkeyPatch) -> None:
    honest = sender._aborted

    def aborted(state: sender.Sending, reason: str, now: float) -> tuple[sender.Sending, list[sender.Action]]:
        after, actions = honest(state, reason, now)
        early: list[sender.Action] = [sender.Say(wire.Drained(state.request, state.generation))]
        return after, actions + early * bool(state.in_flight)

    patch.setattr(sender, "_aborted", aborted)


def quarantine_is_a_release(patch: pytest.MonkeyPatch) -> None:
    """A region goes back into use while a source that never answered may still write it."""
    patch.setattr(Arena, "quarantine", Arena.release)


def staging_is_reused_before_a_failed_write_settles(patch: pytest.MonkeyPatch) -> None:
    honest = Poster.handle

    def handle(self: Poster, event: Completed | Failed) -> None:
        honest(self, replace(event, quiescent=True) if isinstance(event, Failed) else event)

    patch.setattr(Poster, "handle", handle)


def held_pages_are_given_back(patch: pytest.MonkeyPatch) -> None:
    """A direct route's pages are not reported as held when a source never answered."""
    honest = Inbound._finish
    patch.setattr(Inbound, "_finish", lambda self, attempt, reason, held: honest(self, attempt, reason, False))


#: Each with the profile under which it shows.
MUTATIONS: list[tuple[Mutation, str]] = [
    (completion_is_a_counter, "hostile"),
    (generations_are_ignored, "hostile"),
    (regions_are_freed_at_abort, "default"),
    (any_writer_will_do, "default"),
    (drained_is_said_with_a_write_in_flight, "default"),
    (quarantine_is_a_release, "default"),
    (staging_is_reused_before_a_failed_write_settles, "default"),
    (held_pages_are_given_back, "default"),
]
