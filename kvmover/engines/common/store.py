"""A rank's page store is opened here by its settings, and looked after."""

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

#: Unused namespaces are looked for this often at most.
_LOOK_S = 3600.0

#: The share of an engine's rows that may wait to be written: the engine keeps them as they are meanwhile.
_WAITING_SHARE = 1 / 4

log = logging.getLogger(__name__)


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

    def __init__(self, store: PageStore, settings: StoreSettings) -> None:
        """Close it before the store."""
        self._store, self._settings = store, settings
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
        self._store.collect()

    def _flush(self) -> None:
        self._store.flush()

    def _clear_unused(self) -> None:
        if self._settings.namespace_ttl_s is not None:
            clear_unused(self._settings.location(), self._settings.namespace_ttl_s, self._store.name)


def open_row_tier(settings: StoreSettings, space: Namespace, what: str, memory: Memory, row_bytes: int) -> StoreTier:
    """Returns a tier whose pages are rows of `row_bytes`, one after the other in `memory`: bytes without an axis.

    `what`: all that must be equal for the bytes of a row to mean the same. More than a quarter of the rows never wait
    to be written. Raises ConfigError without a root, StoreError for a bad one, LayoutError for rows of no bytes.
    """
    part = PagePart.whole(Component.state(what, 1, 1, row_bytes, "uint8"), 1)
    store = open_store(settings, space)
    store.register(memory)
    pages = {verb: StoredPages(store.view(space, part), memory.address, row_bytes) for verb in PageVerb}
    most_waiting = int(memory.nbytes // row_bytes * _WAITING_SHARE)
    return StoreTier(store, space, pages, most_waiting, Upkeep(store, settings).close)
