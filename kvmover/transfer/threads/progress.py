"""Progress: the one thread that drives a mover, asleep when nothing happens, and makes calls for all the others.

Nobody else touches the mover, so no lock is held while it copies: a call is queued, ends the thread's nap, and is
answered between two polls.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
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

#: `close` waits so long for the poll that is under way.
CLOSE_S = 60.0

#: `snapshot` waits so long for the poll that is under way: well below the 10 s that Prometheus waits for an answer.
LOOK_S = 2.0

T = TypeVar("T")


@dataclass(slots=True)
class _Fault:
    """A poll raised. `struck`: the transfers that it fails. They have until `until` to end."""

    reason: str
    until: float
    struck: set[Transfer]


class Progress:
    """Owns `mover`, which nobody else may touch, until `close`.

    A poll that raises fails all open transfers, the error being the reason, and the mover goes on; where they do not
    end, or every poll raises, it is closed. Methods are for any thread, and for signal handlers, of this one process:
    workers are spawned, not forked.

    Raises LayoutError for what is no Mover, and KvmoverError for one that another Progress drives.
    """

    def __init__(self, mover: Mover, pace: Pace | None = None) -> None:
        if not isinstance(mover, Mover):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LayoutError(f"a Progress drives a Mover, got {mover!r}")
        self._mover = mover
        self._pace = pace or Pace()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open: dict[Transfer, Future[Result]] = {}
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
        """Where the pools are."""
        return self._mover.device

    def poll(self) -> None:
        """Have the thread look now, not after its nap: something happened that it cannot see. Returns at once."""
        self._queue(lambda: None)

    def ended(self, transfer: Transfer) -> Future[Result]:
        """The result to come. Its callbacks run in the progress thread, or at once where the transfer has ended.

        A callback may make any call that does not wait for a transfer. Raises PlanError for one that began elsewhere.
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

        A poll or a call that takes longer than `LOOK_S` (a transport that copies at once, a busy machine) is not waited
        for: the snapshot is then the one that was taken last, so that metrics are answered whatever a peer does.
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
        """As `submit`, for a call that begins a transfer, whose end can be waited for from then on."""

        def begun(mover: Mover) -> Transfer:
            transfer = call(mover)
            self._open[transfer] = _uncancellable()
            return transfer

        return self.submit(begun)

    def submit(self, call: Callable[[Mover], T]) -> Future[T]:
        """Have the thread make a call between two polls; the future has what it returns or raises.

        Returns at once, and in a callback of the thread after the call. Raises TransportError when the mover is closed,
        or another process's.
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
        """Give up what is open, wait until peers have let go of its pages or their time is up, and have the mover join
        anew: see Mover.rejoin, whose errors this raises. Blocks the caller, who begins nothing meanwhile.
        """

        def give_up(mover: Mover) -> list[Future[Result]]:
            for transfer in list(self._open):
                mover.abort(transfer, reason)
            return list(self._open.values())

        wait(self.submit(give_up).result())
        self.submit(lambda mover: mover.rejoin(make, model, reason)).result()

    def close(self) -> None:
        """Close the mover and end the thread. Transfers still open end as failed. Raises DeadlineExceeded."""
        self._queue(self._halt)
        self._join()

    def tell(self, transfer: Transfer, call: Callable[[Mover], None]) -> None:
        """Have the thread make a call about a transfer, while that is open. What the call raises fails the transfer.

        Returns at once.
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
        """Whether the thread will run it."""
        self._check_process()
        with self._gate:
            if self._over is None:
                self._calls.put(run)
            return self._over is None

    def _check_process(self) -> None:
        """A forked child has the queue and the locks, and no thread."""
        if os.getpid() != self._pid:
            raise TransportError(f"{self._name} belongs to process {self._pid}: start workers by spawn, not fork")

    @property
    def inside(self) -> bool:
        """Whether this is the thread, in a callback."""
        return threading.current_thread() is self._thread

    def _join(self) -> None:
        if not self.inside:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                raise DeadlineExceeded(f"a poll of {self._name} has not returned within {CLOSE_S} s")

    # From here on in the thread alone.

    def _halt(self) -> None:
        """Behind all calls that were made before."""
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
        """Sleep, answer, poll, tell who waits. Returns why it stopped."""
        busy, moved = time.monotonic(), False
        while self._stop is None:
            nap_s = 0.0 if moved else self._pace.nap_s(time.monotonic() - busy, len(self._open))
            called = self._answer(nap_s)
            moved = self._poll()
            self._announce()
            if called or moved:
                busy = time.monotonic()
        return self._stop

    def _answer(self, nap_s: float) -> bool:
        """Sleep until somebody calls, at most `nap_s`, and make the calls that wait. Whether there were any."""
        try:
            run = self._calls.get(timeout=nap_s)
        except Empty:
            return False
        waiting = self._calls.qsize()  # and no more: callers that do not stop must not keep it from polling
        run()
        while waiting and self._stop is None:
            self._calls.get()()
            waiting -= 1
        return True

    def _poll(self) -> bool:
        moved = False
        try:
            moved = self._mover.poll()
        except Exception as error:  # ours, or the device's; whom it concerns is not known
            self._mover.meter.add(Count.POLL_FAULTS)
            self._strike(error)
        else:
            if self._fault is not None and all(transfer.ended for transfer in self._fault.struck):
                self._fault = None
        if self._fault is not None and time.monotonic() >= self._fault.until:
            self._stop = self._fault.reason
        return moved

    def _strike(self, error: Exception) -> None:
        """Fail what is open: an aborted transfer ends when its peers have drained, or `drain_s` later."""
        if self._fault is None:
            log.exception("a poll of %s failed", self._name)
            until = time.monotonic() + 2 * self._mover.config.drain_s
            self._fault = _Fault(f"{self._name} failed: {_words(error)}", until, set())
        for transfer in self._open.keys() - self._fault.struck:
            self._fault.struck.add(transfer)
            try:
                self._mover.abort(transfer, self._fault.reason)
            except Exception:  # it ends with the mover
                log.exception("%s cannot abort %s", self._name, transfer.request)

    def _announce(self) -> None:
        for transfer in [transfer for transfer in self._open if transfer.ended]:
            assert transfer.result is not None
            self._open.pop(transfer).set_result(transfer.result)

    def _end(self, reason: str) -> None:
        """Close the mover, and leave nobody waiting."""
        with self._gate:
            self._over = f"{self._name} is closed: {reason}"
        held = False
        try:
            self._mover.close(reason)
        except Exception:
            log.exception("%s cannot be closed", self._name)
            held = True
        for transfer in self._open:
            if not transfer.ended:
                transfer.held = held
                transfer.result = Result(reason, time.monotonic() - transfer.started, held=held, cause=Cause.FAULT)
        self._announce()
        while not self._calls.empty():
            self._calls.get()()
        _running.discard(self)


def _uncancellable(*result: T) -> Future[T]:
    """A future that runs, or has run: whoever holds one can wait for it, and not call it off for the others."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    for known in result:
        future.set_result(known)
    return future


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, KvmoverError) else f"{type(error).__name__}: {error}"


def _make_current(mover: Mover) -> None:
    """CUDA's current device is a thread's own, and UCX registers, writes and reads with it."""
    if mover.device.type == "cuda":
        import torch

        torch.cuda.set_device(mover.device)


#: What to stop before the interpreter takes NIXL away under it. A forked child has nothing to stop.
_running: weakref.WeakSet[Progress] = weakref.WeakSet()
os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _close_all() -> None:
    for progress in list(_running):
        progress.close()


def driven(given: Progress | Mover) -> Progress:
    """A Progress as it is; a Mover gets one."""
    return given if isinstance(given, Progress) else Progress(given)
