"""A RadixKey is a request's tokens as the bytes that nodes are compared by, converted once."""

from __future__ import annotations

import sys
from array import array
from enum import IntEnum
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.c_core import NATIVE
from kvmover.cache.prefix.hashes import WORD_BYTES, PrefixNamespace, TokenIds, chain_bytes
from kvmover.errors import PrefixError
from kvmover.fields import member

#: Page ids as they are handed in: a buffer of int32 is taken as it lies, anything else is converted.
PageIds: TypeAlias = TokenIds

DEFAULT_NAMESPACE = PrefixNamespace()

_INT32 = np.dtype(np.int32)

NO_IDS = np.empty(0, _INT32)

_WORD_FORMATS = frozenset("iIlL") if sys.byteorder == "little" else frozenset[str]()


class KeyUnits(IntEnum):
    """What one position of the tree stands for; the value is how many 32-bit words it takes.

    BIGRAM is for the caches of draft heads that see the next token too: N tokens make N - 1 units of two neighbours,
    and every count of tokens that a tree of bigrams takes or gives is one of units.
    """

    PLAIN = 1
    BIGRAM = 2


class RadixKey(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A prompt, ready to be compared: little-endian 32-bit words, one or two a unit, and their namespace."""

    data: bytes
    namespace: PrefixNamespace
    units: KeyUnits
    #: Page hashes that somebody asked for, by words a page.
    _hashes: dict[int, list[bytes]] = {}

    @classmethod
    def of(cls, tokens: TokenIds, namespace: PrefixNamespace, units: KeyUnits) -> RadixKey:
        """Returns the key of any row of integers from 0 to 2**32 - 1. 32-bit buffers are copied as they lie."""
        if units.__class__ is not KeyUnits:
            units = member(KeyUnits, units, "units", PrefixError)
        data = words(tokens)
        if units is KeyUnits.BIGRAM:
            row = np.frombuffer(data, np.uint32)
            data = np.stack([row[:-1], row[1:]], axis=1).tobytes()
        return cls(data, namespace, units)

    @property
    def tokens(self) -> int:
        """Units of the tree: tokens, or pairs of neighbours."""
        return len(self.data) // (WORD_BYTES * self.units)

    def front(self, tokens: int) -> RadixKey:
        """Of the first `tokens` units."""
        return RadixKey(self.data[: tokens * WORD_BYTES * self.units], self.namespace, self.units)

    def page_hashes(self, page_words: int) -> list[bytes]:
        """Hash of each whole page of `page_words` 32-bit words, chained from the namespace, as the tree names it.

        Computed once: a tree that takes the key takes them for its nodes.
        """
        known = self._hashes.get(page_words)
        if known is None:
            known = chain_bytes(self.namespace.digest, self.data, page_words * WORD_BYTES)
            self._hashes[page_words] = known
        return known

    def known_hashes(self, page_words: int) -> list[bytes] | None:
        """What `page_hashes` answered before; None where nobody asked."""
        return self._hashes.get(page_words)


def words(tokens: TokenIds) -> bytes:
    """`tokens` as 32-bit little-endian words. Raises PrefixError for what 32 bits cannot hold."""
    if NATIVE is not None and _WORD_FORMATS:
        data = NATIVE.words(tokens)
        if data is not None:
            return data
    return words_in_python(tokens)


def words_in_python(tokens: TokenIds) -> bytes:
    """See `words`.

    12,000 tokens take 1 us as 32-bit words, 6 us as 64-bit ones, 70 us as a list of numbers.
    """
    if isinstance(tokens, list) and _WORD_FORMATS:
        try:
            return array("I", tokens).tobytes()
        except (TypeError, OverflowError):
            return _converted(tokens)
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]  # a row without a buffer is told by the error
    except TypeError:
        return _converted(tokens)
    if view.itemsize == WORD_BYTES and view.ndim == 1 and view.format in _WORD_FORMATS:
        if view.format.islower() and len(view) and int(np.asarray(view).min()) < 0:
            return _converted(view)
        return view.tobytes()
    return _converted(view)


def _converted(tokens: TokenIds) -> bytes:
    row = np.asarray(tokens)
    if not row.size:
        return b""
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise PrefixError(f"tokens and page ids are one row of integers, got shape {row.shape} of {row.dtype}")
    if row.dtype.itemsize == 8 and row.dtype.isnative and not int(row.view(np.uint64).max()) >> 32:
        return row.astype("<u4").tobytes()
    low, high = int(row.min()), int(row.max())
    if low < 0 or high >> 32:
        raise PrefixError(f"tokens and page ids have 32 bits and no sign, got {low if low < 0 else high}")
    return row.astype("<u4").tobytes()


def page_array(data: bytes) -> npt.NDArray[np.int32]:
    """The page ids in `data`, read-only."""
    return np.frombuffer(data, _INT32) if data else NO_IDS


def unlike(ids: bytes, others: bytes) -> bytes:
    """Those of `ids` that are not at the same place in `others`."""
    row = page_array(ids)
    return row[row != page_array(others)].tobytes()


def common_bytes(data: bytes, at: int, stop: int, other: bytes, step: int) -> int:
    """How many leading bytes of `other`, in whole `step`s, stand in `data` at `at` and before `stop`.

    By halves, each a comparison of memory without a copy: under 2 us for a node of 30 KB, which numpy takes 5 us for.
    """
    low, high = 0, min(len(other), stop - at) // step
    view = memoryview(other)
    while low < high:
        middle = (low + high + 1) // 2
        if data.startswith(view[low * step : middle * step], at + low * step):
            low = middle
        else:
            high = middle - 1
    return low * step
