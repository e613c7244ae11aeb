"""Which engine is under a location that is no directory, by how it begins: an object store, or a keeper's memory."""

from __future__ import annotations

from typing import Any

from kvmover.store.bucket.namespaces import bucket_namespaces, bucket_of_namespace, open_bucket
from kvmover.store.keeper.namespaces import keeper_namespaces, keeper_of_namespace, open_keeper
from kvmover.store.location import KEEPER
from kvmover.store.manifest import Found
from kvmover.store.namespace import Namespace
from kvmover.store.objects import Objects
from kvmover.store.policy import Policy


def open_service(location: str, namespace: Namespace, policy: Policy) -> Objects[Any]:
    """The pages of `namespace` at a location. Raises StoreError."""
    opened = open_keeper if location.startswith(KEEPER) else open_bucket
    return opened(location, namespace, policy)


def service_of_found(found: Found, policy: Policy) -> Objects[Any]:
    """A namespace that was found at a location, for tools that know no model. Raises StoreError."""
    opened = keeper_of_namespace if str(found.folder).startswith(KEEPER) else bucket_of_namespace
    return opened(found, policy)


def service_namespaces(location: str) -> list[Found]:
    """Every namespace at a location, by model. Raises StoreError."""
    return keeper_namespaces(location) if location.startswith(KEEPER) else bucket_namespaces(location)
