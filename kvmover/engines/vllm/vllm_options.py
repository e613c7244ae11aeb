"""Typed options in `kv_connector_extra_config`, the connector's and a tier's; unknown ones are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kvmover.config import Settings
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


def parse_peer_tier(said: Mapping[str, Any]) -> tuple[ContentOptions, Settings]:
    """Returns the options beside the `type` of KvmoverPeerTier in `secondary_tiers`, like `parse`."""
    return read_options(said, ContentOptions, PEER_KEYS, "the options of kvmover's vLLM tier of peers")
