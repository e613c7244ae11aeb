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


@pytest.fixture
def told(tmp_path):
    """A rank whose tree and storage tell one router."""
    events = []
    rank = Rank(tmp_path, sink=events.append)
    yield rank, events
    rank.close()


def pages_of(events):
    """Name, parent, tokens of each page that the events store."""
    known = {}
    for event in events:
        if isinstance(event, BlockStored):
            above = event.parent_block_hash
            for at, name in enumerate(event.block_hashes):
                size = event.block_size
                known[name] = above, event.token_ids[at * size : (at + 1) * size]
                above = name
    return known


def as_chain(rank, tokens):
    names = as_int64s(rank.hashes(tokens))
    rows = [tuple(tokens[at * rank.page : (at + 1) * rank.page]) for at in range(len(names))]
    return dict(zip(names, zip((None, *names), rows, strict=False), strict=True))


def test_stored_pages_are_told_with_their_tokens_and_the_page_before(told):
    """Dynamo's indexer drops a page without tokens. A second prompt stores what the first did not."""
    rank, events = told
    second = [*PROMPT[:16], *range(900, 917)]
    for prompt in (PROMPT, second):
        rank.serve(prompt)
        rank.controller.wait()
    assert pages_of(events) == as_chain(rank, PROMPT) | as_chain(rank, second)
    assert {event.medium for event in events} == {"DISK"}


def test_a_late_router_and_one_after_a_reset_hear_of_pages_that_storage_still_has(told):
    rank, events = told
    rank.serve(PROMPT)
    rank.controller.wait()
    gone, known = rank.hashes(PROMPT)[3], as_chain(rank, PROMPT)
    assert pages_of(e for e in rank.controller.resident() if e.medium == "DISK") == known
    segments = segments_of(rank.store).catalog
    entry = segments.index.get(gone)
    assert entry is not None
    segments.delete(list(entry.objects), DeletionOrder.CLEARED)
    rank.controller.poll()
    del known[as_int64s([gone])[0]]
    assert pages_of(e for e in rank.controller.resident() if e.medium == "DISK") == known
    events.clear()
    rank.controller.reset()
    assert pages_of(events) == known


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
