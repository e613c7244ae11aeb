"""Core is the state that both halves of a mover share, and their only way to the wire."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from kvmover.errors import KvmoverError, PeerLost, PeerUnknown, RefusedFor
from kvmover.foreign_text import printable
from kvmover.layout.component import Component
from kvmover.layout.pool import Pool
from kvmover.plan.cost import Costs, Route
from kvmover.regions import BoundMemory
from kvmover.repeats import Repeats
from kvmover.shared_memory import HostProcess, MapMode
from kvmover.transfer.arguments import least_chunk_bytes
from kvmover.transfer.config import Exports, Integrity, MoverConfig
from kvmover.transfer.events import Patience
from kvmover.transfer.expected_ends import ExpectedEnds
from kvmover.transfer.memory.arena import slab_bytes
from kvmover.transfer.memory.copier import Copier
from kvmover.transfer.memory.descriptors import InFlight, allocations
from kvmover.transfer.memory.mapped import Mapped, Mappings, exports, shares
from kvmover.transfer.memory.programs import Compiler, OwnMemory, Rules
from kvmover.transfer.memory.staging import Staging
from kvmover.transfer.meter import Count, Meter, Stage
from kvmover.transfer.peers.links import Links
from kvmover.transfer.peers.listeners import own_listeners
from kvmover.transfer.peers.liveness import Liveness
from kvmover.transfer.peers.peer_table import Peer, Peers
from kvmover.transfer.peers.processes import local_process
from kvmover.transfer.protocol.auth import MessageAuth, NoAuth, authentication
from kvmover.transfer.protocol.chunks import End, Lane, related
from kvmover.transfer.protocol.handshake import Place, Rank, interned, interned_pool
from kvmover.transfer.protocol.wire import CURRENT, AnyMessage, Dialect, encode, notes
from kvmover.transfer.result import Ending, Result
from kvmover.transport.base import Revocation, Transport, memory_of, union

if TYPE_CHECKING:
    import torch
import heapq
import math
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

#: A heap is rebuilt when it has so many entries more than twice its keys.
SLACK = 64


@dataclass(slots=True)
class Timers(Generic[Key]):
    """The due times of keys, in seconds, one a key; a key that was taken has no due time.

    An entry that was put off or cancelled stays in the heap until its old time comes (lazy deletion): a timer that is
    put off a thousand times costs one entry.
    """

    _due: dict[Key, float] = field(default_factory=dict["Key", float], init=False)
    _heap: list[tuple[float, int, Key]] = field(default_factory=list["tuple[float, int, Key]"], init=False)
    _entry: dict[Key, float] = field(default_factory=dict["Key", float], init=False)
    _serial: int = field(default=0, init=False)

    def set(self, key: Key, due: float) -> None:
        """Set the due time of `key`, in place of an earlier one. math.inf: never."""
        if due == math.inf:
            self._due.pop(key, None)
            return
        self._due[key] = due
        if due < self._entry.get(key, math.inf):
            self._push(key, due)

    def sooner(self, key: Key, due: float) -> None:
        """Set the due time of `key` unless it is due before."""
        if due < self._due.get(key, math.inf):
            self.set(key, due)

    def cancel(self, key: Key) -> None:
        """Let `key` never be due."""
        self._due.pop(key, None)

    def take(self, now: float, most: int) -> list[Key]:
        """Remove and return the due keys, the longest due first and at most `most`: no more due until set again."""
        taken: list[Key] = []
        while self._heap and self._heap[0][0] <= now and len(taken) < most:
            at, _, key = heapq.heappop(self._heap)
            if self._entry.get(key) != at:
                continue  # a later entry that an earlier one has replaced
            del self._entry[key]
            due = self._due.get(key)
            if due is None:
                continue
            if due > at:  # it was put off: keys that are due before it come first
                self._push(key, due)
                continue
            del self._due[key]
            taken.append(key)
        return taken

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: Key) -> bool:
        return key in self._due

    def _push(self, key: Key, at: float) -> None:
        self._entry[key] = at
        self._serial += 1  # keys need no order, and equal times keep theirs
        heapq.heappush(self._heap, (at, self._serial, key))
        if len(self._heap) > 2 * len(self._due) + SLACK:
            self._rebuild()

    def _rebuild(self) -> None:
        """Drop stale entries. O(keys), after at least as many pushes since the last time."""
        self._entry = dict(self._due)
        self._heap = [(due, number, key) for number, (key, due) in enumerate(self._due.items())]
        self._serial = len(self._heap)
        heapq.heapify(self._heap)


log = logging.getLogger(__name__)


class TimerKind(StrEnum):
    """The purpose of a timer; a Timer adds the peer, attempt or request."""

    PEER = "a peer's ping, or the end of its silence"
    DIAL = "a try at a lost peer"
    REFUSED = "a peer that was told why it has no seat"
    RECEIVE = "an attempt's deadline, or what it says again"
    SEND = "the same of a source's attempt"
    REQUEST = "the deadline of a request that is sent"
    EARLY = "a Want that nobody offers"
    FAREWELL = "a Want and its Done to who has not answered"
    QUARANTINE = "memory that a peer may still write"
    TOMBSTONES = "what is remembered of the past"
    ASK = "what peers are asked, and have not answered"


#: Attempts that are told of a lost peer in one poll, some 0.1 ms each: other messages are heard in between.
MAX_LOSSES = 16

#: A TimerKind, and the peer, attempt or request.
Timer = tuple[TimerKind, Hashable]


@dataclass(slots=True, eq=False)
class Core:
    """The parts of a mover.

    `sandbox`: memory that peers may write to measure the link, empty if they may not. `later`: calls to run in order,
    outside the event being handled. `losses`: an iterator a lost peer; a step of it tells one attempt. `outbox`:
    encoded messages by peer that have not left. `wall_ns`: nanoseconds since 1970, to which generations are held.
    `in_pages`: a row of some component is of several tokens.
    """

    transport: Transport
    config: MoverConfig
    end: End
    card: Rank
    pools: tuple[Pool, ...]
    copier: Copier
    outgoing: Staging
    incoming: Staging
    clock: Callable[[], float]
    links: Links
    sandbox: torch.Tensor
    mappings: Mappings
    liveness: Liveness
    auth: MessageAuth | NoAuth = field(default_factory=NoAuth)
    peers: Peers = field(default_factory=Peers)
    meter: Meter = field(default_factory=Meter)
    watchers: list[Callable[[Ending], None]] = field(default_factory=list["Callable[[Ending], None]"])
    lost: deque[tuple[str, str]] = field(default_factory=deque["tuple[str, str]"])
    later: deque[Callable[[], None]] = field(default_factory=deque["Callable[[], None]"])
    losses: deque[Iterator[None]] = field(default_factory=deque["Iterator[None]"])
    outbox: dict[str, list[bytes]] = field(default_factory=dict[str, "list[bytes]"])
    timers: Timers[Timer] = field(default_factory=Timers[Timer])
    expected_ends: ExpectedEnds = field(default_factory=ExpectedEnds)
    repeats: Repeats = field(default_factory=Repeats)
    wall_ns: Callable[[], int] = time.time_ns
    dialect: Dialect = CURRENT
    components: tuple[Component, ...] = field(init=False)
    in_pages: bool = field(init=False)
    bound: tuple[BoundMemory, ...] = field(init=False)
    compiler: Compiler = field(init=False)

    def __post_init__(self) -> None:
        self.bound = tuple(BoundMemory(pool.tensors) for pool in self.pools)
        self.compiler = Compiler(self.copier.device)
        self.components = tuple(pool.component for pool in self.end.pools)  # interned, as the pools are
        self.in_pages = any(component.row_tokens > 1 for component in self.components)

    def seat(self, peer: Peer) -> tuple[str, ...]:
        """Seat an admitted peer and have its copies compiled. Returns the names of peers that lost their seats."""
        config = self.config
        if self.compiler.compiles:
            rules = Rules(config.replicas, config.sms, config.integrity is Integrity.DIGEST, config.engine)
            memory = OwnMemory(self.bound, self.outgoing.bound, self.incoming.bound, self._mapped(peer))
            self.compiler.seated(peer.name, self.end, peer.end, memory, rules)
        now = self.clock()
        self.liveness.seated(peer.name, now)
        self.timers.sooner((TimerKind.PEER, peer.name), self.liveness.due(peer.name))
        return self.peers.add(peer, now, local_process(peer.card, self.mappings.machine))

    def _mapped(self, peer: Peer) -> Mapped:
        """Return the pools of a peer that copies here may touch; empty if they do not, or cannot.

        Mapped in the calling thread, which copies: the kernels follow from where the pools lie.
        """
        own, theirs, replicas = self.end, peer.end, self.config.replicas
        to = related(self.components, own.fleet, theirs.fleet, replicas).destinations_of(own.rank)
        of = related(self.components, theirs.fleet, own.fleet, replicas).sources_of(own.rank)
        return (self.mappings.pools(peer, MapMode.READ) or ()) if theirs.rank in to | of else ()

    @property
    def revocation(self) -> Revocation:
        """The configured Revocation, or else the transport's: whether deregistering memory ends peers' access to it."""
        return self.config.revocation or self.transport.revocation

    @property
    def patience(self) -> Patience:
        """The waiting times of an attempt that begins now, on either side."""
        return Patience(self.config.deadline_s, self.config.drain_s, self.config.resend_s)

    @property
    def moving_s(self) -> float:
        """Seconds of polls spent on copies and posts so far: copies on a GPU take no time of a poll."""
        stages = self.meter.stages
        copied_s = stages[Stage.GATHER].sum_s + stages[Stage.SCATTER].sum_s if self.copier.inline else 0.0
        return stages[Stage.POST].sum_s + copied_s

    def costs(self, host: str) -> Costs:
        """Returns the config's costs, with the measured ones of the path to `host` in their place."""
        return self.links.costs(host, self.config.costs, self.clock())

    def expect(self, host: str, route: Route, lane: Lane) -> None:
        """Expect the end of a lane's transfer, from or to a rank of `host`, that begins now by `route`."""
        now, us = self.clock(), self.costs(host).us(route, lane.nbytes, lane.direct_runs)
        self.expected_ends.add(now + us / 1e6, now)

    def stamp_us(self) -> int:
        """Return this side's clock in microseconds, which a WriteLease will echo."""
        return int(self.clock() * 1e6)

    def remembered_until(self) -> float:
        """Return the time until which an attempt that ends now is remembered: peers have given it up by then."""
        return self.clock() + self.config.deadline_s + self.config.drain_s

    def say(self, peer: str, message: AnyMessage) -> None:
        """Queue a control message: it leaves with `flush`, with all other messages of this poll to the peer.

        A message that the peer's protocol version lacks is not sent.
        """
        if self.dialect.since:
            connected = self.peers.get(peer)
            if not self.dialect.knows(connected.version if connected else self.dialect.speaks[0], message):
                return
        self.post(peer, encode(message))

    def post(self, peer: str, encoded: bytes) -> None:
        """Queue an encoded control message; see `say`."""
        self.meter.add(Count.MESSAGES)
        self.outbox.setdefault(peer, []).append(encoded)

    def flush(self) -> None:
        """Send all queued messages. An unreachable peer is reported lost, which ends every wait on it."""
        while self.outbox:
            self.flush_to(next(iter(self.outbox)))

    def flush_to(self, peer: str) -> None:
        """Send the messages queued for one peer: before a write to it, whose note would overtake them."""
        if peer not in self.outbox:
            return
        messages = self.outbox.pop(peer)
        for note in notes(messages) if len(messages) > 1 else messages:
            self.meter.add(Count.NOTES)
            try:
                self.transport.notify(peer, self.auth.sign(peer, note))
            except (PeerLost, PeerUnknown) as error:
                self.lost.append((peer, str(error)))
                return

    def tell_losses(self) -> None:
        """Tell a few attempts that their peers are lost; the next polls tell the others."""
        for _ in range(MAX_LOSSES):
            while self.losses and next(self.losses[0], self) is self:
                self.losses.popleft()

    def awaits(self, peer: str) -> None:
        """Record one more answer awaited from a peer, which is pinged until all have come."""
        if self.liveness.awaits(peer):
            self.timers.sooner((TimerKind.PEER, peer), self.liveness.due(peer))

    def awaits_no_more(self, peer: str) -> None:
        """Record one answer less awaited from a peer."""
        self.liveness.awaits_no_more(peer)

    def refused(self, peer: str, refused_for: RefusedFor, words: str) -> None:
        """Count a peer, or a request of it, that was turned away, and warn of it once a minute."""
        self.meter.turned_away(refused_for)
        self.warn(peer, refused_for, f"refused {peer}: {words}")

    def warn(self, peer: str, about: StrEnum, words: str) -> None:
        """Log a warning of a peer, once a minute for the same `about`."""
        if (more := self.repeats.more((peer, about), self.clock())) is not None:
            log.warning("%s%s", printable(words), more)

    def contain(self, request: str, act: Callable[..., object], *arguments: object) -> str | None:
        """Call `act`. Returns None, or the reason of its failure.

        An exception concerns one attempt at `request`: the caller ends that attempt for the reason, and other requests
        go on.
        """
        try:
            act(*arguments)
        except Exception as error:
            return self.fault(request, error)
        return None

    def fault(self, request: str, error: Exception) -> str:
        """Count and log the exception being handled. Returns the reason for which the attempt at `request` fails."""
        self.meter.add(Count.FAULTS)
        log.exception("request %s failed on this side", request, extra={"request": request})
        words = str(error) if isinstance(error, KvmoverError) else f"{type(error).__name__}: {error}"
        return f"{self.card.place.text()} failed: {words}"

    def ended(self, verb: Literal["send", "receive"], request: str, result: Result) -> None:
        """Tell the watchers of an ended transfer. A watcher's exception is logged, and fails no transfer."""
        if not self.watchers:
            return
        ending = Ending(*self.card.place.seat, verb, request, result)
        for watcher in self.watchers:
            try:
                watcher(ending)
            except Exception:
                log.exception("a watcher of transfers failed at %s", request, extra={"request": request})

    def soon(self, call: Callable[[int | None], None]) -> Callable[[int | None], None]:
        """Return a callback that has the mover's loop run `call`, not the code that finishes an operation."""
        return lambda digest: self.later.append(lambda: call(digest))


