"""Inbound: runs the receiver's state machines of one rank, leasing regions, scattering chunks and answering sources."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvmover import ranges
from kvmover.errors import PlanError
from kvmover.plan.cost import Route
from kvmover.transfer import receiver, wire
from kvmover.transfer.core import Core
from kvmover.transfer.lane import Lane, plans_between
from kvmover.transfer.memory import region
from kvmover.transfer.peers import Peer
from kvmover.transfer.posts import Pages
from kvmover.transfer.result import Result, Transfer


@dataclass(slots=True, eq=False)
class _Attempt:
    """A request that this rank wants: its state, its page tables, and the lane from each source."""

    state: receiver.Receiving
    transfer: Transfer
    pages: Pages
    lanes: dict[str, Lane]
    runs: int


@dataclass(slots=True, eq=False)
class Inbound:
    """The receiving half of a mover."""

    core: Core
    generation: int
    _attempts: dict[tuple[str, int], _Attempt] = field(default_factory=dict["tuple[str, int]", _Attempt])
    _queue: deque[tuple[_Attempt, str, int]] = field(default_factory=deque["tuple[_Attempt, str, int]"])
    ignored: int = 0

    def receive(self, transfer: Transfer, engine: str, positions: range, pages: Pages) -> None:
        """Ask every source rank of `engine` for its part of `positions`. Raises before anything is asked."""
        core, now = self.core, self.core.clock()
        if any(key[0] == transfer.request for key in self._attempts):
            raise PlanError(f"request {transfer.request} is already being received")
        self.generation += 1
        with ranges.span(ranges.PLAN, transfer.request):
            peers, lanes, runs = self._lanes(engine, positions)
        for lane in lanes.values():
            _check_pages(lane, pages)
        sources: dict[str, receiver.Source] = {}
        for name, lane in lanes.items():
            direct = self._route(lane, runs[name]) is Route.DIRECT
            sources[name] = receiver.Source(len(lane.chunks), direct)
            largest = max((chunk.span_bytes for chunk in lane.chunks), default=0)
            if not direct and not core.incoming.arena.fits(largest):
                raise PlanError(f"a chunk of {largest} bytes does not fit the arena of {core.incoming.arena.nbytes}")
        state = receiver.Receiving(
            transfer.request, self.generation, sources, now + core.config.deadline_s, core.config.drain_s
        )
        attempt = _Attempt(state, transfer, pages, lanes, sum(runs.values()))
        wants = {name: self._want(attempt, name, positions) for name in peers}
        for want in wants.values():
            wire.encode(want)  # a table that no message holds is refused before anything is asked
        self._attempts[transfer.request, self.generation] = attempt
        for name, want in wants.items():
            core.say(name, want)
        state, actions = receiver.start(attempt.state)
        self._apply(attempt, state, actions)

    def _lanes(self, engine: str, positions: range) -> tuple[list[str], dict[str, Lane], dict[str, int]]:
        """The source ranks that could hold any of it, and what each would send."""
        core = self.core
        fleet = core.peers.fleet(engine)
        span = positions if positions else range(positions.start, positions.start + 1)
        plans = plans_between(core.end.pools, fleet, core.end.fleet, span, core.config.replicas)
        ranks = sorted({rank for plan in plans for rank in plan.sources_of(core.end.rank)})
        peers = [core.peers.at(engine, rank) for rank in ranks]
        for peer in peers:
            if peer.card.place.fleet != fleet:  # the two sides would derive different chunks
                raise PlanError(f"{peer.name} is of a fleet {peer.card.place.fleet}, others of {engine} of {fleet}")
        lanes: dict[str, Lane] = {}
        for peer in peers:
            lane = Lane.between(plans, peer.end, core.end, core.config.costs.chunk_bytes)
            lanes[peer.name] = lane if positions else replace(lane, legs=(None,) * len(plans), chunks=())
        return [peer.name for peer in peers], lanes, {name: lane.direct_runs() for name, lane in lanes.items()}

    def _route(self, lane: Lane, runs: int) -> Route:
        config = self.core.config
        return config.route or config.costs.choose(lane.nbytes, max(runs, 1)).route

    def _want(self, attempt: _Attempt, peer: str, positions: range) -> wire.Want:
        state, direct = attempt.state, attempt.state.sources[peer].direct
        return wire.Want(
            state.request,
            state.generation,
            positions.start,
            positions.stop,
            Route.DIRECT if direct else Route.PACKED,
            self.core.config.replicas,
            self.core.config.costs.chunk_bytes,
            tuple(table.astype("<i4").tobytes() for table in attempt.pages) if direct else (),
        )

    def hear(self, peer: Peer, message: wire.About) -> None:
        """A message from a source. Those of attempts that are over are counted and dropped: nothing waits for them."""
        attempt = self._attempts.get((message.request, message.generation))
        if attempt is None:
            self.ignored += 1
            return
        match message:
            case wire.Offered():
                self._step(attempt, receiver.Offered(peer.name))
            case wire.Chunk(chunk=chunk):
                self._step(attempt, receiver.Arrived(peer.name, chunk))
            case wire.Abort(reason=reason):
                self._step(attempt, receiver.PeerAborted(peer.name, reason))
            case wire.Drained():
                self._step(attempt, receiver.PeerDrained(peer.name))
            case _:
                self.ignored += 1

    def knows(self, message: wire.About) -> bool:
        return (message.request, message.generation) in self._attempts

    def lost(self, peer: str, reason: str) -> None:
        for attempt in list(self._attempts.values()):
            self._step(attempt, receiver.PeerGone(peer, reason))

    def abort(self, transfer: Transfer, reason: str) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.transfer is transfer:
                self._step(attempt, receiver.Cancel(reason))

    def close(self, reason: str) -> None:
        """Fail what is open and tell its sources."""
        for attempt in list(self._attempts.values()):
            self._step(attempt, receiver.Cancel(reason))

    def poll(self) -> None:
        """Deadlines, and regions for chunks that wait for one: in the order they asked."""
        for attempt in list(self._attempts.values()):
            self._step(attempt, receiver.Tick())
        arena = self.core.incoming.arena
        while self._queue:
            attempt, peer, chunk = self._queue[0]
            if attempt.state.reason is None and not attempt.state.finished:
                offset = arena.lease(attempt.lanes[peer].chunks[chunk].span_bytes)
                if offset is None:
                    return
                self._step(attempt, receiver.Leased(peer, chunk, offset))
            self._queue.popleft()

    def waits_on(self) -> set[str]:
        return {peer for attempt in self._attempts.values() for peer in attempt.state.sources}

    def _step(self, attempt: _Attempt, event: receiver.Event) -> None:
        state, actions = receiver.step(attempt.state, event, self.core.clock())
        self._apply(attempt, state, actions)

    def _apply(self, attempt: _Attempt, state: receiver.Receiving, actions: Sequence[receiver.Action]) -> None:
        attempt.state = state
        arena = self.core.incoming.arena
        for action in actions:
            match action:
                case receiver.Send(peer, message):
                    self.core.say(peer, message)
                case receiver.Lease(peer, chunk):
                    self._queue.append((attempt, peer, chunk))
                case receiver.Scatter(peer, chunk, offset):
                    self._scatter(attempt, peer, chunk, offset)
                case receiver.Free(offset):
                    arena.release(offset)
                case receiver.Quarantine(offset):
                    arena.quarantine(offset)
                case receiver.Finish(reason, held):
                    self._finish(attempt, reason, bool(held))

    def _scatter(self, attempt: _Attempt, peer: str, chunk: int, offset: int) -> None:
        lane, core = attempt.lanes[peer], self.core
        packed = core.incoming.tensor[offset : offset + lane.chunks[chunk].span_bytes]
        with ranges.span(ranges.SCATTER, attempt.state.request, lane.chunks[chunk].nbytes):
            regions = [
                region(box, [packed], core.pools[component].tensors)
                for component, box in lane.scatter_boxes(chunk, attempt.pages)
            ]
            core.copier.copy(regions, core.soon(lambda: self._step(attempt, receiver.Scattered(peer, chunk))))

    def _finish(self, attempt: _Attempt, reason: str | None, held: bool) -> None:
        state, lanes = attempt.state, attempt.lanes.values()
        del self._attempts[state.request, state.generation]
        attempt.transfer.result = Result(
            reason,
            self.core.clock() - attempt.transfer.started,
            sum(lane.nbytes for lane in lanes),
            attempt.runs,
            sum(len(lane.chunks) for lane in lanes),
            tuple(Route.DIRECT if s.direct else Route.PACKED for s in state.sources.values() if s.chunks),
            sum(bool(lane.chunks) for lane in lanes),
            held,
        )


def _check_pages(lane: Lane, pages: Pages) -> None:
    """Raise PlanError for a page table that does not cover the lane, before a source is asked for anything."""
    if len(pages) != len(lane.dst):
        raise PlanError(f"{len(pages)} page tables for {len(lane.dst)} components")
    for chunk in range(len(lane.chunks)):
        lane.scatter_boxes(chunk, pages)
