"""kvmover: moves the KV cache of running language models between memories that do not agree."""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

#: Public names by the module that defines them, imported on first use: `import kvmover` needs neither torch nor nixl.
_HOMES = {
    "kvmover.layout": ("Component", "CpOrder", "Fleet", "Layout", "Pool", "PoolSpec", "Shard", "Span", "Stripe"),
    "kvmover.plan": ("Costs", "Leg", "Plan", "Replicas", "Route"),
    "kvmover.transfer": ("Model", "Mover", "MoverConfig", "Place", "Result", "Transfer"),
    "kvmover.transport": ("LoopbackNetwork", "LoopbackTransport", "NixlTransport"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'kvmover' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
