"""What a keeper decides: every short history of two generations and a stranger, and long ones at random."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from keeper_world import EVENTS, KEY, OBJECT_BYTES, PAGES, PART, SLAB_BYTES, World

from kvmover.store.keeper.journal import page_and_digests
from kvmover.store.keeper.messages import (
    SPEAKS,
    Agreed,
    AllocateSlab,
    Attach,
    CommitObjects,
    CommittedObject,
    KeeperRefusal,
    NoteUses,
    Refused,
    SlabToFill,
    Welcome,
)
from kvmover.store.keeper.state import KeeperState, SessionOpened
from kvmover.store.record import DIGEST_BYTES, encode_part
from tests.proofs import searched
from tests.store.store_rank import SPACE

#: What brings a keeper to where something is at stake: an owner that has filled half of a slab, and a stranger.
BEGUN = ("attach 1", "attach 3", "allocate 1", "commit 1")


def run(names: tuple[str, ...]) -> World:
    world = World()
    for name in names:
        verb, session = EVENTS[name]
        verb(world, session)
    return world


@pytest.mark.parametrize("first", EVENTS)
def test_every_short_history_keeps_what_must_hold(first: str) -> None:
    for second in EVENTS:
        run((*BEGUN, first, second))


@pytest.mark.proof
@pytest.mark.parametrize("first", EVENTS)
def test_every_longer_history_keeps_what_must_hold(first: str) -> None:
    for rest in itertools.product(EVENTS, repeat=2):
        run((*BEGUN, first, *rest))


@searched(few=60, many=1000, deadline=None)
@given(st.lists(st.sampled_from(list(EVENTS)), min_size=10, max_size=60))
def test_every_long_history_keeps_what_must_hold(names: list[str]) -> None:
    run(tuple(names))


def test_a_newer_generation_takes_the_place_of_an_older_one_and_has_all_that_it_committed() -> None:
    world = run((*BEGUN, "attach 2"))
    assert world.state.sessions[1].fenced_by == 2
    assert world.sealed == {1}, "what the older one may still be writing is no part of it"
    assert len(world.state.namespaces[SPACE.digest].index) == 1
    for verb in ("commit 1", "allocate 1", "remove 1", "clear 1"):
        EVENTS[verb][0](world, 1)
        assert isinstance(world.answers[-1], Refused), verb
        assert world.answers[-1].refusal is KeeperRefusal.FENCED
        assert "generation 1 of fleet 'a' is fenced by generation 2" in world.answers[-1].words
    assert len(world.state.namespaces[SPACE.digest].index) == 1


def test_ranks_of_one_generation_fill_slabs_side_by_side() -> None:
    world = run(("attach 2",))
    world.step(SessionOpened(9))
    world.ask(9, Attach(SPEAKS, SPACE.digest, b"{}", "a", 2))
    for session in (2, 9):
        world.allocate(session)
        world.commit(session)
    assert [slab.writer for slab in world.state.slabs.values()] == [2, 9]


@pytest.mark.parametrize(
    ("attach", "words"),
    [
        (Attach((2, 3), SPACE.digest, b""), "the client speaks versions 2 to 3, this keeper versions 1 to 1"),
        (Attach(SPEAKS, SPACE.digest, b"", "", 4), "generation 4 of no fleet"),
    ],
)
def test_each_reason_not_to_attach_has_its_own_words(attach: Attach, words: str) -> None:
    world = run(())
    world.step(SessionOpened(9))
    answer = world.ask(9, attach)
    assert isinstance(answer, Refused)
    assert answer.words == words
    assert isinstance(world.ask(9, Attach(SPEAKS, SPACE.digest, b"")), Welcome)
    again = world.ask(9, Attach(SPEAKS, SPACE.digest, b""))
    assert isinstance(again, Refused)
    assert again.words == "attached already"


def test_what_is_not_committed_is_nobodys_when_its_writer_ends() -> None:
    world = run(("attach 1", "allocate 1", "end 1"))
    assert (world.made, world.dropped) == ({1}, {1})
    world = run((*BEGUN, "end 1"))
    assert world.state.slabs[1].nbytes == OBJECT_BYTES, "only what was committed is held"


def test_a_commit_that_says_what_cannot_be_changes_nothing() -> None:
    world = run(("attach 1", "allocate 1"))
    name, digests = encode_part(KEY), bytes(PART.box.cells * DIGEST_BYTES)
    good = CommittedObject(0, PART.nbytes, PAGES[0], name, digests)
    bad = [
        CommittedObject(100, PART.nbytes, PAGES[1], name, digests),  # within a block
        CommittedObject(0, PART.nbytes, PAGES[1], name, digests),  # over the first
        CommittedObject(SLAB_BYTES, PART.nbytes, PAGES[1], name, digests),  # behind the slab
        CommittedObject(OBJECT_BYTES, 1 << 42, PAGES[1], name, digests),
        CommittedObject(OBJECT_BYTES, 0, PAGES[1], name, digests),
        CommittedObject(OBJECT_BYTES, PART.nbytes, PAGES[1], name, digests[8:]),
        CommittedObject(OBJECT_BYTES, PART.nbytes, PAGES[1], b"\xff" * 64, digests),
    ]
    for each in bad:
        answer = world.ask(1, CommitObjects(1, [good, each]))
        assert isinstance(answer, Refused), each
        assert answer.refusal is KeeperRefusal.INVALID
        assert not len(world.state.namespaces[SPACE.digest].index)
    assert world.ask(1, CommitObjects(1, [good])) == Agreed()


def test_of_two_writers_of_a_page_the_first_keeps_it() -> None:
    world = run(("attach 1", "attach 3", "allocate 1", "allocate 3", "commit 1"))
    world.put = 0
    world.commit(3)
    assert world.answers[-1] == Agreed()
    assert world.state.namespaces[SPACE.digest].index.holdings.objects == 1


def test_eviction_takes_what_is_least_used_and_nothing_that_is_to_stay() -> None:
    world = run(("attach 3", *["allocate 3", "commit 3"] * 3))
    world.now += 100
    world.ask(3, NoteUses([PAGES[0], PAGES[1]]))
    world.ask(3, AllocateSlab(2 * SLAB_BYTES, SLAB_BYTES, None, []))
    index = world.state.namespaces[SPACE.digest].index
    assert [page in index for page in PAGES[:3]] == [True, True, False]
    answer = world.ask(3, AllocateSlab(3 * SLAB_BYTES, SLAB_BYTES, None, [1]))
    assert isinstance(answer, Refused)
    assert answer.refusal is KeeperRefusal.FULL
    assert PAGES[0] in index, "slab 1 was to stay"


def test_an_eviction_carries_what_is_hot_and_the_digests_with_it() -> None:
    world = run(("attach 3", *["allocate 3", "commit 3", "commit 3"] * 3))
    world.now += 100
    world.ask(3, NoteUses([PAGES[1], PAGES[3], PAGES[5]]))
    assert isinstance(world.ask(3, AllocateSlab(SLAB_BYTES, SLAB_BYTES, None, [])), SlabToFill)
    index = world.state.namespaces[SPACE.digest].index
    assert [page in index for page in PAGES] == [False, True, False, True, True, True]
    kept = world.state.namespaces[SPACE.digest]

    def read(place: int, nbytes: int) -> bytes:
        return world.journal[place - kept.base : place - kept.base + nbytes]

    for _ in range(2):
        held = index.get(PAGES[1])
        assert held is not None
        (each,) = held.objects
        assert page_and_digests(read, each.record) == (PAGES[1], bytes(PART.box.cells * DIGEST_BYTES))
        world.rewrite(3)
        index = kept.index


def test_a_writer_that_has_stopped_gives_up_its_room_when_others_need_it() -> None:
    world = run(("attach 1", "attach 3", "allocate 1", "commit 1"))
    assert isinstance(world.ask(3, AllocateSlab(2 * SLAB_BYTES, SLAB_BYTES, None, [])), SlabToFill)
    refused = world.ask(3, AllocateSlab(2 * SLAB_BYTES + OBJECT_BYTES, SLAB_BYTES, None, []))
    assert isinstance(refused, Refused), "it may be at work"
    world.now += 60
    assert isinstance(world.ask(3, AllocateSlab(2 * SLAB_BYTES + OBJECT_BYTES, SLAB_BYTES, None, [])), SlabToFill)
    assert world.sealed == {1}
    assert PAGES[0] in world.state.namespaces[SPACE.digest].index, "what it had committed is still there"


def test_the_invariants_find_a_state_that_is_none() -> None:
    def spoilt(change: str) -> KeeperState:
        world = run(BEGUN)
        state, slab = world.state, world.state.slabs[1]
        match change:
            case "two owners":
                state.generations["a"] = 2
            case "lost slab":
                slab.writer = 3
            case "too much":
                state.capacity_bytes = 1
            case "uncommitted":
                slab.end = 0
            case _:
                state.slabs.clear()
                state.sessions[1].slab = None
        return state

    for change in ("two owners", "lost slab", "too much", "uncommitted", "an object in no slab"):
        with pytest.raises(AssertionError):
            spoilt(change).check()
