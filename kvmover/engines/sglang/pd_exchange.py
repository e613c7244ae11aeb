"""Exchange lets prefill and decode work with other makes of engines, by common names of caches and the ranks' cards."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec

from kvmover.config import Settings
from kvmover.engines.common import (
    CARDS_PATH,
    EXCHANGED_DTYPES,
    Cards,
    EngineMake,
    address_of,
    caller,
    exchanged,
    fetch_cards,
)
from kvmover.engines.sglang.pd_cache import RankCache
from kvmover.errors import PeerRefused, ProtocolError, TransportError
from kvmover.foreign_text import MOST_SAID, printable
from kvmover.layout import DTYPE_BYTES
from kvmover.prepared import prepared
from kvmover.repeats import Repeats
from kvmover.transfer.protocol.handshake import MAX_CARD_BYTES
from kvmover.transfer.protocol.wire import MAX_RANKS

log = logging.getLogger(__name__)

#: Limit of engines with cards at one server: data-parallel ones, and those from before a restart.
_MOST_ENGINES = 1024

#: Time that SGLang's scheduler waits for a port that may be unused, s.
_PATIENCE_S = 5.0


def exchanged_caches(caches: Sequence[RankCache], dtype: str) -> list[RankCache] | None:
    """Returns the same memory as engines of any make describe it: one component of full attention, or a latent.

    `dtype`: the cache's, by SGLang's word. None for caches without a common description.
    """
    if len(caches) != 1 or dtype not in EXCHANGED_DTYPES or caches[0].row_bytes % DTYPE_BYTES[dtype]:
        return None
    cache = replace(caches[0], dtype=dtype)
    component = exchanged(cache.component(cache.layers), cache.kv) if cache.by is None else None
    return component and [replace(cache, name=component.name)]


@dataclass(frozen=True, slots=True)
class Met:
    """A prefill engine of another make, with the reason if its ranks cannot be connected."""

    engine: str
    refused: str = ""


@dataclass(slots=True)
class Exchange:
    """The dealings of a rank with engines of another make.

    `model`: their name of its weights; None: it has no dealings. `allow`: hosts that requests may have dialled.
    `foreign`: cards of prefill engines of another make, by address; None of one that may not be dialled. `repeats`: log
    lines about engines that cannot be met.
    """

    model: str | None
    call: Callable[[str, int], Cards] = fetch_cards
    allow: tuple[str, ...] = ()
    foreign: dict[str, Cards | None] = field(default_factory=dict[str, "Cards | None"])
    repeats: Repeats = field(default_factory=Repeats)

    @classmethod
    def of(cls, settings: Settings) -> Exchange:
        """Returns the exchange that `settings` configure."""
        return cls(settings.exchange.model, caller(settings), settings.exchange.allow)

    def described(self, caches: list[RankCache], dtype: str) -> list[RankCache]:
        """Returns the caches as all engines describe them if `model` is set and that is possible, else unchanged."""
        found = exchanged_caches(caches, dtype) if self.model else caches
        if found is None:
            names = ", ".join(cache.name for cache in caches)
            log.warning("no engine but SGLang takes these caches, whatever exchange.model says: %s", names)
        return found or caches

    def meet(self, bootstrap_addr: str, connect: Callable[[bytes], object]) -> Met | None:
        """Connect the prefill at `host:port`; returns None if it is SGLang or absent.

        A host that requests may not have dialled is met as refused: SGLang's own client does not dial it.
        """
        self.foreign.pop(bootstrap_addr, None)
        if self.allow:
            host, _, port = bootstrap_addr.rpartition(":")
            try:
                address_of(host.strip("[]"), int(port), self.allow)
            except (TransportError, ValueError) as error:
                self.foreign[bootstrap_addr] = None
                self.refused(f"the prefill at {bootstrap_addr}", str(error))
                return Met("", str(error))
        found = foreign_cards(bootstrap_addr, self.call) if self.model else None
        if found is None:
            return None
        self.foreign[bootstrap_addr] = found
        try:
            for card in found.cards:
                connect(card)
        except (PeerRefused, TransportError) as error:
            self.refused(f"the prefill at {bootstrap_addr}", str(error))
            return Met(found.engine, str(error))
        return Met(found.engine)

    def refused(self, peer: str, words: str) -> None:
        """Log that a peer cannot be connected, and the reason, once a minute."""
        if (more := self.repeats.more((peer, words), time.monotonic())) is not None:
            log.error("refused %s: %s%s", printable(peer, MOST_SAID), printable(words), more)

    def has_changed(self, bootstrap_addr: str) -> bool:
        """Returns True if the address now has other ranks than were met there, also of an engine with the same name."""
        known = self.foreign.get(bootstrap_addr)
        found = foreign_cards(bootstrap_addr, self.call) if known else None
        return found is not None and found != known


def foreign_cards(bootstrap_addr: str, call: Callable[[str, int], Cards] = fetch_cards) -> Cards | None:
    """Returns the cards of a prefill of another make at `host:port`; None if it is SGLang or absent."""
    host, _, port = bootstrap_addr.rpartition(":")
    try:
        cards = call(host.strip("[]"), int(port))
    except (TransportError, ValueError) as error:
        log.debug("%s", error)
        return None
    return None if cards.make == EngineMake.SGLANG else cards


@prepared
class RankCard(msgspec.Struct, frozen=True):
    """The card that rank `rank` of `ranks` publishes at its engine's bootstrap server."""

    engine: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    card: Annotated[bytes, msgspec.Meta(max_length=MAX_CARD_BYTES)]


class CardTable:
    """The cards of a bootstrap server's ranks: `put` as they come, `answer` when complete."""

    def __init__(self) -> None:
        self._engines: dict[str, dict[int, RankCard]] = {}

    def put(self, body: bytes) -> None:
        """Keep a rank's card. Raises msgspec.MsgspecError if it is malformed, ProtocolError for too many engines."""
        laid = msgspec.msgpack.decode(body, type=RankCard)
        if laid.engine not in self._engines and len(self._engines) == _MOST_ENGINES:
            raise ProtocolError(
                f"a card of {printable(laid.engine, MOST_SAID)}, beside those of {_MOST_ENGINES} engines"
            )
        self._engines.setdefault(laid.engine, {})[laid.rank] = laid

    def answer(self) -> tuple[int, bytes]:
        """Returns an HTTP status, and the cards or a sentence that says why they are unavailable.

        >>> CardTable().answer()
        (503, b'no rank has laid its card here')
        """
        if not self._engines:
            return 503, b"no rank has laid its card here"
        if len(self._engines) > 1:
            said = f"{len(self._engines)} data-parallel engines; another make takes a prefill without them"
            return 409, said.encode()
        ((engine, laid),) = self._engines.items()
        ranks = next(iter(laid.values())).ranks
        if len(laid) < ranks:
            return 503, f"{len(laid)} of {ranks} ranks have laid their cards here".encode()
        return 200, Cards(engine, tuple(laid[rank].card for rank in sorted(laid)), EngineMake.SGLANG).encode()


def lay_card(url: str, laid: RankCard, put: Any) -> None:
    """Publish a rank's card at the bootstrap server. `put`: of `requests`. A server that takes no cards is logged."""
    answer = put(url + CARDS_PATH, data=msgspec.msgpack.encode(laid), timeout=_PATIENCE_S)
    if answer.status_code != 200:
        log.warning(
            "%s takes no cards (HTTP %d): engines of another make do not find this one", url, answer.status_code
        )
