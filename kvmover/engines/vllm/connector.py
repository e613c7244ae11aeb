"""KvmoverConnector implements vLLM's connector interface over two halves, the scheduler's and each rank's worker."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvmover.cache.ledger import AccountGroup
from kvmover.config import ConfigError
from kvmover.engines.common import (
    UPDATED,
    CardServer,
    EngineUnsupported,
    ServedWeights,
    caller,
    computed_once,
    digest_of_sources,
    identified,
    layers_of,
    marks,
    pin_limits,
)
from kvmover.engines.vllm import vllm_api
from kvmover.engines.vllm.block_store import BlockStore, OffloadWorker, StoredBlockEvents, StoreLookup
from kvmover.engines.vllm.caches import (
    BackedTransport,
    ComponentCache,
    component_caches,
    exchanged_caches,
    fleet_of,
    of_all_stages,
    pools_of,
    refuse,
)
from kvmover.engines.vllm.connector_metadata import KvmoverConnectorMetadata, RankEnding, SaveSpec, Tally
from kvmover.engines.vllm.request_accounts import ExternalTokens, RequestAccounts
from kvmover.engines.vllm.request_hints import RequestHints
from kvmover.engines.vllm.scheduler import ConnectorScheduler, Home, QuarantinedBlocks, Role
from kvmover.engines.vllm.transfers import RequestTransfers
from kvmover.engines.vllm.vllm_content import token_hashes
from kvmover.engines.vllm.vllm_contract import hashed_tokens
from kvmover.engines.vllm.vllm_options import parse
from kvmover.engines.vllm.vllm_weight_updates import follow_in_scheduler, follow_in_worker
from kvmover.engines.vllm.worker import ConnectorWorker, Ended, FailureLog
from kvmover.layout import Fleet
from kvmover.observe.logs import Guest
from kvmover.observe.metrics import MoverCollector
from kvmover.observe.observers import Observers
from kvmover.store import Namespace, PagePart, StoreCollector
from kvmover.transfer import Mover, Place, Progress

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: Prometheus counters and their help texts. Requests count once, for any number of ranks; bytes and blocks are summed
#: over all ranks.
COUNTS = {
    "sent_requests": "Requests whose KV another engine fetched, from every rank.",
    "sent_failures": "Requests whose KV was not fetched to the end, from one rank or more.",
    "sent_bytes": "Bytes of KV that other engines fetched, from all ranks together.",
    "sent_microseconds": "Microseconds from offering a request to its end on the slowest rank.",
    "moved_requests": "Requests that were decoded here, and that another engine took and goes on with.",
    "received_requests": "Requests whose KV came from another engine, to every rank.",
    "received_failures": "Requests whose KV did not come, or not all of it, to one rank or more.",
    "received_bytes": "Bytes of KV that came from other engines, to all ranks together.",
    "mistaken_requests": "Requests that named KV of another prompt, and were computed.",
    "received_microseconds": "Microseconds from asking for a request to its end on the slowest rank.",
    "stored_blocks": "Blocks that are in the page store, by a rank or before it, once a rank.",
    "failed_stores": "Blocks that could not be stored, once a rank.",
    "loaded_blocks": "Blocks read from the page store, once a rank.",
    "failed_loads": "Blocks that could not be read from the page store, once a rank.",
}


@dataclass
class KvmoverHandshakeMetadata(vllm_api.HandshakeMetadata):
    """A rank's card for other engines, its parts of a stored block, and its weights."""

    card: bytes
    parts: tuple[PagePart, ...]
    weights: ServedWeights


@dataclass
class KvmoverWorkerMetadata(vllm_api.WorkerMetadata):
    """A rank's report of a step. `stored`: by block hash, the ranks that have stored it. `ended`: transfers, by rank.

    `quarantined`: the change in the number of ranks on which a request's blocks may still be written though its fetch
    has failed.
    """

    stored: dict[bytes, frozenset[int]]
    ended: list[RankEnding]
    quarantined: dict[str, int]

    def aggregate(self, other: KvmoverWorkerMetadata) -> KvmoverWorkerMetadata:
        """Returns the reports of two ranks as one."""
        quarantined = Counter(self.quarantined)
        quarantined.update(other.quarantined)
        stored = dict(self.stored)
        for block_hash, ranks in other.stored.items():
            stored[block_hash] = stored.get(block_hash, frozenset()) | ranks
        return KvmoverWorkerMetadata(stored, self.ended + other.ended, dict(quarantined))


