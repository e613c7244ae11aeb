"""An index table leads from the page ids of a prefix tree to SGLang's token indices, on the device or the host."""

from __future__ import annotations

from typing import Any, Protocol, cast

import numpy as np
import torch

from kvmover.c_core import NATIVE
from kvmover.cache.prefix import NO_IDS, PageArray, PrefixError
from kvmover.engines.sglang.device_indices import DeviceIndices, ToDevice


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
    """An IndexTable in host memory, for servers without a device. Each method is one call of the C core.

    No id needs a neighbour here, so the ids that were freed last are given first.
    """

    def __init__(self, page_tokens: int, pages: int) -> None:
        """Allocate a table for `pages` pages, the size of the engine's pool. It grows when it fills up."""
        self._table = cast(Any, NATIVE).PageTable(page_tokens, max(pages, 1))

    def __len__(self) -> int:
        """See IndexTable."""
        return len(self._table)

    def keep(self, indices: torch.Tensor, first: int = 0, stop: int | None = None) -> PageArray:
        """See IndexTable."""
        ids = self._table.keep(indices.numpy(), first, stop)
        return np.frombuffer(ids, np.int32) if ids else NO_IDS

    def of(self, ids: PageArray) -> torch.Tensor:
        """See IndexTable."""
        return _numbers(self._table.tokens(ids))

    def replace(self, ids: PageArray, indices: torch.Tensor) -> None:
        """See IndexTable."""
        self._table.replace(ids, indices.numpy())

    def forget(self, ids: PageArray) -> torch.Tensor:
        """See IndexTable."""
        if len(ids) > len(self._table):
            raise PrefixError(f"{len(ids)} pages to forget, of {len(self._table)} that are kept")
        return _numbers(self._table.forget(ids))


def _numbers(row: bytearray) -> torch.Tensor:
    """Returns a tensor over a row's memory."""
    return torch.frombuffer(row, dtype=torch.int64) if row else torch.empty(0, dtype=torch.int64)


def index_table(page_tokens: int, device: torch.device, to_device: ToDevice, pages: int) -> IndexTable:
    """Returns a table for a pool of `pages` pages: in host memory if `device` is the CPU and the C core was built."""
    if device.type == "cpu" and NATIVE is not None:
        return HostIndices(page_tokens, pages)
    return DeviceIndices(page_tokens, device, to_device, pages)
