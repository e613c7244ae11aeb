"""A LoneRank is an engine of one process: pool, mover, cards and store of a model that is on no other rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated

import msgspec

from kvmover.config import ConfigError, Settings
from kvmover.engines.common.cards import CardServer, EngineMake, caller
from kvmover.engines.common.meetings import Meetings
from kvmover.engines.common.options import STORE_KEYS, ContentOptions
from kvmover.engines.common.page_allotment import PageAllotment
from kvmover.engines.common.pool_store import PoolStore
from kvmover.engines.common.transfer_params import Remote
from kvmover.engines.common.weights import UPDATED, ServedWeights
from kvmover.errors import KvmoverError
from kvmover.foreign_text import MOST_SAID, printable
from kvmover.layout import Component, Fleet, Pool, PoolSpec
from kvmover.observe.metrics import MoverCollector
from kvmover.observe.observers import Observers
from kvmover.store import Namespace
from kvmover.transfer import Content, Mover, MoverConfig, Place, Progress, SharedMover, Transfer
from kvmover.transfer.protocol.wire import Verb
from kvmover.transport import NixlTransport

if TYPE_CHECKING:
    import torch

_Count = Annotated[int, msgspec.Meta(ge=1)]

#: Options of an engine of one rank that set a setting of kvmover, before all other sources.
RANK_KEYS: Mapping[str, str] = {
    **STORE_KEYS,
    **{name: f"mover.{name}" for name in ("deadline_s", "arena_bytes", "verb", "identity", "route")},
}

#: Defaults. `deadline_s`: how long offered pages wait for a decode. `verb`: a dying peer writes into no page here.
RANK_DEFAULTS = Settings(mover=MoverConfig(deadline_s=120.0, verb=Verb.PULL))

log = logging.getLogger(__name__)


class RankOptions(ContentOptions, frozen=True, forbid_unknown_fields=True):
    """The options of an engine of one rank, all of which have a default.

    `engine`: this engine's name among others, by default a new one. `host`, `port`: where others find its card; port 0
    is a free one. `tokens`: room of all open requests together, in pages of `page_tokens`.
    """

    engine: str = ""
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    page_tokens: _Count = 16
    tokens: _Count = 16384


@dataclass(frozen=True, slots=True)
class Fetched:
    """The outcome of a fetch: rows of the first `tokens` tokens are in the pages; `reason`: why not all, "" if all.

    `transfer` is None if it never began. While it is quarantined the pages must not be written.
    """

    tokens: int
    reason: str = ""
    transfer: Transfer | None = None


class LoneRank:
    """One rank that holds a whole model of one `component`, for one thread. Close it.

    Its pool is in order NHD, a tensor a layer and K or V, on `device`; `mover` takes all calls of a SharedMover.
    """

    def __init__(
        self,
        component: Component,
        device: torch.device,
        weights: ServedWeights,
        options: RankOptions,
        settings: Settings,
        make: EngineMake,
    ) -> None:
        """Raises ConfigError for an address that is taken, StoreError, or TransportUnavailable."""
        self.weights, self._options, self._make = weights, options, make
        fleet, count = Fleet(tp=1, page_tokens=options.page_tokens), -(-options.tokens // options.page_tokens)
        spec = PoolSpec.dense(
            component, fleet.shard(component, 0, 1), count, options.page_tokens, "NHD", separate=("layer", "kv")
        )
        self.pool, self.pages = Pool.zeros(spec, str(device)), PageAllotment(count)
        self.engine = options.engine or f"{make}-{token_hex(4)}"
        self._wire, joined = partial(NixlTransport, self.engine, device=device), weights.model((component,))
        with ExitStack() as opened:
            self._observers = opened.enter_context(Observers(settings, self.engine, 0))
            self.store: PoolStore | None = None
            if settings.store.root:
                self.store = PoolStore(settings.store, self._space, self.pool, fleet, 0)
                opened.callback(self.store.close)
            self._cards = _listening(options)
            opened.callback(self._cards.close)
            self.host, self.port = options.host, self._cards.port
            mover = Mover(self._wire(), joined, Place(self.engine, fleet, 0), [self.pool], settings.mover_config())
            self._observers.watch(mover)
            self._progress = Progress(mover, settings.progress)
            self.mover = opened.enter_context(SharedMover(self._progress))
            self._meetings = Meetings(self._progress, caller(settings))
            opened.callback(self._meetings.close)
            stores = [self.store.collector(self.engine)] if self.store else []
            self._observers.serve(MoverCollector([self._progress]), *stores)
            self._joined()
            self._opened = opened.pop_all()

    def fetch(self, remote: Remote, start: int, pages: Sequence[int], content: Content) -> Fetched:
        """Fetch all tokens of `content` from `start` on, a page's first, into `pages`, and wait. An engine that is
        gone, refuses or fails is an outcome, not an exception; it is logged.
        """
        try:
            transfer = self._meetings.begin(
                remote,
                lambda mover, engine: mover.receive(
                    remote.transfer, engine, range(start, content.tokens), [pages], content=content
                ),
            ).result()
        except KvmoverError as error:
            return self._failed(remote, Fetched(start, str(error)))
        result = self._progress.ended(transfer).result()
        if result.reason is None:
            return Fetched(content.tokens, "", transfer)
        whole = min(result.incomplete[0], default=0) * self._options.page_tokens if result.incomplete else 0
        return self._failed(remote, Fetched(max(start, whole), result.reason, transfer))

    def updated(self, version: str | None) -> None:
        """Go on with other weights, which the caller names `version`, alike in all engines that have them; with None no
        engine shares KV with this one. Open transfers end; pages of requests stay.
        """
        self.weights = self.weights.updated(version)
        self._meetings.forget()
        self._progress.rejoin(self._wire, self.weights.model((self.pool.spec.component,)), UPDATED)
        if self.store:
            self.store.become(self._space if self.weights.is_known else None)
        self._joined()

    def close(self) -> None:
        """End open transfers, close the store, and free the port. Safe to call twice."""
        self._opened.close()

    @property
    def _space(self) -> Namespace:
        return self.weights.namespace(self._options.page_tokens, self._options.tenant)

    def _joined(self) -> None:
        self.weights.log()
        self._cards.lay_out(self.engine, [self.mover.card], self._make)

    def _failed(self, remote: Remote, fetched: Fetched) -> Fetched:
        name, host = printable(remote.transfer, MOST_SAID), printable(remote.host, MOST_SAID)
        log.warning("%s of %s:%d was not fetched: %s", name, host, remote.port, printable(fetched.reason))
        return fetched


def _listening(options: RankOptions) -> CardServer:
    try:
        return CardServer(options.host, options.port)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"host {options.host}, port {options.port} cannot be listened at: {error}") from error
