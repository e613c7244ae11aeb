"""A PageStore is an open namespace of pages: views of its parts, and its upkeep, on any storage engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any
from weakref import WeakSet

from kvmover.errors import DescriptorError, StoreError
from kvmover.store.boot import HostBoot, this_boot
from kvmover.store.files import Files, PlainFiles
from kvmover.store.manifest import Found, write_manifest
from kvmover.store.namespace import Namespace
from kvmover.store.objects import Objects, Watcher
from kvmover.store.part import PagePart
from kvmover.store.part_view import PartView
from kvmover.store.segment_objects import SegmentObjects
from kvmover.store.services import open_service, service_of_found
from kvmover.store.store_policy import Policy
from kvmover.store.store_results import Collected, Counters, Recovered, Stat, Verified
from kvmover.store.tenure import NOWHERE, NoObjects, Tenure
from kvmover.transport import Memory

Election = Callable[[bytes], bool]

#: Opens the objects of a namespace. Raises StoreError.
Opens = Callable[[Namespace], Objects[Any]]


class PageStore:
    """A store of one namespace's pages as checksummed objects, shared by any number of processes.

    Safe for one look-up thread, one reading and one writing thread.

    The store owns no upkeep thread: call `collect` every few seconds to enforce quota and TTL and store last-use times,
    and `flush` to make pages durable and visible to other machines. Reads stay correct without either.
    """

    def __init__(self, name: str, objects: Objects[Any], opens: Opens | None = None) -> None:
        """Wrap a namespace's objects, which the store then owns and closes; engines call `open` instead.

        `opens`: opens the objects of another namespace, for `become`.
        """
        self.name, self._opens = name, opens
        self._tenure, self._changing, self._is_closed = Tenure(objects), Lock(), False
        self._memories: list[Memory] = []
        self._watchers: WeakSet[Watcher] = WeakSet()

    @classmethod
    def open(
        cls,
        root: Path | str,
        namespace: Namespace | None,
        policy: Policy | None = None,
        files: Files | None = None,
        machine: HostBoot | None = None,
    ) -> PageStore:
        """Open the pages of `namespace` under `root`, an existing directory or a service's location; None: no pages.

        Raises StoreError. Files are read and written by `files`, which the store closes: by default through the page
        cache; `files_for` chooses NIXL where it is there. Only a directory has files and machines.
        """
        policy = policy or Policy()
        if isinstance(root, str):
            if files or machine:
                raise StoreError(f"{root} is no directory, and takes neither files nor a machine")
            opens: Opens = partial(open_service, root, policy=policy)
        else:
            opens = partial(_open_folder, root, policy, files or PlainFiles(), machine or this_boot())
        if namespace is None:
            return cls("", NoObjects(NOWHERE), opens)
        return cls(namespace.folder, opens(namespace), opens)

    @classmethod
    def of_folder(cls, folder: Path, namespace: bytes, policy: Policy | None = None) -> PageStore:
        """Open the segments of a directory by the digest of their namespace. Raises OSError."""
        return cls(folder.name, SegmentObjects(folder, namespace, policy or Policy(), PlainFiles(), this_boot()))

    @classmethod
    def of_found(cls, found: Found, policy: Policy | None = None) -> PageStore:
        """Open a namespace that `namespaces` found, for tools that know no model. Raises OSError or StoreError."""
        if isinstance(found.folder, Path):
            return cls.of_folder(found.folder, found.digest, policy)
        return cls(found.name, service_of_found(found, policy or Policy()))

    def become(self, namespace: Namespace | None) -> None:
        """Switch to another namespace, or with None to an empty engine, as when the served weights are unknown.

        Waits for operations under way, which end in the old namespace. Its views miss every page from now on and fail
        every put; `view` makes new ones. Registered memory and watchers stay. In the empty engine every look-up
        misses and every put fails.
        Raises StoreError if the store is closed or was opened by name, or if the other namespace cannot be opened:
        then the empty engine stays.
        """
        with self._changing:
            if self._is_closed or self._opens is None:
                raise StoreError(f"the store of {self.name} is closed, or was opened by its name: it becomes no other")
            left, self._tenure, self.name = self._tenure, Tenure(NoObjects(NOWHERE)), ""
            left.end()
            if namespace is None:
                return
            objects = self._opens(namespace)
            try:
                for memory in self._memories:
                    objects.register(memory)
            except DescriptorError:
                objects.close()
                raise
            for watcher in self._watchers:
                objects.watch(watcher)
            self._tenure, self.name = Tenure(objects), namespace.folder

    @property
    def objects(self) -> Objects[Any]:
        """Returns the objects of the current namespace."""
        return self._tenure.objects

    @property
    def counters(self) -> Counters:
        """Returns this process's counts since the store was opened or last switched namespace."""
        return self.objects.counters

    @property
    def recovered(self) -> Recovered:
        """Returns the findings of opening."""
        return self.objects.recovered

    def register(self, memory: Memory) -> None:
        """Register `memory` for reads and puts; the caller keeps it alive. Raises DescriptorError if unreachable."""
        with self._changing:
            self.objects.register(memory)
            self._memories.append(memory)

    def deregister(self, memory: Memory) -> None:
        """Deregister `memory`. Raises DescriptorError unless it was registered."""
        with self._changing:
            self.objects.deregister(memory)
            self._memories.remove(memory)

    def view(self, namespace: Namespace, part: PagePart, writes: Election | None = None) -> PartView:
        """Returns a rank's access to its `part` of each page. `writes`: True for pages that it is elected to write.

        Raises StoreError for another namespace. A store on the empty engine returns an empty view of any namespace.
        """
        with self._changing:
            if self.name and namespace.folder != self.name:
                raise StoreError(f"{namespace} is not what is stored in {self.name}")
            return PartView(self._tenure, part, part.key(namespace), writes)

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of each page that loses an object to any process, once this process knows of it.

        Held by weak reference: the caller keeps it alive.
        """
        with self._changing:
            self._watchers.add(watcher)
            self.objects.watch(watcher)

    def used(self, pages: Sequence[bytes]) -> None:
        """Mark pages used outside the store, in this order: they are evicted last."""
        with self._tenure.using() as objects:
            objects.used(pages)

    def evict(self, nbytes: int) -> int:
        """Evict the least recently read pages, whole, until `nbytes` bytes are free. Returns the bytes freed."""
        with self._tenure.using() as objects:
            return objects.evict(nbytes)

    def collect(self) -> Collected:
        """Run upkeep: store last-use times, take over dead writers, expire old pages, evict to the quota.

        Work that the system refuses is left to a later call, without an error.
        """
        with self._tenure.using() as objects:
            return objects.collect()

    def flush(self) -> None:
        """Make durable all pages written here, or already present when they were put.

        Pages written here are then visible to other machines. Raises StoreError if the disk refused pages: these are
        deleted, and the next put writes them again.
        """
        with self._tenure.using() as objects:
            objects.flush()

    def clear(self) -> int:
        """Delete every page of this namespace. Returns their number. Raises StoreError."""
        with self._tenure.using() as objects:
            return objects.clear()

    def stat(self) -> Stat:
        """Returns the namespace's statistics, objects of other processes included."""
        with self._tenure.using() as objects:
            return objects.stat()

    def verify(self, progress: Callable[[int], None] | None = None) -> Verified:
        """Read every object whole and delete bad ones within the budget of 32 an hour.

        `progress` is called with the bytes of each. Raises OSError if an existing file cannot be opened; its objects
        stay.
        """
        with self._tenure.using() as objects:
            return objects.verify(progress)

    def close(self) -> None:
        """Flush and release all resources. Idempotent."""
        with self._changing:
            self._is_closed = True
            self.objects.close()

    def __enter__(self) -> PageStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_folder(root: Path, policy: Policy, files: Files, machine: HostBoot, namespace: Namespace) -> SegmentObjects:
    folder = root / namespace.folder
    try:
        if not root.is_dir():
            raise StoreError(f"{root} is not a directory")
        if folder.is_symlink():
            raise StoreError(f"{folder} is a link, which may lead anywhere")
        folder.mkdir(exist_ok=True)
        if os.access(folder, os.W_OK):
            write_manifest(folder, namespace)
        return SegmentObjects(folder, namespace.digest, policy, files, machine)
    except OSError as error:
        raise StoreError(f"cannot open the page store in {folder}: {error.strerror}") from error
