"""What lies in a bucket as bytes, and what of it may go: pure, every case."""

from __future__ import annotations

import doctest
import importlib
import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.layout import Span, Stripe
from kvmover.store.bucket.bucket_catalog import KeptSegment
from kvmover.store.bucket.choice import ALONE_S, LeftOver, Listing, left_overs
from kvmover.store.bucket.compaction import LOOSE, compaction, decode_catalog, encode_catalog, segments_within
from kvmover.store.bucket.sealed import (
    USES,
    Dead,
    FillingSegment,
    SealedSegment,
    decode_uses,
    encode_uses,
    read_head,
    segment_name,
    segment_of,
)
from kvmover.store.bucket.service import BucketEntry, requests
from kvmover.store.eviction import CARRIED_SHARE, EvictionCandidate, carried, victim
from kvmover.store.part import PageBox, PartKey, part_key
from kvmover.store.record import decode_all, holds, table
from tests.store.segments import later_format

SPACE = b"n" * 32
BLOCK = 4096


def part(heads: int, layers: int) -> PartKey:
    return part_key(b"c" * 32, PageBox(Span(0, heads), Span(0, layers), Stripe(0, 1, 4, 4)))


def page(number: int) -> bytes:
    return number.to_bytes(32, "big")


def filled(name: str, count: int, seed: int = 0) -> FillingSegment:
    """A segment of `count` objects of several parts and sizes."""
    chance = random.Random(seed)
    segment = FillingSegment(name, SPACE, 64 * BLOCK * max(count, 1), 0.0)
    for _ in range(count):
        key = part(chance.randint(1, 3), chance.randint(1, 3))
        payload = memoryview(chance.randbytes(key.box.cells * chance.choice((8, 1000, 3000))))
        digests = table(payload, key.box.cells)
        segment.add(payload, page(chance.randrange(count)), key, digests, chance.randrange(2**31))
    return segment


def kept(name: str, count: int, seed: int = 0) -> SealedSegment:
    found = read_head(name, filled(name, count, seed).head(), SPACE)
    assert isinstance(found, SealedSegment)
    return found


def same(left: SealedSegment, right: SealedSegment) -> None:
    assert (left.name, left.data_bytes, left.head_bytes, left.objects) == (
        right.name,
        right.data_bytes,
        right.head_bytes,
        right.objects,
    )
    for field in ("at", "state", "stamp", "offset", "nbytes", "page"):
        assert np.array_equal(getattr(left.table, field), getattr(right.table, field)), field
    parts = [[each.table.parts[number] for number in each.table.part] for each in (left, right)]
    assert parts[0] == parts[1]


@pytest.mark.parametrize("count", [1, 2, 30])
def test_a_head_says_what_was_filled_and_its_digests_are_of_the_data(count: int) -> None:
    segment = filled("a", count)
    found = read_head("a", segment.head(), SPACE)
    assert isinstance(found, SealedSegment)
    assert found.data_bytes == len(segment.data()) == segment.end
    assert found.table.at.tolist() == list(segment.objects)
    for each in segment.objects.values():
        payload = segment.data()[each.offset : each.offset + each.nbytes]
        assert holds(payload, each.cells, segment.digests_at(each.record), 0)
    records = list(decode_all(segment.head()[80:], 80))
    assert [record.digests for record in records[:-2]] == [segment.digests_at(at) for at in segment.objects]


def test_a_head_with_any_byte_changed_or_cut_at_any_place_is_not_believed() -> None:
    """But for the state and the stamp, which nothing changes here and no check covers."""
    head = filled("a", 3).head()
    assert all(isinstance(read_head("a", head[:end], SPACE), str) for end in range(len(head)))
    free = {at + place for at in filled("a", 3).objects for place in range(8, 16)}
    free |= {len(head) - 144 + place for place in range(8, 16)} | {len(head) - 288 + place for place in range(8, 16)}
    for at in range(len(head)):
        raw = bytearray(head)
        raw[at] ^= 0x10
        assert isinstance(read_head("a", bytes(raw), SPACE), str) != (at in free), at


def test_a_head_of_another_namespace_is_foreign() -> None:
    assert read_head("a", filled("a", 1).head(), b"x" * 32) == "foreign namespace"


