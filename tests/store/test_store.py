"""Pages in, pages out: answers for each page, no page twice, bad ones gone, and only what fits."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from store_rank import GQA, MLA, PAGE, SPACE, Rank, pages_of

from kvmover.errors import DescriptorError, StoreError
from kvmover.layout import Component, Fleet
from kvmover.store import Got, HostBoot, Namespace, PagePart, PageStore, Policy, Put, this_boot
from kvmover.store.deletion import DeletionOrder
from kvmover.store.files import Access, PlainFiles
from tests.store.segments import segments_of

WHOLE = PagePart.whole(GQA, PAGE)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PageStore]:
    with PageStore.open(tmp_path, SPACE) as opened:
        yield opened


def data_files(store: PageStore) -> list[Path]:
    return sorted(segments_of(store).folder.glob("*.data"))


def damage(store: PageStore, at: int, junk: bytes = b"\x00\xff" * 8) -> None:
    with data_files(store)[0].open("r+b") as file:
        file.seek(at)
        file.write(junk)


def test_what_is_put_is_there_and_comes_back(store: PageStore) -> None:
    rank, pages = Rank(store, WHOLE), pages_of(10)
    assert not any(rank.exists(pages))
    assert [result.outcome for result in rank.put(pages)] == [Put.WRITTEN] * 10
    assert rank.exists(pages) == [True] * 10
    assert [result.outcome for result in rank.get(pages[::-1])] == [Got.READ] * 10


def test_a_missing_page_fails_alone(store: PageStore) -> None:
    rank, pages = Rank(store, WHOLE), pages_of(6)
    rank.put(pages[:2] + pages[3:])
    assert [r.outcome for r in rank.get(pages)] == [Got.READ, Got.READ, Got.ABSENT, Got.READ, Got.READ, Got.READ]
    assert rank.view.leading(pages) == 2


def test_a_page_is_written_once(store: PageStore) -> None:
    rank, pages = Rank(store, WHOLE), pages_of(4)
    rank.put(pages)
    size = store.stat().held_bytes
    assert [r.outcome for r in rank.put(pages)] == [Put.PRESENT] * 4
    assert store.stat().held_bytes == size


def test_twins_in_a_batch_are_one_object(store: PageStore) -> None:
    rank, (page, other) = Rank(store, WHOLE), pages_of(2)
    assert [r.outcome for r in rank.put([page, other, page])] == [Put.WRITTEN, Put.WRITTEN, Put.PRESENT]
    assert store.stat().objects == 2
    assert all(r.ok for r in rank.get([page, page, other]))


def test_a_damaged_page_is_a_miss_then_gone_then_writable(store: PageStore) -> None:
    rank, pages = Rank(store, WHOLE), pages_of(3)
    rank.put(pages)
    damage(store, WHOLE.nbytes + 100)
    assert [r.outcome for r in rank.get(pages)] == [Got.READ, Got.POISONED, Got.READ]
    assert rank.exists(pages) == [True, False, True]
    assert dict(store.counters.poisoned) == {"digest": 1}
    assert [r.outcome for r in rank.put(pages)] == [Put.PRESENT, Put.WRITTEN, Put.PRESENT]
    assert all(r.ok for r in rank.get(pages))


def test_a_truncated_file_fails_only_the_pages_it_lost(store: PageStore) -> None:
    rank, pages = Rank(store, WHOLE), pages_of(4)
    rank.put(pages)
    os.truncate(data_files(store)[0], 2 * WHOLE.nbytes + 1000)
    assert [r.outcome for r in rank.get(pages)] == [Got.READ, Got.READ, Got.POISONED, Got.POISONED]
    assert rank.exists(pages) == [True, True, False, False]


def test_another_copy_serves_where_one_is_bad(tmp_path: Path) -> None:
    pages = pages_of(2)
    with PageStore.open(tmp_path, SPACE) as store:
        whole = Rank(store, WHOLE)
        halves = [Rank.of(store, GQA, Fleet(tp=2), rank) for rank in range(2)]
        for half in halves:
            half.put(pages)
        # Written behind the back of the lookup, as a second process may that has not heard of the first.
        whole.view._missing = lambda _, pages, _results: list(range(len(pages)))
        whole.put(pages)
        assert store.stat().objects == 6
        damage(store, 0)  # an object of the first half
        damage(store, 4 * halves[0].part.nbytes + 8)  # the first whole page
        assert [r.outcome for r in whole.get(pages)] == [Got.POISONED, Got.READ]
        assert all(r.ok for r in halves[1].get(pages))
        assert [r.outcome for r in halves[0].get(pages)] == [Got.ABSENT, Got.READ]


def test_a_bad_whole_page_is_read_from_its_halves(tmp_path: Path) -> None:
    pages = pages_of(1)
    with PageStore.open(tmp_path, SPACE) as store:
        whole = Rank(store, WHOLE)
        whole.put(pages)
        halves = [Rank.of(store, GQA, Fleet(tp=2), rank) for rank in range(2)]
        for half in halves:
            half.view._missing = lambda _, pages, _results: list(range(len(pages)))
            half.put(pages)
        damage(store, 0)
        assert [r.outcome for r in whole.get(pages)] == [Got.READ]
        assert store.stat().objects == 2


def test_a_page_of_another_dtype_weights_page_size_or_tenant_is_absent(tmp_path: Path) -> None:
    pages = pages_of(2)
    spaces = [
        SPACE,
        Namespace("llama", "rev-2", PAGE),
        Namespace("llama", "rev-1", PAGE, "tenant"),
        Namespace("llama", "rev-1", 32),
    ]
    parts = [WHOLE, PagePart.whole(Component.attention(4, 8, 32, "float8_e4m3fn"), PAGE)]  # equal in bytes
    assert parts[0].nbytes == parts[1].nbytes
    with PageStore.open(tmp_path, SPACE) as store:
        Rank(store, WHOLE).put(pages)
    for space in spaces:
        for part in parts:
            with PageStore.open(tmp_path, space) as store:
                expected = space == SPACE and part is WHOLE
                assert Rank(store, part, namespace=space).exists(pages) == [expected] * 2


def test_one_replica_writes_a_page_and_the_others_call_it_done(store: PageStore) -> None:
    fleet, pages = Fleet(tp=4), pages_of(12)
    ranks = [Rank.of(store, MLA, fleet, rank) for rank in range(4)]
    outcomes = [[r.outcome for r in rank.put(pages)] for rank in ranks]
    assert all(len(answers) == len(pages) for answers in outcomes)
    assert store.stat().objects == len(pages)
    for page in range(len(pages)):
        assert sorted(answers[page] for answers in outcomes).count(Put.WRITTEN) == 1
    assert len({tuple(answers) for answers in outcomes}) == 4, "one replica wrote them all"
    assert all(all(r.ok for r in rank.get(pages)) for rank in ranks)


def test_the_least_recently_read_page_goes_first_and_whole(tmp_path: Path) -> None:
    pages = pages_of(6)
    part = PagePart.whole(MLA, PAGE)
    both = WHOLE.nbytes + -(-part.nbytes // 4096) * 4096
    with PageStore.open(tmp_path, SPACE, Policy(quota_bytes=6 * both)) as store:
        attention, latent = Rank(store, WHOLE), Rank(store, part)
        attention.put(pages)
        latent.put(pages)
        attention.get(pages[:1])
        latent.get(pages[1:2])
        assert all(r.ok for r in attention.put(pages_of(2, "more")))
        gone = [not here for here in attention.exists(pages)]
        assert gone == [not here for here in latent.exists(pages)], "a page lost some of its parts only"
        assert gone[:2] == [False, False]
        assert gone[2]
        assert store.stat().held_bytes <= 6 * both


def test_the_quota_is_never_exceeded_and_says_so(tmp_path: Path) -> None:
    with PageStore.open(tmp_path, SPACE, Policy(quota_bytes=3 * WHOLE.nbytes, segment_bytes=WHOLE.nbytes)) as store:
        rank = Rank(store, WHOLE)
        for turn in range(5):
            assert all(r.ok for r in rank.put(pages_of(2, str(turn))))
            assert store.stat().held_bytes <= 3 * WHOLE.nbytes
        answers = rank.put(pages_of(4, "too many"))
        assert {(r.outcome, r.reason.split()[-1]) for r in answers} == {(Put.FAILED, str(3 * WHOLE.nbytes))}
        store.flush()
        store.collect()
        assert sum(path.stat().st_blocks * 512 for path in data_files(store)) <= 4 * WHOLE.nbytes


@dataclass(frozen=True, slots=True)
class Clock(HostBoot):
    """The machine at another time."""

    hands: tuple[list[int], ...] = ()

    def now(self) -> int:
        return self.hands[0][0]


def test_a_page_nobody_used_for_the_ttl_is_gone(tmp_path: Path) -> None:
    hand = [1000]
    clock = Clock(this_boot().boot, (hand,))
    with PageStore.open(tmp_path, SPACE, Policy(ttl_s=60), machine=clock) as store:
        rank, pages = Rank(store, WHOLE), pages_of(3)
        rank.put(pages)
        hand[0] = 1050
        rank.get(pages[1:2])
        hand[0] = 1070
        assert rank.exists(pages) == [False, True, False]
        hand[0] = 1111
        assert not any(r.ok for r in rank.get(pages))
        assert store.counters.expired_pages == 3


def test_a_read_in_one_process_keeps_a_page_from_the_cleaner_of_another(tmp_path: Path) -> None:
    hand = [1000]
    clock = Clock(this_boot().boot, (hand,))
    pages = pages_of(4)
    with PageStore.open(tmp_path, SPACE, machine=clock) as one, PageStore.open(tmp_path, SPACE, machine=clock) as two:
        reader = Rank(one, WHOLE)
        reader.put(pages)
        assert Rank(two, WHOLE).view.leading(pages) == 4
        hand[0] = 2000
        reader.get(pages[:1])
        one.collect()
        two.evict(3 * WHOLE.nbytes)
        assert reader.exists(pages) == [True, False, False, False]


def test_clear_touches_its_own_namespace_only(tmp_path: Path) -> None:
    other = Namespace("llama", "rev-2", PAGE)
    (tmp_path / "precious.txt").write_text("mine")
    with PageStore.open(tmp_path, SPACE) as mine, PageStore.open(tmp_path, other) as theirs:
        Rank(mine, WHOLE).put(pages_of(3))
        kept = Rank(theirs, WHOLE, namespace=other)
        kept.put(pages_of(3))
        assert mine.clear() == 3
        assert not any(Rank(mine, WHOLE).exists(pages_of(3)))
        assert all(r.ok for r in kept.get(pages_of(3)))
        assert not data_files(mine)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_writer_goes_on_after_another_process_cleared(tmp_path: Path) -> None:
    with PageStore.open(tmp_path, SPACE) as one, PageStore.open(tmp_path, SPACE) as two:
        rank, pages = Rank(one, WHOLE), pages_of(3)
        rank.put(pages)
        assert two.clear() == 3
        assert rank.exists(pages) == [False] * 3
        assert [r.outcome for r in rank.put(pages)] == [Put.WRITTEN] * 3
        assert Rank(two, WHOLE).exists(pages) == [True] * 3
        assert all(r.ok for r in Rank(two, WHOLE).get(pages))


def test_a_finished_segment_without_pages_is_removed(tmp_path: Path) -> None:
    with PageStore.open(tmp_path, SPACE, Policy(segment_bytes=2 * WHOLE.nbytes)) as store:
        rank = Rank(store, WHOLE)
        rank.put(pages_of(5))
        store.flush()
        assert len(data_files(store)) == 3
        store.evict(4 * WHOLE.nbytes)
        assert len(data_files(store)) == 1
        assert rank.exists(pages_of(5)) == [False] * 4 + [True]


class FailingFiles(PlainFiles):
    """A disk on which some writes fail."""

    def __init__(self) -> None:
        super().__init__()
        self.full_after: int | None = None

    def write(self, runs):
        room = len(runs) if self.full_after is None else self.full_after
        done = super().write(runs[:room]) if room else []
        return [*done, *[os.strerror(errno.ENOSPC)] * (len(runs) - room)]


def test_a_full_disk_fails_the_pages_that_do_not_fit_with_the_reason(tmp_path: Path) -> None:
    files = FailingFiles()
    with PageStore.open(tmp_path, SPACE, files=files) as store:
        rank, pages = Rank(store, WHOLE), pages_of(5)
        files.full_after = 3
        answers = rank.put(pages)
        assert [r.outcome for r in answers] == [Put.WRITTEN] * 3 + [Put.FAILED] * 2
        assert {r.reason for r in answers[3:]} == {"No space left on device"}
        assert rank.exists(pages) == [True] * 3 + [False] * 2
        files.full_after = None
        assert all(r.ok for r in rank.put(pages))
        assert all(r.ok for r in rank.get(pages))


def test_a_broken_sector_costs_its_page_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken for whoever asks, and however often."""
    real = os.preadv

    def broken(fd: int, views, offset: int) -> int:
        nbytes = sum(len(view) for view in views)
        if offset <= WHOLE.nbytes + 512 < offset + nbytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, views, offset)

    with PageStore.open(tmp_path, SPACE) as store:
        rank, pages = Rank(store, WHOLE), pages_of(3)
        rank.put(pages)
        monkeypatch.setattr(os, "preadv", broken)
        answers = rank.get(pages)
        monkeypatch.setattr(os, "preadv", real)
        assert [r.outcome for r in answers] == [Got.READ, Got.FAILED, Got.READ]
        assert answers[1].reason == "Input/output error, and left to others"
        assert [r.outcome for r in rank.put(pages)] == [Put.PRESENT, Put.WRITTEN, Put.PRESENT]


