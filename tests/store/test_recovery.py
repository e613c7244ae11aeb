"""After a crash: what was whole is there, what was not is gone, and the store says what it dropped."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.errors import StoreError
from kvmover.store import Got, HostBoot, PagePart, PageStore, Policy, segment_catalog
from kvmover.store.record import PREAMBLE_BYTES, Kind, Preamble, decode_all
from kvmover.store.segment import DATA, HEAD, Segment
from tests.store.segments import later_format, segments_of

WHOLE = PagePart.whole(GQA, PAGE)
NEXT_BOOT = HostBoot(bytes(16))


def only(root: Path, suffix: str) -> Path:
    (path,) = root.glob(f"*/*{suffix}")
    return path


def reopened(root: Path, machine: HostBoot | None = None) -> tuple[list[bool], dict[str, int], int]:
    """Which of the ten pages exist, all of which must read well; what was dropped; and bytes of objects kept."""
    with PageStore.open(root, SPACE, machine=machine) as store:
        rank, pages = Rank(store, WHOLE), pages_of(10)
        there = rank.exists(pages)
        assert [result.ok for result in rank.get(pages)] == there, "a false hit"
        return there, store.recovered.dropped, store.recovered.objects


def test_a_killed_process_loses_nothing_that_it_announced(crashed: Path) -> None:
    assert reopened(crashed) == ([True] * 10, {}, 10)


def test_a_second_opening_finds_the_segment_finished(crashed: Path) -> None:
    reopened(crashed)
    records = list(decode_all(only(crashed, HEAD).read_bytes()[PREAMBLE_BYTES:], PREAMBLE_BYTES))
    assert records[-1].kind is Kind.SEALED
    assert reopened(crashed) == ([True] * 10, {}, 10)


def test_a_torn_header_hides_its_page_only(crashed: Path) -> None:
    head = only(crashed, HEAD)
    os.truncate(head, head.stat().st_size - 17)
    assert reopened(crashed) == ([True] * 9 + [False], {"torn header": 1}, 9)


def test_a_truncated_data_file_drops_what_it_lost(crashed: Path) -> None:
    os.truncate(only(crashed, DATA), 8 * WHOLE.nbytes + 1)
    assert reopened(crashed) == ([True] * 8 + [False] * 2, {"truncated": 2}, 8)


def test_a_missing_data_file_leaves_nothing(crashed: Path) -> None:
    only(crashed, DATA).unlink()
    there, dropped, objects = reopened(crashed)
    assert (there, objects) == ([False] * 10, 0)
    assert dropped == {"data file is missing": 10}
    assert not list(crashed.glob(f"*/*{HEAD}"))


def test_a_damaged_header_hides_its_page_only(crashed: Path) -> None:
    head = only(crashed, HEAD)
    record = next(iter(decode_all(head.read_bytes()[PREAMBLE_BYTES:], PREAMBLE_BYTES)))
    with head.open("r+b") as file:
        file.seek(record.at + 60)
        file.write(b"\0\0\0\0")
    assert reopened(crashed) == ([False] + [True] * 9, {"damaged header": 1}, 9)


def test_data_without_a_head_is_removed(crashed: Path) -> None:
    orphan = only(crashed, DATA).with_name("0123456789abcdef-00000007.data")
    orphan.write_bytes(b"left over")
    reopened(crashed)
    assert not orphan.exists()


def test_a_head_without_its_first_line_is_removed(crashed: Path) -> None:
    stillborn = only(crashed, HEAD).with_name("0123456789abcdef-00000007.head")
    stillborn.write_bytes(b"KVMOVER1")
    stillborn.with_suffix(DATA).touch()
    assert reopened(crashed)[0] == [True] * 10
    assert not stillborn.exists()
    assert not stillborn.with_suffix(DATA).exists()


def test_files_of_others_are_left_alone(crashed: Path) -> None:
    strange = [only(crashed, DATA).with_name(name) for name in ("notes.txt", "README.head", "x-1.head", "..data.head")]
    for path in strange:
        path.write_bytes(b"mine")
    reopened(crashed)
    with PageStore.open(crashed, SPACE) as store:
        store.clear()
    assert all(path.read_bytes() == b"mine" for path in strange)


def test_a_head_of_another_namespace_is_not_read(crashed: Path) -> None:
    head = only(crashed, HEAD)
    raw = head.read_bytes()
    head.write_bytes(Preamble(bytes(32), bytes(16)).encode() + raw[PREAMBLE_BYTES:])
    assert reopened(crashed) == ([False] * 10, {"foreign namespace": 1}, 0)
    assert head.exists()


def test_a_head_of_another_format_is_left_alone(crashed: Path) -> None:
    head = only(crashed, HEAD)
    head.write_bytes(b"KVMOVER2".ljust(PREAMBLE_BYTES + 500, b"."))
    assert reopened(crashed) == ([False] * 10, {"another format": 1}, 0)
    assert head.exists()


@pytest.mark.parametrize(("magic", "number"), [(b"KVMOVER1", 2), (b"KVMOVER2", 1)])
def test_a_later_format_is_left_alone_though_its_records_are_still_alike(
    crashed: Path, magic: bytes, number: int
) -> None:
    head = only(crashed, HEAD)
    later = later_format(head.read_bytes(), magic, number)
    head.write_bytes(later)
    payload = only(crashed, DATA).read_bytes()
    assert reopened(crashed) == ([False] * 10, {"another format": 1}, 0)
    with PageStore.open(crashed, SPACE) as store:
        rank, pages = Rank(store, WHOLE), pages_of(10)
        assert all(result.ok for result in rank.put(pages))
        assert all(result.ok for result in rank.get(pages))
        assert not store.verify().bad
        store.clear()
    assert (head.read_bytes(), head.with_suffix(DATA).read_bytes()) == (later, payload)


@pytest.mark.parametrize("at", [0, 10, 20, 50, 75])
def test_a_flipped_bit_of_the_first_line_costs_no_page(crashed: Path, at: int) -> None:
    """The folder says whose the objects are, and each is checked before it is believed."""
    head = only(crashed, HEAD)
    raw = bytearray(head.read_bytes())
    raw[at] ^= 1
    head.write_bytes(raw)
    assert reopened(crashed) == ([True] * 10, {}, 10)


def test_a_head_of_zeros_after_a_power_cut_gives_its_space_back(crashed: Path) -> None:
    head = only(crashed, HEAD)
    head.write_bytes(bytes(head.stat().st_size))
    assert reopened(crashed)[0] == [False] * 10
    assert not list(crashed.glob(f"*/*{HEAD}")) + list(crashed.glob(f"*/*{DATA}"))


def test_payloads_whose_header_was_never_written_give_their_blocks_back(crashed: Path) -> None:
    with only(crashed, DATA).open("ab") as data:
        data.write(b"x" * (40 * WHOLE.nbytes))
    reopened(crashed)
    assert only(crashed, DATA).stat().st_blocks * 512 <= 12 * WHOLE.nbytes


@pytest.mark.parametrize("name", ["open", "fstat", "pread"])
def test_a_take_over_that_is_interrupted_loses_nothing(
    crashed: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Six payloads never reached the disk; the process has no descriptors left at some point of the judgement."""
    with only(crashed, DATA).open("r+b") as file:
        for page in range(4, 10):
            file.seek(page * WHOLE.nbytes)
            file.write(bytes(4096))
    real = getattr(os, name)
    for turn in range(12):
        root = crashed.parent / f"{name}{turn}"
        shutil.copytree(crashed, root)
        left = [turn]

        def refuse(*arguments, left=left, **options):
            left[0] -= 1
            if left[0] == -1:
                raise OSError(errno.EMFILE, "Too many open files")
            return real(*arguments, **options)

        store = None
        monkeypatch.setattr(os, name, refuse)
        with suppress(StoreError):
            store = PageStore.open(root, SPACE, machine=NEXT_BOOT)
        monkeypatch.setattr(os, name, real)
        if store:
            store.collect()
            rank = Rank(store, WHOLE)
            assert [r.ok for r in rank.get(pages_of(10))] == [True] * 4 + [False] * 6, turn
            store.close()
        assert reopened(root, NEXT_BOOT)[0] == [True] * 4 + [False] * 6, turn


