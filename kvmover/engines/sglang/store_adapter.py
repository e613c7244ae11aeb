"""StoreAdapter opens a rank's store once the page size is known, with one backend for each pool of the engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from kvmover.config.settings import StoreSettings
from kvmover.engines.common import (
    BounceBuffer,
    Election,
    EmptyBackend,
    InPlaceBackend,
    Numbers,
    PackedBackend,
    ParallelRank,
    PoolBackend,
    ServedWeights,
    as_bytes,
    election,
    open_store,
    page_ids,
)
from kvmover.engines.sglang import hostpool
from kvmover.engines.sglang.page_parts import MAIN, TpPlacement, native_part, part_of_rows
from kvmover.engines.sglang.sglang_options import ModelFacts, ObjectKind, StoreOptions
from kvmover.engines.sglang.sglang_weight_updates import UPDATES
from kvmover.layout import Component, Pool
from kvmover.store import Namespace, PagePart, PageStore, PartView
from kvmover.transport import Memory, memory_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedRank:
    """A rank that opens a store, of an engine that serves `weights`.

    `placement`: of the main pool. The engine asks a single rank to write a replicated pool.
    """

    weights: ServedWeights
    model: ModelFacts
    place: ParallelRank
    placement: TpPlacement


@dataclass(slots=True)
class StoreAdapter:
    """A rank's access to its namespace. Pools belong to the engine, bounce memory and the store to this."""

    options: StoreOptions
    settings: StoreSettings
    rank: ServedRank
    page_tokens: int
    store: PageStore = field(init=False)
    space: Namespace = field(init=False)
    registered: dict[Memory, torch.Tensor] = field(default_factory=dict["Memory", "torch.Tensor"])

    def __post_init__(self) -> None:
        """Open the store. Raises ConfigError without a root, StoreError if the store is missing or cannot be opened."""
        self.space = self._space(self.rank.weights)
        self.store = open_store(self.settings, self.space if self.rank.weights.is_known else None)
        self.rank.weights.log()

    def reweigh(self) -> None:
        """Enter the namespace of the engine's present weights, or leave it if they are unknown.

        Views and backends are then made anew, by `view` and `PoolBackend.moved`. Raises StoreError for a namespace that
        cannot be opened; pages are not stored then.
        """
        weights = UPDATES.current(self.rank.weights)
        self.rank, self.space = replace(self.rank, weights=weights), self._space(weights)
        weights.log()
        self.store.become(self.space if weights.is_known else None)

    def _space(self, weights: ServedWeights) -> Namespace:
        return weights.namespace(self.page_tokens, self.options.tenant)

    def backend(self, pool: Any, name: str) -> PoolBackend:
        """Returns the backend of a host pool. Raises EngineUnsupported or LayoutError if it cannot be stored."""
        hostpool.refuse(pool, name)
        if not pool.size_per_token:
            return EmptyBackend()
        tensor = hostpool.tensor_of(pool) if self.options.objects is ObjectKind.SHARED else None
        made = self._native(pool, name) if tensor is None else self._shared(pool, name, tensor)
        log.info("host pool %s in %s: %s, %d bytes a page", name, pool.layout, type(made).__name__, made.page_bytes)
        return made

    def _shared(self, pool: Any, name: str, tensor: torch.Tensor) -> PoolBackend:
        """Returns the backend of a pool whose rows other ranks, layouts and fleets can read."""
        buffer = hostpool.buffer_of(pool, tensor)
        placement = self._placement_of(pool)
        rows = hostpool.rows_of(pool, name, buffer, str(tensor.dtype).removeprefix("torch."), placement)
        part = part_of_rows(rows, self.rank.place, self._model_of(pool, name), self.page_tokens)
        writes = self._of_copies() if placement is TpPlacement.REPLICATED else self.election(part.component)
        view = self.view(part, writes)
        spec = buffer.spec(part.component)
        hostpool.check_places(pool, name, tensor, spec)
        if spec.is_packed:
            self.register([tensor])
            stride, first = spec.stride_bytes("page"), tensor.data_ptr()
            return InPlaceBackend(
                self.store, (view,), lambda tokens, count: [_at(tokens, count, pool.page_size, first, stride)]
            )
        out, into = (BounceBuffer.of(part.nbytes) for _ in range(2))
        self.register([out.memory, into.memory])
        from kvmover.kernels import cpu

        flat = Pool(spec, (as_bytes(tensor),))
        return PackedBackend(flat, view, pool.page_size, out, into, cpu.move, writes)

    def _native(self, pool: Any, name: str) -> PoolBackend:
        """Returns the backend of a pool that only an equal rank can read: each run of a page is an object."""
        sizes = hostpool.native_runs(pool, name)
        placement = self._placement_of(pool)
        called = hostpool.own_name(pool, name, sizes)
        if self.rank.model.kv_dtype:
            called += f", {self.rank.model.kv_dtype}"
        writes = self._of_copies() if placement is TpPlacement.REPLICATED else None
        views = tuple(
            self.view(native_part(f"{called}, run {run}", nbytes, self.rank.place, placement), writes)
            for run, nbytes in enumerate(sizes)
        )
        self.register(hostpool.memory_of_pool(pool))
        return InPlaceBackend(self.store, views, partial(_runs, pool, len(sizes)))

    def view(self, part: PagePart, writes: Election | None = None) -> PartView:
        """Returns the store as pages of `part`. `writes`: elects the pages that this rank writes."""
        return self.store.view(self.space, part, writes)

    def _model_of(self, pool: Any, name: str) -> ModelFacts:
        """Returns the model facts that hold for `pool`: heads and layers are the main attention cache's."""
        if name != MAIN:
            return replace(self.rank.model, kv_heads=None, layers=None)
        return self.rank.model if hostpool.whole_layers(pool) else replace(self.rank.model, layers=None)

    def _placement_of(self, pool: Any) -> TpPlacement:
        return TpPlacement.SHARDED if hostpool.is_split(pool) else self.rank.placement

    def election(self, component: Component) -> Election | None:
        """Returns the election of a writer for pages whose heads several ranks hold; None if only this rank does."""
        place = self.rank.place.in_stage
        return election(component, place.fleet(self.page_tokens), place.rank)

    def _of_copies(self) -> Election | None:
        """Returns the election for a replicated pool: rank 0 writes alone, as in the engine's own backends."""
        return _nothing if self.rank.place.tp else None

    def register(self, tensors: list[torch.Tensor]) -> None:
        """Register memory with the store, once per allocation, and keep it while the store may touch it."""
        for tensor in tensors:
            memory = memory_of(tensor)
            if memory not in self.registered:
                self.store.register(memory)
                self.registered[memory] = tensor


