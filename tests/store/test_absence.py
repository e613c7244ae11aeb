"""What is not seen is not gone: before a file or a page of others goes, it was looked at twice, in different ways."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from failing_calls import failing
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.errors import StoreError
from kvmover.store import Got, HostBoot, PagePart, PageStore, Policy, Put, clear_unused
from kvmover.store.absence import gaps, is_data_missing, read_head_anew, remove_stillborn, why_empty, why_orphan
from kvmover.store.boot import NO_BOOT
from kvmover.store.deletion import DELETIONS, DeletionDoor, Look, Seen, TwoLooks
from kvmover.store.record import (
    DEAD,
    DIGEST_BYTES,
    LIVE,
    PREAMBLE_BYTES,
    STATE_AT,
    Kind,
    Preamble,
    encode_mark,
    encode_object,
)
from kvmover.store.segment import DATA, HEAD, Life, Segment
from tests.store.segments import segments_of

WHOLE = PagePart.whole(GQA, PAGE)
SMALL = Policy(segment_bytes=4 * WHOLE.nbytes)
HERE, THERE, JUDGE = HostBoot(b"this machine...."), HostBoot(b"another machine."), HostBoot(b"who sees after..")
PAGES = pages_of(24)


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Path]:
    """A root with 24 flushed pages in six segments, whose writer lives on."""
    with PageStore.open(tmp_path, SPACE, SMALL, machine=HERE) as store:
        assert all(r.ok for r in Rank(store, WHOLE, 24).put(PAGES))
        store.flush()
        yield tmp_path


def left(root: Path, pages: Sequence[bytes] = PAGES) -> int:
    """How many of the pages a machine reads that had no part in the trouble."""
    with PageStore.open(root, SPACE, SMALL, machine=JUDGE) as store:
        return sum(r.ok for r in Rank(store, WHOLE, len(pages)).get(pages))


@pytest.mark.parametrize("machine", [HERE, THERE], ids=["here", "there"])
@pytest.mark.parametrize("times", [1, 1 << 30])
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EIO, errno.ETIMEDOUT, errno.EACCES, errno.ESTALE, errno.ENOENT])
def test_a_size_that_nobody_tells_costs_nobody_a_page(filled: Path, code: int, times: int, machine: HostBoot) -> None:
    with failing("stat", code, DATA, times) as failed:
        store = PageStore.open(filled, SPACE, SMALL, machine=machine)
        store.collect()
        store.close()
    assert failed[0]
    assert left(filled) == 24


@pytest.mark.parametrize("act", ["get", "verify", "collect", "open"])
@pytest.mark.parametrize("suffix", [DATA, HEAD])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT, errno.EACCES])
def test_a_file_that_one_process_cannot_open_is_there_for_the_others(
    filled: Path, code: int, suffix: str, act: str
) -> None:
    if act == "open":
        with failing("open", code, suffix):
            PageStore.open(filled, SPACE, SMALL, machine=THERE).close()
    else:
        with PageStore.open(filled, SPACE, SMALL, machine=THERE) as store:
            rank = Rank(store, WHOLE, 24)
            with failing("open", code, suffix), suppress(OSError):
                {"get": lambda: rank.get(PAGES), "verify": store.verify, "collect": store.collect}[act]()
            assert not store.counters.poisoned
            assert all(r.ok for r in rank.get(PAGES)), "it has forgotten what it could not open"
    assert left(filled) == 24


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT])
@pytest.mark.parametrize("suffix", [DATA, HEAD])
def test_a_flush_that_cannot_open_what_it_owes_says_so(tmp_path: Path, suffix: str, code: int) -> None:
    """Pages that another has put and not flushed."""
    with PageStore.open(tmp_path, SPACE) as one, PageStore.open(tmp_path, SPACE) as two:
        Rank(one, WHOLE).put(PAGES[:2])
        assert {r.outcome for r in Rank(two, WHOLE).put(PAGES[:2])} == {Put.PRESENT}
        with failing("open", code, suffix), pytest.raises(StoreError):
            two.flush()
        two.flush()


@pytest.mark.parametrize("act", ["get", "verify"])
def test_an_error_of_the_disk_says_nothing_against_an_object_however_often_it_comes(filled: Path, act: str) -> None:
    """Who meets it forgets the object, so that it can be put again, and leaves it to the others."""
    with PageStore.open(filled, SPACE, SMALL, machine=THERE) as store:
        rank = Rank(store, WHOLE, 24)
        with failing("preadv", errno.EIO):
            if act == "get":
                assert {r.outcome for r in rank.get(PAGES)} == {Got.FAILED}
            else:
                assert store.verify().spared == {os.strerror(errno.EIO): 24}
        assert not store.counters.poisoned
        assert store.counters.spared == 24
        assert {r.outcome for r in rank.put(PAGES)} == {Put.WRITTEN}
    assert left(filled) == 24


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE, errno.EIO])
def test_a_descriptor_that_the_system_does_not_know_ends_no_segment(filled: Path, code: int) -> None:
    policy = Policy(segment_bytes=4 * WHOLE.nbytes, ttl_s=1 << 20)
    with PageStore.open(filled, SPACE, policy, machine=THERE) as store:
        rank = Rank(store, WHOLE, 24)
        with failing("fstat", code):
            rank.get(PAGES)
            store.evict(0)
            segments_of(store).catalog._doubted = [(name, 0) for name in segments_of(store).catalog.segments]
            for _ in range(8):
                store.collect()
    assert left(filled) == 24


def test_verify_keeps_to_the_budget(tmp_path: Path) -> None:
    """A process with bad memory finds everything bad, and is told so; most is left to the others."""
    pages = pages_of(80)
    with PageStore.open(tmp_path, SPACE, machine=HERE) as store:
        assert all(r.ok for r in Rank(store, WHOLE, 80).put(pages))
        store.flush()
        real = os.preadv

        def flipped(fd, views, offset):
            moved = real(fd, views, offset)
            for at in range(0, len(views[0]), WHOLE.nbytes // 4):
                views[0][at] ^= 1
            return moved

        with PageStore.open(tmp_path, SPACE, machine=THERE) as broken:
            os.preadv = flipped
            try:
                verified = broken.verify()
            finally:
                os.preadv = real
            assert (verified.bad, verified.spared) == ({"digest": 32}, {"digest": 48})
            assert broken.counters.deleted == {"digest": 32}
    assert left(tmp_path, pages) == 48


def test_a_listing_that_lacks_the_heads_removes_no_data(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of names on a network file system, of a while ago."""
    with PageStore.open(filled, SPACE, SMALL, machine=THERE) as store, monkeypatch.context() as patched:
        patched.setattr("kvmover.store.takeover.segments_in", lambda _: set())
        store.collect()
    assert left(filled) == 24


