"""A HostInventory maps page hashes to the host pages that this rank has for peers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvmover.cache.prefix import InvariantBroken
from kvmover.transfer.protocol.wire import PAGE_HASH_BYTES


@dataclass(slots=True)
class HostInventory:
    """The whole pages of attention KV by hash, each from when all ranks have it until its id is freed.

    >>> inventory = HostInventory()
    >>> one, two, three = (bytes([number]) * 32 for number in range(3))
    >>> inventory.add([one, two, three], [7, 4, 9])
    >>> inventory.drop([4])
    >>> inventory.leading(one + two + three), inventory.leading(three)
    ([7], [9])
    """

    _ids: dict[bytes, int] = field(default_factory=dict[bytes, int])
    _hashes: dict[int, bytes] = field(default_factory=dict[int, bytes])

    def add(self, hashes: Sequence[bytes], ids: Sequence[int]) -> None:
        """Add pages that are on the host now. Of two copies of a page the first counts."""
        for page_hash, page_id in zip(hashes, ids, strict=True):
            if page_hash not in self._ids and page_id not in self._hashes:
                self._ids[page_hash] = page_id
                self._hashes[page_id] = page_hash

    def drop(self, ids: Iterable[int]) -> None:
        """Drop host pages that are being reused; unknown ids are no error."""
        for page_id in ids:
            page_hash = self._hashes.pop(page_id, None)
            if page_hash is not None:
                del self._ids[page_hash]

    def leading(self, hashes: bytes) -> list[int]:
        """Return the host pages of the leading `hashes`, 32 bytes each, up to a missing page. O(pages found)."""
        found: list[int] = []
        for at in range(0, len(hashes) - PAGE_HASH_BYTES + 1, PAGE_HASH_BYTES):
            page_id = self._ids.get(hashes[at : at + PAGE_HASH_BYTES])
            if page_id is None:
                break
            found.append(page_id)
        return found

    def __len__(self) -> int:
        return len(self._ids)

    def check(self) -> None:
        """Raise InvariantBroken unless each page has one hash and each hash one page. O(pages): for tests."""
        if {page_id: page_hash for page_hash, page_id in self._ids.items()} != self._hashes:
            raise InvariantBroken(f"{len(self._ids)} hashes are of {len(self._hashes)} pages, and not one each")