@dataclass(slots=True)
class Batches:
    """The pages and GB/s of each batch in one direction, since they were last taken."""

    pages: list[int] = field(default_factory=list[int])
    gb_s: list[float] = field(default_factory=list[float])
    _lock: Lock = field(default_factory=Lock)

    def add(self, pages: int, nbytes: int, seconds: float) -> None:
        """Add a batch. A batch without moved pages has no bandwidth, and is left out."""
        with self._lock:
            if pages:
                self.pages.append(pages)
                self.gb_s.append(nbytes / max(seconds, 1e-9) / 1e9)

    def take(self) -> tuple[list[int], list[float]]:
        """Returns pages, and GB/s, of each batch since the last call."""
        with self._lock:
            taken = self.pages, self.gb_s
            self.pages, self.gb_s = [], []
            return taken


def _nothing(page: bytes) -> bool:
    return False


def _at(tokens: Numbers, count: int, page_tokens: int, first: int, stride: int) -> list[int]:
    return (first + page_ids(tokens, count, page_tokens) * stride).tolist()


def _runs(pool: Any, runs: int, tokens: Numbers, count: int) -> list[list[int]]:
    """Returns the addresses of the pages, as the engine tells them, run by run."""
    import torch

    page_ids(tokens, count, pool.page_size)
    pointers = pool.get_page_buffer_meta(torch.tensor(tokens))[0]
    return [pointers[run::runs] for run in range(runs)]
