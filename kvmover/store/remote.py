"""Stores that are no directory: which engine keeps the objects of a location, by how it begins."""

from __future__ import annotations

from typing import Any

from kvmover.store.bucket.namespaces import bucket_namespaces, bucket_of_namespace, open_bucket
from kvmover.store.location import is_pool
from kvmover.store.manifest import Found
from kvmover.store.mooncake.namespaces import open_pool, pool_namespaces, pool_of_namespace
from kvmover.store.namespace import Namespace
from kvmover.store.objects import Objects
from kvmover.store.policy import Policy


def open_remote(location: str, namespace: Namespace, policy: Policy) -> Objects[Any]:
    """The pages of `namespace` at a location. Raises StoreError."""
    opened = open_pool if is_pool(location) else open_bucket
    return opened(location, namespace, policy)


def remote_of_namespace(found: Found, policy: Policy) -> Objects[Any]:
    """A namespace that was found, for tools that know no model. Raises StoreError."""
    opened = pool_of_namespace if is_pool(str(found.folder)) else bucket_of_namespace
    return opened(found, policy)


def remote_namespaces(location: str) -> list[Found]:
    """Every namespace at a location, by model. Raises StoreError."""
    return pool_namespaces(location) if is_pool(location) else bucket_namespaces(location)
