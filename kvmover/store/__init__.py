"""The page store keeps checksummed objects in files shared by ranks of any parallelism; loads no torch or nixl."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmover.faces import public

if TYPE_CHECKING:
    from kvmover.store.boot import HostBoot, this_boot
    from kvmover.store.command import (
        StoreRow,
        chosen_stores,
        clear_stores,
        collect_stores,
        stat_stores,
        verify_stores,
    )
    from kvmover.store.files import DIRECT_BYTES, Access, FileRun, Files, OpenFile, PlainFiles, memory_of_buffer
    from kvmover.store.keeper.keeper_metrics import KeeperCollector, KeeperSnapshot
    from kvmover.store.keeper.server import KeeperServer, serve_keeper
    from kvmover.store.location import is_keeper, is_service, store_location
    from kvmover.store.manifest import Found, namespaces
    from kvmover.store.namespace import HASH_BYTES, Namespace
    from kvmover.store.nixl_files import NixlFiles, StoragePlugin, files_for
    from kvmover.store.page_store import PageStore, PartView
    from kvmover.store.part import PageBox, PagePart, elected, replicas
    from kvmover.store.store_metrics import StoreCollector
    from kvmover.store.store_policy import PageEviction, Policy
    from kvmover.store.store_results import (
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
    from kvmover.store.unused import clear_unused

#: Public names by defining module, imported on first use: settings need a Policy without loading the store.
_HOMES = {
    "command": ("StoreRow", "chosen_stores", "clear_stores", "collect_stores", "stat_stores", "verify_stores"),
    "files": ("DIRECT_BYTES", "Access", "FileRun", "Files", "OpenFile", "PlainFiles", "memory_of_buffer"),
    "keeper.keeper_metrics": ("KeeperCollector", "KeeperSnapshot"),
    "keeper.server": ("KeeperServer", "serve_keeper"),
    "location": ("is_keeper", "is_service", "store_location"),
    "manifest": ("Found", "namespaces"),
    "namespace": ("HASH_BYTES", "Namespace"),
    "nixl_files": ("NixlFiles", "StoragePlugin", "files_for"),
    "part": ("PageBox", "PagePart", "elected", "replicas"),
    "store_metrics": ("StoreCollector",),
    "store_policy": ("PageEviction", "Policy"),
    "store_results": (
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
    "boot": ("HostBoot", "this_boot"),
    "page_store": ("PageStore", "PartView"),
    "unused": ("clear_unused",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DIRECT_BYTES",
    "HASH_BYTES",
    "Access",
    "Collected",
    "Counters",
    "FileRun",
    "Files",
    "Found",
    "Got",
    "GotResult",
    "HostBoot",
    "KeeperCollector",
    "KeeperServer",
    "KeeperSnapshot",
    "Namespace",
    "NixlFiles",
    "OpenFile",
    "PageBox",
    "PageEviction",
    "PagePart",
    "PageStore",
    "PartView",
    "PlainFiles",
    "Policy",
    "Put",
    "PutResult",
    "Recovered",
    "Stat",
    "StoragePlugin",
    "StoreCollector",
    "StoreRow",
    "Verified",
    "chosen_stores",
    "clear_stores",
    "clear_unused",
    "collect_stores",
    "elected",
    "files_for",
    "is_keeper",
    "is_service",
    "memory_of_buffer",
    "namespaces",
    "replicas",
    "serve_keeper",
    "stat_stores",
    "store_location",
    "this_boot",
    "verify_stores",
]


def __getattr__(name: str) -> object:
    return public(__name__, _HOME, name)
