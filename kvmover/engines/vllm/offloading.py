"""A page store behind the host memory of vLLM's own offloading, and an account of every request.

vLLM moves its caches to that memory and back, whatever model they are of; a tier sees chunks of it. A chunk is a page,
and its row in that memory the page's place: PageTierManager translates, and a PageTier does the rest. All methods are
for vLLM's scheduler, and wait for nothing but `drain_jobs` and `shutdown`.

All names of vLLM's that only offloading uses are imported here, by their paths: what a new release has to be read for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np

from kvmover.cache.ledger import AccountGroup
from kvmover.cache.page_tiers import FinishedJob, PageJob, PageRequest, PageTier, PageVerb
from kvmover.config import Settings, load
from kvmover.engines.common import open_row_tier
from kvmover.engines.vllm import engine
from kvmover.engines.vllm.block_store import page_of
from kvmover.engines.vllm.options import parse_tier
from kvmover.engines.vllm.request_accounts import RequestAccounts
from kvmover.engines.vllm.served_model import PEER_TIER, ServedModel, weights_of_tier
from kvmover.engines.vllm.weight_updates import follow_in_scheduler
from kvmover.observe.logs import Guest
from kvmover.observe.observers import Observers, begin_logs
from kvmover.transport import Memory, MemoryKind

_offload: Any = import_module("vllm.v1.kv_offload.base")
_tiers: Any = import_module("vllm.v1.kv_offload.tiering.base")
_metrics: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics")
_connector: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")
_platform: Any = import_module("vllm.platforms").current_platform

OffloadingConnector: Any = _connector.OffloadingConnector
SecondaryTierManager: Any = _tiers.SecondaryTierManager
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
    PageVerb.WRITE: (
        "vllm:kvmover_tier_stores",
        "Chunks that vLLM gave to the page store, by how that ended: written, present, failed, dropped.",
    ),
    PageVerb.READ: (
        "vllm:kvmover_tier_loads",
        "Chunks that vLLM asked of the page store, by how that ended: read, absent, evicted, poisoned, failed.",
    ),
}


@dataclass(slots=True, eq=False)
class Looked:
    """The chunks that a request looked up. `found`: by key, None until it is known. `new`: keys of the next look-up, by
    the names of their pages.

    Of a tier that needs a request: `pages` says which, and its pages are named by `hashes` of the tokens of `request`.
    """

    pages: PageRequest | None = None
    request: Any = None
    hashes: list[bytes] = field(default_factory=list[bytes])
    found: dict[bytes, bool | None] = field(default_factory=dict[bytes, bool | None])
    new: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])


class PageTierManager(SecondaryTierManager):
    """A PageTier as vLLM's manager of tiers drives one. Every failure is a miss.

    A subclass opens the tier and has the methods that raise NotImplementedError here.
    """

    def serve(self, tier: PageTier, settings: Settings, logger: str) -> None:
        """Begin: `tier` belongs to this from now on."""
        self._tier: PageTier | None = tier
        self._requests: dict[str, Looked] = {}
        self._jobs: dict[int, tuple[Any, list[bytes]]] = {}
        self._lookups: dict[int, tuple[Looked, list[bytes]]] = {}
        self._serial = 0
        self._results: list[Any] = []
        self._counts: Counter[tuple[PageVerb, str]] = Counter()
        self._end_logs = begin_logs(settings.logging, None if log.hasHandlers() else Guest(engine.LOG, logger))

    # A subclass's own

    def name(self, key: bytes, looked: Looked, req_context: Any) -> bytes | None:
        """Returns the name of a chunk's page; None where the tier has none for it."""
        raise NotImplementedError

    def begun(self, req_context: Any) -> Looked:
        """Returns the state of a request that is new."""
        return Looked()

    def counted(self, verb: PageVerb, outcome: str) -> tuple[str, tuple[str, ...]]:
        """Returns the counter of an outcome, and the values of its labels."""
        raise NotImplementedError

    def stored(self, keys: list[bytes]) -> None:
        """Hear of chunks that are stored now."""

    # Look-ups

    def on_new_request(self, req_context: Any) -> Any:
        """Returns that chunks are stored when they are computed, by whatever request."""
        self._requests[req_context.req_id] = self.begun(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Returns HIT or MISS, or RETRY until the tier has answered."""
        if self._tier is None:
            return MISS
        looked = self._requests.get(req_context.req_id)
        if looked is None:
            looked = self._requests[req_context.req_id] = self.begun(req_context)
        if key not in looked.found:
            name = self.name(key, looked, req_context)
            looked.found[key] = False if name is None else None
            if name is not None:
                looked.new[name] = key
        if looked.found[key] is None:
            self._hear(self._tier)
        found = looked.found[key]
        if found is None:
            return RETRY
        return HIT if found else MISS

    def on_schedule_end(self, context: Any) -> None:
        """Submit the look-ups of this step, one job a request."""
        for looked in self._requests.values():
            if looked.new and self._tier:
                self._serial += 1
                self._lookups[self._serial] = looked, list(looked.new.values())
                self._tier.lookup(PageJob(self._serial, tuple(looked.new), request=looked.pages))
                looked.new = {}

    def on_request_finished(self, req_context: Any) -> None:
        """Forget the request's look-ups; the tier gives back pages that were found and not read."""
        looked = self._requests.pop(req_context.req_id, None)
        if self._tier and looked is not None and looked.pages is not None:
            self._tier.release(looked.pages)

    # Chunks

    def submit_store(self, job_metadata: Any) -> None:
        """Write chunks, which vLLM keeps as they are until the job has ended."""
        assert self._tier, "vLLM submits nothing after `shutdown`"
        self._tier.write(self._job(job_metadata))

    def submit_load(self, job_metadata: Any) -> None:
        """Read chunks, into rows that belong to the job until it has ended."""
        assert self._tier, "vLLM submits nothing after `shutdown`"
        job, looked = self._job(job_metadata), self._requests.get(job_metadata.req_context.req_id)
        if looked is not None and looked.pages is not None:  # such a tier may bring no others: they are looked up again
            own = set(job_metadata.keys)
            looked.found = {key: found for key, found in looked.found.items() if found is None or key in own}
        self._tier.read(job)

    def _job(self, job: Any) -> PageJob:
        looked = self._requests.get(job.req_context.req_id) or self.begun(job.req_context)
        named = [
            (key, name, row)
            for key, row in zip(job.keys, job.chunk_ids.tolist(), strict=True)
            if (name := self.name(key, looked, job.req_context)) is not None
        ]
        self._jobs[job.job_id] = job, [key for key, _, _ in named]
        names, rows = tuple(name for _, name, _ in named), tuple(row for _, _, row in named)
        return PageJob(job.job_id, names, rows, looked.pages)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Returns jobs that have ended. A chunk that could not be read is a miss, and is not looked up again."""
        if self._tier:
            self._hear(self._tier)
        taken, self._results = self._results, []
        return taken

    def _hear(self, tier: PageTier) -> None:
        for ended in tier.finished():
            if ended.verb is PageVerb.LOOKUP:
                looked, keys = self._lookups.pop(ended.job.number)
                looked.found.update(zip(keys, ended.done, strict=True))
            else:
                self._counts.update({(ended.verb, outcome): count for outcome, count in ended.outcomes.items()})
                self._results.append(self._result(ended))

    def _result(self, ended: FinishedJob) -> Any:
        job, keys = self._jobs.pop(ended.job.number)
        whole = [key for key, done in zip(keys, ended.done, strict=True) if done]
        loads, looked = ended.verb is PageVerb.READ, self._requests.get(job.req_context.req_id)
        if loads and looked is not None:
            looked.found.update(dict.fromkeys(set(keys) - set(whole), False))
        elif whole and not loads:
            self.stored(whole)
        return JobResult(
            job_id=job.job_id,
            success=ended.ok,
            successful_keys=whole if loads else None,
            transfer_time=ended.seconds,
            transfer_bytes=ended.nbytes,
        )

    def drain_jobs(self) -> None:
        """Return when no row is read or written any more."""
        if self._tier:
            self._tier.settle()

    def shutdown(self) -> None:
        """End what was submitted, and close the tier. Safe to call twice."""
        tier, self._tier = self._tier, None
        if tier:
            tier.close()
            self._end_logs()

    def get_stats(self) -> Any:
        """Returns chunks by how they ended since the last call; None for none."""
        counts, self._counts = self._counts, Counter()
        if not counts:
            return None
        stats = TierStats()
        for (verb, outcome), count in counts.items():
            name, labels = self.counted(verb, outcome)
            stats.increase_counter(name, count, labels)
        return stats


class KvmoverTier(PageTierManager):
    """Chunks of vLLM's CPU tier in a page store that any number of engines share.

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
        what, memory = chunk_content(offloading_spec), memory_of_view(primary_kv_view)
        self._store_tier = open_row_tier(settings.store, space, what, memory, self.block_size_bytes)
        self.serve(self._store_tier, settings, "kvmover tier")
        log.info("%s", weights.told())
        log.info("%d chunks of %d bytes in %s: %s", len(primary_kv_view), self.block_size_bytes, space, what)
        follow_in_scheduler(config.engine_id, self)

    def updated(self, version: str | None) -> None:
        """Other weights are served than at the start, `version` by the caller's word: go on with chunks of these; None:
        with none. vLLM's own memory is empty when there is a version."""
        weights = self._weights.updated(version)
        if self._tier:
            self._store_tier.become(weights.namespace(self._page_tokens, self._tenant) if weights.is_known else None)
            weights.log()

    def name(self, key: bytes, looked: Looked, req_context: Any) -> bytes | None:
        """Returns the page that vLLM's hash, and its number of the cache group, name."""
        return page_of(key)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Mark chunks as used on the device or the host: the store evicts them last."""
        if self._tier:
            self._tier.touch(map(page_of, tuple(keys)))

    def stored(self, keys: list[bytes]) -> None:
        """Tell of stored chunks, where events are on."""
        if self._tells:
            self._events.append(OffloadingEvent(keys, self.medium, False, self.locality))

    def take_events(self) -> Sequence[Any]:
        """KV events of chunks that were stored since the last call."""
        taken, self._events = self._events, []
        return taken

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Counters in vLLM's own registry."""
        return {name: CounterMetadata(text, ("outcome",)) for name, text in _METRICS.values()}

    def counted(self, verb: PageVerb, outcome: str) -> tuple[str, tuple[str, ...]]:
        """Returns the counter of the verb, with the outcome as its label."""
        return _METRICS[verb][0], (str(outcome),)


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
