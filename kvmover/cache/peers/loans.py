"""Loans are host pages that peers may read now, shared out among engines. Pure.

A loan reserves no page. When the lender needs a page for other KV it first recalls every loan of that page, and the
borrower has a miss.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from kvmover.cache.peers.inventory import HostInventory
from kvmover.cache.prefix import InvariantBroken
from kvmover.errors import TierError
from kvmover.transfer.protocol.wire import MAX_TABLE_BYTES, PAGE_HASH_BYTES, PAGE_ID_BYTES

#: The most pages of a prompt up to the last one lent: as many as one message's page table names. A loan's table also
#: names the pages before its own, so a late start would cost its lender memory for pages that it does not lend.
MOST_PAGES = MAX_TABLE_BYTES // PAGE_ID_BYTES

#: The most open loans of one rank. An engine gets a further loan only if it then has no more than are left for the
#: rest.
MOST_LOANS = 128


class Loan(msgspec.Struct, frozen=True):
    """A loan of host pages `ids` to `engine` as `request`: the prompt's pages from page `first` on.

    `asked`: a digest of the question, to tell another question of the same name apart.
    """

    request: str
    engine: str
    first: int
    asked: bytes
    ids: tuple[int, ...]

    @property
    def pages(self) -> int:
        """The number of leading pages of the prompt that the borrower may count on."""
        return self.first + len(self.ids)


@dataclass(slots=True)
class Loans:
    """The open loans of one rank, `most` at a time. Raises TierError if `most` is below 1."""

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

        The same question, repeated or from another rank of the engine, gets the same answer. The answer is 0 for
        another question under the name of an open loan, for pages beyond `MOST_PAGES`, and for an engine that has as
        many loans as are left for the rest.
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
        """Return the loans, by request, of any of these pages: they must be over before the pages are reused."""
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
        """Raise InvariantBroken if sums do not match the loans. O(pages lent): for tests."""
        lent = {(page_id, loan.request) for loan in self._open.values() for page_id in loan.ids}
        known = {(page_id, request) for page_id, names in self._lent.items() for request in names}
        if lent != known or Counter(loan.engine for loan in self._open.values()) != self._of:
            raise InvariantBroken(f"{len(self._open)} loans are out, and sums say {self._of} and {len(known)} pages")
        if len(self._open) > self.most:
            raise InvariantBroken(f"{len(self._open)} loans are out, of {self.most} at most")
