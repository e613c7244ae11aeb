"""PageClaims: the pages that open receives of this rank write. A page is one receive's until nothing can write it."""

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
    """A flag a page of each pool, and whose it is. Claiming 2,048 pages takes 10 us, giving them back 3.

    Pages before what a request wants are nobody's: tables are filled up with any. Those of a failed transfer that is
    `held` stay its own for as long as it is.
    """

    pools: Sequence[PoolSpec]
    _taken: list[npt.NDArray[np.bool_]] = field(init=False)
    _of: dict[Transfer, list[Pages]] = field(default_factory=dict[Transfer, "list[Pages]"])
    _held: list[Transfer] = field(default_factory=list[Transfer])

    def __post_init__(self) -> None:
        self._taken = [np.zeros(pool.pages, np.bool_) for pool in self.pools]

    def take(self, transfer: Transfer, pages: Pages) -> None:
        """Claim pages, an array of ids a component. Raises PlanError for one that another receive has, and takes none.

        A receive may name a page of its own again: a window's last page may be its first.
        """
        if any(taken[ids].any() for taken, ids in zip(self._taken, pages, strict=True)):
            self.sweep()
            self._refuse_shared(transfer, pages)
        for taken, ids in zip(self._taken, pages, strict=True):
            taken[ids] = True
        self._of.setdefault(transfer, []).append(pages)

    def give(self, transfer: Transfer) -> None:
        """The transfer has ended: its pages are the engine's, at once or when it is held no more."""
        if transfer.held:
            self._held.append(transfer)
            return
        for pages in self._of.pop(transfer, ()):
            for taken, ids in zip(self._taken, pages, strict=True):
                taken[ids] = False

    def sweep(self) -> None:
        """Give back what is held no more."""
        over = [transfer for transfer in self._held if not transfer.held]
        if over:
            self._held = [transfer for transfer in self._held if transfer.held]
            for transfer in over:
                self.give(transfer)

    def __len__(self) -> int:
        """How many transfers have any."""
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
    """Returns the entries within `spans` of page tables that were `before` entries long, less those known then."""
    return tuple(
        table[max(span.start, known) : max(span.stop, known)]
        for span, table, known in zip(spans, pages, before, strict=True)
    )
