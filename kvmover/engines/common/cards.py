"""The cards of all ranks of an engine, served at one port over HTTP: how engines of any make find each other's ranks.

A card tells how to reach one rank.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from enum import StrEnum
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread, Timer
from typing import Annotated

import msgspec

from kvmover.config import Settings
from kvmover.engines.common.dialling import address_of
from kvmover.errors import TransportError
from kvmover.foreign_text import MOST_SAID, printable
from kvmover.transfer.protocol.auth import MessageAuth

#: The path of the cards, on a port that may serve other paths.
CARDS_PATH = "/kvmover/cards"

#: The most bytes of one engine's cards: some hundred ranks of some ten kilobytes.
MAX_CARDS_BYTES = 4 << 20
#: The limit of a whole call, s, however slowly the server sends.
TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


class EngineMake(StrEnum):
    """The make of an engine. The payload beside the KV is in its adapter's format."""

    SGLANG = "sglang"
    TRANSFORMERS = "transformers"
    VLLM = "vllm"


class Cards(msgspec.Struct, frozen=True):
    """An engine's name, and the cards of all its ranks in order."""

    engine: str
    cards: tuple[bytes, ...]
    make: Annotated[str, msgspec.Meta(max_length=64)] = EngineMake.VLLM

    def encode(self) -> bytes:
        """Returns the body of the HTTP answer."""
        return msgspec.msgpack.encode(self)


_decode = msgspec.msgpack.Decoder(Cards).decode


class _Desk(ThreadingHTTPServer):
    """An HTTP server whose queue takes all ranks of a fleet at once: a connection beyond the queue would wait 1 s and
    be reset.
    """

    request_queue_size = 1024
    daemon_threads = True


class CardServer:
    """A server that answers every GET with the cards until it is closed. Any client of the port can read them."""

    def __init__(self, host: str, port: int) -> None:
        """Listen at `port`; port 0 takes a free one, see `port`. Raises OSError if the port is taken."""
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
                """Write no log line a call."""

        self._server = _Desk((host, port), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True, name="kvmover-cards")
        self._thread.start()

    def lay_out(self, engine: str, cards: Sequence[bytes], make: EngineMake = EngineMake.VLLM) -> None:
        """Serve these cards from now on."""
        self._body = Cards(engine, tuple(cards), make).encode()

    def close(self) -> None:
        """Free the port and end the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def caller(settings: Settings) -> Callable[[str, int], Cards]:
    """Returns `fetch_cards` for hosts that requests name: only hosts in `exchange.allow`, and with a shared key only
    sealed cards.

    Logs one line with the hosts that requests may make this process dial.
    """
    allow, keys = settings.exchange.allow, settings.security.keys()
    whom = f"hosts of exchange.allow: {', '.join(allow)}" if allow else "any host, since exchange.allow is empty"
    log.info("requests may have cards fetched from %s", whom)

    def call(host: str, port: int) -> Cards:
        found = fetch_cards(host, port, allow=allow)
        if keys is not None:
            reader = MessageAuth(keys, "")
            for card in found.cards:
                reader.verify_card(card)
        return found

    return call


def fetch_cards(host: str, port: int, timeout_s: float = TIMEOUT_S, allow: Sequence[str] = ()) -> Cards:
    """Returns the engine at a port, and its cards. `allow` is as in `address_of`.

    Raises TransportError with the address. A redirect counts as an answer without cards.
    """
    where = f"no cards from {printable(host, MOST_SAID)}:{port}"
    address = address_of(host, port, allow)
    connection = HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.sock = socket.create_connection((address, port), timeout_s)
    except OSError as error:
        raise TransportError(f"{where}: {error}") from error
    over = Timer(timeout_s, _hang_up, (connection.sock,))
    over.daemon = True
    over.start()
    try:
        connection.request("GET", CARDS_PATH)
        answer = connection.getresponse()
        body = answer.read(MAX_CARDS_BYTES + 1)
    except (OSError, HTTPException) as error:
        raise TransportError(f"{where}: {printable(str(error), MOST_SAID)}") from error
    finally:
        over.cancel()
        connection.close()
    if answer.status != 200 or len(body) > MAX_CARDS_BYTES:
        said = printable(body.decode(errors="replace"), MOST_SAID) if answer.status != 200 else ""
        raise TransportError(f"{where}: HTTP {answer.status} and {len(body)} bytes {said}".rstrip())
    try:
        return _decode(body)
    except msgspec.MsgspecError as error:
        raise TransportError(f"{where}: {printable(str(error), MOST_SAID)}") from error


def _hang_up(connected: socket.socket) -> None:
    """End a blocked read from another thread."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
