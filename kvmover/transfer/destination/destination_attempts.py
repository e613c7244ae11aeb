"""The state of a request that a destination receives, from the first Want until the engine is told how it ended."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
from msgspec.structs import replace

from kvmover.errors import PlanError
from kvmover.plan.cost import BY_HOST, BY_WIRE, Route
from kvmover.shared_memory import Maker
from kvmover.transfer import nvtx_ranges as ranges
from kvmover.transfer.arguments import check_allocated, check_wanted, table_lengths
from kvmover.transfer.config import Integrity
from kvmover.transfer.core import Core
from kvmover.transfer.destination.claims import PageClaims, written
from kvmover.transfer.destination.destination_machine import (
    Event,
    Heard,
    OwnFault,
    PeerDead,
    ReadEnded,
    Receiving,
    Scattered,
    Source,
    WriterChunk,
)
from kvmover.transfer.destination.quarantine import WriteLeases
from kvmover.transfer.events import Cancel, PeerGone, Tick
from kvmover.transfer.memory.arena import ALIGN_BYTES
from kvmover.transfer.memory.chunk_tables import ChunkTables
from kvmover.transfer.memory.programs import Way
from kvmover.transfer.meter import Spent, Stage
from kvmover.transfer.peers.peer_table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.chunk_sets import WriterChunks
from kvmover.transfer.protocol.chunks import Cut, Lane, plans_between, related
from kvmover.transfer.protocol.wire import encoded
from kvmover.transfer.result import Cause, Result, Transfer
from kvmover.transfer.source.writes import Pages

#: The cause of failure by event or message; others are protocol violations of the peer.
_CAUSES: dict[type, Cause] = {
    Cancel: Cause.ABORTED,
    wire.Abort: Cause.PEER_ABORTED,
    PeerGone: Cause.PEER_LOST,
    PeerDead: Cause.PEER_LOST,
    Tick: Cause.DEADLINE,
    ReadEnded: Cause.TRANSPORT,
    Scattered: Cause.INTEGRITY,
    OwnFault: Cause.FAULT,
}


def cause_of(event: Event) -> Cause:
    """Returns why an attempt failed that `event` ended."""
    return _CAUSES.get(type(event.message) if isinstance(event, Heard) else type(event), Cause.PROTOCOL)


Id = tuple[str, int]

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ReceiveAttempt:
    """A request that this rank receives: its state, its page tables, and the lane from each source.

    `positions` of the request are wanted; entries `spans` of each page table are written. `most`: the final number of
    pages in each table; None: all were given with the request. `routes`: the route of each source. `wants`: each
    source's Want, encoded. `writers`: source processes that copy into this rank's pages themselves. `theirs`: page
    tables of sources read from pages to pages. `tables`: of the launches of each source's chunks. `copying`: chunks
    with a copy under way. `faults`: exceptions on this side. `id`: (request, generation).
    """

    state: Receiving
    transfer: Transfer
    positions: range
    pages: Pages
    most: tuple[int, ...] | None
    lanes: dict[str, Lane]
    seats: dict[str, tuple[str, int]]
    runs: int
    routes: dict[str, Route]
    spans: tuple[range, ...]
    writers: dict[str, Maker] = field(default_factory=dict[str, Maker])
    wants: dict[str, bytes] = field(default_factory=dict[str, bytes])
    theirs: dict[str, Pages] = field(default_factory=dict[str, Pages])
    tables: defaultdict[str, ChunkTables] = field(default_factory=partial(defaultdict[str, ChunkTables], ChunkTables))
    aux: dict[int, bytes] = field(default_factory=dict[int, bytes])
    asked: dict[WriterChunk, float] = field(default_factory=dict[WriterChunk, float])
    copying: set[WriterChunk] = field(default_factory=set[WriterChunk])
    cause: Cause | None = None
    resent: int = 0
    faults: int = 0
    spent_s: Spent = field(default_factory=partial(Spent, float))
    id: Id = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.state.request, self.state.generation

    @property
    def is_release(self) -> bool:
        """True for an attempt that asks for no tokens and no payload, and so lets the sources forget the request."""
        return not (self.positions or self.aux or self.state.awaited_aux)

    def name(self, core: Core, pages: Pages, claims: PageClaims) -> frozenset[WriterChunk]:
        """Append pages to the page tables. Returns the chunks that have all their pages now.

        Raises PlanError, and adds no page.
        """
        if self.most is None:
            raise PlanError(f"request {self.transfer.request} was received with all of its pages")
        if len(pages) != len(self.pages):
            raise PlanError(f"{len(pages)} page tables for {len(self.pages)} components")
        longer = tuple(np.concatenate(pair) for pair in zip(self.pages, pages, strict=True))
        check_allocated(longer, core.pools, self.most)
        check_wanted(longer, core.pools, self.positions, core.end.fleet)
        for lane in self.lanes.values():
            lane.check_named(lane.dst, longer)
        claims.take(self.transfer, written(self.spans, longer, tuple(map(len, self.pages))))
        self.pages = longer
        named = tuple(map(len, longer))
        return frozenset(
            (peer, chunk)
            for peer, chunk in self.state.unnamed
            if all(need <= there for need, there in zip(self.lanes[peer].target_needs(chunk), named, strict=True))
        )

    def ask_anew(self, leases: WriteLeases) -> list[str]:
        """Put the page tables so far into the Wants of sources that write into pages. Returns these sources."""
        told = [peer for peer, source in self.state.sources.items() if source.writes_pages and source.chunks]
        for peer in told:
            want = wire.decode(self.wants[peer])
            assert isinstance(want, wire.Want)
            lease = leases.renewed(peer)
            self.wants[peer] = wire.encode(replace(want, pages=encoded(self.pages), lease=lease))
        return told

    def ways(self, peer: str) -> tuple[Way, ...]:
        """Returns the directions in which a source's chunks are copied here, or read for their digests."""
        reads = self.routes[peer] is Route.MAPPED and self.state.sources[peer].verb is wire.Verb.PULL
        return (Way.READ, Way.SCATTER) if reads else (Way.SCATTER,)

    def has_noted(self, peer: str, noted: wire.Noted) -> bool:
        """Returns True if a source has noted all page tables sent to it."""
        whole = self.most is None or not self.state.sources[peer].writes_pages
        return whole or noted.named == tuple(map(len, self.pages))


