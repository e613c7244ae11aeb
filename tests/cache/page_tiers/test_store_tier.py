"""Rows of an engine's host memory through the page store, as a tier."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvmover.cache.page_tiers import DROPPED, FinishedJob, PageJob, PageVerb
from kvmover.config.settings import StoreSettings
from kvmover.engines.common import open_row_tier
from kvmover.store import Got, Namespace, Put
from kvmover.tools.tier_conformance import PAGE_TOKENS, PLACES, PageTierConformance
from kvmover.transport import Memory, MemoryKind
from tests.store.segments import segments_of

ROWS, ROW_BYTES = 8, 12_288
SPACE = Namespace("model", "", 16)
POISON = 0x6B
NAMES = tuple(bytes([number]) * 32 for number in range(ROWS))


class Host:
    """Memory of an engine, and the store behind it. `rows` [row, byte]."""

    def __init__(self, root: Path, what: str = "bytes", **said: int) -> None:
        self.rows: npt.NDArray[np.uint8] = np.full((ROWS, ROW_BYTES), POISON, np.uint8)
        memory = Memory(MemoryKind.HOST, self.rows.ctypes.data, self.rows.nbytes)
        settings = StoreSettings(root=root, upkeep_s=0.01, flush_s=0.01, **said)
        self.tier = open_row_tier(settings, SPACE, what, memory, ROW_BYTES)

    def fill(self, *rows: int) -> None:
        for row in rows:
            self.rows[row] = row + 1

    def write(self, *rows: int) -> FinishedJob:
        self.tier.write(PageJob(1, tuple(NAMES[row] for row in rows), rows))
        return self.ended()

    def read(self, names: tuple[int, ...], rows: tuple[int, ...]) -> FinishedJob:
        self.tier.read(PageJob(2, tuple(NAMES[name] for name in names), rows))
        return self.ended()

    def ended(self) -> FinishedJob:
        self.tier.settle()
        (job,) = self.tier.finished()
        return job

    def found(self, pages: int) -> list[bool]:
        """Of the first names."""
        self.tier.lookup(PageJob(3, NAMES[:pages]))
        stop = time.monotonic() + 60
        while not (ended := self.tier.finished()):
            assert time.monotonic() < stop
            time.sleep(0.001)
        return list(ended[0].done)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(what: str = "bytes", **said: int) -> Host:
        made.append(Host(tmp_path, what, **said))
        return made[-1]

    yield make
    for each in made:
        each.tier.close()


def test_pages_come_back_into_any_rows_and_touch_no_other(host: Callable[..., Host]) -> None:
    first, second = host(), host()
    first.fill(0, 1, 2)
    stored = first.write(0, 1, 2)
    assert stored.ok
    assert (stored.verb, stored.nbytes) == (PageVerb.WRITE, 3 * ROW_BYTES)
    loaded = second.read((2, 0), (7, 3))
    assert loaded.ok
    assert loaded.nbytes == 2 * ROW_BYTES
    assert [set(row.tolist()) for row in second.rows] == [{POISON}] * 3 + [{1}] + [{POISON}] * 3 + [{3}]
    assert second.found(4) == [True, True, True, False]


def test_of_a_batch_each_chunk_has_its_own_answer(host: Callable[..., Host]) -> None:
    first, second = host(), host()
    first.fill(0, 2)
    first.write(0, 2)
    loaded = second.read((0, 1, 2), (0, 1, 2))
    assert loaded.done == (True, False, True)
    assert not loaded.ok
    assert set(second.rows[2].tolist()) == {3}
    assert loaded.outcomes == {Got.READ: 2, Got.ABSENT: 1}


def test_what_is_there_is_not_written_again(host: Callable[..., Host]) -> None:
    first, second = host(), host()
    for each in (first, second):
        each.fill(0)
        wrote = each.write(0)
        assert wrote.ok
    assert (wrote.outcomes, wrote.nbytes) == ({Put.PRESENT: 1}, 0)


def test_bytes_of_another_meaning_are_not_found(host: Callable[..., Host]) -> None:
    first, other = host("bytes"), host("others")
    first.fill(0)
    first.write(0)
    assert other.found(1) == [False]
    assert not other.read((0,), (0,)).ok


def test_a_quarter_of_the_rows_may_wait_and_the_rest_is_dropped(host: Callable[..., Host]) -> None:
    mine = host()
    mine.fill(*range(ROWS))
    with segments_of(mine.tier.store).writing:
        for row in range(4):
            mine.tier.write(PageJob(row, NAMES[row : row + 1], (row,)))
        dropped = mine.tier.finished()
        assert [(job.job.number, job.done) for job in dropped] == [(2, (False,)), (3, (False,))]
        assert sum((job.outcomes for job in dropped), Counter()) == {DROPPED: 2}
    mine.tier.settle()
    written = mine.tier.finished()
    assert {job.job.number for job in written} == {0, 1}
    assert sum((job.outcomes for job in written), Counter()) == {Put.WRITTEN: 2}


def test_a_job_larger_than_that_is_taken_where_none_waits(host: Callable[..., Host]) -> None:
    mine = host()
    mine.fill(*range(ROWS))
    assert mine.write(*range(ROWS)).ok


def test_what_the_store_refuses_has_failed_chunk_by_chunk(
    host: Callable[..., Host], caplog: pytest.LogCaptureFixture
) -> None:
    mine = host()
    mine.tier.read(PageJob(5, NAMES[:2], (0,)))  # two chunks and one row
    ended = mine.ended()
    assert (ended.job.number, ended.done, ended.nbytes) == (5, (False, False), 0)
    assert ended.outcomes == {Got.FAILED: 2}
    assert "read of 2 pages" in caplog.text


def test_all_that_was_submitted_is_stored_before_the_end(tmp_path: Path, host: Callable[..., Host]) -> None:
    first = Host(tmp_path)
    first.fill(0, 1)
    first.tier.write(PageJob(1, NAMES[:2], (0, 1)))
    first.tier.close()
    assert host().found(3) == [True, True, False]


def test_chunks_go_to_the_namespace_that_the_store_has_become_and_to_none_without_one(
    host: Callable[..., Host],
) -> None:
    first, second = host(), host()
    first.fill(0, 1)
    first.tier.become(None)
    assert first.write(0).done == (False,)
    first.tier.become(Namespace("model", "version 7", 16))
    assert first.write(0, 1).ok
    assert second.read((0, 1), (5, 6)).done == (False, False)
    assert (second.rows == POISON).all()
    second.tier.become(Namespace("model", "version 7", 16))
    assert second.read((0, 1), (5, 6)).ok
    assert np.array_equal(second.rows[5:7], first.rows[:2])


def test_pages_that_the_engine_used_outlive_those_that_it_did_not(host: Callable[..., Host]) -> None:
    """Room for eight pages: of the oldest four, the touched two outlive the six that come."""
    mine = host(quota_bytes=8 * ROW_BYTES)
    names = [bytes([number]) * 32 for number in range(10)]
    mine.tier.write(PageJob(1, tuple(names[:4]), (0, 1, 2, 3)))
    assert mine.ended().ok
    mine.tier.touch(iter(names[:2]))
    assert mine.found(4) == [True] * 4  # by the thread that tells of uses, after it has
    for name in names[4:]:
        mine.tier.write(PageJob(1, (name,), (0,)))
        assert mine.ended().ok
        time.sleep(0.02)
    assert mine.found(4) == [True, True, False, False]


def test_uses_that_the_store_does_not_take_end_no_thread(
    host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = host()

    def refuse(_: object, names: list[bytes]) -> None:
        raise OSError(f"{len(names)} names")

    with monkeypatch.context() as patch:
        patch.setattr(type(mine.tier.store), "used", refuse)
        mine.tier.touch([NAMES[0]])
        assert mine.found(1) == [False]
    assert "1 pages were used" in caplog.text
    assert mine.write(0).ok


class StoredEngine:
    """An engine whose rows are in a page store."""

    page_bytes = ROW_BYTES

    def __init__(self, folder: Path) -> None:
        self.rows: npt.NDArray[np.uint8] = np.zeros((PLACES, ROW_BYTES), np.uint8)
        memory = Memory(MemoryKind.HOST, self.rows.ctypes.data, self.rows.nbytes)
        settings = StoreSettings(root=folder, upkeep_s=0.01, flush_s=0.01)
        self.tier = open_row_tier(settings, Namespace("model", "", PAGE_TOKENS), "rows", memory, ROW_BYTES)
        self.is_open = True

    def fill(self, place: int, content: bytes) -> None:
        self.rows[place] = np.frombuffer(content, np.uint8)

    def content(self, place: int) -> bytes:
        return self.rows[place].tobytes()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.tier.close()


class TestStoreTier(PageTierConformance):
    def open(self, folder: Path, name: str) -> StoredEngine:
        return StoredEngine(folder)
