"""A page's hash follows from its namespace and all tokens up to its end, so that no split changes it.

As SGLang 0.5.23 computes them for its storage tiers (`mem_cache/cpp_utils/hash_binding.cpp`), and so comparable with
its keys: SHA-256 over the previous page's hash and the page's tokens as unsigned 32-bit little-endian words. The first
page starts from the namespace: what else must be equal, beside the tokens, for two prompts to share KV.
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
    """Model, adapter, tenant salt and further keys (an image's digest, a session): what shares KV is equal in all.

    Fields are compared and hashed one by one, never joined: an adapter "ab" with salt "c" is not "a" with "bc". Engines
    that append the adapter to another key cannot tell those apart (SGLang 0.5.23, `schedule_batch.py`).
    """

    model: str = ""
    adapter: str = ""
    salt: str = ""
    extra: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """The salt, which may be a secret, is told by a digest of it: namespaces that differ by it differ here too."""
        salt = f"#{sha256(self.salt.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}" if self.salt else ""
        return f"PrefixNamespace(model={self.model!r}, adapter={self.adapter!r}, salt={salt!r}, extra={self.extra!r})"

    @property
    def digest(self) -> bytes:
        """32 bytes that page hashes start from; empty for the namespace of all defaults.

        So hashes of requests without model, adapter and salt equal SGLang's, which start from nothing too.
        """
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

#: An array, array.array or memoryview of integers, which is not copied where it holds 32-bit words, or plain integers.
TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer] | memoryview


class HashError(KvmoverError, ValueError):
    """Tokens or a parent that no page hash can be made of: the message names the value."""


def chain(parent: bytes, tokens: TokenIds, page_tokens: int) -> list[bytes]:
    """Hashes of the whole pages of `tokens`, each chained from the one before; a tail shorter than a page has none.

    `parent` is the hash of the page before the first, or the namespace's digest (`b""` for none). One call over all
    pages gives what a call for each part gives, when each starts from the last hash of the part before.

    >>> [page.hex()[:16] for page in chain(b"", [1, 2, 3, 4, 5], 2)]
    ['34fb5c825de7ca4a', 'c57b445f90651b9a']
    """
    words = _words(tokens)
    _check(parent, page_tokens)
    return chain_bytes(parent, words.tobytes(), WORD_BYTES * page_tokens)


def chain_bigrams(parent: bytes, tokens: TokenIds, page_tokens: int) -> list[bytes]:
    """`chain` where a unit is a pair of neighbouring tokens: N tokens make N - 1 units, as in caches of draft heads.

    Both tokens of every pair are hashed, so a page of `page_tokens` units is 8 bytes a unit.
    """
    words = _words(tokens)
    _check(parent, page_tokens)
    pairs = np.stack([words[:-1], words[1:]], axis=1).reshape(-1)
    return chain_bytes(parent, pairs.tobytes(), 2 * WORD_BYTES * page_tokens)


def as_int64(page_hash: bytes) -> int:
    """The hash as routers are told it: its first eight bytes, big-endian and signed (SGLang's `hash_str_to_int64`).

    >>> as_int64(bytes.fromhex("ffffffffffffffff") + bytes(24))
    -1
    """
    return int.from_bytes(page_hash[:8], "big", signed=True)


def as_int64s(page_hashes: Sequence[bytes]) -> tuple[int, ...]:
    """`as_int64` of each, in half the time: a long prompt has thousands."""
    return unpack(f">{len(page_hashes) * (HASH_BYTES // 8)}q", b"".join(page_hashes))[:: HASH_BYTES // 8]


def chain_in_python(parent: bytes, data: bytes, page_bytes: int) -> list[bytes]:
    """See `chain_bytes`."""
    hashes = list[bytes]()
    for first in range(0, len(data) - page_bytes + 1, page_bytes):
        parent = sha256(parent + data[first : first + page_bytes]).digest()
        hashes.append(parent)
    return hashes


#: `(parent, data, page_bytes)`: `chain` of bytes, unchecked. In C where the processor has SHA instructions.
chain_bytes: Callable[[bytes, bytes, int], list[bytes]] = getattr(NATIVE, "chain", chain_in_python)


def _check(parent: bytes, page_tokens: int) -> None:
    if page_tokens < 1:
        raise HashError(f"a page holds at least one token, got {page_tokens}")
    if len(parent) not in (0, HASH_BYTES):
        raise HashError(f"a parent is {HASH_BYTES} bytes or none, got {len(parent)}")


def _words(tokens: TokenIds) -> npt.NDArray[np.uint32]:
    """The tokens as contiguous little-endian words; without a copy where they are 32-bit integers already."""
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