class KvmoverStats(vllm_api.Stats):
    """The counts of an interval: `data` by the names of COUNTS, of ranks and of the scheduler, which vLLM adds up."""

    def reset(self) -> None:
        """Begin an interval: every count is 0."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: KvmoverStats) -> KvmoverStats:
        """Add the counts of another rank or step to these."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns a line for people: times in milliseconds a request, bytes in MB, without zeros."""
        line: dict[str, int | float] = {}
        for way in ("sent", "received"):
            requests = self.data.get(f"{way}_requests", 0)
            if requests:
                line[f"{way} requests"] = requests
                line[f"{way} MB"] = round(self.data.get(f"{way}_bytes", 0) / 1e6, 3)
                line[f"{way} ms a request"] = round(self.data.get(f"{way}_microseconds", 0) / 1e3 / requests, 3)
        failures = ("sent_failures", "received_failures", "mistaken_requests")
        rest = (*failures, "stored_blocks", "failed_stores", "loaded_blocks", "failed_loads")
        return line | {name.replace("_", " "): self.data[name] for name in rest if self.data.get(name)}

    def is_empty(self) -> bool:
        """Returns True if all counts are 0, for which vLLM logs no line."""
        return not any(self.data.values())


class KvmoverMetrics(vllm_api.PromMetrics):
    """The metrics `vllm:kvmover_*_total`, one counter a name of COUNTS."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        vllm_api.PromMetrics.__init__(self, vllm_config, metric_types, labelnames, per_engine)
        self._counters = {
            name: vllm_api.per_engine(
                self._counter_cls(name=f"vllm:kvmover_{name}", documentation=text, labelnames=labelnames), per_engine
            )
            for name, text in COUNTS.items()
        }

    def observe(self, transfer_stats_data: Mapping[str, int], engine_idx: int = 0) -> None:
        """Add an interval's counts, by the names of COUNTS, to those of engine `engine_idx`."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)


