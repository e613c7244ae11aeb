"""A PageBounce copies pages between a pool and the page store where their axes differ in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmover.layout import Pool
from kvmover.regions import Move, page_region
from kvmover.store import GotResult, PartView, PutResult


@dataclass(frozen=True, slots=True)
class PageBounce:
    """A way through packed memory, of `pool`'s heads, layers and tokens in the store's order.

    Register `packed` with the store behind `view`; one thread at a time may use it. `move` must return when all is
    copied.
    """

    pool: Pool
    packed: Pool
    view: PartView
    move: Move

    def put(self, pages: Sequence[bytes], ids: Sequence[int]) -> list[PutResult]:
        """Write pages `ids` [page] under the hashes `pages`. Returns as `PartView.put`."""
        results: list[PutResult] = []
        for turn in self._turns(len(pages)):
            self.move([page_region(self.pool, ids[turn.start : turn.stop], self.packed, range(len(turn)))])
            results += self.view.put(pages[turn.start : turn.stop], self._addresses(len(turn)))
        return results

    def get(self, pages: Sequence[bytes], ids: Sequence[int]) -> list[GotResult]:
        """Read into pages `ids` [page]; a failed one is unchanged. Returns as `PartView.get`."""
        results: list[GotResult] = []
        for turn in self._turns(len(pages)):
            got = self.view.get(pages[turn.start : turn.stop], self._addresses(len(turn)))
            good = [number for number, result in enumerate(got) if result.ok]
            self.move([page_region(self.packed, good, self.pool, [ids[turn[number]] for number in good])])
            results += got
        return results

    def _turns(self, count: int) -> list[range]:
        most = self.packed.spec.pages
        return [range(first, min(first + most, count)) for first in range(0, count, most)]

    def _addresses(self, count: int) -> list[int]:
        first, step = self.packed.tensors[0].data_ptr(), self.packed.spec.stride_bytes("page")
        return [first + number * step for number in range(count)]
