"""KvmoverPeerTier stands before the page store in vLLM's own offloading: other engines' host memory, read into ours.

vLLM's CPU tier says when it is about to use a row for something else through its eviction policy, LendingPolicy. What
a chunk's bytes are of the model, the connector says: neither is told to a tier. All methods are for vLLM's scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from typing import Any, ClassVar
from weakref import ReferenceType, ref

from kvmover.config import ConfigError
from kvmover.engines.common import UPDATED, EngineUnsupported, Neighbours, odd_ones, open_peer_tier
from kvmover.engines.vllm import engine
from kvmover.engines.vllm.offloading import (
    HIT,
    MISS,
    RETRY,
    CounterMetadata,
    JobResult,
    RequestOffloadingContext,
    SecondaryTierManager,
    TierStats,
    chunk_tokens,
    memory_of_view,
)
from kvmover.engines.vllm.options import parse_peer_tier
from kvmover.engines.vllm.peer_chunks import ChunkLayout, PeerChunks, PeerPrompt, TokenOrder
from kvmover.engines.vllm.served_model import ServedModel, weights_of_tier
from kvmover.engines.vllm.weight_updates import follow_in_scheduler
from kvmover.layout import Component, Fleet
from kvmover.observe.logs import Guest
from kvmover.observe.observers import begin_logs
from kvmover.transport import NixlTransport

_policies: Any = import_module("vllm.v1.kv_offload.cpu.policies.lru")
LRUCachePolicy: Any = _policies.LRUCachePolicy

log = logging.getLogger(__name__)

#: vLLM's own counters say how often peers had a chunk; these, how the reads of it ended, and what there is for peers.
_LOADS, _LENT = "vllm:kvmover_peer_loads", "vllm:kvmover_peer_lent"


class LendingPolicy(LRUCachePolicy):
    """vLLM's LRU, which says what it evicts before vLLM uses the rows. vLLM loads it by
    `"eviction_policy": "LendingPolicy", "cache_policy_module_path": "kvmover.engines.vllm"`.
    """

    #: The one that was made last, until a tier has it. vLLM makes a policy just before the tiers of the same engine.
    _last: ClassVar[ReferenceType[Any] | None] = None

    def __init__(self, cache_capacity: int) -> None:
        LRUCachePolicy.__init__(self, cache_capacity)
        self.lender: PeerChunks | None = None
        LendingPolicy._last = ref(self)

    @classmethod
    def take(cls) -> LendingPolicy:
        """The one of the tier that is being made. Raises ConfigError where vLLM has another policy."""
        last, cls._last = cls._last, None
        policy = last() if last is not None else None
        if policy is None:
            raise ConfigError(
                "KvmoverPeerTier lends rows of vLLM's host memory, and must hear before they are used again: set"
                ' "eviction_policy": "LendingPolicy", "cache_policy_module_path": "kvmover.engines.vllm"'
            )
        return policy

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """As vLLM's. Returns when no peer can take what it reads of these rows for right."""
        evicted = LRUCachePolicy.evict(self, n, protected)
        if evicted and self.lender is not None:
            self.lender.freed(chunk.chunk_id for _, chunk in evicted)
        return evicted

    def clear(self) -> None:
        """As vLLM's, likewise."""
        if self.lender is not None:
            self.lender.freed([chunk.chunk_id for chunk in self.chunks.values()])
        LRUCachePolicy.clear(self)


def chunk_layout(config: Any, component: Component, row_bytes: int) -> ChunkLayout:
    """Of vLLM's canonical layout. Raises EngineUnsupported for others."""
    odd = {
        'canonical_layout is not set: `"canonical_layout": true` is what all ranks of any TP share': not (
            config.canonical_layout and config.parallel.is_parallelism_agnostic
        ),
        f"chunks are of {config.cache.blocks_per_chunk} blocks": config.cache.blocks_per_chunk != 1,
        f"blocks lie as {config.kv_cache_layout}": config.kv_cache_layout not in set(TokenOrder),
    }
    asked = odd_ones(odd)
    if asked:
        raise EngineUnsupported(f"peers cannot read this engine's host memory: {asked}")
    return ChunkLayout(component, chunk_tokens(config), row_bytes, TokenOrder(config.kv_cache_layout))


