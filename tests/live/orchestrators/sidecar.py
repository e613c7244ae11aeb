"""llm-d's routing sidecar in front of a decode server, in Python, for its Go is not built here.

It does as pkg/sidecar/proxy of llm-d-router does at commit ebab6879 of 2026-08-22 with its default settings: nixlv2 as
connector_nixlv2.go, sglang as connector_sglang.go, the count of cached tokens as cached_tokens_usage_rewriter.go. The
prefill, which llm-d's scheduler names in a header of each request, is always the same.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from uuid import uuid1

from tests.live.server import Server

Body = Mapping[str, Any]


class KVConnector(StrEnum):
    """The sidecar's `--kv-connector`."""

    NIXLV2 = "nixlv2"
    SGLANG = "sglang"


def prefill_body(body: Body) -> dict[str, Any]:
    """Returns the first half of a request: one token, computed for another engine, without a stream."""
    half = {name: value for name, value in body.items() if name != "stream_options"}
    nowhere = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return half | {
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **nowhere},
        "stream": False,
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), 1),
    }


def decode_body(body: Body, prefilled: Body) -> dict[str, Any]:
    """Returns the second half: the client's request with the parameters that the prefill answered, unread."""
    return {**body, "kv_transfer_params": prefilled.get("kv_transfer_params")}


def bootstrapped(body: Body, prefill: str, port: int) -> dict[str, Any]:
    """Returns both halves of a request to SGLang, which meet in a room by the nanosecond."""
    room = time.time_ns() + random.randrange(1000)
    return {**body, "bootstrap_host": prefill.rpartition(":")[0], "bootstrap_port": port, "bootstrap_room": room}


def with_cached(answer: bytes, cached_tokens: int) -> bytes:
    """Returns a JSON answer, or a line of a stream, whose usage has the prefill's count of cached tokens."""
    head, data = (b"data: ", answer[6:]) if answer.startswith(b"data: ") else (b"", answer)
    try:
        said = json.loads(data)
    except ValueError:  # the end of a stream, or an empty line
        return answer
    if not isinstance(said, dict) or not isinstance(usage := said.get("usage"), dict):
        return answer
    usage["prompt_tokens_details"] = {**(usage.get("prompt_tokens_details") or {}), "cached_tokens": cached_tokens}
    return head + json.dumps(said).encode() + b"\n" * bool(head)


def _cached_tokens(answer: Body) -> int:
    return ((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _post(address: str, path: str, body: Body, request_id: str) -> HTTPResponse:
    host, _, port = address.rpartition(":")
    connection = HTTPConnection(host, int(port), timeout=120)
    headers = {"Content-Type": "application/json", "Connection": "close", "x-request-id": request_id}
    connection.request("POST", path, json.dumps(body), headers)
    return connection.getresponse()


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A decode server's, at `decode`, with a prefill at `prefill`: hosts and ports. `bootstrap_port`: SGLang's."""

    prefill: str
    decode: str
    connector: KVConnector
    bootstrap_port: int
    pool: ThreadPoolExecutor

    def answer(self, client: _Client, path: str, body: Body) -> None:
        """Ask both halves, and pass the answer of the decode on, or that of a prefill that failed."""
        request_id = str(uuid1())
        if self.connector is KVConnector.SGLANG:
            both = bootstrapped(body, self.prefill, self.bootstrap_port)
            self.pool.submit(lambda: _post(self.prefill, path, both, request_id).read())
            client.copy(_post(self.decode, path, both, request_id))
            return
        first = _post(self.prefill, path, prefill_body(body), request_id)
        if not 200 <= first.status < 300:
            client.copy(first)
            return
        prefilled = json.loads(first.read())
        client.copy(_post(self.decode, path, decode_body(body, prefilled), request_id), _cached_tokens(prefilled))


class _Client(BaseHTTPRequestHandler):
    sidecar: Sidecar

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self.sidecar.answer(self, self.path, body)
        except (OSError, HTTPException) as error:
            self.send_error(502, str(error))

    def copy(self, said: HTTPResponse, cached_tokens: int | None = None) -> None:
        """Pass an answer on, a stream line by line."""
        kind = said.headers.get("Content-Type", "application/json")
        self.send_response(said.status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        for part in said if "event-stream" in kind else [said.read()]:
            self.wfile.write(part if cached_tokens is None else with_cached(part, cached_tokens))

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a test reads the servers' logs."""


class _Listener(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True


@contextmanager
def sidecar_of(prefill: Server, decode: Server, connector: KVConnector) -> Iterator[str]:
    """Yields the URL of a sidecar between two servers, while the block runs."""
    addresses = (f"127.0.0.1:{server.port}" for server in (prefill, decode))
    with ThreadPoolExecutor(64) as pool:
        sidecar = Sidecar(*addresses, connector, prefill.command.bootstrap_port, pool)
        listener = _Listener(("127.0.0.1", 0), type("Client", (_Client,), {"sidecar": sidecar}))
        Thread(target=listener.serve_forever, daemon=True, name="sidecar").start()
        try:
            yield f"http://127.0.0.1:{listener.server_address[1]}"
        finally:
            listener.shutdown()
            listener.server_close()
