"""etcd's v3 API over its JSON gateway: one call, one deadline, over whichever endpoint answers."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvmover.errors import DeadlineExceeded, LayoutError, TransportError, TransportUnavailable

_MAX_REPLY_BYTES = 64 << 20

Reply = TypeVar("Reply")


class EtcdRefused(TransportError):
    """etcd answered, and said no: the message is its own."""


class LeaseMissing(EtcdRefused):
    """etcd knows no lease of that number: it has run out, or never was."""


class _Error(msgspec.Struct):
    message: str = ""
    code: int = 0


_NOT_FOUND = 5  # gRPC's status


class Gateway:
    """`endpoints`: `http://host:port` or https, of one cluster. `deadline_s` bounds a call over all of them."""

    def __init__(self, endpoints: Sequence[str], deadline_s: float) -> None:
        self._endpoints = [_endpoint(each) for each in endpoints]
        if not self._endpoints or deadline_s <= 0:
            raise LayoutError(f"etcd at {list(endpoints)} within {deadline_s} s cannot be asked")
        self._deadline_s = deadline_s

    def call(self, path: str, body: Mapping[str, object], reply: type[Reply]) -> Reply:
        """POST `body`, whose bytes travel as base64, and decode the answer.

        Raises EtcdRefused (LeaseMissing), TransportUnavailable where no endpoint takes a connection, DeadlineExceeded.
        """
        data = msgspec.json.encode(body)
        deadline, failures = time.monotonic() + self._deadline_s, dict[str, OSError | http.client.HTTPException]()
        for number in range(len(self._endpoints)):
            scheme, host = self._endpoints[0]
            share_s = (deadline - time.monotonic()) / (len(self._endpoints) - number)
            try:
                status, answer = _post(scheme, host, path, data, time.monotonic() + share_s)
                return _decode(status, answer, f"{scheme}://{host}{path}", reply)
            except (OSError, http.client.HTTPException) as error:
                failures[host] = error
                self._endpoints.append(self._endpoints.pop(0))
        words = ", ".join(f"{host}: {error}" for host, error in failures.items())
        if any(isinstance(error, TimeoutError) for error in failures.values()):
            raise DeadlineExceeded(f"etcd did not answer {path} within {self._deadline_s} s ({words})")
        raise TransportUnavailable(f"etcd cannot be reached ({words})")


def _endpoint(text: str) -> tuple[str, str]:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise LayoutError(f"etcd endpoint {text!r} is not http://host:port")
    return parts.scheme, parts.netloc


def _post(scheme: str, host: str, path: str, data: bytes, deadline: float) -> tuple[int, bytes]:
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    connection = kinds[scheme](host, timeout=_left(deadline))
    try:
        connection.connect()
        sock = connection.sock
        sock.settimeout(_left(deadline))
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        sock.settimeout(_left(deadline))
        response = connection.getresponse()
        parts: list[bytes] = []
        while part := response.read1(1 << 16):
            parts.append(part)
            if sum(map(len, parts)) > _MAX_REPLY_BYTES:
                raise OSError(f"an answer of more than {_MAX_REPLY_BYTES} bytes")
            sock.settimeout(_left(deadline))
        return response.status, b"".join(parts)
    finally:
        connection.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _decode(status: int, answer: bytes, url: str, reply: type[Reply]) -> Reply:
    decode: Any = msgspec.json.decode
    try:
        if status >= http.client.INTERNAL_SERVER_ERROR:  # another member may have a leader
            raise http.client.HTTPException(f"{status} {decode(answer, type=_Error).message}")
        if status != http.client.OK:
            error = decode(answer, type=_Error)
            refused = LeaseMissing if error.code == _NOT_FOUND else EtcdRefused
            raise refused(f"{url} answers {status}: {error.message}")
        # 64-bit numbers are strings in this API.
        return decode(answer, type=reply, strict=False)
    except msgspec.MsgspecError as error:
        raise TransportUnavailable(f"{url} does not answer like etcd: {error}") from error
