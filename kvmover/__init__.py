"""kvmover: moves the KV cache of running language models between memories that do not agree."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvmover.vocabulary import HOME

if TYPE_CHECKING:
    from kvmover.cache.ledger import Ledger
    from kvmover.cache.prefix import PrefixTree
    from kvmover.kernels.region import Region
    from kvmover.layout import Component, CpOrder, Fleet, Layout, Pool, PoolSpec, Shard, Span, Stripe
    from kvmover.plan import Costs, Leg, Plan, Replicas, Route
    from kvmover.store import PageStore
    from kvmover.transfer import Gate, Model, Mover, MoverConfig, Place, Result, Transfer
    from kvmover.transport import LoopbackNetwork, LoopbackTransport, NixlTransport, Transport

__version__ = "0.1.0"

__all__ = [
    "Component",
    "Costs",
    "CpOrder",
    "Fleet",
    "Gate",
    "Layout",
    "Ledger",
    "Leg",
    "LoopbackNetwork",
    "LoopbackTransport",
    "Model",
    "Mover",
    "MoverConfig",
    "NixlTransport",
    "PageStore",
    "Place",
    "Plan",
    "Pool",
    "PoolSpec",
    "PrefixTree",
    "Region",
    "Replicas",
    "Result",
    "Route",
    "Shard",
    "Span",
    "Stripe",
    "Transfer",
    "Transport",
    "__version__",
]


#: Names are imported on first use: `import kvmover` needs neither torch nor nixl.
def __getattr__(name: str) -> object:
    if name not in HOME:
        raise AttributeError(f"module 'kvmover' has no attribute {name!r}")
    return getattr(import_module(HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
