"""What one process meets, others do not pay for: errors of the system, garbled reads, full disks, other machines."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.errors import StoreError
from kvmover.store import Got, HostBoot, PagePart, PageStore, Policy, Put
from kvmover.store.files import Access, PlainFiles
from kvmover.store.nixl_files import files_for
from kvmover.store.segment import DATA, HEAD
from tests.store.segments import segments_of

WHOLE = PagePart.whole(GQA, PAGE)
OTHER_HOST = HostBoot(b"the other host..")
CODES = [errno.EIO, errno.ENOMEM, errno.ETIMEDOUT, errno.ESTALE, errno.EINVAL, errno.EAGAIN, errno.EACCES, errno.EMFILE]


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, name: str, code: int, times: int = 1, skip: int = 0
) -> Iterator[list[int]]:
    """`os.<name>` fails so many times, after `skip` calls that work. Yields a list of what was called."""
    real, calls = getattr(os, name), [0]

    def call(*arguments, **options):
        calls[0] += 1
        if skip < calls[0] <= skip + times:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, name, call)
        yield calls


@pytest.mark.parametrize("code", CODES)
def test_a_read_that_the_system_refuses_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    pages = pages_of(4)
    with PageStore.open(tmp_path, SPACE) as store, PageStore.open(tmp_path, SPACE) as other:
        rank, reader = Rank(store, WHOLE), Rank(other, WHOLE)
        rank.put(pages)
        store.flush()
        for times in (1, 2, 3):
            with failing(monkeypatch, "preadv", code, times):
                assert {r.outcome for r in reader.get(pages)} <= {Got.READ, Got.FAILED}
        assert [r.ok for r in rank.get(pages)] == [True] * 4
        assert not other.counters.poisoned


@pytest.mark.parametrize("name", ["preadv", "pread", "fstat", "open", "scandir", "close"])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT, errno.EIO, errno.EMFILE])
def test_nothing_raises_and_every_page_has_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """At every call of the system, in turn, while others write, flush and evict."""
    turns = 8
    with PageStore.open(tmp_path, SPACE, Policy(segment_bytes=2 * WHOLE.nbytes)) as writer:
        rank = Rank(writer, WHOLE)
        for turn in range(turns):
            with PageStore.open(tmp_path, SPACE) as store:
                reader, pages = Rank(store, WHOLE), pages_of(4, f"{turn}")
                reader.exists(pages)
                rank.put(pages)
                writer.flush()
                writer.evict(WHOLE.nbytes)
                (segments_of(store).folder / f"{turn}").touch()  # the directory is looked at again
                with failing(monkeypatch, name, code, skip=turn):
                    assert len(reader.exists(pages)) == 4
                    assert len(reader.get(pages)) == 4
                    assert len(reader.put(pages_of(2, "mine"))) == 2
                    store.collect()
                    store.evict(1)
                assert all(r.ok for r in reader.get(pages[2:])) or name == "pread"
                assert sum(store.counters.poisoned.values()) == 0
        assert not writer.counters.poisoned


@pytest.mark.parametrize("name", ["open", "pread", "fstat", "scandir"])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT])
def test_a_segment_that_another_machine_removes_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    with PageStore.open(tmp_path, SPACE, Policy(segment_bytes=WHOLE.nbytes)) as store:
        Rank(store, WHOLE).put(pages_of(3))
    for skip in range(2, 12):
        with failing(monkeypatch, name, code, skip=skip):
            store = PageStore.open(tmp_path, SPACE)
            rank = Rank(store, WHOLE)
            rank.exists(pages_of(3))
        assert rank.exists(pages_of(3)) == [True] * 3, skip
        assert [r.ok for r in rank.get(pages_of(3))] == [True] * 3
        store.close()


def test_what_another_machine_evicts_is_no_poison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client still sees the header alive, and already the blocks that were given back."""
    pages = pages_of(3)
    with PageStore.open(tmp_path, SPACE) as store:
        rank = Rank(store, WHOLE)
        rank.put(pages)
        with next(segments_of(store).folder.glob(f"*{DATA}")).open("r+b") as data:
            data.seek(WHOLE.nbytes)
            data.write(bytes(WHOLE.nbytes))
        assert [r.outcome for r in rank.get(pages)] == [Got.READ, Got.EVICTED, Got.READ]
        assert not store.counters.poisoned


