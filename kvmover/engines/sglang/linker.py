"""KvmoverLinker moves SGLang's device pools to and from the page store, without a host tier between."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from queue import Queue
from typing import Any

from kvmover.cache.page_tiers import StoreWorker
from kvmover.engines.common import (
    BounceBuffer,
    Numbers,
    PackedBackend,
    ParallelRank,
    Upkeep,
    as_bytes,
    of_all,
)
from kvmover.engines.sglang import engine_linker, sglang_api
from kvmover.engines.sglang.devicepool import (
    DevicePoolPages,
    Strand,
    checked_strands,
    part_of_strand,
    placement_of,
)
from kvmover.engines.sglang.hicache_store import page_of
from kvmover.engines.sglang.page_parts import ALL_PAGES, MAIN, TpPlacement, hits
from kvmover.engines.sglang.sglang_api import PoolTransfer
from kvmover.engines.sglang.sglang_contract import LINKER, SGLANG
from kvmover.engines.sglang.sglang_options import parse, said, served, served_weights
from kvmover.engines.sglang.sglang_weight_updates import UPDATES
from kvmover.engines.sglang.store_adapter import ServedRank, StoreAdapter
from kvmover.errors import StoreError
from kvmover.host_copies import host_stream
from kvmover.observe.endpoint import serve_metrics
from kvmover.store import PagePart, StoreCollector

SGLANG.require(LINKER)

log = logging.getLogger(__name__)

#: Runs of layers per load: a forward pass starts on the first while others are read.
STEPS = 8


@dataclass(frozen=True, slots=True)
class LinkerJob:
    """The pages to move once all of `ready` has passed. `number`: the load for which the engine waits."""

    transfers: Sequence[PoolTransfer]
    ready: Sequence[Any]
    number: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The layers of the model that are read together, and the backends for that by pool."""

    layers: range
    backends: dict[str, tuple[PackedBackend, ...]]