class KvmoverConnector(vllm_api.KVConnectorBase, vllm_api.SupportsHMA):
    """Prefill/decode disaggregation by kvmover's transfer, and a page store behind the prefix cache.

    One half lives in the scheduler's process and one in each worker's; each method is called on one of them.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises EngineUnsupported, ConfigError or StoreError, in a sentence, before any registration."""
        vllm_api.KVConnectorBase.__init__(self, vllm_config, role, kv_cache_config)
        self._config = vllm_config
        self._options, self._settings = parse(self._kv_transfer_config.kv_connector_extra_config)
        self._place = vllm_api.place_of(vllm_config)
        self._groups = vllm_api.groups_of(kv_cache_config, vllm_config)
        self._described = kv_cache_config
        refuse(self._groups)
        self._late = any(group.is_late for group in self._groups)
        if self._settings.store.root:
            self._refuse_to_store(kv_cache_config)
        self._worker: ConnectorWorker | None = None
        self._introduction: KvmoverHandshakeMetadata | None = None
        #: The weights at the start, once a rank has reported them.
        self._weights: ServedWeights | None = None
        self._ended = Ended()
        if role is vllm_api.SCHEDULER:
            # A rank in this process has set up logging already.
            guest = None if log.hasHandlers() else Guest(vllm_api.LOG, f"kvmover scheduler of {self._place.grid}")
            ranks = self._place.ranks
            self._observers = Observers(self._settings, self._kv_transfer_config.engine_id, ranks, guest)
            group = AccountGroup(self._options.tenant, self._name)
            self._accounts = RequestAccounts(group, self._observers.account)
            self._observers.serve(self._accounts)
            transfer = self._kv_transfer_config
            may = Role.GIVES if transfer.is_kv_producer else Role(0)
            may |= Role.TAKES if transfer.is_kv_consumer else Role(0)
            left = max(1 if self._late else 0, vllm_api.unread_tokens(vllm_config))
            keep_s = self._options.decoder_kv_blocks_ttl if self._options.bidirectional_kv_xfer else None
            fewest, move_s = self._options.kv_recompute_threshold, self._options.movable_s or None
            self._scheduler = ConnectorScheduler(
                self._groups[0].block_tokens, may, self._late, left, keep_s, fewest, move_s
            )
            self._scheduler.identity = self._settings.mover.identity
            self._scheduler.readers.is_cached = bool(vllm_config.cache_config.enable_prefix_caching)
            if self._settings.exchange.model:
                self._scheduler.page_names = token_hashes
            self._server: CardServer | None = None
            self._lookup: StoreLookup | None = None
            self._events = StoredBlockEvents(self._place.ranks)
            self._tally = Tally(self._place.ranks)
            events = getattr(vllm_config, "kv_events_config", None)
            self._tells = events is not None and events.enable_kv_cache_events
            follow_in_scheduler(transfer.engine_id, self)

    def _refuse_to_store(self, kv_cache_config: Any) -> None:
        block_tokens = self._groups[0].block_tokens
        if len(self._groups) > 1 or self._late or self._groups[0].row_tokens or self._place.cp_size > 1:
            raise EngineUnsupported(
                "the page store takes models with one group of full attention, a row a token, on ranks that hold all"
                ' tokens; not hybrids, compressed caches or context parallelism. "root": "none" does without'
            )
        if (hashed := hashed_tokens(kv_cache_config) or block_tokens) != block_tokens:
            raise EngineUnsupported(f"hashes of {hashed} tokens for blocks of {block_tokens}; they must be equal")

    @property
    def _name(self) -> str:
        return self._options.model or self._settings.exchange.model or self._config.model_config.model

    def _served_weights(self) -> ServedWeights:
        """Returns the weights. All ranks call this together: one of them reads the files and broadcasts."""

        def compute() -> str:
            return computed_once(
                lambda: digest_of_sources(vllm_api.weight_sources(self._config)), vllm_api.rank_groups()
            )

        return identified(self._name, self._settings.exchange, compute)

    def _space_of(self, weights: ServedWeights) -> Namespace:
        return weights.namespace(self._groups[0].block_tokens, self._options.tenant)

    def updated(self, version: str | None) -> None:
        """Switch to other weights, named `version` by the caller: open transfers end, and engines and store are used as
        these weights. With None neither is used. The scheduler's half obeys at once.
        """
        if self._weights is None:  # no other engine was met yet
            return
        weights = self._weights.updated(version)
        space = self._space_of(weights) if weights.is_known else None
        if self._role is not vllm_api.SCHEDULER:
            self._rejoin(weights, space)
            return
        self._hints.pins.forget()
        self._events.forget()
        if self._lookup is not None:
            self._lookup.become(space)
        if weights.is_known:
            self._scheduler.join()
        else:
            self._scheduler.part(weights.told())

    # The worker's half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the rank's mover and store over the engine's caches, one view a layer. The memory stays vLLM's.

        Raises EngineUnsupported for caches whose rows are not tokens, ConfigError for weights that cannot be
        identified, StoreError, or TransportUnavailable.
        """
        place, settings = self._place, self._settings
        weights = self._weights = self._served_weights()
        backing = vllm_api.backing_of(kv_caches)
        whole = vllm_api.whole_of(self._config, kv_caches)
        registered = vllm_api.layer_caches_of(kv_caches)
        vllm_api.check_places(registered, self._described)
        held = component_caches(self._groups, registered, self._described.num_blocks, whole, place)
        if settings.exchange.model:
            held = self._exchanged(held)
        layers = {cache.component.name: cache.component.layers for cache in held}
        stages = vllm_api.of_all_stages(layers, place.pp_size)
        made = of_all_stages(held, layers_of(stages, "VLLM_PP_LAYER_PARTITION"))
        fleet = fleet_of(made, place, vllm_api.run_tokens(self._config))
        self._transport = partial(BackedTransport, f"vllm-{place.rank}", backing)
        wire = self._transport()
        mover = Mover(
            wire,
            weights.model(tuple(cache.component for cache in made)),
            Place(self._kv_transfer_config.engine_id, fleet, place.rank),
            pools_of(made, backing),
            settings.mover_config(),
        )
        guest = Guest(vllm_api.LOG, f"kvmover rank {place.rank} of {place.grid}")
        self._observers = Observers(settings, self._kv_transfer_config.engine_id, place.rank, guest)
        self._observers.watch(mover)
        progress = Progress(mover, settings.progress)
        parts, offload = self._offload_worker(self._space_of(weights), made, fleet, backing)
        engine = self._kv_transfer_config.engine_id
        stores = [StoreCollector(offload.blocks.store, engine, place.rank)] if offload else []
        self._observers.serve(MoverCollector([progress]), *stores)
        self._introduction = KvmoverHandshakeMetadata(mover.card, parts, weights)
        first = place.layers(made[0].component.layers).start
        self._worker = ConnectorWorker(
            made,
            fleet,
            RequestTransfers(progress, caller(settings)),
            offload,
            marks(backing.device),
            made[0].layers if len(made) == 1 else None,
            first,
            settings.mover.chunk_layers,
            bool(whole.drafts),
            FailureLog().failed if settings.logging.level is None else FailureLog().unbegun,
        )
        follow_in_worker(self._kv_transfer_config.engine_id, self)
        log.info("%s", weights.told())
        if wire.nics:
            log.info("NICs nearest to its GPU: %s", ", ".join(wire.nics))
        log.info(
            "serves %d blocks of %s", self._described.num_blocks, "; ".join(cache.component.name for cache in made)
        )

    def _rejoin(self, weights: ServedWeights, space: Namespace | None) -> None:
        """End open transfers of the rank, and join anew with other weights."""
        if self._worker is None or self._introduction is None:
            return
        weights.log()
        model = weights.model(tuple(cache.component for cache in self._worker.caches))
        card = self._worker.rejoin(self._transport, model, space, UPDATED)
        self._introduction = replace(self._introduction, card=card, weights=weights)

    def _exchanged(self, made: list[ComponentCache]) -> list[ComponentCache]:
        """Returns the caches in the form common to all engines, or in vLLM's, which only vLLM takes, if there is
        none.
        """
        found = exchanged_caches(made, self._groups)
        if found is None:
            names = "; ".join(cache.component.name for cache in made)
            log.warning("no engine but vLLM takes these caches, whatever exchange.model says: %s", names)
        return found or made

    def _offload_worker(
        self, space: Namespace, made: list[ComponentCache], fleet: Fleet, backing: torch.Tensor
    ) -> tuple[tuple[PagePart, ...], OffloadWorker | None]:
        store = self._settings.store
        if not store.root:
            return (), None
        blocks = BlockStore.open(store, space, fleet, self._place.rank, [(cache, backing) for cache in made])
        blocks_of, rank = self._place.fleet(space.page_tokens), self._place.rank
        parts = tuple(PagePart.held(cache.component, blocks_of, rank, space.page_tokens) for cache in made)
        return parts, OffloadWorker(blocks, store)

    def get_handshake_metadata(self) -> KvmoverHandshakeMetadata | None:
        """Returns the metadata that vLLM carries from this rank to the scheduler; None before the caches are
        registered.
        """
        return self._introduction

    def handle_preemptions(self, kv_connector_metadata: KvmoverConnectorMetadata) -> None:
        """Return when no read of preempted requests' pages is open; the next step overwrites them."""
        if self._worker:
            self._worker.before(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KvmoverConnectorMetadata) -> None:
        """Begin a step: start all orders that do not wait for its forward pass."""
        vllm_api.KVConnectorBase.bind_connector_metadata(self, connector_metadata)
        if self._worker:
            self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Return at once: KV is fetched between steps, begun when the metadata came."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: a request is scheduled once all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Note that the forward pass has passed a layer, whose KV may be sent once the current stream has passed."""
        if self._worker:
            self._worker.computed(layer_name)

    def wait_for_save(self) -> None:
        """Note that the forward pass was launched. Returns at once: an event on its stream allows the sends."""
        if self._worker:
            self._worker.end(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Returns the requests that ended on this rank since the last call: sent, received, and the failed ones among
        these.
        """
        if self._worker:
            self._ended = self._worker.ended()
        ended = self._ended
        return vllm_api.TransferResults(ended.sent, ended.received, ended.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Returns sent and received requests of `get_transfer_results`, None for an empty set, for releases that call
        this method.
        """
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the blocks of failed loads, of the same step as the last `get_transfer_results`."""
        return self._ended.blocks

    def build_connector_worker_meta(self) -> KvmoverWorkerMetadata | None:
        """Returns this rank's report to the scheduler with a step: stored blocks and ended transfers; None if it is
        empty.
        """
        if self._worker is None:
            return None
        done = self._worker.offload.stored() if self._worker.offload else []
        ended, step = self._worker.take_endings(), self._ended
        quarantined = dict.fromkeys(step.quarantined, 1) | dict.fromkeys(step.returned, -1)
        self._ended = Ended()
        stored = dict.fromkeys(done, frozenset((self._place.rank,)))
        return KvmoverWorkerMetadata(stored, ended, quarantined) if done or ended or quarantined else None

    # The scheduler's half

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take vLLM's block manager, in which blocks that may still be written are quarantined."""
        vllm_api.KVConnectorBase.bind_kv_cache_manager(self, kv_cache_manager)
        blocks = vllm_api.KvBlocks(kv_cache_manager)
        self._quarantine = QuarantinedBlocks(blocks)
        self._hints = RequestHints(
            blocks,
            [group.block_tokens for group in self._groups],
            pin_limits(self._settings.hints),
            lambda: self._lookup is not None and Role.TAKES in self._scheduler.may,
            lambda: self._lookup is not None and Role.GIVES in self._scheduler.may,
            self._accounts.hinted,
        )
        self._accounts.pins = self._hints.pins

    def has_pending_push_work(self) -> bool:
        """Returns True if vLLM must step without requests: ranks report with a step that blocks are free again."""
        return len(self._quarantine) > 0

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KvmoverHandshakeMetadata]) -> None:
        """Serve the cards of all ranks, which are ready, and open the look-up of blocks that all of them can load."""
        ranks = [metadata[place] for place in sorted(metadata)]
        host = self._options.host or vllm_api.own_address()
        if self._server is None:
            replica = self._config.parallel_config.data_parallel_index
            port = self._options.port and self._options.port + replica
            try:
                self._server = CardServer(host, port)
            except (OSError, OverflowError) as error:
                where = f"port = {self._options.port} in the options of kvmover's vLLM connector"
                raise ConfigError(f"{where}: replica {replica} cannot listen at {host}:{port}: {error}") from error
        engine_id = self._kv_transfer_config.engine_id
        self._server.lay_out(engine_id, [rank.card for rank in ranks])
        self._scheduler.home = Home(engine_id, host, self._server.port)
        self._weights = self._weights or ranks[0].weights
        if (root := self._settings.store.root) and self._lookup is None:
            space = self._space_of(ranks[0].weights)
            self._lookup = StoreLookup.open(root, space, [part for rank in ranks for part in rank.parts])
            self._scheduler.leading = self._lookup.leading

    def set_xfer_handshake_metadata(self, metadata: dict[int, KvmoverHandshakeMetadata]) -> None:
        """Do `set_xfer_handshake_metadata_pp_aware` for a single pipeline stage."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): said for rank, said in metadata.items()})

    def on_new_request(self, request: Any) -> None:
        """Take in a request that arrived at the scheduler: cut the prompt of a prefill before the tokens left to
        decode, and carry out its hints that are due at once.
        """
        self._scheduler.new(request)
        self._hints.came(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns the number of tokens beyond the computed ones that can be fetched, and True if there are any, since
        they are fetched between steps.
        """
        found = self._scheduler.matched(request, num_computed_tokens)
        if found is None:  # vLLM asks again
            return None, False
        self._accounts.matched(request, num_computed_tokens, found)
        return found, found > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Returns all groups: a load covers each of them."""
        return self._kv_cache_config.transfer_group_ids

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Returns the external tokens by their source, for vLLM's metrics."""
        if not num_external_tokens:
            return {}
        known = self._scheduler.live.get(request.request_id)
        return {vllm_api.P2P if known and known.fetch else vllm_api.DISK: num_external_tokens}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks of a request, into which the last `num_external_tokens` of its computed tokens will be
        fetched.
        """
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)
        if self._scheduler.is_of_peer(request):
            external = ExternalTokens(peer=num_external_tokens)
        else:
            external = vllm_api.external_of(self.get_external_cache_hit_sources(request, num_external_tokens))
        self._accounts.allocated(request, external)

    def build_connector_meta(self, scheduler_output: Any) -> KvmoverConnectorMetadata:
        """Returns the workers' orders for a step, each once."""
        self._accounts.scheduled(scheduler_output)
        metadata = self._scheduler.build(scheduler_output)
        if self._tells:
            for save in metadata.saves:
                self._announce(save)
        return metadata

    def _announce(self, save: SaveSpec) -> None:
        """Prepare the events of blocks to be stored: their tokens are known only while the request lives."""
        known, group = self._scheduler.live[save.request], self._groups[0]
        for number, block_hash in enumerate(save.hashes, known.saved - len(save.hashes)):
            event = partial(vllm_api.stored_event, known.request, number, group.block_tokens, 0, group.kind)
            self._events.expect(block_hash, event)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take all ranks' reports of a step, before vLLM frees the blocks of failed requests."""
        self._scheduler.output(connector_output)
        told, received = connector_output.kv_connector_worker_meta, connector_output.finished_recving or ()
        if isinstance(told, KvmoverWorkerMetadata):
            self._events.heard(told.stored)
            self._tally.hear(told.ended)
        self._quarantine.heard(told.quarantined if isinstance(told, KvmoverWorkerMetadata) else {}, received)

    def take_events(self) -> Iterable[Any]:
        """Returns the KV events of blocks that every rank has stored since the last call."""
        return self._events.take()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns True if the request keeps its blocks until the ranks report it, and the parameters for its decode
        half.
        """
        self._accounts.finished(request)
        outcome = vllm_api.outcome_of(request)
        self._hints.ended(request, outcome)
        return self._scheduler.finished(request, block_ids, outcome)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Do `request_finished_all_groups` for a model with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool | None:
        """Delete this model's stored pages, and end all pins."""
        self._hints.pins.forget()
        if self._lookup:
            self._lookup.clear()
            self._events.forget()
        return True

    # Either half

    def get_kv_connector_stats(self) -> KvmoverStats | None:
        """Returns a rank's counts of bytes and blocks, or the scheduler's of requests; vLLM adds them up."""
        if self._role is vllm_api.SCHEDULER:
            counts = self._tally.take() + self._scheduler.take_counts()
        else:
            counts = self._worker.take_counts() if self._worker else Counter[str]()
        return KvmoverStats(data=dict(counts)) if counts else None

    def shutdown(self) -> None:
        """End this half: transfers, threads, the server of cards, the store. Safe to call twice."""
        if self._worker:
            self._worker.close()
            self._worker = None
            self._observers.close()
        if self._role is vllm_api.SCHEDULER:
            for held in (self._server, self._lookup):
                if held is not None:
                    held.close()
            self._server = self._lookup = None
            self._observers.close()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Returns True for layerwise sends: a graph calls `save_kv_layer` only if it is replayed in pieces."""
        return parse(extra_config)[1].mover.chunk_layers > 0

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Returns False: pages stay registered with the NIC."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvmoverStats:
        """Returns counts as vLLM adds them up, by default empty."""
        return KvmoverStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvmoverMetrics:
        """Returns the counters of COUNTS in vLLM's own registry."""
        return KvmoverMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
