"""A segment without a writer is taken over once: judged, sealed, and given back to others if a deletion is refused."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.store import HostBoot, PagePart, PageStore, Policy, segment_catalog, takeover
from kvmover.store.boot import NO_BOOT
from kvmover.store.deletion import DELETIONS, EMPTY, DeletionOrder, Look, Seen, TwoLooks
from kvmover.store.objects import Verdict
from kvmover.store.record import PREAMBLE_BYTES, Kind, decode_all, encode_mark
from kvmover.store.segment import DATA, HEAD, Life, Segment
from kvmover.store.segment_catalog import Catalog
from kvmover.store.segment_objects import SegmentObjects
from kvmover.store.stored import StoredObject
from tests.store.segments import objects_in, segments_of

WHOLE = PagePart.whole(GQA, PAGE)
PAGES = pages_of(10)
NEXT_BOOT = HostBoot(bytes(16))


def budget_of(parts: int) -> TwoLooks:
    """Grounds that cost so much of a budget."""
    return TwoLooks(Look(Seen.READ, "a test"), Look(Seen.ANEW, "a test"), parts)


@dataclass
class Survivor:
    """A process that was at work before another one's segment was left to it."""

    store: PageStore
    found: Path

    @property
    def objects(self) -> SegmentObjects:
        return segments_of(self.store)

    @property
    def catalog(self) -> Catalog:
        return self.objects.catalog

    def left(self) -> Segment:
        """The files of the dead come into the folder, and are found."""
        folder = self.objects.folder
        for path in sorted(self.found.glob(f"*/*{DATA}")) + sorted(self.found.glob(f"*/*{HEAD}")):
            (folder / path.name).write_bytes(path.read_bytes())
        self.catalog.refresh()
        (segment,) = self.catalog.segments.values()
        return segment

    def damage(self, *pages: int) -> None:
        """Flip a byte of these pages of the dead one's data, which lie in order."""
        (data,) = self.found.glob(f"*/*{DATA}")
        with data.open("r+b") as file:
            for page in pages:
                file.seek(page * WHOLE.nbytes + 9)
                file.write(b"\x5b\xb5")

    def marks(self) -> list[tuple[Kind, int]]:
        (head,) = self.objects.folder.glob(f"*{HEAD}")
        records = decode_all(head.read_bytes()[PREAMBLE_BYTES:], PREAMBLE_BYTES)
        return [(each.kind, each.offset) for each in records if each.kind is not Kind.OBJECT]


@pytest.fixture
def later(crashed: Path, tmp_path: Path) -> Iterator[Survivor]:
    """A process of the machine's next boot."""
    yield from at_work(crashed, tmp_path / "later", NEXT_BOOT)


@pytest.fixture(params=[None, NEXT_BOOT], ids=["same boot", "next boot"])
def survivor(request: pytest.FixtureRequest, crashed: Path, tmp_path: Path) -> Iterator[Survivor]:
    yield from at_work(crashed, tmp_path / "survivor", request.param)


def at_work(crashed: Path, root: Path, machine: HostBoot | None) -> Iterator[Survivor]:
    root.mkdir()
    with PageStore.open(root, SPACE, machine=machine) as store:
        yield Survivor(store, crashed)


def open_files() -> set[str]:
    """The names of the files that this process has open, removed ones among them."""
    links = (Path("/proc/self/fd") / each for each in os.listdir("/proc/self/fd"))
    return {link.readlink().name.removesuffix(" (deleted)") for link in links if link.is_symlink()}


def there(survivor: Survivor) -> list[bool]:
    """Which of the ten pages another process finds and reads well."""
    with PageStore.open(survivor.objects.folder.parent, SPACE) as store:
        return [result.ok for result in Rank(store, WHOLE).get(PAGES)]


