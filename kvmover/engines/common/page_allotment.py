"""A PageAllotment has a pool's pages that no request has and no transfer may still touch."""

from __future__ import annotations

from collections.abc import Iterable

from kvmover.errors import KvmoverError
from kvmover.transfer import Transfer


class NoFreePages(KvmoverError):
    """A request for more pages than are free: of other requests, or of transfers that may still touch them."""


class PageAllotment:
    """The free pages among `count`, for one thread."""

    def __init__(self, count: int) -> None:
        self._count, self._free = count, list(range(count))
        self._lent: list[tuple[tuple[Transfer, ...], list[int]]] = []

    def __len__(self) -> int:
        """Returns the number of free pages."""
        self._collect()
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Returns `count` pages, which are the caller's from now on. Raises NoFreePages."""
        if count > len(self):
            lent = sum(len(pages) for _, pages in self._lent)
            raise NoFreePages(f"{count} pages of {self._count}: {len(self._free)} are free, transfers have {lent}")
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, pages: Iterable[int], transfers: Iterable[Transfer] = ()) -> None:
        """Free pages once each of their `transfers` has ended and is not quarantined."""
        self._lent.append((tuple(transfers), list(pages)))
        self._collect()

    def _collect(self) -> None:
        waiting: list[tuple[tuple[Transfer, ...], list[int]]] = []
        for transfers, pages in self._lent:
            if all(each.ended and not each.quarantined for each in transfers):
                self._free += pages
            else:
                waiting.append((transfers, pages))
        self._lent = waiting
