"""What kvmover adds to vLLM's own offloading: a page store behind the host's memory, and an account of every request.

vLLM moves its caches to that memory and back, whatever model they are of; KvmoverTier sees chunks of it. All methods
are for vLLM's scheduler, and wait for nothing but `drain_jobs` and `shutdown`.

All names of vLLM's that only offloading uses are imported here, by their paths: what a new release has to be read for.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np

from kvmover.cache.ledger import AccountGroup
from kvmover.config import load
from kvmover.engines.vllm import engine
from kvmover.engines.vllm.chunk_store import DROPPED, ChunkJob, ChunkStore, ChunkVerb, EndedJob
from kvmover.engines.vllm.options import parse_tier
from kvmover.engines.vllm.request_accounts import RequestAccounts
from kvmover.engines.vllm.served_model import PEER_TIER, ServedModel, weights_of_tier
from kvmover.engines.vllm.weight_updates import follow_in_scheduler
from kvmover.observe.logs import Guest
from kvmover.observe.observers import Observers, begin_logs
from kvmover.store import Got, Put
from kvmover.transport import Memory, MemoryKind

_offload: Any = import_module("vllm.v1.kv_offload.base")
_tiers: Any = import_module("vllm.v1.kv_offload.tiering.base")
_metrics: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics")
_connector: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
_platform: Any = import_module("vllm.platforms").current_platform

OffloadingConnector: Any = _connector.OffloadingConnector
SecondaryTierManager: Any = _tiers.SecondaryTierManager
AsyncLookupManager: Any = import_module("vllm.v1.kv_offload.tiering.async_lookup").AsyncLookupManager
JobResult: Any = _tiers.JobResult
RequestOffloadingContext: Any = _offload.RequestOffloadingContext
OffloadingEvent: Any = _offload.OffloadingEvent
CounterMetadata: Any = _offload.OffloadingCounterMetadata
TierStats: Any = _metrics.OffloadingConnectorStats

#: What vLLM knows of a key.
HIT, MISS, RETRY = (getattr(_offload.LookupResult, name) for name in ("HIT", "MISS", "RETRY"))

STORAGE: Any = _offload.Medium.STORAGE
Locality: Any = _offload.Locality


def memory_of_view(view: memoryview) -> Memory:
    """All of a view [chunk, byte], dense, of host memory. It is not held on to: vLLM releases it after the tier."""
    return Memory(MemoryKind.HOST, np.asarray(view).ctypes.data, view.nbytes)


def chunk_tokens(config: Any) -> int:
    """Tokens of a chunk of the first cache group of an `OffloadingConfig`."""
    return config.groups[0].tokens_per_block * config.cache.blocks_per_chunk


def chunk_content(offloading_spec: Any) -> str:
    """What the bytes of a chunk are, in words: only where all of them are equal do two chunks of a key mean the same.

    The order of the bytes is vLLM's: it may change with its release, and with the attention backend, which it chooses
    by the device. Ranks lie one after the other, each in its own order; with one rank, or one copy for all, or vLLM's
    canonical layout, nothing of the ranks is left.
    """
    config = offloading_spec.config
    parallel, cache = config.parallel, config.cache
    if config.canonical_layout and parallel.is_parallelism_agnostic:
        ranks = "canonical"
    elif offloading_spec.replicated_layout or parallel.world_size == 1:
        ranks = "one copy"
    else:
        sizes = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
        ranks = "TP{} PP{} PCP{} DCP{}".format(*sizes) + ", canonical" * config.canonical_layout
    groups = repr([(group.tokens_per_block, sorted(group.layer_names)) for group in config.groups])
    return ", ".join(
        (
            f"vLLM {version('vllm').partition('+')[0]} on {_platform.device_type} {_capability()}",
            f"{cache.blocks_per_chunk} blocks of {cache.tokens_per_hash} tokens a hash",
            f"{config.model.dtype} {config.kv_cache_layout}",
            ranks,
            f"groups {sha256(groups.encode()).hexdigest()[:16]}",
        )
    )


def _capability() -> str:
    """Of the device, as far as the platform knows one."""
    found = _platform.get_device_capability()
    return "" if found is None else found.as_version_str()


log = logging.getLogger(__name__)

#: vLLM's own counters say how many bytes and jobs there were of each tier; these say how each chunk ended.
_METRICS = {
    ChunkVerb.STORE: (
        "vllm:kvmover_tier_stores",
        "Chunks that vLLM gave to the page store, by how that ended: written, present, failed, dropped.",
        (Put.WRITTEN, Put.PRESENT, Put.FAILED, DROPPED),
    ),
    ChunkVerb.LOAD: (
        "vllm:kvmover_tier_loads",
        "Chunks that vLLM asked of the page store, by how that ended: read, absent, evicted, poisoned, failed.",
        tuple(Got),
    ),
}


class StoreLookups(AsyncLookupManager):
    """Look-ups of a step, done in a thread of their own while the model computes; a store that fails has nothing."""

    def __init__(self, chunks: ChunkStore, tier_type: str) -> None:
        self._chunks = chunks  # before the thread starts that asks for it
        AsyncLookupManager.__init__(self, tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> list[bool]:
        """Whether each chunk is stored. Called in that thread."""
        return self._chunks.exists(keys)


class KvmoverTier(SecondaryTierManager):
    """Chunks of vLLM's CPU tier in a page store that any number of engines share. Every failure is a miss.

    vLLM loads it by `"type": "KvmoverTier", "module_path": "kvmover.engines.vllm"` in `secondary_tiers`.
    """

    medium: ClassVar[Any] = STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **said: Any,
    ) -> None:
        """`primary_kv_view` [chunk, byte] stays vLLM's. Raises ConfigError or StoreError, a sentence."""
        SecondaryTierManager.__init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options, settings = parse_tier(said)
        self.locality = Locality(options.locality) if options.locality else None
        self._tells = options.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[Any] = []
        config = offloading_spec.config
        weights = weights_of_tier(config.model.name, options.model or config.model.name, settings)
        self._weights, self._page_tokens, self._tenant = weights, chunk_tokens(config), options.tenant
        space = weights.namespace(self._page_tokens, self._tenant)
        what = chunk_content(offloading_spec)
        memory = memory_of_view(primary_kv_view)
        self._chunks: ChunkStore | None = ChunkStore.open(settings.store, space, what, memory, self.block_size_bytes)
        self._lookups = StoreLookups(self._chunks, tier_type)
        guest = None if log.hasHandlers() else Guest(engine.LOG, "kvmover tier")
        self._end_logs = begin_logs(settings.logging, guest)
        log.info("%s", weights.told())
        log.info("%d chunks of %d bytes in %s: %s", len(primary_kv_view), self.block_size_bytes, space, what)
        follow_in_scheduler(config.engine_id, self)

    def updated(self, version: str | None) -> None:
        """Other weights are served than at the start, `version` by the caller's word: go on with chunks of these; None:
        with none. vLLM's own memory is empty when there is a version."""
        weights = self._weights.updated(version)
        if self._chunks:
            self._chunks.become(weights.namespace(self._page_tokens, self._tenant) if weights.is_known else None)
            weights.log()

    # Look-ups

    def on_new_request(self, req_context: Any) -> Any:
        """Chunks are stored when they are computed, whatever request they are of."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT or MISS, or RETRY until the thread has looked."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return RETRY
        return HIT if found else MISS

    def on_schedule_end(self, context: Any) -> None:
        """What was asked for in this step is looked up now."""
        self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        """What was found for this request alone is forgotten."""
        self._lookups.cleanup(req_context.req_id)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """What is used on the device or the host is not the next to go from the store."""
        if self._chunks:
            self._chunks.touch(tuple(keys))

    # Chunks

    def submit_store(self, job_metadata: Any) -> None:
        """Write chunks, which vLLM keeps as they are until the job has ended."""
        self._open.submit_store(_job(job_metadata))

    def submit_load(self, job_metadata: Any) -> None:
        """Read chunks, into rows that are nobody's until the job has ended."""
        self._open.submit_load(_job(job_metadata))

    def get_finished_jobs(self) -> Iterable[Any]:
        """Jobs that have ended. Of a load in part the rest is a miss, for which nobody asks the store again."""
        return [self._result(ended) for ended in (self._chunks.ended() if self._chunks else ())]

    def _result(self, ended: EndedJob) -> Any:
        job = ended.job
        whole = tuple(key for key, done in zip(job.keys, ended.done, strict=True) if done)
        loads = ended.verb is ChunkVerb.LOAD
        if loads:
            self._lookups.mark_miss(set(job.keys) - set(whole))
        elif self._tells and whole:
            self._events.append(OffloadingEvent(list(whole), self.medium, False, self.locality))
        return JobResult(
            job_id=job.number,
            success=ended.ok,
            successful_keys=whole if loads else None,
            transfer_time=ended.seconds,
            transfer_bytes=ended.nbytes,
        )

    def take_events(self) -> Sequence[Any]:
        """KV events of chunks that were stored since the last call."""
        taken, self._events = self._events, []
        return taken

    def drain_jobs(self) -> None:
        """Return when no row is read or written any more."""
        if self._chunks:
            self._chunks.settle()

    def shutdown(self) -> None:
        """Store what was submitted, and close the store. Safe to call twice."""
        chunks, self._chunks = self._chunks, None
        if chunks:
            self._lookups.shutdown()
            chunks.close()
            self._end_logs()

    @property
    def _open(self) -> ChunkStore:
        assert self._chunks, "vLLM submits nothing after `shutdown`"
        return self._chunks

    # Metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Counters in vLLM's own registry."""
        return {name: CounterMetadata(text, ("outcome",)) for name, text, _ in _METRICS.values()}

    def get_stats(self) -> Any:
        """Chunks by how they ended since the last call; None for none."""
        counts = self._chunks.take_counts() if self._chunks else None
        if not counts:
            return None
        stats = TierStats()
        for (verb, outcome), count in counts.items():
            stats.increase_counter(_METRICS[verb][0], count, (str(outcome),))
        return stats