def test_a_head_of_a_later_format_is_not_taken_for_damaged() -> None:
    for magic, number in ((b"KVMOVER1", 2), (b"KVMOVER2", 1)):
        assert read_head("a", later_format(filled("a", 1).head(), magic, number), SPACE) == "another format"


def test_names_of_segments_rise_with_their_seconds() -> None:
    names = [segment_name(second, b"\xff\0ab", number) for second in (1, 1_700_000_000, 2**31) for number in (0, 7)]
    assert names == sorted(names)
    assert all(segment_of(name + suffix) == (name, suffix) for name in names for suffix in (".head", ".data", ".dead"))
    for other in (
        "namespace.json",
        "00-0123456789abcdef.catalog",
        names[0],
        names[0] + ".tmp",
        "x" + names[0] + ".head",
    ):
        assert segment_of(other) is None


@given(st.sets(st.integers(0, 5000)), st.sets(st.integers(0, 5000)))
def test_the_dead_of_two_are_joined_and_read_back(left: set[int], right: set[int]) -> None:
    one, other = Dead(left), Dead(right)
    one.join(other)
    again = Dead.decode(one.encode())
    assert again is not None
    assert len(again) == len(left | right)
    assert again >= one >= other
    assert one >= again
    places = np.arange(5001) * BLOCK
    assert set(np.flatnonzero(again.among(places)).tolist()) == left | right
    assert all(again.has(block * BLOCK) for block in left | right)


@pytest.mark.parametrize("encoded", [Dead({0, 9, 77}).encode(), encode_uses({page(1): 5, page(2): 9})])
def test_what_is_damaged_says_nothing(encoded: bytes) -> None:
    for at in range(len(encoded)):
        raw = bytearray(encoded)
        raw[at] ^= 1
        for damaged in (bytes(raw), encoded[:at]):
            assert Dead.decode(damaged) is None
            assert decode_uses(damaged) == {}


def test_uses_are_read_back_and_the_latest_are_told() -> None:
    few = {page(number): number * 3 for number in range(50)}
    assert decode_uses(encode_uses(few)) == few
    assert decode_uses(encode_uses({})) == {}
    many = {page(number): number for number in range(USES + 5)}
    assert set(many) - set(decode_uses(encode_uses(many))) == {page(number) for number in range(5)}


@pytest.mark.parametrize("counts", [(), (1,), (5, 1, 40), (0, 3)])
def test_a_catalog_says_what_the_heads_say(counts: tuple[int, ...]) -> None:
    segments = [kept(f"{number:025}", count, number) for number, count in enumerate(counts)]
    data = encode_catalog(SPACE, segments)
    again = decode_catalog(data, SPACE)
    assert again is not None
    for left, right in zip(segments, again, strict=True):
        same(left, right)
    assert segments_within(data) == [each.name for each in segments]
    assert segments_within(data[:10]) is None
    assert decode_catalog(data, b"x" * 32) is None


def test_a_damaged_catalog_says_nothing() -> None:
    data = encode_catalog(SPACE, [kept("a", 3), kept("b", 2)])
    for at in range(len(data)):
        raw = bytearray(data)
        raw[at] ^= 4
        assert decode_catalog(bytes(raw), SPACE) is None
        assert decode_catalog(data[:at], SPACE) is None


def test_catalogs_stay_few_and_each_segment_is_written_few_times() -> None:
    """A thousand segments come, some go, and upkeep compacts after each."""
    chance = random.Random(7)
    living: set[str] = set()
    catalogs: dict[str, list[str]] = {}
    written = 0
    for number in range(1000):
        living.add(f"s{number:04}")
        if chance.random() < 0.3:
            living.remove(chance.choice(sorted(living)))
        if plan := compaction(catalogs, living):
            assert set(plan.segments) <= living
            for name in plan.replaces:
                assert set(catalogs.pop(name)) & living <= set(plan.segments), "a segment is in no catalog any more"
            catalogs[f"c{number}"] = list(plan.segments)
            written += len(plan.segments)
        loose = living.difference(*catalogs.values())
        assert len(loose) < LOOSE
        assert len(catalogs) <= 7
    assert written < 8 * 1000


