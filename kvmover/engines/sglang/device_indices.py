"""DeviceIndices maps the page ids of a prefix tree to SGLang's token indices, which stay on the device.

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

from kvmover.cache.prefix import NO_IDS, PageArray, PrefixError

#: Copies a host row to the device in the current stream, without waiting for it.
ToDevice: TypeAlias = Callable[[npt.NDArray[np.int64]], torch.Tensor]

#: Default size of a table, pages.
_FIRST_PAGES = 512
#: Attempts to find a free run of ids; most slices that are read one by one.
_TRIES, _SLICES = 4, 8
#: Up to so many ids, sending their places to the device is faster than finding runs among them.
_FEW = 512


class DeviceIndices:
    """A device table from page id, counted from 0, to the token index at which the page begins.

    Device work is queued on the caller's current stream, in order of the calls.

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
        self._to_device = to_device
        self._first = torch.zeros(size, dtype=torch.int64, device=device)
        self._within = torch.arange(page_tokens, dtype=torch.int64, device=device)
        self._ids = _counted(size)
        #: In-use flag per id: a bytearray to search, and an array over the same memory.
        self._in_use, self._flags = _unused(size)
        #: Number of ids in use, and the id at which the next search starts.
        self._count = self._next = 0

    def __len__(self) -> int:
        """Returns the number of kept pages."""
        return self._count

    def keep(self, indices: torch.Tensor) -> PageArray:
        """Returns new ids for the whole pages of `indices` [token], in order. The caller must not write to it."""
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
        """Returns the token indices of these pages, int64 [token], in order, in a tensor that the caller owns."""
        slices = self._slices(ids)
        if self._page_tokens == 1:
            return self._read(ids, slices)
        first = self._first[slices[0]] if len(slices) == 1 else self._read(ids, slices)
        return (first.unsqueeze(1) + self._within).view(-1)

    def replace(self, ids: PageArray, indices: torch.Tensor) -> None:
        """Map these ids to the whole pages of `indices` [token] from now on."""
        self._write(ids, self._slices(ids), indices)

    def forget(self, ids: PageArray) -> torch.Tensor:
        """Free these ids. Returns the page numbers they stood for, int64: token index // `page_tokens`.

        Raises PrefixError for more ids than are kept.
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
        """Returns the slices of `_rows`: a single slice in less time, and several only for more than `_FEW` ids."""
        count = len(ids)
        if count and int(ids[-1]) - (first := int(ids[0])) == count - 1:
            row = slice(first, first + count)
            if self._ids[row].tobytes() == ids.tobytes():
                return [row]
        return _rows(ids) if count > _FEW else []

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
    """Returns `ids` as slices of consecutive ids; empty if that takes more than `_SLICES`.

    >>> _rows(np.array([4, 5, 6, 2, 3], np.int32))
    [slice(4, 7, None), slice(2, 4, None)]
    """
    ends = np.flatnonzero(ids[1:] != ids[:-1] + 1)
    if len(ends) >= _SLICES or not len(ids):
        return []
    firsts, lasts = [0, *(ends + 1).tolist()], [*ends.tolist(), len(ids) - 1]
    return [slice(int(ids[first]), int(ids[last]) + 1) for first, last in zip(firsts, lasts, strict=True)]
