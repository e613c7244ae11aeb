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
    block_removed,
    block_stored,
    coalesce,
)
from kvmover.cache.prefix.hashes import PrefixNamespace, TokenIds, chain
from kvmover.cache.prefix.keys import DEFAULT_NAMESPACE, NO_IDS, KeyUnits, PageIds, RadixKey
from kvmover.cache.prefix.policy import EARNED, FIFO, LFU, LRU, POLICIES, PRIORITY, SLRU, EvictionPolicy
from kvmover.cache.prefix.publisher import EventPublisher
from kvmover.cache.prefix.results import (
    ROOT,
    ActionList,
    CopyLeg,
    CopyOut,
    Extended,
    FreePages,
    Inserted,
    LoadBack,
    LockHandle,
    Match,
    PageArray,
    Sizes,
    Tier,
)
from kvmover.cache.prefix.rules import ALL_PAGES, LAST_PAGE, Rule, restorable
from kvmover.cache.prefix.tree import PrefixTree

__all__ = [
    "ALL_PAGES",
    "DEFAULT_NAMESPACE",
    "EARNED",
    "FIFO",
    "FULL",
    "LAST_PAGE",
    "LFU",
    "LRU",
    "NO_IDS",
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
    "Extended",
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
    "PageArray",
    "PageIds",
    "PrefixError",
    "PrefixNamespace",
    "PrefixTree",
    "RadixKey",
    "Rule",
    "Sidecar",
    "Sizes",
    "SlidingWindow",
    "StaleHandle",
    "State",
    "Tier",
    "TierCopy",
    "TokenIds",
    "TreeComponent",
    "WriteBack",
    "WriteThrough",
    "block_removed",
    "block_stored",
    "chain",
    "coalesce",
    "restorable",
]