@pytest.mark.parametrize("name", ["pread", "fstat", "stat"])
def test_a_head_that_is_read_with_errors_is_not_damaged(tmp_path: Path, name: str) -> None:
    """Of a dead writer: nothing is jumped over, cut off or given back."""
    writer = PageStore.open(tmp_path, SPACE, machine=HERE)
    assert all(r.ok for r in Rank(writer, WHOLE, 24).put(PAGES))
    writer.flush()
    for segment in segments_of(writer).catalog.segments.values():
        fcntl.flock(segment.head_fd, fcntl.LOCK_UN)
    for skip in range(24):
        with suppress(StoreError), failing_after(name, skip):
            PageStore.open(tmp_path, SPACE, machine=HERE if skip % 2 else THERE).close()
    assert left(tmp_path) == 24
    writer.close()


@pytest.mark.parametrize("policy", [Policy(ttl_s=1), Policy()], ids=["ttl", "quota"])
def test_a_page_whose_last_use_nobody_tells_is_not_the_next_to_go(
    filled: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    """Another process has used all of them a moment ago, and its word cannot be read."""
    monkeypatch.setattr(HostBoot, "now", staticmethod(lambda: int(time.time()) + 3600))
    with PageStore.open(filled, SPACE, policy, machine=THERE) as store:
        with failing("pread", errno.EIO) as failed:
            store.collect()
            store.evict(4 * WHOLE.nbytes)
        assert failed[0]
        assert not store.counters.deleted
        assert store.evict(4 * WHOLE.nbytes) >= 4 * WHOLE.nbytes or policy.ttl_s


@contextmanager
def failing_after(name: str, skip: int) -> Iterator[None]:
    """`os.<name>` fails once, after so many calls."""
    real, calls = getattr(os, name), [0]

    def call(*arguments, **options):
        calls[0] += 1
        if calls[0] == skip + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments, **options)

    setattr(os, name, call)
    try:
        yield
    finally:
        setattr(os, name, real)


