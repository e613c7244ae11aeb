"""SharedMover serves any thread, AsyncMover asyncio tasks; an engine that polls in its own loop holds a Mover."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from types import TracebackType
from typing import TYPE_CHECKING

import numpy.typing as npt

from kvmover.errors import DeadlineExceeded, KvmoverError
from kvmover.plan.calibration import Calibration
from kvmover.transfer.arguments import (
    ReceiveArguments,
    SendArguments,
    contents_of,
    gate_of,
    page_tables,
    payload_of,
    transfer_of,
)
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.meter import Snapshot
from kvmover.transfer.mover import Mover
from kvmover.transfer.peers.processes import PeerProcess
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.result import Ending, Gate, Result, Service, Transfer
from kvmover.transfer.threads.progress import Progress, driven
from kvmover.transport.base import Transport

if TYPE_CHECKING:
    import torch
import asyncio
import contextlib
from collections.abc import Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kvmover.transfer.arguments import (
    card_of,
)

if TYPE_CHECKING:
    import torch


class SharedMover:
    """The methods of Mover without the need to poll. A call waits for the poll under way, at worst for its CPU copies.

    Arguments are read and copied in the calling thread: the caller's lists are its own again when a call returns, and
    unreadable arguments are refused there. `produced`, `allocated`, `attach` and `abort` wait for no poll: pages and
    payloads that do not fit their transfer fail it. Once the mover is closed, every call raises TransportError but
    these four, `poll` and `close`, which then do no work.

    Made of a `Progress`, or of a Mover, which gets a Progress of the default pace.
    """

    def __init__(self, progress: Progress | Mover) -> None:
        self._progress = driven(progress)

    @property
    def card(self) -> bytes:
        """The bytes that a peer needs to connect; see Mover.card."""
        return self._progress.card

    @property
    def config(self) -> MoverConfig:
        """The configuration that new requests get; see Mover.config."""
        return self._progress.config

    @property
    def device(self) -> torch.device:
        """The device of the pools."""
        return self._progress.device

    def connect(self, card: bytes) -> str:
        """Connect the peer behind `card` and return its transport name. Raises PeerRefused."""
        return self._progress.submit(lambda mover: mover.connect(card)).result()

    def disconnect(self, engine: str, rank: int | None = None) -> None:
        """Part from one rank of `engine`, or from all (None); see Mover.disconnect."""
        self._progress.submit(lambda mover: mover.disconnect(engine, rank)).result()

    def ranks(self, engine: str) -> frozenset[int]:
        """Returns the ranks of an engine that are connected now; see Mover.ranks."""
        return self._progress.submit(lambda mover: mover.ranks(engine)).result()

    def processes(self, engine: str) -> tuple[PeerProcess, ...]:
        """Returns the processes of an engine that are connected now, by rank; see Mover.processes."""
        return self._progress.submit(lambda mover: mover.processes(engine)).result()

    def watch(self, call: Callable[[Ending], None]) -> None:
        """See Mover.watch: `call` is told in the progress thread, and may make any call that waits for no transfer."""
        self._progress.submit(lambda mover: mover.watch(call)).result()

    def calibrations(self) -> Sequence[Calibration]:
        """Returns the measured speeds of the path to each host; see Mover.calibrations."""
        return self._progress.submit(Mover.calibrations).result()

    def configure(self, config: MoverConfig) -> None:
        """Behave by `config` from the next request on; see Mover.configure. Raises LayoutError."""
        self._progress.submit(lambda mover: mover.configure(config)).result()

    def send(
        self,
        request: str,
        pages: Sequence[npt.ArrayLike],
        gates: Sequence[Gate] | None = None,
        aux: bytes | None = None,
        deadline_s: float | None = None,
        service: Service = Service.ONCE,
        content: Content | None = None,
    ) -> Transfer:
        """See Mover.send: offer a request whose KV is in `pages`, one page table [page] of integers a component.

        Returns once the offer is made. The pages belong to the transfer until it has ended and is not quarantined.
        Raises PlanError for page tables that do not fit.
        """
        given = SendArguments.of(request, pages, gates, aux, deadline_s, service, content)
        return self._progress.begin(lambda mover: mover.send(*given)).result()

    def receive(
        self,
        request: str,
        engine: str,
        positions: range,
        pages: Sequence[npt.ArrayLike] | None,
        aux_from: Sequence[int] = (),
        deadline_s: float | None = None,
        content: Content | None = None,
    ) -> Transfer:
        """See Mover.receive: ask `engine` for tokens `positions` of a request and land them in `pages`.

        Returns once the sources are asked; `wait` or `ended` say when it is over. Raises PlanError and PeerUnknown
        before anything is asked.
        """
        given = ReceiveArguments.of(request, engine, positions, pages, aux_from, deadline_s, content)
        return self._progress.begin(lambda mover: mover.receive(*given)).result()

    def refuse(self, request: str, reason: str) -> None:
        """Tell each rank that asks for `request`, now or later, `reason`; see Mover.refuse."""
        self._progress.submit(lambda mover: mover.refuse(request, reason)).result()

    def reopen(self, request: str) -> None:
        """Let destinations that ask for `request` wait: it will be sent again after it ended or was refused. Raises
        TransportError once closed.
        """
        self._progress.submit(lambda mover: mover.reopen(request)).result()

    def waiting(self, request: str) -> list[tuple[Place, range, Content | None]]:
        """Returns ranks that have asked for a request before it is sent, positions and prompt; see Mover.waiting."""
        return self._progress.submit(lambda mover: mover.waiting(request)).result()

    def forget(self, engine: str, rank: int) -> None:
        """Take the process of a rank for dead; see Mover.forget."""
        self._progress.submit(lambda mover: mover.forget(engine, rank)).result()

    def produced(
        self,
        transfer: Transfer,
        gate: Gate,
        pages: Sequence[npt.ArrayLike] | None = None,
        contents: Sequence[Content] = (),
    ) -> None:
        """See Mover.produced. Returns at once, also in a signal handler or a callback."""
        given = (
            transfer_of(transfer),
            gate_of(gate),
            None if pages is None else page_tables(pages),
            contents_of(contents),
        )
        self._progress.tell(transfer, lambda mover: mover.produced(*given))

    def allocated(self, transfer: Transfer, pages: Sequence[npt.ArrayLike]) -> None:
        """See Mover.allocated. Returns at once, also in a signal handler or a callback."""
        given = transfer_of(transfer), page_tables(pages)
        self._progress.tell(transfer, lambda mover: mover.allocated(*given))

    def attach(self, transfer: Transfer, payload: bytes) -> None:
        """See Mover.attach, at most 64 KiB. Returns at once."""
        given = transfer_of(transfer), payload_of(payload)
        self._progress.tell(transfer, lambda mover: mover.attach(*given))

    def abort(self, transfer: Transfer, reason: str) -> None:
        """See Mover.abort. Returns at once; the transfer ends when no operation can touch its pages."""
        self._progress.tell(transfer_of(transfer), lambda mover: mover.abort(transfer, reason))

    def poll(self) -> None:
        """Have the thread poll now: something happened that it cannot see, for example the event of a gate."""
        self._progress.poll()

    def ended(self, transfer: Transfer) -> futures.Future[Result]:
        """Returns a future of the Result, also of a failed transfer. Its callbacks run in the progress thread, or at
        once if the transfer has ended. Raises PlanError for a transfer of another mover.
        """
        return self._progress.ended(transfer)

    def wait(self, transfers: Sequence[Transfer], timeout_s: float | None = None) -> None:
        """Sleep until all transfers have ended. Raises DeadlineExceeded, naming the open ones, after `timeout_s`.

        None is not for ever: each transfer has a deadline of its own. Raises KvmoverError in a callback.
        """
        if self._progress.inside:
            raise KvmoverError("a callback of the progress thread would wait for itself")
        ends = {self.ended(transfer): transfer.request for transfer in transfers}
        late = futures.wait(ends, timeout_s).not_done
        if late:
            raise DeadlineExceeded(f"not ended within {timeout_s} s: {', '.join(sorted(ends[end] for end in late))}")

    def snapshot(self) -> Snapshot:
        """Returns counts, times and gauges; after `close` the last ones."""
        return self._progress.snapshot()

    def rejoin(self, make: Callable[[], Transport], model: Model, reason: str) -> None:
        """See Mover.rejoin, once open transfers have ended: see Progress.rejoin."""
        self._progress.rejoin(make, model, reason)

    def close(self) -> None:
        """Fail open transfers, end the thread and close the mover. Safe to call twice."""
        self._progress.close()

    def __enter__(self) -> SharedMover:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class AsyncTransfer:
    """A requested transfer. `await` it, in one task or in several, for its Result.

    Arguments that could be read but do not fit raise there. A cancelled task aborts the transfer, for all tasks that
    wait, and ends after the transfer: then `transfer` says whether it landed after all, and whether pages are
    quarantined. A task cancelled before its first step has not awaited the transfer, which goes on.
    """

    def __init__(self, progress: Progress, begun: Future[Transfer]) -> None:
        self._progress = progress
        self._begun = begun
        self._ended: Future[Result] = Future()
        self._ended.set_running_or_notify_cancel()
        begun.add_done_callback(self._follow)

    def _follow(self, begun: Future[Transfer]) -> None:
        if (error := begun.exception()) is not None:
            self._ended.set_exception(error)
        else:
            self._progress.ended(begun.result()).add_done_callback(lambda ended: self._ended.set_result(ended.result()))

    @property
    def transfer(self) -> Transfer | None:
        """The transfer once it has begun, which it has if it ended; None before, and if it could not begin."""
        return self._begun.result() if self._begun.done() and self._begun.exception() is None else None

    def produced(
        self, gate: Gate, pages: Sequence[npt.ArrayLike] | None = None, contents: Sequence[Content] = ()
    ) -> None:
        """See Mover.produced; it takes effect once the transfer has begun. Returns at once."""
        given = gate_of(gate), None if pages is None else page_tables(pages), contents_of(contents)
        self._tell(lambda mover, transfer: mover.produced(transfer, *given))

    def allocated(self, pages: Sequence[npt.ArrayLike]) -> None:
        """See Mover.allocated; it takes effect once the transfer has begun. Returns at once."""
        tables = page_tables(pages)
        self._tell(lambda mover, transfer: mover.allocated(transfer, tables))

    def attach(self, payload: bytes) -> None:
        """See Mover.attach, at most 64 KiB. Returns at once."""
        aux = payload_of(payload)
        self._tell(lambda mover, transfer: mover.attach(transfer, aux))

    def abort(self, reason: str) -> None:
        """See Mover.abort. Returns at once; await the transfer for its end."""
        self._tell(lambda mover, transfer: mover.abort(transfer, reason))

    def _tell(self, call: Callable[[Mover, Transfer], None]) -> None:
        """Make a call about the transfer once it has begun; if it could not begin, its `await` raises."""

        def then(begun: Future[Transfer]) -> None:
            if begun.exception() is None:
                transfer = begun.result()
                self._progress.tell(transfer, lambda mover: call(mover, transfer))

        self._begun.add_done_callback(then)

    def __await__(self) -> Generator[object, None, Result]:
        return self._wait().__await__()

    async def _wait(self) -> Result:
        try:
            return await asyncio.wrap_future(self._ended)
        except asyncio.CancelledError:
            self.abort("the task that waited was cancelled")
            while not self._ended.done():  # a further cancel waits too: until then the pages are not the engine's
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wrap_future(self._ended)
            raise


class AsyncMover:
    """The methods of Mover for asyncio tasks. Event loops are not blocked; `send` and `receive` return at once.

    `result = await mover.receive("r1", "prefill", range(4096), [pages])`. One serves all event loops of the process.
    Arguments of these, and of an AsyncTransfer, are read and copied in the call, which refuses unreadable ones; the
    caller's lists are its own again.

    `progress`: a Progress, or a Mover, which gets one of the default pace; `close` is its end too.
    """

    def __init__(self, progress: Progress | Mover) -> None:
        self._progress = driven(progress)

    @property
    def card(self) -> bytes:
        """The bytes that a peer needs to connect; see Mover.card."""
        return self._progress.card

    @property
    def config(self) -> MoverConfig:
        """The configuration that new requests get; see Mover.config."""
        return self._progress.config

    @property
    def device(self) -> torch.device:
        """The device of the pools."""
        return self._progress.device

    def send(
        self,
        request: str,
        pages: Sequence[npt.ArrayLike],
        gates: Sequence[Gate] | None = None,
        aux: bytes | None = None,
        deadline_s: float | None = None,
        service: Service = Service.ONCE,
        content: Content | None = None,
    ) -> AsyncTransfer:
        """See Mover.send: offer a request whose KV is in `pages`, one page table [page] of integers a component.

        Returns at once, before the offer is made: `await` gives the Result, and raises for arguments that do not fit.
        The pages belong to the transfer until it has ended and is not quarantined.
        """
        given = SendArguments.of(request, pages, gates, aux, deadline_s, service, content)
        return AsyncTransfer(self._progress, self._progress.begin(lambda mover: mover.send(*given)))

    def receive(
        self,
        request: str,
        engine: str,
        positions: range,
        pages: Sequence[npt.ArrayLike] | None,
        aux_from: Sequence[int] = (),
        deadline_s: float | None = None,
        content: Content | None = None,
    ) -> AsyncTransfer:
        """See Mover.receive: ask `engine` for tokens `positions` of a request and land them in `pages`.

        Returns at once: `await` gives the Result, and raises PeerUnknown, and PlanError for arguments that do not fit.
        A cancelled task aborts the transfer.
        """
        given = ReceiveArguments.of(request, engine, positions, pages, aux_from, deadline_s, content)
        return AsyncTransfer(self._progress, self._progress.begin(lambda mover: mover.receive(*given)))

    async def connect(self, card: bytes) -> str:
        """Connect the peer behind `card` and return its transport name. Raises PeerRefused."""
        known = card_of(card)
        return await asyncio.wrap_future(self._progress.submit(lambda mover: mover.connect(known)))

    async def disconnect(self, engine: str, rank: int | None = None) -> None:
        """Part from one rank of `engine`, or from all (None); see Mover.disconnect."""
        await asyncio.wrap_future(self._progress.submit(lambda mover: mover.disconnect(engine, rank)))

    async def ranks(self, engine: str) -> frozenset[int]:
        """Returns the ranks of an engine that are connected now; see Mover.ranks."""
        return await asyncio.wrap_future(self._progress.submit(lambda mover: mover.ranks(engine)))

    async def processes(self, engine: str) -> tuple[PeerProcess, ...]:
        """Returns the processes of an engine that are connected now, by rank; see Mover.processes."""
        return await asyncio.wrap_future(self._progress.submit(lambda mover: mover.processes(engine)))

    async def watch(self, call: Callable[[Ending], None]) -> None:
        """See Mover.watch: `call` is told in the progress thread, in no event loop."""
        await asyncio.wrap_future(self._progress.submit(lambda mover: mover.watch(call)))

    async def calibrations(self) -> Sequence[Calibration]:
        """Returns the measured speeds of the path to each host; see Mover.calibrations."""
        return await asyncio.wrap_future(self._progress.submit(Mover.calibrations))

    async def configure(self, config: MoverConfig) -> None:
        """Behave by `config` from the next request on; see Mover.configure. Raises LayoutError."""
        await asyncio.wrap_future(self._progress.submit(lambda mover: mover.configure(config)))

    async def refuse(self, request: str, reason: str) -> None:
        """Tell each rank that asks for `request`, now or later, `reason`; see Mover.refuse."""
        await asyncio.wrap_future(self._progress.submit(lambda mover: mover.refuse(request, reason)))

    async def reopen(self, request: str) -> None:
        """Let a request of this name be sent again; see Mover.reopen."""
        await asyncio.wrap_future(self._progress.submit(lambda mover: mover.reopen(request)))

    async def waiting(self, request: str) -> list[tuple[Place, range, Content | None]]:
        """Returns ranks that have asked for a request before it is sent, positions and prompt; see Mover.waiting."""
        return await asyncio.wrap_future(self._progress.submit(lambda mover: mover.waiting(request)))

    async def forget(self, engine: str, rank: int) -> None:
        """Take the process of a rank for dead; see Mover.forget."""
        await asyncio.wrap_future(self._progress.submit(lambda mover: mover.forget(engine, rank)))

    def poll(self) -> None:
        """Have the thread poll now: something happened that it cannot see, for example the event of a gate."""
        self._progress.poll()

    def snapshot(self) -> Snapshot:
        """Returns counts, times and gauges, after `close` the last ones. For any thread but a loop's."""
        return self._progress.snapshot()

    async def rejoin(self, make: Callable[[], Transport], model: Model, reason: str) -> None:
        """See Mover.rejoin, once open transfers have ended: see Progress.rejoin.

        Waits in a thread of its own, not in the event loop.
        """
        await asyncio.to_thread(self._progress.rejoin, make, model, reason)

    async def close(self) -> None:
        """Fail open transfers, end the thread and close the mover.

        Waits in a thread of its own, not in the event loop.
        """
        await asyncio.to_thread(self._progress.close)

    async def __aenter__(self) -> AsyncMover:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()
