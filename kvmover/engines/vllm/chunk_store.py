"""ChunkStore moves chunks of vLLM's CPU tier to and from the page store: rows of host memory that vLLM alone reads.

A thread writes and one reads, job by job, and nobody else waits for a disk. A chunk is one cell: bytes without an
axis, whose component says what they are bytes of.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from threading import Lock
from typing import Protocol

from kvmover.config.settings import StoreSettings
from kvmover.engines.common import StoreWorker, Upkeep, open_store
from kvmover.engines.vllm.block_store import has_become, page_of, pages_of
from kvmover.errors import KvmoverError
from kvmover.layout import Component
from kvmover.store import Got, Namespace, PagePart, PageStore, PartView, Put
from kvmover.transport import Memory

log = logging.getLogger(__name__)

#: What waits to be written is pinned in vLLM's CPU tier: at most this share of it, and what comes beyond is dropped.
_WAITING_SHARE = 1 / 4

#: Batches of keys that vLLM used and the store was not told of yet: the oldest are forgotten beyond so many.
_MOST_TOUCHED = 1024

#: Of a chunk that nobody tried to write, because too many were waiting.
DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class HostRows:
    """Host memory of an engine: row n, a chunk, has `row_bytes` at `address + n * row_bytes`."""

    address: int
    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """Chunks to store or load: `keys[i]` names what lies in, or goes to, row `rows[i]`. `number`: the engine's own."""

    number: int
    keys: tuple[bytes, ...]
    rows: tuple[int, ...]


