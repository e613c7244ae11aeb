"""The page store: checked objects in files, shared by fleets of any shape. Loads neither torch nor nixl."""

from kvmover.store.identity import HASH_BYTES, Namespace
from kvmover.store.machine import Machine, this_machine
from kvmover.store.manifest import Found, namespaces
from kvmover.store.part import Box, Part, elected, replicas
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
from kvmover.store.store import PageStore, Policy
from kvmover.store.view import PartView

__all__ = [
    "HASH_BYTES",
    "Box",
    "Collected",
    "Counters",
    "Found",
    "Got",
    "GotResult",
    "Machine",
    "Namespace",
    "PageStore",
    "Part",
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