def assembled(
    transport: Transport,
    place: Place,
    pools: Sequence[Pool],
    config: MoverConfig,
    clock: Callable[[], float],
    before: Core | None = None,
) -> Core:
    """Build a Core that owns two arenas and memory for probes, on the pools' device. Raises LayoutError.

    `before`: the Core of the incarnation that has ended, whose arenas and counts are reused: peers may still write
    quarantined memory of `incoming`.
    """
    import torch

    device = pools[0].tensors[0].device
    if before is None:
        chunk_bytes = max(config.costs.chunk_bytes, least_chunk_bytes(pools, config.arena_bytes))
        outgoing = Staging.of(config.arena_bytes, 0, device, config.exports)  # peers only read: no harm, however late
        slab = slab_bytes(config.arena_bytes, chunk_bytes, config.revocation or transport.revocation)
        incoming = Staging.of(config.arena_bytes, slab, device, config.exports)
    else:
        outgoing, incoming = before.outgoing.emptied(), before.incoming
    probed = torch.zeros(config.sandbox_bytes, dtype=torch.uint8, device=device)
    sandbox, memories = memory_of(probed) if config.sandbox_bytes else None, tuple(map(allocations, pools))
    ours = [outgoing.memory, *map(incoming.slab, range(incoming.arena.slabs)), *([sandbox] if sandbox else [])]
    for memory in union((*(memory for pool in memories for memory in pool), *ours)):
        transport.register(memory)
    specs, shared = tuple(pool.spec for pool in pools), shares(memories)
    exported = exports(memories, device) if config.exports is Exports.POOLS else ()
    mappings = Mappings(bool(shared or exported), device, memories[0][0].kind)
    card = Rank(
        place,
        specs,
        memories,
        incoming.memory,
        outgoing.memory,
        transport.metadata(),
        socket.gethostname(),
        sandbox,
        shared,
        mappings.machine,
        registration=incoming.arena.registration,
        process=HostProcess.own() if mappings.machine else None,
        listeners=own_listeners() if mappings.machine else (),
        exports=exported,
    )
    made = Core(
        transport,
        config,
        End(interned(place.fleet), place.rank, tuple(map(interned_pool, specs))),
        card,
        tuple(pools),
        Copier(device, config.sms, config.engine),
        outgoing,
        incoming,
        clock,
        Links(transport, type(transport).__name__, sandbox, InFlight(transport)),
        probed,
        mappings,
        Liveness(config.ping_s, config.silence_s),
        authentication(config.keys, transport.name),
    )
    if before is not None:
        made.meter, made.watchers, made.wall_ns = before.meter, before.watchers, before.wall_ns
    return made
