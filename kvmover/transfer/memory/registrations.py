"""The renewal of registrations: a destination registers anew slabs that only lost peers may write; a source loads new
keys.

Writes of a lost peer can't be waited for. They are posted for the old registration, and the transport proves that none
of them lands under the new one. So its regions are free at once, instead of `linger_s` after its lease.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvmover.errors import PeerLost, PeerRefused, TransportError
from kvmover.transfer.core import Core
from kvmover.transfer.destination.quarantine import Quarantine
from kvmover.transfer.memory.arena import renewal
from kvmover.transfer.meter import Count
from kvmover.transfer.protocol import wire
from kvmover.transport.base import Revocation

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Renewals:
    """The registrations of the incoming arena. `_known` [source]: the newest that it knows or was sent."""

    core: Core
    quarantine: Quarantine
    _known: dict[str, int] = field(default_factory=dict[str, int])
    _broken: frozenset[int] = frozenset()

    def renew(self) -> list[int]:
        """Register anew all slabs that only lost peers may write. Returns the freed offsets. Of slabs still in use by
        others, one takes no reservations until it can be renewed.
        """
        core, arena = self.core, self.core.incoming.arena
        if core.revocation is Revocation.UNPROVEN:
            arena.shut = self._broken
        if core.revocation is Revocation.UNPROVEN or not (arena.shut or arena.quarantined_bytes):
            return []
        lost = self.quarantine.offsets(lambda peer: core.peers.get(peer) is None)
        found = renewal(arena, lost)
        freed = [offset for slab in found.now for offset in self._renew(slab)]
        arena.shut = self._broken | ({found.next} if found.next is not None else frozenset())
        if found.now:
            core.card = replace(core.card, transport=core.transport.metadata(), registration=arena.registration)
        return freed

    def _renew(self, slab: int) -> list[int]:
        core, memory = self.core, self.core.incoming.slab(slab)
        core.transport.deregister(memory)
        freed = core.incoming.arena.renew(slab)
        self.quarantine.revoked(freed)
        core.meter.add(Count.RENEWED_SLABS)
        log.info("slab %d of the arena is registered anew: %d regions of lost peers are free", slab, len(freed))
        try:
            core.transport.register(memory)
        except TransportError as error:
            self._broken |= {slab}
            log.error("slab %d of the arena cannot be registered again and is out of use: %s", slab, error)
        return freed

    def offered(self, source: str, registration: int) -> None:
        """Record the registration that a source knows; it may have missed later Registered messages."""
        self._known[source] = registration

    def lost(self, source: str) -> None:
        """Forget the registration that a lost source knew."""
        self._known.pop(source, None)

    def granted(self, source: str, granted: wire.Granted) -> wire.Granted:
        """Returns a grant stamped with the registration that `source` needs, after sending Registered if it doesn't
        know it.
        """
        arena = self.core.incoming.arena
        needed = max((arena.registration_of(grant.offset) for grant in granted.grants), default=0)
        if needed > self._known.get(source, 0):
            self._known[source] = arena.registration
            self.core.say(source, wire.Registered(self.core.card.transport, arena.registration))
        assert needed <= self._known.get(source, 0), f"{source} is granted memory of registration {needed} without keys"
        return replace(granted, registration=needed)


@dataclass(slots=True, eq=False)
class Registrations:
    """The newest registration `_loaded` by destination, and in `waiting` one until operations under way have ended."""

    core: Core
    _loaded: dict[str, int] = field(default_factory=dict[str, int])
    waiting: dict[str, wire.Registered] = field(default_factory=dict[str, wire.Registered])

    def known(self, peer: str) -> int:
        """Returns the newest registration to which writes to a destination are posted."""
        seated = self.core.peers.get(peer)
        return max(self._loaded.get(peer, 0), seated.card.registration if seated is not None else 0)

    def stamped(self, peer: str, offer: wire.Offered) -> wire.Offered:
        """Returns an offer with this side's clock, for a lease, and the destination's registration known here."""
        return replace(offer, stamp_us=self.core.stamp_us(), registration=self.known(peer))

    def waits(self, peer: str) -> bool:
        """Returns True if no write may be posted to a destination until those under way have ended."""
        return peer in self.waiting

    def heard(self, peer: str, message: wire.Registered) -> None:
        """Load a newer registration, now or once the transport can. Malformed ones, and those of another peer, are
        dropped.
        """
        waiting = self.waiting.get(peer)
        if message.registration > max(self.known(peer), waiting.registration if waiting is not None else 0):
            self.waiting[peer] = message
            self._load(peer)
        left = self.waiting.get(peer)
        assert left is None or left.registration > self.known(peer), f"{peer} waits for keys that are loaded already"

    def _load(self, peer: str) -> None:
        message = self.waiting[peer]
        try:
            name = self.core.transport.identify(message.transport)
            if name != peer:
                raise PeerRefused(f"{peer} sent the registrations of {name}")
            self.core.transport.connect(message.transport)
            self._loaded[peer] = message.registration
            assert self.known(peer) >= message.registration, f"{message.registration} of {peer} is loaded over a newer"
        except (PeerRefused, PeerLost) as error:
            self.core.meter.add(Count.MALFORMED_MESSAGES)
            log.warning("dropped a Registered from %s: %s", peer, error)
        except TransportError:
            return  # operations under way still use the old keys
        del self.waiting[peer]

    def poll(self) -> None:
        """Retry registrations that had to wait."""
        for peer in list(self.waiting):
            self._load(peer)

    def lost(self, peer: str) -> None:
        """Forget the registrations of a lost destination."""
        self._loaded.pop(peer, None)
        self.waiting.pop(peer, None)
