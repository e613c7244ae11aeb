"""A rank's page store is opened here by its settings, and Upkeep flushes and collects it from time to time.

The upkeep is done by whichever of the engine's threads comes by.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from kvmover.config.settings import StoreSettings
from kvmover.errors import StoreError
from kvmover.store import Namespace, PageStore
from kvmover.store.nixl_files import files_for

log = logging.getLogger(__name__)


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
