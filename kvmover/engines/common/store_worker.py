"""StoreWorker: a thread beside the engine's own that moves pages to or from the page store, one job after the other."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, Queue
from threading import Thread
from typing import Generic, TypeVar

Job = TypeVar("Job")


def _nothing() -> None:
    """A worker that has nothing to do between jobs."""


class StoreWorker(Generic[Job]):
    """`work` does a job and raises nothing. `between` is called after each, and whenever none came for `every_s`."""

    def __init__(
        self,
        name: str,
        work: Callable[[Job], None],
        between: Callable[[], None] = _nothing,
        every_s: float | None = None,
    ) -> None:
        self._work, self._between, self._every_s = work, between, every_s
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
            try:
                job = self._jobs.get(timeout=self._every_s)
            except Empty:
                self._between()
                continue
            if job is not None:
                self._work(job)
            self._jobs.task_done()
            if job is None:
                return
            self._between()
