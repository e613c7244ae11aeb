"""A PoolStore reads and writes the pages of one pool in the page store, in the form that all engines share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvmover.cache.page_tiers import has_become
from kvmover.config.settings import StoreSettings
from kvmover.engines.common.pages import BounceBuffer, PackedBackend, election
from kvmover.engines.common.store import Upkeep, open_store
from kvmover.host_copies import host_stream
from kvmover.layout import Fleet, Pool
from kvmover.store import Namespace, PagePart, StoreCollector
from kvmover.transport import memory_of


class PoolStore:
    """The store of a rank's only pool, and its upkeep, for one thread. A page that fails is a miss."""

    def __init__(self, settings: StoreSettings, space: Namespace, pool: Pool, fleet: Fleet, rank: int) -> None:
        """Open the store at `settings.root`. Raises ConfigError without one, StoreError for a bad one."""
        component, self._rank = pool.spec.component, rank
        part = PagePart.held(component, fleet, rank, space.page_tokens)
        bounce, writes = BounceBuffer.of(part.nbytes), election(component, fleet, rank)
        self._store = open_store(settings, space)
        self._store.register(memory_of(bounce.memory))
        move = host_stream(pool.tensors[0].device).move
        view = self._store.view(space, part, writes)
        self._backend = PackedBackend(pool, view, 1, bounce, bounce, move, writes)
        self._upkeep = Upkeep(self._store, settings)

    def get(self, keys: Sequence[bytes], pages: Sequence[int]) -> int:
        """Read leading `keys` into `pages`, as far as there are both. Returns how many came whole before the first that
        did not; the memory of the others is undefined.
        """
        count = self._backend.view.leading(list(keys[: len(pages)]))
        came = self._backend.get(keys[:count], np.asarray(pages[:count], np.int64)) if count else []
        return came.index(False) if False in came else len(came)

    def put(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Write `pages`, whose rows have been computed, under `keys`; those that are there are left."""
        if keys:
            self._backend.put(keys, np.asarray(pages, np.int64))

    def collector(self, engine: str) -> StoreCollector:
        """Returns a collector of the store's counts, labelled with the engine and this rank."""
        return StoreCollector(self._store, engine, self._rank)

    def become(self, space: Namespace | None) -> None:
        """Switch to another namespace, or to none with None."""
        if has_become(self._store, space) and space is not None:
            self._backend = self._backend.moved(self._store, space)

    def close(self) -> None:
        """End the upkeep, and close the store; its pages stay."""
        self._upkeep.close()
        self._store.close()
