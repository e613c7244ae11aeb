"""A rank's page store is opened here by its settings, driven from threads beside the engine's, and looked after."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from typing import Generic, TypeVar

from kvmover.config.settings import StoreSettings
from kvmover.errors import StoreError
from kvmover.store import Namespace, PageStore, clear_unused, files_for

#: Unused namespaces are looked for this often at most.
_LOOK_S = 3600.0

log = logging.getLogger(__name__)

Job = TypeVar("Job")


def open_store(settings: StoreSettings, space: Namespace | None) -> PageStore:
    """Past the page cache where a disk allows it. `space`: None for no namespace, see `PageStore.become`.

    Raises ConfigError without a root, StoreError for a bad one.
    """
    root = settings.location()
    files = files_for(root) if isinstance(root, Path) and root.is_dir() else None
    return PageStore.open(root, space, settings, files)


class Upkeep:
    """A thread that looks after a store until it is closed, whether or not anybody moves pages.

    Quota, TTL and times of reading every `upkeep_s`, a flush every `flush_s`: see `PageStore.collect`. Namespaces that
    nobody uses are emptied where `namespace_ttl_s` says so. The engine's own threads wait for none of it.
    """

    def __init__(self, store: PageStore, settings: StoreSettings, before: Callable[[], None] | None = None) -> None:
        """`before` is called first each time. Close it before the store."""
        self._store, self._before, self._settings = store, before, settings
        self._every_s = {self._collect: settings.upkeep_s, self._flush: settings.flush_s}
        if settings.namespace_ttl_s is not None:
            self._every_s[self._clear_unused] = min(_LOOK_S, settings.namespace_ttl_s / 4)
        self._over = Event()
        self._thread = Thread(target=self._run, daemon=True, name="kvmover-upkeep")
        self._thread.start()

    def close(self) -> None:
        """End the thread, once what it is at is done. Safe to call twice."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        now_s = time.monotonic()
        due = {work: now_s + every_s for work, every_s in self._every_s.items()}
        while not self._over.wait(max(0.0, min(due.values()) - time.monotonic())):
            for work, at in due.items():
                if time.monotonic() >= at:
                    due[work] = time.monotonic() + self._every_s[work]
                    self._do(work)

    def _do(self, work: Callable[[], object]) -> None:
        """A disk that takes no flush is reported, and tried again."""
        try:
            work()
        except (OSError, StoreError) as error:
            log.error("upkeep of the page store: %s", error)

    def _collect(self) -> None:
        if self._before:
            self._before()
        self._store.collect()

    def _flush(self) -> None:
        self._store.flush()

    def _clear_unused(self) -> None:
        if self._settings.namespace_ttl_s is not None:
            clear_unused(self._settings.location(), self._settings.namespace_ttl_s, self._store.name)


class StoreWorker(Generic[Job]):
    """A thread beside the engine's own that moves pages to or from the store, one job after the other.

    `work` does a job and raises nothing.
    """

    def __init__(self, name: str, work: Callable[[Job], None]) -> None:
        self._work = work
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
            job = self._jobs.get()
            if job is not None:
                self._work(job)
            self._jobs.task_done()
            if job is None:
                return
