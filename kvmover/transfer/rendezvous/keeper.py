"""A thread that does a small thing again and again, asleep in between: keeping a lease alive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvmover.errors import KvmoverError

log = logging.getLogger(__name__)


class Keeper:
    """Calls `work` every `period_s` until stopped, whatever it raises: a failure is logged when it begins and ends.

    A thread of its own, because a directory that hangs must not stop transfers, nor a long prefill the directory.
    """

    def __init__(self, name: str, period_s: float, work: Callable[[], None]) -> None:
        self._period_s, self._work = period_s, work
        self._stop = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return when `work` runs no more and will not again."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self._work()
            except KvmoverError as error:
                if not self._failing:
                    log.warning("%s: %s", self._thread.name, error)
                self._failing = True
                continue
            if self._failing:
                log.warning("%s: works again", self._thread.name)
            self._failing = False