def test_after_a_reboot_whole_pages_stay_and_lost_ones_are_dropped(crashed: Path) -> None:
    with only(crashed, DATA).open("r+b") as file:
        file.seek(5 * WHOLE.nbytes + 4096)
        file.write(bytes(4096))  # a block that never reached the disk
        file.truncate(9 * WHOLE.nbytes + 100)
    there, dropped, _ = reopened(crashed, NEXT_BOOT)
    assert there == [True] * 5 + [False] + [True] * 3 + [False]
    assert dropped == {"blank": 1, "truncated": 1}


def test_pages_of_another_machine_are_seen_once_they_are_flushed(tmp_path: Path) -> None:
    pages = pages_of(4)
    with PageStore.open(tmp_path, SPACE) as here, PageStore.open(tmp_path, SPACE, machine=NEXT_BOOT) as there:
        ours, theirs = Rank(here, WHOLE), Rank(there, WHOLE)
        ours.put(pages[:2])
        assert theirs.exists(pages[:2]) == [False, False]
        here.flush()
        ours.put(pages[2:])
        assert theirs.exists(pages) == [True, True, False, False]
        here.flush()
        assert all(result.ok for result in theirs.get(pages))
        there.collect()
        assert ours.exists(pages) == [True] * 4


@pytest.mark.parametrize("seed", range(12))
def test_a_power_cut_that_reorders_the_tail_makes_no_false_hit(crashed: Path, seed: int) -> None:
    """Blocks of both files that were written after the flush are lost in any combination; both may end early."""
    chance = random.Random(seed)
    head = only(crashed, HEAD)
    flushed = next(
        record.at + record.record_bytes
        for record in decode_all(head.read_bytes()[PREAMBLE_BYTES:], PREAMBLE_BYTES)
        if record.kind is Kind.SYNCED
    )
    _lose(head, flushed, 64, chance)
    _lose(only(crashed, DATA), 4 * WHOLE.nbytes, 4096, chance)
    there, _, _ = reopened(crashed, NEXT_BOOT)
    assert there[:4] == [True] * 4
    assert reopened(crashed, NEXT_BOOT)[0] == there


