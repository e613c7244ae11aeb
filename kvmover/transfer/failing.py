"""How a request that cannot land comes to its end at the destination: pure steps of the receiver's state machine.

Every source is told (Abort); the pages are given back when each has answered that nothing is in flight (Drained) and
our own reads and copies are over. What never answers is left in quarantine.
"""

from __future__ import annotations

from dataclasses import replace

from kvmover.transfer import wire
from kvmover.transfer.receiving import Action, Finish, Free, Quarantine, Receiving, Send, Stepped
from kvmover.transfer.wire import Verb


def fail(state: Receiving, reason: str, now: float) -> Stepped:
    """Tell every source, and wait until none of them can write any more, but not for ever."""
    if state.reason is not None:
        return state, []
    pushing = frozenset(peer for peer, source in state.sources.items() if source.verb is Verb.PUSH)
    free = [k for k in state.regions if k[0] not in pushing and k not in state.reading and k not in state.arrived]
    regions = {key: offset for key, offset in state.regions.items() if key not in free}
    actions: list[Action] = [Free(state.regions[key]) for key in free]
    deadline = now + state.patience.drain_s
    state = replace(state, reason=reason, undrained=pushing, regions=regions, deadline=deadline)
    state = replace(state, quiet_since=now, heard={})
    return settle(state, [*actions, *aborts(state, set(state.sources) - state.gone)])


def aborts(state: Receiving, peers: set[str]) -> list[Action]:
    assert state.reason is not None, "an attempt that goes on is not aborted"
    abort = wire.Abort(state.request, state.generation, state.reason)
    return [Send(peer, abort) for peer in state.sources if peer in peers]


def drained(state: Receiving, peer: str) -> Stepped:
    """A drained source's regions are free, but for those that we are reading or copying ourselves."""
    if state.reason is None or peer not in state.undrained:
        return state, []
    free = [k for k in state.regions if k[0] == peer and k not in state.arrived and k not in state.reading]
    regions = {key: offset for key, offset in state.regions.items() if key not in free}
    actions: list[Action] = [Free(state.regions[key]) for key in free]
    return settle(replace(state, regions=regions, undrained=state.undrained - {peer}), actions)


def settle(state: Receiving, actions: list[Action]) -> Stepped:
    """Finish a failed attempt once every source that can has drained and every copy and read of our own is over."""
    copying = state.arrived - state.landed
    return (state, actions) if state.undrained - state.gone or copying or state.reading else finish(state, actions)


def finish(state: Receiving, actions: list[Action]) -> Stepped:
    """What is still leased belongs to sources that never answered, or to reads that never ended."""
    reading = {peer for peer, _ in state.reading}
    held = frozenset(peer for peer in state.undrained | reading if state.sources[peer].direct)
    kept = [Quarantine(key[0], offset) for key, offset in state.regions.items()]
    return replace(state, finished=True), [*actions, *kept, Finish(state.reason, held)]