class KvmoverPeerTier(SecondaryTierManager):
    """Chunks in the host memory of other engines, of any TP, block size and make. Every failure is a miss.

    vLLM loads it by `"type": "KvmoverPeerTier", "module_path": "kvmover.engines.vllm"` in `secondary_tiers`, where it
    goes first; the connector is KvmoverOffloadingConnector.
    """

    cache_hit_source: ClassVar[Any] = engine.P2P

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **said: Any,
    ) -> None:
        """`primary_kv_view` [chunk, byte] stays vLLM's. Raises ConfigError or EngineUnsupported, a sentence."""
        SecondaryTierManager.__init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options, settings = parse_peer_tier(said)
        served, config = ServedModel.being_made, offloading_spec.config
        if served is None:
            raise ConfigError(
                "KvmoverPeerTier needs requests' tokens: the connector must be KvmoverOffloadingConnector"
            )
        if settings.peers.address is None:
            raise ConfigError("KvmoverPeerTier has no address: set peers.address (KVMOVER_PEERS_ADDRESS)")
        policy = LendingPolicy.take()
        layout = chunk_layout(config, served.component(), self.block_size_bytes)
        pool = layout.pool(memory_of_view(primary_kv_view))
        model = options.model or settings.exchange.model or config.model.name
        weights = weights_of_tier(config.model.name, model, settings).of_tenant(options.tenant)
        tier = open_peer_tier(settings, weights, Fleet(page_tokens=layout.tokens), 0, [pool])
        assert tier is not None
        neighbours = Neighbours([tier], settings.peers)
        self._served, self._results, self._weights = served, list[Any](), weights
        self._keys: dict[int, dict[int, bytes]] = {}
        self._chunks: PeerChunks | None = PeerChunks(tier, layout.tokens, neighbours.close)
        self._policy, self._neighbours = policy, neighbours
        self._end_logs = begin_logs(settings.logging, None if log.hasHandlers() else Guest(engine.LOG, "kvmover peers"))
        try:
            neighbours.lay_out([tier.card])
        except BaseException:
            self.shutdown()
            raise
        policy.lender = self._chunks
        log.info("%s", weights.told())
        log.info("%s lends %d chunks of %d tokens", settings.peers.address, len(primary_kv_view), layout.tokens)
        follow_in_scheduler(config.engine_id, self)

    def updated(self, version: str | None) -> None:
        """Other weights are served than at the start, `version` by the caller's word: lend and read chunks of these;
        None: none. vLLM's own memory is empty when there is a version."""
        weights = self._weights.updated(version)
        if self._chunks:
            weights.log()
            tier = self._chunks.tier
            tier.rejoin(partial(NixlTransport, f"peers-{tier.engine}"), weights.identity, UPDATED)
            self._neighbours.lay_out([tier.card])

    # Look-ups

    def on_new_request(self, req_context: Any) -> Any:
        """Chunks are lent when they are computed, whatever request they are of."""
        request = self._served.request(req_context.req_id)
        prompt = self._chunks.prompt(request) if self._chunks and request is not None else None
        if prompt is not None:
            req_context.set_state(prompt)
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT or MISS, or RETRY until peers have answered, or had the time to."""
        prompt, end = req_context.get_state(PeerPrompt), req_context.get_offload_key_position(key)
        if self._chunks is None or prompt is None or end is None:
            return MISS
        found = self._chunks.has(prompt, end)
        if found is None:
            return RETRY
        return HIT if found else MISS

    def on_request_finished(self, req_context: Any) -> None:
        """What was offered for it, and was not read, is given back."""
        prompt = req_context.get_state(PeerPrompt)
        if self._chunks is not None and prompt is not None:
            self._chunks.give_up(prompt)

    # Chunks

    def submit_store(self, job_metadata: Any) -> None:
        """Chunks are whole in vLLM's memory: they are lent from there, and nothing is copied."""
        prompt = job_metadata.req_context.get_state(PeerPrompt)
        if self._chunks is not None and prompt is not None:
            self._chunks.came(prompt, self._rows(job_metadata))
        self._results.append(JobResult(job_id=job_metadata.job_id, success=True))

    def submit_load(self, job_metadata: Any) -> None:
        """Read chunks, into rows that are nobody's until the job has ended."""
        prompt = job_metadata.req_context.get_state(PeerPrompt)
        assert self._chunks is not None
        rows = self._rows(job_metadata)
        self._keys[job_metadata.job_id] = dict(zip(rows, job_metadata.keys, strict=True))
        self._chunks.load(job_metadata.job_id, prompt, rows)

    def _rows(self, job: Any) -> dict[int, int]:
        """By the number of the chunk in its request."""
        assert self._chunks is not None
        ends = [job.req_context.get_offload_key_position(key) for key in job.keys]
        return {
            end // self._chunks.chunk_tokens - 1: row for end, row in zip(ends, job.chunk_ids.tolist(), strict=True)
        }

    def get_finished_jobs(self) -> Iterable[Any]:
        """Jobs that have ended. What could not be read is a miss."""
        taken, self._results = self._results, []
        for job in self._chunks.finished() if self._chunks else ():
            whole = self._keys.pop(job.number)
            keys = [key for chunk, key in whole.items() if chunk in job.done]
            taken.append(
                JobResult(
                    job_id=job.number,
                    success=len(keys) == len(whole),
                    successful_keys=keys,
                    transfer_time=job.seconds,
                    transfer_bytes=len(keys) * self.block_size_bytes,
                )
            )
        return taken

    def drain_jobs(self) -> None:
        """Return when no row is written any more."""
        if self._chunks:
            self._chunks.settle()

    def shutdown(self) -> None:
        """Lend nothing any more, and ask nobody. Safe to call twice."""
        chunks, self._chunks = self._chunks, None
        if chunks:
            self._policy.lender = None
            chunks.close()
            self._end_logs()

    # Metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Counters in vLLM's own registry."""
        return {
            _LOADS: CounterMetadata("Chunks that vLLM asked of peers, by how that ended: read, failed.", ("outcome",)),
            _LENT: CounterMetadata("Chunks of the host's memory that came to be lent to peers."),
        }

    def get_stats(self) -> Any:
        """Those since the last call; None for none."""
        counts = self._chunks.take_counts() if self._chunks else None
        if not counts:
            return None
        stats = TierStats()
        stats.increase_counter(_LENT, counts.pop("lent", 0))
        for outcome, count in counts.items():
            stats.increase_counter(_LOADS, count, (outcome,))
        return stats
