"""Old import paths and names work for one release, and warn of where the thing is now.

>>> new_place("kvmover.prefix.hashes")
'kvmover.cache.prefix.hashes'
>>> new_name("kvmover.prefix", "Key")
'RadixKey'
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

#: Packages by their old path, with what is called otherwise now. What lies below one is found below its new path.
MOVED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "kvmover.ledger": (
        "kvmover.cache.ledger",
        {
            "Fault": "FaultPolicy",
            "Group": "AccountGroup",
            "Histogram": "DurationHistogram",
            "Phase": "AttemptPhase",
            "Window": "TimeWindow",
        },
    ),
    "kvmover.prefix": (
        "kvmover.cache.prefix",
        {
            "Component": "TreeComponent",
            "Free": "FreePages",
            "Grain": "EvictionGranularity",
            "Key": "RadixKey",
            "Leg": "CopyLeg",
            "Load": "LoadBack",
            "Namespace": "PrefixNamespace",
            "Outcome": "ActionList",
            "Policy": "EvictionPolicy",
            "Receipt": "LockHandle",
            "Transfer": "TierCopy",
            "Units": "KeyUnits",
        },
    ),
    "kvmover.replay": (
        "kvmover.cache.replay",
        {
            "Request": "ReplayRequest",
            "Setup": "ReplayConfig",
            "SetupError": "ReplayConfigError",
            "TraceError": "ReplayTraceError",
        },
    ),
    "kvmover.tiers": (
        "kvmover.cache.tiers",
        {
            "Alone": "LocalConsensus",
            "Count": "TierCount",
            "Gauge": "TierGauge",
            "Holding": "TieredPool",
            "Meter": "TierMeter",
            "Phase": "RestorePhase",
            "Policy": "TierPolicy",
            "Setup": "ControllerConfig",
            "Snapshot": "TierSnapshot",
            "Stage": "TierStage",
        },
    ),
}


#: Modules whose contents another one has now, in packages that stayed or below a new path.
MERGED: Mapping[str, str] = {
    "kvmover.cache.ledger.metrics": "kvmover.cache.ledger.export",
    "kvmover.cache.ledger.residency": "kvmover.cache.ledger.export",
    "kvmover.cache.prefix.c_core": "kvmover.c_core",
    "kvmover.cache.prefix.core": "kvmover.cache.prefix.forest",
    "kvmover.cache.prefix.errors": "kvmover.errors",
    "kvmover.cache.prefix.joins": "kvmover.cache.prefix.match",
    "kvmover.cache.prefix.native": "kvmover.c_core",
    "kvmover.cache.prefix.plain": "kvmover.cache.prefix.plain_tree",
    "kvmover.cache.prefix.publisher": "kvmover.cache.prefix.events",
    "kvmover.cache.replay.agentic": "kvmover.cache.replay.mooncake",
    "kvmover.cache.replay.reader": "kvmover.cache.replay.trace_reader",
    "kvmover.cache.replay.request": "kvmover.cache.replay.trace_reader",
    "kvmover.cache.tiers.copies": "kvmover.cache.tiers.layerwise_copier",
    "kvmover.cache.tiers.errors": "kvmover.errors",
    "kvmover.cache.tiers.hostmem": "kvmover.cache.tiers.host_memory",
    "kvmover.cache.tiers.loading": "kvmover.cache.tiers.gated_loads",
    "kvmover.cache.tiers.rate": "kvmover.cache.tiers.policy",
    "kvmover.cache.tiers.restore": "kvmover.cache.tiers.restore_driver",
    "kvmover.cache.tiers.restoring": "kvmover.cache.tiers.restore_machine",
    "kvmover.cache.tiers.rules": "kvmover.cache.prefix.components",
    "kvmover.cache.tiers.writing": "kvmover.cache.tiers.backup",
    "kvmover.config.keys": "kvmover.config.settings",
    "kvmover.kernels.config": "kvmover.kernels.launch",
    "kvmover.kernels.driver": "kvmover.kernels.cuda_driver",
    "kvmover.kernels.ring": "kvmover.kernels.bulk_ring",
    "kvmover.needs": "kvmover.errors",
    "kvmover.observe.start": "kvmover.observe.observers",
    "kvmover.store.upkeep": "kvmover.store.command",
    "kvmover.transport.memory": "kvmover.transport.base",
}


def package_of(path: str) -> str | None:
    """The package that has moved and that a module of old belongs to; None for one that has not moved."""
    package = ".".join(path.split(".")[:2]) if path.startswith("kvmover.") else ""
    return package if package in MOVED else None


def new_place(path: str) -> str | None:
    """Where a module is that was at `path`; None for one that has not moved."""
    package = package_of(path)
    place = MOVED[package][0] + path.removeprefix(package) if package else path
    return MERGED.get(place, place if package else None)


def new_name(path: str, name: str) -> str:
    """What `name` of the module that was at `path` is called now."""
    package = package_of(path)
    return MOVED[package][1].get(name, name) if package else name


class _Alias(ModuleType):
    """A module under its old path. Names are looked up in the new one, so that a class stays one class."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        place, found = new_place(self.__name__), new_name(self.__name__, name)
        value = getattr(import_module(str(place)), found)
        _warn(f"{self.__name__}.{name}", f"{place}.{found}", 3)
        return value


class _Finder:
    """Asked before all others: folders of the old name, empty but for bytecode, are no packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        place = new_place(fullname)
        if place is None:
            return None
        from importlib.util import find_spec

        return ModuleSpec(fullname, cast(Any, self), is_package=True) if find_spec(place) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        place = new_place(module.__name__)
        module.__doc__ = import_module(str(place)).__doc__
        _warn(module.__name__, str(place), 3)


def _warn(old: str, new: str, stacklevel: int) -> None:
    """At the line of the caller's that uses the old one: the import system's frames are not counted."""
    text = f"{old} is {new} now; the old name goes with the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)


def install() -> None:
    """Make the old paths importable, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def renamed(module: str, name: str, names: Mapping[str, str]) -> object:
    """What `module` has under the new name of `name`, which warns; for its `__getattr__`. `names`: new by old names.

    Raises AttributeError for a name that `module` never had.
    """
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _warn(f"{module}.{name}", names[name], 4)
    return getattr(import_module(module), names[name])
