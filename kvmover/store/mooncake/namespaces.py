"""Namespaces of a pool of memory: a short list of manifests, for tools, and what opens one."""

from __future__ import annotations

from kvmover.errors import StoreError
from kvmover.store.manifest import Found, decode_manifest, encode_manifest, in_order
from kvmover.store.mooncake.address import PoolAddress
from kvmover.store.mooncake.client import Asker, PoolClient
from kvmover.store.mooncake.objects import MooncakeObjects
from kvmover.store.mooncake.short_list import ShortList
from kvmover.store.namespace import Namespace
from kvmover.store.policy import Policy

#: Characters of a namespace's folder, which an entry begins with.
_FOLDER = 32


def open_pool(location: str, namespace: Namespace, policy: Policy) -> MooncakeObjects:
    """The pages of `namespace` in the pool at a location. Raises StoreError."""
    address = PoolAddress.parse(location)
    pool = PoolClient.open(address)
    objects = _objects_of(pool, address, namespace.folder, policy)
    try:
        _manifests(pool, address).add(namespace.folder.encode() + encode_manifest(namespace))
    except OSError as error:
        objects.lag(error)  # for people and tools: pages do without
    return objects


def pool_of_namespace(found: Found, policy: Policy) -> MooncakeObjects:
    """A namespace that was found, for tools that know no model. Raises StoreError."""
    address = PoolAddress.parse(str(found.folder).removesuffix("/" + found.name))
    return _objects_of(PoolClient.open(address), address, found.name, policy)


def pool_namespaces(location: str) -> list[Found]:
    """Every namespace that was opened in a pool, by model. Raises StoreError."""
    address = PoolAddress.parse(location)
    pool = PoolClient.open(address.without_gift())
    try:
        entries = _manifests(pool, address).read(Asker.WORKER).values()
    except OSError as error:
        raise StoreError(f"cannot read {address.location}: {error.strerror}") from error
    finally:
        pool.close()
    known = [(name, decode_manifest(entry[_FOLDER:], name)) for entry in entries if (name := _name_in(entry))]
    return in_order([Found(f"{address.location}/{name}", manifest) for name, manifest in known if manifest])


def _objects_of(pool: PoolClient, address: PoolAddress, folder: str, policy: Policy) -> MooncakeObjects:
    try:
        return MooncakeObjects(pool, f"{address.prefix}/{folder}", policy)
    except StoreError:
        pool.close()
        raise


def _manifests(pool: PoolClient, address: PoolAddress) -> ShortList:
    return ShortList(pool, f"{address.prefix}/namespaces")


def _name_in(entry: bytes) -> str:
    return entry[:_FOLDER].decode("ascii", "replace")
