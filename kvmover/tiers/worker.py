"""Worker: the one thread that reads and writes storage, a batch at a time. It sleeps while there is nothing to do.

Jobs of the more urgent class go first, between two batches of another: a read does not wait for a long write.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol


class Urgency(IntEnum):
    LOOK = 0
    READ = 1
    WRITE = 2


class Job(Protocol):
    """`step` does one batch and says whether that was the last. An exception ends the job, and is its outcome."""

    def step(self) -> bool: ...


#: Called by `Worker.poll`, in the caller's thread, with what a job raised, or None.
Ended = Callable[[Exception | None], None]


class Worker:
    """Close it, or the thread outlives its owner (it is a daemon)."""

    def __init__(self) -> None:
        self._queues: tuple[deque[tuple[Job, Ended]], ...] = tuple(deque() for _ in Urgency)
        self._over: deque[tuple[Ended, Exception | None]] = deque()
        self._work, self._news = threading.Condition(), threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def begin(self, job: Job, urgency: Urgency, ended: Ended) -> None:
        with self._work:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvmover-storage", daemon=True)
                self._thread.start()
            self._queues[urgency].append((job, ended))
            self._work.notify()

    def poll(self) -> None:
        """Tell what ended since."""
        self._news.clear()
        while self._over:
            ended, error = self._over.popleft()
            ended(error)

    def wait(self, seconds: float) -> None:
        """Sleep until a job has ended, so long at most."""
        self._news.wait(seconds)

    @property
    def queued(self) -> int:
        return sum(map(len, self._queues))

    def close(self) -> None:
        """Let the batch under way end, and no other begin. What was queued is never heard of again."""
        with self._work:
            self._closing = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._work:
                while not self._closing and not any(self._queues):
                    self._work.wait()
                if self._closing:
                    return
                queue = next(queue for queue in self._queues if queue)
                job, ended = queue[0]
            error: Exception | None = None
            try:
                over = job.step()
            except Exception as caught:  # whatever it is, the job has ended, and its owner must hear of it
                error, over = caught, True
            if over:
                with self._work:
                    queue.popleft()
                self._over.append((ended, error))
                self._news.set()


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s
