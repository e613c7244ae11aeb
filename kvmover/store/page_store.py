"""A PageStore is one namespace of pages, opened: views of its parts, and its upkeep, on whatever keeps its objects."""

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

#: How the objects of a namespace are opened. Raises StoreError.
Opens = Callable[[Namespace], Objects[Any]]


class PageStore:
    """Pages of one namespace as checked objects, which any number of processes share.

    Safe for one thread that asks, one that reads and one that writes.

    Nothing here owns a thread: `collect` every few seconds keeps quota and TTL, and writes down what was read; `flush`
    makes pages safe from a power cut and shows them to other machines. Without either nothing is ever wrong.
    """

    def __init__(self, name: str, objects: Objects[Any], opens: Opens | None = None) -> None:
        """A namespace by its name, for tools that know no model, and what keeps its objects, which the store closes.

        `open` is for everybody else. `opens`: how the objects of another namespace are had, for `become`.
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
        """The pages of `namespace` under `root`: a directory that exists, or as text who keeps them. None: no pages.

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
        """The segments of a directory, by the digest of their namespace. Raises OSError."""
        return cls(folder.name, SegmentObjects(folder, namespace, policy or Policy(), PlainFiles(), this_boot()))

    @classmethod
    def of_found(cls, found: Found, policy: Policy | None = None) -> PageStore:
        """A namespace that `namespaces` found, for tools that know no model. Raises OSError or StoreError."""
        if isinstance(found.folder, Path):
            return cls.of_folder(found.folder, found.digest, policy)
        return cls(found.name, service_of_found(found, policy or Policy()))

    def become(self, namespace: Namespace | None) -> None:
        """Leave the namespace and go on in another; None: in none, as where nobody knows which weights are served.

        Operations under way end where they began, before this returns. Views stay with the namespace that they were
        made for: they find nothing and put nothing from now on, and `view` makes others. Registered memory and watchers
        stay. In none every put fails, nothing is found and nothing is written.
        Raises StoreError where the other namespace cannot be opened, or the store is closed or was opened for tools:
        then it is in none.
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
        """The objects of the namespace that the store is in now."""
        return self._tenure.objects

    @property
    def counters(self) -> Counters:
        """The counts of this process since it opened the store, or the store went on to another namespace."""
        return self.objects.counters

    @property
    def recovered(self) -> Recovered:
        """What opening found."""
        return self.objects.recovered

    def register(self, memory: Memory) -> None:
        """Pages may be read into and written from `memory`, which the caller keeps. Raises DescriptorError."""
        with self._changing:
            self.objects.register(memory)
            self._memories.append(memory)

    def deregister(self, memory: Memory) -> None:
        """No page goes to or comes from `memory` any more. Raises DescriptorError for what is not registered."""
        with self._changing:
            self.objects.deregister(memory)
            self._memories.remove(memory)

    def view(self, namespace: Namespace, part: PagePart, writes: Election | None = None) -> PartView:
        """One rank's access: the `part` that it holds of each page. `writes` says which pages it is elected for.

        A store in no namespace gives views in which nothing is, of any.
        """
        with self._changing:
            if self.name and namespace.folder != self.name:
                raise StoreError(f"{namespace} is not what is stored in {self.name}")
            return PartView(self._tenure, part, part.key(namespace), writes)

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of every page that loses an object, by whoever's hand, as soon as this process knows of it.

        The caller keeps it; the store lets go of it with the caller.
        """
        with self._changing:
            self._watchers.add(watcher)
            self.objects.watch(watcher)

    def used(self, pages: Sequence[bytes]) -> None:
        """Pages were used elsewhere, in this order: they are the last to be evicted."""
        with self._tenure.using() as objects:
            objects.used(pages)

    def evict(self, nbytes: int) -> int:
        """Evict the least recently read pages, whole, until `nbytes` bytes are free; the bytes freed."""
        with self._tenure.using() as objects:
            return objects.evict(nbytes)

    def collect(self) -> Collected:
        """Upkeep: write down what was read, take over dead writers, delete what is too old or too much.

        Raises nothing for what the system refuses: it is done another time.
        """
        with self._tenure.using() as objects:
            return objects.collect()

    def flush(self) -> None:
        """Make all pages safe from a power cut that were written here, or were there already when they were put.

        What was written here is then visible to other machines; what others wrote, once they flush. Raises StoreError:
        pages that the disk did not take are deleted, and the next put writes them again.
        """
        with self._tenure.using() as objects:
            objects.flush()

    def clear(self) -> int:
        """Delete every page of this namespace, and nothing else; how many. Raises StoreError."""
        with self._tenure.using() as objects:
            return objects.clear()

    def stat(self) -> Stat:
        """What the namespace holds now, objects of other processes included."""
        with self._tenure.using() as objects:
            return objects.stat()

    def verify(self, progress: Callable[[int], None] | None = None) -> Verified:
        """Read every object whole and delete those that are bad, as far as the budget goes: 32 an hour. `progress` gets
        the bytes of each.

        Raises OSError where a file is there and cannot be opened: nothing is deleted for that.
        """
        with self._tenure.using() as objects:
            return objects.verify(progress)

    def close(self) -> None:
        """Flush, and give everything back. Safe to call twice."""
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