def test_a_head_file_that_cannot_grow_leaves_no_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PageStore.open(tmp_path, SPACE) as store:
        rank, pages = Rank(store, WHOLE), pages_of(4)
        rank.put(pages[:1])
        real = os.pwrite

        def torn(fd: int, data: bytes, offset: int) -> int:
            if len(data) > 300:
                real(fd, data[:300], offset)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", torn)
        assert [r.outcome for r in rank.put(pages)] == [Put.PRESENT] + [Put.FAILED] * 3
        monkeypatch.setattr(os, "pwrite", real)
        assert rank.exists(pages) == [True, False, False, False]
        assert all(r.ok for r in rank.put(pages))
        with PageStore.open(tmp_path, SPACE) as again:
            assert all(r.ok for r in Rank(again, WHOLE).get(pages))


@pytest.mark.parametrize("page", [b"", b"x" * 31, b"../../etc/passwd".ljust(33, b"\0"), "text", bytearray(32)])
def test_a_key_that_is_no_hash_is_refused(store: PageStore, page: object) -> None:
    rank = Rank(store, WHOLE)
    with pytest.raises(StoreError, match="page hash"):
        rank.view.put([page], rank.addresses(1))
    with pytest.raises(StoreError, match="page hash"):
        rank.view.get([page], rank.addresses(1))