def close(attempt: ReceiveAttempt, core: Core, quarantined: frozenset[str]) -> None:
    """Set the transfer's result, and count it. A release is not counted: only the engine is told."""
    state, lanes, transfer = attempt.state, attempt.lanes.values(), attempt.transfer
    seconds = core.clock() - transfer.started
    routes = tuple([attempt.routes[peer] for peer, source in state.sources.items() if source.chunks])
    result = Result(
        state.reason,
        seconds,
        sum([lane.nbytes for lane in lanes]),
        attempt.runs,
        sum([source.chunks for source in state.sources.values()]),
        routes,
        len(routes),
        bool(quarantined),
        attempt.cause,
        attempt.resent,
        incomplete(attempt) if state.reason is not None else (),
        attempt.aux,
        dict(attempt.spent_s),
    )
    transfer.end(result)
    if not attempt.is_release:
        core.meter.ended["receive", attempt.cause.value if attempt.cause else "landed"] += 1
        core.meter.took(Stage.RECEIVE, seconds)
        core.ended("receive", transfer.request, result)


def incomplete(attempt: ReceiveAttempt) -> tuple[tuple[int, ...], ...]:
    """Returns, by component, the page table indices of pages that miss a chunk, named or not.

    Chunks read from a source count only once it has confirmed them (Kept).
    """
    missing, state = [set[int]() for _ in attempt.pages], attempt.state
    for peer, lane in attempt.lanes.items():
        for chunk in range(len(lane.chunks)):
            if (peer, chunk) not in state.landed or peer in state.unconfirmed:
                for component, pages in lane.target_pages(chunk):
                    missing[component].update(pages.tolist())
    return tuple(tuple(sorted(pages)) for pages in missing)


def spliced(known: Pages, more: Pages, first: Sequence[int], most: Sequence[int]) -> Pages | None:
    """Returns a source's page tables: `known` ones, with `more` pages from index `first` [component] on, cut to `most`.
    None if a message between them was lost.

    Raises PlanError unless there is one table a component.
    """
    known, first = known or tuple(table[:0] for table in more), first or [0] * len(more)
    if not len(known) == len(more) == len(first) == len(most):
        raise PlanError(f"{len(more)} page tables for {len(most)} components")
    if any(not 0 <= at <= len(there) for at, there in zip(first, known, strict=True)):
        return None
    return tuple(
        there if at + len(new) <= len(there) else np.concatenate([there[:at], new])[:pages]
        for there, new, at, pages in zip(known, more, first, most, strict=True)
    )


