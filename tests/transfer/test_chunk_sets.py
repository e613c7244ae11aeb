"""Sets and maps of chunks are those of Python, and a changed copy takes little memory however many there are."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmover.transfer.protocol.chunk_sets import ChunkMap, Chunks, WriterChunk, WriterChunks

CHUNK = st.integers(0, 300)
KEY = st.tuples(st.sampled_from("abc"), CHUNK)

#: A copy of 4,096 chunks as a frozenset takes 260 kB.
COPY_BYTES = 8192


@given(st.sets(CHUNK), st.sets(CHUNK))
def test_chunks_are_a_set_of_numbers(one: set[int], other: set[int]) -> None:
    ours, theirs = Chunks(one), Chunks(other)
    assert (ours, len(ours), bool(ours), [*ours]) == (one, len(one), bool(one), sorted(one))
    for right in (theirs, frozenset(other), dict.fromkeys(other).keys()):
        assert (ours | right, ours - right, ours & right) == (one | other, one - other, one & other)
    assert (ours <= theirs, ours == theirs) == (one <= other, one == other)
    assert [number in ours for number in range(-2, 302)] == [number in one for number in range(-2, 302)]
    assert [ours.within(count) for count in (0, 7, 301)] == [all(x < count for x in one) for count in (0, 7, 301)]


@given(st.sets(KEY), st.sets(KEY))
def test_chunks_of_writers_are_a_set_of_pairs(one: set[WriterChunk], other: set[WriterChunk]) -> None:
    ours, theirs = WriterChunks(one), WriterChunks(other)
    assert (ours, len(ours), bool(ours), {*ours}) == (one, len(one), bool(one), one)
    for right in (theirs, frozenset(other)):
        assert (ours | right, ours - right, ours & right) == (one | other, one - other, one & other)
    assert (ours <= theirs, ours == theirs) == (one <= other, one == other)
    assert not ours - one
    counts = {"a": 7, "b": 301}
    assert ours.within(counts) == all(writer in counts and chunk < counts[writer] for writer, chunk in one)
    for writer in "abcd":
        assert ours.count(writer) == sum(key[0] == writer for key in one)
        assert [(writer, chunk) in ours for chunk in (-1, 0, 7)] == [(writer, chunk) in one for chunk in (-1, 0, 7)]


@given(st.lists(st.tuples(CHUNK, st.one_of(st.none(), st.integers()))))
def test_a_map_of_chunks_is_a_dict_whose_copies_are_apart(changes: list[tuple[int, int | None]]) -> None:
    ours, wanted = ChunkMap[int](), dict[int, int]()
    for chunk, value in changes:
        before, was = ours, dict(wanted)
        if value is None:
            ours, _ = ours.without(chunk), wanted.pop(chunk, None)
        else:
            ours, wanted[chunk] = ours.having(chunk, value), value
        assert before == was
        assert (ours, len(ours), {*ours}) == (wanted, len(wanted), {*wanted})
        assert ours.get(chunk) == wanted.get(chunk)


def test_a_negative_chunk_is_in_no_set() -> None:
    with pytest.raises(ValueError, match="negative"):
        Chunks([-1])
    assert -1 not in Chunks([0])
    assert -1 not in ChunkMap[int]().having(0, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda: _CHUNKS - {7},
        lambda: _OF_WRITER | {("a", 4096)},
        lambda: _MAP.having(7, 1),
        lambda: _MAP.without(7),
    ],
    ids=["chunks", "writers' chunks", "map with one more", "map with one less"],
)
def test_a_changed_copy_of_4096_chunks_takes_little_memory(change: Callable[[], object]) -> None:
    change()
    tracemalloc.start()
    try:
        made = change()
        assert tracemalloc.get_traced_memory()[1] <= COPY_BYTES
    finally:
        tracemalloc.stop()
    assert made


def _whole_map() -> ChunkMap[int]:
    made = ChunkMap[int]()
    for chunk in range(4096):
        made = made.having(chunk, chunk)
    return made


_CHUNKS, _OF_WRITER, _MAP = Chunks(range(4096)), WriterChunks(("a", chunk) for chunk in range(4096)), _whole_map()
