"""`kv_transfer_params` by which the two halves of a request find each other.

The keys are those of vLLM's own connectors and proxies; with a half of another make, those of SGLang's rooms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from kvmover.prepared import prepared
from kvmover.transfer.protocol.content import Content


@dataclass(frozen=True, slots=True)
class Remote:
    """The place of a request's KV: its engine, its name there, and the host and port that serve the engine's cards.

    `engine` "" stands for the engine found there: a room does not name it.
    """

    engine: str
    transfer: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class LastTurn:
    """A conversation up to its last turn, kept by a decode engine, with its length and digest."""

    remote: Remote
    content: Content


@dataclass(frozen=True, slots=True)
class Serve:
    """A request to be computed here for another engine, which asks for it as `transfer`. `last` may have a part of
    it.
    """

    transfer: str
    last: LastTurn | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """A request begun elsewhere, whose first `tokens` positions are there. With `goes_on` it stays there and a copy is
    fetched; else it continues here and its KV there is released.
    """

    remote: Remote
    tokens: int
    goes_on: bool = False


_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]

#: The length and digest of a prompt, as `300:000102...`; without a digest if a part of it has none.
_Said = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,18}:([0-9a-f]{32})?$")]


@prepared
class _Params(msgspec.Struct, frozen=True):
    """The keys read from `kv_transfer_params`. Clients write them, so values are converted from any spelling.

    A router may have made a port of 5600 into "5600" or 5600.0.
    """

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    transfer_id: _Name | None = None
    remote_engine_id: _Name | None = None
    remote_request_id: _Name | None = None
    remote_host: Annotated[str, msgspec.Meta(min_length=1, max_length=253)] | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)] | None = None
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    bootstrap_host: Annotated[str, msgspec.Meta(min_length=1, max_length=253)] | None = None
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)] | None = None
    bootstrap_room: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None
    kvmover_content: _Said | None = None
    kvmover_readers: Annotated[int, msgspec.Meta(ge=1)] | None = None
    kvmover_movable: _Name | None = None
    kvmover_copy: bool | None = None

    @property
    def room(self) -> str | None:
        """Returns the request's name if a router used SGLang's keys: the digits of its room number."""
        return None if self.bootstrap_room is None else str(self.bootstrap_room)

    @property
    def last(self) -> LastTurn | None:
        """Returns the last turn, for a prefill: the parameters given by the decode of the turn before, if complete."""
        if not (self.remote_engine_id and self.remote_host and self.remote_port and self.remote_request_id):
            return None
        if self.content is None or self.content.tokens != self.remote_num_tokens:
            return None
        remote = Remote(self.remote_engine_id, self.remote_request_id, self.remote_host, self.remote_port)
        return LastTurn(remote, self.content)

    @property
    def content(self) -> Content | None:
        """Returns the prompt named by the other half."""
        if self.kvmover_content is None:
            return None
        tokens, _, digest = self.kvmover_content.partition(":")
        return Content(int(tokens), bytes.fromhex(digest), "" if digest else "as its prefill says")


@dataclass(frozen=True, slots=True)
class RequestAsk:
    """A request's parameters as an order to this engine.

    `whole`: of a prompt computed in two halves, or of a request that moves; None otherwise. `movable`: the name by
    which other engines may ask for this request. `content`: the prompt named by the other half. `readers`: the number
    of one client's requests that it serves.
    """

    whole: Serve | Remote | Running | None = None
    movable: str | None = None
    content: Content | None = None
    readers: int = 1


def asked(params: Mapping[str, Any] | None, request: str) -> RequestAsk:
    """Returns the order in a request's parameters.

    A proxy that starts both halves at once gives both the same `transfer_id`; otherwise a prefill's is its request id
    here, returned to the proxy in the answer. A router between engines of different make gives both halves SGLang's
    keys, `bootstrap_room` and, to decode, the prefill's `bootstrap_host` and `bootstrap_port`. A request that moves
    here during its decode gives the tokens it has, `remote_num_tokens`. Raises ValueError with the names of missing or
    malformed parameters.
    """
    if not params:
        return RequestAsk()
    try:
        said = msgspec.convert(params, _Params, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_transfer_params of {request}: {error}") from None
    if said.do_remote_decode:
        return RequestAsk(Serve(said.transfer_id or said.room or request, said.last))
    if not said.do_remote_prefill:
        return RequestAsk(movable=said.kvmover_movable)
    remote = _remote_of(said, request)
    if said.remote_num_tokens:
        return RequestAsk(Running(remote, said.remote_num_tokens, bool(said.kvmover_copy)), said.kvmover_movable)
    return RequestAsk(remote, said.kvmover_movable, said.content, said.kvmover_readers or 1)


def _remote_of(said: _Params, request: str) -> Remote:
    if said.room and said.bootstrap_host and said.bootstrap_port:
        return Remote("", said.room, said.bootstrap_host, said.bootstrap_port)
    transfer = said.remote_request_id or said.transfer_id
    if said.remote_engine_id and said.remote_host and said.remote_port and transfer:
        return Remote(said.remote_engine_id, transfer, said.remote_host, said.remote_port)
    missing = [key for key in ("remote_engine_id", "remote_host", "remote_port") if getattr(said, key) is None]
    missing += [] if transfer else ["remote_request_id"]
    raise ValueError(f"kv_transfer_params of {request} have no {', '.join(missing)}")


def answer(served: Remote, content: Content, readers: int = 1) -> dict[str, Any]:
    """Returns the parameters of the other half, for a proxy to pass on."""
    told = {"kvmover_content": _said(content), **({"kvmover_readers": readers} if readers > 1 else {})}
    return {"do_remote_prefill": True, "do_remote_decode": False, **_reached(served), **told}


def answer_of_turn(kept: LastTurn) -> dict[str, Any]:
    """Returns the parameters of the next turn's prefill, for a proxy to pass on."""
    told = {"remote_num_tokens": kept.content.tokens, "kvmover_content": _said(kept.content)}
    return {"do_remote_prefill": False, "do_remote_decode": True, **_reached(kept.remote), **told}


def _said(content: Content) -> str:
    return f"{content.tokens}:{content.digest.hex()}"


def _reached(remote: Remote) -> dict[str, Any]:
    return {
        "remote_engine_id": remote.engine,
        "remote_request_id": remote.transfer,
        "remote_host": remote.host,
        "remote_port": remote.port,
    }
