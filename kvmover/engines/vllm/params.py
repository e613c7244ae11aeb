"""`kv_transfer_params` name the other half of a request, in the words of vLLM's own connectors and proxies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec


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
