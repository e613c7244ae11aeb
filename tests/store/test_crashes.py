"""SIGKILL at random system calls of a write load: no wrong byte and no false hit afterwards, and no promise broken.

KVMOVER_KILLS=300 runs as many points; the default is enough to see each kind of call torn.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import crash_load
import pytest
from store_rank import PAGE, SPACE, Rank, pages_of

from kvmover.store import PagePart, PageStore
from kvmover.store.segment import Segment

KILLS = int(os.environ.get("KVMOVER_KILLS", "60"))
ROOTS = 6
TOP = Path(__file__).parent.parent.parent


@contextmanager
def forking(mutant: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process with everything imported and no threads, which forks for every kill."""
    path = os.pathsep.join([str(TOP), str(Path(__file__).parent)])
    server = subprocess.Popen(
        [sys.executable, crash_load.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "KVMOVER_MUTANT": mutant},
    )
    with server:
        yield server
        assert server.stdin is not None
        server.stdin.close()


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    with forking() as server:
        yield server


def killed(forks: subprocess.Popen[str], root: Path, seed: int) -> list[bytes]:
    """Run the load until it kills itself; what it had promised."""
    assert forks.stdin is not None
    assert forks.stdout is not None
    print(seed, root, file=forks.stdin, flush=True)
    number, _, promises = forks.stdout.readline().rstrip("\n").partition(" ")
    assert number == str(int(signal.SIGKILL)), f"seed {seed} ended by itself: {number}"
    lines = bytes.fromhex(promises)
    return [lines[at : at + 4] for at in range(0, len(lines), 4)]


def promised(lines: list[bytes], before: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """(component, page) that must be there: written, and nothing deleted since."""
    there = set(before)
    for line in lines:
        if line[:1] == b"D":
            there.clear()
        else:
            there.add((line[1], line[2]))
    return there


def survive(forks: subprocess.Popen[str], root: Path, first_seed: int, kills: int) -> None:
    """Kill the load again and again over one directory, and look at all that is left after each time."""
    pages = pages_of(crash_load.PAGES)
    kept: set[tuple[int, int]] = set()
    for seed in range(first_seed, first_seed + kills):
        kept = promised(killed(forks, root, seed), kept)
        with PageStore.open(root, SPACE, crash_load.POLICY) as store:
            found: set[tuple[int, int]] = set()
            for index, component in enumerate(crash_load.COMPONENTS):
                rank = Rank(store, PagePart.whole(component, PAGE), len(pages))
                there = rank.exists(pages)
                assert [answer.ok for answer in rank.get(pages)] == there, (seed, "a false hit")
                found |= {(index, page) for page, is_there in enumerate(there) if is_there}
            assert not store.counters.poisoned, (seed, store.counters.poisoned)
            assert kept <= found, (seed, "a page that was written is gone", kept - found)
            if random.Random(seed).random() < 0.1:
                store.clear()
                kept = set()


@pytest.mark.parametrize("number", range(ROOTS))
@pytest.mark.timeout(1200)
def test_a_kill_at_any_point_leaves_whole_objects_or_none(
    forks: subprocess.Popen[str], tmp_path: Path, number: int
) -> None:
    survive(forks, tmp_path, number * 1_000_003, -(-KILLS // ROOTS))


@pytest.mark.parametrize(("mutant", "found_out"), [("headers first", "a false hit"), ("early", "is gone")])
def test_a_store_that_writes_in_another_order_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str, found_out: str
) -> None:
    """What keeps the first from harm, beside the order, is the size of the data file: here nobody looks at it."""
    monkeypatch.setattr(Segment, "data_bytes", lambda self: 1 << 60)
    with forking(mutant) as server, pytest.raises(AssertionError, match=found_out):
        survive(server, tmp_path, 0, 100)
