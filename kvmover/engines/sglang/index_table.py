"""An index table holds the page number of each id where SGLang's indices are, on the device or in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from kvmover.c_core import NATIVE
from kvmover.cache.prefix import PageArray

#: Copies a host row to the device in the current stream, without waiting for it.
ToDevice: TypeAlias = Callable[[npt.NDArray[np.int64]], torch.Tensor]

#: A tensor over a row's memory, in a third of the time of `as_tensor`.
_over: ToDevice = cast(Any, torch).from_numpy


class IndexTable(Protocol):
    """A table of page numbers, token index // `page_tokens`, by page id. `runs`: the ids as slices, if few enough."""

    def write(self, ids: PageArray, runs: list[slice], indices: torch.Tensor, first: int = 0) -> None:
        """Write the page numbers of `indices` [token], from token `first` on, in order of `ids`."""
        ...

    def pages(self, ids: PageArray, runs: list[slice]) -> torch.Tensor:
        """Returns page numbers, int64 [page], in a tensor of the caller's."""
        ...

    def tokens(self, ids: PageArray, runs: list[slice]) -> torch.Tensor:
        """Returns token indices, int64 [token], in a tensor of the caller's."""
        ...

    def double(self) -> None:
        """Make room for twice as many ids."""
        ...


class TensorTable:
    """A table on the device, never read by the host. Work is queued on the current stream."""

    def __init__(self, page_tokens: int, device: torch.device, to_device: ToDevice, ids: int) -> None:
        self._page_tokens, self._to_device = page_tokens, to_device
        self._pages = torch.zeros(ids, dtype=torch.int64, device=device)
        self._within = torch.arange(page_tokens, dtype=torch.int64, device=device)

    def write(self, ids: PageArray, runs: list[slice], indices: torch.Tensor, first: int = 0) -> None:
        """See IndexTable."""
        size = self._page_tokens
        pages = indices[first : first + len(ids) * size : size]
        if len(runs) != 1:
            self._pages.index_copy_(0, self._placed(ids), torch.floor_divide(pages, size).to(torch.int64))
        elif size == 1:
            self._pages[runs[0]] = pages
        else:
            torch.floor_divide(pages, size, out=self._pages[runs[0]])

    def pages(self, ids: PageArray, runs: list[slice]) -> torch.Tensor:
        """See IndexTable."""
        if len(runs) == 1:
            return self._pages[runs[0]].clone()
        if runs:
            return torch.cat([self._pages[each] for each in runs])
        return self._pages.index_select(0, self._placed(ids))

    def tokens(self, ids: PageArray, runs: list[slice]) -> torch.Tensor:
        """See IndexTable."""
        if self._page_tokens == 1:
            return self.pages(ids, runs)
        pages = self._pages[runs[0]] if len(runs) == 1 else self.pages(ids, runs)
        return torch.add(self._within, pages.unsqueeze(1), alpha=self._page_tokens).view(-1)

    def double(self) -> None:
        """See IndexTable."""
        self._pages = torch.cat([self._pages, torch.zeros_like(self._pages)])

    def _placed(self, ids: PageArray) -> torch.Tensor:
        return self._to_device(ids.astype(np.int64))


class HostTable:
    """A table in host memory, for servers without a device: C reads it in less time than a tensor operation begins."""

    def __init__(self, core: Any, page_tokens: int, ids: int) -> None:
        self._core, self._page_tokens = core, page_tokens
        self._pages = np.zeros(ids, np.int64)

    def write(self, ids: PageArray, runs: list[slice], indices: torch.Tensor, first: int = 0) -> None:
        """See IndexTable."""
        row = indices.numpy()
        self._core.keep_pages(self._pages, ids, row[first:] if first else row, self._page_tokens)

    def pages(self, ids: PageArray, runs: list[slice]) -> torch.Tensor:
        """See IndexTable."""
        return _over(self._pages[ids] if len(runs) != 1 else self._pages[runs[0]].copy())

    def tokens(self, ids: PageArray, runs: list[slice]) -> torch.Tensor:
        """See IndexTable."""
        row = np.empty(len(ids) * self._page_tokens, np.int64)
        self._core.page_tokens_of(self._pages, ids, row, self._page_tokens)
        return _over(row)

    def double(self) -> None:
        """See IndexTable."""
        self._pages = np.concatenate([self._pages, np.zeros_like(self._pages)])


def index_table(page_tokens: int, device: torch.device, to_device: ToDevice, ids: int) -> IndexTable:
    """Returns a table of `ids` ids: in host memory if `device` is the CPU and the C core was built."""
    if device.type == "cpu" and NATIVE is not None:
        return HostTable(cast(Any, NATIVE), page_tokens, ids)
    return TensorTable(page_tokens, device, to_device, ids)
