"""WindowPages keeps the pages of sliding windows for SGLang's radix cache, as SGLang's hybrid allocator has them.

There a token has one index, into the pool of full attention. A mapping on the device leads from it to the token's KV in
the pool of the windows, which may be given up alone: then the mapping says 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvmover.engines.sglang.device_indices import DeviceIndices

if TYPE_CHECKING:
    import torch

    from kvmover.cache.prefix import PageArray


class WindowPages:
    """Ids for pages of the windows' pool. Each stands for the full index whose mapping leads to it."""

    def __init__(self, allocator: Any, indices: DeviceIndices) -> None:
        self._allocator, self.indices = allocator, indices

    def __len__(self) -> int:
        """Pages that are kept."""
        return len(self.indices)

    def keep(self, full_indices: torch.Tensor) -> PageArray:
        """New ids for the windows of these tokens, whole pages."""
        return self.indices.keep(full_indices)

    def move(self, ids: PageArray, full_indices: torch.Tensor) -> None:
        """The same window pages are found by other full indices from now on: those of equal tokens."""
        before = self.indices.of(ids)
        pages = self._allocator.translate_loc_from_full_to_swa(before)
        self._allocator.clear_full_to_swa_mapping(before)
        self._allocator.set_full_to_swa_mapping(full_indices, pages)
        self.indices.replace(ids, full_indices)

    def give_back(self, ids: PageArray) -> None:
        """Free these pages. What full indices led to them leads nowhere."""
        if len(ids):
            self._allocator.free_swa_segment(self.indices.of(ids), start_pos=0)
            self.indices.forget(ids)

    def forget(self, ids: PageArray) -> None:
        """As DeviceIndices.forget: the allocator is cleared by whoever asks."""
        self.indices.forget(ids)
