"""The engine of a location that is no directory, chosen by its prefix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvmover.errors import StoreError
from kvmover.store.bucket.namespaces import bucket_namespaces, bucket_of_namespace, open_bucket
from kvmover.store.keeper.keeper_objects import keeper_namespaces, keeper_of_namespace, open_keeper
from kvmover.store.location import KEEPER, POOL
from kvmover.store.manifest import Found
from kvmover.store.mooncake.pool_objects import open_pool, pool_namespaces, pool_of_namespace
from kvmover.store.namespace import Namespace
from kvmover.store.objects import Objects
from kvmover.store.store_policy import PageEviction, Policy


class _Service(NamedTuple):
    open: Callable[[str, Namespace, Policy], Objects[Any]]
    of_found: Callable[[Found, Policy], Objects[Any]]
    namespaces: Callable[[str], list[Found]]


_BUCKET = _Service(open_bucket, bucket_of_namespace, bucket_namespaces)
_OTHERS = {
    POOL: _Service(open_pool, pool_of_namespace, pool_namespaces),
    KEEPER: _Service(open_keeper, keeper_of_namespace, keeper_namespaces),
}


def open_service(location: str, namespace: Namespace, policy: Policy) -> Objects[Any]:
    """Open the pages of `namespace` at a location. Raises StoreError, also for an eviction that it does not have."""
    if policy.eviction is not PageEviction.LRU:
        raise StoreError(
            f"{location} evicts whole segments or slabs by their last use: eviction = {policy.eviction.value!r} is of"
            " directories"
        )
    return _at(location).open(location, namespace, policy)


def service_of_found(found: Found, policy: Policy) -> Objects[Any]:
    """Open a namespace found at a location, for tools that know no model. Raises StoreError."""
    return _at(str(found.folder)).of_found(found, policy)


def service_namespaces(location: str) -> list[Found]:
    """List every namespace at a location, by model. Raises StoreError."""
    return _at(location).namespaces(location)


def _at(location: str) -> _Service:
    return next((service for scheme, service in _OTHERS.items() if location.startswith(scheme)), _BUCKET)
