"""Neighbours are engines that read each other's host memory: how a rank's PeerTier is made, and how engines meet.

Each engine serves the cards of its ranks at its own address, which is also its name, and connects the cards it finds at
the other addresses. An engine that is absent is tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Event, Thread

from kvmover.cache.peers import PeerTerms, PeerTier
from kvmover.config import ConfigError, Settings
from kvmover.config.settings import PeerSettings, host_and_port
from kvmover.engines.common.cards import Cards, CardServer, fetch_cards
from kvmover.engines.common.weights import ServedWeights
from kvmover.errors import KvmoverError, PeerRefused, TransportError
from kvmover.layout import Fleet, Pool
from kvmover.transfer import Place
from kvmover.transport import NixlTransport, Transport

log = logging.getLogger(__name__)

#: The limit of a fetch of cards, s: the address may belong to no engine.
_FETCH_S = 2.0

#: The limit of waiting for a failed read, s: its pages come back later, and the request goes on.
_DRAIN_S = 0.5


def open_peer_tier(
    settings: Settings,
    weights: ServedWeights,
    fleet: Fleet,
    rank: int,
    pools: Sequence[Pool],
    transport: Transport | None = None,
) -> PeerTier | None:
    """Returns the tier of one rank over its host `pools`, or None without `peers.address`. It is not connected yet: see
    Neighbours.

    Engines with other `weights`, or of another tenant, are refused. Raises TierError for a component that keeps only
    some pages of a prefix, TransportUnavailable without NIXL.
    """
    peers = settings.peers
    if peers.address is None:
        return None
    terms = PeerTerms(peers.others(), peers.ask_s, peers.quiet_s, peers.lend_s, peers.read_s)
    config = settings.mover_config()
    silence_s = peers.silence_s
    ping_s, drain_s = min(config.ping_s, silence_s), min(config.drain_s, _DRAIN_S)
    config = replace(config, silence_s=silence_s, ping_s=ping_s, drain_s=drain_s)
    wire = transport or peer_wire(peers.address, rank)()
    try:
        place = Place(peers.address, fleet, rank)
        return PeerTier(wire, weights.name, place, pools, terms, config, weights.identity)
    except KvmoverError:
        wire.close()
        raise


def peer_wire(address: str, rank: int) -> Callable[[], Transport]:
    """Returns a function that opens the transport of a rank's tier, also for `PeerTier.rejoin`. It raises
    TransportUnavailable.
    """
    return partial(NixlTransport, f"peers-{address}-{rank}")


class Neighbours:
    """A thread that connects `tiers`, the ranks in this process, to the ranks of every other engine.

    One process of an engine serves the cards of all its ranks, in order, with `lay_out`. Close it before the tiers.
    """

    def __init__(
        self,
        tiers: Sequence[PeerTier],
        settings: PeerSettings,
        fetch: Callable[[str, int, float], Cards] = fetch_cards,
    ) -> None:
        self._tiers, self._settings, self._fetch = tuple(tiers), settings, fetch
        self._desk: CardServer | None = None
        #: By address: the number of the engine's ranks when last met, and the last log line about it.
        self._ranks: dict[str, int] = {}
        self._said: dict[str, str] = {}
        self._over = Event()
        self._thread = Thread(target=self._run, daemon=True, name="kvmover-neighbours")
        self._thread.start()

    def lay_out(self, cards: Sequence[bytes]) -> None:
        """Serve these cards of all ranks at this engine's address, replacing earlier ones. Raises ConfigError if the
        address is taken.
        """
        address = self.address
        host, port = host_and_port(address)
        if self._desk is None:
            try:
                self._desk = CardServer(host, port)
            except OSError as error:
                raise ConfigError(f"peers.address = {address!r} cannot be listened at: {error}") from error
        self._desk.lay_out(address, cards)

    @property
    def address(self) -> str:
        """Returns this engine's address, which is its name."""
        address = self._settings.address
        assert address is not None, "a tier of peers was made, so there is one"
        return address

    def connected(self) -> frozenset[str]:
        """Returns the engines whose ranks are all connected to all ranks in this process."""
        return frozenset(address for address in self._settings.others() if self._is_whole(address))

    def close(self) -> None:
        """Stop serving cards, and end the thread once its current attempt is over. Safe to call twice."""
        self._over.set()
        if self._desk is not None:
            self._desk.close()
            self._desk = None
        self._thread.join()

    def _run(self) -> None:
        while True:
            for address in self._settings.others():
                if not self._over.is_set() and not self._is_whole(address):
                    self._meet(address)
            if self._over.wait(self._settings.meet_s):
                return

    def _is_whole(self, address: str) -> bool:
        ranks = self._ranks.get(address)
        return ranks is not None and all(len(tier.ranks(address)) == ranks for tier in self._tiers)

    def _meet(self, address: str) -> None:
        """Connect the ranks found at an address. Errors are logged: they only cost the reads from that engine."""
        try:
            found = self._fetch(*host_and_port(address), _FETCH_S)
            if found.engine != address:
                raise PeerRefused(f"it calls itself {found.engine}: peers.address there and peers.engines here differ")
            self._ranks[address] = len(found.cards)  # an engine may come back with more ranks
            for tier in self._tiers:
                for card in found.cards:
                    tier.connect(card)
        except PeerRefused as error:
            self._say(address, f"nothing is shared with the engine at {address}: {error}", logging.WARNING)
        except TransportError as error:
            self._say(address, str(error), logging.INFO)
        else:
            self._say(address, f"host memory is shared with {len(found.cards)} ranks at {address}", logging.INFO)

    def _say(self, address: str, line: str, level: int) -> None:
        """Log a line, unless it was the last line about that address."""
        if self._said.get(address) != line:
            self._said[address] = line
            log.log(level, "%s", line)
