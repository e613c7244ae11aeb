"""Keeper: a rank's blocks to and from the page store, a thread each way; and what stands there, for the scheduler."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvmover.config.settings import StoreSettings
from kvmover.engines.common.pages import Bounce, Packed, election, of_all
from kvmover.engines.common.repack import Copies, Relay
from kvmover.engines.common.store_worker import StoreWorker
from kvmover.engines.common.upkeep import Upkeep, open_store
from kvmover.engines.vllm.caches import Sheaf
from kvmover.engines.vllm.connector_metadata import Load, Save
from kvmover.errors import KvmoverError, StoreError
from kvmover.layout import Fleet
from kvmover.store import Namespace, PageStore, Part
from kvmover.store.namespace import HASH_BYTES
from kvmover.transport.memory import memory_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class Event(Protocol):
    """A CUDA event, or its like where everything computes at once."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


def page_of(block_hash: bytes) -> bytes:
    """vLLM's hash of a block, and all before it, as a page's: 32 bytes whatever its algorithm."""
    return block_hash if len(block_hash) == HASH_BYTES else sha256(block_hash).digest()


def pages_of(hashes: Sequence[bytes]) -> list[bytes]:
    return [page_of(block_hash) for block_hash in hashes]


@dataclass(slots=True)
class Shelves:
    """A rank's shelves of its one cache group, for one thread each way, and the store they are in."""

    store: PageStore
    out: tuple[Packed, ...]
    into: tuple[Packed, ...]

    @classmethod
    def open(
        cls,
        settings: StoreSettings,
        space: Namespace,
        fleet: Fleet,
        rank: int,
        sheaves: Sequence[tuple[Sheaf, torch.Tensor]],
    ) -> Shelves:
        """`sheaves`: with the flat memory their starts lie in. Raises StoreError, or EngineUnsupported for a layout."""
        store = open_store(settings, space)
        whole_blocks = replace(fleet, page_tokens=space.page_tokens)

        def shelf(sheaf: Sheaf, memory: torch.Tensor) -> Packed:
            """Bounce memory and a stream of its own."""
            component, part = sheaf.component, part_of(sheaf, whole_blocks, rank)
            bounce, spec = Bounce.of(part.nbytes), sheaf.blocks(sheaf.spec.pages // sheaf.ratio)
            store.register(memory_of(bounce.memory))
            writes = election(component, whole_blocks, rank)
            starts = [start - memory.data_ptr() for start in sheaf.starts]
            return Packed(
                view=store.view(space, part, writes),
                relay=Relay.of(spec),
                memory=tuple(memory[start : start + spec.allocation_bytes] for start in starts),
                page_tokens=1,
                out=bounce,
                into=bounce,
                move=Copies.on(memory.device),
                writes=writes,
            )

        out, into = (tuple(shelf(sheaf, memory) for sheaf, memory in sheaves) for _ in range(2))
        return cls(store, out, into)

    def put(self, order: Save) -> list[bool]:
        pages, ids = pages_of(order.hashes), np.asarray(order.blocks, np.int64)
        return of_all([shelf.put(pages, ids) for shelf in self.out])

    def get(self, order: Load) -> list[bool]:
        pages, ids = pages_of(order.hashes), np.asarray(order.blocks, np.int64)
        return of_all([shelf.get(pages, ids) for shelf in self.into])


def part_of(sheaf: Sheaf, fleet: Fleet, rank: int) -> Part:
    """What a rank holds of every block; `fleet` has pages of a block."""
    part = Part.of(sheaf.component, fleet.shard(sheaf.component, rank, fleet.page_tokens), fleet.page_tokens)
    if part is None:
        raise StoreError(f"rank {rank} of {fleet} holds nothing of {sheaf.component.name}")
    return part


@dataclass(slots=True)
class Keeper:
    """Methods are for the engine's thread and wait for nothing but `settle`."""

    shelves: Shelves
    settings: StoreSettings
    clock: Callable[[], float] = time.monotonic
    _counts: Counter[str] = field(default_factory=Counter[str])
    _lock: Lock = field(default_factory=Lock)
    _saving: Counter[str] = field(default_factory=Counter[str])
    _loaded: list[tuple[Load, list[bool]]] = field(default_factory=list[tuple[Load, list[bool]]])
    _stored: list[bytes] = field(default_factory=list[bytes])
    _saver: StoreWorker[tuple[Save, Event]] = field(init=False)
    _loader: StoreWorker[Load] = field(init=False)

    def __post_init__(self) -> None:
        upkeep = Upkeep(self.shelves.store, self.settings, self.clock)
        self._saver = StoreWorker("kvmover-save", self._save, upkeep.come_by, self.settings.upkeep_s)
        self._loader = StoreWorker("kvmover-load", self._load)

    def save(self, order: Save, ready: Event) -> None:
        """Store blocks once `ready` has passed. They are read until the request is not `is_saving` any more."""
        with self._lock:
            self._saving[order.request] += 1
        self._saver.put((order, ready))

    def load(self, order: Load) -> None:
        self._loader.put(order)

    def is_saving(self, request: str) -> bool:
        with self._lock:
            return self._saving[request] > 0

    def loaded(self) -> list[tuple[Load, list[bool]]]:
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

    def close(self) -> None:
        for worker in (self._saver, self._loader):
            worker.close()
        self.shelves.store.close()

    def _save(self, job: tuple[Save, Event]) -> None:
        order, ready = job
        done: list[bool] = []
        try:
            ready.synchronize()
            done = self.shelves.put(order)
        except (KvmoverError, OSError, RuntimeError):
            log.exception("%d blocks of %s were not stored", len(order.blocks), order.request)
        with self._lock:
            self._stored += [block_hash for block_hash, is_done in zip(order.hashes, done, strict=False) if is_done]
            self._counts["stored_blocks"] += sum(done)
            self._counts["failed_stores"] += len(order.blocks) - sum(done)
            self._saving[order.request] -= 1
            if not self._saving[order.request]:
                del self._saving[order.request]

    def _load(self, order: Load) -> None:
        done = [False] * len(order.blocks)
        try:
            done = self.shelves.get(order)
        except (KvmoverError, OSError, RuntimeError):
            log.exception("%d blocks of %s were not read", len(order.blocks), order.request)
        with self._lock:
            self._loaded.append((order, done))
            self._counts["loaded_blocks"] += sum(done)
            self._counts["failed_loads"] += len(order.blocks) - sum(done)


@dataclass(slots=True)
class Lookout:
    """The scheduler's eye on the store: what all ranks could load. It writes nothing."""

    store: PageStore
    views: list[Callable[[Sequence[bytes]], int]]

    @classmethod
    def open(cls, root: Path, space: Namespace, parts: Sequence[Part]) -> Lookout:
        """`parts`: of all ranks, as they told; ranks that hold the same are asked for once."""
        store = PageStore.open(root, space)
        unique: list[Part] = []
        for part in parts:
            if part not in unique:
                unique.append(part)
        return cls(store, [store.view(space, part).leading for part in unique])

    def leading(self, hashes: Sequence[bytes]) -> int:
        """Blocks at the beginning of `hashes` that every rank can load."""
        pages = pages_of(hashes)
        return min((view(pages) for view in self.views), default=0)

    def clear(self) -> None:
        """Delete this model's pages, and nobody else's."""
        self.store.clear()

    def close(self) -> None:
        self.store.close()
