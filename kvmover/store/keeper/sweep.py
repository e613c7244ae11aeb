"""A Sweep reads pages of proved slabs straight to their addresses, in bulk and without digest checks.

A proved slab is sealed, and was compared with its digests since: a read of it is right or comes short. All other pages
are left to `fetch`, which checks every cell.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from kvmover.c_core import NATIVE
from kvmover.store.index import Alike
from kvmover.store.objects import Plan
from kvmover.store.part import PagePart
from kvmover.store.stored import Rows

Runs = npt.NDArray[np.int64]

#: Bytes per task of a reading thread.
_TURN_BYTES = 16 << 20


class Sweep:
    """The runs of slabs that make up some pages of a batch, with the page's index and the slab of each run."""

    def __init__(self, part: PagePart) -> None:
        self._part = part
        self._items = list[Rows]()
        self._slabs = list[Rows]()
        self._runs = list[Runs]()

    def plan(self, pages: Alike, plan: Plan, addresses: npt.NDArray[np.int64], proved: npt.NDArray[np.bool_]) -> None:
        """Add those of `pages` that lie in proved slabs and whose cells are copied whole.

        `addresses`: destination per page of the batch. `proved`: mask by slab number.
        """
        shares = plan(pages.parts)
        if not shares or any(share.piece.tokens for share in shares):
            return
        numbers = [share.number for share in shares]
        cells = np.array([pages.parts[number].box.cells for number in numbers])
        sound = (pages.sizes[numbers] == cells[:, None] * self._part.cell_bytes).all(0)
        plain = np.flatnonzero(proved[pages.segments[numbers]].all(0) & sound)
        items, cell = pages.items[plain], self._part.cell_bytes
        for share in shares:
            offsets, slabs = pages.offsets[share.number, plain], pages.segments[share.number, plain]
            for run in share.runs:
                runs = np.empty((len(plain), 4), np.int64)
                runs[:, 1] = offsets + run.source_cell * cell
                runs[:, 2] = addresses[items] + run.part_cell * cell
                runs[:, 3] = run.count * cell
                self._items.append(items)
                self._slabs.append(slabs)
                self._runs.append(runs)

    def sort(self, names: Sequence[str]) -> list[str]:
        """Sort the runs by slab and offset. Returns the names of their slabs."""
        if not self._runs:
            return []
        items, slabs, runs = (np.concatenate(each) for each in (self._items, self._slabs, self._runs))
        order = np.lexsort((runs[:, 1], slabs))
        self._items, self._slabs, self._runs = [items[order]], [slabs[order]], [runs[order]]
        numbers: list[int] = np.unique(slabs).tolist()
        return [names[number] for number in numbers]

    def read(self, fds: npt.NDArray[np.int64], pool: Executor) -> list[int]:
        """Read all runs. Returns the indices of the pages that came whole.

        `fds`: descriptor by slab number, -1 if the slab is gone.
        """
        if not self._runs:
            return []
        (items,), (slabs,), (runs,) = self._items, self._slabs, self._runs
        runs[:, 0] = fds[slabs]
        turns = np.flatnonzero(np.diff(np.cumsum(runs[:, 3]) // _TURN_BYTES)) + 1
        some = np.split(runs, turns)
        whole = b"".join(pool.map(gather, some) if len(some) > 1 else map(gather, some))
        torn = items[np.frombuffer(whole, np.uint8) == 0]
        return np.setdiff1d(items, torn).tolist()


def gather(runs: Runs) -> bytes:
    """Read runs, rows of (descriptor, offset, address, bytes). Returns a byte per run: 1 if read whole, else 0."""
    if NATIVE is not None:
        return NATIVE.gather(runs)
    return bytes(_came(*run) for run in runs.tolist())


def _came(fd: int, offset: int, address: int, nbytes: int) -> bool:
    try:
        return os.preadv(fd, [(ctypes.c_char * nbytes).from_address(address)], offset) == nbytes
    except OSError:
        return False
