"""The arena against a model that remembers every byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmover.errors import LayoutError
from kvmover.transfer.memory.arena import ALIGN_BYTES, Arena

WORDS = 16
NBYTES = WORDS * ALIGN_BYTES + 100  # the odd tail is of no use, and does no harm


class ArenaModel(RuleBasedStateMachine):
    """Who owns each word, and a first-fit search over them."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(NBYTES)
        self.owner: list[int | None] = [None] * WORDS
        self.leases: dict[int, int] = {}
        self.quarantined: set[int] = set()

    @rule(nbytes=st.integers(1, NBYTES - 100))
    def reserve(self, nbytes: int) -> None:
        words = -(-nbytes // ALIGN_BYTES)
        fits = [at for at in range(WORDS - words + 1) if not any(o is not None for o in self.owner[at : at + words])]
        offset = self.arena.reserve(nbytes)
        if not fits:
            assert offset is None
            return
        assert offset == fits[0] * ALIGN_BYTES
        self.owner[fits[0] : fits[0] + words] = [offset] * words
        self.leases[offset] = words

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.leases)))
        self.arena.release(offset)
        del self.leases[offset]
        self.quarantined.discard(offset)
        self.owner = [None if owner == offset else owner for owner in self.owner]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.leases)))
        self.arena.quarantine(offset)
        self.quarantined.add(offset)

    @invariant()
    def accounts_balance(self) -> None:
        assert self.arena.reserved_bytes == sum(self.leases.values()) * ALIGN_BYTES
        assert self.arena.quarantined_bytes == sum(self.leases[o] for o in self.quarantined) * ALIGN_BYTES

    def teardown(self) -> None:
        for offset in self.leases:
            self.arena.release(offset)
        assert (self.arena.reserved_bytes, self.arena.quarantined_bytes) == (0, 0)
        assert self.arena.reserve(WORDS * ALIGN_BYTES) == 0  # all of it, in one piece


TestArenaModel = ArenaModel.TestCase


@given(st.lists(st.integers(1, 3000), max_size=40))
def test_leases_are_aligned_and_never_overlap(sizes: list[int]):
    arena = Arena(1 << 15)
    taken = [(offset, size) for size in sizes if (offset := arena.reserve(size)) is not None]
    for (low, size), (high, _) in zip(sorted(taken), sorted(taken)[1:], strict=False):
        assert low + size <= high
    assert all(offset % ALIGN_BYTES == 0 and offset + size <= arena.nbytes for offset, size in taken)


def test_a_long_lived_lease_blocks_nobody_but_itself():
    arena = Arena(8 * ALIGN_BYTES)
    first = arena.reserve(ALIGN_BYTES)
    for _ in range(1000):
        others = [arena.reserve(ALIGN_BYTES) for _ in range(7)]
        assert None not in others
        assert first not in others
        assert arena.reserve(1) is None
        for offset in others:
            assert offset is not None
            arena.release(offset)


def test_a_region_is_released_once():
    arena = Arena(NBYTES)
    offset = arena.reserve(100)
    assert offset is not None
    with pytest.raises(LayoutError, match=f"no region is reserved at {offset + ALIGN_BYTES}"):
        arena.release(offset + ALIGN_BYTES)
    arena.release(offset)
    with pytest.raises(LayoutError, match=f"no region is reserved at {offset}"):
        arena.release(offset)
    assert arena.reserve(WORDS * ALIGN_BYTES) == 0, "all of it is free, once"


def test_a_quarantined_region_is_not_lent_again_until_it_is_released():
    arena = Arena(4 * ALIGN_BYTES)
    bad = arena.reserve(2 * ALIGN_BYTES)
    assert bad == 0
    arena.quarantine(bad)
    assert arena.quarantined_bytes == 2 * ALIGN_BYTES
    assert arena.reserve(2 * ALIGN_BYTES) == 2 * ALIGN_BYTES
    assert arena.reserve(1) is None
    arena.release(bad)
    assert arena.quarantined_bytes == 0
    assert arena.reserve(2 * ALIGN_BYTES) == bad


def test_a_region_that_never_fits_is_an_error_and_no_wait():
    with pytest.raises(LayoutError, match="1025 bytes does not fit an arena of 1024"):
        Arena(1024).reserve(1025)


def test_an_arena_without_room_for_one_region_is_refused():
    with pytest.raises(LayoutError, match="below 256"):
        Arena(ALIGN_BYTES - 1)


def test_only_a_leased_region_can_be_quarantined():
    with pytest.raises(LayoutError, match="no region is reserved at 256"):
        Arena(1024).quarantine(256)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 2, 0, 3), (2, 0, 3, 1)])
def test_free_regions_on_both_sides_of_a_slabs_end_stay_two(order: tuple[int, ...]):
    """A slab is registered anew as a whole, so no region may have a part in its neighbour."""
    arena = Arena(4 * ALIGN_BYTES, 2 * ALIGN_BYTES)
    offsets = [arena.reserve(ALIGN_BYTES) for _ in range(4)]
    for number in order:
        arena.release(offsets[number])
        arena.check()
    arena.reserve(ALIGN_BYTES)
    assert arena.reserve(2 * ALIGN_BYTES) == 2 * ALIGN_BYTES
    assert arena.reserve(2 * ALIGN_BYTES) is None
