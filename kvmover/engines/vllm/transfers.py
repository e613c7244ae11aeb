"""RequestTransfers holds a rank's transfers by vLLM's request ids, their outcomes, and the pages still being
written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvmover.engines.common import Cards
from kvmover.engines.vllm.connector_metadata import ReceiveSpec, ReleaseSpec, SendSpec
from kvmover.engines.vllm.transfer_params import Remote
from kvmover.errors import KvmoverError, PeerUnknown, TransportError
from kvmover.foreign_text import MOST_SAID, printable
from kvmover.transfer import Model, Mover, Progress, Result, Transfer
from kvmover.transfer.arguments import page_tables
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.result import Gate
from kvmover.transport import Transport

log = logging.getLogger(__name__)

#: The number of engines called at the same time. Engines met before need no call.
_CALLERS = 4

#: Page tables, one a component.
Pages = Sequence[npt.ArrayLike]

#: A function that returns an engine's name and cards from a host and port. Raises KvmoverError.
Call = Callable[[str, int], Cards]


@dataclass(frozen=True, slots=True)
class Over:
    """A transfer that has ended. `result` is None if it never began, for `reason`."""

    request: str
    reason: str | None
    result: Result | None = None

    @property
    def is_quarantined(self) -> bool:
        """Returns True if its pages might still be accessed when it ended."""
        return self.result is not None and self.result.quarantined

    def incomplete(self, wanted: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Returns the indices into the page tables that are not whole: `wanted` if the transfer never began."""
        if self.reason is None:
            return tuple(() for _ in wanted)
        return self.result.incomplete if self.result and self.result.incomplete else tuple(map(tuple, wanted))


