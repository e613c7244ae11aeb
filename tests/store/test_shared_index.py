"""One index in memory for the ranks of a host: what they share, what stays a rank's own, and what is never believed."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from shared_peer import PAGES
from store_rank import MLA, PAGE, SPACE, Rank, pages_of

from kvmover.store import HostBoot, PagePart, PageStore, Policy, shared_index
from kvmover.store.index import Index
from kvmover.store.segment import Segment
from kvmover.store.snapshot_file import SnapshotFile, SnapshotTurn
from kvmover.store.stored import padded
from tests.store.segments import segments_of
from tests.store.test_index import key, objects_of

WHOLE = PagePart.whole(MLA, PAGE)
PEER = Path(__file__).with_name("shared_peer.py")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in memory, in which indexes of any size are shared."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(shared_index, "MEMORY", Path(folder))
        monkeypatch.setattr(shared_index, "WORTH_BYTES", 0)
        yield Path(folder)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A root with pages in several segments, which their writer has left."""
    with PageStore.open(tmp_path, SPACE, Policy(segment_bytes=100 << 10)) as store:
        Rank(store, WHOLE, PAGES).put(pages_of(PAGES))
    return tmp_path


def snapshots(memory: Path) -> list[Path]:
    return sorted(memory.glob("*.snapshot"))


def has_mapped(store: PageStore) -> bool:
    return segments_of(store)._shared._use is not None


def known(store: PageStore) -> dict[bytes, list[tuple[str, int]]]:
    """The objects of every page that a store knows."""
    segments = segments_of(store)
    segments.catalog.refresh()
    return {page: [(each.segment, each.record) for each in of.objects] for page, of in segments.catalog.index.pages()}