class ReceiveRequest(msgspec.Struct, frozen=True, eq=False):
    """The arguments of a receive: `positions` of a request of `engine` into `pages` (None: named later) within
    `deadline_s` seconds, and payloads of the ranks `aux_from`.
    """

    transfer: Transfer
    engine: str
    positions: range
    pages: Pages | None
    deadline_s: float
    aux_from: Sequence[int] = ()


def attempt_of(
    core: Core,
    wanted: ReceiveRequest,
    generation: int,
    leases: WriteLeases,
    claims: PageClaims,
    eager: Callable[[str, int], int | None],
) -> ReceiveAttempt:
    """Returns the attempt, with a Want encoded for each source rank and its pages claimed. Raises PlanError,
    PeerUnknown or LayoutError, and claims no pages then.

    `eager`: reserves a region of a number of bytes for a source of one packed chunk, or returns None.
    """
    config, now = core.config, core.clock()
    pages, most = wanted.pages, None
    with ranges.span(ranges.PLAN, wanted.transfer.request):
        peers, lanes = _lanes(core, wanted)
        runs = {name: lane.direct_runs for name, lane in lanes.items()}
        if pages is None:
            most = table_lengths(core.components, core.end.fleet, core.end.rank, wanted.positions.stop)
            pages = tuple(np.zeros(0, np.int64) for _ in most)
        else:
            for lane in lanes.values():
                lane.check_pages(lane.dst, pages)
    table_bytes = wire.PAGE_ID_BYTES * sum(most or map(len, pages))
    sources: dict[str, Source] = {}
    routes: dict[str, Route] = {}
    cuts: dict[str, Cut] = {}
    writers: dict[str, Maker] = {}
    for peer in peers:
        name, aux = peer.name, peer.card.place.rank in wanted.aux_from
        route = routes[name] = _route(core, peer, lanes[name], runs[name], table_bytes)
        cut = cuts[name] = Cut(config.costs.cut_bytes(route), config.chunk_layers)
        if cut.nbytes != config.costs.chunk_bytes:
            lanes[name] = lanes[name].recut(cut)
        if route is Route.PACKED:
            lanes[name], cuts[name] = _fitting(core, peer, lanes[name], cut)
        sources[name] = Source(len(lanes[name].chunks), route is not Route.PACKED, config.verb, aux)
        if route is Route.MAPPED and config.verb is wire.Verb.PUSH and (writer := core.mappings.maker(peer)):
            writers[name] = writer
    request = wanted.transfer.request
    state = Receiving(request, generation, sources, core.patience, now + wanted.deadline_s, now, now + config.resend_s)
    if most is not None:
        state = replace(state, unnamed=_chunks_of(sources))
    seats = {peer.name: peer.card.place.seat for peer in peers}
    every, spans = sum(runs.values()), _spans(lanes.values(), len(pages))
    attempt = ReceiveAttempt(
        state, wanted.transfer, wanted.positions, pages, most, lanes, seats, every, routes, spans, writers
    )
    wants = {name: _want(core, attempt, name, cuts[name], wanted, leases) for name in lanes}
    for name, want in wants.items():
        attempt.wants[name] = _encoded(want, table_bytes)
    claims.take(attempt.transfer, written(spans, pages, [0] * len(pages)))
    if most is None:
        _reserve_eagerly(attempt, wants, eager)
    return attempt


def _reserve_eagerly(
    attempt: ReceiveAttempt, wants: Mapping[str, wire.Want], eager: Callable[[str, int], int | None]
) -> None:
    """Grant the region of each source of one packed chunk with its Want. All steps that may fail come before, so that
    no region is lost.
    """
    for name, want in wants.items():
        if not attempt.state.sources[name].is_one_packed:
            continue
        at = eager(name, attempt.lanes[name].chunks[0].span_bytes)
        if at is not None:
            attempt.state.regions[name, 0] = at
            attempt.wants[name] = wire.encode(replace(want, grant=wire.Grant(0, at)))


def _chunks_of(sources: Mapping[str, Source]) -> WriterChunks:
    return WriterChunks((name, chunk) for name, source in sources.items() for chunk in range(source.chunks))


def _spans(lanes: Iterable[Lane], components: int) -> tuple[range, ...]:
    """Returns the range of entries that all lanes write, for each page table: a rank's part is contiguous."""
    spans = [range(0)] * components
    for found in {lane.target_spans for lane in lanes}:
        for number, (one, other) in enumerate(zip(spans, found, strict=True)):
            if one and other:
                spans[number] = range(min(one.start, other.start), max(one.stop, other.stop))
            elif other:
                spans[number] = other
    return tuple(spans)