class ChunkVerb(StrEnum):
    """What is done with chunks."""

    STORE = "store"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class EndedJob:
    """How a job ended. `done[i]`: whether chunk i need not be stored again, or is whole in its row.

    `nbytes`: written or read; `seconds`: in the store's thread, without the wait for it.
    """

    verb: ChunkVerb
    job: ChunkJob
    done: tuple[bool, ...]
    nbytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether all of it was done."""
        return all(self.done)


class _Outcome(Protocol):
    """What the store answers of a page."""

    @property
    def ok(self) -> bool: ...

    @property
    def outcome(self) -> Put | Got: ...


@dataclass(slots=True)
class ChunkStore:
    """`rows` are read until a store has ended, and written until a load has. Whoever holds them calls `close` first.

    Counts are by verb and outcome: those of `Put` and `Got`, and DROPPED.
    """

    store: PageStore
    settings: StoreSettings
    space: Namespace
    part: PagePart
    rows: HostRows
    clock: Callable[[], float] = time.monotonic
    _lock: Lock = field(default_factory=Lock)
    _counts: Counter[tuple[ChunkVerb, str]] = field(default_factory=Counter[tuple[ChunkVerb, str]])
    _ended: list[EndedJob] = field(default_factory=list[EndedJob])
    _waiting: int = 0
    _touched: deque[Collection[bytes]] = field(default_factory=lambda: deque[Collection[bytes]](maxlen=_MOST_TOUCHED))
    _views: dict[str, PartView] = field(init=False)
    _upkeep: Upkeep = field(init=False)
    _writer: StoreWorker[ChunkJob] = field(init=False)
    _reader: StoreWorker[ChunkJob] = field(init=False)

    def __post_init__(self) -> None:
        self._see()
        self._upkeep = Upkeep(self.store, self.settings, self._tell_uses)
        self._writer = StoreWorker("kvmover-tier-store", self._store)
        self._reader = StoreWorker("kvmover-tier-load", self._load)

    @classmethod
    def open(cls, settings: StoreSettings, space: Namespace, what: str, memory: Memory, row_bytes: int) -> ChunkStore:
        """`what`: all that must be equal for bytes of a row to mean the same. `memory`: all rows, one after the other.

        Raises ConfigError without a root, StoreError for a bad one, LayoutError for rows of no bytes.
        """
        part = PagePart.whole(Component.state(what, 1, 1, row_bytes, "uint8"), 1)
        store = open_store(settings, space)
        store.register(memory)
        return cls(store, settings, space, part, HostRows(memory.address, memory.nbytes // row_bytes, row_bytes))

    def _see(self) -> None:
        self._views = {verb: self.store.view(self.space, self.part) for verb in ("look", "store", "load")}

    def become(self, space: Namespace | None) -> None:
        """Do what was submitted, and go on with chunks of another namespace; None: with none."""
        self.settle()
        if has_become(self.store, space) and space is not None:
            self.space = space
            self._see()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether a load of each would find it now. It waits for other users of the store: not for a scheduler."""
        return self._views["look"].exists(pages_of(keys))

    def submit_store(self, job: ChunkJob) -> None:
        """Store chunks, at once or after those that wait; a job that is one too many ends as if it had failed."""
        with self._lock:
            fits = not self._waiting or self._waiting + len(job.keys) <= self.rows.rows * _WAITING_SHARE
            if fits:
                self._waiting += len(job.keys)
            else:
                self._counts[ChunkVerb.STORE, DROPPED] += len(job.keys)
                self._ended.append(EndedJob(ChunkVerb.STORE, job, (False,) * len(job.keys), 0, 0.0))
        if fits:
            self._writer.put(job)

    def submit_load(self, job: ChunkJob) -> None:
        """Read chunks into their rows."""
        self._reader.put(job)

    def touch(self, keys: Collection[bytes]) -> None:
        """These were used in the engine's own memory: they are not the next to be evicted from the store."""
        self._touched.append(keys)

    def ended(self) -> list[EndedJob]:
        """Jobs that have ended since the last call."""
        with self._lock:
            taken, self._ended = self._ended, []
            return taken

    def take_counts(self) -> Counter[tuple[ChunkVerb, str]]:
        """Chunks by (verb, outcome) since the last call."""
        with self._lock:
            taken, self._counts = self._counts, Counter[tuple[ChunkVerb, str]]()
            return taken

    def settle(self) -> None:
        """Wait until every job that was submitted has ended: none touches a row then."""
        self._writer.settle()
        self._reader.settle()

    def close(self) -> None:
        """Do what was submitted, end both threads, and close the store."""
        self._writer.close()
        self._reader.close()
        self._upkeep.close()
        self.store.close()

    def _store(self, job: ChunkJob) -> None:
        self._do(ChunkVerb.STORE, job, self._views["store"].put, Put.WRITTEN, Put.FAILED)
        with self._lock:
            self._waiting -= len(job.keys)

    def _load(self, job: ChunkJob) -> None:
        self._do(ChunkVerb.LOAD, job, self._views["load"].get, Got.READ, Got.FAILED)

    def _do(
        self,
        verb: ChunkVerb,
        job: ChunkJob,
        move: Callable[[Sequence[bytes], Sequence[int]], Sequence[_Outcome]],
        moved: Put | Got,
        failed: Put | Got,
    ) -> None:
        """Chunks of which the store says nothing, because it raised, have failed."""
        began = self.clock()
        outcomes, done = Counter[str](), [False] * len(job.keys)
        try:
            answers = move(pages_of(job.keys), [self.rows.address + row * self.rows.row_bytes for row in job.rows])
            done = [answer.ok for answer in answers]
            outcomes.update(answer.outcome for answer in answers)
        except (KvmoverError, OSError, RuntimeError):
            log.exception("%s of %d chunks", verb, len(job.keys))
            outcomes[failed] += len(job.keys)
        ended = EndedJob(verb, job, tuple(done), outcomes[moved] * self.rows.row_bytes, self.clock() - began)
        with self._lock:
            self._counts.update({(verb, outcome): count for outcome, count in outcomes.items()})
            self._ended.append(ended)

    def _tell_uses(self) -> None:
        """What the engine used goes last."""
        pages = {page_of(key) for _ in range(len(self._touched)) for key in self._touched.popleft()}
        if pages:
            self.store.used(list(pages))
