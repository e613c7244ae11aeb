"""KvmoverPeerTier stands before the page store in vLLM's own offloading: other engines' host memory, read into this
one's.

LendingPolicy, an eviction policy of vLLM's CPU tier, reports each row before vLLM reuses it. The connector knows what
vLLM does not give a tier: the format of a chunk's bytes. All methods are for vLLM's scheduler.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar
from weakref import ReferenceType, ref

from kvmover.cache.hints import HintAction, HintAnswer, HintRefusal, HintRefused
from kvmover.cache.page_tiers import LENT, PageRequest, PageVerb, RemoteTier
from kvmover.cache.peers import PeerMiss
from kvmover.cache.prefix import DEFAULT_NAMESPACE, KeyUnits, RadixKey
from kvmover.config import ConfigError
from kvmover.engines.common import UPDATED, EngineUnsupported, HintedRequests, Neighbours, odd_ones, open_peer_tier
from kvmover.engines.vllm import vllm_api
from kvmover.engines.vllm.offloading import (
    CounterMetadata,
    Looked,
    PageTierManager,
    chunk_tokens,
    memory_of_view,
)
from kvmover.engines.vllm.served_model import ServedModel, weights_of_tier
from kvmover.engines.vllm.vllm_content import is_tokens_alone, token_hashes
from kvmover.engines.vllm.vllm_contract import PEER_TIER, VLLM, make_tier, request_hints
from kvmover.engines.vllm.vllm_options import parse_peer_tier
from kvmover.engines.vllm.vllm_weight_updates import follow_in_scheduler
from kvmover.layout import Component, Fleet, Layout, Pool, PoolSpec
from kvmover.transport import Memory, NixlTransport

VLLM.require(PEER_TIER)

LRUCachePolicy: Any = VLLM.find("vllm.v1.kv_offload.cpu.policies.lru:LRUCachePolicy")

log = logging.getLogger(__name__)

#: vLLM's own counters count chunks found at peers; these count outcomes of their reads, and chunks lent to peers.
_LOADS, _LENT = "vllm:kvmover_peer_loads", "vllm:kvmover_peer_lent"


class LendingPolicy(LRUCachePolicy):
    """vLLM's LRU policy, which reports evicted rows before vLLM reuses them.

    vLLM loads it by `"eviction_policy": "LendingPolicy", "cache_policy_module_path": "kvmover.engines.vllm"`.
    """

    #: The last policy made, until a tier takes it. vLLM makes a policy just before the tiers of the same engine.
    _last: ClassVar[ReferenceType[Any] | None] = None

    def __init__(self, cache_capacity: int) -> None:
        LRUCachePolicy.__init__(self, cache_capacity)
        self.lender: RemoteTier | None = None
        LendingPolicy._last = ref(self)

    @classmethod
    def take(cls) -> LendingPolicy:
        """Returns the policy of the tier being made. Raises ConfigError if vLLM has another policy."""
        last, cls._last = cls._last, None
        policy = last() if last is not None else None
        if policy is None:
            raise ConfigError(
                "KvmoverPeerTier lends rows of vLLM's host memory, and must hear before they are used again: set"
                ' "eviction_policy": "LendingPolicy", "cache_policy_module_path": "kvmover.engines.vllm"'
            )
        return policy

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """Evict as vLLM's. Returns when every peer's read of these rows is over or will be discarded."""
        evicted = self.chosen(n, protected)
        if evicted and self.lender is not None:
            self.lender.freed(chunk.chunk_id for _, chunk in evicted)
        return evicted

    def chosen(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """Returns the `n` chunks that were taken out; None, and takes none, if there are fewer."""
        return LRUCachePolicy.evict(self, n, protected)

    def clear(self) -> None:
        """Clear as vLLM's, after revoking all rows like `evict`."""
        if self.lender is not None:
            self.lender.freed([chunk.chunk_id for chunk in self.chunks.values()])
        LRUCachePolicy.clear(self)


class TokenOrder(StrEnum):
    """The order of axes in a layer's part of a chunk, by vLLM's name: LBNHC has tokens outermost, LBHNC heads."""

    TOKEN_FIRST = "LBNHC"
    HEAD_FIRST = "LBHNC"


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The layout of a chunk of `row_bytes`: layer after layer of `component`, K beside V of a head."""

    component: Component
    tokens: int
    row_bytes: int
    order: TokenOrder

    def pool(self, memory: Memory) -> Pool:
        """Returns all chunks of `memory` as a pool. The caller owns the memory, which must outlive the pool. Raises
        EngineUnsupported.
        """
        import torch

        size, part = self.component.element_bytes, self.component
        content = part.kv * part.dim
        layer, rest = self.tokens * part.heads * content, self.row_bytes % size
        if rest or part.layers * layer * size > self.row_bytes:
            raise EngineUnsupported(
                f"{part.layers} layers of {self.tokens} tokens take {part.layers * layer * size} B; rows of vLLM's host"
                f" memory have {self.row_bytes} B: peers share attention over all tokens, of one cache group"
            )
        heads_out = self.order is TokenOrder.HEAD_FIRST
        token, head = (content, self.tokens * content) if heads_out else (part.heads * content, content)
        layout = Layout(
            ("page", "layer", "kv", "head", "token", "dim"),
            (memory.nbytes // self.row_bytes, part.layers, part.kv, part.heads, self.tokens, part.dim),
            (self.row_bytes // size, layer, part.dim, head, token, 1),
        )
        every = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)  # a view of the view would keep it alive
        return Pool(PoolSpec(part, layout), (torch.frombuffer(every, dtype=torch.uint8),))


def chunk_layout(config: Any, component: Component, row_bytes: int) -> ChunkLayout:
    """Returns the layout of chunks in vLLM's canonical layout. Raises EngineUnsupported for others."""
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


