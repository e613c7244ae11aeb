"""StorageWorker is the one thread that reads and writes storage, a batch at a time. It sleeps while there is no work.

Jobs of the more urgent class go first, between two batches of another: a read does not wait for a long write. A class
that has moved what its rate allows waits, and no other one with it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Protocol

from kvmover.cache.tiers.rate import Bucket, Rate

#: How long a job that has used up its rate sleeps at most: it may have been told to stop.
_ASK_S = 0.02


class Urgency(IntEnum):
    LOOK = 0
    READ = 1
    WRITE = 2


class StorageJob(Protocol):
    """`step` does one batch and says whether that was the last. An exception ends the job, and is its outcome.

    `nbytes`: what all its steps have moved so far. `moves`: whether the next one will move any, if it is allowed to.
    """

    nbytes: int

    @property
    def moves(self) -> bool: ...

    def step(self) -> bool: ...


#: Called by `StorageWorker.poll`, in the caller's thread, with what a job raised, or None.
Ended = Callable[[Exception | None], None]


class StorageWorker:
    """Close it, or the thread outlives its owner (it is a daemon)."""

    def __init__(self, rates: Mapping[Urgency, Rate] = MappingProxyType({})) -> None:
        now_s = time.monotonic()
        self._buckets = {urgency: Bucket.full(rate, now_s) for urgency, rate in rates.items()}
        self._queues: tuple[deque[tuple[StorageJob, Ended]], ...] = tuple(deque() for _ in Urgency)
        self._over: deque[tuple[Ended, Exception | None]] = deque()
        self._work, self._news = threading.Condition(), threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def begin(self, job: StorageJob, urgency: Urgency, ended: Ended) -> None:
        with self._work:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvmover-storage", daemon=True)
                self._thread.start()
            self._queues[urgency].append((job, ended))
            self._work.notify()

    def poll(self) -> None:
        """Report the jobs that ended since the last call."""
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
            urgency = None
            with self._work:
                while not self._closing and urgency is None:
                    urgency = self._next()
                    if urgency is None:
                        self._work.wait(self._pause_s())
                if self._closing or urgency is None:
                    return
                queue = self._queues[urgency]
                job, ended = queue[0]
            error, before = None, job.nbytes
            try:
                over = job.step()
            except Exception as caught:  # whatever it is, the job has ended, and its owner must hear of it
                error, over = caught, True
            if urgency in self._buckets:
                self._buckets[urgency] = self._buckets[urgency].spent(job.nbytes - before, time.monotonic())
            if over:
                with self._work:
                    queue.popleft()
                self._over.append((ended, error))
                self._news.set()

    def _next(self) -> Urgency | None:
        """The most urgent class that has work and may do it now."""
        return next((urgency for urgency in Urgency if self._queues[urgency] and not self._wait_s(urgency)), None)

    def _pause_s(self) -> float | None:
        """Until a class may go on, or is to be asked whether it was told to stop; None: until somebody brings work."""
        waits = [self._wait_s(urgency) for urgency in Urgency if self._queues[urgency]]
        return min(_ASK_S, *waits) if waits else None

    def _wait_s(self, urgency: Urgency) -> float:
        bucket = self._buckets.get(urgency)
        return bucket.wait_s(time.monotonic()) if bucket and self._queues[urgency][0][0].moves else 0.0


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s