def test_a_file_system_that_locks_no_new_file_costs_a_put_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PageStore.open(tmp_path, SPACE) as store:
        rank = Rank(store, WHOLE)

        def busy(*_: object) -> None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

        with monkeypatch.context() as patched:
            patched.setattr(fcntl, "flock", busy)
            assert {r.outcome for r in rank.put(PAGES[:2])} == {Put.FAILED}
        assert not [path for path in segments_of(store).folder.iterdir() if path.suffix in (HEAD, DATA)]
        assert all(r.ok for r in rank.put(PAGES[:2]))


@pytest.mark.parametrize("name", ["stat", "lstat", "mkdir", "open", "scandir", "replace"])
@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EROFS, errno.EACCES])
def test_what_the_system_says_of_the_root_is_a_store_error(tmp_path: Path, name: str, code: int) -> None:
    with failing(name, code), suppress(StoreError):
        PageStore.open(tmp_path, SPACE).close()


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT, errno.EIO])
def test_a_namespace_whose_times_nobody_tells_is_in_use(filled: Path, code: int) -> None:
    with failing("stat", code, HEAD), suppress(StoreError):
        clear_unused(filled, 3600)
    with failing("stat", code, ".json"), suppress(StoreError):
        clear_unused(filled, 3600)
    assert left(filled) == 24


