"""Registrations: what a source knows of memory that destinations have registered anew since they sent their cards."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvmover.errors import PeerLost, PeerRefused, TransportError
from kvmover.transfer.core import Core
from kvmover.transfer.meter import Count
from kvmover.transfer.protocol import wire

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Registrations:
    """By destination: the newest registration that was `_loaded`, and one that waits for operations under way."""

    core: Core
    _loaded: dict[str, int] = field(default_factory=dict[str, int])
    _waiting: dict[str, wire.Registered] = field(default_factory=dict[str, wire.Registered])

    def known(self, peer: str) -> int:
        """The newest registration that writes to a destination are posted for."""
        seated = self.core.peers.get(peer)
        return max(self._loaded.get(peer, 0), seated.card.registration if seated is not None else 0)

    def stamped(self, peer: str, offer: wire.Offered) -> wire.Offered:
        """An offer as it is said now: with this side's clock, for a lease, and what is known of the destination."""
        return replace(offer, stamp_us=self.core.stamp_us(), registration=self.known(peer))

    def waits(self, peer: str) -> bool:
        """Whether nothing may be posted to a destination until what is under way there has ended."""
        return peer in self._waiting

    def heard(self, peer: str, message: wire.Registered) -> None:
        """Load it now, or as soon as the transport can. What is not the peer's own, or not whole, is dropped."""
        waiting = self._waiting.get(peer)
        if message.registration > max(self.known(peer), waiting.registration if waiting is not None else 0):
            self._waiting[peer] = message
            self._load(peer)

    def _load(self, peer: str) -> None:
        message = self._waiting[peer]
        try:
            name = self.core.transport.identify(message.transport)
            if name != peer:
                raise PeerRefused(f"{peer} sent the registrations of {name}")
            self.core.transport.connect(message.transport)
            self._loaded[peer] = message.registration
        except (PeerRefused, PeerLost) as error:
            self.core.meter.add(Count.MALFORMED_MESSAGES)
            log.warning("dropped a Registered from %s: %s", peer, error)
        except TransportError:
            return  # operations to it are in flight, which would go on under the old keys
        del self._waiting[peer]

    def poll(self) -> None:
        """Try again what had to wait."""
        for peer in list(self._waiting):
            self._load(peer)

    def lost(self, peer: str) -> None:
        """The transport forgets what it knew of a destination."""
        self._loaded.pop(peer, None)
        self._waiting.pop(peer, None)
