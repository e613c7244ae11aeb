"""A page store behind the host memory of vLLM's own offloading, and an account of every request.

vLLM copies its caches of any model to that memory and back; a tier sees chunks of it. A chunk is a page, and its row in
that memory the page's place: PageTierManager translates, and a PageTier does the rest. All methods are for vLLM's
scheduler; only `drain_jobs` and `shutdown` wait.

All names of vLLM that only offloading uses are imported here, by their paths: to check against a new release.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, ClassVar

import numpy as np

from kvmover.cache.ledger import AccountGroup
from kvmover.cache.page_tiers import FinishedJob, PageJob, PageRequest, PageTier, PageVerb
from kvmover.config import Settings, load
from kvmover.engines.common import open_row_tier
from kvmover.engines.vllm import vllm_api
from kvmover.engines.vllm.block_store import page_of
from kvmover.engines.vllm.request_accounts import RequestAccounts
from kvmover.engines.vllm.served_model import PEER_TIER, ServedModel, weights_of_tier
from kvmover.engines.vllm.vllm_contract import (
    OFFLOADING,
    ONE_COPY,
    V1,
    VLLM,
    hit_sources,
    job_result,
    layout_revision,
    make_tier,
)
from kvmover.engines.vllm.vllm_options import parse_tier
from kvmover.engines.vllm.vllm_weight_updates import follow_in_scheduler
from kvmover.observe.endpoint import serve_metrics
from kvmover.observe.logs import Guest
from kvmover.observe.observers import Observers, begin_logs
from kvmover.store import StoreCollector
from kvmover.transport import Memory, MemoryKind

VLLM.require(OFFLOADING)

_platform: Any = VLLM.find("vllm.platforms").current_platform
_lookups: Any = VLLM.find("vllm.v1.kv_offload.base:LookupResult")

OffloadingConnector: Any = VLLM.find(f"{V1}.offloading_connector:OffloadingConnector")
SecondaryTierManager: Any = VLLM.find("vllm.v1.kv_offload.tiering.base:SecondaryTierManager")
RequestOffloadingContext: Any = VLLM.find("vllm.v1.kv_offload.base:RequestOffloadingContext")
OffloadingEvent: Any = VLLM.find("vllm.v1.kv_offload.base:OffloadingEvent")
CounterMetadata: Any = VLLM.find("vllm.v1.kv_offload.base:OffloadingCounterMetadata")
TierStats: Any = VLLM.find(f"{V1}.offloading.metrics:OffloadingConnectorStats")

#: vLLM's answers to the look-up of a key.
HIT, MISS, RETRY = (getattr(_lookups, name) for name in ("HIT", "MISS", "RETRY"))

STORAGE: Any = VLLM.find("vllm.v1.kv_offload.base:Medium").STORAGE
Locality: Any = VLLM.find("vllm.v1.kv_offload.base:Locality")


def memory_of_view(view: memoryview) -> Memory:
    """Returns the host memory of a dense view [chunk, byte]. The view is not kept: vLLM releases it after the tier."""
    return Memory(MemoryKind.HOST, np.asarray(view).ctypes.data, view.nbytes)


def chunk_tokens(config: Any) -> int:
    """Returns the tokens of a chunk of the first cache group of an `OffloadingConfig`."""
    return config.groups[0].tokens_per_block * config.cache.blocks_per_chunk


def chunk_content(offloading_spec: Any) -> str:
    """Returns a text for the byte format of a chunk: chunks of a key are interchangeable only if these texts are equal.

    vLLM chooses the order of bytes: it may change with the attention backend, which depends on the device, and with a
    release. Ranks are one after the other, each in its own order; with one rank, one copy for all,
    or vLLM's canonical layout, the order is independent of the ranks.
    """
    config = offloading_spec.config
    parallel, cache = config.parallel, config.cache
    if config.canonical_layout and parallel.is_parallelism_agnostic:
        ranks = "canonical"
    elif offloading_spec.replicated_layout or parallel.world_size == 1:
        ranks = ONE_COPY
    else:
        sizes = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
        ranks = "TP{} PP{} PCP{} DCP{}".format(*sizes) + ", canonical" * config.canonical_layout
    groups = repr([(group.tokens_per_block, sorted(group.layer_names)) for group in config.groups])
    return ", ".join(
        (
            f"vLLM's {layout_revision(ranks)} on {_platform.device_type} {_capability()}",
            f"{cache.blocks_per_chunk} blocks of {cache.tokens_per_hash} tokens a hash",
            f"{config.model.dtype} {config.kv_cache_layout}",
            ranks,
            f"groups {sha256(groups.encode()).hexdigest()[:16]}",
        )
    )


def _capability() -> str:
    """Returns the device's compute capability, "" if the platform has none."""
    found = _platform.get_device_capability()
    return "" if found is None else found.as_version_str()


