"""BlockStore moves a rank's blocks to and from the page store, a thread each way, and looks up stored blocks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from kvmover.cache.page_tiers import StoreWorker, has_become
from kvmover.config.settings import StoreSettings
from kvmover.engines.common import BounceBuffer, Event, PackedBackend, Upkeep, election, of_all, open_store
from kvmover.engines.vllm.caches import ComponentCache
from kvmover.engines.vllm.connector_metadata import LoadSpec, SaveSpec
from kvmover.errors import KvmoverError
from kvmover.host_copies import host_stream
from kvmover.layout import Fleet, Pool
from kvmover.store import HASH_BYTES, Namespace, PagePart, PageStore, PartView
from kvmover.transport import memory_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: The most blocks whose event waits for their storing; beyond it the oldest are dropped.
_MOST_AWAITED = 1 << 16

#: The most blocks whose event was published; a dropped one is published again with its next prompt.
_MOST_TOLD = 1 << 18


def page_of(block_hash: bytes) -> bytes:
    """Returns the page hash of vLLM's block hash, which covers all blocks before it: 32 bytes for any algorithm."""
    return block_hash if len(block_hash) == HASH_BYTES else sha256(block_hash).digest()


def pages_of(hashes: Sequence[bytes]) -> list[bytes]:
    """Returns the page hashes of blocks, in order: see `page_of`."""
    return [page_of(block_hash) for block_hash in hashes]


