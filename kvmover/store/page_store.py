"""A PageStore is an open namespace of pages: views of its parts, and its upkeep, on any storage engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any
from weakref import WeakSet

from kvmover.errors import DescriptorError, StoreError
from kvmover.store.boot import HostBoot, this_boot
from kvmover.store.files import Files, PlainFiles
from kvmover.store.manifest import Found, write_manifest
from kvmover.store.namespace import Namespace, check_page
from kvmover.store.objects import Failure, Fault, ObjectDraft, ObjectRead, Objects, Verdict, Watcher
from kvmover.store.part import ObjectShare, PagePart, PartKey, shares
from kvmover.store.segment_objects import SegmentObjects
from kvmover.store.services import open_service, service_of_found
from kvmover.store.store_policy import Policy
from kvmover.store.store_results import Collected, Counters, Got, GotResult, Put, PutResult, Recovered, Stat, Verified
from kvmover.store.tenure import NOWHERE, NoObjects, Tenure
from kvmover.transport import Memory

_WRITTEN, _PRESENT, _ELSEWHERE = (PutResult(put) for put in (Put.WRITTEN, Put.PRESENT, Put.ELSEWHERE))
#: Most read attempts of a page, even if a service keeps reporting it gone and then present.
_ROUNDS = 16
_READ, _ABSENT = GotResult(Got.READ), GotResult(Got.ABSENT)


class PartView:
    """A rank's view: pages move to and from memory packed `head layer kv token dim`, `part.nbytes` at each address.

    Every batch returns a result for each page, also on failures, so that ranks can agree on them. Once the store has
    left the view's namespace, every look-up misses and every put fails.
    """

    def __init__(
        self, tenure: Tenure, part: PagePart, key: PartKey, writes: Callable[[bytes], bool] | None = None
    ) -> None:
        self.part, self.writes = part, writes
        self._size = part.nbytes
        self._tenure, self._key = tenure, key
        self._plans: dict[tuple[PartKey, ...], tuple[ObjectShare, ...] | None] = {}

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        """Returns True for each page whose objects cover this part. Raises StoreError for a malformed hash."""
        for page in pages:
            check_page(page)
        with self._tenure.using() as objects:
            return [self._plan(parts) is not None for parts in objects.parts_of(pages, self._key)]

    def leading(self, pages: Sequence[bytes]) -> int:
        """Returns the number of leading pages that exist."""
        return sum(1 for _ in takewhile(bool, self.exists(pages)))

    def put(self, pages: Sequence[bytes], addresses: Sequence[int]) -> list[PutResult]:
        """Write absent pages. Raises StoreError or DescriptorError before any write."""
        with self._tenure.using() as objects:
            return self._put(objects, pages, addresses)

    def get(self, pages: Sequence[bytes], addresses: Sequence[int]) -> list[GotResult]:
        """Read pages. If an object is bad and other objects cover its share, these are read instead."""
        with self._tenure.using() as objects:
            return self._get(objects, pages, addresses)

    def _put(self, objects: Objects[Any], pages: Sequence[bytes], addresses: Sequence[int]) -> list[PutResult]:
        self._check(objects, pages, addresses)
        results: dict[int, PutResult] = {}
        todo = self._missing(objects, pages, results)
        if todo:
            drafts = [ObjectDraft(pages[item], addresses[item]) for item in todo]
            reasons = objects.put(self.part, self._key, drafts, pages)
            for item, reason in zip(todo, reasons, strict=True):
                results[item] = PutResult(Put.FAILED, reason) if reason else _WRITTEN
        first = {page: results[item] for item, page in reversed(list(enumerate(pages))) if item in results}
        answers = [results.get(item, _PRESENT if first[page].ok else first[page]) for item, page in enumerate(pages)]
        counters = objects.counters
        counters.puts.update(answer.outcome for answer in answers)
        counters.failed.update(answer.reason for answer in answers if not answer.ok)
        counters.written_bytes += self._size * sum(answer is _WRITTEN for answer in answers)
        return answers

    def _get(self, objects: Objects[Any], pages: Sequence[bytes], addresses: Sequence[int]) -> list[GotResult]:
        self._check(objects, pages, addresses)
        swept = objects.sweep(self.part, self._plan, pages, addresses)
        objects.used([pages[item] for item in swept])
        results = dict.fromkeys(swept, _READ)
        again: set[int] = set()
        pending = [item for item in range(len(pages)) if item not in results]
        for _ in range(_ROUNDS):
            if not pending:
                break
            reads = self._reads(objects, pending, pages, addresses)
            failures = objects.read(self.part, reads) if reads else []
            failed = {failure.read.item: self._judge(objects, failure, again) for failure in failures}
            done = [item for item in dict.fromkeys(read.item for read in reads) if item not in failed]
            objects.used([pages[item] for item in done])
            for item in pending:
                results.setdefault(item, _ABSENT)
            results.update(dict.fromkeys(done, _READ))
            results.update({item: answer for item, (answer, _) in failed.items()})
            # Bad objects are deleted by now; pages whose objects are well are read again.
            pending = sorted(item for item, (_, retry) in failed.items() if retry)
        objects.counters.gots.update(results[item].outcome for item in range(len(pages)))
        objects.counters.read_bytes += self._size * sum(result.ok for result in results.values())
        return [results[item] for item in range(len(pages))]

    def _check(self, objects: Objects[Any], pages: Sequence[bytes], addresses: Sequence[int]) -> None:
        if len(pages) != len(addresses):
            raise StoreError(f"{len(pages)} pages at {len(addresses)} addresses")
        for page in pages:
            check_page(page)
        if addresses:
            memory_at, low, high = objects.memory_at, min(addresses), max(addresses)
            try:
                memory_at(low, high - low + self._size)  # most batches lie in one pool
            except DescriptorError:
                for address in addresses:
                    memory_at(address, self._size)

    def _plan(self, parts: tuple[PartKey, ...]) -> tuple[ObjectShare, ...] | None:
        """Returns the shares of objects of `parts` that cover the part, or None. Cached: most pages are alike."""
        if parts not in self._plans:
            held = {n: key.box for n, key in enumerate(parts) if key.component == self._key.component}
            self._plans[parts] = shares(self._key.box, held)
        return self._plans[parts]

    def _missing(self, objects: Objects[Any], pages: Sequence[bytes], results: dict[int, PutResult]) -> list[int]:
        """Returns positions of the `pages` to write here; the rest have results, or repeat a page to write."""
        todo: dict[bytes, int] = {}
        owed: list[object] = []
        for item, (page, found) in enumerate(zip(pages, objects.find(pages, self._key), strict=True)):
            if found and (plan := self._plan(found.parts)):
                results[item] = _PRESENT
                owed += [found.objects[share.number] for share in plan]
            elif self.writes and not self.writes(page):
                results[item] = _ELSEWHERE
            else:
                todo.setdefault(page, item)
        objects.owe(owed)
        return list(todo.values())

    def _reads(
        self, objects: Objects[Any], pending: Sequence[int], pages: Sequence[bytes], addresses: Sequence[int]
    ) -> list[ObjectRead[Any]]:
        reads: list[ObjectRead[Any]] = []
        asked = objects.find([pages[item] for item in pending], self._key)
        for item, found in zip(pending, asked, strict=True):
            plan = self._plan(found.parts) if found else None
            if found and plan:
                for each in plan:
                    reads.append(ObjectRead(item, addresses[item], found.objects[each.number], each))
        return reads

    def _judge(self, objects: Objects[Any], failure: Failure[Any], again: set[int]) -> tuple[GotResult, bool]:
        """Returns the result of a failed read, and True if the page is to be read again.

        The object was deleted meanwhile; or is bad on a second look, and deleted; or is well, and read again. A refusal
        by the system is no evidence against it.
        """
        if failure.fault is Fault.HERE:
            return GotResult(Got.FAILED, failure.reason), False
        verdict, reason = objects.judge(failure)
        match verdict:
            case Verdict.UNKNOWN:
                return GotResult(Got.FAILED, reason), False
            case Verdict.WELL:
                item = failure.read.item
                retry = item not in again
                again.add(item)
                return GotResult(Got.FAILED, f"{failure.reason}, and well when it was looked at again"), retry
            case Verdict.GONE:
                return GotResult(Got.EVICTED, reason), True
            case Verdict.SPARED:
                return GotResult(Got.FAILED, f"{reason}, and left to others"), True
            case Verdict.BAD:
                return GotResult(Got.POISONED, reason), True


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
            try:
                objects.flush()
            except (OSError, StoreError):
                objects.counters.failed_flushes += 1
                raise

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
