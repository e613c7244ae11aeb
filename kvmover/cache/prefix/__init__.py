"""Which pages already hold the KV of a prompt, on which tier, and which to give up next. Needs no torch."""

from kvmover.cache.prefix.components import FULL, Component, Sidecar, SlidingWindow, State
from kvmover.cache.prefix.config import DeviceOnly, Grain, WriteBack, WriteThrough
from kvmover.cache.prefix.copies import Transfer
from kvmover.cache.prefix.errors import InvariantBroken, PrefixError, StaleHandle
from kvmover.cache.prefix.hashes import Namespace
from kvmover.cache.prefix.insert import Insertion
from kvmover.cache.prefix.keys import Key, Units
from kvmover.cache.prefix.policy import EARNED, FIFO, LFU, LRU, POLICIES, PRIORITY, SLRU, Policy
from kvmover.cache.prefix.results import (
    ROOT,
    CopyOut,
    Free,
    Inserted,
    Leg,
    Load,
    Match,
    Outcome,
    Receipt,
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
    "Component",
    "CopyOut",
    "DeviceOnly",
    "Free",
    "Grain",
    "Inserted",
    "Insertion",
    "InvariantBroken",
    "Key",
    "Leg",
    "Load",
    "Match",
    "Namespace",
    "Outcome",
    "Policy",
    "PrefixError",
    "PrefixTree",
    "Receipt",
    "Sidecar",
    "Sizes",
    "SlidingWindow",
    "StaleHandle",
    "State",
    "Tier",
    "Transfer",
    "Units",
    "WriteBack",
    "WriteThrough",
]
