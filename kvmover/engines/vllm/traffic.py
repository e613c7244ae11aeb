"""Traffic: the transfers of a rank by vLLM's request ids, driven by the mover's own thread, and how each ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import numpy.typing as npt

from kvmover.engines.vllm.orders import Receive, Release
from kvmover.engines.vllm.params import Remote
from kvmover.errors import KvmoverError, PeerUnknown, TransportError
from kvmover.transfer import Mover, Progress, Result, Transfer
from kvmover.transfer.result import Gate

log = logging.getLogger(__name__)

#: Engines that are called at the same time: one that does not answer keeps few others waiting.
_CALLERS = 4

#: Page tables, one a component.
Pages = Sequence[npt.ArrayLike]

#: The engine's name and the cards of all its ranks, from a host and port. Raises KvmoverError.
Call = Callable[[str, int], tuple[str, Sequence[bytes]]]


@dataclass(frozen=True, slots=True)
class Over:
    """A transfer that touches the pages no more. `result` is None where it never began, for `reason`."""

    request: str
    reason: str | None
    result: Result | None = None

    def incomplete(self, wanted: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Indices into the page tables that are not whole: `wanted` where nothing began."""
        if self.reason is None:
            return tuple(() for _ in wanted)
        return self.result.incomplete if self.result and self.result.incomplete else tuple(map(tuple, wanted))


@dataclass(slots=True)
class _Fetch:
    """A fetch from its order to its end. `reason`: why it was called off before it began."""

    begun: Future[Transfer] | None = None
    reason: str | None = None


@dataclass(slots=True)
class Traffic:
    """Methods are for the one thread of the engine's worker, and wait for nothing but `settle`.

    A transfer is over when it has ended and nothing holds its pages (`Transfer.held`).
    """

    progress: Progress
    call: Call
    _sends: dict[str, Future[Transfer]] = field(default_factory=dict[str, "Future[Transfer]"])
    _fetches: dict[str, _Fetch] = field(default_factory=dict[str, _Fetch])
    _known: set[str] = field(default_factory=set[str])
    _meetings: dict[str, Lock] = field(default_factory=dict[str, Lock])
    _callers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_CALLERS, thread_name_prefix="kvmover-call")
    )

    def send(self, request: str, transfer: str, pages: Pages, gates: Sequence[Gate] | None) -> None:
        """Offer a request, under the name by which the other engine asks for it."""
        tables = [np.asarray(table, np.int64) for table in pages]
        self._sends[request] = self._started(lambda mover: mover.send(transfer, tables, gates))

    def produced(self, request: str, gate: Gate) -> None:
        """One more event to wait for."""

        def produced(done: Future[Transfer]) -> None:
            if done.exception() is None:
                self.progress.tell(done.result(), lambda mover: mover.produced(done.result(), gate))

        self._sends[request].add_done_callback(produced)

    def receive(self, order: Receive, pages: Pages) -> None:
        tables = [np.asarray(table, np.int64) for table in pages]
        self._fetch(order.request, order.remote, range(order.start, order.stop), tables)

    def release(self, order: Release, components: int, page_tokens: int) -> None:
        """Ask for nothing, which a source takes for served. Nobody is told how that ends."""
        tables = [np.zeros(-(-order.tokens // page_tokens), np.int64)] * components
        self._fetch(f"{order.remote.transfer} released", order.remote, range(order.tokens, order.tokens), tables)

    def refuse(self, transfer: str, reason: str) -> None:
        """Whoever asks for it, or has asked, hears why; of a mover that is closed they hear that."""
        try:
            self.progress.submit(lambda mover: mover.refuse(transfer, reason))
        except TransportError as error:
            log.warning("%s was not refused: %s", transfer, error)

    def abort(self, request: str, reason: str) -> None:
        """Give up whatever there is of a request. It is over when nothing touches its pages."""
        fetch = self._fetches.get(request)
        if fetch is not None:
            fetch.reason = fetch.reason or reason
        for begun in (self._sends.get(request), fetch.begun if fetch else None):
            if begun is not None:
                self._abort(begun, reason)

    def is_sending(self, request: str) -> bool:
        """Whether the request's pages may still be read."""
        return request in self._sends

    def sent(self) -> list[Over]:
        """Requests of which nothing is read any more, each once."""
        return _over(self._sends)

    def received(self) -> list[Over]:
        """Requests of which nothing is written any more, each once."""
        begun = {request: fetch.begun for request, fetch in self._fetches.items() if fetch.begun is not None}
        over = _over(begun)
        for one in over:
            del self._fetches[one.request]
        return over

    def settle(self, requests: Sequence[str]) -> list[Over]:
        """Wait until nothing reads these requests' pages; they have been aborted, so it is not long."""
        over: list[Over] = []
        for request in requests:
            begun = self._sends.get(request)
            if begun is not None and begun.exception() is None:
                self.progress.ended(begun.result()).result()
        over += self.sent()
        return over

    def close(self) -> None:
        self._callers.shutdown(wait=False, cancel_futures=True)
        self.progress.close()

    def _fetch(self, request: str, remote: Remote, positions: range, tables: Pages) -> None:
        fetch = self._fetches[request] = _Fetch()

        def begin() -> Transfer:
            try:
                self._meet(remote)
                return self._begin(fetch, remote, positions, tables)
            except PeerUnknown:  # it was restarted under its old name
                self._known.discard(remote.engine)
                self._meet(remote)
                return self._begin(fetch, remote, positions, tables)

        fetch.begun = self._callers.submit(begin)

    def _begin(self, fetch: _Fetch, remote: Remote, positions: range, tables: Pages) -> Transfer:
        begun = self._started(lambda mover: mover.receive(remote.transfer, remote.engine, positions, tables))
        transfer = begun.result()
        if fetch.reason is not None:  # called off before it began: its source waits to hear of it
            self._abort(begun, fetch.reason)
        return transfer

    def _meet(self, remote: Remote) -> None:
        """Connect all ranks of an engine, once, whoever of the callers comes first."""
        with self._meetings.setdefault(remote.engine, Lock()):
            if remote.engine in self._known:
                return
            engine, cards = self.call(remote.host, remote.port)
            if engine != remote.engine:
                raise KvmoverError(f"{remote.host}:{remote.port} is engine {engine} now, not {remote.engine}")
            for card in cards:
                self._connect(card)
            self._known.add(remote.engine)

    def _connect(self, card: bytes) -> None:
        self.progress.submit(lambda mover: mover.connect(card)).result()

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


def _over(begun: dict[str, Future[Transfer]]) -> list[Over]:
    """Take out what is over."""
    over: list[Over] = []
    for request, future in list(begun.items()):
        if not future.done():
            continue
        error = future.exception()
        if error is not None:
            over.append(Over(request, str(error)))
        elif (transfer := future.result()).result is not None and not transfer.held:
            over.append(Over(request, transfer.result.reason, transfer.result))
        else:
            continue
        del begun[request]
    return over
