"""Each transfer becomes an OpenTelemetry span where the engine has OpenTelemetry (extra `otel`) and a provider.

Where spans go is OpenTelemetry's own to say, by the engine or by OTEL_* variables; without a provider they cost nothing
and go nowhere. A span is made when its transfer has ended, with the times that it had.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvmover import __version__
from kvmover.errors import KvmoverError
from kvmover.transfer.result import Ending


class Spans:
    """For `Mover.watch(Spans().transfer)`. Raises KvmoverError without OpenTelemetry's API.

    `parent(request)`: the context that the engine's own span of a request is in, if there is one.
    """

    def __init__(
        self, parent: Callable[[str], Any | None] = lambda request: None, clock: Callable[[], int] = time.time_ns
    ) -> None:
        try:
            self._api: Any = import_module("opentelemetry.trace")
        except ImportError:
            raise KvmoverError("spans need OpenTelemetry: pip install 'kvmover[otel]'") from None
        self._tracer = self._api.get_tracer("kvmover", __version__)
        self._parent, self._clock = parent, clock

    def transfer(self, ending: Ending) -> None:
        """For `Mover.watch`: record a span from the transfer's start to its end."""
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
