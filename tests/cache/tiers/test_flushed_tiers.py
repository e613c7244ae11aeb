"""Tiers over a disk that fails: pages that a flush has promised come back to device and host with their bytes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from rig import SINGLE, Rank

from kvmover.errors import StoreError
from kvmover.store import PageStore
from tests.proofs import tries
from tests.store.faulty_disk import TROUBLES
from tests.store.flush_stories import Telling, told
from tests.store.segments import segments_of

PROMPT, LATER = list(range(9)), [*range(4), *range(50, 59)]


def opened(tale: Telling) -> Rank | None:
    """A rank over the store, as often as it has to be made."""
    for _ in range(3):
        with suppress(StoreError):
            rank = Rank(tale.root, fleet=SINGLE, pages=(8, 8), keeps=tale.policy)
            tale.stores.append(rank.store)
            tale.space, tale.part = rank.space, rank.tiered_pools[0].part
            return rank
    return None


def keep(tale: Telling, rank: Rank, prompt: list[int]) -> None:
    """Serve a prompt, whose pages are written through to storage, and flush. All that is restored is looked at."""
    for _ in range(3):
        rank.serve(prompt)
        rank.controller.wait()
        there = _there(tale, rank.store, rank.hashes(prompt))
        with suppress(StoreError):
            rank.store.flush()
            tale.promised |= there
        rank.forget()


def _there(tale: Telling, store: PageStore, pages: list[bytes]) -> set[bytes]:
    """The pages that have been written."""
    found = set[bytes]()
    for page in pages:
        entry = segments_of(store).catalog.index.get(page)
        for each in entry.objects if entry else ():
            tale.holds.setdefault(each.segment, set()).add(page)
            found.add(page)
    return found


def tiers(tale: Telling) -> None:
    """Two prompts with a page in common are stored and flushed, leave device and host, and are served again; also after
    a restart, and after upkeep."""
    for _ in range(2):
        rank = opened(tale)
        if rank:
            keep(tale, rank, PROMPT)
            rank.store.collect()
            with suppress(OSError, StoreError):
                rank.store.verify()
            keep(tale, rank, LATER)
            rank.close()


@pytest.mark.searched
def test_what_a_flush_promised_comes_back_whatever_call_of_the_disk_fails(tmp_path: Path) -> None:
    """Worker threads order the calls by chance: a number stands for another call now and then."""
    whole = told(tiers, tmp_path / "story", {})
    assert len(whole.promised) == 4
    cases = [(at, trouble) for at, call in enumerate(whole.disk.calls) for trouble in TROUBLES[call.name]]
    for case in cases[:: tries(200, 60, 2)]:
        told(tiers, tmp_path / "story", dict([case]))