def test_a_read_that_is_garbled_once_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = pages_of(4)
    with PageStore.open(tmp_path, SPACE) as store:
        rank = Rank(store, WHOLE)
        rank.put(pages)
        real, calls = os.preadv, [0]

        def garbled(fd, views, offset):
            moved = real(fd, views, offset)
            calls[0] += 1
            if calls[0] == 1:
                views[0][100] ^= 1
            return moved

        monkeypatch.setattr(os, "preadv", garbled)
        assert [r.outcome for r in rank.get(pages)] == [Got.READ] * 4
        assert not store.counters.poisoned


def test_a_process_that_finds_everything_bad_leaves_most_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit of its memory is broken: whatever it reads, however often."""
    pages = pages_of(96)
    with PageStore.open(tmp_path, SPACE) as store, PageStore.open(tmp_path, SPACE) as other:
        rank, broken = Rank(store, WHOLE, 96), Rank(other, WHOLE, 96)
        rank.put(pages)
        real = os.preadv

        def flipped(fd, views, offset):
            moved = real(fd, views, offset)
            for view in views:
                for at in range(0, len(view), WHOLE.nbytes // 4):
                    view[at] ^= 1
            return moved

        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", flipped)
            assert not any(r.ok for r in broken.get(pages))
        assert sum(other.counters.poisoned.values()) == 32
        assert other.counters.spared == 64
        assert not any(broken.exists(pages)), "it asks for them no more"
        assert sum(r.ok for r in rank.get(pages)) == 64


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EFAULT])
def test_a_file_system_that_only_opens_directly_is_served_by_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:

    def refusing(real):
        def refuse(fd, views, offset):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(code, os.strerror(code))
            return real(fd, views, offset)

        return refuse

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    with PageStore.open(tmp_path, SPACE, files=PlainFiles(Access.DIRECT)) as store:
        rank, pages = Rank(store, WHOLE), pages_of(8)
        assert [r.outcome for r in rank.put(pages)] == [Put.WRITTEN] * 8
        assert [r.outcome for r in rank.get(pages)] == [Got.READ] * 8
    chosen = files_for(tmp_path)
    assert chosen.name == "plain, buffered"
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_ranks_that_start_together_do_not_spoil_each_others_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank removes every trial that it knows the name of."""
    names: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more: names.append(str(path)) or real(path, *more))
    for _ in range(2):
        files_for(tmp_path).close()
    trials = [name for name in names if ".kvmover-direct" in name]
    assert len(trials) == len(set(trials)) == 2


def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next `fdatasync` fails, as the kernel says it: once, and what was to be written is gone."""
    real, left = os.fdatasync, [1]

    def sync(fd: int) -> None:
        left[0] -= 1
        if left[0] >= 0:
            os.truncate(fd, 0)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fdatasync", sync)


def test_what_the_disk_did_not_take_is_never_called_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = pages_of(8)
    with PageStore.open(tmp_path, SPACE) as store:
        rank = Rank(store, WHOLE)
        rank.put(pages)
        lost(monkeypatch)
        with pytest.raises(StoreError, match="Input/output error"):
            store.flush()
        store.flush()
        with PageStore.open(tmp_path, SPACE, machine=OTHER_HOST) as other:
            assert not any(Rank(other, WHOLE).exists(pages))
        assert not any(rank.exists(pages))
        assert [r.outcome for r in rank.put(pages)] == [Put.WRITTEN] * 8
        store.flush()
        with PageStore.open(tmp_path, SPACE, machine=OTHER_HOST) as other:
            assert all(r.ok for r in Rank(other, WHOLE).get(pages))


def test_one_segment_that_fails_keeps_no_other_from_being_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = pages_of(6)
    with PageStore.open(tmp_path, SPACE, Policy(segment_bytes=2 * WHOLE.nbytes)) as store:
        Rank(store, WHOLE).put(pages)
        lost(monkeypatch)
        with pytest.raises(StoreError):
            store.flush()
        with PageStore.open(tmp_path, SPACE, machine=OTHER_HOST) as other:
            assert sum(r.ok for r in Rank(other, WHOLE).get(pages)) == 4


def test_a_flush_covers_what_a_put_found_present(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by a process that has not flushed: it is synced by whom its bytes have served."""
    pages = pages_of(3)
    synced: list[str] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or real(fd))
    with PageStore.open(tmp_path, SPACE) as store, PageStore.open(tmp_path, SPACE) as other:
        Rank(store, WHOLE).put(pages)
        assert [r.outcome for r in Rank(other, WHOLE).put(pages)] == [Put.PRESENT] * 3
        other.flush()
        (segment,) = segments_of(store).catalog.segments.values()
        assert synced == [str(segment.data), str(segment.head)]
        other.flush()
        assert len(synced) == 2