log = logging.getLogger(__name__)

#: vLLM's own counters give bytes and jobs of each tier; these count chunks by outcome.
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
    """The chunks that a request looked up. `found`: by key, None until known. `new`: keys of the next look-up, by page
    name.

    For a tier that needs the request, `pages` identifies it, and pages are named by `hashes` of the tokens of
    `request`.
    """

    pages: PageRequest | None = None
    request: Any = None
    hashes: list[bytes] = field(default_factory=list[bytes])
    found: dict[bytes, bool | None] = field(default_factory=dict[bytes, bool | None])
    new: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])


class PageTierManager(SecondaryTierManager):
    """A PageTier behind vLLM's interface of a secondary tier. Every failure is a miss.

    A subclass opens the tier and implements the methods that raise NotImplementedError here.
    """

    def serve(self, tier: PageTier, settings: Settings, logger: str) -> None:
        """Begin to serve `tier`, which is owned and closed by this manager."""
        self._tier: PageTier | None = tier
        self._requests: dict[str, Looked] = {}
        self._jobs: dict[int, tuple[Any, list[bytes]]] = {}
        self._lookups: dict[int, tuple[Looked, list[bytes]]] = {}
        self._serial = 0
        self._results: list[Any] = []
        self._counts: Counter[tuple[PageVerb, str]] = Counter()
        self._end_logs = begin_logs(settings.logging, None if log.hasHandlers() else Guest(vllm_api.LOG, logger))

    # A subclass's own

    def name(self, key: bytes, looked: Looked, req_context: Any) -> bytes | None:
        """Returns the name of a chunk's page; None if the tier has none for it."""
        raise NotImplementedError

    def begun(self, req_context: Any) -> Looked:
        """Returns the state of a new request."""
        return Looked()

    def counted(self, verb: PageVerb, outcome: str) -> tuple[str, tuple[str, ...]]:
        """Returns the counter of an outcome, and the values of its labels."""
        raise NotImplementedError

    def stored(self, keys: list[bytes]) -> None:
        """Take note of chunks that are stored now."""

    # Look-ups

    def on_new_request(self, req_context: Any) -> Any:
        """Returns a context that stores chunks as they are computed, for any request."""
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
        """Forget the request's look-ups; the tier releases pages that were found and not read."""
        looked = self._requests.pop(req_context.req_id, None)
        if self._tier and looked is not None and looked.pages is not None:
            self._tier.release(looked.pages)

    # Chunks

    def submit_store(self, job_metadata: Any) -> None:
        """Write chunks, which vLLM keeps unchanged until the job has ended."""
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
        return job_result(
            job_id=job.job_id,
            success=ended.ok,
            successful_keys=whole if loads else None,
            transfer_time=ended.seconds,
            transfer_bytes=ended.nbytes,
        )

    def drain_jobs(self) -> None:
        """Return when no read or write of a row is open."""
        if self._tier:
            self._tier.settle()

    def shutdown(self) -> None:
        """Finish all jobs, and close the tier. Safe to call twice."""
        tier, self._tier = self._tier, None
        if tier:
            tier.close()
            self._end_logs()

    def get_stats(self) -> Any:
        """Returns chunks by outcome since the last call; None if there are none."""
        counts, self._counts = self._counts, Counter()
        if not counts:
            return None
        stats = TierStats()
        for (verb, outcome), count in counts.items():
            name, labels = self.counted(verb, outcome)
            stats.increase_counter(name, count, labels)
        return stats


