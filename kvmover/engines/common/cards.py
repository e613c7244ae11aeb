"""Cards of all ranks of an engine at one port, over HTTP: how engines of any make find each other's ranks.

A card is how one rank is reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Annotated

import msgspec

from kvmover.errors import TransportError

#: Where they are on a port that serves other things too.
CARDS_PATH = "/kvmover/cards"

#: A whole engine's cards: some hundred ranks of some ten kilobytes.
MAX_CARDS_BYTES = 64 << 20
TIMEOUT_S = 10.0


class EngineMake(StrEnum):
    """Whose adapter serves the cards: what goes beside the KV is in its words."""

    SGLANG = "sglang"
    VLLM = "vllm"


class Cards(msgspec.Struct, frozen=True):
    """An engine by name, and the cards of all its ranks in order."""

    engine: str
    cards: tuple[bytes, ...]
    make: Annotated[str, msgspec.Meta(max_length=64)] = EngineMake.VLLM

    def encode(self) -> bytes:
        """The body of the answer."""
        return msgspec.msgpack.encode(self)


_decode = msgspec.msgpack.Decoder(Cards).decode


class _Desk(ThreadingHTTPServer):
    """All ranks of a fleet may come at once, to a process that has no time for them: who finds no room here would wait
    a second and then be reset."""

    request_queue_size = 1024
    daemon_threads = True


class CardServer:
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
                """An engine's log is not for every caller."""

        self._server = _Desk((host, port), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True, name="kvmover-cards")
        self._thread.start()

    def lay_out(self, engine: str, cards: Sequence[bytes]) -> None:
        """Serve these from now on."""
        self._body = Cards(engine, tuple(cards)).encode()

    def close(self) -> None:
        """Free the port and end the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def fetch_cards(host: str, port: int, timeout_s: float = TIMEOUT_S) -> Cards:
    """The engine at a port, and its cards. Raises TransportError that names the address."""
    where = f"no cards from {host}:{port}"
    connection = HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", CARDS_PATH)
        answer = connection.getresponse()
        body = answer.read(MAX_CARDS_BYTES + 1)
    except (OSError, HTTPException) as error:
        raise TransportError(f"{where}: {error}") from error
    finally:
        connection.close()
    if answer.status != 200 or len(body) > MAX_CARDS_BYTES:
        said = body[:200].decode(errors="replace") if answer.status != 200 else ""
        raise TransportError(f"{where}: HTTP {answer.status} and {len(body)} bytes {said}".rstrip())
    try:
        return _decode(body)
    except msgspec.MsgspecError as error:
        raise TransportError(f"{where}: {error}") from error
