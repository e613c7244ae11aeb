"""Asking: what a destination wants of each source of a request, made and checked whole before anything is said."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvmover import ranges
from kvmover.errors import PlanError
from kvmover.plan.cost import Route
from kvmover.transfer import receiving, wire
from kvmover.transfer.core import Core
from kvmover.transfer.lane import Cut, Lane, plans_between, related
from kvmover.transfer.peers import Peer
from kvmover.transfer.posts import Pages
from kvmover.transfer.result import Integrity, Transfer
from kvmover.transfer.tables import encoded
from kvmover.transfer.wanted import Attempt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """`positions` of a request of `engine` into `pages`, and payloads of the ranks `aux_from`."""

    transfer: Transfer
    engine: str
    positions: range
    pages: Pages
    aux_from: Sequence[int] = ()


def attempt_of(core: Core, asked: Asked, generation: int) -> Attempt:
    """The attempt, with a Want for each source rank encoded. Raises PlanError, PeerUnknown or LayoutError."""
    config, now = core.config, core.clock()
    with ranges.span(ranges.PLAN, asked.transfer.request):
        peers, lanes = _lanes(core, asked)
        runs = {name: lane.direct_runs() for name, lane in lanes.items()}
        for lane in lanes.values():
            lane.check_pages(lane.dst, asked.pages)
    sources: dict[str, receiving.Source] = {}
    for peer in peers:
        lane, aux = lanes[peer.name], peer.card.place.rank in asked.aux_from
        direct = _route(core, peer, lane, runs[peer.name]) is Route.DIRECT
        sources[peer.name] = receiving.Source(len(lane.chunks), direct, config.verb, aux)
        largest = max((chunk.span_bytes for chunk in lane.chunks), default=0)
        if not direct and not core.incoming.arena.fits(largest):
            raise PlanError(f"a chunk of {largest} bytes does not fit the arena of {core.incoming.arena.nbytes}")
    request = asked.transfer.request
    state = receiving.Receiving(request, generation, sources, core.patience, now + config.deadline_s, now)
    seats = {peer.name: peer.card.place.seat for peer in peers}
    attempt = Attempt(state, asked.transfer, asked.pages, lanes, seats, sum(runs.values()))
    for name in lanes:  # a table that no message holds is refused before anything is asked
        attempt.wants[name] = wire.encode(_want(core, state, sources[name], asked))
    return attempt


def _lanes(core: Core, asked: Asked) -> tuple[list[Peer], dict[str, Lane]]:
    """The source ranks that could hold any of it, and what each would send."""
    config, engine = core.config, asked.engine
    fleet = core.peers.fleet(engine)
    ranks = related(core.components, fleet, core.end.fleet, config.replicas).sources_of(core.end.rank)
    peers = [core.peers.at(engine, rank) for rank in sorted({*ranks, *asked.aux_from})]
    for peer in peers:
        if peer.card.place.fleet != fleet:  # the two sides would derive different chunks
            raise PlanError(f"{peer.name} is of a fleet {peer.card.place.fleet}, others of {engine} of {fleet}")
    plans = plans_between(core.components, fleet, core.end.fleet, asked.positions, config.replicas)
    cut = Cut(config.costs.chunk_bytes, config.chunk_layers)
    return peers, {peer.name: Lane.between(plans, peer.end, core.end, cut) for peer in peers}


def _route(core: Core, peer: Peer, lane: Lane, runs: int) -> Route:
    config = core.config
    if config.route is not None or not lane.nbytes:
        return config.route or Route.PACKED
    choice = core.links.costs(peer.card.host, config.costs, core.clock()).choose(lane.nbytes, runs)
    log.debug("from %s, %s", peer.name, choice.why())
    return choice.route


def _want(core: Core, state: receiving.Receiving, source: receiving.Source, asked: Asked) -> wire.Want:
    config = core.config
    told = source.direct and source.verb is wire.Verb.PUSH
    return wire.Want(
        state.request,
        state.generation,
        asked.positions.start,
        asked.positions.stop,
        Route.DIRECT if source.direct else Route.PACKED,
        config.replicas,
        config.costs.chunk_bytes,
        encoded(asked.pages) if told else (),
        config.chunk_layers,
        source.verb,
        config.integrity is Integrity.DIGEST,
        tuple(asked.aux_from),
    )