def test_memory_that_nobody_registered_is_refused_before_anything_is_written(store: PageStore) -> None:
    rank = Rank(store, WHOLE, slots=2)
    beyond = rank.memory.address + rank.memory.nbytes - WHOLE.nbytes + 1
    with pytest.raises(DescriptorError, match="outside the registered"):
        rank.view.put(pages_of(2), [rank.memory.address, beyond])
    with pytest.raises(StoreError, match="2 pages at 1 addresses"):
        rank.view.put(pages_of(2), rank.addresses(1))
    assert store.stat().objects == 0


def test_no_key_and_no_namespace_becomes_a_path_outside_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    nasty = Namespace("../../../tmp/x", "..", PAGE, salt="/etc")
    with PageStore.open(root, nasty) as store:
        Rank(store, WHOLE, namespace=nasty).put([b"../../../../".ljust(32, b"/")])
        assert segments_of(store).folder.parent == root
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert "/etc" not in (segments_of(store).folder / "namespace.json").read_text()


def test_a_process_without_descriptors_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PageStore.open(tmp_path, SPACE) as store, PageStore.open(tmp_path, SPACE) as other:
        rank, pages = Rank(store, WHOLE), pages_of(3)
        rank.put(pages)
        reader = Rank(other, WHOLE)

        def refuse(path: Path) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as patched:
            patched.setattr(segments_of(other).files, "open", refuse)
            answers = reader.get(pages)
            assert [(r.outcome, r.reason) for r in answers] == [(Got.FAILED, "Too many open files")] * 3
            assert {r.reason for r in reader.put(pages_of(2, "new"))} == {"Too many open files"}
            with pytest.raises(OSError, match="Too many"):
                other.verify()
        assert all(r.ok for r in reader.get(pages))


