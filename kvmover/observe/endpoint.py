"""A MetricsEndpoint answers Prometheus at a port, and health checks at `/healthz`."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, ClassVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from kvmover.config.settings import MetricsSettings
from kvmover.errors import need

if TYPE_CHECKING:
    from types import TracebackType

log = logging.getLogger(__name__)


class _Quiet(WSGIRequestHandler):
    """A handler that logs no request."""

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: a scrape every 15 s is no news."""


class _Threaded(ThreadingMixIn, WSGIServer):
    """A server whose slow clients delay nobody. It needs no reverse look-up of its address, unlike HTTPServer."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Bind, and name the server by its address."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class MetricsEndpoint:
    """An HTTP server in a thread of its own: `/healthz` says 200 or 503, every other path has the metrics.

    Collectors may be added and removed while it serves. Close it, or use it as a context.
    """

    def __init__(self, address: str, port: int, is_well: Callable[[], bool] = lambda: True) -> None:
        """Listen at a port, 0: any free one. Raises MissingLibrary without prometheus-client, OSError for a port that
        cannot be had, OverflowError for one beyond 65535.
        """
        need("prometheus_client", "serving metrics", "metrics")
        import prometheus_client

        made_by: Any = prometheus_client
        self._registry, self._is_well = made_by.CollectorRegistry(), is_well
        self._metrics = made_by.make_wsgi_app(self._registry)
        if port > 65535:  # getaddrinfo takes it for another
            raise OverflowError(f"port {port}")
        found: Any = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = type("_Server", (_Threaded,), {"address_family": found[0]})
        self._server: WSGIServer = made(found[4], _Quiet)
        self._server.set_app(self._answer)
        self.port: int = self._server.server_port
        self._thread = Thread(target=self._server.serve_forever, name="kvmover-metrics", daemon=True)
        self._thread.start()

    def add(self, collector: Any) -> None:
        """Serve the families of a collector too."""
        self._registry.register(collector)

    def remove(self, collector: Any) -> None:
        """Serve a collector no longer."""
        self._registry.unregister(collector)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsEndpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/healthz":
            return self._metrics(environ, start)
        status, text = ("200 OK", b"ok\n") if self._is_well() else ("503 Service Unavailable", b"not well\n")
        start(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(text)))])
        return [text]


class ServedMetrics:
    """Collectors at one of this process's endpoints, until `close`."""

    #: By address, port and rank: the endpoint, and how many serve at it.
    _shared: ClassVar[dict[tuple[str, int, int], tuple[MetricsEndpoint, int]]] = {}
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, address: str, port: int, rank: int, collectors: Iterable[Any]) -> None:
        """Serve collectors at the rank's endpoint in this process, or a new one. Raises as MetricsEndpoint."""
        self._collectors = tuple(collectors)
        with self._lock:
            endpoint, users = self._shared.get((address, port, rank)) or (MetricsEndpoint(address, port), 0)
            self._endpoint, self._key = endpoint, (address, endpoint.port, rank)
            self._shared[self._key] = endpoint, users + 1
        for collector in self._collectors:
            endpoint.add(collector)

    @property
    def port(self) -> int:
        """Returns the port that Prometheus asks."""
        return self._endpoint.port

    def close(self) -> None:
        """Serve them no longer; the last one to close ends the endpoint."""
        for collector in self._collectors:
            self._endpoint.remove(collector)
        with self._lock:
            endpoint, users = self._shared[self._key]
            if users > 1:
                self._shared[self._key] = endpoint, users - 1
                return
            del self._shared[self._key]
        endpoint.close()


def serve_metrics(settings: MetricsSettings, rank: int, *collectors: Any) -> ServedMetrics | None:
    """Serve a rank's collectors as configured. Returns None without a port, or (with a warning) if it is not to be had.

    Rank r takes the configured port plus r; 0: any free one. Parts of one rank in a process, such as a mover and a page
    store, share its port. Raises MissingLibrary without prometheus-client.
    """
    if settings.port is None:
        return None
    port = settings.port + rank if settings.port else 0
    try:
        return ServedMetrics(settings.address, port, rank, collectors)
    except (OSError, OverflowError) as error:
        why = "a port is at most 65535" if isinstance(error, OverflowError) else error.strerror
        where = f"metrics.port = {settings.port} and rank {rank}"
        text = "no metrics are served at %s:%d (%s): %s; set another metrics.port (KVMOVER_METRICS_PORT), or 0 for any"
        log.warning(text, settings.address, port, where, why)
        return None
