"""Answering: what a source is asked for by a Want, derived anew from both fleets, as the destination derived it."""

from __future__ import annotations

from kvmover.errors import PlanError
from kvmover.plan.cost import Route
from kvmover.transfer import sending, wire
from kvmover.transfer.core import Core
from kvmover.transfer.lane import Cut, Lane, plans_between, related
from kvmover.transfer.offers import Attempt, Request
from kvmover.transfer.peers import Peer
from kvmover.transfer.posts import Job
from kvmover.transfer.tables import decoded, encoded
from kvmover.transfer.wire import Verb


def attempt_for(core: Core, request: Request, peer: Peer, want: wire.Want) -> Attempt:
    """The attempt that serves `want`. Raises ValueError or ProtocolError on one that cannot be met."""
    config, fleet, theirs = core.config, core.end.fleet, peer.card.place.fleet
    tables = [len(t) for t, p in zip(request.pages, core.end.pools, strict=True) if not p.component.states]
    if tables and want.stop > (min(tables) + 1) * fleet.page_tokens * fleet.cp:  # before so much is computed
        raise PlanError(f"page tables are too short for {want.stop} positions")
    if request.expected is None:
        relation = related(core.components, fleet, theirs, want.replicas)
        everyone = frozenset(range(theirs.size)) if core.end.rank in want.aux else frozenset[int]()
        request.expected = relation.destinations_of(core.end.rank) | everyone
    plans = plans_between(core.components, fleet, theirs, range(want.start, want.stop), want.replicas)
    lane = Lane.between(plans, core.end, peer.end, Cut(want.chunk_bytes, want.chunk_layers))
    direct = want.route is Route.DIRECT
    target = None
    if direct and want.verb is Verb.PUSH:
        target = decoded(want.pages)
    chunks, now = len(lane.chunks), core.clock()
    pages = _tables(request, want, chunks) if direct and want.verb is Verb.PULL else ()
    deadline = now + config.deadline_s
    state = sending.Sending(
        want.request, want.generation, chunks, core.patience, deadline, direct, want.verb, pages, now
    )
    return Attempt(state, Job(want, peer, lane, request.pages, target), tuple(range(chunks)))


def _tables(request: Request, want: wire.Want, chunks: int) -> tuple[bytes, ...]:
    """Our page tables for who reads from our pages. Raises ProtocolError where no message holds them."""
    pages = encoded(request.pages)
    every = tuple((chunk, chunk + 1) for chunk in range(chunks))
    wire.encode(wire.Offered(want.request, want.generation, every, pages))
    return pages
