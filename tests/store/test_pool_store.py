"""Pages in a pool of memory: who finds what, which boxes are asked for, and what a read makes of damage."""

from __future__ import annotations

import threading
import time

import pytest
from pool_stores import LATE_MASTER, NO_MASTER, NO_ROOM, NOT_MOVED, DictClient, FaultyClient, open_over
from store_rank import GQA, MLA, PAGE, SPACE, Rank, pages_of

from kvmover.errors import StoreError
from kvmover.layout import Component, CpOrder, Fleet
from kvmover.store import Got, Namespace, PagePart, PageStore, Policy, Put
from kvmover.store.mooncake.client import STAGING_BYTES, Asker, CallLane, PoolClient
from kvmover.store.mooncake.format import (
    decode_box,
    decode_header,
    encode_box,
    encode_header,
    entry_key,
    header_bytes,
    object_key,
)
from kvmover.store.mooncake.pool_objects import MooncakeObjects, PoolObject
from kvmover.store.objects import Verdict
from tests.proofs import family

WHOLE = PagePart.whole(GQA, PAGE)
PAGES = pages_of(12)
FOLDER = f"kvmover/{SPACE.folder}"


@pytest.fixture
def client() -> FaultyClient:
    return FaultyClient(DictClient())


def outcomes(answers) -> list:
    return [answer.outcome for answer in answers]


def key_of(page: bytes, part: PagePart = WHOLE) -> str:
    return object_key(FOLDER, page, part.key(SPACE))


def damage(client: FaultyClient, page: bytes, at: int) -> None:
    raw = bytearray(client.client.objects[key_of(page)])
    raw[at] ^= 0x40
    client.client.objects[key_of(page)] = bytes(raw)


def test_what_was_put_is_found_by_everybody_at_once(client: FaultyClient) -> None:
    here, there = (Rank(open_over(client), WHOLE) for _ in range(2))
    assert not any(there.exists(PAGES))
    assert outcomes(here.put(PAGES)) == [Put.WRITTEN] * 12
    assert all(there.exists(PAGES))
    assert outcomes(there.get(PAGES)) == [Got.READ] * 12
    assert outcomes(there.put(PAGES)) == [Put.PRESENT] * 12
    for rank in (here, there):
        rank.store.flush()
        rank.store.close()


FLEETS = [
    Fleet(page_tokens=PAGE),
    Fleet(tp=4, page_tokens=PAGE),
    Fleet(tp=2, pp=2, page_tokens=PAGE),
    Fleet(cp=2, cp_order=CpOrder.TOKEN, page_tokens=PAGE),
    Fleet(tp=8, page_tokens=PAGE),
]


