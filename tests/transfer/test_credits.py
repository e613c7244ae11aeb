"""Credits: requests take turns, a long lease blocks nobody, a chunk that needs much is not passed for ever, and no
source has more than its share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.transfer.destination.credits import PATIENCE, Credits, EagerGrants
from kvmover.transfer.memory.arena import ALIGN_BYTES, Arena

SLOT = ALIGN_BYTES


def drain(credits: Credits[str, int], arena: Arena) -> list[tuple[str, int]]:
    """Who is served while there is room."""
    served: list[tuple[str, int]] = []
    while (granted := credits.reserve(arena)) is not None:
        served.append(granted[:2])
    return served


def asking(**chunks: list[int]) -> Credits[str, int]:
    """Requests with chunks of so many slots, numbered, each of another source."""
    credits = Credits[str, int]()
    for request, slots in chunks.items():
        for chunk, size in enumerate(slots):
            credits.ask(request, f"{request} {chunk}", chunk, size * SLOT)
    return credits


def test_requests_take_turns_whatever_they_asked_for_first():
    credits = asking(long=[1] * 5, short=[1], middle=[1] * 2)
    arena = Arena(8 * SLOT)
    order = [
        ("long", 0),
        ("short", 0),
        ("middle", 0),
        ("long", 1),
        ("middle", 1),
        ("long", 2),
        ("long", 3),
        ("long", 4),
    ]
    assert drain(credits, arena) == order
    assert len(credits) == 0


def test_a_request_that_comes_later_waits_for_one_turn_and_not_for_a_queue():
    credits, arena = asking(long=[1] * 100), Arena(2 * SLOT)
    assert drain(credits, arena) == [("long", 0), ("long", 1)]
    credits.ask("late", "late", 0, SLOT)
    arena.release(0)
    arena.release(SLOT)
    assert drain(credits, arena) == [("long", 2), ("late", 0)]


def test_a_chunk_that_does_not_fit_lets_others_pass():
    credits, arena = asking(large=[3], small=[1, 1]), Arena(3 * SLOT)
    taken = arena.reserve(SLOT)
    assert taken is not None
    assert drain(credits, arena) == [("small", 0), ("small", 1)]
    assert len(credits) == 1


def test_a_large_chunk_is_passed_so_often_and_no_more():
    """Small ones for ever, two slots of four free at a time: the large one would never find three."""
    credits, arena = asking(large=[3]), Arena(4 * SLOT)
    held: deque[int] = deque(arena.reserve(SLOT) or 0 for _ in range(3))
    passed = 0
    for chunk in range(100):
        credits.ask(f"small {chunk}", f"small {chunk}", chunk, SLOT)
        granted = credits.reserve(arena)
        if granted is not None and granted[0] == "large":
            break
        if granted is not None:
            passed += 1
            held.append(granted[2])
        if held:
            arena.release(held.popleft())
    else:
        pytest.fail("the large chunk starved")
    assert passed == PATIENCE


def test_a_request_that_is_given_up_asks_for_nothing_and_lets_others_on():
    credits, arena = asking(large=[2, 1], small=[1]), Arena(2 * SLOT)
    for number in range(PATIENCE):
        credits.ask("others", f"others {number}", 0, SLOT)
    taken = arena.reserve(SLOT)
    for _ in range(PATIENCE + 1):
        granted = credits.reserve(arena)
        if granted is not None:
            arena.release(granted[2])
    assert credits.reserve(arena) is None  # nothing passes the large one any more
    credits.forget("large")
    credits.forget("nobody")
    assert credits.reserve(arena) is not None
    assert taken == 0


def serve(requests: dict[str, list[int]], lives: list[int]) -> list[tuple[str, int]]:
    """Who is served, in order, where regions live for a while and come back in any order."""
    credits, arena = asking(**requests), Arena(4 * SLOT)
    served: list[tuple[str, int]] = []
    held: list[tuple[int, int]] = []
    for now in range(1000):
        for until, offset in [region for region in held if region[0] <= now]:
            arena.release(offset)
            held.remove((until, offset))
        while (granted := credits.reserve(arena)) is not None:
            request, chunk, offset = granted
            held.append((now + 1 + lives[len(served) % len(lives)], offset))
            served.append((request, chunk))
    return served


def some_requests(most_slots: int) -> st.SearchStrategy[dict[str, list[int]]]:
    sizes = st.lists(st.integers(1, most_slots), min_size=1, max_size=6)
    return st.dictionaries(st.sampled_from("abcde"), sizes, min_size=1)


some_lives = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@given(some_requests(4), some_lives)
def test_everybody_is_served_once_and_in_order(requests: dict[str, list[int]], lives: list[int]):
    served = serve(requests, lives)
    assert len(served) == sum(map(len, requests.values()))
    for request, chunks in requests.items():
        assert [chunk for name, chunk in served if name == request] == list(range(len(chunks)))


@given(some_requests(1), some_lives)
def test_between_two_turns_of_a_request_each_other_that_waits_has_one(requests: dict[str, list[int]], lives: list[int]):
    names = [request for request, _ in serve(requests, lives)]
    for n, request in enumerate(names):
        others = set(names[n:]) - {request}
        assert set(names[n + 1 : n + 1 + len(others)]) == others


@dataclass(slots=True)
class Ring:
    """The staging ring of peers: regions in turn, and room only behind the oldest that is still in use."""

    nbytes: int
    head: int = 0
    in_use: deque[tuple[int, int]] = field(default_factory=deque)
    over: set[int] = field(default_factory=set)

    def reserved_by(self, owner: str) -> int:
        return 0

    def reserve(self, nbytes: int, owner: str = "") -> int | None:
        oldest = self.in_use[0][0] if self.in_use else None
        at = self.head
        if at + nbytes > self.nbytes:  # the rest of the lap is skipped
            if oldest is None or oldest > at:
                return None if oldest is not None else self._take(0, nbytes)
            at = 0
        if oldest is not None and at <= oldest < at + nbytes:
            return None
        return self._take(at, nbytes)

    def _take(self, at: int, nbytes: int) -> int:
        self.head = at + nbytes
        self.in_use.append((at, nbytes))
        return at

    def release(self, offset: int) -> None:
        self.over.add(offset)
        while self.in_use and self.in_use[0][0] in self.over:
            self.over.remove(self.in_use.popleft()[0])


def served_beside_a_long_lease(arena: Arena, steps: int) -> int:
    """Chunks of one slot that go through an arena in so many steps: each is in use for one, a first one for ever."""
    credits = Credits[str, int]()
    assert arena.reserve(SLOT) == 0
    done, held = 0, list[int]()
    for step in range(steps):
        for offset in held:
            arena.release(offset)
        held.clear()
        for chunk in range(8):
            credits.ask(f"request {step}", f"{step} {chunk}", chunk, SLOT)
        while (granted := credits.reserve(arena)) is not None:
            held.append(granted[2])
        done += len(held)
    return done


def test_a_free_list_serves_everybody_beside_a_long_lease_where_a_ring_of_the_same_size_stops():
    """One slow request (a decode that is stopped, a prefill that is cold) holds the first of eight slots."""
    ring = served_beside_a_long_lease(Ring(8 * SLOT), 100)  # pyright: ignore[reportArgumentType]
    free_list = served_beside_a_long_lease(Arena(8 * SLOT), 100)
    assert ring == 7  # one lap, up to the region that is in use
    assert free_list == 7 * 100


def test_the_ring_of_the_comparison_is_an_honest_one():
    """Without a long lease it serves as much as the free list."""
    for arena in (Ring(8 * SLOT), Arena(8 * SLOT)):
        done = 0
        for _ in range(50):
            held = [arena.reserve(SLOT) for _ in range(8)]
            assert None not in held
            assert arena.reserve(SLOT) is None
            for offset in held:
                assert offset is not None
                arena.release(offset)
            done += len(held)
        assert done == 400


def sources_of(**chunks: int) -> Credits[str, int]:
    """One request with so many chunks of one slot from each source."""
    credits = Credits[str, int]()
    for source, count in chunks.items():
        for chunk in range(count):
            credits.ask("request", source, chunk, SLOT)
    return credits


def test_a_source_has_no_more_than_what_it_leaves_free():
    credits, arena = sources_of(dying=100), Arena(8 * SLOT)
    assert len(drain(credits, arena)) == 4
    credits.ask("other", "healthy", 0, SLOT)
    credits.ask("other", "healthy", 1, SLOT)
    credits.ask("other", "healthy", 2, SLOT)
    assert drain(credits, arena) == [("other", 0), ("other", 1)]
    assert (arena.reserved_by("dying"), arena.reserved_by("healthy"), arena.free_bytes) == (
        4 * SLOT,
        2 * SLOT,
        2 * SLOT,
    )
    arena.release(0)
    assert len(drain(credits, arena)) == 0, "each has what is left free"
    arena.release(SLOT)
    assert drain(credits, arena) == [("request", 4)]


def test_sources_that_die_one_after_the_other_each_leave_something():
    credits, arena = Credits[str, int](), Arena(64 * SLOT)
    taken = list[int]()
    for source in "abcdef":
        for chunk in range(100):
            credits.ask(source, source, chunk, SLOT)
        taken.append(len(drain(credits, arena)))
        credits.forget(source)
    assert taken == [32, 16, 8, 4, 2, 1]


def test_many_sources_share_an_arena():
    credits, arena = sources_of(**{f"source {n}": 100 for n in range(7)}), Arena(64 * SLOT)
    drain(credits, arena)
    assert {arena.reserved_by(f"source {n}") for n in range(7)} == {8 * SLOT}
    assert arena.free_bytes == 8 * SLOT


def test_a_source_that_has_nothing_may_have_one_region_of_any_size():
    credits, arena = Credits[str, int](), Arena(4 * SLOT)
    credits.ask("request", "source", 0, 4 * SLOT)
    credits.ask("request", "source", 1, 4 * SLOT)
    assert drain(credits, arena) == [("request", 0)]


def test_a_source_over_its_share_keeps_nobody_else_waiting():
    """Neither another of the same request, nor of another, however often it is passed."""
    credits, arena = sources_of(slow=100, quick=100), Arena(8 * SLOT)
    for _ in range(3):
        assert arena.reserve(SLOT, "slow") is not None
    for _ in range(4 * PATIENCE):
        granted = credits.reserve(arena)
        assert granted is not None
        arena.release(granted[2])


def test_requests_that_may_wait_for_long_get_an_eighth_of_the_arena_and_each_source_a_part_of_that():
    eager, arena = EagerGrants(), Arena(64 * SLOT)
    alone = [eager.reserve(arena, "one", SLOT) for _ in range(8)]
    assert [offset is not None for offset in alone] == [True] * 4 + [False] * 4
    others = [eager.reserve(arena, f"other {number}", SLOT) for number in range(8)]
    assert [offset is not None for offset in others] == [True] * 4 + [False] * 4
    assert eager.nbytes == 8 * SLOT
    assert alone[0] is not None
    arena.release(alone[0])
    eager.freed(alone[0])
    assert eager.reserve(arena, "last", SLOT) is not None
    eager.freed(63 * SLOT)  # a region of another kind
    assert eager.nbytes == 8 * SLOT


def test_a_region_larger_than_that_part_waits_to_be_asked_for():
    eager, arena = EagerGrants(), Arena(64 * SLOT)
    assert eager.reserve(arena, "one", 9 * SLOT) is None
    assert eager.reserve(arena, "one", 8 * SLOT) is not None


def test_no_region_of_a_slab_that_was_registered_anew_goes_out_with_a_want():
    """Nothing in a Want tells a source of new keys, as a grant does."""
    eager, arena = EagerGrants(), Arena(64 * SLOT, 32 * SLOT)
    lost = arena.reserve(SLOT, "lost")
    assert lost == 0
    arena.quarantine(lost)
    assert eager.reserve(arena, "one", SLOT) == SLOT
    arena.release(SLOT)
    eager.freed(SLOT)
    assert arena.renew(0) == [0]
    assert eager.reserve(arena, "one", SLOT) is None
    assert (arena.reserved_bytes, eager.nbytes) == (0, 0)


def test_a_source_that_has_its_share_of_the_arena_or_finds_it_full_gets_no_region_eagerly():
    eager, arena = EagerGrants(), Arena(64 * SLOT)
    for _ in range(32):
        assert arena.reserve(SLOT, "one") is not None
    assert eager.reserve(arena, "one", SLOT) is None
    assert arena.reserve(32 * SLOT, "others") is not None
    assert eager.reserve(arena, "new", SLOT) is None
    assert eager.nbytes == 0


def test_a_source_whose_regions_are_all_free_is_forgotten():
    eager, arena = EagerGrants(), Arena(64 * SLOT)
    offsets = [eager.reserve(arena, "one", SLOT) for _ in range(2)]
    for offset, left in zip(offsets, (1, 0), strict=True):
        assert offset is not None
        eager.freed(offset)
        assert len(eager._reserved) == left
