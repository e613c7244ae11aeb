"""A router that follows the events knows which pages are where: stored before removed, and nothing said of splits."""

from __future__ import annotations

import pytest
from engine import Engine

from kvmover.cache.prefix import (
    CopyOut,
    EvictionGranularity,
    FreePages,
    KeyUnits,
    PrefixError,
    PrefixNamespace,
    PrefixTree,
    WriteBack,
    WriteThrough,
)
from kvmover.cache.prefix.hashes import as_int64, chain, chain_bigrams
from kvmover.cache.prefix.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Medium
from kvmover.cache.prefix.packed_rows import packed


def watched(page_tokens: int = 2, **more) -> tuple[Engine, list[KVEvent]]:
    events: list[KVEvent] = []
    return Engine(PrefixTree(page_tokens, sink=events.append, **more)), events


def names(tokens: list[int], page_tokens: int = 2) -> tuple[int, ...]:
    return tuple(map(as_int64, chain(b"", tokens, page_tokens)))


def test_new_pages_are_stored_after_their_parent_and_a_split_says_nothing() -> None:
    mine, events = watched()
    mine.insert([1, 2, 3, 4, 5, 6])
    assert events == [
        BlockStored(packed(names([*range(1, 7)])), None, packed(range(1, 7)), 2, None, Medium.GPU, None, None),
    ]
    mine.tree.match([1, 2, 9, 9])
    assert len(events) == 1
    mine.insert([1, 2, 7, 8])
    assert events[1] == BlockStored(
        packed(names([1, 2, 7, 8])[1:]), names([1, 2])[0], packed((7, 8)), 2, None, Medium.GPU, None, None
    )
    mine.evict(100)
    removed = [name for event in events[2:] if isinstance(event, BlockRemoved) for name in event.block_hashes]
    assert sorted(removed) == sorted({*names([1, 2, 3, 4, 5, 6]), *names([1, 2, 7, 8])})


def test_pages_cut_off_the_end_of_a_leaf_are_removed_by_name() -> None:
    mine, events = watched()
    mine.insert([1, 2, 3, 4, 5, 6])
    mine.evict(2)
    assert events[1:] == [BlockRemoved(packed(names([1, 2, 3, 4, 5, 6])[1:]), Medium.GPU)]


def test_a_page_that_moves_between_tiers_is_removed_and_stored_by_medium_in_order() -> None:
    mine, events = watched(tiers=WriteThrough(), grain=EvictionGranularity.NODE)
    node = mine.insert([1, 2]).node
    mine.backed(node)
    mine.evict(1)
    mine.end(mine.load(node).op)
    mine.evict(1)
    mine.evict_host(1)
    told = [(type(event).__name__, getattr(event, "medium", None)) for event in events]
    assert told == [
        ("BlockStored", Medium.GPU),
        ("BlockStored", Medium.CPU_PINNED),
        ("BlockRemoved", Medium.GPU),
        ("BlockStored", Medium.GPU),
        ("BlockRemoved", Medium.GPU),
        ("BlockRemoved", Medium.CPU_PINNED),
    ]


def test_a_backup_split_under_way_is_told_whole() -> None:
    """sglang#27072: the event named the rest of a split node only."""
    mine, events = watched(1, tiers=WriteThrough())
    transfer = mine.backup(mine.insert([1, 2, 3, 4]).node)
    mine.tree.match([1, 2, 9])
    mine.end(transfer.op)
    host = [event for event in events if isinstance(event, BlockStored) and event.medium is Medium.CPU_PINNED]
    assert [name for event in host for name in event.block_hashes] == list(names([1, 2, 3, 4], 1))


def test_an_event_names_adapter_and_salt_and_starts_from_the_namespace() -> None:
    mine, events = watched()
    space = PrefixNamespace(adapter="lora-7", salt="tenant")
    mine.insert([1, 2], namespace=space)
    (event,) = events
    assert isinstance(event, BlockStored)
    assert (event.lora_name, event.cache_salt) == ("lora-7", "tenant")
    assert event.block_hashes == (as_int64(chain(space.digest, [1, 2], 2)[0]),)