def read_anew(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[bytes, list[tuple[str, int]]]:
    """What a process knows that shares nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(shared_index, "WORTH_BYTES", 1 << 60)
        with PageStore.open(root, SPACE) as store:
            return known(store)


def change(index: Index, chance: random.Random, turn: int) -> None:
    """Objects come, go and are used."""
    index.add(objects_of(list(range(turn * 500, turn * 500 + 500)), "abc"[turn % 3]))
    index.use([key(chance.randrange(turn * 500 + 500)) for _ in range(90)], turn)
    index.remove(objects_of(chance.sample(range(turn * 500 + 500), 150), "abc"[turn % 3]))
    index.drop("d")


def told(index: Index) -> tuple[object, ...]:
    pages, held = [(page, of.stamp, of.objects) for page, of in index.pages()], index.holdings
    rows = [index.records(name).tolist() for name in "abc"]
    return pages, rows, [index.live_bytes(name) for name in "abc"], (held.objects, held.payload_bytes, held.held_bytes)


def test_a_loaded_index_goes_on_like_the_saved_one_and_for_itself(tmp_path: Path) -> None:
    mine, chance = Index(), random.Random(5)
    for turn in range(4):
        change(mine, chance, turn)
    value, columns = mine.saved()
    place, before, loaded = SnapshotFile(b"an index", tmp_path), told(mine), list[Index]()
    turn = place.wait(lambda _: False)
    assert isinstance(turn, SnapshotTurn)
    for found in (turn.publish(b"\x90", columns), place.find()):
        assert found
        loaded.append(Index().load(value, found.columns))
    first, second = loaded
    assert told(first) == told(second) == before
    for turn in range(4, 14):  # three times as many, which have no room in the file's columns
        seed = chance.randrange(1 << 30)
        change(mine, random.Random(seed), turn)
        change(first, random.Random(seed), turn)
        assert told(first) == told(mine)
    assert told(second) == before, "an index saw what another process wrote"


def test_a_rank_that_maps_an_index_knows_all_that_changed_since(
    filled: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PageStore.open(filled, SPACE, Policy(segment_bytes=100 << 10)) as first:
        rank, (shared,) = Rank(first, WHOLE, 40), snapshots(memory)
        written = shared.stat().st_ino
        assert has_mapped(first)
        with PageStore.open(filled, SPACE) as second:
            assert has_mapped(second)
            assert known(second) == known(first) == read_anew(filled, monkeypatch)
            assert all(each.ok for each in Rank(second, WHOLE, PAGES).get(pages_of(PAGES)))
        first.evict(20 * WHOLE.nbytes)
        rank.put(pages_of(10, "new"))
        (filled / SPACE.folder / "deleted.news").unlink()  # which only saves time
        with PageStore.open(filled, SPACE) as third:
            assert has_mapped(third)
            assert known(third) == known(first) == read_anew(filled, monkeypatch)
        assert shared.stat().st_ino == written, "it was near enough"
        rank.put(pages_of(40, "newer"))
        first.evict(80 * WHOLE.nbytes)
        with PageStore.open(filled, SPACE) as fourth:
            assert known(fourth) == known(first) == read_anew(filled, monkeypatch)
        first.clear()
        with PageStore.open(filled, SPACE) as fifth:
            assert known(fifth) == {}
    assert list(memory.iterdir()) == [], "the last that closes removes it"


def test_an_index_of_which_a_byte_is_wrong_is_not_believed_but_written_anew(filled: Path, memory: Path) -> None:
    chance, everything = random.Random(7), 0
    with PageStore.open(filled, SPACE) as first:
        wanted, (path,) = known(first), snapshots(memory)
        whole = path.read_bytes()
        for turn in range(12):
            damaged = bytearray(whole)
            damaged[(0, 8, 16, 24)[turn] if turn < 4 else chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
            bad = [bytes(damaged), b"", whole[:20], whole[: len(whole) // 2], whole + b"\0"][turn if turn < 5 else 0]
            other = memory / "other"
            other.write_bytes(bad)
            other.chmod(0o600)
            other.replace(path)
            with PageStore.open(filled, SPACE) as second:
                assert known(second) == wanted
                assert path.read_bytes() != bad
                everything += has_mapped(second)
    assert everything == 12


def test_the_file_of_another_boot_format_or_user_is_left_alone(
    filled: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PageStore.open(filled, SPACE) as first:
        with PageStore.open(filled, SPACE, machine=HostBoot(bytes(16))) as second:
            assert len(snapshots(memory)) == 2
            assert known(second) == known(first)
        with monkeypatch.context() as patch:
            patch.setattr("kvmover.store.snapshot_file._MAGIC", b"KVSNAP02")
            with PageStore.open(filled, SPACE) as later:
                assert len(snapshots(memory)) == 2
                assert known(later) == known(first)
        (path,) = snapshots(memory)
        path.chmod(0o644)
        assert SnapshotFile.find(SimpleNamespace(path=path)) is None
        with PageStore.open(filled, SPACE) as third:
            assert known(third) == known(first)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOMEM])
@pytest.mark.parametrize("method", ["find", "states", "tail"])
def test_an_error_of_the_system_loses_no_page(
    filled: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, number: int, method: str
) -> None:
    with PageStore.open(filled, SPACE) as first:
        Rank(first, WHOLE).put(pages_of(4, "more"))
        with PageStore.open(filled, SPACE), monkeypatch.context() as patch:  # which maps a segment that is written
            left, real = [2], getattr(Segment, method)

            def broken(*arguments):
                if left[0]:
                    left[0] -= 1
                    raise OSError(number, os.strerror(number))
                return real(*arguments)

            patch.setattr(Segment, method, staticmethod(broken) if method == "find" else broken)
            with PageStore.open(filled, SPACE) as second:
                assert known(second) == known(first)
                assert all(each.ok for each in Rank(second, WHOLE, PAGES).get(pages_of(PAGES)))
        assert len(known(first)) == PAGES + 4


def test_without_memory_for_it_an_index_is_not_shared(
    filled: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=4096))
    with PageStore.open(filled, SPACE) as store:
        assert len(known(store)) == PAGES
        assert not has_mapped(store)
        assert list(memory.iterdir()) == []


def test_a_store_by_hazard_keeps_its_order_on_another_ranks_index(tmp_path: Path, memory: Path) -> None:
    policy = Policy(quota_bytes=8 * padded(WHOLE.nbytes), eviction="hazard")
    found, mine = pages_of(3, "found"), pages_of(5)
    with PageStore.open(tmp_path, SPACE, policy) as first:
        Rank(first, WHOLE).put(found)
        with PageStore.open(tmp_path, SPACE, policy) as second:
            assert has_mapped(second)
            rank = Rank(second, WHOLE)
            assert all(each.ok for each in rank.get(found[:1]))
            assert all(each.ok for each in rank.put(mine))
            assert all(each.ok for each in rank.put(pages_of(2, "more")))
            assert rank.exists(found) == [True, False, False], "pages that nobody used since go first"
            assert all(each.ok for each in rank.put(pages_of(2, "and more")))
            assert rank.exists(mine) == [True] * 4 + [False], "then the end of a prompt"


class Peer:
    """A rank in a process of its own."""

    def __init__(self, role: str, root: Path, memory: Path) -> None:
        command = [sys.executable, str(PEER), role, str(root), str(memory)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.hear() == "ready\n"

    def hear(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def tell(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> int:
        with self.process:
            self.tell()
        return self.process.returncode


def test_of_ranks_that_open_at_once_one_publishes_and_the_others_copy_nothing(filled: Path, memory: Path) -> None:
    peers = [Peer("opens", filled, memory) for _ in range(3)]
    for peer in peers:
        peer.tell()
    answers = [json.loads(peer.hear()) for peer in peers]
    assert [each["pages"] for each in answers] == [PAGES] * 3
    assert sorted(each["published"] for each in answers) == [0, 0, 1]
    assert [each["copied"] for each in answers] == [0] * 3
    assert len(snapshots(memory)) == 1
    peers[0].process.kill()  # whose lock the system releases
    assert [peer.end() for peer in peers[1:]] == [0, 0]
    with peers[0].process:
        pass
    assert list(memory.iterdir()) == []


def test_a_rank_killed_while_it_writes_an_index_leaves_the_turn_to_the_next(filled: Path, memory: Path) -> None:
    peer = Peer("dies", filled, memory)
    peer.tell()
    assert peer.process.wait(30) < 0
    peer.process.__exit__(None, None, None)
    (draft,) = memory.iterdir()
    assert draft.stat().st_size
    with PageStore.open(filled, SPACE) as store:
        assert len(known(store)) == PAGES
        assert has_mapped(store)
        assert list(memory.iterdir()) == snapshots(memory)
