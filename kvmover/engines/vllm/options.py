"""What an operator may say in `kv_connector_extra_config`: typed, and nothing unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from kvmover.config import ConfigError
from kvmover.plan.cost import Route
from kvmover.transfer.result import MoverConfig
from kvmover.transfer.wire import Verb

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of them have a default. `root`, a directory that exists, the same on all ranks, turns the page store on.

    `model`, `weights`, `tenant`: what must be equal for KV to be shared; the first two default to vLLM's model name and
    revision. `host`, `port`: where decode engines find this one's cards; 0 lets the system choose a port, which every
    answer to a prefill names, and data-parallel replicas take the ports behind it. `layer_wise`: offer layers while a
    prefill computes them, in chunks of so many; 0 offers them when the step has ended. `deadline_s`: how long a prefill
    keeps pages for a decode engine, and that waits for them.

    `verb`: whether decode reads or the prefill writes. What was read counts when the prefill has confirmed it, so a
    prefill that dies takes all of a request with it; what was written stays. But pages that it was writing directly
    are nobody's until it has come back: `route` "packed" keeps its writes out of them. `arena_bytes`, taken twice on
    the device beside what vLLM plans, `chunk_bytes` and `route` default to kvmover's configuration, where the rest of
    the mover's settings is too.

    `quota_bytes`, `ttl_s`: see `store.Policy`. `upkeep_s`, `flush_s`: how often quota and TTL are kept, and how often
    pages are made safe from a power cut and visible to other machines.
    """

    root: str = ""
    model: str = ""
    weights: str = ""
    tenant: str = ""
    host: str = ""
    port: _Natural = 0
    layer_wise: _Natural = 0
    deadline_s: _Seconds = 120.0
    arena_bytes: _Positive | None = None
    chunk_bytes: _Positive | None = None
    verb: Verb = Verb.PULL
    route: Route | None = None
    quota_bytes: _Positive | None = None
    ttl_s: _Seconds | None = None
    upkeep_s: _Seconds = 5.0
    flush_s: _Seconds = 30.0


def parse(extra_config: Mapping[str, Any] | None) -> Options:
    """Raises ConfigError that names the key which is unknown or out of range."""
    try:
        return msgspec.convert(dict(extra_config or {}), Options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"options of kvmover's vLLM connector: {error}") from error


def mover_of(options: Options, configured: MoverConfig) -> MoverConfig:
    """The mover's settings: what is configured for kvmover as a whole, and what was said in vLLM's JSON."""
    costs = configured.costs
    return replace(
        configured,
        arena_bytes=options.arena_bytes or configured.arena_bytes,
        deadline_s=options.deadline_s,
        chunk_layers=options.layer_wise,
        verb=options.verb,
        route=options.route or configured.route,
        costs=replace(costs, chunk_bytes=options.chunk_bytes) if options.chunk_bytes else costs,
    )