def test_a_link_in_the_place_of_a_segment_is_not_followed(tmp_path: Path) -> None:
    with PageStore.open(tmp_path, SPACE) as store:
        rank, pages = Rank(store, WHOLE), pages_of(2)
        rank.put(pages)
        store.flush()
    (data,) = data_files(store)
    elsewhere = tmp_path / "elsewhere"
    data.rename(elsewhere)
    data.symlink_to(elsewhere)
    with PageStore.open(tmp_path, SPACE) as store:
        answers = Rank(store, WHOLE).get(pages)
        assert [(r.outcome, r.reason) for r in answers] == [(Got.FAILED, "Too many levels of symbolic links")] * 2


def test_a_namespace_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / SPACE.folder).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is a link"):
        PageStore.open(tmp_path, SPACE)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_file_system_that_frees_whole_files_only_keeps_to_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmover.store.segment_catalog.punch", lambda fd, offset, nbytes: False)
    policy = Policy(quota_bytes=8 * WHOLE.nbytes, segment_bytes=2 * WHOLE.nbytes)
    with PageStore.open(tmp_path, SPACE, policy) as store:
        rank = Rank(store, WHOLE)
        for turn in range(8):
            pages = pages_of(3, str(turn))
            assert all(r.ok for r in rank.put(pages))
            assert all(r.ok for r in rank.get(pages))
        assert not segments_of(store).catalog.punches
        assert sum(path.stat().st_size for path in data_files(store)) <= 8 * WHOLE.nbytes
        assert len(segments_of(store).catalog.index) >= 3, "everything was evicted"


