"""HandshakeServer serves the cards of an engine's ranks over HTTP, from its scheduler to workers of other engines."""

from __future__ import annotations

from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import msgspec

from kvmover.errors import TransportError

#: A whole engine's cards: some hundred ranks of some ten kilobytes.
MAX_BYTES = 64 << 20
TIMEOUT_S = 10.0


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
