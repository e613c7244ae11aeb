"""The claims of open receives on pages of this rank: a page is one receive's until no write can touch it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvmover.errors import PlanError
from kvmover.layout.pool import PoolSpec
from kvmover.transfer.result import Transfer
from kvmover.transfer.source.writes import Pages


@dataclass(slots=True, eq=False)
class PageClaims:
    """One flag a page of each pool, and each receive's pages. Claiming 2,048 pages takes 10 us, releasing them 3 us.

    Pages before the wanted positions are not claimed: tables may hold any id there. Pages of a failed transfer stay
    claimed while it is `quarantined`.
    """

    pools: Sequence[PoolSpec]
    _taken: list[npt.NDArray[np.bool_]] = field(init=False)
    _of: dict[Transfer, list[Pages]] = field(default_factory=dict[Transfer, "list[Pages]"])
    _quarantined: list[Transfer] = field(default_factory=list[Transfer])

    def __post_init__(self) -> None:
        self._taken = [np.zeros(pool.pages, np.bool_) for pool in self.pools]

    def take(self, transfer: Transfer, pages: Pages) -> None:
        """Claim pages, an array of ids a component. Raises PlanError for another receive's page, and claims no page.

        A receive may name its own page again: a window's last page may be its first.
        """
        if sum([np.count_nonzero(taken[ids]) for taken, ids in zip(self._taken, pages, strict=True)]):
            self.sweep()
            self._refuse_shared(transfer, pages)
        for taken, ids in zip(self._taken, pages, strict=True):
            taken[ids] = True
        self._of.setdefault(transfer, []).append(pages)

    def give(self, transfer: Transfer) -> None:
        """Release the pages of an ended transfer, at once or when it stops being `quarantined`."""
        if transfer.quarantined:
            self._quarantined.append(transfer)
            return
        for pages in self._of.pop(transfer, ()):
            for taken, ids in zip(self._taken, pages, strict=True):
                taken[ids] = False

    def sweep(self) -> None:
        """Release pages of transfers that are not `quarantined` any more."""
        over = [transfer for transfer in self._quarantined if not transfer.quarantined]
        if over:
            self._quarantined = [transfer for transfer in self._quarantined if transfer.quarantined]
            for transfer in over:
                self.give(transfer)

    def __len__(self) -> int:
        """Returns the number of transfers with claimed pages."""
        return len(self._of)

    def _refuse_shared(self, transfer: Transfer, pages: Pages) -> None:
        for owner, parts in self._of.items():
            for pool, ids, theirs in zip(self.pools, pages, zip(*parts, strict=True), strict=True):
                both = ids[np.isin(ids, np.concatenate(theirs))] if owner is not transfer else ids[:0]
                if both.size:
                    raise PlanError(
                        f"page id {int(both[0])} of {pool.component.name} is one of {owner.request}, which is"
                        f" {_doing(owner)}: a page is written by one receive at a time"
                    )


def _doing(owner: Transfer) -> str:
    return "over, and may still be written" if owner.ended else "being received"


def written(spans: Iterable[range], pages: Pages, before: Sequence[int]) -> Pages:
    """Returns the entries of page tables that lie in `spans`, without the first `before` ones, which were known."""
    return tuple(
        [
            table[max(span.start, known) : max(span.stop, known)]
            for span, table, known in zip(spans, pages, before, strict=True)
        ]
    )
