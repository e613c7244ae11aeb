"""The page ids that a prefix tree works with stand for SGLang's token indices, which stay on the device.

SGLang's free lists, rows of requests and indices are tensors on the GPU. A tree wants integers on the host; to read
them there would wait for the stream at every insert. So the tree is given ids of our own, and a table on the device
says which index each stands for: it is written when a page is kept, read when a prefix is used or given up, and no
value of it is ever needed on the host.

Ids that are given out together follow each other wherever the table has so many in a row, and it is kept half empty for
that. Then a request is a slice of the table, and nothing is sent to the device to find it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvmover.cache.prefix import NO_IDS, PageArray, PrefixError

#: Puts a row of the host on the device behind what the current stream does, without waiting for it.
ToDevice: TypeAlias = Callable[[npt.NDArray[np.int64]], torch.Tensor]

#: Pages that a table is made for where nobody says more.
_FIRST_PAGES = 512
#: Rows of ids that are looked at for one that is long enough, and slices that are read rather than single places.
_TRIES, _SLICES = 4, 8


class DeviceIndices:
    """Which token index each page of `page_tokens` tokens begins at, by page ids that count from 0.

    Everything on the device is done in the caller's current stream, in order of the calls.

    >>> indices = DeviceIndices(4, torch.device("cpu"), torch.from_numpy)
    >>> kept = indices.keep(torch.tensor([8, 9, 10, 11, 4, 5, 6, 7]))
    >>> kept.tolist(), indices.of(kept[1:]).tolist()
    ([0, 1], [4, 5, 6, 7])
    >>> indices.forget(kept).tolist()
    [2, 1]
    """

    def __init__(self, page_tokens: int, device: torch.device, to_device: ToDevice, pages: int = _FIRST_PAGES) -> None:
        """`pages`: as many as the engine's pool has. A table for fewer doubles on the way, which stops the scheduler
        for a while.
        """
        size = 2 * max(pages, 1)
        self._page_tokens = page_tokens
        self._to_device = to_device
        self._first = torch.zeros(size, dtype=torch.int64, device=device)
        self._within = torch.arange(page_tokens, dtype=torch.int64, device=device)
        self._ids = _counted(size)
        #: By id, whether it is in use: to be searched, and as an array of the same memory.
        self._in_use, self._flags = _unused(size)
        #: Ids in use, and where the search for others goes on.
        self._count = self._next = 0

    def __len__(self) -> int:
        """Pages that are kept."""
        return self._count

    def keep(self, indices: torch.Tensor) -> PageArray:
        """New ids for the whole pages of `indices`, a row of token indices, in order; read-only."""
        count = len(indices) // self._page_tokens
        if count == 0:
            return NO_IDS
        self._count += count
        while len(self._ids) < 2 * self._count:
            self._grow()
        row = self._row(count)
        ids = self._scattered(count) if row is None else self._ids[row]
        self._flags[ids if row is None else row] = 1
        self._write(ids, [] if row is None else [row], indices)
        return ids

    def of(self, ids: PageArray) -> torch.Tensor:
        """The token indices of these pages, int64, in order; a tensor of the caller's own."""
        slices = self._slices(ids)
        if self._page_tokens == 1:
            return self._read(ids, slices)
        first = self._first[slices[0]] if len(slices) == 1 else self._read(ids, slices)
        return (first.unsqueeze(1) + self._within).view(-1)

    def replace(self, ids: PageArray, indices: torch.Tensor) -> None:
        """These ids stand for the whole pages of `indices` from now on."""
        self._write(ids, self._slices(ids), indices)

    def forget(self, ids: PageArray) -> torch.Tensor:
        """These ids stand for nothing any more. The pages that they stood for, int64, counted from index 0 on.

        Raises PrefixError for more than are kept.
        """
        if len(ids) > self._count:
            raise PrefixError(f"{len(ids)} pages to forget, of {self._count} that are kept")
        slices = self._slices(ids)
        first = self._read(ids, slices)
        if slices:
            for each in slices:
                self._flags[each] = 0
        else:
            self._flags[ids] = 0
        self._count -= len(ids)
        return first if self._page_tokens == 1 else first // self._page_tokens

    def _write(self, ids: PageArray, slices: list[slice], indices: torch.Tensor) -> None:
        first = indices if self._page_tokens == 1 else indices[:: self._page_tokens]
        if len(slices) == 1:
            self._first[slices[0]] = first[: len(ids)]
        else:
            self._first.index_copy_(0, self._to_device(ids.astype(np.int64)), first[: len(ids)].to(torch.int64))

    def _read(self, ids: PageArray, slices: list[slice]) -> torch.Tensor:
        if len(slices) == 1:
            return self._first[slices[0]].clone()
        if slices:
            return torch.cat([self._first[each] for each in slices])
        return self._first.index_select(0, self._to_device(ids.astype(np.int64)))

    def _slices(self, ids: PageArray) -> list[slice]:
        """As `_rows`: of a single row, which is most of them, in less time."""
        if len(ids):
            row = slice(int(ids[0]), int(ids[0]) + len(ids))
            if self._ids[row].tobytes() == ids.tobytes():
                return [row]
        return _rows(ids)

    def _row(self, count: int) -> slice | None:
        """Where `count` unused ids follow each other; None where that was not found soon."""
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
        """Any unused ids, near those that were given out last where there are enough."""
        near = self._next + np.flatnonzero(self._flags[self._next : self._next + 8 * count] == 0)[:count]
        free = near if len(near) == count else np.flatnonzero(self._flags == 0)[:count]
        return free.astype(np.int32)

    def _grow(self) -> None:
        before = self._flags
        self._first = torch.cat([self._first, torch.zeros_like(self._first)])
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


def _rows(ids: PageArray) -> list[slice]:
    """Where a table is read for `ids`: rows of ids that follow each other. Empty for more rows than that is worth.

    >>> _rows(np.array([4, 5, 6, 2, 3], np.int32))
    [slice(4, 7, None), slice(2, 4, None)]
    """
    ends = np.flatnonzero(ids[1:] != ids[:-1] + 1)
    if len(ends) >= _SLICES or not len(ids):
        return []
    firsts, lasts = [0, *(ends + 1).tolist()], [*ends.tolist(), len(ids) - 1]
    return [slice(int(ids[first]), int(ids[last]) + 1) for first, last in zip(firsts, lasts, strict=True)]
