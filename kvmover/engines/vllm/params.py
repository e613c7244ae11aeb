"""kv_transfer_params: what a request says of its other half, in the words of vLLM's own connectors and proxies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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


def asked(params: Mapping[str, Any] | None, request: str) -> Serve | Remote | None:
    """What a request's parameters ask of this engine. None for a request that concerns nobody else.

    A proxy that starts both halves at once gives both the same `transfer_id`; otherwise a prefill's is its request id
    here, and comes back to the proxy in the answer. Raises ValueError for parameters that lack something.
    """
    if not params:
        return None
    if params.get("do_remote_decode"):
        return Serve(str(params.get("transfer_id") or request))
    if not params.get("do_remote_prefill"):
        return None
    transfer = params.get("remote_request_id") or params.get("transfer_id")
    missing = [key for key in ("remote_engine_id", "remote_host", "remote_port") if not params.get(key)]
    missing += [] if transfer else ["remote_request_id"]
    if missing:
        raise ValueError(f"kv_transfer_params of {request} have no {', '.join(missing)}")
    return Remote(
        str(params["remote_engine_id"]), str(transfer), str(params["remote_host"]), int(params["remote_port"])
    )


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
