"""A CallLane makes calls that may hang, one at a time in a thread of its own. Nobody waits for one beyond a limit."""

from __future__ import annotations

import errno
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
    """A call that runs beyond the limit goes on alone; until it has ended every other is refused at once.

    So who asks often waits for `limit_s` once, and the memory of a call is its own until it has ended.
    """

    def __init__(self, name: str, limit_s: float, silent: str) -> None:
        """`silent`: the words for who did not answer."""
        self._limit_s, self._silent = limit_s, silent
        self._calls = SimpleQueue[_Call | None]()
        self._free = Lock()
        self._began_s: float | None = None
        Thread(target=self._run, daemon=True, name=name).start()

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""
        return self._free.locked()

    def call(self, make: Callable[[], Answer]) -> Answer:
        """What `make` answers, or raises. Raises OSError where that takes longer than the limit, or the call before."""
        until_s = time.monotonic() + self._limit_s
        began_s = self._began_s
        is_late = began_s is not None and time.monotonic() - began_s >= self._limit_s
        if is_late or not self._free.acquire(timeout=self._limit_s):
            raise OSError(errno.ETIMEDOUT, self._silent)
        call = _Call(make)
        self._calls.put(call)
        if not call.ended.wait(max(0.0, until_s - time.monotonic())):
            raise OSError(errno.ETIMEDOUT, self._silent)
        if call.error is not None:
            raise call.error
        return call.answer

    def close(self) -> None:
        """End the thread, once what it is at is done. Waits for nothing."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._began_s = time.monotonic()
            call.run()
            self._began_s = None
            self._free.release()
            call.ended.set()
