"""Several processes on one directory, with no word between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import race_peer
from store_rank import GQA, PAGE, SPACE, Rank, pages_of

from kvmover.store import Got, PagePart, PageStore
from tests.proofs import tries
from tests.store.segments import segments_of

TOP = Path(__file__).parent.parent.parent
#: An answer that a race may give to a read. A page that was deleted under it is never called poisoned.
ANSWERS = {"read", "absent", "evicted"}
#: Why a put may fail here: somebody cleared the namespace under it.
CLEARED = {"data file is missing", "cleared meanwhile"}


@pytest.mark.searched
def test_writers_readers_and_cleaners_race_without_a_wrong_byte(tmp_path: Path) -> None:
    """The peers compare every byte they read; two writers of TP2 ranks write the same pages at once."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOP), str(Path(__file__).parent)])}
    roles = [("writer", 0), ("writer", 1), ("reader", 2), ("reader", 3), ("cleaner", 4)]
    rounds = tries(plain=10, prove=100, night=100)
    peers = [
        subprocess.Popen(
            [sys.executable, race_peer.__file__, role, str(tmp_path), str(seed), str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for role, seed in roles
    ]
    for peer in peers:
        assert peer.stdout is not None
        assert peer.stdout.readline() == "ready\n"
    counts: list[dict[str, Any]] = []
    for peer in peers:
        assert peer.stdin is not None
        print(file=peer.stdin, flush=True)
    for peer, (role, _) in zip(peers, roles, strict=True):
        if role == "writer":
            peer.wait(timeout=90)
    for peer in peers:
        out, _ = peer.communicate("enough\n", timeout=90)
        assert peer.returncode == 0
        counts.append(json.loads(out))
    for count, (role, _) in zip(counts, roles, strict=True):
        assert not count["poisoned"], (role, count["poisoned"])
        if role == "reader":
            assert count["read"] > 0, count
            assert not {name for name in Got if count[name]} - ANSWERS, count
        if role == "writer":
            assert count["written"] > 0
            assert not count["reasons"].keys() - CLEARED, count["reasons"]
        if role == "cleaner":
            assert count["deleted"] > 0
    with PageStore.open(tmp_path, SPACE) as store:
        pages = pages_of(race_peer.PAGES)
        rank = Rank(store, PagePart.whole(GQA, PAGE), len(pages))
        assert [answer.ok for answer in rank.get(pages)] == rank.exists(pages)
        assert not store.verify().bad
        store.evict(1 << 40)
        store.collect()
        assert not list(segments_of(store).folder.glob("*.data")), "space that nobody holds is not given back"
