"""Pages in an object store: who finds what and when, what is deleted and by whom, and what a read makes of damage."""

from __future__ import annotations

import obstore
import pytest
from bucket_stores import Faulty, damage, learn, names, open_over
from obstore.store import MemoryStore
from store_rank import GQA, MLA, PAGE, SPACE, Rank, pages_of

from kvmover.layout import CpOrder, Fleet
from kvmover.store import Got, Namespace, PagePart, Policy, Put
from tests.proofs import family

WHOLE = PagePart.whole(GQA, PAGE)
PAGES = pages_of(12)
#: A page takes 32 KiB: segments of four.
SMALL = Policy(segment_bytes=4 * WHOLE.nbytes)

OTHER = Namespace("llama", "rev-2", PAGE)


@pytest.fixture
def service() -> MemoryStore:
    return MemoryStore()


def outcomes(answers) -> list:
    return [answer.outcome for answer in answers]


def test_what_was_put_is_found_here_at_once_and_elsewhere_once_it_was_flushed(service: MemoryStore) -> None:
    here, there = (Rank(open_over(service), WHOLE) for _ in range(2))
    assert outcomes(here.put(PAGES)) == [Put.WRITTEN] * 12
    assert all(here.exists(PAGES))
    assert outcomes(here.get(PAGES)) == [Got.READ] * 12
    assert outcomes(here.put(PAGES)) == [Put.PRESENT] * 12
    assert names(service) == []
    here.store.flush()
    assert {name.rpartition(".")[2] for name in names(service)} == {"data", "head", "used"}
    assert not any(there.exists(PAGES))
    learn(there.store)
    assert all(there.exists(PAGES))
    assert outcomes(there.get(PAGES)) == [Got.READ] * 12


def test_a_question_asks_the_service_nothing(service: MemoryStore) -> None:
    with open_over(service) as writer:
        Rank(writer, WHOLE).put(PAGES)
    client = Faulty()
    with open_over(service, client) as store:
        rank = Rank(store, WHOLE)
        store.objects.catalog.refresh = lambda: None  # the look in a thread of its own
        before = len(client.calls)
        assert all(rank.exists(PAGES))
        assert len(client.calls) == before


def test_a_full_segment_is_sent_as_pages_come(service: MemoryStore) -> None:
    with open_over(service, policy=SMALL) as store:
        rank = Rank(store, WHOLE)
        rank.put(PAGES)
        assert len(names(service, ".head")) == 2
        assert outcomes(rank.get(PAGES)) == [Got.READ] * 12
    assert len(names(service, ".head")) == 3


def test_a_page_longer_than_a_segment_has_one_of_its_own(service: MemoryStore) -> None:
    with open_over(service, policy=Policy(segment_bytes=1)) as store:
        rank = Rank(store, WHOLE)
        assert outcomes(rank.put(PAGES[:3])) == [Put.WRITTEN] * 3
        store.flush()
        assert len(names(service, ".data")) == 3
        assert outcomes(rank.get(PAGES[:3])) == [Got.READ] * 3


FLEETS = [
    Fleet(page_tokens=PAGE),
    Fleet(tp=4, page_tokens=PAGE),
    Fleet(tp=2, pp=2, page_tokens=PAGE),
    Fleet(cp=2, cp_order=CpOrder.TOKEN, page_tokens=PAGE),
]


@pytest.mark.parametrize("component", family([GQA, MLA], [GQA]))
def test_fleets_of_every_shape_read_each_others_pages(service: MemoryStore, component) -> None:
    for number, fleet in enumerate(FLEETS):
        pages = pages_of(4, str(number))
        for rank in range(fleet.size):
            with open_over(service) as store:
                Rank.of(store, component, fleet, rank).put(pages)
    for fleet in FLEETS:
        for rank in range(fleet.size):
            with open_over(service) as store:
                reader = Rank.of(store, component, fleet, rank)
                for number in range(len(FLEETS)):
                    assert outcomes(reader.get(pages_of(4, str(number)))) == [Got.READ] * 4


def test_namespaces_share_nothing(service: MemoryStore) -> None:
    with open_over(service) as mine, open_over(service, space=OTHER) as theirs:
        rank, other = Rank(mine, WHOLE), Rank(theirs, WHOLE, namespace=OTHER)
        rank.put(PAGES)
        other.put(PAGES[:3])
        mine.flush()
        theirs.flush()
        assert mine.clear() == 12
        learn(theirs)
        assert outcomes(other.get(PAGES[:3])) == [Got.READ] * 3
        assert all(name.startswith(OTHER.folder) for name in names(service))


