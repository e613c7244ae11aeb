"""DeviceIndices maps the page ids of a prefix tree to SGLang's token indices, which stay where the engine has them.

SGLang's free lists, request rows and indices are GPU tensors; reading them on the host would wait for the stream at
every insert. So a tree gets ids allocated here, and a device table holds each id's index, never read by the host.

Ids allocated together are consecutive where the table, kept half empty, has such a run. A request is then a slice of
the table, found without a transfer to the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvmover.cache.prefix import NO_IDS, PageArray, PrefixError, id_runs

#: Copies a host row to the device in the current stream, without waiting for it.
ToDevice: TypeAlias = Callable[[npt.NDArray[np.int64]], torch.Tensor]

#: Default size of a table, pages.
_FIRST_PAGES = 512
#: Attempts to find a free run of ids; most runs that are read slice by slice, which sends nothing to the device.
_TRIES, _RUNS = 4, 8


class DeviceIndices:
    """An IndexTable on a device. Device work is queued on the caller's current stream, in order of the calls.

    >>> indices = DeviceIndices(4, torch.device("cpu"), torch.from_numpy)
    >>> kept = indices.keep(torch.tensor([8, 9, 10, 11, 4, 5, 6, 7]))
    >>> kept.tolist(), indices.of(kept[1:]).tolist()
    ([0, 1], [4, 5, 6, 7])
    >>> indices.forget(kept).tolist()
    [2, 1]
    """

    def __init__(self, page_tokens: int, device: torch.device, to_device: ToDevice, pages: int = _FIRST_PAGES) -> None:
        """Allocate a table for `pages` pages, the size of the engine's pool.

        A smaller table doubles when it fills up, which stalls the scheduler.
        """
        size = 2 * max(pages, 1)
        self._page_tokens = page_tokens
        self._table = _TensorTable(page_tokens, device, to_device, size)
        self._ids = _counted(size)
        #: In-use flag per id: a bytearray to search, and an array over the same memory.
        self._in_use, self._flags = _unused(size)
        #: Number of ids in use, and the id at which the next search starts.
        self._count = self._next = 0

    def __len__(self) -> int:
        """See IndexTable."""
        return self._count

    def keep(self, indices: torch.Tensor, first: int = 0, stop: int | None = None) -> PageArray:
        """See IndexTable."""
        count = ((indices.shape[0] if stop is None else stop) - first) // self._page_tokens
        if count == 0:
            return NO_IDS
        self._count += count
        while len(self._ids) < 2 * self._count:
            self._grow()
        row = self._row(count)
        ids = self._scattered(count) if row is None else self._ids[row]
        self._flags[ids if row is None else row] = 1
        self._table.write(ids, [] if row is None else [row], indices, first)
        return ids

    def of(self, ids: PageArray) -> torch.Tensor:
        """See IndexTable."""
        return self._table.tokens(ids, id_runs(ids, _RUNS))

    def replace(self, ids: PageArray, indices: torch.Tensor) -> None:
        """See IndexTable."""
        self._table.write(ids, id_runs(ids, _RUNS), indices)

    def forget(self, ids: PageArray) -> torch.Tensor:
        """See IndexTable."""
        if len(ids) > self._count:
            raise PrefixError(f"{len(ids)} pages to forget, of {self._count} that are kept")
        runs = id_runs(ids, _RUNS)
        pages = self._table.pages(ids, runs)
        for each in runs:
            self._flags[each] = 0
        if not runs:
            self._flags[ids] = 0
        self._count -= len(ids)
        return pages

    def _row(self, count: int) -> slice | None:
        """Returns a slice of `count` consecutive unused ids; None if `_TRIES` attempts find too short runs."""
        at = self._next
        for _ in range(_TRIES):
            if at + count > len(self._ids):
                at = 0
            last = self._in_use.rfind(1, at, at + count)
            if last < 0:
                self._next = at + count
                return slice(at, at + count)
            at = last + 1
        self._next = at
        return None

    def _scattered(self, count: int) -> PageArray:
        """Returns any `count` unused ids, near the last allocated ones if there are enough."""
        near = self._next + np.flatnonzero(self._flags[self._next : self._next + 8 * count] == 0)[:count]
        free = near if len(near) == count else np.flatnonzero(self._flags == 0)[:count]
        return free.astype(np.int32)

    def _grow(self) -> None:
        before = self._flags
        self._table.double()
        self._ids = _counted(2 * len(before))
        self._in_use, self._flags = _unused(2 * len(before))
        self._flags[: len(before)] = before


def _counted(count: int) -> PageArray:
    ids = np.arange(count, dtype=np.int32)
    ids.flags.writeable = False
    return ids


def _unused(count: int) -> tuple[bytearray, npt.NDArray[np.uint8]]:
    in_use = bytearray(count)
    return in_use, np.frombuffer(in_use, np.uint8)


class _TensorTable:
    """A table on the device, never read by the host. `runs`: the ids as slices, if few enough."""

    def __init__(self, page_tokens: int, device: torch.device, to_device: ToDevice, ids: int) -> None:
        self._page_tokens, self._to_device = page_tokens, to_device
        self._pages = torch.zeros(ids, dtype=torch.int64, device=device)
        self._within = torch.arange(page_tokens, dtype=torch.int64, device=device)

    def write(self, ids: PageArray, runs: list[slice], indices: torch.Tensor, first: int = 0) -> None:
        """Write the page numbers of `indices` [token], from token `first` on, in order of `ids`."""
        size = self._page_tokens
        pages = indices[first : first + len(ids) * size : size]
        if len(runs) != 1:
            self._pages.index_copy_(0, self._placed(ids), torch.floor_divide(pages, size).to(torch.int64))
        elif size == 1:
            self._pages[runs[0]] = pages
        else:
            torch.floor_divide(pages, size, out=self._pages[runs[0]])

    def pages(self, ids: PageArray, runs: list[slice]) -> torch.Tensor:
        """Returns page numbers, int64 [page], in a tensor of the caller's."""
        if len(runs) == 1:
            return self._pages[runs[0]].clone()
        if runs:
            return torch.cat([self._pages[each] for each in runs])
        return self._pages.index_select(0, self._placed(ids))

    def tokens(self, ids: PageArray, runs: list[slice]) -> torch.Tensor:
        """Returns token indices, int64 [token], in a tensor of the caller's."""
        if self._page_tokens == 1:
            return self.pages(ids, runs)
        pages = self._pages[runs[0]] if len(runs) == 1 else self.pages(ids, runs)
        return torch.add(self._within, pages.unsqueeze(1), alpha=self._page_tokens).view(-1)

    def double(self) -> None:
        """Make room for twice as many ids."""
        self._pages = torch.cat([self._pages, torch.zeros_like(self._pages)])

    def _placed(self, ids: PageArray) -> torch.Tensor:
        return self._to_device(ids.astype(np.int64))