def test_names_are_made_safe_before_pages_are_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory, and the manifest in it, in this order: name, then mark."""
    steps: list[str] = []
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def sync(fd, real=real):
            steps.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
            real(fd)

        monkeypatch.setattr(os, name, sync)
    with PageStore.open(tmp_path, SPACE) as store:
        assert [step.rpartition(".")[2] for step in steps] == ["tmp", SPACE.folder, tmp_path.name]
        steps.clear()
        Rank(store, WHOLE).put(pages_of(2))
        store.flush()
        assert [Path(step).suffix or step for step in steps] == [DATA, SPACE.folder, tmp_path.name, HEAD]


def test_a_flush_marks_no_other_file_where_its_segment_goes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk is waited for another process clears, and the numbers of the segment's descriptors are others'."""
    innocent, taken = tmp_path / "innocent", list[int]()
    innocent.touch()
    with PageStore.open(tmp_path, SPACE) as store:
        Rank(store, WHOLE).put(pages_of(2))
        catalog = segments_of(store).catalog
        (segment,) = catalog.segments.values()
        numbers = {segment.head_fd, segment.data_fd}

        def sync(fd: int, real=os.fdatasync) -> None:
            real(fd)
            if not taken:
                catalog.forget(segment.name)
                taken.extend(os.open(innocent, os.O_RDWR) for _ in range(8))

        monkeypatch.setattr(os, "fdatasync", sync)
        store.flush()
        assert numbers <= set(taken)
        assert not innocent.read_bytes()
        for fd in taken:
            os.close(fd)


