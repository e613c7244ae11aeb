"""The prefix tree knows which pages hold the KV of a prompt, on which tier, and which go next. Needs no torch."""

from kvmover.cache.prefix.components import FULL, Sidecar, SlidingWindow, State, TreeComponent
from kvmover.cache.prefix.config import DeviceOnly, EvictionGranularity, WriteBack, WriteThrough
from kvmover.cache.prefix.copies import TierCopy
from kvmover.cache.prefix.errors import InvariantBroken, PrefixError, StaleHandle
from kvmover.cache.prefix.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    Medium,
    coalesce,
)
from kvmover.cache.prefix.hashes import PrefixNamespace
from kvmover.cache.prefix.keys import KeyUnits, RadixKey
from kvmover.cache.prefix.policy import EARNED, FIFO, LFU, LRU, POLICIES, PRIORITY, SLRU, EvictionPolicy
from kvmover.cache.prefix.publisher import EventPublisher
from kvmover.cache.prefix.results import (
    ROOT,
    ActionList,
    CopyLeg,
    CopyOut,
    FreePages,
    Inserted,
    LoadBack,
    LockHandle,
    Match,
    Sizes,
    Tier,
)
from kvmover.cache.prefix.tree import PrefixTree

__all__ = [
    "EARNED",
    "FIFO",
    "FULL",
    "LFU",
    "LRU",
    "POLICIES",
    "PRIORITY",
    "ROOT",
    "SLRU",
    "ActionList",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CopyLeg",
    "CopyOut",
    "DeviceOnly",
    "EventPublisher",
    "EvictionGranularity",
    "EvictionPolicy",
    "FreePages",
    "Inserted",
    "InvariantBroken",
    "KVEvent",
    "KVEventBatch",
    "KeyUnits",
    "LoadBack",
    "LockHandle",
    "Match",
    "Medium",
    "PrefixError",
    "PrefixNamespace",
    "PrefixTree",
    "RadixKey",
    "Sidecar",
    "Sizes",
    "SlidingWindow",
    "StaleHandle",
    "State",
    "Tier",
    "TierCopy",
    "TreeComponent",
    "WriteBack",
    "WriteThrough",
    "coalesce",
]
