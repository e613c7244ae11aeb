"""Core: what the two halves of a mover share, and the only way they reach the wire."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from kvmover.errors import KvmoverError, PeerLost, PeerUnknown, RefusedFor
from kvmover.layout.component import Component
from kvmover.layout.pool import Pool
from kvmover.regions import BoundMemory
from kvmover.repeats import Repeats
from kvmover.shared_memory import HostProcess, MapMode
from kvmover.transfer.arguments import least_chunk_bytes
from kvmover.transfer.config import Exports, Integrity, MoverConfig
from kvmover.transfer.events import Patience
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
from kvmover.transfer.peers.processes import local_process
from kvmover.transfer.peers.table import Peer, Peers
from kvmover.transfer.protocol.auth import MessageAuth, NoAuth, authentication
from kvmover.transfer.protocol.chunks import End, related
from kvmover.transfer.protocol.handshake import Place, Rank, interned, interned_pool
from kvmover.transfer.protocol.wire import AnyMessage, encode, notes
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
    """Keys, each with the time in seconds at which it is due. A key has one time; one that was taken has none.

    An entry that was put off or cancelled stays in the heap until its old time comes (lazy deletion): a timer that is
    put off a thousand times costs one entry.
    """

    _due: dict[Key, float] = field(default_factory=dict["Key", float], init=False)
    _heap: list[tuple[float, int, Key]] = field(default_factory=list["tuple[float, int, Key]"], init=False)
    _entry: dict[Key, float] = field(default_factory=dict["Key", float], init=False)
    _serial: int = field(default=0, init=False)

    def set(self, key: Key, due: float) -> None:
        """Let `key` be due then, and not when it was before. math.inf: never."""
        if due == math.inf:
            self._due.pop(key, None)
            return
        self._due[key] = due
        if due < self._entry.get(key, math.inf):
            self._push(key, due)

    def sooner(self, key: Key, due: float) -> None:
        """Let `key` be due then, unless it is due before."""
        if due < self._due.get(key, math.inf):
            self.set(key, due)

    def cancel(self, key: Key) -> None:
        """Let `key` never be due."""
        self._due.pop(key, None)

    def take(self, now: float, most: int) -> list[Key]:
        """The keys that are due, the longest due first and at most so many: they are due no more until set again."""
        taken: list[Key] = []
        while self._heap and self._heap[0][0] <= now and len(taken) < most:
            at, _, key = heapq.heappop(self._heap)
            if self._entry.get(key) != at:
                continue  # a later entry that an earlier one has replaced
            del self._entry[key]
            due = self._due.get(key)
            if due is None:
                continue
            if due > at:  # it was put off: it comes after what is due before it
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
        """Drop what is stale. O(keys), and at least so many entries were pushed since the last time."""
        self._entry = dict(self._due)
        self._heap = [(due, number, key) for number, (key, due) in enumerate(self._due.items())]
        self._serial = len(self._heap)
        heapq.heapify(self._heap)


log = logging.getLogger(__name__)


class TimerKind(StrEnum):
    """What a timer is about; beside it stands whose it is."""

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


#: A TimerKind, and the peer, attempt or request.
Timer = tuple[TimerKind, Hashable]


@dataclass(slots=True, eq=False)
class Core:
    """The parts of a mover. `sandbox` is what peers may write to measure the way here, empty where they may not.
    `later` holds what must run outside the event being handled, in order. `outbox`: what was said to whom and has not
    left, encoded. `wall_ns`: nanoseconds since 1970, which generations are held to.
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
    outbox: dict[str, list[bytes]] = field(default_factory=dict[str, "list[bytes]"])
    timers: Timers[Timer] = field(default_factory=Timers[Timer])
    repeats: Repeats = field(default_factory=Repeats)
    wall_ns: Callable[[], int] = time.time_ns
    components: tuple[Component, ...] = field(init=False)
    bound: tuple[BoundMemory, ...] = field(init=False)
    compiler: Compiler = field(init=False)

    def __post_init__(self) -> None:
        self.bound = tuple(BoundMemory(pool.tensors) for pool in self.pools)
        self.compiler = Compiler(self.copier.device)
        self.components = tuple(pool.component for pool in self.end.pools)  # interned, as the pools are

    def seat(self, peer: Peer) -> tuple[str, ...]:
        """Seat a peer that was admitted, and have its copies compiled; the names of those whose seats it took."""
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
        """Pools of a peer that copies of ours may touch; empty where they do not, or cannot. Mapped here, in the thread
        that copies: the kernels follow from where they lie.
        """
        own, theirs, replicas = self.end, peer.end, self.config.replicas
        to = related(self.components, own.fleet, theirs.fleet, replicas).destinations_of(own.rank)
        of = related(self.components, theirs.fleet, own.fleet, replicas).sources_of(own.rank)
        return (self.mappings.pools(peer, MapMode.READ) or ()) if theirs.rank in to | of else ()

    @property
    def revocation(self) -> Revocation:
        """Whether to deregister memory ends what peers may do to it."""
        return self.config.revocation or self.transport.revocation

    @property
    def patience(self) -> Patience:
        """What an attempt that begins now waits for, on either side."""
        return Patience(self.config.deadline_s, self.config.drain_s, self.config.resend_s)

    @property
    def moving_s(self) -> float:
        """Seconds of polls that went into copies and posts so far: copies on a GPU take none of a poll."""
        stages = self.meter.stages
        copied_s = stages[Stage.GATHER].sum_s + stages[Stage.SCATTER].sum_s if self.copier.inline else 0.0
        return stages[Stage.POST].sum_s + copied_s

    def stamp_us(self) -> int:
        """This side's clock, for what a WriteLease will echo."""
        return int(self.clock() * 1e6)

    def remembered_until(self) -> float:
        """How long an attempt that ends now is remembered: a peer that missed its end has given it up by then."""
        return self.clock() + self.config.deadline_s + self.config.drain_s

    def say(self, peer: str, message: AnyMessage) -> None:
        """Send a control message, with all else that this poll says to the peer: it leaves with `flush`."""
        self.post(peer, encode(message))

    def post(self, peer: str, encoded: bytes) -> None:
        """As `say`, for a message that is bytes already."""
        self.meter.add(Count.MESSAGES)
        self.outbox.setdefault(peer, []).append(encoded)

    def flush(self) -> None:
        """Send what was said to everybody. Who cannot be reached is reported lost: every wait on it then ends."""
        while self.outbox:
            self.flush_to(next(iter(self.outbox)))

    def flush_to(self, peer: str) -> None:
        """Send what was said to one peer: before a write to it, whose note would overtake."""
        for note in notes(self.outbox.pop(peer, ())):
            self.meter.add(Count.NOTES)
            try:
                self.transport.notify(peer, self.auth.sign(peer, note))
            except (PeerLost, PeerUnknown) as error:
                self.lost.append((peer, str(error)))
                return

    def awaits(self, peer: str) -> None:
        """Something more is awaited from a peer: it is pinged while that is so."""
        if self.liveness.awaits(peer):
            self.timers.sooner((TimerKind.PEER, peer), self.liveness.due(peer))

    def awaits_no_more(self, peer: str) -> None:
        """One thing less is awaited from a peer."""
        self.liveness.awaits_no_more(peer)

    def refused(self, peer: str, refused_for: RefusedFor, words: str) -> None:
        """A peer, or a request of it, was turned away: count it, and say so once a minute."""
        self.meter.turned_away(refused_for)
        self.warn(peer, refused_for, f"refused {peer}: {words}")

    def warn(self, peer: str, about: StrEnum, words: str) -> None:
        """Write a warning of what a peer does, once a minute of those `about` the same."""
        if (more := self.repeats.more((peer, about), self.clock())) is not None:
            log.warning("%s%s", words, more)

    def contain(self, request: str, act: Callable[..., object], *arguments: object) -> str | None:
        """Why `act` failed, or None. Whatever it raises is the affair of one attempt at `request`: who calls this ends
        that attempt for this reason, and others never hear of it.
        """
        try:
            act(*arguments)
        except Exception as error:
            self.meter.add(Count.FAULTS)
            log.exception("request %s failed on this side", request, extra={"request": request})
            words = str(error) if isinstance(error, KvmoverError) else f"{type(error).__name__}: {error}"
            return f"{self.card.place.text()} failed: {words}"
        return None

    def ended(self, verb: Literal["send", "receive"], request: str, result: Result) -> None:
        """Tell those that watch. What one of them raises is its own affair: no transfer fails for it."""
        if not self.watchers:
            return
        ending = Ending(*self.card.place.seat, verb, request, result)
        for watcher in self.watchers:
            try:
                watcher(ending)
            except Exception:
                log.exception("a watcher of transfers failed at %s", request, extra={"request": request})

    def soon(self, call: Callable[[int | None], None]) -> Callable[[int | None], None]:
        """`call`, but from the mover's loop instead of from inside whoever finishes."""
        return lambda digest: self.later.append(lambda: call(digest))


def assembled(
    transport: Transport,
    place: Place,
    pools: Sequence[Pool],
    config: MoverConfig,
    clock: Callable[[], float],
    before: Core | None = None,
) -> Core:
    """Takes two arenas and the sandbox on the pools' device; who has the Core keeps them alive. Raises LayoutError.

    `before`: the Core of the incarnation that has ended, whose arenas and counts this one has: peers may still write
    what is quarantined in `incoming`.
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
