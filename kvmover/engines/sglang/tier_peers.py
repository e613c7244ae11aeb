"""EnginePeers lends a rank's host pools to other engines, and reads theirs: peers are asked before storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvmover.cache.peers import PeerTier
from kvmover.cache.prefix import FULL as ATTENTION
from kvmover.cache.tiers import TieredPool
from kvmover.config import Settings
from kvmover.engines.common import (
    UPDATED,
    EngineUnsupported,
    Neighbours,
    ParallelRank,
    ServedWeights,
    odd_ones,
    open_peer_tier,
    peer_wire,
)
from kvmover.engines.sglang import engine_radix
from kvmover.engines.sglang.sglang_weight_updates import UPDATES
from kvmover.transport import Transport

if TYPE_CHECKING:
    import torch.distributed as dist


#: Reason why an engine shares no KV after an update that its stages hear of one after the other.
IN_STAGES = "pipeline stages (--pp-size) do not hear of it together: peers share nothing until a restart"


@dataclass(slots=True)
class EnginePeers:
    """A rank's peers. `tier` lends its host pools over `wire`; `neighbours` meets other engines.

    `place`, `group`: among the ranks whose cards are published together.
    """

    tier: PeerTier
    wire: Callable[[], Transport]
    neighbours: Neighbours
    weights: ServedWeights
    place: ParallelRank
    group: dist.ProcessGroup | None

    def lay_out(self) -> None:
        """Publish the cards of all ranks, which call this together. Raises ConfigError for an unusable address."""
        cards = _of_all(self.tier.card, self.place, self.group)
        if self.place.number == 0:
            self.neighbours.lay_out(cards)

    def reweigh(self) -> None:
        """Withdraw the lent pages, and meet engines with the present weights of this engine. Raises TransportError.

        All ranks call this together.
        """
        self.weights = UPDATES.current(self.weights)
        if self.place.pp_size > 1:
            self.weights = self.weights.updated(None, IN_STAGES)
        self.weights.log()
        self.tier.rejoin(self.wire, self.weights.identity, UPDATED)
        if self.place.pp_size == 1:
            self.lay_out()

    def close(self) -> None:
        """End lending and asking. The pools outlive it."""
        self.neighbours.close()
        self.tier.close()


def open_peers(
    settings: Settings,
    weights: ServedWeights,
    tiered_pools: Sequence[TieredPool],
    place: ParallelRank,
    page_tokens: int,
    group: dist.ProcessGroup | None,
) -> EnginePeers | None:
    """Returns the peers of the rank at `place`; None without `peers.address`. All ranks of `group` call this together.

    Raises EngineUnsupported for caches that peers do not share, TransportUnavailable, and ConfigError for an unusable
    address.
    """
    if settings.peers.address is None:
        return None
    _refuse(tiered_pools, place)
    fleet, pools = place.fleet(page_tokens // place.cp_size), [each.host for each in tiered_pools]
    wire = peer_wire(settings.peers.address, place.rank, tiered_pools[0].device.tensors[0].device)
    tier = open_peer_tier(settings, weights, fleet, place.rank, pools, wire())
    assert tier is not None
    peers = EnginePeers(tier, wire, Neighbours([tier], settings), weights, place, group)
    try:
        peers.lay_out()
    except BaseException:
        peers.close()
        raise
    return peers


def _refuse(tiered_pools: Sequence[TieredPool], place: ParallelRank) -> None:
    """Raise EngineUnsupported for caches that other engines cannot ask for by pages of tokens, or cannot read."""
    odd = {
        "windows or states beside attention KV": any(each.name != ATTENTION for each in tiered_pools),
        "ranks that hold the same (--attn-cp-size)": place.copies > 1,
        "data-parallel groups of one server, which has one address (--dp-size)": engine_radix.data_parallel_groups()
        > 1,
        "stages of a model whose layers nobody says": place.pp_size > 1
        and any(each.part.box.layers.count == each.part.component.layers for each in tiered_pools),
    }
    asked = odd_ones(odd)
    if asked:
        raise EngineUnsupported(f"peers do not share {asked}: leave out peers.address (KVMOVER_PEERS_ADDRESS)")


def refuse_unasked(settings: Settings, asked: str) -> None:
    """Raise EngineUnsupported if peers are configured, and `asked` of SGLang keeps it from asking and lending."""
    if settings.peers.address is not None:
        raise EngineUnsupported(
            f"peers.address = {settings.peers.address!r} and {asked}: peers share what --enable-hierarchical-cache"
            " keeps on the host, written through, and are asked where SGLang asks storage: --hicache-storage-backend"
            ' dynamic with class_name KvmoverStore, and root "none" where there is no store'
        )


def _of_all(card: bytes, place: ParallelRank, group: dist.ProcessGroup | None) -> list[bytes]:
    """Returns every rank's card, in order."""
    if group is None:
        return [card]
    distributed: Any = import_module("torch.distributed")
    found: list[Any] = [None] * place.ranks
    distributed.all_gather_object(found, (place.rank, card), group=group)
    return [each for _, each in sorted(found)]
