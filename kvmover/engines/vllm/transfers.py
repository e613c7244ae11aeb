"""RequestTransfers holds a rank's transfers by vLLM's request ids, their outcomes, and the pages still being
written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvmover.engines.common import Call, Meetings, Remote, begun_or_failed
from kvmover.engines.vllm.connector_metadata import ReceiveSpec, ReleaseSpec, SendSpec
from kvmover.errors import TransportError
from kvmover.transfer import Model, Progress, Result, Transfer
from kvmover.transfer.arguments import page_tables
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.result import Gate
from kvmover.transport import Transport

log = logging.getLogger(__name__)

#: Page tables, one a component.
Pages = Sequence[npt.ArrayLike]


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
    _meetings: Meetings = field(init=False)

    def __post_init__(self) -> None:
        self._meetings = Meetings(self.progress, self.call)

    def send(self, spec: SendSpec, pages: Pages, gates: Sequence[Gate] | None) -> None:
        """Offer a request, under the name by which the other engine asks for it."""
        tables = page_tables(pages)
        keep_s, service, content = spec.keep_s, spec.service, spec.content
        self._sends[spec.request] = begun_or_failed(
            self.progress,
            lambda mover: mover.send(spec.transfer, tables, gates, deadline_s=keep_s, service=service, content=content),
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
        self._meetings.forget()
        self.progress.rejoin(make, model, reason)

    def close(self) -> None:
        """Cancel calls, and close the mover and its thread."""
        self._meetings.close()
        self.progress.close()

    def _fetch(self, request: str, remote: Remote, positions: range, tables: Pages, content: Content | None) -> None:
        """Ask an engine once it is met."""
        self._fetches[request] = self._meetings.begin(
            remote,
            lambda mover, engine: mover.receive(remote.transfer, engine, positions, tables, content=content),
        )

    def _abort(self, begun: Future[Transfer], reason: str) -> None:
        def abort(done: Future[Transfer]) -> None:
            if done.exception() is None:
                self.progress.tell(done.result(), lambda mover: mover.abort(done.result(), reason))

        begun.add_done_callback(abort)


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
