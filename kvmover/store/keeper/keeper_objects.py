"""KeeperObjects stores the pages of a namespace in the memory of a keeper, which outlives this process.

A put returns once the keeper has committed it: from then on every process of the host can read it, even if this one
dies. A SlabWriter writes payloads into a granted slab, then requests the commit; dying in between leaves no object.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from urllib.parse import parse_qsl, unquote, urlsplit

from kvmover.errors import StoreError
from kvmover.store.deletion import DeletionDoor, Permit, TwoLooks
from kvmover.store.fetch import SegmentFailure, SegmentRead, fetch, suspects
from kvmover.store.files import FileRun, OpenFile, reason_of
from kvmover.store.judgement import JudgedObjects, judged, verified
from kvmover.store.keeper.journal import slab_name, slab_number
from kvmover.store.keeper.keeper_catalog import KeeperCatalog
from kvmover.store.keeper.link import KeeperLink, KeeperRefused, StoreFenced
from kvmover.store.keeper.messages import (
    LISTED,
    PACKET_BYTES,
    SPEAKS,
    Agreed,
    AllocateSlab,
    Attach,
    Cleared,
    ClearNamespace,
    CommitObjects,
    CommittedObject,
    KeeperRefusal,
    Listed,
    ListNamespaces,
    NoteUses,
    RemoveObjects,
    Request,
    SlabToFill,
    Trimmed,
    TrimNamespace,
)
from kvmover.store.manifest import Found, Manifest, decode_manifest, encode_manifest, in_order
from kvmover.store.namespace import Namespace
from kvmover.store.objects import ObjectDraft, Plan, Verdict, Watcher
from kvmover.store.part import PagePart, PartKey
from kvmover.store.record import DIGEST_BYTES, FIXED_BYTES, encode_part, table
from kvmover.store.store_policy import Policy
from kvmover.store.store_results import Collected, Counters, Recovered, Stat, Verified
from kvmover.store.stored import Page, StoredObject, padded
from kvmover.transport import Memory

log = logging.getLogger(__name__)

#: Upper bound of a commit packet's bytes besides its objects.
_BESIDE_BYTES = 512

#: A quota is divided into at least this many slabs, because slabs are evicted whole.
_SLABS = 8

#: Errors of a write to a slab that the keeper has sealed or taken back.
_SEALED = (errno.EPERM, errno.EBADF)


@dataclass(slots=True, eq=False)
class _FilledSlab:
    """A slab being filled, from byte `end` on."""

    number: int
    nbytes: int
    file: OpenFile
    end: int = 0


class SlabWriter:
    """A writer of one client's slab. Not thread-safe."""

    def __init__(self, catalog: KeeperCatalog, policy: Policy) -> None:
        self._catalog, self._policy = catalog, policy
        self._slab: _FilledSlab | None = None

    def put(self, part: PagePart, key: PartKey, drafts: Sequence[ObjectDraft], keep: Collection[bytes]) -> list[str]:
        """Write and commit objects. Returns for each "" or the reason of failure.

        A slab that the keeper took back is replaced and its batch retried once.
        """
        each_bytes = FIXED_BYTES + part.box.cells * DIGEST_BYTES + 64
        most = (PACKET_BYTES - _BESIDE_BYTES) // each_bytes
        if not most:
            return [f"{part.box.cells} cells are more than a keeper takes of a page"] * len(drafts)
        done, doubted = 0, False
        while done < len(drafts):
            try:
                slab = self._slab_for(padded(part.nbytes), keep)
                count = min(most, (slab.nbytes - slab.end) // padded(part.nbytes))
                some = drafts[done : done + count]
                self._put_some(slab, part, key, some)
            except (OSError, StoreFenced) as error:
                self._let_go()
                took_back = isinstance(error, KeeperRefused) and error.refusal is KeeperRefusal.GONE
                if doubted or not (took_back or getattr(error, "errno", 0) in _SEALED) or _is_fenced(error):
                    reason = reason_of(error) if isinstance(error, OSError) else str(error)
                    return [""] * done + [reason] * (len(drafts) - done)
                doubted = True
                continue
            done, doubted = done + len(some), False
        return [""] * done

    def _slab_for(self, nbytes: int, keep: Collection[bytes]) -> _FilledSlab:
        """Return the current slab, or a new one if it lacks room for `nbytes`. Raises OSError or StoreFenced."""
        link = self._catalog.link
        if link.fenced is not None:
            raise link.fenced
        if self._slab is not None and self._slab.nbytes - self._slab.end >= nbytes:
            return self._slab
        self._let_go()
        link.connect()
        quota = self._policy.quota_bytes
        size = min(link.slab_bytes, self._policy.segment_bytes)
        size = size if quota is None else min(size, quota // _SLABS)
        granted, fd = link.ask(AllocateSlab(nbytes, size, quota, self._slabs_of(keep)), SlabToFill)
        file = OpenFile.of_descriptor(fd, Path("/keeper") / slab_name(granted.slab))
        self._slab = _FilledSlab(granted.slab, granted.nbytes, file)
        return self._slab

    def _slabs_of(self, pages: Collection[bytes]) -> list[int]:
        index = self._catalog.index
        with self._catalog.lock:
            return sorted({slab_number(name) for name, _ in index.placed(index.pages_at(list(pages))).by_segment()})

    def _put_some(self, slab: _FilledSlab, part: PagePart, key: PartKey, drafts: Sequence[ObjectDraft]) -> None:
        """Write payloads and commit them at once. Raises OSError.

        Digests and writes alternate over few payloads, so that these are read from the CPU cache.
        """
        size, files = part.nbytes, self._catalog.files
        count = max(1, files.group_bytes // size)
        name, end = encode_part(key), slab.end
        objects: list[CommittedObject] = []
        for first in range(0, len(drafts), count):
            runs: list[FileRun] = []
            for draft in drafts[first : first + count]:
                digests = table(files.view(draft.address, size), part.box.cells)
                objects.append(CommittedObject(end, size, draft.page, name, digests))
                runs.append(FileRun(slab.file, end, draft.address, size))
                end += padded(size)
            for reason in files.write(runs):
                if reason:
                    raise OSError(_number_of(reason), reason)
        self._catalog.link.ask(CommitObjects(slab.number, objects), Agreed)
        slab.end = end

    def _let_go(self) -> None:
        if self._slab is not None:
            self._slab.file.close()
        self._slab = None

    def close(self) -> None:
        """Close the current slab. Idempotent."""
        self._let_go()


def _number_of(reason: str) -> int:
    """Return the errno of a failed write's reason if it says that the slab is sealed, else EIO."""
    return next((number for number in _SEALED if reason == os.strerror(number)), errno.EIO)


def _is_fenced(error: Exception) -> bool:
    return isinstance(error, StoreFenced) or (
        isinstance(error, KeeperRefused) and error.refusal is KeeperRefusal.FENCED
    )


#: Pages per NoteUses message.
_TOLD = 1024


class KeeperObjects(JudgedObjects[StoredObject]):
    """The objects of one namespace. `writing` is held during a put or trim, and acquired before the catalog's lock."""

    def __init__(self, link: KeeperLink, policy: Policy) -> None:
        """Take ownership of `link` and connect. Raises OSError, or StoreFenced if a newer generation owns the pages."""
        self.policy = policy
        self.catalog = KeeperCatalog(link)
        self.lock, self.writing = self.catalog.lock, RLock()
        self._writer = SlabWriter(self.catalog, policy)
        self._door = DeletionDoor(self._now())
        self.counters = Counters(lagged=self.catalog.lagged, deleted=self._door.deleted)
        self._used: dict[bytes, None] = {}
        try:
            self.catalog.sync()
        except BaseException:
            self.catalog.close()
            raise
        stat = self.stat()
        self.recovered = Recovered(stat.segments, stat.objects, {})

    @staticmethod
    def _now() -> int:
        return int(time.time())

    @property
    def name(self) -> str:
        return self.catalog.files.name

    def register(self, memory: Memory) -> None:
        self.catalog.files.register(memory)

    def deregister(self, memory: Memory) -> None:
        self.catalog.files.deregister(memory)

    def memory_at(self, address: int, nbytes: int) -> memoryview:
        return self.catalog.files.view(address, nbytes)

    def parts_of(self, pages: Sequence[bytes], wanted: PartKey) -> list[tuple[PartKey, ...]]:
        with self.lock:
            self.catalog.refresh()
            there, stale = self.catalog.index.parts_of(pages), self._stale(pages)
        return [() if page in stale else parts for page, parts in zip(pages, there, strict=True)]

    def find(self, pages: Sequence[bytes], wanted: PartKey) -> Sequence[Page | None]:
        with self.lock:
            self.catalog.refresh()
            entries, stale = self.catalog.index.get_many(pages), self._stale(pages)
        return [None if page in stale else entry for page, entry in zip(pages, entries, strict=True)]

    def _stale(self, pages: Sequence[bytes]) -> set[bytes]:
        """Return those of `pages` whose last known use is older than the TTL. Under the lock."""
        if self.policy.ttl_s is None:
            return set()
        before, stamps = self._now() - self.policy.ttl_s, self.catalog.index.stamps_of(pages)
        return {page for page, stamp in zip(pages, stamps, strict=True) if stamp < before}

    def put(self, part: PagePart, key: PartKey, drafts: Sequence[ObjectDraft], keep: Collection[bytes]) -> list[str]:
        with self.writing:
            self.catalog.try_sync()
            reasons = self._writer.put(part, key, drafts, keep)
            with self.lock:
                self.catalog.refresh()
            return reasons

    def owe(self, objects: Sequence[StoredObject]) -> None:
        """Return at once: committed objects outlive this process already."""

    def sweep(self, part: PagePart, plan: Plan, pages: Sequence[bytes], addresses: Sequence[int]) -> Collection[int]:
        with self.lock:
            self.catalog.refresh()
            stale = self._stale(pages)
        fresh = [item for item, page in enumerate(pages) if page not in stale] if stale else range(len(pages))
        try:
            came = self.catalog.sweep(part, plan, [pages[n] for n in fresh], [addresses[n] for n in fresh])
        except (OSError, StoreFenced) as error:
            self.catalog.lag(error)
            return ()
        return [fresh[number] for number in came]

    def read(self, part: PagePart, reads: Sequence[SegmentRead]) -> list[SegmentFailure]:
        return fetch(self.catalog, part, reads)

    def look_again(self, each: StoredObject) -> tuple[Verdict, str]:
        return self.catalog.look_again(each)

    def permit(self, looks: TwoLooks) -> Permit | None:
        return self._door.ask(looks, 1, self._now())

    def drop(self, each: StoredObject, verdict: Verdict) -> None:
        with self.lock:
            self.catalog.index.remove([each])

    def condemn(self, each: StoredObject, permit: Permit) -> None:
        """Drop a bad object from this index and request its removal; a failed request counts in `lagged`."""
        self.drop(each, Verdict.BAD)
        try:
            self.catalog.link.ask(RemoveObjects(slab_number(each.segment), [each.record]), Agreed)
        except (OSError, StoreFenced) as error:
            self.catalog.lag(error)

    def used(self, pages: Sequence[bytes]) -> None:
        with self.lock:
            self.catalog.index.stamp(pages, self._now())
            for page in pages:
                self._used.pop(page, None)
                self._used[page] = None
            is_much = len(self._used) >= _TOLD
        if is_much:
            with suppress(OSError, StoreFenced):
                self._tell_uses()

    def _tell_uses(self) -> None:
        """Send the uses of pages to the keeper. Raises OSError or StoreFenced; unsent uses are kept for later."""
        with self.lock:
            told, self._used = list(self._used), {}
        for first in range(0, len(told), _TOLD):
            try:
                self.catalog.link.tell(NoteUses(told[first : first + _TOLD]))
            except BaseException:
                with self.lock:
                    self._used = dict.fromkeys(told[first:]) | self._used
                raise

    def watch(self, watcher: Watcher) -> None:
        with self.lock:
            self.catalog.watch(watcher)

    # Upkeep

    def evict(self, nbytes: int) -> int:
        """Evict slabs, coldest first, until `nbytes` are freed. Returns the bytes freed.

        Raises StoreError if the keeper fails, StoreFenced if a newer generation owns the pages.
        """
        try:
            return self._trim(TrimNamespace(None, None, max(0, nbytes))).freed_bytes
        except OSError as error:
            raise self._failed("evict from", error) from error

    def _trim(self, trim: TrimNamespace) -> Trimmed:
        """Send uses, then `trim`, and add the answer to the counters. Raises OSError or StoreFenced."""
        with suppress(OSError, StoreFenced):
            self._tell_uses()
        with self.writing:
            trimmed, _ = self.catalog.link.ask(trim, Trimmed)
            self.catalog.sync()
        self.counters.expired_pages += trimmed.expired_pages
        self.counters.evicted_pages += trimmed.evicted_pages
        self.counters.evicted_bytes += trimmed.freed_bytes
        return trimmed

    def collect(self) -> Collected:
        """Run upkeep: send uses, expire pages by TTL, evict down to the quota. Failures count in `counters.lagged`."""
        before = None if self.policy.ttl_s is None else max(0, self._now() - int(self.policy.ttl_s))
        try:
            done = self._trim(TrimNamespace(before, self.policy.quota_bytes, 0))
        except (OSError, StoreFenced) as error:
            self.catalog.lag(error)
            return Collected(0, 0, 0, 0)
        return Collected(done.expired_pages, done.evicted_pages, done.freed_bytes, 0)

    def flush(self) -> None:
        """Send uses and wait until the keeper has processed them; puts are committed already.

        Raises StoreError if the keeper does not answer; pages of an ended keeper are lost.
        """
        try:
            self.catalog.sync()
            self._tell_uses()
            self.catalog.link.settle()
        except OSError as error:
            raise self._failed("flush", error) from error

    def clear(self) -> int:
        """Delete every page of this namespace. Returns the number of pages. Raises StoreError if the keeper fails."""
        return self._ask_to("clear", ClearNamespace())

    def _ask_to(self, verb: str, request: Request) -> int:
        try:
            with self.writing:
                cleared, _ = self.catalog.link.ask(request, Cleared)
                self.catalog.sync()
        except OSError as error:
            raise self._failed(verb, error) from error
        return cleared.pages

    def _failed(self, verb: str, error: OSError) -> StoreError:
        fenced = isinstance(error, KeeperRefused) and error.refusal is KeeperRefusal.FENCED
        return (StoreFenced if fenced else StoreError)(f"cannot {verb} {self.catalog.link.path}: {reason_of(error)}")

    def stat(self) -> Stat:
        """Return the namespace's totals, objects of other processes included."""
        with self.lock:
            self.catalog.refresh()
            segments = len(self.catalog.slabs)
            head_bytes = self.catalog.journal_bytes
            self.catalog.index.sort()
            return self.catalog.index.stat(segments, self.catalog.index.held_bytes, head_bytes)

    def verify(self, progress: Callable[[int], None] | None = None) -> Verified:
        """Read and check every object, and delete bad ones within the deletion budget.

        `progress` is called with the bytes of each object. Raises StoreError if the keeper does not answer, StoreFenced
        if a newer generation owns the pages; neither deletes an object.
        """
        try:
            return self._verify(progress)
        except OSError as error:
            raise self._failed("verify", error) from error

    def _verify(self, progress: Callable[[int], None] | None) -> Verified:
        self.catalog.sync()
        with self.lock:
            by_slab = {name: self.catalog.index.objects(name) for name in sorted(self.catalog.slabs)}
        found = (one for name, objects in by_slab.items() for one in suspects(self.catalog, name, objects))
        return verified(judged(self, found), progress)

    def close(self) -> None:
        """Send uses if possible, then close slab and connection. Idempotent."""
        with self.writing:
            with suppress(OSError, StoreFenced):
                self._tell_uses()
            self._writer.close()
            self.catalog.close()


@dataclass(frozen=True, slots=True)
class KeeperLocation:
    """A keeper's socket, and the client's fleet and generation, which fences older ones; "" and 0: no owner.

    >>> KeeperLocation.parse("keeper:///run/kv.sock?fleet=decode&generation=3")
    KeeperLocation(path=PosixPath('/run/kv.sock'), fleet='decode', generation=3)
    """

    path: Path
    fleet: str = ""
    generation: int = 0

    @classmethod
    def parse(cls, text: str) -> KeeperLocation:
        """Parse `keeper:///PATH`. Raises StoreError for another form, or a generation without a fleet."""
        parts = urlsplit(text)
        said = dict(parse_qsl(parts.query, keep_blank_values=True))
        fleet, generation = said.pop("fleet", ""), said.pop("generation", "0")
        is_sound = parts.scheme == "keeper" and not parts.netloc and parts.path.startswith("/") and not said
        if not is_sound or not generation.isascii() or not generation.isdigit() or (int(generation) and not fleet):
            raise StoreError(f"{text} is no keeper; one is keeper:///PATH.sock?fleet=NAME&generation=NUMBER")
        return cls(Path(unquote(parts.path)), fleet, int(generation))


def open_keeper(location: str, namespace: Namespace, policy: Policy) -> KeeperObjects:
    """Open `namespace` in the keeper of a location. Raises StoreError, or its subclass StoreFenced."""
    return _open(location, namespace.digest, encode_manifest(namespace), policy)


def keeper_of_namespace(found: Found, policy: Policy) -> KeeperObjects:
    """Open a found namespace without knowing its model, for tools. Attaches as no fleet. Raises StoreError."""
    location = str(found.folder).removesuffix("/" + found.name)
    return _open(location, found.digest, b"", policy)


def _open(location: str, namespace: bytes, manifest: bytes, policy: Policy) -> KeeperObjects:
    at = KeeperLocation.parse(location)
    link = KeeperLink(at.path, Attach(SPEAKS, namespace, manifest, at.fleet, at.generation))
    try:
        return KeeperObjects(link, policy)
    except OSError as error:
        raise StoreError(f"cannot open the page store in {location}: {reason_of(error)}") from error


def keeper_namespaces(location: str) -> list[Found]:
    """Return every namespace of a keeper, sorted by model. Raises StoreError if the keeper fails."""
    at = KeeperLocation.parse(location)
    link, manifests = KeeperLink(at.path, None), list[bytes]()
    try:
        while True:
            listed, _ = link.ask(ListNamespaces(len(manifests)), Listed)
            manifests += listed.manifests
            if len(listed.manifests) < LISTED:
                break
    except OSError as error:
        raise StoreError(f"cannot read {location}: {reason_of(error)}") from error
    finally:
        link.close()
    known = [manifest for data in manifests if (manifest := _manifest(data))]
    return in_order([Found(f"keeper://{at.path}/{each.digest[:32]}", each) for each in known])


def _manifest(data: bytes) -> Manifest | None:
    import msgspec

    try:
        folder = msgspec.json.decode(data, type=Manifest).digest[:32]
    except (msgspec.DecodeError, ValueError):
        return None
    return decode_manifest(data, folder)
