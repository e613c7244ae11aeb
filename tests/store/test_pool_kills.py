"""Processes of a pool of memory that die or stop: writers at every point of a put, donors, and the master."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pool_peer import POINTS
from pool_processes import PoolProcesses, free_port
from pool_racer import PAGES as RACED
from pool_stores import FaultyClient, open_over
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.errors import StoreError
from kvmover.layout import Fleet
from kvmover.store import Got, PagePart, PageStore, Put
from kvmover.store.mooncake.client import SILENT_MASTER, PoolClient
from kvmover.store.mooncake.format import PoolAddress

PEER, RACER = (Path(__file__).with_name(name) for name in ("pool_peer.py", "pool_racer.py"))
ROOT = PEER.parents[2]
PATHS = (str(ROOT), str(PEER.parent), *filter(None, [os.environ.get("PYTHONPATH")]))
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
WHOLE = PagePart.whole(GQA, PAGE)
PAGES = pages_of(12)


def processes_of(*donated_bytes: int) -> Iterator[PoolProcesses]:
    """A pool of the test's own, for what would disturb others."""
    processes = PoolProcesses()
    try:
        for nbytes in donated_bytes:
            processes.donate(nbytes)
        yield processes
    finally:
        processes.close()


@pytest.fixture
def mortal(pool: PoolProcesses) -> Iterator[PoolProcesses]:
    """With one donor."""
    yield from processes_of(64 << 20)


@pytest.fixture
def tight(pool: PoolProcesses) -> Iterator[PoolProcesses]:
    """With two donors of little."""
    yield from processes_of(16 << 20, 16 << 20)


def until(holds: Callable[[], bool]) -> None:
    """Wait for what a master does when its own clocks say so."""
    for _ in range(200):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it never came to hold")


def test_a_writer_that_dies_anywhere_leaves_whole_objects_or_none(pool: PoolProcesses) -> None:
    command = [sys.executable, str(PEER), pool.location]
    peers = [subprocess.Popen([*command, point], env=ENVIRONMENT, stderr=subprocess.DEVNULL) for point in POINTS]
    assert [peer.wait(60) for peer in peers] == [-signal.SIGKILL] * len(POINTS)
    joined = PoolClient.open(PoolAddress.parse(pool.location))
    client = FaultyClient(joined._client, joined._kept)
    for point in POINTS:
        store = open_over(client, prefix=f"test/{point.replace(' ', '-')}")
        first = Rank.of(store, GQA, Fleet(tp=2, page_tokens=PAGE), 0)
        assert all(answer.ok for answer in first.get(pages_of(6, "first"))), point
        second = Rank.of(store, GQA, Fleet(tp=4, page_tokens=PAGE), 3)
        there = second.exists(pages_of(6, "second"))
        assert there == [point == "after objects"] * 6, point
        assert [answer.ok for answer in second.get(pages_of(6, "second"))] == there
        answers = second.put(pages_of(6, "second"))
        assert all(answer.ok for answer in answers) == all(second.exists(pages_of(6, "second"))), point
        if point == "in objects":
            assert {answer.reason for answer in answers} == {"somebody else began to put it, and has not ended"}
            until(lambda rank=second: all(answer.ok for answer in rank.put(pages_of(6, "second"))))
            assert all(answer.ok for answer in second.get(pages_of(6, "second")))
        store.close()
    joined.close()


@pytest.mark.proof
def test_a_donor_that_dies_takes_its_own_pages_alone(mortal: PoolProcesses) -> None:
    doomed = mortal.donate()
    with PageStore.open(mortal.location, SPACE) as store:
        rank, pages = Rank(store, WHOLE, slots=64), pages_of(64)
        assert all(answer.ok for answer in rank.put(pages))
        doomed.kill()
        outcomes = [answer.outcome for answer in rank.get(pages)]
        assert set(outcomes) == {Got.READ, Got.FAILED}
        kept = [outcome is Got.READ for outcome in outcomes]
        until(lambda: rank.exists(pages) == kept)
        assert [answer.outcome for answer in rank.get(pages)] == [Got.READ if each else Got.ABSENT for each in kept]
        assert store.counters.poisoned.total() == 0
        until(lambda: all(answer.ok for answer in rank.put(pages)))
        with PageStore.open(mortal.location, SPACE) as other:
            assert all(answer.ok for answer in Rank(other, WHOLE, slots=64).get(pages))


