"""kvmover: moves the KV cache of running language models between memories that do not agree."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvmover import deprecated

if TYPE_CHECKING:
    from kvmover.layout import Component, CpOrder, Fleet, Layout, Pool, PoolSpec, Shard, Span, Stripe
    from kvmover.plan import Costs, Leg, Plan, Replicas, Route
    from kvmover.transfer import Gate, Model, Mover, MoverConfig, Place, Result, Transfer
    from kvmover.transport import LoopbackNetwork, LoopbackTransport, NixlTransport

__version__ = "0.1.0"

deprecated.install()

#: Public names by the module that defines them, imported on first use: `import kvmover` needs neither torch nor nixl.
_HOMES = {
    "kvmover.layout": ("Component", "CpOrder", "Fleet", "Layout", "Pool", "PoolSpec", "Shard", "Span", "Stripe"),
    "kvmover.plan": ("Costs", "Leg", "Plan", "Replicas", "Route"),
    "kvmover.transfer": ("Gate", "Model", "Mover", "MoverConfig", "Place", "Result", "Transfer"),
    "kvmover.transport": ("LoopbackNetwork", "LoopbackTransport", "NixlTransport"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Component",
    "Costs",
    "CpOrder",
    "Fleet",
    "Gate",
    "Layout",
    "Leg",
    "LoopbackNetwork",
    "LoopbackTransport",
    "Model",
    "Mover",
    "MoverConfig",
    "NixlTransport",
    "Place",
    "Plan",
    "Pool",
    "PoolSpec",
    "Replicas",
    "Result",
    "Route",
    "Shard",
    "Span",
    "Stripe",
    "Transfer",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'kvmover' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