@pytest.mark.parametrize("component", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("writers", range(len(FLEETS)))
def test_what_one_shape_wrote_every_other_reads(writers: int, component: Component, client: FaultyClient) -> None:
    store = open_over(client)
    fleet = FLEETS[writers]
    for rank in range(fleet.size):
        Rank.of(store, component, fleet, rank).put(PAGES)
    for other in FLEETS:
        for rank in range(other.size):
            reader = Rank.of(store, component, other, rank)
            assert all(reader.exists(PAGES))
            assert outcomes(reader.get(PAGES)) == [Got.READ] * 12
    store.close()


def test_a_rank_asks_for_the_boxes_that_it_may_be_made_of_in_one_question(client: FaultyClient) -> None:
    store = open_over(client)
    fleet = Fleet(tp=4, page_tokens=PAGE)
    ranks = [Rank.of(store, GQA, fleet, rank) for rank in range(4)]
    for rank in ranks:
        rank.put(PAGES)
    Rank.of(store, MLA, fleet, 0).put(PAGES)
    asked: list[int] = []
    client.client.batch_is_exist = lambda keys: (
        asked.append(len(keys)) or [int(key in client.client.objects) for key in keys]
    )
    assert all(ranks[1].exists(PAGES))
    assert asked == [12 + 4], "a key a page, and four that may be news"
    assert all(Rank(store, WHOLE).exists(PAGES))
    assert asked == [16, 4 * 12 + 4]
    store.close()


def test_a_box_that_comes_into_use_is_learnt_by_the_look_up_that_needs_it(client: FaultyClient) -> None:
    reader = Rank(open_over(client), WHOLE)
    assert not any(reader.exists(PAGES))
    writer = open_over(client)
    for rank in range(2):
        Rank.of(writer, GQA, Fleet(tp=2, page_tokens=PAGE), rank).put(PAGES)
    assert all(reader.exists(PAGES))
    assert outcomes(reader.get(PAGES)) == [Got.READ] * 12
    reader.store.close()
    writer.close()


def test_boxes_that_a_donor_took_along_are_told_again_with_the_next_put(client: FaultyClient) -> None:
    writer = Rank(open_over(client), WHOLE)
    writer.put(PAGES)
    client.client.objects.clear()
    assert outcomes(writer.put(PAGES)) == [Put.WRITTEN] * 12
    with open_over(client) as other:
        assert all(Rank(other, WHOLE).exists(PAGES))
    writer.store.close()


def test_two_writers_that_take_one_number_for_their_boxes_are_both_found(client: FaultyClient) -> None:
    """The other's entry comes between this one's look and its put."""
    mine, theirs = WHOLE, PagePart.held(GQA, Fleet(tp=2, page_tokens=PAGE), 1, PAGE)
    first = entry_key(f"{FOLDER}/boxes", 0)
    client.before = lambda name: (
        client.client.objects.setdefault(first, encode_box(theirs.key(SPACE))) if name == "put" else None
    )
    store = open_over(client)
    Rank(store, mine).put(PAGES)
    entries = [client.client.objects[entry_key(f"{FOLDER}/boxes", number)] for number in range(2)]
    assert [decode_box(entry) for entry in entries] == [theirs.key(SPACE), mine.key(SPACE)]
    store.close()


def test_a_list_without_room_fails_the_put_and_says_why(client: FaultyClient) -> None:
    for number in range(256):
        client.client.objects[entry_key(f"{FOLDER}/boxes", number)] = b"what nobody can read"
    with open_over(client) as store:
        answers = Rank(store, WHOLE).put(PAGES)
    assert {(answer.outcome, answer.reason) for answer in answers} == {
        (Put.FAILED, "all 256 entries of a list of the pool are taken")
    }


def test_an_object_that_somebody_else_began_is_not_called_written(client: FaultyClient) -> None:
    """Mooncake answers 0 for a key that is being put, and forgets it if that never ends."""
    client.client.batch_put_from = lambda keys, addresses, sizes: [0] * len(keys)
    client.client.get_size = lambda key: -703
    with open_over(client) as store:
        answers = Rank(store, WHOLE).put(PAGES)
    assert {(answer.outcome, answer.reason) for answer in answers} == {
        (Put.FAILED, "somebody else began to put it, and has not ended")
    }


@pytest.mark.parametrize(
    ("at", "reason"), [(30, "damaged header"), (header_bytes(WHOLE.box.cells) + 5, "digest"), (150, "damaged header")]
)
def test_a_damaged_object_is_read_twice_deleted_and_written_again(client: FaultyClient, at: int, reason: str) -> None:
    with open_over(client) as store:
        rank = Rank(store, WHOLE)
        rank.put(PAGES)
        damage(client, PAGES[3], at)
        answers = rank.get(PAGES)
        assert outcomes(answers) == [Got.READ] * 3 + [Got.POISONED] + [Got.READ] * 8
        assert store.counters.poisoned == {reason: 1}
        assert key_of(PAGES[3]) not in client.client.objects
        assert outcomes(rank.put(PAGES)).count(Put.WRITTEN) == 1
        assert outcomes(rank.get(PAGES)) == [Got.READ] * 12


def test_bytes_that_came_wrong_of_an_object_that_is_well_are_read_again(client: FaultyClient) -> None:
    with open_over(client) as store:
        rank = Rank(store, WHOLE)
        rank.put(PAGES)
        real, once = client.client._get, iter([True])

        def garbled(key: str, address: int, size: int) -> int:
            if key == key_of(PAGES[5]) and next(once, False):
                return real(key_of(PAGES[4]), address, size)
            return real(key, address, size)

        client.client._get = garbled
        assert outcomes(rank.get(PAGES)) == [Got.READ] * 12
        assert store.counters.poisoned == {}
        assert len(client.client.objects) == 13


def test_an_object_of_another_page_or_shape_under_a_key_is_never_served(client: FaultyClient) -> None:
    with open_over(client) as store:
        rank = Rank(store, WHOLE)
        rank.put(PAGES)
        objects = client.client.objects
        objects[key_of(PAGES[0])] = objects[key_of(PAGES[1])]
        half = Rank.of(store, GQA, Fleet(tp=2, page_tokens=PAGE), 0)
        half.put(pages_of(1, "other"))
        objects[key_of(PAGES[2])] = objects[key_of(*pages_of(1, "other"), half.part)]
        objects[key_of(PAGES[3])] += b"more than there was"
        answers = rank.get(PAGES)
        assert outcomes(answers) == [Got.POISONED, Got.READ, Got.POISONED, Got.POISONED] + [Got.READ] * 8
        assert sum(store.counters.poisoned.values()) == 3


def test_a_process_that_finds_all_objects_bad_deletes_a_few(client: FaultyClient) -> None:
    pages = pages_of(40)
    with open_over(client) as store:
        rank = Rank(store, WHOLE, slots=40)
        rank.put(pages)
        for page in pages:
            damage(client, page, -1)
        assert not any(answer.ok for answer in rank.get(pages))
        assert (store.counters.poisoned, store.counters.spared) == ({"digest": 32}, 8)
        assert sum(key_of(page) in client.client.objects for page in pages) == 8


def test_an_object_that_is_removed_while_it_is_read_is_gone_and_nothing_worse(client: FaultyClient) -> None:
    with open_over(client) as store:
        rank = Rank(store, WHOLE)
        rank.put(PAGES)
        client.before = lambda name: client.client.objects.pop(key_of(PAGES[7]), None) if "get_into" in name else None
        assert outcomes(rank.get(PAGES)) == [Got.READ] * 7 + [Got.EVICTED] + [Got.READ] * 4
        assert (store.counters.poisoned, store.counters.failed) == ({}, {})


def test_a_second_look_that_the_pool_cuts_off_says_nothing_against_an_object(client: FaultyClient) -> None:
    with open_over(client) as store:
        Rank(store, WHOLE).put(PAGES)
        damage(client, PAGES[3], -1)
        each = PoolObject(PAGES[3], WHOLE.key(SPACE))
        assert store.objects.look_again(each) == (Verdict.BAD, "digest")
        client.fails = lambda _number, name: NOT_MOVED if "get" in name and name != "get_size" else 0
        with pytest.raises(OSError, match="does not answer"):
            store.objects.look_again(each)
        client.fails = lambda _number, _name: 0
        client.before = lambda name: client.client.objects.pop(key_of(PAGES[3]), None) if name != "get_size" else None
        assert store.objects.look_again(each)[0] is Verdict.GONE


def test_a_page_that_is_gone_is_told_to_who_watches_when_it_is_asked_for(client: FaultyClient) -> None:
    class Notes:
        def __init__(self) -> None:
            self.pages: list[bytes] = []

        def lost(self, page: bytes) -> None:
            self.pages.append(page)

    notes = Notes()
    with open_over(client) as store:
        store.watch(notes)
        rank = Rank(store, WHOLE)
        rank.put(PAGES)
        notes.pages.clear()
        del client.client.objects[key_of(PAGES[2])]
        rank.exists(PAGES)
        assert notes.pages == [PAGES[2]]
        client.fails = lambda _call, _name: NO_MASTER
        rank.exists(PAGES)
        assert notes.pages == [PAGES[2]], "a master that does not answer says nothing of pages"


def test_pages_longer_than_staging_memory_go_one_by_one(client: FaultyClient) -> None:
    long = Component.attention(8, 8, 128, "bfloat16")
    space = Namespace("llama", "rev-1", 640)
    part = PagePart.whole(long, 640)
    assert part.nbytes > STAGING_BYTES
    with open_over(client, space) as store:
        rank = Rank(store, part, slots=3, namespace=space)
        assert outcomes(rank.put(PAGES[:3])) == [Put.WRITTEN] * 3
        assert outcomes(rank.get(PAGES[:3])) == [Got.READ] * 3


@pytest.mark.parametrize("policy", [Policy(quota_bytes=1 << 30), Policy(ttl_s=60)])
def test_a_quota_and_a_ttl_are_refused_with_the_location(client: FaultyClient, policy: Policy) -> None:
    with pytest.raises(StoreError, match="mooncake://test keeps no (quota_bytes|ttl_s): the master of a pool evicts"):
        open_over(client, policy=policy)


def test_what_cannot_be_listed_is_not_verified_and_counts_nothing(client: FaultyClient) -> None:
    with open_over(client) as store:
        Rank(store, WHOLE).put(PAGES)
        assert (store.stat().pages, store.evict(1 << 20), store.collect().freed_bytes) == (0, 0, 0)
        with pytest.raises(StoreError, match="mooncake://test cannot be verified: a pool can't be listed"):
            store.verify()
        assert store.clear() == 13
        assert client.client.objects == {}


def test_a_pool_that_says_there_and_gone_by_turns_ends_a_read(client: FaultyClient) -> None:
    with open_over(client) as store:
        rank = Rank(store, WHOLE)
        rank.put(PAGES)
        client.client.batch_get_into = lambda keys, addresses, sizes: [-704] * len(keys)
        client.client.get_size = lambda key: -704
        assert outcomes(rank.get(PAGES)) == [Got.EVICTED] * 12


# Faults


def life(client: FaultyClient) -> list[bytes]:
    """One process's day in a pool; which of its pages were written."""
    with open_over(client) as store:
        rank = Rank(store, WHOLE)
        assert len(rank.exists(PAGES)) == 12
        rank.get(PAGES)
        mine = pages_of(6, "mine")
        written = [page for page, answer in zip(mine, rank.put(mine), strict=True) if answer.outcome is Put.WRITTEN]
        rank.get(mine)
        store.collect()
        store.flush()
        quarter = Rank.of(store, GQA, Fleet(tp=4, page_tokens=PAGE), 1)
        quarter.get(PAGES)
        quarter.put(pages_of(2, "more"))
    return written


CODES = (NO_MASTER, LATE_MASTER, NOT_MOVED, NO_ROOM, -1)


@pytest.mark.parametrize("code", family(CODES, CODES[:1]))
def test_one_call_that_fails_costs_nobody_a_page(code: int) -> None:
    number, is_over = 0, False
    while not is_over:
        client = FaultyClient(DictClient())
        with open_over(client) as writer:
            Rank(writer, WHOLE).put(PAGES)
        client.calls.clear()
        client.fails = lambda call, _name, number=number: code if call == number else 0
        written = life(client)
        is_over = len(client.calls) <= number
        client.fails = lambda _call, _name: 0
        with open_over(client) as other:
            kept = Rank(other, WHOLE, slots=24)
            assert all(answer.ok for answer in kept.get(PAGES + written)), number
        number += 1
    assert number > 15


@pytest.mark.parametrize("code", family(CODES, CODES[:1]))
def test_a_pool_that_goes_away_is_a_miss_until_it_is_back(code: int) -> None:
    for first in range(0, 20, 2):
        client = FaultyClient(DictClient())
        with open_over(client) as writer:
            Rank(writer, WHOLE).put(PAGES)
        client.calls.clear()
        client.fails = lambda call, _name, first=first: code if call >= first else 0
        written = life(client)
        client.fails = lambda _call, _name: 0
        with open_over(client) as other:
            assert all(answer.ok for answer in Rank(other, WHOLE, slots=24).get(PAGES + written)), first


def test_a_call_that_hangs_is_waited_for_once_and_ends_alone() -> None:
    lane, gate, calls = CallLane("test"), threading.Event(), list[int]()
    with pytest.raises(TimeoutError, match="nobody answers"):
        lane.call(gate.wait, 0.05, "nobody answers")
    for number in range(20):
        with pytest.raises(TimeoutError, match="nobody answers"):
            lane.call(lambda number=number: calls.append(number), 0.05, "nobody answers")
    assert lane.is_busy
    gate.set()
    while lane.is_busy:
        gate.wait(0.01)
    assert lane.call(lambda: 7, 5.0, "") == 7
    with pytest.raises(ZeroDivisionError):
        lane.call(lambda: 1 // 0, 5.0, "")
    assert calls == [], "what was refused was never made"
    lane.close()


def test_a_master_that_kept_a_worker_waiting_is_asked_again_later_and_holds_no_page_meanwhile() -> None:
    now_s, client = [0.0], FaultyClient(DictClient())
    client.fails = lambda _number, _name: NO_MASTER if now_s[0] < 30 else 0

    def wait(_name: str) -> None:
        now_s[0] += 4.5 if now_s[0] < 30 else 0

    client.before = wait
    pool = PoolClient("mooncake://test", client, clock=lambda: now_s[0])  # pyright: ignore[reportArgumentType]
    store = PageStore(SPACE.folder, MooncakeObjects(pool, FOLDER, Policy()))
    rank = Rank(store, WHOLE)
    for _ in range(20):  # as the requests of a busy engine end
        assert outcomes(rank.put(PAGES)) == [Put.FAILED] * len(PAGES)
        assert outcomes(rank.get(PAGES)) == [Got.ABSENT] * len(PAGES)
    assert len(client.calls) == 1
    now_s[0] = 15.0
    assert outcomes(rank.put(PAGES)) == [Put.FAILED] * len(PAGES)
    assert len(client.calls) == 2
    now_s[0] = 40.0
    assert outcomes(rank.put(PAGES)) == [Put.WRITTEN] * len(PAGES)
    assert outcomes(rank.get(PAGES)) == [Got.READ] * len(PAGES)


def test_a_master_that_fails_at_once_is_asked_each_time() -> None:
    client = FaultyClient(DictClient())
    client.fails = lambda number, _name: NO_MASTER if number < 2 else 0
    rank = Rank(open_over(client), WHOLE)
    assert outcomes(rank.put(PAGES)) == [Put.FAILED] * len(PAGES)
    assert outcomes(rank.put(PAGES)) == [Put.WRITTEN] * len(PAGES)


@pytest.mark.proof
def test_a_slow_master_costs_a_scheduler_a_miss_and_a_worker_nothing_but_time() -> None:
    class Slow(DictClient):
        def batch_is_exist(self, keys: list[str]) -> list[int]:
            time.sleep(1.3 * Asker.SCHEDULER.value)
            return super().batch_is_exist(keys)

    with open_over(Slow()) as store:
        rank = Rank(store, WHOLE, slots=24)
        assert all(answer.ok for answer in rank.put(PAGES))
        assert rank.exists(PAGES) == [False] * len(PAGES)
        assert all(answer.ok for answer in rank.get(PAGES))


# Bytes


def test_a_header_says_of_which_page_and_box_an_object_is() -> None:
    page, part = PAGES[0], WHOLE.key(SPACE)
    other = PagePart.held(GQA, Fleet(tp=2, page_tokens=PAGE), 1, PAGE).key(SPACE)
    digests = bytes(range(256))[: 8 * part.box.cells]
    raw = encode_header(page, part, WHOLE.nbytes, 7, digests)
    assert len(raw) == header_bytes(part.box.cells)
    record = decode_header(raw, page, part)
    assert record
    assert (record.nbytes, record.digests, record.stamp) == (WHOLE.nbytes, digests, 7)
    assert decode_header(raw, PAGES[1], part) is None
    assert decode_header(raw, page, other) is None
    assert decode_box(encode_box(other)) is other
    assert decode_box(encode_box(other)[:-1] + b"?") is None
    assert decode_box(b"") is None
