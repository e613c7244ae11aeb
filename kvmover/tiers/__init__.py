"""Tiers: KV on the device, on the host and in storage, moved between them as a prefix tree decides and ranks agree."""

from kvmover.tiers.consensus import Alone, Consensus, Grouped
from kvmover.tiers.controller import Controller, Setup
from kvmover.tiers.errors import ConsensusBroken, TierError
from kvmover.tiers.holding import Holding, page_tokens, part_of
from kvmover.tiers.hostmem import SOLE, Share, host_pool, unlink
from kvmover.tiers.meter import Count, Gauge, Meter, Snapshot, Stage
from kvmover.tiers.policy import (
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
from kvmover.tiers.rate import Rate
from kvmover.tiers.restore import Phase, Restore
from kvmover.tiers.rules import ALL_PAGES, LAST_PAGE, Rule, restorable
from kvmover.tiers.storage import Storage

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
