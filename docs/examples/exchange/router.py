"""A router in front of a prefill and a decode engine of unlike make, for OpenAI's completions: the least that works.

    python router.py --port 8000 \
        --prefill sglang http://10.0.0.1:30000 10.0.0.1:8998 --decode vllm http://10.0.0.2:8200
    python router.py --port 8000 \
        --prefill vllm http://10.0.0.2:8100 10.0.0.2:14600 --decode sglang http://10.0.0.1:30001

The third word behind `--prefill` is where its ranks are found: SGLang's bootstrap port, or kvmover's `port` in vLLM and
in `transformers`, the third make, whose server is transformers_server.py beside this file.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR
from typing import Any
from urllib.parse import urlsplit

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Room:
    """Where the halves of a request meet: the prefill's ranks, and a number that no other request has."""

    host: str
    port: int
    number: int

    def words(self) -> dict[str, Any]:
        """SGLang's, which kvmover reads in vLLM too."""
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.number}


def for_prefill(make: str, body: Body, room: Room) -> dict[str, Any]:
    """The half that computes the prompt and one token."""
    short = {name: value for name, value in body.items() if name not in ("stream_options", "min_tokens")}
    short |= {name: 1 for name in ("max_tokens", "max_completion_tokens") if name in body} or {"max_tokens": 1}
    short["stream"] = False
    if make != "sglang":
        return short | {"kv_transfer_params": {"do_remote_decode": True, "bootstrap_room": room.number}}
    return short | room.words()


def for_decode(make: str, body: Body, room: Room, first: Body | None) -> dict[str, Any]:
    """The half that answers. `first`: what vLLM's prefill answered, which has the first token's log probability."""
    if make != "sglang":
        return {**body, "kv_transfer_params": {"do_remote_prefill": True, **room.words()}}
    told = _logprobs(first) if first else {}
    return {**body, **room.words(), "custom_params": {**(body.get("custom_params") or {}), **told}}


def _logprobs(answer: Body) -> dict[str, Any]:
    logprobs = answer["choices"][0].get("logprobs") or {}
    values = logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs.get("content") or ()]
    return {"kvmover_first_logprob": values[0]} if values else {}


class Half:
    """One of the two requests. `close` gives it up, from any thread: its server takes the client for gone."""

    def __init__(self, url: str, path: str, body: Body) -> None:
        parts = urlsplit(url)
        self._path, self._body = path, json.dumps(body)
        self._connection = HTTPConnection(parts.hostname or "", parts.port, timeout=600)

    def answer(self) -> HTTPResponse:
        self._connection.request("POST", self._path, self._body, {"Content-Type": "application/json"})
        return self._connection.getresponse()

    def whole(self) -> Body | None:
        """The answer, or None where there is no good one."""
        with suppress(OSError, HTTPException):
            said = self.answer()
            text = said.read()
            return json.loads(text) if said.status == 200 else None

    def close(self) -> None:
        if self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(SHUT_RDWR)
        self._connection.close()


@dataclass(frozen=True)
class Router:
    """`prefill`, `decode`: make and URL. `ranks`: host and port at which the prefill's are found."""

    prefill: tuple[str, str]
    decode: tuple[str, str]
    ranks: tuple[str, int]
    pool: ThreadPoolExecutor

    def route(self, path: str, body: Body, write: Callable[[HTTPResponse], None]) -> None:
        """Both halves at once; but SGLang's decode, which computes no prompt, after vLLM's prefill has answered.

        Raises OSError or HTTPException where a half that is needed does not answer.
        """
        room = Room(*self.ranks, random.randrange(1 << 62))
        first, known = Half(self.prefill[1], path, for_prefill(self.prefill[0], body, room)), None
        prefilled = self.pool.submit(first.whole)
        if (self.prefill[0], self.decode[0]) == ("vllm", "sglang"):
            known = prefilled.result()
            if known is None:
                raise ConnectionError("the prefill has not answered")
        second = Half(self.decode[1], path, for_decode(self.decode[0], body, room, known))
        try:
            write(second.answer())
        finally:
            second.close()
            self.pool.submit(self._end, first, prefilled)

    def _end(self, first: Half, prefilled: Future[Body | None]) -> None:
        """A prefill that nobody came for is given up soon after the answer; it would wait for minutes."""
        wait([prefilled], timeout=5)
        first.close()


class Server(ThreadingHTTPServer):
    request_queue_size = 1024  # of the default 5 a burst of clients has connections reset
    daemon_threads = True


def serve(router: Router, port: int) -> Server:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                router.route(self.path, body, self.write)
            except (OSError, HTTPException) as error:
                self.send_error(502, str(error))

        def write(self, said: HTTPResponse) -> None:
            self.send_response(said.status)
            self.send_header("Content-Type", said.headers.get("Content-Type", "application/json"))
            self.end_headers()
            while part := said.read1(1 << 16):  # a stream goes on as it comes
                self.wfile.write(part)

    return Server(("127.0.0.1", port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", nargs=3, metavar=("MAKE", "URL", "RANKS"), required=True)
    parser.add_argument("--decode", nargs=2, metavar=("MAKE", "URL"), required=True)
    said = parser.parse_args()
    host, _, port = said.prefill[2].rpartition(":")
    with ThreadPoolExecutor(64) as pool:
        router = Router(tuple(said.prefill[:2]), tuple(said.decode), (host, int(port)), pool)
        serve(router, said.port).serve_forever()


if __name__ == "__main__":
    main()
