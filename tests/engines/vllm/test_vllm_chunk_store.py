"""Chunks of vLLM's CPU tier through the page store, without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvmover.config.settings import StoreSettings
from kvmover.engines.vllm.chunk_store import DROPPED, ChunkJob, ChunkStore, ChunkVerb, EndedJob
from kvmover.store import Got, Namespace, Put
from kvmover.transport import Memory, MemoryKind
from tests.store.segments import segments_of

ROWS, ROW_BYTES = 8, 12_288
SPACE = Namespace("model", "", 16)
POISON = 0x6B
KEYS = tuple(bytes([number]) * 32 + bytes(4) for number in range(ROWS))


class Host:
    """Memory of an engine, and the store behind it. `rows` [row, byte]."""

    def __init__(self, root: Path, what: str = "bytes") -> None:
        self.rows: npt.NDArray[np.uint8] = np.full((ROWS, ROW_BYTES), POISON, np.uint8)
        memory = Memory(MemoryKind.HOST, self.rows.ctypes.data, self.rows.nbytes)
        settings = StoreSettings(root=root, upkeep_s=0.01, flush_s=0.01)
        self.chunks = ChunkStore.open(settings, SPACE, what, memory, ROW_BYTES)

    def fill(self, *rows: int) -> None:
        for row in rows:
            self.rows[row] = row + 1

    def store(self, *rows: int) -> EndedJob:
        self.chunks.submit_store(ChunkJob(1, tuple(KEYS[row] for row in rows), rows))
        return self.ended()

    def load(self, keys: tuple[int, ...], rows: tuple[int, ...]) -> EndedJob:
        self.chunks.submit_load(ChunkJob(2, tuple(KEYS[key] for key in keys), rows))
        return self.ended()

    def ended(self) -> EndedJob:
        self.chunks.settle()
        (job,) = self.chunks.ended()
        return job


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(what: str = "bytes") -> Host:
        made.append(Host(tmp_path, what))
        return made[-1]

    yield make
    for each in made:
        each.chunks.close()


def test_chunks_come_back_into_any_rows_and_touch_no_other(host: Callable[..., Host]) -> None:
    first, second = host(), host()
    first.fill(0, 1, 2)
    stored = first.store(0, 1, 2)
    assert stored.ok
    assert (stored.verb, stored.nbytes) == (ChunkVerb.STORE, 3 * ROW_BYTES)
    loaded = second.load((2, 0), (7, 3))
    assert loaded.ok
    assert loaded.nbytes == 2 * ROW_BYTES
    assert [set(row.tolist()) for row in second.rows] == [{POISON}] * 3 + [{1}] + [{POISON}] * 3 + [{3}]
    assert second.chunks.exists(KEYS[:4]) == [True, True, True, False]


def test_of_a_batch_each_chunk_has_its_own_answer(host: Callable[..., Host]) -> None:
    first, second = host(), host()
    first.fill(0, 2)
    first.store(0, 2)
    loaded = second.load((0, 1, 2), (0, 1, 2))
    assert loaded.done == (True, False, True)
    assert not loaded.ok
    assert set(second.rows[2].tolist()) == {3}
    assert second.chunks.take_counts() == {(ChunkVerb.LOAD, Got.READ): 2, (ChunkVerb.LOAD, Got.ABSENT): 1}
    assert not second.chunks.take_counts()


def test_what_is_there_is_not_written_again(host: Callable[..., Host]) -> None:
    first, second = host(), host()
    for each in (first, second):
        each.fill(0)
        assert each.store(0).ok
    assert second.chunks.take_counts() == {(ChunkVerb.STORE, Put.PRESENT): 1}


def test_bytes_of_another_meaning_are_not_found(host: Callable[..., Host]) -> None:
    first, other = host("bytes"), host("others")
    first.fill(0)
    first.store(0)
    assert other.chunks.exists(KEYS[:1]) == [False]
    assert not other.load((0,), (0,)).ok


def test_a_quarter_of_the_rows_may_wait_and_the_rest_is_dropped(host: Callable[..., Host]) -> None:
    mine = host()
    mine.fill(*range(ROWS))
    with segments_of(mine.chunks.store).writing:
        for row in range(4):
            mine.chunks.submit_store(ChunkJob(row, KEYS[row : row + 1], (row,)))
        assert [(job.job.number, job.done) for job in mine.chunks.ended()] == [(2, (False,)), (3, (False,))]
    mine.chunks.settle()
    assert {job.job.number for job in mine.chunks.ended()} == {0, 1}
    assert mine.chunks.take_counts() == {(ChunkVerb.STORE, DROPPED): 2, (ChunkVerb.STORE, Put.WRITTEN): 2}


def test_a_job_larger_than_that_is_taken_where_none_waits(host: Callable[..., Host]) -> None:
    mine = host()
    mine.fill(*range(ROWS))
    assert mine.store(*range(ROWS)).ok


def test_what_the_store_refuses_has_failed_chunk_by_chunk(
    host: Callable[..., Host], caplog: pytest.LogCaptureFixture
) -> None:
    mine = host()
    mine.chunks.submit_load(ChunkJob(5, KEYS[:2], (0,)))  # two chunks and one row
    ended = mine.ended()
    assert (ended.job.number, ended.done, ended.nbytes) == (5, (False, False), 0)
    assert mine.chunks.take_counts() == {(ChunkVerb.LOAD, Got.FAILED): 2}
    assert "load of 2 chunks" in caplog.text


def test_all_that_was_submitted_is_stored_before_the_end(tmp_path: Path, host: Callable[..., Host]) -> None:
    first = Host(tmp_path)
    first.fill(0, 1)
    first.chunks.submit_store(ChunkJob(1, KEYS[:2], (0, 1)))
    first.chunks.close()
    assert host().chunks.exists(KEYS[:3]) == [True, True, False]


def test_chunks_go_to_the_namespace_that_the_store_has_become_and_to_none_without_one(
    host: Callable[..., Host],
) -> None:
    first, second = host(), host()
    first.fill(0, 1)
    first.chunks.become(None)
    assert first.store(0).done == (False,)
    first.chunks.become(Namespace("model", "version 7", 16))
    assert first.store(0, 1).ok
    assert second.load((0, 1), (5, 6)).done == (False, False)
    assert (second.rows == POISON).all()
    second.chunks.become(Namespace("model", "version 7", 16))
    assert second.load((0, 1), (5, 6)).ok
    assert np.array_equal(second.rows[5:7], first.rows[:2])