def test_a_page_whose_bytes_are_wrong_is_never_read_and_can_be_put_again(service: MemoryStore) -> None:
    writer, reader = (Rank(open_over(service), WHOLE) for _ in range(2))
    writer.put(PAGES)
    writer.store.flush()
    damage(service, names(service, ".data")[0], 5 * WHOLE.nbytes + 99)
    learn(reader.store)
    got = outcomes(reader.get(PAGES))
    assert got[5] is Got.POISONED
    assert got.count(Got.READ) == 11
    assert outcomes(reader.put(PAGES))[5] is Put.WRITTEN
    reader.store.flush()
    learn(writer.store)
    assert outcomes(writer.get(PAGES)) == [Got.READ] * 12
    with open_over(service) as third:
        assert outcomes(Rank(third, WHOLE).get(PAGES)) == [Got.READ] * 12


def test_a_read_that_was_garbled_on_its_way_deletes_nothing(service: MemoryStore) -> None:
    """The second look finds it well, and it is read once more."""
    client = Faulty()
    with open_over(service) as writer:
        Rank(writer, WHOLE).put(PAGES)
    with open_over(service, client) as store:
        rank, real = Rank(store, WHOLE), obstore.get_range
        garbled = iter([True])

        def get_range(service, path, *, start, length):
            data = bytearray(real(service, path, start=start, length=length))
            if path.endswith(".data") and next(garbled, False):
                data[7] ^= 1
            return data

        client.get_range = get_range
        assert outcomes(rank.get(PAGES)) == [Got.READ] * 12
        assert not store.counters.poisoned
    assert names(service, ".dead") == []


