"""Tiers: KV on the device, on the host and in storage, moved between them as a prefix tree decides and ranks agree."""

from kvmover.cache.tiers.agreement import Alone, Consensus, Grouped
from kvmover.cache.tiers.controller import Controller, Setup
from kvmover.cache.tiers.errors import ConsensusBroken, TierError
from kvmover.cache.tiers.hostmem import SOLE, Share, host_pool, unlink
from kvmover.cache.tiers.metrics import Count, Gauge, Meter, Snapshot, Stage
from kvmover.cache.tiers.policy import (
    BestEffort,
    CostAware,
    Inclusion,
    Policy,
    Prefetch,
    Speed,
    Store,
    Timeout,
    Wait,
    worth,
)
from kvmover.cache.tiers.rate import Rate
from kvmover.cache.tiers.restore import Phase, Restore
from kvmover.cache.tiers.rules import ALL_PAGES, LAST_PAGE, Rule, restorable
from kvmover.cache.tiers.storage import Storage
from kvmover.cache.tiers.tiered_pool import Holding, page_tokens, part_of

__all__ = [
    "ALL_PAGES",
    "LAST_PAGE",
    "SOLE",
    "Alone",
    "BestEffort",
    "Consensus",
    "ConsensusBroken",
    "Controller",
    "CostAware",
    "Count",
    "Gauge",
    "Grouped",
    "Holding",
    "Inclusion",
    "Meter",
    "Phase",
    "Policy",
    "Prefetch",
    "Rate",
    "Restore",
    "Rule",
    "Setup",
    "Share",
    "Snapshot",
    "Speed",
    "Stage",
    "Storage",
    "Store",
    "TierError",
    "Timeout",
    "Wait",
    "host_pool",
    "page_tokens",
    "part_of",
    "restorable",
    "unlink",
    "worth",
]
