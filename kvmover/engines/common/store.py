"""A rank's page store is opened here by its settings, driven from threads beside the engine's, and looked after.

The upkeep is done by whichever of the engine's threads comes by.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, Queue
from threading import Lock, Thread
from typing import Generic, TypeVar

from kvmover.config.settings import StoreSettings
from kvmover.errors import StoreError
from kvmover.store import Namespace, PageStore, files_for

log = logging.getLogger(__name__)

Job = TypeVar("Job")


def open_store(settings: StoreSettings, space: Namespace) -> PageStore:
    """Past the page cache where the disk allows it. Raises ConfigError without a root, StoreError for a bad one."""
    root = settings.directory()
    return PageStore.open(root, space, settings, files_for(root) if root.is_dir() else None)


@dataclass(slots=True)
class Upkeep:
    """Quota, TTL and times of reading every `upkeep_s`, a flush every `flush_s`: see `PageStore.collect`."""

    store: PageStore
    settings: StoreSettings
    clock: Callable[[], float] = time.monotonic
    _lock: Lock = field(default_factory=Lock)
    _collected: float = field(init=False)
    _flushed: float = field(init=False)

    def __post_init__(self) -> None:
        self._collected = self._flushed = self.clock()

    def come_by(self) -> None:
        """Do what is due, unless another thread is at it. A disk that takes no flush is reported, and tried again."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            now = self.clock()
            if now >= self._collected + self.settings.upkeep_s:
                self._collected = now
                self.store.collect()
            if now >= self._flushed + self.settings.flush_s:
                self._flushed = now
                self.store.flush()
        except (OSError, StoreError) as error:
            log.error("upkeep of the page store: %s", error)
        finally:
            self._lock.release()


def _nothing() -> None:
    """A worker that has nothing to do between jobs."""


class StoreWorker(Generic[Job]):
    """A thread beside the engine's own that moves pages to or from the store, one job after the other.

    `work` does a job and raises nothing. `between` is called after each, and whenever none came for `every_s`."""

    def __init__(
        self,
        name: str,
        work: Callable[[Job], None],
        between: Callable[[], None] = _nothing,
        every_s: float | None = None,
    ) -> None:
        self._work, self._between, self._every_s = work, between, every_s
        self._jobs = Queue[Job | None]()
        self._thread = Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job for the thread; returns at once."""
        self._jobs.put(job)

    def settle(self) -> None:
        """Wait until every job that was put has been done."""
        self._jobs.join()

    def close(self) -> None:
        """Do the jobs that are left and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._every_s)
            except Empty:
                self._between()
                continue
            if job is not None:
                self._work(job)
            self._jobs.task_done()
            if job is None:
                return
            self._between()