def _lose(path: Path, start: int, block: int, chance: random.Random) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        for at in range(-(-start // block) * block, size, block):
            if chance.random() < 0.2:
                file.seek(at)
                file.write(bytes(min(block, size - at)))
        if chance.random() < 0.5:
            file.truncate(chance.randint(start, size))


def test_space_of_a_dead_writer_is_collected_by_a_living_one(tmp_path: Path) -> None:
    source = tmp_path / "a"
    source.mkdir()
    dead = PageStore.open(source, SPACE)
    Rank(dead, WHOLE).put(pages_of(4))
    root = tmp_path / "b"
    root.mkdir()
    with PageStore.open(root, SPACE, Policy(quota_bytes=8 * WHOLE.nbytes)) as store:
        shutil.copytree(source, root, dirs_exist_ok=True)  # a writer that dies while the store is open
        rank = Rank(store, WHOLE)
        assert rank.view.leading(pages_of(4)) == 4
        store.evict(8 * WHOLE.nbytes)
        assert len(list(root.glob(f"*/*{DATA}"))) == 1
        assert store.collect().adopted_segments == 1
        assert not list(root.glob(f"*/*{DATA}"))
    dead.close()


def test_deletions_are_heard_and_if_not_heard_they_are_read(tmp_path: Path) -> None:
    pages = pages_of(3)
    with PageStore.open(tmp_path, SPACE) as one, PageStore.open(tmp_path, SPACE) as two:
        rank, other = Rank(one, WHOLE), Rank(two, WHOLE)
        rank.put(pages)
        assert other.exists(pages) == [True] * 3
        segments_of(two).catalog._deletions.append = lambda gone: None  # a file system that lost the news
        two.evict(WHOLE.nbytes)
        assert rank.exists(pages) == [True] * 3, "without news there is nothing to go by"
        assert [r.outcome for r in rank.get(pages)] == [Got.EVICTED, Got.READ, Got.READ]
        assert rank.exists(pages) == [False, True, True]
        assert not one.counters.poisoned


def test_news_that_are_begun_anew_are_heard_to_the_end_and_no_header_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_catalog, "_LONG_BYTES", 1)
    pages = pages_of(9)
    with PageStore.open(tmp_path, SPACE) as one, PageStore.open(tmp_path, SPACE) as two:
        rank = Rank(one, WHOLE)
        rank.put(pages)
        Rank(two, WHOLE).exists(pages)
        news = segments_of(two).folder / "deleted.news"
        for gone in (3, 6):
            two.evict(2 * WHOLE.nbytes)
            before = news.stat().st_ino
            two.collect()
            assert news.stat().st_ino != before
            two.evict(WHOLE.nbytes)
            with monkeypatch.context() as watched:
                watched.setattr(Segment, "states", lambda *_: pytest.fail("headers were read"))
                for _ in range(3):
                    assert rank.exists(pages) == [False] * gone + [True] * (9 - gone)


@pytest.mark.parametrize("spoil", [lambda news: news.write_bytes(b"junk" * 100), lambda news: news.unlink()])
def test_damaged_news_send_the_reader_to_the_headers(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    pages = pages_of(3)
    with PageStore.open(tmp_path, SPACE) as one, PageStore.open(tmp_path, SPACE) as two:
        rank = Rank(one, WHOLE)
        rank.put(pages)
        Rank(two, WHOLE).exists(pages)
        two.evict(WHOLE.nbytes)
        assert rank.exists(pages) == [False, True, True]
        two.evict(WHOLE.nbytes)
        spoil(segments_of(one).folder / "deleted.news")
        assert rank.exists(pages) == [False, False, True]
