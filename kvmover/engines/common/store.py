"""A rank's page store, opened by its settings, and the thread that does its upkeep."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

from kvmover.cache.page_tiers import PageVerb, StoredPages, StoreTier
from kvmover.config.settings import StoreSettings
from kvmover.errors import StoreError
from kvmover.layout import Component
from kvmover.store import Namespace, PagePart, PageStore, clear_unused, files_for
from kvmover.transport import Memory

#: Seconds between searches for unused namespaces, at least.
_LOOK_S = 3600.0

#: The share of an engine's rows that may wait to be written; the engine keeps those rows unchanged meanwhile.
_WAITING_SHARE = 1 / 4

log = logging.getLogger(__name__)


def open_store(settings: StoreSettings, space: Namespace | None) -> PageStore:
    """Open the page store at `settings.root`, past the page cache where the disk allows it. `space` None: see
    `PageStore.become`.

    Raises ConfigError without a root, StoreError for a bad one.
    """
    root = settings.location()
    files = files_for(root) if isinstance(root, Path) and root.is_dir() else None
    return PageStore.open(root, space, settings, files)


class Upkeep:
    """A thread that does a store's upkeep until it is closed.

    Quota, TTL and last uses every `upkeep_s`, a flush every `flush_s`: see `PageStore.collect`. Unused namespaces are
    emptied after `namespace_ttl_s`. The engine's threads never wait for it.
    """

    def __init__(self, store: PageStore, settings: StoreSettings) -> None:
        """Start the thread. Close it before the store."""
        self._store, self._settings = store, settings
        self._every_s = {self._collect: settings.upkeep_s, self._flush: settings.flush_s}
        if settings.namespace_ttl_s is not None:
            self._every_s[self._clear_unused] = min(_LOOK_S, settings.namespace_ttl_s / 4)
        self._over = Event()
        self._thread = Thread(target=self._run, daemon=True, name="kvmover-upkeep")
        self._thread.start()

    def close(self) -> None:
        """End the thread, once its current step is done. Safe to call twice."""
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
        """Run a step; an error is logged, and the step runs again at its next time."""
        try:
            work()
        except (OSError, StoreError) as error:
            log.error("upkeep of the page store: %s", error)

    def _collect(self) -> None:
        self._store.collect()

    def _flush(self) -> None:
        self._store.flush()

    def _clear_unused(self) -> None:
        if self._settings.namespace_ttl_s is not None:
            clear_unused(self._settings.location(), self._settings.namespace_ttl_s, self._store.name)


def open_row_tier(settings: StoreSettings, space: Namespace, what: str, memory: Memory, row_bytes: int) -> StoreTier:
    """Returns a tier whose pages are rows of `row_bytes`, one after the other in `memory`: bytes without an axis.

    `what` names everything that must be equal for the bytes of a row to mean the same. At most a quarter of the rows
    wait to be written. Raises ConfigError without a root, StoreError for a bad one, LayoutError for rows of no bytes.
    """
    part = PagePart.whole(Component.state(what, 1, 1, row_bytes, "uint8"), 1)
    store = open_store(settings, space)
    store.register(memory)
    pages = {verb: StoredPages(store.view(space, part), memory.address, row_bytes) for verb in PageVerb}
    most_waiting = int(memory.nbytes // row_bytes * _WAITING_SHARE)
    return StoreTier(store, space, pages, most_waiting, Upkeep(store, settings).close)
