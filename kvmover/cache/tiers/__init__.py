"""Tiers keep KV on device, host and storage: a prefix tree decides the moves, and all ranks agree on each."""

from kvmover.cache.prefix import ALL_PAGES, LAST_PAGE, Rule, restorable
from kvmover.cache.tiers.agreement import Consensus, Grouped, LocalConsensus, Pipelined
from kvmover.cache.tiers.allocator import DevicePages, FreeList
from kvmover.cache.tiers.controller import Controller, ControllerConfig
from kvmover.cache.tiers.gated_loads import GatedLoad, GatedLoads
from kvmover.cache.tiers.host_memory import SOLE, Reach, Share, host_pool, unlink
from kvmover.cache.tiers.restore_driver import Restore
from kvmover.cache.tiers.restore_machine import RestorePhase
from kvmover.cache.tiers.tier_metrics import TierCollector, TierCount, TierGauge, TierMeter, TierSnapshot, TierStage
from kvmover.cache.tiers.tier_policy import (
    BestEffort,
    CostAware,
    Inclusion,
    Prefetch,
    Rate,
    Speed,
    Store,
    TierPolicy,
    Timeout,
    Wait,
    worth,
)
from kvmover.cache.tiers.tier_storage import Storage
from kvmover.cache.tiers.tiered_pool import HostTier, TieredPool, page_tokens, part_of
from kvmover.errors import ConsensusBroken, TierError

__all__ = [
    "ALL_PAGES",
    "LAST_PAGE",
    "SOLE",
    "BestEffort",
    "Consensus",
    "ConsensusBroken",
    "Controller",
    "ControllerConfig",
    "CostAware",
    "DevicePages",
    "FreeList",
    "GatedLoad",
    "GatedLoads",
    "Grouped",
    "HostTier",
    "Inclusion",
    "LocalConsensus",
    "Pipelined",
    "Prefetch",
    "Rate",
    "Reach",
    "Restore",
    "RestorePhase",
    "Rule",
    "Share",
    "Speed",
    "Storage",
    "Store",
    "TierCollector",
    "TierCount",
    "TierError",
    "TierGauge",
    "TierMeter",
    "TierPolicy",
    "TierSnapshot",
    "TierStage",
    "TieredPool",
    "Timeout",
    "Wait",
    "host_pool",
    "page_tokens",
    "part_of",
    "restorable",
    "unlink",
    "worth",
]
