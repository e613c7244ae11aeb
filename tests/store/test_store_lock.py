"""The lock of a store: who needs it, what never runs under it, and how much one hold of it may do."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.layout import Component
from kvmover.store import HostBoot, PagePart, PageStore, PartView, Policy, memory_of_buffer
from kvmover.store.guard_lock import GuardLock
from kvmover.store.index import Index
from kvmover.store.segment import Segment, punch
from kvmover.store.segment_catalog import Catalog
from kvmover.store.stored import Placed
from tests.store.segments import segments_of

WHOLE = PagePart.whole(GQA, PAGE)
SMALL = Component.mla(1, 4, "uint8")

#: Calls that wait for a disk, or for as long as a file is, and so never run under the lock.
SLOW = ("punch", "fdatasync", "fsync", "preadv", "pwritev", "scandir", "listdir", "posix_fadvise", "unlink")
#: What one call under the lock may move, and how many calls one hold may make: a slice of headers and a few more.
CALLS = ("pread", "pwrite", "write", "open", "close", "fstat", "stat", "ftruncate")
MOST_BYTES, MOST_CALLS, MOST_OBJECTS = 1 << 20, 600, 1100
#: Objects that one hold may take out of the index.
MOST_REMOVED = 2048

#: Who closes a removed file last waits until its blocks are free.
FSTAT = os.fstat


def test_a_lock_knows_who_has_it() -> None:
    lock = GuardLock()
    seen: list[bool] = []
    with lock:
        with lock:
            assert lock.held
        assert lock.held, "it was taken twice, and given back once"
        thread = threading.Thread(target=lambda: seen.append(lock.held))
        thread.start()
        thread.join()
    assert not lock.held
    assert seen == [False]


def test_locks_are_taken_in_one_order(tmp_path: Path) -> None:
    with PageStore.open(tmp_path, SPACE) as store:
        segments = segments_of(store)
        with segments.tidying, segments.writing, segments.lock, segments.tidying:
            pass
        for outer, inner in (("lock", "writing"), ("lock", "tidying"), ("writing", "tidying")):
            with getattr(segments, outer), pytest.raises(AssertionError, match="another order"):
                getattr(segments, inner).__enter__()
            assert not segments.lock.held


def test_what_needs_the_lock_says_so_and_what_waits_refuses_it(tmp_path: Path) -> None:
    with PageStore.open(tmp_path, SPACE) as store:
        segments = segments_of(store)
        for name in ("expire", "note_use"):
            with pytest.raises(AssertionError, match="without the lock"):
                getattr(segments, name)(*[[]] * (name == "note_use"))
        with segments.lock:
            for work in (segments.catalog.refresh, segments.catalog.sweep, store.collect, lambda: store.evict(1)):
                with pytest.raises(AssertionError, match="under the lock|another order"):
                    work()


class Watched:
    """Every call of the system, by whether a store's lock was held, and what one hold of it did."""

    def __init__(self) -> None:
        self.locks: set[GuardLock] = set()
        self.hold, self.slow, self.most = Counter[str](), Counter[str](), Counter[str]()

    def wrap(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            frees = name == "close" and not FSTAT(arguments[0]).st_nlink
            answer = real(*arguments, **options)
            if any(lock.held for lock in self.locks):
                if name in SLOW or frees:
                    self.slow[name] += 1
                self.hold["objects" if name == "_object" else "calls"] += 1
                moved = len(answer) if isinstance(answer, bytes) else answer if name in ("pwrite", "write") else 0
                self.hold["bytes"] += moved if isinstance(moved, int) else 0
            return answer

        return call

    def ended(self) -> None:
        """One hold of the lock is over."""
        self.most |= self.hold
        self.hold.clear()

    def check(self) -> None:
        assert not self.slow
        assert self.most["calls"] <= MOST_CALLS
        assert self.most["bytes"] <= MOST_BYTES
        assert self.most["objects"] <= MOST_OBJECTS
        assert self.most["removed"] <= MOST_REMOVED


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watch = Watched()
    for name in (*SLOW[1:], *CALLS):
        monkeypatch.setattr(os, name, watch.wrap(name, getattr(os, name)))
    real, leave = Catalog.__init__, GuardLock.__exit__

    def opened(self: Catalog, *arguments: object) -> None:
        real(self, *arguments)
        watch.locks.add(self.lock)

    def left(self: GuardLock, *about: object) -> None:
        leave(self, *about)
        if self in watch.locks and not self.held:
            watch.ended()

    monkeypatch.setattr(Catalog, "__init__", opened)
    monkeypatch.setattr(GuardLock, "__exit__", left)
    monkeypatch.setattr("kvmover.store.segment_catalog.punch", watch.wrap("punch", punch))
    monkeypatch.setattr(Index, "_object", watch.wrap("_object", Index._object))
    remove = Index.remove_placed

    def removed(self: Index, gone: Placed) -> int:
        watch.hold["removed"] += len(gone)
        return remove(self, gone)

    monkeypatch.setattr(Index, "remove_placed", removed)
    return watch


def test_nothing_waits_for_a_disk_under_the_lock(tmp_path: Path, watched: Watched) -> None:
    """Two processes put, get, look up, evict, expire, verify, flush, collect and clear."""
    hand = [HostBoot.now()]

    class Clock(HostBoot):
        def now(self) -> int:
            return hand[0]

    clock = Clock(b"one machine.....")
    policy = Policy(quota_bytes=40 * WHOLE.nbytes, ttl_s=600, segment_bytes=6 * WHOLE.nbytes, stamp_s=0)
    with (
        PageStore.open(tmp_path, SPACE, policy, machine=clock) as one,
        PageStore.open(tmp_path, SPACE, policy, machine=clock) as two,
    ):
        ranks = Rank(one, WHOLE), Rank(two, WHOLE)
        for turn in range(12):
            hand[0] += 70
            mine, other = ranks[turn % 2], ranks[(turn + 1) % 2]
            assert all(r.ok for r in mine.put(pages_of(8, f"{turn}")))
            other.get(pages_of(8, f"{turn}"))
            mine.exists(pages_of(8, f"{turn - 1}"))
            (one, two)[turn % 2].flush()
            (two, one)[turn % 2].collect()
        one.evict(3 * WHOLE.nbytes)
        two.verify()
        two.stat()
        one.clear()
        ranks[1].exists(pages_of(8))
    with PageStore.open(tmp_path, SPACE, policy, machine=Clock(b"another machine.")) as later:
        later.collect()
    watched.check()
    assert watched.most["calls"] > 10


def small_pages(store: PageStore, count: int) -> tuple[PartView, list[bytes]]:
    """A store of so many pages of 64 bytes, put in batches of 128."""
    part, pages = PagePart.whole(SMALL, PAGE), pages_of(count)
    buffer = bytearray(part.nbytes)
    vars(store)["memory_of_pages"] = buffer
    memory = memory_of_buffer(buffer)
    store.register(memory)
    view = store.view(SPACE, part)
    for first in range(0, count, 128):
        some = pages[first : first + 128]
        assert all(r.ok for r in view.put(some, [memory.address] * len(some)))
    return view, pages


def test_one_hold_of_the_lock_does_a_little_however_much_there_is(tmp_path: Path, watched: Watched) -> None:
    """What another wrote, deleted or cleared, news that were lost, a dead writer's segment, all of 20,000 objects."""
    count = 20_000
    with PageStore.open(tmp_path, SPACE) as one, PageStore.open(tmp_path, SPACE) as two:
        _, pages = small_pages(one, count)
        view = two.view(SPACE, PagePart.whole(SMALL, PAGE))
        while not all(view.exists(pages[-1:])):
            pass
        one.evict(4096 * 5000)
        assert not any(view.exists(pages[:5000:100]))
        segments_of(two).catalog._deletions.poll = lambda: None  # all headers are read again
        for _ in range(20):
            view.exists(pages[:1])
        two.verify()
        one.flush()
        dead = segments_of(one).folder
        for path in list(dead.glob("*.head")):
            path.with_name(f"0123456789abcdef-00000000{path.suffix}").write_bytes(path.read_bytes())
            path.with_name("0123456789abcdef-00000000.data").write_bytes(path.with_suffix(".data").read_bytes())
    machine = HostBoot(b"another machine.")
    with (
        PageStore.open(tmp_path, SPACE, machine=machine) as later,
        PageStore.open(tmp_path, SPACE, machine=machine) as beside,
    ):
        assert later.stat().objects >= 15_000
        later.collect()
        assert beside.stat().objects >= 15_000
        later.clear()
        assert not later.stat().objects
        assert not beside.stat().objects
    watched.check()
    assert watched.most["objects"] > 500
    assert watched.most["removed"] > 1000


def test_a_look_up_of_pages_that_are_all_too_old_deletes_a_few(tmp_path: Path) -> None:
    hand = [1000]

    class Clock(HostBoot):
        def now(self) -> int:
            return hand[0]

    with PageStore.open(tmp_path, SPACE, Policy(ttl_s=60), machine=Clock(b"one machine.....")) as store:
        view, pages = small_pages(store, 2000)
        hand[0] += 100
        assert not any(view.exists(pages[::20]))
        assert 0 < store.counters.expired_pages <= 64
        assert store.collect().expired_pages == 2000 - 64
        assert not store.stat().objects


def whole_files_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmover.store.segment_catalog.punch", lambda *_: False)


def test_one_hold_does_a_little_where_whole_files_are_freed(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment of 5,000 pages goes, of which others have read every second one: those are carried forward."""
    whole_files_only(monkeypatch)
    with (
        PageStore.open(tmp_path, SPACE, Policy(segment_bytes=5000 * 4096, stamp_s=0)) as store,
        PageStore.open(tmp_path, SPACE, Policy(stamp_s=0)) as other,
    ):
        view, pages = small_pages(store, 10_000)
        hot = pages[:5000:2]
        with segments_of(store).lock:
            segments_of(store).note_use(hot)
        other.stat()
        store.flush()
        segments_of(store).catalog.punches = False
        assert store.evict(2500 * 4096) > 0
        assert sum(view.exists(hot)) >= 2499, "half of the segment is carried, the end of its last block apart"
        assert not any(view.exists(pages[1:5000:2]))
        assert all(view.exists(pages[5000:]))
    watched.check()


def test_room_is_made_without_asking_how_large_each_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where whole files are freed, beside nine other writers: a file is asked for when there is news of it."""
    whole_files_only(monkeypatch)
    asked, real = Counter[str](), Segment.data_bytes

    def data_bytes(self: Segment) -> int:
        asked[self.name] += 1
        return real(self)

    policy = Policy(quota_bytes=40 * WHOLE.nbytes, segment_bytes=4 * WHOLE.nbytes)
    stores = [PageStore.open(tmp_path, SPACE, policy) for _ in range(10)]
    try:
        for number, store in enumerate(stores):
            assert Rank(store, WHOLE).put(pages_of(1, f"of {number}"))[0].ok
        rank = Rank(stores[0], WHOLE)
        segments_of(stores[0]).catalog.punches = False
        monkeypatch.setattr(Segment, "data_bytes", data_bytes)
        for turn in range(30):
            assert all(answer.ok for answer in rank.put(pages_of(4, f"turn {turn}")))
        held, files = stores[0].stat().held_bytes, segments_of(stores[0]).folder.glob("*.data")
        assert held == sum(path.stat().st_size for path in files)
        assert len(asked) >= 9
        assert set(asked.values()) <= {1, 2}
    finally:
        for store in stores:
            store.close()