def _fetches_alone(request: Any, action: HintAction) -> HintAnswer:
    words = f"{action.name}: KvmoverOffloadingConnector carries out kv.fetch alone, and not kv.{action.kind}"
    return HintRefused(HintRefusal.UNKNOWN, words)


class KvmoverPeerTier(PageTierManager):
    """The chunks in the host memory of other engines, of any TP, block size and make. Every failure is a miss.

    vLLM loads it by `"type": "KvmoverPeerTier", "module_path": "kvmover.engines.vllm"` in `secondary_tiers`, as the
    first one; the connector is KvmoverOffloadingConnector.
    """

    cache_hit_source: ClassVar[Any] = vllm_api.P2P

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **said: Any,
    ) -> None:
        """`primary_kv_view` [chunk, byte] stays vLLM's. Raises ConfigError or EngineUnsupported, in a sentence."""
        make_tier(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        served, config = ServedModel.being_made, offloading_spec.config
        options, settings = parse_peer_tier(said, getattr(config.parallel, "data_parallel_rank_local", None) or 0)
        if served is None:
            raise ConfigError(
                "KvmoverPeerTier needs requests' tokens: the connector must be KvmoverOffloadingConnector"
            )
        if settings.peers.address is None:
            raise ConfigError(
                "KvmoverPeerTier has no address: set peers.address (KVMOVER_PEERS_ADDRESS), or control_ports"
            )
        policy = LendingPolicy.take()
        memory = memory_of_view(primary_kv_view)
        layout = chunk_layout(config, served.component(), memory.nbytes // len(primary_kv_view))
        pool = layout.pool(memory)
        model = options.model or settings.exchange.model or config.model.name
        weights = weights_of_tier(config.model.name, model, settings).of_tenant(options.tenant)
        tier = open_peer_tier(settings, weights, Fleet(page_tokens=layout.tokens), 0, [pool])
        assert tier is not None
        self._served, self._weights, self._chunk_tokens = served, weights, layout.tokens
        self._policy, self._neighbours = policy, Neighbours([tier], settings)
        self._remote = RemoteTier(tier, layout.tokens, self._neighbours.close)
        self._remote.sourced = self._sourced
        self._hints = HintedRequests[Any](_fetches_alone, self._told, lambda: True)
        self.serve(self._remote, settings, "kvmover peers")
        try:
            self._neighbours.lay_out([tier.card])
        except BaseException:
            self.shutdown()
            raise
        policy.lender = self._remote
        log.info("%s", weights.told())
        log.info("%s lends %d chunks of %d tokens", settings.peers.address, len(primary_kv_view), layout.tokens)
        follow_in_scheduler(config.engine_id, self)

    def updated(self, version: str | None) -> None:
        """Lend and read chunks of other weights, named `version` by the caller; none with None. vLLM's own memory is
        empty when there is a version.
        """
        weights = self._weights.updated(version)
        if self._tier:
            weights.log()
            peers = self._remote.peers
            peers.rejoin(partial(NixlTransport, f"peers-{peers.engine}"), weights.identity, UPDATED)
            self._neighbours.lay_out([peers.card])

    def begun(self, req_context: Any) -> Looked:
        """Returns the state of a request, without pages if its KV depends on more than tokens."""
        request, name = self._served.request(req_context.req_id), req_context.req_id
        if request is None:
            return Looked()
        self._hints.came(name, request, request_hints(request), request.kv_transfer_params)
        if not is_tokens_alone(request):
            self._hints.brought(name, PeerMiss.ABSENT)
            return Looked()
        tokens = request.all_token_ids[: request.num_tokens // self._chunk_tokens * self._chunk_tokens]
        key = RadixKey.of(list(tokens), DEFAULT_NAMESPACE, KeyUnits.PLAIN)
        return Looked(PageRequest(name, key, self._hints.source(name)), request)

    def on_request_finished(self, req_context: Any) -> None:
        """Do as other tiers, and answer what is left of the request's hints."""
        PageTierManager.on_request_finished(self, req_context)
        self._hints.ended(req_context.req_id, None)

    def _told(self, request: Any, kind: str, answer: HintAnswer) -> None:
        self._served.hinted(request, kind, answer)  # the connector's ledger is made after its tiers

    def _sourced(self, request: PageRequest, brought: int | PeerMiss) -> None:
        tokens = brought * self._chunk_tokens if isinstance(brought, int) else brought
        self._hints.brought(request.name, tokens)

    def name(self, key: bytes, looked: Looked, req_context: Any) -> bytes | None:
        """Returns the hash of the tokens up to the end of the chunk; None while some are unknown."""
        end: int | None = req_context.get_offload_key_position(key)
        if looked.request is None or end is None:
            return None
        page, hashes = end // self._chunk_tokens - 1, token_hashes(looked, self._chunk_tokens)
        return hashes[page] if page < len(hashes) else None

    def shutdown(self) -> None:
        """Stop lending and asking peers, and close the tier. Safe to call twice."""
        self._policy.lender = None
        PageTierManager.shutdown(self)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Returns the counters for vLLM's own registry."""
        return {
            _LOADS: CounterMetadata("Chunks that vLLM asked of peers, by how that ended: read, failed.", ("outcome",)),
            _LENT: CounterMetadata("Chunks of the host's memory that came to be lent to peers."),
        }

    def counted(self, verb: PageVerb, outcome: str) -> tuple[str, tuple[str, ...]]:
        """Returns the counter of lent chunks, or that of loads with the outcome as its label."""
        return (_LENT, ()) if outcome == LENT else (_LOADS, (outcome,))
