"""RequestTransfers has a rank's transfers by vLLM's request ids: how each ended, and whose pages may be written."""

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
from kvmover.engines.vllm.handshake import Remote
from kvmover.errors import KvmoverError, PeerUnknown, TransportError
from kvmover.transfer import Model, Mover, Progress, Result, Transfer
from kvmover.transfer.arguments import page_tables
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.result import Gate
from kvmover.transport import Transport

log = logging.getLogger(__name__)

#: Engines that are called at the same time. Those that were met before wait for no call.
_CALLERS = 4

#: Page tables, one a component.
Pages = Sequence[npt.ArrayLike]

#: The engine's name and the cards of all its ranks, from a host and port. Raises KvmoverError.
Call = Callable[[str, int], Cards]


@dataclass(frozen=True, slots=True)
class Over:
    """A transfer that has ended. `result` is None where it never began, for `reason`."""

    request: str
    reason: str | None
    result: Result | None = None

    @property
    def is_held(self) -> bool:
        """Whether its pages might still be touched when it ended."""
        return self.result is not None and self.result.held

    def incomplete(self, wanted: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Indices into the page tables that are not whole: `wanted` where nothing began."""
        if self.reason is None:
            return tuple(() for _ in wanted)
        return self.result.incomplete if self.result and self.result.incomplete else tuple(map(tuple, wanted))


@dataclass(slots=True)
class RequestTransfers:
    """Methods are for the one thread of the engine's worker, and wait for nothing but `settle`.

    A send is over when it has ended and nothing reads its pages any more (`Transfer.held`). A fetch is over when it has
    ended: until `returned` names it, pages of one that failed may still be written.
    """

    progress: Progress
    call: Call
    _sends: dict[str, Future[Transfer]] = field(default_factory=dict[str, "Future[Transfer]"])
    _fetches: dict[str, Future[Transfer]] = field(default_factory=dict[str, "Future[Transfer]"])
    _held: dict[str, Transfer] = field(default_factory=dict[str, Transfer])
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
        """One more event to wait for, and pages that come behind those named before. Nothing of a request whose
        transfer is over while its prefill goes on."""
        tables = None if pages is None else page_tables(pages)

        def produced(done: Future[Transfer]) -> None:
            if done.exception() is None:
                self.progress.tell(done.result(), lambda mover: mover.produced(done.result(), gate, tables, contents))

        if request in self._sends:
            self._sends[request].add_done_callback(produced)

    def attach(self, request: str, payload: bytes) -> None:
        """What goes beside the KV of a request that is sent, to whoever asks for it."""

        def attach(done: Future[Transfer]) -> None:
            if done.exception() is None:
                self.progress.tell(done.result(), lambda mover: mover.attach(done.result(), payload))

        if request in self._sends:
            self._sends[request].add_done_callback(attach)

    def receive(self, spec: ReceiveSpec, pages: Pages) -> None:
        """Fetch positions of a request into its pages, a table a component; `received` tells how it ended."""
        tables = page_tables(pages)
        self._fetch(spec.request, spec.remote, range(spec.start, spec.stop), tables, spec.content)

    def release(self, spec: ReleaseSpec, entries: Sequence[int]) -> None:
        """Ask for nothing, which a source takes for served. Nobody is told how that ends.

        `entries`: of each component's page table for all of the request.
        """
        tables = [np.zeros(count, np.int64) for count in entries]
        self._fetch(
            f"{spec.remote.transfer} released", spec.remote, range(spec.tokens, spec.tokens), tables, spec.content
        )

    def refuse(self, transfer: str, reason: str) -> None:
        """Whoever asks for it, or has asked, hears why; of a mover that is closed they hear that."""
        try:
            self.progress.submit(lambda mover: mover.refuse(transfer, reason))
        except TransportError as error:
            log.warning("%s was not refused: %s", transfer, error)

    def never_began(self, verb: Literal["send", "receive"]) -> None:
        """Count a request that failed before it was a transfer among the mover's; of one that is closed nobody asks."""
        with suppress(TransportError):
            self.progress.submit(lambda mover: mover.meter.never_began(verb))

    def abort(self, request: str, reason: str) -> None:
        """Give up whatever there is of a request. It is over when nothing touches its pages."""
        for begun in (self._sends.get(request), self._fetches.get(request)):
            if begun is not None:
                self._abort(begun, reason)

    def is_sending(self, request: str) -> bool:
        """Whether the request's pages may still be read."""
        return request in self._sends

    def sent(self) -> list[Over]:
        """Requests of which nothing is read any more, each once."""
        return [over for over, _ in _taken(self._sends, lambda transfer: transfer.ended and not transfer.held)]

    def received(self) -> list[Over]:
        """Requests whose fetch has landed or failed, each once."""
        taken = _taken(self._fetches, lambda transfer: transfer.ended)
        self._held |= {over.request: transfer for over, transfer in taken if transfer is not None and over.is_held}
        return [over for over, _ in taken]

    def returned(self) -> list[str]:
        """Requests that `received` told of as held and of which nothing is written any more, each once."""
        free = [request for request, transfer in self._held.items() if not transfer.held]
        for request in free:
            del self._held[request]
        return free

    def settle(self, requests: Sequence[str]) -> list[Over]:
        """Wait until nothing reads these requests' pages; they have been aborted, so it is not long."""
        over: list[Over] = []
        for request in requests:
            begun = self._sends.get(request)
            if begun is not None and begun.exception() is None:
                self.progress.ended(begun.result()).result()
        over += self.sent()
        return over

    def rejoin(self, make: Callable[[], Transport], model: Model, reason: str) -> None:
        """End what is open for `reason`, and meet others anew, as `model`: see Progress.rejoin."""
        with self._lock:
            self._meetings.clear()
        self.progress.rejoin(make, model, reason)

    def close(self) -> None:
        """Call nobody any more, and close the mover and its thread."""
        self._callers.shutdown(wait=False, cancel_futures=True)
        self.progress.close()

    def _fetch(self, request: str, remote: Remote, positions: range, tables: Pages, content: Content | None) -> None:
        """Ask an engine as soon as it is met; one that was restarted under its old name is met again, once."""
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
        """The engine's ranks are connected when this is done, with its name: by one call, which all its requests share.

        It is called anew when the last call failed, or led to who is there no more: `before`.
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
            raise KvmoverError(f"{remote.host}:{remote.port} is engine {found.engine} now, not {remote.engine}")
        for card in found.cards:
            self.progress.submit(lambda mover, card=card: mover.connect(card)).result()
        return found.engine

    def _started(self, call: Callable[[Mover], Transfer]) -> Future[Transfer]:
        """A transfer to come, or why it does not, a mover that is closed included."""
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
    """What a call ended with; one that `close` took back, with that."""
    return TransportError("this side closed") if done.cancelled() else done.exception()


def _taken(
    begun: dict[str, Future[Transfer]], is_over: Callable[[Transfer], bool]
) -> list[tuple[Over, Transfer | None]]:
    """Take out what is over, and what never began."""
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
