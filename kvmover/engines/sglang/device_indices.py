"""The page ids that a prefix tree works with stand for SGLang's token indices, which stay on the device.

SGLang's free lists, rows of requests and indices are tensors on the GPU. A tree wants integers on the host; to read
them there would wait for the stream at every insert. So the tree is given ids of our own, and a table on the device
says which index each stands for: it is written when a page is kept, read when a prefix is used or given up, and no
value of it is ever needed on the host.
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

#: Pages that a new table has room for; it doubles when they are used up.
_FIRST_PAGES = 1024


class DeviceIndices:
    """Which token index each page of `page_tokens` tokens begins at, by page ids that count from 0.

    Everything on the device is done in the caller's current stream, in order of the calls.

    >>> indices = DeviceIndices(4, torch.device("cpu"), torch.from_numpy)
    >>> kept = indices.keep(torch.tensor([8, 9, 10, 11, 4, 5, 6, 7]))
    >>> kept.tolist(), indices.of(kept[1:]).tolist()
    ([0, 1], [4, 5, 6, 7])
    >>> indices.forget(kept)
    """

    def __init__(self, page_tokens: int, device: torch.device, to_device: ToDevice) -> None:
        self._page_tokens = page_tokens
        self._to_device = to_device
        self._first = torch.zeros(_FIRST_PAGES, dtype=torch.int64, device=device)
        self._within = torch.arange(page_tokens, dtype=torch.int64, device=device)
        #: Ids that stand for nothing: the first `_count` of this row, the next one to give out last.
        self._free = np.arange(_FIRST_PAGES, dtype=np.int32)[::-1].copy()
        self._count = _FIRST_PAGES

    def __len__(self) -> int:
        """Pages that are kept."""
        return len(self._free) - self._count

    def keep(self, indices: torch.Tensor) -> PageArray:
        """New ids for the whole pages of `indices`, a row of token indices, in order."""
        first = indices[:: self._page_tokens]
        count = len(first)
        if count == 0:
            return NO_IDS
        while self._count < count:
            self._grow()
        self._count -= count
        ids = self._free[self._count : self._count + count][::-1].copy()
        self._first.index_copy_(0, self._to_device(ids.astype(np.int64)), first.to(torch.int64))
        return ids

    def of(self, ids: PageArray) -> torch.Tensor:
        """The token indices of these pages, int64, in order; a tensor of the caller's own."""
        first = self._first.index_select(0, self._to_device(ids.astype(np.int64)))
        return first if self._page_tokens == 1 else (first[:, None] + self._within).reshape(-1)

    def replace(self, ids: PageArray, indices: torch.Tensor) -> None:
        """These ids stand for the whole pages of `indices` from now on."""
        first = indices[:: self._page_tokens].to(torch.int64)
        self._first.index_copy_(0, self._to_device(ids.astype(np.int64)), first)

    def forget(self, ids: PageArray) -> None:
        """These ids stand for nothing any more. Raises PrefixError for more than are kept."""
        if len(ids) > len(self):
            raise PrefixError(f"{len(ids)} pages to forget, of {len(self)} that are kept")
        self._free[self._count : self._count + len(ids)] = ids
        self._count += len(ids)

    def _grow(self) -> None:
        size = len(self._free)
        self._first = torch.cat([self._first, torch.zeros_like(self._first)])
        self._free = np.concatenate(
            [
                np.arange(2 * size - 1, size - 1, -1, dtype=np.int32),
                self._free[: self._count],
                np.empty(size - self._count, np.int32),
            ]
        )
        self._count += size
