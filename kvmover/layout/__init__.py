"""Everything else computes with these values: spans, stripes, layouts, components, fleets and pools."""

from kvmover.layout.codec import Codec, Part
from kvmover.layout.component import DTYPE_BYTES, Component
from kvmover.layout.fleet import Coordinate, CpOrder, Fleet, Replica, Shard
from kvmover.layout.layout import Dim, Layout, axes_of, coalesce
from kvmover.layout.pool import Pool, PoolSpec
from kvmover.layout.positions import Positions, Stripe, common, normal, tokens_of
from kvmover.layout.span import EMPTY, Span
from kvmover.vocabulary import AXES, ORDERS, PACKED_AXES, PACKED_ORDER

__all__ = [
    "AXES",
    "DTYPE_BYTES",
    "EMPTY",
    "ORDERS",
    "PACKED_AXES",
    "PACKED_ORDER",
    "Codec",
    "Component",
    "Coordinate",
    "CpOrder",
    "Dim",
    "Fleet",
    "Layout",
    "Part",
    "Pool",
    "PoolSpec",
    "Positions",
    "Replica",
    "Shard",
    "Span",
    "Stripe",
    "axes_of",
    "coalesce",
    "common",
    "normal",
    "tokens_of",
]