def test_the_store_needs_neither_torch_nor_nixl() -> None:
    code = "import sys, kvmover.tools.conformance\nfrom kvmover.store import *\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "kvmover.store.page_store" in loaded
    assert not [name for name in loaded if name.startswith(("torch", "nixl", "triton"))]


def test_a_root_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a directory"):
        PageStore.open(tmp_path / "nowhere", SPACE)


def test_a_store_of_another_namespace_gives_no_view(store: PageStore) -> None:
    with pytest.raises(StoreError, match="is not what is stored"):
        store.view(Namespace("other", "rev-1", PAGE), WHOLE)


def test_watchers_hear_of_losses_in_the_namespace_that_a_store_has_gone_on_to(tmp_path: Path) -> None:
    class Notes:
        def __init__(self) -> None:
            self.pages: set[bytes] = set()

        def lost(self, page: bytes) -> None:
            self.pages.add(page)

    notes, pages, other = Notes(), pages_of(3), Namespace("llama", "rev-2", PAGE)
    with PageStore.open(tmp_path, SPACE) as store:
        store.watch(notes)
        rank = Rank(store, WHOLE)
        rank.put(pages)
        store.become(other)
        notes.pages.clear()  # what was left is lost too
        rank.view = store.view(other, WHOLE)
        rank.put(pages)
        store.clear()
        assert notes.pages == set(pages)


def test_a_store_that_cannot_open_its_next_namespace_holds_nothing_until_it_can(tmp_path: Path) -> None:
    with PageStore.open(tmp_path, SPACE) as store:
        rank, pages, other = Rank(store, WHOLE), pages_of(3), Namespace("llama", "rev-2", PAGE)
        rank.put(pages)
        (tmp_path / other.folder).write_bytes(b"no directory")
        with pytest.raises(StoreError, match="cannot open the page store"):
            store.become(other)
        rank.view = store.view(other, WHOLE)
        assert [result.ok for result in rank.put(pages)] == [False] * 3
        store.become(SPACE)
        rank.view = store.view(SPACE, WHOLE)
        assert [result.ok for result in rank.get(pages)] == [True] * 3


def test_a_store_that_a_tool_opened_becomes_no_other(store: PageStore, tmp_path: Path) -> None:
    with (
        PageStore.of_folder(tmp_path / SPACE.folder, SPACE.digest) as found,
        pytest.raises(StoreError, match="no other"),
    ):
        found.become(SPACE)


