"""Which pages already hold the KV of a prompt, on which tier, and which to give up next. Needs no torch."""

from kvmover.prefix.actions import (
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
from kvmover.prefix.components import FULL, Component, Sidecar, SlidingWindow, State
from kvmover.prefix.errors import InvariantBroken, PrefixError, StaleHandle
from kvmover.prefix.flight import Transfer
from kvmover.prefix.insert import Insertion
from kvmover.prefix.keys import Key, Units
from kvmover.prefix.namespace import Namespace
from kvmover.prefix.policy import EARNED, FIFO, LFU, LRU, POLICIES, PRIORITY, SLRU, Policy
from kvmover.prefix.shape import DeviceOnly, Grain, WriteBack, WriteThrough
from kvmover.prefix.tree import PrefixTree

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
