"""The page store keeps checked objects in files, shared by fleets of any shape. Loads neither torch nor nixl."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvmover.deprecated import renamed

if TYPE_CHECKING:
    from kvmover.store.machine import Machine, this_machine
    from kvmover.store.namespace import HASH_BYTES, Found, Namespace, namespaces
    from kvmover.store.part import PageBox, PagePart, elected, replicas
    from kvmover.store.policy import Policy
    from kvmover.store.results import (
        Collected,
        Counters,
        Got,
        GotResult,
        Put,
        PutResult,
        Recovered,
        Stat,
        Verified,
    )
    from kvmover.store.store import PageStore
    from kvmover.store.view import PartView

#: Public names by the module that defines them, imported on first use: settings want a Policy and no store.
_HOMES = {
    "namespace": ("HASH_BYTES", "Found", "Namespace", "namespaces"),
    "machine": ("Machine", "this_machine"),
    "part": ("PageBox", "PagePart", "elected", "replicas"),
    "policy": ("Policy",),
    "results": (
        "Collected",
        "Counters",
        "Got",
        "GotResult",
        "Put",
        "PutResult",
        "Recovered",
        "Stat",
        "Verified",
    ),
    "store": ("PageStore",),
    "view": ("PartView",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "HASH_BYTES",
    "Collected",
    "Counters",
    "Found",
    "Got",
    "GotResult",
    "Machine",
    "Namespace",
    "PageBox",
    "PagePart",
    "PageStore",
    "PartView",
    "Policy",
    "Put",
    "PutResult",
    "Recovered",
    "Stat",
    "Verified",
    "elected",
    "namespaces",
    "replicas",
    "this_machine",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        return renamed(__name__, name, {"Box": "PageBox", "Part": "PagePart"})
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
