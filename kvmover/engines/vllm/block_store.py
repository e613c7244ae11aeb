"""BlockStore moves a rank's blocks to and from the page store, a thread each way, and looks up what is stored."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvmover.cache.page_tiers import StoreWorker, has_become
from kvmover.config.settings import StoreSettings
from kvmover.engines.common import BounceBuffer, PackedBackend, Upkeep, election, of_all, open_store
from kvmover.engines.vllm.caches import ComponentCache
from kvmover.engines.vllm.connector_metadata import LoadSpec, SaveSpec
from kvmover.errors import KvmoverError
from kvmover.layout import Fleet, Pool
from kvmover.regions import CopyStream
from kvmover.store import HASH_BYTES, Namespace, PagePart, PageStore, PartView
from kvmover.transport import memory_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: Blocks that are being stored and not told of yet: the oldest are forgotten beyond so many.
_MOST_AWAITED = 1 << 16

#: Blocks that were told of: one that is forgotten is told of again when its prompt comes again.
_MOST_TOLD = 1 << 18


class Event(Protocol):
    """A CUDA event, or its like where everything computes at once."""

    def query(self) -> bool:
        """Whether it has passed; returns at once."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until it has passed."""
        ...


def page_of(block_hash: bytes) -> bytes:
    """vLLM's hash of a block, and all before it, as a page's: 32 bytes whatever its algorithm."""
    return block_hash if len(block_hash) == HASH_BYTES else sha256(block_hash).digest()


def pages_of(hashes: Sequence[bytes]) -> list[bytes]:
    """The pages of blocks, in order: see `page_of`."""
    return [page_of(block_hash) for block_hash in hashes]


@dataclass(slots=True)
class BlockStore:
    """A rank's blocks of its one cache group, for one thread each way, and the store they are in."""

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
        """`caches`: with the flat memory their starts lie in. Raises StoreError, or EngineUnsupported for a layout."""
        store = open_store(settings, space)
        whole_blocks = replace(fleet, page_tokens=space.page_tokens)

        def backend(cache: ComponentCache, memory: torch.Tensor) -> PackedBackend:
            """Bounce memory and a stream of its own."""
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
                move=CopyStream(memory.device).move,
                writes=writes,
            )

        out, into = (tuple(backend(cache, memory) for cache, memory in caches) for _ in range(2))
        return cls(store, out, into)

    def become(self, space: Namespace | None) -> None:
        """Go on with pages of another namespace; None: with none. Nobody moves blocks meanwhile."""
        if has_become(self.store, space) and space is not None:
            self.out = tuple(backend.moved(self.store, space) for backend in self.out)
            self.into = tuple(backend.moved(self.store, space) for backend in self.into)

    def put(self, spec: SaveSpec) -> list[bool]:
        """Store blocks, of every component; which need not be stored again. Raises KvmoverError, OSError."""
        pages, ids = pages_of(spec.hashes), np.asarray(spec.blocks, np.int64)
        return of_all([backend.put(pages, ids) for backend in self.out])

    def get(self, spec: LoadSpec) -> list[bool]:
        """Read blocks, of every component; which came whole. Raises KvmoverError, OSError."""
        pages, ids = pages_of(spec.hashes), np.asarray(spec.blocks, np.int64)
        return of_all([backend.get(pages, ids) for backend in self.into])


@dataclass(slots=True)
class OffloadWorker:
    """Methods are for the engine's thread and wait for nothing but `settle`."""

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
        """Store blocks once `ready` has passed. They are read until the request is not `is_saving` any more."""
        with self._lock:
            self._saving[spec.request] += 1
        self._saver.put((spec, ready))

    def load(self, spec: LoadSpec) -> None:
        """Read blocks into their pages; `loaded` tells when they are there."""
        self._loader.put(spec)

    def is_saving(self, request: str) -> bool:
        """Whether blocks of the request are still being read for the store."""
        with self._lock:
            return self._saving[request] > 0

    def loaded(self) -> list[tuple[LoadSpec, list[bool]]]:
        """Loads that have ended, each once, and which of their blocks are there."""
        with self._lock:
            taken, self._loaded = self._loaded, []
            return taken

    def stored(self) -> list[bytes]:
        """Hashes of blocks that are in the store since the last call, as far as this rank has a part in them."""
        with self._lock:
            taken, self._stored = self._stored, []
            return taken

    def take_counts(self) -> Counter[str]:
        """What was counted since the last call."""
        with self._lock:
            taken, self._counts = self._counts, Counter[str]()
            return taken

    def settle(self) -> None:
        """Wait until all that was ordered to be stored has been."""
        self._saver.settle()

    def become(self, space: Namespace | None) -> None:
        """Do what was ordered, and go on with pages of another namespace; None: with none."""
        for worker in (self._saver, self._loader):
            worker.settle()
        self.blocks.become(space)

    def close(self) -> None:
        """Do what was ordered, end both threads, and close the store."""
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
    """The scheduler's eye on the store: what all ranks could load. It writes nothing."""

    store: PageStore
    views: list[PartView]

    @classmethod
    def open(cls, root: Path | str, space: Namespace, parts: Sequence[PagePart]) -> StoreLookup:
        """`parts`: of all ranks, as they told; ranks that hold the same are asked for once."""
        store = PageStore.open(root, space)
        unique: list[PagePart] = []
        for part in parts:
            if part not in unique:
                unique.append(part)
        return cls(store, [store.view(space, part) for part in unique])

    def become(self, space: Namespace | None) -> None:
        """Look at pages of another namespace; None: at none."""
        if has_become(self.store, space) and space is not None:
            self.views = [self.store.view(space, view.part) for view in self.views]

    def leading(self, hashes: Sequence[bytes]) -> int:
        """Blocks at the beginning of `hashes` that every rank can load."""
        pages = pages_of(hashes)
        return min((view.leading(pages) for view in self.views), default=0)

    def clear(self) -> None:
        """Delete this model's pages, and nobody else's."""
        self.store.clear()

    def close(self) -> None:
        """Close the store; its pages stay."""
        self.store.close()


@dataclass(slots=True)
class StoredBlockEvents:
    """Events of blocks that are being stored, each told once, when all `ranks` are done with the block.

    A block is ordered to be stored again whenever its prompt comes again, also by two requests at once.
    """

    ranks: int
    _awaited: dict[bytes, Any] = field(default_factory=dict[bytes, Any])
    _done: dict[bytes, set[int]] = field(default_factory=dict[bytes, set[int]])
    _told: dict[bytes, None] = field(default_factory=dict[bytes, None])
    _ready: list[Any] = field(default_factory=list[Any])

    def expect(self, block_hash: bytes, event: Callable[[], Any]) -> None:
        """Have an event told once every rank has stored a block, unless it was. `event` makes it, if it is needed."""
        if block_hash in self._told:
            self._told[block_hash] = self._told.pop(block_hash)  # the newest
        elif block_hash not in self._awaited:
            self._awaited[block_hash] = event()
            if len(self._awaited) > _MOST_AWAITED:
                oldest = next(iter(self._awaited))
                del self._awaited[oldest]
                self._done.pop(oldest, None)

    def heard(self, ranks: Mapping[bytes, AbstractSet[int]]) -> None:
        """Hear by hash which ranks are done with a block."""
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
        """Tell of blocks again when they are stored again: the store was cleared."""
        self._told.clear()
        self._ready.clear()

    def take(self) -> list[Any]:
        """Events whose blocks are whole in the store since the last call."""
        taken, self._ready = self._ready, []
        return taken
