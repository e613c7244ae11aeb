"""TierParts are the parts of one rank's tiers that all its operations share."""

from __future__ import annotations

from dataclasses import dataclass

from kvmover.cache.peers import PeerTier
from kvmover.cache.tiers.agreement import CollectiveOps
from kvmover.cache.tiers.allocator import PageAllocator
from kvmover.cache.tiers.tier_metrics import TierMeter
from kvmover.cache.tiers.tier_policy import TierPolicy
from kvmover.cache.tiers.tier_storage import Storage, StorageWorker


@dataclass(frozen=True, slots=True)
class TierParts:
    """The dependencies of backups and restores. `storage` and `peers` are None without such a tier."""

    allocator: PageAllocator
    storage: Storage | None
    worker: StorageWorker
    collectives: CollectiveOps
    policy: TierPolicy
    meter: TierMeter
    peers: PeerTier | None = None