def test_an_event_has_the_keys_of_each_page_of_a_namespace_with_a_model_or_an_image() -> None:
    mine, events = watched()
    space = PrefixNamespace(model="draft", adapter="lora-7", salt="tenant", extra=("image", "audio"))
    mine.insert([1, 2, 3, 4], namespace=space)
    mine.insert([1, 2, 3, 4], namespace=PrefixNamespace(adapter="lora-7"))
    first, second = events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.extra_keys == (("lora-7", "draft", "image", "audio"),) * 2
    assert (second.extra_keys, second.lora_name) == (None, "lora-7")


def test_of_bigrams_the_first_tokens_are_told() -> None:
    mine, events = watched(units=KeyUnits.BIGRAM)
    mine.insert([1, 2, 3, 4, 5])
    (event,) = events
    assert isinstance(event, BlockStored)
    assert event.token_ids == (1, 2, 3, 4)
    assert event.block_hashes == tuple(map(as_int64, chain_bigrams(b"", [1, 2, 3, 4, 5], 2)))


def test_a_reset_clears_in_one_event() -> None:
    mine, events = watched()
    mine.insert([1, 2, 3, 4])
    mine.apply(mine.tree.reset())
    assert events[1:] == [AllBlocksCleared()]


def test_without_a_listener_nothing_is_hashed() -> None:
    mine = Engine(PrefixTree(2))
    mine.insert(range(12))
    mine.tree.match([0, 1, 9, 9])
    mine.evict(2)
    assert all(node.hashes is None for node in mine.tree._forest)  # no public sight of it


class FullQueue(Exception):
    """What a publisher raises."""


def failing(at: set[int], **more) -> tuple[Engine, list[KVEvent]]:
    """A tree whose sink raises when it is asked for the n-th time."""
    heard: list[KVEvent] = []
    asked = iter(range(1000))

    def sink(event: KVEvent) -> None:
        if next(asked) in at:
            raise FullQueue
        heard.append(event)

    return Engine(PrefixTree(1, sink=sink, **more)), heard


def test_a_sink_that_raises_in_an_eviction_loses_no_id_and_no_event() -> None:
    mine, heard = failing({3, 4})
    mine.insert([1, 2])
    mine.insert([5, 6])
    mine.insert([7, 8])
    for _ in range(2):
        with pytest.raises(FullQueue):
            mine.tree.evict(4)
        mine.tree.check()
    assert mine.tree.sizes().evictable == 0
    assert sorted(mine.tree.evict(0).page_ids().tolist()) == [0, 1, 2, 3, 4, 5]
    told, _ = watched(1)
    assert told.tree.evict(0).actions == ()
    gone = [name for event in heard if isinstance(event, BlockRemoved) for name in event.block_hashes]
    assert sorted(gone) == sorted({*names([1, 2], 1), *names([5, 6], 1), *names([7, 8], 1)})
    assert mine.tree.evict(0).actions == ()


def test_a_sink_that_raises_in_an_insertion_leaves_the_pages_with_the_tree() -> None:
    mine, heard = failing({1})
    mine.insert([1, 2])
    with pytest.raises(FullQueue):
        mine.tree.insert([1, 3], [40, 41])
    mine.tree.check()
    assert mine.tree.match([1, 3]).page_ids.tolist() == [0, 41]
    assert mine.tree.evict(1).page_ids().tolist() == [40, 1]
    assert [type(event) for event in heard] == [BlockStored, BlockStored, BlockRemoved]


def test_a_sink_that_raises_in_an_extension_leaves_the_handle_out() -> None:
    mine, _ = failing({1})
    handle = mine.tree.lock(mine.insert([1, 2]).node)
    with pytest.raises(FullQueue):
        mine.tree.extend(handle, [3], [40])
    assert mine.tree.extend(handle, [3], [40]).kept_page_ids.tolist() == [40]
    mine.tree.check()


def test_copies_that_a_sinks_error_kept_back_are_carried_out_before_the_host_is_read() -> None:
    mine, _ = failing({1}, tiers=WriteBack())
    node = mine.insert([1, 2]).node
    with pytest.raises(FullQueue):
        mine.tree.evict(2, room=[0, 1])
    with pytest.raises(PrefixError, match=r"evict\(0\) returns them"):
        mine.tree.begin_load(node, {"full": [40, 41]})
    copy, freed = mine.tree.evict(0).actions
    assert isinstance(copy, CopyOut)
    assert isinstance(freed, FreePages)
    mine.tree.end(mine.tree.begin_load(node, {"full": [40, 41]}).op)
    mine.tree.check()
