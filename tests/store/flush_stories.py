"""Stories of a store whose disk fails: what a flush has promised is there afterwards, after a power cut too.

A promise: a put of the page was answered, and a flush after it has returned. It is kept if any machine, on what is left
of the files, reads the page with its bytes.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from unittest import mock

from kvmover.errors import StoreError
from kvmover.layout import Component
from kvmover.store import HostBoot, Namespace, PagePart, PageStore, Policy, segment_catalog
from tests.store.faulty_disk import REAL, TOLD_APART, TROUBLES, FaultyDisk, Trouble, laid_out
from tests.store.segments import segments_of
from tests.store.store_rank import PAGE, SPACE, Rank, pages_of

WHOLE = PagePart.whole(Component.attention(1, 1, 8, "bfloat16"), PAGE)
HERE, LATER, THERE = HostBoot(b"this machine...."), HostBoot(b"the same, later."), HostBoot(b"another machine.")
A, B, C, D = pages_of(4)


@dataclass
class Telling:
    """A story under way. `promised`: pages by the promises of flushes; `holds`: the pages of each segment;
    `evicted`: pages that made room, beside those that were to.
    """

    root: Path
    disk: FaultyDisk
    segment_pages: int
    promised: set[bytes] = field(default_factory=set[bytes])
    holds: dict[str, set[bytes]] = field(default_factory=dict[str, set[bytes]])
    evicted: int = 0
    space: Namespace = SPACE
    part: PagePart = WHOLE
    stores: list[PageStore] = field(default_factory=list[PageStore])

    @property
    def policy(self) -> Policy:
        """Segments of so many pages, and every use written down."""
        return Policy(segment_bytes=4096 * self.segment_pages, stamp_s=0)

    def opened(self, machine: HostBoot) -> Rank | None:
        """A process that opens the store, as often as it has to."""
        for _ in range(3):
            with suppress(StoreError):
                store = PageStore.open(self.root, SPACE, self.policy, machine=machine)
                self.stores.append(store)
                return Rank(store, WHOLE, 4)
        return None

    def keep(self, rank: Rank, pages: Sequence[bytes]) -> None:
        """Put pages and flush, again where the flush fails."""
        for _ in range(3):
            put = {page for page, said in zip(pages, rank.put(pages), strict=True) if said.ok}
            self.note(rank, put)
            with suppress(StoreError):
                rank.store.flush()
                self.promised |= put
                if put == set(pages):
                    return

    def note(self, rank: Rank, pages: set[bytes]) -> None:
        """Remember the segments that hold pages."""
        for page in pages:
            entry = segments_of(rank.store).catalog.index.get(page)
            for each in entry.objects if entry else ():
                self.holds.setdefault(each.segment, set()).add(page)

    def uses(self, rank: Rank) -> None:
        """Look pages up, read them, do upkeep and look at every byte."""
        rank.get([A, B])
        rank.store.collect()
        with suppress(OSError, StoreError):
            rank.store.verify()

    def killed(self, rank: Rank) -> None:
        """The process has died: its locks are gone, and its files closed."""
        for segment in segments_of(rank.store).catalog.segments.values():
            if segment.head_fd >= 0:
                REAL["flock"](segment.head_fd, fcntl.LOCK_UN)


def kept_running(tale: Telling) -> None:
    """Two pages are kept, used, and a third one; then the store is closed and opened again."""
    rank = tale.opened(HERE)
    if rank:
        tale.keep(rank, [A, B])
        tale.uses(rank)
        tale.keep(rank, [C])
        rank.store.close()
    if rank := tale.opened(HERE):
        tale.uses(rank)
        rank.store.close()


def died(tale: Telling) -> None:
    """A process dies with a page that it has not flushed; another takes over, finds the page present, and flushes."""
    rank, other = tale.opened(HERE), tale.opened(HERE)
    if rank:
        tale.keep(rank, [A, B])
        tale.note(rank, {C for said in rank.put([C]) if said.ok})
        tale.killed(rank)
    if other:
        other.store.collect()
        tale.keep(other, [C])
        tale.uses(other)
        other.store.close()


def lost_power(tale: Telling) -> None:
    """The machine loses power with a page that was not flushed; after its next boot the page is put again."""
    rank = tale.opened(HERE)
    if rank:
        tale.keep(rank, [A, B])
        tale.note(rank, {C for said in rank.put([C]) if said.ok})
    tale.disk.power_cut()
    if rank := tale.opened(LATER):
        tale.uses(rank)
        tale.keep(rank, [C])
        rank.store.close()


def cleaned(tale: Telling) -> None:
    """The file system frees whole files alone: room is made by carrying pages that are used into another segment."""
    tale.segment_pages = 3
    rank = tale.opened(HERE)
    if rank:
        with mock.patch.object(segment_catalog, "punch", return_value=False):
            tale.keep(rank, [C, D, A])
            tale.keep(rank, [B])
            for _ in range(2):  # pages that no read has used would go
                rank.get([A, B])
            segments_of(rank.store).catalog.punches = False
            rank.store.evict(1)
            tale.promised -= {C, D}
            tale.evicted -= sum(segments_of(rank.store).catalog.index.get(page) is None for page in (C, D))
            tale.note(rank, {A, B})
            tale.uses(rank)


STORIES: dict[str, Callable[[Telling], None]] = {
    "kept running": kept_running,
    "died": died,
    "lost power": lost_power,
    "cleaned": cleaned,
}


def told(
    story: str | Callable[[Telling], None], folder: Path, troubles: Mapping[int, Trouble], segment_pages: int = 1
) -> Telling:
    """Tell a story with some troubles, and look at what is left. AssertionError says which promise was broken."""
    root, ids, seconds = folder / "root", itertools.count(), itertools.count(1_000_000_000)
    root.mkdir(parents=True)
    disk = FaultyDisk(root, troubles)
    tale = Telling(root, disk, segment_pages)
    with (
        mock.patch.object(os, "urandom", lambda count: next(ids).to_bytes(count, "big")),
        mock.patch.object(HostBoot, "now", staticmethod(lambda: next(seconds))),
        mock.patch.object(segment_catalog, "_TICK_NS", 1 << 62),
    ):
        try:
            with disk.installed():
                (STORIES[story] if isinstance(story, str) else story)(tale)
            tale.evicted += sum(store.counters.evicted_pages for store in tale.stores)
            for machine, image in _left(tale):
                lost = _lost(tale, machine, image, folder / "left")
                if disk.hit:
                    lost -= hit_pages(tale)
                assert len(lost) <= max(0, tale.evicted), f"{names(lost)} lost at {machine.boot} by {_said(tale)}"
        finally:
            for store in tale.stores:
                store.close()
            shutil.rmtree(folder)
    return tale


def _said(tale: Telling) -> str:
    calls = tale.disk.calls
    return " and ".join(
        f"{trouble.value} at {calls[at].name} of {calls[at].path} ({at})" for at, trouble in tale.disk.troubles.items()
    )


def _left(tale: Telling) -> Iterator[tuple[HostBoot, dict[str, bytes | None]]]:
    """Yields what another machine finds now, and what this one finds after any power cut."""
    paths = sorted(tale.root.rglob("*"))
    yield (
        THERE,
        {str(each.relative_to(tale.root)): None if each.is_dir() else each.read_bytes() for each in paths},
    )
    for image in tale.disk.images():
        yield LATER, image


#: The pages that were read, by a digest of all that a machine found: most troubles leave the same.
_FOUND = dict[bytes, frozenset[bytes]]()


def _lost(tale: Telling, machine: HostBoot, image: dict[str, bytes | None], folder: Path) -> set[bytes]:
    """Returns the promised pages that a machine doesn't read from what is left."""
    wanted, pages = tale.promised, sorted(tale.promised)
    key = sha256(repr((machine.boot, pages, list(image.items()))).encode()).digest()
    if key not in _FOUND:
        laid_out(image, folder)
        with PageStore.open(folder, tale.space, Policy(), machine=machine) as store:
            answers = Rank(store, tale.part, len(pages) + 1, tale.space).get(pages)
        _FOUND[key] = frozenset(page for page, said in zip(pages, answers, strict=True) if said.ok)
        shutil.rmtree(folder)
    return wanted - _FOUND[key]


