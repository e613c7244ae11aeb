"""Mailbox is the transport that CONTRIBUTING's recipe makes: in one process, of what kvmover.transport has.

It moves the bytes as it posts, so nothing of it is ever in flight.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import time

from kvmover.errors import DescriptorError, PeerLost, PeerRefused, PeerUnknown, TransportError
from kvmover.transport import Completed, Descriptors, Event, Failed, Memory, MemoryKind, Note, Revocation
from kvmover.transport.base import ADDRESS, COUNT, NBYTES, STRIDE
from kvmover.transport.checks import Operation, Ranges, check_note
from kvmover.transport.envelope import TransportCard, seal, unseal

_generations = itertools.count(1)


class Mailbox:
    """Transports of one `street`, a dictionary that all of them are given, reach each other."""

    def __init__(self, street: dict[str, Mailbox], hint: str) -> None:
        self.name = f"{hint}.{next(_generations)}"
        self.revocation = Revocation.UNPROVEN  # old metadata still reaches a range that is registered again
        self.inbox: list[Event] = []
        self.ranges = Ranges()
        self._street = street
        self._peers: dict[str, tuple[int, Ranges]] = {}
        self._lost: set[str] = set()
        self._tickets = itertools.count(1)
        street[self.name] = self

    def register(self, memory: Memory) -> None:
        self._check_open()
        if memory.kind is not MemoryKind.HOST:
            raise DescriptorError(f"a mailbox copies host memory only, got {memory}")
        self.ranges.add(memory)

    def deregister(self, memory: Memory) -> None:
        self._check_open()
        self.ranges.remove(memory)

    def metadata(self) -> bytes:
        self._check_open()
        return seal(TransportCard.of("mailbox", self.name, self.ranges, b""))

    def identify(self, metadata: bytes) -> str:
        return unseal(metadata, "mailbox").name

    def connect(self, metadata: bytes) -> str:
        self._check_open()
        card = unseal(metadata, "mailbox")
        if card.name == self.name:
            raise PeerRefused(f"{card.name} is this side's own name")
        if card.name in self._lost:
            raise PeerLost(f"{card.name} is closed")
        known = self._peers.get(card.name)
        if known is None or known[0] < card.revision:
            self._peers[card.name] = (card.revision, card.ranges())
        return card.name

    def disconnect(self, peer: str) -> None:
        self._check_open()
        self._peers.pop(peer, None)
        self._lost.discard(peer)

    def write(
        self,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        note: bytes,
        deadline_s: float,
        until: float = math.inf,
    ) -> int:
        return self._post(Operation("WRITE", peer, local, remote, note, deadline_s, until))

    def read(self, peer: str, local: Descriptors, remote: Descriptors, note: bytes, deadline_s: float) -> int:
        return self._post(Operation("READ", peer, local, remote, note, deadline_s))

    def notify(self, peer: str, note: bytes) -> None:
        self._known(peer)
        check_note(note)
        self._alive(peer).inbox.append(Note(self.name, note))

    def poll(self) -> list[Event]:
        self._check_open()
        events, self.inbox = self.inbox, []
        return events

    def unsettled(self) -> frozenset[int]:
        return frozenset()

    def close(self) -> None:
        self._street.pop(self.name, None)

    def _post(self, post: Operation) -> int:
        post.check_until(time.monotonic())
        post.check(self.ranges, self._known(post.peer))
        ticket, other = next(self._tickets), self._alive(post.peer)
        try:
            other.ranges.check(post.remote, post.peer)
        except DescriptorError as error:  # the peer has deregistered it since
            self.inbox.append(Failed(ticket, post.peer, error, quiescent=True))
            return ticket
        for (here, nbytes), (there, _) in zip(_runs(post.local), _runs(post.remote), strict=True):
            ctypes.memmove(*((there, here) if post.verb == "WRITE" else (here, there)), nbytes)
        self.inbox.append(Completed(ticket))
        if post.note:
            other.inbox.append(Note(self.name, post.note))
        return ticket

    def _known(self, peer: str) -> Ranges:
        self._check_open()
        if peer in self._lost:
            raise PeerLost(f"{peer} is closed")
        if peer not in self._peers:
            raise PeerUnknown(f"{peer} is not connected")
        return self._peers[peer][1]

    def _alive(self, peer: str) -> Mailbox:
        if peer not in self._street:
            del self._peers[peer]
            self._lost.add(peer)
            raise PeerLost(f"{peer} is closed")
        return self._street[peer]

    def _check_open(self) -> None:
        if self._street.get(self.name) is not self:
            raise TransportError(f"{self.name} is closed")


def _runs(descriptors: Descriptors) -> list[tuple[int, int]]:
    """(address, bytes) of every run."""
    return [
        (int(row[ADDRESS] + turn * row[STRIDE]), int(row[NBYTES]))
        for row in descriptors.table
        for turn in range(row[COUNT])
    ]
