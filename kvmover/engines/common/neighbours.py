"""Neighbours are engines that read each other's host memory: how a rank's PeerTier is made, and how engines meet.

Each engine serves the cards of its ranks at its own address, which is also its name, and connects the cards it finds at
the other addresses. An engine that is absent is tried again. Addresses come from the settings, from a Directory that
changes, and from requests whose router names a source.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from kvmover.cache.peers import PeerMiss, PeerTerms, PeerTier
from kvmover.config import ConfigError, Settings
from kvmover.config.settings import host_and_port
from kvmover.engines.common.cards import Cards, CardServer, fetch_cards
from kvmover.engines.common.dialling import HostNotAllowed
from kvmover.engines.common.directories import open_directory
from kvmover.engines.common.weights import ServedWeights
from kvmover.errors import KvmoverError, PeerRefused, TransportError
from kvmover.foreign_text import MOST_SAID, printable
from kvmover.layout import Fleet, Pool
from kvmover.transfer import Place
from kvmover.transport import NixlTransport, Transport

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: The limit of a fetch of cards, s: the address may belong to no engine.
_FETCH_S = 2.0

#: Threads that meet engines named by requests, and the most meetings that wait: a request may name a dead address.
_GUIDES, _MOST_MEETINGS = 4, 64

#: The most engines to be connected with before a request can name another.
_MOST_ENGINES = 512

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
    terms = PeerTerms(
        peers.others(), peers.ask_s, peers.quiet_s, peers.lend_s, peers.read_s, most_asked=peers.most_asked
    )
    config = settings.mover_config()
    silence_s = peers.silence_s
    ping_s, drain_s = min(config.ping_s, silence_s), min(config.drain_s, _DRAIN_S)
    config = replace(config, silence_s=silence_s, ping_s=ping_s, drain_s=drain_s)
    wire = transport or peer_wire(peers.address, rank, None)()
    try:
        place = Place(peers.address, fleet, rank)
        return PeerTier(wire, weights.name, place, pools, terms, config, weights.identity)
    except KvmoverError:
        wire.close()
        raise


def peer_wire(address: str, rank: int, device: torch.device | None) -> Callable[[], Transport]:
    """Returns a function that opens the transport of a rank's tier, also for `PeerTier.rejoin`. It raises
    TransportUnavailable. `device`: the rank's, by whose NICs it reads; None: UCX chooses.
    """
    return partial(NixlTransport, f"peers-{address}-{rank}", device=device)


class Neighbours:
    """A thread that connects `tiers`, the ranks in this process, to the ranks of every other engine.

    Others are in `peers.engines` and in `peers.directory`, whose list may change, or a request names them: such an
    engine is dialled only if it is one of these, or in `exchange.allow`. One process of an engine serves the cards of
    all its ranks, in order, with `lay_out`. Close it before the tiers.
    """

    def __init__(
        self,
        tiers: Sequence[PeerTier],
        settings: Settings,
        fetch: Callable[[str, int, float, Sequence[str]], Cards] = fetch_cards,
    ) -> None:
        self._tiers, self._settings, self._fetch = tuple(tiers), settings.peers, fetch
        self._allow = settings.exchange.allow
        self._desk: CardServer | None = None
        where = settings.peers.directory
        self._directory = open_directory(where) if where is not None else None
        #: By address: the number of the engine's ranks when last met, and the last log line about it.
        self._ranks: dict[str, int] = {}
        self._said: dict[str, str] = {}
        #: Engines named by requests: whom to tell of a meeting under way, and until when another is not tried, and why.
        self._waiting: dict[str, list[Callable[[PeerMiss | None], None]]] = {}
        self._failed: dict[str, tuple[float, PeerMiss]] = {}
        self._lock, self._over = Lock(), Event()
        self._guides = ThreadPoolExecutor(_GUIDES, "kvmover-introductions")
        for tier in self._tiers:
            tier.meet = self.introduce
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
        return frozenset(address for address in tuple(self._ranks) if self._is_whole(address))

    def introduce(self, address: str, told: Callable[[PeerMiss | None], None]) -> None:
        """Connect an engine that a request named, in a thread of its own. `told` hears None, or why it could not be.

        Returns at once. An engine that could not be met is not tried again for `peers.quiet_s`.
        """
        now = time.monotonic()
        with self._lock:
            until, miss = self._failed.get(address, (now, PeerMiss.UNREACHABLE))
            waiting = self._waiting.get(address)
            crowded = len(self._waiting) >= _MOST_MEETINGS or len(self._ranks) >= _MOST_ENGINES
            if not self._may_dial(address):
                miss = PeerMiss.NOT_ALLOWED
            elif waiting is not None:
                waiting.append(told)
                return
            elif until <= now and not crowded and not self._over.is_set():
                self._waiting[address] = [told]
                self._guides.submit(self._guide, address, now)
                return
        told(miss)

    def close(self) -> None:
        """Stop serving cards, and end the threads once their current attempts are over. Safe to call twice."""
        self._over.set()
        if self._desk is not None:
            self._desk.close()
            self._desk = None
        self._thread.join()
        self._guides.shutdown()
        if self._directory is not None:
            self._directory.close()

    def _run(self) -> None:
        while not self._over.is_set():
            standing = self._standing()
            for tier in self._tiers:
                tier.engines = standing
            try:
                for address in standing:
                    if not self._over.is_set() and not self._is_whole(address):
                        self._meet(address)
                self._part(standing)
            except TransportError as error:  # a tier that is closed before its neighbours meets no more
                log.info("no engines are looked for any more: %s", error)
                return
            self._over.wait(self._settings.meet_s)

    def _standing(self) -> tuple[str, ...]:
        """Returns the engines of the list and of the directory, without this one, in the same order on all ranks."""
        found = self._directory.engines() if self._directory is not None else ()
        known = self._settings.others()
        return (*known, *(each for each in found if each not in known and each != self.address))

    def _part(self, standing: Sequence[str]) -> None:
        """Stop dialling engines that are in no list and have gone."""
        now = time.monotonic()
        with self._lock:
            self._failed = {address: each for address, each in self._failed.items() if each[0] > now}
            gone = [each for each in self._ranks if each not in standing and each not in self._waiting]
        for address in gone:
            if not any(tier.ranks(address) for tier in self._tiers):
                for tier in self._tiers:
                    tier.disconnect(address)
                self._ranks.pop(address, None)
                self._said.pop(address, None)

    def _may_dial(self, address: str) -> bool:
        return bool(self._allow) or any(address in tier.engines for tier in self._tiers)

    def _guide(self, address: str, since_s: float) -> None:
        """Meet a named engine, unless it waited for so long that its request cannot."""
        late = self._over.is_set() or time.monotonic() - since_s > self._settings.meet_s
        miss = PeerMiss.UNREACHABLE if late else self._meet(address)
        with self._lock:
            if miss is not None and not late:
                self._failed[address] = time.monotonic() + self._settings.quiet_s, miss
            waiting = self._waiting.pop(address)
        for told in waiting:
            told(miss)

    def _is_whole(self, address: str) -> bool:
        ranks = self._ranks.get(address)
        return ranks is not None and all(len(tier.ranks(address)) == ranks for tier in self._tiers)

    def _meet(self, address: str) -> PeerMiss | None:
        """Connect the ranks found at an address. Errors are logged: they only cost the reads from that engine."""
        listed = any(address in tier.engines for tier in self._tiers)
        try:
            found = self._fetch(*host_and_port(address), _FETCH_S, () if listed else self._allow)
            if found.engine != address:
                name = printable(found.engine, MOST_SAID)
                raise PeerRefused(f"it calls itself {name}, and an engine's name is its address")
            self._ranks[address] = len(found.cards)  # an engine may come back with more ranks
            for tier in self._tiers:
                for card in found.cards:
                    tier.connect(card)
        except PeerRefused as error:
            self._say(address, f"nothing is shared with the engine at {address}: {error}", logging.WARNING)
            return PeerMiss.NOT_A_PEER
        except HostNotAllowed as error:
            self._say(address, f"a request named {address} as a source of pages: {error}", logging.WARNING)
            return PeerMiss.NOT_ALLOWED
        except TransportError as error:
            self._say(address, str(error), logging.INFO)
            return PeerMiss.UNREACHABLE
        self._say(address, f"host memory is shared with {len(found.cards)} ranks at {address}", logging.INFO)
        return None

    def _say(self, address: str, line: str, level: int) -> None:
        """Log a line, unless it was the last line about that address."""
        if self._said.get(address) != line:
            if len(self._said) >= 2 * _MOST_ENGINES:  # requests may name any address
                self._said.clear()
            self._said[address] = line
            log.log(level, "%s", line)
