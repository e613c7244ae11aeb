"""Page hashes chain from the namespace over all tokens up to the page's end, so a split leaves them unchanged.

In the default namespace they equal SGLang 0.5.23's storage keys (`mem_cache/cpp_utils/hash_binding.cpp`): SHA-256 over
the previous page's hash and the page's tokens as unsigned 32-bit little-endian words. The first page's parent is the
namespace's digest: all, beside tokens, that must be equal for prompts to share KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from struct import unpack
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.c_core import NATIVE
from kvmover.errors import KvmoverError

_TAG = b"kvmover-namespace-v1"


class PrefixNamespace(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """The model, adapter, tenant salt and extra keys (such as an image's digest) that must be equal to share KV.

    Fields are compared and hashed separately, never joined: adapter "ab" with salt "c" is not "a" with "bc". SGLang
    0.5.23 (`schedule_batch.py`) appends the adapter to another key and cannot tell these apart.
    """

    model: str = ""
    adapter: str = ""
    salt: str = ""
    extra: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Show the salt, which may be a secret, as the first 8 hex digits of its SHA-256."""
        salt = f"#{sha256(self.salt.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}" if self.salt else ""
        return f"PrefixNamespace(model={self.model!r}, adapter={self.adapter!r}, salt={salt!r}, extra={self.extra!r})"

    @property
    def digest(self) -> bytes:
        """Returns the 32 bytes that page hashes chain from; empty in the default namespace, as in SGLang."""
        return _digest(self)


@lru_cache(maxsize=4096)
def _digest(namespace: PrefixNamespace) -> bytes:
    if namespace == PrefixNamespace():
        return b""
    fields = (namespace.model, namespace.adapter, namespace.salt, *namespace.extra)
    whole = sha256(_TAG)
    for text in fields:
        encoded = text.encode("utf-8", "surrogatepass")
        whole.update(len(encoded).to_bytes(8, "little") + encoded)
    return whole.digest()


HASH_BYTES = 32
WORD_BYTES = 4

#: An array, array.array or memoryview of integers, not copied if it holds 32-bit words, or a sequence of integers.
TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer] | memoryview


class HashError(KvmoverError, ValueError):
    """An error for tokens or a parent that cannot be hashed; the message names the value."""


def chain(parent: bytes, tokens: TokenIds, page_tokens: int) -> list[bytes]:
    """Returns the hash of each whole page of `tokens`, each chained from the one before; a shorter tail is left out.

    `parent` is the hash of the page before the first, or the namespace's digest. Hashing whole pages in parts, each
    from the last hash of the part before, gives the same. Raises HashError unless `tokens` are one row of unsigned
    32-bit integers, `page_tokens` is at least 1 and `parent` has 0 or 32 bytes.

    >>> [page.hex()[:16] for page in chain(b"", [1, 2, 3, 4, 5], 2)]
    ['34fb5c825de7ca4a', 'c57b445f90651b9a']
    """
    words = _words(tokens)
    _check(parent, page_tokens)
    return each_hash(chain_bytes(parent, words.tobytes(), WORD_BYTES * page_tokens))


def chain_bigrams(parent: bytes, tokens: TokenIds, page_tokens: int) -> list[bytes]:
    """Returns `chain` over pairs of neighbouring tokens: N tokens make N - 1 units, as in caches of draft heads.

    A page of `page_tokens` units hashes 8 bytes a unit. Raises HashError as `chain`.
    """
    words = _words(tokens)
    _check(parent, page_tokens)
    pairs = np.stack([words[:-1], words[1:]], axis=1).reshape(-1)
    return each_hash(chain_bytes(parent, pairs.tobytes(), 2 * WORD_BYTES * page_tokens))


def as_int64(page_hash: bytes) -> int:
    """Returns the hash as KV events carry it: its first 8 bytes, big-endian, signed (SGLang's `hash_str_to_int64`).

    >>> as_int64(bytes.fromhex("ffffffffffffffff") + bytes(24))
    -1
    """
    return int.from_bytes(page_hash[:8], "big", signed=True)


def as_int64s(page_hashes: Sequence[bytes]) -> tuple[int, ...]:
    """Returns `as_int64` of each hash, in half the time of separate calls."""
    return unpack(f">{len(page_hashes) * (HASH_BYTES // 8)}q", b"".join(page_hashes))[:: HASH_BYTES // 8]


def each_hash(row: bytes) -> list[bytes]:
    """Returns the hashes in a row of `chain_bytes`."""
    return [row[at : at + HASH_BYTES] for at in range(0, len(row), HASH_BYTES)]


def chain_in_python(parent: bytes, data: bytes, page_bytes: int) -> bytes:
    """See `chain_bytes`."""
    hashes = list[bytes]()
    for first in range(0, len(data) - page_bytes + 1, page_bytes):
        parent = sha256(parent + data[first : first + page_bytes]).digest()
        hashes.append(parent)
    return b"".join(hashes)


#: `(parent, data, page_bytes)`: `chain` over bytes, unchecked, as one row of 32 bytes a page. Runs in C if the
#: processor has SHA instructions.
chain_bytes: Callable[[bytes, bytes, int], bytes] = getattr(NATIVE, "chain", chain_in_python)


def _check(parent: bytes, page_tokens: int) -> None:
    if page_tokens < 1:
        raise HashError(f"a page holds at least one token, got {page_tokens}")
    if len(parent) not in (0, HASH_BYTES):
        raise HashError(f"a parent is {HASH_BYTES} bytes or none, got {len(parent)}")


def _words(tokens: TokenIds) -> npt.NDArray[np.uint32]:
    """Returns the tokens as contiguous little-endian words; 32-bit integers are not copied."""
    given = np.asarray(tokens)
    if given.size == 0:
        return np.empty(0, "<u4")
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise HashError(f"tokens are one row of integers, got shape {given.shape} of {given.dtype}")
    low, high = int(given.min()), int(given.max())
    if low < 0 or high >= 1 << 32:
        raise HashError(f"a token is an unsigned 32-bit number, got {low if low < 0 else high}")
    if given.dtype.itemsize == 4 and given.dtype.isnative:
        given = given.view(np.uint32)
    return np.ascontiguousarray(given, "<u4")
