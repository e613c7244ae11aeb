"""Processes around one keeper: ranks that are killed at every call, ranks that have stopped, and a keeper that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from keeper_peer import BATCH
from keepers import KeeperProcess, location
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.errors import StoreError
from kvmover.layout import Fleet
from kvmover.store import Got, PageStore, Put

PEER = Path(__file__).with_name("keeper_peer.py")
ROOT = PEER.parents[2]
TP4, TP8 = Fleet(tp=4, page_tokens=PAGE), Fleet(tp=8, page_tokens=PAGE)


@pytest.fixture(scope="module")
def process() -> Generator[KeeperProcess]:
    keeper = KeeperProcess()
    yield keeper
    keeper.close()


def settled(process: KeeperProcess, folder: Path) -> None:
    """The keeper has heard that all others have gone."""
    while process.ask("sessions", folder):
        time.sleep(0.001)


def test_a_rank_that_is_killed_at_any_call_leaves_all_that_was_promised_and_nothing_else(
    process: KeeperProcess, tmp_path: Path
) -> None:
    process.start(tmp_path, slab_bytes=32 << 10)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(PEER.parent)))}
    command = [sys.executable, str(PEER), location(tmp_path, "engine", 1)]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    lives = [json.loads(line) for line in lines.splitlines()]
    assert len(lives) > 20, "every call of a run, before and after"
    assert [life["survived"] for life in lives][-1]
    assert sum(len(life["promised"]) for life in lives) > len(lives) // 2
    settled(process, tmp_path)
    process.ask("check", tmp_path)
    for number in range(2):  # of another fleet: the first two of eight have what the first of four had
        with PageStore.open(location(tmp_path, "engine", 2), SPACE) as store:
            rank = Rank.of(store, GQA, TP8, number, slots=BATCH)
            for life in lives:
                for batch in range(2):
                    pages = pages_of(BATCH, f"{life['name']} {batch}")
                    there = rank.exists(pages)
                    assert [answer.ok for answer in rank.get(pages)] == there, life
                    if f"{life['name']} {batch}" in life["promised"]:
                        assert all(there), life
            assert store.verify().bad == {}
    settled(process, tmp_path)
    process.ask("check", tmp_path)


def test_a_stopped_owner_that_wakes_up_can_change_nothing(process: KeeperProcess, tmp_path: Path) -> None:
    """What it was about to write is refused by the kernel, what it commits by the keeper."""
    process.start(tmp_path)
    pages = pages_of(4)
    with PageStore.open(location(tmp_path, "engine", 1), SPACE) as old:
        before = Rank.of(old, GQA, TP4, 0)
        assert all(answer.ok for answer in before.put(pages[:2]))
        slab = old.objects._writer._slab
        with PageStore.open(location(tmp_path, "engine", 2), SPACE) as new:
            after = Rank.of(new, GQA, TP8, 0)
            assert all(answer.ok for answer in after.get(pages[:2]))
            for offset in (0, slab.end):
                with pytest.raises(PermissionError):
                    os.pwrite(slab.file.fd, b"\xff" * 4096, offset)
            refused = before.put(pages[2:])
            assert {answer.outcome for answer in refused} == {Put.FAILED}
            assert "generation 1 of fleet 'engine' is fenced by generation 2" in refused[0].reason
            for change in (old.clear, lambda: old.evict(1 << 30)):
                with pytest.raises(StoreError, match="is fenced by generation 2"):
                    change()
            assert old.collect().evicted_pages == 0
            assert all(answer.ok for answer in before.get(pages[:2])), "it reads what it wrote"
            assert all(answer.ok for answer in after.get(pages[:2]))
            assert new.verify().bad == {}
        with pytest.raises(StoreError, match="generation 1 of fleet 'engine' is fenced by generation 2"):
            PageStore.open(location(tmp_path, "engine", 1), SPACE)


def test_a_keeper_that_dies_costs_hits_and_nothing_else_and_the_next_one_is_found(tmp_path: Path) -> None:
    first = KeeperProcess()
    first.start(tmp_path)
    pages = pages_of(6)
    lost: list[bytes] = []

    class Watcher:
        def lost(self, page: bytes) -> None:
            lost.append(page)

    watcher = Watcher()
    with PageStore.open(location(tmp_path), SPACE) as store:
        rank = Rank.of(store, GQA, TP4, 0)
        store.watch(watcher)
        assert all(answer.ok for answer in rank.put(pages[:4]))
        first.close()
        assert not any(rank.exists(pages))
        assert sorted(lost) == sorted(pages[:4])
        assert {answer.outcome for answer in rank.get(pages)} == {Got.ABSENT}
        assert {answer.reason for answer in rank.put(pages)} == {"the keeper does not answer"}
        with pytest.raises(StoreError, match="the keeper does not answer"):
            store.flush()
        assert store.collect().evicted_pages == 0
        second = KeeperProcess()
        second.start(tmp_path)
        while not all(answer.ok for answer in rank.put(pages)):
            time.sleep(0.05)
        assert all(answer.ok for answer in rank.get(pages))
    second.close()


def test_a_keeper_that_has_stopped_delays_no_look_up(tmp_path: Path) -> None:
    process = KeeperProcess()
    process.start(tmp_path)
    with PageStore.open(location(tmp_path), SPACE) as store:
        rank = Rank.of(store, GQA, TP4, 0)
        pages = pages_of(4)
        assert all(answer.ok for answer in rank.put(pages))
        assert all(answer.ok for answer in rank.get(pages))
        assert process.process.pid
        os.kill(process.process.pid, signal.SIGSTOP)
        assert all(rank.exists(pages))
        assert all(answer.ok for answer in rank.get(pages)), "a slab that is open is read without its keeper"
        os.kill(process.process.pid, signal.SIGCONT)
    process.close()