def hit_pages(tale: Telling) -> set[bytes]:
    """Returns the pages of which the medium lost something; of a folder's names, all that may have been made."""
    pages = [tale.holds.get(segment_of(path)) for path in tale.disk.hit]
    return set().union(*(tale.promised if each is None else each for each in pages))


def segment_of(path: str) -> str:
    """Returns the name of the segment that a file belongs to, "" for other files."""
    return path.rpartition("/")[2].rpartition(".")[0] if path.endswith((".head", ".data")) else ""


def names(pages: Iterable[bytes]) -> str:
    return "".join(name for name, page in zip("ABCD", (A, B, C, D), strict=True) if page in pages) or "nothing"


#: A call by its number, and the trouble of it.
Case = tuple[int, Trouble]


def singles(story: str, folder: Path, segment_pages: int = 1) -> list[Case]:
    """Returns every trouble of every call of a story that goes well."""
    calls = told(story, folder, {}, segment_pages).disk.calls
    return [(at, trouble) for at, call in enumerate(calls) for trouble in TROUBLES[call.name]]


def on_other_pages(tale: Telling, first: Case) -> list[Case]:
    """Returns troubles of later calls that are about another page than the first one's, in the story with that."""
    calls, at = tale.disk.calls, first[0]
    pages = [tale.holds.get(segment_of(call.path), set()) for call in calls]
    return [
        (later, trouble)
        for later in range(at + 1, len(calls))
        if pages[at] and pages[later] and not pages[at] & pages[later]
        for trouble in TROUBLES[calls[later].name]
        if {first[1], trouble} <= TOLD_APART
    ]
