"""How the two halves of a request find each other: by `kv_transfer_params`, and by cards that a scheduler serves.

The words are those of vLLM's own connectors and proxies. A card is how one rank is reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Annotated, Any

import msgspec

from kvmover.errors import TransportError

#: A whole engine's cards: some hundred ranks of some ten kilobytes.
MAX_BYTES = 64 << 20
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Remote:
    """Where a request's KV is: the engine that computes or computed it, its name there, and where to find the engine.

    `host` and `port` answer with the engine's cards.
    """

    engine: str
    transfer: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Serve:
    """The request is to be computed here for another engine, which asks for it as `transfer`."""

    transfer: str


_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class _Params(msgspec.Struct, frozen=True):
    """What is read of `kv_transfer_params`, which clients write: values in any spelling of their types.

    A router may have made a port of 5600 into "5600" or 5600.0.
    """

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    transfer_id: _Name | None = None
    remote_engine_id: _Name | None = None
    remote_request_id: _Name | None = None
    remote_host: Annotated[str, msgspec.Meta(min_length=1, max_length=253)] | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)] | None = None


def asked(params: Mapping[str, Any] | None, request: str) -> Serve | Remote | None:
    """What a request's parameters ask of this engine. None for a request that concerns nobody else.

    A proxy that starts both halves at once gives both the same `transfer_id`; otherwise a prefill's is its request id
    here, and comes back to the proxy in the answer. Raises ValueError for parameters that lack something or make no
    sense, and names them.
    """
    if not params:
        return None
    try:
        said = msgspec.convert(params, _Params, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_transfer_params of {request}: {error}") from None
    if said.do_remote_decode:
        return Serve(said.transfer_id or request)
    if not said.do_remote_prefill:
        return None
    transfer = said.remote_request_id or said.transfer_id
    if said.remote_engine_id and said.remote_host and said.remote_port and transfer:
        return Remote(said.remote_engine_id, transfer, said.remote_host, said.remote_port)
    missing = [key for key in ("remote_engine_id", "remote_host", "remote_port") if getattr(said, key) is None]
    missing += [] if transfer else ["remote_request_id"]
    raise ValueError(f"kv_transfer_params of {request} have no {', '.join(missing)}")


def answer(served: Remote) -> dict[str, Any]:
    """The parameters of the other half, for a proxy to hand on."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": served.engine,
        "remote_request_id": served.transfer,
        "remote_host": served.host,
        "remote_port": served.port,
    }


class Cards(msgspec.Struct, frozen=True):
    """An engine by name, and the cards of all its ranks in order."""

    engine: str
    cards: tuple[bytes, ...]


_decode = msgspec.msgpack.Decoder(Cards).decode


class HandshakeServer:
    """Answers every GET with the cards, until it is closed. Whoever can reach the port can read them."""

    def __init__(self, host: str, port: int) -> None:
        """Raises OSError for a port that is taken. Port 0: one that is free, see `port`."""
        self._body = b""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = server._body
                self.send_response(200 if body else 503)
                self.send_header("Content-Type", "application/msgpack")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """vLLM's log is not for every caller."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True, name="kvmover-cards")
        self._thread.start()

    def lay_out(self, engine: str, cards: Sequence[bytes]) -> None:
        """Serve these from now on."""
        self._body = msgspec.msgpack.encode(Cards(engine, tuple(cards)))

    def close(self) -> None:
        """Free the port and end the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def call(host: str, port: int) -> tuple[str, Sequence[bytes]]:
    """The engine behind a handshake server, and its cards. Raises TransportError that names the address."""
    where = f"no cards from {host}:{port}"
    connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/")
        answer = connection.getresponse()
        body = answer.read(MAX_BYTES + 1)
    except (OSError, HTTPException) as error:
        raise TransportError(f"{where}: {error}") from error
    finally:
        connection.close()
    if answer.status != 200 or len(body) > MAX_BYTES:
        raise TransportError(f"{where}: HTTP {answer.status} and {len(body)} bytes")
    try:
        cards = _decode(body)
    except msgspec.MsgspecError as error:
        raise TransportError(f"{where}: {error}") from error
    return cards.engine, cards.cards