class KvmoverTier(PageTierManager):
    """The chunks of vLLM's CPU tier in a page store that any number of engines share.

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
        """`primary_kv_view` [chunk, byte] stays vLLM's. Raises ConfigError or StoreError, in a sentence."""
        make_tier(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options, settings = parse_tier(said)
        self.locality = Locality(options.locality) if options.locality else None
        self._tells = options.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[Any] = []
        config = offloading_spec.config
        weights = weights_of_tier(config.model.name, options.model or config.model.name, settings)
        self._weights, self._page_tokens, self._tenant = weights, chunk_tokens(config), options.tenant
        space = weights.namespace(self._page_tokens, self._tenant)
        what, memory = chunk_content(offloading_spec), memory_of_view(primary_kv_view)
        row_bytes = memory.nbytes // len(primary_kv_view)
        self._store_tier = open_row_tier(settings.store, space, what, memory, row_bytes)
        self.serve(self._store_tier, settings, "kvmover tier")
        ranks = config.parallel.world_size
        shown = StoreCollector(self._store_tier.store, config.engine_id, ranks)
        self._metrics = serve_metrics(settings.metrics, ranks, shown)
        log.info("%s", weights.told())
        log.info("%d chunks of %d bytes in %s: %s", len(primary_kv_view), row_bytes, space, what)
        follow_in_scheduler(config.engine_id, self)

    def shutdown(self) -> None:
        """Finish all jobs, and close the tier and its metrics. Safe to call twice."""
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            metrics.close()
        PageTierManager.shutdown(self)

    def updated(self, version: str | None) -> None:
        """Switch to chunks of other weights, named `version` by the caller; to none with None. vLLM's own memory is
        empty when there is a version.
        """
        weights = self._weights.updated(version)
        if self._tier:
            self._store_tier.become(weights.namespace(self._page_tokens, self._tenant) if weights.is_known else None)
            weights.log()

    def name(self, key: bytes, looked: Looked, req_context: Any) -> bytes | None:
        """Returns the page of vLLM's key, which has a hash and the number of the cache group."""
        return page_of(key)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Mark chunks as used on the device or the host: the store evicts them last."""
        if self._tier:
            self._tier.touch(map(page_of, tuple(keys)))

    def stored(self, keys: list[bytes]) -> None:
        """Publish stored chunks, if events are on."""
        if self._tells:
            self._events.append(OffloadingEvent(keys, self.medium, False, self.locality))

    def take_events(self) -> Sequence[Any]:
        """Returns the KV events of chunks stored since the last call."""
        taken, self._events = self._events, []
        return taken

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Returns the counters for vLLM's own registry."""
        return {name: CounterMetadata(text, ("outcome",)) for name, text in _METRICS.values()}

    def counted(self, verb: PageVerb, outcome: str) -> tuple[str, tuple[str, ...]]:
        """Returns the counter of the verb, with the outcome as its label."""
        return _METRICS[verb][0], (str(outcome),)


class KvmoverOffloadingConnector(OffloadingConnector):
    """vLLM's OffloadingConnector whose scheduler half also keeps the ledger. Options are vLLM's own."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ConfigError or KvmoverError for kvmover's configuration, and the errors of vLLM's own."""
        self._served = ServedModel(vllm_config, kv_cache_config)
        with self._served:
            OffloadingConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role is vllm_api.SCHEDULER:
            tiers = self._kv_transfer_config.kv_connector_extra_config.get("secondary_tiers", ())
            asks_peers = any(tier.get("type") == PEER_TIER for tier in tiers)
            self._lenders = frozenset((vllm_api.P2P,) if asks_peers else ())
            ranks = vllm_config.parallel_config.world_size
            self._observers = Observers(load().settings, self._kv_transfer_config.engine_id, ranks)
            self._accounts = RequestAccounts(
                AccountGroup(model=vllm_config.model_config.model), self._observers.account
            )
            self._observers.serve(self._accounts)
            self._served.hinted = self._accounts.hinted

    def on_new_request(self, request: Any) -> None:
        """Do as vLLM's, and note the request for tiers."""
        self._served.seen(request)
        OffloadingConnector.on_new_request(self, request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Do as vLLM's, and account for the match."""
        found, is_async = OffloadingConnector.get_num_new_matched_tokens(self, request, num_computed_tokens)
        self._accounts.matched(request, num_computed_tokens, found)
        return found, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do as vLLM's, and account for the external tokens."""
        OffloadingConnector.update_state_after_alloc(self, request, blocks, num_external_tokens)
        if num_external_tokens:
            sources = hit_sources(self, request, num_external_tokens)
            self._accounts.allocated(request, vllm_api.external_of(sources, self._lenders))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Do as vLLM's, and account for the step."""
        self._accounts.scheduled(scheduler_output)
        return OffloadingConnector.build_connector_meta(self, scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Do as vLLM's, and close the account."""
        self._accounts.finished(request)
        return OffloadingConnector.request_finished(self, request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do as vLLM's, and close the account."""
        self._accounts.finished(request)
        return OffloadingConnector.request_finished_all_groups(self, request, block_ids)

    def shutdown(self) -> None:
        """Do as vLLM's, and end the ledger's metrics and run log. Safe to call twice."""
        OffloadingConnector.shutdown(self)
        if self._role is vllm_api.SCHEDULER:
            self._observers.close()
