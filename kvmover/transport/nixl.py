"""A NixlTransport is NIXL as the transport, guarded against every measured trap."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvmover.errors import (
    DeadlineExceeded,
    DescriptorError,
    LeaseOver,
    PeerLost,
    PeerRefused,
    PeerUnknown,
    TransportError,
    TransportUnavailable,
)
from kvmover.transport.base import (
    Completed,
    Descriptors,
    DeviceLike,
    Event,
    Failed,
    Memory,
    MemoryKind,
    Note,
    Revocation,
    Timing,
    Transport,
)
from kvmover.transport.checks import Operation, Ranges, check_note, touches
from kvmover.transport.envelope import TransportCard, seal, unseal
from kvmover.transport.nics import nics_near, only
from kvmover.transport.nixl_agent import Handle, NixlAgent, spare_forks, start_agent

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    card: TransportCard
    ranges: Ranges


@dataclass(slots=True)
class _Flight:
    """A posted operation. `handle`: None once its state is unknown. `told`: its event is out."""

    ticket: int
    peer: str
    local: Descriptors
    deadline: float
    deadline_s: float
    handle: Handle | None
    begun: float
    posted: float = math.inf
    told: bool = False


class NixlTransport(Transport):
    """A transport over one NIXL agent, for the process that made it: a forked child hangs in NIXL's progress thread.

    With `cma` (processes of one host) `write` and `read` copy before they return, 5-10 us a run.
    """

    def __init__(
        self,
        name_hint: str,
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 0,
        clock: Callable[[], float] = time.monotonic,
        device: DeviceLike | None = None,
    ) -> None:
        """Start an agent. `device`: of the rank's pools; of a GPU the nearest NICs carry, and `nics` has their ports.

        `nics` is () where UCX chooses: without a GPU or RDMA, and where UCX_NET_DEVICES is set. Raises
        TransportUnavailable.
        """
        self.nics = () if device is None or device.index is None else nics_near(device.index)
        with only(self.nics):
            self._agent: NixlAgent | None = start_agent(name_hint, backends, num_threads)
        self._name = self._agent.name
        self._telemetry = self._agent.telemetry
        self._clock = clock
        self._pid = os.getpid()
        self._ranges = Ranges()
        self._registered: dict[Memory, Any] = {}
        self._peers: dict[str, _Peer] = {}
        self._lost: dict[str, str] = {}
        self._retired: set[str] = set()
        # Of the retired peers, those whose endpoints UCX has failed.
        self._dropped: set[str] = set()
        self._flights: dict[int, _Flight] = {}
        self._events: list[Event] = []
        self._tickets = 0
        spare_forks(self)

    @property
    def name(self) -> str:
        return self._name

    @property
    def revocation(self) -> Revocation:
        """Returns UNPROVEN: over UCX's tcp and cma a write by old metadata lands in deregistered memory (1.5.1,
        measured).
        """
        return Revocation.UNPROVEN

    def unsettled(self) -> frozenset[int]:
        """Returns failed tickets that may still touch memory, some until `close`, others until NIXL releases it."""
        return frozenset(flight.ticket for flight in self._flights.values() if flight.told)

    def register(self, memory: Memory) -> None:
        agent = self._ready()
        self._ranges.add(memory)
        try:
            row = (memory.address, memory.nbytes, memory.device, "")
            self._registered[memory] = agent.nixl.register_memory([row], memory.kind.value)
        except agent.errors as error:
            self._ranges.remove(memory)
            cause = "; is UCX's CUDA support there?" if memory.kind is MemoryKind.DEVICE else ""
            raise TransportUnavailable(f"NIXL cannot register {memory}: {error}{cause}") from error

    def deregister(self, memory: Memory) -> None:
        """End peers' access to `memory`. Raises DescriptorError while an operation, even an unsettled one, uses it."""
        agent = self._ready()
        busy = [flight.ticket for flight in self._flights.values() if touches(flight.local, memory)]
        if busy and memory in self._ranges:
            raise DescriptorError(f"{memory} is in use by the operations {busy}")
        self._ranges.remove(memory)
        agent.nixl.deregister_memory(self._registered.pop(memory))

    def metadata(self) -> bytes:
        return seal(TransportCard.of("nixl", self._name, self._ranges, self._ready().nixl.get_agent_metadata()))

    def identify(self, metadata: bytes) -> str:
        return unseal(metadata, "nixl").name

    def connect(self, metadata: bytes) -> str:
        """Load a peer's metadata, unless older than or equal to that held, and return its name.

        Raises PeerRefused; PeerLost for a name that was lost; TransportError where operations in flight forbid it.
        """
        agent = self._ready()
        card = unseal(metadata, "nixl")
        if card.name == self._name:
            raise PeerRefused(f"{card.name} is this side's own name")
        if card.name in self._lost:
            raise PeerLost(self._lost[card.name])
        self._sweep(agent)
        if card.name in self._retired:
            raise TransportError(f"operations to {card.name} from before it was disconnected are still in flight")
        known = self._peers.get(card.name)
        if known is not None and known.card.revision >= card.revision:
            return card.name
        ranges = card.ranges()
        if known is not None and not known.ranges.items() <= ranges.items():
            # Loading adds to the ranges that NIXL has, even with operations in flight, but a range that was registered
            # anew would keep its old remote key.
            if any(flight.peer == card.name for flight in self._flights.values()):
                raise TransportError(f"{card.name} deregistered memory while operations to it are in flight")
            agent.nixl.remove_remote_agent(card.name)
        self._load_card(agent, card)
        self._peers[card.name] = _Peer(card, ranges)
        return card.name

    def _load_card(self, agent: NixlAgent, card: TransportCard) -> None:
        try:
            held: bytes = agent.nixl.add_remote_agent(card.agent)
            loaded = held.decode(errors="replace")
            if held != card.name.encode():  # bytes, for NIXL's names may be any
                agent.nixl.remove_remote_agent(held)
                raise PeerRefused(f"metadata of {card.name} holds the agent {loaded}")
            # Else the first transfer waits 0.1-0.5 s. This returns at once and connects in the background.
            agent.nixl.make_connection(loaded)
        except agent.errors as error:
            agent.nixl.remove_remote_agent(card.name)
            self._peers.pop(card.name, None)
            raise PeerRefused(f"NIXL does not take the metadata of {card.name}: {error}") from error

    def disconnect(self, peer: str) -> None:
        agent = self._ready()
        self._lost.pop(peer, None)
        if self._peers.pop(peer, None) is not None:
            self._retired.add(peer)
        for flight in self._flights.values():
            if flight.peer == peer and not flight.told:
                self._tell(flight, PeerUnknown(f"disconnected from {peer}"))
        self._sweep(agent)

    def write(
        self,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        note: bytes,
        deadline_s: float,
        until: float = math.inf,
    ) -> int:
        """Post a write. An empty note is not sent. A failed write and its note may still land."""
        return self._post(Operation("WRITE", peer, local, remote, note, deadline_s, until))

    def read(self, peer: str, local: Descriptors, remote: Descriptors, note: bytes, deadline_s: float) -> int:
        return self._post(Operation("READ", peer, local, remote, note, deadline_s))

    def _post(self, post: Operation) -> int:
        agent, peer = self._ready(), post.peer
        post.check(self._ranges, self._peer(peer).ranges)
        try:
            handle = agent.prepare(post.verb, post.local, peer, post.remote, post.note)
        except agent.gone as error:
            raise self._lose(peer, error) from error
        except agent.errors as error:
            raise DescriptorError(f"NIXL refuses {post.verb} of {post.local.count} runs to {peer}: {error}") from error
        begun = self._clock()
        try:  # preparing took time
            post.check_until(begun)
        except LeaseOver:
            handle.release()
            raise
        self._tickets += 1
        flight = _Flight(self._tickets, peer, post.local, begun + post.deadline_s, post.deadline_s, handle, begun)
        self._flights[flight.ticket] = flight
        self._advance(agent, flight, agent.nixl.transfer)
        flight.posted = self._clock()
        return flight.ticket

    def notify(self, peer: str, note: bytes) -> None:
        """Send `note` without data. It overtakes writes in flight to `peer`."""
        agent = self._ready()
        self._peer(peer)
        check_note(note)
        try:
            agent.nixl.send_notif(peer, note)
        except agent.errors as error:
            raise self._lose(peer, error) from error

    def poll(self) -> list[Event]:
        """Returns events since the last call; a note's sender may be unconnected here."""
        agent = self._ready()
        if self._flights:
            for flight in list(self._flights.values()):
                self._advance(agent, flight, agent.nixl.check_xfer_state)
            for flight in self._flights.values():
                if flight.peer in self._lost and not flight.told:
                    self._tell(flight, PeerLost(self._lost[flight.peer]))
        if self._retired:
            self._sweep(agent)
        for sender, payloads in agent.nixl.get_new_notifs().items():
            self._events += [Note(sender, payload) for payload in payloads]
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Release everything in 10-20 ms. Operations in flight end without an event."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        # Handles that NIXL refuses to release end with the agent, whose last reference goes below.
        refused = contextlib.suppress(*agent.errors)
        for flight in self._flights.values():
            if flight.handle is not None:
                with refused:
                    flight.handle.release()
        for peer in {*self._peers, *self._retired}:
            with refused:
                agent.nixl.remove_remote_agent(peer)
        for handle in self._registered.values():
            with refused:
                agent.nixl.deregister_memory(handle)
        for table in (self._flights, self._peers, self._retired, self._dropped, self._registered, self._events):
            table.clear()

    def _ready(self) -> NixlAgent:
        if self._agent is None:
            raise TransportError(f"{self._name} is closed")
        if os.getpid() != self._pid:
            raise TransportError(f"{self._name} belongs to process {self._pid}: start workers by spawn, not fork")
        return self._agent

    def _peer(self, peer: str) -> _Peer:
        if peer in self._lost:
            raise PeerLost(self._lost[peer])
        if peer not in self._peers:
            raise PeerUnknown(f"{peer} is not connected")
        return self._peers[peer]

    def _advance(self, agent: NixlAgent, flight: _Flight, step: Callable[[Handle], str]) -> None:
        if flight.handle is None:
            return
        try:
            state = step(flight.handle)
        except agent.errors as error:
            if isinstance(error, agent.gone):
                self._dropped.add(flight.peer)
            if flight.peer in self._dropped:
                # UCX has failed the endpoint and dropped its queue, so it no longer touches local memory (tcp and cma
                # measured). Where one operation spans several rails NIXL may answer at the first that fails; `_sweep`
                # closes the endpoint by force before `poll` hands out the event. Before 1.5, NIXL forgets the other
                # operations of such a peer, and has an error of its own for them.
                self._settle(flight, flight.handle, self._lose(flight.peer, error))
                return
            state = str(error)
        if state == "DONE":
            self._settle(flight, flight.handle, None)
        elif state != "PROC":
            # Not a disconnect, so the memory may still be in use, and NIXL answers the same from now on.
            self._tell(flight, self._lose(flight.peer, state))
            flight.handle.release()
            flight.handle = None
        elif self._clock() >= flight.deadline:
            # The handle stays: releasing it cancels nothing (200 MB more went to a peer that was stopped at the time,
            # from memory that was in use again) and would lose the only witness of the end.
            self._tell(flight, DeadlineExceeded(f"no answer from {flight.peer} within {flight.deadline_s} s"))

    def _tell(self, flight: _Flight, error: TransportError) -> None:
        if not flight.told:
            flight.told = True
            self._events.append(Failed(flight.ticket, flight.peer, error, quiescent=False))

    def _settle(self, flight: _Flight, handle: Handle, error: TransportError | None) -> None:
        timing = self._timing(flight, handle) if error is None and not flight.told else None
        handle.release()
        del self._flights[flight.ticket]
        if flight.told:
            return
        if error is None:
            self._events.append(Completed(flight.ticket, timing))
        else:
            self._events.append(Failed(flight.ticket, flight.peer, error, quiescent=True))

    def _timing(self, flight: _Flight, handle: Handle) -> Timing:
        agent = self._ready()
        if self._telemetry:
            try:
                return agent.timing(handle)
            except agent.errors as error:  # a second process on its Prometheus port, for one
                self._telemetry = False
                log.warning("%s: NIXL's telemetry does not answer (%s); timing by the clock", self._name, error)
        now = self._clock()
        return Timing((min(flight.posted, now) - flight.begun) * 1e6, (now - flight.begun) * 1e6)

    def _lose(self, peer: str, cause: object) -> PeerLost:
        """Mark a peer lost for good."""
        if self._peers.pop(peer, None) is not None:
            self._lost[peer] = f"{peer} is lost: {cause}"
            self._retired.add(peer)
        return PeerLost(self._lost.get(peer, f"{peer} is lost: {cause}"))

    def _sweep(self, agent: NixlAgent) -> None:
        """Unload retired peers once their operations, whose state NIXL would forget, are over."""
        if not self._retired:
            return
        for peer in self._retired - {flight.peer for flight in self._flights.values() if flight.handle is not None}:
            agent.nixl.remove_remote_agent(peer)
            self._retired.discard(peer)
            self._dropped.discard(peer)
