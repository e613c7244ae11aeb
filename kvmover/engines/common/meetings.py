"""Meetings connects the engines that requests name by host and port: one call an engine, shared by its requests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from kvmover.engines.common.cards import Cards
from kvmover.engines.common.transfer_params import Remote
from kvmover.errors import KvmoverError, PeerUnknown, TransportError
from kvmover.foreign_text import MOST_SAID, printable
from kvmover.transfer import Mover, Progress, Transfer

#: The number of engines called at the same time. Engines met before need no call.
_CALLERS = 4

#: A function that returns an engine's name and cards from a host and port. Raises KvmoverError.
Call = Callable[[str, int], Cards]


class Meetings:
    """The engines that a rank has met, and the threads that call others. All methods return at once."""

    def __init__(self, progress: Progress, call: Call) -> None:
        self._progress, self._call_at = progress, call
        self._met: dict[str, Future[str]] = {}
        self._lock = Lock()
        self._callers = ThreadPoolExecutor(_CALLERS, thread_name_prefix="kvmover-call")

    def begin(self, remote: Remote, receive: Callable[[Mover, str], Transfer]) -> Future[Transfer]:
        """Returns the future of `receive(mover, engine)`, called once the engine of `remote` is met.

        An engine that restarted under its old name is met again, once. The future has the error if it cannot be met.
        """
        fetch = Future[Transfer]()
        meetings: list[Future[str]] = []

        def meet() -> None:
            meetings.append(self._meet(remote, meetings[-1] if meetings else None))
            meetings[-1].add_done_callback(ask)

        def ask(met: Future[str]) -> None:
            if (error := _error(met)) is not None:
                fetch.set_exception(error)
                return
            begun_or_failed(self._progress, lambda mover: receive(mover, met.result())).add_done_callback(answered)

        def answered(begun: Future[Transfer]) -> None:
            error = begun.exception()
            if isinstance(error, PeerUnknown) and len(meetings) == 1:
                meet()
            elif error is not None:
                fetch.set_exception(error)
            else:
                fetch.set_result(begun.result())

        meet()
        return fetch

    def forget(self) -> None:
        """Call every engine anew from now on."""
        with self._lock:
            self._met.clear()

    def close(self) -> None:
        """Cancel the calls that have not begun."""
        self._callers.shutdown(wait=False, cancel_futures=True)

    def _meet(self, remote: Remote, before: Future[str] | None) -> Future[str]:
        """Returns a future with the engine's name, done when its ranks are connected.

        The engine is called anew if the last call failed, or led to an engine that is gone: `before`.
        """
        key = remote.engine or f"{remote.host}:{remote.port}"
        with self._lock:
            meeting = self._met.get(key)
            if meeting is None or meeting is before or (meeting.done() and _error(meeting) is not None):
                meeting = self._met[key] = self._called(remote)
            return meeting

    def _called(self, remote: Remote) -> Future[str]:
        try:
            return self._callers.submit(self._call, remote)
        except RuntimeError as error:  # `close` was called
            failed: Future[str] = Future()
            failed.set_exception(error)
            return failed

    def _call(self, remote: Remote) -> str:
        found = self._call_at(remote.host, remote.port)
        if remote.engine not in ("", found.engine):
            is_now, was = printable(found.engine, MOST_SAID), printable(remote.engine, MOST_SAID)
            raise KvmoverError(f"{printable(remote.host, MOST_SAID)}:{remote.port} is engine {is_now} now, not {was}")
        for card in found.cards:
            self._progress.submit(lambda mover, card=card: mover.connect(card)).result()
        return found.engine


def begun_or_failed(progress: Progress, call: Callable[[Mover], Transfer]) -> Future[Transfer]:
    """Returns a future transfer, or its error, of a closed mover too."""
    try:
        return progress.begin(call)
    except TransportError as error:
        failed: Future[Transfer] = Future()
        failed.set_exception(error)
        return failed


def _error(done: Future[str]) -> BaseException | None:
    """Returns the error of a call, also of one that `close` cancelled; None if it succeeded."""
    return TransportError("this side closed") if done.cancelled() else done.exception()