def _encoded(want: wire.Want, table_bytes: int) -> bytes:
    """Returns the encoded Want. Raises PlanError for tables too long for a message, counting pages that are named
    later.
    """
    if want.pages and table_bytes > wire.MAX_TABLE_BYTES:
        over = f"page tables of {table_bytes} bytes are over the limit of {wire.MAX_TABLE_BYTES}"
        raise PlanError(f"{over}; the packed route sends no page tables")
    return wire.encode(want)


def _lanes(core: Core, wanted: ReceiveRequest) -> tuple[list[Peer], dict[str, Lane]]:
    """Returns the source ranks that may hold a part of the request, and the lane from each."""
    config, engine = core.config, wanted.engine
    fleet = core.peers.fleet(engine)
    ranks = related(core.components, fleet, core.end.fleet, config.replicas).sources_of(core.end.rank)
    peers = [core.peers.at(engine, rank) for rank in sorted({*ranks, *wanted.aux_from})]
    plans = plans_between(core.components, fleet, core.end.fleet, wanted.positions, config.replicas)
    cut = Cut(config.costs.chunk_bytes, config.chunk_layers)
    return peers, {peer.name: Lane.between(plans, peer.end, core.end, cut) for peer in peers}


def _fitting(core: Core, peer: Peer, lane: Lane, cut: Cut) -> tuple[Lane, Cut]:
    """Returns the lane recut so that its chunks fit both arenas, and the cut: if one unit of all layers is too large,
    with as few layers as fit. 126 layers of 8 heads of 128, 128-token pages, are 66 MB a unit: 125 layers fit 64 MiB.

    Raises PlanError if one layer of a unit does not fit.
    """
    arena_bytes = min(core.incoming.arena.slab_bytes, peer.card.staging.nbytes)
    arena_bytes = arena_bytes // ALIGN_BYTES * ALIGN_BYTES  # regions are multiples of it
    while (largest := max((chunk.span_bytes for chunk in lane.chunks), default=0)) > arena_bytes:
        layers = cut.layers or max(component.layers for component in core.components)
        if layers == 1 and cut.nbytes <= arena_bytes:
            raise PlanError(f"a chunk of {largest} bytes, of one layer, does not fit the arena of {arena_bytes}")
        if cut.nbytes > arena_bytes:
            cut = Cut(max(1, arena_bytes), cut.layers)
        else:
            cut = Cut(cut.nbytes, max(1, min(layers - 1, layers * arena_bytes // largest)))
        lane = lane.recut(cut)
    return lane, cut


def _route(core: Core, peer: Peer, lane: Lane, runs: int, table_bytes: int) -> Route:
    """Returns the configured route, or the cheapest possible one. Raises PlanError if the configured route is
    impossible.
    """
    config = core.config
    if not lane.nbytes:
        return Route.DIRECT if config.route is Route.DIRECT else Route.PACKED
    if lane.converts:
        lane.check_route(config.route or Route.PACKED)
        return Route.PACKED
    if config.route is Route.MAPPED and not core.mappings.reach(peer, config.verb):
        raise PlanError(
            f"route = mapped, but this rank and {peer.name} cannot map each other's pools: both must be processes of"
            " one host and user with pools in shared memory (Pool.shared), or on GPUs and exported (exports = pools)"
        )
    if config.route is not None:
        return config.route
    if config.verb is wire.Verb.PUSH and table_bytes > wire.MAX_TABLE_BYTES:
        return Route.PACKED  # its page tables exceed a message
    among = BY_HOST if core.mappings.reach(peer, config.verb) else BY_WIRE
    choice = core.costs(peer.card.host).choose(lane.nbytes, runs, among)
    if log.isEnabledFor(logging.DEBUG):
        log.debug("from %s, %s", peer.name, choice.why())
    return choice.route


def _want(
    core: Core, attempt: ReceiveAttempt, peer: str, cut: Cut, wanted: ReceiveRequest, leases: WriteLeases
) -> wire.Want:
    config, state, source = core.config, attempt.state, attempt.state.sources[peer]
    digests = config.integrity is Integrity.DIGEST
    if digests:
        core.compiler.digested(peer)
    return wire.Want(
        state.request,
        state.generation,
        wanted.positions.start,
        wanted.positions.stop,
        attempt.routes[peer],
        config.replicas,
        cut.nbytes,
        encoded(attempt.pages) if source.writes_pages else (),
        cut.layers,
        source.verb,
        digests,
        tuple(dict.fromkeys(wanted.aux_from)),
        leases.renewed(peer),
        content=wanted.transfer.content,
    )
