"""What routers are told of storage: what has come, and what is gone, whoever deleted it."""

from __future__ import annotations

import pytest
from rig import HYBRID, PLAIN, Rank

from kvmover.cache.prefix.hashes import as_int64s
from kvmover.cache.prefix.kv_events import BlockRemoved, BlockStored
from kvmover.store import PageStore
from kvmover.store.deletion import DeletionOrder
from tests.store.segments import segments_of

PROMPT = list(range(33))


@pytest.fixture(params=[PLAIN, HYBRID], ids=["plain", "hybrid"])
def heard(request, tmp_path):
    events = []
    rank = Rank(tmp_path, model=request.param, sink=events.append)
    rank.serve(PROMPT)
    rank.controller.wait()
    (stored,) = events
    assert isinstance(stored, BlockStored)
    events.clear()
    yield rank, events
    rank.close()


def test_a_page_that_was_deleted_here_is_taken_back_once(heard):
    rank, events = heard
    rank.store.clear()
    rank.controller.poll()
    rank.controller.poll()
    (removed,) = events
    assert isinstance(removed, BlockRemoved)
    assert removed.medium == "DISK"
    assert sorted(removed.block_hashes) == sorted(as_int64s(rank.hashes(PROMPT)))


def test_a_page_that_another_process_deleted_is_taken_back_when_this_one_learns_of_it(heard, tmp_path):
    rank, events = heard
    with PageStore.open(tmp_path, rank.space) as other:
        page = rank.hashes(PROMPT)[3]
        entry = segments_of(other).catalog.index.get(page)
        assert entry is not None
        segments_of(other).catalog.delete(list(entry.objects), DeletionOrder.CLEARED)
    rank.forget()
    rank.serve(PROMPT)  # looks into storage
    rank.controller.poll()
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert [event.block_hashes for event in removed] == [as_int64s([page])]
    rank.controller.wait()
    assert isinstance(events[-1], BlockStored), "it was computed and stored again"


def test_a_page_that_others_cover_for_is_still_there(heard):
    """Two objects of one part, as when two fleets wrote it at once: the one that goes is no loss."""
    rank, events = heard
    storage_events = rank.controller._events
    assert storage_events is not None
    storage_events.lost(rank.hashes(PROMPT)[2])  # as the index says it of any object; the page is whole
    rank.controller.poll()
    assert not events


def test_pages_that_were_never_announced_are_not_taken_back(heard, tmp_path):
    rank, events = heard
    other = Rank(tmp_path, model=rank.model)
    other.serve([9] * 33)
    other.controller.wait()
    other.store.clear()
    other.close()
    rank.forget()
    rank.serve([9] * 33)
    rank.controller.poll()
    told = {name for event in events if isinstance(event, BlockRemoved) for name in event.block_hashes}
    assert told == set(as_int64s(rank.hashes(PROMPT)))