class KvmoverLinker(engine_linker.UnifiedCacheLinker):
    """A rank's linker. Device pools belong to the engine; two threads read and write, and wait for their copies.

    Tensor-parallel ranks that hold the same pages write a share of them each, and read all.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Raises ConfigError for options, StoreError, and EngineUnsupported or ValueError for unsupported pools."""
        self.forward_stream = forward_stream
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self._group = engine_linker.device_pools(kvcache, params, components)
        self.pools = self._group.entry_map
        tp, tp_size = engine_linker.rank_in(params.attn_tp_cache_group or params.tp_cache_group)
        options, settings = parse(extra_config)
        place = ParallelRank(tp, tp_size, params.pp_rank, params.pp_size)
        self._placement = TpPlacement.REPLICATED if self._group.rank_replicated else TpPlacement.SHARDED
        facts = said(options, served())
        weights = served_weights(settings, options.model or sglang_api.served_name())
        rank = ServedRank(weights, facts, place, self._placement)
        self._adapter = StoreAdapter(options, settings.store, rank, params.page_size)
        self._upkeep = Upkeep(self._adapter.store, settings.store)
        shown = StoreCollector(self._adapter.store, sglang_api.served_name(), place.number)
        self._served = serve_metrics(settings.metrics, place.number, shown)
        self._out = self._device_pools(kvcache)
        self._whole = {name: tuple(pages.whole() for pages in of) for name, of in self._out.items()}
        self._steps = _steps(self._device_pools(kvcache), self._group.num_layers)
        self.layer_done_counter = engine_linker.LayerWiseLoadCounter(self._group.num_layers)
        if engine_linker.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._pending: dict[str, Sequence[PoolTransfer]] = {}
        self._done = Queue[bool]()
        self._loads, self._offloads = (
            StoreWorker("kvmover-load", self._load),
            StoreWorker("kvmover-offload", self._offload),
        )
        UPDATES.follow(self)

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Returns the length in pages of every prefix that this rank can restore."""
        expanded: list[PoolTransfer] = self._group.resolve_transfers(transfers)
        pages = [page_of(key) for transfer in transfers if str(transfer.name) == MAIN for key in transfer.keys or ()]
        if not expanded or not pages:
            return []
        found: dict[str, list[bool]] = {}
        trailing: dict[str, int] = {}
        for transfer in expanded:
            answers = [backend.exists(pages) for backend in self._whole[str(transfer.name)]]
            found[str(transfer.name)] = of_all(answers)
            last = transfer.hit_policy is not sglang_api.ALL_PAGES
            trailing[str(transfer.name)] = max(1, len(transfer.keys or ())) if last else ALL_PAGES
        return list(hits(found, trailing).lengths)

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load for the next `start_layer_wise_loading`. Pages already on the device are left out.

        Returns False without pages to load. Raises StoreError if a load for `rid` is queued.
        """
        expanded = self._group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        if not expanded:
            return False
        if rid in self._pending:
            raise StoreError(f"a load for {rid} is queued already")
        self._pending[rid] = expanded
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Drop a queued load before `start_layer_wise_loading` takes it. Returns False without such a load."""
        return self._pending.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Start all queued loads as one, behind the current stream. Returns its number, or -1 without loads."""
        if not self._pending:
            return -1
        transfers = [transfer for of_request in self._pending.values() for transfer in of_request]
        self._pending.clear()
        number: int = self.layer_done_counter.update_producer()
        self._loads.put(LinkerJob(transfers, [engine_linker.recorded()], number))
        return number

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait for every layer of load `counter_index`. Returns True if all of them landed."""
        return self.layer_done_counter.finish(counter_index)

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Queue pages for storage, each by one of the ranks that hold it. Returns False without pages."""
        expanded = self._group.resolve_transfers(transfers, allow_partial=True)
        if expanded:
            self._offloads.put(LinkerJob(expanded, self.record_offload_ready()))
        return bool(expanded)

    def num_completed_offloads(self) -> int:
        """Returns the number of ended offloads that were not popped."""
        return self._done.qsize()

    def pop_completed_offload(self) -> bool:
        """Pop the oldest ended offload. Returns True if it stored all its pages. Raises queue.Empty without offload."""
        return self._done.get_nowait()

    def reset(self) -> None:
        """Drop queued loads, wait for running loads and offloads, and forget their results. Stored pages stay."""
        self._pending.clear()
        self._loads.settle()
        self._offloads.settle()
        while self._done.qsize():
            self._done.get_nowait()
        self.layer_done_counter.reset()

    def reweigh(self) -> None:
        """Store and load pages of the engine's present weights, once queued work has ended. Raises StoreError."""
        self._loads.settle()
        self._offloads.settle()
        self._adapter.reweigh()
        self._whole = self._moved(self._whole)
        self._steps = [replace(step, backends=self._moved(step.backends)) for step in self._steps]

    def _moved(self, backends: dict[str, tuple[PackedBackend, ...]]) -> dict[str, tuple[PackedBackend, ...]]:
        store, space = self._adapter.store, self._adapter.space
        return {name: tuple(each.moved(store, space) for each in of) for name, of in backends.items()}

    def close(self) -> None:
        """Wait for running work, end both threads, and close the store."""
        UPDATES.leave(self)
        self.reset()
        for worker in (self._loads, self._offloads):
            worker.close()
        if self._served is not None:
            self._served.close()
        self._upkeep.close()
        self._adapter.store.close()

    def _device_pools(self, kvcache: Any) -> dict[str, list[DevicePoolPages]]:
        """Returns the pages of every pool for one thread, with bounce memory and a stream of its own."""
        first, adapter = kvcache.start_layer, self._adapter
        strands = {
            str(name): checked_strands(LINKER, entry, first, self._placement_of(entry.device_pool))
            for name, entry in self.pools.items()
        }
        parts = {name: [self._part(name, strand, kvcache) for strand in of] for name, of in strands.items()}
        bounce = BounceBuffer.of(max(part.nbytes for of in parts.values() for part in of))
        adapter.register([bounce.memory])
        move = host_stream(engine_linker.device_of(kvcache)).move
        made: dict[str, list[DevicePoolPages]] = {}
        for name, entry in self.pools.items():
            flat = [as_bytes(buffer) for buffer in entry.kv_buffer]
            made[str(name)] = [
                DevicePoolPages(strand, part, tuple(flat[number] for number in strand.buffers), adapter, bounce, move)
                for strand, part in zip(strands[str(name)], parts[str(name)], strict=True)
            ]
        return made

    def _placement_of(self, pool: Any) -> TpPlacement:
        """Returns the placement of one of the group's pools: REPLICATED if the group is, else by its class."""
        return self._placement if self._placement is TpPlacement.REPLICATED else placement_of(pool)

    def _part(self, name: str, strand: Strand, kvcache: Any) -> PagePart:
        rank, layers = self._adapter.rank, kvcache.end_layer - kvcache.start_layer
        return part_of_strand(name, strand, rank.place, rank.model, layers, self._adapter.page_tokens)

    def _load(self, job: LinkerJob) -> None:
        """Load the layers in order. A missing page fails the load, which the engine then aborts."""
        try:
            _wait(job)
            for step in self._steps:
                for transfer in job.transfers:
                    pages, tokens = [page_of(key) for key in transfer.keys or ()], _tokens(transfer)
                    for backend in step.backends[str(transfer.name)]:
                        missing = backend.get(pages, tokens).count(False)
                        if missing:
                            raise StoreError(f"{missing} of {len(pages)} pages of {transfer.name} could not be read")
                for layer in step.layers:
                    self.layer_done_counter.complete(job.number, layer)
        except Exception as error:
            log.exception("load %d failed", job.number)
            self.layer_done_counter.fail(job.number, error)

    def _offload(self, job: LinkerJob) -> None:
        done = False
        try:
            _wait(job)
            done = all(self._put(transfer) for transfer in job.transfers)
        except Exception:
            log.exception("offload failed")
        self._done.put(done)

    def _put(self, transfer: PoolTransfer) -> bool:
        pages, tokens = [page_of(key) for key in transfer.keys or ()], _tokens(transfer)
        return all(all(backend.put(pages, tokens)) for backend in self._whole[str(transfer.name)])


def _steps(pools: dict[str, list[DevicePoolPages]], layers: int) -> list[Step]:
    cuts = [range(step * layers // STEPS, (step + 1) * layers // STEPS) for step in range(STEPS)]
    return [
        Step(
            cut,
            {
                name: tuple(pages.layers(run) for pages in of for run in pages.strand.own(cut))
                for name, of in pools.items()
            },
        )
        for cut in cuts
        if cut
    ]


def _wait(job: LinkerJob) -> None:
    for event in job.ready:
        event.synchronize()


def _tokens(transfer: PoolTransfer) -> Numbers:
    """Returns a transfer's device indices, which SGLang passes as `host_indices`. Raises StoreError if absent."""
    if transfer.host_indices is None:
        raise StoreError(f"pages of {transfer.name} without indices")
    return transfer.host_indices.cpu().numpy()
