"""Slabs that a keeper has proved: read at once, without a look at digests, and never where a writer may have lied."""

from __future__ import annotations

import os
import random
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from store_rank import GQA, Rank, pages_of
from test_keeper import ALONE, SLAB_BYTES, TP2, Served, keeper, oks, whole

from kvmover.c_core import NATIVE
from kvmover.layout import Fleet
from kvmover.store import Got, PageStore
from kvmover.store.files import memory_of_buffer
from kvmover.store.keeper import sweep
from kvmover.store.keeper.messages import ListNamespaces, encode

__all__ = ["keeper"]


def soon(is_so: Callable[[], object]) -> None:
    stop = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < stop
        time.sleep(0.005)


def proved(store: PageStore) -> set[str]:
    with store.objects.lock:
        store.objects.catalog.refresh()
        return set(store.objects.catalog.proved)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many cells were compared with their digests, at each look."""
    looks: list[int] = []
    from kvmover.store import fetch
    from kvmover.store.record import table, tables

    def counted(payload: memoryview, cells: int) -> bytes:
        looks.append(cells)
        return table(payload, cells)

    def all_counted(payloads: Sequence[memoryview], cells: int) -> list[bytes]:
        looks.append(cells * len(payloads))
        return tables(payloads, cells)

    monkeypatch.setattr(fetch, "table", counted)
    monkeypatch.setattr(fetch, "tables", all_counted)
    return looks


@pytest.mark.parametrize("fleet", [ALONE, TP2, Fleet(tp=8, page_tokens=16)], ids=["TP1", "TP2", "TP8"])
def test_what_was_sealed_and_proved_is_read_without_its_digests(
    keeper: Served, unchecked: list[int], fleet: Fleet
) -> None:
    pages = pages_of(10)
    with keeper.open("engine", 1) as before:
        assert all(oks(whole(before).put(pages)))
        assert all(oks(whole(before).get(pages[-2:]))), "its slab is not sealed yet"
        assert sum(unchecked) == 2 * GQA.heads * GQA.layers
        with keeper.open("engine", 2) as store:
            soon(lambda: len(proved(store)) == 3)
            unchecked.clear()
            for rank in range(fleet.tp):
                assert all(oks(Rank.of(store, GQA, fleet, rank).get(pages)))
            assert not unchecked
            assert store.counters.gots[Got.READ] == 10 * fleet.tp


def test_what_a_writer_changes_between_its_commit_and_the_seal_is_served_to_nobody(keeper: Served) -> None:
    pages = pages_of(3)
    with keeper.open("engine", 1) as bad, keeper.open() as reader:
        assert all(oks(whole(bad).put(pages)))
        slab = bad.objects._writer._slab
        first, second, _ = (found.objects[0].offset for found in bad.objects.find(pages, whole(bad).view._key) if found)
        os.pwrite(slab.file.fd, b"other", second + 700)
        with keeper.open("engine", 2) as store:
            soon(lambda: proved(store))
            assert [answer.outcome for answer in whole(store).get(pages)] == [Got.READ, Got.ABSENT, Got.READ]
            assert whole(reader).exists(pages) == [True, False, True]
            with pytest.raises(PermissionError):
                os.pwrite(slab.file.fd, b"other", first)


def test_a_proved_slab_that_is_cut_comes_short_and_costs_hits(keeper: Served) -> None:
    pages = pages_of(4)
    with keeper.open("engine", 1) as bad, keeper.open() as store:
        assert all(oks(whole(bad).put(pages)))
        slab = os.dup(bad.objects._writer._slab.file.fd)
        bad.objects._writer.close()
        bad.close()
        soon(lambda: proved(store))
        os.ftruncate(slab, SLAB_BYTES // 2)
        os.close(slab)
        answers = [answer.outcome for answer in whole(store).get(pages)]
        assert answers[:2] == [Got.READ] * 2
        assert Got.READ not in answers[2:]


def test_a_journal_that_is_written_anew_knows_what_was_proved(keeper: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with keeper.open() as store:
        assert all(oks(whole(store).put(pages_of(4))))
        assert all(oks(whole(store).put(pages_of(1, "next"))))
        soon(lambda: proved(store))
        before = proved(store)
        base = store.objects.catalog.link.journal.base
        monkeypatch.setattr("kvmover.store.keeper.keeper_machine._LEAST_BYTES", 256)
        monkeypatch.setattr("kvmover.store.keeper.keeper_machine._TIMES", 0)
        store.flush()

        def follows() -> bool:  # the keeper writes it when it has answered
            store.objects.catalog.sync()
            return store.objects.catalog.link.journal.base > base

        soon(follows)
        assert proved(store) == before
        monkeypatch.undo()


def test_hot_pages_are_carried_when_their_slab_goes(keeper: Served) -> None:
    """One of four pages in each slab is read all the time."""
    with keeper.open() as store:
        rank, hot = whole(store), pages_of(6, "hot")
        clock = iter(range(1, 100))
        now = time.time()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda: now)
            for batch in range(6):
                now += next(clock)
                assert all(oks(rank.put([hot[batch], *pages_of(3, f"cold {batch}")])))
                assert all(oks(rank.get(hot[: batch + 1]))), batch
                store.flush()
            assert not any(rank.exists(pages_of(3, "cold 0")))
            keeper.server.state.check()
            assert keeper.server.state.held_bytes <= keeper.server.state.capacity_bytes
        soon(lambda: len(proved(store)) >= len(keeper.server.state.slabs) - 1)
        assert all(oks(rank.get(hot))), "they are proved like any other"


def test_a_link_whose_answer_lies_there_unread_is_not_over_and_many_may_ask(keeper: Served) -> None:
    with keeper.open() as store:
        link = store.objects.catalog.link
        link._socket.send(encode(ListNamespaces(0)))
        assert select.select([link._socket], [], [], 10)[0]
        assert not link.is_over()
        link._socket.recv(1 << 17)
        assert not hasattr(link, "_poll"), "a poll object that two threads use at once raises"


@pytest.mark.skipif(NATIVE is None, reason="without the C core there is one way only")
def test_runs_are_gathered_in_c_as_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, files = random.Random(3), []
    for number in range(3):
        (tmp_path / str(number)).write_bytes(chance.randbytes(50_000))
        files.append(os.open(tmp_path / str(number), os.O_RDONLY))
    sizes = [chance.choice([1, 100, 4096, 9000]) for _ in range(300)]
    places = [chance.randrange(52_000) for _ in sizes]
    for at in range(1, 300):
        if chance.random() < 0.7:  # most follow the one before
            places[at] = places[at - 1] + sizes[at - 1]
    chosen = [chance.choice([*files, -1]) if chance.random() < 0.3 else files[at // 100] for at in range(300)]

    def gathered() -> tuple[bytes, bytes]:
        buffer = bytearray(sum(sizes))
        start = memory_of_buffer(buffer).address
        columns = [chosen, places, start + np.cumsum([0, *sizes[:-1]]), sizes]
        whole_ = sweep.gather(np.ascontiguousarray(np.array(columns, np.int64).T))
        ends = np.cumsum(sizes).tolist()
        came = b"".join(
            bytes(buffer[end - size : end]) for end, size, is_whole in zip(ends, sizes, whole_, strict=True) if is_whole
        )
        return whole_, came

    in_c = gathered()
    monkeypatch.setattr(sweep, "NATIVE", None)
    assert gathered() == in_c
    assert {*in_c[0]} == {0, 1}
    for fd in files:
        os.close(fd)