def test_a_living_writer_keeps_its_segment_where_machines_do_not_share_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre's `localflock`, NFS's `nolock`: every lock is had. A head that was written lately is left alone."""
    monkeypatch.setattr("kvmover.store.takeover.is_shared", lambda _: True)
    pages = pages_of(6)
    with PageStore.open(tmp_path, SPACE) as store, PageStore.open(tmp_path, SPACE, machine=OTHER_HOST) as other:
        rank, seen = Rank(store, WHOLE), Rank(other, WHOLE)
        rank.put(pages[:2])
        store.flush()
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
        assert other.collect().adopted_segments == 0
        rank.put(pages[2:])
        store.flush()
        assert all(seen.exists(pages))
        (head,) = segments_of(store).folder.glob(f"*{HEAD}")
        os.utime(head, (1, 1))
        assert other.collect().adopted_segments == 1, "of a writer that is silent"
        assert all(r.ok for r in seen.get(pages))


def test_a_flush_beside_a_clear_is_no_error(tmp_path: Path) -> None:
    policy = Policy(segment_bytes=WHOLE.nbytes)
    with PageStore.open(tmp_path, SPACE, policy) as one, PageStore.open(tmp_path, SPACE) as two:
        rank = Rank(one, WHOLE)
        rank.put(pages_of(3))
        two.clear()
        one.flush()
        assert all(r.ok for r in rank.put(pages_of(3)))
        one.flush()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of twelve pages, where this user may mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={12 * WHOLE.nbytes}", "tmpfs", str(mount)]
    if not shutil.which("mount") or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("cannot mount a file system here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_without_a_quota_evicts(small_disk: Path) -> None:
    with PageStore.open(small_disk, SPACE, Policy(segment_bytes=3 * WHOLE.nbytes)) as store:
        rank = Rank(store, WHOLE)
        for turn in range(12):
            pages = pages_of(4, f"{turn}")
            assert all(r.ok for r in rank.put(pages)), turn
            assert all(r.ok for r in rank.get(pages)), turn
        assert store.counters.evicted_pages >= 36
        assert not store.counters.poisoned


def test_a_snapshot_that_nobody_may_write_serves_readers(small_disk: Path) -> None:
    pages = pages_of(4)
    with PageStore.open(small_disk, SPACE) as store:
        Rank(store, WHOLE).put(pages)
        store.flush()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with PageStore.open(small_disk, SPACE, machine=OTHER_HOST) as store:
        rank = Rank(store, WHOLE)
        assert [r.outcome for r in rank.get(pages)] == [Got.READ] * 4
        assert {(r.outcome, r.reason) for r in rank.put(pages_of(2, "new"))} == {(Put.FAILED, "Read-only file system")}
        store.collect()
        store.flush()
        assert not store.counters.lagged


@contextmanager
def descriptors() -> Iterator[Callable[[], int]]:
    before = len(os.listdir("/proc/self/fd"))
    yield lambda: len(os.listdir("/proc/self/fd")) - before


def test_sealed_segments_hold_no_descriptor(tmp_path: Path) -> None:
    pages = pages_of(40)
    with descriptors() as more:
        with PageStore.open(tmp_path, SPACE, Policy(segment_bytes=WHOLE.nbytes)) as store:
            rank = Rank(store, WHOLE, 40)
            rank.put(pages)
            store.flush()
        with PageStore.open(tmp_path, SPACE) as store:
            assert len(segments_of(store).catalog.segments) == 40
            assert more() <= 4
            assert all(r.ok for r in Rank(store, WHOLE, 40).get(pages))
        assert more() == 0


def test_one_hot_page_a_segment_does_not_cost_the_whole_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without hole punching, asked for room of two pages of two hundred."""
    monkeypatch.setattr("kvmover.store.segment_catalog.punch", lambda fd, offset, nbytes: False)
    pages = pages_of(200)
    with PageStore.open(tmp_path, SPACE, Policy(segment_bytes=20 * WHOLE.nbytes)) as store:
        rank = Rank(store, WHOLE, 20)
        for first in range(0, 200, 20):
            rank.put(pages[first : first + 20])
        store.flush()
        store.evict(1)  # which finds that nothing is punched here
        hot = [page for page in pages[19::20] if rank.exists([page])[0]]
        rank.get(hot)
        before = store.stat().pages
        assert store.evict(2 * WHOLE.nbytes) >= 2 * WHOLE.nbytes
        assert before - store.stat().pages <= 20
        assert [r.ok for r in rank.get(hot)] == [True] * len(hot)
        assert sum(path.stat().st_size for path in segments_of(store).folder.glob(f"*{DATA}")) <= 198 * WHOLE.nbytes


def test_a_page_of_the_future_does_not_outlive_the_others(tmp_path: Path) -> None:
    """It was written by a machine whose clock was a day ahead."""
    hand = [HostBoot.now() + 86400]

    class Clock(HostBoot):
        def now(self) -> int:
            return hand[0]

    clock = Clock(HostBoot(b"the other host..").boot)
    with PageStore.open(tmp_path, SPACE, machine=clock) as store:
        rank = Rank(store, WHOLE)
        rank.put(pages_of(1))
        hand[0] -= 86400
        rank.put(pages_of(5, "later"))
    with PageStore.open(tmp_path, SPACE, Policy(ttl_s=60), machine=clock) as store:
        hand[0] += 100
        store.collect()
        assert store.stat().pages == 0