def test_a_segment_is_taken_over_once_and_marked_as_synced(survivor: Survivor) -> None:
    segment = survivor.left()
    size = segment.data.stat().st_size
    assert survivor.objects.takeover.recover() == 1
    assert survivor.marks() == [(Kind.SYNCED, 4 * WHOLE.nbytes), (Kind.SYNCED, size), (Kind.SEALED, 0)]
    assert (segment.life, segment.waiting, segment.head_fd) == (Life.SEALED, [], -1)
    assert survivor.objects.takeover.recover() == 0
    assert segment.head.name not in open_files()
    assert there(survivor) == [True] * 10


def test_a_segment_that_could_not_be_synced_is_sealed_without_a_mark(
    survivor: Survivor, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor.left()
    monkeypatch.setattr(survivor.objects.takeover, "_settled", lambda _: False)
    assert survivor.objects.takeover.recover() == 1
    assert survivor.marks() == [(Kind.SYNCED, 4 * WHOLE.nbytes), (Kind.SEALED, 0)]


def test_a_living_writer_keeps_its_segment_and_one_that_was_forgotten_is_not_taken_over(survivor: Survivor) -> None:
    segment = survivor.left()
    with segment.head.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert survivor.objects.takeover.recover() == 0
        assert segment.life is Life.FOLLOWED
    survivor.catalog.forget(segment.name)
    assert not survivor.objects.takeover._take_over(segment)
    assert survivor.marks() == [(Kind.SYNCED, 4 * WHOLE.nbytes)]


def test_on_a_shared_file_system_a_head_of_another_machine_is_taken_over_after_a_silence(
    survivor: Survivor, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor.objects.takeover._is_shared = True
    segment = survivor.left()
    is_ours = segment.boot == survivor.catalog.machine.boot
    assert survivor.objects.takeover.recover() == is_ours
    written_s = int(segment.head.stat().st_mtime)
    os.utime(segment.head, (written_s, written_s))
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: written_s + 10.0)
        assert survivor.objects.takeover.recover() == 0
    os.utime(segment.head, (0, written_s - 60))
    assert survivor.objects.takeover.recover() == (not is_ours)


def test_whole_objects_are_read_once_and_those_that_were_evicted_meanwhile_are_not_dropped(
    survivor: Survivor, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor.damage(5, 8)
    looked: list[int] = []

    def evicted(folder: Path, each: StoredObject) -> tuple[Verdict, str]:
        looked.append(each.offset // WHOLE.nbytes)
        return (Verdict.GONE, "evicted") if len(looked) == 1 else (Verdict.BAD, "digest")

    monkeypatch.setattr(takeover, "look_again", evicted)
    survivor.left()
    is_judged = survivor.catalog.machine is NEXT_BOOT
    assert survivor.objects.takeover.recover() == 1
    assert looked == ([5, 8] if is_judged else [])
    assert survivor.catalog.dropped == ({"digest": 1} if is_judged else {})


@pytest.mark.parametrize(("page", "promised"), [(3, 1), (4, 0)], ids=["flushed", "not flushed"])
def test_a_bad_object_costs_the_budget_if_a_flush_promised_it(later: Survivor, page: int, promised: int) -> None:
    later.damage(page)
    segment = later.left()
    if promised:  # judged as those that wait are
        segment.waiting = [each for each in objects_in(later.objects) if each.offset == page * WHOLE.nbytes]
    assert later.objects.takeover.recover() == 1
    door, now = later.catalog.door, later.catalog.machine.now()
    assert door.deleted["digest"] == 1
    assert (door.ask(budget_of(DELETIONS), 1, now) is None) == bool(promised)


def test_a_bad_object_that_may_not_be_deleted_waits_and_the_segment_is_left_to_others(later: Survivor) -> None:
    later.damage(3)
    segment = later.left()
    segment.waiting = waits = [each for each in objects_in(later.objects) if each.offset == 3 * WHOLE.nbytes]
    assert later.catalog.door.ask(budget_of(DELETIONS), 1, later.catalog.machine.now())
    later.objects.takeover.recover()
    assert (segment.life, segment.waiting) == (Life.FOLLOWED, waits)
    assert later.marks() == [(Kind.SYNCED, 4 * WHOLE.nbytes)]
    with PageStore.open(later.objects.folder.parent, SPACE, machine=NEXT_BOOT):
        assert later.marks()[-1] == (Kind.SEALED, 0), "another took it over"


# Records that are learnt.


def test_a_tail_is_learnt_of_a_segment_that_is_known_and_not_sealed(
    survivor: Survivor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Segment, "tail", lambda _: None)
        segment = survivor.left()
    catalog = survivor.catalog
    with catalog.lock:
        segment.life = Life.SEALED
        assert not catalog._tail(segment)
        segment.life = Life.FOLLOWED
        other = Segment(segment.folder, segment.name, segment.boot, Life.FOLLOWED)
        assert not catalog._tail(other), "another one has its name"
        assert catalog.index.empty(segment.name)
        assert catalog._tail(segment)
        assert catalog.sizes.get(segment.name) == segment.data.stat().st_size
        assert not catalog._tail(segment)


def test_an_object_waits_until_its_payload_is_synced(later: Survivor) -> None:
    segment, catalog = later.left(), later.catalog
    assert [each.offset // WHOLE.nbytes for each in segment.waiting] == [4, 5, 6, 7, 8, 9]
    for synced, waits in ((6 * WHOLE.nbytes, [6, 7, 8, 9]), (10 * WHOLE.nbytes, [])):
        with segment.head.open("ab") as head:
            head.write(encode_mark(head.tell(), Kind.SYNCED, synced))
        with catalog.lock:
            assert catalog._tail(segment)
        assert [each.offset // WHOLE.nbytes for each in segment.waiting] == waits
        assert len(catalog.index.records(segment.name)) == 10 - len(waits)


# Blocks that are freed.


def test_deleted_objects_give_their_blocks_back_at_once(survivor: Survivor) -> None:
    segment, catalog = survivor.left(), survivor.catalog
    survivor.objects.takeover.recover()
    before = segment.data.stat().st_blocks * 512
    records = catalog.index.records(segment.name)[2:5].astype(np.int64)
    assert catalog.delete_at(segment.name, records, DeletionOrder.EVICTED) == 3 * WHOLE.nbytes
    assert segment.data.stat().st_blocks * 512 == before - 3 * WHOLE.nbytes


def test_a_sweep_frees_ranges_of_files_that_are_there_and_notes_a_system_that_frees_none(
    survivor: Survivor, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, catalog = survivor.left(), survivor.catalog
    survivor.objects.takeover.recover()
    permit = catalog.door.order(DeletionOrder.EVICTED)

    def freed(name: str) -> int:
        before = segment.data.stat().st_blocks * 512
        with catalog.lock:
            catalog.free(name, [(0, WHOLE.nbytes)], permit)
        catalog.sweep()
        return before - segment.data.stat().st_blocks * 512

    assert freed("0123456789abcdef-00000007") == 0, "nobody has it any more"
    assert freed(segment.name) == WHOLE.nbytes
    assert catalog.punches
    answers = iter([False, True])
    monkeypatch.setattr(segment_catalog, "punch", lambda *_: next(answers))
    freed(segment.name)
    freed(segment.name)
    assert not catalog.punches


def swept(survivor: Survivor, segment: Segment) -> None:
    """Sweep with this segment among those that may be empty."""
    with survivor.catalog.lock:
        survivor.catalog.discard(segment.name)
    survivor.catalog.sweep()


def test_a_sweep_reads_no_head_of_a_segment_with_objects(survivor: Survivor, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = survivor.left()
    survivor.objects.takeover.recover()
    monkeypatch.setattr(segment_catalog, "why_empty", lambda _: pytest.fail("it has objects"))
    swept(survivor, segment)


def test_an_empty_segment_that_the_system_does_not_remove_is_found_again(
    survivor: Survivor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise OSError(5, "no answer")

    segment = survivor.left()
    survivor.objects.takeover.recover()
    assert all(result.ok for result in Rank(survivor.store, WHOLE).get(PAGES))
    killed(segment)
    survivor.catalog.index.drop(segment.name)
    with monkeypatch.context() as patched:
        patched.setattr(Segment, "unlink", failing)
        swept(survivor, segment)
    assert survivor.catalog.lagged["no answer"] == 1
    assert segment.head.exists()
    survivor.store.collect()
    assert not segment.head.exists()
    assert not any(segment.name in name for name in open_files())


def test_a_segment_of_ones_own_that_is_evicted_is_closed(tmp_path: Path) -> None:
    with PageStore.open(tmp_path, SPACE, Policy(segment_bytes=4 * WHOLE.nbytes)) as store:
        assert all(result.ok for result in Rank(store, WHOLE).put(PAGES))
        names = set(segments_of(store).catalog.segments)
        store.evict(1 << 40)
        gone = names - set(segments_of(store).catalog.segments)
        assert gone
        assert not gone & segments_of(store).catalog.index._segments.keys()
        assert not [name for name in open_files() if any(each in name for each in gone)]


# Segments that are empty.


def emptied(survivor: Survivor) -> Segment:
    """A segment that was taken over, and whose objects this process has evicted."""
    segment = survivor.left()
    survivor.objects.takeover.recover()
    survivor.catalog.index.drop(segment.name)
    return segment


def killed(segment: Segment) -> None:
    """Let another process mark every object as dead."""
    head = segment.head.read_bytes()
    with segment.head.open("r+b") as file:
        for each in decode_all(head[PREAMBLE_BYTES:], PREAMBLE_BYTES):
            if each.kind is Kind.OBJECT:
                file.seek(each.at + 8)
                file.write(bytes(4))


def test_a_segment_is_over_if_it_is_finished_empty_and_not_read(survivor: Survivor) -> None:
    segment = survivor.left()
    catalog = survivor.catalog
    assert not catalog._is_over(segment), "it has objects, or a writer"
    survivor.objects.takeover.recover()
    assert not catalog._is_over(segment), "it has objects"
    catalog.index.drop(segment.name)
    with catalog.lend([segment.name]):
        assert not catalog._is_over(segment)
    assert catalog._is_over(segment)
    assert not catalog._is_over(Segment(segment.folder, "b", NO_BOOT, Life.WRITTEN))
    assert not catalog._is_over(Segment(segment.folder, "b", NO_BOOT, Life.FOLLOWED))


def test_an_empty_segment_is_removed_once_its_files_confirm_it(
    survivor: Survivor, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, catalog, leaving = emptied(survivor), survivor.catalog, list[set[str]]()
    catalog._remove_empty(segment)
    assert segment.head.exists(), "its objects live"
    killed(segment)
    unlink = Segment.unlink
    monkeypatch.setattr(
        Segment, "unlink", lambda *given: (leaving.append(set(catalog._garbage.leaving)), unlink(*given))
    )
    with catalog.lend([segment.name]):
        catalog._remove_empty(segment)
        assert segment.head.exists(), "it is read"
    permitted = catalog.door.deleted[EMPTY]
    catalog._remove_empty(segment)
    assert not segment.head.exists()
    assert not segment.data.exists()
    assert segment.name not in catalog.segments
    assert leaving == [{segment.name}], "nobody takes it for a new one meanwhile"
    assert not catalog._garbage.leaving
    assert catalog.door.deleted[EMPTY] == permitted + 1


def test_a_segment_that_was_forgotten_is_not_removed(survivor: Survivor) -> None:
    segment = emptied(survivor)
    killed(segment)
    survivor.catalog.forget(segment.name)
    survivor.catalog._remove_empty(segment)
    assert segment.head.exists()


def test_a_head_that_cannot_be_read_is_counted_and_read_later(
    survivor: Survivor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise OSError(5, "no answer")

    with monkeypatch.context() as patched:
        patched.setattr(Segment, "tail", failing)
        segment = survivor.left()
        with survivor.catalog.lock:
            assert not survivor.catalog._try_tail(segment)
        assert survivor.catalog.lagged["no answer"] >= 1
    with survivor.catalog.lock:
        assert survivor.catalog._try_tail(segment)
    assert survivor.objects.takeover.recover() == 1
    assert there(survivor) == [True] * 10
