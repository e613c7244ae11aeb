"""The namespaces of an object store: folders under a location, opened for a model or listed for tools."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from operator import attrgetter

from kvmover.errors import StoreError
from kvmover.store.bucket.bucket_objects import BucketObjects
from kvmover.store.bucket.sealed import HEAD
from kvmover.store.bucket.service import ObjectBucket, PutMode
from kvmover.store.deletion import DeletionDoor, Look, Seen, TwoLooks
from kvmover.store.manifest import (
    MANIFEST,
    Found,
    Manifest,
    decode_manifest,
    encode_manifest,
    in_order,
    must_stay,
    unknown,
)
from kvmover.store.namespace import Namespace
from kvmover.store.record import PREAMBLE_BYTES, Preamble
from kvmover.store.store_policy import Policy


def open_bucket(location: str, namespace: Namespace, policy: Policy) -> BucketObjects:
    """Open `namespace` under a location and write its manifest if missing. Raises StoreError if it cannot be listed."""
    bucket = ObjectBucket.open(location)
    objects = BucketObjects(bucket, namespace.folder, namespace.digest, policy)
    try:
        path = f"{namespace.folder}/{MANIFEST}"
        if not _must_stay(bucket, namespace.folder):
            bucket.put(path, encode_manifest(namespace), PutMode.OVERWRITE)
    except OSError as error:
        objects.lag(error)  # manifests serve people and tools, and credentials may be read-only
    return objects


def bucket_of_namespace(found: Found, policy: Policy) -> BucketObjects:
    """Open a found namespace without knowing its model, for tools. Raises StoreError if it cannot be listed."""
    bucket = ObjectBucket.open(str(found.folder).removesuffix("/" + found.name))
    return BucketObjects(bucket, found.name, found.digest, policy)


def bucket_namespaces(location: str) -> list[Found]:
    """Return every namespace under a location, sorted by model. Raises StoreError if the service fails."""
    bucket = ObjectBucket.open(location)
    try:
        folders = [name for name in bucket.folders() if re.fullmatch("[0-9a-f]{32}", name)]
        known = [(name, _manifest(bucket, name) or _by_heads(bucket, name)) for name in folders]
    except OSError as error:
        raise StoreError(f"cannot read {location}: {error.strerror}") from error
    finally:
        bucket.close()
    return in_order([Found(f"{bucket.location}/{name}", manifest) for name, manifest in known if manifest])


def empty_unused(location: str, names: Sequence[str], unused_s: float, spare: str) -> set[str]:
    """Empty the namespaces in folders `names` unused for `unused_s` seconds, except `spare`; manifests stay.

    Returns the emptied folders. Raises StoreError if the location cannot be opened, OSError if a request fails. A
    namespace's last use is the modification time of its youngest object, by the service's clock; the youngest object
    of all bounds the local clock.
    """
    bucket, door = ObjectBucket.open(location), DeletionDoor(time.time())
    try:
        listings = {name: bucket.list(name) for name in names}
        youngest = {name: max((each.modified_s for each in all_), default=0.0) for name, all_ in listings.items()}
        before_s = min(time.time(), max(youngest.values(), default=0.0)) - unused_s
        emptied = set[str]()
        for name, entries in listings.items():
            gone = [each.name for each in entries if not each.name.endswith(MANIFEST)]
            if name == spare or youngest[name] >= before_s or not gone:
                continue
            looks = TwoLooks(Look(Seen.LISTING, "unused"), Look(Seen.NAME, "unused"), 0)
            if bucket.modified_s(max(entries, key=attrgetter("modified_s")).name) >= before_s:
                continue
            if (permit := door.ask(looks, len(gone), time.time())) is None:
                continue
            bucket.delete_all(sorted(gone, key=lambda path: not path.endswith(HEAD)), permit)  # heads before data
            emptied.add(name)
        return emptied
    finally:
        bucket.close()


def _must_stay(bucket: ObjectBucket, folder: str) -> bool:
    try:
        return must_stay(bucket.get(f"{folder}/{MANIFEST}"), folder)
    except FileNotFoundError:
        return False


def _manifest(bucket: ObjectBucket, folder: str) -> Manifest | None:
    try:
        return decode_manifest(bucket.get(f"{folder}/{MANIFEST}"), folder)
    except FileNotFoundError:
        return None


def _by_heads(bucket: ObjectBucket, folder: str) -> Manifest | None:
    """Return a manifest with the digest alone, from the first head that belongs to this folder. Raises OSError."""
    for entry in bucket.list(folder):
        if entry.name.endswith(HEAD):
            preamble = Preamble.decode(bytes(bucket.read(entry.name, 0, PREAMBLE_BYTES)))
            if preamble and preamble.namespace[:16].hex() == folder:
                return unknown(preamble.namespace)
    return None
