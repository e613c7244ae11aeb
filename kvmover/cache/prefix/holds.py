"""Holds: what a receipt covers, by positions of a path, so that a split in between changes nothing."""

from __future__ import annotations

import msgspec

from kvmover.cache.prefix.actions import Tier
from kvmover.cache.prefix.node import Node


class Segment(msgspec.Struct, frozen=True):
    """Pages [first, stop) of a path, of the further component with this index."""

    index: int
    first: int
    stop: int


class Hold(msgspec.Struct, frozen=True):
    """What one receipt keeps: attention KV from the root to `node`, and segments of further components."""

    node: Node
    tier: Tier
    segments: tuple[Segment, ...]
