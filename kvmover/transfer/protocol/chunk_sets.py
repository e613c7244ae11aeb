"""Immutable sets and maps of a request's chunks: a changed copy takes no longer for 4,096 chunks than for 16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import TypeVar

V = TypeVar("V")

#: (writer, chunk). The writer is a source rank's transport name, which is never reused.
WriterChunk = tuple[str, int]


class Chunks(Set[int]):
    """A set of chunks, an integer of bits: a copy of 4,096 takes 512 bytes. Iterated in ascending order."""

    __slots__ = ("_bits",)

    def __init__(self, chunks: Iterable[int] = ()) -> None:
        """Raises ValueError for a negative chunk."""
        self._bits = _bits(chunks)

    def having(self, chunk: int) -> Chunks:
        """Returns the set with a chunk, which may be in it."""
        made = _bare(Chunks)
        made._bits = self._bits | 1 << chunk
        return made

    def without(self, chunk: int) -> Chunks:
        """Returns the set without a chunk, which may be absent."""
        made = _bare(Chunks)
        made._bits = self._bits & ~(1 << chunk)
        return made

    def __or__(self, other: Iterable[int]) -> Chunks:  # pyright: ignore[reportIncompatibleMethodOverride]
        made = _bare(Chunks)
        made._bits = self._bits | (other._bits if type(other) is Chunks else _bits(other))
        return made

    def __sub__(self, other: Iterable[int]) -> Chunks:
        made = _bare(Chunks)
        made._bits = self._bits & ~(other._bits if type(other) is Chunks else _bits(other))
        return made

    def __le__(self, other: Set[object]) -> bool:
        return not self._bits & ~other._bits if type(other) is Chunks else super().__le__(other)

    def within(self, count: int) -> bool:
        """Returns True if all chunks are below `count`."""
        return not self._bits >> count

    def __contains__(self, chunk: object) -> bool:
        number: int = chunk  # pyright: ignore[reportAssignmentType]
        return number >= 0 and self._bits >> number & 1 == 1

    def __iter__(self) -> Iterator[int]:
        return _chunks(self._bits)

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __bool__(self) -> bool:
        return bool(self._bits)

    def __hash__(self) -> int:
        return self._hash()

    def __repr__(self) -> str:
        return f"Chunks({[*self]})"


#: Makes a set without its bits.
_bare = object.__new__


class WriterChunks(Set[WriterChunk]):
    """A set of (writer, chunk), bits a writer. Iterated by writer, in ascending order of its chunks."""

    __slots__ = ("_bits",)

    def __init__(self, keys: Iterable[WriterChunk] = ()) -> None:
        """Raises ValueError for a negative chunk."""
        self._bits = _bits_of(keys)

    def having(self, key: WriterChunk) -> WriterChunks:
        """Returns the set with a chunk, which may be in it."""
        made, (writer, chunk) = _bare(WriterChunks), key
        made._bits = {**self._bits, writer: self._bits.get(writer, 0) | 1 << chunk}
        return made

    def without(self, key: WriterChunk) -> WriterChunks:
        """Returns the set without a chunk, which may be absent."""
        made, (writer, chunk) = _bare(WriterChunks), key
        made._bits = {**self._bits, writer: self._bits.get(writer, 0) & ~(1 << chunk)}
        return made

    def __or__(self, other: Iterable[WriterChunk]) -> WriterChunks:  # pyright: ignore[reportIncompatibleMethodOverride]
        bits = self._bits.copy()
        for writer, added in (other._bits if type(other) is WriterChunks else _bits_of(other)).items():
            bits[writer] = bits.get(writer, 0) | added
        return self._of(bits)

    def __sub__(self, other: Iterable[WriterChunk]) -> WriterChunks:
        bits = self._bits.copy()
        for writer, removed in (other._bits if type(other) is WriterChunks else _bits_of(other)).items():
            if writer in bits:
                bits[writer] &= ~removed
        return self._of(bits)

    def __and__(self, other: Iterable[WriterChunk]) -> WriterChunks:  # pyright: ignore[reportIncompatibleMethodOverride]
        theirs = other._bits if type(other) is WriterChunks else _bits_of(other)
        return self._of({writer: bits & theirs[writer] for writer, bits in self._bits.items() if writer in theirs})

    def __le__(self, other: Set[object]) -> bool:
        if type(other) is not WriterChunks:
            return super().__le__(other)
        theirs = other._bits
        return not [bits for writer, bits in self._bits.items() if bits & ~theirs.get(writer, 0)]

    def __contains__(self, key: object) -> bool:
        found: WriterChunk = key  # pyright: ignore[reportAssignmentType]
        writer, chunk = found
        return chunk >= 0 and self._bits.get(writer, 0) >> chunk & 1 == 1

    def within(self, counts: Mapping[str, int]) -> bool:
        """Returns True if all writers are among those of `counts`, and their chunks below its numbers."""
        return not [bits for writer, bits in self._bits.items() if bits >> counts.get(writer, 0)]

    def count(self, writer: str) -> int:
        """Returns the number of a writer's chunks."""
        return self._bits.get(writer, 0).bit_count()

    def __iter__(self) -> Iterator[WriterChunk]:
        return ((writer, chunk) for writer, bits in self._bits.items() for chunk in _chunks(bits))

    def __len__(self) -> int:
        return sum(map(int.bit_count, self._bits.values()))

    def __bool__(self) -> bool:
        return any(self._bits.values())

    def __hash__(self) -> int:
        return self._hash()

    def __repr__(self) -> str:
        return f"WriterChunks({[*self]})"

    @classmethod
    def _of(cls, bits: dict[str, int]) -> WriterChunks:
        made = cls.__new__(cls)
        made._bits = bits
        return made