def _job(job: Any) -> ChunkJob:
    return ChunkJob(job.job_id, tuple(job.keys), tuple(job.chunk_ids.tolist()))


class KvmoverOffloadingConnector(OffloadingConnector):
    """Offloads as vLLM does; the scheduler's half tells a ledger what it hears. Options are vLLM's own."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ConfigError or KvmoverError for kvmover's configuration, and what vLLM's own raises."""
        self._served = ServedModel(vllm_config, kv_cache_config)
        with self._served:
            OffloadingConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role is engine.SCHEDULER:
            tiers = self._kv_transfer_config.kv_connector_extra_config.get("secondary_tiers", ())
            asks_peers = any(tier.get("type") == PEER_TIER for tier in tiers)
            self._lenders = frozenset((engine.P2P,) if asks_peers else ())
            ranks = vllm_config.parallel_config.world_size
            self._observers = Observers(load().settings, self._kv_transfer_config.engine_id, ranks)
            self._accounts = RequestAccounts(
                AccountGroup(model=vllm_config.model_config.model), self._observers.account
            )
            self._observers.serve(self._accounts)

    def on_new_request(self, request: Any) -> None:
        """As vLLM's."""
        self._served.seen(request)
        OffloadingConnector.on_new_request(self, request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's."""
        found, is_async = OffloadingConnector.get_num_new_matched_tokens(self, request, num_computed_tokens)
        self._accounts.matched(request, num_computed_tokens, found)
        return found, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As vLLM's."""
        OffloadingConnector.update_state_after_alloc(self, request, blocks, num_external_tokens)
        if num_external_tokens:
            sources = self.get_external_cache_hit_sources(request, num_external_tokens)
            self._accounts.allocated(request, engine.external_of(sources, self._lenders))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As vLLM's."""
        self._accounts.scheduled(scheduler_output)
        return OffloadingConnector.build_connector_meta(self, scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's."""
        self._accounts.finished(request)
        return OffloadingConnector.request_finished(self, request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's."""
        self._accounts.finished(request)
        return OffloadingConnector.request_finished_all_groups(self, request, block_ids)

    def shutdown(self) -> None:
        """As vLLM's, and the ledger's metrics and run log end. Safe to call twice."""
        OffloadingConnector.shutdown(self)
        if self._role is engine.SCHEDULER:
            self._observers.close()