def test_the_victim_has_the_smallest_share_that_is_hot() -> None:
    """Every three segments of few sizes."""
    kinds = [(size, hot) for size in (1, 2, 4) for hot in range(size + 1)]
    for some in itertools.combinations_with_replacement(kinds, 3):
        candidates = [EvictionCandidate(str(number), *kind) for number, kind in enumerate(some)]
        chosen = victim(candidates)
        able = [each for each in candidates if each.hot_bytes < each.data_bytes]
        assert (chosen is None) == (not able)
        if chosen:
            assert chosen in able
            assert all(chosen.hot_bytes * each.data_bytes <= each.hot_bytes * chosen.data_bytes for each in able)


def test_the_most_recently_used_are_carried_up_to_a_share_and_the_kept_ones_always() -> None:
    """Every three hot objects of few sizes and seconds, of a segment of eight."""
    kinds = list(itertools.product((1, 2, 3), (5, 6), (False, True)))
    for hot in itertools.product(kinds, repeat=3):
        room, expected = 8 * CARRIED_SHARE, list[int]()
        for at in sorted(range(3), key=lambda at: (not hot[at][2], -hot[at][1], at)):
            room -= hot[at][0]
            if room < 0 and not hot[at][2]:
                break
            expected.append(at)
        held, stamps, kept = zip(*hot, strict=True)
        assert carried(8, held, stamps, kept) == expected
    assert carried(8, [], []) == []


def entry(name: str, age_s: float) -> BucketEntry:
    return BucketEntry(f"ns/{name}", 1, 10_000_000 - age_s, name)


#: Somebody writes to this day.
NEW = entry("00-2.used", 0)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "present", [p for n in (1, 2, 3) for p in itertools.combinations((".head", ".data", ".dead"), n)]
)
def test_only_what_is_old_and_lacks_its_other_half_is_left_over(present: tuple[str, ...], old: bool) -> None:
    name = segment_name(5, bytes(4), 0)
    listing = Listing.of([*(entry(name + each, ALONE_S + (1 if old else -1)) for each in present), NEW])
    gone = {each.name: each.lacks for each in left_overs(listing, 10_000_000)}
    whole = {".head", ".data"} <= set(present)
    expected = set() if whole or not old else set(present) - ({".dead"} if ".head" in present else set())
    other = {".head": ".data", ".data": ".head", ".dead": ".head"}
    assert gone == {f"ns/{name}{suffix}": f"ns/{name}{other[suffix]}" for suffix in expected}


def test_what_no_kvmover_writes_is_left_alone() -> None:
    names = ["namespace.json", "somebody's.file", "0" * 25 + ".head.bak", "00-1.catalog"]
    assert left_overs(Listing.of(entry(name, 9_000_000) for name in names), 10_000_000) == []
    assert left_overs(Listing.of([entry("00-1.used", 90_000), NEW]), 10_000_000) == [LeftOver("ns/00-1.used", "", 0)]


def test_a_clock_that_is_ahead_makes_nothing_old() -> None:
    name = segment_name(5, bytes(4), 0)
    assert left_overs(Listing.of([entry(name + ".data", 5)]), 99_000_000) == []


ranges = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 40 << 20), st.integers(1, 3 << 20))


@given(st.lists(ranges, max_size=20))
def test_requests_bring_every_range_once_and_none_is_long(wanted: list[tuple[str, int, int]]) -> None:
    plan = list(requests(wanted))
    assert sorted(item for request in plan for item in request.items) == list(range(len(wanted)))
    for request in plan:
        for item in request.items:
            name, start, nbytes = wanted[item]
            assert name == request.name
            assert request.start <= start
            assert start + nbytes <= request.start + request.nbytes
        assert len(request.items) == 1 or request.nbytes <= 8 << 20


def test_a_segment_is_known_by_what_it_says_of_itself() -> None:
    found = kept("a", 4)
    known = KeptSegment(found.name, found.data_bytes, found.head_bytes, found.objects)
    assert known.told >= known.dead
    known.dead.kill([0])
    assert not known.told >= known.dead


@pytest.mark.parametrize(
    "name", ["bucket.compaction", "bucket.sealed", "bucket.service", "deletion", "eviction", "location"]
)
def test_examples_say_what_is_so(name: str) -> None:
    ran = doctest.testmod(importlib.import_module(f"kvmover.store.{name}"))
    assert ran.attempted
    assert not ran.failed