def test_a_data_object_that_was_cut_is_looked_at_twice_and_an_error_of_the_service_is_not(
    service: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, looks = Faulty(), list[object]()
    with open_over(service) as writer:
        Rank(writer, WHOLE).put(PAGES)
    with open_over(service, client) as store:
        rank, look_again = Rank(store, WHOLE), store.objects.look_again
        monkeypatch.setattr(store.objects, "look_again", lambda each: (looks.append(each), look_again(each))[1])
        client.fails = lambda _number, name: "before" if name == "get_range" else ""
        assert outcomes(rank.get(PAGES)) == [Got.FAILED] * 12
        assert looks == []
        client.fails = lambda _number, _name: ""
        (data,) = names(service, ".data")
        raw = bytes(obstore.get(service, data).bytes())
        obstore.put(service, data, raw[: 11 * WHOLE.nbytes + 99])
        assert outcomes(rank.get(PAGES)) == [*[Got.READ] * 11, Got.POISONED]
        assert len(looks) == 1


def test_what_another_evicted_is_a_miss_and_deletes_nothing(service: MemoryStore) -> None:
    with open_over(service, policy=SMALL) as writer:
        Rank(writer, WHOLE).put(PAGES)
    reader = Rank(open_over(service), WHOLE)
    victim = names(service, ".head")[0].removesuffix(".head")
    for suffix in (".head", ".data"):
        obstore.delete(service, victim + suffix)
    left = names(service)
    assert outcomes(reader.get(PAGES)) == [Got.EVICTED] * 4 + [Got.READ] * 8
    assert reader.exists(PAGES) == [False] * 4 + [True] * 8
    reader.store.close()
    assert [name for name in names(service) if not name.endswith(".used")] == left


def test_eviction_takes_whole_segments_and_carries_what_is_hot(service: MemoryStore) -> None:
    with open_over(service, policy=SMALL) as store:
        rank = Rank(store, WHOLE)
        rank.put(PAGES)
        store.flush()
        store.objects.catalog.machine = type("Later", (), {"now": staticmethod(lambda: 4_000_000_000)})
        rank.get(PAGES[0:1] + PAGES[4:5] + PAGES[8:9])
        assert store.evict(3 * WHOLE.nbytes) >= 3 * WHOLE.nbytes
        assert rank.exists(PAGES[0:1] + PAGES[4:5] + PAGES[8:9]) == [True] * 3
        assert sum(rank.exists(PAGES)) == 9
        assert outcomes(rank.get(PAGES)).count(Got.READ) == 9
    with open_over(service) as other:
        assert sum(Rank(other, WHOLE).exists(PAGES)) == 9
    heads = [name.removesuffix(".head") for name in names(service, ".head")]
    assert heads == [name.removesuffix(".data") for name in names(service, ".data")]


def test_a_quota_is_kept_while_pages_come(service: MemoryStore) -> None:
    quota = 16 * WHOLE.nbytes
    policy = Policy(quota_bytes=quota, segment_bytes=2 * WHOLE.nbytes)
    with open_over(service, policy=policy) as store:
        rank = Rank(store, WHOLE)
        for number in range(12):
            pages = pages_of(4, str(number))
            assert outcomes(rank.put(pages)) == [Put.WRITTEN] * 4
            assert store.stat().held_bytes <= quota
            assert outcomes(rank.get(pages)) == [Got.READ] * 4
        assert store.stat().held_bytes >= quota // 2
    assert sum(obstore.head(service, name)["size"] for name in names(service, ".data")) <= quota


def test_pages_of_a_batch_stay_while_room_is_made_for_the_others(service: MemoryStore) -> None:
    """Three of the four that lie in one segment are in the batch."""
    policy = Policy(quota_bytes=32 * WHOLE.nbytes, segment_bytes=4 * WHOLE.nbytes)
    with open_over(service, policy=policy) as store:
        rank = Rank(store, WHOLE, slots=32)
        assert all(answer.ok for answer in rank.put(pages_of(32, "old")))
        store.flush()
        batch = pages_of(3, "old") + pages_of(20, "new")
        assert [answer.outcome for answer in rank.put(batch)] == [Put.PRESENT] * 3 + [Put.WRITTEN] * 20
        assert all(rank.exists(batch))
        assert outcomes(rank.get(batch)) == [Got.READ] * 23
        assert store.stat().held_bytes <= 33 * WHOLE.nbytes


def test_pages_that_nobody_uses_expire_for_everybody(service: MemoryStore) -> None:
    policy = Policy(ttl_s=1000, segment_bytes=4 * WHOLE.nbytes)
    with open_over(service, policy=policy) as store:
        rank = Rank(store, WHOLE)
        rank.put(PAGES)
        store.flush()
        now = store.objects.catalog.machine.now()
        store.objects.catalog.machine = type("Later", (), {"now": staticmethod(lambda: now + 900)})
        rank.get(PAGES[:2])
        store.objects.catalog.machine = type("Later", (), {"now": staticmethod(lambda: now + 1100)})
        assert rank.exists(PAGES) == [True] * 2 + [False] * 10
        assert store.collect().expired_pages == 10
        assert len(names(service, ".head")) == 1
    with open_over(service) as other:
        assert Rank(other, WHOLE).exists(PAGES) == [True] * 2 + [False] * 10


def test_uses_are_told_so_that_another_evicts_what_is_cold(service: MemoryStore) -> None:
    with open_over(service, policy=SMALL) as writer:
        Rank(writer, WHOLE).put(PAGES)
    with open_over(service, policy=Policy(stamp_s=0)) as reader:
        rank = Rank(reader, WHOLE)
        reader.objects.catalog.machine = type("Later", (), {"now": staticmethod(lambda: 4_000_000_000)})
        rank.get(PAGES[:4])
    with open_over(service, policy=SMALL) as cleaner:
        cleaner.objects.catalog.machine = type("Later", (), {"now": staticmethod(lambda: 4_000_000_001)})
        learn(cleaner)
        with cleaner.objects.lock:
            cleaner.objects.catalog._uses.clear()
        learn(cleaner)
        cleaner.evict(2 * 4 * WHOLE.nbytes)
        assert Rank(cleaner, WHOLE).exists(PAGES) == [True] * 4 + [False] * 8


def test_two_who_collect_at_once_harm_nothing(service: MemoryStore) -> None:
    """Both choose, then both carry, then both delete."""
    with open_over(service, policy=SMALL) as writer:
        Rank(writer, WHOLE).put(PAGES)
    one, other = (open_over(service, policy=SMALL) for _ in range(2))
    for store in (one, other):
        Rank(store, WHOLE).get(PAGES[:1])
    for store in (one, other):
        store.evict(4 * WHOLE.nbytes)
        store.collect()
    for store in (one, other, open_over(service)):
        learn(store)
        rank = Rank(store, WHOLE)
        there = rank.exists(PAGES)
        assert there[0]
        assert [answer.ok for answer in rank.get(PAGES)] == there
        store.close()


def test_a_start_reads_a_catalog_and_not_all_heads(service: MemoryStore) -> None:
    policy = Policy(segment_bytes=WHOLE.nbytes)
    pages = pages_of(40, "many")
    with open_over(service, policy=policy) as store:
        rank = Rank(store, WHOLE, slots=40)
        rank.put(pages)
        store.flush()
        store.collect()
        assert len(names(service, ".catalog")) == 1
    with open_over(service, policy=policy) as store:
        Rank(store, WHOLE, slots=40).put(pages_of(3, "new"))
    client = Faulty()
    with open_over(service, client) as store:
        assert sum(path.endswith(".head") for name, path in client.calls if name == "get") == 3
        rank = Rank(store, WHOLE, slots=43)
        assert outcomes(rank.get(pages + pages_of(3, "new"))) == [Got.READ] * 43


def test_a_catalog_that_is_damaged_or_gone_costs_the_heads(service: MemoryStore) -> None:
    pages = pages_of(40, "many")
    with open_over(service, policy=Policy(segment_bytes=WHOLE.nbytes)) as store:
        Rank(store, WHOLE, slots=40).put(pages)
        store.flush()
        store.collect()
    damage(service, names(service, ".catalog")[0], 500)
    with open_over(service) as store:
        assert store.recovered.dropped == {"damaged catalog": 1}
        assert all(Rank(store, WHOLE, slots=40).exists(pages))


def test_verify_finds_and_deletes_what_is_bad(service: MemoryStore) -> None:
    with open_over(service) as writer:
        Rank(writer, WHOLE).put(PAGES)
    damage(service, names(service, ".data")[0], WHOLE.nbytes)
    seen: list[int] = []
    with open_over(service) as store:
        verified = store.verify(seen.append)
        assert (verified.objects, verified.nbytes, verified.bad) == (12, 12 * WHOLE.nbytes, {"digest": 1})
        assert sum(seen) == verified.nbytes
    with open_over(service) as store:
        assert store.verify().bad == {}
        assert store.stat().pages == 11


def test_verify_keeps_to_the_budget(service: MemoryStore) -> None:
    pages = pages_of(40, "many")
    with open_over(service) as writer:
        Rank(writer, WHOLE, 40).put(pages)
    for at in range(40):
        damage(service, names(service, ".data")[0], at * WHOLE.nbytes)
    with open_over(service) as store:
        verified = store.verify()
        assert (verified.bad, verified.spared) == ({"digest": 32}, {"digest": 8})
        assert store.counters.deleted["digest"] == 32


def test_a_process_with_bad_memory_leaves_others_their_pages(service: MemoryStore) -> None:
    pages = pages_of(60, "all")
    with open_over(service) as writer:
        Rank(writer, WHOLE, slots=60).put(pages)
    client = Faulty()
    with open_over(service, client) as store:
        real = obstore.get_range

        def get_range(service, path, *, start, length):
            data = bytearray(real(service, path, start=start, length=length))
            if path.endswith(".data"):
                data[:] = bytes(len(data))
            return data

        client.get_range = get_range
        assert not any(answer.ok for answer in Rank(store, WHOLE, slots=60).get(pages))
        assert store.counters.spared == 60 - 32
    with open_over(service) as store:
        assert sum(Rank(store, WHOLE, slots=60).exists(pages)) == 60 - 32


def test_watchers_hear_of_what_others_deleted(service: MemoryStore) -> None:
    class Ear:
        def __init__(self) -> None:
            self.heard: set[bytes] = set()

        def lost(self, page: bytes) -> None:
            self.heard.add(page)

    with open_over(service) as writer:
        Rank(writer, WHOLE).put(PAGES)
    ear = Ear()
    with open_over(service) as store, open_over(service) as other:
        store.watch(ear)
        other.clear()
        learn(store)
        assert ear.heard == set(PAGES)
        assert not any(Rank(store, WHOLE).exists(PAGES))


def test_what_a_writer_that_died_left_is_collected_after_a_while(service: MemoryStore, monkeypatch) -> None:
    with open_over(service) as writer:
        Rank(writer, WHOLE).put(PAGES)
    obstore.put(service, f"{SPACE.folder}/0123456789abcdef-00000007.data", b"half")
    obstore.put(service, f"{SPACE.folder}/somebody.else", b"theirs")
    with open_over(service) as store:
        store.collect()
        assert len(names(service, ".data")) == 2
        monkeypatch.setattr("kvmover.store.bucket.choice.ALONE_S", -1)
        learn(store)
        store.collect()
        assert len(names(service, ".data")) == 1
        assert names(service, ".else")
        assert all(Rank(store, WHOLE).exists(PAGES))
