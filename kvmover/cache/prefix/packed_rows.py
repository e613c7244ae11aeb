"""Numbers in KV events are kept in rows as routers read them: msgpack arrays.

A tuple of a prompt's 12,000 tokens takes 15 times as long to make as the array, which is made of it in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import msgpack

from kvmover.c_core import NATIVE
from kvmover.cache.prefix.hashes import as_int64s, each_hash


def packed(numbers: Iterable[int]) -> msgspec.Raw:
    """Returns a row of numbers as a msgpack array, each from -2**63 to 2**64 - 1.

    >>> unpacked(packed([7, -1, 70000]))
    (7, -1, 70000)
    """
    return msgspec.Raw(msgpack.encode(tuple(numbers)))


def unpacked(row: msgspec.Raw) -> tuple[int, ...]:
    """Returns the numbers of a row."""
    return msgpack.decode(row, type=tuple[int, ...])


def joined(rows: Sequence[msgspec.Raw]) -> msgspec.Raw:
    """Returns one row of the numbers of several, in order, without reading them.

    >>> unpacked(joined([packed([1, 2]), packed([]), packed([3])]))
    (1, 2, 3)
    """
    if len(rows) == 1:
        return rows[0]
    parts = [(memoryview(row), *_header(memoryview(row))) for row in rows]
    whole = _array_of(sum(count for _, count, _ in parts))
    return msgspec.Raw(whole + b"".join(view[header:] for view, _, header in parts))


def pack_words_in_python(words: bytes, step: int) -> bytes:
    """See `pack_words`."""
    return msgpack.encode(tuple(memoryview(words).cast("I")[::step]))


def pack_hashes_in_python(hashes: bytes) -> bytes:
    """See `pack_hashes`."""
    return msgpack.encode(as_int64s(each_hash(hashes)))


#: `(words, step)`: the msgpack array of each `step`-th of 32-bit words.
pack_words: Callable[[bytes, int], bytes] = getattr(NATIVE, "pack_words", pack_words_in_python)
#: The msgpack array of `hashes.as_int64` of each hash in a row of `hashes.chain_bytes`.
pack_hashes: Callable[[bytes], bytes] = getattr(NATIVE, "pack_hashes", pack_hashes_in_python)


def _header(view: memoryview) -> tuple[int, int]:
    """Returns the count of an array's items, and the bytes before them."""
    form = view[0]
    width = {0xDC: 2, 0xDD: 4}.get(form, 0)
    return (int.from_bytes(view[1 : 1 + width], "big"), 1 + width) if width else (form & 0x0F, 1)


def _array_of(count: int) -> bytes:
    """Returns the bytes before so many items."""
    if count < 16:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")