def test_a_full_file_system_is_survived_with_the_reason(tmp_path: Path) -> None:
    """A real one, where this user may mount: as many pages as fit, then reasons, and after an eviction pages again."""
    mount = tmp_path / "small"
    mount.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={12 * WHOLE.nbytes}", "tmpfs", str(mount)]
    if not shutil.which("mount") or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("cannot mount a file system here")
    try:
        with PageStore.open(mount, SPACE, Policy(segment_bytes=3 * WHOLE.nbytes)) as store:
            rank, pages = Rank(store, WHOLE, 20), pages_of(20)
            answers = rank.put(pages)
            written = [r.outcome is Put.WRITTEN for r in answers]
            assert 8 <= sum(written) < 20
            assert {r.reason for r in answers if not r.ok} == {"No space left on device"}
            assert rank.exists(pages) == written
            assert [r.ok for r in rank.get(pages)] == written
            store.flush()
            assert store.evict(1 << 40) == sum(written) * WHOLE.nbytes
            store.collect()
            assert all(r.ok for r in rank.put(pages[:8])), "space was not given back"
            assert all(r.ok for r in rank.get(pages[:8]))
        with PageStore.open(mount, SPACE) as store:
            assert Rank(store, WHOLE).view.leading(pages) == 8
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_page_that_goes_while_it_is_read_is_no_error(tmp_path: Path) -> None:
    """Evicted by another thread between the copy and the check: what was copied is still right."""

    class Slow(PlainFiles):
        def read(self, runs):
            answers = super().read(runs)
            store.evict(1 << 40)
            return answers

    with PageStore.open(tmp_path, SPACE, files=Slow()) as store:
        rank, pages = Rank(store, WHOLE), pages_of(3)
        rank.put(pages)
        assert [r.outcome for r in rank.get(pages)] == [Got.READ] * 3
        assert rank.exists(pages) == [False] * 3


@pytest.mark.parametrize("backend", ["buffered", "direct", "nixl"])
def test_a_batch_of_many_groups_is_read_and_written_side_by_side(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of two pages, the next under way while one is digested; one page is damaged and one is missing."""
    for name in ("_BUFFERED_BYTES", "_DIRECT_CALL_BYTES"):
        monkeypatch.setattr(f"kvmover.store.files.{name}", 2 * WHOLE.nbytes)
    if backend == "nixl":
        pytest.importorskip("nixl_cu13._api", reason="needs the nixl-cu13 wheel")
        from kvmover.store.nixl_files import NixlFiles

        monkeypatch.setattr("kvmover.store.nixl_files._LARGE_BYTES", 1)
        for name in ("_GROUP_BYTES", "_REQUEST_BYTES"):
            monkeypatch.setattr(f"kvmover.store.nixl_files.{name}", 2 * WHOLE.nbytes)
        files = NixlFiles()
    else:
        files = PlainFiles(Access(backend))
    with PageStore.open(tmp_path, SPACE, Policy(segment_bytes=5 * WHOLE.nbytes), files) as store:
        rank, pages = Rank(store, WHOLE), pages_of(13)
        assert [r.outcome for r in rank.put(pages)] == [Put.WRITTEN] * 13
        entries = [segments_of(store).catalog.index.get(page) or pytest.fail("a page is gone") for page in pages]
        segments_of(store).catalog.delete(list(entries[7].objects), DeletionOrder.CLEARED)
        store.flush()
        damage(store, entries[3].objects[0].offset + 5)
        expected = [Got.READ] * 13
        expected[3], expected[7] = Got.POISONED, Got.ABSENT
        assert [r.outcome for r in rank.get(pages)] == expected
        assert [r.outcome for r in rank.put(pages)].count(Put.WRITTEN) == 2
        assert all(r.ok for r in rank.get(pages[::-1]))


def test_a_disk_that_fills_between_groups_fails_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmover.store.files._BUFFERED_BYTES", 2 * WHOLE.nbytes)
    files = FailingFiles()
    with PageStore.open(tmp_path, SPACE, files=files) as store:
        rank, pages = Rank(store, WHOLE), pages_of(9)
        files.full_after = 1
        answers = rank.put(pages)
        assert [r.ok for r in answers] == [n % 2 == 0 for n in range(9)], "one of each group of two fits"
        assert rank.exists(pages) == [r.ok for r in answers]
        files.full_after = None
        assert all(r.ok for r in rank.put(pages))
        assert all(r.ok for r in rank.get(pages))


def test_a_directory_that_is_removed_under_a_store_is_survived(tmp_path: Path) -> None:
    with PageStore.open(tmp_path, SPACE) as store:
        rank, pages = Rank(store, WHOLE), pages_of(2)
        rank.put(pages)
        shutil.rmtree(segments_of(store).folder)
        for _ in range(2):
            assert rank.exists(pages) == [False, False]
            assert [r.outcome for r in rank.get(pages)] == [Got.ABSENT] * 2
            assert {(r.outcome, r.reason) for r in rank.put(pages)} == {(Put.FAILED, "No such file or directory")}
