"""Loans are host pages that peers may read now, shared out among engines; a HostInventory maps page hashes to them.
Pure.

A loan reserves no page. When the lender needs a page for other KV it first recalls every loan of that page, and the
borrower has a miss.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvmover.cache.prefix import InvariantBroken
from kvmover.errors import TierError
from kvmover.transfer.protocol.wire import MAX_TABLE_BYTES, PAGE_HASH_BYTES, PAGE_ID_BYTES


@dataclass(slots=True)
class HostInventory:
    """The whole pages of attention KV by hash, from when all ranks have one until its id is freed.

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
        """Add pages on the host. A hash or an id that is there already stays as it is: `drop` ids before they are
        reused.
        """
        for page_hash, page_id in zip(hashes, ids, strict=True):
            if page_hash not in self._ids and page_id not in self._hashes:
                self._ids[page_hash] = page_id
                self._hashes[page_id] = page_hash

    def drop(self, ids: Iterable[int]) -> None:
        """Drop host pages; unknown ids are no error."""
        for page_id in ids:
            page_hash = self._hashes.pop(page_id, None)
            if page_hash is not None:
                del self._ids[page_hash]

    def leading(self, hashes: bytes) -> list[int]:
        """Return the host pages of `hashes`, 32 bytes each, up to a missing page."""
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
        """Raise InvariantBroken unless pages and hashes pair."""
        if {page_id: page_hash for page_hash, page_id in self._ids.items()} != self._hashes:
            raise InvariantBroken(f"{len(self._ids)} hashes are of {len(self._hashes)} pages, and not one each")


#: The most pages of a prompt up to the last one lent: as many as one message's page table names. A loan's table also
#: names the pages before its own, so a late start would cost its lender memory for pages that it does not lend.
MOST_PAGES = MAX_TABLE_BYTES // PAGE_ID_BYTES

#: The most open loans of one rank. An engine gets a further loan only if it then has no more than are left for the
#: rest.
MOST_LOANS = 128


class Loan(msgspec.Struct, frozen=True):
    """A loan of host pages `ids` to `engine` as `request`: the prompt's pages from `first` on.

    `asked`: a digest of the question.
    """

    request: str
    engine: str
    first: int
    asked: bytes
    ids: tuple[int, ...]

    @property
    def pages(self) -> int:
        """Returns the prompt's leading pages up to the last lent."""
        return self.first + len(self.ids)


@dataclass(slots=True)
class Loans:
    """The open loans of one rank. Raises TierError if `most` is below 1."""

    most: int = MOST_LOANS
    _open: dict[str, Loan] = field(default_factory=dict[str, Loan])
    _of: Counter[str] = field(default_factory=Counter[str])
    #: The loans of each host page.
    _lent: dict[int, set[str]] = field(default_factory=dict[int, set[str]])

    def __post_init__(self) -> None:
        if self.most < 1:
            raise TierError(f"at most {self.most} loans; at least 1")

    def __len__(self) -> int:
        return len(self._open)

    def asked(
        self, engine: str, request: str, first: int, hashes: bytes, inventory: HostInventory
    ) -> tuple[int, Loan | None]:
        """Answer a remote lookup: the number of leading pages held here, and the loan created, or None.

        A repeated question gets the same answer. The answer is 0 for another question under an open loan's name, beyond
        `MOST_PAGES`, and for an engine that has as many loans as are left for the rest.
        """
        mark = hashlib.sha256(first.to_bytes(8) + hashes).digest()
        known = self._open.get(request)
        if known is not None:
            return (known.pages if (known.engine, known.asked) == (engine, mark) else 0), None
        if self._of[engine] >= self.most - len(self._open) or first + len(hashes) // PAGE_HASH_BYTES > MOST_PAGES:
            return 0, None
        ids = inventory.leading(hashes)
        if not ids:
            return 0, None
        loan = Loan(request, engine, first, mark, tuple(ids))
        self._open[request] = loan
        self._of[engine] += 1
        for page_id in ids:
            self._lent.setdefault(page_id, set()).add(request)
        return loan.pages, loan

    def lends(self, engine: str, request: str) -> bool:
        """Return True if `request` is a loan of `engine`."""
        loan = self._open.get(request)
        return loan is not None and loan.engine == engine

    def recalled(self, ids: Iterable[int]) -> set[str]:
        """Return the requests of these pages' loans, to be over before the pages are reused."""
        if not self._lent:
            return set()
        return {request for page_id in ids for request in self._lent.get(page_id, ())}

    def over(self, request: str) -> None:
        """End a loan; an unknown request is no error."""
        loan = self._open.pop(request, None)
        if loan is None:
            return
        self._of[loan.engine] -= 1
        if not self._of[loan.engine]:
            del self._of[loan.engine]
        for page_id in loan.ids:
            names = self._lent[page_id]
            names.discard(request)
            if not names:
                del self._lent[page_id]

    def check(self) -> None:
        """Raise InvariantBroken if sums do not match the loans."""
        lent = {(page_id, loan.request) for loan in self._open.values() for page_id in loan.ids}
        known = {(page_id, request) for page_id, names in self._lent.items() for request in names}
        if lent != known or Counter(loan.engine for loan in self._open.values()) != self._of:
            raise InvariantBroken(f"{len(self._open)} loans are out, and sums say {self._of} and {len(known)} pages")
        if len(self._open) > self.most:
            raise InvariantBroken(f"{len(self._open)} loans are out, of {self.most} at most")
