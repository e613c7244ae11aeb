"""SharedMover: a mover for any thread. An engine that would rather poll from its own loop holds a Mover instead."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures
from types import TracebackType

import numpy.typing as npt

from kvmover.errors import DeadlineExceeded, KvmoverError
from kvmover.transfer.meter import Snapshot
from kvmover.transfer.mover import Mover
from kvmover.transfer.progress import Progress, driven
from kvmover.transfer.result import Gate, MoverConfig, Result, Transfer


class SharedMover:
    """The methods of Mover, where nobody has to poll. A call waits for the poll under way, at worst for its CPU copies.

    `produced`, `attach` and `abort` wait for nothing: an error of theirs fails the transfer. Every call raises
    TransportError once the mover is closed, but those three, `poll` and `close`, which then have nothing to do.

    Of a `Progress`, or of a Mover, which gets one of the default pace.
    """

    def __init__(self, progress: Progress | Mover) -> None:
        self._progress = driven(progress)

    @property
    def card(self) -> bytes:
        return self._progress.card

    def connect(self, card: bytes) -> str:
        return self._progress.submit(lambda mover: mover.connect(card)).result()

    def configure(self, config: MoverConfig) -> None:
        self._progress.submit(lambda mover: mover.configure(config)).result()

    def send(
        self,
        request: str,
        pages: Sequence[npt.ArrayLike],
        gates: Sequence[Gate] | None = None,
        aux: bytes | None = None,
    ) -> Transfer:
        return self._progress.begin(lambda mover: mover.send(request, pages, gates, aux)).result()

    def receive(
        self,
        request: str,
        engine: str,
        positions: range,
        pages: Sequence[npt.ArrayLike],
        aux_from: Sequence[int] = (),
    ) -> Transfer:
        return self._progress.begin(lambda mover: mover.receive(request, engine, positions, pages, aux_from)).result()

    def refuse(self, request: str, reason: str) -> None:
        self._progress.submit(lambda mover: mover.refuse(request, reason)).result()

    def reopen(self, request: str) -> None:
        self._progress.submit(lambda mover: mover.reopen(request)).result()

    def produced(self, transfer: Transfer, gate: Gate) -> None:
        self._progress.tell(transfer, lambda mover: mover.produced(transfer, gate))

    def attach(self, transfer: Transfer, payload: bytes) -> None:
        self._progress.tell(transfer, lambda mover: mover.attach(transfer, payload))

    def abort(self, transfer: Transfer, reason: str) -> None:
        self._progress.tell(transfer, lambda mover: mover.abort(transfer, reason))

    def poll(self) -> None:
        self._progress.poll()

    def ended(self, transfer: Transfer) -> futures.Future[Result]:
        """The result to come; see Progress. `ended(t).add_done_callback(call)` has the progress thread call back."""
        return self._progress.ended(transfer)

    def wait(self, transfers: Sequence[Transfer], timeout_s: float | None = None) -> None:
        """Sleep until all have ended. Raises DeadlineExceeded, naming the others, after `timeout_s`.

        None is not for ever: each transfer has a deadline of its own.
        """
        if self._progress.inside:
            raise KvmoverError("a callback of the progress thread would wait for itself")
        ends = {self.ended(transfer): transfer.request for transfer in transfers}
        late = futures.wait(ends, timeout_s).not_done
        if late:
            raise DeadlineExceeded(f"not ended within {timeout_s} s: {', '.join(sorted(ends[end] for end in late))}")

    def snapshot(self) -> Snapshot:
        """Counts, times and gauges; after `close` the last ones."""
        return self._progress.snapshot()

    def close(self) -> None:
        self._progress.close()

    def __enter__(self) -> SharedMover:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
