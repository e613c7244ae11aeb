"""Progress drives a mover in one thread, which sleeps while idle and makes calls for all other threads.

No other thread touches the mover, so no lock is held while it copies: a call is queued, ends the thread's nap, and is
answered between two polls.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from kvmover.errors import DeadlineExceeded, KvmoverError, LayoutError, PlanError, TransportError
from kvmover.transfer.config import MoverConfig, Pace
from kvmover.transfer.meter import Count, Snapshot
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol.handshake import Model
from kvmover.transfer.result import Cause, Result, Transfer
from kvmover.transport.base import Transport

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: Seconds that `close` waits for the poll under way.
CLOSE_S = 60.0

#: Seconds that `snapshot` waits for the poll under way: well below Prometheus' 10 s.
LOOK_S = 2.0

T = TypeVar("T")


@dataclass(slots=True)
class _Fault:
    """The fault of a poll that raised. `struck`: the transfers that it fails, which have until `until` to end."""

    reason: str
    until: float
    struck: set[Transfer]


class Progress:
    """The owner of `mover`, which no other code may touch until `close`.

    A poll that raises fails all open transfers with its error, and the mover goes on; if these do not end, or every
    poll raises, the mover is closed. Any thread of this process may call the methods, and signal handlers: spawn
    workers, do not fork them.

    Raises LayoutError for other than a Mover, and KvmoverError for a Mover that another Progress drives.
    """

    def __init__(self, mover: Mover, pace: Pace | None = None) -> None:
        if not isinstance(mover, Mover):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"a Progress drives a Mover, got {mover!r}")
        self._mover = mover
        self._pace = pace or Pace()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open: dict[Transfer, Future[Result]] = {}
        self._ended: deque[Transfer] = deque()  # since the last announcement
        self._fault: _Fault | None = None
        self._stop: str | None = None
        self._gate = threading.RLock()  # `_over` is set once, before the thread's last look at the queue
        self._over: str | None = None
        self._pid = os.getpid()
        self._seen = mover.snapshot()
        self._name = f"the mover of {self._seen.engine} rank {self._seen.rank}"
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        mover.hand_to(self._thread)
        _running.add(self)
        self._thread.start()

    @property
    def card(self) -> bytes:
        """The bytes that a peer needs to connect; see Mover.card."""
        return self._mover.card

    @property
    def config(self) -> MoverConfig:
        """The configuration that new requests get; see Mover.config."""
        return self._mover.config

    @property
    def device(self) -> torch.device:
        """The device of the pools."""
        return self._mover.device

    def poll(self) -> None:
        """Have the thread poll now, not after its nap, for an event that it cannot see. Returns at once."""
        self._queue(lambda: None)

    def ended(self, transfer: Transfer) -> Future[Result]:
        """Returns a future of the transfer's Result.

        Its callbacks run in the progress thread, or at once if the transfer has ended. A callback may make any call
        that does not wait for a transfer. Raises PlanError for a transfer of another mover.
        """
        self._check_process()
        future = self._open.get(transfer)
        if future is None:
            if transfer.result is None:
                raise PlanError(f"{transfer.request} is not a transfer of {self._name}")
            future = _uncancellable(transfer.result)
        return future

    def snapshot(self) -> Snapshot:
        """Returns counts, times and gauges between two polls; once closed, the last ones.

        If a poll or call takes longer than `LOOK_S` (a transport that copies at once, a busy machine), returns the
        snapshot taken last, so that metrics are answered whatever a peer does.
        """
        try:
            return self.submit(self._look).result(LOOK_S)
        except TimeoutError:
            return self._seen
        except TransportError:
            if self._over is None:
                raise
            self._join()
            return self._mover.snapshot()

    def _look(self, mover: Mover) -> Snapshot:
        self._seen = mover.snapshot()
        return self._seen

    def begin(self, call: Callable[[Mover], Transfer]) -> Future[Transfer]:
        """Submit a call that begins a transfer; `ended` then has a future of its Result. See `submit`."""

        def begun(mover: Mover) -> Transfer:
            transfer = call(mover)
            self._open[transfer] = _uncancellable()
            transfer.then(self._ended.append)
            return transfer

        return self.submit(begun)

    def submit(self, call: Callable[[Mover], T]) -> Future[T]:
        """Have the thread make a call between two polls. Returns a future of its value or exception.

        Returns at once; in a callback of the thread, after the call. Raises TransportError if the mover is closed or
        belongs to another process.
        """
        future: Future[T] = _uncancellable()

        def run() -> None:
            try:
                if self._over is not None:
                    raise TransportError(self._over)
                future.set_result(call(self._mover))
            except BaseException as error:
                future.set_exception(error)

        if self.inside:
            run()
        elif not self._queue(run):
            raise TransportError(self._over)
        return future

    def rejoin(self, make: Callable[[], Transport], model: Model, reason: str) -> None:
        """Abort open transfers, wait until they end, and have the mover join anew: see Mover.rejoin, which may raise.

        They end once peers have released the pages, or their time is up. Blocks the caller, which must begin no
        transfer meanwhile.
        """

        def give_up(mover: Mover) -> list[Future[Result]]:
            for transfer in list(self._open):
                mover.abort(transfer, reason)
            return list(self._open.values())

        wait(self.submit(give_up).result())
        self.submit(lambda mover: mover.rejoin(make, model, reason)).result()

    def close(self) -> None:
        """Close the mover, end the thread. Open transfers fail. Raises DeadlineExceeded if a poll lasts `CLOSE_S`."""
        self._queue(self._halt)
        self._join()

    def tell(self, transfer: Transfer, call: Callable[[Mover], None]) -> None:
        """Have the thread make a call about a transfer that is still open. Returns at once.

        An exception of the call fails the transfer.
        """

        def run() -> None:
            if transfer.ended:
                return
            try:
                call(self._mover)
            except Exception as error:
                self._mover.abort(transfer, _words(error))

        if self.inside:
            run()
        else:
            self._queue(run)

    def _queue(self, run: Callable[[], None]) -> bool:
        """Queue a call. Returns True if the thread will make it."""
        self._check_process()
        with self._gate:
            if self._over is None:
                self._calls.put(run)
            return self._over is None

    def _check_process(self) -> None:
        """Raise TransportError in a forked child: it has the queue and the locks, but no thread."""
        if os.getpid() != self._pid:
            raise TransportError(f"{self._name} belongs to process {self._pid}: start workers by spawn, not fork")

    @property
    def inside(self) -> bool:
        """True in the progress thread, as in a callback."""
        return threading.current_thread() is self._thread

    def _join(self) -> None:
        if not self.inside:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                raise DeadlineExceeded(f"a poll of {self._name} has not returned within {CLOSE_S} s")

    # The progress thread alone runs the rest.

    def _halt(self) -> None:
        """Stop the thread, after all calls queued before."""
        self._stop = self._stop or "this side closed"

    def _run(self) -> None:
        reason = "its thread ended"
        try:
            _make_current(self._mover)
            reason = self._drive()
        except BaseException as error:
            reason = _words(error)
            raise
        finally:
            self._end(reason)

    def _drive(self) -> str:
        """Sleep, make calls, poll and complete the futures of ended transfers. Returns the reason to stop."""
        busy, moved = time.monotonic(), False
        while self._stop is None:
            nap_s = 0.0 if moved else self._nap_s(time.monotonic() - busy)
            called = self._answer(nap_s)
            moved = self._poll()
            self._announce()
            if called or moved:
                busy = time.monotonic()
        return self._stop

    def _nap_s(self, quiet_s: float) -> float:
        return self._pace.nap_s(quiet_s, len(self._open), self._mover.to_expected_end_s())

    def _answer(self, nap_s: float) -> bool:
        """Sleep until a call comes, at most `nap_s`, and make the waiting calls. Returns True if there were any."""
        try:
            run = self._calls.get(timeout=nap_s)
        except Empty:
            return False
        waiting = self._calls.qsize()  # and no more: steady callers must not keep the thread from polling
        run()
        while waiting and self._stop is None:
            self._calls.get()()
            waiting -= 1
        return True

    def _poll(self) -> bool:
        moved = False
        try:
            moved = self._mover.poll()
        except Exception as error:  # our error, or the device's; its transfer is unknown
            self._mover.meter.add(Count.POLL_FAULTS)
            self._strike(error)
        else:
            if self._fault is not None and all(transfer.ended for transfer in self._fault.struck):
                self._fault = None
        if self._fault is not None and time.monotonic() >= self._fault.until:
            self._stop = self._fault.reason
        return moved

    def _strike(self, error: Exception) -> None:
        """Abort open transfers: each ends when its peers have drained, or `drain_s` later."""
        if self._fault is None:
            log.exception("a poll of %s failed", self._name)
            until = time.monotonic() + 2 * self._mover.config.drain_s
            self._fault = _Fault(f"{self._name} failed: {_words(error)}", until, set())
        for transfer in self._open.keys() - self._fault.struck:
            self._fault.struck.add(transfer)
            try:
                self._mover.abort(transfer, self._fault.reason)
            except Exception:  # the transfer ends with the mover
                log.exception("%s cannot abort %s", self._name, transfer.request)

    def _announce(self) -> None:
        """Complete the futures of transfers that ended since the last time, in the order of their ends."""
        while self._ended:
            transfer = self._ended.popleft()
            assert transfer.result is not None
            self._open.pop(transfer).set_result(transfer.result)

    def _end(self, reason: str) -> None:
        """Close the mover, and complete all futures and calls."""
        with self._gate:
            self._over = f"{self._name} is closed: {reason}"
        quarantined = False
        try:
            self._mover.close(reason)
        except Exception:
            log.exception("%s cannot be closed", self._name)
            quarantined = True
        for transfer in self._open:
            if not transfer.ended:
                seconds = time.monotonic() - transfer.started
                transfer.end(Result(reason, seconds, quarantined=quarantined, cause=Cause.FAULT))
        self._announce()
        while not self._calls.empty():
            self._calls.get()()
        _running.discard(self)


def _uncancellable(*result: T) -> Future[T]:
    """Return a running or completed future: holders can wait for it, but not cancel it for other holders."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    for known in result:
        future.set_result(known)
    return future


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, KvmoverError) else f"{type(error).__name__}: {error}"


def _make_current(mover: Mover) -> None:
    """Set CUDA's current device, which is a thread's own: UCX registers, writes and reads with it.

    The thread's calls pass while an engine captures a graph in another.
    """
    if mover.device.type == "cuda":
        import torch

        from kvmover.kernels import cuda_driver

        torch.cuda.set_device(mover.device)
        cuda_driver.leave_captures_alone()


#: Movers to close before the interpreter takes NIXL away under them. A forked child has no mover to close.
_running: weakref.WeakSet[Progress] = weakref.WeakSet()
os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _close_all() -> None:
    for progress in list(_running):
        progress.close()


def driven(given: Progress | Mover) -> Progress:
    """Return a Progress as it is, or a new one for a Mover."""
    return given if isinstance(given, Progress) else Progress(given)
