"""The observers of a process, started and closed together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvmover.cache.ledger import Account
from kvmover.config.settings import LogFormat, LoggingSettings, Settings
from kvmover.errors import KvmoverError, how_to_install
from kvmover.observe import logs
from kvmover.observe.endpoint import serve_metrics
from kvmover.observe.runlog import RunLog
from kvmover.transfer.result import Ending

if TYPE_CHECKING:
    from kvmover.transfer.mover import Mover
import time
from importlib import import_module

from kvmover import __version__

log = logging.getLogger(__name__)


class Spans:
    """An OpenTelemetry span for each transfer. Raises KvmoverError without its API.

    `parent(request)`: the context of the engine's own span of a request, or None.
    """

    def __init__(
        self, parent: Callable[[str], Any | None] = lambda request: None, clock: Callable[[], int] = time.time_ns
    ) -> None:
        try:
            self._api: Any = import_module("opentelemetry.trace")
        except ImportError:
            raise KvmoverError(f"spans need OpenTelemetry: {how_to_install('otel')}") from None
        self._tracer = self._api.get_tracer("kvmover", __version__)
        self._parent, self._clock = parent, clock

    def transfer(self, ending: Ending) -> None:
        """Record a span of the transfer. Pass it to `Mover.watch`."""
        result, now_ns = ending.result, self._clock()
        attributes: dict[str, str | int | bool | tuple[str, ...]] = {
            "kvmover.request": ending.request,
            "kvmover.engine": ending.engine,
            "kvmover.rank": ending.rank,
            "kvmover.bytes": result.nbytes,
            "kvmover.peers": result.peers,
            "kvmover.runs": result.runs,
            "kvmover.routes": tuple(str(route) for route in result.routes),
            "kvmover.resent": result.resent,
        }
        if result.cause is not None:
            attributes["error.type"] = str(result.cause)
        span = self._tracer.start_span(
            f"kvmover {ending.verb}",
            context=self._parent(ending.request),
            kind=self._api.SpanKind.PRODUCER if ending.verb == "send" else self._api.SpanKind.CONSUMER,
            attributes=attributes,
            start_time=now_ns - int(result.seconds * 1e9),
        )
        if result.reason is not None:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, result.reason))
        span.end(now_ns)


def begin_logs(settings: LoggingSettings, guest: logs.Guest | None) -> Callable[[], None]:
    """Send logs as configured, else to an engine's. Returns the call that ends that."""
    if settings.level is not None:
        formatter = logs.JsonFormatter() if settings.format is LogFormat.JSON else logs.text_formatter()
        logs.configure(settings.level, formatter, settings.file)
        return logs.release
    if guest is not None and logs.speak_through(guest):
        return logs.release
    return lambda: None


class Observers:
    """The logs, metrics endpoint, run log and spans of one rank. Close it after the movers.

    `guest`: the way into an engine's log.

    >>> with Observers(Settings(), "decode", 0) as observers:  # doctest: +SKIP
    ...     observers.watch(mover)
    ...     observers.serve(MoverCollector([mover]), LedgerCollector(ledger))
    ...     ledger = Ledger(sink=observers.account)
    """

    def __init__(self, settings: Settings, engine: str, rank: int, guest: logs.Guest | None = None) -> None:
        self._settings, self._rank = settings, rank
        self._open = ExitStack()
        self._watchers: list[Callable[[Ending], None]] = []
        self._run_log: RunLog | None = None
        try:
            self._begin(engine, rank, guest)
        except BaseException:
            self._open.close()
            raise

    def _begin(self, engine: str, rank: int, guest: logs.Guest | None) -> None:
        logging, record = self._settings.logging, self._settings.record
        self._open.callback(begin_logs(logging, guest))
        if logging.level is not None:
            self._watchers.append(logs.transfer)
        if record.run_log is not None:
            self._run_log = self._open.enter_context(RunLog(record.run_log, engine, rank))
            self._watchers.append(self._run_log.transfer)
        if record.spans:
            self._watchers.append(Spans().transfer)

    def watch(self, mover: Mover) -> None:
        """Watch a mover, before it goes to a Progress or in its thread."""
        for watcher in self._watchers:
            mover.watch(watcher)

    def account(self, account: Account) -> None:
        """Append an ended request to the run log."""
        if self._run_log is not None:
            self._run_log.account(account)

    def serve(self, *collectors: Any) -> int | None:
        """Serve collectors to Prometheus. Returns the port, or None if unset or (with a warning) not to be had.

        Rank r takes the configured port plus r; 0: any free one. Parts of one rank in a process share their port.
        Raises MissingLibrary without prometheus-client.
        """
        served = serve_metrics(self._settings.metrics, self._rank, *collectors)
        if served is None:
            return None
        self._open.callback(served.close)
        return served.port

    def close(self) -> None:
        """Close endpoint, run log and loggers. May be repeated."""
        self._open.close()

    def __enter__(self) -> Observers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
