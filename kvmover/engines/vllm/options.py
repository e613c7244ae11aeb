"""Options in `kv_connector_extra_config`, the connector's and a tier's, are typed here, and unknown ones refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kvmover.config import Settings
from kvmover.engines.common import STORE_KEYS, WEIGHT_KEYS, ContentOptions, read_options
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.protocol.wire import Verb

_Natural = Annotated[int, msgspec.Meta(ge=0)]

#: Options that stand for a setting of kvmover, and go before it. `layer_wise`: layers of a chunk, which are offered
#: while a prefill computes others; 0 offers all when the step has ended.
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

#: Where nothing is configured. `deadline_s`: a prefill keeps a request's pages for so long, and the queue before decode
#: may take longer than any transfer. `verb`: pages that a dying prefill was writing are nobody's until it is back.
DEFAULTS = Settings(mover=MoverConfig(deadline_s=120.0, verb=Verb.PULL))


class ConnectorOptions(ContentOptions, frozen=True, forbid_unknown_fields=True):
    """The connector's own, all of which have a default.

    `model` defaults to vLLM's model name. `host`, `port`: where decode engines find this
    one's cards; 0 lets the system choose a port, which every answer to a prefill names, and data-parallel replicas take
    the ports behind it.

    Words of vLLM's own connector, with its defaults: `bidirectional_kv_xfer`: a decode keeps what it has for a prefill
    of the next turn, `decoder_kv_blocks_ttl` seconds long; `kv_recompute_threshold`: fewer tokens than these are
    computed by such a prefill, not fetched.

    `movable_s`: for how long the blocks of a request that may move are kept when its client has left; 0: none may.
    """

    host: str = ""
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl: Annotated[float, msgspec.Meta(gt=0)] = 480.0
    kv_recompute_threshold: _Natural = 64
    movable_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


def parse(extra_config: Mapping[str, Any] | None) -> tuple[ConnectorOptions, Settings]:
    """The connector's options, and the settings of this process with those of `KEYS` over them.

    Raises ConfigError that names the key which is unknown or out of range.
    """
    return read_options(extra_config or {}, ConnectorOptions, KEYS, "the options of kvmover's vLLM connector", DEFAULTS)


#: Options of the tier of peers that stand for a setting.
PEER_KEYS: Mapping[str, str] = {**WEIGHT_KEYS, **{name: f"peers.{name}" for name in ("address", "engines")}}


class TierOptions(ContentOptions, frozen=True, forbid_unknown_fields=True):
    """The tier's own. `model` defaults to vLLM's model name.

    `locality` is handed to vLLM, whose requests may name tiers by it. `enable_kv_events`: tell of stored chunks, where
    vLLM's own KV events are on.
    """

    locality: Literal["LOCAL", "REMOTE"] | None = None
    enable_kv_events: bool = False


def parse_tier(said: Mapping[str, Any]) -> tuple[TierOptions, Settings]:
    """As `parse`, of the options that stand beside the tier's `type` in `secondary_tiers`."""
    return read_options(said, TierOptions, STORE_KEYS, "the options of kvmover's vLLM tier")


def parse_peer_tier(said: Mapping[str, Any]) -> tuple[ContentOptions, Settings]:
    """As `parse`, of the options that stand beside the tier of peers' `type` in `secondary_tiers`."""
    return read_options(said, ContentOptions, PEER_KEYS, "the options of kvmover's vLLM tier of peers")
