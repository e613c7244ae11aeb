"""An index table leads from the page ids of a prefix tree to SGLang's token indices, on the device or the host."""

from __future__ import annotations

from typing import Any, Protocol, cast

import numpy as np
import torch

from kvmover.c_core import NATIVE
from kvmover.cache.prefix import NO_IDS, PageArray, PrefixError
from kvmover.engines.sglang.device_indices import DeviceIndices, ToDevice

#: A tensor over a row's memory, in a third of the time of `as_tensor`.
_over: Any = cast(Any, torch).from_numpy


class IndexTable(Protocol):
    """A table from page id, counted from 0, to the number of a page, its token index // `page_tokens`."""

    def __len__(self) -> int:
        """Returns the number of kept pages."""
        ...

    def keep(self, indices: torch.Tensor, first: int = 0, stop: int | None = None) -> PageArray:
        """Returns new ids for the whole pages of `indices[first:stop]` [token], in order; to be read only."""
        ...

    def of(self, ids: PageArray) -> torch.Tensor:
        """Returns the token indices of these pages, int64 [token], in order, in a tensor that the caller owns."""
        ...

    def replace(self, ids: PageArray, indices: torch.Tensor) -> None:
        """Map these ids to the whole pages of `indices` [token] from now on."""
        ...

    def forget(self, ids: PageArray) -> torch.Tensor:
        """Free these ids. Returns the page numbers they stood for, int64: token index // `page_tokens`.

        Raises PrefixError for more ids than are kept.
        """
        ...


class HostIndices:
    """An IndexTable in host memory, for servers without a device, with the C core: a call takes no tensor operation.

    No id needs a neighbour here, so the ids that were freed last are given first.
    """

    def __init__(self, page_tokens: int, pages: int) -> None:
        """Allocate a table for `pages` pages, the size of the engine's pool. It grows when it fills up."""
        self._core: Any = NATIVE
        self._page_tokens, self._count = page_tokens, 0
        self._pages = np.zeros(max(pages, 1), np.int64)
        #: Every id once; those behind the first `_count` are unused, the last ones freed first.
        self._ids = np.arange(len(self._pages), dtype=np.int32)

    def __len__(self) -> int:
        """See IndexTable."""
        return self._count

    def keep(self, indices: torch.Tensor, first: int = 0, stop: int | None = None) -> PageArray:
        """See IndexTable."""
        row = indices.numpy()[first:stop]
        before, count = self._count, len(row) // self._page_tokens
        if count == 0:
            return NO_IDS
        self._count = before + count
        while len(self._ids) < self._count:
            self._double()
        ids = self._ids[before : self._count].copy()
        self._core.keep_pages(self._pages, ids, row, self._page_tokens)
        return ids

    def of(self, ids: PageArray) -> torch.Tensor:
        """See IndexTable."""
        row = np.empty(len(ids) * self._page_tokens, np.int64)
        self._core.page_tokens_of(self._pages, ids, row, self._page_tokens)
        return _over(row)

    def replace(self, ids: PageArray, indices: torch.Tensor) -> None:
        """See IndexTable."""
        self._core.keep_pages(self._pages, ids, indices.numpy(), self._page_tokens)

    def forget(self, ids: PageArray) -> torch.Tensor:
        """See IndexTable."""
        before, count = self._count, self._count - len(ids)
        if count < 0:
            raise PrefixError(f"{len(ids)} pages to forget, of {before} that are kept")
        pages = self._pages.take(ids)
        self._ids[count:before] = ids
        self._count = count
        return _over(pages)

    def _double(self) -> None:
        size = len(self._ids)
        self._pages = np.concatenate([self._pages, np.zeros_like(self._pages)])
        self._ids = np.concatenate([self._ids, np.arange(size, 2 * size, dtype=np.int32)])


def index_table(page_tokens: int, device: torch.device, to_device: ToDevice, pages: int) -> IndexTable:
    """Returns a table for a pool of `pages` pages: in host memory if `device` is the CPU and the C core was built."""
    if device.type == "cpu" and NATIVE is not None:
        return HostIndices(page_tokens, pages)
    return DeviceIndices(page_tokens, device, to_device, pages)