@dataclass(slots=True)
class RequestTransfers:
    """The transfers of one rank. Methods are for the engine worker's thread; only `settle` and `rejoin` wait.

    A send is over when it has ended and its pages are not read any more (`Transfer.quarantined`). A fetch is over when
    it has ended: pages of a failed one may be written until `returned` names it.
    """

    progress: Progress
    call: Call
    _sends: dict[str, Future[Transfer]] = field(default_factory=dict[str, "Future[Transfer]"])
    _fetches: dict[str, Future[Transfer]] = field(default_factory=dict[str, "Future[Transfer]"])
    _quarantined: dict[str, Transfer] = field(default_factory=dict[str, Transfer])
    _meetings: dict[str, Future[str]] = field(default_factory=dict[str, "Future[str]"])
    _lock: Lock = field(default_factory=Lock)
    _callers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_CALLERS, thread_name_prefix="kvmover-call")
    )

    def send(self, spec: SendSpec, pages: Pages, gates: Sequence[Gate] | None) -> None:
        """Offer a request, under the name by which the other engine asks for it."""
        tables = page_tables(pages)
        keep_s, service, content = spec.keep_s, spec.service, spec.content
        self._sends[spec.request] = self._started(
            lambda mover: mover.send(spec.transfer, tables, gates, deadline_s=keep_s, service=service, content=content)
        )

    def produced(self, request: str, gate: Gate, pages: Pages | None, contents: Sequence[Content] = ()) -> None:
        """Add an event to wait for, and pages behind those named before. Ignored if the transfer is over while its
        prefill goes on.
        """
        tables = None if pages is None else page_tables(pages)

        def produced(done: Future[Transfer]) -> None:
            if done.exception() is None:
                self.progress.tell(done.result(), lambda mover: mover.produced(done.result(), gate, tables, contents))

        if request in self._sends:
            self._sends[request].add_done_callback(produced)

    def attach(self, request: str, payload: bytes) -> None:
        """Attach a payload to a request that is sent, which goes beside its KV."""

        def attach(done: Future[Transfer]) -> None:
            if done.exception() is None:
                self.progress.tell(done.result(), lambda mover: mover.attach(done.result(), payload))

        if request in self._sends:
            self._sends[request].add_done_callback(attach)

    def receive(self, spec: ReceiveSpec, pages: Pages) -> None:
        """Fetch positions of a request into its pages, a table a component; `received` reports the outcome."""
        tables = page_tables(pages)
        self._fetch(spec.request, spec.remote, range(spec.start, spec.stop), tables, spec.content)

    def release(self, spec: ReleaseSpec, entries: Sequence[int]) -> None:
        """Ask for an empty range, which a source takes for served. The outcome is ignored.

        `entries` has the length of each component's page table for the whole request.
        """
        tables = [np.zeros(count, np.int64) for count in entries]
        self._fetch(
            f"{spec.remote.transfer} released", spec.remote, range(spec.tokens, spec.tokens), tables, spec.content
        )

    def refuse(self, transfer: str, reason: str) -> None:
        """Refuse a transfer to any engine that has asked or will ask for it, with a reason."""
        try:
            self.progress.submit(lambda mover: mover.refuse(transfer, reason))
        except TransportError as error:
            log.warning("%s was not refused: %s", transfer, error)

    def never_began(self, verb: Literal["send", "receive"]) -> None:
        """Count a request that failed before it was a transfer in the mover's meter; a closed mover counts no more."""
        with suppress(TransportError):
            self.progress.submit(lambda mover: mover.meter.never_began(verb))

    def abort(self, request: str, reason: str) -> None:
        """Abort all transfers of a request. Each is over when its pages are not accessed any more."""
        for begun in (self._sends.get(request), self._fetches.get(request)):
            if begun is not None:
                self._abort(begun, reason)

    def is_sending(self, request: str) -> bool:
        """Returns True if the request's pages may still be read."""
        return request in self._sends

    def sent(self) -> list[Over]:
        """Returns the sends that are over, each once."""
        return [over for over, _ in _taken(self._sends, lambda transfer: transfer.ended and not transfer.quarantined)]

    def received(self) -> list[Over]:
        """Returns the requests whose fetch has landed or failed, each once."""
        taken = _taken(self._fetches, lambda transfer: transfer.ended)
        self._quarantined |= {
            over.request: transfer for over, transfer in taken if transfer is not None and over.is_quarantined
        }
        return [over for over, _ in taken]

    def returned(self) -> list[str]:
        """Returns the requests, quarantined by `received`, whose pages are not written any more, each once."""
        free = [request for request, transfer in self._quarantined.items() if not transfer.quarantined]
        for request in free:
            del self._quarantined[request]
        return free

    def settle(self, requests: Sequence[str]) -> list[Over]:
        """Wait until these requests' pages are not read any more. They have been aborted, so it is short."""
        over: list[Over] = []
        for request in requests:
            begun = self._sends.get(request)
            if begun is not None and begun.exception() is None:
                self.progress.ended(begun.result()).result()
        over += self.sent()
        return over

    def rejoin(self, make: Callable[[], Transport], model: Model, reason: str) -> None:
        """End open transfers for `reason`, and meet engines anew, as `model`: see Progress.rejoin."""
        with self._lock:
            self._meetings.clear()
        self.progress.rejoin(make, model, reason)

    def close(self) -> None:
        """Cancel calls, and close the mover and its thread."""
        self._callers.shutdown(wait=False, cancel_futures=True)
        self.progress.close()

    def _fetch(self, request: str, remote: Remote, positions: range, tables: Pages, content: Content | None) -> None:
        """Ask an engine once it is met; one that restarted under its old name is met again, once."""
        fetch = self._fetches[request] = Future[Transfer]()
        meetings: list[Future[str]] = []

        def meet() -> None:
            meetings.append(self._meet(remote, meetings[-1] if meetings else None))
            meetings[-1].add_done_callback(ask)

        def ask(met: Future[str]) -> None:
            if (error := _error(met)) is not None:
                fetch.set_exception(error)
                return
            self._started(
                lambda mover: mover.receive(remote.transfer, met.result(), positions, tables, content=content)
            ).add_done_callback(answered)

        def answered(begun: Future[Transfer]) -> None:
            error = begun.exception()
            if isinstance(error, PeerUnknown) and len(meetings) == 1:
                meet()
            elif error is not None:
                fetch.set_exception(error)
            else:
                fetch.set_result(begun.result())

        meet()

    def _meet(self, remote: Remote, before: Future[str] | None) -> Future[str]:
        """Returns a future with the engine's name, done when its ranks are connected: one call, shared by all its
        requests.

        The engine is called anew if the last call failed, or led to an engine that is gone: `before`.
        """
        key = remote.engine or f"{remote.host}:{remote.port}"
        with self._lock:
            meeting = self._meetings.get(key)
            if meeting is None or meeting is before or (meeting.done() and _error(meeting) is not None):
                meeting = self._meetings[key] = self._called(remote)
            return meeting

    def _called(self, remote: Remote) -> Future[str]:
        try:
            return self._callers.submit(self._call, remote)
        except RuntimeError as error:  # `close` was called
            failed: Future[str] = Future()
            failed.set_exception(error)
            return failed

    def _call(self, remote: Remote) -> str:
        found = self.call(remote.host, remote.port)
        if remote.engine not in ("", found.engine):
            is_now, was = printable(found.engine, MOST_SAID), printable(remote.engine, MOST_SAID)
            raise KvmoverError(f"{printable(remote.host, MOST_SAID)}:{remote.port} is engine {is_now} now, not {was}")
        for card in found.cards:
            self.progress.submit(lambda mover, card=card: mover.connect(card)).result()
        return found.engine

    def _started(self, call: Callable[[Mover], Transfer]) -> Future[Transfer]:
        """Returns a future transfer, or its error, of a closed mover too."""
        try:
            return self.progress.begin(call)
        except TransportError as error:
            failed: Future[Transfer] = Future()
            failed.set_exception(error)
            return failed

    def _abort(self, begun: Future[Transfer], reason: str) -> None:
        def abort(done: Future[Transfer]) -> None:
            if done.exception() is None:
                self.progress.tell(done.result(), lambda mover: mover.abort(done.result(), reason))

        begun.add_done_callback(abort)


def _error(done: Future[str]) -> BaseException | None:
    """Returns the error of a call, also of one that `close` cancelled; None if it succeeded."""
    return TransportError("this side closed") if done.cancelled() else done.exception()


def _taken(
    begun: dict[str, Future[Transfer]], is_over: Callable[[Transfer], bool]
) -> list[tuple[Over, Transfer | None]]:
    """Remove and return the transfers that are over or never began."""
    taken: list[tuple[Over, Transfer | None]] = []
    for request, future in list(begun.items()):
        if not future.done():
            continue
        if (error := future.exception()) is not None:
            taken.append((Over(request, str(error)), None))
        elif is_over(transfer := future.result()):
            assert transfer.result is not None
            taken.append((Over(request, transfer.result.reason, transfer.result), transfer))
        else:
            continue
        del begun[request]
    return taken
