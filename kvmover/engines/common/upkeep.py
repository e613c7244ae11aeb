"""What a store asks of its owner from time to time, done by whichever of the engine's threads comes by; and the figures
of its batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from kvmover.config.settings import StoreSettings
from kvmover.errors import StoreError
from kvmover.store import PageStore

log = logging.getLogger(__name__)


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


@dataclass(slots=True)
class Batches:
    """Pages and GB/s of each batch in one direction, since they were last taken."""

    pages: list[int] = field(default_factory=list[int])
    gb_s: list[float] = field(default_factory=list[float])
    _lock: Lock = field(default_factory=Lock)

    def add(self, pages: int, nbytes: int, seconds: float) -> None:
        """A batch. Nothing was moved where all pages were stored already, and no bandwidth is told then."""
        with self._lock:
            if pages:
                self.pages.append(pages)
                self.gb_s.append(nbytes / max(seconds, 1e-9) / 1e9)

    def take(self) -> tuple[list[int], list[float]]:
        with self._lock:
            taken = self.pages, self.gb_s
            self.pages, self.gb_s = [], []
            return taken