@pytest.mark.proof
def test_a_master_that_dies_costs_misses_until_another_serves(mortal: PoolProcesses) -> None:
    with PageStore.open(mortal.location, SPACE) as store:
        rank = Rank(store, WHOLE)
        assert all(answer.ok for answer in rank.put(PAGES))
        mortal.master.kill()
        mortal.master.wait(10)
        assert rank.exists(PAGES) == [False] * 12
        assert {answer.outcome for answer in rank.get(PAGES)} == {Got.ABSENT}
        assert {(answer.outcome, answer.reason) for answer in rank.put(PAGES)} == {(Put.FAILED, SILENT_MASTER)}
        store.flush()
        store.collect()
        assert store.counters.lagged[SILENT_MASTER] >= 3
        mortal.start_master()
        until(lambda: all(answer.ok for answer in rank.put(PAGES)))
        assert all(answer.ok for answer in rank.get(PAGES))
        with PageStore.open(mortal.location, SPACE) as other:
            assert all(answer.ok for answer in Rank(other, WHOLE).get(PAGES))


@pytest.mark.proof
def test_a_master_that_hangs_is_a_miss_and_lets_nobody_in(mortal: PoolProcesses) -> None:
    """Who asks waits for it once; what it was asked then is not asked again until it has answered."""
    with PageStore.open(mortal.location, SPACE) as store:
        rank = Rank(store, WHOLE)
        assert all(answer.ok for answer in rank.put(PAGES))
        mortal.master.send_signal(signal.SIGSTOP)
        os.waitpid(mortal.master.pid, os.WUNTRACED)  # until all its threads have stopped
        try:
            for _ in range(50):
                assert rank.exists(PAGES) == [False] * 12
            assert {answer.reason for answer in rank.put(PAGES)} == {SILENT_MASTER}
            assert store.counters.lagged == {SILENT_MASTER: 51}
            with pytest.raises(StoreError, match=SILENT_MASTER):
                PageStore.open(mortal.location, SPACE)
        finally:
            mortal.master.send_signal(signal.SIGCONT)
        until(lambda: all(rank.exists(PAGES)))
        assert all(answer.ok for answer in rank.get(PAGES))


_LEAVES = """
import os, signal, sys
from kvmover.store import Namespace, PageStore
store = PageStore.open(sys.argv[1], Namespace("llama", "rev-1", 16))
os.kill(int(sys.argv[2]), signal.SIGSTOP)
store.objects.collect()
store.close()
"""


@pytest.mark.proof
def test_a_process_ends_while_its_master_hangs(mortal: PoolProcesses) -> None:
    words = [sys.executable, "-c", _LEAVES, mortal.location, str(mortal.master.pid)]
    ended = subprocess.run(words, env=ENVIRONMENT, stderr=subprocess.PIPE, timeout=25, check=False)
    mortal.master.send_signal(signal.SIGCONT)
    assert ended.returncode == 0, ended.stderr[-2000:]


@pytest.mark.proof
def test_fleets_that_race_in_a_pool_without_room_read_no_other_bytes(tight: PoolProcesses) -> None:
    """While its master evicts, one of two donors dies, and so does one of the fleets."""
    doomed = tight.donors[0]
    fleets = ("tp=1,page=16", "tp=4,page=16", "tp=2,pp=2,page=16", "tp=2,page=16", "tp=2,page=16")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    racers = [
        subprocess.Popen([sys.executable, str(RACER), tight.location, fleet, str(seed)], env=ENVIRONMENT, **pipes)
        for seed, fleet in enumerate(fleets)
    ]
    with PageStore.open(tight.location, SPACE) as store:
        until(lambda: any(Rank(store, WHOLE, slots=len(RACED)).exists(RACED)))
    doomed.kill()
    racers[-1].kill()
    ended = [racer.communicate(timeout=100) for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 4 + [-signal.SIGKILL], [said[-1500:] for _, said in ended]
    kept, lost = zip(*(map(int, said.split()) for said, _ in ended[:-1]), strict=True)
    assert all(kept)
    assert any(lost), "there was room for all"


def test_nobody_at_the_location_is_an_error_that_names_it() -> None:
    location = f"mooncake://127.0.0.1:{free_port()}"
    with pytest.raises(StoreError, match=f"cannot join {location}/kvmover: {SILENT_MASTER}"):
        PageStore.open(location, SPACE)
