"""KvmoverStore is the page store as SGLang's HiCache storage backend (`--hicache-storage-backend dynamic`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from kvmover.engines.common import EmptyBackend, EngineUnsupported, Numbers, ParallelRank, PoolBackend, Upkeep
from kvmover.engines.sglang import sglang_api
from kvmover.engines.sglang.page_parts import ALL_PAGES, MAIN, TpPlacement, hits
from kvmover.engines.sglang.sglang_api import PoolTransfer
from kvmover.engines.sglang.sglang_contract import SGLANG, STORE, context_ranks, transfer_result
from kvmover.engines.sglang.sglang_options import parse, said, served, served_weights
from kvmover.engines.sglang.sglang_weight_updates import UPDATES
from kvmover.engines.sglang.store_adapter import Batches, ServedRank, StoreAdapter
from kvmover.errors import StoreError
from kvmover.observe.endpoint import serve_metrics
from kvmover.store import StoreCollector

if TYPE_CHECKING:
    import torch

SGLANG.require(STORE)

log = logging.getLogger(__name__)

Move = Callable[[Sequence[bytes], Numbers], list[bool]]


class KvmoverStore(sglang_api.HiCacheStorage):
    """A rank's storage backend. Host pools belong to the engine and outlive it.

    The engine looks up, reads and writes from one thread each, a batch of pages at a time. Pages are keyed by SGLang's
    hash of their tokens within a `Namespace`; `part_of_rows` decides how ranks of another shape read them.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        """Raises ConfigError for options, EngineUnsupported for unknown settings of the engine."""
        config = storage_config
        if (shares := context_ranks(config)) > 1:
            raise EngineUnsupported(
                f"decode context parallelism of {shares}: SGLang leaves that to its file and Mooncake backends"
            )
        self._options, self._settings = parse(config.extra_config)
        place = ParallelRank(config.tp_rank, config.tp_size, config.pp_rank, config.pp_size)
        placement = TpPlacement.REPLICATED if config.is_mla_model else TpPlacement.SHARDED
        facts = said(self._options, served())
        weights = served_weights(self._settings, self._options.model or config.model_name or "")
        self._rank = ServedRank(weights, facts, place, placement)
        self._metrics = config.enable_storage_metrics
        self._read, self._written = Batches(), Batches()
        self._backends: dict[str, PoolBackend] = {}
        self._page_tokens: dict[str, int] = {}

    # Pools and life

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store, now that the page size is known, for the main pool.

        Raises ConfigError, StoreError, EngineUnsupported or LayoutError.
        """
        sglang_api.HiCacheStorage.register_mem_pool_host(self, mem_pool_host)
        self._adapter = StoreAdapter(self._options, self._settings.store, self._rank, mem_pool_host.page_size)
        self._upkeep = Upkeep(self._adapter.store, self._settings.store)
        shown = StoreCollector(self._adapter.store, sglang_api.served_name(), self._rank.place.number)
        self._served = serve_metrics(self._settings.metrics, self._rank.place.number, shown)
        UPDATES.follow(self)
        self._backends[MAIN] = self._adapter.backend(mem_pool_host, MAIN)
        self._page_tokens[MAIN] = mem_pool_host.page_size

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Add a further pool of a hybrid model. Raises EngineUnsupported or LayoutError."""
        sglang_api.HiCacheStorage.register_mem_host_pool_v2(self, host_pool, host_pool_name)
        if str(host_pool_name) not in self._backends:
            self._backends[str(host_pool_name)] = self._adapter.backend(host_pool, str(host_pool_name))
            self._page_tokens[str(host_pool_name)] = host_pool.page_size

    def clear(self) -> None:
        """Delete the pages of this model, page size and tenant only."""
        self._adapter.store.clear()

    def reweigh(self) -> None:
        """Use the pages of the engine's present weights; calls under way end with the earlier. Raises StoreError."""
        adapter = self._adapter
        adapter.reweigh()
        self._backends = {name: backend.moved(adapter.store, adapter.space) for name, backend in self._backends.items()}

    def close(self) -> None:
        """Flush and close the store. The pools stay the engine's."""
        UPDATES.leave(self)
        if self._served is not None:
            self._served.close()
        self._upkeep.close()
        self._adapter.store.close()

    def get_stats(self) -> Any:
        """Returns pages and GB/s of the batches since the last call; None if SGLang was started without metrics."""
        if not self._metrics:
            return None
        (read, read_gb_s), (written, written_gb_s) = self._read.take(), self._written.take()
        return sglang_api.StorageMetrics(read, written, read_gb_s, written_gb_s)

    # Version 1 and 2 of the interface: pages of host pools

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Returns the number of leading pages that are stored, of the main pool."""
        if isinstance(self._backends[MAIN], EmptyBackend):
            return 0  # a pool without bytes does not prove that a page is stored
        return hits({MAIN: self._found(MAIN, keys)}, {MAIN: ALL_PAGES}).pages

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: Any = None,
    ) -> Any:
        """Returns every restorable prefix, without block groups, which never gate a prefix.

        Side pools are asked for as many pages as the main pool has.
        """
        found, trailing = {MAIN: list(takewhile(bool, self._found(MAIN, keys)))}, {MAIN: ALL_PAGES}
        keys = keys[: len(found[MAIN])]
        for transfer in pool_transfers or ():
            if transfer.hit_policy is not sglang_api.BLOCK_GROUPS:
                name = str(transfer.name)
                found[name] = self._found(name, keys)
                trailing[name] = (
                    ALL_PAGES if transfer.hit_policy is sglang_api.ALL_PAGES else max(1, len(transfer.keys or ()))
                )
        result = hits(found, trailing)
        reach = result.reach if any(result.reach.values()) else {}  # as SGLang's own backends answer a miss
        return transfer_result(result.pages, reach, result.lengths)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages into the main pool at `host_indices` [page * token]. Returns True per page that came."""
        return self._move(self._read, MAIN, self._backends[MAIN].get, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the main pool at `host_indices` [page * token]. Returns False per page to store again."""
        return self._move(self._written, MAIN, self._backends[MAIN].put, keys, host_indices)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages into several pools. Returns True by pool and page read. Raises StoreError for unknown pools."""
        return {t.name: self._move(self._read, t.name, self._of(t).get, t.keys, t.host_indices) for t in transfers}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools. Returns by pool False per page to store again. Raises as `batch_get_v2`."""
        return {t.name: self._move(self._written, t.name, self._of(t).put, t.keys, t.host_indices) for t in transfers}

    # The older interface: pages that the engine copied out of the pool. `"interface_v1": 1` spares the copy.

    def exists(self, key: str) -> bool:
        """Returns True if the page of the main pool is stored."""
        return self._found(MAIN, [key])[0]

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Read a page into `target_location`. Returns it, or None on a miss. Raises StoreError without target."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor | None] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Read flat pages, in the layout of the pool, into `target_locations`. Returns each, or None if absent."""
        backend, targets = self._backends[MAIN], _tensors(target_locations)
        pairs = zip(keys, targets, strict=True)
        return [target if backend.get_flat(page_of(key), target) else None for key, target in pairs]

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store a page. Returns False if it has to be stored again."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor | None] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store flat pages in the layout of the pool. Returns False if any has to be stored again."""
        backend, pages = self._backends[MAIN], _tensors(values)
        done = [backend.put_flat(page_of(key), page) for key, page in zip(keys, pages, strict=True)]
        return all(done)

    def _of(self, transfer: PoolTransfer) -> PoolBackend:
        name = str(transfer.name)
        if name not in self._backends:
            raise StoreError(f"host pool {name} was never registered; known are {', '.join(self._backends)}")
        return self._backends[name]

    def _found(self, name: str, keys: Sequence[str]) -> list[bool]:
        return self._backends[name].exists([page_of(key) for key in keys])

    def _move(
        self, batches: Batches, name: str, move: Move, keys: Sequence[str] | None, indices: torch.Tensor | None
    ) -> list[bool]:
        """Move pages, and count the batch. Returns True per moved page; False for all if the indices are not theirs."""
        pages, backend = [page_of(key) for key in keys or ()], self._backends[str(name)]
        wanted = len(pages) * self._page_tokens[str(name)]
        if indices is None or indices.numel() != wanted:
            if indices is not None:
                log.warning("%d indices for %d pages of %s, which take %d", indices.numel(), len(pages), name, wanted)
            return [False] * len(pages)
        started = time.perf_counter()
        done = move(pages, indices.numpy())
        batches.add(sum(done), sum(done) * backend.page_bytes, time.perf_counter() - started)
        return done


def page_of(key: str) -> bytes:
    """Returns the 32 bytes of a page's key: SGLang's hexadecimal SHA-256, or a hash of any other key."""
    try:
        page = bytes.fromhex(key)
    except ValueError:
        page = b""
    return page if len(page) == 32 else sha256(key.encode()).digest()


def _tensors(pages: Sequence[torch.Tensor | None] | None) -> list[torch.Tensor]:
    held = [page for page in pages or () if page is not None]
    if len(held) != len(pages or (None,)):
        raise StoreError("a page is read into a tensor, or written from one, and none was given")
    return held
