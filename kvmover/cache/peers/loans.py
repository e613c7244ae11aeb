"""Loans: pages of the host that peers may read at this moment, and what each engine may have of them. Pure.

A loan takes nothing from its lender: no page is kept for it. When the lender needs a page for something else it recalls
every loan of that page first, and whoever was reading has a miss.
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

#: A prompt's pages up to the last one that is lent: as many as a page table of one message names. A loan names pages
#: before its own, too, so a question that begins later would cost its lender memory for pages that nobody has.
MOST_PAGES = MAX_TABLE_BYTES // PAGE_ID_BYTES

#: Loans of one rank at a time. An engine gets another only where it then has no more than what is left for the others.
MOST_LOANS = 128


class Loan(msgspec.Struct, frozen=True):
    """Pages `ids` of the host, which are a prompt's from page `first` on, lent to `engine` as `request`.

    `asked`: a digest of what was asked for, so that another question by the same name is told apart.
    """

    request: str
    engine: str
    first: int
    asked: bytes
    ids: tuple[int, ...]

    @property
    def pages(self) -> int:
        """How many first pages of the prompt the borrower may count on."""
        return self.first + len(self.ids)


@dataclass(slots=True)
class Loans:
    """Of one rank. `most`: at a time."""

    most: int = MOST_LOANS
    _open: dict[str, Loan] = field(default_factory=dict[str, Loan])
    _of: Counter[str] = field(default_factory=Counter[str])
    #: By page of the host, the loans that it is in.
    _lent: dict[int, set[str]] = field(default_factory=dict[int, set[str]])

    def __post_init__(self) -> None:
        if self.most < 1:
            raise TierError(f"at most {self.most} loans; at least 1")

    def __len__(self) -> int:
        return len(self._open)

    def asked(
        self, engine: str, request: str, first: int, hashes: bytes, inventory: HostInventory
    ) -> tuple[int, Loan | None]:
        """The answer to a question, in pages of the prompt, and the loan that it begins.

        The same question, of another rank of the engine or said again, has the same answer. Another question by the
        name of a loan that is out, one for pages beyond `MOST_PAGES`, or one of an engine that has as many loans as are
        left for others, is answered 0.
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
        """Whether `request` is a loan of that engine."""
        loan = self._open.get(request)
        return loan is not None and loan.engine == engine

    def recalled(self, ids: Iterable[int]) -> set[str]:
        """The loans, by request, that any of these pages is in: they are to be over before the pages are used."""
        if not self._lent:
            return set()
        return {request for page_id in ids for request in self._lent.get(page_id, ())}

    def over(self, request: str) -> None:
        """Nobody reads a loan any more. One that is unknown is no error."""
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
        """Raise InvariantBroken where sums are not those of the loans. O(pages lent): for tests."""
        lent = {(page_id, loan.request) for loan in self._open.values() for page_id in loan.ids}
        known = {(page_id, request) for page_id, names in self._lent.items() for request in names}
        if lent != known or Counter(loan.engine for loan in self._open.values()) != self._of:
            raise InvariantBroken(f"{len(self._open)} loans are out, and sums say {self._of} and {len(known)} pages")
        if len(self._open) > self.most:
            raise InvariantBroken(f"{len(self._open)} loans are out, of {self.most} at most")