def test_a_long_head_of_zeros_is_read_in_pieces(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = filled / SPACE.folder
    head = folder / "0123456789abcdef-00000007.head"
    head.touch()
    os.truncate(head, 256 << 20)
    head.with_suffix(DATA).touch()
    longest, real = [0], os.pread

    def pread(fd, nbytes, offset):
        longest[0] = max(longest[0], nbytes)
        return real(fd, nbytes, offset)

    monkeypatch.setattr(os, "pread", pread)
    with PageStore.open(filled, SPACE, SMALL, machine=THERE):
        assert not head.exists()
    assert longest[0] <= 16 << 20
    assert left(filled) == 24


def test_the_blocks_that_no_object_holds_are_gaps() -> None:
    block = 4096
    assert gaps(block, []) == [(0, block)]
    assert gaps(block, [(0, 1)]) == gaps(0, []) == []
    assert gaps(4 * block, [(0, block), (block, block)]) == [(2 * block, 2 * block)]
    assert gaps(4 * block, [(2 * block, block + 1), (block, 1)]) == [(0, block)]
    assert gaps(5 * block, [(3 * block, 1), (block, 1)]) == [(0, block), (2 * block, block), (4 * block, block)]


def test_a_segment_with_an_object_that_lives_is_not_empty(filled: Path) -> None:
    with PageStore.open(filled, SPACE, SMALL, machine=THERE) as store:
        assert [why_empty(each) for each in segments_of(store).catalog.segments.values()] == [None] * 6


PREAMBLE = Preamble(SPACE.digest, bytes(16)).encode()
SEAL = (Kind.SEALED, 0)


def head_of(folder: Path, *records: int | tuple[Kind, int] | bytes, life: Life = Life.SEALED) -> Segment:
    """A segment whose head has a preamble and such records: an object with this state, a mark, or other bytes."""
    raw, key = PREAMBLE, WHOLE.key(SPACE)
    for number, each in enumerate(records):
        at = len(raw)
        if isinstance(each, bytes):
            raw += each
        elif isinstance(each, tuple):
            raw += encode_mark(at, *each)
        else:
            cells = key.box.cells
            place = number * WHOLE.nbytes, WHOLE.nbytes
            one = encode_object(at, 1, place, PAGES[number], key, bytes(DIGEST_BYTES * cells))
            raw += one[:STATE_AT] + each.to_bytes(4, "little") + one[STATE_AT + 4 :]
    (folder / f"a{HEAD}").write_bytes(raw)
    return Segment(folder, "a", NO_BOOT, life)


def test_a_head_is_read_beyond_its_damages_and_they_are_counted(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    found = read_head_anew(head_of(tmp_path, LIVE, bytes(40), SEAL, DEAD, bytes(64), LIVE, bytes(8)))
    assert found.living == [(0, WHOLE.nbytes), (5 * WHOLE.nbytes, WHOLE.nbytes)]
    assert (found.damages, found.sealed) == (3, True)
    assert found.end == found.nbytes - 8
    assert not read_head_anew(head_of(tmp_path, DEAD)).sealed
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_segment_is_empty_if_both_looks_say_so_and_it_is_finished_or_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def promised(*records: int | tuple[Kind, int] | bytes, life: Life = Life.SEALED) -> int | None:
        looks = why_empty(head_of(tmp_path, *records, life=life))
        return None if looks is None else looks.promised

    assert promised(DEAD, SEAL) == 0
    assert promised(DEAD, bytes(40), SEAL) == DELETIONS, "a damaged stretch may have been an object"
    assert promised(LIVE, SEAL) is None
    assert promised(DEAD) is None, "its writer may append"
    assert promised(DEAD, life=Life.FULL) == 0
    segment, real = head_of(tmp_path, DEAD, SEAL), os.lstat
    with monkeypatch.context() as patched:
        longer = os.stat_result([*real(segment.head)[:6], real(segment.head).st_size + 8, *real(segment.head)[7:]])
        patched.setattr(os, "lstat", lambda _: longer)
        assert why_empty(segment) is None, "the name leads to another length than the file that was read"


def test_data_is_missing_only_beside_its_head(tmp_path: Path) -> None:
    segment = Segment(tmp_path, "a", NO_BOOT, Life.SEALED)
    assert not is_data_missing(segment)
    (tmp_path / f"a{HEAD}").touch()
    assert is_data_missing(segment)
    (tmp_path / f"a{DATA}").touch()
    assert not is_data_missing(segment)


def test_data_is_an_orphan_if_the_system_says_that_there_is_no_head_and_not_if_it_says_nothing(tmp_path: Path) -> None:
    (tmp_path / f"a{DATA}").write_bytes(bytes(3 * 4096))
    looks = why_orphan(tmp_path, "a")
    assert looks is not None
    assert looks.promised == 3
    with failing("lstat", errno.EIO, HEAD), pytest.raises(OSError, match=os.strerror(errno.EIO)):
        why_orphan(tmp_path, "a")
    (tmp_path / f"a{HEAD}").touch()
    assert why_orphan(tmp_path, "a") is None


def test_a_head_without_its_preamble_goes_unless_its_writer_is_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = DeletionDoor(0.0)
    head, data = tmp_path / f"a{HEAD}", tmp_path / f"a{DATA}"
    data.touch()
    head.write_bytes(bytes(PREAMBLE_BYTES))
    remove_stillborn(tmp_path, "a", door, 0.0)
    assert head.exists(), "its preamble is whole"
    for name in ("pread", "lstat"):
        told = {"pread": b"", "lstat": os.stat_result([0] * 10)}[name]
        with monkeypatch.context() as patched:
            patched.setattr(os, name, lambda *_, told=told: told)
            remove_stillborn(tmp_path, "a", door, 0.0)
        assert head.exists(), "one look of two says so"
    head.write_bytes(bytes(PREAMBLE_BYTES - 1))
    before = len(os.listdir("/proc/self/fd"))
    with head.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        remove_stillborn(tmp_path, "a", door, 0.0)
        assert head.exists()
    remove_stillborn(tmp_path, "a", door, 0.0)
    assert not head.exists()
    assert door.deleted.total() == 1
    dear = TwoLooks(Look(Seen.READ, "digest"), Look(Seen.ANEW, "digest"), DELETIONS)
    assert door.ask(dear, DELETIONS, 0.0), "a head without a first line has no object, and cost no budget"
    assert len(os.listdir("/proc/self/fd")) == before
