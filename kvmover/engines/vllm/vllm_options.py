"""Typed options in `kv_connector_extra_config`, the connector's and a tier's; unknown ones are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from kvmover.config import ConfigError, Settings
from kvmover.config.settings import canonical_address
from kvmover.engines.common import STORE_KEYS, WEIGHT_KEYS, ContentOptions, read_options
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.protocol.wire import Verb

_Natural = Annotated[int, msgspec.Meta(ge=0)]

#: Options that set a setting of kvmover, before all other sources. `layer_wise`: layers of a chunk, offered while a
#: prefill computes later layers; 0 offers all at the end of the step.
KEYS: Mapping[str, str] = {
    **STORE_KEYS,
    "layer_wise": "mover.chunk_layers",
    "deadline_s": "mover.deadline_s",
    "arena_bytes": "mover.arena_bytes",
    "chunk_bytes": "mover.costs.chunk_bytes",
    "verb": "mover.verb",
    "identity": "mover.identity",
    "route": "mover.route",
}

#: Defaults. `deadline_s`: how long a prefill keeps a request's pages; queueing before decode may take longer than any
#: transfer. `verb`: pages that a dying prefill was writing cannot be reused until it is back.
DEFAULTS = Settings(mover=MoverConfig(deadline_s=120.0, verb=Verb.PULL))


class ConnectorOptions(ContentOptions, frozen=True, forbid_unknown_fields=True):
    """The connector's own options, all of which have a default.

    `model` defaults to vLLM's model name. `host`, `port`: where decode engines find this engine's cards. Port 0 lets
    the system choose, every answer to a prefill names it, and data-parallel replicas take the following ports.

    Options of vLLM's own connector, with its defaults: with `bidirectional_kv_xfer` a decode keeps its KV for a prefill
    of the next turn, for `decoder_kv_blocks_ttl` seconds; fewer tokens than `kv_recompute_threshold` are computed by
    such a prefill, not fetched.

    `movable_s`: seconds for which the blocks of a request that may move are kept after its client has left; 0: it may
    not.
    """

    host: str = ""
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl: Annotated[float, msgspec.Meta(gt=0)] = 480.0
    kv_recompute_threshold: _Natural = 64
    movable_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


def parse(extra_config: Mapping[str, Any] | None) -> tuple[ConnectorOptions, Settings]:
    """Returns the connector's options, and the settings of this process with those of `KEYS` over them.

    Raises ConfigError with the unknown or invalid key.
    """
    return read_options(extra_config or {}, ConnectorOptions, KEYS, "the options of kvmover's vLLM connector", DEFAULTS)


#: Options of KvmoverPeerTier that set a setting.
PEER_KEYS: Mapping[str, str] = {**WEIGHT_KEYS, **{name: f"peers.{name}" for name in ("address", "engines")}}


class TierOptions(ContentOptions, frozen=True, forbid_unknown_fields=True):
    """The options of KvmoverTier. `model` defaults to vLLM's model name.

    `locality` is passed to vLLM, whose requests may select tiers by it. `enable_kv_events` publishes stored chunks if
    vLLM's own KV events are on.
    """

    locality: Literal["LOCAL", "REMOTE"] | None = None
    enable_kv_events: bool = False


def parse_tier(said: Mapping[str, Any]) -> tuple[TierOptions, Settings]:
    """Returns the options beside the `type` of KvmoverTier in `secondary_tiers`, like `parse`."""
    return read_options(said, TierOptions, STORE_KEYS, "the options of kvmover's vLLM tier")


class PeerTierOptions(ContentOptions, frozen=True, forbid_unknown_fields=True):
    """The options of KvmoverPeerTier.

    With `router_capabilities` Dynamo's worker tells its router that requests may name a source, and this engine's
    address as such: `control_advertise_host`, and of `control_ports` the one of the data-parallel rank.
    """

    router_capabilities: tuple[Literal["router_hint"], ...] = ()
    control_ports: tuple[int | str, ...] = ()
    control_advertise_host: str = ""

    def address(self, data_parallel_rank: int) -> str | None:
        """Returns the address that is told to the router; None without ports. Raises ConfigError.

        >>> PeerTierOptions(control_ports=("8400", "8401"), control_advertise_host="10.0.0.7").address(1)
        '10.0.0.7:8401'
        """
        if not self.control_ports and not self.router_capabilities:
            return None
        ports = self.control_ports
        if not self.control_advertise_host or not 0 <= data_parallel_rank < len(ports):
            raise ConfigError(
                f"control_advertise_host = {self.control_advertise_host!r} and control_ports = {list(ports)} in the"
                f" options of kvmover's vLLM tier of peers: a router needs a host, and a port for data-parallel rank"
                f" {data_parallel_rank}"
            )
        host = self.control_advertise_host.strip("[]")
        host = f"[{host}]" if ":" in host else host
        return canonical_address(f"{host}:{ports[data_parallel_rank]}")


def parse_peer_tier(said: Mapping[str, Any], data_parallel_rank: int = 0) -> tuple[PeerTierOptions, Settings]:
    """Returns the options beside the `type` of KvmoverPeerTier in `secondary_tiers`, like `parse`.

    An address that is told to a router is `peers.address`, and no other may be.
    """
    options, settings = read_options(said, PeerTierOptions, PEER_KEYS, "the options of kvmover's vLLM tier of peers")
    told, own = options.address(data_parallel_rank), settings.peers.address
    if told is not None and own not in (None, told):
        raise ConfigError(f"control_ports tell a router of {told}, and peers.address is {own}: leave one out")
    return options, settings if told is None else replace(settings, peers=replace(settings.peers, address=told))