@dataclass(slots=True)
class BlockStore:
    """The blocks of a rank's one cache group, for one thread each way, and their store."""

    store: PageStore
    out: tuple[PackedBackend, ...]
    into: tuple[PackedBackend, ...]

    @classmethod
    def open(
        cls,
        settings: StoreSettings,
        space: Namespace,
        fleet: Fleet,
        rank: int,
        caches: Sequence[tuple[ComponentCache, torch.Tensor]],
    ) -> BlockStore:
        """`caches` come with the flat memory that holds their starts. Raises StoreError, or EngineUnsupported for a
        layout.
        """
        store = open_store(settings, space)
        whole_blocks = replace(fleet, page_tokens=space.page_tokens)

        def backend(cache: ComponentCache, memory: torch.Tensor) -> PackedBackend:
            """Returns a backend with its own bounce buffer and stream."""
            component = cache.component
            part = PagePart.held(component, whole_blocks, rank, space.page_tokens)
            bounce, spec = BounceBuffer.of(part.nbytes), cache.blocks(cache.spec.pages // cache.ratio)
            store.register(memory_of(bounce.memory))
            writes = election(component, whole_blocks, rank)
            starts = [start - memory.data_ptr() for start in cache.starts]
            return PackedBackend(
                pool=Pool(spec, tuple(memory[start : start + spec.allocation_bytes] for start in starts)),
                view=store.view(space, part, writes),
                page_tokens=1,
                out=bounce,
                into=bounce,
                move=host_stream(memory.device).move,
                writes=writes,
            )

        out, into = (tuple(backend(cache, memory) for cache, memory in caches) for _ in range(2))
        return cls(store, out, into)

    def become(self, space: Namespace | None) -> None:
        """Switch to another namespace, or to none with None. Call it while no block is being moved."""
        if has_become(self.store, space) and space is not None:
            self.out = tuple(backend.moved(self.store, space) for backend in self.out)
            self.into = tuple(backend.moved(self.store, space) for backend in self.into)

    def put(self, spec: SaveSpec) -> list[bool]:
        """Store blocks of every component. Returns True for each that is stored. Raises KvmoverError, OSError."""
        pages, ids = pages_of(spec.hashes), np.asarray(spec.blocks, np.int64)
        return of_all([backend.put(pages, ids) for backend in self.out])

    def get(self, spec: LoadSpec) -> list[bool]:
        """Load blocks of every component. Returns True for each that came whole. Raises KvmoverError, OSError."""
        pages, ids = pages_of(spec.hashes), np.asarray(spec.blocks, np.int64)
        return of_all([backend.get(pages, ids) for backend in self.into])


@dataclass(slots=True)
class OffloadWorker:
    """The threads that store and load a rank's blocks. Methods are for the engine's thread; only `settle`, `become` and
    `close` wait.
    """

    blocks: BlockStore
    settings: StoreSettings
    _counts: Counter[str] = field(default_factory=Counter[str])
    _lock: Lock = field(default_factory=Lock)
    _saving: Counter[str] = field(default_factory=Counter[str])
    _loaded: list[tuple[LoadSpec, list[bool]]] = field(default_factory=list[tuple[LoadSpec, list[bool]]])
    _stored: list[bytes] = field(default_factory=list[bytes])
    _upkeep: Upkeep = field(init=False)
    _saver: StoreWorker[tuple[SaveSpec, Event]] = field(init=False)
    _loader: StoreWorker[LoadSpec] = field(init=False)

    def __post_init__(self) -> None:
        self._upkeep = Upkeep(self.blocks.store, self.settings)
        self._saver = StoreWorker("kvmover-save", self._save)
        self._loader = StoreWorker("kvmover-load", self._load)

    def save(self, spec: SaveSpec, ready: Event) -> None:
        """Store blocks once `ready` has passed. They are read until `is_saving` is False for the request."""
        with self._lock:
            self._saving[spec.request] += 1
        self._saver.put((spec, ready))

    def load(self, spec: LoadSpec) -> None:
        """Load blocks into their pages; `loaded` reports the end."""
        self._loader.put(spec)

    def is_saving(self, request: str) -> bool:
        """Returns True while blocks of the request are being read for the store."""
        with self._lock:
            return self._saving[request] > 0

    def loaded(self) -> list[tuple[LoadSpec, list[bool]]]:
        """Returns the loads that ended since the last call, with True for each block that came."""
        with self._lock:
            taken, self._loaded = self._loaded, []
            return taken

    def stored(self) -> list[bytes]:
        """Returns the hashes of blocks stored since the last call, as far as this rank has a part in them."""
        with self._lock:
            taken, self._stored = self._stored, []
            return taken

    def take_counts(self) -> Counter[str]:
        """Returns the counts since the last call."""
        with self._lock:
            taken, self._counts = self._counts, Counter[str]()
            return taken

    def settle(self) -> None:
        """Wait until all ordered blocks are stored."""
        self._saver.settle()

    def become(self, space: Namespace | None) -> None:
        """Finish all orders, then switch to another namespace, or to none with None."""
        for worker in (self._saver, self._loader):
            worker.settle()
        self.blocks.become(space)

    def close(self) -> None:
        """Finish all orders, end both threads, and close the store."""
        for worker in (self._saver, self._loader):
            worker.close()
        self._upkeep.close()
        self.blocks.store.close()

    def _save(self, job: tuple[SaveSpec, Event]) -> None:
        spec, ready = job
        done: list[bool] = []
        try:
            ready.synchronize()
            done = self.blocks.put(spec)
        except (KvmoverError, OSError, RuntimeError):
            log.exception("%d blocks of %s were not stored", len(spec.blocks), spec.request)
        with self._lock:
            self._stored += [block_hash for block_hash, is_done in zip(spec.hashes, done, strict=False) if is_done]
            self._counts["stored_blocks"] += sum(done)
            self._counts["failed_stores"] += len(spec.blocks) - sum(done)
            self._saving[spec.request] -= 1
            if not self._saving[spec.request]:
                del self._saving[spec.request]

    def _load(self, spec: LoadSpec) -> None:
        done = [False] * len(spec.blocks)
        try:
            done = self.blocks.get(spec)
        except (KvmoverError, OSError, RuntimeError):
            log.exception("%d blocks of %s were not read", len(spec.blocks), spec.request)
        with self._lock:
            self._loaded.append((spec, done))
            self._counts["loaded_blocks"] += sum(done)
            self._counts["failed_loads"] += len(spec.blocks) - sum(done)


@dataclass(slots=True)
class StoreLookup:
    """The scheduler's read-only view of the store: the blocks that all ranks can load."""

    store: PageStore
    views: list[PartView]

    @classmethod
    def open(cls, root: Path | str, space: Namespace, parts: Sequence[PagePart]) -> StoreLookup:
        """`parts` come from all ranks; equal ones are looked up once."""
        store = PageStore.open(root, space)
        unique: list[PagePart] = []
        for part in parts:
            if part not in unique:
                unique.append(part)
        return cls(store, [store.view(space, part) for part in unique])

    def become(self, space: Namespace | None) -> None:
        """Switch to another namespace, or to none with None."""
        if has_become(self.store, space) and space is not None:
            self.views = [self.store.view(space, view.part) for view in self.views]

    def leading(self, hashes: Sequence[bytes]) -> int:
        """Returns the number of leading blocks of `hashes` that every rank can load."""
        pages = pages_of(hashes)
        return min((view.leading(pages) for view in self.views), default=0)

    def clear(self) -> None:
        """Delete the pages of this namespace only."""
        self.store.clear()

    def close(self) -> None:
        """Close the store; its pages stay."""
        self.store.close()


@dataclass(slots=True)
class StoredBlockEvents:
    """The events of blocks being stored, each published once, when all `ranks` have stored the block.

    A block is stored again whenever its prompt comes again, also for two requests at once.
    """

    ranks: int
    _awaited: dict[bytes, Any] = field(default_factory=dict[bytes, Any])
    _done: dict[bytes, set[int]] = field(default_factory=dict[bytes, set[int]])
    _told: dict[bytes, None] = field(default_factory=dict[bytes, None])
    _ready: list[Any] = field(default_factory=list[Any])

    def expect(self, block_hash: bytes, event: Callable[[], Any]) -> None:
        """Publish an event once every rank has stored a block, unless it was published. `event` makes it if needed."""
        if block_hash in self._told:
            self._told[block_hash] = self._told.pop(block_hash)  # the newest
        elif block_hash not in self._awaited:
            self._awaited[block_hash] = event()
            if len(self._awaited) > _MOST_AWAITED:
                oldest = next(iter(self._awaited))
                del self._awaited[oldest]
                self._done.pop(oldest, None)

    def heard(self, ranks: Mapping[bytes, AbstractSet[int]]) -> None:
        """Note, by block hash, the ranks that have stored a block."""
        for block_hash, done in ranks.items():
            if block_hash not in self._awaited:
                continue
            have = self._done.setdefault(block_hash, set())
            have |= done
            if len(have) == self.ranks:
                self._ready.append(self._awaited.pop(block_hash))
                self._told[block_hash] = None
                del self._done[block_hash]
                if len(self._told) > _MOST_TOLD:
                    del self._told[next(iter(self._told))]

    def forget(self) -> None:
        """Publish blocks again when they are stored again: the store was cleared."""
        self._told.clear()
        self._ready.clear()

    def take(self) -> list[Any]:
        """Returns the events of blocks that are whole in the store since the last call."""
        taken, self._ready = self._ready, []
        return taken