#: Chunks of one inner map of a ChunkMap, as a power of two.
_INNER_BITS = 6


class ChunkMap(Mapping[int, V]):
    """A map of chunks, in maps of 64: a changed copy of 4,096 copies two of at most 64 entries."""

    __slots__ = ("_inner", "_length")

    def __init__(self) -> None:
        self._inner: dict[int, dict[int, V]] = {}
        self._length = 0

    def having(self, chunk: int, value: V) -> ChunkMap[V]:
        """Returns a copy with another value of a chunk."""
        made, at = self._copy(), chunk >> _INNER_BITS
        inner = made._inner[at] = {**made._inner.get(at, {}), chunk: value}
        made._length += len(inner) - len(self._inner.get(at, ()))
        return made

    def without(self, chunk: int) -> ChunkMap[V]:
        """Returns a copy without a chunk, which may be absent."""
        if chunk not in self:
            return self
        made, at = self._copy(), chunk >> _INNER_BITS
        inner = made._inner[at].copy()
        del inner[chunk]
        made._inner[at] = inner
        made._length -= 1
        return made

    def _copy(self) -> ChunkMap[V]:
        made = ChunkMap[V]()
        made._inner, made._length = self._inner.copy(), self._length
        return made

    def __getitem__(self, chunk: int) -> V:
        return self._inner[chunk >> _INNER_BITS][chunk]

    def __contains__(self, chunk: object) -> bool:
        number: int = chunk  # pyright: ignore[reportAssignmentType]
        return number in self._inner.get(number >> _INNER_BITS, ())

    def __iter__(self) -> Iterator[int]:
        return (chunk for inner in self._inner.values() for chunk in inner)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"ChunkMap({dict(self)})"


def _bits(chunks: Iterable[int]) -> int:
    bits = 0
    for chunk in chunks:
        bits |= 1 << chunk
    return bits


def _bits_of(keys: Iterable[WriterChunk]) -> dict[str, int]:
    bits = dict[str, int]()
    for writer, chunk in keys:
        bits[writer] = bits.get(writer, 0) | 1 << chunk
    return bits


def _chunks(bits: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
