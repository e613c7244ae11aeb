"""A CallLane makes calls that may hang, one at a time in a thread of its own. Nobody waits for one beyond its limit."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class _Call:
    """One call, and how it ended."""

    def __init__(self, make: Callable[[], object]) -> None:
        self.make, self.ended = make, Event()
        self.answer: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.answer = self.make()
        except Exception as error:  # it is the caller's, who waits for it
            self.error = error


class CallLane:
    """A call that runs beyond its limit goes on alone; until it has ended every other is refused at once.

    So who asks often waits for a limit once, and the memory of a call is its own until it has ended.
    """

    def __init__(self, name: str) -> None:
        self._calls = SimpleQueue[_Call | None]()
        self._free = Lock()
        self._late_s = math.inf
        Thread(target=self._run, daemon=True, name=name).start()

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""
        return self._free.locked()

    def call(self, make: Callable[[], Answer], limit_s: float, silent: str) -> Answer:
        """What `make` answers, or raises. `silent`: the words for who did not answer.

        Raises OSError where that takes longer than `limit_s`, the wait for the call before included.
        """
        until_s = time.monotonic() + limit_s
        if time.monotonic() >= self._late_s or not self._free.acquire(timeout=limit_s):
            raise OSError(errno.ETIMEDOUT, silent)
        call = _Call(make)
        self._late_s = until_s
        self._calls.put(call)
        if not call.ended.wait(max(0.0, until_s - time.monotonic())):
            raise OSError(errno.ETIMEDOUT, silent)
        if call.error is not None:
            raise call.error
        return call.answer

    def close(self) -> None:
        """End the thread, once what it is at is done. Waits for nothing."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            self._late_s = math.inf
            self._free.release()
            call.ended.set()
